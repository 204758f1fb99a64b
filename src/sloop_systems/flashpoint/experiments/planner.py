"""Our planner of cold starts beside Flashpoint's single techniques; and published scalers with and without both.

Our planner is the provision policy `cheapest_start`. Under Atoll's policy the number of replicas does not depend on how
they start, so that resources are equal without tuning; under the other policies a parameter is tuned, as for all cells
of the grid: to the resources of the baseline, or, where our planner cannot take as many, that of each technique to the
resources of our planner. A row gives the difference in mean latency between our planner and the best single technique
of that experiment, with the same seeds for both, which were not used to choose parameters. It is `off` if the whole
95 % interval lies above 0, which means that requests take longer with our planner. A single run has no interval.

FA2, Biscale and Sponge are simulated on an initially empty cluster, with a model of 2 GB on CPU cores, and five minutes
of each of two traces: half the requests of the Twitter trace, and six times those to a language model of Azure. This
experiment is not from the thesis.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, NamedTuple

from msgspec import structs

from sloop.api import LINK_MBPS, NS_PER_S, STORE_MBPS, Node, ReplicaId, s
from sloop.api.experiments import (
    Application,
    ColdStartTruth,
    Estimates,
    NetworkTruth,
    Record,
    ReplicaReady,
    RunSummary,
    ServiceTruth,
    Spread,
    Stage,
    StartReplica,
    SystemChoice,
    TopologyTruth,
    Truth,
    Variant,
    World,
    cut,
    scale,
    simulate,
)
from sloop.api.profiles import ParametricLatency, Profile, Startup
from sloop.api.reports import Figure, Panel
from sloop_systems.comparison.harness import EQUAL_WITHIN, UNSEEN, Results, RunResult, Trial, Wanted, bars
from sloop_systems.comparison.rows import Claim, PairedDifference, Row, difference, directed
from sloop_systems.flashpoint.experiments.offline import T5
from sloop_systems.flashpoint.experiments.results import (
    LABELS,
    MODELS,
    PER_HOST_STEPS,
    PLANNED,
    SCALES,
    STORE_MBPS_STEPS,
    TRACES,
    Found,
    Grid,
    apart,
    beside,
    cell,
    hour,
    own_links,
    planned,
    scaled,
    ten_hosts,
    with_store,
)
from sloop_systems.flashpoint.experiments.runs import SCALING, FlashpointResult, FlashpointTrial, ScalingName, Technique
from sloop_systems.flashpoint.experiments.traces import HOURS, LLM, MAIN, requests_of

OURS: Final[Technique] = "cheapest-start"
SINGLE: Final[tuple[Technique, ...]] = ("mp", "mc", "lc", "gpu-faas")
"""The single techniques of Flashpoint; GPU-enabled FaaS copies models only within a host."""
CELLS: Final[Mapping[str, FlashpointTrial]] = {
    **{f"window {name}": hour(name) for name in HOURS},
    **{f"window {name}, own links": own_links(name) for name in HOURS},
    **{f"{mbps / 1e3:g} Gbit/s from the store": with_store(mbps) for mbps in STORE_MBPS_STEPS},
    **{f"{factor:g} × requests": scaled(factor, "baseline") for factor in SCALES if factor != 1.0},
    **{f"{count} accelerators in each host": beside(count, "baseline") for count in PER_HOST_STEPS[:-1]},
    **{f"ten hosts, window {name}": ten_hosts(name) for name in HOURS},
    **{f"{model}, {PLANNED[model]:g} × requests, window 1652593": planned(model, "baseline") for model in PLANNED},
    **{
        f"{model}, {trace}": cell(model, "atoll-rate", trace)
        for model, trace in product(MODELS, TRACES)
        if (model, trace) != (T5, "twitter")
    },
    **{f"{model}, own links": apart(model, "baseline") for model in MODELS if model != T5},
}
"""The simulated experiments under Atoll's policy, whose number of replicas does not depend on how they start."""
QUICK_CELL: Final = f"window {MAIN}"
TUNED_CELLS: Final = tuple(product(SCALING[1:], TRACES))
"""Policies and traces of T5 for which resources are made equal."""
RUNS: Final = 5
NEAR: Final = 1.25
"""A technique whose mean latency with the first seed exceeds that of the best one by this factor is not simulated with
other seeds, because mean latencies change by only a few percent from seed to seed."""
EXPERIMENT: Final = "our planner"


def of_cell(name: str, technique: Technique, *, quick: bool = False) -> FlashpointTrial:
    """The trial of a cell with its first seed; with `quick`, with the first seed of the other experiments."""
    return structs.replace(CELLS[name], technique=technique, seed=0 if quick else UNSEEN)


def wanted_cells(*, quick: bool) -> Wanted[FlashpointTrial]:
    """All cells with one seed; `quick`: one cell, whose other techniques are simulated anyway."""
    if quick:
        return [(of_cell(QUICK_CELL, OURS, quick=True), 1)]
    return [(of_cell(name, each), 1) for name in CELLS for each in (*SINGLE, OURS)]


def wanted_again(results: Found) -> Wanted[FlashpointTrial]:
    """The other seeds of all cells, for our planner and the techniques that are near the best one."""
    return [
        (structs.replace(trial, seed=UNSEEN + 1), RUNS - 1)
        for name in CELLS
        for trial in (of_cell(name, each) for each in (*_near(_firsts(results, name)), OURS))
    ]


def _firsts(results: Found, name: str) -> dict[Technique, float]:
    return {each: results.mean(of_cell(name, each), "mean_s", 1) for each in SINGLE}


def _near(means_s: Mapping[Technique, float]) -> tuple[Technique, ...]:
    return tuple(each for each in SINGLE if means_s[each] <= NEAR * min(means_s.values()))


def wanted_tuned(grid: Grid) -> Wanted[FlashpointTrial]:
    """Our planner at the resources of the baseline, for T5 under every policy; the grid has the other techniques."""
    return [(_tuned(grid, *each), 1) for each in product(SCALING, TRACES)]


def _tuned(grid: Grid, policy: ScalingName, trace: str) -> FlashpointTrial:
    return grid.trial(T5, policy, trace, OURS)


def wanted_at_ours(grid: Grid) -> Wanted[FlashpointTrial]:
    """Where no parameter gives our planner the resources of the baseline: the techniques at the resources of ours."""
    return [
        (_at_ours(grid, *each, technique), 1)
        for each in TUNED_CELLS
        if not _has_resources(grid, *each)
        for technique in SINGLE
    ]


def _at_ours(grid: Grid, policy: ScalingName, trace: str, technique: Technique) -> FlashpointTrial:
    resources = grid.of(T5, policy, trace, OURS).cores
    return structs.replace(cell(T5, policy, trace, technique), resources=resources)


def _has_resources(grid: Grid, policy: ScalingName, trace: str) -> bool:
    """Whether our planner takes the resources of the baseline."""
    wanted = _tuned(grid, policy, trace).resources
    return abs(grid.of(T5, policy, trace, OURS).cores / wanted - 1.0) <= EQUAL_WITHIN


def wanted_tuned_again(grid: Grid, at_ours: Found) -> Wanted[FlashpointTrial]:
    """Our planner and the techniques near the best one with unseen seeds, each with the parameter that was tuned for
    it."""
    return [
        (_with_knob(grid, at_ours, *each, technique), RUNS)
        for each in TUNED_CELLS
        for technique in (*_near_tuned(grid, at_ours, *each), OURS)
    ]


def _tuned_result(
    grid: Grid, at_ours: Found, policy: ScalingName, trace: str, technique: Technique
) -> FlashpointResult:
    """The result at the resources of the baseline, or at those of our planner if it cannot take as many."""
    if technique == OURS or _has_resources(grid, policy, trace):
        return grid.of(T5, policy, trace, technique)
    return at_ours.of(_at_ours(grid, policy, trace, technique))[0]


def _with_knob(grid: Grid, at_ours: Found, policy: ScalingName, trace: str, technique: Technique) -> FlashpointTrial:
    knob = _tuned_result(grid, at_ours, policy, trace, technique).knob
    return structs.replace(cell(T5, policy, trace, technique), knob=knob, seed=UNSEEN)


def _near_tuned(grid: Grid, at_ours: Found, policy: ScalingName, trace: str) -> tuple[Technique, ...]:
    return _near({each: _tuned_result(grid, at_ours, policy, trace, each).mean_s for each in SINGLE})


class BestBeside(NamedTuple):
    """Our planner beside the best single technique of one experiment."""

    name: str
    best: Technique
    ours_s: Sequence[float]
    """The mean latency with each seed."""
    best_s: Sequence[float]
    replicas: float
    """The replicas with our planner divided by those with the technique, in the mean."""

    @classmethod
    def of(cls, results: Found, name: str, trials: Mapping[Technique, FlashpointTrial], runs: int) -> "BestBeside":
        """Our planner beside the technique with the least mean latency."""
        found = {technique: results.each(trial, "mean_s", runs) for technique, trial in trials.items()}
        best = min((each for each in SINGLE if each in found), key=lambda each: fmean(found[each]))
        cores = [results.mean(trials[each], "cores", runs) for each in (OURS, best)]
        return cls(name, best, found[OURS], found[best], cores[0] / cores[1])

    @property
    def more(self) -> PairedDifference:
        """By how much longer a request takes."""
        return difference(self.ours_s, self.best_s, "s")

    def row(self) -> Row:
        """`off` if the whole interval lies above 0."""
        more, best_s = self.more, fmean(self.best_s)
        percent = "" if more.half is None else f" ({100 * more.mean / best_s:+.2g} ± {100 * more.half / best_s:.2g} %)"
        note = (
            f"{LABELS[self.best]} {best_s:.4g} s, ours {fmean(self.ours_s):.4g} s{percent}; "
            f"{len(self.ours_s)} {'seed' if len(self.ours_s) == 1 else 'seeds'}; {self.replicas:.3f} × its replicas"
        )
        claim = Claim(EXPERIMENT, f"mean latency, {self.name}, ours - {LABELS[self.best]}", "s", note=note)
        values = [ours - other for ours, other in zip(self.ours_s, self.best_s, strict=True)]
        return directed(claim, values, "no more than the best single technique", at_most=0, of="doubt")


def of_cells(results: Found, *, quick: bool) -> list[BestBeside]:
    """Ours in each cell."""
    if quick:
        trials = {each: of_cell(QUICK_CELL, each, quick=True) for each in (*SINGLE, OURS)}
        return [BestBeside.of(results, QUICK_CELL, trials, 1)]
    return [
        BestBeside.of(
            results, name, {each: of_cell(name, each) for each in (*_near(_firsts(results, name)), OURS)}, RUNS
        )
        for name in CELLS
    ]


def of_tuned(grid: Grid, at_ours: Found, again: Found) -> list[BestBeside]:
    """Ours at equal resources under every policy."""
    return [
        BestBeside.of(
            again,
            f"{policy}, {trace}, equal resources",
            {
                each: _with_knob(grid, at_ours, policy, trace, each)
                for each in (*_near_tuned(grid, at_ours, policy, trace), OURS)
            },
            RUNS,
        )
        for policy, trace in TUNED_CELLS
    ]


def planner_rows(found: Sequence[BestBeside]) -> list[Row]:
    """A row for each experiment, and one with the number of experiments in which our planner is slower."""
    rows = [each.row() for each in found]
    slower = [each.name for each in found if each.more.is_above]
    claim = Claim(EXPERIMENT, f"experiments in which ours is slower, of {len(found)}", "", note="; ".join(slower))
    expect = "none, as far as the 95 % intervals can tell"
    return [*rows, directed(claim, [float(len(slower))], expect, at_most=0)]


# Published scalers


ScalerName = Literal["fa2", "biscale", "sponge"]
SCALERS: Final[tuple[ScalerName, ...]] = ("fa2", "biscale", "sponge")
Mechanism = Literal["baseline", "flashpoint", "cheapest_start"]
MECHANISMS: Final[Mapping[Mechanism, Mapping[str, Any]]] = {
    "baseline": {"name": "flashpoint", "locality": False, "multicast": False},
    "flashpoint": {"name": "flashpoint"},
    "cheapest_start": {"name": "cheapest_start"},
}
"""Without the mechanism, each replica downloads its model from the store."""
MECHANISM_NAMES: Final[Mapping[Mechanism, str]] = {
    "baseline": "without",
    "flashpoint": "Flashpoint's",
    "cheapest_start": "ours",
}


class SceneTrace(NamedTuple):
    """Five minutes of requests."""

    label: str
    excerpt: str
    first_s: int
    factor: float
    """A factor on the number of requests, which gives about 35 per second."""


SCENE_S: Final = 300
SCENES: Final[Mapping[str, SceneTrace]] = {
    "twitter": SceneTrace("Twitter", MAIN, 600, 0.5),
    "llm": SceneTrace("Azure LLM", LLM, 0, 6.0),
}
SCENE_SLO_MS: Final = 1000.0
SCENE_HOSTS, SCENE_CORES, SCENE_HOSTS_PER_LEAF = 12, 16.0, 6
SCENE_PROFILE: Final = Profile(
    latency_ms=ParametricLatency(5.0, 50.0, 0.08, 0.0, 1.0),
    max_batch=8,
    max_cores=8,
    load_s=3.5,
    startup=Startup(0.3, 3.0, 0.2),
    weights_bytes=2_000_000_000,
    memory_bytes=2_500_000_000,
)
"""A request alone takes 55 ms on one core. A start takes 0.3 s for the process, 3 s to load the weights and 0.2 s for
the first batch; in addition, the weights take 7.3 s from the store or 2.1 s from another host."""
SCENE_OPTIONS: Final[Mapping[ScalerName, Mapping[str, Any]]] = {
    "fa2": {"headroom": 0.2, "initial_rps": 30.0},
    "biscale": {},
    "sponge": {},
}
"""FA2's model assumes evenly spaced requests, and decides every ten seconds (`docs/systems.md`)."""


class ScalerResult(RunResult, frozen=True, kw_only=True):
    """The result of one run."""

    cold_s: float
    """Mean over all starts, the first ones included, from order to readiness."""
    started: int


class ScalerTrial(Trial, frozen=True, kw_only=True):
    """A published scaler with one of the mechanisms for cold starts; `data` is the folder of public data."""

    system: ScalerName
    mechanism: Mechanism
    trace: str = "twitter"

    def label(self) -> str:
        return f"{self.system}, {self.mechanism}, {self.trace}"

    def play(self) -> ScalerResult:
        """Simulate it; the first seed under the checkers."""
        world, starts = scaler_world(self), StartTimes()
        summary = RunSummary(world.application.graph, start_ns=0)
        simulate(world, [summary, starts], check_first=None if self.seed == 0 else 0)
        row = summary.row(system=self.system, seed=self.seed)
        return ScalerResult(
            violations=100 * row.violations,
            cores=row.core_seconds / SCENE_S,
            cold_s=fmean(starts.taken_s) if starts.taken_s else 0.0,
            started=len(starts.taken_s),
        )


def scaler_world(trial: ScalerTrial) -> World:
    """The trial as a world of the simulator. The application declares both, as a user would."""
    scene = SCENES[trial.trace]
    excerpt = requests_of(scene.excerpt, Path(trial.data) if trial.data else None)
    whole = excerpt.trace(seed=trial.seed, spread=Spread.UNIFORM)
    trace = scale(cut(whole, start_ns=s(scene.first_s), duration_ns=s(SCENE_S)), scene.factor, seed=trial.seed)
    nodes = tuple(
        Node(f"h{place}", "cpu", SCENE_CORES, 64 << 30, rack=f"rack-{place // SCENE_HOSTS_PER_LEAF}")
        for place in range(SCENE_HOSTS)
    )
    application = Application(
        name="model",
        slo_ms=SCENE_SLO_MS,
        stages=(Stage("model", (Variant("v", profile=SCENE_PROFILE),)),),
        system=SystemChoice(
            trial.system, {**SCENE_OPTIONS[trial.system], "provision": dict(MECHANISMS[trial.mechanism])}
        ),
        cluster=nodes,
        estimates=Estimates(correct=False),
    )
    truth = Truth(
        service=ServiceTruth(ratio=1.0, cv=0.0),
        cold_start=ColdStartTruth(warm=False),
        network=NetworkTruth(
            payload_kb=(0.0,), topology=TopologyTruth(STORE_MBPS, "shared", LINK_MBPS, SCENE_HOSTS_PER_LEAF)
        ),
        plan_ms=0.0,
    )
    return World.of(application, trace, seed=trial.seed, duration_ns=trace.duration_ns, truth=truth)


class StartTimes:
    """A sink: how long replicas took to start."""

    def __init__(self) -> None:
        self._ordered: dict[ReplicaId, int] = {}
        self.taken_s: list[float] = []

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if isinstance(record, StartReplica):
            self._ordered[record.replica] = now_ns
        elif isinstance(record, ReplicaReady) and record.replica in self._ordered:
            self.taken_s.append((now_ns - self._ordered.pop(record.replica)) / NS_PER_S)


def wanted_scalers(*, quick: bool) -> Wanted[ScalerTrial]:
    """All of them; `quick`: FA2 on one trace, once."""
    runs = 1 if quick else RUNS
    return [
        (structs.replace(trial, mechanism=how), runs) for trial in without_mechanism(quick=quick) for how in MECHANISMS
    ]


def without_mechanism(*, quick: bool) -> list[ScalerTrial]:
    """Each scaler and trace without any mechanism, with the first seed."""
    if quick:
        return [ScalerTrial(system="fa2", mechanism="baseline")]
    return [
        ScalerTrial(system=system, mechanism="baseline", trace=trace, seed=UNSEEN)
        for system, trace in product(SCALERS, SCENES)
    ]


def scaler_rows(results: Results[ScalerResult], *, quick: bool) -> list[Row]:
    """Cold starts, requests in time, and cores of each, with a mechanism and without, in pairs of equal seeds."""
    rows = []
    for without in without_mechanism(quick=quick):
        of = f"{without.system}, {SCENES[without.trace].label}"
        for how in ("flashpoint", "cheapest_start"):
            trial = structs.replace(without, mechanism=how)
            starts = [round(results.mean(each, "started"), 1) for each in (trial, without)]
            for what, unit, field, sign in (
                ("cold start", "s", "cold_s", 1),
                ("requests in time", "points", "violations", -1),
            ):
                ours, others = (
                    [each if sign >= 0 else 100 - each for each in results.each(found, field)]
                    for found in (trial, without)
                )
                more = difference(ours, others, unit)
                note = f"{fmean(ours):.4g} and {fmean(others):.4g}; {starts[0]:g} and {starts[1]:g} starts; {more}"
                claim = Claim("published scalers", f"{what}, {of}, with {how} - without", unit, note=note)
                values = [one - other for one, other in zip(ours, others, strict=True)]
                rows.append(
                    directed(claim, values, "no longer", at_most=0, of="doubt")
                    if sign > 0
                    else directed(claim, values, "no fewer", at_least=0, of="doubt")
                )
    return rows


def scalers_figure(results: Results[ScalerResult], *, quick: bool) -> Figure:
    """The same as means of all seeds, with the smallest and the largest."""
    trials = without_mechanism(quick=quick)
    ticks = tuple(f"{trial.system}\n{SCENES[trial.trace].label}" for trial in trials)

    def panel(label: str, value: Callable[[ScalerResult], float], *, log: bool = False) -> Panel:
        series = tuple(
            bars(
                name, [[value(each) for each in results.of(structs.replace(trial, mechanism=how))] for trial in trials]
            )
            for how, name in MECHANISM_NAMES.items()
        )
        return Panel(y_label=label, ticks=ticks, series=series, log=log)

    spoken = "; ".join(
        f"{trial.system} {SCENES[trial.trace].label} "
        + ", ".join(
            f"{name} {results.mean(structs.replace(trial, mechanism=how), 'cold_s'):.3g} s"
            for how, name in MECHANISM_NAMES.items()
        )
        for trial in trials
    )
    return Figure(
        name="scalers",
        title="Published scalers on an empty cluster, with a mechanism for cold starts and without",
        x_label="",
        panels=(
            panel("cold start, s (log)", lambda each: each.cold_s, log=True),
            panel("in time, %", lambda each: 100 - each.violations),
            panel("cores", lambda each: each.cores),
        ),
        alt=f"Mean cold start: {spoken}.",
    )
