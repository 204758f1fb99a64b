"""The horizontal rival of Biscale's evaluation: FA2's program, asked as often as Biscale's, for replicas of one core.

The rule is that of the public artefact: what must grow grows at once, and smaller clusters come after `settle`
decisions that agree; nothing is decided while replicas start, and a batch changes when its replicas are ready.
Source: dissertation chapter P4, evaluation.
"""

import math
from dataclasses import dataclass, field

from msgspec import structs

from sloop.core.views import ClusterView
from sloop.solvers import surge
from sloop.solvers.biscale import Throughput
from sloop.solvers.sizing import Limits, sizing_of
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(slots=True)
class Memory:
    """Decisions in a row without growth, and the plan that replicas start for."""

    steady: int = 0
    goal: Plan | None = None


@dataclass(frozen=True, slots=True)
class Horizontal:
    """Replicas of one core, batches up to `batch_max`; at first one replica and batches of `initial_batch`."""

    batch_max: int
    settle: int
    initial_batch: int
    throughput: Throughput = "with_queue"
    blocking: bool = True
    period_ns: int = s(1)
    _memory: Memory = field(init=False, default_factory=Memory, repr=False, compare=False)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """Growth at once, shrinkage late."""
        memory = self._memory
        sizing = sizing_of(view, Limits(1.0, 8, self.batch_max, self.throughput, 1.0, ""))
        if view.plan is None:
            plans = sizing.chosen(surge.most(sizing.program, 0))
            return Plan(tuple(structs.replace(one, batch_max=self.initial_batch) for one in plans), "the first")
        have = [surge.have_of(stage, 1.0) for stage in view.stages]
        starting = any(one.starting for one in have)
        if memory.goal is not None and not starting:
            goal, memory.goal = memory.goal, None
            return goal
        if starting and self.blocking:
            return None
        choices = surge.most(sizing.program, max(1, math.floor(view.forecast_rps)))
        final = sizing.chosen(choices)
        counts = [one.count + len(one.starting) for one in have]
        growing = [choice.replicas > count for choice, count in zip(choices, counts, strict=True)]
        if any(growing):
            memory.steady = 0
            in_force = {target.stage: target for target in view.plan.stages}
            memory.goal = Plan(
                tuple(d if g else in_force[d.stage] for d, g in zip(final, growing, strict=True)), "grown"
            )
            grown = [
                sizing.grown(place, [(choice.replicas, 1)], in_force[done.stage]) if grows else in_force[done.stage]
                for place, (choice, done, grows) in enumerate(zip(choices, final, growing, strict=True))
            ]
            return Plan(tuple(grown), f"{view.forecast_rps:.4g} requests/s need more")
        if memory.steady < self.settle:
            memory.steady += 1
            return None
        memory.steady = 0
        return Plan(final, f"{view.forecast_rps:.4g} requests/s")
