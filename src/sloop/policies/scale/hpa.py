"""Kubernetes' Horizontal Pod Autoscaler: as many equal replicas as bring their utilisation to a target.

The algorithm of autoscaling/v2 for a resource metric (Kubernetes documentation, "Horizontal Pod Autoscaling": algorithm
details, configurable scaling behaviour), with its defaults: desired = ⌈ready × utilisation/target⌉, nothing within the
tolerance, replicas that are not ready counted as idle when it would scale out, scale-in only to the largest
recommendation of the stabilisation window, and rate limits per period. Utilisation is the busy share of ready cores.
Fails for deadlines: utilisation cannot exceed 1, so a flash crowd of any size is answered by the same small step, and
queues are not seen.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from sloop.core.views import ClusterView, StageView
from sloop.policies.bounds import above, at_least
from sloop.solvers import targets
from sloop.units import s
from sloop.vocabulary import Life, Plan, StagePlan

UP_REPLICAS, UP_FACTOR = 4, 2
"""Scale-out adds at most 4 replicas or doubles them, whichever is more, in `up_period_ns`."""


@dataclass(slots=True)
class Past:
    """What is remembered of one stage."""

    count: int
    recommendations: deque[tuple[int, int]] = field(default_factory=deque)
    """(instant, replicas), oldest first, no older than the stabilisation window."""
    added: deque[tuple[int, int]] = field(default_factory=deque)
    """(instant, replicas added), no older than a scale-out period."""


@dataclass(frozen=True, slots=True)
class Hpa:
    """From `replicas_min` to `replicas_max` replicas of `cores` each, at `target` utilisation of the last window."""

    target: float = 0.8
    tolerance: float = 0.1
    replicas_min: int = 1
    replicas_max: int = 64
    cores: float = 1.0
    batch_max: int = 0
    variant: str = ""
    window_ns: int = s(15)
    stabilisation_ns: int = s(300)
    up_period_ns: int = s(15)
    period_ns: int = s(15)
    _past: dict[str, Past] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        above("target", self.target, 0)
        at_least("tolerance", self.tolerance, 0)
        at_least("replicas_min", self.replicas_min, 1)
        at_least("replicas_max", self.replicas_max, self.replicas_min)
        above("cores", self.cores, 0)
        at_least("batch_max", self.batch_max, 0)
        for key in ("window_ns", "up_period_ns", "period_ns"):
            above(key, getattr(self, key), 0)
        at_least("stabilisation_ns", self.stabilisation_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """Each stage by itself."""
        decided = [self._stage(now_ns, stage) for stage in view.stages]
        return Plan(tuple(target for target, _ in decided), "; ".join(why for _, why in decided))

    def _stage(self, now_ns: int, stage: StageView) -> tuple[StagePlan, str]:
        past = self._past.setdefault(stage.name, Past(self.replicas_min))
        proposed, seen = self._proposed(stage, past.count)
        stable = self._stabilised(now_ns, past, proposed)
        desired = min(stable, self._limit(now_ns, past), self.replicas_max)
        why = f"{stage.name}: {seen} → {targets.amount(desired, 'replica')}"
        if desired != past.count:
            why += f" (were {past.count})"
        if stable > proposed:
            why += f", {proposed} only after {self.stabilisation_ns / 1e9:g} s"
        elif desired < stable:
            why += f", limited from {stable}"
        if desired > past.count:
            past.added.append((now_ns, desired - past.count))
        past.count = desired
        variant = targets.variant_of(stage, self.variant)
        planned = targets.equal_replicas(
            stage, variant, count=desired, cores=self.cores, batch_max=self.batch_max, in_place=False
        )
        return planned, why

    def _proposed(self, stage: StageView, current: int) -> tuple[int, str]:
        """The plain answer to the metric, within the bounds, and what was seen."""
        ready, starting = stage.count(Life.READY), stage.count(Life.STARTING)
        window = stage.window(self.window_ns)
        if not ready or not sum(bucket.ready_core_ns for bucket in window):
            return current, "no replica has been ready"
        utilisation = stage.utilisation(self.window_ns)
        ratio = utilisation / self.target
        seen = f"utilisation {utilisation:.2f} of {self.target:g}"
        if abs(ratio - 1.0) <= self.tolerance:
            return current, f"{seen}, within tolerance"
        counted = ready
        if starting and ratio > 1.0:
            # They will take their part of the work; until they do, they count as idle.
            counted = ready + starting
            ratio *= ready / counted
            seen += f", {starting} starting"
            if ratio <= 1.0 + self.tolerance:
                return current, seen
        desired = math.ceil(ratio * counted - 1e-9)
        if (ratio > 1.0 and desired < current) or (ratio < 1.0 and desired > current):
            desired = current
        return max(self.replicas_min, min(desired, self.replicas_max)), seen

    def _stabilised(self, now_ns: int, past: Past, proposed: int) -> int:
        """Up at once; down to the largest recommendation of the window."""
        past.recommendations.append((now_ns, proposed))
        while past.recommendations[0][0] < now_ns - self.stabilisation_ns:
            past.recommendations.popleft()
        largest = max(count for _, count in past.recommendations)
        return max(proposed, min(past.count, largest))

    def _limit(self, now_ns: int, past: Past) -> int:
        """The most replicas this period allows, from what there were at its start."""
        while past.added and past.added[0][0] <= now_ns - self.up_period_ns:
            past.added.popleft()
        start = past.count - sum(added for _, added in past.added)
        return max(start + UP_REPLICAS, start * UP_FACTOR, past.count)
