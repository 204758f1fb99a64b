"""The cheapest mix of unequal replicas: for each stage of an application, how many of each kind carry its rate.

A stage can choose among options: one replica of an option serves some rate, costs something, and takes a part of a
node. Their numbers are a covering knapsack with bounds, one for each stage, and the stages share the nodes: an integer
program, solved by HiGHS. Nodes that are rented are paid for as a whole, and the program chooses their number too. Mixes
pay off because a rate is seldom a multiple of what the cheapest option per request serves: a smaller replica of another
kind carries the rest (the idea of Ribbon, SC 2021, and Kairos, HPDC 2023, which choose such mixes by search).

Which options a stage has depends on its part of the deadline. `deadline_parts` divides the deadlines of all paths among
the stages such that equal replicas would be cheapest: the multiple-choice knapsack of FA2 (`sloop.solvers.budget`).

Units: requests per second, milliseconds, and any unit of cost and of resources.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.solvers import highs
from sloop.solvers.budget import IndexedPath, StageOptions, cheapest_by_forests, slot_ms_of
from sloop.units import ROUNDING, WIDE_ROUNDING

NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes, as in `sloop.solvers.budget`."""
CUTS_MAX: Final = 4
"""The most ways to cut a graph whose paths meet, as in Biscale; each takes as much time to solve as a chain."""
TIE: Final = 1e-3
"""On nodes that are paid for as a whole, this part of a replica's cost counts in the program, so that fewer replicas
are better; it is not in the cost of a mix."""
STEPS_MAX: Final = 2_000
"""The most steps of `_OneStageSearch`, some microseconds each; HiGHS solves what takes longer."""
SOLUTIONS_KEPT: Final = 1_024
"""Applications with equal profiles, deadlines and rates have equal programs, and each takes HiGHS some milliseconds."""
COST_UNITS: Final = 1 << 40
"""The largest cost of an option as an integer: fine enough for prices, and sums of many stages do not overflow."""


@dataclass(frozen=True, slots=True)
class MixNodes:
    """The nodes of one kind: some that are always there, and some that can be rented as a whole."""

    owned: float
    """How many are always there. Replicas pay for their shares of them."""
    rented: int = 0
    """How many more can be rented."""
    price: float = 0.0
    """Of one node, if any can be rented."""

    def without(self, nodes: float) -> "MixNodes":
        """The pool with so many nodes less."""
        rented = min(self.rented, max(0, math.ceil(nodes - self.owned - ROUNDING)))
        return replace(self, owned=max(0.0, self.owned + rented - nodes), rented=self.rented - rented)

    def cost_of(self, used: float) -> float:
        """What the nodes cost if `used` of them are, where some can be rented; 0 if replicas pay for themselves."""
        if not self.rented:
            return 0.0
        rented = max(0, math.ceil(used - self.owned - WIDE_ROUNDING))
        return self.price * (rented + max(0.0, used - rented))


@dataclass(frozen=True, slots=True)
class MixOption:
    """One kind of replica of a stage."""

    rate_rps: float
    """What one replica serves."""
    cost: float
    """Of one replica, for its share of a node; above 0."""
    most: int
    """The most replicas."""
    present: int = 0
    """How many such replicas there are already."""
    pool: int = 0
    """The index of the pool on whose nodes they run."""
    nodes: float = 0.0
    """The part of a node that one replica takes, so that 1 / `nodes` of them fit on one."""


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
        return sum(counts) > 0 and self.served_rps(counts) >= share * self.rate_rps * (1 - WIDE_ROUNDING) - ROUNDING


@dataclass(frozen=True, slots=True)
class Mix:
    """For each stage the number of replicas of each option. `proven`: no other mix has a lower `cost` + `start` ×
    `started`."""

    counts: tuple[tuple[int, ...], ...]
    cost: float
    """Of all replicas, and of nodes that are rented as a whole."""
    started: float
    """The cost of the replicas that are not there already."""
    proven: bool = True


def cheapest(
    stages: Sequence[MixStage], pools: Sequence[MixNodes], *, start: float = 0.0, nodes_max: int = NODES_MAX
) -> Mix | None:
    """The cheapest mix that carries all rates on the nodes of the pools; None if there is none, or none was found
    within `nodes_max`. A replica that is not there already costs `start` times its cost more."""
    return _solved(tuple(stages), tuple(pools), start=start, nodes_max=nodes_max)


def largest_share(stages: Sequence[MixStage], pools: Sequence[MixNodes]) -> tuple[Mix, float] | None:
    """For an overload: the largest share of all rates that fits, at most 1, and the cheapest mix for it. None if not
    even one replica of each stage fits. The mix is `proven` if both the share and the mix are proven to be optimal."""
    stages, pools = tuple(stages), tuple(pools)
    bounds = [
        stage.served_rps([option.most for option in stage.options]) / stage.rate_rps
        for stage in stages
        if stage.rate_rps > 0
    ]
    bound = min([1.0, *bounds])
    if bound <= 0.0:
        return None
    largest = _solved(stages, pools, share=bound, most_served=True)
    if largest is None:
        return None
    share = min(1.0, _share(stages, largest))
    mix = _solved(stages, pools, share=share) or largest
    return replace(mix, proven=mix.proven and largest.proven), share


def _share(stages: Sequence[MixStage], mix: Mix) -> float:
    """The largest share of all rates that the mix carries."""
    shares = (
        stage.served_rps(own) / stage.rate_rps
        for own, stage in zip(mix.counts, stages, strict=True)
        if stage.rate_rps > 0
    )
    return min(shares, default=1.0)


def fits(stages: Sequence[MixStage], counts: Sequence[Sequence[int]], pools: Sequence[MixNodes]) -> bool:
    """Whether these replicas fit on the nodes."""
    options = [option for stage in stages for option in stage.options]
    if any(count > option.most for count, option in zip(chain.from_iterable(counts), options, strict=True)):
        return False
    used = _used(stages, counts, pools)
    return all(own <= (pool.owned + pool.rented) * (1 + WIDE_ROUNDING) for own, pool in zip(used, pools, strict=True))


def cost_of(stages: Sequence[MixStage], counts: Sequence[Sequence[int]], pools: Sequence[MixNodes]) -> float:
    """What these replicas cost."""
    cost = sum(pool.cost_of(own) for own, pool in zip(_used(stages, counts, pools), pools, strict=True))
    for own, stage in zip(counts, stages, strict=True):
        for count, option in zip(own, stage.options, strict=True):
            cost += 0.0 if pools[option.pool].rented else count * option.cost
    return cost


def _used(stages: Sequence[MixStage], counts: Sequence[Sequence[int]], pools: Sequence[MixNodes]) -> list[float]:
    """By pool, how many nodes the replicas take."""
    used = [0.0] * len(pools)
    for own, stage in zip(counts, stages, strict=True):
        for count, option in zip(own, stage.options, strict=True):
            used[option.pool] += count * option.nodes
    return used


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the integer program: some replicas of an option, either of those present or of new ones."""

    stage: int
    index: int
    option: MixOption
    cost: float
    most: int


def _columns(stages: Sequence[MixStage], pools: Sequence[MixNodes], start: float) -> Iterator[_Column]:
    for at, stage in enumerate(stages):
        for index, option in enumerate(stage.options):
            present = min(option.present, option.most) if start else 0
            paid = TIE if pools[option.pool].rented else 1.0
            if present:
                yield _Column(at, index, option, paid * option.cost, present)
            yield _Column(at, index, option, (paid + start) * option.cost, option.most - present)


@lru_cache(maxsize=SOLUTIONS_KEPT)
def _solved(
    stages: tuple[MixStage, ...],
    pools: tuple[MixNodes, ...],
    *,
    share: float = 1.0,
    start: float = 0.0,
    nodes_max: int = NODES_MAX,
    most_served: bool = False,
) -> Mix | None:
    """The cheapest mix for `share` of all rates, or one that carries most of this share.

    The columns are those of replicas, then for each pool with nodes to rent how many are rented (an integer), and how
    many of its other nodes are used; then, if it is to be found, how much of the share is carried.
    """
    if not all(stage.options for stage in stages):
        return None
    columns = list(_columns(stages, pools, start))
    if len(stages) == 1 and not most_served:
        search = _OneStageSearch(columns, pools, share * stages[0].rate_rps)
        if search.is_complete:
            return _mix(stages, pools, columns, search.best, proven=True) if search.best else None
    rented = {at: len(columns) + place for place, at in enumerate(at for at, pool in enumerate(pools) if pool.rented)}
    carried = len(columns) + 2 * len(rented) if most_served else None
    rows = [*_limits(columns, pools, rented), *_loads(columns, stages, share, carried)]
    node_costs = [pools[at].price for at in rented] * 2
    costs = [*(column.cost for column in columns), *node_costs]
    if most_served:
        costs = [*([0.0] * len(costs)), -1.0]
    unit = min(abs(cost) for cost in costs if cost)  # HiGHS stops within an absolute gap of 1e-6
    found = highs.minimise(
        [cost / unit for cost in costs],
        rows,
        integers=len(columns) + len(rented),
        nodes_max=nodes_max,
        most=[
            *(column.most for column in columns),
            *(pools[at].rented for at in rented),
            *(pools[at].owned for at in rented),
            *([1.0] if most_served else []),
        ],
        presolve=False,
    )
    if found.values is None:
        return None
    return _mix(stages, pools, columns, [round(value) for value in found.values[: len(columns)]], proven=found.proven)


def _mix(
    stages: tuple[MixStage, ...],
    pools: tuple[MixNodes, ...],
    columns: Sequence[_Column],
    values: Sequence[int],
    *,
    proven: bool,
) -> Mix:
    """The mix with so many replicas of each column."""
    counts = [[0] * len(stage.options) for stage in stages]
    for column, value in zip(columns, values, strict=True):
        counts[column.stage][column.index] += value
    started = math.fsum(
        max(0, count - option.present) * option.cost
        for own, stage in zip(counts, stages, strict=True)
        for count, option in zip(own, stage.options, strict=True)
    )
    return Mix(tuple(map(tuple, counts)), cost_of(stages, counts, pools), started, proven)


class _OneStageSearch:
    """The cheapest replicas of one stage: a knapsack, by branch and bound.

    Most applications have one stage. HiGHS takes 8 ms for each such program, mostly to set up; this takes 0.1 ms. The
    bound of the rest is its relaxation without the nodes' limits, in which nodes can be rented in part, so that columns
    are tried by their cost per request.
    Among equal costs the first found is the answer: the mix with most of the cheapest column, and of equally cheap ones
    of the largest, which is that of the fewest replicas.
    """

    def __init__(self, columns: Sequence[_Column], pools: Sequence[MixNodes], rate_rps: float) -> None:
        self.is_complete = False
        """Whether `best` is proven; the search ends after `STEPS_MAX`."""
        self.best: list[int] = []
        """By column, how many replicas; empty if there is no answer."""
        self._cost = math.inf
        self._steps = 0
        self._columns = columns
        self._pools = pools
        self._used = [0.0] * len(pools)
        """By pool, how many nodes the replicas take, also in part."""
        # Without a rate, one replica of any kind is enough.
        self._serves = [column.option.rate_rps if rate_rps > 0 else 1.0 for column in columns]
        self._needed = rate_rps * (1 - WIDE_ROUNDING) if rate_rps > 0 else 1.0
        self._order = sorted(
            [at for at, column in enumerate(columns) if column.most > 0 and self._serves[at] > 0],
            key=lambda at: (self._least(at) / self._serves[at], -self._serves[at]),
        )
        self._room = [(pool.owned + pool.rented) * (1 + WIDE_ROUNDING) for pool in pools]
        self._counts = [0] * len(columns)
        self._search(0, self._needed, 0.0)
        self.is_complete = self._steps < STEPS_MAX

    def _least(self, at: int) -> float:
        """What one replica of a column costs if nodes could be rented in part."""
        column = self._columns[at]
        pool = self._pools[column.option.pool]
        return column.cost + (pool.price * column.option.nodes if pool.rented else 0.0)

    def _paid(self) -> tuple[float, float]:
        """What the nodes cost that are used now, whole, and if they could be rented in part."""
        rented = [(pool, used) for pool, used in zip(self._pools, self._used, strict=True) if pool.rented]
        return sum(pool.cost_of(used) for pool, used in rented), sum(pool.price * used for pool, used in rented)

    def _search(self, place: int, left_rps: float, cost: float) -> None:
        """Try all numbers of the columns from `place` on, for the rate that is left. `cost` is without nodes that are
        rented."""
        self._steps += 1
        if left_rps <= 0:
            self._cost, self.best = cost + self._paid()[0], list(self._counts)
            return
        if place == len(self._order):
            return
        at = self._order[place]
        column, serves = self._columns[at], self._serves[at]
        option, most = column.option, min(column.most, math.ceil(left_rps / serves))
        room = self._room[option.pool]
        if option.nodes > 0 and math.isfinite(room):
            most = min(most, math.floor(room / option.nodes + WIDE_ROUNDING))
        following = self._order[place + 1] if place + 1 < len(self._order) else None
        used = self._used[option.pool]
        for count in range(most, -1, -1):
            rest_rps, so_far = left_rps - count * serves, cost + count * column.cost
            self._used[option.pool] = used + count * option.nodes
            whole, in_part = self._paid()
            if rest_rps <= 0:  # more than is needed, so that one less may cost less
                least = so_far + whole
            elif following is None:
                break
            else:
                least = so_far + in_part + rest_rps * self._least(following) / self._serves[following]
            if self._steps >= STEPS_MAX:
                break
            if least >= self._cost * (1 - ROUNDING):
                if rest_rps <= 0:
                    continue
                break  # with fewer of this column, more of dearer ones are needed
            self._counts[at] = count
            self._room[option.pool] = room - count * option.nodes
            self._search(place + 1, rest_rps, so_far)
        self._counts[at], self._room[option.pool], self._used[option.pool] = 0, room, used


def _limits(columns: Sequence[_Column], pools: Sequence[MixNodes], rented: Mapping[int, int]) -> Iterator[highs.Row]:
    """For each pool: what the replicas take is within its nodes. `rented` has the first column of rented nodes."""
    for at, pool in enumerate(pools):
        takes = {place: each.option.nodes for place, each in enumerate(columns) if each.option.pool == at}
        if at in rented:
            nodes = {rented[at]: -1.0, rented[at] + len(rented): -1.0}
            yield takes | nodes, -math.inf, 0.0
        elif takes and math.isfinite(pool.owned):
            yield takes, -math.inf, pool.owned


def _loads(
    columns: Sequence[_Column], stages: Sequence[MixStage], share: float, carried: int | None = None
) -> Iterator[highs.Row]:
    """For each stage: it has at least one replica, and its replicas carry `share` of its rate, or the part of that in
    column `carried`."""
    for number, stage in enumerate(stages):
        own = {at: column.option for at, column in enumerate(columns) if column.stage == number}
        rate_rps = share * stage.rate_rps
        served = {at: option.rate_rps / rate_rps for at, option in own.items()} if rate_rps > 0 else {}
        if served and carried is None:
            yield served, 1.0, math.inf
            continue
        yield dict.fromkeys(own, 1.0), 1.0, math.inf
        if served and carried is not None:
            yield served | {carried: -1.0}, 0.0, math.inf


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
        slot_ms = slot_ms_of(paths, coarse=True)
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
