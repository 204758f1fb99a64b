"""The fall-back without rights: whole cores by CPU affinity, fractions by the process's own resting.

Promises cores only as far as nobody else uses those CPUs: affinity keeps a process on them, not others off. A process
on 1.5 cores gets two CPUs and a duty cycle of 0.75, which it must keep itself (`Grant.duty`). Where the system knows no
affinity (other than Linux) the duty cycle is all there is.
"""

import os
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from sloop.errors import MachineError
from sloop.serve.actuator.grant import Grant


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
