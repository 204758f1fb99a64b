"""`sloop check`: is this application right, and what would be done with it?"""

from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from sloop.app.application import Stage
from sloop.app.graph import Each, When
from sloop.app.load import load_application
from sloop.cli.command import Answer, command
from sloop.cli.number import Number
from sloop.cli.plan import shown
from sloop.cli.screen import table
from sloop.report.tables import Table
from sloop.solvers.targets import amount
from sloop.systems.planning import need
from sloop.systems.setup import set_up

COLUMNS: Final = ("stage", "variants", "after", "how")


@command("check", example="sloop check app.yaml && sloop serve app.yaml")
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rate", "rate_rps", type=Number(min=0), default=10.0, show_default=True, help="Requests/s.")
def check(app: Path, rate_rps: float) -> Answer:
    """Validate the application in APP and print its plan, touching nothing. Fails where the plan is not feasible."""
    application = load_application(app)
    planned = need(set_up(application, must_fit=False), rate_rps)
    stages = [
        {
            "stage": stage.name,
            "after": list(stage.after),
            "when": [_written(when) for when in stage.when],
            "each": _written(stage.each) if stage.each else None,
            "join": stage.join,
            "entry": stage.entry,
            "variants": [
                {"name": v.name, "model": v.model, "profile": v.profile and v.profile.origin} for v in stage.variants
            ],
        }
        for stage in application.order
    ]
    rows = [
        (s.name, ", ".join(v.name for v in s.variants), ", ".join(s.after) or "–", led_to(s)) for s in application.order
    ]
    shown_columns = 4 if any(led_to(s) for s in application.order) else 3
    title = f"{application.name}: deadline {application.slo_ms:g} ms, {amount(len(application.cluster), 'node')}"
    return Answer(
        {"application": application.name, "slo_ms": application.slo_ms, "stages": stages, "plan": planned},
        [table(Table(title, COLUMNS[:shown_columns], tuple(row[:shown_columns] for row in rows))), *shown(planned)],
        exit_code=0 if planned.feasible else 1,
    )


def led_to(stage: Stage) -> str:
    """How requests come to a stage, where that is not simply after the others: `when kind of look is 1 or 2; join`."""
    said = []
    for when in stage.when:
        values = f" is {' or '.join(map(str, when.values))}" if when.values else ""
        about = f"{when.output} of {when.of}{values}" if when.output else f"some after {when.of}"
        said.append(f"when {about}" + (f" ({when.share:.4g} of requests)" if when.share is not None else ""))
    if stage.each is not None:
        each = stage.each
        said.append(f"each {each.output or 'part'} of {each.of}, {each.mean:g} on average, {each.most} at most")
    said += ["join"] if stage.join else []
    said += ["entry"] if stage.entry else []
    return "; ".join(said)


def _written(edge: When | Each) -> dict[str, object]:
    return asdict(edge)
