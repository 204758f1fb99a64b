"""What a reproduction yields: rows with verdicts, figures, and what it leaned on."""

from msgspec import Struct, structs

from sloop.report.figures import Figure
from sloop.report.html import Section, page
from sloop.report.tables import Table
from sloop.reproduce.rows import Row, as_table, tally


class Reproduction(Struct, frozen=True):
    """One publication, reproduced."""

    name: str
    source: str
    rows: tuple[Row, ...]
    figures: tuple[Figure, ...]
    assumed: tuple[str, ...]

    @property
    def summary(self) -> str:
        """How many rows had which verdict."""
        return tally(self.rows)

    def tables(self) -> list[Table]:
        """One for each experiment, in the order they were made."""
        experiments = dict.fromkeys(row.experiment for row in self.rows)
        return [
            as_table([row for row in self.rows if row.experiment == name], name[0].upper() + name[1:])
            for name in experiments
        ]

    def page(self) -> str:
        """As one HTML file."""
        sections = [
            Section(title="Verdicts", text=(f"{self.summary}.", *VERDICTS)),
            Section(title="Figures", figures=self.figures),
            *(Section(title=table.title, tables=(structs.replace(table, title=""),)) for table in self.tables()),
            Section(title="Where the numbers come from", tables=(_assumed(self.assumed),)),
        ]
        return page(f"{self.name.capitalize()}, reproduced", sections, lead=self.source)


VERDICTS = (
    "reproduced: our mean is within the stated distance of the published number, or of the derived one where none was "
    "published, or our samples enclose it; or every sample keeps the stated bound.",
    "shape: the number differs, but what was to be expected of its order or direction came out.",
    "off: neither. source-inconsistent: the source's own figures contradict each other.",
)


def _assumed(lines: tuple[str, ...]) -> Table:
    return Table("Leaned on, and measured by nobody here", ("what",), tuple((line,) for line in lines))
