"""The report of `sloop plan` and `sloop check`: plans at steady rates, and their explanation.

`explain_plan` reads a `ClusterPrediction` (`prediction`): the plans that the applications keep, where these are, how
long requests take and what is missing. It adds the binding constraints of each stage and what one more request per
second of an application needs (`marginal`). The predictions alone decide whether a plan is feasible; if the system's
own criterion disagrees, the report says so. No I/O and no clock: a caller that wants decisions timed passes a clock.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from sloop.app.graph import declared_name
from sloop.app.hardware import foreign_profiles, shared_profiles, unpriced
from sloop.core.ledger import cores_by_hardware
from sloop.errors import InputError
from sloop.options import nearest
from sloop.profile.passes import MachineSpeed, range_advice, speed_range
from sloop.profile.profile import START_S_ASSUMED
from sloop.systems.mix import ONE_ROW_EACH, WorkMix
from sloop.systems.planning.infeasibility import unused_kinds
from sloop.systems.planning.marginal import NOTHING, binding_constraints, marginal_cost, marginal_cost_at
from sloop.systems.planning.prediction import ApplicationPrediction, ClusterPrediction
from sloop.systems.planning.report import (
    ApplicationReport,
    KindReport,
    PathReport,
    PlacementReport,
    PlanReport,
    StageReport,
)
from sloop.systems.planning.timing import Arrivals, PlanPrediction, StagePrediction, VisitTiming
from sloop.systems.setup import ApplicationSetup, Setup, mixes_of
from sloop.text import counted, listed, number
from sloop.units import round_up
from sloop.vocabulary import Node

__all__ = ["ApplicationReport", "Arrivals", "PlanReport", "StageReport", "explain_plan", "explained"]


def rates_for(setup: Setup, rates_rps: float | Mapping[str, float]) -> dict[str, float]:
    """The rate of each application: one for all, or by name, where "" names all others.

    InputError for an unknown name, or for an application without a rate.
    """
    names = [application.application.key for application in setup.applications]
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
    mixes: Mapping[str, WorkMix] = MappingProxyType({}),
    speed: MachineSpeed | None = None,
    clock: Callable[[], int] | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> PlanReport:
    """The plans that the setup's system keeps at steady rates, with their predictions. The setup must be fresh.

    The rates are requests per second of each application, see `rates_for`. `mixes` says by application what requests
    bring, if that is not one row of the only size. `speed` is how many times as fast as the profiles say the machine is
    known to be; the range of the prediction is then that of one measurement. `clock` returns nanoseconds and times the
    decisions. `progress` is told which part is done, 0 to 1.
    """
    rates = rates_for(setup, rates_rps)
    setups = [
        each.bringing(mixes_of(each.application, mixes.get(each.application.name, ONE_ROW_EACH)))
        for each in (setup.applications if speed is None else at_speed(setup.applications, speed.factor))
    ]
    prediction = ClusterPrediction(setups, rates, arrivals, clock=clock)
    return explained(prediction, progress, speed)


def at_speed(setups: Iterable[ApplicationSetup], speed: float) -> list[ApplicationSetup]:
    """The applications on a machine that is `speed` times as fast as their profiles say."""
    return [
        replace(setup, beliefs={key: belief.times(1 / speed) for key, belief in setup.beliefs.items()})
        for setup in setups
    ]


def explained(
    prediction: ClusterPrediction,
    progress: Callable[[float], None] = lambda done: None,
    speed: MachineSpeed | None = None,
) -> PlanReport:
    """The report of a prediction; see `explain_plan`."""
    applications, reports = list(prediction.applications.values()), list[ApplicationReport]()
    for application in applications:
        progress((1 + len(reports) / len(applications)) / 2)
        reports.append(_application_report(application, speed))
    several = len(reports) > 1
    why = [_named(each, report.why) for each, report in zip(applications, reports, strict=True)]
    together = [shortfall.why for shortfall in prediction.shortfalls if not shortfall.application]
    profiles = [belief.profile for each in applications for belief in each.setup.beliefs.values()]
    only, nodes = reports[0], prediction.placement.nodes
    arrivals_planned = {report.plan_arrivals for report in reports}
    return PlanReport(
        system=applications[0].setup.system.name,
        feasible=not prediction.shortfalls,
        stages=tuple(row for each in applications for row in _stage_reports(each)),
        cores=sum(report.cores for report in reports),
        usd_per_h=sum(node.usd_per_h for node in nodes),
        predicted_ms=max(report.predicted_ms for report in reports),
        solve_ms=prediction.steady.solve_ms,
        why="; ".join([*why, *together]),
        notes=(
            *(note for each in applications for note in _notes(each)),
            *_mixed_notes(prediction),
            *(() if speed is not None else range_advice(profiles)),
        ),
        rate_rps=sum(prediction.rates_rps.values()),
        paths=tuple(path for each in applications for path in _paths(each)),
        shortfalls=tuple(prediction.shortfalls),
        one_more=None if several else only.one_more,
        plan_why="; ".join(_named(each, each.plan.why) for each in applications),
        plan_feasible=all(report.plan_feasible for report in reports),
        plan_arrivals=arrivals_planned.pop() if len(arrivals_planned) == 1 else None,
        arrivals=prediction.arrivals,
        feasible_arrivals=tuple(
            name for name in ("burst", "even") if all(name in report.feasible_arrivals for report in reports)
        ),
        predicted_ms_low=None if several else only.predicted_ms_low,
        predicted_ms_high=None if several else only.predicted_ms_high,
        unpriced=unpriced(nodes),
        applications=tuple(reports),
        placements=tuple(row for each in applications for row in _placements(each)),
        nodes=tuple(_by_kind(nodes)),
    )


def _named(application: ApplicationPrediction, text: str) -> str:
    """The text with the application's name before it, if there are several."""
    return f"{application.key}: {text}" if len(application.whole.setups) > 1 and text else text


def _application_report(application: ApplicationPrediction, speed: MachineSpeed | None) -> ApplicationReport:
    """An application as a whole."""
    setup, plan, timing, then = application.setup, application.plan, application.timing, application.with_one_more
    low_ms, high_ms = _predicted_range_ms(application, speed)
    shortfalls = application.shortfalls
    why = [plan.why, _own_criterion(application), *(shortfall.why for shortfall in shortfalls)]
    return ApplicationReport(
        application=application.key,
        rate_rps=application.rate_rps,
        slo_ms=setup.application.slo_ms,
        feasible=not shortfalls,
        cores=sum(cores_by_hardware(plan).values()),
        predicted_ms=timing.predicted_ms,
        why="; ".join(filter(None, why)),
        weight=setup.application.weight,
        limits=tuple(application.limits),
        one_more=marginal_cost(plan, shortfalls, then.plan, then.shortfalls),
        plan_why=plan.why,
        plan_feasible=plan.feasible,
        plan_arrivals=setup.system.policies.scale.arrivals,
        feasible_arrivals=tuple(name for name in ("burst", "even") if application.is_feasible(name)),
        predicted_ms_low=low_ms,
        predicted_ms_high=high_ms,
    )


def _stage_reports(application: ApplicationPrediction) -> list[StageReport]:
    """One row per group of replicas of each stage."""
    now, then = application, application.with_one_more
    rows: list[StageReport] = []
    for stage in application.timing.stages.values():
        more = marginal_cost_at(stage.name, now.plan, now.shortfalls, then.plan, then.shortfalls)
        rows += _rows(application, stage, more)
    return rows


def _rows(application: ApplicationPrediction, stage: StagePrediction, more: str) -> list[StageReport]:
    """One row per group that the plan has of a stage; `more` is what one more request per second needs."""
    placement, needs_more = application.whole.placement, not more.startswith(NOTHING)
    binds = binding_constraints(application.timing, stage, placement, needs_more=needs_more)
    rows = []
    for group in stage.target.groups if stage.target else ():
        slot, without = group.spec.slot, stage.slowest.total_ms
        visit = stage.slowest.timings.get(group, VisitTiming(1, 0.0, without))
        rows.append(
            StageReport(
                stage.name,
                group.spec.variant,
                group.count,
                stage.batch_max(group),
                slot.cores,
                visit.total_ms,
                rate_rps=stage.rate_rps,
                parts=stage.parts,
                service_ms=visit.service_ms,
                wait_ms=visit.wait_ms,
                batch_expected=visit.batch,
                rate_max_rps=stage.rate_max_rps,
                binds=binds,
                one_more=more,
                application=application.key,
                hardware=slot.hardware,
                accelerator=slot.accelerator,
                share=slot.share if slot.accelerator else 0.0,
                group_rps=stage.group_rps(group),
                is_capped=slot.is_capped,
                rows=stage.mix.rows,
            )
        )
    return rows


def _paths(application: ApplicationPrediction) -> list[PathReport]:
    """The path with the least slack comes first."""
    return [
        PathReport(path.path.stages, path.path.share, path.slo_ms, path.predicted_ms, path.slack_ms, application.key)
        for path in application.timing.paths
    ]


def _placements(application: ApplicationPrediction) -> list[PlacementReport]:
    """Where the replicas are, in the order of the plan."""
    hardware = {node.name: node.hardware for node in application.whole.cluster}
    rows = []
    for placed in application.room.placed:
        spec, stage = placed.group.spec, application.timing.stages[placed.group.spec.stage]
        rows.append(
            PlacementReport(
                application.key,
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


def _notes(application: ApplicationPrediction) -> list[str]:
    """What limits how far the report can be trusted, and what may surprise in it."""
    declared, is_feasible = application.setup.application, not application.shortfalls
    of_plan = [
        _own_criterion(application),
        _other_arrivals(application),
        application.whole.steady.cut_short.get(application.key, ""),
        _resting(application),
        *(limit.why for limit in application.limits if is_feasible),
    ]
    notes = [
        *(_named(application, note) for note in of_plan),
        *declared.overruled,
        *_mix_notes(application),
        *_assumed_profiles(application),
        *foreign_profiles(declared),
        *shared_profiles(declared),
        *_extrapolated(application),
    ]
    if is_feasible:
        notes += [shortfall.why for shortfall in unused_kinds(application.timing, declared.cluster)]
    return list(filter(None, notes))


def _predicted_range_ms(
    application: ApplicationPrediction, speed: MachineSpeed | None
) -> tuple[float | None, float | None]:
    """The prediction for the same plan on a faster and on a slower machine; None without profiles of several passes,
    unless the speed is known."""
    beliefs, timing = application.setup.beliefs, application.timing
    known = speed.range if speed is not None else None
    ranges = {key: known or speed_range(belief.profile) for key, belief in beliefs.items()}
    if not any(ranges.values()):
        return None, None
    ends_ms = []
    for end in ("fast", "slow"):
        at_end = {key: belief.times(getattr(ranges[key], end, 1.0)) for key, belief in beliefs.items()}
        setup = replace(application.setup, beliefs=at_end).bringing(application.setup.mixes)
        ends_ms.append(PlanPrediction(setup, timing.plan, timing.rate_rps, timing.arrivals).predicted_ms)
    return min(ends_ms[0], timing.predicted_ms), max(ends_ms[1], timing.predicted_ms)


IN_WORDS: Final[Mapping[Arrivals, str]] = {
    "even": "evenly spaced requests",
    "burst": "bursts, all requests of a second at once",
}


def _own_criterion(application: ApplicationPrediction) -> str:
    """A note if the system's own criterion and the prediction disagree: their assumptions and results."""
    setup, plan, feasible = application.setup, application.plan, not application.shortfalls
    system, arrivals = setup.system.name, setup.system.policies.scale.arrivals
    if plan.feasible == feasible or (plan.feasible and arrivals is None):
        return ""
    plans_for = f"{system} plans for {IN_WORDS[arrivals]}" if arrivals else f"{system} plans by a criterion of its own"
    here = f"for {IN_WORDS[application.whole.arrivals]}, which this answer assumes"
    if feasible:
        return (
            f"{plans_for}{_within(setup)}, and finds no plan for that; {here}, the plan it runs instead is good enough"
        )
    return f"{plans_for}, and finds its plan good enough for that; {here}, it is not"


def _within(setup: ApplicationSetup) -> str:
    """The share of the deadline that the scaling policy plans with, its attribute `margin`; empty if that is all."""
    margin = setup.system.policies.scale.margin
    slo_ms = setup.application.slo_ms
    return f", within {number(margin * slo_ms)} ms ({margin:g} × {number(slo_ms)} ms)" if margin < 1 else ""


def _other_arrivals(application: ApplicationPrediction) -> str:
    """What becomes of the plan under the other assumption about arrivals, where that makes a difference."""
    setup, prediction, other = application.setup, application.timing, application.otherwise.timing
    if not all(map(math.isfinite, (prediction.predicted_ms, other.predicted_ms))):
        return ""
    if math.isclose(prediction.predicted_ms, other.predicted_ms):
        return ""
    at_once = counted(round_up(prediction.rate_rps), "request") + " of a second"
    condition = f"if all {at_once} arrived at once" if other.arrivals == "burst" else "if requests were evenly spaced"
    if setup.system.policies.scale.arrivals == other.arrivals:
        condition += f", for which {setup.system.name} plans"
    is_feasible = application.is_feasible(other.arrivals)
    verdict = f"the plan would {'' if is_feasible else 'not '}be feasible"
    longest = f"the longest path would take {number(other.predicted_ms)} ms"
    if len(other.paths) == 1:
        whole = " itself" if is_feasible and _within(setup) else ""
        longest += f", and the deadline{whole} is {number(other.paths[0].slo_ms)} ms"
    return f"{condition}, {verdict}: {longest} (`--arrivals {other.arrivals}`)"


def _resting(application: ApplicationPrediction) -> str:
    """What the first request waits for if the application rests; else empty."""
    setup = application.setup
    if application.rate_rps or not setup.application.rest_after_s or cores_by_hardware(application.plan):
        return ""
    starts_s = [belief.profile.load_s for belief in setup.beliefs.values()]
    start_s = max(load_s or START_S_ASSUMED for load_s in starts_s)
    about = f"about {number(start_s)} s"
    if start_s not in starts_s:
        about += " (assumed: the profile has no load_s)"
    note = f"it rests without replicas; the first request waits until one has started, {about}"
    wake_s = setup.application.wake_s
    return f"{note}; at most for {number(wake_s)} s (`wake_s`)" if 0 < wake_s < start_s else note


def _mix_notes(application: ApplicationPrediction) -> Iterator[str]:
    """In which unit it plans if requests bring several rows, or rows of several sizes, and what that leaves out."""
    for stage in application.timing.stages.values():
        mix, name = stage.mix, declared_name(stage.name)
        if mix.rows != 1.0:
            yield (
                f"{name}: a request brings {number(mix.rows)} rows on average, so rates, batches and what the replicas "
                f"serve are in rows: {number(stage.rate_rps)} rows/s"
            )
        if mix.sizes:
            yield from _size_notes(application, stage)


def _size_notes(application: ApplicationPrediction, stage: StagePrediction) -> Iterator[str]:
    """What its plan takes a row of each size to cost."""
    name, sizes, slo_ms = declared_name(stage.name), [*stage.mix.sizes], application.setup.application.slo_ms
    mean = f"rows of size {sizes[0]}" if len(sizes) == 1 else f"the mean of rows of size {sizes[0]} to {sizes[-1]}"
    for group in stage.groups:
        belief, slot = stage.belief(group), group.spec.slot
        profile, variant = belief.profile, group.spec.variant
        at = f"{name}: {variant}" if len(stage.groups) > 1 else name
        if not profile.sizes:
            yield f"{at} is planned as if all rows were typical: its profile does not say what other sizes take"
            continue
        least_ms, mean_ms, most_ms = (
            each.latency_ms(1, slot) for each in (belief.at(sizes[0]), belief, belief.at(sizes[-1]))
        )
        spread = f", of size {sizes[0]} {number(least_ms)} and of size {sizes[-1]} {number(most_ms)}"
        yield f"{at} is planned for {mean}: one row takes {number(mean_ms)} ms{spread if len(sizes) > 1 else ''}"
        if most_ms > slo_ms:
            yield f"{at}: rows of size {sizes[-1]} take longer than the deadline and will not be served in time"
        if not profile.knows_sizes:
            yield f"{at}: its profile knows only size {profile.sizes[0].size}; others are taken to cost in proportion"
        elif profile.is_extrapolated(1, profile.max_cores, sizes[-1]):
            known = profile.sizes[-1].size
            yield f"{at}: size {sizes[-1]} is beyond the profile's largest, {known}, so its cost is extrapolated"


def _assumed_profiles(application: ApplicationPrediction) -> list[str]:
    """The plan's variants whose profile nobody measured."""
    notes: dict[str, None] = {}
    for spec in (group.spec for target in application.plan.stages for group in target.groups):
        profile = application.setup.beliefs[spec.stage, spec.variant, spec.slot.hardware].profile
        if profile.origin == "assumed":
            source = profile.source or "no source is given"
            notes[f"{spec.stage}/{spec.variant}: its profile is assumed, not measured ({source})"] = None
    return list(notes)


def _extrapolated(application: ApplicationPrediction) -> list[str]:
    """Stages whose prediction goes beyond what their profile was measured for."""
    return [
        f"{stage.name}/{group.spec.variant}: its profile was not measured for batches of {timing.batch} on "
        f"{counted(group.spec.cores, 'core')}; the prediction extrapolates"
        for stage in application.timing.stages.values()
        for group, timing in stage.slowest.timings.items()
        if stage.belief(group).is_extrapolated(timing.batch, group.spec.slot)
    ]


# Kinds of hardware


def _by_kind(nodes: Sequence[Node]) -> list[KindReport]:
    """The nodes by kind of hardware, in the order of declaration."""
    kinds = []
    for kind in dict.fromkeys(node.hardware for node in nodes):
        of_kind = [node for node in nodes if node.hardware == kind]
        rented = sum(node.on_demand for node in of_kind)
        usd_per_h = sum(node.usd_per_h for node in of_kind)
        kinds.append(KindReport(kind, len(of_kind), len(of_kind) - rented, rented, usd_per_h))
    return kinds


def _mixed_notes(prediction: ClusterPrediction) -> list[str]:
    """What the systems do on a cluster of several kinds of hardware."""
    if len({node.hardware for node in prediction.cluster}) < 2:
        return []
    systems = {setup.system.name: setup.system for setup in prediction.setups}
    return [f"on this mixed cluster, {name} {system.mixed}" for name, system in systems.items() if system.mixed]
