"""What a report shows, as plain values: sections of text, tables and figures, facts at its top, and words with their
meaning. `sloop.page.report` makes a page of it, which is one file and loads no other.

`run_sections` describes recorded runs, live or simulated; they need only the log, whose header contains the
application, its profiles and the system.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, structs

from sloop.actions import Decided, End, Rollout
from sloop.report import run_tables
from sloop.report.explain.misses import MissReasons
from sloop.report.explain.texts import plan_text, rollout_text
from sloop.report.plots import (
    APPLICATIONS_MAX,
    Figure,
    deadline_cdf,
    hardware_timeline,
    latency_cdf,
    most_requests,
    route_cdf,
    timeline,
)
from sloop.report.svg import svg, svg_file
from sloop.report.tables import Table, cell_text
from sloop.report.words import KINDS, word_of, words_in
from sloop.runlog import Header, Record, RecordedLog, Sink
from sloop.runlog.rows import RowCounts
from sloop.runlog.summary import Figures, LoadTime, RunRow, RunSummary, on_schedule_clock
from sloop.systems import SYSTEMS
from sloop.systems.replay import parts_of, require_all, with_beginning
from sloop.systems.setup import build
from sloop.text import counted
from sloop.units import to_s

DECISIONS_MAX: Final = 500
"""The most decisions on a page; the log has all of them."""
OPEN_ROWS_MAX: Final = 20
"""A longer table is collapsed, so that the sections after it stay visible."""
UPRIGHT_ROWS_MAX: Final = 4
UPRIGHT_COLUMNS_MIN: Final = 4
"""A table with so many columns, and at most so many rows, has a row for each column,"""
HEADING_CHARS_MAX: Final = 24
"""unless the names of its rows are too long for headings,"""
TEXT_CHARS_MIN: Final = 40
"""or a cell has more text, which then gets room for several words."""
NAMES_MAX: Final = 8
"""The most models and deadlines at the top of a page."""


class Section(Struct, frozen=True, kw_only=True):
    """A part of a page: a heading, paragraphs, then figures and tables."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    folded: bool = False
    """Tables that are collapsed until clicked."""


class ReportedRun(Struct, frozen=True, kw_only=True):
    """A run as pages show it."""

    label: str
    """The name of its column or row: the system, and whether the run was live if others beside it are not."""
    row: RunRow
    summary: RunSummary
    header: Header
    noted: "NotedRecords | None" = None
    """What is known of single records; None if they were not kept."""

    @property
    def is_live(self) -> bool:
        """Whether a server served it."""
        return self.header.origin == "live"

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of its system that differ from the published ones, by application."""
        systems = {key: definition.get("system", {}) for key, definition in self.header.definitions.items()}
        return {key: _pairs(system.get("parameters", {})) for key, system in systems.items()}


def log_run(log: RecordedLog, *, only_load: bool = False, sinks: Sequence[Sink] = ()) -> ReportedRun:
    """A recorded run, whose records the `sinks` get too. With `only_load` its clock begins with its first request, and
    it ends with the end of its last: a live run can then be compared with a simulation, which is nothing but load.
    InputError if the log is damaged, or its header describes no valid application."""
    require_all(log, "a page")
    header = log.header
    is_live = header.origin == "live"
    parts, nodes = parts_of(log)
    summary = RunSummary(parts, nodes=nodes, start_ns=None if is_live and not only_load else 0, build=build)
    noted, load, rows = NotedRecords(), LoadTime(), RowCounts()
    all_sinks: list[Sink] = [summary, noted, load, rows, *sinks]
    appends = [sink.append for sink in all_sinks]
    for now_ns, record in _under_load(log) if only_load else with_beginning(log):
        for append in appends:
            append(now_ns, record)
    assumed = summary.assumed_starts(header.assumed_starts)
    row, duration_s = summary.row(system=header.system, seed=header.seed, assumed=assumed), summary.duration_s
    if is_live and load.total_ns:
        duration_s = to_s(load.total_ns)
        row = structs.replace(row, goodput_rps=row.served / duration_s)
    row = structs.replace(row, **rows.figures(duration_s))
    return ReportedRun(label=header.system, row=row, summary=summary, header=header, noted=noted)


def _under_load(log: RecordedLog) -> Iterator[tuple[int, Record]]:
    """The records up to the end of the last request, on a clock that starts with the first."""
    ended_ns = max((now_ns for now_ns, record in log if isinstance(record, End)), default=0)
    return on_schedule_clock(takewhile(lambda each: each[0] <= ended_ns, with_beginning(log)), first_ns=0)


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


def run_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """All sections about one run, or about several side by side, from the outcomes of requests to the provenance of the
    numbers. Single decisions, and the reasons of misses, are only on the page of one run."""
    labelled = [(run.label, run.row) for run in runs]
    sections = [
        _summary(runs),
        *_application_sections(labelled),
        _over_time(runs),
        *_hardware_sections(runs),
        *_version_sections(runs),
        *_stage_sections(runs),
        _latency(runs),
        *_estimate_sections(runs),
    ]
    if len(runs) == 1 and (noted := runs[0].noted) is not None:
        summary = runs[0].summary
        if (worst := run_tables.worst_seconds(summary.seconds())).rows:
            sections.append(Section(title="Worst seconds", tables=(worst,)))
        if reasons := noted.misses.rows:
            several = len(summary.deployment.applications) > 1
            found = run_tables.miss_reasons(reasons, several=several)
            sections.append(Section(title="Why requests were missed", tables=(found,)))
        sections.append(_decision_section(noted.decisions, summary))
    return [*sections, _provenance(runs)]


def _summary(runs: Sequence[ReportedRun]) -> Section:
    rows = [structs.replace(run.row, system=run.label) for run in runs]
    text = [_result(row) for row in rows]
    for run, row in zip(runs, rows, strict=True):
        if row.planner_errors:
            why = next((each.planner_error for each in run.summary.deployment.records if each.planner_error), "")
            times = counted(row.planner_errors, "time")
            text.append(f"{times} no plan could be made{_under(run, runs)}, for example: {why}.")
    ranges = run_tables.ranges(rows)
    found = [run_tables.ends(rows), *((ranges,) if ranges.rows else ()), run_tables.costs(rows)]
    found += run_tables.forms([(row.system, row) for row in rows])
    return Section(title="Summary", text=tuple(text), tables=tuple(found))


def _under(run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    """The name of the run, if there are others."""
    return f" under {run.label}" if len(runs) > 1 else ""


def _application_sections(labelled: Sequence[tuple[str, RunRow]]) -> list[Section]:
    """The applications side by side, if there are several."""
    count = sum(len(row.applications) for _, row in labelled)
    if not count:
        return []
    found = run_tables.applications([(label, row.applications) for label, row in labelled], "")
    return [Section(title="Applications", tables=(found,), folded=count > OPEN_ROWS_MAX)]


def _over_time(runs: Sequence[ReportedRun]) -> Section:
    """The runs second by second; of a single run each application, if there are several."""
    applications = runs[0].summary.applications
    if len(runs) > 1:
        same = not any(run.is_live for run in runs)
        figure = timeline({run.label: run.summary for run in runs}, same_arrivals=same)
        return Section(title="Over time", figures=(figure,))
    if len(applications) < 2:
        return Section(title="Over time", figures=(timeline({runs[0].label: runs[0].summary}),))
    drawn = most_requests(applications)
    left_out = len(applications) - len(drawn)
    text = f"The {len(drawn)} applications with the most requests, of {len(applications)}." if left_out else ""
    figure = timeline(drawn, name="applications", title="Applications over time", same_arrivals=False)
    return Section(title="Over time", text=(text,) if text else (), figures=(figure,))


def _hardware_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """The mix of hardware, if the nodes are of several kinds or come and go."""
    if not any(run_tables.nodes_vary(run.summary.deployment.nodes.nodes.values()) for run in runs):
        return []
    figures = [
        structs.replace(figure, name=f"{figure.name}-{place}", title=f"{figure.title}{_under(run, runs)}")
        for place, run in enumerate(runs)
        for figure in [hardware_timeline(run.summary)]
    ]
    found = run_tables.nodes([(run.label, run.row) for run in runs])
    return [Section(title="Hardware", figures=tuple(figures), tables=(found,))]


def _version_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """The versions of applications that had several, and how one replaced another."""
    labelled = [(run.label, run.row.versions) for run in runs if run.row.versions]
    if not labelled:
        return []
    figures = []
    for place, run in enumerate(runs):
        for name, records in run.summary.deployment.applications.items():
            if len(records) > 1:
                versions = {f"version {each.version}": Figures([each.run]) for each in records[-APPLICATIONS_MAX:]}
                title = f"Versions of {name} over time{_under(run, runs)}"
                figures.append(timeline(versions, name=f"versions-{place}-{name}", title=title, same_arrivals=False))
    rows = run_tables.applications(labelled, "Version by version")
    return [Section(title="Versions", figures=tuple(figures), tables=(rows,))]


def _latency(runs: Sequence[ReportedRun]) -> Section:
    applications = runs[0].summary.applications
    if len(runs) == 1 and len(applications) > 1:
        waits = run_tables.waits(applications.items(), "application")
        return Section(title="Latency", figures=(deadline_cdf(most_requests(applications)),), tables=(waits,))
    summaries = {run.label: run.summary for run in runs}
    slo_ms = runs[0].summary.slo_ms if len(applications) < 2 else None
    path_slos_ms = sorted({route.slo_ms for run in runs for route in run.row.routes} - {slo_ms})
    figure = latency_cdf(summaries, slo_ms=slo_ms, others_ms=path_slos_ms)
    return Section(title="Latency", figures=(figure,), tables=(run_tables.waits(summaries.items()),))


def _estimate_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """How well the durations of batches were estimated."""
    found = run_tables.estimate_errors([(run.label, run.summary.estimate_errors()) for run in runs])
    return [Section(title="Estimates", tables=(found,))] if found.rows else []


def run_facts(runs: Sequence[ReportedRun], *, made: datetime) -> tuple[tuple[str, str], ...]:
    """What was run, when, on what and with which deadline, for the top of a page."""
    live = [run.header for run in runs if run.is_live]
    simulated = [run.header for run in runs if not run.is_live]
    dated = [run.header for run in runs if run.header.date]
    ran = [f"{_origin(header)} run of {date_text(datetime.fromisoformat(header.date))}" for header in dated]
    machines = [header.machine for header in live if header.machine]
    nodes = [f"simulated: {_nodes(header)}" for header in simulated if header.cluster]
    definitions = {key: definition for run in runs for key, definition in run.header.definitions.items()}
    measured = dict.fromkeys(filter(None, (str(each.get("hardware", "")) for each in _profiles(definitions))))
    profiled = [f"profile measured on {_first(list(measured))}"] if measured else []
    return (
        ("date", "; ".join([*dict.fromkeys(ran), f"page made {date_text(made)}"])),
        ("machine", "; ".join(dict.fromkeys([*machines, *nodes, *profiled])) or "not recorded"),
        ("model" if len(_models(definitions)) == 1 else "models", _first(_models(definitions))),
        ("deadline", _deadlines(definitions)),
        ("system" if len(runs) == 1 else "systems", ", ".join(run.label for run in runs)),
        ("sloop", ", ".join(dict.fromkeys(run.header.software.get("sloop", "not recorded") for run in runs))),
    )


def date_text(at: datetime) -> str:
    """An instant as `2026-11-29 03:09 UTC`."""
    return f"{at:%Y-%m-%d %H:%M %Z}"


def _variants(definitions: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The variants of all stages of all applications."""
    stages = [stage for definition in definitions.values() for stage in definition.get("stages", ())]
    return [variant for stage in stages for variant in stage.get("variants", ())]


def _profiles(definitions: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = [variant.get("profile") for variant in _variants(definitions)]
    return [profile for profile in found if profile and profile.get("origin") == "measured"]


def _models(definitions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The files of all models, and the names of variants that have none."""
    variants = _variants(definitions)
    named = [Path(each["model"]).name if each.get("model") else f"{each['name']} (only a profile)" for each in variants]
    return list(dict.fromkeys(named))


def _deadlines(definitions: Mapping[str, Mapping[str, Any]]) -> str:
    """The deadline of the application, or of each."""
    found = {name: f"{each['slo_ms']:g} ms" for name, each in definitions.items() if "slo_ms" in each}
    if len(set(found.values())) == 1:
        return f"{next(iter(found.values()))}, from sending to the answer"
    return _first([f"{name} {slo}" for name, slo in found.items()])


def _first(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = len(names) - NAMES_MAX
    return ", ".join([*names[:NAMES_MAX], *([f"{more} more"] if more > 0 else [])]) or "not recorded"


def _texts(section: Section) -> Iterator[str]:
    """All that a reader sees of a section."""
    yield section.title
    yield from section.text
    for table in section.tables:
        filled = table.filled
        yield from (filled.title, *filled.columns)
        yield from (cell for row in filled.rows for cell in row if isinstance(cell, str))
    for figure in section.figures:
        yield from (figure.title, figure.x_label)
        for panel in figure.panels:
            yield from (panel.y_label, *panel.ticks)
            yield from (each.name for each in panel.series)
            yield from (each.name for each in panel.marks)


def report_values(
    title: str, sections: Sequence[Section], *, facts: Iterable[tuple[str, str]], lead: str = ""
) -> dict[str, Any]:
    """A report as JSON can hold it. `facts`, at its top, are names with values: date, machine, models, deadline,
    version. The words in it that need an explanation have one at its end."""
    facts = tuple(facts)
    words = words_in([title, lead, *chain.from_iterable(facts), *chain.from_iterable(map(_texts, sections))])
    return {
        "title": title,
        "lead": lead,
        "facts": facts,
        "sections": [_section_values(section) for section in sections],
        "words": words,
    }


def _section_values(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "text": section.text,
        "figures": [{"title": figure.title, "svg": svg_file(svg(figure))} for figure in section.figures],
        "tables": [_table_values(table) for table in section.tables],
        "folded": section.folded,
    }


def _table_values(table: Table) -> dict[str, Any]:
    """A table without empty columns. One of few rows and many columns stands upright, so that it fits a telephone."""
    table = table.filled
    is_upright = _stands_upright(table)
    if is_upright:
        table = table.transposed
    places = range(len(table.columns))
    return {
        "title": table.title,
        "columns": table.columns,
        "rows": [[cell_text(cell) for cell in row] for row in table.rows],
        "numbers": [place for place in places if (is_upright and place > 0) or table.is_number(place)],
        "words": [word_of(heading) for heading in table.columns],
    }


def _stands_upright(table: Table) -> bool:
    if not 0 < len(table.rows) <= UPRIGHT_ROWS_MAX or len(table.columns) < UPRIGHT_COLUMNS_MIN:
        return False
    longest = max(len(cell_text(cell)) for row in table.rows for cell in row[1:])
    return longest <= TEXT_CHARS_MIN and all(len(cell_text(row[0])) <= HEADING_CHARS_MAX for row in table.rows)


def _result(row: RunRow) -> str:
    """The result in one sentence."""
    if not row.requests:
        return f"{row.system} had no requests, and used {row.core_seconds:,.0f} core-seconds."
    p99 = f", p99 {row.p99_ms:.0f} ms" if row.p99_ms is not None else ""
    return (
        f"{row.system} answered {100 * row.attainment:.2f} % of {row.requests:,} requests in time{p99}, "
        f"with {row.core_seconds:,.0f} core-seconds."
    )


def _stage_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """For applications of several stages: where requests waited and were lost, and which routes they took."""
    found = [run for run in runs if run.row.has_graphs]
    if not found:
        return []
    text = (
        "A visit is a request, or a part of one, at a stage. Requests take different routes where stages branch off; a "
        "route has its own deadline if the application declares one for its path."
    )
    labelled = [(run.label, run.row) for run in found]
    figures = tuple(
        route_cdf(run.label, run.summary, name=f"routes-{place}")
        for place, run in enumerate(found)
        if len(run.row.routes) > 1
    )
    own = (run_tables.stages(labelled), run_tables.routes(labelled))
    return [Section(title="Stages", text=(text,), tables=own, figures=figures)]


def _decision_section(decided: Iterable[tuple[int, Decided | Rollout]], summary: RunSummary) -> Section:
    several = len(summary.deployment.records) > 1
    rows = []
    for now_ns, record in decided:
        if isinstance(record, Rollout):
            about, kind, what = record.application, "rollout", rollout_text(record)
        else:
            about, kind, what = record.application, record.kind, record.stage or record.choice
            if record.replica is not None:
                what = f"replica {record.replica}"
            if record.plan is not None:
                what = plan_text(record.plan)
        rows.append((to_s(now_ns), *((about,) if several else ()), kind, what, record.why))
    total = summary.deployment.decisions.total()
    left_out = total - len(rows)
    more = f" The first {len(rows)} are listed, {left_out} more are in the log." if left_out else ""
    columns = ("at s", *(("application",) if several else ()), "kind", "what", "why")
    at = len(columns) - 3
    kinds = "; ".join(f"{kind}: {line}" for kind, line in KINDS.items() if any(row[at] == kind for row in rows))
    return Section(
        title="Decisions",
        text=(f"{counted(total, 'decision')}.{more}", *([f"What they are about: {kinds}."] if kinds else [])),
        tables=(Table("", columns, tuple(rows)),),
        folded=len(rows) > OPEN_ROWS_MAX,
    )


def _provenance(runs: Sequence[ReportedRun]) -> Section:
    """The section on the provenance of the numbers."""
    assumed = list(dict.fromkeys(line for run in runs for line in run.row.assumed))
    text = "Nothing here depends on a value that was assumed or extrapolated."
    found: tuple[Table, ...] = ()
    if assumed:
        text = f"These results depend on {counted(len(assumed), 'value')} that were not measured:"
        found = (Table("Assumed", ("what",), tuple((line,) for line in assumed)),)
    known = {run.header.system: SYSTEMS[run.header.system] for run in runs if run.header.system in SYSTEMS}
    sources = "; ".join(f"{name}: {each.source}" for name, each in known.items())
    facts = [_run_facts(run) for run in runs]
    columns = ("run", *(run.label for run in runs))
    rows = tuple((name, *(each[name] for each in facts)) for name in facts[0] if any(each[name] for each in facts))
    found += (Table("The run" if len(runs) == 1 else "The runs", columns, rows),)
    said = (*([f"Source of the system: {sources}."] if sources else []), text)
    return Section(title="Where the numbers come from", text=said, tables=found)


def _run_facts(run: ReportedRun) -> dict[str, str | None]:
    """What is known about one run, by the name of the fact."""
    header = run.header
    parameters = {key: own or "as published" for key, own in run.parameters.items()}
    same = len(set(parameters.values())) == 1
    return {
        "origin": _origin(header),
        "applications": ", ".join(parameters),
        "system": header.system,
        "parameters": next(iter(parameters.values())) if same else _pairs(parameters),
        "nodes": _nodes(header),
        "seed": None if header.seed is None else str(header.seed),
        "software": _pairs(header.software),
    }


def _nodes(header: Header) -> str:
    """How many nodes of each kind of hardware there are, and how many of them on demand."""
    counts: dict[tuple[str, float], list[bool]] = {}
    for node in header.cluster:
        counts.setdefault((node.hardware, node.cores), []).append(node.on_demand)
    return ", ".join(
        f"{len(found)} {hardware} of {counted(cores, 'core')}{f' ({sum(found)} on demand)' if any(found) else ''}"
        for (hardware, cores), found in counts.items()
    )


def _origin(header: Header) -> str:
    return "live" if header.origin == "live" else "simulated"


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())
