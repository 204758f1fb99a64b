"""Our planner of cold starts beside Flashpoint's single techniques, and published scalers with and without both.

Ours is the provision policy `cheapest_start`. Under Atoll's policy the number of replicas does not depend on how they
start, so that resources are equal by themselves; under the others the policy's parameter is tuned, as for all cells of
the grid. A row says how much longer requests take with ours than with the best of the single techniques of that cell:
it is `off` only if the whole 95 % interval lies above 0. A single run has no interval.

FA2, Biscale and Sponge are simulated on one scene: an empty cluster, a model of 2 GB on cores, and five minutes of
the Twitter trace with half its requests. The scene is ours.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from msgspec import structs

from sloop.actions import StartReplica
from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant
from sloop.app.scenario import ColdStartTruth, NetworkTruth, ServiceTruth, TopologyTruth, Truth
from sloop.events import ReplicaReady
from sloop.profile.profile import ParametricLatency, Profile, Startup
from sloop.profile.published import H2H_MBPS, STORE_MBPS
from sloop.reproduce.flashpoint.experiments import (
    LABELS,
    SEEDS,
    Found,
    Grid,
    beside,
    hour,
    own_links,
    scaled,
    ten_hosts,
    with_store,
)
from sloop.reproduce.flashpoint.offline import T5
from sloop.reproduce.flashpoint.runs import SCALING, FlashpointTrial, ScalingName, Technique
from sloop.reproduce.flashpoint.traces import HOURS, MAIN, requests_of
from sloop.reproduce.harness import Results, RunResult, Trial, Wanted
from sloop.reproduce.rows import Claim, Row, difference, directed
from sloop.runlog import Record
from sloop.runlog.summary import RunSummary
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Node, ReplicaId
from sloop.workload import Spread
from sloop.workload.trace import cut, scale

OURS: Final[Technique] = "cheapest-start"
SINGLE: Final[tuple[Technique, ...]] = ("mp", "mc", "lc", "gpu-faas")
"""One technique of Flashpoint each; GPU-enabled FaaS copies within a host alone."""
TOGETHER: Final[tuple[Technique, ...]] = ("lc+mc", "lc+mc+mp")
CELLS: Final[Mapping[str, FlashpointTrial]] = {
    **{f"window {name}": hour(name) for name in HOURS},
    "own links": own_links(MAIN),
    "16 Gbit/s from the store": with_store(16_000.0),
    "2.5 × requests": scaled(2.5, "baseline"),
    "one accelerator in each host": beside(1, "baseline"),
    "ten hosts": ten_hosts(MAIN),
}
"""T5 under Atoll's policy."""
QUICK_CELL: Final = f"window {MAIN}"
EXPERIMENT: Final = "our planner"


def wanted_cells(*, quick: bool) -> Wanted[FlashpointTrial]:
    """The trials of all cells; `quick`: one window, once."""
    if quick:
        return [(structs.replace(CELLS[QUICK_CELL], technique=OURS), 1)]
    techniques = (*SINGLE, *TOGETHER, OURS)
    return [(structs.replace(cell, technique=each), SEEDS) for cell in CELLS.values() for each in techniques]


def wanted_tuned(grid: Grid) -> Wanted[FlashpointTrial]:
    """Ours at the resources of the baseline, for T5 under every policy."""
    return [(_tuned(grid, *each), 1) for each in product(SCALING, ("twitter", "azure"))]


def _tuned(grid: Grid, policy: ScalingName, trace: str) -> FlashpointTrial:
    return grid.trial(T5, policy, trace, OURS)


def planner_rows(results: Found, *, quick: bool) -> list[Row]:
    """Ours beside the best single technique, in each cell."""
    found = []
    for name, cell in CELLS.items():
        if quick and name != QUICK_CELL:
            continue
        means = {
            technique: results.each(structs.replace(cell, technique=technique), "mean_s", 1 if quick else SEEDS)
            for technique in (*SINGLE, *TOGETHER, OURS)
        }
        cores = [results.mean(structs.replace(cell, technique=each), "cores") for each in (OURS, _best(means))]
        found.append(_beside_the_best(name, means, cores[0] / cores[1]))
    return found


def tuned_rows(grid: Grid) -> list[Row]:
    """The same at equal resources under every policy."""
    rows = []
    for policy, trace in product(SCALING, ("twitter", "azure")):
        techniques: tuple[Technique, ...] = (*SINGLE, *TOGETHER, OURS)
        results = {technique: grid.of(T5, policy, trace, technique) for technique in techniques}
        means = {technique: [result.mean_s] for technique, result in results.items()}
        cores = results[OURS].cores / results[_best(means)].cores
        rows.append(_beside_the_best(f"{policy}, {trace}, equal resources", means, cores))
    return rows


def _best(means: Mapping[Technique, Sequence[float]]) -> Technique:
    return min(SINGLE, key=lambda technique: fmean(means[technique]))


def _beside_the_best(name: str, means: Mapping[Technique, Sequence[float]], cores: float) -> Row:
    best = _best(means)
    more = difference(means[OURS], means[best], "s")
    figures = "; ".join(f"{LABELS[each]} {fmean(means[each]):.3g} s" for each in (best, *TOGETHER, OURS))
    note = f"{figures}; {more}; {cores:.3f} × its replicas"
    claim = Claim(EXPERIMENT, f"mean latency, {name}, ours - {LABELS[best]}", "s", note=note)
    expect = "no more than the best single technique, as far as the 95 % interval can tell"
    values = [ours - other for ours, other in zip(means[OURS], means[best], strict=True)]
    return directed(claim, values, holds=not more.is_above, expect=expect)


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
SCENE_SEEDS: Final = 3
SCENE_S: Final = 300
SCENE_FROM_S: Final = 600
SCENE_SLO_MS: Final = 1000.0
SCENE_HOSTS, SCENE_CORES, SCENE_HOSTS_PER_LEAF = 12, 16.0, 6
SCENE_SCALE: Final = 0.5
"""Of the number of requests."""
SCENE_PROFILE: Final = Profile(
    latency_ms=ParametricLatency(5.0, 50.0, 0.08, 0.0, 1.0),
    max_batch=8,
    max_cores=8,
    load_s=3.5,
    startup=Startup(0.3, 3.0, 0.2),
    weights_bytes=2_000_000_000,
    memory_bytes=2_500_000_000,
)
"""A request alone takes 55 ms on one core. A start takes 0.3 s for the process, 3 s for the weights and 0.2 s for the
first batch, beside 7.3 s from the store or 2.1 s from another host."""
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
    """A published scaler with one of the mechanisms; `data` is the folder of public data."""

    system: ScalerName
    mechanism: Mechanism

    def label(self) -> str:
        return f"{self.system}, {self.mechanism}"

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
    excerpt = requests_of(MAIN, Path(trial.data) if trial.data else None)
    whole = excerpt.trace(seed=trial.seed, spread=Spread.UNIFORM)
    trace = scale(cut(whole, start_ns=s(SCENE_FROM_S), duration_ns=s(SCENE_S)), SCENE_SCALE, seed=trial.seed)
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
            payload_kb=(0.0,), topology=TopologyTruth(STORE_MBPS, "shared", H2H_MBPS, SCENE_HOSTS_PER_LEAF)
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
    """All of them; `quick`: FA2, once."""
    seeds, systems = (1, SCALERS[:1]) if quick else (SCENE_SEEDS, SCALERS)
    return [(ScalerTrial(system=each, mechanism=how), seeds) for each, how in product(systems, MECHANISMS)]


def scaler_rows(results: Results[ScalerResult], *, quick: bool) -> list[Row]:
    """Cold starts, requests in time, and cores of each, side by side."""
    rows = []
    for system in SCALERS[:1] if quick else SCALERS:
        trials = {how: ScalerTrial(system=system, mechanism=how) for how in MECHANISMS}
        without = trials["baseline"]
        for how in ("flashpoint", "cheapest_start"):
            trial = trials[how]
            starts = [round(results.mean(each, "started"), 1) for each in (trial, without)]
            for what, unit, field, sign in (
                ("cold start", "s", "cold_s", 1),
                ("requests in time", "points", "violations", -1),
                ("cores", "cores", "cores", 0),
            ):
                ours, others = results.each(trial, field), results.each(without, field)
                more = difference(ours, others, unit)
                figures = (fmean(ours), fmean(others))
                if field == "violations":
                    figures = (100 - figures[0], 100 - figures[1])
                note = f"{figures[0]:.4g} and {figures[1]:.4g}; {starts[0]:g} and {starts[1]:g} starts"
                claim = Claim("published scalers", f"{what}, {system}, with {how} - without", unit, note=note)
                values = [(one - other) * (sign or 1) for one, other in zip(ours, others, strict=True)]
                holds = not more.is_above if sign else True
                expect = {1: "no longer", -1: "no fewer", 0: "either"}[sign]
                rows.append(directed(claim, values, holds=holds, expect=expect))
    return rows
