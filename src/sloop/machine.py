"""The machine this process runs on: its processor, the CPUs that the process may use, and how a process is given a
fraction of a core.

Where the operating system does not say, the answers are all CPUs and the name of the architecture. Changes nothing.
"""

import contextlib
import os
import platform
from functools import cache
from math import ceil
from pathlib import Path
from typing import Final

PERIOD_US: Final = 10_000
"""Of CPU quotas. A short period matters: with the kernel's default of 100 ms, forward passes shorter than that take
between half and twice their time."""
QUOTA_US_MIN: Final = 1_000
"""The kernel rejects smaller quotas; smaller fractions use a longer period instead."""


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


def quota(cores: float) -> tuple[int, int]:
    """The CPU time that a process with so many cores has in each period, and the period, both in microseconds."""
    time_us = round(cores * PERIOD_US)
    if time_us >= QUOTA_US_MIN:
        return time_us, PERIOD_US
    return QUOTA_US_MIN, min(1_000_000, ceil(QUOTA_US_MIN / cores))
