"""Measures what the kernels of one forward pass take of a GPU: SMs and occupancy, weighted with time.

A process of its own loads the model (`python -m sloop.profile.kernels ORDER`), warms it up, times some passes, and then
runs one pass under a profiler. Which profiler, in this order:

- Nsight Compute (`ncu`) reads counters: the achieved occupancy and the throughput of the SMs of each kernel. Often an
  administrator has to allow that.
- PyTorch's profiler, if PyTorch with CUDA is installed. It records every kernel of its process with its launch
  configuration, also those that ONNX Runtime launches. Occupancy is then computed from the configuration.

ONNX Runtime's own profile has no kernels: its released packages are built without CUPTI, NVIDIA's library for tracing.
One built with `--enable_cuda_profiling` records grid and block, but neither registers nor shared memory, without which
nobody can say how many blocks an SM holds.

Sources: NVIDIA's documentation of Nsight Compute ("Nsight Compute CLI": options, `--csv`, metrics `launch__*`);
PyTorch's kineto, `output_json.cpp`, for the keys of its trace. What is averaged: Elvinger (`sloop.profile.gpu`).
"""

import contextlib
import csv
import ctypes
import importlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import inf, prod
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct, structs

from sloop.cuda import CudaDevice, GpuPlace, run_program
from sloop.errors import InputError, MachineError, SloopError
from sloop.profile.gpu import GpuLimits, KernelLaunch, KernelSpan, peak, time_weighted
from sloop.profile.interference import ShareLaw
from sloop.profile.measured_process import environment
from sloop.profile.model import feed_for, open_model
from sloop.profile.profile import DemandSource, DeviceSharing, KernelSource, Profile
from sloop.units import NS_PER_MS

NCU: Final = "ncu"
PASS_S_MAX: Final = 300.0
"""For the process of one batch size. Nsight Compute stops at each kernel, for some ten milliseconds."""
VERSION_S_MAX: Final = 30.0
WARM_PASSES, TIMED_PASSES = 3, 10
"""The first passes choose algorithms and allocate memory, with other kernels than later ones."""
DURATION: Final = "gpu__time_duration.sum"
OCCUPANCY: Final = "sm__warps_active.avg.pct_of_peak_sustained_active"
THROUGHPUT: Final = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
LAUNCH: Final = (
    "launch__grid_size",
    "launch__block_size",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_static",
    "launch__shared_mem_per_block_dynamic",
)
UNITS_NS: Final = {"n": 1.0, "u": 1e3, "m": 1e6, "s": 1e9}
"""By the first letter of Nsight Compute's units of time: `ns` or `nsecond`, `us` or `usecond`, …"""
REFUSED: Final = "ERR_NVGPUCTRPERM"

Wanted = Literal["auto", "ncu", "launches", "none"]
"""Which source may be used; `auto`: counters, else launches."""


class KernelRun(NamedTuple):
    """One execution of a kernel, as a profiler has recorded it."""

    start_ns: float
    end_ns: float
    launch: KernelLaunch
    occupancy: float | None = None
    """Achieved, in percent, if it was counted."""
    throughput: float | None = None
    """Of the SMs, in percent of the highest, if it was counted."""


class KernelUse(Struct, frozen=True):
    """What the kernels of a batch take of a GPU. All parts are between 0 and 1, and means over a whole forward pass,
    with its copies and gaps. Divided by `busy`, they are means over the time in which kernels run."""

    batch: int
    kernels: int
    pass_ms: float
    """One forward pass that is not recorded: the median of `TIMED_PASSES`, or what the caller knows if that is less."""
    busy: float
    """The part of the pass in which kernels run."""
    sm_use: float
    """The SMs that the launched blocks need (WSM)."""
    occupancy: float
    """The warps that are active on the SMs with blocks (WAO)."""
    peak_occupancy: float
    """The most at any time (AO)."""
    sm_throughput: float | None
    """How much of their highest throughput the SMs reach; None if it was not counted."""


class KernelMeasurement(Struct, frozen=True):
    """What was measured, and how."""

    source: KernelSource
    software: str
    """The profiler, with its version."""
    date: str
    batches: tuple[KernelUse, ...]


class PassOrder(Struct, frozen=True):
    """What the process is to do."""

    model: str
    batch: int
    shapes: dict[str, tuple[int, ...]]
    device: CudaDevice
    report: str
    """The file for its `PassReport`."""
    trace: str = ""
    """The file for the trace of PyTorch's profiler; without one, another profiler is told when to record."""


class PassReport(Struct, frozen=True):
    """What the process says of the GPU, and of a pass without a profiler."""

    capability: tuple[int, int]
    sms: int
    pass_ms: float
    software: str = ""
    """Its profiler, if it has one of its own."""


class Recorded(NamedTuple):
    """The kernels of a pass, with what its process has reported."""

    kernels: list[KernelRun]
    report: PassReport
    software: str


def measure_kernels(
    file: Path,
    on: GpuPlace,
    *,
    batches: Sequence[int],
    shapes: Mapping[str, tuple[int, ...]],
    known_ms: Mapping[int, float] = MappingProxyType({}),
    wanted: Wanted = "auto",
    progress: Callable[[int, str], None] = lambda done, now: None,
) -> tuple[KernelMeasurement | None, list[str]]:
    """What batches of these sizes take of a GPU, from the first source that answers, and why others did not; None if
    none did. `known_ms` is what batches take without a profiler near; one that only waits slows launches a little, too.
    `progress` is called with the number of finished batches, and the profiler."""
    why: list[str] = []
    for tool in TOOLS:
        if wanted not in ("auto", tool.source):
            continue
        uses: list[KernelUse] = []
        software = ""
        try:
            for batch in batches:
                progress(len(uses), tool.name)
                with tempfile.TemporaryDirectory(prefix="sloop-kernels-") as folder:
                    order = PassOrder(str(file), batch, dict(shapes), on.device, str(Path(folder) / "report.json"))
                    found = tool.record(order, Path(folder), on)
                limits = GpuLimits.of(found.report.capability, found.report.sms)
                pass_ms = min(found.report.pass_ms, known_ms.get(batch, inf))
                uses.append(kernel_use(batch, found.kernels, limits, pass_ms))
                software = found.software
        except SloopError as error:
            where = f", batch {batches[len(uses)]}" if uses else ""
            why.append(f"{tool.name}{where}: {error.what}")
        if uses:
            date = datetime.now(UTC).date().isoformat()
            return KernelMeasurement(tool.source, software, date, tuple(uses)), why
    return None, why


def kernel_use(batch: int, kernels: Sequence[KernelRun], gpu: GpuLimits, pass_ms: float) -> KernelUse:
    """The means of the kernels of one pass over its duration, or over that of its kernels if they took longer under
    the profiler. InputError for kernels that cannot have run on this GPU, or if there are none."""
    if not kernels:
        raise InputError("the forward pass has launched no kernel", help="check that the model computes on the GPU")

    def spans(value: Callable[[KernelRun], float]) -> Iterator[KernelSpan]:
        return (KernelSpan(each.start_ns, each.end_ns, value(each)) for each in kernels)

    def occupancy(of: KernelRun) -> float:
        return of.occupancy if of.occupancy is not None else of.launch.expected_occupancy(gpu)

    def mean(value: Callable[[KernelRun], float]) -> float:
        return min(1.0, time_weighted(spans(value), pass_ms * NS_PER_MS) / 100)

    counted = all(each.throughput is not None for each in kernels)
    return KernelUse(
        batch,
        len(kernels),
        pass_ms,
        busy=time_weighted(_while_any_runs(kernels), pass_ms * NS_PER_MS),
        sm_use=mean(lambda each: each.launch.sm_percent(gpu)),
        occupancy=mean(occupancy),
        peak_occupancy=min(1.0, peak(spans(occupancy)) / 100),
        sm_throughput=mean(lambda each: each.throughput or 0.0) if counted else None,
    )


def _while_any_runs(kernels: Iterable[KernelRun]) -> list[KernelSpan]:
    """The times in which at least one kernel runs, each with the value 1."""
    found: list[KernelSpan] = []
    for each in sorted(kernels, key=lambda each: each.start_ns):
        if found and each.start_ns <= found[-1].end:
            found[-1] = KernelSpan(found[-1].start, max(found[-1].end, each.end_ns), 1)
        else:
            found.append(KernelSpan(each.start_ns, each.end_ns, 1))
    return found


def with_kernels(profile: Profile, found: KernelMeasurement) -> Profile:
    """A profile with what its batches demand of the GPU. A profile that has no law of interference gets the one that
    goes by SM use."""
    law = "the law, slower in proportion to the SMs that all batches need, is assumed; --sharing measures one"
    base = profile.sharing or DeviceSharing(law=ShareLaw(), full_batch=profile.max_batch, source=law)
    source = DemandSource(found.source, found.software, profile.hardware, found.date)
    sharing = structs.replace(
        base,
        sm_use={each.batch: each.sm_use for each in found.batches},
        occupancy={each.batch: each.occupancy for each in found.batches},
        peak_occupancy={each.batch: each.peak_occupancy for each in found.batches},
        demands=source,
    )
    return structs.replace(profile, sharing=sharing)


# Profilers


def _recorded_by_ncu(order: PassOrder, folder: Path, on: GpuPlace) -> Recorded:
    """By Nsight Compute. It changes no clock, though its default would fix them; and it leaves caches as the kernel
    before has left them, as in service."""
    log = folder / "ncu.csv"
    options = ("--csv", "--print-units", "base", "--metrics", ",".join((DURATION, OCCUPANCY, THROUGHPUT, *LAUNCH)))
    control = ("--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none")
    said = _run([NCU, *options, *control, "--target-processes", "all", "--log-file", str(log)], order, on)
    written = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    check_ncu(f"{written}\n{said.text}")
    report = _report_of(order, said)
    return Recorded(read_ncu(written), report, f"Nsight Compute {_version(NCU)}")


def _recorded_by_torch(order: PassOrder, folder: Path, on: GpuPlace) -> Recorded:
    """By PyTorch's profiler, in the process of the model."""
    if importlib.util.find_spec("torch") is None:
        raise MachineError("it is not installed", help="pip install torch")
    trace = folder / "trace.json"
    said = _run([], structs.replace(order, trace=str(trace)), on)
    report = _report_of(order, said)
    return Recorded(read_kineto(trace.read_bytes() if trace.is_file() else b""), report, report.software)


class Tool(NamedTuple):
    """A profiler: which source of figures it is, and how it records a pass."""

    name: str
    source: KernelSource
    record: Callable[[PassOrder, Path, GpuPlace], Recorded]


TOOLS: Final = (
    Tool("Nsight Compute", "ncu", _recorded_by_ncu),
    Tool("PyTorch's profiler", "launches", _recorded_by_torch),
)
"""In the order in which they are tried."""


class Said(NamedTuple):
    """How a program has ended, and what it has printed."""

    status: int
    text: str


def _run(profiler: Sequence[str], order: PassOrder, on: GpuPlace) -> Said:
    """Run the process of a pass, under a profiler if one is named. MachineError if it cannot be started, or takes too
    long. Numbers are written as in C, without separators of a country."""
    command = [*profiler, sys.executable, "-m", "sloop.profile.kernels", msgspec.json.encode(order).decode()]
    try:
        return Said(*run_program(command, PASS_S_MAX, environment={**environment(on), "LC_ALL": "C"}))
    except TimeoutError as error:
        what = f"a pass with a batch of {order.batch} has taken more than {PASS_S_MAX:g} s"
        raise MachineError(what, help="measure smaller batches") from error
    except OSError as error:
        raise MachineError(f"{command[0]} cannot be run ({error.strerror})", help="add it to PATH") from error


def _report_of(order: PassOrder, said: Said) -> PassReport:
    """What the process has reported. MachineError with its last line if it has failed."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(Path(order.report).read_bytes(), type=PassReport)
    lines = [line for line in said.text.strip().splitlines() if not line.startswith("==")]
    last = f": {lines[-1][:300]}" if lines else ""
    raise MachineError(f"the process of the pass failed (exit status {said.status}){last}", help="run it without it")


def _version(program: str) -> str:
    """Of a program that prints it; empty if it does not."""
    with contextlib.suppress(OSError):
        match = re.search(r"\bversion\s+(\S+)", run_program([program, "--version"], VERSION_S_MAX)[1], re.IGNORECASE)
        return match[1] if match else ""
    return ""


# What profilers write


def check_ncu(said: str) -> None:
    """MachineError with the reason if Nsight Compute has measured nothing."""
    if REFUSED in said:
        raise MachineError(
            f"this user may not read the counters of the GPU ({REFUSED})",
            help=f"an administrator can allow it: https://developer.nvidia.com/{REFUSED}",
        )
    if error := re.search(r"^==ERROR== (.+)$", said, re.MULTILINE):
        raise MachineError(error[1][:300], help="see the documentation of Nsight Compute")


def read_ncu(text: str) -> list[KernelRun]:
    """The kernels in what `ncu --csv --print-units base` prints: one line for each metric of each kernel, among
    messages that begin with `==`. Kernels ran one after another, so their times are laid end to end.

    InputError for a text that is not of this form, or for a kernel without one of the metrics."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise InputError("Nsight Compute has written no table of kernels", help="look at what `ncu --csv` prints")
    rows = csv.DictReader(line for line in lines[start:] if line.startswith('"'))
    if rows.fieldnames is None or not {"Kernel Name", "Metric Name", "Metric Unit", "Metric Value"} <= {
        *rows.fieldnames
    }:
        raise InputError(
            f"the table of Nsight Compute has the columns {rows.fieldnames}", help="expected one per metric"
        )
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        _, metrics = kernels.setdefault(row["ID"], (row["Kernel Name"], {}))
        if row["Metric Name"] in (DURATION, OCCUPANCY, THROUGHPUT, *LAUNCH):
            value = _number(row["Metric Value"], f"{row['Metric Name']} of {row['Kernel Name']}")
            is_time = row["Metric Name"] == DURATION
            metrics[row["Metric Name"]] = value * _unit_ns(row["Metric Unit"]) if is_time else value
    found: list[KernelRun] = []
    now_ns = 0.0
    for name, metrics in kernels.values():
        if missing := [metric for metric in (DURATION, OCCUPANCY, THROUGHPUT, *LAUNCH) if metric not in metrics]:
            raise InputError(f"Nsight Compute gives no {missing[0]} of {name}", help="use a newer one")
        blocks, threads, registers, static, dynamic = (int(metrics[metric]) for metric in LAUNCH)
        launch = KernelLaunch(blocks, threads, registers, static + dynamic)
        end_ns = now_ns + metrics[DURATION]
        found.append(KernelRun(now_ns, end_ns, launch, min(100.0, metrics[OCCUPANCY]), min(100.0, metrics[THROUGHPUT])))
        now_ns = end_ns
    return found


def _number(text: str, what: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise InputError(f"Nsight Compute says {text!r} for {what}", help="the counters may be in use") from None


def _unit_ns(unit: str) -> float:
    if unit[:1] not in UNITS_NS:
        raise InputError(f"Nsight Compute gives durations in {unit!r}", help="expected ns, us, ms or s")
    return UNITS_NS[unit[:1]]


class _TraceEvent(Struct):
    """An event of a trace in Chrome's format."""

    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}  # msgspec copies the empty dict for each


class _Trace(Struct):
    traceEvents: list[_TraceEvent]  # the format's name


def read_kineto(raw: bytes) -> list[KernelRun]:
    """The kernels in a trace that PyTorch's profiler has exported; times there are in microseconds. Its own estimate of
    the occupancy is not used: it is 0 for kernels with more than 48 KiB of shared memory, and counts SMs without a
    block. InputError for a text that is no such trace, or for a kernel without its launch configuration."""
    try:
        events = msgspec.json.decode(raw, type=_Trace).traceEvents
    except msgspec.MsgspecError as error:
        raise InputError(f"not a trace of PyTorch's profiler: {error}", help="use a newer PyTorch") from error
    found: list[KernelRun] = []
    for each in events:
        if each.cat.lower() != "kernel":
            continue
        try:
            grid, block, registers, shared = (
                each.args[name] for name in ("grid", "block", "registers per thread", "shared memory")
            )
            launch = KernelLaunch(prod(map(int, grid)), prod(map(int, block)), int(registers), int(shared))
        except (KeyError, TypeError, ValueError) as error:
            what = f"the trace has no launch configuration of {each.name!r}"
            raise InputError(what, help="use PyTorch for NVIDIA GPUs") from error
        found.append(KernelRun(1e3 * each.ts, 1e3 * (each.ts + each.dur), launch))
    return found


# The process of a pass


class CudaDriver:
    """CUDA's driver library, for the only GPU that this process sees. Attributes by their numbers in `cuda.h`."""

    MULTIPROCESSOR_COUNT: Final = 16
    COMPUTE_CAPABILITY: Final = (75, 76)

    def __init__(self, library: str = "libcuda.so.1") -> None:
        """MachineError without a driver or a GPU."""
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise MachineError(f"CUDA's driver cannot be loaded: {error}", help="install NVIDIA's driver") from error
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device
        # The context that the frameworks use; a thread needs one before it can tell a profiler anything.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def limits(self) -> tuple[tuple[int, int], int]:
        """The compute capability of the GPU, and how many SMs it has."""
        major, minor = map(self._attribute, self.COMPUTE_CAPABILITY)
        return (major, minor), self._attribute(self.MULTIPROCESSOR_COUNT)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Tell a profiler that waits for it to record what runs meanwhile."""
        self._call("cuProfilerStart")
        yield
        self._call("cuCtxSynchronize")
        self._call("cuProfilerStop")

    def _attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise MachineError(f"{name} failed with CUDA error {status}", help="nvidia-smi shows whether the GPU works")


@contextlib.contextmanager
def _traced(path: Path) -> Iterator[str]:
    """Record with PyTorch's profiler what runs meanwhile, and write the trace; gives its name and version."""
    torch: Any = importlib.import_module("torch")  # an extra
    if not torch.cuda.is_available():
        raise MachineError(f"PyTorch {torch.__version__} cannot use the GPU", help="install PyTorch with CUDA")
    activities = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profiler:
        yield f"PyTorch {torch.__version__}"
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))


def run_pass(order: PassOrder, driver: CudaDriver | None = None) -> PassReport:
    """Load the model, time passes, run one that is recorded, and report."""
    path = Path(order.model)
    session = open_model(path, 1, device=order.device)
    inputs = feed_for(session, order.batch, order.shapes, where=str(path))
    for _ in range(WARM_PASSES):
        session.run(inputs)
    took_ns: list[int] = []
    for _ in range(TIMED_PASSES):
        start_ns = perf_counter_ns()
        session.run(inputs)
        took_ns.append(perf_counter_ns() - start_ns)
    used = driver or CudaDriver()
    software = ""
    if order.trace:
        with _traced(Path(order.trace)) as software:
            session.run(inputs)
    else:
        with used.recorded():
            session.run(inputs)
    capability, sms = used.limits()
    return PassReport(capability, sms, median(took_ns) / NS_PER_MS, software)


def main(arguments: Sequence[str]) -> None:
    """Entry point: run a pass as ordered, and write the report; what the model prints is in the way of nothing."""
    order = msgspec.json.decode(arguments[0], type=PassOrder)
    try:
        report = run_pass(order)
    except SloopError as error:
        sys.exit(error.what)  # the parent shows the last line
    Path(order.report).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(sys.argv[1:])
