"""From one plan to another: replicas serve until others can, and every plan that fits is reached."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import Action, Decided, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.app.application import Variant
from sloop.events import WOKE, Finished, WorkerReady, WorkerResized, WorkerStopped
from sloop.policies.drop import Never
from sloop.vocabulary import Group, Life, Node, Plan, ReplicaId, ReplicaSpec, Slot, StagePlan
from tests.core.scene import Scene, graph, plan_of, request
from tests.core.test_control import R0, R1, notes, orders, warm


def carry_out(scene: Scene, at_ms: float, order: Action) -> list[Action]:
    """The driver reports that an order is carried out; returns the actions that follow."""
    if isinstance(order, StartWorker):
        return scene.act(at_ms, WorkerReady(order.worker))
    if isinstance(order, ResizeWorker):
        return scene.act(at_ms, WorkerResized(order.worker, order.cores))
    assert isinstance(order, StopWorker), order
    return scene.act(at_ms, WorkerStopped(order.worker))


def settle(scene: Scene, at_ms: float, actions: list[Action]) -> None:
    """All orders are carried out, and all that follow from them."""
    waiting = orders(actions)
    while waiting:
        waiting += orders(carry_out(scene, at_ms, waiting.pop(0)))


def kinds_of(scene: Scene) -> dict[tuple[str, str, float], int]:
    """How many replicas there are by stage, variant and cores."""
    found: dict[tuple[str, str, float], int] = {}
    for replica in scene.core.state.replicas.values():
        key = (replica.spec.stage, replica.spec.variant, replica.cores)
        found[key] = found.get(key, 0) + 1
    return found


def test_a_replica_shrinks_only_once_the_others_are_ready() -> None:
    scene = Scene(plan_of(1, cores=4), nodes=[Node("n0", "local", 7, 1000)])
    scene.warm_up()
    scene.script.target = plan_of(4)
    started = orders(scene.act(1000, WOKE))
    assert [type(a) for a in started] == [StartWorker] * 3
    assert orders(scene.act(1001, WorkerReady(ReplicaId(1)), WorkerReady(ReplicaId(2)))) == []
    assert orders(scene.act(1002, WorkerReady(ReplicaId(3)))) == [ResizeWorker(R0, 1)]
    assert notes(scene.actions) == ["plan", "plan"]


def test_a_replica_shrinks_first_where_the_others_have_no_room() -> None:
    scene = warm(cores=4.0)
    scene.script.target = plan_of(4)
    assert orders(scene.act(1000, WOKE)) == [ResizeWorker(R0, 1)]
    settle(scene, 1010, scene.act(1010, WorkerResized(R0, 1)))
    assert kinds_of(scene) == {("only", "a", 1.0): 4}
    assert notes(scene.actions) == ["plan", "plan"], "room was on its way: nothing is short"


def test_no_shortage_is_logged_while_room_will_be_freed() -> None:
    scene = Scene(plan_of(2, cores=2))
    scene.warm_up()
    scene.script.target = plan_of(4)
    settle(scene, 1010, scene.act(1000, WOKE))
    assert kinds_of(scene) == {("only", "a", 1.0): 4}
    assert notes(scene.actions) == ["plan", "plan"]


def test_a_replica_grows_into_the_room_of_replicas_that_wait_for_it() -> None:
    scene = Scene(plan_of(4))
    scene.warm_up()
    scene.script.target = plan_of(1, cores=4)
    settle(scene, 1010, scene.act(1000, WOKE))
    assert kinds_of(scene) == {("only", "a", 4.0): 1}
    assert notes(scene.actions) == ["plan", "plan"]
    why = {action.why for action in scene.actions if isinstance(action, StopWorker)}
    assert why == {"its replacement has no room while it runs"}


def test_a_refused_resize_does_not_delay_other_replicas() -> None:
    scene = warm(2, cores=2.0)
    scene.script.target = plan_of(2, cores=1)
    scene.act(1000, WOKE)
    scene.act(1010, WorkerResized(R0, 2), WorkerResized(R1, 1))
    scene.script.target = plan_of(1, cores=4, variant="b")
    waiting = orders(scene.act(2000, WOKE))
    while waiting:
        waiting += orders(carry_out(scene, 2001, waiting.pop(0)))
    assert kinds_of(scene) == {("only", "b", 4.0): 1}


def test_a_replica_to_be_replaced_keeps_its_largest_batch() -> None:
    scene = Scene(plan_of(batch_max=4), drop=Never())
    scene.warm_up()
    scene.script.target = plan_of(batch_max=1, variant="b")
    scene.act(1000, WOKE)
    (first,) = scene.act(1001, request(0))
    assert isinstance(first, StartBatch)
    scene.act(1002, *(request(id) for id in range(1, 7)))
    started = scene.act(1012, Finished(first.batch, first.replica, 1), WorkerReady(R1))
    sizes = {action.replica: len(action.requests) for action in started if isinstance(action, StartBatch)}
    assert sizes == {R0: 4, R1: 1}


TWO = graph(a={}, b={"after": ("a",)})


def sizes(a: float, b: float) -> Plan:
    stages = [
        StagePlan(name, (Group(ReplicaSpec(name, "a", Slot(cores)), 1),), 4) for name, cores in (("a", a), ("b", b))
    ]
    return Plan(tuple(stages), why="two")


@pytest.mark.parametrize(("before", "after"), [((3.0, 1.0), (1.0, 3.0)), ((1.0, 3.0), (3.0, 1.0))])
def test_on_a_full_node_one_shrinks_before_another_grows(
    before: tuple[float, float], after: tuple[float, float]
) -> None:
    scene = Scene(sizes(*before), application=TWO)
    scene.warm_up()
    scene.script.target = sizes(*after)
    smaller = ReplicaId(0 if after[0] == 1 else 1)
    assert orders(scene.act(1000, WOKE)) == [ResizeWorker(smaller, 1)]
    assert orders(scene.act(1050, WorkerResized(smaller, 1))) == [ResizeWorker(ReplicaId(1 - smaller), 3)]
    scene.act(1100, WorkerResized(ReplicaId(1 - smaller), 3))
    assert kinds_of(scene) == {("a", "a", after[0]): 1, ("b", "a", after[1]): 1}
    assert notes(scene.actions) == ["plan", "plan"], "room was on its way: nothing is short"


def test_a_replica_without_room_is_logged_as_a_shortage() -> None:
    scene = Scene(sizes(3, 1), application=TWO)
    scene.warm_up()
    scene.script.target = sizes(3, 2)
    (_, short) = scene.act(1000, WOKE)
    assert isinstance(short, Decided)
    assert (short.kind, short.stage, short.why) == (
        "shortage",
        "b",
        "replica 1 has 1 core, not 2: n0 has no more free",
    )
    assert scene.act(2000, WOKE) == []


def ready_rps(scene: Scene) -> float:
    """Visits per second that the ready replicas are believed to serve together."""
    return sum(
        stage.pool.present_rps(replica.id)
        for stage in scene.application.stages.values()
        for replica in stage.pool.replicas.values()
        if replica.life is Life.READY
    )


def test_from_heavy_to_light_replicas_capacity_does_not_fall() -> None:
    scene = Scene(plan_of(4), times={"b": 0.2}, nodes=[Node("n0", "local", 5, 1000)])
    scene.warm_up()
    scene.script.target = plan_of(4, variant="b")
    waiting = orders(scene.act(1000, WOKE))
    while waiting:
        assert [replica.life for replica in scene.core.state.replicas.values()].count(Life.READY) >= 4
        waiting += orders(carry_out(scene, 1001, waiting.pop(0)))
    assert kinds_of(scene) == {("only", "b", 1.0): 4}
    assert "shortage" not in notes(scene.actions)


plans = st.tuples(st.sampled_from("ab"), st.integers(1, 5), st.sampled_from([0.5, 1.0, 3.0]), st.booleans())


@given(plans, plans, st.randoms(use_true_random=False), st.floats(0.1, 10))
@settings(max_examples=80)
def test_between_any_two_plans_ready_capacity_does_not_fall_below_either(
    first: tuple[str, int, float, bool], second: tuple[str, int, float, bool], random: Random, times: float
) -> None:
    def plan(variant: str, count: int, cores: float, in_place: bool) -> Plan:
        return plan_of(count, cores, variant=variant, in_place=in_place)

    scene = Scene(plan(*first), times={"b": times}, nodes=[Node("n0", "local", 64, 10_000)])
    scene.warm_up()
    scene.script.target = plan(*second)
    before_rps = ready_rps(scene)
    wanted_rps = second[1] * scene.application.stages["only"].pool.rate_rps(
        ReplicaSpec("only", second[0], Slot(second[2]))
    )
    waiting, at_ms = list(orders(scene.act(1000, WOKE))), 1000.0
    while waiting:
        assert ready_rps(scene) >= min(before_rps, wanted_rps) * (1 - 1e-6)
        waiting += orders(carry_out(scene, at_ms := at_ms + 1, waiting.pop(random.randrange(len(waiting)))))
    assert kinds_of(scene) == {("only", second[0], second[2]): second[1]}
    assert ready_rps(scene) == pytest.approx(wanted_rps)
    assert "shortage" not in notes(scene.actions)


two_stages = st.tuples(
    *([st.tuples(st.sampled_from("ab"), st.integers(1, 2), st.sampled_from([0.5, 1.0, 1.5]), st.booleans())] * 2)
)


@given(two_stages, two_stages, st.randoms(use_true_random=False), st.floats(0.1, 10))
@settings(max_examples=80)
def test_any_plan_that_fits_is_reached_on_a_full_node(first: Any, second: Any, random: Random, times: float) -> None:
    """Where the node is full, a replica that only waits for others goes first. No shortage is logged: all fits in the
    end."""
    application = replace(TWO, stages=tuple(replace(s, variants=(Variant("a"), Variant("b"))) for s in TWO.stages))

    def plan(stages: Any) -> Plan:
        groups = [
            (Group(ReplicaSpec(name, variant, Slot(cores)), count),)
            for name, (variant, count, cores, _) in zip("ab", stages, strict=True)
        ]
        return Plan(
            tuple(StagePlan(name, group, 4, stage[3]) for name, group, stage in zip("ab", groups, stages, strict=True)),
            why="drawn",
        )

    def cores(target: Plan) -> float:
        return sum(group.spec.cores * group.count for stage in target.stages for group in stage.groups)

    plans = [plan(first), plan(second)]
    scene = Scene(
        plans[0],
        application=application,
        times={"b": times},
        nodes=[Node("n0", "local", max(map(cores, plans)), 10_000)],
    )
    scene.warm_up()
    scene.script.target = plans[1]
    waiting, at_ms = orders(scene.act(1000, WOKE)), 1000.0
    for tick in range(2, 8):
        while waiting:
            waiting += orders(carry_out(scene, at_ms := at_ms + 1, waiting.pop(random.randrange(len(waiting)))))
        at_ms = 1000.0 * tick
        waiting += orders(scene.act(at_ms, WOKE))
    wanted = {(g.spec.stage, g.spec.variant, g.spec.cores): g.count for stage in plans[1].stages for g in stage.groups}
    assert kinds_of(scene) == wanted
    assert "shortage" not in notes(scene.actions)


SIX = graph(a={}, b={"after": ("a",)}, c={"after": ("b",)}, d={"after": ("c",)}, e={"after": ("d",)}, f={})


def packed_sizes(scene: Scene) -> dict[str, tuple[float, bool]]:
    """By stage, the cores of its only replica, and whether they are a cap."""
    found = {each.spec.stage: (each.cores, each.spec.slot.is_capped) for each in scene.core.state.replicas.values()}
    assert len(found) == len(scene.core.state.replicas)
    return found


@pytest.mark.parametrize(
    ("nodes", "part"),
    [((4.0,), 0.666), ((1.0, 1.0), 0.333), ((2.0, 1.0), 0.5), ((0.25, 4.0), 0.666), ((5.9,), 0.983)],
)
def test_stages_of_which_not_all_find_room_share_the_cores(nodes: tuple[float, ...], part: float) -> None:
    each = tuple(StagePlan(name, (Group(ReplicaSpec(name, "a", Slot(1.0)), 2),), batch_max=4) for name in "abcdef")
    cluster = [Node(f"n{number}", "local", cores, 1000) for number, cores in enumerate(nodes)]
    scene = Scene(Plan(each, "two of each"), nodes=cluster, application=SIX)
    scene.warm_up()
    assert packed_sizes(scene) == dict.fromkeys("abcdef", (part, False))
    assert f"each reserves at most {part:g} and shares the rest" in str(scene.actions)
    assert orders(scene.act(1000, WOKE)) == [], "the plan is the same at the next tick"


def test_stages_that_all_find_room_keep_cores_of_their_own() -> None:
    each = tuple(StagePlan(name, (Group(ReplicaSpec(name, "a", Slot(1.0)), 2),), batch_max=4) for name in "abcdef")
    scene = Scene(Plan(each, "two of each"), nodes=[Node("n0", "local", 6.0, 1000)], application=SIX)
    scene.warm_up()
    assert {(each.spec.stage, each.cores, each.spec.slot.is_capped) for each in scene.core.state.replicas.values()} <= {
        (name, 1.0, True) for name in "abcdef"
    }


def test_stages_that_lack_memory_do_not_share_cores() -> None:
    each = tuple(StagePlan(name, (Group(ReplicaSpec(name, "a", Slot(1.0)), 1),), batch_max=4) for name in "abcdef")
    scene = Scene(Plan(each, "one of each"), nodes=[Node("n0", "local", 5.0, 500)], application=SIX)
    scene.warm_up()
    assert packed_sizes(scene) == dict.fromkeys("abcde", (0.833, True))


def test_stages_leave_shared_cores_once_the_plan_fits() -> None:
    cores = {"a": 3.0, "b": 3.0}
    scene = Scene(sizes(3, 3), application=TWO)
    scene.warm_up()
    assert packed_sizes(scene) == dict.fromkeys(cores, (2.0, False))
    scene.script.target = sizes(1, 1)
    settle(scene, 1000, scene.act(1000, WOKE))
    settle(scene, 2000, scene.act(2000, WOKE))
    assert packed_sizes(scene) == dict.fromkeys(cores, (1.0, True))


@pytest.mark.parametrize(
    ("nodes", "memory_bytes", "replicas"),
    [
        ((2.0,), 1000, 2),
        ((1.5, 1.5), 1000, 2),
        ((3.0,), 1000, 3),
        ((2.0, 1.0), 1000, 3),
        ((4.0,), 200, 2),
        ((4.0,), 300, 3),
    ],
)
def test_no_stage_takes_the_room_of_the_last_ones(nodes: tuple[float, ...], memory_bytes: int, replicas: int) -> None:
    """Two replicas of the first stage would have all cores, or all memory, and the second one none for ever."""
    each = tuple(StagePlan(name, (Group(ReplicaSpec(name, "a", Slot(1.0)), 2),), batch_max=4) for name in "ab")
    cluster = [Node(f"n{number}", "local", cores, memory_bytes) for number, cores in enumerate(nodes)]
    scene = Scene(Plan(each, "two of each"), nodes=cluster, application=TWO)
    scene.warm_up()
    assert {stage for stage, _, _ in kinds_of(scene)} == {"a", "b"}
    assert sum(kinds_of(scene).values()) == replicas
    scene.act(1000, WOKE)
    assert {stage for stage, _, _ in kinds_of(scene)} == {"a", "b"}
