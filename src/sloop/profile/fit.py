"""Fits latency forms to measured points.

Promises a `Fit` with its parameters and its errors on the points it was given; pure and without chance, also where it
is robust. Knows nothing of files or of how points are measured.

Sources: Sponge (Razavi et al., EuroMLSys 2024): l(b, c), fitted by robust regression (RANSAC is cited) on P99
latencies; specification §2.2: relative errors and non-negative parameters, which cannot be optimistic at small batches.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, combinations, islice
from math import comb, exp, log
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sloop.profile.forms import Amdahl, Latency, Quadratic, Table
from sloop.profile.profile import Fit
from sloop.profile.sample import Sample

SUBSETS_MAX: Final = 400
"""Minimal subsets a robust fit tries, spread evenly over all there are."""
OUTLIER: Final = 2.5
"""Robust standard deviations beyond which a point is left out (Rousseeuw and Leroy, least median of squares)."""
SCALE_MIN: Final = 0.02
"""A relative residual below `OUTLIER` times this is never an outlier: no two measurements agree better."""
SWEEPS: Final = 300
"""Of the alternating projections, at most; a grid of 30 cells takes some ten."""
RUNS_FOR_P99: Final = 100

Vector = NDArray[np.float64]
Solve = Callable[[Vector, Vector], Vector]


class Point(NamedTuple):
    """A latency: `batch` requests on `cores` took `latency_ms`."""

    batch: int
    cores: float
    latency_ms: float


def points_p99(samples: Sequence[Sample]) -> list[Point]:
    """The P99 of each sample: what plans are made with.

    Fewer than 100 runs have no P99 of their own, only a largest value, which one hiccup decides. Such a cell gets its
    median times the usual tail (P99 over median) on its cores: the median over cells, each counting by its runs.
    """
    tails = {cores: _tail([sample for sample in samples if sample.cores == cores]) for cores in _all_cores(samples)}
    return [
        Point(
            sample.batch,
            sample.cores,
            sample.p50_ms * tails[sample.cores] if 0 < sample.n < RUNS_FOR_P99 else sample.p99_ms,
        )
        for sample in samples
    ]


def _all_cores(samples: Sequence[Sample]) -> set[float]:
    return {sample.cores for sample in samples}


def _tail(samples: Sequence[Sample]) -> float:
    """The weighted median of P99 over median; weights are the runs."""
    tails = sorted((sample.p99_ms / sample.p50_ms, sample.n) for sample in samples)
    half = sum(runs for _, runs in tails) / 2
    return next(
        tail for (tail, _), runs in zip(tails, accumulate(runs for _, runs in tails), strict=True) if runs >= half
    )


def points_p50(samples: Sequence[Sample]) -> list[Point]:
    """The median of each sample: what throughput is made of."""
    return [Point(sample.batch, sample.cores, sample.p50_ms) for sample in samples]


def fit_quadratic(points: Sequence[Point], *, relative: bool = True, robust: bool = False) -> Fit:
    """αb² + βb + γ to points of one core count. ValueError with fewer than 3 batches or several core counts.

    `relative` minimises relative errors with parameters ≥ 0; else plain least squares. `robust` leaves outliers out.
    """
    if len({point.cores for point in points}) != 1:
        raise ValueError("a quadratic is fitted to points of one core count")
    if len({point.batch for point in points}) < 3:
        raise ValueError("a quadratic needs at least 3 batch sizes")
    rows = np.array([[point.batch**2, point.batch, 1.0] for point in points])
    alpha, beta, gamma = _solve(rows, points, relative=relative, robust=robust)
    return judge(Quadratic(alpha, beta, gamma), points)


def fit_amdahl(points: Sequence[Point], *, relative: bool = True, robust: bool = False) -> Fit:
    """γb/c + ε/c + δb + η. ValueError with fewer than 4 points, 2 batches or 2 core counts.

    `relative` minimises relative errors with parameters ≥ 0; else plain least squares. `robust` leaves outliers out.
    """
    if len({(point.batch, point.cores) for point in points}) < 4:
        raise ValueError("an Amdahl form needs at least 4 points")
    if len({point.batch for point in points}) < 2 or len({point.cores for point in points}) < 2:
        raise ValueError("an Amdahl form needs at least 2 batch sizes and 2 core counts")
    rows = np.array([[p.batch / p.cores, p.batch, 1.0 / p.cores, 1.0] for p in points])
    gamma, delta, epsilon, eta = _solve(rows, points, relative=relative, robust=robust)
    return judge(Amdahl(gamma, epsilon, delta, eta), points)


def fit_table(points: Sequence[Point]) -> Fit:
    """The nearest table whose latency never falls with the batch nor rises with cores: isotonic, in relative errors.

    Found by Dykstra's alternating projections onto the two orders. Several points of a cell count by their mean.
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
    upwards = [[(b, c) for b in batches if (b, c) in cells] for c in all_cores]
    onwards = [[(b, c) for c in all_cores if (b, c) in cells] for b in batches]
    fitted = _project(cells, weights, upwards, onwards)
    table: dict[int, dict[float, float]] = {}
    for batch, cores in cells:
        below = [value for (b, c), value in fitted.items() if b <= batch and c >= cores]
        table.setdefault(batch, {})[cores] = exp(max(below))
    return judge(Table(table), points)


def judge(latency: Latency, points: Sequence[Point]) -> Fit:
    """How well a form meets points: R² of absolute latencies, mean and largest relative error as fractions."""
    measured = np.array([point.latency_ms for point in points])
    believed = np.array([latency.latency_ms(point.batch, point.cores) for point in points])
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - believed) ** 2).sum())
    errors = np.abs(believed - measured) / measured
    r2 = 1.0 - missed / spread if spread > 0 else float(missed == 0)
    return Fit(latency, r2, float(errors.mean()), float(errors.max()))


def _solve(rows: Vector, points: Sequence[Point], *, relative: bool, robust: bool) -> list[float]:
    latency_ms = np.array([point.latency_ms for point in points])
    if not (np.isfinite(latency_ms).all() and (latency_ms > 0).all()):
        raise ValueError("latencies must be positive")
    if robust:
        kept = _inliers(rows / latency_ms[:, None])
        rows, latency_ms = rows[kept], latency_ms[kept]
    solution: Vector
    if relative:
        solution = nnls(rows / latency_ms[:, None], np.ones(len(rows)))[0]
    else:
        solution = np.linalg.lstsq(rows, latency_ms, rcond=None)[0]
    return [float(value) for value in solution]


def _inliers(rows: Vector) -> NDArray[np.bool_]:
    """Points that agree with the best minimal subset: least median of squares over relative residuals."""
    count, size = rows.shape
    if count <= size + 1:
        return np.ones(count, dtype=bool)
    step = max(1, comb(count, size) // SUBSETS_MAX)
    subsets = np.array(list(islice(combinations(range(count), size), 0, None, step)))
    systems = rows[subsets]
    sound = np.linalg.cond(systems) < 1e9
    if not sound.any():
        return np.ones(count, dtype=bool)
    solutions = np.linalg.solve(systems[sound], np.ones((int(sound.sum()), size, 1)))[:, :, 0]
    residuals = np.abs(1.0 - solutions @ rows.T)
    medians = np.median(residuals, axis=1)
    best = int(medians.argmin())
    scale = 1.4826 * (1 + 5 / (count - size)) * float(medians[best])
    return np.asarray(residuals[best] <= OUTLIER * max(scale, SCALE_MIN), dtype=bool)


Cell = tuple[int, float]


def _project(
    cells: dict[Cell, float], weights: dict[Cell, int], upwards: list[list[Cell]], onwards: list[list[Cell]]
) -> dict[Cell, float]:
    """Dykstra's algorithm: project onto both sets of chains in turn, giving back what the last projection took."""
    current = dict(cells)
    given = (dict.fromkeys(cells, 0.0), dict.fromkeys(cells, 0.0))
    for _ in range(SWEEPS):
        moved = 0.0
        for chains, correction in zip((upwards, onwards), given, strict=True):
            for chain in chains:
                before = [current[cell] + correction[cell] for cell in chain]
                after = isotonic(before, [weights[cell] for cell in chain])
                for cell, old, new in zip(chain, before, after, strict=True):
                    moved = max(moved, abs(new - current[cell]))
                    current[cell], correction[cell] = new, old - new
        if moved < 1e-12:
            break
    return current


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted least squares, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, float(weight), 1
        while pools and pools[-1][0] > mean:
            left_mean, left_total, left_length = pools.pop()
            mean = (left_mean * left_total + mean * total) / (left_total + total)
            total, length = left_total + total, left_length + length
        pools.append((mean, total, length))
    return [mean for mean, _, length in pools for _ in range(length)]
