"""The connection between the server and a child process, a worker or the planner: frame format, batch layout, and both
ends of the socket.

A frame is `HEADER` · table · payload. The table lists the forward passes: their number, the tensors per pass, and for
each tensor a datatype code, the rank and the dimensions. The payload holds the elements of those tensors,
little-endian. No frame is unpickled or evaluated, and every length is checked against a bound before memory is
allocated for it.

The server's end never blocks and never copies tensor bytes: `sendmsg` gathers them from their buffers, and a reply is
received into the buffer that its tensors refer to. A peer that violates the format is disconnected.
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

VERSION: Final = 1
MAGIC: Final = b"SL"
HEADER: Final = Layout("<2sBBIQqq")
"""Magic, version, kind, table size in bytes, payload size in bytes, subject, value."""

TABLE_BYTES_MAX: Final = 60 * 1024
PAYLOAD_BYTES_MAX: Final = 1 << 30
RANK_MAX: Final = 16

CODES: Final = tuple(NUMPY_TYPES)
"""Datatypes in the order of their wire codes. Both ends run the same version, so the order may change between
versions."""
CODE_OF: Final = {name: code for code, name in enumerate(CODES)}

_COUNTS: Final = Layout("<HH")
_TENSOR: Final = Layout("<BB")
_DIMS: Final = tuple(Layout(f"<{rank}I") for rank in range(RANK_MAX + 1))


class ProtocolError(Exception):
    """The peer violated the frame format. This is a bug or a foreign process, never a user's mistake."""


class FrameKind(IntEnum):
    """The message types. Each frame also carries two numbers, `subject` and `value`."""

    RUN = 1
    """To a worker: run batch `subject`. The tensors are in the payload or, if `value` is not 0, in the first `value`
    bytes of the shared memory, at the offsets that `sloop.shared_memory.places` computes."""
    RESIZE = 2
    """To a worker: use `subject` threads and a duty cycle of `value` millionths from the next batch on."""
    STOP = 3
    """To a worker: finish the current batch and exit."""
    ADD = 4
    """To the planner: plan for one more application version, which the payload defines."""
    DISCARD = 5
    """To the planner: stop planning for the version whose key is in the payload."""
    PLAN = 6
    """To the planner: make the plans of request `subject`; the payload has what has changed since the last one."""
    STEP = 10
    """From a worker: it has entered step `subject` of its cold start."""
    READY = 11
    """From a worker: it can take its first batch."""
    DONE = 12
    """From a worker: the forward passes of batch `subject` took `value` ns; the payload holds the outputs."""
    FAILED = 13
    """From a worker: the model raised an exception on batch `subject`; the payload is its text in UTF-8."""
    RESIZED = 14
    """From a worker: it runs the following batches on `subject` threads."""
    REFUSED = 15
    """From a worker: it cannot start and exits; the payload is the reason in UTF-8."""
    PLANNED = 16
    """From the planner: the payload is the answer to request `subject`."""


Shape = tuple[int, ...]


class TensorLayout(Struct, frozen=True, gc=False):
    """One tensor of a table: its datatype, its shape, and its size in the payload."""

    datatype: str
    shape: Shape
    size_bytes: int


class Frame(Struct, frozen=True, gc=False):
    """A received frame."""

    kind: FrameKind
    subject: int
    value: int
    table: bytes
    payload: memoryview


class Head(Struct, frozen=True, gc=False):
    """A received and validated header."""

    kind: FrameKind
    subject: int
    value: int
    table_bytes: int
    payload_bytes: int


def pack_head(kind: FrameKind, subject: int, value: int, table_bytes: int, payload_bytes: int) -> bytes:
    """Encode a header."""
    return HEADER.pack(MAGIC, VERSION, kind, table_bytes, payload_bytes, subject, value)


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    """Decode the header at the start of `data`. Raises `ProtocolError` if it is malformed or announces too many
    bytes."""
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
    """Encode a table. Each pass is a (datatype, shape) per tensor; all passes have the same number of tensors.

    Raises `ProtocolError` if the table exceeds `TABLE_BYTES_MAX`.
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


def unpack_table(table: bytes, payload_bytes: int | None) -> list[list[TensorLayout]]:
    """Decode a table. Raises `ProtocolError` if it is malformed or its tensors do not fill the payload exactly.

    Pass `payload_bytes=None` for a frame whose tensors are in shared memory.
    """
    try:
        passes, width = _COUNTS.unpack_from(table)
        offset = _COUNTS.size
        found: list[list[TensorLayout]] = []
        for _ in range(passes):
            row: list[TensorLayout] = []
            for _ in range(width):
                code, rank = _TENSOR.unpack_from(table, offset)
                shape = _DIMS[rank].unpack_from(table, offset + _TENSOR.size)
                offset += _TENSOR.size + 4 * rank
                datatype = CODES[code]
                row.append(TensorLayout(datatype, shape, prod(shape) * ITEM_BYTES[datatype]))
            found.append(row)
    except (LayoutError, IndexError) as error:
        raise ProtocolError(f"a table of {len(table)} B is malformed: {error}") from error
    described = sum(tensor.size_bytes for row in found for tensor in row)
    if offset != len(table):
        raise ProtocolError(f"a table of {len(table)} B has {len(table) - offset} B after its last tensor")
    if payload_bytes is not None and described != payload_bytes:
        raise ProtocolError(f"a table describes tensors of {described} B; the payload has {payload_bytes} B")
    return found


class PackedBatch(Struct, frozen=True, gc=False):
    """A batch in the form in which it is sent: its table, its payload, and the requests of each forward pass."""

    table: bytes
    payload: list[list[Buffer]]
    """For each tensor of the table, the buffers that make it up, one per request."""
    members: list[list[tuple[int, int]]]
    """For each pass, (index of the request in the batch, number of its rows)."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(len(part) for parts in self.payload for part in parts)


def is_batchable(signature: Signature) -> bool:
    """Whether requests may share a forward pass: the first dimension of every input and output is variable."""
    return all(port.shape[:1] == (-1,) for port in (*signature.inputs, *signature.outputs))


def pack_batch(requests: Sequence[Sequence[Tensor]], *, batchable: bool) -> PackedBatch:
    """Pack a batch without copying: requests with equal row shapes share a pass, their bytes one after the other.

    Each request gives its tensors in the model's input order, all with the same number of rows. A request whose row
    shapes differ from the others', and every request if the model is not `batchable`, gets a separate pass.
    """
    if not batchable:
        groups = [[index] for index in range(len(requests))]
    elif _have_equal_shapes(requests):
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
    return PackedBatch(pack_table(described), payload, members)


def unpack_outputs(batch: PackedBatch, table: bytes, payload: memoryview) -> list[list[Tensor]]:
    """Slice a worker's reply to `batch` into the outputs of each request, in the model's output order.

    Raises `ProtocolError` if the reply has another number of passes, and `ValueError` if an output does not have one
    row per input row.
    """
    passes = unpack_table(table, len(payload))
    if len(passes) != len(batch.members):
        raise ProtocolError(f"a reply has {len(passes)} passes, its batch {len(batch.members)}")
    outputs: list[list[Tensor]] = [[] for members in batch.members for _ in members]
    at = 0
    for layouts, members in zip(passes, batch.members, strict=True):
        for place, layout in enumerate(layouts):
            if len(members) == 1:
                end = at + layout.size_bytes
                outputs[members[0][0]].append(Tensor(layout.datatype, layout.shape, payload[at:end]))
                at = end
                continue
            total = sum(rows for _, rows in members)
            if not layout.shape or layout.shape[0] != total:
                raise ValueError(f"output {place} has the shape {list(layout.shape)} for {total} rows of input")
            row_bytes = layout.size_bytes // total
            for index, rows in members:
                end = at + rows * row_bytes
                outputs[index].append(Tensor(layout.datatype, (rows, *layout.shape[1:]), payload[at:end]))
                at = end
    return outputs


def _have_equal_shapes(requests: Sequence[Sequence[Tensor]]) -> bool:
    """Whether all requests have the same shapes, rows included. A cheap test for the most frequent case."""
    return all(
        tensors[place].shape == tensor.shape and tensors[place].datatype == tensor.datatype
        for place, tensor in enumerate(requests[0])
        for tensors in requests
    )


def _rows(tensors: Sequence[Tensor]) -> int:
    return tensors[0].shape[0] if tensors and tensors[0].shape else 1


SCRATCH_BYTES: Final = 64 * 1024
"""Large enough for any header and table, and for most replies, so that one `recv` usually reads a whole frame."""
BUFFERS_MAX: Final = 1024
"""The most buffers that one `sendmsg` accepts: IOV_MAX of Linux."""
SOCKET_BYTES: Final = 4 << 20
"""Requested size of the socket's send buffer. The kernel may grant less; a large batch then needs several writes."""

CLOSED: Final = "its socket closed"
"""The reason that `on_end` receives when the peer closed the socket."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The server's end (non-blocking) and the worker's end (blocking). Child processes inherit neither by default."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    ours.setblocking(False)
    return ours, theirs


def drop_sent(unsent: deque[memoryview], sent: int) -> None:
    """Remove the first `sent` bytes, and empty buffers, from the front of `unsent`."""
    while unsent and sent >= len(unsent[0]):
        sent -= len(unsent.popleft())
    if sent:
        unsent[0] = unsent[0][sent:]


class ProcessLink:
    """The server's end of a child's socket, driven by the event loop.

    `on_frame` is called for every frame. `on_end` is called once, with the reason, when the peer closes the socket or
    violates the format; after `close` neither is called. Bytes that the kernel does not accept at once are kept and
    sent later; their amount is bounded because the caller sends one batch at a time.
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
        """Send a frame. The buffers of `payload` must not change until they are sent."""
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
        """Close the socket. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._unsent.clear()
        self._sock.close()

    def _push(self, buffers: Sequence[Buffer]) -> int:
        """Give bytes to the kernel and return how many it accepted. On a broken pipe, pretend that it accepted all:
        the reader reports the end."""
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
        """Extract complete frames from the scratch buffer. A large payload gets a separate buffer."""
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


class ProcessChannel:
    """The child's end of the socket: blocking, one frame at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_head(self) -> tuple[Head, bytes] | None:
        """The header and table of the next frame, or None if the server has closed the socket.

        The caller must then receive the payload.
        """
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
        """Send a frame; blocks until the kernel has accepted it."""
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
                raise ProtocolError(f"the server closed the socket {len(target) - filled} B before the end of a frame")
            filled += count
        return True
