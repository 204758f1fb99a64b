"""The nouns that all packages share: requests, replicas, plans, nodes. Values only, without behaviour of their own.

They are `msgspec.Struct`s, not dataclasses: as quick to make as tuples, frozen, and written to the event log without
conversion. `gc=False` is safe on the frequent ones because none can be part of a reference cycle.
"""

from enum import StrEnum
from typing import NewType

from msgspec import Struct

RequestId = NewType("RequestId", int)
BatchId = NewType("BatchId", int)
ReplicaId = NewType("ReplicaId", int)


class Outcome(StrEnum):
    """The five ends of a request; each request reaches exactly one of them, once."""

    SERVED = "served"
    """Answered by its deadline."""
    LATE = "late"
    """Answered after its deadline."""
    DROPPED = "dropped"
    """Removed from a queue because its deadline could not be met, or because the client disconnected."""
    REJECTED = "rejected"
    """Refused by admission control when it arrived."""
    FAILED = "failed"
    """Ended by an error."""


class Life(StrEnum):
    """A replica's state: starting → ready → draining. The core forgets replicas that have stopped or are lost."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Request(Struct, frozen=True, gc=False, tag="arrived"):
    """One inference request of a client, and also the event of its arrival.

    `sent_ns` is when the client began to send. The end-to-end budget counts from then: `deadline_ns = sent_ns +
    slo_ns`, and the network has used `arrived_ns - sent_ns` of it.
    """

    id: RequestId
    sent_ns: int
    arrived_ns: int
    deadline_ns: int
    enters: tuple[str, ...] = ()
    """The entry stages where it begins; empty for all entry stages of the application."""

    @property
    def slo_ns(self) -> int:
        return self.deadline_ns - self.sent_ns

    @property
    def elapsed_ns(self) -> int:
        return self.arrived_ns - self.sent_ns


class Path(Struct, frozen=True):
    """A chain of stages from an entry to an end of the graph, with its end-to-end deadline `slo_ns`.

    `share` is the expected fraction of requests that pass all its stages, 0 to 1.
    """

    stages: tuple[str, ...]
    slo_ns: int
    share: float = 1.0


class Visit(Struct, gc=False):
    """A request's passage through one stage: queues hold visits, and batches are made of them."""

    request: Request
    stage: str
    arrived_ns: int
    """When it entered this stage's queue."""
    deadline_ns: int
    """The request's end-to-end deadline, copied here because every queue and batch policy reads it. If paths have
    different deadlines: the loosest among the paths that the request may still take."""
    attempts: int = 0
    """How often its batch was lost because the replica died."""
    part: int = 0
    """Index of the request's part, if the stage runs once for each part; otherwise 0."""


class ReplicaSpec(Struct, frozen=True):
    """One replica of a plan: its variant and its resources.

    `node=None` leaves the choice to the place policy. `device` names an accelerator of the node ("" for none), and
    `share` is the fraction of the device that the replica may use, 0 < share ≤ 1.
    """

    stage: str
    variant: str
    cores: float
    node: str | None = None
    device: str = ""
    share: float = 1.0


class Group(Struct, frozen=True):
    """`count` equal replicas."""

    spec: ReplicaSpec
    count: int


class StagePlan(Struct, frozen=True):
    """The target for one stage: its replicas, and the largest batch that they get."""

    stage: str
    groups: tuple[Group, ...]
    batch_max: int
    in_place: bool = True
    """Whether a replica that differs only in cores is resized; otherwise a new one replaces it."""
    wait_ns: int = 0
    """How long to wait for a full batch, for batch policies that read it (`full`)."""


class Plan(Struct, frozen=True):
    """The cluster that a scaling policy wants, and its reason in one line. The core works towards it (law 3).

    `saturated` names stages whose demand exceeds the most that the policy can provide (Sponge: one replica on all
    cores), so that a policy that combines several can use another one for these stages.
    """

    stages: tuple[StagePlan, ...]
    why: str
    feasible: bool = True
    saturated: tuple[str, ...] = ()
    gave_up: bool = False
    """Whether a solver stopped at its work limit without a solution, although one may exist."""

    def same_target(self, other: "Plan | None") -> bool:
        """Whether both plans want the same cluster, whatever their reasons."""
        return other is not None and self.stages == other.stages


class Node(Struct, frozen=True):
    """A machine of the cluster: its name, hardware kind, capacities and price. `devices` names its accelerators."""

    name: str
    hardware: str
    cores: float
    memory_bytes: int
    devices: tuple[str, ...] = ()
    usd_per_h: float = 0.0
