"""Heads that came before are not parsed again; nobody notices but by the time that it takes."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.app.limits import Limits, ServerLimits
from sloop.serve.edge import http
from sloop.serve.edge import intake as intakes
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.exchange import KNOWN_FIELDS_MAX, KNOWN_HEAD_BYTES_MAX, KNOWN_HEADS_MAX, Exchange
from sloop.serve.edge.http import LOOKED_UP, UNKNOWN_HEADS, HttpConnection, HttpServer
from sloop.serve.edge.refusal import Refusal
from tests.serve.edge.fakes import FakeDriver, Gateway, make_service, web_server

POST = b"POST /v2/models/demo/infer?a=%%20 HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b"
GET = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"


def post(body: bytes, *fields: bytes) -> bytes:
    """A whole request with a length."""
    return POST % (b"".join(field + b"\r\n" for field in fields), len(body), body)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False
        self.unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def shown(exchange: Exchange) -> None:
    """Answer with the request as the server has understood it."""
    found = (exchange.method, exchange.path, exchange.query_string, exchange.headers, bytes(exchange.body))
    exchange.reply(200, repr(found).encode())


async def connected(server: HttpServer) -> tuple[HttpConnection, Wire]:
    """A connection to a server that does not listen."""
    for intake in (server.intake, server.large):
        intake.start(asyncio.get_running_loop())
        intake.turn_ns = 10**15  # a slow machine takes the same way
    connection, wire = HttpConnection(server), Wire()
    connection.connection_made(wire)
    return connection, wire


async def sent(server: HttpServer, pieces: Iterable[bytes]) -> bytes:
    """All that is answered to these pieces of bytes on one connection, and whether it was closed."""
    connection, wire = await connected(server)
    for piece in pieces:
        if piece and not wire.is_closed:
            connection.data_received(piece)
        for _ in range(8):
            await asyncio.sleep(0)
    return wire.written + b"closed" * wire.is_closed


def echo() -> HttpServer:
    return HttpServer(shown, bodies=BodyMemory(100_000), limits=ServerLimits(requests=64))


def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What parsers receive from now on."""
    found: list[bytes] = []

    class Parser(http.HttpRequestParser):  # type: ignore[name-defined, misc]  # of an extension module
        def feed_data(self, data: bytes) -> None:
            found.append(bytes(data))
            super().feed_data(data)

    monkeypatch.setattr(http, "HttpRequestParser", Parser)
    return found


def test_a_head_that_came_before_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, server = parsed(monkeypatch), echo()
    first = asyncio.run(sent(server, [post(b"12345"), GET]))
    assert seen == [post(b"12345"), GET]
    assert asyncio.run(sent(server, [post(b"12345"), GET])) == first
    assert b"b'abcde'" in asyncio.run(sent(server, [post(b"abcde")]))
    assert len(seen) == 2
    asyncio.run(sent(server, [post(b"123456"), post(b"12345") + GET]))
    assert seen[2:] == [post(b"123456"), post(b"12345") + GET], "another length, and two at once"


MESSAGES = (
    GET,
    GET.replace(b"GET", b"HEAD"),
    post(b""),
    post(b"12345"),
    post(b"\r\n\r\n"),
    post(b"\n\n\r\n\r\n"),
    post(GET),
    post(b"x" * 3000),
    post(b"12345").replace(b"\r\n", b"\n"),
    post(b"\r\n\r\n").replace(b"\r\n\r\n", b"\n\n", 1),
    b"\r\n" + GET,
    b"\r\n\r\n" + post(b"12345"),
    post(b"12345", b"Content-Length: 5"),
    post(b"12345", b"Content-Length: 4"),
    post(b"12345").replace(b": 5", b": +5"),
    post(b"5\r\n12345\r\n0\r\n\r\n", b"Transfer-Encoding: chunked").replace(b"Content-Length: 15\r\n", b""),
    post(b"12345", b"Connection: close"),
    post(b"12345", b"Connection: keep-alive"),
    post(b"12345", b"Connection: keep-alive").replace(b"/1.1", b"/1.0"),
    post(b"12345", b"Expect: 100-continue"),
    post(b"12345", b"Upgrade: h2c", b"Connection: upgrade"),
    post(b"12345", b"Content-Encoding: gzip"),
    post(b"12345").replace(b"HTTP/1.1", b"HTTP/1.0"),
    post(b"12345", b"x: a\r\n b"),
    post(b"12345", b"x: a", b"X: b"),
    post(b"12345").replace(b"Host: x\r\n", b""),
)


@given(
    messages=st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=4),
    at_once=st.sets(st.integers(1, 3)),
    cuts=st.sets(st.integers(0, 400), max_size=2),
)
def test_what_is_known_changes_no_answer(messages: Sequence[bytes], at_once: set[int], cuts: set[int]) -> None:
    whole = b"".join(messages)
    ends = {len(b"".join(messages[:count])) for count in range(len(messages) + 1) if count not in at_once}
    pieces = [whole[start:end] for start, end in pairwise(sorted({0, len(whole), *ends, *cuts}))]
    forgetful, server = echo(), echo()
    forgetful.known_heads.learn = lambda data, exchange: None  # type: ignore[method-assign]

    async def both() -> tuple[bytes, bytes]:
        for message in MESSAGES:
            await sent(server, [message])
        return await sent(server, pieces), await sent(forgetful, pieces)

    known, unknown = asyncio.run(both())
    assert known == unknown
    assert len(server.known_heads) > 5
    assert not len(forgetful.known_heads)


@pytest.mark.parametrize(
    "request_",
    [
        *(message for message in MESSAGES if b"Encoding" in message or b"close" in message or b"Expect" in message),
        b"\r\n\r\n" + post(b"12345"),
        post(b"12345") + b"\r\n",
        GET + GET,
        post(b"", b"x-request-id: a"),
        post(b"", b"traceparent: 00-%b-%b-01" % (b"1" * 32, b"1" * 16)),
        post(b"", b"x-elapsed-ms: 3"),
        post(b"", b"upgrade: h2c"),
        post(b"", b"inference-header-content-length: x"),
        post(b"", *(b"x%d: a" % number for number in range(KNOWN_FIELDS_MAX))),
        post(b"", b"x: " + b"a" * KNOWN_HEAD_BYTES_MAX),
        GET.replace(b"GET", b"OPTIONS"),
        GET.replace(b"/1.1", b"/1.0"),
    ],
)
def test_heads_that_change_or_decide_more_or_do_not_stand_alone_are_not_kept(request_: bytes) -> None:
    server = echo()
    asyncio.run(sent(server, [request_]))
    assert not len(server.known_heads)


async def test_few_heads_are_kept() -> None:
    server = echo()
    for number in range(KNOWN_HEADS_MAX + 10):
        await sent(server, [post(b"", b"x: %d" % number)])
    assert len(server.known_heads) == 10


async def test_a_client_whose_heads_all_differ_does_not_pay_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, server = parsed(monkeypatch), echo()
    others = [post(b"", b"x: %d" % number) for number in range(UNKNOWN_HEADS)]
    same = post(b"12345")
    await sent(server, [same])
    await sent(server, [*others[:LOOKED_UP], same, *others[LOOKED_UP + 1 :], same, same])
    assert seen == [same, *others[:LOOKED_UP], same, *others[LOOKED_UP + 1 :]], "at last it is looked up again"
    assert len(server.known_heads) == 1 + LOOKED_UP


def test_keys_are_checked_and_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(FakeDriver())
    service = make_service(gateway, api_key="secret")
    server = web_server(service)
    right, wrong = post(b"{}", b"x-api-key: secret"), post(b"{}", b"x-api-key: secreT")
    asyncio.run(sent(server, [right, wrong, right, wrong, right]))
    assert (service.keys.accepted[""], service.keys.refused["wrong"]) == (3, 2)
    assert len(server.known_heads) == 1, "only the accepted one"
    monkeypatch.setattr(service.keys, "_known", {})
    assert b" 401 " in asyncio.run(sent(server, [right])), "the key does not hold any more"


async def test_room_is_taken_and_given_back_each_time() -> None:
    gateway = Gateway(FakeDriver(respond=lambda _: None))  # requests stay open
    service = make_service(gateway, bodies=BodyMemory(1000), limits=Limits(requests=2))
    server = web_server(service)
    body = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
                {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [2]},
            ]
        }
    ).encode()
    open_ones = [await connected(server) for _ in range(2)]
    for connection, _ in open_ones:
        connection.data_received(post(body))
    assert service.bodies.held_bytes == 2 * len(body)
    assert b"its limit is 2" in await sent(server, [post(body)])
    for connection, _ in open_ones:
        connection.connection_lost(None)
    assert service.bodies.held_bytes == 0
    service.bodies.all_bytes_max = 1
    assert b"bytes of requests; the limit is 1" in await sent(server, [post(body)])
    assert len(server.known_heads) == 1


def test_what_waits_under_overload_need_not_be_parsed_either(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, server = parsed(monkeypatch), echo()

    async def main() -> bytes:
        await sent(server, [post(b"12345")])
        connection, wire = await connected(server)
        monkeypatch.setattr(server.intake, "is_behind", lambda _: True)
        connection.data_received(post(b"12345"))
        assert connection.deferred_ns
        connection.start()
        return wire.written

    assert b"b'12345'" in asyncio.run(main())
    assert len(seen) == 1


def test_an_answer_is_awaited_though_something_else_has_left() -> None:
    """With TLS, what follows the handshake (session tickets) may leave while the first request is being answered."""
    waiting: list[Exchange] = []
    server = HttpServer(waiting.append, bodies=BodyMemory(1000), limits=ServerLimits(requests=8))

    async def main() -> list[bool]:
        connection, wire = await connected(server)
        closed: list[bool] = []
        for unsent in (200, 0):
            wire.unsent = unsent
            connection.pause_writing()
            connection.data_received(post(b"12345", b"connection: close"))
            connection.resume_writing()
            closed.append(wire.is_closed)
            assert (server.open_requests, server.sending, server.unsent_bytes) == (1, {}, 0)
            wire.unsent = unsent
            connection.pause_writing()
            connection.resume_writing()
            waiting.pop().reply(200, b"{}")
            assert wire.written.endswith(b"{}")
            closed.append(wire.is_closed)
            connection, wire = await connected(server)
        return closed

    assert asyncio.run(main()) == [False, True] * 2
    assert server.open_requests == 0


def test_a_request_that_waits_for_room_begins_when_an_answer_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "BLOCKED_S", 60.0)
    waiting: list[Exchange] = []
    server = HttpServer(waiting.append, bodies=BodyMemory(1000), limits=ServerLimits(requests=1))

    async def main() -> None:
        server.intake.start(asyncio.get_running_loop())
        (first, _), (second, _) = await connected(server), await connected(server)
        first.data_received(post(b"12345"))
        second.data_received(post(b"12345"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(waiting) == 1
        waiting.pop().reply(200, b"{}")
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(waiting) == 1, "at once, and not when a timer fires"

    asyncio.run(main())


def test_a_refusal_of_a_known_head_leaves_the_connection_open() -> None:
    allowed = [True]

    def authorise(_: Exchange) -> bool:
        if not allowed[0]:
            raise Refusal(401, "no", "ask")
        return True

    server = HttpServer(shown, bodies=BodyMemory(1000), limits=ServerLimits(requests=8), authorise=authorise)

    async def main() -> bytes:
        await sent(server, [post(b"12345")])
        connection, wire = await connected(server)
        allowed[0] = False
        connection.data_received(post(b"12345"))
        allowed[0] = True
        connection.data_received(post(b"12345"))
        assert not wire.is_closed
        return wire.written

    found = asyncio.run(main())
    assert found.index(b" 401 ") < found.index(b" 200 ")
    assert server.bodies.held_bytes == 0
