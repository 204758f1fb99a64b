"""What one more request per second would need: two plans of the same policies, told apart stage by stage."""

from collections import Counter

from sloop.solvers.targets import amount
from sloop.systems.planning.answer import Lack, OneMore
from sloop.systems.planning.placed import cores_of
from sloop.vocabulary import Plan, ReplicaSpec, StagePlan

NOTHING = "nothing"


def one_more(now: Plan, then: Plan, lacks: list[Lack]) -> OneMore:
    """The difference in words. `then` is the plan for one more request per second, and `lacks` what it lacks."""
    changes = tuple(said for stage in _stages(now, then) for said in changes_of(stage, now, then))
    cores = cores_of(then) - cores_of(now)
    if lacks:
        return OneMore(False, cannot(lacks), cores, changes, tuple(lacks))
    return OneMore(True, ", ".join(changes) or NOTHING, cores, changes)


def stage_says(stage: str, now: Plan, then: Plan, lacks: list[Lack]) -> str:
    """The same for one stage: `cannot` where it is this stage that lacks something."""
    own = [lack for lack in lacks if lack.stage == stage]
    return cannot(own) if own else ", ".join(changes_of(stage, now, then)) or NOTHING


def cannot(lacks: list[Lack]) -> str:
    """The first of the reasons with figures, and how many more there are."""
    first = next((lack for lack in lacks if lack.kind != "plan"), lacks[0])
    others = sum(lack.kind != "plan" for lack in lacks) - 1
    return f"cannot: {first.why}" + (f"; and {others} more" if others > 0 else "")


def changes_of(stage: str, now: Plan, then: Plan) -> list[str]:
    """How one stage differs: `+1 replica of read (0.5 cores)`, `batch 4 -> 8 at read`, `cores 1 -> 2 at read`."""
    before, after = _target(now, stage), _target(then, stage)
    had, gets = _kinds(before), _kinds(after)
    said = []
    if len(had) == len(gets) == 1:
        (old, old_count), (new, new_count) = next(iter(had.items())), next(iter(gets.items()))
        if old.variant != new.variant:
            said.append(f"variant {old.variant} -> {new.variant} at {stage}")
        if old.cores != new.cores:
            said.append(f"cores {old.cores:g} -> {new.cores:g} at {stage}")
        if old_count != new_count:
            said.append(_counted(new_count - old_count, stage, new))
    else:
        several = len({spec.variant for spec in (*had, *gets)}) > 1
        for spec in sorted({*had, *gets}, key=lambda spec: (spec.variant, spec.cores)):
            if had[spec] != gets[spec]:
                name = f"{stage}/{spec.variant}" if several else stage
                said.append(_counted(gets[spec] - had[spec], name, spec))
    if before is not None and after is not None and before.batch_max != after.batch_max:
        said.append(f"batch {before.batch_max} -> {after.batch_max} at {stage}")
    return said


def _counted(difference: int, name: str, spec: ReplicaSpec) -> str:
    sign = "+" if difference > 0 else "-"
    return f"{sign}{amount(abs(difference), 'replica')} of {name} ({amount(spec.cores, 'core')})"


def _kinds(target: StagePlan | None) -> Counter[ReplicaSpec]:
    """Replicas by variant and cores, wherever they are."""
    kinds: Counter[ReplicaSpec] = Counter()
    for group in target.groups if target else ():
        if group.count:
            kinds[ReplicaSpec(group.spec.stage, group.spec.variant, group.spec.cores)] += group.count
    return kinds


def _stages(now: Plan, then: Plan) -> list[str]:
    """Of both plans, in order, each once."""
    return list(dict.fromkeys(target.stage for plan in (now, then) for target in plan.stages))


def _target(plan: Plan, stage: str) -> StagePlan | None:
    return next((target for target in plan.stages if target.stage == stage), None)
