from itertools import chain
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.units import NS_PER_S
from sloop.workload.spread import Spread, counts_at, scaled_counts, spread_counts

COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=10)
EXACT = [Spread.UNIFORM, Spread.EQUAL, Spread.BURST]


@settings(max_examples=50, deadline=None)
@given(COUNTS, st.sampled_from(list(Spread)), st.floats(0.1, 5_000))
def test_sorted_within_the_trace_and_repeatable(counts: list[int], spread: Spread, mean_ms: float) -> None:
    duration_ns = len(counts) * NS_PER_S - 1
    one, two = (
        list(chain.from_iterable(spread_counts(counts, spread, Random(1), mean_ms=mean_ms, duration_ns=duration_ns)))
        for _ in range(2)
    )
    assert one == two == sorted(one)
    assert all(0 <= at_ns < duration_ns for at_ns in one)


@pytest.mark.parametrize("spread", EXACT)
def test_exact_spreads_keep_each_second_s_count(spread: Spread) -> None:
    counts = [3, 0, 20, 1]
    blocks = spread_counts(counts, spread, Random(0), mean_ms=5, duration_ns=4 * NS_PER_S)
    assert [len(block) for block in blocks] == counts


def test_equal_starts_on_the_second() -> None:
    blocks = spread_counts([2, 4], Spread.EQUAL, Random(0), mean_ms=0, duration_ns=2 * NS_PER_S)
    quarter = NS_PER_S // 4
    assert list(blocks) == [[0, 2 * quarter], [NS_PER_S + place * quarter for place in range(4)]]


def test_a_burst_reaches_into_later_seconds_in_order() -> None:
    blocks = list(spread_counts([50, 0, 0, 50], Spread.BURST, Random(0), mean_ms=2_000, duration_ns=4 * NS_PER_S))
    assert len(blocks[1]) > 0
    for second, block in enumerate(blocks):
        assert block == sorted(block)
        assert all(at_ns // NS_PER_S == second for at_ns in block)


def test_burst_offsets_have_the_published_mean() -> None:
    """Sponge specification 4.1: 20 offsets of mean 50 ms, so a second's requests are in within about 180 ms."""
    blocks = list(spread_counts([20] * 2_000, Spread.BURST, Random(0), mean_ms=50, duration_ns=2_000 * NS_PER_S))
    offsets_ms = [at_ns % NS_PER_S / 1e6 for block in blocks for at_ns in block]
    last_ms = [block[-1] % NS_PER_S / 1e6 for block in blocks]
    assert sum(offsets_ms) / len(offsets_ms) == pytest.approx(50, rel=0.02)
    assert sum(last_ms) / len(last_ms) == pytest.approx(180, rel=0.02)  # 50 ms times the 20th harmonic number


def test_early_arrivals_fill_two_thirds_of_their_second() -> None:
    """IPA specification 2.13: gaps of mean 1/(1.5 n), so that the last of n comes after two thirds of a second."""
    blocks = list(spread_counts([200] * 500, Spread.EARLY, Random(0), mean_ms=0, duration_ns=500 * NS_PER_S))
    assert [len(block) for block in blocks] == [200] * 500
    last_s = [block[-1] % NS_PER_S / NS_PER_S for block in blocks]
    assert sum(last_s) / len(last_s) == pytest.approx(2 / 3, rel=0.02)


@settings(max_examples=50, deadline=None)
@given(COUNTS, st.floats(0.01, 10))
def test_scaling_counts_loses_less_than_one_request(counts: list[int], factor: float) -> None:
    scaled = list(scaled_counts(counts, factor))
    for until in range(len(counts) + 1):
        assert -1e-6 < sum(counts[:until]) * factor - sum(scaled[:until]) < 1 + 1e-6


def test_a_fractional_rate_alternates() -> None:
    assert list(counts_at(2.5, 4 * NS_PER_S)) == [2, 3, 2, 3]
    assert list(counts_at(0.25, 4 * NS_PER_S)) == [0, 0, 0, 1]
