"""Fetches model files from peers: other machines of the deployment that have the files, or are receiving them.

A `FileServer` sends the files of a cache (`sloop.serve.weights`) to peers that know the token. It also sends a file
that its own machine is still receiving, as the bytes arrive. So several machines form a chain in which each link
carries each byte once, and all of them have the file only slightly later than a single machine would.

A `PeerStore` takes the place of the store of a model and reads a file from a peer. If this peer dies, does not have the
file, or stops sending, the next peer continues at the byte where the transfer broke off, and after the last peer the
store does.

A file from a peer is accepted only if the store confirms that its version is the present one, or if its checksum is
known and matches at the end. If the store cannot be reached, the version of the peer is accepted, like that of a cached
copy.

A request asks for the rest of a file, in chunks. A thread on each side then has the connection for itself: the kernel
copies chunks from the file to the network (sendfile), and a reader receives, writes and digests them without a turn of
an event loop. With TLS, which needs the event loop, each request asks for a part of a file. A reader has only a few
such requests under way, which are answered in their order, so the memory for waiting answers is bounded.
"""

import asyncio
import concurrent.futures
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from sloop.errors import MachineError
from sloop.serve.messages import encode
from sloop.serve.network import (
    BEAT_S,
    SILENT_S,
    STALLED_S_MAX,
    Endpoint,
    NetworkLink,
    Purpose,
    connect,
)
from sloop.serve.stores import (
    POLL_S,
    Download,
    InterruptedTransferError,
    ModelSource,
    Store,
    StoredFile,
    StoreError,
    Watch,
)
from sloop.serve.transport import CLOSED, HEADER, Frame, FrameKind, ProtocolError, pack_head, unpack_head
from sloop.serve.weights import FILES, MANIFEST, ModelFolder, WeightsCache
from sloop.text import host_and_port

RANGE_BYTES: Final = 256 << 10
"""Bytes of a file that one request asks for. A peer can send a part on once it has all of it."""
AHEAD: Final = 8
"""Requests of one file that are under way at a time."""
WAITING_MAX: Final = 64
"""Requests that may wait on one connection."""
CHUNK_BYTES_MAX: Final = 1 << 20
"""Of a file that is sent in chunks. A chunk may be as small as what has just come."""
READ_BYTES: Final = 128 << 10
"""Of a chunk, what is received, written and digested at a time, and can then be sent on."""
REQUEST_BYTES_MAX: Final = 4096
GROWTH_S: Final = 0.001
"""How often to check whether a file that is being received has grown."""
BEGIN_S: Final = 0.5
"""How long a request waits for this machine's own transfer of the file to begin: a peer that was ordered to fetch the
file at the same time may ask before it has begun."""
STALLED_S: Final = 5.0
"""If a file has not grown for this long, requests for it are refused, and the reader continues with another peer."""
TEXT_BYTES_MAX: Final = 1024
CONTENT: Final = "sha256 "
"""How a version begins that is the checksum of the content."""
WEAK: Final = "etag W/", "modified "
"""How versions begin that do not prove equal content, or do not prove it after a long time."""
NEW: Final = -2
"""Instead of a size: nothing has been waited for yet."""

T = TypeVar("T")
_log: Final = logging.getLogger("sloop.peers")


class FileRange(Struct, frozen=True, array_like=True):
    """A request for `size` bytes, from `start` on, of this version of a file of a model. If `size` is 0, it asks for
    the `FileInfo` instead."""

    key: str
    """Of the model's location (`ModelSource.key`)."""
    name: str
    """The path of the file in the folder of the model."""
    version: str = ""
    start: int = 0
    size: int = 0
    in_chunks: bool = False
    """Whether the bytes come in many frames, as soon as they are there, each with its position. Nothing more can be
    asked on this connection then, and any size."""


class FileInfo(Struct, frozen=True, array_like=True):
    """What a peer knows of a file."""

    version: str
    size_bytes: int
    is_resumable: bool
    """Whether equal versions prove equal content."""


KnownFile = tuple[Path, FileInfo]
"""Where a file is, and what is known of it."""


def nowhere(key: str, name: str) -> KnownFile | None:
    """For a `FileServer` that has no files outside its caches."""
    return None


# The side that has files


class FileServer:
    """Sends the files in caches, complete or not. `caches` returns those that there are now, the first to be searched
    first; `find` returns a file outside the caches, by the key of its model's location and its name."""

    def __init__(
        self, caches: Callable[[], Sequence[WeightsCache]], find: "Callable[[str, str], KnownFile | None]" = nowhere
    ) -> None:
        self._caches, self._find = caches, find
        self._requests: set[FileRequests] = set()

    def accept(self, link: NetworkLink) -> None:
        """Serve one more connection."""
        requests = FileRequests(link, self._caches, self._find)
        self._requests.add(requests)

        def on_end(_: str) -> None:
            self._requests.discard(requests)
            requests.close()

        link.allow(REQUEST_BYTES_MAX)
        link.attach(requests.on_frame, on_end)
        link.keep_alive()

    def close(self) -> None:
        """End all connections."""
        for requests in self._requests:
            requests.close()
        self._requests.clear()


class FileRequests:
    """The requests of one connection."""

    def __init__(
        self,
        link: NetworkLink,
        caches: Callable[[], Sequence[WeightsCache]],
        find: "Callable[[str, str], KnownFile | None]",
    ) -> None:
        self._link, self._caches, self._find = link, caches, find
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(FileRange)
        self._waiting: deque[tuple[int, FileRange]] = deque()
        self._opened: dict[tuple[str, str, str], int] = {}
        """Descriptors by model, file and version: a descriptor stays with its file, also when the file is moved."""
        self._taken: socket.socket | None = None
        """The connection, once a thread sends a file in chunks."""
        self._timer: asyncio.TimerHandle | None = None
        self._grown_s, self._grown_bytes = 0.0, NEW
        """When the file for which a request waits has last grown, and to which size."""
        link.on_drained = self._answer

    def on_frame(self, frame: Frame) -> None:
        """Take one more request."""
        if frame.kind is not FrameKind.FETCH:
            raise ProtocolError(f"a {frame.kind.name} frame instead of a request for a file")
        if len(self._waiting) >= WAITING_MAX:
            raise ProtocolError(f"more than {WAITING_MAX} requests for files")
        try:
            wanted = self._decoder.decode(frame.payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a request for a file cannot be read: {error}") from error
        if wanted.start < 0 or wanted.size < 0 or (wanted.size > RANGE_BYTES and not wanted.in_chunks):
            raise ProtocolError(f"a request for {wanted.size} B from {wanted.start} on")
        self._waiting.append((frame.subject, wanted))
        if self._timer is None:
            self._answer()

    def close(self) -> None:
        """End the connection."""
        self._link.close()
        self._waiting.clear()
        if self._taken is not None:
            with suppress(OSError):  # its thread has ended
                self._taken.shutdown(socket.SHUT_RDWR)
        if self._timer is not None:
            self._timer.cancel()
        for fd in self._opened.values():
            os.close(fd)
        self._opened.clear()

    def _answer(self) -> None:
        """Answer all requests that can be answered; try again soon if the next part has not arrived yet."""
        self._timer = None
        while self._waiting and not self._link.is_congested:
            number, wanted = self._waiting[0]
            try:
                found = self._found(wanted)
            except OSError as error:
                self._refuse(number, f"it cannot be read: {error.strerror or error}")
                continue
            except LookupError as error:
                self._refuse(number, str(error.args[0]))
                continue
            if found is None:
                self._timer = self._loop.call_later(GROWTH_S, self._answer)
                return
            if wanted.in_chunks:
                self._send_chunks(number, wanted)
                return
            self._waiting.popleft()
            self._grown_bytes = NEW
            self._link.send(FrameKind.BLOCK, number, 0, [found])

    def _send_chunks(self, number: int, wanted: FileRange) -> None:
        """Let a thread send the file, which is open."""
        taken = self._link.take_over()
        if taken is None:  # something is unsent, or the link is closed, which cancels the timer
            self._timer = self._loop.call_later(GROWTH_S, self._answer)
            return
        self._waiting.clear()
        self._taken, _ = taken
        fd = self._opened.pop((wanted.key, wanted.name, wanted.version))

        def send() -> None:
            try:
                with taken[0]:
                    send_chunks(taken[0], number, fd, wanted)
            finally:
                os.close(fd)
                with suppress(RuntimeError):  # the event loop has been closed
                    self._loop.call_soon_threadsafe(self._link.close)

        threading.Thread(target=send, name=f"sloop-send-{wanted.name}", daemon=True).start()

    def _refuse(self, number: int, why: str) -> None:
        self._waiting.popleft()
        self._grown_bytes = NEW
        self._link.send(FrameKind.BLOCK, number, -1, [why.encode()[:TEXT_BYTES_MAX]])

    def _found(self, wanted: FileRange) -> bytes | None:
        """The answer to a request; None if its bytes may still arrive. `LookupError` if they will not."""
        size = 0
        if wanted.in_chunks:
            self._descriptor(wanted)
            return b""
        if wanted.size:
            fd = self._descriptor(wanted)
            size = os.fstat(fd).st_size
            if size >= wanted.start + wanted.size:
                return os.pread(fd, wanted.size, wanted.start)
        else:
            known = self._known(wanted)
            if known is not None:
                return bytes(encode(known[1]))
            if not any(cache.is_fetching(wanted.key) for cache in self._caches()):
                self._expect(-1, BEGIN_S, "it is not here")
                return None
        self._expect(size, STALLED_S, f"it has not grown beyond {size} B for {STALLED_S:g} s")
        return None

    def _expect(self, size: int, within_s: float, why: str) -> None:
        """A file has this size now, or does not exist (-1). `LookupError` if that has been so for longer than
        `within_s`."""
        now_s = self._loop.time()
        if size != self._grown_bytes:
            self._grown_s, self._grown_bytes = now_s, size
        elif now_s - self._grown_s > within_s:
            raise LookupError(why)

    def _known(self, wanted: FileRange) -> KnownFile | None:
        """The file, in the first cache that has it, or elsewhere."""
        every = (known_file(cache.models, wanted.key, wanted.name) for cache in self._caches())
        return next((found for found in every if found is not None), None) or self._find(wanted.key, wanted.name)

    def _descriptor(self, wanted: FileRange) -> int:
        key = wanted.key, wanted.name, wanted.version
        fd = self._opened.get(key)
        if fd is None:
            try:
                fd = self._open(wanted)
            except FileNotFoundError:  # a transfer has completed it in between
                fd = self._open(wanted)
            self._opened[key] = fd
        return fd

    def _open(self, wanted: FileRange) -> int:
        found = self._known(wanted)
        if found is None or found[1].version != wanted.version:
            raise LookupError("it is not here in this version")
        return os.open(found[0], os.O_RDONLY | os.O_CLOEXEC)


def send_chunks(sock: socket.socket, number: int, fd: int, wanted: FileRange) -> None:
    """Send a part of an open file as it grows; ends early if the other end has gone or takes nothing. Blocks."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _time_value(STALLED_S_MAX))
    at, end = wanted.start, wanted.start + wanted.size
    grown_s = spoke_s = time.monotonic()
    try:
        while at < end:
            found, now_s = os.fstat(fd), time.monotonic()
            left = min(found.st_size, end) - at
            if left > 0:
                left = min(left, CHUNK_BYTES_MAX)
                sock.sendall(pack_head(FrameKind.BLOCK, number, at, left), socket.MSG_MORE)
                while left:
                    sent = os.sendfile(sock.fileno(), fd, at, left)
                    if not sent:
                        return  # the file has become shorter
                    at, left = at + sent, left - sent
                grown_s = spoke_s = now_s
                continue
            if now_s - grown_s > STALLED_S or not found.st_nlink:
                stalled = f"it has not grown beyond {at} B for {STALLED_S:g} s"
                why = (stalled if found.st_nlink else "it was deleted").encode()
                sock.sendall(pack_head(FrameKind.BLOCK, number, -1, len(why)) + why)
                return
            if now_s - spoke_s > BEAT_S:
                sock.sendall(pack_head(FrameKind.ALIVE, 0, 0, 0))
                spoke_s = now_s
            time.sleep(GROWTH_S)
    except OSError as error:
        _log.debug("%s is sent no further: %s", wanted.name, error)


def _time_value(seconds: float) -> bytes:
    """As socket(7) wants it for its time limits."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def known_file(folder: ModelFolder, key: str, name: str) -> KnownFile | None:
    """A file of the models of one location, complete or being received; None if there is no such file, or if its
    version or length is unknown."""
    # A thread may complete a file after the complete ones were looked at, and before those that are being received.
    return _complete_file(folder, key, name) or _coming_file(folder, key, name) or _complete_file(folder, key, name)


def _complete_file(folder: ModelFolder, key: str, name: str) -> KnownFile | None:
    for model in folder.models(key):
        for file in model.record.files:
            if file.name == name and file.version:
                is_weak = file.version.startswith(WEAK)
                return model.folder / FILES / name, FileInfo(file.version, file.size_bytes, not is_weak)
    return None


def _coming_file(folder: ModelFolder, key: str, name: str) -> KnownFile | None:
    for part in folder.parts(key):
        known = folder.peek(part).files.get(name)
        path = part / FILES / name
        if known is not None and known.version and known.size_bytes is not None and path.exists():
            return path, FileInfo(known.version, known.size_bytes, known.is_resumable)
    return None


# The side that wants files


class PeerStore:
    """A `Store` (`sloop.serve.stores`) that reads the files of a model from peers first, then from the model's own
    store. Its calls block, in the thread of a transfer; its connections belong to the event loop `loop`."""

    def __init__(
        self,
        source: ModelSource,
        origin: Store,
        peers: Sequence[Endpoint],
        *,
        token: bytes,
        context: ssl.SSLContext | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._source, self._origin, self._loop = source, origin, loop
        self._token, self._context = token, context
        self._peers = list(peers)
        """Those that have not failed."""
        self._read: dict[str, Endpoint] = {}
        """By file, the peer from which it was read last."""

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        """See `Store`. If a file is opened again, the last transfer failed or brought wrong bytes: its peer is not
        asked again."""
        failed = self._read.pop(file.name, None)
        if failed in self._peers:
            self._peers.remove(failed)
        while self._peers and not file.name.endswith(MANIFEST):
            peer = self._peers[0]
            try:
                download = self._open(peer, file, watch, start, version)
            except (InterruptedTransferError, MachineError) as error:
                _log.info("%s is not read from %s: %s", file, host_and_port(*peer), error)
                self._peers.remove(peer)
            else:
                self._read[file.name] = peer
                return download
        return self._origin.open(file, watch, start=start, version=version)

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        """See `Store`."""
        return self._origin.version(file, watch, known)

    def _open(self, peer: Endpoint, file: StoredFile, watch: Watch, start: int, version: str) -> Download:
        link = self._wait(_PeerLink.to(peer, self._token, self._context), watch)
        try:
            raw = self._wait(link.ask(FileRange(self._source.key, file.name)), watch)
            info = msgspec.msgpack.decode(raw, type=FileInfo)
            if info.size_bytes < 0 or not info.version:
                raise ProtocolError(f"{info} says nothing of a file")
            if not self._is_current(file, watch, info.version):
                raise InterruptedTransferError(f"{file}: a peer has another version", "fetch it from the store")
            if start > info.size_bytes or info.version != version:
                start = 0
            wanted = FileRange(self._source.key, file.name, info.version, start)
            taken = self._wait(link.take_over(), watch)
            if taken is not None:
                return ChunksDownload(self, link, taken, wanted, info, watch)
            return PeerDownload(self, link, wanted, info, watch)
        except (msgspec.DecodeError, ProtocolError) as error:
            self.end(link)
            raise InterruptedTransferError(f"{file}: a peer answers {error}", "fetch it from the store") from error
        except BaseException:
            self.end(link)
            raise

    def _is_current(self, file: StoredFile, watch: Watch, version: str) -> bool:
        """Whether the store has this version; true if the store cannot be reached."""
        if file.name == self._source.name and self._source.sha256:
            return True  # what comes is compared with it
        try:
            return self._origin.version(file, watch, version) == version
        except (InterruptedTransferError, MachineError) as error:
            _log.warning("%s; the version of a peer is taken", error)
            return True

    def call(self, coroutine: Any) -> "concurrent.futures.Future[Any]":  # noqa: ANN401  # any coroutine
        """Run a coroutine in the event loop."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop has been closed
            coroutine.close()
            raise InterruptedTransferError("the process ends", "fetch it again") from error

    def end(self, link: "_PeerLink") -> None:
        """Close a connection."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(link.close)

    def _wait(self, coroutine: Any, watch: Watch) -> Any:  # noqa: ANN401  # of any result
        watch.begin(in_body=False)
        return waited(self.call(coroutine), watch)


def waited(future: "concurrent.futures.Future[T]", watch: Watch) -> T:
    """The result of a coroutine in the event loop; the thread of a transfer waits for it here."""
    try:
        while not future.done():
            concurrent.futures.wait([future], POLL_S)
            if not future.done():
                watch.received(0)
        return future.result()
    except concurrent.futures.CancelledError:
        raise InterruptedTransferError("a peer has gone", "check the network") from None
    except BaseException:
        future.cancel()
        raise


class ServedStore(PeerStore):
    """The `Store` of a model's blocks: the process of the deployment at `server`, which has cut it. Nobody else has
    another version of them, because their names say which one they are."""

    def __init__(
        self,
        source: ModelSource,
        server: Endpoint,
        *,
        token: bytes,
        context: ssl.SSLContext | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(source, self, (), token=token, context=context, loop=loop)
        self._server = server

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Download:
        """See `Store`."""
        if file.name.endswith(MANIFEST):
            raise StoreError("there are no further checksums", where=str(file), help="none are needed", status=404)
        try:
            return self._open(self._server, file, watch, start, version)
        except MachineError as error:
            raise InterruptedTransferError(error.what, "is the server there?") from error

    def version(self, file: StoredFile, watch: Watch, known: str) -> str:
        """See `Store`."""
        return known


def checksum_in(version: str) -> str:
    """The SHA-256 of a whole file, if its version is that; else empty."""
    return version.removeprefix(CONTENT) if version.startswith(CONTENT) else ""


class PeerDownload:
    """A file that comes from a peer; a `Download`."""

    has_end = True
    is_copy = True

    def __init__(self, store: PeerStore, link: "_PeerLink", first: FileRange, info: FileInfo, watch: Watch) -> None:
        self.start, self.version, self.sha256 = first.start, info.version, checksum_in(info.version)
        self.total_bytes: int | None = info.size_bytes
        self.is_resumable = info.is_resumable
        self._store, self._link, self._first, self._watch = store, link, first, watch
        self._asked_bytes = first.start
        self._size = info.size_bytes
        self._under_way: deque[concurrent.futures.Future[bytes]] = deque()

    def read(self) -> bytes:
        """The next bytes."""
        while self._asked_bytes < self._size and len(self._under_way) < AHEAD:
            size = min(RANGE_BYTES, self._size - self._asked_bytes)
            wanted = msgspec.structs.replace(self._first, start=self._asked_bytes, size=size)
            self._under_way.append(self._store.call(self._link.ask(wanted)))
            self._asked_bytes += size
        if not self._under_way:
            return b""
        found = waited(self._under_way.popleft(), self._watch)
        self._watch.received(len(found))
        return found

    def close(self) -> None:
        for each in self._under_way:
            each.cancel()
        self._store.end(self._link)


class ChunksDownload:
    """A file that comes from a peer in chunks, over a connection that belongs to the thread of a transfer; a
    `Download`."""

    has_end = True
    is_copy = True

    def __init__(
        self,
        store: PeerStore,
        link: "_PeerLink",
        taken: tuple[socket.socket, bytes],
        first: FileRange,
        info: FileInfo,
        watch: Watch,
    ) -> None:
        self.start, self.version, self.sha256 = first.start, info.version, checksum_in(info.version)
        self.total_bytes: int | None = info.size_bytes
        self.is_resumable = info.is_resumable
        self._store, self._link, self._watch = store, link, watch
        self._at, self._size = first.start, info.size_bytes
        self._left = 0
        """Of the present chunk."""
        self._socket, self._before = taken
        """What had come before belongs to the first frames."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _time_value(POLL_S))
        self._number = link.next_number()
        payload = encode(msgspec.structs.replace(first, size=self._size - self._at, in_chunks=True))
        try:
            self._socket.sendall(pack_head(FrameKind.FETCH, self._number, 0, len(payload)) + payload)
        except OSError as error:
            self.close()
            raise InterruptedTransferError(f"a peer has gone: {error.strerror or error}", "check the network") from None
        watch.begin(in_body=True)

    def read(self) -> bytes:
        """The next bytes."""
        try:
            while not self._left and self._at < self._size:
                self._begin_chunk()
        except ProtocolError as error:
            raise InterruptedTransferError(f"a peer sends {error}", "fetch it from the store") from error
        found = self._exactly(min(self._left, READ_BYTES))
        self._left -= len(found)
        self._at += len(found)
        return found

    def close(self) -> None:
        self._socket.close()
        self._store.end(self._link)

    def _begin_chunk(self) -> None:
        """Read the head of a frame."""
        head = unpack_head(self._exactly(HEADER.size))
        if head.kind is FrameKind.ALIVE and not head.payload_bytes:
            return
        if head.kind is not FrameKind.BLOCK or head.subject != self._number:
            raise ProtocolError(f"a {head.kind.name} frame that nobody has asked for")
        if head.value < 0 and head.payload_bytes <= TEXT_BYTES_MAX:
            why = str(self._exactly(head.payload_bytes), "utf-8", "replace")
            raise InterruptedTransferError(f"a peer says: {why}", "fetch it from the store")
        if head.value != self._at or not 0 < head.payload_bytes <= self._size - self._at:
            raise ProtocolError(f"{head.payload_bytes} B from {head.value} on instead of those from {self._at} on")
        self._left = head.payload_bytes

    def _exactly(self, size: int) -> bytes:
        """So many bytes. InterruptedTransferError if they do not come."""
        if len(self._before) >= size:
            found, self._before = self._before[:size], self._before[size:]
            return found
        room = memoryview(bytearray(size))
        before, self._before = self._before, b""
        filled = len(before)
        room[:filled] = before
        silent_s = 0.0
        while filled < size:
            try:
                count = self._socket.recv_into(room[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:  # nothing for `POLL_S`
                silent_s += POLL_S
                self._watch.received(0)
                if silent_s > SILENT_S:
                    what = f"a peer has been silent for {SILENT_S:g} s"
                    raise InterruptedTransferError(what, "check the network") from None
                continue
            except OSError as error:
                what = f"a peer has gone: {error.strerror or error}"
                raise InterruptedTransferError(what, "check the network") from None
            if not count:
                raise InterruptedTransferError(f"a peer has gone: {CLOSED}", "check the network")
            filled, silent_s = filled + count, 0.0
            self._watch.received(count)
        return bytes(room)


class _PeerLink:
    """A connection to a peer, in the event loop."""

    def __init__(self, link: NetworkLink) -> None:
        self._link = link
        self._asked: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        """By number of the request, how many bytes it asks for, and the future of the answer."""
        self._last = 0
        self._ended = ""
        link.attach(self._on_frame, self._on_end)
        link.keep_alive()

    @classmethod
    async def to(cls, endpoint: Endpoint, token: bytes, context: ssl.SSLContext | None) -> "_PeerLink":
        """Connect. Raises `MachineError`."""
        return cls(await connect(endpoint, token, Purpose.WEIGHTS, context=context))

    async def ask(self, wanted: FileRange) -> bytes:
        """The answer to a request. Raises `InterruptedTransferError` if there is none."""
        if self._ended:
            raise InterruptedTransferError(f"a peer has gone: {self._ended}", "check the network")
        number = self.next_number()
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = wanted.size, answer
        self._link.send(FrameKind.FETCH, number, payload=[encode(wanted)])
        return await answer

    def next_number(self) -> int:
        """Of the next request."""
        self._last += 1
        return self._last

    async def take_over(self) -> tuple[socket.socket, bytes] | None:
        """See `NetworkLink.take_over`."""
        return self._link.take_over()

    def close(self) -> None:
        self._link.close()
        self._on_end(CLOSED)

    def _on_frame(self, frame: Frame) -> None:
        size, answer = self._asked.pop(frame.subject, (-1, None))
        if frame.kind is not FrameKind.BLOCK or answer is None:
            raise ProtocolError(f"a {frame.kind.name} frame that nobody has asked for")
        if answer.done():
            return  # given up meanwhile
        if frame.value < 0:
            why = str(frame.payload, "utf-8", "replace")
            answer.set_exception(InterruptedTransferError(f"a peer says: {why}", "fetch it from the store"))
        elif size and len(frame.payload) != size:
            raise ProtocolError(f"{len(frame.payload)} B instead of {size}")
        else:
            answer.set_result(bytes(frame.payload))

    def _on_end(self, why: str) -> None:
        self._ended = self._ended or why
        asked, self._asked = self._asked, {}
        for _, answer in asked.values():
            if not answer.done():
                answer.set_exception(InterruptedTransferError(f"a peer has gone: {why}", "check the network"))
