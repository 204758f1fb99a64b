"""Sponge's problem: the fewest cores, then the smallest batch, with which one replica serves requests in time.

Gives the solution of Sponge's Algorithm 2 (dissertation, chapter P2; EuroMLSys 2024) in closed form over the whole grid
of cores and batches. Additions to the publication: a throughput check, budgets per batch, a steady-state criterion, and
a best effort if no setting is feasible. Units are those of the publication, milliseconds and requests per
second. Notation: l(b, c) latency of a batch, h(b, c) = 1000 b / l(b, c) throughput, cl what a request spent on the
network before it arrived. A margin m plans for m × SLO, that is with every budget shortened by (1 - m) × SLO.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sloop.api import ROUNDING
from sloop.api.solvers import fill_ms

Mask: TypeAlias = NDArray[np.bool_]
"""Shape (cores, batches): which settings are feasible."""


@dataclass(frozen=True, slots=True)
class SpongeGrid:
    """l(b, c) for every core count to choose from, ascending, and every batch from 1."""

    cores: tuple[float, ...]
    latency_ms: NDArray[np.float64]
    """Shape (cores, batches): `latency_ms[i, b - 1]` is the latency of a batch of b on `cores[i]`, not rounded."""

    def __post_init__(self) -> None:
        assert self.latency_ms.shape[0] == len(self.cores), (self.latency_ms.shape, self.cores)
        assert all(low < high for low, high in zip(self.cores, self.cores[1:], strict=False)), self.cores

    @property
    def batches(self) -> NDArray[np.int64]:
        """1, 2, … up to the largest batch."""
        return np.arange(1, self.latency_ms.shape[1] + 1)

    @property
    def throughput_rps(self) -> NDArray[np.float64]:
        """h(b, c) in requests per second, shape (cores, batches)."""
        return 1000.0 * self.batches / self.latency_ms


@dataclass(frozen=True, slots=True)
class SpongeSetting:
    """One entry of the grid."""

    cores: float
    batch: int
    latency_ms: float


def grid_of(costs_ns: Sequence[Sequence[int]], cores: Sequence[float], batch_max: int) -> SpongeGrid:
    """The grid from a belief's costs: one row `[0, cost of 1, …]` in ns per core count, cut at `batch_max`."""
    return SpongeGrid(tuple(cores), np.array([row[1 : batch_max + 1] for row in costs_ns], dtype=np.float64) / 1e6)


def holds_burst(grid: SpongeGrid, count: int, network_ms_max: float, slo_ms: float) -> Mask:
    """Algorithm 2: `count` requests are present at once, and the last batch must be done before SLO - cl_max.

    ⌈N/b⌉ · l(b, c) + cl_max < SLO; equality counts as a miss, as printed. Holds everywhere for N = 0, as printed.
    """
    if count == 0:
        return np.ones(grid.latency_ms.shape, dtype=np.bool_)
    rounds = -(-count // grid.batches)
    return np.asarray(rounds * grid.latency_ms + network_ms_max < slo_ms)


def holds_per_batch(grid: SpongeGrid, budgets_ms: NDArray[np.float64]) -> Mask:
    """All requests are present at once, in deadline order; each batch must finish within its own tightest budget.

    `budgets_ms` is sorted, tightest first: k · l(b, c) < budget of request (k - 1) b, for every batch k.
    """
    holds = np.ones(grid.latency_ms.shape, dtype=np.bool_)
    for column, batch in enumerate(grid.batches):
        tightest_ms = budgets_ms[::batch]
        done_ms = np.outer(grid.latency_ms[:, column], np.arange(1, len(tightest_ms) + 1))
        holds[:, column] = (done_ms < tightest_ms).all(axis=1)
    return holds


def holds_steady(grid: SpongeGrid, rate_rps: float, network_ms_max: float, slo_ms: float) -> Mask:
    """Evenly spaced arrivals: the first request of a batch waits for the others, l + 1000 (b - 1)/λ + cl_max ≤ SLO."""
    fills_ms = np.array([fill_ms(batch, rate_rps) for batch in range(1, len(grid.batches) + 1)])
    fills = (grid.batches == 1) | (rate_rps > 0)
    return np.asarray((grid.latency_ms + fills_ms + network_ms_max <= slo_ms) & fills)


def keeps_up(grid: SpongeGrid, rate_rps: float) -> Mask:
    """h(b, c) ≥ λ: the constraint of the integer program that Algorithm 2 does not test."""
    return np.asarray(grid.throughput_rps >= rate_rps)


def cheapest(grid: SpongeGrid, holds: Mask) -> SpongeSetting | None:
    """The feasible setting with the fewest cores, then the smallest batch: min c + δ b for δ < 1/b_max; or None."""
    first = int(holds.argmax())
    row, column = divmod(first, holds.shape[1])
    return setting(grid, row, column + 1) if holds[row, column] else None


def setting(grid: SpongeGrid, row: int, batch: int) -> SpongeSetting:
    """The setting in row `row` (negative from the end) with `batch`."""
    return SpongeSetting(grid.cores[row], batch, float(grid.latency_ms[row, batch - 1]))


def best_effort(grid: SpongeGrid, budgets_ms: NDArray[np.float64], rate_rps: float) -> tuple[SpongeSetting, int]:
    """All cores with the batch that serves most requests in time, in deadline order; and the number of these requests.

    Ties go to the batch that keeps up with `rate_rps`, or comes nearest, then to the smaller one. The publication says
    nothing of this case; the dry run is our specification's, where ties go straight to the smaller batch, which would
    never reduce a backlog. `budgets_ms` is sorted, tightest first.
    """
    best, most = (-1, -1.0), 1
    for batch in range(1, grid.latency_ms.shape[1] + 1):
        throughput_rps = 1000.0 * batch / float(grid.latency_ms[-1, batch - 1])
        key = (in_time(grid, budgets_ms, batch), min(throughput_rps, rate_rps))
        if key > best:
            best, most = key, batch
    return setting(grid, -1, most), best[0]


def in_time(grid: SpongeGrid, budgets_ms: NDArray[np.float64], batch: int) -> int:
    """Requests that finish within their budgets when all cores serve them in batches of `batch`."""
    count = len(budgets_ms)
    full, rest = divmod(count, batch)
    done_ms = np.repeat(np.arange(1, full + 1) * grid.latency_ms[-1, batch - 1], batch)
    if rest:
        last_ms = full * grid.latency_ms[-1, batch - 1] + grid.latency_ms[-1, rest - 1]
        done_ms = np.concatenate([done_ms, np.full(rest, last_ms)])
    return int((done_ms <= budgets_ms).sum())


def startable(grid: SpongeGrid, budget_ms: float) -> int:
    """The most requests that any setting starts within `budget_ms` after the first; later ones cannot be in time."""
    batches_started = np.maximum(1, np.ceil(budget_ms / grid.latency_ms))
    return int((grid.batches * batches_started).max())


def max_rate_rps(grid: SpongeGrid) -> float:
    """max_b h(b, c_max): beyond this rate one replica is saturated, and only more replicas help."""
    return float(grid.throughput_rps[-1].max())


def requests_in(rate_rps: float, seconds: float) -> int:
    """⌈λ · t⌉, up to rounding of floats."""
    return math.ceil(rate_rps * seconds - ROUNDING)
