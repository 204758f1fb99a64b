"""The control path: ticks, plans and replicas."""

import pytest
from msgspec import structs

from sloop.actions import Action, Decided, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.app.graph import Each
from sloop.events import WOKE, Finished, NodeReady, Removed, WorkerLost, WorkerReady, WorkerResized, WorkerStopped
from sloop.policies.drop import Never
from sloop.units import ms, s
from sloop.vocabulary import BatchId, Group, Node, Path, Plan, ReplicaId, ReplicaSpec, RequestId, Slot, StagePlan
from tests.core.scene import Scene, graph, one_each, plan_of, request

R0, R1 = ReplicaId(0), ReplicaId(1)


def orders(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Decided)]


def notes(actions: list[Action]) -> list[str]:
    return [action.kind for action in actions if isinstance(action, Decided)]


def warm(count: int = 1, cores: float = 1.0) -> Scene:
    scene = Scene(plan_of(count, cores))
    scene.warm_up()
    return scene


def test_the_first_tick_adopts_a_plan_and_starts_its_replicas_on_a_node() -> None:
    scene = Scene(plan_of(2, cores=1.5))
    decided, first, second = scene.act(0, WOKE)
    assert isinstance(decided, Decided)
    assert (decided.kind, decided.why) == ("plan", "the test says so")
    assert isinstance(first, StartWorker)
    assert isinstance(second, StartWorker)
    assert (first.spec.node, second.spec.node) == ("n0", "n0")
    assert scene.core.wake_ns == s(1)


def test_an_unchanged_plan_orders_and_logs_nothing() -> None:
    scene = warm()
    assert scene.act(1000, WOKE) == []


def test_a_resize_counts_only_once_it_is_in_effect() -> None:
    scene = warm()
    scene.script.target = plan_of(1, cores=2)
    assert orders(scene.act(1000, WOKE)) == [ResizeWorker(R0, 2)]
    scene.act(1010, request(1, at_ms=1010))
    scene.act(1021, Finished(BatchId(0), R0, ms(11)))
    before = list(scene.beliefs["only", "a", ""].observed)
    scene.act(1050, WorkerResized(R0, 2), request(2, at_ms=1050))
    scene.act(1056, Finished(BatchId(1), R0, ms(5)))
    assert [*before, (1, 2, ms(6))] == [(1, 1.0, ms(11)), (1, 2, ms(6))] == scene.beliefs["only", "a", ""].observed
    assert scene.act(2000, WOKE) == []


def test_cores_are_freed_only_once_the_resize_is_in_effect() -> None:
    scene = warm(cores=3.0)
    scene.script.target = plan_of(1, cores=1)
    scene.act(1000, WOKE)
    assert scene.core.state.ledger.views()[0].free_cores == 1
    scene.act(1050, WorkerResized(R0, 1))
    assert scene.core.state.ledger.views()[0].free_cores == 3


def test_cores_that_a_replica_keeps_because_its_resize_was_refused_are_not_free() -> None:
    scene = warm(cores=3.0)
    scene.script.target = plan_of(1, cores=1)
    scene.act(1000, WOKE)
    scene.act(1050, WorkerResized(R0, 3))
    assert scene.core.state.ledger.views()[0].free_cores == 1


def test_a_shortage_of_cores_is_logged_once_and_retried() -> None:
    scene = Scene(plan_of(1, cores=3), nodes=[Node("n0", "local", 2, 1000)])
    assert notes(scene.act(0, WOKE)) == ["plan", "shortage"]
    assert scene.act(1000, WOKE) == []
    scene.script.target = plan_of(1, cores=2)
    assert [type(a) for a in orders(scene.act(2000, WOKE))] == [StartWorker]


def test_a_shortage_on_the_node_that_a_plan_names_is_logged_although_others_could_be_acquired() -> None:
    """They are of no use to the replica, whose requests would wait without a word."""
    target = plan_of(1, cores=3)
    [stage] = target.stages
    named = tuple(structs.replace(each, spec=structs.replace(each.spec, node="n0")) for each in stage.groups)
    target = structs.replace(target, stages=(structs.replace(stage, groups=named),))
    scene = Scene(target, nodes=[Node("n0", "local", 2, 1000), Node("r0", "local", 8, 1000, on_demand=True)])
    (_, short) = scene.act(0, WOKE)
    assert isinstance(short, Decided)
    assert (short.kind, short.why.partition(":")[0]) == (
        "shortage",
        "n0, where the plan wants it, has no room for a replica of a with 3 cores",
    )


def test_a_shortage_that_returns_is_logged_again() -> None:
    scene = Scene(plan_of(1, cores=3), nodes=[Node("n0", "local", 2, 1000)])
    assert notes(scene.act(0, WOKE)) == ["plan", "shortage"]
    scene.script.target = plan_of(0)
    assert notes(scene.act(1000, WOKE)) == ["plan"]
    scene.script.target = plan_of(1, cores=3)
    assert notes(scene.act(2000, WOKE)) == ["plan", "shortage"]


def test_a_node_that_grows_takes_more_replicas() -> None:
    scene = Scene(plan_of(1, cores=6))
    assert notes(scene.act(0, WOKE)) == ["plan", "shortage"]
    (started,) = orders(scene.act(100, NodeReady(Node("n0", "local", 8, 1000))))
    assert isinstance(started, StartWorker)


def test_scaling_in_lets_a_busy_replica_finish() -> None:
    scene = warm(2)
    scene.act(10, request(1, at_ms=10), request(2, at_ms=10))
    scene.script.target = plan_of(1)
    assert notes(scene.act(1000, WOKE)) == ["plan", "drain"]
    assert orders(scene.act(1001, Finished(BatchId(1), R1, ms(11))))[-1] == StopWorker(R1, "drained")
    scene.act(1002, WorkerStopped(R1))
    assert scene.core.state.ledger.views()[0].free_cores == 3
    assert scene.act(1003, request(3, at_ms=1003)) == []


def test_a_replica_that_dies_while_draining_is_not_replaced() -> None:
    scene = warm(2)
    scene.act(10, request(1, slo_ms=5000), request(2, slo_ms=5000))
    scene.script.target = plan_of(1)
    scene.act(1000, WOKE)
    assert scene.act(1001, WorkerLost(R1, "killed")) == []
    scene.act(1002, Finished(BatchId(0), R0, ms(11)))
    assert scene.actions[-1] == StartBatch(BatchId(2), R0, "only", (RequestId(2),))


def test_another_variant_takes_over_without_a_gap() -> None:
    scene = warm()
    scene.script.target = plan_of(1, variant="b")
    assert [type(a) for a in orders(scene.act(1000, WOKE))] == [StartWorker]
    assert isinstance(scene.act(1500, request(1, at_ms=1500))[0], StartBatch)
    assert notes(scene.act(1505, WorkerReady(R1))) == ["drain"]
    assert orders(scene.act(1511, Finished(BatchId(0), R0, ms(11))))[-1] == StopWorker(R0, "drained")


def test_the_old_replica_stops_first_where_its_replacement_has_no_room() -> None:
    scene = warm(1, cores=3.0)
    scene.script.target = plan_of(1, cores=3, variant="b")
    actions = scene.act(1000, WOKE)
    assert orders(actions) == [StopWorker(R0, "its replacement has no room while it runs")]
    started = orders(scene.act(1010, WorkerStopped(R0)))
    assert isinstance(started[0], StartWorker)


def test_a_replacement_that_fits_nowhere_stops_nothing() -> None:
    scene = warm(1, cores=3.0)
    scene.script.target = plan_of(1, cores=100, variant="b")
    actions = scene.act(1000, WOKE)
    assert (orders(actions), notes(actions)) == ([], ["plan", "shortage"])
    assert orders(scene.act(2000, WOKE)) == []


def test_lost_replicas_restart_at_once_then_with_exponential_backoff() -> None:
    scene = warm()
    assert isinstance(orders(scene.act(100, WorkerLost(R0, "killed")))[0], StartWorker)
    assert orders(scene.act(200, WorkerLost(R1, "killed"))) == []
    assert orders(scene.act(1000, WOKE)) == []
    assert isinstance(orders(scene.act(2000, WOKE))[0], StartWorker)
    scene.act(2001, WorkerReady(ReplicaId(2)), request(1, at_ms=2001))
    scene.act(2012, Finished(BatchId(0), ReplicaId(2), ms(11)))
    assert isinstance(orders(scene.act(2100, WorkerLost(ReplicaId(2), "killed")))[0], StartWorker)


def nodes_of(actions: list[Action]) -> list[str | None]:
    return [order.spec.node for order in actions if isinstance(order, StartWorker)]


def two_nodes(count: int = 1, cores: float = 4.0) -> Scene:
    """The place policy takes the first of two equal nodes, each with room for one replica."""
    nodes = [Node(name, "local", 4, 1000) for name in ("n0", "n1")]
    return Scene(plan_of(count, cores), nodes=nodes)


def test_a_replica_that_cannot_start_on_a_node_starts_on_another_one() -> None:
    """A node with a full disk has the most room, and would get every start."""
    scene = two_nodes()
    assert nodes_of(scene.act(0, WOKE)) == ["n0"]
    assert nodes_of(scene.act(10, WorkerLost(R0, "no space left on the disk"))) == ["n1"]
    scene.act(20, WorkerReady(R1))
    scene.script.target = plan_of(2, 4.0)
    assert nodes_of(scene.act(1000, WOKE)) == ["n0"], "no other node has room"
    scene.act(1010, WorkerLost(ReplicaId(2), "no space left on the disk"))
    assert nodes_of(scene.act(3000, WOKE)) == ["n0"]


def avoided() -> Scene:
    """A replica was lost on n0 before it could serve; now there is none."""
    scene = two_nodes()
    scene.act(0, WOKE)
    scene.act(10, WorkerLost(R0, "no space left on the disk"))
    scene.act(20, WorkerReady(R1))
    return scene


def next_node(scene: Scene, now_ms: float) -> str | None:
    """Stop all replicas, then start one; returns its node."""
    scene.script.target = plan_of(0)
    stopped = [action.worker for action in scene.act(now_ms, WOKE) if isinstance(action, StopWorker)]
    scene.act(now_ms + 10, *map(WorkerStopped, stopped))
    scene.script.target = plan_of(1, 4.0)
    (node,) = nodes_of(scene.act(now_ms + 1000, WOKE))
    return node


def test_a_node_is_avoided_for_five_minutes() -> None:
    assert next_node(avoided(), 1000) == "n1"
    assert next_node(avoided(), 298_000) == "n1"
    assert next_node(avoided(), 300_000) == "n0"


def test_a_node_that_comes_again_is_not_avoided() -> None:
    scene = avoided()
    scene.act(100, NodeReady(Node("n0", "local", 4, 1000)))
    assert next_node(scene, 1000) == "n0"


def test_a_node_where_a_replica_serves_is_not_avoided_even_if_that_dies() -> None:
    scene = avoided()
    scene.script.target = plan_of(2, 4.0)
    assert nodes_of(scene.act(1000, WOKE)) == ["n0"], "no other has room"
    scene.act(1010, WorkerReady(ReplicaId(2)))
    scene.act(1020, WorkerLost(ReplicaId(2), "killed"))
    assert next_node(scene, 3000) == "n0"


def test_batches_of_others_do_not_hasten_the_next_start_after_failed_ones() -> None:
    """Otherwise a node that cannot start replicas would try as often as others answer."""
    scene = avoided()
    scene.script.target = plan_of(2, 4.0)
    assert nodes_of(scene.act(1000, WOKE)) == ["n0"]
    started_s = []
    for id in range(130):
        now_ms = 1100 + 100 * id
        failed = [WorkerLost(each.id, "no space") for each in scene.core.state.replicas.values() if each.node == "n0"]
        actions = [*scene.act(now_ms, *failed), *scene.act(now_ms + 10, request(id, at_ms=now_ms + 10))]
        (batch,) = [each.batch for each in actions if isinstance(each, StartBatch)]
        actions += scene.act(now_ms + 40, Finished(batch, R1, ms(4)))
        started_s += [now_ms / 1000 for _ in nodes_of(actions)]
    assert started_s == [3.0, 5.0, 8.0, 13.0]


def test_replicas_lost_together_are_replaced_at_once() -> None:
    scene = warm(4)
    actions = scene.act(100, *[WorkerLost(ReplicaId(id), "the node is lost") for id in range(4)])
    assert [type(order) for order in orders(actions)] == [StartWorker] * 4
    assert orders(scene.act(200, WorkerLost(ReplicaId(4), "killed"))) == []
    scene.act(300, WorkerLost(ReplicaId(5), "killed"))
    assert len(orders(scene.act(2000, WOKE))) == 2, "after one second, not two"


def test_a_request_that_finds_no_replica_does_not_wait_for_the_planning_period() -> None:
    scene = Scene(plan_of(0))
    scene.act(0, WOKE)
    scene.script.target = plan_of(1)
    actions = scene.act(300, request(1, at_ms=300))
    assert isinstance(orders(actions)[0], StartWorker)
    assert scene.script.seen[-1].stages[0].queue[0].request.id == 1
    assert isinstance(scene.act(400, WorkerReady(R0))[0], StartBatch)


def test_a_request_that_arrives_with_other_events_does_not_wait_for_the_planning_period_either() -> None:
    scene = Scene(plan_of(0))
    scene.act(0, WOKE)
    scene.script.target = plan_of(1)
    assert scene.core.handle(ms(300), request(1, at_ms=300), True) == []
    assert isinstance(orders(scene.act(300, WorkerStopped(ReplicaId(77))))[0], StartWorker)


def test_a_policy_that_returns_none_keeps_the_plan() -> None:
    scene = warm()
    scene.script.target = None
    assert scene.act(1000, WOKE) == []
    assert scene.core.plan_of("") == plan_of(1)


def test_views_show_what_was_measured() -> None:
    scene = warm()
    for id in range(10):
        scene.act(100 * id, request(id, at_ms=100 * id, elapsed_ms=40))
        scene.act(100 * id + 50, Finished(BatchId(id), R0, ms(50)))
    scene.act(1000, WOKE)
    (stage,) = scene.script.seen[-1].stages
    assert stage.rate_rps() == 10
    assert stage.utilisation(s(1)) == 0.5
    assert stage.concurrency(s(1)) == 0.5
    assert stage.buckets[-1].slack_ns == [ms(960)] * 10
    assert scene.script.seen[-1].demand_rps == {"only": 10}


def test_a_change_of_feasibility_is_logged_once() -> None:
    scene = warm()
    good = plan_of()
    scene.script.target = structs.replace(good, why="only is short of 3 rps", feasible=False)
    (kept,) = scene.act(1000, WOKE)
    assert isinstance(kept, Decided)
    assert (kept.kind, kept.why, kept.plan) == ("kept", "only is short of 3 rps", scene.script.target)
    assert scene.act(2000, WOKE) == scene.act(3000, WOKE) == []
    scene.script.target = good
    (kept,) = scene.act(4000, WOKE)
    assert isinstance(kept, Decided)
    assert (kept.kind, kept.plan) == ("kept", good), "it is feasible again"
    assert scene.act(4500, WOKE) == scene.act(5000, WOKE) == []
    scene.script.target = structs.replace(good, why="again", feasible=False)
    assert notes(scene.act(6000, WOKE)) == ["kept"]
    scene.script.target = plan_of(2)
    assert notes(scene.act(7000, WOKE)) == ["plan"]


def test_a_solver_that_gives_up_is_logged_also_after_an_infeasible_plan() -> None:
    """Compared by `gave_up`, not by reasons, whose figures differ from one decision to the next."""
    scene = Scene(structs.replace(plan_of(), why="40.2 rps are too many", feasible=False))
    scene.warm_up()

    def logged(second: int, *, gave_up: bool) -> list[str]:
        why = f"{second} rps: given up" if gave_up else f"{second} rps are too many"
        scene.script.target = structs.replace(plan_of(), why=why, feasible=False, gave_up=gave_up)
        return [action.why for action in scene.act(1000 * second, WOKE) if isinstance(action, Decided)]

    assert [logged(second, gave_up=False) for second in (3, 4)] == [[], []]
    assert [logged(second, gave_up=True) for second in (5, 6, 7)] == [["5 rps: given up"], [], []]
    assert [logged(second, gave_up=False) for second in (8, 9)] == [["8 rps are too many"], []]


def test_a_plan_that_leaves_out_a_stage_is_refused_and_the_stage_is_named() -> None:
    chain = graph(first={}, second={"after": ("first",)})
    scene = Scene(one_each(chain), application=chain)
    scene.warm_up()
    only_first = one_each(chain).stages[:1]
    scene.script.target = structs.replace(one_each(chain), stages=only_first)
    (refused,) = scene.act(1000, WOKE)
    assert isinstance(refused, Decided)
    assert refused.kind == "planner"
    assert "the plan leaves out stage 'second'" in refused.why


def test_a_visit_that_reaches_a_later_stage_without_replicas_does_not_wait_for_the_planning_period() -> None:
    chain = graph(first={}, second={"after": ("first",)})
    both = one_each(chain)
    nothing = StagePlan("second", (), 1)
    scene = Scene(structs.replace(both, stages=(both.stages[0], nothing)), application=chain)
    scene.warm_up()
    (batch,) = scene.act(100, request(1, at_ms=100))
    assert isinstance(batch, StartBatch)
    scene.script.target = both
    actions = scene.act(111, Finished(batch.batch, batch.replica, ms(11)))
    assert [a.spec.stage for a in orders(actions) if isinstance(a, StartWorker)] == ["second"]


PARTS = graph(
    find={}, read={"after": ("find",), "each": Each("find", mean=3.0)}, tell={"after": ("read",), "join": True}
)


def test_views_of_a_graph_show_ingress_traffic_and_visits_per_request() -> None:
    scene = Scene(one_each(PARTS), application=PARTS)
    scene.warm_up()
    for id in range(20):
        at_ms = 40.0 * id
        (start,) = scene.act(at_ms, request(id, at_ms=at_ms))
        assert isinstance(start, StartBatch)
        scene.act(at_ms + 11, Finished(start.batch, start.replica, ms(11), ((0,),)))
    scene.act(1000, WOKE)
    view = scene.script.seen[-1]
    assert (view.ingress.rate_rps(), view.forecast_rps) == (20, 20)
    assert {stage.name: stage.visits for stage in view.stages} == pytest.approx(
        {"find": 1, "read": 1.5, "tell": 1}, rel=0.01
    )
    assert view.demand_rps == pytest.approx({"find": 20, "read": 30, "tell": 20}, rel=0.01)
    assert [stage.rate_rps() for stage in view.stages] == [20, 0, 0]
    assert view.paths == (Path(("find", "read", "tell"), ms(1000)),)
    assert [stage.slo_ns for stage in view.stages] == [ms(1000)] * 3


def test_the_waiting_time_of_a_plan_comes_into_force() -> None:
    plan = plan_of()
    scene = Scene(structs.replace(plan, stages=(structs.replace(plan.stages[0], wait_ns=ms(7)),)))
    scene.warm_up()
    assert scene.application.stages["only"].queue.wait_ns == ms(7)


def test_a_replica_that_the_plan_wants_on_its_node_is_not_moved_to_another() -> None:
    """Found by a random schedule: a larger one was started elsewhere, was of no use to the plan, was stopped, and so on
    for ever, because each stop was a reason to compare again."""
    scene = Scene(nodes=(Node("n0", "local", 4, 1000), Node("n1", "local", 8, 1000)))

    def plan(cores: float, node: str | None) -> Plan:
        groups = (
            Group(ReplicaSpec("only", "a", Slot(cores), node), 1),
            Group(ReplicaSpec("only", "b", Slot(3)), 1),
        )
        return Plan((StagePlan("only", groups, 4),), why="the test says so")

    scene.script.target = plan(1, None)
    scene.warm_up()
    assert {replica.node for replica in scene.core.state.replicas.values()} == {"n0"}
    scene.script.target = plan(2, "n0")
    actions = scene.act(1000, WOKE)
    assert not orders(actions)
    assert notes(actions) == ["plan", "shortage"]
    scene.script.target = plan(2, None)
    assert [type(order) for order in orders(scene.act(2000, WOKE))] == [StartWorker]


@pytest.mark.parametrize("cores", [(1, 0), (1, 9)])
def test_a_version_that_retires_is_planned_again_if_a_stage_with_requests_gets_no_replica(
    cores: tuple[float, float],
) -> None:
    """Found by random schedules. Its plan stays as it was when it began to retire: without a replica for the second
    stage, or with one that has no room. Its requests would wait there for ever."""

    def plan(*cores: float) -> Plan:
        stages = zip("ab", cores, strict=True)
        groups = {name: (Group(ReplicaSpec(name, "a", Slot(each), "n0"), 1),) if each else () for name, each in stages}
        return Plan(tuple(StagePlan(name, own, 4) for name, own in groups.items()), why="the test says so")

    scene = Scene(plan(*cores), application=graph(a={}, b={"after": ("a",)}), drop=Never())
    scene.warm_up()
    scene.act(10, request(1, at_ms=10), request(2, at_ms=10))
    scene.act(30, Finished(BatchId(0), R0, ms(20)))
    scene.act(40, Removed(""))
    scene.script.target = plan(1, 1)
    (order,) = orders(scene.act(1000, WOKE))
    assert isinstance(order, StartWorker)
    assert order.spec.stage == "b"


def test_a_replica_outside_the_plan_does_not_wait_for_a_resize_that_was_refused() -> None:
    """Found by a random schedule: it was kept for ever, because the other never got the cores of the plan."""
    scene = Scene(plan_of(1))
    scene.warm_up()
    groups = (Group(ReplicaSpec("only", "a", Slot(2)), 1), Group(ReplicaSpec("only", "b", Slot(1)), 1))
    scene.script.target = Plan((StagePlan("only", groups, 4),), why="the test says so")
    scene.act(1000, WOKE)
    scene.act(1010, WorkerReady(R1))
    scene.act(1020, WorkerResized(R0, 1.0))
    scene.script.target = plan_of(1, cores=2)
    assert orders(scene.act(2000, WOKE)) == [StopWorker(R1, "the plan has no use for it")]
