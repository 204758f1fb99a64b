"""Figures drawn: SVG for pages, PNG for everything else. matplotlib is loaded when the first figure is drawn.

Promises the same bytes for the same figure and version of matplotlib, and no global state changed. In an SVG everything
that is not a series has the colour of the text around it, so that it reads on light and dark pages alike.
"""

import io
from typing import TYPE_CHECKING, Any, Final

from sloop.report.figures import Figure, Panel, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

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
"""Told apart by most eyes, on white and on near-black; in the order series appear."""

INK: Final = "#1b1f23"
FAINT: Final = "#8a8f99"
WIDTH_IN: Final = 8.2
PANEL_IN: Final = 1.55
MARGIN_IN: Final = 0.95
LEGEND_COLUMNS: Final = 6
LEGEND_CHARS: Final = 110
"""As much text as is wide as the axes."""
MARK_CHARS: Final = 8
"""What a line's sample and the gap behind it take."""
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
    """The figure as an `<svg>` element to stand in a page, labelled with its `alt` for those who cannot see it."""
    text = _drawn(figure, "svg").decode()
    text = text[text.index("<svg") :]
    for ink in (INK, FAINT):
        text = text.replace(ink, "currentColor")
    label = figure.alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head, _, rest = text.partition(">")
    return f'{head} role="img" aria-label="{label}">{rest}'


def png(figure: Figure, *, dpi: int = 144) -> bytes:
    """The figure as a PNG on white."""
    return _drawn(figure, "png", dpi=dpi)


def _drawn(figure: Figure, format: str, *, dpi: int = 72) -> bytes:  # savefig's own word
    import matplotlib as mpl  # noqa: PLC0415  # a second to import: only for those who draw
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
    """A name has one colour in all panels; areas are background and grey."""
    drawn = [series for panel in figure.panels for series in panel.series]
    names = dict.fromkeys(series.name for series in drawn if series.kind != "area")
    grey = {series.name: PALETTE[-1] for series in drawn if series.kind == "area"}
    return grey | {name: PALETTE[place % (len(PALETTE) - 1)] for place, name in enumerate(names)}


def _legend(axes: Any, figure: Figure, colours: dict[str, str]) -> int:  # noqa: ANN401  # an array of axes
    """One legend for the whole figure, above it, if there is anything to tell apart; returns its lines."""
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
        axis.set_ylim(bottom=0)


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
        axis.bar_label(drawn, labels=[_short(value) for value in series.y], padding=2, fontsize=8)
        axis.set_ylim(top=1.18 * max(tops, default=1.0) or 1.0)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
