"""The scaling policy `Biscale`: larger replicas in place through a surge, then more and smaller ones.

Razavi, dissertation (TU Darmstadt 2024), chapter P4; the same system is Themis, arXiv 2407.14843. When the
arrival rate exceeds the capacity of the replicas, it enlarges all of them at once, which is quick, and starts more if
that does not suffice. When the rate has been steady for `settle` decisions, it starts small replicas, and shrinks
the large ones when the small ones are ready: two plans, so that capacity never falls before its replacement is ready.
It fails if a model gains nothing from more cores, and wastes starts on surges that are soon over.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final, Literal

from msgspec import structs

from sloop.api import (
    NS_PER_S,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Plan,
    PositiveFloat,
    PositiveInt,
    StagePlan,
    s,
)
from sloop.api.policies import (
    PROBLEMS_KEPT,
    ClusterView,
    Scale,
    SizeLimits,
    SizeModel,
    infeasible_plan,
    size_model,
    sizes_text,
    split_of,
    stage_replicas,
    targets,
    within_node_room,
)
from sloop.api.solvers import ReplicaGroups, SizeChoice, SizeProblem, StageReplicas, Throughput, seconds_rps
from sloop_systems.biscale.solver import (
    carries,
    enlarged,
    horizontal,
    horizontal_within_cores,
    replicas_carry,
    small_first,
    total_units,
    with_small,
)

REFERENCE_S: Final = 10
"""Seconds in which to look for the busiest second, the reference rate. The publication compares the mean rate of two
seconds with a maximum predicted for the next ten, so that with ordinary noise the load hardly ever looks steady."""


@dataclass(frozen=True, slots=True)
class BiscaleMemory:
    """State between decisions; the replicas in the view hold the rest of the state machine's state."""

    steady: int = 0
    """Decisions in a row without a surge or a rise."""
    goal: tuple[SizeChoice, ...] = ()
    """The small replicas that are being started; empty if there are none."""


@dataclass(frozen=True, slots=True)
class Biscale(Scale):
    """Replicas of 1 to `cores_max` units of `unit` cores each, batches up to `batch_max`."""

    unit: PositiveFloat = 1.0
    cores_max: PositiveInt = 16
    batch_max: PositiveInt = 16
    settle: NonNegativeInt = 5
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
    sigma: NonNegativeFloat = 0.0
    """Plan for λ + `sigma` √λ: √λ is the standard deviation of a Poisson process."""
    margin: Fraction = 1.0
    """Fraction of each deadline to plan with."""
    initial_batch: PositiveInt = 1
    """Largest batch of the first plan."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    window_ns: PositiveInt = s(2)
    """The present rate is the mean over this time."""
    period_ns: PositiveInt = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: BiscaleMemory | None) -> tuple[Plan | None, BiscaleMemory]:
        """The next plan; None if nothing changes. If no plan can keep the deadlines: the current plan, infeasible.

        InputError for a variant or kind of hardware that a stage does not have.
        """
        view = targets.on_one_kind(view, self.hardware)
        limits = SizeLimits(self.unit, self.cores_max, self.batch_max, self.throughput, self.margin, self.variant)
        model, rates, memory = size_model(view, limits), self._rates(view), memory or BiscaleMemory()
        problem, feasible = _with_equal_sizes(model.problem)
        model = replace(model, problem=problem)
        if not feasible:
            return self._unequal(model, rates, view), memory
        if view.plan is None:
            return self._first(model, rates.foreseen if view.ingress.buckets else 0.0), memory
        now = _Decision(model, rates, tuple(stage_replicas(stage, model.unit) for stage in view.stages), view)
        if self.blocking and any(one.starting for one in now.present):
            return None, memory
        return self._next(now, view.plan, memory)

    def _next(self, now: "_Decision", plan: Plan, memory: BiscaleMemory) -> tuple[Plan | None, BiscaleMemory]:
        """The state machine: handle a surge, then starting small replicas, then a rise, then steady load."""
        rates = now.rates
        if not now.is_carried(lambda problem, rate_rps: replicas_carry(problem, rate_rps, now.present)):
            return self._vertical(now, "more than the replicas carry"), BiscaleMemory()
        if memory.goal:
            return self._finish_goal(now, memory)
        wanted = horizontal_within_cores(now.model.problem, rates.reference)
        differs = rates.foreseen != rates.reference
        foreseen = horizontal_within_cores(now.model.problem, rates.foreseen) if differs else wanted
        if self._differ(wanted, foreseen):
            return self._vertical(now, f"{rates.foreseen:.4g} foreseen"), BiscaleMemory()
        if memory.steady < self.settle:
            return None, BiscaleMemory(memory.steady + 1)
        made, goal = self._horizontal(now, wanted, plan)
        return made, BiscaleMemory(goal=goal)

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

    def _differ(self, wanted: Sequence[SizeChoice], foreseen: Sequence[SizeChoice]) -> bool:
        pairs = [(one.replicas, other.replicas) for one, other in zip(wanted, foreseen, strict=True)]
        return any(a != b for a, b in pairs) if self.stable == "equal" else any(a < b for a, b in pairs)

    def _unequal(self, model: SizeModel, rates: "_Rates", view: ClusterView) -> Plan:
        """The plan if no common size keeps the deadlines: each stage keeps its replicas, or has one, and a size of its
        own; together they take all cores. Not published: the publication's applications all have a common size."""
        counts = tuple(max(1, len(stage.replicas)) for stage in view.stages)
        problem = within_node_room(model.problem, view, model.unit)
        split = split_of(problem, rates.foreseen, counts)
        if split is None:
            return infeasible_plan(model, view.plan)
        plans = model.plans(enlarged(problem, split.choices))
        why = f"{rates.foreseen:.4g} requests/s, no common size in time → {sizes_text(plans)}"
        return Plan(plans, why, feasible=split.carried_rps >= rates.foreseen)

    def _first(self, model: SizeModel, rate_rps: float) -> Plan:
        """Small replicas for the forecast; before the first request, for a rate of 0."""
        plans = model.plans(horizontal_within_cores(model.problem, rate_rps))
        batches = (min(self.initial_batch, stage.latency_ms.shape[1]) for stage in model.problem.stages)
        plans = tuple(
            structs.replace(one, batch_max=max(one.batch_max, batch)) for one, batch in zip(plans, batches, strict=True)
        )
        return _checked(model, plans, f"{rate_rps:.4g} requests/s → {sizes_text(plans)}", rate_rps)

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
        return Plan(plans, f"{seen}{carried} → {sizes_text(plans)}")

    def _within_cores(self, now: "_Decision", seen: str) -> Plan:
        """If not all replicas fit on the nodes: small replicas for the rate, and the others in the remaining cores."""
        model, rates = now.model, now.rates
        goal = horizontal_within_cores(model.problem, rates.reference)
        groups, choices = small_first(now.problem, rates.now, now.present, goal)
        plans = model.plans(choices, groups)
        why = f"{seen}; {model.cores_total:.4g} cores in all → {sizes_text(plans)}"
        return _checked(model, plans, why, rates.now)

    def _horizontal(
        self, now: "_Decision", wanted: tuple[SizeChoice, ...], plan: Plan
    ) -> tuple[Plan, tuple[SizeChoice, ...]]:
        """Small replicas: shrink at once if enough replicas exist, else start small ones and keep the large ones. And
        the sizes to reach when the small ones are ready."""
        model, seen = now.model, f"steady at {now.rates.reference:.4g} requests/s"
        final = model.plans(wanted)
        enough = [one.count >= choice.replicas for one, choice in zip(now.present, wanted, strict=True)]
        if all(enough):
            return Plan(final, f"{seen} → {sizes_text(final)}"), ()
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
        return Plan(plans, f"{seen}: small replicas start → {sizes_text(plans)}"), wanted

    def _finish_goal(self, now: "_Decision", memory: BiscaleMemory) -> tuple[Plan | None, BiscaleMemory]:
        """When the small replicas are ready, shrink the large ones, if the small sizes can carry the rate."""
        if any(len(one.ready) < choice.replicas for one, choice in zip(now.present, memory.goal, strict=True)):
            return None, memory
        sizes = [(choice.replicas, choice.cores) for choice in memory.goal]
        if not now.is_carried(lambda problem, rate_rps: carries(problem, rate_rps, sizes)):
            return self._vertical(now, "more than the small replicas would carry"), BiscaleMemory()
        plans = now.model.plans(memory.goal)
        return Plan(plans, f"the small replicas are ready → {sizes_text(plans)}"), BiscaleMemory()


@dataclass(frozen=True, slots=True)
class _Rates:
    """Rates at the ingress in requests per second: present, reference, and predicted for the next seconds."""

    now: float
    reference: float
    foreseen: float


@dataclass(frozen=True)
class _Decision:
    """The input of one decision."""

    model: SizeModel
    rates: _Rates
    present: tuple[StageReplicas, ...]
    view: ClusterView

    @cached_property
    def problem(self) -> SizeProblem:
        """The problem with replica sizes limited by the room on their nodes."""
        return within_node_room(self.model.problem, self.view, self.model.unit)

    def is_carried(self, carries: Callable[[SizeProblem, float], bool]) -> bool:
        """Whether the replicas carry the present rate or the reference rate, which is at least as high.

        Either suffices: batches fill more slowly at a lower rate, so a rate can be infeasible although a higher one is
        feasible, and at a steady rate just below a whole number the replicas would change size back and forth.
        """
        return any(carries(self.model.problem, rate_rps) for rate_rps in (self.rates.now, self.rates.reference))


@lru_cache(maxsize=PROBLEMS_KEPT)
def _with_equal_sizes(problem: SizeProblem) -> tuple[SizeProblem, bool]:
    """The problem, and whether a common size of all replicas keeps the deadlines at any rate."""
    if horizontal(problem, 0) is not None:
        return problem, True
    problem = replace(problem, throughput="pure")  # with_queue cuts the throughput of batches over a second to 0
    return problem, horizontal(problem, 0) is not None


def _checked(model: SizeModel, plans: tuple[StagePlan, ...], why: str, rate_rps: float) -> Plan:
    """The plan, feasible if the cluster has the cores for small replicas that carry the rate."""
    if horizontal(model.problem, rate_rps) is not None:
        return Plan(plans, why)
    why += f"; {rate_rps:.4g} requests/s need more than the {model.cores_total:.4g} cores there are"
    return Plan(plans, why, feasible=False, saturated=tuple(plan.stage for plan in plans))
