"""What is free on many nodes, told by few: of nodes that are alike in all but their names, the one listed first.

Whoever chooses by what nodes have chooses the same among these as among all of them; a cluster of thousands of nodes is
of a few kinds, each in a few states. Keeps one ledger for each node, as the core keeps one for all.
"""

from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush

from sloop.core.ledger import Ledger, Reservation
from sloop.core.views import NodeView
from sloop.vocabulary import Node, ReplicaId


class Alike:
    """Nodes and what is free on them. Reservations that do not fit are refused, never granted in part."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._ledgers = {node.name: Ledger([node]) for node in nodes}
        self._names = list(self._ledgers)
        self._places = {name: place for place, name in enumerate(self._names)}
        self._states: dict[Hashable, list[int]] = {}
        """Places of the nodes in each state, as a heap: the first listed is at the top."""
        for name in self._names:
            self._enter(name)

    def first(self) -> list[NodeView]:
        """One node of each state, in the order the nodes were declared."""
        return [self._view(self._names[place]) for place in sorted(places[0] for places in self._states.values())]

    def all(self) -> list[NodeView]:
        """Every node, in the order the nodes were declared."""
        return [self._view(name) for name in self._names]

    def reserve(self, replica: ReplicaId, reservation: Reservation) -> bool:
        """Take room for a new replica; False where the node is not known or has not enough."""
        name = reservation.node
        if name not in self._ledgers or not self._ledgers[name].has_room(reservation):
            return False
        self._leave(name)
        self._ledgers[name].reserve(replica, reservation)
        self._enter(name)
        return True

    def _view(self, name: str) -> NodeView:
        (view,) = self._ledgers[name].views()
        return view

    def _state(self, name: str) -> Hashable:
        view = self._view(name)
        node = view.node
        kind = (node.hardware, node.cores, node.memory_bytes, node.devices, node.usd_per_h)
        return *kind, view.free_cores, view.free_memory_bytes, tuple(view.free_share.values())

    def _enter(self, name: str) -> None:
        heappush(self._states.setdefault(self._state(name), []), self._places[name])

    def _leave(self, name: str) -> None:
        state, place = self._state(name), self._places[name]
        places = self._states[state]
        if places[0] == place:
            heappop(places)
        else:
            places.remove(place)
            heapify(places)
        if not places:
            del self._states[state]
