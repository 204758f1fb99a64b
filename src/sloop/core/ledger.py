"""The resource ledger: what each node has, who holds how much of it, what is free.

Cores are counted in thousandths and shares in millionths, as integers, so that taking and giving back never drifts.
"""

from collections.abc import Iterable

from msgspec import Struct

from sloop.core.views import NodeView
from sloop.vocabulary import Node, ReplicaId

MILLI = 1_000
MICRO = 1_000_000


def millicores(cores: float) -> int:
    """Cores as integer thousandths."""
    return round(cores * MILLI)


class Reservation(Struct):
    """What one replica holds on its node."""

    node: str
    millicores: int
    memory_bytes: int
    device: str
    micro_share: int


class _Free(Struct):
    millicores: int
    memory_bytes: int
    micro_share: dict[str, int]


class Ledger:
    """Reservations by replica. A reservation that does not fit is refused, never granted in part."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.holdings: dict[ReplicaId, Reservation] = {}
        self._views: dict[str, NodeView | None] = dict.fromkeys(self.nodes)
        """None for a node that has changed since it was looked at."""
        self._free = {
            node.name: _Free(millicores(node.cores), node.memory_bytes, dict.fromkeys(node.devices, MICRO))
            for node in self.nodes.values()
        }

    def has_room(self, reservation: Reservation) -> bool:
        """Whether the node could hold this as well as what it holds already."""
        free = self._free[reservation.node]
        return (
            reservation.millicores <= free.millicores
            and reservation.memory_bytes <= free.memory_bytes
            and (not reservation.device or reservation.micro_share <= free.micro_share.get(reservation.device, 0))
        )

    def reserve(self, replica: ReplicaId, reservation: Reservation) -> bool:
        """Take room for a new replica; False, and nothing taken, where the node has not enough."""
        assert replica not in self.holdings, f"replica {replica} reserved twice"
        if not self.has_room(reservation):
            return False
        self.holdings[replica] = reservation
        self._take(reservation, 1)
        return True

    def release(self, replica: ReplicaId) -> None:
        """Give back all a replica holds; nothing to do for one that holds nothing."""
        reservation = self.holdings.pop(replica, None)
        if reservation is not None:
            self._take(reservation, -1)

    def resize(self, replica: ReplicaId, cores: float) -> bool:
        """Change a replica's cores; False, and nothing changed, where the node has not enough."""
        reservation = self.holdings[replica]
        extra = millicores(cores) - reservation.millicores
        free = self._free[reservation.node]
        if extra > free.millicores:
            return False
        self._views[reservation.node] = None
        reservation.millicores += extra
        free.millicores -= extra
        return True

    def grow(self, replica: ReplicaId, cores: float) -> bool:
        """Hold at least `cores` for a replica; False, and nothing changed, where the node has not enough."""
        return millicores(cores) <= self.holdings[replica].millicores or self.resize(replica, cores)

    def views(self) -> tuple[NodeView, ...]:
        """Every node with what is free on it, in the order the nodes were declared."""
        return tuple([view if view else self._view(name) for name, view in self._views.items()])

    def _view(self, name: str) -> NodeView:
        free = self._free[name]
        self._views[name] = view = NodeView(
            node=self.nodes[name],
            free_cores=free.millicores / MILLI,
            free_memory_bytes=free.memory_bytes,
            free_share={device: share / MICRO for device, share in free.micro_share.items()},
        )
        return view

    def _take(self, reservation: Reservation, sign: int) -> None:
        free = self._free[reservation.node]
        self._views[reservation.node] = None
        free.millicores -= sign * reservation.millicores
        free.memory_bytes -= sign * reservation.memory_bytes
        if reservation.device:
            free.micro_share[reservation.device] -= sign * reservation.micro_share
