"""Blocks: what is written reads back, in frames and in arenas, and what is malformed is refused."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.blocks import (
    CODES,
    INLINE_BYTES_MAX,
    BlockReader,
    layout_of,
    read_layout,
    tensors_in,
    write_block,
)
from sloop.serve.transport import ProtocolError
from sloop.shared_memory import ALIGNMENT, Address, Arena, Arenas
from sloop.tensor import ITEM_BYTES, Tensor


@st.composite
def tensors(draw: st.DrawFn) -> list[Tensor]:
    """A few tensors of all types, text with any size."""
    found = []
    for _ in range(draw(st.integers(0, 4))):
        datatype, shape = draw(st.sampled_from(CODES)), tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        size = ITEM_BYTES.get(datatype, 0)
        for dim in shape:
            size *= dim
        data = draw(st.binary(max_size=40)) if datatype == "BYTES" else draw(st.binary(min_size=size, max_size=size))
        found.append(Tensor(datatype, shape, data))
    return found


@given(tensors())
@settings(max_examples=100)
def test_a_block_reads_back(written: list[Tensor]) -> None:
    block = write_block(written, None)
    assert isinstance(block, bytes)
    assert [(t.datatype, t.shape, bytes(t.data)) for t in tensors_in(block)] == [
        (t.datatype, t.shape, t.data) for t in written
    ]
    layout = read_layout(block)
    assert layout.size == len(block)
    assert all(start % ALIGNMENT == 0 for start, _, _ in layout.places)


@given(tensors(), st.data())
@settings(max_examples=100)
def test_a_block_that_was_changed_is_refused_or_stays_within_its_bytes(
    written: list[Tensor], data: st.DataObject
) -> None:
    block = bytearray(write_block(written, None))  # type: ignore[arg-type]  # bytes without an arena
    place = data.draw(st.integers(0, len(block) - 1))
    block[place] = data.draw(st.integers(0, 255))
    try:
        found = tensors_in(bytes(block))
    except ProtocolError:
        return
    assert sum(len(tensor.data) for tensor in found) <= len(block)


@given(st.binary(max_size=100))
@settings(max_examples=100)
def test_any_bytes_are_a_block_or_refused(data: bytes) -> None:
    try:
        tensors_in(data)
    except ProtocolError:
        return


def test_a_table_beyond_its_bound_is_not_written() -> None:
    with pytest.raises(ProtocolError, match="the shapes of 3000 tensors"):
        layout_of((("FP32", (1, 2, 3, 4), 96),) * 3000)


@pytest.fixture
def arenas() -> Iterator[tuple[Arenas, Arena, list[Address]]]:
    """An arena of 1 MiB, and what its writer is told to free."""
    freed: list[Address] = []
    held = Arenas()
    made = held.make(1 << 20, freed.append)
    if made is None:
        pytest.skip("this system has no memory to share")
    yield held, Arena(made.number, made.fd), freed
    held.abandon(made)


def test_small_blocks_travel_within_frames_and_large_ones_are_in_the_arena(
    arenas: tuple[Arenas, Arena, list[Address]],
) -> None:
    _, arena, _ = arenas
    small = write_block([Tensor("UINT8", (INLINE_BYTES_MAX - 64,), bytes(INLINE_BYTES_MAX - 64))], arena)
    assert isinstance(small, bytes)
    assert arena.held_bytes == 0
    data = os.urandom(INLINE_BYTES_MAX)
    large = write_block([Tensor("UINT8", (3,), b"abc"), Tensor("UINT8", (INLINE_BYTES_MAX,), data)], arena)
    assert isinstance(large, Address)
    first, second = BlockReader({0: os.getpid()}).tensors(large)
    assert (bytes(first.data), bytes(second.data)) == (b"abc", data)
    assert memoryview(second.data).readonly
    arena.free(large)
    assert arena.held_bytes == 0


def test_an_address_without_a_block_is_refused(arenas: tuple[Arenas, Arena, list[Address]]) -> None:
    _, arena, _ = arenas
    reader = BlockReader({0: os.getpid()})
    for block in (
        Address(arena.number, 1 << 20, 8),
        Address(arena.number, -8, 8),
        Address(arena.number, 0, 8),
        Address(arena.number + (1 << 20), 0, 8),
        Address((7 << 20) | 900_000, 0, 8),
    ):
        with pytest.raises(ProtocolError):
            reader.tensors(block)
