"""Answers browsers over HTTP/1.1: the page's files, the events of a run, and questions.

Everything has a bound: connections, the bytes of a request, the time for it, what waits to be sent to a slow viewer.
Only requests that name this server by its address get an answer (`Host`), so that no foreign page can reach it through
a name that points here, and questions must come from the page itself (`Origin`). If the server has keys, everything but
the form that asks for one needs a session, which a cookie names that scripts cannot read.
"""

import asyncio
import contextlib
import logging
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
HEAD_BYTES_MAX: Final = 2**16
KEY_BYTES_MAX: Final = 2**12
BODY_BYTES_MAX: Final = 8 * 2**20
"""Of a question: an image as JSON fits."""
BODIES_BYTES_MAX: Final = 64 * 2**20
"""Of all connections together."""
REQUEST_S_MAX: Final = 10.0
"""For a request to arrive, and between two requests of one connection."""
SEND_S_MAX: Final = 60.0
"""For what is unsent when a connection is closed."""
UNSENT_BYTES_MAX: Final = 4 * 2**20
"""Of events, besides the first: a viewer that reads more slowly is disconnected, and comes again."""
TOO_LARGE: Final = HTTPStatus(413)
SESSIONS_MAX: Final = 1_000
COOKIE: Final = "sloop-page"
TEXT, JSON, EVENTS = "text/plain; charset=utf-8", "application/json", "text/event-stream"
_log: Final = logging.getLogger("sloop.page")
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
        self.accepts, self.is_required = accepts, is_required
        self._keys: dict[str, str] = {}
        """By session, the oldest first."""

    def begin(self, key: str) -> str | None:
        """The name of a new session; None for a wrong key."""
        if not self.accepts(key):
            return None
        if len(self._keys) >= SESSIONS_MAX:
            del self._keys[next(iter(self._keys))]
        name = token_urlsafe(32)
        self._keys[name] = key
        return name

    def key_of(self, cookies: str, host: str) -> str | None:
        """The key of the session that a `Cookie` header names, if the key is still right; None without a session."""
        with contextlib.suppress(CookieError):
            morsel = SimpleCookie(cookies).get(cookie_name(host))
            key = self._keys.get(morsel.value) if morsel is not None else None
            if key is not None and self.accepts(key):
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
        self.body_bytes = 0
        """Of all requests that arrive or are being answered."""
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
        self._body = bytearray()
        self._unsent_bytes_max = UNSENT_BYTES_MAX
        self._begin()

    def _begin(self) -> None:
        """Await the next request."""
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers, self._size = b"", dict[str, str](), 0
        self._method = self._path = self._key = ""
        self._has_head = False
        self._forget_body()

    def _forget_body(self) -> None:
        self._listener.body_bytes -= len(self._body)
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
                if self._size > HEAD_BYTES_MAX and not self._has_head:
                    self._refuse(TOO_LARGE, f"the headers have more than {HEAD_BYTES_MAX} bytes")
        except httptools.HttpParserUpgrade:
            self._close()
        except httptools.HttpParserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"this is not HTTP: {error}")

    def pause_writing(self) -> None:
        if self._transport is not None and self not in self._listener.viewers:
            self._transport.pause_reading()  # who takes no answer may ask nothing more

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self._forget_body()
        self._listener.connections.discard(self)
        self._listener.viewers.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._answering is not None:
            self._answering.cancel()

    # Of httptools

    def on_message_begin(self) -> None:
        """A request begins. ValueError if the one before is not answered yet."""
        if self._answering is not None:
            raise ValueError("a request before the answer to the last one")

    def on_url(self, url: bytes) -> None:
        """A part of the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All headers are there. What may not be asked is refused before its body comes."""
        self._has_head = True
        self._method = self._parser.get_method().decode("latin-1")
        try:
            self._path = urlsplit(self._url.decode("latin-1")).path
            why = self._forbidden()
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"this is no address: {error}")
            return
        length = self._headers.get("content-length", "0")
        if why:
            self._refuse(HTTPStatus.FORBIDDEN, why)
        elif self._method not in ("GET", "POST"):
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the page answers GET and POST")
        elif len(length) > 9 or int(length) > self._body_bytes_max:
            self._refuse(TOO_LARGE, f"a body of {length:.20} bytes is larger than {self._body_bytes_max}")
        elif not self._asks_for_session and not is_public(self._path):
            self._check_session()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._transport is None or self._transport.is_closing():
            return
        listener = self._listener
        if len(self._body) + len(body) > self._body_bytes_max:
            self._refuse(TOO_LARGE, f"the body has more than {self._body_bytes_max} bytes")
        elif listener.body_bytes + len(body) > BODIES_BYTES_MAX:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "other requests take all memory; try again in a moment")
        else:
            listener.body_bytes += len(body)
            self._body += body

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._answering is None and self._transport is not None and not self._transport.is_closing():
            self._answering = asyncio.get_running_loop().create_task(self._answer())

    # What may be asked

    @property
    def _asks_for_session(self) -> bool:
        return self._method == "POST" and self._path == "/key"

    @property
    def _body_bytes_max(self) -> int:
        return KEY_BYTES_MAX if self._asks_for_session else BODY_BYTES_MAX

    @property
    def _host(self) -> str:
        return self._headers.get("host", "")

    def _forbidden(self) -> str:
        """Why this is not the page's request; empty if it is. ValueError for an origin that is no URL."""
        origin = self._headers.get("origin")
        if not self._listener.is_called(self._host):
            return "the page is not known by this name; open it by its address"
        if self._method == "POST" if origin is None else urlsplit(origin).netloc != self._host:
            return "only the page itself may ask"
        return ""

    def _check_session(self) -> None:
        sessions = self._listener.sessions
        if not sessions.is_required:
            return
        key = sessions.key_of(self._headers.get("cookie", ""), self._host)
        if key is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, '{"error": "this server asks for a key"}', JSON)
        else:
            self._key = key

    # Answers

    async def _answer(self) -> None:
        """Answer the request, and await the next one."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asks_for_session:
            self._begin_session()
            return
        request = PageRequest(self._method, self._path, self._headers, bytes(self._body), self._key)
        try:
            answer = await self._listener.answer(request)
        except Exception:
            _log.exception("the page cannot answer %s %.200s", self._method, self._path)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "this failed; the server's messages say why")
            return
        if answer is not None:
            self._write(answer)
        elif self._transport is not None:
            self._transport.write(_head(HTTPStatus.OK, EVENTS, None, {"connection": "close"}))
            self._listener.viewers.add(self)
            self.send(self._listener.first_event())
            self._unsent_bytes_max += self._transport.get_write_buffer_size()

    def _begin_session(self) -> None:
        name = self._listener.sessions.begin(self._body.decode("utf-8", "replace"))
        if name is None:
            self._write(PageAnswer(b'{"error": "the key is wrong"}', status=HTTPStatus.UNAUTHORIZED))
            return
        cookie = f"{cookie_name(self._host)}={name}; HttpOnly; SameSite=Strict; Path=/"
        self._write(PageAnswer(b"{}", headers={"set-cookie": cookie}))

    def end(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def may_look(self) -> bool:
        """Whether the key of its session is still right."""
        sessions = self._listener.sessions
        return not sessions.is_required or sessions.accepts(self._key)

    def send(self, event: bytes) -> None:
        """Send an event, or disconnect a viewer that does not read, or whose key is no longer right."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._unsent_bytes_max or not self.may_look:
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

    def _refuse(self, status: HTTPStatus, why: str, kind: str = TEXT) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = why.encode()
            self._transport.write(_head(status, kind, len(body), {"connection": "close"}) + body)
            self._close()

    def _limit(self) -> None:
        """End the connection if the next request is not whole in time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REQUEST_S_MAX, self._close)

    def _close(self) -> None:
        """Close the connection when everything is sent, but do not wait for ever for one who takes nothing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(SEND_S_MAX, self.end)


def cookie_name(host: str) -> str:
    """The cookie of the page at this host and port. Browsers send a host's cookies to all of its ports, so two pages
    with one name would end each other's sessions."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isdecimal() else COOKIE


def is_public(path: str) -> bool:
    """Whether a path needs no session: the page's own files, which are the same everywhere."""
    return path == "/" or path.startswith("/static/")


def _head(status: HTTPStatus, kind: str, size: int | None, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"content-type: {kind}"]
    if size is not None:
        lines.append(f"content-length: {size}")
    lines += [f"{name}: {value}" for name, value in {**SAFETY, **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
