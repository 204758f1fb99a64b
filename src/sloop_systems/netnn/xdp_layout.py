"""The layout of the BPF maps: packets, states of slots, and tables, computed from a `Program`.

A product takes two look-ups: a neuron's weight is stored as a row of its multiples by 0..15, and an activation of eight
bits is two digits of four bits. An entry of a row holds two neurons, one in each half of 64 bits, so that one addition
adds to the sums of both. This is exact, because the whole is a sum modulo 2^64, and each final sum fits into 32 bits.
The control plane computes the rows when it writes weights; the code in the kernel only shifts, adds and looks up.

Sizes of entries are powers of two, so that the kernel's own look-ups are shifts as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sloop_systems.netnn.bpf import KernelMap
from sloop_systems.netnn.mapper import NoCapacity
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import HEADER_BYTES
from sloop_systems.netnn.program import LayerProgram, Program, UnitProgram

ETHERNET_BYTES: Final = 14
PAYLOAD: Final = ETHERNET_BYTES + HEADER_BYTES
AT_TYPE, AT_MAGIC, AT_VERSION, AT_LABEL, AT_KIND, AT_INFERENCE = 12, 14, 16, 18, 19, 20
AT_SOURCE, AT_COUNT, AT_POSITION, AT_POOL, AT_PART = 24, 25, 26, 28, 30
"""Where the fields of a packet are."""
DATA_INT8: Final = 0x00
RESULT_INT32: Final = 0x13
"""Type and encoding of values."""
LABEL_FEATURES: Final = 0xFF
LABEL_GENERATES: Final = 0xFE
"""Packets to the feature extractor: features of a new inference; a packet of its own that makes windows."""

DIGITS: Final = 16
DIGIT_BITS: Final = 4
GROUP: Final = 4
"""Pairs of neurons whose sums are in registers at the same time."""
TABLE_MAX: Final = 1 << 26
"""Bytes of one unit's tables for one version of the weights."""
NEURONS_MAX: Final = 500
"""Of one unit: more would make jumps over their code too long."""
VERIFIED_MAX: Final = 900_000
"""Instructions of products that one packet may cause; the verifier follows a million of a program."""
SPINS: Final = 512
BANKS: Final = 2
"""Versions of the weights that a unit holds at the same time."""
WINDOWS_PER_PASS: Final = 32
"""Messages that the feature extractor makes before units get their turn: a veth device holds 256 packets."""
STALLED_NS: Final = 100_000_000
"""After so long without a pass the packet that makes windows is taken for lost."""

COUNTERS: Final = ("packets", "malformed", "stale", "duplicates", "unversioned", "lost", "sent", "contended")
"""What a unit counts, in the order of its registers."""
AT_LOCK: Final = 0
AT_COUNTERS: Final = 8
REGISTER_BYTES: Final = 128
AT_RANDOM, AT_LOSS, AT_DUPLICATION, AT_LOSE = 0, 8, 12, 16
FAULT_BYTES: Final = 32
"""Of the map of faults: state of the random numbers, two chances in 2^32nds, and the number of a packet to lose."""
AT_BANK_VERSION, AT_BANK_VALID, AT_BANK_SHIFT, AT_BANK_ROUNDING, AT_BANK_BIAS = 0, 4, 8, 12, 16
AT_EPOCH, AT_STARTED, AT_SLOT_VERSION, AT_BANK, AT_ARRIVED_COUNT, AT_PUSHED, AT_SENT = 0, 4, 8, 12, 16, 20, 24
AT_CLEARED: Final = 32
"""Of a slot's state: what a new epoch clears begins here."""


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`; at least 1."""
    return 1 << max(0, value - 1).bit_length()


def bits(value: int) -> int:
    """log2 of the smallest power of two that is at least `value`."""
    return max(0, value - 1).bit_length()


AT_RUNNING, AT_PASSED, AT_HEAD, AT_TAIL, AT_REFUSED, AT_MESSAGES_SENT, AT_QUEUE = range(8, 64, 8)
"""Registers of the feature extractor, after the lock."""
AT_NEXT, AT_INFERENCE_NUMBER, AT_FEATURES = 12, 16, 32
"""Of a slot's state, after epoch, whether it has started, and version."""


def payload_room(program: Program) -> int:
    """Bytes for values in every packet: what the fabric's carry, and at least one sum of 32 bits."""
    return max(program.fabric.payload_bytes, 4)


@dataclass(frozen=True, eq=False)
class UnitLayout:
    """Where things are in the maps of the units of one layer."""

    program: Program
    layer: LayerProgram

    @cached_property
    def positions_in(self) -> int:
        """Positions of the layer's input."""
        return self.layer.messages // (self.layer.sources * self.layer.parts)

    @cached_property
    def source_bits(self) -> int:
        """Bits for the source in a message's key."""
        return bits(self.layer.sources)

    @cached_property
    def part_bits(self) -> int:
        """Bits for the part in a message's key."""
        return bits(self.layer.parts)

    @cached_property
    def keys(self) -> Ints:
        """Of each message: position, source and part side by side, found by shifts."""
        message = np.arange(self.layer.messages)
        rest, part = np.divmod(message, self.layer.parts)
        position, source = np.divmod(rest, self.layer.sources)
        return (position << self.source_bits | source) << self.part_bits | part

    @cached_property
    def key_count(self) -> int:
        """Keys, those that no message has included."""
        return self.positions_in << (self.source_bits + self.part_bits)

    @cached_property
    def windows_max(self) -> int:
        """Windows that need the same message, at most."""
        return max((len(each) for each in self.layer.completes), default=0) if self.layer.kind == "rows" else 0

    @cached_property
    def message_bits(self) -> int:
        """log2 of the bytes of an entry of the table of messages."""
        return bits(8 + 2 * self.windows_max)

    @cached_property
    def run(self) -> int:
        """Cells of a window that follow each other in every window, so that one address finds them."""
        taps = int(self.layer.windows.shape[1])
        for length in range(taps, 0, -1):
            if taps % length == 0:
                runs = self.layer.windows.reshape(-1, length)
                steps = np.diff(runs, axis=1)
                if bool(((steps == 1).all(axis=1) & (runs[:, 0] >= 0) | (runs == -1).all(axis=1)).all()):
                    return length
        return 1

    @cached_property
    def runs(self) -> int:
        """Runs of a window."""
        return int(self.layer.windows.shape[1]) // self.run

    @cached_property
    def window_bits(self) -> int:
        """log2 of the bytes of an entry of the table of windows."""
        return bits(4 + 4 * self.runs)

    @cached_property
    def taps(self) -> int:
        """Activations in one window, or in one message of a dense layer."""
        if self.layer.kind == "dense":
            return int(self.layer.counts.max())
        return int(self.layer.windows.shape[1])

    @cached_property
    def pairs(self) -> int:
        """Pairs of neurons."""
        return -(-self.layer.neurons // 2)

    @cached_property
    def row_bits(self) -> int:
        """log2 of the bytes of one digit's entry: a sum for each pair."""
        return bits(8 * self.pairs)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of the table of one window, or of one message."""
        return power_of_two(self.taps * DIGITS << self.row_bits)

    @cached_property
    def blocks(self) -> int:
        """Tables of one version: one, or one for each message of a dense layer."""
        return self.key_count if self.layer.kind == "dense" else 1

    @cached_property
    def digits(self) -> int:
        """Digits of an activation."""
        inputs = self.program.inputs
        small = self.layer.label == 0 and inputs.low >= 0 and inputs.high < DIGITS
        return 1 if small else 2

    @cached_property
    def is_signed(self) -> bool:
        """Whether the layer's inputs can be negative: then the code adds 128 to each, and the bias makes up for it."""
        return self.layer.label == 0 and self.program.inputs.low < 0

    @cached_property
    def bank_bits(self) -> int:
        """log2 of the bytes of a bank's registers: version, shift, rounding and biases."""
        return bits(AT_BANK_BIAS + 8 * self.pairs)

    @cached_property
    def value_bytes(self) -> int:
        """Of a value that the layer sends: a sum of 32 bits, or an activation."""
        return 4 if self.layer.is_last else 1

    @cached_property
    def parts_out(self) -> int:
        """Packets for one output position."""
        if self.layer.is_last:
            return self.program.result_parts
        return self.program.layers[self.layer.label + 1].parts

    @cached_property
    def part_bytes(self) -> int:
        """Bytes of values in a full packet that the layer sends."""
        per_packet = max(1, self.program.fabric.payload_bytes // self.value_bytes)
        return min(self.layer.neurons, per_packet) * self.value_bytes

    @cached_property
    def out_bits(self) -> int:
        """log2 of the bytes of one output position."""
        return bits(max(self.part_bytes * self.parts_out, self.layer.neurons * self.value_bytes))

    @cached_property
    def out_part_bits(self) -> int:
        """Bits for the part in the number of an outgoing message."""
        return bits(self.parts_out)

    @cached_property
    def outgoing(self) -> int:
        """Messages of one inference that a unit sends."""
        return self.layer.positions * self.parts_out

    @property
    def recirculates(self) -> bool:
        """Whether one packet can cause several: it then recirculates over a cable from the unit to itself."""
        return self.layer.kind == "rows" or self.parts_out > 1

    @cached_property
    def at_needs(self) -> int:
        """Offset of the count, for each window, of arrived messages that it needs; flags of all messages lie before."""
        return aligned(AT_CLEARED + self.key_count)

    @cached_property
    def at_done(self) -> int:
        """Offset of the count of finished windows for each output position."""
        windows = len(self.layer.windows) if self.layer.kind == "rows" else 0
        return aligned(self.at_needs + 2 * windows)

    @cached_property
    def at_out(self) -> int:
        """Offset of the output positions."""
        return aligned(self.at_done + 2 * self.layer.positions)

    @cached_property
    def at_log(self) -> int:
        """Offset of the numbers of finished outgoing messages; a new epoch clears only the state before it."""
        return aligned(self.at_out + (self.layer.positions << self.out_bits))

    @cached_property
    def at_sums(self) -> int:
        """Offset of the sums of a dense layer, by pairs."""
        return aligned(self.at_log + 4 * self.outgoing)

    @cached_property
    def at_cells(self) -> int:
        """Offset of the stored input of a convolution, with zeros after it for padding."""
        return aligned(self.at_sums + (8 * self.pairs if self.layer.kind == "dense" else 0))

    @cached_property
    def state_bytes(self) -> int:
        """The state of a slot."""
        stored = self.layer.cells + self.run if self.layer.kind == "rows" else 0
        return power_of_two(self.at_cells + aligned(stored))

    def check(self) -> None:
        """NoCapacity if the kernel could not hold or verify it."""
        where = f"layer {self.layer.name!r}"
        table = self.blocks * self.block_bytes
        if table > TABLE_MAX:
            raise NoCapacity(
                f"its tables need {table:,} bytes on each unit; a unit in the kernel has {TABLE_MAX:,}",
                where=where,
                help="use a smaller layer or more units, or the emulator",
            )
        code = self.taps * 13 * self.digits * -(-self.pairs // GROUP)
        if self.layer.neurons > NEURONS_MAX:
            raise NoCapacity(
                f"it has {self.layer.neurons:,} neurons on each unit; a program of the kernel has {NEURONS_MAX}",
                where=where,
                help="use more units, or the emulator",
            )
        steps = code * max(1, self.windows_max)
        if steps > VERIFIED_MAX:
            raise NoCapacity(
                f"one packet can cause {steps:,} instructions; the kernel verifies 1,000,000",
                where=where,
                help="use a smaller layer or more units, or the emulator",
            )
        if self.layer.kind == "rows" and (len(self.layer.windows) >= 1 << 16 or not all(map(len, self.layer.needs))):
            raise NoCapacity(
                "it has windows of padding alone, or 65,536 windows or more",
                where=where,
                help="use a smaller input or less padding, or the emulator",
            )

    def message_table(self) -> bytes:
        """For each key: first cell (or output position), number of values, and the windows that need the message."""
        stride = 1 << self.message_bits
        table = np.zeros((self.key_count, stride), np.uint8)
        starts = self.layer.starts // self.layer.cell_windows if self.layer.kind == "windows" else self.layer.starts
        for message, key in enumerate(self.keys):
            windows = self.layer.completes[message] if self.layer.kind == "rows" else ()
            head = np.array([starts[message]], "<u4").tobytes()
            head += np.array([self.layer.counts[message], len(windows), *windows], "<u2").tobytes()
            table[key, : len(head)] = np.frombuffer(head, np.uint8)
        return table.tobytes()

    def window_table(self) -> bytes:
        """For each window: how many messages it needs, its output position, and the first cell of each run."""
        stride = 1 << self.window_bits
        table = np.zeros((len(self.layer.windows), stride), np.uint8)
        firsts = self.layer.windows.reshape(len(table), self.runs, self.run)[:, :, 0]
        firsts = np.where(firsts < 0, self.layer.cells, firsts)
        for window, needed in enumerate(self.layer.needs):
            head = np.array([len(needed), window // self.layer.cell_windows], "<u2").tobytes()
            head += firsts[window].astype("<u4").tobytes()
            table[window, : len(head)] = np.frombuffer(head, np.uint8)
        return table.tobytes()

    def out_table(self) -> bytes:
        """For each outgoing message: where its values are, and the fields of its header, in network order."""
        table = b""
        for number in range(self.layer.positions << self.out_part_bits):
            position, part = number >> self.out_part_bits, number & ((1 << self.out_part_bits) - 1)
            if part >= self.parts_out:
                table += bytes(16)
                continue
            count = min(self.part_bytes, self.layer.neurons * self.value_bytes - part * self.part_bytes)
            table += np.array([(position << self.out_bits) + part * self.part_bytes], "<u4").tobytes()
            table += bytes([count // self.value_bytes, 0])
            table += np.array([position, 0, part], ">u2").tobytes() + bytes(4)
        return table

    def weight_blocks(self, unit: UnitProgram) -> list[bytes]:
        """The tables of one version."""
        if self.layer.kind != "dense":
            return [self._block(unit.weights)]
        found = [b""] * self.key_count
        for message, key in enumerate(self.keys):
            start, count = int(self.layer.starts[message]), int(self.layer.counts[message])
            found[key] = self._block(unit.weights[:, start : start + count])
        return found

    def bank(self, unit: UnitProgram, version: int, shift: int) -> bytes:
        """A bank's registers: version, whether it is valid, shift, rounding, and the biases by pairs."""
        bias = unit.bias.astype(np.int64)
        if self.is_signed:
            bias = bias - 128 * unit.weights.astype(np.int64).sum(axis=1)
        rounding = 1 << (shift - 1) if shift else 0
        head = np.array([version, 1, shift, rounding], "<u4").tobytes()
        return head + _paired(bias[:, None]).tobytes()

    def _block(self, weights: NDArray[Any]) -> bytes:
        """Taps × digits × pairs, each two neurons' products with the digit."""
        pairs = _paired(weights.astype(np.int64))  # pairs × taps
        table = np.zeros((weights.shape[1], DIGITS, (1 << self.row_bits) // 8), np.int64)
        table[:, :, : len(pairs)] = pairs.T[:, None, :] * np.arange(DIGITS)[None, :, None]
        return table.tobytes()


@dataclass(frozen=True, eq=False)
class UnitMaps:
    """The maps of one unit. Those of tables are the same for all units of a layer."""

    registers: KernelMap
    """Lock and counters, which only the kernel writes."""
    banks: KernelMap
    """For each version of the weights that the unit holds: version, shift, rounding and biases."""
    faults: KernelMap | None
    state: KernelMap
    weights: KernelMap
    messages: KernelMap
    windows: KernelMap | None
    outs: KernelMap
    ports: KernelMap
    """To all units of the next layer."""
    ports_and_self: KernelMap | None
    """The same, and the unit's own cable, on which a packet comes back for the next message."""


@dataclass(frozen=True, eq=False)
class FeatureLayout:
    """Where things are in the maps of the feature extractor."""

    program: Program

    @cached_property
    def feature_bits(self) -> int:
        """log2 of the bytes of a row of features, with zeros after it for padding."""
        return bits(self.program.input_count + 1)

    @cached_property
    def taps(self) -> int:
        """Values of a message."""
        return int(self.program.gather.shape[1])

    @cached_property
    def gather_bits(self) -> int:
        """log2 of the bytes of an entry: number of values, position, output position, and places in a row."""
        return bits(8 + 4 * self.taps)

    @cached_property
    def order_max(self) -> int:
        """Messages that an inference sends at most, if some are sent twice."""
        return 2 * self.program.layers[0].messages

    @cached_property
    def state_bytes(self) -> int:
        """The state of a slot."""
        return power_of_two(AT_FEATURES + (1 << self.feature_bits))

    @cached_property
    def queue(self) -> int:
        """Slots that can wait for their messages; twice as many as there are, for aborted ones may wait too."""
        return 2 * power_of_two(self.program.slots)

    def gather_table(self) -> bytes:
        """For each message to the first layer: the header's fields in network order, and where its values are."""
        layer = self.program.layers[0]
        table = np.zeros((layer.messages, 1 << self.gather_bits), np.uint8)
        places = np.where(self.program.gather < 0, self.program.input_count, self.program.gather)
        for message in range(layer.messages):
            pool = message // layer.cell_windows if layer.kind == "windows" else 0
            head = bytes([int(layer.counts[message]), 0]) + np.array([message, pool, 0], ">u2").tobytes()
            head += places[message].astype("<u4").tobytes()
            table[message, : len(head)] = np.frombuffer(head, np.uint8)
        return table.tobytes()

    def order_table(self, order: Sequence[int]) -> bytes:
        """The messages of an inference in the order in which they are sent."""
        return np.array([len(order), *order], "<u4").tobytes()


@dataclass(frozen=True, eq=False)
class FeatureMaps:
    """The maps of the feature extractor."""

    registers: KernelMap
    version: KernelMap
    """Of the weights, with which an inference begins."""
    state: KernelMap
    gather: KernelMap
    order: KernelMap


def _paired(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows 2 i and 2 i + 1 as one row of numbers of 64 bits: their sum, the second shifted by 32 bits."""
    padded = np.concatenate([values, np.zeros((len(values) % 2, values.shape[1]), np.int64)])
    paired: Ints = padded[::2] + (padded[1::2] << 32)
    return paired


def aligned(offset: int) -> int:
    return -(-offset // 8) * 8
