"""The HTTP client of the load generator: parsing of responses, keep-alive, limits."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.load import connections
from sloop.load.connections import BrokenResponse, Connections, Outgoing, RequestHead, Response, ResponseReader, Server
from sloop.load.results import Ending
from sloop.units import NS_PER_S

pytestmark = pytest.mark.live


class Ends:
    """Collects reports."""

    def __init__(self, wanted: int) -> None:
        self.endings: dict[int, Ending] = {}
        self.answers: dict[int, Response | None] = {}
        self._wanted = wanted
        self._done = asyncio.Event()

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Response | None) -> None:
        assert outgoing.number not in self.endings, "reported twice"
        self.endings[outgoing.number] = ending
        self.answers[outgoing.number] = answer
        if len(self.endings) == self._wanted:
            self._done.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self._done.wait(), 10)


def outgoing(number: int) -> Outgoing:
    body = b"{}"
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
    return Outgoing(number, head, body, time.monotonic_ns())


def sent(port: int, count: int, then: Callable[[Connections], Awaitable[None]] | None = None, **options: int) -> Ends:
    """Send `count` requests at once; `then` runs before waiting for them all to end."""

    async def run() -> Ends:
        ends = Ends(count)
        settings = {"connections_max": 100, "timeout_ns": 10 * NS_PER_S, **options}
        made = Connections(Server("127.0.0.1", port), ends.report, **settings)
        for number in range(count):
            made.send(outgoing(number))
        if then is not None:
            await then(made)
        await ends.wait()
        made.close()
        return ends

    return asyncio.run(run())


def test_grows_with_what_is_in_flight(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=0.05)
    ends = sent(stub.port, 90)
    assert set(ends.endings.values()) == {Ending.ANSWERED}
    assert len(ends.endings) == 90
    assert 1 < stub.connections <= 90


def test_beyond_its_bound_a_request_overflows_at_once(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=0.05)
    ends = sent(stub.port, 10, connections_max=3)
    assert Counter(ends.endings.values()) == {Ending.ANSWERED: 3, Ending.OVERFLOW: 7}


async def test_connections_are_used_again(stub: Any) -> None:
    ends = Ends(20)
    made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=5, timeout_ns=NS_PER_S)
    await made.warm(2)
    for number in range(20):
        made.send(outgoing(number))
        await asyncio.sleep(0.01)
    await ends.wait()
    assert set(ends.endings.values()) == {Ending.ANSWERED}
    assert made.opened == 2
    made.close()


def test_connections_idle_for_long_are_not_trusted(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_NS_MAX", -1)

    async def again(made: Connections) -> None:
        await asyncio.sleep(0.05)
        made.send(outgoing(1))

    async def run() -> int:
        ends = Ends(2)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=5, timeout_ns=NS_PER_S)
        made.send(outgoing(0))
        await again(made)
        await ends.wait()
        made.close()
        return made.opened

    assert asyncio.run(run()) == 2


def test_connections_of_a_passing_burst_are_closed_again(stub: Any) -> None:
    """Else a server that takes 1,024 connections at a time would never look at those that came after."""

    async def run() -> int:
        ends = Ends(20)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=50, timeout_ns=NS_PER_S)
        await made.warm(2)
        for number in range(20):
            made.send(outgoing(number))
        await ends.wait()
        made.expire(time.monotonic_ns() + 2 * connections.SPARE_NS_MAX)
        left = len(made._open)
        made.close()
        return left

    stub.script = lambda number: stub.Step(delay_s=0.05)
    assert asyncio.run(run()) == 2
    assert stub.connections > 2


def test_closed_while_connecting_leaves_nothing_open(stub: Any) -> None:
    """At whatever moment: a connection may be made in the very turn in which all is closed."""

    async def closed_after(turns: int) -> int:
        ends = Ends(8)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=50, timeout_ns=NS_PER_S)
        for number in range(8):
            made.send(outgoing(number))
        for _ in range(turns):
            await asyncio.sleep(0)
            time.sleep(0.001)  # noqa: ASYNC251  # what the system has to do is done by the next turn
        made.close()
        await asyncio.sleep(0.01)
        assert len(ends.endings) == 8
        return len(made._open)

    for turns in range(12):
        assert asyncio.run(closed_after(turns)) == 0, turns


@pytest.mark.parametrize(
    ("content", "closes", "ending"),
    [
        (b"", True, Ending.DISCONNECTED),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", True, Ending.DISCONNECTED),
        (b"nonsense\r\n\r\n", False, Ending.BROKEN),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", False, Ending.BROKEN),
        (b'HTTP/1.1 200 OK\r\n\r\n{"outputs": []}', True, Ending.ANSWERED),
        (b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 13\r\n\r\n{"outputs":1}', True, Ending.ANSWERED),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", False, Ending.ANSWERED),
    ],
)
def test_what_servers_do_wrong(stub: Any, content: bytes, closes: bool, ending: Ending) -> None:
    stub.script = lambda number: stub.Step(content, closes=closes)
    assert set(sent(stub.port, 5).endings.values()) == {ending}


def test_a_silent_server_times_out(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=60) if number % 2 else stub.Step()

    async def expire(made: Connections) -> None:
        await asyncio.sleep(0.2)
        made.expire(time.monotonic_ns())
        await asyncio.sleep(0.2)
        made.expire(time.monotonic_ns() + NS_PER_S)

    ends = sent(stub.port, 6, expire, timeout_ns=NS_PER_S)
    assert Counter(ends.endings.values()) == {Ending.ANSWERED: 3, Ending.TIMEOUT: 3}


def test_nobody_there() -> None:
    assert set(sent(1, 5).endings.values()) == {Ending.UNREACHABLE}


def test_closing_ends_everything(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=60)

    async def close(made: Connections) -> None:
        await asyncio.sleep(0.1)
        made.close()

    assert set(sent(stub.port, 4, close).endings.values()) == {Ending.TIMEOUT}


BODIES = st.binary(max_size=40)


def read(pieces: Sequence[bytes]) -> Response | None:
    reader = ResponseReader()
    for piece in pieces[:-1]:
        assert reader.feed(piece) is None, "an answer before its end"
    return reader.feed(pieces[-1])


def cut(content: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(content), *(place % len(content) for place in places)})
    return [content[first:after] for first, after in itertools.pairwise(edges)]


@settings(max_examples=200)
@given(BODIES, st.integers(200, 599).filter(lambda status: status != 304), st.lists(st.integers(0, 500), max_size=6))
def test_an_answer_is_the_same_however_it_is_cut(body: bytes, status: int, places: list[int]) -> None:
    if status == 204:
        body = b""
    head = b"HTTP/1.1 %d Some Reason\r\nContent-LENGTH:  %d \r\nX-Slo-Met: False\r\n\r\n" % (status, len(body))
    assert read(cut(head + body, places)) == Response(status, body, False, False)


@settings(max_examples=200)
@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=5), st.booleans(), st.lists(st.integers(0, 500), max_size=6)
)
def test_chunks_are_joined(chunks: list[bytes], has_trailer: bool, places: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    framed = b"".join(b"%x;name=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    content = head + framed + (b"0\r\nx-check: 1\r\n\r\n" if has_trailer else b"0\r\n\r\n")
    assert read(cut(content, places)) == Response(200, b"".join(chunks), True, None)


def test_answers_follow_one_another() -> None:
    reader = ResponseReader()
    for body in (b"one", b"", b"three"):
        answer = reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert answer is not None
        assert answer.body == body


def test_provisional_answers_are_passed_over() -> None:
    provisional = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"
    content = provisional + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"
    for place in range(1, len(content)):
        assert read([content[:place], content[place:]]) == Response(200, b"x", False, None)


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\nx-slo-met: true\r\n\r\nhalf") is None
    assert reader.feed(b" and half") is None
    assert reader.close() == Response(200, b"half and half", True, True)
    assert ResponseReader().close() is None


@pytest.mark.parametrize(
    ("head", "is_last"),
    [
        (b"HTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: TE, Close\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", True),
        (b"HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\n", False),
    ],
)
def test_which_connections_go_on(head: bytes, is_last: bool) -> None:
    answer = ResponseReader().feed(head + b"content-length: 0\r\n\r\n")
    assert answer is not None
    assert answer.is_last == is_last


def test_a_cut_off_answer_is_none() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
    assert reader.close() is None


@pytest.mark.parametrize(
    "content",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"HTTP/1.1 " + b"x" * 70_000,
    ],
)
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    with pytest.raises(BrokenResponse):
        ResponseReader().feed(content)


def test_bodies_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_BYTES_MAX", 10)
    reader = ResponseReader()
    with pytest.raises(BrokenResponse, match="the body exceeds 10 bytes"):
        reader.feed(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 11)


@settings(max_examples=500)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n",
                b"\r\n",
                b"\r\n\r\n",
                b"a",
                b"0\r\n",
                b"content-length: 3\r\n",
                b"transfer-encoding: chunked\r\n",
                b"HTTP/1.1 100 Go\r\n\r\n",
            ]
        ),
        max_size=12,
    )
)
def test_only_broken_answers_escape(pieces: list[bytes]) -> None:
    reader = ResponseReader()
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.close()
    except BrokenResponse:
        pass


def test_heads_say_what_follows() -> None:
    head = RequestHead(path="/v2/models/m/infer", host="h:1", slo_ms=200.0, content_bytes=30, json_bytes=20)
    assert head.render(0).decode() == (
        "POST /v2/models/m/infer HTTP/1.1\r\nhost: h:1\r\nuser-agent: sloop-load\r\n"
        "content-type: application/octet-stream\r\ncontent-length: 30\r\ninference-header-content-length: 20\r\n"
        "x-slo-ms: 200\r\n\r\n"
    )
    assert head.render(1_234_567).endswith(b"\r\nx-slo-ms: 200\r\nx-elapsed-ms: 1.235\r\n\r\n")
    plain = RequestHead(path="/", host="h", slo_ms=0.5, content_bytes=2, json_bytes=2).render(0)
    assert b"content-type: application/json\r\n" in plain
    assert b"inference-header" not in plain
