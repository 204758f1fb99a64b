"""All that changes while sloop runs: replicas, queues, requests under way. Only the data and control paths change it.

It does not know who drives it: nothing here can tell a live server from a simulated one.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import cast

from msgspec import Struct

from sloop.core.ledger import Ledger, millicores
from sloop.core.monitor import Monitor
from sloop.core.queue import Queue
from sloop.core.seams import Order
from sloop.core.views import Belief, ReplicaView, StageView
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import BatchId, Life, Node, ReplicaId, ReplicaSpec, Request, RequestId, Visit

STUCK_FACTOR = 20
STUCK_NS_MIN = s(10)
"""A batch that takes 20 times its believed duration, and at least this long, is held to be lost."""


class Running(Struct, frozen=True, gc=False):
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


class Pace:
    """What is believed of the speed of one variant on so many cores, for all of a stage's replicas that are that."""

    __slots__ = ("belief", "cores", "costs_ns", "limit", "ready", "replicas", "starting")

    def __init__(self, belief: Belief, cores: float) -> None:
        self.belief = belief
        self.cores = cores
        self.costs_ns: Sequence[int] = (0,)
        """Believed durations by size of a batch."""
        self.limit = 0
        """The largest batch these replicas are sent."""
        self.replicas = self.ready = self.starting = 0
        """How many there are, in all and in these states of life."""

    def refresh(self, limit: int) -> None:
        """Take over what the belief has learnt; `limit` is the largest batch the plan allows."""
        self.costs_ns = costs_ns = self.belief.costs_ns(self.cores)
        self.limit = min(limit, len(costs_ns) - 1)

    def count(self, life: Life, change: int) -> None:
        """So many replicas more in this state of life, or fewer."""
        self.replicas += change
        if life is Life.READY:
            self.ready += change
        elif life is Life.STARTING:
            self.starting += change


class Replica:
    """A replica from the order to start it until it has stopped or is lost."""

    __slots__ = (
        "batch",
        "batches",
        "cores",
        "id",
        "life",
        "millicores",
        "pace",
        "resizing",
        "since_ns",
        "spec",
        "stage",
        "target_cores",
    )

    def __init__(self, id: ReplicaId, spec: ReplicaSpec, stage: "Stage", now_ns: int) -> None:
        self.id = id
        self.spec = spec
        self.stage = stage
        self.pace = stage.pace(spec.variant, spec.cores)
        self.cores = spec.cores
        """Cores in effect."""
        self.millicores = millicores(spec.cores)
        self.target_cores = spec.cores
        """Cores last asked for; differs from `cores` while a resize is under way."""
        self.resizing = 0
        """Resizes ordered and not yet in effect. Until there is none, the most that was asked for stays reserved."""
        self.life = Life.STARTING
        self.since_ns = now_ns
        self.batch: Running | None = None
        self.batches = 0

    def view(self) -> ReplicaView:
        """As policies see it, with the cores it was last asked to have."""
        spec = self.spec
        if spec.cores != self.target_cores:
            spec = ReplicaSpec(spec.stage, spec.variant, self.target_cores, spec.node, spec.device, spec.share)
        running = len(self.batch.visits) if self.batch else 0
        return ReplicaView(id=self.id, spec=spec, life=self.life, since_ns=self.since_ns, running=running)


class Stage:
    """One stage: its queue, its replicas, what it measures, and when it wants to be looked at again."""

    __slots__ = (
        "after",
        "beliefs",
        "expire_ns",
        "idle",
        "last",
        "limit",
        "losses",
        "monitor",
        "name",
        "paces",
        "queue",
        "ready",
        "replicas",
        "restart_ns",
        "short",
        "start_ns",
        "successors",
        "visit_ns",
    )

    def __init__(
        self, name: str, after: tuple[str, ...], beliefs: Mapping[str, Belief], order: Order, bucket_ns: int
    ) -> None:
        self.name = name
        self.after = after
        self.beliefs = beliefs
        self.successors: tuple[Stage, ...] = ()
        self.queue = Queue(order)
        self.monitor = Monitor(bucket_ns)
        self.replicas: dict[ReplicaId, Replica] = {}
        self.paces: dict[tuple[str, float], Pace] = {}
        """By variant and cores, for replicas of this stage: what they share, so that no heartbeat visits them all."""
        self.idle: deque[Replica] = deque()
        """Ready replicas without a batch, sorted by id."""
        self.ready = 0
        self.last = ReplicaId(-1)
        """The replica the router chose last."""
        self.limit = 1
        """The largest batch the plan allows."""
        self.start_ns = 0
        """Believed time until the first replica is ready; 0 where one is. With `visit_ns`, what admission is told."""
        self.visit_ns = 0
        """Believed time by which each waiting visit lengthens the queue."""
        self.expire_ns = FOREVER_NS
        """The first deadline that passes in the queue."""
        self.losses = 0
        """Replicas lost since the last batch that finished; spaces out restarts."""
        self.restart_ns = 0
        self.short = ""
        """What the plan wants and cannot have, as last said."""

    def refresh(self) -> None:
        """Take over what beliefs have learnt. Called when replicas change and at every heartbeat."""
        ready_per_ns = starting_per_ns = 0.0
        for pace in self.paces.values():
            pace.refresh(self.limit)
            if pace.limit:
                per_ns = pace.limit / pace.costs_ns[pace.limit]
                ready_per_ns += pace.ready * per_ns
                starting_per_ns += pace.starting * per_ns
        self.start_ns = 0 if ready_per_ns else max(belief.load_ns for belief in self.beliefs.values())
        per_ns = ready_per_ns or starting_per_ns
        self.visit_ns = round(1 / per_ns) if per_ns else 0

    def pace(self, variant: str, cores: float) -> Pace:
        """That of replicas of a variant on so many cores."""
        found = self.paces.get((variant, cores))
        if found is None:
            self.paces = {key: pace for key, pace in self.paces.items() if pace.replicas}
            self.paces[variant, cores] = found = Pace(self.beliefs[variant], cores)
            found.refresh(self.limit)
        return found

    def add(self, replica: Replica) -> None:
        """A replica is ordered."""
        self.replicas[replica.id] = replica
        replica.pace.count(replica.life, 1)

    def turn(self, replica: Replica, life: Life) -> None:
        """A replica enters a state of life."""
        replica.pace.count(replica.life, -1)
        replica.life = life
        replica.pace.count(life, 1)

    def remove(self, replica: Replica) -> None:
        """A replica is gone."""
        if replica.life is Life.READY and replica.batch is None:
            self.remove_idle(replica)
        del self.replicas[replica.id]
        replica.pace.count(replica.life, -1)

    def add_idle(self, replica: Replica) -> None:
        """A ready replica has no batch any more."""
        idle, id = self.idle, replica.id
        if not idle or id > idle[-1].id:
            idle.append(replica)
        elif id < idle[0].id:
            idle.appendleft(replica)
        else:
            idle.insert(bisect_left(idle, id, key=_by_id), replica)

    def remove_idle(self, replica: Replica) -> None:
        """A ready replica without a batch is to get none."""
        at = bisect_left(self.idle, replica.id, key=_by_id)
        assert self.idle[at] is replica, f"replica {replica.id} is not idle"
        del self.idle[at]

    def view(self, now_ns: int, slo_ns: int) -> StageView:
        """As policies see it. Draining replicas are gone for them."""
        return StageView(
            name=self.name,
            slo_ns=slo_ns,
            after=self.after,
            variants=self.beliefs,
            replicas=tuple(r.view() for r in self.replicas.values() if r.life is not Life.DRAINING),
            queue=tuple(self.queue.visits),
            running=self.monitor.running,
            buckets=tuple(self.monitor.buckets),
            bucket_ns=self.monitor.bucket_ns,
        )


def _by_id(replica: Replica) -> ReplicaId:
    return replica.id


class Flight:
    """A request on its way through a graph of several stages."""

    __slots__ = ("done", "open", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.open = 0
        """Visits that wait or run."""
        self.done: set[str] = set()
        """Stages it has passed."""


class State:
    """The whole of it."""

    __slots__ = (
        "batch_ids",
        "draining",
        "flights",
        "ledger",
        "next_replica",
        "replicas",
        "slo_ns",
        "sources",
        "stages",
    )

    def __init__(self, stages: Sequence[Stage], slo_ns: int, nodes: Sequence[Node]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.sources = tuple(stage for stage in stages if not stage.after)
        self.slo_ns = slo_ns
        self.replicas: dict[ReplicaId, Replica] = {}
        self.ledger = Ledger(nodes)
        self.flights: dict[RequestId, Flight] | None = {} if len(stages) > 1 else None
        """None for an application of one stage, whose requests are where their only visit is."""
        self.batch_ids = cast(Iterator[BatchId], count())
        self.next_replica = 0
        self.draining = False

    def set_life(self, now_ns: int, replica: Replica, life: Life) -> None:
        """Move a replica on in its life, keeping the stage's counts right."""
        stage, was = replica.stage, replica.life
        stage.turn(replica, life)
        replica.since_ns = now_ns
        if Life.READY in (was, life) and was is not life:
            sign = 1 if life is Life.READY else -1
            stage.ready += sign
            stage.monitor.ready(now_ns, sign * replica.millicores)
        stage.refresh()

    def set_cores(self, now_ns: int, replica: Replica, cores: float) -> None:
        """A resize took effect."""
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, millicores(cores) - replica.millicores)
        replica.pace.count(replica.life, -1)
        replica.pace = replica.stage.pace(replica.spec.variant, cores)
        replica.pace.count(replica.life, 1)
        replica.cores = cores
        replica.millicores = millicores(cores)
        replica.stage.refresh()

    def forget(self, now_ns: int, replica: Replica) -> None:
        """A replica is gone: give back all it holds."""
        if replica.life is Life.READY:
            replica.stage.ready -= 1
            replica.stage.monitor.ready(now_ns, -replica.millicores)
        self.ledger.release(replica.id)
        del self.replicas[replica.id]
        replica.stage.remove(replica)
        replica.stage.refresh()
