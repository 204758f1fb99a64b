"""On a real GPU: what no stand-in can show. `make gpu-check` runs these; without a GPU they are skipped."""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import uvloop

from benchmarks.models import perceptron
from sloop.actions import StartWorker
from sloop.cuda import Gpu, MpsDaemon, present_gpus
from sloop.errors import MachineError
from sloop.events import Finished, WorkerLost, WorkerReady
from sloop.profile.model import open_model, read_signature
from sloop.profile.profile import load_profile
from sloop.serve.cpu_quota import detect
from sloop.serve.gpus import AssignedGpus, assigned
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Device, Node, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import run_of, wirings_of
from tests.serve.test_local_backend import Ear

pytestmark = [pytest.mark.live, pytest.mark.needs_gpu]
A = ReplicaId(1)
X = np.linspace(-1, 1, 256, dtype=np.float32).reshape(4, 64)


@pytest.fixture
def gpu() -> Gpu:
    return present_gpus()[0]


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return perceptron(tmp_path, width=64, layers=3)


def served(network: Path, gpu: Gpu, *, share: float = 1.0, bytes_max: int = 0, mps: MpsDaemon | None = None) -> Ear:
    """A replica on the GPU, which runs one batch if it can."""
    ear = Ear()

    async def main() -> None:
        servables = {("stage", "m"): Servable(str(network), read_signature(network), device_bytes={"local": bytes_max})}
        node = Node("here", "local", 4, 1 << 34, (Device("card", gpu.kind, gpu.memory_bytes),))
        gpus = AssignedGpus([node], assigned([node], [gpu]), {gpu.uuid: mps} if mps else {})
        backend = LiveNode(servables, wirings_of(servables), detect().actuator, nodes=gpus.nodes, gpus=gpus)
        backend.attach(ear)
        try:
            backend.order(StartWorker(A, ReplicaSpec("stage", "m", Slot(1, "local", gpu.kind, share), "here", "card")))
            async with asyncio.timeout(100):
                if isinstance(await ear.hear(WorkerReady, WorkerLost), WorkerReady):
                    backend.run(BatchId(1), A, run_of([[Tensor("FP32", X.shape, X.tobytes())]]))
                    await ear.hear(Finished, WorkerLost)
        finally:
            await backend.close()

    uvloop.run(main())
    return ear


def assert_right(ear: Ear, network: Path) -> None:
    """The outputs are those of the CPU, up to the order of additions."""
    assert not [event for event in ear.events if isinstance(event, WorkerLost)]
    [[y]] = ear.outputs[BatchId(1)]
    [expected] = open_model(network, 1).run({"x": X})
    np.testing.assert_allclose(np.frombuffer(y.data, np.float32).reshape(y.shape), expected, rtol=1e-2, atol=1e-2)


def test_a_replica_computes_on_the_card_what_the_cpu_computes(network: Path, gpu: Gpu) -> None:
    assert_right(served(network, gpu), network)


def test_a_replica_has_a_share_of_the_card(network: Path, gpu: Gpu) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with MpsDaemon(gpu.uuid, Path(folder)) as mps:
                assert_right(served(network, gpu, share=0.5, mps=mps), network)
        except MachineError as error:
            pytest.skip(f"MPS cannot be started: {error.what}")


def test_a_model_that_does_not_fit_says_so(tmp_path: Path, gpu: Gpu) -> None:
    large = perceptron(tmp_path, width=2048, layers=2)  # 32 MiB of weights
    lost = [event for event in served(large, gpu, bytes_max=1 << 20).events if isinstance(event, WorkerLost)]
    assert len(lost) == 1
    assert "too little memory left for it, of which it may have 1 MiB" in lost[0].error


def test_a_profile_of_the_card(network: Path, gpu: Gpu) -> None:
    command = [sys.executable, "-m", "sloop", "profile", str(network), "--device", "cuda", "--batches", "1,8"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    profile = load_profile(Path(str(network)).with_name(f"{network.name}.profile.json"))
    assert profile.hardware.startswith(gpu.name)
    assert profile.accelerator == json.loads(done.stdout)["accelerator"]
    assert profile.device_memory_bytes > 0


def test_sm_use_and_occupancy_of_the_card(network: Path) -> None:
    command = [sys.executable, "-m", "sloop", "profile", str(network), "--device", "cuda", "--batches", "1,64"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if answer["kernels"] is None:
        pytest.skip(f"no profiler answers: {'; '.join(answer['kernels_failures'])}")
    assert [each["batch"] for each in answer["kernels"]["batches"]] == [1, 64]
    for each in answer["kernels"]["batches"]:
        assert each["kernels"] >= 3, "one for each layer"
        assert 0 < each["sm_use"] <= each["busy"] <= 1
        assert 0 < each["occupancy"] <= each["peak_occupancy"] <= 1
    sharing = load_profile(network.with_name(f"{network.name}.profile.json")).sharing
    assert sharing is not None
    assert sharing.demands is not None
    assert sharing.demands.source == answer["kernels"]["source"]


def test_launches_and_counters_agree_on_sm_use(network: Path) -> None:
    """Both know the launch configurations, so only the durations of the kernels can differ: those of short ones do."""
    found: dict[str, float] = {}
    for source in ("ncu", "launches"):
        command = [sys.executable, "-m", "sloop", "profile", str(network), "--device", "cuda", "--batches", "64"]
        done = subprocess.run([*command, "--kernels", source, "--json"], capture_output=True, timeout=590, check=False)
        answer = json.loads(done.stdout)
        if answer["kernels"] is None:
            pytest.skip(f"{source}: {'; '.join(answer['kernels_failures'])}")
        [use] = answer["kernels"]["batches"]
        found[source] = use["sm_use"] / use["busy"]
    assert found["ncu"] == pytest.approx(found["launches"], rel=0.5)
