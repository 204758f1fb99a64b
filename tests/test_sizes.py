"""Classes of sizes, with and without declared bounds."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.sizes import SizeClasses, grid_bound

BOUNDS = st.lists(st.integers(1, 10**6), unique=True, max_size=8).map(lambda sizes: tuple(sorted(sizes)))


def test_the_grid_has_powers_of_two_and_their_middles() -> None:
    bounds = sorted({grid_bound(size) for size in range(1, 100)})
    assert bounds == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert SizeClasses().class_of(224 * 224) == 65536


def test_declared_classes_come_first_and_the_grid_goes_on() -> None:
    classes = SizeClasses((16, 100))
    assert [classes.class_of(size) for size in (0, 1, 16, 17, 100, 101, 129)] == [0, 16, 16, 100, 100, 128, 192]


@given(BOUNDS, st.integers(1, 2**40))
def test_a_class_holds_the_size_and_is_its_own_class(bounds: tuple[int, ...], size: int) -> None:
    classes = SizeClasses(bounds)
    bound = classes.class_of(size)
    assert bound >= size
    assert classes.class_of(bound) == bound
    assert bound in bounds or bound * 2 / 3 <= size or size <= 2


@given(BOUNDS, st.lists(st.integers(0, 2**20), min_size=2).map(sorted))
def test_larger_rows_are_in_no_lower_class(bounds: tuple[int, ...], sizes: list[int]) -> None:
    found = [SizeClasses(bounds).class_of(size) for size in sizes]
    assert all(low <= high for low, high in pairwise(found))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, 4), "a size of 0; a size is at least 1"),
        ((4, 4), "the size 4 is given twice"),
        ((8, 4), "the size 4 comes after 8; sizes ascend"),
    ],
)
def test_wrong_bounds_are_refused(bounds: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SizeClasses(bounds)
