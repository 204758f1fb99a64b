"""Units of time and memory, the one tolerance for comparing floats, and the one definition of a quantile and of a
share's interval.

Inside sloop every instant and duration is an integer number of nanoseconds: float seconds are less precise after an
hour than at the start, so the same events could give other decisions. Floats are for people and files. Names end in
their unit: `_ns`, `_ms`, `_s`, `_cores`, `_bytes`, `_rps`. Every comparison of rates, cores, shares or durations in
milliseconds uses `ROUNDING`, a function below or, where that is too narrow, `WIDE_ROUNDING`.
"""

import math
from collections.abc import Sequence
from typing import Final, TypeVar

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
GIB: Final = 1 << 30

FOREVER_NS: Final = 2**63 - 1
"""Later than every instant of a run: stands for "never" in fields such as `wake_ns`."""
LONGEST_NS: Final = 100 * 365 * 86_400 * NS_PER_S
"""A hundred years, the longest duration that files and options may give. An instant of a run plus twice this is still
before `FOREVER_NS`, so sums cannot overflow."""


def ms(value: float) -> int:
    """Milliseconds as integer nanoseconds, rounded to nearest."""
    return round(value * NS_PER_MS)


def s(value: float) -> int:
    """Seconds as integer nanoseconds, rounded to nearest."""
    return round(value * NS_PER_S)


def to_ms(value_ns: int) -> float:
    """Nanoseconds as float milliseconds, for people and files."""
    return value_ns / NS_PER_MS


def to_s(value_ns: int) -> float:
    """Nanoseconds as float seconds, for people and files."""
    return value_ns / NS_PER_S


T = TypeVar("T")

ROUNDING: Final = 1e-9
"""Absolute tolerance for sums, differences and quotients of floats.

Cores, shares, requests per second and milliseconds lie between 1e-3 and 1e5 here. A sum of some hundred such floats is
off by about 1e-11, and nobody gives one of them with more than six decimals: 1e-9 lies between the two. `math.isclose`
has the same number as its relative default; an absolute tolerance also works near 0, as for the last free cores.
"""
WIDE_ROUNDING: Final = 1e-6
"""The same where errors are larger: shares of a deadline in slots and times along a path, which reach 1e5 ms; cores as
thousandths; numbers that people write with few digits; and, relatively, what HiGHS solves, which keeps rows with this
tolerance."""


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
    """The index of the `share` quantile, 0 ≤ share ≤ 1, among `count` > 0 ascending values.

    Nearest rank: the smallest value with at least `share` of the values at or below it. It is always a measured value,
    whereas interpolation (NumPy's default) invents one in the tail, where it matters most.
    """
    assert count > 0, "the quantile of no values is undefined"
    return max(0, math.ceil(round(share * count, 6)) - 1)


def quantile(ascending: Sequence[T], share: float) -> T:
    """The nearest-rank quantile of one or more ascending values. See `rank`."""
    return ascending[rank(share, len(ascending))]


def interpolated_quantile(ascending: Sequence[float], share: float) -> float:
    """The `share` quantile of one or more ascending numbers by linear interpolation, as in spreadsheets and NumPy: for
    published figures that were computed so. See `rank` for all others."""
    place = share * (len(ascending) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (place - low) * (ascending[high] - ascending[low])


CLUSTER: Final = 4
"""Requests that miss their deadlines together. Attainment of one simulated world under twelve seeds varied as if
requests missed in groups of one to six, with larger groups closer to saturation."""


def score_interval(share: float, requests: float, z: float) -> tuple[float, float]:
    """Wilson's score interval of a share of `requests` > 0, at `z` standard deviations to each side. Every `CLUSTER`
    requests count as one, and at least one counts."""
    count = max(1.0, requests / CLUSTER)
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, min(share, (middle - width) / scale)), min(1.0, max(share, (middle + width) / scale))
