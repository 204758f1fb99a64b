"""Integer programs: small ones against all their answers, and what a search that ends early says of itself."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from sloop.solvers import highs
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
def test_infeasible_although_presolve_fails(costs: list[int], rows: list[tuple[list[int], int, int]]) -> None:
    """SciPy 1.17.1 reports status 4, "Solve error", with presolve, which must not read as a search that gave up."""
    constraints: list[Row] = [(dict(enumerate(map(float, row))), float(low), float(high)) for row, low, high in rows]
    found = minimise(list(map(float, costs)), constraints, integers=len(costs), nodes_max=1000)
    assert (found.values, found.proven) == (None, True)


@dataclass
class _Answers:
    """Stands for `scipy.optimize`: `milp` gives the prepared (status, message) pairs, none of them with values."""

    prepared: list[tuple[int, str]]
    presolved: list[bool] = field(default_factory=list)
    Bounds = LinearConstraint = staticmethod(lambda *arguments: arguments)

    def milp(self, *_: object, options: dict[str, Any], **__: object) -> SimpleNamespace:
        status, message = self.prepared[len(self.presolved)]
        self.presolved.append(options["presolve"])
        return SimpleNamespace(status=status, message=message, x=None)


@pytest.mark.parametrize(
    ("prepared", "proven"),
    [
        ([(2, "The problem is infeasible.")], True),
        ([(1, "Iteration limit reached. (HiGHS Status 14)")], False),  # SciPy 1.11, HiGHS 1.2
        ([(4, "The HiGHS status code was not recognized. (HiGHS Status 16: Solution limit reached)")], False),
        ([(4, "(HiGHS Status 4: Solve error)"), (2, "The problem is infeasible.")], True),
        ([(4, "The problem is unbounded or infeasible."), (2, "The problem is infeasible.")], True),
        ([(4, "(HiGHS Status 4: Solve error)"), (4, "(HiGHS Status 4: Solve error)")], False),
        ([(3, "The problem is unbounded."), (3, "The problem is unbounded.")], False),
    ],
)
def test_infeasible_and_gave_up_are_told_apart(
    prepared: list[tuple[int, str]], proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = _Answers(prepared)
    monkeypatch.setattr(highs, "load", lambda: (answers, sparse))
    found = minimise([1.0], [({0: 1.0}, 0.0, 1.0)], integers=1, nodes_max=5)
    assert (found.values, found.proven) == (None, proven)
    assert answers.presolved == [True, False][: len(prepared)]


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


def test_what_highs_prints_is_discarded_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    """It prints a line for this program, two columns of which differ only in cost."""
    serves, costs = (0.2, 0.9, 0.9, 0.1, 0.1), (2.9, 3.0, 3.6, 1.2, 1.6)
    row: Row = (dict(enumerate(serves)), 1.0, float("inf"))
    os.write(1, b"before\n")
    found = minimise(costs, [row], integers=5, nodes_max=100, most=(40.0, 1.0, 39.0, 39.0, 40.0))
    os.write(1, b"after\n")
    assert found.proven
    assert capfd.readouterr().out == "before\nafter\n"
