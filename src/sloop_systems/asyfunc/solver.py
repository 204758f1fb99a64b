"""Batches that are chosen beforehand: BATCH (Ali et al., SC 2020) as AsyFunc compares with it, section 5.1 of our
specification. Functions of numbers; milliseconds, requests per second.

AsyFunc's own choices, of bodies and of shadows, are in `sloop.solvers.bodies`.
"""

from collections.abc import Sequence
from math import exp
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sloop.api import ROUNDING, at_least


class StaticBatching(NamedTuple):
    """One configuration of equal replicas for a whole trace."""

    cores: int
    batch: int
    wait_ms: float
    """A batch starts when it is full, or when its first request has waited this long."""
    core_ms: float
    """What a request costs."""


def in_time_share(latency_ms: Sequence[float], batch: int, wait_ms: float, rate_rps: float, slo_ms: float) -> float:
    """The share of requests that keep the SLO if Poisson arrivals are batched, on a replica that is always free.

    A batch has 1 + Poisson(rate · wait) requests, at most `batch`. The waiting time of each is uniformly distributed
    over the time in which the batch fills (section 5.1). `latency_ms` is by batch from 0.
    """
    expected = rate_rps * wait_ms / 1e3
    chance, left, kept, requests = exp(-expected), 1.0, 0.0, 0.0
    for size in range(1, batch + 1):
        own = chance if size < batch else left
        left -= chance
        chance *= expected / size
        full_ms = 1e3 * (batch - 1) / rate_rps if rate_rps else 0.0
        fills_ms = wait_ms if size < batch else min(wait_ms, full_ms)
        spare_ms = slo_ms - latency_ms[size]
        within = 1.0 if at_least(spare_ms, fills_ms) else max(0.0, spare_ms / fills_ms) if fills_ms else 0.0
        kept += own * size * within
        requests += own * size
    return kept / requests


def mean_batch(batch: int, wait_ms: float, rate_rps: float) -> float:
    """The mean number of requests in a batch."""
    expected = rate_rps * wait_ms / 1e3
    chance, left, mean = exp(-expected), 1.0, 0.0
    for size in range(1, batch):
        mean += chance * size
        left -= chance
        chance *= expected / size
    return mean + left * batch


def choose_batching(
    latency_ms: NDArray[np.float64], rate_rps: float, slo_ms: float, share: float = 0.95, step_ms: float = 10.0
) -> StaticBatching | None:
    """The configuration with the least core time per request that keeps the SLO for this share of the requests; None if
    there is none. Of equal ones, the one with the fewest cores.

    What BATCH does offline (Ali et al., SC 2020), as AsyFunc compares with it: section 5.1. `latency_ms[c, b]` from 0
    cores and 0 rows; waits are multiples of `step_ms`.
    """
    best: StaticBatching | None = None
    for cores in range(1, latency_ms.shape[0]):
        own_ms = [float(each) for each in latency_ms[cores]]
        for batch in range(1, latency_ms.shape[1]):
            for steps in range(1, int((slo_ms + ROUNDING) // step_ms) + 1):
                wait_ms = steps * step_ms
                rows = mean_batch(batch, wait_ms, rate_rps)
                whole = min(int(rows), batch - 1)
                took_ms = own_ms[whole] + (rows - whole) * (own_ms[whole + 1] - own_ms[whole])
                cost = cores * took_ms / rows
                if best is not None and cost >= best.core_ms * (1 - ROUNDING):
                    continue
                if at_least(in_time_share(own_ms, batch, wait_ms, rate_rps, slo_ms), share):
                    best = StaticBatching(cores, batch, wait_ms, cost)
    return best
