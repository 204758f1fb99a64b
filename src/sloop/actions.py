"""What to do: the closed union of the core's orders to its driver, and its notes on why."""

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
    """Which part of each request it is, at a stage that runs for parts; otherwise empty."""

    @property
    def visits(self) -> Iterator[tuple[RequestId, int]]:
        """Each request with the part it is: 0 at a stage that runs once."""
        return zip(self.requests, self.parts or repeat(0), strict=False)


class End(Struct, frozen=True, gc=False, tag="end", omit_defaults=True):
    """Answer this request; nothing follows. `why` is empty for a request served in time."""

    request: RequestId
    outcome: Outcome
    why: str = ""
    retry_after_ns: int = 0
    """For a rejected request: when the queue is expected to have room."""
    stage: str = ""
    """Where it was dropped, rejected or failed, if that was at one stage."""


class StartReplica(Struct, frozen=True, gc=False, tag="start_replica"):
    """Start a replica; `spec.node` is decided. Answer with progress, then ready or lost."""

    replica: ReplicaId
    spec: ReplicaSpec


class StopReplica(Struct, frozen=True, gc=False, tag="stop_replica"):
    """Stop a replica, which holds no batch unless it is given up as stuck. Answer with stopped."""

    replica: ReplicaId
    why: str


class ResizeReplica(Struct, frozen=True, gc=False, tag="resize_replica"):
    """Change a running replica's cores in place. Answer with resized."""

    replica: ReplicaId
    cores: float


class Decided(Struct, frozen=True, tag="decided"):
    """A note for the log and for `explain`: what was decided and why. Drivers act on it in no way."""

    kind: str
    """`plan`, `place`, `start`, `stop`, `resize`, `retry`, `short`, …: what the decision was about."""
    why: str
    stage: str = ""
    replica: ReplicaId | None = None
    plan: Plan | None = None


Action = StartBatch | End | StartReplica | StopReplica | ResizeReplica | Decided
