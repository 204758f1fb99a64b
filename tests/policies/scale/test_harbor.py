"""Our placement on shared devices as plans: kinds, prices and mistakes. The models of the colocation thesis, with their
needs, are in tests/sloop_systems/colocation."""

from collections import Counter
from dataclasses import replace

import pytest
from msgspec import structs

from sloop.app.hardware import ACCELERATORS
from sloop.core.views import DeviceView
from sloop.errors import InputError
from sloop.policies.scale.harbor import Harbor
from sloop.testing.views import make_view
from sloop.vocabulary import NodeState
from tests.asked import next_plan
from tests.policies.scale.shared import CPU, T4, planned, rented, stage_of

BOTH = (("c5.2xlarge", 8, 0.34, ""), ("g4dn.xlarge", 4, 0.526, "T4"))


@pytest.mark.parametrize(("rate_rps", "expected"), [(5, {"c5.2xlarge": 1}), (200, {"g4dn.xlarge": 1})])
def test_harbor_rents_the_cheapest_kind_that_serves_as_much(rate_rps: float, expected: dict[str, int]) -> None:
    stage = stage_of("m", 400, ("c5.2xlarge", CPU), ("g4dn.xlarge", T4))
    plan = planned(Harbor(), make_view(stage, nodes=rented(*BOTH), rates={"m": rate_rps}))
    assert Counter(group.spec.slot.hardware for group in plan.stages[0].groups) == expected
    assert "USD/h" in plan.why


def test_a_node_of_several_accelerators_is_rented_as_a_whole() -> None:
    """A model that needs one accelerator does not pay for a quarter of a node with four."""
    stage = stage_of("m", 400, ("one", T4), ("four", T4))
    nodes = rented(("one", 4, 4.0, "T4"), ("four", 16, 12.0, "T4"))
    four = tuple(structs.replace(ACCELERATORS["T4"], name=f"T4-{number}") for number in range(4))
    for number, view in enumerate(nodes):
        if view.node.hardware == "four":
            devices = tuple(DeviceView(each, 1.0, each.memory_bytes, 48) for each in four)
            nodes[number] = replace(view, node=structs.replace(view.node, devices=four), devices=devices)
    policy = Harbor()
    plan = planned(policy, make_view(stage, nodes=nodes, rates={"m": 20}))
    assert {group.spec.node for group in plan.stages[0].groups} == {"one-0"}
    many = make_view(stage, nodes=nodes, rates={"m": 1800}, plan=plan)
    after = planned(policy, many)
    used = Counter(group.spec.node for group in after.stages[0].groups)
    assert used == {"four-0": sum(used.values())}, "all devices of one node before any of another"
    assert " and 12 USD/h" in after.why


def test_a_placement_without_prices_names_none() -> None:
    stage = stage_of("m", 400, ("c5.2xlarge", CPU))
    plan = planned(Harbor(), make_view(stage, nodes=rented(("c5.2xlarge", 8, 0.0, "")), rates={"m": 5}))
    assert "USD" not in plan.why


def test_prices_must_be_known_for_all_that_can_be_rented() -> None:
    stage = stage_of("m", 400, ("c5.2xlarge", CPU), ("g4dn.xlarge", T4))
    nodes = rented(BOTH[0], ("g4dn.xlarge", 4, 0.0, "T4"))
    with pytest.raises(InputError, match=r"nodes on demand without a price: g4dn\.xlarge"):
        next_plan(Harbor(), 0, make_view(stage, nodes=nodes, rates={"m": 10}))


def test_a_node_that_is_lost_moves_its_replicas_only() -> None:
    policy, nodes = Harbor(), rented(("g4dn.xlarge", 4, 0.5, "T4"), count=4)
    nodes = [replace(each, node=structs.replace(each.node, on_demand=False), state=NodeState.READY) for each in nodes]
    stage = stage_of("m", 100, ("g4dn.xlarge", T4))
    before = planned(policy, make_view(stage, nodes=nodes, rates={"m": 1000}))
    used = {group.spec.node for group in before.stages[0].groups}
    lost = [replace(each, state=NodeState.LOST) if each.node.name == min(map(str, used)) else each for each in nodes]
    after = planned(policy, make_view(stage, nodes=lost, rates={"m": 1000}, plan=before), 10)
    now = {group.spec.node for group in after.stages[0].groups}
    assert len(used) > 1
    assert used - now == {min(map(str, used))}


def test_a_plan_stays_while_rates_are_near() -> None:
    policy, nodes = Harbor(), rented(("g4dn.xlarge", 4, 0.5, "T4"), count=4)
    stage = stage_of("m", 100, ("g4dn.xlarge", T4))
    plan = planned(policy, make_view(stage, nodes=nodes, rates={"m": 500}))
    assert next_plan(policy, 0, make_view(stage, nodes=nodes, rates={"m": 530}, plan=plan)) is None
    assert next_plan(policy, 0, make_view(stage, nodes=nodes, rates={"m": 1000}, plan=plan)) is not None


def test_models_that_fit_on_no_device_and_kinds_that_are_not_there_are_refused() -> None:
    nodes = rented(("g4dn.xlarge", 4, 0.5, "T4"))
    huge = structs.replace(T4, device_memory_bytes=20 << 30)
    with pytest.raises(InputError, match="m fits on no device: it needs 125 % of the memory of a T4"):
        next_plan(Harbor(), 0, make_view(stage_of("m", 400, ("g4dn.xlarge", huge)), nodes=nodes, rates={"m": 10}))
    view = make_view(stage_of("m", 400, ("g4dn.xlarge", T4)), nodes=nodes, rates={"m": 10})
    with pytest.raises(InputError, match=r"no node has hardware 'c5\.2xlarge'"):
        next_plan(Harbor(hardware=("c5.2xlarge",)), 0, view)
