"""Place: which node a new replica goes to. Each class is one policy; none uses another."""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.ledger import fits
from sloop.core.views import NodeView
from sloop.vocabulary import ReplicaSpec


@dataclass(frozen=True, slots=True)
class BestFit:
    """The node with the least free room: the smallest free share of the named device, then the fewest free cores.

    Ties go to the node listed first. Keeps room for large replicas and leaves nodes empty that could be given back.
    Fails for interference: it packs replicas onto one machine (see `SpreadPlacement`).
    """

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        fitting = [node for node in nodes if fits(spec, memory_bytes, node)]
        if not fitting:
            return None
        return min(fitting, key=lambda node: (node.free_share.get(spec.device, 0.0), node.free_cores)).node.name


@dataclass(frozen=True, slots=True)
class SpreadPlacement:
    """The node with the most free room: the largest free share of the named device, then of its cores.

    Ties go to the node listed first. Spreads replicas, so that they disturb each other least and the loss of a node
    costs the fewest replicas. Fails for fragmentation: many half-empty nodes, none with room for a large replica (see
    `BestFit`).
    """

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        fitting = [node for node in nodes if fits(spec, memory_bytes, node)]
        if not fitting:
            return None
        return max(fitting, key=lambda node: (node.free_share.get(spec.device, 0.0), _free_part(node))).node.name


def _free_part(node: NodeView) -> float:
    return node.free_cores / node.node.cores if node.node.cores else 0.0
