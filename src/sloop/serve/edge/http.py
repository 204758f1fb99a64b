"""The HTTP/1.1 server: an asyncio protocol on `httptools`, the parser of Node.js.

The rest of the edge receives an `Exchange` for each complete request and answers it once, now or later. What a client
may cost before that is bounded here: the key is checked on the head, room for the body is taken as bytes arrive, every
wait for a client ends, and while there is more to do than can be done, what has waited too long is refused unread
(`Intake`). Framing follows RFC 9112; a message that two parsers could read differently is answered 400.
"""

import asyncio
import socket
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from sloop.app.limits import ServerLimits, setting
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.bodies import BodyMemory, BodyReservation
from sloop.serve.edge.exchange import (
    BODILESS,
    HEAD_BYTES_MAX,
    INFLATERS,
    JSON,
    LINE_BYTES_MAX,
    OCTETS,
    Buffer,
    Exchange,
    Fields,
    KnownHeads,
    accepts_gzip,
    check_head,
    error_body,
    head_of,
    head_too_large,
    json_limit,
    line_too_long,
    malformed,
)
from sloop.serve.edge.identity import REQUEST_ID, named
from sloop.serve.edge.intake import (
    LARGE_BYTES,
    PAGE_DEADLINE_NS,
    STEP_NS,
    TOO_OLD,
    Intake,
    LargeIntake,
    announced_bytes,
    is_whole,
    target_of,
)
from sloop.serve.edge.listener import Listener, ServerConnection, Tls
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.tcp import client_has_left, waited_in_kernel_ns
from sloop.text import quoted
from sloop.units import NS_PER_MS, NS_PER_S

AHEAD_BYTES: Final = 2 * 1024
"""Bytes parsed at a time where requests may follow each other, which bounds the requests that are parsed ahead."""
UNREAD_BYTES_MAX: Final = 64 * 1024
"""Bytes that wait behind an unanswered request before reading from the connection pauses."""
ALL_UNREAD_BYTES_MAX: Final = 64 * 2**20
"""Unparsed bytes on all connections together; beyond it, connections that add to them are closed."""
UNKNOWN_HEADS: Final = 64
LOOKED_UP: Final = 8
"""Of so many heads in a row that were not known, so many are looked up and kept: a client whose heads all differ,
because each request has an id, need not pay for both."""
LINGER_S: Final = 2.0
"""Seconds in which the rest of a refused body is read and discarded; else many clients would see a connection error
instead of the answer."""
LINGER_BYTES_MAX: Final = 2**20
"""The same in bytes, for clients that sent no valid key; for others it is the limit of a body."""
UNAUTHORISED_RPS: Final = 100
"""Requests without a valid key that are answered at once in a second. Further ones are answered `UNAUTHORISED_S` later:
clients that connect again as soon as they are refused, and guess keys, would take the time of all others."""
UNAUTHORISED_S: Final = 1.0
SWEEP_S: Final = 0.25
GLANCE_BYTES: Final = 16 * 1024
"""How much of a request is looked at, but not read, to find its path and deadline before it is refused."""
ALL_GLANCE_BYTES: Final = 2**18
"""How much of it is read and discarded then."""
TEXT_BYTES_MIN: Final = 16 * 1024
TEXT_BYTES_MAX: Final = 2**18
"""The answers that are compressed if the client asks for it: below, it saves few packets; above, it takes too long."""
CORS_EXPOSED: Final = "inference-header-content-length, retry-after, x-request-id, x-slo-met"
CORS_PREFLIGHT: Final = (
    ("access-control-allow-methods", "GET, HEAD, POST, OPTIONS"),
    (
        "access-control-allow-headers",
        "authorization, content-encoding, content-type, inference-header-content-length, traceparent, x-api-key, "
        "x-elapsed-ms, x-request-id, x-slo-ms",
    ),
    ("access-control-max-age", "600"),
)


SEND_RATE_BYTES: Final = 16 * 1024
"""The bytes of an answer that a client must take in a second, on average, after `ServerLimits.body_s`."""
CHUNK_OVERHEAD: Final = 8
"""Bytes of framing for each byte of a chunked body: a client that sends a chunk for each byte needs six."""
METHODS: Final = {each.encode(): each for each in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE")}
NAMES: Final[dict[bytes, str]] = {}
"""Names of headers as clients spell them, and in lower case."""
NAMES_MAX: Final = 512
CLOSES: Final = b"connection: close\r\n"
BREAKING: Final = frozenset((400, 414, 417, 431, 501, 505))
"""Statuses of heads after which it is not certain where the next message begins."""
LAST_READ_S: Final = 0.05
"""How long an idle connection stays open when the server stops: its next request may have been sent already."""
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(ServerConnection):
    """One connection. Its requests are answered one after another, in their order."""

    __slots__ = (
        "_answering",
        "_began_ns",
        "_broken",
        "_fields",
        "_has_taken",
        "_head_bytes",
        "_incoming",
        "_is_admitted",
        "_is_advancing",
        "_is_large_admitted",
        "_is_lingering",
        "_is_sending",
        "_lingered_bytes",
        "_parser",
        "_ready",
        "_server",
        "_unknown",
        "_unread",
        "_unsent",
        "_url",
        "_wait",
        "_waits_for_turn",
        "sent_by_s",
    )

    def __init__(self, server: "HttpServer") -> None:
        super().__init__(server.listener)
        self._server = server
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._wait: dict[ServerConnection, float] | None = server.idle
        """The mapping of the server that this connection is in."""
        server.idle[self] = server.now_s
        self._fields: dict[str, str] | None = None
        """The headers of the request whose head is being received."""
        self._url = b""
        self._head_bytes = 0
        self._unknown = 0
        """How many heads were parsed since the last one that was known."""
        self._began_ns = 0
        self._incoming: Exchange | None = None
        """The request whose body is being received."""
        self._ready: deque[Exchange] = deque()
        """Complete requests that wait until the one before is answered."""
        self._answering: Exchange | None = None
        """The request that the server works on, or whose answer is being sent."""
        self._broken: Refusal | None = None
        """What is wrong with the bytes that follow `_ready`; the connection ends with this answer."""
        self._unread: Buffer = b""
        """Bytes that have arrived and were not parsed yet."""
        self._is_advancing = self._is_lingering = self._is_sending = False
        self._waits_for_turn = False
        """Whether further requests wait for the turn of this connection."""
        self._has_taken = False
        """Whether a request was taken up since `_advance` began."""
        self._is_admitted = self._is_large_admitted = False
        """Whether the next request was deferred and is taken up now, before its body had been received or after."""
        self._lingered_bytes = self._unsent = 0
        self.sent_by_s = 0.0

    # What the transport reports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.set_write_buffer_limits(high=0)  # `pause_writing` then says that an answer has not left whole

    def data_received(self, data: bytes) -> None:
        if self._answering is not None or self._unread or self._ready or self._is_lingering:
            self._hold_back(data)
            return
        if self._incoming is None and self._fields is None:
            server, now_ns = self._server, time.monotonic_ns()
            self._began_ns = now_ns
            if self.waited_ns:
                self._began_ns -= self.waited_ns
                self.waited_ns = 0
            if server.intake.is_behind(now_ns):
                self._hold_back(data)
                self._defer(server.intake)
                return
            if self._knows(data):
                self._take_up_only()
                return
            if server.large.is_busy and announced_bytes(data) > LARGE_BYTES and server.large.is_behind(now_ns):
                self._hold_back(data)
                self._defer(server.large)
                return
        self._feed(data)

    def eof_received(self) -> bool:
        """The client sends no more: it has gone, or its message is cut short."""
        if self._waits_for_turn:  # which of the two is known when all has been parsed
            self._server.intake.go_on_later(self._end_after_turn)
            return True
        if self._is_sending and self._answering is not None:
            self._answering.is_last = True
            return True
        if (self._incoming is not None or self._fields is not None) and self._answering is None and not self._ready:
            self._break(Refusal(400, "the request ends before it is complete", "send as many bytes as announced"))
        self._lose()
        return False

    def _end_after_turn(self) -> None:
        if self.transport is not None and not self._is_lingering and not self.eof_received():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_for(None)
        self._parser = None  # it knows the methods of this object: a cycle
        self._server.unsent_bytes -= self._unsent
        self._unsent = 0
        self._lose()

    def pause_writing(self) -> None:
        """Some of an answer has not left; `resume_writing` is called when all has. With TLS, both are also called for
        what follows the handshake, and though nothing is unsent."""
        assert self.transport is not None
        self._unsent = self.transport.get_write_buffer_size()
        if not self._unsent:
            return
        self._is_sending = True
        self._server.unsent_bytes += self._unsent
        self.sent_by_s = self._server.now_s + self._server.limits.body_s
        self.sent_by_s += self._unsent / SEND_RATE_BYTES
        self._wait_for(self._server.sending)

    def resume_writing(self) -> None:
        if not self._is_sending:
            return
        self._is_sending = False
        self._server.unsent_bytes -= self._unsent
        self._unsent = 0
        if self._answering is not None and self._answering.is_open:  # what has left is not its answer
            self._wait_for(None)
        elif not self._is_advancing:
            self._sent()

    # What the parser reports

    def on_message_begin(self) -> None:
        self._fields = {}
        self._url = b""
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        fields = self._fields
        if fields is None:  # after the last chunk: ignored, as RFC 9110 allows
            return
        known = NAMES.get(name) or _name_of(name)
        if known in fields:
            fields[known] += f", {value.decode('latin-1')}"
        else:
            fields[known] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        parser, fields = self._parser, self._fields
        assert parser is not None
        assert fields is not None
        method = parser.get_method()
        exchange = self._incoming = Exchange(
            self, METHODS.get(method) or method.decode("ascii"), fields, self._began_ns
        )
        self._fields = None
        self._unknown += 1
        try:
            # A connection that stays without saying so is HTTP/1.1; else the version is looked up, which costs more.
            exchange.is_last = is_last = not parser.should_keep_alive()
            version = parser.get_http_version() if is_last or "connection" in fields else "1.1"
            if self._broken is not None:
                raise self._broken
            check_head(exchange, self._url, version)
            if self._server.admit(exchange) and self.is_stranger:
                self.note_authorised()
            if "expect" in fields and version == "1.1":
                _check_expectation(exchange)
        except Refusal as refusal:
            exchange.drop()
            exchange.refusal = refusal.with_traceback(None)  # whose frames know the exchange: a cycle
            # Whether a client that waits for permission still sends its body, nobody can know.
            exchange.is_last = exchange.is_last or "expect" in fields or refusal.status in BREAKING

    def on_body(self, part: bytes) -> None:
        exchange = self._incoming
        assert exchange is not None
        exchange.left_bytes -= len(part)
        if exchange.refusal is None:
            try:
                exchange.receive(part, self._server.bodies)
            except Refusal as refusal:
                exchange.drop()
                exchange.refusal = refusal.with_traceback(None)

    def on_message_complete(self) -> None:
        exchange, self._incoming = self._incoming, None
        assert exchange is not None
        self._ready.append(exchange)

    def _has_stopped_early(self, exchange: Exchange) -> bool:
        """Whether the parser has stopped at the end of a head that asks for another protocol, with a body to come."""
        assert self._parser is not None
        headers = exchange.headers
        return self._parser.should_upgrade() and (
            "transfer-encoding" in headers or headers.get("content-length", "").strip("0") != ""
        )

    # One request after another

    @property
    def deferred_ns(self) -> int:
        """When the request that was deferred began; 0 if none is."""
        if self._wait is not self._server.deferred:
            return 0
        return self._ready[0].began_ns if self._ready else self._began_ns

    def age_ns(self) -> int:
        """How long the request that was deferred has waited, in the kernel too: under overload, and where the CPU time
        of this process is limited, that is long."""
        now_ns, transport = time.monotonic_ns(), self.transport
        if self._ready or transport is None:
            return now_ns - self.deferred_ns
        in_kernel_ns = waited_in_kernel_ns(transport.get_extra_info("socket"))  # since the last bytes came
        self._began_ns = min(self._began_ns, now_ns - in_kernel_ns)
        return now_ns - self._began_ns

    @property
    def patience_ns(self) -> int:
        """How long the request that was deferred may wait."""
        server, intake = self._server, self._server.intake
        if self._ready or announced_bytes(self._unread) > LARGE_BYTES:
            intake = server.large
        return intake.patience_ns(server.deadline_of(*self._target(), is_authorised=bool(self._ready)))

    def _target(self) -> tuple[str, str]:
        """The path of the request that was deferred, and its own deadline in ms, if it has one."""
        if self._ready:
            return self._ready[0].path, self._ready[0].headers.get("x-slo-ms", "")
        return target_of(self._unread)

    def start(self) -> None:
        """Take up the request that was deferred."""
        self._wait_for(None)
        self._is_admitted, self._is_large_admitted = True, bool(self._ready)
        self._advance()
        self._is_admitted = self._is_large_admitted = False

    def refuse_deferred(self) -> None:
        """Refuse the request that was deferred: without parsing it, if it has arrived whole."""
        transport, (refusal, whole) = self.transport, self._server.too_old
        self._server.bodies.refused["age"] += 1
        assert transport is not None
        if self._ready:
            self._wait_for(None)
            self._ready[0].drop()
            self._ready[0].refusal = refusal
            self._advance()
        elif is_whole(self._unread) and not self._server.is_draining:
            self._release_unread(len(self._unread))
            transport.resume_reading()  # so much had come that it was paused
            self._wait_for(self._server.idle)
            transport.write(whole)
            if self._is_sending:  # it has not taken its last answers
                self.abort()
        else:
            self._wait_for(None)
            self._break(refusal, "HEAD" if self._unread[:5] == b"HEAD " else "")
            if self._is_lingering and self.transport is not None:
                self.transport.pause_reading()  # to receive the rest would cost far more than to refuse it

    def _defer(self, intake: Intake) -> None:
        """Let what has arrived wait until this intake calls `start` or `refuse_deferred`."""
        if self.transport is not None:
            self._wait_for(self._server.deferred)
            is_page = not self._ready and self._unread[:4] == b"GET "
            intake.defer(self, is_page=is_page, is_patient=not is_page and self._server.is_patient(*self._target()))

    def answer(
        self,
        exchange: Exchange,
        status: int,
        body: Buffer | Sequence[Buffer],
        content_type: str,
        headers: Fields,
    ) -> None:
        """Send the answer of a request, which `Exchange.reply` calls once."""
        server, transport = self._server, self.transport
        bytes_in = exchange.held_bytes
        intake = server.intake if bytes_in <= LARGE_BYTES else server.large
        if exchange.taken_ns and status == HTTPStatus.OK and intake.has_waiting:
            intake.note_stay(time.monotonic_ns() - exchange.taken_ns)
        exchange.drop()
        if transport is None:
            return
        parts: tuple[Buffer, ...]
        if type(body) is bytes:
            parts, size = (body,), len(body)
        else:
            parts = (body,) if isinstance(body, bytes | bytearray | memoryview) else tuple(body)
            size = sum(map(_bytes_of, parts))
        if size > server.limits.answers_bytes:
            status, parts, headers = 500, (_answer_too_large(size, server.limits.answers_bytes),), ()
            content_type, size = JSON, len(parts[0])
        elif size > TEXT_BYTES_MIN:
            parts, size, headers = server.prepared(exchange, parts, size, content_type, headers)
        if server.always:
            headers = (*headers, *server.always)
        if server.access is not None:
            server.access.add(
                "http",
                self.address,
                exchange.method,
                exchange.path,
                status,
                began_ns=exchange.began_ns,
                bytes_in=bytes_in,
                bytes_out=size,
                request_id=exchange.name,
            )
        head = head_of(status, content_type, headers)
        if REQUEST_ID in exchange.headers and (name := named(exchange.headers[REQUEST_ID])):
            head = b"".join((head, b"x-request-id: ", name.encode(), b"\r\n"))
        exchange.is_last = exchange.is_last or server.is_draining
        stays = CLOSES if exchange.is_last else server.stays
        length = b"" if status in BODILESS else b"content-length: %d\r\n" % size
        if size <= UNREAD_BYTES_MAX:
            has_no_body = status in BODILESS or exchange.method == "HEAD"
            transport.write(b"".join((head, length, stays, server.date_line, *(() if has_no_body else parts))))
        else:
            start = b"".join((head, length, stays, server.date_line))
            transport.writelines((start,) if exchange.method == "HEAD" else (start, *parts))
            server.limit_unsent()
        if not self._is_sending and not self._is_advancing:
            self._sent()

    def _sent(self) -> None:
        """The answer has left whole."""
        exchange, self._answering = self._answering, None
        if exchange is not None:
            self._server.close_request()
            if exchange.on_sent is not None:
                exchange.on_sent()
            if exchange.is_last:
                self._end()
                return
        if self._is_advancing:
            return
        is_within_head = self._fields is not None  # of which the first byte may be all that has come
        if self._ready or self._unread or self._broken is not None or self._incoming is not None or is_within_head:
            self._advance()
        elif self._wait is None and not (
            self.is_stranger or self._server.is_draining
        ):  # what `_advance` does in the most frequent case
            self._wait = idle = self._server.idle
            idle[self] = self._server.now_s
        else:
            self._rest()

    def _feed(self, data: bytes) -> None:
        """Parse bytes; what follows the request that is then answered waits."""
        limit = self._parsed_at_once()
        if len(data) > limit:
            view = memoryview(data)
            self._unread = view[limit:]
            self._server.unread_bytes += len(data) - limit
            self._parse(view[:limit])
        else:
            self._parse(data)
            if len(self._ready) == 1 and self._incoming is None and self._fields is None and self._broken is None:
                self._take_up_only()
                return
        self._advance()

    def _take_up_only(self) -> None:
        """Answer the only request that is here: what `_advance` does in the most frequent case."""
        exchange, server = self._ready[0], self._server
        is_plain = self._wait is server.idle and not self.is_stranger
        if exchange.refusal is not None or exchange.held_bytes > LARGE_BYTES or not is_plain:
            self._advance()
            return
        self._ready.clear()
        self._answering = exchange
        server.open_requests += 1
        del server.idle[self]
        self._wait = None
        server.answer(exchange)

    def _parsed_at_once(self) -> int:
        """How many bytes may be parsed at once, so that few requests are parsed before the first is answered."""
        return AHEAD_BYTES if self._incoming is None else max(AHEAD_BYTES, self._incoming.left_bytes)

    def _release_unread(self, size: int) -> None:
        self._unread = self._unread[size:] if size < len(self._unread) else b""
        self._server.unread_bytes -= size

    def _parse(self, data: Buffer) -> None:
        parser = self._parser
        assert parser is not None
        is_kept = self._fields is None and self._incoming is None and self._unknown % UNKNOWN_HEADS < LOOKED_UP
        try:
            parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            # The client would speak another protocol as well; it gets HTTP/1.1, as RFC 9110 7.8 allows.
            has_body = self._has_stopped_early(self._ready[-1])
            self._parser = HttpRequestParser(self)
            if has_body:
                self._parse_body_of(self._ready.pop())
            rest = data[upgrade.args[0] :]
            self._server.unread_bytes += len(rest)
            self._unread = bytes(rest) + bytes(self._unread)
        except HttpParserError as error:
            self._broken = self._broken or malformed(error)
        if self._fields is not None:
            self._head_bytes += len(data)
            if len(self._url) > LINE_BYTES_MAX:
                self._broken = line_too_long(len(self._url))
            elif self._head_bytes > HEAD_BYTES_MAX:
                self._broken = head_too_large()
        elif (incoming := self._incoming) is not None and incoming.left_bytes <= 0:
            # What is not body is the head, sizes of chunks, their extensions and the trailer.
            self._head_bytes += len(data)
            if self._head_bytes + incoming.left_bytes > HEAD_BYTES_MAX - incoming.left_bytes * CHUNK_OVERHEAD:
                self._broken = head_too_large()
        elif is_kept and len(self._ready) == 1 and type(data) is bytes:
            self._server.known_heads.learn(data, self._ready[0])

    def _knows(self, data: bytes) -> bool:
        """Whether these bytes are one request whose head is known; it is then ready, and no parser has seen it."""
        server = self._server
        known = server.known_heads.find(data) if self._unknown % UNKNOWN_HEADS < LOOKED_UP else None
        if known is None:
            return False
        self._unknown = 0
        exchange = Exchange(
            self,
            known.method,
            known.headers,
            self._began_ns,
            path=known.path,
            query_string=known.query_string,
            limit_bytes=known.limit_bytes,
            left_bytes=known.body_bytes,
        )
        try:
            if server.admit_known(exchange) and self.is_stranger:
                self.note_authorised()
            if known.body_bytes:
                exchange.receive(data[-known.body_bytes :], server.bodies)
        except Refusal as refusal:
            exchange.drop()
            exchange.refusal = refusal.with_traceback(None)
        exchange.left_bytes = 0
        self._ready.append(exchange)
        return True

    def _parse_body_of(self, exchange: Exchange) -> None:
        """Let a new parser go on with the body of a request: give it a head that announces the same body."""
        parser = self._parser
        assert parser is not None
        length = exchange.headers.get("content-length")
        framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
        self._incoming = exchange  # in place of the request with that head, which was refused, because it has no host

    def _advance(self) -> None:
        """Answer what is complete, then parse what waits."""
        self._is_advancing, self._has_taken = True, False
        begun_ns = time.monotonic_ns()
        while self.transport is not None and self._is_next_done(begun_ns):
            pass
        self._is_advancing = False

    def _is_next_done(self, begun_ns: int) -> bool:
        """Do what is next; False if the client, the server's work, the intake or another turn has to be awaited."""
        if self._answering is not None:
            if self._answering.is_open or self._is_sending:
                return False
            self._sent()
            return not self._is_lingering
        if self._ready:
            return self._has_taken_up(self._ready[0])
        incoming = self._incoming
        if self._broken is not None:
            self._break(self._broken)
        elif incoming is not None and incoming.refusal is not None and self._is_refused_early(incoming):
            self._refuse_early(incoming, incoming.refusal)
        elif self._unread:
            if self._has_taken or time.monotonic_ns() - begun_ns > STEP_NS:
                self._parse_later()
                return False
            self._parse_unread()
            return True
        else:
            self._rest()
        return False

    def _parse_later(self) -> None:
        """The client has sent further requests at once, or what takes long to parse, such as a body in tiny chunks:
        this goes on when it is this connection's turn."""
        if self._incoming is None and self._fields is None:
            self._wait_for(None)
        else:
            self._rest()  # else a client that always sends enough would have no time limit
        if not self._waits_for_turn and self._unread:
            self._waits_for_turn = True
            self._server.intake.go_on_later(self._parse_next)

    def _parse_next(self) -> None:
        self._waits_for_turn = False
        if self._unread and self._answering is None and self.transport is not None and not self._is_lingering:
            self._parse_unread()
            self._advance()

    def _parse_unread(self) -> None:
        data = self._unread[: self._parsed_at_once()]
        self._release_unread(len(data))
        is_start = self._incoming is None and self._fields is None
        if is_start and not self._is_admitted:
            self._began_ns = time.monotonic_ns()
        if not (is_start and type(data) is bytes and self._knows(data)):
            self._parse(data)
        if len(self._unread) < UNREAD_BYTES_MAX and self.transport is not None and not self.transport.is_reading():
            self.transport.resume_reading()

    def _has_taken_up(self, exchange: Exchange) -> bool:
        """Answer a complete request, unless it must wait."""
        server = self._server
        if exchange.refusal is None and exchange.held_bytes > LARGE_BYTES:
            large = server.large
            if not (self._is_large_admitted or large.is_expected(exchange)) and large.is_behind(time.monotonic_ns()):
                self._defer(large)
                return False
            server.large.begin(exchange)
        self._ready.popleft()
        self._answering, self._has_taken = exchange, True
        if self._is_admitted and exchange.method == "POST":
            own_ms = exchange.headers.get("x-slo-ms")
            if own_ms is None or not server.is_patient(exchange.path, own_ms):  # others go first in the core too
                exchange.taken_ns = time.monotonic_ns()
        server.open_requests += 1
        if self._wait is not None:
            self._wait_for(None)
        if exchange.refusal is not None:
            if exchange.refusal.status == HTTPStatus.UNAUTHORIZED and (self._ready or self._unread):
                exchange.is_last = True  # of what follows nothing will be read: guessing keys costs a connection each
            self._refuse(exchange, exchange.refusal)
        else:
            server.answer(exchange)
        return True

    def _is_refused_early(self, incoming: Exchange) -> bool:
        """Whether a refused request is answered before its body is here. A small rest of a body is awaited, because the
        connection can then stay."""
        return incoming.is_last or not 0 < incoming.left_bytes <= UNREAD_BYTES_MAX

    def _rest(self) -> None:
        """Nothing is to be done before the client sends more."""
        server, incoming = self._server, self._incoming
        if incoming is not None:
            if incoming.awaits_continue:
                self._continue(incoming)
            self._wait_for(server.bodies_due)
            if time.monotonic_ns() - incoming.began_ns > server.limits.body_s * NS_PER_S:
                self.expire()
        elif self._fields is not None:
            if self._wait is not server.heads_due:
                self._wait_for(server.heads_due)
        elif server.is_draining:
            self._end()
        else:
            self._wait_for(server.idle)

    def _continue(self, incoming: Exchange) -> None:
        """Let a client that asks for permission send its body, unless it has begun to: all before is answered."""
        incoming.awaits_continue = False
        if self.transport is not None and incoming.refusal is None and not (incoming.body or self._unread):
            self.transport.write(CONTINUE)

    def _wait_for(self, wait: dict[ServerConnection, float] | None) -> None:
        if self._wait is not None:
            self._wait.pop(self, None)
        self._wait = wait
        if wait is not None:
            wait[self] = self._server.now_s
        if self.is_stranger:
            self.listener.note_waiting(self, is_waiting=wait is not None and wait is not self._server.deferred)

    def _hold_back(self, data: bytes) -> None:
        """Keep what follows an unanswered request, or discard what follows the last answer."""
        transport = self.transport
        if transport is None:
            return
        if self._is_lingering:
            self._lingered_bytes -= len(data)
            if self._lingered_bytes < 0:
                self.abort()
            return
        server = self._server
        server.unread_bytes += len(data)
        self._unread = data if not self._unread else bytes(self._unread) + data
        if server.unread_bytes > ALL_UNREAD_BYTES_MAX:
            self.abort()
        elif len(self._unread) >= UNREAD_BYTES_MAX:
            transport.pause_reading()

    # How it ends

    def expire(self) -> None:
        """The client has taken too long for what it had to do."""
        server, wait = self._server, self._wait
        if wait is server.idle or wait is server.lingering or wait is server.sending:
            self.abort()
        elif wait is server.heads_due or wait is server.bodies_due:
            limits = server.limits
            part = "head" if wait is server.heads_due else "body"
            what = f"the head of the request took more than {limits.head_s:g} s to arrive"
            if part == "body":
                what = f"the body paused for {limits.pause_s:g} s, or took more than {limits.body_s:g} s to arrive"
            server.expired[part] += 1
            self._break(Refusal(408, what, f"send it faster; {setting(part + '_s')}"))

    def has_taken_more(self) -> bool:
        """Whether the client has taken some of its answer since the last call, and soon enough."""
        server, transport = self._server, self.transport
        left = 0 if transport is None else transport.get_write_buffer_size()
        if left >= self._unsent or server.now_s > self.sent_by_s:
            return False
        server.unsent_bytes -= self._unsent - left
        self._unsent = left
        self._wait_for(server.sending)
        return True

    def finish(self) -> None:
        """The server stops: end now if nothing is open, otherwise after the answer."""
        if self._wait is self._server.idle:
            if self.transport is None:
                self.abort()
            else:
                self.transport.close()

    def abort(self) -> None:
        self._wait_for(None)
        self._server.unsent_bytes -= self._unsent
        self._unsent = 0
        super().abort()

    def _refuse_early(self, exchange: Exchange, refusal: Refusal) -> None:
        """Answer a request whose body is still to come, and end the connection."""
        is_known = refusal.status != HTTPStatus.UNAUTHORIZED
        self._lingered_bytes = max(LINGER_BYTES_MAX, self._server.bodies.each_bytes_max if is_known else 0)
        exchange.is_last = True
        self._incoming = None
        self._answering = exchange
        self._wait_for(None)  # for its client: the answer may come later
        self._server.open_requests += 1
        self._is_advancing = False
        self._refuse(exchange, refusal)

    def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """Answer with a refusal, now or, while many come without a key, later."""
        server, transport = self._server, self.transport
        if refusal.status == HTTPStatus.UNAUTHORIZED and transport is not None and server.delays_unauthorised():
            transport.pause_reading()  # else what its client sends meanwhile would be kept
            if exchange.is_last and self._unread:
                self._lingered_bytes = self._lingered_bytes or LINGER_BYTES_MAX
                self._release_unread(len(self._unread))
            server.refuse_later(partial(self._refuse_now, exchange, refusal))
        else:
            exchange.refuse(refusal)

    def _refuse_now(self, exchange: Exchange, refusal: Refusal) -> None:
        if self.transport is not None and not self.transport.is_closing() and exchange.is_open:
            self.transport.resume_reading()
            exchange.refuse(refusal)

    def _break(self, refusal: Refusal, method: str = "") -> None:
        """Answer what cannot be parsed, or has not come, and end the connection."""
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            method = incoming.method
            incoming.drop()
        self._fields, self._broken = None, None
        self._refuse_early(Exchange(self, method, {}, time.monotonic_ns()), refusal)

    def _end(self) -> None:
        """Close after the last answer has left; first read, for a while, what the client still sends, if it does."""
        transport = self.transport
        if transport is None:
            return
        if not (self._lingered_bytes or self._unread or self._ready or self._broken is not None):
            transport.close()
            return
        self._release_unread(len(self._unread))
        if transport.can_write_eof():
            with suppress(OSError):  # it has gone: asyncio's transport raises that, uvloop's reports the end
                transport.write_eof()
        self._is_lingering = True
        self._lingered_bytes = self._lingered_bytes or LINGER_BYTES_MAX
        transport.resume_reading()
        self._wait_for(self._server.lingering)

    def _lose(self) -> None:
        """The client has gone: what it asked for is not needed any more."""
        exchange, self._answering = self._answering, None
        if exchange is not None:
            self._server.close_request()
            self._forsake(exchange)
        for each in (self._incoming, *self._ready):
            if each is not None:
                self._forsake(each)
        self._incoming = self._fields = None
        self._ready.clear()
        self._release_unread(len(self._unread))

    def _forsake(self, exchange: Exchange) -> None:
        was_open, exchange.is_open = exchange.is_open, False
        exchange.drop()
        if was_open and exchange.on_gone is not None:
            exchange.on_gone()
        if exchange.on_sent is not None:
            exchange.on_sent()


def _name_of(name: bytes) -> str:
    """The name of a header in lower case, as which it is looked up."""
    found = name.decode("latin-1").lower()
    if len(NAMES) < NAMES_MAX:
        NAMES[name] = found
    return found


def _check_expectation(exchange: Exchange) -> None:
    """Note that a client asks for permission to send its body. Raises a 417 if it expects something else."""
    expected = exchange.headers["expect"]
    if expected.lower() != "100-continue":
        raise Refusal(417, f"expect: {expected[:40]!r} is not known", "omit this header")
    exchange.awaits_continue = True


def _answer_too_large(size: int, limit: int) -> bytes:
    what = f"failed: the answer has {size} bytes; the limit is {limit}"
    return error_body(what, f"ask for fewer rows or outputs; {setting('answers_bytes')}")


def _cors_fields(origin: str) -> Fields:
    """The headers for web pages of this origin; none for an empty one."""
    if not origin:
        return ()
    fields = ("access-control-allow-origin", origin), ("access-control-expose-headers", CORS_EXPOSED)
    return fields if origin == "*" else (*fields, ("vary", "origin"))


def _bytes_of(part: Buffer) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


class HttpServer:
    """A listening port. `answer` receives each complete request and must not raise. Every answer has `headers`.
    `cors_origin` is the origin whose pages in a browser may use the server, `*` for all, empty for none.

    `authorise` may raise a `Refusal` when the head of a request has arrived, and says whether the client has shown that
    it may use the server, not only that nothing needs to be shown for this request. `deadline_ns` gives the deadline of
    requests to a path; None for a path that is not for inference.
    """

    def __init__(
        self,
        answer: Callable[[Exchange], None],
        *,
        bodies: BodyMemory,
        limits: ServerLimits = ServerLimits(),
        headers: Fields = (),
        cors_origin: str = "",
        tls: Tls | None = None,
        authorise: Callable[[Exchange], bool] = lambda _: True,
        deadline_ns: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        self._answer, self._authorise, self._deadline_ns = answer, authorise, deadline_ns
        self.bodies, self.limits, self.requests_max = bodies, limits, limits.requests_max
        self.known_heads = KnownHeads()
        self.open_requests = 0
        """Requests that are complete and whose answer has not left."""
        self.delayed = 0
        """Requests without a valid key that are refused later."""
        self._unauthorised, self._unauthorised_s = 0, 0.0
        """How many have come in the second that began then."""
        self.unread_bytes = self.unsent_bytes = 0
        """Bytes that have arrived and were not parsed, and bytes of answers that have not left, of all connections."""
        self.expired: Counter[str] = Counter()
        """Connections closed because their client took too long, by what was awaited: `head`, `body` or `answer`."""
        self.access: AccessLog | None = None
        """Where answers are noted, if somebody wants that."""
        self.is_draining = False
        self.now_s = 0.0
        """The event loop's time, renewed every `SWEEP_S`: how long connections wait need not be known better."""
        self.stays = b"connection: keep-alive\r\nkeep-alive: timeout=%d\r\n" % limits.idle_s
        """Of answers after which the connection stays. HTTP/1.0 needs the first line; the second tells clients how long
        they may keep it for their next request."""
        self.date_line = b""
        self.idle: dict[ServerConnection, float] = {}
        self.heads_due: dict[ServerConnection, float] = {}
        self.bodies_due: dict[ServerConnection, float] = {}
        self.sending: dict[ServerConnection, float] = {}
        self.lingering: dict[ServerConnection, float] = {}
        self.deferred: dict[ServerConnection, float] = {}
        """Connections by what they wait for, in the order in which they began to; the values say when."""
        self.listener = Listener(
            lambda: HttpConnection(self),
            idle=(self.lingering, self.heads_due, self.bodies_due, self.idle),
            limits=limits,
            tls=tls,
            protocols=("http/1.1",),
        )
        self.intake = Intake(lambda: self.open_requests < self.requests_max)
        self.large = LargeIntake(lambda: self.open_requests < self.requests_max)
        """Of requests whose body has been received and is large."""
        self._inflating = asyncio.Lock()
        """One body after another: however many clients send compressed ones, others wait for one piece at a time."""
        self.listener.is_behind = lambda: self.intake.has_waiting
        self.listener.is_overloaded = lambda: self.intake.is_overloaded
        self.listener.refuses = self.refuses
        self.cors = _cors_fields(cors_origin)
        self.always = (*headers, *self.cors)
        """The headers of every answer."""
        refusal = Refusal(503, TOO_OLD, "try again in 1 s, or send fewer requests", retry_after_s=1)
        body = error_body(refusal.what, refusal.fix)
        head = head_of(503, JSON, (("retry-after", "1"), *self.always))
        self.too_old = (refusal, b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        """The refusal of a request that has waited too long, and the whole answer."""
        self.too_old_and_last = self.too_old[1].replace(b"content-length", CLOSES + b"content-length", 1)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket (`listener.listen`), which this object then owns. Call it in the event loop."""
        self._loop = loop = asyncio.get_running_loop()
        self.intake.start(loop)
        self.large.start(loop)
        self._sweep(loop)
        self.listener.start(sock)

    def drain(self) -> None:
        """Close idle connections soon, and each other one after its next answer. New ones are still accepted."""
        self.is_draining = True
        if self._loop is not None:  # first read what clients have sent by now
            self._loop.call_later(LAST_READ_S, self._close_idle)

    def _close_idle(self) -> None:
        for connection in list(self.idle):
            cast(HttpConnection, connection).finish()

    async def close(self, within_s: float) -> None:
        """Stop listening, give clients at most `within_s` to take the answers that are being sent, and close all."""
        self.drain()
        self.listener.stop()
        for waiting in (self.heads_due, self.bodies_due, self.lingering):
            for connection in list(waiting):
                connection.abort()
        await self.listener.close(within_s)
        if self._timer is not None:
            self._timer.cancel()

    # What connections ask

    def close_request(self) -> None:
        """An open request has ended."""
        self.open_requests -= 1
        if self.open_requests == self.requests_max - 1:
            self.intake.note_room()
            self.large.note_room()

    def admit(self, exchange: Exchange) -> bool:
        """Decide on the head whether a request may send its body, and say whether its client was authorised. Raises a
        `Refusal` if it may not."""
        headers = exchange.headers
        if self.cors and exchange.method == "OPTIONS" and "access-control-request-method" in headers:
            return False  # browsers send no key with it
        length = headers.get("content-length")
        size = exchange.left_bytes = 0 if length is None else int(length)
        is_authorised = self._authorise(exchange)
        if length is None and "transfer-encoding" not in headers:
            return is_authorised
        bodies = self.bodies
        limit = exchange.limit_bytes = json_limit(headers, bodies)
        if size > limit:
            raise bodies.too_large(size, limit)
        if size > LARGE_BYTES:
            self.large.expect(exchange)
        if bodies.quotas:
            self._reserve(exchange, size)
        coding = headers.get("content-encoding")
        if coding is not None and coding.lower() != "identity":
            window_bits = INFLATERS.get(coding.lower())
            if window_bits is None:
                what = f"content-encoding: {quoted(coding)} is not supported"
                raise Refusal(415, what, "send the body as it is, or with gzip or deflate")
            exchange.inflater = zlib.decompressobj(window_bits)
        return is_authorised

    def admit_known(self, exchange: Exchange) -> bool:
        """Decide the same on a head that has been admitted before, so that its bytes need no further look."""
        is_authorised = self._authorise(exchange)
        if self.bodies.quotas and "content-length" in exchange.headers:
            self._reserve(exchange, exchange.left_bytes)
        return is_authorised

    def _reserve(self, exchange: Exchange, size: int) -> None:
        """Let the body of a request count against the quota of its model. Raises a `Refusal` if that has no room."""
        quota = self.bodies.quota_of(exchange.path)
        if quota is None:
            return
        if quota.bytes_max and size > quota.bytes_max:
            raise quota.full(0, size)
        exchange.hold = hold = BodyReservation(self.bodies)
        hold.limit(quota)
        hold.take(0)

    def answer(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later."""
        if self.cors and exchange.method == "OPTIONS" and "access-control-request-method" in exchange.headers:
            exchange.reply(204, b"", headers=CORS_PREFLIGHT)
        elif exchange.inflater is not None:
            exchange.answer_later(self._inflate_and_answer(exchange, exchange.inflater))
        else:
            self._answer(exchange)

    async def _inflate_and_answer(self, exchange: Exchange, inflater: "zlib._Decompress") -> None:
        async with self._inflating:
            await exchange.inflate(inflater, self.bodies)
        self._answer(exchange)

    def refuses(self, sock: socket.socket, waited_ns: int) -> bool:
        """Refuse the request on a new connection, if it has waited too long in the kernel, without opening the
        connection or parsing. Without overload, that is only if its deadline has passed and its client has left."""
        try:
            data = sock.recv(GLANCE_BYTES, socket.MSG_PEEK)
            if not data or data[:5] == b"HEAD ":
                return False
            deadline_ns, is_behind = self.deadline_of(*target_of(data)), self.intake.has_waiting
            if waited_ns <= (self.intake.patience_ns(deadline_ns) if is_behind else deadline_ns):
                return False
            if not client_has_left(sock):
                if not is_behind:
                    return False
                sock.recv(ALL_GLANCE_BYTES)  # unread bytes would make closing a reset, which discards the answer
                sock.send(self.too_old_and_last)
        except OSError:
            return False
        self.bodies.refused["age"] += 1
        return True

    def is_patient(self, path: str, slo_ms: str) -> bool:
        """Whether a request says that it can wait for longer than others to this path."""
        return bool(slo_ms) and self.deadline_of(path, slo_ms, is_authorised=True) > self.deadline_of(path, "")

    def deadline_of(self, path: str, slo_ms: str, *, is_authorised: bool = False) -> int:
        """The deadline of a request in ns. Its own, `slo_ms`, counts if it is in whole ms; before the key has been
        checked, only if it is shorter than that of the model."""
        deadline_ns = self._deadline_ns(path) or PAGE_DEADLINE_NS
        if not (slo_ms.isdecimal() and len(slo_ms) < 8):
            return deadline_ns
        own_ns = int(slo_ms) * NS_PER_MS or deadline_ns  # 0 is answered when it is read
        return own_ns if is_authorised else min(own_ns, deadline_ns)

    def prepared(
        self,
        exchange: Exchange,
        parts: tuple[Buffer, ...],
        size: int,
        content_type: str,
        headers: Fields,
    ) -> tuple[tuple[Buffer, ...], int, Fields]:
        """A long answer as it is sent: its parts, its size and its headers. Text is compressed if the client asks for
        it and the server has time."""
        if size > TEXT_BYTES_MAX or content_type == OCTETS or self.intake.has_waiting:
            return parts, size, headers
        if not accepts_gzip(exchange.headers.get("accept-encoding", "")):
            return parts, size, headers
        deflater = zlib.compressobj(1, zlib.DEFLATED, 31)
        pressed = b"".join([*map(deflater.compress, parts), deflater.flush()])
        return (pressed,), len(pressed), (*headers, ("content-encoding", "gzip"), ("vary", "accept-encoding"))

    def limit_unsent(self) -> None:
        """Close connections that do not take their answers if all these together are too large: those first that have
        stalled longest."""
        while self.unsent_bytes > self.limits.answers_bytes and len(self.sending) > 1:
            connection = next(iter(self.sending))
            self._give_up(cast(HttpConnection, connection))

    def delays_unauthorised(self) -> bool:
        """Whether a request without a valid key is refused later, for many come. Few may wait: they count as open."""
        now_s = self.now_s
        if now_s - self._unauthorised_s >= 1.0:
            self._unauthorised_s, self._unauthorised = now_s, 0
        self._unauthorised += 1
        most = min(self.requests_max, self.listener.connections_max) // 4
        return self._unauthorised > UNAUTHORISED_RPS and self.delayed < most

    def refuse_later(self, refuse: Callable[[], None]) -> None:
        """Call `refuse` after `UNAUTHORISED_S`."""
        assert self._loop is not None
        self.delayed += 1
        self._loop.call_later(UNAUTHORISED_S, self._refuse_delayed, refuse)

    def _refuse_delayed(self, refuse: Callable[[], None]) -> None:
        self.delayed -= 1
        refuse()

    def _give_up(self, connection: "HttpConnection") -> None:
        self.expired["answer"] += 1
        connection.abort()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what has waited for its client for too long."""
        self.now_s = now_s = loop.time()
        self.date_line = f"date: {formatdate(usegmt=True)}\r\n\r\n".encode()
        limits = self.limits
        for waiting, limit_s in (
            (self.idle, limits.idle_s),
            (self.heads_due, limits.head_s),
            (self.bodies_due, limits.pause_s),
            (self.lingering, LINGER_S),
        ):
            for connection in overdue(waiting, now_s - limit_s):
                connection.expire()
        for connection in overdue(self.sending, now_s - limits.send_s):
            if not connection.has_taken_more():
                self._give_up(connection)
        self._timer = loop.call_later(SWEEP_S, self._sweep, loop)


def overdue(waiting: Mapping[ServerConnection, float], since_s: float) -> list[HttpConnection]:
    """Those that have waited since before `since_s`."""
    found = []
    for connection, began_s in waiting.items():
        if began_s > since_s:
            break
        found.append(cast(HttpConnection, connection))
    return found
