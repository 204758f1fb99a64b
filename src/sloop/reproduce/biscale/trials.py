"""Biscale's evaluation as trials: one pipeline, one policy, one seed; its outcome depends on nothing else.

What differs from `sloop simulate`'s defaults is what the published runs do: beliefs are not corrected, batches wait
until they are full, nothing is decided while replicas start, rates are whole numbers, larger replicas stay large until
the rate is steady. True durations are the profile's times `multiplier`, with a deviation of 5 %.
Source: dissertation chapter P4, evaluation; the public artefact; the specification's section 7.2b.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant
from sloop.app.scenario import ColdStart, ServiceTruth, Truth
from sloop.core import Core
from sloop.core.protocols import Batch, Drop, Forecast, Policies, Scale
from sloop.policies.batch.full import Full
from sloop.policies.batch.timeout import Timeout
from sloop.policies.drop.age import Age
from sloop.policies.drop.never import Never
from sloop.policies.drop.predictive import Predictive
from sloop.policies.forecast.last import Last
from sloop.policies.forecast.lstm import Lstm
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.forecast.oracle import Oracle
from sloop.policies.scale.biscale import Biscale
from sloop.policies.scale.vertical import Vertical
from sloop.report.metrics import Metrics
from sloop.reproduce.biscale.pipelines import BURSTS, CORES_MAX, MOTIVATION, PIPELINES, Pipeline
from sloop.reproduce.biscale.rivals import Horizontal
from sloop.reproduce.biscale.watch import Watch
from sloop.reproduce.twitter import Excerpt, biscale
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.systems import build_system
from sloop.systems.biscale import BISCALE
from sloop.units import s
from sloop.vocabulary import Node

SECONDS = 660
INITIAL_BATCH = 4
CORES = 256.0
"""Of the one node: the numbers compared with know no limit of room."""
RESIZE_MS = 100.0
CV = 0.05
NEVER_FULL_S = 30
"""Batches wait for the last one; only what comes at a run's very end would wait for ever."""

Kind = Literal["biscale", "fa2", "vertical", "fa2_kit"]
"""`fa2` is the rival of the publication's own evaluation; `fa2_kit` is sloop's system of that name, as it ships."""
Dropping = Literal["predictive", "age", "age3", "never"]


class Trial(Struct, frozen=True, kw_only=True):
    """One run."""

    pipeline: str
    """One of the published, or a motivating workload's name."""
    kind: Kind = "biscale"
    reference: Literal["max10", "now"] = "max10"
    drop: Dropping = "predictive"
    predictor: Literal["oracle", "last10", "lstm"] = "oracle"
    seed: int = 0
    cold_s: float = 0.0
    """0: the pipeline's own."""
    multiplier: float = 1.0
    """Reality over profile."""
    seconds: int = SECONDS
    shipped: bool = False
    """As sloop's own system does it: replicas shrink in surges, too, decisions do not wait for replicas to start, and
    batches not without limit."""
    data: str = ""
    """Folder of public data; empty for the stand-in."""


class Outcome(Struct, frozen=True):
    """What came of a trial: percent, cores in service, and both for every second."""

    violations: float
    cores: float
    by_second: tuple[float, ...]
    cores_by_second: tuple[float, ...]
    count_by_second: tuple[float, ...]
    single_by_second: tuple[float, ...]
    """Part of the second in which every replica had one core."""
    worst_by_second: tuple[float, ...]


def pipeline_of(trial: Trial) -> Pipeline:
    """What is served."""
    return PIPELINES.get(trial.pipeline, MOTIVATION)


@cache
def excerpt_of(pipeline: str, data: str) -> Excerpt:
    """The requests per second of a pipeline's slice, or of a motivating workload."""
    if pipeline in BURSTS:
        counts = array("q", (rate for seconds, rate in BURSTS[pipeline] for _ in range(seconds)))
        return Excerpt(pipeline, counts, "assumed: as the motivation describes it")
    return biscale(pipeline, Path(data) if data else None)


def play(trial: Trial) -> Outcome:
    """Run a trial under the checkers."""
    world = world_of(trial)
    application = world.application
    core = Core(application, world.setup().beliefs, policies_of(trial), application.cluster)
    metrics, watch = Metrics(start_ns=0), Watch(trial.seconds)
    simulate(world, [metrics, watch], core=core, checkers=trial.seed == 0)  # a quarter of the time
    watch.finish()
    seconds = metrics.seconds()[: trial.seconds]
    row = metrics.row(system=trial.kind, seed=trial.seed)
    return Outcome(
        violations=100.0 * row.violations,
        cores=sum(watch.cores) / len(watch.cores),
        by_second=tuple(100.0 * second.violations for second in seconds),
        cores_by_second=tuple(watch.cores),
        count_by_second=tuple(watch.count),
        single_by_second=tuple(watch.single),
        worst_by_second=tuple(second.worst_ms for second in seconds),
    )


def world_of(trial: Trial) -> World:
    """The trial as a world of the simulator."""
    pipeline = pipeline_of(trial)
    names = [name for name, _ in pipeline.models]
    profiles = pipeline.profiles
    stages = tuple(
        Stage(name, (Variant(name, profile=profiles[name]),), tuple(names[place - 1 : place]) if place else ())
        for place, name in enumerate(names)
    )
    application = Application(
        name=pipeline.name,
        slo_ms=pipeline.slo_ms,
        stages=stages,
        system=SystemChoice("biscale"),
        cluster=(Node("n0", "Intel Core i9-9940X", CORES, 1 << 40),),
        estimates=Estimates(correct=False),
    )
    truth = Truth(
        service=ServiceTruth(ratio=1.0, cv=CV),
        profile_error=trial.multiplier,
        resize_ms=RESIZE_MS,
        cold_start=ColdStart(start_s=trial.cold_s or pipeline.cold_s, warm=True),
    )
    excerpt = excerpt_of(trial.pipeline, trial.data)
    short = replace(excerpt, counts=excerpt.counts[: trial.seconds])
    return World(
        seed=trial.seed,
        application=application,
        trace=short.trace(seed=trial.seed),
        duration_ns=s(trial.seconds),
        truth=truth,
    )


def policies_of(trial: Trial) -> Policies:
    """All published kinds share queues, batches and drop rule."""
    if trial.kind == "fa2_kit":
        return build_system("fa2", {"batch_max": pipeline_of(trial).batch_max}).policies
    drops: dict[Dropping, Drop] = {
        "predictive": Predictive(batch="full"),
        "age": Age(),
        "age3": Age(limit=3.0),
        "never": Never(),
    }
    forecast: Forecast = Last(window_ns=s(2))
    if trial.kind == "biscale":
        forecast = MovingMax()
        if trial.predictor == "oracle":
            counts = excerpt_of(trial.pipeline, trial.data).counts
            forecast = Oracle(tuple(map(float, counts)), horizon_ns=s(10))
        elif trial.predictor == "lstm":
            forecast = Lstm("biscale")
    batch: Batch = Full(patience=1.0) if trial.shipped else Timeout(wait_ns=s(NEVER_FULL_S))
    return replace(BISCALE.policies, batch=batch, drop=drops[trial.drop], forecast=forecast, scale=scale_of(trial))


def scale_of(trial: Trial) -> Scale:
    """The policy in question, with the published parameters of the pipeline."""
    pipeline = pipeline_of(trial)
    if trial.kind == "fa2":
        return Horizontal(pipeline.batch_max, pipeline.settle, INITIAL_BATCH)
    if trial.kind == "vertical":
        return Vertical(cores_max=CORES_MAX, batch_max=pipeline.batch_max, initial_batch=INITIAL_BATCH, whole=True)
    return Biscale(
        cores_max=CORES_MAX,
        batch_max=pipeline.batch_max,
        settle=pipeline.settle,
        reference=trial.reference,
        shrink=trial.shipped,
        blocking=not trial.shipped,
        whole=not trial.shipped,
        initial_batch=1 if trial.shipped else INITIAL_BATCH,
    )


class Results:
    """Outcomes by trial and seed: what experiments read."""

    def __init__(self, outcomes: Mapping[Trial, Outcome]) -> None:
        self._outcomes = outcomes

    def of(self, trial: Trial, seeds: int = 0) -> list[Outcome]:
        """One outcome for each seed played, the first so many if told; the trial's own seed and data do not matter."""
        wanted = structs.replace(trial, seed=0, data="")
        found = {
            played.seed: outcome
            for played, outcome in self._outcomes.items()
            if structs.replace(played, seed=0, data="") == wanted
        }
        return [found[seed] for seed in sorted(found)][: seeds or None]

    def violations(self, trial: Trial, seeds: int = 0) -> list[float]:
        """Percent, for each seed."""
        return [outcome.violations for outcome in self.of(trial, seeds)]

    def cores(self, trial: Trial, seeds: int = 0) -> list[float]:
        """In service, on average over the run, for each seed."""
        return [outcome.cores for outcome in self.of(trial, seeds)]


Wanted = Sequence[tuple[Trial, int]]
"""Trials, and with how many seeds each."""


def seeded(wanted: Wanted, data: str) -> list[Trial]:
    """Every trial once for each of its seeds, those asked for twice once."""
    found = {structs.replace(trial, seed=seed, data=data): None for trial, seeds in wanted for seed in range(seeds)}
    return list(found)
