"""The ledger of the nodes' resources: capacities, reservations, and free room. Only this module decides what fits.

Cores are counted in thousandths and shares of a device in millionths, as integers. Floats would drift: after a day of
resizing, a node could lack 0.1 + 0.2 - 0.3 cores and refuse a replica that exactly fills it.
"""

from collections.abc import Iterable

from msgspec import Struct

from sloop.core.views import NodeView
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec

MILLI = 1_000
"""Units per core: Kubernetes, too, counts CPU in thousandths."""
MICRO = 1_000_000
"""Units per device."""


def millicores(cores: float) -> int:
    """Cores as integer thousandths."""
    return round(cores * MILLI)


class Reservation(Struct):
    """The resources that one replica reserves on its node."""

    node: str
    millicores: int
    memory_bytes: int
    device: str
    micro_share: int

    @classmethod
    def of(cls, spec: ReplicaSpec, memory_bytes: int, node: str) -> "Reservation":
        """The reservation of a replica of this spec on `node`."""
        return cls(node, millicores(spec.cores), memory_bytes, spec.device, round(spec.share * MICRO))


def fits(spec: ReplicaSpec, memory_bytes: int, node: NodeView) -> bool:
    """Whether one more replica of `spec` fits on `node`: its cores, memory, and share of a named device.

    It compares the same integers as `Ledger.has_room`, so the ledger never refuses a policy's choice because of
    rounding. It ignores `spec.node`: the caller decides which nodes are allowed.
    """
    return (
        round(spec.cores * MILLI) <= round(node.free_cores * MILLI)
        and memory_bytes <= node.free_memory_bytes
        and (not spec.device or round(spec.share * MICRO) <= round(node.free_share.get(spec.device, 0.0) * MICRO))
    )


class _Free(Struct):
    """The free resources of a node."""

    millicores: int
    memory_bytes: int
    micro_share: dict[str, int]


class Ledger:
    """Reservations by replica. A reservation that does not fit is refused, never granted in part."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.reservations: dict[ReplicaId, Reservation] = {}
        self._views: dict[str, NodeView | None] = dict.fromkeys(self.nodes)
        """A cache; None for a node that has changed since its view was made. Few nodes change within a second."""
        self._free = {
            node.name: _Free(millicores(node.cores), node.memory_bytes, dict.fromkeys(node.devices, MICRO))
            for node in self.nodes.values()
        }

    def has_room(self, wanted: Reservation) -> bool:
        """Whether the reservation fits into the free resources of its node."""
        free = self._free[wanted.node]
        return (
            wanted.millicores <= free.millicores
            and wanted.memory_bytes <= free.memory_bytes
            and (not wanted.device or wanted.micro_share <= free.micro_share.get(wanted.device, 0))
        )

    def reserve(self, replica: ReplicaId, reservation: Reservation) -> bool:
        """Reserve room for a new replica. Returns False, and reserves nothing, if the node has too little."""
        assert replica not in self.reservations, f"replica {replica} reserved twice"
        if not self.has_room(reservation):
            return False
        self.reservations[replica] = reservation
        self._take(reservation, 1)
        return True

    def release(self, replica: ReplicaId) -> None:
        """Free a replica's reservation, if it has one."""
        reservation = self.reservations.pop(replica, None)
        if reservation is not None:
            self._take(reservation, -1)

    def resize(self, replica: ReplicaId, cores: float) -> bool:
        """Change a replica's cores. Returns False, and changes nothing, if the node has too few."""
        reservation = self.reservations[replica]
        extra = millicores(cores) - reservation.millicores
        free = self._free[reservation.node]
        if extra > free.millicores:
            return False
        self._views[reservation.node] = None
        reservation.millicores += extra
        free.millicores -= extra
        return True

    def grow(self, replica: ReplicaId, cores: float) -> bool:
        """Reserve at least `cores` for a replica. Returns False, and changes nothing, if the node has too few."""
        return millicores(cores) <= self.reservations[replica].millicores or self.resize(replica, cores)

    def views(self) -> tuple[NodeView, ...]:
        """Every node with its free resources, in the order in which the nodes were declared."""
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
