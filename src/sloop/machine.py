"""The machine this process runs on: its processor, and the CPUs that the process may use.

Where the operating system does not tell, the answers are all CPUs and the name of the architecture. Reads only.
"""

import contextlib
import os
import platform
from functools import cache
from pathlib import Path


def usable_cpus() -> tuple[int, ...]:
    """Numbers of the CPUs that this process may run on; all of them where the system has no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@cache
def processor() -> str:
    """The processor's model name, or the architecture where the system does not know it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware_name() -> str:
    """The name that profiles give to where they were measured: the processor, and the cores this process may use."""
    return f"{processor()}, {len(usable_cpus())} cores"
