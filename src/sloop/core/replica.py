"""A stage's replicas: each from the order to start it until it is gone, and which of them are idle."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from sloop.actions import Decided
from sloop.core.graph_estimates import LeastTimes
from sloop.core.ledger import spec_millicores
from sloop.core.life import WorkerState
from sloop.core.rates import BatchLimits, DeviceKey, DeviceLoad, RateKey, ServiceRate, cost_of
from sloop.core.views import Belief, BeliefKey, ReplicaView
from sloop.text import in_s
from sloop.transient import Transient
from sloop.units import FOREVER_NS, NS_PER_S, s
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Life,
    ReplicaId,
    ReplicaSpec,
    RequestId,
    Shape,
    Slot,
    TransferId,
    Visit,
    Worker,
    WorkerId,
    bounds_of,
)

if TYPE_CHECKING:
    from sloop.core.stage import StageState

STALL_FACTOR = 20
STALL_NS_MIN = s(1)
"""A batch that has run for 20 times its believed duration, and for at least a second, is stalled: those of its requests
that the drop policy finds hopeless do not wait for it any longer. The belief is about the slowest of a hundred batches
and may be wrong by a factor of a few, and a machine may stand still for some hundred milliseconds."""


class RunningBatch(Struct, frozen=True, gc=False):
    """A batch in service, with the slot and the shape that its replica had when the batch began."""

    id: BatchId
    visits: list[Visit]
    started_ns: int
    rate: ServiceRate
    """Whose belief learns from it."""
    rows: int
    ended: frozenset[RequestId] = frozenset()
    """Requests that have ended although the batch still runs; only in an application of one stage."""
    load: DeviceLoad | None = None
    """What runs on its device, if the belief says how replicas share it."""

    @property
    def cost_ns(self) -> int:
        """Its believed duration."""
        if self.load is None:
            return cost_of(self.rate.costs_ns, self.rows)
        return round(cost_of(self.rate.profiled_ns, self.rows) * self.load.slowdown(self.id))

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


class ReplicaWorker(Struct, eq=False):
    """A worker of a replica, from the order to start it until it has stopped or is lost."""

    id: WorkerId
    replica: "Replica"
    shadow: Worker | None = None
    """What it is if it is not the first one."""
    state: WorkerState = WorkerState.STARTING

    @property
    def drains(self) -> bool:
        """Whether it was told to stop, alone or with its replica."""
        return self.state is WorkerState.DRAINING or self.replica.life is Life.DRAINING

    def loss(self, error: str, wait_ns: int) -> Decided:
        """That it is lost, and when another one starts, for the log."""
        stage, when = self.replica.stage, f"in {in_s(wait_ns)}" if wait_ns else "at once"
        kind, why = "lost", f"{error}; a replacement starts {when}"
        if self.shadow is not None:
            kind, why = "shadow", f"its shadow is lost: {error}; another one starts {when}"
        return Decided(kind, why, stage.name, self.replica.id, application=stage.application.key)


def shape_of(shadows: Iterable[ReplicaWorker]) -> Shape:
    """The shape of a replica with these workers beside its first one."""
    return tuple([worker.shadow for worker in shadows if worker.shadow is not None])


@dataclass(slots=True, eq=False)
class Replica:
    """A replica from the order to start it until it has stopped or is lost."""

    id: ReplicaId
    spec: ReplicaSpec
    """What the plan asked for; the cores may have changed since."""
    stage: "StageState"
    since_ns: int
    """When its life became what it is."""
    node: str
    device: str | None = None
    life: Life = Life.STARTING
    """That of its state (`LIVES`)."""
    workers: list[ReplicaWorker] = field(init=False)
    """The first one takes its batches; a second one is its shadow. Each has a reservation until it is gone."""
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
    shape: Shape = ALONE
    """In effect."""
    is_provided: bool = False
    """Whether a provision policy has brought its weights, so that the core knows of them."""
    transfer: TransferId | None = None
    """The transfer for which its start waits, or has waited; of a part, later the one that brings the other layers."""
    part: Worker | None = None
    """The layers that it has, if it has not all."""
    pipeline: "LayerPipeline | None" = None
    """In which it serves, or will."""
    completes: bool = False
    """Whether it gets the other layers; only if it has started as a part."""

    def __post_init__(self) -> None:
        self.workers = [ReplicaWorker(self.id, self)]
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
    def state(self) -> WorkerState:
        """That of its first worker."""
        return self.workers[0].state

    @property
    def shadows(self) -> list[ReplicaWorker]:
        """Its workers beside the first one, without those that were told to stop."""
        return [worker for worker in self.workers[1:] if worker.state is not WorkerState.DRAINING]

    @property
    def will_free_cores(self) -> bool:
        """Whether one of its workers stops, or it shrinks, so that other replicas soon have room."""
        is_shrinking = self.resizing > 0 and self.target_cores < self.slot.cores
        return is_shrinking or any(worker.state is WorkerState.DRAINING for worker in self.workers)

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
        if len(self.workers) > 1:
            spec = structs.replace(spec, shape=shape_of(self.shadows))
        running = batch.rows if batch else 0
        return ReplicaView(self.id, spec, self.life, self.since_ns, running, self.node, self.device, self.shape)


@dataclass(slots=True, eq=False)
class LayerPipeline:
    """Replicas that start as parts of one model and serve together until each of them has all layers."""

    started: tuple[Replica, ...]
    """In the order of their parts."""
    completed_ns: int = -1
    """When the last of them got all layers; -1 before. Batches that began until then run in the pipeline."""
    silent: tuple[BatchId, ReplicaId] | None = None
    """The batch with which a part was silent last (`BatchSilent`), and that part."""

    @property
    def id(self) -> ReplicaId:
        """That of the first one."""
        return self.started[0].id

    @property
    def members(self) -> list[Replica]:
        """Those that are there, in the order of their parts."""
        return [replica for replica in self.started if replica.pipeline is self]

    @property
    def is_stopping(self) -> bool:
        """Whether its members were told to stop: they are as soon as none of them runs a batch."""
        return not self.has_batch and all(member.life is Life.DRAINING for member in self.members)

    @property
    def is_ready(self) -> bool:
        """Whether all have their parts, so that they serve."""
        return all(member.state is not WorkerState.STARTING for member in self.members)

    @property
    def is_complete(self) -> bool:
        """Whether all have all layers."""
        return all(member.part is None for member in self.members)

    @property
    def has_batch(self) -> bool:
        """Whether any member runs a batch."""
        return any(member.batch is not None for member in self.members)

    @property
    def oldest(self) -> Replica | None:
        """The member with the oldest batch; the batches of all others wait for it."""
        running = [member for member in self.members if member.batch is not None]
        return min(running, key=_batch_of, default=None)

    @property
    def runs_batches(self) -> bool:
        """Whether a batch is in the pipeline that began before it was complete."""
        batches = [member.batch for member in self.members]
        return any(batch is not None and not 0 <= self.completed_ns < batch.started_ns for batch in batches)


_batch_of = attrgetter("batch.id")
_ID_OF = attrgetter("id")
"""A key for bisection that costs no call of a Python function."""


class SeenReplicas(Transient):
    """The views of replicas that were made last; none at first."""

    __slots__ = ("all_views", "batch", "changed", "running", "views")

    def __init__(self) -> None:
        self.changed: dict[ReplicaId, None] = {}
        """Replicas that have changed since their view was made, in another way than by their batch."""
        self.views: dict[ReplicaId, ReplicaView] = {}
        """Without draining replicas; out of date for those that have changed."""
        self.all_views: tuple[ReplicaView, ...] = ()
        self.running: dict[ReplicaId, RunningBatch] = {}
        """The batches that ran when the views were made."""
        self.batch = BatchId(-1)
        """The last of them to begin."""


class ReplicaPool:
    """The replicas of one stage, which of them are idle, and how much they can serve together.

    Every replica is counted in its `ServiceRate` under its state; `idle` holds exactly the ready replicas without a
    batch. Views of replicas are kept, so that a control tick costs nothing for those that have not changed.
    """

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
        self._seen = SeenReplicas()

    @property
    def rates(self) -> Iterable[ServiceRate]:
        """The speeds of all replicas, one for each variant, slot and shape."""
        return self._rates.values()

    @property
    def is_changing(self) -> bool:
        """Whether a replica starts or is being resized, or a worker stops, so that room or capacity may soon grow."""
        return any(r.life is not Life.READY or r.resizing or r.will_free_cores for r in self.replicas.values())

    def add(self, replica: Replica) -> None:
        """Add a replica whose start was ordered."""
        self.replicas[replica.id] = replica
        self._seen.changed[replica.id] = None
        replica.service_rate.count(replica, 1)

    def set_life(self, replica: Replica, life: Life) -> None:
        """Move a replica to another state."""
        replica.service_rate.count(replica, -1)
        replica.life = life
        replica.service_rate.count(replica, 1)
        self._seen.changed[replica.id] = None

    def change(self, replica: Replica, slot: Slot, shape: Shape) -> None:
        """Move a replica to another slot or shape."""
        self._seen.changed[replica.id] = None
        replica.service_rate.count(replica, -1)
        replica.slot, replica.shape = slot, shape
        replica.service_rate = self.service_rate(replica.spec.variant, slot, shape, replica.device_key)
        replica.service_rate.count(replica, 1)
        replica.millicores = replica.service_rate.millicores

    def remove(self, replica: Replica) -> None:
        """Remove a replica that has stopped or is lost."""
        if replica.life is Life.READY and replica.batch is None:
            self.remove_idle(replica)
        del self.replicas[replica.id]
        replica.service_rate.count(replica, -1)
        self._seen.changed[replica.id] = None

    def put_back(self, id: ReplicaId, batch: RunningBatch) -> None:
        """A batch was taken out of `running` by mistake: it runs on."""
        self.running[id] = batch
        self.running = dict(sorted(self.running.items(), key=lambda each: each[1].id))

    def note_change(self, replica: Replica) -> None:
        """A replica has changed in what its view shows."""
        self._seen.changed[replica.id] = None

    def views(self) -> tuple[ReplicaView, ...]:
        """All replicas but the draining ones as policies see them, in the order in which they were started. The view of
        a replica that has not changed is the same object as before, and so is the tuple if none has."""
        seen, running, is_new = self._seen, self.running, False
        if not seen.views:
            seen.changed = dict.fromkeys(self.replicas)
        changed, views, before = seen.changed, seen.views, seen.running
        if before or running:
            changed.update(dict.fromkeys(before.keys() - running.keys()))
            for id, batch in reversed(running.items()):  # the newest first
                if batch.id <= seen.batch:
                    break
                changed[id] = None
            seen.running = running.copy()
            if running:
                seen.batch = next(reversed(running.values())).id
        for id in changed:
            replica = self.replicas.get(id)
            if replica is None or replica.life is Life.DRAINING:
                is_new |= views.pop(id, None) is not None
            elif (view := replica.view()) != views.get(id):
                views[id], is_new = view, True
        changed.clear()
        if is_new:
            seen.all_views = tuple(views.values())
        return seen.all_views

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

    def set_aside(self, device: DeviceKey) -> list[Replica]:
        """Take the replicas on a device out of `idle` until the end of the round of questions (`end_round`)."""
        aside = [replica for replica in self.idle if replica.device_key == device]
        for replica in aside:
            self.remove_idle(replica)
        return aside

    def end_round(self, aside: Iterable[Replica], wait_until_ns: int = FOREVER_NS) -> int:
        """Put the replicas back that were set aside. Returns until when the batch policy waits, as given."""
        for replica in aside:
            self.add_idle(replica)
        return wait_until_ns

    def service_rate(
        self, variant: str, slot: Slot, shape: Shape = ALONE, where: DeviceKey | None = None
    ) -> ServiceRate:
        """The `ServiceRate` that all replicas of a variant on equal slots in the same shape share; those on the device
        `where` have one of their own if the plan says another limit or rate for them."""
        placed = self._limits.placed
        place = where if placed and (variant, slot, shape) in placed else None
        found = self._rates.get((variant, slot, shape, place))
        if found is None:
            self._rates = {key: rate for key, rate in self._rates.items() if rate.replicas}
            belief = self._beliefs[variant, slot.hardware]
            belief = belief.of(shape) if shape else belief
            found = ServiceRate(belief, slot, shape, spec_millicores(slot, shape), place, belief.shares(slot))
            self._rates[variant, slot, shape, place] = found
            found.refresh(self._limits)
        return found

    def regroup(self) -> None:
        """The plan says for other replicas than before what depends on their device."""
        for replica in self.replicas.values():
            self.change(replica, replica.slot, replica.shape)

    def refresh(self) -> tuple[float, float]:
        """Reread all costs from the beliefs. Returns the believed capacity in full batches, in rows per nanosecond, of
        the ready replicas and of the starting replicas."""
        limits, rates = self._limits, self._rates.values()
        for rate in rates:
            rate.refresh(limits)
        ready, starting = self._capacities()
        if len(rates) > 1 and len({rate.slot.hardware for rate in rates if rate.replicas}) > 1:
            for size in dict.fromkeys([0, *chain.from_iterable(rate.by_size for rate in rates)]):
                alone_ns, full_ns = self.least_ns(size)
                for rate in [each.at(size, limits) for each in rates]:
                    rate.least_alone_ns = min(rate.least_alone_ns, alone_ns)
                    rate.least_full_ns = min(rate.least_full_ns, full_ns)
        return ready, starting

    def _capacities(self, size: int = 0) -> tuple[float, float]:
        """The believed capacity in full batches of rows of this class of sizes (0: all), in rows per nanosecond, of the
        ready and of the starting replicas."""
        ready, starting = 0.0, 0.0
        for rate in self._rates.values():
            sized = rate.at(size, self._limits) if size else rate
            if rate.is_shared:
                ready += rate.capacity(Life.READY)
                starting += rate.capacity(Life.STARTING)
            elif sized.batch_max:
                per_ns = sized.batch_max / sized.costs_ns[sized.batch_max]
                ready += rate.ready * per_ns
                starting += rate.starting * per_ns
        return ready, starting

    def row_ns(self, size: int) -> float:
        """The time in ns that a waiting row of this class of sizes adds to the drain time; 0 without replicas."""
        ready, starting = self._capacities(size)
        return 1 / (ready or starting) if ready or starting else 0.0

    def least_ns(self, size: int = 0, rows: int = 1) -> LeastTimes:
        """Believed durations of a batch of `rows` and of a full batch, of rows of this class of sizes, each on the
        fastest ready replica; on the fastest starting replica if none is ready, and 0 without any replica."""
        fastest = [rate for rate in self._rates.values() if rate.ready]
        fastest = fastest or [rate for rate in self._rates.values() if rate.starting]
        rates = [rate.at(size, self._limits) for rate in fastest] if size else fastest
        alone_ns = min((cost_of(rate.costs_ns, rows) for rate in rates if rate.batch_max), default=0)
        return alone_ns, min((rate.costs_ns[rate.batch_max] for rate in rates), default=0)

    @property
    def mean_ratio(self) -> float:
        """The mean duration of batches divided by the believed one, of all ready replicas (`Belief.mean_ratio`)."""
        ready = sum([rate.ready for rate in self._rates.values()])
        return sum([rate.ready * rate.belief.mean_ratio for rate in self._rates.values()]) / ready if ready else 1.0

    def rate_rps(self, spec: ReplicaSpec) -> float:
        """Believed capacity of a replica that is alone on its device, in the largest batches that the plan allows:
        rows per second. Where the replicas of a plan will be neighbours is not known yet."""
        slot, shape = spec.slot, spec.shape
        belief = self._beliefs[spec.variant, slot.hardware]
        costs_ns = (belief.of(shape) if shape else belief).costs_ns(slot)
        where = None if spec.node is None else (spec.node, spec.device or "")
        batch = min(self._limits.batch_max(spec.variant, slot, shape, where), len(costs_ns) - 1)
        return batch * NS_PER_S / costs_ns[batch]

    def present_rps(self, id: ReplicaId) -> float:
        """`rate_rps` of one replica in its present shape, on its present or its ordered cores, whichever are fewer."""
        replica = self.replicas[id]
        if bounds_of(replica.shape):
            rate = replica.service_rate
            return rate.batch_max * NS_PER_S / rate.costs_ns[rate.batch_max] if rate.batch_max else 0.0
        spec = replica.spec.with_cores(min(replica.slot.cores, replica.target_cores))
        return self.rate_rps(structs.replace(spec, shape=replica.shape))
