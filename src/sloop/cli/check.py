"""`sloop check`: is this application right, and what would be done with it?"""

from pathlib import Path

import click

from sloop.app.load import load_application
from sloop.cli.command import Answer, command
from sloop.cli.number import Number
from sloop.cli.plan import shown
from sloop.cli.screen import table
from sloop.report.tables import Table
from sloop.systems.planning import need
from sloop.systems.setup import set_up


@command("check", example="sloop check app.yaml && sloop serve app.yaml")
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rate", "rate_rps", type=Number(min=0), default=10.0, show_default=True, help="Requests/s.")
def check(app: Path, rate_rps: float) -> Answer:
    """Validate the application in APP and print its plan, touching nothing. Fails where the plan is not feasible."""
    application = load_application(app)
    planned = need(set_up(application), rate_rps)
    stages = [
        {
            "stage": stage.name,
            "after": list(stage.after),
            "variants": [
                {"name": v.name, "model": v.model, "profile": v.profile and v.profile.origin} for v in stage.variants
            ],
        }
        for stage in application.order
    ]
    rows = [(s.name, ", ".join(v.name for v in s.variants), ", ".join(s.after) or "–") for s in application.order]
    title = f"{application.name}: deadline {application.slo_ms:g} ms, {len(application.cluster)} nodes"
    return Answer(
        {"application": application.name, "slo_ms": application.slo_ms, "stages": stages, "plan": planned},
        [table(Table(title, ("stage", "variants", "after"), tuple(rows))), *shown(planned)],
        exit_code=0 if planned.feasible else 1,
    )
