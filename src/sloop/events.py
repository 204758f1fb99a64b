"""What happened: the closed union of things a driver tells the core, each with the instant it is handed over at.

A driver may repeat, delay or reorder events about batches and replicas; the core ignores what it no longer waits for.
"""

from collections.abc import Iterable
from itertools import repeat
from typing import TypeVar

from msgspec import Struct

from sloop.vocabulary import BatchId, ReplicaId, Request, RequestId

V = TypeVar("V")


class Finished(Struct, frozen=True, gc=False, tag="finished", omit_defaults=True):
    """A batch is done. `service_ns` is what the replica measured for the forward pass, without transport."""

    batch: BatchId
    replica: ReplicaId
    service_ns: int
    edge_counts: tuple[tuple[int, ...], ...] = ()
    """Per request, how many items were sent along each outgoing edge of the stage: 0 or 1, any number where the edge
    fans out. An empty tuple for a request means one along each edge; no tuples mean that for all of them."""
    faults: tuple[int, ...] = ()
    """Positions in the batch of requests that fail although the batch does not, because their own tensors fit no input
    of the model or decide about no edge. Their `edge_counts` mean nothing."""

    def continuing(self, visits: Iterable[V]) -> Iterable[tuple[V, tuple[int, ...]]]:
        """The batch's visits without the faults, each with its edge counts. `visits` are all of the batch, in order."""
        counts: Iterable[tuple[int, ...]] = self.edge_counts or repeat(())
        pairs = zip(visits, counts, strict=bool(self.edge_counts))
        if not self.faults:
            return pairs
        return [pair for index, pair in enumerate(pairs) if index not in self.faults]


class BatchFailed(Struct, frozen=True, gc=False, tag="batch_failed"):
    """The model raised on this batch; the replica lives on."""

    batch: BatchId
    replica: ReplicaId
    error: str


class ReplicaProgressed(Struct, frozen=True, gc=False, tag="replica_progressed"):
    """A starting replica entered a step of its cold start: `spawning`, `fetching`, `loading` or `warming`."""

    replica: ReplicaId
    step: str


class ReplicaReady(Struct, frozen=True, gc=False, tag="replica_ready"):
    """A replica can take its first batch."""

    replica: ReplicaId


class ReplicaLost(Struct, frozen=True, gc=False, tag="replica_lost"):
    """A replica is gone without having been asked to stop, and its batch with it."""

    replica: ReplicaId
    error: str


class ReplicaStopped(Struct, frozen=True, gc=False, tag="replica_stopped"):
    """A replica that was asked to stop has freed its resources."""

    replica: ReplicaId


class Resized(Struct, frozen=True, gc=False, tag="resized"):
    """A replica now runs on `cores`: what was asked for, or what the machine granted."""

    replica: ReplicaId
    cores: float


class Cancelled(Struct, frozen=True, gc=False, tag="cancelled"):
    """The client went away."""

    request: RequestId


class Draining(Struct, frozen=True, gc=False, tag="draining"):
    """The server is asked to stop: it finishes open requests and rejects new ones."""


class Woke(Struct, frozen=True, gc=False, tag="woke"):
    """The instant `core.wake_ns` has come. A spurious one does no harm."""


Event = (
    Request
    | Finished
    | BatchFailed
    | ReplicaProgressed
    | ReplicaReady
    | ReplicaLost
    | ReplicaStopped
    | Resized
    | Cancelled
    | Draining
    | Woke
)

WOKE = Woke()
