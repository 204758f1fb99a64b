"""Mixed-integer linear programs over columns between 0 and an upper bound, solved by HiGHS through SciPy.

Branch-and-bound nodes limit the search, never time, so that a program has the same result on every machine. SciPy's
optimisers take half a second and 50 MB to import; the first program imports them, or an earlier call of `load`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

Row = tuple[Mapping[int, float], float, float]
"""One constraint: coefficients by column, and the lower and upper bound of their sum."""

OPTIMAL: Final = 0
INFEASIBLE: Final = 2
"""Statuses of `scipy.optimize.milp`. Statuses 1 and 4 are ambiguous; see `minimise`."""


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """A value for each column, or None.

    `proven`: the values are optimal or, if None, the program is infeasible. None without proof means that the search
    ended early. `bound` is a lower bound of the objective.
    """

    values: NDArray[np.float64] | None
    proven: bool
    bound: float


@cache
def load() -> tuple[ModuleType, ModuleType]:
    """Import `scipy.optimize` and `scipy.sparse`."""
    from scipy import optimize, sparse  # noqa: PLC0415  # slow, see the module's docstring

    return optimize, sparse


def minimise(
    costs: Sequence[float],
    rows: Sequence[Row],
    *,
    integers: int,
    nodes_max: int,
    most: Sequence[float] | float = 1.0,
    presolve: bool = True,
) -> MilpSolution:
    """Minimise Σ costs · x over 0 ≤ x ≤ `most`, with the first `integers` columns integer and every row within its
    bounds.

    SciPy 1.11 to 1.17 report a reached node limit as status 1 or 4. They report 4 also if HiGHS' presolve fails on an
    infeasible program ("Solve error", seen with HiGHS 1.12 on rows that only parity makes infeasible). So a program
    without values, proof or a reached limit is solved again without presolve. The status "unbounded" proves nothing,
    because all columns are bounded.

    Without `presolve`, programs of a few dozen columns are solved faster.
    """
    found = _milp(costs, rows, integers, nodes_max, most, presolve=presolve)
    if presolve and found.x is None and found.status != INFEASIBLE and "limit" not in found.message.lower():
        found = _milp(costs, rows, integers, nodes_max, most, presolve=False)
    if found.x is None:
        return MilpSolution(None, found.status == INFEASIBLE, -np.inf)
    return MilpSolution(found.x, found.status == OPTIMAL, float(found.mip_dual_bound))


def _milp(
    costs: Sequence[float],
    rows: Sequence[Row],
    integers: int,
    nodes_max: int,
    most: Sequence[float] | float,
    *,
    presolve: bool,
) -> "OptimizeResult":
    optimize, sparse = load()
    values = [value for coefficients, _, _ in rows for value in coefficients.values()]
    columns = [column for coefficients, _, _ in rows for column in coefficients]
    ends = np.cumsum([0, *(len(coefficients) for coefficients, _, _ in rows)])
    matrix = sparse.csr_array((np.array(values, dtype=np.float64), columns, ends), shape=(len(rows), len(costs)))
    with _silence():
        found: OptimizeResult = optimize.milp(
            np.array(costs, dtype=np.float64),
            integrality=np.array([1] * integers + [0] * (len(costs) - integers)),
            bounds=optimize.Bounds(0.0, np.broadcast_to(np.asarray(most, dtype=np.float64), len(costs))),
            constraints=optimize.LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
            options={"node_limit": nodes_max, "mip_rel_gap": 0.0, "presolve": presolve},
        )
    return found


@contextmanager
def _silence() -> Iterator[None]:
    """Discard what C code prints to standard output within the block. HiGHS 1.12 prints there, whatever its options,
    when it repairs a solution after rounding, or merges columns that differ only in cost.

    Standard output is the process's: no other thread may print, or solve a program, at the same time.
    """
    libc = CDLL(None)
    libc.fflush(None)
    kept, nowhere = libc.dup(1), libc.open(b"/dev/null", 1)
    libc.dup2(nowhere, 1)
    try:
        yield
    finally:
        libc.fflush(None)
        libc.dup2(kept, 1)
        libc.close(kept)
        libc.close(nowhere)
