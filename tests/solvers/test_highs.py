"""Integer programs: small ones against all their answers, and what a search that ends early says of itself."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers.highs import Row, minimise

numbers = st.integers(-9, 9)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[Row]]:
    width = draw(st.integers(1, 6))
    costs = draw(st.lists(numbers, min_size=width, max_size=width))
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 4))):
        coefficients = dict(enumerate(map(float, draw(st.lists(numbers, min_size=width, max_size=width)))))
        low = draw(st.integers(-12, 6))
        rows.append((coefficients, float(low), float(low + draw(st.integers(0, 12)))))
    return costs, rows


@settings(max_examples=100, deadline=None)
@given(programs())
def test_it_is_the_best_of_all(program: tuple[list[int], list[Row]]) -> None:
    costs, rows = program
    fits = [
        sum(cost * value for cost, value in zip(costs, values, strict=True))
        for values in itertools.product((0, 1), repeat=len(costs))
        if all(low <= sum(c * values[at] for at, c in row.items()) <= high for row, low, high in rows)
    ]
    found = minimise(list(map(float, costs)), rows, integers=len(costs), nodes_max=1000)
    assert found.proven
    if not fits:
        assert found.values is None
        return
    assert found.values is not None
    assert sum(cost * value for cost, value in zip(costs, found.values, strict=True)) == pytest.approx(min(fits))
    assert found.bound == pytest.approx(min(fits))


def test_columns_that_need_not_be_whole_are_not() -> None:
    rows: list[Row] = [({0: 2.0, 1: 2.0}, 3.0, 3.0)]
    whole = minimise([1.0, 2.0], rows, integers=2, nodes_max=100)
    assert (whole.values, whole.proven) == (None, True)
    half = minimise([1.0, 2.0], rows, integers=1, nodes_max=100)
    assert half.values is not None
    assert half.values.tolist() == pytest.approx([1.0, 0.5])


def test_a_search_that_ends_early_proves_nothing() -> None:
    """A knapsack of many nearly equal things, and one node."""
    sizes = [101.0 + 7 * (at * at % 11) for at in range(30)]
    rows: list[Row] = [(dict(enumerate(sizes)), 0.0, sum(sizes) / 2 - 0.5)]
    found = minimise([-size - 0.1 * (at % 3) for at, size in enumerate(sizes)], rows, integers=30, nodes_max=0)
    assert not found.proven


def test_it_is_loaded_when_it_is_needed() -> None:
    """It takes longer to load than most commands take to run."""
    code = "import sys, sloop.systems; sys.exit('scipy.optimize' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
