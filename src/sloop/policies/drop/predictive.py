"""Give up a visit that could not be answered in time even if it started now, and met nothing but idle replicas.

What cannot be served in time makes room for what can. The time to come is that of the visit and of every stage still
ahead: alone, the least there can be; or in the plan's full batches, as Biscale's rule has it. Fails when the believed
cost is too high: visits are given up that would have made it; `trust` below 1 gives them the benefit of the doubt.
"""

from dataclasses import dataclass
from typing import Literal

from sloop.policies.bounds import at_least
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Predictive:
    """Hopeless when `now + trust × cost > deadline`; the cost is that in batches of one, or of the plan's size."""

    trust: float = 1.0
    batch: Literal["alone", "full"] = "alone"

    def __post_init__(self) -> None:
        at_least("trust", self.trust, 0)

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        left_ns = visit.deadline_ns - now_ns
        return self.trust * (cost_ns if self.batch == "alone" else full_ns) > left_ns
