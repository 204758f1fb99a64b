"""Arithmetic on measured numbers: the one tolerance for comparing floats, and the one definition of a quantile.

Everything that compares rates, cores, shares or durations in milliseconds uses `ROUNDING` or one of the functions
below; a module that needs another tolerance says why next to its constant. Must not know what the numbers stand for.
"""

import math
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")

ROUNDING: Final = 1e-9
"""Absolute tolerance for sums, differences and quotients of floats.

Cores, shares, requests per second and milliseconds lie between 1e-3 and 1e5 here. A sum of some hundred such floats is
off by about 1e-11, and nobody states one of them to more than six decimals: 1e-9 lies between error and meaning.
`math.isclose` has the same figure as its relative default; an absolute one also works around 0, where free cores end.
"""


def at_least(value: float, bound: float) -> bool:
    """Whether `value` ≥ `bound`, up to rounding."""
    return value + ROUNDING >= bound


def round_up(value: float) -> int:
    """The smallest integer ≥ `value`, up to rounding: `round_up(0.6 / 0.1)` is 6, not 7."""
    return math.ceil(value - ROUNDING)


def round_down(value: float) -> int:
    """The largest integer ≤ `value`, up to rounding: `round_down(0.3 / 0.1)` is 3, not 2."""
    return math.floor(value + ROUNDING)


def rank(share: float, count: int) -> int:
    """The index, in `count` > 0 ascending values, of the quantile that `share` of them do not exceed, 0 ≤ share ≤ 1.

    Nearest rank: the smallest value with at least `share` of the values at or below it. It is always a value that was
    measured, whereas interpolation (NumPy's default) invents one between the last two where it matters, in the tail.
    """
    assert count > 0, "nothing has no quantile"
    return max(0, math.ceil(round(share * count, 6)) - 1)


def quantile(ascending: Sequence[T], share: float) -> T:
    """The nearest-rank quantile of ascending values, of which there is at least one. See `rank`."""
    return ascending[rank(share, len(ascending))]
