"""From ONNX to integers: operators, orders of channels, scales, and models that switches cannot compute."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from sloop.errors import InputError
from sloop_systems.netnn.network import BITS, BYTES, Convolution, Dense, FloatNetwork, classify
from sloop_systems.netnn.quantiser import Unsupported, _exponent, quantise, read_network
from tests.sloop_systems.netnn.models import model, rows_of, small_model

Node = tuple[str, Sequence[str], dict[str, Any]]
"""Operator, constant inputs, attributes; the first input is the output of the node before."""
POOL = {"kernel_shape": [2], "strides": [2]}


def onnx_model(shape: Sequence[int], nodes: Sequence[Node], constants: dict[str, Any]) -> bytes:
    """A chain of nodes from `input` to `n<last>`."""
    made = [
        helper.make_node(operator, ["input" if not at else f"n{at - 1}", *inputs], [f"n{at}"], name=f"my{at}", **extra)
        for at, (operator, inputs, extra) in enumerate(nodes)
    ]
    graph = helper.make_graph(
        made,
        "graph",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info(f"n{len(nodes) - 1}", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    found = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return found.SerializeToString()


def floats(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed + sum(shape)).normal(0, 0.5, shape).astype(np.float32)


def onnx_logits(content: bytes, rows: NDArray[Any]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input": rows.astype(np.float32)})[0])


def one_dimension() -> bytes:
    """What PyTorch exports for Conv1d, pooling and dense layers."""
    nodes: list[Node] = [
        ("Conv", ["w1", "b1"], {"kernel_shape": [4]}),
        ("Relu", [], {}),
        ("MaxPool", [], {"kernel_shape": [3], "strides": [3]}),
        ("Conv", ["w2"], {"kernel_shape": [3], "pads": [1, 1]}),
        ("MaxPool", [], {"kernel_shape": [2], "strides": [2]}),
        ("Relu", [], {}),
        ("Flatten", [], {"axis": 1}),
        ("Gemm", ["w3", "b3"], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
        ("Relu", [], {}),
        ("Dropout", [], {}),
        ("MatMul", ["w4"], {}),
        ("Add", ["b4"], {}),
        ("Sigmoid", [], {}),
    ]
    weights = {"w1": floats(6, 1, 4), "b1": floats(6), "w2": floats(5, 6, 3), "w3": floats(7, 25), "b3": floats(7)}
    return onnx_model((1, 34), nodes, weights | {"w4": floats(7, 1), "b4": floats(1)})


def two_dimensions() -> bytes:
    """Strides, padding, several classes; the flatten is written as a transpose and a reshape, channels last."""
    nodes: list[Node] = [
        ("Conv", ["w1", "b1"], {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 1]}),
        ("Relu", [], {}),
        ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Conv", ["w2", "b2"], {"kernel_shape": [1, 2], "pads": [0, 1, 1, 0]}),
        ("Relu", [], {}),
        ("Transpose", [], {"perm": [0, 2, 3, 1]}),
        ("Reshape", ["shape"], {}),
        ("Gemm", ["w3", "b3"], {}),
        ("Softmax", [], {}),
    ]
    weights = {"w1": floats(5, 3, 3, 3), "b1": floats(5), "w2": floats(4, 5, 1, 2), "b2": floats(4), "b3": floats(3)}
    return onnx_model((3, 9, 7), nodes, weights | {"w3": floats(36, 3), "shape": np.array([0, -1], np.int64)})


@pytest.mark.parametrize(("content", "shape"), [(one_dimension(), (1, 34)), (two_dimensions(), (3, 9, 7))])
def test_floats_equal_the_runtime(content: bytes, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(3).integers(0, 2, (50, *shape))
    network = read_network(content)
    logits = network.run(rows)
    theirs = onnx_logits(content, rows)
    ours = 1 / (1 + np.exp(-logits)) if network.layers[-1].neurons == 1 else np.exp(logits)
    ours = ours if network.layers[-1].neurons == 1 else ours / ours.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("content", "shape"), [(one_dimension(), (1, 34)), (two_dimensions(), (3, 9, 7))])
def test_integers_agree_with_floats(content: bytes, shape: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    rows = np.random.default_rng(4).integers(0, 2, (300, *shape))
    network = quantise(tmp_path / "model.onnx", rows[:100])
    exact = read_network(content).run(rows)
    found = network.run(rows)
    assert np.corrcoef(exact.ravel(), found.ravel())[0, 1] > 0.97
    assert network.order is None if len(shape) == 2 else network.order is not None


def onnx_of_integers(exponents: Sequence[int]) -> bytes:
    """The small model of the test vectors, its weights divided by powers of two."""
    constants: dict[str, NDArray[Any]] = {}
    nodes: list[Node] = []
    exponent = 0
    source = small_model()
    for at, (layer, scale) in enumerate(zip(source.layers, exponents, strict=True)):
        exponent += scale
        is_convolution = isinstance(layer, Convolution)
        values = layer.weights[:, :, 0].transpose(0, 2, 1) if is_convolution else layer.weights
        if at == 2:  # channels first, as frameworks flatten
            values = values.reshape(7, 8, 6).transpose(0, 2, 1).reshape(7, 48)
            nodes.append(("Flatten", [], {}))
        constants |= {f"w{at}": (values / 2.0**scale).astype(np.float32)}
        constants |= {f"b{at}": (layer.bias / 2.0**exponent).astype(np.float32)}
        nodes.append(
            ("Conv" if is_convolution else "Gemm", [f"w{at}", f"b{at}"], {} if is_convolution else {"transB": 1})
        )
        if at < 4:
            nodes.append(("Relu", [], {}))
        if isinstance(layer, Convolution):
            nodes.append(("MaxPool", [], {"kernel_shape": [layer.pool[0]], "strides": [layer.pool[0]]}))
        exponent -= layer.shift
    return onnx_model((1, 60), nodes, constants)


@pytest.mark.parametrize("exponents", [(0, 0, 0, 0, 0), (3, 7, 7, 5, 9), (7, 7, 7, 7, 7)])
def test_models_of_integers_pass_unchanged(exponents: Sequence[int]) -> None:
    network = quantise(onnx_of_integers(exponents), shifts=[3, 7, 8, 7])
    for found, expected in zip(network.layers, small_model().layers, strict=True):
        assert (found.weights == expected.weights).all()
        assert (found.bias == expected.bias).all()
        assert found.shift == expected.shift
    assert network.run(rows_of(network, 4)).ravel().tolist() == [5804, 5746, 5155, 5359]


def test_scales_are_those_of_the_specification() -> None:
    source = model(20, [(3, 3, 2)], [4, 1], [0, 0])
    scaled = [type(layer)(layer.name, layer.weights / 50.0, layer.bias / 4000.0) for layer in source.layers]
    network = FloatNetwork(source.shape, tuple(_with_pool(scaled, source)))
    rows = np.random.default_rng(0).integers(0, 2, (64, 20))
    exponents = [np.floor(np.log2(127 / np.abs(layer.weights).max())) for layer in network.layers]
    largest = [output.max() for output in network.activations(rows)]
    first = min(np.floor(np.log2(127 / largest[0])), exponents[0])
    second = min(np.floor(np.log2(127 / largest[1])), exponents[1] + first)
    found = quantise(network, rows)
    assert [layer.shift for layer in found.layers[:2]] == [exponents[0] - first, exponents[1] + first - second]
    assert (
        found.layers[0].weights.ravel().tolist()
        == np.rint(network.layers[0].weights * 2 ** exponents[0]).ravel().tolist()
    )
    assert found.layers[1].bias.tolist() == np.rint(network.layers[1].bias * 2 ** (exponents[1] + first)).tolist()
    agreement = (classify(found.run(rows)) == (network.run(rows)[:, 0] >= 0)).mean()
    assert agreement > 0.9


def _with_pool(layers: Sequence[Any], source: Any) -> list[Any]:
    first = Convolution(layers[0].name, layers[0].weights, layers[0].bias, pool=source.layers[0].pool)
    return [first, *layers[1:]]


def test_layers_of_zeros_and_bytes() -> None:
    nodes: list[Node] = [("Gemm", ["w", "b"], {"transB": 1}), ("Relu", [], {}), ("Gemm", ["v"], {"transB": 1})]
    zeros = {"w": np.zeros((3, 4), np.float32), "b": np.zeros(3, np.float32)}
    content = onnx_model((4,), nodes, zeros | {"v": floats(2, 3)})
    network = quantise(content, np.array([[0, 127, 3, 9]]), inputs=BYTES)
    assert network.layers[0].shift == 0
    assert network.run([[1, 2, 3, 4]]).tolist() == [[0, 0]]


GEMM: Node = ("Gemm", ["w"], {"transB": 1})
CONV: Node = ("Conv", ["c"], {})
RELU: Node = ("Relu", [], {})


@pytest.mark.parametrize(
    ("sizes", "nodes", "message"),
    [
        ((8,), [GEMM, ("Tanh", [], {})], r"node 'my1' \(Tanh\): the operator 'Tanh' is not supported"),
        ((8,), [("BatchNormalization", ["w", "w", "w", "w"], {}), GEMM], "'BatchNormalization' is not supported"),
        ((8,), [GEMM, ("Sigmoid", [], {}), ("Relu", [], {})], "Relu after Sigmoid"),
        ((8,), [GEMM, RELU, ("Sigmoid", [], {})], "the activation Sigmoid is not supported"),
        ((1, 6), [CONV, ("Flatten", [], {}), GEMM], "layer 'conv1': no ReLU follows it"),
        ((8,), [GEMM, RELU], "its last layer has a ReLU"),
        ((8,), [("Identity", [], {})], "it has no layer"),
        ((8,), [("Relu", [], {}), GEMM], "it has no layer before it"),
        ((1, 8), [GEMM], "put Flatten before it"),
        ((1, 8), [("Conv", ["c"], {"group": 2})], "groups or dilations"),
        ((1, 8), [("Conv", ["c"], {"dilations": [2]})], "groups or dilations"),
        ((1, 8, 1), [CONV], "a convolution of 1 dimensions over a tensor of 4"),
        ((1, 8), [CONV, RELU, ("MaxPool", [], {"kernel_shape": [2]})], r"its cells of \[2\] overlap"),
        ((1, 8), [CONV, RELU, ("MaxPool", [], {"kernel_shape": [2], "strides": [2], "ceil_mode": 1})], "ceil_mode"),
        ((8,), [GEMM, ("MaxPool", [], {"kernel_shape": [2], "strides": [2]})], "does not follow a convolution"),
        ((1, 8), [CONV, RELU, ("Transpose", [], {"perm": [0, 2, 1]}), ("Conv", ["six"], {})], "transposed or reshaped"),
        ((8,), [("Reshape", ["sizes"], {}), GEMM], "changes the batch dimension"),
        ((1, 8), [("Transpose", [], {"perm": [1, 0, 2]}), CONV], "changes the batch dimension"),
        ((8,), [GEMM, RELU, ("Add", ["w"], {})], "no bias of a layer"),
        ((8,), [GEMM, ("Add", ["n0"], {})], "it adds two activations"),
        ((8,), [GEMM, ("Gemm", ["w"], {"transB": 1})], "weights for 8 inputs and gets 2"),
        ((8,), [GEMM, ("Gemm", ["n0"], {})], "is not constant"),
    ],
)
def test_models_that_switches_cannot_compute(sizes: tuple[int, ...], nodes: list[Node], message: str) -> None:
    constants = {"w": floats(2, 8), "c": floats(2, 1, 3), "six": floats(2, 6, 1), "sizes": np.array([2, 4], np.int64)}
    with pytest.raises(InputError, match=message):
        read_network(onnx_model(sizes, nodes, constants))


def test_weights_that_a_node_transposes_and_constants_that_nobody_reads() -> None:
    transposed = helper.make_node("Transpose", ["w"], ["v"], perm=[1, 0])
    dense = helper.make_node("Gemm", ["input", "v"], ["a"])
    ports = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 3])]
    outputs = [helper.make_tensor_value_info("a", TensorProto.FLOAT, None)]
    weights = floats(2, 3)
    unread = numpy_helper.from_array(np.array(["unread"], object), "names")
    graph = helper.make_graph([transposed, dense], "g", ports, outputs, [numpy_helper.from_array(weights, "w"), unread])
    network = read_network(helper.make_model(graph).SerializeToString())
    assert (network.layers[0].weights == weights).all()


def test_a_model_that_branches() -> None:
    first = helper.make_node("Gemm", ["input", "w"], ["a"], name="first")
    second = helper.make_node("Gemm", ["input", "w"], ["b"], name="second")
    ports = [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 2])]
    outputs = [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)]
    graph = helper.make_graph([first, second], "g", ports, outputs, [numpy_helper.from_array(floats(2, 2), "w")])
    with pytest.raises(Unsupported, match=r"'second' \(Gemm\): it reads input, not only 'a': the model branches"):
        read_network(helper.make_model(graph).SerializeToString())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x08\xff", "not an ONNX model"),
        (onnx_model((8,), [GEMM], {"w": floats(2, 8).astype(np.float16)}), "neither floats nor 64-bit integers"),
        (onnx_model(("length",), [GEMM], {"w": floats(2, 8)}), "the size of its input is open"),  # type: ignore[arg-type]
    ],
)
def test_files_that_are_no_such_models(content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_network(content)


@pytest.mark.parametrize(
    ("rows", "shifts", "message"),
    [
        (None, None, "no rows to calibrate with"),
        (np.full((2, 1, 34), 2), None, "values from 2 to 2, outside 0 to 1"),
        (None, [1], "1 shifts are given for 3 layers"),
        (None, [1, 2, 40], "its shift is 40"),
        (np.zeros((2, 33), int), None, "a row has 33 inputs, the network 34"),
    ],
)
def test_calibration_that_cannot_be(rows: NDArray[Any] | None, shifts: list[int] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantise(one_dimension(), rows, shifts=shifts, inputs=BITS)


def chain(shape: Sequence[int], *nodes: Node, batch: str | int = "batch", **constants: Any) -> bytes:
    """A convolution of two filters, the nodes, and a dense layer of one neuron over all that is left."""
    content = onnx_model(shape, [("Conv", ["w"], {}), *nodes, ("Flatten", [], {}), ("Gemm", ["v"], {})], constants)
    made = onnx.load_from_string(content)
    if isinstance(batch, int):
        made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    return made.SerializeToString()


@pytest.mark.parametrize(
    ("nodes", "shape", "message"),
    [
        ([("Relu", [], {}), ("Reshape", ["s"], {}), ("MaxPool", [], POOL)], [0, 4, 4], "transposed or reshaped"),
        ([("Relu", [], {}), ("Transpose", [], {"perm": [0, 2, 1]}), ("MaxPool", [], POOL)], None, "transposed or resh"),
        ([("Transpose", [], {"perm": [0, 2, 1]}), ("Add", ["column"], {})], None, "transposed or reshaped"),
        ([("Relu", [], {}), ("Reshape", ["s"], {})], [2, -1], "Reshape changes the batch dimension"),
        ([("Relu", [], {}), ("Reshape", ["s"], {})], [4, 2, 2], "Reshape changes the batch dimension"),
    ],
)
def test_what_was_rearranged_is_not_pooled_as_if_it_were_not(
    nodes: list[Node], shape: list[int] | None, message: str
) -> None:
    """Of 2 channels × 8 positions: other positions would be neighbours."""
    constants: dict[str, Any] = {"w": floats(2, 1, 2), "v": floats(8, 1), "column": floats(8, 1)}
    constants["s"] = np.array(shape or [], np.int64)
    with pytest.raises(Unsupported, match=message):
        read_network(chain((1, 9), *nodes, **constants))


def test_a_reshape_may_name_the_batch_that_the_model_fixes() -> None:
    nodes: list[Node] = [("Relu", [], {}), ("Reshape", ["s"], {})]
    constants: dict[str, Any] = {"w": floats(2, 1, 2), "v": floats(16, 1), "s": np.array([3, 16], np.int64)}
    content = chain((1, 9), *nodes, batch=3, **constants)
    rows = np.random.default_rng(1).integers(0, 2, (3, 1, 9))
    np.testing.assert_allclose(read_network(content).run(rows), onnx_logits(content, rows), atol=1e-5)


def test_strides_of_zero_are_refused() -> None:
    nodes: list[Node] = [("Conv", ["w"], {"strides": [0]}), ("Relu", [], {}), ("Flatten", [], {}), ("Gemm", ["v"], {})]
    with pytest.raises(Unsupported, match="its strides are"):
        read_network(onnx_model((1, 9), nodes, {"w": floats(2, 1, 2), "v": floats(16, 1)}))


def scaled(*exponents: float) -> FloatNetwork:
    """Dense layers of four neurons whose weights are around 10 ** exponent."""
    draw, made = np.random.default_rng(5), []
    for place, exponent in enumerate(exponents, 1):
        values = draw.uniform(0.5, 1, (4, 4)) * 10.0**exponent
        made.append(Dense(f"dense{place}", values, np.zeros(4)))
    return FloatNetwork((1, 1, 4), tuple(made))


@pytest.mark.parametrize("exponent", [-38, -6, 0, 6, 38])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_scale_of_weights_does_not_matter(exponent: int, depth: int) -> None:
    """Weights times a power of ten are the same integers, or nearly: the scales differ by powers of two."""
    rows = np.random.default_rng(6).integers(0, 2, (40, 4))
    network = scaled(*[exponent] * depth)
    logits = quantise(network, rows).run(rows).ravel()
    exact = (network.run(rows) / 10.0 ** (exponent * depth)).ravel()
    assert np.corrcoef(exact, logits)[0, 1] > 0.98


@pytest.mark.parametrize(
    ("exponents", "message"),
    [
        ((-200, 0), "'dense1': a weight is at most"),
        ((200, 0), "'dense1': a weight is at most"),
        ((-100, -100, 0), "'dense2': an output is at most"),
        ((120, 120, 120, 0), "'dense2': an output is at most"),
        ((0, float("nan"), 0), "'dense2': a weight is not finite"),
        ((0, 308, 308, 0), "'dense2': a weight is at most"),
    ],
)
def test_scales_that_nothing_represents_are_refused(exponents: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantise(scaled(*exponents), np.ones((3, 4), np.int64))


@given(st.floats(1e-100, 1e100))
def test_a_scale_is_the_largest_that_fits(largest: float) -> None:
    exponent = _exponent(largest, "layer", "a weight", 0)
    assert Fraction(largest) * Fraction(2) ** exponent <= 127 < Fraction(largest) * Fraction(2) ** (exponent + 1)
