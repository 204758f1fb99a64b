"""Wait for a full batch, but no longer than the plan in force finds worth waiting for.

What FA2, IPA and Biscale suppose: a plan counts on full batches, and on the time in which they fill. The time counts
from the oldest queued arrival at the stage. Without a plan's word nobody waits. Fails where arrivals fall behind what
the plan supposed: then every batch pays the whole wait and still is not full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.seams import Take
from sloop.policies.bounds import at_least
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Planned:
    """Batches as large as the plan allows, at the latest `patience` times the plan's wait after the oldest arrival."""

    patience: float = 1.0

    def __post_init__(self) -> None:
        at_least("patience", self.patience, 0)

    def decide(
        self, now_ns: int, queue: Sequence[Visit], limit: int, costs_ns: Sequence[int], wait_ns: int = 0
    ) -> Take:
        if len(queue) >= limit:
            return Take(count=limit)
        start_by_ns = min(visit.arrived_ns for visit in queue) + round(self.patience * wait_ns)
        return Take(count=len(queue)) if now_ns >= start_by_ns else Take(count=0, wait_until_ns=start_by_ns)
