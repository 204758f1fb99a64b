"""Tables as values, and as text: the same rows for terminals, Markdown and pages.

Promises that a table says its units in its columns. Knows nothing of terminals: `rich` renders `as_rich`.
"""

from collections.abc import Iterable, Sequence
from math import isinf

from msgspec import Struct
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from sloop.report.metrics import Metrics
from sloop.report.rows import RunRow, Second, ServiceError

Cell = str | int | float | bool | None


class Table(Struct, frozen=True):
    """A title, columns, and rows of as many cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def is_number(self, column: int) -> bool:
        """Whether the column holds figures, which stand to the right."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)


def shown(cell: Cell) -> str:
    """A cell as people read it: four significant digits, – for nothing."""
    if cell is None or cell != cell:  # noqa: PLR0124  # nan
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        if isinf(cell):
            return "∞" if cell > 0 else "-∞"
        if cell == int(cell) and abs(cell) < 1e12:
            return f"{int(cell):,}"
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def as_text(table: Table) -> str:
    """Plain text in aligned columns, its title above."""
    cells = [table.columns, *(tuple(shown(cell) for cell in row) for row in table.rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    right = [table.is_number(column) for column in range(len(table.columns))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    lines = [line(row) for row in cells]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join([table.title, *lines] if table.title else lines)


def as_markdown(table: Table) -> str:
    """A Markdown table, its title in bold above."""
    right = [table.is_number(column) for column in range(len(table.columns))]
    lines = [
        f"| {' | '.join(table.columns)} |",
        f"| {' | '.join('---:' if r else '---' for r in right)} |",
        *(f"| {' | '.join(shown(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in table.rows),
    ]
    return "\n".join([f"**{table.title}**", "", *lines] if table.title else lines)


def as_rich(table: Table) -> RichTable:
    """For a terminal."""
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, title=table.title or None, title_justify="left")
    for column, name in enumerate(table.columns):
        made.add_column(name, justify="right" if table.is_number(column) else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(shown(cell)) for cell in row))
    return made


def ends(rows: Iterable[RunRow]) -> Table:
    """How requests ended, one run a line."""
    return Table(
        "How requests ended",
        ("system", "requests", "attainment %", "late", "dropped", "rejected", "failed", "p50 ms", "p99 ms"),
        tuple(
            (r.system, r.requests, 100 * r.attainment, r.late, r.dropped, r.rejected, r.failed, r.p50_ms, r.p99_ms)
            for r in rows
        ),
    )


def costs(rows: Iterable[RunRow]) -> Table:
    """What it took, one run a line."""
    return Table(
        "What it took",
        ("system", "goodput rps", "core-seconds", "USD", "cold starts", "accuracy"),
        tuple((r.system, r.goodput_rps, r.core_seconds, r.usd, r.cold_starts, r.accuracy) for r in rows),
    )


def waits(runs: Iterable[tuple[str, Metrics]]) -> Table:
    """Queues, batches and cores, one run a line."""
    return Table(
        "Queues and batches",
        ("system", "mean wait ms", "longest wait ms", "mean batch", "largest batch", "mean cores"),
        tuple(
            (label, m.wait_mean_ms, m.wait_max_ms, m.batch_mean, max(m.batch_sizes, default=0), m.cores_mean)
            for label, m in runs
        ),
    )


def stages(runs: Sequence[tuple[str, RunRow]]) -> Table:
    """What each stage of an application saw, one run after another; with several, each line says whose it is."""
    several = len(runs) > 1
    columns = ("stage", "visits", "mean wait ms", "longest wait ms", "batches", "mean batch", "largest batch")
    return Table(
        "Stage by stage",
        (*(("system",) if several else ()), *columns, "dropped", "rejected", "failed"),
        tuple(
            (
                *((label,) if several else ()),
                *(r.stage, r.visits, r.mean_wait_ms, r.max_wait_ms, r.batches, r.mean_batch, r.max_batch),
                *(r.dropped, r.rejected, r.failed),
            )
            for label, row in runs
            for r in row.stages
        ),
    )


def routes(runs: Sequence[tuple[str, RunRow]]) -> Table:
    """Which ways answered requests took through an application of several stages, and whether in time."""
    several = len(runs) > 1
    columns = ("stages visited", "answered", "% of all", "in time %", "deadline ms", "mean ms", "p99 ms")
    return Table(
        "Ways through the graph",
        (*(("system",) if several else ()), *columns),
        tuple(
            (
                *((label,) if several else ()),
                *(", ".join(r.stages) or "rarer ones", r.answered, 100 * r.answered / max(1, row.requests)),
                *(100 * r.served / r.answered, r.slo_ms, r.mean_ms, r.p99_ms),
            )
            for label, row in runs
            for r in row.routes
        ),
    )


def beliefs(errors: Iterable[ServiceError]) -> Table:
    """Estimate and outcome side by side (law 2)."""
    return Table(
        "What was believed of a batch, and what it took",
        ("stage", "variant", "batches", "believed ms", "actual ms", "bias %", "mean error %"),
        tuple((e.stage, e.variant, e.batches, e.believed_ms, e.actual_ms, 100 * e.bias, 100 * e.mape) for e in errors),
    )


def worst_seconds(seconds: Iterable[Second], count: int = 10) -> Table:
    """The seconds that missed most, the worst first; those without a miss are left out."""
    bad = sorted((s for s in seconds if s.violations), key=lambda s: (-s.violations, s.start_s))[:count]
    return Table(
        "Worst seconds",
        ("second", "arrivals", "violations %", "late", "dropped", "rejected", "failed", "cores", "longest ms"),
        tuple(
            (s.start_s, s.arrivals, 100 * s.violations, s.late, s.dropped, s.rejected, s.failed, s.cores, s.worst_ms)
            for s in bad
        ),
    )
