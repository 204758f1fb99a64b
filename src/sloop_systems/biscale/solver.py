"""Biscale's programs besides the vertical one: replicas of one size, and small replicas beside large ones.

Razavi, dissertation (TU Darmstadt 2024), chapter P4, Eq. P4.6; the same system is Themis, arXiv 2407.14843. The
publication's integer program has three forms. `horizontal` (Algorithm 4): equal replicas of the smallest common size,
as many as the rate needs. The vertical one (Algorithm 3) and the split are the platform's (`sloop.solvers.sizes`): its
policy `vertical` uses them too. The loops printed in the dissertation contain errors: the throughput test must count
the replicas (n · h ≥ λ), the objective is Σ n · c, and the binary search is inverted. Both modules solve the program,
not the loops.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sloop.api import ROUNDING
from sloop.api.solvers import (
    RateTable,
    ReplicaGroups,
    SizeChoice,
    SizeOptions,
    SizeProblem,
    StageReplicas,
    cores_of,
    highest_rate,
)


def horizontal(problem: SizeProblem, rate_rps: float) -> tuple[SizeChoice, ...] | None:
    """As many replicas as the rate needs, all of the smallest size that keeps every budget.

    A stage whose profile ends at fewer units keeps its largest size. None if no size keeps the budgets within
    `cores_total`.
    """
    tables = [problem.rate_table(stage, rate_rps) for stage in problem.stages]
    largest = [len(table.latency_ms) - 1 for table in tables]
    rows = [np.minimum(np.arange(max(largest) + 1), own) for own in largest]
    least = sum(_cores_min(table)[own] for table, own in zip(tables, rows, strict=True))
    for row in np.flatnonzero(least <= problem.cores_total + ROUNDING).tolist():
        solution = problem.solve([_of_size(table, min(row, own)) for table, own in zip(tables, largest, strict=True)])
        if solution is not None:
            return solution
    return None


def horizontal_within_cores(problem: SizeProblem, rate_rps: float) -> tuple[SizeChoice, ...]:
    """The horizontal solution for the rate, or for the highest whole rate below it that the cores can carry.

    The problem must have a horizontal solution at a rate of 0.
    """
    solution = horizontal(problem, rate_rps)
    if solution is not None:
        return solution
    idle = horizontal(problem, 0)
    assert idle is not None, "the problem has no solution at any rate"
    return highest_rate(lambda rps: horizontal(problem, rps), idle, 0, int(rate_rps) + 1)[0]


def _cores_min(table: RateTable) -> NDArray[np.float64]:
    """By replica size, shape (cores,): the fewest units that keep up with the rate, at any latency."""
    fewest: NDArray[np.float64] = table.replicas_needed().min(axis=1)
    return fewest * np.arange(1, len(fewest) + 1)


def _of_size(table: RateTable, row: int) -> SizeOptions:
    """For each batch, as many replicas of `row` + 1 units as the rate needs."""
    needed = table.replicas_needed()[row]
    columns = np.flatnonzero(np.isfinite(needed))
    replicas = needed[columns].astype(np.int64)
    return SizeOptions(table, replicas, np.full(len(columns), row + 1), columns + 1, table.slots[row, columns])


def enlarged(problem: SizeProblem, choices: Sequence[SizeChoice]) -> tuple[SizeChoice, ...]:
    """The choices with larger replicas: idle cores go, unit by unit, where they shorten the path that exceeds its
    budget most (or has the least slack), until none are left or nothing is gained."""
    made = list(choices)
    while can := [index for index, own in enumerate(made) if own.replicas + cores_of(made) <= problem.cores_total]:
        gains = {index: _gain_ms(problem, made, index) for index in can}
        index = max(can, key=gains.__getitem__)
        if gains[index] <= (0.0, 0.0):
            break
        made[index] = _with_unit(problem, made, index)
    return tuple(made)


def _gain_ms(problem: SizeProblem, choices: Sequence[SizeChoice], index: int) -> tuple[float, float]:
    """How much (ms) one more unit for a stage shortens the path that exceeds its budget most, and itself."""
    own = choices[index]
    if own.cores >= len(problem.stages[index].latency_ms):
        return 0.0, 0.0
    larger = list(choices)
    larger[index] = _with_unit(problem, choices, index)
    return _excess_ms(problem, choices) - _excess_ms(problem, larger), own.latency_ms - larger[index].latency_ms


def _with_unit(problem: SizeProblem, choices: Sequence[SizeChoice], index: int) -> SizeChoice:
    own = choices[index]
    latency_ms = float(problem.stages[index].latency_ms[own.cores, own.batch - 1])
    return replace(own, cores=own.cores + 1, latency_ms=latency_ms)


def _excess_ms(problem: SizeProblem, choices: Sequence[SizeChoice]) -> float:
    """By how much the segment with the least slack exceeds its budget."""
    taken_ms = [choice.latency_ms + choice.wait_ms for choice in choices]
    return max(sum(taken_ms[at] for at in each.stages) - problem.slot_ms * each.slots for each in problem.segments)


def carries(problem: SizeProblem, rate_rps: float, sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether replicas of given sizes, (count, units each) by stage, serve the rate within every budget.

    Each stage uses the quickest batch that keeps up. A comparison with `vertical` would not do: its cheapest
    solution may enlarge one stage and shrink another, although the given sizes also carry the rate.
    """
    slots = []
    for stage, (count, units) in zip(problem.stages, sizes, strict=True):
        table = problem.rate_table(stage, rate_rps)
        row = min(units, len(stage.latency_ms)) - 1
        enough = count * table.throughput_rps[row] >= table.rate_rps * (1 - ROUNDING)
        if not enough.any():
            return False
        slots.append(int(table.slots[row][enough].min()))
    return bool((problem.matrix.slack(slots) >= 0).all())


def replicas_carry(problem: SizeProblem, rate_rps: float, present: Sequence[StageReplicas]) -> bool:
    """Whether the serving replicas carry the rate: the largest of each stage alone, or all counted as the smallest."""
    large = tuple((one.largest_count, one.largest) for one in present)
    small = tuple((one.count, one.smallest) for one in present)
    return any(carries(problem, rate_rps, sizes) for sizes in dict.fromkeys((large, small)))


def total_units(groups: Sequence[ReplicaGroups]) -> int:
    """Units of all replicas of all stages."""
    return sum(count * units for group in groups for count, units in group)


def with_small(present: StageReplicas, choice: SizeChoice) -> ReplicaGroups:
    """The present replicas plus new ones of the chosen size, up to the chosen number."""
    counts = Counter((*present.ready, *present.starting))
    counts[choice.cores] += max(0, choice.replicas - counts.total())
    return [(count, units) for units, count in counts.items()]


def small_first(
    problem: SizeProblem, rate_rps: float, present: Sequence[StageReplicas], goal: Sequence[SizeChoice]
) -> tuple[list[ReplicaGroups], tuple[SizeChoice, ...]]:
    """Groups and choices if the present replicas at full size and the goal's new ones together exceed the cluster.

    The goal's missing replicas get their cores first, since small replicas give the most throughput per core (README;
    dissertation chapter P4, on why to scale horizontally). The present ones share the remaining cores such that they
    carry most of the rate until the new ones are ready; the returned choices are those of the present ones.
    """
    counts = [min(one.count, choice.replicas) for one, choice in zip(present, goal, strict=True)]
    missing = [choice.replicas - count for count, choice in zip(counts, goal, strict=True)]
    reserved = sum(count * choice.cores for count, choice in zip(missing, goal, strict=True))
    split = replace(problem, cores_total=problem.cores_total - reserved).split(rate_rps, counts)
    choices = split.choices if split else tuple(goal)
    groups = [
        [(count, choice.cores), (new, small.cores)]
        for count, choice, new, small in zip(counts, choices, missing, goal, strict=True)
    ]
    return groups, choices
