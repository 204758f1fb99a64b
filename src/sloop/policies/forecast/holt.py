"""Expect the present level and trend to go on.

Holt's double exponential smoothing over seconds (C. C. Holt, 1957; the Paldia specification, section 2.2, looks 4 s
ahead). Ahead of a ramp where others lag; fails after a step, whose slope it takes for a trend and overshoots.
"""

from dataclasses import dataclass

from sloop.core.views import Traffic
from sloop.policies.bounds import at_least, within
from sloop.solvers.seconds import seconds_rps
from sloop.units import s, to_s


@dataclass(frozen=True, slots=True)
class Holt:
    """The level and trend after every second seen, `horizon_ns` from now, never below zero.

    A second moves the level by `level` of what it differed from expectation, and the trend by `trend` of that move.
    """

    level: float = 0.5
    trend: float = 0.1
    horizon_ns: int = s(4)

    def __post_init__(self) -> None:
        within("level", self.level, 0, 1)
        within("trend", self.trend, 0, 1)
        at_least("horizon_ns", self.horizon_ns, 0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        rates = seconds_rps([bucket.arrivals for bucket in ingress.buckets], ingress.bucket_ns)
        if not rates:
            return 0.0
        level, trend = rates[0], 0.0
        for rate in rates[1:]:
            before = level
            level += trend + self.level * (rate - level - trend)
            trend += self.trend * (level - before - trend)
        return max(0.0, level + trend * to_s(self.horizon_ns))
