"""Sizes of replicas: the cores and batches with which given numbers of replicas of each stage carry a rate in time.

The fewest cores in all, exactly, on a grid of whole milliseconds, for a whole graph: the vertical program of Biscale
(Razavi, dissertation, TU Darmstadt 2024, chapter P4, Algorithm 3; the same system is Themis, arXiv 2407.14843). If the
replicas cannot carry the rate: cores for the part that they can carry, plus more replicas for the rest (`split`).

Units: milliseconds, requests per second, and cores counted in units whose size the caller chooses. Notation: l(b, c)
latency of a batch, q(b) the time until it is full, h(b, c) throughput of one replica, λ arrival rate, n replicas. Among
equal costs the smaller sum of batches wins, then the lower latency.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from sloop.solvers.budget import PathMatrix, Segment, StageOptions, cheapest_tree, improved_choice, segment_matrix
from sloop.units import ROUNDING

Throughput = Literal["pure", "with_queue"]
"""The formula of h(b, c). `pure`: 1000 b/l, as printed. `with_queue`: ⌊1000 b/(⌊l⌋ + ⌊q⌋)⌋ as in the authors' artefact,
which counts the wait for a full batch as work; this leaves head-room for uneven arrivals, `pure` does not."""

Solution = TypeVar("Solution")
RATE_RPS_MIN: Final = 1e-6
"""Replaces a rate of 0, so that the solution is one replica of one unit with batches of one."""


@dataclass(frozen=True, slots=True)
class SizedStage:
    """One stage: `latency_ms[c - 1, b - 1]` is l(b, c); a request visits it `visits` times on average."""

    latency_ms: NDArray[np.float64]
    visits: float = 1.0


@dataclass(frozen=True, slots=True)
class SizeChoice:
    """One stage's part of a solution: `replicas` of `cores` units each with batches of `batch`."""

    replicas: int
    cores: int
    batch: int
    latency_ms: float
    wait_ms: float
    """q(b): the longest time that the first request of a batch waits for the others."""
    throughput_rps: float
    """h of one replica."""


@dataclass(frozen=True, slots=True)
class SizeSplit:
    """Choices that carry `carried_rps`, and per stage how many more such replicas the full rate needs."""

    choices: tuple[SizeChoice, ...]
    extra: tuple[int, ...]
    carried_rps: float


def highest_rate(
    solve: Callable[[int], Solution | None], solution: Solution, rate_rps: int, beyond_rps: int
) -> tuple[Solution, int]:
    """The solution for the highest whole rate that has one, from `rate_rps`, which has `solution`, to below
    `beyond_rps`; and that rate.

    A lower rate makes batches fill more slowly, so feasibility is not monotone in the rate: the binary search ends at a
    rate that is feasible while one request per second more is not; usually, but not always, it is the highest one.
    """
    while beyond_rps - rate_rps > 1:
        middle_rps = (rate_rps + beyond_rps) // 2
        found = solve(middle_rps)
        if found is None:
            beyond_rps = middle_rps
        else:
            solution, rate_rps = found, middle_rps
    return solution, rate_rps


@dataclass(frozen=True, eq=False)
class SizeProblem:
    """Stages, the segments of the graph that must keep a budget in slots, and the cores of the whole cluster in units.

    For graphs whose paths meet, `forests` has several cuts into forests (`sloop.solvers.budget`), each as segments; the
    cheapest solution of all cuts is used, with single stages improved against the uncut segments. Empty if `segments`
    already form a forest.
    """

    stages: tuple[SizedStage, ...]
    segments: tuple[Segment, ...]
    throughput: Throughput = "with_queue"
    cores_total: float = math.inf
    forests: tuple[tuple[Segment, ...], ...] = ()
    slot_ms: int = 1
    """Length of a slot: a millisecond, longer for long deadlines. Latencies are rounded up to it."""

    def vertical(self, rate_rps: float, replicas: Sequence[int]) -> tuple[SizeChoice, ...] | None:
        """Cores and batches with which the given number of replicas per stage carry the rate; None if there are
        none."""
        return self.solve(
            [of_count(self.rate_table(stage, rate_rps), n) for stage, n in zip(self.stages, replicas, strict=True)]
        )

    def split(self, rate_rps: float, replicas: Sequence[int]) -> SizeSplit | None:
        """The vertical solution; if there is none, one for a lower whole rate plus more replicas for the rest.

        None if even 1 request/s is infeasible.
        """
        whole = self.vertical(rate_rps, replicas)
        if whole is not None:
            return SizeSplit(whole, (0,) * len(self.stages), rate_rps)
        least = self.vertical(1, replicas)
        if least is None:
            return None
        carried, carried_rps = highest_rate(lambda rps: self.vertical(rps, replicas), least, 1, math.ceil(rate_rps))
        missing_rps = max(0.0, rate_rps - carried_rps)
        extra = (
            math.ceil(missing_rps * stage.visits / choice.throughput_rps - ROUNDING)
            for stage, choice in zip(self.stages, carried, strict=True)
        )
        return SizeSplit(carried, tuple(extra), carried_rps)

    @cached_property
    def matrix(self) -> PathMatrix:
        return segment_matrix(self.segments, len(self.stages))

    def rate_table(self, stage: SizedStage, rate_rps: float) -> "RateTable":
        rate_rps = max(RATE_RPS_MIN, rate_rps * stage.visits)
        batches = np.arange(1, stage.latency_ms.shape[1] + 1)
        wait_ms = 1000.0 * (batches - 1) / rate_rps
        throughput_rps = 1000.0 * batches / stage.latency_ms
        if self.throughput == "with_queue":
            busy_ms = np.maximum(1.0, np.floor(stage.latency_ms) + np.floor(wait_ms))
            # Truncated milliseconds alone overestimate a replica: 25.05 ms cut to 25 are 40 requests/s, but it serves
            # 39.92.
            throughput_rps = np.minimum(np.floor(1000.0 * batches / busy_ms), throughput_rps)
        latency_slots = np.ceil(stage.latency_ms / self.slot_ms - ROUNDING)
        slots = latency_slots + np.ceil(wait_ms / self.slot_ms - ROUNDING)
        return RateTable(stage.latency_ms, wait_ms, throughput_rps, slots.astype(np.int64), rate_rps)

    def solve(self, offered: Sequence["SizeOptions"]) -> tuple[SizeChoice, ...] | None:
        """The cheapest combination within every budget: fewest cores, then smallest batches, then lowest latency."""
        if not all(len(one.slots) for one in offered):
            return None
        # Check two cheap bounds first: in a search for a rate, most programs are infeasible.
        quickest = [int(one.slots.argmin()) for one in offered]
        if (self.matrix.slack([one.slots[i] for one, i in zip(offered, quickest, strict=True)]) < 0).any():
            return None
        if sum(int((one.replicas * one.cores).min()) for one in offered) > self.cores_total + ROUNDING:
            return None
        options = self._stage_options(offered)
        found = [cheapest_tree(options, segments) for segments in self.forests or (self.segments,)]
        if self.forests:  # a cut may leave no solution; then start from the quickest options, which are feasible
            found = [improved_choice(options, self.matrix, indices or quickest) for indices in found]
        solutions = [
            tuple(one.choice(i) for one, i in zip(offered, indices, strict=True)) for indices in found if indices
        ]
        best = min(solutions, key=_cost, default=None)
        return best if best and cores_of(best) <= self.cores_total + ROUNDING else None

    def _stage_options(self, offered: Sequence["SizeOptions"]) -> list[StageOptions]:
        """Costs pack cores, then batches, then slots into one integer."""
        slots = 1 + len(self.stages) * max(segment.slots for segment in self.segments)
        batches = 1 + sum(stage.latency_ms.shape[1] for stage in self.stages)
        return [
            StageOptions((one.replicas * one.cores * batches + one.batches) * slots + one.slots, one.slots)
            for one in offered
        ]


def chain_problem(
    stages: Sequence[SizedStage], slo_ms: int, *, throughput: Throughput = "with_queue", cores_total: float = math.inf
) -> SizeProblem:
    """The problem of a chain of stages with an end-to-end deadline of `slo_ms`."""
    return SizeProblem(tuple(stages), (Segment(tuple(range(len(stages))), slo_ms),), throughput, cores_total)


def cores_of(choices: Iterable[SizeChoice]) -> int:
    """Units of all replicas of all stages."""
    return sum(choice.replicas * choice.cores for choice in choices)


def _cost(choices: Sequence[SizeChoice]) -> tuple[int, int, float]:
    total_ms = sum(choice.latency_ms + choice.wait_ms for choice in choices)
    return cores_of(choices), sum(choice.batch for choice in choices), total_ms


@dataclass(frozen=True, slots=True)
class RateTable:
    """A stage at one rate. Arrays have the shape (cores, batches), `wait_ms` (batches,)."""

    latency_ms: NDArray[np.float64]
    wait_ms: NDArray[np.float64]
    throughput_rps: NDArray[np.float64]
    slots: NDArray[np.int64]
    rate_rps: float

    def replicas_needed(self) -> NDArray[np.float64]:
        """Replicas that keep up with the rate, shape (cores, batches); infinite where the throughput is 0."""
        with np.errstate(divide="ignore"):
            needed: NDArray[np.float64] = np.ceil(self.rate_rps / self.throughput_rps - ROUNDING)
        return np.maximum(needed, 1.0)


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """The entries of a table that keep up with the rate, as columns of equal length."""

    table: RateTable
    replicas: NDArray[np.int64]
    cores: NDArray[np.int64]
    batches: NDArray[np.int64]
    slots: NDArray[np.int64]

    def choice(self, index: int) -> SizeChoice:
        cores, batch = int(self.cores[index]), int(self.batches[index])
        return SizeChoice(
            replicas=int(self.replicas[index]),
            cores=cores,
            batch=batch,
            latency_ms=float(self.table.latency_ms[cores - 1, batch - 1]),
            wait_ms=float(self.table.wait_ms[batch - 1]),
            throughput_rps=float(self.table.throughput_rps[cores - 1, batch - 1]),
        )


def of_count(table: RateTable, replicas: int) -> SizeOptions:
    """The sizes and batches with which the given number of replicas keep up."""
    rows, columns = np.nonzero(replicas * table.throughput_rps >= table.rate_rps * (1 - ROUNDING))
    return SizeOptions(table, np.full(len(rows), replicas), rows + 1, columns + 1, table.slots[rows, columns])


ReplicaGroups = list[tuple[int, int]]
"""The replicas of one stage: (count, units each) for each size."""


@dataclass(frozen=True, slots=True)
class StageReplicas:
    """Sizes of a stage's replicas in units, largest first. While none is ready, `ready` has the starting ones."""

    ready: tuple[int, ...]
    starting: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of serving replicas; at least 1, because one will be started."""
        return max(1, len(self.ready))

    @property
    def largest(self) -> int:
        """Units of the largest replica."""
        return self.ready[0] if self.ready else 1

    @property
    def smallest(self) -> int:
        """Units of the smallest replica."""
        return self.ready[-1] if self.ready else 1

    @property
    def largest_count(self) -> int:
        """How many replicas have the largest size."""
        return max(1, self.ready.count(self.largest))
