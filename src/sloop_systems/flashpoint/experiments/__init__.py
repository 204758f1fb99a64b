"""Flashpoint reproduced: its traces, autoscalers, plans of pieces, transfers, and its grid of simulated runs.

Source: San Juan, Flashpoint: A Low-latency Serverless Platform for DL Inference Serving (MMath thesis, Waterloo 2023).
"""

from pathlib import Path
from typing import Final

from sloop.api import listed
from sloop.api.reports import Figure, Panel, Series
from sloop_systems.comparison.harness import Progress, Reproduction, Results, Wanted, bars, run_trials, silent
from sloop_systems.comparison.rows import with_note
from sloop_systems.flashpoint.experiments.offline import QUEUES, T5, atoll_targets, benefits, offline_rows
from sloop_systems.flashpoint.experiments.planner import (
    SCENE_SLO_MS,
    ScalerResult,
    drawn_row,
    of_cells,
    of_tuned,
    planner_rows,
    scaler_rows,
    scalers_figure,
    wanted_at_ours,
    wanted_cells,
    wanted_scalers,
    wanted_tuned,
)
from sloop_systems.flashpoint.experiments.results import (
    IN_WINDOWS,
    LABELS,
    Found,
    Grid,
    grid_rows,
    hour,
    simulated_rows,
    wanted,
)
from sloop_systems.flashpoint.experiments.runs import FlashpointTrial
from sloop_systems.flashpoint.experiments.traces import AZURE, LLM, MAIN, requests_of
from sloop_systems.flashpoint.published import FLASHPOINT_MODELS

FIRST_SHARE, TUNED_SHARE = 0.3, 0.9
"""Parts of the time until the trials have been simulated on which others depend."""
SOURCE: Final = "San Juan, Flashpoint, MMath thesis, Waterloo 2023"


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates one hour of T5 under Atoll's policy, and not the grid of models and policies.

    `data` is the folder of public data. If the Twitter trace is missing there, a generated one replaces it, and every
    simulated row has a note; rows about its windows are left out.
    """
    folder = str(data) if data is not None else ""
    share = 1.0 if quick else FIRST_SHARE
    results: Found = run_trials(
        [*wanted(quick=quick), *wanted_cells(quick=quick)],
        folder,
        processes=processes,
        progress=lambda done, what: progress(0.9 * share * done, what),
    )
    scalers: Results[ScalerResult] = run_trials(
        wanted_scalers(quick=quick),
        folder,
        processes=processes,
        progress=lambda done, what: progress(share * (0.9 + 0.1 * done), what),
    )
    simulated = simulated_rows(results, quick=quick)
    ours = of_cells(results, quick=quick)
    if quick:
        simulated += planner_rows(ours)
    else:
        grid = _whole_grid(results, folder, processes, progress)
        simulated += [*grid_rows(grid), *planner_rows([*ours, *of_tuned(grid)]), drawn_row(results)]
    simulated += scaler_rows(scalers, quick=quick)
    assumed = [
        "six models: size, and load and send of T5, as printed; the others calibrated to the printed means",
        "layers of the public architectures, all of a model equally slow; boundaries calibrated to the printed mean",
        f"requests: {requests_of(AZURE, data).provenance}",
    ]
    main = requests_of(MAIN, data)
    if not main.is_measured:
        assumed.append(f"requests: {main.provenance}")
        simulated = with_note(simulated, "with a generated trace, because the Twitter trace is missing")
    if not quick:
        assumed.append(f"requests of a scene for published scalers: {requests_of(LLM, data).provenance}")
    figures = (
        targets_figure(data), plans_figure(), techniques_figure(results), scalers_figure(scalers, quick=quick)
    )  # fmt: skip
    return Reproduction(
        "flashpoint",
        SOURCE,
        (*offline_rows(data), *simulated),
        figures,
        tuple(assumed),
        models=listed(list(FLASHPOINT_MODELS)),
        deadlines=f"none, as published: latencies are compared; {SCENE_SLO_MS:g} ms for our own planner",
    )


def _whole_grid(results: Found, folder: str, processes: int, progress: Progress) -> Grid:
    """The grid with all its cells: those at the resources of the baselines, then those with Flashpoint's latency and
    those at the resources of our planner."""

    def run(trials: Wanted[FlashpointTrial], first: float, last: float) -> Found:
        return run_trials(
            trials,
            folder,
            processes=processes,
            progress=lambda done, what: progress(first + (last - first) * done, what),
        )

    tuned = run([*Grid(results).wanted(), *wanted_tuned(Grid(results))], FIRST_SHARE, TUNED_SHARE)
    grid = Grid(results, tuned)
    return Grid(results, tuned, run([*grid.wanted_matches(), *wanted_at_ours(grid)], TUNED_SHARE, 1.0))


def targets_figure(data: Path | None) -> Figure:
    """Fig. 3.2: requests, and how many replicas Atoll's policy wants for them."""
    counts = requests_of(MAIN, data).counts
    targets = atoll_targets(counts)
    seconds = tuple(map(float, range(len(counts))))
    requests = Series("requests", seconds, tuple(map(float, counts)), "area")
    wanted = Series("wanted", tuple(15.0 * at for at in range(len(targets))), tuple(map(float, targets)), "steps")
    return Figure(
        name="targets",
        title=f"An hour of the Twitter trace, and Atoll's policy for {T5}",
        x_label="time, s",
        panels=(Panel(y_label="requests/s", series=(requests,)), Panel(y_label="replicas", series=(wanted,))),
        alt=f"Between {min(counts)} and {max(counts)} requests per second; between {min(targets)} and {max(targets)} "
        "replicas are wanted.",
    )


def plans_figure() -> Figure:
    """Fig. 8.1 for T5: what three plans save of the mean time of a queue."""
    places = tuple(map(float, QUEUES))
    found = [benefits(T5, requests) for requests in QUEUES]
    series = (
        Series("Flashpoint", places, tuple(100 * each.best for each in found)),
        Series("Gillis", places, tuple(100 * each.gillis for each in found)),
        Series("SerFer", places, tuple(100 * each.serfer for each in found)),
    )
    return Figure(
        name="plans",
        title=f"Plans of pieces for {T5} on 55 accelerators",
        x_label="waiting requests",
        panels=(Panel(y_label="time saved, %", series=series),),
        alt=f"With one waiting request all save {100 * found[0].best:.0f} %; with {QUEUES[-1]:,} Flashpoint's plan "
        f"saves {100 * found[-1].best:.0f} %, Gillis's {100 * found[-1].gillis:.0f} %.",
    )


def techniques_figure(results: Found) -> Figure:
    """Cold starts and latencies of T5 under Atoll's policy by technique, published parameters."""
    trials = [hour(MAIN, technique) for technique in IN_WINDOWS]
    cold, mean = ([results.each(trial, field) for trial in trials] for field in ("cold_s", "mean_s"))
    ticks = tuple(LABELS[technique].removeprefix("the ").replace(" and ", "\nand ") for technique in IN_WINDOWS)
    spoken = "; ".join(
        f"{LABELS[technique]}: {results.mean(trial, 'cold_s'):.3g} s and {results.mean(trial, 'mean_s'):.3g} s"
        for technique, trial in zip(IN_WINDOWS, trials, strict=True)
    )
    return Figure(
        name="techniques",
        title=f"{T5}, an hour of the Twitter trace, one link to the store",
        x_label="",
        panels=(
            Panel(y_label="cold start, s (log)", ticks=ticks, series=(bars("cold start", cold),), log=True),
            Panel(y_label="mean latency, s (log)", ticks=ticks, series=(bars("latency", mean),), log=True),
        ),
        alt=f"Mean cold start and mean latency of {spoken}.",
    )
