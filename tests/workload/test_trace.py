"""A trace as a value: walked, cut, scaled, repeated and written."""

import itertools
import statistics as stdlib
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import MachineError
from sloop.units import NS_PER_MS, NS_PER_S, s
from sloop.workload.generate import Equal, Poisson, generated
from sloop.workload.parse import Unit
from sloop.workload.read import Format, TraceFile, read_trace
from sloop.workload.trace import (
    BLOCK_ARRIVALS,
    Trace,
    autocorrelation,
    compress,
    cut,
    repeat,
    scale,
    statistics,
    thin,
    trace_of,
    write_counts,
    write_times,
)

TIMES = st.lists(st.integers(0, 10 * NS_PER_S - 1), max_size=50).map(sorted)


def trace(times_ns: list[int], duration_ns: int | None = None) -> Trace:
    return trace_of(times_ns, duration_ns=duration_ns, name="test", provenance="assumed: a test")


@settings(max_examples=50)
@given(TIMES)
def test_counts_and_times_are_those_given(times_ns: list[int]) -> None:
    made = trace(times_ns, 10 * NS_PER_S)
    by_second = Counter(at_ns // NS_PER_S for at_ns in times_ns)
    assert list(made.times_ns()) == times_ns
    assert list(made.counts_per_s()) == [by_second[second] for second in range(10)]


def test_can_be_walked_twice_and_is_cut_into_blocks() -> None:
    made = trace(list(range(BLOCK_ARRIVALS + 1)))
    assert [len(block) for block in made.blocks()] == [BLOCK_ARRIVALS, 1]
    assert list(made.times_ns()) == list(made.times_ns())


def test_ends_just_after_its_last_arrival() -> None:
    assert trace([5, 7]).duration_ns == 8
    assert trace([]).duration_ns == 0
    assert list(trace([]).counts_per_s()) == []


OFFSETS = st.lists(st.integers(0, 100), max_size=30).map(sorted)


def trace_with(times_ns: list[int], duration_ns: int = 101) -> Trace:
    return trace_of(times_ns, duration_ns=duration_ns, name="test", provenance="assumed: a test")


@settings(max_examples=100)
@given(OFFSETS, st.integers(0, 100), st.integers(1, 150))
def test_cut_is_a_window(times_ns: list[int], start_ns: int, length_ns: int) -> None:
    window = cut(trace_with(times_ns), start_ns=start_ns, duration_ns=length_ns)
    expected = [at_ns - start_ns for at_ns in times_ns if start_ns <= at_ns < start_ns + length_ns]
    assert list(window.times_ns()) == expected
    assert window.duration_ns == min(length_ns, 101 - start_ns)


CHANGES: list[Callable[[Trace, float], Trace]] = [
    lambda one, factor: scale(one, factor, seed=1),
    lambda one, factor: thin(one, min(factor, 1.0), seed=1),
    compress,
    lambda one, factor: repeat(one, max(1, round(factor))),
]


@settings(max_examples=200)
@given(OFFSETS, st.floats(0.05, 5), st.sampled_from(CHANGES))
def test_a_changed_trace_is_sorted_inside_and_repeatable(
    times_ns: list[int], factor: float, change: Callable[[Trace, float], Trace]
) -> None:
    changed = change(trace_with(times_ns), factor)
    walked = list(changed.times_ns())
    assert walked == sorted(walked) == list(changed.times_ns())
    assert all(0 <= at_ns < changed.duration_ns for at_ns in walked)


def test_whole_factors_scale_exactly_and_keep_the_shape() -> None:
    original = generated(Poisson(100.0), seed=1, duration_ns=s(20))
    scaled = scale(original, 3.0, seed=1)
    assert len(list(scaled.times_ns())) == 3 * len(list(original.times_ns()))
    assert set(original.times_ns()) <= set(scaled.times_ns())
    assert list(scaled.counts_per_s()) == pytest.approx([3 * count for count in original.counts_per_s()], abs=4)


def test_thinned_poisson_is_poisson() -> None:
    found = statistics(thin(generated(Poisson(200.0), seed=1, duration_ns=s(1_000)), 0.25, seed=1))
    assert found.mean_rps == pytest.approx(50, rel=0.02)
    assert found.gap_cv == pytest.approx(1, rel=0.02)


def test_compress_and_repeat_change_the_duration() -> None:
    one = trace_with([0, 50, 100])
    assert list(compress(one, 2.0).times_ns()) == [0, 25, 50]
    assert compress(one, 2.0).duration_ns == 51
    assert list(repeat(one, 2).times_ns()) == [0, 50, 100, 101, 151, 201]
    assert repeat(one, 2).duration_ns == 202


def test_nothing_asked_changes_nothing() -> None:
    one = trace_with([1], NS_PER_S)
    assert one is scale(one, 1.0) is thin(one, 1.0) is compress(one, 1.0) is repeat(one, 1) is cut(one)


def test_what_is_written_can_be_read_back(tmp_path: Path) -> None:
    trace = generated(Poisson(300.0), seed=1, duration_ns=s(20))
    write_times(trace, tmp_path / "times.txt")
    write_counts(trace, tmp_path / "counts.txt")
    times = TraceFile(tmp_path / "times.txt", format=Format.TIMESTAMPS, unit=Unit.NS)
    assert list(read_trace(times).times_ns()) == list(trace.times_ns())
    assert read_trace(tmp_path / "counts.txt").counts_per_s() == trace.counts_per_s()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        write_counts(generated(Poisson(1.0), seed=1, duration_ns=s(1)), tmp_path / "none" / "x")


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20 * NS_PER_S - 1), min_size=3, max_size=60).map(sorted))
def test_against_plain_formulas(times_ns: list[int]) -> None:
    trace = trace_of(times_ns, duration_ns=20 * NS_PER_S, name="test", provenance="assumed: a test")
    found = statistics(trace)
    counts = list(trace.counts_per_s())
    gaps = [after - before for before, after in itertools.pairwise(times_ns)]
    assert found.requests == len(times_ns)
    assert found.mean_rps == pytest.approx(len(times_ns) / 20)
    assert found.dispersion == pytest.approx(stdlib.pvariance(counts) / stdlib.mean(counts), abs=1e-6)
    if any(gaps):
        assert found.gap_cv == pytest.approx(stdlib.pstdev(gaps) / stdlib.mean(gaps), abs=1e-5)
    assert found.zeros == counts.count(0)
    assert found.max_rps == max(counts)


def test_silence_and_empty_traces() -> None:
    quiet = statistics(
        trace_of([0, s(1), s(4), s(4) + 5], duration_ns=s(9), name="quiet", provenance="assumed: a test")
    )
    assert (quiet.zeros, quiet.longest_silence_s) == (6, 4)
    empty = statistics(trace_of([], name="empty", provenance="assumed: a test"))
    assert (empty.requests, empty.mean_rps, empty.dispersion, empty.gap_cv, empty.acf) == (0, 0.0, None, None, {})
    assert dict(empty.rows())["CV of gaps"] == "–"


def test_autocorrelation_of_a_square_wave() -> None:
    wave = array("q", [0] * 10 + [10] * 10) * 20
    assert autocorrelation(wave, 20) == pytest.approx(0.95, abs=0.01)
    assert autocorrelation(wave, 10) == pytest.approx(-0.975, abs=0.01)
    assert autocorrelation(array("q", [5] * 50), 1) is None
    assert autocorrelation(array("q", [1, 2]), 2) is None


def test_rows_say_units() -> None:
    found = statistics(trace_of([0, NS_PER_MS], duration_ns=s(2), name="two", provenance="assumed: a test"))
    assert ("requests", "2") in found.rows()
    assert ("mean rate", "1.000 rps") in found.rows()


def test_the_variation_of_gaps_is_that_of_the_first_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.workload.trace.GAP_ARRIVALS_MAX", 100)
    spaced = generated(Equal(10.0), seed=0, duration_ns=s(30))
    late_burst = trace_of([*spaced.times_ns(), *[s(40)] * 50], name="test", provenance="assumed: a test")
    found = statistics(late_burst)
    assert found.requests == 350
    assert ("CV of gaps", f"{found.gap_cv:.3f} (first 100 arrivals)") in found.rows()


def test_the_gap_between_blocks_counts() -> None:
    blocks = [[0, 10], [], [20, 30], [40]]
    assert statistics(Trace("test", 50, "assumed: a test", lambda: iter(blocks))).gap_cv == 0.0
