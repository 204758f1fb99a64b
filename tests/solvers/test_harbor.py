"""Our placement: its estimate, the best value against all placements, prices and bounds."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.solvers import harbor
from sloop.solvers.contents import WHOLE_DEVICE, BatchOption, Content, content_needs
from sloop.solvers.harbor import DeviceKind, HarborProblem, PlacedModel, ServingAssumptions, by_kind, place_models

# The estimate


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
            fits = max(content_needs(longer)) <= WHOLE_DEVICE and all(other != model for other, _ in content)
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
    )


def check(problem: HarborProblem, found: harbor.HarborPlacement) -> None:
    """The placement fits, and its figures are right."""
    for kind, own in by_kind(found.contents).items():
        assert len(own) <= problem.kinds[kind].most
        for content in own:
            assert max(content_needs(content)) <= WHOLE_DEVICE
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
    within = [contents for contents, value in every if value >= best - harbor.TOLERANCE * abs(best)]
    found = place_models(problem)
    check(problem, found)
    assert found.value >= best - harbor.TOLERANCE * abs(best) - 1e-5
    assert found.usd_per_h <= min(map(problem.price, within)) + 1e-6
    assert found.proven


@settings(max_examples=60, deadline=None)
@given(st.one_of(problems(), problems(kinds=2)))
def test_the_greedy_placement_alone_keeps_all_promises(problem: HarborProblem) -> None:
    check(problem, harbor._greedy(problem, list(problem.columns())))


def test_a_node_is_paid_for_with_all_its_devices() -> None:
    model = PlacedModel("m", 10.0, 400.0, ((BatchOption(1, 10.0, 100.0, WHOLE_DEVICE, 0),),) * 2)
    kinds = (DeviceKind("one", 0, 3, 4.0), DeviceKind("four", 0, 8, 12.0, 4))
    assert place_models(HarborProblem((model,), kinds)).usd_per_h == 4.0, "a quarter of the larger node would cost 3"
    heavy = replace(model, rate_rps=320.0)
    found = place_models(HarborProblem((heavy,), kinds))
    assert ({kind for kind, _ in found.contents}, found.usd_per_h) == ({1}, 12.0)
    assert kinds[1].rented(5) == 2


# What the estimate is for


def test_the_cheapest_kinds_that_serve_as_much() -> None:
    cheap = PlacedModel(
        "m",
        50.0,
        150.0,
        ((BatchOption(4, 20.0, 200.0, WHOLE_DEVICE, 0),), (BatchOption(4, 5.0, 800.0, WHOLE_DEVICE, 0),)),
    )
    kinds = (DeviceKind("slow", 0, 3, 0.5), DeviceKind("fast", 0, 3, 3.0))
    assert place_models(HarborProblem((cheap,), kinds)).usd_per_h == 0.5
    busy = replace(cheap, rate_rps=600.0)
    found = place_models(HarborProblem((busy,), kinds))
    assert {kind for kind, _ in found.contents} == {1}, "three slow ones do not carry 600 requests/s"
    with_owned = (kinds[0], replace(kinds[1], owned=1))
    assert place_models(HarborProblem((busy,), with_owned)).usd_per_h == 0


def test_neighbours_that_slow_each_other_down() -> None:
    option = BatchOption(1, 10.0, 100.0, 6000, 0)
    models = tuple(PlacedModel(name, 30.0, 60.0, ((option,),)) for name in "ab")

    def slowdown(kind: int, content: Content) -> list[float]:
        return [max(1.0, content_needs(content)[0] / WHOLE_DEVICE)] * len(content)

    apart = place_models(HarborProblem(models, (DeviceKind("d", 1),), slowdown=slowdown))
    assert len(apart.contents[0][1]) == 1, "both do not fit"
    small = BatchOption(1, 10.0, 100.0, 4000, 0)
    beside = tuple(replace(model, options=((small,),)) for model in models)

    def slower(kind: int, content: Content) -> list[float]:
        return [1.2 if len(content) > 1 else 1.0] * len(content)

    found = place_models(HarborProblem(beside, (DeviceKind("d", 1),), slowdown=slower))
    assert len(found.contents[0][1]) == 2
    served = ServingAssumptions().in_time_rps(beside[0], 0, small, 1, 1.25)
    assert found.served_rps == pytest.approx((served, served)), "1.2 is rounded up to the level 1.25"
    assert place_models(HarborProblem(beside, (DeviceKind("d", 2),), slowdown=slower)).total_rps > found.total_rps


# Mistakes


def test_serving_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(InputError, match="negative"):
        ServingAssumptions(wait_ms=-1)
    with pytest.raises(InputError, match="positive"):
        ServingAssumptions(slower=0)
