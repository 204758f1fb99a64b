"""All that changes while sloop runs: replicas, queues, requests under way. Only the data and control paths change it.

It does not know who drives it: nothing here can tell a live server from a simulated one.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import cast

from msgspec import Struct

from sloop.app.graph import Graph
from sloop.app.journey import Journey
from sloop.core.ahead import Runs, ahead
from sloop.core.flows import Flows
from sloop.core.ledger import Ledger, millicores
from sloop.core.monitor import Monitor
from sloop.core.protocols import Order
from sloop.core.queue import Queue
from sloop.core.views import Belief, ReplicaView, StageView
from sloop.units import FOREVER_NS, NS_PER_S, s
from sloop.vocabulary import BatchId, Life, Node, ReplicaId, ReplicaSpec, Request, RequestId, StagePlan, Visit

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


class ServiceRate:
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
        """Take over what the belief has learnt; `limit` is the largest batch that a plan allows."""
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
        "resizing",
        "service_rate",
        "since_ns",
        "spec",
        "stage",
        "target_cores",
    )

    def __init__(self, id: ReplicaId, spec: ReplicaSpec, stage: "Stage", now_ns: int) -> None:
        self.id = id
        self.spec = spec
        self.stage = stage
        self.service_rate = stage.service_rate(spec.variant, spec.cores)
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

    @property
    def is_giving_back(self) -> bool:
        """Whether it is about to leave cores to others."""
        return self.life is Life.DRAINING or (self.resizing > 0 and self.target_cores < self.cores)

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
        "limits",
        "losses",
        "monitor",
        "name",
        "queue",
        "ready",
        "remaining_full_ns",
        "remaining_ns",
        "replicas",
        "restart_ns",
        "runs_for_parts",
        "service_rates",
        "short",
        "startup_ns",
        "visit_ns",
        "wait_ns",
    )

    def __init__(
        self, name: str, after: tuple[str, ...], beliefs: Mapping[str, Belief], order: Order, bucket_ns: int
    ) -> None:
        self.name = name
        self.after = after
        self.beliefs = beliefs
        self.runs_for_parts = False
        self.queue = Queue(order)
        self.monitor = Monitor(bucket_ns)
        self.replicas: dict[ReplicaId, Replica] = {}
        self.service_rates: dict[tuple[str, float], ServiceRate] = {}
        """By variant and cores, for replicas of this stage: what they share, so that no heartbeat visits them all."""
        self.idle: deque[Replica] = deque()
        """Ready replicas without a batch, sorted by id."""
        self.ready = 0
        self.last = ReplicaId(-1)
        """The replica the router chose last."""
        self.limit = 1
        """The largest batch the plan allows."""
        self.limits: dict[str, int] = {}
        """By variant, that of the last plan which wanted it: what is to be replaced goes on as it was planned."""
        self.wait_ns = 0
        """How long the plan finds a full batch worth waiting for."""
        self.remaining_ns = self.remaining_full_ns = 0
        """Believed least time from leaving this stage to the answer, in batches of one, and in full ones."""
        self.startup_ns = 0
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

    def follow(self, target: StagePlan) -> None:
        """A plan comes into force."""
        self.limit, self.wait_ns = target.batch_max, target.wait_ns
        self.limits |= {group.spec.variant: target.batch_max for group in target.groups if group.count}
        self.refresh()

    def refresh(self) -> None:
        """Take over what beliefs have learnt. Called when replicas change and at every heartbeat."""
        ready_per_ns = starting_per_ns = 0.0
        for (variant, _), service_rate in self.service_rates.items():
            service_rate.refresh(self.limits.get(variant, self.limit))
            if service_rate.limit:
                per_ns = service_rate.limit / service_rate.costs_ns[service_rate.limit]
                ready_per_ns += service_rate.ready * per_ns
                starting_per_ns += service_rate.starting * per_ns
        self.startup_ns = 0 if ready_per_ns else max(belief.load_ns for belief in self.beliefs.values())
        per_ns = ready_per_ns or starting_per_ns
        self.visit_ns = round(1 / per_ns) if per_ns else 0

    def least_ns(self) -> tuple[int, int]:
        """Believed duration of a batch of one, and of a full one, on the fastest replicas there are; 0 without any."""
        service_rates = [p for p in self.service_rates.values() if p.ready] or [
            p for p in self.service_rates.values() if p.starting
        ]
        alone_ns = min((service_rate.costs_ns[1] for service_rate in service_rates if service_rate.limit), default=0)
        return alone_ns, min((service_rate.costs_ns[service_rate.limit] for service_rate in service_rates), default=0)

    def rate_rps(self, variant: str, cores: float) -> float:
        """What one replica of a variant on so many cores is believed to do, in the largest batches the plan allows."""
        costs_ns = self.beliefs[variant].costs_ns(cores)
        batch = min(self.limits.get(variant, self.limit), len(costs_ns) - 1)
        return batch * NS_PER_S / costs_ns[batch]

    def now_rps(self, id: ReplicaId) -> float:
        """What a replica is believed to do on the cores it has, or on those it will have if they are fewer."""
        replica = self.replicas[id]
        return self.rate_rps(replica.spec.variant, min(replica.cores, replica.target_cores))

    @property
    def expects(self) -> bool:
        """Whether replicas are on their way: started and not ready, being resized, or about to leave."""
        return any(r.life is not Life.READY or r.resizing for r in self.replicas.values())

    def service_rate(self, variant: str, cores: float) -> ServiceRate:
        """That of replicas of a variant on so many cores."""
        found = self.service_rates.get((variant, cores))
        if found is None:
            self.service_rates = {
                key: service_rate for key, service_rate in self.service_rates.items() if service_rate.replicas
            }
            self.service_rates[variant, cores] = found = ServiceRate(self.beliefs[variant], cores)
            found.refresh(self.limits.get(variant, self.limit))
        return found

    def add(self, replica: Replica) -> None:
        """A replica is ordered."""
        self.replicas[replica.id] = replica
        replica.service_rate.count(replica.life, 1)

    def turn(self, replica: Replica, life: Life) -> None:
        """A replica enters a state of life."""
        replica.service_rate.count(replica.life, -1)
        replica.life = life
        replica.service_rate.count(life, 1)

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
            idle.insert(bisect_left(idle, id, key=_by_id), replica)

    def remove_idle(self, replica: Replica) -> None:
        """A ready replica without a batch is to get none."""
        at = bisect_left(self.idle, replica.id, key=_by_id)
        assert self.idle[at] is replica, f"replica {replica.id} is not idle"
        del self.idle[at]

    def view(self, slo_ns: int, visits: float) -> StageView:
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
            visits=visits,
        )


def _by_id(replica: Replica) -> ReplicaId:
    return replica.id


class Flight:
    """A request on its way through a graph of several stages."""

    __slots__ = ("journey", "request")

    def __init__(self, request: Request, graph: Graph) -> None:
        self.request = request
        self.journey = Journey(graph)


class State:
    """The whole of it."""

    __slots__ = (
        "batch_ids",
        "draining",
        "flights",
        "flows",
        "graph",
        "ingress",
        "ledger",
        "next_replica",
        "replicas",
        "runs",
        "slo_ns",
        "sources",
        "stages",
    )

    def __init__(self, stages: Sequence[Stage], graph: Graph, nodes: Sequence[Node]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.graph = graph
        self.sources = tuple(self.stages[name] for name in graph.entries)
        for stage in stages:
            stage.runs_for_parts = bool(graph.scopes[stage.name])
        self.slo_ns = graph.slo_ns
        self.replicas: dict[ReplicaId, Replica] = {}
        self.ledger = Ledger(nodes)
        self.flights: dict[RequestId, Flight] | None = {} if len(stages) > 1 else None
        """None for an application of one stage, whose requests are where their only visit is."""
        self.ingress = stages[0].monitor if len(stages) == 1 else Monitor(stages[0].monitor.bucket_ns)
        """What comes to the application; of several stages, those inside it count as waiting."""
        self.flows = None if len(stages) == 1 or (graph.is_plain and not graph.declared_paths) else Flows(graph)
        """None where every request visits every stage once."""
        self.runs = None if len(stages) == 1 or graph.is_plain or graph.declared_paths else Runs(graph)
        """None where nothing but declared paths decides what is ahead of a request."""
        self.batch_ids = cast(Iterator[BatchId], count())
        self.next_replica = 0
        self.draining = False

    def visits(self) -> Mapping[str, float]:
        """How often a request visits each stage, as far as is known."""
        return self.flows.visits() if self.flows is not None else dict.fromkeys(self.stages, 1.0)

    def look_ahead(self) -> None:
        """Bring up to date how long requests have still to go from each stage on."""
        remaining_ns_by_stage = ahead(
            self.graph, {name: stage.least_ns() for name, stage in self.stages.items()}, self.runs
        )
        for name, (alone_ns, full_ns) in remaining_ns_by_stage.items():
            self.stages[name].remaining_ns, self.stages[name].remaining_full_ns = alone_ns, full_ns

    def set_life(self, now_ns: int, replica: Replica, life: Life) -> None:
        """Move a replica on in its life, keeping the stage's counts right."""
        stage, was = replica.stage, replica.life
        stage.turn(replica, life)
        replica.since_ns = now_ns
        if Life.READY in (was, life) and was is not life:
            sign = 1 if life is Life.READY else -1
            stage.ready += sign
            stage.monitor.ready(now_ns, sign * replica.millicores)
        self._refresh(stage)

    def set_cores(self, now_ns: int, replica: Replica, cores: float) -> None:
        """A resize took effect."""
        if replica.life is Life.READY:
            replica.stage.monitor.ready(now_ns, millicores(cores) - replica.millicores)
        replica.service_rate.count(replica.life, -1)
        replica.service_rate = replica.stage.service_rate(replica.spec.variant, cores)
        replica.service_rate.count(replica.life, 1)
        replica.cores = cores
        replica.millicores = millicores(cores)
        self._refresh(replica.stage)

    def forget(self, now_ns: int, replica: Replica) -> None:
        """A replica is gone: give back all it holds."""
        if replica.life is Life.READY:
            replica.stage.ready -= 1
            replica.stage.monitor.ready(now_ns, -replica.millicores)
        self.ledger.release(replica.id)
        del self.replicas[replica.id]
        replica.stage.remove(replica)
        self._refresh(replica.stage)

    def _refresh(self, stage: Stage) -> None:
        stage.refresh()
        if self.flights is not None:
            self.look_ahead()
