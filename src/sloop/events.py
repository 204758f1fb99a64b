"""What happened: the closed union of things a driver tells the core, each with the instant it is handed over at.

A driver may repeat, delay or reorder events about batches and replicas; the core ignores what it no longer waits for.
"""

from msgspec import Struct

from sloop.vocabulary import BatchId, ReplicaId, Request, RequestId


class Finished(Struct, frozen=True, gc=False, tag="finished"):
    """A batch is done. `service_ns` is what the replica measured for the forward pass, without transport."""

    batch: BatchId
    replica: ReplicaId
    service_ns: int
    edge_counts: tuple[tuple[int, ...], ...] = ()
    """Where its requests go next: for each of the batch, and each edge that leads away from the stage, how many parts
    take that edge: 0 or 1, any number where the edge takes apart. Empty where all take every edge, once. Below 0 where
    the request's own tensors fit nothing, so that it fails and its batch does not."""


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
    """A replica that was told to stop has given its resources back."""

    replica: ReplicaId


class Resized(Struct, frozen=True, gc=False, tag="resized"):
    """A replica now runs on `cores`, be it what was asked or what the machine would give."""

    replica: ReplicaId
    cores: float


class Cancelled(Struct, frozen=True, gc=False, tag="cancelled"):
    """The client went away."""

    request: RequestId


class Draining(Struct, frozen=True, gc=False, tag="draining"):
    """The server is asked to stop: finish what is here, refuse what comes."""


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
