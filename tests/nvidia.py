"""Stand-ins for NVIDIA's programs and for an ONNX Runtime with CUDA, for tests on machines without a GPU."""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

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

    def happens(self, what: str) -> None:
        """`failed`: batches fail with an error of CUDA. `full`: no memory is left. `refuses`: MPS cannot start."""
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
