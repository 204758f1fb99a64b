"""What a system would have of a cluster at a steady rate: the answer of `plan` and `check`.

Promises to ask the very policies that would run, with the views they would be shown once the rate has been steady for
ten minutes; nothing is started, read or written. The answer is a fixed point: a plan that, were its replicas ready, the
system would ask for again. Policies that react to utilisation need a few rounds to get there.

Predictions are for work-conserving batches: they grow to the smallest size whose throughput meets the rate, and a
request waits for its batch to fill, (b - 1)/rate per replica (FA2; Biscale, chapter P4), at most for the batch before.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct

from sloop.app.application import Application
from sloop.app.foreign import foreign_profiles
from sloop.core.ledger import Holding, Ledger, millicores
from sloop.core.monitor import BUCKETS_KEPT
from sloop.core.views import Belief, Bucket, ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.systems.setup import Setup
from sloop.units import NS_PER_S
from sloop.vocabulary import Life, Plan, ReplicaId, ReplicaSpec, StagePlan

ROUNDS_MAX: Final = 40
"""Utilisation-driven policies settle within a few rounds; one that still moves after this many never will."""
SLACKS_MAX: Final = 10_000
"""Slacks listed for one second; they are all the same, so more say nothing new."""


class StageNeed(Struct, frozen=True):
    """What one stage gets of one kind of replica; `cores` are each replica's."""

    stage: str
    variant: str
    replicas: int
    batch: int
    cores: float
    predicted_ms: float


class Need(Struct, frozen=True):
    """The cluster a system wants at a steady rate, and what that is believed to give."""

    system: str
    feasible: bool
    stages: tuple[StageNeed, ...]
    cores: float
    usd_per_h: float
    predicted_ms: float
    solve_ms: float
    why: str
    notes: tuple[str, ...] = ()
    """What speaks against believing it, one line each."""


def need(setup: Setup, rate_rps: float) -> Need:
    """What the setup's system wants at `rate_rps` requests per second, believed to hold for ever."""
    started_ns = time.perf_counter_ns()
    plan = steady_plan(setup, rate_rps)
    solve_ms = (time.perf_counter_ns() - started_ns) / 1e6
    visits = setup.application.visits
    stages = tuple(
        row for target in plan.stages for row in _stage_needs(target, setup.beliefs, rate_rps * visits[target.stage])
    )
    placed, short = _placed(plan, setup)
    predicted_ms = _longest_ms(setup.application, stages)
    reasons = [plan.why, *short]
    if math.isinf(predicted_ms):
        reasons.append(f"the plan cannot keep up with {rate_rps:g} requests/s")
    elif predicted_ms > setup.application.slo_ms:
        reasons.append(f"the predicted {predicted_ms:.4g} ms exceed the deadline of {setup.application.slo_ms:g} ms")
    return Need(
        system=setup.system.name,
        feasible=plan.feasible and not plan.saturated and len(reasons) == 1,
        stages=stages,
        cores=sum(row.replicas * row.cores for row in stages),
        usd_per_h=sum(node.usd_per_h for node in setup.application.cluster if node.name in placed),
        predicted_ms=predicted_ms,
        solve_ms=solve_ms,
        why="; ".join(reasons),
        notes=foreign_profiles(setup.application),
    )


def steady_plan(setup: Setup, rate_rps: float) -> Plan:
    """The plan the system keeps at a steady rate; an infeasible, empty one where it has none."""
    scale = setup.system.policies.scale
    plan = Plan(stages=(), why=f"{setup.system.name} has no plan", feasible=False)
    now_ns = BUCKETS_KEPT * NS_PER_S
    for _ in range(ROUNDS_MAX):
        answer = scale.plan(now_ns, _view(now_ns, setup, plan, rate_rps))
        if answer is None or answer.same_target(plan):
            return answer or plan
        plan = answer
        now_ns += BUCKETS_KEPT * NS_PER_S  # so that no window or delay of the policy reaches back to the last round
    return plan


def _view(now_ns: int, setup: Setup, plan: Plan, rate_rps: float) -> ClusterView:
    targets = {target.stage: target for target in plan.stages}
    application = setup.application
    visits = application.visits
    stages = tuple(
        _stage_view(now_ns, setup, name, targets.get(name), rate_rps * often) for name, often in visits.items()
    )
    slack_ns = [application.slo_ns] * min(round(rate_rps), SLACKS_MAX)
    door = Traffic(
        buckets=[
            Bucket(start_ns=start_ns, arrivals=round(rate_rps), slack_ns=slack_ns)
            for start_ns in range(now_ns - BUCKETS_KEPT * NS_PER_S, now_ns, NS_PER_S)
        ],
        bucket_ns=NS_PER_S,
    )
    forecast_rps = setup.system.policies.forecast.demand_rps(now_ns, door)
    nodes = tuple(
        NodeView(node, node.cores, node.memory_bytes, dict.fromkeys(node.devices, 1.0)) for node in application.cluster
    )
    return ClusterView(
        stages=stages,
        nodes=nodes,
        plan=plan if plan.stages else None,
        demand_rps={name: forecast_rps * often for name, often in visits.items()},
        door=door,
        forecast_rps=forecast_rps,
        paths=application.paths,
    )


def _stage_view(now_ns: int, setup: Setup, name: str, target: StagePlan | None, rate_rps: float) -> StageView:
    """The stage as it looks when every replica of the plan has been ready, and the rate steady, for ten minutes."""
    stage = setup.application.by_name[name]
    variants = {variant.name: setup.beliefs[name, variant.name] for variant in stage.variants}
    specs = [group.spec for group in target.groups for _ in range(group.count)] if target else []
    replicas = tuple(
        ReplicaView(ReplicaId(index), spec, Life.READY, since_ns=0, running=0) for index, spec in enumerate(specs)
    )
    ready_cores = sum(spec.cores for spec in specs)
    occupation = _occupation(specs, target, variants, rate_rps)
    arrivals = round(rate_rps)
    slack_ns = [setup.application.slo_ns] * min(arrivals, SLACKS_MAX)
    buckets = [
        Bucket(
            start_ns=start_ns,
            arrivals=arrivals,
            busy_core_ns=round(occupation.busy_cores * NS_PER_S),
            ready_core_ns=round(ready_cores * NS_PER_S),
            running_ns=round(occupation.running * NS_PER_S),
            waiting_ns=round(occupation.waiting * NS_PER_S),
            slack_ns=slack_ns,
        )
        for start_ns in range(now_ns - BUCKETS_KEPT * NS_PER_S, now_ns, NS_PER_S)
    ]
    return StageView(
        name=name,
        slo_ns=setup.application.slo_ns,
        after=stage.after,
        variants=variants,
        replicas=replicas,
        queue=(),
        running=0,
        buckets=buckets,
        bucket_ns=NS_PER_S,
        visits=setup.application.visits[name],
    )


@dataclass(frozen=True, slots=True)
class Occupation:
    """What a stage's replicas are busy with, on average over time."""

    busy_cores: float = 0.0
    running: float = 0.0
    """Requests being executed."""
    waiting: float = 0.0
    """Requests that a second brings beyond what the replicas can take: a lower bound of a queue without end."""


def _occupation(
    specs: Sequence[ReplicaSpec], target: StagePlan | None, variants: Mapping[str, Belief], rate_rps: float
) -> Occupation:
    """The rate shared evenly by the plan's replicas, each with the smallest batch that keeps up (Little's law)."""
    if not specs or target is None:
        return Occupation(waiting=rate_rps)
    busy_cores = running = waiting = 0.0
    share_rps = rate_rps / len(specs)
    for spec in specs:
        belief = variants[spec.variant]
        largest = min(target.batch_max, belief.batch_max)
        batch = _batch(belief, spec.cores, largest, share_rps) or largest
        latency_s = belief.latency_ms(batch, spec.cores) / 1e3
        served_rps = min(share_rps, batch / latency_s)
        busy_cores += spec.cores * served_rps * latency_s / batch
        running += served_rps * latency_s
        waiting += share_rps - served_rps
    return Occupation(busy_cores, running, waiting)


def _batch(belief: Belief, cores: float, largest: int, rate_rps: float) -> int | None:
    """The smallest batch with which a replica keeps up; None where none does."""
    return next((b for b in range(1, largest + 1) if b * 1e3 >= rate_rps * belief.latency_ms(b, cores)), None)


def _stage_needs(target: StagePlan, beliefs: Mapping[tuple[str, str], Belief], rate_rps: float) -> list[StageNeed]:
    """One row per group; the rate is shared evenly among the stage's replicas."""
    replicas = sum(group.count for group in target.groups)
    rows = []
    for group in target.groups:
        spec, belief = group.spec, beliefs[target.stage, group.spec.variant]
        largest = min(target.batch_max, belief.batch_max)
        predicted_ms = _predicted_ms(belief, spec.cores, largest, rate_rps / max(1, replicas))
        rows.append(StageNeed(target.stage, spec.variant, group.count, largest, spec.cores, predicted_ms))
    return rows


def _predicted_ms(belief: Belief, cores: float, largest: int, rate_rps: float) -> float:
    """Queueing and service of one request at a replica; infinite where no batch up to `largest` keeps up."""
    batch = _batch(belief, cores, largest, rate_rps)
    if batch is None:
        return math.inf
    latency_ms = belief.latency_ms(batch, cores)
    fill_ms = (batch - 1) * 1e3 / rate_rps if rate_rps > 0 else 0.0
    return latency_ms + min(fill_ms, latency_ms)


def _longest_ms(application: Application, rows: Sequence[StageNeed]) -> float:
    """The longest path through the graph, each stage taking what its slowest replica takes."""
    done_ms: dict[str, float] = {}
    for stage in application.order:
        own_ms = max((row.predicted_ms for row in rows if row.stage == stage.name and row.replicas), default=0.0)
        done_ms[stage.name] = own_ms + max((done_ms[before] for before in stage.after), default=0.0)
    return max(done_ms.values(), default=0.0)


def _placed(plan: Plan, setup: Setup) -> tuple[set[str], list[str]]:
    """Names of the nodes the plan occupies, and what has no room."""
    place = setup.system.policies.place
    ledger, used, short, next_id = Ledger(setup.application.cluster), set[str](), list[str](), 0
    for target in plan.stages:
        for group in target.groups:
            spec, memory_bytes = group.spec, setup.beliefs[target.stage, group.spec.variant].memory_bytes
            for placed in range(group.count):
                name = spec.node or place.choose(0, spec, memory_bytes, ledger.views())
                share = round(spec.share * 1_000_000)
                holding = Holding(name or "", millicores(spec.cores), memory_bytes, spec.device, share)
                if name is None or not ledger.reserve(ReplicaId(next_id), holding):
                    short.append(
                        f"no node has room for {group.count - placed} of {group.count} replicas of {target.stage}"
                        f"/{spec.variant} with {spec.cores:g} cores"
                    )
                    break
                used.add(name)
                next_id += 1
    return used, short
