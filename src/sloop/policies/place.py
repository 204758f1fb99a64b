"""Place: which node a new replica goes to, and which accelerator there. Each class is one policy; none uses another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sloop.core.protocols import Place
from sloop.core.views import Site
from sloop.vocabulary import ReplicaSpec


@dataclass(frozen=True, slots=True)
class BestFit(Place):
    """The place with the least free room: on the accelerator, if the replica uses one, then in cores.

    Nodes on demand come last. Ties go to the node listed first. Keeps room for large replicas, and leaves nodes empty,
    which can then be released. Fails where replicas on one machine slow each other down (see `SpreadPlacement`).
    """

    ignores_names: ClassVar[bool] = True

    def choose(self, now_ns: int, spec: ReplicaSpec, sites: Sequence[Site]) -> int:
        keys = list(map(_free, sites))
        return keys.index(min(keys))


@dataclass(frozen=True, slots=True)
class SpreadPlacement(Place):
    """The place with the most free room: on the accelerator, if the replica uses one, then by the largest free fraction
    of the node's cores.

    Ties go to the node listed first. Spreads replicas, so that they slow each other down least and the loss of a node
    costs the fewest replicas. Fails for large replicas: many nodes end up half empty, and none may have room for one
    (see `BestFit`).
    """

    ignores_names: ClassVar[bool] = True

    def choose(self, now_ns: int, spec: ReplicaSpec, sites: Sequence[Site]) -> int:
        def room(site: Site) -> tuple[float, float, float]:
            _, share, memory_bytes, cores = _free(site)
            whole = site.node.node.cores
            return share, memory_bytes, cores / whole if whole else 0.0

        keys = list(map(room, sites))
        return keys.index(max(keys))


def _free(site: Site) -> tuple[bool, float, float, float]:
    """Whether the node is on demand, the free share and memory of the accelerator, and the free cores of the node.
    Replicas with a share of 0 do not reduce the free share; only memory limits how many there are."""
    node, device = site.node, site.device
    if device is None:
        return node.node.on_demand, 0.0, 0.0, node.free_cores
    return node.node.on_demand, device.free_share, device.free_memory_bytes, node.free_cores
