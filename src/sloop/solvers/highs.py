"""Integer programs, by HiGHS as SciPy brings it.

Promises the same answer on every machine: a search ends after a number of nodes, never after a time, and what it has
not proved it does not call proved. The library takes half a second to load and fifty megabytes: it is loaded when the
first program is solved, or by `load`, for those who cannot wait later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

Row = tuple[Mapping[int, float], float, float]
"""Coefficients by column, and the least and the most that their sum may be."""

INFEASIBLE = 2
"""What SciPy's `milp` calls a program that nothing satisfies; 0 is one that was solved to its end."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A value for each column, or None. `proven`: there is none better; with None, there is none at all.

    `bound`: the objective of the best cannot be less.
    """

    values: NDArray[np.float64] | None
    proven: bool
    bound: float


@cache
def load() -> tuple[ModuleType, ModuleType]:
    """SciPy's optimisers and sparse matrices."""
    from scipy import optimize, sparse  # noqa: PLC0415  # see above

    return optimize, sparse


def minimise(costs: Sequence[float], rows: Sequence[Row], *, integers: int, nodes_max: int) -> Solution:
    """The least Σ costs · x with every x between 0 and 1, the first `integers` of them whole, and every row within its
    bounds."""
    optimize, sparse = load()
    values = [value for coefficients, _, _ in rows for value in coefficients.values()]
    columns = [column for coefficients, _, _ in rows for column in coefficients]
    ends = np.cumsum([0, *(len(coefficients) for coefficients, _, _ in rows)])
    matrix = sparse.csr_array((np.array(values, dtype=np.float64), columns, ends), shape=(len(rows), len(costs)))
    found = optimize.milp(
        np.array(costs, dtype=np.float64),
        integrality=np.array([1] * integers + [0] * (len(costs) - integers)),
        bounds=optimize.Bounds(0.0, 1.0),
        constraints=optimize.LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows]),
        options={"node_limit": nodes_max, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return Solution(None, found.status == INFEASIBLE, -np.inf)
    return Solution(found.x, found.status == 0, float(found.mip_dual_bound))
