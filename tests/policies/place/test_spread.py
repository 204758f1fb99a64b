"""The emptiest node."""

from collections.abc import Callable

from sloop.core.views import NodeView
from sloop.policies.place.spread import Spread
from sloop.vocabulary import ReplicaSpec


def test_takes_the_largest_free_part(node: Callable[..., NodeView]) -> None:
    nodes = [node("half", free_cores=32, cores=64), node("most", free_cores=7, cores=8)]
    assert Spread().choose(0, ReplicaSpec("s", "v", 2), 0, nodes) == "most"
    assert Spread().choose(0, ReplicaSpec("s", "v", 8), 0, nodes) == "half"
    assert Spread().choose(0, ReplicaSpec("s", "v", 80), 0, nodes) is None


def test_the_share_of_a_device_counts_first(node: Callable[..., NodeView]) -> None:
    nodes = [node("a", free_cores=8, share={"gpu": 0.5}), node("b", free_cores=1, share={"gpu": 0.9})]
    assert Spread().choose(0, ReplicaSpec("s", "v", 1, device="gpu", share=0.3), 0, nodes) == "b"
