"""Spare replicas: what is done with cores that no plan needs, with `idle: replicas`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import AcquireNode, Action, Decided, StartWorker, StopWorker
from sloop.core.idle import SPARE_MAX, demands_of, with_spare_replicas, without_spare
from sloop.core.views import ApplicationView, ClusterView, CoreDemand, PlanInput, ReplicaView
from sloop.events import WOKE, Event, WorkerReady, WorkerStopped
from sloop.policies.divide import MaxMin, Worth
from sloop.testing.views import make_node, make_stage, make_view
from sloop.units import GIB
from sloop.vocabulary import Group, Life, Node, Plan, ReplicaId, ReplicaSpec, Slot, StagePlan
from tests.core.scene import Deployment, request

laws = settings(max_examples=200)


class Case:
    """Applications of one stage, each with what its plan wants, on nodes that are there anyway."""

    def __init__(
        self,
        planned: Sequence[int],
        cores: float,
        *,
        units: Sequence[float] = (),
        weights: Sequence[float] = (),
        present: Sequence[int] = (),
        others: Sequence[CoreDemand] = (),
        nodes: int = 1,
    ) -> None:
        self.units = units or [1.0] * len(planned)
        self.planned = planned
        self.views: dict[str, ClusterView] = {}
        self.plans: dict[str, Plan] = {}
        due: list[ApplicationView] = []
        for index, count in enumerate(planned):
            key, unit = f"a{index}", self.units[index]
            spec = ReplicaSpec("stage", "v", Slot(unit, "local"))
            there = present[index] if present else 0
            replicas = [ReplicaView(ReplicaId(id), spec, Life.READY, 0, 0) for id in range(there)]
            stage = make_stage(replicas=replicas)
            self.plans[key] = Plan((StagePlan("stage", (Group(spec, count),), 1),), "why")
            self.views[key] = view = make_view(stage, plan=self.plans[key])
            weight = weights[index] if weights else 1.0
            due.append(ApplicationView(key, view.stages, stage, 1.0, weight, view.paths, self.plans[key]))
        views = tuple(make_node(f"n{at}", cores=cores / nodes, memory_bytes=1000 * GIB) for at in range(nodes))
        self.given = PlanInput(0, 0, views, tuple(due), tuple(others))

    def made(self) -> dict[str, Plan]:
        return with_spare_replicas(self.given, self.plans, self.views, list(self.plans))

    def spare(self) -> list[int]:
        """How many each application gets."""
        return [sum(group.spare for target in plan.stages for group in target.groups) for plan in self.made().values()]


@st.composite
def cases(draw: st.DrawFn, *, is_equal: bool = False) -> dict[str, Any]:
    count = draw(st.integers(1, 8))
    each = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    units = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0]), min_size=count, max_size=count)
    weights = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=count, max_size=count)
    return {
        "planned": draw(each),
        "units": [1.0] * count if is_equal else draw(units),
        "weights": draw(weights),
        "present": draw(st.lists(st.integers(0, 12), min_size=count, max_size=count)),
    }


@laws
@given(own=cases(), more=st.floats(0, 30))
def test_nobody_has_less_than_planned_and_all_fit(own: dict[str, Any], more: float) -> None:
    needs = sum(count * unit for count, unit in zip(own["planned"], own["units"], strict=True))
    case = Case(**own, cores=needs + more)
    made, spare = case.made(), case.spare()
    assert {key: without_spare(plan) for key, plan in made.items()} == case.plans
    demands = [each for key, plan in made.items() for each in demands_of(key, plan, 1.0)]
    left = needs + more - sum(each.cores + each.spare for each in demands)
    assert left >= -1e-6
    # what is left has room for nobody who may have more
    assert all(
        count == 0 or own == SPARE_MAX * count or unit > left
        for count, own, unit in zip(case.planned, spare, case.units, strict=True)
    )


@laws
@given(own=cases(is_equal=True), cores=st.integers(0, 80))
def test_with_more_cores_nobody_has_fewer(own: dict[str, Any], cores: int) -> None:
    few, many = (Case(**own, cores=number).spare() for number in (cores, cores + 1))
    assert all(less <= more for less, more in zip(few, many, strict=True))
    assert sum(many) - sum(few) in (0, 1)


@laws
@given(planned=st.integers(1, 6), count=st.integers(1, 8), cores=st.integers(0, 100))
def test_equal_plans_have_equally_many_up_to_one(planned: int, count: int, cores: int) -> None:
    spare = Case([planned] * count, cores).spare()
    assert max(spare) - min(spare) <= 1


@laws
@given(own=cases(is_equal=True), cores=st.integers(0, 60))
def test_what_is_there_stays_if_nothing_changes(own: dict[str, Any], cores: int) -> None:
    """Also of those who are equal otherwise."""
    first = Case(**own, cores=cores).spare()
    there = [count + spare for count, spare in zip(own["planned"], first, strict=True)]
    assert Case(**own | {"present": there}, cores=cores).spare() == first


def test_they_are_in_proportion_to_the_plans_rounded_up_and_to_the_weights() -> None:
    assert Case([6, 2, 1], 9 + 3).spare() == [1, 1, 1]
    assert Case([6, 4, 2], 12 + 6).spare() == [3, 2, 1]
    assert Case([4, 4], 8 + 3, weights=[2.0, 1.0]).spare() == [2, 1]
    assert Case([4, 4], 8 + 1, weights=[1.0, 2.0]).spare() == [0, 1]


def test_a_plan_that_grows_takes_its_own_spare_replica_and_moves_nobodys() -> None:
    """Ten applications and eleven cores that nobody needs: the first has two of them."""
    assert Case([3] * 10, 41).spare() == [2, *[1] * 9]
    assert Case([4, *[3] * 9], 41, present=[5, *[4] * 9]).spare() == [1] * 10
    # The one whose forecast grows further has none left; one of the others would take 65 s to start.
    assert Case([5, *[3] * 9], 41, present=[5, *[4] * 9]).spare() == [0, *[1] * 9]


def test_who_has_more_than_twice_as_many_for_its_plan_makes_way() -> None:
    assert Case([5, 5], 14, present=[8, 6]).spare() == [3, 1]
    assert Case([5, 5], 15, present=[9, 6]).spare() == [3, 2]


def test_a_replica_needs_room_on_one_node() -> None:
    assert Case([2], 4, units=[1.25]).spare() == [1]
    assert Case([2], 4, units=[1.25], nodes=2).spare() == [0]


def test_only_nodes_that_are_there_anyway_count() -> None:
    case = Case([1], 4)
    for other in (make_node(on_demand=True), make_node(hardware="other")):
        case.given = replace(case.given, nodes=(other,))
        assert case.spare() == [0]


def test_cores_and_spare_replicas_of_those_that_are_not_planned_now_are_theirs() -> None:
    assert Case([2], 4, others=[CoreDemand("b", "local", 1.0, spare=1.0)]).spare() == [0]
    assert Case([2], 4, others=[CoreDemand("b", "local", 1.0)]).spare() == [1]


def test_some_replicas_have_no_spare_ones() -> None:
    for changes in ({"node": "n0"}, {"slot": Slot(1.0, "local", is_capped=False)}):
        case = Case([1], 4)
        (target,) = case.plans["a0"].stages
        group = structs.replace(target.groups[0], spec=structs.replace(target.groups[0].spec, **changes))
        case.plans["a0"] = structs.replace(case.plans["a0"], stages=(structs.replace(target, groups=(group,)),))
        assert case.spare() == [0]


# In the core


def deployment(*, divide: MaxMin | Worth | None = None, **wanted: float) -> Deployment:
    return Deployment(wanted, cores=4, divide=divide or MaxMin(idle="replicas"))


def act(scene: Deployment, at_ms: float) -> list[Action]:
    """A tick; what starts is ready, and what stops has stopped at once."""
    actions = scene.act(at_ms, WOKE)
    done: list[Action] = []
    while actions:
        done += actions
        events: list[Event] = [WorkerReady(a.worker) for a in actions if isinstance(a, StartWorker)]
        events += [WorkerStopped(a.worker) for a in actions if isinstance(a, StopWorker)]
        actions = scene.act(at_ms, *events)
    return done


def starts(actions: Sequence[Action]) -> list[str]:
    return [action.spec.stage for action in actions if isinstance(action, StartWorker)]


def test_spare_replicas_start_and_the_reason_says_why() -> None:
    scene = deployment(x=1.0, y=1.0)
    actions = act(scene, 0)
    assert starts(actions) == ["x/only"] * 2 + ["y/only"] * 2
    whys = {action.why for action in actions if isinstance(action, Decided) and action.kind == "plan"}
    assert whys == {"the test says so; spare: 1 replica more than planned, of the 2 cores that no plan needs"}
    assert not [action for action in act(scene, 1000) if not isinstance(action, Decided)]


def test_nothing_is_different_where_idle_cores_are_left() -> None:
    scene = deployment(x=1.0, y=1.0, divide=MaxMin())
    assert starts(act(scene, 0)) == ["x/only", "y/only"]


def test_plans_for_more_take_them_first() -> None:
    scene = deployment(x=1.0, y=1.0)
    act(scene, 0)
    scene.wants(y=3.0)
    act(scene, 1000)
    assert [scene.planned_cores(key) for key in "xy"] == [1.0, 3.0]
    assert [len(stage.pool.replicas) for key in "xy" for stage in scene.application_stages(key)] == [1, 1]


def test_a_policy_sees_the_plan_that_it_made_and_one_that_keeps_it_has_no_more() -> None:
    scene = deployment(x=1.0, y=1.0)
    act(scene, 0)
    for script in scene.scripts.values():
        script.target = None
    act(scene, 1000)
    seen = scene.scripts["x"].seen[-1]
    assert seen.plan == scene.plan("x", 1.0)
    assert len(seen.stages[0].replicas) == 2
    assert [scene.planned_cores(key) for key in "xy"] == [2.0, 2.0]


def test_a_policy_that_fails_gives_its_spare_replicas_back_too() -> None:
    scene = deployment(x=1.0, y=1.0)
    act(scene, 0)
    scene.scripts["x"].error = ZeroDivisionError("a bug")
    scene.wants(y=3.0)
    act(scene, 1000)
    assert [scene.planned_cores(key) for key in "xy"] == [1.0, 3.0]


def test_a_spare_replica_that_has_no_room_beside_what_runs_rents_no_node() -> None:
    rented = Node("rented", "local", 2.0, GIB, on_demand=True)
    nodes = [*(Node(f"n{number}", "local", 2.0, GIB) for number in (1, 2)), rented]
    scene = Deployment({"a": 2.0, "b": 2.0, "c": 2.0}, cores=2, nodes=nodes, divide=MaxMin(idle="replicas"))
    act(scene, 0)
    scene.wants(b=1.0, c=1.0)  # each on a node of its own: a second replica of a fits on empty nodes only
    actions = [action for at_ms in (1000, 2000, 3000) for action in act(scene, at_ms)]
    assert scene.planned_cores("a") == 4.0
    assert not [each for each in actions if isinstance(each, AcquireNode | StartWorker)]
    assert not [each for each in actions if isinstance(each, Decided) and each.kind == "shortage"]


def test_who_wakes_has_what_was_planned_when_it_fell_asleep() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0}, cores=4, divide=MaxMin(idle="replicas"), rest_after_s=5, wake_s=10)
    act(scene, 0)
    assert scene.planned_cores("x") == 2.0
    scene.scripts["x"].target = None
    for at_ms in range(1000, 9000, 1000):
        if at_ms == 8000:
            scene.wants(y=3.0)
        act(scene, at_ms)
        scene.act(at_ms + 10, request(at_ms, at_ms=at_ms + 10, application="y"))
    assert scene.planned_cores("x") == 0.0
    scene.act(9500, request(9500, at_ms=9500, application="x"))
    assert scene.planned_cores("x") == 1.0


def test_with_another_divide_policy_spare_replicas_go_also_from_a_plan_that_is_kept() -> None:
    scene = deployment(x=1.0, y=1.0)
    act(scene, 0)
    policies = scene.core.planner.policies
    for key, script in scene.scripts.items():
        policies[key] = replace(policies[key], divide=MaxMin())
        script.target = None
    act(scene, 1000)
    assert [scene.planned_cores(key) for key in "xy"] == [1.0, 1.0]
