"""The queueing model of FA2, IPA and Biscale: how long a batch takes to fill, and how many replicas keep up.

Source: Razavi et al., FA2 (RTAS 2022), section on the queueing model; IPA and Biscale use the same. It gives the worst
case for *evenly spaced* arrivals; under Poisson arrivals, fill times and queues sometimes exceed it.
"""

import math
from typing import Final

from sloop.units import ROUNDING, ms

WAIT_FACTOR: Final = 2.0
"""A batch may wait this many times its expected fill time, because real arrivals are not even."""
WAIT_SHARE: Final = 4
"""A batch may wait at most the SLO divided by this."""


def fill_ms(batch: int, rate_rps: float) -> float:
    """q(b) = 1000 (b - 1)/λ: milliseconds that the first request of a batch waits for the others.

    0 at a rate of 0; callers must then choose a batch of 1.
    """
    return 1000.0 * (batch - 1) / rate_rps if rate_rps > 0 else 0.0


def patience_ns(fill_ms: float, slo_ns: int) -> int:
    """The longest wait, in ns, for a batch with the expected fill time `fill_ms`."""
    return min(ms(WAIT_FACTOR * fill_ms), slo_ns // WAIT_SHARE)


def replicas_needed(rate_rps: float, batch: int, latency_ms: float) -> int:
    """n = max(1, ⌈λ d(b)/(1000 b)⌉): the fewest replicas that keep up with λ in batches of `latency_ms`."""
    return max(1, math.ceil(rate_rps * latency_ms / (1000.0 * batch) - ROUNDING))
