"""The weights of the simulated cluster on their way, and the replicas that wait for them. Must not import beliefs,
policies or the core."""

from collections.abc import Callable, Mapping

from sloop.actions import CancelTransfer, Evict, Transfer
from sloop.events import TransferFailed, Transferred
from sloop.sim.happenings import Pending, TransfersDue
from sloop.sim.nodes import SimulatedNodes
from sloop.sim.replicas import SimulatedReplica
from sloop.sim.truth.weights import WeightPlaces
from sloop.units import FOREVER_NS
from sloop.vocabulary import NodeState, ReplicaId, ReplicaSpec, TransferId

NO_WEIGHTS = "its weights do not come"
"""Why a replica is lost whose transfer has failed."""


class SimulatedTransfers:
    """All transfers. `go_on` is told that the weights of a replica are on its node, `lose` that they do not come."""

    def __init__(
        self,
        weights: WeightPlaces,
        nodes: SimulatedNodes,
        replicas: Mapping[ReplicaId, SimulatedReplica],
        pending: Pending,
        go_on: Callable[[int, ReplicaId], None],
        lose: Callable[[int, ReplicaId, str], None],
    ) -> None:
        self._weights, self._nodes, self._replicas, self._pending = weights, nodes, replicas, pending
        self._go_on, self._lose = go_on, lose
        self._awaiting: dict[tuple[TransferId, str], list[ReplicaId]] = {}
        """By ordered transfer and receiver, the replicas that wait for it."""
        self._failed: set[tuple[TransferId, str]] = set()
        """Ordered transfers that have failed, with their receivers."""
        self._due = FOREVER_NS, -1
        """The instant and the sequence number of the next `TransfersDue`; others have no effect."""

    def has_failed(self, transfer: TransferId, node: str) -> bool:
        """Whether an ordered transfer will not bring its weights to a node."""
        return (transfer, node) in self._failed

    def wait(self, now_ns: int, replica: ReplicaId, transfer: TransferId | None, node: str) -> None:
        """A replica waits for an ordered transfer, or for one of its own (None)."""
        if transfer is not None:
            self._awaiting.setdefault((transfer, node), []).append(replica)
        self._look_at(now_ns)

    def begin(self, now_ns: int, order: Transfer, *, is_warm: bool) -> None:
        """Begin an ordered transfer. In a warm world, what is ordered at first is there at once."""
        weights = self._weights
        completed = [(id, self._replicas[id]) for id in order.completes if id in self._replicas]
        if is_warm:
            for node in order.receivers:
                if order.is_kept and order.weights.layers is None:
                    weights.place(node, order.weights)
                self._pending.add(now_ns, Transferred(order.transfer, node))
            for id, replica in completed:
                if order.is_kept:
                    weights.place(replica.spec.node or "", weights.of(replica.spec))
                self._go_on(now_ns, id)
            return
        for id, replica in completed:
            self._awaiting.setdefault((order.transfer, replica.spec.node or ""), []).append(id)
        gone = [name for name in order.receivers if self._nodes[name].state is not NodeState.READY]
        weights.send(now_ns, order)
        for name in gone:  # the core hears of their loss
            self.lose_node(now_ns, name)
        if order.source and self._nodes[order.source].state is not NodeState.READY:
            self.lose_node(now_ns, order.source)
        self._look_at(now_ns)

    def cancel(self, now_ns: int, order: CancelTransfer) -> None:
        """A receiver does not get the weights of an ordered transfer any more."""
        self._awaiting.pop((order.transfer, order.node), None)
        if self._weights.cancel(now_ns, order.transfer, order.node):
            self._look_at(now_ns)

    def arrive(self, now_ns: int, sequence: int) -> None:
        """Transfers may have begun or ended: let the replicas go on whose weights have come."""
        if sequence != self._due[1]:
            return
        for arrival in self._weights.arrived(now_ns):
            waiting, order = list(arrival.replicas), arrival.transfer
            if order is not None:
                for node in arrival.receivers:
                    self._pending.add(now_ns, Transferred(order.transfer, node))
                    there = self._awaiting.pop((order.transfer, node), [])
                    if order.completes and order.is_kept:
                        for spec in self._specs(there):
                            self._weights.place(node, self._weights.of(spec))
                    waiting += there
            for id in waiting:
                if id in self._replicas:
                    self._go_on(now_ns, id)
        self._due = FOREVER_NS, -1
        self._look_at(self._weights.due_ns)

    def leave(self, now_ns: int, replica: ReplicaId) -> None:
        """A replica is gone, and does not wait for its weights any more."""
        if self._weights.leave(now_ns, replica):
            self._look_at(now_ns)

    def lose_node(self, now_ns: int, node: str) -> None:
        """A node that fails or is released keeps no weights, and sends none."""
        for order, name in self._weights.lose(now_ns, node):
            self._pending.add(now_ns, TransferFailed(order.transfer, name, f"node {node}, which sent it, is gone"))
            self._failed.add((order.transfer, name))
            for id in self._awaiting.pop((order.transfer, name), ()):
                if id in self._replicas and self._replicas[id].start is not None:  # else a part that serves
                    self._lose(now_ns, id, NO_WEIGHTS)
        self._look_at(now_ns)

    def evict(self, order: Evict) -> None:
        """A node deletes weights."""
        self._weights.evict(order.node, order.weights)

    def _specs(self, ids: list[ReplicaId]) -> list[ReplicaSpec]:
        return [self._replicas[id].spec for id in ids if id in self._replicas]

    def _look_at(self, at_ns: int) -> None:
        """Look at the transfers at this instant, so that all that begin or end until then get their rates together."""
        if at_ns < self._due[0]:
            self._due = at_ns, self._pending.add(at_ns, TransfersDue())
