"""HTTP/1.1 byte by byte: what clients, proxies and attackers send."""

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest

from sloop.errors import MachineError
from sloop.serve.gateway import http1
from sloop.serve.gateway.http1 import Exchange, origin_form
from sloop.serve.gateway.listener import Listener
from tests.serve.gateway.fakes import Gateway, LoopThread

pytestmark = pytest.mark.live

GET = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"


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


def test_a_connection_serves_many_requests(wire: socket.socket) -> None:
    for _ in range(3):
        wire.sendall(GET)
        head, body = one(wire)
        assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
        assert body == b'{"live":true}'


def test_a_request_may_come_byte_by_byte(wire: socket.socket) -> None:
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(len(GET)):
        wire.sendall(GET[at : at + 1])
    assert one(wire)[1] == b'{"live":true}'


def test_pipelined_requests_are_answered_in_order(wire: socket.socket) -> None:
    paths = ["/v2", "/v2/models/demo", "/nothing"] * 40
    wire.sendall(b"".join(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() for path in paths))
    heads = [one(wire)[0].split(b"\r\n")[0] for _ in paths]
    assert heads == [b"HTTP/1.1 404 Not Found" if path == "/nothing" else b"HTTP/1.1 200 OK" for path in paths]


def test_a_pipelined_request_waits_for_the_inference_before_it(wire: socket.socket) -> None:
    body = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
                {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [1]},
            ]
        }
    ).encode()
    infer = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    wire.sendall(infer + GET + infer)
    assert b'"outputs"' in one(wire)[1]
    assert one(wire)[1] == b'{"live":true}'
    assert b'"outputs"' in one(wire)[1]


def test_closes_when_asked_and_for_http_1_0(wire: socket.socket, gateway: Gateway) -> None:
    wire.sendall(GET.replace(b"host: x", b"connection: close"))
    assert b"connection: close" in to_end(wire)
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as old:
        old.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
        assert to_end(old).endswith(b'{"live":true}')


def test_asks_a_careful_client_to_go_on(wire: socket.socket) -> None:
    wire.sendall(b"POST /v2/models/demo/infer HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
    assert wire.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    wire.sendall(b"{}")
    assert one(wire)[0].startswith(b"HTTP/1.1 400 ")


def test_tells_a_careful_client_not_to_send_what_is_too_large(wire: socket.socket) -> None:
    wire.sendall(b"POST /v2/models/demo/infer HTTP/1.1\r\ncontent-length: 999999999999\r\nexpect: 100-continue\r\n\r\n")
    answer = to_end(wire)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"999999999999 bytes, over 100000" in answer


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"HELLO\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nx: " + b"a" * 400_000, 431),
        (b"GET /" + b"a" * 400_000, 431),
        (b"GET /v2 HTTP/1.1\r\n" + b"x: a\r\n" * 70_000, 431),
    ],
)
def test_what_is_not_http_gets_one_answer_and_the_connection_ends(
    wire: socket.socket, gateway: Gateway, sent: bytes, status: int
) -> None:
    wire.sendall(sent)
    head, _, body = to_end(wire).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert set(json.loads(body)) == {"error"}
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as next_one:
        next_one.sendall(GET)
        assert one(next_one)[1] == b'{"live":true}'


def test_an_upgrade_is_declined_by_answering_in_http_1_1(wire: socket.socket) -> None:
    wire.sendall(b"GET /v2/health/live HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    assert to_end(wire).endswith(b'{"live":true}')


def test_connections_are_bounded(gateway: Gateway) -> None:
    wires = [socket.create_connection((gateway.host, gateway.port), timeout=10) for _ in range(65)]
    assert b"HTTP/1.1 503 " in to_end(wires[-1])
    wires[0].sendall(GET)
    assert one(wires[0])[1] == b'{"live":true}'
    for wire in wires:
        wire.close()


def test_slow_and_idle_clients_are_let_go(loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "SEND_S_MAX", -1.0)
    monkeypatch.setattr(http1, "IDLE_S_MAX", -1.0)
    listener = Listener(lambda exchange: exchange.reply(200, b"{}"), body_bytes_max=10, connections_max=8)
    port = loop_thread.call(listener.start("127.0.0.1", 0))
    with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
        slow.sendall(GET[:-4])
        assert to_end(slow).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as idle:
        assert to_end(idle) == b""
    loop_thread.call(listener.close(1.0))


def test_a_port_in_use_is_named(loop_thread: LoopThread, gateway: Gateway) -> None:
    second = Listener(lambda _: None, body_bytes_max=10, connections_max=8)
    with pytest.raises(MachineError, match=f"port {gateway.port} on 127.0.0.1 is in use"):
        loop_thread.call(second.start("127.0.0.1", gateway.port))
    with pytest.raises(MachineError, match=r"cannot listen on 192\.0\.2\.1"):
        loop_thread.call(second.start("192.0.2.1", 0))


def test_closing_waits_for_answers_under_way_and_then_no_longer(loop_thread: LoopThread) -> None:
    held: list[Exchange] = []
    gone: list[str] = []
    both = asyncio.Event()

    def hold(exchange: Exchange) -> None:
        held.append(exchange)
        if len(held) == 2:
            both.set()

    listener = Listener(hold, body_bytes_max=10, connections_max=8)
    port = loop_thread.call(listener.start("127.0.0.1", 0))

    async def scenario() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        idle, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        stuck, stuck_writer = await asyncio.open_connection("127.0.0.1", port)
        for each in (writer, stuck_writer):
            each.write(GET)
        await both.wait()
        held[1].on_gone = lambda: gone.append("stuck")
        closing = asyncio.create_task(listener.close(0.2))
        assert await idle.read() == b""
        held[0].reply(200, b"{}")
        assert b"connection: close" in await reader.read()
        await closing
        assert await stuck.read() == b""
        for each in (writer, idle_writer, stuck_writer):
            each.close()

    loop_thread.call(scenario())
    assert gone == ["stuck"]


@pytest.mark.parametrize(
    ("target", "form"),
    [(b"http://a:1/v2?x=1", b"/v2?x=1"), (b"http://a", b"/"), (b"*", b"*"), (b"http://[", b"http://[")],
)
def test_absolute_targets_are_reduced(target: bytes, form: bytes) -> None:
    assert origin_form(target) == form
