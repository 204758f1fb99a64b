"""Actions: everything that the core orders its driver to do, and its notes on why (`Action` is the closed union)."""

from collections.abc import Iterator
from itertools import repeat

from msgspec import Struct

from sloop.vocabulary import BatchId, Outcome, Plan, ReplicaId, ReplicaSpec, RequestId


class StartBatch(Struct, frozen=True, gc=False, tag="start_batch"):
    """Run these requests together on this replica."""

    batch: BatchId
    replica: ReplicaId
    stage: str
    requests: tuple[RequestId, ...]
    parts: tuple[int, ...] = ()
    """Which part of each request this batch runs, at a stage that runs once for each part; otherwise empty."""

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
    """For a rejected request: the time until the queue is expected to have room."""
    stage: str = ""
    """The stage that dropped, rejected or failed the request; empty if no single stage did."""


class StartReplica(Struct, frozen=True, gc=False, tag="start_replica"):
    """Start a replica on the node `spec.node`. The driver answers with `ReplicaProgressed`, then ready or lost."""

    replica: ReplicaId
    spec: ReplicaSpec


class StopReplica(Struct, frozen=True, gc=False, tag="stop_replica"):
    """Stop a replica. It is idle, unless the core stops it because its batch is stuck. The driver answers with
    `ReplicaStopped`."""

    replica: ReplicaId
    why: str


class ResizeReplica(Struct, frozen=True, gc=False, tag="resize_replica"):
    """Change a running replica's cores in place. The driver answers with `Resized`."""

    replica: ReplicaId
    cores: float


class Decided(Struct, frozen=True, tag="decided"):
    """A note for the log and for `explain`: what was decided and why. Drivers write it down and do nothing else."""

    kind: str
    """`plan`: a new plan is in force. `kept`: the same plan, but its feasibility has changed. `lost`: a replica is lost
    and will be replaced. `drain`: a replica stops after its batch. `shortage`: no node has room for a planned replica
    or resize."""
    why: str
    stage: str = ""
    replica: ReplicaId | None = None
    plan: Plan | None = None


Action = StartBatch | End | StartReplica | StopReplica | ResizeReplica | Decided
