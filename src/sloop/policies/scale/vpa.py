"""Vertical scaling the way Kubernetes' Vertical Pod Autoscaler does it: larger or smaller replicas, by restart.

A threshold recommender on utilisation, the vertical baseline suggested for Sponge (target 0.7, a change at most every
60 s): cores = used cores ÷ target, rounded up to a core count on offer. A replica of the new size is started beside the
old one, which stops when the new one is ready. Fails for bursts: used cores cannot exceed what is there, so growth is
by 1/target a minute, and each step pays a cold start.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sloop.core.views import ClusterView, StageView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers import targets
from sloop.units import s
from sloop.vocabulary import Life, Plan, StagePlan

CORES_MAX = 16


@dataclass(slots=True)
class Size:
    """What one stage has, and since when."""

    cores: float
    since_ns: int


@dataclass(frozen=True, slots=True)
class Vpa:
    """`replicas` replicas at `target` utilisation; `cores` is what to choose from, whole cores up to 16 if empty.

    A change of size is at least `settle_ns` after the one before, and only where utilisation is off by `tolerance`.
    """

    target: float = 0.7
    tolerance: float = 0.1
    replicas: int = 1
    cores: tuple[float, ...] = ()
    batch_max: int = 0
    variant: str = ""
    settle_ns: int = s(60)
    period_ns: int = s(10)
    _sizes: dict[str, Size] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        within("target", self.target, 0, 1)
        at_least("tolerance", self.tolerance, 0)
        at_least("replicas", self.replicas, 1)
        for cores in self.cores:
            above("cores", cores, 0)
        at_least("batch_max", self.batch_max, 0)
        above("settle_ns", self.settle_ns, 0)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """Each stage by itself."""
        choices = targets.core_choices(view, self.cores, CORES_MAX, "vpa")
        decided = [self._stage(now_ns, stage, choices) for stage in view.stages]
        return Plan(tuple(target for target, _ in decided), "; ".join(why for _, why in decided))

    def _stage(self, now_ns: int, stage: StageView, choices: Sequence[float]) -> tuple[StagePlan, str]:
        size = self._sizes.setdefault(stage.name, Size(choices[0], now_ns))
        cores, seen = self._proposed(now_ns, stage, size, choices)
        if cores != size.cores:
            seen += f" (were {size.cores:g})"
            size.cores, size.since_ns = cores, now_ns
        variant = targets.variant_of(stage, self.variant)
        planned = targets.equal_replicas(
            stage, variant, count=self.replicas, cores=cores, batch_max=self.batch_max, in_place=False
        )
        return planned, f"{stage.name}: {seen}"

    def _proposed(self, now_ns: int, stage: StageView, size: Size, choices: Sequence[float]) -> tuple[float, str]:
        """Cores per replica, and why."""
        kept = f"kept at {targets.amount(size.cores, 'core')}"
        if stage.count(Life.STARTING) or not stage.count(Life.READY):
            return size.cores, f"a replica is starting, {kept}"
        if now_ns - size.since_ns < self.settle_ns or not stage.buckets:
            return size.cores, f"changed less than {self.settle_ns / 1e9:g} s ago, {kept}"
        window = stage.window(self.settle_ns)
        used = sum(bucket.busy_core_ns for bucket in window) / (len(window) * stage.bucket_ns * self.replicas)
        seen = f"{used:.2f} of {targets.amount(size.cores, 'core')} used, target {self.target:g}"
        if abs(used / size.cores / self.target - 1.0) <= self.tolerance:
            return size.cores, f"{seen}, {kept}"
        wanted = used / self.target
        cores = next((c for c in choices if c >= wanted - 1e-9), choices[-1])
        return cores, f"{seen} → {targets.amount(cores, 'core')}" if cores != size.cores else f"{seen}, {kept}"
