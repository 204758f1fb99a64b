from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.frames import ProtocolError, pack_table, unpack_table
from sloop.serve.passes import cut, is_batchable, join
from sloop.tensor import Port, Signature, Tensor


def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return Tensor("FP32", array.shape, array.astype("<f4").tobytes())


@st.composite
def batches(draw: st.DrawFn) -> list[list[Tensor]]:
    """Requests with two tensors of equal rows each, in a few different row shapes."""
    requests = []
    for index in range(draw(st.integers(1, 6))):
        rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
        requests.append(
            [
                tensor(np.full((rows, width), index, np.float32)),
                tensor(np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 100 * index),
            ]
        )
    return requests


@given(batches(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_cutting_an_echo_gives_every_request_its_own_back(requests: list[list[Tensor]], batchable: bool) -> None:
    joined = join(requests, batchable=batchable)
    payload = b"".join(chain.from_iterable(joined.payload))
    echoed = cut(joined, joined.table, memoryview(payload))
    assert [[(t.datatype, t.shape, bytes(t.data)) for t in row] for row in echoed] == [
        [(t.datatype, t.shape, t.data) for t in row] for row in requests
    ]


@given(batches())
@settings(max_examples=50, deadline=None)
def test_requests_of_one_shape_share_a_pass(requests: list[list[Tensor]]) -> None:
    joined = join(requests, batchable=True)
    passes = unpack_table(joined.table, joined.size_bytes)
    assert len(passes) == len({tuple(t.shape[1:] for t in tensors) for tensors in requests})
    assert [pieces[0].shape[0] for pieces in passes] == [sum(rows for _, rows in held) for held in joined.members]


def test_joining_copies_nothing() -> None:
    data = memoryview(bytearray(8))
    joined = join([[Tensor("FP32", (1, 2), data)], [Tensor("FP32", (1, 2), data)]], batchable=True)
    assert all(part is data for parts in joined.payload for part in parts)


def test_an_output_without_a_row_per_row_of_input_fails_the_batch() -> None:
    row = Tensor("FP32", (1, 1), bytes(4))
    joined = join([[row], [row]], batchable=True)
    with pytest.raises(ValueError, match=r"output 0 has the shape \[1\] for 2 rows"):
        cut(joined, pack_table([[("FP32", (1,))]]), memoryview(bytes(4)))


def test_a_request_alone_may_get_any_shape() -> None:
    joined = join([[Tensor("FP32", (2, 1), bytes(8))]], batchable=True)
    [[answer]] = cut(joined, pack_table([[("INT64", ())]]), memoryview(bytes(8)))
    assert answer.shape == ()


def test_an_answer_to_other_passes_is_refused() -> None:
    joined = join([[Tensor("FP32", (1, 1), bytes(4))]], batchable=True)
    with pytest.raises(ProtocolError, match="2 passes, its batch 1"):
        cut(joined, pack_table([[], []]), memoryview(b""))


def test_a_model_is_batchable_where_every_first_dimension_is_open() -> None:
    either, fixed = Port("x", "FP32", (-1, 2)), Port("y", "FP32", (1, 2))
    assert is_batchable(Signature((either,), (either,)))
    assert not is_batchable(Signature((either,), (fixed,)))
    assert not is_batchable(Signature((either, fixed), (either,)))
