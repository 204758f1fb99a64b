"""Does a scaling policy that thinks for a second every second delay requests?

    python -m benchmarks.planning [--seconds 12] [--rounds 6] [--rate 60]

Three systems serve the same small model under the same load in turn: `static`; the same plan after a second of
computing, made by the planner process beside the event loop; and, for comparison, the same within the event loop, as if
its author had declared it quick (one round). p99 is that of the clients. The machine's speed drifts, so the systems
take turns in rounds, and each round's p99 is compared with that of `static` in the same round.
"""

import math
from argparse import Namespace
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
from msgspec import Struct

from benchmarks.models import small
from benchmarks.notebook import arguments, publish, quantile, say, table, workspace
from benchmarks.watch import wait_ready
from sloop.actions import RequestPlan
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml
from sloop.events import Planned
from sloop.load import LoadPlan, run_load
from sloop.profile.measure import measure
from sloop.profile.profile import path_beside, save_profile
from sloop.runlog import read_log
from sloop.serve.cpu_quota import confined
from sloop.systems.replay import rebuild, replay_log
from sloop.units import to_ms
from sloop.workload import trace_from

SLO_MS: Final = 500.0
CORES: Final = 0.75
THINKING: Final = '''
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from sloop.policies.scale.static import Static
from sloop.systems.catalogue import SYSTEMS
from sloop.systems.system import System


@dataclass(frozen=True, slots=True)
class Thinking(Static):
    """The plan of `Static` after a second of computing."""

    is_quick: ClassVar[bool] = {is_quick}

    def plan(self, now_ns, view, memory):
        end_ns = time.thread_time_ns() + 1_000_000_000
        while time.thread_time_ns() < end_ns:
            pass
        return Static.plan(self, now_ns, view, memory)


policies = replace(SYSTEMS["static"].policies, scale=Thinking())
SYSTEM = System("thinking", "system", "benchmarks/planning.py", policies)
'''
BESIDE, INSIDE = "thinks beside the loop", "thinks within the loop"


class Answer(Struct, frozen=True):
    """The part of a line of the load generator's records that is used here."""

    latency_ms: float
    status: int


class Figures(Struct):
    """What was measured under one system."""

    p99_ms: list[float]
    """Of each round; infinite if no request was answered."""
    all_ms: list[float]
    """The latencies of all rounds."""
    sent: int = 0
    answered: int = 0
    plans: int = 0
    plan_ms: list[float] = []  # msgspec copies the empty list for each instance
    """From the request of a plan to its arrival."""
    replays: bool = True


def systems_in(folder: Path) -> dict[str, str]:
    """The systems to compare, by label: a name or the path of a file."""
    found = {"static": "static"}
    for label, is_quick in ((BESIDE, False), (INSIDE, True)):
        path = folder / f"thinking_{'inside' if is_quick else 'beside'}.py"
        path.write_text(THINKING.format(is_quick=is_quick))
        found[label] = str(path)
    return found


def run(folder: Path, label: str, system: str, model: Path, given: Namespace, figures: Figures) -> None:
    """One round of one system."""
    app, records, state = folder / "app.yaml", folder / "records.jsonl", folder / "state"
    chosen = {"name": system, "replicas": 1, "cores": CORES}
    stage = {"name": "classify", "model": model.name}
    dump_yaml(app, {"name": "planning", "slo_ms": SLO_MS, "stages": [stage], "system": chosen})
    with serving(app, state) as where:
        wait_ready(where.http, 1)
        span = {"seed": given.seed, "duration_s": given.seconds, "folder": folder}
        plan = LoadPlan(
            url=where.http,
            model=where.application,
            arrivals=trace_from({"kind": "poisson", "rate": given.rate}, **span),
            slo_ms=SLO_MS,
            records=records,
        )
        result = run_load(plan)
    lines = msgspec.json.Decoder(Answer).decode_lines(records.read_bytes())
    figures.all_ms += [line.latency_ms for line in lines if line.status == HTTPStatus.OK]
    figures.sent += result.sent
    figures.answered += result.ok + result.late
    figures.p99_ms.append(math.inf if result.p99_ms is None else result.p99_ms)
    log = read_log(Path(where.log))
    asked_ns: dict[int, int] = {}
    for now_ns, record in log:
        if isinstance(record, RequestPlan):
            asked_ns[record.number] = now_ns
        elif isinstance(record, Planned) and record.number in asked_ns:
            figures.plans += 1
            figures.plan_ms.append(to_ms(now_ns - asked_ns[record.number]))
    if label != INSIDE:  # its replay would take as long as the run
        replayed = replay_log(log, rebuild(log.header).core(), definitions=log.header.definitions)
        figures.replays = figures.replays and replayed.difference is None
    say(f"{label}: p99 {figures.p99_ms[-1]:.1f} ms, {len(asked_ns)} plans asked for")


def main() -> None:
    parser = arguments(__doc__, seconds=12, quick=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second (default 60)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        model = small(folder, "squeezenet", 128)
        say("profile")
        profile = measure(model, batches=(1, 2, 4, 8), cores=(CORES,), seconds=0.5, passes=1, limit=confined)
        save_profile(profile, path_beside(model))
        systems = systems_in(folder)
        figures = {label: Figures([], []) for label in systems}
        for number in range(given.rounds):
            order = list(systems.items())
            for label, system in order[number % 3 :] + order[: number % 3]:
                if label != INSIDE or not number:  # its backlog takes half a minute, and once shows it
                    run(folder, label, system, model, given, figures[label])
    base = figures["static"]
    rows = []
    for label, found in figures.items():
        ratios = [p99 / own for p99, own in zip(found.p99_ms, base.p99_ms, strict=False)]
        p99_ms = quantile(found.all_ms, 0.99)
        rows.append(
            (
                *(label, found.sent, found.answered, quantile(found.all_ms, 0.5), p99_ms),
                p99_ms / (quantile(base.all_ms, 0.99) or math.inf) if p99_ms else None,
                f"{median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})",
                quantile(found.plan_ms, 0.5),
                None if label == INSIDE else found.replays,
            )
        )
    columns = (
        *("system", "sent", "answered", "p50 ms", "p99 ms", "p99 / static's"),
        *("of rounds: median (range)", "from request to plan, p50 ms", "log replays"),
    )
    text = "\n\n".join(
        [
            f"SqueezeNet on images of 128 × 128, one replica of {CORES:g} cores, {given.rate:g} requests/s (Poisson), "
            f"{given.rounds} rounds of {given.seconds:g} s each. The policy computes for a second of CPU time every "
            "second. p99 of all requests, from when they were due; the bound is 1.1 × that of `static`.",
            table(columns, rows),
        ]
    )
    publish("planning", "Requests beside a policy that thinks", text, write=not given.no_write)


if __name__ == "__main__":
    main()
