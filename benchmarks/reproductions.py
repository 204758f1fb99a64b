"""How long each reproduction takes, how many rows have each verdict, and all rows that are off; a page for each.

python -m benchmarks.reproductions [--data FOLDER] [--only NAME …]
"""

import time
from collections import Counter
from pathlib import Path

from benchmarks.notebook import arguments, publish, say, table
from sloop.reproduce import REPRODUCTIONS, Reproduction, reproduce
from sloop.reproduce.rows import VERDICTS


def timed(name: str, data: Path | None, *, quick: bool) -> tuple[Reproduction, float]:
    """A reproduction, and its duration in seconds."""
    say(f"{name}{', quick' if quick else ''}")
    started_s = time.monotonic()
    found = reproduce(name, quick=quick, data=data, progress=lambda part, what: None)
    return found, time.monotonic() - started_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder of public data [default: synthetic data]")
    parser.add_argument("--only", nargs="*", default=list(REPRODUCTIONS), choices=list(REPRODUCTIONS))
    given = parser.parse_args()
    for name in given.only:
        _, quick_s = timed(name, given.data, quick=True)
        found, full_s = timed(name, given.data, quick=False)
        verdicts = Counter(row.verdict for row in found.rows)
        counts = (quick_s, full_s, len(found.rows), *(verdicts[verdict] for verdict in VERDICTS))
        off = [
            (row.experiment, row.metric, row.unit, row.paper, row.derived, row.ours, row.note)
            for row in found.rows
            if row.verdict == "off"
        ]
        text = table(("`--quick`, s", "whole, s", "rows", *VERDICTS), [counts])
        text += "\n\nWhat the verdicts mean: [docs/reproductions.md](../../docs/reproductions.md). "
        if off:
            text += "Rows that are off:\n\n"
            text += table(("experiment", "", "unit", "paper", "derived", "ours", "note"), off)
        else:
            text += "No row is off."
        publish(f"reproduce-{name}", f"sloop reproduce {name}", text, write=not given.no_write)


if __name__ == "__main__":
    main()
