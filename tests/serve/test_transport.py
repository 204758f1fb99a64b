"""Both ends of a real socket pair: the server's on an event loop, the worker's in the test itself."""

import ast
import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from sloop.serve import transport
from sloop.serve.frames import HEADER, Frame, Kind, ProtocolError, pack_head
from sloop.serve.transport import Channel, Link, drop_sent, socket_pair

pytestmark = pytest.mark.live
LARGE_BYTES = 3 << 20

Scene = Callable[[Link, socket.socket, list[Frame], list[str]], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[[Scene], None]:
    """Runs a scene between a link and a worker's bare socket, on both event loops."""

    def run(scene: Scene) -> None:
        async def main() -> None:
            ours, theirs = socket_pair()
            frames: list[Frame] = []
            ends: list[str] = []
            link = Link(asyncio.get_running_loop(), ours, frames.append, ends.append)
            with theirs:
                try:
                    await asyncio.wait_for(scene(link, theirs, frames, ends), 10)
                finally:
                    link.close()

        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return run


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for has no event of its own
        await asyncio.sleep(0.001)


def test_frames_arrive_whole_and_in_order(play: Callable[[Scene], None]) -> None:
    async def scene(link: Link, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        large = bytes(range(256)) * (LARGE_BYTES // 256)
        channel = Channel(theirs)

        def speak() -> None:
            channel.send(Kind.READY)
            channel.send(Kind.DONE, 1, 5, b"t", [large, b"", b"tail"])
            channel.send(Kind.DONE, 2, 6, b"table", [b"small"])

        await asyncio.to_thread(speak)
        await until(lambda: len(frames) == 3)
        assert [(f.kind, f.subject, f.value, f.table) for f in frames] == [
            (Kind.READY, 0, 0, b""),
            (Kind.DONE, 1, 5, b"t"),
            (Kind.DONE, 2, 6, b"table"),
        ]
        assert [bytes(f.payload) for f in frames] == [b"", large + b"tail", b"small"]
        assert not ends

    play(scene)


def test_a_frame_may_come_byte_by_byte(play: Callable[[Scene], None]) -> None:
    async def scene(link: Link, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        for byte in pack_head(Kind.DONE, 3, 4, 2, 3) + b"ab" + b"xyz":
            theirs.send(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: bool(frames))
        assert (frames[0].table, bytes(frames[0].payload)) == (b"ab", b"xyz")

    play(scene)


def test_the_server_waits_for_a_slow_worker_without_blocking(play: Callable[[Scene], None]) -> None:
    async def scene(link: Link, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        rows = [
            bytes([n % 251]) * 4096 for n in range(2500)
        ]  # more buffers than one call takes, more bytes than it holds
        link.send(Kind.RUN, 1, 0, b"table", rows)
        link.send(Kind.STOP)
        assert link.unsent_bytes > 0
        channel = Channel(theirs)

        def listen() -> tuple[int, bytes, Kind]:
            received = channel.receive_head()
            assert received is not None
            head, table = received
            payload = memoryview(bytearray(head.payload_bytes))
            channel.receive_into(payload)
            follows = channel.receive_head()
            assert table == b"table"
            assert follows is not None
            return head.subject, bytes(payload), follows[0].kind

        assert await asyncio.to_thread(listen) == (1, b"".join(rows), Kind.STOP)
        assert link.unsent_bytes == 0

    play(scene)


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "begins with"), (HEADER.pack(b"SL", 1, 0, 0, 0, 0, 0), "kind 0")],
)
def test_a_worker_that_breaks_the_format_is_given_up(play: Callable[[Scene], None], data: bytes, says: str) -> None:
    async def scene(link: Link, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        theirs.send(data)
        await until(lambda: bool(ends))
        assert says in ends[0]
        assert not frames

    play(scene)


def test_the_end_of_the_socket_is_told_once(play: Callable[[Scene], None]) -> None:
    async def scene(link: Link, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        theirs.close()
        link.send(Kind.RUN, 1, 0, b"", [b"x"])
        await until(lambda: bool(ends))
        link.send(Kind.STOP)
        assert len(ends) == 1

    play(scene)


def test_after_closing_nothing_is_told(play: Callable[[Scene], None]) -> None:
    async def scene(link: Link, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        Channel(theirs).send(Kind.READY)
        link.close()
        link.close()
        await asyncio.sleep(0.01)
        assert not frames
        assert not ends

    play(scene)


def test_a_worker_sees_the_server_leave_between_frames_and_inside_one() -> None:
    ours, theirs = socket_pair()
    with theirs:
        ours.close()
        assert Channel(theirs).receive_head() is None
    ours, theirs = socket_pair()
    with theirs:
        ours.send(pack_head(Kind.RUN, 1, 0, 8, 0) + b"half")
        ours.close()
        with pytest.raises(ProtocolError, match="4 B before"):
            Channel(theirs).receive_head()


def test_nothing_in_the_server_unpickles_or_evaluates() -> None:
    for path in Path(transport.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
            names |= {node.id} if isinstance(node, ast.Name) else set()
            assert not names & {"pickle", "marshal", "shelve", "dill", "cloudpickle", "eval", "exec"}, path


def test_sent_bytes_and_empty_buffers_are_dropped() -> None:
    unsent = deque([memoryview(data) for data in (b"", b"abc", b"", b"de", b"")])
    drop_sent(unsent, 4)
    assert [bytes(view) for view in unsent] == [b"e", b""]
    drop_sent(unsent, 1)
    assert not unsent
