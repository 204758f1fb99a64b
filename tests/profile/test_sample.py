"""Samples keep what matters of the runs they stand for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.profile.sample import likely, percentile, sample_of


def test_a_cell_keeps_percentiles_and_equally_likely_durations() -> None:
    sample = sample_of(2, 0.5, [n * 1_000_000 for n in range(160, 0, -1)])
    assert (sample.batch, sample.cores, sample.p50_ms, sample.p99_ms, sample.n) == (2, 0.5, 80, 159, 160)
    assert sample.likely_ms[:3] == (1.8, 4.2, 6.8)  # of 1, 2 and half of 3; half of 3, 4 and 5; 6, 7 and half of 8
    assert len(sample.likely_ms) == 64
    assert sum(sample.likely_ms) / 64 == pytest.approx(80.5)


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=100), st.integers(1, 20))
def test_equally_likely_durations_keep_order_range_and_mean(values: list[float], count: int) -> None:
    values.sort()
    found = likely(values, count)
    assert sum(found) / count == pytest.approx(sum(values) / len(values))
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(found))
    assert values[0] * (1 - 1e-6) <= found[0]
    assert found[-1] <= values[-1] * (1 + 1e-6)


def test_percentile_is_the_nearest_rank() -> None:
    values = list(range(1, 201))
    assert (percentile(values, 50), percentile(values, 99), percentile([5], 99)) == (100, 198, 5)
