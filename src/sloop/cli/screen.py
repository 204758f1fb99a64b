"""What people see: tables on stdout, progress on stderr. Knows nothing of what the figures mean."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

SMALL = 0.001


class Advance(Protocol):
    """Tell a progress bar that `done` of its total is done; `now` names what is being done."""

    def __call__(self, done: float, now: str = "") -> None: ...


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Group:
    """A plain table, its title on a line of its own: words to the left, figures to the right."""
    cells = [list(row) for row in rows]
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        figures = all(isinstance(row[index], int | float | None) for row in cells)
        made.add_column(column, justify="right" if figures and cells else "left", overflow="fold")
    for row in cells:
        made.add_row(*(Text(figure(cell)) for cell in row))
    return Group(Text(title, style="bold"), made) if title else Group(made)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Labels and what belongs to them, without lines or headings."""
    made = Table.grid(padding=(0, 3))
    for label, value in rows:
        made.add_row(Text(label, style="bold"), Text(value))
    return made


def figure(value: object) -> str:
    """A value as people read it: four significant figures, `–` for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= SMALL else f"{value:.1e}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """A bar on stderr while the block runs, for anything that takes over two seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task(what, total=total)

        def advance(done: float, now: str = "") -> None:
            bar.update(row, completed=done, description=f"{what}: {now}" if now else what)

        yield advance
