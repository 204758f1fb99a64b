"""Biscale's optimisation problem: replicas, cores per replica and batch for every stage, with the fewest cores in all.

Solves the integer program of Biscale exactly on a grid of whole milliseconds (dissertation chapter P4, Eq. P4.6; the
same system is Themis, arXiv 2407.14843), in three forms: equal replicas of one size (horizontal, Algorithm 4); cores
for a given number of replicas (vertical, Algorithm 3); and, if those cannot carry the rate, cores for the part that
they can carry plus more replicas for the rest (split). The loops printed in the dissertation contain errors: the
throughput test must count the replicas (n · h ≥ λ), the objective is Σ n · c, and the binary search is inverted. This
module solves the program, not the loops.

Units are those of the publication: milliseconds, requests per second, and cores counted in units whose size the caller
chooses. Notation: l(b, c) latency of a batch, q(b) the time until it is full, h(b, c) throughput of one replica, λ
arrival rate, n replicas. Among equal costs the smaller sum of batches wins, then the lower latency.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sloop.solvers.budget import PathMatrix, Segment, StageOptions, cheapest_tree, improved, segment_matrix
from sloop.units import ROUNDING

Throughput = Literal["pure", "with_queue"]
"""The formula of h(b, c). `pure`: 1000 b/l, as printed. `with_queue`: ⌊1000 b/(⌊l⌋ + ⌊q⌋)⌋ as in the authors' artefact,
which counts the wait for a full batch as work; this leaves head-room for uneven arrivals, `pure` does not."""

RATE_RPS_MIN: Final = 1e-6
"""Replaces a rate of 0, so that the solution is one replica of one unit with batches of one."""


@dataclass(frozen=True, slots=True)
class BiscaleStage:
    """One stage: `latency_ms[c - 1, b - 1]` is l(b, c); a request visits it `visits` times on average."""

    latency_ms: NDArray[np.float64]
    visits: float = 1.0


@dataclass(frozen=True, slots=True)
class BiscaleChoice:
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
class BiscaleSplit:
    """Choices that carry `carried_rps`, and per stage how many more such replicas the full rate needs."""

    choices: tuple[BiscaleChoice, ...]
    extra: tuple[int, ...]
    carried_rps: float


@dataclass(frozen=True, eq=False)
class BiscaleProblem:
    """Stages, the segments of the graph that must keep a budget in slots, and the cores of the whole cluster in units.

    Biscale's own applications are chains, see `chain`. For graphs whose paths meet, `forests` has several cuts into
    forests (`sloop.solvers.budget`), each as segments; the cheapest solution of all cuts is used, with single stages
    improved against the uncut segments. Empty if `segments` already form a forest.
    """

    stages: tuple[BiscaleStage, ...]
    segments: tuple[Segment, ...]
    throughput: Throughput = "with_queue"
    cores_total: float = math.inf
    forests: tuple[tuple[Segment, ...], ...] = ()
    slot_ms: int = 1
    """Length of a slot: a millisecond as published, longer for long deadlines. Latencies are rounded up to it."""

    def horizontal(self, rate_rps: float) -> tuple[BiscaleChoice, ...] | None:
        """As many replicas as the rate needs, all of the smallest size that keeps every budget.

        A stage whose profile ends at fewer units keeps its largest size. None if no size keeps the budgets within
        `cores_total`.
        """
        tables = [self._rate_table(stage, rate_rps) for stage in self.stages]
        largest = [len(table.latency_ms) - 1 for table in tables]
        rows = [np.minimum(np.arange(max(largest) + 1), own) for own in largest]
        least = sum(table.cores_min()[own] for table, own in zip(tables, rows, strict=True))
        for row in np.flatnonzero(least <= self.cores_total + ROUNDING).tolist():
            solution = self._solve([_of_size(table, min(row, own)) for table, own in zip(tables, largest, strict=True)])
            if solution is not None:
                return solution
        return None

    def horizontal_within_cores(self, rate_rps: float) -> tuple[BiscaleChoice, ...]:
        """The horizontal solution for the rate, or for the highest whole rate below it that the cores can carry.

        The problem must have a horizontal solution at a rate of 0.
        """
        solution = self.horizontal(rate_rps)
        if solution is not None:
            return solution
        best, low, high = self.horizontal(0), 0, int(rate_rps) + 1
        assert best is not None, "the problem has no solution at any rate"
        while high - low > 1:
            middle = (low + high) // 2
            solution = self.horizontal(middle)
            if solution is None:
                high = middle
            else:
                best, low = solution, middle
        return best

    def vertical(self, rate_rps: float, replicas: Sequence[int]) -> tuple[BiscaleChoice, ...] | None:
        """Cores and batches with which the given number of replicas per stage carry the rate; None if there are
        none."""
        return self._solve(
            [_of_count(self._rate_table(stage, rate_rps), n) for stage, n in zip(self.stages, replicas, strict=True)]
        )

    def split(self, rate_rps: float, replicas: Sequence[int]) -> BiscaleSplit | None:
        """The vertical solution; if there is none, one for a lower whole rate plus more replicas for the rest.

        A lower rate makes batches fill more slowly, so feasibility is not monotone in the rate: the binary search ends
        at a rate that is feasible while one request per second more is not; usually, but not always, it is the highest
        feasible rate. None if even 1 request/s is infeasible.
        """
        whole = self.vertical(rate_rps, replicas)
        if whole is not None:
            return BiscaleSplit(whole, (0,) * len(self.stages), rate_rps)
        carried, carried_rps, beyond_rps = self.vertical(1, replicas), 1, math.ceil(rate_rps)
        if carried is None:
            return None
        while beyond_rps - carried_rps > 1:
            middle_rps = (carried_rps + beyond_rps) // 2
            solution = self.vertical(middle_rps, replicas)
            if solution is None:
                beyond_rps = middle_rps
            else:
                carried, carried_rps = solution, middle_rps
        missing_rps = max(0.0, rate_rps - carried_rps)
        extra = (
            math.ceil(missing_rps * stage.visits / choice.throughput_rps - ROUNDING)
            for stage, choice in zip(self.stages, carried, strict=True)
        )
        return BiscaleSplit(carried, tuple(extra), carried_rps)

    def enlarged(self, choices: Sequence[BiscaleChoice]) -> tuple[BiscaleChoice, ...]:
        """The choices with larger replicas: idle cores go, unit by unit, where they shorten the path that exceeds its
        budget most (or has the least slack), until none are left or nothing is gained."""
        made = list(choices)
        while can := [index for index, own in enumerate(made) if own.replicas + cores_of(made) <= self.cores_total]:
            gains = {index: self._gain_ms(made, index) for index in can}
            index = max(can, key=gains.__getitem__)
            if gains[index] <= (0.0, 0.0):
                break
            made[index] = self._with_unit(made, index)
        return tuple(made)

    def _gain_ms(self, choices: Sequence[BiscaleChoice], index: int) -> tuple[float, float]:
        """How much (ms) one more unit for a stage shortens the path that exceeds its budget most, and itself."""
        own = choices[index]
        if own.cores >= len(self.stages[index].latency_ms):
            return 0.0, 0.0
        larger = list(choices)
        larger[index] = self._with_unit(choices, index)
        return self._excess_ms(choices) - self._excess_ms(larger), own.latency_ms - larger[index].latency_ms

    def _with_unit(self, choices: Sequence[BiscaleChoice], index: int) -> BiscaleChoice:
        own = choices[index]
        latency_ms = float(self.stages[index].latency_ms[own.cores, own.batch - 1])
        return replace(own, cores=own.cores + 1, latency_ms=latency_ms)

    def _excess_ms(self, choices: Sequence[BiscaleChoice]) -> float:
        """By how much the segment with the least slack exceeds its budget."""
        taken_ms = [choice.latency_ms + choice.wait_ms for choice in choices]
        return max(sum(taken_ms[at] for at in each.stages) - self.slot_ms * each.slots for each in self.segments)

    def carries(self, rate_rps: float, sizes: Sequence[tuple[int, int]]) -> bool:
        """Whether replicas of given sizes, (count, units each) by stage, serve the rate within every budget.

        Each stage uses the quickest batch that keeps up. A comparison with `vertical` would not do: its cheapest
        solution may enlarge one stage and shrink another, although the given sizes also carry the rate.
        """
        slots = []
        for stage, (count, units) in zip(self.stages, sizes, strict=True):
            table = self._rate_table(stage, rate_rps)
            row = min(units, len(stage.latency_ms)) - 1
            enough = count * table.throughput_rps[row] >= table.rate_rps * (1 - ROUNDING)
            if not enough.any():
                return False
            slots.append(int(table.slots[row][enough].min()))
        return bool((self._matrix.slack(slots) >= 0).all())

    @cached_property
    def _matrix(self) -> PathMatrix:
        return segment_matrix(self.segments, len(self.stages))

    def _rate_table(self, stage: BiscaleStage, rate_rps: float) -> "_RateTable":
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
        return _RateTable(stage.latency_ms, wait_ms, throughput_rps, slots.astype(np.int64), rate_rps)

    def _solve(self, offered: Sequence["_Options"]) -> tuple[BiscaleChoice, ...] | None:
        """The cheapest combination within every budget: fewest cores, then smallest batches, then lowest latency."""
        if not all(len(one.slots) for one in offered):
            return None
        # Check two cheap bounds first: in a search for a rate, most programs are infeasible.
        quickest = [int(one.slots.argmin()) for one in offered]
        if (self._matrix.slack([one.slots[i] for one, i in zip(offered, quickest, strict=True)]) < 0).any():
            return None
        if sum(int((one.replicas * one.cores).min()) for one in offered) > self.cores_total + ROUNDING:
            return None
        options = self._stage_options(offered)
        found = [cheapest_tree(options, segments) for segments in self.forests or (self.segments,)]
        if self.forests:  # a cut may leave no solution; then start from the quickest options, which are feasible
            found = [improved(options, self._matrix, indices or quickest) for indices in found]
        solutions = [
            tuple(one.choice(i) for one, i in zip(offered, indices, strict=True)) for indices in found if indices
        ]
        best = min(solutions, key=_cost, default=None)
        return best if best and cores_of(best) <= self.cores_total + ROUNDING else None

    def _stage_options(self, offered: Sequence["_Options"]) -> list[StageOptions]:
        """Costs pack cores, then batches, then slots into one integer."""
        slots = 1 + len(self.stages) * max(segment.slots for segment in self.segments)
        batches = 1 + sum(stage.latency_ms.shape[1] for stage in self.stages)
        return [
            StageOptions((one.replicas * one.cores * batches + one.batches) * slots + one.slots, one.slots)
            for one in offered
        ]


def chain(
    stages: Sequence[BiscaleStage], slo_ms: int, *, throughput: Throughput = "with_queue", cores_total: float = math.inf
) -> BiscaleProblem:
    """The problem of a chain of stages with an end-to-end deadline of `slo_ms`."""
    return BiscaleProblem(tuple(stages), (Segment(tuple(range(len(stages))), slo_ms),), throughput, cores_total)


def cores_of(choices: Iterable[BiscaleChoice]) -> int:
    """Units of all replicas of all stages."""
    return sum(choice.replicas * choice.cores for choice in choices)


def _cost(choices: Sequence[BiscaleChoice]) -> tuple[int, int, float]:
    total_ms = sum(choice.latency_ms + choice.wait_ms for choice in choices)
    return cores_of(choices), sum(choice.batch for choice in choices), total_ms


@dataclass(frozen=True, slots=True)
class _RateTable:
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

    def cores_min(self) -> NDArray[np.float64]:
        """By replica size, shape (cores,): the fewest units that keep up with the rate, at any latency."""
        fewest: NDArray[np.float64] = self.replicas_needed().min(axis=1)
        return fewest * np.arange(1, len(fewest) + 1)


@dataclass(frozen=True, slots=True)
class _Options:
    """The entries of a table that keep up with the rate, as columns of equal length."""

    table: _RateTable
    replicas: NDArray[np.int64]
    cores: NDArray[np.int64]
    batches: NDArray[np.int64]
    slots: NDArray[np.int64]

    def choice(self, index: int) -> BiscaleChoice:
        cores, batch = int(self.cores[index]), int(self.batches[index])
        return BiscaleChoice(
            replicas=int(self.replicas[index]),
            cores=cores,
            batch=batch,
            latency_ms=float(self.table.latency_ms[cores - 1, batch - 1]),
            wait_ms=float(self.table.wait_ms[batch - 1]),
            throughput_rps=float(self.table.throughput_rps[cores - 1, batch - 1]),
        )


def _of_size(table: _RateTable, row: int) -> _Options:
    """For each batch, as many replicas of `row` + 1 units as the rate needs."""
    needed = table.replicas_needed()[row]
    columns = np.flatnonzero(np.isfinite(needed))
    replicas = needed[columns].astype(np.int64)
    return _Options(table, replicas, np.full(len(columns), row + 1), columns + 1, table.slots[row, columns])


def _of_count(table: _RateTable, replicas: int) -> _Options:
    """The sizes and batches with which the given number of replicas keep up."""
    rows, columns = np.nonzero(replicas * table.throughput_rps >= table.rate_rps * (1 - ROUNDING))
    return _Options(table, np.full(len(rows), replicas), rows + 1, columns + 1, table.slots[rows, columns])


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


def replicas_carry(problem: BiscaleProblem, rate_rps: float, present: Sequence[StageReplicas]) -> bool:
    """Whether the serving replicas carry the rate: the largest of each stage alone, or all counted as the smallest."""
    large = tuple((one.largest_count, one.largest) for one in present)
    small = tuple((one.count, one.smallest) for one in present)
    return any(problem.carries(rate_rps, sizes) for sizes in dict.fromkeys((large, small)))


def total_units(groups: Sequence[ReplicaGroups]) -> int:
    """Units of all replicas of all stages."""
    return sum(count * units for group in groups for count, units in group)


def with_small(present: StageReplicas, choice: BiscaleChoice) -> ReplicaGroups:
    """The present replicas plus new ones of the chosen size, up to the chosen number."""
    counts = Counter((*present.ready, *present.starting))
    counts[choice.cores] += max(0, choice.replicas - counts.total())
    return [(count, units) for units, count in counts.items()]


def small_first(
    problem: BiscaleProblem, rate_rps: float, present: Sequence[StageReplicas], goal: Sequence[BiscaleChoice]
) -> tuple[list[ReplicaGroups], tuple[BiscaleChoice, ...]]:
    """Groups and choices if the present replicas at full size and the goal's new ones together exceed the cluster.

    The goal's missing replicas get their cores first, since small replicas give the most throughput per core (Amdahl;
    dissertation chapter P4, on why to scale horizontally). The present ones share the remaining cores such that they
    carry most of the rate until the new ones are ready; the returned choices are those of the present ones.
    """
    counts = [min(one.count, choice.replicas) for one, choice in zip(present, goal, strict=True)]
    missing = [choice.replicas - count for count, choice in zip(counts, goal, strict=True)]
    reserved = sum(count * choice.cores for count, choice in zip(missing, goal, strict=True))
    split = replace(problem, cores_total=problem.cores_total - reserved).split(rate_rps, counts)
    choices = split.choices if split else tuple(goal)
    groups = [
        [(count, choice.cores), (new, small.cores)]
        for count, choice, new, small in zip(counts, choices, missing, goal, strict=True)
    ]
    return groups, choices
