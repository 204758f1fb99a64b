"""Sockets between the server and its worker processes: frames in, frames out, with back pressure on both sides.

Promises that tensor bytes are neither joined nor copied on the server's side (`sendmsg` gathers them from where they
are, an answer is received into the buffer its slices point into), that the server's end never blocks, and that a peer
which breaks the format is given up. Must not know models, requests or processes.
"""

import socket
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from sloop.serve.frames import HEADER, Frame, Head, Kind, ProtocolError, pack_head, unpack_head
from sloop.shared import Buffer

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


class Link:
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
        self, kind: Kind, subject: int = 0, value: int = 0, table: bytes = b"", payload: Sequence[Buffer] = ()
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
        self, kind: Kind, subject: int = 0, value: int = 0, table: bytes = b"", payload: Sequence[Buffer] = ()
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
