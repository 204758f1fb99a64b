"""IPA's evaluation as trials: one pipeline, one workload, one policy, one seed; its outcome depends on nothing else.

What differs from `sloop simulate`'s defaults is what the published runs do: base allocation is given, beliefs are not
corrected, forecasts are whole numbers, clusters have room for everything, what cannot be planned changes nothing (but
RIM, whose published replicas do not carry every peak, gives variants up for the rate that they do carry).
Replicas are as fast as planned with (`load_max`: the published profiles come from a quicker machine), with a deviation
of 5 %; a new one takes 8 s. Cost and accuracy are those of the plan in force, as published.

Source: Razavi, dissertation (TU Darmstadt 2024), chapter P3, evaluation; the public artefact's settings.
"""

from array import array
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from sloop.actions import Decided
from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant
from sloop.app.scenario import ColdStart, ServiceTruth, Truth
from sloop.core import Core
from sloop.core.protocols import Forecast, Policies
from sloop.core.views import Traffic
from sloop.policies.drop.age import Age
from sloop.policies.forecast.lstm import Lstm
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.forecast.oracle import Oracle
from sloop.policies.scale.ipa import Ipa
from sloop.report.metrics import Metrics
from sloop.reproduce.ipa.pipelines import ARTEFACT, HARDWARE, RIM_STEADY_LOW, Pipeline
from sloop.reproduce.twitter import Excerpt, ipa
from sloop.runlog import Record
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.solvers.accuracy import Measure
from sloop.solvers.adapting import StageTerms
from sloop.systems.ipa import IPA
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Node, Plan
from sloop.workload import Spread

SECONDS = 1200
INTERVAL_S = 10
APPLY_S = 8.0
CV = 0.05
NODES = 24
"""Of 96 cores each; the published cluster had six, and room for two configurations at once is what switches need."""
FIRST_S = 20
"""The first plan is for the busiest of so many seconds: the published systems were running before they were asked."""

Policy = Literal["ipa", "fa2-low", "fa2-high", "rim"]
Workload = Literal["steady_low", "bursty", "fluctuating", "steady_high"]
Predictor = Literal["lstm", "reactive", "oracle"]

POLICIES: tuple[Policy, ...] = ("ipa", "fa2-low", "fa2-high", "rim")
WORKLOADS: tuple[Workload, ...] = ("steady_low", "bursty", "fluctuating", "steady_high")
RISING: tuple[Workload, ...] = ("bursty", "fluctuating")
"""Those under which some published runs had other weights."""


class Trial(Struct, frozen=True, kw_only=True):
    """One run. Weights below 0 are the pipeline's own, an empty measure likewise."""

    pipeline: str
    workload: Workload
    policy: Policy = "ipa"
    predictor: Predictor = "lstm"
    measure: Measure | Literal[""] = ""
    alpha: float = -1.0
    beta: float = -1.0
    start_s: float = APPLY_S
    """How long a new replica takes."""
    seed: int = 0
    data: str = ""
    """Folder of public data; empty for the stand-in."""


class Outcome(Struct, frozen=True):
    """What came of a trial: percent, cores, 100 · PAS, milliseconds; cores and PAS of the plan also by interval."""

    violations: float
    cores: float
    pas: float
    cores_used: float
    p99_ms: float
    cores_by_interval: tuple[float, ...]
    pas_by_interval: tuple[float, ...]
    violations_by_interval: tuple[float, ...]
    latencies_ms: tuple[float, ...]
    """At each percent of the answered requests, 1 to 100."""
    requests: int


@dataclass(frozen=True, slots=True)
class Whole:
    """A forecast with a margin, rounded to whole requests per second, at least 1."""

    inner: Forecast
    margin: float

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return float(max(1, round(self.inner.demand_rps(now_ns, ingress) * (1 + self.margin))))


class Watch:
    """A sink: cores and 100 · PAS of the plan in force, for every interval."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._accuracy = {(step.name, model.name): model.accuracy for step in pipeline.steps for model in step.models}
        self._cores = self._pas = 0.0
        self.cores: list[float] = []
        self.pas: list[float] = []

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        if isinstance(record, Decided) and record.plan is not None:
            self._until(now_ns // (INTERVAL_S * NS_PER_S))
            self._cores, self._pas = self._of(record.plan)

    def finish(self) -> None:
        """Account for what is left of the run."""
        self._until(SECONDS // INTERVAL_S)

    def _until(self, interval: int) -> None:
        while len(self.cores) < min(interval, SECONDS // INTERVAL_S):
            self.cores.append(self._cores)
            self.pas.append(self._pas)

    def _of(self, plan: Plan) -> tuple[float, float]:
        groups = [group for target in plan.stages for group in target.groups]
        accuracies = [self._accuracy[group.spec.stage, group.spec.variant] for group in groups]
        return sum(group.count * group.spec.cores for group in groups), 100.0 * prod(accuracies)


@cache
def excerpt_of(workload: str, data: str) -> Excerpt:
    """The requests per second of a workload."""
    return ipa(workload, Path(data) if data else None)


def play(trial: Trial) -> Outcome:
    """Run a trial; those of the first seed under the checkers, which take as long as the run itself."""
    pipeline, excerpt = ARTEFACT[trial.pipeline], excerpt_of(trial.workload, trial.data)
    world = world_of(trial)
    application = world.application
    core = Core(application, world.setup().beliefs, policies_of(trial), application.cluster)
    metrics, watch = Metrics(start_ns=0), Watch(pipeline)
    simulate(world, [metrics, watch], core=core, checkers=trial.seed == 0)
    watch.finish()
    seconds = metrics.seconds()[:SECONDS]
    violated = [second.violations * second.arrivals for second in seconds]
    spans = range(0, SECONDS, INTERVAL_S)
    return Outcome(
        violations=100.0 * metrics.row(system=trial.policy, seed=trial.seed).violations,
        cores=sum(watch.cores) / len(watch.cores),
        pas=sum(watch.pas) / len(watch.pas),
        cores_used=sum(second.cores for second in seconds) / len(seconds),
        p99_ms=metrics.latency_ms([0.99])[0],
        cores_by_interval=tuple(watch.cores),
        pas_by_interval=tuple(watch.pas),
        violations_by_interval=tuple(
            100.0 * sum(violated[at : at + INTERVAL_S]) / max(1, sum(excerpt.counts[at : at + INTERVAL_S]))
            for at in spans
        ),
        latencies_ms=tuple(metrics.latency_ms([percent / 100 for percent in range(1, 101)])),
        requests=metrics.requests,
    )


def world_of(trial: Trial) -> World:
    """The trial as a world of the simulator."""
    pipeline, excerpt = ARTEFACT[trial.pipeline], excerpt_of(trial.workload, trial.data)
    names = [step.name for step in pipeline.steps]
    stages = tuple(
        Stage(
            step.name,
            tuple(Variant(model.name, accuracy=model.accuracy, profile=model.profile) for model in step.models),
            tuple(names[place - 1 : place]) if place else (),
        )
        for place, step in enumerate(pipeline.steps)
    )
    application = Application(
        name=pipeline.name,
        slo_ms=1000 * pipeline.slo_s,
        stages=stages,
        system=SystemChoice("ipa"),
        cluster=tuple(Node(f"n{number}", HARDWARE, 96.0, 192 << 30) for number in range(NODES)),
        estimates=Estimates(correct=False),
    )
    return World(
        seed=trial.seed,
        application=application,
        trace=excerpt.trace(seed=trial.seed, spread=Spread.EARLY),
        duration_ns=s(SECONDS),
        truth=Truth(
            service=ServiceTruth(ratio=1.0, cv=CV),
            profile_error=1.0 / pipeline.load_max,
            cold_start=ColdStart(start_s=trial.start_s, warm=True),
        ),
    )


def policies_of(trial: Trial) -> Policies:
    """IPA's, with the trial's forecaster and scaler, and the published drop limit."""
    pipeline, counts = ARTEFACT[trial.pipeline], excerpt_of(trial.workload, trial.data).counts
    inner: Forecast
    if trial.predictor == "oracle":
        inner = Oracle(tuple(map(float, counts)), horizon_ns=s(20))
    else:
        inner = Lstm("ipa") if trial.predictor == "lstm" else MovingMax(horizon_ns=s(10), window_ns=s(1))
    scale = scale_of(trial, counts)
    drop = Age(limit=pipeline.drop_s / pipeline.slo_s)
    return replace(IPA.policies, drop=drop, forecast=Whole(inner, margin_of(trial)), scale=scale)


def margin_of(trial: Trial) -> float:
    """What is added to the trial's forecasts, as a fraction. The margin of the steady high load shows in the published
    cores of IPA and FA2-high, and in those of the other two it does not."""
    pipeline = ARTEFACT[trial.pipeline]
    high = trial.workload == "steady_high" and trial.policy in ("ipa", "fa2-high")
    return (pipeline.margin_high if high else 0.0) or pipeline.margin


def scale_of(trial: Trial, counts: "array[int]") -> Ipa:
    """IPA, or one of those it is compared with, with the pipeline's published settings."""
    pipeline = ARTEFACT[trial.pipeline]
    own_alpha = pipeline.alpha_bursty if trial.workload in RISING else pipeline.alpha
    own_beta = pipeline.beta
    if trial.policy == "rim":
        own_alpha = pipeline.alpha_rim or own_alpha
        own_beta = (pipeline.beta_rim if trial.workload in RISING else 0.0) or own_beta
    return Ipa(
        alpha=own_alpha if trial.alpha < 0 else trial.alpha,
        beta=own_beta if trial.beta < 0 else trial.beta,
        accuracy=trial.measure or pipeline.measure,
        only="any",
        batch_max=pipeline.batch_max,
        load_max=pipeline.load_max,
        capped=False,
        infeasible="degrade" if trial.policy == "rim" else "hold",
        initial_rps=float(round(max(counts[:FIRST_S]) * (1 + margin_of(trial)))),
        stages=_terms(trial, pipeline),
        interval_ns=s(INTERVAL_S),
        period_ns=s(INTERVAL_S),
    )


def _terms(trial: Trial, pipeline: Pipeline) -> dict[str, StageTerms]:
    rim = RIM_STEADY_LOW.get(pipeline.name) if trial.workload == "steady_low" else None
    found = {}
    for place, step in enumerate(pipeline.steps):
        terms = StageTerms(cores={model.name: model.cores for model in step.models})
        if trial.policy == "rim":
            terms = structs.replace(terms, replicas=rim[place] if rim else step.rim)
        elif trial.policy != "ipa":
            terms = structs.replace(terms, variant=step.high if trial.policy == "fa2-high" else step.models[0].name)
        found[step.name] = terms
    return found


class Results:
    """Outcomes by trial, for every seed alike: what experiments read."""

    def __init__(self, outcomes: dict[Trial, Outcome], seeds: tuple[int, ...], data: str) -> None:
        self._outcomes = outcomes
        self._data = data
        self.seeds = seeds
        played = {trial.workload for trial in outcomes}
        self.workloads = tuple(workload for workload in WORKLOADS if workload in played)

    def of(self, trial: Trial) -> list[Outcome]:
        """One outcome for each seed; the trial's own seed and data do not matter."""
        return [self._outcomes[seeded(trial, seed, self._data)] for seed in self.seeds]

    def mean(self, trial: Trial, name: str) -> float:
        """A figure of the outcomes, over all seeds."""
        values = [getattr(outcome, name) for outcome in self.of(trial)]
        return float(sum(values) / len(values))


def seeded(trial: Trial, seed: int, data: str) -> Trial:
    """The same trial in another world."""
    return structs.replace(trial, seed=seed, data=data)
