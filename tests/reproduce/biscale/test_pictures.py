"""Figures show what was played."""

from sloop.reproduce.biscale import pictures
from sloop.reproduce.biscale.trials import Results
from tests.reproduce.biscale.conftest import results_of


def test_the_same_figures_from_a_full_run_and_a_quick_one(results: Results) -> None:
    names = ["evaluation", "over-time-video", "over-time-audio", "over-time-nlp", "motivation", "dropping"]
    for played in (results, results_of(quick=True)):
        figures = pictures.figures(played, "")
        assert [figure.name for figure in figures] == names
        assert all(figure.alt and figure.panels for figure in figures)
        for figure in figures:
            for panel in figure.panels:
                assert all(len(series.x) == len(series.y) > 0 for series in panel.series)
