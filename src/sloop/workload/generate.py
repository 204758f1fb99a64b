"""Generated traces: one class per arrival process, whose fields are its options under `trace:` in a scenario.

One seed gives the same arrivals on every machine: they are drawn with plain Python floats from the stream `arrivals`.
Rates are requests per second. There are three families: renewal processes and bursts; Poisson processes whose rate
follows a curve, drawn by thinning (Lewis and Shedler 1979); and Markovian arrival processes, whose rate depends on a
hidden Markov chain (Neuts 1979), such as the matrices published with BATCH (SC'20).
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from enum import StrEnum
from functools import partial
from itertools import accumulate
from math import cos, log, pi
from random import Random
from typing import Annotated, Any, ClassVar, Final, Protocol

from sloop.errors import InputError
from sloop.options import Declared, Range, as_value, read_options
from sloop.streams import stream
from sloop.units import NS_PER_S, to_s
from sloop.workload.trace import BLOCK_ARRIVALS, NOT_NEGATIVE, POSITIVE, RATE, RATE_ABOVE_0, Trace

STREAM: Final = "arrivals"


class ArrivalProcess(Protocol):
    """A process that generates arrivals; its dataclass fields are its options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        """Sorted blocks of arrival times in `[0, duration_ns)`, in ns, each block later than the one before."""
        ...


class Spread(StrEnum):
    """Where in its second an arrival falls, for traces that give a count n for each second.

    Source: Sponge specification 4.1; `early` from IPA specification 2.13.
    """

    UNIFORM = "uniform"
    """n arrivals at independent uniform times: a Poisson process, given that its count is n."""
    EQUAL = "equal"
    """n arrivals with equal gaps, the first at the start of the second."""
    POISSON = "poisson"
    """n is a mean rate and may be a fraction: the number of arrivals is Poisson-distributed."""
    BURST = "burst"
    """n arrivals, each at an exponential time after the start of the second: a burst, then silence."""
    EARLY = "early"
    """n arrivals with exponential gaps of mean 1/(1.5 n) s: most of them in the first two thirds of the second."""


def poisson_ns(rng: Random, rate_rps: float, span_ns: int = NS_PER_S) -> list[int]:
    """The arrivals of a Poisson process of `rate_rps` in `[0, span_ns)`, sorted, in ns."""
    if rate_rps <= 0:
        return []
    random = rng.random
    times: list[int] = []
    gap_ns = -NS_PER_S / rate_rps
    at_ns = gap_ns * log(1.0 - random())
    while at_ns < span_ns:
        times.append(int(at_ns))
        at_ns += gap_ns * log(1.0 - random())
    return times


def spread_counts(
    counts: Iterable[Any], spread: Spread, rng: Random, *, duration_ns: int, mean_ms: float = 50.0
) -> Iterator[list[int]]:
    """One sorted block of arrival times in ns per second, `counts[k]` arrivals for second k.

    Counts may be fractions only with `poisson`. With `burst` (whose mean is `mean_ms`) and `early`, arrivals may fall
    into later seconds; those at or after `duration_ns` are left out.
    """
    random = rng.random
    mean_ns = -mean_ms * (NS_PER_S / 1000)
    draws: dict[Spread, Callable[[Any], list[int]]] = {
        Spread.UNIFORM: lambda n: sorted([int(random() * NS_PER_S) for _ in range(n)]),
        Spread.EQUAL: lambda n: [place * NS_PER_S // n for place in range(n)],
        Spread.POISSON: partial(poisson_ns, rng),
        Spread.BURST: lambda n: sorted([int(mean_ns * log(1.0 - random())) for _ in range(n)]),
        Spread.EARLY: partial(_early_ns, random),
    }
    draw = draws[spread]
    carried: list[int] = []
    start_ns = 0
    for count in counts:
        end_ns = min(start_ns + NS_PER_S, duration_ns)
        block = [start_ns + offset for offset in draw(count)]
        if carried or (block and block[-1] >= end_ns):
            block = sorted(carried + block)
            carried = [at_ns for at_ns in block if at_ns >= end_ns]
            block = block[: len(block) - len(carried)]
        yield block
        start_ns = end_ns


def _early_ns(random: Callable[[], float], count: int) -> list[int]:
    gap_ns = -NS_PER_S / (1.5 * max(1, count))
    return [int(at_ns) for at_ns in accumulate(gap_ns * log(1.0 - random()) for _ in range(count))]


def scaled_counts(counts: Iterable[int], factor: float) -> Iterator[int]:
    """Counts times `factor`, rounded down; the remainder is added to the next count, so that the total stays right."""
    remainder = 0.0
    for count in counts:
        remainder += count * factor
        whole = int(remainder)
        remainder -= whole
        yield whole


def counts_at(rate_rps: float, duration_ns: int) -> Iterator[int]:
    """A constant rate as whole counts per second; the first k of them add up to `⌊k · rate⌋`."""
    before = 0
    for second in range(-(-duration_ns // NS_PER_S)):
        until = int((second + 1) * rate_rps)
        yield until - before
        before = until


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at a constant mean rate."""

    rate: Annotated[float, RATE]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        for start_ns in range(0, duration_ns, NS_PER_S):
            span_ns = min(NS_PER_S, duration_ns - start_ns)
            yield [start_ns + offset for offset in poisson_ns(rng, self.rate, span_ns)]


@dataclass(frozen=True, slots=True)
class Equal:
    """Equally spaced arrivals, the first at 0."""

    rate: Annotated[float, RATE_ABOVE_0]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        number, at_ns = 0, 0
        while at_ns < duration_ns:
            block: list[int] = []
            while at_ns < duration_ns and len(block) < BLOCK_ARRIVALS:
                block.append(at_ns)
                number += 1
                at_ns = round(number * NS_PER_S / self.rate)
            yield block


@dataclass(frozen=True, slots=True)
class Uniform:
    """Exactly `rate` arrivals in each second, at uniform times; a fractional rate alternates between two counts."""

    rate: Annotated[float, RATE]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return spread_counts(counts_at(self.rate, duration_ns), Spread.UNIFORM, rng, duration_ns=duration_ns)


@dataclass(frozen=True, slots=True)
class Burst:
    """`rate` arrivals in each second, each at an exponential time of mean `mean_ms` after the second's start.

    Source: Sponge specification 4.1, the "exponential" mode of the published load generator.
    """

    rate: Annotated[float, RATE]
    mean_ms: Annotated[float, Range(above=0, most=60_000.0)] = 50.0

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        counts = counts_at(self.rate, duration_ns)
        return spread_counts(counts, Spread.BURST, rng, duration_ns=duration_ns, mean_ms=self.mean_ms)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, more is burstier."""

    rate: Annotated[float, RATE_ABOVE_0]
    cv: Annotated[float, Range(least=0.01, most=100.0)]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        shape = self.cv**-2.0
        scale_ns = NS_PER_S / (self.rate * shape)
        gap_ns = rng.gammavariate
        start_ns, into_ns = 0, gap_ns(shape, scale_ns)
        while start_ns < duration_ns:
            # Times are relative to their second, so that floats stay exact to the nanosecond in long traces.
            end_ns = min(NS_PER_S, duration_ns - start_ns)
            block: list[int] = []
            while into_ns < end_ns:
                block.append(start_ns + int(into_ns))
                into_ns += gap_ns(shape, scale_ns)
            yield block
            start_ns += end_ns
            into_ns -= end_ns


class RateCurve(ABC):
    """A Poisson process whose rate changes over time."""

    __slots__ = ()

    @abstractmethod
    def rate_rps(self, at_s: float) -> float:
        """The rate at an instant."""

    @abstractmethod
    def peak_rps(self, second: int) -> float:
        """An upper bound of the rate in `[second, second + 1]`."""

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        """One block per second: arrivals at the second's peak rate, each kept with probability rate/peak.

        That is exact, because the arrivals of a Poisson process are independent of each other.
        """
        for second in range(-(-duration_ns // NS_PER_S)):
            peak = self.peak_rps(second)
            start_ns = second * NS_PER_S
            block = [start_ns + offset for offset in poisson_ns(rng, peak)]
            kept = [at_ns for at_ns in block if rng.random() * peak < self.rate_rps(to_s(at_ns))]
            yield kept if start_ns + NS_PER_S <= duration_ns else [at_ns for at_ns in kept if at_ns < duration_ns]


@dataclass(frozen=True, slots=True)
class Step(RateCurve):
    """One rate after another, each for `each_s` seconds; the last one continues."""

    rates: tuple[Annotated[float, RATE], ...]
    each_s: Annotated[float, POSITIVE]

    def rate_rps(self, at_s: float) -> float:
        return self.rates[min(int(at_s / self.each_s), len(self.rates) - 1)]

    def peak_rps(self, second: int) -> float:
        last = len(self.rates) - 1
        first = min(int(second / self.each_s), last)
        return max(self.rates[first : min(int((second + 1) / self.each_s), last) + 1])


@dataclass(frozen=True, slots=True)
class Ramp(RateCurve):
    """From `rate` linearly to `end_rate` within `ramp_s` seconds, then constant."""

    rate: Annotated[float, RATE]
    end_rate: Annotated[float, RATE]
    ramp_s: Annotated[float, POSITIVE]

    def rate_rps(self, at_s: float) -> float:
        return self.rate + (self.end_rate - self.rate) * min(at_s / self.ramp_s, 1.0)

    def peak_rps(self, second: int) -> float:
        return max(self.rate_rps(second), self.rate_rps(second + 1))


@dataclass(frozen=True, slots=True)
class Diurnal(RateCurve):
    """A sinusoid around `rate`: lowest at the start (night), highest half a period later (noon).

    `swing` is the amplitude as a fraction of the mean; `phase_s` is the time of day at which the trace starts.
    """

    rate: Annotated[float, RATE]
    swing: Annotated[float, Range(least=0, most=1.0)] = 0.5
    period_s: Annotated[float, POSITIVE] = 86_400.0
    phase_s: Annotated[float, NOT_NEGATIVE] = 0.0

    def rate_rps(self, at_s: float) -> float:
        return self.rate * (1.0 - self.swing * cos(2.0 * pi * (at_s + self.phase_s) / self.period_s))

    def peak_rps(self, second: int) -> float:
        begin = (second + self.phase_s) / self.period_s
        end = (second + 1 + self.phase_s) / self.period_s
        noon_inside = int(end + 0.5) > int(begin + 0.5)
        if noon_inside:
            return self.rate * (1.0 + self.swing)
        return max(self.rate_rps(second), self.rate_rps(second + 1))


@dataclass(frozen=True, slots=True)
class Square(RateCurve):
    """`burst_rate` in the first `burst_s` seconds of every `period_s`, `rate` in the rest."""

    rate: Annotated[float, RATE]
    burst_rate: Annotated[float, RATE]
    period_s: Annotated[float, POSITIVE]
    burst_s: Annotated[float, POSITIVE]

    def __post_init__(self) -> None:
        if self.burst_s > self.period_s:
            what = f"burst_s {self.burst_s:g} is longer than period_s {self.period_s:g}"
            raise InputError(what, help="make the period longer or the burst shorter")

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


Matrix = tuple[tuple[float, ...], ...]

STATES_MAX: Final = 64
"""Checking a process takes time cubic in its states; published ones have 2 to 16."""
ROW_SUM_TOLERANCE: Final = 0.01
"""Published matrices are rounded; the sum of a row may differ from zero by this share of its diagonal."""


@dataclass(frozen=True, slots=True)
class Map:
    """A Markovian arrival process, given by two n × n matrices of rates per second; it starts in its stationary state.

    Off the diagonal, D0 has the rates of transitions without an arrival. D1 has those with an arrival, also back into
    the same state. The diagonal of D0 makes each row of D0 + D1 sum to zero. If D1 is diagonal, the process is an MMPP.
    """

    d0: tuple[tuple[Annotated[float, Range(least=-1e7, most=1e7)], ...], ...]
    d1: tuple[tuple[Annotated[float, RATE], ...], ...]

    def __post_init__(self) -> None:
        size = len(self.d0)
        if size > STATES_MAX:
            raise InputError(f"{size} states are too many", help=f"use at most {STATES_MAX}")
        for name, matrix in (("d0", self.d0), ("d1", self.d1)):
            if len(matrix) != size or any(len(row) != size for row in matrix):
                raise InputError(f"{name} is not a {size} by {size} matrix", help="d0 and d1 are square, of equal size")
        for state in range(size):
            self._check_row(state)
        stationary(self)

    def _check_row(self, state: int) -> None:
        row, leaving = self.d0[state], sum(self.d1[state])
        diagonal = -row[state]
        leaving += sum(rate for other, rate in enumerate(row) if other != state)
        if min(self.d1[state]) < 0 or any(rate < 0 for other, rate in enumerate(row) if other != state):
            raise InputError(f"row {state + 1} has a negative rate", help="only the diagonal of d0 is negative")
        if diagonal <= 0 or abs(diagonal - leaving) > ROW_SUM_TOLERANCE * diagonal:
            what = f"row {state + 1} of d0 + d1 sums to {leaving - diagonal:g}, not 0"
            raise InputError(what, help=f"d0's diagonal there should be {-leaving:g}")

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        size = len(self.d0)
        cumulated = [self._cumulated_rates(state) for state in range(size)]
        random = rng.random
        state = min(bisect_right(list(accumulate(stationary(self))), random()), size - 1)
        for start_ns in range(0, duration_ns, NS_PER_S):
            length_ns = min(NS_PER_S, duration_ns - start_ns)
            block: list[int] = []
            at_ns = 0.0
            while True:
                sums = cumulated[state]
                at_ns -= log(1.0 - random()) * NS_PER_S / sums[-1]
                if at_ns >= length_ns:
                    break  # An exponential wait has no memory: it is drawn anew from the start of the next second.
                transition = bisect_right(sums, random() * sums[-1])
                if transition >= size:
                    block.append(start_ns + int(at_ns))
                state = transition % size
            yield block

    def _cumulated_rates(self, state: int) -> list[float]:
        """Partial sums of the rates out of `state`: first those without an arrival, then those with one."""
        silent = [0.0 if other == state else rate for other, rate in enumerate(self.d0[state])]
        return list(accumulate([*silent, *self.d1[state]]))


def stationary(process: Map) -> tuple[float, ...]:
    """The long-run share of time in each state: π (D0 + D1) = 0, Σ π = 1. InputError if the chain is not connected.

    The elimination of Grassmann, Taksar and Heyman never subtracts, so its result is accurate and never negative.
    """
    size = len(process.d0)
    flow = [[process.d0[i][j] + process.d1[i][j] if i != j else 0.0 for j in range(size)] for i in range(size)]
    for last in range(size - 1, 0, -1):
        leaving = sum(flow[last][:last])
        if leaving <= 0:
            what = f"state {last + 1} never leads back to the states before it"
            raise InputError(what, help="give it a rate towards one of them")
        for i in range(last):
            flow[i][last] /= leaving
            for j in range(last):
                flow[i][j] += flow[i][last] * flow[last][j]
    shares = [1.0]
    for state in range(1, size):
        shares.append(sum(shares[i] * flow[i][state] for i in range(state)))
    total = sum(shares)
    return tuple(share / total for share in shares)


@dataclass(frozen=True, slots=True)
class Mmpp:
    """Poisson arrivals at `rates[k]` while in state k, which lasts an exponential time of mean `mean_s[k]` seconds.

    Two states alternate; with more, all other states are equally likely next.
    """

    rates: tuple[Annotated[float, RATE], ...]
    mean_s: tuple[Annotated[float, Range(least=1e-6, most=1e9)], ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.rates) == len(self.mean_s) <= STATES_MAX:
            what = f"{len(self.rates)} rates and {len(self.mean_s)} mean_s"
            raise InputError(what, help=f"give both for each state, for 2 to {STATES_MAX} states")

    def as_map(self) -> Map:
        """The same process as matrices."""
        states = range(len(self.rates))
        others = len(self.rates) - 1
        d0 = tuple(
            tuple(-self.rates[i] - 1.0 / self.mean_s[i] if i == j else 1.0 / (self.mean_s[i] * others) for j in states)
            for i in states
        )
        return Map(d0, tuple(tuple(self.rates[i] if i == j else 0.0 for j in states) for i in states))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return self.as_map().blocks(rng, duration_ns)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson at `rate` while on, at `off_rate` while off; both periods are exponential, of mean `on_s` and `off_s`."""

    rate: Annotated[float, RATE]
    on_s: Annotated[float, POSITIVE]
    off_s: Annotated[float, POSITIVE]
    off_rate: Annotated[float, RATE] = 0.0

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return Mmpp((self.rate, self.off_rate), (self.on_s, self.off_s)).blocks(rng, duration_ns)


PROCESSES: Final = (Poisson, Equal, Uniform, Burst, Gamma, Mmpp, Map, OnOff, Step, Ramp, Diurnal, Square)
KINDS: Final[Mapping[str, type[ArrivalProcess]]] = {process.__name__.lower(): process for process in PROCESSES}


def kind_of(declared: Declared, *, also: Collection[str] = ()) -> ArrivalProcess:
    """The arrival process that `kind:` names, with its options; `also` are keys that the caller reads."""
    value = as_value(declared, "trace")
    kind = value.mapping(required=("kind",))["kind"].entry(KINDS, "kind of trace")
    return read_options(kind, value, also=("kind", *also))


def generated(process: ArrivalProcess, *, seed: int, duration_ns: int, name: str = STREAM) -> Trace:
    """The trace that a process generates from the random stream `name` of `seed`."""
    kind = type(process).__name__.lower()
    options = " ".join(f"{field.name}={getattr(process, field.name)}" for field in fields(process))

    def blocks() -> Iterator[Sequence[int]]:
        return process.blocks(stream(seed, name), duration_ns)

    return Trace(kind, duration_ns, f"assumed: generated, {kind} {options}, seed {seed}", blocks)
