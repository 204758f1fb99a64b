"""Starts the page of a server: its listening socket, and the process that answers there."""

import asyncio
import errno
import logging
import os
import socket
import subprocess
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.app.limits import ServerLimits
from sloop.errors import InputError
from sloop.serve.processes import kill, spawn
from sloop.serve.stderr import copied_output

HOST, PORT = "127.0.0.1", 8002
"""Where the page is if nothing else is said: where Triton has its metrics."""
PORTS_TRIED: Final = 100
BACKLOG: Final = 64
AGAIN_S: Final = 1.0
"""How long after its end the process is started again."""
_log: Final = logging.getLogger("sloop.page")


def open_socket(address: str) -> socket.socket | None:
    """The socket of the page at `HOST:PORT`, or at the first port that is free from 8002 on for an empty address. None,
    with a warning, if it cannot be opened: a page is no reason not to serve. InputError for what is no address."""
    if address:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise InputError(f"{address!r} is no address", where="--page", help="write HOST:PORT, or off")
        ports, host = range(int(port), int(port) + 1), host.strip("[]")
    else:
        ports, host = range(PORT, PORT + PORTS_TRIED), HOST
    for port_tried in ports:
        try:
            return socket.create_server((host, port_tried), family=_family(host), backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port_tried == ports[-1]:
                _log.warning("there is no page: %s:%d cannot be opened: %s", host, port_tried, error.strerror)
                return None
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class PageSetup(Struct, frozen=True):
    """What the process needs to know of its server."""

    folder: str
    """Of the log."""
    run: str
    zero_ns: int
    """The log's instant 0 on this machine's monotonic clock, which does not jump."""
    zero_unix_ns: int
    """The Unix time of this instant, for what the page shows."""
    server: str
    """The server's URL."""
    api_key: str = ""
    api_key_file: str = ""
    limits: ServerLimits = ServerLimits()
    """The limits of the server: the page refuses what the server would refuse."""
    hosts: tuple[str, ...] = ()
    """Names by which browsers may call the server, besides its addresses and `localhost`."""
    shadows: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and parameters of the systems that are shown beside the one that serves."""


class PageProcess:
    """Keeps the process of a page. Create it inside the running event loop of the server; it ends with the server."""

    def __init__(self, listening: socket.socket, setup: PageSetup) -> None:
        self._listening, self._setup = listening, msgspec.json.encode(setup)
        self._output = copied_output()
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        """Start the process, and again whenever it has ended."""
        while True:
            try:
                process = self._start()
            except OSError as error:
                _log.warning("the page's process cannot be started: %s", error)
            else:
                code = await self._ended(process)
                _log.warning("the page's process has ended with %d; another one starts", code)
            await asyncio.sleep(AGAIN_S)

    async def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the process, which also ends with the server's loop; its exit status."""
        try:
            return await asyncio.to_thread(process.wait)
        finally:
            if process.poll() is None:
                kill(process.pid)

    def _start(self) -> subprocess.Popen[bytes]:
        fds = self._listening.fileno(), self._output
        process = spawn("sloop.page.process", (*fds, os.getpid()), fds, stdin=subprocess.PIPE)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(self._setup)
        return process
