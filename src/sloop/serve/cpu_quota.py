"""What an actuator grants: the value between it, the backend and the worker."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path
from typing import Final, Protocol

from sloop.errors import MachineError
from sloop.machine import usable_cpus
from sloop.profile.measure import by_affinity


@dataclass(frozen=True, slots=True)
class Grant:
    """Cores in effect, and what the process itself must do for that: threads to run on, share of time to work.

    `duty` is 1 where the machine withholds cores; a fall-back that cannot leaves it to the process to rest.
    """

    cores: float
    duty: float = 1.0

    @property
    def threads(self) -> int:
        """⌈cores⌉: more would wait for each other inside the quota, fewer would leave cores idle."""
        return max(1, ceil(self.cores - 1e-9))


# == affinity: The fall-back without rights: whole cores by CPU affinity, fractions by the process's own resting.
#
# Promises cores only as far as nobody else uses those CPUs: affinity keeps a process on them, not others off. A process
# on 1.5 cores gets two CPUs and a duty cycle of 0.75, which it must keep itself (`Grant.duty`). Where the system knows no
# affinity (other than Linux) the duty cycle is all there is.


class Affinity:
    """Spreads processes over the CPUs it was given, least used first."""

    def __init__(self, cpus: Sequence[int], proc: Path = Path("/proc")) -> None:
        self._cpus, self._proc = tuple(cpus), proc
        self._held: dict[int, tuple[set[int], float]] = {}

    def confine(self, pid: int, cores: float) -> Grant:
        """Keep a process on the least used CPUs."""
        self._held[pid] = (set(), 0.0)
        return self.resize(pid, cores)

    def resize(self, pid: int, cores: float) -> Grant:
        """Change the number of CPUs; those it has are kept as far as possible."""
        possible = min(cores, float(len(self._cpus)))
        count = max(1, ceil(possible - 1e-9))
        mine, _ = self._held.pop(pid)
        uses = {cpu: sum(cpu in held for held, _ in self._held.values()) for cpu in self._cpus}
        chosen = set(sorted(self._cpus, key=lambda cpu: (cpu not in mine, uses[cpu], cpu))[:count])
        self._held[pid] = (chosen, possible)
        try:
            for thread in (self._proc / str(pid) / "task").iterdir():
                os.sched_setaffinity(int(thread.name), chosen)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it or one of its threads has just exited; the backend will notice if it is the process
        except OSError as error:
            raise MachineError(
                f"process {pid} cannot be kept on CPUs {sorted(chosen)}: {error.strerror}",
                help="run sloop in a container or account that may set the affinity of its own processes",
            ) from error
        return Grant(possible, possible / count)

    def read(self, pid: int) -> float:
        """The cores granted; the machine itself knows whole CPUs only."""
        return self._held[pid][1]

    def release(self, pid: int) -> None:
        """Give its CPUs back."""
        self._held.pop(pid, None)

    def close(self) -> None:
        """Nothing was made."""
        self._held.clear()


# == cgroup: Cores by control groups: a group per process below one of our own, with a quota of CPU time per short period.
#
# Promises 1/c latency for fractions, changes in effect within one period, and a tree `sloop-PID` that is removed at the
# end or, after a crash, by the next server. A short period matters: with the kernel's default of 100 ms, forward passes
# shorter than that take between a half and twice their time (Sponge specification, section 7.1).
#
# Version 2 needs the `cpu` controller delegated to our own group (systemd: `Delegate=yes`); since a group with children
# may hold no process itself there, the server moves into a leaf of its own. Version 1 needs a writable `cpu` hierarchy.


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


# == confined: Cores for a process that is no replica: how a profile is measured inside the very limits a replica will have.
#
# Control groups where we may; else whole cores by affinity, fractions being refused. Knows nothing of what is measured.


LEAVE_S: Final = 1.0
"""How long a process that is done may take to leave its group."""


@contextmanager
def confined(pid: int, cores: float) -> Iterator[None]:
    """Confine a process to `cores` while the context is open. InputError for a fraction this machine cannot give."""
    actuator = detect().actuator
    if not isinstance(actuator, Cgroups):
        with by_affinity(pid, cores):
            yield
        return
    actuator.confine(pid, cores)
    try:
        yield
    finally:
        until_s = time.monotonic() + LEAVE_S
        actuator.close()
        while actuator.folder.exists() and time.monotonic() < until_s:
            time.sleep(0.01)  # the group of a process that still exits is busy
            actuator.close()


# == __init__: How a running process is given more or fewer cores, in place: control groups where we may, affinity where we may not.
#
# Promises that a grant says what is in effect, be it what was asked or not; that a change takes effect within one
# scheduling period (`PERIOD_US`); and that whatever was made on the machine is removed again, by us or by the next
# server. Must not know workers, models or requests. Facts behind it: Sponge specification, sections 1.1 and 7.1.


__all__ = ["CpuActuator", "Detected", "Grant", "capacity_cores", "detect"]


class CpuActuator(Protocol):
    """Confines processes, each known by its pid, to a number of cores which may be a fraction."""

    def confine(self, pid: int, cores: float) -> Grant:
        """Take hold of a process and all its threads, present and future. Raises `MachineError` where it cannot."""
        ...

    def resize(self, pid: int, cores: float) -> Grant:
        """Change what a confined process may use."""
        ...

    def read(self, pid: int) -> float:
        """The cores a confined process may use now, as the machine says."""
        ...

    def release(self, pid: int) -> None:
        """Forget a process, which has exited."""
        ...

    def close(self) -> None:
        """Remove all traces."""
        ...


@dataclass(frozen=True, slots=True)
class Detected:
    """The best actuator this machine allows, and in one line why it is this one."""

    actuator: CpuActuator
    why: str


def detect(proc: Path = Path("/proc")) -> Detected:
    """Try control groups version 2, then version 1, then fall back to affinity; each refusal is part of the reason."""
    refusals = []
    for name, open_groups in (("cgroup v2", open_v2), ("cgroup v1", open_v1)):
        try:
            groups: Cgroups = open_groups(proc)
        except OSError as error:
            refusals.append(f"{name}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""))
        else:
            return Detected(groups, "; ".join([f"{name}: quota in {groups.folder}", *refusals]))
    affinity = Affinity(usable_cpus())
    return Detected(affinity, "; ".join(["affinity, fractions by resting between batches", *refusals]))


def capacity_cores(proc: Path = Path("/proc")) -> float:
    """Cores this server and its workers may use together: CPUs in its affinity mask, less if a quota is above it."""
    return min(float(len(usable_cpus())), quota_above(proc))
