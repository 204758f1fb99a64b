"""How long each reproduction takes, how many rows have each verdict, all rows that are off or about our own systems,
and all figures; a page for each.

python -m benchmarks.reproductions [--data FOLDER] [--only NAME …]
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.notebook import arguments, publish, say, table
from sloop_systems.comparison import REPRODUCTIONS, Reproduction, reproduce
from sloop_systems.comparison.rows import VERDICTS, Row

OURS: Final = ("ours", "our planner", "published scalers")
"""Experiments, in lower case, that compare our own systems with published ones."""


class TimedReproduction(NamedTuple):
    """A reproduction, and what it took."""

    found: Reproduction
    wall_s: float
    processor_s: float
    """Of this process and its children."""


def timed(name: str, data: Path | None, *, quick: bool) -> TimedReproduction:
    """Reproduce a publication."""
    say(f"{name}{', quick' if quick else ''}")
    started_s, before = time.monotonic(), os.times()
    found = reproduce(name, quick=quick, data=data, progress=lambda part, what: None)
    wall_s, after = time.monotonic() - started_s, os.times()
    return TimedReproduction(found, wall_s, sum(after[:4]) - sum(before[:4]))


def page_of(quick: TimedReproduction, whole: TimedReproduction) -> str:
    """The page's text."""
    rows = whole.found.rows
    verdicts = Counter(row.verdict for row in rows)
    columns = ("`--quick`, s", "processor s", "whole, s", "processor s", "rows", *VERDICTS)
    taken = (quick.wall_s, quick.processor_s, whole.wall_s, whole.processor_s)
    parts = [table(columns, [(*taken, len(rows), *(verdicts[verdict] for verdict in VERDICTS))])]
    parts.append("Processor seconds are of all processes: two cores that do nothing else need half as long.")
    what = "What the verdicts mean: [docs/reproductions.md](../../docs/reproductions.md)."
    off = [row for row in rows if row.verdict == "off"]
    if off:
        parts += [f"{what} Rows that are off:", _table_of_rows(off)]
    else:
        parts.append(f"{what} No row is off.")
    ours = [row for row in rows if row.experiment.lower() in OURS]
    if ours:
        parts += [
            "Our own systems beside published ones: means over seeds, the smallest and the largest.",
            table(
                ("", "unit", "mean", "least", "most", "verdict", "note"),
                [(row.metric, row.unit, row.ours, row.low, row.high, row.verdict, row.note) for row in ours],
            ),
        ]
    return "\n\n".join(parts)


def _table_of_rows(rows: Sequence[Row]) -> str:
    return table(
        ("experiment", "", "unit", "paper", "derived", "ours", "note"),
        [(row.experiment, row.metric, row.unit, row.paper, row.derived, row.ours, row.note) for row in rows],
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder of public data [default: that of SLOOP_SHARED, or synthetic]")
    parser.add_argument("--only", nargs="*", default=list(REPRODUCTIONS), choices=list(REPRODUCTIONS))
    given = parser.parse_args()
    for name in given.only:
        quick, whole = (timed(name, given.data, quick=is_quick) for is_quick in (True, False))
        text, figures = page_of(quick, whole), whole.found.figures
        publish(f"reproduce-{name}", f"sloop reproduce {name}", text, figures, write=not given.no_write)


if __name__ == "__main__":
    main()
