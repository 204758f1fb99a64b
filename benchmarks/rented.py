"""The cost of rented nodes and the requests in time of our systems and of PALDIA, simulated on six kinds of EC2 nodes.

    python -m benchmarks.rented [--seeds 3] [--arrivals "at once"] [--data FOLDER]

These are the rows `ours` of `sloop reproduce paldia` without its other rows, so that more seeds can be simulated in the
same time. `sloop_systems.paldia.experiments.ours` has the loads, systems and parameters.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.notebook import arguments, publish, say, table
from sloop_systems.comparison import data_folder
from sloop_systems.comparison.harness import UNSEEN, Results, run_trials
from sloop_systems.paldia.experiments.ours import (
    ARRIVALS,
    SCENES,
    SEEDS,
    Arrivals,
    ours_rows,
    ours_wanted,
    own_trials,
    price_figures,
    rivals,
)
from sloop_systems.paldia.experiments.runs import PaldiaResult

ABOUT: Final = (
    "The parameters of `mixed` and `harbor` were chosen with seeds 0 to 2 of ResNet50 on the Azure-like load; here "
    "they are the same for all loads. As published, PALDIA plans for the requests of one second as if they arrived at "
    "once. If requests arrive one by one, it is also simulated with groups of 200 ms, which is the deadline."
)
STEPS: Final = 20
"""Lines of progress."""


def spread(values: Sequence[float], digits: int) -> str:
    """The mean, with the smallest and the largest value."""
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def prices(found: Results[PaldiaResult], arrivals: Arrivals) -> str:
    """A row for each scene and system."""
    rows = []
    for scene in SCENES:
        trials = own_trials(scene, arrivals)
        trials |= {f"PALDIA, groups of {group_ms} ms": each for group_ms, each in rivals(scene, arrivals).items()}
        for name, each in trials.items():
            usd, in_time = (found.each(each, field) for field in ("usd_per_h", "compliance"))
            rows.append((scene, name, spread(usd, 3), spread(in_time, 2)))
    return table(("load, model", "system", "USD/h", "in time, %"), rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"runs of each (default {SEEDS})")
    parser.add_argument("--data", type=Path, default=data_folder(), help="folder of public data")
    labels = [each.label for each in ARRIVALS]
    parser.add_argument("--arrivals", nargs="*", default=labels, choices=labels, help="how requests arrive")
    given = parser.parse_args()
    kinds = [each for each in ARRIVALS if each.label in given.arrivals]
    steps = set[int]()

    def progress(share: float, what: str) -> None:
        if int(STEPS * share) not in steps:
            steps.add(int(STEPS * share))
            say(f"{100 * share:.0f} %, {what}")

    wanted = [(trial, given.seeds) for trial, _ in ours_wanted(quick=False, kinds=kinds)]
    found: Results[PaldiaResult] = run_trials(wanted, str(given.data or ""), progress=progress)
    rows = ours_rows(found, quick=False, kinds=kinds)
    seeds = f"{UNSEEN} to {UNSEEN + given.seeds - 1}"
    parts = [f"Means (least to most) of {given.seeds} runs, seeds {seeds}. {ABOUT}"]
    for arrivals in kinds:
        parts += [f"## Arrivals: {arrivals.label}", prices(found, arrivals)]
    columns = ("", "unit", "mean", "least", "most", "verdict", "note")
    judged = [(row.metric, row.unit, row.ours, row.low, row.high, row.verdict, row.note) for row in rows]
    parts += ["## Ours against PALDIA, seed by seed", table(columns, judged)]
    figures = price_figures(found, quick=False, kinds=kinds)
    publish("rented", "Rented nodes: ours and PALDIA", "\n\n".join(parts), figures, write=not given.no_write)


if __name__ == "__main__":
    main()
