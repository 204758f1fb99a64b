"""HTTP/2 frame by frame: what a well-behaved client gets, and what an attacker does not."""

import asyncio
import gzip
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.edge import http2, steps
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.hpack import Decoder, encode
from sloop.serve.edge.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME,
    FRAME_BYTES_MAX,
    GOAWAY,
    HEADERS,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAMS_MAX,
    WINDOW,
    WINDOW_UPDATE,
    Call,
    Http2Connection,
    Http2Server,
    frame,
)
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.steps import Steps
from tests.counting import calls_of

LIMIT = 2_000_000
OK = encode(("grpc-status", "0"))


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Echo:
    """Answers each message with itself, at once, or when `finish` is called; needs the key `yes`."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.calls: list[Call] = []
        self.messages: list[bytes] = []
        self.gone: list[int] = []

    def begin(self, call: Call) -> int:
        if call.metadata.get("x-key") != "yes":
            raise Refusal(401, "wrong key")
        return LIMIT

    def glance(self, beginning: bytes) -> Steps[None]:
        if beginning[:4] == b"long":
            for _ in range(5):
                yield
        if beginning[:4] == b"evil":
            raise Refusal(413, "too much")

    def patience_ns(self, call: Call) -> int:
        return 10**12

    def answer(self, call: Call, message: bytes | memoryview) -> None:
        call.on_gone = lambda: self.gone.append(call.number)
        self.calls.append(call)
        self.messages.append(bytes(message))
        if not self.is_slow:
            call.reply([message], OK)


class Wire:
    """A transport that keeps what is written; `is_stuck` tells the protocol that the client does not read."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.is_closed = self.is_reading_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.written += data

    def writelines(self, parts: list[memoryview]) -> None:
        self.write(b"".join(parts))

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False


class Peer:
    """A client of a connection without sockets."""

    def __init__(
        self,
        handler: Any = None,
        *,
        room: int = 10 * LIMIT,
        greets: bool = True,
        server: Http2Server | None = None,
    ) -> None:
        if server is None:
            server = Http2Server(handler or Echo(), BodyMemory(LIMIT, room), calls_max=2000)
            server.intake.start(asyncio.get_running_loop())
            server.intake.turn_ns = 10**12  # calls are looked at at once, however busy the machine is
        self.server: Http2Server = server
        self.handler: Any = server.methods
        self.bodies = server.bodies
        self.wire = Wire()
        self.connection = Http2Connection(self.server)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]  # all of a transport that is used
        self.decoder = Decoder()
        if greets:
            self.send(PREFACE + frame(SETTINGS, 0, 0))
            self.frames()

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    async def settle(self) -> None:
        """Wait until everything sent has been looked at."""
        intake = self.server.intake
        while self.connection._waits_for_turn or intake.has_waiting or intake._pieces:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """(type, flags, stream, payload) of what the server has written since the last call."""
        found, at, data = [], 0, bytes(self.wire.written)
        while at < len(data):
            high, low, kind, flags, number = FRAME.unpack_from(data, at)
            end = at + FRAME.size + (high << 16) + low
            found.append((kind, flags, number, data[at + FRAME.size : end]))
            at = end
        assert at == len(data)
        self.wire.written.clear()
        return found

    def answers(self) -> dict[int, tuple[bytes, dict[str, str]]]:
        """By stream, the data and the last head."""
        found: dict[int, tuple[bytes, dict[str, str]]] = {}
        for kind, _, number, payload in self.frames():
            data, head = found.get(number, (b"", {}))
            if kind == DATA:
                found[number] = data + payload, head
            elif kind == HEADERS:
                found[number] = data, dict(self.decoder.decode(payload))
        return found

    def ended_with(self) -> int:
        """The code with which the server closed the connection."""
        kind, _, _, payload = self.frames()[-1]
        assert kind == GOAWAY
        assert self.wire.is_closed
        return int.from_bytes(payload[4:8], "big")


def head(number: int, *, key: str = "yes", flags: int = END_HEADERS, more: tuple[tuple[str, str], ...] = ()) -> bytes:
    fields = ((":method", "POST"), (":path", "/echo"), ("content-type", "application/grpc"), ("x-key", key), *more)
    return frame(HEADERS, flags, number, encode(*fields))


def prefixed(message: bytes, *, is_compressed: bool = False) -> bytes:
    return bytes((is_compressed,)) + len(message).to_bytes(4, "big") + message


def data(number: int, payload: bytes, *, ends: bool = True) -> bytes:
    """Frames of data, as large as they may be."""
    slices = [payload[at : at + FRAME_BYTES_MAX] for at in range(0, len(payload), FRAME_BYTES_MAX)] or [b""]
    last = len(slices) - 1
    return b"".join(
        frame(DATA, END_STREAM if ends and place == last else 0, number, part) for place, part in enumerate(slices)
    )


@in_loop
async def test_answers_calls_in_any_slicing() -> None:
    whole = b"".join(head(number) + data(number, prefixed(b"m%d" % number)) for number in (1, 3, 5))
    for size in (1, 7, 1000):
        peer = Peer()
        for at in range(0, len(whole), size):
            peer.send(whole[at : at + size])
        answers = peer.answers()
        assert {number: answer for number, (answer, _) in answers.items()} == {
            number: prefixed(b"m%d" % number) for number in (1, 3, 5)
        }
        assert all(last == {"grpc-status": "0"} for _, last in answers.values())
        assert (peer.server.open_calls, peer.bodies.held_bytes) == (0, 0)


@in_loop
async def test_pads_priorities_trailers_and_unknown_frames_are_understood() -> None:
    peer = Peer()
    block = head(1)[FRAME.size :]
    peer.send(frame(HEADERS, PADDED | 0x20, 1, b"\x03" + bytes(5) + block[:10] + bytes(3)))
    peer.send(frame(CONTINUATION, 0, 1, block[10:20]) + frame(CONTINUATION, END_HEADERS, 1, block[20:]))
    message = prefixed(b"padded")
    peer.send(frame(DATA, PADDED, 1, b"\x02" + message[:4] + bytes(2)) + frame(DATA, 0, 1, message[4:]))
    peer.send(frame(PRIORITY, 0, 1, bytes(5)) + frame(0xBE, 0, 0, b"grease"))
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, encode(("x-end", "1"))))
    assert peer.answers()[1] == (message, {"grpc-status": "0"})


@in_loop
async def test_without_a_key_nothing_is_received_and_the_connection_goes_on() -> None:
    peer = Peer()
    peer.send(head(1, key="no") + data(1, prefixed(bytes(30_000))))
    assert peer.answers()[1][1]["grpc-status"] == "16"
    assert (peer.bodies.held_bytes, peer.handler.messages) == (0, [])
    peer.send(head(3) + data(3, prefixed(b"m")))
    assert peer.answers()[3][0] == prefixed(b"m")


@in_loop
async def test_a_refusal_has_the_name_that_the_client_gave_the_call() -> None:
    peer = Peer()
    for number, name in enumerate(("a-1", "a 1", 129 * "a")):
        peer.send(head(2 * number + 1, key="no", more=(("x-request-id", name),)))
    answers = peer.answers()
    assert [answers[number][1].get("x-request-id") for number in (1, 3, 5)] == ["a-1", None, None]


@in_loop
async def test_the_announced_length_is_refused_before_the_message() -> None:
    peer = Peer()
    peer.send(head(1) + data(1, b"\0" + (LIMIT + 1).to_bytes(4, "big"), ends=False))
    answer = peer.answers()[1][1]
    assert (answer["grpc-status"], peer.bodies.held_bytes) == ("8", 0)
    assert answer["grpc-message"].startswith(f"the message has {LIMIT + 1} bytes; the limit is {LIMIT}")
    assert peer.bodies.refused == {"each": 1}


@in_loop
async def test_bytes_are_counted_as_they_arrive_and_given_back() -> None:
    peer = Peer(Echo(is_slow=True))
    whole = prefixed(bytes(100_000))
    for number in (1, 3, 5):
        peer.send(head(number) + data(number, whole[:40_000], ends=False))
    assert peer.bodies.held_bytes == 120_000
    peer.send(frame(RST_STREAM, 0, 3, bytes(4)))
    assert peer.bodies.held_bytes == 80_000
    peer.send(data(1, whole[40_000:]))
    assert (peer.bodies.held_bytes, peer.handler.gone) == (140_005, [])
    peer.connection.connection_lost(None)
    assert (peer.bodies.held_bytes, peer.server.open_calls, peer.handler.gone) == (0, 0, [1])


@in_loop
async def test_a_message_waits_for_no_room_but_is_refused() -> None:
    peer = Peer(room=LIMIT)
    peer.send(head(1) + data(1, prefixed(bytes(LIMIT - 100_000))[:60_000], ends=False))
    peer.bodies.held_bytes += LIMIT - 70_000  # others
    peer.send(data(1, bytes(16_000), ends=False))
    answer = peer.answers()[1][1]
    assert (answer["grpc-status"], answer["retry-after"]) == ("14", "1")
    assert peer.bodies.held_bytes == LIMIT - 70_000


@in_loop
async def test_a_client_is_told_to_go_on_as_far_as_its_message_needs() -> None:
    peer = Peer(room=2**30)
    whole, at, allowed = prefixed(random.Random(1).randbytes(LIMIT)), 0, WINDOW
    peer.send(head(1))
    while at < len(whole):
        assert allowed > 0
        size = min(allowed, 16_000, len(whole) - at)
        peer.send(data(1, whole[at : at + size], ends=at + size == len(whole)))
        at, allowed = at + size, allowed - size
        for kind, _, number, payload in peer.frames() if at < len(whole) else ():
            if (kind, number) == (WINDOW_UPDATE, 1):
                allowed += int.from_bytes(payload, "big")
        assert at + allowed <= max(WINDOW, len(whole))
    assert peer.handler.messages == [whole[5:]]


@in_loop
async def test_more_than_was_allowed_closes_the_connection() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, b"\0\0", ends=False))  # no length: nothing more is allowed
    peer.send(data(1, b"\0", ends=False) * 1)
    peer.send(frame(DATA, 0, 1, bytes(1)) + data(1, bytes(70_000), ends=False))
    assert peer.answers()[1][1]["grpc-status"] == "3"  # five bytes of zeros are a message, and more is too much
    peer = Peer()
    peer.send(head(1))
    for _ in range(5):
        if not peer.wire.is_closed:
            peer.connection.calls[1].received = b""
            peer.send(data(1, b"\0", ends=False) + frame(DATA, 0, 1, b""))
    peer.connection.calls[1].allowed = 10
    peer.send(data(1, bytes(11), ends=False))
    assert peer.ended_with() == FLOW_CONTROL_ERROR


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@in_loop
async def test_compressed_messages_are_inflated_within_the_bound(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    peer, more = Peer(), (("grpc-encoding", encoding),)
    message = random.Random(2).randbytes(300_000) + bytes(300_000)
    peer.send(head(1, more=more))
    peer.connection.calls[1].allowed = 2**20
    peer.send(data(1, prefixed(pack(message), is_compressed=True)))
    await peer.settle()
    assert peer.handler.messages == [message]
    bomb = prefixed(pack(bytes(50 * LIMIT), 9), is_compressed=True)
    assert len(bomb) < LIMIT // 4
    for number in (3, 5):
        peer.send(head(number, more=more))
        peer.connection.calls[number].allowed = 2**20
        peer.send(data(number, bomb))
        await peer.settle()
    answers = peer.answers()
    assert [answers[number][1]["grpc-status"] for number in (3, 5)] == ["8", "8"]
    peer.send(frame(RST_STREAM, 0, 1, bytes(4)))  # its answer is not sent yet
    assert (peer.bodies.held_bytes, len(peer.handler.messages)) == (0, 1)


@pytest.mark.parametrize(
    ("encoding", "message", "status"),
    [
        ("br", b"x", "12"),
        ("gzip", b"not gzip", "3"),
        ("gzip", gzip.compress(b"x", mtime=0)[:-1], "3"),
        ("identity", b"x", "12"),
    ],
)
@in_loop
async def test_what_cannot_be_inflated_is_refused(encoding: str, message: bytes, status: str) -> None:
    peer = Peer()
    peer.send(head(1, more=(("grpc-encoding", encoding),)) + data(1, prefixed(message, is_compressed=True)))
    assert peer.answers()[1][1]["grpc-status"] == status


@pytest.mark.parametrize(
    "payload", [b"", b"\0\0\0", prefixed(b"abc")[:-1], prefixed(b"abc") + b"d", prefixed(b"abc") * 2]
)
@in_loop
async def test_anything_but_one_whole_message_is_refused(payload: bytes) -> None:
    peer = Peer()
    peer.send(head(1) + data(1, payload))
    assert peer.answers()[1][1]["grpc-status"] == "3"
    assert (peer.bodies.held_bytes, peer.handler.messages) == (0, [])


FLOODS: dict[str, Callable[[int], bytes]] = {
    "rapid resets": lambda number: head(number) + frame(RST_STREAM, 0, number, bytes(4)),
    "resets of whole calls": lambda number: (
        head(number) + data(number, prefixed(b"m")) + frame(RST_STREAM, 0, number, bytes(4))
    ),
    "wrong keys": lambda number: head(number, key="no") + data(number, prefixed(b"m")),
    "other protocols": lambda number: frame(HEADERS, END_HEADERS | END_STREAM, number, b"\x82"),
    "pings": lambda _: frame(PING, 0, 0, bytes(8)),
    "pongs": lambda _: frame(PING, ACK, 0, bytes(8)),
    "settings": lambda _: frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 1000)),
    "priorities": lambda _: frame(PRIORITY, 0, 1, bytes(5)),
    "windows": lambda _: frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
    "unknown frames": lambda _: frame(0xFA, 0, 0, b"x"),
    "empty data": lambda number: (head(1) if number == 1 else b"") + frame(DATA, 0, 1),
    "single bytes": lambda number: (
        head(1) + data(1, prefixed(bytes(9999))[:5], ends=False) if number == 1 else frame(DATA, 0, 1, b"x")
    ),
    "data of refused calls": lambda number: (head(1, key="no") if number == 1 else b"") + frame(DATA, 0, 1, b"x"),
    "empty continuations": lambda number: (
        head(1, flags=0) if number == 1 else frame(CONTINUATION, 0, 1)  # for ever
    ),
    "more calls than allowed": head,
    "long heads": lambda number: head(number, more=(("x", "v" * 12_000),)),
    "long heads of calls that have ended": lambda number: (
        head(1, key="no") if number == 1 else frame(HEADERS, END_HEADERS | END_STREAM, 1, encode(("x", "v" * 12_000)))
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
@in_loop
async def test_a_flood_is_closed_soon_and_what_it_holds_is_freed(flood: str) -> None:
    peer = Peer(Echo(is_slow=True))
    for number in range(1, 6000, 2):
        peer.send(FLOODS[flood](number))
        await peer.settle()
        if peer.wire.is_closed:
            break
    assert peer.ended_with() == ENHANCE_YOUR_CALM
    assert (peer.server.open_calls, peer.bodies.held_bytes) == (0, 0)
    assert sum(peer.server.closed.values()) == 1
    assert len(peer.handler.messages) <= 101


@in_loop
async def test_calls_that_are_answered_pay_for_what_they_need() -> None:
    peer = Peer()
    for number in range(1, 10_000, 2):
        pings = frame(PING, 0, 0, bytes(8)) * 3 + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\6") * 3
        peer.send(head(number) + data(number, prefixed(b"m")) + pings)
        await peer.settle()
    assert not peer.wire.is_closed
    assert len(peer.handler.messages) == 5000


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", PROTOCOL_ERROR),
        (PREFACE + FRAME.pack(0xFF, 0xFFFF, DATA, 0, 1), 0x6),
        (PREFACE + data(1, b"x"), PROTOCOL_ERROR),
        (PREFACE + head(2), PROTOCOL_ERROR),
        (PREFACE + head(0), PROTOCOL_ERROR),
        (PREFACE + frame(HEADERS, END_HEADERS, 0, b"\xff"), PROTOCOL_ERROR),  # which is not decoded
        (PREFACE + frame(HEADERS, END_HEADERS, 1, b"\x20" * 8_000), 0x9),
        (PREFACE + head(1) + head(1), PROTOCOL_ERROR),
        (PREFACE + head(1, flags=0) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (PREFACE + frame(CONTINUATION, END_HEADERS, 1), PROTOCOL_ERROR),
        (PREFACE + frame(PUSH_PROMISE, 0, 1), PROTOCOL_ERROR),
        (PREFACE + frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (PREFACE + frame(PING, 0, 0, b"x"), PROTOCOL_ERROR),
        (PREFACE + frame(SETTINGS, 0, 0, b"x"), 0x6),
        (PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 2**31)), FLOW_CONTROL_ERROR),
        (PREFACE + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
        (PREFACE + frame(WINDOW_UPDATE, 0, 0, bytes(4)), FLOW_CONTROL_ERROR),
        (PREFACE + frame(HEADERS, PADDED | END_HEADERS, 1, b"\x09x"), PROTOCOL_ERROR),
        (PREFACE + frame(HEADERS, END_HEADERS, 1, b"\xff"), 0x9),
        (PREFACE + frame(HEADERS, 0, 1, bytes(16_000)) + frame(CONTINUATION, 0, 1, bytes(1000)), ENHANCE_YOUR_CALM),
    ],
)
@in_loop
async def test_a_broken_protocol_closes_the_connection(sent: bytes, code: int) -> None:
    peer = Peer(greets=False)
    peer.send(sent)
    await peer.settle()
    assert peer.ended_with() == code
    assert (peer.server.open_calls, peer.bodies.held_bytes) == (0, 0)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60))
def test_random_frames_never_break_it(seed: int, count: int) -> None:
    @in_loop
    async def run() -> None:
        chance, peer = random.Random(seed), Peer(Echo(is_slow=seed % 2 == 0))
        for _ in range(count):
            number = chance.choice([0, 1, 1, 3, 3, 5, 7])
            payload = chance.choice(
                [b"", bytes(4), b"\0\0\1\0", bytes(8), prefixed(b"m"), chance.randbytes(9), head(1)[9:]]
            )
            sent = chance.choice(
                [frame(chance.randrange(11), chance.choice([0, 1, 4, 5, 8, 13, 255]), number, payload), head(number)]
            )
            if peer.wire.is_closed:
                break
            peer.send(sent)
        await peer.settle()
        for call in peer.handler.calls:
            call.reply([b"late"], OK)
        peer.connection.connection_lost(None)
        assert (peer.server.open_calls, peer.bodies.held_bytes, peer.server.idle) == (0, 0, {})

    run()


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 60_000), min_size=1, max_size=4),
    grants=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40_000)), min_size=1, max_size=60),
)
def test_answers_leave_whole_and_never_faster_than_the_client_reads(
    sizes: list[int], grants: list[tuple[int, int]]
) -> None:
    @in_loop
    async def run() -> None:
        peer, chance = Peer(Echo(is_slow=True)), random.Random(3)
        wholes = {1 + 2 * place: chance.randbytes(size) for place, size in enumerate(sizes)}
        for number in wholes:
            peer.send(head(number) + data(number, prefixed(b"m")))
        for call, message in zip(peer.handler.calls, wholes.values(), strict=True):
            call.reply([message[:10], memoryview(message)[10:]], OK)
        windows = dict.fromkeys(wholes, WINDOW) | {0: WINDOW}
        got = dict.fromkeys(wholes, b"")
        ended: set[int] = set()
        steps = [(2 * place - 1 if place else 0, size) for place, size in grants]
        steps += [(number, 2**20) for number in (*wholes, 0)]
        for target, size in [(-1, 0), *steps]:
            if target >= 0 and target in windows:
                windows[target] += size
                peer.send(frame(WINDOW_UPDATE, 0, target, size.to_bytes(4, "big")))
            for kind, flags, number, payload in peer.frames():
                if kind == DATA:
                    got[number] += payload
                    windows[number] -= len(payload)
                    windows[0] -= len(payload)
                    assert min(windows[number], windows[0]) >= 0
                elif kind == HEADERS and flags & END_STREAM:
                    ended.add(number)
        assert got == {number: prefixed(message) for number, message in wholes.items()}
        assert ended == set(wholes)
        assert (peer.server.open_calls, peer.bodies.held_bytes) == (0, 0)

    run()


@in_loop
async def test_an_unread_answer_is_counted_and_freed_with_its_call() -> None:
    peer = Peer(Echo(is_slow=True), room=LIMIT)
    for number in (1, 3, 5, 7):
        peer.send(head(number) + data(number, prefixed(b"m")))
    calls = peer.handler.calls
    for call in calls[:3]:
        call.reply([bytes(600_000)], OK)
    assert peer.bodies.held_bytes == 3 * 600_005 + 6  # the last call's message is not answered yet
    calls[3].reply([bytes(600_000)], OK)
    assert peer.answers()[7][1]["grpc-status"] == "14"
    assert peer.server.refused == {"outputs": 1}
    peer.send(frame(RST_STREAM, 0, 1, bytes(4)))
    assert peer.bodies.held_bytes == 2 * 600_005
    peer.connection.connection_lost(None)
    assert peer.bodies.held_bytes == 0


@in_loop
async def test_a_client_may_say_often_that_it_has_read() -> None:
    """Of 64 MiB, as clients do that read little at a time."""
    peer = Peer(Echo(is_slow=True), room=2**30)
    peer.send(head(1) + data(1, prefixed(b"m")))
    peer.handler.calls[0].reply([bytes(2**26)], OK)
    got = 0
    while not peer.wire.is_closed and peer.connection.calls:
        got += sum(len(payload) for kind, _, _, payload in peer.frames() if kind == DATA)
        for number in (0, 1):
            peer.send(frame(WINDOW_UPDATE, 0, number, (8192).to_bytes(4, "big")))
    got += sum(len(payload) for kind, _, _, payload in peer.frames() if kind == DATA)
    assert (got, peer.wire.is_closed) == (2**26 + 5, False)


@in_loop
async def test_nothing_is_handled_after_the_connection_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Echo()

    def answer(call: Call, message: bytes | memoryview) -> None:
        handler.messages.append(bytes(message))
        raise Refusal(413, "too much")

    monkeypatch.setattr(handler, "answer", answer)
    monkeypatch.setattr(http2, "NS_PER_CREDIT", 1)
    peer = Peer(handler)
    peer.send(b"".join(head(number) + data(number, prefixed(b"m")) for number in range(1, 41, 2)))
    assert peer.ended_with() == ENHANCE_YOUR_CALM
    assert len(handler.messages) == 2
    assert (peer.server.open_calls, sum(peer.server.closed.values())) == (0, 1)


@in_loop
async def test_a_client_that_does_not_read_is_not_written_to() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(frame(WINDOW_UPDATE, 0, 0, b"\0\x10\0\0") + frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 2**20)))
    peer.send(head(1) + data(1, prefixed(b"m")))
    peer.frames()
    peer.connection.pause_writing()
    peer.handler.calls[0].reply([bytes(500_000)], OK)
    assert [kind for kind, *_ in peer.frames()] == [HEADERS]
    peer.connection.resume_writing()
    assert len(peer.answers()[1][0]) == 500_005


@in_loop
async def test_of_several_windows_in_one_frame_the_last_holds_and_is_applied_once() -> None:
    changes: list[int] = []

    class Noting(dict[int, Call]):
        def values(self) -> Any:
            changes.append(len(self))
            return super().values()

    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, prefixed(b"m")))
    call = peer.handler.calls[0]
    peer.connection.calls = Noting(peer.connection.calls)
    for last in (2000, 2000, 10):
        sizes = [struct.pack(">HL", 4, size) for size in (*range(32), last)]
        peer.send(frame(SETTINGS, 0, 0, b"".join(sizes)))
        assert call.window == last
    assert changes == [1, 1]
    peer.send(head(3))
    assert peer.connection.calls[3].window == 10


@in_loop
async def test_answers_are_not_sent_in_crumbs_for_nothing() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 0)))
    for number in range(1, 2001, 2):
        peer.send(head(number) + data(number, prefixed(b"m")))
        await peer.settle()
    for call in list(peer.handler.calls):
        call.reply([b"m"], OK)
    peer.frames()
    for size in range(1, 6):
        if not peer.wire.is_closed:
            peer.send(frame(SETTINGS, 0, 0, struct.pack(">HL", 4, size)))
    frames = peer.frames()
    assert sum(kind == DATA for kind, *_ in frames) == 2000
    assert frames[-1][0] == GOAWAY


@in_loop
async def test_many_connections_are_looked_after_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEP_NS", 0)
    peer, intake, attended = Peer(), Behind(), []
    server = peer.server
    server.intake = intake  # type: ignore[assignment]  # the part of it that is used
    monkeypatch.setattr(Http2Connection, "attend", lambda self, now_s: attended.append(self))
    connections = [Peer(server=server).connection for _ in range(2 * http2.SWEPT_AT_ONCE)]
    lost = connections.pop()
    for connection in (*connections, lost):
        server.listener.connections[connection] = None
    server._sweep()
    assert (attended, server._sweeper) == (connections[: http2.SWEPT_AT_ONCE], None)
    lost.transport = None
    while intake.pieces:
        intake.pieces.pop()()
    assert attended == connections
    assert server._sweeper is not None
    server._sweep()
    server._is_closing = True
    while intake.pieces:
        intake.pieces.pop()()
    assert len(attended) == len(connections) + http2.SWEPT_AT_ONCE


@in_loop
async def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, prefixed(bytes(9))[:7], ends=False))
    peer.connection.attend(time.monotonic())
    assert not peer.frames()
    monkeypatch.setattr(http2, "SEND_S_MAX", -1)
    peer.connection.attend(time.monotonic())
    assert peer.answers()[1][1]["grpc-status"] == "4"
    assert peer.bodies.held_bytes == 0
    peer.send(head(3) + data(3, prefixed(b"m")))
    peer.handler.calls[0].reply([bytes(100_000)], OK)
    now_s = time.monotonic()
    ends = []
    for after_s in (0, http2.STALL_S_MAX + 1):
        peer.connection.attend(now_s + after_s)
        ends.append(peer.wire.is_closed)
    assert ends == [False, True]
    for is_known, limit_s in ((True, http2.IDLE_S_MAX), (False, http2.GREETING_S_MAX)):
        idle = Peer()
        if is_known:
            idle.send(head(1) + data(1, prefixed(b"m")))
        closed = []
        for after_s in (-1, 5):
            idle.connection.attend(now_s + limit_s + after_s)
            closed.append(idle.wire.is_closed)
        assert closed == [False, True]
        assert idle.ended_with() == NO_ERROR


@in_loop
async def test_at_the_end_calls_that_are_here_are_finished_and_the_others_refused() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, prefixed(b"m")))
    peer.send(head(3) + data(3, prefixed(bytes(9))[:7], ends=False))
    peer.connection.leave()
    peer.send(head(5))
    frames = peer.frames()
    assert (GOAWAY, 0, 0, struct.pack(">LL", 3, NO_ERROR)) in frames
    assert (RST_STREAM, 0, 5, struct.pack(">L", REFUSED_STREAM)) in frames
    assert not peer.wire.is_closed
    peer.handler.calls[0].reply([b"m"], OK)
    assert peer.answers()[1][0] == prefixed(b"m")
    assert peer.wire.is_closed


LATE_FRAMES = {
    "its message": data(5, prefixed(b"m")),
    "its reset": frame(RST_STREAM, 0, 5, bytes(4)),
    "its window": frame(WINDOW_UPDATE, 0, 5, b"\0\0\0\1"),
    "its trailers": frame(HEADERS, END_HEADERS | END_STREAM, 5, encode(("x-end", "1"))),
    "much of its message": data(5, b"m", ends=False) * 1500,
    "further calls and their messages": b"".join(head(number) + data(number, b"m") for number in range(7, 2000, 2)),
}


@pytest.mark.parametrize("what", LATE_FRAMES)
@in_loop
async def test_at_the_end_a_client_may_not_know_yet_that_further_calls_are_refused(what: str) -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, prefixed(b"m")))
    peer.send(head(3) + data(3, prefixed(bytes(9))[:7], ends=False))
    peer.connection.leave()
    peer.send(data(3, bytes(7)) + head(5) + LATE_FRAMES[what])
    await peer.settle()
    assert not peer.wire.is_closed
    peer.handler.calls[0].reply([b"m"], OK)
    assert peer.answers()[1][0] == prefixed(b"m")
    assert (peer.handler.gone, peer.server.closed) == ([], {})


@in_loop
async def test_a_second_farewell_names_no_later_call() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, prefixed(b"m")))
    peer.connection.leave()
    peer.send(head(3) + frame(PING, 0, 0, b"x"))
    last = [payload[:4] for kind, _, _, payload in peer.frames() if kind == GOAWAY]
    assert last == [b"\0\0\0\1", b"\0\0\0\1"]


@in_loop
async def test_no_more_calls_are_open_than_agreed() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.server.calls_max = 2
    for number in (1, 3, 5):
        peer.send(head(number) + data(number, prefixed(b"m")))
    assert peer.answers()[5][1]["grpc-status"] == "14"
    assert peer.server.refused == {"calls": 1}


@in_loop
async def test_calls_without_a_message_make_room_for_others() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.server.calls_max = 2
    peer.send(b"".join(head(number) for number in (1, 3, 5)))
    assert peer.answers()[1][1]["grpc-status"] == "14"
    assert list(peer.connection.calls) == [3, 5]
    peer.send(data(5, prefixed(b"m")) + head(7))
    assert list(peer.connection.calls) == [3, 5, 7]
    peer.send(frame(RST_STREAM, 0, 3, bytes(4)) + frame(RST_STREAM, 0, 7, bytes(4)))
    assert peer.server.arriving == 0
    assert peer.server.open_calls == 1


@in_loop
async def test_calls_without_a_message_make_room_by_the_connection_that_has_most() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.server.calls_max = 8
    other = Peer(server=peer.server)
    whole = prefixed(bytes(100_000))
    peer.send(head(1) + data(1, whole[:1000], ends=False))
    before = other.connection._credit
    for number in range(1, 81, 2):
        other.send(head(number))
    assert other.connection._credit == before - 33 * http2.COSTS["reset"]
    assert list(other.connection.calls) == list(range(67, 81, 2))
    assert list(peer.connection.calls) == [1]
    for number in range(81, 1000, 2):
        if not other.wire.is_closed:
            other.send(head(number))
    assert other.ended_with() == ENHANCE_YOUR_CALM
    assert (list(peer.connection.arriving), peer.server.arriving) == ([peer.connection.calls[1]], 1)
    peer.connection.calls[1].allowed = 2**20
    peer.send(data(1, whole[1000:]))
    assert (peer.handler.messages, peer.connection.arriving) == ([whole[5:]], {})


@in_loop
async def test_making_room_costs_the_same_however_many_are_waited_for() -> None:
    def calls_at(most: int) -> Counter[str]:
        peer = Peer()
        peer.server.calls_max = most
        others = [Peer(server=peer.server) for _ in range(most // 50)]
        for place in range(most):
            others[place % len(others)].send(head(2 * place + 1))
        found = calls_of(lambda: peer.send(head(1)))
        assert (peer.server.arriving, peer.server.refused["arriving"]) == (most, 1)
        return found

    assert calls_at(2000) == calls_at(100)


@in_loop
async def test_a_stranger_has_few_calls_until_the_first_has_come_whole() -> None:
    peer = Peer(Echo(is_slow=True))
    numbers = iter(range(1, 10_000, 2))
    peer.send(b"".join(head(next(numbers)) for _ in range(http2.STRANGER_CALLS_MAX)))
    await peer.settle()
    assert len(peer.connection.calls) == http2.STRANGER_CALLS_MAX
    peer.frames()
    peer.send(head(number := next(numbers)))
    assert peer.frames() == [(RST_STREAM, 0, number, struct.pack(">L", REFUSED_STREAM))]
    peer.send(data(1, prefixed(b"m")) + head(number := next(numbers)))
    assert number in peer.connection.calls


@in_loop
async def test_long_heads_of_strangers_wait_for_their_turn_and_are_bounded() -> None:
    """Decoding takes long: whoever comes with many connections has one of them heard in a turn, not all at once."""
    peer, long = Peer(), (("x", "v" * 2000),)
    peer.send(head(1, more=long))
    assert not peer.connection.calls
    assert peer.wire.is_reading_paused
    await peer.settle()
    assert list(peer.connection.calls) == [1]
    others = [Peer(server=peer.server) for _ in range(2)]
    sizes = http2.STRANGER_HEAD_BYTES_MAX - 500, http2.STRANGER_HEAD_BYTES_MAX
    for other, size in zip(others, sizes, strict=True):
        other.send(head(1, more=(("x", "v" * size),)))
        await other.settle()
    assert [other.wire.is_closed for other in others] == [False, True]
    assert others[1].ended_with() == ENHANCE_YOUR_CALM
    peer.send(data(1, prefixed(b"m")) + head(3, more=(("x", "v" * 12_000),)))
    assert list(peer.connection.calls) == [3], "it is no stranger any more"


@in_loop
async def test_an_answer_that_is_taken_byte_by_byte_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unsent takes room from the bodies of all."""
    now_s = 100.0
    monkeypatch.setattr("sloop.serve.edge.http2.time.monotonic", lambda: now_s)
    peer = Peer(Echo(is_slow=True))
    for number in (1, 3):
        peer.send(head(number) + data(number, prefixed(b"m")))
        peer.handler.calls[-1].reply([bytes(1_000_000)], OK)
    ends_s = now_s + http2.STALL_S_MAX + 2_000_010 / http2.SEND_RATE_BYTES
    for more_s, is_closed in ((-1, False), (1, True)):
        now_s = ends_s + more_s
        peer.connection._credit = http2.CREDIT_MAX
        peer.send(frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))
        peer.connection.attend(now_s)
        assert peer.wire.is_closed is is_closed
    peer.connection.connection_lost(None)
    assert peer.server.refused == {"stalled": 1}
    assert peer.bodies.held_bytes == 0


@in_loop
async def test_an_upload_that_makes_room_is_not_paid_for() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.server.calls_max = 2
    before = peer.connection._credit
    for number in (1, 3, 5):
        peer.send(head(number) + data(number, prefixed(bytes(100_000))[:10_000], ends=False))
    assert list(peer.connection.calls) == [3, 5]
    assert peer.connection._credit == before + http2.CREDIT_PER_ANSWER


@in_loop
async def test_a_connection_has_no_more_calls_than_agreed() -> None:
    peer = Peer(Echo(is_slow=True))
    peer.send(head(1) + data(1, prefixed(b"m")))
    for number in range(3, 2 * STREAMS_MAX, 2):
        peer.send(head(number))
    assert peer.server.open_calls == STREAMS_MAX
    peer.frames()
    peer.send(head(2 * STREAMS_MAX + 5))
    assert peer.frames() == [(RST_STREAM, 0, 2 * STREAMS_MAX + 5, struct.pack(">L", REFUSED_STREAM))]


@in_loop
async def test_the_beginning_of_a_large_message_can_be_refused() -> None:
    peer = Peer()
    peer.send(head(1) + data(1, prefixed(b"evil" + bytes(100_000))[:50_000], ends=False))
    assert peer.answers()[1][1]["grpc-status"] == "8"
    assert peer.bodies.held_bytes == 0


class Behind:
    """An intake that defers everything."""

    def __init__(self) -> None:
        self.deferred: list[Call] = []
        self.pieces: list[Callable[[], None]] = []

    def is_behind(self, now_ns: int) -> bool:
        return True

    def defer(self, call: Call, *, is_page: bool, is_patient: bool = False) -> None:
        self.deferred.append(call)

    def go_on_later(self, piece: Callable[[], None]) -> None:
        self.pieces.append(piece)


@in_loop
async def test_under_overload_what_has_waited_too_long_is_refused() -> None:
    peer, intake = Peer(), Behind()
    peer.server.intake = intake  # type: ignore[assignment]  # the part of it that is used
    for number in (1, 3, 5):
        peer.send(head(number) + data(number, prefixed(b"m")))
    first, second, third = intake.deferred
    assert (first.deferred_ns, first.patience_ns) == (first.began_ns, 10**12)
    peer.send(frame(RST_STREAM, 0, 5, bytes(4)))
    assert third.deferred_ns == 0
    first.refuse_deferred()
    second.start()
    assert {number: answer["grpc-status"] for number, (_, answer) in peer.answers().items()} == {1: "14", 3: "0"}
    assert (peer.server.open_calls, peer.bodies.held_bytes) == (0, 0)
    assert peer.bodies.refused == {"age": 1}


@in_loop
async def test_a_large_message_comes_no_faster_than_its_beginning_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEP_NS", 0)
    peer, intake, message = Peer(), Behind(), prefixed(b"long" + bytes(200_000))
    peer.server.intake = intake  # type: ignore[assignment]  # the part of it that is used
    peer.send(head(1))
    peer.frames()
    sent = 0
    for size in (20_000, 20_000, 20_000):
        peer.send(data(1, message[sent : sent + size], ends=False))
        sent += size
    assert peer.frames() == [], "the client must wait"
    while intake.pieces:
        assert not peer.frames()
        intake.pieces.pop(0)()
    ((kind, _, number, window),) = peer.frames()
    assert (kind, number) == (WINDOW_UPDATE, 1)
    assert int.from_bytes(window, "big") == len(message) - WINDOW, "all of the rest"


@in_loop
async def test_a_message_is_inflated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEP_NS", 0)
    peer, intake, message = Peer(), Behind(), random.Random(4).randbytes(300_000)
    peer.server.intake = intake  # type: ignore[assignment]  # the part of it that is used
    peer.send(head(1, more=(("grpc-encoding", "gzip"),)))
    peer.connection.calls[1].allowed = 2**20
    peer.send(data(1, prefixed(gzip.compress(message), is_compressed=True)))
    while peer.connection._waits_for_turn:  # on a slow machine, frames take several turns
        intake.pieces.pop(0)()
    intake.deferred.pop().start()
    held = []
    while intake.pieces and not peer.handler.messages:
        held.append(peer.bodies.held_bytes)
        intake.pieces.pop()()
    assert peer.handler.messages == [message]
    assert len(held) >= 5
    assert held == sorted(set(held))


@in_loop
async def test_refused_messages_are_paid_for_by_the_time_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Echo()

    def answer(call: Call, message: bytes | memoryview) -> None:
        raise Refusal(413, "too much")

    monkeypatch.setattr(handler, "answer", answer)
    monkeypatch.setattr(http2, "NS_PER_CREDIT", 1)
    peer = Peer(handler)
    for number in (1, 3, 5):
        peer.send(head(number) + data(number, prefixed(b"m")))
    assert peer.ended_with() == ENHANCE_YOUR_CALM


@in_loop
async def test_many_frames_at_once_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "TURN_NS", 0)
    peer = Peer()
    peer.send(b"".join(head(number) + data(number, prefixed(b"m")) for number in range(1, 201, 2)))
    assert 0 < len(peer.handler.messages) < 100
    assert peer.wire.is_reading_paused
    for _ in range(100):
        await asyncio.sleep(0)
    assert (len(peer.handler.messages), peer.wire.is_reading_paused) == (100, False)


@in_loop
async def test_a_long_head_ends_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "TURN_NS", -1)
    peer, long = Peer(), (("x", "v" * 2000),)
    peer.send(head(1) + data(1, prefixed(b"m")))
    peer.send(b"".join(head(number, more=long) for number in (3, 5, 7)))
    assert list(peer.connection.calls) == [3]
    await peer.settle()
    assert list(peer.connection.calls) == [3, 5, 7]


@in_loop
async def test_only_long_heads_are_paid_for() -> None:
    """Strangers pay more."""
    for is_stranger, expected in ((False, [0, 0, 2, 4]), (True, [0, 0, 22, 43])):
        peer, credits = Peer(Echo(is_slow=True)), []
        if not is_stranger:
            peer.send(head(1) + data(1, prefixed(b"m")))
        for number, size in ((3, 10), (5, 300), (7, 1000), (9, 2000)):
            before = peer.connection._credit
            peer.send(head(number, more=(("x", "v" * size),)))
            await peer.settle()
            credits.append(before - peer.connection._credit)
        assert credits == expected


@in_loop
async def test_an_exception_of_the_handler_is_an_error_of_the_call_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Peer()
    monkeypatch.setattr(peer.handler, "answer", lambda call, message: 1 / 0)
    peer.send(head(1) + data(1, prefixed(b"m")))
    assert peer.answers()[1][1]["grpc-status"] == "13"
    assert "ZeroDivisionError" in caplog.text
    assert not peer.wire.is_closed
