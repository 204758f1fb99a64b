"""The same as `labels`, as a mixed-integer linear program for HiGHS: the reference, and an alternative.

One binary for each option of a stage; replicas follow from the option. A sum of scores is linear as it is. A product
needs a variable for each combination of scores, whose marginals are the stages' binaries, and which is therefore
whole where those are: exact, but only for as many combinations as `COMBINATIONS_MAX`. The objective decides, not the
order among equal objectives. Source: IPA (Razavi, dissertation, chapter P3), where Gurobi solves it as bilinear.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from sloop.errors import InputError
from sloop.solvers import highs
from sloop.solvers.highs import Row
from sloop.solvers.variants import (
    Answer,
    Choices,
    Goal,
    Option,
    cost,
    is_feasible,
    objective,
    options_of,
    unbeaten,
    ways_of,
)

COMBINATIONS_MAX: Final = 10_000
NODES_MAX: Final = 2_000
"""Of HiGHS' search; a count and not a time, so that the same question has the same answer everywhere."""


def solve(stages: Sequence[Choices], goal: Goal, *, nodes_max: int = NODES_MAX) -> Answer | None:
    """An answer with the best objective; None where nothing is feasible, or nothing was found within `nodes_max`.

    Where the search ended early, `gap` says how much better f could at most be. `InputError` where scores are
    multiplied, and stages and candidates are too many for that.
    """
    options = [unbeaten(options_of(stage, goal.replicas_max)) for stage in stages]
    if not all(options):
        return None
    firsts = [0, *itertools.accumulate(len(own) for own in options)]
    costs = [cost(option, goal) for own in options for option in own]
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
        return None  # within HiGHS' tolerance of a limit, but not within ours
    reached = objective(chosen, goal)
    return Answer(chosen, reached, gap=0.0 if found.proven else max(0.0, -found.bound - reached))


def _constraints(options: Sequence[Sequence[Option]], firsts: Sequence[int], goal: Goal) -> Iterator[Row]:
    """One option for each stage, the ways in time, and no more cores than there are."""
    for own, first in zip(options, firsts, strict=False):
        yield dict.fromkeys(range(first, first + len(own)), 1.0), 1.0, 1.0
    for way in ways_of(goal, len(options)):
        if math.isfinite(way.slo_ms):
            taken = {
                firsts[stage] + place: option.latency_ms
                for stage in way.stages
                for place, option in enumerate(options[stage])
            }
            yield taken, -math.inf, way.slo_ms
    if math.isfinite(goal.cores_max):
        every = itertools.chain.from_iterable(options)
        yield {place: option.cores for place, option in enumerate(every)}, -math.inf, goal.cores_max


def _combinations(options: Sequence[Sequence[Option]]) -> list[tuple[float, ...]]:
    """One score from each stage, in all ways."""
    scores = [sorted({option.score for option in own}) for own in options]
    count = math.prod(len(own) for own in scores)
    if count > COMBINATIONS_MAX:
        raise InputError(
            f"{count} combinations of variants are more than the {COMBINATIONS_MAX} a linear program may have",
            help="use `solver: labels`, or the accuracy measure pas_rank",
        )
    return list(itertools.product(*scores))


def _marginals(
    options: Sequence[Sequence[Option]], firsts: Sequence[int], combinations: Sequence[tuple[float, ...]]
) -> Iterator[Row]:
    """For each score of a stage: as much of it in the combinations as in the options."""
    for stage, own in enumerate(options):
        for score in sorted({option.score for option in own}):
            row = {firsts[stage] + place: 1.0 for place, option in enumerate(own) if option.score == score}
            row |= {firsts[-1] + place: -1.0 for place, scores in enumerate(combinations) if scores[stage] == score}
            yield row, 0.0, 0.0
