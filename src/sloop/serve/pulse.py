"""Whether a process that should say something regularly hangs, or is merely slow.

Silence alone does not tell: on a busy machine, or under a CPU quota, a process may not get to run for a while. So only
time counts in which it could have spoken: while it waits for a CPU, or for a page or a disk, only what it computes
counts, and if whoever listens did not run itself, only a little of that time. A process that is silent for
`PATIENCE_S` hangs, whatever the reason, even if nothing of it counts.
"""

from pathlib import Path
from typing import Final, NamedTuple

from sloop.units import NS_PER_S

PULSE_S: Final = 0.1
"""How often a process says that it lives."""
LOOK_S: Final = 0.1
"""How often that is looked at."""
STEP_S_MAX: Final = 2 * LOOK_S
"""How much of the time between two looks counts: in the rest, whoever looks has not run, or had other work."""
HUNG_S: Final = 1.0
"""A process hangs that has been silent for so long although it could have spoken."""
PATIENCE_S: Final = 10.0
PROC: Final = Path("/proc")
COMPUTES: Final = "R"
"""The state, in `/proc/PID/stat`, of a thread that has a CPU or waits for one."""
WAITS_FOR_MACHINE: Final = "D"
"""Of one that waits for a disk, or for memory that is on one."""
STATES: Final = {
    "T": "it is stopped by a signal",
    "t": "it is stopped by a debugger",
    COMPUTES: "it computes",
    WAITS_FOR_MACHINE: "it waits for a disk",
    "S": "it waits, but not for a CPU",
}


class ThreadState(NamedTuple):
    """What the kernel says of the main thread of a process."""

    state: str
    ran_ns: int
    """How long it has computed since its start."""
    waited_ns: int
    """How long it was ready to compute, and had no CPU."""


def main_thread(pid: int, proc: Path = PROC) -> ThreadState | None:
    """The state of a process' main thread; None if the kernel does not say it."""
    thread = proc / str(pid) / "task" / str(pid)
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
        ran_ns, waited_ns, _ = map(int, (thread / "schedstat").read_text().split())
    except (OSError, ValueError, IndexError):
        return None
    return ThreadState(state, ran_ns, waited_ns)


class Silence:
    """For how long a process has been silent."""

    def __init__(self) -> None:
        self.counted_s = self.passed_s = 0.0
        """The time in which it could have spoken, and all time."""
        self._last: ThreadState | None = None

    def end(self) -> None:
        """It has spoken."""
        self.counted_s = self.passed_s = 0.0
        self._last = None

    def grow(self, since_s: float, now: ThreadState | None) -> str:
        """It has said nothing since the last look, which was `since_s` ago. Returns why it is taken to hang; empty if
        it is not."""
        step_s, last, self._last = min(since_s, STEP_S_MAX), self._last, now
        self.passed_s += step_s
        if now is None:
            self.counted_s += step_s
        elif last is not None:
            ran_s, waited_s = (now.ran_ns - last.ran_ns) / NS_PER_S, (now.waited_ns - last.waited_ns) / NS_PER_S
            is_held_up = now.state in (COMPUTES, WAITS_FOR_MACHINE)
            self.counted_s += min(step_s, ran_s) if is_held_up else max(0.0, step_s - waited_s)
        elif now.state not in (COMPUTES, WAITS_FOR_MACHINE):
            self.counted_s += step_s
        if self.counted_s < HUNG_S and self.passed_s < PATIENCE_S:
            return ""
        what = STATES.get(now.state, f"its state is {now.state}") if now is not None else "its state is unknown"
        return f"it has hung: no sign of life for {self.passed_s:.1f} s; {what}"
