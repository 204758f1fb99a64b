"""Statistics of a trace: rate, peaks, burstiness, autocorrelation, silence.

They are computed from counts per second and from the gaps between arrivals, in one walk each, so that long traces fit
into memory, and from exact integer sums, so that they are equal on every machine.
"""

from array import array
from itertools import groupby
from math import sqrt
from operator import mul, sub

import numpy as np
from msgspec import Struct

from sloop.quantities import quantile
from sloop.units import to_s
from sloop.workload.trace import Trace

LAGS_S = (1, 10, 60, 600)


class Statistics(Struct, frozen=True):
    """Statistics of a trace; None where one is undefined, such as the variation of no gaps."""

    name: str
    provenance: str
    duration_s: float
    requests: int
    mean_rps: float
    p50_rps: int
    p99_rps: int
    max_rps: int
    peak_to_mean: float | None
    dispersion: float | None
    """Variance over mean of the counts per second: 1 for Poisson, more for bursts."""
    gap_cv: float | None
    """Coefficient of variation of the gaps between arrivals: 1 for Poisson, 0 for equally spaced."""
    acf: dict[int, float]
    """Autocorrelation of the counts per second, by lag in seconds."""
    zeros: int
    """Seconds without an arrival."""
    longest_silence_s: int

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values for people."""
        return [
            ("trace", self.name),
            ("from", self.provenance),
            ("duration", f"{self.duration_s:,.3f} s"),
            ("requests", f"{self.requests:,}"),
            ("mean rate", f"{self.mean_rps:,.3f} rps"),
            ("p50 / p99 / max", f"{self.p50_rps:,} / {self.p99_rps:,} / {self.max_rps:,} rps"),
            ("peak to mean", _figure(self.peak_to_mean)),
            ("index of dispersion", _figure(self.dispersion)),
            ("CV of gaps", _figure(self.gap_cv)),
            *((f"autocorrelation, {lag} s", _figure(value)) for lag, value in self.acf.items()),
            ("seconds without arrival", f"{self.zeros:,} (longest run {self.longest_silence_s:,} s)"),
        ]


def statistics(trace: Trace) -> Statistics:
    """The statistics of a trace, which is walked twice."""
    counts = trace.counts_per_s()
    requests = sum(counts)
    ranked = sorted(counts)
    mean, variance = _moments(sum(counts), sum(map(mul, counts, counts)), len(counts))
    duration_s = to_s(trace.duration_ns)
    silences = [sum(1 for _ in run) for silent, run in groupby(counts, key=lambda count: count == 0) if silent]
    return Statistics(
        name=trace.name,
        provenance=trace.provenance,
        duration_s=duration_s,
        requests=requests,
        mean_rps=round(requests / duration_s, 6) if duration_s else 0.0,
        p50_rps=quantile(ranked, 0.50) if ranked else 0,
        p99_rps=quantile(ranked, 0.99) if ranked else 0,
        max_rps=ranked[-1] if ranked else 0,
        peak_to_mean=round(ranked[-1] / mean, 6) if mean else None,
        dispersion=round(variance / mean, 6) if mean else None,
        gap_cv=_gap_cv(trace),
        acf={lag: value for lag in LAGS_S if (value := autocorrelation(counts, lag)) is not None},
        zeros=sum(silences),
        longest_silence_s=max(silences, default=0),
    )


def autocorrelation(counts: "array[int]", lag: int) -> float | None:
    """Sample autocorrelation at `lag` steps, in [-1, 1]; None where it is undefined or the series is under 2 lags."""
    if len(counts) < 2 * lag or lag < 1:
        return None
    centred = np.frombuffer(counts, dtype=np.int64) - sum(counts) / len(counts)
    power = float(np.dot(centred, centred))
    return round(float(np.dot(centred[:-lag], centred[lag:])) / power, 6) if power else None


def _gap_cv(trace: Trace) -> float | None:
    number = total = squares = 0
    last: int | None = None
    for block in trace.blocks():
        if not block:
            continue
        if last is not None:
            block = [last, *block]  # noqa: PLW2901  # the gap between blocks counts too
        gaps = list(map(sub, block[1:], block))
        number += len(gaps)
        total += sum(gaps)
        squares += sum(map(mul, gaps, gaps))
        last = block[-1]
    mean, variance = _moments(total, squares, number)
    return round(sqrt(variance) / mean, 6) if mean else None


def _moments(total: int, squares: int, number: int) -> tuple[float, float]:
    """Mean and population variance from exact integer sums."""
    if number == 0:
        return 0.0, 0.0
    return total / number, (squares * number - total * total) / (number * number)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
