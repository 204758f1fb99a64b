"""The state of one version of an application, and its measurements so far. The fold has one for each version.

After the core, `RunState.append` is the largest cost of a simulated request. So each of the four records of a request
is handled in a single call, and an application with one stage skips all work for graphs.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from msgspec import Struct, structs

from sloop import actions, events
from sloop.actions import End, StartBatch
from sloop.app.graph import Graph
from sloop.app.progress import Entered, RequestProgress
from sloop.events import Finished
from sloop.runlog import Record, Unlogged
from sloop.runlog.cost import CostAccount
from sloop.runlog.replicas import (
    COLD_START,
    BatchGroup,
    DeviceName,
    DeviceUse,
    PipelineAccount,
    ReplicaRecord,
    ShadowAccount,
)
from sloop.runlog.requests import GraphRequestRecord, RequestRecord, RouteRecord, SecondRecord, StageRecord
from sloop.runlog.samples import Samples, new_samples
from sloop.transient import Transient
from sloop.units import NS_PER_S
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Life,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Shape,
    Slot,
    WorkerId,
)

ROUTES_MAX: Final = 100
"""How many routes (sets of visited stages) are counted separately. A graph with many branches has thousands; all
further ones are counted under the empty set, so that memory and tables stay bounded."""

_SERVED: Final = Outcome.SERVED
_LATE: Final = Outcome.LATE
"""Module constants, because looking up an enum member takes as long as the rest of handling a request's end."""
_BEFORE_NS: Final = -(2**63)
"""Earlier than every record."""


class Kept(Struct, frozen=True):
    """What a fold keeps of a run beside the measurements."""

    seconds: int | None = None
    """How many of the last seconds; None for all."""
    decisions: int = 0
    """How many of the last decisions."""
    routes: bool = True
    """Whether it keeps latencies per route through a graph."""
    service: bool = False
    """Whether it keeps the forward-pass times measured by the replicas."""


class Observer(Transient):
    """Who is told that a second has ended, at the first record after it, so as to empty the samples; None if nobody."""

    def __init__(self, on_second: Callable[..., None] | None = None) -> None:
        self.on_second = on_second


class RunState:
    """The state of one version of an application after the records appended so far.

    `graph` is the application's graph. `cost` is the account to charge, by default one without prices. `accuracies` by
    (stage, variant) are multiplied along the routes of requests. `start_ns` is the start of the run, by default the
    instant of the first record. `others` take the records that are not about the version, by type. `uses` has the
    devices that all versions share.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        cost: CostAccount | None = None,
        accuracies: Mapping[tuple[str, str], float | None] | None = None,
        start_ns: int | None = None,
        kept: Kept = Kept(),  # noqa: B008  # frozen
        others: Mapping[type, Callable[[int, Any], None]] | None = None,
        uses: dict[DeviceName, DeviceUse] | None = None,
    ) -> None:
        self.graph = graph
        self.start_ns = start_ns
        """The start of the run, from which seconds are counted."""
        self.begun_ns = start_ns or 0
        """When this version was deployed; the start of the run if it was there from the start."""
        self.now_ns = start_ns or 0
        """The instant of the last record."""
        self.plan: Plan | None = None
        self.plan_ns = 0
        """The plan in force, and since when."""
        self.open: dict[RequestId, RequestRecord] = {}
        self.replicas: dict[ReplicaId, ReplicaRecord] = {}
        self.stages = {name: StageRecord(name) for name in graph.stages}
        self.groups: dict[tuple[str, str, Slot, Shape], BatchGroup] = {}
        self.uses = uses if uses is not None else {}
        self.cost = cost or CostAccount()
        self.cost.charged_ns = start_ns or 0
        self.seconds: deque[SecondRecord] = deque(maxlen=kept.seconds)
        self.served_ns, self.late_ns = new_samples(), new_samples()
        """Latencies of answered requests in ns, from sending to the end."""
        self.missed_ns = {outcome: new_samples() for outcome in (Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED)}
        """Times in ns from sending to the end, of requests that were not answered."""
        self.routes: dict[frozenset[str], RouteRecord] = {}
        self.accuracy_sum, self.accuracy_count = 0.0, 0
        """Sum over answered requests; only for applications with several stages."""
        self.accuracies = accuracies or {}
        self.unknown_accuracy = not accuracies
        """Whether a variant with unknown accuracy has run a batch."""
        self.cold_starts = 0
        self.cold_start_ns: defaultdict[tuple[str, str, str], Samples[int]] = defaultdict(new_samples)
        """By stage, variant and step."""
        self.resize_ns: defaultdict[str, Samples[int]] = defaultdict(new_samples)
        """By stage, the times in ns from the order of a resize to its effect."""
        self.pipelines, self.shadows = PipelineAccount(), ShadowAccount()
        counters = (Counter[tuple[str, str]]() for _ in range(3))
        self.failed_batches, self.lost_replicas, self.adopted_replicas = counters
        self.failed_tries: Counter[tuple[str, str, str]] = Counter()
        """Visits that came to nothing, by stage, variant, and whether the model `raised` or the `worker` was lost."""
        self.observer = Observer()
        self._only = next(iter(self.stages.values())) if len(self.stages) == 1 else None
        self._keeps_routes, self._keeps_service = kept.routes, kept.service
        self._second, self._second_end_ns, self._charged = SecondRecord(0), _BEFORE_NS, 0
        self._charged_by_kind: tuple[int, ...] = ()
        """Microcores × ns up to the current second: of all replicas, and by kind of hardware if there are several."""
        self._resized: set[BatchId] = set()
        """Running batches whose replica was resized after their start."""
        self._rare: Mapping[type, Callable[[int, Any], None]] = {**self._takers(), **(others or {})}

    def _takers(self) -> dict[type, Callable[[int, Any], None]]:
        """What takes each kind of record that is not on the path of a request."""
        return {
            events.BatchFailed: self._fail_batch,
            actions.StartWorker: self._start_worker,
            actions.AdoptWorker: self._adopt_replica,
            events.WorkerProgressed: self._progress,
            events.WorkerReady: self._ready,
            events.WorkerCompleted: self._complete,
            events.BatchLost: self._lose_batch,
            actions.ResizeWorker: self._order_resize,
            events.WorkerResized: self._resize,
            actions.StopWorker: self._stop,
            events.WorkerStopped: self._stopped,
            events.WorkerLost: self._lost,
            actions.Decided: self.decide,
            Unlogged: self._count_unlogged,
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
            if replica.use is not None:
                replica.use.begin(now_ns)
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
            if replica.use is not None:
                replica.use.end(now_ns)
            group = replica.group
            durations_ns = group.durations_ns
            if self._resized and batch.batch in self._resized:
                self._resized.remove(batch.batch)
                durations_ns = group.resized_ns
            durations_ns[len(batch.requests)].append(now_ns - replica.running_ns)
            if self._keeps_service:
                group.service_ns.append(record.service_ns)
            if self.pipelines.unanswered:
                self._first_answer(now_ns, replica)
            if self._only is None:
                self._pass_on(now_ns, batch, record, replica)
        elif (take := self._rare.get(kind)) is not None:
            take(now_ns, record)

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Add the records of one instant, in order."""
        for record in records:
            self.append(now_ns, record)

    def set_apart(self, batch: BatchId) -> None:
        """Count the duration of a running batch apart from the others, in `BatchGroup.resized_ns`."""
        self._resized.add(batch)

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

    def _count_unlogged(self, now_ns: int, unlogged: Unlogged) -> None:
        """Count the requests of which a sampled log has only the number. Their latencies are not known."""
        self._second.arrivals += unlogged.served
        self._second.served += unlogged.served

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
        accuracy = self.accuracies.get((stage, replica.spec.variant))
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

    def _fail_batch(self, now_ns: int, failed: events.BatchFailed) -> None:
        replica = self.replicas.get(failed.replica)
        if replica is not None and replica.running is not None and replica.running.batch == failed.batch:
            self.failed_batches[replica.group.key] += not failed.is_refusal
            self._requeue(now_ns, replica, "refused" if failed.is_refusal else "raised")

    def _requeue(self, now_ns: int, replica: ReplicaRecord, reason: str) -> None:
        """A batch will not finish: its requests wait again from `now_ns` on."""
        batch, replica.running = replica.running, None
        if batch is None:
            return
        if replica.use is not None:
            replica.use.end(now_ns)
        self._resized.discard(batch.batch)
        for id, part in batch.visits:
            request = self.open.get(id)
            if isinstance(request, GraphRequestRecord):
                self._queue(now_ns, request, [(batch.stage, part)])
            elif request is not None:
                request.since_ns = now_ns
            self.failed_tries[(*replica.group.key, reason)] += request is not None

    # Replicas

    def _start_worker(self, now_ns: int, start: actions.StartWorker) -> None:
        if start.replica is None:
            self._start_replica(now_ns, start)
        elif start.replica in self.replicas:
            self._start_shadow(now_ns, self.replicas[start.replica], start)

    def _start_replica(self, now_ns: int, start: actions.StartWorker) -> None:
        self.cold_starts += 1
        made = self._add_replica(now_ns, start.worker, start.spec, now_ns)
        if start.pipeline is not None:
            self.pipelines.parts += 1
            made.part, made.pipeline = start.spec.shape[start.place], start.pipeline
            self._set_shape(made, start.spec.shape)
            if start.pipeline not in self.pipelines.open:
                self.pipelines.count += 1
                self.pipelines.open[start.pipeline] = {}
                self.pipelines.unanswered[start.pipeline] = now_ns
            self.pipelines.open[start.pipeline][made.id] = made

    def _adopt_replica(self, now_ns: int, adopted: actions.AdoptWorker) -> None:
        made = self._add_replica(now_ns, adopted.worker, adopted.spec, -1)
        self.adopted_replicas[made.group.key] += 1
        if adopted.is_ready:
            made.life = Life.READY

    def _add_replica(self, now_ns: int, id: ReplicaId, spec: ReplicaSpec, order_ns: int) -> ReplicaRecord:
        self.cost.allocate(now_ns, id, spec, spec.cores)
        made = ReplicaRecord(id, spec, self._group(spec, spec.slot), spec.cores, spec.cores, order_ns, now_ns)
        if spec.slot.accelerator or not spec.slot.is_capped:
            made.use = self.uses.setdefault((spec.slot.hardware, spec.node or "", spec.device or ""), DeviceUse())
        self.replicas[id] = made
        return made

    def _group(self, spec: ReplicaSpec, slot: Slot, shape: Shape = ALONE) -> BatchGroup:
        key = spec.stage, spec.variant, slot, shape
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = BatchGroup((spec.stage, spec.variant), slot, shape)
        return group

    def _progress(self, now_ns: int, event: events.WorkerProgressed) -> None:
        replica = self.replicas.get(event.worker)
        if replica is not None:
            self._end_step(now_ns, replica)
            replica.step, replica.step_ns = event.step, now_ns

    def _end_step(self, now_ns: int, replica: ReplicaRecord) -> None:
        if replica.step:
            self.cold_start_ns[(*replica.group.key, replica.step)].append(now_ns - replica.step_ns)
        replica.step = ""

    def _ready(self, now_ns: int, event: events.WorkerReady) -> None:
        replica, pair = self.replicas.get(event.worker), self.shadows.bodies.get(event.worker)
        if pair is not None and pair.shadow is not None:
            self._set_shape(pair, pair.shadow.spec.shape)
        if replica is not None and replica.life is Life.STARTING:
            self._end_step(now_ns, replica)
            replica.has_started = True
            if replica.part is None:
                self._serve(now_ns, replica)
                return
            pipeline = self.pipelines.open[replica.pipeline] if replica.pipeline is not None else {}
            if len(pipeline) == len(replica.spec.shape) and all(each.has_started for each in pipeline.values()):
                for each in pipeline.values():
                    self._serve(now_ns, each)

    def _serve(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica takes batches from now on."""
        if replica.order_ns >= 0 and replica.life is Life.STARTING and not replica.has_served:
            self.cold_start_ns[(*replica.group.key, COLD_START)].append(now_ns - replica.order_ns)
        replica.life, replica.since_ns, replica.has_served = Life.READY, now_ns, True

    def _complete(self, now_ns: int, event: events.WorkerCompleted) -> None:
        """A part of a pipeline has all layers; when all parts have, they are replicas of their own."""
        replica = self.replicas.get(event.worker)
        if replica is None or replica.part is None or not replica.has_started:
            return
        number, replica.part = replica.pipeline, None
        self.pipelines.completion_ns[replica.group.key].append(now_ns - replica.order_ns)
        if number is None:
            if replica.life is Life.STARTING:
                self._serve(now_ns, replica)
        elif all(each.part is None and each.life is not Life.STARTING for each in self.pipelines.open[number].values()):
            self._dissolve(number)

    def _first_answer(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica has answered a batch: if that has passed a pipeline, count the first one."""
        number = replica.pipeline
        order_ns = self.pipelines.unanswered.pop(number, None) if number is not None else None
        if order_ns is not None:
            self.pipelines.answer_ns.append(now_ns - order_ns)

    def _dissolve(self, number: WorkerId) -> None:
        self.pipelines.unanswered.pop(number, None)
        for each in self.pipelines.open.pop(number).values():
            each.pipeline = None
            self._set_shape(each, ALONE)

    def _break_pipeline(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica is gone, or its batch is: its pipeline is lost, and the parts serve when they have all layers."""
        number = replica.pipeline
        if number is None:
            return
        members = list(self.pipelines.open[number].values())
        self._dissolve(number)
        self.pipelines.lost += replica.life is not Life.DRAINING
        for each in members:
            if each.part is None and each.life is Life.STARTING:
                self._serve(now_ns, each)
            elif each.part is not None and each.life is Life.READY:
                each.life, each.since_ns = Life.STARTING, now_ns

    def _lose_batch(self, now_ns: int, event: events.BatchLost) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.running is not None and replica.running.batch == event.batch:
            self._break_pipeline(now_ns, replica)
            self._requeue(now_ns, replica, "worker")

    def _order_resize(self, now_ns: int, order: actions.ResizeWorker) -> None:
        replica = self.replicas.get(order.worker)
        if replica is not None:
            replica.wanted_cores, replica.resize_ns = order.cores, now_ns
            self.cost.grow(now_ns, order.worker, replica.all_cores(order.cores))

    def _resize(self, now_ns: int, event: events.WorkerResized) -> None:
        replica = self.replicas.get(event.worker)
        if replica is None:
            return
        self.cost.allocate(now_ns, replica.id, replica.spec, replica.all_cores(event.cores))
        if replica.running is not None and event.cores != replica.cores:
            self._resized.add(replica.running.batch)
        slot = structs.replace(replica.spec.slot, cores=event.cores)
        replica.cores, replica.group = event.cores, self._group(replica.spec, slot, replica.group.shape)
        if replica.resize_ns:
            self.resize_ns[replica.spec.stage].append(now_ns - replica.resize_ns)
            replica.resize_ns = 0

    def _start_shadow(self, now_ns: int, replica: ReplicaRecord, order: actions.StartWorker) -> None:
        self.shadows.count += 1
        self.shadows.bodies[order.worker] = replica
        replica.shadow = order
        self._charge_shadow(now_ns, replica)

    def _shadow_gone(self, now_ns: int, id: WorkerId) -> bool:
        """Returns whether the worker that is gone was a shadow."""
        replica = self.shadows.bodies.pop(id, None)
        if replica is None:
            return False
        self._set_shape(replica, ALONE)
        replica.shadow = None
        self._charge_shadow(now_ns, replica)
        return True

    def _charge_shadow(self, now_ns: int, replica: ReplicaRecord) -> None:
        """Charge a replica for the cores that it has with its shadow from now on."""
        cores = max(replica.cores, replica.wanted_cores) if replica.resize_ns else replica.cores
        self.cost.allocate(now_ns, replica.id, replica.spec, replica.all_cores(cores))

    def _set_shape(self, replica: ReplicaRecord, shape: Shape) -> None:
        if replica.group.shape != shape:
            if replica.running is not None:
                self._resized.add(replica.running.batch)
            replica.group = self._group(replica.spec, replica.group.slot, shape)

    def _stop(self, now_ns: int, order: actions.StopWorker) -> None:
        replica, pair = self.replicas.get(order.worker), self.shadows.bodies.get(order.worker)
        if pair is not None:
            self._set_shape(pair, ALONE)
        if replica is not None:
            self._drain(now_ns, replica)
            # A stuck replica: its batch may run elsewhere before the replica has stopped.
            self._requeue(now_ns, replica, "worker")

    def _drain(self, now_ns: int, replica: ReplicaRecord) -> None:
        if replica.life is not Life.DRAINING:
            replica.life, replica.since_ns = Life.DRAINING, now_ns

    def _stopped(self, now_ns: int, event: events.WorkerStopped) -> None:
        if not self._shadow_gone(now_ns, event.worker):
            self._forget(now_ns, event.worker)

    def _lost(self, now_ns: int, event: events.WorkerLost) -> None:
        if self._shadow_gone(now_ns, event.worker):
            self.shadows.lost += 1
            return
        replica = self._forget(now_ns, event.worker)
        if replica is not None:
            self.lost_replicas[replica.group.key] += 1

    def _forget(self, now_ns: int, id: ReplicaId) -> ReplicaRecord | None:
        self.cost.release(now_ns, id)
        replica = self.replicas.pop(id, None)
        if replica is not None:
            if replica.shadow is not None:
                del self.shadows.bodies[replica.shadow.worker]
            self._requeue(now_ns, replica, "worker")
            self._break_pipeline(now_ns, replica)
        return replica

    def decide(self, now_ns: int, decided: actions.Decided) -> None:
        """Take the plan in force and replicas that drain from a decision."""
        if decided.plan is not None:
            self.plan, self.plan_ns = decided.plan, now_ns
        replica = self.replicas.get(decided.replica) if decided.replica is not None else None
        if decided.kind == "drain" and replica is not None:
            self._drain(now_ns, replica)

    # Seconds

    def begin(self, start_ns: int, now_ns: int) -> None:
        """The run began at `start_ns`, and this version is there from `now_ns` on."""
        self.start_ns, self.begun_ns, self.now_ns = start_ns, now_ns, now_ns
        self.cost.charged_ns = now_ns
        first = (now_ns - start_ns) // NS_PER_S
        self._second_end_ns = start_ns + first * NS_PER_S
        self._open_second(first)

    def advance(self, now_ns: int) -> None:
        """Let time pass without a record: close all seconds before `now_ns`, and charge the cost."""
        if self.seconds:
            if now_ns >= self._second_end_ns:
                self._begin_second(now_ns)
            self.now_ns = now_ns
            self.cost.charge(now_ns)

    def _begin_second(self, now_ns: int) -> None:
        """Close all seconds before `now_ns`, and open the second that contains it. If only the last few are kept, those
        that nobody would see are skipped: a server's application may wake after a month."""
        if not self.seconds:
            start_ns = now_ns if self.start_ns is None else self.start_ns
            self.begin(start_ns, start_ns)
        kept = self.seconds.maxlen
        while now_ns >= self._second_end_ns:
            self._measure_second(self._second_end_ns)
            if self.observer.on_second is not None:
                self.observer.on_second()
            skipped = max(0, (now_ns - self._second_end_ns) // NS_PER_S - kept) if kept else 0
            if skipped:
                self._second_end_ns += skipped * NS_PER_S
                self.cost.charge(self._second_end_ns)
            self._charged = self.cost.total_microcore_ns
            if len(self.cost.hardware_microcore_ns) > 1:
                self._charged_by_kind = tuple(self.cost.hardware_microcore_ns.values())
            self._open_second(self._second.start_s + 1 + skipped)

    def _open_second(self, start_s: int) -> None:
        self._second = SecondRecord(start_s)
        self._second_end_ns += NS_PER_S
        self.seconds.append(self._second)

    def close_seconds(self) -> None:
        """Update the last second, which may be incomplete, to the last record."""
        self._measure_second(self.now_ns)

    def _measure_second(self, until_ns: int) -> None:
        """Set the cores that were allocated in the current second until then."""
        cost, second = self.cost, self._second
        cost.charge(until_ns)
        second.microcore_ns = cost.total_microcore_ns - self._charged
        if len(cost.hardware_microcore_ns) > 1:
            before = self._charged_by_kind or (self._charged,)  # until now, all were of the first kind
            kinds = zip_longest(cost.hardware_microcore_ns.values(), before, fillvalue=0)
            second.hardware_microcore_ns = tuple(end - start for end, start in kinds)


def combined_accuracy(accuracies: Sequence[float]) -> float:
    """The accuracy of stages in sequence: the product, on the scale of the inputs (in per cent if they exceed 1)."""
    scale = 100.0 if max(accuracies) > 1.0 else 1.0
    return scale * math.prod(accuracy / scale for accuracy in accuracies)
