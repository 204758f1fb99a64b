"""Whether a node can take one more replica: cores, memory and share of a device, as the cluster view counts them."""

from typing import Final

from sloop.core.views import NodeView
from sloop.vocabulary import ReplicaSpec

EPSILON: Final = 1e-9
"""Free cores and shares are differences of floats; this much is not a shortage."""


def has_room(spec: ReplicaSpec, memory_bytes: int, node: NodeView) -> bool:
    """True where `spec` and `memory_bytes` fit into what is free on `node`."""
    if spec.device and node.free_share.get(spec.device, 0.0) + EPSILON < spec.share:
        return False
    return node.free_cores + EPSILON >= spec.cores and node.free_memory_bytes >= memory_bytes
