"""The cluster behind a network: what a cut, a dead node, a late report and a closed edge are to the core, when its
backend, the agents and their nodes are those that serve."""

from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop

import pytest

from sloop.actions import AdoptWorker, ResizeWorker, StartBatch, StartWorker, StopWorker, Transfer
from sloop.events import (
    BatchSilent,
    Cancelled,
    Event,
    Finished,
    KeptWorker,
    NodeLost,
    NodeReady,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.sim.checkers import Violation
from sloop.units import s
from sloop.vocabulary import STORE, BatchId, ReplicaId, ReplicaSpec, Request, RequestId, Slot, TransferId
from tests.dst.agents import (
    FETCH_BYTES_PER_S,
    SILENT_NS,
    AllHealed,
    FaultBegins,
    FaultKind,
    OpenRequests,
    RemoteCluster,
)
from tests.dst.schedules import HOME, Schedule, Setting, schedule_of

R0 = ReplicaId(0)
SCHEDULE = schedule_of(25)
BARE = replace(SCHEDULE.only([]), scene=replace(SCHEDULE.scene, delay_ns=0))
STAGE = BARE.scene.applications[0].qualified().stages[0]
OPEN: list[RemoteCluster] = []
"""The clusters that a test has made."""


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def cluster(
    opened: OpenRequests | None = None,
    *faults: tuple[float, FaultBegins | AllHealed],
    schedule: Schedule = BARE,
) -> RemoteCluster:
    """The nodes of a schedule without operations, with these faults, each at a time in seconds."""
    found = Setting(schedule).cluster(opened or OpenRequests())
    found.pending.heap[:] = [entry for entry in found.pending.heap if not isinstance(entry[2], AllHealed)]
    for at_s, fault in faults:
        found.schedule(s(at_s), fault)
    OPEN.append(found)
    return found


def fault(kind: FaultKind, span_s: float = 0.0, *, node: str = HOME.name, detail: int = 0) -> FaultBegins:
    return FaultBegins(kind, node, detail, s(span_s))


def events_of(found: RemoteCluster, until_s: float) -> list[tuple[float, Event]]:
    """What the core is told until then, with the times in seconds."""
    told: list[tuple[float, Event]] = []
    while found.pending.heap[0][0] <= s(until_s):
        at_ns, sequence, happening = heappop(found.pending.heap)
        event = found.happen(at_ns, sequence, happening)
        if event is not None:
            told.append((at_ns / 1e9, event))
    return told


def start(
    found: RemoteCluster, at_s: float = 0.5, id: int = 0, transfer: TransferId | None = None, variant: int = 0
) -> None:
    spec = ReplicaSpec(STAGE.name, STAGE.variants[variant].name, Slot(1.0, "cpu"), HOME.name)
    found.obey(s(at_s), StartWorker(ReplicaId(id), spec, transfer=transfer))


def batch(found: RemoteCluster, at_s: float, id: int = 0) -> None:
    found.start_batch(s(at_s), StartBatch(BatchId(id), R0, STAGE.name, (RequestId(1),)))


def kinds(told: list[tuple[float, Event]]) -> list[type]:
    return [type(event) for _, event in told]


def living(found: RemoteCluster) -> list[int]:
    """The workers on the node at home."""
    agent = found._machines[HOME.name].agent
    return list(agent.workers) if agent is not None else []


def test_without_faults_a_worker_starts_and_finishes_its_batch() -> None:
    found = cluster()
    start(found)
    assert WorkerReady in kinds(events_of(found, 10))
    batch(found, 10)
    assert kinds(events_of(found, 12)) == [Finished]


def test_what_is_sent_over_a_link_that_is_cut_for_a_short_time_arrives_afterwards_and_in_order() -> None:
    found = cluster(None, (10, fault(FaultKind.CUT, 1.5)))
    start(found)
    events_of(found, 10)
    batch(found, 10.1)
    found.obey(s(10.2), StopWorker(R0, "the test says so"))
    told = events_of(found, 13)
    assert kinds(told) == [WorkerStopped], "the batch reached the worker before the order to stop"
    assert told[0][0] >= 11.5


def test_a_node_that_is_cut_off_for_long_is_lost_and_what_it_says_later_counts_no_more() -> None:
    found = cluster(None, (10, fault(FaultKind.CUT, 6)))
    start(found)
    events_of(found, 9.99)
    batch(found, 9.999)
    told = events_of(found, 30)
    assert kinds(told) == [NodeLost, WorkerLost, NodeReady]
    assert told[0][0] == 10 + SILENT_NS / 1e9
    assert told[2][0] > 16
    assert not living(found), "the agent has stopped the old workers before the node is ready"


def test_late_reports_of_a_closed_connection_may_reach_the_core() -> None:
    found = cluster(None, (9, fault(FaultKind.GHOSTS, 30, node="")), (10, fault(FaultKind.CUT, 6)))
    start(found)
    events_of(found, 9.99)
    batch(found, 9.999)
    assert kinds(events_of(found, 30)) == [NodeLost, WorkerLost, Finished, NodeReady]


@pytest.mark.parametrize(("detail", "lost_s"), [(0, 10.0), (1, 12.0)])
def test_a_node_that_dies_is_noticed_at_once_or_by_its_silence(detail: int, lost_s: float) -> None:
    found = cluster(None, (10, fault(FaultKind.NODE_DOWN, 6, detail=detail)))
    start(found)
    events_of(found, 9.99)
    told = events_of(found, 30)
    assert kinds(told) == [NodeLost, WorkerLost, NodeReady]
    assert told[0][0] == lost_s


def test_a_node_that_is_back_before_anybody_noticed_is_lost_first_then_ready() -> None:
    found = cluster(None, (10, fault(FaultKind.NODE_DOWN, 0.5, detail=1)))
    start(found)
    events_of(found, 9.99)
    told = events_of(found, 30)
    assert kinds(told) == [NodeLost, WorkerLost, NodeReady]
    assert 10.5 < told[0][0] < 12
    assert found._machines[HOME.name].lives > 2, "an agent was sent away while the one before it was not lost"


def test_a_replica_that_is_ordered_on_a_lost_node_is_lost() -> None:
    found = cluster(None, (10, fault(FaultKind.NODE_DOWN, 6)))
    events_of(found, 11)
    start(found, 11)
    assert kinds(events_of(found, 11.1)) == [WorkerLost]


def test_when_all_is_healed_nodes_come_back_and_hung_workers_stay_hung() -> None:
    hang, cut = fault(FaultKind.HANG), fault(FaultKind.CUT, 100)
    found = cluster(None, (10, hang), (11, cut), (12, AllHealed()))
    start(found)
    events_of(found, 11.5)
    batch(found, 11.5)
    assert set(kinds(events_of(found, 60))) == {BatchSilent}, "its node is asked what it does"
    found.obey(s(60), StopWorker(R0, "its batch hangs"))
    assert WorkerStopped in kinds(events_of(found, 61))


def test_a_report_can_be_lost_or_come_twice() -> None:
    found = cluster(
        None, (10, fault(FaultKind.LOST_REPORTS, 1)), (12, fault(FaultKind.REPEATED_REPORTS, 1)), (20, AllHealed())
    )
    start(found)
    start(found, id=1)
    events_of(found, 10)
    batch(found, 10)
    assert Finished not in kinds(events_of(found, 12))
    found.start_batch(s(12), StartBatch(BatchId(1), ReplicaId(1), STAGE.name, (RequestId(1),)))
    assert [event for _, event in events_of(found, 15) if isinstance(event, Finished) and event.batch == 1][1:]


def test_an_edge_that_is_gone_takes_its_open_requests_with_it() -> None:
    opened = OpenRequests()
    opened.edge_of = {RequestId(1): 0, RequestId(2): 1, RequestId(3): 0}
    opened.by_id = {id: Request(id, 0, 0, s(99)) for id in (RequestId(1), RequestId(2))}
    found = cluster(opened, (10, fault(FaultKind.EDGE_DOWN, node="", detail=0)))
    assert [event for _, event in events_of(found, 20)] == [Cancelled(RequestId(1))]


def lives_on(found: RemoteCluster, at_s: float) -> list[KeptWorker]:
    """What the next core is told of the node at home when the last one has died."""
    begun = [event for _, event in events_of(found, at_s) if isinstance(event, NodeReady) and event.node == HOME]
    return list(begun[-1].kept) if begun else []


def test_workers_outlive_the_core_and_keep_their_numbers() -> None:
    scene = replace(BARE.scene, provision={**BARE.scene.provision, "name": "cheapest_start"})
    faults = (10, fault(FaultKind.CORE_DOWN, 0.005, node="")), (9, fault(FaultKind.SLOW_FETCH, 9, detail=4))
    found = cluster(None, *faults, schedule=replace(BARE, scene=scene))
    for location in found.sizes_bytes:
        found.sizes_bytes[location] = 1 << 28
    start(found)
    events_of(found, 9.9999)
    start(found, 9.9999, 1, variant=1)
    one, other = lives_on(found, 11)
    assert [(one.worker, one.is_ready), (other.worker, other.is_ready)] == [(0, True), (1, False)]
    found.obey(s(11), AdoptWorker(R0, one.spec, True))
    found.obey(s(11), AdoptWorker(ReplicaId(1), other.spec, False))
    assert WorkerReady(ReplicaId(1)) in [event for _, event in events_of(found, 30)]
    found.start_batch(s(30), StartBatch(BatchId(0), R0, STAGE.name, (RequestId(1),)))
    ((_, finished),) = events_of(found, 40)
    assert isinstance(finished, Finished)
    assert finished.replica == R0


def test_an_abandoned_batch_is_nobodys_and_its_worker_ready_when_it_is_over() -> None:
    found = cluster(
        None, (10.001, fault(FaultKind.CORE_DOWN, 0.001, node="")), (9, fault(FaultKind.SLOW_NODE, 9, detail=4))
    )
    start(found)
    events_of(found, 10)
    batch(found, 10)
    (kept,) = lives_on(found, 10.6)
    assert not kept.is_ready
    found.obey(s(10.6), AdoptWorker(R0, kept.spec, False))
    assert [event for _, event in events_of(found, 20)] == [WorkerReady(R0)]


def test_a_worker_whose_abandoned_batch_does_not_end_is_stopped() -> None:
    found = cluster(None, (10, fault(FaultKind.HANG)), (12, fault(FaultKind.CORE_DOWN, 1, node="")))
    start(found)
    events_of(found, 11)
    batch(found, 11)
    (kept,) = lives_on(found, 14)
    found.obey(s(14), AdoptWorker(R0, kept.spec, False))
    assert WorkerStopped not in kinds(events_of(found, 41.9))
    assert WorkerStopped in kinds(events_of(found, 43))


def test_a_node_that_is_cut_off_is_lost_to_the_next_core_and_comes_later_with_its_workers() -> None:
    found = cluster(None, (10, fault(FaultKind.CUT, 8)), (11, fault(FaultKind.CORE_DOWN, 1, node="")))
    start(found)
    told = events_of(found, 16)
    assert (NodeLost, HOME.name) in [(type(event), getattr(event, "node", "")) for _, event in told]
    (kept,) = lives_on(found, 20)
    assert (kept.worker, kept.is_ready) == (0, True)


def test_a_start_ends_with_its_transfer_when_the_node_is_given_up() -> None:
    """Otherwise the next core adopts a replica that waits for ever."""
    faults = (10, fault(FaultKind.CUT, 5)), (12.5, fault(FaultKind.CORE_DOWN, 1, node=""))
    scene = replace(BARE.scene, provision={**BARE.scene.provision, "name": "cheapest_start"})
    found = cluster(None, *faults, schedule=replace(BARE, scene=scene))
    weights = found.backend.servable(STAGE.name, "large").weights[0]  # type: ignore[union-attr]
    found.obey(s(9), Transfer(TransferId(0), weights, STORE, (HOME.name,)))
    for location in found.sizes_bytes:
        found.sizes_bytes[location] = 1 << 40
    start(found, 9, transfer=TransferId(0))
    kept = {each.worker: each for each in lives_on(found, 18)}
    assert not any(each.is_ready for each in kept.values())
    assert WorkerReady not in kinds(events_of(found, 19))


def test_a_node_that_has_been_given_up_by_the_same_core_comes_back_empty() -> None:
    found = cluster(None, (10, fault(FaultKind.CUT, 5)))
    start(found)
    assert lives_on(found, 16) == []


def test_workers_of_a_stage_that_the_next_core_does_not_know_are_stopped() -> None:
    found = cluster(None, (10, fault(FaultKind.CORE_DOWN, 1, node="")))
    found._known = 0
    start(found)
    events_of(found, 14)
    assert not living(found)


def test_nothing_that_the_dead_core_was_to_be_told_reaches_the_next_one() -> None:
    found = cluster(None, (9, fault(FaultKind.GHOSTS, 9, node="")), (10, fault(FaultKind.CORE_DOWN, 1, node="")))
    start(found)
    events_of(found, 9)
    found._machines[HOME.name].delay_ns = s(0.1)
    found.obey(s(9.85), StopWorker(R0, "a test"))
    told = [event for _, event in events_of(found, 20)]
    assert not living(found), "it has stopped"
    assert not any(isinstance(event, WorkerReady | WorkerStopped) for event in told)


def test_requests_that_have_not_ended_are_submitted_again_unless_they_are_too_old() -> None:
    opened = OpenRequests()
    old, young = Request(RequestId(1), 0, 0, s(10.5)), Request(RequestId(2), 0, 0, s(20))
    opened.by_id = {old.id: old, young.id: young}
    found = cluster(opened, (10, fault(FaultKind.CORE_DOWN, 1, node="")))
    told = [event for _, event in events_of(found, 14)]
    assert [event for event in told if isinstance(event, Request)] == [young]


def test_a_worker_that_gets_a_second_batch_is_a_mistake_of_the_core() -> None:
    found = cluster()
    start(found)
    events_of(found, 10)
    batch(found, 10)
    with pytest.raises(Violation, match="batch 1 reaches replica 0, which still runs"):
        batch(found, 10, 1)


def test_workers_with_more_cores_than_their_node_are_a_mistake_of_the_core() -> None:
    found = cluster()
    for id in range(33):
        start(found, 0.5, id)
    with pytest.raises(Violation, match="the workers on node-0 have 33 cores, the node 32"):
        events_of(found, 0.6)


def test_a_slow_node_slows_its_batches_down() -> None:
    found = cluster(None, (20, fault(FaultKind.SLOW_NODE, 100, detail=4)))
    start(found)
    events_of(found, 10)
    batch(found, 10)
    ((quick_s, _),) = events_of(found, 20)
    batch(found, 20)
    ((slow_s, _),) = events_of(found, 60)
    assert slow_s - 20 == pytest.approx(32 * (quick_s - 10))


def test_models_come_slowly_or_not_at_all() -> None:
    scene = replace(BARE.scene, provision={**BARE.scene.provision, "name": "cheapest_start"})
    took_s = []
    for faults in ([], [(0.1, fault(FaultKind.SLOW_FETCH, 100))]):
        found = cluster(None, *faults, schedule=replace(BARE, scene=scene))
        for location in found.sizes_bytes:
            found.sizes_bytes[location] = 1 << 30
        start(found)
        found.obey(s(0.5), ResizeWorker(R0, 2.0))
        told = events_of(found, 60)
        assert kinds(told).count(WorkerResized) == 1, "also while it waits for its model"
        took_s += [at_s for at_s, event in told if isinstance(event, WorkerReady)]
    quick_s, slow_s = took_s
    assert slow_s - quick_s == pytest.approx(9 * (1 << 30) / FETCH_BYTES_PER_S, rel=0.01)
    found = cluster(None, (0.1, fault(FaultKind.FAILED_FETCH, 100)), schedule=replace(BARE, scene=scene))
    start(found)
    assert WorkerLost(R0, "the store cannot be reached") in [event for _, event in events_of(found, 60)]
