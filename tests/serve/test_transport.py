"""Both ends of a real socket pair: the server's on an event loop, the worker's in the test itself."""

import ast
import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve import transport
from sloop.serve.transport import (
    CODES,
    HEADER,
    PAYLOAD_BYTES_MAX,
    TABLE_BYTES_MAX,
    Frame,
    FrameKind,
    ProcessChannel,
    ProcessLink,
    ProtocolError,
    drop_sent,
    is_batchable,
    pack_batch,
    pack_head,
    pack_table,
    socket_pair,
    unpack_head,
    unpack_outputs,
    unpack_table,
)
from sloop.tensor import ITEM_BYTES, Port, Signature, Tensor

pytestmark = pytest.mark.live
LARGE_BYTES = 3 << 20

Scene = Callable[[ProcessLink, socket.socket, list[Frame], list[str]], Awaitable[None]]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[[Scene], None]:
    """Runs a scene between a link and a worker's bare socket, on both event loops."""

    def run(scene: Scene) -> None:
        async def main() -> None:
            ours, theirs = socket_pair()
            frames: list[Frame] = []
            ends: list[str] = []
            link = ProcessLink(asyncio.get_running_loop(), ours, frames.append, ends.append)
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
    async def scene(link: ProcessLink, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        large = bytes(range(256)) * (LARGE_BYTES // 256)
        channel = ProcessChannel(theirs)

        def speak() -> None:
            channel.send(FrameKind.READY)
            channel.send(FrameKind.DONE, 1, 5, b"t", [large, b"", b"tail"])
            channel.send(FrameKind.DONE, 2, 6, b"table", [b"small"])

        await asyncio.to_thread(speak)
        await until(lambda: len(frames) == 3)
        assert [(f.kind, f.subject, f.value, f.table) for f in frames] == [
            (FrameKind.READY, 0, 0, b""),
            (FrameKind.DONE, 1, 5, b"t"),
            (FrameKind.DONE, 2, 6, b"table"),
        ]
        assert [bytes(f.payload) for f in frames] == [b"", large + b"tail", b"small"]
        assert not ends

    play(scene)


def test_a_frame_may_come_byte_by_byte(play: Callable[[Scene], None]) -> None:
    async def scene(link: ProcessLink, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        for byte in pack_head(FrameKind.DONE, 3, 4, 2, 3) + b"ab" + b"xyz":
            theirs.send(bytes([byte]))
            await asyncio.sleep(0)
        await until(lambda: bool(frames))
        assert (frames[0].table, bytes(frames[0].payload)) == (b"ab", b"xyz")

    play(scene)


def test_the_server_waits_for_a_slow_worker_without_blocking(play: Callable[[Scene], None]) -> None:
    async def scene(link: ProcessLink, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        rows = [
            bytes([n % 251]) * 4096 for n in range(2500)
        ]  # more buffers than one call takes, more bytes than it holds
        link.send(FrameKind.RUN, 1, 0, b"table", rows)
        link.send(FrameKind.STOP)
        assert link.unsent_bytes > 0
        channel = ProcessChannel(theirs)

        def listen() -> tuple[int, bytes, FrameKind]:
            received = channel.receive_head()
            assert received is not None
            head, table = received
            payload = memoryview(bytearray(head.payload_bytes))
            channel.receive_into(payload)
            follows = channel.receive_head()
            assert table == b"table"
            assert follows is not None
            return head.subject, bytes(payload), follows[0].kind

        assert await asyncio.to_thread(listen) == (1, b"".join(rows), FrameKind.STOP)
        assert link.unsent_bytes == 0

    play(scene)


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "begins with"), (HEADER.pack(b"SL", 1, 0, 0, 0, 0, 0), "kind 0")],
)
def test_a_worker_that_breaks_the_format_is_given_up(play: Callable[[Scene], None], data: bytes, says: str) -> None:
    async def scene(link: ProcessLink, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        theirs.send(data)
        await until(lambda: bool(ends))
        assert says in ends[0]
        assert not frames

    play(scene)


def test_the_end_of_the_socket_is_told_once(play: Callable[[Scene], None]) -> None:
    async def scene(link: ProcessLink, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        theirs.close()
        link.send(FrameKind.RUN, 1, 0, b"", [b"x"])
        await until(lambda: bool(ends))
        link.send(FrameKind.STOP)
        assert len(ends) == 1

    play(scene)


def test_after_closing_nothing_is_told(play: Callable[[Scene], None]) -> None:
    async def scene(link: ProcessLink, theirs: socket.socket, frames: list[Frame], ends: list[str]) -> None:
        ProcessChannel(theirs).send(FrameKind.READY)
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
        assert ProcessChannel(theirs).receive_head() is None
    ours, theirs = socket_pair()
    with theirs:
        ours.send(pack_head(FrameKind.RUN, 1, 0, 8, 0) + b"half")
        ours.close()
        with pytest.raises(ProtocolError, match="4 B before"):
            ProcessChannel(theirs).receive_head()


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


tensors = st.tuples(st.sampled_from(CODES), st.lists(st.integers(0, 9), max_size=5).map(tuple))


@st.composite
def passes(draw: st.DrawFn) -> list[list[tuple[str, tuple[int, ...]]]]:
    width = draw(st.integers(0, 3))
    return draw(st.lists(st.lists(tensors, min_size=width, max_size=width), max_size=4))


def size_bytes(table: list[list[tuple[str, tuple[int, ...]]]]) -> int:
    total = 0
    for row in table:
        for datatype, shape in row:
            size = ITEM_BYTES[datatype]
            for dim in shape:
                size *= dim
            total += size
    return total


def test_a_head_reads_back() -> None:
    head = unpack_head(pack_head(FrameKind.DONE, 7, -3, 12, 600_000))
    assert (head.kind, head.subject, head.value, head.table_bytes, head.payload_bytes) == (
        FrameKind.DONE,
        7,
        -3,
        12,
        600_000,
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bytes(HEADER.size), "begins with"),
        (HEADER.pack(b"SL", 9, FrameKind.RUN, 0, 0, 0, 0), "version 9"),
        (HEADER.pack(b"SL", 1, 99, 0, 0, 0, 0), "unknown kind 99"),
        (HEADER.pack(b"SL", 1, FrameKind.RUN, TABLE_BYTES_MAX + 1, 0, 0, 0), "announces"),
        (HEADER.pack(b"SL", 1, FrameKind.RUN, 0, PAYLOAD_BYTES_MAX + 1, 0, 0), "announces"),
    ],
)
def test_a_malformed_head_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        unpack_head(data)


@given(passes())
@settings(max_examples=50, deadline=None)
def test_a_table_reads_back(table: list[list[tuple[str, tuple[int, ...]]]]) -> None:
    found = unpack_table(pack_table(table), size_bytes(table))
    assert [[(piece.datatype, piece.shape) for piece in row] for row in found] == table


@given(passes(), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_a_table_must_fill_the_payload(table: list[list[tuple[str, tuple[int, ...]]]], more: int) -> None:
    with pytest.raises(ProtocolError, match="describes"):
        unpack_table(pack_table(table), size_bytes(table) + more)


@given(st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_table_or_refused(data: bytes) -> None:
    try:
        unpack_table(data, 0)
    except ProtocolError:
        return


def test_a_table_beyond_its_bound_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="shapes"):
        pack_table([[("FP32", (1, 2, 3, 4))]] * 10_000)


def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return Tensor("FP32", array.shape, array.astype("<f4").tobytes())


@st.composite
def batches(draw: st.DrawFn) -> list[list[Tensor]]:
    """Requests with two tensors of equal rows each, in a few different row shapes."""
    requests = []
    for index in range(draw(st.integers(1, 6))):
        rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
        requests.append(
            [
                tensor(np.full((rows, width), index, np.float32)),
                tensor(np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 100 * index),
            ]
        )
    return requests


@given(batches(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_cutting_an_echo_gives_every_request_its_own_back(requests: list[list[Tensor]], batchable: bool) -> None:
    packed = pack_batch(requests, batchable=batchable)
    payload = b"".join(chain.from_iterable(packed.payload))
    echoed = unpack_outputs(packed, packed.table, memoryview(payload))
    assert [[(t.datatype, t.shape, bytes(t.data)) for t in row] for row in echoed] == [
        [(t.datatype, t.shape, t.data) for t in row] for row in requests
    ]


@given(batches())
@settings(max_examples=50, deadline=None)
def test_requests_of_one_shape_share_a_pass(requests: list[list[Tensor]]) -> None:
    packed = pack_batch(requests, batchable=True)
    passes = unpack_table(packed.table, packed.size_bytes)
    assert len(passes) == len({tuple(t.shape[1:] for t in tensors) for tensors in requests})
    assert [pieces[0].shape[0] for pieces in passes] == [sum(rows for _, rows in held) for held in packed.members]


def test_joining_copies_nothing() -> None:
    data = memoryview(bytearray(8))
    packed = pack_batch([[Tensor("FP32", (1, 2), data)], [Tensor("FP32", (1, 2), data)]], batchable=True)
    assert all(part is data for parts in packed.payload for part in parts)


def test_an_output_without_a_row_per_row_of_input_fails_the_batch() -> None:
    row = Tensor("FP32", (1, 1), bytes(4))
    packed = pack_batch([[row], [row]], batchable=True)
    with pytest.raises(ValueError, match=r"output 0 has the shape \[1\] for 2 rows"):
        unpack_outputs(packed, pack_table([[("FP32", (1,))]]), memoryview(bytes(4)))


def test_a_request_alone_may_get_any_shape() -> None:
    packed = pack_batch([[Tensor("FP32", (2, 1), bytes(8))]], batchable=True)
    [[answer]] = unpack_outputs(packed, pack_table([[("INT64", ())]]), memoryview(bytes(8)))
    assert answer.shape == ()


def test_an_answer_to_other_passes_is_refused() -> None:
    packed = pack_batch([[Tensor("FP32", (1, 1), bytes(4))]], batchable=True)
    with pytest.raises(ProtocolError, match="2 passes, its batch 1"):
        unpack_outputs(packed, pack_table([[], []]), memoryview(b""))


def test_a_model_is_batchable_where_every_first_dimension_is_open() -> None:
    either, fixed = Port("x", "FP32", (-1, 2)), Port("y", "FP32", (1, 2))
    assert is_batchable(Signature((either,), (either,)))
    assert not is_batchable(Signature((either,), (fixed,)))
    assert not is_batchable(Signature((either, fixed), (either,)))
