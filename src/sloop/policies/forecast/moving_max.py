"""Expect the busiest interval of the recent past again.

Errs on the safe side: scales out at once, in only when the peak has left the horizon (Biscale's `max10`). Fails on
cost after a lone peak, which it pays for during the whole horizon.
"""

from dataclasses import dataclass

from sloop.core.views import Traffic
from sloop.policies.bounds import above, at_least
from sloop.units import NS_PER_S, s


@dataclass(frozen=True, slots=True)
class MovingMax:
    """The largest mean rate over any `window_ns` within the last `horizon_ns`."""

    horizon_ns: int = s(10)
    window_ns: int = s(1)

    def __post_init__(self) -> None:
        above("window_ns", self.window_ns, 0)
        at_least("horizon_ns", self.horizon_ns, self.window_ns)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        counts = [bucket.arrivals for bucket in ingress.window(self.horizon_ns)]
        if not counts:
            return 0.0
        width = min(len(counts), max(1, self.window_ns // ingress.bucket_ns))
        sums = (sum(counts[start : start + width]) for start in range(len(counts) - width + 1))
        return max(sums) * NS_PER_S / (width * ingress.bucket_ns)
