"""The connection between the server and a child process, a worker, an edge or the planner: the format of frames, and
both ends of the socket.

A frame is `HEADER` · payload. What a payload means depends on the frame's kind (`sloop.serve.messages`). No frame is
unpickled or evaluated, and every length is checked against a bound before memory is allocated for it.

The server's end never blocks and never copies a payload: `sendmsg` gathers it from its buffers, and a large one is
received into the buffer that is passed on. A peer that violates the format is disconnected.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import islice
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from sloop.shared_memory import Buffer

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop  # workers start sooner without it

T = TypeVar("T")

VERSION: Final = 4
MAGIC: Final = b"SL"
HEADER: Final = Layout("<2sBBIqq")
"""Magic, version, kind, payload size in bytes, subject, value."""

PAYLOAD_BYTES_MAX: Final = 1 << 30
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class ProtocolError(Exception):
    """The peer violated the frame format. This is a bug or a foreign process, never a user's mistake."""


class FrameKind(IntEnum):
    """What a payload is. Each frame also carries two numbers, `subject` and `value`."""

    RECORDS = 1
    """Between all processes: a list of records, those of one turn of the event loop. An edge says with an empty list
    that it lives; either end of a link between machines says so without a payload, also on a link that carries no
    records."""
    BYTES = 2
    """What the link carries. Blocks: to an agent, the address of one to be sent, where `subject` is the number of this
    request; from it, that block or, if `value` is negative, why there is none. From a part of a model to the next one:
    for batch `subject`, a `PassedBatch` of `value` bytes, and the tensors. Between an edge and its process for large
    JSON (`sloop.serve.edge.large`): work, and what came of it."""


class Frame(Struct, frozen=True, gc=False):
    """A received frame."""

    kind: FrameKind
    subject: int
    value: int
    payload: memoryview


class Head(Struct, frozen=True, gc=False):
    """A received and validated header."""

    kind: FrameKind
    subject: int
    value: int
    payload_bytes: int


def pack_head(kind: FrameKind, subject: int, value: int, payload_bytes: int) -> bytes:
    """Encode a header."""
    return HEADER.pack(MAGIC, VERSION, kind, payload_bytes, subject, value)


_KINDS: Final = {int(kind): kind for kind in FrameKind}


def unpack_head(data: bytes | bytearray | memoryview) -> Head:
    """Decode the header at the start of `data`. Raises `ProtocolError` if it is malformed or announces too many
    bytes."""
    magic, version, kind, payload_bytes, subject, value = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"a frame begins with {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise ProtocolError(f"a frame announces {payload_bytes} B")
    found = _KINDS.get(kind)
    if found is None:
        raise ProtocolError(f"a frame has the unknown kind {kind}")
    return Head(found, subject, value, payload_bytes)


SCRATCH_BYTES: Final = 64 * 1024
"""Large enough for most frames, so that one `recv` usually reads one or more."""
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


class FrameReader:
    """Cuts what a stream brings into frames: `buffer` says where the next bytes belong, `fill` that they are there.

    `on_frame` is called for every frame, and may call `stop`. A payload larger than the scratch buffer is received
    where `room` says, which is by default memory of its own; none may have more than `payload_bytes_max`.
    """

    def __init__(self, on_frame: Callable[[Frame], None], room: Callable[[Head], memoryview] | None = None) -> None:
        self.on_frame, self._room = on_frame, room or _room
        self.payload_bytes_max = PAYLOAD_BYTES_MAX
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._filled = 0
        self._head: Head | None = None
        self._body = memoryview(b"")
        self._body_filled = 0
        self._stopped = False

    def buffer(self) -> memoryview:
        """Where the next bytes belong."""
        return self._scratch[self._filled :] if self._head is None else self._body[self._body_filled :]

    def fill(self, count: int) -> None:
        """So many bytes have come. Raises `ProtocolError` for what is no frame."""
        head = self._head
        if head is None:
            self._filled += count
            self._cut()
            return
        self._body_filled += count
        if self._body_filled == head.payload_bytes:
            frame = Frame(head.kind, head.subject, head.value, self._body)
            self._head, self._body = None, memoryview(b"")
            self.on_frame(frame)

    def stop(self) -> None:
        """Report no further frames, and write into no memory of others."""
        self._stopped = True
        self._head, self._body = None, memoryview(b"")

    def _cut(self) -> None:
        """Extract complete frames from the scratch buffer. A large payload gets a separate buffer."""
        start = 0
        while not self._stopped and self._filled - start >= HEADER.size:
            head = unpack_head(self._scratch[start : self._filled])
            if head.payload_bytes > self.payload_bytes_max:
                raise ProtocolError(f"a frame announces {head.payload_bytes} B, more than {self.payload_bytes_max}")
            at = start + HEADER.size
            end = at + head.payload_bytes
            if self._filled >= end:
                payload = bytes(self._scratch[at:end])
                start = end
                self.on_frame(Frame(head.kind, head.subject, head.value, memoryview(payload)))
            elif end - start > SCRATCH_BYTES:
                self._head = head
                self._body, self._body_filled = self._room(head), self._filled - at
                self._body[: self._body_filled] = self._scratch[at : self._filled]
                start = self._filled
            else:
                break
        left = self._filled - start
        if start and left:
            self._scratch[:left] = self._scratch[start : self._filled]
        self._filled = left


def _room(head: Head) -> memoryview:
    return memoryview(bytearray(head.payload_bytes))


class ProcessLink:
    """The server's end of a child's socket, driven by the event loop.

    `attach` begins to read; another call replaces whom it tells. Its `on_frame` is called for every frame. `on_end` is
    called once, with the reason, when the peer closes the socket or violates the format; after `close` neither is
    called. Bytes that the kernel does not accept at once are kept and sent later. Nothing here bounds them: a worker
    gets one batch at a time; an edge gets the ends of its open requests, each with at most one block of
    `INLINE_BYTES_MAX`, and is ended when it is silent; what passes between parts of a model is read only while the link
    that it goes to is not congested (`relay`).
    """

    def __init__(self, loop: "AbstractEventLoop", sock: socket.socket) -> None:
        self._loop, self._sock = loop, sock
        self._on_end: Callable[[str], None] = lambda why: None
        self._fd = sock.fileno()
        self._unsent: deque[memoryview] = deque()
        self._reader = FrameReader(lambda frame: None)
        self.on_drained: Callable[[], None] = lambda: None
        """Called when the peer has taken all that waited for it."""
        self._closed = self._is_last_sent = False

    def attach(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        """Set who is told of frames and of the end."""
        self._reader.on_frame, self._on_end = on_frame, on_end
        self._loop.add_reader(self._fd, self._on_readable)

    @property
    def is_congested(self) -> bool:
        """Whether bytes wait that the peer has not taken."""
        return bool(self._unsent)

    def hold(self, *, is_held: bool) -> None:
        """Read no more, so that the peer has to wait; or go on."""
        if self._closed:
            return
        if is_held:
            self._loop.remove_reader(self._fd)
        else:
            self._loop.add_reader(self._fd, self._on_readable)

    def send(self, kind: FrameKind, subject: int = 0, value: int = 0, payload: Sequence[Buffer] = ()) -> None:
        """Send a frame. The buffers of `payload` must not change until they are sent."""
        size = sum(map(len, payload))
        head = pack_head(kind, subject, value, size)
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

    def send_socket(self, sock: socket.socket) -> None:
        """Send a socket, with a byte. OSError if the peer is gone or does not read."""
        if self._unsent:
            raise BlockingIOError("a socket can only be sent at once")
        socket.send_fds(self._sock, [b"s"], [sock.fileno()])

    def end_output(self) -> None:
        """Send no more. A worker then exits, and what it still sends is heard."""
        with contextlib.suppress(OSError):  # the peer has closed the socket
            self._sock.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        """Close the socket when all is sent."""
        if self._unsent and not self._closed:
            self._is_last_sent = True
        else:
            self.close()

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        if self._closed:
            return
        self._closed = True
        self._reader.stop()
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
            if self._is_last_sent:
                self.close()
            self.on_drained()

    def _on_readable(self) -> None:
        try:
            count = self._sock.recv_into(self._reader.buffer())
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            count = 0
        except OSError as error:
            self.fail(str(error))
            return
        if not count:
            self.fail(CLOSED)
            return
        try:
            self._reader.fill(count)
        except ProtocolError as error:
            self.fail(str(error))

    def fail(self, why: str) -> None:
        """Close the socket, and report why."""
        if not self._closed:
            self.close()
            self._on_end(why)


class FrameLink(Protocol):
    """A connection that carries frames, to a process on any machine. See `sloop.serve.network`."""

    def attach(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        """See `ProcessLink.attach`."""
        ...

    def send(self, kind: FrameKind, subject: int = 0, value: int = 0, payload: Sequence[Buffer] = ()) -> None:
        """See `ProcessLink.send`."""
        ...

    def close(self) -> None:
        """See `ProcessLink.close`."""
        ...


class PacedLink(FrameLink, Protocol):
    """A link that knows whether its peer reads, and can make its peer wait."""

    on_drained: Callable[[], None]

    @property
    def is_congested(self) -> bool:
        """See `ProcessLink.is_congested`."""
        ...

    def hold(self, *, is_held: bool) -> None:
        """See `ProcessLink.hold`."""
        ...


def relay(source: PacedLink, target: PacedLink, on_end: Callable[[str], None], note: Callable[[Frame], None]) -> None:
    """Let what comes from one link pass on to another, as fast as that takes it: one frame at most waits here. `note`
    is called with each, `on_end` at the end of the source."""

    def pass_on(frame: Frame) -> None:
        note(frame)
        target.send(frame.kind, frame.subject, frame.value, [frame.payload])
        if target.is_congested:
            source.hold(is_held=True)

    target.on_drained = lambda: source.hold(is_held=False)
    source.attach(pass_on, on_end)


class RecordLink:
    """Records in both directions, all those of one turn of the event loop in one frame: over a socket between a
    process and its child, or over a link to another machine.

    What comes is of the types of the union `comes`. `acts` has what is done with a record of each type that may come
    now; it can be replaced. `on_end` is called once, with the reason, when the peer closes the socket, violates the
    format, or sends a record that is not in `acts` or that an act refuses with a `ProtocolError`; after `close` neither
    is called. `note_turn` is called after each frame, with the time at which its handling began (`time.monotonic_ns`).
    """

    def __init__(
        self,
        loop: "AbstractEventLoop",
        sock: socket.socket | FrameLink,
        comes: Any,  # noqa: ANN401  # a union is no type
        acts: Mapping[type, Callable[[Any], None]],
        on_end: Callable[[str], None],
        note_turn: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._loop, self._note_turn = loop, note_turn
        self._decode = msgspec.msgpack.Decoder(list[comes]).decode
        self._waiting: list[Struct] = []
        self._is_closed = False
        self._link: FrameLink = ProcessLink(loop, sock) if isinstance(sock, socket.socket) else sock
        self.attach(acts, on_end)

    def attach(self, acts: Mapping[type, Callable[[Any], None]], on_end: Callable[[str], None]) -> None:
        """Replace what is done with records, and who is told of the end."""
        self.acts, self._on_end = acts, on_end
        self._link.attach(self._on_frame, on_end)

    def send(self, record: Struct) -> None:
        """Send a record at the end of this turn of the event loop."""
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(record)

    def tell(self, record: Struct) -> None:
        """Send a record now, after those that wait."""
        self._waiting.append(record)
        self.send_now()

    def flush(self) -> None:
        """Send all records now."""
        if self._waiting:
            self.send_now()

    def send_now(self) -> None:
        """Send all records now, even if there are none: an empty frame says that this end lives."""
        waiting, self._waiting = self._waiting, []
        self._link.send(FrameKind.RECORDS, payload=[_ENCODE(waiting)])

    def close(self) -> None:
        """Close the socket. May be called repeatedly."""
        self._is_closed = True
        self._link.close()

    def _on_frame(self, frame: Frame) -> None:
        began_ns = time.monotonic_ns()
        try:
            for record in records_in(frame, self._decode):
                if self._is_closed:
                    break
                act = self.acts.get(type(record))
                if act is None:
                    raise ProtocolError(f"{type(record).__name__} is not expected now")
                act(record)
        except ProtocolError as error:
            self.close()
            self._on_end(str(error))
        self._note_turn(began_ns)


def records_in(frame: Frame, decode: Callable[[memoryview], list[T]]) -> list[T]:
    """The records of a frame. ProtocolError if it has others, or none."""
    if frame.kind is not FrameKind.RECORDS:
        raise ProtocolError(f"a {frame.kind.name} frame instead of records")
    try:
        return decode(frame.payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # also wrong UTF-8, and lists in lists
        raise ProtocolError(str(error)) from error


class ProcessChannel:
    """The child's end of the socket: blocking, one frame at a time. Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._header = memoryview(bytearray(HEADER.size))

    def fileno(self) -> int:
        """For `select`."""
        return self._sock.fileno()

    def receive(self, room: Callable[[Head], memoryview] | None = None) -> Frame | None:
        """The next frame, or None if the server has closed the socket. `room` says where its payload is received; else
        it gets memory of its own."""
        if not self._fill(self._header, at_boundary=True):
            return None
        head = unpack_head(self._header)
        payload = (room or _room)(head)
        self._fill(payload)
        return Frame(head.kind, head.subject, head.value, payload)

    def receive_socket(self) -> "ProcessChannel":
        """The socket that follows a record."""
        _, fds, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        return ProcessChannel(socket.socket(fileno=fds[0]))

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def send(
        self,
        kind: FrameKind,
        subject: int = 0,
        value: int = 0,
        payload: Sequence[Buffer] = (),
        before_waiting: Callable[[], object] | None = None,
    ) -> None:
        """Send a frame; blocks until the kernel has accepted it. `before_waiting` is called if it does not at once."""
        head = pack_head(kind, subject, value, sum(map(len, payload)))
        buffers = deque(memoryview(buffer) for buffer in (head, *payload))
        with self._sending:
            while buffers:
                flags = 0 if before_waiting is None else socket.MSG_DONTWAIT
                try:
                    sent = self._sock.sendmsg(list(islice(buffers, BUFFERS_MAX)), (), flags)
                except BlockingIOError:
                    assert before_waiting is not None, "only what may not wait would"
                    before_waiting()
                    before_waiting = None
                else:
                    drop_sent(buffers, sent)

    def tell(self, record: Struct) -> None:
        """Send a record to a `RecordLink`."""
        self.send(FrameKind.RECORDS, payload=[_ENCODE([record])])

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
