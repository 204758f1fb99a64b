"""AsyFunc's problems: which layers a shadow should hold, and with how many cores and which batch a body should run.

A body is a replica of the whole model. A shadow holds some blocks of it, attached to one body: the body sends it rows
of a batch for these blocks, both compute, and the body goes on with all rows. Functions of numbers, after AsyFunc
(submission to SoCC'23), Algorithms 1 and 2 with the corrections of our specification, sections 2.2 to 2.8 and 2.12.
Milliseconds, bytes, requests per second (rps).

`sloop profile --layers` proposes a shadow with it (`sloop.systems.layers`). The system `asyfunc` of issue 13,
which comes next, attaches shadows by `shadow_candidates` and starts bodies by `choose_body`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sloop.units import at_least

Floats: TypeAlias = NDArray[np.float64]
Objective = Literal["literal", "printed", "demand"]

MIB: Final = 2**20
GAIN_MIN: Final = 1.02
"""A pair must have at least this factor more capacity than its body alone."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What it takes to load blocks and to move rows between body and shadow. The defaults are the published ones."""

    load_ms: float = 6.7
    load_ms_per_mib: float = 0.712
    move_ms_per_byte: float = 0.5e-6
    notify_ms: float = 0.3
    """Of one notification; each contiguous run of blocks needs two."""

    def loading_ms(self, size_bytes: float) -> float:
        """Until blocks of this size are in a process that is there already."""
        return self.load_ms + self.load_ms_per_mib * size_bytes / MIB


@dataclass(frozen=True)
class BlockCosts:
    """The blocks of a model in order, on the cores of a body and on those of its shadow."""

    body_ms: Floats
    """Shape (blocks, batches + 1): duration by number of rows from 0, which takes no time."""
    shadow_ms: Floats
    size_bytes: tuple[float, ...]
    compute: tuple[float, ...]
    """Multiply-adds, or measured time: what the order of the blocks compares with the size."""
    crossing_bytes: tuple[float, ...]
    """One row's, at each boundary: before the first block, between any two, after the last."""
    body_cores: float
    shadow_cores: float
    slo_ms: float
    moves: MoveCosts = field(default_factory=MoveCosts)

    def __post_init__(self) -> None:
        count = len(self.size_bytes)
        assert self.body_ms.shape == self.shadow_ms.shape
        assert self.body_ms.shape[0] == count == len(self.compute) == len(self.crossing_bytes) - 1
        assert not self.body_ms[:, 0].any()
        assert not self.shadow_ms[:, 0].any()

    @property
    def batch_max(self) -> int:
        """B_max."""
        return int(self.body_ms.shape[1]) - 1

    @cached_property
    def alone_ms(self) -> Floats:
        """The body without a shadow, by batch from 0."""
        return np.asarray(self.body_ms.sum(axis=0))

    @property
    def size_whole_bytes(self) -> float:
        """m."""
        return sum(self.size_bytes)

    def ranked(self) -> list[int]:
        """The blocks by compute per byte, falling; equal ones by more compute, then as they come."""
        return sorted(
            range(len(self.size_bytes)),
            key=lambda block: (-self.compute[block] / self.size_bytes[block], -self.compute[block], block),
        )

    def prefix(self) -> list[int]:
        """The blocks as they come: any first ones are one run."""
        return list(range(len(self.size_bytes)))


def capacity_rps(latency_ms: Sequence[float] | Floats, slo_ms: float) -> float:
    """The most requests per second within the SLO, by batch from 0; 0 if not even a single request keeps it."""
    return max((1e3 * batch / ms for batch, ms in enumerate(latency_ms) if batch and at_least(slo_ms, ms)), default=0.0)


def largest_batch(latency_ms: Sequence[float] | Floats, slo_ms: float) -> int:
    """bmax: the largest batch within the SLO; 0 if there is none."""
    return max((batch for batch, ms in enumerate(latency_ms) if batch and at_least(slo_ms, ms)), default=0)


# Shadows


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last block of each contiguous run."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block - 1:
            runs[-1] = runs[-1][0], block
        else:
            runs.append((block, block))
    return runs


class PairSplit(NamedTuple):
    """How a pair runs one batch."""

    body_rows: int
    shadow_rows: int
    body_ms: float
    """The body's rows through the shared blocks."""
    shadow_ms: float
    """The shadow's rows through them, moved there and back."""
    rest_ms: float
    """All rows through the other blocks."""

    @property
    def latency_ms(self) -> float:
        """t_l. With several runs of blocks a lower bound: the pair waits at the end of each."""
        return self.rest_ms + max(self.body_ms, self.shadow_ms)


@dataclass(frozen=True)
class SharedBlocks:
    """The blocks Φ that a shadow holds."""

    costs: BlockCosts
    blocks: tuple[int, ...]

    @cached_property
    def size_bytes(self) -> float:
        """m_Φ."""
        return sum(self.costs.size_bytes[block] for block in self.blocks)

    @property
    def load_ms(self) -> float:
        """t_load(Φ)."""
        return self.costs.moves.loading_ms(self.size_bytes)

    @cached_property
    def _body_ms(self) -> Floats:
        return np.asarray(self.costs.body_ms[list(self.blocks)].sum(axis=0))

    @cached_property
    def _shadow_ms(self) -> Floats:
        runs, costs = runs_of(self.blocks), self.costs
        moved_bytes = sum(costs.crossing_bytes[first] + costs.crossing_bytes[last + 1] for first, last in runs)
        moved_ms = np.arange(costs.batch_max + 1) * moved_bytes * costs.moves.move_ms_per_byte
        found = costs.shadow_ms[list(self.blocks)].sum(axis=0) + moved_ms + 2 * len(runs) * costs.moves.notify_ms
        found[0] = 0.0
        return np.asarray(found)

    def split(self, batch: int) -> PairSplit:
        """The division of a batch for which both take most nearly as long; more rows for the body if two are equal."""
        apart = np.abs(self._body_ms[: batch + 1] - self._shadow_ms[batch::-1])
        rows = batch - int(np.argmin(apart[::-1]))
        body_ms, shadow_ms = float(self._body_ms[rows]), float(self._shadow_ms[batch - rows])
        return PairSplit(
            rows, batch - rows, body_ms, shadow_ms, float(self.costs.alone_ms[batch] - self._body_ms[batch])
        )

    @cached_property
    def pair_ms(self) -> tuple[float, ...]:
        """The pair's latency by batch from 0."""
        return (0.0, *(self.split(batch).latency_ms for batch in range(1, self.costs.batch_max + 1)))

    @cached_property
    def capacity_rps(self) -> float:
        """Of the pair once it is ready: each batch by whichever is faster, pair or body alone."""
        faster = np.minimum(np.array(self.pair_ms), self.costs.alone_ms)
        return capacity_rps(faster, self.costs.slo_ms)


class ShadowCandidate(NamedTuple):
    """Blocks for a shadow, and the largest batch that keeps the SLO although the shadow must still be loaded."""

    shared: SharedBlocks
    batch: int
    split: PairSplit
    load_ms: float
    booked_rps: float
    """The capacity that is counted on while the shadow loads."""


def shadow_candidates(costs: BlockCosts, order: Sequence[int]) -> list[ShadowCandidate]:
    """For each number of first blocks of `order`, the candidate; none where no batch keeps the SLO and gives at least
    `GAIN_MIN` of the body's own capacity."""
    alone_rps = capacity_rps(costs.alone_ms, costs.slo_ms)
    found = []
    for count in range(1, len(order) + 1):
        shared = SharedBlocks(costs, tuple(order[:count]))
        if shared.load_ms > costs.slo_ms:
            continue
        for batch in range(costs.batch_max, 0, -1):
            split = shared.split(batch)
            rate_rps = 1e3 * batch / split.latency_ms
            keeps = at_least(costs.slo_ms, shared.load_ms + split.latency_ms)
            if keeps and split.shadow_rows >= 1 and rate_rps > GAIN_MIN * alone_rps:
                found.append(ShadowCandidate(shared, batch, split, shared.load_ms, rate_rps))
                break
    return found


def shadow_efficiency(found: ShadowCandidate, model_weight: float, *, printed: bool = False) -> float:
    """η of a shadow in rows per second: per core, plus per core that its memory is worth.

    `model_weight` is K = ρ·m, what one copy of the model is worth in cores; the shadow's share of it is that of its
    blocks, but the whole where the publication's Algorithm 2 is taken as `printed`.
    """
    costs = found.shared.costs
    share = 1.0 if printed else found.shared.size_bytes / costs.size_whole_bytes
    rate = 1e3 * found.split.shadow_rows / found.split.latency_ms
    return rate / costs.shadow_cores + rate / (model_weight * share)


def choose_shadow(
    found: Sequence[ShadowCandidate], model_weight: float, objective: Objective = "demand", need_rps: float = 0.0
) -> ShadowCandidate | None:
    """The candidate to start; None without one. The first of equal ones.

    "literal" and "printed" maximise `shadow_efficiency`. "demand" takes the cheapest, by its cores and the worth of its
    memory, that adds `need_rps`; if none does, the one that adds most.
    """
    if not found:
        return None
    if objective != "demand":
        return max(found, key=lambda each: shadow_efficiency(each, model_weight, printed=objective == "printed"))
    costs = found[0].shared.costs
    alone_rps = capacity_rps(costs.alone_ms, costs.slo_ms)
    enough = [each for each in found if each.booked_rps - alone_rps >= need_rps]
    if not enough:
        return max(found, key=lambda each: each.booked_rps)
    return min(enough, key=lambda each: each.shared.size_bytes)


# Bodies


class BodyChoice(NamedTuple):
    """With how many cores and which batch a new body should run."""

    cores: int
    batch: int
    efficiency: float


def choose_body(latency_ms: Floats, rate_rps: float, slo_ms: float, model_weight: float) -> BodyChoice | None:
    """Algorithm 1: the most requests per second for each core plus for the worth of the memory; None if even a single
    request on all cores misses the SLO.

    `latency_ms[c, b]` from 0 cores and 0 rows. Batches are tried from the largest; the first that improves ends the
    search for its cores, as printed. The batch must also fill within the SLO: (b - 1) / rate + latency.
    """
    best: BodyChoice | None = None
    for cores in range(1, latency_ms.shape[0]):
        for batch in range(latency_ms.shape[1] - 1, 0, -1):
            if batch > 1 and not rate_rps:
                continue
            filling_ms = 1e3 * (batch - 1) / rate_rps if batch > 1 else 0.0
            took_ms = float(latency_ms[cores, batch])
            if not at_least(slo_ms, filling_ms + took_ms):
                continue
            efficiency = 1e3 * batch / (cores * took_ms) + 1e3 * batch / (model_weight * took_ms)
            if best is None or efficiency > best.efficiency:
                best = BodyChoice(cores, batch, efficiency)
                break
    return best


# Latency without measurements


@dataclass(frozen=True, slots=True)
class MachineSpeed:
    """A machine in the parametric latency model of the specification, for cores that cannot be measured here."""

    start_ms: float = 0.03
    """Of each block."""
    compute_per_ms: float = 25e6
    """Multiply-adds per millisecond on one core."""
    serial: float = 0.08
    """σ: what a further core costs, shared by the rows of a batch; it is what makes batches worthwhile."""
    bytes_per_ms: float = 6e6
    """Memory bandwidth of one core."""
    bandwidth_cores_max: int = 6
    weights_bytes_per_ms: float = 20e6

    def latency_ms(
        self,
        compute: Sequence[float],
        size_bytes: Sequence[float],
        output_bytes: Sequence[float],
        cores: float,
        batch: int,
    ) -> Floats:
        """Of each block, for a batch of `batch`; 0 rows take no time."""
        if not batch:
            return np.zeros(len(compute))
        work = batch * np.asarray(compute) / (self.compute_per_ms * cores) * (1 + self.serial * (cores - 1) / batch)
        memory = batch * 2 * np.asarray(output_bytes) / (self.bytes_per_ms * min(cores, self.bandwidth_cores_max))
        return np.asarray(self.start_ms + work + memory + np.asarray(size_bytes) / self.weights_bytes_per_ms)


# How compute and weight relate


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: from -1 (the more of one, the less of the other) to 1; ties have their mean rank. nan if one of both
    does not vary."""
    first, second = (_ranks(np.asarray(values, dtype=np.float64)) for values in (one, other))
    spread = float(first.std() * second.std())
    return float(((first - first.mean()) * (second - second.mean())).mean() / spread) if spread else float("nan")


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[place])


def size_share(
    compute: Sequence[float], size_bytes: Sequence[float], order: Sequence[int], compute_share: float
) -> float:
    """The share of the weights in the first blocks of an order that reach this share of the compute."""
    wanted, done, taken = compute_share * sum(compute), 0.0, 0.0
    for block in order:
        if done >= wanted:
            break
        done += compute[block]
        taken += size_bytes[block]
    return taken / sum(size_bytes)
