import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from sloop import __version__
from sloop.demo.page import html, live_timeline, result, summary
from sloop.demo.run import Demonstration

pytest.importorskip("sloop_systems.sponge", reason="the demonstration shows Sponge")


def report_of(demonstration: Demonstration) -> Any:
    document = html(demonstration, "out/demo", made=datetime(2026, 11, 29, tzinfo=UTC))
    (data,) = re.findall(r'<script type="application/json" id="picture">(.*?)</script>', document)
    return json.loads(data)["report"]


def test_the_page_shows_both_systems_live_and_simulated(demonstration: Demonstration) -> None:
    sections = report_of(demonstration)["sections"]
    assert sum(len(section["figures"]) for section in sections) == 4  # live, latency, both for two systems
    text = " ".join(paragraph for section in sections for paragraph in section["text"])
    assert "These runs do not compare the systems" in text
    assert "sloop replay out/demo/sponge." in text


def test_what_was_run_is_at_the_top(demonstration: Demonstration) -> None:
    facts = " ".join(value for _, value in report_of(demonstration)["facts"])
    for fact in ("2026-11-29", "a <machine>", "squeezenet.onnx", "1000 ms", "static and sponge", __version__):
        assert fact in facts


def test_every_run_has_three_rows(demonstration: Demonstration) -> None:
    rows = result(demonstration).rows
    assert [row[:2] for row in rows] == [
        (system, run) for system in ("static", "sponge") for run in ("live, clients", "live, server", "simulated")
    ]


def test_the_result_is_said_in_words(demonstration: Demonstration) -> None:
    assert summary(demonstration).startswith("static answered 100.0 % of 200 requests in time with")


def test_the_figure_shows_both_systems(demonstration: Demonstration) -> None:
    cores = live_timeline(demonstration).panels[1]
    assert [series.name for series in cores.series] == ["static", "sponge"]
