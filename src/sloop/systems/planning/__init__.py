"""Plans at a steady rate, and their explanation: the report of `sloop plan` and `sloop check`.

`steady_plan` runs the system's policies until they keep their plan. `explain_plan` predicts the latency of that plan
(`prediction`), names the binding constraints of each stage and the cost of one more request per second (`marginal`),
and, if the plan is infeasible, says which stage, path or node lacks how much (`infeasibility`). That prediction alone
decides whether a plan is feasible; if the system's own criterion disagrees, the report says so. No I/O and no clock: a
caller that wants decisions timed passes a clock.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, repeat
from typing import Final

from msgspec import Struct

from sloop.app.hardware import foreign_profiles, unpriced
from sloop.core.monitor import BUCKETS_KEPT, SLACK_BUCKETS_KEPT
from sloop.core.protocols import Policies
from sloop.core.views import Belief, Bucket, ClusterView, NodeView, ReplicaView, StageView, Traffic
from sloop.profile.estimate import Estimate
from sloop.profile.passes import speed_range
from sloop.systems.planning.infeasibility import (
    Placement,
    PlanShortfall,
    beyond_cluster,
    cores_of,
    place,
    shortfalls_of,
)
from sloop.systems.planning.marginal import (
    NOTHING,
    BindingConstraint,
    MarginalCost,
    binding_constraints,
    marginal_cost,
    marginal_cost_at,
)
from sloop.systems.planning.prediction import Arrivals, PlanPrediction, StagePrediction, VisitTiming, smallest_batch
from sloop.systems.setup import Setup
from sloop.text import counted, number
from sloop.units import NS_PER_S, round_up
from sloop.vocabulary import Life, Plan, ReplicaId, StagePlan

__all__ = ["Arrivals", "PlanReport", "StageReport", "explain_plan", "steady_plan"]

ROUNDS_MAX: Final = 40
"""The most rounds of `steady_plan`. Policies that react to utilisation settle within a few rounds, or never."""
SLACKS_MAX: Final = 10_000
"""Slacks listed per second; at a steady rate they are all equal, so more of them say nothing new."""
REPLICAS_MAX: Final = 10_000
"""A plan with at most this many replicas always goes through another round."""
BEYOND: Final = 2.0
"""A rate that needs more than this many times the cluster's cores ends the rounds."""


class StageReport(Struct, frozen=True):
    """One kind of replica of one stage. Latencies are in ms and infinite (null in JSON) where it cannot keep up."""

    stage: str
    variant: str
    replicas: int
    batch: int
    """The largest batch that the plan allows."""
    cores: float
    """Cores of each replica."""
    predicted_ms: float
    """Time from entering the stage to leaving it: `wait_ms` + `service_ms`."""
    rate_rps: float = 0.0
    """Requests per second that reach the stage, parts counted one by one: the rate times the visits per request."""
    parts: float = 1.0
    """Visits of one request that arrive together: more than one after a fan-out."""
    service_ms: float = 0.0
    """Duration of one batch of `batch_expected`."""
    wait_ms: float = 0.0
    """Wait for the batch to fill, for the previous batch, and for earlier visits that arrived at the same instant."""
    batch_expected: int = 1
    """The batch size that the prediction assumes."""
    rate_max_rps: float = 0.0
    """The most that all replicas of the stage serve together."""
    binds: tuple[BindingConstraint, ...] = ()
    """The binding constraints of the stage, or why there is none (`spare`, `minimum`); empty without replicas."""
    one_more: str = NOTHING
    """What the stage needs for one more request per second at the ingress."""


class PathReport(Struct, frozen=True):
    """One path through the graph; `slack_ms` is the deadline less the prediction, negative where it is missed."""

    stages: tuple[str, ...]
    share: float
    slo_ms: float
    predicted_ms: float
    slack_ms: float


class PlanReport(Struct, frozen=True):
    """The plan that a system keeps at a steady rate, and its predicted latency and cost."""

    system: str
    feasible: bool
    """Whether every stage keeps up, every path meets its deadline and every replica has room, for these `arrivals`."""
    stages: tuple[StageReport, ...]
    cores: float
    usd_per_h: float
    """Sum of the prices of the nodes that hold a replica; nodes without a price count as 0, see `unpriced`."""
    predicted_ms: float
    """The time along the longest path."""
    solve_ms: float
    """The longest single decision of the scaling policy; 0 where no clock was given."""
    why: str
    notes: tuple[str, ...] = ()
    """Reservations about the prediction, a sentence each."""
    rate_rps: float = 0.0
    paths: tuple[PathReport, ...] = ()
    """The path with the least slack comes first."""
    shortfalls: tuple[PlanShortfall, ...] = ()
    """Why the plan is not feasible; empty where it is."""
    one_more: MarginalCost | None = None
    plan_why: str = ""
    """The reason that the system itself gives."""
    plan_feasible: bool = True
    """Whether the plan meets the criterion of the system itself."""
    plan_arrivals: Arrivals | None = None
    """The arrivals that the system itself plans for, if its scaling policy says so."""
    arrivals: Arrivals = "even"
    """The arrivals that the predictions assume."""
    feasible_arrivals: tuple[Arrivals, ...] = ()
    """Every assumption about arrivals under which the plan is feasible."""
    predicted_ms_low: float | None = None
    predicted_ms_high: float | None = None
    """`predicted_ms` if the machine is as fast, or as slow, as the passes of the profiles were apart
    (`sloop.profile.passes.speed_range`); None if no profile has several passes."""
    unpriced: tuple[str, ...] = ()
    """Hardware of the nodes that hold a replica and have no price."""


@dataclass(frozen=True, slots=True)
class SteadyPlan:
    """A plan that its policies keep."""

    plan: Plan
    solve_ms: float
    """The longest single decision on the way to it."""
    cut_short: str = ""
    """Why the rounds ended before the policies kept a plan; empty if they did keep one."""


def explain_plan(
    setup: Setup, rate_rps: float, arrivals: Arrivals = "even", *, clock: Callable[[], int] | None = None
) -> PlanReport:
    """The plan that the setup's system keeps at a steady `rate_rps`, with its prediction. `clock` returns nanoseconds
    and times the decisions."""
    application, steady = setup.application, steady_plan(setup, rate_rps, clock)
    plan, placement = steady.plan, place(steady.plan, setup)
    prediction = PlanPrediction(setup, plan, rate_rps, arrivals)
    shortfalls = shortfalls_of(setup, prediction, placement)
    then = steady_plan(setup, rate_rps + 1).plan
    then_shortfalls = shortfalls_of(setup, PlanPrediction(setup, then, rate_rps + 1, arrivals), place(then, setup))
    stages: list[StageReport] = []
    for stage in prediction.stages.values():
        more = marginal_cost_at(stage.name, plan, shortfalls, then, then_shortfalls)
        stages += _rows(prediction, stage, placement, more)
    other = PlanPrediction(setup, plan, rate_rps, "burst" if arrivals == "even" else "even")
    feasible = {arrivals: not shortfalls, other.arrivals: not shortfalls_of(setup, other, placement)}
    own_criterion = _own_criterion(setup, prediction, feasible=not shortfalls)
    low_ms, high_ms = _predicted_range_ms(setup, prediction)
    notes = (own_criterion, _other_arrivals(setup, prediction, other, feasible), steady.cut_short)
    return PlanReport(
        system=setup.system.name,
        feasible=not shortfalls,
        stages=tuple(stages),
        cores=cores_of(plan),
        usd_per_h=sum(node.usd_per_h for node in application.cluster if node.name in placement.nodes),
        predicted_ms=prediction.predicted_ms,
        solve_ms=steady.solve_ms,
        why="; ".join(filter(None, [plan.why, own_criterion, *(shortfall.why for shortfall in shortfalls)])),
        notes=(
            *filter(None, notes),
            *_assumed_profiles(setup, plan),
            *foreign_profiles(application),
            *_extrapolated(setup, prediction),
        ),
        rate_rps=rate_rps,
        paths=tuple(
            PathReport(path.path.stages, path.path.share, path.slo_ms, path.predicted_ms, path.slack_ms)
            for path in prediction.paths
        ),
        shortfalls=tuple(shortfalls),
        one_more=marginal_cost(plan, shortfalls, then, then_shortfalls),
        plan_why=plan.why,
        plan_feasible=plan.feasible,
        plan_arrivals=planned_arrivals(setup),
        arrivals=arrivals,
        feasible_arrivals=tuple(name for name, is_feasible in sorted(feasible.items()) if is_feasible),
        predicted_ms_low=low_ms,
        predicted_ms_high=high_ms,
        unpriced=unpriced(node for node in application.cluster if node.name in placement.nodes),
    )


def _predicted_range_ms(setup: Setup, prediction: PlanPrediction) -> tuple[float | None, float | None]:
    """The prediction for the same plan on a faster and on a slower machine; None without profiles of several passes."""
    ranges = {key: speed_range(belief.profile) for key, belief in setup.beliefs.items()}
    if not any(ranges.values()):
        return None, None
    found_ms = []
    for end in ("fast", "slow"):
        beliefs = {
            key: Estimate(
                belief.profile,
                accuracy=belief.accuracy,
                margin=belief.margin * (getattr(ranges[key], end) if ranges[key] else 1.0),
            )
            for key, belief in setup.beliefs.items()
        }
        at_end = PlanPrediction(
            replace(setup, beliefs=beliefs), prediction.plan, prediction.rate_rps, prediction.arrivals
        )
        found_ms.append(at_end.predicted_ms)
    return min(found_ms[0], prediction.predicted_ms), max(found_ms[1], prediction.predicted_ms)


def planned_arrivals(setup: Setup) -> Arrivals | None:
    """The arrivals that the scaling policy plans for: its attribute `arrivals`, which a policy need not have."""
    found: Arrivals | None = getattr(setup.system.policies.scale, "arrivals", None)
    return found


def _rows(prediction: PlanPrediction, stage: StagePrediction, placement: Placement, more: str) -> list[StageReport]:
    """One row per kind of replica that the plan has of a stage; `more` is what one more request per second needs."""
    binds = binding_constraints(prediction, stage, placement, needs_more=not more.startswith(NOTHING))
    rows = []
    for group in stage.target.groups if stage.target else ():
        spec = group.spec
        batch, without = stage.batch_max(spec.variant), stage.slowest.total_ms
        found = stage.slowest.timings.get(spec, VisitTiming(1, 0.0, without))
        rows.append(
            StageReport(
                stage.name,
                spec.variant,
                group.count,
                batch,
                spec.cores,
                found.total_ms,
                rate_rps=stage.rate_rps,
                parts=stage.parts,
                service_ms=found.service_ms,
                wait_ms=found.wait_ms,
                batch_expected=found.batch,
                rate_max_rps=stage.rate_max_rps,
                binds=binds,
                one_more=more,
            )
        )
    return rows


IN_WORDS: Final[Mapping[Arrivals, str]] = {
    "even": "evenly spaced requests",
    "burst": "bursts, all requests of a second at once",
}


def _own_criterion(setup: Setup, prediction: PlanPrediction, *, feasible: bool) -> str:
    """A note if the system's own criterion and the prediction disagree: their assumptions and results."""
    plan, system = prediction.plan, setup.system.name
    own = planned_arrivals(setup)
    if plan.feasible == feasible or (plan.feasible and own is None):
        return ""
    plans_for = f"{system} plans for {IN_WORDS[own]}" if own else f"{system} plans by a criterion of its own"
    here = f"for {IN_WORDS[prediction.arrivals]}, which this answer assumes"
    if feasible:
        return (
            f"{plans_for}{_within(setup)}, and finds no plan for that; {here}, the plan it runs instead is good enough"
        )
    return f"{plans_for}, and finds its plan good enough for that; {here}, it is not"


def _within(setup: Setup) -> str:
    """The share of the deadline that the scaling policy plans with, its attribute `margin`; empty if that is all."""
    margin: float = getattr(setup.system.policies.scale, "margin", 1.0)
    slo_ms = setup.application.slo_ms
    return f", within {number(margin * slo_ms)} ms ({margin:g} × {number(slo_ms)} ms)" if margin < 1 else ""


def _other_arrivals(
    setup: Setup, prediction: PlanPrediction, other: PlanPrediction, feasible: Mapping[Arrivals, bool]
) -> str:
    """What becomes of the plan under the other assumption about arrivals, where that makes a difference."""
    if not all(map(math.isfinite, (prediction.predicted_ms, other.predicted_ms))):
        return ""
    if math.isclose(prediction.predicted_ms, other.predicted_ms):
        return ""
    at_once = counted(round_up(prediction.rate_rps), "request") + " of a second"
    condition = f"if all {at_once} arrived at once" if other.arrivals == "burst" else "if requests were evenly spaced"
    if planned_arrivals(setup) == other.arrivals:
        condition += f", for which {setup.system.name} plans"
    verdict = f"the plan would {'' if feasible[other.arrivals] else 'not '}be feasible"
    longest = f"the longest path would take {number(other.predicted_ms)} ms"
    if len(other.paths) == 1:
        whole = " itself" if feasible[other.arrivals] and _within(setup) else ""
        longest += f", and the deadline{whole} is {number(other.paths[0].slo_ms)} ms"
    return f"{condition}, {verdict}: {longest} (`--arrivals {other.arrivals}`)"


def _assumed_profiles(setup: Setup, plan: Plan) -> list[str]:
    """The plan's variants whose profile nobody measured."""
    specs = {(group.spec.stage, group.spec.variant): None for target in plan.stages for group in target.groups}
    found = {key: setup.beliefs[key].profile for key in specs}
    return [
        f"{stage}/{variant}: its profile is assumed, not measured ({profile.source or 'no source is given'})"
        for (stage, variant), profile in found.items()
        if profile.origin == "assumed"
    ]


def _extrapolated(setup: Setup, prediction: PlanPrediction) -> list[str]:
    """Stages whose prediction goes beyond what their profile was measured for."""
    return [
        f"{stage.name}/{spec.variant}: its profile was not measured for batches of {found.batch} on "
        f"{counted(spec.cores, 'core')}; the prediction extrapolates"
        for stage in prediction.stages.values()
        for spec, found in stage.slowest.timings.items()
        if setup.beliefs[stage.name, spec.variant].is_extrapolated(found.batch, spec.cores)
    ]


def steady_plan(setup: Setup, rate_rps: float, clock: Callable[[], int] | None = None) -> SteadyPlan:
    """The plan that the system keeps once `rate_rps` has been steady for ten minutes: a fixed point of its policies.

    They get the views of a run in which all replicas of the plan are ready; the setup's own policies stay fresh. A
    system without a plan gives an infeasible, empty one. If the plan has more than `REPLICAS_MAX` replicas and the rate
    is far beyond the cluster, the first such plan is the result.
    """
    policies = setup.system.fresh().policies
    plan = Plan(stages=(), why=f"{setup.system.name} has no plan", feasible=False)
    now_ns, longest_ns = BUCKETS_KEPT * NS_PER_S, 0
    for _ in range(ROUNDS_MAX):
        view = _view(now_ns, setup, policies, plan, rate_rps)
        started_ns = clock() if clock else 0
        answer = policies.scale.plan(now_ns, view)
        longest_ns = max(longest_ns, clock() - started_ns if clock else 0)
        if answer is None or answer.same_target(plan):
            plan = answer or plan
            break
        plan = answer
        if cut_short := _beyond(setup, plan, rate_rps):
            return SteadyPlan(plan, longest_ns / 1e6, cut_short)
        now_ns += BUCKETS_KEPT * NS_PER_S  # so that no window or delay of the policy reaches back to the last round
    return SteadyPlan(plan, longest_ns / 1e6)


def _beyond(setup: Setup, plan: Plan, rate_rps: float) -> str:
    """Why the policies need not be asked again about a plan of very many replicas; empty where they are to be."""
    count = sum(group.count for target in plan.stages for group in target.groups)
    if count <= REPLICAS_MAX:
        return ""
    for shortfall in beyond_cluster(setup, PlanPrediction(setup, plan, rate_rps)):
        if shortfall.needs > BEYOND * shortfall.has:
            return (
                f"the rate needs {number(round(shortfall.needs / shortfall.has))} times the cores of the cluster, so "
                f"{setup.system.name} was not asked again after it chose {number(count)} replicas, which may change"
            )
    return ""


def _arrivals(rate_rps: float) -> list[int]:
    """Arrivals in each second that monitors keep, evenly spread: whole numbers with the rate as mean, the last rounded
    up. The tolerance hides the float error of ten minutes' arrivals at 1e7/s."""
    passed = [math.ceil(rate_rps * left - 1e-6) for left in range(BUCKETS_KEPT, -1, -1)]
    return [before - after for before, after in pairwise(passed)]


def _view(now_ns: int, setup: Setup, policies: Policies, plan: Plan, rate_rps: float) -> ClusterView:
    """The whole application as it looks after ten minutes with the plan in force."""
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
        stages=tuple(stages),
        nodes=nodes,
        plan=plan if plan.stages else None,
        demand_rps={name: forecast_rps * often for name, often in visits.items()},
        ingress=ingress,
        forecast_rps=forecast_rps,
        paths=application.paths,
    )


@dataclass(frozen=True, slots=True)
class Occupation:
    """The mean load of a stage over time."""

    busy_cores: float = 0.0
    running: float = 0.0
    """Requests being executed."""
    waiting: float = 0.0
    """Requests per second beyond what the replicas serve: a lower bound of a queue that grows without end."""


def _buckets(
    now_ns: int, rate_rps: float, slo_ns: int, busy: Occupation | None = None, ready_cores: float = 0.0
) -> list[Bucket]:
    """The last seconds at a steady rate. As in a monitor only the newest keep slacks, here one list for all of them."""
    busy = busy or Occupation()
    waiting_ns, running_ns = round(busy.waiting * NS_PER_S), round(busy.running * NS_PER_S)
    busy_core_ns, ready_core_ns = round(busy.busy_cores * NS_PER_S), round(ready_cores * NS_PER_S)
    starts_ns = range(now_ns - BUCKETS_KEPT * NS_PER_S, now_ns, NS_PER_S)
    buckets = [
        Bucket(start_ns, arrivals, waiting_ns, running_ns, busy_core_ns, ready_core_ns)
        for start_ns, arrivals in zip(starts_ns, _arrivals(rate_rps), strict=True)
    ]
    newest = buckets[-SLACK_BUCKETS_KEPT:]
    slack_ns = {count: [slo_ns] * min(count, SLACKS_MAX) for count in {bucket.arrivals for bucket in newest}}
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


def _occupation(target: StagePlan | None, variants: Mapping[str, Belief], rate_rps: float) -> Occupation:
    """The replicas share the rate evenly, each with the smallest batch that keeps up (Little's law)."""
    replicas = sum(group.count for group in target.groups) if target else 0
    if target is None or not replicas:
        return Occupation(waiting=rate_rps)
    busy_cores = running = waiting = 0.0
    share_rps = rate_rps / replicas
    for group in target.groups:
        belief, cores = variants[group.spec.variant], group.spec.cores
        batch_max = min(target.batch_max, belief.batch_max)
        batch = smallest_batch(belief, cores, batch_max, share_rps) or batch_max
        latency_s = belief.latency_ms(batch, cores) / 1e3
        served_rps = min(share_rps, batch / latency_s)
        busy_cores += group.count * cores * served_rps * latency_s / batch
        running += group.count * served_rps * latency_s
        waiting += group.count * (share_rps - served_rps)
    return Occupation(busy_cores, running, waiting)
