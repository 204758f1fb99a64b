"""What batches take of a GPU: what profilers write, its means over a pass, and the process under the profiler. Programs
of NVIDIA are stand-ins."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop import cuda
from sloop.cuda import CudaDevice, Gpu, GpuPlace
from sloop.errors import InputError, MachineError
from sloop.profile import kernels
from sloop.profile.estimate import Estimate
from sloop.profile.gpu import GpuLimits, KernelLaunch
from sloop.profile.interference import CountLaw, ShareLaw
from sloop.profile.kernels import (
    CudaDriver,
    KernelMeasurement,
    KernelRun,
    KernelUse,
    PassOrder,
    PassReport,
    check_ncu,
    kernel_use,
    measure_kernels,
    read_kineto,
    read_ncu,
    run_pass,
    with_kernels,
)
from sloop.profile.profile import DemandSource, DeviceSharing, Profile, Quadratic, load_profile, save_profile
from sloop.tensor import Port, Signature
from tests.nvidia import CountedKernel, FakeNvidia, ncu_csv

T4 = GpuLimits.of((7, 5), 40)
CARD = GpuPlace.on(Gpu(0, "GPU-4d2ca1c0", "Tesla T4", 15 << 30, 0, "550.54.15"), "T4")
CONVOLUTION = CountedKernel("implicit_convolve_sgemm", "400,000", "43.75", "60.10", 20, 256, 64, 8192)
ADDITION = CountedKernel('void add<float, "x">(float*, int)', "100,000", "87.50", "20.00", 4_000, 256, 16)
PASS = (CONVOLUTION, ADDITION)


# What profilers write


def test_what_nsight_compute_prints() -> None:
    first, second = read_ncu(ncu_csv([CONVOLUTION, ADDITION._replace(name="add, of floats")]))
    assert first == KernelRun(0, 400_000, KernelLaunch(20, 256, 64, 8192), 43.75, 60.1)
    assert second == KernelRun(400_000, 500_000, KernelLaunch(4000, 256, 16), 87.5, 20)


@pytest.mark.parametrize(
    ("unit", "ns"), [("ns", 2.5), ("usecond", 2500), ("us", 2500), ("ms", 2.5e6), ("second", 2.5e9)]
)
def test_units_of_older_and_newer_versions(unit: str, ns: float) -> None:
    [one] = read_ncu(ncu_csv([CONVOLUTION._replace(duration="2.5")], unit))
    assert one.end_ns - one.start_ns == pytest.approx(ns)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**7), st.integers(0, 100), st.integers(1, 10**6), st.integers(1, 1024)), max_size=20
    )
)
def test_every_kernel_is_read_back(drawn: list[tuple[int, int, int, int]]) -> None:
    made = [
        CountedKernel("k", f"{ns:,}", f"{part:.2f}", "1.00", blocks, threads, 32) for ns, part, blocks, threads in drawn
    ]
    found = read_ncu(ncu_csv(made))
    assert [
        (each.end_ns - each.start_ns, each.occupancy, each.launch.blocks, each.launch.threads) for each in found
    ] == drawn


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("==WARNING== No kernels were profiled.\n", "has written no table of kernels"),
        ('"ID","Kernel Name","gpu__time_duration.sum"\n"0","k","1"\n', "has the columns"),
        (ncu_csv([CONVOLUTION._replace(occupancy="n/a")]), "says 'n/a' for sm__warps_active"),
        (ncu_csv([CONVOLUTION], unit="cycle"), "durations in 'cycle'"),
        (
            ncu_csv([CONVOLUTION]).replace("launch__grid_size", "launch__waves"),
            "gives no launch__grid_size of implicit",
        ),
    ],
)
def test_other_texts_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_ncu(text)


def test_errors_of_nsight_compute_are_its_reasons() -> None:
    with pytest.raises(MachineError, match="may not read the counters of the GPU") as caught:
        check_ncu("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance")
    assert "an administrator can allow it" in caught.value.help
    with pytest.raises(MachineError, match="Unknown metric"):
        check_ncu("==PROF== Connected\n==ERROR== Unknown metric gpu__time\n")
    check_ncu(ncu_csv(PASS))


KINETO = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "Tesla T4", "computeMajor": 7, "computeMinor": 5, "numSms": 40}],
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::add",
            "pid": 1,
            "tid": 1,
            "ts": 90.0,
            "dur": 5.5,
            "args": {"id": 1},
        },
        {
            **{
                "ph": "X",
                "cat": "kernel",
                "name": "implicit_convolve_sgemm",
                "pid": 0,
                "tid": 7,
                "ts": 100.5,
                "dur": 40.25,
            },
            "args": {
                **{"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": 11, "External id": 3},
                **{"registers per thread": 64, "shared memory": 8192, "blocks per SM": 0.5, "warps per SM": 4.0},
                **{"grid": [5, 2, 2], "block": [16, 16, 1], "est. achieved occupancy %": 6},
            },
        },
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoH",
            "pid": 0,
            "tid": 7,
            "ts": 150,
            "dur": 3,
            "args": {"bytes": 9},
        },
    ],
}
"""The keys that kineto writes (pytorch/kineto, `output_json.cpp`), as PyTorch exports them."""


def test_a_trace_of_pytorch() -> None:
    [one] = read_kineto(msgspec.json.encode(KINETO))
    assert one == KernelRun(100_500, 140_750, KernelLaunch(20, 256, 64, 8192))
    older = msgspec.json.encode(KINETO).replace(b'"kernel"', b'"Kernel"')
    assert len(read_kineto(older)) == 1
    with pytest.raises(InputError, match="has no launch configuration of 'implicit_convolve_sgemm'"):
        read_kineto(msgspec.json.encode(KINETO).replace(b'"grid"', b'"size"'))
    with pytest.raises(InputError, match="not a trace of PyTorch"):
        read_kineto(b"")


# Means


def test_means_over_a_pass() -> None:
    """400 µs on 20 blocks, of which an SM holds 4: 5 of 40 SMs. 100 µs on all. 500 µs of the pass launch nothing."""
    found = kernel_use(8, read_ncu(ncu_csv(PASS)), T4, pass_ms=1.0)
    assert (found.batch, found.kernels, found.pass_ms, found.busy) == (8, 2, 1.0, 0.5)
    assert found.sm_use == pytest.approx(0.4 * 5 / 40 + 0.1)
    assert found.occupancy == pytest.approx(0.4 * 0.4375 + 0.1 * 0.875)
    assert found.peak_occupancy == 0.875
    assert found.sm_throughput == pytest.approx(0.4 * 0.601 + 0.1 * 0.2)
    slower = kernel_use(8, read_ncu(ncu_csv(PASS)), T4, pass_ms=0.2)
    assert slower.busy == 1, "the kernels took longer under the profiler than the pass without it"
    assert slower.sm_use == pytest.approx(2 * found.sm_use)


def test_without_counters_occupancy_is_that_of_the_launch() -> None:
    """A block of 256 threads has 8 of 32 warps; 20 blocks are one for each of 20 SMs, 4000 fill all SMs."""
    runs = [run._replace(occupancy=None, throughput=None) for run in read_ncu(ncu_csv(PASS))]
    found = kernel_use(8, runs, T4, pass_ms=1.0)
    assert found.occupancy == pytest.approx(0.4 * 0.25 + 0.1 * 1.0)
    assert found.peak_occupancy == 1
    assert found.sm_throughput is None
    with pytest.raises(InputError, match="has launched no kernel"):
        kernel_use(8, [], T4, pass_ms=1.0)


runs = st.builds(
    lambda start, length, blocks, part: KernelRun(start, start + length, KernelLaunch(blocks, 256, 32), part, part),
    *(st.integers(0, 900), st.integers(1, 300), st.integers(1, 2000), st.integers(0, 100)),
)


@given(st.lists(runs, min_size=1, max_size=8), st.integers(0, 2000))
def test_means_against_every_nanosecond(found: list[KernelRun], pass_ns: int) -> None:
    use = kernel_use(4, found, T4, pass_ns / 1e6)
    first, last = int(min(each.start_ns for each in found)), int(max(each.end_ns for each in found))
    running = [[each for each in found if each.start_ns <= ns < each.end_ns] for ns in range(first, last)]
    total = max(pass_ns, last - first)
    assert use.busy == pytest.approx(sum(map(bool, running)) / total)
    assert use.sm_use == pytest.approx(
        min(1, sum(e.launch.sm_percent(T4) for now in running for e in now) / 100 / total)
    )
    assert use.occupancy == pytest.approx(min(1, sum(e.occupancy or 0 for now in running for e in now) / 100 / total))
    assert 0 <= use.sm_use <= 1
    assert 0 <= use.occupancy <= max(use.occupancy, use.peak_occupancy) <= 1


# Profiles


BASE = Profile(latency_ms=Quadratic(0, 1, 1), max_batch=8, max_cores=1, accelerator="T4", hardware="Tesla T4")
USES = tuple(KernelUse(batch, 30, 1.0, 0.5, 0.1 * batch, 0.02 * batch, 0.9, None) for batch in (1, 4))
MEASURED = KernelMeasurement("launches", "PyTorch 2.11", "2026-11-23", USES)


def test_a_profile_has_what_was_measured_and_policies_read_it(tmp_path: Path) -> None:
    save_profile(with_kernels(BASE, MEASURED), tmp_path / "profile.json")
    sharing = load_profile(tmp_path / "profile.json").sharing
    assert sharing is not None
    assert sharing.demands == DemandSource("launches", "PyTorch 2.11", "Tesla T4", "2026-11-23")
    assert (sharing.law, sharing.full_batch, sharing.origin) == (ShareLaw(), 8, "assumed")
    belief = Estimate(structs.replace(BASE, sharing=sharing))
    demand = belief.demand(4, belief.slot(1))
    assert (demand.sm_use, demand.occupancy, demand.peak_occupancy) == (0.4, 0.08, 0.9)
    assert belief.demand(2, belief.slot(1)).sm_use == pytest.approx(0.1 + 0.3 / 3), "linear between batches"
    assert belief.interference.slowdown(demand, [demand] * 3) == pytest.approx(4 * 0.4)


def test_a_law_and_demands_are_measured_apart() -> None:
    """Neither measurement forgets what the other has found."""
    law = DeviceSharing(law=CountLaw((1.0, 1.5)), full_batch=8, origin="fitted", source="--sharing")
    both = with_kernels(structs.replace(BASE, sharing=law), MEASURED).sharing
    assert both is not None
    assert (both.law, both.origin, both.source, both.sm_use) == (law.law, "fitted", "--sharing", {1: 0.1, 4: 0.4})
    assert law.with_demands_of(both) == both
    assert law.with_demands_of(None) == law


# Profilers


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvidia:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no PyTorch
    return FakeNvidia(tmp_path / "nvidia", monkeypatch)


def measured(*batches: int, **options: Any) -> tuple[KernelMeasurement | None, list[str]]:
    return measure_kernels(Path("net.onnx"), CARD, batches=batches, shapes={"x": (3,)}, **options)


def test_counters_are_the_first_choice(nvidia: FakeNvidia) -> None:
    nvidia.install_ncu(PASS)
    found, why = measured(1, 8, known_ms={8: 0.8})
    assert found is not None
    assert (found.source, found.software, why) == ("ncu", "Nsight Compute 2024.1.0.0", [])
    assert [(each.batch, each.pass_ms) for each in found.batches] == [(1, 1.0), (8, 0.8)], (
        "the lesser time is without it"
    )
    first = nvidia.lines("asked")[0]
    assert "--clock-control none" in first, "clocks are settings of the card, which sloop never changes"
    assert "--profile-from-start off" in first
    order = msgspec.json.decode(first[first.index("{") :], type=PassOrder)
    assert (order.model, order.batch, order.shapes, order.device.uuid) == ("net.onnx", 1, {"x": (3,)}, "GPU-4d2ca1c0")


@pytest.fixture
def pytorch(nvidia: FakeNvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch is installed, too, and its profiler records one kernel."""

    def run_program(command: list[str], limit_s: float, *, environment: dict[str, str]) -> tuple[int, str]:
        if command[0] != sys.executable:
            return cuda.run_program(command, limit_s, environment=environment)
        assert command[:3] == [sys.executable, "-m", "sloop.profile.kernels"], "no profiler starts the process"
        assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-4d2ca1c0"
        order = msgspec.json.decode(command[3], type=PassOrder)
        Path(order.trace).write_bytes(msgspec.json.encode(KINETO))
        Path(order.report).write_bytes(msgspec.json.encode(PassReport((7, 5), 40, 0.0805, "PyTorch 2.11.0")))
        return 0, ""

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "run_program", run_program)


@pytest.mark.usefixtures("pytorch")
def test_without_permission_launches_are_used_and_it_says_why(nvidia: FakeNvidia) -> None:
    nvidia.install_ncu(PASS)
    nvidia.happens("refuses-counters")
    found, why = measured(8)
    assert found is not None
    assert (found.source, found.software) == ("launches", "PyTorch 2.11.0")
    assert why == ["Nsight Compute: this user may not read the counters of the GPU (ERR_NVGPUCTRPERM)"]
    assert found.batches[0].sm_use == pytest.approx(0.5 * 5 / 40), "half of the pass, on 5 of 40 SMs"
    assert found.batches[0].sm_throughput is None
    only, why = measured(8, wanted="ncu")
    assert only is None
    assert len(why) == 1


def test_a_batch_that_fails_ends_the_measurement_and_keeps_smaller_ones(nvidia: FakeNvidia) -> None:
    nvidia.install_ncu(PASS)
    (nvidia.folder / "batch-max").write_text("8")
    found, why = measured(1, 8, 64)
    assert found is not None
    assert [each.batch for each in found.batches] == [1, 8]
    reason = "the process of the pass failed (exit status 1): CUDA failure 2: out of memory"
    assert why == [f"Nsight Compute, batch 64: {reason}"]


def test_without_any_profiler_it_says_so(nvidia: FakeNvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(nvidia.folder / "bin"))
    found, why = measured(1)
    assert found is None
    assert why == [
        "Nsight Compute: ncu cannot be run (No such file or directory)",
        "PyTorch's profiler: it is not installed",
    ]


def test_a_profiler_that_hangs_is_given_up(nvidia: FakeNvidia, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia.install("ncu", "#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(kernels, "PASS_S_MAX", 0.2)
    _, why = measured(4, wanted="ncu")
    assert why == ["Nsight Compute: a pass with a batch of 4 has taken more than 0.2 s"]


# The process under the profiler


class Net:
    """A session that writes down when it runs."""

    joins_rows, software, dimension_names = None, "", {}  # type: ignore[var-annotated]
    signature = Signature((Port("x", "FP32", (-1, 3)),), (Port("y", "FP32", (-1, 3)),))

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def example(self, rows: int) -> None:
        return None

    def run(self, feed: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        self._events.append(f"run {len(feed['x'])}")
        return [feed["x"]]


class Library:
    """CUDA's driver library, of a T4. It writes down which functions are called."""

    def __init__(self, events: list[str], status: int = 0) -> None:
        self.events, self.status = events, status

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.events.append(name)
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {16: 40, 75: 7, 76: 5}[arguments[1]]
            return self.status

        return call


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(kernels, "open_model", lambda *_, **__: Net(found))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(found))
    return found


ORDER = PassOrder("net.onnx", 4, {}, CudaDevice("GPU-4d2ca1c0"), "report.json")


def test_one_pass_is_recorded_after_it_has_warmed_up(events: list[str]) -> None:
    report = run_pass(ORDER)
    assert (report.capability, report.sms, report.software) == ((7, 5), 40, "")
    assert report.pass_ms > 0
    start, stop = events.index("cuProfilerStart"), events.index("cuProfilerStop")
    assert events[start + 1 : stop] == ["run 4", "cuCtxSynchronize"]
    assert events[:start].count("run 4") == kernels.WARM_PASSES + kernels.TIMED_PASSES


def test_pytorch_records_in_the_process(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def profile(activities: list[str]) -> Iterator[SimpleNamespace]:
        events.append(f"profile {activities}")
        yield SimpleNamespace(export_chrome_trace=lambda path: events.append(f"export {path}"))
        events.append("end")

    torch: Any = ModuleType("torch")
    torch.__version__ = "2.11.0"
    torch.cuda = SimpleNamespace(is_available=lambda: True, synchronize=lambda: events.append("synchronize"))
    torch.profiler = SimpleNamespace(profile=profile, ProfilerActivity=SimpleNamespace(CPU="CPU", CUDA="CUDA"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    report = run_pass(structs.replace(ORDER, trace="trace.json"))
    assert report.software == "PyTorch 2.11.0"
    at = events.index("profile ['CPU', 'CUDA']")
    assert events[at + 1 : at + 5] == ["run 4", "synchronize", "end", "export trace.json"]
    torch.cuda.is_available = lambda: False
    with pytest.raises(MachineError, match="cannot use the GPU"):
        run_pass(structs.replace(ORDER, trace="trace.json"))


def test_the_process_reports_or_says_why_not(
    events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = structs.replace(ORDER, report=str(tmp_path / "report.json"))
    kernels.main([msgspec.json.encode(order).decode()])
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=PassReport).sms == 40
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(events, status=100))
    with pytest.raises(SystemExit, match="cuInit failed with CUDA error 100"):
        kernels.main([msgspec.json.encode(order).decode()])


def test_a_machine_without_a_driver_says_so() -> None:
    with pytest.raises(MachineError, match="CUDA's driver cannot be loaded"):
        CudaDriver("libno-such-driver.so")
