"""Memory that two processes share."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.shared_memory import ALIGNMENT, SharedMemory, offsets, write_tensors


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    made = SharedMemory.make()
    if made is None:
        pytest.skip("this system has no anonymous memory to share")
    with closing(made):
        yield made


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_offsets_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    starts, total = offsets(sizes)
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*starts[1:], total], strict=True))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=200), max_size=4), max_size=5), st.integers(0, 3))
def test_one_side_reads_what_the_other_wrote_after_any_growth(tensors: list[list[bytes]], before: int) -> None:
    ours = SharedMemory.make()
    if ours is None:
        pytest.skip("this system has no anonymous memory to share")
    theirs = SharedMemory(os.dup(ours.fd))
    with closing(ours), closing(theirs):
        for power in range(before):
            ours.writable(100 << (6 * power))
            theirs.readable(100 << (6 * power))
        size = write_tensors(ours, tensors)
        starts, total = offsets(len(b"".join(parts)) for parts in tensors)
        assert size == total
        found = theirs.readable(size)
        for start, parts in zip(starts, tensors, strict=True):
            whole = b"".join(parts)
            assert bytes(found[start : start + len(whole)]) == whole


def test_arrays_survive_growth(shared: SharedMemory) -> None:
    shared.writable(10)[:] = b"0123456789"
    before = shared.readable(10)
    shared.writable(10_000_000)
    assert bytes(before) == bytes(shared.readable(10)) == b"0123456789"


def test_reading_beyond_the_end_is_refused(shared: SharedMemory) -> None:
    shared.writable(10)
    with pytest.raises(ValueError, match="are announced"):
        SharedMemory(shared.fd).readable(1_000_000)
