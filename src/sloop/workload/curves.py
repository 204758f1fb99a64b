"""Poisson arrivals whose rate changes: steps, ramps, the time of day, square bursts.

Each class is one rate curve. Arrivals are drawn second by second by thinning (Lewis and Shedler 1979): candidates at
the second's peak rate, each kept with probability rate/peak. Exact, because a Poisson process has no memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from random import Random
from typing import Protocol

from sloop.errors import InputError
from sloop.options import Limits, limited
from sloop.units import NS_PER_S, to_s
from sloop.workload.spread import poisson_ns
from sloop.workload.trace import NOT_NEGATIVE, POSITIVE, RATE


class Curve(Protocol):
    """A rate over time."""

    def rate_rps(self, at_s: float) -> float:
        """The rate at an instant."""
        ...

    def peak_rps(self, second: int) -> float:
        """No rate in `[second, second + 1]` is above this."""
        ...


def curve_blocks(curve: Curve, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
    """One block of Poisson arrivals for each second, sorted ns offsets from 0."""
    for second in range(-(-duration_ns // NS_PER_S)):
        peak = curve.peak_rps(second)
        start_ns = second * NS_PER_S
        block = [start_ns + offset for offset in poisson_ns(rng, peak)]
        kept = [at_ns for at_ns in block if rng.random() * peak < curve.rate_rps(to_s(at_ns))]
        yield kept if start_ns + NS_PER_S <= duration_ns else [at_ns for at_ns in kept if at_ns < duration_ns]


@dataclass(frozen=True, slots=True)
class Step:
    """The rates in turn, each for `each_s` seconds; the last one stays."""

    rates: tuple[float, ...] = limited(limits=RATE)
    each_s: float = limited(limits=POSITIVE)

    def rate_rps(self, at_s: float) -> float:
        return self.rates[min(int(at_s / self.each_s), len(self.rates) - 1)]

    def peak_rps(self, second: int) -> float:
        last = len(self.rates) - 1
        first = min(int(second / self.each_s), last)
        return max(self.rates[first : min(int((second + 1) / self.each_s), last) + 1])

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return curve_blocks(self, rng, duration_ns)


@dataclass(frozen=True, slots=True)
class Ramp:
    """From `rate` in a straight line to `end_rate` within `ramp_s` seconds, then level."""

    rate: float = limited(limits=RATE)
    end_rate: float = limited(limits=RATE)
    ramp_s: float = limited(limits=POSITIVE)

    def rate_rps(self, at_s: float) -> float:
        return self.rate + (self.end_rate - self.rate) * min(at_s / self.ramp_s, 1.0)

    def peak_rps(self, second: int) -> float:
        return max(self.rate_rps(second), self.rate_rps(second + 1))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return curve_blocks(self, rng, duration_ns)


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A sinusoid about `rate`: lowest at the start (night), highest half a period later.

    `swing` is the amplitude as a fraction of the mean; `phase_s` starts the trace that much later in the day.
    """

    rate: float = limited(limits=RATE)
    swing: float = limited(0.5, limits=Limits(least=0, most=1.0))
    period_s: float = limited(86_400.0, limits=POSITIVE)
    phase_s: float = limited(0.0, limits=NOT_NEGATIVE)

    def rate_rps(self, at_s: float) -> float:
        return self.rate * (1.0 - self.swing * cos(2.0 * pi * (at_s + self.phase_s) / self.period_s))

    def peak_rps(self, second: int) -> float:
        begin = (second + self.phase_s) / self.period_s
        end = (second + 1 + self.phase_s) / self.period_s
        noon_inside = int(end + 0.5) > int(begin + 0.5)
        if noon_inside:
            return self.rate * (1.0 + self.swing)
        return max(self.rate_rps(second), self.rate_rps(second + 1))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return curve_blocks(self, rng, duration_ns)


@dataclass(frozen=True, slots=True)
class Square:
    """`burst_rate` for the first `burst_s` seconds of every `period_s`, `rate` for the rest."""

    rate: float = limited(limits=RATE)
    burst_rate: float = limited(limits=RATE)
    period_s: float = limited(limits=POSITIVE)
    burst_s: float = limited(limits=POSITIVE)

    def __post_init__(self) -> None:
        if self.burst_s > self.period_s:
            raise InputError(
                f"burst_s {self.burst_s:g} is longer than period_s {self.period_s:g}", help="make the period longer"
            )

    def rate_rps(self, at_s: float) -> float:
        return self.burst_rate if at_s % self.period_s < self.burst_s else self.rate

    def peak_rps(self, second: int) -> float:
        inside_one_phase = self.period_s > 1.0 and second % self.period_s + 1.0 < self.period_s
        if inside_one_phase:
            into_s = second % self.period_s
            if into_s >= self.burst_s:
                return self.rate
            if into_s + 1.0 < self.burst_s:
                return self.burst_rate
        return max(self.rate, self.burst_rate)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return curve_blocks(self, rng, duration_ns)
