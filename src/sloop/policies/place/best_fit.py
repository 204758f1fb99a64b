"""The node with the least room left after the replica is on it.

Keeps large gaps for large replicas and empties nodes that could be given back. Fails for interference: neighbours are
packed onto one machine (see `spread`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.views import NodeView
from sloop.solvers.room import has_room
from sloop.vocabulary import ReplicaSpec


@dataclass(frozen=True, slots=True)
class BestFit:
    """Least free share of the named device, then fewest free cores, then the node listed first."""

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        fits = [node for node in nodes if has_room(spec, memory_bytes, node)]
        if not fits:
            return None
        return min(fits, key=lambda node: (node.free_share.get(spec.device, 0.0), node.free_cores)).node.name
