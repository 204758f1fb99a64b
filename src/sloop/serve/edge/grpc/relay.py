"""Connections of gRPC: accepted and bounded as those of HTTP are, and passed on to grpcio's server in this process.

grpcio's server accepts connections by itself, cannot say how many it has and of whom, and cannot close one. So they are
accepted here (`Listener`: bounds in all and of each network, strangers first, handshakes of TLS), and their bytes go to
that server through a Unix socket, which costs some 15 of the 450 us of a call. There, each connection has the name of
its end of the Unix socket, which every call can tell: so the calls of a connection are counted, and one whose calls
cost more than they bring is closed.

A stranger, on whose connection no call has been authorised, may send `STRANGER_BYTES`, and then so many bytes a second.
What is refused, reset or never finished is paid from a credit, which answers and time refill. Large messages wait while
the event loop is behind, so that small ones do not.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Final

from sloop.app.limits import ServerLimits
from sloop.serve.edge.grpc.heads import Heads, TooMuch
from sloop.serve.edge.listener import Listener, ServerConnection, Tls, default_connections

STRANGER_BYTES: Final = 4 * 1024
"""What a stranger may send at once: the head of a call. The rest waits until that was looked at."""
STRANGER_BYTES_PER_S: Final = 4 * 1024
LARGE_BYTES: Final = 256 * 1024
ARRIVING_MAX: Final = 10
"""What has come since the last whole message, and calls without their message: above either, a connection waits while
the event loop is behind."""
OPENED_AT_ONCE: Final = 4
OPENED_S: Final = 0.004
"""So many connections are passed on at once, each of which takes half a millisecond with its first call, and further
ones so much later."""
DESCRIPTORS: Final = 3
"""Of a connection: its own, and both ends of its Unix socket."""
BUFFERED_BYTES_MAX: Final = 256 * 1024
"""What is passed on ahead of whoever reads slowly, in each direction."""
FIRST_CALL_S_MAX: Final = 60.0
"""How long a connection may be without calls before the first was answered. grpcio's server closes the others."""
STALL_S_MAX: Final = 60.0
"""How long a client may leave an answer unread, beside the time that its bytes take at `SEND_RATE_BYTES`."""
SEND_RATE_BYTES: Final = 16 * 1024
SWEEP_S: Final = 1.0
MEASURE_S: Final = 0.01
"""How often the event loop is measured, or later if it has much to do."""
BUSY_SHARE: Final = 0.8
"""With so much CPU time of its own between, it has more to do than can be done: the time of others does not count."""

CREDIT_MAX: Final = 1000
CREDIT_AT_FIRST: Final = 200
"""Of a connection that has not had an answer yet: attackers who come again and again should not be given more."""
CREDIT_PER_S: Final = 200
CREDIT_PER_ANSWER: Final = 20
BYTES_PER_CREDIT: Final = 4 * 1024
"""Of an answer, for which the client sends frames to say that it has read it."""
COSTS: Final = {"reset": 2, "rapid reset": 10, "key": 50, "call without a key": 5}
"""What is paid: a new connection survives 4 wrong keys, an old one 100 rapid resets."""
REFUSED_BYTES_PER_CREDIT: Final = 16 * 1024
REFUSED_COST_MAX: Final = 100
"""A refused message pays for its size, at most so much: its client should see why it was refused."""

_log: Final = logging.getLogger("sloop.grpc")


class RelayedConnection(ServerConnection):
    """The connection of one client."""

    __slots__ = (
        "_bytes",
        "_bytes_at_s",
        "_credit",
        "_credit_at_s",
        "_early",
        "_heads",
        "_inner",
        "_is_full",
        "_is_held",
        "_wait",
        "arriving",
        "calls",
        "incoming_bytes",
        "is_answered",
        "name",
        "relay",
        "sent_by_s",
        "since_s",
        "unsent",
    )

    def __init__(self, relay: "Relay") -> None:
        super().__init__(relay.listener)
        self.relay = relay
        self.name = ""
        """Of its end of the Unix socket."""
        self.calls = self.arriving = self.unsent = 0
        """Calls that have not ended; those whose message has not come; those whose answer is being sent."""
        self.incoming_bytes = 0
        """What has come since the last whole message."""
        self.is_answered = False
        """Whether a call has been answered."""
        self.since_s = self.sent_by_s = time.monotonic()
        """Since when it is open, and when the client should have taken all its answers, if it is as slow as it may."""
        self._inner: asyncio.Transport | None = None
        self._heads = Heads()
        self._early = b""
        """What has come, but may not be passed on yet."""
        self._is_full = self._is_held = False
        """Whether its bytes are not read now: because grpcio's server does not read, or because it has sent much."""
        self._credit, self._credit_at_s = float(CREDIT_AT_FIRST), self.since_s
        self._bytes, self._bytes_at_s = float(STRANGER_BYTES), self.since_s
        self._wait: dict[ServerConnection, float] | None = None
        """The mapping of the relay that this connection is in."""
        self.note_calls()

    # Bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.set_write_buffer_limits(BUFFERED_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        self.incoming_bytes += len(data)
        if self._inner is not None and not self.is_stranger and not self._early:
            self._forward(data)
            is_costly = self.incoming_bytes > LARGE_BYTES or self.arriving > ARRIVING_MAX
            if is_costly and self.relay.is_behind and not self._is_held:
                self._hold(MEASURE_S)
            return
        if self._inner is None and not self._early:
            self.relay.open(self)
            self.hold(is_full=True)
        self._early += data
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass on what has come, of a stranger as much as it may send now."""
        if self._inner is None or not self._early:
            return
        size = len(self._early)
        if self.is_stranger:
            now_s = time.monotonic()
            refilled = self._bytes + STRANGER_BYTES_PER_S * (now_s - self._bytes_at_s)
            self._bytes, self._bytes_at_s = min(STRANGER_BYTES, refilled), now_s
            size = min(size, int(self._bytes))
            self._bytes -= size
        data, self._early = self._early[:size], self._early[size:]
        self._forward(data)
        if self._early and not self._is_held:
            self._hold(min(len(self._early), STRANGER_BYTES) / STRANGER_BYTES_PER_S)

    def _forward(self, data: bytes) -> None:
        """Pass this on, and let the client pay for it."""
        self._pay(0, "frame")  # time has refilled the credit
        try:
            data, cost = self._heads.follow(data, int(self._credit))
        except TooMuch as error:
            self.relay.closed[str(error)] += 1
            self.abort()
            return
        if cost:
            self._pay(cost, "frame")
        if self._inner is not None and not self._inner.is_closing():
            self._inner.write(data)

    def _hold(self, seconds: float) -> None:
        """Read no more for so long."""
        self._is_held = True
        self._read_or_not()
        asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._is_held = False
        self._pass_on()
        self._read_or_not()

    def _read_or_not(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        if self._is_full or self._is_held:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def opened(self, inner: asyncio.Transport) -> None:
        """The Unix socket is open."""
        self._inner = inner
        inner.set_write_buffer_limits(BUFFERED_BYTES_MAX)
        if self.transport is None:  # it has gone meanwhile
            inner.abort()
        else:
            self._pass_on()
            self.hold(is_full=False)

    def hold(self, *, is_full: bool) -> None:
        """Read no more, or go on: grpcio's server reads more slowly, or has caught up."""
        self._is_full = is_full
        self._read_or_not()

    def pause_writing(self) -> None:
        if self._inner is not None and not self._inner.is_closing():
            self._inner.pause_reading()

    def resume_writing(self) -> None:
        if self._inner is not None and not self._inner.is_closing():
            self._inner.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self.relay.forget(self)
        if self._inner is not None:
            self._inner.abort()  # grpcio's server then gives up the calls
        super().connection_lost(exc)

    def abort(self) -> None:
        self._wait_for(None)  # the listener looks there for further ones, in this same turn
        super().abort()

    # Calls

    def note_authorised(self) -> None:
        super().note_authorised()
        self._wait_for(None)
        self.note_calls()
        self._go_on()

    def note_calls(self) -> None:
        """The calls have changed: note whether the server waits for this client, and for what."""
        if not self.calls:
            self._wait_for(self.relay.idle)
        else:
            self._wait_for(self.relay.due if self.arriving == self.calls else None)

    def _wait_for(self, wait: dict[ServerConnection, float] | None) -> None:
        if wait is not self._wait:
            if self._wait is not None:
                self._wait.pop(self, None)
            self._wait = wait
            if wait is not None:
                wait[self] = time.monotonic()

    def charge(self, what: str) -> None:
        """Pay for something that brings the client nothing."""
        self._pay(COSTS[what], what)

    def pay_message(self, size: int) -> None:
        """Pay for a refused message of so many bytes."""
        self._pay(min(1 + size // REFUSED_BYTES_PER_CREDIT, REFUSED_COST_MAX), "refused message")

    def _pay(self, cost: float, what: str) -> None:
        """Pay so much for `what`, or be closed. A negative cost refills the credit."""
        now_s = time.monotonic()
        self._credit = min(CREDIT_MAX, self._credit + CREDIT_PER_S * (now_s - self._credit_at_s)) - cost
        self._credit_at_s = now_s
        if self._credit < 0 and not self.is_given_up:
            self.relay.closed[what] += 1
            _log.debug("connection closed: it has used up its credit, last by: %s", what)
            self.abort()

    def note_sending(self, size: int) -> None:
        """An answer of so many bytes is being sent."""
        now_s = time.monotonic()
        begin_s = max(now_s, self.sent_by_s) if self.unsent else now_s
        self.sent_by_s = begin_s + size / SEND_RATE_BYTES
        self.unsent += 1
        self.is_answered = True
        if not self.is_stranger:
            self._pay(-CREDIT_PER_ANSWER, "")

    def note_sent(self, size: int) -> None:
        """So much has been passed on to the client."""
        self._credit = min(CREDIT_MAX, self._credit + size / BYTES_PER_CREDIT)

    def attend(self, now_s: float) -> None:
        """Close the connection if its client takes too long."""
        why = ""
        if self.unsent and now_s > self.sent_by_s + STALL_S_MAX:
            why = "answer"
        elif not self.calls and not self.is_answered and now_s > self.since_s + FIRST_CALL_S_MAX:
            why = "idle"
        if why:
            self.relay.expired[why] += 1
            self.abort()


class _Inner(asyncio.Protocol):
    """The end of the Unix socket that belongs to a connection."""

    __slots__ = ("_outer",)

    def __init__(self, outer: RelayedConnection) -> None:
        self._outer = outer

    def data_received(self, data: bytes) -> None:
        if self._outer.transport is not None:
            self._outer.transport.write(data)
            self._outer.note_sent(len(data))

    def pause_writing(self) -> None:
        self._outer.hold(is_full=True)

    def resume_writing(self) -> None:
        self._outer.hold(is_full=False)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._outer.transport is not None:
            self._outer.transport.close()


class Relay:
    """The connections of a port for gRPC, passed on to the Unix sockets at `paths` in turn. The bounds are as in
    `Listener`."""

    def __init__(self, paths: Sequence[Path], limits: ServerLimits = ServerLimits(), *, tls: Tls | None = None) -> None:
        self._paths = cycle(map(str, paths))
        self.idle: dict[ServerConnection, float] = {}
        """Connections without calls, by when they began to be."""
        self.due: dict[ServerConnection, float] = {}
        """Connections all of whose calls have yet to send their message."""
        self.listener = Listener(
            lambda: RelayedConnection(self),
            idle=(self.due, self.idle),
            limits=limits,
            connections_max=default_connections(DESCRIPTORS),
            tls=tls,
            protocols=("h2",),
        )
        self.closed: Counter[str] = Counter()
        """Connections closed because their credit was used up, by what they paid for last."""
        self.expired: Counter[str] = Counter()
        """Connections closed because their client took too long, by what was awaited."""
        self._names: dict[str, RelayedConnection] = {}
        self._waiting = self.listener.handshakes.queue()
        """Those that have sent something, and are not connected to grpcio's server yet."""
        self._next: asyncio.Handle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self.is_behind = False
        """Whether there is more to do than can be done."""
        self._cpu_s = 0.0
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, which this object then owns."""
        self.listener.is_behind = self.listener.is_overloaded = lambda: self.is_behind
        self.listener.start(sock)
        self._sweep()
        self._measure()

    async def close(self, within_s: float) -> None:
        """Accept no more, and close all connections when their clients do, or after `within_s`."""
        for timer in self._timers.values():
            timer.cancel()
        await self.listener.close(within_s)

    def of(self, peer: str) -> RelayedConnection | None:
        """The connection of a call, by what grpcio calls its peer; None if it has gone, or never came this way."""
        return self._names.get(peer.removeprefix("unix-abstract:"))

    def open(self, connection: RelayedConnection) -> None:
        """Connect to grpcio's server for a connection that has sent its first bytes, when it is its turn."""
        self._waiting.add(connection)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._open_some)

    def _open_some(self) -> None:
        """Open those whose turn it is."""
        loop = asyncio.get_running_loop()
        for is_known in (True, False) * (OPENED_AT_ONCE // 2):
            if not self._waiting:
                break
            connection = self._waiting.take(is_known=is_known)
            opening = loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)
        self._next = loop.call_later(OPENED_S, self._open_some) if self._waiting else None

    async def _open(self, connection: RelayedConnection) -> None:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            sock.bind(b"")  # the kernel chooses a name
            sock.connect(next(self._paths))
        except OSError:  # so many wait there that there is no room: as if the port were full
            sock.close()
            connection.abort()
            return
        connection.name = sock.getsockname()[1:].decode()
        self._names[connection.name] = connection
        loop = asyncio.get_running_loop()
        inner, _ = await loop.create_unix_connection(lambda: _Inner(connection), sock=sock)
        connection.opened(inner)

    def forget(self, connection: RelayedConnection) -> None:
        """A connection has ended."""
        self._names.pop(connection.name, None)
        self._waiting.discard(connection)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for connection in list(self.listener.connections):
            assert isinstance(connection, RelayedConnection)
            connection.attend(now_s)
        self._timers["sweep"] = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _measure(self) -> None:
        cpu_s = time.thread_time()
        self.is_behind = cpu_s - self._cpu_s > BUSY_SHARE * MEASURE_S
        self._cpu_s = cpu_s
        self._timers["measure"] = asyncio.get_running_loop().call_later(MEASURE_S, self._measure)
