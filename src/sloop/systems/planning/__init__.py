"""What a system would have of a cluster at a steady rate, and why: the answer of `plan` and `check`.

Promises to ask the very policies that would run (`steady`), to believe of their plan what their model says (`predict`),
to say what binds each stage (`binding`), what one more request per second would need (`more`), and of a goal that
cannot be met which stage or path lacks how much (`lacking`, `placed`). Nothing is started, read or written.
"""

from sloop.app.foreign import foreign_profiles
from sloop.systems.planning.answer import Lack, Need, PathNeed, StageNeed
from sloop.systems.planning.binding import bounds_of
from sloop.systems.planning.lacking import lacks_of
from sloop.systems.planning.more import one_more, stage_says
from sloop.systems.planning.placed import Placed, cores_of, placed
from sloop.systems.planning.predict import Outlook, StageOutlook
from sloop.systems.planning.steady import steady_plan
from sloop.systems.setup import Setup
from sloop.units import to_ms
from sloop.vocabulary import Plan

__all__ = ["Need", "StageNeed", "need", "steady_plan"]


def need(setup: Setup, rate_rps: float) -> Need:
    """What the setup's system wants at `rate_rps` requests per second, believed to hold for ever."""
    application, steady = setup.application, steady_plan(setup, rate_rps)
    plan = steady.plan
    outlook, room = Outlook(setup, plan, rate_rps), placed(plan, setup)
    lacks = [*lacks_of(setup, outlook), *room.lacks]
    then, then_lacks = _then(setup, rate_rps + 1)
    stages = tuple(
        row for stage in outlook.stages.values() for row in _rows(outlook, stage, room, plan, then, then_lacks)
    )
    return Need(
        system=setup.system.name,
        feasible=not lacks,
        stages=stages,
        cores=cores_of(plan),
        usd_per_h=sum(node.usd_per_h for node in application.cluster if node.name in room.used),
        predicted_ms=outlook.predicted_ms,
        solve_ms=steady.solve_ms,
        why="; ".join(dict.fromkeys([plan.why, *(lack.why for lack in lacks)])),
        notes=tuple(filter(None, (steady.cut_short, *foreign_profiles(application), *_extrapolated(setup, outlook)))),
        rate_rps=rate_rps,
        paths=tuple(
            PathNeed(way.path.stages, way.path.share, to_ms(way.path.slo_ns), way.predicted_ms, way.slack_ms)
            for way in outlook.ways
        ),
        lacks=tuple(lacks),
        one_more=one_more(plan, then, then_lacks),
        plan_why=plan.why,
    )


def _then(setup: Setup, rate_rps: float) -> tuple[Plan, list[Lack]]:
    """The plan at another rate, and what it lacks."""
    plan = steady_plan(setup, rate_rps).plan
    return plan, [*lacks_of(setup, Outlook(setup, plan, rate_rps)), *placed(plan, setup).lacks]


def _rows(
    outlook: Outlook, stage: StageOutlook, room: Placed, now: Plan, then: Plan, then_lacks: list[Lack]
) -> list[StageNeed]:
    """One row per kind of replica that the plan has of a stage."""
    binds = bounds_of(outlook, stage, room)
    says = stage_says(stage.name, now, then, then_lacks)
    rows = []
    for group in stage.target.groups if stage.target else ():
        found = stage.predictions.get(group.spec)
        rows.append(
            StageNeed(
                stage.name,
                group.spec.variant,
                group.count,
                stage.largest(group.spec.variant),
                group.spec.cores,
                found.ms if found else stage.predicted_ms,
                rate_rps=stage.rate_rps,
                parts=stage.parts,
                service_ms=found.service_ms if found else 0.0,
                wait_ms=found.wait_ms if found else stage.predicted_ms,
                batch_expected=found.batch if found else 1,
                rate_max_rps=stage.rate_max_rps,
                binds=binds,
                one_more=says,
            )
        )
    return rows


def _extrapolated(setup: Setup, outlook: Outlook) -> list[str]:
    """Stages whose prediction goes beyond what their profile was measured for."""
    return [
        f"{stage.name}/{spec.variant}: no profile covers batches of {found.batch} on {spec.cores:g} cores; what is "
        "predicted goes beyond what was measured"
        for stage in outlook.stages.values()
        for spec, found in stage.predictions.items()
        if setup.beliefs[stage.name, spec.variant].is_extrapolated(found.batch, spec.cores)
    ]
