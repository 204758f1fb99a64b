"""Tables as people see them."""

import io

from msgspec import structs
from rich.console import Console

from sloop.report import tables
from sloop.report.metrics import Metrics, fold
from sloop.report.rows import RouteRow, StageRow
from sloop.report.tables import Table, as_markdown, as_rich, as_text, shown
from sloop.runlog import Record

TABLE = Table(
    "Fruit", ("name", "each", "fresh"), (("apple", 1.5, True), ("fig|date", None, False), ("kiwi", 12345, True))
)


def test_cells() -> None:
    assert [shown(cell) for cell in (None, float("nan"), True, 3.0, 0.12345, 1234.5, 98765, "x")] == [
        "–", "–", "yes", "3", "0.1235", "1,234", "98,765", "x",
    ]  # fmt: skip


def test_as_text() -> None:
    assert as_text(TABLE).splitlines() == [
        "Fruit",
        "name        each  fresh",
        "────────  ──────  ─────",
        "apple        1.5  yes",
        "fig|date       –  no",
        "kiwi      12,345  yes",
    ]


def test_as_markdown() -> None:
    assert as_markdown(TABLE).splitlines() == [
        "**Fruit**",
        "",
        "| name | each | fresh |",
        "| --- | ---: | --- |",
        "| apple | 1.5 | yes |",
        "| fig\\|date | – | no |",
        "| kiwi | 12,345 | yes |",
    ]


def test_as_rich() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(as_rich(TABLE))
    assert "fig|date" in out.getvalue()


def test_tables_of_a_run(story: list[tuple[int, Record]]) -> None:
    metrics = fold(story, Metrics(start_ns=0))
    row = metrics.row(system="static", seed=1)
    assert tables.ends([row]).rows == (("static", 6, 100 * row.attainment, 2, 1, 1, 1, 220.0, 220.0),)
    assert tables.costs([row]).rows[0][:2] == ("static", 0.4)
    assert tables.waits([("static", metrics)]).rows[0][2:5] == (60.0, 1.25, 2)
    assert tables.waits([("none", Metrics())]).rows[0][4] == 0
    assert [row[0] for row in tables.worst_seconds(metrics.seconds()).rows] == [1, 0]
    assert tables.beliefs(metrics.service_errors()).rows == ()


STAGE = StageRow(
    stage="read", visits=9, mean_wait_ms=1.5, max_wait_ms=4.0, batches=3, mean_batch=3.0, max_batch=4, dropped=1,
    rejected=0, failed=2,
)  # fmt: skip
ROUTE = RouteRow(stages=("cut", "read"), slo_ms=80.0, answered=4, served=3, mean_ms=20.0, p99_ms=90.0)


def test_stages_and_ways_of_one_run_and_of_several() -> None:
    row = structs.replace(
        Metrics().row(system="x", seed=0),
        requests=8,
        stages=(STAGE,),
        routes=(ROUTE, structs.replace(ROUTE, stages=())),
    )
    assert tables.stages([("x", row)]).rows == (("read", 9, 1.5, 4.0, 3, 3.0, 4, 1, 0, 2),)
    ways = tables.routes([("x", row)])
    assert ways.rows[0] == ("cut, read", 4, 50.0, 75.0, 80.0, 20.0, 90.0)
    assert ways.rows[1][0] == "rarer ones"
    several = tables.stages([("x", row), ("y", row)])
    assert several.columns[0] == "system"
    assert [row[:2] for row in several.rows] == [("x", "read"), ("y", "read")]
