"""Connections between the machines of a deployment: TCP, with both ends proved to know its token, and frames.

Nothing that a stranger sends is parsed: until the other end has proved that it knows the token, it may send a fixed
number of bytes in a bounded time, of which only a digest is compared. Strangers are accepted only so often that they
take a small share of the time; further ones wait in the kernel. The token itself is never sent, and each proof
holds for one connection. Without TLS what follows can be read, and changed, by whoever is in between.

    server → client   MAGIC · nonce
    client → server   purpose · nonce · HMAC(token, both nonces, purpose)
    server → client   HMAC(token, both nonces, purpose), of another label

After that both sides send frames (`sloop.serve.transport`). A link that beats sends a heartbeat every `BEAT_S`, and
ends when it has received nothing for `SILENT_S`: a machine that was cut off would otherwise be noticed after minutes.

With TLS (`NodeTls`) each side also shows a certificate of the deployment's authority before any of this. Names in
certificates are not compared: machines are known by address, and the token says who belongs to the deployment.
"""

import asyncio
import errno
import hmac
import logging
import os
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import cycle
from pathlib import Path
from typing import Final, cast

import msgspec
from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.serve.edge.handshakes import TimeShare, measured_ns
from sloop.serve.edge.tcp import bind
from sloop.serve.messages import encode
from sloop.serve.transport import (
    CLOSED,
    PAYLOAD_BYTES_MAX,
    SCRATCH_BYTES,
    Frame,
    FrameKind,
    FrameReader,
    Head,
    ProtocolError,
    pack_head,
)
from sloop.shared_memory import Address, Buffer
from sloop.text import host_and_port

MAGIC: Final = b"sloop\x01"
"""With the version of the handshake."""
NONCE_BYTES: Final = 32
DIGEST_BYTES: Final = 32
HANDSHAKE_S_MAX: Final = 5.0
STRANGERS_MAX: Final = 64
"""Connections that have not proved themselves; the oldest is closed for a further one."""
STRANGERS_SHARE: Final = 0.05
"""The share of the time that they may take of this process, which has other work. Those that prove themselves do not
count."""
STRANGER_NS: Final = 100_000
"""About the CPU time that one costs, without TLS."""
BEAT_S: Final = 0.5
SILENT_S: Final = 2.0
STALLED_S_MAX: Final = 30.0
"""A link that beats ends when the other end takes nothing of what waits for it for so long."""
UNSENT_BYTES_MAX: Final = 256 << 20
"""A link ends when more waits for the other end, unless who sends waits for that (`Purpose.PARTS`)."""
RECORDS_BYTES_MAX: Final = 256 << 20
"""Of one frame of records, which hold the small tensors of one turn of the event loop."""
FETCH_S_MAX: Final = 10.0
"""In which a block must come from another machine."""
PART_BYTES: Final = 1 << 20
"""Of a block, which are passed to a connection at a time."""
REQUESTS_MAX: Final = 1 << 16
"""For blocks, that one connection may have waiting."""
REQUEST_BYTES_MAX: Final = 1024
CLOSE_S_MAX: Final = 5.0
"""In which what is unsent must leave a connection that is closed."""
ACCEPTS_MAX: Final = 4
"""Connections accepted in one turn of the event loop, so that a flood of them does not hold it."""
PAUSE_S: Final = 0.2
"""How long accepting pauses if no further connection can be accepted."""
LOG_S: Final = 10.0
"""Between two messages about refused connections."""
BACKLOG: Final = 64
"""Connections that wait in the kernel: few enough that the last of them is accepted within `HANDSHAKE_S_MAX`."""
HOLDERS_MAX: Final = 0x7FFF
"""The highest number of a process that holds arenas."""

Endpoint = tuple[str, int]
"""Host and port."""

_log: Final = logging.getLogger("sloop.network")


@dataclass(frozen=True, slots=True)
class NodeTls:
    """PEM files with which the machines of a deployment check each other: the certificate and the key of this one, and
    the authority that has issued the certificates of all."""

    cert: Path
    key: Path
    ca: Path

    def server_context(self) -> ssl.SSLContext:
        """For the side that listens. Raises `InputError` for a file that cannot be used."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client_context(self) -> ssl.SSLContext:
        """For the side that connects. Raises `InputError` for a file that cannot be used."""
        return self._filled(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _filled(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        fix = "give PEM files that exist: this machine's certificate, its unencrypted key, and the authority of all"
        try:
            context.load_cert_chain(self.cert, self.key, password=str)  # else OpenSSL asks on the terminal
        except (ssl.SSLError, OSError) as error:
            what = f"not a certificate and its key: {error.strerror or error}"
            raise InputError(what, where=f"{self.cert}, {self.key}", help=fix) from error
        try:
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, OSError) as error:
            what = f"not the certificate of an authority: {error.strerror or error}"
            raise InputError(what, where=str(self.ca), help=fix) from error
        return context


class Purpose(IntEnum):
    """What a connection is for."""

    AGENT = 1
    """An agent's connection to the deciding process."""
    BLOCKS = 2
    """Blocks are fetched, from an agent or the deciding process."""
    WEIGHTS = 3
    """Files of models are fetched from an agent."""
    PARTS = 4
    """What a part of a model passes on is brought to the next part, from an agent."""


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
        self._heard_s = self._awake_s = 0.0
        self._congested_s = 0.0
        """Since when more waits for the other end than it takes at once."""
        self._owed = 0
        """Bytes that are missing in the frame that was begun."""
        self.on_drained: Callable[[], None] = lambda: None
        """Called when the other end has taken most of what waited for it."""
        self.is_open = self._is_closed = self.is_congested = self._is_held = False

    # What others call

    def attach(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        """See `sloop.serve.transport.FrameLink`."""
        self._on_frame, self._on_end = on_frame, on_end
        if self.is_open and self._is_closed:  # it has ended before anybody listened
            self._loop.call_soon(on_end, CLOSED)

    def send(self, kind: FrameKind, subject: int = 0, value: int = 0, payload: Sequence[Buffer] = ()) -> None:
        """See `sloop.serve.transport.FrameLink`. What cannot be sent at once is kept; if that is more than
        `UNSENT_BYTES_MAX`, the link ends."""
        transport = self._transport
        if transport is None or self._is_closed:
            return
        assert not self._owed, "a frame within another one"
        size = sum(map(len, payload))
        transport.writelines([pack_head(kind, subject, value, size), *payload])
        unsent = transport.get_write_buffer_size()
        if unsent > UNSENT_BYTES_MAX and self.purpose is not Purpose.PARTS:
            self._loop.call_soon(self._end, f"it does not read: {unsent} B wait for it")

    def begin(self, kind: FrameKind, subject: int, payload_bytes: int) -> None:
        """Send the head of a frame, whose payload then follows in parts."""
        self._owed = payload_bytes
        if self._transport is not None and not self._is_closed:
            self._transport.write(pack_head(kind, subject, 0, payload_bytes))

    def send_part(self, part: memoryview) -> None:
        """Send the next part of the payload of the frame that was begun."""
        self._owed -= len(part)
        if self._transport is not None and not self._is_closed:
            self._transport.write(part)

    def hold(self, *, is_held: bool) -> None:
        """Read no more, so that the other end has to wait; or go on. Meanwhile it does not count as silent."""
        transport, self._is_held = self._transport, is_held
        if transport is None or self._is_closed:
            return
        if is_held:
            transport.pause_reading()
        else:
            self._heard_s = self._loop.time()
            transport.resume_reading()

    def allow(self, payload_bytes_max: int) -> None:
        """Bound the payloads that come."""
        self._reader.payload_bytes_max = payload_bytes_max

    def close(self) -> None:
        """See `sloop.serve.transport.FrameLink`. What was sent before has `CLOSE_S_MAX` to leave."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.stop()
        if self._timer is not None:
            self._timer.cancel()
        transport = self._transport
        if transport is None:
            return
        if self.is_open and not self._owed:
            self._timer = self._loop.call_later(CLOSE_S_MAX, transport.abort)
            transport.close()
        else:
            transport.abort()

    def hand_over(self) -> asyncio.Transport:
        """The connection, for another protocol. This end does nothing with it any more."""
        assert self._transport is not None
        transport, self._transport, self._is_closed = self._transport, None, True
        return transport

    @property
    def local_host(self) -> str:
        """The address by which the other end can reach this machine."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    def keep_alive(self) -> None:
        """From now on say that this end lives, and notice when the other end does not."""
        self._heard_s = self._awake_s = self._loop.time()
        self._keep_alive()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._is_closed:
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._transport.set_write_buffer_limits(high=PART_BYTES // 2)
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        self._timer = self._loop.call_later(HANDSHAKE_S_MAX, self._end, f"no greeting within {HANDSHAKE_S_MAX:g} s")
        if not self._is_client:
            self._transport.write(MAGIC + self._nonce)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._is_closed:
            return memoryview(bytearray(SCRATCH_BYTES))  # what TLS still brings at its end; nobody reads it
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

    def pause_writing(self) -> None:
        self.is_congested, self._congested_s = True, self._loop.time()

    def resume_writing(self) -> None:
        self.is_congested = False
        if not self._is_closed:
            self.on_drained()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_closed and self._timer is not None:
            self._timer.cancel()
        self._end(f"TLS: {exc.reason}" if isinstance(exc, ssl.SSLError) and exc.reason else CLOSED)
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
        if frame.payload or frame.kind is not FrameKind.RECORDS:
            self._on_frame(frame)

    def _keep_alive(self) -> None:
        now_s = self._loop.time()
        # While this process itself stood still, what came was not read: that is no silence of the other end.
        self._heard_s += max(0.0, now_s - self._awake_s - BEAT_S)
        self._awake_s = now_s
        silent_s = now_s - self._heard_s
        if silent_s > SILENT_S and not self._is_held:
            self._end(f"it has been silent for {silent_s:.1f} s")
            return
        # A part of a model may take long over what it has; the core knows if it hangs.
        if self.is_congested and self.purpose is not Purpose.PARTS and now_s - self._congested_s > STALLED_S_MAX:
            self._end(f"it has taken nothing for {STALLED_S_MAX:g} s")
            return
        if not self._owed:
            self.send(FrameKind.RECORDS)
        self._timer = self._loop.call_later(BEAT_S, self._keep_alive)

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


class NodeListener:
    """Accepts connections of processes that know the token, and passes them to `accept`. Create it by `listen`."""

    def __init__(
        self, sock: socket.socket, token: bytes, accept: Callable[[NetworkLink], None], context: ssl.SSLContext | None
    ) -> None:
        self._socket, self._token, self._to_accept, self._context = sock, token, accept, context
        self.port = int(sock.getsockname()[1])
        """That was chosen."""
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[NetworkLink, asyncio.Task[None]] = {}
        """The oldest first, with what opens them."""
        self._cost_ns = STRANGER_NS + (0 if context is None else measured_ns(context))
        self._time = TimeShare(STRANGERS_SHARE, STRANGERS_MAX * self._cost_ns, time.monotonic_ns)
        """The share of the time that strangers may take."""
        self._resuming: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")
        self._is_closed = False
        self.refused: int = 0
        """Connections that have not proved themselves."""
        self._resume()

    @classmethod
    async def listen(
        cls,
        endpoint: Endpoint,
        token: bytes,
        accept: Callable[[NetworkLink], None],
        context: ssl.SSLContext | None = None,
    ) -> "NodeListener":
        """Listen on an address; port 0 selects a free one. Raises `MachineError` if that is not possible."""
        sock = socket.socket(socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setblocking(False)
            bind(sock, *endpoint)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            where, why = host_and_port(*endpoint), error.strerror or error
            fix = "is that an address of this host?"
            if error.errno == errno.EADDRINUSE:
                fix = "stop the program that listens there, or choose another port"
            raise MachineError(f"cannot listen on {where}: {why}", help=fix) from error
        return cls(sock, token, accept, context)

    async def close(self) -> None:
        """Accept no more connections; those that were accepted stay."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for link, opening in self._strangers.items():
            link.close()
            opening.cancel()
        self._strangers.clear()

    def _resume(self) -> None:
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(ACCEPTS_MAX):
            if not self._time.is_left():
                self._pause()
                return
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no file descriptor is left
                self._warn(f"cannot accept a connection: {error.strerror}")
                self._pause()
                return
            self._time.spend(self._cost_ns)
            sock.setblocking(False)
            self._on_stranger(sock, str(address[0]))

    def _pause(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._resuming = self._loop.call_later(PAUSE_S, self._resume)

    def _on_stranger(self, sock: socket.socket, address: str) -> None:
        if len(self._strangers) >= STRANGERS_MAX:
            oldest, opening = next(iter(self._strangers.items()))
            self._refuse(oldest, f"more than {STRANGERS_MAX} have not proved that they belong here")
            oldest.close()
            opening.cancel()
        link = NetworkLink(self._token, self._welcome)
        link.peer = address
        link.attach(lambda _: None, lambda why: self._refuse(link, why))
        self._strangers[link] = self._loop.create_task(self._open(sock, link))

    async def _open(self, sock: socket.socket, link: NetworkLink) -> None:
        within_s = None if self._context is None else HANDSHAKE_S_MAX
        try:
            await self._loop.connect_accepted_socket(
                lambda: link, sock, ssl=self._context, ssl_handshake_timeout=within_s
            )
        except (OSError, EOFError) as error:  # no handshake of TLS, or the other end has gone
            self._refuse(link, f"TLS: {getattr(error, 'reason', None) or error}")

    def _refuse(self, link: NetworkLink, why: str) -> None:
        """A stranger has gone, or has shown that it does not belong here."""
        if self._strangers.pop(link, None) is not None:
            self.refused += 1
            self._warn(f"a connection from {link.peer} is refused: {why}; {self.refused} since the start")

    def _warn(self, what: str) -> None:
        """Log at most once in `LOG_S`: strangers may cause this thousands of times a second."""
        now_s = self._loop.time()
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            _log.warning("%s", what)

    def _welcome(self, link: NetworkLink) -> None:
        self._strangers.pop(link, None)
        self._time.spend(-self._cost_ns)
        link.attach(lambda _: None, lambda _: None)
        self._to_accept(link)


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
    where = host_and_port(*endpoint)

    def on_open(link: NetworkLink) -> None:
        if not opened.done():
            opened.set_result(link)

    def on_end(why: str) -> None:
        if not opened.done():
            known = "certificate or token" if context is not None else "token"
            hint = f"; it does not know the {known} that was given here, perhaps" if why == CLOSED else ""
            opened.set_exception(MachineError(f"{where}: {why}{hint}", help="compare address and files of TLS"))

    link = NetworkLink(token, on_open, purpose=purpose, room=room)
    link.attach(lambda _: None, on_end)
    is_open = False
    try:
        async with asyncio.timeout(HANDSHAKE_S_MAX):
            await asyncio.get_running_loop().create_connection(lambda: link, *endpoint, ssl=context)
            await opened
        is_open = True
        return link
    except (OSError, TimeoutError, ValueError, OverflowError) as error:  # the latter for what is no address
        why = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
        raise MachineError(
            f"{where} cannot be reached: {why}", help="is the server there, and the port open?"
        ) from error
    finally:
        if not is_open:
            link.close()
            opened.cancel()


def joined(endpoint: Endpoint, token: bytes, purpose: Purpose, context: ssl.SSLContext | None) -> socket.socket:
    """As `connect`, for a thread: a blocking connection on which both ends have proved themselves. MachineError."""
    where, own, label = host_and_port(*endpoint), secrets.token_bytes(NONCE_BYTES), bytes([purpose])
    sock = None
    try:
        sock = socket.create_connection(endpoint, HANDSHAKE_S_MAX)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            sock = context.wrap_socket(sock)
        greeting = _exactly(sock, _greeting_bytes(is_client=True))
        nonces = greeting.removeprefix(MAGIC) + own
        sock.sendall(label + own + _digest(token, b"client", label + nonces))
        if hmac.compare_digest(_exactly(sock, DIGEST_BYTES), _digest(token, b"server", label + nonces)):
            return sock
        why = "what listens there does not know the token of this deployment"
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
    if sock is not None:
        sock.close()
    raise MachineError(f"{where}: {why}", help="is it there, with the same token and TLS?")


def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes of a blocking connection. OSError if it ends before."""
    found = b""
    while len(found) < size:
        more = sock.recv(size - len(found))
        if not more:
            raise ConnectionError(CLOSED)
        found += more
    return found


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


class ArenaHolder(Struct, frozen=True):
    """An agent, as one who holds arenas."""

    number: int
    """In the addresses of its blocks (`sloop.shared_memory.Arenas`)."""
    machine: str
    """See `machine`."""
    pid: int
    endpoint: Endpoint
    """Where it sends blocks."""


class HolderTable:
    """The agents, which hold arenas besides the deciding process. `on_change` is called when one is added or
    removed."""

    def __init__(self) -> None:
        self._numbers = cycle(range(1, HOLDERS_MAX + 1))
        self._known: dict[int, ArenaHolder] = {}
        self.on_change: list[Callable[[], None]] = []

    def number(self) -> int:
        """A number for one more. None that is known has it, and for long none has had it."""
        return next(number for number in self._numbers if number not in self._known)

    def add(self, holder: ArenaHolder) -> None:
        """One more holds arenas."""
        self._known[holder.number] = holder
        self._note()

    def remove(self, number: int) -> None:
        """One has gone, and its blocks with it."""
        if self._known.pop(number, None) is not None:
            self._note()

    def endpoints(self) -> dict[int, Endpoint]:
        """Where each sends blocks."""
        return {number: each.endpoint for number, each in self._known.items()}

    def on(self, place: str) -> dict[int, int]:
        """The process ids of those of one machine."""
        return {number: each.pid for number, each in self._known.items() if each.machine == place}

    def _note(self) -> None:
        for tell in self.on_change:
            tell()


class BlockLost(Exception):
    """A block cannot be fetched: its machine has gone, or does not answer."""


class BlockServer:
    """Sends blocks of this machine to processes of others. `read` finds the memory of a block."""

    def __init__(self, read: Callable[[Address], memoryview]) -> None:
        self._read = read
        self._links: set[NetworkLink] = set()

    def accept(self, link: NetworkLink) -> None:
        """Serve one more connection."""
        if link.purpose is not Purpose.BLOCKS:
            link.close()
            return
        self._links.add(link)
        link.allow(REQUEST_BYTES_MAX)
        link.attach(BlockRequests(link, self._read).on_frame, lambda _: self._links.discard(link))
        link.keep_alive()

    def close(self) -> None:
        """End all connections."""
        for link in self._links:
            link.close()
        self._links.clear()


class BlockRequests:
    """The requests for blocks of one connection. They are answered one after another, in parts and only as fast as the
    other end reads: blocks that wait take no memory."""

    def __init__(self, link: NetworkLink, read: Callable[[Address], memoryview]) -> None:
        self._link, self._read = link, read
        self._loop = asyncio.get_running_loop()
        self._decoder = msgspec.msgpack.Decoder(Address)
        self._waiting: deque[tuple[int, Address]] = deque()
        self._left = memoryview(b"")
        """What is not yet sent of the current block."""
        self._is_due = False
        link.on_drained = self._answer

    def on_frame(self, frame: Frame) -> None:
        """One more request."""
        if frame.kind is not FrameKind.BYTES:
            raise ProtocolError(f"a {frame.kind.name} frame instead of a request for a block")
        if len(self._waiting) >= REQUESTS_MAX:
            raise ProtocolError(f"more than {REQUESTS_MAX} requests for blocks")
        try:
            self._waiting.append((frame.subject, self._decoder.decode(frame.payload)))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a request for a block cannot be read: {error}") from error
        if not self._is_due:
            self._answer()

    def _answer(self) -> None:
        """Send the next part, or the beginning of the next block; further ones in later turns of the event loop."""
        self._is_due = False
        if self._link.is_congested:
            return  # `on_drained` continues
        if self._left:
            part, self._left = self._left[:PART_BYTES], self._left[PART_BYTES:]
            self._link.send_part(part)
        elif self._waiting:
            self._begin(*self._waiting.popleft())
        if (self._left or self._waiting) and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._answer)

    def _begin(self, number: int, block: Address) -> None:
        try:
            memory = self._read(block)
        except ValueError as error:
            self._link.send(FrameKind.BYTES, number, -1, [str(error).encode()[:REQUEST_BYTES_MAX]])
            return
        if len(memory) <= PART_BYTES:
            self._link.send(FrameKind.BYTES, number, 0, [memory])
        else:
            self._link.begin(FrameKind.BYTES, number, len(memory))
            self._left = memory


class _Fetch:
    """A block that is under way. One that was given up has no memory any more."""

    def __init__(self, memory: memoryview, done: "asyncio.Future[None]") -> None:
        self.memory: memoryview | None = memory
        self.size = len(memory)
        self.done = done


class _Peer:
    """The connection to the process of another machine that sends its blocks."""

    def __init__(self, client: "BlockClient", endpoint: Endpoint) -> None:
        self._client, self.endpoint = client, endpoint
        self._link: NetworkLink | None = None
        self._opening = asyncio.Lock()
        self._pending: dict[int, _Fetch] = {}
        self._receiving: _Fetch | None = None
        """Into whose memory the link writes what comes."""
        self._last = 0
        self._is_closed = False

    async def fetch(self, block: Address, memory: memoryview) -> None:
        """Receive a block into `memory`."""
        link = await self._opened()
        self._last = number = self._last + 1
        fetch = self._pending[number] = _Fetch(memory, asyncio.get_running_loop().create_future())
        try:
            link.send(FrameKind.BYTES, number, payload=[encode(block)])
            await fetch.done
        except BaseException:
            fetch.memory = None
            if self._receiving is fetch:
                self._restart()  # else it would write into memory that others use
            raise

    def close(self) -> None:
        self._is_closed = True
        self._restart()

    def _restart(self) -> None:
        """End the connection; the next fetch opens another one."""
        if self._link is not None:
            self._link.close()
        self._fail(CLOSED)

    async def _opened(self) -> NetworkLink:
        async with self._opening:
            if self._link is None:
                token, context = self._client.token, self._client.context
                link = await connect(self.endpoint, token, Purpose.BLOCKS, context=context, room=self._room)
                if self._is_closed:
                    link.close()
                    raise BlockLost("its machine has gone")
                self._link = link
                link.attach(self._on_frame, self._fail)
                link.keep_alive()
            return self._link

    def _room(self, head: Head) -> memoryview:
        fetch = self._pending.get(head.subject)
        if head.kind is not FrameKind.BYTES or fetch is None or fetch.size != head.payload_bytes:
            raise ProtocolError(f"{head.payload_bytes} B that nobody has asked for")
        if fetch.memory is None:
            return memoryview(bytearray(head.payload_bytes))  # given up meanwhile
        self._receiving = fetch
        return fetch.memory

    def _on_frame(self, frame: Frame) -> None:
        fetch = self._pending.get(frame.subject)
        if frame.kind is not FrameKind.BYTES or fetch is None:
            raise ProtocolError(f"a {frame.kind.name} frame that nobody has asked for")
        del self._pending[frame.subject]
        self._receiving = None
        memory, fetch.memory = fetch.memory, None
        if memory is None or fetch.done.done():
            return
        if frame.value < 0:
            fetch.done.set_exception(BlockLost(str(frame.payload, "utf-8", "replace")))
        elif len(frame.payload) != fetch.size:
            fetch.done.set_exception(BlockLost(f"a block of {fetch.size} B came as {len(frame.payload)} B"))
        else:
            if frame.payload is not memory:  # a small one, which came with others
                memory[:] = frame.payload
            fetch.done.set_result(None)

    def _fail(self, why: str) -> None:
        self._link = self._receiving = None
        pending, self._pending = self._pending, {}
        for fetch in pending.values():
            if not fetch.done.done():
                fetch.done.set_exception(BlockLost(why))


class BlockClient:
    """Fetches blocks from processes of other machines; one connection to each, opened when it is first needed."""

    def __init__(self, token: bytes, context: ssl.SSLContext | None = None) -> None:
        self.token, self.context = token, context
        self._peers: dict[int, _Peer] = {}
        """By holder."""

    def set_endpoints(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Where blocks are sent, by their holders. Connections to others are closed."""
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
        if block.size > PAYLOAD_BYTES_MAX:
            raise BlockLost(f"it has {block.size} B, more than {PAYLOAD_BYTES_MAX}")
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
