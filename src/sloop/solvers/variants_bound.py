"""How good a choice of variants can be at most: what the stages from some position on bring, with limits priced.

Prices on the milliseconds of each way and on cores (Lagrange) make costs of limits; what the stages behind can bring
then depends on nothing but the accuracy so far, and convexly: it is worked out for a grid of accuracies, from the last
stage to the first, and between two of them it is less than the chord. Whatever the prices, no choice is better than
this bound; which prices are good is for `sloop.solvers.labels` to find.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.solvers.variants import Goal, Option, cost, extended, ways_of

GRID: Final = 129
"""Accuracies at which the stages behind are asked what they can bring."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stage:
    """Its options, figure by figure, and which ways it is on."""

    options: Sequence[Option]
    score: Floats
    cost: Floats
    latency_ms: Floats
    cores: Floats
    batch: Ints
    candidate: Ints
    on: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Begun:
    """Ways with the same stages left, of which the one that is nearest its limit decides; what is less than `least_ms`
    cannot become too much."""

    columns: list[int]
    limits_ms: Floats
    least_ms: float

    def taken_ms(self, taken_ms: Floats) -> Floats:
        """By label what decides, from what it has taken on each way: of two labels the less, the better."""
        nearest: Floats = (taken_ms[:, self.columns] - self.limits_ms).max(axis=1)
        return np.maximum(nearest, self.least_ms)


@dataclass(frozen=True, slots=True)
class Program:
    """The stages and ways in arrays. By position, the last behind all stages: what those from there on take at least,
    and what those before it make of accuracy."""

    goal: Goal
    stages: list[Stage]
    limits_ms: Floats
    rest_ms: list[Floats]
    rest_cores: list[float]
    rest_score: list[float]
    """The least that accuracy so far is multiplied by."""
    values: list[Floats]
    """From the least weighted accuracy so far to the largest."""
    begun: list[list[Begun]]
    scale: float
    """The largest that is added up in an objective."""

    @classmethod
    def of(cls, options: Sequence[Sequence[Option]], goal: Goal) -> "Program":
        """Ways of the same stages are one; those without a deadline are none."""
        limits: dict[frozenset[int], float] = {}
        for way in ways_of(goal, len(options)):
            if way.slo_ms < math.inf:
                key = frozenset(way.stages)
                limits[key] = min(way.slo_ms, limits.get(key, math.inf))
        limits_ms = np.array(list(limits.values()), dtype=np.float64)
        stages = [_stage(own, [place in way for way in limits], goal) for place, own in enumerate(options)]
        nothing = np.zeros(len(limits))
        rest_ms, most_ms, rest_cores, rest_score = [nothing], [nothing], [0.0], [1.0]
        for stage in reversed(stages):
            rest_ms.insert(0, rest_ms[0] + stage.on * stage.latency_ms.min())
            most_ms.insert(0, most_ms[0] + stage.on * stage.latency_ms.max())
            rest_cores.insert(0, rest_cores[0] + float(stage.cores.min()))
            rest_score.insert(0, rest_score[0] * (1.0 if goal.summed else float(stage.score.min())))
        low = high = 0.0 if goal.summed else goal.alpha
        values = [np.linspace(low, high, GRID)]
        for stage in stages:
            low = extended(low, float(stage.score.min()), goal)
            high = extended(high, float(stage.score.max()), goal)
            values.append(np.linspace(low, high, GRID))
        begun = [_begun(list(limits), limits_ms, place, most_ms[place]) for place in range(len(stages) + 1)]
        scale = max(1.0, goal.alpha, high, sum(float(stage.cost.max()) for stage in stages))
        return cls(goal, stages, limits_ms, rest_ms, rest_cores, rest_score, values, begun, scale)

    def longer(self, values: Floats, scores: Floats) -> Floats:
        """`extended`, for many."""
        return values + self.goal.alpha * scores if self.goal.summed else values * scores


def _stage(options: Sequence[Option], on: Sequence[bool], goal: Goal) -> Stage:
    return Stage(
        options,
        np.array([option.score for option in options], dtype=np.float64),
        np.array([cost(option, goal) for option in options], dtype=np.float64),
        np.array([option.latency_ms for option in options], dtype=np.float64),
        np.array([option.cores for option in options], dtype=np.float64),
        np.array([option.batch for option in options], dtype=np.int64),
        np.array([option.candidate for option in options], dtype=np.int64),
        np.array(on, dtype=np.bool_),
    )


def _begun(ways: Sequence[frozenset[int]], limits_ms: Floats, place: int, most_ms: Floats) -> list[Begun]:
    """What still counts before stage number `place`; a way that has not begun is the same for all labels."""
    groups: dict[frozenset[int], dict[frozenset[int], int]] = {}
    for column, way in enumerate(ways):
        rest, taken = frozenset(s for s in way if s >= place), frozenset(s for s in way if s < place)
        if rest and taken:
            groups.setdefault(rest, {})[taken] = column
    found: dict[object, Begun] = {}
    for group in groups.values():
        columns = list(group.values())
        # One way compares alike whatever its limit, so ways that begin alike and go on differently compare once.
        key = next(iter(group)) if len(group) == 1 else tuple(columns)
        limits = np.zeros(1) if len(group) == 1 else limits_ms[columns]
        least_ms = float((limits_ms[columns] - limits - most_ms[columns]).max())
        if key not in found or least_ms < found[key].least_ms:
            found[key] = Begun(columns, limits, least_ms)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a millisecond on each way, and of a core: what the limits are worth at them, what each option costs with them,
    and by position what the stages from there on bring at most for each of `Program.values`."""

    limits: float
    costs: list[Floats]
    brought: list[Floats]

    @classmethod
    def of(cls, program: Program, per_ms: Floats, per_core: float) -> "Prices":
        """Prices are at least 0, and 0 where there is no limit."""
        limits = float((per_ms * program.limits_ms).sum()) + (per_core * program.goal.cores_max if per_core else 0.0)
        costs = [s.cost + float(per_ms[s.on].sum()) * s.latency_ms + per_core * s.cores for s in program.stages]
        brought = [program.values[-1]]
        for place in reversed(range(len(costs))):
            longer = program.longer(program.values[place][:, None], program.stages[place].score)
            after = np.interp(longer, program.values[place + 1], brought[0])
            brought.insert(0, (after - costs[place]).max(axis=1))
        return cls(limits, costs, brought)

    @property
    def bound(self) -> float:
        """f that no choice exceeds."""
        return float(self.brought[0][-1]) + self.limits

    def after(self, program: Program, place: int, values: Floats) -> Floats:
        """What the stages from `place` on bring at most for such weighted accuracies."""
        return np.interp(values, program.values[place], self.brought[place])

    def chosen(self, program: Program) -> tuple[Option, ...]:
        """What is best where limits are priced and not kept."""
        found, value = list[Option](), program.values[0][-1]
        for place, stage in enumerate(program.stages):
            longer = program.longer(value, stage.score)
            index = int((self.after(program, place + 1, longer) - self.costs[place]).argmax())
            found.append(stage.options[index])
            value = longer[index]
        return tuple(found)
