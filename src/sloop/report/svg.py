"""Drawings as SVG: figures (`sloop.report.plots`), and elements for drawings of another kind.

Written here because a plotting library is a fifth of the installation and most of the time of a report, for drawings of
four kinds. Text and lines have the text colour of the page, so that a drawing suits light and dark pages; a file of its
own brings both. What is drawn has a name to hover over. Equal figures give equal bytes.

Lengths are pixels of the viewport, which pages scale.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from sloop.errors import InputError, MachineError
from sloop.report.plots import Figure, Mark, Panel, Series
from sloop.text import number
from sloop.units import ROUNDING, WIDE_ROUNDING, round_down, round_up

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

WIDTH: Final = 720.0
PANEL: Final = 116.0
ONE_PANEL: Final = 200.0
GAP: Final = 20.0
RIGHT: Final = 24.0
MARGIN: Final = 6
SIZE: Final = 12.0
SMALL: Final = 11.0
LINE: Final = 16.0
"""From one line of text to the next."""
SWATCH: Final = 18.0
X_TICK: Final = 72
"""About the distance of labels on the horizontal axis."""
Y_TICK: Final = 26
TINY: Final = 1e-30
SLANT: Final = 20
"""Degrees by which labels are turned that would touch."""
FILE_STYLE: Final = (
    "<style>svg{color:#1b1f23;background:#fff;font-family:system-ui,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e8eb;background:#14171a}}</style>"
)
"""Of a drawing in a file; one on a page has the font and the colours of the page."""


# Files


def check_figure_file(path: Path) -> None:
    """InputError for a file that does not end in .svg. MachineError if its folder does not exist."""
    if path.suffix != ".svg":
        raise InputError(f"{path.name!r} is no .svg", help="end its name with .svg; browsers show and print such files")
    if not path.parent.is_dir():
        what = f"{path} cannot be written: {path.parent} is no folder"
        raise MachineError(what, help="name a file in a folder that may be written")


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .svg; raises what `write_drawing` does."""
    write_drawing(svg(figure), path)


def svg_file(drawing: str) -> str:
    """A drawing that stands alone, with a background, on light and dark screens."""
    head, _, rest = drawing.partition(">")
    return f"{head}>{FILE_STYLE}{rest}\n"


def write_drawing(drawing: str, path: Path) -> None:
    """Write a drawing (`svg_element`) as .svg. InputError for another suffix, MachineError if it cannot be written."""
    check_figure_file(path)
    try:
        path.write_text(svg_file(drawing), encoding="utf-8")
    except OSError as error:
        help_text = "name a file in a folder that may be written"
        raise MachineError(f"{path} cannot be written: {error.strerror}", help=help_text) from error


# Elements


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def element(tag: str, inner: str | None = None, /, **attributes: str | float) -> str:
    """Numbers are pixels. Underscores in names stand for hyphens."""
    written = "".join(
        f' {name.replace("_", "-")}="{_px(value) if isinstance(value, int | float) else escape(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}/>" if inner is None else f"<{tag}{written}>{inner}</{tag}>"


def text_at(x: float, y: float, text: str, *, size: float = SIZE, **attributes: str | float) -> str:
    """One or more lines, the first on the baseline `y`."""
    lines = text.split("\n")
    if len(lines) == 1:
        return element("text", escape(text), x=x, y=y, font_size=size, **attributes)
    inner = "".join(element("tspan", escape(line), x=x, y=y + (size + 2) * place) for place, line in enumerate(lines))
    return element("text", inner, font_size=size, **attributes)


def line_element(x1: float, y1: float, x2: float, y2: float, opacity: float, **attributes: str | float) -> str:
    """A line in the colour of the text."""
    return element(
        "line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="currentColor", stroke_opacity=f"{opacity:g}", **attributes
    )


def _named(name: str, drawn: str) -> str:
    return f"<g><title>{escape(name)}</title>{drawn}</g>"


def svg_element(inner: Iterable[str], *, width: float, height: float, alt: str) -> str:
    """A drawing of these elements; `alt` says in words what it shows."""
    return element(
        "svg",
        "".join(inner),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-MARGIN} 0 {_px(width + 2 * MARGIN)} {_px(height)}",
        width=width + 2 * MARGIN,
        height=height,
        fill="currentColor",
        font_size=SIZE,
        role="img",
        aria_label=alt,
    )


def _width(text: str, size: float = SIZE) -> float:
    """About the width of a line in a sans-serif font, rather too much than too little."""
    narrow, wide = " .,:;'|!()[]ijlft", "mwMW@%"
    ems = sum(0.34 if sign in narrow else 0.9 if sign in wide else 0.68 if sign.isupper() else 0.6 for sign in text)
    return ems * size


def _wrapped(text: str, width: float, size: float = SIZE) -> str:
    """Broken into lines at spaces where it would be wider."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        first, *words = paragraph.split(" ")
        lines.append(first)
        for word in words:
            if _width(f"{lines[-1]} {word}", size) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return "\n".join(lines)


# Axes


class _Axis(NamedTuple):
    """Values from `low` to `high` on pixels from `start` to `end`; `log` for logarithms of them; `whole` if fractions
    have no meaning: there is no half node."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; the end of the axis for one beyond it."""
        value = min(max(value, self.low), self.high)
        part = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.log
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + part * (self.end - self.start)

    def ticks(self, pixels: int) -> list[tuple[float, str]]:
        """Round values with their labels, about so many pixels apart."""
        if self.log:
            return _log_ticks(self.low, self.high)
        rough = (self.high - self.low) / max(2, round(abs(self.end - self.start) / pixels))
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - ROUNDING))
        if self.whole and step < 1:
            step = 1.0
        decimals = next((places for places in range(12) if abs(step - round(step, places)) < WIDE_ROUNDING * step), 12)
        unit, suffix = next(((unit, sign) for unit, sign in ((1e9, "G"), (1e6, "M")) if step >= unit), (1.0, ""))
        first, last = round_up(self.low / step), round_down(self.high / step)
        return [(at * step, f"{at * step / unit:,.{decimals}f}{suffix}") for at in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten, and simple multiples of them where there are few."""
    factors = (1, 2, 3, 4, 6) if high < 12 * low else (1, 2, 5) if high < 60 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    values = [factor * 10.0**power for power in powers for factor in factors]
    inside = [value for value in values if low * (1 - ROUNDING) <= value <= high * (1 + ROUNDING)]
    return [(value, number(value)) for value in inside[:: -(-len(inside) // 6) or 1]]


def _finite(values: Iterable[float]) -> list[float]:
    """The numbers among them; those that are as good as 0 as 0, so that no axis spans hundreds of powers of ten."""
    return [value if abs(value) > TINY else 0.0 for value in values if math.isfinite(value)]


def _are_whole(values: Iterable[float]) -> bool:
    return all(value == round(value) for value in _finite(values))


def _x_axis(panels: Sequence[Panel], left: float) -> _Axis:
    """Common to these panels; of one with names along the axis, their positions."""
    end = WIDTH - RIGHT
    if panels[0].ticks:
        return _Axis(-0.5, len(panels[0].ticks) - 0.5, left, end)
    values = _finite(
        [
            *(x for panel in panels for series in panel.series for x in series.x),
            *(mark.at for panel in panels for mark in panel.marks if mark.axis == "x"),
        ]
    )
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = 0.02 * (high - low) or 0.5
    return _Axis(0.0 if 0 <= low < pad else low - pad, high + pad, left, end, whole=_are_whole(values))


def _y_axis(panel: Panel, top: float, height: float) -> _Axis:
    """From 0 where nothing is negative: on an axis from 0 to 0.05, zero would look like a small value."""
    values = _finite(
        [
            *(value for series in panel.series for value in (*series.y, *series.low, *series.high)),
            *(mark.at for mark in panel.marks if mark.axis == "y"),
        ]
    )
    labelled = sum(series.kind == "bars" for series in panel.series) == 1
    if panel.log and any(value > 0 for value in values):
        low, high = min(value for value in values if value > 0), max(values)
        room = (high / low) ** 0.05 if high > low else 2.0
        low /= 2 if any(series.kind == "bars" for series in panel.series) else room
        return _Axis(low, high * room ** (2 if labelled else 1), top + height, top, log=True)
    low, high = min(values, default=0.0), max(values, default=0.0)
    whole = _are_whole(y for series in panel.series for y in series.y)
    if low >= 0:
        return _Axis(0.0, high * (1.18 if labelled else 1.05) or 1.0, top + height, top, whole=whole)
    pad = 0.05 * (max(high, 0.0) - low)
    return _Axis(low - pad, max(high, 0.0) + pad, top + height, top, whole=whole)


# Figures


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for a page, with `alt` as its label."""
    colours = _colours(figure)
    one = len(figure.panels) == 1
    height = ONE_PANEL if one else PANEL
    title, legend = _head(figure, colours)
    y = 18 + LINE * title.count("\n") + LINE * len(legend) + 12
    shared = not any(panel.ticks for panel in figure.panels)
    label_lines = [_wrapped(panel.y_label, height + GAP) for panel in figure.panels]
    labels_width = LINE * (1 + max(lines.count("\n") for lines in label_lines))
    tick_width = max(
        (_width(text, SMALL) for panel in figure.panels for _, text in _y_axis(panel, 0, height).ticks(Y_TICK)),
        default=0.0,
    )
    left = max(labels_width + tick_width + 12, *(_slanted_left(panel) for panel in figure.panels))
    drawn = [text_at(0, 16, title, size=13, font_weight="bold"), *_legend(legend, y, left)]
    for place, panel in enumerate(figure.panels):
        last = place == len(figure.panels) - 1
        across = _x_axis(figure.panels if shared else [panel], left)
        up = _y_axis(panel, y, height)
        middle = y + height / 2
        label = label_lines[place]
        drawn.append(
            text_at(SIZE, middle, label, text_anchor="middle", transform=f"rotate(-90 {_px(SIZE)} {_px(middle)})")
        )
        drawn += _panel(panel, across, up, colours)
        y += height
        if last or not shared:
            below, used = _x_labels(panel, across, y)
            drawn += below
            y += used
        y += 0 if last else GAP
    if figure.x_label:
        y += LINE
        drawn.append(text_at((left + WIDTH - RIGHT) / 2, y, figure.x_label, text_anchor="middle"))
    return svg_element(drawn, width=WIDTH, height=y + 8, alt=figure.alt)


def _colours(figure: Figure) -> dict[str, str]:
    """One colour per name in all panels; grey for areas, which are background."""
    drawn = [series for panel in figure.panels for series in panel.series]
    names = dict.fromkeys(series.name for series in drawn if series.kind != "area")
    grey = {series.name: PALETTE[7] for series in drawn if series.kind == "area"}
    lively = [colour for place, colour in enumerate(PALETTE) if place != 7]
    return grey | {name: lively[place % len(lively)] for place, name in enumerate(names)}


class _LegendEntry(NamedTuple):
    """A name in the legend and its sample."""

    name: str
    kind: str
    colour: str


def _head(figure: Figure, colours: Mapping[str, str]) -> tuple[str, list[list[_LegendEntry]]]:
    """The lines of the title, and of the legend: none where there is only one series."""
    title = _wrapped(figure.title, WIDTH, 15)  # bold letters are wider than those of this size, 13
    marks = [mark for panel in figure.panels for mark in panel.marks]
    if (len(colours) < 2 and not marks) or all(panel.ticks and len(panel.series) == 1 for panel in figure.panels):
        return title, []
    entries: dict[str, _LegendEntry] = {}
    for series in [series for panel in figure.panels for series in panel.series]:
        entries.setdefault(series.name, _LegendEntry(series.name, series.kind, colours[series.name]))
    for mark in marks:
        entries.setdefault(mark.name, _LegendEntry(mark.name, "mark", ""))
    lines: list[list[_LegendEntry]] = []
    used = math.inf
    for entry in entries.values():
        width = _entry_width(entry)
        if used + width > WIDTH - 60:
            lines.append([])
            used = 0.0
        lines[-1].append(entry)
        used += width
    return title, lines


def _entry_width(entry: _LegendEntry) -> float:
    return SWATCH + 6 + _width(entry.name, SMALL) + 14


def _legend(lines: Sequence[Sequence[_LegendEntry]], bottom: float, left: float) -> Iterator[str]:
    """The lines of names above the uppermost panel, which begins at `bottom`."""
    left = min(left, 60)
    for place, line in enumerate(lines):
        x, y = left, bottom - 14 - LINE * (len(lines) - 1 - place)
        for entry in line:
            yield _sample(entry, x, y - 4)
            yield text_at(x + SWATCH + 6, y, entry.name, size=SMALL)
            x += _entry_width(entry)


def _sample(entry: _LegendEntry, x: float, y: float) -> str:
    if entry.kind == "mark":
        return line_element(x, y, x + SWATCH, y, 0.6, stroke_dasharray="5 3", stroke_width="1.2")
    if entry.kind == "points":
        return element("circle", cx=x + SWATCH / 2, cy=y, r=3, fill=entry.colour)
    if entry.kind in ("area", "bars"):
        opacity = "0.35" if entry.kind == "area" else "1"
        return element("rect", x=x, y=y - 5, width=SWATCH, height=9, fill=entry.colour, fill_opacity=opacity)
    return element("line", x1=x, y1=y, x2=x + SWATCH, y2=y, stroke=entry.colour, stroke_width="1.8")


def _panel(panel: Panel, across: _Axis, up: _Axis, colours: Mapping[str, str]) -> Iterator[str]:
    left, right, bottom, top = across.start, across.end, up.start, up.end
    for value, label in up.ticks(Y_TICK):
        y = up.at(value)
        yield line_element(left, y, right, y, 0.13)
        yield text_at(left - 6, y + 4, label, size=SMALL, text_anchor="end")
    if not panel.ticks:
        for value, _ in across.ticks(X_TICK):
            yield line_element(across.at(value), top, across.at(value), bottom, 0.13)
    bars = [series for series in panel.series if series.kind == "bars"]
    for place, series in enumerate(bars):
        yield from _bars(series, panel.ticks, across, up, colours[series.name], place=place, of=len(bars))
    for series in panel.series:
        if series.kind != "bars":
            yield _named(series.name, "".join(_curve(series, across, up, colours[series.name])))
    for mark in panel.marks:
        yield _named(mark.name, _mark(mark, across, up))
    yield line_element(left, bottom, right, bottom, 0.5)
    yield line_element(left, bottom, left, top, 0.5)


def _mark(mark: Mark, across: _Axis, up: _Axis) -> str:
    if mark.axis == "y":
        ends = (across.start, up.at(mark.at), across.end, up.at(mark.at))
    else:
        ends = (across.at(mark.at), up.start, across.at(mark.at), up.end)
    return line_element(*ends, 0.6, stroke_dasharray="5 3", stroke_width="1.2")


def _path(points: Sequence[tuple[float, float]], across: _Axis, up: _Axis, *, steps: bool) -> str:
    """Through all points that are numbers, broken at the others."""
    found: list[str] = []
    pen = "M"
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        to_x, to_y = _px(across.at(x)), _px(up.at(y))
        found.append(f"H{to_x}V{to_y}" if steps and pen == "L" else f"{pen}{to_x} {to_y}")
        pen = "L"
    return "".join(found)


def _curve(series: Series, across: _Axis, up: _Axis, colour: str) -> Iterator[str]:
    points = list(zip(series.x, series.y, strict=True))
    if series.low:
        corners = [*zip(series.x, series.high, strict=True), *reversed(list(zip(series.x, series.low, strict=True)))]
        yield element("path", d=_path(corners, across, up, steps=False) + "Z", fill=colour, fill_opacity="0.18")
    if series.kind == "points":
        for x, y in points:
            if math.isfinite(x) and math.isfinite(y):
                yield element("circle", cx=across.at(x), cy=up.at(y), r="2.7", fill=colour, fill_opacity="0.85")
    elif series.kind == "area":
        if points:
            outline = _path(points, across, up, steps=True)
            outline += f"V{_px(up.at(0.0))}H{_px(across.at(points[0][0]))}Z"
            yield element("path", d=outline, fill=colour, fill_opacity="0.4")
    elif points:
        path = _path(points, across, up, steps=series.kind == "steps")
        yield element("path", d=path, fill="none", stroke=colour, stroke_width="1.6", stroke_linejoin="round")


def _bars(
    series: Series, ticks: Sequence[str], across: _Axis, up: _Axis, colour: str, *, place: int, of: int
) -> Iterator[str]:
    slot = (across.end - across.start) / len(ticks) if ticks else 1.0
    width = 0.72 * slot / of
    labels = [number(float(value)) for value in series.y]
    labelled = of == 1 and max((_width(label, SMALL) for label in labels), default=0.0) < slot
    for at, (position, value, label) in enumerate(zip(series.x, series.y, labels, strict=True)):
        if not math.isfinite(value):
            continue
        middle = across.at(position) + (place - (of - 1) / 2) * width
        ends = up.at(value), up.at(0.0)
        drawn = element(
            "rect", x=middle - width / 2, y=min(ends), width=width, height=abs(ends[1] - ends[0]), fill=colour
        )
        top = min(ends)
        if series.low:
            low, high = up.at(series.low[at]), up.at(series.high[at])
            drawn += line_element(middle, low, middle, high, 0.6, stroke_width="1.2")
            drawn += "".join(line_element(middle - 3, y, middle + 3, y, 0.6, stroke_width="1.2") for y in (low, high))
            top = min(top, high)
        if labelled:
            drawn += text_at(middle, top - 4, label, size=SMALL, text_anchor="middle")
        tick = ticks[round(position)].replace("\n", " ") if ticks else ""
        yield _named(f"{series.name}, {tick}: {label}" if tick else f"{series.name}: {label}", drawn)


def _touch(panel: Panel) -> bool:
    """Whether names along the axis are too wide to stand beside each other."""
    widths = [max(_width(line, SMALL) for line in tick.split("\n")) for tick in panel.ticks]
    slot = (WIDTH - RIGHT - 60) / max(1, len(widths))
    return any((one + other) / 2 + 4 > slot for one, other in pairwise(widths))


def _slanted_left(panel: Panel) -> float:
    """The room to the left of the axis that its first slanted name needs."""
    if not panel.ticks or not _touch(panel):
        return 0.0
    slot = (WIDTH - RIGHT - 60) / len(panel.ticks)
    return max(_width(tick, SMALL) - slot * (place + 0.5) for place, tick in enumerate(panel.ticks))


def _x_labels(panel: Panel, across: _Axis, y: float) -> tuple[list[str], float]:
    """The labels below the axis at `y`, and the room that they take."""
    if not panel.ticks:
        found = across.ticks(X_TICK)
        return [
            text_at(across.at(at), y + LINE, text, size=SMALL, text_anchor="middle") for at, text in found
        ], LINE + 4
    if _touch(panel):
        angle = math.radians(SLANT)
        drawn = []
        for place, tick in enumerate(panel.ticks):
            x, below = _px(across.at(place) + 4), _px(y + 12)
            turn = f"rotate(-{SLANT} {x} {below})"
            drawn.append(
                text_at(float(x), float(below), tick.replace("\n", " "), size=SMALL, text_anchor="end", transform=turn)
            )
        longest = max(_width(tick, SMALL) for tick in panel.ticks)
        return drawn, 14 + longest * math.sin(angle)
    lines = 1 + max(tick.count("\n") for tick in panel.ticks)
    drawn = [
        text_at(across.at(place), y + LINE, tick, size=SMALL, text_anchor="middle")
        for place, tick in enumerate(panel.ticks)
    ]
    return drawn, LINE * lines + 4
