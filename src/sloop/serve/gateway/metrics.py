"""`/metrics`: the run state of a server in Prometheus' text format.

All events of all worker processes reach one core, and the run state receives every event and action, so the numbers are
exact across processes: nothing is sampled, merged or kept in shared memory. Names and units follow
Prometheus' practices: base units, the unit in the name, `_total` for counters.
Source: Prometheus text exposition format 0.0.4.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sloop.app.application import Application
from sloop.runlog.cost import MICROCORES
from sloop.runlog.fold import RunState
from sloop.units import NS_PER_S, to_s
from sloop.vocabulary import Life, Outcome

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
START_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SECONDS_KEPT: Final = 60
DECISIONS_KEPT: Final = 10_000
"""For `/v2/sloop/decisions`; at one a second this covers almost three hours."""
SAMPLES_MAX: Final = 4_096
"""Latencies and waits are added to histograms once there are this many, or at a scrape. A block takes some tenths of a
millisecond; one at a time, every request would need two bisections in Python."""

Labels = tuple[str, ...]


class Histogram:
    """Counts by upper bound; the last bucket is unbounded. Values are integers: ns, or requests."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0

    def observe(self, values: Sequence[int], weights: Sequence[int] | None = None) -> None:
        """Count values, each `weights` times (default: once)."""
        found = np.asarray(values, dtype=np.int64)
        buckets = np.searchsorted(self.bounds, found)  # the first bound that is at least as large
        self.counts += np.bincount(buckets, weights, minlength=len(self.counts)).astype(np.int64)
        self.total += int(found.sum() if weights is None else found @ np.asarray(weights))


class Histograms(dict[Labels, Histogram]):
    """One histogram per combination of labels. Dividing by `scale` gives the unit of the metric."""

    def __init__(self, name: str, about: str, labels: Labels, bounds: Sequence[float], scale: int = NS_PER_S) -> None:
        super().__init__()
        self.name, self.about, self.labels, self.scale = name, about, labels, scale
        self._names = [*map(str, bounds), "+Inf"]
        self._bounds = [round(bound * scale) for bound in bounds]

    def __missing__(self, labels: Labels) -> Histogram:
        self[labels] = made = Histogram(self._bounds)
        return made

    def drain(self, labels: Labels, samples: "array[int]") -> None:
        """Count all samples, and empty their array."""
        if samples:
            self[labels].observe(samples)
            del samples[:]

    def family(self) -> Metric:
        """As prometheus_client writes it: `(le, count of values ≤ le)`."""
        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        for labels, histogram in self.items():
            cumulative = zip(self._names, np.cumsum(histogram.counts).astype(float), strict=True)
            family.add_metric(labels, list(cumulative), histogram.total / self.scale)
        return family


class Metrics(Collector):
    """The Prometheus metrics of a server. Every record must be appended to its run `state`. `others` are collectors of
    metrics that the event log does not have, such as bytes of request bodies."""

    def __init__(self, application: Application, *others: Collector) -> None:
        self.state = RunState(
            application.graph, seconds_kept=SECONDS_KEPT, decisions_kept=DECISIONS_KEPT, routes=False, service=True
        )
        self.state.on_second = self._bound_samples
        self._durations = Histograms(
            "sloop_request_duration_seconds", "From sending to the end, by outcome.", ("outcome",), SECONDS
        )
        self._waits = Histograms("sloop_queue_wait_seconds", "From entering a queue to batch.", ("stage",), SECONDS)
        per_variant = ("stage", "variant")
        self._services = Histograms(
            "sloop_service_time_seconds", "Forward pass of a batch, without transport.", per_variant, SECONDS
        )
        self._starts = Histograms(
            "sloop_cold_start_seconds", "Steps of cold starts.", (*per_variant, "step"), START_SECONDS
        )
        self._resizes = Histograms("sloop_resize_seconds", "From order to effect.", ("stage",), SECONDS)
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in (self, *others):
            self._registry.register(collector)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    @property
    def ended(self) -> Counter[Outcome]:
        """Ended requests by outcome."""
        self._drain()
        return Counter({outcome: int(self._durations[outcome.value,].counts.sum()) for outcome in Outcome})

    @property
    def attainment(self) -> float:
        """Share of ended requests that were served by their deadline; 1 before the first end."""
        ended = self.ended
        return ended[Outcome.SERVED] / ended.total() if ended.total() else 1.0

    def _bound_samples(self) -> None:
        state = self.state
        waits = sum(len(stage.waits_ns) for stage in state.stages.values())
        if len(state.served_ns) + sum(map(len, state.missed_ns.values())) + waits > SAMPLES_MAX:
            self._drain()

    def _drain(self) -> None:
        """Sort the samples of the run state into histograms."""
        state = self.state
        for outcome, samples in (
            (Outcome.SERVED, state.served_ns),
            (Outcome.LATE, state.late_ns),
            *state.missed_ns.items(),
        ):
            self._durations.drain((outcome.value,), samples)
        for name, stage in state.stages.items():
            self._waits.drain((name,), stage.waits_ns)
        for group in state.groups.values():
            self._services.drain(group.key, group.service_ns)
            group.durations_ns.clear()
            group.resized_ns.clear()
        for key, samples in state.cold_start_ns.items():
            self._starts.drain(key, samples)
        for name, samples in state.resize_ns.items():
            self._resizes.drain((name,), samples)

    def collect(self) -> Iterator[Metric]:
        """All metric families; prometheus_client calls this."""
        state, ended = self.state, self.ended
        requests = CounterMetricFamily("sloop_requests", "Requests ended, by outcome.", labels=["outcome"])
        for outcome, count in ended.items():
            requests.add_metric([outcome.value], count)
        yield requests
        yield GaugeMetricFamily(
            "sloop_attainment_ratio", "Served by the deadline, of all ended since the start.", value=self.attainment
        )
        yield GaugeMetricFamily("sloop_requests_open", "Requests that have not ended.", value=len(state.open))
        queued = {name: state.queued(name) for name in state.stages}
        yield self._by_stage("sloop_queue_length", "Requests that wait.", queued)
        for histograms in (self._durations, self._waits, self._sizes(), self._services, self._starts, self._resizes):
            yield histograms.family()
        yield from self._replica_families()
        for name, about, counts in (
            ("sloop_batches_failed", "Batches on which the model raised.", state.failed_batches),
            ("sloop_replicas_lost", "Replicas that went without being asked.", state.lost_replicas),
        ):
            family = CounterMetricFamily(name, about, labels=["stage", "variant"])
            for key, count in counts.items():
                family.add_metric(key, count)
            yield family
        drops = CounterMetricFamily("sloop_drops", "Requests given up, by the stage they waited at.", labels=["stage"])
        for name, stage in state.stages.items():
            drops.add_metric([name], stage.dropped)
        yield drops
        decisions = CounterMetricFamily("sloop_decisions", "Decisions, by kind.", labels=["kind"])
        for kind, count in state.decisions.items():
            decisions.add_metric([kind], count)
        yield decisions

    def _sizes(self) -> Histograms:
        sizes = Histograms("sloop_batch_size", "Requests per batch started.", ("stage", "variant"), SIZES, scale=1)
        for group in self.state.groups.values():
            if group.sizes:
                sizes[group.key].observe([*group.sizes], [*group.sizes.values()])
        return sizes

    def _replica_families(self) -> Iterator[Metric]:
        state = self.state
        lives = Counter((*replica.group.key, replica.life.value) for replica in state.replicas.values())
        replicas = GaugeMetricFamily("sloop_replicas", "Replicas by life.", labels=["stage", "variant", "life"])
        for key in sorted({replica.group.key for replica in state.replicas.values()}):
            for life in Life:
                replicas.add_metric((*key, life.value), lives[*key, life.value])
        yield replicas
        state.cost.charge(state.now_ns)
        allocated = {name: microcores / MICROCORES for name, microcores in state.cost.microcores.items()}
        busy = dict.fromkeys(state.stages, 0.0)
        for replica in state.batches():
            busy[replica.spec.stage] += replica.cores
        yield self._by_stage("sloop_cores_allocated", "Cores held by replicas.", allocated)
        yield self._by_stage("sloop_cores_in_use", "Cores of replicas that run a batch.", busy)
        core_seconds = CounterMetricFamily("sloop_core_seconds", "Cores held, over time.", labels=["stage"])
        for name in state.stages:
            core_seconds.add_metric([name], to_s(state.cost.microcore_ns.get(name, 0)) / MICROCORES)
        yield core_seconds

    def _by_stage(self, name: str, about: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, about, labels=["stage"])
        for stage in self.state.stages:
            family.add_metric([stage], values.get(stage, 0))
        return family
