from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.units import NS_PER_S, s
from sloop.workload.generate import Poisson, generated
from sloop.workload.shape import compress, cut, repeat, scale, thin
from sloop.workload.stats import statistics
from sloop.workload.trace import Trace, trace_of

TIMES = st.lists(st.integers(0, 100), max_size=30).map(sorted)


def trace(times_ns: list[int], duration_ns: int = 101) -> Trace:
    return trace_of(times_ns, duration_ns=duration_ns, name="test", provenance="assumed: a test")


@settings(max_examples=100, deadline=None)
@given(TIMES, st.integers(0, 100), st.integers(1, 150))
def test_cut_is_a_window(times_ns: list[int], start_ns: int, length_ns: int) -> None:
    window = cut(trace(times_ns), start_ns=start_ns, duration_ns=length_ns)
    expected = [at_ns - start_ns for at_ns in times_ns if start_ns <= at_ns < start_ns + length_ns]
    assert list(window.times_ns()) == expected
    assert window.duration_ns == min(length_ns, 101 - start_ns)


CHANGES: list[Callable[[Trace, float], Trace]] = [
    lambda one, factor: scale(one, factor, seed=1),
    lambda one, factor: thin(one, min(factor, 1.0), seed=1),
    compress,
    lambda one, factor: repeat(one, max(1, round(factor))),
]


@settings(max_examples=200, deadline=None)
@given(TIMES, st.floats(0.05, 5), st.sampled_from(CHANGES))
def test_a_changed_trace_is_sorted_inside_and_repeatable(
    times_ns: list[int], factor: float, change: Callable[[Trace, float], Trace]
) -> None:
    changed = change(trace(times_ns), factor)
    walked = list(changed.times_ns())
    assert walked == sorted(walked) == list(changed.times_ns())
    assert all(0 <= at_ns < changed.duration_ns for at_ns in walked)


def test_whole_factors_scale_exactly_and_keep_the_shape() -> None:
    original = generated(Poisson(100.0), seed=1, duration_ns=s(20))
    scaled = scale(original, 3.0, seed=1)
    assert len(scaled.to_array()) == 3 * len(original.to_array())
    assert set(original.to_array()) <= set(scaled.to_array())
    assert list(scaled.counts_per_s()) == pytest.approx([3 * count for count in original.counts_per_s()], abs=4)


def test_thinned_poisson_is_poisson() -> None:
    found = statistics(thin(generated(Poisson(200.0), seed=1, duration_ns=s(1_000)), 0.25, seed=1))
    assert found.mean_rps == pytest.approx(50, rel=0.02)
    assert found.gap_cv == pytest.approx(1, rel=0.02)


def test_compress_and_repeat_change_the_duration() -> None:
    one = trace([0, 50, 100])
    assert list(compress(one, 2.0).times_ns()) == [0, 25, 50]
    assert compress(one, 2.0).duration_ns == 51
    assert list(repeat(one, 2).times_ns()) == [0, 50, 100, 101, 151, 201]
    assert repeat(one, 2).duration_ns == 202


def test_nothing_asked_changes_nothing() -> None:
    one = trace([1], NS_PER_S)
    assert one is scale(one, 1.0) is thin(one, 1.0) is compress(one, 1.0) is repeat(one, 1) is cut(one)
