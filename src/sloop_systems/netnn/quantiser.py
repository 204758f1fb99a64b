"""Quantises a float model: reads ONNX models of the supported operators, and chooses scales that are powers of two.

Supported are Conv of one or two dimensions, MaxPool whose cells do not overlap, Gemm and MatMul with Add, Relu, and
operators that only rename or rearrange: Flatten, Reshape, Transpose, Squeeze, Unsqueeze, Identity, Dropout. They must
form one chain, with a ReLU after every layer but the last. Sigmoid or Softmax may follow the last layer, and are left
out: they do not change the class.

The scale of a layer's weights is 2 ** a with a = floor(log2(127 / max |weight|)); that of its outputs 2 ** b with
b = min(floor(log2(127 / max output)), a + b of its inputs), the maximum taken over the calibration rows after pooling;
its shift is a + b of its inputs - b. A model whose weights are k / 2 ** a, max |k| in 64..127, passes unchanged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sloop.api import InputError, listed, quoted
from sloop.api.models import array_in, parse_onnx, read_onnx
from sloop_systems.netnn.network import (
    BITS,
    SUM_LIMIT,
    WEIGHT_MAX,
    Convolution,
    Dense,
    FloatNetwork,
    InputRange,
    Ints,
    Layer,
    Network,
    Shape,
)

Floats = NDArray[np.float64]
EXPONENT_MAX: Final = 500
"""Of the scale of weights or activations, up or down: 64-bit floats hold the product of two such scales."""


class Unsupported(InputError):
    """A model has an operator or an activation that switches cannot compute; the message names it and its place."""


def quantise(
    model: FloatNetwork | Path | str | bytes,
    rows: ArrayLike | None = None,
    *,
    inputs: InputRange = BITS,
    shifts: Sequence[int] | None = None,
) -> Network:
    """The model as integers. `model` is a network of floats, the path of an ONNX file, or its bytes.

    The scales of activations are calibrated with `rows`, integers as the network will get them; or `shifts` are given,
    one for each layer but the last. `Unsupported` for other operators, InputError for rows or layers that do not fit.
    """
    network = model if isinstance(model, FloatNetwork) else read_network(model)
    hidden = len(network.layers) - 1
    if shifts is not None and len(shifts) != hidden:
        raise InputError(
            f"{len(shifts)} shifts are given for {hidden} layers", help="give one for each layer but the last"
        )
    outputs = [1.0] * hidden if shifts is not None else _largest_outputs(network, rows, inputs)
    layers: list[Layer] = []
    exponent = inputs.exponent
    for place, layer in enumerate(network.layers):
        scale, weights = _quantised_weights(layer)
        bias = _quantised_bias(layer, scale + exponent)
        shift = 0
        if place < hidden:
            widest = _exponent(outputs[place], f"layer {layer.name!r}", "an output", scale + exponent)
            shift = shifts[place] if shifts is not None else scale + exponent - min(widest, scale + exponent)
            exponent = scale + exponent - shift
        layers.append(replace(layer, weights=weights, bias=bias, shift=shift))
    return Network(network.shape, tuple(layers), inputs, network.order)


def _largest_outputs(network: FloatNetwork, rows: ArrayLike | None, inputs: InputRange) -> list[float]:
    """For each layer but the last, its largest output for the calibration rows."""
    if rows is None or not len(np.asarray(rows)):
        raise InputError("there are no rows to calibrate with", help="give some hundred typical rows, or the shifts")
    given = np.asarray(rows)
    if given.min() < inputs.low or given.max() > inputs.high:
        raise InputError(
            f"calibration rows have values from {given.min()} to {given.max()}, outside {inputs.low} to {inputs.high}",
            where="rows",
            help="encode them as the network will get them",
        )
    with np.errstate(over="ignore", invalid="ignore"):  # `_exponent` refuses what is not finite
        outputs = network.activations(given, inputs)[:-1]
    return [float(output.max()) for output in outputs]


def _quantised_weights(layer: Layer) -> tuple[int, NDArray[np.int8]]:
    """The exponent of a layer's weights, and the weights times 2 ** exponent."""
    largest = float(np.abs(layer.weights).max(initial=0.0))
    exponent = _exponent(largest, f"layer {layer.name!r}", "a weight", 0)
    scaled = np.rint(layer.weights.astype(np.float64) * 2.0**exponent)  # half to even
    return exponent, np.clip(scaled, -WEIGHT_MAX, WEIGHT_MAX).astype(np.int8)


def _exponent(largest: float, where: str, what: str, if_zero: int) -> int:
    """The exponent of the scale with which `largest` is at most 127. InputError if there is none."""
    if largest == 0:
        return if_zero
    if not math.isfinite(largest):
        raise InputError(f"{what} is not finite", where=where, help="train the model again")
    fraction, power = math.frexp(largest)  # exact, as the logarithm is not
    exponent = WEIGHT_MAX.bit_length() - power - (fraction > WEIGHT_MAX / (WEIGHT_MAX + 1))
    if abs(exponent) > EXPONENT_MAX:
        raise InputError(
            f"{what} is at most {largest:.3g}, which no scale of eight bits represents beside others",
            where=where,
            help="scale the layer's weights and biases",
        )
    return exponent


def _quantised_bias(layer: Layer, exponent: int) -> NDArray[np.int32]:
    scaled = np.rint(np.ldexp(layer.bias.astype(np.float64), exponent))
    if not np.isfinite(scaled).all() or np.abs(scaled).max(initial=0) >= SUM_LIMIT:
        raise InputError(
            "a bias does not fit into 32 bits at the scale of its products",
            where=f"layer {layer.name!r}",
            help="its weights are too small beside its bias; scale them",
        )
    return scaled.astype(np.int32)


# ONNX


@dataclass
class _Pending:
    """A layer whose ReLU, pooling or bias may still follow."""

    name: str
    layer: Layer
    has_relu: bool = False
    has_pool: bool = False
    has_bias: bool = False


@dataclass
class _Reader:
    """Follows the one chain of a model from its input to its output.

    `order` has the shape of the current tensor without the batch. Each element is that activation's place in our own
    order (position, then channel), so that a Reshape or Transpose of the model is the same operation on `order`. Before
    the first layer it is the place in a row as users give it.
    """

    constants: dict[str, Any]
    """Arrays, or the tensors of the file: one that nobody reads may have any type."""
    order: Ints
    batch: int = 0
    """The number of rows that the model fixes; 0 for any."""
    shape: Shape = (1, 1, 1)
    input_shape: Shape | None = None
    input_order: Ints | None = None
    layers: list[_Pending] = field(default_factory=list)
    before: Shape = (1, 1, 1)
    """The shape of the last layer's input."""
    ended: str = ""
    """The operator after the last layer that the switches leave out, such as Sigmoid."""

    def read(self, node: Any) -> None:  # noqa: ANN401  # a message, whose fields have no static types
        """Take the next node of the chain."""
        where = _place(node)
        if self.ended:
            raise Unsupported(f"{node.op_type} after {self.ended}", where=where, help="end the model with its logits")
        if node.domain not in {"", "ai.onnx"} or node.op_type not in _OPERATORS:
            raise Unsupported(
                f"the operator {quoted(node.op_type)} is not supported; switches compute {listed(sorted(_OPERATORS))}",
                where=where,
                help="activations other than ReLU need floating point; fold normalisation into weights before export",
            )
        _OPERATORS[node.op_type](self, node)

    def network(self) -> FloatNetwork:
        """The whole network. InputError if it ends in no dense layer."""
        for pending in self.layers[:-1]:
            if not pending.has_relu:
                raise Unsupported(
                    "no ReLU follows it", where=f"layer {pending.name!r}", help="every layer but the last needs one"
                )
        if not self.layers or self.layers[-1].has_relu:
            what = "its last layer has a ReLU, so that its logits have no sign" if self.layers else "it has no layer"
            raise Unsupported(what, where="the model", help="end the model with a dense layer")
        assert self.input_shape is not None
        assert self.input_order is not None
        in_order = np.array_equal(self.input_order, np.arange(self.input_order.size))
        layers = tuple(pending.layer for pending in self.layers)
        network = FloatNetwork(self.input_shape, layers, None if in_order else self.input_order)
        _ = network.shapes
        return network

    # Layers

    def convolve(self, node: Any) -> None:  # noqa: ANN401
        """Conv of one or two dimensions."""
        where, attributes = _place(node), _attributes(node)
        weights = self.constant(node, 1).astype(np.float64)
        dimensions = weights.ndim - 2
        if dimensions not in {1, 2} or self.order.ndim != dimensions + 1:
            raise Unsupported(
                f"a convolution of {dimensions} dimensions over a tensor of {self.order.ndim + 1}",
                where=where,
                help="use Conv of one or two dimensions on batch × channels × positions",
            )
        if attributes.get("group", 1) != 1 or set(attributes.get("dilations", [1])) != {1}:
            raise Unsupported("it has groups or dilations", where=where, help="use an ordinary convolution")
        stride = [*attributes.get("strides", [1] * dimensions), 1][:2]
        if min(stride) < 1:
            raise Unsupported(f"its strides are {stride}", where=where, help="use strides of 1 or more")
        kernel = [*weights.shape[2:], 1][:2]
        channels_last = np.moveaxis(self.order, 0, -1).reshape(self.order.shape[1], -1, len(self.order))
        self._enter(channels_last, where)
        padding = _padding(attributes, kernel, stride, self.shape)
        weights = np.moveaxis(weights.reshape(*weights.shape[:2], *kernel), 1, -1)
        bias = self._optional(node, 2, len(weights))
        name = self._name(node, "conv", Convolution)
        layer = Convolution(name, weights, bias, stride=(stride[0], stride[1]), padding=padding)
        self._append(_Pending(name, layer, has_bias=len(node.input) > 2), dimensions)

    def multiply(self, node: Any) -> None:  # noqa: ANN401
        """Gemm or MatMul with constant weights."""
        where, attributes = _place(node), _attributes(node)
        if self.order.ndim != 1:
            raise Unsupported(
                f"{node.op_type} on a tensor of {self.order.ndim + 1} dimensions",
                where=where,
                help="put Flatten before it",
            )
        weights = self.constant(node, 1).astype(np.float64)
        if weights.ndim != 2 or attributes.get("transA"):
            raise Unsupported("it does not multiply rows by a matrix", where=where, help="use a dense layer")
        if not attributes.get("transB"):
            weights = weights.T
        if weights.shape[1] != self.order.size:
            raise InputError(
                f"it has weights for {weights.shape[1]} inputs and gets {self.order.size}",
                where=where,
                help="export again",
            )
        self._enter(self.order.reshape(1, 1, -1) if not self.layers else None, where)
        columns = np.zeros_like(weights)
        columns[:, self.order] = weights * attributes.get("alpha", 1.0)
        bias = self._optional(node, 2, len(weights)) * attributes.get("beta", 1.0)
        name = self._name(node, "dense", Dense)
        self._append(_Pending(name, Dense(name, columns, bias), has_bias=len(node.input) > 2), 0)

    def add(self, node: Any) -> None:  # noqa: ANN401
        """Add of a constant: the bias of the layer before."""
        where = _place(node)
        found = next((at for at, name in enumerate(node.input) if name in self.constants), None)
        constant = None if found is None else self.constant(node, found)
        last = self.layers[-1] if self.layers else None
        if constant is None:
            raise Unsupported("it adds two activations", where=where, help="a residual connection cannot be mapped")
        if last is None or last.has_bias or last.has_relu or last.has_pool:
            raise Unsupported("it adds a constant that is no bias of a layer", where=where, help="fold it into weights")
        if not self._is_as_left(self.order.ndim - 1):
            raise Unsupported("its input is transposed or reshaped", where=where, help="add before that")
        wanted = (last.layer.neurons, *(1 for _ in self.order.shape[1:]))
        if constant.size not in {1, last.layer.neurons} or (
            constant.size > 1 and tuple(constant.shape[-len(wanted) :]) != wanted
        ):
            raise Unsupported(f"it adds a constant of shape {constant.shape}", where=where, help="add one per neuron")
        bias = np.broadcast_to(constant.astype(np.float64).ravel(), (last.layer.neurons,))
        last.layer, last.has_bias = replace(last.layer, bias=bias), True

    def relu(self, node: Any) -> None:  # noqa: ANN401
        """Relu: the activation of the layer before."""
        if not self.layers:
            raise Unsupported("it has no layer before it", where=_place(node), help="leave it out")
        self.layers[-1].has_relu = True

    def pool(self, node: Any) -> None:  # noqa: ANN401
        """MaxPool, before or after the ReLU: both are monotone."""
        where, attributes = _place(node), _attributes(node)
        last = self.layers[-1] if self.layers else None
        if last is None or not isinstance(last.layer, Convolution) or last.has_pool:
            raise Unsupported("it does not follow a convolution", where=where, help="pool once after a convolution")
        kernel = attributes.get("kernel_shape", [])
        if len(kernel) not in {1, 2} or not self._is_as_left(len(kernel)):
            raise Unsupported("its input is transposed or reshaped", where=where, help="pool before that")
        if attributes.get("strides", [1] * len(kernel)) != kernel:
            raise Unsupported(
                f"its cells of {kernel} overlap, or leave gaps: its strides are {attributes.get('strides', 'all 1')}",
                where=where,
                help="use strides equal to the kernel",
            )
        padded = any(attributes.get("pads", [])) or attributes.get("auto_pad", b"NOTSET") not in {b"NOTSET", b"VALID"}
        if padded or attributes.get("ceil_mode") or set(attributes.get("dilations", [1])) != {1}:
            raise Unsupported("it has padding, ceil_mode or dilations", where=where, help="leave incomplete cells out")
        last.layer, last.has_pool = replace(last.layer, pool=(kernel[0], [*kernel, 1][1])), True
        self._follow(len(kernel))

    def end(self, node: Any) -> None:  # noqa: ANN401
        """Sigmoid or Softmax: left out, since only sign and order of the logits count."""
        if not self.layers or not isinstance(self.layers[-1].layer, Dense) or self.layers[-1].has_relu:
            raise Unsupported(
                f"the activation {node.op_type} is not supported",
                where=_place(node),
                help="use ReLU; switches have no other",
            )
        self.ended = node.op_type

    # What only renames or rearranges

    def rearrange(self, node: Any) -> None:  # noqa: ANN401
        """Flatten, Reshape, Squeeze, Unsqueeze and Transpose that leave the batch where it is."""
        where, attributes = _place(node), _attributes(node)
        with_batch = self.order[None]
        if node.op_type == "Flatten":
            found = with_batch.reshape(1, -1) if attributes.get("axis", 1) == 1 else None
        elif node.op_type == "Transpose":
            turned = attributes.get("perm", [])
            found = with_batch.transpose(turned) if len(turned) == with_batch.ndim and turned[0] == 0 else None
        elif node.op_type == "Reshape":
            sizes = [int(size) for size in self.constant(node, 1).ravel()]
            sizes = [with_batch.shape[at] if size == 0 else size for at, size in enumerate(sizes)]
            if sizes and sizes[0] in {1, self.batch}:
                sizes[0] = 1
            try:
                found = with_batch.reshape(sizes)
            except ValueError:
                found = None
        else:
            axes = attributes.get("axes") or (
                [int(axis) for axis in self.constant(node, 1)] if len(node.input) > 1 else None
            )
            found = _squeezed(with_batch, node.op_type, axes)
        if found is None or len(found) != 1:
            raise Unsupported(f"{node.op_type} changes the batch dimension", where=where, help="keep rows apart")
        self.order = found[0]

    def skip(self, node: Any) -> None:  # noqa: ANN401
        """Identity and Dropout."""

    def _enter(self, arranged: Ints | None, where: str) -> None:
        """Before a layer: note the input's order if it is the first, else check that a convolution gets its
        positions and channels as the layer before left them."""
        if not self.layers:
            assert arranged is not None
            self.shape = self.input_shape = (arranged.shape[0], arranged.shape[1], arranged.shape[2])
            self.input_order, self.order = arranged.ravel(), np.arange(arranged.size).reshape(self.order.shape)
        elif arranged is not None and (
            arranged.shape != self.shape or not np.array_equal(arranged.ravel(), np.arange(arranged.size))
        ):
            raise Unsupported("its input is transposed or reshaped", where=where, help="leave positions where they are")

    def _append(self, pending: _Pending, dimensions: int) -> None:
        self.layers.append(pending)
        self.before = self.shape
        self._follow(dimensions)

    def _follow(self, dimensions: int) -> None:
        """After a layer, or its pooling: its outputs in our order."""
        self.shape = self.layers[-1].layer.output_shape(self.before)
        self.order = self._as_left(dimensions)

    def _as_left(self, dimensions: int) -> Ints:
        """The `order` that a layer leaves: channels, then so many dimensions of positions."""
        ours = np.arange(int(np.prod(self.shape))).reshape(self.shape)
        return np.moveaxis(ours, -1, 0).reshape((self.shape[2], *self.shape[:dimensions]))

    def _is_as_left(self, dimensions: int) -> bool:
        """Whether nothing was rearranged since the last layer, whose positions have so many dimensions."""
        used = self.shape[:dimensions]
        return math.prod(used) == math.prod(self.shape[:2]) and np.array_equal(self.order, self._as_left(dimensions))

    def _name(self, node: Any, kind: str, of: type[Layer]) -> str:  # noqa: ANN401
        """`conv1`, `dense2`: in messages and pictures short names read best; a place in the file is in `_place`."""
        return f"{kind}{1 + sum(isinstance(pending.layer, of) for pending in self.layers)}"

    def constant(self, node: Any, at: int) -> Floats | Ints:  # noqa: ANN401
        """An input of a node that must be constant."""
        name = node.input[at] if len(node.input) > at else ""
        if name not in self.constants:
            raise Unsupported(
                f"its input {quoted(name)} is not constant", where=_place(node), help="export weights with it"
            )
        value = self.constants[name]
        return value if isinstance(value, np.ndarray) else array_in(value)

    def _optional(self, node: Any, at: int, neurons: int) -> Floats:  # noqa: ANN401
        """The bias of a layer, zeros if it has none."""
        if len(node.input) <= at or not node.input[at]:
            return np.zeros(neurons)
        bias = self.constant(node, at).astype(np.float64).ravel()
        if bias.size not in {1, neurons}:
            raise InputError(
                f"it has {neurons} neurons and {bias.size} biases", where=_place(node), help="export again"
            )
        return np.broadcast_to(bias, (neurons,)).copy()


_OPERATORS: Final[Mapping[str, Callable[[_Reader, Any], None]]] = {
    "Conv": _Reader.convolve,
    "Gemm": _Reader.multiply,
    "MatMul": _Reader.multiply,
    "Add": _Reader.add,
    "Relu": _Reader.relu,
    "MaxPool": _Reader.pool,
    "Flatten": _Reader.rearrange,
    "Reshape": _Reader.rearrange,
    "Transpose": _Reader.rearrange,
    "Squeeze": _Reader.rearrange,
    "Unsqueeze": _Reader.rearrange,
    "Identity": _Reader.skip,
    "Dropout": _Reader.skip,
    "Sigmoid": _Reader.end,
    "Softmax": _Reader.end,
    "LogSoftmax": _Reader.end,
}


def read_network(model: Path | str | bytes) -> FloatNetwork:
    """The network in an ONNX file, or in its bytes. `Unsupported` if switches cannot compute it; InputError if it is no
    model."""
    message = parse_onnx(model, "model") if isinstance(model, bytes) else read_onnx(Path(model))
    graph = message.graph
    constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    ports = [port for port in graph.input if port.name not in constants]
    if len(ports) != 1:
        raise Unsupported(f"it has {len(ports)} inputs", where="the model", help="use a model of one input")
    batch, *sizes = [dimension.dim_value for dimension in ports[0].type.tensor_type.shape.dim] or [0]
    if not sizes or min(sizes) < 1:
        raise Unsupported(
            "the size of its input is open", where="the model", help="export it with all sizes but the batch"
        )
    reader = _Reader(constants, np.arange(math.prod(sizes)).reshape(sizes), batch)
    current = ports[0].name
    for node in graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = _constant_of(node)
            continue
        activations = [name for name in node.input if name and name not in constants]
        if activations and (len(set(activations)) > 1 or activations[0] != current):
            raise Unsupported(
                f"it reads {listed(sorted(set(activations)))}, not only {current!r}: the model branches",
                where=_place(node),
                help="use a model that is one chain of layers",
            )
        if not activations and node.op_type == "Transpose":  # of weights, as older exporters write a dense layer
            turned = _attributes(node).get("perm")
            constants[node.output[0]] = reader.constant(node, 0).transpose(turned)
            continue
        if not activations:
            raise Unsupported("it computes with constants alone", where=_place(node), help="simplify the model first")
        reader.read(node)
        current = node.output[0]
    if [port.name for port in graph.output] != [current]:
        raise Unsupported("its output is not that of its last layer", where="the model", help="give it one output")
    return reader.network()


def _constant_of(node: Any) -> Floats | Ints:  # noqa: ANN401
    """The value of a Constant node."""
    found = _attributes(node)
    for key in ("value", "value_ints", "value_int", "value_float"):
        if key in found:
            return np.asarray(found[key])
    raise Unsupported("its constant is no tensor of numbers", where=_place(node), help="export the model again")


def _attributes(node: Any) -> dict[str, Any]:  # noqa: ANN401
    """The attributes of a node by name: numbers, lists of numbers, bytes and arrays."""
    found: dict[str, Any] = {}
    for each in node.attribute:
        for part in ("f", "i", "s", "t"):
            if each.HasField(part):
                found[each.name] = array_in(each.t) if part == "t" else getattr(each, part)
        if each.ints:
            found[each.name] = list(each.ints)
    return found


def _place(node: Any) -> str:  # noqa: ANN401
    """How a message names a node."""
    return f"node {node.name or node.output[0]!r} ({node.op_type})"


def _padding(
    attributes: Mapping[str, Any], kernel: Sequence[int], stride: Sequence[int], shape: Shape
) -> tuple[int, int, int, int]:
    """Zeros above, left, below and right."""
    mode = attributes.get("auto_pad", b"NOTSET")
    if mode in {b"SAME_UPPER", b"SAME_LOWER"}:
        totals = [
            max(0, (-(-size // step) - 1) * step + wide - size)
            for size, wide, step in zip(shape[:2], kernel, stride, strict=True)
        ]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        first, second = (small, large) if mode == b"SAME_UPPER" else (large, small)
        return first[0], first[1], second[0], second[1]
    pads = list(attributes.get("pads", [])) if mode == b"NOTSET" else []
    if len(pads) == 2:
        return pads[0], 0, pads[1], 0
    return (pads[0], pads[1], pads[2], pads[3]) if len(pads) == 4 else (0, 0, 0, 0)


def _squeezed(order: Ints, operator: str, axes: Sequence[int] | None) -> Ints | None:
    """Squeeze or Unsqueeze of a tensor with its batch; None if that concerns the batch or is impossible."""
    if operator == "Squeeze" and axes is None:
        axes = [axis for axis in range(1, order.ndim) if order.shape[axis] == 1]
    total = order.ndim if operator == "Squeeze" else order.ndim + len(axes or ())
    wanted = tuple(axis % total for axis in axes or ())
    if 0 in wanted:
        return None
    try:
        return order.squeeze(wanted) if operator == "Squeeze" else np.expand_dims(order, wanted)
    except ValueError:
        return None
