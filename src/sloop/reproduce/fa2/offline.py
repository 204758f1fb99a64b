"""What of FA2 can be checked without a simulation: sweeps of rates, the motivating examples, the fit, the solver.

Experiments are named as in the specification: E0 sizes of replicas, E0b a chain of two, E5 and E6 the sweeps, E8 the
model of d(b), E9 the time of a decision; 7.2 its deterministic checks. Source: Razavi et al., FA2 (RTAS 2022).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean, median
from typing import Final

import numpy as np

from sloop.profile.published import RESNET18_HUMAN, YOLOV5S_S
from sloop.reproduce.fa2.application import CPU, VISION, Hardware, models, problem
from sloop.reproduce.rows import Claim, Row, bounded, equals, shaped
from sloop.reproduce.sponge.offline import grid_points
from sloop.solvers.fa2 import Answer, Choice, Mode, Stage, solve
from sloop.solvers.fa2_baselines import ds2, inferline, inferline_full
from sloop.solvers.graph import Ties, Way
from sloop.streams import stream

RATES: Final = tuple(range(6, 61))
PLANNERS: Final = ("optimal", "fa2", "inferline", "inferline full", "ds2")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Replicas at every rate of `RATES`, by planner."""

    hardware: Hardware
    paths: int
    totals: dict[str, tuple[int, ...]]

    def over(self, planner: str) -> list[float]:
        """By how many percent more than FA2, at each rate."""
        pairs = zip(self.totals[planner], self.totals["fa2"], strict=True)
        return [100 * (theirs / own - 1) for theirs, own in pairs]

    def saved(self, planner: str) -> float:
        """What FA2 saves of the planner's replicas on average, in percent."""
        pairs = zip(self.totals[planner], self.totals["fa2"], strict=True)
        return mean(100 * (1 - own / theirs) for theirs, own in pairs)

    @property
    def exact(self) -> float:
        """Share of the rates at which FA2 is the optimum, in percent."""
        pairs = zip(self.totals["fa2"], self.totals["optimal"], strict=True)
        return mean(100.0 * (own == best) for own, best in pairs)


def swept(hardware: Hardware, paths: int) -> Sweep:
    """Every planner at every rate."""
    totals: dict[str, list[int]] = {name: [] for name in PLANNERS}
    for rate_rps in RATES:
        given = problem(hardware, paths, rate_rps)
        totals["fa2"].append(replicas(given.stages, given.ways))
        totals["optimal"].append(replicas(given.stages, given.ways, mode="milp"))
        totals["ds2"].append(_total(ds2(given.stages)))
        totals["inferline"].append(_total(inferline(given.stages, given.ways)))
        totals["inferline full"].append(_total(inferline_full(given.stages, given.ways)))
    return Sweep(hardware, paths, {name: tuple(values) for name, values in totals.items()})


def replicas(
    stages: Sequence[Stage], ways: Sequence[Way], *, mode: Mode = "tree", ties: Ties = "best", polish: bool = False
) -> int:
    """FA2's sum, as published (no help from elsewhere where cuts leave nothing); 0 where it finds nothing."""
    answer = solve(stages, ways, mode=mode, ties=ties, polish=polish, fallback=False)
    return answer.replicas if isinstance(answer, Answer) else 0


def rows(sweeps: Sequence[Sweep], *, quick: bool) -> list[Row]:
    """Everything here, from the sweeps of three paths on cores and of six on slices."""
    cores, slices = sweeps
    return [
        *_sizes(),
        *_chain(),
        *_on_cores(cores),
        *_on_slices(slices),
        *_fit(),
        *_decision(),
        *_graphs(60 if quick else 400),
    ]


def _total(choices: Sequence[Choice]) -> int:
    return sum(choice.replicas for choice in choices)


def throughputs() -> dict[str, list[tuple[float, float]]]:
    """(latency in ms, requests/s) of four cores as 4 × 1, 2 × 2 and 1 × 4, for batches of 1 to 9."""
    form = YOLOV5S_S.latency_ms
    shown: dict[str, list[tuple[float, float]]] = {}
    for count, cores in ((4, 1), (2, 2), (1, 4)):
        points = [(batch, form.latency_ms(batch, cores)) for batch in range(1, 10)]
        shown[f"{count} × {cores}"] = [(own_ms, 1000 * count * batch / own_ms) for batch, own_ms in points]
    return shown


def _sizes() -> list[Row]:
    """E0, with an object detector whose profile over cores was published (Sponge's)."""
    shown = throughputs()
    best = {name: max(rate for _, rate in points) for name, points in shown.items()}
    ordered = best["4 × 1"] >= best["2 × 2"] >= best["1 × 4"]
    quickest = min(own_ms for own_ms, _ in shown["4 × 1"])
    # At every latency that small replicas reach, the most that each arrangement does within it.
    within = [
        [max((rate for own, rate in points if own <= limit_ms), default=0.0) for points in shown.values()]
        for limit_ms in (quickest, 2 * quickest, 4 * quickest)
    ]
    note = "a detector with a published profile over cores; at the latency of one request alone batches win"
    made = [
        shaped(
            Claim(experiment="E0", metric=f"most throughput as {name}", unit="requests/s", note=note),
            [rate],
            shape=ordered,
            expect="the smallest replicas do most",
        )
        for name, rate in best.items()
    ]
    holds = sum(values[0] >= max(values) * (1 - 1e-9) for values in within)
    claim = Claim(experiment="E0", metric="latencies at which the smallest do most", unit="of 3", paper=3, note=note)
    return [*made, equals(claim, [holds], within=0, shape=ordered)]


def _chain() -> list[Row]:
    """E0b: OBJD then IMGS at 30 requests/s; the published deadline is not known."""
    forms = models(CPU)
    made = []
    for slack, derived in ((5.0, (10, 12, 14)), (1.5, (13, 13, 14))):
        stages = [
            Stage(name, 30.0, tuple(forms[name].latency_ms(batch, 1) for batch in range(1, 17)))
            for name in ("OBJD", "IMGS")
        ]
        ways = [Way((0, 1), slack * sum(stage.latency_ms[0] for stage in stages))]
        counts = (
            replicas(stages, ways, mode="milp"),
            _total(inferline(stages, ways)),
            _total(ds2(stages)),
        )
        for name, count, expected in zip(("optimal", "InferLine", "DS2"), counts, derived, strict=True):
            note = f"deadline {slack:g} × the time alone; published are 2 × and 3 × at an unknown one"
            claim = Claim(experiment="E0b", metric=f"replicas, {name}", unit="", derived=expected, note=note)
            made.append(equals(claim, [count], within=0, shape=counts[0] <= counts[1] <= counts[2]))
    return made


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
"""Of the specification's §7.2-5, by planner, at those rates; FA2's are those of the best way to cut."""


def _same(sweep: Sweep, rates: Sequence[int], totals: Mapping[str, Sequence[int]], experiment: str) -> list[Row]:
    """How many of the specification's totals come out to the unit."""
    made = []
    for planner, expected in totals.items():
        pairs = zip(rates, expected, strict=True)
        found = sum(sweep.totals[planner][RATES.index(rate)] == count for rate, count in pairs)
        claim = Claim(
            experiment=experiment, metric=f"totals of {planner} to the unit", unit="rates", derived=len(expected)
        )
        made.append(equals(claim, [found], within=0))
    return made


def _compared(
    sweep: Sweep,
    experiment: str,
    planner: str,
    published: tuple[float, float],
    derived: tuple[float, float],
    bounds: tuple[tuple[float, float], tuple[float, float]],
) -> list[Row]:
    """Mean and largest surplus of a planner over FA2, and the mean as a saving."""
    over = sweep.over(planner)
    made = []
    for place, (name, value) in enumerate((("mean", mean(over)), ("largest", max(over)))):
        claim = Claim(
            experiment=experiment,
            metric=f"{planner} over FA2, {name}",
            unit="%",
            paper=published[place],
            derived=derived[place],
            note="" if place else f"FA2 saves {sweep.saved(planner):.1f} % of it",
        )
        low, high = bounds[place]
        made.append(bounded(claim, [value], at_least=low, at_most=high, shape=value > 0))
    return made


def _on_cores(sweep: Sweep) -> list[Row]:
    """E5: three paths."""
    assert (sweep.hardware, sweep.paths) == (CPU, VISION)
    claim = Claim(experiment="E5", metric="rates at which FA2 is the optimum", unit="%", paper=96.8, derived=100.0)
    six = [
        replicas((given := problem(CPU, 6, rate)).stages, given.ways) == replicas(given.stages, given.ways, mode="milp")
        for rate in (6, 8, 12, 18, 24, 27)
    ]
    note = "six paths would need 122 cores at 60 requests/s"
    return [
        bounded(claim, [sweep.exact], at_least=94.0),
        *_compared(sweep, "E5", "inferline", (19, 48), (16.5, 27.3), ((12, 22), (25, 50))),
        *_compared(sweep, "E5", "ds2", (26, 62), (27.9, 40.9), ((20, 35), (35, 65))),
        *_same(sweep, CORES_AT, CORES_TOTALS, "E5"),
        equals(
            Claim(experiment="E5", metric="six paths: optimum", unit="rates", derived=6, note=note),
            [sum(six)],
            within=0,
        ),
    ]


def _on_slices(sweep: Sweep) -> list[Row]:
    """E6: six paths."""
    made = [
        *_compared(sweep, "E6", "inferline", (25, 50), (4.2, 14.3), ((20, 30), (40, 60))),
        *_compared(sweep, "E6", "ds2", (31, 54), (30.8, 53.0), ((22, 45), (45, 65))),
        *_same(sweep, SLICES_AT, SLICES_TOTALS, "E6"),
    ]
    full = mean(sweep.over("inferline full"))
    claim = Claim(
        experiment="E6",
        metric="inferline full over FA2, mean",
        unit="%",
        note="a planner nearer to InferLine's own paper is closer to the optimum, not further from it",
    )
    return [*made, shaped(claim, [full], shape=full >= 0, expect="at least as many as FA2")]


def _fit() -> list[Row]:
    """E8: how well a line and a parabola follow measured P99s, over batches at the same cores (ResNet18, Sponge's)."""
    gains = []
    points = grid_points()
    for cores in sorted({point.cores for point in points}):
        own = sorted((point.batch, point.latency_ms) for point in points if point.cores == cores)
        batches, latencies = np.array([b for b, _ in own], float), np.array([value for _, value in own])
        errors = [
            float(np.mean((np.polyval(np.polyfit(batches, latencies, degree), batches) - latencies) ** 2))
            for degree in (1, 2)
        ]
        gains.append(errors[0] / max(errors[1], 1e-9))
    claim = Claim(
        experiment="E8",
        metric="squared error of a line over that of a parabola, median",
        unit="×",
        note=f"{RESNET18_HUMAN.source}; FA2's own measurements are not to be had",
    )
    return [shaped(claim, [median(gains)], shape=median(gains) > 1.5, expect="a parabola follows much better")]


def _decision() -> list[Row]:
    """E9: processor time on this machine, whatever it is and whatever else it does."""
    taken = []
    for rate_rps in RATES[::3]:
        given = problem(CPU, 6, rate_rps)
        started_ns = time.process_time_ns()
        solve(given.stages, given.ways, polish=True)
        taken.append((time.process_time_ns() - started_ns) / 1e6)
    note = f"ten stages, six paths, a deadline of 25.7 s in milliseconds; slowest {max(taken):.1f} ms"
    claim = Claim(experiment="E9", metric="one decision, median", unit="ms", paper=500, note=note)
    return [bounded(claim, [median(taken)], at_most=20.0)]


def _graphs(cases: int) -> list[Row]:
    """Random graphs in which paths meet (§7.2-2): how often a forest has the optimum, or none of the answers there are,
    and how many replicas too many otherwise."""
    draw = stream(0, "fa2/graphs")
    graphs = [graph_of(draw) for _ in range(cases)]
    best = [replicas(*graph, mode="milp") for graph in graphs]
    settings: tuple[tuple[str, Mode, Ties, tuple[float, float, float]], ...] = (
        ("tree, one way to cut", "tree", "first", (81, 5, 2.3)),
        ("tree, all ways to cut", "tree", "best", (88, 2, 1.4)),
        ("paper, one way to cut", "paper", "first", (48, 26, 7.5)),
        ("paper, all ways to cut", "paper", "best", (70, 8, 4.2)),
    )
    rows, exact = [], 0.0
    for name, mode, ties, derived in settings:
        found = _against(best, [replicas(*graph, mode=mode, ties=ties) for graph in graphs])
        exact = exact or found[0]
        for what, share, wanted, within in zip(GRAPHS, found, derived, (10.0, 10.0, 3.0), strict=True):
            claim = Claim(experiment="7.2", metric=f"{what}, {name}", unit="%", derived=wanted, note=f"{cases} graphs")
            rows.append(equals(claim, [share], within=within))
    polished = _against(best, [replicas(*graph, polish=True) for graph in graphs])
    claim = Claim(
        experiment="7.2",
        metric=f"{GRAPHS[0]}, tree, all ways, polished",
        unit="%",
        derived=None,
        note=f"{cases} graphs",
    )
    return [*rows, shaped(claim, [polished[0]], shape=polished[0] >= exact, expect="better than without")]


GRAPHS: Final = ("optimum on random graphs", "no answer on random graphs", "replicas too many on random graphs")


def _against(best: Sequence[int], found: Sequence[int]) -> tuple[float, float, float]:
    """In percent: how often it is the best, how often there is none, and the mean excess of those there are."""
    there = [own / least - 1 for own, least in zip(found, best, strict=True) if own]
    exact = sum(own == least for own, least in zip(found, best, strict=True))
    return 100 * exact / len(best), 100 * (1 - len(there) / len(best)), 100 * mean(there)


def graph_of(draw: Random) -> tuple[list[Stage], list[Way]]:
    """Four to eight stages, two to five paths over any of them, five times the time alone."""
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
    stages = [Stage(f"s{at}", sum(rates[own] for own in ordered if at in own), costs[at]) for at in used]
    ways = [Way(tuple(used.index(at) for at in own), 5 * sum(costs[at][0] for at in own)) for own in ordered]
    return stages, ways
