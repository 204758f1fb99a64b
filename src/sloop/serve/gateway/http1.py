"""HTTP/1.1 in the server's own event loop: bytes in, `Exchange`s out, each answered once and in order.

Promises: keep-alive, pipelining, chunked bodies, `Expect: 100-continue`; everything a client can make grow is bounded
(head, body, connections, time to send a request, idle time); whoever goes away is reported to whoever works for them.
Knows nothing of models or JSON beyond the one error object it must send itself.

Why not a ready-made server: in the same run, with the same trivial answer and two cores, Granian 2.8 embedded in this
loop (its Rust threads hand every request over the interpreter lock) reached 43,000 req/s at 64 connections and a p50
of 0.17 ms at one; this parser (llhttp, by way of httptools) without any hand-over reaches 105,000 and 0.07 ms for less
than a third of the CPU, and the CPU is what the models need. `benchmarks/` holds the comparison.
Source: RFC 9112 (HTTP/1.1), RFC 9110 sections 10.1.1 (Expect) and 15 (status codes).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import unquote

import httptools
import msgspec

HEAD_BYTES_MAX: Final = 64 * 1024
"""Request line and headers together."""
SEND_S_MAX: Final = 60.0
"""A client may take this long from the first byte of a request to its last."""
IDLE_S_MAX: Final = 120.0
"""A connection may lie idle this long between two requests."""
LINGER_S: Final = 2.0
"""How long a refused body is read and thrown away, so that its sender sees the answer and not a reset."""
SWEEP_S: Final = 5.0
ONE_WRITE_BYTES: Final = 64 * 1024
"""Bodies up to here are joined to their head; larger ones are not copied."""

STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
JSON: Final = b"application/json"


class Exchange:
    """One request and the duty to answer it once, by `reply`."""

    __slots__ = ("body", "connection", "headers", "is_open", "keep_alive", "method", "on_gone", "url")

    def __init__(self, connection: "Connection", method: str, url: bytes, headers: dict[bytes, bytes]) -> None:
        self.connection = connection
        self.method = method
        self.url = url
        self.headers = headers
        """Names in lower case."""
        self.body = b""
        self.keep_alive = True
        self.is_open = True
        self.on_gone: Callable[[], None] | None = None
        """Called if the client goes away before the answer."""

    @property
    def path(self) -> str:
        """The path, percent-decoded, without the part after `?`."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        return unquote(path) if "%" in path else path

    @property
    def query_string(self) -> str:
        return self.url.partition(b"?")[2].decode("latin-1")

    def reply(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """Answer. `headers` are whole lines, each ending in CRLF. Does nothing when the client is gone."""
        if self.is_open:
            self.is_open = False
            self.connection.write_answer(self, status, body, content_type, headers)

    def reply_error(self, status: int, what: str, fix: str = "", *, headers: bytes = b"") -> None:
        """Answer `{"error": …}`: what is wrong with its value, and the fix."""
        self.reply(status, error_body(what, fix), headers=headers)


def error_body(what: str, fix: str = "") -> bytes:
    """The protocol's error object; one string, because that is what its clients show."""
    return msgspec.json.encode({"error": f"{what}; help: {fix}" if fix else what})


class Door(Protocol):
    """What a connection needs of whoever accepted it."""

    body_bytes_max: int
    is_closing: bool
    date_line: bytes
    """The `date` header, ready to be written."""

    def answer(self, exchange: Exchange) -> None:
        """Take a complete request. Must not raise."""
        ...

    def enter(self, connection: "Connection") -> str:
        """Note a new connection; a text is the reason it cannot stay."""
        ...

    def leave(self, connection: "Connection") -> None:
        """Forget a connection."""
        ...


class Connection(asyncio.Protocol):
    """One client. Requests are handed over one at a time, in order; `transport` is None once it is gone."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.since_s = 0.0
        """When the request in progress began, or the connection fell idle."""
        self.current: Exchange | None = None
        self.waiting: deque[Exchange] = deque()
        self._reading: Exchange | None = None
        self._parts: list[bytes] = []
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._body_bytes = 0
        self._in_head = True
        self._is_deaf = False

    # what the event loop tells us

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]  # uvloop's own class
        self.since_s = asyncio.get_running_loop().time()
        if refused := self.door.enter(self):
            self._refuse(503, refused, "reuse connections, or try again later")

    def connection_lost(self, _exc: Exception | None) -> None:
        self.transport = None
        self.door.leave(self)
        self.waiting.clear()
        if self.current is not None:
            gone, self.current.is_open = self.current.on_gone, False
            self.current = None
            if gone is not None:
                gone()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._is_deaf = True  # the request itself is answered; what would follow is not HTTP/1.1
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP/1.1: {error}", "send a well-formed HTTP/1.1 request")
        if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(431, f"the request's head is over {HEAD_BYTES_MAX} bytes", "send fewer or shorter headers")

    def pause_writing(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.transport is not None and not self.waiting:
            self.transport.resume_reading()

    # what the parser tells us; an exception here would be swallowed into a parser error, so none is raised

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._parts = []
        self._body_bytes = 0
        self._reading = None
        if self.current is None:
            self.since_s = asyncio.get_running_loop().time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        url = self._url if self._url.startswith(b"/") else origin_form(self._url)
        self._reading = Exchange(self, self.parser.get_method().decode("ascii"), url, self._headers)
        length = self._headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.door.body_bytes_max:
            self._refuse_body(int(length))
        elif b"expect" in self._headers and self.transport is not None and self.current is None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._is_deaf:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self.door.body_bytes_max:
            self._refuse_body(self._body_bytes)
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        exchange, self._reading = self._reading, None
        if exchange is None or self._is_deaf:
            return
        parts = self._parts
        exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        exchange.keep_alive = self.parser.should_keep_alive() and not self.parser.should_upgrade()
        if self.current is None:
            self._hand_over(exchange)
        else:
            self.waiting.append(exchange)
            if self.transport is not None:
                self.transport.pause_reading()

    # what the exchange tells us

    def write_answer(self, exchange: Exchange, status: int, body: bytes, content_type: bytes, headers: bytes) -> None:
        transport = self.transport
        if transport is None:
            return
        closes = not exchange.keep_alive or self.door.is_closing
        head = b"%b%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            STATUS_LINES[status],
            self.door.date_line,
            content_type,
            len(body),
            headers,
            b"connection: close\r\n" if closes else b"",
        )
        if exchange.method == "HEAD":
            transport.write(head)
        elif len(body) <= ONE_WRITE_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        self.current = None
        if closes:
            self.waiting.clear()
            self._is_deaf = True
            transport.close()
        elif self.waiting:
            # Not at once: a queue of requests that are all answered on the spot must not become a deep recursion.
            asyncio.get_running_loop().call_soon(self._next)

    def sweep(self, now_s: float) -> None:
        """Close what has been idle or sending for too long."""
        if self.current is not None or self.transport is None or self._is_deaf:
            return
        is_sending = not self._in_head or self._head_bytes > 0
        if is_sending and now_s - self.since_s > SEND_S_MAX:
            self._refuse(408, f"the request took more than {SEND_S_MAX:.0f} s to arrive", "send it faster")
        elif not is_sending and now_s - self.since_s > IDLE_S_MAX:
            self.transport.close()

    def close_if_idle(self) -> None:
        """Let go of a client that waits for nothing."""
        if self.current is None and self.transport is not None:
            self.transport.close()

    def _hand_over(self, exchange: Exchange) -> None:
        self.current = exchange
        self.door.answer(exchange)
        if not exchange.is_open:
            self.since_s = asyncio.get_running_loop().time()

    def _next(self) -> None:
        if self.current is None and self.waiting and self.transport is not None:
            exchange = self.waiting.popleft()
            if not self.waiting:
                self.transport.resume_reading()
            self._hand_over(exchange)

    def _refuse_body(self, size_bytes: int) -> None:
        limit = self.door.body_bytes_max
        self._refuse(
            413,
            f"the body is {'at least ' if size_bytes == self._body_bytes else ''}{size_bytes} bytes, over {limit}",
            "send fewer rows, or binary tensors instead of JSON; the server's limit is body_bytes_max",
        )

    def _refuse(self, status: int, what: str, fix: str) -> None:
        """Answer an error for a request that cannot be read to its end, and close the connection behind it."""
        if self._is_deaf or self.transport is None:
            return
        self._is_deaf = True
        self._parts = []
        self.waiting.clear()
        if self.current is not None:  # an earlier request is still at work: its answer is the last
            self.current.keep_alive = False
            return
        broken = Exchange(self, "", b"", {})
        body = error_body(what, fix)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        broken.is_open = False
        self.transport.write(STATUS_LINES[status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)


def origin_form(url: bytes) -> bytes:
    """Path and query of a request target in absolute form (RFC 9112 section 3.2.2); `/` where there is none."""
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        return url
    return (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
