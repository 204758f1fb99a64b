"""Plans at steady rates, and their explanation: the report of `sloop plan` and `sloop check`.

`steady_plans` runs the core's planner until all applications keep their plans. `explain_plan` places these plans
(`placement`), predicts their latencies (`prediction`), names the binding constraints of each stage and what one more
request per second of an application needs (`marginal`), and, if they are infeasible, says which application, stage,
path or kind of hardware lacks how much (`infeasibility`). The predictions alone decide whether a plan is feasible; if
the system's own criterion disagrees, the report says so. No I/O and no clock: a caller that wants decisions timed
passes a clock.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sloop.app.hardware import foreign_profiles, shared_profiles, unpriced
from sloop.core.planner import cores_by_hardware
from sloop.core.views import CoreDemand
from sloop.errors import InputError
from sloop.options import nearest
from sloop.profile.estimate import Estimate
from sloop.profile.passes import range_advice, speed_range
from sloop.profile.profile import START_S_ASSUMED
from sloop.systems.planning.infeasibility import beyond_cluster, shortfalls_of, unused_kinds
from sloop.systems.planning.marginal import NOTHING, binding_constraints, marginal_cost, marginal_cost_at
from sloop.systems.planning.placement import Placement, PlanShortfall
from sloop.systems.planning.prediction import Arrivals, PlanPrediction, StagePrediction, VisitTiming
from sloop.systems.planning.report import (
    ApplicationReport,
    CoreLimit,
    KindReport,
    PathReport,
    PlacementReport,
    PlanReport,
    StageReport,
)
from sloop.systems.planning.steady import SteadyPlans, steady_plans
from sloop.systems.setup import ApplicationSetup, Setup
from sloop.text import counted, listed, number
from sloop.units import at_least, round_up
from sloop.vocabulary import Node, Plan

__all__ = ["ApplicationReport", "Arrivals", "PlanReport", "StageReport", "explain_plan", "steady_plans"]


NAMED_MAX: Final = 3
"""Applications that a limit names; the others are counted."""
TOGETHER_MAX: Final = 16
"""Of more applications than this, one more request of each is planned for while the others keep their plans: all plans
again for each application would take minutes."""


def rates_for(setup: Setup, rates_rps: float | Mapping[str, float]) -> dict[str, float]:
    """The rate of each application: one for all, or by name, where "" names all others.

    InputError for an unknown name, or for an application without a rate.
    """
    names = [each.application.key for each in setup.applications]
    if not isinstance(rates_rps, Mapping):
        return dict.fromkeys(names, rates_rps)
    for name in rates_rps:
        if name and name not in names:
            raise InputError(f"no application is called {name!r}", where="--rate", help=nearest(name, names))
    missing = [name for name in names if name not in rates_rps and "" not in rates_rps]
    if missing:
        what = f"no rate is given for {listed(missing)}"
        raise InputError(what, where="--rate", help=f"add --rate {missing[0]}=R, or --rate R for all others")
    return {name: rates_rps.get(name, rates_rps.get("", 0.0)) for name in names}


def explain_plan(
    setup: Setup,
    rates_rps: float | Mapping[str, float],
    arrivals: Arrivals = "even",
    *,
    clock: Callable[[], int] | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> PlanReport:
    """The plans that the setup's system keeps at steady rates, with their predictions.

    The rates are requests per second of each application, see `rates_for`. `clock` returns nanoseconds and times the
    decisions. `progress` is told which part is done, 0 to 1.
    """
    rates = rates_for(setup, rates_rps)
    steady = steady_plans(setup.applications, rates, clock=clock)
    placed = _Placed(setup.applications, rates, arrivals, steady)
    explained: list[_Explained] = []
    for each_setup in setup.applications:
        progress((1 + len(explained) / len(setup.applications)) / 2)
        explained.append(_Explained(placed, each_setup))
    reports = [each.report for each in explained]
    shortfalls = [*placed.shortfalls, *(found for each in explained for found in each.shortfalls)]
    several = len(explained) > 1
    profiles = [belief.profile for application in setup.applications for belief in application.beliefs.values()]
    only, nodes = reports[0], placed.placement.nodes
    arrivals_planned = {each.plan_arrivals for each in reports}
    return PlanReport(
        system=setup.applications[0].system.name,
        feasible=not shortfalls,
        stages=tuple(row for each in explained for row in each.rows),
        cores=sum(each.cores for each in reports),
        usd_per_h=sum(node.usd_per_h for node in nodes),
        predicted_ms=max(each.predicted_ms for each in reports),
        solve_ms=steady.solve_ms,
        why="; ".join(
            [each.named(report.why) for each, report in zip(explained, reports, strict=True)]
            + [each.why for each in placed.shortfalls]
        ),
        notes=(*(note for each in explained for note in each.notes), *_mixed_notes(setup), *range_advice(profiles)),
        rate_rps=sum(rates.values()),
        paths=tuple(path for each in explained for path in each.paths),
        shortfalls=tuple(shortfalls),
        one_more=None if several else only.one_more,
        plan_why="; ".join(each.named(each.plan.why) for each in explained),
        plan_feasible=all(each.plan_feasible for each in reports),
        plan_arrivals=arrivals_planned.pop() if len(arrivals_planned) == 1 else None,
        arrivals=arrivals,
        feasible_arrivals=tuple(
            name for name in ("burst", "even") if all(name in each.feasible_arrivals for each in reports)
        ),
        predicted_ms_low=None if several else only.predicted_ms_low,
        predicted_ms_high=None if several else only.predicted_ms_high,
        unpriced=unpriced(nodes),
        applications=tuple(reports),
        placements=tuple(row for each in explained for row in each.placements),
        nodes=tuple(_by_kind(nodes)),
    )


class _Placed:
    """The plans of all applications with their predictions and room."""

    def __init__(
        self,
        setups: Sequence[ApplicationSetup],
        rates_rps: Mapping[str, float],
        arrivals: Arrivals,
        steady: SteadyPlans,
    ) -> None:
        self.setups = {each.application.key: each for each in setups}
        self.rates_rps = rates_rps
        self.arrivals = arrivals
        self.steady = steady
        self.placement = Placement(setups, steady.plans, setups[0].application.cluster)
        self.predictions = {
            key: PlanPrediction(setup, steady.plans[key], rates_rps[key], arrivals)
            for key, setup in self.setups.items()
        }
        self._demands = [
            CoreDemand(key, hardware, cores, setup.application.weight)
            for key, setup in self.setups.items()
            for hardware, cores in cores_by_hardware(steady.plans[key]).items()
        ]
        self.limits = {key: self.limits_in(steady, key) for key in self.setups}
        self.own_shortfalls = {key: self._shortfalls_of(key) for key in self.setups}

    @property
    def shortfalls(self) -> list[PlanShortfall]:
        """What all applications together lack, if each alone could have it."""
        own = [found for each in self.own_shortfalls.values() for found in each]
        if len(self.setups) == 1 or not own:
            return []
        return list(beyond_cluster(list(self.predictions.values()), self.cluster))

    @property
    def cluster(self) -> Sequence[Node]:
        """The nodes."""
        return next(iter(self.setups.values())).application.cluster

    def _shortfalls_of(self, key: str) -> list[PlanShortfall]:
        """What one application lacks."""
        found = shortfalls_of(self.setups[key], self.predictions[key], self.placement.rooms[key])
        return [*found, *_limited(key, self.limits[key])] if found else []

    def limits_in(self, steady: SteadyPlans, key: str, more_rps: float = 0.0) -> list[CoreLimit]:
        """Where the other applications leave one fewer cores than it wants, in its plan for `more_rps` more."""
        own = {hardware: cores for (name, hardware), cores in steady.limits.items() if name == key}
        if not own:
            return []
        alone = steady_plans([self.setups[key]], {key: self.rates_rps[key] + more_rps}).plans[key]
        wants = cores_by_hardware(alone)
        needs = {hardware: min(wants.get(hardware, 0.0), self._total(hardware)) for hardware in own}
        return [self._limit(key, kind, needs[kind], has) for kind, has in own.items() if not at_least(has, needs[kind])]

    def _limit(self, key: str, hardware: str, needs: float, has: float) -> CoreLimit:
        others = [(each.key, each.cores) for each in self.others(key) if each.hardware == hardware and each.cores]
        others.sort(key=lambda each: -each[1])
        several = len({node.hardware for node in self.cluster}) > 1
        named = [f"{name} has {number(cores)}" for name, cores in others[:NAMED_MAX]]
        if len(others) > NAMED_MAX:
            rest = sum(cores for _, cores in others[NAMED_MAX:])
            named.append(f"{counted(len(others) - NAMED_MAX, 'other')} {number(rest)}")
        why = (
            f"the other applications leave it {number(has)} of the {number(needs)} {'core' if needs == 1 else 'cores'}"
            f"{f' of {hardware}' if several else ''} that it would have alone: {listed(named)}"
        )
        return CoreLimit(hardware, needs, has, tuple(others), why)

    def others(self, key: str) -> list[CoreDemand]:
        """The cores of all applications but one."""
        return [each for each in self._demands if each.key != key]

    def kept_from(self, key: str) -> list[CoreDemand]:
        """The cores that one application cannot have: those of the others and, where it is limited, all that the divide
        policy gives to others."""
        limits = {limit.hardware: limit.has for limit in self.limits[key]}
        found = [each for each in self.others(key) if each.hardware not in limits]
        for hardware, cores in limits.items():
            found.append(CoreDemand("", hardware, self._total(hardware) - cores))
        return found

    def _total(self, hardware: str) -> float:
        """The cores of the cluster on a kind of hardware; "" is any kind."""
        return sum(node.cores for node in self.cluster if hardware in ("", node.hardware))


def _limited(key: str, limits: Sequence[CoreLimit]) -> list[PlanShortfall]:
    """The limits as reasons why the plan of an application is not feasible."""
    return [
        PlanShortfall(
            "cores",
            each.why,
            needs=each.needs,
            has=each.has,
            unit="cores",
            application=key,
            hardware=each.hardware,
        )
        for each in limits
    ]


class _Explained:
    """One application: its part of the report."""

    def __init__(self, placed: _Placed, setup: ApplicationSetup) -> None:
        self.key = key = setup.application.key
        self.setup = setup
        self.plan = placed.steady.plans[key]
        self.prediction = prediction = placed.predictions[key]
        self.shortfalls = placed.own_shortfalls[key]
        self.limits = placed.limits[key]
        self._placed = placed
        self._several = len(placed.setups) > 1
        self._room = room = placed.placement.rooms[key]
        self._other = PlanPrediction(
            setup, self.plan, prediction.rate_rps, "burst" if prediction.arrivals == "even" else "even"
        )
        self.feasible = {
            prediction.arrivals: not self.shortfalls,
            self._other.arrivals: not shortfalls_of(setup, self._other, room),
        }
        self._own_criterion = _own_criterion(setup, prediction, feasible=not self.shortfalls)
        self.then, self.then_shortfalls = self._one_more()

    def _one_more(self) -> tuple[Plan, list[PlanShortfall]]:
        """The plan for one more request per second, and what it lacks. The other applications keep their plans; if all
        together want more cores than there are, the cores are divided anew."""
        placed, key, rate_rps = self._placed, self.key, self.prediction.rate_rps + 1
        if placed.steady.limits and len(placed.setups) <= TOGETHER_MAX:
            setups, rates = list(placed.setups.values()), {**placed.rates_rps, key: rate_rps}
            together = _Placed(setups, rates, placed.arrivals, steady_plans(setups, rates))
            return together.steady.plans[key], together.own_shortfalls[key]
        then = steady_plans([self.setup], {key: rate_rps}, others=placed.kept_from(key))
        prediction = PlanPrediction(self.setup, then.plans[key], rate_rps, placed.arrivals)
        found = shortfalls_of(self.setup, prediction, placed.placement.room_for(key, then.plans[key]))
        if found:
            found += _limited(key, placed.limits_in(then, key, 1.0))
        return then.plans[key], found

    def named(self, text: str) -> str:
        """The text with the application's name before it, if there are several."""
        return f"{self.key}: {text}" if self._several and text else text

    @property
    def report(self) -> ApplicationReport:
        """The application as a whole."""
        application, prediction = self.setup.application, self.prediction
        low_ms, high_ms = _predicted_range_ms(self.setup, prediction)
        return ApplicationReport(
            application=self.key,
            rate_rps=prediction.rate_rps,
            slo_ms=application.slo_ms,
            feasible=not self.shortfalls,
            cores=sum(cores_by_hardware(self.plan).values()),
            predicted_ms=prediction.predicted_ms,
            why="; ".join(filter(None, [self.plan.why, self._own_criterion, *(each.why for each in self.shortfalls)])),
            weight=application.weight,
            limits=tuple(self.limits),
            one_more=marginal_cost(self.plan, self.shortfalls, self.then, self.then_shortfalls),
            plan_why=self.plan.why,
            plan_feasible=self.plan.feasible,
            plan_arrivals=planned_arrivals(self.setup),
            feasible_arrivals=tuple(name for name, is_feasible in sorted(self.feasible.items()) if is_feasible),
            predicted_ms_low=low_ms,
            predicted_ms_high=high_ms,
        )

    @property
    def rows(self) -> list[StageReport]:
        """One row per group of replicas of each stage."""
        rows: list[StageReport] = []
        for stage in self.prediction.stages.values():
            more = marginal_cost_at(stage.name, self.plan, self.shortfalls, self.then, self.then_shortfalls)
            rows += self._rows(stage, more)
        return rows

    def _rows(self, stage: StagePrediction, more: str) -> list[StageReport]:
        """One row per group that the plan has of a stage; `more` is what one more request per second needs."""
        placement = self._placed.placement
        binds = binding_constraints(self.prediction, stage, placement, needs_more=not more.startswith(NOTHING))
        rows = []
        for group in stage.target.groups if stage.target else ():
            slot, without = group.spec.slot, stage.slowest.total_ms
            found = stage.slowest.timings.get(group, VisitTiming(1, 0.0, without))
            rows.append(
                StageReport(
                    stage.name,
                    group.spec.variant,
                    group.count,
                    stage.batch_max(group),
                    slot.cores,
                    found.total_ms,
                    rate_rps=stage.rate_rps,
                    parts=stage.parts,
                    service_ms=found.service_ms,
                    wait_ms=found.wait_ms,
                    batch_expected=found.batch,
                    rate_max_rps=stage.rate_max_rps,
                    binds=binds,
                    one_more=more,
                    application=self.key,
                    hardware=slot.hardware,
                    accelerator=slot.accelerator,
                    share=slot.share if slot.accelerator else 0.0,
                    group_rps=stage.group_rps(group),
                    is_capped=slot.is_capped,
                )
            )
        return rows

    @property
    def paths(self) -> list[PathReport]:
        """The path with the least slack comes first."""
        return [
            PathReport(path.path.stages, path.path.share, path.slo_ms, path.predicted_ms, path.slack_ms, self.key)
            for path in self.prediction.paths
        ]

    @property
    def placements(self) -> list[PlacementReport]:
        """Where the replicas are, in the order of the plan."""
        hardware = {node.name: node.hardware for node in self.setup.application.cluster}
        rows = []
        for placed in self._room.placed:
            spec, stage = placed.group.spec, self.prediction.stages[placed.group.spec.stage]
            rows.append(
                PlacementReport(
                    self.key,
                    spec.stage,
                    spec.variant,
                    placed.node,
                    hardware[placed.node],
                    placed.device,
                    spec.slot.share if spec.slot.accelerator else 0.0,
                    placed.count,
                    spec.cores,
                    stage.batch_max(placed.group),
                    stage.group_rps(placed.group) * placed.count / placed.group.count,
                    spec.slot.is_capped,
                )
            )
        return rows

    @property
    def notes(self) -> list[str]:
        """What limits how far the report can be trusted, and what may surprise in it."""
        setup, application = self.setup, self.setup.application
        own = [
            self._own_criterion,
            _other_arrivals(setup, self.prediction, self._other, self.feasible),
            self._placed.steady.cut_short.get(self.key, ""),
            *_resting(setup, self.plan, self.prediction.rate_rps),
            *(each.why for each in self.limits if not self.shortfalls),
        ]
        found = [
            *map(self.named, own),
            *application.overruled,
            *_assumed_profiles(setup, self.plan),
            *foreign_profiles(application),
            *shared_profiles(application),
            *_extrapolated(setup, self.prediction),
        ]
        if not self.shortfalls:
            found += [each.why for each in unused_kinds(self.prediction, application.cluster)]
        return list(filter(None, found))


def _predicted_range_ms(setup: ApplicationSetup, prediction: PlanPrediction) -> tuple[float | None, float | None]:
    """The prediction for the same plan on a faster and on a slower machine; None without profiles of several passes."""
    ranges = {key: speed_range(belief.profile) for key, belief in setup.beliefs.items()}
    if not any(ranges.values()):
        return None, None
    found_ms = []
    for end in ("fast", "slow"):
        beliefs = {
            key: Estimate(
                belief.profile,
                variant=belief.variant,
                hardware=belief.hardware,
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


def planned_arrivals(setup: ApplicationSetup) -> Arrivals | None:
    """The arrivals that the scaling policy plans for: its attribute `arrivals`, which a policy need not have."""
    found: Arrivals | None = getattr(setup.system.policies.scale, "arrivals", None)
    return found


IN_WORDS: Final[Mapping[Arrivals, str]] = {
    "even": "evenly spaced requests",
    "burst": "bursts, all requests of a second at once",
}


def _own_criterion(setup: ApplicationSetup, prediction: PlanPrediction, *, feasible: bool) -> str:
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


def _within(setup: ApplicationSetup) -> str:
    """The share of the deadline that the scaling policy plans with, its attribute `margin`; empty if that is all."""
    margin: float = getattr(setup.system.policies.scale, "margin", 1.0)
    slo_ms = setup.application.slo_ms
    return f", within {number(margin * slo_ms)} ms ({margin:g} × {number(slo_ms)} ms)" if margin < 1 else ""


def _other_arrivals(
    setup: ApplicationSetup, prediction: PlanPrediction, other: PlanPrediction, feasible: Mapping[Arrivals, bool]
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


def _resting(setup: ApplicationSetup, plan: Plan, rate_rps: float) -> list[str]:
    """What the first request waits for if the application rests."""
    if rate_rps or not setup.application.rest_after_s or cores_by_hardware(plan):
        return []
    starts_s = [belief.profile.load_s for belief in setup.beliefs.values()]
    start_s = max(load_s or START_S_ASSUMED for load_s in starts_s)
    about = f"about {number(start_s)} s"
    if start_s not in starts_s:
        about += " (assumed: the profile has no load_s)"
    note = f"it rests without replicas; the first request waits until one has started, {about}"
    wake_s = setup.application.wake_s
    return [note if start_s <= wake_s else f"{note}; at most for {number(wake_s)} s (`wake_s`)" if wake_s else note]


def _assumed_profiles(setup: ApplicationSetup, plan: Plan) -> list[str]:
    """The plan's variants whose profile nobody measured."""
    found: dict[str, None] = {}
    for spec in (group.spec for target in plan.stages for group in target.groups):
        profile = setup.beliefs[spec.stage, spec.variant, spec.slot.hardware].profile
        if profile.origin == "assumed":
            source = profile.source or "no source is given"
            found[f"{spec.stage}/{spec.variant}: its profile is assumed, not measured ({source})"] = None
    return list(found)


def _extrapolated(setup: ApplicationSetup, prediction: PlanPrediction) -> list[str]:
    """Stages whose prediction goes beyond what their profile was measured for."""
    return [
        f"{stage.name}/{group.spec.variant}: its profile was not measured for batches of {found.batch} on "
        f"{counted(group.spec.cores, 'core')}; the prediction extrapolates"
        for stage in prediction.stages.values()
        for group, found in stage.slowest.timings.items()
        if stage.belief(group).is_extrapolated(found.batch, group.spec.slot)
    ]


# Kinds of hardware


def _by_kind(nodes: Sequence[Node]) -> list[KindReport]:
    """The nodes by kind of hardware, in the order of declaration."""
    found = []
    for kind in dict.fromkeys(node.hardware for node in nodes):
        own = [node for node in nodes if node.hardware == kind]
        rented = sum(node.on_demand for node in own)
        usd_per_h = sum(node.usd_per_h for node in own)
        found.append(KindReport(kind, len(own), len(own) - rented, rented, usd_per_h))
    return found


def _mixed_notes(setup: Setup) -> list[str]:
    """What the systems do on a cluster of several kinds of hardware."""
    if len({node.hardware for node in setup.deployment.cluster}) < 2:
        return []
    systems = {each.system.name: each.system for each in setup.applications}
    return [f"on this mixed cluster, {name} {system.mixed}" for name, system in systems.items() if system.mixed]
