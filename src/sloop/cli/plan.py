"""`sloop plan`: the replicas, cores and costs that a system needs for a request rate, and why."""

import time
from collections.abc import Sequence
from math import isfinite
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
from sloop.text import counted, listed, number

PATHS_MAX: Final = 12
"""The most paths in the printed table; `--json` has all."""
EXAMPLE = """
sloop plan app.yaml --rate 50
sloop plan app.yaml --rate 50 --system fa2 --arrivals burst --json
"""
NOTES = """Nothing is started: the system's policies compute the plan that they would keep at this rate, and the
profiles predict its latency. The exit code is 0 even if the plan is not feasible; `sloop check` then returns 1."""
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
@click.option("--system", "name", metavar="NAME", help="Plan with this system instead of the one that APP names.")
@arrivals_option
def plan(app: Path, rate_rps: float, name: str | None, arrivals: Arrivals) -> CommandOutput:
    """Show what the application in APP needs at a steady request rate, what it costs and how it performs."""
    application = load_application(app)
    choice = SystemChoice(name) if name and name != application.system.name else None
    report = explain_plan(set_up(application, choice, must_fit=False), rate_rps, arrivals, clock=time.perf_counter_ns)
    return CommandOutput(report, plan_display(report))


def plan_display(report: PlanReport) -> Sequence[RenderableType]:
    """The stages, binding constraints, paths, reasons and shortfalls of a plan."""
    spaced = "evenly spaced" if report.arrivals == "even" else "all of a second at once"
    verdict = "feasible" if report.feasible else "not feasible"
    title = f"{report.system}: {verdict} at {number(report.rate_rps)} requests/s, {spaced}"
    parts: list[RenderableType] = [table(_stages(title, report)), table(_constraints(report))]
    if len(report.stages) > 1:
        parts.append(table(_paths(report)))
    price = f" on nodes that cost {number(report.usd_per_h)} USD/h" if report.usd_per_h else ""
    lines = [f"in all: {counted(report.cores, 'core')}{price}; {_predicted(report)}"]
    if report.unpriced:
        lines.append(f"cost: no price is declared for {listed(report.unpriced)}")
    if report.plan_why:
        lines.append(f"why {report.system} chooses it: {report.plan_why}")
    lines += [f"note: {line}" for line in report.notes]
    lines += [f"not feasible: {shortfall.why}" for shortfall in report.shortfalls]
    if report.one_more:
        lines.append(f"one more request per second needs: {report.one_more.summary}")
    return [*parts, "\n".join(lines)]


def _predicted(report: PlanReport) -> str:
    """The predicted latency of the longest path, and its range if the profiles have several passes."""
    low_ms, high_ms = report.predicted_ms_low, report.predicted_ms_high
    if not isfinite(report.predicted_ms):
        return "the plan cannot keep up, so latencies grow without bound"
    text = f"predicted P99 of {'the longest path' if len(report.paths) > 1 else 'a request'}: "
    text += f"{number(report.predicted_ms)} ms"
    if low_ms is None or high_ms is None:
        return text
    if not isfinite(high_ms):
        return f"{text}, but it cannot keep up on a machine as slow as some passes of the profiles suggest"
    return f"{text}; on a real machine likely between {number(low_ms)} and {number(high_ms)} ms"


def _stages(title: str, report: PlanReport) -> Table:
    columns = ("stage", "variant", "replicas", "cores", "largest batch", "expected batch", "requests/s")
    rows = tuple(
        (
            *(s.stage, s.variant, s.replicas, s.cores, s.batch, s.batch_expected, s.rate_rps),
            *(s.service_ms, s.wait_ms, s.predicted_ms),
        )
        for s in report.stages
    )
    return Table(title, (*columns, "service ms", "wait ms", "predicted ms"), rows)


def _constraints(report: PlanReport) -> Table:
    """One row per constraint that binds a stage."""
    rows: list[tuple[Cell, ...]] = []
    for stage in {row.stage: row for row in report.stages}.values():
        binds: list[tuple[str, str]] = [(bound.kind, bound.why) for bound in stage.binds] or [
            ("–", "it has no replicas")
        ]
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
