"""What an HTTP request costs before anything is done with it: by sloop, by the parser alone and by Granian.

    python -m benchmarks.http_servers [--seconds 5]

Each server answers the same small POST with the same few bytes, in one process with one event loop, to 64 connections
that send their next request when they have the answer. `bare httptools` only counts requests: it has no time-out, bound
or check. Granian is measured if it is installed; sloop used it before.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import uvloop
from httptools import HttpRequestParser

from benchmarks.notebook import arguments, publish, say, table
from sloop.app.limits import ServerLimits
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.http import HttpServer
from sloop.serve.edge.listener import listen
from tests.serve.path import REQUEST

CONNECTIONS = 64
ROUNDS = 3
ANSWER = b'{"model_name":"path","model_version":"1","outputs":[]}'
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Bare(asyncio.Protocol):
    """Parses, and answers."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(ANSWER) + ANSWER)


async def serve_bare(port: int) -> None:
    """The parser alone."""
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", port)
    await server.serve_forever()


async def serve_sloop(port: int) -> None:
    """sloop's server, with all its checks and bounds."""
    server = HttpServer(
        lambda exchange: exchange.reply(200, ANSWER), bodies=BodyMemory(2**26), limits=ServerLimits(requests=4096)
    )
    server.start(listen("127.0.0.1", port))
    await asyncio.Event().wait()


async def serve_granian(port: int) -> None:
    """Granian's embedded server, which calls a coroutine for each request."""
    from granian.constants import Interfaces  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415
    from granian.server.embed import Server  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415

    async def answer(scope: Any, wire: Any) -> None:  # noqa: ANN401  # its types may not be here
        await wire()
        wire.response_bytes(200, [("content-type", "application/json")], ANSWER)

    class Application:
        async def __rsgi__(self, scope: Any, wire: Any) -> None:  # noqa: ANN401
            await answer(scope, wire)

    sys.setswitchinterval(0.0005)
    server = Server(Application(), port=port, interface=Interfaces.RSGI, websockets=False, log_enabled=False)
    await server.serve()


SERVERS: dict[str, Callable[[int], Any]] = {
    "bare httptools": serve_bare,
    "sloop": serve_sloop,
    "Granian": serve_granian,
}


class Client(asyncio.Protocol):
    """Sends the next request when the answer is here."""

    answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if data.endswith(ANSWER):
            Client.answers += 1
            self.transport.write(REQUEST)


def ask(port: int, seconds: float) -> tuple[int, float]:
    """Answers, and the seconds they took."""

    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS):
            await loop.create_connection(Client, "127.0.0.1", port)
        await asyncio.sleep(0.5)
        Client.answers, begun_s = 0, time.monotonic()
        await asyncio.sleep(seconds)
        return Client.answers, time.monotonic() - begun_s

    return uvloop.run(main())


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def measure(name: str, seconds: float) -> tuple[float, float]:
    """Answers a second, and µs of CPU each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"import uvloop; from benchmarks.http_servers import SERVERS; uvloop.run(SERVERS[{name!r}]({port}))"
    with subprocess.Popen([sys.executable, "-c", code]) as server:
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            ask(port, 0.5)
            before_s = cpu_s(server.pid)
            answers, took_s = ask(port, seconds)
            return answers / took_s, (cpu_s(server.pid) - before_s) / (answers * (took_s + 0.5) / took_s) * 1e6
        finally:
            server.terminate()


def main() -> None:
    """Measure the servers in turn, several times, and publish the best of each."""
    options = arguments(__doc__, seconds=5.0, quick=1.0).parse_args()
    names = [name for name in SERVERS if name != "Granian" or find_spec("granian") is not None]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            say(name)
            found[name].append(measure(name, options.seconds))
    best = {name: (max(rps for rps, _ in runs), min(cost for _, cost in runs)) for name, runs in found.items()}
    bare = best["bare httptools"][1]
    rows = [(name, rps, cost, cost / bare) for name, (rps, cost) in best.items()]
    text = f"The best of {ROUNDS} runs of {options.seconds:g} s each, in turn; two cores, shared with the client.\n\n"
    columns = ("server", "answers/s", "CPU µs a request", "of bare httptools")
    publish("http-servers", "HTTP servers, bare", text + table(columns, rows), write=not options.no_write)


if __name__ == "__main__":
    main()
