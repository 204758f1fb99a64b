"""The worker inside the test's own process, on one end of a socket pair; test_local_backend.py has it as a process."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from sloop.actions import Piece
from sloop.profile import operators
from sloop.profile.model import NOTHING, OnnxSession, read_signature
from sloop.serve.blocks import BlockReader, write_block
from sloop.serve.dataflow import (
    APPLICATION,
    Assembler,
    Assembly,
    Decision,
    Need,
    Passed,
    Source,
    StageWiring,
    read_whole,
    wire,
)
from sloop.serve.messages import (
    BatchFinished,
    BatchRaised,
    Free,
    FromWorker,
    Reached,
    Report,
    Run,
    RunBatch,
    Threads,
    WorkerDiffers,
    decoder,
    encode,
)
from sloop.serve.protocols import Servable, StageSetup
from sloop.serve.runtimes import FileRuntime
from sloop.serve.transport import FrameKind, ProcessChannel, ProtocolError, records_in, socket_pair
from sloop.serve.worker import (
    InputMemory,
    ModelWorker,
    check_rows,
    group,
    rows_of,
    split,
    tensors_of,
)
from sloop.shared_memory import ALIGNMENT, Address, Arena, Arenas, HeldArena
from sloop.tensor import MISSING, Cut, Padding, Port, Signature, Tensor, join_strings
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId
from tests.onnx_graphs import onnx_model, save_model
from tests.serve.graphs import graph_of
from tests.serve.rig import alone, run_of, tensors_in

pytestmark = pytest.mark.live


T = TypeVar("T")
A = ReplicaId(1)
BYTES = Signature((Port("x", "UINT8", (-1,)),), (Port("x", "UINT8", (-1,)),))
MLP = Signature((Port("x", "FP32", (-1, 4)),), (Port("y", "FP32", (-1, 3)),))


class Server:
    """The other end of a worker that runs in a thread."""

    def __init__(
        self,
        model: str,
        signature: Signature = BYTES,
        *,
        wiring: StageWiring | None = None,
        is_batchable: bool = True,
        verify_first: int = 0,
        operators: tuple[str, ...] = (),
        padding: Padding | None = None,
        arena: HeldArena | None = None,
    ) -> None:
        self.sock, theirs = socket_pair()
        self.sock.settimeout(10)
        self.channel = ProcessChannel(self.sock)
        self.error: BaseException | None = None

        def work() -> None:
            own = Arenas()
            with theirs, contextlib.closing(own):
                try:
                    held = arena or own.make(1 << 20, lambda _: None)
                    ModelWorker(ProcessChannel(theirs), Arena(held.number, held.fd)).serve()
                except Exception as error:
                    self.error = error

        obstacle = "" if is_batchable else "a test"
        servable = Servable(model, signature, obstacle, operators=operators, verify_first=verify_first, padding=padding)
        setup = StageSetup(A, wiring or alone("only", signature), servable, "local", holders={0: os.getpid()})
        self.channel.tell(setup)
        self.thread = threading.Thread(target=work)
        self.thread.start()

    def __enter__(self) -> Self:
        """It is ready."""
        self.until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        assert self.error is None

    def hear(self, kind: type[T]) -> T:
        """The next record of the worker, of this kind."""
        received = self.channel.receive()
        assert received is not None
        (record,) = records_in(received, decoder(list[FromWorker]).decode)
        assert isinstance(record, kind), record
        return record

    def until_ready(self) -> list[str]:
        """Steps of the cold start."""
        return list(iter(lambda: self.hear(Reached).step, "ready"))

    def send(self, order: Run, number: int = 9, sent_ns: int = 0) -> None:
        """Order a batch."""
        self.channel.tell(RunBatch(BatchId(number), A, order, sent_ns=sent_ns))

    def run(self, order: Run, number: int = 9) -> BatchFinished:
        """What has become of a batch."""
        self.send(order, number, time.monotonic_ns())
        done = self.hear(BatchFinished)
        assert (done.event.batch, done.event.replica) == (number, A)
        assert done.event.service_ns > 0
        return done

    def end(self) -> None:
        self.sock.close()
        self.thread.join(10)


@pytest.fixture
def echo() -> Iterator[Server]:
    server = Server("fake:burn:1:0")
    server.until_ready()
    yield server
    server.end()


def values(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return Tensor("FP32", array.shape, array.astype("<f4").tobytes())


def test_visits_of_a_batch_are_answered_as_onnx_runtime_would(mlp: Path) -> None:
    server = Server(str(mlp), MLP)
    assert server.until_ready() == ["loading", "warming"]
    xs = [np.random.default_rng(rows).normal(size=(rows, 4)).astype(np.float32) for rows in (5, 1)]
    done = server.run(run_of([[values(x)] for x in xs]))
    session = ort.InferenceSession(mlp, providers=["CPUExecutionProvider"])
    for x, [y] in zip(xs, tensors_in(done.blocks), strict=True):
        assert (y.datatype, y.shape) == ("FP32", (len(x), 3))
        got = np.frombuffer(y.data, np.float32).reshape(y.shape)
        np.testing.assert_allclose(got, session.run(None, {"x": x})[0], rtol=1e-5)
    server.sock.shutdown(socket.SHUT_WR)
    server.thread.join(10)
    assert not server.thread.is_alive()
    server.end()
    assert server.error is None


def test_a_worker_loads_the_libraries_of_operators_that_its_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(operators.MODULE, reason="onnxruntime-extensions is not installed here")
    monkeypatch.setattr(operators, "_in_use", {})
    made = onnx_model("(string[n] x) => (string[n] y) { y = ai.onnx.contrib.StringUpper(x) }")
    made.opset_import.add(domain="ai.onnx.contrib", version=1)
    onnx.save(made, tmp_path / "m.onnx")
    signature = Signature((Port("x", "BYTES", (-1,)),), (Port("y", "BYTES", (-1,)),))
    with Server(str(tmp_path / "m.onnx"), signature, operators=(operators.EXTENSIONS,)) as server:
        ((answer,),) = tensors_in(server.run(run_of([[Tensor("BYTES", (1,), join_strings(["abc"]))]])).blocks)
        assert bytes(answer.data) == join_strings(["ABC"])


def test_a_model_without_inputs_answers_each_visit(tmp_path: Path) -> None:
    path = save_model(tmp_path / "m.onnx", "() => (float[2] y) { y = Constant<value_floats = [7.0, 8.0]>() }")
    signature, nothing = Signature((), (Port("y", "FP32", (2,)),)), StageWiring("only", Assembly((), ()))
    with Server(str(path), signature, wiring=nothing, is_batchable=False) as server:
        done = server.run(Run(2, []))
        answers = [np.frombuffer(y.data, np.float32).tolist() for [y] in tensors_in(done.blocks)]
        assert answers == [[7, 8], [7, 8]]


def test_libraries_are_part_of_the_process_and_not_of_loading(mlp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is no spare one loads them before it says that it loads the model."""
    prepared: list[str] = []
    monkeypatch.setattr("sloop.serve.worker.prepare_runtimes", prepared.append)
    server = Server(str(mlp), MLP)
    assert server.hear(Reached).step == "loading"
    assert prepared == [str(mlp)]
    server.until_ready()
    server.end()
    assert server.error is None


def test_what_the_model_raises_fails_the_batch_only(mlp: Path) -> None:
    with Server(str(mlp), MLP) as server:
        server.send(run_of([[Tensor("FP32", (1, 5), bytes(20))]]), 1)
        raised = server.hear(BatchRaised)
        assert raised.batch == 1
        failure = ModelFailure.decode(raised.failure)
        assert failure.is_refusal, "the client sent rows of another size"
        assert failure.summary.startswith("the model cannot run on these inputs: Got invalid dimensions for input: x")
        assert failure.summary.endswith("index: 1 Got: 5 Expected: 4")
        server.run(run_of([[Tensor("FP32", (1, 4), bytes(16))]]))


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    server = Server(str(tmp_path / "none.onnx"))
    server.hear(Reached)
    assert "none.onnx" in server.hear(Report).event.error
    server.end()
    assert server.error is not None


@pytest.mark.parametrize(
    "records",
    [
        [],
        [Threads(1, 1.0)],
        [StageSetup(A, alone("only", BYTES), Servable("fake:echo", BYTES), "local"), Threads(1, 1.0)],
    ],
    ids=["none", "another", "two"],
)
def test_a_first_frame_without_one_setup_ends_the_worker(records: list[Struct]) -> None:
    ours, theirs = socket_pair()
    with ours, theirs, contextlib.closing(Arenas()) as own:
        held = own.make(1 << 20, lambda _: None)
        ProcessChannel(ours).send(FrameKind.RECORDS, payload=[encode(records)])
        with pytest.raises(ProtocolError, match="instead of what to serve"):
            ModelWorker(ProcessChannel(theirs), Arena(held.number, held.fd)).serve()


@pytest.mark.parametrize(
    "order",
    [
        RunBatch(BatchId(1), A, Run(2, [b""])),
        RunBatch(BatchId(1), A, Run(1, [bytes(100)])),
        RunBatch(BatchId(1), A, Run(1, [Address(1 << 20, 0, 8)])),
        RunBatch(BatchId(1), A, Run(1, [b""]), is_part=True),
        Free(Address(1, 0, 8)),
        Threads(0, 1.0),
        Threads(1, 0.0),
        Reached("loading"),
    ],
)
def test_a_malformed_order_ends_the_worker(echo: Server, order: Struct) -> None:
    echo.channel.tell(order)
    echo.thread.join(10)
    assert isinstance(echo.error, ProtocolError)


def test_a_frame_that_is_none_of_a_worker_ends_it(echo: Server) -> None:
    echo.channel.send(FrameKind.BYTES)
    echo.thread.join(10)
    assert isinstance(echo.error, ProtocolError)


def test_a_duty_cycle_of_a_half_doubles_the_time(echo: Server) -> None:
    echo.channel.tell(Threads(1, 0.5))
    assert echo.hear(Reached).step == "resized"
    assert echo.run(run_of([[Tensor("UINT8", (1,), b"x")]])).event.service_ns >= 2_000_000


def test_the_time_of_a_batch_is_that_from_sending_it_or_from_the_answer_before(echo: Server) -> None:
    order = run_of([[Tensor("UINT8", (1,), b"x")]])
    long_ago_ns = time.monotonic_ns() - 10**9
    echo.send(order, 1, long_ago_ns)
    assert echo.hear(BatchFinished).event.service_ns > 10**9, "the worker was held up before it received the batch"
    echo.send(order, 2, long_ago_ns)
    assert echo.hear(BatchFinished).event.service_ns < 10**9, "it was answering another batch"


def test_the_memory_of_inputs_is_aligned_reused_and_grows() -> None:
    memory = InputMemory()
    three = [[Tensor("UINT8", (3,), b"abc")], [Tensor("FP64", (2, 2), bytes(32))], [Tensor("FP32", (), bytes(4))]]
    (arrays,) = memory.load([three])
    assert [(array.shape, array.dtype.name) for array in arrays] == [
        ((3,), "uint8"),
        ((2, 2), "float64"),
        ((), "float32"),
    ]
    assert all(array.ctypes.data % ALIGNMENT == 0 for array in arrays)
    assert all(array.flags.writeable for array in arrays), "a stage in Python may change its inputs"
    assert memory.load([three])[0][0].ctypes.data == arrays[0].ctypes.data
    [[large]] = memory.load([[[Tensor("UINT8", (1000,), bytes(1000))]]])
    assert large.shape == (1000,)


# Batches


@st.composite
def batches(draw: st.DrawFn) -> list[list[Tensor]]:
    """Visits with three tensors of equal rows each, one of them text, in a few different row shapes."""
    visits = []
    for index in range(draw(st.integers(1, 6))):
        rows, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
        words = draw(st.lists(st.binary(max_size=3), min_size=rows, max_size=rows))
        visits.append(
            [
                values(np.full((rows, width), index, np.float32)),
                values(np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) + 100 * index),
                Tensor("BYTES", (rows,), join_strings(words)),
            ]
        )
    return visits


@given(batches(), st.booleans())
@settings(max_examples=50)
def test_an_echo_gives_every_visit_its_own_back(visits: list[list[Tensor]], batchable: bool) -> None:
    ports = [Port("a", "FP32", (-1, -1)), Port("b", "FP32", (-1, 3)), Port("c", "BYTES", (-1,))]
    found: dict[int, list[Tensor]] = {}
    passes = group(visits, batchable=batchable)
    pieces = [[list(joined) for joined in zip(*(visits[i] for i in each), strict=True)] for each in passes]
    for members, arrays in zip(passes, InputMemory().load(pieces), strict=True):
        assert not batchable or len({tensor.shape[1:] for i in members for tensor in visits[i][:1]}) == 1
        rows = [visits[i][0].shape[0] for i in members]
        found |= zip(members, split(tensors_of(arrays, ports), rows), strict=True)
    assert [[(t.datatype, t.shape, bytes(t.data)) for t in found[i]] for i in range(len(visits))] == [
        [(t.datatype, t.shape, t.data) for t in visit] for visit in visits
    ]
    if batchable:
        assert len(passes) == len({visit[0].shape[1:] for visit in visits})


@given(batches(), st.integers(1, 5))
@settings(max_examples=50)
def test_pieces_of_visits_join_to_the_visits(visits: list[list[Tensor]], rows_max: int) -> None:
    for visit in visits:
        rows = visit[0].shape[0]
        pieces = {first: rows_of(visit, first, min(rows_max, rows - first)) for first in range(0, rows, rows_max)}
        blocks = {first: write_block(piece, None) for first, piece in reversed(pieces.items())}
        whole = read_whole(blocks, lambda block: BlockReader({}).tensors(block))
        assert [(t.datatype, t.shape, bytes(t.data)) for t in whole] == [(t.datatype, t.shape, t.data) for t in visit]


def test_pieces_whose_outputs_differ_in_more_than_rows_do_not_join() -> None:
    blocks = {n: write_block([Tensor("UINT8", (1, n), bytes(n)), MISSING], None) for n in (1, 2)}
    with pytest.raises(ValueError, match=r"output 0 .* rows of UINT8 \[1\] and UINT8 \[2\]"):
        read_whole(blocks, lambda block: BlockReader({}).tensors(block))


def test_pieces_of_a_request_run_beside_others_and_only_their_rows() -> None:
    with Server("fake:sleep:0:0") as server:
        order = run_of([[Tensor("UINT8", (5,), b"12345")], [Tensor("UINT8", (2,), b"67")]])
        done = server.run(structs.replace(order, pieces=(Piece(3, 2, 5), None)))
        assert [bytes(found.data) for [found] in tensors_in(done.blocks)] == [b"45", b"67"]
        assert done.event.passes == 1
        done = server.run(structs.replace(order, pieces=(Piece(0, 2, 4), None)))
        assert (done.blocks[0], done.faults) == (
            None,
            {0: "an input has the shape [5], where 4 rows are to be divided"},
        )


TEXT = Signature(
    (Port("ids", "INT64", (-1, -1)), Port("mask", "FP32", (-1, -1))),
    (Port("same", "INT64", (-1, -1)), Port("sum", "FP32", (-1,)), Port("length", "FP32", (-1,))),
)
ENCODER = """
import numpy as np
class Model:
    inputs = {"ids": ("INT64", (-1, -1)), "mask": ("FP32", (-1, -1))}
    outputs = {"same": ("INT64", (-1, -1)), "sum": ("FP32", (-1,)), "length": ("FP32", (-1,))}
    joins_rows = True
    def __init__(self, threads): pass
    def run(self, ids, mask):
        weighed = ids * mask %s
        return ids, weighed.sum(axis=1).astype(np.float32), np.full(len(ids), ids.shape[1], np.float32)
"""
TEXT_PADDING = Padding((7, 0), (Cut(0, 1, 0, 1),))


def texts(*lengths: int, rows: int = 1) -> Run:
    """Requests whose elements are their lengths."""
    ids = [Tensor("INT64", (rows, n), np.full((rows, n), n, np.int64).tobytes()) for n in lengths]
    masks = [values(np.ones((rows, n), np.float32)) for n in lengths]
    return run_of(list(zip(ids, masks, strict=True)))


def test_requests_of_different_lengths_share_a_padded_pass_and_get_their_own_back(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(ENCODER % "")
    with Server(str(tmp_path / "m.py"), TEXT, padding=TEXT_PADDING) as server:
        done = server.run(texts(2, 5, 3, rows=2))
        assert (done.event.passes, done.event.elements, done.event.padded) == (1, 2 * (2 + 5 + 3), 2 * (3 + 2))
        for length, (same, total, ran) in zip((2, 5, 3), tensors_in(done.blocks), strict=True):
            assert (same.shape, same.datatype) == ((2, length), "INT64")
            assert np.frombuffer(same.data, np.int64).tolist() == [length] * 2 * length, "nothing of 7, the padding"
            assert np.frombuffer(total.data, np.float32).tolist() == [length * length] * 2
            assert np.frombuffer(ran.data, np.float32).tolist() == [5, 5]
        alike = server.run(texts(4, 4))
        assert (alike.event.passes, alike.event.elements, alike.event.padded) == (1, 8, 0)


def test_without_padding_requests_of_different_lengths_take_several_passes_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(ENCODER % "")
    with Server(str(tmp_path / "m.py"), TEXT) as server:
        done = server.run(texts(2, 5, 2))
        assert (done.event.passes, done.event.elements, done.event.padded) == (2, 0, 0)


@pytest.mark.parametrize(("more", "differs"), [("", False), ("+ (mask == 0)", True)])
def test_a_padded_request_is_compared_with_itself_alone(tmp_path: Path, more: str, *, differs: bool) -> None:
    """Padding must not change the answers of real requests either."""
    (tmp_path / "m.py").write_text((ENCODER % more).replace("ids.shape[1]", "1"))
    with Server(str(tmp_path / "m.py"), TEXT, padding=TEXT_PADDING, verify_first=100) as server:
        server.run(texts(2, 5))
        if differs:
            assert "'sum'" in server.hear(WorkerDiffers).why
        done = server.run(texts(2, 5))
        assert done.event.passes == (2 if differs else 1)


@pytest.mark.parametrize("is_batchable", [True, False])
def test_a_worker_tells_how_many_rows_it_passes_on_and_how_large_they_are(tmp_path: Path, is_batchable: bool) -> None:
    """The number of rows only where the model may change it."""
    (tmp_path / "m.py").write_text(ENCODER % "")
    passed = (Passed(0, ((0, (1,)),)), Passed(1), Passed(None, from_client=True))
    wiring = replace(alone("only", TEXT), passed=passed)
    with Server(str(tmp_path / "m.py"), TEXT, wiring=wiring, padding=TEXT_PADDING, is_batchable=is_batchable) as server:
        done = server.run(texts(2, 5, rows=3))
        assert done.event.sizes == (((3, 2), (3, 0), (0, 0)), ((3, 5), (3, 0), (0, 0)))
    wiring = replace(alone("only", TEXT), passed=(Passed(1),))
    with Server(str(tmp_path / "m.py"), TEXT, wiring=wiring, is_batchable=is_batchable) as server:
        assert server.run(texts(2, rows=3)).event.sizes == (() if is_batchable else (((3, 0),),))
    whole = (
        *(Passed(1, is_whole=True), Passed(0, ((0, (1,)),), is_whole=True), Passed(1, is_joined=True)),
        Passed(0, ((0, (1,)),), is_whole=True, is_joined=True),
    )
    wiring = replace(alone("only", TEXT), passed=whole)
    with Server(str(tmp_path / "m.py"), TEXT, wiring=wiring, is_batchable=is_batchable) as server:
        assert server.run(texts(2, rows=3)).event.sizes == (((1, 3), (1, 6), (3, 0), (0, 6)),)


@pytest.fixture
def two_outputs(tmp_path: Path) -> Path:
    """`small`, and `big` of another branch, with a row of 1,000 each."""
    text = """(float[rows, 2] x) => (float[rows, 1] small, float[rows, 1000] big) {
        small = ReduceSum(x, axis) big = Expand(small, size)
    }"""
    return save_model(tmp_path / "two.onnx", text, {"axis": np.array([1]), "size": np.array([1, 1000])})


TWO_OUTPUTS = Signature(
    (Port("x", "FP32", (-1, 2)),), (Port("small", "FP32", (-1, 1)), Port("big", "FP32", (-1, 1000)))
)


def test_each_visit_gets_the_outputs_that_it_needs(two_outputs: Path) -> None:
    """Also when visits that need others share a pass."""
    with Server(str(two_outputs), TWO_OUTPUTS) as server:
        x = [values(np.full((rows, 2), rows, np.float32)) for rows in (1, 2, 9)]
        whole = run_of([[each] for each in x])
        for outputs in (((0,), (1,), (0,)), ((0,), (0,), (0,)), ((), (1,), (0, 1)), ()):
            done = server.run(structs.replace(whole, outputs=outputs))
            for place, (rows, found) in enumerate(zip((1, 2, 9), tensors_in(done.blocks), strict=True)):
                wanted = (outputs[place] if outputs else ()) or (0, 1)
                assert [tensor.datatype for tensor in found] == ["FP32" if n in wanted else "NONE" for n in (0, 1)]
                for n, width in enumerate((1, 1000)):
                    if n in wanted:
                        assert found[n].shape == (rows, width)
                        assert np.unique(np.frombuffer(found[n].data, np.float32)).tolist() == [2 * rows]


def test_outputs_that_no_request_can_need_are_never_written(two_outputs: Path) -> None:
    wiring = replace(alone("only", TWO_OUTPUTS), outputs=(0,))
    with Server(str(two_outputs), TWO_OUTPUTS, wiring=wiring) as server:
        ((small, big),) = tensors_in(server.run(run_of([[values(np.ones((1, 2), np.float32))]])).blocks)
        assert (bytes(small.data), big.datatype) == (np.float32(2).tobytes(), "NONE")


def test_a_frequent_choice_of_outputs_has_a_session_that_computes_nothing_else(two_outputs: Path) -> None:
    runtime = FileRuntime(str(two_outputs))
    runtime.load(1)
    runtime.warm(1)
    runtime.prune((0,))
    runtime.load(2)
    runtime.warm(2)
    x = np.ones((3, 2), np.float32)
    for threads in (1, 2):
        session, _ = runtime.session(threads)
        assert isinstance(session, OnnxSession)
        (pruned,) = session._pruned.values()
        assert [each.name for each in pruned.get_outputs()] == ["small"]
        (small, big), _ = runtime.run([x], threads, (0,))
        assert (small.tolist(), big) == ([[2], [2], [2]], NOTHING)
        (small, big), _ = runtime.run([x], threads)
        assert (small.tolist(), big.shape) == ([[2], [2], [2]], (3, 1000))
        assert not session.prune((1,)), "all nodes are needed"


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """y = scale · x + shift, which are 2 and 0 if they are not given; `rows` has the number of rows of the pass."""
    text = """(float[n, 1] x, float[1] scale, float[1] shift) => (float[n, 1] y, float[n, 1] rows) {
        xs = Mul(x, scale) y = Add(xs, shift)
        size = Shape<end = 1>(x) count = Cast<to = 1>(size) none = Mul(x, zero) rows = Add(none, count)
    }"""
    defaults = {"scale": 2, "shift": 0, "zero": 0}
    return save_model(
        tmp_path / "scaled.onnx", text, {name: np.array([each], np.float32) for name, each in defaults.items()}
    )


def test_requests_that_give_optional_inputs_run_alone_and_the_others_together(scaled: Path) -> None:
    signature = read_signature(scaled)
    assert [port.name for port in signature.inputs] == ["x"]
    assert [(port.name, port.has_rows) for port in signature.optional] == [("scale", False), ("shift", False)]
    wiring = wire(graph_of({"only": ()}), {("only", "v"): signature}).of("only")
    with Server(str(scaled), signature, wiring=wiring) as server:
        visits = [
            ([1, 1], None, None),
            ([1], 3, None),
            ([1, 1, 1, 1, 1], 5, 1),
            ([1], None, None),
            ([1], 3, None),
        ]
        given = [
            [values(np.array(rows, np.float32).reshape(-1, 1)), *(optional_value(each) for each in others)]
            for rows, *others in visits
        ]
        done = server.run(run_of(given))
        found = [np.frombuffer(tensor.data, np.float32).tolist() for pair in tensors_in(done.blocks) for tensor in pair]
        assert found == [[2, 2], [3, 3], [3], [1], [6] * 5, [5] * 5, [2], [3], [3], [1]]


def optional_value(value: float | None) -> Tensor:
    return MISSING if value is None else values(np.array([value], np.float32))


def test_a_piece_whose_outputs_have_other_rows_fails_the_batch() -> None:
    two = Tensor("FP32", (2, 1), bytes(8))
    check_rows([two, MISSING], 2)
    with pytest.raises(ValueError, match=r"output 1 has the shape \[2, 1\] for 3 rows of a larger request"):
        check_rows([MISSING, two], 3)


def test_an_output_without_a_row_per_row_of_input_fails_the_batch() -> None:
    one = Tensor("FP32", (1,), bytes(4))
    with pytest.raises(ValueError, match=r"output 0 has the shape \[1\] for 2 rows"):
        split([one], [1, 1])
    assert split([Tensor("INT64", (), bytes(8))], [2])[0][0].shape == (), "a visit alone may get any shape"


def test_large_outputs_are_blocks_of_the_arena_and_all_are_freed_if_one_does_not_fit() -> None:
    arenas = Arenas()
    held = arenas.make(1 << 20, lambda _: None)
    with Server("fake:sleep:0:0", arena=held) as server:
        large = [Tensor("UINT8", (400_000,), bytes(400_000))]
        server.send(run_of([large, large, large]))
        assert b"no room for the outputs" in server.hear(BatchRaised).failure
        for _ in range(3):
            done = server.run(run_of([large, large, [Tensor("UINT8", (3,), b"abc")]]))
            first, second, small = done.blocks
            assert isinstance(first, Address)
            assert isinstance(second, Address)
            assert isinstance(small, bytes)
            assert tensors_in([first])[0][0].data == bytes(400_000)
            server.channel.tell(Free(first))
            server.channel.tell(Free(second))
    arenas.abandon(held)


# What outputs decide


def test_a_worker_reports_what_outputs_decide_and_which_visits_do_not_fit() -> None:
    """Parts are rows that are not 0; a visit whose block is missing does not run."""
    port = Port("x", "UINT8", (-1,))
    wiring = StageWiring(
        "find",
        Assembly(((Source(APPLICATION, 0),),), (Need(APPLICATION, "whole"),)),
        (Decision("read", when=0, each=0, sliced=((0, port),)),),
    )
    with Server("fake:sleep:0:0", wiring=wiring, is_batchable=False) as server:
        found = write_block([Tensor("UINT8", (3,), bytes([0, 7, 9]))], None)
        done = server.run(Run(3, [found, None, found]))
        assert done.event.edge_counts == ((2,), (), (2,))
        assert done.faults == {1: "stage 'find' needs an output of '', which did not run for this request"}
        assert done.blocks[1] is None
        assert isinstance(done.blocks[0], bytes)
        assert server.run(Run(2, [None, None])).faults.keys() == {0, 1}, (
            "it does not fail as a whole, to be tried again"
        )
        reading = Assembler(Assembly(((Source("find", 0, "row", "read"),),), (Need("find", "whole", ("read",)),)))
        read = BlockReader({}).tensors
        parts = [reading.inputs("read", part, [done.blocks[0]], read)[0] for part in range(2)]
        assert [bytes(part.data) for part in parts] == [bytes([7]), bytes([9])]


def test_an_orphan_does_not_start() -> None:
    """Its parent, process 1 at best, is not who the arguments say."""
    ours, theirs = socket_pair()
    with ours, theirs:
        arguments = [str(theirs.fileno()), str(os.getpid() + 1), "0", "-1"]
        ended = subprocess.run(
            [sys.executable, "-m", "sloop.serve.worker", *arguments],
            pass_fds=[theirs.fileno()],
            timeout=20,
            check=False,
        )
    assert ended.returncode == 0


def test_a_worker_told_to_stop_leaves_at_once_whatever_it_prepares(mlp: Path) -> None:
    (ours, theirs), arenas = socket_pair(), Arenas()
    held = arenas.make(1 << 20, lambda _: None)
    command = [sys.executable, "-m", "sloop.serve.worker"]
    command += map(str, (theirs.fileno(), os.getpid(), held.number, held.fd))
    inherited = [theirs.fileno(), held.fd]
    with ours, theirs, subprocess.Popen(command, pass_fds=inherited, stderr=subprocess.PIPE) as process:
        ours.settimeout(10)
        channel = ProcessChannel(ours)
        channel.tell(StageSetup(A, alone("only", MLP), Servable(str(mlp), MLP), "local", prepared=4))
        while (received := channel.receive()) is not None and b"ready" not in bytes(received.payload):
            pass
        ours.shutdown(socket.SHUT_WR)
        assert process.stderr is not None
        assert (process.wait(10), process.stderr.read()) == (0, b"")
    arenas.close()
