"""IPA's optimisation problem: the variant, batch and number of replicas of each stage; and the inputs of the problem.

Maximise f = α · accuracy - β · cores - δ · Σ batches, such that latencies plus batch-filling times are within the SLO
and every stage keeps up with its rate. `label_setting` solves it.
Also here: the measures of accuracy, and the base allocation, which fixes every variant's cores per replica.

Source: IPA (Razavi, dissertation, chapter P3; Ghafouri et al. 2023), which treats chains with equal rates. A rate per
stage, a deadline per path of a graph, and the limit on all cores are additions. Units are milliseconds, requests per
second and cores.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sloop.api import ROUNDING
from sloop.api.solvers import IndexedPath, fill_ms, replicas_needed

KEPT_DIGITS: Final = 12
"""Objectives that agree to this many decimals are equal; `solution_key` breaks the tie."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A variant that a stage may run, with its cores per replica and a latency for each of the stage's batches.

    Batches that it cannot run have an infinite latency. `score` is its contribution to accuracy. `busy_ms` is how long
    a batch occupies its replica, if that differs from the planned latency (a P99): a replica serves 1000 b / busy_ms
    requests per second.
    """

    score: float
    cores: float
    latency_ms: tuple[float, ...]
    busy_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class IpaStage:
    """One stage: its arrival rate, the batches to choose from (ascending), and its candidates.

    `replicas` fixes the number of replicas; 0 leaves it free.
    """

    rate_rps: float
    batches: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class IpaGoal:
    """Weights and limits. `summed`: scores add up along the pipeline instead of being multiplied.

    `slo_ms` limits all stages together, as on a chain. With `paths`, each path has its own deadline instead.
    """

    slo_ms: float
    alpha: float
    beta: float
    delta: float = 1e-6
    summed: bool = False
    replicas_max: int = 100
    cores_max: float = math.inf
    paths: tuple[IndexedPath, ...] = ()

    def deadline_paths(self, stages: int) -> tuple[IndexedPath, ...]:
        """The paths that must keep a deadline in a pipeline of `stages` stages."""
        return self.paths or (IndexedPath(tuple(range(stages)), self.slo_ms),)


@dataclass(frozen=True, slots=True)
class IpaOption:
    """One way to run a stage: candidate (by index), batch and replicas, with the resulting score, cores and latency.

    `cores` are those of all replicas; `latency_ms` includes the time to fill the batch.
    """

    candidate: int
    batch: int
    replicas: int
    score: float
    cores: float
    latency_ms: float


@dataclass(frozen=True, slots=True)
class IpaSolution:
    """One option per stage. `gap` is an upper bound of how much better f could be; 0 if the solution is optimal."""

    options: tuple[IpaOption, ...]
    objective: float
    gap: float = 0.0

    @property
    def cores(self) -> float:
        """Cores of all replicas of all stages."""
        return sum(option.cores for option in self.options)

    @property
    def key(self) -> tuple[object, ...]:
        """The sort key of `solution_key`: the best solution has the smallest key."""
        return solution_key(self.options, self.objective)


def solution_key(options: Sequence[IpaOption], objective: float) -> tuple[object, ...]:
    """Highest objective first; ties by fewer cores, less latency, smaller batches, earlier candidates."""
    return (
        -round(objective, KEPT_DIGITS),
        sum(option.cores for option in options),
        sum(option.latency_ms for option in options),
        sum(option.batch for option in options),
        tuple(option.candidate for option in options),
        tuple(option.batch for option in options),
    )


def options_of(stage: IpaStage, replicas_max: int = 100) -> list[IpaOption]:
    """Every option that keeps up with the stage's rate, in order of candidate and batch.

    It omits options for which a smaller batch of the same candidate needs no more cores and no more latency.
    """
    found: list[IpaOption] = []
    for index, candidate in enumerate(stage.candidates):
        own: list[IpaOption] = []
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
                own.append(IpaOption(index, batch, replicas, candidate.score, cores, latency_ms))
        found += own
    return found


def pareto_options(options: Sequence[IpaOption]) -> list[IpaOption]:
    """Pareto filter over cores, latency, batch and score; among equal options the earlier candidate stays."""
    front: list[IpaOption] = []
    for option in sorted(options, key=lambda o: (o.cores, o.latency_ms, o.batch, o.candidate)):
        score, latency_ms, batch = option.score, option.latency_ms, option.batch
        if not any(o.score >= score and o.latency_ms <= latency_ms and o.batch <= batch for o in front):
            front.append(option)
    return front


def objective(options: Iterable[IpaOption], goal: IpaGoal) -> float:
    """f of one option per stage."""
    value, penalty = (0.0 if goal.summed else goal.alpha), 0.0
    for option in options:
        value = extended(value, option.score, goal)
        penalty += penalty_of(option, goal)
    return value - penalty


def extended(value: float, score: float, goal: IpaGoal) -> float:
    """The weighted accuracy of a pipeline that is one stage longer."""
    return value + goal.alpha * score if goal.summed else value * score


def penalty_of(option: IpaOption, goal: IpaGoal) -> float:
    """What the objective subtracts for one stage: β · cores + δ · batch."""
    return goal.beta * option.cores + goal.delta * option.batch


def is_feasible(options: Sequence[IpaOption], goal: IpaGoal) -> bool:
    """Whether every path keeps its deadline, and all stages together keep the limit on cores."""
    if sum(option.cores for option in options) > goal.cores_max + ROUNDING:
        return False
    return all(
        sum(options[stage].latency_ms for stage in path.stages) <= path.slo_ms + ROUNDING
        for path in goal.deadline_paths(len(options))
    )


Measure = Literal["pas", "pas_rank", "norm_prod"]
"""How the accuracies of a pipeline's active variants are combined. `pas`: their product, as if errors were independent.
`pas_rank` (PAS'): the sum of their ranks within the stages. `norm_prod`: the product of ranks lifted off zero,
0.05 + 0.95 · rank, after the settings of the authors' artefact, which does not show the formula."""

RANK_MIN: Final = 0.05
"""The rank of the least accurate variant in `norm_prod`; 0 would make all its pipelines equal."""


def fraction(accuracy: float) -> float:
    """A user's accuracy as a fraction, 0 to 1: values above 1 are percentages."""
    return accuracy / 100.0 if accuracy > 1.0 else accuracy


def ranks(accuracies: Sequence[float], cores: Sequence[float], names: Sequence[str]) -> list[float]:
    """For each variant of one stage its rank, evenly spaced from 0 (least accurate) to 1; 1 for a single variant.

    Among equally accurate variants, the one with fewer `cores` per replica ranks higher; then the later name.
    """
    if len(accuracies) == 1:
        return [1.0]
    order = sorted(range(len(accuracies)), key=lambda index: (accuracies[index], -cores[index], names[index]))
    found = [0.0] * len(order)
    for place, index in enumerate(order):
        found[index] = place / (len(order) - 1)
    return found


def scores(measure: Measure, accuracies: Sequence[float], cores: Sequence[float], names: Sequence[str]) -> list[float]:
    """The contribution of each variant of one stage to the measure, which sums (`pas_rank`) or multiplies it."""
    if measure == "pas":
        return list(accuracies)
    found = ranks(accuracies, cores, names)
    return found if measure == "pas_rank" else [RANK_MIN + (1.0 - RANK_MIN) * rank for rank in found]


SLO_FACTOR: Final = 5.0
"""A stage's share of the SLO is this many times the mean latency of its variants (Swayam; used by IPA)."""
ROUNDS_MAX: Final = 3
"""The most iterations of cores and deadline in `base_allocation`; published profiles need two."""

Latency = Callable[[int, float], float]
"""Milliseconds for a batch on a number of cores."""


@dataclass(frozen=True, slots=True)
class VariantSizes:
    """A variant's latency, and the core counts to choose from, ascending, at least one."""

    latency_ms: Latency
    choices: Sequence[float]


@dataclass(frozen=True, slots=True)
class BaseAllocation:
    """Cores per replica of each variant of a stage (None if no count suffices), and the stage's deadline."""

    cores: tuple[float | None, ...]
    slo_ms: float


def base_cores(
    latency_ms: Latency, choices: Sequence[float], *, threshold_rps: float, batch_max: int, slo_ms: float
) -> float | None:
    """The fewest cores that serve `threshold_rps` with batches of one, and the largest batch within `slo_ms`; None if
    no count does."""
    for cores in sorted(choices):
        if 1000.0 / latency_ms(1, cores) >= threshold_rps and latency_ms(batch_max, cores) <= slo_ms:
            return cores
    return None


def quickest_cores(sizes: VariantSizes) -> float:
    """The core count with the least latency of one request, for variants that no count makes fast enough."""
    return min(sizes.choices, key=lambda cores: (sizes.latency_ms(1, cores), cores))


def derived_slo_ms(latencies_ms: Sequence[float], factor: float = SLO_FACTOR) -> float:
    """A stage's deadline: `factor` times the mean of its variants' latencies with batches of one."""
    return factor * sum(latencies_ms) / len(latencies_ms)


def base_allocation(
    variants: Sequence[VariantSizes],
    *,
    threshold_rps: float,
    batch_max: int,
    slo_ms: float | None = None,
    factor: float = SLO_FACTOR,
) -> BaseAllocation:
    """Cores of a stage's `variants`, least accurate first, and the stage's deadline: `slo_ms`, or derived if None.

    Cores and derived deadline depend on each other, so they are computed in turn, starting from the fewest cores that
    carry the threshold (not published). The mean omits variants without a suitable count; if none has one, each counts
    with its largest count. A more accurate variant has at least the cores of the less accurate ones, up to its own
    largest count, as in the published tables.
    """

    def within(limit_ms: float) -> list[float | None]:
        found = [
            base_cores(own.latency_ms, own.choices, threshold_rps=threshold_rps, batch_max=batch_max, slo_ms=limit_ms)
            for own in variants
        ]
        return _rising(found, variants)

    if slo_ms is not None:
        return BaseAllocation(tuple(within(slo_ms)), slo_ms)
    cores = within(math.inf)
    limit_ms = _slo_ms(variants, cores, factor)
    for _ in range(ROUNDS_MAX):
        again = within(limit_ms)
        if again == cores:
            break
        cores = again
        limit_ms = _slo_ms(variants, cores, factor)
    return BaseAllocation(tuple(cores), limit_ms)


def _slo_ms(variants: Sequence[VariantSizes], cores: Sequence[float | None], factor: float) -> float:
    known = [own.latency_ms(1, count) for own, count in zip(variants, cores, strict=True) if count is not None]
    return derived_slo_ms(known or [own.latency_ms(1, max(own.choices)) for own in variants], factor)


def _rising(cores: Sequence[float | None], variants: Sequence[VariantSizes]) -> list[float | None]:
    least, found = 0.0, list[float | None]()
    for count, own in zip(cores, variants, strict=True):
        least = max(least, count or 0.0)
        found.append(None if count is None else min(least, max(own.choices)))
    return found
