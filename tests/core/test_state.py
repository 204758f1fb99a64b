"""State: queues, replica pools, limits and estimates of one stage; and what the state of a graph adds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import StartBatch
from sloop.app.application import Application
from sloop.app.graph import Each, When
from sloop.core.application import ApplicationState
from sloop.core.ledger import Ledger
from sloop.core.life import WorkerState
from sloop.core.monitor import Monitor
from sloop.core.queue import Queue, group_size
from sloop.core.rates import BatchLimits
from sloop.core.replica import Replica, RunningBatch
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.events import Finished
from sloop.policies.order import Edf, Fifo
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Group,
    Life,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    StagePlan,
    Visit,
    Worker,
)
from tests.core.scene import Belief, Scene, graph, plan_of, request


def stage(replicas: int) -> StageState:
    made = StageState("only", (), {("a", ""): Belief()}, Fifo(), Monitor(s(1)))
    for id in range(replicas):
        made.pool.add(replica_of(made, id))
    return made


def replica_of(stage: StageState, id: int, cores: float = 1.0) -> Replica:
    return Replica(ReplicaId(id), ReplicaSpec(stage.name, "a", Slot(cores)), stage, 0, "n")


def test_idle_replicas_stay_sorted_however_they_come_and_go() -> None:
    made = stage(5)
    for id in (3, 0, 4, 1):
        made.pool.add_idle(made.pool.replicas[ReplicaId(id)])
    assert [r.id for r in made.pool.idle] == [0, 1, 3, 4]
    made.pool.remove_idle(made.pool.replicas[ReplicaId(1)])
    assert [r.id for r in made.pool.idle] == [0, 3, 4]


def test_the_view_of_a_replica_is_kept_until_the_replica_changes() -> None:
    made = stage(4)
    pool, replicas = made.pool, [made.pool.replicas[ReplicaId(id)] for id in range(4)]
    before = pool.views()
    assert pool.views() is before
    pool.set_life(replicas[0], Life.READY)
    pool.set_life(replicas[3], Life.DRAINING)
    replicas[1].order_cores(2.0)
    pool.running[ReplicaId(0)] = RunningBatch(BatchId(0), [visit(0)], 0, replicas[0].service_rate, 1)
    first, second, third = pool.views()
    assert (first.life, first.running, second.spec.cores) == (Life.READY, 1, 2.0)
    assert third is before[2]
    del pool.running[ReplicaId(0)]
    pool.remove(replicas[1])
    assert [(each.id, each.running) for each in pool.views()] == [(0, 0), (2, 0)]


def test_running_batches_stay_in_order_of_their_begin() -> None:
    """A replica reports a batch again that has long finished: what it runs now runs on."""
    scene = Scene(plan_of(2))
    scene.warm_up()
    (first, second) = [each for id in (0, 1) for each in scene.act(10 + id, request(id, at_ms=10 + id))]
    assert isinstance(first, StartBatch)
    assert isinstance(second, StartBatch)
    running = scene.core.state.applications[""].stages["only"].pool.running
    before = list(running)
    assert scene.act(20, Finished(BatchId(99), first.replica, 1)) == []
    assert list(scene.core.state.applications[""].stages["only"].pool.running) == before == [0, 1]


def test_each_waiting_visit_lengthens_the_queue_by_the_ready_replicas_share() -> None:
    made = stage(2)
    made.limits.follow(StagePlan("only", (), 4))
    made.refresh()
    assert made.times.startup_ns == s(5), "before any replica is ready, loading one is what there is to wait for, once"
    assert made.times.row_ns == round(ms(14) / 4 / 2)
    for replica in made.pool.replicas.values():
        made.pool.set_life(replica, Life.READY)
    made.refresh()
    assert made.times.startup_ns == 0
    assert made.times.row_ns == round(ms(14) / 4 / 2)


def test_the_least_time_at_a_stage_is_that_of_its_fastest_ready_replica() -> None:
    made = stage(0)
    made.limits.follow(StagePlan("only", (), 4))
    assert made.pool.least_ns() == (0, 0), "with nobody there, nobody can say"
    for id, cores in enumerate((1.0, 2.0, 4.0)):
        made.pool.add(replica_of(made, id, cores))
    made.refresh()
    assert made.pool.least_ns() == (ms(11 / 4), ms(14 / 4)), "the fastest that starts"
    made.pool.set_life(made.pool.replicas[ReplicaId(1)], Life.READY)
    assert made.pool.least_ns() == (ms(11 / 2), ms(14 / 2)), "of those that are ready"


def test_rates_are_those_of_the_largest_batches_that_the_plan_allows() -> None:
    made = stage(1)
    made.limits.follow(StagePlan("only", (), 4))
    assert made.pool.rate_rps(ReplicaSpec("only", "a", Slot(2.0))) == pytest.approx(2 * 4 / 0.014)
    made.limits.follow(StagePlan("only", (), 100))
    assert made.pool.rate_rps(ReplicaSpec("only", "a", Slot(1.0))) == pytest.approx(8 / 0.018), (
        "the variant takes no more than eight"
    )


PAIR = (Worker(1.0, (0, 1)),)


def test_speeds_and_limits_belong_to_a_form() -> None:
    """A replica in another shape, on an equal slot, has a speed and a limit of its own; `ALONE` is the usual one."""
    made = stage(1)
    belief, spec = made.beliefs["a", ""], ReplicaSpec("only", "a", Slot(1.0))
    paired = structs.replace(spec, shape=PAIR)
    assert (spec.shape, paired.shape) == (ALONE, PAIR)
    made.limits.follow(StagePlan("only", (Group(spec, 1), Group(paired, 1, batch_max=8, rate_rps=90)), 2))
    made.refresh()
    alone, pair = made.pool.service_rate("a", spec.slot), made.pool.service_rate("a", spec.slot, PAIR)
    assert (alone.shape, pair.shape) == (ALONE, PAIR)
    assert alone is made.pool.service_rate("a", Slot(1.0), ALONE) is made.pool.replicas[ReplicaId(0)].service_rate
    assert (alone.belief, pair.belief) == (belief, belief.of(PAIR))
    assert (alone.batch_max, pair.batch_max) == (2, 8)
    assert (alone.weight, pair.weight) == (1.0, 90)
    assert isinstance(pair.belief, Belief)
    pair.belief.times = 0.5
    assert made.pool.rate_rps(spec) == pytest.approx(2 / 0.012)
    assert made.pool.rate_rps(paired) == pytest.approx(8 / 0.009)


def test_batches_and_rates_belong_to_the_group_of_a_slot() -> None:
    slow, fast = Slot(1.0, "c5"), Slot(4.0, "g4dn", "T4")
    limits = BatchLimits()
    groups = (
        Group(ReplicaSpec("s", "a", slow), 2, batch_max=2, rate_rps=20),
        Group(ReplicaSpec("s", "a", fast), 1, batch_max=32, rate_rps=300),
        Group(ReplicaSpec("s", "b", slow), 3),
    )
    limits.follow(StagePlan("s", groups, batch_max=4))
    assert [limits.batch_max("a", slow), limits.batch_max("a", fast), limits.batch_max("b", slow)] == [2, 32, 4]
    assert [limits.weight("a", slow), limits.weight("a", fast), limits.weight("b", slow)] == [10, 300, 1]
    grown = Slot(2.0, "c5")
    assert limits.batch_max("a", grown) == 2, "a replica that is being resized keeps the limit of its kind"
    limits.follow(StagePlan("s", (), batch_max=7))
    assert limits.batch_max("a", fast) == 32, "it keeps its limit until it is replaced"
    assert limits.batch_max("c", fast) == 7


def test_equal_replicas_on_different_devices_have_the_batches_and_rates_that_the_plan_says_for_each() -> None:
    slot = Slot(1.0, "g4dn", "T4", 0.0)
    limits = BatchLimits()

    def group(node: str | None, device: str | None, batch_max: int, rate_rps: float) -> Group:
        return Group(ReplicaSpec("s", "a", slot, node, device), 1, batch_max, rate_rps)

    def of(*where: str) -> tuple[int, float]:
        place = (where[0], where[1]) if ("a", slot, ALONE) in limits.placed else None
        return limits.batch_max("a", slot, ALONE, place), limits.weight("a", slot, ALONE, place)

    few, many = group("n0", "T4-0", 2, 10), group("n1", "T4-0", 16, 90)
    assert limits.follow(StagePlan("s", (few, many), 16)), "what replicas have depends on their place from now on"
    assert (of("n0", "T4-0"), of("n1", "T4-0")) == ((2, 10), (16, 90))
    assert of("n2", "T4-0") == (16, 90), "it is to go: as before, what the last group says"
    assert not limits.follow(StagePlan("s", (few, many), 8))
    limits.follow(StagePlan("s", (few, group("n1", None, 4, 50), group(None, None, 8, 30)), 16))
    assert [of("n0", "T4-0"), of("n0", "T4-1"), of("n1", "T4-1")] == [(2, 10), (8, 30), (4, 50)]
    assert limits.follow(StagePlan("s", (few, group("n1", "T4-0", 2, 10)), 16)), "all are equal again"
    assert not limits.placed


def test_a_group_without_a_limit_of_its_own_has_that_of_the_plan_and_not_of_another_group() -> None:
    """Found by a random schedule."""
    limits = BatchLimits()
    small, large = Slot(1), Slot(2)
    groups = (Group(ReplicaSpec("s", "a", small), 1), Group(ReplicaSpec("s", "a", large), 1, batch_max=8))
    limits.follow(StagePlan("s", groups, batch_max=2))
    assert (limits.batch_max("a", small), limits.batch_max("a", large)) == (2, 8)


def test_a_replica_under_resize_counts_with_the_smaller_number_of_cores() -> None:
    made = stage(1)
    replica = made.pool.replicas[ReplicaId(0)]
    made.limits.follow(StagePlan("only", (), 4))
    one_rps = 4 / 0.014
    replica.target_cores = 4.0
    assert made.pool.present_rps(replica.id) == pytest.approx(one_rps)
    expects = [made.pool.is_changing]
    made.pool.set_life(replica, Life.READY)
    expects.append(made.pool.is_changing)
    replica.slot, replica.target_cores, replica.resizing = Slot(4.0), 2.0, 1
    assert made.pool.present_rps(replica.id) == pytest.approx(2 * one_rps)
    expects.append(made.pool.is_changing)
    replica.target_cores = 4.0
    made.pool.set_life(replica, Life.DRAINING)
    assert [*expects, made.pool.is_changing] == [True, False, True, True], "it starts; it grows; it shrinks; it leaves"


def state(application: Application) -> ApplicationState:
    return Scene(application=application).application


def test_an_application_of_one_stage_keeps_no_graph_state() -> None:
    alone = state(graph(only={}))
    assert alone.open_requests is None
    assert alone.visit_rates is None
    assert alone.ingress is alone.stages["only"].monitor
    assert alone.visits() == {"only": 1.0}


def test_visits_are_counted_only_where_they_differ_between_stages() -> None:
    chain = state(graph(a={}, b={"after": ("a",)}))
    assert chain.visit_rates is None
    assert chain.open_requests == {}
    assert chain.ingress not in [stage.monitor for stage in chain.stages.values()]
    assert state(graph(a={}, b={"after": ("a",), "when": (When("a", "x"),)})).visit_rates is not None


def test_stages_know_whether_they_run_for_parts_and_entries_are_found() -> None:
    parts = state(
        graph(
            a={}, b={"after": ("a",), "each": Each("a", most=7)}, c={"after": ("a", "b"), "join": True, "entry": True}
        )
    )
    assert [stage.runs_for_parts for stage in parts.stages.values()] == [False, True, False]
    assert [stage.name for stage in parts.entries] == ["a", "c"]


def test_remaining_times_follow_changes_of_replicas() -> None:
    made = state(graph(a={}, b={"after": ("a",)}, c={"after": ("b",)}))
    shared = State(Ledger([]))
    shared.replicas = made.replicas
    for id, name in enumerate("abc"):
        there = made.stages[name]
        there.limits.follow(StagePlan(name, (), 4))
        replica = replica_of(there, id)
        made.replicas[replica.id], shared.workers[replica.id] = replica, replica.workers[0]
        there.pool.add(replica)
        shared.enter(0, replica.workers[0], WorkerState.SERVING)
    assert [stage.queue.remaining_ns for stage in made.stages.values()] == [ms(22), ms(11), 0]
    assert [stage.queue.remaining_full_ns for stage in made.stages.values()] == [ms(28), ms(14), 0]
    shared.change(0, made.replicas[ReplicaId(2)], Slot(2.0), ALONE)
    assert [stage.queue.remaining_ns for stage in made.stages.values()] == [ms(16.5), ms(5.5), 0]
    shared.forget(0, made.replicas[ReplicaId(1)].workers[0], [])
    assert [stage.queue.remaining_ns for stage in made.stages.values()] == [ms(5.5), ms(5.5), 0]


def visit(id: int, *, arrived: int = 0, deadline: int = 0) -> Visit:
    return Visit(Request(RequestId(id), arrived, arrived, deadline), "s", arrived, deadline)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 30))
def test_edf_takes_the_earliest_deadlines_and_ties_in_order_of_arrival(deadlines: list[int], count: int) -> None:
    queue = Queue("only", Edf())
    for id, deadline in enumerate(deadlines):
        queue.push(0, visit(id, arrived=id, deadline=deadline))
    assert queue.sweep_ns == min(deadlines) + 1
    taken = [v.request.id for v in queue.take(count)]
    expected = sorted(range(len(deadlines)), key=lambda id: (deadlines[id], id))
    assert taken == expected[:count]
    assert [v.request.id for v in queue.visits] == expected[count:]
    assert (queue.sweep_ns == FOREVER_NS) is (not queue.visits), "an empty queue is never searched"


@given(st.lists(st.integers(-5, 5), max_size=10), st.lists(st.integers(1, 4), max_size=4), st.integers(1, 4))
def test_visits_that_are_tried_again_come_first_group_by_group(
    deadlines: list[int], sizes: list[int], most: int
) -> None:
    queue, groups, id = Queue("only", Edf()), list[list[int]](), 100
    seen = queue.visits
    for size in sizes:
        groups.append(list(range(id, id + size)))
        queue.push_again(0, [visit(each, deadline=3) for each in groups[-1]])
        id += size
    for number, deadline in enumerate(deadlines):
        queue.push(0, visit(number, deadline=deadline))
    for group in groups:
        while group:
            size = group_size(queue.visits, most)
            assert size == min(most, len(group))
            assert [v.request.id for v in queue.take(size)] == group[:size]
            del group[:size]
    expected = sorted(range(len(deadlines)), key=lambda number: (deadlines[number], number))
    assert [v.request.id for v in queue.visits] == expected
    assert queue.visits is seen
    assert (queue.sweep_ns == FOREVER_NS) is (not queue.visits)


def test_fifo_keeps_the_order_of_arrival_whatever_the_deadlines() -> None:
    queue = Queue("only", Fifo())
    for id, deadline in enumerate((9, 3, 5)):
        queue.push(0, visit(id, arrived=id, deadline=deadline))
    assert [v.request.id for v in queue.visits] == [0, 1, 2]


def test_removing_a_request_keeps_the_rest_in_order() -> None:
    queue = Queue("only", Edf())
    for id, deadline in enumerate((5, 1, 3)):
        queue.push(0, visit(id, deadline=deadline))
    assert queue.remove_request(RequestId(2)) == 1
    assert queue.remove_request(RequestId(2)) == 0
    queue.push(0, visit(7, deadline=4))
    assert [v.request.id for v in queue.visits] == [1, 7, 0]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=20))
def test_removing_several_visits_keeps_the_rest_in_order(waiting: list[tuple[int, bool]]) -> None:
    queue = Queue("only", Edf())
    for id, (deadline, _) in enumerate(waiting):
        queue.push(0, visit(id, deadline=deadline))
    goes = {id for id, (_, gone) in enumerate(waiting) if gone}
    before, seen = [v.request.id for v in queue.visits], queue.visits
    queue.remove([index for index, id in enumerate(before) if id in goes])
    assert [v.request.id for v in queue.visits] == [id for id in before if id not in goes]
    assert queue.visits is seen, "policies and the core hold on to it"
    queue.push(0, visit(99, deadline=3))
    deadlines = [v.deadline_ns for v in queue.visits]
    assert deadlines == sorted(deadlines), "keys went with their visits"
