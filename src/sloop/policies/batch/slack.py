"""Wait for a fuller batch only while the tightest waiting visit can afford a full one.

Start when slack ≤ cost of a full batch + guard. Fails when the believed cost is too low by more
than the guard: then every batch head is late by design, because each starts at the last believed moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import Take
from sloop.policies.bounds import at_least
from sloop.units import ms
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Slack:
    """`guard_ns` is kept back for transport and for the belief's error."""

    guard_ns: int = ms(20)

    def __post_init__(self) -> None:
        at_least("guard_ns", self.guard_ns, 0)

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
        tightest_ns = min(visit.deadline_ns for visit in queue)
        start_by_ns = tightest_ns - remaining_ns - costs_ns[limit] - self.guard_ns
        return Take(count=len(queue)) if now_ns >= start_by_ns else Take(count=0, wait_until_ns=start_by_ns)
