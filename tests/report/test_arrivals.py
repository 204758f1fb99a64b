from pathlib import Path
from xml.etree import ElementTree

import pytest

from sloop.errors import InputError, MachineError
from sloop.report.arrivals import draw, figure_of
from sloop.units import s
from sloop.workload import trace_of

TRACE = trace_of([0, s(0.5), s(2)], duration_ns=s(3), name="three", provenance="assumed: a test")


def test_every_second_has_its_count() -> None:
    series = figure_of(TRACE).panels[0].series[0]
    assert list(series.x) == [0, 1, 2]
    assert list(series.y) == [2, 0, 1]


def test_it_is_drawn_as_the_name_says(tmp_path: Path) -> None:
    draw(figure_of(TRACE), tmp_path / "a.png")
    draw(figure_of(TRACE), tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_other_names_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither"):
        draw(figure_of(TRACE), tmp_path / "a.pdf")
    with pytest.raises(MachineError, match="cannot be written"):
        draw(figure_of(TRACE), tmp_path / "nowhere" / "a.png")
