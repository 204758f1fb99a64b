"""Plots: figures as data (panels of series over one axis), and their drawing as SVG or PNG.

Figures are plain data, so that tests can check a plot without drawing it. Long runs are thinned to the resolution of a
page by the largest value of each interval, so that no bad second disappears. matplotlib is imported when the first
figure is drawn. The same figure gives the same bytes with the same version of matplotlib; no global state is changed.
In an SVG everything except the series has the text colour of the page, so that it suits light and dark pages.
"""

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.runlog.summary import RunSecond, RunSummary
from sloop.text import number
from sloop.workload import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

POINTS_MAX: Final = 900
"""About the width of a page in pixels; more points cannot be seen and only enlarge the file."""
ROUTES_MAX: Final = 6
"""More curves cannot be distinguished."""

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


def timeline(runs: Mapping[str, RunSummary], *, name: str = "timeline", title: str = "Over time") -> Figure:
    """Arrivals, cores, violations and longest latency, second by second, for one run or several of the same world."""
    seconds = {label: _busy(summary.seconds()) for label, summary in runs.items()}
    arrivals = {"arrivals": next(iter(seconds.values()), [])}
    panels = (
        Panel(y_label="requests/s", series=_curves(arrivals, lambda second: second.arrivals, "area")),
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


def latency_cdf(
    runs: Mapping[str, RunSummary],
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


def route_cdf(label: str, summary: RunSummary, *, name: str = "routes") -> Figure:
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
    curves = []
    for label, rows in seconds.items():
        x, y = thin([float(row.start_s) for row in rows], [float(value(row)) for row in rows])
        curves.append(Series(label, tuple(x), tuple(y), kind))
    return tuple(curves)


def arrivals_figure(trace: Trace) -> Figure:
    """Requests per second of a trace; a long one is thinned by the largest second of each interval."""
    counts = trace.counts_per_s()
    x, y = thin([float(second) for second in range(len(counts))], [float(count) for count in counts])
    panel = Panel(y_label="requests/s", series=(Series("arrivals", tuple(x), tuple(y), "steps"),))
    alt = f"Requests per second of {trace.name}, at most {max(counts, default=0)}."
    return Figure(name="arrivals", title=str(trace), x_label="time, s", panels=(panel,), alt=alt)


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png or .svg. InputError for another suffix, MachineError if it cannot be written."""
    if path.suffix == ".png":
        content = png(figure)
    elif path.suffix == ".svg":
        content = svg(figure).encode()
    else:
        raise InputError(f"{path.name!r} is neither .png nor .svg", help="end its name with one of these")
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
    for mark in panel.marks:
        line = axis.axhline if mark.axis == "y" else axis.axvline
        line(mark.at, color=FAINT, linewidth=1.2, linestyle="--", label=mark.name)
    if panel.ticks:
        axis.set_xticks(range(len(panel.ticks)), panel.ticks)
        axis.grid(visible=False, axis="x")
    axis.set_ylabel(panel.y_label)
    if panel.log:
        axis.set_yscale("log")
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
    tops = series.high or series.y
    spread = None
    if series.low:
        below = [max(0.0, y - low) for y, low in zip(series.y, series.low, strict=True)]
        above = [max(0.0, high - y) for y, high in zip(series.y, series.high, strict=True)]
        spread = [below, above]
    lines = {"ecolor": FAINT, "elinewidth": 1.2, "capsize": 2}
    drawn = axis.bar(places, series.y, width=width, color=colour, label=series.name, yerr=spread, error_kw=lines)
    if labelled:
        axis.bar_label(drawn, labels=[number(float(value)) for value in series.y], padding=2, fontsize=8)
        axis.set_ylim(top=1.18 * max(tops, default=1.0) or 1.0)
