"""Classes of sizes: rows of similar size share a queue, a batch and an estimate.

The size of a row is the number of elements of its largest input in the dimensions that the model leaves open: the
length of a text, height × width of an image. A class is named by its upper bound. If the model leaves no dimension
open, all its rows have size 0, and 0 is their class.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from typing import Final

from msgspec import Struct


class SizeClasses(Struct, frozen=True, gc=False, omit_defaults=True):
    """The upper bounds of the classes, ascending. Above the last bound, classes are those of the grid (`grid_bound`);
    without any bounds, all are."""

    bounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """ValueError for a bound below 1, or bounds that do not ascend."""
        before = 0
        for bound in self.bounds:
            if bound < 1:
                raise ValueError(f"a size of {bound}; a size is at least 1")
            if bound == before:
                raise ValueError(f"the size {bound} is given twice")
            if bound < before:
                raise ValueError(f"the size {bound} comes after {before}; sizes ascend")
            before = bound

    def class_of(self, size: int) -> int:
        """The smallest bound ≥ `size`; 0 for 0."""
        bounds = self.bounds
        if not bounds or size > bounds[-1]:
            return grid_bound(size)
        return bounds[bisect_left(bounds, size)] if size else 0


GRID: Final = SizeClasses()
"""Only the classes of the grid."""


def grid_bound(size: int) -> int:
    """The smallest number ≥ `size` among 1, 2, 3, 4, 6, 8, 12, 16, 24, …: powers of two, and 1.5 times each from 2 on;
    0 for 0. So no row is less than two thirds of its class."""
    if size <= 2:
        return size
    power = 1 << (size - 1).bit_length()
    middle = power - power // 4
    return middle if size <= middle else power


SIZES_TOLD: Final = 8
"""If rows have at most so many sizes, reports have figures for each size; otherwise for each class of the grid."""


def class_to_show(sizes: Collection[int]) -> Callable[[int], int]:
    """How a report groups rows of these sizes: a function from a size to the number of its group."""
    return GRID.class_of if len(sizes) > SIZES_TOLD else int
