"""A view as a problem of sizes (`sloop.solvers.sizes`) and its solutions as plans, for policies that resize in place.

Replica sizes are multiples of a unit, up to the limits of node and profile. Graphs whose paths meet are cut as in FA2
(`sloop.solvers.budget`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from msgspec import structs

from sloop.core.views import Belief, ClusterView, NodeView, ReplicaView, StageView
from sloop.policies import targets
from sloop.solvers.budget import IndexedPath, Segment, forests, is_exact
from sloop.solvers.queueing import patience_ns
from sloop.solvers.sizes import (
    ReplicaGroups,
    SizeChoice,
    SizedStage,
    SizeProblem,
    SizeSplit,
    StageReplicas,
    Throughput,
)
from sloop.text import counted
from sloop.units import NS_PER_S, ROUNDING, to_ms
from sloop.vocabulary import Group, Life, Plan, ReplicaSpec, StagePlan

CUTS_MAX: Final = 4
"""The most ways to cut a graph whose paths meet; each takes as much time to solve as a chain."""
SLOTS_MAX: Final = 5_000
"""The most slots of the longest deadline. Longer deadlines get coarser slots, so that a decision takes less than 100
ms."""
PROBLEMS_KEPT: Final = 1_024
"""More than there are applications in one deployment."""


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
class SizeModel:
    """One cluster view as a problem, and the conversion of its solutions into plans."""

    problem: SizeProblem
    """Its `cores_total` counts the units of all nodes, free or not."""
    stages: tuple[StageView, ...]
    beliefs: tuple[Belief, ...]
    unit: float
    nodes: int
    """How many there are."""
    batch_limit_ns: int
    """See `ClusterView`."""

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
        self, choices: Sequence[SizeChoice], groups: Sequence[ReplicaGroups] | None = None
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

    def parts(self, index: int, choice: SizeChoice) -> int:
        """Into how many replicas with parts of its cores a replica of this size is best divided (`best_size`)."""
        most = self.problem.stages[index].latency_ms.shape[1]
        best = self.beliefs[index].best_size(self.cores_total, self.batch_limit_ns, most)
        return max(1, choice.cores // math.ceil(best / self.unit - ROUNDING))

    def quickest(self) -> tuple[SizeChoice, ...]:
        """The fallback if no deadline can be kept: one replica per stage, batches of 1, an equal part of all cores."""
        made = []
        for stage in self.problem.stages:
            even = self.problem.cores_total / len(self.problem.stages)
            units = max(1, int(min(even, stage.latency_ms.shape[0]) + ROUNDING))
            latency_ms = float(stage.latency_ms[units - 1, 0])
            made.append(SizeChoice(1, units, 1, latency_ms, 0.0, 1000.0 / latency_ms))
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


def sizes_text(plans: Sequence[StagePlan]) -> str:
    """The plans as text: `detect 2 × 3 cores, batch 4; …`."""
    return "; ".join(
        f"{plan.stage} "
        + " + ".join(f"{group.count} × {counted(group.spec.cores, 'core')}" for group in plan.groups)
        + f", batch {plan.batch_max}"
        for plan in plans
    )


def size_model(view: ClusterView, limits: SizeLimits, network_ms: float = 0.0) -> SizeModel:
    """A view on one kind of hardware as a problem; `network_ms` of each deadline are over when a request arrives.

    InputError for a variant that a stage does not have.
    """
    node_cores = targets.node_cores_max(view)
    unit = min(limits.unit, node_cores)
    beliefs = tuple(targets.belief_of(stage, limits.variant) for stage in view.stages)
    tables = tuple([_costs_ns(belief, unit, node_cores, limits.cores_max) for belief in beliefs])
    batches = tuple([min(limits.batch_max, belief.batch_max) for belief in beliefs])
    visits = tuple([stage.visits for stage in view.stages])
    paths = targets.indexed_paths(view, limits.margin)
    if network_ms:
        paths = tuple(IndexedPath(path.stages, max(1.0, path.slo_ms - network_ms)) for path in paths)
    total = sum(node.node.cores for node in view.nodes) / unit if view.nodes else math.inf
    problem = _problem(tables, batches, visits, paths, limits.throughput, total)
    return SizeModel(problem, view.stages, beliefs, unit, len(view.nodes), view.batch_limit_ns)


def network_ms(view: ClusterView) -> float:
    """The most that any request of the last second had lost of its deadline before it arrived, in steps of 1/100 of the
    deadline: equal problems are solved once."""
    lost = 0.0
    for stage in view.stages:
        if not stage.after and stage.slo_ns:
            slacks_ns = [slack for bucket in stage.window(NS_PER_S) for slack in bucket.slack_ns]
            lost = max(
                lost,
                to_ms(math.ceil(100 * (1 - min(slacks_ns, default=stage.slo_ns) / stage.slo_ns)) * stage.slo_ns) / 100,
            )
    return lost


@lru_cache(maxsize=PROBLEMS_KEPT)
def _problem(
    tables: tuple[tuple[tuple[int, ...], ...], ...],
    batches: tuple[int, ...],
    visits: tuple[float, ...],
    paths: tuple[IndexedPath, ...],
    throughput: Throughput,
    total: float,
) -> SizeProblem:
    """By stage: the costs in ns by units and batch, the largest batch, and the visits of a request; `total` are the
    units of all nodes. It seldom changes from one decision to the next, and is the same for applications with equal
    profiles and deadlines."""
    stages = tuple(
        SizedStage(np.array([row[1 : most + 1] for row in table], dtype=np.float64) / 1e6, own)
        for table, most, own in zip(tables, batches, visits, strict=True)
    )
    weights = [float(stage.latency_ms[0].mean()) for stage in stages]
    slot_ms = max(1, math.ceil(max(path.slo_ms for path in paths) / SLOTS_MAX))
    segments = _segments(paths, slot_ms)
    cuts = [] if is_exact(segments) else forests(paths, weights, most=CUTS_MAX)
    cut = tuple(_segments(forest.paths, slot_ms) for forest in cuts)
    problem = SizeProblem(stages, segments, throughput, total, cut, slot_ms)
    if problem.vertical(0, (1,) * len(stages)) is None:
        # with_queue cuts the throughput of batches that take over a second to 0
        problem = replace(problem, throughput="pure")
    return problem


@lru_cache(maxsize=PROBLEMS_KEPT)
def split_of(problem: SizeProblem, rate_rps: float, replicas: tuple[int, ...]) -> SizeSplit | None:
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
    sizes: dict[Life, list[int]] = {Life.READY: [], Life.STARTING: []}
    for one in stage.replicas:
        if one.life in sizes:
            sizes[one.life].append(max(1, round(one.spec.cores / unit)))
    ready, starting = (tuple(sorted(own, reverse=True)) for own in sizes.values())
    return StageReplicas(ready, starting) if ready else StageReplicas(starting, ())


def within_node_room(problem: SizeProblem, view: ClusterView, unit: float) -> SizeProblem:
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


def infeasible_plan(model: SizeModel, plan: Plan | None) -> Plan:
    """The plan if no plan keeps the deadlines: the current one, or the quickest replicas."""
    why = model.infeasibility()
    if plan is not None:
        return structs.replace(plan, why=f"kept as it was: {why}", feasible=False)
    return Plan(model.plans(model.quickest()), why, feasible=False)
