"""Placement policies: which node a replica goes to."""

from collections.abc import Callable

from sloop.core.views import NodeView
from sloop.policies.place import BestFit, SpreadPlacement
from sloop.vocabulary import ReplicaSpec


def test_leaves_the_least_room(node: Callable[..., NodeView]) -> None:
    nodes = [node("large", free_cores=8), node("tight", free_cores=2), node("full", free_cores=1)]
    assert BestFit().choose(0, ReplicaSpec("s", "v", 2), 0, nodes) == "tight"
    assert BestFit().choose(0, ReplicaSpec("s", "v", 9), 0, nodes) is None
    assert BestFit().choose(0, ReplicaSpec("s", "v", 1), 1 << 31, nodes) is None


def test_the_share_of_a_device_counts_first(node: Callable[..., NodeView]) -> None:
    nodes = [node("a", share={"gpu": 0.9}), node("b", free_cores=1, share={"gpu": 0.4}), node("c", share={"gpu": 0.2})]
    assert BestFit().choose(0, ReplicaSpec("s", "v", 1, device="gpu", share=0.3), 0, nodes) == "b"
    assert BestFit().choose(0, ReplicaSpec("s", "v", 1, device="tpu"), 0, nodes) is None


# spread


def test_takes_the_largest_free_part(node: Callable[..., NodeView]) -> None:
    nodes = [node("half", free_cores=32, cores=64), node("most", free_cores=7, cores=8)]
    assert SpreadPlacement().choose(0, ReplicaSpec("s", "v", 2), 0, nodes) == "most"
    assert SpreadPlacement().choose(0, ReplicaSpec("s", "v", 8), 0, nodes) == "half"
    assert SpreadPlacement().choose(0, ReplicaSpec("s", "v", 80), 0, nodes) is None


def test_spread_also_looks_at_the_device_first(node: Callable[..., NodeView]) -> None:
    nodes = [node("a", free_cores=8, share={"gpu": 0.5}), node("b", free_cores=1, share={"gpu": 0.9})]
    assert SpreadPlacement().choose(0, ReplicaSpec("s", "v", 1, device="gpu", share=0.3), 0, nodes) == "b"
