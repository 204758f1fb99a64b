"""Figures of a reproduction are values that can be drawn."""

from sloop.report.plots import svg
from sloop.reproduce.sponge import pictures
from sloop.reproduce.sponge.trials import Results, link_of


def test_all_of_them(results: Results) -> None:
    figures = [
        pictures.of_link(link_of("")),
        pictures.of_fit(),
        *pictures.of_evaluation(results),
        *pictures.of_ablations(results),
    ]
    assert len({figure.name for figure in figures}) == len(figures)
    assert all(figure.alt and figure.panels for figure in figures)
    assert svg(figures[2]).startswith("<svg")
