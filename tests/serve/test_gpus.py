"""GPUs of a server: which GPU a declared device is, what its workers get, and what happens when it fails.

There is no GPU: `nvidia-smi`, MPS and an ONNX Runtime with CUDA are stand-ins (`tests.nvidia`).
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from msgspec import structs

from sloop.actions import ResizeWorker, StartWorker
from sloop.app.application import Deployment
from sloop.app.load import load_application
from sloop.cuda import CudaDevice, Gpu, MpsDaemon, present_gpus
from sloop.errors import InputError, MachineError
from sloop.events import BatchFailed, Finished, NodeReady, WorkerLost, WorkerReady
from sloop.profile import model as models
from sloop.profile.model import check_cuda, open_model, open_session, read_signature
from sloop.serve.cpu_quota import Affinity
from sloop.serve.gpus import MPS, AssignedGpus, assigned, opened_gpus
from sloop.serve.messages import Run
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.systems.setup import set_up
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Device, Node, ReplicaId, ReplicaSpec, Slot
from tests.nvidia import A100, T4, FakeNvidia
from tests.serve.rig import run_of, wirings_of
from tests.serve.test_local_backend import Ear

GIB = 1 << 30
A, B = ReplicaId(1), ReplicaId(2)
HERE = Node("here", "local", 8, GIB, (Device("T4", "T4", 16 * GIB),))
"""Known T4s have 16 GiB; the stand-in says 15 GiB, as a real one does."""


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvidia:
    made = FakeNvidia(tmp_path / "nvidia", monkeypatch)
    made.has(T4, A100)
    return made


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder with a short name, as sockets need."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


class FakeSession:
    """What ONNX Runtime's session does about providers."""

    def __init__(self, *_: object, providers: list[Any], enable_fallback: int) -> None:
        self.providers, self.enable_fallback = providers, enable_fallback
        self.can_fall_back = True

    def disable_fallback(self) -> None:
        self.can_fall_back = False

    def get_providers(self) -> list[str]:
        return [each if isinstance(each, str) else each[0] for each in self.providers]


class CudaRuntimeStandIn:
    """An ONNX Runtime with CUDA."""

    __version__ = "1.99"
    InferenceSession: Any = FakeSession

    def __init__(self, *providers: str) -> None:
        self.providers = providers
        self.preloaded = 0

    def get_available_providers(self) -> list[str]:
        return list(self.providers)

    def preload_dlls(self) -> None:
        self.preloaded += 1

    class SessionOptions:
        def add_session_config_entry(self, *_: str) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaRuntimeStandIn:
    runtime = CudaRuntimeStandIn("CUDAExecutionProvider", "CPUExecutionProvider")
    monkeypatch.setattr(models, "onnx_runtime", lambda: runtime)
    return runtime


def spec(share: float = 1.0) -> ReplicaSpec:
    return ReplicaSpec("stage", "mlp", Slot(1, "local", "T4", share), "here", "T4")


# Which GPU a device is


def test_each_device_is_a_gpu_of_its_kind(nvidia: FakeNvidia) -> None:
    nvidia.has(A100, T4, T4.replace("4d2ca1c0", "other"))
    nodes = [
        structs.replace(HERE, name="one", devices=(Device("first", "T4", GIB), Device("big", "A100", 80 * GIB))),
        structs.replace(HERE, name="two"),
    ]
    found = assigned(nodes, present_gpus())
    assert {place: gpu.uuid for place, gpu in found.items()} == {
        ("one", "first"): "GPU-4d2ca1c0",
        ("one", "big"): "GPU-a100beef",
        ("two", "T4"): "GPU-other",
    }
    gpus = AssignedGpus(nodes, found)
    sizes = {device.name: device.memory_bytes for node in gpus.nodes for device in node.devices}
    assert sizes == {"first": GIB, "big": 40 * GIB, "T4": 15 * GIB}, "no more than the GPU has"


def test_a_longer_name_chooses_first() -> None:
    present = [Gpu(0, "GPU-0", "NVIDIA A100-SXM4-40GB", 0, 0, ""), Gpu(1, "GPU-1", "NVIDIA A100-PCIE-40GB", 0, 0, "")]
    devices = (Device("any", "A100", GIB), Device("own", "A100-SXM4-40GB", GIB))
    found = assigned([structs.replace(HERE, devices=devices)], present)
    assert {device: gpu.index for (_, device), gpu in found.items()} == {"any": 1, "own": 0}


def test_a_gpu_of_another_kind_is_refused(nvidia: FakeNvidia) -> None:
    nvidia.has(A100)
    with pytest.raises(
        MachineError, match=r"here declares a T4 .device 'T4'.; this machine has NVIDIA A100-SXM4-40GB\n"
    ):
        assigned([HERE], present_gpus())
    nvidia.has(T4)
    with pytest.raises(MachineError, match="this machine has Tesla T4; other devices have 1 of them"):
        assigned([HERE, structs.replace(HERE, name="two")], present_gpus())


# A server


def deployment_of(folder: Path, model: Path, **profile: Any) -> Deployment:
    """One stage on a T4 of this machine."""
    given = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.1, "gamma": 1}, "max_batch": 4, "max_cores": 1}
    application = {
        "name": "app",
        "slo_ms": 1000,
        "stages": [{"name": "stage", "model": str(model), "profile": {**given, "accelerator": "T4", **profile}}],
        "system": "static",
        "cluster": {"nodes": [{"hardware": "local", "devices": ["T4"]}]},
    }
    file = folder / "app.yaml"
    file.write_text(json.dumps(application))
    return set_up(load_application(file)).deployment


def test_a_server_gives_out_what_the_gpu_really_has(
    nvidia: FakeNvidia, mlp: Path, tmp_path: Path, cuda: CudaRuntimeStandIn
) -> None:
    with opened_gpus(deployment_of(tmp_path, mlp), tmp_path) as (found, gpus):
        assert gpus is not None
        [device] = found.cluster[0].devices
        assert device.memory_bytes == 15 * GIB
        here = structs.replace(spec(0.5), node="local-0")
        assert gpus.device_of(here, 7) == CudaDevice("GPU-4d2ca1c0", 0.5, 7)
        reserved = structs.replace(here, slot=structs.replace(here.slot, is_capped=False))
        assert gpus.device_of(reserved, 7) == CudaDevice("GPU-4d2ca1c0", 0.0, 7), "a share that limits nothing"
    assert not (tmp_path / MPS).exists(), "nothing shares it"


def test_shares_are_enforced_by_mps(
    nvidia: FakeNvidia, mlp: Path, tmp_path: Path, state: Path, cuda: CudaRuntimeStandIn
) -> None:
    nvidia.install_mps()
    with opened_gpus(deployment_of(tmp_path, mlp, device_share=0.5), state) as (_, gpus):
        assert gpus is not None
        found = gpus.environment(CudaDevice("GPU-4d2ca1c0", 0.5, GIB))
        assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M"
        daemon = Path(found["CUDA_MPS_PIPE_DIRECTORY"]) / "daemon"
        assert daemon.exists()
    assert not daemon.exists()


def test_mps_that_cannot_be_started_is_announced_and_replicas_take_turns(
    nvidia: FakeNvidia,
    mlp: Path,
    tmp_path: Path,
    state: Path,
    cuda: CudaRuntimeStandIn,
    caplog: pytest.LogCaptureFixture,
) -> None:
    nvidia.install_mps()
    nvidia.happens("refuses")
    with opened_gpus(deployment_of(tmp_path, mlp, device_share=0.5), state) as (_, gpus):
        assert gpus is not None
        assert gpus.environment(CudaDevice("GPU-4d2ca1c0", 0.5)) == {"CUDA_VISIBLE_DEVICES": "GPU-4d2ca1c0"}
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("without MPS, replicas on GPU 0 (Tesla T4) take turns, and their shares limit nothing: ")
    assert "Permission denied" in warning


def test_a_model_that_needs_cuda_is_refused_without_it(nvidia: FakeNvidia, mlp: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(MachineError, match="has no CUDAExecutionProvider") as caught,
        opened_gpus(deployment_of(tmp_path, mlp), tmp_path),
    ):
        pytest.fail("this ONNX Runtime has no CUDA")
    assert "pip install 'onnxruntime-gpu[cuda,cudnn]'" in caught.value.help
    nvidia.has()
    with (
        pytest.raises(MachineError, match="No devices were found"),
        opened_gpus(deployment_of(tmp_path, mlp), tmp_path),
    ):
        pytest.fail("there is no GPU")


def test_a_cluster_without_gpus_asks_nobody(nvidia: FakeNvidia, mlp: Path, tmp_path: Path) -> None:
    declared = deployment_of(tmp_path, mlp)
    bare = replace(declared, cluster=tuple(structs.replace(node, devices=()) for node in declared.cluster))
    with opened_gpus(bare, tmp_path) as found:
        assert found == (bare, None)
    assert nvidia.lines("asked") == ()


def test_shares_above_all_of_a_gpu_and_profiles_for_another_gpu_are_refused(mlp: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"device_share.*1\.5"):
        deployment_of(tmp_path, mlp, device_share=1.5)
    with pytest.raises(InputError, match="the profile is for accelerator 'V100', and no node of local has one"):
        deployment_of(tmp_path, mlp, accelerator="V100")


# ONNX Runtime


def test_a_session_is_on_the_gpu_within_its_memory_and_never_elsewhere(cuda: CudaRuntimeStandIn, mlp: Path) -> None:
    session = open_session(mlp, 1, device=CudaDevice("GPU-1", 1.0, GIB))
    assert session.providers == [
        (
            "CUDAExecutionProvider",
            {
                "device_id": 0,
                "arena_extend_strategy": "kSameAsRequested",
                "cudnn_conv_algo_search": "HEURISTIC",
                "gpu_mem_limit": GIB,
            },
        ),
        "CPUExecutionProvider",
    ]
    assert (session.enable_fallback, session.can_fall_back, cuda.preloaded) == (0, False, 1)
    assert "gpu_mem_limit" not in open_session(mlp, 1, device=CudaDevice("GPU-1")).providers[0][1]


def test_a_session_that_is_not_on_the_gpu_is_refused(
    cuda: CudaRuntimeStandIn, mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    with pytest.raises(MachineError, match="libraries of CUDA or cuDNN are missing"):
        open_session(mlp, 1, device=CudaDevice("GPU-1"))


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ("CUDA failure 2: out of memory ; GPU=0", MachineError, "too little memory left for it: CUDA failure 2"),
        ("CUDA failure 100: no CUDA-capable device is detected", MachineError, "its GPU has failed .GPU-1."),
        ("[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : x", InputError, "not an ONNX model"),
    ],
)
def test_what_fails_at_load_is_told_apart(
    cuda: CudaRuntimeStandIn, mlp: Path, monkeypatch: pytest.MonkeyPatch, said: str, kind: type[Exception], text: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(CudaRuntimeStandIn, "InferenceSession", refuse)
    with pytest.raises(kind, match=text):
        open_session(mlp, 1, device=CudaDevice("GPU-1"))


def test_two_packages_of_onnx_runtime_are_explained(cuda: CudaRuntimeStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cuda()
    cuda.providers = ("CPUExecutionProvider",)
    with pytest.raises(MachineError, match=r"ONNX Runtime 1\.99 has no CUDAExecutionProvider\n") as caught:
        check_cuda()
    assert caught.value.help.startswith("pip uninstall -y onnxruntime ")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.99")
    with pytest.raises(MachineError, match="the files of onnxruntime, installed beside it, have replaced its own"):
        check_cuda()


# Workers


Scene = Callable[[LiveNode, Ear], Awaitable[None]]


@asynccontextmanager
async def gpu_node(
    servable: Servable, mps: dict[str, MpsDaemon] | None = None, spares_max: int = 0
) -> AsyncIterator[tuple[LiveNode, Ear]]:
    """A node with one T4, and what it reports."""
    servables = {("stage", "mlp"): servable}
    gpus = AssignedGpus([HERE], assigned([HERE], present_gpus()), mps)
    actuator = Affinity(sorted(os.sched_getaffinity(0)))
    backend = LiveNode(servables, wirings_of(servables), actuator, nodes=gpus.nodes, gpus=gpus, spares_max=spares_max)
    ear = Ear()
    backend.attach(ear)
    try:
        yield backend, ear
    finally:
        await backend.close()


def batch() -> Run:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    return run_of([[Tensor("FP32", x.shape, x.tobytes())]])


@pytest.fixture
def on_t4(nvidia: FakeNvidia, mlp: Path) -> Servable:
    nvidia.install_runtime()
    return Servable(str(mlp), read_signature(mlp), device_bytes={"local": 3 * GIB})


@pytest.mark.live
async def test_a_replica_with_a_share_of_a_gpu(nvidia: FakeNvidia, on_t4: Servable, state: Path) -> None:
    nvidia.install_mps()
    with MpsDaemon("GPU-4d2ca1c0", state / "mps") as mps:
        async with gpu_node(on_t4, {"GPU-4d2ca1c0": mps}) as (backend, ear):
            backend.order(StartWorker(A, spec(0.25)))
            await ear.hear(WorkerReady, WorkerLost)
            backend.run(BatchId(1), A, batch())
            await ear.hear(Finished)
            [[y]] = ear.outputs[BatchId(1)]
            x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
            [expected] = open_model(Path(on_t4.model), 1).run({"x": x})
            np.testing.assert_allclose(np.frombuffer(y.data, np.float32).reshape(y.shape), expected, rtol=1e-6)
            backend.order(ResizeWorker(A, 2))
            backend.run(BatchId(2), A, batch())
            await ear.hear(Finished, count=2)
    [session] = map(json.loads, nvidia.lines("sessions"))  # one, whatever the cores
    providers, others, variables = session
    assert providers[0][0] == "CUDAExecutionProvider"
    assert providers[0][1]["gpu_mem_limit"] == 3 * GIB
    assert others == {"enable_fallback": 0}
    assert variables == {
        "CUDA_VISIBLE_DEVICES": "GPU-4d2ca1c0",
        "CUDA_MPS_PIPE_DIRECTORY": str(state / "mps"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3072M",
    }


SEES = """
import os
import numpy as np

class Model:
    inputs = {"x": ("FP32", (-1, 4))}
    outputs = {"seen": ("BYTES", (1,))}

    def __init__(self, threads): ...

    def run(self, x):
        return np.array([os.environ.get("CUDA_VISIBLE_DEVICES", "all")], object)
"""


@pytest.mark.live
async def test_a_model_in_python_sees_its_gpu_and_on_cores_none(nvidia: FakeNvidia, tmp_path: Path) -> None:
    file = tmp_path / "sees.py"
    file.write_text(SEES)
    async with gpu_node(Servable(str(file), open_model(file, 1).signature)) as (backend, ear):
        backend.order(StartWorker(A, spec()))
        backend.order(StartWorker(B, ReplicaSpec("stage", "mlp", Slot(1, "local"), "here")))
        await ear.hear(WorkerReady, WorkerLost, count=2)
        for number, replica in enumerate((A, B), 1):
            backend.run(BatchId(number), replica, batch())
        await ear.hear(Finished, count=2)
        seen = [bytes(ear.outputs[BatchId(number)][0][0].data) for number in (1, 2)]
        assert seen[0].endswith(b"GPU-4d2ca1c0")
        assert seen[1].endswith(b"\x00\x00\x00\x00")


@pytest.mark.live
async def test_a_model_that_does_not_fit_on_its_gpu_is_lost_with_the_reason(
    nvidia: FakeNvidia, on_t4: Servable
) -> None:
    nvidia.happens("full")
    async with gpu_node(on_t4) as (backend, ear):
        backend.order(StartWorker(A, spec()))
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert "the GPU has too little memory left for it, of which it may have 3072 MiB: CUDA failure 2" in lost.error
        assert not [event for event in ear.events if isinstance(event, NodeReady)], "the GPU is as it was"


@pytest.mark.live
@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_gpu_that_disappears_is_lost_before_its_replica(
    nvidia: FakeNvidia, on_t4: Servable, is_gone: bool
) -> None:
    async with gpu_node(on_t4) as (backend, ear):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        nvidia.happens("failed")
        if is_gone:
            nvidia.has(A100)
        backend.run(BatchId(1), A, batch())
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert lost.error.startswith("its GPU has failed (GPU-4d2ca1c0): ")
        left = [event.node.devices for event in ear.events if isinstance(event, NodeReady)]
        assert left == ([()] if is_gone else [])
        assert not [event for event in ear.events if isinstance(event, BatchFailed)], "its requests are tried again"
        if is_gone:
            assert isinstance(ear.events[-2], NodeReady)
            backend.order(StartWorker(B, spec()))
            again = await ear.hear(WorkerLost, count=2)
            assert again == WorkerLost(B, "here has no GPU 'T4', or has lost it")


@pytest.mark.live
async def test_a_replica_on_a_gpu_takes_no_spare_worker(
    nvidia: FakeNvidia, on_t4: Servable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sloop.serve.node.spares.SPARES_AFTER_S", 0.01)
    async with gpu_node(on_t4, spares_max=1) as (backend, ear):
        waits = asyncio.Event()
        backend.spares.on_change = waits.set
        await asyncio.wait_for(waits.wait(), 20)
        [spare] = backend.spares.pids()
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        assert backend.pid(A) not in (None, spare)
        backend.order(StartWorker(B, ReplicaSpec("stage", "mlp", Slot(1, "local"), "here")))
        assert backend.pid(B) == spare


def asked(url: str, body: bytes | None = None) -> Any:
    """The JSON that a server answers, whatever the status."""
    try:
        with urlopen(Request(url, body), timeout=60) as answer:
            return json.load(answer)
    except HTTPError as error:
        return json.load(error)


@pytest.mark.live
def test_a_server_answers_from_a_gpu_until_it_disappears(nvidia: FakeNvidia, mlp: Path, tmp_path: Path) -> None:
    nvidia.install_runtime()
    deployment_of(tmp_path, mlp, device_memory_bytes=GIB)  # writes the application's file
    command = [sys.executable, "-m", "sloop", "serve", "app.yaml", "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            where = json.loads(server.stdout.readline())["http"]
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.0, 1.0, 2.0, 3.0]}
            body = json.dumps({"inputs": [tensor], "parameters": {"x-slo-ms": 60_000}}).encode()
            infer, state = f"{where}/v2/models/app/infer", f"{where}/v2/sloop/state"
            deadline = time.monotonic() + 60
            while "outputs" not in (answer := asked(infer, body)) and time.monotonic() < deadline:
                time.sleep(0.1)  # the first replica may not be ready yet
            assert answer["outputs"][0]["shape"] == [1, 3]
            [providers, _, variables] = json.loads(nvidia.lines("sessions")[0])
            assert providers[0][1]["gpu_mem_limit"] == GIB
            assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-4d2ca1c0"
            [device] = asked(state)["nodes"][0]["devices"]
            assert (device["kind"], device["memory_bytes"]) == ("T4", 15 * GIB)
            nvidia.has(A100)
            nvidia.happens("failed")
            short = json.dumps({"inputs": [tensor], "parameters": {"x-slo-ms": 1000}}).encode()
            assert "outputs" not in asked(infer, short), "no replica is left"
            deadline = time.monotonic() + 40
            while asked(state)["nodes"][0]["devices"] and time.monotonic() < deadline:
                time.sleep(0.1)
            assert asked(state)["nodes"][0]["devices"] == []
        finally:
            server.kill()
