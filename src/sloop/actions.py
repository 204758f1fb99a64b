"""Actions: everything that the core orders its driver to do, and its notes on why (`Action` is the closed union)."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import repeat

from msgspec import Struct

from sloop.vocabulary import (
    BatchId,
    ModelWeights,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    RequestId,
    Simulation,
    TransferId,
    Worker,
    WorkerId,
)


class Piece(Struct, frozen=True, gc=False, array_like=True):
    """Consecutive rows of a split request: it has more rows than one forward pass takes."""

    first: int
    """The first row, from 0."""
    rows: int
    of: int
    """How many rows the request has."""


class StartBatch(Struct, frozen=True, gc=False, tag="start_batch", omit_defaults=True):
    """Run these requests together on this replica."""

    batch: BatchId
    replica: ReplicaId
    stage: str
    requests: tuple[RequestId, ...]
    parts: tuple[int, ...] = ()
    """Which part of each request this batch runs, at a stage that runs once for each part; otherwise empty."""
    together: int = 0
    """How many rows the requests have together; 0: one each. See `rows`."""
    size: int = 0
    """The class of sizes of these rows (`sloop.sizes`); 0 where all rows are equally large."""
    pieces: tuple[Piece | None, ...] = ()
    """For each request the piece that this batch runs; None for a request that is not split. Empty if none is split."""

    @property
    def rows(self) -> int:
        """How many rows the batch has."""
        return self.together or len(self.requests)

    @property
    def visits(self) -> Iterator[tuple[RequestId, int]]:
        """Each request with its part; part 0 at a stage that runs once for a request."""
        return zip(self.requests, self.parts or repeat(0), strict=False)


class End(Struct, frozen=True, gc=False, tag="end", omit_defaults=True):
    """End this request and answer its client. `why` is empty for a request that was served in time."""

    request: RequestId
    outcome: Outcome
    why: str = ""
    retry_after_ns: int = 0
    """For a rejected request: the time until the queue is expected to have room, or a replica to be ready."""
    stage: str = ""
    """The stage that dropped, rejected or failed the request; empty if no single stage did."""


class Assigned(Struct, frozen=True, gc=False, tag="assigned"):
    """A request goes to this version of its application; logged only while there are several versions."""

    request: RequestId
    application: str
    """Key of the version."""


class StartWorker(Struct, frozen=True, gc=False, tag="start_worker", omit_defaults=True):
    """Start a worker on the node `spec.node`. The driver answers with `WorkerProgressed`, then ready or lost."""

    worker: WorkerId
    spec: ReplicaSpec
    """The replica that it is a worker of."""
    replica: ReplicaId | None = None
    """The replica, which is ready, whose shadow it is; None if it is the first worker of one, whose number is then its
    own. The replica serves alone until its shadow is ready, and goes on alone when that is lost."""
    transfer: TransferId | None = None
    """The transfer that brings its weights to the node, for which it waits. With None, they are there, or the driver
    gets them in its own way."""
    pipeline: WorkerId | None = None
    """If it starts as a part of a pipeline, the number of the first part. The driver reports `WorkerReady` when it has
    its layers and `WorkerCompleted` when it has all. Where the weights are not on its node, another transfer brings the
    others (`Transfer`). The driver passes a batch of any part through the whole pipeline; if a part is lost, it reports
    `BatchLost` for those of the others that need it."""
    place: int = 0
    """Which of the parts in `spec.shape` it is."""

    @property
    def part(self) -> Worker | None:
        """What it loads at first, if it starts as a part of a pipeline."""
        return self.spec.shape[self.place] if self.pipeline is not None else None


class Transfer(Struct, frozen=True, gc=False, tag="transfer", omit_defaults=True):
    """Bring the weights of a model to nodes. The source sends to the first receiver, and each of them sends to the next
    what it receives, while it receives; with one receiver this is a plain transfer. `weights` may be some layers only
    (`ModelWeights.layers`), for the parts of a pipeline.

    For each receiver the driver answers with `Transferred` or `TransferFailed`, unless the node is lost or released
    before. If a node of the chain is lost, the driver lets those behind it receive from those before it what they have,
    and says `TransferFailed` only for receivers that nobody can serve.
    """

    transfer: TransferId
    weights: ModelWeights
    source: str
    """A node, or `STORE`."""
    receivers: tuple[str, ...]
    is_kept: bool = True
    """Whether the files stay on the nodes until `Evict`; otherwise only until the replicas that wait for this transfer
    are gone. Layers stay as a whole model, once the replica that they are for has all."""
    completes: tuple[ReplicaId, ...] = ()
    """The parts of a pipeline on these nodes for which it brings the other layers; they serve meanwhile. For one part
    these are all but its own, for several all layers."""


class CancelTransfer(Struct, frozen=True, gc=False, tag="cancel_transfer"):
    """Stop a transfer to one of its receivers, at once, and delete what has come there: nobody needs it any more. The
    chain goes on without it. The driver does not answer; a report that the files have come may be under way."""

    transfer: TransferId
    node: str


class Evict(Struct, frozen=True, gc=False, tag="evict"):
    """Free memory of a node, at once: delete the files of a model."""

    node: str
    weights: ModelWeights


class AdoptWorker(Struct, frozen=True, gc=False, tag="adopt_worker"):
    """A worker that an earlier core has started (`KeptWorker`) is the first of a replica of this core from now on, with
    the number that it has. If it is not of use, a `StopWorker` follows."""

    worker: WorkerId
    spec: ReplicaSpec
    is_ready: bool


class StopWorker(Struct, frozen=True, gc=False, tag="stop_worker"):
    """Stop a worker. The driver answers with `WorkerStopped`. The first worker of a replica is idle, unless the core
    stops it because its batch is stuck; the others stop with it, without this order. A shadow finishes its part of the
    running batch."""

    worker: WorkerId
    why: str


class ResizeWorker(Struct, frozen=True, gc=False, tag="resize_worker"):
    """Change the cores of a replica's first worker in place, while it runs. The driver answers with `WorkerResized`."""

    worker: WorkerId
    cores: float


class AcquireNode(Struct, frozen=True, gc=False, tag="acquire_node"):
    """Rent this node; it costs money from now on. The driver answers with `NodeReady` or `NodeLost`."""

    node: str


class ReleaseNode(Struct, frozen=True, gc=False, tag="release_node"):
    """Give back this node, which has no replicas. The driver answers with `NodeReleased`."""

    node: str


class RequestPlan(Struct, frozen=True, gc=False, tag="request_plan"):
    """Compute `core.plan_input` with the planner, beside the event loop, and answer with `Planned`."""

    number: int


class RequestSimulation(Struct, frozen=True, tag="request_simulation"):
    """Simulate the last requests of an application under other systems, beside the event loop and with little of the
    machine, and answer with `Simulated`, also if that fails or takes too long. Of several questions about the same
    version only the last one counts."""

    number: int
    application: str
    """Key of the version that asks. Its system is replaced; other applications stay under theirs."""
    asks: Simulation


class VersionState(StrEnum):
    """Where an application version is in its rollout: starting → (canary →) serving → retiring → retired."""

    STARTING = "starting"
    """Its replicas start; it gets no requests yet."""
    CANARY = "canary"
    """It gets a share of the requests, and is compared with the version that serves the others."""
    SERVING = "serving"
    RETIRING = "retiring"
    """It gets no new requests and finishes those it has."""
    RETIRED = "retired"
    """It has ended: it has neither requests nor replicas."""


class Rollout(Struct, frozen=True, tag="rollout", omit_defaults=True):
    """A version of an application enters a state and gets this share of the application's requests."""

    application: str
    version: str
    state: VersionState
    share: float
    why: str


class Decided(Struct, frozen=True, tag="decided", omit_defaults=True):
    """A note for the log and for `explain`: what was decided and why. Drivers write it down and do nothing else."""

    kind: str
    """`plan`: a new plan is in force. `kept`: the same plan, but its feasibility has changed. `lost`: a replica is lost
    and will be replaced. `drain`: a replica stops after its batch. `shortage`: no node has room for a planned replica
    or resize. `shadow`: a shadow is lost, or has no room on the node of its replica. `pipeline`: a part of one is lost.
    `provision`: where missing replicas start, and from where their weights come. `node`: a node is acquired,
    released or lost. `rest`: an application without traffic gives up its replicas. `waking`: from now on its requests
    may wait for a start whatever their deadlines, until `awake`. `planner`: no plan could be made. `system`:
    another system decides from now on, as was ordered; `unchanged`: one that was ordered cannot decide here.
    `overseer`: what an overseer has compared; with a `choice`, this one of its systems decides from now on."""
    why: str
    stage: str = ""
    replica: ReplicaId | None = None
    plan: Plan | None = None
    application: str = ""
    """Key of the application version; empty if the deployment has only one application."""
    choice: str = ""
    """The system that an overseer has chosen."""


Order = (
    StartWorker
    | StopWorker
    | ResizeWorker
    | AdoptWorker
    | Transfer
    | CancelTransfer
    | Evict
    | AcquireNode
    | ReleaseNode
)
"""What nodes are told to do, but for batches. Each is answered once, as it says."""

Action = (
    StartBatch
    | End
    | StartWorker
    | Transfer
    | CancelTransfer
    | Evict
    | AdoptWorker
    | StopWorker
    | ResizeWorker
    | AcquireNode
    | ReleaseNode
    | RequestPlan
    | RequestSimulation
    | Assigned
    | Rollout
    | Decided
)
