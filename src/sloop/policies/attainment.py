"""What a plan attains: the fraction of the expected requests that it is predicted to answer within their deadlines.

It is computed from what the scaling policy saw (forecast, beliefs and how far means are from them, deadlines), for a
data path that drops what would be late, as that of most systems does. A data path that does not drop lets an overloaded
stage answer everything late: then less is attained than predicted.
"""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from sloop.core.views import ClusterView, StageView
from sloop.solvers.queueing import in_time
from sloop.units import NS_PER_MS, NS_PER_S, to_ms
from sloop.vocabulary import Plan, ReplicaSpec, StagePlan

ROOM = 1.1
"""Of the batch sizes, the smallest is assumed with which the replicas serve this many times the expected rate."""


class StageService(Struct, frozen=True):
    """What the replicas of a stage serve together."""

    servers: float = 0.0
    """The number of replicas: 0, or at least 1."""
    capacity_rps: float = 0.0
    """Rows per second."""
    batch_ms: float = math.inf
    """The mean duration of a batch."""

    def times(self, fraction: float) -> "StageService":
        """The same with this fraction of the cores, 0 to 1: with fewer replicas or, instead of less than one, with a
        slower one."""
        servers = self.servers * fraction
        if not servers:
            return StageService()
        return StageService(max(1.0, servers), self.capacity_rps * fraction, self.batch_ms * max(1.0, 1 / servers))


def services_of(plan: Plan, view: ClusterView) -> dict[str, StageService]:
    """What each stage of a plan serves, by the beliefs and the demand of the view."""
    stages = {stage.name: stage for stage in view.stages}
    return {each.stage: _service(each, stages[each.stage], view.demand_rps[each.stage]) for each in plan.stages}


def attained(services: Mapping[str, StageService], view: ClusterView) -> float:
    """The predicted fraction of the requests in time, 0 to 1.

    The deadline of a path is divided among its stages in proportion to the durations of their batches. A stage gets
    only the requests that the stages before it have answered in time. Source: `sloop.solvers.queueing.in_time`.
    """
    deadlines_ms = dict.fromkeys(services, math.inf)
    for path in view.paths:
        total_ms = sum(services[name].batch_ms for name in path.stages)
        for name in path.stages:
            own_ms = to_ms(path.slo_ns) * services[name].batch_ms / total_ms if total_ms < math.inf else 0.0
            deadlines_ms[name] = min(deadlines_ms[name], own_ms)
    found = 1.0
    for stage in view.stages:
        own = services[stage.name]
        rate_rps = view.demand_rps[stage.name] * found
        share = in_time(rate_rps, own.servers, own.capacity_rps, own.batch_ms, deadlines_ms[stage.name])
        found *= 1 - min(1.0, stage.visits) * (1 - share)
    return found


def _service(target: StagePlan, stage: StageView, rate_rps: float) -> StageService:
    """With the smallest batches (powers of two) at which the replicas serve `ROOM` times the rate; if there are none,
    with those at which they serve most."""
    groups = [group for group in target.groups if group.count]
    costs = [(group.count, target.batch_max_of(group), _costs_ns(group.spec, stage)) for group in groups]
    largest = max((batch_max for _, batch_max, _ in costs), default=0)
    best, size = StageService(), 1
    while size // 2 < largest:
        rates = [count * min(size, most) * NS_PER_S / own_ns[min(size, most)] for count, most, own_ns in costs]
        servers, capacity_rps = sum(count for count, _, _ in costs), sum(rates)
        if capacity_rps > best.capacity_rps:
            total_ms = sum(count * own_ns[min(size, most)] for count, most, own_ns in costs) / NS_PER_MS
            best = StageService(servers, capacity_rps, total_ms / servers)
        if capacity_rps >= ROOM * rate_rps:
            break
        size *= 2
    return best


def _costs_ns(spec: ReplicaSpec, stage: StageView) -> Sequence[float]:
    """The mean duration of a batch in ns, by its rows, on the replica's own cores alone: others may need those that it
    shares."""
    slot = spec.slot if spec.slot.is_capped else structs.replace(spec.slot, is_capped=True)
    belief = stage.beliefs[spec.variant, slot.hardware]
    return [belief.mean_ratio * cost_ns for cost_ns in belief.of(spec.shape).costs_ns(slot)]
