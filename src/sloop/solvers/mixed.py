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
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.solvers import highs
from sloop.solvers.budget import IndexedPath, StageOptions, cheapest_by_forests
from sloop.solvers.fa2 import SLOTS_COARSE, slot_ms_of
from sloop.units import ROUNDING

NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes, as in `sloop.solvers.budget`."""
SLACK: Final = 1e-6
"""A rate is carried if at most this part of it is missing, and replicas fit if at most this part of a resource is
missing: HiGHS keeps rows with this tolerance."""
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
    present: int = 0
    """How many such replicas there are already."""
    takes: Mapping[int, float] = field(default_factory=dict)
    """What one replica takes, by index of the resource."""


@dataclass(frozen=True, slots=True)
class MixStage:
    """The rate of a stage and its options. A stage has at least one replica, also at a rate of 0."""

    rate_rps: float
    options: tuple[MixOption, ...]

    def served_rps(self, counts: Sequence[int]) -> float:
        """What these numbers of replicas serve together."""
        return sum(count * option.rate_rps for count, option in zip(counts, self.options, strict=True))

    def carries(self, counts: Sequence[int], share: float = 1.0) -> bool:
        """Whether these numbers of replicas carry this share of the rate."""
        return sum(counts) > 0 and self.served_rps(counts) >= share * self.rate_rps * (1 - SLACK) - ROUNDING


@dataclass(frozen=True, slots=True)
class Mix:
    """For each stage the number of replicas of each option. `proven`: no other mix has a lower `cost` + `start` ×
    `started`."""

    counts: tuple[tuple[int, ...], ...]
    cost: float
    """Of all replicas."""
    started: float
    """The cost of the replicas that are not there already."""
    proven: bool = True


def cheapest(
    stages: Sequence[MixStage], capacities: Sequence[float], *, start: float = 0.0, nodes_max: int = NODES_MAX
) -> Mix | None:
    """The cheapest mix that carries all rates within the capacities of the resources; None if there is none, or none
    was found within `nodes_max`. A replica that is not there already costs 1 + `start` times as much."""
    return _solved(stages, capacities, start=start, nodes_max=nodes_max)


def largest_share(stages: Sequence[MixStage], capacities: Sequence[float]) -> tuple[Mix, float] | None:
    """For overload: the largest share of all rates that fits, up to one per cent, and the cheapest mix for it. None if
    not even one replica of each stage fits. For one stage: the replicas that serve most, exactly.

    It bisects. A program with the share as a column would be exact, but HiGHS then prints to standard output.
    """
    best = _solved(stages, capacities, share=0.0)
    if best is None:
        return None
    if len(stages) == 1:
        best = _solved(stages, capacities, share=0.0, most_served=True) or best
        return best, min(1.0, _share(stages, best))
    low, high = _share(stages, best), 1.0
    while high - low > SHARE_ERROR:
        middle = (low + high) / 2
        mix = _solved(stages, capacities, share=middle)
        if mix is None:
            high = middle
        else:
            best, low = mix, max(middle, _share(stages, mix))
    return best, min(1.0, _share(stages, best))


def _share(stages: Sequence[MixStage], mix: Mix) -> float:
    """The largest share of all rates that the mix carries."""
    shares = (
        stage.served_rps(own) / stage.rate_rps
        for own, stage in zip(mix.counts, stages, strict=True)
        if stage.rate_rps > 0
    )
    return min(shares, default=1.0)


def fits(stages: Sequence[MixStage], counts: Sequence[Sequence[int]], capacities: Sequence[float]) -> bool:
    """Whether these replicas fit into the capacities."""
    taken = [0.0] * len(capacities)
    for stage, own in zip(stages, counts, strict=True):
        for count, option in zip(own, stage.options, strict=True):
            if count > option.most:
                return False
            for resource, taken_each in option.takes.items():
                taken[resource] += count * taken_each
    return all(own <= capacity * (1 + SLACK) for own, capacity in zip(taken, capacities, strict=True))


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the integer program: some replicas of an option, either of those present or of new ones."""

    stage: int
    index: int
    option: MixOption
    cost: float
    most: int


def _columns(stages: Sequence[MixStage], start: float) -> Iterator[_Column]:
    for at, stage in enumerate(stages):
        for index, option in enumerate(stage.options):
            present = min(option.present, option.most) if start else 0
            if present:
                yield _Column(at, index, option, option.cost, present)
            yield _Column(at, index, option, (1 + start) * option.cost, option.most - present)


def _solved(
    stages: Sequence[MixStage],
    capacities: Sequence[float],
    *,
    share: float = 1.0,
    start: float = 0.0,
    nodes_max: int = NODES_MAX,
    most_served: bool = False,
) -> Mix | None:
    """The cheapest mix for `share` of all rates, or the one that serves most."""
    if not all(stage.options for stage in stages):
        return None
    columns = list(_columns(stages, start))
    rows = [*_limits(columns, capacities), *_loads(columns, stages, share)]
    costs = [-column.option.rate_rps if most_served else column.cost for column in columns]
    unit = min(map(abs, costs))  # HiGHS stops within an absolute gap of 1e-6
    most = [column.most for column in columns]
    found = highs.minimise(
        [cost / unit for cost in costs], rows, integers=len(costs), nodes_max=nodes_max, most=most, presolve=False
    )
    if found.values is None:
        return None
    counts = [[0] * len(stage.options) for stage in stages]
    for column, value in zip(columns, found.values, strict=True):
        counts[column.stage][column.index] += round(value)
    chosen = [
        (count, option)
        for own, stage in zip(counts, stages, strict=True)
        for count, option in zip(own, stage.options, strict=True)
    ]
    cost = math.fsum(count * option.cost for count, option in chosen)
    started = math.fsum(max(0, count - option.present) * option.cost for count, option in chosen)
    return Mix(tuple(map(tuple, counts)), cost, started, found.proven)


def _limits(columns: Sequence[_Column], capacities: Sequence[float]) -> Iterator[highs.Row]:
    """For each resource: what the replicas take is within its capacity."""
    for resource, capacity in enumerate(capacities):
        takes = {at: each.option.takes[resource] for at, each in enumerate(columns) if resource in each.option.takes}
        if takes and math.isfinite(capacity):
            unit = max(capacity, *takes.values())
            if unit > 0:
                yield {at: taken_each / unit for at, taken_each in takes.items()}, -math.inf, capacity / unit


def _loads(columns: Sequence[_Column], stages: Sequence[MixStage], share: float) -> Iterator[highs.Row]:
    """For each stage: its replicas carry `share` of its rate, and there is at least one."""
    for number, stage in enumerate(stages):
        own = {at: column.option for at, column in enumerate(columns) if column.stage == number}
        rate_rps = share * stage.rate_rps
        if rate_rps > 0:
            yield {at: option.rate_rps / rate_rps for at, option in own.items()}, 1.0, math.inf
        else:
            yield dict.fromkeys(own, 1.0), 1.0, math.inf


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
