"""Answers browsers over HTTP/1.1: the page's files, the events of a run, and questions.

Everything has a bound: connections, the bytes of a request, the time for it, what waits to be sent to a slow viewer.
Only requests that name this server by its address get an answer (`Host`), so that no foreign page can reach it through
a name that points here, and questions must come from the page itself (`Origin`). If the server has keys, everything but
the form that asks for one needs a session, which a cookie names that scripts cannot read.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from secrets import token_urlsafe
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httptools

CONNECTIONS_MAX: Final = 256
BODY_BYTES_MAX: Final = 8 * 2**20
"""Of a question: an image as JSON fits."""
REQUEST_S_MAX: Final = 10.0
"""For a request to arrive, and between two requests of one connection."""
UNSENT_BYTES_MAX: Final = 4 * 2**20
"""Of events: a viewer that reads more slowly is disconnected, and comes again."""
TOO_LARGE: Final = HTTPStatus(413)
SESSIONS_MAX: Final = 1_000
COOKIE: Final = "sloop-page"
TEXT, JSON, EVENTS = "text/plain; charset=utf-8", "application/json", "text/event-stream"
SAFETY: Final = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class PageRequest(NamedTuple):
    """A request of a browser."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    key: str
    """The API key with which its session began; empty if the server has none."""


class PageAnswer(NamedTuple):
    """What a request is answered with."""

    body: bytes
    kind: str = JSON
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = {}


class Sessions:
    """Who has shown a key. `accepts` says whether a key is right; without keys, `is_required` is false."""

    def __init__(self, accepts: Callable[[str], bool], *, is_required: bool) -> None:
        self._accepts, self.is_required = accepts, is_required
        self._keys: dict[str, str] = {}
        """By session, the oldest first."""

    def begin(self, key: str) -> str | None:
        """The name of a new session; None for a wrong key."""
        if not self._accepts(key):
            return None
        if len(self._keys) >= SESSIONS_MAX:
            del self._keys[next(iter(self._keys))]
        name = token_urlsafe(32)
        self._keys[name] = key
        return name

    def key_of(self, cookies: str) -> str | None:
        """The key of the session that a `Cookie` header names, if the key is still right; None without a session."""
        with contextlib.suppress(CookieError):
            morsel = SimpleCookie(cookies).get(COOKIE)
            key = self._keys.get(morsel.value) if morsel is not None else None
            if key is not None and self._accepts(key):
                return key
        return None


Answer = Callable[[PageRequest], Awaitable[PageAnswer | None]]
"""Answers a request; None for one that gets the events of the run from now on."""


class PageListener:
    """Serves one listening socket. `answer` answers what is allowed; `hosts` are names by which browsers may call this
    server, besides its addresses."""

    def __init__(self, answer: Answer, sessions: Sessions, hosts: Sequence[str] = ()) -> None:
        self.answer, self.sessions = answer, sessions
        self.hosts = frozenset({"localhost", *hosts})
        self.viewers: set[_Connection] = set()
        """Who gets events."""
        self.connections: set[_Connection] = set()
        self._first: Callable[[], bytes] = bytes

    async def start(self, listening: socket.socket, first: Callable[[], bytes]) -> asyncio.Server:
        """Accept connections. `first` returns the first event of a viewer."""
        self._first = first
        return await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=listening)

    def tell(self, event: bytes) -> None:
        """Send an event to all viewers."""
        for viewer in list(self.viewers):
            viewer.send(event)

    def first_event(self) -> bytes:
        """What a viewer that has just come is told."""
        return self._first()

    def is_called(self, host: str) -> bool:
        """Whether a `Host` header names this server: by an address, which no foreign site can let point here, or by a
        known name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name in self.hosts
        return True


class _Connection(asyncio.Protocol):
    """One connection of a browser."""

    def __init__(self, listener: PageListener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answering: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        """Await the next request."""
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers, self._size = b"", dict[str, str](), 0
        self._body = bytearray()

    # Of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._listener.connections) >= CONNECTIONS_MAX:
            transport.abort()
            return
        self._listener.connections.add(self)
        self._limit()

    def data_received(self, data: bytes) -> None:
        if self in self._listener.viewers or self._answering is not None:
            self._close()  # nobody has anything to say before the answer
            return
        self._size += len(data)
        try:
            if self._size > BODY_BYTES_MAX:
                self._refuse(TOO_LARGE, f"the request has more than {BODY_BYTES_MAX} bytes")
            else:
                self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._close()
        except httptools.HttpParserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"this is not HTTP: {error}")

    def connection_lost(self, _: Exception | None) -> None:
        self._listener.connections.discard(self)
        self._listener.viewers.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._answering is not None:
            self._answering.cancel()

    # Of httptools

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers are there."""
        length = self._headers.get("content-length", "0")
        if len(length) > 9 or int(length) > BODY_BYTES_MAX:
            self._refuse(TOO_LARGE, f"a body of {length:.20} bytes is larger than {BODY_BYTES_MAX}")

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._answering is None and self._transport is not None and not self._transport.is_closing():
            self._answering = asyncio.get_running_loop().create_task(self._answer())

    # Answers

    async def _answer(self) -> None:
        """Answer the request, and await the next one."""
        if self._timer is not None:
            self._timer.cancel()
        listener, method = self._listener, self._parser.get_method().decode("latin-1")
        path = urlsplit(self._url.decode("latin-1")).path
        host, origin = self._headers.get("host", ""), self._headers.get("origin")
        if not listener.is_called(host):
            self._refuse(HTTPStatus.FORBIDDEN, "the page is not known by this name; open it by its address")
            return
        if method not in ("GET", "POST"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the page answers GET and POST")
            return
        if method == "POST" and (origin is None or urlsplit(origin).netloc != host):
            self._refuse(HTTPStatus.FORBIDDEN, "only the page itself may ask")
            return
        sessions = listener.sessions
        if path == "/key" and method == "POST":
            self._begin_session()
            return
        key = sessions.key_of(self._headers.get("cookie", "")) if sessions.is_required else ""
        if key is None and not is_public(path):
            self._write(PageAnswer(b'{"error": "this server asks for a key"}', status=HTTPStatus.UNAUTHORIZED))
            return
        request = PageRequest(method, path, self._headers, bytes(self._body), key or "")
        answer = await listener.answer(request)
        if answer is not None:
            self._write(answer)
        elif self._transport is not None:
            self._transport.write(_head(HTTPStatus.OK, EVENTS, None, {"connection": "close"}))
            listener.viewers.add(self)
            self.send(listener.first_event())

    def _begin_session(self) -> None:
        name = self._listener.sessions.begin(self._body.decode("utf-8", "replace"))
        if name is None:
            self._write(PageAnswer(b'{"error": "the key is wrong"}', status=HTTPStatus.UNAUTHORIZED))
            return
        cookie = f"{COOKIE}={name}; HttpOnly; SameSite=Strict; Path=/"
        self._write(PageAnswer(b"{}", headers={"set-cookie": cookie}))

    def end(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, event: bytes) -> None:
        """Send an event, or disconnect a viewer that does not read."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._transport.abort()
            return
        self._transport.write(b"data: " + event + b"\n\n")

    def _write(self, answer: PageAnswer) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(_head(answer.status, answer.kind, len(answer.body), answer.headers) + answer.body)
        is_over = not self._parser.should_keep_alive()
        self._answering = None
        self._begin()
        if is_over:
            self._close()
        else:
            self._limit()

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = why.encode()
            self._transport.write(_head(status, TEXT, len(body), {"connection": "close"}) + body)
            self._close()

    def _limit(self) -> None:
        """End the connection if the next request is not whole in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REQUEST_S_MAX, self._close)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def is_public(path: str) -> bool:
    """Whether a path needs no session: the page's own files, which are the same everywhere."""
    return path == "/" or path.startswith("/static/")


def _head(status: HTTPStatus, kind: str, size: int | None, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"content-type: {kind}"]
    if size is not None:
        lines.append(f"content-length: {size}")
    lines += [f"{name}: {value}" for name, value in {**SAFETY, **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
