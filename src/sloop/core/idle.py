"""What becomes of cores that no plan needs, where the divide policy says more than to leave them (`Divide.idle`).

`use`: the only replica of a stage may use the cores of others while these are idle. `replicas`: there are more replicas
than planned, which are called spare.
"""

from collections.abc import Collection, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from msgspec import Struct, structs

from sloop.core.ledger import MILLI, Ledger, cores_by_hardware, millicores
from sloop.core.views import Belief, BeliefKey, ClusterView, CoreDemand, NodeView, PlanInput
from sloop.text import counted
from sloop.units import ROUNDING
from sloop.vocabulary import Group, NodeState, Plan, ReplicaId, ReplicaSpec, StagePlan

GAIN_MIN: Final = 0.05
"""The least gain from all cores for which replicas share them; less is the noise of a measurement."""
SPARE_MAX: Final = 1
"""The most spare replicas for each one that is planned."""
STAYS: Final = 2.0
"""A spare replica makes way only for an application that has less than half as many for its plan: the new one would
take long to start."""
SPARE: Final = "; spare: "
"""The reason of a plan ends with this and what is to be said about its spare replicas."""


def sharing_idle_cores(plan: Plan, view: ClusterView, nodes: Sequence[NodeView]) -> Plan:
    """The plan, with replicas that only reserve their cores and may use those that are idle (`Slot.is_capped`), where
    that costs nothing and makes them faster; and while no request is expected, with batches that suit a burst.

    It costs nothing on the only node of a kind of hardware if that is always there, such as a server's own machine: on
    several, replicas that are faster than planned on one node would say nothing of those on the next, and a node on
    demand is given back instead. A model is faster if a batch of one is expected to gain `GAIN_MIN` from all cores of
    the node; one that is measured on more cores than there are is not known to be. Both are the same for all plans of a
    version. Of a stage with several replicas, all have only their own cores: each would take those of the others, and
    predictions do not know when. So replicas are replaced when a second one comes, and when one is left.
    """
    alone: dict[str, float] = {}
    for each in nodes:
        alone[each.node.hardware] = 0.0 if each.node.hardware in alone or each.node.on_demand else each.node.cores
    beliefs = {stage.name: stage.beliefs for stage in view.stages}
    used = list[float]()

    def shared(group: Group) -> Group:
        spec, slot = group.spec, group.spec.slot
        cores, belief = alone.get(slot.hardware, 0.0), beliefs[spec.stage][spec.variant, slot.hardware]
        if not slot.is_capped or slot.accelerator or spec.shape:
            return group
        if not cores or belief.cores_max > cores * (1 + ROUNDING):
            return group
        on_all, on_one = (belief.latency_ms(1, belief.slot(each)) for each in (cores, min(1.0, cores)))
        if on_all > on_one * (1 - GAIN_MIN):
            return group
        used.append(cores)
        return structs.replace(group, spec=structs.replace(spec, slot=structs.replace(slot, is_capped=False)))

    def for_bursts(target: StagePlan) -> StagePlan:
        is_alone = sum(group.count for group in target.groups) < 2
        made = structs.replace(target, groups=tuple(map(shared, target.groups))) if is_alone else target
        if view.forecast_rps or target.wait_ns or any(each.batch_max for each in made.groups):
            return made
        of_stage, specs = beliefs[target.stage], [each.spec for each in made.groups]
        costs_ns = [of_stage[spec.variant, spec.slot.hardware].costs_ns(spec.slot) for spec in specs]
        sizes = [_burst_batch(each, target.batch_max, view.batch_limit_ns) for each in costs_ns]
        return structs.replace(made, batch_max=min(sizes, default=target.batch_max))

    stages = tuple(map(for_bursts, plan.stages))
    why = f"{plan.why}; {_idle_cores_text(stages, beliefs, max(used))}" if used else plan.why
    return structs.replace(plan, stages=stages, why=why)


def _idle_cores_text(
    stages: Sequence[StagePlan], beliefs: Mapping[str, Mapping[BeliefKey, Belief]], cores: float
) -> str:
    """How many cores replicas use that only reserve some, and of a single group, how long a batch takes on either: the
    policy's own reason has the times on those that are reserved."""
    text = f"while other cores are idle, replicas use all {cores:g}"
    found = [(target, group) for target in stages for group in target.groups if not group.spec.slot.is_capped]
    if len(found) > 1 or found[0][1].spec.cores >= cores:
        return text
    ((target, group),) = found
    spec, size = group.spec, target.batch_max_of(group)
    belief = beliefs[spec.stage][spec.variant, spec.slot.hardware]
    on_reserved, on_all = (belief.latency_ms(size, slot) for slot in (belief.slot(spec.cores), spec.slot))
    own = "its reserved core" if spec.cores == 1 else f"its {spec.cores:g} reserved cores"
    return f"{text}: a batch of {size} takes {on_reserved:.4g} ms on {own}, and {on_all:.4g} ms on all"


def _burst_batch(costs_ns: Sequence[int], planned: int, limit_ns: int) -> int:
    """The largest batch for a burst at an idle model: the planned one, or one that serves notably more requests per
    second and takes at most `limit_ns`."""
    best = planned
    for size in range(planned + 1, len(costs_ns)):
        if costs_ns[size] <= limit_ns and costs_ns[size] * best < costs_ns[best] * size * (1 - GAIN_MIN):
            best = size
    return best


# Spare replicas


def without_spare(plan: Plan) -> Plan:
    """The plan as it was before spare replicas were added."""
    stages, has_spare = list(plan.stages), False
    for at, target in enumerate(stages):
        for group in target.groups:
            if group.spare:
                has_spare = True
                groups = [structs.replace(each, count=each.count - each.spare, spare=0) for each in target.groups]
                stages[at] = structs.replace(target, groups=tuple(groups))
                break
    return structs.replace(plan, stages=tuple(stages), why=plan.why.partition(SPARE)[0]) if has_spare else plan


def planned_of(missing: Sequence[ReplicaSpec], target: StagePlan) -> list[ReplicaSpec]:
    """The replicas without which the stage has fewer than its plan needs, of those that are missing. A spare one only
    starts where there is room: no node is acquired for it, and its absence is no shortage."""
    spare = {group.spec: group.spare for group in target.groups if group.spare}
    found: list[ReplicaSpec] = []
    for spec in missing:
        if spare.get(spec):
            spare[spec] -= 1
        else:
            found.append(spec)
    return found


def demands_of(key: str, plan: Plan | None, weight: float) -> list[CoreDemand]:
    """The cores that an application wants by its plan in force, of each kind of hardware."""
    planned, has = plan and without_spare(plan), cores_by_hardware(plan)
    wanted = has if planned is plan else cores_by_hardware(planned)
    return [
        CoreDemand(key, hardware, wanted[hardware], weight, spare=cores - wanted[hardware])
        for hardware, cores in has.items()
    ]


class _SpareGroup(Struct):
    """Equal replicas of a plan, of which there may be more."""

    key: str
    place: tuple[int, int]
    """Of the stage in the plan, and of the group in the stage."""
    spec: ReplicaSpec
    belief: Belief
    planned: int
    present: int
    """How many there are now, also if they start."""
    weight: float
    spare: int = 0

    @property
    def order(self) -> tuple[float, float, bool, str, tuple[int, int]]:
        """The group with the smallest gets the next spare replica."""
        fraction, is_there = self.spare / (self.planned * self.weight), self.planned + self.spare < self.present
        return fraction / STAYS if is_there else fraction, -self.weight, not is_there, self.key, self.place


def with_spare_replicas(
    given: PlanInput, plans: Mapping[str, Plan], views: Mapping[str, ClusterView], keys: Collection[str]
) -> dict[str, Plan]:
    """The plans of the applications `keys`, with spare replicas on cores that no plan needs.

    The next one goes to the application of whose planned replicas, times its weight, the spare ones are the smallest
    fraction, if it has room. So all could serve the same multiple of what their plans are for, rounded up, and nobody
    has less than its plan. Whichever policy made the plans, it does not see the spare replicas in the plan in force,
    and they take no cores from any plan. The stages of a graph have equal fractions, too.

    Only nodes that are there anyway count; those on demand are given back instead. Whether replicas fit is tried on
    empty nodes, so that a spare one may have no room beside those that run; then it does not start (`planned_of`).
    There are no spare replicas of those that use an accelerator, whose node the policy chooses, that share their cores,
    or that have a shadow. `plans` are those of all applications that are planned now, without spare replicas. The
    others keep theirs until their turn.
    """
    demands = [*given.others]
    for each in given.due:
        demands += demands_of(each.key, plans.get(each.key, each.plan), each.weight)
    fixed = [each for each in given.nodes if each.state is NodeState.READY and not each.node.on_demand]
    free: dict[str, int] = {}
    for hardware in {each.hardware for each in demands}:
        has = sum([round(each.node.cores * MILLI) for each in fixed if hardware in ("", each.node.hardware)])
        needs = sum([round((each.cores + each.spare) * MILLI) for each in demands if each.hardware == hardware])
        free[hardware] = max(0, has - needs)
    if not any(free.values()):
        return {key: plans[key] for key in keys}
    weights = {each.key: each.weight for each in given.due}
    groups = [group for key in keys for group in _spare_groups(key, plans[key], views[key], weights[key])]
    _divide_spare(groups, dict(free), _room_beside(plans, views, fixed))
    found: dict[str, list[_SpareGroup]] = {key: [] for key in keys}
    for group in groups:
        found[group.key].append(group)
    return {key: _with_spare(plans[key], own, free) for key, own in found.items()}


def _spare_groups(key: str, plan: Plan, view: ClusterView, weight: float) -> list[_SpareGroup]:
    """Those of a plan that may have spare replicas, each with none."""
    stages = {stage.name: stage for stage in view.stages}
    found: list[_SpareGroup] = []
    for at, target in enumerate(plan.stages):
        stage = stages[target.stage]
        for place, group in enumerate(target.groups):
            spec, slot = group.spec, group.spec.slot
            if group.count and slot.is_capped and not (slot.accelerator or spec.node or spec.device or spec.shape):
                belief = stage.beliefs[spec.variant, slot.hardware]
                there = [each for each in stage.replicas if (each.spec.variant, each.spec.slot) == (spec.variant, slot)]
                found.append(_SpareGroup(key, (at, place), spec, belief, group.count, len(there), weight))
    return found


def _room_beside(plans: Mapping[str, Plan], views: Mapping[str, ClusterView], nodes: Sequence[NodeView]) -> Ledger:
    """The room on these nodes beside the replicas of all plans, the largest of which are placed first."""
    wanted: list[tuple[ReplicaSpec, Belief]] = []
    for key, plan in plans.items():
        beliefs = {stage.name: stage.beliefs for stage in views[key].stages}
        for target in plan.stages:
            for group in target.groups:
                belief = beliefs[target.stage][group.spec.variant, group.spec.slot.hardware]
                wanted += [(group.spec, belief)] * group.count
    room = Ledger.all_ready(each.node for each in nodes)
    room.without_room(sorted(wanted, key=lambda each: -each[0].cores))
    return room


def _divide_spare(groups: Sequence[_SpareGroup], free: dict[str, int], room: Ledger) -> None:
    """Give the groups as many spare replicas as have room. `free` are the thousandths of cores that no plan needs."""
    numbers = count(max(room.reservations, default=-1) + 1)
    order = [(group.order, group) for group in groups]
    heapify(order)
    while order:
        _, group = heappop(order)
        spec, millis = group.spec, millicores(group.spec.cores)
        left = free[spec.slot.hardware] - millis
        if left >= 0 and room.place(ReplicaId(next(numbers)), spec, group.belief) is not None:
            free[spec.slot.hardware] = left
            group.spare += 1
            if group.spare < SPARE_MAX * group.planned:
                heappush(order, (group.order, group))


def _with_spare(plan: Plan, groups: Sequence[_SpareGroup], free: Mapping[str, int]) -> Plan:
    """The plan with these spare replicas, and the reason for them."""
    spare = {group.place: group.spare for group in groups if group.spare}
    if not spare:
        return plan
    stages: list[StagePlan] = []
    for at, target in enumerate(plan.stages):
        own = [
            structs.replace(group, count=group.count + spare.get((at, place), 0), spare=spare.get((at, place), 0))
            for place, group in enumerate(target.groups)
        ]
        stages.append(structs.replace(target, groups=tuple(own)))
    cores = sum([free[hardware] for hardware in {group.spec.slot.hardware for group in groups}]) / MILLI
    more, unneeded = counted(sum(spare.values()), "replica"), counted(cores, "core")
    what = f"{more} more than planned, of the {unneeded} that no plan needs"
    return structs.replace(plan, stages=tuple(stages), why=f"{plan.why}{SPARE}{what}")
