"""Prometheus metrics as a fold over the event log.

Whatever happens in any worker process reaches the one core as an event, and this fold sees every event and action, so
the numbers are right across processes by construction: nothing is sampled, merged or kept in shared memory. All are
told in base units with their unit in the name. Knows no queue and no clock but the log's.
Source: Prometheus text exposition format 0.0.4; its naming practices (base units, `_total`).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sloop.actions import Decided, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.app.application import Application
from sloop.app.journey import Entered, Journey
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaProgressed, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import Record
from sloop.units import NS_PER_S, to_s
from sloop.vocabulary import BatchId, Life, Outcome, ReplicaId, Request, RequestId

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
START_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WHOLE_START: Final = "total"
"""The step that stands for a whole cold start, from the order to ready."""

Labels = tuple[str, ...]


class Histogram:
    """Counts by upper bound; the last bucket has none. Values are integers: ns, or requests."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        """Take one value in."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self, names: Sequence[float]) -> list[tuple[str, float]]:
        """`(le, count of values ≤ le)`, as Prometheus wants them."""
        told, so_far = [], 0
        for name, count in zip((*map(str, names), "+Inf"), self.counts, strict=True):
            so_far += count
            told.append((name, float(so_far)))
        return told


class Histograms(dict[Labels, Histogram]):
    """A histogram for every combination of labels that occurs. `scale` turns its integers into the metric's unit."""

    def __init__(self, name: str, about: str, labels: Labels, bounds: Sequence[float], scale: int = NS_PER_S) -> None:
        super().__init__()
        self.name, self.about, self.labels, self.names, self.scale = name, about, labels, bounds, scale
        self._bounds = [round(bound * scale) for bound in bounds]

    def __missing__(self, labels: Labels) -> Histogram:
        self[labels] = made = Histogram(self._bounds)
        return made

    def family(self) -> Metric:
        """As prometheus_client writes it."""
        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        for labels, histogram in self.items():
            family.add_metric(labels, histogram.cumulative(self.names), histogram.total / self.scale)
        return family


class Replica:
    """What the fold remembers of a replica that is not gone."""

    __slots__ = ("batch", "cores", "key", "life", "resized_ns", "started_ns", "step", "step_ns")

    def __init__(self, key: Labels, cores: float, now_ns: int) -> None:
        self.key = key
        self.cores = cores
        self.life = Life.STARTING
        self.batch: StartBatch | None = None
        self.started_ns = self.step_ns = now_ns
        self.step = ""
        self.resized_ns = 0


class Metrics(Collector):
    """A recorder that can be scraped, and `others` with it, which measure what the log does not see."""

    def __init__(self, application: Application, *others: Collector) -> None:
        self._stages = tuple(stage.name for stage in application.order)
        self._graph = application.graph
        self._only = self._stages[0] if len(self._stages) == 1 else ""
        self._sent: dict[RequestId, int] = {}
        self._journeys: dict[RequestId, Journey] = {}
        """Where those under way are, in an application of several stages."""
        self._places: dict[RequestId, list[tuple[str, int]]] = {}
        """Where those have been queued, stage and part."""
        self._queued: dict[str, dict[tuple[RequestId, int], int]] = {stage: {} for stage in self._stages}
        """Per stage, when those who wait there entered its queue."""
        self._replicas: dict[ReplicaId, Replica] = {}
        self._core_ns: Counter[str] = Counter()
        self._cores_since_ns = self._now_ns = 0
        self.failed_batches: Counter[Labels] = Counter()
        self.lost: Counter[Labels] = Counter()
        self.drops: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        self.durations = Histograms(
            "sloop_request_duration_seconds", "From sending to the end, by outcome.", ("outcome",), SECONDS
        )
        self._served = self.durations[Outcome.SERVED.value,]  # most requests end here: no look-up for each
        self.waits = Histograms("sloop_queue_wait_seconds", "From queue to batch.", ("stage",), SECONDS)
        per_variant = ("stage", "variant")
        self.sizes = Histograms("sloop_batch_size", "Requests per batch started.", per_variant, SIZES, scale=1)
        self.services = Histograms(
            "sloop_service_time_seconds", "Forward pass of a batch, without transport.", per_variant, SECONDS
        )
        self.starts = Histograms(
            "sloop_cold_start_seconds", "Steps of cold starts.", (*per_variant, "step"), START_SECONDS
        )
        self.resizes = Histograms("sloop_resize_seconds", "From order to effect.", ("stage",), SECONDS)
        self._folds: Mapping[type, Callable[..., None]] = {
            Request: self._arrive,
            StartBatch: self._start_batch,
            Finished: self._finish,
            BatchFailed: self._fail,
            End: self._end,
            StartReplica: self._start_replica,
            ReplicaProgressed: self._progress,
            ReplicaReady: self._ready,
            StopReplica: self._drain,
            ReplicaStopped: self._stopped,
            ReplicaLost: self._lose,
            ResizeReplica: self._resize,
            Resized: self._resized,
            Decided: self._decide,
        }
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (self, *others):
            self._registry.register(collector)

    def extend(self, now_ns: int, records: Sequence[Record]) -> None:
        """Take in the events and actions of one instant."""
        self._now_ns = now_ns
        folds = self._folds
        for record in records:
            fold = folds.get(type(record))
            if fold is not None:
                fold(now_ns, record)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    @property
    def ended(self) -> Counter[Outcome]:
        """Requests by their end."""
        return Counter({outcome: sum(self.durations[outcome.value,].counts) for outcome in Outcome})

    @property
    def attainment(self) -> float:
        """Share of ended requests that were served by their deadline; 1 before the first end."""
        ended = self.ended
        return ended[Outcome.SERVED] / ended.total() if ended.total() else 1.0

    # requests

    def _arrive(self, now_ns: int, request: Request) -> None:
        self._sent[request.id] = request.sent_ns
        if self._only:
            self._queued[self._only][request.id, 0] = now_ns
            return
        self._journeys[request.id] = journey = Journey(self._graph)
        self._places[request.id] = []
        self._enter(now_ns, request.id, journey.begin(request.enters))

    def _end(self, now_ns: int, end: End) -> None:
        request = end.request
        sent_ns = self._sent.pop(request, None)
        if sent_ns is None:
            return
        places = [(self._only, 0)]
        if not self._only:
            del self._journeys[request]
            places = self._places.pop(request)
        if end.outcome is Outcome.SERVED:
            self._served.observe(now_ns - sent_ns)
            return  # it has left every queue
        self.durations[end.outcome.value,].observe(now_ns - sent_ns)
        left = {stage for stage, part in places if self._queued[stage].pop((request, part), None) is not None}
        if end.outcome is Outcome.DROPPED:
            self.drops.update({end.stage} if end.stage else left)

    def _start_batch(self, now_ns: int, start: StartBatch) -> None:
        stage, replica = start.stage, self._replicas[start.replica]
        replica.batch = start
        self.sizes[replica.key].observe(len(start.requests))
        waits, queued = self.waits[stage,], self._queued[stage]
        for visiting in start.visits:
            waits.observe(now_ns - queued.pop(visiting, now_ns))

    def _finish(self, now_ns: int, event: Finished) -> None:
        replica, batch = self._take_batch(event.replica, event.batch)
        if replica is None or batch is None:
            return
        self.services[replica.key].observe(event.service_ns)
        if self._only:
            return
        for (request, part), edge_counts in zip(batch.visits, event.edge_counts or repeat(()), strict=False):
            journey = self._journeys.get(request)
            if journey is not None:
                self._enter(now_ns, request, journey.finish(batch.stage, part, edge_counts))

    def _enter(self, now_ns: int, request: RequestId, entered: Entered) -> None:
        self._places[request] += entered
        for stage, part in entered:
            self._queued[stage][request, part] = now_ns

    def _fail(self, _now_ns: int, event: BatchFailed) -> None:
        replica, batch = self._take_batch(event.replica, event.batch)
        if replica is not None and batch is not None:
            self.failed_batches[replica.key] += 1

    def _take_batch(self, replica: ReplicaId, batch: BatchId) -> tuple[Replica | None, StartBatch | None]:
        found = self._replicas.get(replica)
        if found is None or found.batch is None or found.batch.batch != batch:
            return None, None
        taken, found.batch = found.batch, None
        return found, taken

    # replicas

    def _start_replica(self, now_ns: int, start: StartReplica) -> None:
        self._pay(now_ns)
        self._replicas[start.replica] = Replica((start.spec.stage, start.spec.variant), start.spec.cores, now_ns)

    def _progress(self, now_ns: int, event: ReplicaProgressed) -> None:
        replica = self._replicas.get(event.replica)
        if replica is not None:
            self._end_step(now_ns, replica)
            replica.step, replica.step_ns = event.step, now_ns

    def _end_step(self, now_ns: int, replica: Replica) -> None:
        if replica.step:
            self.starts[(*replica.key, replica.step)].observe(now_ns - replica.step_ns)
        replica.step = ""

    def _ready(self, now_ns: int, event: ReplicaReady) -> None:
        replica = self._replicas.get(event.replica)
        if replica is not None and replica.life is Life.STARTING:
            self._end_step(now_ns, replica)
            self.starts[(*replica.key, WHOLE_START)].observe(now_ns - replica.started_ns)
            replica.life = Life.READY

    def _drain(self, now_ns: int, stop: StopReplica) -> None:
        replica = self._replicas.get(stop.replica)
        if replica is not None:
            replica.life = Life.DRAINING
            self._put_back(now_ns, replica)  # stuck: what it ran may be elsewhere before it is gone

    def _stopped(self, now_ns: int, event: ReplicaStopped) -> None:
        self._forget(now_ns, event.replica)

    def _lose(self, now_ns: int, event: ReplicaLost) -> None:
        replica = self._forget(now_ns, event.replica)
        if replica is not None:
            self.lost[replica.key] += 1

    def _forget(self, now_ns: int, replica: ReplicaId) -> Replica | None:
        """A replica is gone, and with it the batch it ran."""
        self._pay(now_ns)
        found = self._replicas.pop(replica, None)
        if found is not None:
            self._put_back(now_ns, found)
        return found

    def _put_back(self, now_ns: int, replica: Replica) -> None:
        """A replica is given up: the requests of its batch wait again from now on."""
        batch, replica.batch = replica.batch, None
        if batch is not None:
            queued = self._queued[batch.stage]
            queued.update({visiting: now_ns for visiting in batch.visits if visiting[0] in self._sent})

    def _resize(self, now_ns: int, order: ResizeReplica) -> None:
        replica = self._replicas.get(order.replica)
        if replica is not None:
            replica.resized_ns = now_ns

    def _resized(self, now_ns: int, event: Resized) -> None:
        replica = self._replicas.get(event.replica)
        if replica is None:
            return
        self._pay(now_ns)
        replica.cores = event.cores
        if replica.resized_ns:
            self.resizes[replica.key[0],].observe(now_ns - replica.resized_ns)
            replica.resized_ns = 0

    def _pay(self, now_ns: int) -> None:
        """Account for the cores held since the last change."""
        for replica in self._replicas.values():
            self._core_ns[replica.key[0]] += round(replica.cores * (now_ns - self._cores_since_ns))
        self._cores_since_ns = now_ns

    def _decide(self, _now_ns: int, decided: Decided) -> None:
        self.decisions[decided.kind] += 1

    # scrape

    def collect(self) -> Iterator[Metric]:
        """Every family, as prometheus_client asks for them."""
        self._pay(self._now_ns)
        requests = CounterMetricFamily("sloop_requests", "Requests ended, by outcome.", labels=["outcome"])
        for outcome, count in self.ended.items():
            requests.add_metric([outcome.value], count)
        yield requests
        yield GaugeMetricFamily(
            "sloop_attainment_ratio", "Served by the deadline, of all ended since the start.", value=self.attainment
        )
        yield GaugeMetricFamily("sloop_requests_open", "Requests that have not ended.", value=len(self._sent))
        waiting = {stage: len(queued) for stage, queued in self._queued.items()}
        yield self._by_stage("sloop_queue_length", "Requests that wait.", waiting)
        for histograms in (self.durations, self.waits, self.sizes, self.services, self.starts, self.resizes):
            yield histograms.family()
        yield from self._replica_families()
        for name, about, counts in (
            ("sloop_batches_failed", "Batches on which the model raised.", self.failed_batches),
            ("sloop_replicas_lost", "Replicas that went without being asked.", self.lost),
        ):
            family = CounterMetricFamily(name, about, labels=["stage", "variant"])
            for key, count in counts.items():
                family.add_metric(key, count)
            yield family
        drops = CounterMetricFamily("sloop_drops", "Requests given up, by the stage they waited at.", labels=["stage"])
        for stage in self._stages:
            drops.add_metric([stage], self.drops[stage])
        yield drops
        decisions = CounterMetricFamily("sloop_decisions", "Decisions, by kind.", labels=["kind"])
        for kind, count in self.decisions.items():
            decisions.add_metric([kind], count)
        yield decisions

    def _replica_families(self) -> Iterator[Metric]:
        lives = Counter((*replica.key, replica.life.value) for replica in self._replicas.values())
        keys = {replica.key for replica in self._replicas.values()}
        replicas = GaugeMetricFamily("sloop_replicas", "Replicas by life.", labels=["stage", "variant", "life"])
        for key in sorted(keys):
            for life in Life:
                replicas.add_metric((*key, life.value), lives[*key, life.value])
        yield replicas
        allocated: Counter[str] = Counter()
        busy: Counter[str] = Counter()
        for replica in self._replicas.values():
            allocated[replica.key[0]] += replica.cores  # type: ignore[assignment]  # counters of floats add as well
            if replica.batch is not None:
                busy[replica.key[0]] += replica.cores  # type: ignore[assignment]
        yield self._by_stage("sloop_cores_allocated", "Cores held by replicas.", allocated)
        yield self._by_stage("sloop_cores_in_use", "Cores of replicas that run a batch.", busy)
        core_seconds = CounterMetricFamily("sloop_core_seconds", "Cores held, over time.", labels=["stage"])
        for stage in self._stages:
            core_seconds.add_metric([stage], to_s(self._core_ns[stage]))
        yield core_seconds

    def _by_stage(self, name: str, about: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["stage"])
        for stage in self._stages:
            family.add_metric([stage], values[stage])
        return family
