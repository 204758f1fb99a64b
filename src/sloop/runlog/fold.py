"""The only fold over the event log: the state of a run, and its measurements so far.

`DeploymentState` takes one event or action at a time, from the simulator, the live driver or a log that is read back. A
server's `/metrics` and `/v2/sloop/state`, the summary of a simulated run, tables, pages and `explain` all read it. None
of them tracks replicas, requests or counts separately, so that two of them cannot disagree.

It has a `RunState` for each version of each application: requests, stages, replicas, batches and their cost. What they
share it keeps itself: nodes, rollouts, decisions.

Measurements, which grow with a run, are kept in arrays of 8-byte integers (`Samples`). A server moves them into
histograms and keeps only the last few seconds. Everything else is bounded by the open requests and live replicas.

After the core, `append` is the largest cost of a simulated request. So each of the four records of a request is handled
in a single call, and an application with one stage skips all work for graphs. As long as there is only one application,
in one version, its records go straight to its `RunState`.
"""

import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar, Final, Protocol

from msgspec import Struct, field, structs

from sloop.actions import (
    AcquireNode,
    AdoptReplica,
    Assigned,
    AttachShadow,
    CancelTransfer,
    Decided,
    DetachShadow,
    End,
    Evict,
    ReleaseNode,
    RequestPlan,
    ResizeReplica,
    Rollout,
    StartBatch,
    StartReplica,
    StopReplica,
    Transfer,
    VersionState,
)
from sloop.app.graph import Graph, GraphStage
from sloop.app.progress import Entered, RequestProgress
from sloop.events import (
    BatchFailed,
    BatchLost,
    Deployed,
    Draining,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    Planned,
    ReplicaCompleted,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReady,
    ReplicaStopped,
    Resized,
    ShadowLost,
    ShadowReady,
    ShadowStopped,
    TransferFailed,
    Transferred,
)
from sloop.runlog import Record, Unlogged
from sloop.runlog.cost import CostAccount, NodeAccount
from sloop.units import NS_PER_S
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Form,
    Life,
    Node,
    NodeState,
    Outcome,
    Part,
    PipelineId,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    TransferId,
)

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
    hardware_microcore_ns: tuple[int, ...] = ()
    """Its parts by kind of hardware, in the order of `CostAccount.hardware_microcore_ns`; empty as long as there is
    only one kind."""

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
    """Batches of one variant on equal slots in the same form."""

    key: tuple[str, str]
    """Stage and variant."""
    slot: Slot
    form: Form = ALONE
    sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """How many batches of each size were started."""
    durations_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(_samples))
    """Per batch size, the durations of finished batches from order to answer, in ns."""
    resized_ns: "dict[int, Samples[int]]" = field(default_factory=lambda: defaultdict(_samples))
    """The same for batches that were set apart: the replica was resized, or changed its form, meanwhile, so they ran on
    more than one core count, or with a shadow in part."""
    service_ns: "Samples[int]" = field(default_factory=_samples)
    """Forward-pass times measured by the replicas, in ns; recorded only with `Kept.service`."""

    @property
    def cores(self) -> float:
        return self.slot.cores

    @property
    def hardware(self) -> str:
        return self.slot.hardware

    @property
    def variant_key(self) -> tuple[str, str, str]:
        """Stage, variant and kind of hardware: what a belief or a profile is of."""
        return (*self.key, self.slot.hardware)


DeviceName = tuple[str, str, str]
"""A kind of hardware, a node of it, and an accelerator of the node, "" for its cores."""


class DeviceUse(Struct):
    """For how long at least one batch has run on an accelerator, or on cores that replicas share without a cap."""

    running: int = 0
    since_ns: int = 0
    """Since when, if any runs."""
    ended_ns: int = 0
    """Before that."""

    def begin(self, now_ns: int) -> None:
        """A batch begins."""
        if not self.running:
            self.since_ns = now_ns
        self.running += 1

    def end(self, now_ns: int) -> None:
        """A batch is over."""
        self.running -= 1
        if not self.running:
            self.ended_ns += now_ns - self.since_ns

    def busy_ns(self, now_ns: int) -> int:
        """Until now."""
        return self.ended_ns + (now_ns - self.since_ns if self.running else 0)


class ReplicaRecord(Struct):
    """A replica between the order to start it and its end."""

    id: ReplicaId
    spec: ReplicaSpec
    group: BatchGroup
    """The batch group of its variant on its current slot, in its current form."""
    cores: float
    """In effect."""
    wanted_cores: float
    """Cores as last ordered."""
    order_ns: int
    """When it was ordered; -1 if an earlier server did that."""
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
    shadow: AttachShadow | None = None
    """The order of the shadow that it has. The replica serves alone until that is ready, and when it was told to
    stop."""
    part: Part | None = None
    """The layers that it has, if it has not all."""
    pipeline: PipelineId | None = None
    """The pipeline that serves or starts with it, also when it has all layers."""
    has_started: bool = False
    """Whether it has these, and waits for the other parts of its pipeline."""
    has_served: bool = False
    """Whether it was ready once: its cold start was over then, also if it waits for other layers now."""
    use: DeviceUse | None = None
    """Of the device that it may share with others; None for one with cores of its own."""

    def all_cores(self, cores: float) -> float:
        """These cores with those of its shadow."""
        return cores + (self.shadow.shadow.cores if self.shadow is not None else 0.0)


class PipelineAccount:
    """Pipelines: replicas that start as parts of one model, serve together, and get the other layers meanwhile."""

    def __init__(self) -> None:
        self.open: dict[PipelineId, dict[ReplicaId, ReplicaRecord]] = {}
        """The parts of each pipeline that serves, or starts."""
        self.parts = 0
        """Replicas that have started as parts."""
        self.lost = 0
        """Pipelines that were lost with a part before all had all layers."""
        self.completion_ns: defaultdict[tuple[str, str], Samples[int]] = defaultdict(_samples)
        """By stage and variant, the time in ns from the order of a part until it had all layers."""
        self.count = 0
        """Pipelines that have started."""
        self.unanswered: dict[PipelineId, int] = {}
        """When the parts were ordered of those that have not answered yet."""
        self.answer_ns: Samples[int] = _samples()
        """Times in ns from that order until a batch had passed all parts."""


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
    """The state of one version of an application after the records appended so far.

    `graph` is the application's graph. `cost` is the account to charge, by default one without prices. `accuracies` by
    (stage, variant) are multiplied along the routes of requests. `start_ns` is the start of the run, by default the
    instant of the first record. `others` take the records that are not about the version, by type. `uses` has the
    devices that all versions share.
    """

    NOT_IN_SNAPSHOT: ClassVar = ("on_second",)

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
        self.groups: dict[tuple[str, str, Slot, Form], BatchGroup] = {}
        self.uses = uses if uses is not None else {}
        self.cost = cost or CostAccount()
        self.cost.charged_ns = start_ns or 0
        self.seconds: deque[SecondRecord] = deque(maxlen=kept.seconds)
        self.served_ns, self.late_ns = _samples(), _samples()
        """Latencies of answered requests in ns, from sending to the end."""
        self.missed_ns = {outcome: _samples() for outcome in (Outcome.DROPPED, Outcome.REJECTED, Outcome.FAILED)}
        """Times in ns from sending to the end, of requests that were not answered."""
        self.routes: dict[frozenset[str], RouteRecord] = {}
        self.accuracy_sum, self.accuracy_count = 0.0, 0
        """Sum over answered requests; only for applications with several stages."""
        self.accuracies = accuracies or {}
        self.unknown_accuracy = not accuracies
        """Whether a variant with unknown accuracy has run a batch."""
        self.cold_starts = 0
        self.cold_start_ns: defaultdict[tuple[str, str, str], Samples[int]] = defaultdict(_samples)
        """By stage, variant and step."""
        self.resize_ns: defaultdict[str, Samples[int]] = defaultdict(_samples)
        """By stage, the times in ns from the order of a resize to its effect."""
        self.shadows, self.lost_shadows = 0, 0
        """How many shadows were ordered, and how many of them died."""
        self.pipelines = PipelineAccount()
        counters = (Counter[tuple[str, str]]() for _ in range(3))
        self.failed_batches, self.lost_replicas, self.adopted_replicas = counters
        self.failed_tries: Counter[tuple[str, str, str]] = Counter()
        """Visits that came to nothing, by stage, variant, and whether the model `raised` or the `worker` was lost."""
        self.on_second: Callable[[], None] | None = None
        """Called at the first record after the end of a second, so that a consumer can empty the samples."""
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
            BatchFailed: self._fail_batch,
            StartReplica: self._start_replica,
            AdoptReplica: self._adopt_replica,
            ReplicaProgressed: self._progress,
            ReplicaReady: self._ready,
            ReplicaCompleted: self._complete,
            BatchLost: self._lose_batch,
            ResizeReplica: self._order_resize,
            Resized: self._resize,
            AttachShadow: self._attach_shadow,
            DetachShadow: self._detach_shadow,
            ShadowReady: self._shadow_ready,
            ShadowLost: self._shadow_gone,
            ShadowStopped: self._shadow_gone,
            StopReplica: self._stop,
            ReplicaStopped: self._stopped,
            ReplicaLost: self._lost,
            Decided: self.decide,
            Unlogged: self._count_unlogged,
        }

    def restored(self) -> None:
        """Set what a snapshot does not have."""
        self.on_second = None

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

    def _fail_batch(self, now_ns: int, failed: BatchFailed) -> None:
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

    def _start_replica(self, now_ns: int, start: StartReplica) -> None:
        self.cold_starts += 1
        made = self._add_replica(now_ns, start.replica, start.spec, now_ns)
        if start.part is not None:
            self.pipelines.parts += 1
            made.part, made.pipeline = start.part, start.part.pipeline
            self._set_form(made, Form(bounds=start.part.bounds))
            if start.part.pipeline not in self.pipelines.open:
                self.pipelines.count += 1
                self.pipelines.open[start.part.pipeline] = {}
                self.pipelines.unanswered[start.part.pipeline] = now_ns
            self.pipelines.open[start.part.pipeline][made.id] = made

    def _adopt_replica(self, now_ns: int, adopted: AdoptReplica) -> None:
        made = self._add_replica(now_ns, adopted.replica, adopted.spec, -1)
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

    def _group(self, spec: ReplicaSpec, slot: Slot, form: Form = ALONE) -> BatchGroup:
        key = spec.stage, spec.variant, slot, form
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = BatchGroup((spec.stage, spec.variant), slot, form)
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
            replica.has_started = True
            if replica.part is None:
                self._serve(now_ns, replica)
                return
            pipeline = self.pipelines.open.get(replica.part.pipeline, {})
            if len(pipeline) == len(replica.part.bounds) - 1 and all(each.has_started for each in pipeline.values()):
                for each in pipeline.values():
                    self._serve(now_ns, each)

    def _serve(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica takes batches from now on."""
        if replica.order_ns >= 0 and replica.life is Life.STARTING and not replica.has_served:
            self.cold_start_ns[(*replica.group.key, COLD_START)].append(now_ns - replica.order_ns)
        replica.life, replica.since_ns, replica.has_served = Life.READY, now_ns, True

    def _complete(self, now_ns: int, event: ReplicaCompleted) -> None:
        """A part of a pipeline has all layers; when all parts have, they are replicas of their own."""
        replica = self.replicas.get(event.replica)
        if replica is None or replica.part is None or not replica.has_started:
            return
        number, replica.part = replica.part.pipeline, None
        self.pipelines.completion_ns[replica.group.key].append(now_ns - replica.order_ns)
        pipeline = self.pipelines.open.get(number)
        if pipeline is None:
            if replica.life is Life.STARTING:
                self._serve(now_ns, replica)
        elif all(each.part is None and each.life is not Life.STARTING for each in pipeline.values()):
            self._dissolve(number)

    def _first_answer(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica has answered a batch: if that has passed a pipeline, count the first one."""
        number = replica.pipeline
        order_ns = self.pipelines.unanswered.pop(number, None) if number is not None else None
        if order_ns is not None:
            self.pipelines.answer_ns.append(now_ns - order_ns)

    def _dissolve(self, number: PipelineId) -> None:
        self.pipelines.unanswered.pop(number, None)
        for each in self.pipelines.open.pop(number).values():
            each.pipeline = None
            self._set_form(each, ALONE)

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

    def _lose_batch(self, now_ns: int, event: BatchLost) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.running is not None and replica.running.batch == event.batch:
            self._break_pipeline(now_ns, replica)
            self._requeue(now_ns, replica, "worker")

    def _order_resize(self, now_ns: int, order: ResizeReplica) -> None:
        replica = self.replicas.get(order.replica)
        if replica is not None:
            replica.wanted_cores, replica.resize_ns = order.cores, now_ns
            self.cost.grow(now_ns, order.replica, replica.all_cores(order.cores))

    def _resize(self, now_ns: int, event: Resized) -> None:
        replica = self.replicas.get(event.replica)
        if replica is None:
            return
        self.cost.allocate(now_ns, replica.id, replica.spec, replica.all_cores(event.cores))
        if replica.running is not None and event.cores != replica.cores:
            self._resized.add(replica.running.batch)
        slot = structs.replace(replica.spec.slot, cores=event.cores)
        replica.cores, replica.group = event.cores, self._group(replica.spec, slot, replica.group.form)
        if replica.resize_ns:
            self.resize_ns[replica.spec.stage].append(now_ns - replica.resize_ns)
            replica.resize_ns = 0

    def _attach_shadow(self, now_ns: int, order: AttachShadow) -> None:
        replica = self.replicas.get(order.replica)
        if replica is not None:
            self.shadows += 1
            replica.shadow = order
            self._charge_shadow(now_ns, replica)

    def _detach_shadow(self, now_ns: int, order: DetachShadow) -> None:
        replica = self.replicas.get(order.replica)
        if replica is not None:
            self._set_form(replica, ALONE)

    def _shadow_ready(self, now_ns: int, event: ShadowReady) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.shadow is not None and replica.shadow.number == event.number:
            self._set_form(replica, Form(replica.shadow.shadow))

    def _shadow_gone(self, now_ns: int, event: ShadowLost | ShadowStopped) -> None:
        replica = self.replicas.get(event.replica)
        if replica is not None and replica.shadow is not None and replica.shadow.number == event.number:
            self.lost_shadows += isinstance(event, ShadowLost)
            self._set_form(replica, ALONE)
            replica.shadow = None
            self._charge_shadow(now_ns, replica)

    def _charge_shadow(self, now_ns: int, replica: ReplicaRecord) -> None:
        """Charge a replica for the cores that it has with its shadow from now on."""
        cores = max(replica.cores, replica.wanted_cores) if replica.resize_ns else replica.cores
        self.cost.allocate(now_ns, replica.id, replica.spec, replica.all_cores(cores))

    def _set_form(self, replica: ReplicaRecord, form: Form) -> None:
        if replica.group.form != form:
            if replica.running is not None:
                self._resized.add(replica.running.batch)
            replica.group = self._group(replica.spec, replica.group.slot, form)

    def _stop(self, now_ns: int, order: StopReplica) -> None:
        replica = self.replicas.get(order.replica)
        if replica is not None:
            self._drain(now_ns, replica)
            # A stuck replica: its batch may run elsewhere before the replica has stopped.
            self._requeue(now_ns, replica, "worker")

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
            self._requeue(now_ns, replica, "worker")
            self._break_pipeline(now_ns, replica)
        return replica

    def decide(self, now_ns: int, decided: Decided) -> None:
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
            if self.on_second is not None:
                self.on_second()
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


# Weights


class TransferRecord(Struct):
    """A transfer of weights under way, and the receivers that have yet to get them."""

    order: Transfer
    since_ns: int
    receivers: dict[str, None]


class WeightAccount:
    """The transfers of weights between the store and the nodes, and what was evicted."""

    def __init__(self) -> None:
        self.open: dict[TransferId, TransferRecord] = {}
        self.received: Counter[str] = Counter()
        """How many receivers got weights `from the store`, and how many `from a node`."""
        self.received_bytes: Counter[str] = Counter()
        """The same in bytes."""
        self.transfer_ns: defaultdict[str, Samples[int]] = defaultdict(_samples)
        """By the same, the times in ns from the order until a receiver had them."""
        self.failed = 0
        """Receivers that did not get them, although they were not lost."""
        self.cancelled = 0
        """Receivers that did not get them because nobody waited for them any more."""
        self.evicted = 0
        """How many times a node deleted the files of a model."""

    def order(self, now_ns: int, order: Transfer) -> None:
        """A transfer begins."""
        self.open[order.transfer] = TransferRecord(order, now_ns, dict.fromkeys(order.receivers))

    def arrive(self, now_ns: int, event: Transferred) -> None:
        """A receiver has the weights."""
        record = self._end(event.transfer, event.node)
        if record is not None:
            source = "from a node" if record.order.source else "from the store"
            self.received[source] += 1
            self.received_bytes[source] += record.order.weights.size_bytes
            self.transfer_ns[source].append(now_ns - record.since_ns)

    def fail(self, now_ns: int, event: TransferFailed) -> None:
        """A receiver will not get them."""
        self.failed += self._end(event.transfer, event.node) is not None

    def cancel(self, now_ns: int, order: CancelTransfer) -> None:
        """A receiver is not to get them any more."""
        self.cancelled += self._end(order.transfer, order.node) is not None

    def evict(self, now_ns: int, order: Evict) -> None:
        """A node deletes files."""
        self.evicted += 1

    def lose(self, node: str) -> None:
        """A node is gone, and receives nothing any more."""
        for transfer in list(self.open):
            self._end(transfer, node)

    def _end(self, transfer: TransferId, node: str) -> TransferRecord | None:
        record = self.open.get(transfer)
        if record is None or node not in record.receivers:
            return None
        del record.receivers[node]
        if not record.receivers:
            del self.open[transfer]
        return record


# Deployments


class StaticEstimate(Protocol):
    """The estimate of a variant on one kind of hardware, as far as figures and explanations need it; a core's `Belief`
    satisfies it."""

    @property
    def batch_max(self) -> int: ...
    @property
    def accuracy(self) -> float | None: ...

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        """Estimated durations in ns indexed by batch size, from 0 to `batch_max`."""
        ...

    def observe(self, batch: int, slot: Slot, taken_ns: int) -> None:
        """Learn from a finished batch; only explanations do so, as the core did."""
        ...

    def of(self, form: Form) -> "StaticEstimate":
        """The estimate of replicas of another form."""
        ...


class VersionParts(Protocol):
    """What the fold needs to know of a version; the core's `ApplicationParts` have it."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def beliefs(self) -> Mapping[tuple[str, str, str], StaticEstimate]: ...


class OnlyGraph:
    """The parts of an application of which nothing is known but the graph, and perhaps the beliefs."""

    name, version, key = "", "1", ""

    def __init__(self, graph: Graph, beliefs: Mapping[tuple[str, str, str], StaticEstimate] | None = None) -> None:
        self.graph = graph
        self.beliefs = beliefs or {}


Build = Callable[[str, str, Mapping[str, Any]], VersionParts]
"""Makes the parts of a version from its application's name, its version and its definition; see `core.Build`."""


class VersionRecord(Struct, eq=False):
    """One version of an application, from its deployment on, also after it has ended."""

    parts: VersionParts
    run: RunState
    state: VersionState
    share: float
    """Fraction of the application's requests that it gets."""
    since_ns: int
    """When it entered its state."""
    why: str = ""
    """The reason for its state."""
    planner_error: str = ""
    """Why its policy last failed to plan."""
    definition: Mapping[str, Any] | None = None
    """What it was built from; None if it was there from the start."""

    @property
    def application(self) -> str:
        return self.parts.name

    @property
    def version(self) -> str:
        return self.parts.version

    @property
    def key(self) -> str:
        return self.parts.key

    @property
    def has_ended(self) -> bool:
        return self.state is VersionState.RETIRED


class DeploymentState:
    """The state of a run after the records appended so far: all applications in all their versions, and the nodes.

    `parts` describe the applications that are there from the start. Versions that are deployed later are described by
    `build`; a fold that never gets one needs none, and is quicker for a single application. `nodes` is the cluster.
    `start_ns` is the start of the run, by default the instant of the first record. `on_second` is called with a version
    at its first record after the end of a second.
    """

    NOT_IN_SNAPSHOT: ClassVar = ("_on_second", "last_decisions")

    def __init__(
        self,
        parts: Iterable[VersionParts],
        *,
        nodes: Iterable[Node] = (),
        build: Build | None = None,
        start_ns: int | None = None,
        kept: Kept = Kept(),  # noqa: B008  # frozen
        on_second: Callable[[VersionRecord], None] | None = None,
    ) -> None:
        self.records: list[VersionRecord] = []
        """Every version that there was, in the order of deployment."""
        self.versions: dict[str, VersionRecord] = {}
        """By key. A version that was deployed again has replaced the earlier one."""
        self.nodes = NodeAccount(nodes, steps_kept=kept.seconds)
        self.weights = WeightAccount()
        self.uses: dict[DeviceName, DeviceUse] = {}
        """Of accelerators, and of the cores of nodes whose replicas have no cap."""
        self.draining = False
        """Whether the server is shutting down."""
        self.decisions: Counter[tuple[str, str]] = Counter()
        """By key of the version, or "" for the cluster, and kind of decision."""
        self.last_decisions: deque[tuple[int, Decided | Rollout]] = deque(maxlen=kept.decisions)
        self.rollouts: Counter[tuple[str, VersionState]] = Counter()
        """By application, how often a version has entered each state."""
        self.plan_ns = _samples()
        """Times in ns from the request of a plan to the plan."""
        self.unserved: RunState | None = None
        """Requests for applications that were not deployed; None if there were none."""
        self._build = build
        self._kept = kept
        self._on_second = on_second
        self._start_ns = start_ns
        self._now_ns = start_ns or 0
        self._has_begun = self._nodes_begun = False
        self._requested: tuple[int, int] | None = None
        """The number of the last plan request, and its instant."""
        self._deployed: dict[tuple[str, str], Deployed] = {}
        """Deployments that the core has not yet announced."""
        self._run_of_stage: dict[str, RunState] = {}
        self._run_of_replica: dict[ReplicaId, RunState] = {}
        self._run_of_request: dict[RequestId, RunState] = {}
        self._unassigned: dict[RequestId, Request] = {}
        """Requests of an application with several versions, until their version is known."""
        self._only_run: dict[str, RunState | None] = {}
        """By application, the run of its only version; None if it has several."""
        shared = self._shared_handlers()
        self._handlers = shared | {
            Request: self._arrive,
            End: self._end,
            Unlogged: self._count_unlogged,
            StartReplica: self._start_replica,
            AdoptReplica: self._start_replica,
            **dict.fromkeys(_ABOUT_REPLICAS, self._pass_on),
        }
        self._plain: RunState | None = None
        """The only run there is, which takes all records itself."""
        found = list(parts)
        for each in found:
            self._add(each, VersionState.SERVING, 1.0, others=shared if len(found) == 1 else None)
        if len(found) == 1:
            self._plain = self.records[0].run
        self._append: Callable[[int, Any], None] = self._plain.append if self._plain is not None else self._route
        self.append: Callable[[int, Any], None] = self._append if build is None else self._append_any
        """Adds one record; instants never decrease."""

    def _shared_handlers(self) -> dict[type, Callable[[int, Any], None]]:
        """The records that are about several versions or about none, by type."""
        return {
            Assigned: self._assign,
            Decided: self._decide,
            Deployed: self._deploy,
            Rollout: self._roll_out,
            AcquireNode: self._acquire,
            ReleaseNode: self._release,
            NodeReady: self._node_ready,
            NodeLost: self._node_lost,
            NodeReleased: self._node_released,
            Transfer: self.weights.order,
            CancelTransfer: self.weights.cancel,
            Transferred: self.weights.arrive,
            TransferFailed: self.weights.fail,
            Evict: self.weights.evict,
            RequestPlan: self._request_plan,
            Planned: self._planned,
            Draining: self._begin_draining,
        }

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Add the records of one instant, in order."""
        for record in records:
            self._append(now_ns, record)  # read anew: a record may add the second version

    def restored(self) -> None:
        """Set what a snapshot does not have."""
        self._on_second = None
        self.last_decisions = deque(maxlen=self._kept.decisions)

    def advance(self) -> None:
        """Bring all runs and accounts to the instant of the last record. Call it before reading versions that may have
        had no records for a while."""
        self.advance_nodes()
        for record in self.records:
            if not record.has_ended:
                record.run.advance(self.now_ns)

    def advance_nodes(self) -> None:
        """Bring the accounts of the nodes to the instant of the last record."""
        self._begin_nodes()
        self.nodes.charge(self.now_ns)

    # Derived values

    @property
    def build(self) -> Build | None:
        """Makes the parts of versions that are deployed later."""
        return self._build

    @property
    def start_ns(self) -> int | None:
        """The start of the run; None before the first record."""
        return self._plain.start_ns if self._plain is not None else self._start_ns

    @property
    def now_ns(self) -> int:
        """The instant of the last record."""
        return self._plain.now_ns if self._plain is not None else self._now_ns

    @property
    def runs(self) -> list[RunState]:
        """The runs of all versions, ended ones included, and of requests that no application has served."""
        runs = [record.run for record in self.records]
        return [*runs, self.unserved] if self.unserved is not None else runs

    @property
    def only(self) -> RunState:
        """The run of the only version. ValueError if there are, or were, several."""
        (record,) = self.records
        return record.run

    @property
    def applications(self) -> dict[str, list[VersionRecord]]:
        """All versions that there were, by application."""
        found: dict[str, list[VersionRecord]] = {}
        for record in self.records:
            found.setdefault(record.application, []).append(record)
        return found

    def run_of_stage(self, stage: str) -> RunState | None:
        """The run of the version that has this stage."""
        return self._run_of_stage.get(stage)

    def run_of_replica(self, id: ReplicaId) -> RunState | None:
        """The run of the version that has this replica."""
        if self._plain is not None:
            return self._plain if id in self._plain.replicas else None
        return self._run_of_replica.get(id)

    def run_of_request(self, id: RequestId) -> RunState | None:
        """The run of the version that an open request belongs to; None also while its version is not known."""
        if self._plain is not None:
            return self._plain if id in self._plain.open else None
        return self._run_of_request.get(id)

    def version_of(self, run: RunState) -> VersionRecord | None:
        """The version that a run is of."""
        return next((record for record in self.records if record.run is run), None)

    def version_for(self, decided: Decided) -> VersionRecord | None:
        """The version that a decision is about; None for the nodes."""
        if decided.kind == "node":
            return None
        return self.records[0] if len(self.records) == 1 else self.versions.get(decided.application)

    def keep(self, kept: Kept) -> None:
        """Keep so many seconds and decisions from now on; those that are gone do not come back."""
        self._kept = kept
        self.last_decisions = deque(self.last_decisions, maxlen=kept.decisions)
        for run in self.runs:
            run.seconds = deque(run.seconds, maxlen=kept.seconds)

    def forget(self, record: VersionRecord) -> None:
        """Drop a version that has ended, with all its measurements."""
        assert record.has_ended, record.key
        self.records.remove(record)
        if self.versions.get(record.key) is record:
            del self.versions[record.key]
        for stage in record.run.stages:
            if self._run_of_stage.get(stage) is record.run:
                del self._run_of_stage[stage]

    # Several applications or versions

    def _append_any(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # any record
        self._append(now_ns, record)

    def _route(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # any record
        """Pass a record to the version that it is about."""
        if not self._has_begun:
            self._begin(now_ns)
        self._now_ns = now_ns
        take = self._handlers.get(type(record))
        if take is not None:
            take(now_ns, record)

    def _pass_on(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # one of _ABOUT_REPLICAS
        run = self._run_of_replica.get(record.replica)
        if run is not None:
            run.append(now_ns, record)
            if record.replica not in run.replicas:
                del self._run_of_replica[record.replica]

    def _start_replica(self, now_ns: int, start: StartReplica | AdoptReplica) -> None:
        run = self._run_of_stage.get(start.spec.stage)
        if run is not None:
            self._run_of_replica[start.replica] = run
            run.append(now_ns, start)

    def _begin(self, now_ns: int) -> None:
        """The first record: all runs have the same start."""
        self._has_begun = True
        if self._start_ns is None:
            self._start_ns = now_ns
        for record in self.records:
            if not record.run.seconds:
                record.run.begin(self._start_ns, self._start_ns)

    def _begin_nodes(self) -> None:
        """Charge nodes from the start of the run, as soon as it is known."""
        start_ns = self.start_ns
        if not self._nodes_begun and start_ns is not None:
            self._nodes_begun = True
            self.nodes.begin(start_ns)
            for record in self.records:
                record.since_ns = max(record.since_ns, start_ns)

    def _add(
        self,
        parts: VersionParts,
        state: VersionState,
        share: float,
        *,
        others: Mapping[type, Callable[[int, Any], None]] | None = None,
    ) -> VersionRecord:
        """Add a version."""
        accuracies = {(stage, variant): belief.accuracy for (stage, variant, _), belief in parts.beliefs.items()}
        run = RunState(
            parts.graph,
            cost=CostAccount(self.nodes.nodes),
            accuracies=accuracies,
            start_ns=self._start_ns,
            kept=self._kept,
            others=others,
            uses=self.uses,
        )
        record = VersionRecord(parts, run, state, share, self.now_ns)
        if self._on_second is not None:
            run.on_second = partial(self._on_second, record)
        self.records.append(record)
        self.versions[parts.key] = record
        self._run_of_stage |= dict.fromkeys(run.stages, run)
        self._count_versions()
        return record

    def _count_versions(self) -> None:
        """Which applications have only one version. As in the core, a request without a name is for the only
        application."""
        present: dict[str, list[RunState]] = {}
        for record in self.records:
            if not record.has_ended:
                present.setdefault(record.application, []).append(record.run)
        self._only_run = {name: runs[0] if len(runs) == 1 else None for name, runs in present.items()}
        if len(present) == 1:
            (self._only_run[""],) = self._only_run.values()

    def _several(self) -> None:
        """There is a second version: route records from now on."""
        plain = self._plain
        if plain is None:
            return
        self._start_ns, self._now_ns, self._has_begun = plain.start_ns, plain.now_ns, True
        self._run_of_request = dict.fromkeys(plain.open, plain)
        self._run_of_replica = dict.fromkeys(plain.replicas, plain)
        self._plain = None
        self._append = self._route

    def _arrive(self, now_ns: int, request: Request) -> None:
        """Count a request at the only version of its application. If there are several, `Assigned` tells which."""
        name = request.application
        if name in self._only_run:
            run = self._only_run[name]
            if run is None:
                self._unassigned[request.id] = request
                return
        else:
            run = self._last_run(name)
        self._run_of_request[request.id] = run
        run.append(now_ns, request)

    def _assign(self, now_ns: int, assigned: Assigned) -> None:
        request, record = self._unassigned.pop(assigned.request, None), self.versions.get(assigned.application)
        if request is not None and record is not None:
            self._run_of_request[request.id] = record.run
            record.run.append(now_ns, request)

    def _end(self, now_ns: int, end: End) -> None:
        run = self._run_of_request.pop(end.request, None)
        if run is None:
            request = self._unassigned.pop(end.request, None)
            if request is None:
                return
            run = self._last_run(request.application)
            run.append(now_ns, request)
        run.append(now_ns, end)

    def _count_unlogged(self, now_ns: int, unlogged: Unlogged) -> None:
        record = self.versions.get(unlogged.application)
        if record is not None:
            record.run.append(now_ns, unlogged)

    def _last_run(self, name: str) -> RunState:
        """Where requests are counted that no version serves: at the newest version of their application."""
        runs = [record.run for record in self.records if record.application == name]
        if runs:
            return runs[-1]
        if self.unserved is None:
            start_ns = self._start_ns or 0
            self.unserved = RunState(Graph([GraphStage("")]), start_ns=start_ns, kept=self._kept)
            self.unserved.begin(start_ns, self._now_ns)
        return self.unserved

    # Rollouts

    def _deploy(self, now_ns: int, deployed: Deployed) -> None:
        self._deployed[deployed.application, deployed.version] = deployed

    def _roll_out(self, now_ns: int, rollout: Rollout) -> None:
        """A version enters a state. It is added when the core announces it, because the core refuses definitions that
        it cannot build."""
        self._note(now_ns, rollout, (rollout.application, "rollout"))
        self.rollouts[rollout.application, rollout.state] += 1
        deployed = self._deployed.pop((rollout.application, rollout.version), None)
        if deployed is not None and rollout.state is not VersionState.RETIRED:
            self._add_deployed(now_ns, deployed)
        record = next(
            (
                each
                for each in reversed(self.records)
                if (each.application, each.version) == (rollout.application, rollout.version) and not each.has_ended
            ),
            None,
        )
        if record is None:
            return
        record.state, record.share, record.why, record.since_ns = rollout.state, rollout.share, rollout.why, now_ns
        present = [each for each in self.records if each.application == record.application]
        canaries = math.fsum(each.share for each in present if each.state is VersionState.CANARY)
        for each in present:
            if each.state is VersionState.SERVING:
                each.share = 1.0 - canaries
        if record.has_ended:
            record.run.advance(now_ns)
            self._count_versions()
            self._assign_rest(now_ns)

    def _add_deployed(self, now_ns: int, deployed: Deployed) -> None:
        assert self._build is not None, "this fold cannot learn versions that are deployed later; give it `build`"
        parts = self._build(deployed.application, deployed.version, deployed.definition)
        self._several()
        record = self._add(parts, VersionState.STARTING, 0.0)
        record.definition = deployed.definition
        record.run.begin(self._start_ns or 0, now_ns)

    def _assign_rest(self, now_ns: int) -> None:
        """The last version but one has ended in answer to the arrival of a request, which is then not assigned."""
        for request in list(self._unassigned.values()):
            if self._only_run.get(request.application) is not None:
                del self._unassigned[request.id]
                self._arrive(now_ns, request)

    # Decisions and plans

    def _note(self, now_ns: int, decision: Decided | Rollout, key: tuple[str, str]) -> None:
        self.decisions[key] += 1
        self.last_decisions.append((now_ns, decision))

    def _decide(self, now_ns: int, decided: Decided) -> None:
        record = self.version_for(decided)
        self._note(now_ns, decided, (record.key if record is not None else "", decided.kind))
        if record is not None:
            record.run.decide(now_ns, decided)
            if decided.kind == "planner":
                record.planner_error = decided.why

    def _request_plan(self, now_ns: int, request: RequestPlan) -> None:
        self._requested = request.number, now_ns

    def _planned(self, now_ns: int, planned: Planned) -> None:
        if self._requested is not None and self._requested[0] == planned.number:
            self.plan_ns.append(now_ns - self._requested[1])
            self._requested = None

    def _begin_draining(self, now_ns: int, _: Draining) -> None:
        self.draining = True

    # Nodes

    def _acquire(self, now_ns: int, order: AcquireNode) -> None:
        self._change_node(now_ns, order.node, NodeState.ACQUIRING)

    def _release(self, now_ns: int, order: ReleaseNode) -> None:
        self._change_node(now_ns, order.node, NodeState.RELEASING)

    def _node_lost(self, now_ns: int, event: NodeLost) -> None:
        self.weights.lose(event.node)
        self._change_node(now_ns, event.node, NodeState.LOST)

    def _node_released(self, now_ns: int, event: NodeReleased) -> None:
        self.weights.lose(event.node)
        self._change_node(now_ns, event.node, NodeState.RELEASED)

    def _change_node(self, now_ns: int, node: str, state: NodeState) -> None:
        self._begin_nodes()
        self.nodes.change(now_ns, node, state)

    def _node_ready(self, now_ns: int, event: NodeReady) -> None:
        self._begin_nodes()
        self.nodes.ready(now_ns, event.node)


_ABOUT_REPLICAS: Final = frozenset(
    {
        StartBatch,
        Finished,
        BatchFailed,
        BatchLost,
        ReplicaCompleted,
        ReplicaProgressed,
        ReplicaReady,
        ReplicaLost,
        ReplicaStopped,
        Resized,
        StopReplica,
        ResizeReplica,
        AttachShadow,
        DetachShadow,
        ShadowReady,
        ShadowLost,
        ShadowStopped,
    }
)
"""Records with a replica that has been started before."""
