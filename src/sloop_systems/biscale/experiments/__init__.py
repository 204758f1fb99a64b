"""Biscale reproduced: its optimisation programs, its evaluation on three pipelines, its time series and sensitivities.

Source: Razavi, dissertation (TU Darmstadt 2024), chapter P4; as Themis: arXiv 2407.14843; and the public artefact,
whose fits, limits and constants are used.
"""

from pathlib import Path
from statistics import fmean
from typing import Final

from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.biscale.experiments.offline import offline_rows
from sloop_systems.biscale.experiments.results import (
    FIRST_S,
    GROUP,
    JUMP_S,
    KINDS,
    NAMES,
    PUBLISHED,
    RULES,
    Found,
    burst,
    dropping,
    simulated_rows,
    three,
    wanted,
)
from sloop_systems.biscale.experiments.runs import CORES, PIPELINES, Kind, excerpt_of
from sloop_systems.comparison import twitter
from sloop_systems.comparison.harness import Progress, Reproduction, bars, by_second, run_trials, silent
from sloop_systems.comparison.rows import with_note

SOURCE: Final = "Razavi, dissertation, TU Darmstadt 2024, chapter P4 (Biscale; arXiv 2407.14843: Themis)"
BAR: Final = 0.27
"""Width of a bar in a group of three, in units of the distance between groups."""
LABELS: Final[dict[Kind, str]] = {"biscale": "Biscale", "fa2": "FA2", "vertical": "vertical-only"}


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates only one seed of the evaluation, the drop rules and the motivation.

    `data` is the folder of public data. If the Twitter trace is missing there, a synthetic trace of the same shape
    replaces it, and every row that depends on it has a note.
    """
    folder = str(data) if data is not None else ""
    results = run_trials(wanted(quick=quick), folder, processes=processes, progress=progress)
    rows = simulated_rows(results, quick=quick)
    excerpt = excerpt_of("video", folder)
    if not excerpt.is_measured:
        rows = with_note(rows, "with a synthetic trace, because the Twitter trace is missing")
    assumed = [
        "seven models: fits to published P99 latencies (Biscale's artefact); true durations vary by 5 % around them",
        f"one node of {CORES:g} cores, so that cores are unlimited in effect",
        "a resize takes 0.1 s; a replica starts in 5.5 s (video), 7 s (audio) or 12 s (nlp); the network takes no time",
    ]
    assumed += [] if excerpt.is_measured else [f"requests: {excerpt.provenance}"]
    figures = (
        evaluation_figure(results),
        *(course_figure(results, name, folder) for name in NAMES),
        motivation_figure(results),
        dropping_figure(results),
    )
    rows = [*offline_rows(None if quick else twitter.held_out(data)), *rows]
    return Reproduction(
        "biscale",
        SOURCE,
        tuple(rows),
        figures,
        tuple(assumed),
        models="; ".join(f"{name}: {', '.join(model for model, _ in PIPELINES[name].models)}" for name in NAMES),
        deadlines=", ".join(f"{name} {PIPELINES[name].slo_ms:g} ms" for name in NAMES),
    )


def evaluation_figure(results: Found) -> Figure:
    """Violations, compared with the printed ones, and cores of the three policies on the three pipelines."""
    trials = {kind: [three(name, "max10", "predictive")[place] for name in NAMES] for place, kind in enumerate(KINDS)}
    violations = tuple(bars(LABELS[k], [results.violations(t, GROUP) for t in own]) for k, own in trials.items())
    cores = tuple(bars(LABELS[k], [[results.mean(t, "cores", GROUP)] for t in own]) for k, own in trials.items())
    points = [
        (place + (n - 1) * BAR, known) for place, name in enumerate(NAMES) for n, known in enumerate(PUBLISHED[name])
    ]
    printed = Series("as printed", tuple(x for x, _ in points), tuple(y for _, y in points), "points")
    spoken = "; ".join(
        f"{name}: " + ", ".join(f"{series.name} {series.y[at]:.2f} %" for series in violations)
        for at, name in enumerate(NAMES)
    )
    return Figure(
        name="evaluation",
        title="Violations and cores in service, 660 s of the Twitter trace",
        x_label="",
        panels=(
            Panel(y_label="violations, % (log)", ticks=NAMES, series=(*violations, printed), log=True),
            Panel(y_label="cores", ticks=NAMES, series=cores),
        ),
        alt=f"Violations with the predictive drop rule and the reference of ten seconds. {spoken}.",
    )


def course_figure(results: Found, name: str, data: str) -> Figure:
    """One pipeline, first seed, second by second."""
    trials = zip(KINDS, three(name, "max10", "predictive"), strict=True)
    runs = {LABELS[kind]: results.of(trial)[0] for kind, trial in trials}
    counts = tuple(map(float, excerpt_of(name, data).counts))
    requests = Series("requests", tuple(map(float, range(len(counts)))), counts, "area")
    cores = tuple(by_second(label, run.cores_by_second, steps=True) for label, run in runs.items())
    violations = tuple(by_second(label, run.violations_by_second) for label, run in runs.items())
    longest = tuple(by_second(label, run.worst_by_second, steps=True) for label, run in runs.items())
    return Figure(
        name=f"over-time-{name}",
        title=f"The {name} pipeline second by second",
        x_label="time, s",
        panels=(
            Panel(y_label="requests/s", series=(requests,)),
            Panel(y_label="cores", series=cores, marks=(Mark("the jump", "x", float(JUMP_S)),)),
            Panel(y_label="violations, %", series=violations),
            Panel(y_label="longest latency, ms", series=longest),
        ),
        alt=f"Requests, cores, violations and the longest latency per second of the {name} pipeline: Biscale's cores "
        "rise at the jump and fall when small replicas are ready, FA2's follow a cold start later, vertical-only's "
        "stay at their limit.",
    )


def motivation_figure(results: Found) -> Figure:
    """Cores and violations under the two motivating workloads, first seed."""
    panels = []
    for workload, kinds in (("burst", KINDS[:2]), ("plateau", KINDS[:1])):
        runs = {LABELS[kind]: results.of(burst(kind, workload))[0] for kind in kinds}
        cores = tuple(by_second(label, run.cores_by_second, steps=True) for label, run in runs.items())
        violations = tuple(by_second(label, run.violations_by_second) for label, run in runs.items())
        panels.append(Panel(y_label=f"cores, {workload}", series=cores))
        panels.append(Panel(y_label=f"violations, {workload}, %", series=violations))
    return Figure(
        name="motivation",
        title="20, 120, 20 requests/s: a burst of 5 s, and one of 40 s",
        x_label="time, s",
        panels=tuple(panels),
        alt="Cores and violations: replicas resized in place serve the burst, new replicas are ready only after it; "
        "in the longer one eight cores become five.",
    )


def dropping_figure(results: Found) -> Figure:
    """Violations by drop rule."""
    series = tuple(bars(LABELS[kind], [results.violations(dropping(kind, rule)) for rule in RULES]) for kind in KINDS)
    rules = ", ".join(
        f"{label} {fmean(s.y):.0f} % on average" for label, s in zip(LABELS.values(), series, strict=True)
    )
    return Figure(
        name="dropping",
        title=f"When to drop a request, the video pipeline's first {FIRST_S} s",
        x_label="",
        panels=(Panel(y_label="violations, %", ticks=("1 × SLO", "3 × SLO", "never"), series=series),),
        alt=f"Violations by drop rule; all three policies have the fewest if requests are dropped at 1 × SLO: {rules}.",
    )
