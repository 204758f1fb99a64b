"""IPA reproduced: its optima, its evaluation on the Twitter trace against FA2-low, FA2-high and RIM, its parameters.

Source: Razavi, Resource Efficient Inference Serving with SLO Guarantee (dissertation, TU Darmstadt 2024), chapter P3,
and IPA's public artefact.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final

from msgspec import structs

from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.comparison.harness import Progress, Reproduction, Results, bars, run_trials, silent
from sloop_systems.comparison.rows import with_note
from sloop_systems.ipa.experiments.offline import offline_rows, timing_rows, timings
from sloop_systems.ipa.experiments.published import PIPELINES, Policy
from sloop_systems.ipa.experiments.runs import (
    INTERVAL_S,
    PREDICTORS,
    PREFERENCES,
    WORKLOADS,
    IpaEvaluation,
    IpaResult,
    IpaTrial,
    excerpt_of,
    foreseeing,
    preferring,
)

SOURCE: Final = "Razavi, dissertation, TU Darmstadt 2024, chapter P3 (IPA)"
DRAWN: Final[tuple[Policy, ...]] = ("fa2-low", "fa2-high", "rim", "ipa")
"""Policies in drawing order: IPA last, so that its curve lies above equal ones."""
PERCENT_DRAWN: Final = 99
"""Latencies above this quantile are not drawn: the slowest request would compress the rest of the plot."""


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates two of the five pipelines, three of the four workloads, and one seed instead of
    three.

    `data` holds the Twitter trace. If it is missing, synthetic excerpts of the same shape replace it, and every row
    that depends on them has a note.
    """
    evaluation = IpaEvaluation(quick=quick)
    folder = str(data) if data is not None else ""
    # First, while the machine is otherwise idle, because decisions are timed.
    sizes, slowest = timings()
    results = run_trials(evaluation.wanted(), folder, processes=processes, progress=progress)
    excerpt = excerpt_of(WORKLOADS[0], folder)
    rows = evaluation.rows(results)
    if not excerpt.is_measured:
        rows = with_note(rows, "with a synthetic excerpt, because the Twitter trace is missing")
    figures = [
        *(course_figure(results, evaluation, name, folder) for name in evaluation.pipelines),
        timing_figure(sizes),
        preferences_figure(results, evaluation),
        latencies_figure(results, evaluation),
        forecasters_figure(results, evaluation),
    ]
    assumed = [] if excerpt.is_measured else [f"requests: {excerpt.provenance}"]
    for name in evaluation.pipelines:
        models = [(stage, model) for stage in PIPELINES[name].stages for model in stage.models]
        assumed += [f"{name}, {s.name}: {m.name}: {m.origin} speed ({m.profile.source})" for s, m in models]
    rows = [*offline_rows(), *timing_rows(sizes, slowest), *rows]
    return Reproduction(
        "ipa",
        SOURCE,
        tuple(rows),
        tuple(figures),
        tuple(assumed),
        models="; ".join(f"{name}: {', '.join(s.name for s in each.stages)}" for name, each in PIPELINES.items()),
        deadlines=", ".join(f"{name} {each.slo_s:g} s" for name, each in PIPELINES.items()),
    )


def course_figure(results: Results[IpaResult], evaluation: IpaEvaluation, name: str, data: str) -> Figure:
    """Fig. P3.8 to P3.12: a pipeline under its workloads in sequence, first seed."""
    workloads = evaluation.workloads
    runs = {
        policy: [results.of(IpaTrial(pipeline=name, workload=w, policy=policy))[0] for w in workloads]
        for policy in DRAWN
    }
    counts = [excerpt_of(workload, data).counts for workload in workloads]
    rates = [float(max(own[at : at + INTERVAL_S])) for own in counts for at in range(0, len(own), INTERVAL_S)]
    minutes = tuple(place * INTERVAL_S / 60 for place in range(len(rates)))
    ends = tuple(Mark("next workload", "x", minutes[-1] * n / len(workloads)) for n in range(1, len(workloads)))

    def joined(field: str) -> tuple[Series, ...]:
        return tuple(
            Series(policy, minutes, tuple(value for run in own for value in getattr(run, field)), "steps")
            for policy, own in runs.items()
        )

    accuracy = joined("pas_by_interval")
    lowest = accuracy[DRAWN.index("fa2-low")].y
    above = tuple(
        structs.replace(own, y=tuple(y - low for y, low in zip(own.y, lowest, strict=True))) for own in accuracy
    )
    means = "; ".join(
        f"{policy} {fmean(run.cores for run in own):.1f} cores, 100 · PAS {fmean(run.pas for run in own):.1f}"
        for policy, own in runs.items()
    )
    rate = Series("rate", minutes, tuple(rates), "area")
    return Figure(
        name=f"over-time-{name}",
        title=f"{name}: {', '.join(workload.replace('_', ' ') for workload in workloads)}; seed 0",
        x_label="time, minutes",
        panels=(
            Panel(y_label="busiest second,\nrequests/s", series=(rate,), marks=ends),
            Panel(y_label="cores", series=joined("cores_by_interval"), marks=ends),
            Panel(y_label="100 · PAS\nabove FA2-low's", series=above, marks=ends),
            Panel(y_label="violations, %", series=joined("violations_by_interval"), marks=ends),
        ),
        alt=f"Rate, cores, accuracy and violations of {name} under each workload in sequence. Means: {means}.",
    )


def timing_figure(sizes: Mapping[int, float]) -> Figure:
    """Fig. P3.13: the time of a decision by the size of the pipeline."""
    taken = tuple(sizes.values())
    panel = Panel(
        y_label="ms (log)",
        series=(Series("label setting, slowest of 3", tuple(map(float, sizes)), taken),),
        marks=(Mark("published: less than 2 s", "y", 2000.0),),
        log=True,
    )
    return Figure(
        name="deciding",
        title="Time of a decision, n stages of n variants",
        x_label="n",
        panels=(panel,),
        alt=f"From {taken[0]:.2f} ms for one stage of one variant to {taken[-1]:.0f} ms for ten of ten.",
    )


def preferences_figure(results: Results[IpaResult], evaluation: IpaEvaluation) -> Figure:
    """Fig. P3.14: cores and accuracy by preference."""
    names = evaluation.pipelines
    panels = [
        Panel(
            y_label=label,
            ticks=tuple(names),
            series=tuple(
                bars(preferred, [results.each(preferring(name, place), field) for name in names])
                for place, preferred in enumerate(PREFERENCES)
            ),
        )
        for label, field in (("cores", "cores"), ("100 · PAS", "pas"))
    ]
    return Figure(
        name="preferences",
        title="Preferences, under the bursty excerpt",
        x_label="",
        panels=tuple(panels),
        alt="Cores and accuracy both fall as the preference moves from accuracy over balance to resources.",
    )


def latencies_figure(results: Results[IpaResult], evaluation: IpaEvaluation) -> Figure:
    """Fig. P3.15: distributions under the steady high load, first seed."""
    percent = tuple(float(share) for share in range(1, PERCENT_DRAWN + 1))

    def curve(name: str, policy: Policy) -> Series:
        result = results.of(IpaTrial(pipeline=name, workload="steady_high", policy=policy))[0]
        return Series(policy, tuple(latency_ms / 1000 for latency_ms in result.latencies_ms[:PERCENT_DRAWN]), percent)

    panels = tuple(
        Panel(
            y_label=f"{name},\n% below",
            series=tuple(curve(name, policy) for policy in DRAWN),
            marks=(Mark("deadline", "x", PIPELINES[name].slo_s),),
        )
        for name in evaluation.pipelines
    )
    return Figure(
        name="latencies",
        title="End-to-end latency, steady high load",
        x_label="latency, s",
        panels=panels,
        alt="Distributions of latency up to the 99th percentile for all policies, with each pipeline's deadline.",
    )


def forecasters_figure(results: Results[IpaResult], evaluation: IpaEvaluation) -> Figure:
    """Fig. P3.16: violations by forecaster, for quick and for slow starts."""
    names = evaluation.pipelines
    panels = [
        Panel(
            y_label=f"violations, %,\nstarts of {start_s:g} s",
            ticks=tuple(names),
            series=tuple(
                bars(p, [results.violations(foreseeing(name, p, start_s)) for name in names]) for p in PREDICTORS
            ),
        )
        for start_s in evaluation.starts_s
    ]
    return Figure(
        name="forecasters",
        title="Forecasters, under the bursty excerpt",
        x_label="",
        panels=tuple(panels),
        alt="Violations of the pipelines with the LSTM, reactive and oracle forecaster.",
    )
