"""All that changes while sloop runs: queues, replicas, open requests. Only the data and control paths change it.

It does not know who drives it: nothing here can tell a live server from a simulated one. In order of reading:

    Queue            what waits at a stage, and when that is next searched for passed deadlines
    BatchLimits      what the plan in force allows at a stage
    ServiceRate      how fast equal replicas are believed to be
    Replica          one of them, from the order to start it until it is gone; with its `RunningBatch`
    ReplicaPool      a stage's replicas: which are idle, what they can do together
    RestartBackoff   how soon a lost replica is replaced
    TimeEstimates    what admission and drop policies are shown of a stage
    StageState       one of each of these
    State            all stages, and what belongs to none of them
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from sloop.app.graph import Graph
from sloop.app.progress import RequestProgress
from sloop.core.graph_estimates import EdgeHistory, LeastTimes, VisitRates, remaining_times
from sloop.core.ledger import Ledger, millicores
from sloop.core.monitor import Monitor
from sloop.core.protocols import Order
from sloop.core.views import Belief, ReplicaView, StageView
from sloop.units import FOREVER_NS, NS_PER_S, s
from sloop.vocabulary import BatchId, Life, Node, ReplicaId, ReplicaSpec, RequestId, StagePlan, Visit

STUCK_FACTOR = 20
STUCK_NS_MIN = s(10)
"""A batch that takes 20 times its believed duration, and at least this long, counts as lost. Both are generous: beliefs
may be wrong by a factor of a few, the first batch after a start may be slow, and a replica stopped in vain costs a cold
start while its requests wait."""

RESTART_NS_MAX = s(30)
"""Lost replicas are replaced at once, then after 1, 2, 4, … seconds, at most this. Kubernetes doubles from 10 s to 5
min (CrashLoopBackOff); a model server that answers within milliseconds cannot wait that long for its only replica."""


class Queue:
    """Waiting visits, first to serve first. Equal keys keep the order in which they came.

    Two parallel lists, bisected on insertion, where the obvious choice is a heap: deadlines and arrivals come nearly in
    order, so an insertion lands near the end and moves few pointers, and policies read `visits` as the sorted list it
    is. `visits` stays the same list object for good: the data path holds on to it.
    """

    def __init__(self, order: Order) -> None:
        self._key = order.key
        self._keys: list[int] = []
        self.visits: list[Visit] = []
        self.sweep_ns = FOREVER_NS
        """When to look for passed deadlines next: not after the first one in the queue; `FOREVER_NS` if it is empty."""

    def push(self, now_ns: int, visit: Visit) -> None:
        """A visit begins to wait."""
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

    def take(self, count: int) -> list[Visit]:
        """Remove and return the first `count` ≥ 1 visits of a queue that is not empty; all of them if there are
        fewer."""
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
        """Remove the visits at these ascending indices, in one pass: they may be the thousand parts of one request."""
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
    """The largest batches and the longest wait for one that the plan in force allows at a stage."""

    default: int = 1
    by_variant: dict[str, int] = field(default_factory=dict)
    wait_ns: int = 0
    """How long a full batch is worth waiting for."""

    def follow(self, target: StagePlan) -> None:
        """A plan comes into force. Variants that it does not mention keep the limit of the last plan that did: until
        their replicas are replaced, they go on as planned."""
        self.default, self.wait_ns = target.batch_max, target.wait_ns
        self.by_variant |= {group.spec.variant: target.batch_max for group in target.groups if group.count}

    def batch_max(self, variant: str) -> int:
        """The largest batch for replicas of a variant; the variant itself may take less."""
        return self.by_variant.get(variant, self.default)


@dataclass(slots=True, eq=False)
class ServiceRate:
    """The believed speed of one variant on a number of cores, shared by all replicas of a stage that are equal so.

    Replicas share it so that a control tick costs the same for four replicas and for four hundred.
    """

    belief: Belief
    cores: float
    millicores: int
    costs_ns: Sequence[int] = (0,)
    """Believed durations by size of a batch."""
    batch_max: int = 0
    """The largest batch these replicas are sent."""
    replicas: int = 0
    """How many replicas share it, in whatever state of life."""
    ready: int = 0
    starting: int = 0

    def refresh(self, batch_max: int) -> None:
        """Take over what the belief has learnt; `batch_max` is the largest batch that the plan allows."""
        self.costs_ns = costs_ns = self.belief.costs_ns(self.cores)
        self.batch_max = min(batch_max, len(costs_ns) - 1)

    def count(self, life: Life, change: int) -> None:
        """Add `change` replicas in this state of life."""
        self.replicas += change
        if life is Life.READY:
            self.ready += change
        elif life is Life.STARTING:
            self.starting += change


class RunningBatch(Struct, frozen=True, gc=False):
    """A batch in service, on the cores its replica had when it began."""

    id: BatchId
    visits: list[Visit]
    started_ns: int
    cores: float
    millicores: int
    costs_ns: Sequence[int]

    @property
    def stuck_ns(self) -> int:
        """When the replica is given up if the batch has not finished."""
        return self.started_ns + max(STUCK_NS_MIN, STUCK_FACTOR * self.costs_ns[len(self.visits)])


@dataclass(slots=True, eq=False)
class Replica:
    """A replica from the order to start it until it has stopped or is lost."""

    id: ReplicaId
    spec: ReplicaSpec
    stage: "StageState"
    since_ns: int
    """When it entered its state of life."""
    life: Life = Life.STARTING
    service_rate: ServiceRate = field(init=False)
    cores: float = field(init=False)
    """Cores in effect."""
    millicores: int = field(init=False)
    target_cores: float = field(init=False)
    """Cores last asked for; differs from `cores` while a resize is under way."""
    resizing: int = 0
    """Resizes ordered and not yet in effect. Until there is none, the most that was asked for stays reserved."""
    batch: RunningBatch | None = None
    batches: int = 0
    """Batches it has been sent so far."""

    def __post_init__(self) -> None:
        self.cores = self.target_cores = self.spec.cores
        self.service_rate = self.stage.pool.service_rate(self.spec.variant, self.cores)
        self.millicores = self.service_rate.millicores

    @property
    def will_free_cores(self) -> bool:
        """Whether it stops or shrinks, so that others soon find room."""
        return self.life is Life.DRAINING or (self.resizing > 0 and self.target_cores < self.cores)

    def view(self) -> ReplicaView:
        """As policies see it, with the cores it was last asked to have."""
        spec = self.spec
        if spec.cores != self.target_cores:
            spec = ReplicaSpec(spec.stage, spec.variant, self.target_cores, spec.node, spec.device, spec.share)
        running = len(self.batch.visits) if self.batch else 0
        return ReplicaView(id=self.id, spec=spec, life=self.life, since_ns=self.since_ns, running=running)


class ReplicaPool:
    """The replicas of one stage, which of them are idle, and what they can do together.

    Every replica in it counts in its `ServiceRate` under its state of life; every ready one without a batch is in
    `idle`, and no other.
    """

    def __init__(self, beliefs: Mapping[str, Belief], limits: BatchLimits) -> None:
        self._beliefs = beliefs
        self._limits = limits
        self._rates: dict[tuple[str, float], ServiceRate] = {}
        """By variant and cores."""
        self.replicas: dict[ReplicaId, Replica] = {}
        self.idle: deque[Replica] = deque()
        """Sorted by id, so that route policies choose from the same sequence whatever the order of events."""
        self.last = ReplicaId(-1)
        """The replica the route policy chose last."""

    @property
    def is_changing(self) -> bool:
        """Whether a replica starts, drains or is being resized: whether there may soon be more room or more
        capacity."""
        return any(r.life is not Life.READY or r.resizing for r in self.replicas.values())

    def add(self, replica: Replica) -> None:
        """A replica is ordered."""
        self.replicas[replica.id] = replica
        replica.service_rate.count(replica.life, 1)

    def set_life(self, replica: Replica, life: Life) -> None:
        """A replica enters a state of life."""
        replica.service_rate.count(replica.life, -1)
        replica.life = life
        replica.service_rate.count(life, 1)

    def set_cores(self, replica: Replica, cores: float) -> None:
        """A replica runs on other cores from now on."""
        replica.service_rate.count(replica.life, -1)
        replica.service_rate = self.service_rate(replica.spec.variant, cores)
        replica.service_rate.count(replica.life, 1)
        replica.cores = cores
        replica.millicores = replica.service_rate.millicores

    def remove(self, replica: Replica) -> None:
        """A replica is gone."""
        if replica.life is Life.READY and replica.batch is None:
            self.remove_idle(replica)
        del self.replicas[replica.id]
        replica.service_rate.count(replica.life, -1)

    def add_idle(self, replica: Replica) -> None:
        """A ready replica has no batch any more."""
        idle, id = self.idle, replica.id
        if not idle or id > idle[-1].id:
            idle.append(replica)
        elif id < idle[0].id:
            idle.appendleft(replica)
        else:
            idle.insert(bisect_left(idle, id, key=_id_of), replica)

    def remove_idle(self, replica: Replica) -> None:
        """A ready replica without a batch is to get none."""
        at = bisect_left(self.idle, replica.id, key=_id_of)
        assert self.idle[at] is replica, f"replica {replica.id} is not idle"
        del self.idle[at]

    def service_rate(self, variant: str, cores: float) -> ServiceRate:
        """The one that all replicas of a variant on `cores` cores share."""
        found = self._rates.get((variant, cores))
        if found is None:
            self._rates = {key: rate for key, rate in self._rates.items() if rate.replicas}
            self._rates[variant, cores] = found = ServiceRate(self._beliefs[variant], cores, millicores(cores))
            found.refresh(self._limits.batch_max(variant))
        return found

    def refresh(self) -> tuple[float, float]:
        """Take over what beliefs have learnt; returns how many visits a nanosecond the ready replicas are believed to
        serve in full batches, and how many those that start."""
        ready, starting, limits = 0.0, 0.0, self._limits
        for (variant, _), rate in self._rates.items():
            rate.refresh(limits.by_variant.get(variant, limits.default))
            if rate.batch_max:
                per_ns = rate.batch_max / rate.costs_ns[rate.batch_max]
                ready += rate.ready * per_ns
                starting += rate.starting * per_ns
        return ready, starting

    def least_ns(self) -> LeastTimes:
        """Believed durations of a batch of one and of a full one on the fastest ready replicas; on the fastest that
        start where none is ready, and 0 without any."""
        rates = [rate for rate in self._rates.values() if rate.ready]
        rates = rates or [rate for rate in self._rates.values() if rate.starting]
        alone_ns = min((rate.costs_ns[1] for rate in rates if rate.batch_max), default=0)
        return alone_ns, min((rate.costs_ns[rate.batch_max] for rate in rates), default=0)

    def rate_rps(self, variant: str, cores: float) -> float:
        """Visits per second that a replica of `variant` on `cores` cores is believed to serve in the largest batches
        that the plan allows."""
        costs_ns = self._beliefs[variant].costs_ns(cores)
        batch = min(self._limits.batch_max(variant), len(costs_ns) - 1)
        return batch * NS_PER_S / costs_ns[batch]

    def present_rps(self, id: ReplicaId) -> float:
        """The same of one replica, on the cores it has, or on those it will have if they are fewer."""
        replica = self.replicas[id]
        return self.rate_rps(replica.spec.variant, min(replica.cores, replica.target_cores))


def _id_of(replica: Replica) -> ReplicaId:
    return replica.id


@dataclass(slots=True, eq=False)
class RestartBackoff:
    """When a lost replica of a stage is replaced: ever later while no batch finishes between the losses."""

    losses: int = 0
    """Replicas lost since the last batch that finished; the data path sets it back."""
    not_before_ns: int = 0

    def lose(self, now_ns: int) -> int:
        """A replica is lost; returns how long its replacement has to wait."""
        wait_ns = min(RESTART_NS_MAX, s(1) << min(self.losses - 1, 5)) if self.losses else 0
        self.losses += 1
        self.not_before_ns = now_ns + wait_ns
        return wait_ns


@dataclass(slots=True, eq=False)
class TimeEstimates:
    """What is believed about time at a stage, for admission and drop policies. Kept between control ticks."""

    startup_ns: int = 0
    """Until the first replica is ready; 0 where one is."""
    visit_ns: int = 0
    """By how much each waiting visit lengthens the queue; 0 where that is unknown."""
    remaining_ns: int = 0
    """Least time from leaving this stage to the answer, in batches of one."""
    remaining_full_ns: int = 0
    """The same in full batches."""


class StageState:
    """One stage while it runs."""

    def __init__(
        self, name: str, after: tuple[str, ...], beliefs: Mapping[str, Belief], order: Order, bucket_ns: int
    ) -> None:
        self.name = name
        self.after = after
        self.beliefs = beliefs
        """By variant."""
        self.runs_for_parts = False
        self.queue = Queue(order)
        self.monitor = Monitor(bucket_ns)
        self.limits = BatchLimits()
        self.pool = ReplicaPool(beliefs, self.limits)
        self.backoff = RestartBackoff()
        self.times = TimeEstimates()

    def follow(self, target: StagePlan) -> None:
        """A plan comes into force."""
        self.limits.follow(target)
        self.refresh()

    def refresh(self) -> None:
        """Take over what beliefs have learnt. Called when replicas change and at every control tick."""
        ready, starting = self.pool.refresh()
        self.times.startup_ns = 0 if ready else max(belief.startup_ns for belief in self.beliefs.values())
        capacity = ready or starting
        self.times.visit_ns = round(1 / capacity) if capacity else 0

    def view(self, slo_ns: int, visits: float) -> StageView:
        """As policies see it. Draining replicas are gone for them."""
        return StageView(
            name=self.name,
            slo_ns=slo_ns,
            after=self.after,
            variants=self.beliefs,
            replicas=tuple(r.view() for r in self.pool.replicas.values() if r.life is not Life.DRAINING),
            queue=tuple(self.queue.visits),
            running=self.monitor.running,
            buckets=tuple(self.monitor.buckets),
            bucket_ns=self.monitor.bucket_ns,
            visits=visits,
        )


class State:
    """The whole of it. What an application of one stage does not need is None, so that its requests do not pay for
    it."""

    def __init__(self, stages: Sequence[StageState], graph: Graph, nodes: Sequence[Node]) -> None:
        is_graph = len(stages) > 1
        self.graph = graph
        self.slo_ns = graph.slo_ns
        self.stages = {stage.name: stage for stage in stages}
        for stage in stages:
            stage.runs_for_parts = bool(graph.scopes[stage.name])
        self.entries = tuple(self.stages[name] for name in graph.entries)
        self.replicas: dict[ReplicaId, Replica] = {}
        self.ledger = Ledger(nodes)
        self.open_requests: dict[RequestId, RequestProgress] | None = {} if is_graph else None
        """Requests on their way through several stages. None for one stage: there, a request is its only visit."""
        self.ingress = Monitor(stages[0].monitor.bucket_ns) if is_graph else stages[0].monitor
        """What comes to the application as a whole; of several stages, all open requests count as waiting."""
        self.visit_rates = VisitRates(graph) if is_graph and not (graph.is_plain and not graph.declared_paths) else None
        """None where every request visits every stage once."""
        self.edge_history = EdgeHistory(graph) if is_graph and not (graph.is_plain or graph.declared_paths) else None
        """None where nothing but declared paths decides which stages a request still has to visit."""
        self.next_replica = 0
        self.draining = False

    def visits(self) -> Mapping[str, float]:
        """How often a request visits each stage, as far as is known."""
        return self.visit_rates.visits() if self.visit_rates is not None else dict.fromkeys(self.stages, 1.0)

    def update_remaining_times(self) -> None:
        """Estimate again how long requests have to go from each stage on."""
        least_ns = {name: stage.pool.least_ns() for name, stage in self.stages.items()}
        for name, remaining_ns in remaining_times(self.graph, least_ns, self.edge_history).items():
            times = self.stages[name].times
            times.remaining_ns, times.remaining_full_ns = remaining_ns

    def set_life(self, now_ns: int, replica: Replica, life: Life) -> None:
        """A replica enters a state of life."""
        stage, before = replica.stage, replica.life
        stage.pool.set_life(replica, life)
        replica.since_ns = now_ns
        if Life.READY in (before, life) and before is not life:
            stage.monitor.ready(now_ns, replica.millicores if life is Life.READY else -replica.millicores)
        self._refresh(stage)

    def set_cores(self, now_ns: int, replica: Replica, cores: float) -> None:
        """A resize took effect."""
        before = replica.millicores
        replica.stage.pool.set_cores(replica, cores)
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, replica.millicores - before)
        self._refresh(replica.stage)

    def forget(self, now_ns: int, replica: Replica) -> None:
        """A replica is gone: free all that it reserved."""
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, -replica.millicores)
        self.ledger.release(replica.id)
        del self.replicas[replica.id]
        replica.stage.pool.remove(replica)
        self._refresh(replica.stage)

    def _refresh(self, stage: StageState) -> None:
        stage.refresh()
        if self.open_requests is not None:
            self.update_remaining_times()
