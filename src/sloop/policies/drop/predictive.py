"""Give up a visit that could not be answered in time even if it started now, alone.

What cannot be served in time makes room for what can. Fails when the believed cost is too
high: visits are given up that would have made it; `trust` below 1 gives them the benefit of the doubt.
"""

from dataclasses import dataclass

from sloop.policies.bounds import at_least
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Predictive:
    """Hopeless when `now + trust × cost > deadline`."""

    trust: float = 1.0

    def __post_init__(self) -> None:
        at_least("trust", self.trust, 0)

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        return self.trust * cost_ns > visit.deadline_ns - now_ns
