"""Biscale's runs: a result depends only on the pipeline, the policy and the seed.

The runs differ from `sloop simulate`'s defaults where the published runs do: estimates are not corrected, batches wait
until they are full, plans take effect at once, no decision is taken while replicas start, rates are whole numbers, and
enlarged replicas stay large until the rate is steady. True durations are the profile's × `multiplier`, with a standard
deviation of 5 %.

Source: dissertation chapter P4, evaluation; coefficients, batch limits and stability counts as in the public
artefact; the specification's section 7.2b.
"""

import math
from array import array
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from msgspec import structs

from sloop.api import NS_PER_S, Node, Plan, ReplicaId, s
from sloop.api.experiments import (
    Application,
    ColdStartTruth,
    Estimates,
    Record,
    RunSummary,
    ServiceTruth,
    Stage,
    StartWorker,
    StopWorker,
    SystemChoice,
    Truth,
    Variant,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
    World,
    simulate,
)
from sloop.api.policies import (
    Age,
    Batch,
    ClusterView,
    Drop,
    Forecast,
    Full,
    Last,
    MovingMax,
    Never,
    OracleForecast,
    Policies,
    PredictiveDrop,
    Scale,
    SizeLimits,
    Timeout,
    Vertical,
    size_model,
    stage_replicas,
)
from sloop.api.profiles import Amdahl, Profile
from sloop.api.solvers import Throughput
from sloop.api.systems import SYSTEMS, build_system
from sloop_systems.biscale.policy import Biscale
from sloop_systems.biscale.solver import horizontal_within_cores
from sloop_systems.comparison.harness import RunResult, Trial
from sloop_systems.comparison.twitter import Excerpt, biscale

CORES_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class BiscalePipeline:
    """A chain of models and its settings. `cold_s` is the start time of a new replica in seconds."""

    name: str
    models: tuple[tuple[str, Amdahl], ...]
    slo_ms: int
    batch_max: int
    settle: int
    """K: number of consecutive equal decisions before replicas are made small again."""
    cold_s: float

    @property
    def profiles(self) -> dict[str, Profile]:
        """The models' profiles, by stage."""
        return {
            name: Profile(
                latency_ms=form,
                max_batch=self.batch_max,
                max_cores=CORES_MAX,
                load_s=self.cold_s,
                hardware="Intel Core i9-9940X",
                origin="fitted",
                source="Biscale, public artefact: least-squares fit to P99 latencies of 512 requests per setting",
                software="PyTorch on MicroK8s",
                date="2024-07-23",
            )
            for name, form in self.models
        }


OD: Final = Amdahl(
    gamma=148.81709977526535, delta=37.49369666805188, epsilon=5.432908755854746, eta=-15.475937098807677
)
"""YOLOv5n, object detection."""
OC: Final = Amdahl(gamma=34.69333807478468, delta=2.058115261491216, epsilon=19.478793326347812, eta=14.259440042600422)
"""ResNet18, object classification."""
AT: Final = Amdahl(gamma=59.135401329025065, delta=38.20569791416921, epsilon=160.62814762316182, eta=62.94940507943755)
"""FAIRSEQ S2T, audio to text."""
SA: Final = Amdahl(gamma=52.09085666977715, delta=5.927263430261823, epsilon=9.673022430669654, eta=2.9608878972217028)
"""DistilBERT, sentiment analysis."""
LI: Final = Amdahl(gamma=21.36871436832019, delta=1.5569641306191406, epsilon=53.785185960044615, eta=27.77545863159201)
"""XLM-RoBERTa, language identification."""
NT: Final = Amdahl(gamma=304.596066487657, delta=74.08666337647502, epsilon=-13.468936326215587, eta=11.630634430011373)
"""Elan-mt, neural translation."""
TS: Final = Amdahl(
    gamma=263.93594914585606, delta=83.63772165096029, epsilon=-1.006786216767125, eta=23.573866180316415
)
"""T5-small, text summarisation."""

VIDEO: Final = BiscalePipeline("video", (("detect", OD), ("classify", OC)), 780, 8, 5, 5.5)
AUDIO: Final = BiscalePipeline("audio", (("transcribe", AT), ("sentiment", SA)), 1350, 8, 10, 7.0)
NLP: Final = BiscalePipeline("nlp", (("identify", LI), ("translate", NT), ("summarise", TS)), 2550, 4, 10, 12.0)
PIPELINES: Final = {pipeline.name: pipeline for pipeline in (VIDEO, AUDIO, NLP)}

MOTIVATION: Final = BiscalePipeline("motivation", (("serve", Amdahl(35.0, 0.0, 0.0, 3.4)),), 500, 1, 5, 5.5)
"""Calibrated to the motivation: 26 requests/s on one core, 126 on eight cores, 130 on five replicas of one core."""
BURSTS: Final = {"burst": ((30, 20), (5, 120), (25, 20)), "plateau": ((10, 20), (40, 120), (10, 20))}
"""Seconds and rates of Fig. P4.1 and P4.2."""

SECONDS: Final = 660
INITIAL_BATCH: Final = 4
CORES: Final = 256.0
"""Cores of the single node: enough for the published runs, which have no limit."""
RESIZE_MS: Final = 100.0
CV: Final = 0.05
NEVER_FULL_S: Final = 30
"""The longest wait of a batch: it waits until it is full; the limit is for the last requests of a run."""

Kind = Literal["biscale", "fa2", "vertical", "fa2_kit"]
"""`fa2` is the baseline in the publication's evaluation; `fa2_kit` is sloop's system `fa2` with its defaults."""
Dropping = Literal["predictive", "age", "age3", "never"]


class BiscaleTrial(Trial, frozen=True, kw_only=True):
    """One run; `data` is the folder of public data."""

    pipeline: str
    """Name of a published pipeline, or of a workload of the motivation."""
    kind: Kind = "biscale"
    reference: Literal["max10", "now"] = "max10"
    drop: Dropping = "predictive"
    predictor: Literal["oracle", "last10", "lstm"] = "oracle"
    cold_s: float = 0.0
    """Start time of a replica in seconds; 0: the pipeline's `cold_s`."""
    multiplier: float = 1.0
    """Ratio of true to profiled durations."""
    seconds: int = SECONDS
    shipped: bool = False
    """Use the defaults of sloop's `biscale`: replicas shrink in surges as well, decisions do not wait for replicas to
    start, and batches wait only as long as deadlines allow."""

    def label(self) -> str:
        return f"{self.kind} on {self.pipeline}"

    def play(self) -> "BiscaleResult":
        """Simulate it; only the first seed runs under the checkers, because they take a quarter of the time."""
        world = world_of(self)
        summary, in_service = RunSummary(world.application.graph, start_ns=0), CoresInService(self.seconds)
        simulate(world, [summary, in_service], check_first=None if self.seed == 0 else 0)
        in_service.finish()
        seconds = summary.seconds()[: self.seconds]
        return BiscaleResult(
            violations=100.0 * summary.row(system=self.kind, seed=self.seed).violations,
            cores=fmean(in_service.cores),
            violations_by_second=tuple(100.0 * second.violations for second in seconds),
            cores_by_second=tuple(in_service.cores),
            single_by_second=tuple(in_service.single),
            worst_by_second=tuple(second.worst_ms for second in seconds),
        )


class BiscaleResult(RunResult, frozen=True, kw_only=True):
    """The result of one run; `cores` counts replicas in service."""

    single_by_second: tuple[float, ...]
    """Per second, the fraction of time in which every replica had one core."""
    worst_by_second: tuple[float, ...]
    """Per second, the longest latency in ms of the requests that arrived in it."""


def pipeline_of(trial: BiscaleTrial) -> BiscalePipeline:
    """The trial's pipeline."""
    return PIPELINES.get(trial.pipeline, MOTIVATION)


@cache
def excerpt_of(pipeline: str, data: str) -> Excerpt:
    """The requests per second of a pipeline's excerpt, or of a workload of the motivation."""
    if pipeline in BURSTS:
        counts = array("q", (rate for seconds, rate in BURSTS[pipeline] for _ in range(seconds)))
        return Excerpt(pipeline, counts, "assumed: from the description of the motivation")
    return biscale(pipeline, Path(data) if data else None)


def world_of(trial: BiscaleTrial) -> World:
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
        cold_start=ColdStartTruth(start_s=trial.cold_s or pipeline.cold_s, warm=True),
        plan_ms=0.0,
    )
    excerpt = excerpt_of(trial.pipeline, trial.data)
    played = replace(excerpt, counts=excerpt.counts[: trial.seconds])
    return World.of(
        application,
        played.trace(seed=trial.seed),
        seed=trial.seed,
        duration_ns=s(trial.seconds),
        truth=truth,
        policies=policies_of(trial),
    )


def policies_of(trial: BiscaleTrial) -> Policies:
    """All published kinds share queues, batches and drop rule."""
    if trial.kind == "fa2_kit":
        return build_system("fa2", {"batch_max": pipeline_of(trial).batch_max}).policies
    drops: dict[Dropping, Drop] = {
        "predictive": PredictiveDrop(batch="full", strict=True),
        "age": Age(),
        "age3": Age(limit=3.0),
        "never": Never(),
    }
    forecast: Forecast = Last(window_ns=s(2))
    if trial.kind == "biscale":
        forecast = MovingMax()
        if trial.predictor == "oracle":
            counts = excerpt_of(trial.pipeline, trial.data).counts
            forecast = OracleForecast(tuple(map(float, counts)), horizon_ns=s(10))
        elif trial.predictor == "lstm":
            network = {"name": "lstm", "weights": "biscale"}
            forecast = build_system("biscale", {"forecast": network}).policies.forecast
    batch: Batch = Full(patience=1.0) if trial.shipped else Timeout(wait_ns=s(NEVER_FULL_S))
    drop, scale = drops[trial.drop], scale_of(trial)
    return replace(SYSTEMS["biscale"].policies, batch=batch, drop=drop, forecast=forecast, scale=scale)


def scale_of(trial: BiscaleTrial) -> Scale:
    """The trial's scaling policy, with the published parameters of the pipeline."""
    pipeline = pipeline_of(trial)
    if trial.kind == "fa2":
        return HorizontalRival(pipeline.batch_max, pipeline.settle, INITIAL_BATCH)
    if trial.kind == "vertical":
        return Vertical(
            replicas_max=1,
            cores_max=CORES_MAX,
            batch_max=pipeline.batch_max,
            throughput="with_queue",
            whole=True,
            margin=1.0,
            initial_batch=INITIAL_BATCH,
        )
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


class CoresInService:
    """A sink: `cores[t]` is the mean over second t, `single[t]` the fraction of it in which every replica had one core.

    As in the publication, a replica's cores in effect count from ready to the order to stop.
    """

    def __init__(self, seconds: int) -> None:
        self.cores = [0.0] * seconds
        self.single = [0.0] * seconds
        self._starting: dict[ReplicaId, float] = {}
        self._ready: dict[ReplicaId, float] = {}
        self._seen_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if isinstance(record, StartWorker):
            self._starting[record.worker] = record.spec.cores
        elif isinstance(record, WorkerReady):
            self._charge(now_ns)
            cores = self._starting.pop(record.worker, None)
            if cores is not None:
                self._ready[record.worker] = cores
        elif isinstance(record, WorkerResized):
            self._charge(now_ns)
            for known in (self._starting, self._ready):
                if record.worker in known:
                    known[record.worker] = record.cores
        elif isinstance(record, StopWorker | WorkerStopped | WorkerLost):
            self._charge(now_ns)
            self._starting.pop(record.worker, None)
            self._ready.pop(record.worker, None)

    def finish(self) -> None:
        """Add the time from the last record to the end of the run."""
        self._charge(len(self.cores) * NS_PER_S)

    def _charge(self, now_ns: int) -> None:
        cores = sum(self._ready.values())
        single = all(own == 1.0 for own in self._ready.values())
        while self._seen_ns < min(now_ns, len(self.cores) * NS_PER_S):
            second = self._seen_ns // NS_PER_S
            until_ns = min(now_ns, (second + 1) * NS_PER_S)
            part = (until_ns - self._seen_ns) / NS_PER_S
            self.cores[second] += part * cores
            self.single[second] += part * single
            self._seen_ns = until_ns


@dataclass(frozen=True, slots=True)
class HorizontalMemory:
    """The number of consecutive decisions without growth, and the plan for which replicas are being started."""

    steady: int = 0
    goal: Plan | None = None


@dataclass(frozen=True, slots=True)
class HorizontalRival(Scale):
    """The horizontal baseline of the publication's evaluation: FA2's program with replicas of one core, solved as often
    as Biscale's.

    It follows the public artefact: stages grow at once, and shrink after `settle` equal decisions; no decision is taken
    while replicas start, and a batch size changes when its replicas are ready. It starts with one replica and batches
    of `initial_batch`.
    """

    batch_max: int
    settle: int
    initial_batch: int
    throughput: Throughput = "with_queue"
    blocking: bool = True
    period_ns: int = s(1)

    def plan(
        self, now_ns: int, view: ClusterView, memory: HorizontalMemory | None
    ) -> tuple[Plan | None, HorizontalMemory]:
        """A plan that grows at once and shrinks after `settle` equal decisions."""
        memory = memory or HorizontalMemory()
        model = size_model(view, SizeLimits(1.0, 8, self.batch_max, self.throughput, 1.0, ""))
        if view.plan is None:
            plans = model.plans(horizontal_within_cores(model.problem, 0))
            stages = tuple(structs.replace(one, batch_max=self.initial_batch) for one in plans)
            return Plan(stages, "first plan"), memory
        have = [stage_replicas(stage, 1.0) for stage in view.stages]
        starting = any(replicas.starting for replicas in have)
        if memory.goal is not None and not starting:
            return memory.goal, HorizontalMemory(memory.steady)
        if starting and self.blocking:
            return None, memory
        choices = horizontal_within_cores(model.problem, max(1, math.floor(view.forecast_rps)))
        final = model.plans(choices)
        counts = [replicas.count + len(replicas.starting) for replicas in have]
        growing = [choice.replicas > count for choice, count in zip(choices, counts, strict=True)]
        if any(growing):
            in_force = {target.stage: target for target in view.plan.stages}
            finals = tuple(plan if grows else in_force[plan.stage] for plan, grows in zip(final, growing, strict=True))
            goal = Plan(finals, "replicas have started")
            grown = [
                model.with_groups(place, [(choice.replicas, 1)], in_force[plan.stage])
                if grows
                else in_force[plan.stage]
                for place, (choice, plan, grows) in enumerate(zip(choices, final, growing, strict=True))
            ]
            return Plan(tuple(grown), f"{view.forecast_rps:.4g} requests/s need more"), HorizontalMemory(0, goal)
        if memory.steady < self.settle:
            return None, replace(memory, steady=memory.steady + 1)
        return Plan(final, f"{view.forecast_rps:.4g} requests/s"), replace(memory, steady=0)
