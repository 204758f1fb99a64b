"""Figures of a reproduction are values that can be drawn."""

from sloop.report.plots import svg
from sloop.reproduce.ipa import pictures
from sloop.reproduce.ipa.trials import Results


def test_all_of_them(results: Results) -> None:
    names = ("video", "nlp")
    figures = [
        *pictures.of_runs(results, names, ""),
        pictures.of_deciding({1: 0.1, 10: 200.0}),
        pictures.of_preferences(results, names),
        pictures.of_latencies(results, names),
        pictures.of_forecasters(results, names, quick=False),
    ]
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.alt and figure.panels for figure in figures)
    assert len(figures[0].panels[0].series[0].x) == 4 * 120
    assert svg(figures[0]).startswith("<svg")
