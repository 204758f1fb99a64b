"""`sloop plan`: what an application needs at a rate."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType

from sloop.app.application import SystemChoice
from sloop.app.load import load_application
from sloop.cli.command import Answer, command
from sloop.cli.number import Number
from sloop.cli.screen import table
from sloop.report.tables import Cell, Table
from sloop.report.tables import shown as figure
from sloop.systems.planning import Need, need
from sloop.systems.setup import set_up

PATHS_SHOWN: Final = 12


@command("plan", example="sloop plan app.yaml --rate 50\nsloop plan app.yaml --rate 50 --system static --json")
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rate", "rate_rps", type=Number(min=0, max=1e7), required=True, help="Requests per second, steady.")
@click.option("--system", "name", metavar="NAME", help="Ask this system rather than the one APP names.")
def plan(app: Path, rate_rps: float, name: str | None) -> Answer:
    """Say what the application in APP needs at a steady rate, what it costs, and what it is believed to give."""
    application = load_application(app)
    choice = SystemChoice(name) if name and name != application.system.name else None
    answer = need(set_up(application, choice, must_fit=False), rate_rps)
    return Answer(answer, shown(answer))


def shown(answer: Need) -> Sequence[RenderableType]:
    """A plan as people read it: what each stage gets, why not less, how long each path takes, and what is lacking."""
    cores = f"{figure(answer.cores)} core{'' if answer.cores == 1 else 's'}"
    total = f"{cores}, {figure(answer.usd_per_h)} USD/h, predicted {figure(answer.predicted_ms)} ms"
    verdict = "feasible" if answer.feasible else "not feasible"
    said = [total, answer.plan_why, *(f"lacking: {lack.why}" for lack in answer.lacks if lack.kind != "plan")]
    said += [f"one more request per second: {answer.one_more.says}"] if answer.one_more else []
    said += [f"note: {line}" for line in answer.notes]
    made: list[RenderableType] = [table(_stages(f"{answer.system}: {verdict}", answer)), table(_reasons(answer))]
    if len(answer.stages) > 1:
        made.append(table(_paths(answer)))
    return [*made, "\n".join(said)]


def _stages(title: str, answer: Need) -> Table:
    columns = ("stage", "variant", "replicas", "batch", "cores", "requests/s", "service ms", "wait ms", "predicted ms")
    rows = tuple(
        (s.stage, s.variant, s.replicas, s.batch, s.cores, s.rate_rps, s.service_ms, s.wait_ms, s.predicted_ms)
        for s in answer.stages
    )
    return Table(title, columns, rows)


def _reasons(answer: Need) -> Table:
    """One line for each constraint that binds a stage."""
    rows: list[tuple[Cell, ...]] = []
    for stage in {row.stage: row for row in answer.stages}.values():
        binds: list[tuple[str, str]] = [(bound.kind, bound.why) for bound in stage.binds] or [("nothing", "")]
        for place, (kind, why) in enumerate(binds):
            rows.append((stage.stage, kind, why, stage.one_more) if not place else ("", kind, why, ""))
    return Table("What binds", ("stage", "binds", "because", "one more request/s needs"), tuple(rows))


def _paths(answer: Need) -> Table:
    rows = tuple(
        (" → ".join(p.stages), 100 * p.share, p.predicted_ms, p.slo_ms, p.slack_ms) for p in answer.paths[:PATHS_SHOWN]
    )
    title = "Paths, the tightest first"
    if len(answer.paths) > PATHS_SHOWN:
        title += f" ({len(answer.paths) - PATHS_SHOWN} more with --json)"
    return Table(title, ("path", "requests %", "predicted ms", "deadline ms", "slack ms"), rows)
