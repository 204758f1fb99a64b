"""What the page's listener answers, and what it refuses: raw bytes over a real socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from sloop.page import listener as listener_module
from sloop.page.listener import EVENTS, PageAnswer, PageListener, PageRequest, Sessions

KEY = "sesame"


async def echo(request: PageRequest) -> PageAnswer | None:
    """Events at `/events`; elsewhere what was asked, and with which key."""
    if request.path == "/events":
        return None
    return PageAnswer(f"{request.method} {request.path} {request.key} {len(request.body)}".encode())


@asynccontextmanager
async def listening(key: str = "") -> AsyncIterator[tuple[PageListener, int]]:
    sessions = Sessions(lambda given: given == key, is_required=bool(key))
    listener = PageListener(echo, sessions, ("lab.example",))
    server = await listener.start(socket.create_server(("127.0.0.1", 0)), lambda: b'"first"')
    try:
        yield listener, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(listener.connections):
            connection.end()
        await server.wait_closed()


async def asked(
    port: int, *lines: str, body: bytes = b"", host: str = "127.0.0.1"
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with these lines, the first of them its method and path; its status, headers and body."""
    head = [f"{lines[0]} HTTP/1.1", f"host: {host}:{port}", *lines[1:], "connection: close"]
    if body:
        head.append(f"content-length: {len(body)}")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    said = await reader.read()
    writer.close()
    await writer.wait_closed()
    first, *fields = said.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    headers = dict(field.split(": ", 1) for field in fields)
    return int(first.split()[1]), headers, said.partition(b"\r\n\r\n")[2]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110  # nothing tells
            await asyncio.sleep(0.01)


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "lab.example", "10.1.2.3"])
def test_the_page_answers_under_its_addresses_and_known_names(host: str) -> None:
    async def work() -> None:
        async with listening() as (_, port):
            status, headers, body = await asked(port, "GET /a?b=c", host=host)
            assert (status, body) == (200, b"GET /a  0")
            assert headers["x-content-type-options"] == "nosniff"

    run(work)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "[", ""])
def test_a_foreign_name_that_points_here_gets_nothing(host: str) -> None:
    async def work() -> None:
        async with listening() as (_, port):
            status, _, body = await asked(port, "GET /", host=host)
            assert status == HTTPStatus.FORBIDDEN
            assert b"address" in body

    run(work)


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://127.0.0.1:{port}", 200), ("http://evil.example", 403), ("null", 403), ("", 403), (None, 403)],
)
def test_only_the_page_itself_may_ask(origin: str | None, status: int) -> None:
    async def work() -> None:
        async with listening() as (_, port):
            lines = [] if origin is None else [f"origin: {origin.format(port=port)}"]
            found, _, _ = await asked(port, "POST /ask", *lines, body=b"{}")
            assert found == status

    run(work)


def test_without_the_key_there_are_files_only_and_a_session_opens_the_rest() -> None:
    async def work() -> None:
        async with listening(KEY) as (_, port):
            origin = f"origin: http://127.0.0.1:{port}"
            assert [(await asked(port, f"GET {path}"))[0] for path in ("/", "/static/a.js", "/events", "/x")] == [
                *(200, 200, 401, 401)
            ]
            assert (await asked(port, "POST /key", origin, body=b"wrong"))[0] == HTTPStatus.UNAUTHORIZED
            assert (await asked(port, "POST /key", body=KEY.encode()))[0] == HTTPStatus.FORBIDDEN
            status, headers, _ = await asked(port, "POST /key", origin, body=KEY.encode())
            assert status == HTTPStatus.OK
            assert "HttpOnly; SameSite=Strict" in headers["set-cookie"]
            assert KEY not in headers["set-cookie"]
            cookie = f"cookie: {headers['set-cookie'].partition(';')[0]}"
            assert (await asked(port, "GET /x", cookie))[2] == f"GET /x {KEY} 0".encode()
            assert (await asked(port, "GET /x", "cookie: sloop-page=guess"))[0] == HTTPStatus.UNAUTHORIZED

    run(work)


def test_a_session_ends_with_its_key() -> None:
    valid = {KEY}
    sessions = Sessions(valid.__contains__, is_required=True)
    name = sessions.begin(KEY)
    assert sessions.key_of(f"sloop-page={name}") == KEY
    valid.clear()
    assert sessions.key_of(f"sloop-page={name}") is None


def test_viewers_get_the_picture_and_then_each_event() -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /events HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert EVENTS.encode() in head
            assert await reader.readuntil(b"\n\n") == b'data: "first"\n\n'
            listener.tell(b"1")
            assert await reader.readuntil(b"\n\n") == b"data: 1\n\n"
            await leave(writer)
            await until(lambda: not listener.viewers)

    run(work)


def test_a_viewer_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "UNSENT_BYTES_MAX", 2**16)

    async def work() -> None:
        async with listening() as (listener, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            writer.write(f"GET /events HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
            for _ in range(2_000):
                listener.tell(b"0" * 2**14)
                await asyncio.sleep(0)
                if not listener.viewers:
                    break
            assert not listener.viewers
            await leave(writer)

    run(work)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"DELETE / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 405),
        (b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 20000000\r\n\r\n", 413),
        (b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 99999999999999999999\r\n\r\n", 400),
        (b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9999999999\r\n\r\n", 413),
    ],
)
def test_what_is_no_request_of_a_browser_is_refused(said: bytes, status: int) -> None:
    async def work() -> None:
        async with listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            found = await reader.readline()
            await leave(writer)
            assert found.split()[1] == str(status).encode()

    run(work)


def test_a_request_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "REQUEST_S_MAX", 0.05)

    async def work() -> None:
        async with listening() as (listener, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HT")
            assert await reader.read() == b""
            await leave(writer)
            assert not listener.connections

    run(work)


def test_connections_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "CONNECTIONS_MAX", 2)

    async def work() -> None:
        async with listening() as (listener, port):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            await until(lambda: len(listener.connections) == 2)
            ends = [await reader.read() for reader, _ in opened[2:]]
            assert ends == [b""] * 3
            for _, writer in opened:
                await leave(writer)

    run(work)
