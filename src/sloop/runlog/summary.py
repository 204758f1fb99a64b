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
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from msgspec import Struct, structs

from sloop.actions import End
from sloop.app.graph import Graph
from sloop.app.hardware import power_of
from sloop.profile.blocks import shared_rows
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile, Region
from sloop.runlog import Record
from sloop.runlog.cost import MICROCORES, NodeRow
from sloop.runlog.durations import VariantKey
from sloop.runlog.fold import DeploymentState
from sloop.runlog.replicas import COLD_START, BatchGroup
from sloop.runlog.requests import SecondRecord
from sloop.runlog.rows import SizeFigures
from sloop.runlog.run import RunState, combined_accuracy
from sloop.runlog.versions import Build, OnlyGraph, StaticEstimate, VersionParts
from sloop.text import listed
from sloop.units import NS_PER_MS, NS_PER_S, rank, to_ms
from sloop.vocabulary import Node, Request, RequestId, Slot, bounds_of, shadow_in

Values = np.ndarray[tuple[int], np.dtype[np.int64]]
IDLE_NS: Final = 60 * NS_PER_S
"""A server without a request for so long has no load."""


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


class PipelineRow(Struct, frozen=True, kw_only=True):
    """Replicas that started as parts of one model and served together until each had all layers."""

    pipelines: int
    parts: int
    """Replicas that started as parts."""
    lost: int
    """Pipelines that were lost with a part before all had all layers."""
    first_answer_s: float | None
    """Mean time from the order of a pipeline's parts until a batch had passed it; None if none has."""
    whole_s: float | None
    """Mean time from the order of a part until it had all layers; None if none has."""
    batches: int
    """Batches that began in pipelines,"""
    requests: int
    """and the requests, or parts of requests, in them."""


class ShadowRow(Struct, frozen=True, kw_only=True):
    """Processes beside replicas that compute some rows of their batches."""

    attached: int
    """Shadows that were ordered."""
    lost: int
    """Shadows that died."""
    batches: int
    """Batches that replicas began while they had a shadow,"""
    requests: int
    """and the requests, or parts of requests, in them."""
    rows: int | None
    """Rows that shadows computed of them, by the division that the profile gives, if each request has one row: the log
    does not have rows. None if the profile is not known."""


class FigureRow(Struct, frozen=True, kw_only=True):
    """The figures of requests and replicas. Latencies are None if no request was answered."""

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
    """Cost of the replicas' shares of their nodes."""
    accuracy: float | None
    cold_starts: int
    attainment_low: float | None = None
    attainment_high: float | None = None
    goodput_rps_low: float | None = None
    goodput_rps_high: float | None = None
    p99_ms_low: float | None = None
    p99_ms_high: float | None = None
    """For simulated runs, the range expected on a real machine (`sloop.sim.scenarios`); None if it is unknown."""
    stages: tuple[StageRow, ...] = ()
    routes: tuple[RouteRow, ...] = ()
    """Only for applications with several stages."""
    pipelines: PipelineRow | None = None
    shadows: ShadowRow | None = None
    """None if there were none."""

    @property
    def violations(self) -> float:
        """Share of requests that were not answered in time, 0 to 1."""
        return 1.0 - self.attainment


class ApplicationRow(FigureRow, frozen=True, kw_only=True):
    """One application of a run, or one version of it."""

    name: str
    version: str = ""
    """Empty for all versions of the application together."""
    slo_ms: float


class RunRow(FigureRow, frozen=True, kw_only=True):
    """One run in one row: the keys of `sloop simulate --json`."""

    system: str
    seed: int | None
    wall_s: float
    node_usd: float = 0.0
    """Cost of whole nodes while they were held."""
    nodes: tuple[NodeRow, ...] = ()
    planner_errors: int = 0
    """How often no plan could be made, because a policy failed or its process died."""
    applications: tuple[ApplicationRow, ...] = ()
    """One row for each application, if there were several."""
    versions: tuple[ApplicationRow, ...] = ()
    """One row for each version of the applications that had several."""
    rows: int = 0
    """Of all requests; 0 if each had one, and all were equally large."""
    goodput_rows_per_s: float = 0.0
    """Of the requests that were served in time; 0 as above."""
    sizes: tuple[SizeFigures, ...] = ()
    """One row for each size of rows, or class of sizes, if there were several."""
    assumed: tuple[str, ...] = ()
    """Values that this run used although they were not measured, each with its reason."""

    @property
    def has_graphs(self) -> bool:
        """Whether any application has several stages."""
        versions = {row.name for row in self.versions}
        single = [row for row in self.applications if row.name not in versions]
        rows: list[FigureRow] = [*self.versions, *single]
        return any(len(row.stages) > 1 for row in rows or [self])


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
    """Estimated and actual durations over the finished batches of one variant on one kind of hardware."""

    stage: str
    variant: str
    hardware: str
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


class Figures:
    """The figures of some versions: all of a run, those of one application, or a single one."""

    def __init__(self, runs: Sequence[RunState]) -> None:
        self._runs = runs

    @property
    def runs(self) -> Sequence[RunState]:
        """The runs of the versions."""
        return self._runs

    # Time, requests and latencies

    @property
    def slo_ms(self) -> float:
        """The deadline of the first application."""
        return to_ms(self.runs[0].graph.slo_ns)

    @property
    def duration_s(self) -> float:
        """From the start, or the deployment of the first version, to the last record."""
        runs = self.runs
        return (max(run.now_ns for run in runs) - min(run.begun_ns for run in runs)) / NS_PER_S

    @property
    def requests(self) -> int:
        """Requests that arrived."""
        return sum(second.arrivals for run in self.runs for second in run.seconds)

    @property
    def latencies_ns(self) -> Values:
        """Latencies of all answered requests, unordered."""
        return np.concatenate([_values(samples) for run in self.runs for samples in (run.served_ns, run.late_ns)])

    def latency_ms(self, quantiles: Sequence[float]) -> list[float]:
        """Latencies at these quantiles (0 < q ≤ 1), in milliseconds; empty if no request was answered."""
        return _quantiles_ms(self.latencies_ns, quantiles)

    def seconds(self) -> list[RunSecond]:
        """The run second by second; the last one may be incomplete."""
        by_start: dict[int, list[SecondRecord]] = {}
        for run in self.runs:
            run.close_seconds()
            for second in run.seconds:
                by_start.setdefault(second.start_s, []).append(second)
        return [self._second(start_s, by_start[start_s]) for start_s in sorted(by_start)]

    def _second(self, start_s: int, records: Sequence[SecondRecord]) -> RunSecond:
        """One second of all versions."""
        runs = self.runs
        now_ns = max(run.now_ns for run in runs)
        passed_ns = min(NS_PER_S, now_ns - (runs[0].start_ns or 0) - start_s * NS_PER_S)
        microcore_ns = sum(record.microcore_ns for record in records)
        present_cores = sum(run.cost.cores for run in runs if run.now_ns == now_ns)
        return RunSecond(
            start_s=start_s,
            arrivals=sum(record.arrivals for record in records),
            served=sum(record.served for record in records),
            late=sum(record.late for record in records),
            dropped=sum(record.dropped for record in records),
            rejected=sum(record.rejected for record in records),
            failed=sum(record.failed for record in records),
            cores=microcore_ns / MICROCORES / passed_ns if passed_ns else present_cores,
            worst_ms=max(record.worst_ns for record in records) / NS_PER_MS,
        )

    def hardware_cores(self) -> dict[str, list[tuple[int, float]]]:
        """By kind of hardware, the mean of the allocated cores in each second: pairs of the second and the cores."""
        runs = self.runs
        now_ns, start_ns = max(run.now_ns for run in runs), runs[0].start_ns or 0
        found: dict[str, dict[int, float]] = {}
        for run in runs:
            run.close_seconds()
            kinds = list(run.cost.hardware_microcore_ns)
            for second in run.seconds:
                passed_ns = min(NS_PER_S, now_ns - start_ns - second.start_s * NS_PER_S)
                parts = second.hardware_microcore_ns or (second.microcore_ns,)
                for hardware, microcore_ns in zip(kinds, parts, strict=False):
                    if passed_ns > 0:
                        cores = found.setdefault(hardware, {})
                        mean = microcore_ns / MICROCORES / passed_ns
                        cores[second.start_s] = cores.get(second.start_s, 0.0) + mean
        return {hardware: sorted(cores.items()) for hardware, cores in found.items()}

    # Cost

    @property
    def core_seconds(self) -> float:
        """Allocated cores over time, up to the last record."""
        return sum(run.cost.total_microcore_ns for run in self.runs) / MICROCORES / NS_PER_S

    @property
    def usd(self) -> float:
        """Cost of the replicas' shares of their nodes in US dollars, up to the last record."""
        return math.fsum(run.cost.usd for run in self.runs)

    @property
    def cores_mean(self) -> float:
        """Allocated cores, mean over the run."""
        return self.core_seconds / self.duration_s if self.duration_s else 0.0

    # Queues and batches

    @property
    def wait_mean_ms(self) -> float:
        """Mean time in a queue, over all visits."""
        waits = [_values(stage.waits_ns) for run in self.runs for stage in run.stages.values()]
        count = sum(map(len, waits))
        return sum(int(wait_ns.sum()) for wait_ns in waits) / count / NS_PER_MS if count else 0.0

    @property
    def wait_max_ms(self) -> float:
        """Longest time in a queue."""
        stages = (stage for run in self.runs for stage in run.stages.values())
        return max(int(_values(stage.waits_ns).max(initial=0)) for stage in stages) / NS_PER_MS

    @property
    def batch_mean(self) -> float:
        """Mean requests per batch."""
        sizes = self.batch_sizes()
        count = sum(sizes.values())
        return sum(size * n for size, n in sizes.items()) / count if count else 0.0

    def batch_sizes(self, stage: str | None = None) -> dict[int, int]:
        """How many batches of each size were started, at one stage or at all of them."""
        found: dict[int, int] = {}
        for group in self._groups():
            if stage is None or group.key[0] == stage:
                for size, count in group.sizes.items():
                    found[size] = found.get(size, 0) + count
        return found

    def _groups(self) -> Iterator[BatchGroup]:
        for run in self.runs:
            yield from run.workers.groups.values()

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of answered requests. The accuracy of a request is the product over its stages of the mean
        accuracy of the variants that ran its visits there (IPA's PAS, for one request). A rare branch thus has little
        weight, and the parts of a request count as one. None if the accuracy of a variant is unknown."""
        if len(self.runs) == 1:
            return _accuracy(self.runs[0])
        means = [(_accuracy(run), len(run.served_ns) + len(run.late_ns)) for run in self.runs]
        known = [(accuracy, answered) for accuracy, answered in means if answered]
        if not known or any(accuracy is None for accuracy, _ in known):
            return None
        return math.fsum((accuracy or 0.0) * answered for accuracy, answered in known) / sum(n for _, n in known)

    def stages(self) -> list[StageRow]:
        """The figures of each stage, in topological order."""
        rows = []
        for run in self.runs:
            for name, stage in run.stages.items():
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
        rows = []
        for run in self.runs:
            graph = run.graph
            for visited, route in run.routes.items():
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
        found = {}
        for row in self.routes():
            routes = [run.routes[key] for run in self.runs if (key := frozenset(row.stages)) in run.routes]
            latencies_ns = np.concatenate([_values(route.latencies_ns) for route in routes])
            found[row.stages] = _quantiles_ms(latencies_ns, quantiles)
        return found

    @property
    def cold_starts(self) -> int:
        """Replicas that were ordered to start."""
        return sum(run.workers.cold_starts for run in self.runs)

    def _pipelines(self) -> PipelineRow | None:
        accounts = [run.workers.pipelines for run in self.runs]
        if not any(each.parts for each in accounts):
            return None
        completions = [samples for each in accounts for samples in each.completion_ns.values()]
        batches, requests = _begun(group for group in self._groups() if bounds_of(group.shape))
        return PipelineRow(
            pipelines=sum(each.count for each in accounts),
            parts=sum(each.parts for each in accounts),
            lost=sum(each.lost for each in accounts),
            first_answer_s=_mean_s(each.answer_ns for each in accounts),
            whole_s=_mean_s(completions),
            batches=batches,
            requests=requests,
        )

    def _shadows(self, estimates: Mapping[VariantKey, StaticEstimate]) -> ShadowRow | None:
        attached = sum(run.workers.shadows.count for run in self.runs)
        if not attached:
            return None
        pairs = [group for group in self._groups() if shadow_in(group.shape)]
        rows = [_shadow_rows(group, estimates.get(group.variant_key)) for group in pairs]
        known = [each for each in rows if each is not None]
        batches, requests = _begun(pairs)
        return ShadowRow(
            attached=attached,
            lost=sum(run.workers.shadows.lost for run in self.runs),
            batches=batches,
            requests=requests,
            rows=sum(known) if len(known) == len(rows) else None,
        )

    def figures(self, estimates: Mapping[VariantKey, StaticEstimate] = MappingProxyType({})) -> dict[str, Any]:
        """The fields of a `FigureRow`, as of the last record; open requests count as not served. `estimates` say how
        rows are divided between bodies and shadows."""
        latencies_ns, requests = self.latencies_ns, self.requests
        seconds = [second for run in self.runs for second in run.seconds]
        served = sum(len(run.served_ns) for run in self.runs)
        p50_ms, p99_ms = _quantiles_ms(latencies_ns, (0.5, 0.99)) or (None, None)
        return {
            "requests": requests,
            "served": served,
            "late": sum(len(run.late_ns) for run in self.runs),
            "dropped": sum(second.dropped for second in seconds),
            "rejected": sum(second.rejected for second in seconds),
            "failed": sum(second.failed for second in seconds),
            "attainment": served / requests if requests else 1.0,
            "goodput_rps": served / self.duration_s if self.duration_s else 0.0,
            "mean_ms": int(latencies_ns.sum()) / len(latencies_ns) / NS_PER_MS if len(latencies_ns) else None,
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "core_seconds": self.core_seconds,
            "usd": self.usd,
            "accuracy": self.accuracy,
            "cold_starts": self.cold_starts,
            "stages": tuple(self.stages()),
            "routes": tuple(self.routes()),
            "pipelines": self._pipelines(),
            "shadows": self._shadows(estimates),
        }


class LoadTime:
    """A sink that measures for how long a run had load: from its first request to the end of its last, without
    stretches of `IDLE_NS` or longer in which no request was open. A server is there before and after its load, and
    between two loads: over all that time, a rate would say how long it was idle."""

    def __init__(self) -> None:
        self._open: set[RequestId] = set()
        self._begun_ns: int | None = None
        self._last_ns = self._ended_ns = 0
        """When the present stretch began, its last record about a request, and how long the stretches before took."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add the next record."""
        if isinstance(record, Request):
            if not self._open and (self._begun_ns is None or now_ns - self._last_ns >= IDLE_NS):
                self._ended_ns, self._begun_ns = self.total_ns, now_ns
            self._open.add(record.id)
        elif not isinstance(record, End) or record.request not in self._open:
            return
        else:
            self._open.remove(record.request)
        self._last_ns = now_ns

    @property
    def total_ns(self) -> int:
        """Up to the last request, or the end of one; a stretch counts as a second at least."""
        if self._begun_ns is None:
            return 0
        return self._ended_ns + max(NS_PER_S, self._last_ns - self._begun_ns)


def on_schedule_clock(records: Iterable[tuple[int, Record]], *, first_ns: int) -> Iterator[tuple[int, Record]]:
    """Records on a clock that starts with the schedule; earlier ones (replicas, plans) are moved to its start."""
    held: list[tuple[int, Record]] = []
    zero_ns: int | None = None
    for now_ns, record in records:
        if zero_ns is None:
            if not isinstance(record, Request):
                held.append((now_ns, record))
                continue
            zero_ns = record.sent_ns - first_ns
            yield from ((0, earlier) for _, earlier in held)
        if isinstance(record, Request):
            record = shifted(record, zero_ns)  # noqa: PLW2901  # the same request on another clock
        yield max(0, now_ns - zero_ns), record


def shifted(request: Request, zero_ns: int) -> Request:
    """The request on a clock that starts `zero_ns` later."""
    return structs.replace(
        request,
        sent_ns=request.sent_ns - zero_ns,
        arrived_ns=request.arrived_ns - zero_ns,
        deadline_ns=request.deadline_ns - zero_ns,
    )


class RunSummary(Figures):
    """A sink that computes the figures of a run: of all its applications together, and of each.

    `declared` are the parts of a fresh setup, or only a graph, of which there are no assumptions and no estimates. The
    estimates in the parts are compared with actual batch durations, and provide accuracies; they are not updated here,
    so fresh ones represent the profiles. `nodes` have the prices. `start_ns` is the start of the run, by default the
    instant of the first record. `build` describes versions that are deployed during the run (`DeploymentState`).
    """

    def __init__(
        self,
        declared: Iterable[VersionParts] | Graph,
        *,
        nodes: Iterable[Node] = (),
        start_ns: int | None = None,
        build: Build | None = None,
    ) -> None:
        parts = [OnlyGraph(declared)] if isinstance(declared, Graph) else declared
        self.deployment = DeploymentState(parts, nodes=nodes, start_ns=start_ns, build=build)
        self.append = self.deployment.append
        """Adds one record."""
        self.extend = self.deployment.extend
        """Adds records with their instants."""

    @property
    def runs(self) -> Sequence[RunState]:
        """The runs of all versions, brought to the last record."""
        self.deployment.advance()
        return self.deployment.runs

    def fold(self, records: Iterable[tuple[int, Record]]) -> "RunSummary":
        """Add all records of a log; returns itself."""
        self.extend(records)
        return self

    @property
    def applications(self) -> dict[str, Figures]:
        """The figures of each application, in all its versions."""
        self.deployment.advance()
        found = self.deployment.applications
        return {name: Figures([record.run for record in records]) for name, records in found.items()}

    # Estimates and assumptions

    @property
    def _estimates(self) -> dict[VariantKey, StaticEstimate]:
        records = self.deployment.records
        return {key: belief for record in records for key, belief in record.parts.beliefs.items()}

    def estimate_errors(self) -> list[EstimateError]:
        """One row per variant and kind of hardware that finished a batch and has an estimate."""
        by_key: dict[VariantKey, list[BatchGroup]] = {}
        for group in self._groups():
            by_key.setdefault(group.variant_key, []).append(group)
        estimates = self._estimates
        found = [
            _estimate_error(key, groups, estimates[key]) for key, groups in sorted(by_key.items()) if key in estimates
        ]
        return [error for error in found if error is not None]

    def assumed(self) -> tuple[str, ...]:
        """One line for each value that the run used although it was not measured: assumed profiles of variants that
        ran, and batch sizes and core counts outside the measured region."""
        ran: dict[VariantKey, list[tuple[int, Slot]]] = {}
        for group in self._groups():
            ran.setdefault(group.variant_key, []).extend((size, group.slot) for size in group.sizes)
        several = len({hardware for _, _, hardware in self._estimates}) > 1
        return tuple(
            dict.fromkeys(
                line
                for key, estimate in self._estimates.items()
                if isinstance(estimate, Estimate) and ran.get(key)
                for line in _assumptions(_variant_name(key, several=several), estimate.profile, ran[key])
            )
        )

    def assumed_starts(self, lines: Mapping[str, str]) -> tuple[str, ...]:
        """The lines of `Header.assumed_starts` whose variants had a cold start in this run: one with steps, unlike the
        first replicas of a warm cluster."""
        started = set[str]()
        for run in self.runs:
            keys = {(stage, variant) for stage, variant, step in run.workers.cold_start_ns if step != COLD_START}
            keys |= {replica.group.key for replica in run.replicas.values() if replica.step}
            started |= {f"{stage}/{variant}" for stage, variant in keys}
        return tuple(line for name, line in lines.items() if name.partition(" on ")[0] in started)

    def node_rows(self) -> tuple[NodeRow, ...]:
        """One row for each kind of hardware of which a node was held, with how busy they were and what they drew."""
        busy = self._busy_core_s()
        if "" in busy:  # replicas whose kind of hardware is unknown
            return tuple(self.deployment.nodes.rows())
        found = []
        for row in self.deployment.nodes.rows():
            records = [each for each in self.deployment.nodes.records.values() if each.node.hardware == row.hardware]
            node, (core_s, device_s) = records[0].node, busy.get(row.hardware, (0.0, 0.0))
            worked_s = device_s if node.devices else core_s
            capacity_s = math.fsum(
                each.held_ns / NS_PER_S * (len(each.node.devices) if node.devices else each.node.cores)
                for each in records
            )
            part = min(1.0, worked_s / capacity_s) if capacity_s else 0.0
            power = power_of(node)
            energy_wh = None if power is None else power.watts(part) * row.held_s / 3600
            found.append(structs.replace(row, busy=part, energy_wh=energy_wh))
        return tuple(found)

    def _assumed_power(self) -> tuple[str, ...]:
        """A line about the kinds of hardware whose power is assumed."""
        nodes, held = self.deployment.nodes, {row.hardware for row in self.deployment.nodes.rows()}
        powers = {node.hardware: power_of(node) for node in nodes.nodes.values() if node.hardware in held}
        kinds = [kind for kind, power in powers.items() if power is not None and power.origin == "assumed"]
        return (f"the power of {listed(kinds)}, from which the energy is estimated",) if kinds else ()

    def _busy_core_s(self) -> dict[str, tuple[float, float]]:
        """By kind of hardware, for how long batches have run: core-seconds of those that have finished, and seconds in
        which at least one ran on an accelerator. Of cores without a cap all of the node count while one runs there."""
        found: dict[str, tuple[float, float]] = {}
        for group in self._groups():
            core_s, device_s = found.get(group.hardware, (0.0, 0.0))
            if group.slot.is_capped and not group.slot.accelerator:
                finished = chain(group.durations_ns.values(), group.resized_ns.values())
                core_s += sum(map(sum, finished)) / NS_PER_S * group.cores
            found[group.hardware] = core_s, device_s
        deployment = self.deployment
        for (hardware, node, device), use in deployment.uses.items():
            busy_s = use.busy_ns(deployment.now_ns) / NS_PER_S
            core_s, device_s = found.get(hardware, (0.0, 0.0))
            if device:
                device_s += busy_s
            elif node in deployment.nodes.nodes:
                core_s += busy_s * deployment.nodes.nodes[node].cores
            found[hardware] = core_s, device_s
        return found

    # The run in one row

    def row(self, *, system: str, seed: int | None, wall_s: float = 0.0, assumed: Iterable[str] = ()) -> RunRow:
        """The run as of the last record; open requests count as not served. `assumed` are further assumptions, which
        the records do not contain."""
        estimates = self._estimates
        figures, deployment = self.figures(estimates), self.deployment
        by_name, rows = deployment.applications, self.node_rows()
        if len(by_name) > 1:
            figures["accuracy"] = None  # those of different applications cannot be averaged
        return RunRow(
            system=system,
            seed=seed,
            wall_s=wall_s,
            node_usd=deployment.nodes.usd,
            nodes=rows,
            planner_errors=sum(count for (_, kind), count in deployment.decisions.items() if kind == "planner"),
            applications=tuple(
                ApplicationRow(name=name, slo_ms=each.slo_ms, **each.figures(estimates))
                for name, each in self.applications.items()
                if len(by_name) > 1
            ),
            versions=tuple(
                ApplicationRow(
                    name=name,
                    version=record.version,
                    slo_ms=to_ms(record.run.graph.slo_ns),
                    **Figures([record.run]).figures(estimates),
                )
                for name, records in by_name.items()
                if len(records) > 1
                for record in records
            ),
            assumed=tuple(dict.fromkeys((*self.assumed(), *self._assumed_power(), *assumed))),
            **figures,
        )


def _begun(groups: Iterable[BatchGroup]) -> tuple[int, int]:
    """How many batches of these groups have begun, and how many requests were in them."""
    sizes = [(size, count) for group in groups for size, count in group.sizes.items()]
    return sum(count for _, count in sizes), sum(size * count for size, count in sizes)


def _mean_s(samples: "Iterable[array[int]]") -> float | None:
    """The mean of all samples, given in ns, in seconds; None without any."""
    found = [_values(each) for each in samples]
    count = sum(map(len, found))
    return sum(int(each.sum()) for each in found) / count / NS_PER_S if count else None


def _shadow_rows(group: BatchGroup, estimate: StaticEstimate | None) -> int | None:
    """The rows that the shadows of these batches computed, with one row for each request; None if it is not known how
    they were divided."""
    if not group.sizes:
        return 0
    profile = estimate.profile if isinstance(estimate, Estimate) else None
    shadow = shadow_in(group.shape)
    if profile is None or profile.layers is None or shadow is None:
        return None
    rows, _ = shared_rows(profile.layers, group.cores, shadow, profile.max_batch)
    return sum(rows[size] * count for size, count in group.sizes.items() if size < len(rows))


def _accuracy(run: RunState) -> float | None:
    """The mean accuracy of the answered requests of one version (`Figures.accuracy`)."""
    if len(run.stages) > 1:
        return run.accuracy_sum / run.accuracy_count if not run.unknown_accuracy and run.accuracy_count else None
    computed: dict[tuple[str, str], int] = {}
    for group in run.workers.groups.values():
        finished = (*group.durations_ns.items(), *group.resized_ns.items())
        requests = sum(size * len(durations_ns) for size, durations_ns in finished)
        if requests:
            computed[group.key] = computed.get(group.key, 0) + requests
    found = [(run.accuracies.get(key), n) for key, n in computed.items()]
    if not found or any(accuracy is None for accuracy, _ in found):
        return None
    mean = math.fsum((accuracy or 0.0) * n for accuracy, n in found) / sum(n for _, n in found)
    return combined_accuracy([mean])


def _estimate_error(key: VariantKey, groups: Sequence[BatchGroup], estimate: StaticEstimate) -> EstimateError | None:
    batches = estimated_ns = actual_ns = 0
    error = 0.0
    for group in groups:
        costs_ns = estimate.of(group.shape).costs_ns(group.slot)
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


def _assumptions(name: str, profile: Profile, ran: Sequence[tuple[int, Slot]]) -> Iterator[str]:
    """What is assumed about a variant that ran batches of these sizes on these slots."""
    if profile.origin == "assumed":
        yield f"{name}: assumed profile ({profile.source or 'no source given'})"
    points = [(size, profile.cores_on(slot)) for size, slot in ran]
    beyond = [point for point in points if profile.is_extrapolated(*point)]
    if beyond and profile.region is not None:
        sizes, cores = [size for size, _ in beyond], [cores for _, cores in beyond]
        reached = Region(min(sizes), max(sizes), min(cores), max(cores))
        yield f"{name}: extrapolated to {_region(reached)}, measured {_region(profile.region)}"


def _variant_name(key: VariantKey, *, several: bool) -> str:
    """A variant, with its kind of hardware if there are several."""
    stage, variant, hardware = key
    return f"{stage}/{variant}{f' on {hardware}' if several else ''}"


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
