"""A report as one HTML file: nothing is fetched, plots are drawn into it, tables are tables, dark and light both read.

Promises valid, escaped HTML from values; `run_page` is what `simulate` and `serve` write of runs, `page` is for
whoever has sections of their own. Knows no clock: dates come from a log's header.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Final

from msgspec import Struct

from sloop.actions import Decided
from sloop.errors import MachineError
from sloop.report import tables
from sloop.report.explain import Reason
from sloop.report.figures import Figure, comparison, latency_cdf, timeline, ways_cdf
from sloop.report.metrics import Metrics
from sloop.report.plots import svg
from sloop.report.rows import RunRow
from sloop.report.tables import Table, shown
from sloop.report.words import target
from sloop.runlog import Header, Record
from sloop.units import to_s

DECISIONS_MAX: Final = 500
"""More fill a page without being read; the log has them all."""


class Section(Struct, frozen=True, kw_only=True):
    """A part of a page: a heading, paragraphs, then tables and figures."""

    title: str
    text: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()
    folded: bool = False
    """Closed until it is asked for."""


class Note(Struct, frozen=True):
    """A decision as a report lists it."""

    at_s: float
    kind: str
    what: str
    why: str


class Decisions:
    """A `Sink` that keeps the decisions of a run, the first `DECISIONS_MAX` of them, and counts the rest."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.left_out = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        if not isinstance(record, Decided):
            return
        if len(self.notes) >= DECISIONS_MAX:
            self.left_out += 1
            return
        about = f"replica {record.replica}" if record.replica is not None else record.stage
        what = target(record.plan) if record.plan is not None else about
        self.notes.append(Note(to_s(now_ns), record.kind, what, record.why))


def run_page(
    title: str,
    runs: Sequence[tuple[RunRow, Metrics]],
    *,
    header: Header | None = None,
    slo_ms: float | None = None,
    decisions: Decisions | None = None,
    reasons: Iterable[Reason] = (),
) -> str:
    """The page of one run or of several in the same world; `decisions` and `reasons` are those of the first."""
    rows = [row for row, _ in runs]
    named = _named(runs)
    others_ms = sorted({route.slo_ms for row in rows for route in row.routes} - {slo_ms})
    sections = [
        Section(title="Summary", text=(_summary(rows),), tables=(tables.ends(rows), tables.costs(rows))),
        Section(title="Over time", figures=(timeline(named),)),
        Section(
            title="Latency",
            figures=(latency_cdf(named, slo_ms=slo_ms, others_ms=others_ms),),
            tables=(tables.waits(named.items()),),
        ),
    ]
    if len(rows) > 1:
        sections.insert(1, Section(title="Comparison", figures=(comparison(rows),)))
    sections[-1:-1] = _stage_sections([(label, row) for label, row in zip(named, rows, strict=True)], named)
    sections += _belief_sections(named)
    sections += _worst_sections(named)
    found = tuple((r.outcome, r.why, r.count, r.first_request, r.first_s) for r in reasons)
    if found:
        columns = ("outcome", "why", "requests", "for example request", "at s")
        sections.append(Section(title="Why requests were missed", tables=(Table("", columns, found),)))
    if decisions is not None:
        sections.append(_decision_section(decisions))
    sections.append(_provenance(rows, header))
    return page(title, sections)


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
    """A page into its file. MachineError where that cannot be written."""
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
        cells = [f"<td{r}>{escape(shown(cell))}</td>" for cell, r in zip(row, right, strict=True)]
        cells[0] = cells[0].replace("<td", '<th scope="row"', 1).replace("</td>", "</th>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{escape(table.title)}</caption>" if table.title else ""
    empty = "" if lines else f'<tr><td colspan="{len(table.columns)}">nothing to show</td></tr>'
    return (
        f'<div class="wide" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}{empty}</tbody></table></div>"
    )


def _summary(rows: Sequence[RunRow]) -> str:
    """The result in words."""
    parts = []
    for row in rows:
        p99 = f", p99 {row.p99_ms:.0f} ms" if row.p99_ms is not None else ""
        parts.append(
            f"{row.system} answered {100 * row.attainment:.2f} % of {row.requests:,} requests in time"
            f"{p99}, with {row.core_seconds:,.0f} core-seconds"
        )
    return "; ".join(parts) + "."


def _named(runs: Sequence[tuple[RunRow, Metrics]]) -> dict[str, Metrics]:
    """Runs by system; those of the same system by seed too."""
    systems = [row.system for row, _ in runs]
    return {
        row.system if systems.count(row.system) == 1 else f"{row.system} {place}": metrics
        for place, (row, metrics) in enumerate(runs)
    }


def _stage_sections(runs: Sequence[tuple[str, RunRow]], named: Mapping[str, Metrics]) -> list[Section]:
    """For applications of several stages: where requests waited and were lost, and which ways they took."""
    if not any(row.routes or len(row.stages) > 1 for _, row in runs):
        return []
    text = (
        "A visit is a request, or a part of one, at a stage. Requests take different ways where stages branch off; a "
        "way has a deadline of its own where the application gives it one."
    )
    figures = tuple(
        ways_cdf(label, metrics, name=f"ways-{place}")
        for place, (label, metrics) in enumerate(named.items())
        if len(metrics.routes()) > 1
    )
    shown_tables = (tables.stages(runs), tables.routes(runs))
    return [Section(title="Stages", text=(text,), tables=shown_tables, figures=figures)]


def _belief_sections(named: Mapping[str, Metrics]) -> list[Section]:
    found = [(label, metrics.service_errors()) for label, metrics in named.items()]
    several = len(found) > 1
    made = []
    for label, errors in found:
        if errors:
            table = tables.beliefs(errors)
            made.append(Table(f"{table.title} ({label})" if several else table.title, table.columns, table.rows))
    return [Section(title="Belief and outcome", tables=tuple(made))] if made else []


def _worst_sections(named: Mapping[str, Metrics]) -> list[Section]:
    made = []
    for label, metrics in named.items():
        table = tables.worst_seconds(metrics.seconds())
        if table.rows:
            made.append(Table(label, table.columns, table.rows))
    return [Section(title="Worst seconds", tables=tuple(made))] if made else []


def _decision_section(decisions: Decisions) -> Section:
    table = Table(
        "",
        ("at s", "kind", "what", "why"),
        tuple((note.at_s, note.kind, note.what, note.why) for note in decisions.notes),
    )
    more = f" The first {len(decisions.notes)} are listed, {decisions.left_out} more are in the log."
    text = f"{len(decisions.notes) + decisions.left_out} decisions.{more if decisions.left_out else ''}"
    return Section(title="Decisions", text=(text,), tables=(table,), folded=len(decisions.notes) > 20)


def _provenance(rows: Sequence[RunRow], header: Header | None) -> Section:
    """Where the numbers come from (law 7)."""
    facts: list[tuple[str, str]] = []
    if header is not None:
        facts = [
            ("run", "live" if header.origin == "live" else "simulated"),
            ("application", str(header.application.get("name", ""))),
            ("system", header.system),
            ("parameters", _listed(header.parameters) or "as published"),
            ("seed", "–" if header.seed is None else str(header.seed)),
            ("date", header.date or "not recorded"),
            ("software", _listed(header.software)),
        ]
    assumed = sorted({line for row in rows for line in row.assumed})
    text = (
        f"These results lean on {len(assumed)} thing{'s' if len(assumed) > 1 else ''} that nobody measured:"
        if assumed
        else "Nothing here leans on a value that was assumed or extrapolated."
    )
    leaning = (Table("Assumed", ("what",), tuple((line,) for line in assumed)),) if assumed else ()
    known = (Table("The run", ("", "value"), tuple(facts)),) if facts else ()
    return Section(title="Where the numbers come from", text=(text,), tables=(*leaning, *known))


def _listed(values: Mapping[str, object]) -> str:
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
