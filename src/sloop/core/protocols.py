"""Policy protocols: one for each kind of decision (law 4), and `Policies`, the ten policies that make up a system.
At the end, the core as drivers see it.

A policy is a frozen dataclass of parameters with one method (`Provision` has two), and has no state: what it remembers
is a value that it answers, and is given with the next question. The core passes in the time and all values; a policy
reads no clock.

What a policy can do, or wants, is an attribute of its protocol. Those that have a default are inherited:
`class Mine(Scale)`. A policy says otherwise with a `ClassVar`, a parameter or a property of that name.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from msgspec import Struct

from sloop.actions import Action
from sloop.core.nodes import UNUSED_NS
from sloop.core.views import (
    BatchDevice,
    Claimant,
    ClusterView,
    CompletionInput,
    CoreShare,
    PlanInput,
    Provisioning,
    ProvisionInput,
    QueueView,
    ReplicaStart,
    Site,
    Traffic,
)
from sloop.events import Event, Planned
from sloop.units import FOREVER_NS
from sloop.vocabulary import STORE, Plan, ReplicaId, ReplicaSpec, Request, Visit


class Order(Protocol):
    """Which waiting visit is served first: the visit with the smallest key; among equal keys, the earliest arrival."""

    def key(self, visit: Visit) -> int: ...


class BatchDecision(Struct, frozen=True, gc=False):
    """A batch policy's answer: start a batch of the first `count` visits, or drop the first `skip` and be asked again.

    With `count` > 0, `skip` has no effect. Without both, nothing starts. With `wait_until_ns` (later than now), the
    queue waits then: the core asks again at that time, at the next arrival, or when a replica becomes idle. Without,
    only this device takes nothing more: the core asks about idle replicas on other devices, and about this one at the
    next arrival, or when a replica becomes idle.
    """

    count: int = 0
    skip: int = 0
    wait_until_ns: int = FOREVER_NS


def start_or_wait(now_ns: int, count: int, start_by_ns: int) -> BatchDecision:
    """Start a batch of `count` if it is time, otherwise wait until it is."""
    return BatchDecision(count) if now_ns >= start_by_ns else BatchDecision(wait_until_ns=start_by_ns)


class Batch(Protocol):
    """How many of the waiting visits to run now on an idle replica, in one batch. Asked until no replica is idle, no
    visit waits, or nothing starts; visits that are tried again run alone, without being asked about."""

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision: ...


@runtime_checkable
class RememberingBatch(Protocol):
    """A batch policy that remembers what it answered before: see `RememberingRoute`."""

    __slots__ = ()
    remembers: ClassVar[bool] = True

    @abstractmethod
    def decide(
        self,
        now_ns: int,
        queue: QueueView,
        device: BatchDevice,
        memory: Any,  # noqa: ANN401
    ) -> tuple[BatchDecision, Any]: ...


class ReadyReplica(Protocol):
    """A ready replica as a route policy sees it."""

    @property
    def id(self) -> ReplicaId: ...
    @property
    def cores(self) -> float: ...
    @property
    def batches(self) -> int:
        """How many batches it has been sent so far."""
        ...

    @property
    def weight(self) -> float:
        """The rate that the plan expects it to serve; its cores if the plan does not say."""
        ...

    @property
    def alone_ns(self) -> int:
        """Believed duration of a batch of one on it."""
        ...

    @property
    def batch_max(self) -> int:
        """The largest batch that it gets."""
        ...


class Route(Protocol):
    """Which idle replica takes the next batch."""

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        """An index into `idle`, which is sorted by id and not empty; `last` is the replica chosen last, -1 at first."""
        ...


@runtime_checkable
class RememberingRoute(Protocol):
    """A route policy that remembers what it answered before. It is also given what it answered last as its memory, None
    at first, and answers with a new one: a value that never changes."""

    __slots__ = ()
    remembers: ClassVar[bool] = True
    """What tells it from a `Route`."""

    @abstractmethod
    def choose(
        self,
        now_ns: int,
        idle: Sequence[ReadyReplica],
        last: ReplicaId,
        memory: Any,  # noqa: ANN401
    ) -> tuple[int, Any]: ...


class Remembered:
    """Asks a policy that remembers, and keeps its memory between questions."""

    def __init__(self, ask: Callable[..., tuple[Any, Any]]) -> None:
        self._ask = ask
        self.memory: Any = None

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401  # of any policy
        answer, self.memory = self._ask(*arguments, self.memory)
        return answer


def deciding(policy: Batch | RememberingBatch) -> Callable[[int, QueueView, BatchDevice], BatchDecision]:
    """`decide` of a batch policy, with a memory of its own if it remembers."""
    return Remembered(policy.decide) if isinstance(policy, RememberingBatch) else policy.decide


def choosing(policy: Route | RememberingRoute) -> Callable[[int, Sequence[ReadyReplica], ReplicaId], int]:
    """`choose` of a route policy, with a memory of its own if it remembers."""
    return Remembered(policy.choose) if isinstance(policy, RememberingRoute) else policy.choose


class Drop(Protocol):
    """Whether to drop a waiting visit. Called when a batch is formed, starting at the head of the queue, and when a
    deadline in the queue has passed."""

    __slots__ = ()

    @property
    def strict(self) -> bool:
        """False for a policy that goes by believed costs: if a stage has run nothing for seconds, and all that waits is
        hopeless, one visit is served nevertheless, so that the belief can be corrected."""
        return True

    @property
    def proactive(self) -> bool:
        """Whether it and the batch policy are shown what later stages are expected to take now
        (`core.graph_estimates.expected_times`), instead of what they take at least."""
        return False

    @abstractmethod
    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        """`cost_ns` is a believed lower bound of the time to the answer: a batch of one here and at every later stage
        that the request is certain to visit (`core.graph_estimates.remaining_times`). `full_ns` is the same with the
        plan's full batches. With `proactive`, both contain the expected times of later stages instead of lower
        bounds."""
        ...


class Admit(Protocol):
    """Whether to accept a request."""

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        """0 to accept it; otherwise how long the client should wait before it tries again.

        `queued` rows wait at the entry stage; `drain_ns` is the believed time to serve them. Where rows differ in size,
        it is the believed time until this request has been served: after what comes before it, without what the drop
        policy will give up by then, and with its own time if rows of its size have run lately.
        """
        ...


class Place(Protocol):
    """Which node, and which accelerator of it, a new replica goes to."""

    __slots__ = ()

    @property
    def ignores_names(self) -> bool:
        """Whether its choice does not depend on the names of nodes, and equal places go to the first one. Of nodes that
        differ in nothing but their names, it is then shown only the first one, so that a start costs the same on ten
        equal nodes as on a thousand."""
        return False

    @abstractmethod
    def choose(self, now_ns: int, spec: ReplicaSpec, sites: Sequence[Site]) -> int:
        """An index into `sites`, which are all places with room for `spec`, in the order in which the nodes were
        declared; there is at least one."""
        ...


class Forecast(Protocol):
    """How many rows per second to expect; if each request is one row, requests per second."""

    __slots__ = ()

    @property
    def knows_future(self) -> bool:
        """Whether it has a parameter `counts`, the requests in each second since the start. Where they are not
        declared, the simulator takes them from the trace; a server cannot know them."""
        return False

    @abstractmethod
    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        """`ingress` is the measured arrivals at the application so far, in rows."""
        ...


class Scale(Protocol):
    """Which replicas the cluster should have."""

    __slots__ = ()

    @property
    @abstractmethod
    def period_ns(self) -> int:
        """The time between two calls of `plan`."""
        ...

    @property
    def is_quick(self) -> bool:
        """Whether `plan` always takes less than a millisecond or two. Such a policy is called within the event loop,
        all others beside it, so that requests never wait for a plan."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Whether each replica has its place in all plans, so that nothing ever moves. An application whose replicas
        have no room beside those of others is then refused when it is set up."""
        return False

    @property
    def resizes(self) -> bool:
        """Whether plans may change the cores of a replica in place. If not, workers keep a model for one number of
        threads, and plans count the memory of one."""
        return True

    @property
    def attaches_shadows(self) -> bool:
        """Whether plans may have shadows. A server then cuts the models into their measured blocks."""
        return False

    @property
    def asks_for_starts(self) -> bool:
        """Whether it wants to know how long a start takes now (`StageView.starts_ns`)."""
        return False

    @property
    def release_after_ns(self) -> int:
        """How long a node on demand stays empty before it is released; 0: it is released as soon as it is empty. If
        applications differ, the longest time counts."""
        return UNUSED_NS

    @property
    def margin(self) -> float:
        """The fraction of every deadline that it plans with; `sloop plan` says so where its prediction disagrees."""
        return 1.0

    @property
    def arrivals(self) -> Literal["even", "burst"] | None:
        """Its assumption of how the requests of a second arrive, None if it is neither of the two. `sloop plan` reports
        it where its prediction, which assumes one of them, disagrees with the policy."""
        return None

    @abstractmethod
    def plan(self, now_ns: int, view: ClusterView, memory: Any) -> tuple[Plan | None, Any]:  # noqa: ANN401
        """The plan to work towards, or None to keep the current one; and what to remember until the next call.

        `memory` is what the policy answered last, None at first. It is a value that never changes, such as a frozen
        dataclass of numbers and tuples, and None for a policy that remembers nothing. A plan that is tried and not
        used leaves nothing behind."""
        ...


Idle = Literal["leave", "use", "replicas"]
"""`leave`: nothing. `use`: on a machine of their own, single replicas of stages only reserve the cores of their plan,
and may use all that are idle. `replicas`: more replicas than planned, of all stages."""


class Divide(Protocol):
    """How to divide the cores of a cluster among applications that want more than there are."""

    __slots__ = ()

    @property
    def idle(self) -> Idle:
        """What becomes of cores that no plan needs, on nodes that are there anyway (`sloop.core.idle`)."""
        return "leave"

    @property
    def is_quick(self) -> bool:
        """Whether `cores` always takes less than a millisecond; a policy that asks claimants for many plans does not.
        If False, the plans of several applications are computed in a process beside the event loop."""
        return True

    @abstractmethod
    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> Sequence[CoreShare]:
        """A share for each claimant, in the same order: of at most the cores that it wants, and together of at most
        `total` cores. Called once for each kind of hardware of which more cores are wanted than there are."""
        ...


class Provision(Protocol):
    """Where the replicas that are missing now start, and from where the weights of their models come to their nodes."""

    __slots__ = ()

    @property
    def brings_weights(self) -> bool:
        """Whether it says from where the weights come: the core then knows which node has which weights, orders the
        transfers, and decides what is evicted when memory is short. If not, each driver gets the weights in its own
        way, and the answer has no transfers."""
        return False

    @property
    def keeps(self) -> bool:
        """Whether a node keeps the files of weights that no replica uses, as long as its memory suffices."""
        return False

    @property
    def partition(self) -> bool:
        """Whether it may start replicas as parts of one model (`Provisioning.pipelines`)."""
        return False

    @abstractmethod
    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        """The starts to make now; fewer than `given.count` if there is not enough room. There is at least one site.
        Equal replicas are decided on together, so that one chain can serve them all."""
        ...

    def expected_s(self, now_ns: int, given: ProvisionInput) -> float | None:
        """In how many seconds the first of these starts would serve; None if it does not predict that. Scaling policies
        that ask for it (`Scale.asks_for_starts`) compare starts with what else they could do."""
        return None

    def complete(self, now_ns: int, given: CompletionInput) -> Sequence[tuple[str, tuple[str, ...]]]:
        """The transfers that bring the other layers to parts of a pipeline: of each the source, a node that `is_source`
        or `STORE`, and the receivers, a chain. The node of each part is named: once for each of its parts, or once in a
        chain for all of them. By default all layers come from the store. Not called without `partition`."""
        return [(STORE, (node,)) for node in given.nodes]


@dataclass(frozen=True, slots=True)
class AsPlaced(Provision):
    """One replica after another where the place policy chooses; each driver gets the weights in its own way. The
    default."""

    brings_weights: ClassVar[bool] = False  # asked at every start; the protocol's property would be a call

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        site = given.place.choose(now_ns, given.spec, given.sites)
        return Provisioning((ReplicaStart(site),), asks_again=True)


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy of each kind. Two systems differ in nothing else."""

    order: Order
    batch: Batch | RememberingBatch
    route: Route | RememberingRoute
    drop: Drop
    admit: Admit
    place: Place
    forecast: Forecast
    scale: Scale
    divide: Divide
    provision: Provision = AsPlaced()  # frozen, without state


class PlanSource(Protocol):
    """Computes plans; `sloop.core.planner.Planner`."""

    def plan(self, given: PlanInput) -> Planned: ...


class ServiceGap(Struct, frozen=True):
    """No replica of a stage serves."""

    why: str
    is_known: bool
    """Whether something is wrong: not while the first replicas start as usual."""
    wait_ns: int
    """Believed time until one serves; a second if a start takes longer than believed."""


class Explains(Protocol):
    """What a core tells of its state, for clients and for a server's log."""

    def service_gap(self, now_ns: int, key: str, stage: str) -> ServiceGap | None:
        """Why no replica of a stage of an application version serves now; None if one does, or the version has
        ended."""
        ...

    def plan_error(self, key: str) -> str:
        """Why the last attempt to plan for an application version gave no plan; empty if it did, or the version has
        ended."""
        ...


class CoreInterface(Protocol):
    """A core as a driver sees it: `sloop.core.Core`, or one that a test has broken."""

    @property
    def wake_ns(self) -> int:
        """When it wants to be called with `WOKE` if nothing happens before."""
        ...

    @property
    def planner(self) -> PlanSource:
        """Answers `RequestPlan`: `planner.plan(plan_input)`."""
        ...

    @property
    def plan_input(self) -> PlanInput | None:
        """The input of the plan that was last requested; None if it has been answered."""
        ...

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> Sequence[Action]:
        """Process one event; returns the actions to carry out, in this order."""
        ...
