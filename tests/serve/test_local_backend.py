"""Real worker processes: what they answer, how they die, and that nothing is left behind."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, structs

from sloop.actions import AcquireNode, ReleaseNode, ResizeWorker, StartWorker, StopWorker
from sloop.errors import MachineError
from sloop.events import (
    BatchFailed,
    Event,
    Finished,
    NodeReady,
    NodeReleased,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.machine import capacity
from sloop.profile.model import read_signature
from sloop.serve import processes
from sloop.serve.blocks import Block
from sloop.serve.cpu_quota import Affinity, Cgroups, CpuActuator, Grant, detect
from sloop.serve.messages import BatchFinished, Run
from sloop.serve.node import node as module
from sloop.serve.node import spares as spare_workers
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable, SpareProcesses
from sloop.serve.transport import RecordLink
from sloop.shared_memory import Address
from sloop.tensor import Port, Signature, Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import alone, run_of, tensors_in, wirings_of

pytestmark = pytest.mark.live
BYTES = Signature((Port("x", "UINT8", (-1, -1)),), (Port("x", "UINT8", (-1, -1)),))
A, B = ReplicaId(1), ReplicaId(2)


def spec(variant: str = "echo", cores: float = 1, device: str | None = None) -> ReplicaSpec:
    return ReplicaSpec("stage", variant, Slot(cores, accelerator="T4" if device else ""), "here", device)


HERE = Node("here", "local", 8, 1 << 30, on_demand=True)


def rows(*contents: bytes) -> Run:
    return run_of([[Tensor("UINT8", (1, len(content)), content)] for content in contents])


class Ear:
    """Hears everything, and lets a test wait for the next event of a kind."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.outputs: dict[BatchId, Sequence[Sequence[Tensor]]] = {}
        self.blocks: list[Block] = []
        self.failures: list[ModelFailure] = []
        self._came = asyncio.Event()

    def on_event(self, event: Event) -> None:
        self.events.append(event)
        self._came.set()

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        assert event.batch not in self.outputs
        self.blocks += [block for block in blocks if block is not None]
        self.outputs[event.batch] = tensors_in(blocks)
        self.on_event(event)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        self.failures.append(failure)
        self.on_event(BatchFailed(batch, replica, failure.summary, failure.detail))

    async def hear(self, *kinds: type, count: int = 1) -> Event:
        """The `count`th event of one of these kinds."""
        while len(found := [event for event in self.events if isinstance(event, kinds)]) < count:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), 20)
        return found[count - 1]


@asynccontextmanager
async def local_node(
    models: dict[str, Servable] | None = None, actuator: CpuActuator | None = None, *, spares_max: int = 0
) -> AsyncIterator[tuple[LiveNode, Ear]]:
    """A node of this machine, and what it reports."""
    models = models or {"echo": Servable("fake:sleep:0:0", BYTES)}
    servables = {("stage", name): servable for name, servable in models.items()}
    backend = LiveNode(
        servables,
        wirings_of(servables),
        actuator or Affinity(sorted(os.sched_getaffinity(0))),
        nodes=[HERE],
        spares_max=spares_max,
        start_s_max=20,
    )
    ear = Ear()
    backend.attach(ear)
    try:
        yield backend, ear
    finally:
        pids = {str(pid) for n in range(1, 9) if (pid := backend.pid(ReplicaId(n)))}
        pids |= {str(pid) for pid in backend.spares.pids()}
        await backend.close()
        assert not pids & set(os.listdir("/proc"))


async def test_a_worker_is_not_told_the_url_that_its_model_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may contain a password, and the model may be anybody's code."""
    sent: list[bytes] = []
    tell = RecordLink.tell

    def noted(link: RecordLink, record: Struct) -> None:
        sent.append(msgspec.msgpack.encode(record))
        tell(link, record)

    monkeypatch.setattr(RecordLink, "tell", noted)
    async with local_node({"echo": Servable("fake:sleep:0:0", BYTES, source="http://user:password@store/model")}) as (
        backend,
        ear,
    ):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
    assert b"fake:sleep:0:0" in b"".join(sent)
    assert b"password" not in b"".join(sent)


async def test_a_life_from_start_to_stop_and_an_answer_that_is_the_models_own(mlp: Path) -> None:
    async with local_node({"mlp": Servable(str(mlp), read_signature(mlp))}) as (backend, ear):
        backend.order(StartWorker(A, spec("mlp")))
        await ear.hear(WorkerReady)
        xs = [np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32) for n in (1, 3, 2)]
        backend.run(BatchId(5), A, run_of([[Tensor("FP32", x.shape, x.tobytes())] for x in xs]))
        await ear.hear(Finished)
        session = ort.InferenceSession(mlp, providers=["CPUExecutionProvider"])
        for x, [y] in zip(xs, ear.outputs[BatchId(5)], strict=True):
            assert (y.datatype, y.shape) == ("FP32", (len(x), 3))
            got = np.frombuffer(y.data, np.float32).reshape(y.shape)
            np.testing.assert_allclose(got, session.run(None, {"x": x})[0], rtol=1e-5)
        backend.order(StopWorker(A, ""))
        await ear.hear(WorkerStopped)
        assert [event.step if isinstance(event, WorkerProgressed) else type(event) for event in ear.events] == [
            *("spawning", "loading", "warming"),
            *(WorkerReady, Finished, WorkerStopped),
        ]


async def test_nodes_and_grants_follow_the_machine() -> None:
    """One that is not rented yet is what the machine is when it is."""
    smaller = structs.replace(HERE, cores=1, memory_bytes=1 << 29)
    actuator = Affinity(sorted(os.sched_getaffinity(0)))
    async with local_node(actuator=actuator) as (backend, ear):
        backend.order(StartWorker(A, spec(cores=2)))
        await ear.hear(WorkerReady)
        backend.refit([smaller], 0.5)
        assert actuator.capacity_cores == 0.5
        assert not [event for event in ear.events if isinstance(event, NodeReady)]
        backend.order(AcquireNode("here"))
        assert ear.events[-1] == NodeReady(smaller)
        backend.order(ResizeWorker(A, 1))
        assert await ear.hear(WorkerResized) == WorkerResized(A, 0.5)


async def test_a_local_node_is_always_there() -> None:
    async with local_node() as (backend, ear):
        backend.order(AcquireNode("here"))
        backend.order(ReleaseNode("here"))
        assert ear.events == [NodeReady(HERE), NodeReleased("here")]


async def test_models_are_learnt_and_forgotten_while_others_serve() -> None:
    async with local_node() as (backend, ear):
        backend.learn(
            {("other", "echo"): Servable("fake:sleep:0:0", BYTES)}, {"other": alone("other", BYTES)}, threads_prepared=1
        )
        backend.order(StartWorker(A, ReplicaSpec("other", "echo", Slot(1), "here")))
        await ear.hear(WorkerReady)
        backend.forget(["other"])
        backend.run(BatchId(1), A, rows(b"still"))  # what runs goes on
        await ear.hear(Finished)
        with pytest.raises(KeyError):
            backend.order(StartWorker(ReplicaId(2), ReplicaSpec("other", "echo", Slot(1), "here")))
        backend.order(StartWorker(ReplicaId(3), spec()))
        await ear.hear(WorkerReady, count=2)


async def test_a_model_of_fixed_rows_is_served_one_request_at_a_time_within_the_batch(mlp_of_one: Path) -> None:
    async with local_node({"one": Servable(str(mlp_of_one), read_signature(mlp_of_one))}) as (backend, ear):
        backend.order(StartWorker(A, spec("one")))
        await ear.hear(WorkerReady)
        row = Tensor("FP32", (1, 4), bytes(16))
        backend.run(BatchId(1), A, run_of([[row], [row], [row]]))
        await ear.hear(Finished)
        assert [[y.shape for y in ys] for ys in ear.outputs[BatchId(1)]] == [[(1, 3)]] * 3


async def test_megabytes_of_mixed_shapes_come_back_as_they_were() -> None:
    async with local_node() as (backend, ear):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        contents = [bytes([n]) * (2 << 20) for n in range(4)] + [b"small", b"tiny!"]
        for batch in range(1, 4):
            backend.run(BatchId(batch), A, rows(*contents))
            await ear.hear(Finished, count=batch)
            assert [bytes(tensors[0].data) for tensors in ear.outputs[BatchId(batch)]] == contents


async def test_large_outputs_are_in_the_workers_arena_until_they_are_freed_and_outlive_the_worker() -> None:
    async with local_node() as (backend, ear):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        contents = [bytes([n]) * (1 << 20) for n in range(3)]
        for batch in range(1, 20):
            backend.run(BatchId(batch), A, rows(*contents))
            await ear.hear(Finished, count=batch)
            freed = ear.blocks[:-3]  # the worker still holds the last three
            ear.blocks = ear.blocks[-3:]
            for block in freed:
                assert isinstance(block, Address)
                backend._arenas.free(block)
            await asyncio.sleep(0)
        offsets = {block.offset for block in ear.blocks if isinstance(block, Address)}
        assert max(offsets) < 20 * (1 << 20), "freed memory is used again"
        pid = backend.pid(A)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await ear.hear(WorkerLost)
        assert [bytes(tensors[0].data) for tensors in tensors_in(ear.blocks)] == contents
        for block in ear.blocks:
            assert isinstance(block, Address)
            backend._arenas.free(block)
        assert not len(backend._arenas)


async def test_a_worker_killed_in_the_middle_of_a_batch_is_lost_once() -> None:
    async with local_node({"slow": Servable("fake:sleep:5000:0", BYTES)}) as (backend, ear):
        backend.order(StartWorker(A, spec("slow")))
        await ear.hear(WorkerReady)
        pid = backend.pid(A)
        assert pid is not None
        backend.run(BatchId(1), A, rows(b"x"))
        os.kill(pid, signal.SIGKILL)
        assert await ear.hear(WorkerLost) == WorkerLost(A, "its process was killed by SIGKILL")
        backend.run(BatchId(2), A, rows(b"x"))
        backend.order(ResizeWorker(A, 2))
        backend.order(StopWorker(A, ""))
        assert not ear.outputs
        assert ear.events[-1] == WorkerStopped(A)
        assert backend.pid(A) is None


async def test_a_bug_in_taking_up_a_report_ends_the_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError(7)

    async with local_node({"quick": Servable("fake:sleep:0:0", BYTES)}) as (backend, ear):
        backend.order(StartWorker(A, spec("quick")))
        await ear.hear(WorkerReady)
        monkeypatch.setitem(backend._acts, BatchFinished, fail)
        backend.run(BatchId(1), A, rows(b"x"))
        assert await ear.hear(WorkerLost) == WorkerLost(A, "its report could not be taken up: KeyError(7)")
    (told,) = [record for record in caplog.records if "could not be taken up" in record.getMessage()]
    assert told.exc_info is not None


async def test_a_worker_leaves_it_to_the_server_to_stop_it() -> None:
    async with local_node() as (backend, ear):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        pid = backend.pid(A)
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        backend.run(BatchId(1), A, rows(b"x"))
        await ear.hear(Finished)


@pytest.mark.parametrize(
    ("model", "device", "says"),
    [
        ("missing.onnx", None, "missing.onnx"),
        ("fake:nonsense", None, "is not a fake model"),
        (
            "fake:sleep:0:0",
            "gpu0",
            "it needs T4 (device 'gpu0' of here), but replicas get GPUs only on the machine of the server",
        ),
    ],
)
async def test_what_cannot_start_is_lost_with_its_reason(model: str, device: str | None, says: str) -> None:
    async with local_node({"m": Servable(model, BYTES)}) as (backend, ear):
        backend.order(StartWorker(A, spec("m", device=device)))
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert says in lost.error


async def test_an_answer_with_other_outputs_than_the_signature_fails_the_batch() -> None:
    async with local_node({"m": Servable("fake:sleep:0:0", Signature(BYTES.inputs, ()))}) as (backend, ear):
        backend.order(StartWorker(A, spec("m")))
        await ear.hear(WorkerReady)
        backend.run(BatchId(1), A, rows(b"x"))
        failed = await ear.hear(BatchFailed)
        assert isinstance(failed, BatchFailed)
        assert "returned 1 outputs; it declares 0" in failed.detail


async def test_stopping_while_starting_and_while_stuck_is_quick() -> None:
    async with local_node({"slow": Servable("fake:sleep:60000:0", BYTES)}) as (backend, ear):
        backend.order(StartWorker(A, spec("slow")))
        backend.order(StopWorker(A, ""))
        await ear.hear(WorkerStopped)
        other = ReplicaId(2)
        backend.order(StartWorker(other, spec("slow")))
        await ear.hear(WorkerReady)
        backend.run(BatchId(1), other, rows(b"x"))
        backend.order(StopWorker(other, ""))
        await ear.hear(WorkerStopped, count=2)
        assert not [event for event in ear.events if isinstance(event, WorkerLost)]


async def test_a_start_has_a_whole_core_and_then_what_was_asked_last() -> None:
    actuator = detect().actuator
    async with local_node(actuator=actuator) as (backend, ear):
        backend.order(StartWorker(A, spec(cores=0.25)))
        pid = backend.pid(A)
        assert pid is not None
        assert actuator.read(pid) == 1
        backend.order(ResizeWorker(A, 0.5))
        assert ear.events[-1] == WorkerResized(A, 0.5)
        assert actuator.read(pid) == 1
        await ear.hear(WorkerReady)
        assert actuator.read(pid) == 0.5


async def test_cores_beyond_the_machines_are_reported_as_what_is_granted() -> None:
    async with local_node(actuator=Affinity(sorted(os.sched_getaffinity(0))[:1])) as (backend, ear):
        backend.order(StartWorker(A, spec(cores=64)))
        await ear.hear(WorkerReady)
        assert ear.events[-2] == WorkerResized(A, 1)
        backend.order(ResizeWorker(A, 0.5))
        assert await ear.hear(WorkerResized, count=2) == WorkerResized(A, 0.5)
        backend.order(ResizeWorker(A, 8))
        assert await ear.hear(WorkerResized, count=3) == WorkerResized(A, 1)


SERVER = """
import asyncio, sys, time
from sloop.actions import AcquireNode, ReleaseNode, ResizeWorker, StartWorker, StopWorker
from sloop.serve.cpu_quota import detect
from sloop.serve.protocols import Servable
from sloop.serve import processes
from sloop.serve.node import node as module
from sloop.serve.node.node import LiveNode
from sloop.serve.dataflow import Assembly, StageWiring
from sloop.tensor import Signature
from sloop.vocabulary import ReplicaId, ReplicaSpec, Slot

class Ear:
    def on_event(self, event):
        if type(event).__name__ == "WorkerReady":
            print(backend.pid(ReplicaId(1)), getattr(actuator, "folder", ""), flush=True)

async def main():
    global actuator, backend
    actuator = detect().actuator
    wirings = {"stage": StageWiring("stage", Assembly((), ()))}
    backend = LiveNode({("stage", "v"): Servable("fake:sleep:0:0", Signature((), ()))}, wirings, actuator)
    backend.attach(Ear())
    backend.order(StartWorker(ReplicaId(1), ReplicaSpec("stage", "v", Slot(1))))
    await asyncio.sleep(60)

asyncio.run(main())
"""


def is_alive(pid: str) -> bool:
    """Whether it runs; a dead orphan may remain as a zombie until its new parent looks."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_workers_die_with_a_server_that_is_killed_and_the_next_one_cleans_up() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid, _, folder = server.stdout.readline().strip().partition(" ")
        assert is_alive(pid)
        server.kill()
    until_s = time.monotonic() + 10
    while (is_alive(pid) or (folder and Path(folder).exists())) and time.monotonic() < until_s:
        time.sleep(0.02)  # a control group stays busy until its dead are reaped
        detect().actuator.close()
    assert not is_alive(pid)
    assert not folder or not Path(folder).exists()


async def test_lives_leave_no_descriptors_behind() -> None:
    async with local_node() as (backend, ear):
        gc.collect()  # what other tests have left
        before = len(os.listdir("/proc/self/fd"))
        for n in range(1, 7):
            backend.order(StartWorker(ReplicaId(n), spec()))
            await ear.hear(WorkerReady, count=n)
            pid = backend.pid(ReplicaId(n))
            assert pid is not None
            if n % 2:
                os.kill(pid, signal.SIGKILL)
            else:
                backend.order(StopWorker(ReplicaId(n), ""))
            await ear.hear(WorkerLost, WorkerStopped, count=n)
        assert len(os.listdir("/proc/self/fd")) == before


async def test_a_thousand_resizes_under_load_lose_nothing_and_keep_the_process(mlp: Path) -> None:
    """Acceptance check 11 of the Sponge specification, but for the times, which benchmarks measure."""
    resizes = 1000
    async with local_node({"mlp": Servable(str(mlp), read_signature(mlp))}, detect().actuator) as (backend, ear):
        chance = np.random.default_rng(11)
        backend.order(StartWorker(A, spec("mlp")))
        await ear.hear(WorkerReady)
        pid, batch = backend.pid(A), 0
        row = Tensor("FP32", (1, 4), np.ones(4, np.float32).tobytes())
        for done in range(resizes):
            if len(ear.outputs) == batch:
                batch += 1
                backend.run(BatchId(batch), A, run_of([[row]] * int(chance.integers(1, 9))))
            backend.order(ResizeWorker(A, float(chance.choice([0.25, 0.5, 1, 1.5, 2]))))
            if done % 4 == 0:  # sometimes the next resize meets one that is under way
                await ear.hear(WorkerResized, count=done + 1)
        await ear.hear(WorkerResized, count=resizes)
        await ear.hear(Finished, count=batch)
        assert backend.pid(A) == pid
        assert sorted(ear.outputs) == list(range(1, batch + 1))
        assert len({bytes(ys[0].data) for outputs in ear.outputs.values() for ys in outputs}) == 1
        assert sum(isinstance(event, WorkerResized) for event in ear.events) == resizes
        assert not [event for event in ear.events if isinstance(event, WorkerLost | BatchFailed)]


# Spare workers


async def spares(backend: LiveNode, count: int, *, without: Container[int] = ()) -> list[int]:
    """The process ids of the spare workers, when so many wait, and none of those `without`."""
    async with asyncio.timeout(30):
        while len(backend.spares.pids()) != count or any(pid in without for pid in backend.spares.pids()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return backend.spares.pids()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare workers are started soon, also while other processes take all cores."""
    monkeypatch.setattr(spare_workers, "SPARES_AFTER_S", 0.05)
    monkeypatch.setattr(spare_workers, "HUMBLE_S_MAX", 1.0)


async def gone(*pids: int) -> None:
    """Wait until these processes have ended, and were reaped."""
    async with asyncio.timeout(20):
        while {str(pid) for pid in pids} & set(os.listdir("/proc")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("soon")
async def test_a_replica_takes_a_worker_that_was_started_ahead(mlp: Path) -> None:
    async with local_node({"mlp": Servable(str(mlp), read_signature(mlp))}, spares_max=4) as (backend, ear):
        assert backend.spares.pids() == []
        backend.order(StartWorker(A, spec("mlp")))
        await ear.hear(WorkerReady)
        [ahead] = await spares(backend, 1)
        backend.order(StartWorker(B, spec("mlp", cores=2)))
        assert backend.pid(B) == ahead != backend.pid(A)
        await ear.hear(WorkerReady, count=2)
        steps = [event.step for event in ear.events if isinstance(event, WorkerProgressed) and event.worker == B]
        assert steps == ["spawning", "loading", "warming"]
        x = np.ones((2, 4), np.float32)
        backend.run(BatchId(5), B, run_of([[Tensor("FP32", x.shape, x.tobytes())]]))
        await ear.hear(Finished)
        [another] = await spares(backend, 1)
        assert another != ahead


@pytest.mark.usefixtures("soon")
async def test_as_many_are_started_ahead_as_replicas_were_started_together() -> None:
    async with local_node(spares_max=2) as (backend, ear):
        for number in range(1, 4):
            backend.order(StartWorker(ReplicaId(number), spec("echo")))
        assert backend.spares.pids() == []
        await ear.hear(WorkerReady, count=3)
        assert len(await spares(backend, 2)) == 2, "no more than allowed"


@pytest.mark.usefixtures("soon")
async def test_a_spare_worker_that_dies_is_missed_by_nobody() -> None:
    async with local_node(spares_max=1) as (backend, ear):
        backend.order(StartWorker(A, spec("echo")))
        await ear.hear(WorkerReady)
        [pid] = await spares(backend, 1)
        os.kill(pid, signal.SIGKILL)
        await spares(backend, 1, without=[pid])
        await gone(pid)
        assert not any(isinstance(event, WorkerLost | WorkerStopped) for event in ear.events)
        backend.order(StartWorker(B, spec("echo")))
        await ear.hear(WorkerReady, count=2)


@pytest.mark.usefixtures("soon")
async def test_a_spare_worker_that_has_just_died_is_not_taken() -> None:
    async with local_node(spares_max=1) as (backend, ear):
        backend.order(StartWorker(A, spec("echo")))
        await ear.hear(WorkerReady)
        [pid] = await spares(backend, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # before the event loop learns of it
        backend.order(StartWorker(B, spec("echo")))
        assert backend.pid(B) != pid
        await ear.hear(WorkerReady, count=2)
        assert not any(isinstance(event, WorkerLost) for event in ear.events)


@pytest.mark.usefixtures("soon")
async def test_a_replica_that_cannot_start_takes_no_spare_worker() -> None:
    async with local_node(spares_max=1) as (backend, ear):
        backend.order(StartWorker(A, spec("echo")))
        await ear.hear(WorkerReady)
        ahead = await spares(backend, 1)
        backend.order(StartWorker(B, spec("echo", device="gpu0")))
        await ear.hear(WorkerLost)
        assert backend.spares.pids() == ahead


@pytest.mark.usefixtures("soon")
async def test_spare_workers_end_when_fewer_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [3]
    monkeypatch.setattr(spare_workers, "SPARES_FOR_S", 0.2)
    monkeypatch.setattr(spare_workers, "most_together", lambda *_: wanted[0])
    async with local_node(spares_max=4) as (backend, ear):
        backend.order(StartWorker(A, spec("echo")))
        await ear.hear(WorkerReady)
        first, *others = await spares(backend, 3)
        wanted[0] = 1
        assert await spares(backend, 1) == [first]
        await gone(*others)


@pytest.mark.usefixtures("soon")
async def test_a_worker_waits_before_anything_has_started() -> None:
    async with local_node(spares_max=4) as (backend, ear):
        told: list[int] = []
        backend.spares.on_change = lambda: told.append(len(backend.spares.pids()))
        [pid] = await spares(backend, 1)
        assert told == [1]
        [found] = backend.spare_processes().values()
        assert found.count == 1
        assert 2**20 < found.memory_bytes < 2**30
        assert set(map(os.sched_getscheduler, threads_of(pid))) == {os.SCHED_OTHER}, "it has its priority again"
        assert os.sched_getaffinity(pid) == os.sched_getaffinity(0), "and all CPUs"
        backend.order(StartWorker(A, spec("echo")))
        assert (backend.pid(A), told) == (pid, [1, 0])
        await ear.hear(WorkerReady)


def threads_of(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def test_spare_workers_get_ready_at_the_lowest_priority(tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(
        "import os\n"
        "def prepare():\n    global seen\n    seen = os.sched_getscheduler(0)\n"
        "def main(arguments, *, is_spare):\n    print(arguments, is_spare, seen, os.sched_getscheduler(0))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-m", "sloop.serve.processes", "noting", humble, str(os.getpid()), "7"],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.strip()
        for humble in ("1", "0")
    ]
    usual = os.SCHED_OTHER
    assert found == [f"['7'] True {os.SCHED_IDLE} {usual}", f"['7'] True {usual} {usual}"]


async def test_without_spare_workers_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_workers.SparePool, "_start", lambda _: pytest.fail("one is started"))
    monkeypatch.setattr(spare_workers, "SPARES_AFTER_S", 0.01)
    async with local_node(spares_max=0) as (backend, ear):
        backend.order(StartWorker(A, spec("echo")))
        await ear.hear(WorkerReady)
        await asyncio.sleep(0.1)
        assert backend.spare_processes() == {"local": SpareProcesses()}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_replica_whose_spare_worker_is_of_no_use_gets_another_process(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKEN_S_MAX", 0.2)
    async with local_node(spares_max=1) as (backend, ear):
        [pid] = await spares(backend, 1)
        os.kill(pid, signal.SIGSTOP)
        backend.order(StartWorker(A, spec("echo")))
        assert backend.pid(A) == pid
        backend.order(ResizeWorker(A, 2))
        os.kill(pid, number)
        await ear.hear(WorkerReady)
        assert backend.pid(A) != pid
        await gone(pid)
        backend.run(BatchId(1), A, rows(b"a"))
        await ear.hear(Finished)
        assert [event for event in ear.events if isinstance(event, WorkerResized)] == [WorkerResized(A, 2)]
        assert not any(isinstance(event, WorkerLost) for event in ear.events)


@pytest.mark.usefixtures("soon")
async def test_a_replica_is_stopped_before_its_spare_worker_says_anything() -> None:
    async with local_node(spares_max=1) as (backend, ear):
        [pid] = await spares(backend, 1)
        os.kill(pid, signal.SIGSTOP)
        backend.order(StartWorker(A, spec("echo")))
        backend.order(StopWorker(A, ""))
        await ear.hear(WorkerStopped)
        await gone(pid)


@pytest.mark.usefixtures("soon")
async def test_spare_workers_that_get_no_time_are_started_at_the_usual_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two hang: at the lowest priority the first time, at the usual one then."""
    monkeypatch.setattr(spare_workers, "HUMBLE_S_MAX", 0.1)
    monkeypatch.setattr(spare_workers, "SPARE_S_MAX", 0.1)
    commands: list[tuple[object, ...]] = []
    spawn = processes.spawn

    def hanging(name: str, arguments: Sequence[object], fds: Sequence[int], **_: object) -> subprocess.Popen[bytes]:
        commands.append((name, *arguments))
        if len(commands) <= 2:
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        monkeypatch.setattr(spare_workers, "SPARE_S_MAX", 20)
        return spawn(name, arguments, fds)

    monkeypatch.setattr(spare_workers, "spawn", hanging)
    async with local_node(spares_max=1) as (backend, _):
        [pid] = await spares(backend, 1)
        assert [command[2] for command in commands] == [1, 0, 0]
        os.kill(pid, signal.SIGKILL)
        await spares(backend, 1, without=[pid])
        assert commands[3][2] == 1, "one that waited has shown that it works"


@pytest.mark.usefixtures("soon")
async def test_a_machine_without_processes_left_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, refused = processes.spawn, asyncio.Event()

    def refusing(name: str, arguments: Sequence[object], fds: Sequence[int], **_: object) -> subprocess.Popen[bytes]:
        if name == "sloop.serve.worker":
            return spawn(name, arguments, fds)
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(spare_workers, "spawn", refusing)
    monkeypatch.setattr(spare_workers._log, "warning", lambda *_: refused.set())
    async with local_node(spares_max=1) as (backend, ear):
        await asyncio.wait_for(refused.wait(), 20)
        backend.order(StartWorker(A, spec("echo")))
        await ear.hear(WorkerReady)


@pytest.mark.usefixtures("soon")
async def test_a_worker_that_cannot_be_limited_is_not_taken() -> None:
    class Refusing(Affinity):
        tries = 0

        def prepare(self, pid: int) -> None:
            self.tries += 1
            if self.tries == 1:
                raise MachineError("control group of the first cannot be set")

    actuator = Refusing([0])
    async with local_node(actuator=actuator, spares_max=1) as (backend, ear):
        [pid] = await spares(backend, 1)
        assert actuator.tries == 2
        backend.order(StartWorker(A, spec("echo")))
        assert backend.pid(A) == pid
        await ear.hear(WorkerReady)


@pytest.mark.usefixtures("soon")
async def test_the_server_ends_while_a_spare_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn, begun, made = processes.spawn, threading.Event(), list[subprocess.Popen[bytes]]()

    def slow(*given: Any, **others: Any) -> subprocess.Popen[bytes]:
        begun.set()
        time.sleep(0.2)
        made.append(spawn(*given, **others))
        return made[0]

    monkeypatch.setattr(spare_workers, "spawn", slow)
    async with local_node(spares_max=1):
        await asyncio.to_thread(begun.wait, 20)
    assert [process.returncode for process in made] == [-signal.SIGKILL]


async def test_a_worker_is_limited_before_it_knows_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare one would begin at once, on cores that are not its own."""
    order: list[str] = []
    tell = RecordLink.tell

    class Noted(Affinity):
        def confine(self, pid: int, cores: float) -> Grant:
            order.append("confined")
            return super().confine(pid, cores)

    def noted(link: RecordLink, record: Struct) -> None:
        order.append(type(record).__name__)
        tell(link, record)

    monkeypatch.setattr(RecordLink, "tell", noted)
    async with local_node(actuator=Noted([0])) as (backend, _):
        backend.order(StartWorker(A, spec("echo")))
        assert order == ["confined", "StageSetup"]


@given(starts=st.lists(st.integers(0, 5000).map(lambda tenths: tenths / 4), max_size=30), now=st.integers(0, 400))
def test_how_many_replicas_were_started_together(starts: list[float], now: int) -> None:
    starts, now_s = sorted(starts), 1250.0 + now
    recent = [at for at in starts if at >= now_s - spare_workers.SPARES_FOR_S]
    windows = [sum(at - spare_workers.SPARES_AFTER_S <= other <= at for other in recent) for at in recent]
    assert spare_workers.most_together(starts, now_s) == max([1, *windows])


def group_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


async def test_a_replica_without_a_cap_has_all_cores_of_its_node_and_a_resize_is_a_reservation() -> None:
    actuator = detect().actuator
    cores = capacity().cores
    async with local_node(actuator=actuator) as (backend, ear):
        own = structs.replace(spec(cores=0.25), slot=Slot(0.25, is_capped=False))
        for replica in (A, B):
            backend.order(StartWorker(replica, own))
        await ear.hear(WorkerReady, count=2)
        pids = [pid for replica in (A, B) if (pid := backend.pid(replica)) is not None]
        assert [actuator.read(pid) for pid in pids] == [cores, cores]
        if isinstance(actuator, Cgroups):
            assert len({group_of(pid) for pid in pids}) == 1, "one quota for both"
        backend.order(ResizeWorker(A, 0.5))
        assert ear.events[-1] == WorkerResized(A, 0.5)
        assert actuator.read(pids[0]) == cores
        backend.run(BatchId(1), A, rows(b"x"))
        await ear.hear(Finished)


class WithoutPools(Affinity):
    """An actuator that cannot share cores."""

    def join(self, pid: int, pool: str, cores: float) -> Grant:
        raise MachineError("no such group")


async def test_a_replica_that_would_get_a_cap_that_nobody_planned_is_lost() -> None:
    async with local_node(actuator=WithoutPools([0])) as (backend, ear):
        backend.order(StartWorker(A, structs.replace(spec(), slot=Slot(0.25, is_capped=False))))
        await ear.hear(WorkerLost)
        assert ear.events[-1] == WorkerLost(A, "no such group")
        assert not [event for event in ear.events if isinstance(event, WorkerReady)]
