"""Noise: factors with mean one that the other truths multiply their durations by.

Promises the same factors for one seed on every machine. The normal factor therefore never calls the platform's `log`
or `cos`: it draws one of 4,096 equally likely quantiles, tabulated to nine decimals where libraries no longer differ.
That cuts the tails at 3.7 standard deviations, which durations of forward passes do not reach anyway.
Must not know what the factors are for.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import log
from random import Random
from statistics import NormalDist
from typing import Literal, TypeVar

Value = TypeVar("Value")
Shape = Literal["normal", "exponential", "deterministic"]

_BITS = 12
_QUANTILES = tuple(round(NormalDist().inv_cdf((index + 0.5) / 2**_BITS), 9) for index in range(2**_BITS))

FLOOR = 0.05
"""No draw is shorter than this share of its mean, however large the coefficient of variation."""


def factors(shape: Shape, cv: float, random: Random) -> Iterator[float]:
    """An endless series of factors of mean 1; `cv` is their standard deviation and counts for `normal` alone."""
    if shape == "exponential":
        return _exponential(random)
    if shape == "deterministic" or cv == 0.0:
        return repeat(1.0)
    return drawn([max(FLOOR, 1.0 + cv * quantile) for quantile in _QUANTILES], random)


def drawn(values: Sequence[float], random: Random) -> Iterator[float]:
    """An endless series of draws, each of the values being equally likely; quickest for a power of two of them."""
    bits = (len(values) - 1).bit_length()
    if len(values) != 1 << bits:
        return chosen(values, random)
    return map(values.__getitem__, map(random.getrandbits, repeat(bits)))


def chosen(values: Sequence[Value], random: Random) -> Iterator[Value]:
    """An endless series of what `random.choice(values)` would return, without a call of Python for each."""
    count = len(values)
    indices = filter(count.__gt__, map(random.getrandbits, repeat(count.bit_length())))
    return map(values.__getitem__, indices)


def _exponential(random: Random) -> Iterator[float]:
    draw = random.random
    while True:
        yield -log(1.0 - draw())
