"""What is passed on of the connections of gRPC, and when they are closed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.frames import DATA, HEADERS, PING, PREFACE, SETTINGS, frame
from sloop.serve.edge.grpc import relay as module
from sloop.serve.edge.grpc.relay import STALL_S_MAX, Relay, RelayedConnection
from sloop.serve.edge.listener import listen

pytestmark = pytest.mark.live


class Scene:
    """A relay with one client, and what stands behind it."""

    def __init__(self, relay: Relay, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.relay, self.reader, self.writer = relay, reader, writer
        self.passed = bytearray()

    @property
    def connection(self) -> RelayedConnection:
        (found,) = self.relay.listener.connections
        assert isinstance(found, RelayedConnection)
        return found

    async def until_passed(self, size: int) -> None:
        async with asyncio.timeout(10):
            while len(self.passed) < size:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until_closed(self) -> None:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):
                while await self.reader.read(1000):
                    pass


@asynccontextmanager
async def relayed(folder: Path, *, is_served: bool = True) -> AsyncIterator[Scene]:
    path = folder / "behind"

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(2**16):
            scene.passed += part
        writer.close()

    server = await asyncio.start_unix_server(take, path) if is_served else None
    relay, sock = Relay([path]), listen("127.0.0.1", 0)
    relay.start(sock)
    scene = Scene(relay, *await asyncio.open_connection("127.0.0.1", sock.getsockname()[1]))
    try:
        yield scene
    finally:
        scene.writer.transport.abort()
        await relay.close(1)
        if server is not None:
            server.close()


async def test_a_stranger_is_passed_on_slowly_and_a_known_client_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGER_BYTES_PER_S", 1)
    sent = PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 1, bytes(16_000)) * 20
    async with relayed(tmp_path) as scene:
        scene.writer.write(sent)
        await scene.until_passed(module.STRANGER_BYTES)
        await asyncio.sleep(0.05)
        assert len(scene.passed) <= module.STRANGER_BYTES + 2
        assert scene.relay.of(f"unix-abstract:{scene.connection.name}") is scene.connection
        scene.connection.note_authorised()
        await scene.until_passed(len(sent))
        assert scene.passed == sent


async def test_connections_that_wait_to_be_passed_on_are_of_a_known_network_as_soon_as_it_is(tmp_path: Path) -> None:
    relay = Relay([tmp_path / "none"])
    for name in ("a", "b", "c"):
        relay._waiting.add(Mock(network=name))
    relay.listener.handshakes.note_authorised("b")
    assert relay._waiting.take(is_known=True).network == "b"


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (frame(SETTINGS, 0, 0) * 25, "frame"),
        (frame(PING, 0, 0, bytes(8)) * 250, "frame"),
        (frame(HEADERS, 4, 1, b"\x82" * 200), "head"),
    ],
    ids=["settings", "pings", "fields"],
)
async def test_what_brings_nothing_is_paid_for_until_the_connection_is_closed(
    tmp_path: Path, sent: bytes, why: str
) -> None:
    async with relayed(tmp_path) as scene:
        scene.writer.write(PREFACE + sent)
        await scene.until_closed()
        assert dict(scene.relay.closed) == {why: 1}


async def test_answers_refill_the_credit(tmp_path: Path) -> None:
    async with relayed(tmp_path) as scene:
        scene.writer.write(PREFACE)
        await scene.until_passed(len(PREFACE))
        connection = scene.connection
        connection.note_authorised()
        for _ in range(10):
            connection.charge("key")
            connection.note_sending(100)
            connection.note_sent(30 * module.BYTES_PER_CREDIT)
        assert not scene.relay.closed
        for _ in range(5):
            connection.charge("key")
        assert dict(scene.relay.closed) == {"key": 1}


@pytest.mark.parametrize(("unsent", "why"), [(1, "answer"), (0, "idle")])
async def test_who_takes_too_long_is_closed(tmp_path: Path, unsent: int, why: str) -> None:
    async with relayed(tmp_path) as scene:
        scene.writer.write(PREFACE)
        await scene.until_passed(len(PREFACE))
        connection = scene.connection
        connection.calls = connection.unsent = unsent
        connection.attend(time.monotonic() + STALL_S_MAX - 1)
        assert not scene.relay.expired
        connection.attend(time.monotonic() + STALL_S_MAX + 1)
        assert dict(scene.relay.expired) == {why: 1}
        await scene.until_closed()


async def test_without_a_server_behind_connections_are_closed(tmp_path: Path) -> None:
    async with relayed(tmp_path, is_served=False) as scene:
        scene.writer.write(PREFACE)
        await scene.until_closed()
        assert not scene.relay.listener.connections
