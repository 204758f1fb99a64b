"""`sloop explain`: why a request ended as it did, or why a decision was taken."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from sloop.cli.command import CommandOutput, Number, command, table
from sloop.report.explain import StoryStep, VisitStory, explain_decision, explain_request, miss_reasons
from sloop.report.html import log_page, write_page
from sloop.report.tables import Table
from sloop.runlog import read_log
from sloop.systems.replay import rebuild
from sloop.units import s

EXAMPLE = """
sloop explain run.jsonl
sloop explain run.jsonl --request 17
sloop explain run.jsonl --at 12.5
sloop explain run.jsonl --page run.html
"""


@command("explain", example=EXAMPLE)
@click.argument("log", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--request", type=int, help="Number of a request: explain how it ended.")
@click.option(
    "--at", "at_s", type=Number(), metavar="SECONDS", help="Explain the decision in force at this time of the run."
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a report of the whole run to this HTML file.",
)
def explain(log: Path, request: int | None, at_s: float | None, page: Path | None) -> CommandOutput:
    """Explain an event log of `sloop serve` or `sloop simulate`.

    With --request: why that request ended as it did, step by step. With --at: why the decision then in force was taken.

    With neither: a table of the requests that were not served in time, one row per reason, with their number and the
    first of them. If every request was served in time, one line says so. Estimates of batches are P99s unless the
    profile was made for another percentile.
    """
    if request is not None and at_s is not None:
        raise click.UsageError("give either --request or --at, not both")
    recorded = read_log(log)
    if page is not None:
        write_page(log_page(recorded), page)
    if request is not None:
        setup = rebuild(recorded.header)
        story = explain_request(recorded, request, setup.application.graph, setup.beliefs)
        parts = [Text(f"request {request}: {story.summary}"), *visits(story.visits), *timeline(story.steps)]
        return CommandOutput(story, parts)
    if at_s is not None:
        setup = rebuild(recorded.header)
        decision = explain_decision(recorded, s(at_s), setup.application.graph, setup.beliefs)
        return CommandOutput(decision, [Text(decision.summary), Text(decision.why), *timeline(decision.steps)])
    found = miss_reasons(recorded)
    rows = tuple((r.count, r.outcome, r.why, r.first_request, r.first_s) for r in found)
    columns = ("requests", "outcome", "why", "first request", "at s")
    return CommandOutput(
        {"reasons": found}, [table(Table("", columns, rows))] if found else ["every request was served in time"]
    )


def visits(found: Sequence[VisitStory]) -> Sequence[RenderableType]:
    """One row per visit, if there are several."""
    if len(found) < 2:
        return []
    columns = ("stage", "part", "from s", "wait ms", "service ms", "transport ms", "lost ms", "on critical path")
    rows = tuple(
        (v.stage, v.part, f"{v.entered_s:.4f}", v.wait_ms, v.service_ms, v.transport_ms, v.lost_ms, v.critical)
        for v in found
    )
    return [table(Table("", columns, rows))]


def timeline(steps: Sequence[StoryStep]) -> Sequence[RenderableType]:
    """One row per step."""
    rows = tuple((f"{step.at_s:.4f}", step.what, step.why) for step in steps)
    return [table(Table("", ("at s", "what", "why"), rows))]
