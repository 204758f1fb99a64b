"""The state of a run: the story by hand, requests that fan out and join by hand, and random worlds against the log."""

from collections import Counter
from collections.abc import Sequence

import pytest

from sloop.actions import CancelTransfer, Decided, End, Evict, StartBatch, StartWorker, StopWorker, Transfer
from sloop.app.graph import Each, Graph, GraphStage, When
from sloop.events import (
    WOKE,
    BatchFailed,
    BatchLost,
    Finished,
    NodeLost,
    TransferFailed,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.runlog import MemoryLog, Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.replicas import COLD_START
from sloop.runlog.requests import GraphRequestRecord
from sloop.runlog.run import ROUTES_MAX, Kept, RunState, combined_accuracy
from sloop.runlog.versions import OnlyGraph
from sloop.sim import simulate
from sloop.sim.worlds import random_world
from sloop.units import ms, s
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Life,
    ModelWeights,
    Node,
    Outcome,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    TransferId,
    WorkerId,
    parts_at,
)
from tests.counting import calls_of, instructions_of
from tests.runlog.story import GRAPH, STORY, Rows, arrived, ended, started

INSTRUCTIONS_A_REQUEST = 370
"""Some per cent above what is counted today on CPython 3.11; the core and the engine take three times as many."""


def state_at(at_ms: float, rows: Rows = STORY, graph: Graph = GRAPH) -> RunState:
    state = RunState(graph, start_ns=0)
    for now_ns, record in rows:
        if now_ns <= ms(at_ms):
            state.append(now_ns, record)
    return state


def waiting_since(state: RunState) -> dict[int, int]:
    """Of an application of one stage: per request that is in no batch, since when."""
    running = {id for replica in state.batches() if replica.running for id in replica.running.requests}
    return {id: request.since_ns for id, request in state.open.items() if id not in running}


def test_the_state_at_several_instants() -> None:
    first = state_at(20)
    assert (first.count(Life.STARTING), first.replicas[ReplicaId(0)].step) == (1, "loading")
    second = state_at(130)
    assert (second.waiting, second.queued("classify"), list(second.open)) == (2, 2, [1, 2, 3])
    (busy,) = second.batches()
    assert busy.running is not None
    assert (busy.running.requests, busy.running_ns, busy.batches) == ((1,), ms(100), 1)
    third = state_at(1100)
    assert third.plan is not None
    assert (third.plan.why, third.plan_ns, third.replicas[ReplicaId(0)].cores) == ("demand doubled", ms(1000), 4.0)
    assert waiting_since(state_at(1200)) == {5: ms(1200)}
    assert state_at(1800).count(Life.DRAINING) == 1
    last = state_at(9999)
    assert (last.replicas, last.batches(), last.open, last.waiting) == ({}, [], {}, 0)
    assert [(second.start_s, second.arrivals, second.missed) for second in last.seconds] == [
        (0, 4, 3),
        (1, 2, 2),
        (2, 0, 0),
    ]


def test_samples_and_counts_of_rare_things() -> None:
    state = state_at(9999)
    assert (list(state.served_ns), list(state.late_ns)) == ([ms(120)], [ms(220), ms(220)])
    assert {outcome: list(found) for outcome, found in state.missed_ns.items()} == {
        Outcome.DROPPED: [ms(400)],
        Outcome.REJECTED: [0],
        Outcome.FAILED: [ms(50)],
    }
    assert {key: list(found) for key, found in state.workers.cold_start_ns.items()} == {
        ("classify", "small", "loading"): [ms(40)],
        ("classify", "small", "total"): [ms(50), ms(300)],
    }
    assert {key: list(found) for key, found in state.workers.resize_ns.items()} == {"classify": [ms(50)]}
    assert state.workers.lost == {("classify", "small"): 1}
    assert state.failed_tries == {("classify", "small", "worker"): 1}
    assert state.workers.cold_starts == 2


def test_a_batch_counts_for_the_cores_it_ran_on() -> None:
    state = state_at(9999)
    sizes = {group.cores: dict(group.sizes) for group in state.workers.groups.values()}
    assert sizes == {2.0: {1: 2, 2: 1}, 4.0: {1: 1}}
    durations = {
        size: list(found)
        for size, found in state.workers.groups["classify", "small", Slot(2.0), ALONE].durations_ns.items()
    }
    assert durations == {1: [ms(80), ms(100)], 2: [ms(150)]}


def test_a_batch_that_was_resized_meanwhile_counts_for_no_number_of_cores() -> None:
    rows: Rows = [row for row in STORY if row[0] <= ms(50)]
    rows += [arrived(1, 60, 60), started(60, 0, 0, 1)]
    rows += [(at_ns - ms(930), record) for at_ns, record in STORY if ms(1000) <= at_ns <= ms(1050)]
    rows += [(ms(140), Finished(BatchId(0), ReplicaId(0), ms(79))), ended(140, 1, Outcome.SERVED)]
    rows += [arrived(2, 150, 150), started(150, 1, 0, 2), (ms(160), Finished(BatchId(1), ReplicaId(0), 1))]
    group = state_at(999, rows).workers.groups["classify", "small", Slot(4.0), ALONE]
    assert ({size: list(n) for size, n in group.durations_ns.items()}, dict(group.sizes)) == ({1: [ms(10)]}, {1: 1})
    assert {size: list(n) for size, n in group.resized_ns.items()} == {1: [ms(80)]}


def test_service_times_are_kept_only_if_asked_for() -> None:
    asked = RunState(GRAPH, kept=Kept(service=True))
    asked.extend([(0, record) for _, record in STORY])
    assert list(asked.workers.groups["classify", "small", Slot(2.0), ALONE].service_ns) == [ms(78), ms(148), ms(99)]
    assert not state_at(9999).workers.groups["classify", "small", Slot(2.0), ALONE].service_ns


def test_the_history_kept_is_bounded() -> None:
    ends = list[int]()
    state = DeploymentState(
        [OnlyGraph(GRAPH)],
        kept=Kept(seconds=3, decisions=2),
        on_second=lambda record: ends.append(record.run.seconds[-1].start_s),
    )
    for at_s in range(10, 20):
        state.append(s(at_s), Decided("plan", f"at {at_s}"))
    assert (state.start_ns, ends) == (s(10), list(range(9)))
    assert [second.start_s for second in state.records[0].run.seconds] == [7, 8, 9]
    assert [decided.why for _, decided in state.last_decisions] == ["at 18", "at 19"]
    assert state.decisions["", "plan"] == 10


def test_an_application_that_wakes_after_a_month_skips_the_seconds_that_nobody_would_see() -> None:
    state, month_ns = RunState(GRAPH, start_ns=0, kept=Kept(seconds=3)), s(30 * 86_400)
    state.append(0, StartWorker(ReplicaId(0), ReplicaSpec("classify", "v", Slot(2.0))))
    calls = calls_of(lambda: state.append(month_ns + 1, WOKE)).total()
    assert calls < 100
    assert [second.start_s for second in state.seconds] == [30 * 86_400 - 2, 30 * 86_400 - 1, 30 * 86_400]
    assert [second.microcore_ns / 1e15 for second in state.seconds] == [2, 2, 0]
    assert state.cost.total_microcore_ns == 2_000_000 * month_ns


def test_a_request_keeps_its_second_after_that_is_forgotten() -> None:
    state = RunState(GRAPH, kept=Kept(seconds=1))
    for now_ns, record in [arrived(1, 0, 0), (s(9), WOKE), ended(9000, 1, Outcome.LATE)]:
        state.append(now_ns, record)
    assert (list(state.late_ns), state.seconds[0].late) == ([s(9)], 0)


def test_a_failed_batch_waits_again() -> None:
    rows: Rows = [STORY[1], arrived(1, 0, 0)]
    for number, at_ms in ((1, 10), (2, 30)):
        rows += [started(at_ms, number, 0, 1), (ms(at_ms + 15), BatchFailed(BatchId(number), ReplicaId(0), "nan"))]
        rows += [(ms(at_ms + 15), BatchFailed(BatchId(number), ReplicaId(0), "repeated"))]
    state = state_at(999, rows)
    assert list(state.stages["classify"].waits_ns) == [ms(10), ms(5)]
    assert state.failed_batches == {("classify", "small"): 2}
    assert state.failed_tries == {("classify", "small", "raised"): 2}
    at_ms = 50
    rows += [started(at_ms, 3, 0, 1), (ms(60), BatchFailed(BatchId(3), ReplicaId(0), "no cat", is_refusal=True))]
    state = state_at(999, rows)
    assert state.failed_batches == {("classify", "small"): 2}, "the model has not failed"
    assert state.failed_tries["classify", "small", "refused"] == 1


def test_records_about_unknown_requests_batches_and_replicas_change_nothing() -> None:
    strange: Rows = [
        (0, End(RequestId(5), Outcome.SERVED)),
        (0, Finished(BatchId(5), ReplicaId(0), 1)),
        (0, WorkerStopped(ReplicaId(7))),
        (0, StopWorker(ReplicaId(7), "x")),
        started(0, 1, 7, 1),
    ]
    state = state_at(0, strange)
    assert (len(state.served_ns), state.replicas, state.workers.groups) == (0, {}, {})


# Requests that fan out, branch and join

FANNED = Graph(
    [
        GraphStage("cut"),
        GraphStage("read", ("cut",), each=Each("cut", "boxes", mean=2, most=3)),
        GraphStage("join", ("read",), join=True),
        GraphStage("face", ("cut",), when=(When("cut", "kind", (1,), 0.5),)),
    ],
    slo_ns=ms(500),
)
ACCURACIES = {("cut", "v"): 0.5, ("read", "good"): 1.0, ("read", "bad"): 0.5, ("join", "v"): 0.8, ("face", "v"): 0.1}
REPLICAS = {"cut": ("v", 0), "read": ("good", 1), "join": ("v", 3), "face": ("v", 4)}
BAD = 2
"""A replica of the variant `bad` of `read`."""


def batch(number: int, stage: str, *visits: tuple[int, int], replica: int | None = None) -> StartBatch:
    requests = tuple(RequestId(request) for request, _ in visits)
    where = ReplicaId(REPLICAS[stage][1] if replica is None else replica)
    return StartBatch(BatchId(number), where, stage, requests, tuple(part for _, part in visits))


def finished(of: StartBatch, edge_counts: Sequence[tuple[int, ...]] = ()) -> Finished:
    return Finished(of.batch, of.replica, 1, tuple(edge_counts))


def after_cut(edge_counts: Sequence[tuple[int, ...]], **options: object) -> RunState:
    """Requests 1, 2, … that were cut at 10 ms, in a batch that began at 4 ms."""
    state = RunState(FANNED, start_ns=0, **{"accuracies": ACCURACIES} | options)  # type: ignore[arg-type]
    for stage, (variant, number) in REPLICAS.items():
        state.append(0, StartWorker(ReplicaId(number), ReplicaSpec(stage, variant, Slot(1.0))))
    state.append(0, StartWorker(ReplicaId(BAD), ReplicaSpec("read", "bad", Slot(1.0))))
    ids = range(1, len(edge_counts) + 1)
    for id in ids:
        state.append(0, Request(RequestId(id), 0, 0, ms(500)))
    first = batch(0, "cut", *((id, 0) for id in ids))
    state.append(ms(4), first)
    state.append(ms(10), finished(first, edge_counts))
    return state


def waits_ms(state: RunState) -> dict[str, list[float]]:
    return {name: [wait_ns / 1e6 for wait_ns in stage.waits_ns] for name, stage in state.stages.items()}


def queued(state: RunState) -> dict[str, int]:
    return {name: state.queued(name) for name in state.stages if state.queued(name)}


def test_every_part_and_branch_waits_for_itself() -> None:
    state = after_cut([(2, 1)])
    assert queued(state) == {"read": 2, "face": 1}
    one, other, face = batch(1, "read", (1, 0)), batch(2, "read", (1, 1), replica=BAD), batch(3, "face", (1, 0))
    state.append(ms(10), one)
    state.append(ms(11), face)
    state.append(ms(13), other)
    assert state.waiting == 0
    state.append(ms(20), finished(one))
    state.append(ms(22), finished(face))
    assert state.waiting == 0, "the parts have not met"
    state.append(ms(30), finished(other))
    assert queued(state) == {"join": 1}
    last = batch(4, "join", (1, 0))
    state.append(ms(31), last)
    state.append(ms(40), finished(last))
    state.append(ms(40), End(RequestId(1), Outcome.SERVED))
    assert waits_ms(state) == {"cut": [4], "read": [0, 3], "join": [1], "face": [1]}
    assert state.accuracy_sum == pytest.approx(0.5 * 0.75 * 0.8 * 0.1)
    ((visited, route),) = state.routes.items()
    assert visited == {"cut", "read", "join", "face"}
    assert (route.served, list(route.latencies_ns)) == (1, [ms(40)])


def test_the_accuracy_of_a_request_depends_on_its_route() -> None:
    state = after_cut([(0, 0), (0, 1)])
    state.append(ms(10), End(RequestId(1), Outcome.SERVED))
    face = batch(1, "face", (2, 0))
    state.append(ms(10), face)
    state.append(ms(20), finished(face))
    state.append(ms(20), End(RequestId(2), Outcome.LATE))
    assert state.accuracy_sum == pytest.approx(0.5 + 0.5 * 0.1)
    assert state.accuracy_count == 2
    assert {tuple(sorted(visited)): route.served for visited, route in state.routes.items()} == {
        ("cut",): 1,
        ("cut", "face"): 0,
    }


def test_an_unknown_accuracy_is_reported() -> None:
    assert not after_cut([(0, 0)]).unknown_accuracy
    assert after_cut([(0, 0)], accuracies=ACCURACIES | {("cut", "v"): None}).unknown_accuracy
    assert after_cut([(0, 0)], accuracies={}).unknown_accuracy


def test_accuracies_in_per_cent_stay_so() -> None:
    assert combined_accuracy([0.9, 0.8]) == pytest.approx(0.72)
    assert combined_accuracy([90.0, 80.0]) == pytest.approx(72.0)


@pytest.mark.parametrize(
    ("outcome", "at"),
    [(Outcome.DROPPED, "face"), (Outcome.REJECTED, "cut"), (Outcome.FAILED, "read"), (Outcome.DROPPED, "")],
)
def test_ends_count_at_the_stage_they_name(outcome: Outcome, at: str) -> None:
    state = after_cut([(2, 1)])
    state.append(ms(11), End(RequestId(1), outcome, "slack 3.0 ms at join, as prose has it", stage=at))
    assert state.waiting == 0
    counted = {name: stage.dropped + stage.rejected + stage.failed for name, stage in state.stages.items()}
    assert counted == {name: int(name == at) for name in FANNED.stages}


def test_an_end_that_names_no_stage_counts_where_the_request_waited() -> None:
    state = after_cut([(2, 0), (2, 1)])
    state.append(ms(11), End(RequestId(1), Outcome.DROPPED, "the client went away"))
    state.append(ms(11), End(RequestId(2), Outcome.DROPPED, "the client went away"))
    assert {name: stage.dropped for name, stage in state.stages.items()} == {"cut": 0, "read": 1, "join": 0, "face": 0}


def test_a_failed_part_waits_until_the_end_of_its_request() -> None:
    state = after_cut([(2, 1)])
    read = batch(1, "read", (1, 1))
    state.append(ms(11), read)
    assert state.waiting == 2
    state.append(ms(12), BatchFailed(read.batch, read.replica, "nan"))
    assert state.waiting == 3
    state.append(ms(12), End(RequestId(1), Outcome.FAILED, "nan", stage="read"))
    assert ({name: stage.failed for name, stage in state.stages.items()}["read"], state.waiting) == (1, 0)


def test_more_parts_than_the_graph_allows_wait_nowhere() -> None:
    state = after_cut([(2, 1), (4, 0)])
    assert queued(state) == {"read": 2, "face": 1}
    state.append(ms(10), End(RequestId(2), Outcome.FAILED, "4 parts", stage="cut"))
    assert state.stages["cut"].failed == 1


def test_routes_are_bounded_and_can_be_left_out() -> None:
    steps = [GraphStage("a"), *(GraphStage(f"b{n}", ("a",), (When("a", f"k{n}", (1,)),)) for n in range(8))]
    state = RunState(Graph(steps, slo_ns=ms(500)), start_ns=0)
    state.append(0, StartWorker(ReplicaId(0), ReplicaSpec("a", "v", Slot(1.0))))
    for n in range(8):
        state.append(0, StartWorker(ReplicaId(n + 1), ReplicaSpec(f"b{n}", "v", Slot(1.0))))
    batches = 0
    for id in range(256):
        state.append(0, Request(RequestId(id), 0, 0, ms(500)))
        bits = [id >> n & 1 for n in range(8)]
        for stage, replica, counts in [("a", 0, (tuple(bits),)), *((f"b{n}", n + 1, ()) for n in range(8) if bits[n])]:
            batches += 1
            state.append(0, StartBatch(BatchId(batches), ReplicaId(replica), stage, (RequestId(id),)))
            state.append(0, Finished(BatchId(batches), ReplicaId(replica), 1, counts))
        state.append(0, End(RequestId(id), Outcome.SERVED))
    assert len(state.routes) == ROUTES_MAX + 1
    assert len(state.routes[frozenset()].latencies_ns) == 256 - ROUTES_MAX
    assert not after_cut([(0, 0)], kept=Kept(routes=False)).routes


CHAIN = Graph(
    [GraphStage("a"), GraphStage("b", ("a",)), GraphStage("c", ("a",)), GraphStage("d", ("b", "c"))], slo_ns=ms(500)
)


def chain(*rows: tuple[float, Record]) -> RunState:
    """Request 1 in a batch on replica 0 of stage a at 1 ms; replica 1 is one of a as well, 2 of b, 3 of c."""
    state = RunState(CHAIN, start_ns=0)
    for number, stage in enumerate("aabc"):
        state.append(0, StartWorker(ReplicaId(number), ReplicaSpec(stage, "v", Slot(1.0))))
    state.append(ms(1), Request(RequestId(1), ms(1), ms(1), ms(501)))
    for at_ms, record in [(1, started(1, 0, 0, 1, stage="a")[1]), *rows]:
        state.append(ms(at_ms), record)
    return state


def test_a_visit_whose_replica_is_lost_waits_twice() -> None:
    again = started(8, 1, 1, 1, stage="a")[1]
    lost = (5, WorkerLost(ReplicaId(0), "killed"))
    late = (9, Finished(BatchId(0), ReplicaId(0), 1))
    state = chain(lost, (8, again), late)
    assert (waits_ms(state)["a"], state.waiting, len(state.batches())) == ([0, 3], 0, 1)
    assert not state.workers.groups["a", "v", Slot(1.0), ALONE].durations_ns


def test_a_stuck_batch_waits_again_once_wherever_it_is_when_its_replica_is_gone() -> None:
    given_up = (10_001, StopWorker(ReplicaId(0), "its batch has run for 10.0 s"))
    assert queued(chain(given_up)) == {"a": 1}
    gone = (10_008, WorkerStopped(ReplicaId(0)))
    assert queued(chain(given_up, gone)) == {"a": 1}
    again = (10_005, started(0, 1, 1, 1, stage="a")[1])
    state = chain(given_up, again, gone)
    assert (queued(state), waits_ms(state)["a"]) == ({}, [0, 4]), "it runs elsewhere"
    over = (10_006, Finished(BatchId(1), ReplicaId(1), 1))
    state = chain(given_up, again, over, (10_006, started(0, 2, 2, 1, stage="b")[1]), gone)
    assert queued(state) == {"c": 1}, "it has gone on"


@pytest.mark.parametrize("seed", [*range(8), 11, 17, 49, 62])
def test_random_worlds_leave_nothing_behind(seed: int) -> None:
    """Faults, lost replicas, clients that go away: all that is counted adds up to what the log says."""
    world, log = random_world(seed), MemoryLog()
    deployment = DeploymentState([OnlyGraph(world.application.graph)], start_ns=0, kept=Kept(seconds=2))
    simulate(world, [deployment, log])
    (state,) = deployment.runs
    ends = Counter(record.outcome for _, record in log if isinstance(record, End))
    samples = {Outcome.SERVED: state.served_ns, Outcome.LATE: state.late_ns, **state.missed_ns}
    assert {outcome: len(found) for outcome, found in samples.items() if found} == ends
    started_visits = Counter[str]()
    for _, record in log:
        if isinstance(record, StartBatch):
            started_visits[record.stage] += len(record.requests)
    assert {name: len(stage.waits_ns) for name, stage in state.stages.items() if stage.waits_ns} == started_visits
    assert (state.open, state.waiting) == ({}, 0)
    assert world.faults.touches_batches or not state.batches(), "stalled batches outlive their requests"
    gone = sum(isinstance(record, End) and record.why == "the client went away" for _, record in log)
    kinds = ("dropped", "rejected", "failed")
    at_stages = {kind: sum(getattr(stage, kind) for stage in state.stages.values()) for kind in kinds}
    assert ends[Outcome.DROPPED] - gone <= at_stages["dropped"] <= ends[Outcome.DROPPED]
    assert (at_stages["rejected"], at_stages["failed"]) == (ends[Outcome.REJECTED], ends[Outcome.FAILED])
    assert deployment.decisions.total() == sum(isinstance(record, Decided) for _, record in log)


def test_an_open_request_of_a_graph_records_where_it_waits() -> None:
    request = after_cut([(2, 1)]).open[RequestId(1)]
    assert isinstance(request, GraphRequestRecord)
    assert request.waiting == {("read", 0): ms(10), ("read", 1): ms(10), ("face", 0): ms(10)}


def one_by_one(requests: int) -> Rows:
    """Requests that are served one after another, each in a batch of its own."""
    rows: Rows = []
    for id in range(requests):
        rows += [arrived(id, 60, 60), started(60, id, 0, id)]
        rows += [(ms(60), Finished(BatchId(id), ReplicaId(0), 1)), ended(60, id, Outcome.SERVED)]
    return rows


def test_a_request_costs_no_call_and_few_instructions() -> None:
    """The simulator pays this for every request, besides what `tests/sim/test_cost.py` counts."""

    def fold(rows: Rows) -> None:
        state_at(50).extend(rows)

    short, long = one_by_one(100), one_by_one(300)
    calls = (calls_of(lambda: fold(long)) - calls_of(lambda: fold(short))).total() / 200
    instructions = (instructions_of(lambda: fold(long)) - instructions_of(lambda: fold(short))) / 200
    assert calls < 0.1
    assert instructions <= INSTRUCTIONS_A_REQUEST


# Weights


def test_transfers_of_weights_are_counted_by_their_source() -> None:
    weights = ModelWeights("m", 100)
    state = DeploymentState([OnlyGraph(GRAPH)], nodes=[Node(name, "k", 1.0, 1) for name in ("a", "b", "c")])
    rows: list[tuple[float, Record]] = [
        (0, Transfer(TransferId(0), weights, "", ("a", "b", "c"))),
        (1, Transferred(TransferId(0), "a")),
        (1, Transferred(TransferId(0), "a")),
        (2, NodeLost("b", "it went down")),
        (2, Transferred(TransferId(0), "b")),
        (3, TransferFailed(TransferId(0), "c", "nobody has the rest")),
        (4, Transfer(TransferId(1), weights, "a", ("c",))),
        (6, Transferred(TransferId(1), "c")),
        (7, Evict("a", weights)),
        (8, Transfer(TransferId(2), weights, "", ("b", "c"), False)),
        (8, CancelTransfer(TransferId(2), "b")),
        (9, Transferred(TransferId(2), "b")),
    ]
    for at_s, record in rows:
        state.append(s(at_s), record)
    found = state.weights
    assert found.received == {"from the store": 1, "from a node": 1}
    assert found.received_bytes == {"from the store": 100, "from a node": 100}
    assert {source: list(taken_ns) for source, taken_ns in found.transfer_ns.items()} == {
        "from the store": [s(1)],
        "from a node": [s(2)],
    }
    assert (found.failed, found.cancelled, found.evicted) == (1, 1, 1)
    assert [list(record.receivers) for record in found.open.values()] == [["c"]]


# Pipelines

BOUNDS = (0, 1, 3)


def pair_of(number: int, now_ns: int) -> Rows:
    """The starts of two parts: replicas 10 and 11 of pipeline 1, 20 and 21 of pipeline 2."""
    spec, first = ReplicaSpec("classify", "small", Slot(2.0), shape=parts_at(BOUNDS)), 10 * number
    return [
        (now_ns, StartWorker(ReplicaId(first + place), spec, pipeline=WorkerId(first), place=place))
        for place in range(2)
    ]


def lives_of(state: RunState, *ids: int) -> list[Life]:
    return [state.replicas[ReplicaId(id)].life for id in ids]


def test_parts_serve_together_and_become_replicas_of_their_own() -> None:
    state, r10, r11 = RunState(GRAPH, start_ns=0), ReplicaId(10), ReplicaId(11)
    for now_ns, record in pair_of(1, 0):
        state.append(now_ns, record)
    assert {state.replicas[id].group.shape for id in (r10, r11)} == {parts_at(BOUNDS)}
    state.append(ms(5), WorkerReady(r10))
    assert lives_of(state, 10, 11) == [Life.STARTING] * 2, "the other part has yet to start"
    state.append(ms(8), WorkerReady(r11))
    assert lives_of(state, 10, 11) == [Life.READY] * 2
    assert list(state.workers.cold_start_ns["classify", "small", COLD_START]) == [ms(8), ms(8)]
    state.append(ms(9), WorkerCompleted(r11))
    assert state.replicas[r11].part is None
    assert state.replicas[r10].group.shape == state.replicas[r11].group.shape == parts_at(BOUNDS)
    state.append(ms(12), WorkerCompleted(r10))
    state.append(ms(12), WorkerCompleted(r10))
    assert {state.replicas[id].group.shape for id in (r10, r11)} == {ALONE}
    assert list(state.workers.pipelines.completion_ns["classify", "small"]) == [ms(9), ms(12)]
    assert (state.workers.pipelines.parts, state.workers.pipelines.lost, dict(state.workers.pipelines.open)) == (
        2,
        0,
        {},
    )
    assert not state.workers.pipelines.unanswered, "no batch has passed it, and none will"


def test_a_lost_part_takes_its_pipeline_along() -> None:
    state, r20, r21 = RunState(GRAPH, start_ns=0), ReplicaId(20), ReplicaId(21)
    rows: Rows = [
        *pair_of(2, 0),
        (ms(1), WorkerReady(r20)),
        (ms(1), WorkerReady(r21)),
        arrived(1, 1, 2),
        started(2, 1, 21, 1),
        (ms(5), BatchLost(BatchId(1), r21, "replica 20 is lost")),
        (ms(5), WorkerLost(r20, "it died")),
    ]
    for now_ns, record in rows:
        state.append(now_ns, record)
    assert state.replicas[r21].life is Life.STARTING
    assert state.replicas[r21].group.shape == ALONE
    assert waiting_since(state) == {1: ms(5)}, "its request is in the queue again"
    assert (state.workers.pipelines.parts, state.workers.pipelines.lost, dict(state.workers.pipelines.open)) == (
        2,
        1,
        {},
    )
    assert not state.workers.pipelines.unanswered
    state.append(ms(9), WorkerCompleted(r21))
    assert state.replicas[r21].life is Life.READY
    assert list(state.workers.pipelines.completion_ns["classify", "small"]) == [ms(9)], "since its order"
    assert list(state.workers.cold_start_ns["classify", "small", COLD_START]) == [ms(1), ms(1)], "it was cold once"
