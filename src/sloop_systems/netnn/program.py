"""The intermediate form that every runner executes: what each pipeline of each switch stores, receives and sends.

`compile_network` makes a `Program`. It has everything as tables of integers: a runner needs no network and no
multiply instruction to execute it. Each runner chooses how it multiplies (shifts and adds, or a table of products).

**Cells and messages.** The input of a layer is a vector of cells, one activation each: cell = position · channels +
channel, where channels are padded so that each of the units before has equally many (`sources` · `width`). A message is
one packet to a layer, numbered (position · sources + source) · parts + part. It carries cells
`starts[message] .. starts[message] + counts[message]`. `parts` is more than 1 if the channels of one source do not fit
into a packet. The copies of a message go to all units of the layer.

**Kinds of layers.**
`windows`: the first layer; a message is a window with its inputs, and is computed at once. Its number is the window's.
`rows`: a convolution after another, or whose windows do not fit into a packet; a unit stores messages in its cells, and
    computes a window as soon as all messages that it needs have arrived (`needs`), in any order.
`dense`: a unit adds each message's products to its sums, and is done when all messages have arrived, in any order.

**Windows** are in the order of pooling cells: window w belongs to output position w // cell_windows, which is done
when all its windows are. A unit requantises each window's sums, keeps the largest per output position and filter, and
sends the finished output position as one message per part, `source` = its unit number.

**The end.** Units of the last layer send their sums as RESULT packets, int32, to the sink: messages of the same kind
(`result_starts`, `result_counts`), with one position. `netnn.network.classify` computes the class from them.

**Slots and epochs.** slot = inference & (slots - 1), epoch = inference >> log2(slots). State of an older epoch counts
as zero; a packet of an older epoch is dropped; messages that have arrived already are dropped. Every packet carries
`version`, that of the weights with which its inference began, and a unit computes with the weights of that version.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sloop.api import InputError
from sloop_systems.netnn.mapper import Fabric, FabricTime, LayerPlacement, NoCapacity, place, split, time_of
from sloop_systems.netnn.network import Convolution, Dense, InputRange, Ints, Layer, Network, Shape

Kind = Literal["windows", "rows", "dense"]

POSITIONS_MAX: Final = 2**16
UNITS_MAX: Final = 2**8
LABELS_MAX: Final = 2**8
"""What the fields of a packet can number."""


@dataclass(frozen=True, eq=False)
class UnitProgram:
    """What one pipeline stores of its layer: the weights and biases of its neurons; those of padding neurons are 0."""

    unit: int
    leaf: int
    pipeline: int
    weights: NDArray[np.int8]
    """Neurons × cells of a window (convolution), or neurons × cells of the layer's input (dense)."""
    bias: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """What all units of a layer share, and the units."""

    label: int
    """The layer's number from 0: the routing key of packets to it."""
    name: str
    kind: Kind
    is_last: bool
    shift: int
    """Of the requantisation; not used in the last layer."""
    sources: int
    """Units that send to this layer."""
    channels: int
    """Cells of one position of the input: `sources` · `width`, but for the first layer, whose input is a row."""
    width: int
    """Cells of one source for one position."""
    parts: int
    starts: Ints
    """For each message its first cell; of kind `windows` the window's number."""
    counts: Ints
    """For each message the number of its values."""
    cells: int
    """Cells of the input."""
    windows: Ints
    """Windows × cells of the input, -1 for a constant 0; of kind `windows` × places of the row. Empty if dense."""
    cell_windows: int
    """Windows of an output position; 1 if dense."""
    positions: int
    """Output positions: pooling cells, or 1 if dense."""
    units: tuple[UnitProgram, ...]

    @property
    def messages(self) -> int:
        """Messages of one inference to each unit."""
        return len(self.starts)

    @property
    def neurons(self) -> int:
        """Neurons or filters of one unit, with padding."""
        return len(self.units[0].bias)

    @cached_property
    def needs(self) -> tuple[Ints, ...]:
        """Of kind `rows`: for each window the messages that it needs, ascending.

        A window in padding alone needs nothing, but something must make a unit compute it: it needs the first message.
        """
        owner = np.repeat(np.arange(self.messages), self.counts)
        found = (np.unique(owner[window[window >= 0]]) for window in self.windows)
        return tuple(messages if len(messages) else np.zeros(1, np.int64) for messages in found)

    @cached_property
    def completes(self) -> tuple[Ints, ...]:
        """Of kind `rows`: for each message the windows that need it, ascending. Empty: no window does, and its loss
        matters to nobody."""
        found: list[list[int]] = [[] for _ in range(self.messages)]
        for window, messages in enumerate(self.needs):
            for message in messages:
                found[message].append(window)
        return tuple(np.array(each, np.int64) for each in found)

    @cached_property
    def products_in_order(self) -> tuple[int, ...]:
        """For each message the products that it makes one unit compute, if messages come in order."""
        if self.kind == "dense":
            return tuple((self.counts * self.neurons).tolist())
        window = self.windows.shape[1] * self.neurons
        if self.kind == "windows":
            return (window,) * self.messages
        last = np.bincount([int(messages.max(initial=0)) for messages in self.needs], minlength=self.messages)
        return tuple((last * window).tolist())


@dataclass(frozen=True, eq=False)
class Program:
    """A network compiled onto a fabric."""

    version: int
    """Of the weights, 16 bits."""
    fabric: Fabric
    placements: tuple[LayerPlacement, ...]
    layers: tuple[LayerProgram, ...]
    inputs: InputRange
    input_count: int
    gather: Ints
    """Messages to the first layer × places of a row as the user gives it; -1 for a 0, and after the end of a shorter
    message (`layers[0].counts`)."""
    classes: int
    result_starts: Ints
    """For each RESULT message its first logit; messages are numbered unit · parts + part."""
    result_counts: Ints

    @property
    def slots(self) -> int:
        """Inferences at the same time."""
        return self.fabric.slots

    @cached_property
    def slot_bits(self) -> int:
        """log2 of the slots."""
        return self.slots.bit_length() - 1

    @property
    def result_parts(self) -> int:
        """RESULT packets of one unit."""
        return len(self.result_starts) // len(self.layers[-1].units)

    def slot(self, inference: int) -> int:
        """The slot of an inference."""
        return inference & (self.slots - 1)

    def epoch(self, inference: int) -> int:
        """The epoch of an inference in its slot."""
        return inference >> self.slot_bits

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """Packets of one inference that the units of each layer receive together."""
        return tuple(layer.messages * len(layer.units) for layer in self.layers)

    @cached_property
    def groups(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each label, the multicast group of its packets: leaf and pipeline of every unit."""
        return tuple(tuple((unit.leaf, unit.pipeline) for unit in layer.units) for layer in self.layers)

    @cached_property
    def time(self) -> FabricTime:
        """Its latency and throughput, modelled."""
        return time_of(self.fabric, [(layer.name, layer.products_in_order) for layer in self.layers])

    def check_rows(self, rows: ArrayLike) -> Ints:
        """Rows as n × inputs, as the user gives them. InputError if one has another length or a value out of range."""
        found = np.asarray(rows)
        if not found.size and found.ndim > 1:
            found = found.reshape(0, self.input_count)
        else:
            found = found.reshape(len(found), -1) if found.ndim > 1 else found.reshape(1, -1)
        if found.shape[1] != self.input_count or found.dtype.kind not in "iub":
            raise InputError(
                f"rows have {found.shape[1]} values of {found.dtype}; the network takes {self.input_count} integers",
                where="rows",
                help="encode features as the network was trained with them",
            )
        if found.size and (found.min() < self.inputs.low or found.max() > self.inputs.high):
            wrong = found.min() if found.min() < self.inputs.low else found.max()
            raise InputError(
                f"a feature is {wrong}; the network takes {self.inputs.low} to {self.inputs.high}",
                where="rows",
                help="encode features as the network was trained with them",
            )
        return found.astype(np.int64)

    def messages_of(self, rows: ArrayLike) -> Ints:
        """The values of all messages to the first layer: n × messages × values, 0 after the end of a shorter message.
        InputError as `check_rows`."""
        checked = self.check_rows(rows)
        return np.concatenate([checked, np.zeros((len(checked), 1), np.int64)], axis=1)[:, self.gather]


def compile_network(network: Network, fabric: Fabric | None = None, version: int = 1) -> Program:
    """The network as a program for the fabric (default: `Fabric()`). `version` names its weights, 0 to 65,535.

    `NoCapacity`, an InputError, if the network does not fit.
    """
    fabric = fabric or Fabric()
    if not 0 <= version < 2**16:
        raise InputError(f"version {version} of the weights is not 0 to 65,535", help="packets have 16 bits for it")
    placements = place(network, fabric)
    order = network.order if network.order is not None else np.arange(network.input_count)
    layers: list[LayerProgram] = []
    gather = np.zeros((0, 0), np.int64)
    for at, (layer, shape) in enumerate(zip(network.layers, network.shapes, strict=False)):
        is_last = at == len(network.layers) - 1
        if at == 0:
            made, gather = _first_layer(layer, shape, placements[0], fabric, order, is_last=is_last)
        else:
            between = placements[at - 1], placements[at]
            made = _later_layer(at, layer, shape, *between, fabric, is_last=is_last)
        layers.append(made)
    last = placements[-1]
    result_width = max(1, fabric.payload_bytes // 4)
    starts, counts = _parts(1, len(last.units), last.neurons_per_unit, result_width)
    program = Program(
        version=version,
        fabric=fabric,
        placements=placements,
        layers=tuple(layers),
        inputs=network.inputs,
        input_count=network.input_count,
        gather=gather,
        classes=network.classes,
        result_starts=starts,
        result_counts=counts,
    )
    _check_fields(program)
    return program


def _parts(positions: int, sources: int, width: int, payload: int) -> tuple[Ints, Ints]:
    """First cell and number of values of each message, if each source sends `width` cells for each position."""
    bounds = np.arange(0, width, payload)
    starts = (np.arange(positions * sources)[:, None] * width + bounds).ravel()
    counts = np.tile(np.minimum(payload, width - bounds), positions * sources)
    return starts, counts


def _unit_programs(placement: LayerPlacement, weights: NDArray[np.int64], bias: Ints) -> tuple[UnitProgram, ...]:
    """Weights (neurons × cells) and biases split over the units, padded with neurons of weight and bias 0."""
    base, bounds = split(len(bias), len(placement.units))
    units = []
    for unit, ((leaf, pipeline), (first, end)) in enumerate(zip(placement.units, bounds, strict=True)):
        own = np.zeros((base, weights.shape[1]), np.int8)
        own[: end - first] = weights[first:end]
        own_bias = np.zeros(base, np.int32)
        own_bias[: end - first] = bias[first:end]
        units.append(UnitProgram(unit, leaf, pipeline, own, own_bias))
    return tuple(units)


def _first_layer(
    layer: Layer, shape: Shape, placement: LayerPlacement, fabric: Fabric, order: Ints, *, is_last: bool
) -> tuple[LayerProgram, Ints]:
    """The layer that the feature extractor sends to, and what its messages take from a row."""
    windows = _cells_of_windows(layer, shape, shape[2])
    taps = windows.shape[1]
    with_zero = np.append(order, -1)
    if isinstance(layer, Convolution) and fabric.sends_windows and taps <= fabric.payload_bytes:
        gather = with_zero[windows]
        kind: Kind = "windows"
        starts, counts, cells, width = np.arange(len(windows)), np.full(len(windows), taps), 0, taps
        windows = gather
    else:
        kind = "rows" if isinstance(layer, Convolution) else "dense"
        cells, width = len(order), fabric.payload_bytes
        starts, counts = _parts(1, 1, cells, width)
        places = starts[:, None] + np.arange(int(counts.max()))
        gather = with_zero[np.where(places < cells, places, -1)]
    made = LayerProgram(
        label=0,
        name=layer.name,
        kind=kind,
        is_last=is_last,
        shift=layer.shift,
        sources=1,
        channels=shape[2],
        width=width,
        parts=1,
        starts=starts,
        counts=counts,
        cells=cells,
        windows=windows,
        cell_windows=_cell_windows(layer),
        positions=_output_positions(layer, shape),
        units=_unit_programs(placement, layer.matrix.astype(np.int64), layer.bias),
    )
    return made, gather


def _later_layer(
    label: int,
    layer: Layer,
    shape: Shape,
    before: LayerPlacement,
    placement: LayerPlacement,
    fabric: Fabric,
    *,
    is_last: bool,
) -> LayerProgram:
    """A layer that the units of the layer `before` send to."""
    sources, width = len(before.units), before.neurons_per_unit
    channels = sources * width
    positions = shape[0] * shape[1]
    starts, counts = _parts(positions, sources, width, fabric.payload_bytes)
    weights = layer.matrix.astype(np.int64).reshape(layer.neurons, -1, shape[2])
    padded = np.zeros((*weights.shape[:2], channels), np.int64)
    padded[:, :, : shape[2]] = weights
    return LayerProgram(
        label=label,
        name=layer.name,
        kind="rows" if isinstance(layer, Convolution) else "dense",
        is_last=is_last,
        shift=layer.shift,
        sources=sources,
        channels=channels,
        width=width,
        parts=-(-width // fabric.payload_bytes),
        starts=starts,
        counts=counts,
        cells=positions * channels,
        windows=_cells_of_windows(layer, shape, channels),
        cell_windows=_cell_windows(layer),
        positions=_output_positions(layer, shape),
        units=_unit_programs(placement, padded.reshape(layer.neurons, -1), layer.bias),
    )


def _cells_of_windows(layer: Layer, shape: Shape, channels: int) -> Ints:
    """Windows × cells of the input, with `channels` cells for each position; no windows if the layer is dense."""
    if isinstance(layer, Dense):
        return np.zeros((0, 0), np.int64)
    positions = layer.windows(shape)[:, :, None]
    cells = np.where(positions < 0, -1, positions * channels + np.arange(channels))
    return cells.reshape(len(cells), -1)


def _cell_windows(layer: Layer) -> int:
    return layer.pool[0] * layer.pool[1] if isinstance(layer, Convolution) else 1


def _output_positions(layer: Layer, shape: Shape) -> int:
    rows, columns, _ = layer.output_shape(shape)
    return rows * columns


def _check_fields(program: Program) -> None:
    """NoCapacity if a number does not fit into its field of a packet: 8 bits for units and values, 16 for positions."""
    for layer in program.layers:
        positions = layer.messages // (layer.sources * layer.parts)
        if max(positions, layer.positions) > POSITIONS_MAX or max(layer.sources, len(layer.units)) > UNITS_MAX:
            raise NoCapacity(
                f"it has {max(positions, layer.positions):,} positions and {len(layer.units)} units; packets can "
                f"number {POSITIONS_MAX:,} positions and {UNITS_MAX} units",
                where=f"layer {layer.name!r}",
                help="use a smaller layer",
            )
    if len(program.layers) > LABELS_MAX:
        raise NoCapacity(
            f"the network has {len(program.layers)} layers; packets can number {LABELS_MAX}", help="use fewer"
        )
