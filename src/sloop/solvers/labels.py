"""The best variants, batches and replicas along a pipeline, by label setting: what `variants.enumerated` finds, fast.

A label is a choice for the first stages, known by its accuracy, cores, batches, and latency on each way. Stage by stage
labels are extended by every option; those that another beats in all that still counts, that cannot keep a deadline, or
whose best completion (`variants_bound`) is worse than a solution already known, are forgotten. The first sweep over the
stages keeps few labels; wider ones follow until none was left out that could be as good, and the answer is exact.
`work_max` bounds them all, by a count and not a time, so that the same question has the same answer everywhere.

Source: IPA's optimisation problem (Razavi, dissertation, chapter P3); the method is ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.solvers.variants import (
    CORES_SLACK,
    LATENCY_SLACK_MS,
    Answer,
    Choices,
    Goal,
    Option,
    is_feasible,
    key_of,
    objective,
    options_of,
    unbeaten,
)
from sloop.solvers.variants_bound import GRID, Floats, Ints, Prices, Program

WORK_MAX: Final = 800_000_000
"""Figures of one label compared with those of another: what a second does."""
EXTENSION_WORK: Final = 100
"""As much as extending a label by an option takes."""
PRICING_WORK: Final = 10
"""As much as pricing an option at one accuracy takes."""
WIDTHS: Final = (64, 1024, 16384)
"""Labels kept of a stage, sweep by sweep: the most promising."""
WIDER: Final = 4
"""So many times as many are compared with each other."""
SUMS_MAX: Final = 4_000_000
"""Labels times ways: what memory holds."""
BLOCK: Final = 256
PRICE_STEPS: Final = 40
STALLED_MAX: Final = 4
SLACK: Final = 1e-9
"""Sums of the same terms in another order differ by less, relative to the largest of them."""
TIED: Final = 1e-11
"""Relative likewise: objectives that differ by no more may be equal when they are rounded."""
ROOM_MS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Solved:
    """The answer, None where nothing feasible was found; how many labels were kept on the way, and the work.

    `gave_up`: None is not to say that there is nothing.
    """

    answer: Answer | None
    labels: int = 0
    work: int = 0
    gave_up: bool = False


def solve(stages: Sequence[Choices], goal: Goal, *, work_max: int = WORK_MAX) -> Solved:
    """The best answer by `Answer.key`; exact unless its `gap` says otherwise, which it can only beyond `work_max` or
    the last of `WIDTHS`."""
    options = [unbeaten(options_of(stage, goal.replicas_max)) for stage in stages]
    if not all(options):
        return Solved(None)
    search = _Search(Program.of(options, goal), work_max)
    search.run()
    if not search.incumbent:
        return Solved(None, search.labels, search.work, gave_up=not search.proven)
    gap = 0.0 if search.proven else max(0.0, search.bound - search.reached)
    return Solved(Answer(search.incumbent, search.reached, gap), search.labels, search.work)


class _OutOfWorkError(Exception):
    """As much was done as may be."""


@dataclass(slots=True)
class _Labels:
    """Choices for the first stages, figure by figure; `candidates` and `batch_sizes` in the order of their tuples."""

    value: Floats
    penalty: Floats
    spent: Floats
    """By label and prices: costs so far, with the milliseconds and cores."""
    taken_ms: Floats
    """By label and way."""
    total_ms: Floats
    cores: Floats
    batches: Ints
    candidates: Ints
    batch_sizes: Ints
    bound: Floats
    """f that no completion exceeds."""
    parent: Ints
    option: Ints

    def only(self, indices: Ints) -> "_Labels":
        """These of them."""
        return _Labels(*(getattr(self, each.name)[indices] for each in fields(self)))


@dataclass(slots=True)
class _Search:
    program: Program
    work_max: int
    is_hunt: bool = False
    """For any solution, and not for the best."""
    incumbent: tuple[Option, ...] = ()
    reached: float = -math.inf
    """f of the incumbent."""
    bound: float = math.inf
    """No f is larger."""
    proven: bool = False
    labels: int = 0
    work: int = 0
    prices: list[Prices] = field(init=False)

    def __post_init__(self) -> None:
        self.prices = [Prices.of(self.program, np.zeros(len(self.program.limits_ms)), 0.0)]

    def run(self) -> None:
        """Sweep until nothing better can be left, or the work is done."""
        for figure in (attrgetter("latency_ms", "cores"), attrgetter("cores", "latency_ms")):
            self._offer(tuple(min(stage.options, key=figure) for stage in self.program.stages))
        try:
            for width in WIDTHS:
                if width > WIDTHS[0] or self.is_hunt:
                    self._price()
                lost = self._sweep(width)
                self.bound = min(self.bound, max(lost, self.reached))
                self.proven = lost == -math.inf or lost < self.reached - self._slack
                if not self.proven and not self.incumbent and not self.is_hunt:
                    self._hunt()
                if self.proven or (self.is_hunt and self.incumbent):
                    return
        except _OutOfWorkError:
            return

    @property
    def _slack(self) -> float:
        return SLACK * self.program.scale

    def _does(self, work: int) -> None:
        self.work += work
        if self.work > self.work_max:
            raise _OutOfWorkError

    def _hunt(self) -> None:
        """Any solution, by looking for the fewest cores; that there is none is proof as well."""
        goal = replace(self.program.goal, alpha=0.0, beta=1.0, delta=0.0)
        options = [stage.options for stage in self.program.stages]
        hunt = _Search(Program.of(options, goal), (self.work_max - self.work) // 2, is_hunt=True)
        hunt.run()
        self.labels += hunt.labels
        self.proven = hunt.proven and not hunt.incumbent
        if hunt.incumbent:
            self._offer(hunt.incumbent)
        self._does(hunt.work)

    def _offer(self, options: tuple[Option, ...]) -> None:
        """The better of it and the incumbent, if it is feasible."""
        goal = self.program.goal
        if not is_feasible(options, goal):
            return
        reached = objective(options, goal)
        if not self.incumbent or key_of(options, reached) < key_of(self.incumbent, self.reached):
            self.incumbent, self.reached = options, reached

    def _price(self) -> None:
        """Prices at which the bound of all is low, by subgradients; what is chosen at them may be feasible."""
        if len(self.prices) > 1:
            return
        program, cores_max = self.program, max(self.program.goal.cores_max, 1.0)
        unit_ms = np.maximum(program.limits_ms, 1.0)
        work = PRICING_WORK * GRID * sum(len(stage.options) for stage in program.stages)
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
            chosen = prices.chosen(program)
            self._offer(chosen)
            latencies_ms = [s.on * option.latency_ms for s, option in zip(program.stages, chosen, strict=True)]
            over = (np.sum(latencies_ms, axis=0) - program.limits_ms) / unit_ms
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
            prices = Prices.of(program, per_ms, per_core)
            self._does(work)
        self.prices.append(best)
        self.bound = min(self.bound, best.bound)

    def _sweep(self, width: int) -> float:
        """Over all stages, keeping `width` labels at most; the bound of the best that was left out."""
        goal, count = self.program.goal, len(self.prices)
        zeros, ones = np.zeros(1), np.zeros(1, dtype=np.int64)
        value = np.array([0.0 if goal.summed else goal.alpha])
        spent, taken_ms = np.zeros((1, count)), np.zeros((1, len(self.program.limits_ms)))
        labels = _Labels(value, zeros, spent, taken_ms, zeros, zeros, ones, ones, ones, zeros, ones, ones)
        most = min(WIDER * width, max(1, SUMS_MAX // max(1, taken_ms.shape[1])))
        kept, lost = list[_Labels](), -math.inf
        for place in range(len(self.program.stages)):
            made, first = self._step(labels, place, most)
            front = made.only(self._undominated(made, place + 1))
            labels, second = _promising(front, width)
            lost = max(lost, first, second)
            self.labels += len(labels.value)
            kept.append(labels)
            if not len(labels.value):
                return lost
        self._finish(kept)
        return lost

    def _step(self, labels: _Labels, place: int, most: int) -> tuple[_Labels, float]:
        """The most promising extensions by one stage that may lead to the best, and the bound of those left out."""
        program, stage = self.program, self.program.stages[place]
        self._does(len(labels.value) * (EXTENSION_WORK * len(stage.options) + len(program.limits_ms)))
        rest_ms = program.rest_ms[place + 1]
        # Behind its last stage a way no longer counts, so there it must be in time just as `is_feasible` has it.
        limits_ms = program.limits_ms + np.where(rest_ms > 0, ROOM_MS, LATENCY_SLACK_MS) - rest_ms
        room_ms = (limits_ms - labels.taken_ms)[:, stage.on].min(axis=1, initial=math.inf)
        last = place + 1 == len(program.stages)
        room = program.goal.cores_max + CORES_SLACK * (1 if last else 2) - program.rest_cores[place + 1] - labels.cores
        parent, option = np.nonzero((stage.latency_ms <= room_ms[:, None]) & (stage.cores <= room[:, None]))
        longer = program.longer(labels.value[parent], stage.score[option])
        bound = np.full(len(parent), math.inf)
        for number, prices in enumerate(self.prices):
            brought = prices.after(program, place + 1, longer)
            spent = labels.spent[parent, number] + prices.costs[place][option]
            bound = np.minimum(bound, brought - spent + prices.limits)
        good = np.nonzero(bound >= self.reached - self._slack)[0]
        lost = -math.inf
        if len(good) > most:
            good = good[np.argsort(-bound[good], kind="stable")]
            lost = float(bound[good[most]])
            good = good[:most]
        parent, option = parent[good], option[good]
        made = _Labels(
            value=longer[good],
            penalty=labels.penalty[parent] + stage.cost[option],
            spent=labels.spent[parent] + np.stack([prices.costs[place][option] for prices in self.prices], axis=1),
            taken_ms=labels.taken_ms[parent] + stage.on * stage.latency_ms[option, None],
            total_ms=labels.total_ms[parent] + stage.latency_ms[option],
            cores=labels.cores[parent] + stage.cores[option],
            batches=labels.batches[parent] + stage.batch[option],
            candidates=_dense(labels.candidates[parent], stage.candidate[option]),
            batch_sizes=_dense(labels.batch_sizes[parent], stage.batch[option]),
            bound=bound[good],
            parent=parent,
            option=option,
        )
        return made, lost

    def _undominated(self, labels: _Labels, place: int) -> Ints:
        """Those that no other beats: at least as accurate, with no more of what can still become too much, and better
        whatever follows, or as good and first in ties."""
        program = self.program
        first = np.empty(len(labels.value), dtype=np.int64)
        ties = (labels.batch_sizes, labels.candidates, labels.batches, labels.total_ms, labels.cores)
        first[np.lexsort(ties)] = np.arange(len(first))
        # By as much as one is worth more, it is so in the end: accuracy counts for the least that may be made of it.
        worth = labels.value * program.rest_score[place] - labels.penalty
        order = np.lexsort((first, -worth))
        limited = [-labels.value, *(ways.taken_ms(labels.taken_ms) for ways in program.begun[place])]
        limited += [labels.cores] if program.goal.cores_max < math.inf else []
        must = np.stack(limited)[:, order]
        tied = np.stack([first, *(() if self.is_hunt else (labels.total_ms, labels.batches))])[:, order]
        worth, tied_below = worth[order], TIED * program.scale
        front: Ints = np.empty(0, dtype=np.int64)
        for start in range(0, len(order), BLOCK):
            block = np.arange(start, min(start + BLOCK, len(order)))
            for is_within in (False, True):
                others = block if is_within else front
                self._does(len(block) * len(others) * (len(must) + len(tied) + 1))
                as_good, earlier = _no_more(must, others, block), _no_more(tied, others, block)
                if is_within:
                    np.fill_diagonal(earlier, val=False)
                better = worth[others] > worth[block, None] + tied_below
                block = block[~(as_good & (better | earlier)).any(axis=1)]
            front = np.concatenate((front, block))
        return order[front]

    def _finish(self, kept: Sequence[_Labels]) -> None:
        """Offer the best of the complete labels, and those that may be as good."""
        last = kept[-1]
        f = last.value - last.penalty
        for index in np.argsort(-f, kind="stable"):
            if f[index] < self.reached - self._slack:
                return
            options, at = list[Option](), int(index)
            for stage, labels in zip(reversed(self.program.stages), reversed(kept), strict=True):
                options.append(stage.options[labels.option[at]])
                at = int(labels.parent[at])
            self._offer(tuple(reversed(options)))


def _no_more(figures: Floats, others: Ints, block: Ints) -> NDArray[np.bool_]:
    """For each of a block and each of others: whether the other has no more of any figure."""
    found = np.ones((len(block), len(others)), dtype=np.bool_)
    for figure in figures:
        found &= figure[others] <= figure[block, None]
    return found


def _promising(labels: _Labels, most: int) -> tuple[_Labels, float]:
    """Those with the largest bounds, and the bound of the best left out."""
    if len(labels.value) <= most:
        return labels, -math.inf
    order = np.argsort(-labels.bound, kind="stable")
    return labels.only(order[:most]), float(labels.bound[order[most]])


def _dense(ranks: Ints, further: Ints) -> Ints:
    """The ranks of tuples one longer, as small as can be."""
    longer = ranks * (int(further.max(initial=0)) + 1) + further
    return np.searchsorted(np.unique(longer), longer).astype(np.int64)
