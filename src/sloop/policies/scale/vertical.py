"""Vertical scaling alone: the same number of replicas of each stage always, resized in place every second.

Sponge extended to pipelines, the vertical baseline of Biscale's evaluation (dissertation chapter P4; the rule is that
of its public artefact): cores and batches of all stages by Biscale's program for fixed replicas, up and down at once.
Beyond what these replicas can carry they get the setting for the highest rate that they can. Fails there: a rate above
it stays unserved for as long as it lasts.
"""

import math
from dataclasses import dataclass

from msgspec import structs

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers.biscale import Throughput
from sloop.solvers.sizing import Limits, sizing_of
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(frozen=True, slots=True)
class Vertical:
    """`replicas` for each stage, of 1 to `cores_max` units of `unit` cores each; batches up to `batch_max`."""

    replicas: int = 1
    unit: float = 1.0
    cores_max: int = 16
    batch_max: int = 16
    throughput: Throughput = "with_queue"
    """Whether waiting for a batch to fill counts as work; `pure` does not, and leaves no head-room."""
    whole: bool = False
    """Whether rates are cut off to whole requests per second, at least 1, as in the public artefact."""
    margin: float = 1.0
    """Part of the SLO to plan with."""
    initial_batch: int = 1
    """Before any request has come."""
    variant: str = ""
    period_ns: int = s(1)

    def __post_init__(self) -> None:
        at_least("replicas", self.replicas, 1)
        above("unit", self.unit, 0)
        at_least("cores_max", self.cores_max, 1)
        at_least("batch_max", self.batch_max, 1)
        within("margin", self.margin, 0, 1)
        at_least("initial_batch", self.initial_batch, 1)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The cheapest setting that carries the forecast; where none does, the one that carries most."""
        limits = Limits(self.unit, self.cores_max, self.batch_max, self.throughput, self.margin, self.variant)
        sizing = sizing_of(view, limits)
        rate_rps = view.forecast_rps
        if self.whole:
            rate_rps = max(1.0, math.floor(rate_rps))
        split = sizing.program.split(rate_rps, [self.replicas] * len(view.stages))
        if split is None:
            why = sizing.excess()
            if view.plan is not None:
                return structs.replace(view.plan, why=f"kept as it was: {why}", feasible=False)
            return Plan(sizing.chosen(sizing.shortest()), why, feasible=False)
        plans = sizing.chosen(split.choices)
        if not view.ingress.buckets and self.initial_batch > 1:
            plans = tuple(structs.replace(one, batch_max=max(one.batch_max, self.initial_batch)) for one in plans)
        why = f"{rate_rps:.4g} requests/s → {sizing.words(plans)}"
        if split.carried_rps < rate_rps:
            short = [one.stage for one, extra in zip(plans, split.extra, strict=True) if extra]
            why += f"; saturated: these carry {split.carried_rps:.4g}"
            return Plan(plans, why, feasible=False, saturated=tuple(short))
        return Plan(plans, why)
