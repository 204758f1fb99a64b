"""Stand-ins for NVIDIA's programs and for an ONNX Runtime with CUDA, for tests on machines without a GPU."""

import csv
import io
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from sloop.cuda import present_gpus
from sloop.errors import MachineError

T4 = "0, GPU-4d2ca1c0, Tesla T4, 15360, 3, 550.54.15"
A100 = "1, GPU-a100beef, NVIDIA A100-SXM4-40GB, 40960, [N/A], 550.54.15"

SMI = """#!/bin/sh
cd "{folder}" || exit 1
echo "$*" >> asked
case "$*" in
*--query-gpu=uuid*|*--query-gpu=memory.used*)
    uuid=${{1#--id=}}
    case "$*" in *query-gpu=uuid*) field=2 ;; *) field=5 ;; esac
    grep -q "$uuid" gpus || {{ echo "Unable to determine the device handle for gpu: GPU is lost."; exit 15; }}
    grep "$uuid" gpus | cut -d, -f$field | tr -d ' ' ;;
*) [ -s gpus ] && cat gpus || {{ echo "No devices were found"; exit 6; }} ;;
esac
"""
MPS = """#!/bin/sh
pipes=${{CUDA_MPS_PIPE_DIRECTORY:-{folder}/shared}}
if [ "$1" = -d ]; then
    [ -e "{folder}/refuses" ] && {{ echo "Cannot create the control pipe: Permission denied"; exit 1; }}
    echo "$CUDA_VISIBLE_DEVICES" > "$pipes/daemon"
    exit 0
fi
read command
[ -e "$pipes/daemon" ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
[ "$command" = quit ] && rm "$pipes/daemon"
exit 0
"""
RUNTIME = '''
"""ONNX Runtime, which claims to have CUDA and computes on the CPU. It writes down how sessions are opened."""
import json, os, sys

here = os.path.dirname(os.path.dirname(__file__))
sys.path.remove(here)
del sys.modules["onnxruntime"]
import onnxruntime as real
sys.path.insert(0, here)
folder = os.environ["FAKE_CUDA"]
CPU = real.InferenceSession


class Session(CPU):
    def __init__(self, path, options, *, providers, **others):
        self.on_cuda = providers[0] != "CPUExecutionProvider"
        if self.on_cuda:
            seen = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
            with open(os.path.join(folder, "sessions"), "a") as file:
                file.write(json.dumps([providers, others, seen]) + "\\n")
            if os.path.exists(os.path.join(folder, "full")):
                raise RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; hostname=x")
        super().__init__(path, options, providers=["CPUExecutionProvider"])

    def get_providers(self):
        return ["CUDAExecutionProvider", "CPUExecutionProvider"] if self.on_cuda else super().get_providers()

    def run(self, *arguments):
        if self.on_cuda and os.path.exists(os.path.join(folder, "failed")):
            raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 999: unknown error ; GPU=0")
        return super().run(*arguments)


real.InferenceSession = Session
real.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
sys.modules["onnxruntime"] = real
'''


PROFILER = '''#!{python}
"""A profiler, which runs nothing. It writes what a real one would have, and the report of the process under it."""
import json, pathlib, shutil, sys

folder = pathlib.Path("{folder}")
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute\\nVersion 2024.1.0.0 (build 33681293) (public-release)")
    sys.exit()
with open(folder / "asked", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
order = json.loads(sys.argv[-1])
target = sys.argv[sys.argv.index("--log-file") + 1]
if (folder / "refuses-counters").exists():
    pathlib.Path(target).write_text("""==PROF== Connected to process 4242 (/usr/bin/python3.11)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see \
https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 4242
""")
    sys.exit(1)
if order["batch"] > int((folder / "batch-max").read_text() if (folder / "batch-max").exists() else 99):
    print("CUDA failure 2: out of memory")
    sys.exit(1)
shutil.copy(folder / pathlib.Path(target).name, target)
pathlib.Path(order["report"]).write_text(json.dumps({{"capability": [7, 5], "sms": 40, "pass_ms": 1.0}}))
'''
NCU_COLUMNS = (
    "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC,Section Name,"
    "Metric Name,Metric Unit,Metric Value"
)


class CountedKernel(NamedTuple):
    """A kernel as Nsight Compute has counted it."""

    name: str
    duration: str
    occupancy: str
    throughput: str
    blocks: int
    threads: int
    registers: int
    static_bytes: int = 0
    dynamic_bytes: int = 0


def ncu_csv(kernels: Sequence[CountedKernel], unit: str = "nsecond") -> str:
    """What `ncu --csv --print-units base --metrics …` prints: all fields quoted, one line for each metric, thousands
    with a comma, and messages of its own around the table.

    The form is that of NVIDIA's documentation ("Nsight Compute CLI", "Command Line Options", `--csv` and
    `--print-units`) and of output that users have published for versions 2019.4 to 2025.1.
    """
    made = io.StringIO()
    made.write("==PROF== Connected to process 4242 (/usr/bin/python3.11)\n")
    for at, each in enumerate(kernels):
        made.write(f'==PROF== Profiling "{each.name}" - {at}: 0%....50%....100% - 2 passes\n')
    table = csv.writer(made, quoting=csv.QUOTE_ALL, lineterminator="\n")
    table.writerow(NCU_COLUMNS.split(","))
    for at, each in enumerate(kernels):
        metrics = (
            ("gpu__time_duration.sum", unit, each.duration),
            ("launch__block_size", "", f"{each.threads:,}"),
            ("launch__grid_size", "", f"{each.blocks:,}"),
            ("launch__registers_per_thread", "register/thread", each.registers),
            ("launch__shared_mem_per_block_dynamic", "byte/block", f"{each.dynamic_bytes:,}"),
            ("launch__shared_mem_per_block_static", "byte/block", f"{each.static_bytes:,}"),
            ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", each.throughput),
            ("sm__warps_active.avg.pct_of_peak_sustained_active", "%", each.occupancy),
        )
        place = (f"({each.threads}, 1, 1)", f"({each.blocks}, 1, 1)", "0", "7.5", "Command line profiler metrics")
        for metric in metrics:
            table.writerow((at, 4242, "python3.11", "127.0.0.1", each.name, 1, 7, *place, *metric))
    made.write("==PROF== Disconnected from process 4242\n")
    return made.getvalue()


class FakeNvidia:
    """A machine with NVIDIA's programs. The files of `folder` are their state."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self._programs = folder / "bin"
        self._programs.mkdir(parents=True)
        (folder / "shared").mkdir()
        monkeypatch.setenv("PATH", str(self._programs), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        self.install("nvidia-smi", SMI.format(folder=folder))

    def install(self, name: str, script: str) -> None:
        """Put a program into PATH."""
        program = self._programs / name
        program.write_text(script)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def has(self, *gpus: str) -> None:
        """These GPUs are there from now on."""
        (self.folder / "gpus").write_text("".join(f"{gpu}\n" for gpu in gpus))

    def install_mps(self) -> None:
        """MPS can be started; its daemon does not run."""
        self.install("nvidia-cuda-mps-control", MPS.format(folder=self.folder))

    def install_runtime(self) -> None:
        """Processes that start from now on have an ONNX Runtime with CUDA."""
        package = self.folder / "python" / "onnxruntime"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(RUNTIME)
        self._monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=os.pathsep)
        self._monkeypatch.setenv("FAKE_CUDA", str(self.folder))

    def install_ncu(self, kernels: Sequence[CountedKernel]) -> None:
        """Nsight Compute is there; every pass launches these kernels, on a T4."""
        (self.folder / "ncu.csv").write_text(ncu_csv(kernels))
        self.install("ncu", PROFILER.format(python=sys.executable, folder=self.folder))

    def happens(self, what: str) -> None:
        """`failed`: batches fail with an error of CUDA. `full`: no memory is left. `refuses`: MPS cannot start.
        `refuses-counters`: Nsight Compute may not read them."""
        (self.folder / what).touch()

    def lines(self, name: str) -> Sequence[str]:
        """What a stand-in has written down."""
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else ()


def why_no_gpu() -> str:
    """Why tests that need a GPU cannot run here; empty if they can."""
    try:
        present_gpus()
        import onnxruntime  # type: ignore[import-untyped]  # noqa: PLC0415
    except MachineError as error:
        return error.what
    except ImportError as error:
        return str(error)
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return f"ONNX Runtime {onnxruntime.__version__} of {sys.prefix} has no CUDA"
    return ""
