"""Drawings are deterministic and say what they show to those who cannot see them."""

import xml.etree.ElementTree as ET

import pytest

from sloop.report.figures import Figure, Mark, Panel, Series
from sloop.report.plots import FAINT, INK, png, svg

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


@pytest.mark.parametrize("figure", [FIGURE, BARS, EMPTY])
def test_the_same_bytes_every_time(figure: Figure) -> None:
    assert svg(figure) == svg(figure)
    assert png(figure, dpi=40) == png(figure, dpi=40)


def test_a_png_is_one() -> None:
    assert png(BARS, dpi=40).startswith(b"\x89PNG")


def test_an_svg_follows_the_colour_of_its_page_and_tells_what_it_shows() -> None:
    text = svg(FIGURE)
    assert text.startswith("<svg")
    assert "currentColor" in text
    assert INK not in text
    assert FAINT not in text
    root = ET.fromstring(text)
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"] == FIGURE.alt
    shown = {"".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("text")}
    assert {"Everything that can be drawn", "area", "steps", "limit", "time, s"} <= shown
