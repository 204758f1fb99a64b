"""Our planner of cold starts beside Flashpoint's single techniques; and published scalers with and without both.

Our planner is the provision policy `cheapest_start`. Under Atoll's policy the number of replicas does not depend on how
they start, so that resources are equal without tuning; under the other policies a parameter is tuned, as for all cells
of the grid: to the resources of the baseline, or, where our planner cannot take as many, that of each technique to the
resources of our planner. A row gives the difference in mean latency between our planner and the best single technique
of that experiment. It is `off` if requests take longer with our planner.

A seed moves arrivals within a second and nothing else, so that runs with several seeds would repeat each other: each
experiment is one run, without an interval. These experiments were looked at while the planner was made. It is judged in
ten hours of the Twitter trace that were drawn after its parameters had been frozen: by the mean of the differences, and
its 95 % interval over the hours, which is about other hours of this trace, model and network, and about nothing else.

FA2 and Biscale are simulated on an initially empty cluster, with a model of 2 GB on CPU cores, and five minutes of each
of two traces: half the requests of the Twitter trace, and six times those to a language model of Azure. Each is one
run, too. Sponge starts one replica, for which no mechanism can do anything. This experiment is not from the thesis.
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
    RunSummary,
    ServiceTruth,
    Spread,
    Stage,
    StartWorker,
    SystemChoice,
    TopologyTruth,
    Truth,
    Variant,
    WorkerReady,
    World,
    cut,
    scale,
    simulate,
)
from sloop.api.profiles import ParametricLatency, Profile, Startup
from sloop.api.reports import Figure, Panel
from sloop_systems.comparison.harness import EQUAL_WITHIN, UNSEEN, Results, RunResult, Trial, Wanted, bars
from sloop_systems.comparison.rows import Claim, Row, directed
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
from sloop_systems.flashpoint.experiments.traces import DRAWN, HOURS, LLM, MAIN, requests_of

OURS: Final[Technique] = "cheapest-start"
SINGLE: Final[tuple[Technique, ...]] = ("mp", "mc", "lc", "gpu-faas")
"""The single techniques of Flashpoint; GPU-enabled FaaS copies models only within a host."""
COMPARED: Final[tuple[Technique, ...]] = (*SINGLE, OURS)
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
EXPERIMENT: Final = "our planner"


def of_cell(name: str, technique: Technique) -> FlashpointTrial:
    """The trial of a cell."""
    return structs.replace(CELLS[name], technique=technique)


def drawn_hour(name: str, technique: Technique) -> FlashpointTrial:
    """An hour that nothing was chosen with, with a seed of that kind."""
    return structs.replace(hour(name, technique), seed=UNSEEN)


def wanted_cells(*, quick: bool) -> Wanted[FlashpointTrial]:
    """All cells and drawn hours; `quick`: one cell."""
    cells = (QUICK_CELL,) if quick else tuple(CELLS)
    trials = [of_cell(*each) for each in product(cells, COMPARED)]
    if not quick:
        trials += [drawn_hour(*each) for each in product(DRAWN, COMPARED)]
    return [(trial, 1) for trial in trials]


def wanted_tuned(grid: Grid) -> Wanted[FlashpointTrial]:
    """Our planner at the resources of the baseline; the grid has the other techniques."""
    return [(_tuned(grid, *each), 1) for each in TUNED_CELLS]


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


def _tuned_result(grid: Grid, policy: ScalingName, trace: str, technique: Technique) -> FlashpointResult:
    """The result at the resources of the baseline, or at those of our planner if it cannot take as many."""
    if technique == OURS or _has_resources(grid, policy, trace):
        return grid.of(T5, policy, trace, technique)
    assert grid.matched is not None, "the techniques have not been simulated at the resources of ours"
    return grid.matched.of(_at_ours(grid, policy, trace, technique))[0]


class BestBeside(NamedTuple):
    """Our planner beside the best single technique of one experiment, one run of each."""

    name: str
    best: Technique
    ours: FlashpointResult
    other: FlashpointResult
    """The result of the best technique."""

    @classmethod
    def of(cls, name: str, result: Callable[[Technique], FlashpointResult]) -> "BestBeside":
        """Our planner beside the technique with the least mean latency."""
        found = {technique: result(technique) for technique in COMPARED}
        best = min(SINGLE, key=lambda each: found[each].mean_s)
        return cls(name, best, found[OURS], found[best])

    @property
    def more_s(self) -> float:
        """By how much longer a request takes."""
        return self.ours.mean_s - self.other.mean_s

    @property
    def more_percent(self) -> float:
        """The same in % of its time with the technique."""
        return 100 * self.more_s / self.other.mean_s

    def __str__(self) -> str:
        return (
            f"{LABELS[self.best]} {self.other.mean_s:.4g} s, ours {self.ours.mean_s:.4g} s ({self.more_percent:+.2g} %)"
        )

    def row(self) -> Row:
        """`off` if requests take longer."""
        note = f"one run, without an interval; {self}; {self.ours.cores / self.other.cores:.3f} × its replicas"
        claim = Claim(EXPERIMENT, f"mean latency, {self.name}, ours - {LABELS[self.best]}", "s", note=note)
        return directed(claim, [self.more_s], "no more than the best single technique", at_most=0)


def of_cells(results: Found, *, quick: bool) -> list[BestBeside]:
    """Ours in each cell."""
    return [
        BestBeside.of(name, lambda technique, name=name: results.of(of_cell(name, technique), 1)[0])  # type: ignore[misc]
        for name in ((QUICK_CELL,) if quick else CELLS)
    ]


def of_tuned(grid: Grid) -> list[BestBeside]:
    """Ours at equal resources under the policies that are tuned."""
    return [
        BestBeside.of(
            f"{policy}, {trace}, equal resources",
            lambda technique, policy=policy, trace=trace: _tuned_result(grid, policy, trace, technique),  # type: ignore[misc]
        )
        for policy, trace in TUNED_CELLS
    ]


def planner_rows(found: Sequence[BestBeside]) -> list[Row]:
    """A row for each experiment, and one with the number of experiments in which our planner is slower. Where it chose
    the plan of the best technique, results are the same, and the experiment does not count."""
    rows = [each.row() for each in found]
    slower = [each.name for each, row in zip(found, rows, strict=True) if row.verdict == "off"]
    differing = sum(each.more_s != 0 for each in found)
    metric = f"experiments in which ours is slower, of {differing} in which it differs"
    claim = Claim(EXPERIMENT, metric, "", note="; ".join(slower))
    return [*rows, directed(claim, [float(len(slower))], "none", at_most=0)]


def drawn_row(results: Found) -> Row:
    """Our planner in the hours that judge it, each of which counts once, whatever its latencies."""
    found = [
        BestBeside.of(name, lambda technique, name=name: results.of(drawn_hour(name, technique))[0])  # type: ignore[misc]
        for name in DRAWN
    ]
    note = "hours from second " + "; ".join(f"{each.name}: {each}" for each in found)
    claim = Claim(
        EXPERIMENT, f"mean latency, {len(DRAWN)} drawn hours, ours - the best technique of each", "%", note=note
    )
    values = [each.more_percent for each in found]
    return directed(claim, values, "no more than the best single technique", at_most=0, of="doubt")


# Published scalers


ScalerName = Literal["fa2", "biscale"]
SCALERS: Final[tuple[ScalerName, ...]] = ("fa2", "biscale")
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
        if isinstance(record, StartWorker):
            self._ordered[record.worker] = now_ns
        elif isinstance(record, WorkerReady) and record.worker in self._ordered:
            self.taken_s.append((now_ns - self._ordered.pop(record.worker)) / NS_PER_S)


def wanted_scalers(*, quick: bool) -> Wanted[ScalerTrial]:
    """All of them; `quick`: FA2 on one trace."""
    return [
        (structs.replace(trial, mechanism=how), 1) for trial in without_mechanism(quick=quick) for how in MECHANISMS
    ]


def without_mechanism(*, quick: bool) -> list[ScalerTrial]:
    """Each scaler and trace without any mechanism."""
    if quick:
        return [ScalerTrial(system="fa2", mechanism="baseline")]
    return [
        ScalerTrial(system=system, mechanism="baseline", trace=trace, seed=UNSEEN)
        for system, trace in product(SCALERS, SCENES)
    ]


def scaler_rows(results: Results[ScalerResult], *, quick: bool) -> list[Row]:
    """Cold starts and requests in time of each, with a mechanism and without, one run of each."""
    rows = []
    for without in without_mechanism(quick=quick):
        of, (other,) = f"{without.system}, {SCENES[without.trace].label}", results.of(without)
        for how in ("flashpoint", "cheapest_start"):
            (found,) = results.of(structs.replace(without, mechanism=how))
            starts = f"{found.started} and {other.started} starts; one run, without an interval"
            note = f"{found.cold_s:.4g} and {other.cold_s:.4g} s; {starts}"
            claim = Claim("published scalers", f"cold start, {of}, with {how} - without", "s", note=note)
            rows.append(directed(claim, [found.cold_s - other.cold_s], "no longer", at_most=0))
            note = f"{100 - found.violations:.4g} and {100 - other.violations:.4g} %; {starts}"
            claim = Claim("published scalers", f"requests in time, {of}, with {how} - without", "points", note=note)
            rows.append(directed(claim, [other.violations - found.violations], "no fewer", at_least=0))
    return rows


def scalers_figure(results: Results[ScalerResult], *, quick: bool) -> Figure:
    """The same, with the cores."""
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
