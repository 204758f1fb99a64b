"""The one fold over the event log: the state of a run, and what was measured in it so far.

`RunState` takes one event or action at a time, from the simulator, the live driver or a log that is read back. A
server's `/metrics` and `/v2/sloop/state`, the summary of a simulated run, tables, pages and `explain` all read it. None
of them keeps replicas, requests or counts of its own, so that two of them cannot disagree.

Measurements, which grow with a run, are kept in arrays of 8-byte integers (`Samples`). A server empties them into
histograms, and keeps the last few seconds only. Everything else is bounded by the requests and replicas of
the moment.

After the core, `append` is what a simulated request costs most. So the four records of a request are handled in one
call each, without a second one, and an application of a single stage pays nothing for graphs.
"""

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field

from sloop.actions import Decided, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.app.graph import Graph
from sloop.app.progress import Entered, RequestProgress
from sloop.events import (
    BatchFailed,
    Draining,
    Finished,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReady,
    ReplicaStopped,
    Resized,
)
from sloop.runlog import Record
from sloop.runlog.cost import CostAccount
from sloop.units import NS_PER_S
from sloop.vocabulary import BatchId, Life, Outcome, Plan, ReplicaId, ReplicaSpec, Request, RequestId

ROUTES_MAX: Final = 100
"""Sets of visited stages that are kept apart. A graph with many branches has thousands; all further ones are added up
under the empty set, so that neither memory nor a table grows with them."""
COLD_START: Final = "total"
"""The step that stands for a whole cold start, from the order to ready."""

_SERVED: Final = Outcome.SERVED
_LATE: Final = Outcome.LATE
"""Looked up once, because looking up a member of an enumeration costs as much as the rest of a request's end."""
_BEFORE_NS: Final = -(2**63)
"""Earlier than every record."""

Place = tuple[str, int]
"""A stage, and which part of the request visits it; 0 at a stage that runs once for each request."""
Samples = array  # of signed 64-bit integers
"""Measurements in ns, in the order in which they were made."""


def _samples() -> "Samples[int]":
    return array("q")


class SecondRecord(Struct, gc=False):
    """One second of the run. A request's end counts in the second of its arrival, so that a second adds up."""

    start_s: int
    arrivals: int = 0
    served: int = 0
    late: int = 0
    dropped: int = 0
    rejected: int = 0
    failed: int = 0
    worst_ns: int = 0
    """The longest latency of its answered requests."""
    microcore_ns: int = 0
    """Integral of the allocated microcores over it, once it has ended."""

    @property
    def missed(self) -> int:
        """Its requests that have ended and were not served in time."""
        return self.late + self.dropped + self.rejected + self.failed


class RequestRecord(Struct, gc=False):
    """A request that has not ended."""

    sent_ns: int
    second: SecondRecord
    """The one it arrived in."""
    since_ns: int
    """Since when it waits, or waited before the batch it is in; of an application with a single stage."""


class GraphRequestRecord(RequestRecord, gc=False):
    """A request that has not ended, in an application of several stages."""

    progress: RequestProgress
    waiting: dict[Place, int]
    """Since when each of its visits that are in a queue waits."""
    accuracies: dict[str, tuple[float, int]]
    """Per visited stage the sum of the accuracies of the variants that computed its visits, and their number."""


class BatchGroup(Struct):
    """Batches of one variant on one number of cores."""

    key: tuple[str, str]
    """Stage and variant."""
    cores: float
    sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """How many batches of each size were started."""
    durations_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(_samples))
    """For each size, from the order to start each finished batch to its answer."""
    resized_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(_samples))
    """The same of batches that were resized meanwhile. They say nothing about one number of cores."""
    service_ns: "Samples[int]" = field(default_factory=_samples)
    """What replicas measured for the forward passes of finished batches; only if asked for."""


class ReplicaRecord(Struct):
    """A replica between the order to start it and its end."""

    id: ReplicaId
    spec: ReplicaSpec
    group: BatchGroup
    """Of its variant on the cores it has now."""
    cores: float
    """In effect."""
    wanted_cores: float
    """As last ordered."""
    order_ns: int
    """When it was ordered."""
    since_ns: int
    """When it entered its `life`."""
    life: Life = Life.STARTING
    step: str = ""
    """Of its cold start; empty before the first and once it is ready."""
    step_ns: int = 0
    """When it entered the step."""
    resize_ns: int = 0
    """When the resize was ordered that is not in effect yet; 0 where there is none."""
    running: StartBatch | None = None
    running_ns: int = 0
    """When its batch was started."""
    batches: int = 0
    """Started."""


class StageRecord(Struct):
    """What one stage has seen."""

    name: str
    queued: int = 0
    """Visits in its queue; in an application of a single stage see `RunState.queued`."""
    waits_ns: "Samples[int]" = field(default_factory=_samples)
    """From entering the queue to the start of a batch, one for each visit."""
    dropped: int = 0
    """Requests that ended so and name this stage, or waited only here."""
    rejected: int = 0
    failed: int = 0


class RouteRecord(Struct):
    """Answered requests that visited the same stages."""

    served: int = 0
    latencies_ns: "Samples[int]" = field(default_factory=_samples)


class RunState:
    """The state of a run after the records appended so far.

    `graph` is the application's. `cost` is the account to charge, by default one without prices. `accuracies` of
    variants, by (stage, variant), are multiplied along the routes of requests. `start_ns` is when the run begins, by
    default the instant of its first record. `seconds_kept` and `decisions_kept` bound how many of each are remembered.
    `routes` says whether to keep the latencies of each route, `service` whether to keep the replicas' own measurements.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        cost: CostAccount | None = None,
        accuracies: Mapping[tuple[str, str], float | None] | None = None,
        start_ns: int | None = None,
        seconds_kept: int | None = None,
        decisions_kept: int = 0,
        routes: bool = True,
        service: bool = False,
    ) -> None:
        self.graph = graph
        self.start_ns = start_ns
        self.now_ns = start_ns or 0
        """The instant of the last record."""
        self.plan: Plan | None = None
        self.plan_ns = 0
        """The plan in force, and since when."""
        self.draining = False
        """Whether the server is shutting down."""
        self.open: dict[RequestId, RequestRecord] = {}
        self.replicas: dict[ReplicaId, ReplicaRecord] = {}
        self.stages = {name: StageRecord(name) for name in graph.stages}
        self.groups: dict[tuple[str, str, float], BatchGroup] = {}
        self.cost = cost or CostAccount()
        self.cost.charged_ns = start_ns or 0
        self.seconds: deque[SecondRecord] = deque(maxlen=seconds_kept)
        self.served_ns, self.late_ns = _samples(), _samples()
        """Latencies of answered requests, from sending to the end."""
        self.missed_ns = {outcome: _samples() for outcome in (Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED)}
        """From sending to the end, of requests that were not answered."""
        self.routes: dict[frozenset[str], RouteRecord] = {}
        self.accuracy_sum, self.accuracy_count = 0.0, 0
        """Over answered requests of a graph."""
        self.unknown_accuracy = not accuracies
        """Whether a variant has computed whose accuracy is not known."""
        self.cold_starts = 0
        self.cold_start_ns: defaultdict[tuple[str, str, str], Samples[int]] = defaultdict(_samples)
        """By stage, variant and step."""
        self.resize_ns: defaultdict[str, Samples[int]] = defaultdict(_samples)
        """By stage, from the order of a resize to its effect."""
        self.failed_batches: Counter[tuple[str, str]] = Counter()
        self.lost_replicas: Counter[tuple[str, str]] = Counter()
        self.decisions: Counter[str] = Counter()
        """By kind."""
        self.last_decisions: deque[tuple[int, Decided]] = deque(maxlen=decisions_kept)
        self.on_second: Callable[[], None] | None = None
        """Called at the end of each second, so that a consumer can empty the samples."""
        self._accuracies = accuracies or {}
        self._only = next(iter(self.stages.values())) if len(self.stages) == 1 else None
        self._keeps_routes, self._keeps_service = routes, service
        self._second = SecondRecord(0)
        self._second_end_ns = _BEFORE_NS
        self._charged = 0
        self._resized: set[BatchId] = set()
        """Batches that run on other cores than they started on."""
        self._rare: Mapping[type, Callable[[int, Any], None]] = {
            BatchFailed: self._fail_batch,
            StartReplica: self._start_replica,
            ReplicaProgressed: self._progress,
            ReplicaReady: self._ready,
            ResizeReplica: self._order_resize,
            Resized: self._resize,
            StopReplica: self._stop,
            ReplicaStopped: self._stopped,
            ReplicaLost: self._lost,
            Decided: self._decide,
            Draining: self._begin_draining,
        }

    def append(self, now_ns: int, record: Any) -> None:  # noqa: ANN401, C901, PLR0912, PLR0915  # the hot path, see above
        """Take one record; instants never decrease."""
        if now_ns >= self._second_end_ns:
            self._begin_second(now_ns)
        self.now_ns = now_ns
        kind = type(record)
        if kind is Request:
            second = self._second
            second.arrivals += 1
            if self._only is not None:
                self.open[record.id] = RequestRecord(record.sent_ns, second, now_ns)
            else:
                self._arrive(now_ns, record)
        elif kind is End:
            request = self.open.pop(record.request, None)
            if request is None:
                return
            latency_ns = now_ns - request.sent_ns
            second = request.second
            if record.outcome is _SERVED:
                second.served += 1
                self.served_ns.append(latency_ns)
            elif record.outcome is _LATE:
                second.late += 1
                self.late_ns.append(latency_ns)
            else:
                self._miss(record, request, latency_ns)
                return
            if latency_ns > second.worst_ns:  # noqa: PLR1730  # max() takes three times as long
                second.worst_ns = latency_ns
            if self._only is None:
                self._answer(record, request, latency_ns)
        elif kind is StartBatch:
            replica = self.replicas.get(record.replica)
            if replica is None:
                return
            replica.running, replica.running_ns = record, now_ns
            replica.batches += 1
            replica.group.sizes[len(record.requests)] += 1
            if self._only is not None:
                found, add = self.open.get, self._only.waits_ns.append
                for id in record.requests:
                    request = found(id)
                    if request is not None:
                        add(now_ns - request.since_ns)
            else:
                self._leave_queue(now_ns, record)
        elif kind is Finished:
            replica = self.replicas.get(record.replica)
            if replica is None or (batch := replica.running) is None or batch.batch != record.batch:
                return
            replica.running = None
            group = replica.group
            durations_ns = group.durations_ns
            if self._resized and batch.batch in self._resized:
                self._resized.remove(batch.batch)
                durations_ns = group.resized_ns
            durations_ns[len(batch.requests)].append(now_ns - replica.running_ns)
            if self._keeps_service:
                group.service_ns.append(record.service_ns)
            if self._only is None:
                self._pass_on(now_ns, batch, record, replica)
        elif (take := self._rare.get(kind)) is not None:
            take(now_ns, record)

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Take the records of one instant, in order."""
        for record in records:
            self.append(now_ns, record)

    # What follows from the fields

    @property
    def waiting(self) -> int:
        """Visits in queues now."""
        if self._only is None:
            return sum(stage.queued for stage in self.stages.values())
        return len(self.open) - sum(
            id in self.open for batch in self.batches() if batch.running for id in batch.running.requests
        )

    def batches(self) -> list[ReplicaRecord]:
        """The replicas that run a batch."""
        return [replica for replica in self.replicas.values() if replica.running is not None]

    def queued(self, stage: str) -> int:
        """Visits in the queue of a stage."""
        return self.waiting if self._only is not None else self.stages[stage].queued

    def count(self, life: Life) -> int:
        """Replicas in this state of life."""
        return sum(replica.life is life for replica in self.replicas.values())

    # Requests

    def _miss(self, end: End, request: RequestRecord, latency_ns: int) -> None:
        """A request ended without an answer. It counts at the stage that the end names, else where it waited, if that
        was one stage."""
        outcome, second, name = end.outcome, request.second, end.stage
        self.missed_ns[outcome].append(latency_ns)
        if isinstance(request, GraphRequestRecord):
            waiting = [stage for stage, _ in request.waiting]
            for stage in waiting:
                self.stages[stage].queued -= 1
            if not name and len(set(waiting)) == 1:
                name = waiting[0]
        stage_record = self._only or self.stages.get(name)
        counters: list[Any] = [second] if stage_record is None else [second, stage_record]
        for counter in counters:  # both name their counts after the outcomes
            setattr(counter, outcome.value, getattr(counter, outcome.value) + 1)

    # Requests of an application with several stages

    def _arrive(self, now_ns: int, request: Request) -> None:
        progress = RequestProgress(self.graph, request)
        self.open[request.id] = made = GraphRequestRecord(request.sent_ns, self._second, now_ns, progress, {}, {})
        self._queue(now_ns, made, progress.begin())

    def _queue(self, now_ns: int, request: GraphRequestRecord, entered: Entered) -> None:
        for place in entered:
            request.waiting[place] = now_ns
            self.stages[place[0]].queued += 1

    def _leave_queue(self, now_ns: int, batch: StartBatch) -> None:
        stage = self.stages[batch.stage]
        for id, part in batch.visits:
            request: Any = self.open.get(id)
            since_ns = request and request.waiting.pop((stage.name, part), None)
            if since_ns is not None:
                stage.queued -= 1
                stage.waits_ns.append(now_ns - since_ns)

    def _pass_on(self, now_ns: int, batch: StartBatch, finished: Finished, replica: ReplicaRecord) -> None:
        """A batch is done: its requests enter the stages that follow for them."""
        stage = batch.stage
        accuracy = self._accuracies.get((stage, replica.spec.variant))
        self.unknown_accuracy = self.unknown_accuracy or accuracy is None
        for (id, part), counts in finished.continuing(batch.visits):
            request: Any = self.open.get(id)
            if request is None:
                continue
            if accuracy is not None:
                total, count = request.accuracies.get(stage, (0.0, 0))
                request.accuracies[stage] = total + accuracy, count + 1
            self._queue(now_ns, request, request.progress.finish(stage, part, counts))

    def _answer(self, end: End, request: Any, latency_ns: int) -> None:  # noqa: ANN401  # a GraphRequestRecord
        for stage, _ in request.waiting:
            self.stages[stage].queued -= 1
        if not self._keeps_routes:
            return
        visited = frozenset(request.progress.visited)
        if visited not in self.routes and len(self.routes) >= ROUTES_MAX:
            visited = frozenset()
        route = self.routes.get(visited)
        if route is None:
            route = self.routes[visited] = RouteRecord()
        route.served += end.outcome is _SERVED
        route.latencies_ns.append(latency_ns)
        if not self.unknown_accuracy:
            self.accuracy_sum += combined_accuracy([total / count for total, count in request.accuracies.values()])
            self.accuracy_count += 1

    # Batches

    def _fail_batch(self, now_ns: int, failed: BatchFailed) -> None:
        replica = self.replicas.get(failed.replica)
        if replica is not None and replica.running is not None and replica.running.batch == failed.batch:
            self.failed_batches[replica.group.key] += 1
            self._requeue(now_ns, replica)

    def _requeue(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A batch will not finish: its requests wait again from now on, for another batch or for their end."""
        batch, replica.running = replica.running, None
        if batch is None:
            return
        self._resized.discard(batch.batch)
        for id, part in batch.visits:
            request = self.open.get(id)
            if isinstance(request, GraphRequestRecord):
                self._queue(now_ns, request, [(batch.stage, part)])
            elif request is not None:
                request.since_ns = now_ns

    # Replicas

    def _start_replica(self, now_ns: int, start: StartReplica) -> None:
        spec = start.spec
        self.cold_starts += 1
        self.cost.allocate(now_ns, start.replica, spec, spec.cores)
        self.replicas[start.replica] = ReplicaRecord(
            start.replica, spec, self._group(spec, spec.cores), spec.cores, spec.cores, now_ns, now_ns
        )

    def _group(self, spec: ReplicaSpec, cores: float) -> BatchGroup:
        key = spec.stage, spec.variant, cores
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = BatchGroup((spec.stage, spec.variant), cores)
        return group

    def _progress(self, now_ns: int, event: ReplicaProgressed) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None:
            self._end_step(now_ns, replica)
            replica.step, replica.step_ns = event.step, now_ns

    def _end_step(self, now_ns: int, replica: ReplicaRecord) -> None:
        if replica.step:
            self.cold_start_ns[(*replica.group.key, replica.step)].append(now_ns - replica.step_ns)
        replica.step = ""

    def _ready(self, now_ns: int, event: ReplicaReady) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.life is Life.STARTING:
            self._end_step(now_ns, replica)
            self.cold_start_ns[(*replica.group.key, COLD_START)].append(now_ns - replica.order_ns)
            replica.life, replica.since_ns = Life.READY, now_ns

    def _order_resize(self, now_ns: int, order: ResizeReplica) -> None:
        replica = self.replicas.get(order.replica)
        if replica is not None:
            replica.wanted_cores, replica.resize_ns = order.cores, now_ns
            self.cost.grow(now_ns, order.replica, order.cores)

    def _resize(self, now_ns: int, event: Resized) -> None:
        replica = self.replicas.get(event.replica)
        if replica is None:
            return
        self.cost.allocate(now_ns, replica.id, replica.spec, event.cores)
        if replica.running is not None and event.cores != replica.cores:
            self._resized.add(replica.running.batch)
        replica.cores, replica.group = event.cores, self._group(replica.spec, event.cores)
        if replica.resize_ns:
            self.resize_ns[replica.spec.stage].append(now_ns - replica.resize_ns)
            replica.resize_ns = 0

    def _stop(self, now_ns: int, order: StopReplica) -> None:
        replica = self.replicas.get(order.replica)
        if replica is not None:
            self._drain(now_ns, replica)
            self._requeue(now_ns, replica)  # given up as stuck: its batch may be elsewhere before it is gone

    def _drain(self, now_ns: int, replica: ReplicaRecord) -> None:
        if replica.life is not Life.DRAINING:
            replica.life, replica.since_ns = Life.DRAINING, now_ns

    def _stopped(self, now_ns: int, event: ReplicaStopped) -> None:
        self._forget(now_ns, event.replica)

    def _lost(self, now_ns: int, event: ReplicaLost) -> None:
        replica = self._forget(now_ns, event.replica)
        if replica is not None:
            self.lost_replicas[replica.group.key] += 1

    def _forget(self, now_ns: int, id: ReplicaId) -> ReplicaRecord | None:
        self.cost.release(now_ns, id)
        replica = self.replicas.pop(id, None)
        if replica is not None:
            self._requeue(now_ns, replica)
        return replica

    def _decide(self, now_ns: int, decided: Decided) -> None:
        self.decisions[decided.kind] += 1
        self.last_decisions.append((now_ns, decided))
        if decided.plan is not None:
            self.plan, self.plan_ns = decided.plan, now_ns
        replica = self.replicas.get(decided.replica) if decided.replica is not None else None
        if decided.kind == "drain" and replica is not None:
            self._drain(now_ns, replica)

    def _begin_draining(self, now_ns: int, _: Draining) -> None:
        self.draining = True

    # Seconds

    def _begin_second(self, now_ns: int) -> None:
        """End the seconds that `now_ns` has left behind, and begin the one it is in."""
        if not self.seconds:
            if self.start_ns is None:
                self.start_ns = self.cost.charged_ns = now_ns
            self._second_end_ns = self.start_ns
            self._open_second(0)
        while now_ns >= self._second_end_ns:
            self.cost.charge(self._second_end_ns)
            charged = self.cost.total_microcore_ns
            self._second.microcore_ns, self._charged = charged - self._charged, charged
            if self.on_second is not None:
                self.on_second()
            self._open_second(self._second.start_s + 1)

    def _open_second(self, start_s: int) -> None:
        self._second = SecondRecord(start_s)
        self._second_end_ns += NS_PER_S
        self.seconds.append(self._second)

    def close_seconds(self) -> None:
        """Bring the last second, which may be incomplete, up to the last record."""
        self.cost.charge(self.now_ns)
        self._second.microcore_ns = self.cost.total_microcore_ns - self._charged


def combined_accuracy(accuracies: Sequence[float]) -> float:
    """The accuracy of stages one after another: the product, on the scale of a user's figures (per cent above 1)."""
    scale = 100.0 if max(accuracies) > 1.0 else 1.0
    return scale * math.prod(accuracy / scale for accuracy in accuracies)
