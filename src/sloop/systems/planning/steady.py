"""What the policies of a system answer once the rate has been steady for ten minutes: a fixed point.

Promises to ask the very policies that would run, with the views they would be shown, and to leave the setup's own as
fresh as they were; nothing is started, read or written. The answer is a plan that, were its replicas ready, the system
would ask for again. Policies that react to utilisation need a few rounds to get there.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Final

from sloop.core.monitor import BUCKETS_KEPT, SLACK_BUCKETS_KEPT
from sloop.core.protocols import Policies
from sloop.core.views import Belief, Bucket, ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.systems.planning.lacking import too_large
from sloop.systems.planning.predict import Outlook, keeping_up
from sloop.systems.setup import Setup
from sloop.units import NS_PER_S
from sloop.vocabulary import Life, Plan, ReplicaId, StagePlan

ROUNDS_MAX: Final = 40
"""Utilisation-driven policies settle within a few rounds; one that still moves after this many never will."""
SLACKS_MAX: Final = 10_000
"""Slacks listed for one second; they are all the same, so more say nothing new."""
REPLICAS_SHOWN: Final = 10_000
"""A plan of so many replicas is shown to its policy again however little room there is."""
BEYOND: Final = 2.0
"""A rate that takes so many times the cores there are is beyond the cluster, whatever the policy."""


@dataclass(frozen=True, slots=True)
class Steady:
    """A plan that stays, and the longest single decision on the way to it, in milliseconds."""

    plan: Plan
    solve_ms: float
    cut_short: str = ""
    """Why the policy was not asked until its plan stays; empty where it was."""


def steady_plan(setup: Setup, rate_rps: float) -> Steady:
    """The plan the system keeps at a steady rate; an infeasible, empty one where it has none.

    Where it asks for very many replicas and the cluster could not hold the rate by far, the first plan to do so is the
    answer: millions of replicas that cannot be need no second look at how busy they would be.
    """
    policies = setup.system.fresh().policies
    plan = Plan(stages=(), why=f"{setup.system.name} has no plan", feasible=False)
    now_ns, longest_ns = BUCKETS_KEPT * NS_PER_S, 0
    for _ in range(ROUNDS_MAX):
        view = _view(now_ns, setup, policies, plan, rate_rps)
        started_ns = time.perf_counter_ns()
        answer = policies.scale.plan(now_ns, view)
        longest_ns = max(longest_ns, time.perf_counter_ns() - started_ns)
        if answer is None or answer.same_target(plan):
            plan = answer or plan
            break
        plan = answer
        if cut_short := _beyond(setup, plan, rate_rps):
            return Steady(plan, longest_ns / 1e6, cut_short)
        now_ns += BUCKETS_KEPT * NS_PER_S  # so that no window or delay of the policy reaches back to the last round
    return Steady(plan, longest_ns / 1e6)


def _beyond(setup: Setup, plan: Plan, rate_rps: float) -> str:
    """Why there is no point in asking again: how many replicas, and how far the rate is beyond the nodes; else ""."""
    count = sum(group.count for target in plan.stages for group in target.groups)
    if count <= REPLICAS_SHOWN:
        return ""
    for lack in too_large(setup, Outlook(setup, plan, rate_rps)):
        if lack.needs > BEYOND * lack.has:
            return (
                f"{setup.system.name} was asked no further once it wanted {count:,} replicas, and might want others: "
                f"the rate takes {lack.needs / lack.has:,.0f} times the cores there are"
            )
    return ""


def _arrivals(rate_rps: float) -> list[int]:
    """Arrivals of each second kept, evenly spread: whole numbers whose mean is the rate, the last rounded up."""
    passed = [math.ceil(rate_rps * left - 1e-6) for left in range(BUCKETS_KEPT, -1, -1)]
    return [before - after for before, after in pairwise(passed)]


def _view(now_ns: int, setup: Setup, policies: Policies, plan: Plan, rate_rps: float) -> ClusterView:
    targets = {target.stage: target for target in plan.stages}
    application = setup.application
    visits = application.visits
    stages = tuple(
        _stage_view(now_ns, setup, name, targets.get(name), rate_rps * often) for name, often in visits.items()
    )
    ingress = Traffic(buckets=_buckets(now_ns, rate_rps, application.slo_ns), bucket_ns=NS_PER_S)
    forecast_rps = policies.forecast.demand_rps(now_ns, ingress)
    nodes = tuple(
        NodeView(node, node.cores, node.memory_bytes, dict.fromkeys(node.devices, 1.0)) for node in application.cluster
    )
    return ClusterView(
        stages=stages,
        nodes=nodes,
        plan=plan if plan.stages else None,
        demand_rps={name: forecast_rps * often for name, often in visits.items()},
        ingress=ingress,
        forecast_rps=forecast_rps,
        paths=application.paths,
    )


def _buckets(
    now_ns: int, rate_rps: float, slo_ns: int, occupation: "Occupation | None" = None, ready_cores: float = 0.0
) -> list[Bucket]:
    """The last seconds at a steady rate; as in a monitor, only the newest keep slacks, here one list for all."""
    busy = occupation or Occupation()
    waiting_ns, running_ns = round(busy.waiting * NS_PER_S), round(busy.running * NS_PER_S)
    busy_core_ns, ready_core_ns = round(busy.busy_cores * NS_PER_S), round(ready_cores * NS_PER_S)
    starts_ns = range(now_ns - BUCKETS_KEPT * NS_PER_S, now_ns, NS_PER_S)
    buckets = [
        Bucket(start_ns, arrivals, waiting_ns, running_ns, busy_core_ns, ready_core_ns)
        for start_ns, arrivals in zip(starts_ns, _arrivals(rate_rps), strict=True)
    ]
    newest = buckets[-SLACK_BUCKETS_KEPT:]
    slack_ns = {each: [slo_ns] * min(each, SLACKS_MAX) for each in {bucket.arrivals for bucket in newest}}
    for bucket in newest:
        bucket.slack_ns = slack_ns[bucket.arrivals]
    return buckets


def _stage_view(now_ns: int, setup: Setup, name: str, target: StagePlan | None, rate_rps: float) -> StageView:
    """The stage as it looks when every replica of the plan has been ready, and the rate steady, for ten minutes."""
    stage = setup.application.by_name[name]
    variants = {variant.name: setup.beliefs[name, variant.name] for variant in stage.variants}
    groups = target.groups if target else ()
    specs = [spec for group in groups for spec in repeat(group.spec, group.count)]
    ready_cores = math.fsum(group.count * group.spec.cores for group in groups)
    occupation = _occupation(target, variants, rate_rps)
    return StageView(
        name=name,
        slo_ns=setup.application.slo_ns,
        after=stage.after,
        variants=variants,
        replicas=tuple([ReplicaView(ReplicaId(id), spec, Life.READY, 0, 0) for id, spec in enumerate(specs)]),
        queue=(),
        running=0,
        buckets=_buckets(now_ns, rate_rps, setup.application.slo_ns, occupation, ready_cores),
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


def _occupation(target: StagePlan | None, variants: Mapping[str, Belief], rate_rps: float) -> Occupation:
    """The rate shared evenly by the plan's replicas, each with the smallest batch that keeps up (Little's law)."""
    replicas = sum(group.count for group in target.groups) if target else 0
    if target is None or not replicas:
        return Occupation(waiting=rate_rps)
    busy_cores = running = waiting = 0.0
    share_rps = rate_rps / replicas
    for group in target.groups:
        belief, cores = variants[group.spec.variant], group.spec.cores
        largest = min(target.batch_max, belief.batch_max)
        batch = keeping_up(belief, cores, largest, share_rps) or largest
        latency_s = belief.latency_ms(batch, cores) / 1e3
        served_rps = min(share_rps, batch / latency_s)
        busy_cores += group.count * cores * served_rps * latency_s / batch
        running += group.count * served_rps * latency_s
        waiting += group.count * (share_rps - served_rps)
    return Occupation(busy_cores, running, waiting)
