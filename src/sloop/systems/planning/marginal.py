"""The binding constraints of a plan, and the cost of one more request per second.

A constraint binds a stage if it breaks with one replica fewer (with one core fewer where there is one replica), or with
one more request per second at the ingress. That holds whether or not the system looked at it. Several constraints may
bind a stage, or none: then it has more than it needs (`spare`), or the least that a plan can have (`minimum`). The cost
of one more request per second is the difference between two plans of the same policies.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from msgspec import Struct

from sloop.core.views import Belief
from sloop.systems.planning.infeasibility import Placement, PlanShortfall, cores_of
from sloop.systems.planning.prediction import PlanPrediction, StagePrediction, smallest_batch, throughput_rps
from sloop.text import chain, counted, number
from sloop.units import round_up
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan

NOTHING = "nothing"


class BindingConstraint(Struct, frozen=True):
    """A constraint that forbids fewer resources for a stage, or a higher rate.

    `throughput`: with less it would not keep up, or with more it does not. `deadline`: it would keep up, but a path
    would be too slow. `batch`: larger batches would save a replica or a core, and are not allowed. `cores`, `memory`:
    one more request per second needs more, and no node has room for one more replica.

    If no constraint binds, the kind says why. `spare`: one replica (or core) fewer would do. `minimum`: a single
    replica with at most one core has nothing to give up, and it carries one more request per second.
    """

    kind: Literal["throughput", "deadline", "batch", "cores", "memory", "spare", "minimum"]
    why: str


class MarginalCost(Struct, frozen=True):
    """What one more request per second needs: the difference to the plan that the same policies make for it."""

    feasible: bool
    summary: str
    """`nothing`, `+1 replica of read (0.5 cores)`, `batch 4 -> 8 at detect`, or `cannot: …`."""
    cores: float = 0.0
    """Cores to add, all stages together; negative where the plan needs fewer."""
    changes: tuple[str, ...] = ()
    shortfalls: tuple[PlanShortfall, ...] = ()
    """Why it is not feasible."""


def binding_constraints(
    prediction: PlanPrediction, stage: StagePrediction, placement: Placement, *, needs_more: bool
) -> tuple[BindingConstraint, ...]:
    """What binds one stage of a plan, or that nothing does; empty without replicas. `needs_more`: whether one more
    request per second needs more at this stage than it has."""
    if not stage.groups:
        return ()
    group = max(stage.groups, key=lambda group: group.count)
    found = list(_with_less(prediction, stage, group)) if stage.rate_rps else []
    kinds = {constraint.kind for constraint in found}
    found += [constraint for constraint in _with_more(prediction, stage, group) if constraint.kind not in kinds]
    if needs_more and group.spec in placement.full:
        found.append(BindingConstraint(*placement.full[group.spec]))
    return tuple(found) or (_unbound(stage, group),)


def _one_less(stage: StagePrediction, group: Group) -> tuple[int, float, str]:
    """One replica fewer or, with a single replica, one core fewer: the replicas, their cores, and both as text."""
    replicas, cores = max(1, stage.replicas - 1), group.spec.cores - (stage.replicas == 1)
    return (
        replicas,
        cores,
        counted(replicas, "replica") + (f" of {counted(cores, 'core')}" if stage.replicas == 1 else ""),
    )


def _unbound(stage: StagePrediction, group: Group) -> BindingConstraint:
    """Why no constraint binds a stage."""
    _, cores, less = _one_less(stage, group)
    if cores > 0:
        return BindingConstraint("spare", f"{less} would do")
    return BindingConstraint("minimum", f"a plan has at least 1 replica, and this one has {counted(cores + 1, 'core')}")


def _with_less(prediction: PlanPrediction, stage: StagePrediction, group: Group) -> Iterator[BindingConstraint]:
    """Why the stage cannot do with one replica fewer or, with a single replica, one core fewer."""
    belief, limit, rate_rps = stage.beliefs[group.spec.variant], stage.batch_max(group.spec.variant), stage.rate_rps
    replicas, cores, less = _one_less(stage, group)
    if cores <= 0 or stage.rate_max_rps < rate_rps:
        return
    visit, load = stage.slowest, stage.slowest.loads[group.spec]
    needed = smallest_batch(belief, cores, belief.batch_max, rate_rps / replicas)
    if needed is not None and needed <= limit:
        own_ms = visit.timing(belief, cores, limit, replicas, load).total_ms
        yield from _too_late(prediction, stage, own_ms, f"with {less}")
        return
    able_rps = throughput_rps(belief, cores, limit) * replicas
    yield BindingConstraint(
        "throughput",
        f"{less} would serve {number(able_rps)} of {number(rate_rps)} requests/s in batches of {limit}",
    )
    if needed is None:
        yield from _no_larger(group, belief, cores, limit)
        return
    own_ms = visit.timing(belief, cores, needed, replicas, load).total_ms
    if not load.patience_ms:
        own_ms = max(own_ms, 2 * belief.latency_ms(needed, cores))  # its batch, and the one before it
    late = list(_too_late(prediction, stage, own_ms, f"with {less} in batches of {needed}"))
    yield from late or [
        BindingConstraint("batch", f"{less} would keep up in batches of {needed}, and the plan allows {limit} at most")
    ]


def _with_more(prediction: PlanPrediction, stage: StagePrediction, group: Group) -> Iterator[BindingConstraint]:
    """Why the stage cannot take one more request per second with what it has."""
    belief, limit = stage.beliefs[group.spec.variant], stage.batch_max(group.spec.variant)
    more_rps = stage.rate_rps + stage.visits
    if stage.rate_max_rps < more_rps:
        able, arrives = number(stage.rate_max_rps), number(stage.rate_rps)
        if stage.rate_max_rps < stage.rate_rps:
            yield BindingConstraint("throughput", f"it serves {able} of {arrives} requests/s")
        else:
            why = f"it serves at most {able} requests/s; one more at the ingress makes {number(more_rps)} here"
            yield BindingConstraint("throughput", why)
        yield from _no_larger(group, belief, group.spec.cores, limit)
        return
    load = replace(stage.slowest.loads[group.spec], rate_rps=more_rps)
    if load.burst:
        load = replace(load, together=max(load.together, round_up(more_rps)))
    own_ms = stage.slowest.timing(belief, group.spec.cores, limit, stage.replicas, load).total_ms
    yield from _too_late(prediction, stage, own_ms, "with one more request per second")


def _no_larger(group: Group, belief: Belief, cores: float, limit: int) -> Iterator[BindingConstraint]:
    """That the variant takes no larger batches although its throughput still rises at the largest."""
    gains = limit > 1 and limit / belief.latency_ms(limit, cores) > (limit - 1) / belief.latency_ms(limit - 1, cores)
    if limit == belief.batch_max and gains:
        why = f"variant {group.spec.variant} takes batches of {limit} at most, and larger ones would serve more"
        yield BindingConstraint("batch", why)


def _too_late(
    prediction: PlanPrediction, stage: StagePrediction, own_ms: float, condition: str
) -> Iterator[BindingConstraint]:
    """That the tightest path through the stage misses its deadline if the stage takes `own_ms`."""
    path = prediction.tightest(stage.name)
    if path is None or math.isinf(path.predicted_ms):
        return
    now_ms = next(visit.total_ms for visit in path.visits if visit.stage is stage)
    total_ms = path.predicted_ms - now_ms + own_ms
    what = chain(path.path.stages) if len(path.path.stages) > 1 else "a request"
    if path.slack_ms < 0:
        why = f"{what} takes {number(path.predicted_ms)} ms already, and the deadline is {number(path.slo_ms)} ms"
        yield BindingConstraint("deadline", why)
    elif total_ms > path.slo_ms:
        why = f"{condition}, {what} would take {number(total_ms)} ms, and the deadline is {number(path.slo_ms)} ms"
        yield BindingConstraint("deadline", why)


def marginal_cost(
    now: Plan, shortfalls_now: list[PlanShortfall], then: Plan, shortfalls_then: list[PlanShortfall]
) -> MarginalCost:
    """What tells `then`, the plan for one more request per second, from `now`."""
    stages = dict.fromkeys(target.stage for plan in (now, then) for target in plan.stages)
    changes = tuple(change for stage in stages for change in changes_at(stage, now, then))
    cores = cores_of(then) - cores_of(now)
    if shortfalls_then:
        summary = cannot(shortfalls_now, shortfalls_then)
        return MarginalCost(False, summary, cores, changes, tuple(shortfalls_then))
    summary = ", ".join(changes) or NOTHING
    if shortfalls_now:  # a batch fills sooner, or the system only now takes another replica
        summary += "; that plan is feasible"
    return MarginalCost(True, summary, cores, changes)


def marginal_cost_at(
    stage: str, now: Plan, shortfalls_now: list[PlanShortfall], then: Plan, shortfalls_then: list[PlanShortfall]
) -> str:
    """The marginal cost at one stage, as text: `cannot: …` if this stage lacks something."""
    own = [found for found in shortfalls_then if found.stage == stage]
    if own:
        return cannot([found for found in shortfalls_now if found.stage == stage], own)
    return ", ".join(changes_at(stage, now, then)) or (NOTHING + " at this stage" if shortfalls_then else NOTHING)


def cannot(now: list[PlanShortfall], then: list[PlanShortfall]) -> str:
    """The first new reason and the number of the others; or that it is not feasible without one more either."""
    if now:
        return "cannot: it is not feasible even without one more"
    return f"cannot: {then[0].why}" + (f"; and {len(then) - 1} more" if len(then) > 1 else "")


def changes_at(stage: str, now: Plan, then: Plan) -> list[str]:
    """How one stage differs: `+1 replica of read (0.5 cores)`, `batch 4 -> 8 at read`, `cores 1 -> 2 at read`."""
    before, after = (next((target for target in plan.stages if target.stage == stage), None) for plan in (now, then))
    had, gets = _kinds(before), _kinds(after)
    changes = []
    if len(had) == len(gets) == 1:
        (old, old_count), (new, new_count) = next(iter(had.items())), next(iter(gets.items()))
        if old.variant != new.variant:
            changes.append(f"variant {old.variant} -> {new.variant} at {stage}")
        if old.cores != new.cores:
            changes.append(f"cores {old.cores:g} -> {new.cores:g} at {stage}")
        if old_count != new_count:
            changes.append(_replicas(new_count - old_count, stage, new))
    else:
        several = len({spec.variant for spec in (*had, *gets)}) > 1
        for spec in sorted({*had, *gets}, key=lambda spec: (spec.variant, spec.cores)):
            if had[spec] != gets[spec]:
                name = f"{stage}/{spec.variant}" if several else stage
                changes.append(_replicas(gets[spec] - had[spec], name, spec))
    if before is not None and after is not None and before.batch_max != after.batch_max:
        changes.append(f"batch {before.batch_max} -> {after.batch_max} at {stage}")
    return changes


def _replicas(difference: int, name: str, spec: ReplicaSpec) -> str:
    sign = "+" if difference > 0 else "-"
    return f"{sign}{counted(abs(difference), 'replica')} of {name} ({counted(spec.cores, 'core')})"


def _kinds(target: StagePlan | None) -> Counter[ReplicaSpec]:
    """Replicas by variant and cores, on whatever node."""
    kinds: Counter[ReplicaSpec] = Counter()
    for group in target.groups if target else ():
        if group.count:
            kinds[ReplicaSpec(group.spec.stage, group.spec.variant, group.spec.cores)] += group.count
    return kinds
