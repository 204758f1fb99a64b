"""The pages of reproductions: what is counted, and which rows and figures are on them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from benchmarks import reproductions
from benchmarks.reproductions import TimedReproduction, page_of, timed
from sloop.report.plots import Figure
from sloop_systems.comparison import Reproduction
from sloop_systems.comparison.rows import Claim, Row, compare, directed


def made(*rows: Row) -> TimedReproduction:
    return TimedReproduction(Reproduction("x", "source", rows, (), (), "", ""), 2.0, 3.5)


def test_the_page_shows_what_is_off_and_our_own_rows() -> None:
    far = compare(Claim("Fig. 1", "latency", "ms", paper=10.0), [90.0, 91.0, 92.0])
    near = compare(Claim("Fig. 2", "cores", "", paper=10.0), [10.0, 10.0, 10.0])
    ours = directed(Claim("ours", "cost", "%"), [-4.0, -2.0], holds=True, expect="cheaper")
    lines = page_of(made(near), made(far, near, ours)).splitlines()
    assert lines[2] == "| 2 | 3.5 | 2 | 3.5 | 3 | 1 | 0 | 1 | 1 | 0 |"
    assert [line for line in lines if line.startswith("| Fig.")] == [
        f"| Fig. 1 | latency | ms | 10 | – | 91 | {far.note} |"
    ]
    assert "| cost | % | -3 | -4 | -2 | shape | expected: cheaper |" in lines


def test_a_page_without_such_rows_says_so() -> None:
    near = compare(Claim("Fig. 2", "cores", "", paper=10.0), [10.0, 10.0, 10.0])
    text = page_of(made(near), made(near))
    assert "No row is off." in text
    assert "Our own systems" not in text


def test_processor_time_of_processes_that_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(1.0, 2.0, 3.0, 4.0, 99.0), (1.5, 2.25, 5.0, 4.5, 123.0)])
    monkeypatch.setattr(os, "times", lambda: next(times))
    monkeypatch.setattr(reproductions, "reproduce", lambda name, **options: made().found)
    assert timed("x", Path(), quick=True).processor_s == pytest.approx(0.5 + 0.25 + 2.0 + 0.5)


def test_the_figures_are_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = Figure(name="split", title="", x_label="", panels=(), alt="")
    whole = structs.replace(made().found, figures=(figure,))
    published = list[tuple[Any, ...]]()
    monkeypatch.setattr(sys, "argv", ["reproductions", "--only", "sponge"])
    monkeypatch.setattr(reproductions, "publish", lambda *given, write: published.append(given))
    monkeypatch.setattr(reproductions, "reproduce", lambda name, quick, **options: made().found if quick else whole)
    reproductions.main()
    ((name, _, _, figures),) = published
    assert (name, figures) == ("reproduce-sponge", (figure,))
