"""Two hundred models in one deployment, simulated: how long a planning tick takes. And twenty live: what they cost.

    python -m benchmarks.many [--models 200] [--live 20] [--seconds 60]

Simulated: each model gets two requests per second, and in the middle of the run the rates of ten are multiplied by
twenty. Requests are evenly spaced, so that no other rate changes; or Poisson, so that all rates change all the time. A
tick is timed in three parts. The event loop prepares what the planner has to know, and encodes it for the planner
process, with the traffic that it does not have; the planner makes the plans, beside the loop; and the loop adopts them.
Live: the memory of the server process with a few models and with more, all of them without traffic and therefore
without replicas, and the time of the first answer of a model that has rested.
"""

import gc
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import msgspec

from benchmarks.models import perceptron
from benchmarks.notebook import arguments, publish, quantile, say, server_pid, table, workspace
from sloop.actions import Action, RequestPlan
from sloop.app.load import load_scenario
from sloop.core import Core
from sloop.core.planner import Planner
from sloop.core.views import PlanInput
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml
from sloop.events import Event, Planned
from sloop.load import LoadPlan, run_load
from sloop.serve.planner import PlanSender
from sloop.sim import World, simulate
from sloop.units import NS_PER_MS, NS_PER_S, s
from sloop.workload import trace_of

SYSTEMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "static": {"name": "static", "cores": 1.0},
    "sponge": {"name": "sponge", "criterion": "steady"},
    "vertical-only": {"name": "vertical-only"},
    "fa2": {"name": "fa2", "period_s": 1},
    "mixed": {"name": "mixed"},
    "static, short": {"name": "static", "cores": 1.0},
    "static, short, worth": {"name": "static", "cores": 1.0, "divide": "worth"},
    "static, spare": {"name": "static", "cores": 1.0, "divide": {"name": "max_min", "idle": "replicas"}},
    "vertical-only, short": {"name": "vertical-only"},
    "vertical-only, short, worth": {"name": "vertical-only", "divide": "worth"},
}
"""Each plans every second. Where cores are short, there is half a core for each model, otherwise two: `spare` makes
replicas of those that no plan needs."""
CHANGED: Final = 10
CALM_RPS, BUSY_RPS = 2, 40
SPREADS: Final = {"equal": "ten rates change", "poisson": "all rates change"}
NODE_CORES: Final = 16
TICK_MS_MAX: Final = 50.0
RESTING_BYTES_MAX: Final = 1 << 20
FEW: Final = 2
"""Models of the server that others are compared with."""
REST_S: Final = 2.0
REST_S_MAX: Final = 60.0
PROFILE: Final = {
    "latency_ms": {"form": "amdahl", "gamma": 8.0, "epsilon": 4.0, "delta": 0.2, "eta": 0.5},
    "max_batch": 8,
    "max_cores": 8,
    "load_s": 2,
}


@dataclass(slots=True)
class Tick:
    """One tick: durations in ms, and what the planner process would be sent."""

    at_s: float
    prepare_ms: float
    encode_ms: float
    encoded_bytes: int
    plan_ms: float = 0.0
    adopt_ms: float = 0.0
    cpu_ms: float = 0.0
    """CPU time of all parts: what they would take on a machine without other work."""

    @property
    def loop_ms(self) -> float:
        """How long the event loop is held, in two parts."""
        return self.prepare_ms + self.encode_ms + self.adopt_ms

    @property
    def total_ms(self) -> float:
        return self.loop_ms + self.plan_ms


@dataclass(slots=True)
class TimedCore:
    """A core whose ticks are timed."""

    core: Core
    ticks: list[Tick] = field(default_factory=list)
    _sender: PlanSender = field(default_factory=PlanSender)

    @property
    def wake_ns(self) -> int:
        return self.core.wake_ns

    @property
    def plan_input(self) -> PlanInput | None:
        return self.core.plan_input

    @property
    def planner(self) -> "TimedCore":
        """Itself, to time the planner."""
        return self

    def plan(self, given: PlanInput) -> Planned:
        """What the core's planner plans."""
        planner: Planner = self.core.planner
        begun_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        planned = planner.plan(given)
        self.ticks[-1].plan_ms = passed_ms(begun_ns)
        self.ticks[-1].cpu_ms += (time.process_time_ns() - cpu_ns) / NS_PER_MS
        return planned

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> list[Action]:
        """What the core answers."""
        begun_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        actions = self.core.handle(now_ns, event, more_at_this_instant)
        taken_ms = passed_ms(begun_ns)
        if type(event) is Planned:
            self.ticks[-1].adopt_ms = taken_ms
            self.ticks[-1].cpu_ms += (time.process_time_ns() - cpu_ns) / NS_PER_MS
        if any(type(action) is RequestPlan for action in actions):
            given = self.core.plan_input
            assert given is not None
            begun_ns = time.perf_counter_ns()
            encoded = msgspec.msgpack.encode(self._sender.request_of(given))
            self.ticks.append(Tick(now_ns / NS_PER_S, taken_ms, passed_ms(begun_ns), len(encoded)))
            self.ticks[-1].cpu_ms = (time.process_time_ns() - cpu_ns) / NS_PER_MS
        return actions


def passed_ms(begun_ns: int) -> float:
    return (time.perf_counter_ns() - begun_ns) / NS_PER_MS


def scenario_of(folder: Path, system: str, spread: str, given: Namespace) -> dict[str, Any]:
    """The deployment. `spread` says how the requests of a second arrive."""
    nodes = {"hardware": "custom", "count": given.models // (32 if "short" in system else 8), "cores": NODE_CORES}
    names = [f"m{number}" for number in range(given.models)]
    half = round(given.seconds / 2)
    traces = {}
    for label, rates in (("calm", [CALM_RPS] * 2 * half), ("busy", [CALM_RPS] * half + [BUSY_RPS] * half)):
        path = folder / f"{label}.txt"
        path.write_text("".join(f"{rate}\n" for rate in rates))
        traces[label] = {"file": str(path), "format": "counts", "spread": spread}
    return {
        "name": "many",
        "applications": [
            {"name": name, "slo_ms": 200, "stages": [{"name": "run", "variants": [{"name": "a", "profile": PROFILE}]}]}
            for name in names
        ],
        "cluster": {"nodes": [nodes]},
        "systems": [dict(SYSTEMS[system])],
        "traces": {name: traces["busy" if number < CHANGED else "calm"] for number, name in enumerate(names)},
        "duration_s": given.seconds,
        "seed": given.seed,
    }


def ticks_of(folder: Path, label: str, spread: str, given: Namespace) -> list[Tick]:
    """All ticks of a run but the first three: those load modules and start everything."""
    scenario = load_scenario(scenario_of(folder, label, spread, given))
    world = World.from_scenario(scenario)
    timed = TimedCore(world.setup().core())
    gc.disable()  # the simulated world's objects are not what a server has
    simulate(world, core=timed, check_first=0)
    gc.enable()
    return timed.ticks[3:]


def simulated(folder: Path, given: Namespace) -> Iterator[tuple[object, ...]]:
    """One row for each system and kind of arrivals."""
    for spread, label in ((spread, label) for spread in SPREADS for label in SYSTEMS):
        say(f"{label}, {given.models} models, {spread}")
        ticks = ticks_of(folder, label, spread, given)
        changed = [tick for tick in ticks if given.seconds / 2 <= tick.at_s < given.seconds / 2 + 5]
        longest = max(tick.total_ms for tick in changed)
        yield (
            *(
                SPREADS[spread],
                label,
                quantile([tick.total_ms for tick in ticks], 0.5),
                longest,
                longest <= TICK_MS_MAX,
                max(tick.cpu_ms for tick in changed),
            ),
            *(max(tick.prepare_ms + tick.encode_ms for tick in changed), max(tick.plan_ms for tick in changed)),
            *(max(tick.adopt_ms for tick in changed), max(tick.encoded_bytes for tick in changed)),
        )


COLUMNS: Final = (
    *("", "system", "tick p50, ms", "longest after the change, ms", "≤ 50 ms", "most CPU, ms"),
    "in the loop: prepare, ms",
    *("beside: plan, ms", "in the loop: adopt, ms", "bytes to the planner"),
)


# Live


def deployment_of(folder: Path, model: Path, count: int) -> Path:
    """A deployment of `count` models that rest soon."""
    path = folder / f"{count}.yaml"
    applications = [
        {
            "name": f"m{number}",
            "slo_ms": 1000,
            "rest_after_s": REST_S,
            "stages": [{"name": "run", "model": model.name, "profile": PROFILE}],
        }
        for number in range(count)
    ]
    system = {"name": "static", "cores": 0.05, "batch_max": 4}
    dump_yaml(path, {"name": f"many-{count}", "applications": applications, "system": system})
    return path


def resting(folder: Path, model: Path, count: int) -> tuple[int, float]:
    """Bytes of memory of a server whose `count` models all rest, and the seconds of the first answer of one of them."""
    say(f"{count} models, live")
    with serving(deployment_of(folder, model, count), folder / f"state-{count}") as where:
        until_s = time.monotonic() + REST_S_MAX
        while any(state != "resting" for state in states_of(where.http)):
            if time.monotonic() > until_s:
                raise TimeoutError(f"not all models rest after {REST_S_MAX:g} s: {states_of(where.http)}")
            time.sleep(0.5)
        memory_bytes = pss_bytes(server_pid())
        one = trace_of([0], duration_ns=s(1), name="one", provenance="assumed: one request")
        answer = run_load(LoadPlan(where.http, "m0", one, slo_ms=30_000.0))
        if not answer.ok:
            raise RuntimeError(f"a resting model did not answer: {answer}")
        return memory_bytes, (answer.mean_ms or 0.0) / 1e3


def states_of(url: str) -> Sequence[str]:
    """The state of each model."""
    with urlopen(f"{url}/v2/models", timeout=5) as answer:
        return [model["state"] for model in json.load(answer)["models"]]


def pss_bytes(pid: int) -> int:
    """The memory of a process; what it shares with others counts in part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this system does not tell a process's memory")


def live(folder: Path, given: Namespace) -> list[tuple[str, object]]:
    """Memory and first answer of resting models."""
    model = perceptron(folder, width=64, layers=2)
    few_bytes, _ = resting(folder, model, FEW)
    many_bytes, answer_s = resting(folder, model, FEW + given.live)
    each_bytes = (many_bytes - few_bytes) / given.live
    return [
        (f"server with {FEW} resting models, MiB", few_bytes / (1 << 20)),
        (f"server with {FEW + given.live}, MiB", many_bytes / (1 << 20)),
        ("one more resting model, KiB", each_bytes / (1 << 10)),
        ("under 1 MiB", each_bytes < RESTING_BYTES_MAX),
        ("first answer of a model that has rested, s", answer_s),
    ]


def main() -> None:
    parser = arguments(__doc__, seconds=60, quick=20)
    parser.add_argument("--models", type=int, default=200, help="simulated models (default 200)")
    parser.add_argument("--live", type=int, default=20, help="live models (default 20)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        rows = list(simulated(folder, given))
        served = live(folder, given)
    text = "\n\n".join(
        [
            f"{given.models} models of one stage on nodes of {NODE_CORES} cores, {CALM_RPS:g} requests/s each; after "
            f"{given.seconds / 2:g} s the rates of {CHANGED} grow to {BUSY_RPS:g}. Longest of the ticks in the five "
            "seconds from then on.",
            table(COLUMNS, rows),
            f"{given.live} tiny models, live, all at rest for lack of traffic:",
            table(("", ""), served),
        ]
    )
    publish("many", "Two hundred models in one deployment", text, write=not given.no_write)


if __name__ == "__main__":
    main()
