"""The figures of a run, from its folded state: rates, quantiles, attainment, costs, estimate errors, assumptions.

`RunSummary` is a sink for the records of one run and can be read at any time. Its rows are the JSON output of `sloop
simulate` and the input of tables, plots and pages.

A request counts in the second in which it arrived, whenever it ends. Latency is end to end, from `sent_ns` to the
answer, over answered requests (served and late); quantiles are by nearest rank. A wait is the time of one visit from
entering a stage's queue to the start of the batch.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from msgspec import Struct

from sloop.app.application import Application
from sloop.app.graph import Graph
from sloop.profile.profile import Profile, Region
from sloop.runlog import Record
from sloop.runlog.cost import MICROCORES, CostAccount
from sloop.runlog.fold import BatchGroup, RunState, combined_accuracy
from sloop.units import NS_PER_MS, NS_PER_S, rank, to_ms

Variant = tuple[str, str]
"""A stage and one of its variants."""
Values = np.ndarray[tuple[int], np.dtype[np.int64]]


class StaticEstimate(Protocol):
    """The estimate of a variant as far as a summary needs it; a core's `Belief` satisfies it."""

    @property
    def batch_max(self) -> int: ...
    @property
    def accuracy(self) -> float | None: ...

    def costs_ns(self, cores: float) -> Sequence[int]:
        """Estimated durations in ns indexed by batch size, from 0 to `batch_max`."""
        ...


class StageRow(Struct, frozen=True, kw_only=True):
    """The figures of one stage of a run; None if the stage had no visits."""

    stage: str
    visits: int
    """Visits whose wait ended in a batch. Each request, or part of one, at this stage is a visit."""
    mean_wait_ms: float | None
    max_wait_ms: float | None
    batches: int
    mean_batch: float | None
    max_batch: int
    dropped: int
    rejected: int
    failed: int


class RouteRow(Struct, frozen=True, kw_only=True):
    """Answered requests that visited the same stages; `stages` is empty for the sum of all rare routes."""

    stages: tuple[str, ...]
    slo_ms: float
    """The deadline of the path if the application declares one, else the application's deadline."""
    answered: int
    served: int
    mean_ms: float
    p99_ms: float


class RunRow(Struct, frozen=True, kw_only=True):
    """One run in one row: the keys of `sloop simulate --json`. Latencies are None if no request was answered."""

    system: str
    seed: int | None
    requests: int
    served: int
    late: int
    dropped: int
    rejected: int
    failed: int
    attainment: float
    goodput_rps: float
    mean_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    core_seconds: float
    usd: float
    accuracy: float | None
    cold_starts: int
    wall_s: float
    attainment_low: float | None = None
    attainment_high: float | None = None
    goodput_rps_low: float | None = None
    goodput_rps_high: float | None = None
    p99_ms_low: float | None = None
    p99_ms_high: float | None = None
    """For simulated runs, the range expected on a real machine (`sloop.sim.scenarios`); None if it is unknown."""
    assumed: tuple[str, ...] = ()
    """Values that this run used although they were not measured, each with its reason."""
    stages: tuple[StageRow, ...] = ()
    routes: tuple[RouteRow, ...] = ()
    """Only for applications with several stages."""

    @property
    def violations(self) -> float:
        """Share of requests that were not answered in time, 0 to 1."""
        return 1.0 - self.attainment


class RunSecond(Struct, frozen=True):
    """One second of a run. Its ends belong to the requests that arrived in it."""

    start_s: int
    arrivals: int
    served: int
    late: int
    dropped: int
    rejected: int
    failed: int
    cores: float
    """Mean of the allocated cores."""
    worst_ms: float
    """The longest latency of its answered requests; 0 if there are none."""

    @property
    def violations(self) -> float:
        """Share of its arrivals that were not served in time, 0 to 1; 0 for a second without arrivals."""
        return (self.late + self.dropped + self.rejected + self.failed) / self.arrivals if self.arrivals else 0.0


class EstimateError(Struct, frozen=True):
    """Estimated and actual durations over the finished batches of one variant."""

    stage: str
    variant: str
    batches: int
    estimated_ms: float
    """Mean."""
    actual_ms: float
    """Mean time from the order to start the batch to its answer."""
    mape: float
    """Mean of |actual - estimated| / estimated."""

    @property
    def bias(self) -> float:
        """How much longer batches took than estimated, as a fraction: 0.1 is ten per cent longer."""
        return self.actual_ms / self.estimated_ms - 1.0 if self.estimated_ms else 0.0


class RunSummary:
    """A sink that computes the figures of a run.

    `application` has prices and profiles; with only its `Graph` there are no costs in dollars and no assumptions.
    `estimates` by (stage, variant) are compared with actual batch durations, and provide accuracies. They are not
    updated here, so fresh ones represent the profiles. `start_ns` is the start of the run, by default the instant of
    the first record.
    """

    def __init__(
        self,
        application: Application | Graph,
        *,
        estimates: Mapping[Variant, StaticEstimate] | None = None,
        start_ns: int | None = None,
    ) -> None:
        whole = application if isinstance(application, Application) else None
        self._application = whole
        self._estimates = estimates or {}
        self.state = RunState(
            application.graph if isinstance(application, Application) else application,
            cost=CostAccount(whole.cluster if whole else ()),
            accuracies={variant: estimate.accuracy for variant, estimate in self._estimates.items()},
            start_ns=start_ns,
        )
        self.append = self.state.append
        """Adds one record."""

    def fold(self, records: Iterable[tuple[int, Record]]) -> "RunSummary":
        """Add all records of a log; returns itself."""
        for now_ns, record in records:
            self.append(now_ns, record)
        return self

    # Time, requests and latencies

    @property
    def slo_ms(self) -> float:
        """The application's deadline."""
        return to_ms(self.state.graph.slo_ns)

    @property
    def duration_s(self) -> float:
        """From the start to the last record."""
        return (self.state.now_ns - (self.state.start_ns or 0)) / NS_PER_S

    @property
    def requests(self) -> int:
        """Requests that arrived."""
        return sum(second.arrivals for second in self.state.seconds)

    @property
    def latencies_ns(self) -> Values:
        """Latencies of all answered requests, unordered."""
        return np.concatenate([_values(self.state.served_ns), _values(self.state.late_ns)])

    def latency_ms(self, quantiles: Sequence[float]) -> list[float]:
        """Latencies at these quantiles (0 < q ≤ 1), in milliseconds; empty if no request was answered."""
        return _quantiles_ms(self.latencies_ns, quantiles)

    def seconds(self) -> list[RunSecond]:
        """The run second by second; the last one may be incomplete."""
        state = self.state
        state.close_seconds()
        rows = []
        for second in state.seconds:
            begun_ns = (state.start_ns or 0) + second.start_s * NS_PER_S
            passed_ns = min(NS_PER_S, state.now_ns - begun_ns)
            cores = second.microcore_ns / MICROCORES / passed_ns if passed_ns else state.cost.cores
            ends = (second.served, second.late, second.dropped, second.rejected, second.failed)
            rows.append(RunSecond(second.start_s, second.arrivals, *ends, cores, second.worst_ns / NS_PER_MS))
        return rows

    # Cost

    @property
    def core_seconds(self) -> float:
        """Allocated cores over time, up to the last record."""
        self.state.cost.charge(self.state.now_ns)
        return self.state.cost.total_microcore_ns / MICROCORES / NS_PER_S

    @property
    def usd(self) -> float:
        """Cost of the replicas' shares of their nodes in US dollars, up to the last record."""
        self.state.cost.charge(self.state.now_ns)
        return self.state.cost.usd

    @property
    def cores_mean(self) -> float:
        """Allocated cores, mean over the run."""
        return self.core_seconds / self.duration_s if self.duration_s else 0.0

    # Queues and batches

    @property
    def wait_mean_ms(self) -> float:
        """Mean time in a queue, over all visits."""
        waits = [_values(stage.waits_ns) for stage in self.state.stages.values()]
        count = sum(map(len, waits))
        return sum(int(wait_ns.sum()) for wait_ns in waits) / count / NS_PER_MS if count else 0.0

    @property
    def wait_max_ms(self) -> float:
        """Longest time in a queue."""
        return max(int(_values(stage.waits_ns).max(initial=0)) for stage in self.state.stages.values()) / NS_PER_MS

    @property
    def batch_mean(self) -> float:
        """Mean requests per batch."""
        sizes = self.batch_sizes()
        count = sum(sizes.values())
        return sum(size * n for size, n in sizes.items()) / count if count else 0.0

    def batch_sizes(self, stage: str | None = None) -> dict[int, int]:
        """How many batches of each size were started, at one stage or at all of them."""
        found: dict[int, int] = {}
        for group in self.state.groups.values():
            if stage is None or group.key[0] == stage:
                for size, count in group.sizes.items():
                    found[size] = found.get(size, 0) + count
        return found

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of answered requests. The accuracy of a request is the product over its stages of the mean
        accuracy of the variants that ran its visits there (IPA's PAS, for one request). A rare branch thus has little
        weight, and the parts of a request count as one. None if the accuracy of a variant is unknown."""
        state = self.state
        if len(state.stages) > 1:
            known = not state.unknown_accuracy and state.accuracy_count
            return state.accuracy_sum / state.accuracy_count if known else None
        computed: dict[Variant, int] = {}
        for group in state.groups.values():
            finished = (*group.durations_ns.items(), *group.resized_ns.items())
            requests = sum(size * len(durations_ns) for size, durations_ns in finished)
            if requests:
                computed[group.key] = computed.get(group.key, 0) + requests
        found = [
            (estimate.accuracy if (estimate := self._estimates.get(key)) else None, n) for key, n in computed.items()
        ]
        if not found or any(accuracy is None for accuracy, _ in found):
            return None
        mean = math.fsum((accuracy or 0.0) * n for accuracy, n in found) / sum(n for _, n in found)
        return combined_accuracy([mean])

    def stages(self) -> list[StageRow]:
        """The figures of each stage, in topological order."""
        rows = []
        for name, stage in self.state.stages.items():
            waits_ns, sizes = _values(stage.waits_ns), self.batch_sizes(name)
            visits, batches = len(waits_ns), sum(sizes.values())
            rows.append(
                StageRow(
                    stage=name,
                    visits=visits,
                    mean_wait_ms=int(waits_ns.sum()) / visits / NS_PER_MS if visits else None,
                    max_wait_ms=int(waits_ns.max()) / NS_PER_MS if visits else None,
                    batches=batches,
                    mean_batch=sum(size * count for size, count in sizes.items()) / batches if batches else None,
                    max_batch=max(sizes, default=0),
                    dropped=stage.dropped,
                    rejected=stage.rejected,
                    failed=stage.failed,
                )
            )
        return rows

    def routes(self) -> list[RouteRow]:
        """One row per set of stages that answered requests visited, the most frequent first."""
        graph, rows = self.state.graph, []
        for visited, route in self.state.routes.items():
            latencies_ns = _values(route.latencies_ns)
            deadlines = (path.slo_ns for path in graph.declared_paths if set(path.stages) == visited)
            rows.append(
                RouteRow(
                    stages=tuple(name for name in graph.stages if name in visited),
                    slo_ms=to_ms(next(deadlines, graph.slo_ns)),
                    answered=len(latencies_ns),
                    served=route.served,
                    mean_ms=float(latencies_ns.mean()) / NS_PER_MS,
                    p99_ms=_quantiles_ms(latencies_ns, (0.99,))[0],
                )
            )
        return sorted(rows, key=lambda row: (-row.answered, row.stages))

    def route_latencies_ms(self, quantiles: Sequence[float]) -> dict[tuple[str, ...], list[float]]:
        """Latencies at these quantiles for each of `routes`, in their order."""
        return {
            row.stages: _quantiles_ms(_values(self.state.routes[frozenset(row.stages)].latencies_ns), quantiles)
            for row in self.routes()
        }

    # Estimates and assumptions

    def estimate_errors(self) -> list[EstimateError]:
        """One row per variant that finished a batch and has an estimate."""
        by_variant: dict[Variant, list[BatchGroup]] = {}
        for group in self.state.groups.values():
            by_variant.setdefault(group.key, []).append(group)
        found = [self._estimate_error(key, groups) for key, groups in sorted(by_variant.items())]
        return [error for error in found if error is not None]

    def _estimate_error(self, key: Variant, groups: Sequence[BatchGroup]) -> EstimateError | None:
        estimate = self._estimates.get(key)
        if estimate is None:
            return None
        batches = estimated_ns = actual_ns = 0
        error = 0.0
        for group in groups:
            costs_ns = estimate.costs_ns(group.cores)
            for size, durations_ns in group.durations_ns.items():
                if size > estimate.batch_max or not costs_ns[size]:
                    continue
                taken_ns = _values(durations_ns)
                batches += len(taken_ns)
                estimated_ns += costs_ns[size] * len(taken_ns)
                actual_ns += int(taken_ns.sum())
                error += float(np.abs(taken_ns - costs_ns[size]).sum()) / costs_ns[size]
        if not batches:
            return None
        means_ms = estimated_ns / batches / NS_PER_MS, actual_ns / batches / NS_PER_MS
        return EstimateError(*key, batches, *means_ms, error / batches)

    def assumed(self) -> tuple[str, ...]:
        """One line for each value that the run used although it was not measured: assumed profiles of variants that
        ran, and batch sizes and core counts outside the measured region."""
        if self._application is None:
            return ()
        return tuple(
            line
            for stage in self._application.stages
            for variant in stage.variants
            if variant.profile is not None
            for line in self._assumptions((stage.name, variant.name), variant.profile)
        )

    def _assumptions(self, key: Variant, profile: Profile) -> Iterator[str]:
        groups = self.state.groups.values()
        ran = [(size, group.cores) for group in groups if group.key == key for size in group.sizes]
        name = "/".join(key)
        if ran and profile.origin == "assumed":
            yield f"{name}: assumed profile ({profile.source or 'no source given'})"
        beyond = [point for point in ran if profile.is_extrapolated(*point)]
        if beyond and profile.region is not None:
            sizes, cores = [size for size, _ in beyond], [cores for _, cores in beyond]
            reached = Region(min(sizes), max(sizes), min(cores), max(cores))
            yield f"{name}: extrapolated to {_region(reached)}, measured {_region(profile.region)}"

    def assumed_starts(self, lines: Mapping[str, str]) -> tuple[str, ...]:
        """The lines of `Header.assumed_starts` whose variants had a cold start in this run."""
        state = self.state
        started = {(stage, variant) for (stage, variant, _), took_ns in state.cold_start_ns.items() if any(took_ns)}
        started |= {replica.group.key for replica in state.replicas.values() if replica.step}
        return tuple(line for name, line in lines.items() if tuple(name.split("/", 1)) in started)

    # The run in one row

    def row(self, *, system: str, seed: int | None, wall_s: float = 0.0, assumed: Iterable[str] = ()) -> RunRow:
        """The run as of the last record; open requests count as not served. `assumed` are further assumptions, which
        the records do not contain."""
        seconds, latencies_ns = self.state.seconds, self.latencies_ns
        requests, served = self.requests, len(self.state.served_ns)
        p50_ms, p99_ms = _quantiles_ms(latencies_ns, (0.5, 0.99)) or (None, None)
        return RunRow(
            system=system,
            seed=seed,
            requests=requests,
            served=served,
            late=len(self.state.late_ns),
            dropped=sum(second.dropped for second in seconds),
            rejected=sum(second.rejected for second in seconds),
            failed=sum(second.failed for second in seconds),
            attainment=served / requests if requests else 1.0,
            goodput_rps=served / self.duration_s if self.duration_s else 0.0,
            mean_ms=int(latencies_ns.sum()) / len(latencies_ns) / NS_PER_MS if len(latencies_ns) else None,
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            core_seconds=self.core_seconds,
            usd=self.usd,
            accuracy=self.accuracy,
            cold_starts=self.state.cold_starts,
            wall_s=wall_s,
            assumed=tuple(dict.fromkeys((*self.assumed(), *assumed))),
            stages=tuple(self.stages()),
            routes=tuple(self.routes()),
        )


def _values(samples: "array[int]") -> Values:
    """A view of the samples without a copy. While it exists, no sample can be added."""
    return np.frombuffer(samples, dtype=np.int64)


def _quantiles_ms(latencies_ns: Values, quantiles: Sequence[float]) -> list[float]:
    """Nearest-rank quantiles in milliseconds; empty if there are no latencies."""
    if not len(latencies_ns):
        return []
    ranks = [rank(quantile, len(latencies_ns)) for quantile in quantiles]
    values = np.partition(latencies_ns, sorted(set(ranks)))
    return [int(values[each]) / NS_PER_MS for each in ranks]


def _region(region: Region) -> str:
    batches = _range(region.batch_min, region.batch_max)
    return f"batch {batches} on {_range(region.cores_min, region.cores_max)} cores"


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"
