"""Integer models of the specification's test vectors, and a slow reference written apart from the package."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sloop.onnx_file import FLOAT, INT64, parse_onnx
from sloop_systems.netnn.network import (
    BITS,
    Convolution,
    Dense,
    FloatNetwork,
    InputRange,
    Ints,
    Layer,
    Network,
    Shape,
)

MASK: Final = 2**32 - 1


def drawn(places: int, stream: int) -> NDArray[np.uint64]:
    """h(i, l) of the specification, section 9.1, for i = 0 .. places - 1."""
    value = ((np.arange(places, dtype=np.uint64) + 1) * 2654435761 + stream * 40503) & MASK
    value ^= value >> np.uint64(15)
    value = value * np.uint64(2246822519) & np.uint64(MASK)
    return np.asarray(value ^ (value >> np.uint64(13)), np.uint64)


def weights(layer: int, *shape: int) -> NDArray[np.int8]:
    """W_l with this shape."""
    values = drawn(int(np.prod(shape)), layer).astype(np.int64) % 255 - 127
    return values.astype(np.int8).reshape(shape)


def biases(layer: int, count: int) -> NDArray[np.int32]:
    """B_l."""
    return (drawn(count, 100 + layer).astype(np.int64) % 2001 - 1000).astype(np.int32)


def bits(row: int, length: int) -> Ints:
    """x_s."""
    return (drawn(length, 1000 + row) & np.uint64(1)).astype(np.int64)


def rows_of(network: Network, count: int, first: int = 0) -> Ints:
    """x_first .. as rows."""
    return np.array([bits(row, network.input_count) for row in range(first, first + count)])


def model(
    length: int,
    convolutions: Sequence[tuple[int, int, int]],
    dense: Sequence[int],
    shifts: Sequence[int],
    seed: int = 0,
) -> Network:
    """A model of one dimension: (filters, kernel, pool) of each convolution, neurons of each dense layer, shifts."""
    shape, layers, label = (length, 1, 1), list[Layer](), 1
    for filters, kernel, pool in convolutions:
        values = weights(label + seed, filters, kernel, 1, shape[2])
        layers.append(
            Convolution(f"conv{label}", values, biases(label + seed, filters), shifts[label - 1], pool=(pool, 1))
        )
        shape, label = layers[-1].output_shape(shape), label + 1
    for neurons in dense:
        values = weights(label + seed, neurons, int(np.prod(shape)))
        shift = shifts[label - 1] if label <= len(shifts) else 0
        layers.append(Dense(f"dense{label - len(convolutions)}", values, biases(label + seed, neurons), shift))
        shape, label = (1, 1, neurons), label + 1
    return Network((length, 1, 1), tuple(layers))


def flow_model() -> Network:
    """NetNN-flow."""
    return model(814, [(32, 5, 5), (64, 5, 5)], [50, 100, 1], [4, 10, 11, 7])


def small_model() -> Network:
    """The small model, whose sizes do not divide by four."""
    return model(60, [(10, 4, 3), (6, 3, 2)], [7, 5, 1], [3, 7, 8, 7])


def tiny_model(seed: int = 0) -> Network:
    """Few packets: for tests that run hundreds of inferences one by one."""
    return model(12, [(3, 3, 2), (2, 2, 2)], [3, 1], [3, 8, 7], seed)


def picture_model(classes: int = 3, seed: int = 0, inputs: InputRange = BITS) -> Network:
    """Two dimensions, padding, a stride, and several classes."""
    draw = np.random.default_rng(seed)

    def ints(*shape: int) -> NDArray[np.int8]:
        return draw.integers(-127, 128, shape).astype(np.int8)

    first = Convolution("conv1", ints(5, 3, 3, 2), ints(5).astype(np.int32), 6, (2, 2), (1, 1), (1, 1, 1, 1))
    second = Convolution("conv2", ints(6, 2, 3, 5), ints(6).astype(np.int32), 9, (1, 2), (1, 1), (0, 1, 1, 1))
    shape = second.output_shape(first.output_shape((9, 8, 2)))
    last = Dense("dense1", ints(classes, int(np.prod(shape))), ints(classes).astype(np.int32))
    return Network((9, 8, 2), (first, second, last), inputs)


def slow_logits(network: Network, row: Ints) -> list[int]:
    """Logits of one row in plain Python integers, loop by loop, channels last."""
    rows, columns, channels = network.shape
    values = [
        [[int(row[(r * columns + c) * channels + d]) for d in range(channels)] for c in range(columns)]
        for r in range(rows)
    ]
    for layer in network.layers:
        if isinstance(layer, Convolution):
            values = _convolved(layer, values)
        else:
            flat = [each for line in values for position in line for each in position]
            sums = [
                int(bias) + sum(int(w) * x for w, x in zip(line, flat, strict=True))
                for line, bias in zip(layer.weights, layer.bias, strict=True)
            ]
            if layer is network.layers[-1]:
                return sums
            values = [[[_requantised(each, layer.shift) for each in sums]]]
    raise AssertionError("no last layer")


def _requantised(value: int, shift: int) -> int:
    return min(127, (max(0, value) + (1 << shift >> 1)) >> shift)


def _convolved(layer: Convolution, values: list[list[list[int]]]) -> list[list[list[int]]]:
    above, left, _, _ = layer.padding
    kernel_rows, kernel_columns = layer.weights.shape[1:3]
    shape = layer.output_shape((len(values), len(values[0]), len(values[0][0])))

    def one(filter_: int, row: int, column: int) -> int:
        total = int(layer.bias[filter_])
        for i in range(kernel_rows):
            for j in range(kernel_columns):
                r, c = row * layer.stride[0] + i - above, column * layer.stride[1] + j - left
                if 0 <= r < len(values) and 0 <= c < len(values[0]):
                    total += sum(int(w) * x for w, x in zip(layer.weights[filter_, i, j], values[r][c], strict=True))
        return _requantised(total, layer.shift)

    tall, wide = layer.pool
    return [
        [
            [max(one(f, r * tall + i, c * wide + j) for i in range(tall) for j in range(wide)) for f in range(shape[2])]
            for c in range(shape[1])
        ]
        for r in range(shape[0])
    ]


def onnx_message(network: FloatNetwork) -> Any:  # a message, whose fields have no static types
    """The network as an ONNX model: input `features` (FP32, batch × inputs), output `logits`."""
    model = parse_onnx(b"", "an empty model")
    model.ir_version = 8
    model.producer_name = "sloop innet"
    opset = model.opset_import.add()
    opset.MergeFromString(b"\x10\x0d")  # OperatorSetId.version = 13, a field that the description leaves out
    graph = model.graph
    graph.name = "innet"
    length, _, channels = network.shape
    _port(graph.input.add(), "features", length * channels)
    current, order = "features", None
    convolutions = [layer for layer in network.layers if isinstance(layer, Convolution)]
    if convolutions:
        _tensor(graph, "shape", np.array([-1, channels, length], np.int64))
        current = _node(graph, "Reshape", [current, "shape"])
    shape: Shape = network.shape
    for place, layer in enumerate(network.layers):
        if isinstance(layer, Convolution):
            _tensor(graph, f"{layer.name}.weights", np.moveaxis(layer.weights[:, :, 0, :], 2, 1).astype(np.float32))
            _tensor(graph, f"{layer.name}.bias", layer.bias.astype(np.float32))
            pads = [layer.padding[0], layer.padding[2]]
            current = _node(graph, "Conv", [current, f"{layer.name}.weights", f"{layer.name}.bias"], pads=pads)
            current = _node(graph, "Relu", [current])
            pool = [layer.pool[0]]
            current = _node(graph, "MaxPool", [current], kernel_shape=pool, strides=pool)
            shape = layer.output_shape(shape)
            order = np.arange(shape[0] * shape[2]).reshape(shape[0], shape[2]).T.ravel()  # channels first
            continue
        if order is not None:
            current = _node(graph, "Flatten", [current])
        weights = layer.weights if order is None else layer.weights[:, order]
        order = None
        _tensor(graph, f"{layer.name}.weights", weights.T.astype(np.float32))
        _tensor(graph, f"{layer.name}.bias", layer.bias.astype(np.float32))
        current = _node(graph, "Gemm", [current, f"{layer.name}.weights", f"{layer.name}.bias"])
        if place < len(network.layers) - 1:
            current = _node(graph, "Relu", [current])
    graph.node[-1].output[0] = "logits"
    _port(graph.output.add(), "logits", network.layers[-1].neurons)
    return model


def _port(port: Any, name: str, size: int) -> None:
    port.name = name
    port.type.tensor_type.elem_type = FLOAT
    port.type.tensor_type.shape.dim.add(dim_param="batch")
    port.type.tensor_type.shape.dim.add(dim_value=size)


def _tensor(graph: Any, name: str, values: NDArray[Any]) -> None:
    kind = INT64 if values.dtype == np.int64 else FLOAT
    graph.initializer.add(name=name, dims=values.shape, data_type=kind, raw_data=np.ascontiguousarray(values).tobytes())


def _node(graph: Any, operator: str, inputs: list[str], **attributes: list[int]) -> str:
    """Adds a node; the name of its output."""
    output = f"{operator.lower()}{len(graph.node)}"
    node = graph.node.add(op_type=operator, name=output, input=inputs, output=[output])
    for name, values in attributes.items():
        attribute = node.attribute.add(name=name, ints=values)
        attribute.MergeFromString(b"\xa0\x01\x07")  # AttributeProto.type = INTS, which the description leaves out
    return output
