"""The machine we are on: which processor, and which of its CPUs this process may use.

Promises answers where the system says nothing, too: then all CPUs, and the architecture for a name. Looks, never
changes.
"""

import contextlib
import os
import platform
from functools import cache
from pathlib import Path


def usable_cpus() -> tuple[int, ...]:
    """CPUs this process may run on, by number; all of them where the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@cache
def processor() -> str:
    """The processor's name, as its maker writes it where the system knows it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware_name() -> str:
    """Where a measurement was made: the processor and how many cores of it this process may use."""
    return f"{processor()}, {len(usable_cpus())} cores"
