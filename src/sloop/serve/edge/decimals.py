"""Floats of 16 and 32 bits in their shortest form: the decimal number with the fewest digits that reads back as the
same value of the type.

As a 64-bit float, the FP32 number 0.1 is 0.10000000149011612, and JSON would have all these digits. JSON encoders write
a 64-bit float as the shortest decimal that reads back as it. So it is enough to find the 64-bit float nearest to the
shortest decimal of the FP32 number: that has at most 9 digits, and decimals of up to 15 digits are read back exactly.

NumPy finds the shortest decimal of one number in a third of a microsecond. For many numbers it is ten times as fast to
round all of them at once to `digits_min` digits, then to one digit more, and so on: the first decimal that reads back
as the same value is the shortest. Fewer digits than `digits_min` need not be tried: any two decimals of `digits_min`
digits are different values of the type. So if a shorter decimal reads back as the value, rounding to `digits_min`
digits gives that decimal too, with zeros at its end.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sloop.tensor import bfloats_of, floats_of

Floats = NDArray[np.float64]

FEW_BYTES: Final = 400
"""Numbers in at most this many bytes are written one by one: all at once take at least 30 µs."""
EXACT_POWER: Final = 22
"""The largest power of ten that is exact as a 64-bit float: a quotient or product with it is rounded only once."""
POWERS: Final = np.array([float(10**power) for power in range(EXACT_POWER + 1)])


class Kind(Struct, frozen=True):
    """A floating-point type."""

    digits_min: int
    """Different decimals of this many digits are different values of the type."""
    digits_max: int
    """This many digits suffice for every value of the type."""
    least: float
    """The smallest normal number: smaller ones have less precision."""
    read: Callable[[memoryview], NDArray[Any]]
    """Converts raw data to floats of a NumPy type."""
    rounded: Callable[[Floats], NDArray[Any]]
    """Rounds 64-bit floats to values of the type."""
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
