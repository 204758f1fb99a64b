"""The memory of a worker: how much it may take, and when it gives back what large requests have left.

Frameworks keep the memory of the largest request so far. A worker looks each second at what it takes, and gives memory
back if that is more than usual. It also has a bound: an allocation beyond it fails, and with it the request, instead of
the machine.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import getpid
from typing import Final

from sloop.errors import InputError
from sloop.machine import capacity
from sloop.memory import bound_growth, lift_bound, own_bytes, peak_bytes, resident_bytes
from sloop.units import GIB

LOOK_S: Final = 1.0
PAUSE_S_MAX: Final = 64.0
"""A worker that soon takes as much again gives back more rarely: it needs the memory, and new pages cost time."""
SURPLUS: Final = 1.2
SURPLUS_BYTES: Final = 8 * 2**20
"""A worker gives back if it takes more than `SURPLUS` times the usual memory, and at least so much more."""
GROWTH_BYTES_MIN: Final = GIB
"""How much more than counted a worker may take, at least, if the machine has it: sizes that were not measured may need
much more than those that were."""
STAYS: Final = 0.5
"""A worker that keeps more than this share of what it may take beyond what is counted, after a request that failed for
lack of memory, is replaced."""


def bound_of(counted_bytes: int, machine_bytes: int | None) -> int:
    """What a worker may take, if plans count `counted_bytes` for it, or it takes them already: as much again, and at
    least `GROWTH_BYTES_MIN` more, but at most half of the rest of the machine's memory. `machine_bytes` is all of that;
    None: unknown."""
    growth = max(counted_bytes, GROWTH_BYTES_MIN)
    if machine_bytes is not None:
        growth = min(growth, max(0, machine_bytes - counted_bytes) // 2)
    return counted_bytes + growth


class Surplus:
    """Decides when a worker gives memory back."""

    def __init__(self, usual_bytes: int) -> None:
        self._usual_bytes = self._settled_bytes = usual_bytes
        self._next_s, self._pause_s = 0.0, LOOK_S

    def is_due(self, taken_bytes: int, now_s: float) -> bool:
        """Whether memory is to be given back now, if the worker takes `taken_bytes`."""
        if taken_bytes <= max(SURPLUS * self._settled_bytes, self._settled_bytes + SURPLUS_BYTES):
            if now_s >= self._next_s:
                self._pause_s = LOOK_S
            return False
        if now_s < self._next_s:
            return False
        self._next_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        return True

    def note(self, taken_bytes: int) -> None:
        """What the worker still takes after it has given memory back: it cannot give back more."""
        self._settled_bytes = max(self._usual_bytes, taken_bytes)


class WorkerMemory:
    """The memory of this process. Without `is_bound`, it has no bound: it is not the worker's alone."""

    def __init__(self, *, is_bound: bool = False, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._is_bound, self._clock_s = is_bound, clock_s
        self._counted_bytes = self._declared_bytes = self.bound_bytes = 0
        """What plans count, what the user allows, and the bound in force; 0: unknown, nothing, none."""
        self._base_bytes = self._usual_bytes = 0
        self._surplus = Surplus(0)

    def expect(self, counted_bytes: int, declared_bytes: int, *, has_device: bool) -> None:
        """What plans count for this worker, and what the user says that it may take; 0: unknown. With a GPU there is no
        bound, because drivers reserve memory that they do not use."""
        self._counted_bytes, self._declared_bytes = counted_bytes, declared_bytes
        self._is_bound = self._is_bound and not has_device

    def settle(self) -> None:
        """The model is loaded: what is taken now is usual, and what has been taken so far is needed. InputError if that
        is more than the user allows."""
        taken_bytes, self._usual_bytes = resident_bytes(), own_bytes(getpid())
        if 0 < self._declared_bytes < taken_bytes:
            what = (
                f"it takes {taken_bytes / GIB:.3g} GiB when it is loaded, and may take {self._declared_bytes / GIB:.3g}"
            )
            raise InputError(what, help="raise `limits: {worker_bytes: …}` of the application")
        self._counted_bytes = self._base_bytes = max(self._counted_bytes, peak_bytes())
        self._set_bound()

    def _set_bound(self) -> None:
        self._surplus = Surplus(self._usual_bytes)
        if self._is_bound:
            bound_bytes = self._declared_bytes or bound_of(self._base_bytes, capacity().memory_bytes)
            if bound_growth(max(0, bound_bytes - resident_bytes())):
                self.bound_bytes = bound_bytes

    @contextmanager
    def growing(self) -> Iterator[None]:
        """While more of the model is loaded there is no bound; afterwards, what that has added is usual."""
        before_bytes = own_bytes(getpid())
        if self._is_bound:
            lift_bound()
        try:
            yield
        finally:
            grown_bytes = own_bytes(getpid()) - before_bytes
            self._usual_bytes = max(0, self._usual_bytes + grown_bytes)
            self._base_bytes = max(self._counted_bytes, self._base_bytes + grown_bytes)
            self._set_bound()

    def is_due(self) -> bool:
        """Whether memory is to be given back."""
        return self._surplus.is_due(own_bytes(getpid()), self._clock_s())

    def note_kept(self) -> None:
        """Memory has been given back while no batch ran: what is still taken cannot be."""
        self._surplus.note(own_bytes(getpid()))

    @property
    def stays(self) -> str:
        """Why a worker that lacked memory, and has given back what it could, is to be replaced; empty if it is not."""
        taken_bytes = resident_bytes()
        if taken_bytes <= self._base_bytes + STAYS * (self.bound_bytes - self._base_bytes) or not self.bound_bytes:
            return ""
        may = f"a worker of this model may take ({self.bound_bytes / GIB:.3g} GiB)"
        return f"it keeps {taken_bytes / GIB:.3g} GiB after a request that needed more memory than {may}"

    @property
    def refusal(self) -> str:
        """What a client is told whose request needs too much; empty without a bound."""
        if not self.bound_bytes:
            return ""
        most = f"{self.bound_bytes / GIB:.3g} GiB"
        return f"the request needs more memory than a worker of this model may take ({most})"
