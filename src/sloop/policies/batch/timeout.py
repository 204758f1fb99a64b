"""Wait for a full batch, but no longer than a fixed time.

The dynamic batching of most serving systems, and of Sponge's public artefact. The time counts from the oldest queued
arrival, which under EDF need not be the head. Fails at low rates, where every head pays the whole wait for company
that never comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import Take
from sloop.policies.bounds import at_least
from sloop.units import s
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Timeout:
    """Batches of `size` (0: as large as the plan allows), at the latest `wait_ns` after the oldest arrival."""

    size: int = 0
    wait_ns: int = s(1)

    def __post_init__(self) -> None:
        at_least("size", self.size, 0)
        at_least("wait_ns", self.wait_ns, 0)

    def decide(
        self,
        now_ns: int,
        queue: Sequence[Visit],
        limit: int,
        costs_ns: Sequence[int],
        wait_ns: int = 0,
        remaining_ns: int = 0,
    ) -> Take:
        size = min(self.size or limit, limit)
        if len(queue) >= size:
            return Take(count=size)
        start_by_ns = min(visit.arrived_ns for visit in queue) + self.wait_ns
        return Take(count=len(queue)) if now_ns >= start_by_ns else Take(count=0, wait_until_ns=start_by_ns)
