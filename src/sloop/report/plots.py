"""Plots: figures as data (panels of series over one axis), and their drawing as SVG or PNG.

Figures are plain data, so that tests can check a plot without drawing it. Long runs are thinned to the resolution of a
page by the largest value of each interval, so that no bad second disappears. matplotlib is imported when the first
figure is drawn. The same figure gives the same bytes with the same version of matplotlib; no global state is changed.
In an SVG everything except the series has the text colour of the page, so that it suits light and dark pages.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.runlog.summary import Figures, RunSecond, RunSummary
from sloop.text import number
from sloop.units import NS_PER_S
from sloop.workload import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from sloop.innet.mapper import Fabric, LayerPlacement

POINTS_MAX: Final = 900
"""About the width of a page in pixels; more points cannot be seen and only enlarge the file."""
ROUTES_MAX: Final = 6
APPLICATIONS_MAX: Final = 8
"""More curves cannot be distinguished."""

TICKS_MAX: Final = 40
"""More numbers of bars overlap."""

LEAVES_MAX: Final = 24
"""More switches cannot be told apart on a page; those without a layer are left out."""

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
    series = tuple(
        Series(label, tuple(summary.latency_ms(QUANTILES)), tuple(100 * share for share in QUANTILES))
        for label, summary in answered.items()
    )
    p99 = "; ".join(f"{label} p99 {summary.latency_ms([0.99])[0]:.0f} ms" for label, summary in answered.items())
    marks: tuple[Mark, ...] = () if slo_ms is None else (Mark(f"SLO {slo_ms:g} ms", "x", slo_ms),)
    marks += tuple(Mark(f"path {other_ms:g} ms", "x", other_ms) for other_ms in others_ms)
    return Figure(
        name=name,
        title="End-to-end latency",
        x_label="latency, ms",
        panels=(Panel(y_label="answered requests, %", series=series, marks=marks),),
        alt=f"Cumulative distribution of end-to-end latency. {p99}",
    )


def deadline_cdf(applications: Mapping[str, Figures], *, name: str = "latency") -> Figure:
    """The cumulative distribution of latency of several applications, each as a share of its deadline."""
    answered = {label: figures for label, figures in applications.items() if len(figures.latencies_ns)}
    series = tuple(
        Series(
            f"{label} ({figures.slo_ms:g} ms)",
            tuple(100 * latency_ms / figures.slo_ms for latency_ms in figures.latency_ms(QUANTILES)),
            tuple(100 * share for share in QUANTILES),
        )
        for label, figures in answered.items()
    )
    p99 = "; ".join(
        f"{label} p99 {figures.latency_ms([0.99])[0]:.0f} of {figures.slo_ms:g} ms"
        for label, figures in answered.items()
    )
    panel = Panel(y_label="answered requests, %", series=series, marks=(Mark("deadline", "x", 100.0),))
    return Figure(
        name=name,
        title="End-to-end latency of each application",
        x_label="latency, % of the deadline",
        panels=(panel,),
        alt=f"Cumulative distribution of end-to-end latency, relative to each application's deadline. {p99}",
    )


def route_cdf(label: str, summary: Figures, *, name: str = "routes") -> Figure:
    """The latency distribution of each of the most frequent routes through a graph, with their deadlines."""
    taken = dict(list(summary.route_latencies_ms(QUANTILES).items())[:ROUTES_MAX])
    series = tuple(
        Series(", ".join(stages) or OTHER_ROUTES, tuple(at_ms), tuple(100 * share for share in QUANTILES))
        for stages, at_ms in taken.items()
    )
    deadlines_ms = sorted({row.slo_ms for row in summary.routes() if row.stages in taken})
    marks = tuple(Mark(f"deadline {slo_ms:g} ms", "x", slo_ms) for slo_ms in deadlines_ms)
    return Figure(
        name=name,
        title=f"Latency of each route through the graph ({label})",
        x_label="latency, ms",
        panels=(Panel(y_label="answered requests, %", series=series, marks=marks),),
        alt=f"Cumulative distributions of end-to-end latency, one for each of {len(series)} routes through the graph.",
    )


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
    half = next(x for x, y in zip(held.series[0].x, held.series[0].y, strict=True) if y >= 50 - 1e-9)
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


def check_figure_file(path: Path) -> None:
    """InputError for a file that `write_figure` does not write: one that ends neither in .png nor in .svg.
    MachineError if its folder does not exist."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"{path.name!r} is neither .png nor .svg", help="end its name with one of these")
    if not path.parent.is_dir():
        what = f"{path} cannot be written: {path.parent} is no folder"
        raise MachineError(what, help="name a file in a folder that may be written")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png or .svg. InputError for another suffix, MachineError if it cannot be written."""
    check_figure_file(path)
    content = png(figure) if path.suffix == ".png" else svg(figure).encode()
    try:
        path.write_bytes(content)
    except OSError as error:
        help_text = "name a file in a folder that may be written"
        raise MachineError(f"{path} cannot be written: {error.strerror}", help=help_text) from error


# Drawing


PALETTE: Final = (
    "#2f7ed8",
    "#e0702f",
    "#27a083",
    "#c2549d",
    "#b8931a",
    "#7a66d6",
    "#5f9e2f",
    "#8a8f98",
    "#a8323a",
    "#17456e",
)
"""Colours in the order of the series, distinguishable by most people on white and on near-black."""

INK: Final = "#1b1f23"
FAINT: Final = "#8a8f99"
WIDTH_IN: Final = 8.2
TICK_CHARS: Final = 100
"""How many characters of labels fit along an axis."""
PANEL_IN: Final = 1.55
MARGIN_IN: Final = 0.95
LEGEND_COLUMNS: Final = 6
LEGEND_CHARS: Final = 110
"""Characters of legend text that fit the width of the axes."""
MARK_CHARS: Final = 8
"""Width of a legend entry's line sample and gaps, in characters."""
LEGEND_LINE_PT: Final = 14

_STYLE: Final[Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "sloop",
}


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page, with `alt` as its label."""
    text = _render(figure, "svg").decode()
    text = text[text.index("<svg") :]
    for ink in (INK, FAINT):
        text = text.replace(ink, "currentColor")
    label = figure.alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head, _, rest = text.partition(">")
    return f'{head} role="img" aria-label="{label}">{rest}'


def png(figure: Figure, *, dpi: int = 144) -> bytes:
    """The figure as a PNG on white."""
    return _render(figure, "png", dpi=dpi)


def _render(figure: Figure, format: str, *, dpi: int = 72) -> bytes:  # the parameter's name in savefig
    import matplotlib as mpl  # noqa: PLC0415  # the import takes a second
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        height_in = MARGIN_IN + PANEL_IN * len(figure.panels) * (1.6 if len(figure.panels) == 1 else 1.0)
        canvas = Canvas(figsize=(WIDTH_IN, height_in), layout="constrained")
        _draw(canvas, figure)
        out = io.BytesIO()
        plain = {"Date": None} if format == "svg" else {"Software": None}
        canvas.savefig(out, format=format, dpi=dpi, transparent=format == "svg", metadata=plain)
        return out.getvalue()


def _draw(canvas: "Canvas", figure: Figure) -> None:
    shared = not any(panel.ticks for panel in figure.panels)
    axes = canvas.subplots(len(figure.panels), 1, sharex=shared, squeeze=False)[:, 0]
    colours = _colours(figure)
    for axis, panel in zip(axes, figure.panels, strict=True):
        _draw_panel(axis, panel, colours)
    axes[-1].set_xlabel(figure.x_label)
    canvas.align_ylabels(axes)
    axes[0].set_title(figure.title, pad=8 + LEGEND_LINE_PT * _legend(axes, figure, colours))


def _colours(figure: Figure) -> dict[str, str]:
    """One colour per name in all panels; grey for areas, which are background."""
    drawn = [series for panel in figure.panels for series in panel.series]
    names = dict.fromkeys(series.name for series in drawn if series.kind != "area")
    grey = {series.name: PALETTE[-1] for series in drawn if series.kind == "area"}
    return grey | {name: PALETTE[place % (len(PALETTE) - 1)] for place, name in enumerate(names)}


def _legend(axes: Any, figure: Figure, colours: dict[str, str]) -> int:  # noqa: ANN401  # an array of axes
    """One legend above the whole figure, unless there is only one series; returns the number of its lines."""
    marked = any(panel.marks for panel in figure.panels)
    if (len(colours) < 2 and not marked) or all(panel.ticks and len(panel.series) == 1 for panel in figure.panels):
        return 0
    known: dict[str, Any] = {}
    for axis in axes:
        for mark, name in zip(*axis.get_legend_handles_labels(), strict=True):
            known.setdefault(name, mark)
    columns = max(1, min(LEGEND_COLUMNS, LEGEND_CHARS // (MARK_CHARS + max(map(len, known)))))
    axes[0].legend(known.values(), known, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.1)
    return -(-len(known) // columns)


def _draw_panel(axis: "Axes", panel: Panel, colours: dict[str, str]) -> None:
    bars = [series for series in panel.series if series.kind == "bars"]
    for series in panel.series:
        if series.kind != "bars":
            _draw_series(axis, series, colours[series.name])
    for place, series in enumerate(bars):
        width = 0.72 / len(bars)
        shift = (place - (len(bars) - 1) / 2) * width
        _draw_bars(axis, series, colours[series.name], width=width, shift=shift, labelled=len(bars) == 1)
    if len(bars) == 1:  # there are labels above the bars
        top = 1.18 * max(bars[0].high or bars[0].y, default=1.0) or 1.0
        lowest = min((y for y in (*bars[0].y, *bars[0].low) if y > 0), default=0.0)
        axis.set_ylim((lowest / 2, top * (top / lowest) ** 0.1) if panel.log and lowest else (0, top))
    for mark in panel.marks:
        line = axis.axhline if mark.axis == "y" else axis.axvline
        line(mark.at, color=FAINT, linewidth=1.2, linestyle="--", label=mark.name)
    if panel.ticks:
        pairs = pairwise(max(map(len, tick.split("\n"))) for tick in panel.ticks)
        touch = max((sum(pair) / 2 + 1 for pair in pairs), default=0) > TICK_CHARS / len(panel.ticks)
        slanted: dict[str, Any] = {"rotation": 20, "ha": "right", "rotation_mode": "anchor"} if touch else {}
        axis.set_xticks(range(len(panel.ticks)), panel.ticks, **slanted)
        axis.grid(visible=False, axis="x")
    axis.set_ylabel(panel.y_label)
    if panel.series and all(float(value).is_integer() for series in panel.series for value in series.y):
        axis.locator_params(axis="y", integer=True)  # there is no half node
    if panel.log:
        axis.set_yscale("log")
        low, high = axis.get_ylim()
        digits = "2346" if high < 12 * low else ""  # the labels of further ones would touch
        axis.yaxis.set_major_formatter(lambda value, _: number(value))
        axis.yaxis.set_minor_formatter(lambda value, _: number(value) if f"{value:e}"[0] in digits else "")
    elif all(min(series.y, default=0.0) >= 0 for series in panel.series):
        flat = not any(any(series.y) for series in panel.series)
        axis.set_ylim(
            bottom=0, top=1 if flat else None
        )  # with an axis from 0 to 0.05, zero would look like a small value


def _draw_series(axis: "Axes", series: Series, colour: str) -> None:
    if series.kind == "area":
        axis.fill_between(series.x, series.y, step="post", color=colour, alpha=0.3, linewidth=0, label=series.name)
    elif series.kind == "points":
        axis.plot(series.x, series.y, "o", color=colour, markersize=4, alpha=0.85, label=series.name)
    else:
        style = "steps-post" if series.kind == "steps" else "default"
        axis.plot(series.x, series.y, color=colour, linewidth=1.3, drawstyle=style, label=series.name)
    if series.low:
        axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)


def _draw_bars(axis: "Axes", series: Series, colour: str, *, width: float, shift: float, labelled: bool) -> None:
    places = [x + shift for x in series.x]
    spread = None
    if series.low:
        below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
        above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
        spread = [below, above]
    lines = {"ecolor": FAINT, "elinewidth": 1.2, "capsize": 2}
    drawn = axis.bar(places, series.y, width=width, color=colour, label=series.name, yerr=spread, error_kw=lines)
    if labelled:
        axis.bar_label(drawn, labels=[number(float(value)) for value in series.y], padding=2, fontsize=8)


# A fabric of switches


def draw_fabric(fabric: "Fabric", placements: "Sequence[LayerPlacement]", title: str, path: Path) -> None:
    """Leaves below, upper switches above, a link from each leaf to each of them; a leaf shows its pipelines, those that
    compute filled. InputError for a suffix other than .png and .svg, MachineError if it cannot be written."""
    if path.suffix not in {".png", ".svg"}:
        raise InputError(f"{path.name!r} is neither .png nor .svg", help="end its name with one of these")
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # it takes 0.3 s
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    used = max(placement.leaves[-1] for placement in placements) + 1
    leaves = min(fabric.leaves, max(used, min(LEAVES_MAX, fabric.leaves)))
    canvas = Canvas(figsize=(max(7.0, 1.5 * leaves), 4.2), layout="constrained")
    FigureCanvasAgg(canvas)
    axis = canvas.add_subplot()
    axis.set_axis_off()
    axis.set_title(title, fontsize=10, fontweight="bold", loc="left", color=INK)
    _draw_switches(axis, fabric, placements, leaves)
    try:
        canvas.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise MachineError(f"cannot write {str(path)!r}: {error.strerror}", help="give another path") from error


def _draw_switches(axis: "Axes", fabric: "Fabric", placements: "Sequence[LayerPlacement]", leaves: int) -> None:
    uppers = fabric.pipelines
    at_upper = [(place + 0.5) * leaves / uppers for place in range(uppers)]
    for leaf in range(leaves):
        for upper in at_upper:
            axis.plot([leaf + 0.5, upper], [1.0, 2.0], color=FAINT, linewidth=0.4, zorder=0)
    for place, upper in enumerate(at_upper):
        _box(axis, upper - 0.3, 2.0, 0.6, 0.3, "0.5", f"spine {place + 1}")
    owners = {leaf: placement for placement in placements for leaf in placement.leaves}
    colours = {placement.name: PALETTE[at % (len(PALETTE) - 1)] for at, placement in enumerate(placements)}
    for leaf in range(leaves):
        placement = owners.get(leaf)
        title = "features" if leaf == 0 else placement.name if placement else ""
        axis.text(leaf + 0.5, -0.12, f"leaf {leaf}\n{title}", ha="center", va="top", fontsize=8, fontweight="bold")
        if placement is not None:
            size = number(round(placement.memory_bytes / len(placement.leaves)))
            axis.text(leaf + 0.5, -0.55, f"{size} B", ha="center", va="top", fontsize=7)
        for pipeline in range(fabric.pipelines):
            computes = placement is not None and (leaf, pipeline) in placement.units
            width = 0.9 / fabric.pipelines
            left = leaf + 0.05 + pipeline * width
            text = str(placement.neurons_per_unit) if placement is not None and computes else ""
            colour = colours[placement.name] if placement is not None and computes else "0.9" if leaf else "0.7"
            _box(axis, left, 0.0, width * 0.92, 1.0, colour, text)
    axis.set_xlim(-0.1, leaves + 0.1)
    axis.set_ylim(-0.85, 2.4)


def _box(axis: "Axes", left: float, bottom: float, width: float, height: float, colour: str, text: str) -> Any:  # noqa: ANN401
    axis.bar([left + width / 2], [height], width=width, bottom=bottom, color=colour, edgecolor=FAINT, linewidth=0.6)
    if text:
        axis.text(left + width / 2, bottom + height / 2, text, ha="center", va="center", fontsize=7)
