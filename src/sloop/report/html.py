"""HTML reports. Each is one file that loads no other: plots are inline SVG. It suits light and dark screens and paper.

`page` renders sections of text, tables and figures as valid, escaped HTML. `log_page` is the page of one recorded run,
live or simulated. It needs only the log, whose header contains the application, its profiles and the system.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from msgspec import Struct

from sloop.actions import Decided, Rollout
from sloop.errors import MachineError
from sloop.report import tables
from sloop.report.explain import MissReasons, plan_text, rollout_text
from sloop.report.plots import (
    APPLICATIONS_MAX,
    Figure,
    deadline_cdf,
    hardware_timeline,
    latency_cdf,
    most_requests,
    route_cdf,
    svg,
    timeline,
)
from sloop.report.tables import Table, cell_text
from sloop.runlog import Header, Record, RecordedLog
from sloop.runlog.summary import Figures, RunRow, RunSummary
from sloop.systems.replay import parts_of, require_all, with_beginning
from sloop.systems.setup import build
from sloop.text import counted
from sloop.units import to_s

DECISIONS_MAX: Final = 500
"""The most decisions on a page; the log has all of them."""
OPEN_ROWS_MAX: Final = 20
"""A longer table is collapsed, so that the sections after it stay visible."""


class Section(Struct, frozen=True, kw_only=True):
    """A part of a page: a heading, paragraphs, then figures and tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    folded: bool = False
    """Tables that are collapsed until clicked."""


def log_page(log: RecordedLog) -> str:
    """The page of a recorded run. InputError if the log is damaged or its header describes no valid application."""
    require_all(log, "a page")
    header = log.header
    start_ns = 0 if header.origin == "sim" else None
    parts, nodes = parts_of(log)
    summary, noted = RunSummary(parts, nodes=nodes, start_ns=start_ns, build=build), NotedRecords()
    for now_ns, record in with_beginning(log):
        summary.append(now_ns, record)
        noted.append(now_ns, record)
    assumed = summary.assumed_starts(header.assumed_starts)
    row = summary.row(system=header.system, seed=header.seed, assumed=assumed)
    title = f"{header.name}: a {_origin(header)} run of {header.system}"
    sections = run_sections(row, summary, noted, header)
    if log.missing:
        sections.insert(0, Section(title="What this log has", text=log.missing))
    return page(title, sections)


class NotedRecords:
    """What a page shows of single records: the first decisions, and why requests were missed."""

    def __init__(self, records: Iterable[tuple[int, Record]] = ()) -> None:
        self.decisions: list[tuple[int, Decided | Rollout]] = []
        self.misses = MissReasons()
        for now_ns, record in records:
            self.append(now_ns, record)

    def append(self, now_ns: int, record: Record) -> None:
        """Add the next record."""
        self.misses.append(now_ns, record)
        if isinstance(record, Decided | Rollout) and len(self.decisions) < DECISIONS_MAX:
            self.decisions.append((now_ns, record))


def run_sections(row: RunRow, summary: RunSummary, noted: NotedRecords, header: Header) -> list[Section]:
    """All sections about one run, from the outcomes of requests to the provenance of the numbers."""
    deployment = summary.deployment
    sections = [
        _summary(row, summary),
        *_application_sections(row),
        _over_time(row, summary),
        *_hardware_sections(row, summary),
        *_version_sections(row, summary),
        *_stage_sections(row, summary),
        _latency(row, summary),
    ]
    if errors := summary.estimate_errors():
        sections.append(Section(title="Estimates", tables=(tables.estimate_errors(errors),)))
    if (worst := tables.worst_seconds(summary.seconds())).rows:
        sections.append(Section(title="Worst seconds", tables=(worst,)))
    several = len(deployment.applications) > 1
    if reasons := noted.misses.rows:
        sections.append(
            Section(title="Why requests were missed", tables=(tables.miss_reasons(reasons, several=several),))
        )
    return [*sections, _decision_section(noted.decisions, summary), _provenance(row, header)]


def _summary(row: RunRow, summary: RunSummary) -> Section:
    text = [_result(row)]
    if row.planner_errors:
        why = next((each.planner_error for each in summary.deployment.records if each.planner_error), "")
        text.append(f"{counted(row.planner_errors, 'time')} no plan could be made, for example: {why}.")
    outcome_tables = (tables.ends([row]), tables.costs([row]), *tables.forms([(row.system, row)]))
    return Section(title="Summary", text=tuple(text), tables=outcome_tables)


def _application_sections(row: RunRow) -> list[Section]:
    """The applications side by side, if there are several."""
    if not row.applications:
        return []
    found = tables.applications([(row.system, row.applications)], "")
    return [Section(title="Applications", tables=(found,), folded=len(row.applications) > OPEN_ROWS_MAX)]


def _over_time(row: RunRow, summary: RunSummary) -> Section:
    """The run second by second, of each application if there are several."""
    applications = summary.applications
    if len(applications) < 2:
        return Section(title="Over time", figures=(timeline({row.system: summary}),))
    drawn = most_requests(applications)
    left_out = len(applications) - len(drawn)
    text = f"The {len(drawn)} applications with the most requests, of {len(applications)}." if left_out else ""
    figure = timeline(drawn, name="applications", title="Applications over time", same_arrivals=False)
    return Section(title="Over time", text=(text,) if text else (), figures=(figure,))


def _hardware_sections(row: RunRow, summary: RunSummary) -> list[Section]:
    """The mix of hardware, if the nodes are of several kinds or come and go."""
    if not tables.nodes_vary(summary.deployment.nodes.nodes.values()):
        return []
    found = tables.nodes([(row.system, row)])
    return [Section(title="Hardware", figures=(hardware_timeline(summary),), tables=(found,))]


def _version_sections(row: RunRow, summary: RunSummary) -> list[Section]:
    """The versions of applications that had several, and how one replaced another."""
    if not row.versions:
        return []
    figures = []
    for name, records in summary.deployment.applications.items():
        if len(records) > 1:
            versions = {f"version {each.version}": Figures([each.run]) for each in records[-APPLICATIONS_MAX:]}
            title = f"Versions of {name} over time"
            figures.append(timeline(versions, name=f"versions-{name}", title=title, same_arrivals=False))
    rows = tables.applications([(row.system, row.versions)], "Version by version")
    return [Section(title="Versions", figures=tuple(figures), tables=(rows,))]


def _latency(row: RunRow, summary: RunSummary) -> Section:
    applications = summary.applications
    if len(applications) > 1:
        waits = tables.waits(applications.items(), "application")
        return Section(title="Latency", figures=(deadline_cdf(most_requests(applications)),), tables=(waits,))
    slo_ms, runs = summary.slo_ms, {row.system: summary}
    path_slos_ms = sorted({route.slo_ms for route in row.routes} - {slo_ms})
    figure = latency_cdf(runs, slo_ms=slo_ms, others_ms=path_slos_ms)
    return Section(title="Latency", figures=(figure,), tables=(tables.waits(runs.items()),))


def page(title: str, sections: Sequence[Section], *, lead: str = "") -> str:
    """A complete HTML document."""
    links = "".join(f'<li><a href="#s{number}">{escape(s.title)}</a></li>' for number, s in enumerate(sections))
    body = "\n".join(_section(number, section) for number, section in enumerate(sections))
    paragraph = f"<p class=lead>{escape(lead)}</p>" if lead else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>{_CSS}</style>\n</head>\n<body>\n<header><h1>{escape(title)}</h1>{paragraph}\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>\n<main>\n{body}\n</main>\n</body>\n</html>\n'
    )


def write_page(text: str, path: Path) -> None:
    """Write a page. MachineError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"{path}: the page cannot be written: {error.strerror}", help="name a file in a folder that exists"
        ) from error


def _section(number: int, section: Section) -> str:
    inner = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in section.text)
    inner += "".join(f"<figure>{svg(figure)}</figure>" for figure in section.figures)
    inner += "".join(_table(table) for table in section.tables)
    if section.folded:
        inner = f"<details><summary>Show</summary>{inner}</details>"
    return f'<section id="s{number}"><h2>{escape(section.title)}</h2>{inner}</section>'


def _table(table: Table) -> str:
    right = [' class="n"' if table.is_number(column) else "" for column in range(len(table.columns))]
    head = "".join(f'<th scope="col"{r}>{escape(name)}</th>' for name, r in zip(table.columns, right, strict=True))
    lines = []
    for row in table.rows:
        cells = [f"<td{r}>{escape(cell_text(cell))}</td>" for cell, r in zip(row, right, strict=True)]
        cells[0] = cells[0].replace("<td", '<th scope="row"', 1).replace("</td>", "</th>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    empty = "" if lines else f'<tr><td colspan="{len(table.columns)}">nothing to show</td></tr>'
    return (
        f'<div class="wide" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}{empty}</tbody></table></div>"
    )


def _result(row: RunRow) -> str:
    """The result in one sentence."""
    if not row.requests:
        return f"{row.system} had no requests, and used {row.core_seconds:,.0f} core-seconds."
    p99 = f", p99 {row.p99_ms:.0f} ms" if row.p99_ms is not None else ""
    return (
        f"{row.system} answered {100 * row.attainment:.2f} % of {row.requests:,} requests in time{p99}, "
        f"with {row.core_seconds:,.0f} core-seconds."
    )


def _stage_sections(row: RunRow, summary: RunSummary) -> list[Section]:
    """For applications of several stages: where requests waited and were lost, and which routes they took."""
    if not row.has_graphs:
        return []
    text = (
        "A visit is a request, or a part of one, at a stage. Requests take different routes where stages branch off; a "
        "route has its own deadline if the application declares one for its path."
    )
    runs = [(row.system, row)]
    figures = (route_cdf(row.system, summary),) if len(row.routes) > 1 else ()
    return [Section(title="Stages", text=(text,), tables=(tables.stages(runs), tables.routes(runs)), figures=figures)]


def _decision_section(decided: Iterable[tuple[int, Decided | Rollout]], summary: RunSummary) -> Section:
    several = len(summary.deployment.records) > 1
    rows = []
    for now_ns, record in decided:
        if isinstance(record, Rollout):
            about, kind, what = record.application, "rollout", rollout_text(record)
        else:
            about, kind, what = record.application, record.kind, record.stage
            if record.replica is not None:
                what = f"replica {record.replica}"
            if record.plan is not None:
                what = plan_text(record.plan)
        rows.append((to_s(now_ns), *((about,) if several else ()), kind, what, record.why))
    total = summary.deployment.decisions.total()
    left_out = total - len(rows)
    more = f" The first {len(rows)} are listed, {left_out} more are in the log." if left_out else ""
    columns = ("at s", *(("application",) if several else ()), "kind", "what", "why")
    return Section(
        title="Decisions",
        text=(f"{counted(total, 'decision')}.{more}",),
        tables=(Table("", columns, tuple(rows)),),
        folded=len(rows) > OPEN_ROWS_MAX,
    )


def _provenance(row: RunRow, header: Header) -> Section:
    """The section on the provenance of the numbers."""
    systems = {key: definition.get("system", {}) for key, definition in header.definitions.items()}
    parameters = {key: _pairs(system.get("parameters", {})) or "as published" for key, system in systems.items()}
    same = len(set(parameters.values())) == 1
    facts = (
        ("run", _origin(header)),
        ("applications" if len(systems) > 1 else "application", ", ".join(systems)),
        ("system", header.system),
        ("parameters", next(iter(parameters.values())) if same else _pairs(parameters)),
        ("nodes", _nodes(header)),
        ("seed", "–" if header.seed is None else str(header.seed)),
        ("date", header.date or "not recorded"),
        ("software", _pairs(header.software)),
    )
    text = "Nothing here depends on a value that was assumed or extrapolated."
    found: tuple[Table, ...] = ()
    if row.assumed:
        text = f"These results depend on {counted(len(row.assumed), 'value')} that were not measured:"
        found = (Table("Assumed", ("what",), tuple((line,) for line in row.assumed)),)
    run = Table("The run", ("", "value"), facts)
    return Section(title="Where the numbers come from", text=(text,), tables=(*found, run))


def _nodes(header: Header) -> str:
    """How many nodes of each kind of hardware there are, and how many of them on demand."""
    counts: dict[str, list[bool]] = {}
    for node in header.cluster:
        counts.setdefault(node.hardware, []).append(node.on_demand)
    return ", ".join(
        f"{len(found)} {hardware}{f' ({sum(found)} on demand)' if any(found) else ''}"
        for hardware, found in counts.items()
    )


def _origin(header: Header) -> str:
    return "live" if header.origin == "live" else "simulated"


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


_CSS: Final = """
:root{--ink:#1b1f23;--dim:#5b6470;--paper:#fff;--line:#d8dce2;--band:#f5f6f8;--link:#1d5fb0}
@media (prefers-color-scheme:dark){
:root{--ink:#e6e8eb;--dim:#a0a8b3;--paper:#15181c;--line:#343a42;--band:#1d2126;--link:#82b4f2}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1.5rem 1.25rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.7rem;line-height:1.2;margin:.2rem 0 .6rem}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}
p{max-width:46rem}.lead{color:var(--dim)}
a{color:var(--link)}nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;padding:0;margin:0;list-style:none}
nav{font-size:.92rem}
figure{margin:1rem 0}figure svg{width:100%;height:auto;max-width:56rem;color:var(--ink)}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.2rem 0 .4rem}
th,td{padding:.28rem .8rem .28rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th[scope=row]{font-weight:500}thead th{color:var(--dim);font-weight:600;white-space:nowrap}
.n{text-align:right!important;white-space:nowrap}tbody tr:hover{background:var(--band)}
details summary{cursor:pointer;color:var(--link)}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
@media print{nav{display:none}body{max-width:none}}
"""
