"""`/metrics`: the state of a server's run in Prometheus' text format.

All events of all worker processes reach one core, and the run state receives every event and action, so the numbers are
exact across processes: nothing is sampled, merged or kept in shared memory. Names and units follow
Prometheus' practices: base units, the unit in the name, `_total` for counters.

`prometheus_client` writes them, at 7 to 8 µs a row: of 200 models that have served, some 150 ms. Text of our own would
take 5 to 13 times less, but the format is better kept by its authors. So a scrape is written model by model, and the
event loop serves requests in between. Not in a thread: the loop would then wait up to 5 ms for the interpreter's lock
each time it wakes. The rows of one model are of one instant; models may be some milliseconds apart.
Source: Prometheus text exposition format 0.0.4.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Final

import numpy as np
from msgspec import Struct
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sloop.actions import VersionState
from sloop.app.graph import declared_name
from sloop.runlog.cost import MICROCORES
from sloop.runlog.fold import DeploymentState
from sloop.runlog.replicas import BatchGroup
from sloop.runlog.run import Kept
from sloop.runlog.versions import Build, VersionParts, VersionRecord
from sloop.serve.driver import TURN_BOUNDS_NS, Turns
from sloop.serve.messages import EdgeCounts
from sloop.serve.protocols import SpareProcesses, VariantJoining
from sloop.units import NS_PER_S, to_s
from sloop.vocabulary import Life, Node, Outcome, kind_of

SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0),
)
START_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

DECISIONS_KEPT: Final = 10_000
"""For `/v2/sloop/decisions`; at one a second this covers almost three hours."""
RECORDS_MAX: Final = 100
SAMPLES_MAX: Final = 4_096
"""Latencies and waits are added to histograms once a version has this many, or at a scrape. A block takes some tenths
of a millisecond; one at a time, every request would need two bisections in Python."""

Labels = tuple[str, ...]
"""Names of labels, or their values in the same order."""

MODEL: Final[Labels] = ("model",)
VERSION: Final[Labels] = (*MODEL, "version")
STAGE: Final[Labels] = (*VERSION, "stage")
VARIANT: Final[Labels] = (*STAGE, "variant")
GROUP: Final[Labels] = (*VARIANT, "hardware")
HARDWARE: Final[Labels] = ("hardware",)


class Histogram:
    """Counts by upper bound; the last bucket is unbounded. Values are integers: ns, or requests."""

    __slots__ = ("bounds", "counts", "cumulated", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0
        self.cumulated: list[tuple[str, float]] = []
        """For each bound, the count of values up to it, as at the last scrape; empty if it has changed since then. Most
        models have no requests between two scrapes."""

    def divide(self, bounds: Sequence[int]) -> None:
        """Use these bounds, which contain the present ones. What was counted in a bucket that is divided stays in the
        upper part, so that no count falls, and rates over the time after the division are exact."""
        counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        counts[[*np.searchsorted(bounds, self.bounds), -1]] = self.counts
        self.bounds, self.counts, self.cumulated = bounds, counts, []

    def observe(self, values: Sequence[int], weights: Sequence[int] | None = None) -> None:
        """Count values, each `weights` times (default: once)."""
        self.cumulated = []
        found = np.asarray(values, dtype=np.int64)
        buckets = np.searchsorted(self.bounds, found)  # the first bound that is at least as large
        self.counts += np.bincount(buckets, weights, minlength=len(self.counts)).astype(np.int64)
        self.total += int(found.sum() if weights is None else found @ np.asarray(weights))


class Histograms(dict[Labels, Histogram]):
    """One histogram per values of the labels, of which the first is the model. Dividing by `scale` gives the unit of
    the metric."""

    def __init__(self, name: str, about: str, labels: Labels, bounds: Sequence[float], scale: int = NS_PER_S) -> None:
        super().__init__()
        self.name, self.about, self.labels, self.scale = name, about, labels, scale
        self._names = {round(bound * scale): str(bound) for bound in bounds}
        """By bound, how it is written."""
        self._bounds = [*self._names]
        self._own: dict[Labels, list[int]] = {}
        """The bounds of models that have further ones."""
        self._of_model: dict[Labels, dict[Labels, Histogram]] = {}

    def __missing__(self, labels: Labels) -> Histogram:
        model = labels[:1]
        made = Histogram(self._own.get(model, self._bounds))
        self[labels] = self._of_model.setdefault(model, {})[labels] = made
        return made

    def add_bounds(self, model: Labels, bounds: Iterable[int]) -> None:
        """Let the histograms of a model have these bounds too, as long as the model is there."""
        present = self._own.get(model, self._bounds)
        wanted = sorted({*present, *bounds})
        if len(wanted) > len(present):
            self._own[model] = wanted
            for bound in wanted:
                self._names.setdefault(bound, str(bound / self.scale))
            for histogram in self._of_model.get(model, {}).values():
                histogram.divide(wanted)

    def drain(self, labels: Labels, samples: "array[int]") -> int:
        """Count all samples, and empty their array; returns how many there were."""
        count = len(samples)
        if count:
            self[labels].observe(samples)
            del samples[:]
        return count

    def discard(self, labels: Labels) -> None:
        """Forget the histograms whose labels begin with these."""
        own = self._of_model.get(labels[:1], {})
        for key in [key for key in own if key[: len(labels)] == labels]:
            del self[key], own[key]
        if not own:
            self._of_model.pop(labels[:1], None)
            self._own.pop(labels[:1], None)

    def family(self, model: str | None = None) -> Metric:
        """The histograms of a model, as prometheus_client writes them; None: those without a model."""
        family = HistogramMetricFamily(self.name, self.about, labels=self.labels)
        for labels, histogram in self._of_model.get(() if model is None else (model,), {}).items():
            if not histogram.cumulated:
                names = [*map(self._names.__getitem__, histogram.bounds), "+Inf"]
                histogram.cumulated = list(zip(names, np.cumsum(histogram.counts).tolist(), strict=True))
            family.add_metric(labels, histogram.cumulated, histogram.total / self.scale)
        return family


class Total(Struct):
    """How often something took time, and how much altogether."""

    count: int = 0
    ns: int = 0

    def add(self, samples: "array[int]") -> None:
        """Count durations in ns."""
        self.count += len(samples)
        self.ns += int(np.asarray(samples, dtype=np.int64).sum())


class VersionRows:
    """A version of a model: its labels, which are made once because there may be hundreds of models, and what its
    ended requests and batches took."""

    __slots__ = ("batches", "ended", "last_ns", "model", "queued", "run", "spent", "stages", "version")

    def __init__(self, record: VersionRecord) -> None:
        self.run = record.run
        self.ended: Counter[Outcome] = Counter()
        self.spent: defaultdict[Outcome, Total] = defaultdict(Total)
        """From sending to the end, by outcome."""
        self.queued = Total()
        """From entering a queue to batch, of all stages."""
        self.batches: defaultdict[int, Total] = defaultdict(Total)
        """From order to answer, by the number of rows."""
        self.last_ns: int | None = None
        """The instant of the last record when it was last seen that requests had ended; None before the first end."""
        self.model: Labels = (record.application,)
        self.version: Labels = (record.application, record.version)
        self.stages: dict[str, Labels] = {name: (*self.version, declared_name(name)) for name in record.run.stages}
        """By the full name of the stage."""

    def group(self, key: tuple[str, str], hardware: str) -> Labels:
        """The labels of a variant of a stage on a kind of hardware."""
        return (*self.stages[key[0]], key[1], hardware)


class Families(Collector):
    """What prometheus_client is to write."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Texts(dict[bytes, list[bytes]]):
    """The exposition while it is written: by family its header, and then its rows in pieces."""

    def add(self, families: Iterable[Metric]) -> None:
        """Write families, and sort their rows to those of the same family."""
        text = b"\n" + generate_latest(Families(families))
        for each in text.removesuffix(b"\n").split(b"\n# HELP ")[1:]:
            about, kind, *rows = each.split(b"\n", 2)
            name, _, _ = about.partition(b" ")
            if name not in self:
                self[name] = [b"# HELP " + about, kind]
            self[name] += rows

    def exposition(self) -> bytes:
        """All of it."""
        return b"\n".join([line for lines in self.values() for line in lines]) + b"\n"


class Metrics:
    """The Prometheus metrics of a server: of its run `state`, to which every record must be appended, and of its edges,
    whose `counts` the event log does not have. `turns` says for how long its loop was held, `lost` how many records or
    lines its logs have lost, by log, `edges` how many edges serve, `edges_lost` how many have died,
    `spares` which workers wait for a model, by machine, and `joining` whether requests for a version share passes.

    `parts`, `nodes` and `build` are those of `DeploymentState`. Nobody reads the seconds of a server's run.
    """

    def __init__(  # noqa: PLR0913  # what else there is to show
        self,
        parts: Iterable[VersionParts],
        counts: Callable[[], EdgeCounts] = EdgeCounts,
        *,
        turns: Callable[[], Turns] = Turns,
        lost: Callable[[], dict[str, int]] = dict,
        edges: Callable[[], int] = int,
        edges_lost: Callable[[], int] = int,
        spares: Callable[[], Mapping[str, SpareProcesses]] = dict,
        joining: Callable[[str, str], Iterable[VariantJoining]] = lambda model, version: (),
        nodes: Iterable[Node] = (),
        build: Build | None = None,
    ) -> None:
        self.state = DeploymentState(
            parts,
            nodes=nodes,
            build=build,
            kept=Kept(seconds=1, decisions=DECISIONS_KEPT, routes=False, service=True),
            on_second=self._bound_samples,
        )
        self._counts, self._counted = counts, EdgeCounts()
        self._turns, self._lost, self._edges, self._edges_lost = turns, lost, edges, edges_lost
        self._spares, self._joining = spares, joining
        self._records_max = RECORDS_MAX
        """With more versions than this, those that have ended are forgotten before the next scrape."""
        self._rows: dict[VersionRecord, VersionRows] = {}
        self._durations = Histograms(
            "sloop_request_duration_seconds", "From sending to the end, by outcome.", (*MODEL, "outcome"), SECONDS
        )
        self._waits = Histograms("sloop_queue_wait_seconds", "From entering a queue to batch.", STAGE, SECONDS)
        self._services = Histograms(
            "sloop_service_time_seconds", "Forward pass of a batch, without transport.", GROUP, SECONDS
        )
        self._starts = Histograms(
            "sloop_cold_start_seconds", "Steps of cold starts.", (*VARIANT, "step"), START_SECONDS
        )
        self._completions = Histograms(
            "sloop_completion_seconds",
            "From the order of a part of a pipeline until it has all layers.",
            VARIANT,
            START_SECONDS,
        )
        self._resizes = Histograms("sloop_resize_seconds", "From order to effect.", STAGE, SECONDS)
        self._plans = Histograms(
            "sloop_plan_duration_seconds", "From the request of a plan to its arrival.", (), SECONDS
        )

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format, at once."""
        steps = self.steps()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                text: bytes = end.value
                return text

    def steps(self) -> Generator[None, None, bytes]:
        """The same in steps, each of which writes the rows of one model; between steps, the state may change."""
        self._forget_ended()
        self._counted = self._counts()
        texts = Texts()
        decisions: dict[str, Counter[str]] = {"": Counter()}  # so that there are all headers, also without models
        for (key, kind), count in self.state.decisions.items():
            decisions.setdefault(key.partition("@")[0], Counter())[kind] += count
        records: dict[str, list[VersionRecord]] = {}
        for record in self.state.records:
            records.setdefault(record.application, []).append(record)
        for model in dict.fromkeys([*records, *decisions, *(model for model, _ in self.state.rollouts)]):
            texts.add(self.families(model, records.get(model, ()), decisions.get(model, {})))
            yield
        texts.add(self._server_families())
        return texts.exposition()

    def ended(self, model: str = "") -> Counter[Outcome]:
        """Ended requests by outcome, of one model or of all that serve."""
        self._update()
        found: Counter[Outcome] = Counter()
        for name in [model] if model else dict.fromkeys(record.application for record in self.state.records):
            found += self._ended_of(name)
        return found

    def totals(self) -> list[VersionRows]:
        """What the requests and batches of every version have taken until now."""
        self._update()
        return [self._rows_of(record) for record in self.state.records]

    def _ended_of(self, model: str) -> Counter[Outcome]:
        """Of all versions of a model, also of those that have ended."""
        counts = Counter[Outcome]()
        for outcome in Outcome:
            found = self._durations.get((model, outcome))
            if found is not None:
                counts[outcome] = int(found.counts.sum())
        return counts

    # Samples

    def _rows_of(self, record: VersionRecord) -> VersionRows:
        found = self._rows.get(record)
        if found is None:
            found = self._rows[record] = VersionRows(record)
            # Each model has its own deadlines among its buckets. Those of all models in each would be some 200 more
            # where 200 models serve; and whoever adds up models gets, at worst, the next lower bucket's count there.
            graph = record.run.graph
            deadlines_ns = {graph.slo_ns, *(path.slo_ns for path in graph.declared_paths)} - {0}
            self._durations.add_bounds(found.model, deadlines_ns)
        return found

    def _bound_samples(self, record: VersionRecord) -> None:
        """At the end of a second in which a version had records."""
        if len(self.state.records) > self._records_max:
            self._forget_ended()
            self._records_max = max(RECORDS_MAX, 2 * len(self.state.records))
        run = record.run
        waits = sum(len(stage.waits_ns) for stage in run.stages.values())
        if len(run.served_ns) + sum(map(len, run.missed_ns.values())) + waits > SAMPLES_MAX:
            self._drain(record)

    def _update(self) -> None:
        """Bring everything up to date, and forget versions that have ended."""
        state = self.state
        state.advance()
        self._plans.drain((), state.plan_ns)
        for record in state.records:
            self._drain(record)
        self._forget_ended()

    def _drain(self, record: VersionRecord) -> None:
        """Sort the samples of a version into histograms."""
        run, rows = record.run, self._rows_of(record)
        samples_by_outcome = {Outcome.SERVED: run.served_ns, Outcome.LATE: run.late_ns, **run.missed_ns}
        for outcome in Outcome:
            if samples := samples_by_outcome[outcome]:
                rows.last_ns = run.now_ns
                rows.spent[outcome].add(samples)
                rows.ended[outcome] += self._durations.drain((*rows.model, outcome), samples)
        for name, stage in run.stages.items():
            rows.queued.add(stage.waits_ns)
            self._waits.drain(rows.stages[name], stage.waits_ns)
        for group in run.workers.groups.values():
            for size, samples in chain(group.durations_ns.items(), group.resized_ns.items()):
                rows.batches[size].add(samples)
            if group.service_ns:
                self._services.drain(rows.group(group.key, group.hardware), group.service_ns)
            group.durations_ns.clear()
            group.resized_ns.clear()
        for (name, variant, step), samples in run.workers.cold_start_ns.items():
            self._starts.drain((*rows.stages[name], variant, step), samples)
        for (name, variant), samples in run.workers.pipelines.completion_ns.items():
            self._completions.drain((*rows.stages[name], variant), samples)
        for name, samples in run.workers.resize_ns.items():
            self._resizes.drain(rows.stages[name], samples)

    def _forget_ended(self) -> None:
        """Forget versions that have ended, but not the requests that they served: counters of a model never fall."""
        state = self.state
        ended = [record for record in state.records if record.has_ended]
        for record in ended:
            self._drain(record)
            state.forget(record)
            rows = self._rows.pop(record)
            if record.key not in state.versions:  # it was not deployed again
                for histograms in (self._waits, self._services, self._starts, self._completions, self._resizes):
                    histograms.discard(rows.version)
        present = {record.application for record in state.records}
        for model in {record.application for record in ended} - present:
            self._durations.discard((model,))

    # Families

    def families(self, model: str, records: Iterable[VersionRecord], decisions: Mapping[str, int]) -> Iterator[Metric]:
        """The families with the rows of one model, which has these versions and has had these decisions. Of one that
        has ended, only the counters of decisions and rollouts are left; "" has the decisions about no single model."""
        present: dict[VersionRecord, VersionRows] = {}
        for record in records:
            if not record.has_ended:  # since the scrape began
                record.run.advance(self.state.now_ns)
                self._drain(record)
                present[record] = self._rows_of(record)
        yield from self._request_families(model, present)
        yield from self._version_families(model, present)
        yield from self._stage_families(present.values())
        yield from (self._durations.family(model), self._waits.family(model))
        yield self._sizes(present.values()).family(model)
        yield from (self._services.family(model), self._starts.family(model), self._resizes.family(model))
        yield self._completions.family(model)
        yield from self._pass_families(present.values())
        yield from self._replica_families(present.values())
        yield from self._form_families(present.values())
        yield self._joining_family(present.values())
        decided = CounterMetricFamily(
            "sloop_decisions", 'Decisions, by kind; about no single model with model="".', labels=(*MODEL, "kind")
        )
        for kind, count in decisions.items():
            decided.add_metric((model, kind), count)
        yield decided
        yield from self._limit_families(model)

    def _request_families(self, model: str, present: Mapping[VersionRecord, VersionRows]) -> Iterator[Metric]:
        requests = CounterMetricFamily("sloop_requests", "Requests ended, by outcome.", labels=(*MODEL, "outcome"))
        attainment = GaugeMetricFamily(
            "sloop_attainment_ratio", "Served by the deadline, of all ended since the start.", labels=MODEL
        )
        waiting = GaugeMetricFamily("sloop_requests_open", "Requests that have not ended.", labels=MODEL)
        if present:
            ended = self._ended_of(model)
            total = ended.total()
            for outcome in Outcome:
                requests.add_metric((model, outcome), ended.get(outcome, 0))
            attainment.add_metric((model,), ended[Outcome.SERVED] / total if total else 1.0)
            waiting.add_metric((model,), sum(len(record.run.open) for record in present))
        yield from (requests, attainment, waiting)

    def _version_families(self, model: str, present: Mapping[VersionRecord, VersionRows]) -> Iterator[Metric]:
        share = GaugeMetricFamily(
            "sloop_version_share", "Fraction of the model's requests that the version gets.", labels=VERSION
        )
        rollout = GaugeMetricFamily(
            "sloop_version_state", "1 for the state of the version's rollout.", labels=(*VERSION, "state")
        )
        requests = CounterMetricFamily(
            "sloop_version_requests", "Requests that the version has ended, by outcome.", labels=(*VERSION, "outcome")
        )
        for record, rows in present.items():
            share.add_metric(rows.version, record.share)
            rollout.add_metric((*rows.version, record.state), 1)
            for outcome in Outcome:
                requests.add_metric((*rows.version, outcome), rows.ended.get(outcome, 0))
        rollouts = CounterMetricFamily("sloop_rollouts", "States that versions have entered.", labels=(*MODEL, "state"))
        for state in VersionState:
            if count := self.state.rollouts.get((model, state), 0):
                rollouts.add_metric((model, state), count)
        yield from (share, rollout, requests, rollouts)

    def _stage_families(self, present: Iterable[VersionRows]) -> Iterator[Metric]:
        queued = GaugeMetricFamily("sloop_queue_length", "Requests that wait.", labels=STAGE)
        drops = CounterMetricFamily("sloop_drops", "Requests given up, by the stage they waited at.", labels=STAGE)
        allocated = GaugeMetricFamily("sloop_cores_allocated", "Cores held by replicas.", labels=STAGE)
        in_use = GaugeMetricFamily("sloop_cores_in_use", "Cores of replicas that run a batch.", labels=STAGE)
        core_seconds = CounterMetricFamily("sloop_core_seconds", "Cores held, over time.", labels=STAGE)
        for rows in present:
            run = rows.run
            run.cost.charge(run.now_ns)
            busy: dict[str, float] = {}
            for replica in run.batches():
                busy[replica.spec.stage] = busy.get(replica.spec.stage, 0.0) + replica.cores
            for name, stage in run.stages.items():
                labels = rows.stages[name]
                queued.add_metric(labels, run.queued(name))
                drops.add_metric(labels, stage.dropped)
                allocated.add_metric(labels, run.cost.microcores.get(name, 0) / MICROCORES)
                in_use.add_metric(labels, busy.get(name, 0.0))
                core_seconds.add_metric(labels, to_s(run.cost.microcore_ns.get(name, 0)) / MICROCORES)
        yield from (queued, drops, allocated, in_use, core_seconds)

    def _sizes(self, present: Iterable[VersionRows]) -> Histograms:
        sizes = Histograms("sloop_batch_size", "Rows per batch started.", GROUP, SIZES, scale=1)
        for rows in present:
            for group in rows.run.workers.groups.values():
                if group.sizes:
                    sizes[rows.group(group.key, group.hardware)].observe([*group.sizes], [*group.sizes.values()])
        return sizes

    def _pass_families(self, present: Iterable[VersionRows]) -> Iterator[Metric]:
        passes = CounterMetricFamily("sloop_passes", "Forward passes of finished batches.", labels=GROUP)
        elements = CounterMetricFamily(
            "sloop_row_elements", "Sizes of rows in finished batches, where rows are padded.", labels=GROUP
        )
        padded = CounterMetricFamily("sloop_padding_elements", "What padding has added to these.", labels=GROUP)
        for rows in present:
            groups: defaultdict[Labels, list[BatchGroup]] = defaultdict(list)
            for group in rows.run.workers.groups.values():  # several differ in their cores only
                groups[rows.group(group.key, group.hardware)].append(group)
            for labels, own in groups.items():
                passes.add_metric(labels, sum(group.passes for group in own))
                if any(group.elements for group in own):
                    elements.add_metric(labels, sum(group.elements for group in own))
                    padded.add_metric(labels, sum(group.padded for group in own))
        yield from (passes, elements, padded)

    def _replica_families(self, present: Iterable[VersionRows]) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("sloop_replicas", "Replicas by life.", labels=(*GROUP, "life"))
        failed = CounterMetricFamily("sloop_batches_failed", "Batches on which the model raised.", labels=VARIANT)
        lost = CounterMetricFamily("sloop_replicas_lost", "Replicas that went without being asked.", labels=VARIANT)
        adopted = CounterMetricFamily(
            "sloop_replicas_adopted", "Replicas that were taken over from an earlier server.", labels=VARIANT
        )
        tries = CounterMetricFamily(
            "sloop_request_tries_failed",
            "Tries of requests that came to nothing: the model raised, or its worker was lost or stuck.",
            labels=(*VARIANT, "reason"),
        )
        for rows in present:
            run = rows.run
            lives: dict[Labels, Counter[Life]] = {}
            for replica in run.replicas.values():
                key = rows.group(replica.group.key, replica.group.hardware)
                lives.setdefault(key, Counter())[replica.life] += 1
            for key, counts in sorted(lives.items()):
                for life in Life:
                    replicas.add_metric((*key, life), counts[life])
            for family, found in (
                (failed, run.failed_batches),
                (lost, run.workers.lost),
                (adopted, run.workers.adopted),
            ):
                for (name, variant), count in found.items():
                    family.add_metric((*rows.stages[name], variant), count)
            for (name, variant, reason), count in run.failed_tries.items():
                tries.add_metric((*rows.stages[name], variant, reason), count)
        yield from (replicas, failed, lost, adopted, tries)

    def _form_families(self, present: Iterable[VersionRows]) -> Iterator[Metric]:
        forms = GaugeMetricFamily(
            "sloop_replica_forms",
            "Replicas by form: alone, a pair with a shadow, or a part of a pipeline.",
            labels=(*GROUP, "form"),
        )
        parts = CounterMetricFamily(
            "sloop_pipeline_parts", "Replicas that have started as parts of a model.", labels=VERSION
        )
        lost = CounterMetricFamily("sloop_pipelines_lost", "Pipelines that were lost with a part.", labels=VERSION)
        for rows in present:
            groups = [
                (replica.group.key, replica.group.hardware, kind_of(replica.group.shape))
                for replica in rows.run.replicas.values()
            ]
            for (key, hardware, form), count in sorted(Counter(groups).items()):
                forms.add_metric((*rows.group(key, hardware), form), count)
            parts.add_metric(rows.version, rows.run.workers.pipelines.parts)
            lost.add_metric(rows.version, rows.run.workers.pipelines.lost)
        yield from (forms, parts, lost)

    def _joining_family(self, present: Iterable[VersionRows]) -> Metric:
        joins = GaugeMetricFamily(
            "sloop_joins_rows", "1 if requests may share a forward pass, else 0; and why.", labels=(*VARIANT, "why")
        )
        for rows in present:
            for each in self._joining(*rows.version):
                why = each.obstacle or each.evidence
                joins.add_metric((*rows.version, each.stage, each.variant, why), float(not each.obstacle))
        return joins

    def _limit_families(self, model: str) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "sloop_model_body_bytes", "Bytes of requests to a model that has a limit.", labels=MODEL
        )
        refused = CounterMetricFamily(
            "sloop_model_refused", "Requests rejected because of a limit of their model.", labels=(*MODEL, "bound")
        )
        found = self._counted.models.get(model)
        if found is not None:
            held_bytes, by_bound = found
            held.add_metric((model,), held_bytes)
            for bound in ("requests", "bytes"):
                refused.add_metric((model, bound), by_bound.get(bound, 0))
        yield from (held, refused)

    def _server_families(self) -> Iterator[Metric]:
        """What is not about single models."""
        state = self.state
        state.advance_nodes()
        self._plans.drain((), state.plan_ns)
        yield self._plans.family()
        nodes = GaugeMetricFamily("sloop_nodes", "Nodes by kind of hardware and state.", labels=(*HARDWARE, "state"))
        there = Counter((each.node.hardware, each.state.value) for each in state.nodes.records.values())
        for (hardware, life), count in sorted(there.items()):
            nodes.add_metric((hardware, life), count)
        held = CounterMetricFamily("sloop_node_seconds", "Nodes held, over time.", labels=HARDWARE)
        money = CounterMetricFamily("sloop_node_usd", "What the nodes have cost, in US dollars.", labels=HARDWARE)
        for row in state.nodes.rows():
            held.add_metric((row.hardware,), row.held_s)
            money.add_metric((row.hardware,), row.usd)
        waiting = GaugeMetricFamily("sloop_spare_workers", "Workers that wait for a model.", labels=("node",))
        memory = GaugeMetricFamily("sloop_spare_worker_bytes", "Memory of their own.", labels=("node",))
        for name, spares in self._spares().items():
            waiting.add_metric((name,), spares.count)
            memory.add_metric((name,), spares.memory_bytes)
        yield from (nodes, held, money, waiting, memory)
        yield from self._turn_families()
        yield from self._edge_families()

    def _turn_families(self) -> Iterator[Metric]:
        turns = self._turns()
        longest = GaugeMetricFamily(
            "sloop_longest_turn_seconds",
            "The longest time since the last scrape for which the deciding process was busy with one piece of work.",
        )
        longest.add_metric((), to_s(turns.longest_ns))
        turns.longest_ns = 0
        all_turns = HistogramMetricFamily(
            "sloop_turn_seconds", "For how long the deciding process was busy with each piece of work."
        )
        names = [*(str(to_s(bound)) for bound in TURN_BOUNDS_NS), "+Inf"]
        all_turns.add_metric((), list(zip(names, accumulate(turns.counts), strict=True)), to_s(turns.total_ns))
        yield from (longest, all_turns)

    def _edge_families(self) -> Iterator[Metric]:
        """What the edges have counted."""
        counts = self._counted
        body_bytes = GaugeMetricFamily("sloop_body_bytes", "Bytes of requests held by the edges.")
        body_bytes.add_metric((), counts.held_bytes)
        answer_bytes = GaugeMetricFamily("sloop_answer_bytes", "Bytes of answers that clients have not taken.")
        answer_bytes.add_metric((), counts.unsent_bytes)
        connections = GaugeMetricFamily("sloop_connections", "Open connections of clients.")
        connections.add_metric((), counts.connections)
        edges = GaugeMetricFamily("sloop_edges", "Edges that accept connections.")
        edges.add_metric((), self._edges())
        edges_lost = CounterMetricFamily("sloop_edges_lost", "Edges that have died.")
        edges_lost.add_metric((), self._edges_lost())
        yield from (body_bytes, answer_bytes, connections, edges, edges_lost)
        for name, about, label, found, always in (
            (
                "sloop_bodies_refused",
                "Requests rejected unread: too large (each, json), no memory (all), waited too long (age).",
                "bound",
                counts.refused,
                ("each", "json", "all", "age"),
            ),
            (
                "sloop_connections_refused",
                "Connections closed at once, by the bound that they exceeded.",
                "bound",
                counts.refused_connections,
                ("connections", "address", "descriptors"),
            ),
            (
                "sloop_connections_expired",
                "HTTP connections closed because their client took too long, by what was awaited.",
                "awaited",
                counts.expired,
                ("head", "body", "answer"),
            ),
            ("sloop_key_requests", "Requests accepted, by the name of their API key.", "key", counts.keys, ()),
            (
                "sloop_key_refused",
                "Requests without an API key, with a wrong one, or with one that may not load or unload models (role).",
                "reason",
                counts.keys_refused,
                ("missing", "wrong", "role"),
            ),
            (
                "sloop_log_lost",
                "Records of the event log, and lines of the access log and of stderr, that could not be written.",
                "log",
                {**self._lost(), "access": counts.lines_dropped},
                ("events", "access", "stderr"),
            ),
        ):
            family = CounterMetricFamily(name, about, labels=(label,))
            for value in dict.fromkeys((*always, *found)):
                family.add_metric((value,), found.get(value, 0))
            yield family
