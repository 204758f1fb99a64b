"""What the measured layers of a model suggest: where to cut it, and which blocks a shadow should hold.

`sloop profile --layers` shows these proposals with what each would save. They come from the solvers of Flashpoint
(pieces that load side by side and serve as a pipeline) and AsyFunc (a shadow that computes rows of a batch for the
blocks that compute much and weigh little). All times are estimates from one profile of one machine.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Final

import numpy as np
from msgspec import Struct

from sloop.errors import InputError
from sloop.profile.blocks import block_costs
from sloop.profile.pairs import NOTIFY_MS, BlockCosts, SharedBlocks, runs_of
from sloop.profile.profile import LatencyTable, LayerProfile
from sloop.solvers.bodies import ShadowCandidate, capacity_rps, rank_correlation, shadow_candidates, size_share
from sloop.solvers.cuts import PieceCosts, PiecePlan, best_plan, even_plan, plan_fronts

PIECES: Final = (2, 3, 4, 6, 8)
PROCESSES: Final = (2, 4)
QUEUES: Final = (1, 10, 100, 1000)
"""Pieces into which a model is proposed to be cut; processes that are added, and batches that wait meanwhile."""
MS_PER_S: Final = 1e3


class CutProposal(Struct, frozen=True):
    """A model in pieces, each loaded by a process of its own, side by side."""

    pieces: int
    after: tuple[str, ...]
    """The layers after which to cut."""
    load_ms: float
    """Until the slowest piece is loaded."""
    load_saved_ms: float
    """Compared with loading the whole model."""
    slowest_ms: float
    """The slowest station of the pipeline, piece or transfer: it answers a batch each time this has passed."""
    request_ms: float
    """One batch through the idle pipeline."""
    param_bytes_max: int
    """Weights of the heaviest piece."""


class QueueProposal(Struct, frozen=True):
    """The best plan when batches wait and processes are added: whole models, or pipelines of pieces."""

    processes: int
    waiting: int
    pieces: int
    after: tuple[str, ...]
    mean_ms: float
    """Mean time until a waiting batch is answered."""
    whole_ms: float
    """The same with every process loading the whole model."""


class ShadowProposal(Struct, frozen=True):
    """Blocks for a shadow beside a body, each on the same number of cores."""

    selection: str
    """`prefix`: the first blocks, sent and returned once; `ranked`: those with the most compute per byte."""
    blocks: tuple[str, ...]
    """The last layer of each, in the model's order."""
    runs: int
    """How many times rows are sent to the shadow and back."""
    param_bytes: int
    param_share: float
    load_ms: float
    load_saved_ms: float
    """Compared with loading the whole model."""
    batch: int
    body_rows: int
    shadow_rows: int
    alone_ms: float
    """The batch on the body alone."""
    pair_ms: float
    gain: float
    """How many times the requests per second of the body alone."""


class LayerProposals(Struct, frozen=True):
    """All of them, and how compute and weight relate."""

    batch: int
    """Of the times of cuts."""
    shadow_batch: int
    cores: float
    correlation: float | None
    """Spearman's, of the compute of a block and its weight; None if one of both does not vary."""
    half_compute_share: float
    """The share of the weights in the blocks with half of the compute, those with the most compute per byte first."""
    cuts: tuple[CutProposal, ...]
    queues: tuple[QueueProposal, ...]
    shadows: tuple[ShadowProposal, ...]
    """The proposed one first; empty if none makes the body faster."""


class BlockTable:
    """The measured blocks as columns of numbers, on the fewest measured cores."""

    def __init__(self, layers: LayerProfile, memory_bytes_max: float = inf, fetch_mbps: float | None = None) -> None:
        self.layers = layers
        if not isinstance(layers.latency_ms, LatencyTable):
            what = "its layers have computed latencies, not measured ones"
            raise InputError(what, help="measure them with `sloop profile MODEL --layers`")
        table = layers.latency_ms.table
        self.batch, self.shadow_batch = min(table), max(table)
        self.cores = min(table[self.batch])
        self._memory_bytes_max, self._fetch_mbps = memory_bytes_max, fetch_mbps

    @cached_property
    def compute_ms(self) -> tuple[float, ...]:
        """Of each block, for the largest measured batch."""
        return tuple(block.latency_ms.latency_ms(self.shadow_batch, self.cores) for block in self.layers.blocks)

    @cached_property
    def param_bytes(self) -> tuple[int, ...]:
        """Of each block."""
        return tuple(block.param_bytes for block in self.layers.blocks)

    @cached_property
    def costs(self) -> BlockCosts:
        """Of a body and a shadow on the same cores, in batches up to the largest measured one."""
        return block_costs(self.layers, self.cores, self.cores, self.shadow_batch)

    @property
    def ranked(self) -> list[int]:
        """The blocks by compute per byte, falling."""
        return self.costs.ranked()

    def load_ms(self, blocks: Sequence[int]) -> float:
        """To load these blocks as one piece, fetched before if a rate is given."""
        fetch_ms = self._fetch_ms(sum(self.param_bytes[place] for place in blocks))
        return SharedBlocks(self.costs, tuple(blocks)).load_ms + fetch_ms

    @property
    def load_whole_ms(self) -> float:
        """To load the uncut model, fetched before if a rate is given."""
        return self.layers.load_ms + self._fetch_ms(sum(self.param_bytes))

    def _fetch_ms(self, size_bytes: float) -> float:
        return 8 * size_bytes / 1e6 / self._fetch_mbps * MS_PER_S if self._fetch_mbps else 0.0

    def piece_costs(self) -> PieceCosts:
        """For the solver of cuts; cold starts are without `load_fixed_ms`, which is the same for all pieces."""
        blocks, moves = self.layers.blocks, self.costs.moves
        cold_ms = [block.load_ms - moves.load_ms + self._fetch_ms(block.param_bytes) for block in blocks]
        exec_ms = [block.latency_ms.latency_ms(self.batch, self.cores) for block in blocks]
        moved_ms = [NOTIFY_MS + self.batch * each.crossing_bytes * moves.move_ms_per_byte for each in blocks[:-1]]
        return PieceCosts(
            tuple(time_ms / MS_PER_S for time_ms in cold_ms),
            tuple(time_ms / MS_PER_S for time_ms in exec_ms),
            tuple(time_ms / MS_PER_S for time_ms in moved_ms),
            self.param_bytes,
            self._memory_bytes_max,
        )

    def shadow(self, selection: str) -> ShadowProposal | None:
        """The shadow whose share of what the best one gains exceeds its share of the load time by most: where more
        blocks begin to weigh more than they gain. None if none gains anything."""
        costs = self.costs
        order = costs.prefix() if selection == "prefix" else costs.ranked()
        candidates = shadow_candidates(costs, order[:-1])  # with all blocks it would be another body
        if not candidates:
            return None
        alone_rps = capacity_rps(costs.alone_ms, inf)
        best_rps = max(candidate.booked_rps for candidate in candidates)

        def advantage(candidate: ShadowCandidate) -> float:
            gain = (candidate.booked_rps - alone_rps) / (best_rps - alone_rps)
            return gain - self.load_ms(candidate.shared.blocks) / self.load_whole_ms

        chosen = max(candidates, key=advantage)
        return self._proposal(selection, chosen, alone_rps)

    def _proposal(self, selection: str, chosen: ShadowCandidate, alone_rps: float) -> ShadowProposal:
        blocks = sorted(chosen.shared.blocks)
        size_bytes = sum(self.param_bytes[place] for place in blocks)
        load_ms = self.load_ms(blocks)
        return ShadowProposal(
            selection=selection,
            blocks=tuple(self.layers.blocks[place].end for place in blocks),
            runs=len(runs_of(blocks)),
            param_bytes=size_bytes,
            param_share=size_bytes / max(1, sum(self.param_bytes)),
            load_ms=load_ms,
            load_saved_ms=self.load_whole_ms - load_ms,
            batch=chosen.batch,
            body_rows=chosen.split.body_rows,
            shadow_rows=chosen.split.shadow_rows,
            alone_ms=float(chosen.shared.costs.alone_ms[chosen.batch]),
            pair_ms=chosen.split.latency_ms,
            gain=chosen.booked_rps / alone_rps,
        )


def layer_proposals(
    layers: LayerProfile, *, memory_bytes_max: float = inf, fetch_mbps: float | None = None
) -> LayerProposals:
    """Proposals from a layer profile.

    No piece gets more than `memory_bytes_max` of weights; with `fetch_mbps` the weights must first be fetched at so
    many megabits per second, each piece by its own link.
    """
    table = BlockTable(layers, memory_bytes_max, fetch_mbps)
    ends = [block.end for block in layers.blocks]
    costs = table.piece_costs()
    fixed_ms = layers.load_fixed_ms

    def after(plan: PiecePlan) -> tuple[str, ...]:
        return tuple(ends[cut - 1] for cut in plan.cuts)

    def cut(plan: PiecePlan) -> CutProposal:
        load_ms = fixed_ms + plan.cold_s * MS_PER_S
        borders = (0, *plan.cuts, len(ends))
        heaviest = max(sum(table.param_bytes[start:end]) for start, end in pairwise(borders))
        slowest_ms, request_ms = plan.slowest_s * MS_PER_S, plan.request_s * MS_PER_S
        return CutProposal(
            plan.pieces, after(plan), load_ms, table.load_whole_ms - load_ms, slowest_ms, request_ms, heaviest
        )

    fronts = plan_fronts(costs, max(PROCESSES))
    whole = costs.plan(())._replace(cold_s=(table.load_whole_ms - fixed_ms) / MS_PER_S)  # measured in one

    def queue(processes: int, waiting: int, plan: PiecePlan) -> QueueProposal:
        chosen = plan if plan.cuts else whole
        mean_s, whole_s = (start.mean_s(waiting, processes) for start in (chosen, whole))
        mean_ms, whole_ms = fixed_ms + mean_s * MS_PER_S, fixed_ms + whole_s * MS_PER_S
        return QueueProposal(processes, waiting, plan.pieces, after(plan), mean_ms, whole_ms)

    queues = [
        queue(processes, waiting, plan)
        for processes in PROCESSES
        for waiting in QUEUES
        if (plan := best_plan(fronts, waiting, processes)) is not None
    ]
    correlation = rank_correlation(table.compute_ms, table.param_bytes)
    return LayerProposals(
        batch=table.batch,
        shadow_batch=table.shadow_batch,
        cores=table.cores,
        correlation=None if np.isnan(correlation) else correlation,
        half_compute_share=size_share(table.compute_ms, table.param_bytes, table.ranked, 0.5)
        if sum(table.param_bytes)
        else 0.0,
        cuts=tuple(cut(plan) for pieces in PIECES if (plan := even_plan(costs, pieces)) is not None),
        queues=tuple(queues),
        shadows=tuple(shadow for order in ("prefix", "ranked") if (shadow := table.shadow(order)) is not None),
    )
