"""HTTP under the gateway: Granian, a Rust server, embedded in the gateway's own event loop through its RSGI interface.

Promises the rest of the gateway an `Exchange` for each complete request, to be answered once, now or later, and word of
a client that went away while it waited. Bodies are bounded as they arrive. HTTP itself (parsing, keep-alive,
pipelining, slow clients, HTTP/2) is Granian's business. Knows nothing of models, or of JSON beyond the error object.
Source: Granian's RSGI specification, version 1.
"""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol
from urllib.parse import unquote

import msgspec
from granian.constants import Interfaces
from granian.http import HTTP1Settings
from granian.rsgi import Scope
from granian.server.embed import Server

from sloop.errors import MachineError

JSON: Final = "application/json"
BACKLOG: Final = 1024
HEAD_READ_MS_MAX: Final = 60_000
"""A client may take this long to send a request's head."""
WATCH_S: Final = 0.1
"""A client is watched for going away once its request has waited this long: watching costs as much as answering."""
START_S_MAX: Final = 5.0
SEND_S_MAX: Final = 60.0
"""A client may take this long to send a request's body."""
LINGER_S: Final = 2.0
"""How long a refused body is read and thrown away."""


class Wire(Protocol):
    """What Granian gives us to read a request and answer it."""

    async def __call__(self) -> bytes: ...
    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def client_disconnect(self) -> None: ...
    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...


class Exchange:
    """One request and the duty to answer it once, by `reply`."""

    __slots__ = (
        "_answered",
        "_watch",
        "_wire",
        "body",
        "headers",
        "is_open",
        "method",
        "on_gone",
        "path",
        "query_string",
        "since_s",
    )

    def __init__(self, scope: Scope, wire: Wire, body: bytes) -> None:
        self._wire = wire
        self._answered: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.method = scope.method
        self.path = unquote(scope.path) if "%" in scope.path else scope.path
        self.query_string = scope.query_string
        self.headers = scope.headers
        """Looked up by lower-case name: `headers.get("x-slo-ms")`."""
        self.body = body
        self.is_open = True
        self.on_gone: Callable[[], None] | None = None
        """Called if the client goes away before the answer."""
        self.since_s = 0.0

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

    def watch(self) -> None:
        """Notice from now on if the client goes away."""
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._notice())

    async def wait(self, since_s: float) -> None:
        """Until it is answered, or nobody waits for the answer."""
        self.since_s = since_s
        self._answered = asyncio.get_running_loop().create_future()
        try:
            await self._answered
        finally:
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


class Listener:
    """A listening port. `answer` takes each complete request and must not raise; at most `requests_max` are inside."""

    def __init__(self, answer: Callable[[Exchange], None], *, body_bytes_max: int, requests_max: int) -> None:
        self._answer = answer
        self._body_bytes_max = body_bytes_max
        self._requests_max = requests_max
        self._waiting: dict[Exchange, None] = {}
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
        loop = asyncio.get_running_loop()
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
        body = await self._read(scope, wire)
        if body is None:
            return
        exchange = Exchange(scope, wire, body)
        self._answer(exchange)
        if exchange.is_open:
            self._waiting[exchange] = None
            try:
                await exchange.wait(asyncio.get_running_loop().time())
            finally:
                del self._waiting[exchange]

    async def _read(self, scope: Scope, wire: Wire) -> bytes | None:
        """The body, or None once it has been refused."""
        length = scope.headers.get("content-length")
        if length is None and "transfer-encoding" not in scope.headers and scope.http_version != "2":
            return b""
        declared = int(length) if length is not None else 0
        try:
            async with asyncio.timeout(SEND_S_MAX):
                if length is not None and declared <= self._body_bytes_max:
                    return await wire()
                parts, size = await self._drain(scope, wire, declared)
        except TimeoutError:
            what = f"the request took more than {SEND_S_MAX:.0f} s to arrive"
            Exchange(scope, wire, b"").reply_error(408, what, "send it faster")
            return None
        if size <= self._body_bytes_max:
            return b"".join(parts)
        Exchange(scope, wire, b"").reply_error(
            413,
            f"the body is {'' if declared else 'at least '}{size} bytes, over {self._body_bytes_max}",
            "send fewer rows, or binary tensors instead of JSON; the server's limit is body_bytes_max",
        )
        return None

    async def _drain(self, scope: Scope, wire: Wire, declared: int) -> tuple[list[bytes], int]:
        """Read a body of unknown or forbidden size: its parts while it is allowed, and how large it is at least.

        What is too large is thrown away for a moment, so that its sender reads the answer instead of an error of its
        own; one that asked first (`Expect`) is told at once.
        """
        parts: list[bytes] = []
        size = 0
        if declared and "expect" in scope.headers:
            return parts, declared
        refused_s = 0.0
        loop = asyncio.get_running_loop()
        async for part in wire:
            size += len(part)
            if declared or size > self._body_bytes_max:
                refused_s = refused_s or loop.time()
                parts.clear()
                if loop.time() - refused_s > LINGER_S:
                    break
            else:
                parts.append(part)
        return parts, max(size, declared)

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
        """Begin to watch the clients that have waited for a while; the longest wait comes first."""
        for exchange in list(self._waiting):
            if loop.time() - exchange.since_s < WATCH_S:
                break
            exchange.watch()
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
