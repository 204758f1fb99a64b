"""Listening for connections: how many there may be, in all and of each network, and TLS.

Each protocol derives its connections from `ServerConnection`. A *stranger* is a connection on which no request has been
authorised yet. At a bound, a stranger that the server waits for makes room for a new connection, however far its
request has come; without one, the connection that its protocol would miss least; if there is none, the new one is
closed. Without a free file descriptor, accepting pauses for a moment, and the log says so.

A *network* is what one client can be expected to have for itself: an address of IPv4, or 64 bits of one of IPv6.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, cast

from sloop.app.limits import ServerLimits
from sloop.errors import InputError, MachineError
from sloop.serve.edge.handshakes import HANDSHAKE_S, Handshakes, TimeShare, measured_ns
from sloop.serve.edge.tcp import BACKLOG, Backlog, bind, waited_in_kernel_ns
from sloop.text import host_and_port
from sloop.units import NS_PER_MS

SKIPPING_SHARE: Final = 0.25
"""The share of the CPU time for closing connections that have waited too long, while requests of open ones wait."""
SKIPPING_NS: Final = 25 * NS_PER_MS
"""How much of that time may be saved up: enough for some thousand connections."""
ACCEPTS_MAX: Final = 4
"""Connections accepted in one turn of the event loop, so that a flood of them does not hold it."""
ACCEPTING_NS: Final = NS_PER_MS // 2
"""For how long connections are accepted in one turn, if most are skipped because their clients have given up."""
ACCEPTING_SHARE: Final = 0.1
"""The share of the CPU time for accepting while requests of open connections wait."""
OPENING_NS: Final = 60_000
"""About what it costs to open an accepted connection, after the turn in which it was accepted."""
PAUSE_S: Final = 0.2
"""How long accepting pauses if no further connection can be accepted."""
LOG_S: Final = 10.0
REFRESH_S: Final = 10.0
"""How often certificates are compared with their files."""
SEARCHED_MAX: Final = 1000
"""How many idle connections are searched for one of a certain network."""
CONNECTIONS_MAX: Final = 16_384
RESERVED_DESCRIPTORS: Final = 256
"""File descriptors for workers, models and logs."""
KEEP_ALIVE_S: Final = 60
PROBE_S: Final = 10
PROBES: Final = 3
UNACKNOWLEDGED_MS: Final = 60_000
"""A client that does not acknowledge what was sent is given up after this time."""
UNSENT_BYTES_MAX: Final = 256 * 1024
"""Unsent bytes that the kernel keeps for a connection (TCP_NOTSENT_LOWAT). Its usual megabytes would let a client that
reads nothing have hundreds of pages written."""

_log: Final = logging.getLogger("sloop.edge")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the server's certificate and key, and, for mutual TLS, the authority whose clients are accepted."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def context(self, *protocols: str) -> ssl.SSLContext:
        """For a server of these protocols (ALPN). Raises `InputError` for a file that cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        for path in (self.cert, self.key):
            _check_readable(path)
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (ssl.SSLError, OSError) as error:
            raise InputError(
                f"{self.cert}, {self.key}: not a certificate in PEM format and its key: {error.strerror or error}",
                help="give the certificate (with its chain) with --tls-cert, and its unencrypted key with --tls-key",
            ) from error
        if self.client_ca is not None:
            _check_readable(self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except (ssl.SSLError, OSError) as error:
                raise InputError(
                    f"{self.client_ca}: not a certificate in PEM format: {error.strerror or error}",
                    help="give the authority's certificate, which clients' certificates are checked against, "
                    "with --tls-client-ca",
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def changed(self) -> tuple[int, ...]:
        """When the files were last written; 0 for one that is not there."""
        return tuple(_written_ns(path) for path in (self.cert, self.key, self.client_ca) if path is not None)


def _no_password() -> str:
    """OpenSSL would otherwise ask for the password of an encrypted key on the terminal, and wait."""
    return ""


def _check_readable(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", help="give a PEM file that exists") from error


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


class ServerConnection(asyncio.Protocol):
    """One accepted connection. A subclass calls these methods from its own of the same names."""

    __slots__ = ("address", "is_given_up", "is_stranger", "listener", "network", "transport", "waited_ns")

    def __init__(self, listener: "Listener") -> None:
        self.listener = listener
        self.address = self.network = ""
        self.is_stranger = True
        """Whether no request of it has been authorised yet."""
        self.transport: asyncio.Transport | None = None
        self.is_given_up = False
        """Whether it was closed before it was open, that is, before the end of its handshake."""
        self.waited_ns = 0
        """How long its first bytes had waited in the kernel when it was accepted, as far as that was looked up."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it
        if self.is_given_up:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.listener.forget(self)

    def abort(self) -> None:
        """Close at once, without sending what is not yet sent."""
        self.is_given_up = True
        if self.transport is not None:
            self.transport.abort()
        else:
            self.listener.handshakes.drop(self)

    def note_authorised(self) -> None:
        """A request of this connection has been authorised."""
        self.is_stranger = False
        self.listener.strangers.discard(self)
        self.listener.handshakes.note_authorised(self.network)


class Strangers:
    """The strangers that the server waits for, in the order in which it began to: all, and those of each network."""

    def __init__(self) -> None:
        self._all: dict[ServerConnection, None] = {}
        self._of: dict[str, dict[ServerConnection, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, connection: ServerConnection) -> None:
        """The server waits for this one from now on."""
        self.discard(connection)
        self._all[connection] = self._of.setdefault(connection.network, {})[connection] = None

    def discard(self, connection: ServerConnection) -> None:
        """It does not, or it is no stranger any more."""
        if connection in self._all:
            del self._all[connection]
            of_network = self._of[connection.network]
            del of_network[connection]
            if not of_network:
                del self._of[connection.network]

    def oldest(self, network: str) -> ServerConnection | None:
        """Of a network, the one that is waited for longest."""
        return next(iter(self._of.get(network, ())), None)

    def least(self, network: str) -> ServerConnection | None:
        """The one that makes room for a connection from this network: its own oldest, if it has an equal share of them
        or more, so that a network with many closes only its own; else the oldest of all."""
        if len(self._of.get(network, ())) * len(self._of) >= len(self._all):
            return self.oldest(network)
        return next(iter(self._all))


def network_of(address: str) -> str:
    """The network of a client's address: of IPv6 its first 64 bits, which a client usually has to itself, else all."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8))


MAPPED: Final = bytes(10) + b"\xff\xff"
"""Begins an address of IPv4 on a socket of IPv6."""


class Listener:
    """Accepts connections on one socket. `factory` makes the protocol of each.

    `idle` lists mappings of connections that wait for their client, each in the order in which they began to wait: at a
    bound, and without strangers, the first of the first mapping makes room. 0 stands for the default of a bound.
    """

    def __init__(
        self,
        factory: Callable[[], ServerConnection],
        *,
        idle: Sequence[Mapping[ServerConnection, float]] = (),
        limits: ServerLimits = ServerLimits(),
        connections_max: int = 0,
        tls: Tls | None = None,
        protocols: Sequence[str] = (),
    ) -> None:
        self._factory, self._idle = factory, idle
        self.connections_max = limits.connections or connections_max or default_connections()
        self.each_address_max = limits.connections_each or max(1, self.connections_max // 2)
        self._tls, self._protocols = tls, protocols
        self._context = tls.context(*protocols) if tls is not None else None
        self._files = tls.changed() if tls is not None else ()
        cost_ns = 0 if self._context is None else measured_ns(self._context)
        self.handshakes = Handshakes(self._open, self._end, cost_ns)
        self.connections: dict[ServerConnection, None] = {}
        self.silent, self.strangers = Strangers(), Strangers()
        """Those whose handshake has not begun, who go first, and all others."""
        self.by_network: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Connections closed at once, by the bound that they exceeded: `connections`, `address` or `descriptors`."""
        self.made_room = 0
        """Connections that were closed for new ones."""
        self.is_behind: Callable[[], bool] = lambda: False
        """Whether requests of those that are here wait."""
        self.is_overloaded: Callable[[], bool] = lambda: False
        """Whether those that are here have more to do than can be done, so that accepting has its share only."""
        self.refuses: Callable[[socket.socket, int], bool] = lambda _sock, _waited_ns: False
        """Called with a connection whose first bytes have waited so long: True if it was answered with a refusal, and
        need not be opened."""
        self._accepting = TimeShare(ACCEPTING_SHARE, ACCEPTS_MAX * OPENING_NS)
        self._skipping = TimeShare(SKIPPING_SHARE, SKIPPING_NS)
        self.backlog = Backlog()
        self._opening: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._emptied: asyncio.Event | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._logged_s = float("-inf")

    def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, which this object then owns. Call it in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self.handshakes.is_overloaded = self.is_overloaded
        sock.setblocking(False)
        self._resume()
        if self._tls is not None:
            self._refresh_later()

    def stop(self) -> None:
        """Accept no further connections."""
        for timer in self._timers.values():
            timer.cancel()
        if self._socket is not None and self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    async def close(self, within_s: float) -> None:
        """Stop, wait at most `within_s` until all connections are closed, and abort the rest."""
        self.stop()
        assert self._loop is not None, "never started"
        await self._empty(within_s)
        for connection in list(self.connections):
            connection.abort()
        await self._empty(1.0)  # the event loop reports the end of each

    async def _empty(self, within_s: float) -> None:
        """Wait until no connection is left."""
        if self.connections:
            self._emptied = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), within_s)

    def forget(self, connection: ServerConnection) -> None:
        """A connection has ended. May be called repeatedly."""
        if connection in self.connections:
            del self.connections[connection]
            for group in (self.silent, self.strangers):
                group.discard(connection)
            self.by_network[connection.network] -= 1
            if not self.by_network[connection.network]:
                del self.by_network[connection.network]
            if not self.connections and self._emptied is not None:
                self._emptied.set()

    def note_waiting(self, connection: ServerConnection, *, is_waiting: bool) -> None:
        """Whether the server waits for this stranger from now on."""
        if is_waiting and connection in self.connections:
            self.strangers.add(connection)
        else:
            self.strangers.discard(connection)

    def _accept(self) -> None:
        is_behind, is_overloaded = self.is_behind(), self.is_overloaded()
        has_time = self._accepting.is_left() or not is_overloaded
        can_skip = self._skipping.is_left() or not is_overloaded
        begun_ns = now_ns = time.thread_time_ns()
        left = ACCEPTS_MAX if has_time and can_skip else 0
        while left and now_ns - begun_ns < ACCEPTING_NS:
            if self._socket is None:
                break
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                self.backlog.is_empty(self._socket)
                break
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._note_failure(error)
                self._pause()
                break
            sock.setblocking(False)
            waited_ns = waited_in_kernel_ns(sock)
            is_skipped = bool(waited_ns) and self._context is None and self.refuses(sock, waited_ns)
            if is_skipped:
                sock.close()
                self.backlog.was_late(self._socket)
            else:  # if nobody else waits, as when another edge has died, what waited is served
                left -= 1
                self._admit(sock, str(address[0]), waited_ns if is_behind else 0)
                self._accepting.spend(OPENING_NS)
                self.backlog.was_early(self._socket)
            before_ns, now_ns = now_ns, time.thread_time_ns()
            (self._skipping if is_skipped else self._accepting).spend(now_ns - before_ns)

    def _admit(self, sock: socket.socket, address: str, waited_ns: int) -> None:
        """Open a connection, or close it if there are too many."""
        assert self._loop is not None
        bound, network = "", network_of(address)
        if self.by_network[network] >= self.each_address_max and not self._make_room(network, is_own=True):
            bound = "address"
        elif len(self.connections) >= self.connections_max and not self._make_room(network):
            bound = "connections"
        if bound:
            self.refused[bound] += 1
            most, key = self.connections_max, "connections"
            if bound == "address":
                most, key = self.each_address_max, "connections_each"
            source = f" from {address}" if bound == "address" else ""
            refused = f"{self.refused[bound]} have been refused since the start, from all addresses"
            self._warn(f"too many connections{source}: `limits: {{{key}: …}}` of the server allows {most}; {refused}")
            sock.close()
            return
        connection = self._factory()
        connection.address, connection.network, connection.waited_ns = address, network, waited_ns
        self.connections[connection] = None
        self.by_network[network] += 1
        if self._context is not None:
            self.silent.add(connection)
            self.handshakes.add(sock, connection)
        else:
            self.strangers.add(connection)
            opening = self._loop.create_task(self._open(sock, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket, connection: ServerConnection) -> None:
        assert self._loop is not None
        limit_s = None if self._context is None else HANDSHAKE_S
        if self._context is not None:
            self.silent.discard(connection)
            self.strangers.add(connection)
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self._context, ssl_handshake_timeout=limit_s
            )
        except (OSError, EOFError):  # ssl.SSLError is an OSError: no handshake, or the client has gone
            self._end(connection)
        except BaseException:
            self._end(connection)
            raise

    def _end(self, connection: ServerConnection) -> None:
        """End a connection at once."""
        self.forget(connection)
        connection.abort()

    def _make_room(self, network: str = "", *, is_own: bool = False) -> bool:
        """Close a connection for a new one from this network; one of the same network if it must be its own."""
        found = None
        for group in (self.silent, self.strangers):
            found = found or (group.oldest(network) if is_own else group.least(network))
        if found is None:
            idle = (each for waiting in self._idle for each in islice(waiting, SEARCHED_MAX))
            found = next((each for each in idle if each.network == network or not is_own), None)
        if found is None:
            return False
        self.made_room += 1
        self._end(found)
        return True

    def _note_failure(self, error: OSError) -> None:
        """Say why no connection could be accepted."""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            self.refused["descriptors"] += 1
            self._make_room()
            self._warn(
                f"no file descriptor is left for a further connection ({len(self.connections)} are open); it waits. "
                "Raise the limit (ulimit -n, LimitNOFILE=)"
            )
        else:
            self._warn(f"cannot accept a connection: {error.strerror or error}")

    def _pause(self) -> None:
        """Stop accepting for a moment: the kernel would report the same connection again and again."""
        assert self._loop is not None
        assert self._socket is not None
        self._loop.remove_reader(self._socket.fileno())
        self._timers["resume"] = self._loop.call_later(PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._socket is not None and self._loop is not None:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _warn(self, what: str) -> None:
        """Log at most once in `LOG_S`: whoever causes this may do so thousands of times a second."""
        now_s = time.monotonic()
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            _log.warning("%s", what)

    def _refresh_later(self) -> None:
        assert self._loop is not None
        self._timers["refresh"] = self._loop.call_later(REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        assert self._tls is not None
        if self._tls.changed() != self._files:
            self.reload()
        self._refresh_later()

    def reload(self) -> None:
        """Read the certificates again, whether they have changed or not; new connections use them."""
        if self._tls is None:
            return
        self._files = self._tls.changed()
        try:
            self._context = self._tls.context(*self._protocols)
            self.handshakes.cost_ns = measured_ns(self._context)
            _log.info("%s: the certificate has been read again", self._tls.cert)
        except InputError as error:
            _log.error("the changed certificate cannot be used, the one before stays: %s", error)


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """A listening socket; port 0 selects a free one. `is_shared` lets several sockets have the port (SO_REUSEPORT).
    Raises `MachineError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for level, option, value in OPTIONS:
            sock.setsockopt(level, option, value)
        bind(sock, host, port)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise refused_port(host, port, error) from error
    return sock


OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX),
)
"""Of the listening socket; Linux gives them to each accepted one."""


def refused_port(host: str, port: int, error: OSError) -> MachineError:
    """The error for a port that is not available."""
    if error.errno == errno.EADDRINUSE:
        help = "stop the program that holds it, or choose another port (--http-port, --grpc-port)"
        return MachineError(f"port {port} on {host} is in use", help=help)
    return MachineError(
        f"cannot listen on {host_and_port(host, port)}: {error.strerror or error}",
        help="choose an address of this machine and a port you may open (1024 and above without privileges)",
    )


def raise_descriptor_limit() -> int:
    """Raise this process' limit of file descriptors as far as it may, and return it. Warns if it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        most = 2**20 if hard == resource.RLIM_INFINITY else hard
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
        except (OSError, ValueError) as error:
            _log.warning("the limit of file descriptors stays at %d: %s", soft, error)
    if soft < LOW_DESCRIPTORS:
        _log.warning(
            "this process may open %d files and connections, so a port takes %d connections; raise the limit "
            "(ulimit -n, LimitNOFILE=)",
            soft,
            default_connections(),
        )
    return soft


LOW_DESCRIPTORS: Final = 4096


def default_connections(descriptors: int = 2) -> int:
    """How many connections a port may have: `CONNECTIONS_MAX`, or what the limit of file descriptors leaves if each
    takes so many. Of the two of HTTP, one is for what its requests need."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    used = len(os.listdir("/proc/self/fd")) if soft < LOW_DESCRIPTORS else 0
    return max(16, min(CONNECTIONS_MAX, (soft - max(RESERVED_DESCRIPTORS, used + 32)) // descriptors))
