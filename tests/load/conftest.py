"""A stub OIP v2 server on loopback, in a thread of its own, that does what its script says."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

METADATA = b'{"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}], "outputs": []}'
SERVER = b'{"name": "stub", "version": "1", "extensions": ["binary_tensor_data"]}'
OUTPUTS = b'{"model_name": "m", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [0.5]}]}'


def response(status: int, body: bytes = OUTPUTS, *fields: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status} Said", f"Content-Length: {len(body)}", *fields])
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Step:
    """What to do with one request: wait, then write `content` (and close the connection, if `closes`)."""

    content: bytes = field(default_factory=lambda: response(200))
    delay_s: float = 0.0
    closes: bool = False


Script = Callable[[int], Step]
"""From the number of an inference request, in order of arrival, to what to do with it."""


class Stub:
    """Speaks enough of the protocol to be loaded; keeps every request it was sent."""

    Step = Step
    response = staticmethod(response)

    def __init__(self) -> None:
        self.script: Script = lambda number: Step()
        self.metadata = METADATA
        self.server = SERVER
        self.heads: list[str] = []
        self.bodies: list[bytes] = []
        self.connections = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop = asyncio.Event()
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        for pending in asyncio.all_tasks(self._loop):
            pending.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self) -> None:
        listening = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=1024)
        self.port = listening.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        listening.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1]) if length else 0)
        if head.startswith("GET"):
            writer.write(response(200, self.metadata if "/models/" in head else self.server))
            return True
        number = len(self.heads)
        self.heads.append(head)
        self.bodies.append(body)
        step = self.script(number)
        if step.delay_s:
            await asyncio.sleep(step.delay_s)
        writer.write(step.content)
        await writer.drain()
        return not step.closes


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.close()
