"""Sponge's reproduction in figures: the link (Fig. P2.1), the fit (P2.3), the evaluation (P2.4), the knobs."""

from collections.abc import Sequence

from sloop.profile.fit import fit_amdahl
from sloop.report.figures import Figure, Mark, Panel, Series
from sloop.reproduce.sponge.ablations import KNOBS
from sloop.reproduce.sponge.evaluation import (
    FA2_COLD,
    FA2_WARM,
    MIDDLE,
    RATIOS,
    SPONGE,
    STATIC_8,
    STATIC_16,
    at,
)
from sloop.reproduce.sponge.offline import grid_points
from sloop.reproduce.sponge.trials import BYTES_PER_KB, SLO_MS, Results, Trial
from sloop.workload import Link

SHOWN = (STATIC_8, STATIC_16, *SPONGE.values(), FA2_COLD, FA2_WARM)
OVER_TIME = (SPONGE[0.9], STATIC_16, FA2_COLD)


def of_link(link: Link) -> Figure:
    """Bandwidth, and what it leaves of a second for three payloads."""
    seconds = tuple(float(second) for second in range(len(link.bytes_per_ms)))
    rates = tuple(rate * 1000 / 1e6 for rate in link.bytes_per_ms)
    budgets = tuple(
        Series(f"{kb} KB", seconds, tuple(map(float, link.remaining_ms(kb * BYTES_PER_KB, SLO_MS))))
        for kb in (100, 200, 500)
    )
    return Figure(
        name="link",
        title="The link, and what it leaves of one second",
        x_label="time, s",
        panels=(
            Panel(y_label="bandwidth, MB/s", series=(Series("bandwidth", seconds, rates, "area"),)),
            Panel(y_label="budget left, ms", series=budgets),
        ),
        alt=f"Bandwidth between {min(rates):.2f} and {max(rates):.2f} MB/s; the budgets left for 100, 200 and 500 KB.",
    )


def of_fit() -> Figure:
    """Predicted against measured, both axes in ms."""
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


def of_evaluation(results: Results) -> list[Figure]:
    """Bars for all policies and true service times; one seed over time."""
    return [_bars(results), _over_time(results)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bars(results: Results) -> Figure:
    places = tuple(map(float, range(len(SHOWN))))
    violations = []
    for ratio in RATIOS:
        found = [results.violations(at(policy, ratio)) for policy in SHOWN]
        violations.append(
            Series(
                f"mean = l/{ratio:g}",
                places,
                tuple(map(_mean, found)),
                "bars",
                tuple(map(min, found)),
                tuple(map(max, found)),
            )
        )
    cores = tuple(_mean(results.cores(at(policy, MIDDLE))) for policy in SHOWN)
    ticks = tuple(policy.policy for policy in SHOWN)
    said = "; ".join(
        f"{policy.policy} {_mean(results.violations(at(policy, MIDDLE))):.2f} %, {count:.1f} cores"
        for policy, count in zip(SHOWN, cores, strict=True)
    )
    return Figure(
        name="evaluation",
        title="20 requests/s of YOLOv5s over the link, 600 s",
        x_label="",
        panels=(
            Panel(y_label="violations, % (log)", ticks=ticks, series=tuple(violations), log=True),
            Panel(y_label="cores", ticks=ticks, series=(Series("cores", places, cores, "bars"),)),
        ),
        alt=f"Violations and cores at l/{MIDDLE:g}: {said}.",
    )


def _over_time(results: Results) -> Figure:
    first = [(policy.policy, results.of(at(policy, MIDDLE))[0]) for policy in OVER_TIME]
    seconds = tuple(map(float, range(len(first[0][1].by_second))))
    return Figure(
        name="over-time",
        title=f"Second by second, mean = l/{MIDDLE:g}, seed {results.seeds[0]}",
        x_label="time, s",
        panels=(
            Panel(
                y_label="violations, %",
                series=tuple(Series(name, seconds, outcome.by_second) for name, outcome in first),
            ),
            Panel(
                y_label="cores",
                series=tuple(Series(name, seconds, outcome.cores_by_second, "steps") for name, outcome in first),
            ),
        ),
        alt="Violations and cores per second of Sponge, static-16 and FA2: FA2 misses everything until its replicas "
        "have started, all three miss in the deepest fades.",
    )


def of_ablations(results: Results) -> list[Figure]:
    """One figure for every four knobs."""
    panels = [_knob(knob, settings, results) for knob, _, _, settings in KNOBS]
    return [
        Figure(
            name=f"knobs-{start // 4 + 1}",
            title="Violations by setting, %" if not start else "Violations by setting, %, continued",
            x_label="",
            panels=tuple(panels[start : start + 4]),
            alt="; ".join(panel.y_label for panel in panels[start : start + 4]),
        )
        for start in range(0, len(panels), 4)
    ]


def _knob(knob: str, settings: Sequence[tuple[str, Trial]], results: Results) -> Panel:
    found = [results.violations(at(trial, MIDDLE)) for _, trial in settings]
    series = Series(
        "violations",
        tuple(map(float, range(len(settings)))),
        tuple(map(_mean, found)),
        "bars",
        tuple(map(min, found)),
        tuple(map(max, found)),
    )
    return Panel(
        y_label=_two_lines(knob), ticks=tuple(name for name, _ in settings), series=(series,), marks=_level(found)
    )


def _level(found: Sequence[Sequence[float]]) -> tuple[Mark, ...]:
    """A line at the first setting, to see the others' distance from it."""
    return (Mark("the first setting", "y", _mean(found[0])),)


def _two_lines(text: str) -> str:
    words = text.split()
    half = len(words) // 2
    return "\n".join(filter(None, (" ".join(words[:half]), " ".join(words[half:]))))
