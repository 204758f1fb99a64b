"""Tensors with elements that NumPy does not have: text and BF16."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.tensor import (
    ARRAY_TYPES,
    ITEM_BYTES,
    Tensor,
    array_of,
    bfloats_of,
    elements_of,
    floats_of,
    join_strings,
    row_starts,
    split_strings,
)


@given(st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=5))))
def test_strings_are_split_as_they_were_joined(elements: list[bytes | str]) -> None:
    raw = [element.encode() if isinstance(element, str) else element for element in elements]
    assert split_strings(join_strings(elements)) == raw
    assert split_strings(memoryview(join_strings(elements))) == raw


@given(st.lists(st.binary(max_size=3), min_size=1), st.data())
def test_strings_that_end_early_are_not_split(elements: list[bytes], data: st.DataObject) -> None:
    whole = join_strings(elements)
    cut = data.draw(st.integers(1, len(whole) - 1))
    try:
        found = split_strings(whole[:cut])
    except ValueError:
        return
    assert join_strings(found) == whole[:cut]


@given(st.integers(0, 4), st.integers(0, 3), st.sampled_from([*ITEM_BYTES, "BYTES"]), st.randoms())
def test_the_rows_of_a_tensor_are_where_they_were_written(
    rows: int, columns: int, datatype: str, chance: Random
) -> None:
    def made(count: int) -> bytes:
        if datatype == "BYTES":
            return join_strings(b"x" * chance.randrange(5) for _ in range(count))
        return bytes(count * ITEM_BYTES[datatype])

    written = [made(columns) for _ in range(rows)]
    starts = row_starts(Tensor(datatype, (rows, columns), b"".join(written)))
    assert [end - start for start, end in pairwise(starts)] == list(map(len, written))
    assert row_starts(Tensor(datatype, (), made(1)))[0] == 0


@pytest.mark.parametrize("datatype", [*ITEM_BYTES, "BYTES"])
def test_a_model_gets_and_returns_every_type(datatype: str) -> None:
    data = join_strings([b"one", "zwölf".encode()]) if datatype == "BYTES" else bytes([1, 0] * ITEM_BYTES[datatype])
    array = array_of(datatype, (1, 2), data)
    assert (array.dtype, array.shape) == (ARRAY_TYPES[datatype], (1, 2))
    assert bytes(elements_of(array)) == data
    with pytest.raises(ValueError, match="reshape"):
        array_of(datatype, (3,), data)


def test_text_that_a_model_returns_may_be_str_or_bytes() -> None:
    assert elements_of(np.array([["a", b"\xff"]], dtype=object)) == b"\x01\0\0\0a\x01\0\0\0\xff"


@given(st.floats(width=32))
def test_a_float_is_rounded_to_the_nearest_bfloat(value: float) -> None:
    (found,) = floats_of(bfloats_of(np.array([value], np.float32)))
    if np.isnan(value):
        assert np.isnan(found)
        return
    bits = np.arange(2**16, dtype=np.uint16)
    all_numbers = floats_of(bits[(bits & 0x7F80) != 0x7F80]).astype(np.float64)
    nearest = np.abs(all_numbers - value).min()
    largest = all_numbers.max()
    assert abs(float(found) - value) == nearest if abs(value) <= largest else abs(found) >= largest
