"""A hundred in-place resizes under HTTP load: requests lost, time of a resize, service times compared with the profile.

    python -m benchmarks.resizes [--seconds 60] [--rate 80] [--period-ms 500] [MODEL.onnx]

One server has one worker; a scaling policy for this test gives the worker another, random number of cores in each
period. The service times in the server's log are compared with a profile per core count, separately for the first batch
after each resize. The clients' records are compared with the log, request by request. `benchmarks.resize` does the same
without a server, with only a worker and its backend.
"""

import asyncio
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import ClassVar, Final

import uvloop
from msgspec import Struct

from benchmarks.notebook import arguments, publish, quantile, say, table, workspace
from benchmarks.request_audit import Numbering, Rows, account, check, check_rows
from sloop.actions import ResizeWorker, StartBatch, StartWorker
from sloop.app.load import load_application
from sloop.core.protocols import Scale
from sloop.core.views import ClusterView
from sloop.demo.run import squeezenet
from sloop.events import Finished, WorkerLost, WorkerResized
from sloop.load import Delivery, LoadPlan, LoadResult, run_load
from sloop.policies import targets
from sloop.profile.fit import fit_table, points_p50
from sloop.profile.measure import measure
from sloop.profile.profile import Latency, path_beside, save_profile
from sloop.report.tables import Cell
from sloop.runlog import read_log
from sloop.serve.control.servables import servables_of
from sloop.serve.cpu_quota import confined
from sloop.serve.server import SWITCH_S, Settings, serving
from sloop.systems.setup import Setup, set_up
from sloop.units import ms, to_ms
from sloop.vocabulary import BatchId, Plan
from sloop.workload import trace_from

CORES: Final = (0.25, 0.5, 0.75, 1.0, 1.5)
BATCHES: Final = (1, 2, 4)
SLO_MS: Final = 1000.0
TARGET_MS: Final = 20.0


@dataclass(frozen=True, slots=True)
class RandomResizes(Scale):
    """A scaling policy for this test only: the replica gets the next number in `cores` every period."""

    cores: tuple[float, ...]
    period_ns: int
    is_quick: ClassVar[bool] = True

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        stage = targets.one_stage(view, "restless")
        cores = self.cores[now_ns // self.period_ns % len(self.cores)]
        target = targets.equal_replicas(stage, targets.belief_of(stage), count=1, cores=cores, batch_max=max(BATCHES))
        return Plan((target,), f"restless: {cores:g} cores"), None


def random_cores(seed: int, count: int) -> tuple[float, ...]:
    """Random core counts, never the same twice in a row."""
    chance, found = Random(seed), [1.0]
    while len(found) < count:
        found.append(chance.choice([cores for cores in CORES if cores != found[-1]]))
    return tuple(found)


def setup_of(folder: Path, model: Path, given: Namespace) -> Setup:
    """The application under the scaling policy of this test."""
    declared = {"name": "resized", "slo_ms": SLO_MS, "stages": [{"name": "classify", "model": str(model.absolute())}]}
    setup = set_up(load_application(declared, folder=folder))
    steps = round(given.seconds * 1e3 / given.period_ms) + 100  # what the start takes comes before the load
    scale = RandomResizes(random_cores(given.seed, steps), ms(given.period_ms))
    (only,) = setup.applications
    system = replace(only.system, name="restless", policies=replace(only.system.policies, scale=scale))
    return replace(setup, applications=(replace(only, system=system),))


async def run(folder: Path, setup: Setup, given: Namespace) -> tuple[LoadResult, Path]:
    """Serve in this process, send the load from another."""
    settings = Settings(http_port=0, grpc_port=0, state_folder=folder / "state")
    async with serving(setup, servables_of(setup.application, folder / "state"), settings) as server:
        while server.insight.server_readiness().why:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        plan = LoadPlan(
            url=f"http://{server.host}:{server.http_port}",
            model=setup.application.name,
            arrivals=trace_from(
                {"kind": "poisson", "rate": given.rate}, seed=given.seed, duration_s=given.seconds, folder=folder
            ),
            slo_ms=SLO_MS,
            link=Numbering(),
            delivery=Delivery.ATTACH,
            records=folder / "records.jsonl",
        )
        result = await asyncio.to_thread(run_load, plan)
    return result, folder / "state"


class MeasuredBatch(Struct, frozen=True):
    """A batch and the number of cores on which it ran."""

    cores: float
    size: int
    service_ms: float
    is_first: bool
    """Since the last resize came into effect."""


class ResizeLog(Struct, frozen=True):
    """The resizes and batches in the log."""

    effect_ms: list[float]
    ran: list[MeasuredBatch]
    starts: int
    lost: int


def read(log: Path) -> ResizeLog:
    """Read the log, without the batches during which a resize was ordered or came into effect: they ran on two
    counts."""
    orders: list[int] = []
    effect_ms, ran = [], []
    started: dict[BatchId, tuple[int, bool]] = {}
    cores, is_first, starts, lost = 0.0, False, 0, 0
    for now_ns, record in read_log(log):
        if isinstance(record, StartWorker):
            starts, cores = starts + 1, record.spec.cores
        elif isinstance(record, ResizeWorker):
            orders.append(now_ns)
            started.clear()
        elif isinstance(record, WorkerResized) and orders:
            effect_ms.append(to_ms(now_ns - orders.pop(0)))
            cores, is_first = record.cores, True
            started.clear()
        elif isinstance(record, StartBatch) and not orders:
            started[record.batch] = (len(record.requests), is_first)
            is_first = False
        elif isinstance(record, Finished) and record.batch in started:
            size, first = started.pop(record.batch)
            ran.append(MeasuredBatch(cores, size, to_ms(record.service_ns), first))
        elif isinstance(record, WorkerLost):
            lost += 1
    return ResizeLog(effect_ms, ran, starts, lost)


def by_cores(ran: Sequence[MeasuredBatch], promised: Latency) -> list[tuple[Cell, ...]]:
    """Per core count: the profiled time of a batch of 1, and the median of measured over profiled times of all
    batches."""
    ratios: dict[tuple[float, bool], list[float]] = defaultdict(list)
    for batch in ran:
        ratio = batch.service_ms / promised.latency_ms(batch.size, batch.cores)
        ratios[batch.cores, batch.is_first].append(ratio)
    rows: list[tuple[Cell, ...]] = []
    for cores in CORES:
        first, later = ratios[cores, True], ratios[cores, False]
        counts = (len(first) + len(later), promised.latency_ms(1, cores))
        medians = (quantile(later, 0.5), quantile(later, 0.1), quantile(later, 0.9), quantile(first, 0.5))
        rows.append((cores, *counts, *medians, len(first)))
    return rows


def report(given: Namespace, promised: Latency, seen: ResizeLog, clients: LoadResult, checked: Rows) -> str:
    """The text of the page."""
    effect = [quantile(seen.effect_ms, share) for share in (0.5, 0.99, 1.0)]
    within = sum(taken_ms <= TARGET_MS for taken_ms in seen.effect_ms)
    attainment = clients.attainment
    rows: list[tuple[str, Cell]] = [
        *checked,
        ("attainment seen by clients, %", None if attainment is None else 100 * attainment),
        ("resizes", len(seen.effect_ms)),
        ("from the order to its effect, ms, p50 / p99 / max", " / ".join(f"{value:.3g}" for value in effect if value)),
        (f"within {TARGET_MS:g} ms", f"{within} of {len(seen.effect_ms)}"),
        ("processes started / lost", f"{seen.starts} / {seen.lost}"),
    ]
    columns = ("cores", "batches", "batch of 1, promised ms", "measured / promised, p50", "p10", "p90")
    return "\n\n".join(
        [
            f"One replica, {given.rate:g} requests/s (Poisson) over HTTP for {given.seconds:g} s; every "
            f"{given.period_ms:g} ms it gets other cores, at random from {', '.join(f'{c:g}' for c in CORES)}.",
            table(("", "found"), rows),
            "Service times against the profile (medians) measured before: batches that ran on one core count from "
            "beginning to end, and those of them that were the first after a resize. A quota is for a period of 10 ms: "
            "a batch that finds an unspent one, or the larger one of before a resize, is up to a period early.",
            table((*columns, "first after a resize, p50", "of them"), by_cores(seen.ran, promised)),
        ]
    )


def profiled(model: Path) -> Latency:
    """Profile the model and write the profile next to it; the table of its medians."""
    profile = measure(model, batches=BATCHES, cores=CORES, seconds=0.6, passes=1, limit=confined)
    save_profile(profile, path_beside(model))
    return fit_table(points_p50(profile.samples)).params


def main() -> None:
    parser = arguments(__doc__, seconds=60, quick=15)
    parser.add_argument("model", nargs="?", type=Path, help="a model whose batch size is free [default: SqueezeNet]")
    parser.add_argument("--rate", type=float, default=80.0, help="requests per second (default 80)")
    parser.add_argument("--period-ms", type=float, default=500.0, help="time between resizes (default 500)")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        model = given.model or squeezenet(folder)
        say("profile")
        promised = profiled(model)
        say(f"{given.rate:g} requests/s for {given.seconds:g} s")
        sys.setswitchinterval(SWITCH_S)
        result, log = uvloop.run(run(folder, setup_of(folder, model, given), given))
        books = account(folder / "records.jsonl", log)
        checked = check_rows(*check(log, setup_of(folder, model, given)))
        text = report(given, promised, read(log), result, [*books.rows(), *checked])
    publish("resizes", "WorkerResized in place under load", text, write=not given.no_write)


if __name__ == "__main__":
    main()
