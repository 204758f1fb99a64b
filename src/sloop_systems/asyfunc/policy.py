"""The scaling policies that AsyFunc is compared with; its own is `sloop.policies.scale.bodies`.

Source: AsyFunc (submission to SoCC'23), Figs. 1 and 10 to 13; section 5.1 of our specification.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from sloop.api import (
    Group,
    NonNegativeFloat,
    Plan,
    PositiveFloat,
    PositiveInt,
    Range,
    ReplicaSpec,
    StagePlan,
    ms,
    round_down,
    round_up,
    s,
    to_ms,
)
from sloop.api.policies import ClusterView, Scale, targets
from sloop.api.solvers import capacity_rps, largest_batch
from sloop_systems.asyfunc.solver import choose_batching

CORES_MAX: Final = 16
"""C_max: the most cores of a replica."""
ALPHA: Final = 0.8
"""α: replicas are added above this utilisation."""


@dataclass(frozen=True, slots=True)
class OfflineBatch(Scale):
    """Equal replicas whose cores, batch and waiting time are chosen once; their number follows the mean rate.

    BATCH (Ali et al., SC 2020) as AsyFunc compares with it (section 5.1 of our specification): the configuration with
    the least core time per request at `rate_rps`, the mean rate of the trace. Fails if the real rate is another one.
    """

    resizes: ClassVar[bool] = False
    rate_rps: NonNegativeFloat = 0.0
    """0: the rate of the first plan that has one. Until then, replicas have the cheapest configuration for single
    requests."""
    prewarm: PositiveFloat = 1.0
    """k_b: the replicas that are kept, as a multiple of those that the rate needs."""
    batch_max: Annotated[int, Range(least=1, most=1024)] = 8
    variant: str = ""
    hardware: str = ""
    period_ns: PositiveInt = s(10)

    def plan(
        self, now_ns: int, view: ClusterView, memory: tuple[int, int, float] | None
    ) -> tuple[Plan, tuple[int, int, float] | None]:
        """What is remembered are cores, batch and waiting time in ms, once they are chosen.

        InputError for a graph, or a variant that the stage does not have."""
        view = targets.on_one_kind(view, self.hardware)
        stage = targets.one_stage(view, "offline_batch")
        belief = targets.belief_of(stage, self.variant)
        largest = max([node.node.cores for node in view.nodes], default=CORES_MAX)
        cores_max = max(1, min(CORES_MAX, round_down(largest)))
        latency_ms = targets.table_ms(belief, cores_max, min(self.batch_max, belief.batch_max))
        now_rps = view.demand_rps[stage.name]
        rate_rps = self.rate_rps or now_rps
        chosen = memory
        if chosen is None:
            found = choose_batching(latency_ms, rate_rps, to_ms(stage.slo_ns))
            chosen = (found.cores, found.batch, found.wait_ms) if found else (cores_max, 1, 0.0)
            memory = chosen if rate_rps else None
        cores, batch, wait_ms = chosen
        each_rps = 1e3 * batch / float(latency_ms[cores, batch])
        count = max(1, round_up(self.prewarm * now_rps / (ALPHA * each_rps)))
        why = f"{now_rps:.4g} rps, {each_rps:.4g} rps each with {cores} cores and batches of {batch}"
        group = Group(ReplicaSpec(stage.name, belief.variant, belief.slot(cores)), count, batch, count * each_rps)
        target = StagePlan(stage.name, (group,), batch, in_place=False, wait_ns=ms(wait_ms))
        return Plan((target,), f"{stage.name}: {why}"), memory


@dataclass(frozen=True, slots=True)
class ByCapacity(Scale):
    """As many equal replicas as carry the forecast within the SLO: ⌈rate / capacity⌉.

    With the present rate as the forecast this is on-demand scaling, with the rate of the last period last-value, and
    with 1.5 × that rate k-last-value (AsyFunc's Fig. 1; section 5.1 of our specification). Fails if the rate changes
    faster than a replica loads.
    """

    is_quick: ClassVar[bool] = True
    resizes: ClassVar[bool] = False
    cores: Annotated[int, Range(least=1, most=1024)] = CORES_MAX
    batch_max: Annotated[int, Range(least=1, most=1024)] = 8
    variant: str = ""
    hardware: str = ""
    period_ns: PositiveInt = s(10)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        """InputError for a graph, or a variant that the stage does not have."""
        view = targets.on_one_kind(view, self.hardware)
        stage = targets.one_stage(view, "by_capacity")
        belief = targets.belief_of(stage, self.variant)
        own_ms = targets.table_ms(belief, self.cores, min(self.batch_max, belief.batch_max))[self.cores].tolist()
        each_rps = capacity_rps(own_ms, to_ms(stage.slo_ns))
        batch, rate_rps = max(1, largest_batch(own_ms, to_ms(stage.slo_ns))), view.demand_rps[stage.name]
        count = max(1, round_up(rate_rps / each_rps)) if each_rps else 1
        why = f"{rate_rps:.4g} rps, {each_rps:.4g} rps each"
        group = Group(ReplicaSpec(stage.name, belief.variant, belief.slot(self.cores)), count, batch)
        target = StagePlan(stage.name, (group,), batch, in_place=False, wait_ns=stage.slo_ns)
        return Plan((target,), f"{stage.name}: {why}", feasible=each_rps > 0), None
