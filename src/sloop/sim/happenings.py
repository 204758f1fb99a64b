"""What can happen in a simulated cluster: what the core is told, and what only the simulator knows."""

from heapq import heappush
from itertools import count

from msgspec import Struct

from sloop.events import BatchFailed, BatchSilent, Event, WorkerCompleted, WorkerProgressed, WorkerReady, WorkerResized
from sloop.vocabulary import WorkerId


class NodeFailed(Struct, frozen=True):
    """A node fails with all its replicas. Internal to the simulator: the core sees a lost node and lost replicas."""

    node: str


class Outage(Struct, frozen=True):
    """The node with the most replicas goes down for a while. Also internal to the simulator."""


class Crashed(Struct, frozen=True):
    """A worker crashes. Also internal to the simulator."""

    worker: WorkerId


class TransfersDue(Struct, frozen=True):
    """Transfers of weights have begun or ended. Also internal to the simulator."""


class DeviceDue(Struct, frozen=True):
    """A batch ends on a shared device, unless another one has begun or ended there since. Also internal."""

    device: tuple[str, str]


InternalEvent = NodeFailed | Outage | Crashed | TransfersDue | DeviceDue
"""Entries that the core is not told."""
Happening = Event | InternalEvent
BatchHappening = BatchSilent | BatchFailed
WorkerHappening = WorkerProgressed | WorkerReady | WorkerCompleted | WorkerResized
"""Events that count only as long as their replica, or their worker, is there."""
PendingHappening = tuple[int, int, Happening]
"""The instant, the sequence number among entries of one instant, and the event."""


class Pending:
    """What will happen in a cluster, the earliest first; what is due at one instant, in the order in which it was
    added."""

    __slots__ = ("heap", "sequences", "void")

    def __init__(self) -> None:
        self.heap: list[PendingHappening] = []
        self.sequences = count()
        self.void: set[int] = set()
        """Sequence numbers of cancelled entries."""

    def add(self, at_ns: int, event: Happening) -> int:
        """Add an entry; returns its sequence number."""
        sequence = next(self.sequences)
        heappush(self.heap, (at_ns, sequence, event))
        return sequence
