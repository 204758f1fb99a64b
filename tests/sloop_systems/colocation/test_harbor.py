"""Our placement on the models of the thesis, with the serving of its specification."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.solvers import harbor
from sloop.solvers.harbor import DeviceKind, HarborProblem, place_models, replaced
from sloop_systems.colocation.experiments.router import SERVING
from sloop_systems.colocation.experiments.scene import LANGUAGE_MIX, MIXED, VISION, models_of, named, placed_models
from sloop_systems.colocation.milp import mean_batch, most_goodput
from tests.solvers.test_harbor import check


def problem_of(names: Sequence[str], rate_rps: float, slo_ms: float, devices: int) -> HarborProblem:
    return HarborProblem(placed_models(names, rate_rps, slo_ms), (DeviceKind("V100", devices),), SERVING)


def test_the_estimate_is_closer_to_the_simulation_than_the_formula_of_the_specification() -> None:
    """Section 6.4 has both, for κ 1.0 and 1.18."""
    ours, by_formula = 0.0, 0.0
    for name, batch, replicas, rate_rps, slo_ms, formula, simulated in (
        ("efficientnet_b7", 8, 2, 433.34, 200, (433.34, 402.47), (437, 432)),
        ("efficientnet_b7", 64, 2, 433.34, 200, (252.38, 159.17), (217, 130)),
        ("efficientnet_b7", 16, 1, 433.34, 200, (21.60, 9.77), (26, 13)),
        ("gpt2", 32, 3, 276, 300, (142.27, 10.53), (131, 32)),
    ):
        (model,) = placed_models([name], rate_rps, slo_ms)
        option = next(each for each in model.options[0] if each.batch == batch)
        for slower, its, of_runs in zip((1.0, 1.18), formula, simulated, strict=True):
            found = replace(SERVING, slower=slower).in_time_rps(model, 0, option, replicas)
            assert found == pytest.approx(of_runs, rel=0.1, abs=10)
            ours, by_formula = ours + abs(found - of_runs), by_formula + abs(its - of_runs)
    assert ours < 0.6 * by_formula


@given(st.floats(1e-4, 5), st.sampled_from([1, 2, 4, 8, 32, 128]), st.floats(0, 300))
def test_sizes_of_batches(rate: float, most: int, wait_ms: float) -> None:
    found = harbor._batches(rate, most, wait_ms)
    assert math.fsum(batch.part for batch in found) == pytest.approx(1)
    assert all(1 <= batch.size <= most and 0 <= batch.build_ms <= wait_ms for batch in found)
    mean = math.fsum(batch.part * batch.size for batch in found)
    assert mean == pytest.approx(mean_batch(most, 1000 * rate, wait_ms), rel=0.03, abs=0.5)


def test_the_network_law() -> None:
    assert SERVING.transfer_ms(9_633_792) == pytest.approx(8.7, rel=0.05)
    assert SERVING.transfer_ms(4096) == pytest.approx(0.322, rel=0.05)


@given(
    st.sampled_from(VISION + MIXED),
    st.floats(0.1, 5000),
    st.floats(1, 2000),
    st.integers(1, 20),
    st.floats(0.5, 3),
    st.data(),
)
def test_estimates_are_rates_and_slower_is_never_better(
    name: str, rate_rps: float, slo_ms: float, replicas: int, slower: float, data: st.DataObject
) -> None:
    (model,) = placed_models([name], rate_rps, slo_ms)
    option = data.draw(st.sampled_from(model.options[0]))
    found = replace(SERVING, slower=slower).in_time_rps(model, 0, option, replicas)
    assert 0 <= found <= rate_rps * (1 + 1e-9)
    assert replace(SERVING, slower=1.1 * slower).in_time_rps(model, 0, option, replicas) <= found * (1 + 1e-6) + 1e-9
    assert replace(SERVING, slower=slower).in_time_rps(model, 0, option, replicas, 1.5) <= found * (1 + 1e-6) + 1e-9


def test_an_overloaded_replica_serves_what_comes_before_its_queue_is_too_long() -> None:
    """C6: about the rate times the slack, divided by the overload, of the horizon."""
    (model,) = placed_models(["gpt2"], 276, 300)
    option = model.options[0][0]
    found = replace(SERVING, slower=1.0, rpc_ms=0, network_ms=0, network_ms_per_mb=0).in_time_rps(model, 0, option, 2)
    law = 276 * (300 - 44.7) / (276 / (2 * 4 / 0.0369) - 1) / 8000
    assert law == pytest.approx(32.3, abs=0.2)
    assert found == pytest.approx(29.7, rel=0.15)
    longer = replace(SERVING, slower=1.0, horizon_s=80).in_time_rps(model, 0, option, 2)
    assert longer < found / 9, "it vanishes as the run gets longer"


def test_a_program_that_is_too_large_has_the_greedy_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(VISION, 740, 250, 4)
    best = place_models(problem)
    monkeypatch.setattr(harbor, "PROGRAM_MAX", 0)
    harbor._remembered.cache_clear()
    greedy = place_models(problem)
    check(problem, greedy)
    assert not greedy.proven
    assert 0.8 * best.value <= greedy.value <= best.value


def test_many_models_on_many_devices_are_placed_within_bounds() -> None:
    names = sorted({*VISION, *MIXED, *LANGUAGE_MIX}) * 3
    problem = problem_of(names, 300, 250, 40)
    found = place_models(problem)
    check(problem, found)
    assert found == place_models(problem)
    assert found.total_rps > 0.5 * 300 * len(names)


def test_it_serves_one_language_model_well_instead_of_two_badly() -> None:
    problem = problem_of(MIXED, 276, 300, 5)
    found = place_models(problem)
    assert found.proven
    served = dict(zip(MIXED, found.served_rps, strict=True))
    assert served["bert"] > 270
    assert found.total_rps > 820
    baseline = most_goodput(models_of(MIXED, 276, 300), 5)
    assert problem.evaluated([(0, content) for content in baseline.contents]).total_rps < 600


def test_batches_are_small_where_they_suffice() -> None:
    problem = problem_of(VISION, 433.34, 200, 6)
    batches = {
        int(name.split(" b")[1])
        for own in named(problem.models, [c for _, c in place_models(problem).contents])
        for name in own
    }
    assert max(batches) <= 16


def test_a_placement_stays_unless_another_is_better_by_the_gain() -> None:
    problem = problem_of(VISION, 433.34, 200, 5)
    found = place_models(problem)
    assert replaced(problem, found.contents, gain=0.02).contents == found.contents
    slightly = problem_of(VISION, 430, 200, 5)
    assert replaced(slightly, found.contents, gain=0.02).contents == found.contents
    doubled = problem_of(VISION, 900, 200, 5)
    assert replaced(doubled, found.contents, gain=0.02).contents != found.contents
