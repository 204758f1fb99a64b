"""Which variant, batch and number of replicas at each stage of a pipeline: what may be chosen, and what is best.

Maximises f = α · accuracy - β · cores - δ · Σ batches, subject to the sum of latencies and batch-queue delays within
the SLO and to each stage keeping up with its rate. `enumerated` is the definition; `sloop.solvers.labels` and
`sloop.solvers.variants_milp` answer the same faster. Pure arithmetic in milliseconds, requests per second and cores.

Source: IPA (Razavi, dissertation, chapter P3), the optimisation problem, which is about chains of equal rates. Ours are
a rate for each stage, a deadline for each way through a graph (`Way`), and the constraint on all cores.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sloop.solvers.graph import Way
from sloop.solvers.queueing import fill_ms, replicas_needed

LATENCY_SLACK_MS = 1e-9
CORES_SLACK = 1e-9
KEPT_DIGITS = 12
"""Objectives that agree to so many decimals are equal, and ties are broken by cost."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that a stage may run, at its cores per replica; one latency for each batch offered, infinite for those
    it cannot run.

    `score` is its contribution to accuracy. `busy_ms` is how long a batch occupies its replica, where that is not the
    latency the SLO is planned with (a P99): a replica does 1000 b / busy_ms requests per second.
    """

    score: float
    cores: float
    latency_ms: tuple[float, ...]
    busy_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """One stage: the rate that comes, what it may run, in which batches.

    `replicas` is their number where that is given, 0 where it is not.
    """

    rate_rps: float
    batches: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Goal:
    """Weights and limits. `summed`: scores add up along the pipeline instead of being multiplied.

    `slo_ms` holds for all stages together, as on a chain; with `ways` each of those has its own, and `slo_ms` does not
    count.
    """

    slo_ms: float
    alpha: float
    beta: float
    delta: float = 1e-6
    summed: bool = False
    replicas_max: int = 100
    cores_max: float = math.inf
    ways: tuple[Way, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage: the candidate's index, its batch and replicas, and what follows from them.

    `cores` are those of all replicas, `latency_ms` includes the wait for the batch to fill.
    """

    candidate: int
    batch: int
    replicas: int
    score: float
    cores: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One option per stage. `gap`: by how much f could at most be better; 0 where the answer is exact."""

    options: tuple[Option, ...]
    objective: float
    gap: float = 0.0

    @property
    def cores(self) -> float:
        """Of all replicas of all stages."""
        return sum(option.cores for option in self.options)

    @property
    def latency_ms(self) -> float:
        """Of all stages, queues included: end to end on a chain."""
        return sum(option.latency_ms for option in self.options)

    @property
    def key(self) -> tuple[object, ...]:
        """What answers are compared by, the best smallest: objective, cores, latency, batches, candidates."""
        return key_of(self.options, self.objective)


def key_of(options: Sequence[Option], objective: float) -> tuple[object, ...]:
    """The order among answers; equal objectives go to fewer cores, then less latency, smaller batches, earlier
    candidates."""
    return (
        -round(objective, KEPT_DIGITS),
        sum(option.cores for option in options),
        sum(option.latency_ms for option in options),
        sum(option.batch for option in options),
        tuple(option.candidate for option in options),
        tuple(option.batch for option in options),
    )


def options_of(stage: Choices, replicas_max: int = 100) -> list[Option]:
    """Every way to run the stage that keeps up with its rate, without those that another of the same candidate beats
    in cores, latency and batch; in order of candidate and batch, which must be ascending."""
    found: list[Option] = []
    for index, candidate in enumerate(stage.candidates):
        own: list[Option] = []
        for place, batch in enumerate(stage.batches):
            if math.isinf(candidate.latency_ms[place]):
                continue
            busy_ms = (candidate.busy_ms or candidate.latency_ms)[place]
            needed = replicas_needed(stage.rate_rps, batch, busy_ms)
            if needed > (stage.replicas or replicas_max):
                continue
            replicas = stage.replicas or needed
            latency_ms = candidate.latency_ms[place] + fill_ms(batch, stage.rate_rps)
            cores = replicas * candidate.cores
            if not any(o.cores <= cores and o.latency_ms <= latency_ms for o in own):
                own.append(Option(index, batch, replicas, candidate.score, cores, latency_ms))
        found += own
    return found


def unbeaten(options: Sequence[Option]) -> list[Option]:
    """Those that no other option of the stage beats: what labels would find out, once and for all labels."""
    front: list[Option] = []
    for option in sorted(options, key=lambda o: (o.cores, o.latency_ms, o.batch, o.candidate)):
        score, latency_ms, batch = option.score, option.latency_ms, option.batch
        if not any(o.score >= score and o.latency_ms <= latency_ms and o.batch <= batch for o in front):
            front.append(option)
    return front


def objective(options: Iterable[Option], goal: Goal) -> float:
    """f of one option per stage."""
    value, penalty = (0.0 if goal.summed else goal.alpha), 0.0
    for option in options:
        value = extended(value, option.score, goal)
        penalty += cost(option, goal)
    return value - penalty


def extended(value: float, score: float, goal: Goal) -> float:
    """The weighted accuracy of a pipeline that is one stage longer."""
    return value + goal.alpha * score if goal.summed else value * score


def cost(option: Option, goal: Goal) -> float:
    """What the objective takes off for one stage."""
    return goal.beta * option.cores + goal.delta * option.batch


def is_feasible(options: Sequence[Option], goal: Goal) -> bool:
    """Whether every way keeps its SLO and all stages together the cap on cores."""
    if sum(option.cores for option in options) > goal.cores_max + CORES_SLACK:
        return False
    return all(
        sum(options[stage].latency_ms for stage in way.stages) <= way.slo_ms + LATENCY_SLACK_MS
        for way in ways_of(goal, len(options))
    )


def ways_of(goal: Goal, stages: int) -> tuple[Way, ...]:
    """What must be in time, for a pipeline of so many stages."""
    return goal.ways or (Way(tuple(range(stages)), goal.slo_ms),)


def enumerated(stages: Sequence[Choices], goal: Goal) -> Answer | None:
    """The best answer by trying all; None where none is feasible. For small instances, and to test against."""
    best: Answer | None = None
    for options in itertools.product(*(options_of(stage, goal.replicas_max) for stage in stages)):
        if is_feasible(options, goal):
            answer = Answer(options, objective(options, goal))
            if best is None or answer.key < best.key:
                best = answer
    return best
