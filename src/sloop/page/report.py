"""A report as one file: the page with the values of runs that are over in it. It loads no other file."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from sloop.errors import MachineError
from sloop.page.files import report
from sloop.page.picture import Picture
from sloop.report.sections import ReportedRun, Section, log_run, report_values, run_facts, run_sections
from sloop.runlog import RecordedLog
from sloop.runlog.fold import DeploymentState
from sloop.systems.replay import parts_of
from sloop.systems.setup import build
from sloop.text import listed

NO_PICTURE: Final[Mapping[str, Any]] = {}


def page(
    title: str,
    sections: Sequence[Section],
    *,
    facts: Iterable[tuple[str, str]],
    lead: str = "",
    picture: Mapping[str, Any] = NO_PICTURE,
) -> str:
    """A complete HTML document; see `report_values`. With the `picture` of a run it has the views of a server's page
    too."""
    values = report_values(title, sections, facts=facts, lead=lead)
    return report(msgspec.json.encode({**picture, "report": values}), title)


def log_page(log: RecordedLog, *, made: datetime) -> str:
    """The page of a recorded run, made at `made`. InputError if the log is damaged, or its header describes no valid
    application."""
    header, (parts, nodes) = log.header, parts_of(log)
    is_live = header.origin == "live"
    fold = DeploymentState(parts, nodes=nodes, start_ns=None if is_live else 0, build=build)
    picture = Picture(header, fold, datetime.fromisoformat(header.date).timestamp() if header.date else 0.0)
    run = log_run(log, sinks=[picture])
    origin, sections = "live" if is_live else "simulated", run_sections([run])
    if log.missing:
        sections.insert(0, Section(title="What this log has", text=log.missing))
    title = f"{header.name}: a {origin} run of {header.system}"
    return page(title, sections, facts=run_facts([run], made=made), picture=picture.whole())


def runs_page(runs: Sequence[ReportedRun], *, made: datetime) -> str:
    """Several runs of one scenario side by side, with distinct labels, on one page made at `made`."""
    labels = listed([run.label for run in runs])
    return page(f"{runs[-1].header.name}: {labels}", run_sections(runs), facts=run_facts(runs, made=made))


def write_page(text: str, path: Path) -> None:
    """Write a page. MachineError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"{path}: the page cannot be written: {error.strerror}", help="name a file in a folder that exists"
        ) from error
