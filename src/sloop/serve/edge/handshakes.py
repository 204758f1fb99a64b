"""TLS connections between their acceptance and the end of their handshake.

A handshake costs a hundred times what a connection costs, and a client can demand one for a few hundred bytes. So none
begins before the client's whole first message (ClientHello) has arrived: a silent client holds a socket, and nothing
else. One handshake begins in a turn of the event loop. The networks of the clients take turns (`FairQueue`). All
handshakes together get a share of the time and, under overload, of the CPU time; those of networks from which a client
was authorised have a share of their own, which no stranger can use up. Each is charged what one was measured to cost
with this certificate; the charge is returned when the client is authorised.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable, Container, Coroutine
from contextlib import suppress
from itertools import islice
from typing import Any, Final, Protocol

from sloop.serve.edge.tcp import client_has_left

HANDSHAKES_MAX: Final = 256
"""Handshakes at a time. Further clients wait for theirs."""
HANDSHAKE_S: Final = 10.0
"""How long a client may take for its first message, and then for the rest of the handshake."""
CROWDED_HANDSHAKE_S: Final = 1.0
"""How long a handshake may take while `HANDSHAKES_MAX` are under way and further clients wait."""
HANDSHAKES_SHARE: Final = 0.1
"""The share of the time for handshakes of strangers (clients that are not authorised yet), who could otherwise take a
whole core; while requests of open connections wait, the same share of the CPU time holds too. Known networks have the
same once more."""
KNOWN_MAX: Final = 4096
"""How many networks are remembered from which a client was authorised."""
HANDSHAKES_AT_ONCE: Final = 64
"""How many begin at once after a pause."""
BESIDE_NS: Final = 200_000
"""About what one costs beside its cryptography, in CPU time."""
AGAIN_S: Final = 0.01
"""When to look again whether a further handshake may begin."""
SWEEP_S: Final = 0.25
SWEPT_AT_ONCE: Final = 32
"""Connections that are ended in one turn, which takes a millisecond."""
HANDSHAKE: Final = 22
RECORD_HEAD_BYTES: Final = 5
RECORD_BYTES_MAX: Final = 2**14 + 256
"""A record of TLS begins with its type (one byte, `HANDSHAKE` for the first record), a version (two) and its length
(two)."""


class TimeShare:
    """A share of the time of a clock, which is this thread's CPU time if none is given. What was not used is saved up,
    `saved_ns_max` at most."""

    def __init__(self, share: float, saved_ns_max: int, clock: Callable[[], int] | None = None) -> None:
        self._share, self._saved_ns_max, self._clock = share, saved_ns_max, clock or time.thread_time_ns
        self._seen_ns, self._left_ns = 0, 0.0

    def is_left(self) -> bool:
        """Whether some is left now."""
        now_ns = self._clock()
        self._left_ns = min(self._left_ns + self._share * (now_ns - self._seen_ns), self._saved_ns_max)
        self._seen_ns = now_ns
        return self._left_ns > 0

    def spend(self, spent_ns: float) -> None:
        """Use some; more than is left delays the next use. Less than nothing gives some back."""
        self._left_ns -= spent_ns


class Accepted(Protocol):
    """A connection that was accepted. `abort` calls `Handshakes.drop`."""

    network: str
    """See `sloop.serve.edge.listener`."""

    def abort(self) -> None:
        """End it."""
        ...


class FairQueue:
    """Connections that wait for the same thing, apart for known networks and for others. The networks take turns, and
    of each the newest connection comes first: those that have waited long have mostly given up."""

    def __init__(self, known: Container[str]) -> None:
        self._known = known
        self._waiting: tuple[dict[str, dict[Any, None]], ...] = ({}, {})
        """By network, those of networks that were unknown when they came, and the others. The network whose turn it is
        comes first."""

    def __bool__(self) -> bool:
        return any(self._waiting)

    def has(self, *, is_known: bool) -> bool:
        """Whether any waits, of a known network or of another one."""
        return bool(self._waiting[is_known])

    def add(self, connection: "Accepted") -> None:
        """One more waits."""
        self._waiting[connection.network in self._known].setdefault(connection.network, {})[connection] = None

    def know(self, network: str) -> None:
        """The network is known from now on: so are its connections that wait."""
        for connection in self._waiting[False].pop(network, ()):
            self._waiting[True].setdefault(network, {})[connection] = None

    def discard(self, connection: "Accepted") -> None:
        """It does not wait, or no longer."""
        for waiting in self._waiting:
            own = waiting.get(connection.network, {})
            own.pop(connection, None)
            if not own:
                waiting.pop(connection.network, None)

    def take(self, *, is_known: bool) -> Any:  # noqa: ANN401  # what was added
        """The next one, which waits no longer: of a known network, or of another one, if any such waits."""
        waiting = self._waiting[is_known] or self._waiting[not is_known]
        network = next(iter(waiting))
        connection = next(reversed(waiting[network]))
        self.discard(connection)
        if network in waiting:
            waiting[network] = waiting.pop(network)
        return connection


class Handshakes:
    """`begin` does the handshake on a socket, and returns when it is over. `end` ends a connection before that."""

    def __init__(
        self,
        begin: Callable[[socket.socket, Any], Coroutine[Any, Any, None]],
        end: Callable[[Any], None],
        cost_ns: int,
    ) -> None:
        self._begin_one, self._end = begin, end
        self.cost_ns = cost_ns
        """The CPU time that one takes."""
        self.known: dict[str, None] = {}
        """The networks from which a client was authorised, the latest last."""
        most_ns = HANDSHAKES_AT_ONCE * cost_ns
        self._shares = [TimeShare(HANDSHAKES_SHARE, most_ns, time.monotonic_ns) for _ in range(2)]
        """Those of other networks, and of known ones."""
        self._overloaded_shares = [TimeShare(HANDSHAKES_SHARE, cost_ns) for _ in range(2)]
        self.is_overloaded: Callable[[], bool] = lambda: False
        self.given_up = 0
        """Handshakes that took long, ended for others."""
        self._raw: dict[Accepted, tuple[socket.socket, float]] = {}
        """Those that have not begun, by when they were accepted, the oldest first."""
        self._queues: list[FairQueue] = []
        self._ready = self.queue()
        """Those of them whose first message is here."""
        self._going: dict[Accepted, tuple[asyncio.Task[None], float]] = {}
        """Handshakes that have begun, and when, the oldest first."""
        self._next: asyncio.Handle | None = None
        self._sweeper: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def queue(self) -> FairQueue:
        """One more queue of connections, whose networks become known here."""
        made = FairQueue(self.known)
        self._queues.append(made)
        return made

    def add(self, sock: socket.socket, connection: Accepted) -> None:
        """Wait for the first message on an accepted socket. To be called in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._raw[connection] = sock, self._loop.time()
        self._loop.add_reader(sock.fileno(), self._look, connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def drop(self, connection: Accepted) -> None:
        """Give up the handshake of a connection that ends, if it has one."""
        if connection in self._raw:
            self._take(connection).close()
        elif connection in self._going:
            self._going.pop(connection)[0].cancel()

    def note_authorised(self, network: str) -> None:
        """A client that has finished its handshake has been authorised: what that took does not count."""
        is_known = network in self.known
        self._spend(-self.cost_ns, is_known=is_known)
        if not is_known:
            for queue in self._queues:
                queue.know(network)
        self.known.pop(network, None)
        self.known[network] = None
        if len(self.known) > KNOWN_MAX:
            del self.known[next(iter(self.known))]

    def _spend(self, spent_ns: int, *, is_known: bool) -> None:
        self._shares[is_known].spend(spent_ns)
        self._overloaded_shares[is_known].spend(spent_ns)

    def _has_time(self, *, is_known: bool) -> bool:
        is_left = self._shares[is_known].is_left()
        return is_left and (not self.is_overloaded() or self._overloaded_shares[is_known].is_left())

    def _take(self, connection: Accepted) -> socket.socket:
        """The socket of a connection whose handshake has not begun, which waits no longer."""
        sock, _ = self._raw.pop(connection)
        assert self._loop is not None
        self._loop.remove_reader(sock.fileno())
        self._ready.discard(connection)
        return sock

    def _look(self, connection: Accepted) -> None:
        """Something has come, or the client has left."""
        sock, _ = self._raw[connection]
        assert self._loop is not None
        missing = 0
        try:
            found = sock.recv(RECORD_HEAD_BYTES + RECORD_BYTES_MAX, socket.MSG_PEEK)
            missing = missing_bytes(found)
            needed = len(found) + missing
            if missing and client_has_left(sock):
                found = b""
            elif missing and sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) < needed:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)  # from now on it is readable with these
            else:
                missing = 0
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            found = b""
        if not found:
            self._end(connection)
        elif not missing:
            self._loop.remove_reader(sock.fileno())
            self._ready.add(connection)
            self._begin_soon()

    def _begin_soon(self) -> None:
        if self._next is None and self._ready:
            assert self._loop is not None
            self._next = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Begin the next handshake, if one may."""
        self._next = None
        assert self._loop is not None
        if not self._ready:
            return
        waiting = (each for each in (True, False) if self._ready.has(is_known=each))
        is_known = next((each for each in waiting if self._has_time(is_known=each)), None)
        if is_known is None or not self._has_place():
            self._next = self._loop.call_later(AGAIN_S, self._begin)
            return
        connection = self._ready.take(is_known=is_known)
        sock = self._take(connection)
        if client_has_left(sock):
            sock.close()
            self._end(connection)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._spend(self.cost_ns, is_known=is_known)
            going = self._loop.create_task(self._begin_one(sock, connection))
            self._going[connection] = going, self._loop.time()
            going.add_done_callback(lambda _: self._going.pop(connection, None))
        self._begin_soon()

    def _has_place(self) -> bool:
        """Whether one more may go on, if need be in place of the oldest, if that has taken long."""
        if len(self._going) < HANDSHAKES_MAX:
            return True
        assert self._loop is not None
        oldest, (_, began_s) = next(iter(self._going.items()))
        if self._loop.time() - began_s < CROWDED_HANDSHAKE_S:
            return False
        self.given_up += 1
        self._end(oldest)
        return True

    def _sweep(self) -> None:
        """End those whose first message has not come in time."""
        assert self._loop is not None
        self._sweeper = None
        since_s, again_s = self._loop.time() - HANDSHAKE_S, SWEEP_S
        for connection, (_, accepted_s) in list(islice(self._raw.items(), SWEPT_AT_ONCE)):
            if accepted_s >= since_s:
                break
            self._end(connection)
        else:
            again_s = AGAIN_S
        if self._raw:
            self._sweeper = self._loop.call_later(again_s, self._sweep)


def missing_bytes(beginning: bytes) -> int:
    """How many bytes of a client's first record are still missing. 0 as well if it is no record of TLS: the handshake
    then begins, fails, and tells the client so."""
    if beginning[:1] != bytes((HANDSHAKE,)):
        return 0
    if len(beginning) < RECORD_HEAD_BYTES:
        return RECORD_HEAD_BYTES - len(beginning)
    size = int.from_bytes(beginning[3:RECORD_HEAD_BYTES], "big")
    return 0 if size > RECORD_BYTES_MAX else max(0, RECORD_HEAD_BYTES + size - len(beginning))


def measured_ns(context: ssl.SSLContext) -> int:
    """The CPU time of one handshake. Measured is the answer to a client's first message, which depends on the key
    of the certificate; the rest is about the same for all."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    found = []
    for _ in range(3):
        sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
        with suppress(ssl.SSLWantReadError):
            client.wrap_bio(received, sent).do_handshake()
        begun_ns = time.thread_time_ns()
        with suppress(ssl.SSLWantReadError):
            context.wrap_bio(sent, received, server_side=True).do_handshake()
        found.append(time.thread_time_ns() - begun_ns)
    return BESIDE_NS + min(found)
