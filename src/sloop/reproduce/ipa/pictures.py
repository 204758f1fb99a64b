"""IPA's reproduction in figures: over time (P3.8 to P3.12), deciding (P3.13), preferences (P3.14), latencies (P3.15),
forecasters (P3.16)."""

from collections.abc import Mapping, Sequence

from msgspec import structs

from sloop.report.figures import Figure, Mark, Panel, Series
from sloop.reproduce.ipa import knobs
from sloop.reproduce.ipa.pipelines import ARTEFACT
from sloop.reproduce.ipa.trials import (
    APPLY_S,
    INTERVAL_S,
    Policy,
    Results,
    Trial,
    Workload,
    excerpt_of,
)

DRAWN: tuple[Policy, ...] = ("fa2-low", "fa2-high", "rim", "ipa")
"""IPA last, on top of those it coincides with."""
LATENCY_SHOWN = 99
"""Percent of requests: the slowest of all would squeeze the others."""


def of_runs(results: Results, pipelines: Sequence[str], data: str) -> list[Figure]:
    """One figure for each pipeline: its workloads, one after another, of the first seed."""
    return [_over_time(results, name, data) for name in pipelines]


def _over_time(results: Results, name: str, data: str) -> Figure:
    runs = {
        policy: [
            results.of(Trial(pipeline=name, workload=workload, policy=policy))[0] for workload in results.workloads
        ]
        for policy in DRAWN
    }
    rates = [count for workload in results.workloads for count in _rates(workload, data)]
    minutes = tuple(place * INTERVAL_S / 60 for place in range(len(rates)))

    def joined(figure: str) -> tuple[Series, ...]:
        return tuple(
            Series(policy, minutes, tuple(value for run in own for value in getattr(run, figure)), "steps")
            for policy, own in runs.items()
        )

    lightest = [value for run in runs["fa2-low"] for value in run.pas_by_interval]
    above = tuple(
        structs.replace(series, y=tuple(own - low for own, low in zip(series.y, lightest, strict=True)))
        for series in joined("pas_by_interval")
    )
    each = len(rates) / len(results.workloads) * INTERVAL_S / 60
    ends = tuple(Mark("next workload", "x", each * place) for place in range(1, len(results.workloads)))
    told = ", ".join(w.replace("_", " ") for w in results.workloads)
    means = "; ".join(
        f"{policy} {sum(run.cores for run in own) / len(own):.1f} cores, "
        f"100 · PAS {sum(run.pas for run in own) / len(own):.1f}"
        for policy, own in runs.items()
    )
    return Figure(
        name=f"over-time-{name}",
        title=f"{name}: {told}; seed {results.seeds[0]}",
        x_label="time, minutes",
        panels=(
            Panel(
                y_label="busiest second,\nrequests/s",
                series=(Series("rate", minutes, tuple(rates), "area"),),
                marks=ends,
            ),
            Panel(y_label="cores", series=joined("cores_by_interval"), marks=ends),
            Panel(y_label="100 · PAS\nabove FA2-low's", series=above, marks=ends),
            Panel(y_label="violations, %", series=joined("violations_by_interval"), marks=ends),
        ),
        alt=f"Rate, cores, accuracy and violations of {name}, workload after workload. Means: {means}.",
    )


def _rates(workload: Workload, data: str) -> list[float]:
    counts = excerpt_of(workload, data).counts
    return [float(max(counts[at : at + INTERVAL_S])) for at in range(0, len(counts), INTERVAL_S)]


def of_deciding(sizes: Mapping[int, float]) -> Figure:
    """How long a decision takes as pipelines grow."""
    places = tuple(map(float, sizes))
    taken = tuple(sizes.values())
    return Figure(
        name="deciding",
        title="A decision's time, n stages of n variants",
        x_label="n",
        panels=(
            Panel(
                y_label="ms (log)",
                series=(Series("label setting, slowest of 3", places, taken),),
                marks=(Mark("published: less than 2 s", "y", 2000.0),),
                log=True,
            ),
        ),
        alt=f"From {taken[0]:.2f} ms for one stage of one variant to {taken[-1]:.0f} ms for ten of ten.",
    )


def of_preferences(results: Results, pipelines: Sequence[str]) -> Figure:
    """Cores and accuracy by what is preferred."""
    places = tuple(map(float, range(len(pipelines))))
    panels = []
    for label, figure in (("cores", "cores"), ("100 · PAS", "pas")):
        series = []
        for place, preferred in enumerate(knobs.PREFERRED):
            found = [
                [getattr(outcome, figure) for outcome in results.of(knobs.preferring(name, place))]
                for name in pipelines
            ]
            series.append(_bars(preferred, places, found))
        panels.append(Panel(y_label=label, ticks=tuple(pipelines), series=tuple(series)))
    return Figure(
        name="preferences",
        title="What is preferred, under the bursty excerpt",
        x_label="",
        panels=tuple(panels),
        alt="Cores and accuracy both fall from accuracy to balance to resources preferred.",
    )


def of_latencies(results: Results, pipelines: Sequence[str]) -> Figure:
    """Distributions under the steady high load."""
    percent = tuple(float(share) for share in range(1, LATENCY_SHOWN + 1))
    panels = tuple(
        Panel(
            y_label=f"{name},\n% below",
            series=tuple(Series(policy, _first(results, name, policy), percent) for policy in DRAWN),
            marks=(Mark("deadline", "x", ARTEFACT[name].slo_s),),
        )
        for name in pipelines
    )
    return Figure(
        name="latencies",
        title="End-to-end latency, steady high load",
        x_label="latency, s",
        panels=panels,
        alt="Distributions of latency up to the 99th percentile for all policies, with each pipeline's deadline.",
    )


def _first(results: Results, name: str, policy: Policy) -> tuple[float, ...]:
    trial = Trial(pipeline=name, workload="steady_high", policy=policy)
    return tuple(latency_ms / 1000 for latency_ms in results.of(trial)[0].latencies_ms[:LATENCY_SHOWN])


def of_forecasters(results: Results, pipelines: Sequence[str], *, quick: bool) -> Figure:
    """Violations by forecaster, for quick and for slow starts."""
    places = tuple(map(float, range(len(pipelines))))
    panels = []
    for start_s in (APPLY_S,) if quick else (APPLY_S, knobs.SLOW_S):
        series = []
        for predictor in knobs.PREDICTORS:
            found = [
                [outcome.violations for outcome in results.of(knobs.foreseeing(name, predictor, start_s))]
                for name in pipelines
            ]
            series.append(_bars(predictor, places, found))
        panels.append(
            Panel(y_label=f"violations, %,\nstarts of {start_s:g} s", ticks=tuple(pipelines), series=tuple(series))
        )
    return Figure(
        name="forecasters",
        title="Forecasters, under the bursty excerpt",
        x_label="",
        panels=tuple(panels),
        alt="Violations of five pipelines with the LSTM, reactive and oracle forecaster.",
    )


def _bars(name: str, places: tuple[float, ...], found: Sequence[Sequence[float]]) -> Series:
    means = tuple(sum(values) / len(values) for values in found)
    return Series(name, places, means, "bars", tuple(map(min, found)), tuple(map(max, found)))
