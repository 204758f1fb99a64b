"""Which nodes have which weights, and the transfers to the others: the first part of a cold start, before loading.

A node fetches the weights of a variant from the store once, however many replicas wait for them, and keeps them until
it fails or is released. If all replicas that wait for a transfer stop, the transfer is cancelled, and the bytes that
had arrived are lost. The duration of a transfer depends on the other flows (`sloop.sim.truth.flows`).

Limits: a node has room for all weights, and fetches them from the store only, never from another node. (A transfer
between nodes would be a flow over `Topology.route` or `Topology.chain`. Once the core orders such transfers, they
belong here, with a rule for what remains of one if its node fails.) This module must not know the cluster, or why a
replica starts.
"""

from collections.abc import Mapping

from msgspec import Struct

from sloop.runlog.durations import VariantKey
from sloop.sim.truth.flows import STORE, Flow, FlowNetwork, Topology
from sloop.vocabulary import ReplicaId, ReplicaSpec


class ModelWeights(Struct, frozen=True):
    """The files of a model. Variants of the same model have equal `ModelWeights`, and share the files on a node."""

    name: str
    size_bytes: int


class WeightTransfer(Struct):
    """Weights on their way to a node."""

    flow: Flow
    node: str
    weights: ModelWeights
    waiting: dict[ReplicaId, None]
    """Replicas that wait for them, in the order of their starts."""


class WeightPlaces:
    """The weights on all nodes, and the transfers. `weights` has those of each variant on each kind of hardware."""

    def __init__(self, topology: Topology, weights: Mapping[VariantKey, ModelWeights]) -> None:
        self._topology = topology
        self._weights = weights
        self._network = FlowNetwork()
        self._present: dict[str, set[ModelWeights]] = {}
        """By node."""
        self._coming: dict[tuple[str, ModelWeights], WeightTransfer] = {}
        self._by_flow: dict[Flow, WeightTransfer] = {}
        self._by_replica: dict[ReplicaId, WeightTransfer] = {}

    @property
    def due_ns(self) -> int:
        """When the next transfer ends; `FOREVER_NS` if there is none."""
        return self._network.due_ns

    def place(self, spec: ReplicaSpec) -> None:
        """Put the weights of a replica on its node, without a transfer."""
        self._present.setdefault(spec.node or "", set()).add(self._of(spec))

    def fetch(self, now_ns: int, replica: ReplicaId, spec: ReplicaSpec) -> bool:
        """Whether the weights of a replica are on its node. If not, they are fetched, and the replica waits until
        `arrived` returns it."""
        node, weights = spec.node or "", self._of(spec)
        if weights in self._present.get(node, ()):
            return True
        transfer = self._coming.get((node, weights))
        if transfer is None:
            flow = self._network.start(now_ns, self._topology.route(STORE, node), weights.size_bytes)
            transfer = WeightTransfer(flow, node, weights, {})
            self._coming[node, weights] = self._by_flow[flow] = transfer
        transfer.waiting[replica] = None
        self._by_replica[replica] = transfer
        return False

    def arrived(self, now_ns: int) -> list[ReplicaId]:
        """The replicas whose weights have arrived since the last call, in the order in which the transfers began."""
        found: list[ReplicaId] = []
        for flow in self._network.ended(now_ns):
            transfer = self._by_flow[flow]
            self._present.setdefault(transfer.node, set()).add(transfer.weights)
            found += transfer.waiting
            self._forget(transfer)
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

    def lose(self, node: str) -> None:
        """Forget the weights on a node, which has no replicas any more."""
        self._present.pop(node, None)

    def _of(self, spec: ReplicaSpec) -> ModelWeights:
        return self._weights[spec.stage, spec.variant, spec.slot.hardware]

    def _forget(self, transfer: WeightTransfer) -> None:
        del self._coming[transfer.node, transfer.weights], self._by_flow[transfer.flow]
        for replica in transfer.waiting:
            del self._by_replica[replica]
