"""An HTTP/1.1 client with keep-alive connections to one server.

A request is sent at once, on an idle connection or a new one; if all allowed connections are busy, it fails as an
overflow. Each request is reported exactly once. Bodies are delimited by length, by chunks or by the end of the
connection (RFC 9112, section 6).
"""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

from sloop.load.results import Ending
from sloop.units import NS_PER_S

HEAD_BYTES_MAX: Final = 64 * 1024
BODY_BYTES_MAX: Final = 256 * 2**20
FINAL: Final = 200
"""The least status of a response that is not provisional (RFC 9110, section 15.2)."""


class BrokenResponse(Exception):  # it describes a response; `Error` would add nothing
    """The server's response is not valid HTTP, or too large."""


class Response(Struct, frozen=True, gc=False):
    """One response."""

    status: int
    body: bytes
    is_last: bool
    """The server will close the connection."""
    slo_met: bool | None
    """The value of the header `x-slo-met`, if the server sent it."""


class RequestHead:
    """Renders the heads of requests that differ only in their elapsed time."""

    __slots__ = ("_after", "_before")

    def __init__(
        self, *, path: str, host: str, slo_ms: float, content_bytes: int, json_bytes: int, api_key: str = ""
    ) -> None:
        is_binary = json_bytes != content_bytes
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {host}",
            "user-agent: sloop-load",
            f"content-type: {'application/octet-stream' if is_binary else 'application/json'}",
            f"content-length: {content_bytes}",
            *([f"inference-header-content-length: {json_bytes}"] if is_binary else []),
            *([f"x-api-key: {api_key}"] if api_key else []),
            f"x-slo-ms: {slo_ms:.6g}",
        ]
        self._before = "\r\n".join(lines).encode("ascii")
        self._after = self._before + b"\r\n\r\n"

    def render(self, elapsed_ns: int) -> bytes:
        """The head of a request of whose deadline `elapsed_ns` has elapsed."""
        if elapsed_ns == 0:
            return self._after
        return b"%b\r\nx-elapsed-ms: %.3f\r\n\r\n" % (self._before, elapsed_ns / 1e6)


class ResponseReader:
    """Parses the responses on one connection, one after another."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_ends_with_connection",
        "_found",
        "_has_head",
        "_head_bytes",
        "_met",
        "_parser",
    )

    def __init__(self) -> None:
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._found: Response | None = None
        self.on_message_begin()

    def feed(self, received: bytes) -> Response | None:
        """Add bytes; returns the response if it is complete. Bytes beyond its end are an error."""
        assert self._parser is not None, "closed"
        try:
            self._parser.feed_data(received)
        except HttpParserError as error:  # one of ours is its context
            raise BrokenResponse(str(error.__context__ or error)) from None
        except HttpParserUpgrade:
            raise BrokenResponse("another protocol than HTTP/1") from None
        self._head_bytes += len(received)
        if not self._has_head and self._head_bytes > HEAD_BYTES_MAX:
            raise BrokenResponse(f"the head exceeds {HEAD_BYTES_MAX} bytes")
        found, self._found = self._found, None
        return found

    def close(self) -> Response | None:
        """The connection was closed: returns the response that this completes, if any. To be called once."""
        parser, self._parser = self._parser, None  # which knows the methods of this object: a cycle
        assert parser is not None
        is_whole = self._has_head and parser.get_status_code() >= FINAL and self._ends_with_connection
        return self._response(parser, is_last=True) if is_whole else None

    def _response(self, parser: HttpResponseParser, *, is_last: bool) -> Response:
        return Response(parser.get_status_code(), b"".join(self._body), is_last, self._met)

    # What the parser reports

    def on_message_begin(self) -> None:
        if self._found is not None:
            raise BrokenResponse("bytes after the end of the response")
        self._body: list[bytes] = []
        self._body_bytes = self._head_bytes = 0
        self._has_head = False
        self._ends_with_connection = True
        self._met: bool | None = None

    def on_header(self, name: bytes, value: bytes) -> None:
        known = name.lower()
        if known == b"x-slo-met":
            self._met = value.lower() == b"true"
        elif known in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, part: bytes) -> None:
        self._body_bytes += len(part)
        if self._body_bytes > BODY_BYTES_MAX:
            raise BrokenResponse(f"the body exceeds {BODY_BYTES_MAX} bytes")
        self._body.append(part)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._ends_with_connection = False
        if self._parser.get_status_code() >= FINAL:  # others are provisional
            self._found = self._response(self._parser, is_last=not self._parser.should_keep_alive())


IDLE_NS_MAX = 3 * NS_PER_S
"""A connection that was idle for less is safe to reuse: servers close idle connections after 5 s or more."""

SPARE_NS_MAX = NS_PER_S
"""Idle connections beyond the warm ones are closed after this time. Otherwise, at a server that limits its connections,
unused connections of an earlier burst would keep new connections and their requests waiting."""

CONNECTING_MAX = 64
"""Connections opened concurrently: more would overflow the server's backlog of new connections (often 128)."""


class Outgoing(Struct, gc=False):
    """A request that was submitted and has not ended."""

    number: int
    head: bytes
    body: bytes
    handed_ns: int
    sent_ns: int = 0


Report = Callable[[Outgoing, int, Ending, Response | None], None]
"""Called when a request ends: the request, the monotonic time in ns, how it ended, and the response, if any."""


class Server(Struct, frozen=True):
    """The server to connect to."""

    host: str
    port: int
    tls: bool = False
    mark: bytes = b'"outputs"'
    """Text that every answer with status 200 must contain; an answer without it is broken."""


class Connection(asyncio.Protocol):
    """One connection: at most one request at a time."""

    __slots__ = ("_pool", "_reader", "idle_since_ns", "outgoing", "transport")

    def __init__(self, pool: "Connections") -> None:
        self._pool = pool
        self._reader = ResponseReader()
        self.transport: asyncio.Transport | None = None
        self.outgoing: Outgoing | None = None
        self.idle_since_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it

    def send(self, outgoing: Outgoing) -> None:
        assert self.transport is not None, "not connected yet"
        self.outgoing = outgoing
        outgoing.sent_ns = time.monotonic_ns()
        if len(outgoing.body) < 65_536:
            self.transport.write(outgoing.head + outgoing.body)
        else:
            self.transport.writelines((outgoing.head, outgoing.body))

    def data_received(self, data: bytes) -> None:
        if self.outgoing is None:
            self.fail(Ending.BROKEN)  # a response without a request
            return
        try:
            answer = self._reader.feed(data)
        except BrokenResponse:
            self.fail(Ending.BROKEN)
            return
        if answer is not None:
            self._finish(answer)

    def _finish(self, answer: Response) -> None:
        outgoing, self.outgoing = self.outgoing, None
        assert outgoing is not None, "a response without a request"
        now_ns = time.monotonic_ns()
        if answer.is_last:
            self._pool.forget(self)
            self.abort()
        else:
            self.idle_since_ns = now_ns
            self._pool.release(self)
        is_broken = answer.status == 200 and self._pool.mark not in answer.body
        self._pool.report(outgoing, now_ns, Ending.BROKEN if is_broken else Ending.ANSWERED, answer)

    def fail(self, ending: Ending) -> None:
        """Close this connection, and fail its request if it has one."""
        outgoing, self.outgoing = self.outgoing, None
        self._pool.forget(self)
        self.abort()
        if outgoing is not None:
            self._pool.report(outgoing, time.monotonic_ns(), ending, None)

    @property
    def is_closing(self) -> bool:
        return self.transport is None or self.transport.is_closing()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        answer = self._reader.close()
        if answer is not None and self.outgoing is not None and exc is None:
            self._finish(answer)
        else:
            self.fail(Ending.DISCONNECTED)


class Connections:
    """A pool of connections to one server. `report` is called exactly once for every request passed to `send`."""

    def __init__(self, server: Server, report: Report, *, connections_max: int, timeout_ns: int) -> None:
        self.report = report
        self.mark = server.mark
        self.opened = 0
        """The number of connections opened so far."""
        self._kept = 0
        self._is_closed = False
        self._server = server
        self._max = connections_max
        self._timeout_ns = timeout_ns
        self._loop = asyncio.get_running_loop()
        self._tls = ssl.create_default_context() if server.tls else None
        self._open: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._waiting: deque[Outgoing] = deque()
        """Requests that wait for a connection of their own to open; at most as many as may still be opened. None is
        sent on one that becomes idle, as clients that are independent cannot: old requests would get all of these."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._unanswered: deque[tuple[int, Connection, Outgoing]] = deque()
        """Open requests in the order of their timeouts, which is the order of sending."""

    async def warm(self, count: int) -> None:
        """Try to open this many connections; failures are ignored, because `send` opens connections as needed."""
        self._kept = count
        for first in range(0, count, CONNECTING_MAX):
            await asyncio.gather(*(self._connect() for _ in range(first, min(count, first + CONNECTING_MAX))))

    def send(self, outgoing: Outgoing) -> None:
        """Send now; the request fails as an overflow if all allowed connections are busy."""
        connection = self._take_idle(outgoing.handed_ns)
        if connection is not None:
            self._dispatch(connection, outgoing)
        elif len(self._open) + len(self._waiting) < self._max:
            self._waiting.append(outgoing)
            self._connect_more()
        else:
            self.report(outgoing, time.monotonic_ns(), Ending.OVERFLOW, None)

    def expire(self, now_ns: int) -> None:
        """Fail requests after their timeout, forget answered ones, and close connections that were idle for long."""
        self._close_spare(now_ns)
        while self._unanswered:
            timeout_ns, connection, outgoing = self._unanswered[0]
            is_answered = connection.outgoing is not outgoing
            if not is_answered and timeout_ns > now_ns:
                break
            self._unanswered.popleft()
            if not is_answered:
                connection.fail(Ending.TIMEOUT)
        while self._waiting and self._waiting[0].handed_ns + self._timeout_ns <= now_ns:
            self.report(self._waiting.popleft(), now_ns, Ending.TIMEOUT, None)

    def _close_spare(self, now_ns: int) -> None:
        """Close connections that were idle for long; `_idle` is in the order in which they became idle."""
        surplus = self._idle[: max(0, len(self._idle) - self._kept)]
        for connection in surplus:
            if now_ns - connection.idle_since_ns > SPARE_NS_MAX:
                self.forget(connection)
                connection.abort()

    def release(self, connection: Connection) -> None:
        """A connection has become idle."""
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection was closed."""
        self._open.pop(id(connection), None)
        with suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        """Close every connection; requests without an answer fail."""
        self._is_closed = True
        for connecting in self._connecting:
            connecting.cancel()
        while self._waiting:
            self.report(self._waiting.popleft(), time.monotonic_ns(), Ending.UNREACHABLE, None)
        for connection in list(self._open.values()):
            connection.fail(Ending.TIMEOUT)

    def _dispatch(self, connection: Connection, outgoing: Outgoing) -> None:
        connection.send(outgoing)
        self._unanswered.append((outgoing.sent_ns + self._timeout_ns, connection, outgoing))

    def _take_idle(self, now_ns: int) -> Connection | None:
        """The most recently used connection, so that unneeded ones stay idle and are closed."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        if now_ns - connection.idle_since_ns <= IDLE_NS_MAX:
            return connection
        for stale in [connection, *self._idle]:
            self.forget(stale)
            stale.abort()
        return None

    def _connect_more(self) -> None:
        while len(self._connecting) < min(CONNECTING_MAX, len(self._waiting)):
            connecting = self._loop.create_task(self._connect())
            self._connecting.add(connecting)
            connecting.add_done_callback(self._connected)

    def _connected(self, connecting: asyncio.Task[None]) -> None:
        self._connecting.discard(connecting)
        if not connecting.cancelled():
            connecting.result()
            self._connect_more()

    async def _connect(self) -> None:
        """Open one connection and use it; on failure, the request that has waited longest fails."""
        connecting = self._loop.create_connection(
            lambda: Connection(self), self._server.host, self._server.port, ssl=self._tls
        )
        try:
            _, connection = await asyncio.wait_for(connecting, self._timeout_ns / NS_PER_S)
        except (TimeoutError, OSError):
            if self._waiting:
                self.report(self._waiting.popleft(), time.monotonic_ns(), Ending.UNREACHABLE, None)
            return
        self.opened += 1
        if self._is_closed:
            connection.abort()  # `wait_for` can return a connection although it was cancelled in the same turn
        if connection.is_closing:
            return  # closed by the line above, or already by the server
        self._open[id(connection)] = connection
        connection.idle_since_ns = time.monotonic_ns()
        if self._waiting:
            self._dispatch(connection, self._waiting.popleft())
        else:
            self.release(connection)
