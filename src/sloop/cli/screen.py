"""What people see: tables on stdout, progress on stderr. Knows nothing of what the figures mean."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from sloop.report.tables import Table, as_rich


class Advance(Protocol):
    """Tell a progress bar that `done` of its total is done; `now` names what is being done."""

    def __call__(self, done: float, now: str = "") -> None: ...


def table(shown: Table) -> Group:
    """A table as people read it, its title on a line of its own."""
    body = as_rich(Table("", shown.columns, shown.rows))
    return Group(Text(shown.title, style="bold"), body) if shown.title else Group(body)


def facts(rows: Iterable[tuple[str, str]]) -> Grid:
    """Labels and what belongs to them, without lines or headings."""
    made = Grid.grid(padding=(0, 3))
    for label, value in rows:
        made.add_row(Text(label, style="bold"), Text(value))
    return made


@contextmanager
def progress(what: str, total: float) -> Iterator[Advance]:
    """A bar on stderr while the block runs, for anything that takes over two seconds."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task(what, total=total)

        def advance(done: float, now: str = "") -> None:
            bar.update(row, completed=done, description=f"{what}: {now}" if now else what)

        yield advance
