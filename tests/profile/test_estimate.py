"""Estimates: what policies are told, and how finished batches correct it."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.views import Belief
from sloop.profile.estimate import CACHED_MAX, EVERY, SHAPES_MAX, Estimate
from sloop.profile.profile import Amdahl, Profile, Quadratic
from sloop.profile.published import RESNET18_HUMAN, RESNET_T
from sloop.streams import stream
from sloop.units import ms
from sloop.vocabulary import ALONE, Slot, Worker


def _observe(estimate: Estimate, ratio: float, count: int, cv: float = 0.0) -> None:
    noise = stream(7, "service")
    for index in range(count):
        batch, cores = 1 + index % 8, 1.0 + index % 3
        profiled_ms = RESNET_T.latency_ms.latency_ms(batch, cores)
        estimate.observe(batch, Slot(cores), ms(profiled_ms * ratio * noise.gauss(1, cv)))


def test_is_a_belief() -> None:
    belief: Belief = Estimate(structs.replace(RESNET_T, load_s=5, memory_bytes=7), accuracy=0.7)
    assert (belief.batch_max, belief.cores_max, belief.accuracy) == (16, 16, 0.7)
    assert (belief.startup_ns, belief.memory_bytes) == (5 * 10**9, 7)
    assert belief.latency_ms(8, Slot(4)) == RESNET_T.latency_ms.latency_ms(8, 4)


def test_costs_are_the_profile_in_ns_and_cached() -> None:
    estimate = Estimate(RESNET_T)
    costs_ns = estimate.costs_ns(Slot(4.0))
    assert len(costs_ns) == 17
    assert costs_ns[0] == 0
    assert costs_ns[8] == round(RESNET_T.latency_ms.latency_ms(8, 4) * 1e6)
    assert estimate.costs_ns(Slot(4)) is costs_ns
    for cores in range(1, 2 * CACHED_MAX):
        estimate.costs_ns(Slot(cores / 8))
    assert estimate.costs_ns(Slot(4.0)) == costs_ns


@given(st.floats(-5, 5), st.floats(-20, 20), st.floats(0.001, 20), st.floats(0.01, 64), st.floats(0.1, 3))
@settings(max_examples=100)
def test_costs_never_fall_and_are_positive(a: float, b: float, at_1: float, cores: float, margin: float) -> None:
    quadratic = Quadratic(a, b, at_1 - a - b)
    if quadratic.latency_ms(12, 1) <= 0 or quadratic.latency_ms(1, 1) <= 0:
        quadratic = Quadratic(abs(a), abs(b), at_1)
    profile = Profile(latency_ms=quadratic, max_batch=12, max_cores=1)
    costs_ns = Estimate(profile, margin=margin).costs_ns(Slot(cores))
    assert costs_ns[0] == 0
    assert costs_ns[1] >= 1
    assert all(low <= high for low, high in pairwise(costs_ns))
    assert all(isinstance(cost_ns, int) for cost_ns in costs_ns)


def test_margin_makes_all_slower() -> None:
    plain, one, two = Estimate(RESNET_T), Slot(1), Slot(2)
    assert Estimate(RESNET_T, margin=1.1).latency_ms(4, two) == pytest.approx(1.1 * plain.latency_ms(4, two))
    assert Estimate(RESNET_T, margin=2).costs_ns(one)[5] == pytest.approx(2 * plain.costs_ns(one)[5], abs=1)


def test_slots_are_of_its_hardware_and_accelerator() -> None:
    profile = structs.replace(RESNET_T, accelerator="T4", device_memory_bytes=9)
    belief = Estimate(profile, variant="small", hardware="g4dn.xlarge")
    assert (belief.variant, belief.hardware, belief.accelerator) == ("small", "g4dn.xlarge", "T4")
    assert belief.device_memory_bytes == 9
    assert belief.slot(2) == Slot(2, "g4dn.xlarge", "T4", 1.0)
    assert Estimate(RESNET_T).slot(2) == Slot(2)
    assert belief.latency_ms(4, belief.slot(2)) == RESNET_T.latency_ms.latency_ms(4, 2)


@pytest.mark.parametrize(("ratio", "correction"), [(1.2, 1.2), (0.9, 0.9), (9.0, 1.5), (0.1, 0.8)])
def test_correction_tends_to_measured_over_predicted_within_its_clip(ratio: float, correction: float) -> None:
    estimate = Estimate(RESNET_T)
    before_ms = estimate.latency_ms(4, Slot(2))
    before_ns = estimate.costs_ns(Slot(2.0))[4]
    _observe(estimate, ratio, 30 * EVERY)
    assert estimate.correction == pytest.approx(correction, abs=0.01)
    assert estimate.latency_ms(4, Slot(2)) == pytest.approx(before_ms * estimate.correction)
    assert estimate.costs_ns(Slot(2.0))[4] == pytest.approx(before_ns * estimate.correction, abs=1)


def test_correction_is_of_the_99th_percentile() -> None:
    estimate = Estimate(RESNET_T)
    _observe(estimate, 1.0, 30 * EVERY, cv=0.03)
    assert estimate.correction == pytest.approx(1.07, abs=0.015)  # 1 + 2.33 × 3 %


def test_estimate_does_not_change_before_a_full_block_or_without_correction() -> None:
    estimate = Estimate(RESNET_T)
    _observe(estimate, 1.4, EVERY - 1)
    assert estimate.correction == 1.0
    _observe(estimate, 1.4, 1)
    assert estimate.correction > 1.0
    fixed = Estimate(RESNET_T, correct=False)
    _observe(fixed, 1.4, 10 * EVERY)
    assert fixed.correction == 1.0


def test_the_profile_counts_less_with_each_lesson() -> None:
    estimate = Estimate(RESNET_T)
    assert estimate.prior_weight == 1.0
    weights = []
    for _ in range(20):
        _observe(estimate, 1.2, EVERY)
        weights.append(estimate.prior_weight)
        if weights[-1]:
            measured = 1.2 * (1 - weights[-1]) + 1.0 * weights[-1]
            assert estimate.correction == pytest.approx(measured, abs=0.006), "the last step may not be noticed"
    assert all(after < before or after == before == 0 for before, after in pairwise(weights))
    assert weights[-1] == 0
    fixed = Estimate(RESNET_T, correct=False)
    _observe(fixed, 1.2, 10 * EVERY)
    assert fixed.prior_weight == 1.0
    fixed.apply(1.1, 0.25)
    assert (fixed.correction, fixed.prior_weight) == (1.1, 0.25)


def test_means_are_learnt_beside_the_99th_percentile() -> None:
    estimate = Estimate(RESNET_T, margin=1.1)
    for _ in range(20 * EVERY):
        for slower in (0.6, 1.2):
            _observe(estimate, slower, 1)
    assert estimate.mean_ratio == pytest.approx(0.9 / (estimate.correction * 1.1), rel=0.01)
    fixed = Estimate(RESNET_T, correct=False)
    _observe(fixed, 0.6, 10 * EVERY)
    assert fixed.mean_ratio == 1.0
    fixed.apply(1.0, 1.0, mean_ratio=0.75)
    assert fixed.mean_ratio == 0.75


def test_margin_does_not_enter_the_correction() -> None:
    estimate = Estimate(RESNET_T, margin=1.2)
    _observe(estimate, 1.0, 10 * EVERY)
    assert estimate.correction == 1.0


def test_batch_sizes_outside_the_profile_are_ignored() -> None:
    estimate = Estimate(RESNET_T)
    for _ in range(3 * EVERY):
        estimate.observe(0, Slot(1.0), 10**9)
        estimate.observe(17, Slot(1.0), 10**9)
        estimate.observe(1, Slot(1.0), 0)
    assert estimate.correction == 1.0


def test_same_observations_same_belief() -> None:
    twins = Estimate(RESNET_T), Estimate(RESNET_T)
    for twin in twins:
        _observe(twin, 1.1, 5 * EVERY, cv=0.1)
    assert twins[0].costs_ns(Slot(3.0)) == twins[1].costs_ns(Slot(3.0))


def test_says_where_it_extrapolates() -> None:
    assert Estimate(RESNET_T).is_extrapolated(16, Slot(16))
    assert not Estimate(RESNET18_HUMAN).is_extrapolated(16, Slot(16))


def test_a_fit_that_goes_negative_still_costs_something() -> None:
    profile = Profile(latency_ms=Amdahl(166, 0, 0, -30), max_batch=2, max_cores=4)
    estimate = Estimate(profile)
    assert estimate.latency_ms(1, Slot(16)) > 0
    assert estimate.costs_ns(Slot(16.0))[1] >= 1


def test_a_form_learns_from_its_own_batches_only() -> None:
    whole = Estimate(RESNET_T, margin=1.1)
    pair, other = (whole.of((Worker(cores, (0,)),)) for cores in (1.0, 2.0))
    assert whole.of(ALONE) is whole is pair.of(ALONE)
    assert whole.of((Worker(1.0, (0,)),)) is pair
    assert pair is not other
    before_ns = whole.costs_ns(Slot(2.0))
    assert pair.costs_ns(Slot(2.0)) == before_ns
    _observe(pair, 1.5, 40 * EVERY)
    assert (whole.correction, other.correction) == (1.0, 1.0)
    assert pair.correction == pytest.approx(1.5, abs=0.01)
    _observe(whole, 0.9, 40 * EVERY)
    assert pair.correction == pytest.approx(1.5, abs=0.01)
    assert whole.costs_ns(Slot(2.0)) < before_ns < pair.costs_ns(Slot(2.0))


def test_forms_are_bounded() -> None:
    whole = Estimate(RESNET_T)
    first, *_ = [whole.of((Worker(cores, (0,)),)) for cores in range(1, SHAPES_MAX + 1)]
    assert whole.of((Worker(1, (0,)),)) is first
    whole.of((Worker(SHAPES_MAX + 1, (0,)),))
    assert whole.of((Worker(1, (0,)),)) is not first


def test_shape_and_size_combine() -> None:
    whole, shape = Estimate(RESNET_T), (Worker(1.0, (0,)),)
    both = whole.of(shape).at(100)
    assert both is whole.at(100).of(shape)
    assert both.of(ALONE) is whole.at(100)
    assert both.at(0) is whole.of(shape)
    assert len({id(each) for each in (whole, both, whole.of(shape), whole.at(100))}) == 4
