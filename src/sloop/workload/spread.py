"""Where inside its second an arrival falls, for traces that only count requests per second.

A second's arrivals lie at or after its start, and walks with equal generators are equal. The options are those of the
Sponge specification, section 4.1, and `early` is that of the IPA specification, section 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from itertools import accumulate
from math import log
from random import Random
from typing import Any

from sloop.units import NS_PER_S


class Spread(StrEnum):
    """How the arrivals of one second are spread over it; n is the count of the second."""

    UNIFORM = "uniform"
    """Exactly n, at independent uniform offsets: a Poisson process that happens to count n."""
    EQUAL = "equal"
    """Exactly n, equally spaced from the start of the second."""
    POISSON = "poisson"
    """n is a mean rate, and may have a fraction: a Poisson-distributed number of arrivals."""
    BURST = "burst"
    """Exactly n, each at an exponential offset from the start of the second: a burst, then silence."""
    EARLY = "early"
    """Exactly n, one after another with exponential gaps of mean 1/(1.5 n) s: most in the second's first two thirds."""


def uniform_ns(rng: Random, count: int) -> list[int]:
    """`count` independent uniform offsets in one second, sorted, in ns."""
    random = rng.random
    return sorted([int(random() * NS_PER_S) for _ in range(count)])


def equal_ns(count: int) -> list[int]:
    """`count` equally spaced offsets in one second, the first at its start, in ns."""
    return [place * NS_PER_S // count for place in range(count)]


def poisson_ns(rng: Random, rate_rps: float, span_ns: int = NS_PER_S) -> list[int]:
    """A Poisson process of `rate_rps` over one second, or the first part of it: sorted offsets in ns."""
    if rate_rps <= 0:
        return []
    random = rng.random
    offsets: list[int] = []
    gap_ns = -NS_PER_S / rate_rps
    at_ns = gap_ns * log(1.0 - random())
    while at_ns < span_ns:
        offsets.append(int(at_ns))
        at_ns += gap_ns * log(1.0 - random())
    return offsets


def burst_ns(rng: Random, count: int, *, mean_ms: float) -> list[int]:
    """`count` exponential offsets from the start of a second, sorted, in ns; few may lie beyond its end.

    Independent, not cumulative: this is what Sponge's load generator does (specification 4.1), so that a second's
    requests come as one burst.
    """
    random = rng.random
    mean_ns = -mean_ms * (NS_PER_S / 1000)
    return sorted([int(mean_ns * log(1.0 - random())) for _ in range(count)])


def early_ns(rng: Random, count: int) -> list[int]:
    """`count` offsets from the start of a second, their gaps exponential and of mean 1/(1.5 `count`) s, in ns; few may
    lie beyond its end. The load generator of IPA's and Biscale's artefacts (IPA specification 2.13)."""
    random = rng.random
    gap_ns = -NS_PER_S / (1.5 * max(1, count))
    return [int(at_ns) for at_ns in accumulate(gap_ns * log(1.0 - random()) for _ in range(count))]


def spread_counts(
    counts: Iterable[Any], spread: Spread, rng: Random, *, mean_ms: float, duration_ns: int
) -> Iterator[list[int]]:
    """Spread `counts[k]` requests over second k: one sorted block of ns offsets per second. Only for `poisson` may
    counts have fractions.

    Only `burst` and `early` can reach into later seconds; what would fall at or after `duration_ns` is cut off.
    """
    place = _placer(spread, rng, mean_ms=mean_ms)
    carried: list[int] = []
    start_ns = 0
    for count in counts:
        end_ns = min(start_ns + NS_PER_S, duration_ns)
        block = [start_ns + offset for offset in place(count)]
        if carried or (block and block[-1] >= end_ns):
            block = sorted(carried + block)
            carried = [at_ns for at_ns in block if at_ns >= end_ns]
            block = block[: len(block) - len(carried)]
        yield block
        start_ns = end_ns


def _placer(spread: Spread, rng: Random, *, mean_ms: float) -> Callable[[Any], list[int]]:
    if spread == Spread.EQUAL:
        return equal_ns
    if spread == Spread.POISSON:
        return partial(poisson_ns, rng)
    if spread == Spread.BURST:
        return partial(burst_ns, rng, mean_ms=mean_ms)
    if spread == Spread.EARLY:
        return partial(early_ns, rng)
    return partial(uniform_ns, rng)


def scaled_counts(counts: Iterable[int], factor: float) -> Iterator[int]:
    """Counts times `factor`. Fractions are carried forward, so that over time no request is lost or added."""
    owed = 0.0
    for count in counts:
        owed += count * factor
        whole = int(owed)
        owed -= whole
        yield whole


def counts_at(rate_rps: float, duration_ns: int) -> Iterator[int]:
    """A constant rate as whole counts per second whose running sum is `⌊seconds · rate⌋`."""
    seconds = -(-duration_ns // NS_PER_S)
    before = 0
    for second in range(seconds):
        until = int((second + 1) * rate_rps)
        yield until - before
        before = until
