"""The nouns every floor of the house shares. Values only: no behaviour beyond what follows from the fields.

Hot values are `msgspec.Struct`s: as quick to make as tuples, frozen, and written to the event log as they are.
`gc=False` is safe on them because none can be part of a reference cycle.
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
    """Given up in the queue: its deadline could not be met."""
    REJECTED = "rejected"
    """Refused at the door."""
    FAILED = "failed"
    """Ended by an error."""


class Life(StrEnum):
    """Where a replica is in its life: starting → ready → draining. Stopped and lost replicas are forgotten."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Request(Struct, frozen=True, gc=False, tag="arrived"):
    """One inference asked by a client, and the event of its arrival.

    `sent_ns` is when the client began to send: the end-to-end budget runs from there, so
    `deadline_ns = sent_ns + slo_ns`, and `arrived_ns - sent_ns` is what the way here has used up.
    """

    id: RequestId
    sent_ns: int
    arrived_ns: int
    deadline_ns: int
    enters: tuple[str, ...] = ()
    """The stages it begins at; empty for all that requests can enter."""

    @property
    def slo_ns(self) -> int:
        return self.deadline_ns - self.sent_ns

    @property
    def elapsed_ns(self) -> int:
        return self.arrived_ns - self.sent_ns


class Path(Struct, frozen=True):
    """A chain of stages from where requests enter to where they are answered, with its own end-to-end deadline.

    `share` is the fraction of requests believed to go along all of it, 0 to 1.
    """

    stages: tuple[str, ...]
    slo_ns: int
    share: float = 1.0


class Visit(Struct, gc=False):
    """A request's passage through one stage: what queues hold and batches are made of."""

    request: Request
    stage: str
    arrived_ns: int
    """When it entered this stage's queue."""
    deadline_ns: int
    """The request's end-to-end deadline, kept here because every queue and batch policy reads it. Where paths have
    deadlines of their own, the loosest of those it may still turn out to be on."""
    attempts: int = 0
    """Batches it was in whose replica was lost."""
    part: int = 0
    """Which of the request's parts it is for, where the stage runs for each."""


class ReplicaSpec(Struct, frozen=True):
    """What a replica is made of: which variant, on how many cores, on which node, with what share of which device.

    `node=None` leaves the choice to the place policy. `device` names an accelerator of the node ("" for none) and
    `share` the fraction of it, 0 < share ≤ 1.
    """

    stage: str
    variant: str
    cores: float
    node: str | None = None
    device: str = ""
    share: float = 1.0


class Group(Struct, frozen=True):
    """`count` replicas of one kind."""

    spec: ReplicaSpec
    count: int


class StagePlan(Struct, frozen=True):
    """The target for one stage: its replicas and the largest batch they are sent."""

    stage: str
    groups: tuple[Group, ...]
    batch_max: int
    in_place: bool = True
    """Whether a replica that only differs in cores is resized; if not, it is replaced by a new one."""
    wait_ns: int = 0
    """How long a batch is worth waiting for, for batch policies that fill the batches of a plan."""


class Plan(Struct, frozen=True):
    """What a scaling policy wants the cluster to look like (law 3), and its reason in one line.

    `saturated` names stages whose demand exceeds what the policy can ever provide with the means it has
    (Sponge: one replica at all cores), so that a policy above it can add others.
    """

    stages: tuple[StagePlan, ...]
    why: str
    feasible: bool = True
    saturated: tuple[str, ...] = ()
    gave_up: bool = False
    """Whether a solver reached the bound of its work without an answer: there may be one."""

    def same_target(self, other: "Plan | None") -> bool:
        """Whether both ask for the same cluster, whatever their reasons."""
        return other is not None and self.stages == other.stages


class Node(Struct, frozen=True):
    """A machine of the cluster: its name, hardware kind and capacities. `devices` are accelerators by name."""

    name: str
    hardware: str
    cores: float
    memory_bytes: int
    devices: tuple[str, ...] = ()
    usd_per_h: float = 0.0
