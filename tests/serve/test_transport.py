"""Both ends of a real socket pair: the server's on an event loop, the worker's in the test itself."""

import ast
import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sloop.serve import transport
from sloop.serve.transport import (
    HEADER,
    PAYLOAD_BYTES_MAX,
    VERSION,
    Frame,
    FrameKind,
    ProcessChannel,
    ProcessLink,
    ProtocolError,
    drop_sent,
    pack_head,
    relay,
    socket_pair,
    unpack_head,
)
from tests.serve.rig import until

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("event_loop")]
LARGE_BYTES = 3 << 20

Scene = Callable[[ProcessLink, socket.socket, list[Frame], list[str]], Awaitable[None]]


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[ProcessLink, socket.socket, list[Frame], list[str]]]:
    """A link, a worker's bare socket, and the frames and the ends that the link tells of."""
    ours, theirs = socket_pair()
    frames: list[Frame] = []
    ends: list[str] = []
    link = ProcessLink(asyncio.get_running_loop(), ours)
    link.attach(frames.append, ends.append)
    with theirs:
        try:
            yield link, theirs, frames, ends
        finally:
            link.close()


async def test_frames_arrive_whole_and_in_order() -> None:
    async with linked() as (_, theirs, frames, ends):
        large = bytes(range(256)) * (LARGE_BYTES // 256)
        channel = ProcessChannel(theirs)

        def speak() -> None:
            channel.send(FrameKind.BYTES)
            channel.send(FrameKind.BYTES, 1, 5, [large, b"", b"tail"])
            channel.send(FrameKind.BYTES, 2, 6, [b"small"])

        await asyncio.to_thread(speak)
        await until(lambda: len(frames) == 3)
        assert [(f.kind, f.subject, f.value) for f in frames] == [
            (FrameKind.BYTES, 0, 0),
            (FrameKind.BYTES, 1, 5),
            (FrameKind.BYTES, 2, 6),
        ]
        assert [bytes(f.payload) for f in frames] == [b"", large + b"tail", b"small"]
        assert not ends


async def test_a_frame_may_come_byte_by_byte() -> None:
    async with linked() as (_, theirs, frames, _):
        for byte in pack_head(FrameKind.BYTES, 3, 4, 3) + b"xyz":
            theirs.send(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: bool(frames))
        assert (frames[0].subject, bytes(frames[0].payload)) == (3, b"xyz")


async def test_the_server_waits_for_a_slow_worker_without_blocking() -> None:
    async with linked() as (link, theirs, _, _):
        rows = [
            bytes([n % 251]) * 4096 for n in range(2500)
        ]  # more buffers than one call takes, more bytes than it holds
        link.send(FrameKind.BYTES, 1, 0, rows)
        link.send(FrameKind.BYTES)
        assert link.is_congested
        channel = ProcessChannel(theirs)

        def listen() -> tuple[int, bytes, FrameKind]:
            frame, follows = channel.receive(), channel.receive()
            assert frame is not None
            assert follows is not None
            return frame.subject, bytes(frame.payload), follows.kind

        assert await asyncio.to_thread(listen) == (1, b"".join(rows), FrameKind.BYTES)
        assert not link.is_congested


async def test_a_relay_takes_no_more_than_it_can_pass_on() -> None:
    """Whoever sends waits for whoever reads, however much that is; nothing is lost."""
    count, payload = 64, bytes(1 << 20)
    loop, noted = asyncio.get_running_loop(), list[Frame]()
    (ours, before), (our_own, after) = socket_pair(), socket_pair()
    source, target = ProcessLink(loop, ours), ProcessLink(loop, our_own)
    relay(source, target, lambda why: target.finish(), noted.append)
    target.attach(lambda frame: None, lambda why: None)
    sender, receiver = ProcessChannel(before), ProcessChannel(after)

    def send_all() -> None:
        for number in range(count):
            sender.send(FrameKind.BYTES, number, 0, [payload])
        sender.close()

    sending = asyncio.create_task(asyncio.to_thread(send_all))
    seen = -1
    while len(noted) != seen or not target.is_congested:
        seen = len(noted)
        await asyncio.sleep(0.1)
    assert seen < count // 2

    def receive_all() -> list[int]:
        return [frame.subject for frame in iter(receiver.receive, None) if len(frame.payload) == len(payload)]

    assert await asyncio.to_thread(receive_all) == list(range(count))
    await sending
    receiver.close()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "begins with"),
        (HEADER.pack(b"SL", VERSION, 0, 0, 0, 0), "kind 0"),
    ],
)
async def test_a_worker_that_breaks_the_format_is_given_up(data: bytes, says: str) -> None:
    async with linked() as (_, theirs, frames, ends):
        theirs.send(data)
        await until(lambda: bool(ends))
        assert says in ends[0]
        assert not frames


async def test_the_end_of_the_socket_is_told_once() -> None:
    async with linked() as (link, theirs, _, ends):
        theirs.close()
        link.send(FrameKind.BYTES, 1, 0, [b"x"])
        await until(lambda: bool(ends))
        link.send(FrameKind.BYTES)
        assert len(ends) == 1


async def test_after_closing_nothing_is_told() -> None:
    async with linked() as (link, theirs, frames, ends):
        ProcessChannel(theirs).send(FrameKind.BYTES)
        link.close()
        link.close()
        await asyncio.sleep(0.01)
        assert not frames
        assert not ends


def test_a_worker_sees_the_server_leave_between_frames_and_inside_one() -> None:
    ours, theirs = socket_pair()
    with theirs:
        ours.close()
        assert ProcessChannel(theirs).receive() is None
    ours, theirs = socket_pair()
    with theirs:
        ours.send(pack_head(FrameKind.BYTES, 1, 0, 8) + b"half")
        ours.close()
        with pytest.raises(ProtocolError, match="4 B before"):
            ProcessChannel(theirs).receive()


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


def test_a_head_reads_back() -> None:
    head = unpack_head(pack_head(FrameKind.BYTES, 7, -3, 600_000))
    assert (head.kind, head.subject, head.value, head.payload_bytes) == (FrameKind.BYTES, 7, -3, 600_000)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes(HEADER.size), "begins with"),
        (HEADER.pack(b"SL", 9, FrameKind.BYTES, 0, 0, 0), "version 9"),
        (HEADER.pack(b"SL", VERSION, 99, 0, 0, 0), "unknown kind 99"),
        (HEADER.pack(b"SL", VERSION, FrameKind.BYTES, PAYLOAD_BYTES_MAX + 1, 0, 0), "announces"),
    ],
)
def test_a_malformed_head_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        unpack_head(data)
