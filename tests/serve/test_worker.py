"""The worker inside the test's own process, on one end of a socket pair; as a process it is tested in backends/."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from sloop.serve.transport import FrameKind, Head, ProcessChannel, ProtocolError, pack_table, socket_pair, unpack_table
from sloop.serve.worker import MILLIONTHS, InputMemory, Worker
from sloop.shared_memory import ALIGNMENT, SharedMemory, write_tensors

pytestmark = pytest.mark.live


class Server:
    """The other end of a worker that runs in a thread."""

    def __init__(self, model: str, prepared: int = 0) -> None:
        self.sock, theirs = socket_pair()
        self.sock.settimeout(10)
        self.channel = ProcessChannel(self.sock)
        self.error: BaseException | None = None

        def work() -> None:
            with theirs:
                try:
                    Worker(ProcessChannel(theirs), model, 1, prepared).serve()
                except Exception as error:
                    self.error = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def receive(self) -> tuple[Head, bytes, bytes]:
        received = self.channel.receive_head()
        assert received is not None
        payload = bytearray(received[0].payload_bytes)
        self.channel.receive_into(memoryview(payload))
        return received[0], received[1], bytes(payload)

    def until_ready(self) -> list[int]:
        """Steps of the cold start."""
        steps = []
        while (head := self.receive()[0]).kind is not FrameKind.READY:
            assert head.kind is FrameKind.STEP
            steps.append(head.subject)
        return steps

    def end(self) -> None:
        self.sock.close()
        self.thread.join(10)


@pytest.fixture
def echo() -> Iterator[Server]:
    server = Server("fake:burn:1:0")
    server.until_ready()
    yield server
    server.end()


def test_a_batch_of_two_passes_is_answered_as_onnx_runtime_would(mlp: Path) -> None:
    server = Server(str(mlp), prepared=2)
    assert server.until_ready() == [2, 3]
    xs = [np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32) for rows in (5, 1)]
    server.channel.send(FrameKind.RUN, 9, 0, pack_table([[("FP32", x.shape)] for x in xs]), [x.tobytes() for x in xs])
    head, table, payload = server.receive()
    assert (head.kind, head.subject) == (FrameKind.DONE, 9)
    assert head.value > 0
    assert [[piece.shape for piece in row] for row in unpack_table(table, len(payload))] == [[(5, 3)], [(1, 3)]]
    session = ort.InferenceSession(mlp, providers=["CPUExecutionProvider"])
    expected = np.concatenate([session.run(None, {"x": x})[0] for x in xs])
    np.testing.assert_allclose(np.frombuffer(payload, np.float32).reshape(6, 3), expected, rtol=1e-5)
    server.channel.send(FrameKind.STOP)
    server.thread.join(10)
    assert not server.thread.is_alive()
    server.end()
    assert server.error is None


def test_a_model_without_inputs_answers_each_pass(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.array([7, 8], np.float32))
    node, port = helper.make_node("Constant", [], ["y"], value=value), ("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph([node], "constant", [], [helper.make_tensor_value_info(*port)])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "m.onnx")
    server = Server(str(tmp_path / "m.onnx"))
    server.until_ready()
    server.channel.send(FrameKind.RUN, 9, 0, pack_table([[], []]))
    head, table, payload = server.receive()
    assert [piece.shape for row in unpack_table(table, head.payload_bytes) for piece in row] == [(2,), (2,)]
    assert np.frombuffer(payload, np.float32).tolist() == [7, 8, 7, 8]
    server.end()
    assert server.error is None


def test_what_the_model_raises_fails_the_batch_only(mlp: Path) -> None:
    server = Server(str(mlp))
    server.until_ready()
    server.channel.send(FrameKind.RUN, 1, 0, pack_table([[("FP32", (1, 5))]]), [bytes(20)])
    head, _, payload = server.receive()
    assert (head.kind, head.subject) == (FrameKind.FAILED, 1)
    assert b"InvalidArgument" in payload
    server.channel.send(FrameKind.RUN, 2, 0, pack_table([[("FP32", (1, 4))]]), [bytes(16)])
    assert server.receive()[0].kind is FrameKind.DONE
    server.end()
    assert server.error is None


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    server = Server(str(tmp_path / "none.onnx"))
    assert server.receive()[0].kind is FrameKind.STEP
    head, _, payload = server.receive()
    assert head.kind is FrameKind.REFUSED
    assert b"none.onnx" in payload
    server.end()
    assert server.error is not None


@pytest.mark.parametrize(
    ("kind", "subject", "value", "table"),
    [
        (FrameKind.RUN, 1, 0, b"\xff\xff\xff\xff"),
        (FrameKind.RESIZE, 0, MILLIONTHS, b""),
        (FrameKind.RESIZE, 1, 0, b""),
        (FrameKind.DONE, 1, 0, b""),
    ],
)
def test_a_malformed_frame_ends_the_worker(
    echo: Server, kind: FrameKind, subject: int, value: int, table: bytes
) -> None:
    echo.channel.send(kind, subject, value, table)
    echo.thread.join(10)
    assert isinstance(echo.error, ProtocolError)


def test_a_duty_cycle_of_a_half_doubles_the_time(echo: Server) -> None:
    echo.channel.send(FrameKind.RESIZE, 1, MILLIONTHS // 2)
    assert echo.receive()[0].kind is FrameKind.RESIZED
    echo.channel.send(FrameKind.RUN, 1, 0, pack_table([[("UINT8", (1,))]]), [b"x"])
    head, _, payload = echo.receive()
    assert payload == b"x"
    assert head.value >= 2_000_000


def test_the_desk_is_aligned_reused_and_grows() -> None:
    memory = InputMemory()
    table = pack_table([[("UINT8", (3,)), ("FP64", (2, 2)), ("FP32", ())]])
    pieces = unpack_table(table, 39)[0]
    arrays = memory.allocate(pieces)
    assert [(array.shape, array.dtype.name) for array in arrays] == [
        ((3,), "uint8"),
        ((2, 2), "float64"),
        ((), "float32"),
    ]
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays)
    assert memory.allocate(pieces)[0].ctypes.data == arrays[0].ctypes.data
    [large] = memory.allocate(unpack_table(pack_table([[("UINT8", (1000,))]]), 1000)[0])
    assert large.shape == (1000,)


def test_what_is_shared_is_found_where_it_was_laid_out() -> None:
    shared = SharedMemory.make()
    if shared is None:
        pytest.skip("this system has no anonymous memory to share")
    with closing(shared):
        pieces = unpack_table(pack_table([[("UINT8", (3,)), ("FP32", (2, 2))]]), None)[0]
        size = write_tensors(shared, [[b"a", b"bc"], [bytes(16)]])
        first, second = InputMemory(SharedMemory(shared.fd)).shared(pieces, size)
        assert (first.tobytes(), second.tolist()) == (b"abc", [[0, 0], [0, 0]])
        assert second.ctypes.data % ALIGNMENT == 0
        with pytest.raises(ProtocolError, match="the frame says 1"):
            InputMemory(shared).shared(pieces, 1)
    with pytest.raises(ProtocolError, match="of shared memory"):
        InputMemory().shared(pieces, size)


def test_an_orphan_does_not_start() -> None:
    """Its parent, process 1 at best, is not who the arguments say."""
    ours, theirs = socket_pair()
    with ours, theirs:
        arguments = [str(theirs.fileno()), str(os.getpid() + 1), "fake:sleep:0:0", "1", "0", "-1"]
        ended = subprocess.run(
            [sys.executable, "-m", "sloop.serve.worker", *arguments],
            pass_fds=[theirs.fileno()],
            timeout=20,
            check=False,
        )
    assert ended.returncode == 0


def test_a_worker_told_to_stop_leaves_at_once_whatever_it_prepares(mlp: Path) -> None:
    ours, theirs = socket_pair()
    arguments = [str(theirs.fileno()), str(os.getpid()), str(mlp), "1", "4", "-1"]
    command = [sys.executable, "-m", "sloop.serve.worker", *arguments]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as process:
        ours.settimeout(10)
        channel = ProcessChannel(ours)
        while (received := channel.receive_head()) is not None and received[0].kind is not FrameKind.READY:
            pass
        channel.send(FrameKind.STOP)
        assert process.stderr is not None
        assert (process.wait(10), process.stderr.read()) == (0, b"")
