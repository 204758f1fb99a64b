"""AsyFunc reproduced: its models and shadows, its scaling policies without queues, and simulated runs beside BATCH.

Source: AsyFunc (submission to SoCC'23).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from sloop.api import listed
from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.asyfunc.experiments.offline import BODIES, RATES, body_of, candidates_of, left_after, offline_rows
from sloop_systems.asyfunc.experiments.planner import planner_rows, wanted_planner
from sloop_systems.asyfunc.experiments.results import (
    OWN,
    PREWARMS,
    QUICK_MODELS,
    SURGED,
    Found,
    ours,
    own,
    prewarmed,
    simulated_rows,
    surge,
    wanted,
)
from sloop_systems.asyfunc.experiments.runs import LEAD_S, MODELS, VIT, AsyFuncTrial, rates_of
from sloop_systems.comparison.harness import Progress, Reproduction, bars, by_second, run_trials, silent

PAPER: Final = "AsyFunc, submission to SoCC'23"


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates two models with one seed. `data` is not used: the recorded trace is not public."""
    trials = [*wanted(quick=quick), *wanted_planner(quick=quick)]
    results: Found = run_trials(trials, processes=processes, progress=progress)
    models = QUICK_MODELS if quick else (*MODELS, VIT)
    figures = (
        offloading_figure(),
        bodies_figure(),
        shadows_figure(),
        memory_figure(results, models),
        trade_figure(results),
        surge_figure(results),
    )
    assumed = (
        "latencies: computed from the multiply-adds and bytes of public architectures; none are published",
        "requests: generated with the hourly means of the Twitter trace; the recorded hour is not public any more",
        "12 nodes; mean demand of 2.09 bodies with 16 cores for each model: not published",
        "K, what a copy of a model is worth in cores: not published; rows are of 128 and of its multiply-adds in 10⁹",
        "service times: without noise, as in the publication's emulation",
    )
    rows = (*offline_rows(quick=quick), *simulated_rows(results, quick=quick), *planner_rows(results, quick=quick))
    return Reproduction(
        "asyfunc",
        PAPER,
        rows,
        figures,
        assumed,
        models=listed([*MODELS, VIT]),
        deadlines="of each model: what its largest batch takes on all cores",
    )


def offloading_figure() -> Figure:
    """Fig. 4: the extra latency of a larger batch that remains when a shadow takes the layers that grow most."""
    shares = [step / 20 for step in range(21)]
    left = tuple(left_after(share) for share in shares)
    series = Series("extra latency left", tuple(100 * share for share in shares), left)
    return Figure(
        name="offloading",
        title="EfficientNet-b5, four rows instead of two on two cores",
        x_label="layers in the shadow, %",
        panels=(Panel(y_label="extra latency left, %", series=(series,)),),
        alt=f"After a tenth of the layers {left[2]:.0f} % are left, after half of them {left[10]:.1f} %.",
    )


def bodies_figure() -> Figure:
    """The cores of a body by Algorithm 1, by rate and K."""
    chosen = [(model, weight) for model, weight in BODIES if model == "InceptionV3"]
    series = tuple(
        Series(
            f"K = {weight:g}",
            tuple(map(float, RATES)),
            tuple(float(body_of(model, weight, rate)[0]) for rate in RATES),
            "steps",
        )
        for model, weight in chosen
    )
    spoken = "; ".join(f"{each.name} {each.y[0]:.0f} to {each.y[-1]:.0f}" for each in series)
    return Figure(
        name="bodies",
        title="InceptionV3: cores of a body, by what a copy of the model is worth",
        x_label="requests/s",
        panels=(Panel(y_label="cores", series=series),),
        alt=f"Cores of a body at 1 and at 500 requests/s: {spoken}.",
    )


def shadows_figure() -> Figure:
    """The gain of a pair in capacity, by the weights of its shadow, for bodies with 8 cores."""
    series = []
    for model in (*MODELS, VIT):
        costs, found = candidates_of(model, 8, is_prefix=model == VIT)
        alone_rps = max(1e3 * batch / ms for batch, ms in enumerate(costs.alone_ms) if batch and ms <= costs.slo_ms)
        points = sorted(
            (each.shared.size_bytes / costs.size_whole_bytes, each.booked_rps / alone_rps) for each in found
        )
        series.append(
            Series(model, tuple(100 * share for share, _ in points), tuple(gain for _, gain in points), "points")
        )
    return Figure(
        name="shadows",
        title="A body with 8 cores and a shadow with 16",
        x_label="weights in the shadow, %",
        panels=(Panel(y_label="times the capacity", series=tuple(series), marks=(Mark("1.3", "y", 1.3),)),),
        alt="Capacity of a pair by the weights of the shadow: VGG19 gains most with 1 % of its weights.",
    )


def memory_figure(results: Found, models: tuple[str, ...]) -> Figure:
    """Figs. 10 to 13: memory, violations and utility by model and system."""
    systems: dict[str, Callable[[str], AsyFuncTrial]] = {
        "asyfunc": own,
        "without shadows": lambda model: own(model, "asyfunc-nolls"),
        "fixed batches": lambda model: own(model, "asyfunc-noadapt"),
        "mean rate on bodies": ours,
        "BATCH, k_b = 1.3": lambda model: prewarmed(model, "batch", 1.3),
        "BATCH⁺, k_b = 1.3": lambda model: prewarmed(model, "batch-plus", 1.3),
    }
    panels = tuple(
        Panel(
            y_label=label,
            ticks=models,
            series=tuple(
                bars(name, [results.each(of(model), field) for model in models]) for name, of in systems.items()
            ),
            log=field == "memory_mib",
        )
        for field, label in (
            ("memory_mib", "memory, MiB (log)"),
            ("violations", "violations, %"),
            ("utility", "utility, %"),
        )
    )
    spoken = "; ".join(
        f"{model} {results.mean(own(model), 'violations'):.1f} and "
        f"{results.mean(own(model, 'asyfunc-nolls'), 'violations'):.1f} %"
        for model in models
    )
    return Figure(
        name="systems",
        title="Bodies of two cores (K = 128): mean of all runs, smallest and largest",
        x_label="",
        panels=panels,
        alt=f"Violations with and without shadows: {spoken}.",
    )


def trade_figure(results: Found) -> Figure:
    """Violations over memory for BATCH with growing k_b, and AsyFunc's variants beside it."""
    model = "VGG19"
    series = []
    for system, prewarms in PREWARMS.items():
        trials = [prewarmed(model, system, prewarm) for prewarm in prewarms]
        series.append(
            Series(
                f"{system}, k_b = {prewarms[0]:g} to {prewarms[-1]:g}",
                tuple(results.mean(trial, "memory_mib") for trial in trials),
                tuple(results.mean(trial, "violations") for trial in trials),
            )
        )
    series += [_point(results, system, own(model, system)) for system in OWN]
    series.append(_point(results, "mean rate on bodies", ours(model)))
    missed, memory_mib = (results.mean(own(model), field) for field in ("violations", "memory_mib"))
    others = [prewarmed(model, "batch-plus", prewarm) for prewarm in (1.0, 1.3)]
    return Figure(
        name="trade",
        title=f"{model}: violations over memory, bodies of two cores",
        x_label="memory, MiB",
        panels=(Panel(y_label="violations, % (log)", series=tuple(series), log=True),),
        alt=f"AsyFunc {missed:.1f} % with {memory_mib:,.0f} MiB; "
        + " and ".join(
            f"BATCH⁺ {results.mean(each, 'violations'):.1f} % with {results.mean(each, 'memory_mib'):,.0f} MiB"
            for each in others
        ),
    )


def _point(results: Found, name: str, trial: AsyFuncTrial) -> Series:
    return Series(name, (results.mean(trial, "memory_mib"),), (results.mean(trial, "violations"),), "points")


def surge_figure(results: Found) -> Figure:
    """Fig. 6: one surge, seed 0."""
    runs = {system: results.of(surge(system))[0] for system in SURGED}
    load = rates_of(surge("asyfunc"))[LEAD_S:]
    area = Series("requests", tuple(map(float, range(len(load)))), tuple(load), "area")
    spoken = "; ".join(f"{system} {run.violations:.1f} % on {run.cores:.0f} cores" for system, run in runs.items())
    return Figure(
        name="surge",
        title="Twice the requests for five seconds, seed 0",
        x_label="time, s",
        panels=(
            Panel(y_label="requests/s", series=(area,)),
            Panel(
                y_label="cores",
                series=tuple(by_second(name, run.cores_by_second, steps=True) for name, run in runs.items()),
            ),
            Panel(
                y_label="violations, %",
                series=tuple(by_second(name, run.violations_by_second) for name, run in runs.items()),
            ),
        ),
        alt=f"Violations and mean cores: {spoken}.",
    )
