"""The nouns that all packages share: requests, slots, replicas, plans, nodes. Values only, without behaviour.

They are `msgspec.Struct`s, not dataclasses: as quick to make as tuples, frozen, and written to the event log without
conversion. `gc=False` is safe on the frequent ones because none can be part of a reference cycle.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final, NewType

from msgspec import Struct, structs

RequestId = NewType("RequestId", int)
BatchId = NewType("BatchId", int)
WorkerId = NewType("WorkerId", int)
"""A worker has one number for its whole life."""
ReplicaId = WorkerId
"""A replica has the number of its first worker."""
TransferId = NewType("TransferId", int)


def version_key(application: str, version: str) -> str:
    """The key of a version of an application, unique in a deployment: its name, and `@version` from the second on."""
    return application if version == "1" else f"{application}@{version}"


class Outcome(StrEnum):
    """The five ends of a request; each request reaches exactly one of them, once."""

    SERVED = "served"
    """Answered by its deadline."""
    LATE = "late"
    """Answered after its deadline."""
    DROPPED = "dropped"
    """Removed from a queue because its deadline could not be met, or because the client disconnected."""
    REJECTED = "rejected"
    """Refused: by admission control when it arrived, by a model, because of what the client sent, or because no replica
    started while it could wait."""
    FAILED = "failed"
    """Ended by an error."""


class Life(StrEnum):
    """A replica's state: starting → ready → draining. The core forgets replicas that have stopped or are lost."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Request(Struct, frozen=True, gc=False, tag="arrived", omit_defaults=True):
    """One inference request of a client, and also the event of its arrival.

    `sent_ns` is when the client began to send. The end-to-end budget counts from then: `deadline_ns = sent_ns +
    slo_ns`, and the network has used `arrived_ns - sent_ns` of it.
    """

    id: RequestId
    sent_ns: int
    arrived_ns: int
    deadline_ns: int
    enters: tuple[str, ...] = ()
    """The entry stages where it begins, by their names in the application's file; empty for all of them."""
    application: str = ""
    """The name of the application that serves it; may be empty if the deployment has only one."""
    version: str = ""
    """The version that the client asks for; empty to let the rollout decide."""
    client_id: str = ""
    """The client's own name for the request; empty if it gave none."""
    trace: str = ""
    """Where the request belongs in the client's trace, `TRACE-SPAN-FLAGS` as in W3C's `traceparent`; or empty."""
    rows: int = 1
    """How many rows its tensors have: the items that a model computes independently of each other."""
    size: int = 0
    """Elements of one row in the open dimensions of its largest input, such as the length of a text or height × width
    of an image; 0 if all rows of the model are equally large."""
    shape: tuple[int, ...] = ()
    """The open dimensions of its inputs, if `size` does not tell them: rows of equal size and another shape cannot be
    joined without padding."""

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
    """How many replicas were lost while they ran it."""
    part: int = 0
    """Index of the request's part, if the stage runs once for each part; otherwise 0."""
    group: int = 0
    """If it is tried again after its batch failed or was lost, or although it is hopeless: the visits with the same
    number run in one batch, with no others. Otherwise 0."""
    rows: int = 1
    """How many rows the stage computes for it."""
    size: int = 0
    """The size of each of these rows, as in `Request`."""
    first: int = 0
    of: int = 0
    """For a piece of a split request: the position of its first row in the request, and how many rows the request has.
    Otherwise 0."""


class Slot(Struct, frozen=True, omit_defaults=True):
    """What a replica runs on: cores of a node, and possibly a share of one of its accelerators."""

    cores: float
    hardware: str = ""
    """Kind of the node; "" only if no nodes are known."""
    accelerator: str = ""
    """Kind of the accelerator; "" for none."""
    share: float = 1.0
    """Fraction of the accelerator that it may use, 0 to 1. With 0, only the accelerator's memory limits how many
    replicas share it."""
    is_capped: bool = True
    """Whether the replica can use no more than its share of the accelerator or, without one, than its cores. If not,
    they are only reserved for it: what fits on a node does not change, and it may use all of the device."""


class Role(StrEnum):
    """How a worker that holds only some layers of a model takes part in the batches of a replica."""

    SHADOW = "shadow"
    """Beside a replica of the whole model, its *body*, on the same node: the body sends it rows of a batch for these
    layers, and both compute."""
    PART = "part"
    """In sequence with the other parts of the model: a batch passes all of them. The parts start side by side, serve
    together, and each gets the other layers meanwhile and becomes a replica of its own."""


class Worker(Struct, frozen=True, omit_defaults=True):
    """A worker that holds only some layers of the model of its replica."""

    cores: float
    """Of a shadow; a part has those of its replica's slot."""
    layers: tuple[int, ...]
    """Their positions among the measured layers of the variant's profile, ascending; those of a part are
    consecutive."""
    role: Role = Role.SHADOW

    @property
    def span(self) -> "LayerSet":
        """The layers of a part."""
        return LayerSet(self.layers[0], self.layers[-1] + 1)


Shape = tuple[Worker, ...]
"""Of which workers a replica is made, beside a first one with the whole model: a shadow, or instead of it all parts of
a model, in sequence. Replicas on equal slots in different shapes differ in speed, so speeds, limits and what is learnt
belong to (variant, slot, shape)."""
ALONE: Final[Shape] = ()
"""One worker with the whole model."""


def parts_at(bounds: Sequence[int]) -> Shape:
    """The parts of a pipeline: `bounds` are 0, the positions of the cuts among the measured layers, ascending, and the
    number of layers."""
    return tuple([Worker(0.0, tuple(range(first, end)), Role.PART) for first, end in pairwise(bounds)])


def bounds_of(shape: Shape) -> tuple[int, ...]:
    """Where the parts of a pipeline begin and end, as `parts_at` takes it; empty for other shapes."""
    return (0, *(part.layers[-1] + 1 for part in shape)) if shape and shape[0].role is Role.PART else ()


def shadow_in(shape: Shape) -> Worker | None:
    """The shadow of a pair; None for other shapes."""
    return shape[0] if shape and shape[0].role is Role.SHADOW else None


def kind_of(shape: Shape) -> str:
    """`alone`, `pair` with a shadow, or `pipeline`."""
    return "pair" if shadow_in(shape) else "pipeline" if shape else "alone"


class LayerSet(Struct, frozen=True, array_like=True):
    """Some layers of a model: consecutive ones, or all but those. It need not know how many layers the model has."""

    first: int
    end: int
    """The position behind the last one."""
    is_complement: bool = False
    """Whether these are left out, and all others are meant."""

    @property
    def between(self) -> range:
        """The consecutive layers that are kept or left out."""
        return range(self.first, self.end)

    @property
    def others(self) -> "LayerSet":
        """All layers that are not in it."""
        return LayerSet(self.first, self.end, not self.is_complement)

    def positions(self, count: int) -> list[int]:
        """The layers in it, of a model that has so many."""
        return [place for place in range(count) if (place in self.between) is not self.is_complement]


class ReplicaSpec(Struct, frozen=True, omit_defaults=True):
    """One replica: its variant and its slot. `node` and `device` name where it runs.

    In a plan, `node=None` and `device=None` leave the choice to the place policy. In a `StartWorker` both are set.
    """

    stage: str
    variant: str
    slot: Slot
    node: str | None = None
    device: str | None = None
    """Name of an accelerator of the node; None without one."""
    shape: Shape = ALONE
    """A shadow that it serves with is attached to the running replica, which serves alone until then."""

    @property
    def cores(self) -> float:
        """The cores of its slot."""
        return self.slot.cores

    @property
    def shadow(self) -> Worker | None:
        """The shadow that it serves with."""
        return shadow_in(self.shape)

    def with_cores(self, cores: float) -> "ReplicaSpec":
        """The same replica with other cores."""
        return structs.replace(self, slot=structs.replace(self.slot, cores=cores))


class Group(Struct, frozen=True, omit_defaults=True):
    """`count` equal replicas."""

    spec: ReplicaSpec
    count: int
    batch_max: int = 0
    """Largest batch that they get; 0: the stage plan's."""
    rate_rps: float = 0.0
    """The rows per second that the plan expects all of them to serve together; 0: the plan does not say."""
    spare: int = 0
    """How many of them no plan needs: on cores that would be idle otherwise (`Divide.idle`). The core adds them."""


class StagePlan(Struct, frozen=True):
    """The target for one stage: its replicas, and the batches that they get."""

    stage: str
    groups: tuple[Group, ...]
    batch_max: int
    """Largest batch of groups that do not declare one."""
    in_place: bool = True
    """Whether a replica that differs only in cores is resized; otherwise a new one replaces it."""
    wait_ns: int = 0
    """How long to wait for a full batch, for batch policies that read it (`full`)."""

    def batch_max_of(self, group: Group) -> int:
        """Largest batch of a group's replicas."""
        return group.batch_max or self.batch_max

    @property
    def has_replicas(self) -> bool:
        """Whether the stage is to have any."""
        return any(group.count for group in self.groups)


class Plan(Struct, frozen=True):
    """The cluster that a scaling policy wants, and its reason in one line. The core works towards it (law 3).

    `saturated` names stages whose demand exceeds the most that the policy can provide (Sponge: one replica on all
    cores). `sloop plan` says so where the replicas of the plan look sufficient.
    """

    stages: tuple[StagePlan, ...]
    why: str
    feasible: bool = True
    saturated: tuple[str, ...] = ()
    gave_up: bool = False
    """Whether a solver stopped at its work limit without a solution, although one may exist. The log has each
    change of this, also if the replicas stay."""
    shed: float = 0.0
    """The fraction of requests, 0 to 1, that are refused when they arrive, whatever waits, so that the others are in
    time. They count as demand. The log has each change of this, too."""

    def same_target(self, other: "Plan | None") -> bool:
        """Whether both plans want the same cluster, whatever their reasons."""
        return other is not None and self.stages == other.stages

    @property
    def has_replicas(self) -> bool:
        """Whether any stage is to have any."""
        return any(target.has_replicas for target in self.stages)


CLIENTS_MAX: Final = 48
"""How many processes may use an accelerator at once where nothing else is said: the clients of NVIDIA's MPS since
Volta."""


class Device(Struct, frozen=True):
    """An accelerator of a node."""

    name: str
    """Unique on its node."""
    kind: str
    """Model of the accelerator, such as `T4`."""
    memory_bytes: int
    clients_max: int = CLIENTS_MAX
    """How many processes may use it at once."""


STORE: Final = ""
"""The name of the store of models among the sources of transfers; nodes have names that are not empty."""
LINK_MBPS: Final = 7506.89
"""Believed rate of a transfer between two nodes: the mean of five tests between two instances of Lambda Labs' cloud, in
the thesis on Flashpoint (section 3.3 of our specification)."""
STORE_MBPS: Final = 2203.0
"""Believed rate of a store: the mean of ten tests with S3 in the same region, in the same thesis."""


class ModelWeights(Struct, frozen=True, omit_defaults=True):
    """The files of a model. Variants of the same model have equal `ModelWeights`, and share the files on a node."""

    name: str
    size_bytes: int
    layers: LayerSet | None = None
    """Which of them; None for the whole model."""
    digest: str = ""
    """The SHA-256 of its files, by which versions of equal name and size differ; empty if it is not known."""

    @property
    def model(self) -> tuple[str, str]:
        """Equal for all layers of one model."""
        return self.name, self.digest


class Node(Struct, frozen=True, omit_defaults=True):
    """A machine of the cluster: its name, hardware kind, capacities and price."""

    name: str
    hardware: str
    cores: float
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    usd_per_h: float = 0.0
    on_demand: bool = False
    """Whether the core acquires and releases it as plans need it. Other nodes are there from the start."""
    rack: str = ""
    """Nodes of the same rack are at one switch; empty if that is unknown."""
    acquire_s: float | None = None
    """Seconds from its order until it can start replicas, of a user's own kind; None: what is known of its kind."""
    power_w: tuple[float, float] | None = None
    """What a node of a user's own kind draws, in watts: at rest, and with all cores and accelerators busy."""


class NodeState(StrEnum):
    """A node's state: released → acquiring → ready → releasing → released; `lost` until it is ready again."""

    RELEASED = "released"
    ACQUIRING = "acquiring"
    READY = "ready"
    RELEASING = "releasing"
    LOST = "lost"


class Canary(Struct, frozen=True, omit_defaults=True):
    """How a new version of an application gets its traffic: a share at first, all of it after a while."""

    share: float = 0.1
    """Fraction of the requests that the new version serves, above 0, below 1."""
    promote_after_s: float = 0.0
    """Seconds of service after which it gets all requests; 0: never by itself."""
    tolerance: float = 0.05
    """The new version is rolled back if its attainment is lower by more than this (0 to 1), with 95 % confidence."""
    requests_min: int = 50
    """Requests that both versions must have ended before they are compared."""


SIMULATION_CORES: Final = 0.1
"""How much of a core simulations for the systems of a server may take on average."""


class Simulation(Struct, frozen=True):
    """A question to the simulator: what would have become of the last requests of an application under each of these
    systems."""

    last_s: float
    """How long ago the first of them were sent."""
    systems: tuple[Any, ...]
    """Each as a user declares one: a name, or a mapping with `name` and parameters."""
    cpu_s_max: float
    """The most seconds of a core that the answer may take."""


class SimulatedSystem(Struct, frozen=True):
    """What would have become of requests under a system, after a while in which it has started."""

    attainment: float = 0.0
    low: float = 0.0
    high: float = 0.0
    """Served in time, of all; and the range of that for a real run."""
    usd_per_h: float = 0.0
    """The mean price of its replicas; 0 if their nodes have none."""
    cores: float = 0.0
    """Their mean cores."""
    error: str = ""
    """Why there is no answer for it: it cannot serve, or did not answer all requests."""
