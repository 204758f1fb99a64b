"""Where a run stood at an instant: replicas, batches, waiting requests, the plan in force. A fold over the log.

Promises to show what the core could have known, with beliefs corrected as the core's were if fresh ones are given.
Memory is bounded by replicas and requests in flight, plus the counts of the last `RECENT_S` seconds. Knows no truth.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from sloop.actions import Decided, End, StartBatch, StartReplica, StopReplica
from sloop.core.views import Belief
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaProgressed, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import Record
from sloop.units import NS_PER_S
from sloop.vocabulary import BatchId, Life, Outcome, Plan, ReplicaId, ReplicaSpec, Request, RequestId

RECENT_S: Final = 10


class Running(Struct, frozen=True):
    """A batch in service, and how long it was believed to take; 0 where nothing is believed."""

    batch: StartBatch
    since_ns: int
    cores: float
    believed_ns: int


class Hosted(Struct):
    """A replica as the log tells of it."""

    id: ReplicaId
    spec: ReplicaSpec
    cores: float
    life: Life
    since_ns: int
    running: BatchId | None = None
    step: str = ""
    """The step of its cold start it was last heard in."""


class Lately(Struct):
    """Counts of one second."""

    start_s: int
    arrivals: int = 0
    served: int = 0
    missed: int = 0


class Situation:
    """A `Sink` whose fields always tell the present. `beliefs` must be fresh ones, for they learn as the run goes."""

    def __init__(self, beliefs: Mapping[tuple[str, str], Belief] | None = None) -> None:
        self.now_ns = 0
        self.start_ns: int | None = None
        self.plan: Plan | None = None
        self.plan_ns = 0
        self.replicas: dict[ReplicaId, Hosted] = {}
        self.batches: dict[BatchId, Running] = {}
        self.open: dict[RequestId, Request] = {}
        self.waiting: dict[RequestId, int] = {}
        """Since when each waiting request waits."""
        self.lately: deque[Lately] = deque(maxlen=RECENT_S + 1)
        self._beliefs = beliefs or {}
        folds: dict[type, Callable[[int, Any], None]] = {
            Request: self._arrive,
            End: self._end,
            StartBatch: self._start_batch,
            Finished: self._finish_batch,
            BatchFailed: self._fail_batch,
            StartReplica: self._start_replica,
            ReplicaProgressed: self._progress,
            ReplicaReady: self._ready,
            StopReplica: self._drain,
            Resized: self._resize,
            ReplicaStopped: self._lose,
            ReplicaLost: self._lose,
            Decided: self._decide,
        }
        self._fold_of = folds.get

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record; instants never decrease."""
        if self.start_ns is None:
            self.start_ns = now_ns
        self.now_ns = now_ns
        fold = self._fold_of(type(record))
        if fold is not None:
            fold(now_ns, record)

    def believed_ns(self, replica: ReplicaId, batch: int) -> int:
        """What a batch of this size is now believed to take there; 0 where nothing is believed."""
        hosted = self.replicas.get(replica)
        belief = self._belief(hosted)
        if hosted is None or belief is None or not 0 < batch <= belief.batch_max:
            return 0
        return belief.costs_ns(hosted.cores)[batch]

    def count(self, life: Life) -> int:
        """Replicas in this state of life."""
        return sum(hosted.life is life for hosted in self.replicas.values())

    def _belief(self, hosted: Hosted | None) -> Belief | None:
        return self._beliefs.get((hosted.spec.stage, hosted.spec.variant)) if hosted else None

    def _second(self, now_ns: int) -> Lately:
        start_s = now_ns // NS_PER_S
        if not self.lately or self.lately[-1].start_s != start_s:
            self.lately.append(Lately(start_s))
        return self.lately[-1]

    def _arrive(self, now_ns: int, request: Request) -> None:
        self.open[request.id] = request
        self.waiting[request.id] = now_ns
        self._second(now_ns).arrivals += 1

    def _end(self, now_ns: int, end: End) -> None:
        if self.open.pop(end.request, None) is None:
            return
        self.waiting.pop(end.request, None)
        second = self._second(now_ns)
        if end.outcome is Outcome.SERVED:
            second.served += 1
        else:
            second.missed += 1

    def _start_batch(self, now_ns: int, batch: StartBatch) -> None:
        for request in batch.requests:
            self.waiting.pop(request, None)
        hosted = self.replicas.get(batch.replica)
        believed_ns = self.believed_ns(batch.replica, len(batch.requests))
        self.batches[batch.batch] = Running(batch, now_ns, hosted.cores if hosted else 0.0, believed_ns)
        if hosted is not None:
            hosted.running = batch.batch

    def _finish_batch(self, now_ns: int, finished: Finished) -> None:
        running = self.batches.get(finished.batch)
        belief = self._belief(self.replicas.get(finished.replica))
        if running is not None and belief is not None:
            belief.observe(len(running.batch.requests), running.cores, now_ns - running.since_ns)
        self._leave(now_ns, finished.batch)

    def _fail_batch(self, now_ns: int, failed: BatchFailed) -> None:
        self._leave(now_ns, failed.batch)

    def _leave(self, now_ns: int, batch: BatchId) -> None:
        running = self.batches.pop(batch, None)
        if running is None:
            return
        hosted = self.replicas.get(running.batch.replica)
        if hosted is not None and hosted.running == batch:
            hosted.running = None
        for request in running.batch.requests:
            if request in self.open:
                self.waiting[request] = now_ns

    def _start_replica(self, now_ns: int, start: StartReplica) -> None:
        self.replicas[start.replica] = Hosted(start.replica, start.spec, start.spec.cores, Life.STARTING, now_ns)

    def _progress(self, now_ns: int, progressed: ReplicaProgressed) -> None:
        hosted = self.replicas.get(progressed.replica)
        if hosted is not None:
            hosted.step = progressed.step

    def _ready(self, now_ns: int, ready: ReplicaReady) -> None:
        self._live(now_ns, ready.replica, Life.READY)

    def _drain(self, now_ns: int, stop: StopReplica) -> None:
        self._live(now_ns, stop.replica, Life.DRAINING)

    def _live(self, now_ns: int, replica: ReplicaId, life: Life) -> None:
        hosted = self.replicas.get(replica)
        if hosted is not None:
            hosted.life, hosted.since_ns = life, now_ns

    def _resize(self, now_ns: int, resized: Resized) -> None:
        hosted = self.replicas.get(resized.replica)
        if hosted is not None:
            hosted.cores = resized.cores

    def _lose(self, now_ns: int, gone: ReplicaLost | ReplicaStopped) -> None:
        hosted = self.replicas.pop(gone.replica, None)
        if hosted is not None and hosted.running is not None:
            self._leave(now_ns, hosted.running)

    def _decide(self, now_ns: int, decided: Decided) -> None:
        if decided.plan is not None:
            self.plan, self.plan_ns = decided.plan, now_ns
        if decided.kind == "drain" and decided.replica is not None:
            self._live(now_ns, decided.replica, Life.DRAINING)
