"""`sloop plan`: the replicas, cores and costs that a system needs for a request rate, and why."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import RenderableType

from sloop.app.application import SystemChoice
from sloop.app.load import load_application
from sloop.cli.command import CommandOutput, Number, command, table
from sloop.report.tables import Cell, Table
from sloop.systems.planning import Arrivals, PlanReport, explain_plan
from sloop.systems.setup import set_up
from sloop.text import counted, number

PATHS_MAX: Final = 12
"""Paths in the table for people; `--json` has all."""
EXAMPLE = """
sloop plan app.yaml --rate 50
sloop plan app.yaml --rate 50 --system fa2 --arrivals burst --json
"""
NOTES = """Nothing is started: the system's own policies are asked for the plan that they keep at this rate, and the
profiles predict what it gives. Exit code 0 whether or not the plan is feasible; `sloop check` fails where it is not."""
RATE_MAX: Final = 1e7
arrivals_option = click.option(
    "--arrivals",
    type=click.Choice(["even", "burst"]),
    default="even",
    show_default=True,
    help="Whether the requests of a second arrive evenly spaced or all at once.",
)


@command("plan", example=EXAMPLE, notes=NOTES)
@click.argument("app", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--rate", "rate_rps", type=Number(min=0, max=RATE_MAX), required=True, help="Requests per second.")
@click.option("--system", "name", metavar="NAME", help="Ask this system instead of the one that APP names.")
@arrivals_option
def plan(app: Path, rate_rps: float, name: str | None, arrivals: Arrivals) -> CommandOutput:
    """Show what the application in APP needs at a steady request rate, what it costs and how it performs."""
    application = load_application(app)
    choice = SystemChoice(name) if name and name != application.system.name else None
    report = explain_plan(set_up(application, choice, must_fit=False), rate_rps, arrivals, clock=time.perf_counter_ns)
    return CommandOutput(report, plan_display(report))


def plan_display(report: PlanReport) -> Sequence[RenderableType]:
    """The stages, what binds them, the paths, the reasons and the shortfalls of a plan."""
    spaced = "evenly spaced" if report.arrivals == "even" else "all of a second at once"
    verdict = "feasible" if report.feasible else "not feasible"
    title = f"{report.system}: {verdict} at {number(report.rate_rps)} requests/s, {spaced}"
    parts: list[RenderableType] = [table(_stages(title, report)), table(_constraints(report))]
    if len(report.stages) > 1:
        parts.append(table(_paths(report)))
    price = f" on nodes that cost {number(report.usd_per_h)} USD/h" if report.usd_per_h else ""
    spread = ""
    if report.predicted_ms_low is not None and report.predicted_ms_high is not None:
        spread = (
            f", {number(report.predicted_ms_low)}–{number(report.predicted_ms_high)} by how far measurements differed"
        )
    lines = [f"in all: {counted(report.cores, 'core')}{price}, predicted {number(report.predicted_ms)} ms{spread}"]
    if report.plan_why:
        lines.append(f"why {report.system} chooses it: {report.plan_why}")
    lines += [f"note: {line}" for line in report.notes]
    lines += [f"not feasible: {shortfall.why}" for shortfall in report.shortfalls]
    if report.one_more:
        lines.append(f"one more request per second needs: {report.one_more.summary}")
    return [*parts, "\n".join(lines)]


def _stages(title: str, report: PlanReport) -> Table:
    columns = ("stage", "variant", "replicas", "batch", "cores", "requests/s", "service ms", "wait ms", "predicted ms")
    rows = tuple(
        (s.stage, s.variant, s.replicas, s.batch, s.cores, s.rate_rps, s.service_ms, s.wait_ms, s.predicted_ms)
        for s in report.stages
    )
    return Table(title, columns, rows)


def _constraints(report: PlanReport) -> Table:
    """One row per constraint that binds a stage."""
    rows: list[tuple[Cell, ...]] = []
    for stage in {row.stage: row for row in report.stages}.values():
        binds: list[tuple[str, str]] = [(bound.kind, bound.why) for bound in stage.binds] or [("nothing", "")]
        rows.append((stage.stage, *binds[0], stage.one_more))
        rows += [("", *bound, "") for bound in binds[1:]]
    return Table("Binding constraints", ("stage", "binds", "because", "one more request/s needs"), tuple(rows))


def _paths(report: PlanReport) -> Table:
    rows = tuple(
        (" → ".join(p.stages), 100 * p.share, p.predicted_ms, p.slo_ms, p.slack_ms) for p in report.paths[:PATHS_MAX]
    )
    title = "Paths, the least slack first"
    if len(report.paths) > PATHS_MAX:
        title += f" ({len(report.paths) - PATHS_MAX} more with --json)"
    return Table(title, ("path", "requests %", "predicted ms", "deadline ms", "slack ms"), rows)
