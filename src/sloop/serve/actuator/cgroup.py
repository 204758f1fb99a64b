"""Cores by control groups: a group per process below one of our own, with a quota of CPU time per short period.

Promises 1/c latency for fractions, changes in effect within one period, and a tree `sloop-PID` that is removed at the
end or, after a crash, by the next server. A short period matters: with the kernel's default of 100 ms, forward passes
shorter than that take between a half and twice their time (Sponge specification, section 7.1).

Version 2 needs the `cpu` controller delegated to our own group (systemd: `Delegate=yes`); since a group with children
may hold no process itself there, the server moves into a leaf of its own. Version 1 needs a writable `cpu` hierarchy.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from math import ceil, inf
from pathlib import Path
from typing import Final

from sloop.errors import MachineError
from sloop.machine import usable_cpus
from sloop.serve.actuator.grant import Grant

PERIOD_US: Final = 10_000
QUOTA_US_MIN: Final = 1_000
"""The kernel refuses less; smaller shares get a longer period instead."""
PREFIX: Final = "sloop-"


def quota(cores: float) -> tuple[int, int]:
    """Microseconds of CPU time, and the period they are for, also in microseconds."""
    time_us = round(cores * PERIOD_US)
    if time_us >= QUOTA_US_MIN:
        return time_us, PERIOD_US
    return QUOTA_US_MIN, min(1_000_000, ceil(QUOTA_US_MIN / cores))


class Cgroups:
    """Groups below `folder`, one for each confined process."""

    def __init__(self, folder: Path, version: int, capacity_cores: float) -> None:
        self.folder = folder
        self._version, self._capacity_cores = version, capacity_cores

    def confine(self, pid: int, cores: float) -> Grant:
        """Make a group with a quota and move the process, all threads of it, into it."""
        group = self._group(pid)
        try:
            group.mkdir(exist_ok=True)
            grant = self._write(group, cores)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise _refused(group, error) from error
        return grant

    def resize(self, pid: int, cores: float) -> Grant:
        """Write another quota."""
        try:
            return self._write(self._group(pid), cores)
        except OSError as error:
            raise _refused(self._group(pid), error) from error

    def read(self, pid: int) -> float:
        """The quota as the kernel has it."""
        return read_cores(self._group(pid), self._version)

    def release(self, pid: int) -> None:
        """Remove the group of a process that has exited; what is still busy is left to `close`."""
        with contextlib.suppress(OSError):
            self._group(pid).rmdir()

    def close(self) -> None:
        """Remove the whole tree; the server, should it sit in a leaf of it, goes back up first."""
        if (self.folder / "server").exists():
            with contextlib.suppress(OSError):
                (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        remove_tree(self.folder)

    def _group(self, pid: int) -> Path:
        return self.folder / str(pid)

    def _write(self, group: Path, cores: float) -> Grant:
        time_us, period_us = quota(min(cores, self._capacity_cores))
        if self._version == 2:
            (group / "cpu.max").write_text(f"{time_us} {period_us}")
        else:
            # The period first: with the old, longer one the new quota could be below the kernel's minimum share.
            if (group / "cpu.cfs_period_us").read_text().strip() != str(period_us):
                (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(time_us))
        return Grant(time_us / period_us)


def read_cores(group: Path, version: int) -> float:
    """A group's quota in cores; infinite where it has none."""
    if version == 2:
        time, period = (group / "cpu.max").read_text().split()
        return inf if time == "max" else int(time) / int(period)
    time = (group / "cpu.cfs_quota_us").read_text()
    return inf if int(time) < 0 else int(time) / int((group / "cpu.cfs_period_us").read_text())


def open_v2(proc: Path) -> Cgroups:
    """Make our tree below the server's own group; raises `OSError` where that is not allowed or has no `cpu`."""
    own = own_group(proc, 2)
    if "cpu" not in (own / "cgroup.controllers").read_text().split():
        raise OSError(errno.ENODEV, "its cpu controller is not available", str(own))
    remove_stale(own, proc)
    folder = own / f"{PREFIX}{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        try:
            (own / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            (folder / "server").mkdir(exist_ok=True)
            (folder / "server" / "cgroup.procs").write_text(str(os.getpid()))
            (own / "cgroup.subtree_control").write_text("+cpu")
        (folder / "cgroup.subtree_control").write_text("+cpu")
        _probe(folder, "cpu.max", f"{PERIOD_US} {PERIOD_US}")
    except OSError:
        Cgroups(folder, 2, inf).close()
        raise
    return Cgroups(folder, 2, float(len(usable_cpus())))


def open_v1(proc: Path) -> Cgroups:
    """Make our tree below the server's own group of the `cpu` hierarchy; raises `OSError` where that is not allowed."""
    own = own_group(proc, 1)
    remove_stale(own, proc)
    folder = own / f"{PREFIX}{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        _probe(folder, "cpu.cfs_period_us", str(PERIOD_US))
    except OSError:
        remove_tree(folder)
        raise
    return Cgroups(folder, 1, float(len(usable_cpus())))


def own_group(proc: Path, version: int) -> Path:
    """The folder of the server's own control group; raises `OSError` where there is none of that version.

    Sources: cgroups(7), "/proc files"; proc_pid_mountinfo(5) for the fields root (3), mount point (4), type, options.
    """
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        root, mounted_at = mount.split()[3:5]
        kind, _, options = rest.split(" ")[:3]
        if version == 2 and kind == "cgroup2":
            controller = ""
        elif version == 1 and kind == "cgroup" and "cpu" in options.split(","):
            controller = "cpu"
        else:
            continue
        inside = Path(_membership(proc, controller))
        below = inside.relative_to(root) if inside.is_relative_to(root) else inside.relative_to("/")
        for folder in (Path(mounted_at) / below, Path(mounted_at)):
            if folder.is_dir():
                return folder
    raise OSError(errno.ENOENT, "it is not mounted here")


def quota_above(proc: Path) -> float:
    """The tightest quota in cores on the server's own group and those above it; infinite where there is none."""
    tightest = inf
    for version in (1, 2):
        with contextlib.suppress(OSError, ValueError):
            group = own_group(proc, version)
            for folder in (group, *group.parents):
                tightest = min(tightest, read_cores(folder, version))
    return tightest


def remove_stale(own: Path, proc: Path) -> None:
    """Remove the trees of servers that are no more."""
    for folder in own.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX)
        if pid.isdigit() and not (proc / pid).exists():
            remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a group and the groups below it; busy ones stay."""
    for group in _groups(folder):
        with contextlib.suppress(OSError):
            group.rmdir()


def _groups(folder: Path) -> Iterator[Path]:
    """Inner groups before outer ones, as `rmdir` wants them."""
    if folder.is_dir():
        for inner in [path for path in folder.iterdir() if path.is_dir()]:
            yield from _groups(inner)
        yield folder


def _probe(folder: Path, file: str, text: str) -> None:
    """Whether a group below ours can be made and set."""
    group = folder / "probe"
    group.mkdir(exist_ok=True)
    try:
        (group / file).write_text(text)
    finally:
        remove_tree(group)


def _membership(proc: Path, controller: str) -> str:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    raise OSError(errno.ENOENT, "the server belongs to no group of it")


def _refused(group: Path, error: OSError) -> MachineError:
    return MachineError(
        f"control group {group} cannot be set: {error.strerror}",
        help="let sloop write its own control group (systemd: Delegate=yes; containers: mount cgroups writable)",
    )
