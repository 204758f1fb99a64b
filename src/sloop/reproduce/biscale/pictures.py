"""Biscale's reproduction in figures: the evaluation's bars, each pipeline by seconds, the motivation, drop rules."""

from collections.abc import Sequence

from sloop.report.figures import Figure, Mark, Panel, Series
from sloop.reproduce.biscale.evaluation import GROUP, KINDS, NAMES, PUBLISHED, mean, three
from sloop.reproduce.biscale.sensitivity import FIRST_S, JUMP_S, RULES, burst, dropping
from sloop.reproduce.biscale.trials import Outcome, Results, excerpt_of

BAR = 0.27
"""Of a group of three, in units of the distance between groups."""
LABELS = {"biscale": "Biscale", "fa2": "FA2", "vertical": "vertical-only"}


def figures(results: Results, data: str) -> list[Figure]:
    """All of them; `data` is where the trace was read from."""
    return [
        _bars(results),
        *(_over_time(results, name, data) for name in NAMES),
        _motivation(results),
        _dropping(results),
    ]


def _bars(results: Results) -> Figure:
    places = tuple(map(float, range(len(NAMES))))
    violations, cores = [], []
    for index, kind in enumerate(KINDS):
        found = [results.violations(three(name, "max10", "predictive")[index], GROUP) for name in NAMES]
        held = [results.cores(three(name, "max10", "predictive")[index], GROUP) for name in NAMES]
        lows, highs = tuple(map(min, found)), tuple(map(max, found))
        violations.append(Series(LABELS[kind], places, tuple(map(mean, found)), "bars", lows, highs))
        cores.append(Series(LABELS[kind], places, tuple(map(mean, held)), "bars"))
    pairs = [(place + shift * BAR, known) for place, name in enumerate(NAMES) for shift, known in _printed(name)]
    printed = Series("as printed", tuple(x for x, _ in pairs), tuple(y for _, y in pairs), "points")
    said = "; ".join(
        f"{name}: " + ", ".join(f"{LABELS[k]} {v.y[at]:.2f} %" for k, v in zip(KINDS, violations, strict=True))
        for at, name in enumerate(NAMES)
    )
    return Figure(
        name="evaluation",
        title="Violations and cores in service, 660 s of the Twitter trace",
        x_label="",
        panels=(
            Panel(y_label="violations, % (log)", ticks=NAMES, series=(*violations, printed), log=True),
            Panel(y_label="cores", ticks=NAMES, series=tuple(cores)),
        ),
        alt=f"Violations with the predictive drop rule and the reference of ten seconds. {said}.",
    )


def _printed(name: str) -> list[tuple[int, float]]:
    """Published violations, by the place of their bar in its group."""
    return [(index - 1, known) for index, known in enumerate(PUBLISHED[name])]


def _steps(name: str, values: Sequence[float]) -> Series:
    return Series(name, tuple(map(float, range(len(values)))), tuple(values), "steps")


def _over_time(results: Results, name: str, data: str) -> Figure:
    found = {LABELS[k]: results.of(t)[0] for k, t in zip(KINDS, three(name, "max10", "predictive"), strict=True)}
    counts = tuple(map(float, excerpt_of(name, data).counts))
    jump = (Mark("the jump", "x", float(JUMP_S)),)
    return Figure(
        name=f"over-time-{name}",
        title=f"The {name} pipeline second by second",
        x_label="time, s",
        panels=(
            Panel(
                y_label="requests/s",
                series=(Series("requests", tuple(map(float, range(len(counts)))), counts, "area"),),
            ),
            Panel(
                y_label="cores",
                series=tuple(_steps(label, outcome.cores_by_second) for label, outcome in found.items()),
                marks=jump,
            ),
            Panel(y_label="violations, %", series=tuple(_line(label, outcome) for label, outcome in found.items())),
            Panel(
                y_label="longest latency, ms",
                series=tuple(_steps(label, outcome.worst_by_second) for label, outcome in found.items()),
            ),
        ),
        alt=f"Requests, cores, violations and the longest latency per second of the {name} pipeline: Biscale's cores "
        "rise at the jump and fall when small replicas are there, FA2's follow a cold start later, vertical-only's "
        "stay at their limit.",
    )


def _line(label: str, outcome: Outcome) -> Series:
    return Series(label, tuple(map(float, range(len(outcome.by_second)))), outcome.by_second)


def _motivation(results: Results) -> Figure:
    panels = []
    for workload, kinds in (("burst", ("biscale", "fa2")), ("plateau", ("biscale",))):
        found = {LABELS[kind]: results.of(burst(kind, workload))[0] for kind in kinds}
        panels.append(
            Panel(
                y_label=f"cores, {workload}",
                series=tuple(_steps(label, outcome.cores_by_second) for label, outcome in found.items()),
            )
        )
        panels.append(
            Panel(
                y_label=f"violations, {workload}, %",
                series=tuple(_line(label, outcome) for label, outcome in found.items()),
            )
        )
    return Figure(
        name="motivation",
        title="20, 120, 20 requests/s: a burst of 5 s, and one of 40 s",
        x_label="time, s",
        panels=tuple(panels),
        alt="Cores and violations: what is resized in place meets the burst, what is started comes when it is over; "
        "in the longer one eight cores become five.",
    )


def _dropping(results: Results) -> Figure:
    places = tuple(map(float, range(len(RULES))))
    series = []
    for kind in KINDS:
        found = [results.violations(dropping(kind, rule)) for rule in RULES]
        lows, highs = tuple(map(min, found)), tuple(map(max, found))
        series.append(Series(LABELS[kind], places, tuple(map(mean, found)), "bars", lows, highs))
    return Figure(
        name="dropping",
        title=f"When to give up, the video pipeline's first {FIRST_S} s",
        x_label="",
        panels=(Panel(y_label="violations, %", ticks=("1 × SLO", "3 × SLO", "never"), series=tuple(series)),),
        alt="Violations by drop rule: giving up at once the SLO is best for all three.",
    )
