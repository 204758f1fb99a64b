"""The network as integers: layers as data, and the batched reference that every runner must equal, bit for bit.

Weights are int8 in -127..127, activations after a ReLU are 0..127, sums are int32. All scales are powers of two, so
that a switch requantises with a shift:

    y = min(127, (max(0, sum) + rounding) >> shift)        rounding = 1 << (shift - 1), or 0 if shift = 0

The last layer is not requantised: its sums are the logits. With one logit, the class is 1 if it is ≥ 0. With more, the
class is that of the largest logit, the first of equal ones. An input is rows × columns × channels; an input of one
dimension has one column. *Position* is row · columns + column. The place of an activation in a vector is
position · channels + channel; switches use it as the address.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sloop.api import InputError, counted, number

WEIGHT_MAX: Final = 127
"""Weights and activations are at most this; -128 has no counterpart, and its magnitude needs 8 bits."""
SUM_LIMIT: Final = 2**31
"""Sums are int32."""
SHIFT_MAX: Final = 30
ROWS_AT_ONCE: Final = 64
"""Rows that the reference computes together: more does not fit into a CPU's cache."""
TABLE_BITS_MAX: Final = 12
"""A pooling cell of the first layer that reads no more inputs than this, each a bit, is looked up in a table."""

Ints = NDArray[np.int64]
Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution with ReLU, then a maximum over pooling cells that do not overlap; incomplete cells are left out."""

    name: str
    weights: NDArray[Any]
    """Filters × rows × columns × channels: int8, or floats before they are quantised."""
    bias: NDArray[Any]
    """One for each filter: int32, or floats before they are quantised."""
    shift: int = 0
    pool: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Zeros above, left, below and right of the input, in ONNX's order."""

    @property
    def neurons(self) -> int:
        """The number of filters."""
        return len(self.weights)

    @property
    def matrix(self) -> NDArray[Any]:
        """Weights as filters × (positions of the window · channels)."""
        return self.weights.reshape(len(self.weights), -1)

    def output_shape(self, shape: Shape) -> Shape:
        """Rows, columns and channels of its output. InputError if the input is too small for one pooling cell, or its
        pool, stride or padding is impossible."""
        above, left, below, right = self.padding
        if min(*self.pool, *self.stride) < 1 or min(self.padding) < 0:
            raise InputError(
                f"its pool {self.pool}, stride {self.stride} or padding {self.padding} is too small",
                where=f"layer {self.name!r}",
                help="give pools and strides of 1 or more, and a padding of 0 or more",
            )
        sizes = (shape[0] + above + below, shape[1] + left + right)
        cells = [
            ((size - kernel) // stride + 1) // pool if size >= kernel else 0
            for size, kernel, stride, pool in zip(sizes, self.weights.shape[1:3], self.stride, self.pool, strict=True)
        ]
        if min(cells) < 1:
            raise InputError(
                f"its input of {sizes[0]} × {sizes[1]} positions, padding included, has no complete pooling cell of "
                f"{self.pool[0]} × {self.pool[1]} windows of {self.weights.shape[1]} × {self.weights.shape[2]}",
                where=f"layer {self.name!r}",
                help="use a longer input, or smaller kernels and pools",
            )
        return cells[0], cells[1], len(self.weights)

    def windows(self, shape: Shape) -> Ints:
        """Windows × positions of the input, -1 for padding. All windows of a pooling cell follow each other, cell by
        cell, so that a switch recognises the last one without a division. Windows outside a complete cell are left
        out: nobody needs them."""
        rows, columns, _ = self.output_shape(shape)
        above, left = self.padding[:2]
        (tall, wide), (down, across) = self.pool, self.stride
        # cell row, cell column, row in the cell, column in the cell
        window_row, window_column = np.meshgrid(np.arange(rows * tall), np.arange(columns * wide), indexing="ij")
        order = np.arange(rows * tall * columns * wide).reshape(rows, tall, columns, wide).transpose(0, 2, 1, 3).ravel()
        top, start = window_row.ravel()[order] * down - above, window_column.ravel()[order] * across - left
        tap_row, tap_column = np.meshgrid(*(np.arange(size) for size in self.weights.shape[1:3]), indexing="ij")
        row, column = top[:, None] + tap_row.ravel(), start[:, None] + tap_column.ravel()
        outside = (row < 0) | (row >= shape[0]) | (column < 0) | (column >= shape[1])
        return np.where(outside, -1, row * shape[1] + column).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense layer; with ReLU unless it is the network's last."""

    name: str
    weights: NDArray[Any]
    """Neurons × inputs, the inputs by position, then channel: int8, or floats before they are quantised."""
    bias: NDArray[Any]
    shift: int = 0

    @property
    def neurons(self) -> int:
        """The number of neurons."""
        return len(self.weights)

    @property
    def matrix(self) -> NDArray[Any]:
        """The weights."""
        return self.weights

    def output_shape(self, shape: Shape) -> Shape:
        """One position with a channel for each neuron. InputError if the number of inputs is another."""
        inputs = int(np.prod(shape))
        if self.weights.shape[1] != inputs:
            raise InputError(
                f"it has weights for {self.weights.shape[1]:,} inputs and gets {inputs:,}",
                where=f"layer {self.name!r}",
                help="make the layers fit",
            )
        return 1, 1, len(self.weights)


Layer = Convolution | Dense


@dataclass(frozen=True)
class InputRange:
    """What the inputs are: integers in low..high that stand for value / 2 ** exponent in the float model."""

    low: int
    high: int
    exponent: int

    def __post_init__(self) -> None:
        """InputError if packets cannot carry the inputs, or no sum of them could be bounded."""
        if not -WEIGHT_MAX <= self.low <= self.high <= WEIGHT_MAX or not 0 <= self.exponent <= SHIFT_MAX:
            raise InputError(
                f"inputs from {self.low} to {self.high}, divided by 2^{self.exponent}",
                where="inputs",
                help=f"encode them as integers from -{WEIGHT_MAX} to {WEIGHT_MAX}; the exponent is 0 to {SHIFT_MAX}",
            )


BITS: Final = InputRange(0, 1, 0)
BYTES: Final = InputRange(0, 127, 7)
"""Bytes as byte >> 1."""
SIGNED: Final = InputRange(-WEIGHT_MAX, WEIGHT_MAX, 7)


def classify(logits: Ints) -> Ints:
    """The class of each row of logits: of one logit, 1 if it is ≥ 0; of more, the place of the first largest."""
    return (logits[:, 0] >= 0).astype(np.int64) if logits.shape[1] == 1 else logits.argmax(axis=1)


def check_layers(shape: Shape, layers: Sequence[Layer]) -> tuple[Shape, ...]:
    """The shape of the input and of each layer's output. InputError if the layers do not fit each other."""
    if min(shape) < 1:
        raise InputError(f"its input is {' × '.join(map(str, shape))}", help="give rows, columns and channels")
    shapes = [shape]
    for place, layer in enumerate(layers):
        where = f"layer {layer.name!r}"
        if isinstance(layer, Convolution):
            if place and isinstance(layers[place - 1], Dense):
                raise InputError("it is a convolution after a dense layer", where=where, help="put dense layers last")
            if layer.weights.ndim != 4 or layer.weights.shape[3] != shapes[-1][2]:
                channels = layer.weights.shape[3] if layer.weights.ndim == 4 else "no"
                raise InputError(
                    f"its weights have {channels} channels and its input {shapes[-1][2]}",
                    where=where,
                    help="make them fit",
                )
        if layer.bias.shape != (layer.neurons,):
            raise InputError(
                f"it has {counted(layer.neurons, 'neuron')} and biases of shape {layer.bias.shape}",
                where=where,
                help="give one bias for each neuron",
            )
        shapes.append(layer.output_shape(shapes[-1]))
    if not layers or isinstance(layers[-1], Convolution):
        raise InputError("the network does not end in a dense layer", help="its outputs are the logits; add one")
    return tuple(shapes)


def _arranged(rows: ArrayLike, shape: Shape, order: NDArray[np.int64] | None) -> NDArray[Any]:
    """Rows of a model as n × positions × channels. InputError if they have another number of inputs."""
    given = np.asarray(rows)
    inputs = int(np.prod(shape))
    if not given.size and given.ndim > 1:
        given = given.reshape(0, inputs)
    else:
        given = given.reshape(len(given), -1) if given.ndim > 1 else given.reshape(1, -1)
    if given.shape[1] != inputs:
        raise InputError(
            f"a row has {number(given.shape[1])} inputs, the network {number(inputs)}",
            where="rows",
            help="pad or cut rows",
        )
    return (given if order is None else given[:, order]).reshape(len(given), shape[0] * shape[1], shape[2])


@dataclass(frozen=True, eq=False)
class FloatNetwork:
    """The network before it is quantised: the same layers with float weights."""

    shape: Shape
    layers: tuple[Layer, ...]
    order: Ints | None = None
    """As `Network.order`."""

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of the input and of each layer's output."""
        return check_layers(self.shape, self.layers)

    def activations(self, rows: ArrayLike, inputs: InputRange = BITS) -> list[NDArray[np.float64]]:
        """The output of each layer for rows of integers, after ReLU and pooling; the last are the logits."""
        found: list[NDArray[np.float64]] = []
        current = _arranged(rows, self.shape, self.order).astype(np.float64) / 2.0**inputs.exponent
        for layer, shape in zip(self.layers, self.shapes, strict=False):
            sums = _sums(layer, shape, current, np.float64)
            current = sums if layer is self.layers[-1] else np.maximum(sums, 0)
            found.append(current.reshape(len(current), -1))
        return found

    def run(self, rows: ArrayLike, inputs: InputRange = BITS) -> NDArray[np.float64]:
        """Logits, one row for each row."""
        return self.activations(rows, inputs)[-1]


@dataclass(frozen=True, eq=False)
class Network:
    """A quantised network. It is checked when it is made: InputError if layers do not fit or a sum could overflow."""

    shape: Shape
    """Rows, columns and channels of the input."""
    layers: tuple[Layer, ...]
    """All but the last have a ReLU."""
    inputs: InputRange = BITS
    order: Ints | None = None
    """For each place of the input (position, then channel), its place in a row as users give it; None if equal. An ONNX
    model's rows have channels first."""

    def __post_init__(self) -> None:
        """Check the layers."""
        check_layers(self.shape, self.layers)
        for layer in self.layers:
            _check_integers(layer)
        if self.order is not None and not np.array_equal(np.sort(self.order, axis=None), np.arange(self.input_count)):
            raise InputError("the order of its inputs has not each place once", help="make the network again")

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of the input and of each layer's output."""
        return check_layers(self.shape, self.layers)

    @property
    def input_count(self) -> int:
        """Integers in a row."""
        return int(np.prod(self.shape))

    @property
    def classes(self) -> int:
        """The number of logits."""
        return self.layers[-1].neurons

    @cached_property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum(layer.weights.size + layer.bias.size for layer in self.layers)

    @cached_property
    def products(self) -> int:
        """Products of one inference, those of windows that no complete pooling cell contains left out."""
        per_layer = [
            layer.weights.size * (len(layer.windows(shape)) if isinstance(layer, Convolution) else 1)
            for layer, shape in zip(self.layers, self.shapes, strict=False)
        ]
        return int(sum(per_layer))

    def check_rows(self, rows: ArrayLike) -> Ints:
        """Rows as n × inputs, in the network's order. InputError if one has another length or a value out of range."""
        given = np.asarray(rows)
        if given.dtype.kind not in "iub":
            raise InputError(f"rows have the type {given.dtype}", where="rows", help="give integers")
        found = _arranged(given, self.shape, self.order).reshape(-1, self.input_count)
        if found.size and (found.min() < self.inputs.low or found.max() > self.inputs.high):
            wrong = found.min() if found.min() < self.inputs.low else found.max()
            raise InputError(
                f"a feature is {wrong}; the network takes {self.inputs.low} to {self.inputs.high}",
                where="rows",
                help="encode features as the network was trained with them",
            )
        return found.astype(np.int64)

    def run(self, rows: ArrayLike) -> Ints:
        """Logits, one row for each row: the reference. InputError as `check_rows`."""
        given = self.check_rows(rows)
        found = np.empty((len(given), self.classes), np.int64)
        for start in range(0, len(given), ROWS_AT_ONCE):
            chunk = given[start : start + ROWS_AT_ONCE]
            found[start : start + len(chunk)] = reduce(lambda current, step: step(current), self._steps, chunk)
        return found

    def activations(self, rows: ArrayLike) -> list[Ints]:
        """The integers after each layer, n × (position, channel), the last the logits. InputError as `check_rows`."""
        current: NDArray[Any] = self.check_rows(rows)
        found = []
        for step in self._steps:
            current = step(current)
            found.append(current.astype(np.int64))
        return found

    @cached_property
    def _steps(self) -> tuple[Callable[[NDArray[Any]], NDArray[Any]], ...]:
        """One function for each layer, n × inputs to n × outputs."""
        return tuple(self._step(place) for place in range(len(self.layers)))

    def _step(self, place: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
        layer, shape = self.layers[place], self.shapes[place]
        is_last = place == len(self.layers) - 1
        # A sum of products is exact in 32-bit floats below 2^24; matrices of floats multiply twenty times as fast.
        kind = np.float32 if largest_sum(layer) < 2**24 else np.float64

        def step(rows: NDArray[Any]) -> NDArray[Any]:
            sums = _sums(layer, shape, rows.reshape(len(rows), -1, shape[2]), kind).reshape(len(rows), -1)
            return sums if is_last else requantise(sums, layer.shift)

        if place == 0 and self.inputs == BITS and isinstance(layer, Convolution):
            return _table_step(layer, shape, step) or step
        return step


def requantise(sums: NDArray[Any], shift: int) -> NDArray[Any]:
    """ReLU and requantisation of sums that are whole floats: exact, since dividing by a power of two is."""
    rounding = 1 << (shift - 1) if shift else 0
    scaled = np.floor((np.maximum(sums, 0) + sums.dtype.type(rounding)) * sums.dtype.type(2.0**-shift))
    return np.minimum(scaled, WEIGHT_MAX)  # type: ignore[no-any-return]


def largest_sum(layer: Layer) -> int:
    """A bound on the magnitude of a layer's sums, with the rounding."""
    weights = np.abs(layer.matrix.astype(np.int64)).sum(axis=1)
    rounding = 1 << (layer.shift - 1) if layer.shift else 0
    return int((np.abs(layer.bias.astype(np.int64)) + WEIGHT_MAX * weights).max()) + rounding


def _sums(layer: Layer, shape: Shape, inputs: NDArray[Any], kind: type[np.floating[Any]]) -> NDArray[Any]:
    """Biases plus products, and the maxima over pooling cells: n × positions × channels in, n × positions × channels
    out. ReLU and requantisation are monotone, so they may follow the maxima."""
    bias = layer.bias.astype(kind)
    matrix = layer.matrix.T.astype(kind)
    if isinstance(layer, Dense):
        dense: NDArray[Any] = inputs.reshape(len(inputs), -1).astype(kind) @ matrix + bias
        return dense[:, None, :]
    padded = np.concatenate([inputs.astype(kind), np.zeros((len(inputs), 1, shape[2]), kind)], axis=1)
    windows = layer.windows(shape)
    # NumPy multiplies a stack of small matrices a hundred times as slowly as one large one.
    columns = np.take(padded, windows.ravel(), axis=1).reshape(len(inputs) * len(windows), -1)
    cell = layer.pool[0] * layer.pool[1]
    sums = (columns @ matrix).reshape(len(inputs), len(windows) // cell, cell, -1)
    largest: NDArray[Any] = reduce(np.maximum, (sums[:, :, place] for place in range(cell)))
    return largest + bias


def _table_step(
    layer: Convolution, shape: Shape, step: Callable[[NDArray[Any]], NDArray[Any]]
) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """The first layer as a table over the inputs of a pooling cell, each a bit: 512 entries for five windows of five.

    None if a cell reads too many inputs, or if not all cells read the same inputs relative to their first.
    """
    cell = layer.pool[0] * layer.pool[1]
    windows = layer.windows(shape).reshape(-1, cell * layer.weights.shape[1] * layer.weights.shape[2])
    relative = windows - windows[:, :1]
    distinct = np.unique(relative[0])
    if windows.min() < 0 or (relative != relative[0]).any() or len(distinct) * shape[2] > TABLE_BITS_MAX:
        return None
    places = ((windows[:, :1] + distinct)[:, :, None] * shape[2] + np.arange(shape[2])).reshape(len(windows), -1)
    bits = places.shape[1]
    # Every combination of bits as an input of one cell; what lies outside the cell does not matter.
    entries = np.zeros((1 << bits, int(np.prod(shape))), np.int64)
    entries[:, places[0]] = np.arange(1 << bits)[:, None] >> np.arange(bits) & 1
    table = step(entries)[:, : layer.neurons].astype(np.float32)

    def look_up(rows: NDArray[Any]) -> NDArray[Any]:
        codes = np.zeros((len(rows), len(places)), np.intp)
        for bit in range(bits):
            codes |= rows[:, places[:, bit]] << bit
        return table[codes].reshape(len(rows), -1)

    return look_up


def _check_integers(layer: Layer) -> None:
    """InputError unless the layer is integers whose sums fit into 32 bits."""
    where = f"layer {layer.name!r}"
    if layer.weights.dtype.kind != "i" or layer.bias.dtype.kind != "i":
        raise InputError(
            f"its weights have the type {layer.weights.dtype}", where=where, help="quantise the network first"
        )
    if layer.weights.size and int(np.abs(layer.weights.astype(np.int64)).max()) > WEIGHT_MAX:
        raise InputError("a weight is outside -127..127", where=where, help="quantise to eight bits")
    if not 0 <= layer.shift <= SHIFT_MAX:
        raise InputError(
            f"its shift is {layer.shift}, not 0 to {SHIFT_MAX}", where=where, help="calibrate with other rows"
        )
    if largest_sum(layer) >= SUM_LIMIT:
        raise InputError(
            f"a sum of a neuron can reach {largest_sum(layer):,}, more than 32 bits hold",
            where=where,
            help="use fewer inputs, or smaller weights and biases",
        )
