"""Which nodes have the weights of which models, which transfers are under way, and what is evicted if memory is short.

The core knows this only of weights for which a provision policy orders transfers. It follows from orders and reports:
no node is asked. Files are in the memory of a node.

The ledger *holds* the memory of what is needed: files that are on their way, that a transfer reads, or that a replica
has yet to load. So the memory of a start is reserved when it is ordered, and it cannot fail midway. Everything else
stays where it is as long as nobody wants the memory. To the ledger and to policies it is free, and `make_room` evicts
it when it is needed: those files first that were used longest ago.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from sloop.actions import CancelTransfer, Evict, Transfer
from sloop.core.ledger import Ledger
from sloop.core.views import WeightsView
from sloop.units import s
from sloop.vocabulary import STORE, ModelWeights, ReplicaId, TransferId

DOUBT_NS: Final = s(60)
"""How long a node is not shown as a source after a transfer from it has failed: it, or its network, may be faulty."""


@dataclass(slots=True, eq=False)
class NodeWeights:
    """The weights of one model on one node."""

    node: str
    weights: ModelWeights
    keeps: bool = False
    """Whether the files stay when no replica uses them."""
    has_files: bool = False
    arriving: dict[TransferId, None] = field(default_factory=dict)
    """The transfers that bring them."""
    completing: dict[TransferId, None] = field(default_factory=dict)
    """The transfers that bring the layers that `assembling` replicas lack, if the files stay: after one of them, all
    files are there."""
    readers: dict[TransferId, None] = field(default_factory=dict)
    """The transfers for which the node is the source."""
    users: dict[ReplicaId, bool] = field(default_factory=dict)
    """The replicas that were started from them, and whether each has yet to load them."""
    assembling: dict[ReplicaId, None] = field(default_factory=dict)
    """The replicas that start as parts of the model: transfers of layers bring each a copy of its own."""
    used_ns: int = 0
    """When they were last used."""
    doubted_until_ns: int = 0
    """Until when the node is not to be a source."""

    @property
    def needs_files(self) -> bool:
        """Whether the files that are there must stay."""
        return self.has_files and (bool(self.readers) or any(self.users.values()))

    @property
    def held_bytes(self) -> int:
        """The memory that must not be taken away."""
        return self.weights.size_bytes * (len(self.arriving) + len(self.assembling) + self.needs_files)

    @property
    def spare_bytes(self) -> int:
        """The memory that may be taken away."""
        return self.weights.size_bytes * (self.has_files and not self.needs_files)

    @property
    def first_transfer(self) -> TransferId | None:
        """The oldest transfer after which the files are there, for which a start may wait."""
        return next(iter((*self.arriving, *self.completing)), None)

    @property
    def is_gone(self) -> bool:
        """Whether nothing is there, and nothing comes."""
        return not (self.has_files or self.arriving or self.users or self.readers)

    def view(self, now_ns: int, rack: str, arriving_since_ns: int) -> WeightsView:
        """As policies see them."""
        return WeightsView(
            node=self.node,
            rack=rack,
            has_files=self.has_files,
            arriving=self.first_transfer,
            replicas=len(self.users),
            is_source=self.has_files and self.doubted_until_ns <= now_ns,
            arriving_since_ns=arriving_since_ns,
        )


class OpenTransfer(Struct):
    """A transfer under way, and the receivers that have yet to get it, each with the replicas that wait for it."""

    order: Transfer
    whole: ModelWeights
    """The weights of which it brings all layers or some."""
    receivers: dict[str, dict[ReplicaId, None]]
    ordered_ns: int


class WeightRegistry:
    """The weights on all nodes of a ledger, and the transfers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.by_node: dict[str, dict[ModelWeights, NodeWeights]] = {}
        """What each node has, or is to have; only this class changes it."""
        self._of: dict[ModelWeights, dict[str, NodeWeights]] = {}
        """The same by model."""
        self._used: dict[ReplicaId, NodeWeights] = {}
        """By replica, where its weights are."""
        self.transfers: dict[TransferId, OpenTransfer] = {}
        self._next = 0

    # What policies see

    def views(self, now_ns: int, weights: ModelWeights) -> tuple[WeightsView, ...]:
        """The nodes that keep the weights, or where they arrive to be kept, in the order in which they came."""
        nodes = self._ledger.nodes
        return tuple(
            [
                each.view(now_ns, nodes[name].rack, self._arriving_since_ns(each))
                for name, each in self._of.get(weights, {}).items()
                if each.keeps and (each.has_files or each.first_transfer is not None)
            ]
        )

    def _arriving_since_ns(self, found: NodeWeights) -> int:
        first = found.first_transfer
        return self.transfers[first].ordered_ns if first is not None else 0

    def sends(self) -> dict[str, int]:
        """By node, how many transfers it sends now, also as a link of a chain; and how many the `STORE` sends."""
        chains = [(each.order.source, *each.order.receivers[:-1]) for each in self.transfers.values()]
        return dict(Counter(name for chain in chains for name in chain))

    # What audits see

    def held_bytes(self, node: str) -> int:
        """The memory that a node must hold."""
        return sum(each.held_bytes for each in self.by_node.get(node, {}).values())

    def spare_bytes(self, node: str) -> int:
        """The memory that a node uses as long as nobody wants it."""
        return sum(each.spare_bytes for each in self.by_node.get(node, {}).values())

    @property
    def users(self) -> AbstractSet[ReplicaId]:
        """The replicas whose weights it knows."""
        return self._used.keys()

    # Orders

    def extra_bytes(self, node: str, weights: ModelWeights, *, assembles: bool = False) -> int:
        """How much more memory the node must hold for one more replica. It starts from weights that are there or
        arrive; if there are none, from a new transfer; if it `assembles` a copy of its own, from transfers of
        layers."""
        found = self._of.get(weights, {}).get(node)
        if found is None or assembles:
            return weights.size_bytes
        is_held = found.needs_files if found.has_files else found.first_transfer is not None
        return 0 if is_held else weights.size_bytes

    def order(
        self, now_ns: int, weights: ModelWeights, source: str, receivers: Sequence[str], keeps: bool
    ) -> Transfer | None:
        """Order a transfer to those of the receivers that have memory for it; None if none has. The source must have
        the weights."""
        room = [name for name in receivers if weights.size_bytes <= self._ledger.free_memory_bytes(name)]
        if not room:
            return None
        made = self.order_layers(now_ns, weights, weights, source, room, keeps)
        for name in room:
            there = self._found(name, weights, keeps)
            there.arriving[made.transfer] = None
            self._settle(there)
        return made

    def order_layers(
        self,
        now_ns: int,
        part: ModelWeights,
        whole: ModelWeights,
        source: str,
        receivers: Sequence[str],
        keeps: bool,
        completes: tuple[ReplicaId, ...] = (),
    ) -> Transfer:
        """Order a transfer of layers to nodes that hold the memory for them, because replicas assemble the model there.
        The source must have the model."""
        made = Transfer(TransferId(self._next), part, source, tuple(receivers), keeps, completes)
        self._next += 1
        self.transfers[made.transfer] = OpenTransfer(made, whole, {name: {} for name in receivers}, now_ns)
        if source != STORE:
            sender = self._of[whole][source]
            assert sender.has_files, f"{source} has no {whole.name}"
            sender.readers[made.transfer], sender.used_ns = None, now_ns
            self._settle(sender)
        for name in receivers if completes and made.is_kept else ():
            self._of[whole][name].completing[made.transfer] = None
        return made

    def wait(self, replica: ReplicaId, transfer: TransferId) -> None:
        """A replica waits for a transfer that is under way to its node."""
        self.transfers[transfer].receivers[self._used[replica].node][replica] = None

    def has_files(self, replica: ReplicaId) -> bool:
        """Whether the files of a replica's model are on its node, or arrive there as a whole."""
        return replica not in self._used[replica].assembling

    def use(
        self,
        now_ns: int,
        replica: ReplicaId,
        node: str,
        weights: ModelWeights,
        keeps: bool,
        transfer: TransferId | None = None,
        *,
        assembles: bool = False,
    ) -> None:
        """A replica starts from the weights that are on its node, or that a transfer brings or completes there. If it
        `assembles` them, this transfer brings the layers of its part, and a later one the other layers."""
        found = self._found(node, weights, keeps)
        if assembles:
            found.assembling[replica] = None
        else:
            assert found.has_files or found.first_transfer is not None, f"{weights.name} is not on {node}"
        found.users[replica], found.used_ns = True, now_ns
        self._used[replica] = found
        opened = self.transfers.get(transfer) if transfer is not None else None
        if opened is not None and node in opened.receivers:
            opened.receivers[node][replica] = None
        self._settle(found)

    def give_up(self, transfer: TransferId) -> list[CancelTransfer]:
        """Cancel a transfer for those receivers of which no replica waits for it. Files that are kept come
        nevertheless, unless the node has them or another transfer brings them: the next start on their node, or near
        it, needs them once."""
        opened = self.transfers.get(transfer)
        if opened is None:
            return []
        unneeded = [name for name, waiting in opened.receivers.items() if not waiting]
        if opened.order.is_kept and opened.order.weights.layers is None:
            own = self._of[opened.whole]
            unneeded = [name for name in unneeded if own[name].has_files or len(own[name].arriving) > 1]
        for name in unneeded:
            self._end(transfer, name)
        return [CancelTransfer(transfer, name) for name in unneeded]

    def make_room(self, nodes: Iterable[str]) -> list[Evict]:
        """Evict from these nodes what they have no memory for any more."""
        evicted: list[Evict] = []
        for node in nodes:
            own = self.by_node.get(node, {})
            while self.spare_bytes(node) > max(0, self._ledger.free_memory_bytes(node)):
                spare = [each for each in own.values() if each.spare_bytes]
                victim = min(spare, key=lambda each: (each.used_ns, each.weights.name))
                victim.has_files = False
                evicted.append(Evict(node, victim.weights))
                self._settle(victim)
        return evicted

    # Reports

    def ready(self, now_ns: int, replica: ReplicaId) -> None:
        """A replica that uses weights has loaded them."""
        found = self._used[replica]
        found.users[replica], found.used_ns = False, now_ns
        if found.assembling.pop(replica, True) is None:
            found.has_files = found.keeps
        self._settle(found)

    def leave(self, now_ns: int, replica: ReplicaId, transfer: TransferId | None = None) -> list[CancelTransfer]:
        """A replica that uses weights is gone. If it was the last that waited for its transfer, this is cancelled."""
        found = self._used.pop(replica)
        del found.users[replica]
        found.assembling.pop(replica, None)
        found.used_ns = now_ns
        self._settle(found)
        opened = self.transfers.get(transfer) if transfer is not None else None
        if transfer is None or opened is None or opened.receivers.get(found.node, {}).pop(replica, True) is not None:
            return []
        waiting = opened.receivers[found.node]
        if waiting and transfer in found.completing and found.assembling.keys().isdisjoint(waiting):
            # The memory was held for the replicas that are gone; the files come for those that wait.
            del found.completing[transfer]
            found.arriving[transfer] = None
            self._settle(found)
        return self.give_up(transfer)

    def arrived(self, now_ns: int, transfer: TransferId, node: str) -> None:
        """A receiver has the files. Nothing happens if it was not expected to get them any more."""
        opened = self.transfers.get(transfer)
        if opened is None or node not in opened.receivers:
            return
        found = self._of[opened.whole].get(node)
        if found is not None and (transfer in found.arriving or transfer in found.completing):
            found.has_files, found.used_ns = True, now_ns
            for replica in opened.order.completes:
                found.assembling.pop(replica, None)
        self._end(transfer, node)

    def note_files(self, now_ns: int, weights: ModelWeights, node: str, keeps: bool) -> None:
        """A node has the files, without a transfer that this core has ordered."""
        found = self._found(node, weights, keeps)
        found.has_files, found.used_ns = True, now_ns
        self._settle(found)

    def failed(self, now_ns: int, transfer: TransferId, node: str) -> bool:
        """A receiver will not get the files; returns whether it was expected to get them."""
        opened = self._end(transfer, node)
        if opened is None:
            return False
        source = self._of.get(opened.whole, {}).get(opened.order.source)
        if source is not None:
            source.doubted_until_ns = now_ns + DOUBT_NS
        return True

    def lose(self, node: str) -> None:
        """A node is lost or released, with all that it had."""
        for id, opened in list(self.transfers.items()):
            if node in opened.receivers:
                self._end(id, node)
        for found in self.by_node.pop(node, {}).values():
            del self._of[found.weights][node]
            if not self._of[found.weights]:
                del self._of[found.weights]
        self._ledger.hold(node, None)

    # Within

    def _found(self, node: str, weights: ModelWeights, keeps: bool) -> NodeWeights:
        """The weights on a node, which stay from now on if it `keeps` them."""
        own = self._of.setdefault(weights, {})
        found = own.get(node)
        if found is None:
            found = own[node] = self.by_node.setdefault(node, {})[weights] = NodeWeights(node, weights)
        found.keeps = found.keeps or keeps
        return found

    def _end(self, transfer: TransferId, node: str) -> OpenTransfer | None:
        """A transfer is over for one of its receivers; None if it was not expected there any more."""
        opened = self.transfers.get(transfer)
        if opened is None or node not in opened.receivers:
            return None
        own = self._of.get(opened.whole, {})
        del opened.receivers[node]
        found, source = own.get(node), own.get(opened.order.source)
        if not opened.receivers:
            del self.transfers[transfer]
            if source is not None and source.readers.pop(transfer, True) is None:
                self._settle(source)
        if found is not None:
            found.arriving.pop(transfer, None)
            found.completing.pop(transfer, None)
            self._settle(found)
        return opened

    def _settle(self, found: NodeWeights) -> None:
        """Weights on a node have changed: forget what does not stay, and hold the memory of what must."""
        if self.by_node.get(found.node, {}).get(found.weights) is not found:
            return  # the node was lost
        if not found.keeps and not (found.readers or any(found.users.values())):
            found.has_files = False
        own = self.by_node[found.node]
        if found.is_gone:
            del own[found.weights], self._of[found.weights][found.node]
            if not self._of[found.weights]:
                del self._of[found.weights]
            if not own:
                del self.by_node[found.node]
        is_needed = any(each.users or each.arriving or each.readers for each in own.values())
        self._ledger.hold(found.node, self.held_bytes(found.node) if is_needed else None)
