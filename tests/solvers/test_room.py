"""Whether a node can take one more replica."""

import pytest

from sloop.core.views import NodeView
from sloop.solvers.room import has_room
from sloop.vocabulary import Node, ReplicaSpec

NODE = NodeView(Node("a", "local", 4, 1000, ("gpu",)), 0.1 + 0.2, 100, {"gpu": 0.5})


@pytest.mark.parametrize(
    ("spec", "memory_bytes", "fits"),
    [
        (ReplicaSpec("s", "v", 0.3), 100, True),
        (ReplicaSpec("s", "v", 0.31), 0, False),
        (ReplicaSpec("s", "v", 0.3), 101, False),
        (ReplicaSpec("s", "v", 0.1, device="gpu", share=0.5), 0, True),
        (ReplicaSpec("s", "v", 0.1, device="gpu", share=0.6), 0, False),
        (ReplicaSpec("s", "v", 0.1, device="tpu", share=0.1), 0, False),
    ],
)
def test_cores_memory_and_share_must_all_fit(spec: ReplicaSpec, memory_bytes: int, fits: bool) -> None:
    assert has_room(spec, memory_bytes, NODE) is fits
