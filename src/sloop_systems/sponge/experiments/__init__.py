"""Sponge reproduced: its link, its tables, its solver, its evaluation, and the sensitivity to parameters.

Source: Razavi et al., Sponge: Inference Serving with Dynamic SLOs Using In-Place Vertical Scaling, EuroMLSys 2024
(chapter P2 of Razavi's dissertation, TU Darmstadt 2024), and its public artefact.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from sloop.api.experiments import Link
from sloop.api.profiles import YOLOV5S_S, fit_amdahl
from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.comparison.harness import (
    Progress,
    Reproduction,
    Results,
    RunResult,
    bars,
    by_second,
    run_trials,
    silent,
)
from sloop_systems.comparison.rows import with_note
from sloop_systems.sponge.experiments.offline import LINK, SYNTHETIC, grid_points, offline_rows
from sloop_systems.sponge.experiments.runs import (
    BYTES_PER_KB,
    FA2_COLD,
    FA2_WARM,
    KNOBS,
    MIDDLE,
    RATIOS,
    SLO_MS,
    SPONGE,
    STATIC_8,
    STATIC_16,
    SpongeTrial,
    ablation_rows,
    at,
    check_rows,
    evaluation_rows,
    link_of,
    wanted,
)

SOURCE: Final = "Razavi et al., Sponge, EuroMLSys 2024"
ARTEFACT: Final = "saeid93__sponge"
"""The public artefact's folder among public data, named owner__repository."""
SEEDS, SEEDS_QUICK = 5, 1


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates one seed instead of five and no ablations.

    `data` holds the artefact's folder. If it is missing, a synthetic link replaces the recorded one, and every row that
    depends on the link has a note.
    """
    artefact = data / ARTEFACT if data is not None and (data / ARTEFACT / LINK).exists() else None
    path = str(artefact / LINK) if artefact else ""
    link = link_of(path)
    trials = wanted(SEEDS_QUICK if quick else SEEDS, ablations=not quick)
    results = run_trials(trials, path, processes=processes, progress=progress)
    simulated = [*evaluation_rows(results), *check_rows(results), *([] if quick else ablation_rows(results))]
    rows = [*offline_rows(link, artefact), *(simulated if artefact else with_note(simulated, SYNTHETIC))]
    figures = [link_figure(link), fit_figure(), policies_figure(results), course_figure(results)]
    assumed = [f"YOLOv5s: {YOLOV5S_S.origin} profile ({YOLOV5S_S.source})"]
    assumed += [] if artefact else [f"link: {link.provenance}"]
    figures += [] if quick else ablation_figures(results)
    return Reproduction(
        "sponge",
        SOURCE,
        tuple(rows),
        tuple(figures),
        tuple(assumed),
        models="YOLOv5s",
        deadlines=f"{SLO_MS:g} ms from the client's first byte",
    )


def link_figure(link: Link) -> Figure:
    """Fig. P2.1: bandwidth, and the part of a second that remains after the upload, for three payloads."""
    rates = tuple(rate * 1000 / 1e6 for rate in link.bytes_per_ms)
    area = Series("bandwidth", tuple(map(float, range(len(rates)))), rates, "area")
    budgets = tuple(by_second(f"{kb} KB", link.remaining_ms(kb * BYTES_PER_KB, SLO_MS)) for kb in (100, 200, 500))
    return Figure(
        name="link",
        title="The link, and the time left of one second after the upload",
        x_label="time, s",
        panels=(Panel(y_label="bandwidth, MB/s", series=(area,)), Panel(y_label="budget left, ms", series=budgets)),
        alt=f"Bandwidth between {min(rates):.2f} and {max(rates):.2f} MB/s; the budgets left for 100, 200 and 500 KB.",
    )


def fit_figure() -> Figure:
    """Fig. P2.3: predicted against measured, both axes in ms."""
    points = grid_points()
    fitted = fit_amdahl(points, relative=True)
    series = []
    for batch in (1, 2, 4, 8, 16):
        row = [point for point in points if point.batch == batch]
        predicted = tuple(fitted.params.latency_ms(point.batch, point.cores) for point in row)
        series.append(Series(f"batch {batch}", tuple(point.latency_ms for point in row), predicted, "points"))
    most = max(point.latency_ms for point in points)
    return Figure(
        name="fit",
        title="The performance model, ResNet18",
        x_label="measured P99, ms",
        panels=(Panel(y_label="predicted, ms", series=(*series, Series("equal", (0.0, most), (0.0, most)))),),
        alt=f"Predicted against measured latency of 30 settings; mean error {fitted.mape:.1%}.",
    )


def policies_figure(results: Results[RunResult]) -> Figure:
    """Fig. P2.4: all policies at all true service times."""
    policies = (STATIC_8, STATIC_16, *SPONGE.values(), FA2_COLD, FA2_WARM)
    violations = tuple(
        bars(f"mean = l/{ratio:g}", [results.violations(at(policy, ratio)) for policy in policies]) for ratio in RATIOS
    )
    cores = [results.mean(at(policy, MIDDLE), "cores") for policy in policies]
    ticks = tuple(policy.policy.replace(" from ", "\n") for policy in policies)
    spoken = "; ".join(
        f"{policy.policy} {results.mean(at(policy, MIDDLE), 'violations'):.2f} %, {count:.1f} cores"
        for policy, count in zip(policies, cores, strict=True)
    )
    return Figure(
        name="evaluation",
        title="20 requests/s of YOLOv5s over the link, 600 s",
        x_label="",
        panels=(
            Panel(y_label="violations, % (log)", ticks=ticks, series=violations, log=True),
            Panel(y_label="cores", ticks=ticks, series=(bars("cores", [[count] for count in cores]),)),
        ),
        alt=f"Violations and cores at l/{MIDDLE:g}: {spoken}.",
    )


def course_figure(results: Results[RunResult]) -> Figure:
    """One seed of three policies over time."""
    runs = [(policy.policy, results.of(at(policy, MIDDLE))[0]) for policy in (SPONGE[0.9], STATIC_16, FA2_COLD)]
    violations = tuple(by_second(name, run.violations_by_second) for name, run in runs)
    cores = tuple(by_second(name, run.cores_by_second, steps=True) for name, run in runs)
    return Figure(
        name="over-time",
        title=f"Second by second, mean = l/{MIDDLE:g}, seed 0",
        x_label="time, s",
        panels=(Panel(y_label="violations, %", series=violations), Panel(y_label="cores", series=cores)),
        alt="Violations and cores per second of Sponge, static-16 and FA2: FA2 misses all deadlines until its replicas "
        "have started; all three miss deadlines in the deepest fades of the link.",
    )


def ablation_figures(results: Results[RunResult]) -> list[Figure]:
    """One figure for every four parameters."""
    panels = [_knob_panel(knob, settings, results) for knob, _, _, settings in KNOBS]
    return [
        Figure(
            name=f"knobs-{start // 4 + 1}",
            title="Violations by setting, %" if not start else "Violations by setting, %, continued",
            x_label="",
            panels=tuple(panels[start : start + 4]),
            alt="; ".join(panel.y_label.replace("\n", " ") for panel in panels[start : start + 4]),
        )
        for start in range(0, len(panels), 4)
    ]


def _knob_panel(knob: str, settings: Sequence[tuple[str, SpongeTrial]], results: Results[RunResult]) -> Panel:
    found = [results.violations(at(trial, MIDDLE)) for _, trial in settings]
    words = knob.split()
    half = len(words) // 2
    return Panel(
        y_label="\n".join(filter(None, (" ".join(words[:half]), " ".join(words[half:])))),
        ticks=tuple(name for name, _ in settings),
        series=(bars("violations", found),),
        marks=(Mark("the first setting", "y", fmean(found[0])),),
    )
