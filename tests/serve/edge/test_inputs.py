"""Validation of requests: names, types, shapes, sizes; tensors in JSON."""

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.edge import inputs
from sloop.serve.edge.inputs import (
    ELEMENTS_MAX,
    SHAPES_MAX,
    InputValidator,
    check_raw,
    listed,
    pack,
    read,
    unpack,
)
from sloop.serve.edge.refusal import Refusal
from sloop.tensor import MISSING, NUMPY_TYPES, Port, Signature, Tensor, floats_of

INTAKE = InputValidator(
    Signature((Port("x", "FP32", (-1, 4)), Port("k", "INT64", (-1, 1))), (Port("y", "FP32", (-1, 4)),), rows_max=8)
)


def tensor(rows: int, name: str = "x") -> Tensor:
    port = INTAKE.ports[name]
    shape = (rows, *port.shape[1:])
    return Tensor(port.datatype, shape, bytes(int(np.prod(shape)) * NUMPY_TYPES[port.datatype].itemsize))


@settings(max_examples=50)
@given(
    datatype=st.sampled_from(sorted(NUMPY_TYPES)),
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    nested=st.booleans(),
)
def test_a_list_and_its_bytes_are_the_same_tensor(
    datatype: str, seed: int, rows: int, columns: int, nested: bool
) -> None:
    dtype = NUMPY_TYPES[datatype]
    raw = np.random.default_rng(seed).bytes(rows * columns * dtype.itemsize)
    array = np.frombuffer(raw, dtype).reshape(rows, columns)
    if dtype.kind == "b":
        array = np.frombuffer(raw, "u1").reshape(rows, columns) > 127
    elif dtype.kind == "f":
        array = np.nan_to_num(array, posinf=1, neginf=-1)
    listed = array.tolist() if nested else array.ravel().tolist()
    packed = pack(datatype, (rows, columns), rows * columns, listed)
    assert packed == array.tobytes()
    assert unpack(Tensor(datatype, (rows, columns), packed)) == array.ravel().tolist()


def test_strings_travel_with_their_lengths() -> None:
    packed = pack("BYTES", (2, 1), 2, [["a"], ["ü"]])
    assert packed == b"\x01\0\0\0a\x02\0\0\0\xc3\xbc"
    check_raw("BYTES", (2, 1), packed, "data")
    assert unpack(Tensor("BYTES", (2, 1), packed)) == ["a", "ü"]


@pytest.mark.parametrize("data", [b"\x01\0\0\0", b"\x01\0\0\0ab", b"\0\0\0\0", b"\0\0\0\0" * 3, b"\xff\xff\xff\xffab"])
def test_broken_strings_are_refused(data: bytes) -> None:
    with pytest.raises(Refusal, match="not 2 BYTES elements"):
        check_raw("BYTES", (2,), data, "data")


def test_bfloat16_is_the_upper_half_of_a_float() -> None:
    assert unpack(Tensor("BF16", (2,), b"\x80\x3f\x00\xc0")) == [1.0, -2.0]
    assert pack("BF16", (2,), 2, [1, -2.0]) == b"\x80\x3f\x00\xc0"
    third = pack("BF16", (1,), 1, [1 / 3])
    assert floats_of(np.frombuffer(third, "<u2")).tolist() == [pytest.approx(1 / 3, rel=2**-8)]


NOT_FINITE = [math.nan, math.inf, -math.inf]
NAMES = ["NaN", "Infinity", "-Infinity"]


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64", "BF16"])
def test_numbers_that_are_not_finite_have_names_in_json(datatype: str) -> None:
    raw = pack(datatype, (2, 2), 4, [[0.5, "NaN"], ["Infinity", "-Infinity"]])
    np.testing.assert_array_equal(unpack(Tensor(datatype, (2, 2), raw)), [0.5, *NOT_FINITE])
    written = listed("y", Tensor(datatype, (2, 2), raw))
    assert written == [0.5, *NAMES]
    np.testing.assert_array_equal(np.array(written, np.float32), np.array([0.5, *NOT_FINITE], np.float32))


def test_large_numbers_whose_sum_is_infinite_stay_numbers() -> None:
    assert listed("y", Tensor("FP64", (3,), np.array([1e308, 1e308, -math.inf]).tobytes())) == [1e308, 1e308, NAMES[2]]
    assert listed("y", Tensor("FP64", (2,), np.array([1e308, 1e308]).tobytes())) == [1e308, 1e308]


def request(**x: object) -> dict[str, object]:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], **x}
    return {"inputs": [x, {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [1]}]}


def test_pythons_own_words_for_numbers_that_are_not_finite_are_read() -> None:
    wanted = read(json.dumps(request(data=[1, *NOT_FINITE])).encode(), None, INTAKE)
    np.testing.assert_array_equal(np.frombuffer(wanted.tensors["x"].data, "<f4"), [1, *NOT_FINITE])


def test_such_words_are_read_in_small_bodies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(request(data=[1, *NOT_FINITE])).encode()
    monkeypatch.setattr(inputs, "WORDS_BYTES_MAX", len(body) - 1)
    with pytest.raises(Refusal, match="body: malformed JSON"):
        read(body, None, INTAKE)


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": [NaN',
        b'["NaN" 1]',
        b'"Infinity',
        b"[NaN]" * 2,
        b'{"inputs": NaN}',
        b"[" * 100_000 + b"NaN",
        b"\xffNaN",
    ],
)
def test_a_broken_body_with_such_words_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match=r"^body: ") as caught:
        read(body, None, INTAKE)
    assert caught.value.status == 400


def test_null_is_no_number() -> None:
    with pytest.raises(Refusal, match="not every element is a FP32 value") as caught:
        read(msgspec.json.encode(request(data=[1, 2, math.nan, 4])), None, INTAKE)
    assert '"NaN"' in caught.value.fix


def test_lists_are_nested_no_deeper_than_the_shape() -> None:
    assert pack("INT8", (1, 2), 2, [[1, 2]]) == pack("INT8", (1, 2), 2, [1, 2]) == b"\x01\x02"
    for data in ([[[1, 2]]], [[[1], [2]]], [[[[[[1]]]]]]):
        with pytest.raises(Refusal, match="lists nested more than 2 deep"):
            pack("INT8", (1, 2), 2, data)
    with pytest.raises(Refusal, match="lists nested more than 1 deep"):
        pack("INT8", (2,), 2, [[1, 2]])


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("FP32", ["1.0", 2]),
        ("FP32", [None, 1]),
        ("FP32", [[1, 2], [3]]),
        ("FP32", [{}, 1]),
        ("INT8", [1.5, 2]),
        ("INT8", [128, 0]),
        ("INT64", [2**63, 0]),
        ("UINT8", [-1, 0]),
        ("UINT8", [[-1, 0]]),
        ("BOOL", [1, 0]),
        ("FP16", ["a", "b"]),
        ("BYTES", [1, "a"]),
        ("BF16", [1.0, "2"]),
        ("FP32", ["nan", 1]),
        ("FP32", ["NaN", None]),
        ("INT8", ["NaN", 1]),
        ("BYTES", ["\ud800", "a"]),
        ("INT32", [10**30, 0]),
        ("BOOL", [10**30, 0]),
    ],
)
def test_elements_of_the_wrong_kind_are_refused(datatype: str, data: list[object]) -> None:
    with pytest.raises(Refusal, match=r"^data: ") as caught:
        pack(datatype, (2,), 2, data)
    assert caught.value.status == 400
    assert caught.value.fix


@pytest.mark.parametrize(("data", "count"), [([], 0), ([1.0], 1), ([1.0, 2.0, 3.0], 3)])
def test_too_few_or_too_many_elements_are_refused(data: list[object], count: int) -> None:
    with pytest.raises(Refusal, match=rf"^data: {count} elements, but shape \[2\] has 2"):
        pack("FP32", (2,), 2, data)


@pytest.mark.parametrize("shape", [(4,), (1, 5), (1, 4, 1), (0, 4), (-1, 4), (), (1, -4)])
def test_a_shape_that_does_not_fit_is_refused_each_time(shape: tuple[int, ...]) -> None:
    for _ in range(2):
        with pytest.raises(Refusal, match=r"^shape: .* for input 'x'") as caught:
            INTAKE.count("x", "FP32", shape)
    assert "[-1, 4]" in caught.value.fix


def test_a_type_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Refusal, match=r"^datatype: 'BYTES' for input 'x'") as caught:
        INTAKE.count("x", "BYTES", (1, 4))
    assert caught.value.fix == "this input takes FP32[-1, 4]"
    assert [INTAKE.count("x", "FP32", (8, 4)) for _ in range(2)] == [32, 32]


def test_no_more_shapes_are_remembered_than_a_bound() -> None:
    port = Port("x", "FP32", (-1, -1))
    validator = InputValidator(Signature((port,), (port,), rows_max=8))
    for width in range(1, SHAPES_MAX + 100):
        assert validator.count("x", "FP32", (1, width)) == width
    assert len(validator._found_right) == SHAPES_MAX


def test_every_input_must_be_there_with_as_many_rows_and_no_more_than_allowed() -> None:
    with pytest.raises(Refusal, match="input 'k' is missing"):
        INTAKE.complete({"x": tensor(1)})
    with pytest.raises(Refusal, match=r"\[1, 2\] rows"):
        INTAKE.complete({"x": tensor(1), "k": tensor(2, "k")})
    with pytest.raises(Refusal, match=r"9 rows .* exceed the limit of 8"):
        INTAKE.complete({"x": tensor(9), "k": tensor(9, "k")})
    whole = {"x": tensor(8), "k": tensor(8, "k")}
    assert INTAKE.complete(whole) is whole


def test_lengths_that_must_be_equal_are_checked() -> None:
    ports = (Port("ids", "INT8", (-1, -1)), Port("mask", "INT8", (-1, -1)))
    validator = InputValidator(Signature(ports, (), 8, equal=((("ids", 1), ("mask", 1)),)))
    ids, mask = Tensor("INT8", (2, 3), bytes(6)), Tensor("INT8", (2, 4), bytes(8))
    assert validator.complete({"ids": ids, "mask": ids})
    with pytest.raises(Refusal, match=r"ids.shape\[1\] is 3 and mask.shape\[1\] is 4, and the model takes only equal"):
        validator.complete({"ids": ids, "mask": mask})


def test_an_open_dimension_may_be_empty_unless_it_counts_the_rows() -> None:
    port = Port("words", "INT64", (-1, -1, 2))
    validator = InputValidator(Signature((port,), (port,), rows_max=8))
    assert validator.count("words", "INT64", (3, 0, 2)) == 0
    assert pack("INT64", (3, 0, 2), 0, [[], [], []]) == pack("INT64", (3, 0, 2), 0, []) == b""
    check_raw("INT64", (3, 0, 2), b"", "data")
    whole = {"words": Tensor("INT64", (3, 0, 2), b"")}
    assert validator.complete(whole) is whole
    for shape in ((0, 1, 2), (0, 0, 2), (1, -1, 2), (1, 0, 0)):
        with pytest.raises(Refusal, match="for input 'words'") as caught:
            validator.count("words", "INT64", shape)
        assert "-1 means any number from 0 up, from 1 up if it is the first" in caught.value.fix


def test_an_empty_tensor_is_not_larger_than_arrays_can_be() -> None:
    port = Port("x", "FP32", (-1, -1, -1))
    validator = InputValidator(Signature((port,), (port,), rows_max=8))
    assert validator.count("x", "FP32", (1, 0, ELEMENTS_MAX)) == 0
    with pytest.raises(Refusal, match="for input 'x'") as caught:
        validator.count("x", "FP32", (1, 0, ELEMENTS_MAX + 1))
    assert caught.value.fix == f"send at most {ELEMENTS_MAX} elements"


def test_a_dimension_of_none_is_taken_where_the_model_has_it() -> None:
    port = Port("none", "FP32", (-1, 0))
    validator = InputValidator(Signature((port,), (port,), rows_max=8))
    assert validator.count("none", "FP32", (2, 0)) == 0
    for shape in ((0, 0), (2, 1), (-1, 0)):
        with pytest.raises(Refusal, match="for input 'none'"):
            validator.count("none", "FP32", shape)


def test_inputs_without_rows_have_any_first_dimension() -> None:
    """Whether there are others with rows or not."""
    inputs = (Port("x", "FP32", (-1, 2)), Port("edges", "INT64", (-1, 2), has_rows=False))
    validator = InputValidator(Signature(inputs, (), rows_max=3))
    for count in (0, 1, 70):
        assert validator.count("edges", "INT64", (count, 2)) == 2 * count
        edges = Tensor("INT64", (count, 2), bytes(16 * count))
        assert validator.complete({"x": Tensor("FP32", (3, 2), bytes(24)), "edges": edges})
    with pytest.raises(Refusal, match=r"\[0, 2\] for input 'x'"):
        validator.count("x", "FP32", (0, 2))
    alone = InputValidator(Signature(inputs[1:], ()))
    assert alone.complete({"edges": Tensor("INT64", (9, 2), bytes(144))})


def test_optional_inputs_may_be_left_out() -> None:
    scale = Port("scale", "FP32", (1,), has_rows=False)
    validator = InputValidator(Signature((Port("x", "INT8", (-1,)),), (), rows_max=8, optional=(scale,)))
    x, given = Tensor("INT8", (2,), b"12"), Tensor("FP32", (1,), bytes(4))
    assert validator.complete({"x": x}) == {"x": x, "scale": MISSING}
    assert validator.complete({"x": x, "scale": given}) == {"x": x, "scale": given}
    assert validator.count("scale", "FP32", (1,)) == 1
    with pytest.raises(Refusal, match="input 'x' is missing"):
        validator.complete({"scale": given})
    with pytest.raises(Refusal, match=r"\[2\] for input 'scale'"):
        validator.count("scale", "FP32", (2,))


def test_too_many_rows_are_refused_with_the_bound_and_what_raises_it() -> None:
    port = Port("x", "INT8", (-1,))
    for rows_max, says in ((8, "limits: {rows: N}"), (1, "one request for each row")):
        validator = InputValidator(Signature((port,), (port,), rows_max=rows_max))
        validator.complete({"x": Tensor("INT8", (rows_max,), bytes(rows_max))})
        with pytest.raises(Refusal, match=f"limit of {rows_max} rows") as caught:
            validator.complete({"x": Tensor("INT8", (rows_max + 1,), bytes(rows_max + 1))})
        assert says in caught.value.fix


def test_only_open_first_dimensions_count_rows() -> None:
    inputs = (Port("x", "FP32", (-1, 4)), Port("scale", "FP32", ()), Port("weights", "FP32", (9,)))
    validator = InputValidator(Signature(inputs, (Port("y", "FP32", (-1, 4)),), rows_max=3))
    whole = {
        "x": Tensor("FP32", (3, 4), bytes(48)),
        "scale": Tensor("FP32", (), bytes(4)),
        "weights": Tensor("FP32", (9,), bytes(36)),
    }
    assert validator.complete(whole) is whole
    with pytest.raises(Refusal, match="4 rows"):
        validator.complete(whole | {"x": Tensor("FP32", (4, 4), bytes(64))})


def test_rows_larger_than_the_profile_says_anything_of_are_refused() -> None:
    ports = (Port("ids", "INT64", (-1, -1), has_rows=True), Port("image", "FP32", (-1, 3, -1, -1), has_rows=True))
    validator = InputValidator(Signature(ports, (), 8, size_max=1024))
    assert validator.count("ids", "INT64", (2, 1024)) == 2048
    assert validator.count("image", "FP32", (2, 3, 32, 32)) == 6 * 1024
    for name, datatype, shape in (("ids", "INT64", (2, 1025)), ("image", "FP32", (2, 3, 32, 33))):
        with pytest.raises(Refusal) as caught:
            validator.count(name, datatype, shape)
        assert f"elements for input {name!r}, where the profile says something of up to 1,024" in caught.value.what
        assert "sloop profile MODEL --sizes" in caught.value.fix
