"""Rows and sizes in the figures of a run."""

import pytest

from sloop.actions import End
from sloop.app.load import load_scenario
from sloop.runlog.rows import RowCounts
from sloop.sim.scenarios import run_scenario
from sloop.units import ms
from sloop.vocabulary import Outcome, Request, RequestId


def counted(*requests: tuple[int, int, Outcome, float]) -> RowCounts:
    """Requests of so many rows of this size, with their end and what it took, in ms."""
    counts = RowCounts()
    for number, (rows, size, _, _) in enumerate(requests):
        counts.append(0, Request(RequestId(number), 0, 0, ms(100), rows=rows, size=size))
    for number, (_, _, outcome, took_ms) in enumerate(requests):
        counts.append(ms(took_ms), End(RequestId(number), outcome))
    return counts


def test_every_request_counts_once_with_all_its_rows() -> None:
    figures = counted(
        (4, 16, Outcome.SERVED, 10),
        (1, 16, Outcome.DROPPED, 100),
        (2, 512, Outcome.LATE, 130),
        (3, 512, Outcome.SERVED, 90),
    ).figures(2.0)
    assert (figures["rows"], figures["goodput_rows_per_s"]) == (10, 3.5)
    small, large = figures["sizes"]
    assert (small.size, small.requests, small.served, small.attainment) == (16, 2, 1, 0.5)
    assert (small.p50_ms, small.p99_ms) == (10, 10)
    assert (large.p50_ms, large.p99_ms) == (90, 130)


def test_ordinary_requests_have_no_figures_of_rows() -> None:
    assert counted((1, 0, Outcome.SERVED, 10)).figures(1.0) == {}
    assert counted((2, 0, Outcome.SERVED, 10)).figures(1.0)["sizes"] == ()


def test_many_sizes_are_told_in_classes() -> None:
    figures = counted(*((1, size, Outcome.SERVED, 1) for size in range(5, 15))).figures(1.0)
    assert [(each.size, each.requests) for each in figures["sizes"]] == [(6, 2), (8, 2), (12, 4), (16, 2)]


def test_a_simulation_tells_rows_and_what_it_assumed_of_their_sizes() -> None:
    latency = {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0}
    sized = {"sizes": [{"size": size, "latency_ms": latency} for size in (8, 32)]}
    scenario = {
        "name": "texts",
        "slo_ms": 200,
        "stages": [{"name": "only", "profile": {"latency_ms": latency, "max_batch": 8} | sized}],
        "system": "static",
        "cluster": {"nodes": [{"hardware": "custom", "cores": 4, "memory_bytes": 10**9}]},
        "trace": {"kind": "equal", "rate": 20, "rows": 2, "sizes": [8, 64]},
        "duration_s": 3,
    }
    loaded = load_scenario(scenario)
    row = run_scenario(loaded, loaded.systems[0]).row
    assert (row.requests, row.rows) == (60, 120)
    assert row.goodput_rows_per_s == pytest.approx(2 * row.goodput_rps)
    assert sum(each.requests for each in row.sizes) == 60
    assert "only/only: what rows of up to 64 take is extrapolated from 32" in row.assumed
    scenario["stages"] = [{"name": "only", "profile": {"latency_ms": latency, "max_batch": 8}}]
    loaded = load_scenario(scenario)
    assert any("take as long as typical ones" in line for line in run_scenario(loaded, loaded.systems[0]).row.assumed)
