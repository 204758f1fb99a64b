"""What the fold keeps of weights: their transfers, and what was evicted."""

from collections import Counter, defaultdict

from msgspec import Struct

from sloop.actions import CancelTransfer, Evict, Transfer
from sloop.events import TransferFailed, Transferred
from sloop.runlog.samples import Samples, new_samples
from sloop.vocabulary import TransferId


class TransferRecord(Struct):
    """A transfer of weights under way, and the receivers that have yet to get them."""

    order: Transfer
    since_ns: int
    receivers: dict[str, None]


class WeightAccount:
    """The transfers of weights between the store and the nodes, and what was evicted."""

    def __init__(self) -> None:
        self.open: dict[TransferId, TransferRecord] = {}
        self.received: Counter[str] = Counter()
        """How many receivers got weights `from the store`, and how many `from a node`."""
        self.received_bytes: Counter[str] = Counter()
        """The same in bytes."""
        self.transfer_ns: defaultdict[str, Samples[int]] = defaultdict(new_samples)
        """By the same, the times in ns from the order until a receiver had them."""
        self.failed = 0
        """Receivers that did not get them, although they were not lost."""
        self.cancelled = 0
        """Receivers that did not get them because nobody waited for them any more."""
        self.evicted = 0
        """How many times a node deleted the files of a model."""

    def order(self, now_ns: int, order: Transfer) -> None:
        """A transfer begins."""
        self.open[order.transfer] = TransferRecord(order, now_ns, dict.fromkeys(order.receivers))

    def arrive(self, now_ns: int, event: Transferred) -> None:
        """A receiver has the weights."""
        record = self._end(event.transfer, event.node)
        if record is not None:
            source = "from a node" if record.order.source else "from the store"
            self.received[source] += 1
            self.received_bytes[source] += record.order.weights.size_bytes
            self.transfer_ns[source].append(now_ns - record.since_ns)

    def fail(self, now_ns: int, event: TransferFailed) -> None:
        """A receiver will not get them."""
        self.failed += self._end(event.transfer, event.node) is not None

    def cancel(self, now_ns: int, order: CancelTransfer) -> None:
        """A receiver is not to get them any more."""
        self.cancelled += self._end(order.transfer, order.node) is not None

    def evict(self, now_ns: int, order: Evict) -> None:
        """A node deletes files."""
        self.evicted += 1

    def lose(self, node: str) -> None:
        """A node is gone, and receives nothing any more."""
        for transfer in list(self.open):
            self._end(transfer, node)

    def _end(self, transfer: TransferId, node: str) -> TransferRecord | None:
        record = self.open.get(transfer)
        if record is None or node not in record.receivers:
            return None
        del record.receivers[node]
        if not record.receivers:
            del self.open[transfer]
        return record
