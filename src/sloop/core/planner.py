"""The planner: asks the forecast and scaling policies of all applications for plans that fit the cluster together.

It is a pure function of its `PlanInput` and of what the policies remember, so that it can run within the event loop or
in a process beside it (`Scale.is_quick`).

Each application has policies of its own, which first plan as if the cluster were theirs. If the plans together want
more cores of a kind of hardware than there are, the divide policy gives each application a number of cores, and those
that wanted more plan again for a cluster of that size. If the cores suffice, the plans are therefore the same as
without other applications. Before the divide policy answers, it may ask what an application would plan with fewer cores
(`Claimant.plan`).
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import structs

from sloop.core.idle import demands_of, sharing_idle_cores, with_spare_replicas, without_spare
from sloop.core.ledger import MILLI, Ledger, cores_by_hardware, millicores
from sloop.core.protocols import Policies
from sloop.core.views import (
    ApplicationView,
    Claimant,
    ClusterView,
    CoreDemand,
    CoreShare,
    NodeView,
    PlanInput,
    StageView,
)
from sloop.errors import InputError
from sloop.events import Planned
from sloop.text import counted
from sloop.transient import Cache, Transient
from sloop.units import ROUNDING, WIDE_ROUNDING
from sloop.vocabulary import ALONE, Group, NodeState, Plan, ReplicaSpec, StagePlan

QUICK_MAX = 4
"""The most applications whose plans are made within the event loop; a quick policy takes up to a millisecond or two."""
FAILURES = (Exception, SystemExit)
"""What a user's policy may raise; the plans of the other applications are made nevertheless."""
WORTHWHILE = 0.01
"""An application plans again with the cores that others leave if they are at least this fraction of its part."""
REPLICAS_MAX = 100_000
"""More replicas in one plan are a mistake, and would occupy the core for seconds at every tick."""
CORES_MAX = 1_000_000
"""More cores of one replica are a mistake, and their thousandths may overflow."""

NO_PAIR: Final = "write `def plan(self, now_ns, view, memory)`, and end it with `return plan, memory`"
"""What to do about a scaling policy that gives no pair."""

NO_SHARES: Final = "write `return [CoreShare(each) for each in cores]`"
"""What to do about a divide policy that returns something else than shares."""

NO_CHOICES: Final[Mapping[str, Policies]] = {}
"""Of an application whose policies decide all the time."""

CoreLimits = dict[tuple[str, str], float]
"""By application and hardware, the cores of those that cannot have what they want."""

Shares = dict[str, list[CoreShare]]
"""By application, what the divide policy gives it of each kind of hardware that is short."""

LimitedNodes = Cache[tuple[tuple[str, float], ...], tuple[NodeView, ...]]

_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Plan)


class Failures(dict[str, BaseException], Transient):
    """Exceptions of policies, by application."""


class Planner:
    """The forecast, scaling and divide policies of all application versions, by key."""

    def __init__(self) -> None:
        self.policies: dict[str, Policies] = {}
        self._choices: dict[str, Mapping[str, Policies]] = {}
        self._chosen: dict[str, str] = {}
        """Of each application version, the choice that plans; empty at first."""
        self._memories: dict[str, Any] = {}
        self.failures = Failures()
        """The exceptions of policies in the last plans, by application."""
        self.limits: CoreLimits = {}
        """The limits of the last plans."""
        self._limited = LimitedNodes()
        """The nodes of the last plans, by the limits that they were cut to: many applications have the same limit."""

    def add(self, key: str, policies: Policies, choices: Mapping[str, Policies] = NO_CHOICES) -> None:
        """Plan for one more application version, at first by these policies, and by those of `choices` when one of
        these is named."""
        self.policies[key] = policies
        self._choices[key], self._chosen[key] = choices, ""

    def choose(self, key: str, choice: str) -> None:
        """Plan by the policies of this choice, which remember nothing if they did not before."""
        if choice != self._chosen[key]:
            is_first = not self._chosen[key] and self._choices[key][choice] is self.policies[key]
            self.policies[key], self._chosen[key] = self._choices[key][choice], choice
            if not is_first:
                self._memories.pop(key, None)

    @property
    def memories(self) -> Mapping[str, Any]:
        """What the scaling policy of each application version remembers; none if it remembers nothing."""
        return {key: memory for key, memory in self._memories.items() if memory is not None}

    def adopt(self, memories: Mapping[str, Any]) -> None:
        """Go on with what the policies of another planner remember."""
        self._memories.update(memories)

    def discard(self, key: str) -> None:
        """Stop planning for an application version."""
        del self.policies[key], self._choices[key], self._chosen[key]
        self._memories.pop(key, None)
        self.failures.pop(key, None)

    def plan(self, given: PlanInput) -> Planned:
        """New plans for the applications that are due. An application whose policy keeps its plan is left out."""
        views: dict[str, ClusterView] = {}
        self.failures, self.limits, self._limited = Failures(), {}, LimitedNodes()
        for application in given.due:
            if application.choice:
                self.choose(application.key, application.choice)
            try:
                views[application.key] = self._view(given, application)
            except FAILURES as error:
                self.failures[application.key] = error
        shares: Shares = {}
        if len(given.due) + len(given.others) > 1:
            plans, shares = self._together(given, views)
        else:
            plans = {}
            for key, view in views.items():
                plans[key], self._memories[key] = self._plan(given.now_ns, key, view)
        made: dict[str, Plan] = {}
        with_spare: list[str] = []
        for key, view in views.items():
            idle, plan = self.policies[key].divide.idle, plans.get(key)
            if plan is None:
                plan = None if key in self.failures else _kept(view.plan, shares.get(key, ()))
            elif key in shares:
                plan = _with_shares(plan, shares[key])
            if plan is not None:
                made[key] = sharing_idle_cores(plan, view, given.nodes) if idle == "use" else plan
            if idle == "replicas":
                with_spare.append(key)
        if with_spare or len(made) < len(views):
            _set_spare(given, views, made, with_spare)
        return Planned(
            given.number,
            made,
            {key: f"{type(error).__name__}: {error}" for key, error in self.failures.items()},
        )

    def _view(self, given: PlanInput, application: ApplicationView) -> ClusterView:
        forecast = self.policies[application.key].forecast
        forecast_rps = forecast.demand_rps(given.now_ns, application.ingress) * application.share
        return ClusterView(
            stages=application.stages,
            nodes=given.nodes,
            plan=application.plan and without_spare(application.plan),
            demand_rps={stage.name: forecast_rps * stage.visits for stage in application.stages},
            ingress=application.ingress,
            forecast_rps=forecast_rps,
            paths=application.paths,
        )

    def _plan(self, now_ns: int, key: str, view: ClusterView) -> tuple[Plan | None, Any]:
        """A plan, and what its policy then remembers. Without one that can be used, what it remembered before."""
        before = self._memories.get(key)
        try:
            answer = self.policies[key].scale.plan(now_ns, view, before)
            try:
                plan, memory = answer
            except (TypeError, ValueError):
                what = f"the scaling policy answers {type(answer).__name__} instead of a plan and its memory"
                raise InputError(what, help=NO_PAIR) from None
            if plan is None:
                return None, memory
            check(plan, view)
            return packed(plan, view), memory
        except FAILURES as error:
            self.failures[key] = error
            return None, before

    def _together(self, given: PlanInput, views: Mapping[str, ClusterView]) -> tuple[dict[str, Plan | None], Shares]:
        """Plans that together fit the cluster, and what the divide policy says about them. A policy remembers only the
        plan that is used."""
        kept = [application for application in given.due if application.key not in views]
        given = replace(
            given,
            due=tuple(application for application in given.due if application.key in views),
            others=(
                *given.others,
                *(demand for each in kept for demand in demands_of(each.key, each.plan, each.weight)),
            ),
        )
        plans: dict[str, Plan | None] = {}
        memories: dict[str, Any] = {}
        for key, view in views.items():
            plans[key], memories[key] = self._plan(given.now_ns, key, view)
        alone = {key: plans[key] or view.plan for key, view in views.items()}
        wanted = [demand for each in given.due for demand in demands_of(each.key, alone[each.key], each.weight)]
        try:
            limits, shares = self._divide(given, wanted, views, alone)
        except FAILURES as error:  # of the divide policy
            self.failures = Failures(dict.fromkeys(views, error))
            return {}, {}
        self.limits = limits
        short: dict[str, dict[str, float]] = {}
        for (key, hardware), cores in limits.items():
            short.setdefault(key, {})[hardware] = cores
        for key, own in short.items():
            plans[key], memories[key] = self._plan_within(given.now_ns, key, views[key], own)
        self._spread_rest(given, views, short, plans, memories)
        self._memories.update(memories)
        return plans, shares

    def _plan_within(
        self, now_ns: int, key: str, view: ClusterView, limits: Mapping[str, float]
    ) -> tuple[Plan | None, Any]:
        """The plan for at most these cores of some kinds of hardware, and what its policy then remembers."""
        if not any(map(millicores, limits.values())):
            return _nothing(view), self._memories.get(key)
        nodes = self._limited.get(given := tuple(limits.items()))
        if nodes is None:
            nodes = self._limited[given] = tuple(_first_nodes(view.nodes, dict(limits)))
        plan, memory = self._plan(now_ns, key, replace(view, nodes=nodes))
        return plan and _with_reason(trimmed(plan, limits), limits), memory

    def _spread_rest(
        self,
        given: PlanInput,
        views: Mapping[str, ClusterView],
        short: Mapping[str, dict[str, float]],
        plans: dict[str, Plan | None],
        memories: dict[str, Any],
    ) -> None:
        """Let limited applications plan once more with the cores that the plans leave: a policy that plans in whole
        units cannot use all of its part. The one that uses the smallest fraction of its part is first."""
        used = {key: cores_by_hardware(plans.get(key) or view.plan) for key, view in views.items()}
        totals = {hardware: _cores_of(given, hardware) for _, hardware in self.limits}

        def unused() -> dict[str, float]:
            return {kind: cores - sum(own.get(kind, 0.0) for own in used.values()) for kind, cores in totals.items()}

        def fraction(key: str) -> float:
            own = used[key]
            return math.fsum(own.get(hardware, 0.0) for hardware in short[key]) / math.fsum(short[key].values())

        left = unused()
        for key in sorted((key for key in short if any(short[key].values())), key=fraction):
            more = {kind: _whole(used[key].get(kind, 0.0) + max(0.0, left[kind])) for kind in short[key]}
            if any(more[hardware] > limit * (1 + WORTHWHILE) for hardware, limit in short[key].items()):
                plan, memory = self._plan_within(given.now_ns, key, views[key], more)
                if math.fsum(cores_by_hardware(plan).values()) > math.fsum(used[key].values()):
                    plans[key], memories[key], used[key] = plan, memory, cores_by_hardware(plan)
                    self.limits |= {(key, hardware): cores for hardware, cores in more.items()}
                    left = unused()
        for key, hardware in self.limits:  # a plan that is kept may use what the others left it before
            self.limits[key, hardware] = max(self.limits[key, hardware], used[key].get(hardware, 0.0))

    def _divide(
        self,
        given: PlanInput,
        wanted: Sequence[CoreDemand],
        views: Mapping[str, ClusterView],
        alone: Mapping[str, Plan | None],
    ) -> tuple[CoreLimits, Shares]:
        """The limits of the applications that get less than they want, and by application all shares."""
        limits: CoreLimits = {}
        shares: Shares = {}
        for hardware in dict.fromkeys(demand.hardware for demand in wanted):
            total = _cores_of(given, hardware)
            demands = [demand for demand in wanted if demand.hardware == hardware]
            if total <= 0.0 or sum(demand.cores for demand in demands) <= total * (1 + ROUNDING):
                continue
            claimants = [
                self._claimant(given.now_ns, each, views[each.key], plan, limits)
                for each in demands
                if (plan := alone[each.key]) is not None
            ]
            divided = self.policies[demands[0].key].divide.cores(given.now_ns, total, claimants)
            _check_shares(divided, demands, total)
            for demand, share in zip(demands, divided, strict=True):
                shares.setdefault(demand.key, []).append(share)
                if share.cores < demand.cores * (1 - ROUNDING):
                    limits[demand.key, hardware] = _whole(share.cores)
        return limits, shares

    def _claimant(
        self, now_ns: int, demand: CoreDemand, view: ClusterView, alone: Plan, limits: CoreLimits
    ) -> Claimant:
        """An application's demand as the divide policy sees it. `limits` has the limits of other kinds of hardware, on
        which it has decided already."""
        key, hardware = demand.key, demand.hardware

        def plan(cores: float) -> Plan | None:
            if not 0 <= cores < math.inf:
                what = f"the divide policy asks what {key!r} would plan with {cores} cores of {hardware!r}"
                raise InputError(what, help="ask for 0 cores or more")
            own = {kind: limit for (name, kind), limit in limits.items() if name == key}
            before = self.failures.get(key)
            made, _ = self._plan_within(now_ns, key, view, own | {hardware: _whole(cores)})
            if before is None:
                self.failures.pop(key, None)  # a plan that is only tried does not count as failed
            return made

        return Claimant(key, hardware, demand.cores, demand.weight, view=view, alone=alone, plan=plan)


def _set_spare(given: PlanInput, views: Mapping[str, ClusterView], made: dict[str, Plan], keys: Sequence[str]) -> None:
    """Add spare replicas to the plans of the applications `keys`, also to those that are kept, and take away from kept
    plans of others what an earlier divide policy added."""
    in_force = {each.key: each.plan for each in given.due}
    for key, view in views.items():
        if key not in made and view.plan is not None and view.plan is not in_force[key] and key not in keys:
            made[key] = view.plan
    if not keys:
        return
    plans = {key: plan for key, view in views.items() if (plan := made.get(key) or view.plan) is not None}
    for key, plan in with_spare_replicas(given, plans, views, [key for key in keys if key in plans]).items():
        if key in made or not plan.same_target(in_force[key]):
            made[key] = plan


def _check_shares(shares: Sequence[CoreShare], demands: Sequence[CoreDemand], total: float) -> None:
    """InputError for shares that are wrong, one by one or together."""
    if len(shares) != len(demands):
        what = f"the divide policy gives {counted(len(shares), 'share')} to {counted(len(demands), 'application')}"
        raise InputError(what, help="give one share for each claimant, in their order")
    for share, demand in zip(shares, demands, strict=True):
        if not isinstance(share, CoreShare):
            raise InputError(f"the divide policy answers {type(share).__name__} instead of a share", help=NO_SHARES)
        if not 0 <= share.cores < math.inf or not 0 <= share.shed <= 1:
            given = f"{share.cores} cores of {demand.hardware!r}, and refuses {share.shed} of its requests"
            what = f"the divide policy gives {demand.key!r} {given}"
            raise InputError(what, help="give 0 cores or more, and a fraction `shed` from 0 to 1")
    used = math.fsum(min(share.cores, demand.cores) for share, demand in zip(shares, demands, strict=True))
    if used > total * (1 + WIDE_ROUNDING):
        kind = demands[0].hardware
        what = f"the divide policy gives {counted(used, 'core')} of {kind!r}, and there are {total:g}"
        raise InputError(what, help="give at most `total` cores in all shares together")


def _with_shares(plan: Plan, shares: Sequence[CoreShare]) -> Plan:
    """The plan with the reasons of the divide policy, and the fraction of requests that it refuses."""
    if not any(each.why or each.shed for each in shares):
        return plan
    why = "; ".join([plan.why, *(each.why for each in shares if each.why)])
    return structs.replace(plan, why=why, shed=max(plan.shed, _shed_by(shares)))


def _kept(plan: Plan | None, shares: Sequence[CoreShare]) -> Plan | None:
    """The plan in force, if its policy keeps it and it refuses more or less than the divide policy says now: it may
    have been made in a shortage that is over."""
    if plan is None or not plan.has_replicas or plan.shed == _shed_by(shares):
        return None
    return structs.replace(plan, shed=_shed_by(shares))


def _shed_by(shares: Sequence[CoreShare]) -> float:
    """A plain number: plans are written to the journal."""
    return max((float(each.shed) for each in shares), default=0.0)


def _cores_of(given: PlanInput, hardware: str) -> float:
    """The cores of a kind of hardware that the applications to plan for can have."""
    total = sum(view.node.cores for view in given.nodes if _is_of(view, hardware))
    return total - sum(demand.cores for demand in given.others if demand.hardware == hardware)


def plans_beside(policies: Sequence[Policies]) -> bool:
    """Whether the plans of applications with these policies are computed beside the event loop: if any policy is not
    quick, or if there are so many that quick ones together would delay requests. The divide policy of a single
    application is never called."""
    is_quick = all(each.scale.is_quick and (each.divide.is_quick or len(policies) == 1) for each in policies)
    return len(policies) > QUICK_MAX or not is_quick


def check(plan: Plan, view: ClusterView) -> None:
    """InputError for a plan that the core could not carry out: it is wrong, whatever room there is."""
    try:
        _decoder.decode(_encoder.encode(plan))
    except (TypeError, ValueError, OverflowError) as error:
        what = f"the plan has values of wrong types: {error}"
        raise InputError(what, help="return plain numbers, not NumPy's") from error
    if not 0 <= plan.shed <= 1:
        raise InputError(f"the plan refuses {plan.shed} of the requests", help="give a fraction `shed` from 0 to 1")
    stages, count = {stage.name: stage for stage in view.stages}, 0
    for target in plan.stages:
        stage = stages.pop(target.stage, None)
        if stage is None:
            known = ", ".join(stage.name for stage in view.stages)
            raise InputError(f"the plan has stage {target.stage!r}, unknown or twice", help=f"the stages are {known}")
        if target.batch_max < 0 or target.wait_ns < 0:
            what = f"batches of at most {target.batch_max}, and a wait of {target.wait_ns} ns"
            raise InputError(f"the plan of stage {target.stage} has {what}", help="correct the scaling policy")
        for group in target.groups:
            _check_group(group, target, stage)
            count += group.count
    if stages:
        what = f"the plan leaves out stage {next(iter(stages))!r}, whose replicas would stay as they are"
        raise InputError(what, help="name every stage; one without groups has no replicas")
    if count > REPLICAS_MAX:
        what = f"the plan has {count} replicas; at most {REPLICAS_MAX} are possible"
        raise InputError(what, help="correct the scaling policy")


def _check_group(group: Group, target: StagePlan, stage: StageView) -> None:
    slot, variant = group.spec.slot, group.spec.variant
    of, fix = f"the plan of stage {target.stage} has", "correct the scaling policy"
    if group.count < 0 or not 1 / MILLI <= slot.cores <= CORES_MAX or not 0 <= slot.share <= 1:
        what = f"{group.count} replicas with {slot.cores} cores and a share of {slot.share}"
        raise InputError(f"{of} {what}", help=fix)
    if group.count and (target.batch_max_of(group) < 1 or not 0 <= group.rate_rps < math.inf):
        what = f"replicas with batches of at most {target.batch_max_of(group)}, for {group.rate_rps} requests/s"
        raise InputError(f"{of} {what}", help=fix)
    belief = stage.beliefs.get((variant, slot.hardware))
    if group.spec.stage != target.stage or belief is None:
        known = ", ".join(f"{name} on {kind}" if kind else name for name, kind in stage.beliefs)
        what = f"a replica of {group.spec.stage}/{variant} on hardware {slot.hardware!r}"
        raise InputError(f"{of} {what}", help=f"it can run {known}")
    shadow = group.spec.shadow
    if group.spec.shape != (ALONE if shadow is None else (shadow,)):
        raise InputError(f"{of} workers beside the first one that are no single shadow", help=fix)
    if shadow is not None:
        if not 1 / MILLI <= shadow.cores <= CORES_MAX:
            raise InputError(f"{of} a shadow with {shadow.cores} cores", help=fix)
        if not shadow.layers or list(shadow.layers) != sorted(set(shadow.layers)) or shadow.layers[0] < 0:
            raise InputError(f"{of} a shadow with blocks {shadow.layers}; they must ascend", help=fix)
        if shadow.layers[-1] >= belief.layer_count:
            what = f"a shadow with block {shadow.layers[-1]} of {variant}, of which {belief.layer_count} are measured"
            raise InputError(f"{of} {what}", help="measure them with `sloop profile MODEL --layers`")
    if belief.accelerator not in ("", slot.accelerator):
        what = f"a replica of {variant} on accelerator {slot.accelerator!r}"
        raise InputError(f"{of} {what}", help=f"its profile is for {belief.accelerator!r}")


def _whole(cores: float) -> float:
    """Cores rounded down to the thousandths in which the ledger counts, so that parts of a node fit on it together."""
    return math.floor(cores * MILLI + ROUNDING) / MILLI


def _is_of(view: NodeView, hardware: str) -> bool:
    """Whether the node has, or can have, cores for replicas on this kind of hardware; "" is any kind."""
    return hardware in ("", view.node.hardware) and view.state is not NodeState.LOST


def _first_nodes(nodes: Iterable[NodeView], left: dict[str, float]) -> Iterable[NodeView]:
    """At most `left` cores of some kinds of hardware: the first nodes, the last of them in part."""
    for each in nodes:
        hardware = next((kind for kind in left if _is_of(each, kind)), None)
        if hardware is None:
            yield each
        elif left[hardware] > 0:
            own = min(left[hardware], each.node.cores)
            left[hardware] -= own
            usd_per_h = each.node.usd_per_h * own / each.node.cores
            part = structs.replace(each.node, cores=own, usd_per_h=usd_per_h)
            yield replace(each, node=part, free_cores=min(each.free_cores, own))


def _nothing(view: ClusterView) -> Plan:
    """The plan of an application for which no cores are left."""
    stages = tuple(StagePlan(stage.name, (), batch_max=1) for stage in view.stages)
    return Plan(stages, "the other applications need all cores", feasible=False)


def trimmed(plan: Plan, limits: Mapping[str, float]) -> Plan:
    """The plan with at most this many cores of each kind of hardware, for policies that do not look at the nodes.

    Where they do not suffice, all shadows go first. Then replicas go one at a time, each from the group with the most
    of them, down to one of each group; if that does not suffice, the replicas of the kind get fewer cores, in
    proportion. If one of them would get less than a thousandth of a core, the kind has none.
    """
    used = cores_by_hardware(plan)
    short = {kind for kind, limit in limits.items() if used.get(kind, 0.0) > limit * (1 + ROUNDING)}
    if not short:
        return plan
    plan = _without_shadows(plan, short)
    groups = [group for target in plan.stages for group in target.groups]
    counts = [group.count for group in groups]
    sizes = [millicores(group.spec.cores) / MILLI for group in groups]
    factors: dict[str, float] = {}
    for hardware, limit in limits.items():
        own = [index for index, group in enumerate(groups) if group.count and group.spec.slot.hardware == hardware]
        excess = sum(counts[index] * sizes[index] for index in own) - limit * (1 + ROUNDING)
        while excess > 0 and (most := max(own, key=lambda index: counts[index])) is not None and counts[most] > 1:
            counts[most] -= 1
            excess -= sizes[most]
        if excess > 0:
            factors[hardware] = limit / sum(sizes[index] for index in own)
            if not all(_whole(sizes[index] * factors[hardware]) for index in own):
                for index in own:
                    counts[index] = 0

    def trim(group: Group, count: int, size: float) -> Group:
        spec = group.spec
        factor = factors.get(spec.slot.hardware)
        if count == group.count and factor is None:
            return group
        rate_rps = group.rate_rps * count / group.count if group.count else 0.0
        spec = spec if factor is None or not count else spec.with_cores(_whole(size * factor))
        return structs.replace(group, spec=spec, count=count, rate_rps=rate_rps)

    made = iter([trim(group, count, size) for group, count, size in zip(groups, counts, sizes, strict=True)])
    stages = tuple(structs.replace(target, groups=tuple(islice(made, len(target.groups)))) for target in plan.stages)
    return plan if stages == plan.stages else structs.replace(plan, stages=stages, feasible=False)


def packed(plan: Plan, view: ClusterView) -> Plan:
    """The plan, or one replica of each stage on shared cores, where the nodes cannot hold one replica of each stage.

    A request needs all stages, so a plan of which only some find room serves nobody. Where the cores of a kind of
    hardware do not hold one replica of each stage that computes on them, each stage has one there, which reserves an
    equal part of a node and may use what the others leave idle (`Slot.is_capped`). Accelerators are not shared so, and
    replicas whose nodes the policy chooses stay there. If all stages have replicas already, on cores that are not
    shared, the plan is kept as it is: what does not fit is then a shortage, as elsewhere.
    """
    if len(view.stages) < 2 or (all(stage.replicas for stage in view.stages) and not _has_shared_cores(view)):
        return plan
    kinds = {group.spec.slot.hardware for target in plan.stages for group in target.groups}
    for hardware in sorted(kinds):
        plan = _with_room_for_all(_packed_on(plan, hardware, view), hardware, view)
    return plan


def _has_shared_cores(view: ClusterView) -> bool:
    """Whether the plan in force has replicas that only reserve their cores; of a system without one, whether it found
    such replicas."""
    if view.plan is None:
        slots = [replica.spec.slot for stage in view.stages for replica in stage.replicas]
    else:
        slots = [group.spec.slot for target in view.plan.stages for group in target.groups]
    return any(not slot.is_capped and not slot.accelerator for slot in slots)


def _packed_on(plan: Plan, hardware: str, view: ClusterView) -> Plan:
    least = {target.stage: spec for target in plan.stages if (spec := _least_spec(target, hardware)) is not None}
    node_cores = [each.node.cores for each in view.nodes if _is_of(each, hardware)]
    if len(least) < 2 or not any(node_cores) or not _without_room(least.values(), hardware, view):
        return plan
    part = _whole(_equal_part(len(least), node_cores))
    if not part:
        return plan
    stages = [
        structs.replace(target, groups=(_sharing(target, part),)) if target.stage in least else target
        for target in plan.stages
    ]
    if _without_room([target.groups[0].spec for target in stages if target.stage in least], hardware, view):
        return plan
    cores = math.fsum(spec.cores for spec in least.values())
    why = (
        f"one replica of each of {len(least)} stages needs {counted(cores, 'core')}, and "
        f"{counted(math.fsum(node_cores), 'core')} are there, so each reserves at most {part:g} and shares the rest"
    )
    return structs.replace(plan, stages=tuple(stages), why=f"{plan.why}; {why}")


def _with_room_for_all(plan: Plan, hardware: str, view: ClusterView) -> Plan:
    """The plan with fewer replicas, if those of the first stages would take the room of the last ones: as many fewer as
    find no room, one after another from the group with the most, until all do."""
    groups = [group for target in plan.stages for group in target.groups if group.spec.slot.hardware == hardware]
    if any(group.spec.slot.accelerator or group.spec.node for group in groups):
        return plan
    cores = math.fsum(each.node.cores for each in view.nodes if _is_of(each, hardware))
    made = trimmed(plan, {hardware: cores})
    while True:
        groups = [group for target in made.stages for group in target.groups if group.spec.slot.hardware == hardware]
        missing = _without_room([group.spec for group in groups for _ in range(group.count)], hardware, view)
        if not missing:
            return made
        for _ in range(missing):
            largest = max(groups, key=lambda group: group.count)
            if largest.count < 2:
                return made
            fewer = structs.replace(largest, count=largest.count - 1, rate_rps=0.0)
            groups = [fewer if group is largest else group for group in groups]
            stages = [
                structs.replace(each, groups=tuple(fewer if group is largest else group for group in each.groups))
                for each in made.stages
            ]
            made = structs.replace(made, stages=tuple(stages), feasible=False)


def _without_room(specs: Iterable[ReplicaSpec], hardware: str, view: ClusterView) -> int:
    """How many of these replicas find no room on the empty nodes, if the largest are placed first."""
    beliefs = {stage.name: stage.beliefs for stage in view.stages}
    largest_first = sorted(specs, key=lambda spec: -millicores(spec.cores))
    wanted = [(spec, beliefs[spec.stage][spec.variant, hardware]) for spec in largest_first]
    return len(Ledger.all_ready(each.node for each in view.nodes if _is_of(each, hardware)).without_room(wanted))


def _least_spec(target: StagePlan, hardware: str) -> ReplicaSpec | None:
    """The stage's smallest replica; None if it has none, or one that needs no cores of this kind."""
    specs = [group.spec for group in target.groups if group.count]
    if any(each.slot.hardware != hardware or each.slot.accelerator or each.node for each in specs):
        return None
    return min(specs, key=lambda spec: spec.cores, default=None)


def _equal_part(count: int, node_cores: Sequence[float]) -> float:
    """The largest equal part of which the nodes hold `count`."""
    parts = [cores / number for cores in node_cores for number in range(1, count + 1) if cores]
    return max(part for part in parts if sum(int(cores / part + ROUNDING) for cores in node_cores) >= count)


def _sharing(target: StagePlan, part: float) -> Group:
    """One replica of the stage that reserves at most `part` cores, and may use all that are idle on its node."""
    group = next(group for group in target.groups if group.count)
    slot = structs.replace(group.spec.slot, cores=min(part, group.spec.cores), is_capped=False)
    spec = structs.replace(group.spec, slot=slot, shape=ALONE)
    return structs.replace(group, spec=spec, count=1, rate_rps=0.0)


def _without_shadows(plan: Plan, kinds: Container[str]) -> Plan:
    """The plan without the shadows on these kinds of hardware; the rates of their groups are not known then."""
    groups = [group for target in plan.stages for group in target.groups]
    if not any(group.spec.shadow is not None and group.spec.slot.hardware in kinds for group in groups):
        return plan

    def alone(group: Group) -> Group:
        if group.spec.shadow is None or group.spec.slot.hardware not in kinds:
            return group
        return structs.replace(group, spec=structs.replace(group.spec, shape=ALONE), rate_rps=0.0)

    stages = [structs.replace(target, groups=tuple(map(alone, target.groups))) for target in plan.stages]
    return structs.replace(plan, stages=tuple(stages), feasible=False)


def _with_reason(plan: Plan, cores: Mapping[str, float]) -> Plan:
    limits = ", ".join(
        f"{counted(number, 'core')}{f' of {hardware}' if hardware else ''}" for hardware, number in cores.items()
    )
    return structs.replace(plan, why=f"limited to {limits}, as all together want more than there is: {plan.why}")
