"""Expect what came in the last interval.

What Sponge and FA2 do: purely reactive. Fails on a ramp, where it is always one interval behind.
"""

from dataclasses import dataclass

from sloop.core.views import Traffic
from sloop.policies.bounds import above
from sloop.units import s


@dataclass(frozen=True, slots=True)
class Last:
    """Mean arrival rate over the last `window_ns`."""

    window_ns: int = s(1)

    def __post_init__(self) -> None:
        above("window_ns", self.window_ns, 0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return ingress.rate_rps(self.window_ns)
