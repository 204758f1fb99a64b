"""Pipelines with variants to test solvers on: the two published golden ones, and any number drawn from a seed."""

import itertools
from collections.abc import Sequence
from random import Random

from sloop.solvers.budget import IndexedPath
from sloop_systems.ipa.solver import (
    Candidate,
    IpaGoal,
    IpaSolution,
    IpaStage,
    Measure,
    is_feasible,
    objective,
    options_of,
    scores,
)

BATCHES = (1, 2, 4, 8)
VIDEO_GOAL = IpaGoal(slo_ms=6890.0, alpha=2.0, beta=1.0)

DETECTION = {
    "n": (0.457, 1, 0.0573, 0.0227),
    "s": (0.568, 1, 0.1600, 0.0400),
    "m": (0.641, 2, 0.1867, 0.1603),
    "l": (0.673, 4, 0.1900, 0.1500),
    "x": (0.689, 8, 0.1900, 0.1300),
}
CLASSIFICATION = {
    "R18": (0.6975, 1, 0.0443, 0.0287),
    "R34": (0.7331, 1, 0.0780, 0.0320),
    "R50": (0.7613, 1, 0.0996, 0.0364),
    "R101": (0.7737, 1, 0.1900, 0.0500),
    "R152": (0.7831, 2, 0.1500, 0.0400),
}
"""Accuracy, cores, and seconds per request and per batch: the IPA specification's reference profile R1 (7.3)."""

AUDIO = {"small": (0.5872, 1, 2.99), "medium": (0.6488, 2, 2.27), "large": (0.6674, 4, 1.32)}
SENTIMENT = {
    "DistilBERT": (0.796, 1, 8.0),
    "BERT": (0.799, 1, 8.0),
    "RoBERTa": (0.830, 1, 8.0),
    "sst2": (0.911, 1, 8.0),
}
QA = {"xlm": (0.7714, 1, 8.0), "roberta": (0.8291, 1, 8.0)}
"""Accuracy, cores, requests per second of a replica (7.4)."""


def video(rate_rps: float, replicas: int = 0) -> list[IpaStage]:
    """R1 at this rate."""
    return [
        IpaStage(
            rate_rps,
            BATCHES,
            tuple(
                Candidate(score, cores, tuple(1000 * (each * batch + fixed) for batch in BATCHES))
                for score, cores, each, fixed in family.values()
            ),
            replicas,
        )
        for family in (DETECTION, CLASSIFICATION)
    ]


def audio(second: dict[str, tuple[float, int, float]], rate_rps: float) -> list[IpaStage]:
    """Speech to text, then `second`, in batches of one, at half the throughput that was profiled."""
    return [
        IpaStage(
            rate_rps,
            (1,),
            tuple(
                Candidate(score, cores, (100.0,), (2 * 1000 / rps,))
                for score, (_, cores, rps) in zip(ranked(family), family.values(), strict=True)
            ),
        )
        for family in (AUDIO, second)
    ]


def ranked(family: dict[str, tuple[float, int, float]]) -> list[float]:
    accuracies, cores = [row[0] for row in family.values()], [row[1] for row in family.values()]
    return scores("norm_prod", accuracies, cores, list(family))


def enumerated(stages: Sequence[IpaStage], goal: IpaGoal) -> IpaSolution | None:
    """The best solution by trying all combinations; None where none is feasible: the definition of the problem."""
    best: IpaSolution | None = None
    for options in itertools.product(*(options_of(stage, goal.replicas_max) for stage in stages)):
        if is_feasible(options, goal):
            solution = IpaSolution(options, objective(options, goal))
            if best is None or solution.key < best.key:
                best = solution
    return best


def names(answer: IpaSolution, *families: Sequence[str]) -> list[tuple[str, int, int]]:
    """Variant, batch and replicas of each stage."""
    found = zip(answer.options, families, strict=True)
    return [(list(family)[option.candidate], option.batch, option.replicas) for option, family in found]


def drawn(seed: int, *, coarse: bool, paths: bool = False) -> tuple[list[IpaStage], IpaGoal]:
    """A pipeline of up to four stages with up to five candidates each. `coarse` values are of a small grid, so that
    ties occur; half of those cost nothing per core. With `paths` there are several, each with a deadline."""
    rng = Random(seed)
    batches = (1, 2, 4, 8)[: rng.randint(1, 4)]

    def value(low: float, high: float, step: float) -> float:
        return step * rng.randint(round(low / step), round(high / step)) if coarse else rng.uniform(low, high)

    def candidate() -> Candidate:
        each_ms, fixed_ms = value(10, 50, 20), value(0, 40, 20)
        latency_ms = tuple(each_ms * batch + fixed_ms for batch in batches)
        return Candidate(value(0.25, 1.0, 0.25), value(1, 4, 1), latency_ms)

    rate_rps = value(5, 40, 5)
    count = rng.randint(1, 4)
    stages = [
        IpaStage(
            rate_rps if rng.random() < 0.7 else value(0, 40, 5),
            batches,
            tuple(candidate() for _ in range(rng.randint(1, 5))),
            rng.choice((0, 0, 0, 3)),
        )
        for _ in range(count)
    ]
    found = tuple(
        IndexedPath(tuple(sorted(rng.sample(range(count), rng.randint(1, count)))), value(50, 400, 50))
        for _ in range(rng.randint(1, 3))
    )
    return stages, IpaGoal(
        slo_ms=value(50, 800, 50),
        alpha=value(0, 40, 10),
        beta=rng.choice((0.0, 0.5)) if coarse else rng.uniform(0, 2),
        delta=rng.choice((1e-6, 1e-3)),
        summed=rng.random() < 0.3,
        replicas_max=rng.choice((100, 3)),
        cores_max=value(4, 24, 4) if rng.random() < 0.3 else float("inf"),
        paths=found if paths else (),
    )


def fan(seed: int, *, stages: int = 10, variants: int = 10) -> tuple[list[IpaStage], IpaGoal]:
    """One stage, many beside each other, one behind them all: each of the paths keeps the deadline, which binds."""
    rng = Random(seed)
    made, least_ms = [], []
    for _ in range(stages):
        candidates = []
        for place in range(variants):
            base_ms = (place + 1) * rng.uniform(20, 60)
            cores = float(2 ** (place % 5)) if rng.random() < 0.5 else float(rng.randint(1, 5))
            latency_ms = tuple(base_ms * (0.3 + 0.7 * batch) for batch in BATCHES)
            candidates.append(Candidate(0.5 + 0.5 * (place + rng.random()) / variants, cores, latency_ms))
        least_ms.append(min(candidate.latency_ms[0] for candidate in candidates))
        made.append(IpaStage(20 * rng.uniform(0.5, 2), BATCHES, tuple(candidates)))
    paths = tuple(
        IndexedPath((0, middle, stages - 1), 3 * sum(least_ms) * 3 / stages) for middle in range(1, stages - 1)
    )
    return made, IpaGoal(0.0, rng.choice((60.0, 600.0, 6000.0)), 0.125, replicas_max=10**5, paths=paths)


def large(seed: int, alpha: float, measure: Measure = "pas") -> tuple[list[IpaStage], IpaGoal]:
    """Ten stages with ten candidates in four batches, and a deadline that binds."""
    rng = Random(seed)
    rate_rps = rng.uniform(5, 40)
    stages, least_ms = [], 0.0
    for _ in range(10):
        accuracies = sorted(rng.uniform(0.3, 0.99) for _ in range(10))
        cores = sorted(rng.choice((1, 1, 2, 4, 8)) for _ in range(10))
        each_ms = [rng.uniform(20, 80) * place for place in range(1, 11)]
        found = scores(measure, accuracies, cores, [str(place) for place in range(10)])
        least_ms += each_ms[0]
        stages.append(
            IpaStage(
                rate_rps,
                BATCHES,
                tuple(
                    Candidate(score, core, tuple(base * (0.3 + 0.7 * batch) for batch in BATCHES))
                    for score, core, base in zip(found, cores, each_ms, strict=True)
                ),
            )
        )
    return stages, IpaGoal(least_ms * rng.uniform(1.2, 4), alpha, 1.0, summed=measure == "pas_rank")
