"""Range checks for policy parameters: what a user set too high or too low, said with key, value and range.

Knows parameters only, no policy. Fields in `_ns` are reported in `_ms`, the unit a user writes them in.
"""

import math
from typing import Final

from sloop.errors import InputError
from sloop.units import to_ms

RATE_MAX_RPS: Final = 1e9
"""The most requests per second that anyone may expect: a hundred times what a load may be."""
TIMES_MAX: Final = 1e6
"""The most times of what came that anyone may expect. Further zeros are a slip, and their products infinite."""


class OutOfRange(InputError):
    """A parameter's value cannot be; `key` is the parameter as a user writes it."""

    def __init__(self, what: str, *, key: str, help: str) -> None:
        super().__init__(what, help=help)
        self.key = key


def at_least(key: str, value: float, least: float) -> None:
    """Raise `OutOfRange` unless `value` ≥ `least` and finite."""
    _require(key, value, math.isfinite(value) and value >= least, f"at least {_shown(key, least)}")


def above(key: str, value: float, bound: float) -> None:
    """Raise `OutOfRange` unless `value` > `bound` and finite."""
    _require(key, value, math.isfinite(value) and value > bound, f"above {_shown(key, bound)}")


def within(key: str, value: float, low: float, high: float) -> None:
    """Raise `OutOfRange` unless `low` < `value` ≤ `high`."""
    _require(key, value, low < value <= high, f"above {_shown(key, low)} and at most {_shown(key, high)}")


def between(key: str, value: float, low: float, high: float) -> None:
    """Raise `OutOfRange` unless `low` ≤ `value` ≤ `high`."""
    _require(key, value, low <= value <= high, f"at least {_shown(key, low)} and at most {_shown(key, high)}")


def _require(key: str, value: float, holds: bool, rule: str) -> None:
    if not holds:
        name = key[:-3] + "_ms" if key.endswith("_ns") else key
        raise OutOfRange(f"{name} = {_shown(key, value)} is out of range", key=name, help=f"{name} must be {rule}")


def _shown(key: str, value: float) -> str:
    return f"{to_ms(int(value)) if key.endswith('_ns') and math.isfinite(value) else value:g}"
