from collections import Counter
from random import Random
from statistics import fmean, pstdev

import pytest

from sloop.sim.truth.noise import FLOOR, Shape, drawn, factors


@pytest.mark.parametrize(("shape", "cv", "spread"), [("normal", 0.1, 0.1), ("exponential", 0.0, 1.0)])
def test_factors_have_mean_one_and_the_spread_asked_for(shape: Shape, cv: float, spread: float) -> None:
    drawing = factors(shape, cv, Random(1))
    drawn = [next(drawing) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(1.0, abs=0.02)
    assert pstdev(drawn) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize(("shape", "cv"), [("deterministic", 0.5), ("normal", 0.0)])
def test_no_noise_is_exactly_one(shape: Shape, cv: float) -> None:
    assert next(factors(shape, cv, Random(1))) == 1.0


def test_no_factor_falls_below_the_floor() -> None:
    drawing = factors("normal", 1.0, Random(1))
    assert min(next(drawing) for _ in range(20_000)) == FLOOR


def test_the_first_draws_of_a_seed_are_these_on_every_machine() -> None:
    drawing = factors("normal", 0.03, Random(7))
    assert [next(drawing) for _ in range(3)] == [0.98629142044, 1.04873796769, 0.96900421537]


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0), (5.0,)])
def test_every_value_is_drawn_equally_often(values: tuple[float, ...]) -> None:
    drawing = drawn(values, Random(1))
    counts = Counter(next(drawing) for _ in range(6000))
    assert set(counts) == set(values)
    assert all(count == pytest.approx(6000 / len(values), rel=0.1) for count in counts.values())
