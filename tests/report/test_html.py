"""One file, complete, escaped, and fit for a screen reader."""

from html.parser import HTMLParser

from msgspec import structs

from sloop.actions import Decided
from sloop.report.explain import reasons
from sloop.report.html import DECISIONS_MAX, Decisions, Section, page, run_page
from sloop.report.metrics import Metrics, fold
from sloop.report.rows import RouteRow, StageRow
from sloop.report.tables import Table
from sloop.runlog import Header, Record

Rows = list[tuple[int, Record]]
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


def test_a_run_on_a_page(story: Rows) -> None:
    metrics, decisions = Metrics(start_ns=0), Decisions()
    fold(story, metrics)
    for now_ns, record in story:
        decisions.append(now_ns, record)
    header = Header(origin="sim", application={"name": "demo"}, system="static", seed=3, software={"sloop": "0.1.0"})
    row = metrics.row(system="static", seed=3, assumed=["classify/small: assumed profile <by us>"])
    text = run_page(
        "Demo & more", [(row, metrics)], header=header, slo_ms=200, decisions=decisions, reasons=reasons(story)
    )
    reader = read(text)
    headings = [reader.text[i] for i in range(len(reader.text))]
    for heading in ("Summary", "Over time", "Why requests were missed", "Decisions", "Where the numbers come from"):
        assert heading in headings
    assert "<by us>" not in text
    assert "Demo &amp; more" in text
    assert "demand doubled" in text
    assert "static answered 16.67 % of 6 requests in time, p99 220 ms" in text
    assert "lean on 1 thing that nobody measured" in text


def test_nothing_is_fetched(story: Rows) -> None:
    metrics = fold(story, Metrics(start_ns=0))
    row = metrics.row(system="static", seed=3)
    text = run_page("Two", [(row, metrics), (row, metrics)])
    for tag, attributes in read(text).tags:
        assert tag not in {"script", "link", "img", "iframe"}
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "static 0" in text
    assert "Nothing here leans on" in text


def test_tables_have_headers_and_pictures_have_names(story: Rows) -> None:
    metrics = fold(story, Metrics(start_ns=0))
    tags = read(run_page("One", [(metrics.row(system="static", seed=3), metrics)])).tags
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
    decisions = Decisions()
    for now_ns in range(DECISIONS_MAX + 7):
        decisions.append(now_ns, Decided("lost", "gone", "a"))
    assert (len(decisions.notes), decisions.left_out) == (DECISIONS_MAX, 7)
    text = run_page("Many", [(Metrics().row(system="x", seed=0), Metrics())], decisions=decisions)
    assert "7 more are in the log" in text


def test_a_graph_has_a_row_for_each_stage_and_each_way() -> None:
    stages = tuple(
        StageRow(
            stage=name,
            visits=9,
            mean_wait_ms=None,
            max_wait_ms=None,
            batches=0,
            mean_batch=None,
            max_batch=0,
            dropped=0,
            rejected=0,
            failed=0,
        )
        for name in ("cut", "read <it>")
    )
    route = RouteRow(stages=("cut",), slo_ms=77.0, answered=4, served=3, mean_ms=20.0, p99_ms=90.0)
    metrics = Metrics()
    row = structs.replace(metrics.row(system="x", seed=0), stages=stages, routes=(route,))
    text = run_page("Graph", [(row, metrics)], slo_ms=200)
    reader = read(text)
    for said in ("Stages", "Stage by stage", "Ways through the graph", "read <it>", "77"):
        assert said in reader.text
    assert "Stages" not in read(run_page("One", [(metrics.row(system="x", seed=0), metrics)])).text
