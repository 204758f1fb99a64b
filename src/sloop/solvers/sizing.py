"""From a cluster view to Biscale's program, and from its choices back to plans: shared by the policies that solve it.

Promises that every choice can be asked for: sizes are whole multiples of a unit that a node and the profile allow,
batches those the profile knows. Where stages meet, deadlines are cut as in FA2 (`sloop.solvers.graph`). Decides
nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from sloop.core.views import Belief, ClusterView, StageView
from sloop.solvers import targets
from sloop.solvers.biscale import SLACK, Choice, Model, Program, Throughput
from sloop.solvers.budget import Segment, is_exact
from sloop.solvers.graph import Way, forests
from sloop.solvers.queueing import patience_ns
from sloop.vocabulary import Group, ReplicaSpec, StagePlan

CUTS_MAX = 4
"""So many ways to cut a graph where stages meet are solved, each of which costs as much as a chain does."""
SLOTS_MAX = 5_000
"""Deadlines beyond so many milliseconds are counted in coarser steps, so that a decision takes no longer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a replica may be: sizes are 1 to `cores_max` units of `unit` cores, batches 1 to `batch_max`."""

    unit: float
    cores_max: int
    batch_max: int
    throughput: Throughput
    margin: float
    """Part of each deadline to plan with."""
    variant: str


@dataclass(frozen=True, slots=True)
class Sizing:
    """The program of an application at one instant. `cores_total` of it is what all nodes have, in units."""

    program: Program
    stages: tuple[StageView, ...]
    variants: tuple[str, ...]
    unit: float

    def plan(self, place: int, groups: Sequence[tuple[int, int]], batch: int, wait_ms: float = 0.0) -> StagePlan:
        """Stage number `place`: groups of (replicas, units each), batches of `batch` that fill within `wait_ms`."""
        stage = self.stages[place]
        wait_ns = patience_ns(wait_ms, stage.slo_ns)
        sizes: dict[int, int] = {}
        for count, units in groups:
            sizes[units] = sizes.get(units, 0) + count
        made = tuple(
            Group(ReplicaSpec(stage.name, self.variants[place], units * self.unit), count)
            for units, count in sorted(sizes.items(), reverse=True)
            if count
        )
        return StagePlan(stage.name, made, batch, wait_ns=wait_ns)

    def chosen(self, choices: Sequence[Choice]) -> tuple[StagePlan, ...]:
        """Plans with nothing but the replicas of each choice."""
        return tuple(
            self.plan(place, [(choice.replicas, choice.cores)], choice.batch, choice.wait_ms)
            for place, choice in enumerate(choices)
        )

    def words(self, plans: Sequence[StagePlan]) -> str:
        """`detect 2 × 3 cores, batch 4; …`: for reasons that people read."""
        return "; ".join(_words(plan) for plan in plans)

    def grown(self, place: int, groups: Sequence[tuple[int, int]], plan: StagePlan) -> StagePlan:
        """Other replicas in stage number `place`, and the batches of `plan`."""
        return structs.replace(self.plan(place, groups, plan.batch_max), wait_ns=plan.wait_ns)

    def shortest(self) -> tuple[Choice, ...]:
        """One replica and batches of one, on as many cores as all stages can have alike: what is left to do where
        nothing keeps the deadline."""
        made = []
        for model in self.program.models:
            even = self.program.cores_total / len(self.program.models)
            rows = max(1, int(min(even, model.latency_ms.shape[0]) + SLACK))
            latency_ms = float(model.latency_ms[rows - 1, 0])
            made.append(Choice(1, rows, 1, latency_ms, 0.0, 1000.0 / latency_ms))
        return tuple(made)

    @property
    def cores_total(self) -> float:
        """Of all nodes."""
        return self.program.cores_total * self.unit

    def excess(self) -> str:
        """By how much the tightest path misses its deadline even alone on all cores; else, which cores are missing."""
        slot_ms = self.program.slot_ms
        quickest = [
            slot_ms * math.ceil(model.latency_ms[:, 0].min() / slot_ms - SLACK) for model in self.program.models
        ]
        over_ms = {
            segment: sum(quickest[i] for i in segment.stages) - slot_ms * segment.slots
            for segment in self.program.segments
        }
        worst = max(over_ms, key=over_ms.__getitem__)
        if over_ms[worst] <= 0:
            return f"{len(self.stages)} stages do not fit on {targets.amount(self.cores_total, 'core')} of all nodes"
        parts = ", ".join(f"{self.stages[i].name} {quickest[i]:.0f} ms" for i in worst.stages)
        there_ms = slot_ms * worst.slots
        return f"{parts} even alone on all cores: {over_ms[worst]:.0f} ms more than the {there_ms} ms there are"


def sizing_of(view: ClusterView, limits: Limits) -> Sizing:
    """InputError for a variant that a stage does not have."""
    most = targets.node_cores_max(view)
    unit = min(limits.unit, most)
    variants = tuple(targets.variant_of(stage, limits.variant) for stage in view.stages)
    models = tuple(
        _model(stage, stage.variants[variant], unit, most, limits)
        for stage, variant in zip(view.stages, variants, strict=True)
    )
    ways = targets.ways(view, limits.margin)
    weights = [float(model.latency_ms[0].mean()) for model in models]
    slot_ms = max(1, math.ceil(max(way.slo_ms for way in ways) / SLOTS_MAX))
    segments = _segments(ways, slot_ms)
    cuts = [] if is_exact(segments) else forests(ways, weights, most=CUTS_MAX)
    total = sum(node.node.cores for node in view.nodes) / unit if view.nodes else math.inf
    cut = tuple(_segments(one.ways, slot_ms) for one in cuts)
    program = Program(models, segments, limits.throughput, total, cut, slot_ms)
    if program.horizontal(0) is None:  # a batch of more than a second has no whole throughput where that is asked for
        program = replace(program, throughput="pure")
    return Sizing(program, view.stages, variants, unit)


def _segments(ways: Sequence[Way], slot_ms: int) -> tuple[Segment, ...]:
    return tuple(Segment(way.stages, way.slots(slot_ms)) for way in ways)


def _model(stage: StageView, belief: Belief, unit: float, most: float, limits: Limits) -> Model:
    useful = min(most, max(unit, belief.cores_max))
    rows = max(1, min(limits.cores_max, int(useful / unit + SLACK)))
    batches = min(limits.batch_max, belief.batch_max)
    costs_ns = [belief.costs_ns(units * unit)[1 : batches + 1] for units in range(1, rows + 1)]
    return Model(stage.name, np.array(costs_ns, dtype=np.float64) / 1e6, stage.visits)


def _words(plan: StagePlan) -> str:
    groups = " + ".join(f"{group.count} × {targets.amount(group.spec.cores, 'core')}" for group in plan.groups)
    return f"{plan.stage} {groups}, batch {plan.batch_max}"
