"""Expect a bad second of the recent past: a high percentile of its seconds' rates.

Atoll's request-rate mode takes the P99 of the arrival rate over a window (FlashPoint specification, section 2.13).
Fails on a step, which has to last for a hundredth of the window before it is seen, and on cost for a window after it.
"""

from dataclasses import dataclass
from math import ceil

from sloop.core.views import Traffic
from sloop.policies.bounds import above, within
from sloop.solvers.seconds import seconds_rps
from sloop.units import s


@dataclass(frozen=True, slots=True)
class P99Rate:
    """The least rate that `share` of the seconds within the last `window_ns` did not exceed."""

    share: float = 0.99
    window_ns: int = s(60)

    def __post_init__(self) -> None:
        within("share", self.share, 0, 1)
        above("window_ns", self.window_ns, 0)

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        window = ingress.window(self.window_ns)
        rates = sorted(seconds_rps([bucket.arrivals for bucket in window], ingress.bucket_ns))
        return rates[ceil(self.share * len(rates)) - 1] if rates else 0.0
