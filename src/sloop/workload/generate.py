"""Generated traces: one small class per arrival process, whose fields are its options in a scenario's `trace:`.

One seed gives the same arrivals on any machine: they are drawn in plain Python floats from the stream `arrivals`. Rates
are requests per second. Three families: renewal processes and bursts; Poisson processes whose rate follows a curve,
drawn second by second by thinning (Lewis and Shedler 1979); Markovian arrival processes, whose rate follows a hidden
Markov chain (Neuts 1979), among them the published matrices of BATCH (SC'20).
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from itertools import accumulate
from math import cos, log, pi
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Final, Protocol

from sloop.errors import InputError
from sloop.options import Declared, Limits, as_value, limited, read_options
from sloop.streams import stream
from sloop.units import NS_PER_S, to_s
from sloop.workload.spread import Spread, counts_at, poisson_ns, spread_counts
from sloop.workload.trace import BLOCK_ARRIVALS, NOT_NEGATIVE, POSITIVE, RATE, RATE_ABOVE_0, Trace

STREAM: Final = "arrivals"


class Kind(Protocol):
    """An arrival process; its dataclass fields are its options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        """Sorted runs of arrival offsets in `[0, duration_ns)`, in ns."""
        ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals at a constant mean rate."""

    rate: float = limited(limits=RATE)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        for start_ns in range(0, duration_ns, NS_PER_S):
            span_ns = min(NS_PER_S, duration_ns - start_ns)
            yield [start_ns + offset for offset in poisson_ns(rng, self.rate, span_ns)]


@dataclass(frozen=True, slots=True)
class Equal:
    """Equally spaced arrivals, the first at 0."""

    rate: float = limited(limits=RATE_ABOVE_0)

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
    """Exactly `rate` arrivals in each second, at uniform offsets; a fractional rate alternates between two counts."""

    rate: float = limited(limits=RATE)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        counts = counts_at(self.rate, duration_ns)
        return spread_counts(counts, Spread.UNIFORM, rng, mean_ms=0.0, duration_ns=duration_ns)


@dataclass(frozen=True, slots=True)
class Burst:
    """`rate` arrivals at the start of each second, each an exponential offset of mean `mean_ms`, then silence.

    Source: Sponge specification 4.1, the published load generator's "exponential" mode.
    """

    rate: float = limited(limits=RATE)
    mean_ms: float = limited(50.0, limits=Limits(above=0, most=60_000.0))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        counts = counts_at(self.rate, duration_ns)
        return spread_counts(counts, Spread.BURST, rng, mean_ms=self.mean_ms, duration_ns=duration_ns)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Independent gamma-distributed gaps with coefficient of variation `cv`: 1 is Poisson, more is burstier."""

    rate: float = limited(limits=RATE_ABOVE_0)
    cv: float = limited(limits=Limits(least=0.01, most=100.0))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        shape = self.cv**-2.0
        scale_ns = NS_PER_S / (self.rate * shape)
        gap_ns = rng.gammavariate
        start_ns, into_ns = 0, gap_ns(shape, scale_ns)
        while start_ns < duration_ns:
            # Times are kept relative to their second so that floats stay exact to the nanosecond in long traces.
            end_ns = min(NS_PER_S, duration_ns - start_ns)
            block: list[int] = []
            while into_ns < end_ns:
                block.append(start_ns + int(into_ns))
                into_ns += gap_ns(shape, scale_ns)
            yield block
            start_ns += end_ns
            into_ns -= end_ns


class Curve(Protocol):
    """A rate over time."""

    def rate_rps(self, at_s: float) -> float:
        """The rate at an instant."""
        ...

    def peak_rps(self, second: int) -> float:
        """No rate in `[second, second + 1]` is above this."""
        ...


def curve_blocks(curve: Curve, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
    """One block of Poisson arrivals per second, sorted ns offsets from 0: candidates at the second's peak rate, each
    kept with probability rate/peak. That is exact, because a Poisson process has no memory."""
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


Matrix = tuple[tuple[float, ...], ...]

STATES_MAX = 64
ROW_SUM_TOLERANCE = 0.01
"""Published matrices are rounded; a row may miss zero by this share of its diagonal."""


@dataclass(frozen=True, slots=True)
class Map:
    """A Markovian arrival process given by two n × n matrices of rates per second; it starts in the stationary
    distribution.

    Off the diagonal of D0 the chain moves without an arrival; D1 moves, or stays, with one; the diagonal of D0 makes
    every row of D0 + D1 sum to zero. A process whose D1 is diagonal is an MMPP.
    """

    d0: tuple[tuple[float, ...], ...] = limited(limits=Limits(least=-1e7, most=1e7))
    d1: tuple[tuple[float, ...], ...] = limited(limits=RATE)

    def __post_init__(self) -> None:
        size = len(self.d0)
        if size > STATES_MAX:
            raise InputError(f"{size} states are too many", help=f"at most {STATES_MAX}")
        for name, matrix in (("d0", self.d0), ("d1", self.d1)):
            if len(matrix) != size or any(len(row) != size for row in matrix):
                raise InputError(f"{name} is not a {size} by {size} matrix", help="d0 and d1 are square and alike")
        for state in range(size):
            _check_row(self.d0, self.d1, state)
        stationary(self)

    def rate_rps(self) -> float:
        """Long-run mean arrival rate: the stationary distribution times D1's row sums."""
        return sum(share * sum(row) for share, row in zip(stationary(self), self.d1, strict=True))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return _walk(self, rng, duration_ns)


@dataclass(frozen=True, slots=True)
class Mmpp:
    """Poisson arrivals at `rates[k]` while in state k, which lasts exponentially with mean `mean_s[k]` seconds.

    With two states they alternate; with more, the next is any other with equal probability.
    """

    rates: tuple[float, ...] = limited(limits=RATE)
    mean_s: tuple[float, ...] = limited(limits=Limits(least=1e-6, most=1e9))

    def __post_init__(self) -> None:
        if not 2 <= len(self.rates) == len(self.mean_s) <= STATES_MAX:
            raise InputError(
                f"{len(self.rates)} rates and {len(self.mean_s)} mean_s",
                help=f"give as many of one as of the other, 2 to {STATES_MAX}",
            )

    def as_map(self) -> Map:
        """The same process as matrices."""
        states = range(len(self.rates))
        away = len(self.rates) - 1
        d0 = tuple(
            tuple(-self.rates[i] - 1.0 / self.mean_s[i] if i == j else 1.0 / (self.mean_s[i] * away) for j in states)
            for i in states
        )
        return Map(d0, tuple(tuple(self.rates[i] if i == j else 0.0 for j in states) for i in states))

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return self.as_map().blocks(rng, duration_ns)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson at `rate` while on, at `off_rate` while off; both last exponentially with means `on_s` and `off_s`."""

    rate: float = limited(limits=RATE)
    on_s: float = limited(limits=POSITIVE)
    off_s: float = limited(limits=POSITIVE)
    off_rate: float = limited(0.0, limits=RATE)

    def blocks(self, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
        return Mmpp((self.rate, self.off_rate), (self.on_s, self.off_s)).blocks(rng, duration_ns)


def _check_row(d0: Matrix, d1: Matrix, state: int) -> None:
    row, exits = d0[state], sum(d1[state])
    diagonal = -row[state]
    exits += sum(rate for other, rate in enumerate(row) if other != state)
    if min(d1[state]) < 0 or any(rate < 0 for other, rate in enumerate(row) if other != state):
        raise InputError(f"row {state + 1} has a negative rate", help="only the diagonal of d0 is negative")
    if diagonal <= 0 or abs(diagonal - exits) > ROW_SUM_TOLERANCE * diagonal:
        raise InputError(
            f"row {state + 1} of d0 + d1 sums to {exits - diagonal:g}, not 0",
            help=f"d0's diagonal there should be {-exits:g}",
        )


def stationary(process: Map) -> tuple[float, ...]:
    """The long-run share of time in each state: π (D0 + D1) = 0, Σ π = 1.

    By Grassmann, Taksar and Heyman's elimination, which subtracts nothing and so stays accurate and non-negative.
    """
    size = len(process.d0)
    flow = [[process.d0[i][j] + process.d1[i][j] if i != j else 0.0 for j in range(size)] for i in range(size)]
    for last in range(size - 1, 0, -1):
        leaving = sum(flow[last][:last])
        if leaving <= 0:
            raise InputError(
                f"state {last + 1} never leads back to the states before it", help="connect the states both ways"
            )
        for i in range(last):
            flow[i][last] /= leaving
            for j in range(last):
                flow[i][j] += flow[i][last] * flow[last][j]
    shares = [1.0]
    for state in range(1, size):
        shares.append(sum(shares[i] * flow[i][state] for i in range(state)))
    total = sum(shares)
    return tuple(share / total for share in shares)


def _walk(process: Map, rng: Random, duration_ns: int) -> Iterator[Sequence[int]]:
    """The chain's arrivals, second by second.

    A move is drawn by its place in the row of D0's (silent) and D1's (arriving) rates laid end to end.
    """
    size = len(process.d0)
    moves = [_moves(process, state) for state in range(size)]
    random = rng.random
    state = _first_state(process, random())
    for start_ns in range(0, duration_ns, NS_PER_S):
        length_ns = min(NS_PER_S, duration_ns - start_ns)
        block: list[int] = []
        at_ns = 0.0
        while True:
            sums = moves[state]
            at_ns -= log(1.0 - random()) * NS_PER_S / sums[-1]
            if at_ns >= length_ns:
                break  # A wait has no memory: it is drawn anew from the next second's start.
            drawn = random() * sums[-1]
            place = bisect_right(sums, drawn)
            if place >= size:
                block.append(start_ns + int(at_ns))
            state = place % size
        yield block


def _moves(process: Map, state: int) -> list[float]:
    silent = [0.0 if other == state else rate for other, rate in enumerate(process.d0[state])]
    return list(accumulate([*silent, *process.d1[state]]))


def _first_state(process: Map, drawn: float) -> int:
    until = 0.0
    shares = stationary(process)
    for state, share in enumerate(shares):
        until += share
        if drawn < until:
            return state
    return len(shares) - 1


KINDS: Final[Mapping[str, type[Kind]]] = MappingProxyType(
    {
        "poisson": Poisson,
        "equal": Equal,
        "uniform": Uniform,
        "burst": Burst,
        "gamma": Gamma,
        "mmpp": Mmpp,
        "map": Map,
        "onoff": OnOff,
        "step": Step,
        "ramp": Ramp,
        "diurnal": Diurnal,
        "square": Square,
    }
)


def kind_of(declared: Declared, *, also: Collection[str] = ()) -> Kind:
    """The arrival process that `kind:` names, with the options beside it; `also` are keys for other readers."""
    value = as_value(declared, "trace")
    kind = value.mapping(required=("kind",))["kind"].entry(KINDS, "kind of trace")
    return read_options(kind, value, also=("kind", *also))


def generated(kind: Kind, *, seed: int, duration_ns: int, name: str = STREAM) -> Trace:
    """The trace a process makes in the world `seed`; `name` is its stream, for worlds with several traces."""
    word = next((word for word, known in KINDS.items() if known is type(kind)), type(kind).__name__.lower())
    options = " ".join(f"{field.name}={getattr(kind, field.name)}" for field in fields(kind))

    def blocks() -> Iterator[Sequence[int]]:
        return kind.blocks(stream(seed, name), duration_ns)

    return Trace(word, duration_ns, f"assumed: generated, {word} {options}, seed {seed}", blocks)
