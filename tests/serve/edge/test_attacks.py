"""What clients without a key, with bad intentions or with bad connections can cost: room, connections, memory, time."""

import asyncio
import errno
import gc
import gzip
import resource
import socket
import ssl
import struct
import subprocess
import threading
import time
import tracemalloc
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sloop.app.limits import ServerLimits
from sloop.errors import InputError
from sloop.serve.edge import handshakes, tcp
from sloop.serve.edge import http as module
from sloop.serve.edge import listener as listening
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.http import HttpServer
from sloop.serve.edge.intake import TOO_OLD, Intake
from sloop.serve.edge.listener import (
    Listener,
    ServerConnection,
    Strangers,
    Tls,
    default_connections,
    listen,
    network_of,
    raise_descriptor_limit,
)
from sloop.serve.edge.refusal import Refusal
from tests.serve.edge.fakes import FakeDriver, Gateway, LoopThread, make_service, web_server
from tests.serve.edge.raw import converse, one_answer
from tests.serve.edge.test_framing import BODY, HEAD, LIVE, post

pytestmark = pytest.mark.live

KEY = b"x-api-key: secret"
AUTHORISED = post(BODY, KEY)
QUICK = ServerLimits(head_s=0.2, pause_s=0.2, body_s=0.6, idle_s=0.2, send_s=0.2)


class Edge:
    """A server with a key and a bound of 4 MiB for bodies, in the loop of a thread."""

    def __init__(self, thread: LoopThread, limits: ServerLimits, bodies: BodyMemory, tls: Tls | None) -> None:
        self.gateway = Gateway(FakeDriver())
        self.bodies = bodies
        self.service = service = make_service(self.gateway, bodies=bodies, api_key="secret")
        self.server = web_server(service, limits=limits, tls=tls)
        self.thread = thread
        self.gateway.port = thread.serve(self.server)

    def connect(self) -> socket.socket:
        return socket.create_connection((self.gateway.host, self.gateway.port), timeout=10)

    def look(self, what: Callable[[], Any]) -> Any:
        return self.thread.look(what)

    def until(self, holds: Callable[[], bool]) -> None:
        self.thread.until(holds)

    def serves(self) -> bool:
        """Whether an authorised request is answered. On a machine that is busy otherwise, some may wait too long."""
        for _ in range(100):
            answers = converse(self.gateway, AUTHORISED)
            if [answer.status for answer in answers] != [503] or TOO_OLD.encode() not in answers[0].body:
                break
        return [answer.status for answer in answers] == [200]


class Nowhere:
    """A connection of which nobody reads the answers."""

    address = "nowhere"

    def __init__(self) -> None:
        self.statuses: list[int] = []

    def answer(self, _exchange: Exchange, status: int, *_: object) -> None:
        self.statuses.append(status)


async def turns_of(work: Coroutine[Any, Any, None]) -> int:
    """The turns of the event loop that some work takes."""
    task, turns = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    task.result()
    return turns


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def edges(thread: LoopThread) -> Iterator[Callable[..., Edge]]:
    made: list[Edge] = []

    def make(
        limits: ServerLimits = ServerLimits(),
        bodies: BodyMemory | None = None,
        tls: Tls | None = None,
    ) -> Edge:
        made.append(Edge(thread, limits, bodies or BodyMemory(2**22, 2**22), tls))
        return made[-1]

    yield make
    for each in made:
        thread.call(each.server.close(0.2))


@contextmanager
def many(edge: Edge, count: int, sent: bytes) -> Iterator[list[socket.socket]]:
    """So many connections that have sent this."""
    with ExitStack() as stack:
        wires = [stack.enter_context(closing(edge.connect())) for _ in range(count)]
        for wire in wires:
            with suppress(ConnectionError):
                wire.sendall(sent)
        yield wires


# Room


def test_announced_bodies_without_a_key_take_no_room_and_disturb_nobody(edges: Callable[..., Edge]) -> None:
    edge = edges()
    with many(edge, 1030, HEAD + b"content-length: 1048576\r\n\r\n"):
        assert all(edge.serves() for _ in range(20))
        assert edge.look(lambda: edge.bodies.held_bytes) == 0
    assert not edge.bodies.refused.keys() - {"age"}


def test_many_requests_without_a_key_are_refused_later_and_delay_nobody_else(
    edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNAUTHORISED_RPS", 3)
    edge = edges()
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(edge.server, "refuse_later", later.append)
    whole, announced = post(BODY, b"x-api-key: wrong"), HEAD + b"content-length: 1048576\r\n\r\n"
    with many(edge, 3, whole) as first:
        assert [one_answer(wire.makefile("rb")).status for wire in first] == [401] * 3
        with many(edge, 2, whole) as some, many(edge, 2, announced) as others:
            edge.until(lambda: len(later) == 4)
            assert edge.serves()
            some.pop().close()  # its client does not wait
            for refuse in later:
                edge.look(refuse)
            for wire in (*some, *others):
                assert one_answer(wire.makefile("rb")).status == 401
            some[0].sendall(AUTHORISED)
            assert one_answer(some[0].makefile("rb")).status == 200, "it is read again"
    assert edge.look(lambda: edge.server.open_requests) == 0


def test_a_probe_without_a_key_counts_as_no_refused_one(edges: Callable[..., Edge]) -> None:
    edge = edges()
    probe = LIVE.replace(b"/live", b"/ready")
    assert [answer.status for answer in converse(edge.gateway, probe * 3)] == [200] * 3
    assert not edge.service.keys.refused
    assert not edge.service.keys.accepted


def test_few_refusals_are_delayed_at_a_time(edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNAUTHORISED_RPS", 0)
    monkeypatch.setattr(module, "UNAUTHORISED_S", 60.0)
    edge = edges(ServerLimits(requests=8))
    with many(edge, 3, post(BODY, b"x-api-key: wrong")) as wires:
        edge.until(lambda: edge.server.delayed == 2)
        assert one_answer(wires[-1].makefile("rb")).status == 401
        assert edge.serves()


def test_while_a_refusal_is_delayed_the_time_to_send_does_not_end(
    edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the request would be answered twice, and count as open for ever."""
    monkeypatch.setattr(module, "UNAUTHORISED_RPS", 0)
    edge = edges(ServerLimits(head_s=0.2))
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(edge.server, "refuse_later", later.append)
    with many(edge, 1, HEAD) as (wire,):
        edge.until(lambda: len(edge.server.heads_due) == 1)
        wire.sendall(b"content-length: 1048576\r\n\r\n")
        edge.until(lambda: len(later) == 1)
        edge.look(lambda: time.sleep(0.3))
        edge.until(lambda now_s=edge.server.now_s: edge.server.now_s > now_s)  # type: ignore[misc]
        assert not edge.server.expired
        edge.look(later.pop())
        received = wire.makefile("rb")
        assert one_answer(received).status == 401
        assert received.read() == b""
    edge.until(lambda: not edge.server.listener.connections)
    assert edge.look(lambda: edge.server.open_requests) == 0


def test_what_follows_a_delayed_refusal_is_not_kept(
    edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would use up the memory for what clients with a key have sent."""
    monkeypatch.setattr(module, "UNAUTHORISED_RPS", 0)
    edge = edges()
    later: list[Callable[[], None]] = []
    monkeypatch.setattr(edge.server, "refuse_later", later.append)
    with many(edge, 1, post(BODY, b"x-api-key: wrong") + b"GET / HTTP/1.1\r\nx: " + b"x" * 50_000) as (wire,):
        edge.until(lambda: len(later) == 1)
        assert edge.look(lambda: edge.server.unread_bytes) == 0
        edge.look(later.pop())
        wire.shutdown(socket.SHUT_WR)
        received = wire.makefile("rb")
        assert one_answer(received).status == 401
        assert received.read() == b""


def test_delayed_refusals_leave_connections_for_others(
    edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNAUTHORISED_RPS", 0)
    monkeypatch.setattr(module, "UNAUTHORISED_S", 60.0)
    edge = edges(ServerLimits(connections=8, connections_each=8, requests=4096))
    with many(edge, 20, post(BODY, b"x-api-key: wrong")):
        assert edge.serves()
        assert edge.look(lambda: edge.server.delayed) == 2


def test_announced_bodies_with_a_key_take_room_only_as_they_arrive(edges: Callable[..., Edge]) -> None:
    edge = edges()
    with many(edge, 200, HEAD + KEY + b"\r\nx-slo-ms: 60000\r\ncontent-length: 1048576\r\n\r\n" + b"{" * 100):
        edge.until(lambda: edge.bodies.held_bytes == 200 * 100)
        assert edge.serves()
    edge.until(lambda: edge.bodies.held_bytes == 0)


@pytest.mark.parametrize("length", [10, 1000, 100_000, 1_000_000])
def test_a_wrong_key_is_refused_on_the_head(edges: Callable[..., Edge], length: int) -> None:
    """A small body is awaited, so that the connection may stay; a large one is not."""
    edge = edges()
    with closing(edge.connect()) as wire:
        wire.sendall(HEAD + b"x-api-key: wrong\r\ncontent-length: %d\r\n\r\n" % length)
        if length <= module.UNREAD_BYTES_MAX:
            wire.sendall(b"{" * length)
        answer = one_answer(wire.makefile("rb"))
    assert answer.status == 401
    assert answer.headers["connection"] == ("close" if length > module.UNREAD_BYTES_MAX else "keep-alive")
    assert edge.look(lambda: edge.bodies.held_bytes) == 0


def test_all_bodies_together_are_bounded_and_free_their_room(edges: Callable[..., Edge]) -> None:
    edge = edges()
    fields = (KEY, b"x-slo-ms: 60000", b"inference-header-content-length: 2", b"content-length: 2097153")
    part = HEAD + b"\r\n".join(fields) + b"\r\n\r\n" + b"{" * 2**20
    with many(edge, 4, part):
        edge.until(lambda: edge.bodies.held_bytes == 2**22)
        assert [answer.status for answer in converse(edge.gateway, AUTHORISED)] == [503]
    edge.until(lambda: edge.bodies.held_bytes == 0)
    assert edge.serves()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_json_has_a_bound_of_its_own(edges: Callable[..., Edge], is_chunked: bool) -> None:
    edge = edges(bodies=BodyMemory(2**22, 2**22, json_bytes_max=1000))
    body = b"[" + b" " * 2000 + b"]"
    sent = HEAD + KEY + b"\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    (answer,) = converse(edge.gateway, sent if is_chunked else post(body, KEY))
    assert answer.status == 413
    assert "the limit is 1000" in answer.error
    assert "limits: {json_body_bytes: …}" in answer.error
    (binary,) = converse(edge.gateway, post(body, KEY, b"inference-header-content-length: 10"))
    assert binary.status == 400, "read, and found to be no request"
    (long,) = converse(edge.gateway, post(body, KEY, b"inference-header-content-length: 1001"))
    assert long.status == 413


@pytest.mark.parametrize("ratio", [1, 1000])
def test_a_bomb_is_inflated_only_up_to_the_bound(edges: Callable[..., Edge], ratio: int) -> None:
    edge = edges(bodies=BodyMemory(2**22, 2**22, json_bytes_max=2**20))
    bomb = gzip.compress(b"0" * 2**26) if ratio == 1000 else gzip.compress(gzip.compress(b"0" * 2**26) * 40)
    (answer,) = converse(edge.gateway, post(bomb, KEY, b"content-encoding: gzip"))
    assert answer.status == 413
    assert int(answer.error.split("at least ")[1].split()[0]) <= 2**20 + 2**18
    assert edge.look(lambda: edge.bodies.held_bytes) == 0


def test_a_compressed_body_in_parts_of_a_byte_costs_what_it_costs_in_one() -> None:
    """It takes the room that is counted, and is inflated in as many turns."""
    plain = b"".join(b"%d" % place for place in range(40_000))
    pressed = gzip.compress(plain, mtime=0)
    turns = []
    for size in (1, len(pressed)):
        bodies = BodyMemory(2**22, 2**22)
        exchange = Exchange(Nowhere(), "POST", {}, 0, limit_bytes=2**22)
        parts = [pressed[at : at + size] for at in range(0, len(pressed), size)]
        tracemalloc.start()
        for part in parts:
            exchange.receive(part, bodies)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held_bytes <= 1.25 * bodies.held_bytes + 2**16
        turns.append(asyncio.run(turns_of(exchange.inflate(zlib.decompressobj(31), bodies))))
        assert exchange.body == plain
        exchange.drop()
        assert bodies.held_bytes == 0
    assert 2 < turns[0] <= turns[1] + 1


def test_a_refused_body_is_read_for_a_while_so_that_the_client_sees_the_answer(edges: Callable[..., Edge]) -> None:
    edge = edges()
    (answer,) = converse(edge.gateway, post(b" " * (5 * 2**20), KEY, b"inference-header-content-length: 2"))
    assert answer.status == 413
    with closing(edge.connect()) as wire:  # but not for ever: without a key, a MiB at most
        wire.sendall(HEAD + b"content-length: 100000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            wire.sendall(b" " * 2**27)


# Time


@pytest.mark.parametrize(
    ("sent", "status", "part"),
    [
        (b"", 0, ""),
        (LIVE, 200, ""),
        (b"GET /v2 HT", 408, "head"),
        (HEAD + KEY + b"\r\n", 408, "head"),
        (HEAD + KEY + b"\r\ncontent-length: 10\r\n\r\n{", 408, "body"),
        (HEAD + KEY + b"\r\ntransfer-encoding: chunked\r\n\r\n3\r\n{", 408, "body"),
    ],
)
def test_who_does_not_go_on_is_answered_and_closed(
    edges: Callable[..., Edge], sent: bytes, status: int, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.1)
    edge = edges(QUICK)
    with closing(edge.connect()) as wire:
        wire.sendall(sent)
        received = wire.makefile("rb")
        if status:
            assert one_answer(received).status == status
        assert received.read() == b""
    edge.until(lambda: not edge.server.listener.connections)
    assert edge.look(lambda: edge.bodies.held_bytes) == 0
    assert dict(edge.server.expired) == ({part: 1} if part else {})


def test_a_trickle_has_an_end(edges: Callable[..., Edge]) -> None:
    """A byte now and then extends neither the time for a head nor that for a body for ever."""
    edge = edges(QUICK)
    for start in (b"GET /v2 HTTP/1.1\r\nx: ", HEAD + KEY + b"\r\ncontent-length: 100000\r\n\r\n"):
        with closing(edge.connect()) as wire, suppress(ConnectionError):
            wire.sendall(start)
            wire.settimeout(0.05)
            answer = b""
            while not answer:
                wire.sendall(b"a")
                with suppress(TimeoutError):
                    answer = wire.recv(1000)
            assert b" 408 " in answer
    assert dict(edge.server.expired) == {"head": 1, "body": 1}


def large_answers(thread: LoopThread, size: int, limits: ServerLimits) -> tuple[HttpServer, Gateway, list[int]]:
    """A server whose every answer has so many bytes, and the ages at which answers had left."""
    gateway, sent = Gateway(FakeDriver()), []
    body = memoryview(bytes(size))

    def answer(exchange: Exchange) -> None:
        exchange.on_sent = lambda: sent.append(exchange.age_ns)
        exchange.reply(200, (b"{}", body), content_type="application/octet-stream")

    server = HttpServer(answer, bodies=BodyMemory(1000), limits=replace(limits, requests=100))
    gateway.port = thread.serve(server)
    return server, gateway, sent


def test_a_reader_that_stalls_is_closed(thread: LoopThread) -> None:
    server, gateway, sent = large_answers(thread, 2**24, QUICK)
    with closing(socket.create_connection(("127.0.0.1", gateway.port), timeout=10)) as wire:
        wire.sendall(LIVE)
        thread.until(lambda: len(sent) == 1, within_s=20)
    assert dict(server.expired) == {"answer": 1}
    assert server.unsent_bytes == 0
    thread.call(server.close(0.2))


def test_a_slow_reader_gets_the_whole_answer(thread: LoopThread) -> None:
    server, gateway, sent = large_answers(thread, 2**23, ServerLimits(send_s=0.5))
    with closing(socket.socket()) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        wire.settimeout(10)
        wire.connect(("127.0.0.1", gateway.port))
        wire.sendall(LIVE * 3)
        received = wire.makefile("rb")
        for _ in range(3):
            answer = one_answer(received)
            assert len(answer.body) == 2**23 + 2
            time.sleep(0.05)
    assert len(sent) == 3
    assert server.unsent_bytes == 0
    thread.call(server.close(0.2))


def test_answers_that_nobody_takes_are_bounded(thread: LoopThread) -> None:
    server, gateway, _ = large_answers(thread, 2**23, ServerLimits(answers_bytes=2**25))
    with ExitStack() as stack:
        for _ in range(12):
            wire = stack.enter_context(closing(socket.create_connection(("127.0.0.1", gateway.port), timeout=10)))
            wire.sendall(LIVE)
        thread.until(lambda: server.expired["answer"] >= 5, within_s=20)
        assert thread.look(lambda: server.unsent_bytes) <= 2**25
        assert len(server.sending) >= 2, "no more are closed than have to be"
        assert len(converse(gateway, LIVE)[0].body) == 2**23 + 2, "who takes its answer gets it"
    thread.call(server.close(0.2))
    tight, gateway, _ = large_answers(thread, 2**23, ServerLimits(answers_bytes=2**20))
    (answer,) = converse(gateway, LIVE)
    assert answer.status == 500
    assert "the limit is 1048576" in answer.error
    thread.call(tight.close(0.2))


@pytest.mark.parametrize("how", ["reset", "close", "vanish"])
def test_who_leaves_is_forgotten(edges: Callable[..., Edge], how: str) -> None:
    """In a head, in a body, while the model works, and in mid-answer."""
    edge = edges(QUICK)
    driver = edge.gateway.driver
    driver.respond = lambda _: None  # it works for ever
    for sent in (b"GET /v2", HEAD + KEY + b"\r\ncontent-length: 99\r\n\r\n{", AUTHORISED, AUTHORISED * 3 + b"GET"):
        wire = edge.connect()
        wire.sendall(sent)
        if sent.startswith(AUTHORISED):
            edge.thread.call(asyncio.wait_for(driver.heard.wait(), 5))
        if how == "reset":
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if how == "vanish":
            wire.shutdown(socket.SHUT_WR)
        else:
            wire.close()
        edge.until(lambda: not edge.server.listener.connections)
        wire.close()
        driver.heard.clear()
    assert len(driver.cancelled) == 2
    assert edge.look(lambda: (edge.bodies.held_bytes, edge.server.open_requests, edge.server.unread_bytes)) == (0, 0, 0)


# Connections


def test_idle_connections_make_room_for_new_ones(edges: Callable[..., Edge]) -> None:
    edge = edges(ServerLimits(connections=20, connections_each=20))
    driver = edge.gateway.driver
    driver.respond = lambda _: None
    with many(edge, 1, AUTHORISED) as (busy,):
        edge.thread.call(asyncio.wait_for(driver.heard.wait(), 5))
        with many(edge, 60, b"") as wires:
            driver.respond = None
            assert edge.serves()
            edge.until(lambda: len(edge.server.listener.connections) <= 20)
            assert wires[0].recv(10) == b"", "the one that has been idle longest"
            busy.settimeout(0.1)
            with pytest.raises(TimeoutError):
                busy.recv(1)
    assert edge.server.listener.made_room >= 40


def test_half_sent_requests_make_room_too(edges: Callable[..., Edge]) -> None:
    edge = edges(ServerLimits(connections=20))
    with many(edge, 60, HEAD + KEY + b"\r\ncontent-length: 100000\r\n\r\n{"):
        assert edge.serves()
    assert edge.server.listener.made_room >= 40


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"POST /v2/mo", id="slow heads"),
        pytest.param(b"", id="silence"),
        pytest.param(LIVE, id="what needs no key"),
        pytest.param(post(BODY, b"x-api-key: wrong"), id="wrong keys"),
        pytest.param(HEAD + b"content-length: 1048576\r\n\r\n", id="announced bodies"),
    ],
)
def test_strangers_make_room_before_idle_customers(edges: Callable[..., Edge], sent: bytes) -> None:
    """However late they have come, and however far their requests are."""
    edge = edges(ServerLimits(connections=20, connections_each=20))
    with many(edge, 5, AUTHORISED) as customers:
        received = [wire.makefile("rb") for wire in customers]
        assert [one_answer(each).status for each in received] == [200] * 5
        with many(edge, 60, sent):
            edge.until(lambda: edge.server.listener.made_room >= 40)
            for wire, each in zip(customers, received, strict=True):
                wire.sendall(AUTHORISED)
                assert one_answer(each).status == 200
        assert len(edge.server.listener.connections) <= 20


def test_a_half_sent_request_of_a_customer_makes_room_before_idle_ones(edges: Callable[..., Edge]) -> None:
    """Who has a key, and sends its requests slowly, does not drive out others either."""
    edge = edges(ServerLimits(connections=10, connections_each=10))
    with many(edge, 5, AUTHORISED) as customers:
        received = [wire.makefile("rb") for wire in customers]
        assert [one_answer(each).status for each in received] == [200] * 5
        with many(edge, 30, HEAD + KEY + b"\r\ncontent-length: 100000\r\n\r\n{"):
            edge.until(lambda: edge.server.listener.made_room >= 25)
            for wire, each in zip(customers, received, strict=True):
                wire.sendall(AUTHORISED)
                assert one_answer(each).status == 200


def test_who_comes_with_many_makes_room_for_its_own(thread: LoopThread) -> None:
    """A network that has an equal share of the strangers, or more, drives out none of another."""
    strangers = Strangers()

    def stranger(network: str) -> ServerConnection:
        made = ServerConnection(listener)
        made.network = network
        strangers.add(made)
        return made

    listener = thread.look(lambda: Listener(lambda: ServerConnection(listener)))
    alone, first, second, _ = (stranger(network) for network in ("b", "a", "a", "a"))
    assert strangers.least("a") is first
    assert strangers.least("b") is strangers.least("c") is alone, "the oldest of all"
    strangers.add(first)
    assert strangers.least("a") is second, "the server waits anew for the first"
    strangers.discard(alone)
    assert strangers.least("c") is strangers.oldest("a") is second
    assert strangers.oldest("b") is None
    assert len(strangers) == 3


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::7", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
    ],
)
def test_of_ipv6_64_bits_count(address: str, network: str) -> None:
    assert network_of(address) == network


def test_the_first_byte_of_a_further_head_begins_its_time(edges: Callable[..., Edge]) -> None:
    """Also if it came before the answer to the request before had left."""
    edge = edges(ServerLimits(head_s=0.2, idle_s=60.0))
    edge.gateway.driver.respond = lambda _: None
    with many(edge, 1, AUTHORISED + b"P") as (wire,):
        edge.until(lambda: len(edge.gateway.driver.seen) == 1)
        (connection,) = edge.server.listener.connections
        assert isinstance(connection, module.HttpConnection)
        edge.look(lambda: connection._answering.reply(200, b"{}"))  # type: ignore[union-attr]
        received = wire.makefile("rb")
        assert one_answer(received).status == 200
        assert edge.look(lambda: connection in edge.server.heads_due)
        assert one_answer(received).status == 408


def test_busy_connections_are_never_closed_for_new_ones(
    edges: Callable[..., Edge], caplog: pytest.LogCaptureFixture
) -> None:
    edge = edges(ServerLimits(connections=10, connections_each=10))
    edge.gateway.driver.respond = lambda _: None
    with many(edge, 10, AUTHORISED):
        edge.until(lambda: len(edge.gateway.driver.seen) == 10)
        with closing(edge.connect()) as refused:
            assert refused.recv(10) == b""
    assert sum(edge.server.listener.refused.values()) == 1
    assert "too many connections from 127.0.0.1: `limits: {connections_each: …}` of the server allows" in caplog.text


def test_one_address_cannot_take_all(thread: LoopThread) -> None:
    class Busy(ServerConnection):
        """Authorised, and never idle."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.note_authorised()

    made: list[Listener] = []

    def factory() -> ServerConnection:
        return Busy(made[0])

    async def scenario() -> tuple[int, bytes]:
        made.append(Listener(factory, limits=ServerLimits(connections=10, connections_each=4)))
        sock = listen("127.0.0.1", 0)
        made[0].start(sock)
        near = []
        for number in range(6):
            near.append(await open_from("127.0.0.1", sock))
            while len(made[0].connections) + made[0].refused["address"] <= number or made[0].strangers:  # noqa: ASYNC110
                await asyncio.sleep(0)
        far = await open_from("127.0.0.2", sock)
        while made[0].by_network["127.0.0.2"] == 0 or made[0].refused["address"] < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        found = made[0].by_network["127.0.0.1"], await near[-1][0].read(1)
        for _, writer in (*near, far):
            writer.close()
        await made[0].close(1)
        return found

    async def open_from(address: str, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*sock.getsockname(), local_addr=(address, 0))

    assert thread.call(scenario()) == (4, b"")
    assert made[0].by_network == {}


def test_without_descriptors_accepting_pauses_and_says_so(
    edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    edge = edges()
    tries = 0
    monkeypatch.setattr(listening, "PAUSE_S", 0.05)

    class Exhausted:
        """A listening socket in a process that has no descriptor left, four times."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def accept(self) -> Any:
            nonlocal tries
            tries += 1
            if tries <= 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.sock.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    listener = edge.server.listener
    listener._socket = Exhausted(listener._socket)  # type: ignore[assignment,arg-type]
    assert edge.serves()
    assert listener.refused["descriptors"] == 4
    assert caplog.text.count("no file descriptor is left") == 1
    assert tries < 10, "the same connection was not tried again and again"


def test_the_limit_of_descriptors_is_raised_or_complained_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(256, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert raise_descriptor_limit() == 1024
    assert limits[-1] == (1024, 1024)
    assert f"port takes {default_connections()} connections" in caplog.text
    caplog.clear()
    limits.append((1024, 2**20))
    assert raise_descriptor_limit() == 2**20
    assert caplog.text == ""
    assert default_connections() == listening.CONNECTIONS_MAX


def test_sockets_of_clients_are_kept_alive(edges: Callable[..., Edge]) -> None:
    edge = edges()
    with many(edge, 1, LIVE) as (wire,):
        assert one_answer(wire.makefile("rb")).status == 200
        (connection,) = edge.server.listener.connections
        assert connection.transport is not None
        sock = connection.transport.get_extra_info("socket")
        for level, option, value in listening.OPTIONS:
            assert sock.getsockopt(level, option) == value


# Pipelines


def test_large_bodies_wait_at_their_clients_for_their_turn(edges: Callable[..., Edge]) -> None:
    edge = edges(bodies=BodyMemory(2**26, 2**26))
    patient = replace(edge.service.models["demo"], slo_ns=60_000_000_000)
    edge.look(lambda: edge.service.add(patient))
    large = BODY[:-1] + b" " * 500_000 + b"}"
    with ExitStack() as stack:
        wires = [stack.enter_context(closing(edge.connect())) for _ in range(20)]
        senders = [threading.Thread(target=wire.sendall, args=(post(large, KEY),)) for wire in wires]
        for sender in senders:
            sender.start()
        answers = [one_answer(wire.makefile("rb")).status for wire in wires]
        for sender in senders:
            sender.join()
    assert answers == [200] * 20
    assert not edge.server.large.is_busy
    assert edge.bodies.held_bytes == 0


def test_pipelined_requests_are_parsed_a_few_at_a_time(edges: Callable[..., Edge]) -> None:
    edge = edges()
    driver = edge.gateway.driver
    driver.respond = lambda _: None
    with closing(edge.connect()) as wire:
        wire.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += wire.send(AUTHORISED * 500)
        edge.thread.call(asyncio.wait_for(driver.heard.wait(), 5))
        edge.until(lambda: not next(iter(edge.server.listener.connections)).transport.is_reading())  # type: ignore[union-attr]
        assert len(driver.seen) == 1
        assert edge.look(lambda: edge.server.unread_bytes) < 2**20 < sent
        assert edge.look(lambda: edge.bodies.held_bytes) < module.AHEAD_BYTES
    edge.thread.call(edge.server.close(0.1))
    assert (edge.bodies.held_bytes, edge.server.unread_bytes) == (0, 0)


def test_a_pipeline_of_large_and_small_bodies_is_answered_in_order(edges: Callable[..., Edge]) -> None:
    edge = edges()
    large = BODY[:-1] + b" " * 300_000 + b"}"
    found = converse(edge.gateway, (post(large, KEY) + LIVE + AUTHORISED) * 3)
    assert [answer.status for answer in found] == [200] * 9
    assert [b"live" in answer.body for answer in found] == [False, True, False] * 3


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock by which each piece that is parsed takes as long as a turn may, and the turns in which pieces are."""
    found: list[int] = []
    turns = [0]
    parse, go_on = module.HttpConnection._parse, Intake._go_on

    def count(connection: module.HttpConnection, data: Any) -> None:
        found.append(turns[0])
        parse(connection, data)

    def turn(intake: Intake) -> None:
        turns[0] += 1
        go_on(intake)

    monkeypatch.setattr(module, "STEP_NS", -1, raising=False)
    monkeypatch.setattr(module.HttpConnection, "_parse", count)
    monkeypatch.setattr(Intake, "_go_on", turn)
    return found


TINY_CHUNKS = b"".join(b"1\r\n%c\r\n" % each for each in BODY + b" " * 20_000)
"""Some 60 pieces."""


def test_a_body_in_tiny_chunks_does_not_hold_others_up(edges: Callable[..., Edge], pieces: list[int]) -> None:
    """However many have arrived, few are parsed in a turn; then what follows is, also if the client has ended."""
    edge = edges()
    sent = HEAD + KEY + b"\r\ntransfer-encoding: chunked\r\n\r\n" + TINY_CHUNKS + b"0\r\n\r\n" + LIVE
    found = converse(edge.gateway, sent + AUTHORISED * 2)
    assert [answer.status for answer in found] == [200] * 4
    assert len(pieces) >= len(sent) // module.AHEAD_BYTES
    assert max(Counter(pieces).values()) <= 2, "one when it arrives, one when it is its turn"


@pytest.mark.parametrize(("end", "status"), [(b"0\r\n\r\n", 404), (b"", 400)])
def test_who_ends_while_its_body_is_parsed_gets_its_answer(
    edges: Callable[..., Edge], pieces: list[int], end: bytes, status: int
) -> None:
    edge = edges()
    sent = HEAD.replace(b"demo", b"none") + KEY + b"\r\ntransfer-encoding: chunked\r\n\r\n" + TINY_CHUNKS + end
    assert [answer.status for answer in converse(edge.gateway, sent, ends=True)] == [status]
    edge.until(lambda: not edge.server.listener.connections)
    assert edge.look(lambda: (edge.bodies.held_bytes, edge.server.unread_bytes)) == (0, 0)
    assert len(pieces) >= 50


def test_a_body_that_always_goes_on_has_an_end(edges: Callable[..., Edge], pieces: list[int]) -> None:
    """Its time limit holds although more of it waits than is parsed in a turn."""
    edge = edges(ServerLimits(body_s=0.0))
    sent = HEAD + KEY + b"\r\ntransfer-encoding: chunked\r\n\r\n" + TINY_CHUNKS
    assert [answer.status for answer in converse(edge.gateway, sent)] == [408]
    assert len(pieces) <= 2


def test_one_pipeline_does_not_hold_the_others_up(edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests have arrived on one connection, a turn of the loop takes up few of them."""
    edge = edges()
    parsed: list[int] = []
    turns: list[int] = []
    take_up, go_on = module.HttpConnection._has_taken_up, Intake._go_on

    def count(connection: module.HttpConnection, exchange: Exchange) -> bool:
        parsed.append(len(turns))
        return take_up(connection, exchange)

    def turn(intake: Intake) -> None:
        turns.append(len(parsed))
        go_on(intake)

    monkeypatch.setattr(module.HttpConnection, "_has_taken_up", count)
    monkeypatch.setattr(Intake, "_go_on", turn)
    assert [answer.status for answer in converse(edge.gateway, LIVE * 2000)] == [200] * 2000
    at_once = max(Counter(parsed).values())
    assert len(parsed) == 2000
    assert at_once <= module.AHEAD_BYTES // len(LIVE) + 8, "one piece of a pipeline a turn"


def test_of_a_pipeline_no_more_is_answered_than_the_client_reads(thread: LoopThread) -> None:
    answered: list[Exchange] = []

    def answer(exchange: Exchange) -> None:
        answered.append(exchange)
        exchange.reply(200, bytes(2**15))

    server = HttpServer(answer, bodies=BodyMemory(1000), limits=ServerLimits(requests=64))
    port = thread.serve(server)
    with closing(socket.socket()) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        wire.settimeout(10)
        wire.connect(("127.0.0.1", port))
        wire.sendall(LIVE * 200)
        received = wire.makefile("rb")
        while not server.sending:
            time.sleep(0.01)
        time.sleep(0.1)
        most = (2**18 + 2**18) // 2**15  # what the kernel holds for the sender, and, twice or thrice, for the receiver
        assert 0 < len(answered) <= most
        assert [len(one_answer(received).body) for _ in range(200)] == [2**15] * 200
    thread.call(server.close(0.2))


def test_nothing_is_read_after_a_refused_key_in_a_pipeline(edges: Callable[..., Edge]) -> None:
    edge = edges()
    (alone,) = converse(edge.gateway, post(BODY))
    assert (alone.status, alone.headers["connection"]) == (401, "keep-alive")
    (first,) = converse(edge.gateway, post(BODY) + AUTHORISED * 3)
    assert (first.status, first.headers["connection"]) == (401, "close")
    assert edge.serves()


# The end


def test_a_drain_closes_what_is_idle_and_every_other_one_after_its_answer(edges: Callable[..., Edge]) -> None:
    edge = edges()
    driver = edge.gateway.driver
    with many(edge, 1, LIVE) as (idle,), many(edge, 1, b"GET /v2/hea") as (half,):
        assert one_answer(idle.makefile("rb")).status == 200
        edge.until(lambda: len(edge.server.heads_due) == 1)
        driver.respond = lambda _: None
        with many(edge, 1, AUTHORISED):
            edge.thread.call(asyncio.wait_for(driver.heard.wait(), 5))
            edge.look(edge.server.drain)
            assert idle.recv(10) == b""
            half.sendall(b"lth/live HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = one_answer(half.makefile("rb"))
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert converse(edge.gateway, LIVE)[0].headers["connection"] == "close", "new ones get their answer too"


def test_closing_waits_for_no_client(edges: Callable[..., Edge]) -> None:
    edge = edges()
    edge.gateway.driver.respond = lambda _: None
    half = HEAD + KEY + b"\r\ncontent-length: 100\r\n\r\n{"
    with many(edge, 3, b"GET /"), many(edge, 3, half), many(edge, 3, AUTHORISED), many(edge, 3, b""):
        edge.until(lambda: len(edge.gateway.driver.seen) == 3)
        edge.until(lambda: len(edge.server.listener.connections) == 12)
        edge.thread.call(asyncio.wait_for(edge.server.close(0.2), 5))
        assert not edge.server.listener.connections
        assert edge.bodies.held_bytes == 0


# Overload


def test_what_has_waited_too_long_is_refused_and_the_newest_is_served_first(edges: Callable[..., Edge]) -> None:
    edge = edges(ServerLimits(requests=1))
    driver = edge.gateway.driver
    driver.respond = lambda _: None  # the first occupies the only place
    with many(edge, 1, AUTHORISED) as (first,):
        edge.thread.call(asyncio.wait_for(driver.heard.wait(), 5))
        late = post(BODY, KEY, b"x-slo-ms: 400")
        partial = HEAD + KEY + b"\r\nx-slo-ms: 400\r\ncontent-length: 5\r\n\r\n{"
        with many(edge, 3, late) as old, many(edge, 1, partial) as (half,), many(edge, 1, LIVE) as (probe,):
            edge.until(lambda: len(edge.server.deferred) == 5)
            time.sleep(0.25)
            with many(edge, 2, post(BODY, KEY, b"x-slo-ms: 60000")) as (second, third):
                edge.until(lambda: len(edge.server.deferred) == 3)  # the others are refused by now
                driver.respond = None
                first.close()
                assert one_answer(third.makefile("rb")).status == 200
                assert one_answer(second.makefile("rb")).status == 200
                assert one_answer(probe.makefile("rb")).status == 200
                for wire in (*old, half):
                    answer = one_answer(wire.makefile("rb"))
                    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                    assert "waited too long to be answered" in answer.error
                assert answer.headers["connection"] == "close", "half a request was refused"
                old[0].sendall(AUTHORISED)
                assert one_answer(old[0].makefile("rb")).status == 200, "the connection was kept"
    assert edge.server.intake.refused == 4


def test_a_connection_is_read_again_after_a_large_request_was_refused(edges: Callable[..., Edge]) -> None:
    """While a request waits, no more than 64 KiB of it and of what follows is received."""
    edge = edges(ServerLimits(requests=1))
    driver = edge.gateway.driver
    driver.respond = lambda _: None  # the first occupies the only place
    with many(edge, 1, AUTHORISED) as (first,):
        edge.thread.call(asyncio.wait_for(driver.heard.wait(), 5))
        large = BODY + b" " * (66_000 - len(BODY))
        with many(edge, 1, post(large, KEY, b"x-slo-ms: 100")) as (wire,):
            received = wire.makefile("rb")
            answer = one_answer(received)
            assert (answer.status, answer.headers.get("connection")) == (503, None), "the connection stays"
            driver.respond = None
            first.close()
            wire.sendall(post(large, KEY))
            assert one_answer(received).status == 200


def test_a_request_that_has_waited_in_the_kernel_is_refused_without_a_connection(edges: Callable[..., Edge]) -> None:
    edge = edges(ServerLimits(requests=1))
    driver = edge.gateway.driver
    driver.respond = lambda _: None
    patient = post(BODY, KEY, b"x-slo-ms: 60000")
    with many(edge, 1, AUTHORISED), many(edge, 1, patient):
        edge.until(lambda: len(edge.server.deferred) == 1)
        listener = edge.server.listener
        edge.look(lambda: edge.thread.loop.remove_reader(listener._socket.fileno()))  # type: ignore[union-attr]
        late = post(BODY, KEY, b"x-slo-ms: 2")
        with many(edge, 2, late) as wires, many(edge, 1, patient), many(edge, 1, b""):
            time.sleep(0.05)
            edge.look(listener._resume)
            for wire in wires:
                received = wire.makefile("rb")
                answer = one_answer(received)
                assert (answer.status, answer.headers["connection"]) == (503, "close")
                assert received.read() == b""
            edge.until(lambda: len(listener.connections) == 4 and len(edge.server.deferred) == 2)
            begun_ns = edge.look(lambda: min(each.deferred_ns for each in list(edge.server.deferred)[1:]))  # type: ignore[attr-defined]
            assert edge.look(time.monotonic_ns) - begun_ns >= 40_000_000, "its wait there counts"


def test_without_overload_who_has_left_is_not_served(edges: Callable[..., Edge]) -> None:
    """Thousands of clients that gave up while the server was overloaded are not worked for afterwards. Who waits is
    served, for instance after another edge has died, also beyond the deadline."""
    edge = edges()
    listener, driver = edge.server.listener, edge.gateway.driver
    edge.look(lambda: edge.thread.loop.remove_reader(listener._socket.fileno()))  # type: ignore[union-attr]
    late = post(BODY, KEY, b"x-slo-ms: 2")
    with many(edge, 3, late):
        pass  # they have left
    with many(edge, 1, late) as (stays,):
        time.sleep(0.05)
        edge.look(listener._resume)
        assert one_answer(stays.makefile("rb")).status == 200
    assert edge.bodies.refused["age"] == 3
    assert len(driver.seen) == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(LIVE, 200, id="a page"),
        pytest.param(post(BODY, KEY) + post(BODY, KEY, b"x-slo-ms: 2"), 200, id="the second is urgent"),
        pytest.param(post(BODY, KEY, b"x-slo-ms: 1e3"), 200, id="an exponent"),
        pytest.param(post(BODY, KEY, b"x-slo-ms: 0"), 400, id="a wrong deadline"),
        pytest.param(post(BODY, KEY, b"x: " + b"x" * 4000, b"x-slo-ms: 60000"), 200, id="a large head"),
        pytest.param(
            post(BODY.replace(b"{", b'{"parameters":{"x-slo-ms":60000},', 1), KEY), 200, id="among the parameters"
        ),
        pytest.param(HEAD + KEY + b"\r\ncontent-length: 5000000\r\n\r\n", 413, id="a large body"),
    ],
)
def test_without_overload_a_request_that_may_have_time_left_is_read(
    edges: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch, sent: bytes, status: int
) -> None:
    monkeypatch.setattr(module, "PAGE_DEADLINE_NS", 1)
    edge = edges()
    if b"0000" in sent:  # else the application's own deadline is not over
        monkeypatch.setattr(edge.server, "_deadline_ns", lambda _path: 1)
    listener = edge.server.listener
    edge.look(lambda: edge.thread.loop.remove_reader(listener._socket.fileno()))  # type: ignore[union-attr]
    with many(edge, 1, sent) as (wire,):
        time.sleep(0.05)
        edge.look(listener._resume)
        assert one_answer(wire.makefile("rb")).status == status


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "the beginning of a handshake"])
def test_a_connection_that_waited_in_the_kernel_before_its_request_came_makes_that_no_older(
    edges: Callable[..., Edge], certificates: Path, sent: bytes
) -> None:
    tls = Tls(certificates / "server.pem", certificates / "server.key") if sent else None
    edge = edges(tls=tls)
    listener = edge.server.listener
    edge.look(lambda: edge.thread.loop.remove_reader(listener._socket.fileno()))  # type: ignore[union-attr]
    with many(edge, 1, sent):
        time.sleep(0.05)
        edge.look(listener._resume)
        edge.until(lambda: len(listener.connections) == 1)
        assert [each.waited_ns for each in listener.connections] == [0]


def test_what_has_just_come_has_not_waited_for_a_tick_of_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        waits = set()
        for _ in range(200):
            begun_ns = time.monotonic_ns()
            with socket.create_connection(server.getsockname()) as client:
                client.sendall(b"x")
                with server.accept()[0] as accepted:
                    waits.add(tcp.waited_in_kernel_ns(accepted) <= time.monotonic_ns() - begun_ns)
        assert waits == {True}


@pytest.mark.parametrize("head", [HEAD + KEY + b"\r\ncontent-length: 10000000\r\n\r\n", LIVE.replace(b"GET", b"HEAD")])
def test_what_is_refused_unread_gets_one_answer_and_what_follows_is_no_request(
    edges: Callable[..., Edge], head: bytes
) -> None:
    """Neither a body that was announced, nor what a client sends after an answer to HEAD."""
    edge = edges(ServerLimits(requests=1))
    edge.gateway.driver.respond = lambda _: None  # the first occupies the only place
    with many(edge, 1, AUTHORISED), many(edge, 1, head) as (wire,):
        edge.until(lambda: len(edge.server.deferred) == 1)
        edge.look(lambda: next(iter(edge.server.deferred)).refuse_deferred())  # type: ignore[attr-defined]
        wire.sendall(LIVE)
        wire.shutdown(socket.SHUT_WR)
        received = wire.makefile("rb")
        answer = one_answer(received, has_body=not head.startswith(b"HEAD"))
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert received.read() == b""


def test_requests_beyond_the_limit_wait_for_their_turn(edges: Callable[..., Edge]) -> None:
    edge = edges(ServerLimits(requests=2))
    with many(edge, 30, post(BODY, KEY, b"x-slo-ms: 60000")) as wires:
        assert [one_answer(wire.makefile("rb")).status for wire in wires] == [200] * 30
    assert edge.look(lambda: edge.server.open_requests) == 0


# Garbage


def alive() -> int:
    """Requests and connections that exist, whether anything still needs them or not."""
    return sum(type(each).__name__ in ("Exchange", "HttpConnection") for each in gc.get_objects())


class Slow:
    """Answers at once, with an error, or when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Exchange] = []

    def answer(self, exchange: Exchange) -> None:
        if exchange.path == "/later":
            exchange.on_gone = lambda: None
            self.waiting.append(exchange)
        elif exchange.path == "/refused":
            exchange.refuse(Refusal(404, "no"))
        else:
            exchange.reply(200, b"{}")

    def authorise(self, exchange: Exchange) -> bool:
        if exchange.path == "/unknown":
            raise Refusal(401, "no")
        return True

    async def round(self, port: int) -> None:
        """One connection whose last request is left by the client."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for path in (b"now", b"refused", b"unknown", b"later", b"left"):
            last = path == b"left"
            writer.write(post(b"{}").replace(b"/v2/models/demo/infer", b"/later" if last else b"/" + path))
            if path == b"later" or last:
                while not self.waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                await asyncio.sleep(0.12)
            if not last:
                if self.waiting:
                    self.waiting.pop().reply(200, b"{}")
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(100)
        writer.close()
        await writer.wait_closed()
        while self.waiting[-1].is_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        self.waiting.clear()
        await asyncio.sleep(0.01)


def test_a_request_leaves_no_cycle_however_long_it_stays(thread: LoopThread) -> None:
    """Not when it is served at once, later, refused, refused on its head, or left by its client."""
    slow = Slow()
    server = HttpServer(
        slow.answer, bodies=BodyMemory(1000), limits=ServerLimits(requests=64), authorise=slow.authorise
    )
    port = thread.serve(server)

    async def scenario() -> int:
        await slow.round(port)
        gc.collect()
        before = alive()
        gc.disable()
        try:
            for _ in range(5):
                await slow.round(port)
            return alive() - before
        finally:
            gc.enable()

    assert thread.call(scenario()) <= 0
    thread.call(server.close(0.2))


class Large:
    """What a large request holds."""


async def worked(large: Large, end: str) -> None:
    await asyncio.sleep(0)
    if end == "refused":
        raise Refusal(400, "no")
    await asyncio.sleep(0 if end == "read" else 60)
    assert large


@pytest.mark.parametrize("end", ["read", "refused", "left"])
def test_an_answer_that_comes_later_leaves_no_cycle(end: str) -> None:
    """What it holds, such as a body of megabytes, is free when it ends, and not at the next garbage collection."""

    async def main() -> None:
        nowhere, large = Nowhere(), Large()
        exchange = Exchange(nowhere, "POST", {}, 0)
        gone = weakref.ref(large)
        exchange.answer_later(worked(large, end))
        del large
        for _ in range(2):
            await asyncio.sleep(0)
        if end == "left":
            assert exchange.on_gone is not None
            exchange.is_open = False
            exchange.on_gone()
        for _ in range(4):
            await asyncio.sleep(0)
        assert gone() is None
        assert nowhere.statuses == ([400] if end == "refused" else [])

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


# TLS


def make_certificate(folder: Path, name: str, *, issuer: str = "") -> None:
    """A key and a certificate, issued by itself or another one in the folder."""
    base = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    extra = ["-CA", str(folder / f"{issuer}.pem"), "-CAkey", str(folder / f"{issuer}.key")] if issuer else []
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
    subprocess.run([*base, *extra, *subject, *files], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name, issuer in (("authority", ""), ("server", "authority"), ("client", "authority"), ("stranger", "")):
        make_certificate(folder, name, issuer=issuer)
    return folder


def ask_securely(edge: Edge, folder: Path, client: str = "") -> int:
    """The status of a request over TLS, with the certificate of a client."""
    context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    with edge.connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as wire:
        assert wire.version() in ("TLSv1.2", "TLSv1.3")
        wire.sendall(AUTHORISED)
        return one_answer(wire.makefile("rb")).status


def test_tls_and_mutual_tls(edges: Callable[..., Edge], certificates: Path) -> None:
    files = {"cert": certificates / "server.pem", "key": certificates / "server.key"}
    edge = edges(tls=Tls(**files))
    assert ask_securely(edge, certificates) == 200
    with edge.connect() as plain:
        plain.sendall(AUTHORISED)
        assert not plain.recv(100).startswith(b"HTTP"), "nothing is answered in the clear"
    mutual = edges(tls=Tls(**files, client_ca=certificates / "authority.pem"))
    assert ask_securely(mutual, certificates, "client") == 200
    for other in ("", "stranger"):
        with pytest.raises((ssl.SSLError, ConnectionError, pytest.fail.Exception)):
            ask_securely(mutual, certificates, other)
    mutual.until(lambda: not mutual.server.listener.connections)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connections whose handshakes were begun."""
    found: list[Any] = []
    begin = listening.Listener._open

    def count(listener: Listener, sock: socket.socket, connection: ServerConnection) -> Any:
        found.append(connection)
        return begin(listener, sock, connection)

    monkeypatch.setattr(listening.Listener, "_open", count)
    return found


@pytest.fixture
def hello() -> bytes:
    """The first message of a client."""
    sent = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


@pytest.mark.parametrize("end", [0, 1, 10, -1], ids=["nothing", "a byte", "some", "nearly all"])
def test_a_handshake_begins_when_the_first_message_is_here(
    edges: Callable[..., Edge],
    certificates: Path,
    begun: list[Any],
    hello: bytes,
    end: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then a client has no place among the handshakes, and takes no time."""
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 1)
    looks, look = [0], handshakes.Handshakes._look

    def count(shakes: handshakes.Handshakes, connection: Any) -> None:
        looks[0] += 1
        look(shakes, connection)

    monkeypatch.setattr(handshakes.Handshakes, "_look", count)
    edge = edges(tls=Tls(certificates / "server.pem", certificates / "server.key"))
    sent = hello[:end]
    with many(edge, 12, sent) as wires:
        assert ask_securely(edge, certificates) == 200
        assert len(begun) == 1
        assert looks[0] <= 12 * 2 + 4, "it is not looked at again and again"
        wires[0].sendall(hello[len(sent) :])
        edge.until(lambda: len(begun) == 2)
    edge.until(lambda: not edge.server.listener.connections)


def test_silent_clients_make_room_for_handshakes(edges: Callable[..., Edge], certificates: Path) -> None:
    tls = Tls(certificates / "server.pem", certificates / "server.key")
    edge = edges(ServerLimits(connections=8, connections_each=8), tls=tls)
    with many(edge, 20, b"") as wires:
        assert ask_securely(edge, certificates) == 200
        assert wires[0].recv(10) == b""
        assert len(edge.server.listener.connections) <= 8


def test_silent_clients_make_room_before_handshakes(
    edges: Callable[..., Edge], certificates: Path, begun: list[Any], hello: bytes
) -> None:
    """Else a new client would be closed in mid-handshake where many come and go."""
    tls = Tls(certificates / "server.pem", certificates / "server.key")
    edge = edges(ServerLimits(connections=8, connections_each=8), tls=tls)
    listener = edge.server.listener
    with many(edge, 1, hello):
        edge.until(lambda: len(begun) == 1)
        for sent in (b"", hello[:100]):
            before = listener.made_room
            with many(edge, 20, sent):
                edge.until(lambda before=before: listener.made_room >= before + 13)  # type: ignore[misc]
                assert begun[0] in listener.connections
            edge.until(lambda: len(listener.connections) == 1)


def test_handshakes_that_stop_make_room_for_others(
    edges: Callable[..., Edge], certificates: Path, begun: list[Any], hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(handshakes, "CROWDED_HANDSHAKE_S", 0.05)
    edge = edges(tls=Tls(certificates / "server.pem", certificates / "server.key"))
    with many(edge, 8, hello):
        edge.until(lambda: len(begun) == 8)
        assert ask_securely(edge, certificates) == 200, "long before the end of the others"
        assert edge.server.listener.handshakes.given_up == 5
    edge.until(lambda: not edge.server.listener.connections)


def test_who_has_left_gets_no_handshake(
    edges: Callable[..., Edge], certificates: Path, begun: list[Any], hello: bytes
) -> None:
    edge = edges(tls=Tls(certificates / "server.pem", certificates / "server.key"))
    for sent in (b"", hello[:100], hello):
        with edge.connect() as wire:
            edge.until(lambda: len(edge.server.listener.connections) == 1)
            edge.look(lambda sent=sent, wire=wire: (wire.sendall(sent), wire.shutdown(socket.SHUT_WR)))  # type: ignore[misc]
            edge.until(lambda: not edge.server.listener.connections)
    assert not begun
    assert not edge.server.idle


class Clock:
    """The CPU time of a thread, and the time."""

    def __init__(self) -> None:
        self.now_ns, self.wall_ns = 0, 10**12

    def thread_time_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.wall_ns


class Shaken:
    """A client whose first message is here."""

    def __init__(self, name: str, stack: ExitStack, server: socket.socket, hello: bytes) -> None:
        self.name, self.network = name, name[0]
        wire = stack.enter_context(socket.create_connection(server.getsockname()))
        wire.sendall(hello)
        self.sock = stack.enter_context(server.accept()[0])
        self.sock.setblocking(False)

    def abort(self) -> None:
        raise AssertionError


def handshakes_noted_in(order: list[str]) -> handshakes.Handshakes:
    """Handshakes that are over at once, and take 1 µs; `order` gets the names of their clients."""

    async def begin(sock: socket.socket, client: Shaken) -> None:
        order.append(client.name)
        sock.close()

    return handshakes.Handshakes(begin, lambda _: None, cost_ns=1000)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_handshakes_of_strangers_get_their_share_of_the_time(
    thread: LoopThread, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, order = Clock(), list[str]()
    monkeypatch.setattr(handshakes, "time", clock)
    monkeypatch.setattr(handshakes, "HANDSHAKES_AT_ONCE", 3)

    async def scenario() -> None:
        shakes = handshakes_noted_in(order)
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for number in range(6):
                client = Shaken(f"a{number}", stack, server, hello)
                shakes.add(client.sock, client)
            await eventually(lambda: len(order) == 3)
            await asyncio.sleep(0.05)
            assert len(order) == 3
            shakes.note_authorised("another")  # one of these does not count
            await eventually(lambda: len(order) == 4)
            await asyncio.sleep(0.05)
            assert len(order) == 4
            clock.wall_ns += 9900
            await eventually(lambda: len(order) == 5)
            await asyncio.sleep(0.05)
            assert len(order) == 5
            clock.wall_ns += 9900
            await eventually(lambda: len(order) == 6)

    thread.call(scenario())


def test_under_overload_handshakes_get_their_share_and_networks_take_turns(
    thread: LoopThread, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, order = Clock(), list[str]()
    monkeypatch.setattr(handshakes, "time", clock)

    async def scenario() -> None:
        shakes = handshakes_noted_in(order)
        shakes.is_overloaded = lambda: True
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for name in ("a1", "a2", "a3", "b1"):
                client = Shaken(name, stack, server, hello)
                shakes.add(client.sock, client)
            await eventually(lambda: sum(len(own) for each in shakes._ready._waiting for own in each.values()) == 4)
            for number in range(1, 5):
                await asyncio.sleep(0.05)
                assert len(order) == number - 1, "no time for more"
                clock.now_ns += 10_010
                await eventually(lambda number=number: len(order) == number)  # type: ignore[misc]

    thread.call(scenario())
    assert order == ["a3", "b1", "a2", "a1"], "and of each network the newest comes first"


def test_strangers_cannot_use_up_the_time_of_networks_from_which_a_client_was_authorised(
    thread: LoopThread, hello: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(handshakes, "time", Clock())
    monkeypatch.setattr(handshakes, "HANDSHAKES_AT_ONCE", 2)

    async def scenario() -> None:
        shakes = handshakes_noted_in(order)
        shakes.note_authorised("b")
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for name in ("a1", "a2", "a3", "b1", "b2"):
                client = Shaken(name, stack, server, hello)
                shakes.add(client.sock, client)
            await eventually(lambda: len(order) == 4)
            await asyncio.sleep(0.05)

    thread.call(scenario())
    assert order == ["b2", "b1", "a3", "a2"]


def test_networks_take_turns_and_each_begins_with_its_newest_connection() -> None:
    waiting = handshakes.FairQueue({"b"})
    for name in ("a1", "a2", "b1", "c1", "b2", "a3"):
        waiting.add(Mock(network=name[0], label=name))
    found = [waiting.take(is_known=is_known).label for is_known in (False, True, False, False, True, True)]
    assert found == ["a3", "b2", "c1", "a2", "b1", "a1"]
    assert not waiting


def test_connections_that_wait_are_of_a_known_network_as_soon_as_it_is() -> None:
    known = set[str]()
    waiting = handshakes.FairQueue(known)
    for name in ("a1", "b1", "b2"):
        waiting.add(Mock(network=name[0], label=name))
    known.add("b")
    waiting.know("b")
    waiting.add(Mock(network="b", label="b3"))
    assert [waiting.take(is_known=is_known).label for is_known in (True, True, False, True)] == ["b3", "b2", "a1", "b1"]


def test_as_many_networks_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "KNOWN_MAX", 2)
    shakes = handshakes.Handshakes(lambda *_: asyncio.sleep(0), lambda _: None, cost_ns=1000)
    for network in "abac":
        shakes.note_authorised(network)
    assert list(shakes.known) == ["a", "c"]


def test_what_a_handshake_costs_is_measured(certificates: Path) -> None:
    files = Tls(certificates / "server.pem", certificates / "server.key")
    for client_ca in (None, certificates / "authority.pem"):
        assert handshakes.measured_ns(Tls(files.cert, files.key, client_ca).context("h2")) > handshakes.BESIDE_NS
    listener = Listener(lambda: ServerConnection(listener), tls=files)
    assert listener.handshakes.cost_ns > handshakes.BESIDE_NS


def test_a_large_body_and_a_large_answer_over_tls(thread: LoopThread, certificates: Path) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.reply(200, (exchange.body, b"!"), content_type="application/octet-stream")

    tls = Tls(certificates / "server.pem", certificates / "server.key")
    server = HttpServer(answer, bodies=BodyMemory(2**24), limits=ServerLimits(requests=8), tls=tls)
    port = thread.serve(server)
    context = ssl.create_default_context(cafile=str(certificates / "authority.pem"))
    plain = socket.create_connection(("127.0.0.1", port), timeout=10)
    with plain, context.wrap_socket(plain, server_hostname="localhost") as wire:
        for size in (3, 2**22, 10):
            wire.sendall(post(b"a" * size, b"inference-header-content-length: 1"))
            assert one_answer(wire.makefile("rb")).body == b"a" * size + b"!"
    thread.call(server.close(0.2))


def test_a_handshake_that_never_comes_has_an_end(
    edges: Callable[..., Edge], certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.2)
    edge = edges(tls=Tls(certificates / "server.pem", certificates / "server.key"))
    with many(edge, 2 * handshakes.SWEPT_AT_ONCE + 6, b"\x16\x03\x01"):
        assert ask_securely(edge, certificates) == 200
        edge.until(lambda: not edge.server.listener.connections)


def test_certificates_are_read_again_when_they_change(
    edges: Callable[..., Edge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening, "REFRESH_S", 0.05)
    for name, issuer in (("authority", ""), ("server", "authority")):
        make_certificate(tmp_path, name, issuer=issuer)
    edge = edges(tls=Tls(tmp_path / "server.pem", tmp_path / "server.key"))

    def serial() -> str:
        context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))
        with edge.connect() as plain, context.wrap_socket(plain, server_hostname="localhost") as wire:
            found: Any = wire.getpeercert()
            return str(found["serialNumber"])

    first = serial()
    (tmp_path / "server.pem").write_text("half written")
    edge.until(lambda: "the one before stays" in caplog.text)
    assert serial() == first
    make_certificate(tmp_path, "server", issuer="authority")
    edge.until(lambda: edge.server.listener._files == Tls(tmp_path / "server.pem", tmp_path / "server.key").changed())
    while serial() == first:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("cert", "key", "client_ca", "told"),
    [
        ("missing.pem", "server.key", None, "missing.pem: cannot be read"),
        ("server.pem", "client.key", None, "not a certificate in PEM format and its key"),
        ("server.key", "server.key", None, "not a certificate in PEM format and its key"),
        ("server.pem", "locked.key", None, "its unencrypted key"),
        ("server.pem", "server.key", "server.key", "not a certificate in PEM format"),
        ("server.pem", "server.key", "missing.pem", "missing.pem: cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    certificates: Path, cert: str, key: str, client_ca: str | None, told: str
) -> None:
    command = ["openssl", "ec", "-aes256", "-passout", "pass:word", "-in", str(certificates / "server.key")]
    subprocess.run([*command, "-out", str(certificates / "locked.key")], check=True, capture_output=True)
    ca = None if client_ca is None else certificates / client_ca
    with pytest.raises(InputError) as caught:
        Tls(certificates / cert, certificates / key, ca).context("http/1.1")
    assert told in f"{caught.value} {caught.value.help}"
