"""Fits of latency functions and of laws of interference to measured points, and the percentile that a profile uses.

Pure and deterministic functions. A `Fit` holds its parameters and its errors at its points.

Sources: Sponge (Razavi et al., EuroMLSys 2024): l(b, c), fitted to P99 latencies; specification §2.2: relative errors
and non-negative parameters, which cannot be too optimistic at small batches. The laws of interference are PALDIA's,
specification 2.1.1 and 7.2.
"""

import contextlib
from collections.abc import Sequence
from itertools import combinations
from math import exp, inf, log
from statistics import fmean, median
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sloop.profile.interference import BandwidthLaw, CountLaw, ProcessorSharing, ScalabilityLaw, Slowdown
from sloop.profile.profile import Amdahl, Cells, DeviceSharing, Fit, Latency, LatencyTable, Origin, Quadratic, Sample
from sloop.profile.size_law import never_falling

Percentile = Literal["p50", "p99"]

SWEEPS: Final = 300
"""Limit of the alternating projections; a grid of 30 cells needs about ten."""
RUNS_FOR_P99: Final = 100
"""Runs needed for a P99: with fewer, the nearest-rank P99 is the longest run, which may be a single hiccup."""

Vector = NDArray[np.float64]


class Point(NamedTuple):
    """A latency: a batch of `batch` on `cores` took `latency_ms`."""

    batch: int
    cores: float
    latency_ms: float


def points_p99(samples: Sequence[Sample]) -> list[Point]:
    """The P99 of each cell.

    A cell with fewer than 100 runs gets its median times the usual tail ratio (P99 / median) of its core count, but at
    most its longest run. The usual ratio is the median over the cells of that core count, each with equal weight:
    weighted by runs, batch size 1, which has the most runs, would dominate.
    """
    tails = {
        cores: median(sample.p99_ms / sample.p50_ms for sample in samples if sample.cores == cores)
        for cores in {sample.cores for sample in samples}
    }
    return [
        Point(
            sample.batch,
            sample.cores,
            min(sample.p99_ms, sample.p50_ms * tails[sample.cores]) if _is_thin(sample) else sample.p99_ms,
        )
        for sample in samples
    ]


def _is_thin(sample: Sample) -> bool:
    return 0 < sample.n < RUNS_FOR_P99


def points_p50(samples: Sequence[Sample]) -> list[Point]:
    """The median of each cell, from which throughput follows."""
    return [Point(sample.batch, sample.cores, sample.p50_ms) for sample in samples]


def fit_all(samples: Sequence[Sample], percentile: Percentile) -> dict[str, Fit]:
    """Every form that has enough cells: `table`, `amdahl`, and `quadratic` (on 1 core or the fewest measured)."""
    points = points_p50(samples) if percentile == "p50" else points_p99(samples)
    fits = {"table": fit_table(points) if percentile == "p50" else _bounded_table(samples)}
    with contextlib.suppress(ValueError):
        fits["amdahl"] = fit_amdahl(points)
    all_cores = sorted({point.cores for point in points})
    chosen = 1.0 if 1.0 in all_cores else all_cores[0]
    with contextlib.suppress(ValueError):
        fits["quadratic"] = fit_quadratic([point for point in points if point.cores == chosen])
    return fits


def _bounded_table(samples: Sequence[Sample]) -> Fit:
    """The monotone table of the P99s, clipped to the measured bounds of each cell.

    Making the table monotone averages cells that are in the wrong order. The average can be below the P99 of a cell
    with a hundred runs, or above every run of a cell with fewer; both are clipped here. Where the lower bound of a cell
    contradicts the upper bound of a larger batch or fewer cores, the lower bound wins: underestimates miss deadlines.
    """
    points = points_p99(samples)
    fit = fit_table(points)
    assert isinstance(fit.params, LatencyTable)
    largest = {(s.batch, s.cores): s.p99_ms for s in samples if _is_thin(s)}  # see RUNS_FOR_P99
    own = {(s.batch, s.cores): s.p99_ms for s in samples if not _is_thin(s)}
    table: Cells = {}
    for batch, row in fit.params.table.items():
        for cores, latency_ms in row.items():
            high = min((ms for (b, c), ms in largest.items() if b >= batch and c <= cores), default=latency_ms)
            low = max((ms for (b, c), ms in own.items() if b <= batch and c >= cores), default=0.0)
            table.setdefault(batch, {})[cores] = max(low, min(high, latency_ms))
    return judge(LatencyTable(table), points)


def fit_quadratic(points: Sequence[Point], *, relative: bool = True) -> Fit:
    """Fit αb² + βb + γ to points of one core count. ValueError for fewer than 3 batch sizes or several core counts.

    `relative` minimises relative errors with parameters ≥ 0, otherwise plain least squares.
    """
    if len({point.cores for point in points}) != 1:
        raise ValueError("a quadratic is fitted to points of one core count")
    if len({point.batch for point in points}) < 3:
        raise ValueError("a quadratic needs at least 3 batch sizes")
    rows = np.array([[point.batch**2, point.batch, 1.0] for point in points])
    alpha, beta, gamma = _solve(rows, points, relative=relative)
    return judge(Quadratic(alpha, beta, gamma), points)


def fit_amdahl(points: Sequence[Point], *, relative: bool = True) -> Fit:
    """Fit γb/c + ε/c + δb + η. ValueError for fewer than 4 points, 2 batch sizes or 2 core counts.

    `relative` as in `fit_quadratic`.
    """
    if len({(point.batch, point.cores) for point in points}) < 4:
        raise ValueError("an Amdahl form needs at least 4 points")
    if len({point.batch for point in points}) < 2 or len({point.cores for point in points}) < 2:
        raise ValueError("an Amdahl form needs at least 2 batch sizes and 2 core counts")
    rows = np.array([[p.batch / p.cores, p.batch, 1.0 / p.cores, 1.0] for p in points])
    gamma, delta, epsilon, eta = _solve(rows, points, relative=relative)
    return judge(Amdahl(gamma, epsilon, delta, eta), points)


def fit_table(points: Sequence[Point]) -> Fit:
    """The table with the least relative error whose latency never falls with the batch and never rises with the cores.

    Found by Dykstra's alternating projections onto the two orders. Several points of one cell are averaged.
    """
    if not points:
        raise ValueError("a table needs at least one point")
    logs: dict[tuple[int, float], list[float]] = {}
    for point in points:
        logs.setdefault((point.batch, point.cores), []).append(log(point.latency_ms))
    cells = {cell: sum(values) / len(values) for cell, values in logs.items()}
    weights = {cell: len(values) for cell, values in logs.items()}
    batches = sorted({cell[0] for cell in cells})
    all_cores = sorted({cell[1] for cell in cells}, reverse=True)
    by_batch = [[(b, c) for b in batches if (b, c) in cells] for c in all_cores]
    by_cores = [[(b, c) for c in all_cores if (b, c) in cells] for b in batches]
    fitted = _project(cells, weights, by_batch, by_cores)
    table: dict[int, dict[float, float]] = {}
    for batch, cores in cells:
        below = [value for (b, c), value in fitted.items() if b <= batch and c >= cores]
        table.setdefault(batch, {})[cores] = exp(max(below))
    return judge(LatencyTable(table), points)


def judge(latency: Latency, points: Sequence[Point]) -> Fit:
    """A form's errors at these points: R² of absolute latencies, mean and largest relative error as fractions."""
    measured = np.array([point.latency_ms for point in points])
    fitted = np.array([latency.latency_ms(point.batch, point.cores) for point in points])
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - fitted) ** 2).sum())
    errors = np.abs(fitted - measured) / measured
    r2 = 1.0 - missed / spread if spread > 0 else float(missed == 0)
    return Fit(latency, r2, float(errors.mean()), float(errors.max()))


# How a model shares its device

SlowdownPoint = tuple[float, float]
"""A number of full batches that ran together, and the slowdown of each."""
BANDWIDTHS_TRIED: Final = 512
"""Bandwidth demands that a fit compares in each of its two rounds."""


SharingForm = Literal["bandwidth", "literal", "scalability", "processor_sharing", "count"]
"""`bandwidth`: PALDIA's convex law. `literal`: the same with α = 0, as it was printed. `scalability`: Gunther's, in
which a part of each batch overlaps with others. `processor_sharing`: k batches each take k times as long. `count`: a
table of the factors themselves."""
SHARING_FORMS: Final[tuple[SharingForm, ...]] = get_args(SharingForm)


class SlowdownFit(NamedTuple):
    """How a model shares its device, and the relative errors of its law at the points, as fractions."""

    sharing: DeviceSharing
    mape: float
    max_error: float


def fit_bandwidth_law(points: Sequence[SlowdownPoint], *, alpha_max: float = inf) -> tuple[float, BandwidthLaw]:
    """The bandwidth demand f of a full batch, 0 to 1, and the law's α, 0 to `alpha_max`, with the least squares of
    relative errors.

    For each f the law is linear in α, so that α has a closed form; f is searched, first everywhere and then around the
    best. ValueError for points that `fit_sharing` refuses.
    """
    counts, factors = _checked(points)

    def errors(tried: Vector) -> tuple[Vector, Vector]:
        load = tried[:, None] * counts
        base = np.maximum(1.0, load)
        slope = base * np.maximum(0.0, load - 1.0) / factors
        rest = 1.0 - base / factors
        squares = (slope**2).sum(axis=1)
        alphas = np.clip((slope * rest).sum(axis=1) / np.where(squares > 0, squares, 1.0), 0.0, alpha_max)
        missed: Vector = ((rest - alphas[:, None] * slope) ** 2).sum(axis=1)
        return missed, alphas

    tried = np.linspace(1.0 / BANDWIDTHS_TRIED, 1.0, BANDWIDTHS_TRIED)
    step = 1.0 / BANDWIDTHS_TRIED
    best = float(tried[errors(tried)[0].argmin()])
    tried = np.clip(np.linspace(best - step, best + step, BANDWIDTHS_TRIED), step / 2, 1.0)
    missed, alphas = errors(tried)
    place = int(missed.argmin())
    return float(tried[place]), BandwidthLaw(float(alphas[place]))


def fit_count_law(points: Sequence[SlowdownPoint]) -> CountLaw:
    """The factors that are nearest in least squares and never fall with the number of batches: 1 for a batch that runs
    alone, linear between measured numbers. ValueError for points that `fit_sharing` refuses, or a number that is not
    whole."""
    counts, factors = _checked(points)
    if (counts != np.round(counts)).any():
        raise ValueError("a table of slowdowns needs whole numbers of batches")
    wholes = sorted({int(count) for count in counts})
    means = [float(factors[counts == whole].mean()) for whole in wholes]
    weights = [float((counts == whole).sum()) for whole in wholes]
    rising = [max(1.0, factor) for factor in never_falling(means, weights)]
    known = {1: 1.0} | {whole: factor for whole, factor in zip(wholes, rising, strict=True) if whole > 1}
    every = np.interp(np.arange(1, wholes[-1] + 1), list(known), list(known.values()))
    return CountLaw(tuple(float(factor) for factor in every))


def fit_scalability_law(points: Sequence[SlowdownPoint]) -> ScalabilityLaw:
    """The law with the least squares of relative errors. ValueError for points that `fit_sharing` refuses."""
    counts, factors = _checked(points)
    rows = np.column_stack([counts - 1.0, counts * (counts - 1.0)])
    contention, coherency = nonnegative_least_squares(rows / factors[:, None], 1.0 - 1.0 / factors)
    return ScalabilityLaw(float(contention), float(coherency))


def held_out_error(passes: Sequence[Sequence[SlowdownPoint]], form: SharingForm) -> float:
    """The mean relative error of a law at slowdowns that it was not fitted to (cross-validation; Stone, J. R. Stat.
    Soc. B 36, 1974): each pass is left out once, the law is fitted to the medians of the other passes, and its relative
    error is measured at the points of the left-out pass with more than one batch. ValueError for fewer than two passes,
    or points that `fit_sharing` refuses."""
    if len(passes) < 2:
        raise ValueError("to leave a pass out, a fit needs at least two")
    errors: list[float] = []
    for place, left_out in enumerate(passes):
        found: dict[float, list[float]] = {}
        for points in (*passes[:place], *passes[place + 1 :]):
            for count, factor in points:
                found.setdefault(count, []).append(factor)
        medians = [(count, median(seen)) for count, seen in sorted(found.items())]
        sharing = fit_sharing(medians, full_batch=1, form=form).sharing
        counts, factors = _checked(left_out)
        said = sharing.law.among_equals(sharing.demand(1), counts)
        errors += list((np.abs(said - factors) / factors)[counts > 1])
    return fmean(errors)


def fit_sharing(
    points: Sequence[SlowdownPoint],
    *,
    full_batch: int,
    form: SharingForm = "bandwidth",
    origin: Origin = "measured",
    source: str = "",
    hardware: str = "",
    software: str = "",
    date: str = "",
) -> SlowdownFit:
    """How a model shares its device, fitted to slowdowns of full batches that ran together.

    ValueError for fewer than two different numbers of batches, a number below 1, or a slowdown that is not positive.
    """
    law: Slowdown
    bandwidth = 0.0
    if form in ("bandwidth", "literal"):
        bandwidth, law = fit_bandwidth_law(points, alpha_max=0.0 if form == "literal" else inf)
    elif form == "processor_sharing":
        _checked(points)
        law = ProcessorSharing("batches")
    elif form == "scalability":
        law = fit_scalability_law(points)
    else:
        law = fit_count_law(points)
    sharing = DeviceSharing(
        law=law,
        full_batch=full_batch,
        bandwidth=bandwidth,
        points=tuple((float(count), float(factor)) for count, factor in points),
        origin=origin,
        source=source,
        hardware=hardware,
        software=software,
        date=date,
    )
    counts, factors = _checked(points)
    errors = np.abs(law.among_equals(sharing.demand(full_batch), counts) - factors) / factors
    return SlowdownFit(sharing, float(errors.mean()), float(errors.max()))


def _checked(points: Sequence[SlowdownPoint]) -> tuple[Vector, Vector]:
    """The numbers of batches and the slowdowns."""
    counts, factors = np.array(points, dtype=np.float64).reshape(-1, 2).T
    if len(np.unique(counts)) < 2:
        raise ValueError("a slowdown needs at least two different numbers of batches")
    if not (np.isfinite(counts).all() and (counts >= 1).all()):
        raise ValueError("numbers of batches must be at least 1")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ValueError("slowdowns must be positive")
    return counts, factors


def _solve(rows: Vector, points: Sequence[Point], *, relative: bool) -> list[float]:
    latency_ms = np.array([point.latency_ms for point in points])
    if not (np.isfinite(latency_ms).all() and (latency_ms > 0).all()):
        raise ValueError("latencies must be positive")
    solution: Vector
    if relative:
        solution = nonnegative_least_squares(rows / latency_ms[:, None], np.ones(len(rows)))
    else:
        solution = np.linalg.lstsq(rows, latency_ms, rcond=None)[0]
    return [float(value) for value in solution]


def nonnegative_least_squares(matrix: Vector, target: Vector) -> Vector:
    """An x ≥ 0 with the least |matrix · x - target|.

    At the minimum some components are 0, and the others are the plain least squares without these. There are few
    columns, so every set of them is tried, the small ones first: a larger one must be better by more than rounding.
    Columns are scaled to length 1, which changes no solution and gives all of them one tolerance.
    """
    count = matrix.shape[1]
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    columns = matrix / norms
    found, least = np.zeros(count), float(np.linalg.norm(target))
    tolerance = 10 * max(matrix.shape) * float(np.finfo(np.float64).eps) * least
    for used in (list(chosen) for size in range(1, count + 1) for chosen in combinations(range(count), size)):
        tried = np.zeros(count)
        tried[used] = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        missed = float(np.linalg.norm(columns @ tried - target))
        if missed < least - tolerance and (tried >= 0).all():
            found, least = tried, missed
    solution: Vector = found / norms
    return solution


_CellKey = tuple[int, float]


def _project(
    cells: dict[_CellKey, float],
    weights: dict[_CellKey, int],
    by_batch: list[list[_CellKey]],
    by_cores: list[list[_CellKey]],
) -> dict[_CellKey, float]:
    """Dykstra's algorithm: project onto both sets of chains in turn, each time undoing its own previous correction."""
    current = dict(cells)
    corrections = (dict.fromkeys(cells, 0.0), dict.fromkeys(cells, 0.0))
    for _ in range(SWEEPS):
        moved = 0.0
        for chains, correction in zip((by_batch, by_cores), corrections, strict=True):
            for chain in chains:
                before = [current[cell] + correction[cell] for cell in chain]
                after = never_falling(before, [weights[cell] for cell in chain])
                for cell, old, new in zip(chain, before, after, strict=True):
                    moved = max(moved, abs(new - current[cell]))
                    current[cell], correction[cell] = new, old - new
        if moved < 1e-12:
            break
    return current
