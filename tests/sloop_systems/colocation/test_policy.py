"""Placements on shared devices as plans: the systems of the thesis and ours, on nodes with V100s and CPU cores."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.app.hardware import ACCELERATORS
from sloop.core.views import ClusterView, DeviceView, NodeView, StageView
from sloop.errors import InputError
from sloop.policies.scale.harbor import Harbor
from sloop.profile.estimate import Estimate
from sloop.profile.interference import IgniterLaw
from sloop.profile.profile import Profile
from sloop.profile.published import PUBLISHED
from sloop.systems.planning import explain_plan
from sloop.testing.views import make_view
from sloop.units import s
from sloop.vocabulary import NodeState, Path, Plan
from sloop_systems.colocation.policy import Colocate, Igniter, Usher
from tests.asked import next_plan
from tests.policies.scale.shared import CPU, contents, planned, rented, stage_of, v100_nodes
from tests.systems.planning import scene as planning

VISION = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
BATCHES = (4, 8, 16, 32, 64, 128)
POLICIES = (Colocate(batches=BATCHES), Usher(batches=BATCHES), Harbor(batches=BATCHES))


def view_of(
    names: Sequence[str],
    rate_rps: float | Mapping[str, float],
    slo_ms: float,
    nodes: Sequence[NodeView],
    plan: Plan | None = None,
    suffix: str = "-V100",
) -> ClusterView:
    stages = [stage_of(name, slo_ms, ("p3.2xlarge", PUBLISHED[name + suffix])) for name in names]
    rates = dict(rate_rps) if isinstance(rate_rps, Mapping) else dict.fromkeys(names, float(rate_rps))
    paths = [Path((stage.name,), stage.slo_ns) for stage in stages]
    return make_view(*stages, nodes=nodes, plan=plan, rates=rates, paths=paths)


# The placements of the solvers


def test_the_integer_program_by_sm_use() -> None:
    view = view_of(VISION, 600, 250, v100_nodes(4))
    plan = planned(Colocate(batches=BATCHES), view)
    assert contents(plan) == [
        ["alexnet b4", "efficientnet_b7 b8"],
        ["densenet121 b16", "efficientnet_b7 b8"],
        ["efficientnet_b7 b8", "resnet50 b4"],
        ["vgg19 b16"],
    ]
    assert plan.saturated == ("resnet50",), "589.78 of 600 requests/s"
    slots = {group.spec.slot for target in plan.stages for group in target.groups}
    assert {slot.share for slot in slots} == {0.0}, "no limits"
    rates = [group.rate_rps for target in plan.stages for group in target.groups if target.stage == "efficientnet_b7"]
    assert rates == pytest.approx([200, 200, 200])


def test_usher_limits_shares_to_what_models_need() -> None:
    view = view_of(["alexnet", "gpt2", "resnet50", "t5"], 400, 200, v100_nodes(4))
    plan = planned(Usher(batches=BATCHES, rescue=False), view)
    assert contents(plan) == [["resnet50 b32"], ["t5 b8"], ["t5 b8"], ["t5 b8"]]
    assert plan.saturated == ("alexnet", "gpt2")
    (resnet,) = plan.stages[2].groups
    assert resnet.spec.slot.share == pytest.approx(0.9358)


def test_groups_can_be_pinned() -> None:
    names = ["resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"]
    groups = (("bert", "gpt2", "resnet50"), ("mobilenet_v2", "vgg19"))
    view = view_of(names, 400, 300, v100_nodes(4))
    plan = planned(Usher(batches=BATCHES, groups=groups, rescue=False), view)
    assert "793.6 requests/s; groups resnet50 + gpt2 + bert; vgg19 + mobilenet_v2;" in plan.why
    with pytest.raises(InputError, match="groups: no stage 'bret'"):
        next_plan(Usher(groups=(("bret",),)), 0, view)


def test_igniter() -> None:
    view = view_of(("alexnet", "resnet50", "vgg19"), 500, 200, v100_nodes(2), suffix="-V100-TensorRT")
    plan = planned(Igniter(), view)
    assert contents(plan) == [["alexnet b32", "resnet50 b32"], ["vgg19 b32"]], "49 is above the profiles' largest"
    shares = {target.stage: target.groups[0].spec.slot.share for target in plan.stages}
    assert shares == {"alexnet": 0.075, "resnet50": 0.325, "vgg19": 0.875}, "a unit more than for 49"
    one = planned(
        Igniter(rescue=False),
        view_of(("alexnet", "resnet50", "vgg19"), 500, 200, v100_nodes(1), suffix="-V100-TensorRT"),
    )
    assert one.saturated == ("alexnet", "resnet50")
    assert "2 devices needed, 1 available" in one.why


def test_igniter_knows_the_memory_of_a_gpu() -> None:
    """The publication does not: a model beside others for which the memory is too small would never start."""
    nodes, names = v100_nodes(3), ("alexnet", "resnet50", "vgg19")
    large = [replace_profile(PUBLISHED[f"{name}-V100-TensorRT"], device_memory_bytes=9 << 30) for name in names]
    stages = [stage_of(name, 200, ("p3.2xlarge", each)) for name, each in zip(names, large, strict=True)]
    plan = planned(Igniter(), make_view(*stages, nodes=nodes, rates=dict.fromkeys(names, 100.0)))
    assert sorted(map(len, contents(plan))) == [1, 1, 1]
    small = [replace_profile(each, device_memory_bytes=8 << 30) for each in large]
    stages = [stage_of(name, 200, ("p3.2xlarge", each)) for name, each in zip(names, small, strict=True)]
    plan = planned(Igniter(), make_view(*stages, nodes=nodes, rates=dict.fromkeys(names, 100.0)))
    assert sorted(map(len, contents(plan))) == [1, 2]


@pytest.mark.parametrize("units", [18, 36, 41])
def test_shares_of_igniter_that_fill_a_gpu_fit_on_it(units: int) -> None:
    """Also on GPUs on which a unit is no round number: six shares of 16.6667 % are one GPU."""
    shared = PUBLISHED["resnet50-V100-TensorRT"].sharing
    assert shared is not None
    law = shared.law
    assert isinstance(law, IgniterLaw)
    each = max(1, units // 6)
    gpu = structs.replace(law.gpu, share_unit=100 / units, schedule_slope_ms=0.0, schedule_offset_ms=0.0)
    work = 100 * (each - 0.5) * 100 / units  # of a batch, in ms at one percent: 100 ms at half a unit below `each`
    model = structs.replace(
        law.model, active=(0.0, 0.0, work, 0.0, 0.0), schedule_ms=0.0, load_bytes=0, feedback_bytes=0, cache=0.0
    )
    sharing = structs.replace(shared, law=IgniterLaw(gpu, structs.replace(model, power=(0.0, 0.0))))
    profile = replace_profile(PUBLISHED["resnet50-V100-TensorRT"], sharing=sharing)
    names = [f"m{number}" for number in range(units // each)]
    stages = [stage_of(name, 200, ("p3.2xlarge", profile)) for name in names]
    paths = [Path((stage.name,), stage.slo_ns) for stage in stages]
    view = make_view(*stages, nodes=v100_nodes(1), rates=dict.fromkeys(names, 1.0), paths=paths)
    plan = planned(Igniter(rescue=False), view)
    assert [len(target.groups) for target in plan.stages] == [1] * len(names)


def test_harbor_serves_one_language_model_well_instead_of_two_badly() -> None:
    names = ("resnet50", "mobilenet_v2", "bert", "gpt2")
    plan = planned(Harbor(batches=BATCHES), view_of(names, 276, 300, v100_nodes(5)))
    by_stage = {target.stage: len(target.groups) for target in plan.stages}
    assert by_stage["bert"] == 3
    assert plan.saturated == ("gpt2",)
    assert max(target.batch_max for target in plan.stages) <= 16


def test_a_stage_without_a_replica_gets_one_where_there_is_room() -> None:
    names = ("alexnet", "xlnet")
    rates = {"alexnet": 100.0, "xlnet": 5000.0}
    alone = planned(Colocate(batches=BATCHES, rescue=False), view_of(names, rates, 100, v100_nodes(2)))
    assert not alone.stages[1].groups, "108 ms are longer than its deadline"
    rescued = planned(Colocate(batches=BATCHES), view_of(names, rates, 100, v100_nodes(2)))
    assert len(rescued.stages[1].groups) == 1
    assert "xlnet" in rescued.saturated


# Again


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: type(each).__name__)
def test_a_plan_stays_while_rates_are_near(policy: Any) -> None:
    policy = replace(policy)
    nodes = v100_nodes(5)
    plan = planned(policy, view_of(VISION, 400, 200, nodes))
    assert next_plan(policy, s(10), view_of(VISION, 430, 200, nodes, plan)) is None
    more = planned(policy, view_of(VISION, 800, 200, nodes, plan), 20)
    assert contents(more) != contents(plan)


def test_devices_get_those_contents_with_which_most_replicas_stay() -> None:
    policy = Colocate(batches=BATCHES)
    nodes = v100_nodes(5)
    before = planned(policy, view_of(VISION, 500, 200, nodes))
    places = {group.spec for target in before.stages for group in target.groups}
    after = planned(policy, view_of(VISION, 400, 200, nodes, before), 10)
    now = {group.spec for target in after.stages for group in target.groups}
    # Any other labels of the same contents keep at most as many.
    kept = len(places & now)
    by_node = {spec.node: spec for spec in now}
    shifted = {name: f"gpu-{(int(name[4:]) + 1) % 5}" for name in by_node if name}
    moved = {structs.replace(spec, node=shifted[spec.node]) for spec in now if spec.node}
    assert kept >= len(places & moved)
    assert kept >= 3


def taught(view: ClusterView, factors: Mapping[str, float]) -> ClusterView:
    """The view after so many batches of these stages have taken so many times as long as profiled that nothing else
    counts."""
    stages = []
    for stage in view.stages:
        belief = stage.beliefs[stage.name, "p3.2xlarge"]
        assert isinstance(belief, Estimate)
        own = Estimate(belief.profile, variant=stage.name, hardware="p3.2xlarge")
        if stage.name in factors:
            own.apply(factors[stage.name], 0.0)
        stages.append(replace(stage, beliefs={(stage.name, "p3.2xlarge"): own}))
    return replace(view, stages=tuple(stages))


def expected_rps(plan: Plan) -> float:
    """What a plan of ours expects to serve."""
    return float(plan.why.split(" for ")[1].split()[0])


@pytest.mark.parametrize("measured", [0.9, 1.0, 1.1, 1.3])
def test_harbor_plans_with_what_it_has_measured(measured: float) -> None:
    """Whatever it expected: the measured factor takes the place of the expected one, and does not multiply it."""
    view = view_of(VISION, 580, 150, v100_nodes(4))
    known = [planned(Harbor(batches=BATCHES, slower=slower), taught(view, dict.fromkeys(VISION, measured)))
             for slower in (1.0, 1.18, 1.5)]  # fmt: skip
    right = planned(Harbor(batches=BATCHES, slower=measured), view)
    assert [contents(plan) for plan in known] == [contents(right)] * 3
    assert [expected_rps(plan) for plan in known] == pytest.approx([expected_rps(right)] * 3, rel=1e-3)


def test_harbor_expects_of_models_that_it_has_not_served_what_it_has_measured_of_others() -> None:
    view = view_of(VISION, 580, 150, v100_nodes(4))
    served = dict.fromkeys(VISION[1:], 1.0)
    assert contents(planned(Harbor(batches=BATCHES), taught(view, served))) == contents(
        planned(Harbor(batches=BATCHES, slower=1.0), view)
    )


def test_harbor_plans_again_when_it_has_measured() -> None:
    """Although the beliefs stay as they are: the profile was right, and the expectation was not."""
    policy = Harbor(batches=BATCHES)
    view = view_of(VISION, 580, 150, v100_nodes(4))
    before = planned(policy, view)
    view = replace(view, plan=before)
    assert next_plan(policy, s(10), view) is None
    after = planned(policy, taught(view, dict.fromkeys(VISION, 1.0)), 20)
    assert expected_rps(after) > 1.02 * expected_rps(before)


def test_a_lost_node_moves_its_replicas_only() -> None:
    policy = Harbor(batches=BATCHES)
    nodes = v100_nodes(6)
    before = planned(policy, view_of(VISION, 433, 200, nodes))
    used = sorted({group.spec.node or "" for target in before.stages for group in target.groups})
    lost = [replace(view, state=NodeState.LOST) if view.node.name == used[0] else view for view in nodes]
    view = view_of(VISION, 433, 200, lost, before)
    after = planned(policy, view, 10)
    assert all(group.spec.node != used[0] for target in after.stages for group in target.groups)


def test_nodes_of_one_kind_may_differ() -> None:
    """A group of nodes may replace the cores of its kind; what is planned fits on each of them."""
    nodes = [*v100_nodes(1), *v100_nodes(1, name="gpu-small", cores=1.0, memory_bytes=8 << 30)]
    view = view_of(VISION, 400, 250, nodes)
    for policy in POLICIES:
        plan = planned(replace(policy), view)
        assert {group.spec.node for target in plan.stages for group in target.groups} == {"gpu-0", "gpu-small"}


PACKERS = (Colocate(batches=BATCHES), Harbor(batches=BATCHES), Usher(batches=BATCHES, metric="sm_use"), Igniter())
SHARERS = (*PACKERS, Usher(batches=BATCHES))


def small_stages(policy: Any, count: int, **changes: Any) -> tuple[list[StageView], dict[str, float]]:
    """Models of which many fit on one V100."""
    coefficients = "resnet50-V100-TensorRT" if isinstance(policy, Igniter) else "mobilenet_v2-V100"
    profile = replace_profile(PUBLISHED[coefficients], device_memory_bytes=1 << 30, **changes)
    names = [f"m{number}" for number in range(count)]
    return [stage_of(name, 200, ("p3.2xlarge", profile)) for name in names], dict.fromkeys(names, 20.0)


@pytest.mark.parametrize("policy", SHARERS, ids=lambda each: type(each).__name__)
def test_no_device_gets_more_replicas_than_it_takes_clients(policy: Any) -> None:
    stages, rates = small_stages(policy, 3)
    device = structs.replace(ACCELERATORS["V100"], clients_max=1)
    nodes = [
        replace(view, devices=(DeviceView(device, 1.0, device.memory_bytes, 1),))
        for view in v100_nodes(3, devices=(device,))
    ]
    plan = planned(replace(policy), make_view(*stages, nodes=nodes, rates=rates))
    assert sorted(map(len, contents(plan))) == [1, 1, 1]


@pytest.mark.parametrize("policy", SHARERS, ids=lambda each: type(each).__name__)
def test_replicas_on_devices_fit_into_the_memory_of_their_node(policy: Any) -> None:
    stages, rates = small_stages(policy, 2, memory_bytes=40 << 30)
    plan = planned(replace(policy), make_view(*stages, nodes=v100_nodes(2), rates=rates))
    assert sorted(map(len, contents(plan))) == [1, 1]


def gpu_node(name: str, *sizes_gib: int, **changes: Any) -> NodeView:
    """A node whose V100s have so much memory."""
    devices = tuple(
        structs.replace(ACCELERATORS["V100"], name=f"V100-{number}", memory_bytes=gib << 30)
        for number, gib in enumerate(sizes_gib)
    )
    (view,) = v100_nodes(1, name=name, devices=devices, **changes)
    return replace(view, devices=tuple(DeviceView(each, 1.0, each.memory_bytes, 48) for each in devices))


@pytest.mark.parametrize("policy", PACKERS, ids=lambda each: type(each).__name__)
def test_devices_of_a_node_may_differ(policy: Any) -> None:
    """No device that is too small for a model keeps it from the larger ones beside it."""
    stages, rates = small_stages(policy, 2)
    large = replace_profile(stages[1].beliefs["m1", "p3.2xlarge"].profile, device_memory_bytes=3 << 30)  # type: ignore[attr-defined]
    stages[1] = stage_of("m1", 200, ("p3.2xlarge", large))
    for nodes in ([gpu_node("a", 2, 16, 2)], [gpu_node("a", 2), gpu_node("b", 4)]):
        plan = planned(replace(policy), make_view(*stages, nodes=nodes, rates=rates))
        assert [bool(target.groups) for target in plan.stages] == [True, True]


@pytest.mark.parametrize("policy", SHARERS, ids=lambda each: type(each).__name__)
def test_a_node_that_has_memory_for_few_workers_uses_few_of_its_devices(policy: Any) -> None:
    stages, rates = small_stages(policy, 1, memory_bytes=2 << 30)
    nodes = [gpu_node("a", 16, 16, 16, 16, memory_bytes=5 << 30)]
    plan = planned(replace(policy), make_view(*stages, nodes=nodes, rates=dict.fromkeys(rates, 400.0)))
    assert plan.stages[0].groups


@pytest.mark.parametrize("policy", PACKERS, ids=lambda each: type(each).__name__)
def test_a_model_that_fits_on_lost_nodes_only_waits_for_them(policy: Any) -> None:
    """Before, no model got a new plan until the node was back."""
    policy = replace(policy)
    stages, rates = small_stages(policy, 2)
    large = replace_profile(stages[1].beliefs["m1", "p3.2xlarge"].profile, device_memory_bytes=3 << 30)  # type: ignore[attr-defined]
    stages[1] = stage_of("m1", 200, ("p3.2xlarge", large))
    nodes = [gpu_node("a", 2), gpu_node("b", 4)]
    before = planned(policy, make_view(*stages, nodes=nodes, rates=rates))
    lost = [nodes[0], replace(nodes[1], state=NodeState.LOST)]
    after = next_plan(policy, s(10), make_view(*stages, nodes=lost, rates=rates, plan=before))
    assert [[group.spec.node for group in target.groups if group.count] for target in after.stages] == [["a"], []]
    assert "m1" in after.saturated
    with pytest.raises(InputError, match="m1 fits on no device") if not isinstance(policy, Igniter) else nullcontext():
        next_plan(replace(policy), 0, make_view(*stages, nodes=nodes[:1], rates=rates))


@pytest.mark.parametrize("policy", [Colocate(), Usher(), Harbor()], ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("count", [3, 6, 7])
def test_one_replica_of_each_stage_fits_on_the_cores_of_a_node(policy: Any, count: int) -> None:
    """Whatever the cores divided by the stages: a sixth of a node, six times, is not more than the node."""
    names = [f"m{number}" for number in range(count)]
    stages = [stage_of(name, 500, ("c5.2xlarge", CPU)) for name in names]
    (node,) = rented(("c5.2xlarge", 12, 0.34, ""), count=1)
    view = make_view(*stages, nodes=[node], rates=dict.fromkeys(names, 1.0))
    plan = planned(replace(policy, rescue=False), view)
    assert [len(target.groups) for target in plan.stages] == [1] * count
    assert plan.feasible


# Mistakes


def test_a_model_that_fits_on_no_device_is_refused() -> None:
    huge = replace_profile(PUBLISHED["resnet50-V100"], device_memory_bytes=20 << 30)
    stage = stage_of("m", 400, ("p3.2xlarge", huge))
    for policy in POLICIES:
        with pytest.raises(InputError, match="m fits on no device: it needs 125 % of the memory of a V100"):
            next_plan(replace(policy), 0, make_view(stage, nodes=v100_nodes(1), rates={"m": 10}))


def replace_profile(profile: Profile, **changes: Any) -> Profile:
    return structs.replace(profile, **changes)


def test_a_profile_that_does_not_say_what_it_takes_is_refused_or_alone() -> None:
    silent = replace_profile(PUBLISHED["resnet50-V100"], sharing=None)
    view = make_view(stage_of("m", 400, ("p3.2xlarge", silent)), nodes=v100_nodes(1), rates={"m": 10})
    with pytest.raises(InputError, match="the profile of m on V100 has no sm_use"):
        next_plan(Colocate(), 0, view)
    assert len(planned(Harbor(), view).stages[0].groups) == 1
    alone = planned(Igniter(), view)
    assert contents(alone) == [["m b128"]], "111 ms are within half of its deadline"
    assert "devices of their own for m, whose profiles have no coefficients of iGniter" in alone.why


def test_no_model_fits_on_a_device_whose_memory_is_all_but_nothing() -> None:
    device = structs.replace(ACCELERATORS["V100"], memory_bytes=0)
    nodes = [replace(view, devices=(DeviceView(device, 1.0, 0, 48),)) for view in v100_nodes(1, devices=(device,))]
    for policy in POLICIES:
        with pytest.raises(InputError, match=r"resnet50 fits on no device: it needs .* of the memory of a V100"):
            next_plan(replace(policy), 0, view_of(["resnet50"], 100, 200, nodes))
    many = view_of(("alexnet", "resnet50"), 100, 200, nodes, suffix="-V100-TensorRT")
    assert next_plan(Igniter(), 0, many) is not None


def test_a_refusal_names_each_kind_of_device_once() -> None:
    stages, rates = small_stages(Harbor(), 1)
    nodes = [gpu_node("a", 0), gpu_node("b", 0, 0)]
    with pytest.raises(InputError, match=r"of the memory of a V100(?! or)"):
        next_plan(Harbor(batches=BATCHES), 0, make_view(*stages, nodes=nodes, rates=rates))


def test_kinds_that_the_cluster_does_not_have_are_refused() -> None:
    view = view_of(("resnet50",), 100, 200, v100_nodes(1))
    with pytest.raises(InputError, match=r"no node has hardware 'g4dn\.xlarge'"):
        next_plan(Harbor(hardware=("g4dn.xlarge",)), 0, view)
    with pytest.raises(InputError, match=r"no node has hardware 'g4dn\.xlarge'"):
        next_plan(Usher(hardware="g4dn.xlarge"), 0, view)


# As told to users


def test_each_reason_names_its_own_stage_only() -> None:
    """A device of its own for `a`, room beside it for `b`, and none for `c`."""
    stages = [planning.stage(name) for name in "abc"]
    answer = explain_plan(planning.setup(*stages, cluster=planning.nodes(4, 1, memory_bytes=2000), system="igniter"), 5)
    assert [each.why for each in answer.shortfalls] == [
        "igniter has no plan that provides for what arrives at b",
        "the plan cannot keep up with 5 requests/s: c has no replicas",
    ]


# Any view


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.dictionaries(st.sampled_from(VISION), st.floats(0, 2000), min_size=1),
    st.integers(1, 5),
    st.sampled_from([50, 150, 400]),
)
def test_plans_fit_and_are_repeatable(policy: Any, rates: dict[str, float], count: int, slo_ms: float) -> None:
    view = view_of(tuple(rates), rates, slo_ms, v100_nodes(count))
    plan = planned(replace(policy), view)
    assert plan == next_plan(replace(policy), 0, view)
    for target in plan.stages:
        rate = max(rates[target.stage], 0.1)
        own = [group for group in target.groups if group.rate_rps]
        assert not own or sum(group.rate_rps for group in own) == pytest.approx(rate)
