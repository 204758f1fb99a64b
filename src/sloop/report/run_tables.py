"""The tables that describe runs: outcomes, cost, applications, versions, nodes, waits, stages, routes, seconds,
estimates, and the agreement between a live run and its simulation."""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from sloop.report.explain.decision import RolloutStep
from sloop.report.explain.misses import MissReason
from sloop.report.plots import OTHER_ROUTES
from sloop.report.tables import Cell, Table
from sloop.runlog.cost import NodeRow
from sloop.runlog.summary import (
    ApplicationRow,
    EstimateError,
    FigureRow,
    Figures,
    RouteRow,
    RunRow,
    RunSecond,
    StageRow,
)
from sloop.vocabulary import Node


def ends(rows: Iterable[RunRow]) -> Table:
    """Outcomes of requests, one row per run, with their rows if any brought several."""
    runs = list(rows)
    has_rows = any(row.rows not in (0, row.requests) for row in runs)
    columns = ("attainment %", "late", "dropped", "rejected", "failed", "p50 ms", "p99 ms")
    return Table(
        "How requests ended",
        ("system", "requests", *(("rows",) if has_rows else ()), *columns),
        tuple(
            (
                *(r.system, r.requests, *((r.rows or r.requests,) if has_rows else ())),
                *(_attainment(r), r.late, r.dropped, r.rejected, r.failed, r.p50_ms, r.p99_ms),
            )
            for r in runs
        ),
    )


def sizes(rows: Iterable[RunRow]) -> Table:
    """Outcomes of requests by the size of their rows, one row per run and size."""
    return Table(
        "By size",
        ("system", "size up to", "requests", "in time", "attainment %", "p50 ms", "p99 ms"),
        tuple(
            (row.system, each.size, each.requests, each.served, 100 * each.attainment, each.p50_ms, each.p99_ms)
            for row in rows
            for each in row.sizes
        ),
    )


def _attainment(row: FigureRow) -> float | None:
    """In per cent; None without requests."""
    return 100 * row.attainment if row.requests else None


def ranges(rows: Sequence[RunRow]) -> Table:
    """The range expected on a real machine, one row per run, followed by its applications if there are several; runs
    without such a range are left out."""
    named: list[tuple[str, str, FigureRow]] = []
    for row in rows:
        named.append((row.system, "", row))
        named += [(row.system, each.name, each) for each in row.applications]
    several = any(row.applications for row in rows)
    return Table(
        "Expected on a real machine, nine times in ten",
        ("system", *(("application",) if several else ()), "attainment %", "goodput rps", "p99 ms"),
        tuple(
            (
                *((system, name or "all") if several else (system,)),
                _between(100 * r.attainment_low, 100 * r.attainment_high),
                _between(r.goodput_rps_low, r.goodput_rps_high),
                _between(r.p99_ms_low, r.p99_ms_high),
            )
            for system, name, r in named
            if r.requests and r.attainment_low is not None and r.attainment_high is not None
        ),
    )


def _between(low: float | None, high: float | None) -> str:
    """Both ends of a range, such as `84.1–91.3`."""
    return "" if low is None or high is None else f"{low:.3g}–{high:.3g}"


def costs(rows: Sequence[RunRow]) -> Table:
    """Resources and accuracy, one row per run; no price if no node used has one. The accuracy of several applications
    is with each of them."""
    priced = any(row.node_usd for row in rows)
    return Table(
        "Cost",
        (
            *("system", "goodput rps", "core-seconds", "USD of replicas"),
            *(("USD of nodes",) if priced else ()),
            *("cold starts", "accuracy"),
        ),
        tuple(
            (
                *(r.system, r.goodput_rps, r.core_seconds, r.usd or None),
                *((r.node_usd,) if priced else ()),
                *(r.cold_starts, r.accuracy),
            )
            for r in rows
        ),
    )


def _by_run(title: str, columns: Sequence[str], runs: Iterable[tuple[str, Iterable[tuple[Cell, ...]]]]) -> Table:
    """The rows of each run; with several runs the first column names the run."""
    named = [(label, list(rows)) for label, rows in runs]
    if len(named) > 1:
        columns = ("system", *columns)
        named = [(label, [(label, *row) for row in rows]) for label, rows in named]
    return Table(title, tuple(columns), tuple(row for _, rows in named for row in rows))


def applications(
    runs: Sequence[tuple[str, Sequence[ApplicationRow]]], title: str = "Application by application"
) -> Table:
    """Outcomes and cost of each application, or of each version, grouped by run."""
    versions = any(row.version for _, rows in runs for row in rows)
    columns = ("application", *(("version",) if versions else ()), "deadline ms", "requests", "attainment %")
    columns += ("late", "dropped", "rejected", "failed", "p50 ms", "p99 ms", "core-seconds", "USD", "accuracy")

    def cells(r: ApplicationRow) -> tuple[Cell, ...]:
        outcome = (r.slo_ms, r.requests, _attainment(r), r.late, r.dropped, r.rejected, r.failed, r.p50_ms, r.p99_ms)
        return (r.name, *((r.version,) if versions else ()), *outcome, r.core_seconds, r.usd or None, r.accuracy)

    return _by_run(title, columns, ((label, map(cells, rows)) for label, rows in runs))


def nodes(runs: Sequence[tuple[str, RunRow]]) -> Table:
    """How long nodes of each kind were held and what they cost, grouped by run."""

    def cells(r: NodeRow) -> tuple[Cell, ...]:
        busy = None if r.busy is None else 100 * r.busy
        return (r.hardware, r.most, r.held_s / 3600, r.usd or None, busy, r.energy_wh)

    columns = ("hardware", "most at once", "held, node-hours", "USD", "busy %", "Wh")
    return _by_run("Nodes", columns, ((label, map(cells, row.nodes)) for label, row in runs))


def forms(runs: Sequence[tuple[str, RunRow]]) -> list[Table]:
    """What pipelines and shadows did, a table for each of the two that any run had, one row per run that had some."""
    pipelines = [(label, row.pipelines) for label, row in runs if row.pipelines is not None]
    shadows = [(label, row.shadows) for label, row in runs if row.shadows is not None]
    pipeline_columns = (
        "system",
        "pipelines",
        "parts",
        "lost",
        "to first answer s",
        "to whole s",
        "batches",
        "requests",
    )
    pipeline_rows = tuple(
        (label, r.pipelines, r.parts, r.lost, r.first_answer_s, r.whole_s, r.batches, r.requests)
        for label, r in pipelines
    )
    shadow_columns = ("system", "shadows", "lost", "batches", "requests", "rows in shadows")
    shadow_rows = tuple((label, r.attached, r.lost, r.batches, r.requests, r.rows) for label, r in shadows)
    found = Table("Pipelines", pipeline_columns, pipeline_rows), Table("Shadows", shadow_columns, shadow_rows)
    return [each for each in found if each.rows]


def nodes_vary(cluster: Iterable[Node]) -> bool:
    """Whether the nodes are of several kinds, or some come and go, so that the table of nodes says something."""
    found = list(cluster)
    return any(node.on_demand for node in found) or len({node.hardware for node in found}) > 1


def waits(runs: Iterable[tuple[str, Figures]], kind: str = "system") -> Table:
    """Queues, batches and cores, one row per run, or per application if `kind` says so."""
    return Table(
        "Queues and batches",
        (kind, "mean wait ms", "longest wait ms", "mean batch", "largest batch", "mean cores"),
        tuple(
            (
                label,
                run.wait_mean_ms,
                run.wait_max_ms,
                run.batch_mean,
                max(run.batch_sizes(), default=0),
                run.cores_mean,
            )
            for label, run in runs
        ),
    )


def stages(runs: Sequence[tuple[str, RunRow]]) -> Table:
    """Visits, waits, batches and losses of each stage, grouped by run."""

    def cells(r: StageRow) -> tuple[Cell, ...]:
        batches = (r.batches, r.mean_batch, r.max_batch)
        return (r.stage, r.visits, r.mean_wait_ms, r.max_wait_ms, *batches, r.dropped, r.rejected, r.failed)

    columns: tuple[str, ...] = (
        "stage",
        "visits",
        "mean wait ms",
        "longest wait ms",
        "batches",
        "mean batch",
        "largest batch",
    )
    columns += ("dropped", "rejected", "failed")
    return _by_run("Stage by stage", columns, ((label, map(cells, row.stages)) for label, row in runs))


def routes(runs: Sequence[tuple[str, RunRow]]) -> Table:
    """The routes that answered requests took through an application of several stages, with their share of all
    requests of the application, and how many were answered in time; grouped by run."""

    def cells(row: RunRow, r: RouteRow) -> tuple[Cell, ...]:
        share, in_time = 100 * r.answered / _requests(row, r), 100 * r.served / r.answered
        return (", ".join(r.stages) or OTHER_ROUTES, r.answered, share, in_time, r.slo_ms, r.mean_ms, r.p99_ms)

    columns: tuple[str, ...] = (
        "stages visited",
        "answered",
        "% of requests",
        "of the answered, in time %",
        "deadline ms",
    )
    columns += ("mean ms", "p99 ms")
    by_run = ((label, [cells(row, route) for route in row.routes]) for label, row in runs)
    return _by_run("Routes through the graph", columns, by_run)


def _requests(row: RunRow, route: RouteRow) -> int:
    """All requests of the application that has this route."""
    return next((each.requests for each in row.applications if route in each.routes), row.requests)


def estimate_errors(runs: Sequence[tuple[str, Sequence[EstimateError]]]) -> Table:
    """Estimated and actual durations of batches, grouped by run, on several kinds of hardware one row for each."""
    several = len({error.hardware for _, errors in runs for error in errors}) > 1

    def cells(e: EstimateError) -> tuple[Cell, ...]:
        place = (e.stage, e.variant, *((e.hardware,) if several else ()))
        return (*place, e.batches, e.estimated_ms, e.actual_ms, 100 * e.bias, 100 * e.mape)

    columns = ("stage", "variant", *(("hardware",) if several else ()))
    columns += ("batches", "estimated ms", "actual ms", "bias %", "mean error %")
    by_run = ((label, map(cells, errors)) for label, errors in runs)
    return _by_run("Estimated and actual time of a batch", columns, by_run)


def miss_reasons(reasons: Iterable[MissReason], *, several: bool) -> Table:
    """Why requests were missed; `several` applications have a column."""
    return Table(
        "",
        (
            *("requests", *(("application",) if several else ())),
            *("outcome", "why", "first request", "at s"),
        ),
        tuple(
            (r.count, *((r.application,) if several else ()), r.outcome, r.why, r.first_request, r.first_s)
            for r in reasons
        ),
    )


def rollouts(steps: Iterable[RolloutStep]) -> Table:
    """How versions replaced each other, and why."""
    return Table(
        "Rollouts",
        ("at s", "application", "version", "state", "% of requests", "why"),
        tuple((r.at_s, r.application, r.version, r.state, 100 * r.share, r.why) for r in steps),
    )


def worst_seconds(seconds: Iterable[RunSecond], count: int = 10) -> Table:
    """The seconds with the largest share of misses, the worst first; seconds without a miss are left out."""
    bad = sorted((s for s in seconds if s.violations), key=lambda s: (-s.violations, s.start_s))[:count]
    return Table(
        "Worst seconds",
        ("second", "arrivals", "violations %", "late", "dropped", "rejected", "failed", "cores", "longest ms"),
        tuple(
            (s.start_s, s.arrivals, 100 * s.violations, s.late, s.dropped, s.rejected, s.failed, s.cores, s.worst_ms)
            for s in bad
        ),
    )


# Live against simulated

ATTAINMENT_POINTS_MAX: Final = 1.0
"""Allowed difference between a live run and a simulation with its durations; two live runs differ more."""
P99_PERCENT_MAX: Final = 10.0


class Agreement(Struct, frozen=True):
    """One metric of a live run and of its simulation."""

    metric: str
    unit: str
    live: float | None
    simulated: float | None
    difference: float | None
    """Simulated minus live: in points for shares, else in per cent of the live value; None if one is missing."""
    difference_max: float | None
    """The largest allowed difference; None if the metric is for information only."""

    @property
    def agrees(self) -> bool | None:
        """Whether the difference is within the bound; None if there is no bound."""
        if self.difference_max is None:
            return None
        return self.difference is not None and abs(self.difference) <= self.difference_max


def agreement(live: RunRow, simulated: RunRow) -> list[Agreement]:
    """Compare a live run with its simulation, metric by metric; attainment and p99 have bounds."""
    return [
        Agreement(
            "attainment",
            "%",
            100 * live.attainment,
            100 * simulated.attainment,
            100 * (simulated.attainment - live.attainment),
            ATTAINMENT_POINTS_MAX,
        ),
        _relative("p99", "ms", live.p99_ms, simulated.p99_ms, P99_PERCENT_MAX),
        _relative("p50", "ms", live.p50_ms, simulated.p50_ms, None),
        _relative("mean", "ms", live.mean_ms, simulated.mean_ms, None),
        _relative("goodput", "rps", live.goodput_rps, simulated.goodput_rps, None),
        _relative("core-seconds", "core·s", live.core_seconds, simulated.core_seconds, None),
    ]


def agreement_table(rows: list[Agreement]) -> Table:
    """The agreement as a table."""
    return Table(
        "Live against simulated: difference in points of attainment, else in %",
        ("measure", "unit", "live", "simulated", "difference", "at most", "agrees"),
        tuple((r.metric, r.unit, r.live, r.simulated, r.difference, r.difference_max, r.agrees) for r in rows),
    )


def _relative(
    metric: str, unit: str, live: float | None, simulated: float | None, difference_max: float | None
) -> Agreement:
    if live is None or simulated is None:
        difference = 0.0 if live is simulated else None
    elif live == 0:
        difference = 0.0 if simulated == 0 else None
    else:
        difference = 100 * (simulated / live - 1)
    return Agreement(metric, unit, live, simulated, difference, difference_max)
