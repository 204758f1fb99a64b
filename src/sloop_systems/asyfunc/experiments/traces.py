"""The requests of AsyFunc's evaluation: generated, because the recorded hour of Twitter is not public any more.

The publication replays a day of Twitter from the repository of BATCH. Only hourly fits of that day are public, without
its short bursts. So the rate of each second here is the product of the hourly rate, noise that changes every ten
seconds, and spikes, calibrated to the publication's Fig. 1; arrivals are Poisson.

Source: AsyFunc specification, section 4.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from statistics import fmean
from typing import Final

import numpy as np
from msgspec import Struct

from sloop.api import NS_PER_S
from sloop.api.experiments import Trace, poisson_ns, seed_of, stream, trace_of

HOURLY_RPS: Final = (
    35.1, 35.1, 38.3, 43.8, 60.3, 53.8, 59.1, 77.8, 66.4, 61.1, 52.6, 47.0,
    44.9, 57.3, 64.3, 47.9, 63.6, 45.1, 45.6, 47.4, 67.7, 47.8, 40.6, 38.4,
)  # fmt: skip
"""Means of the hourly fits."""
HOUR_S, DAY_S = 3600, 86_400
NOISE_S: Final = 10
PERSISTENCE, INNOVATION = 0.9, 0.07
"""Of the noise, an autoregressive process in the logarithm."""
NOON_S: Final = 12 * HOUR_S
"""Where short traces begin."""


class Spikes(Struct, frozen=True):
    """Short bursts: how long they are apart in the mean, how long each lasts and by which factor the rate rises, both
    uniform within these bounds."""

    gap_s: float = 45.0
    length_s: tuple[float, float] = (3.0, 10.0)
    factor: tuple[float, float] = (1.4, 2.2)

    def lower(self, height: float) -> "Spikes":
        """Spikes of this part of the height."""
        low, high = (1.0 + height * (each - 1.0) for each in self.factor)
        return Spikes(self.gap_s, self.length_s, (low, high))


USUAL: Final = Spikes()


@cache
def relative_rates(seed: int, seconds: int, first_s: int = NOON_S, spikes: Spikes = USUAL) -> tuple[float, ...]:
    """The rate of each second, from `first_s` of the day on; their mean is 1."""
    rates = tuple(_rates(stream(seed, "asyfunc/rates"), seconds, first_s, spikes))
    mean = fmean(rates)
    return tuple(rate / mean for rate in rates)


def _rates(rng: Random, seconds: int, first_s: int, spikes: Spikes) -> Iterator[float]:
    level, factor, end_s, next_s = 0.0, 1.0, 0.0, rng.expovariate(1 / spikes.gap_s)
    for second in range(seconds):
        if second % NOISE_S == 0:
            level = PERSISTENCE * level + rng.gauss(0.0, INNOVATION)
        if second >= next_s:
            factor, end_s = rng.uniform(*spikes.factor), second + rng.uniform(*spikes.length_s)
            next_s = end_s + rng.expovariate(1 / spikes.gap_s)
        hour, share = divmod((first_s + second) / HOUR_S, 1.0)
        before, after = (HOURLY_RPS[(int(hour) + step) % 24] for step in (0, 1))
        yield (before + share * (after - before)) * math.exp(level) * (factor if second < end_s else 1.0)


@cache
def counts_of_day(seed: int, mean_rps: float, spikes: Spikes = USUAL) -> tuple[int, ...]:
    """The requests in each second of a day."""
    rng = np.random.default_rng(seed_of(seed, "asyfunc/day"))
    rates = np.array(relative_rates(seed, DAY_S, 0, spikes))
    return tuple(map(int, rng.poisson(mean_rps * rates)))


def trace_at(rates_rps: Sequence[float], seed: int, name: str) -> Trace:
    """Poisson arrivals with the rate of each second."""
    rng = stream(seed, f"asyfunc/{name}")
    times_ns = (
        second * NS_PER_S + at_ns for second, rate in enumerate(rates_rps) for at_ns in poisson_ns(rng, rate)
    )  # fmt: skip
    provenance = f"assumed: generated after the hours of the Twitter trace, seed {seed}"
    return trace_of(times_ns, duration_ns=len(rates_rps) * NS_PER_S, name=name, provenance=provenance)
