"""NetNN's tables in closed form and by execution, its latency claims, and rows that follow from accuracies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from sloop_systems.comparison import REPRODUCTIONS
from sloop_systems.comparison.harness import Reproduction
from sloop_systems.comparison.rows import Row, difference
from sloop_systems.netnn import experiments as netnn
from sloop_systems.netnn.accuracy import ALONE, INTEGERS, MODELS, TENTH, TREES, AccuracyComparison, AccuracyTrial, play
from sloop_systems.netnn.emulator import run_in_lanes
from sloop_systems.netnn.experiments import offline
from sloop_systems.netnn.experiments.offline import (
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
from sloop_systems.netnn.mapper import Fabric, time_of
from sloop_systems.netnn.program import compile_network


def verdicts(rows: Sequence[Row]) -> dict[str, str]:
    return {row.metric: row.verdict for row in rows}


def test_table_5_as_printed_but_for_three_parameters() -> None:
    table = costs(alexnet(), "paper")
    three_more = {"conv3": (663_936, 21_227_520, 665_472)}
    assert {cost.name: (cost.parameters, cost.operations, cost.memory_bytes) for cost in table} == {
        name: cells for name, cells in (TABLE_5 | three_more).items() if name != "total"
    }
    assert sum(cost.operations for cost in table) == 91_086_653


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
    assert {row.verdict for row in rows} == {"reproduced", "derived", "fitted", "source-inconsistent", "within-bound"}


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
    (row,) = (row for row in offline.latency_rows() if "recirculates alone" in row.metric)
    assert "with passes of 400 ns, which the paper does not state" in row.note
    assert "24.4 ns, or 17 clones" in row.note
    assert found["clones with which the slowest layer is below 1 ms"] == "self"
    assert found["clones with which all layers are below 2 ms"] == "shape"
    assert recirculating(17).latency_ns < 2e6 < recirculating(16).latency_ns
    products = offline._products()
    assert time_of(Fabric(pass_ns=24.3), products).latency_ns < 2e6 < time_of(Fabric(pass_ns=24.5), products).latency_ns


def test_modelled_times_are_those_derived() -> None:
    assert {row.verdict for row in offline.time_rows()} == {"self"}


def test_table_6_by_execution() -> None:
    program = compile_network(flow_model())
    _, counts = run_in_lanes(program, inputs(flow_model(), 1), multiplier="shift-add")
    rows = offline.execution_rows(counts, program)
    assert Counter(row.verdict for row in rows) == {"reproduced": 4, "fitted": 12, "derived": 8}


def test_models_are_those_of_the_test_vectors() -> None:
    assert flow_model().run(inputs(flow_model(), 2)).ravel().tolist() == [857, -1070]
    assert small_model().run(inputs(small_model(), 2)).ravel().tolist() == [5804, 5746]


@pytest.mark.slow
def test_mini_alexnet_runs_on_switches() -> None:
    row = offline._alexnet_row()
    assert row.verdict == "self"
    assert row.note.endswith("4,880 copies; 42,797,824 products")


@pytest.mark.slow
def test_runners_agree() -> None:
    found = {row.metric: row.verdict for row in offline.agreement_rows(quick=True)}
    assert list(found.values()) == ["derived"] * 2 + ["self"] * 2 + ["within-bound"]


def test_mini_alexnet_is_timed_on_this_machine() -> None:
    (row,) = offline.runtime_rows(runs=1)
    assert row.ours > 0
    assert "measured" in row.note


GOOD: dict[str, tuple[float, float | None]] = {
    TREES: (0.58, 0.90),
    TENTH: (0.52, 0.62),
    **dict.fromkeys(netnn.SPLITS, (0.85, 0.97)),
    INTEGERS: (0.84, 0.96),
    ALONE: (0.83, None),
    netnn.BYTE: (0.80, 0.95),
    netnn.BASE10: (0.70, 0.90),
}
SAWTOOTH = (0.75, 0.83, 0.843, 0.905, 0.896, 0.94, 0.93, 0.96, 0.95, 0.975, 0.965)
"""Accuracies with 1, 2, … votes: a tie is decided by the sum of the logits."""


def compared(accuracies: Mapping[str, tuple[float, float | None]], points: Sequence[float]) -> AccuracyComparison:
    """Three seeds, a point apart in accuracy, but less in their differences."""
    found = AccuracyComparison(100, (1, 2, 3))
    for seed in found.seeds:
        for place, (name, (packet, flow)) in enumerate(accuracies.items()):
            apart = 0.01 * seed + 0.001 * (place * seed % 3)
            found.add(name, packet + apart, None if flow is None else flow + apart)
        found.by_points.append(tuple(value + 0.001 * seed for value in points))
    return found


def test_orders_of_accuracy() -> None:
    rows = netnn.accuracy_rows(compared(GOOD, SAWTOOTH))
    assert {row.verdict for row in rows} == {"shape", "fitted"}
    trees = next(row for row in rows if row.metric == f"{ALONE} - {TREES}, by packet")
    assert trees.paper == 83.0 - 58.0
    assert trees.ours == pytest.approx(25.0, abs=0.2)
    assert "95 % interval" in trees.note
    assert "100 flows tested with each of 3 seeds" in trees.note
    without = {name: value for name, value in GOOD.items() if name not in {netnn.BYTE, netnn.BASE10}}
    assert not [row for row in netnn.accuracy_rows(compared(without, SAWTOOTH)) if "byte" in row.metric]


@pytest.mark.parametrize(
    ("name", "accuracy", "metric"),
    [
        (ALONE, (0.579, None), f"{ALONE} - {TREES}, by packet"),
        (TENTH, (0.62, 0.62), f"{TREES} - {TENTH}, by packet"),
        (TENTH, (0.52, 0.899), f"{TREES} - {TENTH}, by flow"),
        (TREES, (0.58, 0.99), f"{netnn.MASKED} - {TREES}, by flow"),
        (netnn.MASKED, (0.85, 0.80), f"{netnn.MASKED} - {TREES}, by flow"),
        (netnn.SPLITS[1], (0.58, 0.97), f"{netnn.SPLITS[1]} - {TREES}, by packet"),
        (INTEGERS, (0.84, 0.90), f"{INTEGERS} - {netnn.MASKED}, by flow"),
        (netnn.BYTE, (0.90, 0.95), f"{netnn.MASKED} - {netnn.BYTE}, by packet"),
        (netnn.BASE10, (0.70, 0.96), f"{netnn.BYTE} - {netnn.BASE10}, by flow"),
    ],
)
def test_each_order_can_fail(name: str, accuracy: tuple[float, float | None], metric: str) -> None:
    rows = {row.metric: row for row in netnn.accuracy_rows(compared({**GOOD, name: accuracy}, SAWTOOTH))}
    assert rows[metric].verdict == "off"


@pytest.mark.parametrize(
    ("points", "metric"),
    [
        ((0.75, 0.83, 0.9, 0.905, 0.885, *SAWTOOTH[5:]), "least gain of one more vote"),
        ((*SAWTOOTH[:5], 0.99, *SAWTOOTH[6:]), "least gain of one more vote"),
        ((*SAWTOOTH[:3], 0.89, *SAWTOOTH[4:]), "votes of 4 points (up to packet 8)"),
        ((*SAWTOOTH[:7], 0.94, *SAWTOOTH[8:]), "votes of 8 points (up to packet 128)"),
    ],
)
def test_votes_that_do_not_help_are_off(points: tuple[float, ...], metric: str) -> None:
    rows = {row.metric: row.verdict for row in netnn.accuracy_rows(compared(GOOD, points))}
    assert rows[metric] == "off"
    assert list(rows.values()).count("off") == 1


def test_an_order_needs_more_than_chance() -> None:
    """Seeds that scatter show no strict order, and contradict no weak one."""
    apart = difference([60, 50, 61], [55, 58, 57])
    assert apart.mean == pytest.approx(1 / 3)
    assert apart.half == pytest.approx(4.30 * 7.234 / 3**0.5, rel=1e-3)
    assert apart.is_at_least(0)
    assert not difference([50, 51, 52], [60, 61, 62.5]).is_at_least(0)


@pytest.mark.parametrize("has_trees", [True, False])
def test_the_whole_reproduction(monkeypatch: pytest.MonkeyPatch, has_trees: bool) -> None:
    program = compile_network(flow_model())
    _, counts = run_in_lanes(program, inputs(flow_model(), 1), multiplier="shift-add")
    monkeypatch.setattr(netnn, "executed", lambda: (counts, 857, program))
    monkeypatch.setattr(netnn, "agreement_rows", lambda **_: [])
    monkeypatch.setattr(netnn, "runtime_rows", list)
    steps: list[float] = []

    def in_parallel(run: Any, trials: Sequence[AccuracyTrial], *, progress: Any, **_: Any) -> list[AccuracyComparison]:
        assert run is play
        assert {trial.seed for trial in trials} == {1}
        missing = {netnn.BYTE, netnn.BASE10} if has_trees else {netnn.BYTE, netnn.BASE10, "trees"}
        assert {trial.model for trial in trials} == set(MODELS) - missing
        progress(0.5, "seed 1: trees")
        given = {name: each for name, each in GOOD.items() if has_trees or not name.startswith("trees")}
        return [compared(given, SAWTOOTH)]

    monkeypatch.setattr(netnn, "in_parallel", in_parallel)
    monkeypatch.setattr(netnn, "find_spec", lambda name: name if has_trees else None)
    found: Reproduction = REPRODUCTIONS["netnn"](quick=True, data=None, progress=lambda share, _: steps.append(share))
    assert steps == sorted(steps)
    assert {row.experiment for row in found.rows} == {
        *("Table P5.1", "P5 latency", "flow model, modelled time", "Table P6.1", "accuracy")
    }
    assert any("trees" in row.metric for row in found.rows) == has_trees
    assert any("scikit-learn is not installed" in line for line in found.assumed) != has_trees
    assert [figure.name for figure in found.figures] == ["latency", "operations", "accuracy", "points"]
    assert "synthetic" in found.page(made=datetime.now(UTC))
