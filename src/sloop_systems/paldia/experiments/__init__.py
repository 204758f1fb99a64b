"""PALDIA reproduced: its split and choice of hardware, PALDIA and its baselines on its loads, and our systems beside
it.

Source: Bhasi et al., PALDIA (IPDPS 2024). It prints no latency, bandwidth or law of interference: all profiles are
calibrated to its results, so rows about them are fitted, and most figures are derived by the specification.
"""

from pathlib import Path
from typing import Final

import numpy as np

from sloop.api import listed
from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.comparison.harness import Progress, Reproduction, bars, run_trials, silent
from sloop_systems.paldia.experiments.offline import VECTORS, offline_rows, proportional
from sloop_systems.paldia.experiments.ours import ours_rows, ours_wanted, price_figures
from sloop_systems.paldia.experiments.results import LABELS, QUICK, SYSTEMS, Found, simulated_rows, trial_of, wanted
from sloop_systems.paldia.experiments.runs import VISION
from sloop_systems.paldia.experiments.traces import counts_of
from sloop_systems.paldia.published import PALDIA_MODELS, SLO_MS
from sloop_systems.paldia.solver import best_split, t_max_ms

SOURCE: Final = "Bhasi et al., PALDIA, IPDPS 2024"
SHOWN: Final = "SENet18"


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates three models with one seed, and looks at fewer random splits. `data` has the recorded
    Twitter load on which ours is compared with PALDIA; the published traces are not reachable."""
    trials = [*wanted(quick=quick), *ours_wanted(quick=quick)]
    found: Found = run_trials(trials, str(data or ""), processes=processes, progress=progress)
    rows = [*offline_rows(quick=quick), *simulated_rows(found, quick=quick), *ours_rows(found, quick=quick)]
    assumed = (
        "all profiles: durations, bandwidths, laws and CPU speeds are calibrated to PALDIA's results, and say nothing "
        "of these models elsewhere",
        "traces: made up from what is said of them; all requests of a second arrive together",
        "acquisition 1 s with workers, headroom 0.5 and 0.75, a switch at the fourth mismatch, noise 3 %: not printed",
        "figure 1, exhaustion, Wikipedia and Twitter: with values fitted to each of these figures",
        "power of nodes, the schedule of failures, and how much other work on the cores disturbs: not printed",
    )
    figures = [split_figure(), trace_figure(), compliance_figure(found, quick=quick), latency_figure(found)]
    figures += price_figures(found, quick=quick)
    return Reproduction(
        "paldia",
        SOURCE,
        tuple(rows),
        tuple(figures),
        assumed,
        models=listed(list(PALDIA_MODELS)),
        deadlines=f"{SLO_MS:g} ms",
    )


def split_figure() -> Figure:
    """T by the number of queued requests, for the five vectors. The minimum is not where no request waits."""
    series, spoken = [], []
    for number, (solo_ms, batch, bandwidth, alpha, count, *_) in enumerate(VECTORS, start=1):
        model = proportional(solo_ms, batch, bandwidth, alpha)
        queued = np.arange(0, count - batch + 1, 4)
        ends_ms = t_max_ms(model, count, queued)
        series.append(Series(f"vector {number}", tuple(100 * queued / count), tuple(map(float, ends_ms))))
        best = best_split(model, count)
        spoken.append(f"vector {number}: {best.t_max_ms:.0f} ms with {100 * best.queued / count:.0f} %")
    return Figure(
        name="split",
        title="When the last request ends, by how many of them wait",
        x_label="requests that wait, %",
        panels=(Panel(y_label="T, ms", series=tuple(series)),),
        alt=f"Least: {'; '.join(spoken)}.",
    )


def trace_figure() -> Figure:
    """The made-up loads."""
    panels = []
    for name, rps in (("azure", 225.0), ("wiki", 170.0), ("twitter", 92.0)):
        counts = counts_of(name, rps, 0)
        seconds = tuple(map(float, range(len(counts))))
        panels.append(Panel(y_label=f"{name}, requests/s", series=(Series("requests", seconds, counts, "steps"),)))
    return Figure(
        name="traces",
        title="The loads, made up as PALDIA describes them",
        x_label="time, s",
        panels=tuple(panels),
        alt="A short surge over a low base; five days; and a dense load with spikes.",
    )


def compliance_figure(found: Found, *, quick: bool) -> Figure:
    """Fig. 3: requests in time, by model."""
    names = QUICK if quick else VISION
    series = tuple(
        bars(
            LABELS[system],
            [found.each(trial_of(name, system), "compliance") for name in names],
        )
        for system in SYSTEMS
    )
    return Figure(
        name="compliance",
        title="Requests in time on the Azure-like trace",
        x_label="",
        panels=(Panel(y_label="%", ticks=names, series=series),),
        alt="; ".join(f"{own.name} {min(own.y):.1f} to {max(own.y):.1f} %" for own in series),
    )


def latency_figure(found: Found) -> Figure:
    """Fig. 6: latencies of SENet 18."""
    percents = tuple(map(float, range(1, 101)))
    series = tuple(
        Series(LABELS[system], found.of(trial_of(SHOWN, system))[0].latencies_ms, percents) for system in SYSTEMS
    )
    late = [sum(value <= SLO_MS for value in own.x) for own in series]
    return Figure(
        name="latency",
        title=f"{SHOWN} on the Azure-like trace",
        x_label="latency, ms",
        panels=(Panel(y_label="% of requests", series=series, marks=(Mark("SLO", "x", SLO_MS),)),),
        alt="; ".join(f"{own.name} crosses the deadline at {at} %" for own, at in zip(series, late, strict=True)),
    )
