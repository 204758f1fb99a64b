"""`/metrics`: the state of a server's run in Prometheus' text format.

All events of all worker processes reach one core, and the run state receives every event and action, so the numbers are
exact across processes: nothing is sampled, merged or kept in shared memory. Names and units follow
Prometheus' practices: base units, the unit in the name, `_total` for counters.

The families are written here rather than by `prometheus_client`, which takes 7 µs for a row: with 200 models, each
scrape would stop the event loop for some 20 ms.
Source: Prometheus text exposition format 0.0.4.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from sloop.app.graph import declared_name
from sloop.runlog.cost import MICROCORES
from sloop.runlog.fold import Build, DeploymentState, Kept, VersionParts, VersionRecord
from sloop.serve.gateway.http import BodyMemory
from sloop.units import NS_PER_S, to_s
from sloop.vocabulary import Life, Node, Outcome

SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
START_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)

DECISIONS_KEPT: Final = 10_000
"""For `/v2/sloop/decisions`; at one a second this covers almost three hours."""
RECORDS_MAX: Final = 100
SAMPLES_MAX: Final = 4_096
"""Latencies and waits are added to histograms once a version has this many, or at a scrape. A block takes some tenths
of a millisecond; one at a time, every request would need two bisections in Python."""

Labels = str
"""Labels as the text format has them: `model="digits",version="1"`."""


def labelled(**labels: str) -> Labels:
    """Labels with their values, escaped."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


def escaped(value: str) -> str:
    """A label's value as the text format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


OUTCOMES: Final = tuple((outcome, labelled(outcome=outcome.value)) for outcome in Outcome)
LIVES: Final = tuple((life, labelled(life=life.value)) for life in Life)


class Histogram:
    """Counts by upper bound; the last bucket is unbounded. Values are integers: ns, or requests."""

    __slots__ = ("bounds", "counts", "lines", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self.total = 0
        self.lines: list[str] = []
        """As last written; empty if it has changed since then. Most models have no requests between two scrapes."""

    def observe(self, values: Sequence[int], weights: Sequence[int] | None = None) -> None:
        """Count values, each `weights` times (default: once)."""
        self.lines = []
        found = np.asarray(values, dtype=np.int64)
        buckets = np.searchsorted(self.bounds, found)  # the first bound that is at least as large
        self.counts += np.bincount(buckets, weights, minlength=len(self.counts)).astype(np.int64)
        self.total += int(found.sum() if weights is None else found @ np.asarray(weights))


class Histograms(dict[Labels, Histogram]):
    """One histogram per combination of labels. Dividing by `scale` gives the unit of the metric."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], scale: int = NS_PER_S) -> None:
        super().__init__()
        self.name, self.about, self.scale = name, about, scale
        self._names = [*map(str, bounds), "+Inf"]
        self._bounds = [round(bound * scale) for bound in bounds]

    def __missing__(self, labels: Labels) -> Histogram:
        self[labels] = made = Histogram(self._bounds)
        return made

    def drain(self, labels: Labels, samples: "array[int]") -> int:
        """Count all samples, and empty their array; returns how many there were."""
        count = len(samples)
        if count:
            self[labels].observe(samples)
            del samples[:]
        return count

    def discard(self, labels: Labels) -> None:
        """Forget the histograms whose labels begin with these."""
        for key in [key for key in self if key == labels or key.startswith(f"{labels},")]:
            del self[key]

    def family(self) -> "Family":
        """All histograms in the text format."""
        family = Family(self.name, "histogram", self.about)
        for labels, histogram in self.items():
            histogram.lines = histogram.lines or self._lines(labels, histogram)
            family.lines += histogram.lines
        return family

    def _lines(self, labels: Labels, histogram: Histogram) -> list[str]:
        """One histogram in the text format: for each bound, the count of values up to it; then the sum of all."""
        rows = Family(self.name, "histogram", self.about)
        count, prefix = 0, f"{labels}," if labels else ""
        for bound, more in zip(self._names, histogram.counts.tolist(), strict=True):
            count += more
            rows.add(f'{prefix}le="{bound}"', count, "_bucket")
        rows.add(labels, count, "_count")
        rows.add(labels, histogram.total / self.scale, "_sum")
        return rows.lines[2:]


class Family:
    """One metric with all its rows. `name` is without the `_total` of counters."""

    __slots__ = ("_name", "lines")

    def __init__(self, name: str, kind: str, about: str) -> None:
        self._name = f"{name}_total" if kind == "counter" else name
        self.lines = [f"# HELP {self._name} {about}", f"# TYPE {self._name} {kind}"]
        """Two of comment, then the rows."""

    def add(self, labels: Labels, value: float, suffix: str = "") -> None:
        """Add a row."""
        self.lines.append(f"{self._name}{suffix}{{{labels}}} {value}" if labels else f"{self._name}{suffix} {value}")


class VersionRows:
    """A version of a model: its labels, which are made once because there may be hundreds of models, and its ended
    requests by outcome."""

    __slots__ = ("ended", "model", "run", "stages", "version")

    def __init__(self, record: VersionRecord) -> None:
        self.run = record.run
        self.ended: Counter[Outcome] = Counter()
        self.model = labelled(model=record.application)
        self.version = labelled(model=record.application, version=record.version)
        self.stages = {name: f"{self.version},{labelled(stage=declared_name(name))}" for name in record.run.stages}
        """By the full name of the stage."""

    def variant(self, key: tuple[str, str], hardware: str) -> Labels:
        """The labels of a variant of a stage on a kind of hardware."""
        return f"{self.stages[key[0]]},{labelled(variant=key[1], hardware=hardware)}"


class Metrics:
    """The Prometheus metrics of a server: of its run `state`, to which every record must be appended, and of the memory
    for request bodies, which the event log does not have.

    `parts`, `nodes` and `build` are those of `DeploymentState`. Nobody reads the seconds of a server's run.
    """

    def __init__(
        self,
        parts: Iterable[VersionParts],
        bodies: BodyMemory,
        *,
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
        self._bodies = bodies
        self._records_max = RECORDS_MAX
        """With more versions than this, those that have ended are forgotten before the next scrape."""
        self._rows: dict[VersionRecord, VersionRows] = {}
        self._durations = Histograms("sloop_request_duration_seconds", "From sending to the end, by outcome.", SECONDS)
        self._waits = Histograms("sloop_queue_wait_seconds", "From entering a queue to batch.", SECONDS)
        self._services = Histograms(
            "sloop_service_time_seconds", "Forward pass of a batch, without transport.", SECONDS
        )
        self._starts = Histograms("sloop_cold_start_seconds", "Steps of cold starts.", START_SECONDS)
        self._resizes = Histograms("sloop_resize_seconds", "From order to effect.", SECONDS)
        self._plans = Histograms("sloop_plan_duration_seconds", "From the request of a plan to its arrival.", SECONDS)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        self._update()
        lines = [line for family in self._families() for line in family.lines]
        return "\n".join([*lines, ""]).encode()

    def ended(self, model: str = "") -> Counter[Outcome]:
        """Ended requests by outcome, of one model or of all that serve."""
        self._update()
        found: Counter[Outcome] = Counter()
        for name in [model] if model else dict.fromkeys(record.application for record in self.state.records):
            found += self._ended_of(name)
        return found

    def _ended_of(self, model: str) -> Counter[Outcome]:
        """Of all versions of a model, also of those that have ended."""
        labels, counts = labelled(model=model), Counter[Outcome]()
        for outcome, ended in OUTCOMES:
            found = self._durations.get(f"{labels},{ended}")
            if found is not None:
                counts[outcome] = int(found.counts.sum())
        return counts

    # Samples

    def _rows_of(self, record: VersionRecord) -> VersionRows:
        found = self._rows.get(record)
        if found is None:
            found = self._rows[record] = VersionRows(record)
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
        self._plans.drain("", state.plan_ns)
        for record in state.records:
            self._drain(record)
        self._forget_ended()

    def _drain(self, record: VersionRecord) -> None:
        """Sort the samples of a version into histograms."""
        run, rows = record.run, self._rows_of(record)
        samples_by_outcome = {Outcome.SERVED: run.served_ns, Outcome.LATE: run.late_ns, **run.missed_ns}
        for outcome, ended in OUTCOMES:
            if samples := samples_by_outcome[outcome]:
                rows.ended[outcome] += self._durations.drain(f"{rows.model},{ended}", samples)
        for name, stage in run.stages.items():
            self._waits.drain(rows.stages[name], stage.waits_ns)
        for group in run.groups.values():
            if group.service_ns:
                self._services.drain(rows.variant(group.key, group.hardware), group.service_ns)
            group.durations_ns.clear()
            group.resized_ns.clear()
        for (name, variant, step), samples in run.cold_start_ns.items():
            self._starts.drain(f"{rows.stages[name]},{labelled(variant=variant, step=step)}", samples)
        for name, samples in run.resize_ns.items():
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
                for histograms in (self._waits, self._services, self._starts, self._resizes):
                    histograms.discard(rows.version)
        present = {record.application for record in state.records}
        for model in {record.application for record in ended} - present:
            self._durations.discard(labelled(model=model))

    # Families

    def _families(self) -> Iterator[Family]:
        present = {record: self._rows_of(record) for record in self.state.records}
        yield from self._request_families(present)
        yield from self._version_families(present)
        yield from self._stage_families(present.values())
        yield from (self._durations.family(), self._waits.family(), self._sizes(present.values()).family())
        yield from (self._services.family(), self._starts.family(), self._resizes.family())
        yield from self._replica_families(present.values())
        yield from self._cluster_families()
        yield from self._body_families()

    def _request_families(self, present: Mapping[VersionRecord, VersionRows]) -> Iterator[Family]:
        requests = Family("sloop_requests", "counter", "Requests ended, by outcome.")
        attainment = Family("sloop_attainment_ratio", "gauge", "Served by the deadline, of all ended since the start.")
        waiting = Family("sloop_requests_open", "gauge", "Requests that have not ended.")
        open_requests: dict[str, int] = {}
        for record in present:
            open_requests[record.application] = open_requests.get(record.application, 0) + len(record.run.open)
        for model, count in open_requests.items():
            labels, ended = labelled(model=model), self._ended_of(model)
            total = ended.total()
            for outcome, text in OUTCOMES:
                requests.add(f"{labels},{text}", ended.get(outcome, 0))
            attainment.add(labels, ended[Outcome.SERVED] / total if total else 1.0)
            waiting.add(labels, count)
        yield from (requests, attainment, waiting)

    def _version_families(self, present: Mapping[VersionRecord, VersionRows]) -> Iterator[Family]:
        share = Family("sloop_version_share", "gauge", "Fraction of the model's requests that the version gets.")
        rollout = Family("sloop_version_state", "gauge", "1 for the state of the version's rollout.")
        requests = Family("sloop_version_requests", "counter", "Requests that the version has ended, by outcome.")
        for record, rows in present.items():
            share.add(rows.version, record.share)
            rollout.add(f'{rows.version},state="{record.state.value}"', 1)
            for outcome, text in OUTCOMES:
                requests.add(f"{rows.version},{text}", rows.ended.get(outcome, 0))
        rollouts = Family("sloop_rollouts", "counter", "States that versions have entered.")
        for (model, state), count in self.state.rollouts.items():
            rollouts.add(labelled(model=model, state=state.value), count)
        yield from (share, rollout, requests, rollouts)

    def _stage_families(self, present: Iterable[VersionRows]) -> Iterator[Family]:
        queued = Family("sloop_queue_length", "gauge", "Requests that wait.")
        drops = Family("sloop_drops", "counter", "Requests given up, by the stage they waited at.")
        allocated = Family("sloop_cores_allocated", "gauge", "Cores held by replicas.")
        in_use = Family("sloop_cores_in_use", "gauge", "Cores of replicas that run a batch.")
        core_seconds = Family("sloop_core_seconds", "counter", "Cores held, over time.")
        for rows in present:
            run = rows.run
            run.cost.charge(run.now_ns)
            busy: dict[str, float] = {}
            for replica in run.batches():
                busy[replica.spec.stage] = busy.get(replica.spec.stage, 0.0) + replica.cores
            for name, stage in run.stages.items():
                labels = rows.stages[name]
                queued.add(labels, run.queued(name))
                drops.add(labels, stage.dropped)
                allocated.add(labels, run.cost.microcores.get(name, 0) / MICROCORES)
                in_use.add(labels, busy.get(name, 0.0))
                core_seconds.add(labels, to_s(run.cost.microcore_ns.get(name, 0)) / MICROCORES)
        yield from (queued, drops, allocated, in_use, core_seconds)

    def _sizes(self, present: Iterable[VersionRows]) -> Histograms:
        sizes = Histograms("sloop_batch_size", "Requests per batch started.", SIZES, scale=1)
        for rows in present:
            for group in rows.run.groups.values():
                if group.sizes:
                    sizes[rows.variant(group.key, group.hardware)].observe([*group.sizes], [*group.sizes.values()])
        return sizes

    def _replica_families(self, present: Iterable[VersionRows]) -> Iterator[Family]:
        replicas = Family("sloop_replicas", "gauge", "Replicas by life.")
        failed = Family("sloop_batches_failed", "counter", "Batches on which the model raised.")
        lost = Family("sloop_replicas_lost", "counter", "Replicas that went without being asked.")
        for rows in present:
            run = rows.run
            lives: dict[Labels, Counter[Life]] = {}
            for replica in run.replicas.values():
                key = rows.variant(replica.group.key, replica.group.hardware)
                lives.setdefault(key, Counter())[replica.life] += 1
            for key, counts in sorted(lives.items()):
                for life, text in LIVES:
                    replicas.add(f"{key},{text}", counts[life])
            for family, found in ((failed, run.failed_batches), (lost, run.lost_replicas)):
                for (name, variant), count in found.items():
                    family.add(f"{rows.stages[name]},{labelled(variant=variant)}", count)
        yield from (replicas, failed, lost)

    def _cluster_families(self) -> Iterator[Family]:
        state = self.state
        decisions = Family("sloop_decisions", "counter", 'Decisions, by kind; about no single model with model="".')
        counts: Counter[tuple[str, str]] = Counter()
        for (key, kind), count in state.decisions.items():
            counts[key.partition("@")[0], kind] += count
        for (model, kind), count in counts.items():
            decisions.add(labelled(model=model, kind=kind), count)
        yield decisions
        yield self._plans.family()
        nodes = Family("sloop_nodes", "gauge", "Nodes by kind of hardware and state.")
        there = Counter((each.node.hardware, each.state.value) for each in state.nodes.records.values())
        for (hardware, life), count in sorted(there.items()):
            nodes.add(labelled(hardware=hardware, state=life), count)
        held = Family("sloop_node_seconds", "counter", "Nodes held, over time.")
        money = Family("sloop_node_usd", "counter", "What the nodes have cost, in US dollars.")
        for row in state.nodes.rows():
            held.add(labelled(hardware=row.hardware), row.held_s)
            money.add(labelled(hardware=row.hardware), row.usd)
        yield from (nodes, held, money)

    def _body_families(self) -> Iterator[Family]:
        bodies = self._bodies
        held = Family("sloop_body_bytes", "gauge", "Bytes of requests held by the gateway.")
        held.add("", bodies.held_bytes)
        refused = Family(
            "sloop_bodies_refused", "counter", "Requests rejected because of the size of their body or of all bodies."
        )
        for bound in ("each", "all"):
            refused.add(labelled(bound=bound), bodies.refused[bound])
        yield from (held, refused)
        of_model = Family("sloop_model_body_bytes", "gauge", "Bytes of requests to a model that has a limit.")
        over = Family("sloop_model_refused", "counter", "Requests rejected because of a limit of their model.")
        for model, quota in bodies.quotas.items():
            of_model.add(labelled(model=model), quota.held_bytes)
            for bound in ("requests", "bytes"):
                over.add(labelled(model=model, bound=bound), quota.refused[bound])
        yield from (of_model, over)
