"""Unary gRPC calls over HTTP/2, as an `asyncio.Protocol`: frames, flow control, and the bounds that keep what a client
sends from costing more than it is worth.

`Methods` see a call as soon as its head (the headers) has come, so that a key is checked before anything else is
received. `BodyMemory` counts the message as its bytes arrive. A client may send more than the first 64 KiB of a message
only when `Methods` have accepted the head, the announced length is within the method's bound, and there was memory for
the bytes before. What costs the client little and brings it nothing (resets, pings, settings, refused keys, empty
frames) is paid from a credit of the connection that answered calls refill; a connection without credit is closed.

A library was not an option: `grpcio` shows neither arriving bytes nor connections, and hands a call over when its
message is complete. Source: RFC 9113 (HTTP/2), and gRPC's "PROTOCOL-HTTP2".
"""

import asyncio
import logging
import socket
import struct
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import quote

from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.bodies import BodyMemory, BodyReservation
from sloop.serve.edge.hpack import HEAD_BYTES_MAX, Decoder, Field, HpackError, encode
from sloop.serve.edge.identity import REQUEST_ID, named
from sloop.serve.edge.intake import TOO_OLD, Intake
from sloop.serve.edge.listener import Listener, ServerConnection, Tls
from sloop.serve.edge.refusal import Refusal, bad
from sloop.serve.edge.steps import Steps, do_in_steps
from sloop.text import quoted, shortened
from sloop.units import NS_PER_MS, NS_PER_S

Buffer = bytes | bytearray | memoryview

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME: Final = struct.Struct(">BHBBL")
"""The head of a frame: its length as 8 and 16 bits, its type, flags, and the number of its stream."""
FRAME_BYTES_MAX: Final = 16_384
"""The largest frame, which is the protocol's default: a connection that waits for the rest of one holds no more."""
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY, ACK = 0x1, 0x4, 0x8, 0x20, 0x1
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 0x0, 0x1, 0x3, 0x6, 0x7
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_HEADER_LIST_SIZE = 0x3, 0x4, 0x6

WINDOW: Final = 65_535
"""What a client may send of a message before it is told to go on, which is the protocol's default."""
WINDOW_MAX: Final = 2**20
"""What it may then send at once: enough for 1 GB/s at a round trip of 1 ms."""
STREAM_WINDOW_MAX: Final = 2**31 - 1
STREAMS_MAX: Final = 1000
"""Open calls of a connection."""
STRANGER_CALLS_MAX: Final = 100
"""The same until the first authorised call has arrived completely."""
STRANGER_HEAD_BYTES_MAX: Final = 8 * 1024
"""The longest head until then: decoding so many bytes may take 2 ms."""
PREFIX_BYTES: Final = 5
"""Before each message: whether it is compressed, and its length."""
INFLATED_BYTES_MAX: Final = 8 * 2**20
"""The most that a compressed message may become: some 20 ms of work, like JSON's bound."""
INFLATED_AT_ONCE: Final = 64 * 1024
RATIO_MAX: Final = 100
RATIO_BYTES_MIN: Final = 2**20
"""A message that becomes more than a hundred times as long is refused as soon as it has become so long."""
GLANCE_BYTES: Final = 32 * 1024
"""After so much of a message, the methods may refuse the rest of it."""
BUFFERED_BYTES_MAX: Final = 256 * 1024
"""What is written ahead of a client that reads slowly."""

TURN_NS: Final = NS_PER_MS // 5
"""How long the frames of one connection are handled before others get their turn."""
FRAMES_PER_LOOK: Final = 8
"""The clock is read once for so many frames, and after each that may have taken long."""
LONG_BYTES: Final = 1024
"""Longer heads may take long."""
GREETING_S_MAX: Final = 60
"""How long a connection may be without calls before the first was answered."""
SEND_S_MAX: Final = 60
"""How long a message may take to arrive."""
STALL_S_MAX: Final = 60
"""How long a client may leave an answer unread."""
SEND_RATE_BYTES: Final = 16 * 1024
"""The bytes of its answers that a client must take per second, on average, once it has had so much time."""
IDLE_S_MAX: Final = 620
"""How long a connection may be without calls: clients of gRPC keep one open for their next call. See `http.IDLE_S`."""
SWEEP_S: Final = 1.0
SWEPT_AT_ONCE: Final = 128
"""Connections that are looked at in one step, which takes some 0.1 ms."""

CREDIT_MAX: Final = 1000
CREDIT_AT_FIRST: Final = 200
"""Of a connection that has not had an answer yet: attackers who come again and again should not be given more."""
NS_PER_CREDIT: Final = 40_000
TIME_COST_MAX: Final = 100
"""A single call pays no more for its time: on a busy machine it need not have used all of it."""
CREDIT_PER_S: Final = 200
CREDIT_PER_ANSWER: Final = 20
CREDIT_PER_PART: Final = 4
SMALL_PART_BYTES: Final = 4096
YOUNG_NS: Final = 10 * NS_PER_MS
"""Nobody who wants an answer gives it up so soon."""
COSTS: Final = {"reset": 2, "rapid reset": 10, "key": 25, "stream": 10, "message": 50, "settings": 10, "frame": 1}
"""What is paid from the credit of a connection: a new one survives 8 wrong keys, an old one 100 rapid resets."""
HEAD_BYTES_PER_CREDIT: Final = 512
"""A head pays for its length: decoding so many bytes takes up to 0.1 ms. Most heads are shorter."""
STRANGER_HEAD_BYTES_PER_CREDIT: Final = 48
"""What strangers pay for a long head: a new connection has credit for one of the longest."""
UNSENT_PER_CREDIT: Final = 16
"""A new size of the calls' windows pays for the answers of which it may let a part go: each takes some 5 us."""
SMALL_BYTES: Final = 64
"""A frame with less data costs as much as it brings, unless it is the last of its message."""

_log: Final = logging.getLogger("sloop.http2")


class Fault(Exception):
    """The client broke the protocol or has no credit left: the connection is closed with this code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Methods(Protocol):
    """Answers calls. `begin`, `glance` and `answer` may raise a `Refusal`."""

    def begin(self, call: "Call") -> int:
        """The head of a call has come. Returns the size in bytes that its message may have."""
        ...

    def glance(self, beginning: bytes) -> Steps[None]:
        """Look at the first `GLANCE_BYTES` of a large message, or somewhat more, before the client may send all."""
        ...

    def answer(self, call: "Call", message: bytes | memoryview) -> None:
        """The message of a call has come. Calls `call.reply` or `call.refuse`, now or later."""
        ...

    def patience_ns(self, call: "Call") -> int:
        """How long the message of a call may wait until it is looked at."""
        ...


class Call:
    """One call, which must be answered once with `reply` or `refuse`."""

    __slots__ = (
        "_steps",
        "allowed",
        "began_ns",
        "bytes_max",
        "connection",
        "has_ended",
        "hold",
        "is_authorised",
        "is_held_up",
        "is_open",
        "metadata",
        "number",
        "on_gone",
        "queue",
        "received",
        "size",
        "trailers",
        "window",
    )

    def __init__(self, connection: "Http2Connection", number: int, metadata: dict[str, str], window: int) -> None:
        self.began_ns = time.monotonic_ns()
        """When the head had arrived, in `time.monotonic_ns`."""
        self.connection, self.number = connection, number
        self.metadata = metadata
        """Names are in lower case; of a repeated one, the last value. Bytes are shown as Latin-1."""
        self.hold = BodyReservation(connection.server.bodies)
        """The room that the message has taken, and later the unsent part of a large answer."""
        self.is_authorised = True
        """Whether its client may use the server, not only make this call. `Methods.begin` says if it may not."""
        self.is_open = True
        """Neither answered nor given up by the client."""
        self.on_gone: Callable[[], None] | None = None
        """Called if the client gives up before the answer."""
        self.bytes_max = 0
        self.received: bytes | bytearray = b""
        self.size = -1
        """The announced length of the message; negative until it has come."""
        self.allowed = WINDOW
        """How many bytes the client may send now."""
        self.is_held_up = True
        """Whether the client may send no more than that until the beginning of its message has been looked at."""
        self.has_ended = False
        """Whether the client has sent all it will."""
        self.window = window
        """How many bytes the client accepts now."""
        self.queue: deque[memoryview] = deque()
        """What is not yet sent of the answer."""
        self.trailers = b""
        self._steps: Steps[None] | None = None
        """What is done about the message now."""

    @property
    def deferred_ns(self) -> int:
        """When the call came; 0 if nobody waits for its answer any more."""
        return self.began_ns if self.is_open else 0

    @property
    def is_without_message(self) -> bool:
        """Whether the client was to send the message and has hardly begun."""
        return self in self.connection.arriving and len(self.received) < SMALL_PART_BYTES

    def age_ns(self) -> int:
        """How long it has waited."""
        return time.monotonic_ns() - self.began_ns

    @property
    def patience_ns(self) -> int:
        """How long it may wait until it is looked at."""
        return self.connection.server.methods.patience_ns(self)

    def start(self) -> None:
        """Look at the message, which has come."""
        if self.received[0]:
            self.do(self._inflate_and_answer())
            return
        begun_ns = time.monotonic_ns()
        try:
            self._answer()
        except Exception as error:
            self._fail(error, time.monotonic_ns() - begun_ns)

    def _inflate_and_answer(self) -> Steps[None]:
        yield from inflate(self)
        self._answer()

    def _answer(self) -> None:
        received, self.received = self.received, b""
        message = memoryview(received)[PREFIX_BYTES:]
        is_large = len(message) > WINDOW
        self.connection.server.methods.answer(self, message if is_large else bytes(message))

    def do(self, steps: Steps[None]) -> None:
        """Do work about the message as long as the client waits, and instead of what was being done about it."""
        self._steps = steps
        later = self.connection.server.intake.go_on_later
        do_in_steps(steps, later, lambda: self.is_open and self._steps is steps, self._fail)

    def _fail(self, error: Exception, spent_ns: int) -> None:
        """Refuse the call for an exception; one that is no `Refusal` is a bug."""
        server = self.connection.server
        if isinstance(error, Refusal):
            server.refuse(self, error)
            self.connection.charge_ns(spent_ns)
        else:
            _log.error("internal error while answering %s", quoted(self.path), exc_info=error)
            what = "failed: internal error of the server"
            server.refuse(self, Refusal(500, what, "see the server's log, and report it"))

    def refuse_deferred(self) -> None:
        """Refuse the call, which has waited too long to be answered in time."""
        fix = "try again in 1 s, or send fewer requests"
        refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, TOO_OLD, fix, retry_after_s=1)
        self.connection.server.bodies.refused["age"] += 1
        self.connection.server.refuse(self, refusal)

    @property
    def path(self) -> str:
        """`/package.Service/Method`."""
        return self.metadata[":path"]

    def reply(self, message: Sequence[Buffer], trailers: bytes) -> None:
        """Answer with a message, in parts that are sent without copying large ones, and the block of its trailers."""
        if self.is_open:
            self.is_open, self.on_gone = False, None
            self.connection.send(self, message, trailers)

    def refuse(self, code: int, text: str, *trailers: Field) -> None:
        """Answer with an error, a code of gRPC."""
        if self.is_open:
            self.is_open, self.on_gone = False, None
            self.connection.refuse(self, code, text, trailers)

    def remaining_ns(self) -> int | None:
        """What was left of the client's deadline when the call came; None if it has none. Raises a 400."""
        text = self.metadata.get("grpc-timeout")
        if text is None:
            return None
        unit, digits = TIMEOUT_UNITS_NS.get(text[-1:]), text[:-1]
        if unit is None or not (digits.isascii() and digits.isdigit() and len(digits) <= 8):
            raise bad("grpc-timeout", f"{quoted(text)} is not a time", "send up to 8 digits and one of H M S m u n")
        return max(1, int(digits) * unit)


TIMEOUT_UNITS_NS: Final = {
    "H": 3600 * NS_PER_S,
    "M": 60 * NS_PER_S,
    "S": NS_PER_S,
    "m": NS_PER_MS,
    "u": 1000,
    "n": 1,
}
GRPC: Final = "application/grpc"
_HEAD: Final = b"\x88" + encode(("content-type", GRPC), ("grpc-accept-encoding", "identity,deflate,gzip"))
"""Begins every answer: status 200, which stands in the static table."""


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


def data_head(size: int, number: int, flags: int = 0) -> bytes:
    """The head of a frame of data."""
    return FRAME.pack(size >> 16, size & 0xFFFF, DATA, flags, number)


_SETTINGS: Final = frame(
    SETTINGS, 0, 0, struct.pack(">HLHL", MAX_CONCURRENT_STREAMS, STREAMS_MAX, MAX_HEADER_LIST_SIZE, HEAD_BYTES_MAX)
) + frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", WINDOW_MAX - WINDOW))


class Http2Connection(ServerConnection):
    """The connection of one client."""

    def __init__(self, server: "Http2Server") -> None:
        super().__init__(server.listener)
        self.server = server
        self.calls: dict[int, Call] = {}
        """Those whose answer is not sent yet, by number, in order of arrival."""
        self.arriving: dict[Call, None] = {}
        """Those of them whose message has not come, the oldest first."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        """The base class's, which is None as soon as the connection is lost."""
        self._decoder = Decoder()
        self._rest = b""
        """What has come of the next frame, or frames for which there was no time."""
        self._is_known = False
        """Whether a call has been answered."""
        self._is_greeted = self._is_leaving = self._is_over = self._is_lost = False
        self._is_paused = self._waits_for_turn = self._has_turn = False
        self._last = self._begun = 0
        """The numbers of the latest call, and of the latest that was not turned away because the server shuts down."""
        self._block: tuple[int, int, bytearray] | None = None
        """The number, flags and beginning of a head that comes in several frames."""
        self._received = 0
        """Bytes of data since the client was last told to go on."""
        self._window = WINDOW
        self._call_window = WINDOW
        """How many bytes the client accepts now: on the connection, and at first on each call."""
        self._unsent: dict[int, Call] = {}
        self._credit = CREDIT_AT_FIRST
        self._quiet_since_s = time.monotonic()
        """Since when nothing has been sent to a client that had answers to read, or there have been no calls."""
        self._sent_by_s = 0.0
        """When the client should have taken all its answers, if it is as slow as it may be."""
        self._wait: dict[ServerConnection, float] | None = server.idle
        """The mapping of the server that this connection is in."""
        server.idle[self] = self._quiet_since_s

    # What comes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self._transport = self.transport
        self._transport.set_write_buffer_limits(BUFFERED_BYTES_MAX)
        self._transport.write(_SETTINGS)
        if self not in self.server.idle:  # it has made room for another one before it was open
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        for call in list(self.calls.values()):
            self._give_up(call)
        self._wait_for(None)
        self._rest = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._rest = self._rest + data if self._rest else data
        if not self._waits_for_turn:
            self._take_turn()

    def _take_turn(self) -> None:
        """Handle frames for a limited time; the rest waits for another turn of the loop, and the client with it."""
        try:
            is_done = self._handle_frames()
        except Fault as fault:
            self._fail(fault.code, str(fault))
        except HpackError as error:
            self._fail(COMPRESSION_ERROR, str(error))
        else:
            if not is_done and not self._waits_for_turn:
                self._waits_for_turn = True
                self._transport.pause_reading()
                self.server.intake.go_on_later(self._go_on)

    def _go_on(self) -> None:
        self._waits_for_turn = False
        if not self._is_lost and not self._transport.is_closing():
            self._has_turn = True
            self._take_turn()
            self._has_turn = False
            if not self._waits_for_turn and not self._transport.is_closing():
                self._transport.resume_reading()

    def _handle_frames(self) -> bool:
        """Whether all whole frames were handled."""
        data, at = self._rest, 0
        if not self._is_greeted:
            if not data.startswith(PREFACE[: len(data)]):
                raise Fault(PROTOCOL_ERROR, "not HTTP/2: this port speaks gRPC")
            if len(data) < len(PREFACE):
                return True
            self._is_greeted, at = True, len(PREFACE)
        end, until_ns, frames = len(data), time.monotonic_ns() + TURN_NS, 0
        try:
            while end - at >= FRAME.size:
                high, low, kind, flags, number = FRAME.unpack_from(data, at)
                size = high << 16 | low
                if size > FRAME_BYTES_MAX:
                    raise Fault(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                after = at + FRAME.size + size
                if after > end:
                    break
                if size > LONG_BYTES and self.is_stranger and not self._has_turn and kind in (HEADERS, CONTINUATION):
                    return False  # else however many strangers come with long heads would all be heard at once
                payload, at = data[at + FRAME.size : after], after
                self._handle(kind, flags, number & 0x7FFFFFFF, payload)
                if self._is_over:
                    at = end
                    return True
                frames += 1
                if frames >= FRAMES_PER_LOOK or (size > LONG_BYTES and kind != DATA) or kind == SETTINGS:
                    if at < end and time.monotonic_ns() > until_ns:
                        return False
                    frames = 0
            return True
        finally:
            self._rest = data[at:]

    def _handle(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise Fault(PROTOCOL_ERROR, "a frame within a header block, where CONTINUATION is expected")
        if kind == DATA:
            self._take_data(flags, number, payload)
        elif kind == HEADERS:
            self._take_headers(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._take_window(number, payload)
        elif kind == RST_STREAM:
            self._take_reset(number, payload)
        elif kind == PING:
            self._take_ping(flags, number, payload)
        elif kind == SETTINGS:
            self._take_settings(flags, number, payload)
        elif kind == CONTINUATION:
            self._take_continuation(flags, number, payload)
        elif kind == PUSH_PROMISE:
            raise Fault(PROTOCOL_ERROR, "PUSH_PROMISE from a client")
        else:  # priorities, which have no effect, a client's farewell, and what is not known
            self._charge("frame")

    def _charge(self, what: str) -> None:
        """Pay for something that brings the client nothing."""
        self._pay(COSTS[what], what)

    def _pay(self, cost: int, what: str) -> None:
        self._credit -= cost
        if self._credit < 0:
            raise Fault(
                ENHANCE_YOUR_CALM,
                f"this connection has used up its credit, last by: {what}; answered calls and time refill it",
            )

    def _charge_refused(self) -> None:
        """Pay for a frame of a call that has been refused, unless the client cannot know that yet: it may have sent
        many such frames when the server shuts down, and the calls that are here are finished."""
        if not self._is_leaving:
            self._charge("frame")

    def charge_ns(self, spent_ns: int) -> None:
        """Pay for the time that a call has cost which was then refused."""
        self._charge_later(min(spent_ns // NS_PER_CREDIT, TIME_COST_MAX), "refused messages")

    def evict(self, call: Call, refusal: Refusal) -> None:
        """Refuse a call whose message has not come, to make room for another one."""
        lacked_message = call.is_without_message
        self.server.refuse(call, refusal)
        if lacked_message:
            self._charge_later(COSTS["reset"], "calls without a message")

    def _charge_later(self, cost: int, what: str) -> None:
        """Pay for something outside the turn in which the connection's frames are handled."""
        try:
            self._pay(cost, what)
        except Fault as fault:
            self._fail(fault.code, str(fault))

    def _take_headers(self, flags: int, number: int, payload: bytes) -> None:
        if number % 2 == 0:
            raise Fault(PROTOCOL_ERROR, f"stream {number} is not a client's")
        payload = unpadded(flags, payload)
        if flags & WITH_PRIORITY:
            payload = payload[5:]
        if flags & END_HEADERS:
            self._take_head(number, flags, payload)
        else:
            self._block = number, flags, bytearray(payload)

    def _take_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise Fault(PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        first_flags, block = self._block[1:]
        self._charge("frame")
        block += payload
        if len(block) > HEAD_BYTES_MAX:
            raise Fault(ENHANCE_YOUR_CALM, f"a head of more than {HEAD_BYTES_MAX} bytes")
        if flags & END_HEADERS:
            self._block = None
            self._take_head(number, first_flags, bytes(block))

    def _take_head(self, number: int, flags: int, block: bytes) -> None:
        each_bytes = HEAD_BYTES_PER_CREDIT
        if self.is_stranger and len(block) >= HEAD_BYTES_PER_CREDIT:
            each_bytes = STRANGER_HEAD_BYTES_PER_CREDIT
            if len(block) > STRANGER_HEAD_BYTES_MAX:
                what = f"a head of more than {STRANGER_HEAD_BYTES_MAX} bytes before the first call"
                raise Fault(ENHANCE_YOUR_CALM, what)
        self._pay(len(block) // each_bytes, "long heads")
        fields = self._decoder.decode(block)
        call = self.calls.get(number)
        if call is not None:  # trailers
            if call.has_ended or not flags & END_STREAM:
                raise Fault(PROTOCOL_ERROR, "a second HEADERS without END_STREAM")
            self._complete(call)
        elif number <= self._last:  # trailers of a call that has been refused
            self._charge_refused()
        elif self._is_leaving:
            self._last = number
            self._write(frame(RST_STREAM, 0, number, struct.pack(">L", REFUSED_STREAM)))
        else:
            self._last = self._begun = number
            self._begin(number, dict(fields), is_whole=bool(flags & END_STREAM))

    def _begin(self, number: int, head: dict[str, str], *, is_whole: bool) -> None:
        server = self.server
        if len(self.calls) >= (STRANGER_CALLS_MAX if self.is_stranger else STREAMS_MAX):
            self._write(frame(RST_STREAM, 0, number, struct.pack(">L", REFUSED_STREAM)))
            self._charge("stream")
            return
        if head.get(":method") != "POST" or not head.get("content-type", "").startswith(GRPC) or ":path" not in head:
            status = "415" if head.get(":method") == "POST" else "405"
            self._write(frame(HEADERS, END_HEADERS | END_STREAM, number, encode((":status", status))))
            self._write(frame(RST_STREAM, 0, number, struct.pack(">L", NO_ERROR)))
            self._charge("key")
            return
        call = self.calls[number] = Call(self, number, head, self._call_window)
        server.open_calls += 1
        try:
            call.bytes_max = server.methods.begin(call)
            server.admit(call)
        except Refusal as refusal:
            server.refuse(call, refusal)
            if refusal.status == HTTPStatus.UNAUTHORIZED:
                self._charge("key")
        else:
            self.note_waiting()
            if is_whole:
                self._complete(call)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received > WINDOW_MAX:
            raise Fault(FLOW_CONTROL_ERROR, "more data than the connection accepts")
        if self._received >= WINDOW_MAX // 2:
            self._write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", self._received)))
            self._received = 0
        call = self.calls.get(number)
        if call is None or call.has_ended:
            if number > self._last or not number:
                raise Fault(PROTOCOL_ERROR, "DATA on an idle stream")
            self._charge_refused()
            return
        call.allowed -= size
        if call.allowed < 0:
            raise Fault(FLOW_CONTROL_ERROR, "more data than the call accepts")
        if size < SMALL_BYTES and not flags & END_STREAM:
            self._charge("frame")
        try:
            if size:
                self._receive(call, unpadded(flags, payload))
        except Refusal as refusal:
            self.server.refuse(call, refusal)
            self._charge("message")
        else:
            if flags & END_STREAM:
                self._complete(call)

    def _receive(self, call: Call, data: bytes) -> None:
        """More of a call's message has come. Raises a `Refusal` if there is no room for it."""
        call.hold.take(len(data))
        if not call.received:
            call.received = data
        elif isinstance(call.received, bytearray):
            call.received += data
        else:
            call.received = bytearray(call.received) + data
        have = len(call.received)
        if call.size < 0:
            if have < PREFIX_BYTES:
                return
            call.size = int.from_bytes(call.received[1:PREFIX_BYTES], "big")
            bytes_max = min(call.bytes_max, INFLATED_BYTES_MAX) if call.received[0] else call.bytes_max
            if call.size > bytes_max:
                raise self.server.too_large(call, bytes_max)
        missing = PREFIX_BYTES + call.size - have
        if missing < 0:
            raise bad("message", "the call has more than one", "send one message in each call")
        if have >= GLANCE_BYTES > have - len(data) and missing and not call.received[0]:
            call.do(self._glance(call, bytes(memoryview(call.received)[PREFIX_BYTES:])))
        elif call.received[0] or not call.is_held_up:
            self._let_send(call)

    def _glance(self, call: Call, beginning: bytes) -> Steps[None]:
        yield from self.server.methods.glance(beginning)
        call.is_held_up = False
        self._let_send(call)

    def _let_send(self, call: Call) -> None:
        """Allow a call to send what is missing of its message, or much of it."""
        missing = PREFIX_BYTES + call.size - len(call.received)
        wanted = min(missing, WINDOW_MAX)
        if call.allowed < min(missing, WINDOW_MAX // 2):
            self._write(frame(WINDOW_UPDATE, 0, call.number, struct.pack(">L", wanted - call.allowed)))
            call.allowed = wanted

    def _complete(self, call: Call) -> None:
        """The client has sent all of a call."""
        call.has_ended = True
        self.server.arrived(call)
        if not call.is_open:
            return
        try:
            size = len(call.received)
            if call.size < 0 or size != PREFIX_BYTES + call.size:
                raise bad("message", f"{size} bytes are not a whole one", "send its length and all of it")
        except Refusal as refusal:
            self.server.refuse(call, refusal)
            return
        self.note_waiting()
        if self.is_stranger and call.is_authorised:
            self.note_authorised()
        intake = self.server.intake
        if intake.is_behind(time.monotonic_ns()):
            intake.defer(call, is_page=False)
        else:
            call.start()

    def _take_reset(self, number: int, payload: bytes) -> None:
        if number > self._last or not number or len(payload) != 4:
            raise Fault(PROTOCOL_ERROR, "RST_STREAM on an idle stream")
        call = self.calls.get(number)
        if call is None:
            self._charge_refused()
            return
        is_young, has_ended = time.monotonic_ns() - call.began_ns < YOUNG_NS, call.has_ended
        self._give_up(call)
        if is_young or not has_ended:  # otherwise it is a call that was not answered in time
            self._charge("rapid reset" if is_young else "reset")

    def _take_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise Fault(PROTOCOL_ERROR, "a ping of another size than 8 bytes")
        self._charge("frame")
        if not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))

    def _take_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % 6:
            raise Fault(FRAME_SIZE_ERROR, "settings of a wrong size")
        self._charge("settings")
        if flags & ACK:
            return
        window = self._call_window
        for place, (key, value) in enumerate(struct.iter_unpack(">HL", payload)):
            if place > 32:
                raise Fault(ENHANCE_YOUR_CALM, "too many settings")
            if key == INITIAL_WINDOW_SIZE:
                if value > STREAM_WINDOW_MAX:
                    raise Fault(FLOW_CONTROL_ERROR, "a window of more than 31 bits")
                window = value
        if window != self._call_window:
            self._pay(len(self._unsent) // UNSENT_PER_CREDIT, "settings")
            for call in self.calls.values():
                call.window += window - self._call_window
            self._call_window = window
        self._write(frame(SETTINGS, ACK, 0))
        self._send_more()

    def _take_window(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Fault(FRAME_SIZE_ERROR, "a window of another size than 4 bytes")
        more = int.from_bytes(payload, "big") & STREAM_WINDOW_MAX
        self._charge("frame")
        call = self.calls.get(number)
        if not number:
            self._window += more
        elif call is not None:
            call.window += more
        elif number > self._last:
            raise Fault(PROTOCOL_ERROR, "WINDOW_UPDATE on an idle stream")
        if self._window > STREAM_WINDOW_MAX or (call is not None and call.window > STREAM_WINDOW_MAX) or not more:
            raise Fault(FLOW_CONTROL_ERROR, "a window of 0 bytes or more than 31 bits")
        if self._unsent:
            self._send_more()

    # What goes

    def send(self, call: Call, message: Sequence[Buffer], trailers: bytes) -> None:
        """Send an answer, now or as fast as the client reads."""
        self._is_known = True
        size = sum(memoryview(part).nbytes for part in message)
        self._note(call, OK, size)
        prefix, whole = b"\0" + size.to_bytes(4, "big"), size + PREFIX_BYTES
        head, number = frame(HEADERS, END_HEADERS, call.number, _HEAD), call.number
        is_short = whole <= FRAME_BYTES_MAX and whole <= call.window and whole <= self._window
        if is_short and not self._is_paused and not self._unsent:
            end = frame(HEADERS, END_HEADERS | END_STREAM, number, trailers)
            self._window -= whole
            self._credit = min(CREDIT_MAX, self._credit + CREDIT_PER_ANSWER)
            self._finish(call, b"".join((head, data_head(whole, number), prefix, *message, end)))
            return
        call.hold.drop()
        call.hold = BodyReservation(self.server.bodies)  # without the model's quota, which is one of requests
        try:
            call.hold.take(whole)
        except Refusal as refusal:
            self.server.refused["outputs"] += 1
            code, text, fields = self.server.error_of(refusal)
            self.refuse(call, code, text, fields)
            return
        self._write(head)
        call.trailers = trailers
        call.queue.append(memoryview(prefix))
        call.queue.extend(memoryview(part).cast("B") for part in message if len(part))
        self._quiet_since_s = now_s = time.monotonic()
        self._sent_by_s = (max(now_s, self._sent_by_s) if self._unsent else now_s) + whole / SEND_RATE_BYTES
        self._unsent[number] = call
        self._send_more()

    def _note(self, call: Call, code: int, size: int) -> None:
        """Note an answer in the access log, if there is one."""
        access = self.server.access
        if access is not None:
            access.add(
                "grpc",
                self.address,
                "POST",
                call.path,
                code,
                began_ns=call.began_ns,
                bytes_in=max(0, call.size),
                bytes_out=size,
                request_id=named(call.metadata.get(REQUEST_ID)),
            )

    def refuse(self, call: Call, code: int, text: str, trailers: Sequence[Field]) -> None:
        """Send an error instead of an answer."""
        self._note(call, code, 0)
        said = quote(shortened(text, 2000), safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}~")
        if code in LATE_OR_BUSY and not call.is_without_message:  # which is not the client's fault
            self._credit = min(CREDIT_MAX, self._credit + CREDIT_PER_ANSWER)
        if name := named(call.metadata.get(REQUEST_ID)):
            trailers = *trailers, (REQUEST_ID, name)
        block = _HEAD + encode(("grpc-status", str(code)), ("grpc-message", said), *trailers)
        self._finish(call, frame(HEADERS, END_HEADERS | END_STREAM, call.number, block))

    def _send_more(self) -> None:
        """Send of each unsent answer in turn what the client accepts."""
        is_moving = True
        while is_moving and self._unsent and not self._is_paused and self._window > 0:
            is_moving = False
            for call in list(self._unsent.values()):
                if call.window > 0 and self._window > 0 and not self._is_paused:
                    self._send_part(call)
                    is_moving = True

    def _send_part(self, call: Call) -> None:
        """Send one frame of an answer, and its trailers after the last."""
        room = size = min(FRAME_BYTES_MAX, call.window, self._window)
        parts: list[memoryview] = []
        while call.queue and room:
            part = call.queue.popleft()
            if len(part) > room:
                call.queue.appendleft(part[room:])
                part = part[:room]
            room -= len(part)
            parts.append(part)
        size -= room
        call.window -= size
        self._window -= size
        self._quiet_since_s = time.monotonic()
        if size >= SMALL_PART_BYTES:  # for which the client has to say that it has read it
            self._credit = min(CREDIT_MAX, self._credit + CREDIT_PER_PART)
        self._write(data_head(size, call.number))
        self._transport.writelines(parts)
        if not call.queue:
            del self._unsent[call.number]
            self._credit = min(CREDIT_MAX, self._credit + CREDIT_PER_ANSWER)
            self._finish(call, frame(HEADERS, END_HEADERS | END_STREAM, call.number, call.trailers))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._send_more()

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def _finish(self, call: Call, last: bytes) -> None:
        """Send the last frames of a call. What it held is free before the client can know."""
        if not call.has_ended:
            last += frame(RST_STREAM, 0, call.number, struct.pack(">L", NO_ERROR))
        self._forget(call)
        self._write(last)
        self._close_if_done()

    def _forget(self, call: Call) -> None:
        del self.calls[call.number]
        self.server.open_calls -= 1
        self.server.arrived(call)
        call.hold.drop()
        self.note_waiting()

    def note_waiting(self) -> None:
        """The calls have changed: note whether the server waits for this client, and for what."""
        if not self.calls:
            self._wait_for(self.server.idle)
        else:
            self._wait_for(self.server.due if len(self.arriving) == len(self.calls) else None)

    def _wait_for(self, wait: dict[ServerConnection, float] | None) -> None:
        if wait is self._wait:
            return
        if self._wait is not None:
            self._wait.pop(self, None)
        self._wait = wait
        if wait is not None:
            wait[self] = now_s = time.monotonic()
            if not self.calls:
                self._quiet_since_s = now_s

    def _close_if_done(self) -> None:
        if self._is_leaving and not self.calls:
            self._transport.close()

    def _give_up(self, call: Call) -> None:
        """The client does not want the answer any more."""
        self._unsent.pop(call.number, None)
        call.queue.clear()
        self._forget(call)
        self._close_if_done()
        if call.is_open:
            call.is_open = False
            on_gone, call.on_gone = call.on_gone, None
            if on_gone is not None:
                on_gone()

    # The end

    def attend(self, now_s: float) -> None:
        """Once a second: refill the credit, and end what takes too long."""
        self._credit = min(CREDIT_MAX, self._credit + CREDIT_PER_S)
        quiet_s = now_s - self._quiet_since_s
        if self._unsent and (quiet_s > STALL_S_MAX or now_s > self._sent_by_s + STALL_S_MAX):
            self.server.refused["stalled"] += 1
            self._transport.abort()
        elif not self.calls and quiet_s > (IDLE_S_MAX if self._is_known else GREETING_S_MAX):
            self._fail(NO_ERROR, "idle")
        else:
            oldest_ns = time.monotonic_ns() - SEND_S_MAX * NS_PER_S
            for call in [each for each in self.calls.values() if each.began_ns < oldest_ns and not each.has_ended]:
                if call.is_open:
                    what = f"the message took more than {SEND_S_MAX} s to arrive"
                    self.server.refuse(call, Refusal(HTTPStatus.REQUEST_TIMEOUT, what, "send it faster"))

    def leave(self) -> None:
        """Accept no more calls, refuse those that have not arrived, and close when all are answered."""
        if self._is_leaving or self._is_lost:
            return
        self._is_leaving = True
        self._write(frame(GOAWAY, 0, 0, struct.pack(">LL", self._begun, NO_ERROR)))
        for call in [each for each in self.calls.values() if each.is_open and not each.has_ended]:
            what = "rejected: the server is shutting down"
            self.server.refuse(call, Refusal(HTTPStatus.SERVICE_UNAVAILABLE, what, "try again in 1 s", retry_after_s=1))
        self._close_if_done()

    def abort(self) -> None:
        self._wait_for(None)  # the listener looks there for further ones, in this same turn
        super().abort()

    def _fail(self, code: int, why: str) -> None:
        """Close the connection with an error. Its calls are given up."""
        if self._is_over or self._is_lost:
            return
        self._is_over = True
        self.server.closed[why] += 1
        _log.debug("connection closed: %s", why)
        self._write(frame(GOAWAY, 0, 0, struct.pack(">LL", self._begun, code) + why.encode()))
        for call in list(self.calls.values()):
            self._give_up(call)
        self._rest = b""
        self._transport.close()
        self._loop.call_later(SWEEP_S, self.abort)  # a client that does not read would keep it open


class Http2Server:
    """The connections of a gRPC server, and what they have in common. At most `calls_max` calls are being answered, and
    at most as many more wait for their message. `connections_max` and `each_address_max` are as in `Listener`.
    `intake` is that of another server in the same event loop, so that both together take up as much as one."""

    def __init__(
        self,
        methods: Methods,
        bodies: BodyMemory,
        *,
        calls_max: int,
        connections_max: int = 0,
        each_address_max: int = 0,
        tls: Tls | None = None,
        intake: Intake | None = None,
    ) -> None:
        self.methods, self.bodies, self.calls_max = methods, bodies, calls_max
        self.intake = intake or Intake(lambda: True)
        self.idle: dict[ServerConnection, float] = {}
        """Connections without calls, by when they began to be."""
        self.due: dict[ServerConnection, float] = {}
        """Connections all of whose calls have yet to send their message."""
        self.listener = Listener(
            lambda: Http2Connection(self),
            idle=(self.due, self.idle),
            connections_max=connections_max,
            each_address_max=each_address_max,
            tls=tls,
            protocols=("h2",),
        )
        self.access: AccessLog | None = None
        """Where answers are noted, if somebody wants that."""
        self.open_calls = 0
        self.arriving = 0
        """How many of them have not sent their message."""
        self._crowd: Http2Connection | None = None
        """The connection that had most of these when the last one was added."""
        self.refused: Counter[str] = Counter()
        """Calls refused here, by the bound that they exceeded."""
        self.closed: Counter[str] = Counter()
        """Connections closed by the server, by the reason."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closing = False

    def start(self, sock: socket.socket) -> None:
        """Accept connections on a listening socket, which this object then owns."""
        self.intake.start(asyncio.get_running_loop())
        self.listener.is_behind = lambda: self.intake.has_waiting
        self.listener.is_overloaded = lambda: self.intake.is_overloaded
        self.listener.start(sock)
        self._sweep()

    def _sweep(self) -> None:
        """Attend to all connections, and do it again later."""
        do_in_steps(self._attend(), self.intake.go_on_later, lambda: not self._is_closing, self._swept_not)

    def _attend(self) -> Steps[None]:
        now_s = time.monotonic()
        for place, connection in enumerate(list(self.listener.connections), 1):
            if isinstance(connection, Http2Connection) and connection.transport:
                connection.attend(now_s)
            if not place % SWEPT_AT_ONCE:
                yield
        self._sweep_later()

    def _swept_not(self, error: Exception, _spent_ns: int) -> None:
        _log.error("internal error while looking after connections", exc_info=error)
        self._sweep_later()

    def _sweep_later(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    async def close(self, within_s: float) -> None:
        """Finish the calls that have arrived, for at most `within_s`, and close all connections."""
        self._is_closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.listener.stop()
        for connection in self._connections():
            connection.leave()
        await self.listener.close(within_s)

    def _connections(self) -> list["Http2Connection"]:
        """Those that are open, without those in a handshake of TLS."""
        return [each for each in self.listener.connections if isinstance(each, Http2Connection) and each.transport]

    def admit(self, call: Call) -> None:
        """Let a call send its message. Raises a 503 if as many as may be are answered now; if as many are waited for,
        the oldest of the connection that has most of them is refused: whoever wants an answer has sent the message by
        then, and calls that nobody means to send must not take the place of others' uploads."""
        being_answered = self.open_calls - self.arriving - 1
        if being_answered >= self.calls_max:
            self.refused["calls"] += 1
            what = f"rejected: the server has {being_answered} open calls, as many as it accepts"
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                what,
                "try again in 1 s; `limits` in the deployment sets `requests`",
                retry_after_s=1,
            )
        own = call.connection
        own.arriving[call] = None
        self.arriving += 1
        if self._crowd is None or len(own.arriving) >= len(self._crowd.arriving):
            self._crowd = own
        if self.arriving > self.calls_max:
            self.refused["arriving"] += 1
            what = f"rejected: the server waits for the messages of {self.calls_max} calls"
            slow = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, what, "send the message with the call", retry_after_s=1)
            self._crowd.evict(next(iter(self._crowd.arriving)), slow)

    def arrived(self, call: Call) -> None:
        """Wait no longer for the message of a call."""
        if call in call.connection.arriving:
            del call.connection.arriving[call]
            self.arriving -= 1

    def too_large(self, call: Call, bytes_max: int) -> Refusal:
        """Count and return the refusal of a message that is longer than `bytes_max`."""
        self.bodies.refused["each"] += 1
        if call.received[0] and bytes_max == INFLATED_BYTES_MAX:
            fix = "send it uncompressed"
        else:
            fix = "send fewer rows; the server's option --body-bytes sets the limit"
        return Refusal(413, f"the message has {call.size} bytes; the limit is {bytes_max}", fix)

    def refuse(self, call: Call, refusal: Refusal) -> None:
        """Answer a call with an error."""
        code, text, trailers = self.error_of(refusal)
        call.refuse(code, text, *trailers)

    @staticmethod
    def error_of(refusal: Refusal) -> tuple[int, str, list[Field]]:
        """The code, text and trailers of a refusal."""
        trailers = []
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            trailers = [("retry-after", str(max(1, refusal.retry_after_s)))]
        return CODES.get(refusal.status, INTERNAL), str(refusal), trailers


OK: Final = 0
INTERNAL: Final = 13
CODES: Final = {
    400: 3,  # INVALID_ARGUMENT
    401: 16,  # UNAUTHENTICATED
    403: 7,  # PERMISSION_DENIED
    404: 5,  # NOT_FOUND
    408: 4,  # DEADLINE_EXCEEDED
    413: 8,  # RESOURCE_EXHAUSTED
    429: 8,
    500: INTERNAL,
    501: 12,  # UNIMPLEMENTED
    503: 14,  # UNAVAILABLE
    504: 4,
}
"""HTTP status to gRPC status."""
LATE_OR_BUSY: Final = frozenset({CODES[503], CODES[504]})


def unpadded(flags: int, payload: bytes) -> bytes:
    """What a frame carries, without its padding."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Fault(PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


def inflate(call: Call) -> Steps[None]:
    """Replace the compressed message that a call has received, a part in each step. It takes room as it grows; raises a
    `Refusal` if that is more than the bound."""
    encoding = call.metadata.get("grpc-encoding", "identity")
    bits = {"gzip": 31, "deflate": 15}.get(encoding)
    if bits is None:
        what = f"grpc-encoding: {quoted(encoding)} is not supported"
        raise Refusal(HTTPStatus.NOT_IMPLEMENTED, what, "send gzip, deflate or identity")
    stream, found, packed = zlib.decompressobj(bits), bytearray(PREFIX_BYTES), memoryview(call.received)
    bytes_max = min(call.bytes_max, INFLATED_BYTES_MAX, max(RATIO_BYTES_MIN, RATIO_MAX * len(packed)))
    try:
        for at in range(PREFIX_BYTES, len(packed), INFLATED_AT_ONCE):
            rest: Buffer = packed[at : at + INFLATED_AT_ONCE]
            while rest:
                part = stream.decompress(rest, INFLATED_AT_ONCE)
                rest = stream.unconsumed_tail
                found += part
                if len(found) - PREFIX_BYTES > bytes_max:
                    raise Refusal(413, f"the compressed message becomes more than {bytes_max} bytes", UNPACKED)
                call.hold.take(len(part))
                yield
        if not stream.eof or stream.unused_data:
            raise zlib.error
    except zlib.error:
        raise bad("message", f"it is not {encoding}", "compress it as grpc-encoding says") from None
    call.received = found


UNPACKED: Final = "send it uncompressed"
