"""Which rows may share a forward pass, if the first dimension means something else; opening fixed batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.profile.examine import check_rows, examine, free_batch
from sloop.profile.model import open_session, read_signature

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
    assert obstacle(path) == "output 'y' of two rows at once differs from that of each row alone"
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


LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def _give_weights(model: Any) -> None:
    """Replace the constant weights of the light models, with which every input gives the same output.

    The softmax at the end goes, because with random weights it gives the same output too: a single 1.
    """
    random = np.random.default_rng(0)
    sizes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in sizes:
            shape = [int(size) for size in sizes[node.input[0]]]
            weights = 0.5 + random.random(shape)
            if len(shape) > 1:
                weights = random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
            model.graph.initializer.append(numpy_helper.from_array(weights.astype(np.float32), node.output[0]))
            continue
        if node.op_type == "Softmax":
            node.op_type = "Identity"
            del node.attribute[:]
        kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "inception_v1", "resnet50", "densenet121"])
def test_real_architectures_give_for_each_row_what_they_gave_for_it_alone(name: str, tmp_path: Path) -> None:
    if not (LIGHT / f"light_{name}.onnx").is_file():
        pytest.skip("this onnx package has no light models")
    model = onnx.load(str(LIGHT / f"light_{name}.onnx"))
    _give_weights(model)
    onnx.save(model, str(tmp_path / "fixed.onnx"))
    assert read_signature(tmp_path / "fixed.onnx").fixed_batch == 1

    signature = free_batch(tmp_path / "fixed.onnx", tmp_path / "free.onnx")

    assert signature.fixed_batch is None
    assert signature.outputs[0].shape[0] == -1
    images = np.random.default_rng(1).standard_normal((2, 3, 224, 224)).astype(np.float32)
    fixed, free = open_session(tmp_path / "fixed.onnx", 1), open_session(tmp_path / "free.onnx", 1)
    port = signature.inputs[0].name
    together = free.run(None, {port: images})[0]
    assert not np.allclose(together[0], together[1], rtol=1e-2, atol=0)  # or the comparison would mean nothing
    for row in range(2):
        alone = fixed.run(None, {port: images[row : row + 1]})[0]
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=0, atol=1e-4 * np.abs(alone).max())


def _save(path: Path, nodes: list[Any], shape: list[Any], out: list[Any], constants: dict[str, Any]) -> Path:
    ports = [
        helper.make_tensor_value_info("x", 1, shape),
        helper.make_tensor_value_info("y", 1, out),
    ]
    weights = [numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8),
        str(path),
    )
    return path


@pytest.mark.parametrize(
    ("batch", "first", "second", "out"),
    [
        (1, [1, 12], [1, 4, 3], [1, 4, 3]),
        (1, [1, -1], [1, 3, -1], [1, 3, 4]),
        (1, [-1, 12], [-1, 6, 2], [1, 6, 2]),
        (1, [4, 3], [1, 12], [1, 12]),  # the batch folded into rows, and out again
        (2, [8, 3], [2, 12], [2, 12]),
        (2, [2, 12], [2, 2, -1], [2, 2, 6]),
    ],
)
def test_reshapes(batch: int, first: list[int], second: list[int], out: list[int], tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "s"], ["h"]),
        helper.make_node("Reshape", ["h", "t"], ["y"]),
    ]
    constants = {"s": np.array(first, dtype=np.int64), "t": np.array(second, dtype=np.int64)}
    path = _save(tmp_path / "m.onnx", nodes, [batch, 4, 3], out, constants)
    signature = free_batch(path, tmp_path / "free.onnx")
    assert (signature.inputs[0].shape[0], signature.outputs[0].shape[0]) == (-1, -1)


def test_a_target_given_by_a_constant_node_is_opened_and_weights_are_left_alone(tmp_path: Path) -> None:
    target = helper.make_node("Constant", [], ["s"], value=numpy_helper.from_array(np.array([1, 12])))
    nodes = [
        target,
        helper.make_node("Reshape", ["x", "s"], ["h"]),
        helper.make_node("Reshape", ["w", "s"], ["v"]),
        helper.make_node("Add", ["h", "v"], ["y"]),
    ]
    path = _save(tmp_path / "m.onnx", nodes, [1, 4, 3], [1, 12], {"w": np.arange(12, dtype=np.float32)})
    free_batch(path, tmp_path / "free.onnx")
    x = np.ones((2, 4, 3), dtype=np.float32)
    got = open_session(tmp_path / "free.onnx", 1).run(None, {"x": x})[0]
    np.testing.assert_array_equal(got, np.tile(np.arange(1, 13, dtype=np.float32), (2, 1)))


def test_a_free_model_stays_as_it_is(tmp_path: Path) -> None:
    path = _save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 2], ["n", 2], {})
    assert free_batch(path, tmp_path / "free.onnx").inputs[0].shape == (-1, 2)


def test_refuses_a_model_that_mixes_rows(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x", "axes"], ["s"], keepdims=1),
        helper.make_node("Add", ["x", "s"], ["y"]),
    ]
    path = _save(tmp_path / "m.onnx", nodes, [1, 3], [1, 3], {"axes": np.array([0], dtype=np.int64)})
    with pytest.raises(InputError, match="output 'y' of joined rows differs from that of each alone"):
        free_batch(path, tmp_path / "free.onnx")
    assert not (tmp_path / "free.onnx").exists()


def test_refuses_a_model_that_fixes_the_batch_by_other_means(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["w", "x"], ["y"], axis=1)]
    path = _save(tmp_path / "m.onnx", nodes, [1, 3], [1, 5], {"w": np.ones((1, 2), dtype=np.float32)})
    with pytest.raises(InputError, match="its batch cannot be opened"):
        free_batch(path, tmp_path / "free.onnx")
