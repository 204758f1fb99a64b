"""Equal replicas for every stage of a graph: FA2, and the planners of its evaluation on the same model.

FA2 (Razavi et al., RTAS 2022) chooses batches and replicas of all stages together: min Σ n + δ Σ b, subject to
Σ [d(b) + q(b)] ≤ SLO on every path and n · b/d(b) ≥ λ at every stage, with q(b) = (b - 1)/λ; δ only breaks ties,
towards small batches. As published, `solve` cuts the graph into a forest and runs a dynamic program over milliseconds;
it then checks every path again, and uses the integer program if the cuts leave no solution.

`ds2`, `inferline` and `grandslam` follow the definitions of FA2's evaluation; `inferline_full` is nearer to InferLine's
own paper. `fa2_single` is FA2's rule for a single model, as Sponge's evaluation uses it.

Not published: a stage that runs once per part of a request (fan-out) receives all parts at once. They fill batches
sooner, and need several turns if one batch per replica does not hold them all, so more replicas than the rate needs can
shorten a path. Units are those of the publication: milliseconds and requests per second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from sloop.api import WIDE_ROUNDING
from sloop.api.solvers import (
    CUTS_MAX,
    NODES_MAX,
    BudgetRule,
    IndexedPath,
    PathMatrix,
    StageOptions,
    Ties,
    cheapest_by_forests,
    cheapest_by_milp,
    fill_ms,
    improved_choice,
    is_exact,
    replicas_needed,
    segment_matrix,
    segments_of,
    slot_ms_of,
)

Fa2Mode = Literal["tree", "paper", "milp"]
"""The budget rule of the dynamic program (`budget.BudgetRule`), or `milp` for the integer program."""

HALVINGS_MAX: Final = 30
"""The most halvings of the rates until something fits: down to a billionth."""
BISECTIONS: Final = 7
"""Bisections after the halvings: they give the share with an error below 1 %."""
PROGRAMS_MAX: Final = 120
"""The most forests × stages, so that a decision takes at most 20 ms on graphs with many meeting paths."""
CELLS_MAX: Final = 1_000_000
"""The most forests × stages × slots, for the same reason."""
CUTS_MIN: Final = 4
"""The number of forests that are always tried, even beyond the two limits above."""
TURNS_MAX: Final = 8
"""The most turns that the parts of one request may take at a stage."""


@dataclass(frozen=True, slots=True)
class Fa2Stage:
    """One stage. `latency_ms[b - 1]` is d(b) of one replica. A request arrives in `parts` parts, all at once."""

    name: str
    rate_rps: float
    latency_ms: tuple[float, ...]
    parts: int = 1

    @property
    def intensity(self) -> float:
        """Int: the mean of d over all batches. A cut divides a deadline in proportion to it."""
        return sum(self.latency_ms) / len(self.latency_ms)


@dataclass(frozen=True, slots=True)
class Fa2Choice:
    """`replicas` with batches of `batch`; a batch takes `latency_ms` and is full after at most `wait_ms`."""

    batch: int
    replicas: int
    latency_ms: float
    wait_ms: float
    turns: int = 1
    """Batches one after the other until all parts of a request are done."""

    @property
    def total_ms(self) -> float:
        """d + q: what the stage adds to a path."""
        return self.turns * self.latency_ms + self.wait_ms


@dataclass(frozen=True, slots=True)
class Fa2Solution:
    """A choice for each stage, found by `method`. `proven`: no other is cheaper, with times rounded up to slots."""

    choices: tuple[Fa2Choice, ...]
    method: Fa2Mode | Literal["quickest"]
    proven: bool = False

    @property
    def replicas(self) -> int:
        """Σ n."""
        return sum(choice.replicas for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Fa2Infeasible:
    """No choice keeps the deadlines: `path` takes `least_ms` even with batches of one, most of it at stage
    `slowest`."""

    path: IndexedPath
    least_ms: float
    slowest: int


@dataclass(frozen=True, slots=True)
class Fa2GaveUp:
    """The integer program reached `nodes` nodes without a solution, although one exists (the quickest options)."""

    nodes: int


def path_ms(choices: Sequence[Fa2Choice], path: IndexedPath) -> float:
    """Σ (d + q) over a path."""
    return sum(choices[stage].total_ms for stage in path.stages)


def tightest(choices: Sequence[Fa2Choice], paths: Sequence[IndexedPath]) -> IndexedPath:
    """The path with the least time left."""
    return min(paths, key=lambda path: path.slo_ms - path_ms(choices, path))


def keeps_deadlines(choices: Sequence[Fa2Choice], paths: Sequence[IndexedPath]) -> bool:
    """Whether every path is within its deadline."""
    return all(path_ms(choices, path) <= path.slo_ms + WIDE_ROUNDING for path in paths)


def stage_choices(stage: Fa2Stage, slo_ms: float = math.inf) -> list[Fa2Choice]:
    """Every batch with the fewest replicas that keep up, and with more replicas if that saves turns.

    It omits choices that alone exceed `slo_ms`, except the first, a batch of one. At a rate of 0 the only batch is 1,
    since no other request would fill it.
    """
    made: list[Fa2Choice] = []
    batches = enumerate(stage.latency_ms if stage.rate_rps > 0 else stage.latency_ms[:1], start=1)
    for batch, latency_ms in batches:
        # A request brings all its parts, so a batch waits for further requests only.
        wait_ms = fill_ms(-(-batch // stage.parts), stage.rate_rps / stage.parts)
        enough = replicas_needed(stage.rate_rps, batch, latency_ms)
        previous = 0
        for turns in range(min(TURNS_MAX, -(-stage.parts // batch)), 0, -1):
            replicas = max(enough, -(-stage.parts // (batch * turns)))
            choice = Fa2Choice(batch, replicas, latency_ms, wait_ms, -(-stage.parts // (batch * replicas)))
            if replicas != previous and (not made or choice.total_ms <= slo_ms):
                made.append(choice)
            previous = replicas
    return made


def solve(
    stages: Sequence[Fa2Stage],
    paths: Sequence[IndexedPath],
    *,
    mode: Fa2Mode = "tree",
    ties: Ties = "best",
    polish: bool = False,
    fallback: bool = True,
    slot_ms: float = 0.0,
    nodes_max: int = NODES_MAX,
) -> Fa2Solution | Fa2Infeasible | Fa2GaveUp:
    """The fewest replicas, then the smallest batches. Every stage must be on a path; deadlines must be above 0.

    `slot_ms` 0 means `slot_ms_of`. `polish` improves single stages of a forest's solution. Without `fallback`, no
    solution over the forests counts as infeasible, as published, although the paths may have one.
    """
    slot_ms = slot_ms or slot_ms_of(paths)
    limits = [min(path.slo_ms for path in paths if stage in path.stages) for stage in range(len(stages))]
    offered = [stage_choices(stage, limit) for stage, limit in zip(stages, limits, strict=True)]
    options = [_options(own, stages, slot_ms) for own in offered]
    segments = segments_of(paths, slot_ms)
    proven = mode == "tree" and is_exact(segments)
    best = None if mode == "milp" else _by_forests(stages, paths, options, mode, ties, slot_ms)
    if best is not None:
        if polish and not proven:
            best = improved_choice(options, segment_matrix(segments, len(stages)), best)
        return Fa2Solution(_at(offered, best), mode, proven)
    quickest = tuple(min(own, key=lambda choice: choice.total_ms) for own in offered)
    if not keeps_deadlines(quickest, paths) or (mode != "milp" and not fallback):
        return _infeasible(quickest, paths)
    found = cheapest_by_milp(options, segments, nodes_max=nodes_max)
    if found.indices is not None:
        return Fa2Solution(_at(offered, found.indices), "milp", found.proven)
    return Fa2Solution(quickest, "quickest") if found.proven else Fa2GaveUp(nodes_max)


def largest_share(
    stages: Sequence[Fa2Stage],
    paths: Sequence[IndexedPath],
    replicas_max: int,
    *,
    mode: BudgetRule = "tree",
    ties: Ties = "loosest",
) -> tuple[Fa2Solution, float] | None:
    """For overload: the largest share of all rates that `replicas_max` replicas serve, and the solution for it.

    Halves the share until it fits, then bisects. None where nothing fits.
    """
    if len(stages) > replicas_max:
        return None
    coarse_ms = slot_ms_of(paths, coarse=True)

    def within(share: float) -> Fa2Solution | None:
        scaled = [replace(stage, rate_rps=stage.rate_rps * share) for stage in stages]
        solution = solve(scaled, paths, mode=mode, ties=ties, polish=True, fallback=False, slot_ms=coarse_ms)
        return solution if isinstance(solution, Fa2Solution) and solution.replicas <= replicas_max else None

    best, low, high = None, 1.0, 1.0
    for _ in range(HALVINGS_MAX):
        low, high = low / 2, low
        best = within(low)
        if best is not None:
            break
    else:
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        solution = within(middle)
        if solution is None:
            high = middle
        else:
            low, best = middle, solution
    return best, low


def _by_forests(
    stages: Sequence[Fa2Stage],
    paths: Sequence[IndexedPath],
    options: Sequence[StageOptions],
    mode: BudgetRule,
    ties: Ties,
    slot_ms: float,
) -> list[int] | None:
    """The cheapest solution over as many forests as a decision has time for."""
    cells = len(stages) * max(path.slots(slot_ms) for path in paths)
    most = max(CUTS_MIN, min(CUTS_MAX, PROGRAMS_MAX // len(stages), CELLS_MAX // max(1, cells)))
    weights = [stage.intensity for stage in stages]
    return cheapest_by_forests(options, paths, weights, slot_ms=slot_ms, rule=mode, ties=ties, most=most)


def _options(offered: Sequence[Fa2Choice], stages: Sequence[Fa2Stage], slot_ms: float) -> StageOptions:
    """Costs pack replicas, then batches: no sum of batches outweighs a replica."""
    unit = 1 + sum(len(stage.latency_ms) for stage in stages)
    return StageOptions(
        np.array([choice.replicas * unit + choice.batch for choice in offered], dtype=np.int64),
        np.array([math.ceil(choice.total_ms / slot_ms - WIDE_ROUNDING) for choice in offered], dtype=np.int64),
    )


def _at(offered: Sequence[Sequence[Fa2Choice]], indices: Sequence[int]) -> tuple[Fa2Choice, ...]:
    return tuple(own[index] for own, index in zip(offered, indices, strict=True))


def _infeasible(quickest: Sequence[Fa2Choice], paths: Sequence[IndexedPath]) -> Fa2Infeasible:
    worst = max(paths, key=lambda path: path_ms(quickest, path) - path.slo_ms)
    slowest = max(worst.stages, key=lambda stage: quickest[stage].total_ms)
    return Fa2Infeasible(worst, path_ms(quickest, worst), slowest)


def ds2(stages: Sequence[Fa2Stage]) -> tuple[Fa2Choice, ...]:
    """No batches, n = ⌈λ d(1)⌉; ignores deadlines (Kalavri et al., OSDI 2018, for stream processing)."""
    return tuple(stage_choices(stage)[0] for stage in stages)


def inferline(stages: Sequence[Fa2Stage], paths: Sequence[IndexedPath]) -> tuple[Fa2Choice, ...]:
    """Starts with batches of 1; then each stage, once and in order, grows its batch while all paths keep their
    deadlines.

    Early stages may use all of the time (Crankshaw et al., SoCC 2020, in the form of FA2's evaluation).
    """
    chosen = list(ds2(stages))
    matrix = PathMatrix([path.stages for path in paths], [path.slo_ms for path in paths], len(stages))
    if not keeps_deadlines(chosen, paths):
        return tuple(chosen)
    for index, stage in enumerate(stages):
        slack_ms = matrix.stage_slack([choice.total_ms for choice in chosen])[index]
        most_ms = chosen[index].total_ms + slack_ms + WIDE_ROUNDING
        for choice in _fewest_by_batch(stage)[1:]:
            if choice.total_ms > most_ms:
                break
            chosen[index] = choice
    return tuple(chosen)


def inferline_full(stages: Sequence[Fa2Stage], paths: Sequence[IndexedPath]) -> tuple[Fa2Choice, ...]:
    """Starts with batches of 1; then repeatedly doubles the batch that saves most replicas, until none saves any.

    A batch may double several times in one step, because a single doubling may not save a replica. Among equal savings
    the smaller batch wins, then the earlier stage (InferLine's planner, with one kind of hardware).
    """
    chosen = list(ds2(stages))
    while True:
        moves = [
            (choice.replicas - chosen[index].replicas, choice.batch, index, choice)
            for index, stage in enumerate(stages)
            for choice in _fewest_by_batch(stage)
            if _is_doubling(chosen[index].batch, choice.batch)
            and choice.replicas < chosen[index].replicas
            and keeps_deadlines([*chosen[:index], choice, *chosen[index + 1 :]], paths)
        ]
        if not moves:
            return tuple(chosen)
        _, _, index, choice = min(moves, key=lambda move: move[:3])
        chosen[index] = choice


def grandslam(
    stages: Sequence[Fa2Stage], paths: Sequence[IndexedPath], replicas: Sequence[int]
) -> tuple[Fa2Choice, ...]:
    """The largest batch whose d(b) fits the stage's share of the deadline, which is proportional to d(1).

    A stage on several paths gets its smallest share. GrandSLAm does not choose numbers of replicas, so `replicas` gives
    them by stage (Kannan et al., EuroSys 2019, in the form of FA2's evaluation).
    """
    chosen = []
    for index, (stage, count) in enumerate(zip(stages, replicas, strict=True)):
        share_ms = min(
            path.slo_ms * stage.latency_ms[0] / sum(stages[other].latency_ms[0] for other in path.stages)
            for path in paths
            if index in path.stages
        )
        fitting = [batch for batch, own_ms in enumerate(stage.latency_ms, start=1) if own_ms <= share_ms]
        batch = max(fitting, default=1) if stage.rate_rps > 0 else 1
        turns = max(1, -(-stage.parts // (batch * count)))
        wait_ms = fill_ms(-(-batch // stage.parts), stage.rate_rps / stage.parts)
        chosen.append(Fa2Choice(batch, count, stage.latency_ms[batch - 1], wait_ms, turns))
    return tuple(chosen)


def _fewest_by_batch(stage: Fa2Stage) -> list[Fa2Choice]:
    """The choice with the fewest replicas for each batch, batches ascending."""
    fewest: dict[int, Fa2Choice] = {}
    for choice in stage_choices(stage):
        known = fewest.get(choice.batch)
        if known is None or choice.replicas < known.replicas:
            fewest[choice.batch] = choice
    return list(fewest.values())


def _is_doubling(before: int, after: int) -> bool:
    return after > before and after % before == 0 and (after // before).bit_count() == 1


@dataclass(frozen=True, slots=True)
class Fa2SingleChoice:
    """`replicas` with batches of `batch` that take `latency_ms`; a second's requests need `rounds` per replica."""

    replicas: int
    batch: int
    latency_ms: float
    rounds: int


def fa2_single(
    latency_ms: Sequence[float],
    rate_rps: float,
    *,
    network_ms_max: float,
    limit_ms: float,
    slo_ms: float,
    replicas_max: int,
) -> Fa2SingleChoice | None:
    """One model: the fewest replicas, then the smallest batch; None if even `replicas_max` do not suffice.

    `latency_ms[b - 1]` is L = l(b, 1), `network_ms_max` is cl, the longest network time of a request, and `limit_ms` is
    margin × SLO. With q = SLO - cl, n replicas need the throughput n · ⌊q/L⌋ · b ≥ λ and the latency
    L + ⌈λ/(n b)⌉ · L + cl < limit. The horizontal baseline of Sponge's evaluation (EuroMLSys 2024), with the rule of
    its artefact, which cuts L to whole milliseconds; here L keeps its fraction.
    """
    left_ms = slo_ms - network_ms_max
    for replicas in range(1, replicas_max + 1):
        for batch, own_ms in enumerate(latency_ms, start=1):
            if replicas * math.floor(left_ms / own_ms) * batch < rate_rps:
                continue
            rounds = math.ceil(rate_rps / (replicas * batch))
            if own_ms + rounds * own_ms + network_ms_max < limit_ms:
                return Fa2SingleChoice(replicas, batch, own_ms, rounds)
    return None
