import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.frames import (
    CODES,
    HEADER,
    PAYLOAD_BYTES_MAX,
    TABLE_BYTES_MAX,
    Kind,
    ProtocolError,
    pack_head,
    pack_table,
    unpack_head,
    unpack_table,
)
from sloop.tensor import ITEM_BYTES

tensors = st.tuples(st.sampled_from(CODES), st.lists(st.integers(0, 9), max_size=5).map(tuple))


@st.composite
def passes(draw: st.DrawFn) -> list[list[tuple[str, tuple[int, ...]]]]:
    width = draw(st.integers(0, 3))
    return draw(st.lists(st.lists(tensors, min_size=width, max_size=width), max_size=4))


def size_bytes(table: list[list[tuple[str, tuple[int, ...]]]]) -> int:
    total = 0
    for row in table:
        for datatype, shape in row:
            size = ITEM_BYTES[datatype]
            for dim in shape:
                size *= dim
            total += size
    return total


def test_a_head_reads_back() -> None:
    head = unpack_head(pack_head(Kind.DONE, 7, -3, 12, 600_000))
    assert (head.kind, head.subject, head.value, head.table_bytes, head.payload_bytes) == (
        Kind.DONE,
        7,
        -3,
        12,
        600_000,
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes(HEADER.size), "begins with"),
        (HEADER.pack(b"SL", 9, Kind.RUN, 0, 0, 0, 0), "version 9"),
        (HEADER.pack(b"SL", 1, 99, 0, 0, 0, 0), "unknown kind 99"),
        (HEADER.pack(b"SL", 1, Kind.RUN, TABLE_BYTES_MAX + 1, 0, 0, 0), "announces"),
        (HEADER.pack(b"SL", 1, Kind.RUN, 0, PAYLOAD_BYTES_MAX + 1, 0, 0), "announces"),
    ],
)
def test_a_malformed_head_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        unpack_head(data)


@given(passes())
@settings(max_examples=50, deadline=None)
def test_a_table_reads_back(table: list[list[tuple[str, tuple[int, ...]]]]) -> None:
    found = unpack_table(pack_table(table), size_bytes(table))
    assert [[(piece.datatype, piece.shape) for piece in row] for row in found] == table


@given(passes(), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_a_table_must_fill_the_payload(table: list[list[tuple[str, tuple[int, ...]]]], more: int) -> None:
    with pytest.raises(ProtocolError, match="describes"):
        unpack_table(pack_table(table), size_bytes(table) + more)


@given(st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_table_or_refused(data: bytes) -> None:
    try:
        unpack_table(data, 0)
    except ProtocolError:
        return


def test_a_table_beyond_its_bound_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="shapes"):
        pack_table([[("FP32", (1, 2, 3, 4))]] * 10_000)
