"""The colocation thesis reproduced: planners of models that share GPUs, compared with each other and with ours.

Source: Elvinger, Towards resource and interference-aware scheduling of ML workloads (ETH Zurich, MSc thesis 505, 2024).
Its figures are not legible; rows compare with its text and tables, and with values that follow from its profiles.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from sloop.api import listed
from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.colocation.experiments.offline import OFFLINE, offline_part
from sloop_systems.colocation.experiments.results import (
    EFFICIENTNET,
    IDEAL_E1,
    SENSITIVITY,
    SENSITIVITY_SEEDS,
    sensitivity,
    simulated_rows,
)
from sloop_systems.colocation.experiments.router import run_model
from sloop_systems.colocation.experiments.runs import (
    BASELINES,
    LARGE,
    MAIN,
    OURS,
    SECONDS,
    SLOS_MS,
    SLOWER,
    SLOWER_E1,
    TOTALS,
    Cell,
    PlacementRuns,
    Placements,
    PlacementTrial,
    e1,
    e2,
    e3,
    play,
    wanted,
)
from sloop_systems.colocation.experiments.scene import MIXED, VISION, placed_models
from sloop_systems.colocation.experiments.simulated import (
    SimulatedRun,
    SimulatedTrial,
    play_simulated,
    runs_of,
    sloop_rows,
    wanted_in_sloop,
)
from sloop_systems.comparison.harness import Progress, Reproduction, in_parallel, silent
from sloop_systems.comparison.rows import Row

SOURCE: Final = (
    "Elvinger, Towards resource and interference-aware scheduling of ML workloads, MSc thesis 505, ETH Zurich 2024"
)
Work = PlacementTrial | SimulatedTrial | str | float
"""A trial, the name of an offline part, or a factor κ whose effect is computed."""
Done = PlacementRuns | SimulatedRun | list[Row] | tuple[list[float], list[float]]


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates one seed, and not E1c and E3b. `data` is not used: the thesis published no traces,
    and its profiles are in `sloop_systems.colocation.published`."""
    trials, in_sloop = wanted(quick=quick), wanted_in_sloop(quick=quick)
    work: list[Work] = [*OFFLINE, *in_sloop, *SENSITIVITY, *trials]
    done = in_parallel(
        _quickly if quick else _fully, work, processes=processes, progress=progress, what=lambda each, _: f"{each}"
    )
    parts, factors, runs = _sorted(done)
    found = Placements.of(trials, runs)
    by_factor = dict(zip(SENSITIVITY, factors, strict=True))
    runs_in_sloop = runs_of(in_sloop, [each for each in done if isinstance(each, SimulatedRun)])
    rows = [row for part in parts for row in part] + simulated_rows(found, by_factor, quick=quick)
    rows += sloop_rows(found, runs_in_sloop)
    figures = (
        gpus_figure(found, "E1", SLOWER_E1),
        gpus_figure(found, "E2", 1.0),
        rates_figure(found),
        factor_figure(by_factor),
        latency_figure(quick=quick),
        ours_figure(found),
    )
    assumed = (
        "κ, by which the thesis's host slows inferences down: not printed. 1.18 in E1 is fitted to two of its rows, "
        "which ask for 1.145 and 1.205; E2 asks for 1.0 to 1.05",
        "slowdown by a limited share, (WSM / share)^1.65: fitted to two printed latencies",
        "transfers, 0.32 ms and 0.87 ns a byte: fitted to one printed time",
        "late sending, 0.2 ms a request in E3 and what makes 433.34 and 276 requests/s in E1 and E2: fitted to Table "
        "4.1",
        "iGniter's coefficients for PyTorch: not printed; fitted to Table A.1 and the law of shares, without "
        "interference",
        "Usher's groups: deduced from the printed placements",
        "models do not slow each other down beyond κ in the small stack: what they need of SMs adds up to at most a "
        "GPU, except by occupancy (usher-wao), which this flatters unless shares are limits. In core and simulator (E1 "
        "to E3 in sloop) they do, by the law of shares; κ is 1 there",
        "ours plans with κ as it has measured it before the requests that count are sent; unmeasured, it expects 1.18. "
        "In core and simulator it measures κ during a warm-up of 15 s, and plans again",
        "the 30 drawn cells, their rates, deadlines and numbers of GPUs, are random",
    )
    return Reproduction(
        "colocation",
        SOURCE,
        tuple(rows),
        figures,
        assumed,
        models=listed(list(dict.fromkeys((*VISION, *MIXED)))),
        deadlines="200 ms for models of images, 300 ms for the mixed ones; random in drawn cells",
    )


def _sorted(
    done: Sequence[Done],
) -> tuple[list[list[Row]], list[tuple[list[float], list[float]]], list[PlacementRuns]]:
    return (
        [each for each in done if isinstance(each, list)],
        [each for each in done if isinstance(each, tuple)],
        [each for each in done if isinstance(each, PlacementRuns)],
    )


def _quickly(work: Work) -> Done:
    return _worked(work, quick=True)


def _fully(work: Work) -> Done:
    return _worked(work, quick=False)


def _worked(work: Work, *, quick: bool) -> Done:
    if isinstance(work, PlacementTrial):
        return play(work)
    if isinstance(work, SimulatedTrial):
        return play_simulated(work)
    if isinstance(work, str):
        return offline_part(work, quick=quick)
    return sensitivity(work, 1 if quick else SENSITIVITY_SEEDS)


# Figures


def _curves(
    found: Placements, cells: Sequence[Cell], x: Sequence[float], slower: float, policies: Sequence[str]
) -> tuple[Series, ...]:
    return tuple(
        Series(policy, tuple(map(float, x)), tuple(found.mean(cell, policy, slower) for cell in cells))
        for policy in policies
    )


def gpus_figure(found: Placements, experiment: str, slower: float) -> Figure:
    """Figures 6.1 and 6.10: goodput by the number of GPUs."""
    make, ideal = (e1, IDEAL_E1) if experiment == "E1" else (e2, 4 * 276.0)
    cells = [make(gpus) for gpus in range(1, 7 if experiment == "E1" else 9)]
    policies = (*BASELINES, *((LARGE,) if experiment == "E1" else ()), OURS)
    what = "five vision models" if experiment == "E1" else "two vision and two language models"
    return Figure(
        name=experiment.lower(),
        title=f"{experiment}, {what}: goodput by number of GPUs, κ {slower:g}",
        x_label="GPUs",
        panels=(
            Panel(
                y_label="requests/s in time",
                series=_curves(found, cells, [cell.gpus for cell in cells], slower, policies),
                marks=(Mark("ideal", "y", ideal),),
            ),
        ),
        alt="; ".join(
            f"{policy} from {found.mean(cells[0], policy, slower):.0f} to {found.mean(cells[-1], policy, slower):.0f}"
            for policy in policies
        ),
    )


def rates_figure(found: Placements) -> Figure:
    """Figure 6.15: goodput by the total rate, for three deadlines."""
    policies = (*BASELINES, OURS)
    return Figure(
        name="e3",
        title="E3, five vision models on four GPUs: goodput by rate, κ 1",
        x_label="requests/s of all models",
        panels=tuple(
            Panel(
                y_label=f"in time, {slo_ms:g} ms",
                series=_curves(found, [e3(total, slo_ms) for total in TOTALS], TOTALS, 1.0, policies),
            )
            for slo_ms in SLOS_MS
        ),
        alt="; ".join(
            f"{policy}, 250 ms: {', '.join(f'{found.mean(e3(total, 250), policy):.0f}' for total in TOTALS)}"
            for policy in policies
        ),
    )


def factor_figure(by_factor: dict[float, tuple[list[float], list[float]]]) -> Figure:
    """How much the two rows of E1 on six GPUs depend on κ, which is fitted to them."""
    factors = tuple(by_factor)
    series = tuple(
        Series(
            f"b{batch} × 2",
            factors,
            tuple(fmean(by_factor[factor][place]) for factor in factors),
            "line",
            tuple(min(by_factor[factor][place]) for factor in factors),
            tuple(max(by_factor[factor][place]) for factor in factors),
        )
        for place, batch in enumerate((8, 64))
    )
    return Figure(
        name="factor",
        title=f"{EFFICIENTNET} on two GPUs: goodput by the fitted factor κ",
        x_label="κ",
        panels=(
            Panel(
                y_label="requests/s in time",
                series=series,
                marks=(Mark("published, b8 × 2", "y", 360.61), Mark("published, b64 × 2", "y", 143.73)),
            ),
        ),
        alt="; ".join(f"{own.name}: {', '.join(f'{value:.0f}' for value in own.y)}" for own in series),
    )


def latency_figure(*, quick: bool) -> Figure:
    """Figure 6.9: latencies of efficientnet_b7 with small and with large batches."""
    (model,) = placed_models([EFFICIENTNET], 433.34, 200)
    places = tuple(range(1, 100))
    curves, middles = [], []
    for batch in (8, 64):
        runs = [
            run_model(model, [batch] * 2, seed, slower=SLOWER_E1, requests=500 * SECONDS, with_latencies=True)
            for seed in range(1 if quick else 4)
        ]
        sample = sorted(value for run in runs for value in run.latencies_ms)
        at = tuple(sample[len(sample) * place // 100] for place in places)
        curves.append(Series(f"b{batch} × 2", at, tuple(map(float, places))))
        middles.append(at[49])
    return Figure(
        name="latency",
        title=f"{EFFICIENTNET} on two GPUs: latency, κ {SLOWER_E1:g}",
        x_label="latency, ms",
        panels=(Panel(y_label="% of requests", series=tuple(curves), marks=(Mark("SLO", "x", 200.0),)),),
        alt=f"Half of the requests take up to {middles[0]:.0f} ms with batches of 8, {middles[1]:.0f} ms with 64.",
    )


def ours_figure(found: Placements) -> Figure:
    """Our placement over the best baseline of each cell."""
    places = tuple(map(float, range(len(MAIN))))
    series = tuple(
        Series(
            f"κ {slower:g}",
            places,
            tuple(found.mean(cell, OURS, slower) / found.mean(cell, found.best(cell, slower), slower) for cell in MAIN),
            "points",
        )
        for slower in SLOWER
    )
    firsts = {next(iter(found.cells(experiment))): experiment for experiment in ("E1", "E2")}
    firsts |= {e3(TOTALS[0], slo_ms): f"E3, {slo_ms:g} ms" for slo_ms in SLOS_MS}
    ticks = tuple(firsts.get(cell, "") for cell in MAIN)
    least = [min(zip(own.y, map(str, MAIN), strict=True)) for own in series]
    return Figure(
        name="ours",
        title="Our placement over the best baseline of each cell",
        x_label="cells by number of GPUs (E1, E2) and by rate (E3)",
        panels=(Panel(y_label="goodput, ×", series=series, marks=(Mark("equal", "y", 1.0),), ticks=ticks),),
        alt="; ".join(f"{own.name}: least {low:.2f} at {cell}" for own, (low, cell) in zip(series, least, strict=True)),
    )
