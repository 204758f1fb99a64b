"""HTTP byte by byte, as clients, proxies and attackers send it."""

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest

from sloop.app.limits import ServerLimits
from sloop.errors import MachineError
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.grpc.schema import SERVICE, message_class
from sloop.serve.edge.http import HttpServer
from sloop.serve.edge.listener import listen
from sloop.serve.protocols import RequestResult
from sloop.vocabulary import Outcome
from tests.serve.edge.fakes import FakeDriver, Gateway, LoopThread, make_service, rpc_server, web_server

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


def test_expect_100_continue_is_accepted_or_refused(wire: socket.socket, gateway: Gateway) -> None:
    wire.sendall(INFER + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
    assert wire.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.sendall(b"{}")
    assert one(wire)[0].startswith(b"HTTP/1.1 400 ")
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as refused:
        refused.sendall(INFER + b"content-length: 999999999999\r\nexpect: 100-continue\r\n\r\n")
        head, body = one(refused)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"999999999999 bytes; the limit is 100000" in body


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
def test_invalid_http_is_refused_and_other_clients_are_served(
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


def test_a_port_in_use_is_named(gateway: Gateway) -> None:
    with pytest.raises(MachineError, match=f"port {gateway.port} on 127.0.0.1 is in use"):
        listen("127.0.0.1", gateway.port)
    with pytest.raises(MachineError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_closing_lets_go_of_idle_connections(loop_thread: LoopThread) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.reply(200, b"{}")

    listener = HttpServer(answer, bodies=BodyMemory(10), limits=ServerLimits(requests=8))
    port = loop_thread.serve(listener)

    async def scenario() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await reader.readuntil(b"{}")
        await listener.close(1.0)
        rest = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return rest

    assert loop_thread.call(scenario()) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_full_server_refuses_in_both_protocols_and_serves_again_when_there_is_room(loop_thread: LoopThread) -> None:
    driver, bodies = FakeDriver(), BodyMemory(2000, 2000)
    service = make_service(Gateway(driver), bodies=bodies)
    listener = web_server(service, limits=ServerLimits(requests=8))
    rpc = rpc_server(service, limits=ServerLimits(requests=8))
    port, grpc_port = loop_thread.serve(listener), loop_thread.serve(rpc)
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
        {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [2]},
    ]
    body = json.dumps({"inputs": inputs, "id": "i" * 1200})

    def send() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/v2/models/demo/infer", body)
        return connection

    def ask() -> tuple[int, str | None, str]:
        with closing(send()) as connection:
            answer = connection.getresponse()
            return answer.status, answer.getheader("retry-after"), json.loads(answer.read())["error"]

    async def emptied() -> None:
        async with asyncio.timeout(5):
            while bodies.held_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0)

    driver.respond = lambda _: None  # it waits
    first = send()
    loop_thread.call(asyncio.wait_for(driver.heard.wait(), 5))
    assert bodies.held_bytes == len(body)
    status, after, told = ask()
    assert (status, after) == (503, "1")
    assert told.startswith(f"rejected: the server holds {len(body)} bytes of requests; the limit is 2000"), told
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=message_class("ModelInferRequest").SerializeToString,
            response_deserializer=message_class("ModelInferResponse").FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            infer(message_class("ModelInferRequest")(model_name="demo", id="i" * 1200), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailing: Any = caught.value.trailing_metadata()
        assert dict(trailing)["retry-after"] == "1"
    assert dict(bodies.refused) == {"all": 2}
    first.close()  # the client goes: so does what it sent
    loop_thread.call(asyncio.wait_for(driver.gone.wait(), 5))
    driver.respond = lambda _: RequestResult(Outcome.FAILED, why="told to")
    assert ask()[0] == 500
    loop_thread.call(emptied())
    loop_thread.call(rpc.close(0.5))
    loop_thread.call(listener.close(1.0))
