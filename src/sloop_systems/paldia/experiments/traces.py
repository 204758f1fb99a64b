"""Generated loads in place of those of PALDIA's evaluation, whose traces are not accessible (specification, section 4).

A load is the number of requests in each second, which arrive together as one group, because PALDIA's percentages
are those of requests that arrive in groups of several batches (specification, 6.2). All shapes are fitted to what the
publication says about its traces: length, mean, peak, and the fraction of the load that is in the surge. `recorded` is
another Twitter trace, from public data.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from sloop.api import NS_PER_S, ms, s
from sloop.api.experiments import Trace, seed_of, stream, trace_of
from sloop_systems.comparison.twitter import tweets_of

AZURE_S: Final = 1500
AZURE_PEAK_TO_MEAN: Final = 673 / 55
"""Of the published sample."""
WIKI_DAYS, WIKI_DAY_S = 5, 300
TWITTER_S: Final = 5400
FLAT_S, CONSTANT_S = 600, 300
"""Shorter than published, because the load repeats itself, and half a million requests suffice."""
RECORDED, RECORDED_LATER = "recorded", "recorded, later"
RECORDED_S: Final = {RECORDED: (1_300_800, 1_302_600), RECORDED_LATER: (1_308_000, 1_309_800)}
"""Two half hours of Twitter, calm except for a burst, from which IPA's excerpts `bursty` and `fluctuating` are."""
CLUMP_AT_NS: Final = ms(1)
"""When in its second a group arrives: shortly after the monitor has closed the second before."""


def wandering(count: int, keep: float, noise: float, rng: Random) -> list[float]:
    """An autoregressive series: each value is `keep` of the one before, and a normal step."""
    values, value = [], 0.0
    for _ in range(count):
        values.append(value)
        value = keep * value + rng.gauss(0.0, noise)
    return values


def _trapezoid(at: float, centre: float, height: float, ramp: float, plateau: float) -> float:
    away = abs(at - centre) - plateau / 2
    return height if away <= 0 else max(0.0, height * (1 - away / ramp))


def _scaled(base: Sequence[float], rate: Callable[[float, int], float], mean: float) -> list[float]:
    """The rates for the factor on `base` with which they have this mean, by bisection."""
    low, high = 0.0, mean * len(base) / max(1e-9, min(base))
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (low, middle) if _mean(rate, middle, len(base)) > mean else (middle, high)
    return [rate(low, at) for at in range(len(base))]


def _mean(rate: Callable[[float, int], float], factor: float, count: int) -> float:
    return sum(rate(factor, at) for at in range(count)) / count


@cache
def azure_rates(peak_rps: float, seed: int, ramp_s: float = 20.0) -> tuple[float, ...]:
    """25 minutes at a low rate, with a surge to the peak of about 20 s and two wide bumps."""
    rng = stream(seed, "paldia/azure")
    wander = wandering(AZURE_S, 0.98, 0.05, rng)
    base = [math.exp(value) * (1 + 0.3 * math.sin(2 * math.pi * at / 600)) for at, value in enumerate(wander)]
    raised = [
        max(
            _trapezoid(at, 0.55 * AZURE_S, peak_rps, ramp_s, 8),
            _trapezoid(at, 0.2 * AZURE_S, 0.3 * peak_rps, 60, 40),
            _trapezoid(at, 0.8 * AZURE_S, 0.4 * peak_rps, 60, 30),
        )
        for at in range(AZURE_S)
    ]
    rates = _scaled(
        base, lambda factor, at: min(peak_rps, max(factor * base[at], raised[at])), peak_rps / AZURE_PEAK_TO_MEAN
    )
    return tuple(rates)


@cache
def wiki_rates(peak_rps: float, _seed: int) -> tuple[float, ...]:
    """Five days, 300 s each, of which two thirds have high traffic."""
    shape = []
    for at in range(WIKI_DAYS * WIKI_DAY_S):
        hour = 24 * (at % WIKI_DAY_S) / WIKI_DAY_S
        day = 0.3 + 0.7 / (1 + math.exp(-2 * (hour - 4))) / (1 + math.exp(2 * (hour - 20)))
        shape.append(day * (1 + 0.08 * math.sin(2 * math.pi * hour / 6)))
    return tuple(0.93 * peak_rps * value / max(shape) for value in shape)


@cache
def twitter_rates(mean_rps: float, seed: int) -> tuple[float, ...]:
    """90 minutes, dense and erratic, with spikes that fade."""
    rng = stream(seed, "paldia/twitter")
    wander, spike, shape = wandering(TWITTER_S, 0.97, 0.1, rng), 0.0, []
    for value in wander:
        if rng.random() < 0.01:
            spike = rng.uniform(0.5, 1.6)
        shape.append(math.exp(0.8 * value) * (1 + spike))
        spike *= 0.93
    scale = mean_rps * len(shape) / sum(shape)
    return tuple(scale * value for value in shape)


@cache
def flat_rates(mean_rps: float, _seed: int) -> tuple[float, ...]:
    """A steady load that goes up and down by 12 % once (figure 1)."""
    return tuple(mean_rps * (1 + 0.12 * math.sin(2 * math.pi * at / FLAT_S)) for at in range(FLAT_S))


def constant_rates(mean_rps: float, _seed: int) -> tuple[float, ...]:
    """The same rate all the time (figure 13a)."""
    return (mean_rps,) * CONSTANT_S


RATES: Final[Mapping[str, Callable[[float, int], tuple[float, ...]]]] = {
    "azure": azure_rates,
    "azure, steep": partial(azure_rates, ramp_s=5.0),
    "wiki": wiki_rates,
    "twitter": twitter_rates,
    "flat": flat_rates,
    "constant": constant_rates,
}


@cache
def recorded_rates(mean_rps: float, data: str, name: str = RECORDED) -> tuple[float, ...]:
    """The tweets of each second, scaled to this mean; none if the public data is not there."""
    tweets = tweets_of(Path(data), *RECORDED_S[name]) if data else None
    if not tweets:
        return ()
    return tuple(mean_rps * len(tweets) * count / sum(tweets) for count in tweets)


def rates_of(name: str, rps: float, seed: int, *, data: str = "") -> tuple[float, ...]:
    """The rate of each second of a load, whose peak (`twitter`, recorded and steady ones: mean) is `rps`. Without
    public data, the recorded ones are as `twitter`."""
    if name in RECORDED_S:
        return recorded_rates(rps, data, name) or twitter_rates(rps, seed)
    return RATES[name](rps, seed)


@cache
def counts_of(name: str, rps: float, seed: int, data: str = "") -> tuple[int, ...]:
    """Requests in each second: Poisson with the rates of a load."""
    drawn = np.random.default_rng(seed_of(seed, f"paldia/{name}/counts")).poisson(rates_of(name, rps, seed, data=data))
    return tuple(map(int, drawn))


def clumps(name: str, rps: float, seed: int, *, poisson: bool = False, data: str = "") -> Trace:
    """The load with all requests of a second at one instant or, with `poisson`, each at a time of its own, so that they
    are a Poisson process."""
    counts = counts_of(name, rps, seed, data)
    times_ns = [at * NS_PER_S + CLUMP_AT_NS for at, count in enumerate(counts) for _ in range(count)]
    if poisson:
        offsets = np.random.default_rng(seed_of(seed, f"paldia/{name}/times")).integers(0, NS_PER_S, len(times_ns))
        times_ns = sorted(
            int(at_ns // NS_PER_S * NS_PER_S + offset) for at_ns, offset in zip(times_ns, offsets, strict=True)
        )
    is_recorded = name in RECORDED_S and bool(recorded_rates(rps, data, name))
    shape = "measured: Twitter stream 2021-08, scaled" if is_recorded else f"assumed: shaped as PALDIA describes {name}"
    provenance = f"{shape}, {'a Poisson process' if poisson else 'one clump a second'}, seed {seed}"
    return trace_of(times_ns, duration_ns=s(len(counts)), name=name, provenance=provenance)
