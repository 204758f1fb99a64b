"""What may be joined and what may not, with models whose first dimension means something else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.profile.examine import check_rows, examine

onnx = pytest.importorskip("onnx")
helper, numpy_helper = pytest.importorskip("onnx.helper"), pytest.importorskip("onnx.numpy_helper")
FLOAT, HALF, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64


def model(tmp_path: Path, nodes: list[Any], inputs: list[Any], output: Any, constants: list[Any] | None = None) -> Path:
    values = [helper.make_tensor_value_info(*port) for port in inputs]
    graph = helper.make_graph(nodes, "g", values, [helper.make_tensor_value_info(*output)], constants or [])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


def obstacle(path: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> str:
    return examine(path, shapes)[1]


X = ("x", FLOAT, ["n", 4])


@pytest.mark.parametrize("kind", [FLOAT, HALF])
def test_rows_that_do_not_know_of_each_other_may_be_joined(tmp_path: Path, kind: int) -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    assert obstacle(model(tmp_path, [node], [("x", kind, ["n", 4])], ("y", kind, ["n", 4]))) == ""
    check_rows(tmp_path / "m.onnx")


def test_rows_that_mix_may_not(tmp_path: Path) -> None:
    path = model(tmp_path, [helper.make_node("Softmax", ["x"], ["y"], axis=0)], [X], ("y", FLOAT, ["n", 4]))
    assert obstacle(path) == "output 'y' of two rows at once is not that of each row alone"
    with pytest.raises(InputError, match=r"m\.onnx: .* cannot share a forward pass") as caught:
        check_rows(path)
    assert "--batches 1" in caught.value.help


def test_an_output_of_any_length_may_not(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["t"]), helper.make_node("Transpose", ["t"], ["y"])]
    assert "'y' of two rows" in obstacle(model(tmp_path, nodes, [X], ("y", INT64, ["k", 2])))


def test_a_closed_first_dimension_may_not(tmp_path: Path) -> None:
    node = helper.make_node("Mul", ["x", "s"], ["y"])
    path = model(tmp_path, [node], [X, ("s", FLOAT, [])], ("y", FLOAT, ["n", 4]))
    assert obstacle(path) == "the first dimension of 's' [] is not open"


def test_a_model_that_refuses_two_rows_may_not(tmp_path: Path) -> None:
    shape = numpy_helper.from_array(np.array([1, 4]), "shape")
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["one"]),
        helper.make_node("Shape", ["x"], ["all"]),
        helper.make_node("Expand", ["one", "all"], ["y"]),
    ]
    path = model(tmp_path, nodes, [X], ("y", FLOAT, ["n", 4]), [shape])
    assert obstacle(path).startswith("two rows at once fail: ")


def test_what_cannot_be_tried_is_believed(tmp_path: Path) -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], axis=0)
    path = model(tmp_path, [node], [("x", FLOAT, ["n", "w"])], ("y", FLOAT, ["n", "w"]))
    assert obstacle(path) == ""
    assert obstacle(path, {"x": (3,)})
