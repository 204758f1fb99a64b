"""Tensors taken apart, put together, and looked at to decide."""

from collections.abc import Sequence

import numpy as np
import pytest

from sloop.serve.parts import Held, answer, gather, keep, ways_of
from sloop.serve.wiring import APPLICATION, Decision, Source
from sloop.tensor import Port, Tensor, bytes_of

BOXES, KIND, SURE = Port("boxes", "INT64", (-1, 2)), Port("kind", "INT64", (1,)), Port("sure", "FP32", (-1,))


def tensor(array: object, datatype: str = "INT64") -> Tensor:
    values = np.asarray(array, {"INT64": np.int64, "FP32": np.float32, "BOOL": bool}[datatype])
    return Tensor(datatype, values.shape, bytes_of(values))


def numbers(found: Tensor) -> object:
    return np.frombuffer(found.data, np.int64).reshape(found.shape).tolist()


def held() -> Held:
    return Held({APPLICATION: [tensor([[7]])]})


@pytest.mark.parametrize(
    ("values", "kind", "count"), [((1,), 1, 1), ((2, 3), 1, 0), ((2, 3), 3, 1), ((), 0, 0), ((), -4, 1)]
)
def test_a_branch_is_taken_where_the_output_says_so(values: tuple[int, ...], kind: int, count: int) -> None:
    assert ways_of(held(), "a", [Decision("b", when=0, values=values)], [tensor([kind])]) == (count,)


def test_edges_without_a_condition_are_always_taken() -> None:
    assert ways_of(held(), "a", [Decision("b"), Decision("c", when=0)], [tensor([0])]) == (1, 0)


def test_a_part_is_a_row_and_shares_its_memory() -> None:
    request, boxes = held(), tensor([[1, 2], [3, 4], [5, 6]])
    keep(request, "a", None, [boxes])
    assert ways_of(request, "a", [Decision("b", each=0, sliced=((0, BOXES),))], [boxes]) == (3,)
    (row,) = gather(request, "b", 1, [(Source("a", 0, "row", "b"),)])
    assert (numbers(row), row.shape) == ([[3, 4]], (1, 2))
    assert isinstance(row.data, memoryview)
    assert row.data.obj is boxes.data.obj if isinstance(boxes.data, memoryview) else True


def test_rows_can_be_chosen() -> None:
    request, outputs = held(), [tensor([[1, 2], [3, 4], [5, 6]]), tensor([0.0, 1.0, 1.0], "FP32")]
    keep(request, "a", None, outputs)
    decision = Decision("b", when=1, each=0, sliced=((0, BOXES),))
    assert ways_of(request, "a", [decision], outputs) == (2,)
    wires = [(Source("a", 0, "row", "b"),)]
    assert [numbers(gather(request, "b", part, wires)[0]) for part in (0, 1)] == [[[3, 4]], [[5, 6]]]


@pytest.mark.parametrize(("kind", "count"), [(1, 2), (0, 0)])
def test_one_number_decides_for_all_rows(kind: int, count: int) -> None:
    decision = Decision("b", when=1, each=0, sliced=((0, BOXES),))
    assert ways_of(held(), "a", [decision], [tensor([[1, 2], [3, 4]]), tensor([kind])]) == (count,)


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        ([tensor([[1, 2]]), tensor([1.0, 2.0], "FP32")], r"stage 'a' gave 2 rows of 'sure' and 1 of those that 'b'"),
        ([tensor([[1, 2], [1, 2], [1, 2]]), tensor([1.0, 2.0], "FP32")], r"2 rows of 'sure' and 3"),
    ],
)
def test_outputs_that_are_taken_apart_together_have_equally_many_rows(outputs: Sequence[Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ways_of(held(), "a", [Decision("b", each=0, sliced=((0, BOXES), (1, SURE)))], outputs)


def test_a_decision_is_one_number() -> None:
    with pytest.raises(ValueError, match=r"stage 'a' gave 2 numbers \[2\] that decide about 'b'; 1 is wanted"):
        ways_of(held(), "a", [Decision("b", when=0)], [tensor([1, 2])])


def joined(request: Held) -> Tensor:
    return gather(request, "c", 0, [(Source("b", 0, "joined", "b", BOXES),)])[0]


def test_what_parts_gave_is_joined_in_their_order() -> None:
    request = held()
    request.rows["b"] = range(3)
    for part in (2, 0):  # part 1 took another branch
        keep(request, "b", part, [tensor([[part, part]])])
    assert numbers(joined(request)) == [[0, 0], [2, 2]]


def test_without_parts_there_are_no_rows() -> None:
    request = held()
    request.rows["b"] = ()
    assert joined(request) == Tensor("INT64", (0, 2), b"")


def test_parts_of_different_shapes_cannot_be_joined() -> None:
    request = held()
    request.rows["b"] = range(2)
    keep(request, "b", 0, [tensor([[1, 2]])])
    keep(request, "b", 1, [tensor([[1, 2, 3]])])
    with pytest.raises(ValueError, match=r"'boxes' of stage 'b' cannot be joined: rows of the shapes \[2\], \[3\]"):
        joined(request)
    assert answer(request, [("boxes", (Source("b", 0, "joined", "b", BOXES),))]) == {}


def test_a_part_goes_on_with_what_it_gave_and_with_what_its_request_has() -> None:
    request = held()
    keep(request, "b", 1, [tensor([[5, 6]])])
    found = gather(request, "c", 1, [(Source("b", 0, "part"),), (Source(APPLICATION, 0),)])
    assert list(map(numbers, found)) == [[[5, 6]], [[7]]]


def test_the_first_source_there_is_counts() -> None:
    request, sources = held(), (Source("large", 0), Source("small", 0))
    keep(request, "small", None, [tensor([1])])
    assert numbers(gather(request, "d", 0, [sources])[0]) == [1]
    assert numbers(answer(request, [("label", sources)])["label"]) == [1]
    keep(request, "large", None, [tensor([2])])
    assert numbers(gather(request, "d", 0, [sources])[0]) == [2]


def test_what_a_request_did_not_pass_it_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="stage 'd' needs what 'b' or 'c' gives, which this request did not pass"):
        gather(held(), "d", 0, [(Source("b", 0), Source("c", 0))])
    assert answer(held(), [("y", (Source("b", 0),)), ("x", (Source(APPLICATION, 0),))]).keys() == {"x"}


def test_where_parts_went_different_ways_each_gives_what_it_passed_last() -> None:
    text = Port("text", "INT64", (-1, 1))
    request = held()
    request.rows["read"] = range(4)
    for part in range(4):
        keep(request, "read", part, [tensor([[part]])])
    for part in (1, 3):
        keep(request, "polish", part, [tensor([0]), tensor([[10 * part]])])
    both = (Source("polish", 1, "joined", "read", text), Source("read", 0, "joined", "read", text))
    assert numbers(gather(request, "tell", 0, [both])[0]) == [[0], [10], [2], [30]]
    found = answer(request, [("text", both), ("polished", both[:1])])
    assert {name: numbers(found) for name, found in found.items()} == {
        "text": [[0], [10], [2], [30]],
        "polished": [[10], [30]],
    }
