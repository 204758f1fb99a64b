"""Cutting ONNX models: the pieces are valid, and their chain gives what the uncut model gives."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from benchmarks.models import INSIDE, convolutions, perceptron, small
from sloop.errors import InputError, MachineError
from sloop.onnx_file import external_files
from sloop.profile.layers import PieceChain
from sloop.profile.model import Array, OnnxSession
from sloop.profile.onnx_cut import LayerGraph, ModelPiece, cut_model, data_file, difference

WIDTH = 6
DIFFERENCE_MAX = 1e-6


def saved(
    path: Path,
    nodes: Sequence[Any],
    weights: Sequence[Any] = (),
    *,
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    external: bool = False,
) -> Path:
    """A model whose inputs and outputs have rows of `WIDTH` floats."""
    given, made = (
        [helper.make_tensor_value_info(name, 1, ["n", WIDTH]) for name in ports] for ports in (inputs, outputs)
    )
    graph = helper.make_graph(nodes, "g", given, made, list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path), save_as_external_data=external, location=f"{path.name}.data", size_threshold=0)
    return path


def weight(name: str, *shape: int, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape or (WIDTH, WIDTH)).astype(np.float32)
    return numpy_helper.from_array(values / WIDTH, name)


def run_pieces(
    pieces: Sequence[tuple[ModelPiece, OnnxSession]], feed: dict[str, Array], outputs: Sequence[str]
) -> list[Array]:
    """What the pieces make of inputs of the whole model, one after the other."""
    known, _ = PieceChain(*zip(*pieces, strict=True)).run(feed)
    return [known[name] for name in outputs]


def chain_difference(path: Path, pieces: Sequence[ModelPiece], *, rows: int = 3, check: bool = True) -> float:
    """The largest difference between the pieces and the uncut model; every piece must be a valid model."""
    for piece in pieces if check else ():
        onnx.checker.check_model(piece.file, full_check=True)
    whole = OnnxSession(path, 1)
    random = np.random.default_rng(1)
    feed: dict[str, Array] = {}
    for port in whole.signature.inputs:
        shape = [rows if size < 0 else size for size in port.shape]
        feed[port.name] = random.standard_normal(shape).astype(np.float32)
    sessions = [(piece, OnnxSession(Path(piece.file), 1)) for piece in pieces]
    names = [port.name for port in whole.signature.outputs]
    return difference(run_pieces(sessions, feed, names), whole.run(feed))


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    """Two units with a skip connection each; the second also reads the first unit's inside, and both share a weight."""
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w1"], ["c"]),
        helper.make_node("Add", ["c", "x"], ["d"], name="unit1"),
        helper.make_node("MatMul", ["d", "w0"], ["e"]),
        helper.make_node("Add", ["e", "b"], ["f"], name="late"),
        helper.make_node("Add", ["f", "d"], ["y"], name="unit2"),
    ]
    return saved(tmp_path / "residual.onnx", nodes, [weight("w0"), weight("w1", seed=1)])


def names(ports: Sequence[Any]) -> list[str]:
    return [port.name for port in ports]


def test_finds_every_tensor_of_a_boundary(residual: Path, tmp_path: Path) -> None:
    first, middle, last = cut_model(residual, ["b", "unit1"], tmp_path)
    assert first.crossing == ("x", "b")
    assert middle.crossing == ("b", "d")
    assert names(first.outputs) == ["b"], "an input that a later piece reads passes by; no piece copies it"
    assert (names(middle.inputs), names(middle.outputs)) == (["x", "b"], ["d"])
    assert (names(last.inputs), names(last.outputs), last.crossing) == (["b", "d"], ["y"], ("y",))
    assert first.param_bytes == middle.param_bytes == last.param_bytes == 4 * WIDTH * WIDTH, "w0 is in two pieces"
    assert chain_difference(residual, [first, middle, last]) <= DIFFERENCE_MAX
    assert first.outputs[0].shape == (-1, WIDTH)
    declared = onnx.load(first.file).graph.output[0].type.tensor_type.shape.dim[0]
    assert declared.dim_param == "n", "an open size keeps its name, also where the file states no type"


@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        ("nowhere", "the graph has no such layer or tensor"),
        ("x", "it is an input"),
        ("w0", "it is constant"),
        ("y", "no layer follows"),
        ("unit2", "no layer follows"),
    ],
)
def test_says_why_it_cannot_be_cut_there(residual: Path, tmp_path: Path, cut: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as raised:
        cut_model(residual, [cut], tmp_path)
    assert str(residual) in str(raised.value)


def test_cuts_must_follow_each_other(residual: Path, tmp_path: Path) -> None:
    for cuts in (["unit1", "b"], ["b", "b"]):
        with pytest.raises(InputError, match="do not follow each other"):
            cut_model(residual, cuts, tmp_path)
    assert sorted(tmp_path.iterdir()) == [residual], "no piece is left behind"


def test_a_sequence_cannot_cross(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("SplitToSequence", ["a"], ["s"], axis=1),
        helper.make_node("ConcatFromSequence", ["s"], ["b"], axis=1),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    path = saved(tmp_path / "m.onnx", nodes)
    with pytest.raises(InputError, match=r"'s' is of type seq\(tensor\(float\)\); only tensors can pass"):
        cut_model(path, ["s"], tmp_path)
    pieces = cut_model(path, ["b"], tmp_path)
    assert chain_difference(path, pieces, check=False) == 0, "without a shape: nobody knows even the rank of 'b'"


def test_inner_graphs_are_one_layer(tmp_path: Path) -> None:
    """A branch of `If` reads a tensor and a weight from outside, which therefore cross the boundary before it."""
    inner = [
        helper.make_graph([helper.make_node(op, ["a", "w"], [out])], op, [], [helper.make_empty_tensor_value_info(out)])
        for op, out in (("MatMul", "then_y"), ("Sub", "else_y"))
    ]
    given, made = (helper.make_tensor_value_info(name, 1, [WIDTH, WIDTH]) for name in "xy")
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("ReduceSum", ["a"], ["sum"], keepdims=0),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        helper.make_node("Greater", ["sum", "zero"], ["is"]),
        helper.make_node("If", ["is"], ["b"], then_branch=inner[0], else_branch=inner[1]),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    path = tmp_path / "if.onnx"
    graph = helper.make_graph(nodes, "g", [given], [made], [weight("w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    first, second = cut_model(path, ["is"], tmp_path)
    assert first.crossing == ("a", "is")
    assert first.outputs[1].shape == (), "a single value, told from a tensor of unknown rank"
    assert chain_difference(path, [first, second]) == 0
    with pytest.raises(InputError, match="inside the graph of another node"):
        cut_model(path, ["then_y"], tmp_path)


def test_constants_cross_no_boundary_but_random_numbers_do(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormal", [], ["noise"], shape=[1, WIDTH], seed=1.0),
        helper.make_node("Constant", [], ["two"], value_float=2.0),
        helper.make_node("Mul", ["w", "two"], ["w2"]),
        helper.make_node("MatMul", ["x", "w2"], ["a"]),
        helper.make_node("Add", ["a", "noise"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["c"]),
        helper.make_node("Add", ["c", "noise"], ["y"]),
    ]
    path = saved(tmp_path / "m.onnx", nodes, [weight("w")])
    first, second = cut_model(path, ["b"], tmp_path)
    assert set(first.crossing) == {"noise", "b"}
    assert first.param_bytes == second.param_bytes == 4 * WIDTH * WIDTH
    onnx.checker.check_model(second.file)


def test_outputs_may_be_inputs_constants_or_made_early(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["early"]),
        helper.make_node("Neg", ["early"], ["a"]),
        helper.make_node("Add", ["a", "z"], ["y"]),
        helper.make_node("Exp", ["early"], ["unused"]),
    ]
    fixed = weight("fixed", 1, WIDTH)
    path = saved(tmp_path / "m.onnx", nodes, [fixed], inputs=["x", "z"], outputs=["y", "early", "x", "fixed"])
    first, second = cut_model(path, ["a"], tmp_path)
    assert first.crossing == ("x", "z", "early", "a"), "an input that is an output passes by as well"
    assert "unused" not in first.layers + second.layers, "nodes that lead to no output are no layers"
    sessions = [(piece, OnnxSession(Path(piece.file), 1)) for piece in (first, second)]
    whole, feed = OnnxSession(path, 1), {name: np.full((2, WIDTH), 0.5, np.float32) for name in "xz"}
    found = run_pieces(sessions, feed, ["y", "early", "x", "fixed"])
    assert difference(found, whole.run(feed)) == 0


def test_layers_that_are_named_like_tensors_of_others_are_told_apart(tmp_path: Path) -> None:
    ends = ("c", "b", "d", "y")
    nodes = [
        helper.make_node("Add", [given, "w"], [made], name=name)
        for given, made, name in zip(("x", *ends), ends, ("first", "c", "", "b"), strict=False)
    ]
    path = saved(tmp_path / "m.onnx", nodes, [weight("w")])
    assert [layer.name for layer in LayerGraph.read(path).layers] == ["first", "b", "d", "y"]
    pieces = cut_model(path, ["first", "b", "d"], tmp_path)
    assert [piece.layers for piece in pieces] == [("first",), ("b",), ("d",), ("y",)]
    assert chain_difference(path, pieces, rows=WIDTH) == 0


# Weights in other files


def test_pieces_take_only_their_own_external_weights(residual: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    path = tmp_path / "external.onnx"
    onnx.save(onnx.load(str(residual)), str(path), save_as_external_data=True, location="w.data", size_threshold=0)
    first, last = cut_model(path, ["b"], folder)
    assert external_files(Path(first.file)) == (data_file(Path(first.file)).name,)
    assert data_file(Path(first.file)).stat().st_size == 4 * WIDTH * WIDTH, "w0 only"
    assert data_file(Path(last.file)).stat().st_size > 8 * WIDTH * WIDTH
    assert chain_difference(path, [first, last]) <= DIFFERENCE_MAX
    assert {piece.name for piece in folder.iterdir()} == {
        f"external.{number}-of-2.onnx{end}" for number in (1, 2) for end in ("", ".data")
    }


def remove(path: Path) -> None:
    (path.parent / "w.data").unlink()


def shorten(path: Path) -> None:
    content = (path.parent / "w.data").read_bytes()
    (path.parent / "w.data").write_bytes(content[:-8])


def leave_the_folder(path: Path) -> None:
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../w.data"
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (remove, "its weights file 'w.data' is not there"),
        (shorten, "which has"),
        (leave_the_folder, "outside the model's folder"),
    ],
)
def test_refuses_external_weights_that_are_not_there(
    residual: Path, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    path, folder = tmp_path / "in" / "m.onnx", tmp_path / "cut"
    path.parent.mkdir()
    folder.mkdir()
    onnx.save(onnx.load(str(residual)), str(path), save_as_external_data=True, location="w.data", size_threshold=0)
    change(path)
    with pytest.raises(InputError, match=reason):
        cut_model(path, ["b"], folder)
    assert not list(folder.iterdir()), "no piece is left behind"


def test_refuses_graphs_that_are_broken(tmp_path: Path) -> None:
    relu = helper.make_node("Relu", ["x"], ["y"])
    unmade = [helper.make_node("Add", ["x", "ghost"], ["y"], name="adds")]
    cycle = [helper.make_node("Add", ["x", "b"], ["a"], name="turns"), helper.make_node("Add", ["a", "a"], ["b"]), relu]
    for nodes, outputs, reason in (
        (unmade, ("y",), "node 'adds' reads 'ghost', which nothing makes"),
        (cycle, ("y",), "node 'turns' reads 'b', a cycle"),
        ([relu], ("z",), "nothing makes its output 'z'"),
        ([], ("x",), "it has no layers"),
    ):
        with pytest.raises(InputError, match=reason):
            cut_model(saved(tmp_path / "m.onnx", nodes, outputs=outputs), None, tmp_path)
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match="not an ONNX model"):
        cut_model(tmp_path / "bad.onnx", None, tmp_path)


def test_says_where_it_cannot_write(residual: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot write"):
        cut_model(residual, ["b"], tmp_path / "none")


# Blocks


def test_blocks_keep_units_with_branches_whole(tmp_path: Path) -> None:
    nodes, last = [], "x"
    for unit in range(3):
        nodes += [
            helper.make_node("MatMul", [last, "w0"], [f"a{unit}"]),
            helper.make_node("Relu", [f"a{unit}"], [f"b{unit}"]),
            helper.make_node("MatMul", [f"b{unit}", "w0"], [f"c{unit}"]),
            helper.make_node("Add", [f"c{unit}", last], [f"unit{unit}"]),
            helper.make_node("Tanh", [f"unit{unit}"], [f"tanh{unit}"]),
        ]
        last = f"tanh{unit}"
    path = saved(tmp_path / "m.onnx", [*nodes, helper.make_node("Identity", [last], ["y"])], [weight("w0")])
    graph = LayerGraph.read(path)
    assert [graph.layers[place - 1].name for place in graph.boundaries()] == ["tanh0", "tanh1"]
    with pytest.raises(InputError, match="it cannot be cut after 'none'") as raised:
        graph.end_after("none")
    assert raised.value.help == "for example after 'tanh0' or 'tanh1'"


@pytest.mark.parametrize(
    ("name", "blocks", "param_mib"),
    [("vgg19", 19, 548.0), ("resnet50", 18, 97.7), ("squeezenet", 18, 4.7), ("inception_v1", 13, 22.8)],
)
def test_blocks_of_published_networks(name: str, blocks: int, param_mib: float) -> None:
    """VGG19: each convolution and each dense layer; ResNet-50: the stem, 16 units, the classifier."""
    graph = LayerGraph.read(INSIDE / f"light_{name}.onnx")
    assert len(graph.boundaries()) == blocks - 1
    assert graph.param_bytes(graph.layers) / 2**20 == pytest.approx(param_mib, abs=0.1)


@pytest.mark.parametrize(
    "make",
    [lambda f: convolutions(f, channels=8, layers=4, pixels=12), lambda f: perceptron(f, width=32, layers=3)],
)
def test_models_of_the_benchmarks_give_the_same_in_blocks(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    pieces = cut_model(path, None, tmp_path)
    assert len(pieces) >= 4
    assert chain_difference(path, pieces) <= DIFFERENCE_MAX


def test_squeezenet_and_the_demonstration_give_the_same_in_blocks(tmp_path: Path) -> None:
    import sloop.demo  # noqa: PLC0415  # for its file

    digits = Path(sloop.demo.__file__).parent / "digits.onnx"
    for path in (small(tmp_path, "squeezenet", 64), digits):
        pieces = cut_model(path, None, tmp_path)
        assert len(pieces) > 1
        assert chain_difference(path, pieces) <= DIFFERENCE_MAX


def test_a_quantised_model_is_cut_where_whole_numbers_cross(tmp_path: Path) -> None:
    """ONNX Runtime computes DequantizeLinear → MatMul → QuantizeLinear in whole numbers; behind DequantizeLinear, a cut
    would let it compute in floats."""
    nodes, last = [], "x"
    for layer in range(3):
        nodes += [
            helper.make_node("QuantizeLinear", [last, "scale", "zero"], [f"q{layer}"]),
            helper.make_node("DequantizeLinear", [f"q{layer}", "scale", "zero"], [f"d{layer}"]),
            helper.make_node("DequantizeLinear", [f"w{layer}", "scale", "zero"], [f"f{layer}"]),
            helper.make_node("MatMul", [f"d{layer}", f"f{layer}"], [f"m{layer}"]),
            helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]),
        ]
        last = f"r{layer}"
    nodes += [
        helper.make_node("QuantizeLinear", [last, "scale", "zero"], ["q3"]),
        helper.make_node("DequantizeLinear", ["q3", "scale", "zero"], ["y"]),
    ]
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(np.array(0.02, np.float32), "scale"),
        numpy_helper.from_array(np.array(3, np.int8), "zero"),
        *(numpy_helper.from_array(random.integers(-99, 99, (WIDTH, WIDTH), np.int8), f"w{n}") for n in range(3)),
    ]
    path = saved(tmp_path / "m.onnx", nodes, weights)
    pieces = cut_model(path, None, tmp_path)
    assert [piece.crossing for piece in pieces[:-1]] == [("q1",), ("q2",)]
    assert pieces[0].param_bytes == WIDTH * WIDTH + 5, "eight-bit weights, a scale and a zero point"
    assert chain_difference(path, pieces) <= DIFFERENCE_MAX


def test_functions_of_the_model_go_into_every_piece(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    body = [helper.make_node("Tanh", ["a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
    function = helper.make_function("own", "TanhAdd", ["a"], ["c"], body, opsets[:1])
    nodes = [
        helper.make_node("TanhAdd", ["x"], ["one"], domain="own"),
        helper.make_node("MatMul", ["one", "w"], ["two"]),
        helper.make_node("TanhAdd", ["two"], ["y"], domain="own"),
    ]
    given, made = (helper.make_tensor_value_info(name, 1, ["n", WIDTH]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [given], [made], [weight("w")])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=[function]), str(path))
    assert chain_difference(path, cut_model(path, ["one", "two"], tmp_path)) <= DIFFERENCE_MAX


# Random graphs


@st.composite
def random_nodes(draw: st.DrawFn) -> tuple[list[Any], list[Any], list[str], list[str]]:
    """Nodes, weights, inputs and outputs of a random graph: branches, several inputs and outputs, weights in several
    places, constants in between, nodes with several outputs, inner graphs, optional tensors left out."""
    inputs = [f"x{number}" for number in range(draw(st.integers(1, 2)))]
    tensors, nodes = list(inputs), []
    weights = [weight(f"w{number}", seed=number) for number in range(2)]
    for number in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["Tanh", "MatMul", "Add", "Split", "Scaled", "If", "Clip"]))
        one, other = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        made = f"t{number}"
        match kind:
            case "Tanh":
                nodes.append(helper.make_node("Tanh", [one], [made]))
            case "MatMul":
                nodes.append(helper.make_node("MatMul", [one, draw(st.sampled_from(["w0", "w1"]))], [made]))
            case "Add":
                nodes.append(helper.make_node("Add", [one, other], [made]))
            case "Clip":
                nodes.append(helper.make_node("Constant", [], [f"{made}_max"], value_float=0.8))
                nodes.append(helper.make_node("Clip", [one, "", f"{made}_max"], [made]))
            case "Split":
                nodes.append(helper.make_node("Split", [one], [f"{made}_a", f"{made}_b"], axis=1))
                nodes.append(helper.make_node("Concat", [f"{made}_b", f"{made}_a"], [made], axis=1))
            case "Scaled":
                nodes.append(helper.make_node("Mul", ["w0", "w1"], [f"{made}_w"]))
                nodes.append(helper.make_node("MatMul", [one, f"{made}_w"], [made]))
            case "If":
                nodes.append(helper.make_node("ReduceMax", [other], [f"{made}_max"], keepdims=0))
                nodes.append(helper.make_node("Cast", [f"{made}_max"], [f"{made}_is"], to=TensorProto.BOOL))
                inner = [
                    helper.make_graph(
                        [helper.make_node(operator, [one], [f"{made}_{operator}"])],
                        operator,
                        [],
                        [helper.make_tensor_value_info(f"{made}_{operator}", 1, None)],
                    )
                    for operator in ("Tanh", "Neg")
                ]
                nodes.append(helper.make_node("If", [f"{made}_is"], [made], then_branch=inner[0], else_branch=inner[1]))
        tensors.append(made)
    made_by = [name for name in tensors if name not in inputs]
    outputs = [made_by[-1], *draw(st.lists(st.sampled_from(made_by[:-1]), max_size=2, unique=True))]
    return nodes, weights, inputs, outputs


@settings(max_examples=40, deadline=None)
@given(random_nodes(), st.data())
def test_any_cut_of_any_graph_gives_the_same(
    made: tuple[list[Any], list[Any], list[str], list[str]], data: st.DataObject
) -> None:
    nodes, weights, inputs, outputs = made
    with TemporaryDirectory() as name:
        folder = Path(name)
        external = data.draw(st.booleans())
        path = saved(folder / "m.onnx", nodes, weights, inputs=inputs, outputs=outputs, external=external)
        graph = LayerGraph.read(path)
        places = range(1, len(graph.layers))
        chosen = sorted(data.draw(st.sets(st.sampled_from(list(places)), max_size=3))) if places else []
        pieces = cut_model(path, [graph.layers[place - 1].makes[0] for place in chosen], folder)
        assert len(pieces) == len(chosen) + 1
        for place, piece in zip(chosen, pieces, strict=False):
            ahead, behind = graph.layers[:place], graph.layers[place:]
            known = {*inputs, *(name for layer in ahead for name in layer.makes)}
            read = {name for layer in behind for name in layer.reads}
            early = {name for layer in ahead for name in layer.makes if name in outputs}
            assert set(piece.crossing) == (known & read) | early, "what is known before it and read behind it"
        assert chain_difference(path, pieces) <= DIFFERENCE_MAX


def test_a_difference_is_relative_to_the_largest_value() -> None:
    big = np.array([[1000.0, 1.0]], np.float32)
    assert difference([big + np.float32(0.5)], [big]) == pytest.approx(5e-4)
    assert difference([big[:, :1]], [big]) == np.inf
    assert difference([np.array([1])], [np.array([2])]) == np.inf
    assert difference([np.array([np.nan, np.inf])], [np.array([np.nan, np.inf])]) == 0
    assert difference([np.array([np.nan])], [np.array([1.0])]) == np.inf


def test_loops_and_sparse_weights(tmp_path: Path) -> None:
    """A loop whose body reads a tensor, a weight and a sparse weight from outside, and hides none of them."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["inner", "w"], ["product"]),
            helper.make_node("Add", ["product", "a"], ["sum"]),
            helper.make_node("Add", ["sum", "thin"], ["next"]),
            helper.make_node("Identity", ["going"], ["on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("inner", 1, ["n", WIDTH]),
        ],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, []), helper.make_tensor_value_info("next", 1, None)],
    )
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("Exp", ["a"], ["b"]),
        helper.make_node("Loop", ["turns", "", "b"], ["c"], body=body),
        helper.make_node("Add", ["c", "thin"], ["y"]),
    ]
    values = numpy_helper.from_array(np.array([0.5, -2.0], np.float32), "thin")
    places = numpy_helper.from_array(np.array([1, 4], np.int64), "places")
    thin = helper.make_sparse_tensor(values, places, [WIDTH])
    given, made = (helper.make_tensor_value_info(name, 1, ["n", WIDTH]) for name in "xy")
    weights = [weight("w"), numpy_helper.from_array(np.array(3, np.int64), "turns")]
    graph = helper.make_graph(nodes, "g", [given], [made], weights, sparse_initializer=[thin])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    first, second, third = cut_model(path, ["b", "c"], tmp_path)
    assert first.crossing == ("a", "b"), "the loop reads 'a' from outside"
    assert second.param_bytes == 4 * WIDTH * WIDTH + 8 + (8 + 16)
    assert third.param_bytes == 8 + 16
    assert chain_difference(path, [first, second, third], check=False) <= DIFFERENCE_MAX


def branches(one: Sequence[Any], other: Sequence[Any], made: str = "made") -> dict[str, Any]:
    """The inner graphs of an If, both of which compute `made`."""
    graphs = []
    for suffix, nodes in (("1", one), ("2", other)):
        named = helper.make_tensor_value_info(made + suffix, 1, None)
        graphs.append(helper.make_graph(list(nodes), f"branch{suffix}", [], [named]))
    return {"then_branch": graphs[0], "else_branch": graphs[1]}


def test_random_numbers_in_inner_graphs_and_in_training_cross(tmp_path: Path) -> None:
    """Two copies of them would disagree: what one piece adds, the next takes away again."""
    true = numpy_helper.from_array(np.array(True), "yes")
    drawn = [helper.make_node("RandomNormal", [], [f"made{place}"], shape=[WIDTH]) for place in (1, 2)]
    for node in (
        helper.make_node("If", ["yes"], ["r"], **branches(drawn[:1], drawn[1:])),
        helper.make_node("Dropout", ["w", "ratio", "yes"], ["r"]),
    ):
        nodes = [node, helper.make_node("Add", ["x", "r"], ["a"]), helper.make_node("Sub", ["a", "r"], ["y"])]
        path = saved(tmp_path / f"{node.op_type}.onnx", nodes, [weight("w", WIDTH), weight("ratio", 1), true])
        if node.op_type == "Dropout":
            model = onnx.load(path)
            model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.array(0.5, np.float32), "ratio"))
            onnx.save(model, path)
        pieces = cut_model(path, ["a"], tmp_path)
        assert set(pieces[0].crossing) == {"r", "a"}
        x = np.ones((3, WIDTH), np.float32)
        found = run_pieces([(piece, OnnxSession(Path(piece.file), 1)) for piece in pieces], {"x": x}, ["y"])
        assert difference(found, [x]) <= DIFFERENCE_MAX


def test_names_that_end_like_those_of_its_own_probes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["a"], keepdims=0),
        helper.make_node("Tanh", ["a"], ["a/rank"]),
        helper.make_node("Relu", ["a/rank"], ["rank/0"]),
        helper.make_node("Add", ["rank/0", "x"], ["y"]),
    ]
    path = saved(tmp_path / "m.onnx", nodes)
    assert chain_difference(path, cut_model(path, ["a", "a/rank", "rank/0"], tmp_path)) <= DIFFERENCE_MAX


def test_sizes_that_only_the_file_states_do_not_bind_a_piece(tmp_path: Path) -> None:
    """As they remain when somebody opens the batch of a model that was exported with one row."""
    nodes = [
        helper.make_node(*each) for each in (("Tanh", ["x"], ["a"]), ("Exp", ["a"], ["b"]), ("Relu", ["b"], ["y"]))
    ]
    path = saved(tmp_path / "m.onnx", nodes)
    model = onnx.load(path)
    model.graph.value_info.extend(helper.make_tensor_value_info(name, 1, [1, WIDTH]) for name in "ab")
    onnx.save(model, path)
    pieces = cut_model(path, ["a", "b"], tmp_path)
    assert chain_difference(path, pieces) <= DIFFERENCE_MAX
    (given,) = onnx.load(pieces[1].file).graph.input
    assert [size.dim_param or size.dim_value for size in given.type.tensor_type.shape.dim] == ["n", WIDTH]


def test_weights_in_other_files_inside_inner_graphs_and_constants(tmp_path: Path) -> None:
    inner = [helper.make_node("MatMul", ["a", "c"], ["made1"])], [helper.make_node("MatMul", ["a", "own"], ["made2"])]
    choice = branches(*inner)
    choice["else_branch"].initializer.append(weight("own", seed=2))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=weight("value", seed=1)),
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("ReduceMax", ["a"], ["largest"], keepdims=0),
        helper.make_node("Cast", ["largest"], ["is"], to=TensorProto.BOOL),
        helper.make_node("If", ["is"], ["b"], **choice),
        helper.make_node("MatMul", ["b", "c"], ["y"]),
    ]
    path = saved(tmp_path / "inside.onnx", nodes)
    onnx.save(
        onnx.load(path),
        str(path),
        save_as_external_data=True,
        location="inside.data",
        size_threshold=0,
        convert_attribute=True,
    )
    assert external_files(path) == ("inside.data",)
    pieces = cut_model(path, ["a", "b"], tmp_path)
    (tmp_path / "inside.data").rename(tmp_path / "inside.kept")
    sessions = [(piece, OnnxSession(Path(piece.file), 1)) for piece in pieces]
    (tmp_path / "inside.kept").rename(tmp_path / "inside.data")
    x = np.random.default_rng(1).standard_normal((3, WIDTH)).astype(np.float32)
    assert difference(run_pieces(sessions, {"x": x}, ["y"]), OnnxSession(path, 1).run({"x": x})) <= DIFFERENCE_MAX
