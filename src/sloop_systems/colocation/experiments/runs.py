"""Placements of the colocation thesis on its serving stack, simulated: experiments E1, E1c, E2, E3 and E3b.

A cell is an experiment with one number of GPUs, one rate and one deadline; in each, every policy places the models, and
its placement serves the same arrivals. The factor on all durations, κ, is not known: the specification fits it to two
published numbers, which no single value meets, so every cell is simulated with several. Source: Elvinger (ETH Zurich,
MSc thesis 505, 2024), chapter 6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from statistics import fmean
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from sloop.api.solvers import BatchOption, Content, DeviceKind, HarborProblem, PlacedModel, hundredths, place_models
from sloop_systems.colocation import igniter, usher
from sloop_systems.colocation.experiments.offline import igniter_workloads
from sloop_systems.colocation.experiments.router import SERVING, achieved_rps, run_all
from sloop_systems.colocation.experiments.scene import (
    AO,
    LANGUAGE_MIX,
    MIXED,
    USHER_GROUPS,
    VISION,
    WAO,
    WSM,
    models_of,
    named,
    placed_models,
)
from sloop_systems.colocation.milp import SHARES_ARE_LIMITS, most_goodput
from sloop_systems.colocation.published import IGNITER_V100, V100_ROWS
from sloop_systems.comparison.harness import UNSEEN

Policy = Literal[
    "usher", "usher-wao", "ao-milp", "ao-milp, large batches", "wsm-milp", "igniter", "harbor", "harbor, unmeasured"
]
OURS: Final[Policy] = "harbor"
"""Our planner when it has measured κ; in core and simulator, it measures κ during a warm-up (`simulated`)."""
UNMEASURED: Final[Policy] = "harbor, unmeasured"
"""Our planner before it has measured κ: it expects 1.18."""
BASELINES: Final[tuple[Policy, ...]] = ("usher", "usher-wao", "ao-milp", "wsm-milp", "igniter")
LARGE: Final[Policy] = "ao-milp, large batches"
"""AO-MILP that breaks ties to large batches, as the thesis's solver seems to have done in E1."""
SLOWER: Final = (1.0, 1.1, 1.18)
"""κ: how many times as long inferences take on the host of the thesis. 1.18 is what our planner expects."""
SLOWER_E1: Final = 1.18
"""Fitted to two rows of E1 on six GPUs, between the 1.145 and 1.205 that they ask for."""
SEEDS: Final = 10
SECONDS: Final = 8
"""Requests of each model, at its target rate."""
SMALL: Final = 1e-4
TOTALS: Final = (1000, 2000, 3000, 4000, 5000)
SLOS_MS: Final = (150.0, 250.0, 350.0)


class Cell(Struct, frozen=True):
    """Models with target rates and a deadline, on a number of GPUs."""

    experiment: str
    names: tuple[str, ...]
    targets_rps: tuple[float, ...]
    overhead_ms: float
    """By how much each request is sent late; the models achieve a lower rate than the target."""
    slo_ms: float
    gpus: int

    @property
    def rates_rps(self) -> tuple[float, ...]:
        """What the clients achieve."""
        return tuple(achieved_rps(target, self.overhead_ms) for target in self.targets_rps)

    @property
    def requests(self) -> tuple[int, ...]:
        """Of each model."""
        return tuple(round(SECONDS * target) for target in self.targets_rps)

    @property
    def total_rps(self) -> float:
        """All target rates together."""
        return sum(self.targets_rps)

    def placed(self) -> tuple[PlacedModel, ...]:
        """The models at the rates that they achieve."""
        return placed_models(self.names, self.rates_rps, self.slo_ms)

    def __str__(self) -> str:
        if self.experiment.startswith("drawn"):
            return self.experiment
        if self.experiment.startswith("E3"):
            return f"{self.experiment}@{self.total_rps:g} {self.slo_ms:g} ms"
        return f"{self.experiment}@{self.gpus}"


E1_OVERHEAD_MS: Final = 1000 / 433.34 - 1000 / 500
"""With which 500 requests/s become the 433.34 of the thesis."""
E2_OVERHEAD_MS: Final = 1000 / 276 - 1000 / 300


def e1(gpus: int) -> Cell:
    """Five vision models at 500 requests/s each."""
    return Cell("E1", VISION, (500.0,) * 5, E1_OVERHEAD_MS, 200.0, gpus)


def e1c(gpus: int) -> Cell:
    """The same at 1000 requests/s each."""
    return Cell("E1c", VISION, (1000.0,) * 5, E1_OVERHEAD_MS, 200.0, gpus)


def e2(gpus: int) -> Cell:
    """Two vision and two language models at 300 requests/s each."""
    return Cell("E2", MIXED, (300.0,) * 4, E2_OVERHEAD_MS, 300.0, gpus)


def e3(total_rps: float, slo_ms: float) -> Cell:
    """The models of E1 on four GPUs."""
    return Cell("E3", VISION, (total_rps / 5,) * 5, 0.2, slo_ms, 4)


def e3b(total_rps: float, slo_ms: float) -> Cell:
    """Three vision models with twice the rate of each of two language models."""
    targets = tuple(total_rps * part for part in (1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 8))
    return Cell("E3b", LANGUAGE_MIX, targets, 0.2, slo_ms, 4)


MAIN: Final = (
    *(e1(gpus) for gpus in range(1, 7)),
    *(e2(gpus) for gpus in range(1, 9)),
    *(e3(total, slo_ms) for slo_ms in SLOS_MS for total in TOTALS),
)
"""The 29 cells on which policies are compared."""
MORE: Final = (
    *(e1c(gpus) for gpus in range(1, 9)),
    *(e3b(total, slo_ms) for slo_ms in SLOS_MS for total in TOTALS),
)


DRAWN_SLOWER: Final = (1.0, 1.3)


def drawn(number: int) -> Cell:
    """A cell at random: two to six models of Table A.1 with rates of their own, on one to eight GPUs that are loaded to
    40 to 130 % if every model has batches of 8 and half of its deadline suffices for them. Clients achieve what they
    aim at. Numbers count from the first seed that nothing was chosen with."""
    random = Random(f"cell {UNSEEN + number}")
    slo_ms = random.choice((100.0, 150.0, 200.0, 300.0, 400.0, 600.0))
    by_latency = {name: {row.batch: row.latency_ms for row in rows} for name, rows in V100_ROWS.items()}
    able = [name for name, latency_ms in by_latency.items() if 2 * latency_ms[8] < slo_ms]
    names = tuple(sorted(random.sample(able, random.randint(2, 6))))
    gpus = random.randint(1, 8)
    weights = [random.uniform(0.2, 1.0) for _ in names]
    load = gpus * random.uniform(0.4, 1.3) / sum(weights)
    rates = (round(load * weight * 8000 / by_latency[name][8], 1) for name, weight in zip(names, weights, strict=True))
    return Cell(f"drawn {number}", names, tuple(rates), 0.0, slo_ms, gpus)


DRAWN: Final = tuple(drawn(number) for number in range(1, 31))
"""Cells that nothing was fitted to."""


class PlacementTrial(Struct, frozen=True):
    """One policy in one cell, with all factors and seeds."""

    cell: Cell
    policy: Policy
    slower: tuple[float, ...]
    seeds: int
    first_seed: int = 0

    def __str__(self) -> str:
        return f"{self.cell}: {self.policy}"


class PlacementRuns(Struct, frozen=True):
    """What a placement serves in time, by factor, seed and model, in requests/s."""

    good_rps: tuple[tuple[tuple[float, ...], ...], ...]
    served_rps: tuple[tuple[tuple[float, ...], ...], ...]
    expected_rps: tuple[float, ...]
    """What its planner expected, by factor."""
    contents: tuple[tuple[str, ...], ...]
    """Of the devices, as `resnet50 b4 + vgg19 b16`, by factor."""


class FoundPlacement(NamedTuple):
    """The contents of the devices, and the goodput that the planner expects."""

    contents: tuple[Content, ...]
    expected_rps: float


def placement(cell: Cell, policy: Policy, slower: float = SERVING.slower) -> FoundPlacement:
    """The placement that a policy plans. Our planner plans for the rates that the clients achieve and, if it has
    measured κ, for κ (`slower`); the others plan for the target rates, without κ."""
    if policy in {OURS, UNMEASURED}:
        serving = replace(SERVING, slower=slower) if policy == OURS else SERVING
        found = place_models(HarborProblem(cell.placed(), (DeviceKind("V100", cell.gpus),), serving))
        return FoundPlacement(tuple(content for _, content in found.contents), found.total_rps)
    if policy == "igniter":
        return _by_igniter(cell)
    metric = {"usher": AO, "usher-wao": WAO, "wsm-milp": WSM}.get(policy, AO)
    models = models_of(cell.names, cell.targets_rps, cell.slo_ms, metric)
    if policy in {"usher", "usher-wao"}:
        plan = usher.plan(models, cell.gpus, groups=USHER_GROUPS.get((metric, cell.names)))
    else:
        plan = most_goodput(models, cell.gpus, small=-SMALL if policy == LARGE else SMALL)
    return FoundPlacement(plan.contents, plan.total_rps)


def _by_igniter(cell: Cell) -> FoundPlacement:
    """iGniter's plan for an unlimited cluster, reduced to the first GPUs of the plan (2.1.5). Batches that were not
    profiled, because a GPU has too little memory for them, are replaced by the largest profiled one."""
    workloads = igniter_workloads(cell.names, cell.targets_rps, cell.slo_ms)
    planned = igniter.plan(IGNITER_V100, workloads, check_new=False)[: cell.gpus]
    names, models = list(cell.names), cell.placed()
    contents, expected_rps = [], 0.0
    for own in planned:
        content = []
        for replica in own:
            at = names.index(replica.workload.name)
            batch = min(replica.batch, models[at].options[0][-1].batch)
            alone_ms = models[at].latency_ms(0, batch)
            content.append((at, BatchOption(batch, alone_ms, 1000.0 * batch / alone_ms, hundredths(replica.share), 0)))
            expected_rps += replica.rate_rps
        contents.append(tuple(sorted(content, key=lambda each: each[0])))
    return FoundPlacement(tuple(contents), expected_rps)


def play(trial: PlacementTrial) -> PlacementRuns:
    """Place the models and simulate their requests."""
    cell, models = trial.cell, trial.cell.placed()
    good, served, expected_rps, labels = [], [], [], []
    found = placement(cell, trial.policy)
    for slower in trial.slower:
        if trial.policy == OURS:
            found = placement(cell, trial.policy, slower)
        expected_rps.append(found.expected_rps)
        labels.append(tuple(" + ".join(content) for content in named(models, found.contents)))
        runs = [
            run_all(
                models,
                found.contents,
                seed,
                slower=slower,
                requests=cell.requests,
                is_limited=SHARES_ARE_LIMITS.get(trial.policy, False),
            )
            for seed in range(trial.first_seed, trial.first_seed + trial.seeds)
        ]
        good.append(tuple(tuple(each.good_rps for each in run) for run in runs))
        served.append(tuple(tuple(each.served_rps for each in run) for run in runs))
    return PlacementRuns(tuple(good), tuple(served), tuple(expected_rps), tuple(labels))


def wanted(*, quick: bool) -> list[PlacementTrial]:
    """All trials; `quick` plays one seed, and only the cells on which policies are compared."""
    seeds = 1 if quick else SEEDS
    trials = [PlacementTrial(cell, policy, SLOWER, seeds) for cell in MAIN for policy in (*BASELINES, OURS, UNMEASURED)]
    trials += [PlacementTrial(e1(gpus), LARGE, SLOWER, seeds) for gpus in range(1, 7)]
    if not quick:
        trials += [
            PlacementTrial(cell, policy, DRAWN_SLOWER, SEEDS, UNSEEN) for cell in DRAWN for policy in (*BASELINES, OURS)
        ]
        trials += [
            PlacementTrial(cell, policy, (1.0,), SEEDS)
            for cell in MORE
            for policy in ("usher", "ao-milp", "wsm-milp", OURS)
        ]
    return trials


@dataclass(frozen=True)
class Placements:
    """Results by cell and policy."""

    found: dict[tuple[Cell, str], tuple[PlacementTrial, PlacementRuns]]

    @classmethod
    def of(cls, trials: Sequence[PlacementTrial], runs: Sequence[PlacementRuns]) -> "Placements":
        """The results in the order of the trials."""
        pairs = zip(trials, runs, strict=True)
        return cls({(trial.cell, trial.policy): (trial, run) for trial, run in pairs})

    @cached_property
    def seeds(self) -> int:
        """How many each cell was simulated with."""
        return next(iter(self.found.values()))[0].seeds

    def contents(self, cell: Cell, policy: str, slower: float = 1.0) -> tuple[str, ...]:
        """Of the devices."""
        trial, runs = self.found[cell, policy]
        return runs.contents[trial.slower.index(slower)]

    def expected(self, cell: Cell, policy: str, slower: float = 1.0) -> float:
        """What the planner expected of all models."""
        trial, runs = self.found[cell, policy]
        return runs.expected_rps[trial.slower.index(slower)]

    def has(self, cell: Cell, policy: str) -> bool:
        """Whether the policy was simulated in the cell."""
        return (cell, policy) in self.found

    def good(self, cell: Cell, policy: str, slower: float = 1.0) -> list[float]:
        """Goodput of all models, by seed."""
        return [sum(by_model) for by_model in self._by_seed(cell, policy, slower)]

    def good_of(self, cell: Cell, policy: str, name: str, slower: float = 1.0) -> list[float]:
        """Goodput of one model, by seed."""
        at = cell.names.index(name)
        return [by_model[at] for by_model in self._by_seed(cell, policy, slower)]

    def served_of(self, cell: Cell, policy: str, name: str, slower: float = 1.0) -> list[float]:
        """Throughput of one model, by seed."""
        trial, runs = self.found[cell, policy]
        at = cell.names.index(name)
        return [by_model[at] for by_model in runs.served_rps[trial.slower.index(slower)]]

    def mean(self, cell: Cell, policy: str, slower: float = 1.0) -> float:
        """Mean goodput of all models."""
        return fmean(self.good(cell, policy, slower))

    def best(self, cell: Cell, slower: float, policies: Sequence[str] = BASELINES) -> str:
        """The policy with the highest mean."""
        return max(policies, key=lambda policy: self.mean(cell, policy, slower))

    def _by_seed(self, cell: Cell, policy: str, slower: float) -> tuple[tuple[float, ...], ...]:
        trial, runs = self.found[cell, policy]
        return runs.good_rps[trial.slower.index(slower)]

    def cells(self, experiment: str) -> Iterator[Cell]:
        """The cells of one experiment, in order."""
        yield from dict.fromkeys(cell for cell, _ in self.found if cell.experiment == experiment)
