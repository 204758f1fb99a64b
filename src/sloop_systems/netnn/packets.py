"""Packets between switches: 18 bytes of header and the activations, in Ethernet frames of type 0x88B5, big endian.

    bytes  0-1   0x4E01, the format             10     source: the unit that sends
           2-3   version of the weights         11     number of values
           4     label: the layer it is for     12-13  position, or window of the first layer
           5     kind (high half), encoding     14-15  pooling cell of a window
           6-9   inference                      16-17  part of the values of one source and position

The values follow: int8, int16, int32, or bits from the highest. Bytes after them pad the frame and are not read.
Packets are not signed: whoever can send into the fabric can change a verdict.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from numpy.typing import ArrayLike

from sloop.api import InputError
from sloop_systems.netnn.program import LayerProgram, Program

ETHERTYPE: Final = 0x88B5
"""Local experimental, IEEE 802."""
MAGIC: Final = 0x4E01
HEADER: Final = struct.Struct(">HHBBIBBHHH")
HEADER_BYTES: Final = HEADER.size


class PacketKind(IntEnum):
    """What a packet is."""

    DATA = 0
    RESULT = 1
    ACK = 2
    ABORT = 3


class ValueEncoding(IntEnum):
    """How its values are written."""

    INT8 = 0
    INT16 = 1
    BITS = 2
    INT32 = 3


_LAYOUTS: Final = {ValueEncoding.INT8: ("b", 1), ValueEncoding.INT16: ("h", 2), ValueEncoding.INT32: ("i", 4)}
_LOWEST: Final = {
    ValueEncoding.INT8: -(2**7),
    ValueEncoding.INT16: -(2**15),
    ValueEncoding.INT32: -(2**31),
    ValueEncoding.BITS: 0,
}
_HIGHEST: Final = {
    ValueEncoding.INT8: 2**7 - 1,
    ValueEncoding.INT16: 2**15 - 1,
    ValueEncoding.INT32: 2**31 - 1,
    ValueEncoding.BITS: 1,
}


class Malformed(InputError):
    """The bytes are no packet, or no packet of this program; a switch drops and counts them."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet, without the Ethernet header."""

    version: int
    label: int
    inference: int
    source: int
    position: int
    values: tuple[int, ...]
    cell: int = 0
    part: int = 0
    kind: PacketKind = PacketKind.DATA
    encoding: ValueEncoding = ValueEncoding.INT8

    def build(self) -> bytes:
        """Its bytes. InputError if a number does not fit into its field."""
        low, high = _LOWEST[self.encoding], _HIGHEST[self.encoding]
        if len(self.values) > 255 or any(not low <= value <= high for value in self.values):
            raise InputError(
                f"values from {min(self.values)} to {max(self.values)}, {len(self.values)} of them, do not fit into "
                f"{self.encoding.name}",
                where="packet",
                help="send at most 255 values of the encoding's range",
            )
        numbers = (self.version, self.label, self.kind << 4 | self.encoding, self.inference, self.source)
        try:
            header = HEADER.pack(MAGIC, *numbers, len(self.values), self.position, self.cell, self.part)
        except struct.error as error:
            raise InputError(
                f"a field is too large: {error}", where="packet", help="see the sizes of the fields"
            ) from error
        if self.encoding is ValueEncoding.BITS:
            bits = "".join(map(str, self.values))
            size = -(-len(bits) // 8)
            return header + int(bits.ljust(8 * size, "0") or "0", 2).to_bytes(size)
        return header + struct.pack(f">{len(self.values)}{_LAYOUTS[self.encoding][0]}", *self.values)


def parse(content: bytes) -> Packet:
    """The packet in bytes that follow an Ethernet header. `Malformed` if there is none."""
    if len(content) < HEADER_BYTES:
        raise _malformed(f"{len(content)} bytes are less than a header of {HEADER_BYTES}")
    magic, version, label, types, inference, source, count, position, cell, part = HEADER.unpack_from(content)
    if magic != MAGIC:
        raise _malformed(f"it begins with {magic:#06x}, not {MAGIC:#06x}")
    if types >> 4 >= len(PacketKind) or types & 15 >= len(ValueEncoding):
        raise _malformed(f"kind {types >> 4} with encoding {types & 15} is unknown")
    encoding = ValueEncoding(types & 15)
    code, size = _LAYOUTS.get(encoding, ("", 0))
    needed = count * size if code else -(-count // 8)
    if len(content) < HEADER_BYTES + needed:
        raise _malformed(f"it has {count} values, and {len(content) - HEADER_BYTES} bytes for them instead of {needed}")
    if code:
        values = struct.unpack_from(f">{count}{code}", content, HEADER_BYTES)
    else:
        bits = int.from_bytes(content[HEADER_BYTES : HEADER_BYTES + needed])
        values = tuple(bits >> (8 * needed - 1 - at) & 1 for at in range(count))
    kind = PacketKind(types >> 4)
    return Packet(version, label, inference, source, position, values, cell, part, kind, encoding)


def _malformed(what: str) -> Malformed:
    return Malformed(what, where="packet", help="only packets of this program belong into the fabric")


def message_of(packet: Packet, layer: LayerProgram, program: Program) -> int:
    """The number of a DATA packet's message to a layer. `Malformed` if the layer gets no such message: a source,
    position or part that there is not, or values that are too many, too few or out of range."""
    if packet.source >= layer.sources or packet.part >= layer.parts:
        raise _malformed(
            f"source {packet.source}, part {packet.part}; layer {layer.name!r} has {layer.sources} sources and "
            f"{layer.parts} parts"
        )
    message = (packet.position * layer.sources + packet.source) * layer.parts + packet.part
    if message >= layer.messages:
        raise _malformed(f"position {packet.position} is outside the input of layer {layer.name!r}")
    if layer.kind == "windows" and packet.cell != message // layer.cell_windows:
        raise _malformed(f"window {message} is not in pooling cell {packet.cell}")
    if len(packet.values) != layer.counts[message]:
        raise _malformed(f"{len(packet.values)} values instead of {layer.counts[message]}")
    low, high = (program.inputs.low, program.inputs.high) if layer.label == 0 else (0, 127)
    if min(packet.values) < low or max(packet.values) > high:
        raise _malformed(f"values from {min(packet.values)} to {max(packet.values)}, outside {low} to {high}")
    return message


def result_of(packet: Packet, program: Program) -> int:
    """The number of a RESULT packet's message to the sink. `Malformed` if no unit of the last layer sends such a
    message."""
    number = packet.source * program.result_parts + packet.part
    if packet.kind is not PacketKind.RESULT or packet.encoding is not ValueEncoding.INT32:
        raise _malformed(f"a {packet.kind.name} of {packet.encoding.name} is no RESULT of INT32")
    if packet.part >= program.result_parts or number >= len(program.result_counts):
        raise _malformed(f"source {packet.source}, part {packet.part} sends no RESULT")
    if len(packet.values) != program.result_counts[number]:
        raise _malformed(f"{len(packet.values)} logits instead of {program.result_counts[number]}")
    return number


def packets_of(program: Program, row: ArrayLike, inference: int) -> list[Packet]:
    """What the feature extractor sends for one row, each to all units of the first layer. InputError if it is wrong."""
    first = program.layers[0]
    (values,) = program.messages_of(row).tolist()
    return [
        Packet(
            version=program.version,
            label=0,
            inference=inference,
            source=0,
            position=message,
            values=tuple(values[message][: first.counts[message]]),
            cell=message // first.cell_windows if first.kind == "windows" else 0,
        )
        for message in range(first.messages)
    ]
