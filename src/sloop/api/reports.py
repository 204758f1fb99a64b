"""Figures, tables and pages of HTML, without any library for plots."""

from sloop.report.plots import Figure, Mark, Panel, Series
from sloop.report.svg import PALETTE, SMALL, element, line_element, svg_element, text_at, write_drawing
from sloop.report.tables import Table

__all__ = [
    "PALETTE",
    "SMALL",
    "Figure",
    "Mark",
    "Panel",
    "Series",
    "Table",
    "element",
    "line_element",
    "svg_element",
    "text_at",
    "write_drawing",
]
