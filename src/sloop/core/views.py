"""Views: the values that policies read, which are only measurements that a real cluster has, and estimates (law 2).

Views are built at each control tick. Policies read them and never change them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from sloop.units import NS_PER_S
from sloop.vocabulary import (
    ALONE,
    Device,
    LayerSet,
    Life,
    ModelWeights,
    Node,
    NodeState,
    Path,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Shape,
    Slot,
    TransferId,
    Visit,
)

if TYPE_CHECKING:
    from sloop.core.protocols import Place
    from sloop.profile.interference import DeviceDemand, Interference
    from sloop.profile.pairs import BlockCosts
    from sloop.profile.size_law import SizeLessons


class Belief(Protocol):
    """The estimate that policies use of one variant on one kind of hardware; never the simulator's truth.

    `sloop.profile.estimate.Estimate` implements it. Batches range from 1 to `batch_max`, cores up to `cores_max`. All
    slots passed to it are of its hardware and accelerator, as `slot` makes them.
    """

    @property
    def variant(self) -> str: ...
    @property
    def hardware(self) -> str:
        """The kind of node; "" if no nodes are known."""
        ...

    @property
    def accelerator(self) -> str:
        """The kind of accelerator that it runs on; "" for none."""
        ...

    @property
    def batch_max(self) -> int: ...
    @property
    def cores_max(self) -> float: ...
    @property
    def startup_ns(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def device_memory_bytes(self) -> int: ...
    @property
    def accuracy(self) -> float | None: ...

    def slot(self, cores: float) -> Slot:
        """The slot of a replica with `cores` cores, and with the whole accelerator if the variant uses one."""
        ...

    def latency_ms(self, batch: int, slot: Slot) -> float:
        """Believed duration of one batch of `batch` on `slot`, in milliseconds."""
        ...

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        """Believed durations in ns, indexed by the rows of a batch: `[0, cost of 1, …, cost of batch_max]`, never
        decreasing."""
        ...

    def best_size(self, cores: float, limit_ns: int, batch_max: int) -> float:
        """The cores of each of several equal replicas on so many cores, if the profile says that these serve notably
        more rows a second than one replica with all; else `cores`. Batches have at most `batch_max` rows and take at
        most `limit_ns`."""
        ...

    def observe(self, batch: int, slot: Slot, taken_ns: int, size: int = 0) -> None:
        """Learn from a finished batch of `batch` rows that took `taken_ns` from its start to its answer, transport
        included. `size` is that of its largest row, if it is known; 0 stands for the largest of its class."""
        ...

    def measured_as(self, other: object) -> None:
        """Take over the profile of another belief about the same variant, and keep what was learnt. The two profiles
        may differ in the memory that a replica takes."""
        ...

    @property
    def correction(self) -> float:
        """The factor on the profile's durations that finished batches have taught. `costs_ns` has it already."""
        ...

    @property
    def mean_ratio(self) -> float:
        """The mean duration of batches divided by the believed one, which is a 99th percentile; 1 if unknown."""
        ...

    @property
    def prior_weight(self) -> float:
        """How much of `correction` is not taught but the 1 of the profile: 1 before the first lesson, then down to
        0."""
        ...

    def of(self, shape: Shape) -> "Belief":
        """The estimate of replicas of another shape, which learns only from their batches; itself for `ALONE`."""
        ...

    def at(self, size: int) -> "Belief":
        """The estimate for batches of the class of sizes that `size` is in. It learns only from these batches. For 0
        it is this belief itself: the mean of all classes that came, weighted by their rows."""
        ...

    def miss(self, rows: int) -> None:
        """Rows of this class were dropped. They weigh in the mean of the classes as served rows do."""
        ...

    @property
    def size_lessons(self) -> "SizeLessons":
        """What finished batches have taught about sizes. An estimate in another process that gets it, `correction` and
        `prior_weight` has the same costs."""
        ...

    @property
    def layer_count(self) -> int:
        """How many layer blocks of the model were measured; 0 if none were, so that it can have no shadow."""
        ...

    @property
    def multiply_adds(self) -> float:
        """Of the model for one row; 0 if they are not known."""
        ...

    def blocks(self, body_cores: float, shadow_cores: float, *, corrected: bool = True) -> "BlockCosts | None":
        """What each of them takes on the cores of a body and of its shadow, as estimated for the body alone. Without
        `corrected`, finished batches do not change it."""
        ...

    @property
    def shares_device(self) -> bool:
        """Whether anything is known of how its batches share their device: an accelerator, or the cores of a node."""
        ...

    @property
    def shared_cores(self) -> float:
        """The cores of a node for which it is known how replicas share them that are not capped; 0 for none."""
        ...

    def shares(self, slot: Slot) -> bool:
        """The same of batches on this slot: nothing may be known of those of replicas with cores of their own."""
        ...

    def demand(self, batch: int, slot: Slot) -> "DeviceDemand":
        """What a batch of `batch` on `slot` demands of its device while it runs."""
        ...

    @property
    def interference(self) -> "Interference":
        """How much longer than `costs_ns` its batches take for their share of the device and what runs beside them."""
        ...


BeliefKey = tuple[str, str]
"""A variant and a kind of hardware."""


class Bucket(Struct, gc=False):
    """Measurements of a stage, or of the whole application, in the interval `[start_ns, start_ns + bucket_ns)`."""

    start_ns: int
    arrivals: int = 0
    """Rows that arrived."""
    waiting_ns: int = 0
    """Integral over time of the number of queued rows; for an application of several
    stages, of the rows of its open requests."""
    running_ns: int = 0
    """Integral over time of the number of rows in running batches."""
    busy_core_ns: int = 0
    """Integral over time of the cores of replicas that run a batch."""
    ready_core_ns: int = 0
    """Integral over time of the cores of replicas that are ready, busy or not."""
    slack_ns: list[int] = []  # msgspec copies the empty list for each instance
    """For each visit that arrived, its remaining budget: deadline - arrival."""


class ReplicaView(Struct, frozen=True, gc=False):
    """One replica as a policy sees it."""

    id: ReplicaId
    spec: ReplicaSpec
    """What the plan asked for, with the cores and the shadow last ordered."""
    life: Life
    since_ns: int
    """When it entered this state."""
    running: int
    """Rows in its current batch; 0 when idle."""
    node: str = ""
    """Where it runs."""
    device: str | None = None
    """The accelerator of the node that it runs on, if any."""
    shape: Shape = ALONE
    """In effect: while `spec.shadow` still loads, or has just been told to stop, it serves alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Measurements in complete buckets, oldest first; the last bucket ended at or before now."""

    buckets: Sequence[Bucket]
    bucket_ns: int

    def window(self, length_ns: int) -> Sequence[Bucket]:
        """The buckets of the last `length_ns`; fewer at the start of a run."""
        return self.buckets[-max(1, length_ns // self.bucket_ns) :]

    def rate_rps(self, length_ns: int = NS_PER_S) -> float:
        """Mean arrival rate over the last `length_ns`, in rows per second; 0 before the first bucket ends."""
        window = self.window(length_ns)
        if not window:
            return 0.0
        return sum(bucket.arrivals for bucket in window) * NS_PER_S / (len(window) * self.bucket_ns)

    def concurrency(self, length_ns: int) -> float:
        """Mean number of rows that wait or run, over the last `length_ns`."""
        window = self.window(length_ns)
        if not window:
            return 0.0
        return sum(bucket.waiting_ns + bucket.running_ns for bucket in window) / (len(window) * self.bucket_ns)

    def utilisation(self, length_ns: int) -> float:
        """Busy share of the ready cores over the last `length_ns`, 0 to 1; 0 where no core was ready."""
        window = self.window(length_ns)
        ready = sum(bucket.ready_core_ns for bucket in window)
        return sum(bucket.busy_core_ns for bucket in window) / ready if ready else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView(Traffic):
    """One stage at a control tick."""

    name: str
    slo_ns: int
    """The application's end-to-end SLO, not the stage's part of it."""
    after: tuple[str, ...]
    """The stages whose outputs it takes; empty for an entry stage."""
    beliefs: Mapping[BeliefKey, Belief]
    """Every variant on every kind of hardware for which it has a profile and the cluster has nodes. Variants are in the
    order of the application's file, and the kinds of each in the order of the cluster."""
    replicas: tuple[ReplicaView, ...]
    queue: tuple[Visit, ...]
    """Waiting visits in queue order."""
    running: int
    """Rows in running batches."""
    visits: float = 1.0
    """Mean number of visits that a request makes to the stage: below 1 behind a branch, above 1 behind a fan-out."""
    starts_ns: Mapping[BeliefKey, int] = field(default_factory=dict)
    """How long one more replica takes from its order until it serves, as the provision policy predicts it from where
    the weights are now. Only for a scaling policy that asks (`Scale`), and only of what the other can predict."""

    def startup_ns(self, belief: Belief) -> int:
        """The same, or what the profile says."""
        return self.starts_ns.get((belief.variant, belief.hardware), belief.startup_ns)

    def on(self, hardware: str) -> dict[str, Belief]:
        """The variants that can run on this kind of hardware, by name."""
        return {variant: belief for (variant, kind), belief in self.beliefs.items() if kind == hardware}

    def count(self, life: Life) -> int:
        """The number of replicas in this state."""
        return sum(replica.life is life for replica in self.replicas)


class DeviceView(Struct, frozen=True, gc=False):
    """An accelerator and what is free of it."""

    device: Device
    free_share: float
    free_memory_bytes: int
    free_clients: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node, its free cores and bytes of memory, and its accelerators. Only a ready node takes new replicas."""

    node: Node
    free_cores: float
    free_memory_bytes: int
    devices: tuple[DeviceView, ...] = ()
    state: NodeState = NodeState.READY


class Site(Struct, frozen=True):
    """A node with room for a replica, and the accelerator there that the replica would use, if any."""

    node: NodeView
    device: DeviceView | None = None


class SharedBatch(Struct, frozen=True, gc=False):
    """A batch that runs on a device."""

    stage: str
    rows: int


class QueueView(Protocol):
    """The queue of a stage as a batch policy sees it. It is the queue itself, so it holds only during the call."""

    @property
    def stage(self) -> str: ...
    @property
    def visits(self) -> Sequence[Visit]:
        """Waiting visits that can share a forward pass, at least one, sorted by the order policy."""
        ...

    @property
    def waiting(self) -> int:
        """How many visits wait in all lanes of the stage, with those that cannot share the pass."""
        ...

    @property
    def wait_ns(self) -> int:
        """How long the current plan allows to wait for a full batch."""
        ...

    @property
    def remaining_ns(self) -> int:
        """A believed lower bound of the time from the end of this stage to the answer; under a proactive drop policy,
        the expected time."""
        ...

    @property
    def others_due_ns(self) -> int:
        """The latest instant at which the only idle replica can begin a visit that cannot run in this batch, so that
        this visit is in time. `FOREVER_NS` if no such visit can be in time, or if other replicas are idle."""
        ...


class BatchDevice(Protocol):
    """An idle replica and its device, as a batch policy sees them: what the next batch costs there, and what runs there
    now. It holds only during the call."""

    @property
    def key(self) -> tuple[str, str]:
        """The name of the node and that of its accelerator, "" for the cores of the node."""
        ...

    @property
    def batch_max(self) -> int:
        """The largest batch allowed on the replica, in visits; at least 1. If as many visits wait, but no lane fills
        it, it is the number of visits in this lane: with many lanes, none might ever fill one."""
        ...

    @property
    def costs_ns(self) -> Sequence[int]:
        """Believed durations of the next batch, beside what runs on the device now: `costs_ns[n]` is that of the first
        n visits of the queue with all their rows, for n up to `batch_max`."""
        ...

    @property
    def alone_costs_ns(self) -> Sequence[int]:
        """The same with nothing beside it."""
        ...

    @property
    def idle(self) -> int:
        """Idle replicas of the stage on this device; at least 1."""
        ...

    @property
    def law(self) -> "Interference":
        """How much slower the stage's batches are for what runs beside them."""
        ...

    @property
    def largest(self) -> "DeviceDemand":
        """What a batch of `batch_max` demands of the device."""
        ...

    @property
    def running(self) -> Sequence[SharedBatch]:
        """All batches that run there of which anything is known: those of this stage, and of others whose profiles say
        how they share their device."""
        ...


class StartCosts(Struct, frozen=True):
    """What a start of one variant on one kind of hardware consists of, as its profile has it. Seconds."""

    weights: ModelWeights
    process_s: float = 0.0
    """Until the worker process accepts orders."""
    load_s: float = 0.0
    """Loading the files in a process of the node."""
    send_s: float = 0.0
    """Copying what was loaded to the accelerator."""
    first_batch_s: float = 0.0
    layer_bytes: tuple[int, ...] = ()
    """Of the weights of each measured layer; empty if none were measured, so that the model cannot be cut."""


class WeightsView(Struct, frozen=True, gc=False):
    """The weights of a model on one node."""

    node: str
    rack: str
    """Of the node; empty if it is unknown."""
    has_files: bool
    arriving: TransferId | None
    """A transfer that brings the files, which more starts may wait for; None if there is none."""
    replicas: int
    """How many replicas on the node have come from them, or start."""
    is_source: bool
    """Whether it can send them to other nodes."""
    arriving_since_ns: int = 0
    """When the transfer was ordered that is `arriving`."""


class ProvisionInput(Struct, frozen=True, kw_only=True):
    """Equal replicas of one stage that are to be started now, and all that a provision policy may know."""

    stage: str
    spec: ReplicaSpec
    count: int
    """How many."""
    sites: Sequence[Site]
    """All places with room for one of them and its weights, in the order in which the nodes were declared. A place may
    have room for several."""
    place: "Place"
    """The application's place policy, for a policy that leaves the choice to it."""
    costs: StartCosts
    belief: Belief
    """Of the replicas."""
    weights: Sequence[WeightsView] = ()
    """Where their weights are, or arrive to be kept. This and what follows is shown to policies that bring weights."""
    sends: Mapping[str, int] = MappingProxyType({})
    """By node, how many transfers of any weights it sends now, the `STORE` included; those that send none are left
    out."""
    waiting: int = 0
    """Rows in the stage's queue."""
    arrivals_rps: float = 0.0
    """Rows that came to the stage per second, in the last ten seconds."""
    served_rps: float = 0.0
    """Rows per second that its ready replicas are believed to serve."""


class CompletionInput(Struct, frozen=True):
    """Parts of a pipeline that are to get the other layers now."""

    nodes: tuple[str, ...]
    """Where each of them is."""
    racks: Mapping[str, str]
    """Of these nodes."""
    weights: Sequence[WeightsView]
    """Where the weights of their model are, or arrive to be kept."""
    sends: Mapping[str, int]
    """As in `ProvisionInput`."""


class WeightChain(Struct, frozen=True):
    """A transfer to be ordered: the source sends to the first receiver, and each receiver to the next."""

    source: str
    """A node that `is_source`, or `STORE`."""
    receivers: tuple[str, ...]
    layers: LayerSet | None = None
    """Which layers it brings to parts of pipelines; None for all."""


class ReplicaStart(Struct, frozen=True, gc=False):
    """One start: at which of the sites, and what brings its weights. With neither `chain` nor `joins` they must be on
    the node."""

    site: int
    chain: int | None = None
    """The one of the new transfers that it waits for."""
    joins: TransferId | None = None
    """A transfer under way to the node, for which it waits as well."""
    pipeline: int | None = None
    """The one of the new pipelines that it is a part of, in the order in which its parts are listed; if it has a
    `chain`, this brings the layers of its part."""


class Provisioning(Struct, frozen=True):
    """The answer of a provision policy: starts, at most as many as are to be made, the most urgent first; transfers;
    and the reason in one line."""

    starts: tuple[ReplicaStart, ...]
    chains: tuple[WeightChain, ...] = ()
    why: str = ""
    pipelines: tuple[tuple[int, ...], ...] = ()
    """The bounds of each new pipeline (`vocabulary.parts_at`). One that lacks room for a part is not started."""
    asks_again: bool = False
    """Whether to ask again for the replicas that are left, if all of these starts have room."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One application and the cluster at a control tick, as scaling policies see them."""

    stages: tuple[StageView, ...]
    """In topological order."""
    nodes: tuple[NodeView, ...]
    """All nodes, also those that are released now and can be acquired. If other applications need cores too, only as
    many as this application may use."""
    plan: Plan | None
    """The plan in force, without replicas that no plan needs (`Divide.idle`)."""
    demand_rps: Mapping[str, float]
    """Per stage, rows per second: `forecast_rps` times the stage's `visits`."""
    ingress: Traffic
    """What arrived at the application."""
    forecast_rps: float
    """Forecast by the forecast policy: rows per second at the application."""
    paths: tuple[Path, ...]
    """Every path through the graph from an entry to an end, with its deadline."""

    @property
    def batch_limit_ns(self) -> int:
        """How long a batch of any stage may take, if who has just missed it is to be in time with the next: half of an
        equal part of the deadline (Nexus' rule)."""
        return self.stages[0].slo_ns // (2 * len(self.stages))


class CoreDemand(Struct, frozen=True):
    """How many cores of a kind of hardware an application version wants, and its weight when there are too few."""

    key: str
    hardware: str
    cores: float
    weight: float = 1.0
    spare: float = 0.0
    """How many more it has in replicas that no plan needs (`Divide.idle`). Plans that want these cores get them."""


class Claimant(CoreDemand, frozen=True, kw_only=True):
    """A demand for cores of a kind of hardware of which too many are wanted, as divide policies see it, with all that
    the scaling policy of the application saw."""

    view: ClusterView
    """What its scaling policy saw when it planned as if the cluster were its own."""
    alone: Plan
    """The plan that its scaling policy made then."""
    plan: Callable[[float], Plan | None]
    """What its scaling policy plans with at most so many cores of this kind of hardware, and with the cores of other
    kinds that it has been given already; None if it would keep the plan in force (`view.plan`) or fails. Each call
    computes a plan, and changes nothing: the policy does not remember it."""


class CoreShare(Struct, frozen=True):
    """What a divide policy gives a claimant."""

    cores: float
    """How many cores it gets, from 0 to what it wants."""
    why: str = ""
    """Why it gets so many, in one line, which is added to the plan's reason."""
    shed: float = 0.0
    """The fraction of its requests, 0 to 1, to refuse on arrival (`Plan.shed`). If its own plan refuses more, that
    counts. A plan that is kept refuses this much, and nothing if there are enough cores, so that the divide policy is
    not called."""


@dataclass(frozen=True, slots=True)
class ApplicationView:
    """One version of an application at a control tick: the input of its policies, before they are called."""

    key: str
    stages: tuple[StageView, ...]
    """In topological order."""
    ingress: Traffic
    """Requests that arrived at the application."""
    share: float
    """Fraction of the application's requests that the version is to be planned for, 0 to 1."""
    weight: float
    """Its weight when the cluster has too few cores (`Divide`)."""
    paths: tuple[Path, ...]
    plan: Plan | None
    """The plan in force."""
    choice: str = ""
    """Which of its systems decides (`ApplicationParts.choices`); empty if there is only one."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Everything that a `Planner` needs for its next plans."""

    number: int
    now_ns: int
    nodes: tuple[NodeView, ...]
    due: tuple[ApplicationView, ...]
    """The application versions to plan for."""
    others: tuple[CoreDemand, ...] = ()
    """The demands of all other versions, whose plans stay as they are."""
