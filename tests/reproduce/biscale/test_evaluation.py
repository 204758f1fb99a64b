"""Rows of E1 to E3 follow from outcomes."""

import pytest

from sloop.reproduce.biscale import evaluation
from sloop.reproduce.biscale.evaluation import EXPERIMENTS, NAMES, SEEDS_B
from sloop.reproduce.biscale.trials import Results
from tests.reproduce.biscale.conftest import results_of


def test_rows_from_made_up_outcomes(results: Results) -> None:
    rows = {(row.experiment, row.metric): row for row in evaluation.rows(results, quick=False)}
    assert rows["E1 video", "violations, Biscale"].verdict == "reproduced"
    assert rows["E1 video", "violations, FA2"].ours == pytest.approx(3.02)
    assert rows["E3 nlp", "violations, FA2"].verdict == "shape"  # 3 is not 50.7, but the order is right
    assert rows["bound B", "video: violations, FA2 over Biscale"].ours == pytest.approx(3.095 / 0.195)
    assert rows["bound B", "video: violations, Biscale"].note.endswith(f"mean of {SEEDS_B} seeds, 0.1 to 0.29")
    assert rows["bound B2", "audio: cores, of those with the reference now"].verdict == "off"  # made up to be equal
    assert rows["bound B3", "nlp 1.3 times slower, 12 s to start: violations, fa2"].verdict == "off"
    assert all(row.verdict == "reproduced" for (name, _), row in rows.items() if name == "bound A")


def test_quick_needs_less_and_says_less() -> None:
    rows = evaluation.rows(results_of(quick=True), quick=True)
    assert {row.experiment for row in rows} == {*EXPERIMENTS.values(), "independent simulation", "bound A"}
    assert len([row for row in rows if row.experiment == "bound A"]) == 2 * len(NAMES)
