from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.units import NS_PER_S
from sloop.workload.trace import BLOCK_ARRIVALS, Trace, trace_of

TIMES = st.lists(st.integers(0, 10 * NS_PER_S - 1), max_size=50).map(sorted)


def trace(times_ns: list[int], duration_ns: int | None = None) -> Trace:
    return trace_of(times_ns, duration_ns=duration_ns, name="test", provenance="assumed: a test")


@settings(max_examples=50, deadline=None)
@given(TIMES)
def test_counts_and_times_are_those_given(times_ns: list[int]) -> None:
    made = trace(times_ns, 10 * NS_PER_S)
    by_second = Counter(at_ns // NS_PER_S for at_ns in times_ns)
    assert list(made.times_ns()) == times_ns
    assert list(made.to_array()) == times_ns
    assert list(made.counts_per_s()) == [by_second[second] for second in range(10)]


def test_can_be_walked_twice_and_is_cut_into_blocks() -> None:
    made = trace(list(range(BLOCK_ARRIVALS + 1)))
    assert [len(block) for block in made.blocks()] == [BLOCK_ARRIVALS, 1]
    assert list(made.times_ns()) == list(made.times_ns())


def test_ends_just_after_its_last_arrival() -> None:
    assert trace([5, 7]).duration_ns == 8
    assert trace([]).duration_ns == 0
    assert list(trace([]).counts_per_s()) == []
