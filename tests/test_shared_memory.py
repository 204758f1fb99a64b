"""Memory that two processes share."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.shared_memory import (
    ALIGNMENT,
    KEPT_BYTES_MAX,
    Address,
    Arena,
    ArenaFull,
    ArenaReader,
    Arenas,
    FreeRanges,
    HeldArena,
    RelayedArenas,
    SharedMemory,
    offsets,
    write_tensors,
)


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    made = SharedMemory.make()
    if made is None:
        pytest.skip("this system has no anonymous memory to share")
    with closing(made):
        yield made


@settings(max_examples=50)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_offsets_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    starts, total = offsets(sizes)
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*starts[1:], total], strict=True))


@settings(max_examples=50)
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


# Arenas


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
@settings(max_examples=200)
def test_free_ranges_never_overlap_what_is_taken_and_join_again(steps: list[tuple[bool, int]]) -> None:
    """Against a table of single places."""
    size = 40
    ranges, places, taken = FreeRanges(size), [False] * size, list[tuple[int, int]]()
    for is_give, count in steps:
        if is_give and taken:
            start, length = taken.pop(count % len(taken))
            ranges.give(start, length)
            places[start : start + length] = [False] * length
            continue
        start_or_none = ranges.take(count)
        text = "".join("x" if place else "." for place in places)
        gaps = [gap for gap in text.split("x") if len(gap) >= count]
        assert (start_or_none is None) == (not gaps)
        if start_or_none is not None:
            assert not any(places[start_or_none : start_or_none + count])
            assert len(min(gaps, key=len)) >= count
            places[start_or_none : start_or_none + count] = [True] * count
            taken.append((start_or_none, count))
    for start, length in taken:
        ranges.give(start, length)
    assert ranges.take(size) == 0, "all is one range again"


@pytest.fixture
def arena() -> Iterator[tuple[Arenas, HeldArena, Arena]]:
    arenas = Arenas()
    held = arenas.make(256 << 20, lambda _: None)
    yield arenas, held, Arena(held.number, held.fd)
    arenas.abandon(held)


def used_bytes(held: HeldArena) -> int:
    """The memory that an arena takes."""
    return os.fstat(held.fd).st_blocks * 512


def test_memory_returns_after_a_burst(arena: tuple[Arenas, HeldArena, Arena]) -> None:
    _, held, writer = arena
    blocks = []
    for number in range(100):
        block, memory = writer.allocate(1_000_000)
        memory[:] = bytes([number]) * 1_000_000
        blocks.append(block)
    assert used_bytes(held) >= 100_000_000
    for block in blocks:
        writer.free(block)
    assert used_bytes(held) <= KEPT_BYTES_MAX
    kept, memory = writer.allocate(1_000_000)
    assert used_bytes(held) <= KEPT_BYTES_MAX, "what is kept is used first"
    writer.free(kept)
    writer.trim()
    assert used_bytes(held) == 0


def test_an_arena_is_bounded_and_blocks_of_other_sizes_do_not_block_it(arena: tuple[Arenas, HeldArena, Arena]) -> None:
    _, held, writer = arena
    for size in (10_000, 3_000_000, 100_000_000):
        blocks: list[Address] = []
        with contextlib.suppress(ArenaFull):
            while True:
                blocks.append(writer.allocate(size)[0])  # it ends by an exception
        assert len(blocks) * size > 0.65 * held_size(held)
        for block in blocks:
            writer.free(block)
    with pytest.raises(KeyError):
        writer.free(blocks[0])


def held_size(held: HeldArena) -> int:
    return os.fstat(held.fd).st_size


def test_blocks_of_a_writer_that_has_ended_stay_until_they_are_free(arena: tuple[Arenas, HeldArena, Arena]) -> None:
    arenas, held, writer = arena
    block, memory = writer.allocate(100_000)
    memory[:5] = b"large"
    arenas.hold(block)
    arenas.abandon(held)
    reader = ArenaReader({0: os.getpid()})
    view = reader.read(block)
    assert bytes(view[:5]) == b"large"
    arenas.free(block)
    assert not len(arenas)
    assert bytes(view[:5]) == bytes(5), "its memory is given back although it is mapped"
    with pytest.raises(ValueError, match=r"closed|cannot be opened"):
        ArenaReader({0: os.getpid()}).read(block)


def test_a_block_of_another_holder_is_freed_and_read_there() -> None:
    ours, theirs, freed = Arenas(), Arenas(holder=3), list[Address]()
    ours.add_holder(3, freed.append)
    held = theirs.make(1 << 20, lambda _: None)
    assert held is not None
    block, memory = Arena(held.number, held.fd).allocate(5)
    memory[:] = b"other"
    assert block.holder == 3
    ours.free(block)
    assert freed == [block]
    with pytest.raises(ValueError, match="held by process 3, which is not on this machine"):
        ArenaReader({0: os.getpid()}).read(block)
    assert bytes(ArenaReader({0: 1, 3: os.getpid()}).read(block)) == b"other"
    ours.remove_holder(3)
    ours.free(block)
    assert freed == [block], "a holder that has gone is told nothing"


def test_a_reader_keeps_no_memory_of_arenas_that_are_closed() -> None:
    """Of a process that was killed, nobody else gives it back."""
    pids = {number: os.getpid() for number in (3, 4, 5)}
    arenas = [Arenas(holder=number) for number in pids]
    reader, blocks = ArenaReader(pids), list[Address]()
    for made in arenas:
        held = made.make(1 << 20, lambda _: None)
        assert held is not None
        block, memory = Arena(held.number, held.fd).allocate(5)
        memory[:] = b"hello"
        blocks.append(block)
    view = reader.read(blocks[0])
    reader.read(blocks[1])
    (held,) = arenas[0]._held.values()
    os.close(held.fd)  # as at the end of its process
    del pids[4]
    reader.read(blocks[2])
    assert list(reader._open) == [blocks[2].arena]
    assert bytes(view) == b"hello", "what is in use stays"
    for made in arenas[1:]:
        made.close()


def test_an_arena_of_another_process_is_found_with_the_one_that_relays_it() -> None:
    theirs, relayed = Arenas(holder=3), RelayedArenas(5)
    held = theirs.make(1 << 20, lambda _: None)
    assert held is not None
    block, memory = Arena(held.number, held.fd).allocate(5)
    memory[:] = b"other"
    assert relayed.relay(block) is None, "nobody has said where it is"
    relayed.set_holders({3: os.getpid()})
    found = relayed.relay(block)
    assert found is not None
    assert (found.holder, found.offset, found.size) == (5, block.offset, block.size)
    assert relayed.relay(block) == found
    assert bytes(ArenaReader({5: os.getpid()}).read(found)) == b"other"
    relayed.set_holders({4: os.getpid()})
    with pytest.raises(ValueError, match=r"closed|cannot be opened"):
        ArenaReader({5: os.getpid()}).read(found)
    relayed.set_holders({3: os.getpid()})
    theirs.close()
    assert relayed.relay(block) is None
    relayed.set_holders({3: 1 << 22})  # no process has this id
    assert relayed.relay(block) is None
    relayed.close()


def test_no_arena_has_the_number_of_one_of_before() -> None:
    """The next process that holds arenas may use the same descriptor: the numbers differ all the same."""
    held, other = Arenas().make(1 << 20, lambda _: None), Arenas().make(1 << 20, lambda _: None)
    assert held is not None
    assert other is not None
    assert (held.number ^ other.number) & ~((1 << 20) - 1)
    for each in (held, other):
        os.close(each.fd)


def test_an_arena_cannot_be_written_by_its_readers_nor_made_smaller(arena: tuple[Arenas, HeldArena, Arena]) -> None:
    _, held, writer = arena
    block, _ = writer.allocate(10)
    view = ArenaReader({0: os.getpid()}).read(block)
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(held.fd, 0)
