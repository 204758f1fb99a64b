"""The cheapest mix of unequal replicas: for each stage of an application, how many of each kind carry its rate.

A stage can choose among options: one replica of an option serves some rate, costs something, and takes some of the
cluster's resources. Their numbers are a covering knapsack with bounds, one for each stage, and the stages share the
resources: an integer program, solved by HiGHS. Mixes pay off because a rate is seldom a multiple of what the cheapest
option per request serves: a smaller replica of another kind carries the rest (the idea of Ribbon, SC 2021, and Kairos,
HPDC 2023, which choose such mixes by search).

Which options a stage has depends on its part of the deadline. `deadline_parts` divides the deadlines of all paths among
the stages such that equal replicas would be cheapest: the multiple-choice knapsack of FA2 (`sloop.solvers.budget`).

Units: requests per second, milliseconds, and any unit of cost and of resources.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.solvers import highs
from sloop.solvers.budget import IndexedPath, StageOptions, cheapest_by_forests
from sloop.solvers.fa2 import SLOTS_COARSE, slot_ms_of
from sloop.units import ROUNDING

NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes, as in `sloop.solvers.budget`."""
COVERED: Final = 1e-6
"""A rate is carried if at most this part of it is missing: HiGHS keeps rows with this tolerance."""
CUTS_MAX: Final = 4
"""The most ways to cut a graph whose paths meet, as in Biscale; each takes as much time to solve as a chain."""
SHARE_ERROR: Final = 0.01
"""How far the share of an overload may be below the largest possible."""
COST_UNITS: Final = 1 << 40
"""The largest cost of an option as an integer: fine enough for prices, and sums of many stages do not overflow."""


@dataclass(frozen=True, slots=True)
class MixOption:
    """One kind of replica of a stage."""

    rate_rps: float
    """What one replica serves."""
    cost: float
    """Of one replica; above 0."""
    most: int
    """The most replicas."""
    least: int = 0
    """Replicas that must be in the mix."""
    takes: Mapping[int, float] = field(default_factory=dict)
    """What one replica takes, by index of the resource."""


@dataclass(frozen=True, slots=True)
class MixStage:
    """The rate of a stage and its options. A stage has at least one replica, also at a rate of 0."""

    rate_rps: float
    options: tuple[MixOption, ...]

    def carries(self, counts: Sequence[int], share: float = 1.0) -> bool:
        """Whether these numbers of replicas carry this share of the rate."""
        served_rps = sum(count * option.rate_rps for count, option in zip(counts, self.options, strict=True))
        return sum(counts) > 0 and served_rps >= share * self.rate_rps * (1 - COVERED) - ROUNDING

    @property
    def least_cost(self) -> float:
        """A lower bound of the cost of any mix that carries the rate; infinite if there is no option."""
        cheapest = min((option.cost for option in self.options), default=math.inf)
        per_rps = min((option.cost / option.rate_rps for option in self.options), default=math.inf)
        return max(cheapest, self.rate_rps * per_rps)


@dataclass(frozen=True, slots=True)
class Mix:
    """For each stage the number of replicas of each option, and the cost of all. `proven`: no other is cheaper."""

    counts: tuple[tuple[int, ...], ...]
    cost: float
    proven: bool = True


def cheapest(stages: Sequence[MixStage], capacities: Sequence[float], *, nodes_max: int = NODES_MAX) -> Mix | None:
    """The cheapest mix that carries all rates within the capacities of the resources; None if there is none, or none
    was found within `nodes_max`."""
    return _solved(stages, capacities, 1.0, nodes_max)


def largest_share(stages: Sequence[MixStage], capacities: Sequence[float]) -> tuple[Mix, float] | None:
    """For overload: the largest share of all rates that fits, up to one per cent, and the cheapest mix for it. None if
    not even one replica of each stage fits. For one stage: the replicas that serve most, exactly.

    It bisects. A program with the share as a column would be exact, but HiGHS then prints to standard output.
    """
    best = _solved(stages, capacities, 0.0, NODES_MAX)
    if best is None:
        return None
    if len(stages) == 1:
        best = _solved(stages, capacities, 0.0, NODES_MAX, most_served=True) or best
        return best, min(1.0, _share(stages, best))
    low, high = _share(stages, best), 1.0
    while high - low > SHARE_ERROR:
        middle = (low + high) / 2
        mix = _solved(stages, capacities, middle, NODES_MAX)
        if mix is None:
            high = middle
        else:
            best, low = mix, max(middle, _share(stages, mix))
    return best, min(1.0, _share(stages, best))


def _share(stages: Sequence[MixStage], mix: Mix) -> float:
    """The largest share of all rates that the mix carries."""
    return min(
        (
            sum(n * option.rate_rps for n, option in zip(own, stage.options, strict=True)) / stage.rate_rps
            for own, stage in zip(mix.counts, stages, strict=True)
            if stage.rate_rps > 0
        ),
        default=1.0,
    )


def mix_of(stages: Sequence[MixStage], counts: Sequence[Sequence[int]], capacities: Sequence[float]) -> Mix | None:
    """These replicas as a mix; None if they do not carry the rates, or do not fit."""
    carries = all(stage.carries(own) for stage, own in zip(stages, counts, strict=True))
    if not carries or not fits(stages, counts, capacities):
        return None
    return _Columns(stages).mix(tuple(map(tuple, counts)), proven=False)


def fits(stages: Sequence[MixStage], counts: Sequence[Sequence[int]], capacities: Sequence[float]) -> bool:
    """Whether these replicas fit into the capacities."""
    taken = [0.0] * len(capacities)
    for stage, own in zip(stages, counts, strict=True):
        for count, option in zip(own, stage.options, strict=True):
            if count > option.most:
                return False
            for resource, amount in option.takes.items():
                taken[resource] += count * amount
    return all(own <= capacity * (1 + ROUNDING) for own, capacity in zip(taken, capacities, strict=True))


class _Columns:
    """The options of all stages as columns of an integer program: replicas beyond those that must be there."""

    def __init__(self, stages: Sequence[MixStage]) -> None:
        self.options = [option for stage in stages for option in stage.options]
        ends = np.cumsum([0, *(len(stage.options) for stage in stages)]).tolist()
        self.of_stages = [range(first, end) for first, end in pairwise(ends)]
        self.most = [max(0, option.most - option.least) for option in self.options]

    def limits(self, capacities: Sequence[float]) -> Iterator[highs.Row]:
        """For each resource: what the replicas take is within its capacity, as a fraction of it."""
        for resource, capacity in enumerate(capacities):
            takes = {at: option.takes[resource] for at, option in enumerate(self.options) if resource in option.takes}
            there = sum(amount * self.options[at].least for at, amount in takes.items())
            unit = max(capacity, *takes.values(), 1e-300) if takes else 1.0
            if takes and math.isfinite(capacity):
                yield {at: amount / unit for at, amount in takes.items()}, -math.inf, (capacity - there) / unit

    def counts(self, values: NDArray[np.float64]) -> tuple[tuple[int, ...], ...]:
        """Replicas by stage and option, those that must be there included."""
        return tuple(tuple(self.options[at].least + round(values[at]) for at in own) for own in self.of_stages)

    def mix(self, counts: tuple[tuple[int, ...], ...], *, proven: bool) -> Mix:
        every = [count for own in counts for count in own]
        cost = math.fsum(count * option.cost for count, option in zip(every, self.options, strict=True))
        return Mix(counts, cost, proven)


def _solved(
    stages: Sequence[MixStage],
    capacities: Sequence[float],
    share: float,
    nodes_max: int,
    *,
    most_served: bool = False,
) -> Mix | None:
    """The cheapest mix for `share` of all rates, or the one that serves most."""
    if not all(stage.options for stage in stages):
        return None
    columns = _Columns(stages)
    rows = list(columns.limits(capacities))
    for stage, own in zip(stages, columns.of_stages, strict=True):
        there = [option.least for option in stage.options]
        rate_rps = share * stage.rate_rps
        if not stage.carries(there, share):
            if not any(there):
                rows.append((dict.fromkeys(own, 1.0), 1.0, math.inf))
            missing_rps = rate_rps - sum(n * o.rate_rps for n, o in zip(there, stage.options, strict=True))
            if missing_rps > 0:
                served = {column: columns.options[column].rate_rps / rate_rps for column in own}
                rows.append((served, missing_rps / rate_rps, math.inf))
    costs = [-option.rate_rps if most_served else option.cost for option in columns.options]
    # In units of the smallest: HiGHS stops within an absolute gap of 1e-6.
    unit = min(map(abs, costs))
    costs = [cost / unit for cost in costs]
    if not rows:
        return columns.mix(tuple(tuple(o.least for o in stage.options) for stage in stages), proven=True)
    found = highs.minimise(costs, rows, integers=len(costs), nodes_max=nodes_max, most=columns.most)
    if found.values is None:
        return None
    return columns.mix(columns.counts(found.values), proven=found.proven)


# Deadlines of graphs


@dataclass(frozen=True, slots=True)
class TimedCosts:
    """The ways to run a whole stage with equal replicas: the part of the deadline that each needs, and its cost."""

    time_ms: NDArray[np.float64]
    cost: NDArray[np.float64]

    def options(self, slot_ms: float, per_cost: float) -> StageOptions:
        """Whole slots and costs."""
        slots = np.ceil(self.time_ms / slot_ms - ROUNDING).astype(np.int64)
        return StageOptions(np.rint(self.cost * per_cost).astype(np.int64), slots)


def deadline_parts(stages: Sequence[TimedCosts], paths: Sequence[IndexedPath]) -> tuple[float, ...] | None:
    """By stage, its part of the deadlines in milliseconds; along each path the parts add up to at most its deadline.

    It is the time that the stage needs in the cheapest choice for all stages, and in proportion to it what its paths
    have left. None if no choice keeps all deadlines. Each stage must be on a path and have a choice.
    """
    quickest_ms = [float(own.time_ms.min()) for own in stages]
    if any(sum(quickest_ms[stage] for stage in path.stages) > path.slo_ms + ROUNDING for path in paths):
        return None
    needed_ms = quickest_ms
    if len(stages) > 1:
        slot_ms = slot_ms_of(paths, SLOTS_COARSE)
        per_cost = COST_UNITS / max(float(own.cost.max()) for own in stages)
        options = [own.options(slot_ms, per_cost) for own in stages]
        chosen = cheapest_by_forests(options, paths, quickest_ms, slot_ms=slot_ms, most=CUTS_MAX)
        if chosen is not None:
            needed_ms = [float(own.time_ms[index]) for own, index in zip(stages, chosen, strict=True)]
    factors = [
        min(path.slo_ms / sum(needed_ms[other] for other in path.stages) for path in paths if stage in path.stages)
        for stage in range(len(stages))
    ]
    return tuple(need_ms * factor for need_ms, factor in zip(needed_ms, factors, strict=True))
