"""The thesis' router has no timer: the time of a batch is looked at when a request arrives."""

from dataclasses import dataclass
from typing import Final

from sloop.api import NonNegativeInt, s
from sloop.api.policies import BatchDecision, BatchDevice, QueueView, start_or_wait

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

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        visits, limit = queue.visits, device.batch_max
        if len(visits) >= limit:
            return BatchDecision(limit)
        first_ns = min(visit.arrived_ns for visit in visits)
        start_by_ns = first_ns + self.wait_ns
        if max(visit.arrived_ns for visit in visits) < now_ns:
            start_by_ns = max(first_ns + LAST_WAITS * self.wait_ns, first_ns + 1)
        return start_or_wait(now_ns, len(visits), start_by_ns)
