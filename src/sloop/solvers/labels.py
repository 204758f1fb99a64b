"""The best variants, batches and replicas along a pipeline, by label setting: what `variants.enumerated` finds, fast.

A label is a choice for the first stages, known by its accuracy, cores, batches, and latency on each way. Stage by stage
labels are extended by every option; those that another beats in all of these, that cannot keep a deadline, or whose
best completion is worse than a solution already known, are forgotten. Exact, because each figure only grows with every
stage and the objective follows from them. Source: IPA's optimisation problem (Razavi, dissertation, chapter P3); the
method is ours.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sloop.solvers.variants import (
    CORES_SLACK,
    Answer,
    Choices,
    Goal,
    Option,
    cost,
    extended,
    is_feasible,
    key_of,
    objective,
    options_of,
    ways_of,
)

LABELS_MAX = 200_000
"""So many are kept of a stage; the most promising, and the answer says what the others could have been better by."""
COMPLETED_MAX = 50
"""So many labels of a stage are completed greedily, to know early what is worse than the best."""
BOUND_SLACK = 1e-9
LATENCY_SLACK_MS = 1e-6
"""Sums of the same terms in another order differ by less."""


@dataclass(frozen=True, slots=True)
class Solved:
    """The answer, None where nothing feasible was found, and how many labels were kept on the way."""

    answer: Answer | None
    labels: int


@dataclass(frozen=True, slots=True)
class _Label:
    value: float
    penalty: float
    latency_ms: tuple[float, ...]
    """On each way; of all stages last, where these are not one way."""
    cores: float
    batches: int
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class _Rest:
    """What the stages from some position on can bring at best, each figure by itself."""

    score: float
    penalty: float
    latency_ms: tuple[float, ...]
    cores: float


def solve(stages: Sequence[Choices], goal: Goal, *, labels_max: int = LABELS_MAX) -> Solved:
    """The best answer by `Answer.key`; exact unless its `gap` says otherwise, which it can only beyond `labels_max`."""
    options = [_unbeaten(options_of(stage, goal.replicas_max)) for stage in stages]
    if not all(options):
        return Solved(None, 0)
    search = _Search(options, goal, labels_max)
    labels = [search.root]
    search.complete(labels)
    count, left_out = 0, -math.inf
    for stage in range(len(stages)):
        labels, best_left_out = search.step(labels, stage)
        count += len(labels)
        left_out = max(left_out, best_left_out)
        search.complete(labels)
    feasible = [label.options for label in labels if is_feasible(label.options, goal)]
    if search.incumbent and left_out > -math.inf:
        feasible.append(search.incumbent)
    if not feasible:
        return Solved(None, count)
    best = min(feasible, key=lambda chosen: key_of(chosen, objective(chosen, goal)))
    reached = objective(best, goal)
    return Solved(Answer(best, reached, gap=max(0.0, left_out - reached)), count)


@dataclass(slots=True)
class _Search:
    options: list[list[Option]]
    goal: Goal
    labels_max: int
    incumbent: tuple[Option, ...] = ()
    reached: float = -math.inf
    """f of the incumbent."""
    limits_ms: tuple[float, ...] = field(init=False)
    on: list[tuple[bool, ...]] = field(init=False)
    """By stage, which sums of latencies it counts for."""
    rest: list[_Rest] = field(init=False)
    """By position; the last is behind all stages."""

    def __post_init__(self) -> None:
        goal, every = self.goal, range(len(self.options))
        ways = ways_of(goal, len(self.options))
        sums = [frozenset(way.stages) for way in ways]
        self.limits_ms = tuple(way.slo_ms + LATENCY_SLACK_MS for way in ways)
        if sums != [frozenset(every)]:
            sums.append(frozenset(every))  # ties go to the least latency of all stages
            self.limits_ms += (math.inf,)
        self.on = [tuple(stage in stages for stages in sums) for stage in every]
        self.rest = [_Rest(0.0 if goal.summed else 1.0, 0.0, (0.0,) * len(sums), 0.0)]
        for stage in reversed(every):
            self.rest.insert(0, self._rest(stage, self.rest[0]))

    def _rest(self, stage: int, after: _Rest) -> _Rest:
        options, goal = self.options[stage], self.goal
        score = max(option.score for option in options)
        least_ms = min(option.latency_ms for option in options)
        return _Rest(
            score=after.score + score if goal.summed else after.score * score,
            penalty=after.penalty + min(cost(option, goal) for option in options),
            latency_ms=_added(after.latency_ms, least_ms, self.on[stage]),
            cores=after.cores + min(option.cores for option in options),
        )

    @property
    def root(self) -> _Label:
        """Nothing chosen yet."""
        return _Label(0.0 if self.goal.summed else self.goal.alpha, 0.0, (0.0,) * len(self.limits_ms), 0.0, 0, ())

    def step(self, labels: Iterable[_Label], stage: int) -> tuple[list[_Label], float]:
        """All extensions by one stage that may lead to the best, and the bound of the best that had to be left out."""
        rest = self.rest[stage + 1]
        made = [
            longer
            for label in labels
            for option in self.options[stage]
            if self._has_room(longer := self._longer(label, option), rest)
            and self._bound(longer, rest) >= self.reached - BOUND_SLACK
        ]
        kept = _undominated(made)
        if len(kept) <= self.labels_max:
            return kept, -math.inf
        kept.sort(key=lambda label: self._bound(label, rest), reverse=True)
        return kept[: self.labels_max], self._bound(kept[self.labels_max], rest)

    def complete(self, labels: Sequence[_Label]) -> None:
        """Complete the most promising labels greedily; the best completion is what all others must reach."""
        if not labels:
            return
        rest = self.rest[len(labels[0].options)]
        promising = sorted(labels, key=lambda label: self._bound(label, rest), reverse=True)
        for label in promising[:COMPLETED_MAX]:
            if self._bound(label, rest) <= self.reached:
                return
            done = self._completed(label)
            if done is not None and is_feasible(done.options, self.goal):
                reached = done.value - done.penalty
                if reached > self.reached:
                    self.reached, self.incumbent = reached, done.options

    def _completed(self, label: _Label) -> _Label | None:
        for stage in range(len(label.options), len(self.options)):
            rest = self.rest[stage + 1]
            longer = [self._longer(label, option) for option in self.options[stage]]
            fitting = [candidate for candidate in longer if self._has_room(candidate, rest)]
            if not fitting:
                return None
            label = max(fitting, key=lambda candidate: self._bound(candidate, rest))
        return label

    def _longer(self, label: _Label, option: Option) -> _Label:
        return _Label(
            extended(label.value, option.score, self.goal),
            label.penalty + cost(option, self.goal),
            _added(label.latency_ms, option.latency_ms, self.on[len(label.options)]),
            label.cores + option.cores,
            label.batches + option.batch,
            (*label.options, option),
        )

    def _has_room(self, label: _Label, rest: _Rest) -> bool:
        if label.cores + rest.cores > self.goal.cores_max + 2 * CORES_SLACK:
            return False
        sums = zip(label.latency_ms, rest.latency_ms, self.limits_ms, strict=True)
        return all(taken_ms + least_ms <= limit_ms for taken_ms, least_ms, limit_ms in sums)

    def _bound(self, label: _Label, rest: _Rest) -> float:
        """f that no completion exceeds."""
        value = label.value + self.goal.alpha * rest.score if self.goal.summed else label.value * rest.score
        return value - label.penalty - rest.penalty


def _unbeaten(options: Sequence[Option]) -> list[Option]:
    """Those that no other option of the stage beats: what labels would find out, once and for all labels."""
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cores, o.latency_ms, o.batch, o.candidate)):
        score, latency_ms, batch = option.score, option.latency_ms, option.batch
        if not any(o.score >= score and o.latency_ms <= latency_ms and o.batch <= batch for o in front):
            front.append(option)
    return front


def _added(sums_ms: tuple[float, ...], latency_ms: float, on: tuple[bool, ...]) -> tuple[float, ...]:
    return tuple(sum_ms + latency_ms if counts else sum_ms for sum_ms, counts in zip(sums_ms, on, strict=True))


def _undominated(labels: Sequence[_Label]) -> list[_Label]:
    """Those that no other beats: at least as accurate with no more cores, latency and batches, and first in ties."""

    def place(label: _Label) -> tuple[object, ...]:
        chosen = label.options
        return (
            label.cores,
            label.latency_ms[-1],
            label.batches,
            tuple(option.candidate for option in chosen),
            tuple(option.batch for option in chosen),
        )

    front: list[_Label] = []
    for label in sorted(labels, key=place):
        value, latency_ms, batches = label.value, label.latency_ms, label.batches
        for other in front:
            if (
                other.value >= value
                and other.batches <= batches
                and all(mine_ms <= its_ms for mine_ms, its_ms in zip(other.latency_ms, latency_ms, strict=True))
            ):
                break
        else:
            front.append(label)
    return front
