"""A model is replaced by a new version again and again under load: is any request lost, does attainment fall?

    python -m benchmarks.replacements [--count 50] [--every 5] [--load 0.5]

A server process with real workers gets Poisson requests at a share of its capacity, first without replacements, then
while `sloop deploy` replaces the model every few seconds: each time a version of another file, whose replicas start
beside the old ones. The clients' records are compared with the server's log, request by request; the simulator's
checkers check the log, and it is replayed.
"""

import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.models import small
from benchmarks.notebook import arguments, publish, quantile, say, table, workspace
from benchmarks.request_audit import Numbering, account, check, check_rows
from benchmarks.watch import wait_ready
from sloop.actions import Rollout, VersionState
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml
from sloop.load import Delivery, LoadPlan, LoadResult, run_load
from sloop.profile.measure import measure
from sloop.profile.profile import Profile, path_beside, save_profile
from sloop.runlog import read_log
from sloop.serve.control.orders import Deploy, find_server, send
from sloop.serve.cpu_quota import confined
from sloop.workload import trace_from

SLO_MS: Final = 250.0
CORES: Final = 0.5
"""Of the replica; a new version's has as many again while both run."""
BATCHES: Final = (1, 2, 4, 8)
BOUND: Final = 0.99


class Run(Struct, frozen=True):
    """What was measured."""

    rate_rps: float
    before: LoadResult
    during: LoadResult
    deploy_s: list[float]
    """From the order of each replacement until the new version serves."""
    good: int
    """Replacements after which the new version served."""
    records: Path
    log: Path


def capacity_rps(profile: Profile) -> float:
    """The most requests per second of a replica, according to its profile."""
    return max(1e3 * batch / profile.latency_ms.latency_ms(batch, CORES) for batch in BATCHES)


def replace_often(folder: Path, state: Path, given: Namespace) -> tuple[list[float], int]:
    """Replace the model every `given.every` seconds; returns how long each took, and how many served."""
    path, took_s, good = find_server(state), [], 0
    start_s = time.monotonic()
    for number in range(given.count):
        time.sleep(max(0.0, start_s + number * given.every - time.monotonic()))
        ordered_s = time.monotonic()
        done = send(path, Deploy(str((folder / f"app-{number % 2}.yaml").absolute())), lambda _: None)
        took_s.append(time.monotonic() - ordered_s)
        good += done.is_good
        if number % 10 == 9:
            say(f"{number + 1} replacements")
    return took_s, good


def run(folder: Path, given: Namespace) -> Run:
    """Send the load without and with replacements."""
    say("profile")
    model, other = small(folder, "squeezenet", 128), folder / "other.onnx"
    other.write_bytes(model.read_bytes())
    profile = measure(model, batches=BATCHES, cores=(CORES,), seconds=0.5, passes=1, limit=confined)
    for number, each in enumerate((model, other)):
        save_profile(profile, path_beside(each))
        described = {
            "name": "replaced",
            "slo_ms": SLO_MS,
            "stages": [{"name": "classify", "model": each.name}],
            "system": {"name": "static", "replicas": 1, "cores": CORES},
        }
        dump_yaml(folder / f"app-{number}.yaml", described)
    rate = given.load * capacity_rps(profile)
    records, state = folder / "records.jsonl", folder / "state"
    numbering = Numbering()

    def load(url: str, seconds: float, to: Path) -> LoadResult:
        span = {"seed": given.seed, "duration_s": seconds, "folder": folder}
        plan = LoadPlan(
            url=url,
            model="replaced",
            arrivals=trace_from({"kind": "poisson", "rate": rate}, **span),
            slo_ms=SLO_MS,
            link=numbering,
            delivery=Delivery.ATTACH,
            records=to,
        )
        return run_load(plan)

    with serving(folder / "app-0.yaml", state) as where:
        wait_ready(where.http, 1)
        say(f"{rate:.1f} requests/s for {given.seconds:g} s without replacements")
        before = load(where.http, given.seconds, folder / "before.jsonl")
        found: list[tuple[list[float], int]] = []
        worker = threading.Thread(target=lambda: found.append(replace_often(folder, state, given)))
        say(f"{given.count} replacements, one every {given.every:g} s")
        worker.start()
        during = load(where.http, given.count * given.every, folder / "during.jsonl")
        worker.join()
    records.write_bytes((folder / "before.jsonl").read_bytes() + (folder / "during.jsonl").read_bytes())
    return Run(rate, before, during, *found[0], records, Path(where.log))


def main() -> None:
    parser = arguments(__doc__, seconds=60, quick=10)
    parser.add_argument("--count", type=int, default=50, help="replacements (default 50)")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two of them (default 5)")
    parser.add_argument("--load", type=float, default=0.5, help="share of the capacity (default 0.5)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        found = run(folder, given)
        books, (complaint, played) = account(found.records, found.log), check(found.log)
        rollouts = [record for _, record in read_log(found.log) if isinstance(record, Rollout)]
    retired = sum(each.state is VersionState.RETIRED for each in rollouts)
    before, during = found.before.attainment or 0.0, found.during.attainment or 0.0
    rows = [
        *books.rows(),
        ("replacements after which the new version served", f"{found.good} of {given.count}"),
        ("versions retired", retired),
        ("attainment without replacements, %", 100 * before),
        ("attainment while it is replaced, %", 100 * during),
        (f"at least {BOUND:.0%} of that without", during >= BOUND * before),
        ("p50 / p99 without, ms", f"{found.before.p50_ms:.3g} / {found.before.p99_ms:.3g}"),
        ("p50 / p99 while it is replaced, ms", f"{found.during.p50_ms:.3g} / {found.during.p99_ms:.3g}"),
        ("from the order until the version serves, s, p50 / max", spread(found.deploy_s)),
        *check_rows(complaint, played),
    ]
    text = "\n\n".join(
        [
            f"SqueezeNet on images of 128 × 128, system static, one replica of {CORES:g} cores, {found.rate_rps:.1f} "
            f"requests/s (Poisson), {given.load:.0%} of its capacity, deadline {SLO_MS:g} ms. A new version every "
            f"{given.every:g} s; its replica starts beside the old one, which serves until the new one is ready.",
            table(("", "found"), rows),
        ]
    )
    publish("replacements", "A model replaced under load", text, write=not given.no_write)


def spread(values: list[float]) -> str:
    return f"{quantile(values, 0.5):.3g} / {max(values):.3g}"


if __name__ == "__main__":
    main()
