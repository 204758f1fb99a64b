"""What the page's listener answers, and what it refuses: raw bytes over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import msgspec
import pytest

from sloop.page import listener as listener_module
from sloop.page.listener import PageListener, Sessions, cookie_name
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.listener import listen

KEY = "sesame"
FIRST = b'"first"'


async def echo(exchange: Exchange, key: str) -> None:
    """What was asked, and with which key."""
    if exchange.path == "/raise":
        raise ValueError("a bug")
    exchange.reply(200, f"{exchange.method} {exchange.path} {key} {len(exchange.body)}".encode())


@asynccontextmanager
async def listening(*keys: str, valid: set[str] | None = None) -> AsyncIterator[tuple[PageListener, int]]:
    sessions = Sessions((valid if valid is not None else set(keys)).__contains__, is_required=bool(keys))
    listener = PageListener(echo, lambda: FIRST, sessions, ("lab.example",))
    sock = listen("127.0.0.1", 0)
    port = sock.getsockname()[1]
    listener.start(sock)
    try:
        yield listener, port
    finally:
        await listener.server.close(0)


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


async def told(port: int, after: object, *lines: str) -> tuple[int, list[object]]:
    """The number of the last event, and the events that a viewer gets who has those up to `after`."""
    _, _, body = await asked(port, f"GET /events?after={after}", *lines)
    answer = msgspec.json.decode(body)
    return answer["number"], answer["events"]


def test_viewers_get_the_picture_and_then_each_event() -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            number, events = await told(port, "")
            assert events == ["first"]
            waiting = asyncio.create_task(told(port, number))
            done, _ = await asyncio.wait((waiting,), timeout=0.05)
            assert not done, "there is nothing new"
            listener.tell(b"1")
            assert await waiting == (number + 1, [1])
            listener.tell(b"2")
            listener.tell(b"3")
            assert await told(port, number) == (number + 3, [1, 2, 3])
            assert await told(port, number + 2) == (number + 3, [3])

    run(work)


@pytest.mark.parametrize("after", ["", "-1", "1", "nan", "9" * 30])
def test_a_viewer_without_the_last_events_is_told_everything(after: str) -> None:
    async def work() -> None:
        async with listening() as (listener, port):
            for event in range(listener_module.EVENTS_KEPT + 1):
                listener.tell(b"%d" % event)
            number, events = await told(port, after)
            assert events == ["first"]
            assert (await told(port, number - listener_module.EVENTS_KEPT))[1][0] == 1, "the oldest that is kept"
            assert await told(port, number - listener_module.EVENTS_KEPT - 1) == (number, ["first"])

    run(work)


ASKED = b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"POST /ask HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: http://[\r\n\r\n", 403),
        (b"GET /raise HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 500),
        (b"DELETE / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", 405),
        (ASKED + b"content-length: 20000000\r\n\r\n", 413),
        (ASKED.replace(b"/ask", b"/key") + b"content-length: 5000\r\n\r\n" + bytes(5000), 413),
        (ASKED.replace(b"/ask", b"/key") + b"transfer-encoding: chunked\r\n\r\n", 413),
    ],
)
def test_what_is_no_request_of_a_browser_is_refused(said: bytes, status: int) -> None:
    """What no server of an edge takes is in tests/serve/edge."""

    async def work() -> None:
        async with listening() as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            found = await reader.readline()
            writer.close()
            assert found.split()[1] == str(status).encode()

    run(work)


def test_without_a_session_no_body_is_awaited() -> None:
    async def work() -> None:
        async with listening(KEY) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASKED + b"content-length: 1000000\r\n\r\n")
            assert b"401" in await reader.readline()
            writer.close()

    run(work)


def test_a_viewer_goes_with_its_key() -> None:
    async def work() -> None:
        valid = {KEY}
        async with listening(KEY, valid=valid) as (listener, port):
            origin = f"origin: http://127.0.0.1:{port}"
            _, headers, _ = await asked(port, "POST /key", origin, body=KEY.encode())
            cookie = f"cookie: {headers['set-cookie'].partition(';')[0]}"
            number, _ = await told(port, "", cookie)
            waiting = asyncio.create_task(asked(port, f"GET /events?after={number}", cookie))
            await asyncio.wait((waiting,), timeout=0.05)
            valid.clear()
            listener.tell(b"secret")
            status, _, body = await waiting
            assert status == HTTPStatus.UNAUTHORIZED
            assert b"secret" not in body

    run(work)
