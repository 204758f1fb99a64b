"""Estimates of classes of sizes: with a profile that knows sizes, and with one that does not."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import mul

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.views import Belief
from sloop.profile.estimate import EVERY, Estimate
from sloop.profile.profile import Profile, Quadratic, SizeLatency
from sloop.profile.size_law import NO_LESSONS, least_squares, never_falling
from sloop.sizes import GRID, SizeClasses
from sloop.streams import stream
from sloop.units import ms
from sloop.vocabulary import Slot, Worker

ONE = Slot(1.0)
AT_128 = Profile(latency_ms=Quadratic(0, 12.8, 5), max_batch=16, max_cores=1)
"""Of a model that takes 5 ms and 0.1 ms for each element: true for rows of 128 alone."""
SIZED = structs.replace(AT_128, sizes=tuple(SizeLatency(size, Quadratic(0, size / 10, 5)) for size in (16, 64, 512)))
SIZES = (8, 16, 24, 64, 128, 192, 256, 512)

Truth = Callable[[int, int], float]
"""Rows and size → milliseconds."""


def by_elements(rows: int, size: int) -> float:
    return 5 + 0.1 * rows * size


def with_attention(rows: int, size: int) -> float:
    return 3 + rows * (0.05 * size + 0.0004 * size * size)


def teach(whole: Estimate, truth: Truth, count: int, sizes: Sequence[int] = SIZES, seed: int = 0) -> None:
    """Batches of these sizes and of all numbers of rows, each with a noise of 3 %."""
    chance = stream(seed, "service")
    for _ in range(count):
        size, rows = sizes[chance.randrange(len(sizes))], chance.randint(1, whole.batch_max)
        whole.at(size).observe(rows, ONE, ms(truth(rows, size) * chance.gauss(1, 0.03)))


def off_by(whole: Estimate, truth: Truth, sizes: Sequence[int] = SIZES) -> float:
    """The largest relative error of any class and any number of rows."""
    return max(
        abs(cost_ns / ms(truth(rows, size)) - 1)
        for size in sizes
        for rows, cost_ns in enumerate(whole.at(size).costs_ns(ONE))
        if rows
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("truth", [by_elements, with_attention])
@pytest.mark.parametrize("slower", [0.2, 1.0, 8.0])
def test_a_profile_without_sizes_is_only_where_learning_begins(truth: Truth, slower: float, seed: int) -> None:
    whole = Estimate(AT_128)
    assert off_by(whole, truth) > 5
    teach(whole, lambda rows, size: slower * truth(rows, size), 60, seed=seed)
    assert off_by(whole, lambda rows, size: slower * truth(rows, size)) < 0.15


@pytest.mark.parametrize("truth", [by_elements, with_attention])
def test_an_estimate_is_of_the_largest_rows_of_a_class_also_if_smaller_ones_came(truth: Truth) -> None:
    """Few batches of the class up to 512, most of rows of 400; the law is known from other classes."""
    whole, chance = Estimate(AT_128), stream(1, "service")
    for number in range(60):
        size, rows = (20, 50, 100, 150, 230, 400)[number % 6], chance.randint(1, 16)
        whole.at(size).observe(rows, ONE, ms(truth(rows, size) * chance.gauss(1, 0.02)), size)
    for size in (24, 64, 128, 192, 256, 512):
        assert whole.at(size).costs_ns(ONE)[4] == pytest.approx(ms(truth(4, size)), rel=0.05)
    blind = Estimate(AT_128)
    for rows in (1, 4, 8):
        blind.at(400).observe(rows, ONE, ms(truth(rows, 400)))
    assert blind.at(512).costs_ns(ONE)[4] < 0.9 * ms(truth(4, 512)), "as if its rows had 512"


def test_the_first_batch_counts_at_once() -> None:
    whole = Estimate(AT_128)
    whole.at(16).observe(8, ONE, ms(by_elements(8, 16)))
    assert whole.at(16).costs_ns(ONE)[8] == pytest.approx(ms(by_elements(8, 16)), rel=0.1)
    assert whole.at(16).prior_weight == 0.0
    assert whole.costs_ns(ONE) == whole.at(16).costs_ns(ONE), "all rows so far were of this class"


@pytest.mark.parametrize("unseen", [8, 32, 96, 384, 1024])
def test_classes_without_batches_are_inferred_from_others(unseen: int) -> None:
    whole = Estimate(AT_128)
    teach(whole, by_elements, 40, (16, 64, 128, 512))
    assert off_by(whole, by_elements, (unseen,)) < 0.2


def test_one_class_says_what_rows_of_other_sizes_take_in_proportion() -> None:
    whole = Estimate(AT_128)
    teach(whole, by_elements, 40, (64,))
    assert off_by(whole, by_elements, (16, 256)) < 0.3


def test_a_size_in_the_profile_says_in_proportion_to_what() -> None:
    profile = structs.replace(AT_128, sizes=(SizeLatency(128, AT_128.latency_ms),))
    assert off_by(Estimate(profile), by_elements) < 0.01


def test_a_slow_first_batch_is_forgotten_with_the_second() -> None:
    whole = Estimate(AT_128)
    whole.at(64).observe(4, ONE, ms(20 * by_elements(4, 64)))
    whole.at(64).observe(4, ONE, ms(by_elements(4, 64)))
    assert whole.at(64).costs_ns(ONE)[4] == pytest.approx(ms(by_elements(4, 64)), rel=0.2)


@pytest.mark.parametrize("first", [True, False])
def test_one_slow_batch_of_small_rows_says_nothing_of_larger_ones(first: bool) -> None:
    """Although the small rows never come again. A pause as long as two hundred batches is not unusual when a server
    starts."""
    whole = Estimate(AT_128)
    if not first:
        teach(whole, by_elements, 100, (64, 256))
    whole.at(8).observe(1, ONE, ms(5_000))
    teach(whole, by_elements, 100, (64, 256))
    assert off_by(whole, by_elements, (64, 256)) < 0.15
    assert all(low <= high for low, high in zip(*(whole.at(size).costs_ns(ONE) for size in (8, 64)), strict=True))


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_numbers_that_never_fall_have_the_mean_of_those_they_replace(given: list[tuple[float, float]]) -> None:
    values, weights = zip(*given, strict=True)
    found = never_falling(values, weights)
    assert all(low <= high for low, high in pairwise(found))
    if list(values) == sorted(values):
        assert found == list(values)
    mean = sum(map(mul, values, weights)) / sum(weights)
    assert sum(map(mul, found, weights)) / sum(weights) == pytest.approx(mean)


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 5)), min_size=1, max_size=7))
@settings(max_examples=50)
def test_numbers_that_never_fall_are_the_min_max_formula(given_values: list[tuple[float, int]]) -> None:
    values = [value for value, _ in given_values]
    weights = [weight for _, weight in given_values]

    def mean(low: int, high: int) -> float:
        return float(np.average(values[low : high + 1], weights=weights[low : high + 1]))

    size = len(values)
    expected = [max(min(mean(i, j) for j in range(k, size)) for i in range(k + 1)) for k in range(size)]
    assert never_falling(values, weights) == pytest.approx(expected)


def test_a_class_with_many_batches_is_believed_at_its_p99() -> None:
    whole, chance = Estimate(AT_128), stream(1, "service")
    for _ in range(30 * EVERY):
        whole.at(64).observe(4, ONE, ms(by_elements(4, 64) * chance.gauss(1, 0.05)))
    assert whole.at(64).costs_ns(ONE)[4] == pytest.approx(ms(1.116 * by_elements(4, 64)), rel=0.03)  # 1 + 2.33 × 5 %


def test_classes_with_few_batches_are_believed_as_far_above_their_mean_as_all_together() -> None:
    """Of each class forty batches, of which one in a hundred takes 23 % longer than the mean."""
    whole, chance = Estimate(AT_128), stream(3, "service")
    sizes = sorted({GRID.class_of(round(8 * 1.2**step)) for step in range(24)})
    for number in range(40 * len(sizes)):
        size = sizes[number * 7 % len(sizes)]
        whole.at(size).observe(4, ONE, ms(by_elements(4, size) * chance.gauss(1, 0.1)))
    above = [whole.at(size).costs_ns(ONE)[4] / ms(by_elements(4, size)) for size in sizes]
    assert sum(above) / len(above) == pytest.approx(1.23, abs=0.07)


def test_a_profile_with_sizes_is_corrected_class_by_class_within_the_clip() -> None:
    whole = Estimate(SIZED)
    assert off_by(whole, by_elements, (16, 24, 64, 128, 512)) < 0.001
    for _ in range(40 * EVERY):
        whole.at(64).observe(4, ONE, ms(1.2 * by_elements(4, 64)))
        whole.at(512).observe(4, ONE, ms(3 * by_elements(4, 512)))
    assert whole.at(64).correction == pytest.approx(1.2, abs=0.01)
    assert whole.at(512).correction == pytest.approx(1.5, abs=0.01)
    assert whole.at(16).correction == pytest.approx(1.35, abs=0.02), "as the others, until it has batches of its own"
    assert whole.correction == pytest.approx(1.35, abs=0.02)
    assert whole.at(64).costs_ns(ONE)[8] == pytest.approx(ms(1.2 * by_elements(8, 64)), rel=0.01)


def test_beyond_the_measured_sizes_the_correction_may_be_large() -> None:
    whole = Estimate(SIZED)
    assert not whole.at(512).is_extrapolated(4, ONE)
    assert whole.at(1024).is_extrapolated(4, ONE)
    for _ in range(40 * EVERY):
        whole.at(1024).observe(4, ONE, ms(2.5 * by_elements(4, 1024)))
    assert whole.at(1024).costs_ns(ONE)[4] == pytest.approx(ms(2.5 * by_elements(4, 1024)), rel=0.02)


@pytest.mark.parametrize("profile", [AT_128, SIZED])
def test_the_estimate_of_all_is_the_mean_over_the_rows(profile: Profile) -> None:
    whole = Estimate(profile)
    for _ in range(50):
        whole.at(16).observe(2, ONE, ms(by_elements(2, 16)))
        whole.at(512).observe(6, ONE, ms(by_elements(6, 512)))
    short, long = (whole.at(size).costs_ns(ONE)[4] for size in (16, 512))
    assert whole.costs_ns(ONE)[4] == pytest.approx(0.25 * short + 0.75 * long, rel=0.01)
    assert whole.latency_ms(4, ONE) == pytest.approx(whole.costs_ns(ONE)[4] / 1e6)


def test_the_mean_follows_the_sizes_that_come() -> None:
    whole = Estimate(SIZED)
    teach(whole, by_elements, 3_000, (16,))
    short = whole.costs_ns(ONE)[4]
    teach(whole, by_elements, 6_000, (512,))
    assert short == pytest.approx(ms(by_elements(4, 16)), rel=0.1)
    assert whole.costs_ns(ONE)[4] == pytest.approx(whole.at(512).costs_ns(ONE)[4], rel=0.1)


def test_a_machine_that_becomes_slower_is_noticed_in_all_classes() -> None:
    whole = Estimate(AT_128)
    seen, asked = (16, 64, 256), (16, 32, 64, 128, 256, 512)

    def slower(rows: int, size: int) -> float:
        return 3 * by_elements(rows, size)

    teach(whole, by_elements, 3_000, seen)
    for part in range(10):
        teach(whole, slower, 300, seen, seed=part + 1)
        most = max(whole.at(size).costs_ns(ONE)[rows] / ms(slower(rows, size)) for size in asked for rows in (1, 8))
        assert most < 1.3, "what the mean has learnt is not in the correction too"
    assert off_by(whole, slower, asked) < 0.15


def test_a_class_is_as_far_from_the_profile_as_others_until_it_has_many_batches() -> None:
    whole = Estimate(SIZED)
    whole.at(512).observe(4, ONE, ms(by_elements(4, 512)))
    for _ in range(40 * EVERY):
        whole.at(64).observe(4, ONE, ms(1.4 * by_elements(4, 64)))
    for _ in range(EVERY - 1):
        whole.at(16).observe(4, ONE, ms(1.4 * by_elements(4, 16)))
    assert whole.at(16).correction == pytest.approx(1.4, abs=0.01)
    whole.at(16).observe(4, ONE, ms(1.4 * by_elements(4, 16)))
    assert whole.at(16).correction == pytest.approx(1.4, abs=0.01), "and goes on from there"
    assert whole.at(512).correction == pytest.approx(1.4, abs=0.01)


def test_first_batches_far_from_the_profile_are_no_tail() -> None:
    whole = Estimate(AT_128)
    for number in range(3 * EVERY):
        rows = 1 + number % 16
        whole.at(64).observe(rows, ONE, ms(8 * by_elements(rows, 64)))
    assert off_by(whole, lambda rows, size: 8 * by_elements(rows, size), (64,)) < 0.03


def test_smaller_rows_cost_no_more_although_larger_ones_have_a_longer_tail() -> None:
    whole, chance = Estimate(structs.replace(AT_128, latency_ms=Quadratic(0, 1, 50))), stream(2, "service")
    for number in range(60 * EVERY):
        rows = 1 + number % 16
        whole.at(64).observe(rows, ONE, ms(50 + 0.1 * rows))
        whole.at(512).observe(rows, ONE, ms((50 + 0.8 * rows) * chance.choice((1, 1, 2))))
    small, seen, large = (whole.at(size).costs_ns(ONE) for size in (32, 64, 512))
    assert large[1] > 1.3 * seen[1]
    assert all(low <= high for low, high in zip(small, seen, strict=True))


def test_costs_change_only_if_something_was_learnt() -> None:
    whole = Estimate(AT_128)

    def go_on(count: int) -> None:
        for number in range(count):
            size, rows = SIZES[number % len(SIZES)], 1 + number // len(SIZES) % 16
            whole.at(size).observe(rows, ONE, ms(by_elements(rows, size)))

    go_on(10_240)
    before = whole.costs_ns(ONE)
    go_on(10_240)
    assert whole.costs_ns(ONE) is before


def test_models_of_one_size_do_not_notice() -> None:
    plain, other = Estimate(AT_128), Estimate(AT_128, classes=SizeClasses((7, 70)))
    for rows in range(1, 17):
        for estimate in (plain, other):
            for _ in range(EVERY):
                estimate.observe(rows, ONE, ms(1.1 * (5 + 12.8 * rows)))
    assert plain.costs_ns(ONE) == other.costs_ns(ONE)
    assert plain.size_lessons is NO_LESSONS


def test_classes_shapes_and_neighbours_combine() -> None:
    belief: Belief = Estimate(SIZED)
    shape = (Worker(1.0, (0,)),)
    both = belief.of(shape).at(60)
    assert belief.at(60).of(shape) is both
    assert both.at(64) is both
    assert belief.at(0) is belief is belief.at(3).at(0)
    assert both.costs_ns(ONE) == belief.at(64).costs_ns(ONE), "without layers, a shape is as fast as a whole replica"
    for _ in range(40 * EVERY):
        both.observe(4, ONE, ms(1.3 * by_elements(4, 64)))
    assert both.correction == pytest.approx(1.3, abs=0.01)
    assert belief.at(64).correction == 1.0


def test_another_process_with_the_lessons_has_the_same_costs() -> None:
    for profile in (AT_128, SIZED):
        whole, other = Estimate(profile, margin=1.1), Estimate(profile, margin=1.1)
        for count in (1, 10, 400):
            other.at(24)
            teach(whole, by_elements, count, seed=count)
            other.apply(whole.correction, whole.prior_weight, whole.size_lessons)
            assert (other.correction, other.prior_weight) == (whole.correction, whole.prior_weight)
            for size in (0, *SIZES, 1000):
                assert other.at(size).costs_ns(ONE) == whole.at(size).costs_ns(ONE)


OBSERVED = st.lists(
    st.tuples(st.integers(1, 5_000), st.integers(1, 16), st.floats(1e-3, 1e5)), min_size=1, max_size=120
)
PROFILES = st.sampled_from(
    [
        AT_128,
        structs.replace(AT_128, latency_ms=Quadratic(0, 0, 9)),
        structs.replace(AT_128, max_batch=1),
        structs.replace(AT_128, sizes=(SizeLatency(200, AT_128.latency_ms),)),
    ]
)


@given(PROFILES, OBSERVED)
@settings(max_examples=60, deadline=None)
def test_costs_are_positive_and_grow_with_rows_and_size(
    profile: Profile, observed: list[tuple[int, int, float]]
) -> None:
    whole, twin = Estimate(profile), Estimate(profile)
    for size, rows, taken_ms in observed:
        for each in (whole, twin):
            each.at(size).observe(rows, ONE, ms(taken_ms))
    sizes = sorted({whole.classes.class_of(size) for size in (*(size for size, _, _ in observed), 1, 33, 700, 9_000)})
    costs_ns = [whole.at(size).costs_ns(ONE) for size in sizes]
    assert costs_ns == [twin.at(size).costs_ns(ONE) for size in sizes]
    for own_ns in (*costs_ns, whole.costs_ns(ONE)):
        assert own_ns[0] == 0
        assert own_ns[1] >= 1
        assert all(low <= high for low, high in pairwise(own_ns))
    for smaller, larger in pairwise(costs_ns):
        assert all(low <= high for low, high in zip(smaller, larger, strict=True))


@given(st.lists(st.tuples(*[st.floats(0.01, 10)] * 3), min_size=4, max_size=12))
def test_least_squares_has_no_better_neighbour(rows: list[tuple[float, ...]]) -> None:
    matrix = [[sum(row[a] * row[b] for row in rows) + (a == b) * 1e-3 for b in range(3)] for a in range(3)]
    target = [sum(row[a] for row in rows) for a in range(3)]

    def loss(x: Sequence[float]) -> float:
        squares = sum(x[a] * matrix[a][b] * x[b] for a in range(3) for b in range(3))
        return squares - 2 * sum(map(float.__mul__, x, target))

    found = least_squares(matrix, target)
    assert min(found) >= 0
    for place in range(3):
        for step in (-1e-3, 1e-3):
            moved = [max(0.0, each + step) if at == place else each for at, each in enumerate(found)]
            assert loss(found) <= loss(moved) + 1e-9 * (1 + abs(loss(found)))


def test_rows_that_were_dropped_count_in_the_mean() -> None:
    """A class that is dropped for its cost would otherwise seem to have gone."""
    whole = Estimate(AT_128)
    for _ in range(40):
        whole.at(16).observe(1, ONE, ms(by_elements(1, 16)))
    whole.at(512).observe(1, ONE, ms(by_elements(1, 512)))
    for _ in range(39):
        whole.at(512).miss(1)
        whole.at(64).miss(1)
    for _ in range(EVERY - 40):
        whole.at(16).observe(1, ONE, ms(by_elements(1, 16)))
    shares = {each.size: each.share for each in whole.size_lessons.classes}
    assert shares == {16: pytest.approx(64 / 104, rel=0.1), 512: pytest.approx(40 / 104, rel=0.1)}
    assert whole.costs_ns(ONE)[1] == pytest.approx(ms(6.6 * 64 / 104 + 56.2 * 40 / 104), rel=0.1)
