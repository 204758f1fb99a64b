"""What a report shows; a log is all that the page of a run needs. How it looks, tests/page tries in a browser."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

from sloop import __version__
from sloop.actions import Decided, VersionState
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.events import Deployed
from sloop.page.report import log_page, page, runs_page
from sloop.profile.profile import Profile, Quadratic
from sloop.report import run_tables
from sloop.report.sections import (
    DECISIONS_MAX,
    TEXT_CHARS_MIN,
    UPRIGHT_ROWS_MAX,
    NotedRecords,
    ReportedRun,
    Section,
    log_run,
    run_sections,
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


class Shown:
    """What the report in a page shows."""

    def __init__(self, page_text: str) -> None:
        (data,) = re.findall(r'<script type="application/json" id="picture">(.*?)</script>', page_text)
        report = json.loads(data)["report"]
        sections = report["sections"]
        tables = [table for section in sections for table in section["tables"]]
        self.facts: dict[str, str] = dict(report["facts"])
        self.words: dict[str, str] = report["words"]
        self.tables: list[list[list[str]]] = [[table["columns"], *table["rows"]] for table in tables]
        """Rows of cells, the first of them the headings."""
        self.explained = {word for table in tables for word in table["words"] if word}
        self.folded = [section["title"] for section in sections if section["folded"]]
        self.figures: list[str] = [figure["svg"] for section in sections for figure in section["figures"]]
        cells = [cell for rows in self.tables for row in rows for cell in row]
        paragraphs = [text for section in sections for text in (section["title"], *section["text"])]
        self.text: list[str] = [report["title"], report["lead"], *paragraphs, *cells]
        self.text += [table["title"] for table in tables]

    def has(self, text: str) -> bool:
        return any(text in shown for shown in (*self.text, *self.figures))


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
    reader = Shown(text)
    for heading in ("Summary", "Over time", "Why requests were missed", "Decisions", "Where the numbers come from"):
        assert heading in reader.text
    assert "<by us>" not in text, "no markup in what others have written"
    assert "<title>Demo &amp; more</title>" in text
    assert reader.has("classify/small: assumed profile <by us>")
    assert reader.has("demand doubled")
    assert reader.has("static answered 16.67 % of 6 requests in time, p99 220 ms")
    assert reader.has("depend on 1 value that were not measured")
    assert "Stages" not in reader.text, "there is but one"


def test_nothing_is_fetched() -> None:
    text = page_of(STORY)
    assert not re.findall(r'<(?:link|img|iframe)[^>]*(?:src|href)="(?!data:)', text)
    assert not re.findall(r"<script[^>]* src", text)
    imports = json.loads(re.findall(r'<script type="importmap">(.*?)</script>', text)[0])["imports"]
    assert {url.partition(",")[0] for url in imports.values()} == {"data:text/javascript;base64"}


def test_a_page_of_ones_own() -> None:
    section = Section(title="A", text=("one </script> <two>",), tables=(Table("", ("x",), ()),), folded=True)
    reader = Shown(page("Own", [section], facts=[("who", "<me>")], lead="why & how"))
    assert "one </script> <two>" in reader.text
    assert reader.folded == ["A"]
    assert "why & how" in reader.text
    assert (reader.facts, reader.words) == ({"who": "<me>"}, {}), "no word needs an explanation"


def check_tables(reader: Shown) -> None:
    """What holds for each table of each page: few rows stand upright, and no column is empty."""
    assert reader.tables
    for headings, *rows in reader.tables:
        assert all(len(row) == len(headings) for row in rows)
        has_text = any(len(cell) > TEXT_CHARS_MIN for row in rows for cell in row)
        assert has_text or len(rows) > UPRIGHT_ROWS_MAX or len(headings) <= 1 + UPRIGHT_ROWS_MAX
        for cells in list(zip(*rows, strict=True))[1:]:
            assert set(cells) - {"", "–"}, headings


def test_no_column_is_empty() -> None:
    reader = Shown(page_of(STORY))
    check_tables(reader)
    assert reader.figures
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
    reader = Shown(page_of(STORY))
    headings = {cell for rows in reader.tables for cell in (*rows[0], *(row[0] for row in rows))}
    words = {word_of(heading) for heading in headings} - {""}
    assert {"attainment", "core-seconds", "p99"} <= words
    assert words <= set(reader.words)
    assert reader.explained <= set(reader.words)
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
    assert Shown(page_of([(0, Decided("lost", "gone", "a"))])).has("lost: a replica died and is replaced")
    assert {record.kind for _, record in STORY if isinstance(record, Decided)} & set(KINDS) == {"plan"}


def test_several_runs_side_by_side() -> None:
    runs = [run_of(STORY, "one"), run_of(STORY[:20], "two")]
    text = runs_page(runs, made=MADE)
    reader = Shown(text)
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
    reader = Shown(page("Graph", run_sections([graph]), facts=()))
    for text in ("Stages", "Stage by stage", "Routes through the graph", "read <it>", "77"):
        assert reader.has(text)


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
        shown = Shown(log_page(read_log(path), made=MADE))
        for expected in (title, "cores 2.0", "assumed profile (nobody)", "Estimates", "demand doubled"):
            assert shown.has(expected)
        assert "2026-01-01" in shown.facts["date"]
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
    found = Shown(log_page(log_of(tmp_path / "live.jsonl", STORY), made=MADE)).facts
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
    shown = Shown(text)
    check_tables(shown)
    for heading in ("Summary", "Applications", "Over time", "Hardware", "Versions", "Latency", "Decisions"):
        assert heading in shown.text
    for words in (
        "Version by version",
        "Versions of a over time",
        "rolled back: too <late>",
        "version 2 is canary with 50% of the requests",
        "1 time no plan could be made, for example: no new plan: <nothing>.",
        "a cores 0, b cores 1",
        "1 fast of 8 cores, 1 slow of 4 cores (1 on demand)",
        "latency, % of the deadline",
    ):
        assert shown.has(words), words


def test_of_many_applications_those_with_the_most_requests_are_drawn() -> None:
    summary = RunSummary([Parts(f"m{n}") for n in range(30)], start_ns=0).fold(told(asks(1, 0, "m9")))
    run = ReportedRun(label="x", row=summary.row(system="x", seed=0), summary=summary, header=HEADER)
    text = page("Many", run_sections([run]), facts=())
    assert "The 8 applications with the most requests, of 30." in Shown(text).text
    assert Shown(text).folded == ["Applications"]
