"""`sloop explain`: why a request ended as it did, or why a decision was taken."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import click
from rich.console import RenderableType
from rich.text import Text

from sloop.cli.command import FILE, CommandOutput, Number, command, table
from sloop.errors import InputError
from sloop.events import Deployed
from sloop.page.report import log_page, write_page
from sloop.report import run_tables
from sloop.report.explain import StoryStep, state_of
from sloop.report.explain.decision import RolloutStep, explain_decision, explain_deployment, rollouts
from sloop.report.explain.misses import MissReason, miss_reasons
from sloop.report.explain.request import VisitStory, explain_request, request_named
from sloop.report.tables import Table
from sloop.runlog import RecordedLog, read_log
from sloop.text import listed, numbered
from sloop.units import s

Row = TypeVar("Row", MissReason, RolloutStep)
EXAMPLE = """
sloop explain run.jsonl
sloop explain run.jsonl --application shop
sloop explain run.jsonl --request 17
sloop explain .sloop/digits --request 0af7651916cd43dd8448eb211c80319c
sloop explain run.jsonl --at 12.5
sloop explain run.jsonl --at 12.5 --application shop
sloop explain run.jsonl --page run.html
"""


@command("explain", example=EXAMPLE)
@click.argument("log", type=click.Path(path_type=Path))
@click.option(
    "--request",
    "name",
    metavar="ID",
    help="Explain how a request ended: its number in the log, or what its client calls it (x-request-id, id, trace).",
)
@click.option(
    "--at", "at_s", type=Number(), metavar="SECONDS", help="Explain the decision in force at this time of the run."
)
@click.option(
    "--application",
    default="",
    metavar="NAME[@VERSION]",
    help="Explain only this application: with --at its decision, else why its requests missed. "
    "[default: the only one, or an overview of all]",
)
@click.option(
    "--page",
    type=FILE,
    help="Also write a report of the whole run to this HTML file.",
)
def explain(log: Path, name: str | None, at_s: float | None, application: str, page: Path | None) -> CommandOutput:
    """Explain an event log of `sloop serve` or `sloop simulate`: a file, a segment, or the state folder of a server.

    With --request: why that request ended as it did, step by step. With --at: why the decision then in force was taken.

    With neither: a table of the requests that were not served in time, one row per reason, with their number and the
    first of them. If every request was served in time, one line says so. If versions replaced each other, a second
    table says when and why. Estimates of batches are P99s unless the profile was made for another percentile.
    """
    if name is not None and at_s is not None:
        raise click.UsageError("give either --request or --at, not both")
    if application and name is not None:
        raise click.UsageError("give either --request or --application, not both")
    if "@" in application and at_s is None:
        raise click.UsageError("--application NAME@VERSION needs --at; give NAME to see all its versions")
    recorded = read_log(log)
    if page is not None:
        write_page(log_page(recorded, made=datetime.now(UTC)), page)
    if name is not None:
        request, others = request_named(recorded, name)
        try:
            story = explain_request(recorded, request, state_of(recorded))
        except InputError as error:
            raise InputError(error.what, help="; ".join((error.help, *recorded.missing))) from error
        called = f" ({name})" if name != str(request) else ""
        said = [Text(f"request {request}{called}: {story.summary}"), *others_text(others)]
        return CommandOutput(story, [*said, *visits(story.visits), *timeline(story.steps)])
    if at_s is not None:
        return _with_missing(recorded, _decisions(recorded, at_s, application))
    found, steps = _of(recorded, application, miss_reasons(recorded)), _of(recorded, application, rollouts(recorded))
    reasons = run_tables.miss_reasons(found, several=len({reason.application for reason in found}) > 1)
    parts: list[RenderableType] = (
        [table(reasons)]
        if found
        else [f"every request{f' of {application}' if application else ''} was served in time"]
    )
    if steps:
        parts.append(table(run_tables.rollouts(steps)))
    value: dict[str, object] = {"reasons": found, "rollouts": steps}
    if recorded.missing:
        value["missing"] = recorded.missing
    output = CommandOutput(value, parts)
    return _with_missing(recorded, output)


def _with_missing(log: RecordedLog, output: CommandOutput) -> CommandOutput:
    """The output, and for which part of the run it speaks."""
    return CommandOutput(output.value, [*output.display, *map(Text, log.missing)], exit_code=output.exit_code)


def others_text(others: Sequence[int]) -> list[Text]:
    """That other requests have the same name, if there are any."""
    return [Text(f"the client gave the same name to {numbered('request', others)}")] if others else []


def _of(log: RecordedLog, application: str, rows: list[Row]) -> list[Row]:
    """The rows of one application; all without a name. InputError if the log has no such application."""
    if not application:
        return rows
    names: list[str] = [key.partition("@")[0] for key in log.header.definitions]
    names += [record.application for _, record in log if isinstance(record, Deployed)]
    if application not in names:
        raise InputError(
            f"there is no application {application!r} in this log",
            help=f"name one of {listed([*dict.fromkeys(names)])}",
        )
    own = {application, *([""] if application == names[0] else [])}  # the only one may be left out in the log
    return [row for row in rows if row.application in own]


def _decisions(log: RecordedLog, at_s: float, application: str) -> CommandOutput:
    """The decision about one application, or about all if there are several and none is named."""
    state = state_of(log)
    if application or len(log.header.definitions) == 1:
        decision = explain_decision(log, s(at_s), state, application)
        return CommandOutput(decision, [Text(decision.summary), Text(decision.why), *timeline(decision.steps)])
    story = explain_deployment(log, s(at_s), state)
    columns = ("application", "version", "state", "% of requests", "since s", "plan", "why", "replicas", "waiting")
    rows = tuple(
        (v.application, v.version, v.state, 100 * v.share, f"{v.since_s:.3f}", v.plan, v.why, v.replicas, v.waiting)
        for v in story.versions
    )
    lines = [f"nodes: {story.nodes}"] if story.nodes else []
    lines += [f"planned together: {story.together}"] if story.together else []
    return CommandOutput(story, [table(Table("", columns, rows)), *map(Text, lines)])


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
