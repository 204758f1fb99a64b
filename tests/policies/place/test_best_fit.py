"""The tightest node that fits."""

from collections.abc import Callable

from sloop.core.views import NodeView
from sloop.policies.place.best_fit import BestFit
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
