"""Where the weights of models are, and how they come to a node: the part of a cold start before anything is loaded.

A node fetches the weights of a variant from the store, once, however many replicas wait for them, and keeps them until
it fails or is released. When the last replica that waits for them has stopped, the transfer is cancelled, and what had
come is lost. How long a transfer takes follows from the flows beside it (`sloop.sim.truth.flows`).

Limits: a node has room for all weights, and gets them from no other node. A transfer between nodes is a flow over
`Topology.route` or `Topology.chain`; when the core orders one, it belongs here, with the rule for what remains of it if
a node of it fails. Must not know the cluster, or why a replica starts.
"""

from collections.abc import Mapping

from msgspec import Struct

from sloop.runlog.durations import VariantKey
from sloop.sim.truth.flows import STORE, Flow, FlowNetwork, Topology
from sloop.vocabulary import ReplicaId, ReplicaSpec


class ModelWeights(Struct, frozen=True):
    """The files of a model. Variants with the same model have equal ones, and share them on a node."""

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
    """The weights on all nodes, and those under way. `weights` are those of each variant on each kind of hardware."""

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
        """The node of a replica has its weights, without a transfer."""
        self._present.setdefault(spec.node or "", set()).add(self._of(spec))

    def fetch(self, now_ns: int, replica: ReplicaId, spec: ReplicaSpec) -> bool:
        """Whether the weights of a replica are on its node. If not, they are fetched, and it waits until `arrived`
        names it."""
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
        """The replicas whose weights came to their nodes up to now, in the order in which the transfers began."""
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
        """A node without replicas loses what it has."""
        self._present.pop(node, None)

    def _of(self, spec: ReplicaSpec) -> ModelWeights:
        return self._weights[spec.stage, spec.variant, spec.slot.hardware]

    def _forget(self, transfer: WeightTransfer) -> None:
        del self._coming[transfer.node, transfer.weights], self._by_flow[transfer.flow]
        for replica in transfer.waiting:
            del self._by_replica[replica]
