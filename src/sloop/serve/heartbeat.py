"""Heartbeats: whether a process that should send one regularly hangs, or is merely slow.

Silence alone does not tell: on a busy machine, or under a CPU quota, a process may not get to run for a while. So only
time counts in which it could have spoken: while it waits for a CPU, or for a page or a disk, only what it computes
counts, and if the process that watches did not run itself, at most `STEP_S_MAX` of that. A process that is silent for
`PATIENCE_S`, while the other one watches, hangs even if nothing of it counts.
"""

from pathlib import Path
from typing import Final, NamedTuple

from sloop.units import NS_PER_S

HEARTBEAT_S: Final = 0.1
"""The interval of a process's heartbeats."""
LOOK_S: Final = 0.1
"""The interval at which they are looked at."""
STEP_S_MAX: Final = 2 * LOOK_S
"""How much of the time between two looks counts at most: in the rest, the process that watches has not run, or had
other work."""
HUNG_S: Final = 1.0
"""A process hangs that has been silent for so long although it could have spoken."""
PATIENCE_S: Final = 10.0
"""One also hangs that has been silent for so long, whatever it waited for."""
PROC: Final = Path("/proc")
COMPUTES: Final = "R"
"""The state, in `/proc/PID/stat`, of a thread that has a CPU or waits for one."""
WAITS_FOR_MACHINE: Final = "D"
"""That of a thread that waits for a disk, or for memory that is on one (uninterruptible sleep)."""
HELD_UP: Final = (COMPUTES, WAITS_FOR_MACHINE)
STATES: Final = {
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    COMPUTES: "it computes",
    WAITS_FOR_MACHINE: "it waits for a disk",
    "S": "it waits, but not for a CPU",
}


class ProcessState(NamedTuple):
    """What the kernel says of the threads of a process."""

    state: str
    """`COMPUTES` if any thread does, else `WAITS_FOR_MACHINE` if any does, else that of the main thread."""
    ran_ns: int
    """How long they have computed since their start, all together."""
    waited_ns: int
    """How long they were ready to compute and had no CPU, all together."""


def process_state(pid: int, proc: Path = PROC) -> ProcessState | None:
    """The state of a process; None if the kernel does not say it."""
    states, ran_ns, waited_ns = dict[str, str](), 0, 0
    try:
        for thread in (proc / str(pid) / "task").iterdir():
            states[thread.name] = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            ran, waited, _ = map(int, (thread / "schedstat").read_text().split())
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
        own = states[str(pid)]
    except (OSError, ValueError, IndexError, KeyError):
        return None
    held_up = [each for each in HELD_UP if each in states.values()]
    return ProcessState(held_up[0] if held_up else own, ran_ns, waited_ns)


class Silence:
    """For how long a process has been silent."""

    def __init__(self) -> None:
        self.counted_s = self.passed_s = 0.0
        """The time in which it could have spoken, and all time, of which at most `STEP_S_MAX` of each look."""
        self._last: ProcessState | None = None

    def end(self) -> None:
        """It has spoken."""
        self.counted_s = self.passed_s = 0.0
        self._last = None

    def grow(self, since_s: float, now: ProcessState | None) -> None:
        """It has said nothing since the last look, which was `since_s` ago."""
        step_s, last, self._last = min(since_s, STEP_S_MAX), self._last, now
        self.passed_s += step_s
        if now is None:
            self.counted_s += step_s
            return
        waited_s = ran_s = 0.0
        if last is not None:  # threads that have ended are not counted any more
            ran_s = max(0, now.ran_ns - last.ran_ns) / NS_PER_S
            waited_s = max(0, now.waited_ns - last.waited_ns) / NS_PER_S
        self.counted_s += min(step_s, ran_s) if now.state in HELD_UP else max(0.0, step_s - waited_s)

    @property
    def why(self) -> str:
        """Why the process is taken to hang; empty if it is not."""
        if self.counted_s < HUNG_S and self.passed_s < PATIENCE_S:
            return ""
        state = self._last.state if self._last is not None else "unknown"
        return f"it has hung: no sign of life for {self.passed_s:.1f} s; {STATES.get(state, f'its state is {state}')}"
