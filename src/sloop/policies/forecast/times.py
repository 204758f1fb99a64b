"""Expect a multiple of what came last.

A margin in its simplest form, k·LV (AsyFunc specification, section 2.6).
Fails on cost, which it multiplies at every load, and on any step of more than its factor.
"""

from dataclasses import dataclass

from sloop.core.views import Traffic
from sloop.policies.bounds import TIMES_MAX, above, within
from sloop.units import s


@dataclass(frozen=True, slots=True)
class Times:
    """`factor` times the mean arrival rate over the last `window_ns`."""

    factor: float = 1.2
    window_ns: int = s(1)

    def __post_init__(self) -> None:
        within("factor", self.factor, 0, TIMES_MAX)
        above("window_ns", self.window_ns, 0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return self.factor * ingress.rate_rps(self.window_ns)
