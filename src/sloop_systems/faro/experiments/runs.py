"""A simulated run of Faro, of a system that it is compared with, or of ours, on a cluster of workers.

Applications get the recorded requests of each minute, at independent uniform instants within it. A worker is one core
and serves one request at a time. Figures leave out the first minutes of a run, in which every system starts with one
worker an application. Source: Jeon et al., Faro, EuroSys 2025, and the settings in its repository.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct

from sloop.api import GIB, NS_PER_MS, InputError, Node, Outcome, ReplicaId, Request, RequestId
from sloop.api.experiments import (
    Application,
    Clients,
    ColdStartTruth,
    Deployment,
    End,
    Estimates,
    Record,
    ServiceTruth,
    Stage,
    StartWorker,
    SystemChoice,
    Trace,
    Truth,
    Variant,
    WorkerLost,
    WorkerStopped,
    World,
    seed_of,
    simulate,
    trace_of,
)
from sloop.api.profiles import LatencyTable, Profile
from sloop_systems.comparison.harness import RunResult, Trial
from sloop_systems.faro.published import PERCENTILE, PUBLICATION, QUEUE_MAX, STEP_NS

FOLDER: Final = "beomyeol__faro"
TEN, HUNDRED = "ten_jobs.csv", "100_jobs.csv"
SERVICE_MS, SMALL_MS = 180.0, 100.0
"""What policies believe that a request takes. In the repository's simulator it takes less, and not always the same: a
lognormal time with a mean of 154 ms, of which the following are the mean and the coefficient of variation."""
BELIEVED_OVER_TRUE, VARIATION = 1.167, 0.215
SLO_TIMES: Final = 4.0
"""The deadline is so many times the duration of a request: 720 ms, and 400 ms for the smaller model."""
START_S: Final = 65.0
WARM_MIN: Final = 7
"""Minutes at the beginning that do not count: until what the second forecast asked for has started."""
CHECKED: Final = 20_000
"""Records that the checkers see of the first seed."""
HARDWARE: Final = "worker"

EFFECTIVE: Final = ((0.01, 1.0), (0.05, 0.75), (0.1, 0.5), (1.0, 0.0))
"""The part of the utility that counts, by the part of the requests that are refused (the evaluation's steps)."""


class FaroResult(RunResult, frozen=True, kw_only=True):
    """The figures of a run; `violations` are late or unanswered requests in % of all."""

    rate: float
    """The mean of the same percentage over the minutes of all applications: as published."""
    minutes: float
    """Of the minutes of all applications, those whose mean latency was above the deadline, in %."""
    lost: float
    """The utility that is lost, per application: 1 less the mean over minutes of min(1, deadline / P99), where who
    is not answered waits for ever. Published for all applications together."""
    lost_effective: float
    """The same of the answered ones, less the steps of `EFFECTIVE`."""
    refused: float
    """Unanswered requests, in %."""


class FaroTrial(Trial, frozen=True, kw_only=True):
    """One system on one cluster."""

    system: str
    divide: str = ""
    """A divide policy instead of the system's."""
    idle: str = "leave"
    """What that one does with cores that no plan needs."""
    workers: int
    first_min: int
    minutes: int
    """The part of the six hours that is simulated."""
    file: str = TEN
    is_mixed: bool = False
    """Whether every second application, from the first on, has the smaller model."""

    def label(self) -> str:
        with_idle = f" with idle: {self.idle}" if self.idle != "leave" else ""
        return f"{self.divide or self.system}{with_idle}, {self.workers} workers, from minute {self.first_min}"

    def play(self) -> FaroResult:
        """Simulate it."""
        world = world_of(self, read_table(Path(self.data) / FOLDER / self.file))
        latencies = LatencyByMinute([application.name for application in world.applications])
        simulate(world, [latencies], check_first=CHECKED if self.seed == 0 else 0)
        return result_of(self, world, latencies)


def read_table(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Requests by minute and application. InputError for a row that is not one count for each, in order of minutes."""
    header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    names, rows = header.split(","), []
    for minute, line in enumerate(lines):
        cells = line.split(",")
        if len(cells) != len(names) or not all(cell.isdecimal() for cell in cells) or int(cells[0]) != minute:
            what = f"{line[:60]!r} is not minute {minute} and {len(names) - 1} counts"
            raise InputError(what, where=f"{path}:{minute + 2}", help="restore the file of the published table")
        rows.append([int(cell) for cell in cells[1:]])
    if not rows:
        raise InputError("no minute of requests", where=str(path), help="restore the file of the published table")
    return np.array(rows)


def world_of(trial: FaroTrial, table: np.ndarray[Any, np.dtype[np.int64]]) -> World:
    """The trial as a world of the simulator. InputError if the table ends before it."""
    counts = table[trial.first_min : trial.first_min + trial.minutes]
    if len(counts) < trial.minutes:
        raise InputError(
            f"the table has {len(table)} minutes", help=f"minute {trial.first_min + trial.minutes} is wanted"
        )
    cluster = (Node("cluster", HARDWARE, float(trial.workers), trial.workers * GIB),)
    system = SystemChoice(trial.system, parameters=parameters_of(trial, counts.shape[1]))
    applications = tuple(
        Application(
            name=f"a{place}",
            slo_ms=SLO_TIMES * service_ms,
            stages=(Stage("model", (Variant("v", profile=profile_of(service_ms)),)),),
            system=system,
            cluster=cluster,
            estimates=Estimates(correct=False),
        ).qualified()
        for place, service_ms in enumerate(services_ms(trial, counts.shape[1]))
    )
    clients = {
        each.name: Clients(trace_by_minute(own.tolist(), seed_of(trial.seed, f"minutes of {each.name}")))
        for each, own in zip(applications, counts.T, strict=True)
    }
    truth = Truth(
        service=ServiceTruth(ratio=BELIEVED_OVER_TRUE, cv=VARIATION), cold_start=ColdStartTruth(start_s=START_S)
    )
    return World(
        trial.seed, Deployment("jobs", applications, system, cluster), clients, trial.minutes * STEP_NS, truth=truth
    )


def services_ms(trial: FaroTrial, count: int) -> list[float]:
    """How long a request of each application takes."""
    return [SMALL_MS if trial.is_mixed and place % 2 == 0 else SERVICE_MS for place in range(count)]


def parameters_of(trial: FaroTrial, count: int) -> dict[str, Any]:
    """What differs from the system's own policies. A static system has equally many workers for each, and the queue of
    the publication."""
    if trial.divide:
        return {"divide": {"name": trial.divide, "idle": trial.idle}}
    if trial.system != "static":
        return {}
    queue = {"order": "fifo", "drop": "never", "admit": {"name": "bounded", "queue_max": QUEUE_MAX}}
    return {"replicas": trial.workers // count, "batch_max": 1, **queue}


def profile_of(service_ms: float) -> Profile:
    """A model that takes a core and this time for each request."""
    return Profile(
        latency_ms=LatencyTable({1: {1: service_ms}}),
        max_batch=1,
        max_cores=1,
        load_s=START_S,
        hardware=HARDWARE,
        origin="published",
        source=PUBLICATION,
    )


def trace_by_minute(counts: Sequence[int], seed: int) -> Trace:
    """So many requests in each minute, at uniform instants: a Poisson process, given its counts."""
    random = np.random.default_rng(seed)
    times = [at * STEP_NS + np.sort(random.integers(0, STEP_NS, count)) for at, count in enumerate(counts) if count > 0]
    joined = np.concatenate(times) if times else np.zeros(0, dtype=np.int64)
    return trace_of(
        joined.tolist(), duration_ns=len(counts) * STEP_NS, name="minutes", provenance=f"published: {PUBLICATION}"
    )


class LatencyByMinute:
    """A sink: of each application and minute in which requests were sent, their latencies; infinite if unanswered."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: place for place, name in enumerate(names)}
        self._open: dict[RequestId, tuple[int, int]] = {}
        self.latencies_ms: dict[tuple[int, int], list[float]] = {}
        """By application and minute."""
        self._since_ns: dict[ReplicaId, int] = {}
        self._core_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if type(record) is Request:
            self._open[record.id] = self._place[record.application], record.sent_ns
        elif type(record) is End:
            place, sent_ns = self._open.pop(record.request)
            is_answered = record.outcome in ANSWERED
            own = self.latencies_ms.setdefault((place, sent_ns // STEP_NS), [])
            own.append((now_ns - sent_ns) / NS_PER_MS if is_answered else np.inf)
        elif isinstance(record, StartWorker):
            self._since_ns[record.worker] = now_ns
        elif isinstance(record, WorkerStopped | WorkerLost):
            self._core_ns += now_ns - self._since_ns.pop(record.worker, now_ns)

    def cores(self, end_ns: int) -> float:
        """The mean number of workers from the beginning, each of which has a core."""
        return (self._core_ns + sum(end_ns - since_ns for since_ns in self._since_ns.values())) / end_ns


ANSWERED: Final = frozenset({Outcome.SERVED, Outcome.LATE})


class MinuteFigures(Struct, frozen=True):
    """Of the requests of one application in one minute."""

    requests: int
    late: int
    """Or unanswered."""
    refused: int
    is_slow: bool
    """Whether the mean latency of the answered ones is above the deadline, or there are none."""
    utility: float
    effective: float


def figures_of(latencies_ms: Sequence[float], slo_ms: float) -> MinuteFigures:
    """The figures of a minute with at least one request."""
    own = np.array(latencies_ms)
    answered = own[np.isfinite(own)]
    refused = (len(own) - len(answered)) / len(own)
    part = next(part for most, part in EFFECTIVE if refused <= most)
    return MinuteFigures(
        len(own),
        int((own > slo_ms).sum()),
        len(own) - len(answered),
        not len(answered) or float(answered.mean()) > slo_ms,
        min(1.0, slo_ms / float(np.quantile(own, PERCENTILE, method="higher"))),
        part * min(1.0, slo_ms / float(np.quantile(answered, PERCENTILE))) if len(answered) else 0.0,
    )


def result_of(trial: FaroTrial, world: World, seen: LatencyByMinute) -> FaroResult:
    """The figures of all minutes that count."""
    slos_ms = [application.slo_ms for application in world.applications]
    found = [
        figures_of(own, slos_ms[place])
        for (place, minute), own in sorted(seen.latencies_ms.items())
        if minute >= WARM_MIN
    ]
    requests = sum(each.requests for each in found)
    slots = len(slos_ms) * (trial.minutes - WARM_MIN)
    """Minutes without requests lose nothing."""
    return FaroResult(
        violations=100.0 * sum(each.late for each in found) / requests,
        cores=seen.cores(world.duration_ns),
        rate=100.0 * sum(each.late / each.requests for each in found) / len(found),
        minutes=100.0 * sum(each.is_slow for each in found) / len(found),
        lost=sum(1 - each.utility for each in found) / slots,
        lost_effective=sum(1 - each.effective for each in found) / slots,
        refused=100.0 * sum(each.refused for each in found) / requests,
    )
