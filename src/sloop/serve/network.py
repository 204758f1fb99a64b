"""Connections between the machines of a deployment: TCP, with both ends proved to know its token, and frames.

Nothing that a stranger sends is parsed: until the other end has proved that it knows the token, it may send a fixed
number of bytes in a bounded time, of which only a digest is compared. The token itself is never sent, and each proof
holds for one connection. Without TLS what follows can be read, and changed, by whoever is in between.

    server → client   MAGIC · nonce
    client → server   purpose · nonce · HMAC(token, both nonces, purpose)
    server → client   HMAC(token, both nonces, purpose), of another label

After that both sides send frames (`sloop.serve.transport`). A link that beats says every `BEAT_S` that it lives, and
ends when it has heard nothing for `SILENT_S`: a machine that was cut off would otherwise be noticed after minutes.
"""

import asyncio
import hmac
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final, cast

import msgspec

from sloop.errors import InputError, MachineError
from sloop.serve.messages import encode
from sloop.serve.transport import CLOSED, Frame, FrameKind, FrameReader, Head, ProtocolError, pack_head
from sloop.shared_memory import Address, Buffer

MAGIC: Final = b"sloop\x01"
"""With the version of the handshake."""
NONCE_BYTES: Final = 32
DIGEST_BYTES: Final = 32
TOKEN_BYTES_MIN: Final = 16
HANDSHAKE_S_MAX: Final = 5.0
STRANGERS_MAX: Final = 64
"""Connections that have not proved themselves; a further one is closed."""
BEAT_S: Final = 0.5
SILENT_S: Final = 2.0
FETCH_S_MAX: Final = 10.0
"""In which a block must come from another machine."""
BACKLOG: Final = 128

Endpoint = tuple[str, int]
"""Host and port."""


class Purpose(IntEnum):
    """What a connection is for."""

    AGENT = 1
    """An agent's connection to the deciding process."""
    BLOCKS = 2
    """Blocks are fetched from an agent."""


class NetworkLink(asyncio.BufferedProtocol):
    """One end of a connection between machines (`sloop.serve.transport.FrameLink`).

    `purpose` is set on the side that connects; the other learns it. `on_open` is called when both sides have proved
    themselves; then `attach` says who is told of frames and of the end. `room` says where a large payload is received.
    """

    def __init__(
        self,
        token: bytes,
        on_open: Callable[["NetworkLink"], None],
        *,
        purpose: Purpose | None = None,
        room: Callable[[Head], memoryview] | None = None,
    ) -> None:
        self.purpose = purpose
        self.peer = ""
        """The address of the other end."""
        self._token, self._on_open = token, on_open
        self._is_client = purpose is not None
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._expected = memoryview(bytearray(_greeting_bytes(is_client=self._is_client)))
        self._arrived = 0
        self._proof = b""
        """What the server answers, for the client to compare."""
        self._reader = FrameReader(self._on_any_frame, room)
        self._on_frame: Callable[[Frame], None] = lambda _: None
        self._on_end: Callable[[str], None] = lambda _: None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = 0.0
        self.is_open = self._is_closed = False

    # What others call

    def attach(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        """See `sloop.serve.transport.FrameLink`."""
        self._on_frame, self._on_end = on_frame, on_end
        if self.is_open and self._is_closed:  # it has ended before anybody listened
            self._loop.call_soon(on_end, CLOSED)

    def send(self, kind: FrameKind, subject: int = 0, value: int = 0, payload: Sequence[Buffer] = ()) -> None:
        """See `sloop.serve.transport.FrameLink`. What cannot be sent at once is kept, without a copy."""
        transport = self._transport
        if transport is None or self._is_closed:
            return
        size = sum(map(len, payload))
        transport.writelines([pack_head(kind, subject, value, size), *payload])

    def close(self) -> None:
        """See `sloop.serve.transport.FrameLink`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.close() if self.is_open else self._transport.abort()

    @property
    def local_host(self) -> str:
        """The address by which the other end can reach this machine."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    def beat(self) -> None:
        """From now on say that this end lives, and notice when the other end does not."""
        self._heard_s = self._loop.time()
        self._beat()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        self._timer = self._loop.call_later(HANDSHAKE_S_MAX, self._end, f"no greeting within {HANDSHAKE_S_MAX:g} s")
        if not self._is_client:
            self._transport.write(MAGIC + self._nonce)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer() if self.is_open else self._expected[self._arrived :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_closed:
            return
        if not self.is_open:
            self._arrived += nbytes
            if self._arrived == len(self._expected):
                self._greet(bytes(self._expected))
            return
        self._heard_s = self._loop.time()
        try:
            self._reader.fill(nbytes)
        except ProtocolError as error:
            self._end(str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(CLOSED)
        self._transport = None

    # The handshake

    def _greet(self, arrived: bytes) -> None:
        """A part of the handshake has arrived whole."""
        assert self._transport is not None
        if not self._is_client:
            theirs, digest = arrived[1 : 1 + NONCE_BYTES], arrived[1 + NONCE_BYTES :]
            nonces = self._nonce + theirs
            if not hmac.compare_digest(digest, _digest(self._token, b"client", arrived[:1] + nonces)):
                self._end("it does not know the token of this deployment")
            elif arrived[0] not in {each.value for each in Purpose}:
                self._end(f"it connects for the unknown purpose {arrived[0]}")
            else:
                self.purpose = Purpose(arrived[0])
                self._transport.write(_digest(self._token, b"server", arrived[:1] + nonces))
                self._open()
        elif not self._proof:
            if not arrived.startswith(MAGIC):
                self._end("what listens there is no process of sloop, or of another version")
                return
            assert self.purpose is not None
            purpose, nonces = bytes([self.purpose]), arrived[len(MAGIC) :] + self._nonce
            self._proof = _digest(self._token, b"server", purpose + nonces)
            self._expected, self._arrived = memoryview(bytearray(DIGEST_BYTES)), 0
            self._transport.write(purpose + self._nonce + _digest(self._token, b"client", purpose + nonces))
        elif hmac.compare_digest(arrived, self._proof):
            self._open()
        else:
            self._end("what listens there does not know the token of this deployment")

    def _open(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self.is_open = True
        self._on_open(self)

    def _on_any_frame(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.ALIVE:
            self._on_frame(frame)

    def _beat(self) -> None:
        silent_s = self._loop.time() - self._heard_s
        if silent_s > SILENT_S:
            self._end(f"it has been silent for {silent_s:.1f} s")
            return
        self.send(FrameKind.ALIVE)
        self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _end(self, why: str) -> None:
        if self._is_closed:
            return
        transport = self._transport
        self.close()
        if transport is not None:
            transport.abort()  # what is unsent would keep a dead connection
        self._on_end(why)


def _greeting_bytes(*, is_client: bool) -> int:
    """How many bytes the other end sends first."""
    return len(MAGIC) + NONCE_BYTES if is_client else 1 + NONCE_BYTES + DIGEST_BYTES


def _digest(token: bytes, label: bytes, text: bytes) -> bytes:
    return hmac.digest(token, label + text, "sha256")


class Listener:
    """Accepts connections of processes that know the token, and passes them to `accept`. Create it by `listen`."""

    def __init__(self, token: bytes, accept: Callable[[NetworkLink], None]) -> None:
        self._token, self._accept = token, accept
        self._strangers: set[NetworkLink] = set()
        self._server: asyncio.Server | None = None
        self.refused: int = 0
        """Connections that have not proved themselves."""

    @classmethod
    async def listen(
        cls,
        endpoint: Endpoint,
        token: bytes,
        accept: Callable[[NetworkLink], None],
        context: ssl.SSLContext | None = None,
    ) -> "Listener":
        """Listen on an address; port 0 selects a free one. Raises `MachineError` if that is not possible."""
        made = cls(token, accept)
        try:
            made._server = await asyncio.get_running_loop().create_server(
                made._stranger, *endpoint, ssl=context, backlog=BACKLOG
            )
        except OSError as error:
            where = f"{endpoint[0]}:{endpoint[1]}"
            raise MachineError(f"cannot listen on {where}: {error}", help="is that an address of this host?") from error
        return made

    @property
    def port(self) -> int:
        """The port that was chosen."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Accept no more connections; those that were accepted stay."""
        if self._server is not None:
            self._server.close()
        for link in list(self._strangers):
            link.close()

    def _stranger(self) -> NetworkLink:
        link = NetworkLink(self._token, self._welcome)
        if len(self._strangers) >= STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            self._forget(oldest)
            oldest.close()
        self._strangers.add(link)
        link.attach(lambda _: None, lambda _: self._forget(link))
        return link

    def _forget(self, link: NetworkLink) -> None:
        self._strangers.discard(link)
        self.refused += 1

    def _welcome(self, link: NetworkLink) -> None:
        self._strangers.discard(link)
        link.attach(lambda _: None, lambda _: None)
        self._accept(link)


async def connect(
    endpoint: Endpoint,
    token: bytes,
    purpose: Purpose,
    *,
    context: ssl.SSLContext | None = None,
    room: Callable[[Head], memoryview] | None = None,
) -> NetworkLink:
    """A connection to a process of the deployment. Raises `MachineError` if there is none, or if it is a stranger."""
    opened = asyncio.get_running_loop().create_future()
    where = f"{endpoint[0]}:{endpoint[1]}"

    def on_open(link: NetworkLink) -> None:
        if not opened.done():
            opened.set_result(link)

    def on_end(why: str) -> None:
        if not opened.done():
            hint = "; it does not know the token that was given here, perhaps" if why == CLOSED else ""
            opened.set_exception(MachineError(f"{where}: {why}{hint}", help="compare address and token file"))

    def make() -> NetworkLink:
        link = NetworkLink(token, on_open, purpose=purpose, room=room)
        link.attach(lambda _: None, on_end)
        return link

    try:
        async with asyncio.timeout(HANDSHAKE_S_MAX):
            await asyncio.get_running_loop().create_connection(make, *endpoint, ssl=context)
            return cast(NetworkLink, await opened)
    except (OSError, TimeoutError) as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise MachineError(
            f"{where} cannot be reached: {why}", help="is the server there, and the port open?"
        ) from error


def read_token(path: Path) -> bytes:
    """The token in a file. Raises `InputError` for one that cannot be read or is too short."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        fix = "write one, for example with `openssl rand -hex 32`, readable only for you"
        raise InputError(f"the token cannot be read: {error.strerror}", where=str(path), help=fix) from error
    if len(token) < TOKEN_BYTES_MIN:
        what = f"the token has {len(token)} bytes; at least {TOKEN_BYTES_MIN} are required"
        raise InputError(what, where=str(path), help="make one with `openssl rand -hex 32`")
    return token


# Blocks of other machines


def machine() -> str:
    """Names the machine as far as processes of the same name can read each other's arenas: the kernel's boot, and the
    namespaces of processes and network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return "/".join((boot, *map(str, spaces)))


class BlockLost(Exception):
    """A block cannot be fetched: its machine has gone, or does not answer."""


class BlockServer:
    """Sends blocks of this machine to processes of others. `read` finds the memory of a block."""

    def __init__(self, read: Callable[[Address], memoryview]) -> None:
        self._read = read
        self._links: set[NetworkLink] = set()
        self._decoder = msgspec.msgpack.Decoder(Address)

    def accept(self, link: NetworkLink) -> None:
        """Serve one more connection."""
        self._links.add(link)
        link.attach(lambda frame: self._on_frame(link, frame), lambda _: self._links.discard(link))

    def close(self) -> None:
        """End all connections."""
        for link in self._links:
            link.close()
        self._links.clear()

    def _on_frame(self, link: NetworkLink, frame: Frame) -> None:
        if frame.kind is not FrameKind.FETCH:
            raise ProtocolError(f"a {frame.kind.name} frame instead of a request for a block")
        try:
            memory = self._read(self._decoder.decode(frame.payload))
        except (ValueError, msgspec.DecodeError) as error:
            link.send(FrameKind.BLOCK, frame.subject, -1, [str(error).encode()])
        else:
            link.send(FrameKind.BLOCK, frame.subject, 0, [memory])


class _Fetch:
    """A block that is under way."""

    def __init__(self, memory: memoryview, done: "asyncio.Future[None]") -> None:
        self.memory, self.done = memory, done


class _Peer:
    """The connection to the agent of one machine."""

    def __init__(self, client: "BlockClient", endpoint: Endpoint) -> None:
        self._client, self.endpoint = client, endpoint
        self._link: NetworkLink | None = None
        self._opening = asyncio.Lock()
        self._under_way: dict[int, _Fetch] = {}
        self._receiving: _Fetch | None = None
        """Into whose memory the link writes what comes."""
        self._last = 0

    async def fetch(self, block: Address, memory: memoryview) -> None:
        """Receive a block into `memory`."""
        link = await self._opened()
        self._last = number = self._last + 1
        fetch = self._under_way[number] = _Fetch(memory, asyncio.get_running_loop().create_future())
        try:
            link.send(FrameKind.FETCH, number, payload=[encode(block)])
            await fetch.done
        except BaseException:
            self._under_way.pop(number, None)
            if self._receiving is fetch:
                self.close()  # else it would write into memory that others use
            raise

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._receiving = None
        self._fail(CLOSED)

    async def _opened(self) -> NetworkLink:
        async with self._opening:
            if self._link is None:
                token, context = self._client.token, self._client.context
                link = await connect(self.endpoint, token, Purpose.BLOCKS, context=context, room=self._room)
                link.attach(self._on_frame, self._fail)
                self._link = link
            return self._link

    def _room(self, head: Head) -> memoryview:
        fetch = self._under_way.get(head.subject)
        if head.kind is FrameKind.BLOCK and fetch is not None and len(fetch.memory) == head.payload_bytes:
            self._receiving = fetch
            return fetch.memory
        return memoryview(bytearray(head.payload_bytes))  # given up meanwhile, or an error

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.BLOCK:
            raise ProtocolError(f"a {frame.kind.name} frame instead of a block")
        self._receiving = None
        fetch = self._under_way.pop(frame.subject, None)
        if fetch is None or fetch.done.done():
            return
        if frame.value < 0:
            fetch.done.set_exception(BlockLost(str(frame.payload, "utf-8", "replace")))
        elif len(frame.payload) != len(fetch.memory):
            fetch.done.set_exception(BlockLost(f"a block of {len(fetch.memory)} B came as {len(frame.payload)} B"))
        else:
            if frame.payload is not fetch.memory:  # a small one, which came with others
                fetch.memory[:] = frame.payload
            fetch.done.set_result(None)

    def _fail(self, why: str) -> None:
        self._link = None
        under_way, self._under_way = self._under_way, {}
        for fetch in under_way.values():
            if not fetch.done.done():
                fetch.done.set_exception(BlockLost(why))


class BlockClient:
    """Fetches blocks from the agents of other machines; one connection to each, opened when it is first needed."""

    def __init__(self, token: bytes, context: ssl.SSLContext | None = None) -> None:
        self.token, self.context = token, context
        self._peers: dict[int, _Peer] = {}
        """By holder."""

    def set_endpoints(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Where the agents are, by the holders whose blocks they send. Connections to others are closed."""
        for holder, peer in list(self._peers.items()):
            if endpoints.get(holder) != peer.endpoint:
                del self._peers[holder]
                peer.close()
        for holder, endpoint in endpoints.items():
            if holder not in self._peers:
                self._peers[holder] = _Peer(self, endpoint)

    async def fetch(self, block: Address, memory: memoryview) -> None:
        """Receive a block into `memory`, which has its size. Raises `BlockLost`."""
        peer = self._peers.get(block.holder)
        if peer is None:
            raise BlockLost("its machine has gone")
        try:
            async with asyncio.timeout(FETCH_S_MAX):
                await peer.fetch(block, memory)
        except MachineError as error:
            raise BlockLost(error.what) from error
        except TimeoutError as error:
            raise BlockLost(f"it did not come within {FETCH_S_MAX:g} s") from error

    def close(self) -> None:
        """Close all connections; what is under way is lost."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
