"""Our placement: its estimate, the best value against all placements, fairness, prices, bounds, and least change."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.solvers import harbor
from sloop.solvers.colocation import WHOLE, BatchOption, Content, mean_batch, most_goodput, needs
from sloop.solvers.harbor import DeviceKind, HarborProblem, PlacedModel, ServingAssumptions, by_kind, place, replaced
from sloop_systems.colocation.experiments.scene import LANGUAGE_MIX, MIXED, VISION, models_of, named, placed_models


def problem_of(names: Sequence[str], rate_rps: float, slo_ms: float, devices: int) -> HarborProblem:
    return HarborProblem(placed_models(names, rate_rps, slo_ms), (DeviceKind("V100", devices),))


# The estimate


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
            found = ServingAssumptions(slower=slower).in_time_rps(model, 0, option, replicas)
            assert found == pytest.approx(of_runs, rel=0.1, abs=10)
            ours, by_formula = ours + abs(found - of_runs), by_formula + abs(its - of_runs)
    assert ours < 0.6 * by_formula


@settings(max_examples=40, deadline=None)
@given(st.floats(1, 500), st.floats(-0.5, 0.5), st.floats(0.5, 30), st.floats(500, 20_000))
def test_what_waits_is_a_reflected_brownian_motion(limit: float, growth: float, spread: float, horizon: float) -> None:
    """The mean over time of its known distribution at each time, by many small steps."""

    def below(at: float) -> float:
        deviation = math.sqrt(spread * at)
        back = harbor._normal((-limit - growth * at) / deviation)
        returned = math.exp(2 * growth * limit / spread + math.log(back)) if back > 0 else 0.0
        return harbor._normal((limit - growth * at) / deviation) - returned

    steps = 2000
    mean = math.fsum(below(horizon * (step + 0.5) / steps) for step in range(steps)) / steps
    assert harbor._share_below(limit, growth, spread, horizon) == pytest.approx(mean, abs=2e-3)


def test_what_waits_in_the_long_run_and_in_an_overload() -> None:
    """Kingman's exponential, and what comes before the queue is too long."""
    assert harbor._share_below(50, -0.1, 4.0, 1e9) == pytest.approx(1 - math.exp(-2 * 0.1 * 50 / 4), abs=1e-4)
    assert harbor._share_below(50, 0.25, 1e-6, 8000) == pytest.approx(50 / 0.25 / 8000, rel=1e-3)
    near = [harbor._share_below(50, growth, 4.0, 8000) for growth in (-1e-3, -1e-5, 0.0, 1e-5, 1e-3)]
    assert near == sorted(near, reverse=True), "without a jump at a load of 1"
    assert near[0] - near[-1] < 0.05


@given(st.floats(1e-4, 5), st.sampled_from([1, 2, 4, 8, 32, 128]), st.floats(0, 300))
def test_sizes_of_batches(rate: float, most: int, wait_ms: float) -> None:
    found = harbor._batches(rate, most, wait_ms)
    assert math.fsum(batch.part for batch in found) == pytest.approx(1)
    assert all(1 <= batch.size <= most and 0 <= batch.build_ms <= wait_ms for batch in found)
    mean = math.fsum(batch.part * batch.size for batch in found)
    assert mean == pytest.approx(mean_batch(most, 1000 * rate, wait_ms), rel=0.03, abs=0.5)


def test_the_network_law() -> None:
    assert ServingAssumptions().transfer_ms(9_633_792) == pytest.approx(8.7, rel=0.05)
    assert ServingAssumptions().transfer_ms(4096) == pytest.approx(0.322, rel=0.05)


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
    found = ServingAssumptions(slower=slower).in_time_rps(model, 0, option, replicas)
    assert 0 <= found <= rate_rps * (1 + 1e-9)
    assert ServingAssumptions(slower=1.1 * slower).in_time_rps(model, 0, option, replicas) <= found * (1 + 1e-6) + 1e-9
    assert ServingAssumptions(slower=slower).in_time_rps(model, 0, option, replicas, 1.5) <= found * (1 + 1e-6) + 1e-9


def test_an_overloaded_replica_serves_what_comes_before_its_queue_is_too_long() -> None:
    """C6: about the rate times the slack, divided by the overload, of the horizon."""
    (model,) = placed_models(["gpt2"], 276, 300)
    option = model.options[0][0]
    found = ServingAssumptions(slower=1.0, rpc_ms=0, network_ms=0, network_ms_per_mb=0).in_time_rps(model, 0, option, 2)
    law = 276 * (300 - 44.7) / (276 / (2 * 4 / 0.0369) - 1) / 8000
    assert law == pytest.approx(32.3, abs=0.2)
    assert found == pytest.approx(29.7, rel=0.15)
    longer = ServingAssumptions(slower=1.0, horizon_s=80).in_time_rps(model, 0, option, 2)
    assert longer < found / 9, "it vanishes as the run gets longer"


# Placements


def all_placements(problem: HarborProblem) -> Iterator[tuple[list[tuple[int, Content]], float]]:
    """Every choice of columns whose replicas fit on the devices, with its value; without neighbours' slowdown."""
    columns = [[None, *(each for each in problem.columns() if each.model == at)] for at in range(len(problem.models))]
    for chosen in itertools.product(*columns):
        picked = [each for each in chosen if each is not None]
        contents = packed(
            problem, [(each.kind, each.model, each.option) for each in picked for _ in range(each.replicas)]
        )
        if contents is not None:
            yield contents, math.fsum(map(problem.worth, picked))


def packed(
    problem: HarborProblem, replicas: Sequence[tuple[int, int, BatchOption]]
) -> list[tuple[int, Content]] | None:
    """Some way to put the replicas on the devices; None if there is none."""
    devices: list[tuple[int, Content]] = []

    def search(at: int) -> bool:
        if at == len(replicas):
            return True
        kind, model, option = replicas[at]
        tried = set()
        for number, (of, content) in enumerate(devices):
            longer = (*content, (model, option))
            fits = max(needs(longer)) <= WHOLE and all(other != model for other, _ in content)
            if of == kind and fits and content not in tried:
                tried.add(content)
                devices[number] = (of, longer)
                if search(at + 1):
                    return True
                devices[number] = (of, content)
        if sum(of == kind for of, _ in devices) < problem.kinds[kind].most:
            devices.append((kind, ((model, option),)))
            if search(at + 1):
                return True
            devices.pop()
        return False

    return devices if search(0) else None


@st.composite
def problems(draw: st.DrawFn, *, kinds: int = 1) -> HarborProblem:
    def options() -> tuple[BatchOption, ...]:
        batches = sorted(draw(st.sets(st.sampled_from([1, 4]), max_size=2)))
        return tuple(
            BatchOption(batch, float(draw(st.integers(1, 30))), 1.0, 500 * draw(st.integers(1, 20)), 0)
            for batch in batches
        )

    models = tuple(
        PlacedModel(f"m{at}", float(draw(st.integers(1, 200))), 50.0, tuple(options() for _ in range(kinds)))
        for at in range(draw(st.integers(1, 3)))
    )
    return HarborProblem(
        models,
        tuple(
            DeviceKind(f"k{at}", draw(st.integers(0, 2)), per_node * draw(st.integers(0, 1)), 0.5 * (at + 1), per_node)
            for at in range(kinds)
            for per_node in (draw(st.integers(1, 2)),)
        ),
        fairness=draw(st.sampled_from([0.0, 0.5])),
    )


def check(problem: HarborProblem, found: harbor.HarborPlacement) -> None:
    """The placement fits, and its figures are right."""
    for kind, own in by_kind(found.contents).items():
        assert len(own) <= problem.kinds[kind].most
        for content in own:
            assert max(needs(content)) <= WHOLE
            assert [at for at, _ in content] == sorted({at for at, _ in content})
    again = problem.evaluated(found.contents)
    assert again.served_rps == pytest.approx(found.served_rps)
    assert again.value == pytest.approx(found.value)
    assert again.usd_per_h == pytest.approx(found.usd_per_h)


@settings(max_examples=60, deadline=None)
@given(st.one_of(problems(), problems(kinds=2)))
def test_no_placement_has_a_higher_value_and_none_within_the_tolerance_is_cheaper(problem: HarborProblem) -> None:
    every = list(all_placements(problem))
    best = max(value for _, value in every)
    within = [contents for contents, value in every if value >= best - problem.tolerance * abs(best)]
    found = place(problem)
    check(problem, found)
    assert found.value >= best - problem.tolerance * abs(best) - 1e-5
    assert found.usd_per_h <= min(map(problem.price, within)) + 1e-6
    assert found.proven


@settings(max_examples=30, deadline=None)
@given(problems(kinds=2), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_budget_is_kept(problem: HarborProblem, budget: float) -> None:
    limited = replace(problem, usd_per_h_max=budget)
    found = place(limited)
    check(limited, found)
    assert found.usd_per_h <= budget + 1e-9
    best = max(value for contents, value in all_placements(problem) if problem.price(contents) <= budget + 1e-9)
    assert found.value >= best - problem.tolerance * abs(best) - 1e-5


@settings(max_examples=60, deadline=None)
@given(st.one_of(problems(), problems(kinds=2)))
def test_the_greedy_placement_alone_keeps_all_promises(problem: HarborProblem) -> None:
    check(problem, harbor._greedy(problem, list(problem.columns())))


def test_a_program_that_is_too_large_has_the_greedy_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(VISION, 740, 250, 4)
    best = place(problem)
    monkeypatch.setattr(harbor, "PROGRAM_MAX", 0)
    greedy = place(replace(problem, tolerance=0.0))
    check(problem, greedy)
    assert not greedy.proven
    assert 0.8 * best.value <= greedy.value <= best.value


def test_many_models_on_many_devices_are_placed_within_bounds() -> None:
    names = sorted({*VISION, *MIXED, *LANGUAGE_MIX}) * 3
    problem = problem_of(names, 300, 250, 40)
    found = place(problem)
    check(problem, found)
    assert found == place(problem)
    assert found.total_rps > 0.5 * 300 * len(names)


def test_a_node_is_paid_for_with_all_its_devices() -> None:
    model = PlacedModel("m", 10.0, 400.0, ((BatchOption(1, 10.0, 100.0, WHOLE, 0),),) * 2)
    kinds = (DeviceKind("one", 0, 3, 4.0), DeviceKind("four", 0, 8, 12.0, 4))
    assert place(HarborProblem((model,), kinds)).usd_per_h == 4.0, "a quarter of the larger node would cost 3"
    heavy = replace(model, rate_rps=270.0)
    found = place(HarborProblem((heavy,), kinds))
    assert ({kind for kind, _ in found.contents}, found.usd_per_h) == ({1}, 12.0)
    assert kinds[1].rented(5) == 2
    limited = HarborProblem((heavy,), kinds, usd_per_h_max=11.0)
    assert place(limited).usd_per_h == 8.0


# What the estimate is for


def test_it_serves_one_language_model_well_instead_of_two_badly() -> None:
    problem = problem_of(MIXED, 276, 300, 5)
    found = place(problem)
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
        for own in named(problem.models, [c for _, c in place(problem).contents])
        for name in own
    }
    assert max(batches) <= 16


def test_fairness_serves_heavy_models_too() -> None:
    problem = problem_of(MIXED, 276, 300, 6)
    few, fair = place(problem), place(replace(problem, fairness=0.8))
    assert min(fair.served_rps) > min(few.served_rps)
    assert fair.total_rps <= few.total_rps + 1e-6


def test_the_cheapest_kinds_that_serve_as_much() -> None:
    cheap = PlacedModel(
        "m", 50.0, 150.0, ((BatchOption(4, 20.0, 200.0, WHOLE, 0),), (BatchOption(4, 5.0, 800.0, WHOLE, 0),))
    )
    kinds = (DeviceKind("slow", 0, 3, 0.5), DeviceKind("fast", 0, 3, 3.0))
    assert place(HarborProblem((cheap,), kinds)).usd_per_h == 0.5
    busy = replace(cheap, rate_rps=600.0)
    found = place(HarborProblem((busy,), kinds))
    assert {kind for kind, _ in found.contents} == {1}, "three slow ones do not carry 600 requests/s"
    with_owned = (kinds[0], replace(kinds[1], owned=1))
    assert place(HarborProblem((busy,), with_owned)).usd_per_h == 0


def test_neighbours_that_slow_each_other_down() -> None:
    option = BatchOption(1, 10.0, 100.0, 6000, 0)
    models = tuple(PlacedModel(name, 30.0, 60.0, ((option,),)) for name in "ab")

    def slowdown(kind: int, content: Content) -> list[float]:
        return [max(1.0, needs(content)[0] / WHOLE)] * len(content)

    apart = place(HarborProblem(models, (DeviceKind("d", 1),)))
    assert len(apart.contents[0][1]) == 1, "both do not fit"
    crowded = HarborProblem(models, (DeviceKind("d", 1),), crowding=1.5, slowdown=slowdown)
    found = place(crowded)
    assert len(found.contents[0][1]) == 2
    served = ServingAssumptions().in_time_rps(models[0], 0, option, 1, 1.25)
    assert found.served_rps == pytest.approx((served, served)), "1.2 is rounded up to the level 1.25"
    assert place(replace(crowded, kinds=(DeviceKind("d", 2),))).total_rps > found.total_rps


# Again


def test_a_placement_stays_unless_another_is_better_by_the_gain() -> None:
    problem = problem_of(VISION, 433.34, 200, 5)
    found = place(problem)
    assert replaced(problem, found.contents, gain=0.02).contents == found.contents
    slightly = problem_of(VISION, 430, 200, 5)
    assert replaced(slightly, found.contents, gain=0.02).contents == found.contents
    doubled = problem_of(VISION, 900, 200, 5)
    assert replaced(doubled, found.contents, gain=0.02).contents != found.contents


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fairness": 1.0}, "fairness 1"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"crowding": 1.5}, "without a law of interference"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(problem_of(VISION, 100, 200, 1), **changes)  # type: ignore[arg-type]  # one of them


def test_serving_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="negative"):
        ServingAssumptions(wait_ms=-1)
    with pytest.raises(InputError, match="positive"):
        ServingAssumptions(slower=0)
