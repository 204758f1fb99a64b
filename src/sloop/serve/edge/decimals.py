"""Floats of 16 and 32 bits in their shortest form: the decimal number with the fewest digits that reads back as the
same value of the type.

As a 64-bit float, the FP32 number 0.1 is 0.10000000149011612, and JSON would have all these digits. The 64-bit float
nearest to a decimal of up to 15 digits is written as that decimal, so it is enough to find that float. NumPy finds the
shortest form of one number in a third of a microsecond. For many numbers it is ten times as fast to try, for all at
once, the nearest decimal of each number of digits that the type may need: the first one that becomes the same value
again is the shortest. Every decimal of `digits_min` digits is a value of its own in the type, so the nearest of so many
digits is also the nearest shorter one, if a shorter one will do.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sloop.tensor import bfloats_of, floats_of

Floats = NDArray[np.float64]

FEW_BYTES: Final = 400
"""The numbers in so few bytes are better written one by one: looking at all at once takes 30 µs, or 0.1 µs for each."""
EXACT_POWER: Final = 22
"""The largest power of ten that a 64-bit float holds: quotients and products with it are rounded once."""
POWERS: Final = np.array([float(10**power) for power in range(EXACT_POWER + 1)])


class Kind(Struct, frozen=True):
    """A type of floats."""

    digits_min: int
    """Decimals of so many digits all differ as values of the type."""
    digits_max: int
    """So many digits tell all values of the type apart."""
    least: float
    """The smallest normal number: those below it have fewer digits."""
    read: Callable[[memoryview], NDArray[Any]]
    """Raw data as floats that NumPy has."""
    rounded: Callable[[Floats], NDArray[Any]]
    """What 64-bit floats become as values of the type."""
    is_numpy: bool = True
    """Whether NumPy knows the shortest form of a single number."""


KINDS: Final = {
    "FP32": Kind(6, 9, 2.0**-126, lambda data: np.frombuffer(data, "<f4"), lambda floats: floats.astype(np.float32)),
    "FP16": Kind(3, 5, 2.0**-14, lambda data: np.frombuffer(data, "<f2"), lambda floats: floats.astype(np.float16)),
    "BF16": Kind(
        *(2, 4, 2.0**-126, lambda data: floats_of(np.frombuffer(data, "<u2"))),
        lambda floats: floats_of(bfloats_of(floats.astype(np.float32))),
        is_numpy=False,
    ),
}


def shortest(datatype: str, data: bytes | bytearray | memoryview) -> list[float]:
    """The elements of a tensor of one of `KINDS`, as 64-bit floats whose decimals are the shortest."""
    kind = KINDS[datatype]
    values = kind.read(memoryview(data))
    with np.errstate(all="ignore"):
        return _many(values.astype(np.float64), kind).tolist()  # type: ignore[no-any-return]  # it has one dimension


def _many(values: Floats, kind: Kind) -> Floats:
    sizes = np.abs(values)
    exponents = np.floor(np.log10(sizes))
    # Zeros and numbers that are not finite stay as they are.
    is_number = (sizes > 0) & np.isfinite(sizes)
    is_exact = (exponents >= kind.digits_max - 1 - EXACT_POWER) & (exponents <= EXACT_POWER) & (sizes >= kind.least)
    found, single = values.copy(), is_number & ~is_exact
    left = np.flatnonzero(is_number & is_exact)
    for digits in range(kind.digits_min, kind.digits_max + 1):
        wanted, powers = values[left], (digits - 1 - exponents[left]).astype(np.intp)
        scale = POWERS[np.abs(powers)]
        decimals = np.where(powers >= 0, np.rint(wanted * scale) / scale, np.rint(wanted / scale) * scale)
        is_right = kind.rounded(decimals) == wanted
        found[left[is_right]] = decimals[is_right]
        left = left[~is_right]
        if digits == kind.digits_min:  # next to a power of two, a farther decimal may do where the nearest does not
            is_power = np.frexp(values[left])[0] == np.copysign(0.5, values[left])
            single[left[is_power]] = True
            left = left[~is_power]
        if not len(left):
            break
    places = np.flatnonzero(single)
    if len(places):
        found[places] = _one_by_one(values[places], kind)
    return found


def _one_by_one(values: Floats, kind: Kind) -> list[float]:
    if kind.is_numpy:
        return [float(str(value)) for value in kind.rounded(values)]
    found = values.copy()
    left = np.arange(len(values))
    for digits in range(1, kind.digits_max + 1):
        decimals = np.array([float(f"{value:.{digits}g}") for value in values[left].tolist()])
        is_right = kind.rounded(decimals) == values[left]
        found[left[is_right]] = decimals[is_right]
        left = left[~is_right]
    return found.tolist()  # type: ignore[no-any-return]  # it has one dimension
