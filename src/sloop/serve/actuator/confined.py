"""Cores for a process that is no replica: how a profile is measured inside the very limits a replica will have.

Control groups where we may; else whole cores by affinity, fractions being refused. Knows nothing of what is measured.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sloop.profile.measure import by_affinity
from sloop.serve.actuator import detect
from sloop.serve.actuator.cgroup import Cgroups

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
