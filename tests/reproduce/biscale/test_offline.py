"""What needs no simulation."""

from array import array

from sloop.reproduce.biscale import offline
from sloop.reproduce.twitter import Excerpt


def test_all_that_is_exact_is_reproduced() -> None:
    rows = offline.rows(None)
    assert {row.verdict for row in rows if row.experiment != "overheads"} == {"reproduced"}
    assert {row.experiment for row in rows} == {"programs", "overheads", "E0 motivation", "E4 fit"}


def test_the_bar_for_a_predictor() -> None:
    counts = array("q", ([10] * 10 + [20] * 10) * 5)
    row = offline.rows(Excerpt("days", counts, "assumed: a square wave"))[-1]
    assert 50 <= row.ours <= 100
    assert row.verdict == "off"
    assert "a square wave" in row.note
