"""The thesis' router has no timer: the time of a batch is looked at when a request arrives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sloop.api import NonNegativeInt, Visit, s
from sloop.api.policies import Take

LAST_WAITS: Final = 10
"""How many times the waiting time a batch waits at most if no visit arrives any more."""


@dataclass(frozen=True, slots=True)
class Untimed:
    """Wait for a full batch; a visit that arrives `wait_ns` after the oldest one starts what waits, itself included.

    The router of the colocation thesis (Elvinger, ETH Zurich 2024, section 4.3.1). If no visit arrives any more, the
    batch starts after ten times the waiting time; there, at the end of the run. Fails at low rates: the wait is
    always longer than what was asked for.
    """

    wait_ns: NonNegativeInt = s(1)

    def decide(
        self,
        now_ns: int,
        queue: Sequence[Visit],
        limit: int,
        costs_ns: Sequence[int],
        wait_ns: int = 0,
        remaining_ns: int = 0,
    ) -> Take:
        if len(queue) >= limit:
            return Take(count=limit)
        first_ns = min(visit.arrived_ns for visit in queue)
        start_by_ns = first_ns + self.wait_ns
        if max(visit.arrived_ns for visit in queue) < now_ns:
            start_by_ns = max(first_ns + LAST_WAITS * self.wait_ns, first_ns + 1)
        return Take(count=len(queue)) if now_ns >= start_by_ns else Take(count=0, wait_until_ns=start_by_ns)
