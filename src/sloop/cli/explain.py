"""`sloop explain`: why."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import RenderableType
from rich.text import Text

from sloop.cli.command import Answer, command
from sloop.cli.number import Number
from sloop.cli.screen import table
from sloop.report.explain import Step, explain_decision, explain_request, reasons
from sloop.report.html import write_page
from sloop.report.recorded import report
from sloop.report.tables import Table
from sloop.runlog import read_log
from sloop.systems.recording import rebuild
from sloop.units import s

EXAMPLE = """
sloop explain run.jsonl
sloop explain run.jsonl --request 17
sloop explain run.jsonl --at 12.5
sloop explain run.jsonl --page run.html
"""


@command("explain", example=EXAMPLE)
@click.argument("log", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--request", type=int, help="Explain this request's end.")
@click.option("--at", "at_s", type=Number(), metavar="SECONDS", help="Explain the decision in force at this instant.")
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), help="Write the whole run as one HTML file.")
def explain(log: Path, request: int | None, at_s: float | None, page: Path | None) -> Answer:
    """Say why a request ended as it did or why a decision was taken; with neither, why requests were missed."""
    if request is not None and at_s is not None:
        raise click.UsageError("--request and --at are two questions; ask one")
    recorded = read_log(log)
    if page is not None:
        write_page(report(recorded).page, page)
    if request is not None:
        story = explain_request(recorded, request, rebuild(recorded.header).beliefs)
        return Answer(story, [Text(f"request {request}: {story.summary}"), *shown(story.steps)])
    if at_s is not None:
        decision = explain_decision(recorded, s(at_s), rebuild(recorded.header).beliefs)
        return Answer(decision, [Text(decision.summary), Text(decision.why), *shown(decision.steps)])
    found = reasons(recorded)
    rows = tuple((r.count, r.outcome, r.why, r.first_request, r.first_s) for r in found)
    columns = ("requests", "end", "why", "first", "at s")
    return Answer(
        {"reasons": found}, [table(Table("", columns, rows))] if found else ["every request was served in time"]
    )


def shown(steps: Sequence[Step]) -> Sequence[RenderableType]:
    """What happened, line by line."""
    rows = tuple((f"{step.at_s:.4f}", step.what, step.why) for step in steps)
    return [table(Table("", ("s", "what", "why"), rows))]
