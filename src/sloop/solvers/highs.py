"""Mixed-integer linear programs over columns between 0 and an upper bound, solved by HiGHS.

Branch-and-bound nodes limit the search, never time, so that a program has the same result on every machine. HiGHS is
imported with the first program, because most commands solve none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = tuple[Mapping[int, float], float, float]
"""One constraint: coefficients by column, and the lower and upper bound of their sum."""


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """A value for each column, or None.

    `proven`: the values are optimal or, if None, the program is infeasible. None without proof means that the search
    ended early. `bound` is a lower bound of the objective.
    """

    values: NDArray[np.float64] | None
    proven: bool
    bound: float


def minimise(
    costs: Sequence[float],
    rows: Sequence[Row],
    *,
    integers: int,
    nodes_max: int,
    most: Sequence[float] | float = 1.0,
    presolve: bool = True,
) -> MilpSolution:
    """Minimise Σ costs · x over 0 ≤ x ≤ `most`, with the first `integers` columns integer (at least one) and every row
    within its bounds.

    Without `presolve`, programs of a few dozen columns are solved faster.
    """
    import highspy  # noqa: PLC0415  # see the module's docstring

    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(costs), len(rows)
    program.col_cost_ = np.array(costs, dtype=np.float64)
    program.col_lower_ = np.zeros(len(costs))
    program.col_upper_ = np.broadcast_to(np.asarray(most, dtype=np.float64), len(costs))
    kinds = highspy.HighsVarType
    program.integrality_ = [kinds.kInteger] * integers + [kinds.kContinuous] * (len(costs) - integers)
    program.row_lower_ = np.array([low for _, low, _ in rows], dtype=np.float64)
    program.row_upper_ = np.array([high for _, _, high in rows], dtype=np.float64)
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.cumsum([0, *(len(coefficients) for coefficients, _, _ in rows)])
    matrix.index_ = np.array([column for coefficients, _, _ in rows for column in coefficients], dtype=np.int32)
    matrix.value_ = np.array([each for coefficients, _, _ in rows for each in coefficients.values()], dtype=np.float64)

    # `highspy.Highs`, the class around this one, prints a line when it is made, before an option can say not to.
    solver = highspy._core._Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_max_nodes", nodes_max)
    solver.setOptionValue("presolve", "on" if presolve else "off")
    solver.passModel(program)
    solver.run()
    status, info = solver.getModelStatus(), solver.getInfo()
    if info.primal_solution_status != highspy.kSolutionStatusFeasible:
        return MilpSolution(None, status == highspy.HighsModelStatus.kInfeasible, -np.inf)
    values = np.array(solver.getSolution().col_value)
    return MilpSolution(values, status == highspy.HighsModelStatus.kOptimal, info.mip_dual_bound)
