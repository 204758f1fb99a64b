"""What of IPA can be checked without a simulation: optima, ranges, the deadlines' rule, how long deciding takes.

Reference optima are the specification's (7.3, 7.4), found by an independent enumeration over the same profiles; PAS
plateaus are read off the published video figure. Source: Razavi, dissertation (TU Darmstadt 2024), chapter P3.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from random import Random
from typing import Final

from sloop.reproduce.ipa.pipelines import (
    ARTEFACT,
    CLASSIFICATION,
    DETECTION,
    SPEECH,
    THESIS,
    Model,
    Pipeline,
)
from sloop.reproduce.rows import Claim, Row, bounded, contradicted, equals
from sloop.solvers import labels
from sloop.solvers.accuracy import scores
from sloop.solvers.base_allocation import derived_slo_ms
from sloop.solvers.variants import Answer, Candidate, Choices, Goal

SIZES: Final = tuple(range(1, 11))
"""Stages, and variants of each, that the published scalability figure goes up to."""
REPEATS: Final = 3
BATCHES: Final = (1, 2, 4, 8)

VIDEO: Final = (
    (5, 2, 43.95, -1.121086, 2, 2),
    (7, 2, 34.79, -1.304174, 2, 4),
    (10, 2, 33.50, -1.329950, 2, 4),
    (20, 3, 31.88, -2.362494, 3, 8),
    (30, 4, 31.88, -3.362491, 4, 11),
)
"""Requests/s, cores, 100 · PAS and objective of the optimum, cores of FA2-low and of FA2-high (7.3)."""
PLATEAUS: Final = {5: 43.9, 7: 34.8, 10: 33.5, 20: 31.9}
"""100 · PAS of the published video figure, by the rate at which the reference profile has it."""
SENTIMENT: Final = ((7, 16, 59.11), (12, 25, 59.11), (30, 29, 53.49), (34, 32, 53.49))
"""Requests/s, cores and 100 · PAS of audio with sentiment (7.4), where that does 8 requests/s a core."""
SPEECH_P99_S: Final = (0.188, 0.251, 0.590, 0.205, 0.426)
"""Of the five speech models at 8 cores, one by one, in the artefact."""


def rows() -> list[Row]:
    """All that need no run."""
    return [*_ranges(), *_video(), *_sentiment(), *_deadlines()]


def choices(models: Sequence[Model], found: Sequence[float], rate_rps: float, pipeline: Pipeline) -> Choices:
    """A stage as the optimiser sees it."""
    batches = tuple(batch for batch in BATCHES if batch <= pipeline.batch_max)
    candidates = []
    for model, score in zip(models, found, strict=True):
        latency_ms = tuple(model.each_ms * batch + model.fixed_ms for batch in batches)
        busy_ms = tuple(taken_ms / pipeline.load_max for taken_ms in latency_ms)
        candidates.append(Candidate(score, model.cores, latency_ms, busy_ms))
    return Choices(rate_rps, batches, tuple(candidates))


def program(pipeline: Pipeline, rate_rps: float) -> tuple[list[Choices], Goal]:
    """The pipeline's optimisation problem at this rate."""
    stages = []
    for step in pipeline.steps:
        accuracies, cores = [model.accuracy for model in step.models], [model.cores for model in step.models]
        found = scores(pipeline.measure, accuracies, cores, [model.name for model in step.models])
        stages.append(choices(step.models, found, rate_rps, pipeline))
    return stages, Goal(slo_ms=1000 * pipeline.slo_s, alpha=pipeline.alpha, beta=pipeline.beta)


def _solved(stages: Sequence[Choices], goal: Goal) -> Answer:
    answer = labels.solve(stages, goal).answer
    assert answer is not None, goal
    return answer


def _fixed(stages: Sequence[Choices], indices: Sequence[int]) -> list[Choices]:
    return [replace(own, candidates=(own.candidates[index],)) for own, index in zip(stages, indices, strict=True)]


def _video() -> list[Row]:
    made = []
    for rate_rps, cores, pas, objective, low, high in VIDEO:
        stages, goal = program(ARTEFACT["video"], rate_rps)
        answer = _solved(stages, goal)
        reached = 100 * prod(
            family[option.candidate].accuracy
            for family, option in zip((DETECTION, CLASSIFICATION), answer.options, strict=True)
        )

        def claim(metric: str, unit: str, derived: float, paper: float | None = None, at: float = rate_rps) -> Claim:
            return Claim(
                experiment="optima, video", metric=f"{metric} at {at:g}/s", unit=unit, derived=derived, paper=paper
            )

        made += [
            equals(claim("cores", "cores", cores), [answer.cores], within=0),
            equals(claim("100 · PAS", "", pas, PLATEAUS.get(rate_rps)), [reached], within=0.06),
            equals(claim("objective", "", objective), [round(answer.objective, 6)], within=0),
            equals(claim("FA2-low, cores", "cores", low), [_solved(_fixed(stages, (0, 0)), goal).cores], within=0),
            equals(claim("FA2-high, cores", "cores", high), [_solved(_fixed(stages, (1, 3)), goal).cores], within=0),
        ]
    return made


def _sentiment() -> list[Row]:
    pipeline = ARTEFACT["audio-sent"]
    slower = tuple(replace(model, each_ms=125.0) for model in pipeline.steps[1].models)
    specified = replace(pipeline, steps=(pipeline.steps[0], replace(pipeline.steps[1], models=slower)))
    made = []
    for rate_rps, cores, pas in SENTIMENT:
        answer = _solved(*program(specified, rate_rps))
        reached = 100 * prod(
            family[option.candidate].accuracy for family, option in zip((SPEECH, slower), answer.options, strict=True)
        )
        at = f"at {rate_rps}/s"
        for metric, derived, ours, unit in (
            (f"cores {at}", cores, answer.cores, "cores"),
            (f"100 · PAS {at}", pas, reached, ""),
        ):
            claim = Claim(experiment="optima, audio-sent", metric=metric, unit=unit, derived=derived)
            made.append(equals(claim, [ours], within=0.005))
    return made


def _ranges() -> list[Row]:
    """What 100 · PAS each pipeline spans."""
    made = []
    for name, (stages, printed) in THESIS.items():
        for end, paper in zip((min, max), printed, strict=True):
            ends: Callable[[Sequence[float]], float] = end
            ours = 100 * prod(ends(stage) / 100 for stage in stages)
            claim = Claim(experiment="accuracy", metric=f"{name}: {end.__name__} of 100 · PAS", unit="", paper=paper)
            made.append(equals(claim, [ours], within=0.011))
    return made


def _deadlines() -> list[Row]:
    """Five times the mean latency is the rule; what is printed follows from applying it twice."""
    once_s, twice_s = (derived_slo_ms([1000 * p99 for p99 in SPEECH_P99_S], factor) / 1000 for factor in (5, 25))
    claim = Claim(experiment="deadlines", metric="speech to text, 5 × mean latency", unit="s", paper=8.34)
    twice = Claim(experiment="deadlines", metric="speech to text, 5 × 5 × mean latency", unit="s", paper=8.34)
    return [
        contradicted(claim, [once_s], rival=once_s, within=0.05),
        equals(twice, [twice_s], within=0.05),
    ]


def timings() -> tuple[dict[int, float], dict[str, float]]:
    """Milliseconds of a decision: by number of stages and of variants of each; and the slowest of each pipeline."""
    sizes = {size: max(_timed(*_random(seed, size)) for seed in range(REPEATS)) for size in SIZES}
    pipelines = {
        name: max(_timed(*program(pipeline, rate_rps)) for rate_rps in range(1, 42, 4))
        for name, pipeline in ARTEFACT.items()
    }
    return sizes, pipelines


def timing_rows(sizes: dict[int, float], pipelines: dict[str, float]) -> list[Row]:
    """Against the published figure's two seconds, and the tenth of a second that is asked of pipelines."""
    claim = Claim(experiment="decision time", metric="10 stages of 10 variants", unit="ms", note="published: under 2 s")
    made = [bounded(claim, [sizes[SIZES[-1]]], at_most=2000)]
    for name, taken_ms in pipelines.items():
        claim = Claim(experiment="decision time", metric=f"{name}, slowest of 11 rates", unit="ms")
        made.append(bounded(claim, [taken_ms], at_most=100))
    return made


def _timed(stages: Sequence[Choices], goal: Goal) -> float:
    started_ns = time.perf_counter_ns()
    labels.solve(stages, goal)
    return (time.perf_counter_ns() - started_ns) / 1e6


def _random(seed: int, size: int) -> tuple[list[Choices], Goal]:
    """So many stages, with as many variants each, that the deadline binds."""
    rng = Random(seed)
    rate_rps, least_ms, stages = rng.uniform(5, 40), 0.0, []
    for _ in range(size):
        accuracies, cores = (
            sorted(rng.uniform(0.3, 0.99) for _ in range(size)),
            sorted(rng.choice((1, 1, 2, 4, 8)) for _ in range(size)),
        )
        each_ms = [rng.uniform(20, 80) * place for place in range(1, size + 1)]
        least_ms += each_ms[0]
        candidates = tuple(
            Candidate(accuracy, count, tuple(taken_ms * (0.3 + 0.7 * batch) for batch in BATCHES))
            for accuracy, count, taken_ms in zip(accuracies, cores, each_ms, strict=True)
        )
        stages.append(Choices(rate_rps, BATCHES, candidates))
    return stages, Goal(slo_ms=least_ms * rng.uniform(1.2, 4), alpha=1000.0, beta=1.0)
