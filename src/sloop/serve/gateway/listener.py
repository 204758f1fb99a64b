"""A listening HTTP port: accepts connections, bounds them, sweeps out the idle ones, closes in an orderly way.

Source: RFC 9110 section 6.6.1 (Date).
"""

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from email.utils import formatdate

from sloop.errors import MachineError
from sloop.serve.gateway.http1 import Connection, Exchange

SWEEP_S = 1.0
BACKLOG = 1024


class Listener:
    """The `Door` of every connection it accepts. `answer` takes each complete request."""

    def __init__(self, answer: Callable[[Exchange], None], *, body_bytes_max: int, connections_max: int) -> None:
        self.answer = answer
        self.body_bytes_max = body_bytes_max
        self._connections_max = connections_max
        self._connections: set[Connection] = set()
        self._emptied = asyncio.Event()
        self.is_closing = False
        self.date_line = b""
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port in use, which is a free one where 0 was asked for. Raises `MachineError`."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=BACKLOG)
        except OSError as error:
            raise refused_port(host, port, error) from error
        self._sweep(loop)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, within_s: float) -> None:
        """Accept nothing more, give answers under way `within_s` to end, then close what is left."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.close_if_idle()
        if self._connections:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), within_s)
        for connection in list(self._connections):
            if connection.transport is not None:
                connection.transport.abort()

    def enter(self, connection: Connection) -> str:
        """Note a new connection; a text is the reason it cannot stay."""
        self._connections.add(connection)
        over = len(self._connections) > self._connections_max
        return f"{self._connections_max} connections are open, the most allowed" if over else ""

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.date_line = f"date: {formatdate(time.time(), usegmt=True)}\r\n".encode()
        for connection in list(self._connections):
            connection.sweep(loop.time())
        self._sweeper = loop.call_later(SWEEP_S, self._sweep, loop)


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
