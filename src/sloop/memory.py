"""The memory of a process: how much it takes, what C's allocator keeps of it, and what it may take at most.

Where the system does not say or has no such setting, sizes are 0 and settings have no effect.
"""

import contextlib
import ctypes
import os
import re
import resource
from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Final

from sloop.machine import Capacity, capacity

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 2**20
KEPT_BYTES: Final = 32 * 2**20
"""The largest buffers that glibc learns to put among small objects, by itself."""
AVAILABLE_SHARE: Final = 0.9
"""How much of the available memory `bounded` allows at most."""
OUT_OF_MEMORY: Final = re.compile(
    r"bad.?alloc|MemoryError|(?:allocate|out of|not enough) memory|memory allocation", re.IGNORECASE
)
TEXT_CHARS_MAX: Final = 2000


def resident_bytes() -> int:
    """Resident memory of this process in bytes; its peak where /proc is hidden."""
    resident, _ = _sizes("self")
    return resident or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_bytes() -> int:
    """The most resident memory that this process has had; the present one where the system does not say."""
    return max(_status("VmHWM"), resident_bytes())


def own_bytes(pid: int) -> int:
    """The memory of a process that it shares with no file and no other process; 0 if it has ended, or if the system
    does not say."""
    resident, shared = _sizes(str(pid))
    return resident - shared


def _sizes(process: str) -> tuple[int, int]:
    """Resident memory, and how much of it is shared."""
    try:
        _, resident, shared, *_ = map(int, Path(f"/proc/{process}/statm").read_text(encoding="ascii").split())
    except (OSError, ValueError):  # no /proc, or the process has ended
        return 0, 0
    unit = os.sysconf("SC_PAGE_SIZE")
    return resident * unit, shared * unit


def return_large_memory() -> None:
    """Let large buffers go back to the system when they are freed, in this process and with glibc.

    glibc otherwise takes the first large buffer that is freed as a sign that more will follow, and puts those of up to
    32 MiB among small objects, where what they leave is lost: 64 MiB after some hundred large messages.
    """
    _set_thresholds(LARGE_BYTES, 8 * LARGE_BYTES)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While a model is loaded, large buffers go back to the system when they are freed: reading a file of weights takes
    as much memory as the weights, and much of that would stay with glibc (docs/profiles.md). Afterwards they stay,
    because a model that needs them for each request would pay for new pages each time."""
    return_large_memory()
    try:
        yield
    finally:
        _set_thresholds(KEPT_BYTES, 2 * KEPT_BYTES)


def give_back() -> None:
    """Return what this process has freed to the system, with glibc."""
    trim = getattr(_library(), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    mallopt = getattr(_library(), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        mallopt(M_TRIM_THRESHOLD, trim_bytes)


@cache
def _library() -> Any:  # noqa: ANN401
    return ctypes.CDLL(None)


# A bound


def bound_growth(more_bytes: int) -> bool:
    """Let this process allocate so much more than now, and no more: further allocations fail, as if the machine had no
    memory. Memory that it shares does not count. Returns whether the system can do that (Linux)."""
    data_bytes = _status("VmData")  # what counts: private memory that can be written, touched or not
    if not data_bytes:
        return False
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = data_bytes + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    return True


def available_bytes(machine: Capacity, meminfo: Path = Path("/proc/meminfo")) -> float:
    """What the machine has left for more processes, and its control group, with the pages of files that the kernel can
    drop; infinite if the system does not say."""
    found = inf if machine.memory_bytes is None else float(machine.memory_bytes)
    with contextlib.suppress(OSError, StopIteration):
        found = min(found, 1024 * _field(meminfo, "MemAvailable:"))
    if machine.memory_file and machine.memory_bytes is not None:
        folder = Path(machine.memory_file).parent
        used, cached = (
            ("memory.current", "inactive_file")
            if (folder / "memory.current").exists()
            else ("memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, StopIteration, ValueError):
            used_bytes = int((folder / used).read_text(encoding="ascii"))
            found = min(found, machine.memory_bytes - used_bytes + _field(folder / "memory.stat", cached))
    return max(0.0, found)


def _field(file: Path, name: str) -> int:
    """The number after a name in a file of lines. OSError without the file, StopIteration without the name."""
    lines = map(str.split, file.read_text(encoding="ascii", errors="replace").splitlines())
    return next(int(words[1]) for words in lines if words and words[0] == name)


@contextlib.contextmanager
def bounded(more_bytes: float = inf) -> Iterator[int]:
    """Let this process allocate so much more while the context is open, and at most `AVAILABLE_SHARE` of what is
    available: when a control group has no memory left, the kernel may kill a worker instead of this process. Yields how
    much that is; 0 if the system cannot bound it."""
    more_bytes = min(more_bytes, AVAILABLE_SHARE * available_bytes(capacity()))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    is_bound = more_bytes < inf and bound_growth(int(more_bytes))
    try:
        yield int(more_bytes) if is_bound else 0
    finally:
        if is_bound:
            resource.setrlimit(resource.RLIMIT_DATA, before)


def is_out_of_memory(error: BaseException | str) -> bool:
    """Whether something fails for lack of memory, by its type or by what frameworks say."""
    return isinstance(error, MemoryError) or bool(OUT_OF_MEMORY.search(str(error)[:TEXT_CHARS_MAX]))


def lift_bound() -> None:
    """Let this process allocate as much as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _status(field: str) -> int:
    """Bytes of a field of this process's status; 0 if the system does not say."""
    try:
        return 1024 * _field(Path("/proc/self/status"), f"{field}:")
    except (OSError, StopIteration):
        return 0
