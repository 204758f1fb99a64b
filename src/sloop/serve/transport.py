"""Sockets between the server and its worker processes: frames in, frames out, with back pressure on both sides.

Promises that tensor bytes are neither joined nor copied on the server's side (`sendmsg` gathers them from where they
are, an answer is received into the buffer its slices point into), that the server's end never blocks, and that a peer
which breaks the format is given up. Must not know models, requests or processes.
"""

import socket
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice
from math import prod
from struct import Struct as Layout
from struct import error as LayoutError
from typing import Final

from msgspec import Struct

from sloop.shared_memory import Buffer
from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Signature, Tensor

# == frames: Frames between the server and its worker processes: a fixed header, a table of shapes, then raw tensor bytes.
#
# Promises that nothing is ever unpickled or evaluated, that every length is bounded and checked before memory is taken
# for it, and that what breaks the format raises `ProtocolError`. Must not know sockets, models or requests.
#
# A frame is `HEADER` · table · payload. The table describes forward passes: their number, tensors per pass, and for each
# tensor datatype code, rank and dimensions; the payload is those tensors' elements one after the other, little-endian.


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


class FrameKind(IntEnum):
    """What a frame says. `subject` and `value` are its two numbers."""

    RUN = 1
    """To a worker: run batch `subject`. Its tensors are the payload or, where `value` is not 0, lie in the first
    `value` bytes of the shared memory, at their `sloop.shared_memory.places`."""
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

    kind: FrameKind
    subject: int
    value: int
    table: bytes
    payload: memoryview


class Head(Struct, frozen=True, gc=False):
    """A header received and found sound."""

    kind: FrameKind
    subject: int
    value: int
    table_bytes: int
    payload_bytes: int


def pack_head(kind: FrameKind, subject: int, value: int, table_bytes: int, payload_bytes: int) -> bytes:
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
        return Head(FrameKind(kind), subject, value, table_bytes, payload_bytes)
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


# == passes: A batch as forward passes: requests of one shape are joined along their first dimension, and the answer is cut back.
#
# Promises that joining and cutting copy nothing: row-major tensors of equal row shape are joined by laying their bytes
# one after the other, and cut by slicing. Requests whose row shapes differ, and all requests to a model with a fixed
# first dimension, get passes of their own inside the one batch. Pure functions; must not know sockets or processes.


class Joined(Struct, frozen=True, gc=False):
    """A batch ready to be sent: its table and payload, and for each pass which requests it holds with how many rows."""

    table: bytes
    payload: list[list[Buffer]]
    """Per tensor of the table, the parts it is joined of."""
    members: list[list[tuple[int, int]]]
    """Per pass, (index of the request in the batch, its rows)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(len(part) for parts in self.payload for part in parts)


def is_batchable(signature: Signature) -> bool:
    """Whether requests may share a forward pass: the first dimension of every input and output is open."""
    return all(port.shape[:1] == (-1,) for port in (*signature.inputs, *signature.outputs))


def join(requests: Sequence[Sequence[Tensor]], *, batchable: bool) -> Joined:
    """Lay out a batch; each request gives its tensors in the model's input order, with equally many rows in each."""
    if not batchable:
        groups = [[index] for index in range(len(requests))]
    elif _are_alike(requests):
        groups = [list(range(len(requests)))]
    else:
        by_shape: dict[object, list[int]] = {}
        for index, tensors in enumerate(requests):
            key = tuple((tensor.datatype, tensor.shape[1:]) for tensor in tensors)
            by_shape.setdefault(key, []).append(index)
        groups = list(by_shape.values())
    described: list[list[tuple[str, Shape]]] = []
    payload: list[list[Buffer]] = []
    members: list[list[tuple[int, int]]] = []
    for group in groups:
        rows = [_rows(requests[index]) for index in group]
        first = requests[group[0]]
        if len(group) == 1:
            described.append([(tensor.datatype, tensor.shape) for tensor in first])
        else:
            total = sum(rows)
            described.append([(tensor.datatype, (total, *tensor.shape[1:])) for tensor in first])
        payload.extend([requests[index][place].data for index in group] for place in range(len(first)))
        members.append(list(zip(group, rows, strict=True)))
    return Joined(pack_table(described), payload, members)


def cut(joined: Joined, table: bytes, payload: memoryview) -> list[list[Tensor]]:
    """Each request's outputs, in the model's output order, from the answer to `joined`.

    Raises `ProtocolError` for an answer to other passes, `ValueError` for an output without one row per input row.
    """
    passes = unpack_table(table, len(payload))
    if len(passes) != len(joined.members):
        raise ProtocolError(f"an answer has {len(passes)} passes, its batch {len(joined.members)}")
    outputs: list[list[Tensor]] = [[] for members in joined.members for _ in members]
    at = 0
    for pieces, members in zip(passes, joined.members, strict=True):
        for place, piece in enumerate(pieces):
            if len(members) == 1:
                end = at + piece.size_bytes
                outputs[members[0][0]].append(Tensor(piece.datatype, piece.shape, payload[at:end]))
                at = end
                continue
            total = sum(rows for _, rows in members)
            if not piece.shape or piece.shape[0] != total:
                raise ValueError(f"output {place} has the shape {list(piece.shape)} for {total} rows of input")
            row_bytes = piece.size_bytes // total
            for index, rows in members:
                end = at + rows * row_bytes
                outputs[index].append(Tensor(piece.datatype, (rows, *piece.shape[1:]), payload[at:end]))
                at = end
    return outputs


def _are_alike(requests: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all have the same shapes, rows included: what nearly every batch is, found out with little work."""
    return all(
        tensors[place].shape == tensor.shape and tensors[place].datatype == tensor.datatype
        for place, tensor in enumerate(requests[0])
        for tensors in requests
    )


def _rows(tensors: Sequence[Tensor]) -> int:
    return tensors[0].shape[0] if tensors and tensors[0].shape else 1


SCRATCH_BYTES: Final = 64 * 1024
"""Holds any header and table, and with them most answers, so that one receive takes in a whole frame."""
BUFFERS_MAX: Final = 1024
"""IOV_MAX of Linux: buffers one `sendmsg` gathers at most."""
SOCKET_BYTES: Final = 4 << 20
"""Asked for as send buffer; what the kernel grants decides in how many pieces a large batch goes."""

CLOSED: Final = "its socket closed"
"""Why a link ends where the peer just went."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The server's end, non-blocking, and the worker's end, blocking; neither is inherited unless passed on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    ours.setblocking(False)
    return ours, theirs


def drop_sent(unsent: deque[memoryview], sent: int) -> None:
    """Take the first `sent` bytes, and buffers without bytes, off the front of `unsent`."""
    while unsent and sent >= len(unsent[0]):
        sent -= len(unsent.popleft())
    if sent:
        unsent[0] = unsent[0][sent:]


class WorkerLink:
    """The server's end of one worker's socket, driven by the event loop.

    `on_frame` is called for every frame, `on_end` once, with the reason, when the socket is at its end or the peer
    broke the format; after `close` neither is called. Nothing blocks: what the kernel does not take at once is kept
    and sent when it does. The bound on what is kept is the caller's: one batch at a time.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop, self._sock, self._on_frame, self._on_end = loop, sock, on_frame, on_end
        self._fd = sock.fileno()
        self._unsent: deque[memoryview] = deque()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._filled = 0
        self._head: Head | None = None
        self._table = b""
        self._body = memoryview(b"")
        self._body_filled = 0
        self._closed = False
        loop.add_reader(self._fd, self._on_readable)

    @property
    def unsent_bytes(self) -> int:
        return sum(map(len, self._unsent))

    def send(
        self, kind: FrameKind, subject: int = 0, value: int = 0, table: bytes = b"", payload: Sequence[Buffer] = ()
    ) -> None:
        """Send a frame; `payload` is a sequence of byte buffers, which must not change until they are sent."""
        size = sum(map(len, payload))
        head = pack_head(kind, subject, value, len(table), size) + table
        if not self._unsent and len(payload) < BUFFERS_MAX:
            sent = self._push([head, *payload])
            if sent == len(head) + size:
                return
        else:
            sent = 0
        waiting = bool(self._unsent)
        self._unsent.extend(memoryview(buffer) for buffer in (head, *payload))
        drop_sent(self._unsent, sent)
        if not waiting and not self._closed:
            self._loop.add_writer(self._fd, self._on_writable)

    def close(self) -> None:
        """Let go of the socket; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._unsent.clear()
        self._sock.close()

    def _push(self, buffers: Sequence[Buffer]) -> int:
        """Hand bytes to the kernel and say how many it took. A broken pipe takes all: the reader will report it."""
        try:
            return self._sock.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            return sum(map(len, buffers))

    def _on_writable(self) -> None:
        drop_sent(self._unsent, self._push(list(islice(self._unsent, BUFFERS_MAX))))
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    def _on_readable(self) -> None:
        in_body = self._head is not None
        target = self._body[self._body_filled :] if in_body else self._scratch[self._filled :]
        try:
            count = self._sock.recv_into(target)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            count = 0
        except OSError as error:
            self._end(str(error))
            return
        if not count:
            self._end(CLOSED)
            return
        try:
            if in_body:
                self._body_filled += count
                self._finish_body()
            else:
                self._filled += count
                self._cut_frames()
        except ProtocolError as error:
            self._end(str(error))

    def _finish_body(self) -> None:
        head = self._head
        if head is not None and self._body_filled == head.payload_bytes:
            frame = Frame(head.kind, head.subject, head.value, self._table, self._body)
            self._head, self._body = None, memoryview(b"")
            self._on_frame(frame)

    def _cut_frames(self) -> None:
        """Take whole frames off the scratch buffer; give the payload of a large one a buffer of its own."""
        start = 0
        while not self._closed and self._filled - start >= HEADER.size:
            head = unpack_head(self._scratch[start : self._filled])
            at = start + HEADER.size + head.table_bytes
            end = at + head.payload_bytes
            if self._filled >= end:
                table, payload = bytes(self._scratch[at - head.table_bytes : at]), bytes(self._scratch[at:end])
                start = end
                self._on_frame(Frame(head.kind, head.subject, head.value, table, memoryview(payload)))
            elif self._filled >= at and end - start > SCRATCH_BYTES:
                self._head, self._table = head, bytes(self._scratch[at - head.table_bytes : at])
                self._body, self._body_filled = memoryview(bytearray(head.payload_bytes)), self._filled - at
                self._body[: self._body_filled] = self._scratch[at : self._filled]
                start = self._filled
            else:
                break
        left = self._filled - start
        if start and left:
            self._scratch[:left] = self._scratch[start : self._filled]
        self._filled = left

    def _end(self, why: str) -> None:
        if not self._closed:
            self.close()
            self._on_end(why)


class Channel:
    """The worker's end: blocking, one frame at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_head(self) -> tuple[Head, bytes] | None:
        """The next frame's header and table; None when the server has gone. The payload must be received next."""
        data = bytearray(HEADER.size)
        if not self._fill(memoryview(data), at_boundary=True):
            return None
        head = unpack_head(data)
        table = bytearray(head.table_bytes)
        self._fill(memoryview(table))
        return head, bytes(table)

    def receive_into(self, target: memoryview) -> None:
        """Fill `target` with the next bytes of the payload."""
        self._fill(target)

    def send(
        self, kind: FrameKind, subject: int = 0, value: int = 0, table: bytes = b"", payload: Sequence[Buffer] = ()
    ) -> None:
        """Send a frame, waiting for the server to take it."""
        head = pack_head(kind, subject, value, len(table), sum(map(len, payload))) + table
        buffers = deque(memoryview(buffer) for buffer in (head, *payload))
        while buffers:
            sent = self._sock.sendmsg(list(islice(buffers, BUFFERS_MAX)))
            drop_sent(buffers, sent)

    def _fill(self, target: memoryview, *, at_boundary: bool = False) -> bool:
        filled = 0
        while filled < len(target):
            count = self._sock.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            if not count:
                if at_boundary and not filled:
                    return False
                raise ProtocolError(f"the server went away {len(target) - filled} B before a frame's end")
            filled += count
        return True
