"""Parts of a model in worker processes: they serve together what the model answers, complete themselves, and lose only
what a lost part had to compute."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Decided, StartBatch, StartWorker, StopWorker
from sloop.app.load import load_application
from sloop.cli import main
from sloop.errors import InputError, MachineError
from sloop.events import BatchFailed, BatchLost, Finished, WorkerCompleted, WorkerLost, WorkerReady, WorkerStopped
from sloop.profile.examine import examine
from sloop.profile.profile import LatencyTable, LayerBlock, LayerProfile, Profile, Startup, save_profile
from sloop.runlog import Record, read_log
from sloop.serve import pipelines
from sloop.serve.blocks import tensors_in, write_block
from sloop.serve.control.checks import check_live
from sloop.serve.control.cutting import cut_of
from sloop.serve.control.loading import loadable
from sloop.serve.messages import BatchPassed, PassedBatch, Run
from sloop.serve.node.node import LiveNode
from sloop.serve.node.pipelines import ProcessPipeline
from sloop.serve.pipelines import PartPipes, PartRuntime
from sloop.serve.protocols import Servable
from sloop.serve.runtimes import Array
from sloop.serve.server import check_nodes
from sloop.serve.shadows import CutRuntime
from sloop.serve.transport import ProcessChannel, ProtocolError
from sloop.sim.checkers import Checkers, Rules
from sloop.systems.replay import rebuild, replay_log
from sloop.systems.setup import set_up
from sloop.tensor import Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot, parts_at
from tests.onnx_graphs import save_model
from tests.serve.edge.fakes import LoopThread
from tests.serve.rig import run_of, until
from tests.serve.test_local_backend import Ear, local_node
from tests.serve.test_server import Running

WIDTH = 256
"""16 rows between two layers are more than travels inline."""
ENDS = ("r1", "r2", "r3", "y")
CUTS = [(0, *cuts, 4) for count in (1, 2, 3) for cuts in combinations((1, 2, 3), count)]
A, B, C, D = (ReplicaId(number) for number in range(1, 5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four dense layers; the last one also reads the input, and what the second has computed."""
    chance, sizes = np.random.default_rng(5), {"a": WIDTH, "b": WIDTH, "c": WIDTH, "d": 5}
    weights = {name: chance.normal(size=(WIDTH, size)).astype(np.float32) / 16 for name, size in sizes.items()}
    text = f"""(float[n, {WIDTH}] x) => (float[n, 5] y) {{
        m0 = MatMul(x, a) [r1] r1 = Relu(m0)
        m1 = MatMul(r1, b) [r2] r2 = Relu(m1)
        m2 = MatMul(r2, c) [r3] r3 = Relu(m2)
        [sum] sum = Add(r2, r3) [all] all = Add(sum, x) [y] y = MatMul(all, d)
    }}"""
    return save_model(tmp_path_factory.mktemp("models") / "skips.onnx", text, weights)


def table(row_ms: float) -> LatencyTable:
    """As fast as it has cores."""
    return LatencyTable({rows: {cores: rows * row_ms / cores for cores in (0.5, 1.0)} for rows in (1, 16)})


def layers_of(
    ends: Sequence[str] = ENDS, counts: Sequence[int] = (2, 2, 2, 3), *, row_ms: float = 10.0
) -> LayerProfile:
    """Each block takes `row_ms` for each row on a core; `counts` has its layers."""
    blocks = tuple(
        LayerBlock(
            end=end,
            operators="MatMul",
            layers=count,
            param_bytes=4 * WIDTH * WIDTH,
            output_bytes=4 * WIDTH,
            crossing_bytes=4 * WIDTH,
            load_ms=1.0,
            latency_ms=table(row_ms),
        )
        for end, count in zip(ends, counts, strict=True)
    )
    return LayerProfile(
        blocks=blocks,
        load_ms=4.0,
        latency_ms=table(4 * row_ms),
        input_bytes=4 * WIDTH,
        move_ms_per_mb=0.5,
        difference=0.0,
    )


def profile_of(layers: LayerProfile | None = None) -> Profile:
    layers = layers or layers_of()
    return Profile(latency_ms=layers.latency_ms, max_batch=16, max_cores=1, layers=layers)


def servable(model: Path, folder: Path, *, row_ms: float = 10.0, for_shadows: bool = False) -> Servable:
    known = examine(model)
    cut = cut_of(known, {"": profile_of(layers_of(row_ms=row_ms))}, {}, folder, for_shadows=for_shadows)
    return Servable(known.file, known.signature, cut=cut)


@cache
def session_of(model: Path) -> Any:
    return ort.InferenceSession(model, providers=["CPUExecutionProvider"])


def inputs(rows: int, seed: int = 0) -> Array:
    return np.random.default_rng((rows, seed)).normal(size=(rows, WIDTH)).astype(np.float32)


def check_equal(got: Array, model: Path, x: Array) -> None:
    """Within a millionth of the largest output."""
    expected = session_of(model).run(None, {"x": x})[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


# The runtime of a part


@pytest.mark.parametrize("bounds", CUTS)
def test_parts_of_any_cut_give_what_the_model_gives(model: Path, tmp_path: Path, bounds: tuple[int, ...]) -> None:
    made = servable(model, tmp_path)
    assert made.cut is not None
    parts = [PartRuntime(made.cut.blocks, made.signature, range(*layers)) for layers in pairwise(bounds)]
    for part in parts:
        assert part.load(1)
        part.warm(1)
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    for rows in (1, 16):
        x = inputs(rows)
        known = parts[0].begin([x])
        for part, following in pairwise(parts):
            block = write_block(part.passed_on(part.run_part(known, 1)), None)
            assert isinstance(block, bytes)
            known = following.take(tensors_in(block))
        [y] = parts[-1].outputs(parts[-1].run_part(known, 1))
        check_equal(y, model, x)


@pytest.mark.parametrize("bounds", [(0, 1, 2), (0, 2)])
def test_inputs_that_are_outputs_pass_by_all_parts(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    """One of them no layer reads."""
    given = "float[n, 3] x, float[n, 3] id"
    graph = f"({given}) => (float[n, 3] y, {given}) {{ r = Relu(x) y = Neg(r) }}"
    known = examine(save_model(tmp_path / "passing.onnx", graph))
    assert known.obstacle == ""
    profile = profile_of(layers_of(("r", "y"), (1, 1)))
    cut = cut_of(known, {"": profile}, {}, tmp_path, for_shadows=False)
    x, id = np.random.default_rng(3).normal(size=(2, 4, 3)).astype(np.float32)
    if len(bounds) == 2:
        whole = CutRuntime(cut.blocks, known.signature)
        whole.load(1)
        found, _ = whole.run([x, id], 1)
    else:
        parts = [PartRuntime(cut.blocks, known.signature, range(*layers)) for layers in pairwise(bounds)]
        for part in parts:
            part.load(1)
        passed = write_block(parts[0].passed_on(parts[0].run_part(parts[0].begin([x, id]), 1)), None)
        assert isinstance(passed, bytes)
        found = parts[1].outputs(parts[1].run_part(parts[1].take(tensors_in(passed)), 1))
    for got, expected in zip(found, (-np.maximum(x, 0), x, id), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_parts_may_count_rows_as_their_model_does(tmp_path: Path) -> None:
    """As language models do, whose layers see one row for each word: a shadow could not divide these, but parts get
    whole batches."""
    weights = {"w": np.eye(3, dtype=np.float32)[::-1] * 2, "two": np.array((-1, 3)), "three": np.array((-1, 4, 3))}
    text = """(float[n, 4, 3] x) => (float[n, 4, 3] y) {
        [words] words = Reshape(x, two) [r] r = MatMul(words, w) [s] s = MatMul(r, w) [y] y = Reshape(s, three)
    }"""
    path = save_model(tmp_path / "words.onnx", text, weights)
    known, profile = examine(path), profile_of(layers_of(("r", "y"), (2, 2)))
    with pytest.raises(InputError, match="rows of a batch cannot be divided at 'y'"):
        cut_of(known, {"": profile}, {}, tmp_path)
    cut = cut_of(known, {"": profile}, {}, tmp_path, for_shadows=False)
    parts = [PartRuntime(cut.blocks, known.signature, range(*layers)) for layers in ((0, 1), (1, 2))]
    for part in parts:
        part.load(1)
        part.warm(1)
    x = np.random.default_rng(3).normal(size=(5, 4, 3)).astype(np.float32)
    passed = write_block(parts[0].passed_on(parts[0].run_part(parts[0].begin([x]), 1)), None)
    assert isinstance(passed, bytes)
    [y] = parts[1].outputs(parts[1].run_part(parts[1].take(tensors_in(passed)), 1))
    np.testing.assert_allclose(y, 4 * x, rtol=1e-6)
    parts[0].load_others(1)
    [y], _ = parts[0].run([x], 1)
    np.testing.assert_allclose(y, 4 * x, rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_part_cannot_serve_alone_until_it_has_all_layers(model: Path, tmp_path: Path, threads: int) -> None:
    made = servable(model, tmp_path)
    assert made.cut is not None
    part = PartRuntime(made.cut.blocks, made.signature, range(1, 3))
    part.load(threads)
    with pytest.raises(MachineError, match="has blocks 1 to 2 of 4, and cannot serve alone"):
        part.run([inputs(1)], threads)
    part.load_others(threads)
    [y], _ = part.run([inputs(5)], threads)
    check_equal(y, model, inputs(5))


# Pipes between parts


Piped = tuple[PartPipes, PartPipes]


@pytest.fixture
def piped() -> Iterator[Piped]:
    """The pipes of two parts that follow each other."""
    one, other = PartPipes(is_last=False), PartPipes(is_last=True)
    out, into = socket.socketpair()
    with out, into:
        one.connect(ProcessChannel(out), is_output=True)
        other.connect(ProcessChannel(into), is_output=False)
        yield one, other


BATCH = PassedBatch(3, [0, 2], [1, 4], [[0], [1]], {1: "it does not fit"}, (), (), took_ns=7)


def test_a_batch_comes_through_a_pipe_as_it_was_passed_on(piped: Piped) -> None:
    one, other = piped
    passes = [[Tensor("FP32", (1, 3), b"abcdefghijkl"), Tensor("UINT8", (5,), b"12345")], [Tensor("BYTES", (0,), b"")]]
    said: list[int] = []
    one.pass_on(5, BATCH, passes, lambda: said.append(5))
    one.pass_on(6, structs.replace(BATCH, failure=b"why"), [], lambda: said.append(6))
    assert said == [5, 6]
    frame = other.take()
    assert frame is not None
    assert frame.subject == 5
    batch, tensors = other.read(frame)
    assert structs.replace(batch, sizes=[]) == BATCH
    assert [[(each.datatype, each.shape, bytes(each.data)) for each in own] for own in tensors] == [
        [(each.datatype, each.shape, bytes(each.data)) for each in own] for own in passes
    ]
    base = np.frombuffer(frame.payload, np.uint8).ctypes.data
    starts = [np.frombuffer(each.data, np.uint8).ctypes.data - base for each in tensors[0]]
    assert [start % 64 for start in starts] == [0, 0]
    failed = other.take()
    assert failed is not None
    assert other.read(failed)[0].failure == b"why"


@pytest.mark.parametrize("sent", [b"", b"SL", b"nonsense" * 8])
def test_a_pipe_ends_with_the_worker_before_also_within_a_batch(piped: Piped, sent: bytes) -> None:
    """The worker after gets no more batches either."""
    one, other = piped
    assert one.after is not None
    one.after._sock.sendall(sent)
    one.after.close()
    following, last = socket.socketpair()
    with following, last:
        other.connect(ProcessChannel(following), is_output=True)
        assert other.take() is None
        assert other.before is None
        assert last.recv(1) == b""
        other.pass_on(1, BATCH, [], lambda: None)


def test_a_batch_ends_where_the_next_worker_has_ended(piped: Piped) -> None:
    one, other = piped
    assert other.before is not None
    other.before.close()
    said: list[int] = []
    for batch in range(2):
        one.pass_on(batch, BATCH, [], partial(said.append, batch))
    assert one.after is None
    assert said == [0, 1]


def test_a_part_says_that_it_passes_a_batch_on_before_it_waits_for_the_next_worker(piped: Piped) -> None:
    """Else it would be taken for the one that hangs."""
    one, other = piped
    large, said = Tensor("UINT8", (8 << 20,), bytes(8 << 20)), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        passing = pool.submit(one.pass_on, 1, BATCH, [[large]], said.set)
        assert said.wait(20)
        assert not passing.done()
        frame = other.take()
        assert frame is not None
        assert len(other.read(frame)[1][0][0].data) == 8 << 20
        passing.result(20)


def test_a_batch_that_is_too_large_for_a_pipe_fails_and_the_pipe_stays(
    piped: Piped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "PASSED_BYTES_MAX", 1000)
    one, other = piped
    for batch, size in enumerate((1001, 100)):
        one.pass_on(batch, BATCH, [[Tensor("UINT8", (size,), bytes(size))]], lambda: None)
    failed = other.take()
    assert failed is not None
    failure = ModelFailure.decode(other.read(failed)[0].failure)
    assert "B pass from one part of the model to the next; the most is 1000 B: send fewer rows" in failure.summary
    passed = other.take()
    assert passed is not None
    assert [len(each.data) for each in other.read(passed)[1][0]] == [100]


def test_a_pipe_receives_each_batch_in_the_same_memory_until_it_is_given_back(piped: Piped) -> None:
    one, other = piped
    places: list[int] = []
    for size in (5000, 5000, 4000, 5000):
        one.pass_on(1, BATCH, [[Tensor("UINT8", (size,), bytes([len(places)]) * size)]], lambda: None)
        frame = other.take()
        assert frame is not None
        assert bytes(other.read(frame)[1][0][0].data) == bytes([len(places)]) * size
        places.append(np.frombuffer(frame.payload, np.uint8).ctypes.data)
    assert len(set(places)) == 1
    other.give_back()
    assert not len(other._memory)


# Which batches are under way


ONE_VISIT = Run(1, [])


class Orders:
    """A backend with workers that pass batches on: those at each of them, in order, and those that are on the way."""

    def __init__(self, places: int) -> None:
        self.pipes: list[list[BatchId] | None] = [[], *[None] * (places - 1)]
        """What is before each worker; None without a pipe."""
        self.dead: set[int] = set()
        self.ended: list[BatchId] = []
        self.lost: list[BatchId] = []
        self.completing: list[ReplicaId] = []

    def advance(self, pipeline: ProcessPipeline, place: int) -> None:
        """A worker computes what comes next, or finds that nothing comes any more."""
        own, is_last = self.pipes[place], place == len(self.pipes) - 1
        if place in self.dead or own is None:
            return
        following = None if is_last else self.pipes[place + 1]
        if not own:
            if place and (place - 1 in self.dead or self.pipes[place - 1] is None):
                self.pipes[place] = None
                if is_last:
                    pipeline.on_drained(place)
            return
        batch = own.pop(0)
        owner = pipeline.answered(place, batch, is_done=True) if is_last else None
        if owner is not None:
            assert owner not in self.dead, "nobody waits for it any more"
            self.ended.append(batch)
        elif following is not None:
            following.append(batch)

    def connect_parts(self, before: ReplicaId, after: ReplicaId) -> None:
        assert after == before + 1
        assert self.pipes[after] is None
        self.pipes[after] = []

    def run_part(self, replica: ReplicaId, batch: BatchId, order: Run) -> None:
        assert replica == 0, "all enter at the first part"
        assert self.pipes[0] is not None
        self.pipes[0].append(batch)

    def complete_part(self, replica: ReplicaId) -> None:
        self.completing.append(replica)

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        assert replica not in self.dead, "its loss is that of its batch"
        self.lost.append(batch)


@given(places=st.integers(2, 4), steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=60))
def test_every_batch_ends_once(places: int, steps: Sequence[tuple[int, int]]) -> None:
    """Whatever the order in which batches begin, workers pass them on, fail and die: what a dead worker has passed on
    finishes, and the rest is lost."""
    orders = Orders(places)
    pipeline = ProcessPipeline(places, orders)
    pipeline.members |= {place: ReplicaId(place) for place in range(places)}
    for place in range(places):
        pipeline.on_part_ready(place)
    begun: list[tuple[BatchId, ReplicaId]] = []
    ended, dead = orders.ended, orders.dead
    to_finish: set[BatchId] = set()

    def open_of(replica: int) -> list[BatchId]:
        return [batch for batch, owner in begun if owner == replica and batch not in (*ended, *orders.lost)]

    for step, which in [*steps, *[(0, at) for _ in range(40) for at in range(places)]]:
        place = which % places
        if 6 <= step <= 8 and not open_of(place) and not pipeline.is_broken:
            begun.append((BatchId(len(begun)), ReplicaId(place)))
            assert pipeline.takes(place, begun[-1][0], ONE_VISIT)
        elif step == 9 and place not in dead:
            dead.add(place)
            behind = {batch for own in orders.pipes[place + 1 :] for batch in own or ()}
            to_finish = behind if len(dead) == 1 else to_finish & behind
            pipeline.lose(place)
        else:
            orders.advance(pipeline, place)
    assert len(ended + orders.lost) == len(set(ended + orders.lost))
    left = {owner for batch, owner in begun if batch not in (*ended, *orders.lost)}
    assert left <= dead, "a replica's loss is that of its batch"
    assert not orders.lost or dead
    assert not {batch for batch in to_finish if begun[batch][1] not in dead} & set(orders.lost)
    assert sorted(orders.completing) == list(range(places)), "when all have their parts"


def test_a_worker_answers_only_what_it_was_told() -> None:
    orders = Orders(2)
    pipeline = ProcessPipeline(2, orders)
    pipeline.members |= {0: ReplicaId(0), 1: ReplicaId(1)}
    pipeline.on_part_ready(0)
    assert (orders.completing, orders.pipes[1]) == ([], None)
    with pytest.raises(ProtocolError, match="not told to complete"):
        pipeline.on_completed(0)
    pipeline.on_part_ready(1)
    assert (orders.completing, orders.pipes[1]) == ([0, 1], [])
    assert pipeline.takes(1, BatchId(3), ONE_VISIT)
    assert not pipeline.has(4)
    with pytest.raises(ProtocolError, match="part 0 of its model is not the last one"):
        pipeline.answered(0, BatchId(3), is_done=True)
    with pytest.raises(ProtocolError, match=r"part 0 .* is not the last one"):
        pipeline.on_drained(0)
    assert pipeline.answered(0, BatchId(3), is_done=False) == 1, "its tensors have not come to the first part"
    assert pipeline.answered(1, BatchId(3), is_done=True) is None, "it has ended already"


def test_a_pipe_that_breaks_loses_what_has_not_passed_it_and_no_part() -> None:
    orders = Orders(2)
    pipeline = ProcessPipeline(2, orders)
    pipeline.members |= {0: ReplicaId(0), 1: ReplicaId(1)}
    pipeline.on_part_ready(0)
    pipeline.on_part_ready(1)
    assert pipeline.takes(0, BatchId(3), ONE_VISIT)
    assert pipeline.takes(1, BatchId(4), ONE_VISIT)
    assert pipeline.answered(1, BatchId(3), is_done=True) == 0
    pipeline.on_drained(1)
    assert orders.lost == [4]
    assert pipeline.takes(0, BatchId(5), ONE_VISIT)
    assert orders.lost == [4, 5], "the core does not know yet"
    pipeline.on_completed(0)
    assert not pipeline.takes(0, BatchId(6), ONE_VISIT)


# Live processes


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[LiveNode], None]:
    """Workers get the other layers only when this is called with their pipeline."""
    complete = ProcessPipeline._begin_completion
    monkeypatch.setattr(ProcessPipeline, "_begin_completion", lambda pipeline: None)

    def release(backend: LiveNode) -> None:
        monkeypatch.setattr(ProcessPipeline, "_begin_completion", complete)
        for replica in backend.workers.values():
            if replica.section is not None and replica.section.pipeline is not None:
                replica.section.pipeline._begin_completion()

    return release


def spec(variant: str = "skips") -> ReplicaSpec:
    return ReplicaSpec("stage", variant, Slot(1.0), "here")


def start(backend: LiveNode, bounds: tuple[int, ...], *replicas: ReplicaId, variant: str = "skips") -> None:
    for place, replica in enumerate(replicas):
        backend.order(
            StartWorker(replica, structs.replace(spec(variant), shape=parts_at(bounds)), pipeline=A, place=place)
        )


def run(backend: LiveNode, batch: int, replica: ReplicaId, rows: int, width: int = WIDTH) -> None:
    tensors = [[Tensor("FP32", (1, width), row[:width].tobytes())] for row in inputs(rows, batch)]
    backend.run(BatchId(batch), replica, run_of(tensors))


def check(ear: Ear, batch: int, model: Path, rows: int) -> None:
    got = np.concatenate([np.frombuffer(y.data, np.float32).reshape(y.shape) for [y] in ear.outputs[BatchId(batch)]])
    check_equal(got, model, inputs(rows, batch))


def note_passed(*nodes: LiveNode) -> list[tuple[ReplicaId, int]]:
    """Fills with what parts say that they have passed on."""
    passed: list[tuple[ReplicaId, int]] = []
    for number, worker in [pair for node in nodes for pair in node.workers.items()]:
        assert worker.process is not None
        acts = dict(worker.process.records.acts)

        def on_passed(record: BatchPassed, number: ReplicaId = number, told: Any = acts[BatchPassed]) -> None:
            passed.append((number, record.batch))
            told(record)

        worker.process.records.acts = acts | {BatchPassed: on_passed}
    return passed


def check_no_blocks(backend: LiveNode, *replicas: ReplicaId) -> None:
    """Workers write no blocks for each other, and answers were small."""
    processes = [backend.workers[replica].process for replica in replicas]
    arenas = [process.arena for process in processes if process is not None]
    assert [arena.blocks for arena in arenas] == [0] * len(replicas)


def lost(ear: Ear) -> list[object]:
    return [event for event in ear.events if isinstance(event, WorkerLost | BatchLost | BatchFailed)]


@pytest.mark.live
@pytest.mark.parametrize(("bounds", "spares"), [((0, 2, 4), 0), ((0, 1, 4), 1), ((0, 1, 2, 3, 4), 0)])
async def test_a_life_of_a_pipeline(
    model: Path, tmp_path: Path, held: Callable[[LiveNode], None], bounds: tuple[int, ...], spares: int
) -> None:
    members = (A, B, C, D)[: len(bounds) - 1]
    async with local_node({"skips": servable(model, tmp_path)}, spares_max=spares) as (backend, ear):
        start(backend, bounds, *members)
        await ear.hear(WorkerReady, count=len(members))
        count = 0
        for rows in (1, 16, 3):
            for member in members:
                count += 1
                run(backend, count, member, rows)
            await ear.hear(Finished, count=count)
            for batch in range(count - len(members) + 1, count + 1):
                check(ear, batch, model, rows)
        check_no_blocks(backend, *members)
        assert not [event for event in ear.events if isinstance(event, WorkerCompleted)]
        for member in members:
            count += 1
            run(backend, count, member, 16)
        held(backend)  # batches are in the pipeline while it completes
        await ear.hear(WorkerCompleted, count=len(members))
        await ear.hear(Finished, count=count)
        for member in members:
            count += 1
            run(backend, count, member, 7)
        await ear.hear(Finished, count=count)
        for batch, member in enumerate(members, count - len(members) + 1):
            check(ear, batch - len(members), model, 16)
            check(ear, batch, model, 7)
            assert next(e for e in ear.events if isinstance(e, Finished) and e.batch == batch).replica == member
        check_no_blocks(backend, *members)
        for member in members:
            backend.order(StopWorker(member, ""))
        await ear.hear(WorkerStopped, count=len(members))
        assert lost(ear) == []


def pid_of(backend: LiveNode, replica: ReplicaId) -> int:
    found = backend.pid(replica)
    assert found is not None
    return found


@pytest.mark.live
async def test_what_a_worker_answers_to_a_lost_batch_is_ignored(
    model: Path, tmp_path: Path, held: Callable[[LiveNode], None]
) -> None:
    """The batch of the replica that dies is with another worker, which then serves alone."""
    async with local_node({"skips": servable(model, tmp_path)}) as (backend, ear):
        start(backend, (0, 2, 4), A, B)
        await ear.hear(WorkerReady, count=2)
        os.kill(pid_of(backend, B), signal.SIGSTOP)
        passed = note_passed(backend)
        run(backend, 1, A, 16)
        await until(lambda: passed == [(A, 1)])
        os.kill(pid_of(backend, A), signal.SIGKILL)
        await ear.hear(WorkerLost)
        os.kill(pid_of(backend, B), signal.SIGCONT)
        held(backend)
        assert await ear.hear(WorkerCompleted) == WorkerCompleted(B)
        run(backend, 2, B, 16)
        await ear.hear(Finished)
        check(ear, 2, model, 16)
        assert list(ear.outputs) == [BatchId(2)]
        check_no_blocks(backend, B)


@pytest.mark.live
async def test_inputs_that_the_model_refuses_fail_their_batch_only(
    model: Path, tmp_path: Path, held: Callable[[LiveNode], None]
) -> None:
    async with local_node({"skips": servable(model, tmp_path)}) as (backend, ear):
        start(backend, (0, 2, 4), A, B)
        await ear.hear(WorkerReady, count=2)
        run(backend, 1, A, 2, width=WIDTH - 1)
        run(backend, 2, B, 2)
        failed = await ear.hear(BatchFailed)
        assert isinstance(failed, BatchFailed)
        assert (failed.batch, failed.replica) == (1, A)
        await ear.hear(Finished)
        check(ear, 2, model, 2)
        run(backend, 3, A, 2)
        await ear.hear(Finished, count=2)
        check(ear, 3, model, 2)


@pytest.mark.live
async def test_a_worker_with_some_layers_refuses_a_batch_of_its_own(
    model: Path, tmp_path: Path, held: Callable[[LiveNode], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_node({"skips": servable(model, tmp_path)}) as (backend, ear):
        start(backend, (0, 2, 4), A, B)
        await ear.hear(WorkerReady, count=2)
        monkeypatch.setattr(ProcessPipeline, "takes", lambda *_: False)
        run(backend, 1, A, 2)
        failed = await ear.hear(BatchFailed)
        assert isinstance(failed, BatchFailed)
        assert "this worker has blocks 0 to 1 of 4, and cannot serve alone" in failed.detail


@pytest.mark.live
async def test_a_batch_that_comes_before_a_dead_part_is_reaped_is_lost_with_it(
    model: Path, tmp_path: Path, held: Callable[[LiveNode], None]
) -> None:
    """The core hears of the death when the process has ended, which takes long if it has much memory."""
    async with local_node({"skips": servable(model, tmp_path)}) as (backend, ear):
        start(backend, (0, 2, 4), A, B)
        await ear.hear(WorkerReady, count=2)
        backend._give_up(backend.workers[B], "it fell silent")
        run(backend, 1, A, 2)
        assert await ear.hear(BatchLost) == BatchLost(BatchId(1), A, "another part of its pipeline is lost")
        assert await ear.hear(WorkerLost) == WorkerLost(B, "it fell silent")
        held(backend)
        await ear.hear(WorkerCompleted)
        run(backend, 2, A, 3)
        await ear.hear(Finished)
        check(ear, 2, model, 3)
        assert len(lost(ear)) == 2


@pytest.mark.live
async def test_a_part_that_cannot_start_or_complete_says_why_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    made = servable(model, tmp_path)
    assert made.cut is not None
    Path(made.cut.blocks[3].file).unlink()
    async with local_node({"skips": made}) as (backend, ear):
        start(backend, (0, 2, 4), A, B)
        await ear.hear(WorkerLost, count=2)
        errors = {event.worker: event.error for event in ear.events if isinstance(event, WorkerLost)}
        assert errors.keys() == {A, B}
        assert all(Path(made.cut.blocks[3].file).name in error for error in errors.values()), errors
        assert not backend.workers
        assert not backend._pipelines


@pytest.mark.live
@pytest.mark.parametrize("bounds", [(0, 1, 3), (1, 2, 4), (0, 3, 2, 4), (0, 2, 2, 4), (0, 4), (0, 2, 5)])
async def test_parts_that_are_not_the_whole_model_are_refused(
    model: Path, tmp_path: Path, bounds: tuple[int, ...]
) -> None:
    made = servable(model, tmp_path)
    async with local_node({"skips": made, "whole": structs.replace(made, cut=None)}) as (backend, ear):
        start(backend, bounds, A)
        gone = await ear.hear(WorkerLost)
        assert isinstance(gone, WorkerLost)
        assert "cannot serve" in gone.error
        assert "must have all 4 blocks" in gone.error
        start(backend, (0, 2, 4), A, B, variant="whole")
        await ear.hear(WorkerLost, count=3)
        assert ear.events[-1] == WorkerLost(B, "the model of 'whole' of 'stage' is not cut into blocks")


# A whole server

PARTS = '''
"""Two replicas that are missing start as parts of one model, the first ones too."""

from dataclasses import dataclass, replace

from sloop.core.views import Provisioning, ReplicaStart, WeightChain
from sloop.policies.provision import CheapestStart
from sloop.systems.catalogue import SYSTEMS
from sloop.vocabulary import STORE, LayerSet


@dataclass(frozen=True, slots=True)
class PartsAtOnce(CheapestStart):
    def provide(self, now_ns, given):
        if given.count < 2:
            return CheapestStart.provide(self, now_ns, given)
        name = given.sites[0].node.node.name
        starts = tuple(ReplicaStart(0, chain=chain, pipeline=0) for chain in (0, 1))
        chains = tuple(WeightChain(STORE, (name,), LayerSet(first, first + 2)) for first in (0, 2))
        return Provisioning(starts, chains, "1 pipeline of 2 parts, cut before layer 2", ((0, 2, 4),))


STATIC = SYSTEMS["static"]
PROVISION = PartsAtOnce(partition=True)
SYSTEM = replace(STATIC, name="parts", policies=replace(STATIC.policies, provision=PROVISION))
'''


def document(model: Path, folder: Path, **profile: Any) -> dict[str, Any]:
    made = structs.replace(profile_of(), load_s=0.3, **{"memory_bytes": 1_000_000, **profile})
    save_profile(made, folder / "profile.json")
    (folder / "parts.py").write_text(PARTS)
    return {
        "name": "live",
        "slo_ms": 20_000,
        "stages": [
            {"name": "stage", "variants": [{"name": "v", "model": str(model), "profile": str(folder / "profile.json")}]}
        ],
        "system": {"name": str(folder / "parts.py"), "replicas": 2, "cores": 0.5, "drop": "never"},
        "cluster": {"nodes": [{"hardware": "local", "count": 1}]},
    }


def release(running: Running, held: Callable[[LiveNode], None]) -> None:
    backend = running.server.backend
    assert isinstance(backend, LiveNode)
    running.thread.look(lambda: held(backend))


def infer(port: int, seed: int, rows: int) -> Array:
    """The answer to a request over HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=40)
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, WIDTH], "data": inputs(rows, seed).ravel().tolist()}
    connection.request("POST", "/v2/models/live/infer", json.dumps({"inputs": [tensor]}))
    response = connection.getresponse()
    text = response.read()
    connection.close()
    assert response.status == 200, text
    [output] = json.loads(text)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def ask_all(running: Running, model: Path, seeds: range) -> None:
    """Requests at the same time, each answered as the model does."""
    with ThreadPoolExecutor(8) as pool:
        rows = [(1, 5, 16)[seed % 3] for seed in seeds]
        for seed, count, got in zip(
            seeds, rows, pool.map(lambda s, n: infer(running.server.http_port, s, n), seeds, rows), strict=True
        ):
            check_equal(got, model, inputs(count, seed))


def replicas_of(running: Running) -> list[dict[str, Any]]:
    status, text = running.ask("GET", "/v2/sloop/state")
    assert status == 200
    found: list[dict[str, Any]] = json.loads(text)["applications"][0]["stages"][0]["replicas"]
    return found


def wait_for(running: Running, holds: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    for _ in range(2000):
        if holds(found := replicas_of(running)):
            return found
        time.sleep(0.02)
    pytest.fail(f"the replicas stay as they are: {found}")


def counted(running: Running) -> dict[str, float]:
    """The metrics about pipelines."""
    _, text = running.ask("GET", "/metrics")
    lines = [line.rpartition(" ") for line in text.decode().splitlines() if not line.startswith("#")]
    found: dict[str, float] = {}
    for labels, _, value in lines:
        name = labels.partition("{")[0]
        if name == "sloop_replica_forms":
            name = labels.partition('form="')[2].partition('"')[0]
        found[name] = found.get(name, 0.0) + float(value)
    return found


def check_log(running: Running) -> list[tuple[int, Record]]:
    """What the core has decided is legal, and a fresh core decides it again."""
    log = read_log(running.folder)
    setup = rebuild(log.header)
    checkers = Checkers([Rules(setup.application, setup.system.policies.order)], setup.deployment.cluster)
    records = list(log)
    for now_ns, record in records:
        checkers.append(now_ns, record)
    assert replay_log(records, rebuild(log.header).core()).difference is None
    return records


@pytest.mark.live
def test_a_server_starts_a_pipeline_that_becomes_whole_replicas_under_load(
    model: Path, tmp_path: Path, thread: LoopThread, held: Callable[[LiveNode], None]
) -> None:
    with Running(thread, tmp_path / "state", document(model, tmp_path)) as running:
        assert [each["form"] for each in replicas_of(running)] == ["pipeline", "pipeline"]
        [(first, cut), (other, end)] = [each["layers"] for each in replicas_of(running)]
        assert (first, end) == (0, 4)
        assert 0 < cut == other < 4
        ask_all(running, model, range(12))
        assert counted(running)["pipeline"] == 2
        release(running, held)
        ask_all(running, model, range(12, 40))
        wait_for(running, lambda found: [each["form"] for each in found] == ["alone", "alone"])
        ask_all(running, model, range(40, 46))
        found = counted(running)
        assert (found["alone"], found["sloop_pipeline_parts_total"], found["sloop_completion_seconds_count"]) == (
            2,
            2,
            2,
        )
        assert found["sloop_pipelines_lost_total"] == 0
        assert [each["layers"] for each in replicas_of(running)] == [None, None]
    records = [record for _, record in check_log(running)]
    assert sum(isinstance(record, StartWorker) for record in records) == 2
    assert not [record for record in records if isinstance(record, WorkerLost | BatchLost | BatchFailed)]
    (decided, *_) = [each.why for each in records if isinstance(each, Decided) and each.kind == "provision"]
    assert f"1 pipeline of 2 parts, cut before layer {cut}" in decided


@pytest.mark.live
def test_a_part_killed_under_load_costs_no_answer(
    model: Path, tmp_path: Path, thread: LoopThread, held: Callable[[LiveNode], None]
) -> None:
    with Running(thread, tmp_path / "state", document(model, tmp_path)) as running:
        backend = running.server.backend
        assert isinstance(backend, LiveNode)
        victim = replicas_of(running)[1]["id"]
        pid = thread.look(lambda: pid_of(backend, ReplicaId(victim)))
        os.kill(pid, signal.SIGSTOP)  # so that batches are in the pipeline when it dies
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask_all, running, model, range(24))
            thread.until(lambda: any(each.batch is not None for each in backend.workers.values()))
            os.kill(pid, signal.SIGKILL)
            thread.until(lambda: ReplicaId(victim) not in backend.workers)
            release(running, held)
            asking.result(60)
        wait_for(running, lambda found: [(each["form"], each["life"]) for each in found] == [("alone", "ready")] * 2)
        assert counted(running)["sloop_pipelines_lost_total"] == 1
        ask_all(running, model, range(24, 30))
    records = [record for _, record in check_log(running)]
    assert sum(isinstance(record, WorkerLost) for record in records) == 1
    assert [each for each in records if isinstance(each, Decided) and each.kind == "pipeline"]
    finished = {record.batch for record in records if isinstance(record, Finished)}
    unfinished = next(each for each in records if isinstance(each, StartBatch) and each.batch not in finished)
    told = explained(running, unfinished.requests[0])
    assert "served" in told
    assert "was lost" in told
    assert "another part of its pipeline" in told or f"replica {victim} was lost" in told


def explained(running: Running, request: int) -> str:
    """What `sloop explain` says of a request, from the log that the server has left."""
    result = CliRunner().invoke(main, ["explain", str(running.folder), "--request", str(request), "--json"])
    assert result.exit_code == 0, result.output
    return str(result.stdout)


@pytest.mark.live
def test_the_stock_policy_starts_parts_where_requests_wait_for_a_slow_start(
    model: Path, tmp_path: Path, thread: LoopThread, held: Callable[[LiveNode], None]
) -> None:
    """An application that rests is woken by requests: two replicas start as one pipeline, and answer them."""
    declared = document(model, tmp_path, startup=Startup(process_s=0.1, weights_s=30.0, first_batch_s=0.1))
    provision = {"name": "cheapest_start", "partition": True}
    declared["system"] = {"name": "static", "replicas": 2, "cores": 0.5, "drop": "never", "provision": provision}
    running = Running(thread, tmp_path / "state", declared | {"rest_after_s": 0.5, "slo_ms": 60_000})
    try:
        wait_for(running, lambda found: found == [])
        ask_all(running, model, range(8))
        assert [each["form"] for each in replicas_of(running)] == ["pipeline", "pipeline"]
        release(running, held)
        ask_all(running, model, range(8, 12))
    finally:
        running.close()
    decided = [each.why for _, each in check_log(running) if isinstance(each, Decided) and each.kind == "provision"]
    assert any("1 pipeline of 2 parts" in why for why in decided), decided


def test_a_server_says_what_keeps_it_from_starting_parts(model: Path, tmp_path: Path) -> None:
    def refused(
        changes: Mapping[str, Any] = MappingProxyType({}), *, has_agents: bool = False, **profile: Any
    ) -> InputError:
        setup = set_up(load_application({**document(model, tmp_path, **profile), **changes}), must_fit=False)

        def check_all() -> None:
            loadable(setup, tmp_path / "blocks")
            check_live(setup.applications[0])
            check_nodes(setup.applications[0], has_agents=has_agents)

        with pytest.raises(InputError) as raised:
            check_all()
        assert "partition: false" in raised.value.help
        return raised.value

    assert "were not measured" in refused(layers=None).what
    cluster = {"nodes": [{"hardware": "local", "count": 1, "memory_bytes": 2**30}]}
    memory = refused({"cluster": cluster}, memory_bytes=2**30)
    assert "a part of 'v' needs 1 GiB when it has all layers, its files included" in memory.what
    with pytest.raises(InputError, match="1 GiB and some memory for its weights on a node, which no node could hold"):
        set_up(load_application({**document(model, tmp_path, memory_bytes=2**30), "cluster": cluster}))
    setup = set_up(load_application(document(model, tmp_path)))
    check_live(setup.applications[0])
    check_nodes(setup.applications[0], has_agents=False)
    assert "attaches shadows, and its `provision`" in refused({"system": "headstart"}).what
