"""Triton's extensions: classification and the model's configuration."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sloop.app.limits import Limits
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import Model
from sloop.serve.edge.triton import CLASSIFIED_MAX, classified, configuration
from sloop.tensor import NUMPY_TYPES, Port, Signature, Tensor, bfloats_of, split_strings


def model_of(*outputs: Port, **labels: tuple[str, ...]) -> Model:
    signature = Signature((Port("x", "FP32", (-1, 2)),), outputs, rows_max=8)
    return Model("demo", 1, InputValidator(signature), Limits(), labels)


def classes_of(tensor: Tensor, count: int, shape: tuple[int, ...], *labels: str) -> tuple[tuple[int, ...], list[str]]:
    model = model_of(Port("y", tensor.datatype, shape), y=labels)
    ports = model.validator.signature.outputs
    found = classified({"y": tensor, "other": tensor}, {"y": count}, ports, model.labels)
    assert found["other"] is tensor
    assert found["y"].datatype == "BYTES"
    return found["y"].shape, [element.decode() for element in split_strings(found["y"].data)]


def test_the_largest_elements_of_each_row_come_first() -> None:
    tensor = Tensor("INT32", (2, 4), np.array([[1, 5, 10, 4], [7, 7, -1, 7]], "<i4").tobytes())
    assert classes_of(tensor, 2, (-1, 4)) == ((2, 2), ["10:2", "5:1", "7:0", "7:1"])
    labels = ("pear", "pickle", "apple")
    assert classes_of(tensor, 3, (-1, 4), *labels)[1][:3] == ["10:2:apple", "5:1:pickle", "4:3"]


def test_a_tensor_without_rows_has_one_list_of_classes() -> None:
    tensor = Tensor("FP32", (2, 2), np.array([1.1, 3.3, 0.5, 2.4], "<f4").tobytes())
    assert classes_of(tensor, 2, (2, 2)) == ((2,), ["3.300000:1", "2.400000:3"])
    assert classes_of(tensor, 9, (2, 2))[0] == (4,)


def test_an_output_of_the_request_as_a_whole_has_one_list_of_classes() -> None:
    port = Port("y", "UINT8", (-1, 2), has_rows=False)
    found = classified({"y": Tensor("UINT8", (2, 2), bytes([1, 9, 3, 4]))}, {"y": 2}, (port,), {})
    assert (found["y"].shape, split_strings(found["y"].data)) == ((2,), [b"9:1", b"4:3"])


def test_numbers_that_are_none_come_last() -> None:
    values = np.array([[math.nan, -math.inf, 2, math.inf]])
    tensor = Tensor("FP64", (1, 4), values.tobytes())
    assert classes_of(tensor, 4, (-1, 4))[1][:2] == ["inf:3", "2.000000:2"]
    halves = Tensor("BF16", (1, 4), bfloats_of(values.astype("f4")).tobytes())
    assert classes_of(halves, 4, (-1, 4))[1][:2] == ["inf:3", "2.000000:2"]


def test_outputs_that_take_long_to_sort_are_refused() -> None:
    tensor = Tensor("UINT8", (1, CLASSIFIED_MAX + 1), bytes(CLASSIFIED_MAX + 1))
    with pytest.raises(Refusal, match="at most 262144 are classified"):
        classes_of(tensor, 1, (-1, -1))


def test_no_elements_have_no_classes() -> None:
    assert classes_of(Tensor("FP32", (2, 0), b""), 3, (-1, -1)) == ((2, 0), [])


@given(st.data())
def test_classes_are_the_elements_sorted(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from([name for name in NUMPY_TYPES if name != "BOOL"]))
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5)))
    values = data.draw(arrays(NUMPY_TYPES[datatype], shape)).astype(NUMPY_TYPES[datatype])
    if values.dtype.kind == "f":
        values = np.nan_to_num(values)
    count = data.draw(st.integers(1, 6))
    _, texts = classes_of(Tensor(datatype, shape, values.tobytes()), count, (-1, -1))
    expected = []
    for row in values.tolist():
        best = sorted(range(len(row)), key=lambda index: (-row[index], index))[:count]
        expected += [f"{f'{row[i]:f}' if isinstance(row[i], float) else row[i]}:{i}" for i in best]
    assert texts == expected


def test_the_configuration_says_how_many_rows_a_request_may_have() -> None:
    found = configuration(model_of(Port("y", "BYTES", (-1, 3)), Port("z", "BF16", (-1,))), {"rows_max": 8})
    assert (found["name"], found["max_batch_size"]) == ("demo", 8)
    assert found["parameters"] == {"rows_max": {"string_value": "8"}}
    assert found["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": (2,)}]
    assert [(each["data_type"], each["dims"]) for each in found["output"]] == [("TYPE_STRING", (3,)), ("TYPE_BF16", ())]


def test_the_configuration_says_which_inputs_are_optional() -> None:
    scale = Port("scale", "FP32", (1,), has_rows=False)
    signature = Signature((Port("x", "FP32", (-1, 2), has_rows=False),), (), optional=(scale,))
    found = configuration(Model("demo", 1, InputValidator(signature), Limits()), {})
    assert [(each["name"], each.get("optional", False)) for each in found["input"]] == [("x", False), ("scale", True)]


def test_a_model_without_rows_has_no_batch_size() -> None:
    found = configuration(model_of(Port("y", "INT8", (3,))), {})
    assert (found["max_batch_size"], found["input"][0]["dims"], found["output"][0]["dims"]) == (0, (-1, 2), (3,))


@pytest.mark.parametrize("count", [1, 3])
def test_labels_beyond_the_last_are_left_out(count: int) -> None:
    tensor = Tensor("UINT8", (1, 3), b"\x03\x02\x01")
    assert classes_of(tensor, count, (-1, 3), "a", "b")[1] == ["3:0:a", "2:1:b", "1:2"][:count]
