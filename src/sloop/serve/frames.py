"""Frames between the server and its worker processes: a fixed header, a table of shapes, then raw tensor bytes.

Promises that nothing is ever unpickled or evaluated, that every length is bounded and checked before memory is taken
for it, and that what breaks the format raises `ProtocolError`. Must not know sockets, models or requests.

A frame is `HEADER` · table · payload. The table describes forward passes: their number, tensors per pass, and for each
tensor datatype code, rank and dimensions; the payload is those tensors' elements one after the other, little-endian.
"""

from collections.abc import Sequence
from enum import IntEnum
from math import prod
from struct import Struct as Layout
from struct import error as LayoutError
from typing import Final

from msgspec import Struct

from sloop.tensor import ITEM_BYTES, NUMPY_TYPES

VERSION: Final = 1
MAGIC: Final = b"SL"
HEADER: Final = Layout("<2sBBIQqq")
"""Magic, version, kind, bytes of the table, bytes of the payload, subject, value."""

TABLE_BYTES_MAX: Final = 60 * 1024
PAYLOAD_BYTES_MAX: Final = 1 << 30
RANK_MAX: Final = 16

CODES: Final = tuple(NUMPY_TYPES)
"""Datatypes by their code on the wire; both ends are of one version, so the order need not outlive it."""
CODE_OF: Final = {name: code for code, name in enumerate(CODES)}

_COUNTS: Final = Layout("<HH")
_TENSOR: Final = Layout("<BB")
_DIMS: Final = tuple(Layout(f"<{rank}I") for rank in range(RANK_MAX + 1))


class ProtocolError(Exception):
    """The other end does not speak this format: a bug or a foreign process, never a user's mistake."""


class Kind(IntEnum):
    """What a frame says. `subject` and `value` are its two numbers."""

    RUN = 1
    """To a worker: run batch `subject`. Its tensors are the payload or, where `value` is not 0, lie in the first
    `value` bytes of the shared memory, at their `sloop.shared.places`."""
    RESIZE = 2
    """To a worker: `subject` threads and a duty cycle of `value` millionths from the next batch on."""
    STOP = 3
    """To a worker: finish and exit."""
    STEP = 10
    """From a worker: it entered step `subject` of its cold start."""
    READY = 11
    """From a worker: it can take its first batch."""
    DONE = 12
    """From a worker: batch `subject` took `value` ns of forward passes; the payload holds the outputs."""
    FAILED = 13
    """From a worker: the model raised on batch `subject`; the payload is the reason in UTF-8."""
    RESIZED = 14
    """From a worker: batches run on `subject` threads from here on."""
    REFUSED = 15
    """From a worker: it cannot start; the payload is the reason in UTF-8. It exits."""


Shape = tuple[int, ...]


class Piece(Struct, frozen=True, gc=False):
    """One tensor of a table: its type, its shape, and the bytes it takes in the payload."""

    datatype: str
    shape: Shape
    size_bytes: int


class Frame(Struct, frozen=True, gc=False):
    """A frame received."""

    kind: Kind
    subject: int
    value: int
    table: bytes
    payload: memoryview


class Head(Struct, frozen=True, gc=False):
    """A header received and found sound."""

    kind: Kind
    subject: int
    value: int
    table_bytes: int
    payload_bytes: int


def pack_head(kind: Kind, subject: int, value: int, table_bytes: int, payload_bytes: int) -> bytes:
    """The header's bytes."""
    return HEADER.pack(MAGIC, VERSION, kind, table_bytes, payload_bytes, subject, value)


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    """Read a header from the first bytes of `data`; raise `ProtocolError` for one that is malformed or unbounded."""
    magic, version, kind, table_bytes, payload_bytes, subject, value = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"a frame begins with {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
    if table_bytes > TABLE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a frame announces {table_bytes} B of table and {payload_bytes} B of payload")
    try:
        return Head(Kind(kind), subject, value, table_bytes, payload_bytes)
    except ValueError as error:
        raise ProtocolError(f"a frame has the unknown kind {kind}") from error


def pack_table(passes: Sequence[Sequence[tuple[str, Shape]]]) -> bytes:
    """Describe forward passes, each a datatype and a shape per tensor; every pass has equally many tensors.

    Raises `ProtocolError` for more than a table holds.
    """
    parts = [_COUNTS.pack(len(passes), len(passes[0]) if passes else 0)]
    for tensors in passes:
        for datatype, shape in tensors:
            parts.append(_TENSOR.pack(CODE_OF[datatype], len(shape)))
            parts.append(_DIMS[len(shape)].pack(*shape))
    table = b"".join(parts)
    if len(table) > TABLE_BYTES_MAX:
        raise ProtocolError(f"the shapes of {len(passes)} passes take {len(table)} B, more than {TABLE_BYTES_MAX}")
    return table


def unpack_table(table: bytes, payload_bytes: int | None) -> list[list[Piece]]:
    """Read a table; raise `ProtocolError` where it is malformed or its tensors do not fill the payload exactly.

    None for a frame whose tensors are not in its payload.
    """
    try:
        passes, width = _COUNTS.unpack_from(table)
        offset = _COUNTS.size
        found: list[list[Piece]] = []
        for _ in range(passes):
            row: list[Piece] = []
            for _ in range(width):
                code, rank = _TENSOR.unpack_from(table, offset)
                shape = _DIMS[rank].unpack_from(table, offset + _TENSOR.size)
                offset += _TENSOR.size + 4 * rank
                datatype = CODES[code]
                row.append(Piece(datatype, shape, prod(shape) * ITEM_BYTES[datatype]))
            found.append(row)
    except (LayoutError, IndexError) as error:
        raise ProtocolError(f"a table of {len(table)} B is malformed: {error}") from error
    told = sum(piece.size_bytes for row in found for piece in row)
    if offset != len(table) or (payload_bytes is not None and told != payload_bytes):
        raise ProtocolError(f"a table describes {told} B in {offset} B; the frame has {payload_bytes} in {len(table)}")
    return found
