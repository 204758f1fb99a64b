"""HTTP under the gateway: Granian, a Rust server, embedded in the gateway's own event loop through its RSGI interface.

Promises the rest of the gateway an `Exchange` for each complete request, to be answered once, now or later, and word of
a client that went away while it waited. Bodies are bounded as `bodies` says. HTTP itself (parsing, keep-alive,
pipelining, slow clients, HTTP/2) is Granian's business. Knows nothing of models, or of JSON beyond the error object.
Source: Granian's RSGI specification, version 1.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import unquote

import msgspec
from granian.constants import Interfaces
from granian.http import HTTP1Settings
from granian.rsgi import Scope
from granian.server.embed import Server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sloop.errors import MachineError
from sloop.serve.gateway.refusal import Refusal
from sloop.units import NS_PER_S

# == bodies: Bodies of requests: how large each may be, and how many bytes all together may be held at one time.
#
# Promises that the bytes of every request that is being read or waits for its answer are counted once, that what would
# go beyond the bounds is refused (413 for one body, 503 with `Retry-After` for all together) and counted. Shared by both
# protocols. Knows nothing of what is in a body, or of how long it may take.


ALL_BYTES_MAX: Final = 2**30
LINGER_S: Final = 2.0
"""How long a refused body is read and thrown away."""
WHOLE_BYTES_MAX: Final = 2**20
"""A body up to this size is read at once, its room taken before it comes. Larger ones take room as they arrive, or a
few clients that announce much and send nothing would fill the server."""


class Incoming(Protocol):
    """A request's body that has not been read."""

    async def __call__(self) -> bytes: ...
    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Bodies(Collector):
    """The room for bodies: `each_bytes_max` for one, `all_bytes_max` for all that are held at one time."""

    def __init__(self, each_bytes_max: int, all_bytes_max: int = ALL_BYTES_MAX) -> None:
        assert each_bytes_max <= all_bytes_max, f"one body of {each_bytes_max} bytes in a room for {all_bytes_max}"
        self.each_bytes_max, self.all_bytes_max = each_bytes_max, all_bytes_max
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        """Bodies that were refused, by the bound they broke."""

    def too_large(self, size: int, *, at_least: bool = False) -> Refusal:
        """The refusal of one body, which is counted here."""
        self.refused["each"] += 1
        return Refusal(
            413,
            f"the body is {'at least ' if at_least else ''}{size} bytes, over {self.each_bytes_max}",
            "send fewer rows, or binary tensors instead of JSON; the server's limit is its --body-bytes",
        )

    def full(self) -> Refusal:
        """The refusal of a body that has no room beside the others, which is counted here."""
        self.refused["all"] += 1
        return Refusal(
            503,
            f"rejected: the server holds {self.held_bytes} bytes of requests, and {self.all_bytes_max} is all it may",
            "try again in 1 s; the server's limit is its --bodies-bytes",
            retry_after_s=1,
        )

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        yield GaugeMetricFamily("sloop_body_bytes", "Bytes of requests held by the gateway.", value=self.held_bytes)
        refused = CounterMetricFamily(
            "sloop_bodies_refused", "Requests whose body had no room: too large, or too many at once.", labels=["bound"]
        )
        for bound in ("each", "all"):
            refused.add_metric([bound], self.refused[bound])
        yield refused


class Hold:
    """One request's part of the room, given back when the context ends."""

    __slots__ = ("_bodies", "size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def take(self, size: int) -> None:
        """Take room for `size` more bytes; a `Refusal` (503) where there is none."""
        bodies = self._bodies
        if bodies.held_bytes + size > bodies.all_bytes_max:
            raise bodies.full()
        bodies.held_bytes += size
        self.size += size

    def drop(self) -> None:
        """Give back what was taken."""
        self._bodies.held_bytes -= self.size
        self.size = 0

    def has_taken(self, size: int) -> bool:
        """Take room for a body that may be read at once; False, and nothing taken, for one that only `read` may read,
        or refuse.
        """
        bodies = self._bodies
        held_bytes = bodies.held_bytes + size
        if size > WHOLE_BYTES_MAX or size > bodies.each_bytes_max or held_bytes > bodies.all_bytes_max:
            return False
        bodies.held_bytes = held_bytes
        self.size += size
        return True

    async def read(self, incoming: Incoming, declared: int | None, *, asks_first: bool = False) -> bytes:
        """The body, of `declared` bytes where that is known. Raises a `Refusal`: 413 or 503.

        A sender that waits to be asked for its body (`asks_first`, HTTP's `Expect`) is refused at once.
        """
        if declared is None:
            return await self._gather(incoming)
        try:
            if declared > self._bodies.each_bytes_max:
                raise self._bodies.too_large(declared)
            if declared <= WHOLE_BYTES_MAX:
                self.take(declared)
        except Refusal:
            if not asks_first:
                await throw_away(incoming)
            raise
        return await (incoming() if declared <= WHOLE_BYTES_MAX else self._gather(incoming))

    async def _gather(self, incoming: AsyncIterable[bytes]) -> bytes:
        """The body that comes in parts, each of which takes its room."""
        parts: list[bytes] = []
        async with contextlib.aclosing(pass_on(incoming)) as stream:
            try:
                async for part in stream:
                    if self.size + len(part) > self._bodies.each_bytes_max:
                        raise self._bodies.too_large(self.size + len(part), at_least=True)
                    self.take(len(part))
                    parts.append(part)
            except Refusal:
                parts.clear()
                self.drop()
                await throw_away(stream)
                raise
        return b"".join(parts)


async def pass_on(incoming: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same parts, in a form that can be left and taken up again: Granian's own cannot."""
    async for part in incoming:
        yield part


async def throw_away(stream: AsyncIterable[bytes]) -> None:
    """Read on for a moment and forget what comes, or the sender would see an error of its own and not the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            async for _ in stream:
                pass


JSON: Final = "application/json"
BACKLOG: Final = 1024
HEAD_READ_MS_MAX: Final = 60_000
"""A client may take this long to send a request's head."""
SEND_S_MAX: Final = 60.0
"""A client may take this long to send a request's body."""
WATCH_S: Final = 0.1
"""A client is watched once its request has been here this long: watching costs as much as answering."""
START_S_MAX: Final = 5.0


class Wire(Incoming, Protocol):
    """What Granian gives us to read a request and answer it."""

    async def client_disconnect(self) -> None: ...
    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...


class Exchange:
    """One request and the duty to answer it once, by `reply`."""

    __slots__ = (
        "_answered",
        "_scope",
        "_watch",
        "_wire",
        "began_ns",
        "body",
        "headers",
        "is_open",
        "method",
        "on_gone",
        "path",
    )

    def __init__(self, scope: Scope, wire: Wire) -> None:
        self.began_ns = time.monotonic_ns()
        """When its head had arrived."""
        self._scope, self._wire = scope, wire
        self._answered: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.method = scope.method
        path = scope.path
        self.path = unquote(path) if "%" in path else path
        self.headers = scope.headers
        """Looked up by lower-case name: `headers.get("x-slo-ms")`."""
        self.body = b""
        self.is_open = True
        self.on_gone: Callable[[], None] | None = None
        """Called if the client goes away before the answer."""

    @property
    def query_string(self) -> str:
        """What follows the path's question mark."""
        return self._scope.query_string

    @property
    def age_ns(self) -> int:
        """Time since its head arrived."""
        return time.monotonic_ns() - self.began_ns

    def reply(
        self, status: int, body: bytes, *, content_type: str = JSON, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Answer. Does nothing when the client is gone."""
        if not self.is_open:
            return
        self.is_open = False
        self._wire.response_bytes(status, [("content-type", content_type), *headers], body)
        if self._answered is not None:
            self._answered.set_result(None)

    def reply_error(self, status: int, what: str, fix: str = "", *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Answer `{"error": …}`: what is wrong with its value, and the fix."""
        self.reply(status, error_body(what, fix), headers=headers)

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error, and the headers its status asks for."""
        headers: tuple[tuple[str, str], ...] = ()
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers = (("retry-after", str(max(1, refusal.retry_after_s))),)
        elif refusal.status == HTTPStatus.UNAUTHORIZED:
            headers = (("www-authenticate", "Bearer"),)
        self.reply_error(refusal.status, refusal.what, refusal.fix, headers=headers)

    def answered(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """To be awaited where it is still open: done when it is answered, or nobody waits for the answer."""
        self._answered = answered = loop.create_future()
        return answered

    def attend(self) -> None:
        """It has been here for a while: notice if the client goes away, or takes too long to send the body."""
        if self._answered is None:
            if self.is_open and self.age_ns > SEND_S_MAX * NS_PER_S:
                what = f"the request took more than {SEND_S_MAX:g} s to arrive"
                self.refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, what, "send it faster"))
        elif self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._notice())

    def close(self) -> None:
        """Nobody waits any more."""
        if self._watch is not None:
            self._watch.cancel()

    async def _notice(self) -> None:
        await self._wire.client_disconnect()
        if self.is_open and self._answered is not None:
            self.is_open = False
            self._answered.set_result(None)
            if self.on_gone is not None:
                self.on_gone()


def error_body(what: str, fix: str = "") -> bytes:
    """The protocol's error object; one string, because that is what its clients show."""
    return msgspec.json.encode({"error": f"{what}; help: {fix}" if fix else what})


class HttpServer:
    """A listening port. `answer` takes each complete request and must not raise; at most `requests_max` are inside."""

    def __init__(self, answer: Callable[[Exchange], None], *, bodies: Bodies, requests_max: int) -> None:
        self._answer = answer
        self._bodies = bodies
        self._requests_max = requests_max
        self._inside: dict[Exchange, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port in use, which is a free one where 0 was asked for. Raises `MachineError`."""
        port = free_port(host, port)
        self._server = Server(
            self,
            address=host,
            port=port,
            interface=Interfaces.RSGI,
            websockets=False,
            log_enabled=False,
            backlog=BACKLOG,
            backpressure=self._requests_max,
            http1_settings=HTTP1Settings(header_read_timeout=HEAD_READ_MS_MAX),
        )
        self._loop = loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._server.serve())
        await self._accepts(host, port)
        self._sweep(loop)
        return port

    async def close(self) -> None:
        """Accept nothing more and let go of every connection. Whoever still waits has been answered before."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None and self._serving is not None:
            self._server.stop()  # type: ignore[no-untyped-call]
            await self._serving

    async def __rsgi__(self, scope: Scope, wire: Wire) -> None:
        """Granian calls this for each request, as a task of its own."""
        loop, inside = self._loop, self._inside
        assert loop is not None
        exchange, hold = Exchange(scope, wire), Hold(self._bodies)
        inside[exchange] = None
        try:
            length = exchange.headers.get("content-length")
            if length is not None and hold.has_taken(int(length)):
                exchange.body = await wire()
            elif length is not None or "transfer-encoding" in exchange.headers or scope.http_version == "2":
                asks_first = "expect" in exchange.headers
                exchange.body = await hold.read(wire, None if length is None else int(length), asks_first=asks_first)
            if exchange.is_open:
                self._answer(exchange)
            if exchange.is_open:
                await exchange.answered(loop)
        except Refusal as refusal:
            exchange.refuse(refusal)
        finally:
            del inside[exchange]
            hold.drop()
            exchange.close()

    async def _accepts(self, host: str, port: int) -> None:
        """Wait until the port answers: Granian binds it on a thread of its own."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + START_S_MAX
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError as error:
                if loop.time() > give_up_s or (self._serving is not None and self._serving.done()):
                    raise refused_port(host, port, error) from error
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Attend to those that have been here for a while; they come in the order in which they began."""
        for exchange in list(self._inside):
            if exchange.age_ns < WATCH_S * NS_PER_S:
                break
            exchange.attend()
        self._sweeper = loop.call_later(WATCH_S, self._sweep, loop)


def free_port(host: str, port: int) -> int:
    """Check that a port can be had, choosing one for 0. Granian shares its port, so would not notice another server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise refused_port(host, port, error) from error
        return int(probe.getsockname()[1])


def refused_port(host: str, port: int, error: OSError) -> MachineError:
    """What to tell a user whose port cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return MachineError(
            f"port {port} on {host} is in use", help="stop the program that holds it, or choose another port"
        )
    return MachineError(
        f"cannot listen on {host}:{port}: {error.strerror or error}",
        help="choose an address of this machine and a port you may open (1024 and above without privileges)",
    )
