from collections import Counter
from random import Random
from statistics import fmean, pstdev

import pytest

from sloop.app.scenario import NoiseShape
from sloop.profile import Amdahl, LatencyTable, Profile, Quadratic, Sample
from sloop.sim.truth.service import NOISE_MIN, ServiceSampler, draws, is_measured, noise
from sloop.vocabulary import Slot

A = ("only", "a", "slow")
PROFILE = Profile(latency_ms=Amdahl(gamma=8.0, epsilon=4.0, delta=1.0, eta=2.0), max_batch=4, max_cores=8)
RUNS = {(1, 1.0): (8.0, 10.0, 10.0, 16.0), (3, 1.0): (24.0, 30.0, 30.0, 48.0), (1, 0.5): (20.0, 20.0, 20.0, 20.0)}
MEASURED = Profile(
    latency_ms=LatencyTable({1: {1.0: 16.0, 0.5: 20.0}, 3: {1.0: 48.0}}),
    max_batch=3,
    max_cores=1.0,
    origin="measured",
    samples=tuple(Sample(b, c, runs[1], runs[-1], 40, runs) for (b, c), runs in RUNS.items()),
)


def test_means_follow_the_profile_over_ratio_times_error() -> None:
    plain = ServiceSampler(1, {A: PROFILE}, ratio=1.0).speed("only", "a", Slot(2.0, "slow")).means_ns
    assert plain == pytest.approx([0.0, 9e6, 14e6, 19e6, 24e6])
    wrong = ServiceSampler(1, {A: PROFILE}, ratio=1.25, errors={A: 2.0}).speed("only", "a", Slot(2.0, "slow")).means_ns
    assert wrong == pytest.approx([mean_ns * 2.0 / 1.25 for mean_ns in plain])
    undeclared = ServiceSampler(1, {A: PROFILE}).speed("only", "a", Slot(2.0, "slow")).means_ns
    assert undeclared == pytest.approx([mean_ns / 1.05 for mean_ns in plain])


def test_speeds_are_worked_out_once() -> None:
    service = ServiceSampler(1, {A: PROFILE})
    assert service.speed("only", "a", Slot(4.0, "slow")) is service.speed("only", "a", Slot(4.0, "slow"))


def test_each_kind_of_hardware_has_its_own_speed_and_error() -> None:
    twice = Profile(latency_ms=Quadratic(alpha=0.0, beta=0.0, gamma=2.0), max_batch=1, max_cores=8)
    once = Profile(latency_ms=Quadratic(alpha=0.0, beta=0.0, gamma=1.0), max_batch=1, max_cores=8)
    quick = ("only", "a", "quick")
    service = ServiceSampler(1, {A: twice, quick: once}, ratio=1.0, errors={quick: 3.0})
    speeds = [service.speed("only", "a", Slot(1.0, kind)).means_ns[1] for kind in ("slow", "quick")]
    assert speeds == pytest.approx([2e6, 3e6])


def test_a_fit_that_goes_negative_takes_next_to_no_time() -> None:
    steep = Profile(latency_ms=Quadratic(alpha=-1.0, beta=3.0, gamma=1.0), max_batch=3, max_cores=1)
    assert min(ServiceSampler(1, {A: steep}).speed("only", "a", Slot(1.0, "slow")).means_ns[1:]) > 0


def test_what_was_measured_is_drawn_from_what_was_measured() -> None:
    speed = ServiceSampler(1, {A: MEASURED}, errors={A: 2.0}).speed("only", "a", Slot(1.0, "slow"))
    assert speed.means_ns == pytest.approx([0.0, 22e6, 44e6, 66e6])  # twice the means; a batch of 2 lies between
    drawn = [next(speed.noises[3]) * speed.means_ns[3] for _ in range(4000)]
    assert {round(value / 2e6) for value in drawn} == {24, 30, 48}
    assert fmean(drawn) == pytest.approx(66e6, rel=0.02)
    assert drawn.count(max(drawn)) == pytest.approx(1000, rel=0.1)


def test_between_and_below_measured_cores_the_table_is_joined_as_the_profile_s() -> None:
    service = ServiceSampler(1, {A: MEASURED})
    assert service.speed("only", "a", Slot(0.25, "slow")).means_ns[1] == pytest.approx(40e6)
    assert service.speed("only", "a", Slot(2 / 3, "slow")).means_ns[1] == pytest.approx((11e6 + 20e6) / 2)


def test_a_declared_truth_goes_before_the_measured_one() -> None:
    assert ServiceSampler(1, {A: MEASURED}, ratio=1.6).speed("only", "a", Slot(1.0, "slow")).means_ns[
        1
    ] == pytest.approx(10e6)
    assert ServiceSampler(1, {A: MEASURED}, shape="deterministic").speed("only", "a", Slot(1.0, "slow")).means_ns[
        1
    ] == pytest.approx(16e6 / 1.05)


def test_only_cells_that_keep_their_runs_are_measured() -> None:
    assert is_measured(MEASURED)
    assert not is_measured(PROFILE)
    percentiles_only = Sample(2, 1.0, 20.0, 32.0, 40)
    assert not is_measured(
        Profile(latency_ms=MEASURED.latency_ms, max_batch=3, max_cores=1, samples=(percentiles_only,))
    )


@pytest.mark.parametrize(("shape", "cv", "spread"), [("normal", 0.1, 0.1), ("exponential", 0.0, 1.0)])
def test_factors_have_mean_one_and_the_spread_asked_for(shape: NoiseShape, cv: float, spread: float) -> None:
    drawing = noise(shape, cv, Random(1))
    drawn = [next(drawing) for _ in range(20_000)]
    assert fmean(drawn) == pytest.approx(1.0, abs=0.02)
    assert pstdev(drawn) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize(("shape", "cv"), [("deterministic", 0.5), ("normal", 0.0)])
def test_no_noise_is_exactly_one(shape: NoiseShape, cv: float) -> None:
    assert next(noise(shape, cv, Random(1))) == 1.0


def test_no_factor_falls_below_the_floor() -> None:
    drawing = noise("normal", 1.0, Random(1))
    assert min(next(drawing) for _ in range(20_000)) == NOISE_MIN


def test_the_first_draws_of_a_seed_are_these_on_every_machine() -> None:
    drawing = noise("normal", 0.03, Random(7))
    assert [next(drawing) for _ in range(3)] == [0.98629142044, 1.04873796769, 0.96900421537]


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0), (5.0,)])
def test_every_value_is_drawn_equally_often(values: tuple[float, ...]) -> None:
    drawing = draws(values, Random(1))
    counts = Counter(next(drawing) for _ in range(6000))
    assert set(counts) == set(values)
    assert all(count == pytest.approx(6000 / len(values), rel=0.1) for count in counts.values())
