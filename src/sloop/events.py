"""Events: everything that a driver reports to the core (`Event` is the closed union).

A driver may repeat, delay or reorder events about batches and replicas; the core ignores events that it no longer
expects.
"""

from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeVar

from msgspec import Struct

from sloop.vocabulary import (
    BatchId,
    Canary,
    ModelWeights,
    Node,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    SimulatedSystem,
    TransferId,
    WorkerId,
)

V = TypeVar("V")


class Finished(Struct, frozen=True, gc=False, tag="finished", omit_defaults=True):
    """A batch is done. `service_ns` is what the replica measured for the forward pass, without transport."""

    batch: BatchId
    replica: ReplicaId
    service_ns: int
    edge_counts: tuple[tuple[int, ...], ...] = ()
    """Per request, how many parts it sends along each outgoing edge of the stage: 0 or 1, or any number where the edge
    fans out. An empty tuple for a request means one part along each edge; no tuples at all mean the same for every
    request."""
    faults: tuple[int, ...] = ()
    """Positions in the batch of requests that fail although the batch succeeds: their tensors do not fit the model, or
    their outputs do not decide the next edge. Their `edge_counts` are ignored."""
    sizes: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Per request and outgoing edge of the stage, the rows and the size (`Visit`) of what it passes on; 0 rows: as many
    as it had itself. Where parts join, their rows add up; with 0 rows their sizes do, and they are one row. An empty
    tuple for a request, or no tuples at all: as many rows, all of one size."""
    passes: int = 1
    """How many forward passes the batch took."""
    elements: int = 0
    """If the stage pads rows: the sum of the sizes of the batch's rows (`Request.size`), without padding. Otherwise
    0."""
    padded: int = 0
    """How many elements padding has added."""

    def padded_to(self, rows: int) -> int:
        """The size to which the `rows` of the batch were padded, a mean if it took several passes; 0 if the stage pads
        no rows."""
        return (self.elements + self.padded) // rows if self.elements else 0

    def continuing(self, visits: Iterable[V]) -> Iterable[tuple[V, tuple[int, ...]]]:
        """The visits that did not fail, each with its edge counts. `visits` are all visits of the batch, in order."""
        counts: Iterable[tuple[int, ...]] = self.edge_counts or repeat(())
        pairs = zip(visits, counts, strict=bool(self.edge_counts))
        if not self.faults:
            return pairs
        return [pair for index, pair in enumerate(pairs) if index not in self.faults]


class BatchFailed(Struct, frozen=True, gc=False, tag="batch_failed", omit_defaults=True):
    """The model raised an exception on this batch; the replica stays up. The core tries several requests again in two
    halves, and fails a single one."""

    batch: BatchId
    replica: ReplicaId
    error: str
    """What clients are told."""
    detail: str = ""
    """The exception with its text and line, for the log."""
    is_refusal: bool = False
    """Whether the model refused what a client sent. A request that ran alone is then rejected, not failed."""


class WorkerProgressed(Struct, frozen=True, gc=False, tag="worker_progressed"):
    """A starting worker entered a step of its cold start: `fetching`, `spawning`, `loading`, `sending` (to the
    accelerator) or `warming`."""

    worker: WorkerId
    step: str


class WorkerReady(Struct, frozen=True, gc=False, tag="worker_ready"):
    """A worker has loaded what it is to hold at first. A replica can take its first batch when its first worker has, a
    part of a pipeline when all others are ready as well; a shadow serves from the next batch of its replica on."""

    worker: WorkerId


class WorkerCompleted(Struct, frozen=True, gc=False, tag="worker_completed"):
    """A worker that has started as a part of a pipeline has all layers of its model. When all parts have, batches that
    begin from then on run on one of them alone, once those that run in the pipeline have left it."""

    worker: WorkerId


class BatchLost(Struct, frozen=True, gc=False, tag="batch_lost"):
    """A batch is lost though its replica is not: another part of its pipeline is."""

    batch: BatchId
    replica: ReplicaId
    error: str


class BatchSilent(Struct, frozen=True, gc=False, tag="batch_silent"):
    """The worker that runs a batch has said nothing for `silent_ns` in which it could have: time in which it only
    waited for a CPU, a disk or memory does not count, nor does time in which the driver itself did not run. In a
    pipeline, that worker is the part that the batch has reached, whichever replica it was started for."""

    batch: BatchId
    replica: ReplicaId
    silent_ns: int


class WorkerLost(Struct, frozen=True, gc=False, tag="worker_lost"):
    """A worker died without an order to stop, or could not start. With the first worker of a replica, its batch and its
    other workers are lost too, which is not reported; the replica lives on without a shadow, and finishes its batch."""

    worker: WorkerId
    error: str


class WorkerStopped(Struct, frozen=True, gc=False, tag="worker_stopped"):
    """A worker that was ordered to stop has freed its resources, and with the first worker of a replica the others."""

    worker: WorkerId


class WorkerResized(Struct, frozen=True, gc=False, tag="worker_resized"):
    """A worker now runs on `cores`: as many as ordered, or as many as the machine granted."""

    worker: WorkerId
    cores: float


class Transferred(Struct, frozen=True, gc=False, tag="transferred"):
    """A receiver of a transfer has all the files."""

    transfer: TransferId
    node: str


class TransferFailed(Struct, frozen=True, gc=False, tag="transfer_failed"):
    """A receiver of a transfer will not get the files, and has deleted what had come. The replicas that wait for them
    are lost, which the driver reports as well (`WorkerLost`)."""

    transfer: TransferId
    node: str
    error: str


class KeptWorker(Struct, frozen=True, gc=False):
    """A worker that an earlier core has started on a node, and that still runs there."""

    worker: WorkerId
    """Its number, which it keeps; this core gives it to no other one (`Core`)."""
    spec: ReplicaSpec
    """With the cores in effect, and without a shadow: nobody keeps those."""
    is_ready: bool
    """Whether it can take a batch; otherwise it still starts, or finishes a batch that nobody waits for."""


class NodeReady(Struct, frozen=True, tag="node_ready", omit_defaults=True):
    """A node can hold replicas: it was acquired, repaired, or has joined the cluster; or it has other capacities."""

    node: Node
    kept: tuple[KeptWorker, ...] = ()
    """What runs on it already. The core answers with `AdoptWorker` for each."""
    weights: tuple[ModelWeights, ...] = ()
    """The models whose files it has already."""


class NodeLost(Struct, frozen=True, gc=False, tag="node_lost"):
    """A node has failed, or could not be acquired. Its replicas are reported lost separately."""

    node: str
    error: str


class NodeReleased(Struct, frozen=True, gc=False, tag="node_released"):
    """A node that was ordered to be released is gone and costs nothing from now on."""

    node: str


class Planned(Struct, frozen=True, tag="planned", omit_defaults=True):
    """The answer to `RequestPlan`: a plan for each application version that was planned, by its key."""

    number: int
    plans: dict[str, Plan]
    errors: dict[str, str] = {}  # msgspec copies the empty dict for each instance
    """By key, why a policy could not plan; the current plan stays in force."""
    restarted: bool = False
    """Whether the planner's policies begin anew from here on, because its process has just started."""


class Deployed(Struct, frozen=True, tag="deployed", omit_defaults=True):
    """An application is added, or a version of it beside the version that serves.

    `definition` describes it completely (`sloop.systems.setup`), so that a replay builds the same application.
    """

    application: str
    version: str
    definition: dict[str, Any]
    canary: Canary | None = None
    """None: it gets all traffic as soon as it is ready."""


class Promoted(Struct, frozen=True, gc=False, tag="promoted"):
    """Somebody orders that a version gets all traffic of its application."""

    application: str
    version: str


class Removed(Struct, frozen=True, gc=False, tag="removed", omit_defaults=True):
    """Somebody orders that an application, or one version of it, stops: it takes no new requests, and ends when its
    open requests have."""

    application: str
    version: str = ""
    """Empty for all versions."""


class SystemChanged(Struct, frozen=True, tag="system_changed"):
    """Somebody orders that another system decides for an application version from now on. Its replicas, its open
    requests and what was measured of it stay.

    `definition` is that of the version under this system (see `Deployed`). It differs in nothing else.
    """

    application: str
    version: str
    definition: dict[str, Any]


class Simulated(Struct, frozen=True, tag="simulated", omit_defaults=True):
    """The answer to `RequestSimulation`: a row for each of its systems, in the same order."""

    number: int
    systems: tuple[SimulatedSystem, ...] = ()
    requests: int = 0
    """How many requests each of them got, after the while in which it started."""
    cpu_s: float = 0.0
    """Seconds of a core that the answer has taken."""
    error: str = ""
    """Why there is no answer at all."""


class Cancelled(Struct, frozen=True, gc=False, tag="cancelled"):
    """The client of a request disconnected."""

    request: RequestId


class Draining(Struct, frozen=True, gc=False, tag="draining"):
    """The server shuts down: it finishes open requests and rejects new ones."""


class Woke(Struct, frozen=True, gc=False, tag="woke"):
    """The time `core.wake_ns` has come. A spurious wake-up does no harm."""


Event = (
    Request
    | Finished
    | BatchFailed
    | WorkerProgressed
    | WorkerReady
    | WorkerCompleted
    | BatchLost
    | BatchSilent
    | WorkerLost
    | WorkerStopped
    | WorkerResized
    | Transferred
    | TransferFailed
    | NodeReady
    | NodeLost
    | NodeReleased
    | Planned
    | Deployed
    | Promoted
    | Removed
    | SystemChanged
    | Simulated
    | Cancelled
    | Draining
    | Woke
)

WOKE = Woke()
