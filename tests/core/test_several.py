"""Several applications on one cluster: names, plans together, resting, nodes on demand, plans beside the loop."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import (
    AcquireNode,
    Action,
    Decided,
    End,
    ReleaseNode,
    RequestPlan,
    ResizeWorker,
    StartBatch,
    StartWorker,
    StopWorker,
)
from sloop.core.ledger import Ledger, cores_by_hardware, millicores
from sloop.core.nodes import UNUSED_NS, NodePool
from sloop.core.planner import packed, trimmed
from sloop.core.protocols import Divide
from sloop.core.views import Claimant, ClusterView, CoreShare, Traffic
from sloop.events import (
    WOKE,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    Planned,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.policies.admit import Bounded, Open
from sloop.policies.divide import Priority, Proportional, Worth
from sloop.policies.forecast import Last
from sloop.testing.views import make_stage, make_view
from sloop.units import ms, s
from sloop.vocabulary import Group, Node, Outcome, Plan, ReplicaId, ReplicaSpec, RequestId, Slot, StagePlan
from tests.core.scene import Belief, Deployment, Script, request


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(action) for action in actions]


def notes(actions: Sequence[Action]) -> list[tuple[str, str]]:
    return [(action.kind, action.application) for action in actions if isinstance(action, Decided)]


def started(actions: Sequence[Action]) -> list[tuple[str, float]]:
    return [(a.spec.stage, a.spec.cores) for a in actions if isinstance(a, StartWorker)]


# Names decide where a request goes


def test_a_request_runs_on_a_replica_of_its_application() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0})
    scene.warm_up()
    first, second = scene.act(1, request(1, application="y"), request(2, application="x"))
    assert isinstance(first, StartBatch)
    assert isinstance(second, StartBatch)
    assert (first.stage, second.stage) == ("y/only", "x/only")
    (end,) = scene.act(12, Finished(first.batch, first.replica, ms(11)))
    assert end == End(RequestId(1), Outcome.SERVED)


def test_an_unknown_application_is_refused_by_name() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0})
    (end,) = scene.act(1, request(1, application="z"))[-1:]
    assert isinstance(end, End)
    assert (end.outcome, end.why) == (Outcome.REJECTED, "application 'z' is not served")


def test_idle_applications_cost_no_look_at_their_queues() -> None:
    scene = Deployment({f"a{index}": 0.01 for index in range(100)})
    scene.warm_up()
    scene.act(1000, WOKE)
    scene.act(1001, request(1, application="a7", at_ms=1001))
    assert {stage.name for stage in scene.core._active} == {"a7/only"}


# One budget of cores


def test_plans_that_fit_together_are_the_same_as_alone() -> None:
    scene = Deployment({"x": 1.0, "y": 3.0}, cores=4)
    assert started(scene.act(0, WOKE)) == [("x/only", 1.0), ("y/only", 3.0)]
    assert [len(script.seen) for script in scene.scripts.values()] == [1, 1]


def test_too_few_cores_are_divided_and_the_reason_says_so() -> None:
    scene = Deployment({"x": 1.0, "y": 9.0}, cores=4, obeys=True)
    actions = scene.act(0, WOKE)
    assert started(actions) == [("x/only", 1.0), ("y/only", 3.0)]
    whys = {a.application: a.why for a in actions if isinstance(a, Decided) and a.kind == "plan"}
    assert whys["y"].startswith("limited to 3 cores, as all together want more than there is")
    assert scene.scripts["y"].seen[-1].nodes[0].node.cores == 3


@pytest.mark.parametrize(
    ("divide", "expected"),
    [(Proportional(), [("x/only", 1.5), ("y/only", 3.0)]), (Priority(), [("x/only", 2.0), ("y/only", 2.5)])],
)
def test_the_divide_policy_decides_who_gets_how_many(divide: Any, expected: list[tuple[str, float]]) -> None:
    weights = {"x": 2.0} if isinstance(divide, Priority) else {}
    scene = Deployment({"x": 2.0, "y": 4.0}, cores=4.5, obeys=True, divide=divide, weights=weights)
    assert started(scene.act(0, WOKE)) == expected


def test_a_core_is_divided_by_worth_among_more_applications_than_it_is_usually_cut_into() -> None:
    scene = Deployment(dict.fromkeys("abcde", 3.0), cores=1, obeys=True, divide=Worth())
    beside(scene, 0)
    assert [scene.planned_cores(key) for key in "abcde"] == [0.2] * 5


def test_an_application_without_cores_gets_no_replicas() -> None:
    scene = Deployment({"x": 4.0, "y": 1.0}, cores=4, obeys=True, divide=Priority(), weights={"x": 2.0})
    actions = scene.act(0, WOKE)
    assert started(actions) == [("x/only", 4.0)]
    assert any(a.kind == "plan" and "need all cores" in a.why for a in actions if isinstance(a, Decided))


def test_cores_that_whole_units_leave_go_to_an_application_that_can_use_them() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0, "z": 1.0}, cores=1.75, obeys=True)
    for script in scene.scripts.values():
        script.unit = 0.25
    planned = started(scene.act(0, WOKE))
    assert sorted(cores for _, cores in planned) == [0.5, 0.5, 0.75]


def test_a_policy_plans_again_for_the_cores_that_it_can_have() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True)
    scene.act(0, WOKE)
    assert [[view.nodes[0].node.cores for view in script.seen] for script in scene.scripts.values()] == [[4, 2], [4, 2]]


def test_cores_move_from_a_quiet_application_to_a_busy_one() -> None:
    scene = Deployment({"x": 3.0, "y": 1.0}, cores=4)
    scene.warm_up()
    scene.wants(x=1.0, y=3.0)
    assert [a for a in scene.act(1000, WOKE) if not isinstance(a, Decided)] == [ResizeWorker(ReplicaId(0), 1.0)]
    grown = scene.act(1010, WorkerResized(ReplicaId(0), 1.0))
    assert [a for a in grown if not isinstance(a, Decided)] == [ResizeWorker(ReplicaId(1), 3.0)]


def test_a_policy_that_raises_keeps_its_plan_and_disturbs_nobody() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0})
    scene.warm_up()
    scene.scripts["x"].error = ZeroDivisionError("a bug")
    scene.wants(y=2.0)
    actions = scene.act(1000, WOKE)
    assert notes(actions) == [("planner", "x"), ("plan", "y")]
    assert scene.core.plan_of("x") == scene.plan("x", 1.0)


def changed(
    plan: Plan, *, slot: dict[str, Any] | None = None, group: dict[str, Any] | None = None, **target: Any
) -> Plan:
    """The plan of one group with other values."""
    (stage,) = plan.stages
    (only,) = stage.groups
    spec = structs.replace(only.spec, slot=structs.replace(only.spec.slot, **slot or {}))
    only = structs.replace(only, spec=spec, **group or {})
    return structs.replace(plan, stages=(structs.replace(stage, groups=(only,), **target),))


@pytest.mark.parametrize(
    "values",
    [
        {"batch_max": 0},
        {"batch_max": 2.0},
        {"wait_ns": -1},
        {"group": {"batch_max": -1}},
        {"group": {"count": -1}},
        {"group": {"count": 2.0}},
        {"group": {"count": 10**7}},
        {"group": {"rate_rps": math.nan}},
        {"slot": {"cores": 1e-5}},
        {"slot": {"cores": 1e306}},
        {"stage": "x/other"},
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(values: dict[str, Any]) -> None:
    scene = Deployment({"x": 1.0, "y": 1.0})
    scene.warm_up()
    scene.scripts["x"].target = changed(scene.plan("x", 1.0), **values)
    assert notes(scene.act(1000, WOKE)) == [("planner", "x")]


def test_a_plan_that_refuses_more_than_all_is_refused() -> None:
    scene = Deployment({"x": 1.0})
    scene.scripts["x"].target = structs.replace(scene.plan("x", 1.0), shed=1.5)
    assert notes(scene.act(0, WOKE)) == [("planner", "x")]


def test_a_plan_with_a_stage_twice_is_refused() -> None:
    scene = Deployment({"x": 1.0})
    plan = scene.plan("x", 1.0)
    scene.scripts["x"].target = structs.replace(plan, stages=plan.stages * 2)
    assert notes(scene.act(0, WOKE)) == [("planner", "x")]


class Broken(Divide):
    """A divide policy that is wrong in some way."""

    def __init__(self, cores: list[float]) -> None:
        self._cores = cores

    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
        if not self._cores:
            raise RuntimeError("a bug")
        return [CoreShare(cores) for cores in self._cores]


WRONG: Sequence[tuple[list[float], str]] = [
    ([], "RuntimeError: a bug"),
    ([1.0], "gives 1 share to 2 applications"),
    ([math.nan, 1.0], "gives 'x' nan cores"),
    ([1.0, -1.0], "gives 'y' -1.0 cores"),
    ([2.5, 2.0], "gives 4.5 cores of '', and there are 4"),
]


@pytest.mark.parametrize(("cores", "why"), WRONG)
def test_a_wrong_divide_policy_changes_no_plan(cores: list[float], why: str) -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, divide=Broken(cores))
    assert notes(scene.act(0, WOKE)) == [("planner", "x"), ("planner", "y")]
    assert why in scene.core.plan_error("x")


class Numbers(Broken):
    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> Any:
        return self._cores


def test_a_divide_policy_that_answers_numbers_is_told_what_to_write() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, divide=Numbers([2.0, 2.0]))
    scene.act(0, WOKE)
    assert scene.core.plan_error("x").startswith("InputError: the divide policy answers float instead of a share")


@dataclass(frozen=True)
class Asking(Divide):
    """Gives each what it plans with `asked` cores, and says so."""

    asked: float
    is_quick: ClassVar[bool] = False
    shed: float = 0.0

    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
        plans = [each.plan(self.asked) for each in claimants]
        found = [cores_by_hardware(plan).get(each.hardware, 0.0) for plan, each in zip(plans, claimants, strict=True)]
        names = [f"{each.view.stages[0].name} at {each.view.nodes[0].node.cores:g}" for each in claimants]
        return [CoreShare(cores, f"{name}: {total:g}", self.shed) for cores, name in zip(found, names, strict=True)]


def beside(scene: Deployment, at_ms: float) -> list[Action]:
    """A tick, with the planner's answer."""
    actions = scene.act(at_ms, WOKE)
    assert RequestPlan in kinds(actions)
    return [*actions, *scene.act(at_ms, scene.core.planner.plan(scene.core.plan_input))]  # type: ignore[arg-type]


def test_a_divide_policy_may_ask_what_applications_plan_with_fewer_cores() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True, divide=Asking(1.5))
    for script in scene.scripts.values():
        script.unit = 0.25
    actions = beside(scene, 0)
    # the core that this leaves goes to the first of those that have used the smallest part of theirs
    assert started(actions) == [("x/only", 2.5), ("y/only", 1.5)]
    whys = {a.application: a.why for a in actions if isinstance(a, Decided) and a.kind == "plan"}
    assert [why.rpartition("; ")[2] for why in whys.values()] == ["x/only at 4: 4", "y/only at 4: 4"]


def test_nobody_is_asked_where_the_cores_suffice() -> None:
    scene = Deployment({"x": 1.0, "y": 3.0}, cores=4, divide=Worth())
    assert started(beside(scene, 0)) == [("x/only", 1.0), ("y/only", 3.0)]
    assert [len(script.seen) for script in scene.scripts.values()] == [1, 1]


def test_plans_of_one_application_are_made_in_the_loop_whatever_divides() -> None:
    scene = Deployment({"x": 3.0}, cores=4, divide=Asking(1.5))
    assert RequestPlan not in kinds(scene.act(0, WOKE))


@dataclass
class OnlyWhole(Script):
    """A policy with a bug for few cores."""

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan | None, None]:
        if view.nodes[0].node.cores < 2:
            raise ZeroDivisionError("a bug")
        return super().plan(now_ns, view, memory)


@dataclass(frozen=True)
class Trying(Asking):
    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
        tried = [each.plan(1.0) for each in claimants]
        return [CoreShare(2.0, f"with 1: {plan and plan.why}") for plan in tried]


def test_a_plan_that_is_only_tried_may_fail() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True, divide=Trying(1.0))
    for script in scene.scripts.values():
        script.__class__ = OnlyWhole
    actions = beside(scene, 0)
    assert notes(actions) == [("plan", "x"), ("plan", "y")]
    assert all(a.why.endswith("; with 1: None") for a in actions if isinstance(a, Decided))


@dataclass(frozen=True)
class Blind(Last):
    """A forecast with a bug."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        if now_ns:
            raise ZeroDivisionError("a bug")
        return 0.0


def test_an_application_whose_forecast_fails_keeps_its_cores() -> None:
    scene = Deployment({"x": 3.0, "y": 1.0, "z": 1.0}, cores=5, obeys=True)
    scene.warm_up()
    policies = scene.core.planner.policies
    policies["x"] = replace(policies["x"], forecast=Blind())
    scene.wants(y=2.0, z=2.0)
    scene.act(1000, WOKE)
    assert [scene.planned_cores(name) for name in "xyz"] == [3, 1, 1]


def test_a_plan_refuses_a_fraction_of_the_requests_evenly_and_they_count_as_demand() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True, divide=Asking(2.0, shed=0.3), admit=Open())
    for action in beside(scene, 0):
        if isinstance(action, StartWorker):
            scene.act(0, WorkerReady(action.worker))
    refused = []
    for id in range(400):
        actions = scene.act(1 + id, request(id, application="xy"[id % 2], at_ms=1 + id))
        ends = [action for action in actions if isinstance(action, End)]
        refused += [(id, end) for end in ends if end.why.startswith("the plan refuses 30.0% of all requests")]
    for odd in range(2):
        own = [id for id, _ in refused if id % 2 == odd]
        assert len(own) in {59, 60}
        assert {after - before for before, after in pairwise(own)} == {6, 8}, "every third or fourth of its own"
    assert all(end.retry_after_ns for _, end in refused)
    beside(scene, 1000)
    assert scene.scripts["x"].seen[-1].ingress.buckets[0].arrivals == 200


def test_those_that_a_plan_does_not_refuse_wait_no_longer_than_their_deadline() -> None:
    scene = Deployment({"x": 1.0}, wake_s=60, admit=Bounded(queue_max=1))
    scene.warm_up()
    scene.scripts["x"].target = structs.replace(scene.plan("x", 1.0), shed=0.1)
    scene.act(1000, WOKE)
    for id in range(1, 5):
        scene.act(1001, request(id, application="x", at_ms=1001, slo_ms=100))
    scene.act(1102, WOKE)
    ends = [action for action in scene.actions if isinstance(action, End)]
    assert Outcome.DROPPED in [end.outcome for end in ends]
    assert not scene.core.state.applications["x"].woken


@dataclass
class Keeping(Script):
    """A policy that keeps its plan as long as nothing that it looks at changes."""

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan | None, None]:
        return (None, None) if view.plan is not None else super().plan(now_ns, view, memory)


def test_a_kept_plan_refuses_requests_only_as_long_as_the_divide_policy_says_so() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True, divide=Asking(2.0, shed=0.3))
    for script in scene.scripts.values():
        script.__class__ = Keeping
    beside(scene, 0)
    assert scene.core.plan_of("x").shed == 0.3  # type: ignore[union-attr]
    actions = beside(scene, 1000)  # both keep their plans, for which the cores suffice
    assert scene.core.plan_of("x").shed == 0  # type: ignore[union-attr]
    assert notes(actions) == [("kept", "x"), ("kept", "y")]


def test_what_a_divide_policy_refuses_is_a_plain_number_in_the_plan() -> None:
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True, divide=Asking(2.0, shed=np.float32(0.5)))  # type: ignore[arg-type]
    beside(scene, 0)
    assert type(scene.core.plan_of("x").shed) is float  # type: ignore[union-attr]


def test_a_change_of_what_a_plan_refuses_is_noted() -> None:
    scene = Deployment({"x": 1.0})
    scene.warm_up()
    for shed in (0.2, 0.2, 0.4):
        scene.scripts["x"].target = structs.replace(scene.plan("x", 1.0), shed=shed)
        scene.act(scene.core.wake_ns / 1e6, WOKE)
    assert notes(scene.actions) == [("plan", "x"), ("kept", "x"), ("kept", "x")]


@dataclass
class Counting(Script):
    """A policy that remembers how often its plans were used."""

    remembered: list[int] = field(default_factory=list)

    def plan(self, now_ns: int, view: ClusterView, memory: int | None) -> tuple[Plan | None, Any]:
        self.remembered.append(memory or 0)
        made, _ = Script.plan(self, now_ns, view, None)
        return made, (memory or 0) + 1


def test_a_plan_that_is_tried_and_not_used_leaves_nothing_behind() -> None:
    """Two applications want 3 of 4 cores each, so both plan a second time for fewer, and perhaps a third time."""
    scene = Deployment({"x": 3.0, "y": 3.0}, cores=4, obeys=True)
    script: Any = scene.scripts["x"]
    script.__class__, script.remembered = Counting, (seen := list[int]())
    for second in range(3):
        scene.act(1000 * second, WOKE)
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}
    assert len(seen) > 3, "what was tried is not remembered"


class Forgetting(Counting):
    def plan(self, now_ns: int, view: ClusterView, memory: int | None) -> tuple[Plan | None, Any]:
        made, count = Counting.plan(self, now_ns, view, memory)
        return made, count if count < 2 else None


def test_a_policy_that_answers_no_memory_has_none_the_next_time() -> None:
    scene = Deployment({"x": 1.0})
    script: Any = scene.scripts["x"]
    script.__class__, script.remembered = Forgetting, (seen := list[int]())
    for second in range(3):
        scene.act(1000 * second, WOKE)
    assert seen == [0, 1, 0]


def test_a_scaling_policy_that_answers_no_pair_is_told_what_to_write() -> None:
    scene = Deployment({"x": 1.0})
    scene.scripts["x"].__class__ = Old
    scene.act(0, WOKE)
    assert "instead of a plan and its memory" in scene.core.plan_error("x")


class Old(Script):
    def plan(self, now_ns: int, view: ClusterView, memory: None) -> Any:
        return self.target


def test_equal_groups_are_trimmed_one_by_one() -> None:
    group = Group(ReplicaSpec("s", "a", Slot(1.0)), 2)
    made = trimmed(Plan((StagePlan("s", (group, group), 4),), ""), {"": 3.0})
    assert cores_by_hardware(made) == {"": 3.0}


def test_a_kind_of_hardware_without_cores_gets_no_replicas() -> None:
    groups = tuple(Group(ReplicaSpec("s", "a", Slot(1.0, hardware)), 2) for hardware in ("c5", "g4dn"))
    made = trimmed(Plan((StagePlan("s", groups, 4),), ""), {"c5": 0.0, "g4dn": 1.0})
    assert [(group.count, group.spec.cores) for group in made.stages[0].groups] == [(0, 1.0), (1, 1.0)]


def test_two_stages_have_no_replicas_on_a_thousandth_of_a_core() -> None:
    """Each would have less than there can be, and none serves without the other."""
    slot = Slot(1.0, "local")
    plan = Plan(tuple(StagePlan(name, (Group(ReplicaSpec(name, "v", slot), 1),), 4) for name in ("s", "t")), "")
    made = packed(plan, make_view(make_stage(name="s"), make_stage(name="t"), cores=0.001))
    assert [group.count for target in made.stages for group in target.groups] == [0, 0]
    assert cores_by_hardware(trimmed(plan, {"local": 0.001})) == {"local": 0.0}
    assert cores_by_hardware(trimmed(plan, {"local": 0.002})) == {"local": 0.002}


@given(
    st.lists(st.floats(0.01, 5), min_size=2, max_size=4),
    st.floats(0.5, 12),
    st.sampled_from([None, Proportional(), Priority()]),
)
def test_plans_never_want_more_cores_than_there_are(wanted: list[float], cores: float, divide: Any) -> None:
    names = {f"a{index}": each for index, each in enumerate(wanted)}
    scene = Deployment(names, cores=cores, obeys=True, **({"divide": divide} if divide else {}))
    scene.act(0, WOKE)
    total = sum(scene.planned_cores(name) for name in names)
    assert sum(millicores(scene.planned_cores(name)) for name in names) <= millicores(cores)
    if sum(map(millicores, wanted)) <= cores * 1000:
        assert [scene.planned_cores(name) for name in names] == pytest.approx(wanted)
    else:
        assert total == pytest.approx(cores, abs=0.01 * len(wanted))


groups_of = st.lists(
    st.tuples(st.sampled_from(["s", "t"]), st.sampled_from(["c5", "g4dn"]), st.floats(0.1, 4), st.integers(0, 9)),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each[:3],
)


@given(groups_of, st.floats(0.05, 60))
def test_a_plan_is_trimmed_to_its_limit_and_no_further(groups: list[tuple[str, str, float, int]], limit: float) -> None:
    by_stage: dict[str, list[Group]] = {}
    for stage, hardware, cores, count in groups:
        by_stage.setdefault(stage, []).append(Group(ReplicaSpec(stage, "a", Slot(cores, hardware)), count))
    plan = Plan(tuple(StagePlan(stage, tuple(own), 4) for stage, own in by_stage.items()), "")
    made, before = trimmed(plan, {"c5": limit}), cores_by_hardware(plan)
    after = cores_by_hardware(made)
    assert after.get("g4dn") == before.get("g4dn"), "the other kind is not limited"
    assert after.get("c5", 0.0) <= limit * (1 + 1e-9) or before.get("c5", 0.0) <= limit * (1 + 1e-9)
    stages = zip(plan.stages, made.stages, strict=True)
    pairs = [pair for old, new in stages for pair in zip(old.groups, new.groups, strict=True)]
    assert all(bool(new.count) is bool(old.count) for old, new in pairs), "each group keeps a replica"
    if before.get("c5", 0.0) <= limit:
        assert made is plan
    elif all(new.spec == old.spec for old, new in pairs):
        largest = max(old.spec.cores for old, _ in pairs if old.spec.slot.hardware == "c5")
        assert after["c5"] > limit - largest - 1e-6, "one replica less than needed would be too few"


# Resting


def test_an_application_without_requests_rests_and_wakes_with_the_next() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0}, rest_after_s=5)
    scene.warm_up()
    scene.act(500, request(1, application="y", at_ms=500))
    for second in range(1, 5):
        assert StopWorker not in kinds(scene.act(second * 1000, WOKE))
    actions = scene.act(5000, WOKE)
    assert ("rest", "x") in notes(actions)
    assert [a.worker for a in actions if isinstance(a, StopWorker)] == [0]
    assert scene.is_resting("x")
    assert not scene.is_resting("y")
    scene.act(5001, WorkerStopped(ReplicaId(0)))
    scene.act(6000, WOKE)
    actions = scene.act(6100, request(2, application="x", at_ms=6100))
    assert started(actions) == [("x/only", 1.0)]
    assert not scene.is_resting("x")


def test_an_application_that_wakes_while_others_are_planned_is_planned_after_them() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0}, rest_after_s=2, is_quick=False, period_s=10)
    settle(scene, 0, scene.act(0, WOKE))
    settle(scene, 1, scene.act(1, scene.core.planner.plan(scene.core.plan_input)))  # type: ignore[arg-type]
    settle(scene, 10_000, scene.act(10_000, WOKE))
    assert scene.is_resting("x")
    assert RequestPlan in kinds(scene.act(10_500, request(1, application="y", at_ms=10_500)))
    assert kinds(scene.act(10_600, request(2, application="x", at_ms=10_600))) == []
    scene.act(10_700, scene.core.planner.plan(scene.core.plan_input))  # type: ignore[arg-type]
    assert scene.core.wake_ns == ms(10_700)
    assert RequestPlan in kinds(scene.act(10_701, WOKE))


def test_an_application_that_is_due_while_others_are_planned_is_planned_after_them() -> None:
    scene = Deployment({"x": 1.0}, is_quick=False, period_s=10)
    scene.act(0, WOKE)
    given = scene.core.plan_input
    assert given is not None
    assert kinds(scene.act(10_000, WOKE)) == []
    assert scene.core.wake_ns == ms(11_000)
    scene.act(10_500, scene.core.planner.plan(given))
    assert kinds(scene.act(11_000, WOKE)) == [RequestPlan]


def test_requests_in_any_bucket_since_the_last_tick_keep_an_application_awake() -> None:
    scene = Deployment({"x": 1.0}, rest_after_s=2)
    scene.warm_up()
    (batch,) = scene.act(500, request(1, at_ms=500))
    assert isinstance(batch, StartBatch)
    scene.act(511, Finished(batch.batch, batch.replica, ms(11)))
    assert StopWorker not in kinds(scene.act(2600, WOKE)), "the tick of the first second came late"
    assert StopWorker in kinds(scene.act(5000, WOKE))


def test_an_application_of_its_own_rests_too() -> None:
    scene = Deployment({"x": 1.0}, rest_after_s=2)
    scene.warm_up()
    scene.act(1000, WOKE)
    assert StopWorker in kinds(scene.act(2000, WOKE))


def test_quiet_applications_are_not_planned_again() -> None:
    scene = Deployment({"x": 1.0, "y": 1.0})
    scene.warm_up()
    for second in range(1, 370):
        scene.act(second * 1000, request(second, application="y", at_ms=second * 1000), WOKE)
    calls = len(scene.scripts["x"].seen)
    scene.act(370_000, WOKE)
    assert len(scene.scripts["x"].seen) == calls < 365
    assert len(scene.scripts["y"].seen) > 365


def settle(scene: Deployment, at_ms: float, actions: Sequence[Action]) -> None:
    """Carry out all orders about replicas at once."""
    for action in actions:
        if isinstance(action, StartWorker):
            settle(scene, at_ms, scene.act(at_ms, WorkerReady(action.worker)))
        elif isinstance(action, StopWorker):
            settle(scene, at_ms, scene.act(at_ms, WorkerStopped(action.worker)))
        elif isinstance(action, ResizeWorker):
            settle(scene, at_ms, scene.act(at_ms, WorkerResized(action.worker, action.cores)))


def test_quiet_applications_give_cores_to_one_that_wakes() -> None:
    scene = Deployment({"x": 0.0, "y": 1.0, "z": 1.0}, cores=2, obeys=True)
    for second in range(370):
        settle(scene, second * 1000, scene.act(second * 1000, WOKE))
    scene.wants(x=1.0)
    settle(scene, 371_000, scene.act(371_000, request(1, application="x", at_ms=371_000), WOKE))
    settle(scene, 372_000, scene.act(372_000, WOKE))
    assert scene.planned_cores("x") == pytest.approx(2 / 3, abs=0.01)


# Nodes on demand


def rented(name: str, cores: float = 2) -> Node:
    return Node(name, "local", cores, 1000, on_demand=True)


def test_nodes_are_acquired_when_replicas_lack_room_and_only_as_many_as_they_need() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0, "z": 2.0}, cores=2, nodes=[rented("r0"), rented("r1"), rented("r2")])
    actions = scene.act(0, WOKE)
    assert [a.node for a in actions if isinstance(a, AcquireNode)] == ["r0", "r1"]
    assert not any(kind == "shortage" for kind, _ in notes(actions)), "room is on its way"
    assert AcquireNode not in kinds(scene.act(1000, WOKE))
    assert started(scene.act(1500, NodeReady(rented("r0")))) == [("y/only", 2.0)]
    assert started(scene.act(1600, NodeReady(rented("r1")))) == [("z/only", 2.0)]


def test_an_empty_node_is_released_after_a_while_and_can_be_acquired_again() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0}, cores=2, nodes=[rented("r0")])
    scene.warm_up()
    for replica in [a.worker for a in scene.act(100, NodeReady(rented("r0"))) if isinstance(a, StartWorker)]:
        scene.act(200, WorkerReady(replica))
    scene.wants(y=0.0)
    assert StopWorker in kinds(scene.act(10_000, WOKE))
    scene.act(10_001, WorkerStopped(ReplicaId(1)))
    released = [second for second in range(11, 73) if ReleaseNode in kinds(scene.act(second * 1000, WOKE))]
    assert released == [70], "it was in use for ten seconds"
    scene.act(72_500, NodeReleased("r0"))
    scene.wants(y=2.0)
    scene.act(73_000, request(9, application="y", at_ms=73_000))
    assert AcquireNode in kinds(scene.act(80_000, WOKE) + scene.actions[-3:])


def test_an_empty_node_is_released_at_once_if_the_scaling_policy_says_so() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0}, cores=2, nodes=[rented("r0")], release_after_s=0)
    scene.warm_up()
    for replica in [a.worker for a in scene.act(100, NodeReady(rented("r0"))) if isinstance(a, StartWorker)]:
        scene.act(200, WorkerReady(replica))
    scene.wants(y=0.0)
    assert ReleaseNode not in kinds(scene.act(1000, WOKE)), "its replica has not stopped yet"
    assert ReleaseNode in kinds(scene.act(1001, WorkerStopped(ReplicaId(1))))


def test_an_empty_node_is_kept_as_long_as_any_application_wants_that_could_use_it() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0}, cores=2, nodes=[rented("r0")], release_after_s=0)
    scene.core.state.applications["x"].parts.policies.scale.release_after_ns = s(5)  # type: ignore[misc]
    scene.warm_up()
    for replica in [a.worker for a in scene.act(100, NodeReady(rented("r0"))) if isinstance(a, StartWorker)]:
        scene.act(200, WorkerReady(replica))
    scene.wants(y=0.0)
    scene.act(1000, WOKE)
    scene.act(1001, WorkerStopped(ReplicaId(1)))
    assert [second for second in range(2, 20) if ReleaseNode in kinds(scene.act(second * 1000, WOKE))] == [6]


def test_a_lost_node_that_leaves_no_room_is_planned_around_at_once() -> None:
    other = structs.replace(rented("r0"), hardware="other")
    scene = Deployment({"x": 2.0}, cores=2, nodes=[other], period_s=10)
    scene.warm_up()
    seen = len(scene.scripts["x"].seen)
    scene.act(1500, NodeLost("n0", "power"))
    scene.act(1500, WorkerLost(ReplicaId(0), "node n0 is lost"))
    assert scene.core.wake_ns == ms(1500)
    scene.act(1500, WOKE)
    assert len(scene.scripts["x"].seen) == seen + 1


def test_an_empty_node_is_released_although_a_replica_that_fits_nowhere_lacks_room() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0}, cores=2, nodes=[rented("r0")])
    scene.warm_up()
    for replica in [a.worker for a in scene.act(100, NodeReady(rented("r0"))) if isinstance(a, StartWorker)]:
        scene.act(200, WorkerReady(replica))
    scene.wants(x=50.0, y=0.0)
    scene.act(1000, WOKE)
    scene.act(1001, WorkerStopped(ReplicaId(1)))
    assert notes(scene.act(1002, WOKE)) == []
    released = [second for second in range(2, 80) if ReleaseNode in kinds(scene.act(second * 1000, WOKE))]
    assert released == [61]


@pytest.mark.parametrize(("cores", "is_kept"), [(2.0, True), (3.0, False)])
def test_an_empty_node_is_kept_for_a_replica_that_it_could_hold(cores: float, is_kept: bool) -> None:
    nodes, out = NodePool(Ledger([rented("r0")])), list[Action]()
    nodes.ready(rented("r0"), 0)
    nodes.release_unused(UNUSED_NS, {ReplicaSpec("s", "a", Slot(cores)): Belief()}, out, lambda hardware: UNUSED_NS)
    assert (ReleaseNode not in kinds(out)) is is_kept


def test_a_node_that_cannot_be_acquired_is_tried_again_later() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0}, cores=2, nodes=[rented("r0")])
    scene.warm_up()
    scene.act(500, NodeLost("r0", "no capacity"))
    tries = [second for second in range(1, 60) if AcquireNode in kinds(scene.act(second * 1000, WOKE))]
    assert tries == [31]


def test_replicas_of_a_lost_node_start_elsewhere() -> None:
    other = Node("n1", "local", 2, 1000)
    scene = Deployment({"x": 2.0}, cores=2, nodes=[other])
    scene.warm_up()
    scene.act(500, NodeLost("n0", "power"))
    actions = scene.act(500, WorkerLost(ReplicaId(0), "node n0 is lost"))
    assert [a.spec.node for a in actions if isinstance(a, StartWorker)] == ["n1"]
    scene.act(900, NodeReady(scene.node))
    assert scene.core.state.ledger.views()[0].state == "ready"


def test_replicas_that_cannot_grow_in_place_move_to_a_node_that_joins() -> None:
    scene = Deployment({"x": 2.0, "y": 2.0}, cores=2)
    scene.warm_up()
    assert started(scene.actions) == [("x/only", 1.0), ("y/only", 1.0)], "two cores, divided"
    scene.act(500, NodeReady(Node("new", "local", 2, 1000)))
    actions = scene.act(1000, WOKE)
    assert [(a.spec.stage, a.spec.node, a.spec.cores) for a in actions if isinstance(a, StartWorker)] == [
        ("x/only", "new", 2.0)
    ]
    actions = scene.act(1500, WorkerReady(ReplicaId(2)))
    assert [a.worker for a in actions if isinstance(a, StopWorker)] == [0], "the small replica served until now"
    assert ResizeWorker(ReplicaId(1), 2.0) in scene.act(1600, WorkerStopped(ReplicaId(0)))


def test_a_node_is_acquired_for_a_replica_that_cannot_grow_in_place() -> None:
    scene = Deployment({"x": 4.0}, cores=4, nodes=[rented("r0", 8)])
    scene.warm_up()
    scene.wants(x=8.0)
    assert AcquireNode("r0") in scene.act(1000, WOKE)
    assert AcquireNode not in kinds(scene.act(2000, WOKE))
    (larger,) = [a for a in scene.act(2500, NodeReady(rented("r0", 8))) if isinstance(a, StartWorker)]
    assert (larger.spec.node, larger.spec.cores) == ("r0", 8.0)
    assert [a.worker for a in scene.act(3000, WorkerReady(larger.worker)) if isinstance(a, StopWorker)] == [0]


# Plans beside the loop


def test_a_slow_policy_is_called_beside_the_loop() -> None:
    scene = Deployment({"x": 1.0}, is_quick=False)
    assert scene.act(0, WOKE) == [RequestPlan(1)]
    assert scene.scripts["x"].seen == []
    given = scene.core.plan_input
    assert given is not None
    assert scene.act(1000, WOKE) == [], "the planner is still at work"
    actions = scene.act(1500, scene.core.planner.plan(given))
    assert started(actions) == [("x/only", 1.0)]
    assert scene.core.plan_input is None
    assert scene.act(2000, WOKE) == [RequestPlan(2)]


def test_the_plans_of_many_applications_are_made_beside_the_loop() -> None:
    assert RequestPlan not in kinds(Deployment({f"a{index}": 0.1 for index in range(4)}).act(0, WOKE))
    assert RequestPlan in kinds(Deployment({f"a{index}": 0.1 for index in range(5)}).act(0, WOKE))


def test_answers_to_earlier_requests_are_ignored() -> None:
    scene = Deployment({"x": 1.0}, is_quick=False)
    scene.act(0, WOKE)
    assert scene.act(100, Planned(7, {"x": scene.plan("x", 2.0)})) == []
    assert scene.act(200, Planned(1, {"gone": scene.plan("x", 2.0), "x": scene.plan("x", 1.0)})) != []
    assert scene.act(300, Planned(1, {"x": scene.plan("x", 2.0)})) == []


def test_a_planner_that_never_answers_is_asked_again() -> None:
    scene = Deployment({"x": 1.0}, is_quick=False)
    asked = [second for second in range(65) if kinds(scene.act(second * 1000, WOKE)) == [RequestPlan]]
    assert asked == [0, 30, 60]


def test_requests_are_served_while_a_plan_is_computed() -> None:
    scene = Deployment({"x": 1.0}, is_quick=False)
    scene.act(0, WOKE)
    for replica in [
        a.worker for a in scene.act(5, Planned(1, {"x": scene.plan("x", 1.0)})) if isinstance(a, StartWorker)
    ]:
        scene.act(10, WorkerReady(replica))
    scene.act(1000, WOKE)
    (batch,) = scene.act(1100, request(1, at_ms=1100))
    assert isinstance(batch, StartBatch)


def test_one_application_and_several_decide_alike() -> None:
    """The events of one application give the same actions whether it is alone or beside a quiet one."""
    alone = Deployment({"x": 1.0}, cores=8)
    beside = Deployment({"x": 1.0, "y": 0.0}, cores=8)
    for scene in (alone, beside):
        scene.warm_up()
        for index in range(20):
            scene.act(5 * index + 1, request(index, application="x", at_ms=5 * index + 1))
    batches = [[a for a in scene.actions if isinstance(a, StartBatch)] for scene in (alone, beside)]
    assert [b.requests for b in batches[0]] == [b.requests for b in batches[1]]
