"""The machine this process runs on: its processor, the cores and memory that the process may use, and how a process is
given a fraction of a core.

The machine is what the control groups of the process leave of it: a container with a quota of 1.5 cores on a host of 64
is a machine of 1.5 cores. This is the only place that answers how large it is. Where the operating system does not say,
the answers are all CPUs and the name of the architecture. Changes nothing.
"""

import contextlib
import errno
import os
import platform
import time
from collections.abc import Iterator
from functools import cache
from math import ceil, floor, inf
from pathlib import Path
from typing import Final, NamedTuple

from sloop.units import GIB, WIDE_ROUNDING

PERIOD_US: Final = 10_000
"""The period of CPU quotas. A short one matters: with the kernel's default of 100 ms, forward passes shorter than that
take between half and twice their time."""
QUOTA_US_MIN: Final = 1_000
"""The kernel rejects smaller quotas; smaller fractions use a longer period instead."""
PROC: Final = Path("/proc")
CORES_LEAST: Final = 0.001
"""Cores are counted in thousandths, as in Kubernetes, rounded down."""


class Capacity(NamedTuple):
    """What this process and all that it starts may use together, and which files limit it."""

    cores: float
    memory_bytes: int | None
    """None if the system does not say."""
    cores_file: str = ""
    """The file of the control group that sets the cores; empty if the CPUs do."""
    memory_file: str = ""
    """The file of the control group that sets the memory; empty if the hardware does."""

    @property
    def cores_limit(self) -> str:
        """The limit and where it is set, such as `1.5 cores by /sys/fs/cgroup/cpu.max`; empty without one."""
        noun = "core" if self.cores == 1 else "cores"
        return f"{self.cores:g} {noun} by {self.cores_file}" if self.cores_file else ""

    @property
    def memory_limit(self) -> str:
        """The same of the memory."""
        return f"{(self.memory_bytes or 0) / GIB:.3g} GiB of memory by {self.memory_file}" if self.memory_file else ""

    @property
    def limits(self) -> str:
        """Both, where there are any."""
        return " and ".join(filter(None, (self.cores_limit, self.memory_limit)))


def capacity(proc: Path | None = None) -> Capacity:
    """The size of this machine, read anew: the CPUs of the affinity mask and the memory of the hardware, or the
    smallest limit of the process's control groups (version 1 or 2, up to the root) where that is less. Takes under a
    millisecond."""
    quotas, limits = list[tuple[float, str]](), list[tuple[float, str]]()
    said = _read(proc or PROC)
    for version in (1, 2):
        quotas += _limits(*said, version, "cpu")
        limits += _limits(*said, version, "memory")
    cpus, hardware_bytes = float(len(usable_cpus())), _hardware_bytes()
    cores, cores_file = min(quotas, default=(inf, ""))
    limit_bytes, memory_file = min(limits, default=(inf, ""))
    if cores >= cpus:
        cores, cores_file = cpus, ""
    if limit_bytes >= (inf if hardware_bytes is None else hardware_bytes):
        return Capacity(_thousandths(cores), hardware_bytes, cores_file)
    return Capacity(_thousandths(cores), int(limit_bytes), cores_file, memory_file)


def _thousandths(cores: float) -> float:
    return max(CORES_LEAST, floor(cores * 1000 + WIDE_ROUNDING) / 1000)


def _hardware_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):  # a sandbox may hide it
        return None


def _read(proc: Path) -> tuple[str, str]:
    """What the system says of mounts, and of the control groups of the process; empty where it says nothing."""
    found = ["", ""]
    for place, name in enumerate(("mountinfo", "cgroup")):
        with contextlib.suppress(OSError):
            found[place] = (proc / "self" / name).read_text()
    return found[0], found[1]


def _limits(mounts: str, memberships: str, version: int, controller: str) -> Iterator[tuple[float, str]]:
    """The limits of a controller that hold for the process, each with its file: cores of `cpu`, bytes of `memory`.

    A group without the file limits nothing, while a group above it may."""
    try:
        group, top = _group_and_top(mounts, memberships, version, controller)
    except OSError:
        return
    names = {"cpu": ("cpu.cfs_quota_us", "cpu.max"), "memory": ("memory.limit_in_bytes", "memory.max")}
    file = names[controller][version - 1]
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if controller == "cpu":
                found = read_cores(folder, version)
            else:
                text = (folder / file).read_text().strip()
                found = inf if text == "max" else int(text)
            if found < inf:
                yield found, str(folder / file)
        if folder == top:
            return


def read_cores(group: Path, version: int) -> float:
    """A control group's CPU quota in cores; infinite if it has none."""
    if version == 2:
        time, period = (group / "cpu.max").read_text().split()
        return inf if time == "max" else int(time) / int(period)
    time = (group / "cpu.cfs_quota_us").read_text()
    return inf if int(time) < 0 else int(time) / int((group / "cpu.cfs_period_us").read_text())


def own_group(proc: Path, version: int) -> Path:
    """The folder of the process's own control group that limits CPUs. OSError if there is none of that version."""
    return _group_and_top(*_read(proc), version, "cpu")[0]


def _group_and_top(mounts: str, memberships: str, version: int, controller: str) -> tuple[Path, Path]:
    """The folders of the process's control group, and of the one at the top of what is mounted. OSError without any.

    Sources: cgroups(7), "/proc files"; proc_pid_mountinfo(5) for the fields root (3), mount point (4), type, options.
    """
    for line in mounts.splitlines():
        mount, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ")[:3]
        if version == 2 and kind == "cgroup2":
            name = ""
        elif version == 1 and kind == "cgroup" and controller in options.split(","):
            name = controller
        else:
            continue
        root, top = mount.split()[3:5]
        inside = Path(_membership(memberships, name))
        below = inside.relative_to(root) if inside.is_relative_to(root) else inside.relative_to("/")
        group = Path(top) / below
        # A group outside of the name space, `/../pod`, is not mounted.
        return (group if group.is_dir() and ".." not in below.parts else Path(top)), Path(top)
    raise OSError(errno.ENOENT, "not mounted")


def _membership(memberships: str, controller: str) -> str:
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise OSError(errno.ENOENT, "the server belongs to no such group")


def usable_cpus() -> tuple[int, ...]:
    """Numbers of the CPUs that this process may be pinned to. A control group may leave less time on them than they
    have: `capacity` says how many cores there are."""
    return tuple(sorted(os.sched_getaffinity(0)))


def cpu_ns_of(pid: int) -> int:
    """The processor time that a process has taken since its start; 0 if it has ended, or if the system does not say.

    The clock of another process has a number (clock_getcpuclockid(3), as the kernel's `CPUCLOCK_SCHED` makes it).
    """
    with contextlib.suppress(OSError):
        return time.clock_gettime_ns((~pid << 3) | 2)
    return 0


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
    return f"{processor()}, {capacity().cores:g} cores"


def quota(cores: float) -> tuple[int, int]:
    """The CPU time that a process with so many cores has in each period, and the period, both in microseconds. It is
    rounded down: version 1 refuses a group more than the groups above it have."""
    time_us = floor(cores * PERIOD_US + WIDE_ROUNDING)
    if time_us >= QUOTA_US_MIN:
        return time_us, PERIOD_US
    return QUOTA_US_MIN, min(1_000_000, ceil(QUOTA_US_MIN / cores))
