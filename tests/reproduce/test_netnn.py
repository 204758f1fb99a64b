"""NetNN's tables in closed form and by execution, its latency claims, and rows that follow from accuracies."""

from collections.abc import Sequence
from typing import Any

import pytest

from sloop.innet.accuracy import AccuracyComparison
from sloop.innet.emulator import run_in_lanes
from sloop.innet.program import compile_network
from sloop.reproduce import REPRODUCTIONS, netnn
from sloop.reproduce.harness import Reproduction
from sloop.reproduce.netnn import offline
from sloop.reproduce.netnn.offline import (
    OPERATIONS_AT,
    STRICT_OPERATIONS,
    TABLE_5,
    alexnet,
    costs,
    flow_model,
    inputs,
    latencies_ms,
    operations_needed,
    recirculating,
    small_model,
)
from sloop.reproduce.rows import Row


def verdicts(rows: Sequence[Row]) -> dict[str, str]:
    return {row.metric: row.verdict for row in rows}


def test_table_5_as_printed() -> None:
    table = costs(alexnet(), "paper")
    assert {cost.name: (cost.parameters, cost.operations, cost.memory_bytes) for cost in table} == {
        name: cells for name, cells in TABLE_5.items() if name != "total"
    }
    totals = [sum(getattr(cost, name) for cost in table) for name in ("parameters", "operations", "memory_bytes")]
    assert totals == [15_483_213, 91_086_653, 15_515_287]


def test_table_5_counted_strictly() -> None:
    table = costs(alexnet(), "strict")
    assert [cost.operations for cost in table] == [0, *STRICT_OPERATIONS]
    assert sum(cost.operations for cost in table) == 91_022_902
    assert next(cost.parameters for cost in table if cost.name == "conv3") == 663_936
    assert sum(cost.parameters for cost in table) == 15_483_210
    assert sum(cost.memory_bytes for cost in table) == 15_515_284


def test_rows_of_table_5() -> None:
    rows = offline.cost_rows()
    assert {row.metric for row in rows if row.verdict == "source-inconsistent"} == {
        *("parameters, conv3", "parameters, total"),
        *("weights and activations, conv3", "weights and activations, total"),
    }
    assert {row.verdict for row in rows} == {"reproduced", "source-inconsistent", "within-bound"}


def test_latencies_by_operations_of_a_pass() -> None:
    derived = [(6.225, 15.18), (0.778, 1.898), (0.622, 1.518), (0.311, 0.759), (0.195, 0.474), (0.097, 0.237)]
    for at, (slowest, total) in zip(OPERATIONS_AT, derived, strict=True):
        assert latencies_ms(at) == pytest.approx((slowest, total), abs=0.006 if at == 1 else 0.0006)


def test_constants_that_the_claims_need() -> None:
    assert operations_needed(0, 1.0) == pytest.approx(6.2246, abs=5e-5)
    assert operations_needed(1, 2.0) == pytest.approx(7.5906, abs=5e-5)


def test_the_published_latency_does_not_survive_recirculation() -> None:
    found = verdicts(offline.latency_rows())
    assert found["all layers"] == "within-bound"
    assert found["all layers, each packet recirculates alone"] == "off"
    assert found["the same, derived"] == "reproduced"
    assert found["clones with which the slowest layer is below 1 ms"] == "reproduced"
    assert found["clones with which all layers are below 2 ms"] == "shape"
    assert recirculating(17).latency_ns < 2e6 < recirculating(16).latency_ns


def test_modelled_times_are_those_derived() -> None:
    assert {row.verdict for row in offline.time_rows()} == {"reproduced"}


def test_table_6_by_execution() -> None:
    program = compile_network(flow_model())
    _, counts = run_in_lanes(program, inputs(flow_model(), 1), multiplier="shift-add")
    rows = offline.execution_rows(counts, program)
    assert {row.verdict for row in rows} == {"reproduced"}
    assert len([row for row in rows if row.paper is not None]) == 16


def test_models_are_those_of_the_test_vectors() -> None:
    assert flow_model().run(inputs(flow_model(), 2)).ravel().tolist() == [857, -1070]
    assert small_model().run(inputs(small_model(), 2)).ravel().tolist() == [5804, 5746]


@pytest.mark.slow
def test_mini_alexnet_runs_on_switches() -> None:
    row = offline._alexnet_row()
    assert row.verdict == "reproduced"
    assert row.note.endswith("4,880 copies; 42,797,824 products")


@pytest.mark.slow
def test_runners_agree() -> None:
    found = {row.metric: row.verdict for row in offline.agreement_rows(quick=True)}
    assert list(found.values()) == ["reproduced"] * 4 + ["within-bound"]


def test_mini_alexnet_is_timed_on_this_machine() -> None:
    (row,) = offline.runtime_rows(runs=1)
    assert row.ours > 0
    assert "measured" in row.note


def compared(*, good: bool) -> AccuracyComparison:
    """Accuracies of two seeds as they are expected, or all at chance."""
    found = AccuracyComparison(100, (1, 2))
    for _ in found.seeds:
        for name, packet, flow in (
            ("trees", 0.58, 0.90),
            ("trees, random tenth", 0.52, 0.62),
            *((name, 0.85, 0.97) for name in netnn.SPLITS),
            ("network, integers", 0.84, 0.96),
            ("network of packets", 0.83, None),
            ("network, byte", 0.80, 0.95),
            ("network, base10", 0.70, 0.90),
        ):
            found.add(name, packet if good else 0.4, flow if good or flow is None else 0.4)
        found.by_points.append(tuple(0.88 + 0.01 * point for point in range(11)) if good else (0.5, 0.4) + (0.3,) * 9)
    return found


def test_orders_of_accuracy() -> None:
    rows = netnn.accuracy_rows(compared(good=True))
    assert {row.verdict for row in rows} == {"shape"}
    assert next(row for row in rows if row.metric == "trees, by packet").paper == 58.0
    bad = {row.metric: row.verdict for row in netnn.accuracy_rows(compared(good=False))}
    assert bad["network of packets, by packet"] == "off"
    assert bad["largest loss by one more point's vote"] == "off"
    assert bad["votes of 8 points (up to packet 128)"] == "off"


def test_the_whole_reproduction(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile_network(flow_model())
    _, counts = run_in_lanes(program, inputs(flow_model(), 1), multiplier="shift-add")
    monkeypatch.setattr(netnn, "executed", lambda: (counts, 857, program))
    monkeypatch.setattr(netnn, "agreement_rows", lambda **_: [])
    monkeypatch.setattr(netnn, "runtime_rows", list)
    steps: list[float] = []

    def compare(*, report: Any, **_: Any) -> AccuracyComparison:
        report("seed 1: trees")
        return compared(good=True)

    monkeypatch.setattr(netnn, "compare", compare)
    found: Reproduction = REPRODUCTIONS["netnn"](quick=True, data=None, progress=lambda share, _: steps.append(share))
    assert steps == sorted(steps)
    assert {row.experiment for row in found.rows} == {
        *("Table P5.1", "P5 latency", "flow model, modelled time", "Table P6.1", "accuracy")
    }
    assert [figure.name for figure in found.figures] == ["latency", "operations", "accuracy", "points"]
    assert "synthetic" in found.page()
