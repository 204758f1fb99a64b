"""Fetches model files from peers: other machines of the deployment that have the files, or are receiving them.

A `FileServer` answers HTTP requests for ranges of the files of a cache (`sloop.serve.weights.cache`), on the port of
its node, after both ends have proved that they know the token (`sloop.serve.network`). It also sends a file that its
own machine is still receiving, as the bytes arrive. So several machines form a chain in which each link carries each
byte once, and all of them have the file only slightly later than a single machine would.

A `PeerStore` takes the place of the store of a model and reads a file from a peer. If this peer dies, does not have the
file, or stops sending, the next peer continues at the byte where the transfer broke off, and after the last peer the
store does.

A file from a peer is accepted only if the store confirms that its version is the present one, or if its checksum is
known and matches at the end. If the store cannot be reached, the version of the peer is accepted, like that of a cached
copy.
"""

import asyncio
import logging
import os
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from sloop.errors import MachineError
from sloop.serve.network import STALLED_S_MAX, Endpoint, NetworkLink, Purpose, joined
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.folder import FILES, ModelFolder
from sloop.serve.weights.sources import (
    Download,
    InterruptedTransferError,
    ModelSource,
    Store,
    StoredFile,
    StoreError,
    Watch,
    is_strong,
)
from sloop.serve.weights.transfer import MANIFEST
from sloop.serve.weights.web import ask, download_of, range_from, version_in
from sloop.text import host_and_port

CHUNK_BYTES: Final = 256 << 10
"""What is read of a file at a time. It may be as little as what has just come."""
HEAD_BYTES_MAX: Final = 8192
GROWTH_S: Final = 0.001
"""How often to check whether a file that is being received has grown."""
BEGIN_S: Final = 0.5
"""How long a request waits for this machine's own transfer of the file to begin: a peer that was ordered to fetch the
file at the same time may ask before it has begun."""
LOOK_S: Final = 0.01
"""How often to check whether a file has begun to come."""
STALLED_S: Final = 5.0
"""If a file has not begun, or not grown, for this long, the answer ends, and the reader continues with another peer."""
SILENT_S: Final = 6.0
"""A peer that has sent nothing for this long has gone."""
REQUEST: Final = re.compile(r"GET /(?P<key>[0-9a-f]{16})/(?P<name>\S+) HTTP/1\.1")
START: Final = re.compile(r"bytes=(\d{1,18})-")

_log: Final = logging.getLogger("sloop.peers")


class KnownFile(NamedTuple):
    """A file of a model that can be sent, perhaps while it is being received."""

    path: Path
    version: str
    size_bytes: int
    """Of the whole file."""


def nowhere(key: str, name: str) -> KnownFile | None:
    """For a `FileServer` that has no files outside its caches."""
    return None


def _tag(version: str) -> str:
    """A version as an ETag."""
    return f'"{quote(version, safe="")}"'


# The side that has files


class FileServer:
    """Sends the files in caches, complete or not. `caches` returns those that there are now, the first to be searched
    first; `find` returns a file outside the caches, by the key of its model's location and its name."""

    def __init__(
        self, caches: Callable[[], Sequence[WeightsCache]], find: Callable[[str, str], KnownFile | None] = nowhere
    ) -> None:
        self._caches, self._find = caches, find
        self._answers: set[asyncio.Task[None]] = set()

    def accept(self, link: NetworkLink) -> None:
        """Answer the request that comes over one more connection."""
        loop, transport, reader = asyncio.get_running_loop(), link.hand_over(), asyncio.StreamReader(HEAD_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(protocol)  # at once: what comes next is for it
        protocol.connection_made(transport)
        answer = loop.create_task(self._serve(reader, asyncio.StreamWriter(transport, protocol, reader, loop)))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    def close(self) -> None:
        """End all connections."""
        for answer in self._answers:
            answer.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(STALLED_S):
                head = await reader.readuntil(b"\r\n\r\n")
            if await self._answer(writer, head.decode("latin-1")):
                writer.close()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError) as error:
            _log.debug("a file is sent no further: %s", error)
        finally:
            if not writer.is_closing():
                writer.transport.abort()

    async def _answer(self, writer: asyncio.StreamWriter, head: str) -> bool:
        """Answer a request; False if the file does not come whole."""
        line, _, rest = head.partition("\r\n")
        pairs = (field.partition(":") for field in rest.split("\r\n"))
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        request = REQUEST.fullmatch(line)
        found = await self._opened(request["key"], unquote(request["name"])) if request is not None else None
        if found is None:
            writer.write(b"HTTP/1.1 404 Not here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return True
        fd, known = found
        try:
            tag, size = _tag(known.version), known.size_bytes
            given = START.fullmatch(headers.get("range", "")) if headers.get("if-range") == tag else None
            start = int(given[1]) if given is not None and int(given[1]) < size else 0
            status = f"206 OK\r\nContent-Range: bytes {start}-{size - 1}/{size}" if start else "200 OK"
            fields = f"Content-Length: {size - start}\r\nETag: {tag}\r\nConnection: close"
            writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode())
            return await self._send(writer, fd, start, size)
        finally:
            os.close(fd)

    async def _send(self, writer: asyncio.StreamWriter, fd: int, at: int, end: int) -> bool:
        """Send a part of an open file as it grows; False if it grows no more, or if it was deleted before its end."""
        loop = asyncio.get_running_loop()
        grown_s = loop.time()
        while at < end:
            state = os.fstat(fd)
            if state.st_size > at:
                size = min(CHUNK_BYTES, state.st_size - at, end - at)
                chunk = await loop.run_in_executor(None, os.pread, fd, size, at)
                writer.write(chunk)
                async with asyncio.timeout(STALLED_S_MAX):
                    await writer.drain()
                at, grown_s = at + len(chunk), loop.time()
            elif loop.time() - grown_s > STALLED_S or not state.st_nlink:
                return False
            else:
                await asyncio.sleep(GROWTH_S)
        return True

    async def _opened(self, key: str, name: str) -> tuple[int, KnownFile] | None:
        """A descriptor of a file, which stays with it when it is moved. None if this machine does not have it, and its
        transfer of the model has had time to begin, or to reach this file."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while True:
            found = await loop.run_in_executor(None, self._open, key, name)
            within_s = STALLED_S if any(cache.is_fetching(key) for cache in self._caches()) else BEGIN_S
            if found is not None or loop.time() - begin_s > within_s:
                return found
            await asyncio.sleep(LOOK_S)

    def _open(self, key: str, name: str) -> tuple[int, KnownFile] | None:
        for _ in range(2):  # a transfer may complete and move it in between
            every = (known_file(cache.models, key, name) for cache in self._caches())
            known = next((found for found in every if found is not None), None) or self._find(key, name)
            try:
                return None if known is None else (os.open(known.path, os.O_RDONLY | os.O_CLOEXEC), known)
            except OSError as error:
                _log.debug("%s cannot be opened: %s", name, error)
        return None


def known_file(folder: ModelFolder, key: str, name: str) -> KnownFile | None:
    """A file of the models of one location, complete or being received; None if there is no such file, or if its
    version or length is unknown."""
    # A thread may complete a file after the complete ones were looked at, and before those that are being received.
    return _complete_file(folder, key, name) or _coming_file(folder, key, name) or _complete_file(folder, key, name)


def _complete_file(folder: ModelFolder, key: str, name: str) -> KnownFile | None:
    for model in folder.models(key):
        for file in model.record.files:
            if file.name == name and file.version:
                return KnownFile(model.folder / FILES / name, file.version, file.size_bytes)
    return None


def _coming_file(folder: ModelFolder, key: str, name: str) -> KnownFile | None:
    for part in folder.parts(key):
        known = folder.peek(part).files.get(name)
        path = part / FILES / name
        if known is not None and known.version and known.size_bytes is not None and path.exists():
            return KnownFile(path, known.version, known.size_bytes)
    return None


# The side that wants files


class PeerStore:
    """A `Store` that reads the files of a model from peers first, then from the model's own store."""

    def __init__(
        self,
        source: ModelSource,
        origin: Store,
        peers: Sequence[Endpoint],
        *,
        token: bytes,
        context: ssl.SSLContext | None,
    ) -> None:
        self._source, self._origin, self._token, self._context = source, origin, token, context
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
            except (InterruptedTransferError, MachineError, StoreError) as error:
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
        place = host_and_port(*peer)
        with watch.asking():
            sock = joined(peer, self._token, Purpose.WEIGHTS, self._context)
            wanted = range_from(start, _tag(version)) if is_strong(version) else {}
            target = f"/{self._source.key}/{quote(file.name)}"
            answer = ask(file, sock, place, target, wanted, watch, SILENT_S)
        if answer.status not in (200, 206):
            answer.close()
            raise InterruptedTransferError(f"{file} is not on this peer", "fetch it from the store")
        download = download_of(file, answer, watch, start)
        found = unquote(version_in(answer.headers).strip('"'))
        try:
            is_current = bool(found) and self._is_current(file, watch, found)
            answer.watch_again()
        except BaseException:
            answer.close()
            raise
        if not is_current:
            answer.close()
            raise InterruptedTransferError(f"{file}: a peer has another version", "fetch it from the store")
        return replace(download, version=found, is_copy=True)

    def _is_current(self, file: StoredFile, watch: Watch, version: str) -> bool:
        """Whether the store has this version; true if the store cannot be reached."""
        if file.name == self._source.name and self._source.sha256:
            return True  # what comes is compared with it
        try:
            return self._origin.version(file, watch, version) == version
        except (InterruptedTransferError, MachineError) as error:
            _log.warning("%s; the version of a peer is taken", error)
            return True


class ServedStore(PeerStore):
    """The `Store` of a model's blocks: the process of the deployment at `server`, which has cut it. Nobody else has
    another version of them, because their names say which one they are."""

    def __init__(self, source: ModelSource, server: Endpoint, *, token: bytes, context: ssl.SSLContext | None) -> None:
        super().__init__(source, self, (), token=token, context=context)
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
