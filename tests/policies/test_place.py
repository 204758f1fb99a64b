"""Placement policies: which node a replica goes to, and which accelerator there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.core.ledger import sites
from sloop.core.protocols import Place
from sloop.core.views import NodeView
from sloop.policies.place import BestFit, SpreadPlacement
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.testing.views import make_node
from sloop.vocabulary import NodeState, ReplicaSpec, Slot


def chosen(policy: Place, cores: float, *nodes: NodeView, accelerator: str = "", share: float = 1.0) -> tuple[str, str]:
    """The node and the device of a replica, chosen among the places with room for it."""
    spec = ReplicaSpec("s", "v", Slot(cores, "local", accelerator, share))
    found = sites(spec, Estimate(YOLOV5S_S, variant="v", hardware="local"), nodes)
    site = found[policy.choose(0, spec, found)]
    return site.node.node.name, site.device.device.name if site.device else ""


def test_best_fit_leaves_the_least_room() -> None:
    nodes = [make_node("large", free_cores=8), make_node("tight", free_cores=2), make_node("full", free_cores=1)]
    assert chosen(BestFit(), 2, *nodes) == ("tight", "")
    assert chosen(BestFit(), 4, *nodes) == ("large", "")


def test_best_fit_takes_nodes_on_demand_last() -> None:
    rented, own = make_node("rented", free_cores=2, on_demand=True), make_node("own", free_cores=8)
    assert chosen(BestFit(), 2, rented, own) == ("own", "")
    assert chosen(BestFit(), 2, rented) == ("rented", "")
    away = make_node("away", free_cores=2, on_demand=True, state=NodeState.RELEASED)
    assert chosen(BestFit(), 2, away, own) == ("own", ""), "a released node is no place"


def test_spread_takes_the_largest_free_part() -> None:
    nodes = [make_node("half", free_cores=32, cores=64), make_node("most", free_cores=7, cores=8)]
    assert chosen(SpreadPlacement(), 2, *nodes) == ("most", "")
    assert chosen(SpreadPlacement(), 8, *nodes) == ("half", "")


@pytest.mark.parametrize(
    ("policy", "expected"), [(BestFit(), ("b", "gpu1")), (SpreadPlacement(), ("a", "gpu0"))], ids=["best_fit", "spread"]
)
def test_the_free_share_of_accelerators_counts_first(policy: Place, expected: tuple[str, str]) -> None:
    nodes = [
        make_node("a", free_cores=2, devices={"gpu0": 0.9, "gpu1": 0.5}),
        make_node("b", free_cores=7, devices={"gpu0": 0.2, "gpu1": 0.4}),
    ]
    assert chosen(policy, 1, *nodes, accelerator="T4", share=0.3) == expected


def test_equal_places_go_to_the_first() -> None:
    nodes = [make_node("a", devices={"x": 1.0, "y": 1.0}), make_node("b", devices={"x": 1.0})]
    for policy in (BestFit(), SpreadPlacement()):
        assert chosen(policy, 1, *nodes, accelerator="T4") == ("a", "x")
        assert chosen(policy, 1, *nodes) == ("a", "")


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([3, 4]), st.booleans()), min_size=1, max_size=9))
def test_a_policy_that_ignores_names_chooses_the_same_among_the_first_of_equal_nodes(
    free: list[tuple[int, int, bool]],
) -> None:
    nodes = [
        make_node(f"n{n}", free_cores=own, cores=cores, on_demand=on_demand)
        for n, (own, cores, on_demand) in enumerate(free)
    ]
    firsts = dict(reversed(list(zip(free, nodes, strict=True))))
    shown = [node for node in nodes if node in firsts.values()]
    for policy in (BestFit(), SpreadPlacement()):
        assert policy.ignores_names
        assert chosen(policy, 1, *shown) == chosen(policy, 1, *nodes)
