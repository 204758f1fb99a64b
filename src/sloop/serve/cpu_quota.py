"""CPU quotas of running processes, changed in place: by control groups or, without the rights for them, by affinity.

A grant always says how many cores are in effect, even if they differ from the request. A change takes effect within one
scheduling period (`PERIOD_US`). Everything created on the machine is removed by this server or, after a crash, by the
next.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final, Protocol

from sloop.errors import MachineError
from sloop.machine import PERIOD_US, PROC, capacity, own_group, quota, read_cores, usable_cpus
from sloop.profile.measure import by_affinity
from sloop.units import round_up


@dataclass(frozen=True, slots=True)
class Grant:
    """The cores in effect, and the thread count and duty cycle with which a process keeps this limit.

    `duty` is the share of time in which the process may compute. It is 1 if the kernel enforces the quota; otherwise
    the process sleeps for the rest of the time.
    """

    cores: float
    duty: float = 1.0

    @property
    def threads(self) -> int:
        """⌈cores⌉. More threads would wait for each other inside the quota; fewer would leave cores idle."""
        return max(1, round_up(self.cores))


class Affinity:
    """The fallback without rights: pins each process to whole CPUs, the least used first; processes enforce fractions
    of a core by sleeping.

    Affinity keeps a process on its CPUs but does not keep others off them. A process with 1.5 cores gets two CPUs and a
    duty cycle of 0.75. On systems without affinity (other than Linux) the duty cycle is the only limit.
    """

    def __init__(self, cpus: Sequence[int], proc: Path = PROC, capacity_cores: float = inf) -> None:
        self._cpus, self._proc = tuple(cpus), proc
        self.capacity_cores = min(capacity_cores, float(len(self._cpus)))
        self._held: dict[int, tuple[set[int], float]] = {}

    def prepare(self, pid: int) -> None:
        """Does nothing: to pin a process takes no time."""

    def confine(self, pid: int, cores: float) -> Grant:
        """Pin a process to the least used CPUs."""
        self._held[pid] = (set(), 0.0)
        return self.resize(pid, cores)

    def resize(self, pid: int, cores: float) -> Grant:
        """Change the number of CPUs, keeping the current ones as far as possible."""
        possible = min(cores, self.capacity_cores)
        count = max(1, round_up(possible))
        mine, _ = self._held.pop(pid)
        uses = {cpu: sum(cpu in held for held, _ in self._held.values()) for cpu in self._cpus}
        chosen = set(sorted(self._cpus, key=lambda cpu: (cpu not in mine, uses[cpu], cpu))[:count])
        self._held[pid] = (chosen, possible)
        try:
            for thread in (self._proc / str(pid) / "task").iterdir():
                os.sched_setaffinity(int(thread.name), chosen)
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process or a thread has just exited; the backend notices the former
        except OSError as error:
            raise MachineError(
                f"process {pid} cannot be pinned to CPUs {sorted(chosen)}: {error.strerror}",
                help="run sloop in a container or account that may set the CPU affinity of its processes",
            ) from error
        return Grant(possible, possible / count)

    def join(self, pid: int, pool: str, cores: float) -> Grant:
        """Give a process the CPUs that `cores` need; nothing bounds what all processes of the pool use together."""
        return self.resize(pid, cores)

    def read(self, pid: int) -> float:
        """The granted cores, which may be a fraction; the kernel's mask has whole CPUs only."""
        return self._held[pid][1]

    def release(self, pid: int) -> None:
        """Release the CPUs of a process that has exited."""
        self._held.pop(pid, None)

    def close(self) -> None:
        """Forget all processes; affinity leaves nothing to remove."""
        self._held.clear()


PREFIX: Final = "sloop-"
POOL: Final = "pool-"
"""How the names of groups begin that several processes share."""


class Cgroups:
    """Limits each process by a separate control group below `folder`, with the quotas of `sloop.machine`.

    Version 2 needs the `cpu` controller delegated to the server's group (systemd: `Delegate=yes`).
    There, a group with children may not hold processes itself, so the server moves into a leaf group, and with it all
    processes of its group, such as its planner. Version 1 needs a writable `cpu` hierarchy.
    """

    def __init__(self, folder: Path, version: int, capacity_cores: float) -> None:
        self.folder = folder
        self._version, self.capacity_cores = version, capacity_cores
        self._prepared: set[int] = set()
        self._pools: dict[int, Path] = {}

    def prepare(self, pid: int) -> None:
        """Create a group and move the process into it, without a quota yet. The kernel waits for all CPUs there, for
        10 to 20 ms."""
        group = self._group(pid)
        try:
            group.mkdir(exist_ok=True)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise _refused(group, error) from error
        self._prepared.add(pid)

    def confine(self, pid: int, cores: float) -> Grant:
        """Create a group with a quota and move the process with all its threads into it."""
        group = self._group(pid)
        try:
            if pid in self._prepared:
                return self._write(group, cores)
            group.mkdir(exist_ok=True)
            grant = self._write(group, cores)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise _refused(group, error) from error
        return grant

    def resize(self, pid: int, cores: float) -> Grant:
        """Write a new quota."""
        try:
            return self._write(self._group(pid), cores)
        except OSError as error:
            raise _refused(self._group(pid), error) from error

    def join(self, pid: int, pool: str, cores: float) -> Grant:
        """Move a process into the group of a pool, whose quota all its processes share."""
        group = self.folder / f"{POOL}{pool}"
        try:
            group.mkdir(exist_ok=True)
            grant = self._write(group, cores)
            (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise _refused(group, error) from error
        with contextlib.suppress(OSError):
            self._group(pid).rmdir()
        self._pools[pid] = group
        return grant

    def read(self, pid: int) -> float:
        """The quota that the kernel reports; of a process in a pool that of the pool."""
        return min(self.capacity_cores, read_cores(self._pools.get(pid) or self._group(pid), self._version))

    def release(self, pid: int) -> None:
        """Remove the group of a process that has exited; `close` removes groups that are still busy."""
        self._prepared.discard(pid)
        self._pools.pop(pid, None)
        with contextlib.suppress(OSError):
            self._group(pid).rmdir()

    def close(self) -> None:
        """Remove all groups, after moving the server out of its leaf group if it is in one."""
        if (self.folder / "server").exists():
            with contextlib.suppress(OSError):
                (self.folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        remove_tree(self.folder)

    def _group(self, pid: int) -> Path:
        return self.folder / str(pid)

    def _write(self, group: Path, cores: float) -> Grant:
        try:
            return self._write_quota(group, min(cores, self.capacity_cores))
        except OSError as error:
            there = capacity().cores
            if error.errno != errno.EINVAL or there >= min(cores, self.capacity_cores):
                raise
            return self._write_quota(group, there)  # a group above has just got less

    def _write_quota(self, group: Path, cores: float) -> Grant:
        time_us, period_us = quota(cores)
        if self._version == 2:
            (group / "cpu.max").write_text(f"{time_us} {period_us}")
        elif cores >= self.capacity_cores:
            # The groups above limit it. With a quota of its own, nobody could give the machine less while it serves:
            # version 1 refuses a group less than one of those below it has.
            (group / "cpu.cfs_quota_us").write_text("-1")
        else:
            # Write the period first: with the old, longer one the new quota could be below the kernel's minimum.
            if (group / "cpu.cfs_period_us").read_text().strip() != str(period_us):
                (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(time_us))
        return Grant(time_us / period_us)


def open_v2(proc: Path) -> Cgroups:
    """Create our groups below the server's own. Raises `OSError` without the right to do so or without the
    controller."""
    own = own_group(proc, 2)
    if "cpu" not in (own / "cgroup.controllers").read_text().split():
        raise OSError(errno.ENODEV, "the cpu controller is not available", str(own))
    remove_stale(own, proc)
    folder = own / f"{prefix(proc)}{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        try:
            (own / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            (folder / "server").mkdir(exist_ok=True)
            move_all(own, folder / "server")
            (own / "cgroup.subtree_control").write_text("+cpu")
        (folder / "cgroup.subtree_control").write_text("+cpu")
        _probe(folder, "cpu.max", f"{PERIOD_US} {PERIOD_US}")
    except OSError:
        Cgroups(folder, 2, inf).close()
        raise
    return Cgroups(folder, 2, capacity(proc).cores)


def open_v1(proc: Path) -> Cgroups:
    """Create our groups below the server's own in the `cpu` hierarchy. Raises `OSError` without the right to do so."""
    own = own_group(proc, 1)
    remove_stale(own, proc)
    folder = own / f"{prefix(proc)}{os.getpid()}"
    folder.mkdir(exist_ok=True)
    try:
        _probe(folder, "cpu.cfs_period_us", str(PERIOD_US))
    except OSError:
        remove_tree(folder)
        raise
    return Cgroups(folder, 1, capacity(proc).cores)


def move_all(group: Path, into: Path) -> None:
    """Move all processes of a group of version 2 into another one below it."""
    for pid in (group / "cgroup.procs").read_text().split():
        try:
            (into / "cgroup.procs").write_text(pid)
        except OSError as error:
            if error.errno != errno.ESRCH:  # it has ended meanwhile
                raise


def prefix(proc: Path) -> str:
    """How the groups of servers begin that share our process ids. Agents in containers may share control groups with
    others that do not."""
    try:
        return f"{PREFIX}{(proc / 'self' / 'ns' / 'pid').stat().st_ino}-"
    except OSError:
        return PREFIX


def remove_stale(own: Path, proc: Path) -> None:
    """Remove the groups of servers that no longer run."""
    ours = prefix(proc)
    for folder in own.glob(f"{ours}*"):
        pid = folder.name.removeprefix(ours)
        if pid.isdigit() and not (proc / pid).exists():
            remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a group and the groups below it; groups with processes stay."""
    for group in _groups(folder):
        with contextlib.suppress(OSError):
            group.rmdir()


def _groups(folder: Path) -> Iterator[Path]:
    """All groups, children before their parents, in the order in which they can be removed."""
    if folder.is_dir():
        for inner in [path for path in folder.iterdir() if path.is_dir()]:
            yield from _groups(inner)
        yield folder


def _probe(folder: Path, file: str, text: str) -> None:
    """Check that a group below ours can be created and configured. Raises `OSError`."""
    group = folder / "probe"
    group.mkdir(exist_ok=True)
    try:
        (group / file).write_text(text)
    finally:
        remove_tree(group)


def _refused(group: Path, error: OSError) -> MachineError:
    return MachineError(
        f"control group {group} cannot be set: {error.strerror}",
        help="let sloop write its own control group (systemd: Delegate=yes; containers: mount cgroups writable)",
    )


LEAVE_S: Final = 1.0
"""How long to wait for an exiting process to leave its group."""


@contextmanager
def confined(pid: int, cores: float) -> Iterator[None]:
    """Limit a process that is not a replica to `cores` while the context is open; used to measure profiles.

    Raises `InputError` for a fraction if the machine can only pin processes to whole CPUs.
    """
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
            time.sleep(0.01)  # the group stays busy until the process has exited
            actuator.close()


__all__ = ["CpuActuator", "Detected", "Grant", "detect"]


class CpuActuator(Protocol):
    """Limits processes, identified by their pid, to a number of cores, which may be a fraction."""

    capacity_cores: float
    """What the machine has: no process gets more. It may change."""

    def prepare(self, pid: int) -> None:
        """Do what takes long and does not depend on the cores, for a process that will be confined later. Any thread
        may call it. Raises `MachineError`."""
        ...

    def confine(self, pid: int, cores: float) -> Grant:
        """Limit a process with all its present and future threads. Raises `MachineError` if that is not possible."""
        ...

    def resize(self, pid: int, cores: float) -> Grant:
        """Change the limit of a process."""
        ...

    def join(self, pid: int, pool: str, cores: float) -> Grant:
        """From now on, a confined process shares `cores` with all others of the pool, instead of cores of its own."""
        ...

    def read(self, pid: int) -> float:
        """The cores that a process may use now, according to the kernel."""
        ...

    def release(self, pid: int) -> None:
        """Forget a process that has exited."""
        ...

    def close(self) -> None:
        """Remove everything that was created."""
        ...


@dataclass(frozen=True, slots=True)
class Detected:
    """The best actuator that this machine allows, and the reason in one line."""

    actuator: CpuActuator
    why: str


def detect(proc: Path = PROC) -> Detected:
    """Try control groups version 2, then version 1, then affinity; the reason names each failure."""
    refusals = []
    for name, open_groups in (("cgroup v2", open_v2), ("cgroup v1", open_v1)):
        try:
            groups: Cgroups = open_groups(proc)
        except OSError as error:
            refusals.append(f"{name}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else ""))
        else:
            return Detected(groups, "; ".join([f"{name}: quota in {groups.folder}", *refusals]))
    affinity = Affinity(usable_cpus(), capacity_cores=capacity(proc).cores)
    return Detected(affinity, "; ".join(["affinity, fractions by sleeping between batches", *refusals]))
