"""One file, complete, escaped, and fit for a screen reader; a log is all that the page of a run needs."""

from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec import structs

from sloop import __version__
from sloop.actions import Decided, VersionState
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.events import Deployed
from sloop.profile.profile import Profile, Quadratic
from sloop.report import run_tables
from sloop.report.html import (
    DECISIONS_MAX,
    TEXT_CHARS_MIN,
    UPRIGHT_ROWS_MAX,
    NotedRecords,
    ReportedRun,
    Section,
    log_page,
    log_run,
    page,
    run_sections,
    runs_page,
)
from sloop.report.tables import Table
from sloop.report.words import KINDS, WORDS, word_of
from sloop.runlog import FileLog, Header, Record, RecordedLog, read_log
from sloop.runlog.summary import EstimateError, RouteRow, RunSummary
from sloop.systems.replay import header_of
from sloop.systems.setup import set_up
from sloop.units import ms
from sloop.vocabulary import Node, Outcome
from tests.runlog.story import (
    GRAPH,
    STORY,
    Parts,
    Rows,
    arrived,
    asks,
    ended,
    finishes,
    goes_to,
    rolls,
    runs,
    starts,
    told,
)

VOID = {"meta", "br", "path", "use", "rect"}


class Reader(HTMLParser):
    """Checks that elements nest, and remembers what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scrolls: list[tuple[str, bool]] = []
        """Tables and pictures, and whether each is in a box that scrolls by itself."""
        self.tables: list[list[list[str]]] = []
        """Rows of cells, the first of them the headings."""
        self.facts: dict[str, str] = {}
        self.words: dict[str, str] = {}
        self._classes: list[str | None] = []
        self._term = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "meta":
            return
        if tag in {"table", "svg"}:
            self.scrolls.append((tag, "wide" in self._classes))
        self.open.append(tag)
        self._classes.append(dict(attrs).get("class"))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._classes.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "dt":
            self._term = data
        elif self.open and self.open[-1] == "dd":
            (self.facts if "facts" in self._classes else self.words)[self._term] = data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


HEADER = Header(
    origin="sim", name="demo", system="static", definitions={"demo": {}}, seed=3, software={"sloop": "0.1.0"}
)


MADE = datetime(2026, 11, 29, 3, 9, tzinfo=UTC)


def run_of(rows: Rows, label: str = "static", assumed: tuple[str, ...] = ()) -> ReportedRun:
    summary = RunSummary(GRAPH, start_ns=0).fold(rows)
    row = summary.row(system="static", seed=3, assumed=assumed)
    return ReportedRun(label=label, row=row, summary=summary, header=HEADER, noted=NotedRecords(rows))


def page_of(rows: Rows, title: str = "One", assumed: tuple[str, ...] = ()) -> str:
    return page(title, run_sections([run_of(rows, assumed=assumed)]), facts=())


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
        "Own",
        [Section(title="A", text=("one <two>",), tables=(Table("", ("x",), ()),), folded=True)],
        facts=[("who", "<me>")],
        lead="why & how",
    )
    reader = read(text)
    assert "one <two>" in reader.text
    assert "nothing to show" in reader.text
    assert ("details", {}) in reader.tags
    assert "why & how" in reader.text
    assert (reader.facts, reader.words) == ({"who": "<me>"}, {}), "no word needs an explanation"


def check_tables(reader: Reader) -> None:
    """What holds for each table of each page: it fits a telephone or scrolls by itself, and no column is empty."""
    assert reader.tables
    assert all(scrolls for _, scrolls in reader.scrolls)
    for headings, *rows in reader.tables:
        assert all(len(row) == len(headings) for row in rows)
        has_text = any(len(cell) > TEXT_CHARS_MIN for row in rows for cell in row)
        assert has_text or len(rows) > UPRIGHT_ROWS_MAX or len(headings) <= 1 + UPRIGHT_ROWS_MAX
        for cells in list(zip(*rows, strict=True))[1:]:
            assert set(cells) - {"", "–"}, headings


def test_no_column_is_empty_and_what_is_wide_scrolls_by_itself() -> None:
    reader = read(page_of(STORY))
    check_tables(reader)
    assert {tag for tag, _ in reader.scrolls} == {"table", "svg"}
    headings = {cell for rows in reader.tables for cell in (*rows[0], *(row[0] for row in rows))}
    assert "attainment %" in headings
    assert "accuracy" not in headings, "nobody declared one"
    assert "USD of replicas" not in headings, "nobody declared a price"


PLAIN = {
    *("system", "application", "version", "what", "why", "at s", "second", "requests", "outcome", "first request"),
    *("run", "hardware", "most at once", "busy %", "parts", "lost", "to first answer s", "to whole s", "answered"),
    *("mean ms", "mean cores", "cores", "longest ms", "estimated ms", "actual ms", "of the answered, in time %"),
    *("% of requests", "kind", "rows in shadows", "largest batch"),
}
"""Headings that need no explanation, or whose page explains them in its text."""


def test_each_word_in_a_heading_is_explained() -> None:
    """On the page itself, and the heading leads there."""
    text = page_of(STORY)
    reader = read(text)
    targets = {attributes["id"] for _, attributes in reader.tags if "id" in attributes}
    links = {attributes["href"] for tag, attributes in reader.tags if tag == "a"}
    assert {"#word-attainment", "#word-core-seconds", "#word-p99"} <= links
    assert {str(link).removeprefix("#") for link in links} <= targets
    summary = RunSummary(GRAPH, start_ns=0).fold(STORY)
    row = summary.row(system="x", seed=0)
    error = EstimateError("a", "v", "fast", 1, 40.0, 50.0, 0.25)
    made = [
        *(
            run_tables.ends([row]),
            run_tables.ranges([row]),
            run_tables.costs([row]),
            run_tables.waits([("x", summary)]),
        ),
        *(run_tables.applications([]), run_tables.nodes([]), run_tables.stages([]), run_tables.routes([])),
        *(
            run_tables.estimate_errors([("x", [error])]),
            run_tables.worst_seconds(()),
            run_tables.miss_reasons((), several=True),
        ),
    ]
    unexplained = {heading for each in made for heading in each.columns if not word_of(heading)}
    assert unexplained <= PLAIN
    for word in ("attainment", "goodput", "violations", "p99", "dropped", "deadline"):
        assert reader.words[word] == WORDS[word]
    assert "canary" not in reader.words, "there is none on this page"


def test_decisions_say_what_they_are_about() -> None:
    assert "lost: a replica died and is replaced" in page_of([(0, Decided("lost", "gone", "a"))])
    assert {record.kind for _, record in STORY if isinstance(record, Decided)} & set(KINDS) == {"plan"}


def test_several_runs_side_by_side() -> None:
    runs = [run_of(STORY, "one"), run_of(STORY[:20], "two")]
    text = runs_page(runs, made=MADE)
    reader = read(text)
    check_tables(reader)
    ends = next(rows for rows in reader.tables if ["late", "2", "2"] in rows)
    assert ends[0] == ["system", "one", "two"]
    assert "demo: one and two" in text
    assert "Decisions" not in reader.text, "they are on the page of one run"
    assert reader.facts["systems"] == "one, two"


def test_decisions_are_bounded() -> None:
    text = page_of([(now_ns, Decided("lost", "gone", "a")) for now_ns in range(DECISIONS_MAX + 7)])
    assert f"{DECISIONS_MAX + 7} decisions. The first {DECISIONS_MAX} are listed, 7 more are in the log." in text


def test_a_graph_has_a_row_for_each_stage_and_each_route() -> None:
    summary = RunSummary(GRAPH, start_ns=0).fold(STORY)
    row = summary.row(system="x", seed=0)
    stages = tuple(structs.replace(row.stages[0], stage=name) for name in ("cut", "read <it>"))
    route = RouteRow(stages=("cut",), slo_ms=77.0, answered=4, served=3, mean_ms=20.0, p99_ms=90.0)
    graph = ReportedRun(
        label="x", row=structs.replace(row, stages=stages, routes=(route,)), summary=summary, header=HEADER
    )
    reader = read(page("Graph", run_sections([graph]), facts=()))
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
        text = log_page(read_log(path), made=MADE)
        for expected in (title, "cores 2.0", "2026-01-01", "assumed profile (nobody)", "Estimates", "demand doubled"):
            assert expected in text
    assert len(readings) == 2, "two logs"


def log_of(path: Path, rows: Rows, origin: str = "live") -> RecordedLog:
    """A log as a server writes it, or a simulation."""
    setup, date = set_up(APPLICATION), "2026-11-29T01:02:03+00:00"
    header = header_of(setup, origin=origin, machine="EPYC, 2 cores", date=date)
    with FileLog(path, header) as log:
        for now_ns, record in rows:
            log.append(now_ns, record)
    return read_log(path)


def test_the_top_of_a_page_says_what_was_run_when_and_on_what(tmp_path: Path) -> None:
    found = read(log_page(log_of(tmp_path / "live.jsonl", STORY), made=MADE)).facts
    facts = ("date", "machine", "model", "deadline", "system", "sloop")
    assert list(found) == list(facts)
    assert found["date"] == "live run of 2026-11-29 01:02 UTC; page made 2026-11-29 03:09 UTC"
    assert found["machine"] == "EPYC, 2 cores"
    assert found["model"] == "small (only a profile)"
    assert found["deadline"] == "200 ms, from sending to the answer"
    assert (found["system"], found["sloop"]) == ("static", __version__)


def test_goodput_of_a_live_run_is_over_the_time_of_its_load(tmp_path: Path) -> None:
    """A server that waits an hour for 40 requests in 2 s, and another hour afterwards, served 20 a second."""
    hour_ms = 3_600_000.0
    rows: Rows = [(0, Decided("plan", "no requests"))]
    for place in range(40):
        sent_ms = hour_ms + 50.0 * place
        rows += [arrived(place, sent_ms, sent_ms), ended(sent_ms + 50, place, Outcome.SERVED)]
    rows.append((ms(2 * hour_ms), Decided("rest", "no requests")))
    log = log_of(tmp_path / "live.jsonl", rows)
    assert log_run(log).row.goodput_rps == pytest.approx(20.0)
    alone = log_run(log, only_load=True)
    assert alone.summary.duration_s == pytest.approx(2.0)
    assert alone.summary.seconds()[0].arrivals == 20
    simulated = log_of(tmp_path / "simulated.jsonl", rows, "sim")
    assert log_run(simulated).row.goodput_rps == pytest.approx(40 / 7200)


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
    row = summary.row(system="static", seed=3)
    run = ReportedRun(label="static", row=row, summary=summary, header=header, noted=NotedRecords(rows))
    text = page("Two", run_sections([run]), facts=())
    shown = read(text)
    check_tables(shown)
    for heading in ("Summary", "Applications", "Over time", "Hardware", "Versions", "Latency", "Decisions"):
        assert heading in shown.text
    for words in (
        "Version by version",
        "Versions of a over time",
        "rolled back: too &lt;late&gt;",
        "version 2 is canary with 50% of the requests",
        "1 time no plan could be made, for example: no new plan: &lt;nothing&gt;.",
        "a cores 0, b cores 1",
        "1 fast of 8 cores, 1 slow of 4 cores (1 on demand)",
        "latency, % of the deadline",
    ):
        assert words in text


def test_of_many_applications_those_with_the_most_requests_are_drawn() -> None:
    summary = RunSummary([Parts(f"m{n}") for n in range(30)], start_ns=0).fold(told(asks(1, 0, "m9")))
    run = ReportedRun(label="x", row=summary.row(system="x", seed=0), summary=summary, header=HEADER)
    text = page("Many", run_sections([run]), facts=())
    assert "The 8 applications with the most requests, of 30." in text
    assert ("details", {}) in read(text).tags, "thirty rows are folded"
