"""Plots: figures as data, panels of series over one axis. `sloop.report.svg` draws them.

Figures are plain data, so that tests can check a plot without drawing it. Long runs are thinned to the resolution of a
page by the largest value of each interval, so that no bad second disappears.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal

from msgspec import Struct

from sloop.runlog.summary import Figures, RunSecond, RunSummary
from sloop.units import NS_PER_S, at_least
from sloop.workload import Trace

POINTS_MAX: Final = 900
"""About the width of a page in pixels; more points cannot be seen and only enlarge the file."""
ROUTES_MAX: Final = 6
APPLICATIONS_MAX: Final = 8
"""More curves cannot be distinguished."""

TICKS_MAX: Final = 40
"""More numbers of bars overlap."""

OTHER_ROUTES: Final = "others"
"""The label of all rare routes together."""
QUANTILES: Final = tuple(step / 200 for step in range(1, 201))

Kind = Literal["line", "steps", "area", "bars", "points"]


class Series(Struct, frozen=True):
    """One named row of values: `y[i]` at `x[i]`; for bars, `x` are positions in the panel's `ticks`."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Kind = "line"
    low: tuple[float, ...] = ()
    """Lower ends of error bars, if any."""
    high: tuple[float, ...] = ()


class Mark(Struct, frozen=True):
    """A line across the panel at a value that matters, such as the SLO: vertical on the `x` axis, horizontal on `y`."""

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
    """Vertically stacked panels with a shared x axis. `alt` is a one-sentence description for screen readers."""

    name: str
    title: str
    x_label: str
    panels: tuple[Panel, ...]
    alt: str


# Figures of runs and traces


def timeline(
    runs: Mapping[str, Figures], *, name: str = "timeline", title: str = "Over time", same_arrivals: bool = True
) -> Figure:
    """Arrivals, cores, violations and longest latency, second by second. With `same_arrivals` all `runs` are of the
    same world; without, they are the applications, or the versions, of one run."""
    seconds = {label: _busy(figures.seconds()) for label, figures in runs.items()}
    arrivals = {"arrivals": next(iter(seconds.values()), [])} if same_arrivals else seconds
    panels = (
        Panel(
            y_label="requests/s",
            series=_curves(arrivals, lambda second: second.arrivals, "area" if same_arrivals else "steps"),
        ),
        Panel(y_label="cores", series=_curves(seconds, lambda second: second.cores, "steps")),
        Panel(y_label="violations, %", series=_curves(seconds, lambda second: 100 * second.violations, "line")),
        Panel(y_label="longest latency, ms", series=_curves(seconds, lambda second: second.worst_ms, "line")),
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


def most_requests(applications: Mapping[str, Figures]) -> dict[str, Figures]:
    """As many applications as can be distinguished in one figure: those with the most requests, in the given order."""
    chosen = sorted(applications, key=lambda name: -applications[name].requests)[:APPLICATIONS_MAX]
    return {name: figures for name, figures in applications.items() if name in chosen}


def hardware_timeline(summary: RunSummary, *, name: str = "hardware") -> Figure:
    """The mix of hardware over time: by kind, the cores that replicas have and the nodes that are held; and what all
    nodes cost, if they have a price."""
    nodes = summary.deployment.nodes
    cores = {kind: rows for kind, rows in summary.hardware_cores().items() if any(value for _, value in rows)}
    start_ns = summary.deployment.start_ns or 0
    changes = [((at_ns - start_ns) / NS_PER_S, hardware, held) for at_ns, hardware, held in nodes.steps]
    panels = [
        Panel(y_label="cores of replicas", series=tuple(_thinned(kind, rows, "steps") for kind, rows in cores.items())),
        Panel(y_label="nodes held", series=_held(changes, summary.duration_s)),
    ]
    prices = {record.node.hardware: record.node.usd_per_h for record in nodes.records.values()}
    if any(prices.values()):
        panels.append(Panel(y_label="USD/h of nodes", series=(_rent(changes, prices, summary.duration_s),)))
    most = ", ".join(f"{row.most} of {row.hardware}" for row in nodes.rows()) or "none"
    return Figure(
        name=name,
        title="Hardware over time",
        x_label="time, s",
        panels=tuple(panels),
        alt=f"Cores of replicas and nodes held over time, by kind of hardware; at most {most} at once.",
    )


def _held(changes: Sequence[tuple[float, str, int]], end_s: float) -> tuple[Series, ...]:
    """One curve per kind of hardware of which a node was held: the nodes held."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for at_s, hardware, held in changes:
        counts.setdefault(hardware, []).append((at_s, held))
    return tuple(
        _stepped(hardware, points, end_s) for hardware, points in counts.items() if any(held for _, held in points)
    )


def _rent(changes: Sequence[tuple[float, str, int]], prices: Mapping[str, float], end_s: float) -> Series:
    """What all nodes together cost per hour."""
    held: dict[str, int] = {}
    points = []
    for at_s, hardware, count in changes:
        held[hardware] = count
        points.append((at_s, sum(number * prices[kind] for kind, number in held.items())))
    return _stepped("all nodes", points, end_s)


def _stepped(name: str, points: Sequence[tuple[float, float]], end_s: float) -> Series:
    """A curve that keeps the last value of each instant until the next, and the last one until the end."""
    last = dict(points)
    last.setdefault(end_s, points[-1][1])
    return Series(name, tuple(last), tuple(last.values()), "steps")


def latency_cdf(
    runs: Mapping[str, Figures],
    *,
    slo_ms: float | None = None,
    others_ms: Iterable[float] = (),
    name: str = "latency",
) -> Figure:
    """The cumulative distribution of end-to-end latency over answered requests. `others_ms` are deadlines of paths."""
    answered = {label: summary for label, summary in runs.items() if len(summary.latencies_ns)}
    curves = {label: summary.latency_ms(QUANTILES) for label, summary in answered.items()}
    p99 = "; ".join(f"{label} p99 {summary.latency_ms([0.99])[0]:.0f} ms" for label, summary in answered.items())
    marks = [] if slo_ms is None else [Mark(f"SLO {slo_ms:g} ms", "x", slo_ms)]
    marks += [Mark(f"path {other_ms:g} ms", "x", other_ms) for other_ms in others_ms]
    alt = f"Cumulative distribution of end-to-end latency. {p99}"
    return _cdf(name, "End-to-end latency", "latency, ms", curves, marks, alt)


def deadline_cdf(applications: Mapping[str, Figures], *, name: str = "latency") -> Figure:
    """The cumulative distribution of latency of several applications, each as a share of its deadline."""
    answered = {label: figures for label, figures in applications.items() if len(figures.latencies_ns)}
    curves = {
        f"{label} ({figures.slo_ms:g} ms)": [
            100 * latency_ms / figures.slo_ms for latency_ms in figures.latency_ms(QUANTILES)
        ]
        for label, figures in answered.items()
    }
    p99 = "; ".join(
        f"{label} p99 {figures.latency_ms([0.99])[0]:.0f} of {figures.slo_ms:g} ms"
        for label, figures in answered.items()
    )
    title, x_label = "End-to-end latency of each application", "latency, % of the deadline"
    alt = f"Cumulative distribution of end-to-end latency, relative to each application's deadline. {p99}"
    return _cdf(name, title, x_label, curves, [Mark("deadline", "x", 100.0)], alt)


def route_cdf(label: str, summary: Figures, *, name: str = "routes") -> Figure:
    """The latency distribution of each of the most frequent routes through a graph, with their deadlines."""
    taken = dict(list(summary.route_latencies_ms(QUANTILES).items())[:ROUTES_MAX])
    curves = {", ".join(stages) or OTHER_ROUTES: at_ms for stages, at_ms in taken.items()}
    deadlines_ms = sorted({row.slo_ms for row in summary.routes() if row.stages in taken})
    marks = [Mark(f"deadline {slo_ms:g} ms", "x", slo_ms) for slo_ms in deadlines_ms]
    alt = f"Cumulative distributions of end-to-end latency, one for each of {len(curves)} routes through the graph."
    return _cdf(name, f"Latency of each route through the graph ({label})", "latency, ms", curves, marks, alt)


def _cdf(
    name: str, title: str, x_label: str, curves: Mapping[str, Sequence[float]], marks: Sequence[Mark], alt: str
) -> Figure:
    """Cumulative distributions, each by its values at `QUANTILES`."""
    shares = tuple(100 * share for share in QUANTILES)
    series = tuple(Series(label, tuple(values), shares) for label, values in curves.items())
    panel = Panel(y_label="answered requests, %", series=series, marks=tuple(marks))
    return Figure(name=name, title=title, x_label=x_label, panels=(panel,), alt=alt)


def thin(x: Sequence[float], y: Sequence[float], points_max: int = POINTS_MAX) -> tuple[list[float], list[float]]:
    """At most `points_max` points: the largest value of each interval, at the interval's start."""
    stretch = -(-len(x) // points_max) if x else 1
    starts = range(0, len(x), stretch)
    return [x[start] for start in starts], [max(y[start : start + stretch]) for start in starts]


def _busy(rows: list[RunSecond]) -> list[RunSecond]:
    """The seconds up to the last arrival; later ones have no traffic."""
    last = max((place for place, row in enumerate(rows) if row.arrivals), default=len(rows) - 1)
    return rows[: last + 1]


def _curves(
    seconds: Mapping[str, list[RunSecond]], value: Callable[[RunSecond], float], kind: Kind
) -> tuple[Series, ...]:
    """One curve per run, thinned."""
    return tuple(_thinned(label, [(row.start_s, value(row)) for row in rows], kind) for label, rows in seconds.items())


def _thinned(label: str, points: Sequence[tuple[float, float]], kind: Kind) -> Series:
    x, y = thin([float(x) for x, _ in points], [float(y) for _, y in points])
    return Series(label, tuple(x), tuple(y), kind)


def layers_figure(
    model: str, compute_ms: Sequence[float], param_bytes: Sequence[float], ranked: Sequence[int]
) -> Figure:
    """How compute and weights are spread over the blocks of a model: the share of each block, and the compute that a
    share of the weights can hold, if blocks are taken in the model's order, or in that of `ranked`."""
    compute = _percents(compute_ms)
    weights = _percents(param_bytes)
    places = tuple(float(place) for place in range(len(compute)))
    step = -(-len(compute) // TICKS_MAX)
    ticks = tuple(str(place + 1) if place % step == 0 else "" for place in range(len(compute)))
    each = Panel(
        y_label="% of the model, by block",
        series=(Series("compute", places, compute, "bars"), Series("weights", places, weights, "bars")),
        ticks=ticks,
    )
    held = Panel(
        y_label="% of the compute",
        series=(
            _held_compute("most compute per byte first", compute, weights, ranked),
            _held_compute("in the model's order", compute, weights, range(len(compute))),
            Series("if both were spread alike", (0.0, 100.0), (0.0, 100.0)),
        ),
    )
    half = next(x for x, y in zip(held.series[0].x, held.series[0].y, strict=True) if at_least(y, 50))
    return Figure(
        name="layers",
        title=f"Compute and weights of {model}",
        x_label="% of the weights",
        panels=(each, held),
        alt=f"Compute and weights of {len(compute)} blocks of {model}; {half:.3g} % of the weights hold half of the "
        "compute.",
    )


def sharing_figure(model: str, measured: Sequence[tuple[float, float]], laws: Mapping[str, Sequence[float]]) -> Figure:
    """How many times as long as alone a batch takes while several workers run batches, and the time for each of these
    batches; `laws` has what each law says of 1, 2, … workers."""
    counts = tuple(count for count, _ in measured)
    slowdowns = (
        Series("measured", counts, tuple(factor for _, factor in measured), "points"),
        *(Series(name, tuple(map(float, range(1, len(y) + 1))), tuple(y)) for name, y in laws.items()),
    )
    per_batch = tuple(
        Series(one.name, one.x, tuple(y / x for x, y in zip(one.x, one.y, strict=True)), one.kind) for one in slowdowns
    )
    _, best = min(zip(per_batch[0].y, counts, strict=True))
    return Figure(
        name="sharing",
        title=f"Workers of {model} that run together",
        x_label="workers that run batches",
        panels=(
            Panel(y_label="slowdown", series=slowdowns),
            Panel(y_label="slowdown / workers", series=per_batch),
        ),
        alt=f"Slowdown of a batch of {model} by the number of workers; a batch costs least with {best:g}.",
    )


def _percents(values: Sequence[float]) -> tuple[float, ...]:
    total = sum(values) or 1.0
    return tuple(100 * value / total for value in values)


def _held_compute(name: str, compute: Sequence[float], weights: Sequence[float], order: Sequence[int]) -> Series:
    x = accumulate((weights[place] for place in order), initial=0.0)
    y = accumulate((compute[place] for place in order), initial=0.0)
    return Series(name, tuple(x), tuple(y))


def arrivals_figure(trace: Trace) -> Figure:
    """Requests per second of a trace; a long one is thinned by the largest second of each interval."""
    counts = trace.counts_per_s()
    x, y = thin([float(second) for second in range(len(counts))], [float(count) for count in counts])
    panel = Panel(y_label="requests/s", series=(Series("arrivals", tuple(x), tuple(y), "steps"),))
    alt = f"Requests per second of {trace.name}, at most {max(counts, default=0)}."
    return Figure(name="arrivals", title=str(trace), x_label="time, s", panels=(panel,), alt=alt)


def frontier_figure(
    choices: Sequence[tuple[str, float, float]], frontier: Sequence[tuple[float, float]], wanted: float
) -> Figure:
    """Price against deadlines: `choices` are a system, its price in USD per hour, and the part of requests that it
    serves in time; `frontier` has price and part of those that no other beats, the cheapest first."""
    last = max((price for _, price, _ in choices), default=0.0)
    ends = [*frontier, (last, frontier[-1][1])] if frontier else []
    line = Series("frontier", tuple(price for price, _ in ends), tuple(100 * part for _, part in ends), "steps")
    points = []
    for system in dict.fromkeys(system for system, _, _ in choices):
        own = [(price, 100 * part) for name, price, part in choices if name == system]
        points.append(Series(system, tuple(price for price, _ in own), tuple(part for _, part in own), "points"))
    best = next((price for price, part in frontier if part >= wanted), None)
    enough = f"from {best:.4g} USD per hour on" if best is not None else "at no price"
    return Figure(
        name="frontier",
        title="Price against deadlines",
        x_label="USD per hour",
        panels=(
            Panel(
                y_label="in time, %",
                series=(line, *points),
                marks=(Mark(f"wanted: {100 * wanted:.6g} %", "y", 100 * wanted),),
            ),
        ),
        alt=f"The part of requests served in time against the price of {len(choices)} choices; "
        f"{100 * wanted:.6g} % {enough}.",
    )
