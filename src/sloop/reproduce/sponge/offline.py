"""What of Sponge can be checked without a simulation: the link, Table 1, the fit, Algorithm 2, FA2's rule. All exact.

Experiments are named as in the specification: S0 the link, S1 Table 1 (P2.1), S2 the performance model. Figures of the
publication stand here beside the arithmetic that should give them. Source: Razavi et al., Sponge (EuroMLSys 2024).
"""

import ast
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Final

from sloop.errors import InputError
from sloop.profile.estimate import Estimate
from sloop.profile.fit import Point, fit_amdahl
from sloop.profile.forms import Amdahl
from sloop.profile.profile import Profile
from sloop.profile.published import RESNET18_HUMAN, RESNET_T, RESNET_T_CELLS, YOLOV5S_S
from sloop.reproduce.rows import Claim, Row, bounded, contradicted, equals
from sloop.reproduce.sponge.trials import BYTES_PER_KB, PAYLOAD_KB, RATE_RPS, SLO_MS
from sloop.solvers import fa2_single, sponge
from sloop.solvers.sponge import Grid
from sloop.units import NS_PER_MS
from sloop.workload import Link

BATCH_MAX = CORES_MAX = 16

LINK: Final = "experiments/runner/notebooks/report_bus_0001.log"
BUDGETS: Final = "experiments/runner/notebooks/slas.csv"
FA2_RUN: Final = "notebook_outputs/comparison.txt"
"""In the folder of the public artefact: the link, the remaining SLOs, what a notebook printed of an FA2 run."""

SYNTHETIC: Final = "synthetic link: the recorded one is not at hand"

ON_THE_WAY_MS: Final = {
    100: (31, 36, 77, 116, 237),
    200: (61, 72, 154, 231, 474),
    284: (87, 103, 219, 329, 673),
    500: (153, 181, 386, 579, 1185),
}
"""Derived from the recorded link, per payload in KB: median, mean, p95, p99, largest time on the way in ms."""

TABLE_1: Final = (
    (18, 6, 108, 6),
    (20, 5, 100, 5),
    (40, 3, 120, 6),
    (80, 2, 160, 8),
    (108, 1, 108, 8),
    (128, 1, 128, 8),
)
"""As printed, beside `RESNET_T_CELLS`: requests/s of one instance, instances, their requests/s, their cores."""

WHOLE_MS: Final = Amdahl(gamma=18.290, epsilon=45.469, delta=4.488, eta=1.046)
"""The artefact's fit: to latencies cut to whole ms."""

PAIRS: Final[tuple[tuple[str, float, int, float, tuple[int, int] | None], ...]] = (
    *(("ResNet-T", 1.0, 20, way, (1, b)) for way, b in ((0, 2), (50, 2), (100, 4), (200, 10))),
    *(("ResNet-T", 1.0, 20, way, (2, b)) for way, b in ((300, 2), (400, 2), (500, 4))),
    *(("ResNet-T", 1.0, 20, way, (3, b)) for way, b in ((600, 3), (675, 7), (700, 10))),
    ("ResNet-T", 1.0, 20, 800, (5, 10)),
    ("ResNet-T", 1.0, 20, 900, (15, 10)),
    ("artefact", 1.0, 100, 50, (5, 10)),
    *(("artefact", 1.0, 20, way, (1, b)) for way, b in ((0, 2), (200, 4), (400, 10))),
    *(("artefact", 1.0, 20, way, (2, b)) for way, b in ((500, 3), (600, 4), (675, 10))),
    ("artefact", 1.0, 20, 700, (3, 4)),
    ("artefact", 1.0, 20, 800, (5, 10)),
    ("artefact", 1.0, 20, 900, None),
    ("artefact", 0.9, 20, 300, (1, 10)),
    ("artefact", 0.9, 20, 400, (2, 3)),
    ("artefact", 0.9, 20, 600, (3, 4)),
    ("artefact", 0.9, 20, 700, (5, 10)),
    ("artefact", 0.9, 20, 800, None),
)
"""Profile, margin, N, cl_max in ms, and Algorithm 2's (cores, batch); the one for N = 100 is the artefact's output."""

YOLO_WHOLE_MS: Final = (136, 302, 468, 633, 799, 965)
"""The artefact's l(b, 1) of YOLOv5s for b = 1, 2, …"""

INFEASIBLE_SECONDS: Final = {0.9: 42, 0.95: 19, 1.0: 9}
"""By margin, of the 600 seconds of the recorded link."""


def rows(link: Link, artefact: Path | None) -> list[Row]:
    """Everything here; `artefact` is the folder of the public artefact, None where it is not to be had."""
    made = [
        *_link(link, recorded=artefact is not None),
        *_table_1(),
        *_fit(),
        *_algorithm(),
        *_infeasible(link, artefact),
    ]
    return made + (_published_budgets(link, artefact) + _fa2(artefact) if artefact else [])


def grid_of(latency: Callable[[int, float], float]) -> Grid:
    """A latency form as the solver's grid of 16 × 16."""
    cores = [float(count) for count in range(1, CORES_MAX + 1)]
    costs = [[0, *(round(latency(b, c) * NS_PER_MS) for b in range(1, BATCH_MAX + 1))] for c in cores]
    return sponge.grid_of(costs, cores, BATCH_MAX)


def on_the_way_ms(link: Link, payload_kb: float) -> list[float]:
    """For each of the link's seconds."""
    return link.elapsed_ms(round(payload_kb * BYTES_PER_KB))


def _link(link: Link, *, recorded: bool) -> list[Row]:
    """S0. A synthetic link can show the shape only."""
    said = "" if recorded else SYNTHETIC
    rates = [rate * 1000 / 1e6 for rate in link.bytes_per_ms]
    slowest, fastest = min(rates), max(rates)
    made = [
        equals(
            Claim(experiment="S0", metric="slowest second", unit="MB/s", paper=0.5, note=said),
            [slowest],
            within=0.1,
            shape=slowest < 1,
        ),
        equals(
            Claim(experiment="S0", metric="fastest second", unit="MB/s", paper=7.0, note=said),
            [fastest],
            within=0.1,
            shape=fastest > 5,
        ),
        bounded(
            Claim(experiment="S0", metric="least budget left, 500 KB", unit="ms", paper=0.0, note=said),
            [min(link.remaining_ms(500 * BYTES_PER_KB, SLO_MS))],
            at_most=0,
        ),
    ]
    for payload_kb, expected in ON_THE_WAY_MS.items():
        ordered = sorted(on_the_way_ms(link, payload_kb))
        found = (median(ordered), mean(ordered), _nearest(ordered, 0.95), _nearest(ordered, 0.99), ordered[-1])
        for name, value, figure in zip(("median", "mean", "p95", "p99", "longest"), found, expected, strict=True):
            claim = Claim(
                experiment="S0", metric=f"on the way, {payload_kb} KB, {name}", unit="ms", derived=figure, note=said
            )
            made.append(equals(claim, [value], within=max(1.0, 0.02 * figure), shape=0.5 < value / figure < 2))
    return made


def _nearest(ordered: Sequence[float], quantile: float) -> float:
    """The linearly interpolated quantile, as spreadsheets and notebooks take it."""
    place = quantile * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _published_budgets(link: Link, artefact: Path) -> list[Row]:
    """The remaining SLOs that the authors derived, all 3 × 600."""
    equal = count = 0
    for line in (artefact / BUDGETS).read_text().splitlines()[1:]:
        size, *published = line.split(",")
        payload_kb = int(re.sub(r"\D", "", size))
        ours = link.remaining_ms(payload_kb * BYTES_PER_KB, SLO_MS)
        for own, theirs in zip(ours, published, strict=False):
            count += 1
            equal += own == round(float(theirs) * 1000)
    claim = Claim(experiment="S0", metric="remaining SLOs equal to the published", unit="of 1800", paper=count)
    return [equals(claim, [equal], within=0)]


def _table_1() -> list[Row]:
    """S1: throughput is counted in whole batches a second, ⌊1000/l⌋ · b."""
    found = []
    for batch, cores, latency_ms in RESNET_T_CELLS:
        one = batch * math.floor(SLO_MS / latency_ms)
        count = math.ceil(100 / one)
        found.append((one, count, one * count, round(cores * count)))
    columns = ("requests/s of one instance", "instances", "requests/s in all", "cores in all")
    made = [
        equals(
            Claim(experiment="S1", metric=f"Table 1, {name}", unit="cells of 6", paper=6),
            [sum(ours[column] == printed[column] for ours, printed in zip(found, TABLE_1, strict=True))],
            within=0,
        )
        for column, name in enumerate(columns)
    ]
    rps = 2 * math.floor((SLO_MS - 40) / 97)
    made.append(
        equals(
            Claim(
                experiment="S1",
                metric="one-core instances at batch 2 after a 40 ms upload",
                unit="instances",
                paper=6,
                note=f"{rps} requests/s each",
            ),
            [math.ceil(100 / rps)],
            within=0,
        )
    )
    half = math.floor(SLO_MS / 2 / 55)
    made.append(
        contradicted(
            Claim(
                experiment="S1",
                metric="one-core solutions exist when half of the SLO is upload",
                unit="0 or 1",
                paper=0,
                note=f"in 500 ms an instance serves {half} requests/s; {math.ceil(100 / max(1, half))} instances do",
            ),
            [float(half > 0)],
            rival=float(math.floor(500 / RESNET_T_CELLS[0][2]) > 0),
        )
    )
    return [*made, _motivation()]


def _motivation() -> Row:
    """Eight cores, batch 4, 37 ms, 600 ms of upload at 100 requests/s: holds in a steady flow, not for a burst."""
    grid = sponge.grid_of([[0, *(round(37 * NS_PER_MS) for _ in range(4))]], [8.0], 4)
    steady = bool((sponge.holds_steady(grid, 100, 600, SLO_MS) & sponge.keeps_up(grid, 100))[0, 3])
    burst = bool(sponge.holds_burst(grid, 100, 600, SLO_MS)[0, 3])
    return contradicted(
        Claim(
            experiment="S1",
            metric="8 cores, batch 4 feasible at 600 ms upload by Algorithm 2",
            unit="0 or 1",
            paper=1,
            note=f"by steady flow {int(steady)}, by Algorithm 2, which plans for a burst, {int(burst)}",
        ),
        [float(burst)],
        rival=float(math.ceil(100 / 4) * 37 + 600 < SLO_MS),
    )


def grid_points() -> list[Point]:
    """The artefact's 30 measured cells."""
    profile = RESNET18_HUMAN
    return [
        Point(batch, float(cores), profile.latency_ms.latency_ms(batch, cores))
        for batch in (1, 2, 4, 8, 16)
        for cores in (1, 2, 4, 8, 16, 32)
    ]


def _fit() -> list[Row]:
    """S2: the publication calls the fit realistic and prints no error."""
    points = grid_points()
    absolute, relative = fit_amdahl(points, relative=False), fit_amdahl(points, relative=True)
    small = fit_amdahl([p for p in points if p.batch <= 8 and p.cores <= 16], relative=False)
    cells = [Point(batch, float(cores), latency_ms) for batch, cores, latency_ms in RESNET_T_CELLS]

    def claim(metric: str, unit: str, derived: float) -> Claim:
        return Claim(experiment="S2", metric=metric, unit=unit, derived=derived)

    return [
        equals(claim("R², ResNet18, absolute fit", "", 0.969), [absolute.r2], within=0.001, shape=absolute.r2 > 0.9),
        equals(
            claim("mean error, ResNet18, relative fit", "%", 7.75),
            [100 * relative.mape],
            within=0.1,
            shape=relative.mape < 0.1,
        ),
        equals(
            claim("largest error, ResNet18, relative fit", "%", 18.3),
            [100 * relative.max_error],
            within=0.2,
            shape=relative.max_error < 0.25,
        ),
        equals(claim("R², batches ≤ 8, cores ≤ 16", "", 0.998), [small.r2], within=0.001, shape=small.r2 > 0.95),
        equals(
            claim("mean error, Table 1, relative fit", "%", 3.0),
            [100 * fit_amdahl(cells, relative=True).mape],
            within=0.5,
            shape=True,
        ),
    ]


def _algorithm() -> list[Row]:
    """Algorithm 2 on two profiles, without the throughput test it does not have."""
    grids = {"ResNet-T": grid_of(RESNET_T.latency_ms.latency_ms), "artefact": grid_of(WHOLE_MS.latency_ms)}
    right = 0
    for profile, margin, count, way_ms, expected in PAIRS:
        found = sponge.cheapest(grids[profile], sponge.holds_burst(grids[profile], count, way_ms, margin * SLO_MS))
        right += (None if found is None else (int(found.cores), found.batch)) == expected
    recorded = sponge.cheapest(grids["artefact"], sponge.holds_burst(grids["artefact"], 100, 50, SLO_MS))
    made = [
        equals(
            Claim(
                experiment="S2",
                metric="Algorithm 2: (cores, batch) as derived",
                unit=f"of {len(PAIRS)}",
                derived=len(PAIRS),
            ),
            [right],
            within=0,
        )
    ]
    names = ("cores", "batch", "whole ms of a batch")
    if recorded is not None:
        values = (recorded.cores, recorded.batch, math.floor(recorded.latency_ms))
        for name, value, paper in zip(names, values, (5, 10, 91), strict=True):
            claim = Claim(
                experiment="S2", metric=f"Algorithm 2, 100 requests, 50 ms on the way: {name}", unit="", paper=paper
            )
            made.append(equals(claim, [value], within=0))
    return made


def infeasible_seconds(link: Link, profile: Profile, margin: float) -> list[int]:
    """Seconds in which no setting serves 20 requests at once."""
    belief = Estimate(profile, correct=False)
    grid = sponge.grid_of([belief.costs_ns(float(c)) for c in range(1, 17)], [float(c) for c in range(1, 17)], 16)
    keeps_up = sponge.keeps_up(grid, RATE_RPS)
    return [
        second
        for second, way_ms in enumerate(on_the_way_ms(link, PAYLOAD_KB))
        if not (keeps_up & sponge.holds_burst(grid, RATE_RPS, way_ms, margin * SLO_MS)).any()
    ]


def _infeasible(link: Link, artefact: Path | None) -> list[Row]:
    """Check 10."""
    said = "" if artefact else SYNTHETIC
    made = []
    for margin, expected in INFEASIBLE_SECONDS.items():
        found = len(infeasible_seconds(link, YOLOV5S_S, margin))
        claim = Claim(
            experiment="check 10", metric=f"seconds without a feasible plan, margin {margin:g}", unit="of 600",
            derived=expected, note=said,
        )  # fmt: skip
        made.append(equals(claim, [found], within=0, shape=0 < found < 100))
    return made


def _fa2(artefact: Path) -> list[Row]:
    """FA2's rule on the remaining SLOs of the recorded run, against the instances that run had."""
    if not (artefact / FA2_RUN).exists():
        return []
    text = (artefact / FA2_RUN).read_text()
    budgets_ms, recorded = _list(text, "sla"), _list(text, "replicas")
    count = equal = 0
    kept = 1
    for left_ms, replicas in zip(budgets_ms, recorded, strict=False):
        if left_ms:
            answer = fa2_single.solve(
                YOLO_WHOLE_MS,
                RATE_RPS,
                way_max_ms=SLO_MS - left_ms,
                limit_ms=0.9 * SLO_MS,
                slo_ms=SLO_MS,
                replicas_max=16,
            )
            kept = answer.replicas if answer else kept
        count += 1
        equal += kept == replicas
    claim = Claim(experiment="check 3", metric="FA2's instances, second by second", unit=f"of {count}", paper=count)
    return [equals(claim, [equal], within=0)]


def _list(text: str, name: str) -> list[float]:
    """A list of numbers in a notebook's printed output."""
    found = re.search(rf"'{name}': (\[[^\]]*\])", text)
    if found is None:
        raise InputError(f"no list {name!r}", where=FA2_RUN, help="use the artefact's own notebook outputs")
    return [float(value) for value in ast.literal_eval(found[1])]
