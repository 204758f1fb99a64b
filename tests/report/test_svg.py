"""Drawings: what they show, that all of it is inside, and that they are the same every time and describe themselves."""

import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sloop.errors import InputError, MachineError
from sloop.report.plots import Figure, Kind, Mark, Panel, Series
from sloop.report.svg import PALETTE, svg, write_figure

SVG = "{http://www.w3.org/2000/svg}"

FIGURE = Figure(
    name="all",
    title="Everything that can be drawn",
    x_label="time, s",
    panels=(
        Panel(
            y_label="a",
            series=(
                Series("area", (0, 1, 2), (1, 2, 1), "area"),
                Series("steps", (0, 1, 2), (1, 2, 1), "steps"),
                Series("line", (0, 1, 2), (1, -2, 1), low=(0, -3, 0), high=(2, -1, 2)),
                Series("points", (0, 1, 2), (1, 2, 1), "points"),
            ),
            marks=(Mark("limit", "y", 1.5), Mark("when", "x", 1.0)),
        ),
        Panel(y_label="b", series=(Series("line", (0, 1, 2), (1, 20, 300)),), log=True),
    ),
    alt='says "what" <is> & seen',
)

BARS = Figure(
    name="bars",
    title="Bars",
    x_label="",
    panels=(
        Panel(
            y_label="x", ticks=("p", "q"), series=(Series("x", (0, 1), (3, 400), "bars", low=(2, 300), high=(4, 500)),)
        ),
        Panel(
            y_label="y",
            ticks=("p", "q"),
            series=(Series("m", (0, 1), (1, 2), "bars"), Series("n", (0, 1), (2, 1), "bars")),
        ),
    ),
    alt="bars",
)

EMPTY = Figure(name="none", title="", x_label="", panels=(Panel(y_label="", series=(Series("a", (), ()),)),), alt="")


def drawn(*panels: Panel, title: str = "t", x_label: str = "x") -> ET.Element:
    return ET.fromstring(svg(Figure(name="n", title=title, x_label=x_label, panels=panels, alt="a")))


def texts(root: ET.Element) -> list[str]:
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def bars(root: ET.Element, colour: str = PALETTE[0]) -> list[ET.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if rect.attrib.get("fill") == colour]


# Pages and files


@pytest.mark.parametrize("figure", [FIGURE, BARS, EMPTY])
def test_the_same_bytes_every_time(figure: Figure) -> None:
    assert svg(figure) == svg(figure)


def test_it_follows_the_colour_of_its_page_and_tells_what_it_shows() -> None:
    text = svg(FIGURE)
    assert text.startswith("<svg")
    root = ET.fromstring(text)
    assert root.attrib["fill"] == "currentColor"
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == FIGURE.alt
    strokes = {element.attrib.get("stroke", "none") for element in root.iter()}
    assert strokes <= {"none", "currentColor", *PALETTE}
    shown = texts(root)
    assert {"Everything that can be drawn", "area", "steps", "limit", "time, s"} <= set(shown)
    assert shown.count("line") == 1, "one name for both panels"


def test_what_is_drawn_has_a_name_to_hover_over() -> None:
    names = {title.text for title in ET.fromstring(svg(FIGURE)).iter(f"{SVG}title")}
    assert names == {"area", "steps", "line", "points", "limit", "when"}
    assert "n, q: 1" in {title.text for title in ET.fromstring(svg(BARS)).iter(f"{SVG}title")}


def test_a_file_suits_light_and_dark_screens(tmp_path: Path) -> None:
    write_figure(FIGURE, tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    style = root.findtext(f"{SVG}style") or ""
    assert "background:#fff" in style
    assert "prefers-color-scheme:dark" in style
    assert "<style" not in svg(FIGURE), "on a page it would be the style of the page"


@pytest.mark.parametrize("name", ["a.pdf", "a.png", "a"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"'{name}' is no \.svg"):
        write_figure(FIGURE, tmp_path / name)


def test_places_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        write_figure(FIGURE, tmp_path / "nowhere" / "a.svg")
    (tmp_path / "b.svg").mkdir()
    with pytest.raises(MachineError, match="cannot be written"):
        write_figure(FIGURE, tmp_path / "b.svg")


# Axes


def labels(root: ET.Element) -> list[str]:
    """Of the vertical axis."""
    return [text.text or "" for text in root.iter(f"{SVG}text") if text.attrib.get("text-anchor") == "end"]


def test_an_axis_begins_at_zero_unless_something_is_negative() -> None:
    assert labels(drawn(Panel(y_label="y", series=(Series("s", (0, 1), (90, 100)),)))) == [
        "0", "20", "40", "60", "80", "100"
    ]  # fmt: skip
    assert labels(drawn(Panel(y_label="y", series=(Series("s", (0, 1), (-1, 1.2)),)))) == [
        "-1.0",
        "-0.5",
        "0.0",
        "0.5",
        "1.0",
    ]
    assert labels(drawn(Panel(y_label="y", series=(Series("s", (0, 1), (0, 0)),)))) == ["0", "1"]


def test_whole_numbers_have_no_fractions_between_them() -> None:
    assert labels(drawn(Panel(y_label="y", series=(Series("s", (0, 1), (1, 2)),)))) == ["0", "1", "2"]
    assert "0.50" in labels(drawn(Panel(y_label="y", series=(Series("s", (0, 1), (1, 1.9)),))))


@pytest.mark.parametrize(
    ("most", "last"), [(3.2e-4, "0.0003"), (1.0, "1"), (1234.0, "1,200"), (5e7, "50M"), (3e12, "3,000G")]
)
def test_large_and_small_numbers_stay_readable(most: float, last: str) -> None:
    assert labels(drawn(Panel(y_label="y", series=(Series("s", (0, 1), (0.1 * most, most)),))))[-1].startswith(last)


@pytest.mark.parametrize(("y", "expected"), [((0.31, 0.97), "0.3 0.4 0.6 1"), ((0.01, 12e4), "0.01 1 100 10,000")])
def test_logarithmic_axes_have_plain_numbers(y: tuple[float, ...], expected: str) -> None:
    assert (
        labels(drawn(Panel(y_label="y", series=(Series("s", (1.0, 2.0), y, kind="points"),), log=True)))
        == expected.split()
    )


def test_bars_with_labels_on_a_logarithmic_axis_differ_in_height() -> None:
    series = Series("x", (0.0, 1.0), (100.0, 1.0), "bars", low=(100.0, 1.0), high=(100.0, 1.0))
    high, low = bars(drawn(Panel(y_label="y", ticks=("p", "q"), series=(series,), log=True)))
    assert float(high.attrib["height"]) > 3 * float(low.attrib["height"]) > 0


def test_bars_are_as_high_as_their_values_and_have_them_above() -> None:
    root = drawn(Panel(y_label="y", ticks=("p", "q"), series=(Series("x", (0, 1), (1.5, 3), "bars"),)))
    half, whole = (float(bar.attrib["height"]) for bar in bars(root))
    assert whole == pytest.approx(2 * half, abs=0.2)
    assert {"1.5", "3", "p", "q"} <= set(texts(root))
    names = tuple(f"n{at}" for at in range(40))
    crowded = Series("x", tuple(map(float, range(40))), (1234.5,) * 40, "bars")
    assert "1,234" not in texts(drawn(Panel(y_label="y", ticks=names, series=(crowded,)))), "they would overlap"


def test_labels_that_would_touch_are_slanted() -> None:
    def slanted(*ticks: str) -> bool:
        series = Series("x", tuple(map(float, range(len(ticks)))), (1.0,) * len(ticks), "bars")
        panel = Panel(y_label="y", ticks=ticks, series=(series,))
        return "rotate(-20 " in svg(Figure(name="n", title="t", x_label="", panels=(panel,), alt="a"))

    assert not slanted("p", "q")
    assert not slanted("ResNet50", "VGG19", "MobileNetV2")
    assert slanted(*(f"MobileNetV{number}" for number in range(12)))


def test_a_curve_is_broken_where_there_is_no_number() -> None:
    root = drawn(Panel(y_label="y", series=(Series("s", (0, 1, 2, 3, 4), (1, 2, math.nan, 1, 2)),)))
    (path,) = (element.attrib["d"] for element in root.iter(f"{SVG}path"))
    assert path.count("M") == 2
    assert "nan" not in path


def test_steps_keep_a_value_until_the_next() -> None:
    root = drawn(Panel(y_label="y", series=(Series("s", (0, 1), (1, 2), "steps"),)))
    (path,) = (element.attrib["d"] for element in root.iter(f"{SVG}path"))
    assert re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+", path)


def test_a_single_series_needs_no_legend_and_many_have_several_lines() -> None:
    assert "alone" not in texts(drawn(Panel(y_label="y", series=(Series("alone", (0, 1), (1, 2)),))))
    many = tuple(Series(f"a system with a long name {at}", (0, 1), (1, at)) for at in range(8))
    root = drawn(Panel(y_label="y", series=many))
    rows = {text.attrib["y"] for text in root.iter(f"{SVG}text") if (text.text or "").startswith("a system")}
    assert len(rows) > 1


def test_a_long_title_has_several_lines() -> None:
    words = " ".join(["word"] * 40)
    root = drawn(Panel(y_label="y", series=(Series("s", (0, 1), (1, 2)),)), title=words)
    (title,) = [text for text in root.iter(f"{SVG}text") if text.attrib.get("font-weight") == "bold"]
    lines = ["".join(line.itertext()) for line in title]
    assert len(lines) > 1
    assert " ".join(lines) == words
    assert max(map(len, lines)) < 90


# Everything is inside

values = st.one_of(st.floats(-1e9, 1e9), st.sampled_from([0.0, 1.0, math.nan, 1e-9]))
kinds: st.SearchStrategy[Kind] = st.sampled_from(get_args(Kind))


@st.composite
def figures(draw: st.DrawFn) -> Figure:
    panels = []
    for _ in range(draw(st.integers(1, 3))):
        ticks = tuple(draw(st.lists(st.sampled_from(["p", "a long name of something", "two\nlines"]), max_size=9)))
        series = []
        for at in range(draw(st.integers(0, 4))):
            length = draw(st.integers(0, 5))
            kind = draw(kinds if ticks else kinds.filter(lambda kind: kind != "bars"))
            x = (
                [float(min(place, len(ticks) - 1)) for place in range(length)]
                if ticks
                else sorted(draw(st.lists(values.filter(math.isfinite), min_size=length, max_size=length)))
            )
            y = tuple(draw(st.lists(values, min_size=length, max_size=length)))
            series.append(Series(f"s{at}", tuple(x), y, kind))
        marks = tuple(
            Mark("m", draw(st.sampled_from(["x", "y"])), draw(st.floats(-9, 9))) for _ in range(draw(st.integers(0, 2)))
        )
        panels.append(
            Panel(y_label="y", series=tuple(series), ticks=ticks, marks=() if ticks else marks, log=draw(st.booleans()))
        )
    return Figure(name="n", title="t <&>", x_label="x", panels=tuple(panels), alt="a")


TINY = Series("s", (0.0, 1.0), (1.0, 1e-313))


@settings(max_examples=150, deadline=None)
@given(figures())
@example(Figure(name="n", title="", x_label="", panels=(Panel(y_label="", series=(TINY,), log=True),), alt=""))
def test_everything_is_inside(figure: Figure) -> None:
    root = ET.fromstring(svg(figure))
    left, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        found = element.attrib
        across = [float(found[key]) for key in ("x", "x1", "x2", "cx") if key in found]
        down = [float(found[key]) for key in ("y", "y1", "y2", "cy") if key in found]
        if element.tag == f"{SVG}rect":
            across.append(across[0] + float(found["width"]))
            down.append(down[0] + float(found["height"]))
        for letter, numbers in re.findall(r"([MLHV])([-\d. ]+)", found.get("d", "")):
            pair = [float(each) for each in numbers.split()]
            across += pair[:1] if letter != "V" else []
            down += pair[-1:] if letter != "H" else []
        assert all(0 <= value <= left + width for value in across)
        assert all(0 <= value <= height for value in down)
