"""What a plot shows, as values: panels of series over one axis. Made by folds, drawn by `plots`, testable without it.

Long runs are thinned to what a page can show, by the largest value of each stretch, so that no bad second is lost.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from sloop.report.metrics import Metrics
from sloop.report.rows import RunRow, Second

POINTS_MAX: Final = 900
"""As many as a page's width can tell apart."""

WAYS_MAX: Final = 6
"""Curves that can be told apart."""

QUANTILES: Final = tuple(step / 200 for step in range(1, 201))

Kind = Literal["line", "steps", "area", "bars", "points"]


class Series(Struct, frozen=True):
    """One named row of values: `y[i]` at `x[i]`; for bars, `x` are positions in the panel's `ticks`."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Kind = "line"
    low: tuple[float, ...] = ()
    """Lower ends of error bars, where there are any."""
    high: tuple[float, ...] = ()


class Mark(Struct, frozen=True):
    """A line across the panel at a value that matters, such as the SLO: on the `x` axis it stands, on `y` it lies."""

    name: str
    axis: Literal["x", "y"]
    at: float


class Panel(Struct, frozen=True, kw_only=True):
    """One pair of axes."""

    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[str, ...] = ()
    """Names along the x axis, for bars."""
    marks: tuple[Mark, ...] = ()
    log: bool = False


class Figure(Struct, frozen=True, kw_only=True):
    """Panels under each other that share their x axis. `alt` says in a sentence what is to be seen."""

    name: str
    title: str
    x_label: str
    panels: tuple[Panel, ...]
    alt: str


def timeline(runs: Mapping[str, Metrics], *, name: str = "timeline", title: str = "Over time") -> Figure:
    """Arrivals, cores, violations and longest latency, second by second, for one run or several of the same world."""
    seconds = {label: _busy(metrics.seconds()) for label, metrics in runs.items()}
    arrivals = next(iter(seconds.values()), [])
    panels = (
        Panel(y_label="requests/s", series=(_over(arrivals, "arrivals", lambda second: second.arrivals, "area"),)),
        Panel(y_label="cores", series=_each(seconds, lambda second: second.cores, "steps")),
        Panel(y_label="violations, %", series=_each(seconds, lambda second: 100 * second.violations, "line")),
        Panel(y_label="longest latency, ms", series=_each(seconds, lambda second: second.worst_ms, "line")),
    )
    worst = max((row.violations for rows in seconds.values() for row in rows), default=0.0)
    return Figure(
        name=name,
        title=title,
        x_label="time, s",
        panels=panels,
        alt=f"Arrivals, allocated cores, violations and longest latency per second of {', '.join(runs)}; "
        f"the worst second missed {worst:.0%} of its requests.",
    )


def latency_cdf(
    runs: Mapping[str, Metrics], *, slo_ms: float | None = None, others_ms: Iterable[float] = (), name: str = "latency"
) -> Figure:
    """Which share of answered requests took at most how long. `others_ms` are deadlines of single paths."""
    answered = {label: metrics for label, metrics in runs.items() if metrics.latencies_ns}
    series = tuple(
        Series(label, tuple(metrics.latency_ms(QUANTILES)), tuple(100 * share for share in QUANTILES))
        for label, metrics in answered.items()
    )
    p99 = "; ".join(f"{label} p99 {metrics.latency_ms([0.99])[0]:.0f} ms" for label, metrics in answered.items())
    marks: tuple[Mark, ...] = () if slo_ms is None else (Mark(f"SLO {slo_ms:g} ms", "x", slo_ms),)
    marks += tuple(Mark(f"path {other_ms:g} ms", "x", other_ms) for other_ms in others_ms)
    return Figure(
        name=name,
        title="End-to-end latency",
        x_label="latency, ms",
        panels=(Panel(y_label="answered requests, %", series=series, marks=marks),),
        alt=f"Cumulative distribution of end-to-end latency. {p99}",
    )


def ways_cdf(label: str, metrics: Metrics, *, name: str = "ways") -> Figure:
    """The same for each of the most travelled ways through a graph, beside the deadlines they have."""
    taken = dict(list(metrics.route_latencies_ms(QUANTILES).items())[:WAYS_MAX])
    series = tuple(
        Series(", ".join(stages) or "rarer ones", tuple(at_ms), tuple(100 * share for share in QUANTILES))
        for stages, at_ms in taken.items()
    )
    deadlines_ms = sorted({row.slo_ms for row in metrics.routes() if row.stages in taken})
    marks = tuple(Mark(f"deadline {slo_ms:g} ms", "x", slo_ms) for slo_ms in deadlines_ms)
    return Figure(
        name=name,
        title=f"Latency of each way through the graph ({label})",
        x_label="latency, ms",
        panels=(Panel(y_label="answered requests, %", series=series, marks=marks),),
        alt=f"Cumulative distributions of end-to-end latency, one for each of {len(series)} ways through the graph.",
    )


def comparison(rows: Sequence[RunRow], *, name: str = "comparison") -> Figure:
    """Violations beside core-seconds, one pair of bars per run."""
    labels = tuple(row.system for row in rows)
    places = tuple(float(place) for place in range(len(rows)))

    def bars(y_label: str, values: Iterable[float]) -> Panel:
        return Panel(y_label=y_label, ticks=labels, series=(Series(y_label, places, tuple(values), "bars"),))

    violations = [100 * row.violations for row in rows]
    said = "; ".join(f"{label} {value:.2f} %" for label, value in zip(labels, violations, strict=True))
    return Figure(
        name=name,
        title="Violations and cost",
        x_label="",
        panels=(bars("violations, %", violations), bars("core-seconds", (row.core_seconds for row in rows))),
        alt=f"Bars of violations ({said}) and core-seconds.",
    )


def thin(x: Sequence[float], y: Sequence[float], points_max: int = POINTS_MAX) -> tuple[list[float], list[float]]:
    """At most `points_max` points: the largest value of each stretch, at the stretch's beginning."""
    stretch = -(-len(x) // points_max) if x else 1
    starts = range(0, len(x), stretch)
    return [x[start] for start in starts], [max(y[start : start + stretch]) for start in starts]


def _busy(rows: list[Second]) -> list[Second]:
    """Up to the last second with an arrival; what follows is only waiting for answers."""
    last = max((place for place, row in enumerate(rows) if row.arrivals), default=len(rows) - 1)
    return rows[: last + 1]


def _each(seconds: Mapping[str, list[Second]], value: Callable[[Second], float], kind: Kind) -> tuple[Series, ...]:
    return tuple(_over(rows, label, value, kind) for label, rows in seconds.items())


def _over(rows: Sequence[Second], label: str, value: Callable[[Second], float], kind: Kind) -> Series:
    x, y = thin([float(row.start_s) for row in rows], [float(value(row)) for row in rows])
    return Series(label, tuple(x), tuple(y), kind)
