"""Markovian arrival processes: bursty arrivals whose rate follows a hidden Markov chain.

A MAP is two n×n matrices of rates per second: off the diagonal of D0 the chain moves without an arrival, D1 moves (or
stays) with one, and D0's diagonal makes every row of D0 + D1 sum to zero (Neuts 1979). An MMPP is the special case
whose D1 is diagonal. The published matrices of BATCH (SC'20) are read by `matrices`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log
from random import Random

from sloop.errors import InputError
from sloop.options import Limits, limited
from sloop.units import NS_PER_S
from sloop.workload.trace import POSITIVE, RATE

Matrix = tuple[tuple[float, ...], ...]

STATES_MAX = 64
ROW_SUM_TOLERANCE = 0.01
"""Published matrices are rounded; a row may miss zero by this share of its diagonal."""


@dataclass(frozen=True, slots=True)
class Map:
    """A MAP given by its matrices; the chain starts in its stationary distribution."""

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
