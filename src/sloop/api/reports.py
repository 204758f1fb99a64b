"""Figures, tables and pages of HTML, without any library for plots."""

from sloop.page.report import page
from sloop.report.plots import Figure, Mark, Panel, Series
from sloop.report.sections import Section, date_text
from sloop.report.svg import PALETTE, SMALL, element, line_element, svg_element, text_at, write_drawing
from sloop.report.tables import Table

__all__ = [
    "PALETTE",
    "SMALL",
    "Figure",
    "Mark",
    "Panel",
    "Section",
    "Series",
    "Table",
    "date_text",
    "element",
    "line_element",
    "page",
    "svg_element",
    "text_at",
    "write_drawing",
]
