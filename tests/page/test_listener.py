"""What the page's listener answers, and what it refuses: raw bytes over a real socket."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from sloop.page import listener as listener_module
from sloop.page.listener import EVENTS, PageAnswer, PageListener, PageRequest, Sessions, cookie_name

KEY = "sesame"
LARGE_BYTES = 2**20


async def echo(request: PageRequest) -> PageAnswer | None:
    """Events at `/events`; elsewhere what was asked, and with which key."""
    if request.path == "/events":
        return None
    if request.path == "/static/large":
        return PageAnswer(bytes(LARGE_BYTES))
    if request.path == "/raise":
        raise ValueError("a bug")
    return PageAnswer(f"{request.method} {request.path} {request.key} {len(request.body)}".encode())


@asynccontextmanager
async def listening(*keys: str, valid: set[str] | None = None) -> AsyncIterator[tuple[PageListener, int]]:
    sessions = Sessions((valid if valid is not None else set(keys)).__contains__, is_required=bool(keys))
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
            if origin is not None:  # who asks for the events of another page is refused as well
                assert (await asked(port, "GET /x", *lines))[0] == status

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
            assert (await asked(port, "GET /x", f"cookie: sloop-page-{port}=guess"))[0] == HTTPStatus.UNAUTHORIZED

    run(work)


def test_a_session_ends_with_its_key() -> None:
    valid = {KEY}
    sessions = Sessions(valid.__contains__, is_required=True)
    name = sessions.begin(KEY)
    assert sessions.key_of(f"sloop-page={name}", "localhost") == KEY
    valid.clear()
    assert sessions.key_of(f"sloop-page={name}", "localhost") is None


def test_the_pages_of_two_servers_of_a_host_have_their_own_sessions() -> None:
    first, second = (Sessions({KEY}.__contains__, is_required=True) for _ in range(2))
    hosts = "[::1]:8002", "[::1]:8003"
    cookies = "; ".join(
        f"{cookie_name(host)}={each.begin(KEY)}" for host, each in zip(hosts, (first, second), strict=True)
    )
    assert first.key_of(cookies, hosts[0]) == second.key_of(cookies, hosts[1]) == KEY
    assert first.key_of(cookies, hosts[1]) is None


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


ASKED = b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"GET //[ HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 400),
        (b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://[\r\n\r\n", 400),
        (b"GET /raise HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 500),
        (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\nGET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\na: " + b"b" * 2**17, 413),
        (b"DELETE / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 405),
        (ASKED + b"content-length: 20000000\r\n\r\n", 413),
        (ASKED + b"content-length: 99999999999999999999\r\n\r\n", 400),
        (ASKED + b"content-length: 9999999999\r\n\r\n", 413),
        (ASKED.replace(b"/ask", b"/key") + b"content-length: 5000\r\n\r\n", 413),
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


def test_without_a_session_no_body_is_awaited() -> None:
    async def work() -> None:
        async with listening(KEY) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASKED + b"content-length: 1000000\r\n\r\n")
            assert b"401" in await reader.readline()
            await leave(writer)

    run(work)


def test_the_bodies_of_all_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "BODIES_BYTES_MAX", 1_500)

    async def work() -> None:
        async with listening() as (listener, port):
            (_, first), (reader, second) = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            first.write(ASKED + b"content-length: 2000\r\n\r\n" + b"0" * 1_000)
            await until(lambda: listener.body_bytes == 1_000)
            second.write(ASKED + b"content-length: 1000\r\n\r\n" + b"0" * 1_000)
            assert b"503" in await reader.readline()
            await leave(first)
            await leave(second)
            await until(lambda: not listener.body_bytes)

    run(work)


def test_who_reads_no_answers_can_ask_nothing_more_and_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "REQUEST_S_MAX", 0.5)
    monkeypatch.setattr(listener_module, "SEND_S_MAX", 0.1)
    asked_times = 0

    async def work() -> None:
        nonlocal asked_times
        async with listening() as (listener, port):
            answer = listener.answer

            async def counted(request: PageRequest) -> PageAnswer | None:
                nonlocal asked_times
                asked_times += 1
                return await answer(request)

            listener.answer = counted
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            for _ in range(50):
                writer.write(b"GET /static/large HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                await asyncio.sleep(0.005)
            await until(lambda: not listener.connections)
            await leave(writer)
        assert 0 < asked_times < 25  # what fits into the buffers of two sockets

    run(work)


def test_a_viewer_goes_with_its_key() -> None:
    async def work() -> None:
        valid = {KEY}
        async with listening(KEY, valid=valid) as (listener, port):
            origin = f"origin: http://127.0.0.1:{port}"
            _, headers, _ = await asked(port, "POST /key", origin, body=KEY.encode())
            cookie = headers["set-cookie"].partition(";")[0]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /events HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncookie: {cookie}\r\n\r\n".encode())
            await reader.readuntil(b"\n\n")
            valid.clear()
            listener.tell(b"secret")
            with contextlib.suppress(ConnectionError):
                assert b"secret" not in await reader.read()
            assert not listener.viewers
            await leave(writer)

    run(work)


def test_a_viewer_may_take_its_time_for_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "UNSENT_BYTES_MAX", 2**16)

    async def work() -> None:
        async with listening() as (listener, port):
            listener.first_event = lambda: bytes(2**24)  # type: ignore[method-assign]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**10)
            writer.write(b"GET /events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            listener.tell(b"1")
            assert listener.viewers
            await leave(writer)

    run(work)
