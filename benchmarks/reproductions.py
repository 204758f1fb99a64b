"""All reproductions, whole: for each publication a page with the rows that are off or about our own systems and all
figures, a JSON file beside it with every row, and one table of verdicts by publication.

A publication whose JSON file is of the same state of `src` is not run again, so that a run that was stopped goes on.

python -m benchmarks.reproductions [--data FOLDER] [--only NAME …] [--again] [--table]
"""

import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from benchmarks.notebook import RESULTS, ROOT, arguments, publish, say, table
from sloop.machine import hardware_name
from sloop_systems.comparison import REPRODUCTIONS, Reproduction, reproduce
from sloop_systems.comparison.rows import VERDICTS, Row

OURS: Final = ("ours", "our planner", "published scalers", "c5 ours", "drawn cells", "more cells")
"""Experiments, in lower case, that compare our own systems with published ones."""
DEFINED: Final = "[docs/reproductions.md](../../docs/reproductions.md) defines the verdicts."


class PublishedRows(Struct, frozen=True):
    """All rows of one publication, and what made them."""

    name: str
    source: str
    state: str
    """The last commit of `src`, with a + if it had changes."""
    date: str
    machine: str
    wall_s: float
    processor_s: float
    """Of this process and its children."""
    assumed: tuple[str, ...]
    rows: tuple[Row, ...]


def made(name: str, data: Path | None, processes: int) -> tuple[PublishedRows, Reproduction]:
    """Reproduce a publication."""
    say(name)
    started_s, before, state = time.monotonic(), os.times(), state_of_source()
    found = reproduce(name, data=data, processes=processes, progress=lambda part, what: None)
    wall_s, after = time.monotonic() - started_s, os.times()
    processor_s = sum(after[:4]) - sum(before[:4])
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    rows = PublishedRows(
        name, found.source, state, now, hardware_name(), wall_s, processor_s, found.assumed, found.rows
    )
    return rows, found


def state_of_source() -> str:
    """The last commit that changed `src`, with a + if it has changes that are not in a commit."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    return git("log", "-1", "--format=%h", "--", "src") + ("+" if git("status", "--porcelain", "--", "src") else "")


def page_of(found: PublishedRows) -> str:
    """The page's text."""
    taken = (found.state, found.wall_s, found.processor_s, *_counts(found.rows))
    parts = [
        table(("state of src", "s", "processor s", "rows", *VERDICTS), [taken]),
        "Processor seconds are of all processes: two cores that do nothing else need half as long.",
        f"Every row, with what would have failed it: [JSON](reproduce-{found.name}.json). {DEFINED}",
    ]
    off = [row for row in found.rows if row.verdict == "off"]
    parts += ["Rows that are off:", _table_of_rows(off)] if off else ["No row is off."]
    ours = [row for row in found.rows if row.experiment.lower() in OURS]
    if ours:
        columns = ("", "unit", "mean", "least", "most", "verdict", "note")
        cells = [(row.metric, row.unit, row.ours, row.low, row.high, row.verdict, row.note) for row in ours]
        parts += ["Our own systems beside published ones: means of the runs, the smallest and the largest.",
                  table(columns, cells)]  # fmt: skip
    return "\n\n".join(parts)


def _table_of_rows(rows: Sequence[Row]) -> str:
    return table(
        ("experiment", "", "unit", "paper", "derived", "ours", "note"),
        [(row.experiment, row.metric, row.unit, row.paper, row.derived, row.ours, row.note) for row in rows],
    )


def overview(found: Iterable[PublishedRows]) -> str:
    """Verdicts by publication: of all rows, and of those with a printed figure or bound."""
    every = sorted(found, key=lambda each: each.name)
    whole = [(each, each.rows) for each in every]
    printed = [(each, tuple(row for row in each.rows if row.paper is not None)) for each in every]
    missing = sorted(set(REPRODUCTIONS) - {each.name for each in every})
    older = f" Not run whole since verdicts are these: {', '.join(missing)}; their pages are older." if missing else ""
    return "\n\n".join([
        f"Counted from the JSON file of each publication. {DEFINED}{older}",
        _counted(whole),
        "Of these, the rows with a figure or a bound that the source prints; the others compare with figures, bounds "
        "and directions of our own specification of it:",
        _counted(printed),
    ])  # fmt: skip


def _counted(found: Sequence[tuple[PublishedRows, Sequence[Row]]]) -> str:
    lines: list[tuple[object, ...]] = [
        (f"[{each.name}](reproduce-{each.name}.md)", each.state, each.date, each.wall_s, *_counts(rows))
        for each, rows in found
    ]
    lines.append(("all", "", "", None, *_counts([row for _, rows in found for row in rows])))
    return table(("", "state of src", "date", "s", "rows", *VERDICTS), lines)


def _counts(rows: Sequence[Row]) -> tuple[int, ...]:
    counts = Counter(row.verdict for row in rows)
    return (len(rows), *(counts[verdict] for verdict in VERDICTS))


def path_of(name: str) -> Path:
    """The JSON file of a publication."""
    return RESULTS / f"reproduce-{name}.json"


def written(name: str) -> PublishedRows | None:
    """What the JSON file of a publication has; None without one."""
    path = path_of(name)
    return msgspec.json.decode(path.read_bytes(), type=PublishedRows) if path.exists() else None


def write(found: PublishedRows) -> None:
    """The JSON file: a line for each row, so that changes can be read."""
    head = msgspec.json.encode(msgspec.structs.replace(found, rows=())).decode().removesuffix("[]}")
    rows = ",\n".join(msgspec.json.encode(row).decode() for row in found.rows)
    path_of(found.name).write_text(f"{head}[\n{rows}\n]}}\n")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder of public data [default: that of SLOOP_SHARED, or synthetic]")
    parser.add_argument("--only", nargs="*", default=list(REPRODUCTIONS), choices=list(REPRODUCTIONS))
    parser.add_argument("--again", action="store_true", help="run also what was run at this state of src")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table of verdicts")
    parser.add_argument("--processes", type=int, default=0, help="parallel processes [default: one per core]")
    given = parser.parse_args()
    for name in [] if given.table else given.only:
        last = written(name)
        if last is not None and last.state == state_of_source() and not given.again:
            say(f"{name}: as of {last.date}")
            continue
        found, reproduction = made(name, given.data, given.processes)
        publish(
            f"reproduce-{name}", f"sloop reproduce {name}", page_of(found), reproduction.figures,
            write=not given.no_write,
        )  # fmt: skip
        if not given.no_write:
            write(found)
    published = [found for found in map(written, REPRODUCTIONS) if found is not None]
    publish("reproductions", "Reproductions", overview(published), write=not given.no_write)


if __name__ == "__main__":
    main()
