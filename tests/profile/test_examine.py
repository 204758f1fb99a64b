"""Which rows may share a forward pass, if the first dimension means something else; opening fixed batches."""

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError, MachineError
from sloop.onnx_file import write_onnx
from sloop.profile.examine import Declared, changed_copy, examine, examine_here, free_batch
from sloop.profile.model import open_session, read_signature, row_shapes
from sloop.profile.profile import Joining
from sloop.tensor import Port

onnx = pytest.importorskip("onnx")
helper, numpy_helper = pytest.importorskip("onnx.helper"), pytest.importorskip("onnx.numpy_helper")
FLOAT, HALF, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64


def model(tmp_path: Path, nodes: list[Any], inputs: list[Any], output: Any, constants: list[Any] | None = None) -> Path:
    values = [helper.make_tensor_value_info(*port) for port in inputs]
    graph = helper.make_graph(nodes, "g", values, [helper.make_tensor_value_info(*output)], constants or [])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


X = ("x", FLOAT, ["n", 4])


def test_a_closed_first_dimension_belongs_to_the_request(tmp_path: Path) -> None:
    node = helper.make_node("Mul", ["x", "s"], ["y"])
    path = model(tmp_path, [node], [X, ("s", FLOAT, [])], ("y", FLOAT, ["n", 4]))
    known = examine(path)
    assert known.obstacle == "input 's' [] belongs to a request as a whole"
    assert [port.has_rows for port in known.signature.inputs] == [True, False]


def test_an_input_without_a_shape_is_not_a_scalar(tmp_path: Path) -> None:
    node = helper.make_node("Mul", ["x", "s"], ["y"])
    path = model(tmp_path, [node], [X, ("s", FLOAT, None)], ("y", FLOAT, ["n", 4]))
    with pytest.raises(InputError, match="input 's' has no shape, not even a number of dimensions"):
        examine(path)


def test_first_dimensions_that_count_different_things_are_no_batch(tmp_path: Path) -> None:
    """A graph network: each edge adds the features of one node to another, so there are not as many edges as nodes."""
    nodes = [
        helper.make_node("Gather", ["x", "source"], ["message"]),
        helper.make_node("ScatterElements", ["x", "target", "message"], ["y"], axis=0, reduction="add"),
    ]
    inputs = [("x", FLOAT, ["nodes", 1]), ("source", INT64, ["edges"]), ("target", INT64, ["edges", 1])]
    known = examine(model(tmp_path, nodes, inputs, ("y", FLOAT, ["nodes", 1])))
    assert known.obstacle
    assert not any(port.has_rows for port in (*known.signature.inputs, *known.signature.outputs))
    assert "count different things (edges and nodes), so a request is one unit" in known.notes[0]
    sizes = {each.name: each.proposal for each in known.dimensions}
    assert (sizes["nodes"] > 1, known.refusal) == (True, ""), "a single node has no second one to refer to"
    kept = examine(tmp_path / "m.onnx", declared=Declared(joins_rows=False))
    assert all(port.has_rows for port in kept.signature.inputs), "the user has said what it is"


@pytest.mark.parametrize("names", [("batch", "n_batch"), ("unk__1", "unk__2"), ("N", "N")])
def test_names_that_exporters_make_up_say_nothing(names: tuple[str, str], tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["x", "z"], ["s"]), helper.make_node("Softmax", ["s"], ["y"], axis=0)]
    inputs = [(name, FLOAT, [first, 4]) for name, first in zip("xz", names, strict=True)]
    known = examine(model(tmp_path, nodes, inputs, ("y", FLOAT, ["k", 4])))
    assert known.obstacle == "Softmax 'y' normalises over the rows"
    assert all(port.has_rows for port in known.signature.inputs)


def test_a_user_decides_either_way(tmp_path: Path) -> None:
    mixing = helper.make_node("Softmax", ["x"], ["y"], axis=0)
    path = model(tmp_path, [mixing], [X], ("y", FLOAT, ["n", 4]))
    joined = examine(path, declared=Declared(joins_rows=True))
    assert (joined.obstacle, joined.evidence) == ("", "the user says so (`joins_rows: true`)")
    apart = model(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [X], ("y", FLOAT, ["n", 4]))
    assert examine(apart, declared=Declared(joins_rows=False)).obstacle == "the user says so (`joins_rows: false`)"
    whole = examine(apart, declared=Declared(batch=False))
    assert whole.obstacle == "the user says that it has no batch (`batch: false`)"
    assert not any(port.has_rows for port in (*whole.signature.inputs, *whole.signature.outputs))
    assert [each.joining for each in (joined, whole)] == [None, None], "true of the user's file, not of the model"


def test_a_copy_that_a_user_once_asked_for_decides_nothing_later(tmp_path: Path) -> None:
    """The copy, whose output has an open first dimension, stays in the folder."""
    path = model(tmp_path, [helper.make_node("Softmax", ["x"], ["y"], axis=0)], [X], ("y", FLOAT, [1, 4]))
    for declared, is_joined in ((True, True), (None, False), (True, True), (False, False)):
        known = examine(path, folder=tmp_path / "copies", declared=Declared(joins_rows=declared))
        assert (not known.obstacle) is is_joined, f"{declared}: {known.obstacle!r}"
    assert list((tmp_path / "copies").iterdir()), "a copy was made"


@pytest.mark.parametrize("rows", ["n", 1])
def test_a_user_may_keep_rows_apart_that_a_copy_was_made_to_join(rows: str | int, tmp_path: Path) -> None:
    path = model(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, [rows, 4])], ("y", FLOAT, [1, 4]))
    assert not examine(path, folder=tmp_path / "copies").obstacle
    apart = examine(path, folder=tmp_path / "copies", declared=Declared(joins_rows=False))
    assert "joins_rows: false" in apart.obstacle


def test_what_has_no_rows_cannot_be_declared_to_join_them(tmp_path: Path) -> None:
    node = helper.make_node("Mul", ["x", "s"], ["y"])
    path = model(tmp_path, [node], [X, ("s", FLOAT, [])], ("y", FLOAT, ["n", 4]))
    with pytest.raises(InputError, match="but input 's'"):
        examine(path, declared=Declared(joins_rows=True))


def test_what_an_examination_has_found_is_not_examined_again(tmp_path: Path) -> None:
    path = model(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [X], ("y", FLOAT, ["n", 4]))
    assert examine(path).joining == Joining("")
    known = Joining("it was found before")
    assert examine(path, declared=Declared(known=known)).obstacle == "it was found before"
    stage = tmp_path / "m.py"
    stage.write_text(
        "class Model:\n    inputs = {'x': ('FP32', (-1, 2))}; outputs = {'y': ('FP32', (-1, 2))}; joins_rows = True\n"
        "    def __init__(self, threads): pass\n    def run(self, x): return x - x.min()\n"
    )
    assert examine(stage, declared=Declared(known=Joining(""))).obstacle, "what it imports may have changed"


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


# Copies that are made by themselves


def test_a_fixed_batch_is_opened_in_a_copy_beside_the_model(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["h"]), helper.make_node("Softmax", ["h"], ["y"], axis=1)]
    path = _save(tmp_path / "m.onnx", nodes, [1, 4, 3], [1, 12], {"s": np.array([1, 12])})
    before = path.read_bytes()
    known = examine(path)
    assert (known.obstacle, known.signature.inputs[0].shape, known.signature.outputs[0].shape) == (
        "",
        (-1, 4, 3),
        (-1, 12),
    )
    (copy,) = set(tmp_path.iterdir()) - {path}
    assert (known.file, path.read_bytes()) == (str(copy), before)
    assert copy.name.startswith("m.onnx.open-")
    assert known.notes == (
        f"m.onnx: its batch is fixed to 1; {copy.name} is a copy with an open batch and the same results",
    )
    x = np.random.default_rng(1).random((2, 4, 3), np.float32)
    together = open_session(copy, 1).run(None, {"x": x})[0]
    alone = [open_session(path, 1).run(None, {"x": x[row : row + 1]})[0] for row in range(2)]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-6)


def test_a_whole_shape_opens_a_batch_of_one_but_names_a_request_of_several_rows(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    one = examine(_save(tmp_path / "one.onnx", [node], [1, 3, "w"], [1, 3, "w"], {}), {"x": (1, 3, 5)})
    assert (one.obstacle, one.signature.inputs[0].shape) == ("", (-1, 3, -1))
    image = _save(tmp_path / "image.onnx", [node], [3, "h", "w"], [3, "h", "w"], {})
    whole = examine(image, {"x": (3, 4, 5)})
    assert whole.obstacle == "its batch is fixed to 3: the shape that is given for input 'x' has all its 3 rows"
    assert examine(image, {"x": (4, 5)}).obstacle == ""
    assert str(tmp_path) not in examine(image).obstacle, "clients read it"


def test_a_fixed_batch_of_outputs_alone_is_opened(tmp_path: Path) -> None:
    """Some exporters record the batch of their example in an output."""
    path = _save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], ["n", 3], [1, 3], {})
    known = examine(path)
    assert (known.obstacle, [port.shape for port in known.signature.outputs]) == ("", [(-1, 3)])
    copy = Path(known.file)
    what = "the number of rows of output 'y' is fixed, but not that of the inputs"
    assert known.notes == (f"m.onnx: {what}; {copy.name} is a copy in which both are open",)
    assert open_session(copy, 1).run(None, {"x": np.full((2, 3), -1, np.float32)})[0].tolist() == [[0] * 3] * 2
    assert changed_copy(path, known.changes, tmp_path / "elsewhere").read_bytes() == copy.read_bytes()


@pytest.mark.parametrize(
    ("node", "constants", "shape"),
    [
        (helper.make_node("ReduceMax", ["x"], ["y"], axes=[0]), {}, [1, 3]),
        (helper.make_node("Identity", ["w"], ["y"]), {"w": np.ones((1, 3), np.float32)}, [1, 3]),
        (helper.make_node("Transpose", ["x"], ["y"]), {}, [3, "n"]),
    ],
)
def test_an_output_with_other_rows_than_the_inputs_stays_closed(
    node: Any, constants: dict[str, Any], shape: list[Any], tmp_path: Path
) -> None:
    path = _save(tmp_path / "m.onnx", [node], ["n", 3], shape, constants)
    known = examine(path)
    assert known.obstacle.startswith("the first dimension of 'y' [")
    assert (known.file, known.changes, known.notes) == (str(path), (), ())
    assert list(tmp_path.iterdir()) == [path]


def test_the_copy_of_an_earlier_model_is_not_used(tmp_path: Path) -> None:
    def saved(weight: float) -> Path:
        node = helper.make_node("Mul", ["x", "w"], ["y"])
        return _save(tmp_path / "m.onnx", [node], [1, 3], [1, 3], {"w": np.full(3, weight, np.float32)})

    first = examine(saved(1)).file
    made = Path(first).stat().st_mtime_ns
    assert examine(saved(1)).file == first
    assert Path(first).stat().st_mtime_ns == made, "it is made once"
    second = examine(saved(2)).file
    assert open_session(Path(second), 1).run(None, {"x": np.ones((2, 3), np.float32)})[0].tolist() == [[2] * 3] * 2


@pytest.mark.parametrize(
    ("nodes", "constants", "why"),
    [
        (
            [helper.make_node("Softmax", ["x"], ["y"], axis=0)],
            {},
            "its batch cannot be opened: output 'y' of joined rows",
        ),
        # With ordinary values the trial is passed: an extreme value is needed to see that rows meet.
        (
            [
                helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
                helper.make_node("Max", ["m", "w"], ["limit"]),
                helper.make_node("Min", ["x", "limit"], ["y"]),
            ],
            {"w": np.float32(1e3)},
            "ReduceMax 'm' reduces over the rows",
        ),
        (
            [helper.make_node("Concat", ["w", "x"], ["y"], axis=1)],
            {"w": np.ones((1, 2), np.float32)},
            "its batch cannot be opened: ",
        ),
    ],
)
def test_a_batch_that_cannot_be_opened_is_served_alone(
    nodes: list[Any], constants: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = _save(tmp_path / "m.onnx", nodes, [1, 3], [1, 5 if why == "its batch cannot be opened: " else 3], constants)
    known = examine(path)
    assert (known.file, known.signature.inputs[0].shape, known.signature.fixed_batch) == (str(path), (1, 3), None)
    assert known.obstacle.startswith(f"its batch is fixed to 1: {why}")
    assert known.batches_alone == (1,)
    assert list(tmp_path.iterdir()) == [path], "no copy is left"


def test_a_copy_goes_to_a_folder_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], [1, 3], [1, 3], {})

    def writes(model: Any, target: Path) -> None:  # root may write everywhere, so that a mode does not help
        if target.parent == tmp_path:
            raise MachineError("read-only")
        write_onnx(model, target)

    monkeypatch.setattr("sloop.profile.examine.write_onnx", writes)
    known = examine(path, folder=tmp_path / "state")
    assert Path(known.file).parent == tmp_path / "state"
    assert known.signature.fixed_batch is None
    alone = examine(path)
    assert (alone.file, alone.signature.inputs[0].shape) == (str(path), (1, 3))
    assert "cannot be written" in alone.obstacle


def test_weights_in_another_file_are_found_by_the_copy(tmp_path: Path) -> None:
    weights = np.arange(3000, dtype=np.float32)
    path = _save(
        tmp_path / "m.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], [1, 3000], [1, 3000], {"w": weights}
    )
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="weights.bin")
    assert path.stat().st_size < 1000 < (tmp_path / "weights.bin").stat().st_size
    known = examine(path)
    assert Path(known.file).parent == tmp_path
    got = open_session(Path(known.file), 1).run(None, {"x": np.zeros((2, 3000), np.float32)})[0]
    np.testing.assert_array_equal(got, np.tile(weights, (2, 1)))
    elsewhere = examine(path, folder=tmp_path / "elsewhere")
    assert (elsewhere.file, elsewhere.signature.inputs[0].shape) == (str(path), (1, 3000))
    assert "the weights in other files are found in the folder of the model only" in elsewhere.obstacle


@pytest.mark.parametrize(("key", "classes"), [("classlabels_strings", ["cat", "dög"]), ("classlabels_int64s", [3, 7])])
def test_a_zip_map_is_served_as_the_tensor_of_its_probabilities(key: str, classes: list[Any], tmp_path: Path) -> None:
    """The graph of a classifier as skl2onnx writes it."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["probabilities"], axis=1),
        helper.make_node("ZipMap", ["probabilities"], ["output_probability"], domain="ai.onnx.ml", **{key: classes}),
    ]
    keys = onnx.TensorProto.STRING if "strings" in key else INT64
    value = helper.make_map_type_proto(keys, helper.make_tensor_type_proto(FLOAT, None))
    output = helper.make_value_info("output_probability", helper.make_sequence_type_proto(value))
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", FLOAT, [None, 2])], [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    path = tmp_path / "classifier.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    with pytest.raises(InputError, match=r"'output_probability' is of type seq\(map") as caught:
        read_signature(path)
    assert "options={'zipmap': False}" in caught.value.help

    known = examine(path)
    assert known.signature.outputs == (Port("output_probability", "FP32", (-1, 2)),)
    assert known.labels == {"output_probability": tuple(map(str, classes))}
    assert known.obstacle == ""
    assert f"one column for each of the classes {classes[0]} and {classes[1]}" in known.notes[0]
    x = np.random.default_rng(2).random((3, 2), np.float32)
    maps = open_session(path, 1).run(None, {"x": x})[0]
    columns = open_session(Path(known.file), 1).run(None, {"x": x})[0]
    np.testing.assert_allclose(columns, [[each[label] for label in classes] for each in maps])


# Open dimensions


def test_open_dimensions_of_one_name_are_one_with_a_usual_size(tmp_path: Path) -> None:
    kinds = [("ids", INT64), ("mask", INT64), ("pixels", FLOAT), ("other", FLOAT)]
    shapes = [["b", "sequence"], ["b", "sequence"], ["b", 3, "height", None], ["n", "batch_size"]]
    ports = [(name, kind, shape) for (name, kind), shape in zip(kinds, shapes, strict=True)]
    nodes = [helper.make_node("Identity", ["ids"], ["y"])]
    known = examine(model(tmp_path, nodes, ports, ("y", INT64, ["b", "sequence"])))
    assert [(each.name, each.ports, each.proposal) for each in known.dimensions] == [
        ("sequence", (("ids", 0), ("mask", 0)), 128),
        ("height", (("pixels", 1),), 224),
        ("pixels[3]", (("pixels", 2),), 224),
        ("batch_size", (("other", 0),), 1),
    ]
    assert row_shapes(known.signature, known.dimensions, [9, 8, 7, 6]) == {
        "ids": (9,),
        "mask": (9,),
        "pixels": (3, 8, 7),
        "other": (6,),
    }
    assert examine(model(tmp_path, nodes, ports[:1], ("y", INT64, ["b", "s"])), {"ids": (4,)}).obstacle == ""


def test_sizes_are_proposed_that_the_model_accepts(tmp_path: Path) -> None:
    """Windows of 32 samples, which 16, the usual size, does not fill; lines of text with a height that is a multiple of
    48, but any width."""
    cut = [helper.make_node("Reshape", ["x", "windows"], ["y"])]
    windows = numpy_helper.from_array(np.array([0, -1, 32]), "windows")
    known = examine(model(tmp_path, cut, [("x", FLOAT, ["b", "k"])], ("y", FLOAT, ["b", "m", 32]), [windows]))
    assert ([each.proposal for each in known.dimensions], known.refusal, known.notes) == ([32], "", ())
    lines = numpy_helper.from_array(np.array([0, -1, 48, 224]), "windows")
    picture = ("x", FLOAT, ["b", 1, "height", "width"])
    known = examine(model(tmp_path, cut, [picture], ("y", FLOAT, ["b", "m", 48, 224]), [lines]))
    assert ([each.proposal for each in known.dimensions], known.refusal) == ([48, 224], "")


def test_a_model_that_accepts_no_size_that_is_tried_says_so(tmp_path: Path) -> None:
    cut = [helper.make_node("Reshape", ["x", "windows"], ["y"])]
    windows = numpy_helper.from_array(np.array([0, -1, 97]), "windows")
    known = examine(model(tmp_path, cut, [("x", FLOAT, ["b", "k"])], ("y", FLOAT, ["b", "m", 97]), [windows]))
    assert [each.proposal for each in known.dimensions] == [16]
    assert known.refusal.startswith("it fails on random inputs (x [1, 16]): ")
    assert known.notes == (f"m.onnx: {known.refusal}",)
    assert known.fault is None, "it may run with sizes that were not tried"


# Memory

MIB = 2**20


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room, whatever else runs on this one."""
    monkeypatch.setattr("sloop.memory.available_bytes", lambda machine: float(2**40))


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the private memory of a process")


def expanding(tmp_path: Path, mib: int, rows: str | int) -> Path:
    """A model that takes `mib` MiB twice for each row."""
    size = numpy_helper.from_array(np.array([1, mib * MIB // 4]), "size")
    nodes = [
        helper.make_node("Expand", ["x", "size"], ["wide"]),
        helper.make_node("Sin", ["wide"], ["sin"]),
        helper.make_node("ReduceMax", ["sin"], ["y"], axes=[1]),
    ]
    return model(tmp_path, nodes, [("x", FLOAT, [rows, 1])], ("y", FLOAT, [rows, 1]), [size])


@on_linux
@pytest.mark.usefixtures("roomy")
def test_a_model_that_needs_too_much_for_one_row_has_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = expanding(tmp_path, 400, 1)
    monkeypatch.setattr("sloop.profile.examine.EXAMINE_BYTES_MIN", 256 * MIB)
    fault = examine(path).fault
    assert fault is not None
    assert fault.what == "running it on one row needs more memory than the 0.25 GiB that its examination may take"


@on_linux
@pytest.mark.usefixtures("roomy")
def test_a_model_that_needs_too_much_for_several_rows_runs_each_request_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = expanding(tmp_path, 16, "n")
    assert examine(path).obstacle == ""
    monkeypatch.setattr("sloop.profile.examine.EXAMINE_BYTES_MIN", 96 * MIB)
    found = examine(path)
    assert found.fault is None
    what = "trying several rows at once needs more memory than the 0.0938 GiB that its examination may take"
    assert found.obstacle == what


@on_linux
@pytest.mark.usefixtures("roomy")
def test_a_model_that_cannot_be_opened_for_lack_of_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.py"
    path.write_text("import numpy as np\nkept = np.ones(100_000_000)\n", encoding="utf-8")
    monkeypatch.setattr("sloop.profile.examine.growth_of", lambda path: 256 * MIB)
    monkeypatch.setattr("sloop.profile.examine.NVIDIA", tmp_path / "none")
    with pytest.raises(InputError, match=r"opening it needs more memory than the 0\.25 GiB that its examination"):
        examine_here(path, {})


@on_linux
@pytest.mark.usefixtures("roomy")
def test_the_bound_ends_with_the_examination(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    examine(expanding(tmp_path, 1, "n"))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
