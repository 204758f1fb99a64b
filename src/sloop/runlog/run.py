"""The state of one version of an application, and its measurements so far. The fold has one for each version.

After the core, `RunState.extend` is the largest cost of a simulated request. So it takes many records in a single call,
and an application with one stage skips all work for graphs.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from msgspec import Struct

from sloop import actions, events
from sloop.actions import End, StartBatch
from sloop.app.graph import Graph
from sloop.app.progress import Entered, RequestProgress
from sloop.events import Finished
from sloop.runlog import Unlogged
from sloop.runlog.cost import CostAccount
from sloop.runlog.replicas import DeviceName, DeviceUse, ReplicaRecord
from sloop.runlog.requests import GraphRequestRecord, RequestRecord, RouteRecord, SecondRecord, StageRecord
from sloop.runlog.samples import new_samples
from sloop.runlog.workers import WorkerAccount
from sloop.transient import Transient
from sloop.units import NS_PER_S
from sloop.vocabulary import BatchId, Life, Outcome, Plan, Request, RequestId

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
        self.stages = {name: StageRecord(name) for name in graph.stages}
        self.cost = cost or CostAccount()
        self.cost.charged_ns = start_ns or 0
        self.workers = WorkerAccount(self.cost, uses if uses is not None else {}, self._requeue)
        self.replicas = self.workers.replicas
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
        self.failed_batches: Counter[tuple[str, str]] = Counter()
        self.failed_tries: Counter[tuple[str, str, str]] = Counter()
        """Visits that came to nothing, by stage, variant, and whether the model `raised` or the `worker` was lost."""
        self.is_alone = True
        """Whether no record has told of a second version."""
        self.observer = Observer()
        self._only = next(iter(self.stages.values())) if len(self.stages) == 1 else None
        self._keeps_routes, self._keeps_service = kept.routes, kept.service
        self._second, self._second_end_ns, self._charged = SecondRecord(0), _BEFORE_NS, 0
        self._charged_by_kind: tuple[int, ...] = ()
        """Microcores × ns up to the current second: of all replicas, and by kind of hardware if there are several."""
        self._resized, self._unanswered = self.workers.resized, self.workers.pipelines.unanswered
        self._rare: Mapping[type, Callable[[int, Any], None]] = {
            events.BatchFailed: self._fail_batch,
            events.BatchLost: self._lose_batch,
            actions.Decided: self.decide,
            Unlogged: self._count_unlogged,
            **self.workers.takers(),
            **(others or {}),
        }

    def append(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # any record
        """Add one record."""
        self.extend(((now_ns, record),))

    def extend(self, records: Iterable[tuple[int, Any]]) -> None:  # noqa: C901, PLR0912, PLR0915  # the hot path, see above
        """Add records with their instants, which never decrease. After the one that tells of a second version
        (`is_alone`) the others stay in the iterator that the caller passes."""
        open_requests, replicas, only = self.open, self.replicas, self._only
        for now_ns, record in records:
            if now_ns >= self._second_end_ns:
                self._begin_second(now_ns)
            self.now_ns = now_ns
            kind = type(record)
            if kind is Request:
                self._second.arrivals += 1
                if only is not None:
                    open_requests[record.id] = RequestRecord(record.sent_ns, self._second, now_ns)
                else:
                    self._arrive(now_ns, record)
            elif kind is End:
                if (request := open_requests.pop(record.request, None)) is None:
                    continue
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
                    continue
                if latency_ns > second.worst_ns:  # noqa: PLR1730  # max() takes three times as long
                    second.worst_ns = latency_ns
                if only is None:
                    self._answer(record, request, latency_ns)
            elif kind is StartBatch:
                if (replica := replicas.get(record.replica)) is None:
                    continue
                replica.running = record
                replica.running_ns = now_ns
                replica.rows = record.together or len(record.requests)
                if replica.use is not None:
                    replica.use.begin(now_ns)
                replica.batches += 1
                replica.group.sizes[replica.rows] += 1
                if only is not None:
                    for id in _beginning(record) if record.pieces else record.requests:
                        request = open_requests.get(id)
                        if request is not None:
                            only.waits_ns.append(now_ns - request.since_ns)
                else:
                    self._leave_queue(now_ns, record)
            elif kind is Finished:
                replica = replicas.get(record.replica)
                if replica is None or (batch := replica.running) is None or batch.batch != record.batch:
                    continue
                replica.running = None
                if replica.use is not None:
                    replica.use.end(now_ns)
                is_apart = self._resized and self._is_apart(batch)
                durations_ns = replica.group.resized_ns if is_apart else replica.group.durations_ns
                durations_ns[replica.rows].append(now_ns - replica.running_ns)
                if self._keeps_service:
                    _keep_service(replica, batch, record, now_ns)
                if self._unanswered:
                    self.workers.first_answer(now_ns, replica)
                if only is None:
                    self._pass_on(now_ns, batch, record, replica)
            elif (take := self._rare.get(kind)) is not None:
                take(now_ns, record)
                if not self.is_alone:
                    return

    def set_apart(self, batch: BatchId) -> None:
        """Count the duration of a running batch apart from the others, in `BatchGroup.resized_ns`."""
        self._resized.add(batch)

    def _is_apart(self, batch: StartBatch) -> bool:
        """Whether a batch that has finished was set apart; it is not any more."""
        is_apart = batch.batch in self._resized
        self._resized.discard(batch.batch)
        return is_apart

    # Derived values

    @property
    def waiting(self) -> int:
        """Visits in queues now."""
        if self._only is None:
            return sum(stage.queued for stage in self.stages.values())
        running = {id for batch in self.batches() if batch.running for id in batch.running.requests}
        return len(self.open) - len(running & self.open.keys())

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
        self.open[request.id] = made = GraphRequestRecord(request.sent_ns, self._second, now_ns, progress, {}, {}, {})
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
            if request is None or (batch.pieces and not self._completes(request, batch, id)):
                continue
            if accuracy is not None:
                total, count = request.accuracies.get(stage, (0.0, 0))
                request.accuracies[stage] = total + accuracy, count + 1
            self._queue(now_ns, request, request.progress.finish(stage, part, counts))

    def _completes(self, request: GraphRequestRecord, batch: StartBatch, id: RequestId) -> bool:
        """Whether a request has passed a stage with this batch, which has run pieces."""
        own = [piece for each, piece in zip(batch.requests, batch.pieces, strict=True) if each == id]
        for piece in own:
            if piece is None:
                return True
            done = request.rows_done.get(batch.stage, 0) + piece.rows
            request.rows_done[batch.stage] = done
            if done >= piece.of:
                return True
        return False

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

    def _lose_batch(self, now_ns: int, event: events.BatchLost) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.running is not None and replica.running.batch == event.batch:
            self.workers.break_pipeline(now_ns, replica)
            self._requeue(now_ns, replica, "worker")

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

    # Decisions

    def decide(self, now_ns: int, decided: actions.Decided) -> None:
        """Take the plan in force and replicas that drain from a decision."""
        if decided.plan is not None:
            self.plan, self.plan_ns = decided.plan, now_ns
        replica = self.replicas.get(decided.replica) if decided.replica is not None else None
        if decided.kind == "drain" and replica is not None:
            self.workers.drain(now_ns, replica)

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

    def keep(self, kept: Kept) -> None:
        """Keep so many seconds from now on, and what replicas measure of passes or not."""
        self.seconds = deque(self.seconds, maxlen=kept.seconds)
        self._keeps_service = kept.service

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


def _beginning(batch: StartBatch) -> list[RequestId]:
    """The requests of a batch of pieces that begin with it: those that run whole, and those whose first rows it has."""
    return [id for id, piece in zip(batch.requests, batch.pieces, strict=True) if piece is None or not piece.first]


def _keep_service(replica: ReplicaRecord, batch: StartBatch, finished: Finished, now_ns: int) -> None:
    """Add what the replica measured of a batch to the figures of its group."""
    group, visits = replica.group, len(batch.requests)
    group.service_ns.append(finished.service_ns)
    group.passes += finished.passes
    group.elements += finished.elements
    group.padded += finished.padded
    group.visits += visits
    group.visits_ns += visits * (now_ns - replica.running_ns)
