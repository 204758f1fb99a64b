import pytest

from sloop.app.application import Application
from sloop.app.graph import Each, When
from sloop.core.state import Replica, Stage, State
from sloop.policies.order import Fifo
from sloop.units import ms, s
from sloop.vocabulary import Life, Node, ReplicaId, ReplicaSpec
from tests.core.scene import Belief, graph


def stage(replicas: int) -> Stage:
    made = Stage("only", (), {"a": Belief()}, Fifo(), s(1))
    for id in range(replicas):
        made.add(Replica(ReplicaId(id), ReplicaSpec("only", "a", 1.0), made, 0))
    return made


def test_idle_replicas_stay_sorted_however_they_come_and_go() -> None:
    made = stage(5)
    for id in (3, 0, 4, 1):
        made.add_idle(made.replicas[ReplicaId(id)])
    assert [r.id for r in made.idle] == [0, 1, 3, 4]
    made.remove_idle(made.replicas[ReplicaId(1)])
    assert [r.id for r in made.idle] == [0, 3, 4]


def test_each_waiting_visit_lengthens_the_queue_by_the_ready_replicas_share() -> None:
    made = stage(2)
    made.limit = 4
    made.refresh()
    assert made.startup_ns == s(5), "before any replica is ready, loading one is what there is to wait for, once"
    assert made.visit_ns == round(ms(14) / 4 / 2)
    for replica in made.replicas.values():
        made.turn(replica, Life.READY)
    made.refresh()
    assert made.startup_ns == 0
    assert made.visit_ns == round(ms(14) / 4 / 2)


def test_the_least_that_a_stage_takes_is_that_of_its_fastest_ready_replica() -> None:
    made = stage(0)
    made.limit = 4
    assert made.least_ns() == (0, 0), "with nobody there, nobody can say"
    for id, cores in enumerate((1.0, 2.0, 4.0)):
        made.add(Replica(ReplicaId(id), ReplicaSpec("only", "a", cores), made, 0))
    made.refresh()
    assert made.least_ns() == (ms(11 / 4), ms(14 / 4)), "the fastest that starts"
    made.turn(made.replicas[ReplicaId(1)], Life.READY)
    assert made.least_ns() == (ms(11 / 2), ms(14 / 2)), "of those that are ready"


def test_rates_are_those_of_the_largest_batches_that_the_plan_allows() -> None:
    made = stage(1)
    made.limit = 4
    assert made.rate_rps("a", 2.0) == pytest.approx(2 * 4 / 0.014)
    made.limit = 100
    assert made.rate_rps("a", 1.0) == pytest.approx(8 / 0.018), "the variant takes no more than eight"


def test_a_replica_counts_with_the_cores_it_has_or_is_about_to_be_left_with() -> None:
    made = stage(1)
    replica = made.replicas[ReplicaId(0)]
    made.limit, one_rps = 4, 4 / 0.014
    replica.target_cores = 4.0
    assert made.now_rps(replica.id) == pytest.approx(one_rps)
    expects = [made.expects]
    made.turn(replica, Life.READY)
    expects.append(made.expects)
    replica.cores, replica.target_cores, replica.resizing = 4.0, 2.0, 1
    assert made.now_rps(replica.id) == pytest.approx(2 * one_rps)
    expects.append(made.expects)
    replica.target_cores = 4.0
    made.turn(replica, Life.DRAINING)
    assert [*expects, made.expects] == [True, False, True, True], "it starts; it grows; it shrinks; it leaves"


def state(application: Application) -> State:
    stages = [Stage(stage.name, stage.after, {"a": Belief()}, Fifo(), s(1)) for stage in application.order]
    return State(stages, application.graph, [Node("n", "local", 4, 1000)])


def test_one_stage_needs_no_books_of_a_graph() -> None:
    alone = state(graph(only={}))
    assert alone.flights is None
    assert alone.flows is None
    assert alone.ingress is alone.stages["only"].monitor
    assert alone.visits() == {"only": 1.0}


def test_visits_are_only_counted_where_they_differ() -> None:
    chain = state(graph(a={}, b={"after": ("a",)}))
    assert chain.flows is None
    assert chain.flights == {}
    assert chain.ingress not in [stage.monitor for stage in chain.stages.values()]
    assert state(graph(a={}, b={"after": ("a",), "when": (When("a", "x"),)})).flows is not None


def test_stages_know_what_leads_away_from_them() -> None:
    parts = state(
        graph(
            a={}, b={"after": ("a",), "each": Each("a", most=7)}, c={"after": ("a", "b"), "join": True, "entry": True}
        )
    )
    assert [stage.runs_for_parts for stage in parts.stages.values()] == [False, True, False]
    assert [stage.name for stage in parts.sources] == ["a", "c"]


def test_what_is_ahead_follows_replicas_and_what_is_learnt() -> None:
    made = state(graph(a={}, b={"after": ("a",)}, c={"after": ("b",)}))
    for id, name in enumerate("abc"):
        there = made.stages[name]
        there.limit = 4
        replica = Replica(ReplicaId(id), ReplicaSpec(name, "a", 1.0, "n"), there, 0)
        made.replicas[replica.id] = replica
        there.add(replica)
        made.set_life(0, replica, Life.READY)
        there.add_idle(replica)
    assert [stage.remaining_ns for stage in made.stages.values()] == [ms(22), ms(11), 0]
    assert [stage.remaining_full_ns for stage in made.stages.values()] == [ms(28), ms(14), 0]
    made.set_cores(0, made.replicas[ReplicaId(2)], 2.0)
    assert [stage.remaining_ns for stage in made.stages.values()] == [ms(16.5), ms(5.5), 0]
    made.forget(0, made.replicas[ReplicaId(1)])
    assert [stage.remaining_ns for stage in made.stages.values()] == [ms(5.5), ms(5.5), 0]
