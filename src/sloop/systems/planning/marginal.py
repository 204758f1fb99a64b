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

from msgspec import Struct, structs

from sloop.core.planner import cores_by_hardware
from sloop.core.views import Belief
from sloop.systems.planning.placement import Placement, PlanShortfall
from sloop.systems.planning.timing import (
    PlanPrediction,
    StageLoad,
    StagePrediction,
    smallest_batch,
    throughput_rps,
)
from sloop.text import arrows, counted, number
from sloop.units import round_up
from sloop.vocabulary import Group, Plan, Slot, StagePlan

NOTHING = "nothing"


class BindingConstraint(Struct, frozen=True):
    """A constraint that forbids fewer resources for a stage, or a higher rate.

    `throughput`: with less it would not keep up, or with more it does not. `deadline`: it would keep up, but a path
    would be too slow. `batch`: larger batches would save a replica or a core, and are not allowed. `cores`, `memory`,
    `device`, `hardware`: one more request per second needs more, and no node has room for one more replica.

    If no constraint binds, the kind says why. `spare`: one replica (or core) fewer would do. `minimum`: a single
    replica with at most one core has nothing to give up, and it carries one more request per second.
    """

    kind: Literal["throughput", "deadline", "batch", "cores", "memory", "device", "hardware", "spare", "minimum"]
    why: str


class MarginalCost(Struct, frozen=True):
    """What one more request per second needs: the difference to the plan that the same policies make for it."""

    feasible: bool
    summary: str
    """`nothing`, `+1 replica of read (0.5 cores)`, `batch 4 -> 8 at detect`, `cannot: …`, or that the plan is not
    feasible as it is."""
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
    less = _Less(stage)
    found = list(_with_less(prediction, less)) if stage.rate_rps else []
    kinds = {constraint.kind for constraint in found}
    found += [constraint for constraint in _with_more(prediction, less) if constraint.kind not in kinds]
    if needs_more and (full := placement.full(less.group.spec, less.belief)):
        found.append(BindingConstraint(*full))
    return tuple(found) or (less.unbound(),)


class _Less:
    """A stage with one replica fewer in its largest group or, with a single replica, one core fewer."""

    def __init__(self, stage: StagePrediction) -> None:
        self.stage = stage
        self.group = group = max(stage.groups, key=lambda group: group.count)
        self.belief = stage.belief(group)
        self.limit = stage.batch_max(group)
        self.cores = group.spec.cores - (stage.replicas == 1)
        replicas, like = max(1, stage.replicas - 1), stage.like_replicas[group]
        self.left = like - 1 if stage.replicas > 1 else 1.0
        """How many replicas of the group are left, if those of other groups count as what they serve."""
        self.rest = self.left / like
        """The part of the capacity that is left in all groups."""
        self.text = counted(replicas, "replica")
        if stage.replicas == 1:
            self.text += f" of {counted(self.cores, 'core')}"
        elif len({each.spec.slot.hardware for each in stage.groups}) > 1:
            self.text = f"one replica of {group.spec.slot.hardware} fewer"

    @property
    def slot(self) -> Slot:
        """The slot of the group's replicas; `cores` must be positive."""
        return structs.replace(self.group.spec.slot, cores=self.cores)

    def unbound(self) -> BindingConstraint:
        """Why no constraint binds the stage."""
        if self.cores > 0:
            return BindingConstraint("spare", f"{self.text} would do")
        cores = counted(self.cores + 1, "core")
        return BindingConstraint("minimum", f"a plan has at least 1 replica, and this one has {cores}")

    def total_ms(self, limit: int) -> float:
        """The longest time at the stage, with batches of at most `limit` in the largest group."""
        visit = self.stage.slowest
        own = visit.timing(self.belief, self.slot, limit, self.left, visit.loads[self.group])
        return max([own.total_ms, *_others_ms(self.stage, self.group, self.rest)])


def _others_ms(stage: StagePrediction, group: Group, rest: float, rate_rps: float | None = None) -> list[float]:
    """The time of a visit on each group but `group`, if only the part `rest` of all capacity is left, at a rate."""
    visit = stage.slowest
    return [
        visit.timing(
            stage.belief(other),
            other.spec.slot,
            stage.batch_max(other),
            stage.like_replicas[other] * rest,
            visit.loads[other] if rate_rps is None else _at(visit.loads[other], rate_rps),
        ).total_ms
        for other in stage.groups
        if other is not group
    ]


def _at(load: StageLoad, rate_rps: float) -> StageLoad:
    """The load at another rate."""
    together = max(load.together, round_up(rate_rps)) if load.burst else load.together
    return replace(load, rate_rps=rate_rps, together=together)


def _with_less(prediction: PlanPrediction, less: _Less) -> Iterator[BindingConstraint]:
    """Why the stage cannot do with one replica fewer or, with a single replica, one core fewer."""
    stage, belief, limit, rate_rps = less.stage, less.belief, less.limit, less.stage.rate_rps
    if less.cores <= 0 or stage.rate_max_rps < rate_rps:
        return
    needed = smallest_batch(belief, less.slot, belief.batch_max, rate_rps / less.left) if less.left > 0 else None
    if needed is not None and needed <= limit:
        yield from _too_late(prediction, stage, less.total_ms(limit), f"with {less.text}")
        return
    able_rps = throughput_rps(belief, less.slot, limit) * less.left
    yield BindingConstraint(
        "throughput",
        f"{less.text} would serve {number(able_rps)} of {number(rate_rps)} requests/s in batches of {limit}",
    )
    if needed is None:
        yield from _no_larger(belief, less.slot, limit)
        return
    own_ms = less.total_ms(needed)
    if not stage.slowest.loads[less.group].patience_ms:
        own_ms = max(own_ms, 2 * belief.latency_ms(needed, less.slot))  # its batch, and the one before it
    late = list(_too_late(prediction, stage, own_ms, f"with {less.text} in batches of {needed}"))
    yield from late or [
        BindingConstraint(
            "batch", f"{less.text} would keep up in batches of {needed}, and the plan allows {limit} at most"
        )
    ]


def _with_more(prediction: PlanPrediction, less: _Less) -> Iterator[BindingConstraint]:
    """Why the stage cannot take one more request per second with what it has."""
    stage, group, belief, limit = less.stage, less.group, less.belief, less.limit
    slot, more_rps = group.spec.slot, stage.rate_rps + stage.visits
    if stage.rate_max_rps < more_rps:
        able, arrives = number(stage.rate_max_rps), number(stage.rate_rps)
        if stage.rate_max_rps < stage.rate_rps:
            yield BindingConstraint("throughput", f"it serves {able} of {arrives} requests/s")
        else:
            why = f"it serves at most {able} requests/s; one more at the ingress makes {number(more_rps)} here"
            yield BindingConstraint("throughput", why)
        yield from _no_larger(belief, slot, limit)
        return
    visit, load = stage.slowest, _at(stage.slowest.loads[group], more_rps)
    own_ms = visit.timing(belief, slot, limit, stage.like_replicas[group], load).total_ms
    own_ms = max([own_ms, *_others_ms(stage, group, 1.0, more_rps)])
    yield from _too_late(prediction, stage, own_ms, "with one more request per second")


def _no_larger(belief: Belief, slot: Slot, limit: int) -> Iterator[BindingConstraint]:
    """That the variant takes no larger batches although its throughput still rises at the largest."""
    gains = limit > 1 and limit / belief.latency_ms(limit, slot) > (limit - 1) / belief.latency_ms(limit - 1, slot)
    if limit == belief.batch_max and gains:
        why = f"variant {belief.variant} takes batches of {limit} at most, and larger ones would serve more"
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
    what = arrows(path.path.stages) if len(path.path.stages) > 1 else "a request"
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
    cores = sum(cores_by_hardware(then).values()) - sum(cores_by_hardware(now).values())
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
        return "the plan is not feasible as it is"
    return f"cannot: {then[0].why}" + (f"; and {len(then) - 1} more" if len(then) > 1 else "")


def changes_at(stage: str, now: Plan, then: Plan) -> list[str]:
    """How one stage differs: `+1 replica of read (0.5 cores)`, `batch 4 -> 8 at read`, `cores 1 -> 2 at read`."""
    before, after = (next((target for target in plan.stages if target.stage == stage), None) for plan in (now, then))
    had, gets = _kinds(before), _kinds(after)
    several = len({slot.hardware for _, slot in (*had, *gets)}) > 1
    changes = []
    if len(had) == len(gets) == 1:
        ((old, old_slot), old_count), ((new, new_slot), new_count) = *had.items(), *gets.items()
        if old != new:
            changes.append(f"variant {old} -> {new} at {stage}")
        if old_slot.hardware != new_slot.hardware:
            changes.append(f"hardware {old_slot.hardware} -> {new_slot.hardware} at {stage}")
        if old_slot.cores != new_slot.cores:
            changes.append(f"cores {old_slot.cores:g} -> {new_slot.cores:g} at {stage}")
        if old_count != new_count:
            changes.append(_replicas(new_count - old_count, stage, new_slot, several=several))
    else:
        variants = len({variant for variant, _ in (*had, *gets)})
        for variant, slot in sorted({*had, *gets}, key=lambda kind: (kind[0], kind[1].hardware, kind[1].cores)):
            difference = gets[variant, slot] - had[variant, slot]
            if difference:
                name = f"{stage}/{variant}" if variants > 1 else stage
                changes.append(_replicas(difference, name, slot, several=several))
    if before is not None and after is not None:
        changes += _batch_changes(before, after)
    return changes


def _batch_changes(before: StagePlan, after: StagePlan) -> list[str]:
    """How the largest batches differ: of the stage, or of each kind of replica where they have different ones."""
    had, gets = _batches(before), _batches(after)
    if len(set(had.values())) <= 1 and len(set(gets.values())) <= 1:
        old, new = next(iter(had.values()), before.batch_max), next(iter(gets.values()), after.batch_max)
        return [f"batch {old} -> {new} at {after.stage}"] if old != new else []
    return [
        f"batch {had[kind]} -> {gets[kind]} at {after.stage}/{kind[0]} on {kind[1].hardware}"
        for kind in had
        if kind in gets and had[kind] != gets[kind]
    ]


def _batches(target: StagePlan) -> dict[tuple[str, Slot], int]:
    return {(each.spec.variant, each.spec.slot): target.batch_max_of(each) for each in target.groups if each.count}


def _replicas(difference: int, name: str, slot: Slot, *, several: bool) -> str:
    sign = "+" if difference > 0 else "-"
    on = counted(slot.cores, "core") + (f" and a {slot.accelerator}" if slot.accelerator else "")
    if several:
        on += f" of {slot.hardware}"
    return f"{sign}{counted(abs(difference), 'replica')} of {name} ({on})"


def _kinds(target: StagePlan | None) -> Counter[tuple[str, Slot]]:
    """Replicas by variant and slot, on whatever node."""
    kinds: Counter[tuple[str, Slot]] = Counter()
    for group in target.groups if target else ():
        if group.count:
            kinds[group.spec.variant, group.spec.slot] += group.count
    return kinds
