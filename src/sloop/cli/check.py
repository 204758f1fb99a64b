"""`sloop check`: validates application and deployment files, tries their models, and shows their plan."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import RenderableType

from sloop.app.application import Application, Deployment, Stage, Variant
from sloop.app.limits import Limits
from sloop.app.load import is_model_application
from sloop.cli.command import (
    CommandOutput,
    Rate,
    check_systems,
    check_temporary,
    code_notes,
    command,
    loaded,
    progress,
    rates_by_name,
    slo_option,
    table,
    tensors_line,
    with_deadlines,
)
from sloop.cli.plan import CODE_NOTE, RATE_HELP, RATE_MAX, apps_argument, arrivals_option, plan_display
from sloop.errors import InputError, MachineError
from sloop.profile.examine import ExaminedModel, examine, joining_text
from sloop.profile.model import model_label
from sloop.report.tables import Table
from sloop.serve.copies import declared_of, private_copy
from sloop.serve.dataflow import check_wiring
from sloop.systems.planning import Arrivals, PlanReport, explain_plan
from sloop.systems.setup import set_up, with_lone_requests
from sloop.tensor import Signature
from sloop.text import counted, listed, number
from sloop.vocabulary import Node

if TYPE_CHECKING:
    from sloop.sim.world_checks import WorldsReport

COLUMNS: Final = ("stage", "variants", "after", "condition")
RATE_RPS: Final = 10.0
EXAMPLE = """
sloop check app.yaml && sloop serve app.yaml
sloop check app.yaml --rate 200 --json
sloop check digits.yaml ocr.yaml --rate digits=50 --rate 5
sloop check mine.yaml --worlds 200
"""
WORLDS_MAX: Final = 1_000_000
LINE_MAX: Final = 400
"""Characters of a line about a world, such as a plan that differs; `--json` has all."""


@command("check", example=EXAMPLE, notes=CODE_NOTE)
@apps_argument
@click.option(
    "--rate",
    "rates",
    type=Rate(max=RATE_MAX),
    multiple=True,
    help=f"{RATE_HELP} [default: {RATE_RPS:g}]",
)
@arrivals_option
@slo_option
@click.option(
    "--worlds",
    type=click.IntRange(0, WORLDS_MAX),
    default=0,
    help="Also simulate the applications in so many random worlds, with faults of all kinds, to find mistakes of a "
    "policy of your own.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first of these worlds.")
def check(
    apps: tuple[Path | str, ...],
    rates: tuple[tuple[str, float], ...],
    arrivals: Arrivals,
    slo_ms: float | None,
    worlds: int,
    seed: int,
) -> CommandOutput:
    """Validate the applications in APP..., run each of their models on a few rows, and show their plan, if each model
    has a profile. No server is started, nothing is measured, and no file is kept.

    Exit code 1 if a file has a mistake, a model would fail for every request, the plan is not feasible, or a world
    shows a mistake.
    """
    check_temporary()
    deployment, notes = with_deadlines(loaded(apps, slo_ms), slo_ms)
    given = rates_by_name(rates)
    models = examined_models(deployment.applications)
    wired = {each.name: check_wiring(each, _signatures(each, models)) for each in deployment.applications}
    plan = None
    if deployment.without_profile:
        check_systems(deployment)
    else:
        plan = _planned(deployment, models, {"": RATE_RPS} | given, arrivals)
    described = [_described(each, models) for each in deployment.applications]
    value: dict[str, Any] = {"name": deployment.name, "applications": described, "plan": plan}
    value["limits"] = asdict(deployment.limits)
    if len(described) == 1:
        value |= {key: described[0][key] for key in ("application", "slo_ms", "stages")}
    derived = slo_ms is None and plan is None
    parts: list[RenderableType] = [
        _graph(each, is_derived=derived and is_model_application(each)) for each in deployment.applications
    ]
    if len(described) > 1 and (limits := _limits(deployment.limits)):
        parts.append(f"{deployment.name}: {limits} in all")
    by_default = [] if "" in given else [name for each in deployment.applications if (name := each.name) not in given]
    if by_default and plan is not None:
        of = f" of {listed(by_default)}" if given else " of each application" if len(by_default) > 1 else ""
        parts.append(f"planned for {RATE_RPS:g} requests/s{of}, the default of `sloop check` (--rate sets another)")
    for each in deployment.applications:
        parts += _tensors(each, wired[each.name])
    parts += [*(plan_display(plan) if plan is not None else ()), *notes, *code_notes(deployment)]
    parts += dict.fromkeys(note for model in models.values() for note in model.notes)
    for (application, stage, variant), tried in models.items():
        if tried.known is not None and not tried.fault:
            of = f"{application}/{stage}/{variant}"
            parts.append(f"{of}: {joining_text(tried.known.obstacle, tried.known.evidence)}")
    faults = tuple(dict.fromkeys(model.fault for model in models.values() if model.fault))
    if plan is None and not faults:
        parts.append(_without_plan(deployment, apps))
    is_right = not faults and (plan is None or plan.feasible)
    if worlds:
        value["worlds"] = report = _in_worlds(deployment, given, range(seed, seed + worlds))
        parts += _worlds(report, _again(apps, rates, slo_ms))
        is_right = is_right and report is not None and not report.failures
    return CommandOutput(value, parts, exit_code=0 if is_right else 1, errors=faults)


def _planned(
    deployment: Deployment,
    models: Mapping[tuple[str, str, str], "TriedModel"],
    rates: Mapping[str, float],
    arrivals: Arrivals,
) -> PlanReport:
    def runs_alone(application: Application, stage: Stage, variant: Variant) -> bool:
        tried = models.get((application.name, stage.name, variant.name))
        return tried is not None and tried.known is not None and bool(tried.known.obstacle)

    setup = with_lone_requests(set_up(deployment, must_fit=False), runs_alone, must_fit=False)
    with progress("planning", total=1.0) as advance:
        return explain_plan(setup, rates, arrivals, clock=time.perf_counter_ns, progress=advance)


def _without_plan(deployment: Deployment, apps: Sequence[Path | str]) -> str:
    """Why there is no plan, and the command that comes next."""
    missing = deployment.without_profile
    has, them = ("have no profiles", "them") if len(missing) > 1 else ("has no profile", "it")
    serves = f"`sloop serve {' '.join(quote(str(app)) for app in apps)}`"
    measures = f"`sloop profile {quote(os.path.relpath(missing[0]))}`" + (" and the others" if len(missing) > 1 else "")
    return (
        f"no plan yet: {listed(list(map(model_label, missing)))} {has}\n"
        f"next: {serves}, which measures {them} briefly first; or {measures}, and then this command again for the plan"
    )


def _in_worlds(deployment: Deployment, given: Mapping[str, float], seeds: range) -> "WorldsReport | None":
    """The applications in the worlds of these seeds, at about the rates of --rate; None if a model has no profile."""
    from sloop.sim.world_checks import check_in_worlds  # noqa: PLC0415  # the simulator, for --worlds alone

    if deployment.without_profile:
        return None
    rates = {each.name: given.get(each.name, given.get("", RATE_RPS)) for each in deployment.applications}
    with progress("playing worlds", total=float(len(seeds))) as advance:
        return check_in_worlds(deployment, rates, seeds, played=advance)


def _again(apps: Sequence[Path | str], rates: Sequence[tuple[str, float]], slo_ms: float | None) -> str:
    """The command line without worlds."""
    options = [f"--rate {f'{name}=' if name else ''}{rate:.12g}" for name, rate in rates]
    options += [] if slo_ms is None else [f"--slo-ms {slo_ms:.12g}"]
    return " ".join(["sloop check", *(quote(str(app)) for app in apps), *options])


def _worlds(report: "WorldsReport | None", again: str) -> list[RenderableType]:
    """What the worlds have shown; `again` is the command line without worlds."""
    if report is None:
        return ["no world was played: they take the latencies of the profiles"]
    ends = ("served", "late", "dropped", "rejected", "failed", "unanswered")
    refused = f", {report.refused} of which the system refuses" if report.refused else ""
    title = f"{counted(report.worlds, 'random world')}{refused}: {counted(report.requests, 'request')}"
    parts: list[RenderableType] = [table(Table(title, ends, (tuple(f"{getattr(report, end):,}" for end in ends),)))]
    for each in report.failures:
        parts.append(f"{counted(each.worlds, 'world')} failed, the first that of seed {each.seed}: {each.what}")
        parts += [line if len(line) <= LINE_MAX else f"{line[:LINE_MAX]} …" for line in each.detail.splitlines()]
        parts.append(f"play it again: {again} --worlds 1 --seed {each.seed}")
    if not report.failures:
        parts.append("no world has shown a mistake of a policy")
    return parts


@dataclass(frozen=True, slots=True)
class TriedModel:
    """The result of examining a model."""

    known: ExaminedModel | None
    """None if it could not be examined."""
    fault: str = ""
    """Why it cannot be served."""
    notes: tuple[str, ...] = ()


def examined_models(applications: Sequence[Application]) -> dict[tuple[str, str, str], TriedModel]:
    """The models of all variants that have one, examined as `sloop serve` does, by application, stage and variant."""
    wanted = [
        (application, stage.name, variant)
        for application in applications
        for stage in application.stages
        for variant in stage.variants
        if variant.model is not None
    ]
    found: dict[tuple[str, str, str], TriedModel] = {}
    with progress("trying models", total=float(len(wanted))) as advance:
        for place, (application, stage, variant) in enumerate(wanted, 1):
            profiles = application.profiles_of(variant).values()
            shapes = next((profile.shapes for profile in profiles if profile.shapes), None)
            found[application.name, stage, variant.name] = _tried(variant, shapes)
            advance(place, variant.name)
    return found


def _signatures(
    application: Application, models: Mapping[tuple[str, str, str], TriedModel]
) -> dict[tuple[str, str], Signature]:
    """Those of the application's models that could be examined, by stage and variant."""
    return {
        (stage, variant): tried.known.signature
        for (name, stage, variant), tried in models.items()
        if name == application.name and tried.known is not None
    }


def _tried(variant: Variant, shapes: Mapping[str, tuple[int, ...]] | None) -> TriedModel:
    known: ExaminedModel | None = None
    model = Path(variant.model or "")
    try:
        with private_copy(model) as copy:
            known = examine(copy.path, shapes, folder=copy.folder, declared=declared_of(variant, copy))
            if known.fault is not None:
                raise known.fault.error
    except InputError as error:
        return TriedModel(known, str(error), known.notes if known is not None else ())
    except MachineError as error:
        return TriedModel(None, notes=(f"{model_label(model)} was not tried: {error}",))
    return TriedModel(known, notes=known.notes)


def _described(application: Application, models: Mapping[tuple[str, str, str], TriedModel]) -> Mapping[str, Any]:
    """An application as a value for `--json`."""
    return {
        "application": application.name,
        "slo_ms": application.slo_ms,
        "weight": application.weight,
        "rest_after_s": application.rest_after_s,
        "wake_s": application.wake_s,
        "limits": asdict(application.limits),
        "stages": [
            {
                "stage": stage.name,
                "after": list(stage.after),
                "when": [asdict(when) for when in stage.when],
                "each": asdict(stage.each) if stage.each else None,
                "join": stage.join,
                "entry": stage.entry,
                "variants": [
                    {
                        "name": v.name,
                        "model": v.model,
                        "profile": v.profile and v.profile.origin,
                        "profiles": {kind: found.origin for kind, found in application.profiles_of(v).items()},
                        **_tried_values(models.get((application.name, stage.name, v.name))),
                    }
                    for v in stage.variants
                ],
            }
            for stage in application.order
        ],
    }


def _tried_values(tried: TriedModel | None) -> Mapping[str, Any]:
    """What `--json` says of a model that was examined."""
    joining = None
    if tried is not None and (known := tried.known) is not None and not tried.fault:
        joining = {"joined": not known.obstacle, "why": known.obstacle or known.evidence}
    return {"fault": tried.fault if tried is not None else "", "joins_rows": joining}


def _graph(application: Application, *, is_derived: bool = False) -> RenderableType:
    """The stages of an application, under a title that says what holds for all of it. `is_derived`: its deadline
    follows from its speed."""
    rows = [
        (s.name, ", ".join(v.name for v in s.variants), ", ".join(s.after) or "–", condition(s))
        for s in application.order
    ]
    width = 4 if any(row[3] for row in rows) else 3
    deadline = "a deadline by its speed" if is_derived else f"deadline {application.slo_ms:g} ms"
    title = f"{application.name}: {deadline}, {_nodes(application.cluster)}"
    if application.weight != 1:
        title += f", weight {application.weight:g}"
    if application.rest_after_s:
        title += f", rests after {number(application.rest_after_s)} s without requests"
    if limits := _limits(application.limits):
        title += f", {limits}"
    return table(Table(title, COLUMNS[:width], tuple(row[:width] for row in rows)))


def _tensors(application: Application, signature: Signature | None) -> list[str]:
    """What a request has and what its answer; which stages get the request, if they are several: one of them may lack
    its `after`; and whether it may have several rows."""
    lines = [] if signature is None else [tensors_line(application.name, signature)]
    first = [stage.name for stage in application.order if not stage.after]
    if application.one_row_why:
        lines.append(f"{application.name}: a request has one row: {application.one_row_why}")
    return lines + ([f"{len(first)} stages get the client's request: {', '.join(first)}"] if len(first) > 1 else [])


def _nodes(cluster: Sequence[Node]) -> str:
    """`5 nodes`, `5 nodes, up to 4 more on demand`, or `up to 4 nodes on demand`."""
    held = sum(not node.on_demand for node in cluster)
    rented = len(cluster) - held
    if not held:
        return f"up to {counted(rented, 'node')} on demand"
    return counted(held, "node") + (f", up to {rented} more on demand" if rented else "")


def _limits(limits: Limits) -> str:
    """`at most 100 open requests, 64 MiB of bodies and 16 rows a request`; empty without limits."""
    parts = [f"{counted(limits.requests, 'open request')}"] if limits.requests else []
    parts += [f"{limits.bytes / 2**20:.3g} MiB of bodies"] if limits.bytes else []
    parts += [f"{counted(limits.rows, 'row')} a request"] if limits.rows else []
    return f"at most {listed(parts)}" if parts else ""


def condition(stage: Stage) -> str:
    """Conditions of a stage as text, such as `when kind of look is 1 or 2; joins the parts`; empty if every request
    visits it once."""
    parts = []
    for when in stage.when:
        values = f" is {' or '.join(map(str, when.values))}" if when.values else ""
        of = f"{when.output} of {when.of}{values}" if when.output else f"some requests after {when.of}"
        share = f" ({when.share:.4g} of requests)" if when.share is not None else ""
        parts.append(f"{'when' if when.output else 'for'} {of}{share}")
    if stage.each is not None:
        each = stage.each
        parts.append(f"for each {each.output or 'part'} of {each.of}: {each.mean:g} on average, {each.most} at most")
    parts += ["joins the parts"] if stage.join else []
    parts += ["requests may enter here"] if stage.entry else []
    return "; ".join(parts)
