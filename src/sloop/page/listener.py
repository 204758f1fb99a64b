"""Answers browsers over HTTP/1.1: the page's files, the events of a run, and questions.

The server of the edges (`sloop.serve.edge.http`) reads the requests, and bounds what a client may cost. This
module decides which requests are answered: only those that name this server by its address (`Host`), so that no foreign
page can reach it through a name that points here, and questions must come from the page itself (`Origin`). If the
server has keys, everything but the form that asks for one needs a session, which a cookie names that scripts cannot
read.

A viewer asks for the events that follow the last one that it has, and is answered when there are some.
"""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from itertools import islice
from secrets import token_urlsafe
from typing import Final
from urllib.parse import parse_qs, urlsplit

from sloop.app.limits import ServerLimits
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.http import HttpServer
from sloop.serve.edge.refusal import Refusal

CONNECTIONS_MAX: Final = 256
KEY_BYTES_MAX: Final = 2**12
BODIES_BYTES_MAX: Final = 64 * 2**20
"""Of the bodies of all requests together."""
IDLE_S_MAX: Final = 10.0
"""Between two requests of one connection."""
EVENTS_KEPT: Final = 8
"""The last events, for viewers that ask for those after one of them; others get the whole picture again."""
SESSIONS_MAX: Final = 1_000
COOKIE: Final = "sloop-page"
EVENTS: Final = "/events"
SAFETY: Final = (
    ("cache-control", "no-store"),
    ("cross-origin-resource-policy", "same-origin"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
)


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


Answer = Callable[[Exchange, str], Awaitable[None]]
"""Answers a request, or raises a `Refusal`. Its second argument is the API key with which the session began; empty if
the server has no keys."""


class PageListener:
    """Serves one listening socket. `answer` answers all allowed requests except those for events. `first` makes the
    event with the whole picture. `hosts` are names by which browsers may call this server, besides its addresses."""

    def __init__(
        self,
        answer: Answer,
        first: Callable[[], bytes],
        sessions: Sessions,
        hosts: Sequence[str] = (),
        limits: ServerLimits = ServerLimits(),
    ) -> None:
        self._answer_allowed, self._first, self.sessions = answer, first, sessions
        self._hosts = frozenset({"localhost", *hosts})
        self.server = HttpServer(
            lambda exchange: exchange.answer_later(self._answer(exchange)),
            bodies=BodyMemory(limits.json_body_bytes, BODIES_BYTES_MAX, limits.json_body_bytes),
            limits=replace(
                limits, connections=CONNECTIONS_MAX, connections_each=CONNECTIONS_MAX, requests=0, idle_s=IDLE_S_MAX
            ),
            headers=SAFETY,
            authorise=self._authorise,
        )
        self._told = deque[bytes](maxlen=EVENTS_KEPT)
        self._number = time.time_ns() // 10**6
        """Of the last event. It begins with the time in ms, so that the numbers of an earlier process are not taken for
        numbers of this one."""
        self._next = asyncio.Event()

    def start(self, listening: socket.socket) -> None:
        """Accept connections. Call it in the event loop."""
        self.server.start(listening)

    def tell(self, event: bytes) -> None:
        """Send an event to all viewers."""
        self._told.append(event)
        self._number += 1
        self._next.set()
        self._next = asyncio.Event()

    # What may be asked

    def _authorise(self, exchange: Exchange) -> bool:
        """Whether the request has a session. Raises a `Refusal` for what may not be asked, before its body comes."""
        headers = exchange.headers
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_called(host):
            raise Refusal(HTTPStatus.FORBIDDEN, "the page is not known by this name", "open it by its address")
        if exchange.method == "POST" if origin is None else _place_of(origin) != host:
            raise Refusal(HTTPStatus.FORBIDDEN, "only the page itself may ask")
        if exchange.method not in ("GET", "POST"):
            raise Refusal(HTTPStatus.METHOD_NOT_ALLOWED, f"{exchange.method} is not for the page", "use GET or POST")
        if _asks_for_session(exchange):
            if exchange.left_bytes > KEY_BYTES_MAX or "transfer-encoding" in headers:
                raise Refusal(413, f"a key has at most {KEY_BYTES_MAX} bytes", "send it with its content-length")
            return False
        if is_public(exchange.path) or not self.sessions.is_required:
            return False
        self._key_of(exchange)
        return True

    def _is_called(self, host: str) -> bool:
        """Whether a `Host` header names this server: by an address, which no foreign site can let point here, or by a
        known name."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ip_address(name)
        except ValueError:
            return name in self._hosts
        return True

    def _key_of(self, exchange: Exchange) -> str:
        """The key of the request's session; empty if the server has none. Raises a `Refusal` without a session."""
        if not self.sessions.is_required:
            return ""
        headers = exchange.headers
        key = self.sessions.key_of(headers.get("cookie", ""), headers.get("host", ""))
        if key is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "this server asks for a key", "open the page and give it")
        return key

    # Answers

    async def _answer(self, exchange: Exchange) -> None:
        if _asks_for_session(exchange):
            self._begin_session(exchange)
        elif is_public(exchange.path):
            await self._answer_allowed(exchange, "")
        elif exchange.path == EVENTS:
            await self._tell_next(exchange)
        else:
            await self._answer_allowed(exchange, self._key_of(exchange))

    def _begin_session(self, exchange: Exchange) -> None:
        name = self.sessions.begin(exchange.body.decode("utf-8", "replace"))
        if name is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "the key is wrong")
        cookie = f"{cookie_name(exchange.headers.get('host', ''))}={name}; HttpOnly; SameSite=Strict; Path=/"
        exchange.reply(200, b"{}", headers=(("set-cookie", cookie),))

    async def _tell_next(self, exchange: Exchange) -> None:
        """Answer with the events after the one that the viewer names, or with one that has the whole picture."""
        after = "".join(parse_qs(exchange.query_string).get("after", ()))
        if after == str(self._number):
            await self._next.wait()
            self._key_of(exchange)  # the key may have been revoked meanwhile
        behind = self._number - int(after) if after.isdecimal() and len(after) < 20 else 0
        is_kept = 0 < behind <= len(self._told)
        events = islice(self._told, len(self._told) - behind, None) if is_kept else (self._first(),)
        exchange.reply(200, b'{"number":%d,"events":[%b]}' % (self._number, b",".join(events)))


def cookie_name(host: str) -> str:
    """The cookie of the page at this host and port. Browsers send a host's cookies to all of its ports, so two pages
    with one name would end each other's sessions."""
    port = host.rpartition(":")[2]
    return f"{COOKIE}-{port}" if port.isdecimal() else COOKIE


def is_public(path: str) -> bool:
    """Whether a path needs no session: the page's own files, which are the same everywhere."""
    return path == "/" or path.startswith("/static/")


def _asks_for_session(exchange: Exchange) -> bool:
    return exchange.method == "POST" and exchange.path == "/key"


def _place_of(origin: str) -> str | None:
    """The host and port of an origin; None for what is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
