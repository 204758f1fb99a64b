"""IPA's problem as a mixed-integer linear program for HiGHS, the alternative to `label_setting`.

Each option of a stage is a binary variable. A sum of scores is already linear. A product needs a variable for each
combination of scores; its marginals equal the stages' binaries, so it is integer if they are. This is exact, but
limited to `COMBINATIONS_MAX` combinations. Equal objectives are in no particular order. Source: IPA (Razavi,
dissertation, chapter P3), which solves the bilinear form with Gurobi.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from sloop.api import InputError
from sloop.api.solvers import Row, highs
from sloop_systems.ipa.solver import (
    IpaGoal,
    IpaOption,
    IpaSolution,
    IpaStage,
    is_feasible,
    objective,
    options_of,
    pareto_options,
    penalty_of,
)

COMBINATIONS_MAX: Final = 10_000
NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes, as in `sloop.solvers.budget`."""


def solve(stages: Sequence[IpaStage], goal: IpaGoal, *, nodes_max: int = NODES_MAX) -> IpaSolution | None:
    """A solution with the best objective; None if none is feasible, or none was found within `nodes_max`.

    If the search ended early, `gap` is an upper bound of how much better f could be. InputError if scores are
    multiplied and have more than `COMBINATIONS_MAX` combinations.
    """
    options = [pareto_options(options_of(stage, goal.replicas_max)) for stage in stages]
    if not all(options):
        return None
    firsts = [0, *itertools.accumulate(len(own) for own in options)]
    costs = [penalty_of(option, goal) for own in options for option in own]
    rows = list(_constraints(options, firsts, goal))
    if goal.summed:
        scores = [option.score for own in options for option in own]
        costs = [taken - goal.alpha * score for taken, score in zip(costs, scores, strict=True)]
    else:
        combinations = _combinations(options)
        rows += _marginals(options, firsts, combinations)
        costs += [-goal.alpha * math.prod(scores) for scores in combinations]
    found = highs.minimise(costs, rows, integers=firsts[-1], nodes_max=nodes_max)
    values = found.values
    if values is None:
        return None
    chosen = tuple(
        own[int(np.argmax(values[first : first + len(own)]))] for own, first in zip(options, firsts, strict=False)
    )
    if not is_feasible(chosen, goal):
        return None  # feasible within HiGHS' tolerance, but not within `is_feasible`'s
    reached = objective(chosen, goal)
    return IpaSolution(chosen, reached, gap=0.0 if found.proven else max(0.0, -found.bound - reached))


def _constraints(options: Sequence[Sequence[IpaOption]], firsts: Sequence[int], goal: IpaGoal) -> Iterator[Row]:
    """One option per stage, every path within its deadline, and all stages within the cores."""
    for own, first in zip(options, firsts, strict=False):
        yield dict.fromkeys(range(first, first + len(own)), 1.0), 1.0, 1.0
    for path in goal.deadline_paths(len(options)):
        if math.isfinite(path.slo_ms):
            taken = {
                firsts[stage] + place: option.latency_ms
                for stage in path.stages
                for place, option in enumerate(options[stage])
            }
            yield taken, -math.inf, path.slo_ms
    if math.isfinite(goal.cores_max):
        every = itertools.chain.from_iterable(options)
        yield {place: option.cores for place, option in enumerate(every)}, -math.inf, goal.cores_max


def _combinations(options: Sequence[Sequence[IpaOption]]) -> list[tuple[float, ...]]:
    """All combinations of one score per stage."""
    scores = [sorted({option.score for option in own}) for own in options]
    count = math.prod(len(own) for own in scores)
    if count > COMBINATIONS_MAX:
        raise InputError(
            f"{count} combinations of variants are more than the {COMBINATIONS_MAX} a linear program may have",
            help="use `solver: labels`, or the accuracy measure pas_rank",
        )
    return list(itertools.product(*scores))


def _marginals(
    options: Sequence[Sequence[IpaOption]], firsts: Sequence[int], combinations: Sequence[tuple[float, ...]]
) -> Iterator[Row]:
    """For each score of a stage: the sum of its combinations equals the sum of its options."""
    for stage, own in enumerate(options):
        for score in sorted({option.score for option in own}):
            row = {firsts[stage] + place: 1.0 for place, option in enumerate(own) if option.score == score}
            row |= {firsts[-1] + place: -1.0 for place, scores in enumerate(combinations) if scores[stage] == score}
            yield row, 0.0, 0.0
