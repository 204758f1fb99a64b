"""FA2 reproduced: its sweeps and examples computed offline, its evaluation in the simulator.

Source: Razavi et al., FA2: Fast, Accurate Autoscaling for Serving Deep Learning Inference with SLA Guarantees, RTAS
2022 (chapter P1 of Razavi's dissertation, TU Darmstadt 2024).
"""

from pathlib import Path
from statistics import fmean
from typing import Final

from sloop.api import listed
from sloop.api.reports import Figure, Mark, Panel, Series
from sloop_systems.comparison.harness import Progress, Reproduction, Results, bars, by_second, run_trials, silent
from sloop_systems.fa2.experiments.application import CPU, GPU, ORDER, SOURCE, VISION, Hardware
from sloop_systems.fa2.experiments.offline import RATES, Sweep, offline_rows, swept, throughputs
from sloop_systems.fa2.experiments.runs import FULL, LONG_NOTE, QUICK, RATIOS, SYSTEMS, Fa2Evaluation, Fa2Result

PAPER: Final = "Razavi et al., FA2, RTAS 2022"


def reproduce(*, quick: bool, data: Path | None, processes: int = 0, progress: Progress = silent) -> Reproduction:
    """All rows; `quick` simulates one shorter seed and no long traces. `data` is not used."""
    evaluation = QUICK if quick else FULL
    results = run_trials(evaluation.wanted(), processes=processes, progress=progress)
    sweeps = (swept(CPU, VISION), swept(GPU, 6))
    rows = [*offline_rows(sweeps, quick=quick), *evaluation.rows(results)]
    figures = (
        sizes_figure(),
        sweep_figure(sweeps[0], "sweep-cores"),
        sweep_figure(sweeps[1], "sweep-slices"),
        moving_figure(evaluation, results),
        fixed_figure(evaluation, results),
        headroom_figure(evaluation, results),
    )
    assumed = (
        f"latencies of the ten models: fitted ({SOURCE})",
        "service times: normal, mean d/1.15, variation 4 %: assumed, as the specification recommends",
        "starting replicas do not slow down others: published as interference, not simulated",
        *(() if quick else (f"long traces: {LONG_NOTE}",)),
    )
    return Reproduction(
        "fa2",
        PAPER,
        tuple(rows),
        figures,
        assumed,
        models=f"{listed(ORDER)}, as the publication calls them",
        deadlines=f"of each path: {_ms(CPU)} on cores, {_ms(GPU)} on slices of GPUs",
    )


def _ms(hardware: Hardware) -> str:
    """The range of the deadlines of paths."""
    return f"{min(hardware.slos_ms):,} to {max(hardware.slos_ms):,} ms"


def sizes_figure() -> Figure:
    """Fig. P1.2: four cores divided in three ways."""
    series = tuple(
        Series(f"{name} cores", tuple(own for own, _ in points), tuple(rate for _, rate in points), "points")
        for name, points in throughputs().items()
    )
    return Figure(
        name="sizes",
        title="The same four cores, batches of 1 to 9",
        x_label="latency of a batch, ms",
        panels=(Panel(y_label="requests/s", series=series),),
        alt="Throughput over latency of 4 × 1, 2 × 2 and 1 × 4 cores: small replicas have the highest throughput, "
        "large ones the lowest latency.",
    )


def sweep_figure(sweep: Sweep, name: str) -> Figure:
    """Fig. P1.12 and P1.14: replicas by rate, and the surplus over FA2 in %."""
    rates = tuple(map(float, RATES))
    # FA2 comes last so that it is drawn above the others.
    totals = tuple(
        Series(planner, rates, tuple(map(float, sweep.totals[planner])), "steps")
        for planner in ("ds2", "inferline", "optimal", "fa2")
    )
    rivals = ("inferline", "ds2")
    over = tuple(Series(planner, rates, tuple(sweep.over(planner)), "steps") for planner in rivals)
    spoken = ", ".join(f"{planner} {fmean(sweep.over(planner)):.1f} % more on average" for planner in rivals)
    return Figure(
        name=name,
        title=f"{sweep.paths} paths, replicas of one {sweep.hardware.name}",
        x_label="requests/s",
        panels=(Panel(y_label="replicas", series=totals), Panel(y_label="more than FA2, %", series=over)),
        alt=f"Replicas at 6 to 60 requests a second; {spoken}.",
    )


def moving_figure(evaluation: Fa2Evaluation, results: Results[Fa2Result]) -> Figure:
    """One seed of the load that jumps; violations smoothed over 5 s."""
    runs = {name: results.of(evaluation.moving(name, "fluctuating"))[0] for name in SYSTEMS}
    load = runs["fa2"].arrivals_by_second
    area = Series("arrivals", tuple(map(float, range(len(load)))), tuple(map(float, load)), "area")
    replicas = tuple(by_second(name, run.cores_by_second, steps=True) for name, run in runs.items())
    violations = tuple(by_second(name, _smooth(run.violations_by_second)) for name, run in runs.items())
    return Figure(
        name="fluctuating",
        title="From 8 to 27 requests/s and back, seed 0",
        x_label="time, s",
        panels=(
            Panel(y_label="requests/s", series=(area,)),
            Panel(y_label="replicas", series=replicas),
            Panel(y_label="violations, %", series=violations),
        ),
        alt="Arrivals, replicas and violations: after the step, all miss deadlines until new replicas have started.",
    )


def fixed_figure(evaluation: Fa2Evaluation, results: Results[Fa2Result]) -> Figure:
    """Late and dropped requests of all planners on the same replicas."""
    trials = {plan: evaluation.fixed(plan) for plan in SYSTEMS}
    series = tuple(
        bars(field, [results.each(trial, field) for trial in trials.values()]) for field in ("late", "dropped")
    )
    spoken = "; ".join(f"{plan} {results.mean(trial, 'violations'):.1f} %" for plan, trial in trials.items())
    return Figure(
        name="fixed",
        title="50 requests/s on the optimum's 27 replicas",
        x_label="",
        panels=(Panel(y_label="requests, %", ticks=SYSTEMS, series=series),),
        alt=f"Late and dropped requests: {spoken}.",
    )


def headroom_figure(evaluation: Fa2Evaluation, results: Results[Fa2Result]) -> Figure:
    """Violations by the headroom of the profile."""
    found = {f"d/{ratio:g}": results.violations(evaluation.headroom(ratio)) for ratio in RATIOS}
    panel = Panel(
        y_label="violations, %",
        ticks=tuple(found),
        series=(bars("violations", list(found.values())),),
        marks=(Mark("1.4 %", "y", 1.4),),
    )
    return Figure(
        name="head-room",
        title="FA2's safety margin: three paths, 24 requests/s, by true mean service time",
        x_label="mean service time",
        panels=(panel,),
        alt="; ".join(f"{tick} {fmean(values):.2f} %" for tick, values in found.items()),
    )


def _smooth(values: tuple[float, ...], width: int = 5) -> list[float]:
    """Means of the last `width` seconds."""
    return [fmean(values[max(0, place + 1 - width) : place + 1]) for place in range(len(values))]
