"""The node with the largest free part.

Keeps neighbours apart, so they disturb each other least and one node's loss takes the fewest replicas. Fails for
fragmentation: many half-empty nodes, none with room for a large replica (see `best_fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.views import NodeView
from sloop.solvers.room import has_room
from sloop.vocabulary import ReplicaSpec


@dataclass(frozen=True, slots=True)
class Spread:
    """Most free share of the named device, then largest free fraction of cores, then the node listed first."""

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        fits = [node for node in nodes if has_room(spec, memory_bytes, node)]
        if not fits:
            return None
        return max(fits, key=lambda node: (node.free_share.get(spec.device, 0.0), _free_part(node))).node.name


def _free_part(node: NodeView) -> float:
    return node.free_cores / node.node.cores if node.node.cores else 0.0
