"""How long a pair of a body and a shadow takes for a batch, computed from the durations of the model's blocks.

A body is a replica of the whole model. A shadow holds some blocks of it: for these blocks, the body sends some rows of
a batch to the shadow, both compute, and the body continues with all rows. Functions of numbers, after AsyFunc
(submission to SoCC'23), with the corrections of our specification, sections 2.2, 2.3 and 2.8. Milliseconds, bytes,
requests per second.

Estimates (`sloop.profile.estimate`), the solver that chooses shadows (`sloop.solvers.bodies`) and the simulator's
truth take pair times from here. It must not import files, profiles or views.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

MIB: Final = 2**20
NOTIFY_MS: Final = 0.3
"""Assumed for one message between processes of a node; AsyFunc's specification, section 2.3."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """The times to load blocks and to move rows between body and shadow. The defaults are the published ones."""

    load_ms: float = 6.7
    load_ms_per_mib: float = 0.712
    move_ms_per_byte: float = 0.5e-6
    notify_ms: float = NOTIFY_MS
    """The time of one notification; each contiguous run of blocks needs two."""

    def loading_ms(self, size_bytes: float) -> float:
        """The time to load blocks of this size into a running process."""
        return self.load_ms + self.load_ms_per_mib * size_bytes / MIB


@dataclass(frozen=True)
class BlockCosts:
    """The blocks of a model in order, on the cores of a body and on those of its shadow."""

    body_ms: Floats
    """Shape (blocks, batches + 1): duration by number of rows from 0, which takes no time."""
    shadow_ms: Floats
    size_bytes: tuple[float, ...]
    compute: tuple[float, ...]
    """The compute of each block, in multiply-adds or measured time, which `ranked` compares with the size."""
    crossing_bytes: tuple[float, ...]
    """The bytes of one row that cross each boundary: before the first block, between any two, after the last."""
    shadow_cores: float
    slo_ms: float
    moves: MoveCosts = field(default_factory=MoveCosts)
    block_load_ms: tuple[float, ...] = ()
    """The time to load each block, beyond the time to load anything (`moves.load_ms`); empty to compute it from the
    sizes."""

    def __post_init__(self) -> None:
        count = len(self.size_bytes)
        assert self.body_ms.shape == self.shadow_ms.shape
        assert self.body_ms.shape[0] == count == len(self.compute) == len(self.crossing_bytes) - 1
        assert not self.body_ms[:, 0].any()
        assert not self.shadow_ms[:, 0].any()

    @property
    def batch_max(self) -> int:
        """B_max: the largest batch with a duration."""
        return int(self.body_ms.shape[1]) - 1

    @cached_property
    def alone_ms(self) -> Floats:
        """The time of the body without a shadow, by batch from 0."""
        return np.asarray(self.body_ms.sum(axis=0))

    @property
    def size_whole_bytes(self) -> float:
        """m: the bytes of all blocks."""
        return sum(self.size_bytes)

    def ranked(self) -> list[int]:
        """The blocks by falling compute per byte; of equal ones, the one with more compute comes first, then the
        earlier one."""
        return sorted(
            range(len(self.size_bytes)),
            key=lambda block: (-self.compute[block] / self.size_bytes[block], -self.compute[block], block),
        )

    def prefix(self) -> list[int]:
        """The blocks in the order of the model: the first blocks of this order always form one run."""
        return list(range(len(self.size_bytes)))


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
    """The time of the body's rows in the shared blocks."""
    shadow_ms: float
    """The time of the shadow's rows in them, with moving the rows there and back."""
    rest_ms: float
    """The time of all rows in the other blocks."""

    @property
    def latency_ms(self) -> float:
        """t_l: the time of the batch. With several runs of blocks a lower bound: the pair waits at the end of each."""
        return self.rest_ms + max(self.body_ms, self.shadow_ms)


@dataclass(frozen=True)
class SharedBlocks:
    """The blocks Φ that a shadow holds."""

    costs: BlockCosts
    blocks: tuple[int, ...]

    @cached_property
    def size_bytes(self) -> float:
        """m_Φ: the bytes of these blocks."""
        return sum(self.costs.size_bytes[block] for block in self.blocks)

    @property
    def load_ms(self) -> float:
        """t_load(Φ): the time to load these blocks into a running process."""
        own_ms, moves = self.costs.block_load_ms, self.costs.moves
        if not own_ms:
            return moves.loading_ms(self.size_bytes)
        return moves.load_ms + sum(own_ms[block] for block in self.blocks)

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
        """The division of a batch for which the times of both differ least; on a tie, the body gets more rows."""
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
    def waiting_ms(self) -> tuple[float, ...]:
        """The latency by batch from 0, with the waits of the pair at the end of each run of blocks (section 2.8)."""
        return (0.0, *(self._waiting_ms(batch) for batch in range(1, self.costs.batch_max + 1)))

    def _waiting_ms(self, batch: int) -> float:
        costs, split = self.costs, self.split(batch)
        passed_ms = split.rest_ms
        for first, last in runs_of(self.blocks):
            run = slice(first, last + 1)
            body_ms = float(costs.body_ms[run, split.body_rows].sum())
            if not split.shadow_rows:
                passed_ms += body_ms
                continue
            moved_bytes = split.shadow_rows * (costs.crossing_bytes[first] + costs.crossing_bytes[last + 1])
            shadow_ms = float(costs.shadow_ms[run, split.shadow_rows].sum())
            shadow_ms += moved_bytes * costs.moves.move_ms_per_byte + 2 * costs.moves.notify_ms
            passed_ms += max(body_ms, shadow_ms)
        return passed_ms
