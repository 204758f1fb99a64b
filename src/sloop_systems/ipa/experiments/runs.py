"""IPA's evaluation, simulated: five pipelines under excerpts of the Twitter trace, against FA2-low, FA2-high and RIM.

Experiments: E1 to E4, cores and accuracy over time (Fig. P3.8 to P3.12), with the claims A to D that the specification
(7.6) derives from them; E6 preferences, E7 latencies, E8 forecasters, E9 accuracy as ranks (Fig. P3.14 to P3.18).
The figures print no numbers, so ours are compared with readings. A steady run is represented by its median interval,
the bursty one by the medians of its calm and of its burst.

The runs differ from `sloop simulate`'s defaults where the published runs do: the base allocation is given, estimates
are not corrected, plans take effect at once, forecasts are whole numbers, the cluster is never full, and without a
feasible plan nothing changes (except for RIM, whose published replicas cannot serve every peak: it switches to lighter
variants). Replicas are as fast as planned, with a standard deviation of 5 %, and start in 8 s, the published time to
apply a plan. Deadlines of nine seconds and more are then hardly ever missed, so that forecasters are also compared with
starts of 24 s. Cost and accuracy refer to the plan in force, as published.

Source: Razavi, dissertation (TU Darmstadt 2024), chapter P3, evaluation; the public artefact's settings.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import fmean, median
from typing import Final, Literal

from msgspec import structs

from sloop.api import NS_PER_S, Node, Plan, s
from sloop.api.experiments import (
    Application,
    ColdStartTruth,
    Decided,
    Estimates,
    Record,
    RunSummary,
    ServiceTruth,
    Spread,
    Stage,
    SystemChoice,
    Truth,
    Variant,
    World,
    simulate,
)
from sloop.api.policies import Age, Forecast, MovingMax, OracleForecast, Policies, Traffic
from sloop.api.systems import SYSTEMS
from sloop_systems.comparison.harness import Results, RunResult, Trial, Wanted
from sloop_systems.comparison.rows import Claim, ResultLimits, Row, bounded, compare, contradicted, directed, minus
from sloop_systems.comparison.twitter import Excerpt, ipa
from sloop_systems.ipa.experiments.published import (
    BURSTY_BURST,
    BURSTY_CALM,
    HARDWARE,
    PIPELINES,
    POLICIES,
    PREFERRED,
    RIM_STEADY_LOW,
    STEADY_HIGH,
    STEADY_LOW,
    VIOLATIONS,
    WEIGHTS,
    IpaPipeline,
    Policy,
    Reading,
)
from sloop_systems.ipa.lstm import Lstm
from sloop_systems.ipa.policy import Ipa, IpaStageTerms
from sloop_systems.ipa.solver import Measure

SECONDS: Final = 1200
INTERVAL_S: Final = 10
INTERVALS: Final = SECONDS // INTERVAL_S
APPLY_S: Final = 8.0
SLOW_S: Final = 24.0
CV: Final = 0.05
NODES: Final = 24
"""Nodes of 96 cores each; the published cluster had six, but a switch needs capacity for the old and the new plan."""
FIRST_S: Final = 20
"""The first plan is for the busiest of these first seconds: the published systems were running before the load
began."""

Workload = Literal["steady_low", "bursty", "fluctuating", "steady_high"]
Predictor = Literal["lstm", "reactive", "oracle"]

WORKLOADS: tuple[Workload, ...] = ("steady_low", "bursty", "fluctuating", "steady_high")
RISING: tuple[Workload, ...] = ("bursty", "fluctuating")
"""Workloads under which some published runs had other weights."""
PREDICTORS: Final[tuple[Predictor, ...]] = ("lstm", "reactive", "oracle")


class IpaTrial(Trial, frozen=True, kw_only=True):
    """One run; `data` is the folder of public data. Negative weights and an empty measure mean the pipeline's
    values."""

    pipeline: str
    workload: Workload
    policy: Policy = "ipa"
    predictor: Predictor = "lstm"
    measure: Measure | Literal[""] = ""
    alpha: float = -1.0
    beta: float = -1.0
    start_s: float = APPLY_S
    """Start time of a new replica in seconds."""

    def label(self) -> str:
        return f"{self.pipeline}, {self.policy}"

    def play(self) -> "IpaResult":
        """Simulate it; only the first seed runs under the checkers, because they take as long as the run itself."""
        counts = excerpt_of(self.workload, self.data).counts
        world = world_of(self)
        summary, plans = RunSummary(world.application.graph, start_ns=0), PlannedAccuracy(PIPELINES[self.pipeline])
        simulate(world, [summary, plans], check_first=None if self.seed == 0 else 0)
        plans.finish()
        violated = [second.violations * second.arrivals for second in summary.seconds()[:SECONDS]]
        spans = [slice(at, at + INTERVAL_S) for at in range(0, SECONDS, INTERVAL_S)]
        return IpaResult(
            violations=100.0 * summary.row(system=self.policy, seed=self.seed).violations,
            cores=fmean(plans.cores),
            pas=fmean(plans.pas),
            cores_by_interval=tuple(plans.cores),
            pas_by_interval=tuple(plans.pas),
            violations_by_interval=tuple(100.0 * sum(violated[span]) / max(1, sum(counts[span])) for span in spans),
            latencies_ms=tuple(summary.latency_ms([percent / 100 for percent in range(1, 101)])),
        )


class IpaResult(RunResult, frozen=True, kw_only=True):
    """100 · PAS is the accuracy of the whole pipeline in percent. Cores and PAS are those of the plan in force."""

    pas: float
    cores_by_interval: tuple[float, ...]
    pas_by_interval: tuple[float, ...]
    violations_by_interval: tuple[float, ...]
    latencies_ms: tuple[float, ...]
    """Latency in ms at each percentile of the answered requests, 1 to 100."""


@dataclass(frozen=True, slots=True)
class WholeForecast(Forecast):
    """A forecast with a margin, rounded to whole requests per second, at least 1."""

    inner: Forecast
    margin: float

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return float(max(1, round(self.inner.demand_rps(now_ns, ingress) * (1 + self.margin))))


class PlannedAccuracy:
    """A sink: records cores and 100 · PAS of the plan in force for every interval."""

    def __init__(self, pipeline: IpaPipeline) -> None:
        self._accuracy = {(stage.name, m.name): m.accuracy for stage in pipeline.stages for m in stage.models}
        self._now = (0.0, 0.0)
        self.cores: list[float] = []
        self.pas: list[float] = []

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if isinstance(record, Decided) and record.plan is not None:
            self._fill(now_ns // (INTERVAL_S * NS_PER_S))
            self._now = self._of(record.plan)

    def finish(self) -> None:
        """Add the time from the last record to the end of the run."""
        self._fill(INTERVALS)

    def _fill(self, interval: int) -> None:
        while len(self.cores) < min(interval, INTERVALS):
            self.cores.append(self._now[0])
            self.pas.append(self._now[1])

    def _of(self, plan: Plan) -> tuple[float, float]:
        groups = [group for target in plan.stages for group in target.groups]
        accuracies = [self._accuracy[group.spec.stage, group.spec.variant] for group in groups]
        return sum(group.count * group.spec.cores for group in groups), 100.0 * prod(accuracies)


@cache
def excerpt_of(workload: str, data: str) -> Excerpt:
    """The requests per second of a workload."""
    return ipa(workload, Path(data) if data else None)


def world_of(trial: IpaTrial) -> World:
    """The trial as a world of the simulator."""
    pipeline, excerpt = PIPELINES[trial.pipeline], excerpt_of(trial.workload, trial.data)
    names = [stage.name for stage in pipeline.stages]
    stages = tuple(
        Stage(
            stage.name,
            tuple(Variant(model.name, accuracy=model.accuracy, profile=model.profile) for model in stage.models),
            tuple(names[place - 1 : place]) if place else (),
        )
        for place, stage in enumerate(pipeline.stages)
    )
    application = Application(
        name=pipeline.name,
        slo_ms=1000 * pipeline.slo_s,
        stages=stages,
        system=SystemChoice("ipa"),
        cluster=tuple(Node(f"n{number}", HARDWARE, 96.0, 192 << 30) for number in range(NODES)),
        estimates=Estimates(correct=False),
    )
    return World.of(
        application,
        excerpt.trace(seed=trial.seed, spread=Spread.EARLY),
        seed=trial.seed,
        duration_ns=s(SECONDS),
        truth=Truth(
            service=ServiceTruth(ratio=1.0, cv=CV),
            profile_error=1.0 / pipeline.load_max,
            cold_start=ColdStartTruth(start_s=trial.start_s, warm=True),
            plan_ms=0.0,
        ),
        policies=policies_of(trial),
    )


def policies_of(trial: IpaTrial) -> Policies:
    """IPA's policies with the trial's forecaster and scaling policy, and the published drop limit."""
    pipeline, counts = PIPELINES[trial.pipeline], excerpt_of(trial.workload, trial.data).counts
    inner: Forecast
    if trial.predictor == "oracle":
        inner = OracleForecast(tuple(map(float, counts)), horizon_ns=s(20))
    else:
        inner = Lstm("ipa") if trial.predictor == "lstm" else MovingMax(horizon_ns=s(10), window_ns=s(1))
    drop, forecast = Age(limit=pipeline.drop_s / pipeline.slo_s), WholeForecast(inner, margin_of(trial))
    return replace(SYSTEMS["ipa"].policies, drop=drop, forecast=forecast, scale=scale_of(trial, counts))


MARGIN_SHOWN: Final = ("ipa", "fa2-high")
MARGIN: Final = "the margin of forecasts, by these cores"
"""The published cores of these two policies show the margin of the steady high load."""


def margin_of(trial: IpaTrial) -> float:
    """The fraction added to the trial's forecasts. The published cores of IPA and FA2-high show the margin of the
    steady high load; those of the other two do not."""
    pipeline = PIPELINES[trial.pipeline]
    high = trial.workload == "steady_high" and trial.policy in MARGIN_SHOWN
    return (pipeline.margin_high if high else 0.0) or pipeline.margin


def scale_of(trial: IpaTrial, counts: "array[int]") -> Ipa:
    """IPA or one of its competitors, with the pipeline's published settings."""
    pipeline = PIPELINES[trial.pipeline]
    alpha = pipeline.alpha_bursty if trial.workload in RISING else pipeline.alpha
    beta = pipeline.beta
    if trial.policy == "rim":
        alpha = pipeline.alpha_rim or alpha
        beta = (pipeline.beta_rim if trial.workload in RISING else 0.0) or beta
    return Ipa(
        alpha=alpha if trial.alpha < 0 else trial.alpha,
        beta=beta if trial.beta < 0 else trial.beta,
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


def _terms(trial: IpaTrial, pipeline: IpaPipeline) -> dict[str, IpaStageTerms]:
    rim = RIM_STEADY_LOW.get(pipeline.name) if trial.workload == "steady_low" else None
    found = {}
    for place, stage in enumerate(pipeline.stages):
        terms = IpaStageTerms(cores={model.name: model.cores for model in stage.models})
        if trial.policy == "rim":
            terms = structs.replace(terms, replicas=rim[place] if rim else stage.rim)
        elif trial.policy != "ipa":
            terms = structs.replace(terms, variant=stage.high if trial.policy == "fa2-high" else stage.models[0].name)
        found[stage.name] = terms
    return found


# Experiments.

PREFERENCES: Final = ("accuracy", "balance", "resources")
RANKED: Final = ("video", "sum-qa")


def preferring(pipeline: str, place: int) -> IpaTrial:
    """IPA under the bursty excerpt with the weights of a preference, by its place in `PREFERENCES`."""
    alpha, beta = WEIGHTS[pipeline][place]
    return IpaTrial(pipeline=pipeline, workload="bursty", alpha=alpha, beta=beta)


def foreseeing(pipeline: str, predictor: Predictor, start_s: float = APPLY_S) -> IpaTrial:
    """IPA under the bursty excerpt with this forecaster."""
    return IpaTrial(pipeline=pipeline, workload="bursty", predictor=predictor, start_s=start_s)


def ranked(pipeline: str, workload: Workload) -> IpaTrial:
    """IPA with PAS', the sum of ranks, as objective; FA2-low and FA2-high have fixed variants and do not change."""
    return IpaTrial(pipeline=pipeline, workload=workload, measure="pas_rank")


class IpaEvaluation:
    """The trials, and the rows computed from their results."""

    def __init__(self, *, quick: bool) -> None:
        self.pipelines = ("video", "audio-sent") if quick else tuple(PIPELINES)
        self.workloads: tuple[Workload, ...] = ("steady_low", "bursty", "steady_high") if quick else WORKLOADS
        self.starts_s = (APPLY_S,) if quick else (APPLY_S, SLOW_S)
        self.ranked = () if quick else RANKED
        self.seeds = 1 if quick else 3

    def wanted(self) -> Wanted[IpaTrial]:
        """All trials that `rows` reads."""
        names = self.pipelines
        trials = [IpaTrial(pipeline=n, workload=w, policy=p) for n in names for w in self.workloads for p in POLICIES]
        trials += [preferring(name, place) for name in names for place in range(len(PREFERENCES))]
        trials += [foreseeing(name, predictor, s) for s in self.starts_s for name in names for predictor in PREDICTORS]
        trials += [ranked(name, workload) for name in self.ranked for workload in WORKLOADS]
        return [(trial, self.seeds) for trial in trials]

    def rows(self, results: Results[IpaResult]) -> list[Row]:
        """Rows for the published figures, the claims A to D, then E6 to E9."""
        rows = [row for name in self.pipelines for row in _readings(results, name)]
        for name in self.pipelines:
            if name == "video":
                rows += _video(results, self.workloads)
            if name == "audio-sent":
                rows += _sentiment(results, self.workloads)
            if name in {"sum-qa", "nlp"}:
                rows += _span(results, name, 500.0 if name == "nlp" else None)
        rows += [row for name in self.pipelines for row in _ordering(results, name, self.workloads)]
        rows += [row for name in self.pipelines for row in _preferences(results, name)]
        rows += [row for name in self.pipelines for row in _latencies(results, name)]
        rows += [
            row for start_s in self.starts_s for name in self.pipelines for row in _predictors(results, name, start_s)
        ]
        return rows + [row for name in self.ranked for row in _ranked(results, name)]


CALM: Final = slice(5, 38)
BURST: Final = slice(44, 67)
AFTER: Final = slice(92, 120)
"""Intervals of the bursty excerpt before, during and after the burst."""
PAS_WITHIN: Final = 0.3
"""Tolerance in points of 100 · PAS: combinations of variants differ by more, so that a plateau identifies one."""
EQUAL: Final = 0.01
"""Percentage points that do not count as a difference."""
NOISE: Final = 0.05
"""Percent of violations that do not count as a difference."""
RIM_SUM_QA: Final = "by the source's tables, 12 and 8 replicas on 32 cores reach 100 · PAS 27.7; 30.2 takes 104 cores"
"""Why the published figure of RIM on sum-qa is inconsistent."""


def _trial(pipeline: str, workload: Workload, policy: Policy) -> IpaTrial:
    return IpaTrial(pipeline=pipeline, workload=workload, policy=policy)


def _readings(results: Results[IpaResult], name: str) -> list[Row]:
    """E1 to E4: cores and accuracy compared with readings of the figures."""
    rows = []
    figures: tuple[tuple[Workload, str, slice, Mapping[str, Mapping[Policy, Reading]]], ...] = (
        ("steady_low", "steady_low", slice(0, None), STEADY_LOW),
        ("steady_high", "steady_high", slice(0, None), STEADY_HIGH),
        ("bursty", "bursty, calm", CALM, BURSTY_CALM),
        ("bursty", "bursty, burst", BURST, BURSTY_BURST),
    )
    for workload, phase, span, readings in figures:
        for policy, reading in readings.get(name, {}).items():
            found = results.of(_trial(name, workload, policy))
            cores = [median(result.cores_by_interval[span]) for result in found]
            pas = [median(result.pas_by_interval[span]) for result in found]
            note = RIM_SUM_QA if (name, policy) == ("sum-qa", "rim") else ""
            is_set = workload == "steady_high" and policy in MARGIN_SHOWN and PIPELINES[name].margin_high
            metric, paper = f"cores of {policy}, {phase}", reading.cores
            claim = Claim(
                f"E1-E4 {name}", metric, "cores", known="plot", paper=paper, note=note, fitted=MARGIN if is_set else ""
            )
            if name == "video":
                why = "its figure shows two cores for each replica, its table has one"
                rows.append(contradicted(claim, cores, other=paper / 2, why=why))
            else:
                rows.append(compare(claim, cores))
            claim = structs.replace(claim, metric=f"100 · PAS of {policy}, {phase}", unit="%", paper=reading.pas)
            rows.append(compare(claim, pas, within=PAS_WITHIN))
    return rows


def _pairs(
    results: Results[IpaResult], name: str, workload: Workload, field: str, policies: tuple[Policy, Policy]
) -> list[tuple[float, float]]:
    """One field of the results of two policies, for each seed."""
    own, other = (results.each(_trial(name, workload, policy), field) for policy in policies)
    return list(zip(own, other, strict=True))


def _video(results: Results[IpaResult], workloads: Sequence[Workload]) -> list[Row]:
    """Claim A: IPA has the cost of FA2-low, with more accuracy at low load and the same accuracy at high load."""

    def claim(metric: str, unit: str) -> Claim:
        return Claim("A: video", metric, unit)

    rows = []
    both: tuple[Policy, Policy] = ("ipa", "fa2-low")
    for workload in workloads:
        above = [own - low for own, low in _pairs(results, "video", workload, "cores", both)]
        rows.append(bounded(claim(f"cores of IPA - FA2-low, {workload}", "cores"), above, at_least=-1, at_most=1))
    for workload in workloads:
        gained = [own - low for own, low in _pairs(results, "video", workload, "pas", both)]
        most = EQUAL if workload == "steady_high" else None
        least = -EQUAL if workload == "steady_high" else EQUAL
        rows.append(
            bounded(claim(f"100 · PAS of IPA - FA2-low, {workload}", "points"), gained, at_least=least, at_most=most)
        )
    calm = [
        median(own.pas_by_interval[CALM]) - median(low.pas_by_interval[CALM])
        for own, low in zip(*(results.of(_trial("video", "bursty", policy)) for policy in both), strict=True)
    ]
    rows.append(bounded(claim("100 · PAS of IPA - FA2-low, bursty, calm", "points"), calm, at_least=1))
    dear = [high / own for high, own in _pairs(results, "video", "steady_high", "cores", ("fa2-high", "ipa"))]
    return [*rows, bounded(claim("cores of FA2-high / IPA, steady_high", "×"), dear, at_least=1.9)]


def _sentiment(results: Results[IpaResult], workloads: Sequence[Workload]) -> list[Row]:
    """Claim B: accuracy falls during the burst and recovers; the headline figure."""

    def claim(metric: str, **figure: float) -> Claim:
        return Claim("B: audio-sent", metric, "%", **figure)  # type: ignore[arg-type]

    rows = []
    for phase, span, paper in (("calm", CALM, 59.1), ("burst", BURST, 53.5), ("after", AFTER, 59.1)):
        pas = [median(result.pas_by_interval[span]) for result in results.of(_trial("audio-sent", "bursty", "ipa"))]
        read = structs.replace(claim(f"100 · PAS of IPA, bursty, {phase}", paper=paper), known="plot")
        rows.append(compare(read, pas, within=PAS_WITHIN))
    gains = {
        workload: [
            100 * (own / low - 1) for own, low in _pairs(results, "audio-sent", workload, "pas", ("ipa", "fa2-low"))
        ]
        for workload in workloads
    }
    derived_gains: tuple[tuple[Workload, float], ...] = (("steady_high", 14.4), ("steady_low", 26.4))
    for workload, derived in derived_gains:
        gained = claim(f"accuracy gained over FA2-low, {workload}", derived=derived)
        rows.append(compare(gained, gains[workload], within=1.0))
    headline = structs.replace(claim("largest accuracy gained over FA2-low", paper=21.0), note="headline: up to 21 %")
    return [*rows, bounded(headline, max(gains.values(), key=sum), at_least=21.0)]


def _span(results: Results[IpaResult], name: str, peak: float | None) -> list[Row]:
    """Claim C: the cores that heavy variants need."""
    dear = [high / own for high, own in _pairs(results, name, "steady_high", "cores", ("fa2-high", "ipa"))]
    claim = Claim(f"C: {name}", "cores of FA2-high / IPA, steady_high", "×")
    rows = [bounded(claim, dear, at_least=3)]
    if peak is not None:
        loads: tuple[Workload, ...] = ("bursty", "steady_high")
        runs = (results.of(_trial(name, workload, "fa2-high")) for workload in loads)
        most = [max(max(result.cores_by_interval) for result in both) for both in zip(*runs, strict=True)]
        metric, note = "largest number of cores of FA2-high", "published: more than 500"
        claim = Claim(f"C: {name}", metric, "cores", paper=peak, note=note)
        rows.append(bounded(claim, most, at_least=peak))
    return rows


def _ordering(results: Results[IpaResult], name: str, workloads: Sequence[Workload]) -> list[Row]:
    """Claim D: the violations of each policy, and whether IPA's accuracy lies between FA2-low's and FA2-high's.
    If no policy misses a deadline, there is no order to test."""
    policies: tuple[Policy, ...] = ("fa2-low", "ipa", "fa2-high")
    missed = {policy: results.violations(_trial(name, "steady_high", policy)) for policy in policies}
    rows = []
    for less, more in pairwise(policies) if any(map(max, missed.values())) else ():
        claim = Claim(f"D: {name}", f"violations of {more} - {less}, steady_high", "points")
        rows.append(directed(claim, minus(missed[more], missed[less]), "FA2-low ≤ IPA ≤ FA2-high", at_least=-EQUAL))
    between = [
        low - EQUAL <= own <= high + EQUAL
        for workload in workloads
        for low, own, high in zip(*(results.each(_trial(name, workload, p), "pas") for p in policies), strict=True)
    ]
    claim = Claim(f"D: {name}", "runs in which IPA's accuracy lies between FA2's two", "%")
    share = 100 * sum(between) / len(between)
    return [*rows, directed(claim, [share], "FA2-low ≤ IPA ≤ FA2-high in all of them", at_least=100)]


def _preferences(results: Results[IpaResult], name: str) -> list[Row]:
    """E6 (claim F): preferring accuracy gives more accuracy at a higher cost."""
    trials = [preferring(name, place) for place in range(len(PREFERENCES))]
    rows = []
    for place, preferred in enumerate(PREFERENCES):
        for figure, (metric, unit, field) in enumerate((("cores", "cores", "cores"), ("100 · PAS", "%", "pas"))):
            means = [results.mean(trial, field) for trial in trials]
            claim = Claim(
                f"E6 {name}",
                f"{metric} if {preferred} is preferred",
                unit,
                known="plot",
                paper=PREFERRED[name][place][figure],
                note="expected: must not rise from accuracy to resources",
            )
            falling = (
                ResultLimits(at_least=means[1], above=means[2]),
                ResultLimits(at_least=means[2], at_most=means[0]),
                ResultLimits(at_most=means[1], below=means[0]),
            )
            within = 1.0 if field == "pas" else None
            rows.append(compare(claim, results.each(trials[place], field), within=within, shape=falling[place]))
    return rows


def _latencies(results: Results[IpaResult], name: str) -> list[Row]:
    """E7: median latencies under the steady high load; no row compares two policies that chose the same plan."""
    runs = {policy: results.of(_trial(name, "steady_high", policy)) for policy in POLICIES}
    medians = {policy: [result.latencies_ms[49] for result in own] for policy, own in runs.items()}
    cores = {policy: fmean(result.cores for result in own) for policy, own in runs.items()}
    rows = []
    if any(own.latencies_ms != low.latencies_ms for own, low in zip(runs["ipa"], runs["fa2-low"], strict=True)):
        equal = [own / low for own, low in zip(medians["ipa"], medians["fa2-low"], strict=True)]
        metric = "median latency of IPA / FA2-low"
        claim = Claim(f"E7 {name}", metric, "×", derived=1.0, note="shown as equal")
        rows.append(compare(claim, equal))
    lower = [own / mine for own, mine in zip(medians["rim"], medians["ipa"], strict=True)]
    note = f"RIM has {cores['rim'] / cores['ipa']:.2g} × IPA's cores"
    claim = Claim(f"E7 {name}", "median latency of RIM / IPA", "×", note=note)
    return [*rows, directed(claim, lower, "lower, as shown", below=1, of="every run")]


def _predictors(results: Results[IpaResult], name: str, start_s: float) -> list[Row]:
    """E8 (claim E): better forecasters lead to fewer violations at equal cost."""
    runs = {predictor: foreseeing(name, predictor, start_s) for predictor in PREDICTORS}
    mean = {predictor: results.mean(trial, "violations") for predictor, trial in runs.items()}
    order = {
        "lstm": ResultLimits(at_least=mean["oracle"] - NOISE, at_most=mean["reactive"] + NOISE),
        "reactive": ResultLimits(at_least=mean["lstm"] - NOISE),
        "oracle": ResultLimits(at_most=mean["lstm"] + NOISE),
    }
    experiment = f"E8 {name}" + (f", starts of {start_s:g} s" if start_s != APPLY_S else "")
    rows = []
    for predictor, paper in zip(PREDICTORS, VIOLATIONS[name], strict=True):
        claim = Claim(experiment, f"violations, {predictor}", "%", paper=paper)
        shape = order[predictor] if mean["reactive"] > NOISE else None
        rows.append(compare(claim, results.violations(runs[predictor]), shape=shape))
    if mean["lstm"] > NOISE:
        claim = Claim(experiment, "violations of reactive / lstm", "×")
        ratio = mean["reactive"] / mean["lstm"]
        rows.append(
            bounded(claim, [ratio], at_least=1.8, shape=ResultLimits(above=1), runs=len(results.of(runs["lstm"])))
        )
    base = results.cores(runs["lstm"])
    for predictor in PREDICTORS[1:]:
        more = [100 * (other / own - 1) for other, own in zip(results.cores(runs[predictor]), base, strict=True)]
        claim = Claim(experiment, f"cores of {predictor} beyond lstm's", "%")
        rows.append(bounded(claim, more, at_least=-10, at_most=10))
    return rows


def _ranked(results: Results[IpaResult], name: str) -> list[Row]:
    """E9 (claim G): the order of policies in E1 and E3 is the same with PAS'. Only FA2-low is compared, because
    FA2-high does not use the heaviest variant everywhere and IPA can exceed its rank."""
    rows = []
    for workload in WORKLOADS:
        own, low = ranked(name, workload), _trial(name, workload, "fa2-low")
        for metric, unit, field in (("100 · PAS", "points", "pas"), ("cores", "cores", "cores")):
            above = minus(results.each(own, field), results.each(low, field))
            claim = Claim(f"E9 {name}", f"{metric} with PAS' - FA2-low, {workload}", unit)
            rows.append(directed(claim, above, at_least=-NOISE, of="every run"))
    return rows
