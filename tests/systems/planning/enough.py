"""A system for tests: the fewest replicas of one core that serve each stage's rate, in the smallest batches with which
so few do. A batch alone keeps the deadline."""

import math
from dataclasses import dataclass, replace

from sloop.core.protocols import Scale
from sloop.core.views import ClusterView, StageView
from sloop.policies import targets
from sloop.systems import build_system
from sloop.units import ROUNDING, s
from sloop.vocabulary import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Enough(Scale):
    """Enough replicas for the rate."""

    hardware: str = ""
    period_ns: int = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        view = targets.on_one_kind(view, self.hardware)
        stages = tuple(self._stage(stage, view.demand_rps[stage.name]) for stage in view.stages)
        told = (f"{view.demand_rps[each.stage]:g} requests/s → {each.groups[0].count} replicas" for each in stages)
        return Plan(stages, ", ".join(told)), None

    def _stage(self, stage: StageView, rate_rps: float) -> StagePlan:
        belief = targets.belief_of(stage)
        slot = belief.slot(1.0)
        within = sum(0 < cost_ns <= stage.slo_ns for cost_ns in belief.costs_ns(slot))
        needed = [
            max(1, math.ceil(rate_rps * belief.latency_ms(batch, slot) / batch / 1000 - ROUNDING))
            for batch in range(1, max(1, within) + 1)
        ]
        batch = needed.index(min(needed)) + 1
        return targets.equal_replicas(stage, belief, count=min(needed), cores=1.0, batch_max=batch)


_STATIC = build_system("static")
SYSTEM = replace(
    _STATIC, name="enough", policies=replace(_STATIC.policies, scale=Enough()), mixed="keeps to one kind of hardware"
)
