"""Expect an exponentially weighted mean of the past: the older an interval, the less it counts.

Computed from the monitoring buckets each time, so there is no memory to go stale. Fails on a step, which it
approaches only at the pace of its half-life, upwards as well as downwards.
"""

from dataclasses import dataclass

from sloop.core.views import Traffic
from sloop.policies.bounds import above
from sloop.units import NS_PER_S, s


@dataclass(frozen=True, slots=True)
class Ewma:
    """An interval counts half as much as one that is `half_life_ns` younger."""

    half_life_ns: int = s(10)

    def __post_init__(self) -> None:
        above("half_life_ns", self.half_life_ns, 0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        decay = 0.5 ** (ingress.bucket_ns / self.half_life_ns)
        weighted, weights = 0.0, 0.0
        for bucket in ingress.buckets:  # oldest first, so every step ages all that came before
            weighted = weighted * decay + bucket.arrivals
            weights = weights * decay + 1.0
        return weighted * NS_PER_S / (weights * ingress.bucket_ns) if weights else 0.0
