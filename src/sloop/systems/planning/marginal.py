"""The binding constraints of a plan, and the cost of one more request per second.

A constraint binds a stage if it breaks with one replica fewer (with one core fewer where there is one replica), or with
one more request per second at the ingress. That holds whether or not the system looked at it. Several constraints may
bind a stage, or none: then it has more than it needs (`spare`), or the least that a plan can have (`minimum`). The cost
of one more request per second is the difference between two plans of the same policies.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, structs

from sloop.core.ledger import cores_by_hardware
from sloop.core.views import Belief
from sloop.systems.planning.placement import Placement, PlanShortfall
from sloop.systems.planning.timing import PlanPrediction, StagePrediction
from sloop.text import arrows, counted, number
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
    less = _Less(prediction, stage)
    constraints = list(_with_less(prediction, less)) if stage.rate_rps else []
    kinds = {constraint.kind for constraint in constraints}
    constraints += [constraint for constraint in _with_more(prediction, less) if constraint.kind not in kinds]
    if needs_more and (full := placement.full(less.group.spec, stage.belief(less.group))):
        constraints.append(BindingConstraint(*full))
    return tuple(constraints) or (less.unbound(),)


class _Less:
    """A stage with one replica fewer in its largest group or, with a single replica, one core fewer."""

    def __init__(self, prediction: PlanPrediction, stage: StagePrediction) -> None:
        self.stage, self._rate_rps = stage, prediction.rate_rps
        self.group = max(stage.groups, key=lambda group: group.count)
        self.limit = stage.batch_max(self.group)
        self.cores = self.group.spec.cores - (stage.replicas == 1)
        self.text = counted(max(1, stage.replicas - 1), "replica")
        if stage.replicas == 1:
            self.text += f" of {counted(self.cores, 'core')}"
        elif len({group.spec.slot.hardware for group in stage.groups}) > 1:
            self.text = f"one replica of {self.group.spec.slot.hardware} fewer"

    def smaller(self, limit: int) -> Group:
        """The group with less, and with batches of at most `limit`; `cores` must be positive."""
        group = structs.replace(self.group, batch_max=limit)
        if self.stage.replicas == 1:
            return structs.replace(group, spec=group.spec.with_cores(self.cores))
        rate_rps = group.rate_rps * (group.count - 1) / group.count
        return structs.replace(group, count=group.count - 1, rate_rps=rate_rps)

    def left(self, limit: int) -> StagePrediction:
        """The stage with less, and with batches of at most `limit` in this group."""
        assert self.stage.target is not None
        smaller = self.smaller(limit)
        groups = tuple(smaller if group is self.group else group for group in self.stage.target.groups)
        return self.stage.changed(structs.replace(self.stage.target, groups=groups), self._rate_rps)

    def needed(self, limit: int) -> int | None:
        """The smallest batch of at most `limit` with which this group keeps up with less; None where none does."""
        left, smaller = self.left(limit), self.smaller(limit)
        return left.batch(smaller) if smaller.count and left.keeps_up else None

    def unbound(self) -> BindingConstraint:
        """Why no constraint binds the stage."""
        if self.cores > 0:
            return BindingConstraint("spare", f"{self.text} would do")
        cores = counted(self.cores + 1, "core")
        return BindingConstraint("minimum", f"a plan has at least 1 replica, and this one has {cores}")


def _with_less(prediction: PlanPrediction, less: _Less) -> Iterator[BindingConstraint]:
    """Why the stage cannot do with one replica fewer or, with a single replica, one core fewer."""
    stage, limit = less.stage, less.limit
    if less.cores <= 0 or stage.rate_max_rps < stage.rate_rps:
        return
    left = less.left(limit)
    if left.keeps_up:
        yield from _too_late(prediction, stage, left.slowest.total_ms, f"with {less.text}")
        return
    able, arrives = number(left.rate_max_rps), number(stage.rate_rps)
    yield BindingConstraint(
        "throughput", f"{less.text} would serve {able} of {arrives} requests/s in batches of {limit}"
    )
    slot, belief = less.smaller(limit).spec.slot, stage.belief(less.group)
    needed = less.needed(belief.batch_max)
    if needed is None:
        yield from _no_larger(belief, slot, limit)
        return
    stage_ms = less.left(needed).slowest.total_ms
    if not stage.slowest.loads[less.group].patience_ms:
        stage_ms = max(stage_ms, 2 * belief.latency_ms(needed, slot))  # its batch, and the one before it
    late = list(_too_late(prediction, stage, stage_ms, f"with {less.text} in batches of {needed}"))
    yield from late or [
        BindingConstraint(
            "batch", f"{less.text} would keep up in batches of {needed}, and the plan allows {limit} at most"
        )
    ]


def _with_more(prediction: PlanPrediction, less: _Less) -> Iterator[BindingConstraint]:
    """Why the stage cannot take one more request per second with what it has."""
    stage = less.stage
    more = stage.changed(stage.target, prediction.rate_rps + 1)
    if stage.rate_max_rps < more.rate_rps:
        able, arrives = number(stage.rate_max_rps), number(stage.rate_rps)
        if stage.rate_max_rps < stage.rate_rps:
            yield BindingConstraint("throughput", f"it serves {able} of {arrives} requests/s")
        else:
            why = f"it serves at most {able} requests/s; one more at the ingress makes {number(more.rate_rps)} here"
            yield BindingConstraint("throughput", why)
        yield from _no_larger(stage.belief(less.group), less.group.spec.slot, less.limit)
        return
    yield from _too_late(prediction, stage, more.slowest.total_ms, "with one more request per second")


def _no_larger(belief: Belief, slot: Slot, limit: int) -> Iterator[BindingConstraint]:
    """That the variant takes no larger batches although its throughput still rises at the largest."""
    gains = limit > 1 and limit / belief.latency_ms(limit, slot) > (limit - 1) / belief.latency_ms(limit - 1, slot)
    if limit == belief.batch_max and gains:
        why = f"variant {belief.variant} takes batches of {limit} at most, and larger ones would serve more"
        yield BindingConstraint("batch", why)


def _too_late(
    prediction: PlanPrediction, stage: StagePrediction, stage_ms: float, condition: str
) -> Iterator[BindingConstraint]:
    """That the tightest path through the stage misses its deadline if the stage takes `stage_ms`."""
    path = prediction.tightest(stage.name)
    if path is None or math.isinf(path.predicted_ms):
        return
    now_ms = next(visit.total_ms for visit in path.visits if visit.stage is stage)
    total_ms = path.predicted_ms - now_ms + stage_ms
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
    at_stage = [shortfall for shortfall in shortfalls_then if shortfall.stage == stage]
    if at_stage:
        return cannot([shortfall for shortfall in shortfalls_now if shortfall.stage == stage], at_stage)
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
    groups = [group for group in target.groups if group.count]
    return {(group.spec.variant, group.spec.slot): target.batch_max_of(group) for group in groups}


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
