from collections import Counter
from collections.abc import Sequence
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.scenario import NoiseShape
from sloop.profile.profile import Amdahl, LatencyTable, Profile, Quadratic, Sample
from sloop.sim.truth.service import NOISE_MIN, ReplicaQuota, ServiceSampler, draws, is_measured, noise
from sloop.units import ms
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


# CPU quotas


def run(quota: ReplicaQuota, batches: Sequence[tuple[float, float]]) -> list[float]:
    """Durations in ms of batches, given the pause before each, and what it takes on a busy replica."""
    now_ns, took_ms = 0, []
    for pause_ms, busy_ms in batches:
        now_ns += ms(pause_ms)
        took_ns = quota.run(now_ns, ms(busy_ms))
        now_ns += took_ns
        took_ms.append(took_ns / 1e6)
    return took_ms


def test_a_pause_saves_the_cpu_time_of_at_most_one_period() -> None:
    found = run(ReplicaQuota(0.3, ms(10)), [(0, 36), (0, 36), (4, 36), (0, 36), (10, 36), (500, 36)])
    assert found == pytest.approx([26, 36, 32, 36, 26, 26])


def test_a_batch_is_no_faster_than_without_throttling_and_leaves_what_it_does_not_need() -> None:
    found = run(ReplicaQuota(0.25, ms(10)), [(100, 8), (0, 8), (0, 8)])
    assert found == pytest.approx([2, 4, 8])


def filled(batches: Sequence[tuple[float, float]], share: float, period_ms: float) -> list[float]:
    """The same for CPU time that flows into a bucket at a constant rate; the bucket holds one period's."""
    tokens_ms, took_ms = share * period_ms, []
    for pause_ms, busy_ms in batches:
        tokens_ms = min(share * period_ms, tokens_ms + share * pause_ms)
        needed_ms = share * busy_ms
        at_full_speed_ms = tokens_ms / (1 - share)
        if needed_ms <= at_full_speed_ms:
            took_ms.append(needed_ms)
            tokens_ms -= (1 - share) * needed_ms
        else:
            took_ms.append(at_full_speed_ms + (needed_ms - at_full_speed_ms) / share)
            tokens_ms = 0.0
    return took_ms


@given(
    st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 100)), min_size=1, max_size=20),
    st.floats(0.05, 0.95),
    st.floats(0.5, 50),
)
def test_durations_are_those_of_a_token_bucket(
    batches: list[tuple[float, float]], share: float, period_ms: float
) -> None:
    expected = filled(batches, share, period_ms)
    assert run(ReplicaQuota(share, ms(period_ms)), batches) == pytest.approx(expected, abs=1e-4)


def test_a_replica_that_never_pauses_is_as_fast_as_its_cores() -> None:
    found = run(ReplicaQuota(0.3, ms(10)), [(0, 7.0)] * 100)
    assert sum(found) == pytest.approx(100 * 7.0 - 10)


def quota_of(profile: Profile, slot: Slot, **options: Any) -> tuple[float, float] | None:
    """Share and period in ms."""
    quota = ServiceSampler(1, {("only", "a", slot.hardware): profile}, **options).quota("only", "a", slot)
    return None if quota is None else (quota.share, quota.period_ns / 1e6)


def test_measured_fractions_of_cores_have_the_server_s_quota() -> None:
    assert quota_of(MEASURED, Slot(0.25, "slow")) == (0.25, 10.0)
    assert quota_of(MEASURED, Slot(1.5, "slow")) == (0.75, 10.0), "two threads"
    assert quota_of(MEASURED, Slot(0.05, "slow")) == (0.05, 20.0), "the kernel's least quota is 1 ms"
    assert quota_of(MEASURED, Slot(2.0, "slow")) is None
    assert quota_of(MEASURED, Slot(0.5, "slow", "T4")) is None
    assert quota_of(MEASURED, Slot(0.5, "slow"), recorded={0: {A: {(1, 0.5): [ms(20)] * 20}}}) is None
    assert quota_of(MEASURED, Slot(0.5, "slow"), cv=0.1) is None
    assert quota_of(PROFILE, Slot(0.5, "slow")) is None


def test_a_scenario_may_declare_the_period() -> None:
    assert quota_of(PROFILE, Slot(0.5, "slow"), quota_ms=100.0) == (0.5, 100.0)
    assert quota_of(MEASURED, Slot(0.5, "slow"), quota_ms=0.0) is None
