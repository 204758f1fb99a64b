"""Units of time: inside sloop every instant and duration is an integer number of nanoseconds.

Float seconds are less precise after an hour than at the start, so the same events could give other decisions. Floats
are for people and files. Names end in their unit: `_ns`, `_ms`, `_s`, `_cores`, `_bytes`, `_rps`.
"""

from typing import Final

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

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
