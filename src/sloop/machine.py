"""The machine this process runs on: its processor, and the CPUs that the process may use.

Where the operating system does not say, the answers are all CPUs and the name of the architecture. Changes nothing.
"""

import contextlib
import os
import platform
from functools import cache
from pathlib import Path


def usable_cpus() -> tuple[int, ...]:
    """Numbers of the CPUs that this process may run on; all CPUs where the system has no CPU affinity."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@cache
def processor() -> str:
    """The processor's model name; the architecture where the system does not report a model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware_name() -> str:
    """The name of this machine in profiles measured here: the processor, and how many cores this process may use."""
    return f"{processor()}, {len(usable_cpus())} cores"
