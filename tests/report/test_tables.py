"""Tables as people see them."""

import io

from msgspec import structs
from rich.console import Console

from sloop.report import run_tables
from sloop.report.explain.decision import RolloutStep
from sloop.report.explain.misses import MissReason
from sloop.report.run_tables import agreement, agreement_table
from sloop.report.tables import Table, as_rich, cell_text
from sloop.runlog.cost import NodeRow
from sloop.runlog.summary import ApplicationRow, EstimateError, RouteRow, RunRow, RunSummary, StageRow
from sloop.vocabulary import Node
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


def test_columns_without_a_value_are_left_out() -> None:
    table = Table("", ("name", "price", "note", "n"), (("a", None, "", 0), ("b", None, None, False)))
    assert table.filled == Table("", ("name", "n"), (("a", 0), ("b", False)))
    assert Table("", ("name", "price"), ()).filled.columns == ("name", "price")
    out = io.StringIO()
    Console(file=out, width=60).print(as_rich(table))
    assert "price" not in out.getvalue()


def test_a_table_upright() -> None:
    assert TABLE.transposed == Table(
        "Fruit", ("name", "apple", "fig|date", "kiwi"), (("each", 1.5, None, 12345), ("fresh", True, False, True))
    )


def test_tables_of_a_run() -> None:
    summary = RunSummary(GRAPH, start_ns=0).fold(STORY)
    row = summary.row(system="static", seed=1)
    assert run_tables.ends([row]).rows == (("static", 6, 100 * row.attainment, 2, 1, 1, 1, 220.0, 220.0),)
    assert run_tables.costs([row]).rows[0][:2] == ("static", 0.4)
    assert run_tables.waits([("static", summary)]).rows[0][2:5] == (60.0, 1.25, 2)
    assert run_tables.waits([("none", RunSummary(GRAPH))]).rows[0][4] == 0
    assert [row[0] for row in run_tables.worst_seconds(summary.seconds()).rows] == [1, 0]
    assert run_tables.estimate_errors([("static", summary.estimate_errors())]).rows == ()


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
    assert run_tables.stages([("x", row)]).rows == (("read", 9, 1.5, 4.0, 3, 3.0, 4, 1, 0, 2),)
    routes = run_tables.routes([("x", row)])
    assert routes.rows[0] == ("cut, read", 4, 50.0, 75.0, 80.0, 20.0, 90.0)
    assert routes.rows[1][0] == "others"
    shop = structs.replace(APPLICATION, requests=5, routes=(ROUTE,))
    of_shop = run_tables.routes([("x", structs.replace(row, applications=(shop,)))])
    assert [cells[2] for cells in of_shop.rows] == [80.0, 50.0], "of the requests of the application"
    several = run_tables.stages([("x", row), ("y", row)])
    assert several.columns[0] == "system"
    assert [row[:2] for row in several.rows] == [("x", "read"), ("y", "read")]


APPLICATION = ApplicationRow(
    name="shop", slo_ms=200.0, requests=8, served=6, late=1, dropped=1, rejected=0, failed=0, attainment=0.75,
    goodput_rps=3.0, mean_ms=50.0, p50_ms=40.0, p99_ms=210.0, core_seconds=12.0, usd=0.5, accuracy=0.8, cold_starts=1,
)  # fmt: skip
NODES = (NodeRow("c5.2xlarge", 7200.0, 0.68, 2, 0.25, 90.0), NodeRow("custom", 1800.0, 0.0, 1))


def test_applications_and_their_versions() -> None:
    versions = [structs.replace(APPLICATION, version="2", attainment_low=0.7, attainment_high=0.8)]
    assert run_tables.applications([("x", [APPLICATION])]).rows == (
        ("shop", 200.0, 8, 75.0, 1, 1, 0, 0, 40.0, 210.0, 12.0, 0.5, 0.8),
    )
    by_version = run_tables.applications([("x", versions)], "Version by version")
    assert (by_version.title, by_version.columns[:2], by_version.rows[0][:2]) == (
        *("Version by version", ("application", "version"), ("shop", "2")),
    )
    two = run_tables.applications([("x", [APPLICATION]), ("y", versions)])
    assert (two.columns[:3], [cells[:3] for cells in two.rows]) == (
        ("system", "application", "version"),
        [("x", "shop", ""), ("y", "shop", "2")],
    )


def test_without_requests_there_is_no_attainment() -> None:
    idle = structs.replace(APPLICATION, requests=0, attainment=1.0, attainment_low=1.0, attainment_high=1.0)
    run = structs.replace(row(1.0, None), requests=0, applications=(idle,))
    assert run_tables.ends([run]).rows[0][2] is None
    assert run_tables.applications([("x", [idle])]).rows[0][3] is None
    assert run_tables.ranges([run]).rows == ()


def test_ranges_of_applications_follow_that_of_their_run() -> None:
    sure = structs.replace(APPLICATION, attainment_low=0.7, attainment_high=0.8, p99_ms_low=200.0, p99_ms_high=220.0)
    run = structs.replace(row(0.75, 210.0), attainment_low=0.72, attainment_high=0.78)
    plain, together = run_tables.ranges([run]), run_tables.ranges([structs.replace(run, applications=(sure,))])
    assert plain.rows == (("x", "72–78", "", ""),)
    assert together.rows == (("x", "all", "72–78", "", ""), ("x", "shop", "70–80", "", "200–220"))
    assert run_tables.ranges([row(1.0, 1.0)]).rows == ()


def test_nodes_and_their_money() -> None:
    run = structs.replace(row(1.0, 5.0), nodes=NODES, node_usd=0.68)
    assert run_tables.nodes([("x", run)]).rows == (
        ("c5.2xlarge", 2, 2.0, 0.68, 25.0, 90.0),
        ("custom", 1, 0.5, None, None, None),
    )
    assert [cells[:2] for cells in run_tables.nodes([("x", run), ("y", run)]).rows][2:] == [
        *(("y", "c5.2xlarge"), ("y", "custom")),
    ]
    assert "USD of nodes" not in run_tables.costs([row(1.0, 5.0)]).columns
    priced = run_tables.costs([run])
    assert dict(zip(priced.columns, priced.rows[0], strict=True))["USD of nodes"] == 0.68


def test_nodes_are_worth_a_table_if_they_differ_or_change() -> None:
    one, other, rented = Node("a", "x", 1, 0), Node("b", "y", 1, 0), Node("c", "x", 1, 0, on_demand=True)
    assert [run_tables.nodes_vary(cluster) for cluster in ([], [one, one], [one, other], [one, rented])] == [
        *(False, False, True, True),
    ]


def test_reasons_and_rollouts() -> None:
    reasons = [MissReason("shop", "late", "too late", 3, 17, 1.5)]
    assert run_tables.miss_reasons(reasons, several=False).rows == ((3, "late", "too late", 17, 1.5),)
    assert run_tables.miss_reasons(reasons, several=True).columns[:2] == ("requests", "application")
    step = RolloutStep(2.0, "shop", "2", "canary", 0.25, "it is ready")
    assert run_tables.rollouts([step]).rows == ((2.0, "shop", "2", "canary", 25.0, "it is ready"),)


def test_estimates_by_kind_of_hardware_where_there_are_several() -> None:
    errors = [EstimateError("a", "v", kind, 1, 40.0, 50.0, 0.25) for kind in ("fast", "slow")]
    assert run_tables.estimate_errors([("x", errors[:1])]).rows == (("a", "v", 1, 40.0, 50.0, 25.0, 25.0),)
    rows = run_tables.estimate_errors([("x", errors)]).rows
    assert [cells[:3] for cells in rows] == [("a", "v", "fast"), ("a", "v", "slow")]


def test_estimates_of_several_runs_name_the_run() -> None:
    error = EstimateError("a", "v", "fast", 1, 40.0, 50.0, 0.25)
    rows = run_tables.estimate_errors([("x", [error]), ("y", [error])]).rows
    assert [cells[:3] for cells in rows] == [("x", "a", "v"), ("y", "a", "v")]


def row(attainment: float, p99_ms: float | None) -> RunRow:
    found = RunSummary(GRAPH).row(system="x", seed=None)
    return structs.replace(found, requests=100, attainment=attainment, p99_ms=p99_ms)


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
