"""Scaling policies that resize replicas in place: `Biscale`, and `Vertical`, which never changes their number.

Biscale (Razavi, dissertation, TU Darmstadt 2024, chapter P4; the same system is Themis, arXiv 2407.14843) is based on
two facts: a resize takes a tenth of a second, a start several seconds; and replicas of one core give the most
throughput per core. When the arrival rate exceeds the capacity of the replicas, it enlarges all of them at once, and
starts more if that does not suffice. When the rate has been steady for `settle` decisions, it starts small replicas,
and shrinks the large ones when the small ones are ready: two plans, so that capacity never falls before its replacement
is ready. It fails if a model gains nothing from more cores, and wastes starts on surges that are soon over.

First come the functions that turn a cluster view into a problem of `sloop.solvers.biscale`: replica sizes are multiples
of a unit, up to the limits of node and profile, and graphs whose paths meet are cut as in FA2 (`sloop.solvers.budget`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Final, Literal

import numpy as np
from msgspec import structs

from sloop.core.views import Belief, ClusterView, NodeView, ReplicaView, StageView
from sloop.options import check_range
from sloop.policies import targets
from sloop.solvers.biscale import (
    BiscaleChoice,
    BiscaleProblem,
    BiscaleSplit,
    BiscaleStage,
    ReplicaGroups,
    StageReplicas,
    Throughput,
    replicas_carry,
    small_first,
    total_units,
    with_small,
)
from sloop.solvers.budget import IndexedPath, Segment, forests, is_exact
from sloop.solvers.forecasting import seconds_rps
from sloop.solvers.queueing import patience_ns
from sloop.text import counted
from sloop.units import NS_PER_S, ROUNDING, s
from sloop.vocabulary import Group, Life, Plan, ReplicaSpec, StagePlan

CUTS_MAX: Final = 4
"""The most ways to cut a graph whose paths meet; each takes as much time to solve as a chain."""
SLOTS_MAX: Final = 5_000
"""The most slots of the longest deadline. Longer deadlines get coarser slots, so that a decision takes less than 100
ms."""
PROBLEMS_KEPT: Final = 1_024
"""More than there are applications in one deployment."""
REFERENCE_S: Final = 10
"""Seconds in which to look for the busiest second, the reference rate. The publication compares the mean rate of two
seconds with a maximum predicted for the next ten, so that with ordinary noise the load hardly ever looks steady."""


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Replicas have 1 to `cores_max` units of `unit` cores, batches 1 to `batch_max` requests."""

    unit: float
    cores_max: int
    batch_max: int
    throughput: Throughput
    margin: float
    """Fraction of each deadline to plan with."""
    variant: str


@dataclass(frozen=True, slots=True)
class BiscaleModel:
    """One cluster view as Biscale's problem, and the conversion of its solutions into plans."""

    problem: BiscaleProblem
    """Its `cores_total` counts the units of all nodes, free or not."""
    stages: tuple[StageView, ...]
    beliefs: tuple[Belief, ...]
    unit: float
    feasible: bool
    """Whether any rate exists at which the deadlines can be kept."""

    @property
    def cores_total(self) -> float:
        """Cores of all nodes."""
        return self.problem.cores_total * self.unit

    def stage_plan(self, index: int, groups: Sequence[tuple[int, int]], batch: int, wait_ms: float = 0.0) -> StagePlan:
        """The plan of one stage: groups of (replicas, units each), and batches that fill within `wait_ms`."""
        stage, belief = self.stages[index], self.beliefs[index]
        counts: dict[int, int] = {}
        for count, units in groups:
            counts[units] = counts.get(units, 0) + count
        made = tuple(
            Group(ReplicaSpec(stage.name, belief.variant, belief.slot(units * self.unit)), count)
            for units, count in sorted(counts.items(), reverse=True)
            if count
        )
        return StagePlan(stage.name, made, batch, wait_ns=patience_ns(wait_ms, stage.slo_ns))

    def plans(
        self, choices: Sequence[BiscaleChoice], groups: Sequence[ReplicaGroups] | None = None
    ) -> tuple[StagePlan, ...]:
        """Plans with the batches of the choices, and with their replicas unless `groups` overrides them."""
        groups = groups or [[(choice.replicas, choice.cores)] for choice in choices]
        return tuple(
            self.stage_plan(index, own, choice.batch, choice.wait_ms)
            for index, (own, choice) in enumerate(zip(groups, choices, strict=True))
        )

    def with_groups(self, index: int, groups: Sequence[tuple[int, int]], plan: StagePlan) -> StagePlan:
        """The stage's `plan` with other replicas and the same batches."""
        return structs.replace(self.stage_plan(index, groups, plan.batch_max), wait_ns=plan.wait_ns)

    def quickest(self) -> tuple[BiscaleChoice, ...]:
        """The fallback if no deadline can be kept: one replica per stage, batches of 1, an equal part of all cores."""
        made = []
        for stage in self.problem.stages:
            even = self.problem.cores_total / len(self.problem.stages)
            units = max(1, int(min(even, stage.latency_ms.shape[0]) + ROUNDING))
            latency_ms = float(stage.latency_ms[units - 1, 0])
            made.append(BiscaleChoice(1, units, 1, latency_ms, 0.0, 1000.0 / latency_ms))
        return tuple(made)

    def infeasibility(self) -> str:
        """Why no rate is feasible, as text: by how much a path is too slow, or that there are too few cores."""
        slot_ms = self.problem.slot_ms
        quickest_ms = [
            slot_ms * math.ceil(stage.latency_ms[:, 0].min() / slot_ms - ROUNDING) for stage in self.problem.stages
        ]
        excess_ms = {
            segment: sum(quickest_ms[i] for i in segment.stages) - slot_ms * segment.slots
            for segment in self.problem.segments
        }
        worst = max(excess_ms, key=excess_ms.__getitem__)
        if excess_ms[worst] <= 0:
            there = f"{counted(self.cores_total, 'core')} of all nodes"
            if len(self.stages) > self.problem.cores_total + ROUNDING:
                return f"{len(self.stages)} stages of {counted(self.unit, 'core')} do not fit on the {there}"
            return f"no sizes of {len(self.stages)} stages that fit on the {there} keep the deadlines"
        parts = ", ".join(f"{self.stages[i].name} {quickest_ms[i]:.0f} ms" for i in worst.stages)
        excess = f"{excess_ms[worst]:.0f} ms more than the {slot_ms * worst.slots} ms there are"
        return f"{parts} even alone on all cores: {excess}"


def describe(plans: Sequence[StagePlan]) -> str:
    """The plans as text: `detect 2 × 3 cores, batch 4; …`."""
    return "; ".join(
        f"{plan.stage} "
        + " + ".join(f"{group.count} × {counted(group.spec.cores, 'core')}" for group in plan.groups)
        + f", batch {plan.batch_max}"
        for plan in plans
    )


def biscale_model(view: ClusterView, limits: SizeLimits) -> BiscaleModel:
    """A view on one kind of hardware as a problem. InputError for a variant that a stage does not have."""
    node_cores = targets.node_cores_max(view)
    unit = min(limits.unit, node_cores)
    beliefs = tuple(targets.belief_of(stage, limits.variant) for stage in view.stages)
    tables = tuple([_costs_ns(belief, unit, node_cores, limits.cores_max) for belief in beliefs])
    batches = tuple([min(limits.batch_max, belief.batch_max) for belief in beliefs])
    visits = tuple([stage.visits for stage in view.stages])
    paths = targets.indexed_paths(view, limits.margin)
    total = sum(node.node.cores for node in view.nodes) / unit if view.nodes else math.inf
    problem, feasible = _problem(tables, batches, visits, paths, limits.throughput, total)
    return BiscaleModel(problem, view.stages, beliefs, unit, feasible)


@lru_cache(maxsize=PROBLEMS_KEPT)
def _problem(
    tables: tuple[tuple[tuple[int, ...], ...], ...],
    batches: tuple[int, ...],
    visits: tuple[float, ...],
    paths: tuple[IndexedPath, ...],
    throughput: Throughput,
    total: float,
) -> tuple[BiscaleProblem, bool]:
    """The problem, and whether it has a solution at a rate of 0. By stage: the costs in ns by units and batch, the
    largest batch, and the visits of a request; `total` are the units of all nodes. It seldom changes from one decision
    to the next, and is the same for applications with equal profiles and deadlines."""
    stages = tuple(
        BiscaleStage(np.array([row[1 : most + 1] for row in table], dtype=np.float64) / 1e6, own)
        for table, most, own in zip(tables, batches, visits, strict=True)
    )
    weights = [float(stage.latency_ms[0].mean()) for stage in stages]
    slot_ms = max(1, math.ceil(max(path.slo_ms for path in paths) / SLOTS_MAX))
    segments = _segments(paths, slot_ms)
    cuts = [] if is_exact(segments) else forests(paths, weights, most=CUTS_MAX)
    cut = tuple(_segments(forest.paths, slot_ms) for forest in cuts)
    problem = BiscaleProblem(stages, segments, throughput, total, cut, slot_ms)
    feasible = problem.horizontal(0) is not None
    if not feasible:  # with_queue cuts the throughput of batches that take over a second to 0
        problem = replace(problem, throughput="pure")
        feasible = problem.horizontal(0) is not None
    return problem, feasible


@lru_cache(maxsize=PROBLEMS_KEPT)
def _split(problem: BiscaleProblem, rate_rps: float, replicas: tuple[int, ...]) -> BiscaleSplit | None:
    """The problem's answer. Most rates are the same in the next decision, or in another application."""
    return problem.split(rate_rps, replicas)


def _segments(paths: Sequence[IndexedPath], slot_ms: int) -> tuple[Segment, ...]:
    return tuple(Segment(path.stages, path.slots(slot_ms)) for path in paths)


def _costs_ns(belief: Belief, unit: float, node_cores: float, cores_max: int) -> tuple[tuple[int, ...], ...]:
    """The believed durations of batches on 1, 2, … units, as many as are of use."""
    useful = min(node_cores, max(unit, belief.cores_max))
    rows = max(1, min(cores_max, int(useful / unit + ROUNDING)))
    return tuple([tuple(belief.costs_ns(belief.slot(units * unit))) for units in range(1, rows + 1)])


def stage_replicas(stage: StageView, unit: float) -> StageReplicas:
    """The stage's ready and starting replicas, with sizes rounded to whole units."""
    sizes = {
        life: tuple(
            sorted((max(1, round(one.spec.cores / unit)) for one in stage.replicas if one.life is life), reverse=True)
        )
        for life in (Life.READY, Life.STARTING)
    }
    if not sizes[Life.READY]:
        return StageReplicas(sizes[Life.STARTING], ())
    return StageReplicas(sizes[Life.READY], sizes[Life.STARTING])


def within_node_room(problem: BiscaleProblem, view: ClusterView, unit: float) -> BiscaleProblem:
    """The problem with replica sizes limited by the room on their nodes. With one node, its total is limit enough."""
    if len(view.nodes) < 2:
        return problem
    nodes = {node.node.name: node for node in view.nodes}
    stages = []
    for own, stage in zip(problem.stages, view.stages, strict=True):
        rooms = [_units_at_most(one, nodes, unit) for one in stage.replicas]
        rows = max(1, min((own.latency_ms.shape[0], *rooms)))
        stages.append(replace(own, latency_ms=own.latency_ms[:rows]))
    return replace(problem, stages=tuple(stages))


def _units_at_most(replica: ReplicaView, nodes: Mapping[str, NodeView], unit: float) -> int:
    """The most units that a replica can have on its node: its present units plus the free ones."""
    node = nodes.get(replica.node)
    return int((replica.spec.cores + (node.free_cores if node else 0.0)) / unit + ROUNDING)


@dataclass(slots=True)
class BiscaleMemory:
    """State between decisions; the replicas in the view hold the rest of the state machine's state."""

    steady: int = 0
    """Decisions in a row without a surge or a rise."""
    goal: tuple[BiscaleChoice, ...] = ()
    """The small replicas that are being started; empty if there are none."""


@dataclass(frozen=True, slots=True)
class Biscale:
    """Replicas of 1 to `cores_max` units of `unit` cores each, batches up to `batch_max`."""

    unit: float = 1.0
    cores_max: int = 16
    batch_max: int = 16
    settle: int = 5
    """K: decisions without a surge or a rise before replicas are made small."""
    throughput: Throughput = "with_queue"
    """`with_queue` counts the wait for a full batch as work; `pure` does not, and leaves no head-room."""
    reference: Literal["max10", "now"] = "max10"
    """The rate that is compared with the forecast to decide whether the load is steady. `max10`: the busiest of the
    last ten seconds; `now`: the present rate, as published, with which the load hardly ever looks steady."""
    stable: Literal["ge", "equal"] = "ge"
    """The load is steady if the reference rate needs at least (`ge`) or exactly (`equal`) as many replicas as the
    forecast."""
    split_cores: Literal["same", "one"] = "same"
    """Size of additional replicas in a surge: the same as the others, or one unit."""
    shrink: bool = True
    """Whether replicas may become smaller while the rate is not steady."""
    blocking: bool = False
    """Whether to keep the plan while replicas start, as in the authors' artefact."""
    whole: bool = False
    """Whether rates are truncated to whole requests per second, at least 1, as in the authors' artefact."""
    sigma: float = 0.0
    """Plan for λ + `sigma` √λ: √λ is the standard deviation of a Poisson process."""
    margin: float = 1.0
    """Fraction of each deadline to plan with."""
    initial_batch: int = 1
    """Largest batch of the first plan."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    window_ns: int = s(2)
    """The present rate is the mean over this time."""
    period_ns: int = s(1)
    _memory: BiscaleMemory = field(init=False, default_factory=BiscaleMemory, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("unit", "window_ns", "period_ns"):
            check_range(key, getattr(self, key), above=0)
        for key in ("cores_max", "batch_max", "initial_batch"):
            check_range(key, getattr(self, key), least=1)
        for key in ("settle", "sigma"):
            check_range(key, getattr(self, key), least=0)
        check_range("margin", self.margin, above=0, most=1)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The next plan; None if nothing changes. If no plan can keep the deadlines: the current plan, infeasible.

        InputError for a variant or kind of hardware that a stage does not have.
        """
        view = targets.on_one_kind(view, self.hardware)
        limits = SizeLimits(self.unit, self.cores_max, self.batch_max, self.throughput, self.margin, self.variant)
        model, rates = biscale_model(view, limits), self._rates(view)
        if not model.feasible:
            return self._unequal(model, rates, view)
        if view.plan is None:
            return self._first(model, rates.foreseen if view.ingress.buckets else 0.0)
        now = _Decision(model, rates, tuple(stage_replicas(stage, model.unit) for stage in view.stages), view)
        return None if self.blocking and any(one.starting for one in now.present) else self._next(now, view.plan)

    def _next(self, now: "_Decision", plan: Plan) -> Plan | None:
        """The state machine: handle a surge, then starting small replicas, then a rise, then steady load."""
        memory, rates = self._memory, now.rates
        if not now.is_carried(lambda problem, rate_rps: replicas_carry(problem, rate_rps, now.present)):
            memory.goal, memory.steady = (), 0
            return self._vertical(now, "more than the replicas carry")
        if memory.goal:
            return self._finish_goal(now)
        wanted = now.model.problem.horizontal_within_cores(rates.reference)
        differs = rates.foreseen != rates.reference
        foreseen = now.model.problem.horizontal_within_cores(rates.foreseen) if differs else wanted
        if self._differ(wanted, foreseen):
            memory.steady = 0
            return self._vertical(now, f"{rates.foreseen:.4g} foreseen")
        if memory.steady < self.settle:
            memory.steady += 1
            return None
        memory.steady = 0
        return self._horizontal(now, wanted, plan)

    def _rates(self, view: ClusterView) -> "_Rates":
        ingress = view.ingress
        counts = [bucket.arrivals for bucket in ingress.window(REFERENCE_S * NS_PER_S)]
        busiest_rps = max(seconds_rps(counts, ingress.bucket_ns), default=0.0)
        rates_rps = (ingress.rate_rps(self.window_ns), busiest_rps, view.forecast_rps)
        now, busiest, forecast = map(self._planned_rps, rates_rps)
        if self.reference == "now":
            return _Rates(now, now, forecast)
        return _Rates(now, max(now, busiest), max(now, busiest, forecast))

    def _planned_rps(self, rate_rps: float) -> float:
        rate_rps += self.sigma * math.sqrt(rate_rps)
        return max(1.0, math.floor(rate_rps)) if self.whole else rate_rps

    def _differ(self, wanted: Sequence[BiscaleChoice], foreseen: Sequence[BiscaleChoice]) -> bool:
        pairs = [(one.replicas, other.replicas) for one, other in zip(wanted, foreseen, strict=True)]
        return any(a != b for a, b in pairs) if self.stable == "equal" else any(a < b for a, b in pairs)

    def _unequal(self, model: BiscaleModel, rates: "_Rates", view: ClusterView) -> Plan:
        """The plan if no common size keeps the deadlines: each stage keeps its replicas, or has one, and a size of its
        own; together they take all cores. Not published: the publication's applications all have a common size."""
        counts = tuple(max(1, len(stage.replicas)) for stage in view.stages)
        problem = within_node_room(model.problem, view, model.unit)
        split = _split(problem, rates.foreseen, counts)
        if split is None:
            return _infeasible(model, view.plan)
        plans = model.plans(problem.enlarged(split.choices))
        why = f"{rates.foreseen:.4g} requests/s, no common size in time → {describe(plans)}"
        return Plan(plans, why, feasible=split.carried_rps >= rates.foreseen)

    def _first(self, model: BiscaleModel, rate_rps: float) -> Plan:
        """Small replicas for the forecast; before the first request, for a rate of 0."""
        plans = model.plans(model.problem.horizontal_within_cores(rate_rps))
        batches = (min(self.initial_batch, stage.latency_ms.shape[1]) for stage in model.problem.stages)
        plans = tuple(
            structs.replace(one, batch_max=max(one.batch_max, batch)) for one, batch in zip(plans, batches, strict=True)
        )
        return _checked(model, plans, f"{rate_rps:.4g} requests/s → {describe(plans)}", rate_rps)

    def _vertical(self, now: "_Decision", because: str) -> Plan:
        """Enlarge replicas at once, and start more for the rest of the rate."""
        model, rates, seen = now.model, now.rates, f"{now.rates.now:.4g} requests/s, {because}"
        split = now.problem.split(rates.now, [one.count for one in now.present])
        groups: list[ReplicaGroups] = []
        if split is not None:
            for one, choice, extra in zip(now.present, split.choices, split.extra, strict=True):
                units = choice.cores if self.shrink else max(one.largest, choice.cores)
                further = (max(0, extra - len(one.starting)), units if self.split_cores == "same" else 1)
                # Starting replicas keep their size: a new size would be out of date when they are ready.
                groups.append([(one.count, units), *((1, own) for own in one.starting), further])
        if split is None or total_units(groups) > now.problem.cores_total:
            return self._within_cores(now, seen)
        plans = model.plans(split.choices, groups)
        carried = f", of which these carry {split.carried_rps:.4g} at once" if any(split.extra) else ""
        return Plan(plans, f"{seen}{carried} → {describe(plans)}")

    def _within_cores(self, now: "_Decision", seen: str) -> Plan:
        """If not all replicas fit on the nodes: small replicas for the rate, and the others in the remaining cores."""
        model, rates = now.model, now.rates
        goal = model.problem.horizontal_within_cores(rates.reference)
        groups, choices = small_first(now.problem, rates.now, now.present, goal)
        plans = model.plans(choices, groups)
        why = f"{seen}; {model.cores_total:.4g} cores in all → {describe(plans)}"
        return _checked(model, plans, why, rates.now)

    def _horizontal(self, now: "_Decision", wanted: tuple[BiscaleChoice, ...], plan: Plan) -> Plan:
        """Small replicas: shrink at once if enough replicas exist, else start small ones and keep the large ones."""
        model, seen = now.model, f"steady at {now.rates.reference:.4g} requests/s"
        final = model.plans(wanted)
        enough = [one.count >= choice.replicas for one, choice in zip(now.present, wanted, strict=True)]
        if all(enough):
            return Plan(final, f"{seen} → {describe(final)}")
        self._memory.goal = wanted
        groups = [
            [(choice.replicas, choice.cores)] if there else with_small(one, choice)
            for one, choice, there in zip(now.present, wanted, enough, strict=True)
        ]
        if total_units(groups) > now.problem.cores_total:
            groups, choices = small_first(now.problem, now.rates.now, now.present, wanted)
            plans = model.plans(choices, groups)
        else:
            in_force = {target.stage: target for target in plan.stages}
            plans = tuple(
                done if there else model.with_groups(index, group, in_force[done.stage])
                for index, (done, there, group) in enumerate(zip(final, enough, groups, strict=True))
            )
        return Plan(plans, f"{seen}: small replicas start → {describe(plans)}")

    def _finish_goal(self, now: "_Decision") -> Plan | None:
        """When the small replicas are ready, shrink the large ones, if the small sizes can carry the rate."""
        memory = self._memory
        if any(len(one.ready) < choice.replicas for one, choice in zip(now.present, memory.goal, strict=True)):
            return None
        goal, memory.goal, memory.steady = memory.goal, (), 0
        sizes = [(choice.replicas, choice.cores) for choice in goal]
        if not now.is_carried(lambda problem, rate_rps: problem.carries(rate_rps, sizes)):
            return self._vertical(now, "more than the small replicas would carry")
        plans = now.model.plans(goal)
        return Plan(plans, f"the small replicas are ready → {describe(plans)}")


@dataclass(frozen=True, slots=True)
class _Rates:
    """Rates at the ingress in requests per second: present, reference, and predicted for the next seconds."""

    now: float
    reference: float
    foreseen: float


@dataclass(frozen=True)
class _Decision:
    """The input of one decision."""

    model: BiscaleModel
    rates: _Rates
    present: tuple[StageReplicas, ...]
    view: ClusterView

    @cached_property
    def problem(self) -> BiscaleProblem:
        """The problem with replica sizes limited by the room on their nodes."""
        return within_node_room(self.model.problem, self.view, self.model.unit)

    def is_carried(self, carries: Callable[[BiscaleProblem, float], bool]) -> bool:
        """Whether the replicas carry the present rate or the reference rate, which is at least as high.

        Either suffices: batches fill more slowly at a lower rate, so a rate can be infeasible although a higher one is
        feasible, and at a steady rate just below a whole number the replicas would change size back and forth.
        """
        return any(carries(self.model.problem, rate_rps) for rate_rps in (self.rates.now, self.rates.reference))


def _infeasible(model: BiscaleModel, plan: Plan | None) -> Plan:
    """The plan if no plan keeps the deadlines: the current one, or the quickest replicas."""
    why = model.infeasibility()
    if plan is not None:
        return structs.replace(plan, why=f"kept as it was: {why}", feasible=False)
    return Plan(model.plans(model.quickest()), why, feasible=False)


def _checked(model: BiscaleModel, plans: tuple[StagePlan, ...], why: str, rate_rps: float) -> Plan:
    """The plan, feasible if the cluster has the cores for small replicas that carry the rate."""
    if model.problem.horizontal(rate_rps) is not None:
        return Plan(plans, why)
    why += f"; {rate_rps:.4g} requests/s need more than the {model.cores_total:.4g} cores there are"
    return Plan(plans, why, feasible=False, saturated=tuple(plan.stage for plan in plans))


@dataclass(frozen=True, slots=True)
class Vertical:
    """The same number of replicas of each stage at all times, resized in place every second.

    Sponge extended to pipelines: the vertical baseline of Biscale's evaluation (dissertation chapter P4, with the rule
    of its artefact). Cores and batches of all stages follow Biscale's vertical program, up and down at once. If the
    rate is too high, replicas get the sizes for the highest rate that they can carry, and the rest is not served.
    Replicas have 1 to `cores_max` units of `unit` cores each, batches up to `batch_max`.
    """

    replicas: int = 1
    unit: float = 1.0
    cores_max: int = 16
    batch_max: int = 16
    throughput: Throughput = "with_queue"
    """As in `Biscale`."""
    whole: bool = False
    """As in `Biscale`."""
    margin: float = 1.0
    """Fraction of each deadline to plan with."""
    initial_batch: int = 1
    """Largest batch before any request has come."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    period_ns: int = s(1)

    def __post_init__(self) -> None:
        for key in ("unit", "period_ns"):
            check_range(key, getattr(self, key), above=0)
        for key in ("replicas", "cores_max", "batch_max", "initial_batch"):
            check_range(key, getattr(self, key), least=1)
        check_range("margin", self.margin, above=0, most=1)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The cheapest sizes that carry the forecast; if there are none, those that carry most of it."""
        view = targets.on_one_kind(view, self.hardware)
        limits = SizeLimits(self.unit, self.cores_max, self.batch_max, self.throughput, self.margin, self.variant)
        model = biscale_model(view, limits)
        rate_rps = view.forecast_rps
        if self.whole:
            rate_rps = max(1.0, math.floor(rate_rps))
        split = _split(model.problem, rate_rps, (self.replicas,) * len(view.stages))
        if split is None:
            return _infeasible(model, view.plan)
        plans = model.plans(split.choices)
        if not view.ingress.buckets and self.initial_batch > 1:
            plans = tuple(structs.replace(one, batch_max=max(one.batch_max, self.initial_batch)) for one in plans)
        why = f"{rate_rps:.4g} requests/s → {describe(plans)}"
        if split.carried_rps < rate_rps:
            saturated = tuple(one.stage for one, extra in zip(plans, split.extra, strict=True) if extra)
            why += f"; saturated: these carry {split.carried_rps:.4g}"
            return Plan(plans, why, feasible=False, saturated=saturated)
        return Plan(plans, why)
