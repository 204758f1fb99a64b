"""What a worker may take of the memory, and when it gives some back."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from sloop.actions import StartWorker
from sloop.app.load import load_application
from sloop.events import BatchFailed, Finished, WorkerLost, WorkerReady
from sloop.memory import give_back, is_out_of_memory, own_bytes
from sloop.profile.examine import examine
from sloop.serve.control.servables import servables_of
from sloop.serve.protocols import Servable
from sloop.serve.runtimes import Expected, FileRuntime
from sloop.serve.worker_memory import PAUSE_S_MAX, Surplus, WorkerMemory, bound_of
from sloop.tensor import Tensor
from sloop.units import GIB
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot
from tests.onnx_graphs import save_model
from tests.serve.rig import run_of
from tests.serve.test_local_backend import local_node

onnx = pytest.importorskip("onnx")
MIB = 2**20
A = ReplicaId(1)
SPEC = ReplicaSpec("stage", "grows", Slot(1), "here")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the private memory of a process")


@pytest.mark.parametrize(
    ("counted_gib", "machine_gib", "bound_gib"),
    [
        (0.1, None, 1.1),  # a small model may take a GiB more
        (3, None, 6),  # a large one twice as much
        (0.1, 64, 1.1),
        (3, 5, 4),  # half of what the machine has beside it
        (3, 2, 3),  # the machine has less than is counted
    ],
)
def test_the_bound_follows_from_what_is_counted_and_from_the_machine(
    counted_gib: float, machine_gib: float | None, bound_gib: float
) -> None:
    machine_bytes = None if machine_gib is None else round(machine_gib * GIB)
    assert bound_of(round(counted_gib * GIB), machine_bytes) == pytest.approx(bound_gib * GIB, rel=1e-6)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (RuntimeError("Failed to allocate memory for requested buffer of size 3221225472"), True),
        (RuntimeError("Non-zero status code returned while running Expand node. std::bad_alloc"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:83] DefaultCPUAllocator: not enough memory"), True),
        (ValueError("the picture has no memory of its own"), False),
    ],
)
def test_frameworks_say_in_texts_that_memory_is_lacking(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_memory_is_given_back_when_more_is_taken_than_usual() -> None:
    surplus = Surplus(100 * MIB)
    assert [surplus.is_due(taken * MIB, now_s) for now_s, taken in enumerate((100, 119, 121, 100))] == [
        False,
        False,
        True,
        False,
    ]


def test_what_is_needed_again_soon_is_given_back_ever_more_rarely() -> None:
    surplus = Surplus(100 * MIB)
    due_s = [now_s for now_s in range(300) if surplus.is_due(200 * MIB, now_s)]
    assert due_s == [0, 1, 3, 7, 15, 31, 63, 127, 191, 255]
    assert due_s[-1] - due_s[-2] == PAUSE_S_MAX
    assert not surplus.is_due(100 * MIB, 320)
    assert surplus.is_due(200 * MIB, 321)
    assert surplus.is_due(200 * MIB, 322)


def test_what_stays_is_usual_from_then_on() -> None:
    surplus = Surplus(100 * MIB)
    assert surplus.is_due(200 * MIB, 0)
    surplus.note(190 * MIB)
    assert not surplus.is_due(200 * MIB, 10)
    assert surplus.is_due(300 * MIB, 20)
    surplus.note(50 * MIB)
    assert not surplus.is_due(110 * MIB, 30)


def test_without_a_bound_nothing_is_refused() -> None:
    memory = WorkerMemory()
    memory.expect(100 * MIB, 0, has_device=False)
    memory.settle()
    assert (memory.bound_bytes, memory.refusal, memory.stays) == (0, "", "")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is resident")
def test_a_session_gives_back_what_a_large_batch_took(tmp_path: Path) -> None:
    graph = "(float[n, k] x) => (float[n, 1] y) { h = Sin(x) g = Cos(h) y = ReduceMax<axes = [1]>(g) }"
    runtime = FileRuntime(str(save_model(tmp_path / "m.onnx", graph)), expected=Expected((1,), {"x": (16,)}))
    runtime.load(1)
    runtime.warm(1)
    runtime.run([np.ones((1, 32 * MIB), np.float32)], 1)  # 128 MiB for each tensor
    before_bytes = own_bytes(os.getpid())
    runtime.give_back()
    give_back()
    assert before_bytes - own_bytes(os.getpid()) > 100 * MIB


GROWS = """
import numpy as np

KEPT = []

class Model:
    inputs = {"mib": ("INT64", (1,))}
    outputs = {"sum": ("FP64", (1,))}

    def __init__(self, threads): pass

    def run(self, mib):
        made = np.ones(abs(int(mib[0])) * 2**17)
        if mib[0] < 0:
            KEPT.append(made)
        return np.array([made.sum()])
"""


def growing(folder: Path, worker_bytes: int) -> dict[str, Servable]:
    path = folder / "grows.py"
    path.write_text(GROWS, encoding="utf-8")
    return {"grows": Servable(str(path), examine(path).signature, worker_bytes=worker_bytes)}


def asked(mib: int) -> list[Tensor]:
    return [Tensor("INT64", (1,), np.array([mib]).tobytes())]


@pytest.mark.live
@on_linux
async def test_a_request_that_needs_too_much_fails_alone(tmp_path: Path) -> None:
    async with local_node(growing(tmp_path, 512 * MIB)) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        await ear.hear(WorkerReady)
        backend.run(BatchId(1), A, run_of([asked(3000)]))
        failed = await ear.hear(BatchFailed)
        assert isinstance(failed, BatchFailed)
        assert failed.error == "the request needs more memory than a worker of this model may take (0.5 GiB)"
        assert "MemoryError" in failed.detail
        backend.run(BatchId(2), A, run_of([asked(10)]))
        await ear.hear(Finished)


@pytest.mark.live
@on_linux
async def test_a_worker_that_keeps_what_it_took_is_replaced_with_the_reason(tmp_path: Path) -> None:
    async with local_node(growing(tmp_path, 512 * MIB)) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        await ear.hear(WorkerReady)
        backend.run(BatchId(1), A, run_of([asked(-350)]))
        await ear.hear(Finished)
        backend.run(BatchId(2), A, run_of([asked(-350)]))
        await ear.hear(BatchFailed)
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert "GiB after a request that needed more memory than a worker of this model may take" in lost.error


@pytest.mark.live
@on_linux
async def test_a_bound_below_what_the_model_takes_is_an_error(tmp_path: Path) -> None:
    async with local_node(growing(tmp_path, MIB)) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert "GiB when it is loaded, and may take 0.000977" in lost.error
        assert "raise `limits: {worker_bytes: …}` of the application" in lost.error


EXPANDS = """
import numpy as np

class Model:
    inputs = {"mib": ("INT64", (1,))}
    outputs = {"sum": ("FP64", (1,))}

    def __init__(self, threads): self.arena = None

    def run(self, mib):
        self.arena = [bytes(2**16) for _ in range(16 * int(mib[0]))]  # small objects, which C's allocator keeps
        self.arena = self.arena[-1:]
        return np.array([1.0])
"""


@pytest.mark.live
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is resident")
async def test_an_idle_worker_gives_back_what_a_large_request_has_left(tmp_path: Path) -> None:
    path = tmp_path / "grows.py"
    path.write_text(EXPANDS, encoding="utf-8")
    async with local_node({"grows": Servable(str(path), examine(path).signature)}) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        await ear.hear(WorkerReady)
        pid = backend.pid(A)
        assert pid is not None
        usual_bytes = own_bytes(pid)
        backend.run(BatchId(1), A, run_of([asked(200)]))
        await ear.hear(Finished)
        for _ in range(600):
            if own_bytes(pid) < usual_bytes + 50 * MIB:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("it keeps the memory")


def test_the_limit_of_a_file_and_what_profiles_count_reach_workers(tmp_path: Path) -> None:
    path = tmp_path / "grows.py"
    path.write_text(GROWS, encoding="utf-8")
    profile = {"latency_ms": {"form": "table", "table": {1: {1: 5}}}, "max_batch": 1, "max_cores": 1, "load_s": 1}
    stage = {"name": "grows", "model": str(path), "profile": {**profile, "memory_bytes": 7e8}}
    document = {"name": "grows", "slo_ms": 100, "stages": [stage], "system": "static"}
    for limits, bound in (({}, 9), ({"worker_bytes": 2e9}, 2_000_000_000)):
        [servable] = servables_of(load_application({**document, "limits": limits}), tmp_path, worker_bytes=9).values()
        assert (servable.worker_bytes, servable.memory_bytes) == (bound, {"local": 700_000_000})
