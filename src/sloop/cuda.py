"""NVIDIA GPUs of this machine: which there are, and how a process is given one of them, or a share of one.

`nvidia-smi` says which there are. A process gets a GPU by variables of its environment, which CUDA reads once, so they
are set before the process starts: `CUDA_VISIBLE_DEVICES` hides all other GPUs. NVIDIA's Multi-Process Service (MPS)
lets several processes run on a GPU at the same time, and limits each to a share of its SMs; without MPS they take
turns. Nothing here changes a setting of a card: no clock, power limit, compute mode or partition.

Sources: nvidia-smi(1) and nvidia-cuda-mps-control(1); NVIDIA's documentation of MPS, "Environment Variables" (GPUs are
named by UUID, because their indices may differ between client and daemon) and "Starting MPS control daemon" (an
ordinary user's daemon has folders of its own).
"""

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

from msgspec import Struct

from sloop.errors import InputError, MachineError
from sloop.machine import hardware_name

SMI: Final = "nvidia-smi"
MPS_CONTROL: Final = "nvidia-cuda-mps-control"
SMI_S_MAX: Final = 10.0
"""It usually takes 0.1 s, and some seconds if the driver has to be loaded. It can hang when a card has failed."""
MPS_S_MAX: Final = 5.0
KILLED_S_MAX: Final = 1.0
"""A program that waits for a failed card may be in a state in which it cannot be killed."""
FIELDS: Final = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PIPES_BYTES_MAX: Final = 88
"""The path of a Unix socket may have 107 bytes, with the names that the daemon gives its sockets."""
MIB: Final = 1 << 20
SAID_CHARS_MAX: Final = 200
WITHOUT_GPU: Final = (
    "install NVIDIA's driver, or leave the GPU out: without `devices` and `--device`, models run on cores"
)
OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|Failed to allocate memory|is smaller than requested bytes|STATUS_ALLOC_FAILED"
)
FAILED: Final = re.compile(r"\b(CUDA|CUBLAS|CUDNN|CUFFT|CURAND) failure -?\d+|\bCUDA error: ")
"""How ONNX Runtime and PyTorch report errors of CUDA. Nearly all of them are final: CUDA answers every later call of
the process with the same error."""


class GpuFailure(MachineError):
    """A process cannot use its GPU any longer."""


class CudaDevice(Struct, frozen=True, array_like=True):
    """The GPU of a process."""

    uuid: str
    share: float = 1.0
    """Fraction of its SMs, 0 to 1; with 0, its memory alone limits how many processes share it."""
    memory_bytes: int = 0
    """What the process may allocate there; 0: no limit."""


class Gpu(Struct, frozen=True):
    """A GPU as `nvidia-smi` lists it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    """0 if the driver does not say, as for GPUs that share the memory of the host."""
    used_bytes: int
    driver: str

    @property
    def kind(self) -> str:
        """What an application file may call its kind if there is no shorter name: its name without the maker."""
        words = (word for word in re.findall(r"[\w.]+", self.name) if word.lower() not in ("nvidia", "tesla"))
        return "-".join(words) or "GPU"

    def is_of_kind(self, kind: str) -> bool:
        """Whether it is an accelerator of this kind: a `T4` is a `Tesla T4`, an `A100` an `NVIDIA A100-SXM4-40GB`. An
        `A10` is neither an `NVIDIA A10G` nor an `NVIDIA A100-SXM4-40GB`."""
        words, wanted = _words(self.name), "".join(_words(kind))
        return any(
            "".join(words[start:end]) == wanted
            for start in range(len(words))
            for end in range(start + 1, len(words) + 1)
        )


class GpuPlace(NamedTuple):
    """Where a process that is measured runs: its GPU, what profiles call it, and the variables that it starts with."""

    gpu: Gpu
    kind: str
    device: CudaDevice
    variables: Mapping[str, str]

    @property
    def hardware(self) -> str:
        """The card, as profiles name it."""
        return f"{self.gpu.name}, driver {self.gpu.driver}; {hardware_name()}"

    @classmethod
    def on(cls, gpu: Gpu, kind: str, share: float = 1.0, mps: "MpsDaemon | None" = None) -> Self:
        """A share of a GPU, all of it by default. MachineError for a share above 100 %."""
        device = CudaDevice(gpu.uuid, share)
        return cls(gpu, kind, device, environment_on(device, mps))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


# nvidia-smi


def present_gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, in the order of `nvidia-smi`. MachineError if there is none, or it does not say."""
    said = _smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    found = tuple(gpu for line in said.splitlines() if (gpu := _gpu_of(line)) is not None)
    if not found:
        raise MachineError(f"this machine has no NVIDIA GPU: {SMI} says {_brief(said)!r}", help=WITHOUT_GPU)
    return found


def gpu_called(device: str) -> Gpu:
    """The GPU that a user calls `cuda`, which is the first one, or `cuda:1`. InputError for another name or number."""
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise InputError(f"{device!r} is not a device", where="--device", help="write cuda, or cuda:1 for GPU 1")
    found, number = present_gpus(), int(match[1] or 0)
    if number >= len(found):
        there = ", ".join(f"cuda:{place} is {gpu.name}" for place, gpu in enumerate(found))
        raise InputError(f"this machine has no GPU {number}", where="--device", help=there)
    return found[number]


def is_present(uuid: str) -> bool:
    """Whether the driver still answers for a GPU. False also if `nvidia-smi` fails or hangs: CUDA would do the same."""
    with contextlib.suppress(MachineError):
        return uuid in _smi(f"--id={uuid}", "--query-gpu=uuid", "--format=csv,noheader").split()
    return False


def used_bytes(uuid: str) -> int:
    """The memory of a GPU that is in use, by all processes. MachineError if `nvidia-smi` does not say."""
    return _bytes_of(_smi(f"--id={uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits").strip())


def _gpu_of(line: str) -> Gpu | None:
    """One line of the list; None for a message, such as `No devices were found`."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(FIELDS) or not fields[0].isdecimal():
        return None
    index, uuid, name, total, used, driver = fields
    return Gpu(int(index), uuid, name, _bytes_of(total), _bytes_of(used), driver)


def _bytes_of(mib: str) -> int:
    """Of a number of MiB; 0 for `[N/A]` and the like."""
    return int(mib) * MIB if mib.isdecimal() else 0


def _smi(*options: str) -> str:
    """What `nvidia-smi` prints. MachineError if it is not there, fails or hangs."""
    try:
        status, said = run_program([SMI, *options], SMI_S_MAX)
    except TimeoutError as error:
        what = f"{SMI} has not answered within {SMI_S_MAX:g} s; a GPU may have failed"
        raise MachineError(what, help="look for lines with Xid in the kernel's log, and restart the machine") from error
    except OSError as error:
        what = f"this machine has no NVIDIA GPU, or no driver: {SMI} cannot be run ({error.strerror})"
        raise MachineError(what, help=WITHOUT_GPU) from error
    if status:
        what = f"{SMI} failed (exit status {status}): {_brief(said)}"
        raise MachineError(what, help="repair NVIDIA's driver, or serve without the GPU")
    return said


def _brief(said: str) -> str:
    return " ".join(said.split())[:SAID_CHARS_MAX] or "nothing"


def run_program(
    command: Sequence[str], limit_s: float, *, given: str = "", environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and output of a program that reads `given`. OSError if it cannot be started, TimeoutError, which
    is one, if it takes longer than `limit_s`. Its output goes to a file: a daemon that it starts may keep it open."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(given.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S_MAX)
            raise TimeoutError(f"{command[0]} took more than {limit_s:g} s") from error
        stdout.seek(0)
        return status, stdout.read().decode(errors="replace")


# Shares of a GPU


class MpsDaemon:
    """MPS for one GPU: the daemon that answers already, or one that this object starts in a folder of its own and ends.

    It needs no rights: a daemon of an ordinary user serves this user's processes.
    """

    def __init__(self, uuid: str, folder: Path) -> None:
        self._uuid, self._folder = uuid, folder.absolute()
        self._is_own = False

    @property
    def variables(self) -> dict[str, str]:
        """By what processes find it; none for one that they find by themselves."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self._folder)} if self._is_own else {}

    def __enter__(self) -> Self:
        """Start it. MachineError, with the reason, if there is none and none can be started."""
        if not self._asked("get_server_list"):
            return self
        logs = self._folder / "log"
        if len(os.fsencode(self._folder)) > PIPES_BYTES_MAX:
            raise MachineError(
                f"the path {self._folder} is too long for its sockets", help="use a state folder nearer to /"
            )
        self._is_own = True
        try:
            logs.mkdir(parents=True, exist_ok=True)
            settings = {"CUDA_VISIBLE_DEVICES": self._uuid, "CUDA_MPS_LOG_DIRECTORY": str(logs)}
            environment = {**os.environ, **self.variables, **settings}
            status, said = run_program([MPS_CONTROL, "-d"], MPS_S_MAX, environment=environment)
            why = f"{MPS_CONTROL} -d failed (exit status {status}): {_brief(said)}" if status else ""
        except OSError as error:
            why = f"{MPS_CONTROL} cannot be run: {error}"
        if why := why or self._asked("get_server_list"):
            self._is_own = False
            raise MachineError(why, help="install NVIDIA's MPS, or let an administrator start its daemon")
        return self

    def __exit__(self, *_: object) -> None:
        """End it if this object has started it; it ends its servers, which have no clients any longer."""
        if self._is_own:
            self._asked("quit")
            self._is_own = False

    def _asked(self, command: str) -> str:
        """Why the daemon does not answer a command; empty if it does."""
        try:
            environment = {**os.environ, **self.variables}
            status, said = run_program([MPS_CONTROL], MPS_S_MAX, given=f"{command}\n", environment=environment)
        except OSError as error:
            return f"{MPS_CONTROL} cannot be run: {error}"
        return f"its daemon does not answer: {_brief(said)}" if status else ""


def environment_on(device: CudaDevice | None, mps: MpsDaemon | None = None) -> dict[str, str]:
    """The variables by which a process gets a GPU, or none. With MPS, a share between 0 and 1 is a limit: of the SMs,
    and of all memory that CUDA allocates for the process. MachineError for a share that is none."""
    if device is None:
        return {"CUDA_VISIBLE_DEVICES": ""}
    if not 0 <= device.share <= 1:
        raise MachineError(f"a share of {100 * device.share:g} % of a GPU; shares are at most 100 %")
    found = {"CUDA_VISIBLE_DEVICES": device.uuid}
    if mps is not None and device.share < 1:
        found |= mps.variables
        if device.share > 0:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * device.share:g}"
            if device.memory_bytes:  # of the only GPU that the process sees
                found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={-(-device.memory_bytes // MIB)}M"
    return found


# What went wrong


def failure_on(device: CudaDevice, said: str) -> MachineError | None:
    """What an error that a framework has raised says of the GPU; None if it is about something else. `GpuFailure` if
    the process cannot use the GPU any longer."""
    if OUT_OF_MEMORY.search(said):
        limit = f", of which it may have {device.memory_bytes / MIB:.0f} MiB" if device.memory_bytes else ""
        what = f"the GPU has too little memory left for it{limit}: {_brief(said)}"
        return MachineError(
            what, help="let fewer replicas share the GPU, or raise `device_memory_bytes` in its profile"
        )
    if FAILED.search(said):
        return GpuFailure(
            f"its GPU has failed ({device.uuid}): {_brief(said)}", help="nvidia-smi shows whether it is there"
        )
    return None
