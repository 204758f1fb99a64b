"""`sloop check`: validates an application file and shows its plan."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from sloop.app.application import Stage
from sloop.app.load import load_application
from sloop.cli.command import CommandOutput, Number, command, table
from sloop.cli.plan import RATE_MAX, arrivals_option, plan_display
from sloop.report.tables import Table
from sloop.systems.planning import Arrivals, explain_plan
from sloop.systems.setup import set_up
from sloop.text import counted

COLUMNS: Final = ("stage", "variants", "after", "condition")
EXAMPLE = """
sloop check app.yaml && sloop serve app.yaml
sloop check app.yaml --rate 200 --json
"""


@command("check", example=EXAMPLE)
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--rate",
    "rate_rps",
    type=Number(min=0, max=RATE_MAX),
    default=10.0,
    show_default=True,
    help="Requests per second to plan for.",
)
@arrivals_option
def check(app: Path, rate_rps: float, arrivals: Arrivals) -> CommandOutput:
    """Validate the application in APP and show its plan. Nothing is started or written.

    Exit code 1 if the file has a mistake or the plan is not feasible.
    """
    application = load_application(app)
    plan = explain_plan(set_up(application, must_fit=False), rate_rps, arrivals, clock=time.perf_counter_ns)
    stages = [
        {
            "stage": stage.name,
            "after": list(stage.after),
            "when": [asdict(when) for when in stage.when],
            "each": asdict(stage.each) if stage.each else None,
            "join": stage.join,
            "entry": stage.entry,
            "variants": [
                {"name": v.name, "model": v.model, "profile": v.profile and v.profile.origin} for v in stage.variants
            ],
        }
        for stage in application.order
    ]
    rows = [
        (s.name, ", ".join(v.name for v in s.variants), ", ".join(s.after) or "–", condition(s))
        for s in application.order
    ]
    width = 4 if any(row[3] for row in rows) else 3
    nodes = counted(len(application.cluster), "node")
    title = f"{application.name}: deadline {application.slo_ms:g} ms, {nodes}"
    graph = table(Table(title, COLUMNS[:width], tuple(row[:width] for row in rows)))
    return CommandOutput(
        {"application": application.name, "slo_ms": application.slo_ms, "stages": stages, "plan": plan},
        [graph, *plan_display(plan)],
        exit_code=0 if plan.feasible else 1,
    )


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
