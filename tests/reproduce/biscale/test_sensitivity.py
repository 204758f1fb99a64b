"""Rows of the course and of what it depends on follow from outcomes."""

from sloop.reproduce.biscale import sensitivity
from sloop.reproduce.biscale.trials import Results
from tests.reproduce.biscale.conftest import results_of


def test_rows_from_made_up_outcomes(results: Results) -> None:
    rows = {(row.experiment, row.metric): row for row in sensitivity.rows(results, quick=False)}
    assert rows["bound C", "video: all replicas have one core again, median"].ours == 85
    assert rows["bound C", "video: seeds whose cores rise 1.5 times within 3 s of the jump"].ours == 100
    assert (
        rows["bound C", "video: FA2's cores have risen 1.5 times, after the jump"].verdict == "off"
    )  # made up to be as quick
    assert rows["bound C", "video: cores on the plateau over the peak"].ours == 50
    assert rows["bound D", "fa2: least step from 1 × to 3 × to never"].ours == 1
    assert rows["E6 dropping", "violations in the first 100 s, vertical, never"].verdict == "reproduced"
    assert rows["bound E", "growth with the time to start, FA2's over Biscale's"].verdict == "off"  # none depends on it
    assert rows["bound G", "nlp: violations, last10 instead of the oracle"].ours == 0


def test_quick_says_less() -> None:
    rows = sensitivity.rows(results_of(quick=True), quick=True)
    assert {row.experiment for row in rows} == {"E1 course", "bound C", "bound D", "E6 dropping", "E0 motivation"}
