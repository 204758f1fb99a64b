"""Wait for a full batch: as long as the plan counts on, some patience more, and not so long that the tightest is late.

What FA2, IPA, Biscale and the systems they are compared with suppose, whose plans count on full batches and on the time
in which they fill. Published without any end to the waiting (`forever`), so that a stream which stops strands what is
left. The time counts from the oldest arrival at the stage; without a plan's word nobody waits. Fails where arrivals
fall behind what the plan supposed: then every batch pays the whole wait and still is not full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import Take
from sloop.policies.bounds import at_least
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Full:
    """Batches as large as the plan allows, at the latest `patience` times the plan's wait after the oldest came."""

    patience: float = 2.0
    forever: bool = False

    def __post_init__(self) -> None:
        at_least("patience", self.patience, 0)

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
        if self.forever:
            return Take(count=0)
        tightest_ns = min(visit.deadline_ns for visit in queue) - remaining_ns - costs_ns[limit]
        patient_ns = min(visit.arrived_ns for visit in queue) + round(self.patience * wait_ns)
        start_by_ns = min(patient_ns, tightest_ns)
        return Take(count=len(queue)) if now_ns >= start_by_ns else Take(count=0, wait_until_ns=start_by_ns)
