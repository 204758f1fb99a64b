from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from sloop import __version__
from sloop.demo.page import html, live_timeline, result, summary
from sloop.demo.run import Demonstration

pytest.importorskip("sloop_systems.sponge", reason="the demonstration shows Sponge")


class Tags(HTMLParser):
    """Opened and closed tags, and whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {value}" for name, value in attrs if name in {"src", "data"} and value]
        self.fetched += [f"link {value}" for name, value in attrs if tag == "link" and name == "href" and value]


def test_the_page_is_whole_in_itself(demonstration: Demonstration) -> None:
    document = html(demonstration, "out/demo", made=datetime(2026, 11, 29, tzinfo=UTC))
    tags = Tags()
    tags.feed(document)
    assert tags.fetched == []
    assert document.count("<svg") == 4  # live, latency, and live against simulated for two systems
    assert "a &lt;machine&gt;" in document
    assert "These runs do not compare the systems" in document
    assert "sloop replay out/demo/sponge." in document


def test_what_was_run_is_at_the_top(demonstration: Demonstration) -> None:
    top, _, _ = html(demonstration, "out/demo", made=datetime(2026, 11, 29, tzinfo=UTC)).partition("<main>")
    for fact in ("2026-11-29", "a &lt;machine&gt;", "squeezenet.onnx", "1000 ms", "static and sponge", __version__):
        assert f"{fact}" in top


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
