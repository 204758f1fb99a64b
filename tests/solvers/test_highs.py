"""Integer programs: small ones against all their answers, and what a search that ends early says of itself."""

import itertools

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


@settings(max_examples=60)
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


def test_columns_may_count_further_than_one() -> None:
    """The fewest coins of 7 and 3 that make 20: two of 7 and two of 3; with one of 7 at most there is no way."""
    rows: list[Row] = [({0: 7.0, 1: 3.0}, 20.0, 20.0)]
    found = minimise([1.0, 1.0], rows, integers=2, nodes_max=100, most=[9, 9])
    assert found.values is not None
    assert found.values.round().tolist() == [2, 2]
    assert minimise([1.0, 1.0], rows, integers=2, nodes_max=100, most=[1, 9]).values is None


@pytest.mark.parametrize(
    ("costs", "rows"),
    [
        ([7, 3, -5, -6, 8], [([0, -7, 0, -5, -7], -8, -8)]),
        ([3, -2, -6, 4, -2, 1], [([-8, 0, 0, -8, -1, 0], -10, -3), ([0, 7, 6, 0, 0, -7], 4, 4)]),
        ([4, 7, -5, 9, -6, -1], [([0, 8, 0, 0, -8, 6], 4, 4)]),
        ([-2, 6, -1, 7, 4], [([4, 0, -8, -3, 0], -1, -1)]),
    ],
)
def test_infeasible_by_parity_alone(costs: list[int], rows: list[tuple[list[int], int, int]]) -> None:
    """The presolve of HiGHS 1.12 and 1.13 fails on them, which would read as a search that gave up."""
    constraints: list[Row] = [(dict(enumerate(map(float, row))), float(low), float(high)) for row, low, high in rows]
    found = minimise(list(map(float, costs)), constraints, integers=len(costs), nodes_max=1000)
    assert (found.values, found.proven) == (None, True)


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


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.12 prints a line for this program, two columns of which differ only in cost, whatever its options."""
    serves, costs = (0.2, 0.9, 0.9, 0.1, 0.1), (2.9, 3.0, 3.6, 1.2, 1.6)
    row: Row = (dict(enumerate(serves)), 1.0, float("inf"))
    assert minimise(costs, [row], integers=5, nodes_max=100, most=(40.0, 1.0, 39.0, 39.0, 40.0)).proven
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
