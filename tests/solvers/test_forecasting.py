"""Rates of whole seconds from counts of short intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.solvers.forecasting import seconds_rps
from sloop.units import ms, s

counts_of = st.lists(st.integers(0, 50), max_size=60)


@given(counts_of, st.sampled_from([1, 2, 5, 10]))
def test_the_newest_seconds_by_brute_force(counts: list[int], width: int) -> None:
    found = seconds_rps(counts, s(1) // width)
    newest_first = []
    left = list(counts)
    while len(left) >= width:
        newest_first.append(float(sum(left.pop() for _ in range(width))))
    assert found == (newest_first[::-1] or ([sum(counts) * width / len(counts)] if counts else []))


def test_intervals_that_do_not_divide_a_second() -> None:
    assert seconds_rps([3, 3, 3, 6, 6, 6], ms(300)) == pytest.approx([10, 20])
    assert seconds_rps([30, 60], s(2)) == [15, 30]
