"""Solves IPA's problem by label setting with Lagrange bounds; and finds the best effort if it is infeasible.

A label is a choice of options for the first stages, described by its accuracy, cores, batches and latency on each path.
Stage by stage, labels are extended by every option. A label is discarded if another dominates it in everything that
still matters, if it cannot keep a deadline, or if an upper bound of its best completion is below a known solution. The
first sweep over the stages keeps few labels; wider sweeps follow until no discarded label could be as good, so that the
solution is optimal. `work_max` limits the work by a count, never by time, so that the result does not depend on the
machine.

The bound comes from Lagrange prices for the milliseconds of each path and for cores, which turn limits into costs. The
contribution of the remaining stages then depends only on the accuracy so far, and is a convex function of it. It is
tabulated from the last stage to the first on a grid of accuracies; between grid points it lies below the chord. Any
prices give a valid bound; subgradient steps look for good ones.

Source of the problem: IPA (Razavi, dissertation, chapter P3). The method is not published; IPA uses Gurobi.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.api import ROUNDING, WIDE_ROUNDING
from sloop_systems.ipa.solver import (
    IpaGoal,
    IpaOption,
    IpaSolution,
    IpaStage,
    extended,
    is_feasible,
    objective,
    options_of,
    pareto_options,
    penalty_of,
    solution_key,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

GRID: Final = 129
"""Grid points of accuracy at which the bound is tabulated."""
WORK_MAX: Final = 800_000_000
"""The default work limit, about a second. A unit of work compares one figure of two labels."""
EXTENSION_WORK: Final = 100
"""Work of extending a label by one option."""
PRICING_WORK: Final = 10
"""Work of pricing one option at one grid point."""
WIDTHS: Final = (64, 1024, 16384)
"""By sweep: the most labels to keep after a stage, those with the best bounds."""
WIDER: Final = 4
"""Labels compared for dominance, as a multiple of the width."""
SUMS_MAX: Final = 4_000_000
"""The most labels × paths; bounds memory."""
BLOCK: Final = 256
"""Labels compared at once for dominance."""
PRICE_STEPS: Final = 40
"""The most subgradient steps."""
STALLED_MAX: Final = 4
"""Steps without a better bound before the step length is halved."""
TIED: Final = 1e-11
"""Relative difference below which two objectives may be equal after rounding to `ipa.KEPT_DIGITS`."""


@dataclass(frozen=True, slots=True)
class LabelSettingResult:
    """The solution, or None if no feasible one was found, and the work done.

    `gave_up`: the work limit was reached, so a feasible solution may exist.
    """

    solution: IpaSolution | None
    work: int = 0
    gave_up: bool = False


def solve(stages: Sequence[IpaStage], goal: IpaGoal, *, work_max: int = WORK_MAX) -> LabelSettingResult:
    """The best solution by `IpaSolution.key`. A `gap` above 0 means that `work_max` or the last of `WIDTHS` did not
    suffice to prove it optimal."""
    options = [pareto_options(options_of(stage, goal.replicas_max)) for stage in stages]
    if not all(options):
        return LabelSettingResult(None)
    search = _Search(_Arrays.of(options, goal), work_max)
    search.run()
    if not search.incumbent:
        return LabelSettingResult(None, search.work, gave_up=not search.proven)
    gap = 0.0 if search.proven else max(0.0, search.bound - search.reached)
    return LabelSettingResult(IpaSolution(search.incumbent, search.reached, gap), search.work)


@dataclass(frozen=True, slots=True)
class _StageArrays:
    """A stage's options as one array per figure, and the paths that contain the stage."""

    options: Sequence[IpaOption]
    score: Floats
    penalty: Floats
    latency_ms: Floats
    cores: Floats
    batch: Ints
    candidate: Ints
    on: NDArray[np.bool_]

    @classmethod
    def of(cls, options: Sequence[IpaOption], on: Sequence[bool], goal: IpaGoal) -> "_StageArrays":
        return cls(
            options,
            np.array([option.score for option in options], dtype=np.float64),
            np.array([penalty_of(option, goal) for option in options], dtype=np.float64),
            np.array([option.latency_ms for option in options], dtype=np.float64),
            np.array([option.cores for option in options], dtype=np.float64),
            np.array([option.batch for option in options], dtype=np.int64),
            np.array([option.candidate for option in options], dtype=np.int64),
            np.array(on, dtype=np.bool_),
        )


@dataclass(frozen=True, slots=True)
class _OpenPaths:
    """Paths with the same remaining stages, so that only the path nearest to its limit matters.

    Below `least_ms` none of them can exceed its limit with any options.
    """

    columns: list[int]
    limits_ms: Floats
    least_ms: float

    def excess_ms(self, taken_ms: Floats) -> Floats:
        """By label: how near the most critical path is to its limit, from the time taken on each path; less is
        better."""
        nearest: Floats = (taken_ms[:, self.columns] - self.limits_ms).max(axis=1)
        return np.maximum(nearest, self.least_ms)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Stages and paths as arrays. Lists by position have one entry more than stages, for the end of the pipeline."""

    goal: IpaGoal
    stages: list[_StageArrays]
    limits_ms: Floats
    rest_ms: list[Floats]
    """By position: the least time of the remaining stages on each path."""
    rest_cores: list[float]
    """By position: the fewest cores of the remaining stages."""
    rest_score: list[float]
    """By position: the smallest factor by which the remaining stages multiply accuracy."""
    grids: list[Floats]
    """By position: weighted accuracies so far, from the smallest possible to the largest."""
    open_paths: list[list[_OpenPaths]]
    scale: float
    """The largest term of an objective, to which tolerances are relative."""

    @classmethod
    def of(cls, options: Sequence[Sequence[IpaOption]], goal: IpaGoal) -> "_Arrays":
        """Merges paths of the same stages, and drops those without a deadline."""
        limits: dict[frozenset[int], float] = {}
        for path in goal.deadline_paths(len(options)):
            if path.slo_ms < math.inf:
                key = frozenset(path.stages)
                limits[key] = min(path.slo_ms, limits.get(key, math.inf))
        limits_ms = np.array(list(limits.values()), dtype=np.float64)
        stages = [_StageArrays.of(own, [place in path for path in limits], goal) for place, own in enumerate(options)]
        nothing = np.zeros(len(limits))
        rest_ms, most_ms, rest_cores, rest_score = [nothing], [nothing], [0.0], [1.0]
        for stage in reversed(stages):
            rest_ms.insert(0, rest_ms[0] + stage.on * stage.latency_ms.min())
            most_ms.insert(0, most_ms[0] + stage.on * stage.latency_ms.max())
            rest_cores.insert(0, rest_cores[0] + float(stage.cores.min()))
            rest_score.insert(0, rest_score[0] * (1.0 if goal.summed else float(stage.score.min())))
        low = high = 0.0 if goal.summed else goal.alpha
        grids = [np.linspace(low, high, GRID)]
        for stage in stages:
            low = extended(low, float(stage.score.min()), goal)
            high = extended(high, float(stage.score.max()), goal)
            grids.append(np.linspace(low, high, GRID))
        open_paths = [_open_paths(list(limits), limits_ms, place, most_ms[place]) for place in range(len(stages) + 1)]
        scale = max(1.0, goal.alpha, high, sum(float(stage.penalty.max()) for stage in stages))
        return cls(goal, stages, limits_ms, rest_ms, rest_cores, rest_score, grids, open_paths, scale)

    def extended(self, values: Floats, scores: Floats) -> Floats:
        """`ipa.extended` for arrays."""
        return values + self.goal.alpha * scores if self.goal.summed else values * scores


def _open_paths(paths: Sequence[frozenset[int]], limits_ms: Floats, place: int, most_ms: Floats) -> list[_OpenPaths]:
    """The paths that are begun and not finished before stage `place`, grouped by their remaining stages."""
    groups: dict[frozenset[int], dict[frozenset[int], int]] = {}
    for column, path in enumerate(paths):
        rest, taken = frozenset(s for s in path if s >= place), frozenset(s for s in path if s < place)
        if rest and taken:
            groups.setdefault(rest, {})[taken] = column
    found: dict[object, _OpenPaths] = {}
    for group in groups.values():
        columns = list(group.values())
        # Labels on one path compare without its limit, so paths with the same first stages compare once.
        key = next(iter(group)) if len(group) == 1 else tuple(columns)
        limits = np.zeros(1) if len(group) == 1 else limits_ms[columns]
        least_ms = float((limits_ms[columns] - limits - most_ms[columns]).max())
        if key not in found or least_ms < found[key].least_ms:
            found[key] = _OpenPaths(columns, limits, least_ms)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Prices:
    """Prices of a millisecond on each path and of a core, and the resulting bound.

    `limits` is the price of all limits together; `costs` is each option's penalty plus priced latency and cores;
    `rest` is by position, for each value of `_Arrays.grids`, the largest contribution of the remaining stages.
    """

    limits: float
    costs: list[Floats]
    rest: list[Floats]

    @classmethod
    def of(cls, arrays: _Arrays, per_ms: Floats, per_core: float) -> "_Prices":
        """Prices are at least 0, and 0 where there is no limit."""
        limits = float((per_ms * arrays.limits_ms).sum()) + (per_core * arrays.goal.cores_max if per_core else 0.0)
        costs = [s.penalty + float(per_ms[s.on].sum()) * s.latency_ms + per_core * s.cores for s in arrays.stages]
        rest = [arrays.grids[-1]]
        for place in reversed(range(len(costs))):
            longer = arrays.extended(arrays.grids[place][:, None], arrays.stages[place].score)
            after = np.interp(longer, arrays.grids[place + 1], rest[0])
            rest.insert(0, (after - costs[place]).max(axis=1))
        return cls(limits, costs, rest)

    @property
    def bound(self) -> float:
        """An upper bound of f."""
        return float(self.rest[0][-1]) + self.limits

    def rest_from(self, arrays: _Arrays, place: int, values: Floats) -> Floats:
        """The largest contribution of the stages from `place` on, for given weighted accuracies."""
        return np.interp(values, arrays.grids[place], self.rest[place])

    def best_options(self, arrays: _Arrays) -> tuple[IpaOption, ...]:
        """The best options if limits are priced and need not be kept."""
        found, value = list[IpaOption](), arrays.grids[0][-1]
        for place, stage in enumerate(arrays.stages):
            longer = arrays.extended(value, stage.score)
            index = int((self.rest_from(arrays, place + 1, longer) - self.costs[place]).argmax())
            found.append(stage.options[index])
            value = longer[index]
        return tuple(found)


class _WorkLimitError(Exception):
    """The work limit is reached."""


@dataclass(slots=True)
class _Labels:
    """Labels as one array per figure."""

    value: Floats
    """Weighted accuracy so far."""
    penalty: Floats
    spent: Floats
    """By label and prices: penalties so far plus priced milliseconds and cores."""
    taken_ms: Floats
    """By label and path."""
    total_ms: Floats
    cores: Floats
    batches: Ints
    candidates: Ints
    """The rank of the label's tuple of candidates, for ties."""
    batch_sizes: Ints
    """The rank of the label's tuple of batches, for ties."""
    bound: Floats
    """An upper bound of f for every completion."""
    parent: Ints
    option: Ints

    def at(self, indices: Ints) -> "_Labels":
        return _Labels(*(getattr(self, each.name)[indices] for each in fields(self)))


@dataclass(slots=True)
class _Search:
    arrays: _Arrays
    work_max: int
    any_solution: bool = False
    """Whether the search may end at the first feasible solution."""
    incumbent: tuple[IpaOption, ...] = ()
    reached: float = -math.inf
    """f of the incumbent."""
    bound: float = math.inf
    """An upper bound of f."""
    proven: bool = False
    work: int = 0
    prices: list[_Prices] = field(init=False)

    def __post_init__(self) -> None:
        self.prices = [_Prices.of(self.arrays, np.zeros(len(self.arrays.limits_ms)), 0.0)]

    def run(self) -> None:
        """Sweep until no better solution can exist, or the work limit is reached."""
        for figure in (attrgetter("latency_ms", "cores"), attrgetter("cores", "latency_ms")):
            self._offer(tuple(min(stage.options, key=figure) for stage in self.arrays.stages))
        try:
            for width in WIDTHS:
                if width > WIDTHS[0] or self.any_solution:
                    self._improve_prices()
                lost = self._sweep(width)
                self.bound = min(self.bound, max(lost, self.reached))
                self.proven = lost == -math.inf or lost < self.reached - self._slack
                if not self.proven and not self.incumbent and not self.any_solution:
                    self._find_any()
                if self.proven or (self.any_solution and self.incumbent):
                    return
        except _WorkLimitError:
            return

    @property
    def _slack(self) -> float:
        return ROUNDING * self.arrays.scale

    def _count_work(self, work: int) -> None:
        self.work += work
        if self.work > self.work_max:
            raise _WorkLimitError

    def _find_any(self) -> None:
        """Search for the fewest cores instead, which finds a feasible solution, or proves that there is none."""
        goal = replace(self.arrays.goal, alpha=0.0, beta=1.0, delta=0.0)
        options = [stage.options for stage in self.arrays.stages]
        search = _Search(_Arrays.of(options, goal), (self.work_max - self.work) // 2, any_solution=True)
        search.run()
        self.proven = search.proven and not search.incumbent
        if search.incumbent:
            self._offer(search.incumbent)
        self._count_work(search.work)

    def _offer(self, options: tuple[IpaOption, ...]) -> None:
        """Replace the incumbent by `options` if they are feasible and better."""
        goal = self.arrays.goal
        if not is_feasible(options, goal):
            return
        reached = objective(options, goal)
        if not self.incumbent or solution_key(options, reached) < solution_key(self.incumbent, self.reached):
            self.incumbent, self.reached = options, reached

    def _improve_prices(self) -> None:
        """Lower the bound by subgradient steps (Polyak's rule). Options chosen on the way are offered as solutions."""
        if len(self.prices) > 1:
            return
        arrays, cores_max = self.arrays, max(self.arrays.goal.cores_max, 1.0)
        unit_ms = np.maximum(arrays.limits_ms, 1.0)
        work = PRICING_WORK * GRID * sum(len(stage.options) for stage in arrays.stages)
        per_ms, per_core = np.zeros(len(unit_ms)), 0.0
        best = prices = self.prices[0]
        reach, stalled = 1.0, 0
        for _ in range(PRICE_STEPS):
            if prices.bound < best.bound - self._slack:
                best, stalled = prices, 0
            else:
                stalled += 1
            if stalled >= STALLED_MAX:
                reach, stalled = reach / 2, 0
            chosen = prices.best_options(arrays)
            self._offer(chosen)
            latencies_ms = [s.on * option.latency_ms for s, option in zip(arrays.stages, chosen, strict=True)]
            over = (np.sum(latencies_ms, axis=0) - arrays.limits_ms) / unit_ms
            over[(per_ms <= 0) & (over < 0)] = 0.0
            over_cores = sum(option.cores for option in chosen) / cores_max - 1.0
            if per_core <= 0 and over_cores < 0:
                over_cores = 0.0
            square = float((over * over).sum()) + over_cores**2
            if square <= 0 or best.bound - self.reached <= self._slack:
                break
            aim = self.reached if self.incumbent else min(0.0, 2 * best.bound)
            step = reach * max(prices.bound - aim, self._slack) / square
            per_ms = np.maximum(per_ms + step * over / unit_ms, 0.0)
            per_core = max(per_core + step * over_cores / cores_max, 0.0)
            prices = _Prices.of(arrays, per_ms, per_core)
            self._count_work(work)
        self.prices.append(best)
        self.bound = min(self.bound, best.bound)

    def _sweep(self, width: int) -> float:
        """Extend labels over all stages, keeping at most `width`; returns the best bound of the omitted labels."""
        goal, count = self.arrays.goal, len(self.prices)
        zeros, ones = np.zeros(1), np.zeros(1, dtype=np.int64)
        value = np.array([0.0 if goal.summed else goal.alpha])
        spent, taken_ms = np.zeros((1, count)), np.zeros((1, len(self.arrays.limits_ms)))
        labels = _Labels(value, zeros, spent, taken_ms, zeros, zeros, ones, ones, ones, zeros, ones, ones)
        most = min(WIDER * width, max(1, SUMS_MAX // max(1, taken_ms.shape[1])))
        kept, lost = list[_Labels](), -math.inf
        for place in range(len(self.arrays.stages)):
            made, first = self._extend(labels, place, most)
            front = made.at(self._undominated(made, place + 1))
            labels, second = _most_promising(front, width)
            lost = max(lost, first, second)
            kept.append(labels)
            if not len(labels.value):
                return lost
        self._offer_complete(kept)
        return lost

    def _extend(self, labels: _Labels, place: int, most: int) -> tuple[_Labels, float]:
        """The `most` most promising extensions by one stage, and the best bound of the omitted ones."""
        arrays, stage = self.arrays, self.arrays.stages[place]
        self._count_work(len(labels.value) * (EXTENSION_WORK * len(stage.options) + len(arrays.limits_ms)))
        rest_ms = arrays.rest_ms[place + 1]
        # A path that ends here is not compared again, so its deadline is checked as strictly as `is_feasible` does.
        limits_ms = arrays.limits_ms + np.where(rest_ms > 0, WIDE_ROUNDING, ROUNDING) - rest_ms
        left_ms = (limits_ms - labels.taken_ms)[:, stage.on].min(axis=1, initial=math.inf)
        last = place + 1 == len(arrays.stages)
        slack = ROUNDING * (1 if last else 2)
        left_cores = arrays.goal.cores_max + slack - arrays.rest_cores[place + 1] - labels.cores
        parent, option = np.nonzero((stage.latency_ms <= left_ms[:, None]) & (stage.cores <= left_cores[:, None]))
        longer = arrays.extended(labels.value[parent], stage.score[option])
        bound = np.full(len(parent), math.inf)
        for number, prices in enumerate(self.prices):
            rest = prices.rest_from(arrays, place + 1, longer)
            spent = labels.spent[parent, number] + prices.costs[place][option]
            bound = np.minimum(bound, rest - spent + prices.limits)
        good = np.nonzero(bound >= self.reached - self._slack)[0]
        lost = -math.inf
        if len(good) > most:
            good = good[np.argsort(-bound[good], kind="stable")]
            lost = float(bound[good[most]])
            good = good[:most]
        parent, option = parent[good], option[good]
        made = _Labels(
            value=longer[good],
            penalty=labels.penalty[parent] + stage.penalty[option],
            spent=labels.spent[parent] + np.stack([prices.costs[place][option] for prices in self.prices], axis=1),
            taken_ms=labels.taken_ms[parent] + stage.on * stage.latency_ms[option, None],
            total_ms=labels.total_ms[parent] + stage.latency_ms[option],
            cores=labels.cores[parent] + stage.cores[option],
            batches=labels.batches[parent] + stage.batch[option],
            candidates=_tuple_ranks(labels.candidates[parent], stage.candidate[option]),
            batch_sizes=_tuple_ranks(labels.batch_sizes[parent], stage.batch[option]),
            bound=bound[good],
            parent=parent,
            option=option,
        )
        return made, lost

    def _undominated(self, labels: _Labels, place: int) -> Ints:
        """Indices of the labels that no other dominates.

        A label dominates another if it is at least as accurate, needs no more of anything that can still exceed a
        limit, and is better for every completion, or equally good and earlier in the order of ties.
        """
        arrays = self.arrays
        first = np.empty(len(labels.value), dtype=np.int64)
        ties = (labels.batch_sizes, labels.candidates, labels.batches, labels.total_ms, labels.cores)
        first[np.lexsort(ties)] = np.arange(len(first))
        # Later stages reduce an advantage in accuracy at most by the factor `rest_score`; one in penalty stays.
        worth = labels.value * arrays.rest_score[place] - labels.penalty
        order = np.lexsort((first, -worth))
        limited = [-labels.value, *(paths.excess_ms(labels.taken_ms) for paths in arrays.open_paths[place])]
        limited += [labels.cores] if arrays.goal.cores_max < math.inf else []
        must = np.stack(limited)[:, order]
        tied = np.stack([first, *(() if self.any_solution else (labels.total_ms, labels.batches))])[:, order]
        worth, tied_below = worth[order], TIED * arrays.scale
        front: Ints = np.empty(0, dtype=np.int64)
        for start in range(0, len(order), BLOCK):
            block = np.arange(start, min(start + BLOCK, len(order)))
            for is_within in (False, True):
                others = block if is_within else front
                self._count_work(len(block) * len(others) * (len(must) + len(tied) + 1))
                as_good, earlier = _no_more(must, others, block), _no_more(tied, others, block)
                if is_within:
                    np.fill_diagonal(earlier, val=False)
                better = worth[others] > worth[block, None] + tied_below
                block = block[~(as_good & (better | earlier)).any(axis=1)]
            front = np.concatenate((front, block))
        return order[front]

    def _offer_complete(self, kept: Sequence[_Labels]) -> None:
        """Offer the best complete labels: all that may be as good as the best."""
        last = kept[-1]
        f = last.value - last.penalty
        for index in np.argsort(-f, kind="stable"):
            if f[index] < self.reached - self._slack:
                return
            options, at = list[IpaOption](), int(index)
            for stage, labels in zip(reversed(self.arrays.stages), reversed(kept), strict=True):
                options.append(stage.options[labels.option[at]])
                at = int(labels.parent[at])
            self._offer(tuple(reversed(options)))


def _no_more(figures: Floats, others: Ints, block: Ints) -> NDArray[np.bool_]:
    """Shape (block, others): whether the other label is no larger in any figure."""
    found = np.ones((len(block), len(others)), dtype=np.bool_)
    for figure in figures:
        found &= figure[others] <= figure[block, None]
    return found


def _most_promising(labels: _Labels, most: int) -> tuple[_Labels, float]:
    """The labels with the largest bounds, and the best bound of the omitted ones."""
    if len(labels.value) <= most:
        return labels, -math.inf
    order = np.argsort(-labels.bound, kind="stable")
    return labels.at(order[:most]), float(labels.bound[order[most]])


def _tuple_ranks(ranks: Ints, further: Ints) -> Ints:
    """Dense ranks of tuples extended by one element, from the ranks of the tuples and the elements."""
    longer = ranks * (int(further.max(initial=0)) + 1) + further
    return np.searchsorted(np.unique(longer), longer).astype(np.int64)


SHARE_HALVINGS: Final = 20
"""Bisection steps for the share of the rate that can be served: to a millionth."""


@dataclass(frozen=True, slots=True)
class BestEffort:
    """The best options if nothing is feasible, and the share of the rate that they keep up with."""

    options: tuple[IpaOption, ...]
    share: float


def best_effort(stages: Sequence[IpaStage], goal: IpaGoal) -> BestEffort:
    """The least latency that keeps up with the full rate: it gives up deadlines before throughput.

    If cores or replicas do not suffice even for that, the best solution for the largest share of the rate that they
    carry. Not published; IPA keeps its current configuration.
    """
    options = _keeping_up(stages, goal)
    if options is not None:
        return BestEffort(options, 1.0)
    low, high = 0.0, 1.0
    for _ in range(SHARE_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _keeping_up(_part(stages, middle), goal) else (low, middle)
    carried = _part(stages, low)
    best = solve(carried, goal).solution
    return BestEffort(best.options if best else _keeping_up(carried, goal) or _smallest(stages), low)


def _part(stages: Sequence[IpaStage], share: float) -> list[IpaStage]:
    return [replace(stage, rate_rps=share * stage.rate_rps) for stage in stages]


def _keeping_up(stages: Sequence[IpaStage], goal: IpaGoal) -> tuple[IpaOption, ...] | None:
    """Options that keep up within the cores: the quickest, else those with the fewest cores; None if there are none."""
    every = [options_of(stage, goal.replicas_max) for stage in stages]
    if not all(every):
        return None
    quickest = tuple(min(own, key=lambda o: (o.latency_ms, o.cores, -o.score)) for own in every)
    cheapest = tuple(min(own, key=lambda o: (o.cores, o.latency_ms, -o.score)) for own in every)
    cores_max = goal.cores_max + ROUNDING
    return next((own for own in (quickest, cheapest) if sum(option.cores for option in own) <= cores_max), None)


def _smallest(stages: Sequence[IpaStage]) -> tuple[IpaOption, ...]:
    """One replica of the smallest candidate of each stage, or the fixed number of replicas."""
    found = []
    for stage in stages:
        index = min(range(len(stage.candidates)), key=lambda i: (stage.candidates[i].cores, i))
        own, count = stage.candidates[index], stage.replicas or 1
        found.append(IpaOption(index, stage.batches[0], count, own.score, count * own.cores, own.latency_ms[0]))
    return tuple(found)
