"""Units: inside sloop time is an integer number of nanoseconds; floats exist only at the edges.

This module knows nothing but numbers. Names elsewhere carry their unit (`_ns`, `_ms`, `_s`, `_cores`, `_bytes`).
"""

from typing import Final

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

FOREVER_NS: Final = 2**63 - 1
"""Later than every instant a run can reach; `wake_ns` of something that waits for nothing."""
LONGEST_NS: Final = 100 * 365 * 86_400 * NS_PER_S
"""A hundred years, the longest duration anyone may ask for: an instant of a run and two of them are before forever."""


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
