"""The HTTP server: Granian, a Rust server, embedded in the gateway's event loop through its RSGI interface (version 1).

The rest of the gateway receives an `Exchange` for each complete request, answers it once, now or later, and learns when
a client disconnects. The size of each body, and of all bodies together, is limited. Granian handles parsing,
keep-alive, pipelining, slow clients and HTTP/2.
"""

import asyncio
import contextlib
import errno
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import unquote

import msgspec
from granian.constants import Interfaces
from granian.http import HTTP1Settings
from granian.rsgi import Scope
from granian.server.embed import Server

from sloop.errors import MachineError
from sloop.serve.gateway.refusal import Refusal
from sloop.text import counted
from sloop.units import NS_PER_S

ALL_BYTES_MAX: Final = 2**30
MODELS: Final = "/v2/models/"
INFER: Final = "/infer"
LINGER_S: Final = 2.0
"""Seconds to read and discard a rejected body."""
WHOLE_BYTES_MAX: Final = 2**20
"""A body up to this size is read at once, and its memory is reserved before it arrives. Larger bodies reserve memory as
they arrive; otherwise a few clients that announce much and send nothing could use up the limit."""


class Incoming(Protocol):
    """The body of a request, not yet read."""

    async def __call__(self) -> bytes: ...
    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Quota:
    """Limits the open requests of one model and the bytes of their bodies. 0 stands for no limit."""

    __slots__ = ("bytes_max", "held_bytes", "model", "refused", "requests", "requests_max")

    def __init__(self, model: str, requests_max: int, bytes_max: int) -> None:
        self.model, self.requests_max, self.bytes_max = model, requests_max, bytes_max
        self.requests = self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        """The number of refused requests, by the limit they exceeded."""

    def has_room(self, requests: int, size: int) -> bool:
        """Whether so many more requests and bytes of bodies stay within the limits."""
        if self.requests_max and self.requests + requests > self.requests_max:
            return False
        return not self.bytes_max or self.held_bytes + size <= self.bytes_max

    def full(self, held_bytes: int, size: int) -> Refusal:
        """Count and return the refusal of a request that holds `held_bytes` and needs `size` more."""
        is_large = self.bytes_max and self.held_bytes + size > self.bytes_max
        limit, most = ("bytes", self.bytes_max) if is_large else ("requests", self.requests_max)
        self.refused[limit] += 1
        fix = f"`limits: {{{limit}: {most}}}` of the application sets the limit"
        if is_large and held_bytes + size > most:
            what = f"the body has at least {held_bytes + size} bytes; the limit of model {self.model!r} is {most}"
            return Refusal(413, what, f"send fewer rows; {fix}")
        held = f"{self.held_bytes} bytes of open requests" if is_large else counted(self.requests, "open request")
        what = f"rejected: model {self.model!r} has {held}; its limit is {most}"
        return Refusal(503, what, f"try again in 1 s; {fix}", retry_after_s=1)


class BodyMemory:
    """Limits the memory for request bodies: `each_bytes_max` for one body, `all_bytes_max` for all open requests, and
    the quotas of single models."""

    def __init__(self, each_bytes_max: int, all_bytes_max: int = ALL_BYTES_MAX) -> None:
        assert each_bytes_max <= all_bytes_max, f"{each_bytes_max} bytes for one body, {all_bytes_max} for all"
        self.each_bytes_max, self.all_bytes_max = each_bytes_max, all_bytes_max
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        """The number of rejected bodies, by the limit they exceeded."""
        self.quotas: dict[str, Quota] = {}
        """By model; only models with limits have one."""

    def set_quota(self, model: str, requests_max: int, bytes_max: int) -> None:
        """Limit the open requests of a model and the bytes of their bodies; 0 stands for no limit."""
        if not (requests_max or bytes_max):
            self.quotas.pop(model, None)
        elif model in self.quotas:  # a new version: the open requests of the one before count
            self.quotas[model].requests_max, self.quotas[model].bytes_max = requests_max, bytes_max
        else:
            self.quotas[model] = Quota(model, requests_max, bytes_max)

    def quota_of(self, path: str) -> Quota | None:
        """The quota of the model that a request to this path infers with, if any."""
        if not (path.startswith(MODELS) and path.endswith(INFER)):
            return None
        return self.quotas.get(path[len(MODELS) :].partition("/")[0])

    def too_large(self, size: int, *, at_least: bool = False) -> Refusal:
        """Count and return the refusal of a body that exceeds `each_bytes_max`."""
        self.refused["each"] += 1
        return Refusal(
            413,
            f"the body has {'at least ' if at_least else ''}{size} bytes; the limit is {self.each_bytes_max}",
            "send fewer rows, or binary tensors instead of JSON; the server's option --body-bytes sets the limit",
        )

    def full(self) -> Refusal:
        """Count and return the refusal of a body that would exceed `all_bytes_max`."""
        self.refused["all"] += 1
        return Refusal(
            503,
            f"rejected: the server holds {self.held_bytes} bytes of requests; the limit is {self.all_bytes_max}",
            "try again in 1 s; the server's option --bodies-bytes sets the limit",
            retry_after_s=1,
        )


class BodyReservation:
    """The memory that one request's body has reserved, of the server and of its model's quota; released when the
    context ends."""

    __slots__ = ("_bodies", "_is_counted", "_quota", "size")
    _is_counted: bool
    """Whether the quota counts this request; set only if there is one."""

    def __init__(self, bodies: BodyMemory) -> None:
        self._bodies = bodies
        self._quota: Quota | None = None
        self.size = 0

    def limit(self, quota: Quota | None) -> None:
        """Reserve what follows also from the quota of a model, if it has one."""
        self._quota, self._is_counted = quota, False

    def __enter__(self) -> "BodyReservation":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def take(self, size: int) -> None:
        """Reserve `size` more bytes. Raises a `Refusal` (503) if they are not available."""
        bodies = self._bodies
        if bodies.held_bytes + size > bodies.all_bytes_max:
            raise bodies.full()
        if self._quota is not None and not self._has_counted(self._quota, size):
            raise self._quota.full(self.size, size)
        bodies.held_bytes += size
        self.size += size

    def drop(self) -> None:
        """Release all reserved bytes."""
        self._bodies.held_bytes -= self.size
        if self._quota is not None and self._is_counted:
            self._quota.held_bytes -= self.size
            self._quota.requests -= 1
            self._is_counted = False
        self.size = 0

    def has_taken(self, size: int) -> bool:
        """Reserve memory for a small body that can be read at once. Returns False, and reserves nothing, for a body
        that must go through `read`."""
        bodies = self._bodies
        held_bytes = bodies.held_bytes + size
        if size > WHOLE_BYTES_MAX or size > bodies.each_bytes_max or held_bytes > bodies.all_bytes_max:
            return False
        if self._quota is not None and not self._has_counted(self._quota, size):
            return False
        bodies.held_bytes = held_bytes
        self.size += size
        return True

    def _has_counted(self, quota: Quota, size: int) -> bool:
        """Count the request, once, and `size` more bytes of its body; returns whether the quota has room for them."""
        is_new = not self._is_counted
        if not quota.has_room(is_new, size):
            return False
        quota.requests += is_new
        quota.held_bytes += size
        self._is_counted = True
        return True

    async def read(self, incoming: Incoming, declared: int | None, *, asks_first: bool = False) -> bytes:
        """Read the body, of `declared` bytes if the client sent a length. Raises a `Refusal` (413 or 503).

        A client that waits for permission to send the body (`asks_first`, the HTTP header `Expect`) is refused at once.
        """
        try:
            if declared is not None and declared > self._bodies.each_bytes_max:
                raise self._bodies.too_large(declared)
            is_whole = declared is not None and declared <= WHOLE_BYTES_MAX
            self.take(declared if declared is not None and is_whole else 0)
        except Refusal:
            if not asks_first:
                await throw_away(incoming)
            raise
        return await (incoming() if is_whole else self._gather(incoming))

    async def _gather(self, incoming: AsyncIterable[bytes]) -> bytes:
        """Read a body in parts and reserve memory for each part."""
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
    """The same parts as an iterator that can be left and resumed, which Granian's own cannot."""
    async for part in incoming:
        yield part


async def throw_away(stream: AsyncIterable[bytes]) -> None:
    """Read and discard the rest of a body for a limited time; otherwise the client would see a connection error instead
    of the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            async for _ in stream:
                pass


JSON: Final = "application/json"
BACKLOG: Final = 1024
HEAD_READ_MS_MAX: Final = 60_000
"""How long a client may take to send the head of a request."""
SEND_S_MAX: Final = 60.0
"""How long a client may take to send the body of a request."""
WATCH_S: Final = 0.1
"""A request is watched for a disconnect once it is this old; watching costs as much as answering."""
START_S_MAX: Final = 5.0


class Wire(Incoming, Protocol):
    """Granian's interface for reading and answering one request."""

    async def client_disconnect(self) -> None: ...
    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...


class Exchange:
    """One HTTP request, which must be answered once with `reply`."""

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
        """When the head of the request had arrived, in `time.monotonic_ns`."""
        self._scope, self._wire = scope, wire
        self._answered: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.method = scope.method
        path = scope.path
        self.path = unquote(path) if "%" in path else path
        self.headers = scope.headers
        """Looked up by their lower-case name: `headers.get("x-slo-ms")`."""
        self.body = b""
        self.is_open = True
        self.on_gone: Callable[[], None] | None = None
        """Called if the client disconnects before the answer."""

    @property
    def query_string(self) -> str:
        """The part of the URL after the question mark."""
        return self._scope.query_string

    @property
    def age_ns(self) -> int:
        """The time since the head arrived."""
        return time.monotonic_ns() - self.began_ns

    def reply(
        self, status: int, body: bytes, *, content_type: str = JSON, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Answer the request. Has no effect if the client has disconnected."""
        if not self.is_open:
            return
        self.is_open = False
        self._wire.response_bytes(status, [("content-type", content_type), *headers], body)
        if self._answered is not None:
            self._answered.set_result(None)

    def reply_error(self, status: int, what: str, fix: str = "", *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Answer `{"error": …}`: what is wrong, the value, and the correction."""
        self.reply(status, error_body(what, fix), headers=headers)

    def refuse(self, refusal: Refusal) -> None:
        """Answer with an error and the headers that its status requires."""
        headers: tuple[tuple[str, str], ...] = ()
        if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers = (("retry-after", str(max(1, refusal.retry_after_s))),)
        elif refusal.status == HTTPStatus.UNAUTHORIZED:
            headers = (("www-authenticate", "Bearer"),)
        self.reply_error(refusal.status, refusal.what, refusal.fix, headers=headers)

    def answered(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """A future that completes when the request is answered or the client has disconnected."""
        self._answered = answered = loop.create_future()
        return answered

    def attend(self) -> None:
        """Watch an old request for a disconnect, and refuse a body that takes too long to arrive."""
        if self._answered is None:
            if self.is_open and self.age_ns > SEND_S_MAX * NS_PER_S:
                what = f"the request took more than {SEND_S_MAX:g} s to arrive"
                self.refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, what, "send it faster"))
        elif self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._notice())

    def close(self) -> None:
        """Stop watching for a disconnect."""
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
    """The protocol's error object. It is a single string, because clients display that."""
    return msgspec.json.encode({"error": f"{what}; help: {fix}" if fix else what})


class HttpServer:
    """A listening port. `answer` receives each complete request and must not raise; at most `requests_max` are open."""

    def __init__(self, answer: Callable[[Exchange], None], *, bodies: BodyMemory, requests_max: int) -> None:
        self._answer = answer
        self._bodies = bodies
        self._requests_max = requests_max
        self._inside: dict[Exchange, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Start listening and return the port; port 0 selects a free one. Raises `MachineError`."""
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
        """Stop listening and close all connections. All requests must have been answered before."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None and self._serving is not None:
            self._server.stop()  # type: ignore[no-untyped-call]
            await self._serving

    async def __rsgi__(self, scope: Scope, wire: Wire) -> None:
        """Granian calls this for each request, in a new task."""
        loop, inside, bodies = self._loop, self._inside, self._bodies
        assert loop is not None
        exchange, hold = Exchange(scope, wire), BodyReservation(bodies)
        if bodies.quotas:
            hold.limit(bodies.quota_of(exchange.path))
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
        """Wait until the port accepts connections; Granian binds it in another thread."""
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
        """Check the requests that are older than `WATCH_S`; they are in order of arrival."""
        for exchange in list(self._inside):
            if exchange.age_ns < WATCH_S * NS_PER_S:
                break
            exchange.attend()
        self._sweeper = loop.call_later(WATCH_S, self._sweep, loop)


def free_port(host: str, port: int) -> int:
    """Check that a port is free, or choose one for 0. Granian shares its port and would not notice another server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise refused_port(host, port, error) from error
        return int(probe.getsockname()[1])


def refused_port(host: str, port: int, error: OSError) -> MachineError:
    """The error for a port that is not available."""
    if error.errno == errno.EADDRINUSE:
        return MachineError(
            f"port {port} on {host} is in use", help="stop the program that holds it, or choose another port"
        )
    return MachineError(
        f"cannot listen on {host}:{port}: {error.strerror or error}",
        help="choose an address of this machine and a port you may open (1024 and above without privileges)",
    )
