"""GPUs of this machine: what `nvidia-smi` says, shares by MPS, and what is said of errors."""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop import cuda
from sloop.cuda import (
    CudaDevice,
    Gpu,
    GpuFailure,
    MpsDaemon,
    environment_on,
    failure_on,
    gpu_called,
    is_present,
    present_gpus,
    used_bytes,
)
from sloop.errors import InputError, MachineError
from tests.hosts import is_running
from tests.nvidia import A100, T4, FakeNvidia
from tests.serve.fleet import until

MIB = 1 << 20


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvidia:
    return FakeNvidia(tmp_path / "nvidia", monkeypatch)


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder with a short name, as sockets need."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_the_gpus_of_the_machine_are_those_that_nvidia_smi_lists(nvidia: FakeNvidia) -> None:
    nvidia.has(T4, A100)
    assert present_gpus() == (
        Gpu(0, "GPU-4d2ca1c0", "Tesla T4", 15360 * MIB, 3 * MIB, "550.54.15"),
        Gpu(1, "GPU-a100beef", "NVIDIA A100-SXM4-40GB", 40960 * MIB, 0, "550.54.15"),
    )
    assert gpu_called("cuda").uuid == "GPU-4d2ca1c0"
    assert gpu_called("cuda:1").uuid == "GPU-a100beef"
    assert used_bytes("GPU-4d2ca1c0") == 3 * MIB
    with pytest.raises(InputError, match="no GPU 2\nhelp: cuda:0 is Tesla T4, cuda:1 is NVIDIA A100"):
        gpu_called("cuda:2")
    with pytest.raises(InputError, match="'gpu0' is not a device"):
        gpu_called("gpu0")


def test_a_gpu_that_disappears_is_noticed(nvidia: FakeNvidia) -> None:
    nvidia.has(T4, A100)
    assert is_present("GPU-4d2ca1c0")
    nvidia.has(A100)
    assert not is_present("GPU-4d2ca1c0")
    assert is_present("GPU-a100beef")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("#!/bin/sh\necho No devices were found; exit 6\n", "failed (exit status 6): No devices were found"),
        ("#!/bin/sh\necho No devices were found\n", "this machine has no NVIDIA GPU: nvidia-smi says 'No devices"),
        ("#!/bin/sh\n", "nvidia-smi says 'nothing'"),
        ("#!/bin/sh\necho couldn\\'t communicate with the driver; exit 9\n", "couldn't communicate with the driver"),
        ("#!/bin/sh\nsleep 60 &\nwait\n", "has not answered within 0.2 s"),
        ("not a program", "nvidia-smi cannot be run"),
    ],
)
def test_a_machine_without_a_gpu_says_why(
    nvidia: FakeNvidia, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    nvidia.install("nvidia-smi", script)
    if "sleep" in script:
        monkeypatch.setattr(cuda, "SMI_S_MAX", 0.2)
    with pytest.raises(MachineError, match=re.escape(says)):
        present_gpus()
    assert not is_present("GPU-4d2ca1c0")


def test_without_a_driver_the_error_names_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="or no driver: nvidia-smi cannot be run") as caught:
        present_gpus()
    assert "install NVIDIA's driver" in caught.value.help


@pytest.mark.parametrize(
    ("name", "kinds", "others", "own"),
    [
        ("Tesla T4", ("T4", "t4", "Tesla-T4"), ("T40", "4", "A100"), "T4"),
        ("NVIDIA A10", ("A10",), ("A100", "A1", "A10G"), "A10"),
        ("NVIDIA A10G", ("A10G",), ("A10",), "A10G"),
        ("NVIDIA A100-SXM4-40GB", ("A100", "A100-SXM4"), ("A10", "40"), "A100-SXM4-40GB"),
        ("NVIDIA GeForce RTX 3090", ("RTX3090", "RTX-3090", "3090"), ("RTX",)[:0], "GeForce-RTX-3090"),
    ],
)
def test_kinds_are_whole_words_of_names(name: str, kinds: tuple[str, ...], others: tuple[str, ...], own: str) -> None:
    gpu = Gpu(0, "GPU-0", name, 0, 0, "")
    assert [kind for kind in kinds if not gpu.is_of_kind(kind)] == []
    assert [kind for kind in others if gpu.is_of_kind(kind)] == []
    assert gpu.kind == own
    assert gpu.is_of_kind(own)


@given(st.from_regex(r"[A-Za-z0-9 ._()-]{1,30}", fullmatch=True))
def test_every_gpu_is_of_its_own_kind(name: str) -> None:
    gpu = Gpu(0, "GPU-0", name, 0, 0, "")
    assert re.fullmatch(r"[\w.-]+", gpu.kind)
    assert gpu.is_of_kind(gpu.kind) or gpu.kind == "GPU" or not re.search(r"[a-z0-9]", gpu.kind.lower())


def test_a_process_sees_its_gpu_and_no_other(nvidia: FakeNvidia, state: Path) -> None:
    nvidia.install_mps()
    assert environment_on(None) == {"CUDA_VISIBLE_DEVICES": ""}
    assert environment_on(CudaDevice("GPU-1", 0.5, MIB)) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    with MpsDaemon("GPU-1", state / "mps") as mps:
        pipes = {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": str(state / "mps")}
        assert environment_on(CudaDevice("GPU-1", 0.125, 3 * MIB + 1), mps) == {
            **pipes,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "12.5",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4M",
        }
        assert environment_on(CudaDevice("GPU-1", 0.0, MIB), mps) == pipes
        assert environment_on(CudaDevice("GPU-1"), mps) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}


def test_a_share_above_all_of_it_is_refused() -> None:
    with pytest.raises(MachineError, match="a share of 150 % of a GPU; shares are at most 100 %"):
        environment_on(CudaDevice("GPU-1", 1.5))


def test_mps_of_an_ordinary_user_begins_and_ends_with_its_owner(nvidia: FakeNvidia, state: Path) -> None:
    nvidia.install_mps()
    daemon = state / "mps" / "daemon"
    with MpsDaemon("GPU-1", state / "mps") as mps:
        assert daemon.read_text().strip() == "GPU-1", "it serves one GPU"
        assert mps.variables == {"CUDA_MPS_PIPE_DIRECTORY": str(daemon.parent)}
    assert not daemon.exists()
    assert mps.variables == {}


def test_a_daemon_that_answers_already_is_used_and_left(nvidia: FakeNvidia, state: Path) -> None:
    nvidia.install_mps()
    running = nvidia.folder / "shared" / "daemon"
    running.touch()
    with MpsDaemon("GPU-1", state / "mps") as mps:
        assert mps.variables == {}
        found = environment_on(CudaDevice("GPU-1", 0.5), mps)
        assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert running.exists()
    assert not (state / "mps").exists()


def test_mps_that_cannot_be_started_says_why(nvidia: FakeNvidia, state: Path) -> None:
    with (
        pytest.raises(MachineError, match=r"nvidia-cuda-mps-control cannot be run: .*No such file"),
        MpsDaemon("GPU-1", state / "mps"),
    ):
        pytest.fail("it is not there")
    nvidia.install_mps()
    nvidia.happens("refuses")
    with (
        pytest.raises(MachineError, match=r"-d failed \(exit status 1\): Cannot create the control pipe: Permission"),
        MpsDaemon("GPU-1", state / "mps"),
    ):
        pytest.fail("it refuses")
    with pytest.raises(MachineError, match="is too long for its sockets"), MpsDaemon("GPU-1", state / ("x" * 90)):
        pytest.fail("its path is too long")


def test_errors_of_cuda_are_told_apart() -> None:
    device = CudaDevice("GPU-1", 1.0, 512 * MIB)
    for said in (
        "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0 ; hostname=x",
        "BFCArena::AllocateRawInternal Available memory of 0 is smaller than requested bytes of 1024",
        "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 8388608000",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
    ):
        found = failure_on(device, said)
        assert found is not None
        assert not isinstance(found, GpuFailure)
        assert "too little memory left for it, of which it may have 512 MiB" in found.what
        assert "device_memory_bytes" in found.help
    for said in (
        "CUDA failure 999: unknown error ; GPU=0",
        "CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0",
        "CUDA error: unspecified launch failure",
    ):
        assert isinstance(failure_on(device, said), GpuFailure)
    assert failure_on(device, "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions") is None


def test_what_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = tmp_path / "hangs"
    script.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o700)
    with pytest.raises(TimeoutError, match=r"took more than 0\.5 s"):
        cuda.run_program([str(script)], 0.5)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_running(pid), "it has ended", within_s=10)  # a busy machine needs time to end what was killed
    assert os.getpid() != pid
