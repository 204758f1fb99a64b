"""FA2's reproduction in figures: sizes of replicas (P1.2), the sweeps (P1.12, P1.14), moving load, fixed resources."""

from collections.abc import Sequence
from statistics import mean

from sloop.report.figures import Figure, Mark, Panel, Series
from sloop.reproduce.fa2.evaluation import PLANS, RATIOS, Evaluation, at, fixed, moving
from sloop.reproduce.fa2.offline import RATES, Sweep, throughputs
from sloop.reproduce.fa2.trials import SYSTEMS, Results

DRAWN = ("ds2", "inferline", "optimal", "fa2")
"""The last lies above the others."""


def of_sizes() -> Figure:
    """Four cores cut up in three ways."""
    series = tuple(
        Series(f"{name} cores", tuple(own for own, _ in points), tuple(rate for _, rate in points), "points")
        for name, points in throughputs().items()
    )
    return Figure(
        name="sizes",
        title="The same four cores, batches of 1 to 9",
        x_label="latency of a batch, ms",
        panels=(Panel(y_label="requests/s", series=series),),
        alt="Throughput over latency of 4 × 1, 2 × 2 and 1 × 4 cores: small replicas do most, large ones are quick.",
    )


def of_sweep(sweep: Sweep, name: str) -> Figure:
    """Replicas by rate, and how many more than FA2."""
    rates = tuple(map(float, RATES))
    totals = tuple(Series(planner, rates, tuple(map(float, sweep.totals[planner])), "steps") for planner in DRAWN)
    over = tuple(Series(planner, rates, tuple(sweep.over(planner)), "steps") for planner in ("inferline", "ds2"))
    said = ", ".join(f"{planner} {mean(sweep.over(planner)):.1f} % more on average" for planner in ("inferline", "ds2"))
    return Figure(
        name=name,
        title=f"{sweep.paths} paths, replicas of one {sweep.hardware.name}",
        x_label="requests/s",
        panels=(Panel(y_label="replicas", series=totals), Panel(y_label="more than FA2, %", series=over)),
        alt=f"Replicas at 6 to 60 requests a second; {said}.",
    )


def of_moving(evaluation: Evaluation, results: Results) -> Figure:
    """One seed of the load that jumps."""
    first = [(name, results.of(evaluation.of_moving(moving(name, "fluctuating")))[0]) for name in SYSTEMS]
    seconds = tuple(map(float, range(len(first[0][1].by_second))))
    arrivals = tuple(map(float, first[0][1].arrivals_by_second))
    return Figure(
        name="fluctuating",
        title=f"From 8 to 27 requests/s and back, seed {results.seeds[0]}",
        x_label="time, s",
        panels=(
            Panel(y_label="requests/s", series=(Series("arrivals", seconds, arrivals, "area"),)),
            Panel(
                y_label="replicas",
                series=tuple(Series(name, seconds, one.replicas_by_second, "steps") for name, one in first),
            ),
            Panel(
                y_label="violations, %",
                series=tuple(Series(name, seconds, _smooth(one.by_second)) for name, one in first),
            ),
        ),
        alt="Arrivals, replicas and violations: all miss after the step until new replicas have started.",
    )


def of_fixed(evaluation: Evaluation, results: Results) -> Figure:
    """Late and dropped on the same replicas."""
    trials = [evaluation.of_fixed(fixed(plan)) for plan in PLANS]
    late, dropped = (_bars(name, [results.each(trial, name) for trial in trials]) for name in ("late", "dropped"))
    said = "; ".join(
        f"{plan} {mean(results.each(trial, 'violations')):.1f} %" for plan, trial in zip(PLANS, trials, strict=True)
    )
    return Figure(
        name="fixed",
        title="50 requests/s on the optimum's 27 replicas",
        x_label="",
        panels=(Panel(y_label="requests, %", ticks=PLANS, series=(late, dropped)),),
        alt=f"Late and dropped requests: {said}.",
    )


def of_headroom(evaluation: Evaluation, results: Results) -> Figure:
    """What the head-room of the profile does."""
    found = [results.each(evaluation.of_steady(at(ratio)), "violations") for ratio in RATIOS]
    ticks = tuple(f"d/{ratio:g}" for ratio in RATIOS)
    return Figure(
        name="head-room",
        title="FA2's safety: three paths, 24 requests/s, by true mean service time",
        x_label="mean service time",
        panels=(
            Panel(
                y_label="violations, %",
                ticks=ticks,
                series=(_bars("violations", found),),
                marks=(Mark("1.5 %", "y", 1.5),),
            ),
        ),
        alt="; ".join(f"{tick} {mean(values):.2f} %" for tick, values in zip(ticks, found, strict=True)),
    )


def _bars(name: str, found: Sequence[Sequence[float]]) -> Series:
    places = tuple(map(float, range(len(found))))
    return Series(name, places, tuple(map(mean, found)), "bars", tuple(map(min, found)), tuple(map(max, found)))


def _smooth(values: Sequence[float], width: int = 5) -> tuple[float, ...]:
    """Means of the last `width` seconds, for the eye."""
    return tuple(mean(values[max(0, place + 1 - width) : place + 1]) for place in range(len(values)))
