"""Which nodes have which weights, and the transfers to the others: the first part of a cold start, before loading.

There are two ways for weights to come to a node. If a start simply needs them, the node *fetches* them from the store,
once, however many replicas wait for them; if all of these stop, the transfer is cancelled, and the bytes that had
arrived are lost. Or the core orders a *transfer* (`Transfer`), from the store or from another node, to one receiver or
along a chain. The receivers of a chain get the same bytes at the same time. If one of them is lost, those behind it
receive what is missing from those before it; if the source is lost, nobody has the rest, and all of them fail. The core
may cancel it for a receiver (`CancelTransfer`), whose bytes are lost.

Weights stay on a node until it fails or is released, or until the core evicts them. The duration of a transfer depends
on the other flows (`sloop.sim.truth.flows`). Without a topology, transfers take no time.

Limits: a receiver of a chain sends on at once what it receives, without a delay for each hop; memory has no limit here,
because the core counts it. This module must not know the cluster, or why a replica starts.
"""

from collections.abc import Mapping

from msgspec import Struct

from sloop.actions import Transfer
from sloop.runlog.durations import VariantKey
from sloop.sim.truth.flows import Flow, FlowLink, FlowNetwork, Topology
from sloop.vocabulary import STORE, ModelWeights, ReplicaId, ReplicaSpec, TransferId


class WeightTransfer(Struct):
    """Weights on their way to a node that fetches them."""

    flow: Flow
    node: str
    weights: ModelWeights
    waiting: dict[ReplicaId, None]
    """Replicas that wait for them, in the order of their starts."""


class ChainTransfer(Struct):
    """A transfer that the core has ordered, and the receivers that are left."""

    flow: Flow
    order: Transfer
    receivers: list[str]


class Arrival(Struct, frozen=True):
    """The end of a transfer: replicas that had waited for what their node has fetched, or the receivers of a transfer
    that was ordered."""

    replicas: tuple[ReplicaId, ...] = ()
    transfer: Transfer | None = None
    receivers: tuple[str, ...] = ()


class WeightPlaces:
    """The weights on all nodes, and the transfers. `weights` has those of each variant on each kind of hardware."""

    def __init__(self, topology: Topology | None, weights: Mapping[VariantKey, ModelWeights]) -> None:
        self._topology = topology
        self._weights = weights
        self._network = FlowNetwork()
        self._present: dict[str, set[ModelWeights]] = {}
        """By node."""
        self._coming: dict[tuple[str, ModelWeights], WeightTransfer] = {}
        self._by_flow: dict[Flow, WeightTransfer | ChainTransfer] = {}
        self._by_replica: dict[ReplicaId, WeightTransfer] = {}
        self._ordered: dict[TransferId, ChainTransfer] = {}

    @property
    def has_network(self) -> bool:
        """Whether transfers take time."""
        return self._topology is not None

    @property
    def node_mbps(self) -> float:
        """The rate of a link between two nodes that nobody else uses; 0 if it has no limit."""
        return self._topology.node_mbps if self._topology is not None else 0.0

    @property
    def due_ns(self) -> int:
        """When the next transfer ends; `FOREVER_NS` if there is none."""
        return self._network.due_ns

    def of(self, spec: ReplicaSpec) -> ModelWeights:
        """The weights of a replica."""
        return self._weights[spec.stage, spec.variant, spec.slot.hardware]

    def has(self, node: str, spec: ReplicaSpec) -> bool:
        """Whether the weights of a replica are on a node."""
        return self.of(spec) in self._present.get(node, ())

    def place(self, node: str, weights: ModelWeights) -> None:
        """Put weights on a node, without a transfer."""
        self._present.setdefault(node, set()).add(weights)

    def fetch(self, now_ns: int, replica: ReplicaId, spec: ReplicaSpec) -> bool:
        """Whether the weights of a replica are on its node. If not, they are fetched, and the replica waits until
        `arrived` returns it."""
        node, weights = spec.node or "", self.of(spec)
        if self._topology is None or weights in self._present.get(node, ()):
            return True
        transfer = self._coming.get((node, weights))
        if transfer is None:
            flow = self._network.start(now_ns, self._topology.route(STORE, node), weights.size_bytes)
            transfer = WeightTransfer(flow, node, weights, {})
            self._coming[node, weights] = self._by_flow[flow] = transfer
        transfer.waiting[replica] = None
        self._by_replica[replica] = transfer
        return False

    def send(self, now_ns: int, order: Transfer) -> None:
        """Begin a transfer that was ordered; `arrived` returns it when it is over."""
        receivers = list(order.receivers)
        flow = self._network.start(now_ns, self._chain(order.source, receivers), order.weights.size_bytes)
        self._ordered[order.transfer] = self._by_flow[flow] = ChainTransfer(flow, order, receivers)

    def is_coming(self, transfer: TransferId, node: str) -> bool:
        """Whether a node is still to receive an ordered transfer."""
        found = self._ordered.get(transfer)
        return found is not None and node in found.receivers

    def arrived(self, now_ns: int) -> list[Arrival]:
        """The transfers that have ended since the last call, in the order in which they began."""
        found: list[Arrival] = []
        for flow in self._network.ended(now_ns):
            transfer = self._by_flow[flow]
            if isinstance(transfer, WeightTransfer):
                self.place(transfer.node, transfer.weights)
                found.append(Arrival(tuple(transfer.waiting)))
                self._forget(transfer)
                continue
            del self._by_flow[flow], self._ordered[transfer.order.transfer]
            if transfer.order.is_kept and transfer.order.weights.layers is None:
                for node in transfer.receivers:
                    self.place(node, transfer.order.weights)
            found.append(Arrival((), transfer.order, tuple(transfer.receivers)))
        return found

    def leave(self, now_ns: int, replica: ReplicaId) -> bool:
        """A replica stops, or is lost. Returns whether that ended a transfer."""
        transfer = self._by_replica.pop(replica, None)
        if transfer is None:
            return False
        del transfer.waiting[replica]
        if transfer.waiting:
            return False
        self._network.cancel(now_ns, transfer.flow)
        self._forget(transfer)
        return True

    def cancel(self, now_ns: int, transfer: TransferId, node: str) -> bool:
        """A receiver is not to get the weights any more: the chain goes on without it. Returns whether it was still to
        get them."""
        found = self._ordered.get(transfer)
        if found is None or node not in found.receivers:
            return False
        self._go_on_without(now_ns, found, node)
        return True

    def evict(self, node: str, weights: ModelWeights) -> None:
        """Delete the files of a model on a node."""
        self._present.get(node, set()).discard(weights)

    def lose(self, now_ns: int, node: str) -> list[tuple[Transfer, str]]:
        """Forget the weights on a node, which has no replicas any more, and go on without it where it was in a chain.
        Returns the ordered transfers that cannot go on, each with a receiver."""
        self._present.pop(node, None)
        failed: list[tuple[Transfer, str]] = []
        for transfer in list(self._ordered.values()):
            order, receivers = transfer.order, transfer.receivers
            if node != order.source and node not in receivers:
                continue
            self._go_on_without(now_ns, transfer, node)
            if node == order.source:
                failed += [(order, name) for name in receivers]
        return failed

    def _go_on_without(self, now_ns: int, transfer: ChainTransfer, node: str) -> None:
        """A chain goes on without this node; it ends if that is its source or its last receiver."""
        order, receivers = transfer.order, transfer.receivers
        left = self._network.left(now_ns, transfer.flow)
        self._network.cancel(now_ns, transfer.flow)
        del self._by_flow[transfer.flow]
        if node in receivers:
            receivers.remove(node)
        if node == order.source or not receivers:
            del self._ordered[order.transfer]
            return
        transfer.flow = self._network.start(now_ns, self._chain(order.source, receivers), left)
        self._by_flow[transfer.flow] = transfer

    def _chain(self, source: str, receivers: list[str]) -> list[FlowLink]:
        return [] if self._topology is None else self._topology.chain(source, receivers)

    def _forget(self, transfer: WeightTransfer) -> None:
        del self._coming[transfer.node, transfer.weights], self._by_flow[transfer.flow]
        for replica in transfer.waiting:
            del self._by_replica[replica]
