"""Live against simulated."""

from msgspec import structs

from sloop.report.compare import agreement, as_table
from sloop.report.metrics import Metrics
from sloop.report.rows import RunRow


def row(attainment: float, p99_ms: float | None) -> RunRow:
    return structs.replace(Metrics().row(system="x", seed=None), attainment=attainment, p99_ms=p99_ms)


def test_close_enough() -> None:
    attainment, p99, *others = agreement(row(0.99, 100.0), row(0.985, 109.0))
    assert (attainment.agrees, p99.agrees) == (True, True)
    assert round(p99.apart or 0, 6) == 9.0
    assert {other.agrees for other in others} == {None}


def test_too_far_apart() -> None:
    attainment, p99, *_ = agreement(row(0.99, 100.0), row(0.97, 89.0))
    assert (attainment.agrees, p99.agrees) == (False, False)


def test_where_one_answered_nothing() -> None:
    assert agreement(row(1, None), row(1, 5.0))[1].agrees is False
    assert agreement(row(1, None), row(1, None))[1].agrees is True
    assert agreement(row(1, 0.0), row(1, 5.0))[1].agrees is False


def test_as_a_table() -> None:
    table = as_table(agreement(row(0.99, 100.0), row(0.985, 109.0)))
    assert [cells[0] for cells in table.rows][:2] == ["attainment", "p99"]
    assert table.rows[0][-1] is True
