"""FA2: a batch and a number of equal replicas for every stage of a graph at once, the fewest that keep all paths.

min Σ n + δ Σ b, subject to Σ [d(b) + q(b)] ≤ SLO on every path and n · b/d(b) ≥ λ at every stage (Razavi et al., FA2,
RTAS 2022, integer program). q(b) = (b - 1)/λ, so that the batch settles the replicas; δ only breaks ties, towards small
batches. Solved as published, by cutting the graph to a forest and a dynamic program over milliseconds, in the readings
of the specification's §2.5, §2.6 and §6; every path is checked again afterwards, and where cuts left no answer the
integer program itself is solved. Pure arithmetic in the paper's units, milliseconds and requests per second.

Ours: a stage that runs for each of several parts of a request gets them all at once. They fill its batches sooner, and
take turns where its replicas do not hold them all; more replicas than the rate needs are then an option.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from sloop.solvers import choice
from sloop.solvers.budget import Options, Segment, cheapest_tree, is_exact
from sloop.solvers.graph import CUTS_MAX, ROUNDING, Chains, Ties, Way, forests
from sloop.solvers.queueing import fill_ms, replicas_needed

Mode = Literal["tree", "paper", "milp"]
"""How a stage's time is shared by those after it (`budget.Budgets`), or the integer program instead."""

SLOTS_TIGHTEST: Final = 1_000
"""A deadline of less than a second is divided into as many slots, so that rounding up costs little."""
SLOTS_MAX: Final = 32_768
"""Of the loosest deadline: what the dynamic program may take, in memory and time."""
SLOTS_COARSE: Final = 2_048
"""While it is only searched how much of a rate fits."""
HALVINGS_MAX: Final = 30
"""Of all rates, until what is left fits: to a billionth."""
BISECTIONS: Final = 7
PROGRAMS_MAX: Final = 120
"""Forests times stages, so that a decision takes no longer where much meets."""
CELLS_MAX: Final = 1_000_000
"""Forests times stages times slots, for the same reason."""
CUTS_MIN: Final = 4
"""But so many ways to cut at least."""
TURNS_MAX: Final = 8
"""A request's parts go through a stage in so many turns at most."""
SLACK_MS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Stage:
    """`latency_ms[b - 1]` is d(b), of one replica; a request that comes at all has `parts` here, at once."""

    name: str
    rate_rps: float
    latency_ms: tuple[float, ...]
    parts: int = 1

    @property
    def intensity(self) -> float:
        """Int: the mean of d over all batches."""
        return sum(self.latency_ms) / len(self.latency_ms)


@dataclass(frozen=True, slots=True)
class Choice:
    """`replicas` with batches of `batch`, each of which takes `latency_ms` once it is full, at most `wait_ms` later."""

    batch: int
    replicas: int
    latency_ms: float
    wait_ms: float
    turns: int = 1
    """How often the replicas must run until all parts of a request are done."""

    @property
    def total_ms(self) -> float:
        """l = d + q: the stage's part of a path's latency."""
        return self.turns * self.latency_ms + self.wait_ms


@dataclass(frozen=True, slots=True)
class Answer:
    """A choice for each stage. `method` says what found it; `proven` if none is cheaper, times rounded up to slots."""

    choices: tuple[Choice, ...]
    method: Mode | Literal["quickest"]
    proven: bool = False

    @property
    def replicas(self) -> int:
        """Σ n."""
        return sum(choice.replicas for choice in self.choices)

    @property
    def batches(self) -> int:
        """Σ b."""
        return sum(choice.batch for choice in self.choices)

    def way_ms(self, way: Way) -> float:
        """The predicted worst latency of one path."""
        return way_ms(self.choices, way)

    def binding(self, ways: Sequence[Way]) -> Way:
        """The path with the least time left."""
        return min(ways, key=lambda way: way.slo_ms - self.way_ms(way))


@dataclass(frozen=True, slots=True)
class Shortfall:
    """There is no choice: `way` takes `least_ms` even one request at a time, most of it at stage `slowest`."""

    way: Way
    least_ms: float
    slowest: int


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The integer program's nodes ran out before it had any choice. There is one: the quickest everywhere."""

    nodes: int


def way_ms(choices: Sequence[Choice], way: Way) -> float:
    """Σ l over a path."""
    return sum(choices[stage].total_ms for stage in way.stages)


def keeps(choices: Sequence[Choice], ways: Sequence[Way]) -> bool:
    """Whether every path is within its deadline."""
    return all(way_ms(choices, way) <= way.slo_ms + SLACK_MS for way in ways)


def choices_of(stage: Stage, slo_ms: float = math.inf) -> list[Choice]:
    """All that a stage may be given, with the fewest replicas for each; what alone exceeds `slo_ms` is left out.

    Nobody waits where nobody comes: at a rate of 0 the batch is 1. The first, one request at a time, is always there.
    """
    made: list[Choice] = []
    batches = enumerate(stage.latency_ms if stage.rate_rps > 0 else stage.latency_ms[:1], start=1)
    for batch, latency_ms in batches:
        # A request brings all its parts, so a batch waits for further requests only.
        wait_ms = fill_ms(-(-batch // stage.parts), stage.rate_rps / stage.parts)
        enough = replicas_needed(stage.rate_rps, batch, latency_ms)
        known = 0
        for turns in range(min(TURNS_MAX, -(-stage.parts // batch)), 0, -1):
            replicas = max(enough, -(-stage.parts // (batch * turns)))
            needed = -(-stage.parts // (batch * replicas))
            option = Choice(batch, replicas, latency_ms, wait_ms, needed)
            if replicas != known and (not made or option.total_ms <= slo_ms):
                made.append(option)
            known = replicas
    return made


def slot_ms_of(ways: Sequence[Way], slots_max: int = SLOTS_MAX) -> float:
    """1 ms as published; finer for tight deadlines, and coarser where the loosest would have more than `slots_max`."""
    tightest = min(way.slo_ms for way in ways)
    loosest = max(way.slo_ms for way in ways)
    return max(min(1.0, tightest / SLOTS_TIGHTEST), loosest / slots_max)


def solve(
    stages: Sequence[Stage],
    ways: Sequence[Way],
    *,
    mode: Mode = "tree",
    ties: Ties = "best",
    polish: bool = False,
    fallback: bool = True,
    slot_ms: float = 0.0,
    nodes_max: int = choice.NODES_MAX,
) -> Answer | Shortfall | GaveUp:
    """The fewest replicas, then the smallest batches. Every stage must be on a path; deadlines must be above 0.

    `slot_ms` 0 leaves the slots to `slot_ms_of`. `polish` lets single stages of a forest's answer change where that
    saves something. Without `fallback` a forest that holds nothing is a `Shortfall` as published, although the paths
    might hold something.
    """
    slot_ms = slot_ms or slot_ms_of(ways)
    limits = [min(way.slo_ms for way in ways if stage in way.stages) for stage in range(len(stages))]
    offered = [choices_of(stage, limit) for stage, limit in zip(stages, limits, strict=True)]
    options = [_options(own, stages, slot_ms) for own in offered]
    best: list[int] | None = None
    segments = _segments(ways, slot_ms)
    chains = choice.chains_of(segments, len(stages))
    proven = mode == "tree" and is_exact(segments)
    if mode != "milp":
        best = _by_forest(stages, ways, options, chains, mode, ties, slot_ms)
    if best is not None:
        if polish and not proven:
            best = choice.improved(options, chains, best)
        return Answer(_picked(offered, best), mode, proven)
    quickest = tuple(min(own, key=lambda option: option.total_ms) for own in offered)
    if not keeps(quickest, ways) or (mode != "milp" and not fallback):
        return _shortfall(quickest, ways)
    found = choice.cheapest(options, segments, nodes_max=nodes_max)
    if found.indices is not None:
        return Answer(_picked(offered, found.indices), "milp", found.proven)
    return Answer(quickest, "quickest") if found.proven else GaveUp(nodes_max)


def squeezed(
    stages: Sequence[Stage], ways: Sequence[Way], replicas_max: int, *, mode: Mode = "tree", ties: Ties = "loosest"
) -> tuple[Answer, float] | None:
    """What serves as large a share of all rates as `replicas_max` replicas can, and that share; None if none can.

    The overload fallback of the specification's §2.9, by bisection, after halving until some share fits.
    """
    if len(stages) > replicas_max:
        return None
    coarse_ms = slot_ms_of(ways, SLOTS_COARSE)

    def within(share: float) -> Answer | None:
        scaled = [replace(stage, rate_rps=stage.rate_rps * share) for stage in stages]
        answer = solve(scaled, ways, mode=mode, ties=ties, polish=True, fallback=False, slot_ms=coarse_ms)
        return answer if isinstance(answer, Answer) and answer.replicas <= replicas_max else None

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
        answer = within(middle)
        if answer is None:
            high = middle
        else:
            low, best = middle, answer
    return best, low


def _by_forest(
    stages: Sequence[Stage],
    ways: Sequence[Way],
    options: Sequence[Options],
    chains: Chains,
    mode: Mode,
    ties: Ties,
    slot_ms: float,
) -> list[int] | None:
    """The best over the forests, checked on the paths themselves."""
    assert mode != "milp"
    best: list[int] | None = None
    least = 0
    cells = len(stages) * max(way.slots(slot_ms) for way in ways)
    most = max(CUTS_MIN, min(CUTS_MAX, PROGRAMS_MAX // len(stages), CELLS_MAX // max(1, cells)))
    for forest in forests(ways, [stage.intensity for stage in stages], ties, most):
        indices = cheapest_tree(options, _segments(forest.ways, slot_ms), mode)
        if indices is None or not choice.holds(options, chains, indices):
            continue
        key = sum(int(option.keys[index]) for option, index in zip(options, indices, strict=True))
        if best is None or key < least:
            best, least = indices, key
    return best


def _segments(ways: Sequence[Way], slot_ms: float) -> list[Segment]:
    return [Segment(way.stages, way.slots(slot_ms)) for way in ways]


def _options(offered: Sequence[Choice], stages: Sequence[Stage], slot_ms: float) -> Options:
    """Replicas first, then batches: no sum of batches outweighs a replica."""
    unit = 1 + sum(len(stage.latency_ms) for stage in stages)
    return Options(
        np.array([option.replicas * unit + option.batch for option in offered], dtype=np.int64),
        np.array([math.ceil(option.total_ms / slot_ms - ROUNDING) for option in offered], dtype=np.int64),
    )


def _picked(offered: Sequence[Sequence[Choice]], indices: Sequence[int]) -> tuple[Choice, ...]:
    return tuple(own[index] for own, index in zip(offered, indices, strict=True))


def _shortfall(quickest: Sequence[Choice], ways: Sequence[Way]) -> Shortfall:
    worst = max(ways, key=lambda way: way_ms(quickest, way) - way.slo_ms)
    slowest = max(worst.stages, key=lambda stage: quickest[stage].total_ms)
    return Shortfall(worst, way_ms(quickest, worst), slowest)
