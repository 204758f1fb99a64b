"""Tables as data and for terminals.

Columns name their units. Pages render the same values (see `html`).
"""

from msgspec import Struct
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from sloop.text import number

Cell = str | int | float | bool | None


class Table(Struct, frozen=True):
    """A title, column names, and rows with one cell per column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def is_number(self, column: int) -> bool:
        """Whether the column holds numbers only; they are aligned to the right."""
        cells = [row[column] for row in self.rows if row[column] is not None]
        return bool(cells) and all(isinstance(cell, int | float) and not isinstance(cell, bool) for cell in cells)

    @property
    def filled(self) -> "Table":
        """Without the columns in which no row has a value. A table without rows keeps all its columns."""
        kept = [n for n in range(len(self.columns)) if any(row[n] not in (None, "") for row in self.rows)]
        if not self.rows or len(kept) == len(self.columns):
            return self
        rows = tuple(tuple(row[n] for n in kept) for row in self.rows)
        return Table(self.title, tuple(self.columns[n] for n in kept), rows)

    @property
    def transposed(self) -> "Table":
        """With a row for each column but the first, whose cells become the names of the columns."""
        names = (self.columns[0], *(cell_text(row[0]) for row in self.rows))
        rows = tuple((column, *(row[n] for row in self.rows)) for n, column in enumerate(self.columns[1:], start=1))
        return Table(self.title, names, rows)


def cell_text(cell: Cell) -> str:
    """A cell as text: numbers with four significant digits, – for None."""
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return number(cell)
    return f"{cell:,}" if isinstance(cell, int) else cell


def as_rich(table: Table) -> RichTable:
    """For a terminal, without empty columns."""
    table = table.filled
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, title=table.title or None, title_justify="left")
    for column, name in enumerate(table.columns):
        made.add_column(name, justify="right" if table.is_number(column) else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell_text(cell)) for cell in row))
    return made
