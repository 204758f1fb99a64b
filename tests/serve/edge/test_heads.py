"""Fields of heads, counted as they pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.frames import CONTINUATION, DATA, END_HEADERS, HEADERS, PREFACE, encode, frame, text
from sloop.serve.edge.grpc.heads import BLOCK_BYTES_MAX, FIELDS_MAX, Heads, TooMuch, check_fields

FIELDS = [(f"name-{place}", "v" * place) for place in range(FIELDS_MAX)]
KEPT = b"\x40" + text(b"x") + text(b"v" * 300)
"""A field that goes into the table, where it is the first: 0xbe."""


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        (encode(*FIELDS), FIELDS_MAX),
        (KEPT + b"\xbe" * 100, 101),
        (b"\x3f\xe1\x1f" + b"\x82" * 7, 7),
        (b"\xff\x80\x01" + b"\x7f\x01" + text(b"z" * 200, is_compressed=True), 2),
        (b"\x1f\x00" + text(b"never indexed") + b"\x0f\x10" + text(b""), 2),
    ],
    ids=["literals", "of the table", "after the table's size", "long numbers", "names of the table"],
)
def test_each_form_of_a_field_counts_once(block: bytes, fields: int) -> None:
    check_fields(block + b"\x82" * (FIELDS_MAX - fields))
    with pytest.raises(TooMuch):
        check_fields(block + b"\x82" * (FIELDS_MAX - fields + 1))


@pytest.mark.parametrize("size", [1, 7, 100, 10**6])
def test_heads_are_found_among_other_frames_however_they_are_cut(size: int) -> None:
    block = encode(*FIELDS)
    padded = bytes((4,)) + bytes(5) + block[:1000] + bytes(4)
    sent = PREFACE + frame(4, 0, 0) + frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, 0, 1, b"\xbe" * 9000)
    sent += frame(HEADERS, 0x28, 3, padded) + frame(CONTINUATION, END_HEADERS, 3, block[1000:])
    sent += frame(DATA, 1, 3, frame(HEADERS, END_HEADERS, 1, b"\xbe" * 1000))
    heads = Heads()
    found = [heads.follow(sent[at : at + size], 1000) for at in range(0, len(sent), size)]
    assert b"".join(part for part, _ in found) == sent
    assert sum(cost for _, cost in found) == 10 + 1 + 2, "the settings, a head, and one in two parts"
    for bad in (
        frame(HEADERS, END_HEADERS, 5, KEPT + b"\xbe" * FIELDS_MAX),
        frame(HEADERS, 0, 5, KEPT) + frame(CONTINUATION, END_HEADERS, 5, b"\xbe" * FIELDS_MAX),
        frame(HEADERS, 0, 5) + frame(CONTINUATION, 0, 5, bytes(10_000)) * (BLOCK_BYTES_MAX // 10_000 + 1),
        frame(HEADERS, END_HEADERS, 5, bytes(16_385)),
        frame(6, 0, 0, bytes(8)) * 1001,
    ):
        with pytest.raises(TooMuch):
            Heads().follow(PREFACE + bad, 1000)
    assert Heads().follow(PREFACE + frame(HEADERS, END_HEADERS, 5, block)[:-1], 1000)[0] == PREFACE


@given(st.binary(max_size=200), st.integers(1, 50))
def test_what_is_broken_is_left_to_grpcio(data: bytes, size: int) -> None:
    check_fields(data[:FIELDS_MAX])
    heads = Heads()
    for at in range(0, len(data), size):
        try:
            heads.follow(data[at : at + size], 1000)
        except TooMuch:
            return
