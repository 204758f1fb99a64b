"""A sample: what is kept of the runs of one batch size on one core count, and how it is made of their durations.

Promises that the mean and the P99 of the runs survive. Knows nothing of where the durations come from: a stopwatch, or
a live run's log.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from msgspec import Struct

from sloop.units import NS_PER_MS

LIKELY: Final = 64
"""How many durations stand for a cell's runs: enough to keep their P99, and a power of two, which is drawn quickly."""


class Sample(Struct, frozen=True, forbid_unknown_fields=True):
    """One cell that was measured: `n` runs of a batch on `cores`."""

    batch: int
    cores: float
    p50_ms: float
    p99_ms: float
    n: int
    likely_ms: tuple[float, ...] = ()
    """Equally likely durations, ascending, that stand for all runs: each is the mean of its share of them, so that
    their mean is the runs'. Empty where only the percentiles are known."""


def sample_of(batch: int, cores: float, runs_ns: Sequence[int]) -> Sample:
    """What is kept of a cell's runs, durations rounded to microseconds."""
    ordered_ms = [run_ns / NS_PER_MS for run_ns in sorted(runs_ns)]
    return Sample(
        batch=batch,
        cores=cores,
        p50_ms=percentile(ordered_ms, 50),
        p99_ms=percentile(ordered_ms, 99),
        n=len(ordered_ms),
        likely_ms=tuple(round(value, 3) or 0.001 for value in likely(ordered_ms, LIKELY)),
    )


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile of ascending values."""
    return ordered[(percent * len(ordered) + 99) // 100 - 1]


def likely(ordered: Sequence[float], count: int) -> list[float]:
    """The means of `count` equal parts of ascending values, a value on a border counting to both sides by its share."""
    sums = (0.0, *accumulate(ordered))

    def below(place: float) -> float:
        whole = int(place)
        return sums[whole] + (place - whole) * ordered[whole] if whole < len(ordered) else sums[-1]

    borders = [below(part * len(ordered) / count) for part in range(count + 1)]
    return [(after - before) * count / len(ordered) for before, after in pairwise(borders)]
