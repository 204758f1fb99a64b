"""`sloop plan`: what an application needs at a rate."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import RenderableType

from sloop.app.application import SystemChoice
from sloop.app.load import load_application
from sloop.cli.command import Answer, command
from sloop.cli.number import Number
from sloop.cli.screen import table
from sloop.report.tables import Table
from sloop.report.tables import shown as figure
from sloop.systems.planning import Need, need
from sloop.systems.setup import set_up


@command("plan", example="sloop plan app.yaml --rate 50\nsloop plan app.yaml --rate 50 --system static --json")
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rate", "rate_rps", type=Number(min=0, max=1e7), required=True, help="Requests per second, steady.")
@click.option("--system", "name", metavar="NAME", help="Ask this system rather than the one APP names.")
def plan(app: Path, rate_rps: float, name: str | None) -> Answer:
    """Say what the application in APP needs at a steady rate, what it costs, and what it is believed to give."""
    application = load_application(app)
    choice = SystemChoice(name) if name and name != application.system.name else None
    answer = need(set_up(application, choice), rate_rps)
    return Answer(answer, shown(answer))


def shown(answer: Need) -> Sequence[RenderableType]:
    """A plan as people read it."""
    columns = ("stage", "variant", "replicas", "batch", "cores each", "predicted ms")
    rows = tuple((s.stage, s.variant, s.replicas, s.batch, s.cores, s.predicted_ms) for s in answer.stages)
    cores = f"{figure(answer.cores)} core{'' if answer.cores == 1 else 's'}"
    total = f"{cores}, {figure(answer.usd_per_h)} USD/h, predicted {figure(answer.predicted_ms)} ms"
    verdict = "feasible" if answer.feasible else "not feasible"
    said = "\n".join([total, answer.why, *(f"note: {line}" for line in answer.notes)])
    return [table(Table(f"{answer.system}: {verdict}", columns, rows)), said]
