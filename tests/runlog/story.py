"""A tiny run told by hand: every kind of end, a resize, a lost replica and a plan, in numbers easy to check. And the
words to tell runs of several applications and versions."""

from collections.abc import Mapping
from typing import Any

from sloop.actions import (
    Assigned,
    Decided,
    End,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    VersionState,
)
from sloop.app.graph import Graph, GraphStage
from sloop.events import Cancelled, Finished, WorkerLost, WorkerProgressed, WorkerReady, WorkerResized, WorkerStopped
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile, Quadratic, Region
from sloop.report.explain import KEPT
from sloop.runlog import Record
from sloop.runlog.fold import DeploymentState
from sloop.systems.setup import Setup, build
from sloop.units import ms
from sloop.vocabulary import BatchId, Group, Outcome, Plan, ReplicaId, ReplicaSpec, Request, RequestId, Slot, StagePlan

Rows = list[tuple[int, Record]]

GRAPH = Graph([GraphStage("classify")], slo_ns=ms(200))
SPEC = ReplicaSpec("classify", "small", Slot(2.0), node="n0")


def fresh_state(setup: Setup) -> DeploymentState:
    """The state to explain the log of a setup, which must be fresh too."""
    return DeploymentState(setup.parts(), nodes=setup.deployment.cluster, build=build, kept=KEPT)


def arrived(id: int, sent_ms: float, arrived_ms: float, slo_ms: float = 200) -> tuple[int, Request]:
    """A request's arrival."""
    return ms(arrived_ms), Request(RequestId(id), ms(sent_ms), ms(arrived_ms), ms(sent_ms + slo_ms))


def started(at_ms: float, batch: int, replica: int, *requests: int, stage: str = "classify") -> tuple[int, StartBatch]:
    """A batch's start."""
    return ms(at_ms), StartBatch(BatchId(batch), ReplicaId(replica), stage, tuple(map(RequestId, requests)))


def ended(at_ms: float, id: int, outcome: Outcome, why: str = "", stage: str = "") -> tuple[int, End]:
    """A request's end."""
    return ms(at_ms), End(RequestId(id), outcome, why, stage=stage)


def plan(cores: float, why: str) -> Plan:
    """One replica of `small` on so many cores."""
    return Plan((StagePlan("classify", (Group(ReplicaSpec("classify", "small", Slot(cores)), 1),), 4),), why)


R0, R1 = ReplicaId(0), ReplicaId(1)
STORY: Rows = [
    (0, Decided("plan", "1 replica holds 20 rps", "classify", plan=plan(2, "1 replica holds 20 rps"))),
    (0, StartWorker(R0, SPEC)),
    (ms(10), WorkerProgressed(R0, "loading")),
    (ms(50), WorkerReady(R0)),
    arrived(1, 60, 100),
    started(100, 0, 0, 1),
    arrived(2, 110, 120),
    arrived(3, 110, 130),
    (ms(180), Finished(BatchId(0), R0, ms(78))),
    ended(180, 1, Outcome.SERVED),
    started(180, 1, 0, 2, 3),
    arrived(4, 200, 200),
    ended(200, 4, Outcome.REJECTED, "the queue is full"),
    (ms(330), Finished(BatchId(1), R0, ms(148))),
    ended(330, 2, Outcome.LATE, "20 ms past its deadline"),
    ended(330, 3, Outcome.LATE, "20 ms past its deadline"),
    (ms(1000), Decided("plan", "demand doubled", "classify", plan=plan(4, "demand doubled"))),
    (ms(1000), Decided("resize", "the plan asks for 4 cores", "classify", replica=R0)),
    (ms(1000), ResizeWorker(R0, 4.0)),
    (ms(1050), WorkerResized(R0, 4.0)),
    arrived(5, 1100, 1100),
    started(1100, 2, 0, 5),
    (ms(1200), WorkerLost(R0, "killed")),
    (ms(1200), Decided("retry", "its replica was lost", "classify", replica=R0)),
    (ms(1200), StartWorker(R1, SPEC)),
    (ms(1500), WorkerReady(R1)),
    ended(1500, 5, Outcome.DROPPED, "its deadline passed 200 ms ago"),
    arrived(6, 1600, 1600),
    started(1600, 3, 1, 6),
    (ms(1650), Cancelled(RequestId(6))),
    ended(1650, 6, Outcome.FAILED, "the client went away"),
    (ms(1700), Finished(BatchId(3), R1, ms(99))),
    (ms(1800), StopWorker(R1, "nothing to do")),
    (ms(2000), WorkerStopped(R1)),
    (ms(2500), WorkerProgressed(R1, "gone")),
]


# Several applications and versions


class Parts:
    """A version of an application with one stage, `KEY/only`, and an estimate on each of two kinds of hardware: 40 ms
    on `fast`, 80 ms on `slow`. Application `a` has 100 ms, all others 50 ms."""

    def __init__(self, name: str, version: str = "1", definition: Mapping[str, Any] | None = None) -> None:
        self.name, self.version = name, version
        self.key = name if version == "1" else f"{name}@{version}"
        self.stage = f"{self.key}/only"
        self.graph = Graph([GraphStage(self.stage)], slo_ns=ms(100 if name == "a" else 50))
        fast = Profile(latency_ms=Quadratic(0, 0, 40), max_batch=4, max_cores=8, origin="assumed", source="us")
        slow = Profile(
            latency_ms=Quadratic(0, 0, 80), max_batch=4, max_cores=8, origin="measured", measured=Region(1, 1, 1, 8)
        )
        self.beliefs = {
            (self.stage, "v", kind): Estimate(profile, variant="v", hardware=kind, accuracy=0.9 if name == "a" else 70)
            for kind, profile in {"fast": fast, "slow": slow}.items()
        }


Told = tuple[float, Any]
"""A record at so many milliseconds."""


def asks(id: int, at_ms: float, application: str, version: str = "") -> Told:
    """A request, due within 100 ms."""
    return at_ms, Request(RequestId(id), ms(at_ms), ms(at_ms), ms(at_ms + 100), (), application, version)


def goes_to(at_ms: float, id: int, key: str) -> Told:
    """A request is assigned to a version."""
    return at_ms, Assigned(RequestId(id), key)


def starts(at_ms: float, replica: int, key: str, kind: str = "fast") -> Told:
    """A replica of a version on two cores."""
    spec = ReplicaSpec(f"{key}/only", "v", Slot(2.0, kind), node=f"n-{kind}")
    return at_ms, StartWorker(ReplicaId(replica), spec)


def runs(at_ms: float, batch: int, replica: int, key: str, *ids: int) -> Told:
    """A batch starts."""
    return at_ms, StartBatch(BatchId(batch), ReplicaId(replica), f"{key}/only", tuple(map(RequestId, ids)))


def finishes(at_ms: float, batch: int, replica: int, *ids: int, outcome: Outcome = Outcome.SERVED) -> list[Told]:
    """A batch is done, and its requests are answered."""
    ends = [(at_ms, End(RequestId(id), outcome)) for id in ids]
    return [(at_ms, Finished(BatchId(batch), ReplicaId(replica), 1)), *ends]


def rolls(at_ms: float, version: str, state: VersionState, share: float, why: str = "") -> Told:
    """A version of application `a` enters a state."""
    return at_ms, Rollout("a", version, state, share, why)


def told(*rows: Told) -> Rows:
    """Records in the order of time."""
    return sorted(((ms(at_ms), record) for at_ms, record in rows), key=lambda row: row[0])
