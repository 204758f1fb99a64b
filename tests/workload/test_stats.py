import itertools
import statistics as stdlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.units import NS_PER_MS, NS_PER_S, s
from sloop.workload.stats import autocorrelation, statistics
from sloop.workload.trace import trace_of


@settings(max_examples=50, deadline=None)
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
