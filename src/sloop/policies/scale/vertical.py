"""The scaling policy `Vertical`: replicas resized in place, and more of them only where no size carries the load.

Cores follow the load up and down at once, because a resize is much quicker than a start, and a second replica starts
where all cores of a node do not suffice, or are of no use to the model, or where several replicas with parts of the
only node's cores serve notably more than one with all: models seldom keep all threads busy. Cores and batches of all
stages are planned together, so that every path keeps its deadline (`sloop.solvers.sizes`). It fails where bursts
outgrow a node sooner than replicas start.

Source of the last rule: instances with threads of their own beside each other, instead of one with all threads, Packrat
(Bhardwaj et al., ICML 2025).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import structs

from sloop.core.protocols import Scale
from sloop.core.views import ClusterView
from sloop.options import Fraction, NonNegativeInt, PositiveFloat, PositiveInt
from sloop.policies import targets
from sloop.policies.sizes import (
    SizeLimits,
    SizeModel,
    infeasible_plan,
    network_ms,
    size_model,
    sizes_text,
    split_of,
    stage_replicas,
    within_node_room,
)
from sloop.solvers.sizes import SizeSplit, StageReplicas, Throughput, highest_rate
from sloop.units import s
from sloop.vocabulary import Plan, StagePlan

GAIN_MIN: Final = 0.03
"""How much more smaller replicas must carry, and how much less those may carry that there are already."""

RecentCounts = tuple[tuple[int, tuple[int, ...]], ...]
"""(instant, replicas of each stage that were needed then) within the last `calm_ns`, oldest first."""


@dataclass(frozen=True, slots=True)
class Vertical(Scale):
    """Replicas of each stage, resized in place every second; more of them only where no size carries the load.

    The system `vertical-only` is the vertical baseline of Biscale's evaluation (Razavi, dissertation, TU Darmstadt
    2024, chapter P4, with the rule of its artefact). Cores and batches of all stages are the cheapest with which the
    replicas carry the forecast, up and down at once. If the rate is too high for the most replicas, they get
    the sizes for the highest rate that they can carry, and the rest is not served. Replicas have 1 to `cores_max` units
    of `unit` cores each, batches up to `batch_max`.
    """

    replicas: PositiveInt = 1
    """The fewest of each stage."""
    replicas_max: NonNegativeInt = 0
    """The most of each stage: more start where all cores of a node are not enough. 0: as many as the cores hold."""
    calm_ns: NonNegativeInt = s(60)
    """How long the load must have been lower before there are fewer replicas."""
    unit: PositiveFloat = 1.0
    cores_max: PositiveInt = 16
    batch_max: PositiveInt = 16
    throughput: Throughput = "pure"
    """`with_queue` counts the wait for a full batch as work, as in Biscale's artefact; `pure` does not."""
    whole: bool = False
    """Whether rates are truncated to whole requests per second, at least 1, as in Biscale's artefact."""
    margin: Fraction = 0.9
    """Fraction of each deadline to plan with."""
    initial_batch: PositiveInt = 1
    """Largest batch before any request has come."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    period_ns: PositiveInt = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: RecentCounts | None) -> tuple[Plan | None, RecentCounts]:
        """The cheapest sizes that carry the forecast; if there are none, those that carry most of it."""
        view = targets.on_one_kind(view, self.hardware)
        rate_rps = view.forecast_rps
        if self.whole:
            rate_rps = max(1.0, math.floor(rate_rps))
        model, counts, split, recent = self._sizes(now_ns, view, rate_rps, memory or ())
        return self._plan(model, counts, split, rate_rps, view), recent

    def _plan(
        self, model: SizeModel, counts: Sequence[int], split: SizeSplit | None, rate_rps: float, view: ClusterView
    ) -> Plan | None:
        if split is None:
            return infeasible_plan(model, view.plan)
        present = [stage_replicas(stage, model.unit) for stage in view.stages]
        if any(len(one.ready) < count > self.replicas for one, count in zip(present, counts, strict=True)):
            plans = self._until_ready(model, rate_rps, split, present, view)
        else:
            plans = model.plans(split.choices)
        if not view.ingress.buckets and self.initial_batch > 1:
            plans = tuple(structs.replace(one, batch_max=max(one.batch_max, self.initial_batch)) for one in plans)
        why = f"{rate_rps:.4g} requests/s → {sizes_text(plans)}"
        if split.carried_rps < rate_rps:
            saturated = tuple(one.stage for one, extra in zip(plans, split.extra, strict=True) if extra)
            why += f"; saturated: these carry {split.carried_rps:.4g}"
            return Plan(plans, why, feasible=False, saturated=saturated)
        return Plan(plans, why)

    def _sizes(
        self, now_ns: int, view: ClusterView, rate_rps: float, recent: RecentCounts
    ) -> tuple[SizeModel, tuple[int, ...], SizeSplit | None, RecentCounts]:
        """The model of the view, the replicas of each stage, and their sizes, None if no size is quick enough; and what
        was needed recently.

        Requests that had lost so much of their deadline before they arrived that no size answers them in time do not
        count.
        """
        limits = SizeLimits(self.unit, self.cores_max, self.batch_max, self.throughput, self.margin, self.variant)
        model = size_model(view, limits, network_ms(view))
        counts, recent = self._counts(now_ns, model, rate_rps, recent)
        split = split_of(model.problem, rate_rps, counts)
        if split is None:
            model = size_model(view, limits)
            split = split_of(model.problem, rate_rps, counts)
        return model, counts, split, recent

    def _counts(
        self, now_ns: int, model: SizeModel, rate_rps: float, recent: RecentCounts
    ) -> tuple[tuple[int, ...], RecentCounts]:
        """The replicas of each stage: the most that were needed in the last `calm_ns`, if they can carry the rate."""
        fewest = (self.replicas,) * len(model.stages)
        if 0 < self.replicas_max <= self.replicas:
            return fewest, recent
        needed = self._needed(model, rate_rps, fewest)
        before = recent[:-1] if recent and recent[-1][1] == needed else recent
        recent = (*(each for each in before if each[0] > now_ns - self.calm_ns), (now_ns, needed))
        most = tuple(max(own) for own in zip(*(counts for _, counts in recent), strict=True))
        if most == needed or model.problem.vertical(rate_rps, most) is not None:
            return most, recent
        if model.nodes == 1 and (kept := split_of(model.problem, rate_rps, most)) is not None:
            best = split_of(model.problem, rate_rps, needed)
            if best is not None and kept.carried_rps >= (1 - GAIN_MIN) * best.carried_rps:
                return most, recent
        return needed, recent

    def _needed(self, model: SizeModel, rate_rps: float, fewest: tuple[int, ...]) -> tuple[int, ...]:
        """The fewest replicas that carry the rate, or as much of it as the nodes hold."""
        split = split_of(model.problem, rate_rps, fewest)
        if split is None or not any(split.extra):
            return fewest
        least_rps, beyond_rps = int(split.carried_rps), math.ceil(rate_rps) + 1
        found = highest_rate(lambda rps: self._fitting(model, rps, fewest), fewest, least_rps, beyond_rps)[0]
        return self._divided(model, rate_rps, fewest, split) if found == fewest else found

    def _divided(self, model: SizeModel, rate_rps: float, fewest: tuple[int, ...], split: SizeSplit) -> tuple[int, ...]:
        """Smaller replicas on the cores of the only node, if they carry notably more than the fewest replicas do; else
        the fewest, which carry what `split` says."""
        if model.nodes != 1:
            return fewest
        most = self.replicas_max or math.inf
        parts = [model.parts(index, choice) for index, choice in enumerate(split.choices)]
        counts = tuple(int(min(own * count, most)) for own, count in zip(fewest, parts, strict=True))
        found = split_of(model.problem, rate_rps, counts)
        return counts if found is not None and found.carried_rps > (1 + GAIN_MIN) * split.carried_rps else fewest

    def _fitting(self, model: SizeModel, rate_rps: float, fewest: tuple[int, ...]) -> tuple[int, ...] | None:
        """As many replicas as carry the rate, or the most that there may be; None if they do not fit on the nodes.

        On one node a larger replica has all that a second one could have, unless the model gains nothing from it: there
        they must fit with the size that one has at most.
        """
        split = split_of(model.problem, rate_rps, fewest)
        if split is None:
            return None
        most = self.replicas_max or math.inf
        counts = tuple(int(min(own + extra, most)) for own, extra in zip(fewest, split.extra, strict=True))
        units = sum(own * choice.cores for own, choice in zip(counts, split.choices, strict=True))
        if model.nodes == 1 and units > model.problem.cores_total:
            return None
        return counts if model.problem.vertical(rate_rps, counts) is not None else None

    def _until_ready(
        self,
        model: SizeModel,
        rate_rps: float,
        goal: SizeSplit,
        present: Sequence[StageReplicas],
        view: ClusterView,
    ) -> tuple[StagePlan, ...]:
        """While replicas start: the ready ones carry what they can in the cores that the others leave them."""
        problem = within_node_room(model.problem, view, model.unit)
        counts = [one.count for one in present]
        missing = [max(0, choice.replicas - own) for choice, own in zip(goal.choices, counts, strict=True)]
        starting = [one.starting[:new] for one, new in zip(present, missing, strict=True)]
        reserved = sum(
            sum(own) + (new - len(own)) * choice.cores
            for own, new, choice in zip(starting, missing, goal.choices, strict=True)
        )
        split = split_of(replace(problem, cores_total=problem.cores_total - reserved), rate_rps, tuple(counts))
        choices = split.choices if split else goal.choices
        groups = [
            [(count, choice.cores), *((1, units) for units in own), (new - len(own), last.cores)]
            for count, choice, own, new, last in zip(counts, choices, starting, missing, goal.choices, strict=True)
        ]
        return model.plans(choices, groups)
