"""FA2's results without simulation: sweeps of rates, the motivating examples, the fit, the solver.

Experiments are named as in the specification: E0 sizes of replicas, E0b a chain of two, E5 and E6 the sweeps, E8 the
model of d(b), E9 the time of a decision; 7.2 its deterministic checks. Source: Razavi et al., FA2 (RTAS 2022).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean, median, stdev
from typing import Final

import numpy as np

from sloop.api import ROUNDING
from sloop.api.experiments import stream
from sloop.api.profiles import RESNET18_HUMAN, YOLOV5S_S
from sloop.api.solvers import IndexedPath, Ties
from sloop_systems.comparison.rows import Claim, ResultLimits, Row, bounded, compare, directed
from sloop_systems.fa2.experiments.application import CPU, VISION, Hardware, models, problem
from sloop_systems.fa2.solver import Fa2Choice, Fa2Mode, Fa2Solution, Fa2Stage, ds2, inferline, inferline_full, solve

RATES: Final = tuple(range(6, 61))
PLANNERS: Final = ("optimal", "fa2", "inferline", "inferline full", "ds2")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Replicas at every rate of `RATES`, by planner."""

    hardware: Hardware
    paths: int
    totals: dict[str, tuple[int, ...]]

    def over(self, planner: str) -> list[float]:
        """Surplus of replicas over FA2 in %, at each rate."""
        return [100 * (theirs / own - 1) for theirs, own in zip(self.totals[planner], self.totals["fa2"], strict=True)]

    def saved(self, planner: str) -> float:
        """Mean share of the planner's replicas that FA2 saves, in percent."""
        return fmean(100 * (1 - own / n) for n, own in zip(self.totals[planner], self.totals["fa2"], strict=True))

    @property
    def exact(self) -> float:
        """Share of the rates at which FA2 finds the optimum, in percent."""
        return fmean(100.0 * (own == n) for own, n in zip(self.totals["fa2"], self.totals["optimal"], strict=True))


def swept(hardware: Hardware, paths: int) -> Sweep:
    """Every planner at every rate."""
    totals: dict[str, list[int]] = {name: [] for name in PLANNERS}
    for rate_rps in RATES:
        given = problem(hardware, paths, rate_rps)
        totals["fa2"].append(replicas(given.stages, given.paths))
        totals["optimal"].append(replicas(given.stages, given.paths, mode="milp"))
        totals["ds2"].append(_total(ds2(given.stages)))
        totals["inferline"].append(_total(inferline(given.stages, given.paths)))
        totals["inferline full"].append(_total(inferline_full(given.stages, given.paths)))
    return Sweep(hardware, paths, {name: tuple(values) for name, values in totals.items()})


def replicas(
    stages: Sequence[Fa2Stage],
    paths: Sequence[IndexedPath],
    *,
    mode: Fa2Mode = "tree",
    ties: Ties = "best",
    polish: bool = False,
) -> int:
    """FA2's total number of replicas, as published (no fallback if no cut graph has a solution); 0 without a
    solution."""
    answer = solve(stages, paths, mode=mode, ties=ties, polish=polish, fallback=False)
    return answer.replicas if isinstance(answer, Fa2Solution) else 0


def _total(choices: Sequence[Fa2Choice]) -> int:
    return sum(choice.replicas for choice in choices)


def offline_rows(sweeps: Sequence[Sweep], *, quick: bool) -> list[Row]:
    """All offline rows, from the sweeps of three paths on cores and of six on GPU slices."""
    cores, slices = sweeps
    return [
        *_sizes(),
        *_chain(),
        *_on_cores(cores),
        *_on_slices(slices),
        _fit(),
        _decision(),
        *_graphs(60 if quick else 400),
    ]


def throughputs() -> dict[str, list[tuple[float, float]]]:
    """(latency in ms, requests/s) of four cores as 4 × 1, 2 × 2 and 1 × 4, for batches of 1 to 9."""
    form = YOLOV5S_S.latency_ms
    curves: dict[str, list[tuple[float, float]]] = {}
    for count, cores in ((4, 1), (2, 2), (1, 4)):
        points = [(batch, form.latency_ms(batch, cores)) for batch in range(1, 10)]
        curves[f"{count} × {cores}"] = [(own_ms, 1000 * count * batch / own_ms) for batch, own_ms in points]
    return curves


def _sizes() -> list[Row]:
    """E0, with an object detector whose profile over cores was published (Sponge's)."""
    curves = throughputs()
    best = {name: max(rate for _, rate in points) for name, points in curves.items()}
    quickest = min(own_ms for own_ms, _ in curves["4 × 1"])
    # At every latency of the small replicas: the largest throughput of each arrangement within that latency.
    within = [
        [max((rate for own, rate in points if own <= limit_ms), default=0.0) for points in curves.values()]
        for limit_ms in (quickest, 2 * quickest, 4 * quickest)
    ]
    note = "a detector whose profile over cores was published"
    rows = []
    for (small, rate), (large, other) in pairwise(best.items()):
        claim = Claim("E0 sizes", f"largest throughput of {small} over {large} cores", "×", note=note)
        rows.append(directed(claim, [rate / other], "smaller replicas have the higher throughput", at_least=1))
    holds = sum(values[0] >= max(values) * (1 - ROUNDING) for values in within)
    metric = "latencies at which the smallest replicas do most"
    claim = Claim("E0 sizes", metric, "of 3", note=note, computed=True)
    return [*rows, bounded(claim, [holds], at_least=3)]


def _chain() -> list[Row]:
    """E0b: OBJD then IMGS at 30 requests/s; the published deadline is not known."""
    forms = models(CPU)
    rows = []
    for slack, derived in ((5.0, (10, 12, 14)), (1.5, (13, 13, 14))):
        stages = [
            Fa2Stage(name, 30.0, tuple(forms[name].latency_ms(batch, 1) for batch in range(1, 17)))
            for name in ("OBJD", "IMGS")
        ]
        paths = [IndexedPath((0, 1), slack * sum(stage.latency_ms[0] for stage in stages))]
        counts = (replicas(stages, paths, mode="milp"), _total(inferline(stages, paths)), _total(ds2(stages)))
        order = (
            ResultLimits(at_most=counts[1]),
            ResultLimits(at_least=counts[0], at_most=counts[2]),
            ResultLimits(at_least=counts[1]),
        )
        for name, count, expected, shape in zip(("optimum", "InferLine", "DS2"), counts, derived, order, strict=True):
            rows.append(
                compare(
                    Claim(
                        "E0b chain",
                        f"replicas of {name}, deadline {slack:g} × the time alone",
                        "replicas",
                        known="exact",
                        derived=expected,
                        note="published: 2 × and 3 × the optimum, at an unknown deadline",
                    ),
                    [count],
                    shape=shape,
                )
            )
    return rows


CORES_AT: Final = (6, 12, 18, 24, 27, 30, 36, 42, 48, 54, 60)
CORES_TOTALS: Final = {
    "fa2": (7, 10, 12, 15, 17, 17, 20, 23, 26, 28, 32),
    "inferline": (7, 10, 15, 17, 20, 20, 24, 29, 31, 34, 37),
    "ds2": (8, 11, 16, 19, 21, 23, 27, 32, 34, 38, 43),
}
SLICES_AT: Final = (6, 8, 10, 12, 18, 24, 27, 30, 36, 42, 48, 54, 60)
SLICES_TOTALS: Final = {
    "optimal": (10, 10, 11, 11, 12, 13, 13, 15, 15, 17, 19, 21, 23),
    "fa2": (10, 10, 11, 11, 12, 13, 13, 15, 15, 18, 19, 21, 23),
    "inferline": (10, 10, 11, 11, 12, 13, 15, 16, 17, 19, 19, 23, 24),
    "ds2": (11, 11, 12, 13, 15, 16, 19, 21, 23, 25, 26, 30, 33),
}
"""Replicas by planner at those rates (specification 7.2, 5); FA2's with the best way to cut the graph."""


RHO: Final = "the share of a batch's duration that its size leaves alone, 0.35 on cores and 0.5 on slices"
"""It decides the surplus of DS2 and InferLine, and is not printed (specification 3.4 and 7.2, 6)."""


def _totals(sweep: Sweep, rates: Sequence[int], totals: Mapping[str, Sequence[int]], experiment: str) -> list[Row]:
    """At how many rates the number of replicas equals the specification's."""
    rows = []
    for planner, expected in totals.items():
        pairs = zip(rates, expected, strict=True)
        found = sum(sweep.totals[planner][RATES.index(rate)] == count for rate, count in pairs)
        metric, count = f"rates with the derived number of replicas, {planner}", len(expected)
        claim = Claim(experiment, metric, f"of {count}", known="exact", derived=count)
        rows.append(compare(claim, [found]))
    return rows


def _surplus(
    sweep: Sweep, experiment: str, planner: str, published: tuple[float, float], derived: tuple[float, float]
) -> list[Row]:
    """Mean and largest surplus of a planner over FA2; published as "on average x %, up to y %"."""
    over = sweep.over(planner)
    rows = []
    for place, (name, value) in enumerate((("mean", fmean(over)), ("largest", max(over)))):
        claim = Claim(
            experiment,
            f"replicas of {planner} beyond FA2's, {name}",
            "%",
            known="text",
            paper=published[place],
            derived=derived[place],
            note="" if place else f"FA2 saves {sweep.saved(planner):.1f} % of the planner's replicas",
            computed=True,
            fitted=RHO,
        )
        rows.append(compare(claim, [value], similar=True))
    return rows


def _on_cores(sweep: Sweep) -> list[Row]:
    """E5: three paths."""
    assert (sweep.hardware, sweep.paths) == (CPU, VISION)
    metric = "rates at which FA2 is the optimum"
    claim = Claim("E5 cores", metric, "%", "exact", paper=96.8, derived=100.0)
    rates = (6, 8, 12, 18, 24, 27)
    problems = [problem(CPU, 6, rate) for rate in rates]
    six = sum(replicas(p.stages, p.paths) == replicas(p.stages, p.paths, mode="milp") for p in problems)
    note = "six paths would need 122 cores at 60 requests/s"
    metric = "rates at which FA2 is the optimum, six paths"
    claim_6 = Claim("E5 cores", metric, "of 6", known="exact", derived=len(rates), note=note)
    return [
        compare(claim, [sweep.exact], shape=ResultLimits(at_least=96.8)),
        *_surplus(sweep, "E5 cores", "inferline", (19, 48), (16.5, 27.3)),
        *_surplus(sweep, "E5 cores", "ds2", (26, 62), (27.9, 40.9)),
        *_totals(sweep, CORES_AT, CORES_TOTALS, "E5 cores"),
        compare(claim_6, [six]),
    ]


def _on_slices(sweep: Sweep) -> list[Row]:
    """E6: six paths."""
    full = fmean(sweep.over("inferline full"))
    claim = Claim(
        "E6 slices",
        "replicas of inferline full beyond FA2's, mean",
        "%",
        note="a planner closer to InferLine's paper should be closer to the optimum, not further from it",
    )
    return [
        *_surplus(sweep, "E6 slices", "inferline", (25, 50), (4.2, 14.3)),
        *_surplus(sweep, "E6 slices", "ds2", (31, 54), (30.8, 53.0)),
        *_totals(sweep, SLICES_AT, SLICES_TOTALS, "E6 slices"),
        directed(claim, [full], "at least as many as FA2", at_least=0),
    ]


def _fit() -> Row:
    """E8: fit of a line and of a parabola to measured P99s over batch sizes, per core count (ResNet18 from Sponge)."""
    gains = []
    sizes = (1, 2, 4, 8, 16)
    batches = np.array(sizes, float)
    for cores in (1, 2, 4, 8, 16, 32):
        latencies = np.array([RESNET18_HUMAN.latency_ms.latency_ms(size, cores) for size in sizes])
        errors = [
            float(np.mean((np.polyval(np.polyfit(batches, latencies, degree), batches) - latencies) ** 2))
            for degree in (1, 2)
        ]
        gains.append(errors[0] / max(errors[1], 1e-9))
    claim = Claim(
        "E8 fit",
        "squared error of a line over that of a parabola, median",
        "×",
        note=f"{RESNET18_HUMAN.source}; FA2's own measurements are not public",
    )
    return directed(claim, [median(gains)], "a parabola fits much better", above=1.5)


def _decision() -> Row:
    """E9: CPU time of a decision on this machine."""
    taken = []
    for rate_rps in RATES[::3]:
        given = problem(CPU, 6, rate_rps)
        started_ns = time.process_time_ns()
        solve(given.stages, given.paths, polish=True)
        taken.append((time.process_time_ns() - started_ns) / 1e6)
    note = f"published: 500 ms; ten stages, six paths, 25.7 s in steps of 1 ms; slowest {max(taken):.1f} ms"
    claim = Claim("E9 decision", "one decision, median", "ms", note=note, computed=True)
    return bounded(claim, [median(taken)], at_most=20.0)


SETTINGS: Final[tuple[tuple[str, Fa2Mode, Ties, tuple[float, float, float]], ...]] = (
    ("tree, one way to cut", "tree", "first", (81, 5, 2.3)),
    ("tree, all ways to cut", "tree", "best", (88, 2, 1.4)),
    ("paper, one way to cut", "paper", "first", (48, 26, 7.5)),
    ("paper, all ways to cut", "paper", "best", (70, 8, 4.2)),
)
GRAPHS: Final = ("random graphs with the optimum", "random graphs without an answer", "replicas beyond the optimum")
"""The three metrics of random graphs; the derived figures of each setting are in this order, in percent."""


def _graphs(cases: int) -> list[Row]:
    """7.2, 2: random graphs in which paths merge. How often FA2's forest finds the optimum, how often it finds no
    solution although one exists, and its surplus of replicas otherwise. The error comes from the number of graphs."""
    draw = stream(0, "fa2/graphs")
    graphs = [graph_of(draw) for _ in range(cases)]
    best = [replicas(*graph, mode="milp") for graph in graphs]
    found = [
        _against(best, [replicas(*graph, mode=mode, ties=ties) for graph in graphs]) for _, mode, ties, _ in SETTINGS
    ]
    rows = []
    for (name, _, _, derived), samples in zip(SETTINGS, found, strict=True):
        for place, what in enumerate(GRAPHS):
            metric, note = f"{what}, {name}", f"{cases} graphs, derived from others"
            claim = Claim("check 7.2", metric, "%", derived=derived[place], note=note)
            error = stdev(samples[place]) / math.sqrt(len(samples[place]))
            rows.append(compare(claim, [fmean(samples[place])], similar=True, runs=cases, error=error))
    polished = fmean(_against(best, [replicas(*graph, polish=True) for graph in graphs])[0])
    metric = f"{GRAPHS[0]}, tree, all ways to cut, polished"
    claim = Claim("check 7.2", metric, "%", note=f"{cases} graphs")
    return [*rows, directed(claim, [polished], "better than unpolished", above=fmean(found[1][0]))]


def _against(best: Sequence[int], found: Sequence[int]) -> tuple[list[float], list[float], list[float]]:
    """Per graph, in percent: 100 if it is the optimum, 100 if there is no solution, and the surplus if there is one."""
    exact = [100.0 * (own == least) for own, least in zip(found, best, strict=True)]
    excess = [100 * (own / least - 1) for own, least in zip(found, best, strict=True) if own]
    return exact, [100.0 * (own == 0) for own in found], excess


def graph_of(draw: Random) -> tuple[list[Fa2Stage], list[IndexedPath]]:
    """A random graph: four to eight stages, two to five paths, deadlines of five times the latency at batch 1."""
    count, wanted = draw.randint(4, 8), draw.randint(2, 5)
    chains: set[tuple[int, ...]] = set()
    while len(chains) < wanted:
        chains.add(tuple(sorted(draw.sample(range(count), draw.randint(2, min(5, count))))))
    costs = []
    for _ in range(count):
        alone_ms, rho, kappa = draw.uniform(20, 400), draw.uniform(0.2, 0.6), draw.uniform(0, 0.01)
        costs.append(tuple(alone_ms * (kappa * b * b + (1 - rho - kappa) * b + rho) for b in range(1, 17)))
    ordered = sorted(chains)
    rates = {chain: draw.uniform(0.5, 5) for chain in ordered}
    used = sorted({stage for chain in ordered for stage in chain})
    stages = [Fa2Stage(f"s{at}", sum(rates[own] for own in ordered if at in own), costs[at]) for at in used]
    paths = [IndexedPath(tuple(used.index(at) for at in own), 5 * sum(costs[at][0] for at in own)) for own in ordered]
    return stages, paths
