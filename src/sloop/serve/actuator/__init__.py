"""How a running process is given more or fewer cores, in place: control groups where we may, affinity where we may not.

Promises that a grant says what is in effect, be it what was asked or not; that a change takes effect within one
scheduling period (`PERIOD_US`); and that whatever was made on the machine is removed again, by us or by the next
server. Must not know workers, models or requests. Facts behind it: Sponge specification, sections 1.1 and 7.1.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sloop.machine import usable_cpus
from sloop.serve.actuator.affinity import Affinity
from sloop.serve.actuator.cgroup import Cgroups, open_v1, open_v2, quota_above
from sloop.serve.actuator.grant import Grant

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
