"""Tables as people see them."""

import io

from msgspec import structs
from rich.console import Console

from sloop.report import tables
from sloop.report.tables import Table, agreement, agreement_table, as_rich, cell_text
from sloop.runlog.summary import RouteRow, RunRow, RunSummary, StageRow
from tests.runlog.story import GRAPH, STORY

TABLE = Table(
    "Fruit", ("name", "each", "fresh"), (("apple", 1.5, True), ("fig|date", None, False), ("kiwi", 12345, True))
)


def test_cells() -> None:
    assert [cell_text(cell) for cell in (None, float("nan"), True, 3.0, 0.12345, 1234.5, 98765, "x")] == [
        "–", "–", "yes", "3", "0.1235", "1,234", "98,765", "x",
    ]  # fmt: skip


def test_as_rich() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(as_rich(TABLE))
    assert "fig|date" in out.getvalue()


def test_tables_of_a_run() -> None:
    summary = RunSummary(GRAPH, start_ns=0).fold(STORY)
    row = summary.row(system="static", seed=1)
    assert tables.ends([row]).rows == (("static", 6, 100 * row.attainment, 2, 1, 1, 1, 220.0, 220.0),)
    assert tables.costs([row]).rows[0][:2] == ("static", 0.4)
    assert tables.waits([("static", summary)]).rows[0][2:5] == (60.0, 1.25, 2)
    assert tables.waits([("none", RunSummary(GRAPH))]).rows[0][4] == 0
    assert [row[0] for row in tables.worst_seconds(summary.seconds()).rows] == [1, 0]
    assert tables.estimate_errors(summary.estimate_errors()).rows == ()


STAGE = StageRow(
    stage="read", visits=9, mean_wait_ms=1.5, max_wait_ms=4.0, batches=3, mean_batch=3.0, max_batch=4, dropped=1,
    rejected=0, failed=2,
)  # fmt: skip
ROUTE = RouteRow(stages=("cut", "read"), slo_ms=80.0, answered=4, served=3, mean_ms=20.0, p99_ms=90.0)


def test_stages_and_routes_of_one_run_and_of_several() -> None:
    row = structs.replace(
        RunSummary(GRAPH).row(system="x", seed=0),
        requests=8,
        stages=(STAGE,),
        routes=(ROUTE, structs.replace(ROUTE, stages=())),
    )
    assert tables.stages([("x", row)]).rows == (("read", 9, 1.5, 4.0, 3, 3.0, 4, 1, 0, 2),)
    routes = tables.routes([("x", row)])
    assert routes.rows[0] == ("cut, read", 4, 50.0, 75.0, 80.0, 20.0, 90.0)
    assert routes.rows[1][0] == "others"
    several = tables.stages([("x", row), ("y", row)])
    assert several.columns[0] == "system"
    assert [row[:2] for row in several.rows] == [("x", "read"), ("y", "read")]


def row(attainment: float, p99_ms: float | None) -> RunRow:
    return structs.replace(RunSummary(GRAPH).row(system="x", seed=None), attainment=attainment, p99_ms=p99_ms)


def test_live_and_simulated_close_enough() -> None:
    attainment, p99, *others = agreement(row(0.99, 100.0), row(0.985, 109.0))
    assert (attainment.agrees, p99.agrees) == (True, True)
    assert round(p99.difference or 0, 6) == 9.0
    assert {other.agrees for other in others} == {None}


def test_live_and_simulated_too_far_apart() -> None:
    attainment, p99, *_ = agreement(row(0.99, 100.0), row(0.97, 89.0))
    assert (attainment.agrees, p99.agrees) == (False, False)


def test_where_one_answered_nothing() -> None:
    assert agreement(row(1, None), row(1, 5.0))[1].agrees is False
    assert agreement(row(1, None), row(1, None))[1].agrees is True
    assert agreement(row(1, 0.0), row(1, 5.0))[1].agrees is False


def test_agreement_as_a_table() -> None:
    table = agreement_table(agreement(row(0.99, 100.0), row(0.985, 109.0)))
    assert [cells[0] for cells in table.rows][:2] == ["attainment", "p99"]
    assert table.rows[0][-1] is True
