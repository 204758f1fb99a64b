"""Sponge's results without simulation: the link, the fit, Algorithm 2, FA2's rule. All are exact.

Experiments are named as in the specification: S0 the link, S1 the motivation (Table P2.1), S2 the performance model.
Source: Razavi et al., Sponge (EuroMLSys 2024), and its public artefact.
"""

import ast
import math
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Final

from sloop.api import NS_PER_MS, InputError, interpolated_quantile
from sloop.api.experiments import Link
from sloop.api.profiles import (
    RESNET18_HUMAN,
    RESNET_T,
    RESNET_T_CELLS,
    YOLOV5S_S,
    Amdahl,
    Estimate,
    Point,
    Profile,
    fit_amdahl,
)
from sloop_systems.comparison.rows import Claim, Row, compare, contradicted
from sloop_systems.sponge import solver as sponge
from sloop_systems.sponge.experiments.runs import BYTES_PER_KB, PAYLOAD_KB, RATE_RPS, SLO_MS
from sloop_systems.sponge.solver import SpongeGrid

BATCH_MAX = CORES_MAX = 16

LINK: Final = "experiments/runner/notebooks/report_bus_0001.log"
BUDGETS: Final = "experiments/runner/notebooks/slas.csv"
FA2_RUN: Final = "notebook_outputs/comparison.txt"
"""Files of the public artefact: the link, the remaining SLOs, and a notebook's printed output of an FA2 run."""

SYNTHETIC: Final = "with a synthetic link, because the recorded one is missing"

UPLOAD_MS: Final = {
    100: (31, 36, 77, 116, 237),
    200: (61, 72, 154, 231, 474),
    284: (87, 103, 219, 329, 673),
    500: (153, 181, 386, 579, 1185),
}
"""Derived from the recorded link, per payload in KB: median, mean, p95, p99, longest upload in ms."""

WHOLE_MS: Final = Amdahl(gamma=18.290, epsilon=45.469, delta=4.488, eta=1.046)
"""The artefact's fit, to latencies truncated to whole ms."""

PAIRS: Final[tuple[tuple[str, float, int, float, tuple[int, int] | None], ...]] = (
    *(("ResNet-T", 1.0, 20, upload, (1, b)) for upload, b in ((0, 2), (50, 2), (100, 4), (200, 10))),
    *(("ResNet-T", 1.0, 20, upload, (2, b)) for upload, b in ((300, 2), (400, 2), (500, 4))),
    *(("ResNet-T", 1.0, 20, upload, (3, b)) for upload, b in ((600, 3), (675, 7), (700, 10))),
    ("ResNet-T", 1.0, 20, 800, (5, 10)),
    ("ResNet-T", 1.0, 20, 900, (15, 10)),
    ("artefact", 1.0, 100, 50, (5, 10)),
    *(("artefact", 1.0, 20, upload, (1, b)) for upload, b in ((0, 2), (200, 4), (400, 10))),
    *(("artefact", 1.0, 20, upload, (2, b)) for upload, b in ((500, 3), (600, 4), (675, 10))),
    ("artefact", 1.0, 20, 700, (3, 4)),
    ("artefact", 1.0, 20, 800, (5, 10)),
    ("artefact", 1.0, 20, 900, None),
    ("artefact", 0.9, 20, 300, (1, 10)),
    ("artefact", 0.9, 20, 400, (2, 3)),
    ("artefact", 0.9, 20, 600, (3, 4)),
    ("artefact", 0.9, 20, 700, (5, 10)),
    ("artefact", 0.9, 20, 800, None),
)
"""Profile, margin, number of requests, longest upload in ms, and Algorithm 2's (cores, batch); the result for 100
requests is printed in the artefact."""

YOLO_WHOLE_MS: Final = (136, 302, 468, 633, 799, 965)
"""The artefact's l(b, 1) of YOLOv5s in ms, for b = 1, 2, …"""

INFEASIBLE_SECONDS: Final = {0.9: 42, 0.95: 19, 1.0: 9}
"""By margin, how many of the recorded link's 600 seconds have no feasible plan; derived."""


def offline_rows(link: Link, artefact: Path | None) -> list[Row]:
    """All rows of this module; `artefact` is the folder of the public artefact, None if it is not there."""
    rows = [*_link(link, recorded=artefact is not None), _motivation(), *_fit(), *_algorithm()]
    rows += _infeasible(link, recorded=artefact is not None)
    return rows + (_published_budgets(link, artefact) + _fa2(artefact) if artefact else [])


def _exact(
    experiment: str, metric: str, unit: str, *, paper: float | None = None, derived: float | None = None, note: str = ""
) -> Claim:
    return Claim(experiment, metric, unit, known="exact", paper=paper, derived=derived, note=note)


def grid_of(latency: Callable[[int, float], float]) -> SpongeGrid:
    """A latency form as the solver's grid of 16 × 16."""
    cores = [float(count) for count in range(1, CORES_MAX + 1)]
    costs = [[0, *(round(latency(b, c) * NS_PER_MS) for b in range(1, BATCH_MAX + 1))] for c in cores]
    return sponge.grid_of(costs, cores, BATCH_MAX)


def upload_ms(link: Link, payload_kb: float) -> list[float]:
    """The duration of an upload in each of the link's seconds."""
    return link.elapsed_ms(round(payload_kb * BYTES_PER_KB))


def _link(link: Link, *, recorded: bool) -> list[Row]:
    """S0: bandwidth and upload times. With a synthetic link, the verdict is `shape` at best."""
    note = "" if recorded else SYNTHETIC
    rates = [rate * 1000 / 1e6 for rate in link.bytes_per_ms]
    rows = []
    for name, rate, paper in (("slowest", min(rates), 0.5), ("fastest", max(rates), 7.0)):
        claim = Claim("S0 link", f"{name} second", "MB/s", known="plot", paper=paper, note=note, computed=True)
        rows.append(compare(claim, [rate], within=0.1, similar=True))
    for payload_kb, expected in UPLOAD_MS.items():
        ordered = sorted(upload_ms(link, payload_kb))
        found = (
            median(ordered),
            fmean(ordered),
            interpolated_quantile(ordered, 0.95),
            interpolated_quantile(ordered, 0.99),
            ordered[-1],
        )
        for name, value, figure in zip(("median", "mean", "p95", "p99", "longest"), found, expected, strict=True):
            claim = _exact("S0 link", f"upload of {payload_kb} KB, {name}", "ms", derived=figure, note=note)
            rows.append(compare(claim, [value], similar=True))
    return rows


def _published_budgets(link: Link, artefact: Path) -> list[Row]:
    """How many of the 3 × 600 remaining SLOs published by the authors we reproduce."""
    equal = count = 0
    for line in (artefact / BUDGETS).read_text().splitlines()[1:]:
        size, *published = line.split(",")
        payload_kb = int(re.sub(r"\D", "", size))
        ours = link.remaining_ms(payload_kb * BYTES_PER_KB, SLO_MS)
        for own, theirs in zip(ours, published, strict=False):
            count += 1
            equal += own == round(float(theirs) * 1000)
    return [compare(_exact("S0 link", "remaining SLOs equal to the published", "of 1800", paper=count), [equal])]


def _motivation() -> Row:
    """S1: eight cores, batch 4, 37 ms, 600 ms of upload at 100 requests/s: feasible for a steady flow, not for a
    burst."""
    grid = sponge.grid_of([[0, *(round(37 * NS_PER_MS) for _ in range(4))]], [8.0], 4)
    steady = bool((sponge.holds_steady(grid, 100, 600, SLO_MS) & sponge.keeps_up(grid, 100))[0, 3])
    burst = bool(sponge.holds_burst(grid, 100, 600, SLO_MS)[0, 3])
    note = f"for a steady flow {int(steady)}; by Algorithm 2, which plans for a burst, {int(burst)}"
    metric = "8 cores and batch 4 are feasible at 600 ms of upload by Algorithm 2"
    claim = _exact("S1 motivation", metric, "0 or 1", paper=1, note=note)
    other = float(math.ceil(100 / 4) * 37 + 600 < SLO_MS)
    why = "its Algorithm 2 lets 25 batches of 37 ms end one after the other, after an upload of 600 ms"
    return contradicted(claim, [float(burst)], other=other, why=why)


def grid_points() -> list[Point]:
    """The artefact's 30 measured cells."""
    form = RESNET18_HUMAN.latency_ms
    return [Point(b, float(c), form.latency_ms(b, c)) for b in (1, 2, 4, 8, 16) for c in (1, 2, 4, 8, 16, 32)]


def _fit() -> list[Row]:
    """S2: the errors of the fit, which the publication calls realistic without printing an error."""
    points = grid_points()
    absolute, relative = fit_amdahl(points, relative=False), fit_amdahl(points, relative=True)
    small = fit_amdahl([p for p in points if p.batch <= 8 and p.cores <= 16], relative=False)
    cells = [Point(batch, float(cores), latency_ms) for batch, cores, latency_ms in RESNET_T_CELLS]
    table = fit_amdahl(cells, relative=True)
    return [
        compare(_exact("S2 model", metric, unit, derived=derived), [ours])
        for metric, unit, derived, ours in (
            ("R², ResNet18, absolute fit", "", 0.969, absolute.r2),
            ("mean error, ResNet18, relative fit", "%", 7.75, 100 * relative.mape),
            ("largest error, ResNet18, relative fit", "%", 18.3, 100 * relative.max_error),
            ("R², batches ≤ 8, cores ≤ 16", "", 0.998, small.r2),
            ("mean error, Table 1, relative fit", "%", 3.0, 100 * table.mape),
        )
    ]


def _algorithm() -> list[Row]:
    """S2: Algorithm 2 on two profiles, as published, without a test of throughput."""
    grids = {"ResNet-T": grid_of(RESNET_T.latency_ms.latency_ms), "artefact": grid_of(WHOLE_MS.latency_ms)}
    right = 0
    for profile, margin, count, upload, expected in PAIRS:
        found = sponge.cheapest(grids[profile], sponge.holds_burst(grids[profile], count, upload, margin * SLO_MS))
        right += (None if found is None else (int(found.cores), found.batch)) == expected
    recorded = sponge.cheapest(grids["artefact"], sponge.holds_burst(grids["artefact"], 100, 50, SLO_MS))
    claim = _exact("S2 model", "Algorithm 2: equal pairs of cores and batch", f"of {len(PAIRS)}", derived=len(PAIRS))
    rows = [compare(claim, [right])]
    values = (recorded.cores, recorded.batch, math.floor(recorded.latency_ms)) if recorded else (0, 0, 0)
    for (name, paper), value in zip((("cores", 5), ("batch", 10), ("whole ms of a batch", 91)), values, strict=True):
        rows.append(
            compare(_exact("S2 model", f"Algorithm 2, 100 requests after 50 ms: {name}", "", paper=paper), [value])
        )
    return rows


def infeasible_seconds(link: Link, profile: Profile, margin: float) -> list[int]:
    """Seconds in which no setting can serve a burst of 20 requests in time."""
    belief = Estimate(profile, correct=False)
    cores = [float(count) for count in range(1, CORES_MAX + 1)]
    grid = sponge.grid_of([belief.costs_ns(belief.slot(count)) for count in cores], cores, BATCH_MAX)
    keeps_up = sponge.keeps_up(grid, RATE_RPS)
    return [
        second
        for second, upload in enumerate(upload_ms(link, PAYLOAD_KB))
        if not (keeps_up & sponge.holds_burst(grid, RATE_RPS, upload, margin * SLO_MS)).any()
    ]


def _infeasible(link: Link, *, recorded: bool) -> list[Row]:
    """Check 10: the number of seconds without a feasible plan."""
    rows = []
    for margin, expected in INFEASIBLE_SECONDS.items():
        found = len(infeasible_seconds(link, YOLOV5S_S, margin))
        metric = f"seconds without a feasible plan, margin {margin:g}"
        claim = _exact("check 10", metric, "of 600", derived=expected, note="" if recorded else SYNTHETIC)
        rows.append(compare(claim, [found], similar=True))
    return rows


def _fa2(artefact: Path) -> list[Row]:
    """Check 3: FA2's rule on the remaining SLOs of the recorded run, compared with the replicas of that run."""
    if not (artefact / FA2_RUN).exists() or find_spec("sloop_systems.fa2") is None:
        return []
    from sloop_systems.fa2.solver import fa2_single  # noqa: PLC0415  # another publication's, which may not be there

    text = (artefact / FA2_RUN).read_text()
    count = equal = 0
    kept = 1
    for left_ms, replicas in zip(_list(text, "sla"), _list(text, "replicas"), strict=False):
        if left_ms:
            answer = fa2_single(
                YOLO_WHOLE_MS,
                RATE_RPS,
                network_ms_max=SLO_MS - left_ms,
                limit_ms=0.9 * SLO_MS,
                slo_ms=SLO_MS,
                replicas_max=16,
            )
            kept = answer.replicas if answer else kept
        count += 1
        equal += kept == replicas
    claim = _exact("check 3", "seconds with FA2's number of replicas", f"of {count}", paper=count)
    return [compare(claim, [equal])]


def _list(text: str, name: str) -> list[float]:
    """A list of numbers in a notebook's printed output."""
    found = re.search(rf"'{name}': (\[[^\]]*\])", text)
    if found is None:
        raise InputError(f"there is no list {name!r}", where=FA2_RUN, help="use the artefact's own notebook outputs")
    return [float(value) for value in ast.literal_eval(found[1])]
