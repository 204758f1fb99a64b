"""One file, complete, escaped, and fit for a screen reader; a log is all that the page of a run needs."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec import structs

from sloop.actions import Decided, VersionState
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.events import Deployed
from sloop.profile.profile import Profile, Quadratic
from sloop.report.html import DECISIONS_MAX, NotedRecords, Section, log_page, page, run_sections
from sloop.report.tables import Table
from sloop.runlog import FileLog, Header, Record, RecordedLog, read_log
from sloop.runlog.summary import RouteRow, RunSummary
from sloop.systems.replay import header_of
from sloop.systems.setup import set_up
from sloop.vocabulary import Node, Outcome
from tests.runlog.story import GRAPH, STORY, Parts, Rows, asks, finishes, goes_to, rolls, runs, starts, told

VOID = {"meta", "br", "path", "use", "rect"}


class Reader(HTMLParser):
    """Checks that elements nest, and remembers what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


HEADER = Header(
    origin="sim", name="demo", system="static", definitions={"demo": {}}, seed=3, software={"sloop": "0.1.0"}
)


def page_of(rows: Rows, title: str = "One", assumed: tuple[str, ...] = ()) -> str:
    summary = RunSummary(GRAPH, start_ns=0).fold(rows)
    row = summary.row(system="static", seed=3, assumed=assumed)
    return page(title, run_sections(row, summary, NotedRecords(rows), HEADER))


def test_a_run_on_a_page() -> None:
    text = page_of(STORY, "Demo & more", ("classify/small: assumed profile <by us>",))
    reader = read(text)
    for heading in ("Summary", "Over time", "Why requests were missed", "Decisions", "Where the numbers come from"):
        assert heading in reader.text
    assert "<by us>" not in text
    assert "Demo &amp; more" in text
    assert "demand doubled" in text
    assert "static answered 16.67 % of 6 requests in time, p99 220 ms" in text
    assert "depend on 1 value that were not measured" in text
    assert "Stages" not in reader.text, "there is but one"


def test_nothing_is_fetched() -> None:
    text = page_of(STORY)
    for tag, attributes in read(text).tags:
        assert tag not in {"script", "link", "img", "iframe"}
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "Nothing here depends on" in text


def test_tables_have_headers_and_pictures_have_names() -> None:
    tags = read(page_of(STORY)).tags
    assert {attributes.get("scope") for tag, attributes in tags if tag == "th"} == {"col", "row"}
    assert all(attributes.get("aria-label") for tag, attributes in tags if tag == "svg")
    assert next(attributes for tag, attributes in tags if tag == "html")["lang"] == "en"


def test_a_page_of_ones_own() -> None:
    text = page(
        "Own", [Section(title="A", text=("one <two>",), tables=(Table("", ("x",), ()),), folded=True)], lead="why & how"
    )
    reader = read(text)
    assert "one <two>" in reader.text
    assert "nothing to show" in reader.text
    assert ("details", {}) in reader.tags
    assert "why & how" in reader.text


def test_decisions_are_bounded() -> None:
    text = page_of([(now_ns, Decided("lost", "gone", "a")) for now_ns in range(DECISIONS_MAX + 7)])
    assert f"{DECISIONS_MAX + 7} decisions. The first {DECISIONS_MAX} are listed, 7 more are in the log." in text


def test_a_graph_has_a_row_for_each_stage_and_each_route() -> None:
    summary = RunSummary(GRAPH, start_ns=0).fold(STORY)
    row = summary.row(system="x", seed=0)
    stages = tuple(structs.replace(row.stages[0], stage=name) for name in ("cut", "read <it>"))
    route = RouteRow(stages=("cut",), slo_ms=77.0, answered=4, served=3, mean_ms=20.0, p99_ms=90.0)
    sections = run_sections(structs.replace(row, stages=stages, routes=(route,)), summary, NotedRecords(STORY), HEADER)
    reader = read(page("Graph", sections))
    for text in ("Stages", "Stage by stage", "Routes through the graph", "read <it>", "77"):
        assert text in reader.text


PROFILE = Profile(latency_ms=Quadratic(0, 30, 50), max_batch=4, max_cores=8, origin="assumed", source="nobody")
APPLICATION = Application(
    name="demo",
    slo_ms=200,
    stages=(Stage("classify", (Variant("small", profile=PROFILE),)),),
    system=SystemChoice("static", {"cores": 2.0}),
)


def test_a_log_on_disk_as_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once, because it may be long."""
    readings: list[RecordedLog] = []
    records_in = RecordedLog.__iter__

    def counted(self: RecordedLog) -> Iterator[tuple[int, Record]]:
        readings.append(self)
        return records_in(self)

    monkeypatch.setattr(RecordedLog, "__iter__", counted)
    for origin, title in (("sim", "a simulated run of static"), ("live", "a live run of static")):
        path = tmp_path / f"{origin}.jsonl"
        header = structs.replace(header_of(set_up(APPLICATION), origin=origin, seed=4), date="2026-01-01")
        with FileLog(path, header) as log:
            for now_ns, record in STORY:
                log.append(now_ns, record)
        text = log_page(read_log(path))
        for expected in (title, "cores 2.0", "2026-01-01", "assumed profile (nobody)", "Estimates", "demand doubled"):
            assert expected in text
    assert len(readings) == 2, "two logs"


# Several applications


def test_several_applications_and_versions_on_a_page() -> None:
    nodes = [Node("n-fast", "fast", 8, 0, usd_per_h=2.0), Node("n-slow", "slow", 4, 0, on_demand=True)]
    rows = told(
        *(starts(0, 0, "a"), starts(0, 1, "b", "slow"), (0, Deployed("a", "2", {}))),
        *(rolls(0, "2", VersionState.STARTING, 0.0, "deployed"), rolls(10, "2", VersionState.CANARY, 0.5, "ready")),
        *(asks(1, 20, "a"), goes_to(20, 1, "a"), runs(20, 0, 0, "a", 1), *finishes(80, 0, 0, 1)),
        *(asks(2, 20, "b"), runs(20, 1, 1, "b", 2), *finishes(180, 1, 1, 2, outcome=Outcome.LATE)),
        (190, Decided("planner", "no new plan: <nothing>", application="b")),
        rolls(200, "2", VersionState.RETIRED, 0.0, "rolled back: too <late>"),
    )
    summary = RunSummary([Parts("a"), Parts("b")], nodes=nodes, start_ns=0, build=Parts).fold(rows)
    header = structs.replace(
        HEADER,
        definitions={key: {"system": {"name": "static", "parameters": {"cores": n}}} for n, key in enumerate("ab")},
        cluster=tuple(nodes),
    )
    text = page("Two", run_sections(summary.row(system="static", seed=3), summary, NotedRecords(rows), header))
    shown = read(text)
    for heading in ("Summary", "Applications", "Over time", "Hardware", "Versions", "Latency", "Decisions"):
        assert heading in shown.text
    for words in (
        "Version by version",
        "Versions of a over time",
        "rolled back: too &lt;late&gt;",
        "version 2 is canary with 50% of the requests",
        "1 time no plan could be made, for example: no new plan: &lt;nothing&gt;.",
        "a cores 0, b cores 1",
        "1 fast, 1 slow (1 on demand)",
        "latency, % of the deadline",
    ):
        assert words in text


def test_of_many_applications_those_with_the_most_requests_are_drawn() -> None:
    summary = RunSummary([Parts(f"m{n}") for n in range(30)], start_ns=0).fold(told(asks(1, 0, "m9")))
    text = page("Many", run_sections(summary.row(system="x", seed=0), summary, NotedRecords(), HEADER))
    assert "The 8 applications with the most requests, of 30." in text
    assert ("details", {}) in read(text).tags, "thirty rows are folded"
