"""HTTP byte by byte, as clients, proxies and attackers send it: what we rely on Granian for, and what we add to it."""

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest

from sloop.errors import MachineError
from sloop.serve.gateway import http
from sloop.serve.gateway.bodies import Bodies
from sloop.serve.gateway.http import Exchange, Listener, free_port
from tests.serve.gateway.fakes import Gateway, LoopThread

pytestmark = pytest.mark.live

GET = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
INFER = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
def wire(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as wire:
        yield wire


def to_end(wire: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = b""
    while piece := wire.recv(65536):
        received += piece
    return received


def one(wire: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of one answer."""
    file = wire.makefile("rb", buffering=0)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += file.read(1) or pytest.fail(f"closed after {head!r}")
    length = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))[16:])
    body = b""
    while len(body) < length:
        body += file.read(length - len(body)) or b""
    return head, body


def test_a_connection_serves_many_requests_however_they_are_cut(wire: socket.socket) -> None:
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(3):
        wire.sendall(GET)
        assert one(wire)[1] == b'{"live":true}'
    for at in range(len(GET)):
        wire.sendall(GET[at : at + 1])
    assert one(wire)[1] == b'{"live":true}'


def test_pipelined_requests_are_answered_in_order(wire: socket.socket) -> None:
    paths = ["/v2", "/v2/models/demo", "/nothing"] * 40
    wire.sendall(b"".join(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in paths))
    heads = [one(wire)[0].split(b"\r\n")[0] for _ in paths]
    assert heads == [b"HTTP/1.1 404 Not Found" if path == "/nothing" else b"HTTP/1.1 200 OK" for path in paths]


def test_a_chunked_body_is_one_body(wire: socket.socket) -> None:
    wire.sendall(INFER + b'transfer-encoding: chunked\r\n\r\n5\r\n{"inp\r\n8\r\nuts":[]}\r\n0\r\n\r\n')
    head, body = one(wire)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"is missing" in body, "the two chunks make up valid JSON"


def test_a_careful_client_is_asked_to_go_on_or_told_not_to(wire: socket.socket, gateway: Gateway) -> None:
    wire.sendall(INFER + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
    assert wire.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.sendall(b"{}")
    assert one(wire)[0].startswith(b"HTTP/1.1 400 ")
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as refused:
        refused.sendall(INFER + b"content-length: 999999999999\r\nexpect: 100-continue\r\n\r\n")
        head, body = one(refused)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"999999999999 bytes, over 100000" in body


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n",
        INFER + b"content-length: x\r\n\r\n",
        INFER + b"content-length: -1\r\n\r\n",
        INFER + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        INFER + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v2 HTTP/1.1\r\nx: " + b"a" * 600_000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n" + b"x: a\r\n" * 70_000 + b"\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_everybody_else_is_served(
    wire: socket.socket, gateway: Gateway, sent: bytes
) -> None:
    wire.sendall(sent)
    try:
        answer = to_end(wire)
    except ConnectionResetError:
        answer = b""
    assert b" 200 " not in answer
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as next_one:
        next_one.sendall(GET)
        assert one(next_one)[1] == b'{"live":true}'


def test_a_body_that_never_comes_is_not_waited_for(wire: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SEND_S_MAX", 0.05)
    wire.sendall(INFER + b"content-length: 10\r\n\r\n{")
    head, body = one(wire)
    assert head.startswith(b"HTTP/1.1 408 ")
    assert set(json.loads(body)) == {"error"}


def test_a_port_in_use_is_named(loop_thread: LoopThread, gateway: Gateway) -> None:
    second = Listener(lambda _: None, bodies=Bodies(10), requests_max=8)
    with pytest.raises(MachineError, match=f"port {gateway.port} on 127.0.0.1 is in use"):
        loop_thread.call(second.start("127.0.0.1", gateway.port))
    with pytest.raises(MachineError, match=r"cannot listen on 192\.0\.2\.1"):
        loop_thread.call(second.start("192.0.2.1", 0))
    assert free_port("127.0.0.1", 0) > 0


def test_closing_lets_go_of_idle_connections(loop_thread: LoopThread) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.reply(200, b"{}")

    listener = Listener(answer, bodies=Bodies(10), requests_max=8)
    port = loop_thread.call(listener.start("127.0.0.1", 0))

    async def scenario() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"{}")
        await listener.close()
        rest = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return rest

    assert loop_thread.call(scenario()) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)
