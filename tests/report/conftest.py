"""A tiny run told by hand: every kind of end, a resize, a lost replica and a plan, in numbers easy to check."""

import pytest

from sloop.actions import Decided, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.events import Cancelled, Finished, ReplicaLost, ReplicaProgressed, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import Record
from sloop.units import ms
from sloop.vocabulary import BatchId, Group, Outcome, Plan, ReplicaId, ReplicaSpec, Request, RequestId, StagePlan

SPEC = ReplicaSpec("classify", "small", 2.0, node="n0")


def asked(number: int, sent_ms: float, arrived_ms: float, slo_ms: float = 200) -> tuple[int, Request]:
    """A request's arrival."""
    return ms(arrived_ms), Request(RequestId(number), ms(sent_ms), ms(arrived_ms), ms(sent_ms + slo_ms))


def begun(at_ms: float, batch: int, replica: int, *requests: int) -> tuple[int, StartBatch]:
    """A batch's start."""
    return ms(at_ms), StartBatch(BatchId(batch), ReplicaId(replica), "classify", tuple(map(RequestId, requests)))


def ended(at_ms: float, number: int, outcome: Outcome, why: str = "") -> tuple[int, End]:
    """A request's end."""
    return ms(at_ms), End(RequestId(number), outcome, why)


def plan(cores: float, why: str) -> Plan:
    """One replica of `small` on so many cores."""
    return Plan((StagePlan("classify", (Group(ReplicaSpec("classify", "small", cores), 1),), 4),), why)


@pytest.fixture
def story() -> list[tuple[int, Record]]:
    r0, r1 = ReplicaId(0), ReplicaId(1)
    return [
        (0, Decided("plan", "1 replica holds 20 rps", "classify", plan=plan(2, "1 replica holds 20 rps"))),
        (0, StartReplica(r0, SPEC)),
        (ms(10), ReplicaProgressed(r0, "loading")),
        (ms(50), ReplicaReady(r0)),
        asked(1, 60, 100),
        begun(100, 0, 0, 1),
        asked(2, 110, 120),
        asked(3, 110, 130),
        (ms(180), Finished(BatchId(0), r0, ms(78))),
        ended(180, 1, Outcome.SERVED),
        begun(180, 1, 0, 2, 3),
        asked(4, 200, 200),
        ended(200, 4, Outcome.REJECTED, "the queue is full"),
        (ms(330), Finished(BatchId(1), r0, ms(148))),
        ended(330, 2, Outcome.LATE, "20 ms past its deadline"),
        ended(330, 3, Outcome.LATE, "20 ms past its deadline"),
        (ms(1000), Decided("plan", "demand doubled", "classify", plan=plan(4, "demand doubled"))),
        (ms(1000), Decided("resize", "the plan asks for 4 cores", "classify", replica=r0)),
        (ms(1000), ResizeReplica(r0, 4.0)),
        (ms(1050), Resized(r0, 4.0)),
        asked(5, 1100, 1100),
        begun(1100, 2, 0, 5),
        (ms(1200), ReplicaLost(r0, "killed")),
        (ms(1200), Decided("retry", "its replica was lost", "classify", replica=r0)),
        (ms(1200), StartReplica(r1, SPEC)),
        (ms(1500), ReplicaReady(r1)),
        ended(1500, 5, Outcome.DROPPED, "its deadline passed 200 ms ago"),
        asked(6, 1600, 1600),
        begun(1600, 3, 1, 6),
        (ms(1650), Cancelled(RequestId(6))),
        ended(1650, 6, Outcome.FAILED, "the client went away"),
        (ms(1700), Finished(BatchId(3), r1, ms(99))),
        (ms(1800), StopReplica(r1, "nothing to do")),
        (ms(2000), ReplicaStopped(r1)),
        (ms(2500), ReplicaProgressed(r1, "gone")),
    ]
