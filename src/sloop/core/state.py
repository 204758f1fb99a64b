"""The core's mutable state: queues, replicas, open requests. Only the data path and the control path change it.

Nothing here depends on whether the driver is a live server or the simulator. In order of reading:

    ApplicationParts what a core is made of, for each application
    Queue            the waiting visits of a stage, and when to search them next for passed deadlines
    BatchLimits      the batch sizes, rates and waiting time that the current plan has for a stage
    ServiceRate      the believed speed of equal replicas
    DeviceLoad       the batches that run beside each other on one device, and how far they are believed to be
    Replica          one replica, from the order to start it until it is gone; with `RunningBatch`
    LayerPipeline         replicas that start as parts of a model, and serve together until each has all of it
    ReplicaPool      a stage's replicas: which are idle, how much they can serve together
    RestartBackoff   how soon a lost replica is replaced
    ServiceGap           why no replica of a stage serves
    TimeEstimates    a stage's time estimates for admission and drop policies
    StageState       one stage: all of the above
    ApplicationState one version of an application: its stages and open requests
    State            all applications, replicas and nodes
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import ClassVar, overload

from msgspec import Struct, structs

from sloop.actions import Action
from sloop.app.graph import Graph, declared_name
from sloop.app.progress import RequestProgress
from sloop.core.graph_estimates import EdgeHistory, LeastTimes, VisitRates, remaining_times
from sloop.core.ledger import Ledger, millicores
from sloop.core.monitor import Monitor
from sloop.core.protocols import Order, Policies, ServiceGap
from sloop.core.views import Belief, BeliefKey, ReplicaView, Site, StageView, StartCosts
from sloop.core.weights import WeightRegistry
from sloop.profile.interference import DeviceDemand
from sloop.text import number
from sloop.units import FOREVER_NS, NS_PER_S, s
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Form,
    Group,
    Life,
    ModelWeights,
    Part,
    PipelineId,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Shadow,
    Slot,
    StagePlan,
    TransferId,
    Visit,
    version_key,
)

Beliefs = Mapping[tuple[str, str, str], Belief]
"""The latency estimate of each stage, variant and kind of hardware."""

BUCKET_NS_MAX = NS_PER_S
"""The longest monitoring bucket: one second; a shorter planning period makes it shorter."""

DeviceKey = tuple[str, str]
"""A device: the name of a node and that of its accelerator, or "" for the cores of the node."""

RateKey = tuple[str, Slot, Form, DeviceKey | None]
"""A variant, a slot and a form: replicas that are equal in them are equally fast. And their device, if the plan has
another limit or rate for equal replicas elsewhere; otherwise None."""

SLOW_FACTOR = 3
SLOW_NS_MIN = s(10)
"""A start that takes three times as long as believed, and at least ten seconds, is one that may never end."""

STALL_FACTOR = 20
STALL_NS_MIN = s(1)
"""A batch that has run for 20 times its believed duration, and for at least a second, is stalled: those of its requests
that the drop policy finds hopeless do not wait for it any longer. The belief is about the slowest of a hundred batches
and may be wrong by a factor of a few, and a machine may stand still for some hundred milliseconds."""

RESPONSE_NS_MIN = s(30)
"""The shortest response timeout of a stage that declares none. Stopping a replica that only computes costs its requests
and a cold start, so the default waits long enough for a model of some 25 s, whatever its profile says. Gunicorn gives
its workers as long, TorchServe 120 s."""

SILENT_NS_MIN = s(3)
"""A replica is given up sooner if its worker has been silent for `STALL_FACTOR` times the believed duration of its
batch, and for at least this time, although it could have spoken (`BatchSilent`)."""

FIRST_KEY = -(1 << 63)
"""The key of visits that are tried again: before all others, as they were when their first batch began."""

UNLIMITED = 1 << 30
"""The largest batch before the first plan, for replicas that were adopted; their profiles allow less."""

FOUND_OUT_MAX = 8
"""How many replicas may be lost to requests that are found out, without a finished batch in between, before the
losses count as the stage's own: a model that dies of every request must not start again and again without a pause."""

AVOIDED_NS = s(300)
"""For how long other nodes are preferred to one on which a replica was lost before it could serve. Its disk may be
full, or something may be missing there, and a start elsewhere succeeds."""

RESTART_NS_MAX = s(30)
"""The longest delay before a lost replica is replaced: at once first, then after 1, 2, 4, … seconds. Kubernetes doubles
from 10 s to 5 min (CrashLoopBackOff), too long for a server whose only replica answers within milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplicationParts:
    """What a core needs of one version of an application. Its policies and beliefs are fresh.

    It is not the `Application`, which also holds model files, traces and prices and needs imports that the core must
    not have.
    """

    graph: Graph
    beliefs: Beliefs
    policies: Policies
    name: str = ""
    version: str = "1"
    weight: float = 1.0
    """Its weight when the cluster has too few cores (`Divide`)."""
    rest_after_ns: int = 0
    """After how long without a request it gives up its replicas; 0: never."""
    wake_ns: int = 0
    """How long a request waits, whatever its deadline, while the first replicas start, also after a rest; 0: no longer
    than its deadline and the drop policy allow."""
    response_timeouts_ns: Mapping[str, int] = field(default_factory=dict)
    """The response timeouts that stages declare; the others have the default (`StageState.response_timeout_ns`)."""
    starts: Mapping[tuple[str, str, str], StartCosts] = field(default_factory=dict)
    """What a start of each stage, variant and kind of hardware consists of, for provision policies."""

    @property
    def key(self) -> str:
        """Unique among all versions of all applications."""
        return version_key(self.name, self.version)


class Queue:
    """Waiting visits, sorted by the order policy's key. Visits with equal keys stay in order of arrival.

    Two parallel lists with bisection, not a heap: deadlines and arrivals come nearly sorted, so an insertion lands near
    the end and moves few pointers, and policies can read `visits` as a sorted list. `visits` is never replaced by
    another list object, because the data path keeps a reference to it.
    """

    def __init__(self, order: Order) -> None:
        self._key = order.key
        self._keys: list[int] = []
        self.visits: list[Visit] = []
        self.sweep_ns = FOREVER_NS
        """When to search for passed deadlines next; `FOREVER_NS` if the queue is empty."""
        self._groups = 0

    def push(self, now_ns: int, visit: Visit) -> None:
        """Insert a visit at its place."""
        deadline_ns = visit.deadline_ns
        if deadline_ns < self.sweep_ns:
            self.sweep_ns = (deadline_ns if deadline_ns > now_ns else now_ns) + 1
        key = self._key(visit)
        keys = self._keys
        if not keys or key >= keys[-1]:
            keys.append(key)
            self.visits.append(visit)
            return
        at = bisect_right(keys, key)
        keys.insert(at, key)
        self.visits.insert(at, visit)

    def push_again(self, now_ns: int, visits: Sequence[Visit]) -> None:
        """Insert visits that are tried again, in a batch of their own: before all that have not been tried, and behind
        those that wait for another try already."""
        self._groups += 1
        for visit in visits:
            visit.group = self._groups
            if visit.deadline_ns < self.sweep_ns:
                self.sweep_ns = max(visit.deadline_ns, now_ns) + 1
        at = bisect_right(self._keys, FIRST_KEY)
        self._keys[at:at] = [FIRST_KEY] * len(visits)
        self.visits[at:at] = visits

    def set_apart(self, visit: Visit) -> None:
        """A visit is to run in a batch of its own."""
        self._groups += 1
        visit.group = self._groups

    def group_size(self, most: int) -> int:
        """How many visits at the head belong to the group of the first one, at most `most`."""
        visits = self.visits
        group = visits[0].group
        return next((at for at, visit in enumerate(visits[:most]) if visit.group != group), min(most, len(visits)))

    def take(self, count: int) -> list[Visit]:
        """Remove and return the first `count` ≥ 1 visits, or all if there are fewer. The queue must not be empty."""
        if count == 1:
            del self._keys[0]
            taken = [self.visits.pop(0)]
        else:
            taken = self.visits[:count]
            del self.visits[:count]
            del self._keys[:count]
        if not self.visits:
            self.sweep_ns = FOREVER_NS
        return taken

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices, in one pass: one request may have a thousand parts."""
        if not indices:
            return
        first, end, removed = indices[0], indices[-1] + 1, set(indices)
        stay = [index for index in range(first, end) if index not in removed]
        self.visits[first:end] = [self.visits[index] for index in stay]
        self._keys[first:end] = [self._keys[index] for index in stay]
        if not self.visits:
            self.sweep_ns = FOREVER_NS

    def remove_request(self, request: RequestId) -> int:
        """Remove every visit of a request; returns how many there were."""
        found = [index for index, visit in enumerate(self.visits) if visit.request.id == request]
        self.remove(found)
        return len(found)


@dataclass(slots=True, eq=False)
class BatchLimits:
    """The largest batches, the planned rates, and the longest wait for a full batch, that the current plan has for a
    stage."""

    default: int = UNLIMITED
    wait_ns: int = 0
    """The longest wait for a full batch."""
    _groups: dict[RateKey, Group] = field(default_factory=dict)
    """The groups of the plan, those that name a node also without it."""
    _by_kind: dict[BeliefKey, int] = field(default_factory=dict)
    """The last limit of each variant on each kind of hardware."""
    placed: set[tuple[str, Slot, Form]] = field(default_factory=set)
    """Those for which the plan has different limits or rates on different nodes or devices."""

    def follow(self, target: StagePlan) -> bool:
        """Adopt a new plan; returns whether limits or rates depend on the place for other replicas than before. A
        variant that the plan does not mention keeps its last limit until its replicas are replaced."""
        before, self.placed = self.placed, set()
        self.default, self.wait_ns = target.batch_max, target.wait_ns
        self._groups.clear()
        for group in target.groups:
            if group.count:
                spec = group.spec
                like = spec.variant, spec.slot, spec.form
                other = self._groups.get((*like, None))
                if other is not None and _limits_of(other) != _limits_of(group):
                    self.placed.add(like)
                if other is None or other.spec.node is not None or spec.node is None:
                    self._groups[*like, None] = group
                if spec.node is not None:
                    self._groups[*like, (spec.node, spec.device or "")] = group
                self._by_kind[spec.variant, spec.slot.hardware] = target.batch_max_of(group)
        return self.placed != before

    def batch_max(self, variant: str, slot: Slot, form: Form = ALONE, where: DeviceKey | None = None) -> int:
        """The largest batch that the plan allows for a variant on a slot in a form, on this device if one is named; the
        variant's profile may allow less.

        A replica on a slot or in a form that is not in the plan, because it is being changed or replaced, keeps the
        limit of its variant on its kind of hardware.
        """
        group = (
            self._groups.get((variant, slot, form, None)) if where is None else self._placed(variant, slot, form, where)
        )
        if group is not None:
            return group.batch_max or self.default
        return self._by_kind.get((variant, slot.hardware), self.default)

    def weight(self, variant: str, slot: Slot, form: Form = ALONE, where: DeviceKey | None = None) -> float:
        """The rate that the plan expects one such replica to serve; its cores if the plan does not say."""
        group = (
            self._groups.get((variant, slot, form, None)) if where is None else self._placed(variant, slot, form, where)
        )
        return group.rate_rps / group.count if group is not None and group.rate_rps else slot.cores

    def _placed(self, variant: str, slot: Slot, form: Form, where: DeviceKey) -> Group | None:
        """The group of the plan for replicas on this device: the one that names it, or its node, or any."""
        places = (where, (where[0], ""), None)
        return next((found for place in places if (found := self._groups.get((variant, slot, form, place)))), None)


def _limits_of(group: Group) -> tuple[int, float]:
    """What a group says of each of its replicas."""
    return group.batch_max, group.rate_rps / group.count


@dataclass(slots=True, eq=False)
class ServiceRate:
    """The believed speed of one variant on one slot in one form.

    All such replicas of a stage share it, so that a control tick costs the same for four replicas as for four hundred.
    """

    belief: Belief
    """Of this form."""
    slot: Slot
    form: Form
    millicores: int
    """Of a replica, with those of its shadow."""
    where: DeviceKey | None = None
    """Their device, if the plan has another limit or rate for such replicas elsewhere."""
    is_shared: bool = False
    """Whether the belief says how these replicas share their devices; if not, nothing is kept of that."""
    profiled_ns: Sequence[int] = (0,)
    """Believed durations by size of a batch, as the belief has them: on the device for which it was profiled."""
    costs_ns: Sequence[int] = (0,)
    """The same with this share of the device, and nothing beside it."""
    batch_max: int = 0
    """The largest batch that these replicas get."""
    weight: float = 0.0
    """The rate that the plan expects each of them to serve; their cores if the plan does not say."""
    least_alone_ns: int = 0
    least_full_ns: int = 0
    """Durations of a batch of one and of a full batch that drop policies reckon with. On a stage with several kinds of
    hardware they are those of the fastest replica: a slow one must not drop what a fast one can still serve."""
    replicas: int = 0
    """How many replicas share it, in any state."""
    ready: int = 0
    starting: int = 0
    crowds: dict[Life, Counter[DeviceKey]] = field(default_factory=dict)
    """If `is_shared`, how many replicas in a state are on each device."""

    def refresh(self, limits: BatchLimits) -> None:
        """Reread the costs, which the belief may have corrected, and the limits of the plan."""
        costs_ns = self.belief.costs_ns(self.slot)
        if not self.is_shared:
            self.costs_ns = costs_ns
        elif costs_ns is not self.profiled_ns:
            self.profiled_ns = costs_ns
            sizes = range(1, len(costs_ns))
            self.costs_ns = costs_ns = (0, *accumulate((self.beside(size, ()) for size in sizes), max))
        else:
            costs_ns = self.costs_ns
        form = self.form if not self.form.bounds else ALONE  # plans know nothing of pipelines
        self.batch_max = min(limits.batch_max(self.belief.variant, self.slot, form, self.where), len(costs_ns) - 1)
        self.weight = limits.weight(self.belief.variant, self.slot, form, self.where)
        self.least_alone_ns, self.least_full_ns = costs_ns[1], costs_ns[self.batch_max]

    def count(self, replica: "Replica", change: int) -> None:
        """Count a replica in its state (`change` is 1), or not any more (-1)."""
        life = replica.life
        self.replicas += change
        if life is Life.READY:
            self.ready += change
        elif life is Life.STARTING:
            self.starting += change
        if self.is_shared:
            crowd = self.crowds.setdefault(life, Counter())
            crowd[replica.device_key] += change
            if not crowd[replica.device_key]:
                del crowd[replica.device_key]

    def beside(self, size: int, others: Sequence[DeviceDemand]) -> int:
        """Believed duration of a batch of this size while `others` run on its device, if `is_shared`."""
        factor = self.belief.interference.slowdown(self.belief.demand(size, self.slot), others)
        return max(1, round(self.profiled_ns[size] * factor))

    def capacity(self, life: Life) -> float:
        """What the replicas in this state can serve together in full batches, if `is_shared`: visits per nanosecond.

        Those on one device slow each other down; what replicas of other stages run there is not foreseen.
        """
        batch = self.batch_max
        if not batch:
            return 0.0
        crowds, own = Counter(self.crowds.get(life, {}).values()), self.belief.demand(batch, self.slot)
        return sum(
            devices * count * batch / self.beside(batch, [own] * (count - 1)) for count, devices in crowds.items()
        )


@dataclass(slots=True, eq=False)
class LoadedBatch:
    """A batch that runs on a device beside others."""

    NOT_IN_SNAPSHOT: ClassVar = ("demand",)

    rate: ServiceRate
    """Whose belief has its law of interference."""
    size: int
    stage: str
    began_ns: int
    done_ns: float = 0.0
    """How much of it is believed to be done: the time that it would have taken alone, on all of the device."""
    factor: float = 1.0
    """Its present slowdown: the duration at this speed, divided by its duration alone."""
    demand: DeviceDemand = field(init=False)
    """What it demands of the device."""

    def __post_init__(self) -> None:
        self.restored()

    def restored(self) -> None:
        """Set what a snapshot does not have."""
        self.demand = self.rate.belief.demand(self.size, self.rate.slot)


@dataclass(slots=True, eq=False)
class DeviceLoad:
    """The batches that run beside each other on one device, and how far they are believed to be.

    Whenever one begins or ends, the others proceed slower or faster from then on: `sloop.profile.interference`. So
    what an estimate learns from a batch is what the batch would have taken alone.
    """

    now_ns: int = 0
    """Up to when the progress of the batches is known."""
    batches: dict[BatchId, LoadedBatch] = field(default_factory=dict)
    """In the order in which they began, so that sums of floats are the same in every run."""
    _is_due: bool = False
    """Whether the factors are out of date. They are computed once for all batches that begin at one instant."""

    def join(self, now_ns: int, id: BatchId, batch: LoadedBatch) -> None:
        """A batch begins."""
        self._advance(now_ns)
        self.batches[id] = batch
        self._is_due = True

    def leave(self, now_ns: int, id: BatchId) -> float:
        """A batch is over; returns the time in ns that it would have taken alone."""
        self._advance(now_ns)
        self._is_due = True
        return self.batches.pop(id).done_ns

    def slowdown(self, id: BatchId) -> float:
        """The slowdown of a batch: its present one or, if that is larger, the mean so far."""
        self._renew()
        batch = self.batches[id]
        passed_ns = self.now_ns - batch.began_ns
        return max(batch.factor, passed_ns / batch.done_ns) if passed_ns else batch.factor

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self.now_ns
        if passed_ns and self.batches:
            self._renew()
            for batch in self.batches.values():
                batch.done_ns += passed_ns / batch.factor
        self.now_ns = now_ns

    def _renew(self) -> None:
        """Compute the factors for the batches that run now."""
        if not self._is_due:
            return
        self._is_due = False
        demands = [batch.demand for batch in self.batches.values()]
        for place, batch in enumerate(self.batches.values()):
            others = demands[:place] + demands[place + 1 :]
            batch.factor = batch.rate.belief.interference.slowdown(batch.demand, others)


class SlowedCosts(Sequence[int]):
    """The believed durations of a replica's next batch by its size, if it begins now beside what runs on its device.

    They are computed when they are read: most policies read few of them.
    """

    __slots__ = ("_others", "_rate")

    def __init__(self, rate: ServiceRate, load: DeviceLoad) -> None:
        self._rate = rate
        self._others = [batch.demand for batch in load.batches.values()]

    def __len__(self) -> int:
        return len(self._rate.costs_ns)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        sizes = range(len(self))[at]
        if isinstance(sizes, range):
            return tuple([self[size] for size in sizes])
        return self._rate.beside(sizes, self._others) if sizes else 0


class RunningBatch(Struct, frozen=True, gc=False):
    """A batch in service, with the slot and the form that its replica had when the batch began."""

    id: BatchId
    visits: list[Visit]
    started_ns: int
    rate: ServiceRate
    """Whose belief learns from it."""
    millicores: int
    costs_ns: Sequence[int]
    """Believed durations by size of a batch, with nothing beside it."""
    ended: frozenset[RequestId] = frozenset()
    """Requests that have ended although the batch still runs; only in an application of one stage."""
    load: DeviceLoad | None = None
    """What runs on its device, if the belief says how replicas share it."""

    @property
    def cost_ns(self) -> int:
        """Its believed duration."""
        alone_ns = self.costs_ns[len(self.visits)]
        return alone_ns if self.load is None else round(alone_ns * self.load.slowdown(self.id))

    @property
    def stalled_ns(self) -> int:
        """When it counts as stalled if it has not finished."""
        return self.started_ns + max(STALL_NS_MIN, STALL_FACTOR * self.cost_ns)

    @property
    def requests(self) -> int:
        """How many requests it has visits of."""
        return len({visit.request.id for visit in self.visits})

    @property
    def is_suspect(self) -> bool:
        """Whether it is the second try, alone, of a request whose first replica was lost while it ran: if this replica
        is lost as well, the request is the cause."""
        return self.visits[0].attempts > 0 and self.requests == 1


@dataclass(slots=True, eq=False)
class Replica:
    """A replica from the order to start it until it has stopped or is lost."""

    id: ReplicaId
    spec: ReplicaSpec
    """What the plan asked for; the cores may have changed since."""
    stage: "StageState"
    since_ns: int
    """When it entered its state."""
    node: str
    device: str | None = None
    life: Life = Life.STARTING
    service_rate: ServiceRate = field(init=False)
    slot: Slot = field(init=False)
    """The slot in effect."""
    millicores: int = field(init=False)
    device_key: DeviceKey = field(init=False)
    """Where its batches run."""
    target_cores: float = field(init=False)
    """Cores last ordered; differs from those of `slot` during a resize."""
    resizing: int = 0
    """Resizes that are ordered and not yet in effect. While there are any, the largest core count ordered stays
    reserved."""
    batches: int = 0
    """Batches it has been sent so far."""
    form: Form = ALONE
    """In effect."""
    shadow: Shadow | None = None
    """The shadow that serves with it, or is being loaded for that."""
    shadow_number: int = -1
    """Of the shadow that was last ordered."""
    is_parting: bool = False
    """Whether its shadow was told to stop. It keeps its reservation until it has."""
    is_provided: bool = False
    """Whether a provision policy has placed it, so that the core knows of its weights."""
    transfer: TransferId | None = None
    """The transfer for which its start waits, or has waited; of a part, later the one that brings the other layers."""
    part: Part | None = None
    """The layers that it has, if it has not all."""
    pipeline: "LayerPipeline | None" = None
    """In which it serves, or will."""
    completes: bool = False
    """Whether it gets the other layers; only if it has started as a part."""

    def __post_init__(self) -> None:
        self.slot = self.spec.slot
        self.target_cores = self.slot.cores
        self.device_key = (self.node, self.device or "")
        self.service_rate = self.stage.pool.service_rate(self.spec.variant, self.slot, where=self.device_key)
        self.millicores = self.service_rate.millicores

    @property
    def batch(self) -> RunningBatch | None:
        """The batch that it runs."""
        return self.stage.pool.running.get(self.id)

    @property
    def cores(self) -> float:
        """Cores in effect."""
        return self.slot.cores

    @property
    def weight(self) -> float:
        """See `ServiceRate`."""
        return self.service_rate.weight

    @property
    def alone_ns(self) -> int:
        """Believed duration of a batch of one."""
        return self.service_rate.costs_ns[1]

    @property
    def batch_max(self) -> int:
        """The largest batch that it gets."""
        return self.service_rate.batch_max

    @property
    def will_free_cores(self) -> bool:
        """Whether it, or its shadow, stops or shrinks, so that other replicas soon have room."""
        is_shrinking = self.resizing > 0 and self.target_cores < self.slot.cores
        return self.life is Life.DRAINING or is_shrinking or self.is_parting

    def order_cores(self, cores: float) -> None:
        """A resize is ordered."""
        self.target_cores = cores
        self.resizing += 1
        self.stage.pool.note_change(self)

    def view(self) -> ReplicaView:
        """The replica as policies see it, with the cores and the shadow last ordered."""
        spec, batch = self.spec, self.batch
        if spec.slot.cores != self.target_cores:
            spec = spec.with_cores(self.target_cores)
        if self.shadow is not None:
            spec = structs.replace(spec, shadow=self.shadow)
        running = len(batch.visits) if batch else 0
        return ReplicaView(self.id, spec, self.life, self.since_ns, running, self.node, self.device, self.form)


@dataclass(slots=True, eq=False)
class LayerPipeline:
    """Replicas that start as parts of one model and serve together until each of them has all layers."""

    id: PipelineId
    bounds: tuple[int, ...]
    """See `Part`."""
    members: dict[ReplicaId, Replica] = field(default_factory=dict)
    """In the order of their parts."""
    started: dict[ReplicaId, None] = field(default_factory=dict)
    """Those that have their parts."""
    completed_ns: int = -1
    """When the last of them got all layers; -1 before. Batches that began until then run in the pipeline."""
    is_stopping: bool = False
    """Whether its members were told to stop."""

    @property
    def is_ready(self) -> bool:
        """Whether all have their parts, so that they serve."""
        return len(self.started) == len(self.members)

    @property
    def is_complete(self) -> bool:
        """Whether all have all layers."""
        return all(member.part is None for member in self.members.values())

    @property
    def has_batch(self) -> bool:
        """Whether any member runs a batch."""
        return any(member.batch is not None for member in self.members.values())

    @property
    def runs_batches(self) -> bool:
        """Whether a batch is in the pipeline that began before it was complete."""
        batches = [member.batch for member in self.members.values()]
        return any(batch is not None and not 0 <= self.completed_ns < batch.started_ns for batch in batches)


_ID_OF = attrgetter("id")
"""A key for bisection that costs no call of a Python function."""


class ReplicaPool:
    """The replicas of one stage, which of them are idle, and how much they can serve together.

    Every replica is counted in its `ServiceRate` under its state; `idle` holds exactly the ready replicas without a
    batch. Views of replicas are kept, so that a control tick costs nothing for those that have not changed.
    """

    NOT_IN_SNAPSHOT: ClassVar = ("_changed", "_views", "_all_views", "_seen_running", "_seen_batch")

    def __init__(self, beliefs: Mapping[BeliefKey, Belief], limits: BatchLimits) -> None:
        self._beliefs = beliefs
        self._limits = limits
        self._rates: dict[RateKey, ServiceRate] = {}
        self.replicas: dict[ReplicaId, Replica] = {}
        self.running: dict[ReplicaId, RunningBatch] = {}
        """The batches that run, by replica, in the order in which they began."""
        self.idle: deque[Replica] = deque()
        """Sorted by id, so that route policies choose from the same sequence whatever the order of events."""
        self.last = ReplicaId(-1)
        """The replica the route policy chose last."""
        self.restored()

    def restored(self) -> None:
        """Set what a snapshot does not have: all about views."""
        self._changed: dict[ReplicaId, None] = dict.fromkeys(self.replicas)
        """Replicas that have changed since their view was made, in another way than by their batch."""
        self._views: dict[ReplicaId, ReplicaView] = {}
        """Without draining replicas; out of date for those that have changed."""
        self._all_views: tuple[ReplicaView, ...] = ()
        self._seen_running: dict[ReplicaId, RunningBatch] = {}
        """The batches that ran when the views were made."""
        self._seen_batch = BatchId(-1)
        """The last of them to begin."""

    @property
    def rates(self) -> Iterable[ServiceRate]:
        """The speeds of all replicas, one for each variant, slot and form."""
        return self._rates.values()

    @property
    def is_changing(self) -> bool:
        """Whether a replica starts, drains or is being resized, or a shadow stops, so that room or capacity may soon
        grow."""
        return any(r.life is not Life.READY or r.resizing or r.is_parting for r in self.replicas.values())

    def add(self, replica: Replica) -> None:
        """Add a replica whose start was ordered."""
        self.replicas[replica.id] = replica
        self._changed[replica.id] = None
        replica.service_rate.count(replica, 1)

    def set_life(self, replica: Replica, life: Life) -> None:
        """Move a replica to another state."""
        replica.service_rate.count(replica, -1)
        replica.life = life
        replica.service_rate.count(replica, 1)
        self._changed[replica.id] = None

    def set_cores(self, replica: Replica, cores: float) -> None:
        """Move a replica to another number of cores."""
        self._set_rate(replica, structs.replace(replica.slot, cores=cores), replica.form)

    def set_form(self, replica: Replica, form: Form) -> None:
        """Move a replica to another form."""
        self._set_rate(replica, replica.slot, form)
        self._changed[replica.id] = None

    def _set_rate(self, replica: Replica, slot: Slot, form: Form) -> None:
        replica.service_rate.count(replica, -1)
        replica.slot, replica.form = slot, form
        replica.service_rate = self.service_rate(replica.spec.variant, slot, form, replica.device_key)
        replica.service_rate.count(replica, 1)
        replica.millicores = replica.service_rate.millicores

    def remove(self, replica: Replica) -> None:
        """Remove a replica that has stopped or is lost."""
        if replica.life is Life.READY and replica.batch is None:
            self.remove_idle(replica)
        del self.replicas[replica.id]
        replica.service_rate.count(replica, -1)
        self._changed[replica.id] = None

    def put_back(self, id: ReplicaId, batch: RunningBatch) -> None:
        """A batch was taken out of `running` by mistake: it runs on."""
        self.running[id] = batch
        self.running = dict(sorted(self.running.items(), key=lambda each: each[1].id))

    def note_change(self, replica: Replica) -> None:
        """A replica has changed in what its view shows."""
        self._changed[replica.id] = None

    def views(self) -> tuple[ReplicaView, ...]:
        """All replicas but the draining ones as policies see them, in the order in which they were started. The view of
        a replica that has not changed is the same object as before, and so is the tuple if none has."""
        changed, views, is_new = self._changed, self._views, False
        before, running = self._seen_running, self.running
        if before or running:
            changed.update(dict.fromkeys(before.keys() - running.keys()))
            for id, batch in reversed(running.items()):  # the newest first
                if batch.id <= self._seen_batch:
                    break
                changed[id] = None
            self._seen_running = running.copy()
            if running:
                self._seen_batch = next(reversed(running.values())).id
        for id in changed:
            replica = self.replicas.get(id)
            if replica is None or replica.life is Life.DRAINING:
                is_new |= views.pop(id, None) is not None
            elif (view := replica.view()) != views.get(id):
                views[id], is_new = view, True
        changed.clear()
        if is_new:
            self._all_views = tuple(views.values())
        return self._all_views

    def add_idle(self, replica: Replica) -> None:
        """Add a ready replica without a batch to `idle`."""
        idle, id = self.idle, replica.id
        if not idle or id < idle[0].id:
            idle.appendleft(replica)
        elif id > idle[-1].id:
            idle.append(replica)
        else:
            idle.insert(bisect_left(idle, id, key=_ID_OF), replica)

    def remove_idle(self, replica: Replica) -> None:
        """Remove a ready replica without a batch from `idle`, because it must not get another batch."""
        at = bisect_left(self.idle, replica.id, key=_ID_OF)
        assert self.idle[at] is replica, f"replica {replica.id} is not idle"
        del self.idle[at]

    def service_rate(self, variant: str, slot: Slot, form: Form = ALONE, where: DeviceKey | None = None) -> ServiceRate:
        """The `ServiceRate` that all replicas of a variant on equal slots in the same form share; those on the device
        `where` have one of their own if the plan says another limit or rate for them."""
        placed = self._limits.placed
        place = where if placed and (variant, slot, form) in placed else None
        found = self._rates.get((variant, slot, form, place))
        if found is None:
            self._rates = {key: rate for key, rate in self._rates.items() if rate.replicas}
            belief = self._beliefs[variant, slot.hardware]
            belief = belief if form is ALONE else belief.of(form)
            used = millicores(slot.cores) + (millicores(form.shadow.cores) if form.shadow is not None else 0)
            found = ServiceRate(belief, slot, form, used, place, belief.shares(slot))
            self._rates[variant, slot, form, place] = found
            found.refresh(self._limits)
        return found

    def regroup(self) -> None:
        """The plan says for other replicas than before what depends on their device."""
        for replica in self.replicas.values():
            self._set_rate(replica, replica.slot, replica.form)

    def refresh(self) -> tuple[float, float]:
        """Reread all costs from the beliefs. Returns the believed capacity in full batches, in visits per nanosecond,
        of the ready replicas and of the starting replicas."""
        ready, starting, limits = 0.0, 0.0, self._limits
        for rate in self._rates.values():
            rate.refresh(limits)
            if rate.is_shared:
                ready += rate.capacity(Life.READY)
                starting += rate.capacity(Life.STARTING)
            elif rate.batch_max:
                per_ns = rate.batch_max / rate.costs_ns[rate.batch_max]
                ready += rate.ready * per_ns
                starting += rate.starting * per_ns
        if len({rate.slot.hardware for rate in self._rates.values() if rate.replicas}) > 1:
            alone_ns, full_ns = self.least_ns()
            for rate in self._rates.values():
                rate.least_alone_ns = min(rate.least_alone_ns, alone_ns)
                rate.least_full_ns = min(rate.least_full_ns, full_ns)
        return ready, starting

    def least_ns(self) -> LeastTimes:
        """Believed durations of a batch of one and of a full batch, each on the fastest ready replica; on the fastest
        starting replica if none is ready, and 0 without any replica."""
        rates = [rate for rate in self._rates.values() if rate.ready]
        rates = rates or [rate for rate in self._rates.values() if rate.starting]
        alone_ns = min((rate.costs_ns[1] for rate in rates if rate.batch_max), default=0)
        return alone_ns, min((rate.costs_ns[rate.batch_max] for rate in rates), default=0)

    def rate_rps(self, spec: ReplicaSpec) -> float:
        """Believed capacity of a replica that is alone on its device, in the largest batches that the plan allows:
        visits per second. Where the replicas of a plan will be neighbours is not known yet."""
        slot, form = spec.slot, ALONE if spec.shadow is None else Form(spec.shadow)
        belief = self._beliefs[spec.variant, slot.hardware]
        costs_ns = (belief if form is ALONE else belief.of(form)).costs_ns(slot)
        where = None if spec.node is None else (spec.node, spec.device or "")
        batch = min(self._limits.batch_max(spec.variant, slot, form, where), len(costs_ns) - 1)
        return batch * NS_PER_S / costs_ns[batch]

    def present_rps(self, id: ReplicaId) -> float:
        """`rate_rps` of one replica in its present form, on its present or its ordered cores, whichever are fewer."""
        replica = self.replicas[id]
        if replica.form.bounds:
            rate = replica.service_rate
            return rate.batch_max * NS_PER_S / rate.costs_ns[rate.batch_max] if rate.batch_max else 0.0
        spec = replica.spec.with_cores(min(replica.slot.cores, replica.target_cores))
        if replica.form.shadow is not None:
            spec = structs.replace(spec, shadow=replica.form.shadow)
        return self.rate_rps(spec)


@dataclass(slots=True, eq=False)
class RestartBackoff:
    """When a lost replica of a stage may be replaced. The delay grows while no batch finishes between the losses."""

    losses: int = 0
    """Replicas lost since a batch last finished."""
    not_before_ns: int = 0
    error: str = ""
    """Why the last replica was lost."""
    charged: int = 0
    """Losses that count for the delay."""
    found_out: int = 0
    """Losses of which a single request is the cause."""

    def lose(self, now_ns: int, *, is_found_out: bool = False) -> int:
        """Count a lost replica; returns the delay of its replacement in ns. Replicas that are lost before the
        replacement of an earlier one starts count as one loss, as when a node fails.

        `is_found_out` says that a single request is the cause. Then neither this loss nor those before it count, unless
        there were `FOUND_OUT_MAX` such losses already.
        """
        self.losses += 1
        if is_found_out and self.found_out < FOUND_OUT_MAX:
            self.found_out += 1
            self.charged, self.not_before_ns = 0, now_ns
            return 0
        if self.charged and now_ns <= self.not_before_ns:
            return self.not_before_ns - now_ns
        wait_ns = min(RESTART_NS_MAX, s(1) << min(self.charged - 1, 5)) if self.charged else 0
        self.charged += 1
        self.not_before_ns = now_ns + wait_ns
        return wait_ns

    def reset(self) -> None:
        """A batch has finished: what was lost before does not count any more."""
        self.losses = self.charged = self.found_out = 0


@dataclass(slots=True, eq=False)
class TimeEstimates:
    """A stage's time estimates for admission and drop policies, updated at every control tick."""

    startup_ns: int = 0
    """Time until the first replica is ready; 0 if a replica is ready."""
    visit_ns: int = 0
    """Time that each waiting visit adds to the drain time of the queue; 0 if unknown."""
    remaining_ns: int = 0
    """Least time from the end of this stage to the answer, in batches of one."""
    remaining_full_ns: int = 0
    """The same in full batches."""


class StageState:
    """One stage while it runs."""

    def __init__(
        self, name: str, after: tuple[str, ...], beliefs: Mapping[BeliefKey, Belief], order: Order, monitor: Monitor
    ) -> None:
        self.name = name
        self.after = after
        self.beliefs = beliefs
        self.application: ApplicationState
        """Set by the `ApplicationState` that it belongs to."""
        self.dispatch: Callable[[int, StageState, list[Action]], int]
        """Starts batches from its queue (`DataPath.dispatch`); set by the core."""
        self.runs_for_parts = False
        self.response_timeout_ns = 0
        """The response timeout that the stage declares; 0 for the default."""
        self.watched_ns = -1
        """The control path has looked at all running batches that began up to this instant, and looks at none of them
        again before `look_ns`, when the first of them is stalled or given up."""
        self.look_ns = FOREVER_NS
        self.is_disturbed = False
        """Whether a replica was lost since a batch last finished, or a batch runs whose requests have ended in part. If
        so, the data path calls `recover` when a batch finishes."""
        self.finishes_each = False
        """Whether the end of a batch needs more than an answer to each of its requests: in a graph, on a device that is
        shared, if `is_disturbed`, or while requests are open that have waited for a start. It stands for all of them,
        so that other batches look at one attribute."""
        self.queue = Queue(order)
        self.monitor = monitor
        self.limits = BatchLimits()
        self.pool = ReplicaPool(beliefs, self.limits)
        self.backoff = RestartBackoff()
        self.start_backoff = RestartBackoff()
        """The same for replicas that were lost before they could serve. Batches of other replicas do not reset it: they
        do not show that starts work."""
        self.avoided_ns: dict[str, int] = {}
        """By node on which a replica was lost before it could serve, until when others are preferred."""
        self.shadow_backoff = RestartBackoff()
        """How soon a lost shadow is replaced."""
        self.times = TimeEstimates()

    def follow(self, target: StagePlan) -> None:
        """Adopt a new plan."""
        if self.limits.follow(target):
            self.pool.regroup()
        self.refresh()

    def start_costs(self, spec: ReplicaSpec) -> StartCosts:
        """What a start consists of; weights of its own without a size if nobody has said."""
        found = self.application.parts.starts.get((self.name, spec.variant, spec.slot.hardware))
        return found or StartCosts(ModelWeights(f"{self.name}/{spec.variant}", 0))

    def refresh(self) -> None:
        """Recompute the estimates from the beliefs. Called when replicas change and at every control tick."""
        ready, starting = self.pool.refresh()
        self.times.startup_ns = 0 if ready else max(belief.startup_ns for belief in self.beliefs.values())
        capacity = ready or starting
        self.times.visit_ns = round(1 / capacity) if capacity else 0

    def lose(self, now_ns: int, error: str, *, is_found_out: bool, unstarted_on: str = "") -> int:
        """Count a lost replica; see `RestartBackoff.lose`. `unstarted_on` is the node of one that could not serve."""
        self.disturb()
        self.backoff.error = error
        wait_ns = self.backoff.lose(now_ns, is_found_out=is_found_out)
        if not unstarted_on:
            return wait_ns
        self.avoided_ns[unstarted_on] = now_ns + AVOIDED_NS
        return max(wait_ns, self.start_backoff.lose(now_ns))

    def can_start_on(self, node: str) -> None:
        """A replica on this node can serve."""
        self.avoided_ns.pop(node, None)
        self.start_backoff.reset()

    @property
    def not_before_ns(self) -> int:
        """When a lost replica may be replaced."""
        return max(self.backoff.not_before_ns, self.start_backoff.not_before_ns)

    def service_gap(self, now_ns: int) -> ServiceGap | None:
        """Why no replica serves now; None if one does."""
        lives = [replica.life for replica in self.pool.replicas.values()]
        if Life.READY in lives:
            return None
        name, starting = declared_name(self.name), lives.count(Life.STARTING)
        begun = [each.since_ns for each in self.pool.replicas.values() if each.life is Life.STARTING]
        waited_ns, usual_ns = now_ns - min(begun, default=now_ns), self.times.startup_ns
        if not self.backoff.losses and not self.start_backoff.charged:
            why, is_late = f"no replica of stage {name!r} is ready ({starting} starting", False
            if starting and waited_ns > max(SLOW_NS_MIN, SLOW_FACTOR * usual_ns):
                is_late = True
                why += f" for {waited_ns // NS_PER_S} s, where {number(usual_ns / NS_PER_S)} s are usual"
            return ServiceGap(f"{why})", is_late, max(NS_PER_S, usual_ns - waited_ns))
        wait_ns = max(0, self.not_before_ns - now_ns)
        then = f"next attempt in {max(1, round(wait_ns / NS_PER_S))} s" if wait_ns else "next attempt at once"
        then = "another attempt runs" if starting else then
        can = "can start" if self.start_backoff.charged else "is ready"
        why = f"no replica of stage {name!r} {can}: {self.backoff.error}; {then}"
        return ServiceGap(why, is_known=True, wait_ns=max(NS_PER_S, wait_ns + usual_ns - waited_ns))

    def preferred(self, now_ns: int, sites: Sequence[Site]) -> Sequence[Site]:
        """These sites without the avoided nodes, unless there is no other."""
        return [site for site in sites if self.avoided_ns.get(site.node.node.name, 0) <= now_ns] or sites

    def recover(self) -> None:
        """A batch has finished: the stage works."""
        self.backoff.reset()
        self.is_disturbed = any(batch.ended for batch in self.pool.running.values())
        self.choose_finish()

    def disturb(self) -> None:
        """Something is wrong: look closely at each batch that finishes, until one of them shows that it is over."""
        self.is_disturbed = self.finishes_each = True

    def choose_finish(self) -> None:
        """Set `finishes_each`."""
        is_graph = self.application.open_requests is not None
        is_shared = any(belief.shares_device for belief in self.beliefs.values())
        self.finishes_each = is_graph or is_shared or self.is_disturbed or bool(self.application.woken)

    def give_up_ns(self, batch: RunningBatch) -> int:
        """When the replica of a batch is given up if the batch has not finished: after the declared response timeout;
        by default after `STALL_FACTOR` times its believed duration, and not before `RESPONSE_NS_MIN` and the deadline
        of the application have passed."""
        slo_ns = self.application.graph.slo_ns
        default_ns = max(RESPONSE_NS_MIN, slo_ns, STALL_FACTOR * batch.cost_ns)
        return batch.started_ns + (self.response_timeout_ns or default_ns)

    def hangs(self, replica: Replica, batch: RunningBatch, silent_ns: int) -> bool:
        """Whether a worker that has been silent for so long while it ran a batch hangs. Not in its first batch, which
        may take far longer than others, nor if the stage declares a response timeout, nor in the second try of a
        request: the first worker may only have been slow, so this one gets all of the response timeout."""
        if self.response_timeout_ns or replica.batches < 2 or any(visit.attempts for visit in batch.visits):
            return False
        return silent_ns >= max(SILENT_NS_MIN, STALL_FACTOR * batch.cost_ns)

    def view(self, slo_ns: int, visits: float) -> StageView:
        """The stage as policies see it: without its draining replicas."""
        return StageView(
            name=self.name,
            slo_ns=slo_ns,
            after=self.after,
            beliefs=self.beliefs,
            replicas=self.pool.views(),
            queue=tuple(self.queue.visits),
            running=self.monitor.running,
            buckets=tuple(self.monitor.buckets),
            bucket_ns=self.monitor.bucket_ns,
            visits=visits,
        )


class ApplicationState:
    """One version of an application while it runs. Fields that an application of one stage does not need are None, so
    that its requests do not pay for them."""

    def __init__(self, parts: ApplicationParts, replicas: dict[ReplicaId, Replica], now_ns: int = 0) -> None:
        graph, policies = parts.graph, parts.policies
        bucket_ns = min(policies.scale.period_ns, BUCKET_NS_MAX)
        by_stage: dict[str, dict[BeliefKey, Belief]] = {name: {} for name in graph.stages}
        for (name, variant, hardware), belief in parts.beliefs.items():
            by_stage[name][variant, hardware] = belief
        stages = [
            StageState(name, stage.after, by_stage[name], policies.order, Monitor(bucket_ns, now_ns))
            for name, stage in graph.stages.items()
        ]
        for stage in stages:
            stage.application = self
            stage.runs_for_parts = bool(graph.scopes[stage.name])
            stage.response_timeout_ns = parts.response_timeouts_ns.get(stage.name, 0)
        is_graph = len(stages) > 1
        self.parts = parts
        self.key = parts.key
        self.graph = graph
        self.stages = {stage.name: stage for stage in stages}
        self.all_stages = tuple(stages)
        self.entries = tuple(self.stages[name] for name in graph.entries)
        self.replicas = replicas
        """Of all applications."""
        self.open_requests: dict[RequestId, RequestProgress] | None = {} if is_graph else None
        """Requests on their way through several stages. None for one stage, where a request makes only one visit."""
        self.ingress = Monitor(bucket_ns, now_ns) if is_graph else stages[0].monitor
        """Arrivals at the application. With several stages, all open requests count as waiting."""
        self.visit_rates = VisitRates(graph) if is_graph and not (graph.is_plain and not graph.declared_paths) else None
        """None if every request visits every stage once."""
        self.edge_history = EdgeHistory(graph) if is_graph and not (graph.is_plain or graph.declared_paths) else None
        """None if every request visits every stage once, or only along declared paths."""
        self.refuses = ""
        """Why new requests are rejected; empty if they are admitted. Set by `refuse`."""
        self.is_waking = parts.wake_ns > 0
        """Whether requests that arrive may wait for `wake_ns`: its first replicas, or those after a rest, are not ready
        yet. Set by `set_waking`."""
        self.is_special = self.is_waking
        """Whether arrivals are refused or may wait for a start: the one thing that others look at."""
        self.has_been_awake = not self.is_waking
        """Whether its first replicas have been ready, perhaps before a rest."""
        self.woken: dict[RequestId, int] = {}
        """Open requests that arrived while it was waking, and until when (ns) each may wait for a start."""
        self.expected_ns = 0
        """The latest instant (ns) at which a client of such a request was told to come back."""
        for stage in stages:
            stage.choose_finish()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        if self.open_requests:
            return False
        return all(not stage.queue.visits and not stage.monitor.running for stage in self.all_stages)

    def refuse(self, why: str) -> None:
        """Reject new requests from now on; admit them if `why` is empty."""
        self.refuses = why
        self.is_special = bool(why) or self.is_waking

    def set_waking(self, is_waking: bool) -> None:
        """From now on, requests that arrive may wait for a start, or not."""
        self.is_waking = is_waking
        self.is_special = bool(self.refuses) or is_waking

    def wait_for_start(self, request: Request) -> Request:
        """A request arrives while `is_waking`; returns it with the deadline until which it may wait. It is served late
        if its own deadline has passed."""
        until_ns = max(request.deadline_ns, request.arrived_ns + self.parts.wake_ns)
        self.woken[request.id] = until_ns
        for stage in self.all_stages:
            stage.finishes_each = True
        return structs.replace(request, deadline_ns=until_ns)

    def forget_woken(self, request: RequestId) -> None:
        """A request has ended; the last one of those that waited for a start makes the others cheap again."""
        if self.woken.pop(request, None) is not None and not self.woken:
            for stage in self.all_stages:
                stage.choose_finish()

    def longest_gap(self, now_ns: int) -> ServiceGap:
        """Why not all of its stages serve, of the stage that is expected to take longest."""
        gaps = [gap for stage in self.all_stages if (gap := stage.service_gap(now_ns)) is not None]
        return max(gaps, key=lambda gap: gap.wait_ns, default=ServiceGap("it starts", is_known=False, wait_ns=NS_PER_S))

    def visits(self) -> Mapping[str, float]:
        """Estimated mean number of visits of a request to each stage."""
        return self.visit_rates.visits() if self.visit_rates is not None else dict.fromkeys(self.stages, 1.0)

    def stage_views(self) -> tuple[StageView, ...]:
        """The stages as scaling policies see them."""
        visits, slo_ns = self.visits(), self.graph.slo_ns
        return tuple([stage.view(slo_ns, visits[stage.name]) for stage in self.all_stages])

    def roll(self, now_ns: int) -> None:
        """Close the monitoring buckets that have ended, and recompute the estimates."""
        for stage in self.all_stages:
            stage.monitor.roll(now_ns)
            stage.refresh()
        if self.open_requests is not None:
            self.ingress.roll(now_ns)
            self.update_remaining_times()
        if self.visit_rates is not None:
            self.visit_rates.age(now_ns)

    def update_remaining_times(self) -> None:
        """Recompute each stage's lower bound of the time to the answer."""
        least_ns = {name: stage.pool.least_ns() for name, stage in self.stages.items()}
        for name, remaining_ns in remaining_times(self.graph, least_ns, self.edge_history).items():
            times = self.stages[name].times
            times.remaining_ns, times.remaining_full_ns = remaining_ns

    def refresh(self, stage: StageState) -> None:
        """Recompute the estimates after a change of the stage's replicas."""
        stage.refresh()
        if self.open_requests is not None:
            self.update_remaining_times()


class State:
    """All applications, and what they share: replicas and nodes."""

    def __init__(self, ledger: Ledger) -> None:
        self.applications: dict[str, ApplicationState] = {}
        """By key."""
        self.replicas: dict[ReplicaId, Replica] = {}
        self.ledger = ledger
        self.weights = WeightRegistry(ledger)
        self.devices: dict[DeviceKey, DeviceLoad] = {}
        """What runs on each device, if the beliefs say how replicas share it; none for devices where nothing runs."""
        self.next_replica = 0
        self.next_shadow = 0
        self.next_pipeline = 0
        self.dissolving: dict[PipelineId, LayerPipeline] = {}
        """Pipelines that are complete and still run batches."""

    def set_life(self, now_ns: int, replica: Replica, life: Life) -> None:
        """Move a replica to another state."""
        stage, before = replica.stage, replica.life
        stage.pool.set_life(replica, life)
        replica.since_ns = now_ns
        if Life.READY in (before, life) and before is not life:
            stage.monitor.ready(now_ns, replica.millicores if life is Life.READY else -replica.millicores)
        if life is Life.READY and (stage.avoided_ns or stage.start_backoff.charged):
            stage.can_start_on(replica.node)
        self._refresh(stage)

    def set_cores(self, now_ns: int, replica: Replica, cores: float) -> None:
        """Record that a resize took effect."""
        before = replica.millicores
        replica.stage.pool.set_cores(replica, cores)
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, replica.millicores - before)
        self._refresh(replica.stage)

    def set_form(self, now_ns: int, replica: Replica, form: Form) -> None:
        """Record that a replica serves in another form from now on."""
        before = replica.millicores
        replica.stage.pool.set_form(replica, form)
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, replica.millicores - before)
        self._refresh(replica.stage)

    def forget(self, now_ns: int, replica: Replica, out: list[Action]) -> None:
        """Remove a replica that has stopped or is lost, free its reservation, and cancel its transfer if nobody else
        waits for it."""
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, -replica.millicores)
        self.ledger.release(replica.id)
        if replica.pipeline is not None:
            del replica.pipeline.members[replica.id]
        if replica.is_provided:
            out += self.weights.leave(now_ns, replica.id, replica.transfer)
        del self.replicas[replica.id]
        replica.stage.pool.remove(replica)
        self._refresh(replica.stage)

    def _refresh(self, stage: StageState) -> None:
        stage.application.refresh(stage)
