"""The only fold over the event log: the state of a run, and its measurements so far.

`RunState` takes one event or action at a time, from the simulator, the live driver or a log that is read back. A
server's `/metrics` and `/v2/sloop/state`, the summary of a simulated run, tables, pages and `explain` all read it. None
of them tracks replicas, requests or counts separately, so that two of them cannot disagree.

Measurements, which grow with a run, are kept in arrays of 8-byte integers (`Samples`). A server moves them into
histograms and keeps only the last few seconds. Everything else is bounded by the open requests and live replicas.

After the core, `append` is the largest cost of a simulated request. So each of the four records of a request is handled
in a single call, and an application with one stage skips all work for graphs.
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
"""How many routes (sets of visited stages) are counted separately. A graph with many branches has thousands; all
further ones are counted under the empty set, so that memory and tables stay bounded."""
COLD_START: Final = "total"
"""The step name of a whole cold start, from the order to ready."""

_SERVED: Final = Outcome.SERVED
_LATE: Final = Outcome.LATE
"""Module constants, because looking up an enum member takes as long as the rest of handling a request's end."""
_BEFORE_NS: Final = -(2**63)
"""Earlier than every record."""

Place = tuple[str, int]
"""A stage and the part of the request that visits it; the part is 0 at a stage that runs once per request."""
Samples = array  # of signed 64-bit integers
"""Measurements in ns, in chronological order."""


def _samples() -> "Samples[int]":
    return array("q")


class SecondRecord(Struct, gc=False):
    """One second of the run. A request's end counts in the second of its arrival, so that ends add up to arrivals."""

    start_s: int
    arrivals: int = 0
    served: int = 0
    late: int = 0
    dropped: int = 0
    rejected: int = 0
    failed: int = 0
    worst_ns: int = 0
    """The longest latency of its answered requests, in ns."""
    microcore_ns: int = 0
    """Integral of the allocated microcores over this second; set when it has ended."""

    @property
    def missed(self) -> int:
        """Requests of this second that have ended without being served in time."""
        return self.late + self.dropped + self.rejected + self.failed


class RequestRecord(Struct, gc=False):
    """A request that has not ended."""

    sent_ns: int
    second: SecondRecord
    """The second in which it arrived."""
    since_ns: int
    """When its current or last wait began; used only in applications with a single stage."""


class GraphRequestRecord(RequestRecord, gc=False):
    """A request that has not ended, in an application of several stages."""

    progress: RequestProgress
    waiting: dict[Place, int]
    """For each queued visit, when its wait began."""
    accuracies: dict[str, tuple[float, int]]
    """Per visited stage, the sum of the accuracies of the variants that ran its visits, and the number of visits."""


class BatchGroup(Struct):
    """Batches of one variant on one core count."""

    key: tuple[str, str]
    """Stage and variant."""
    cores: float
    sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """How many batches of each size were started."""
    durations_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(_samples))
    """Per batch size, the durations of finished batches from order to answer, in ns."""
    resized_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(_samples))
    """The same for batches during which the replica was resized; they ran on more than one core count."""
    service_ns: "Samples[int]" = field(default_factory=_samples)
    """Forward-pass times measured by the replicas, in ns; recorded only if `RunState` was created with `service`."""


class ReplicaRecord(Struct):
    """A replica between the order to start it and its end."""

    id: ReplicaId
    spec: ReplicaSpec
    group: BatchGroup
    """The batch group of its variant on its current cores."""
    cores: float
    """In effect."""
    wanted_cores: float
    """Cores as last ordered."""
    order_ns: int
    """When it was ordered."""
    since_ns: int
    """When it entered its `life`."""
    life: Life = Life.STARTING
    step: str = ""
    """The current step of its cold start; empty before the first step and after the replica is ready."""
    step_ns: int = 0
    """When it entered the step."""
    resize_ns: int = 0
    """When the pending resize was ordered; 0 if none is pending."""
    running: StartBatch | None = None
    running_ns: int = 0
    """When its batch was started."""
    batches: int = 0
    """Started."""


class StageRecord(Struct):
    """Queue, waits and ends of one stage."""

    name: str
    queued: int = 0
    """Visits in its queue. Not kept in applications with a single stage; see `RunState.queued`."""
    waits_ns: "Samples[int]" = field(default_factory=_samples)
    """Waits in ns from entering the queue to the start of a batch, one per visit."""
    dropped: int = 0
    """Ends by outcome, of requests whose end names this stage or that waited only here."""
    rejected: int = 0
    failed: int = 0


class RouteRecord(Struct):
    """Answered requests that visited the same stages."""

    served: int = 0
    latencies_ns: "Samples[int]" = field(default_factory=_samples)


class RunState:
    """The state of a run after the records appended so far.

    `graph` is the application's graph. `cost` is the account to charge, by default one without prices. `accuracies` by
    (stage, variant) are multiplied along the routes of requests. `start_ns` is the start of the run, by default the
    instant of the first record. `seconds_kept` and `decisions_kept` limit how many are kept. `routes` enables
    latencies per route, `service` the forward-pass times measured by the replicas.
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
        """Latencies of answered requests in ns, from sending to the end."""
        self.missed_ns = {outcome: _samples() for outcome in (Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED)}
        """Times in ns from sending to the end, of requests that were not answered."""
        self.routes: dict[frozenset[str], RouteRecord] = {}
        self.accuracy_sum, self.accuracy_count = 0.0, 0
        """Sum over answered requests; only for applications with several stages."""
        self.unknown_accuracy = not accuracies
        """Whether a variant with unknown accuracy has run a batch."""
        self.cold_starts = 0
        self.cold_start_ns: defaultdict[tuple[str, str, str], Samples[int]] = defaultdict(_samples)
        """By stage, variant and step."""
        self.resize_ns: defaultdict[str, Samples[int]] = defaultdict(_samples)
        """By stage, the times in ns from the order of a resize to its effect."""
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
        """Running batches whose replica was resized after their start."""
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
        """Add one record; instants never decrease."""
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
        """Add the records of one instant, in order."""
        for record in records:
            self.append(now_ns, record)

    # Derived values

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
        """Count a request that ended without an answer: at the stage that the end names, else at the one stage where it
        waited, if there is exactly one."""
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
        """A batch has finished: move its requests to their next stages."""
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
        """A batch will not finish: its requests wait again from `now_ns` on."""
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
            self._requeue(
                now_ns, replica
            )  # a stuck replica: its batch may run elsewhere before the replica has stopped

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
        """Close all seconds before `now_ns`, and open the second that contains it."""
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
        """Update the last second, which may be incomplete, to the last record."""
        self.cost.charge(self.now_ns)
        self._second.microcore_ns = self.cost.total_microcore_ns - self._charged


def combined_accuracy(accuracies: Sequence[float]) -> float:
    """The accuracy of stages in sequence: the product, on the scale of the inputs (in per cent if they exceed 1)."""
    scale = 100.0 if max(accuracies) > 1.0 else 1.0
    return scale * math.prod(accuracy / scale for accuracy in accuracies)
