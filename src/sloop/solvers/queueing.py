"""How long a batch waits to fill, and how many replicas keep up: the queueing model that FA2, IPA and Biscale share.

Razavi et al., FA2 (RTAS 2022), section on the queueing model; IPA and Biscale (dissertation P3, P4) take it over. It
is the worst case of *evenly spaced* arrivals: under Poisson arrivals fill time and backlog exceed it now and then.
"""

import math
from typing import Final

from sloop.units import ms

EPSILON: Final = 1e-9
"""λ is a sum of floats: so little above a whole number of replicas does not cost one more."""

WAIT_FACTOR: Final = 2.0
"""A batch is worth waiting for so many times the time in which it should fill."""
WAIT_SHARE: Final = 4
"""And at most for this part of the SLO."""


def fill_ms(batch: int, rate_rps: float) -> float:
    """q(b) = 1000 (b - 1)/λ: what the first of a batch waits for the others, in milliseconds.

    0 without arrivals, where nobody waits; whoever chooses a batch must then choose 1.
    """
    return 1000.0 * (batch - 1) / rate_rps if rate_rps > 0 else 0.0


def patience_ns(fill_ms: float, slo_ns: int) -> int:
    """How long a batch is worth waiting for that should fill within `fill_ms`: real arrivals are not even."""
    return min(ms(WAIT_FACTOR * fill_ms), slo_ns // WAIT_SHARE)


def replicas_needed(rate_rps: float, batch: int, latency_ms: float) -> int:
    """n = max(1, ⌈λ d(b)/(1000 b)⌉): the fewest replicas that keep up with λ in batches of `latency_ms`."""
    return max(1, math.ceil(rate_rps * latency_ms / (1000.0 * batch) - EPSILON))
