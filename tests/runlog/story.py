"""A tiny run told by hand: every kind of end, a resize, a lost replica and a plan, in numbers easy to check."""

from sloop.actions import Decided, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.app.graph import Graph, GraphStage
from sloop.events import Cancelled, Finished, ReplicaLost, ReplicaProgressed, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import Record
from sloop.units import ms
from sloop.vocabulary import BatchId, Group, Outcome, Plan, ReplicaId, ReplicaSpec, Request, RequestId, Slot, StagePlan

Rows = list[tuple[int, Record]]

GRAPH = Graph([GraphStage("classify")], slo_ns=ms(200))
SPEC = ReplicaSpec("classify", "small", Slot(2.0), node="n0")


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
    (0, StartReplica(R0, SPEC)),
    (ms(10), ReplicaProgressed(R0, "loading")),
    (ms(50), ReplicaReady(R0)),
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
    (ms(1000), ResizeReplica(R0, 4.0)),
    (ms(1050), Resized(R0, 4.0)),
    arrived(5, 1100, 1100),
    started(1100, 2, 0, 5),
    (ms(1200), ReplicaLost(R0, "killed")),
    (ms(1200), Decided("retry", "its replica was lost", "classify", replica=R0)),
    (ms(1200), StartReplica(R1, SPEC)),
    (ms(1500), ReplicaReady(R1)),
    ended(1500, 5, Outcome.DROPPED, "its deadline passed 200 ms ago"),
    arrived(6, 1600, 1600),
    started(1600, 3, 1, 6),
    (ms(1650), Cancelled(RequestId(6))),
    ended(1650, 6, Outcome.FAILED, "the client went away"),
    (ms(1700), Finished(BatchId(3), R1, ms(99))),
    (ms(1800), StopReplica(R1, "nothing to do")),
    (ms(2000), ReplicaStopped(R1)),
    (ms(2500), ReplicaProgressed(R1, "gone")),
]
