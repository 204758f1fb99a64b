"""Which blocks of a model a shadow should hold, and with how many cores and which batch a body should run.

A body is a replica of the whole model. A shadow is attached to one body and holds some blocks of its model. For these
blocks, the body sends some rows of a batch to the shadow, both compute, and the body continues with all rows;
`sloop.profile.pairs` computes how long that takes. Functions of numbers, after AsyFunc (submission to SoCC'23),
Algorithms 1 and 2 with the corrections of our specification, sections 2.2 to 2.8 and 2.12. Milliseconds, bytes,
requests per second (rps).

`sloop profile --layers` uses this module to propose a shadow (`sloop.systems.layers`). The scaling policy `bodies`
chooses shadows with `shadow_candidates` and `choose_shadow`, and bodies with `choose_body`.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from sloop.profile.pairs import BlockCosts, Floats, PairSplit, SharedBlocks
from sloop.units import at_least

Objective = Literal["literal", "printed", "demand"]

GAIN_MIN: Final = 1.02
"""The capacity of a pair must be at least this many times that of its body alone."""


def capacity_rps(latency_ms: Sequence[float] | Floats, slo_ms: float) -> float:
    """Equation (1), for one replica: the most requests per second within the SLO; 0 if not even a single request keeps
    it. `latency_ms` is by batch from 0."""
    return max((1e3 * batch / ms for batch, ms in enumerate(latency_ms) if batch and at_least(slo_ms, ms)), default=0.0)


def largest_batch(latency_ms: Sequence[float] | Floats, slo_ms: float) -> int:
    """bmax: the largest batch within the SLO; 0 if there is none."""
    return max((batch for batch, ms in enumerate(latency_ms) if batch and at_least(slo_ms, ms)), default=0)


# Shadows


class ShadowCandidate(NamedTuple):
    """Blocks for a shadow, and the largest batch that keeps the SLO although the shadow must still be loaded."""

    shared: SharedBlocks
    batch: int
    split: PairSplit
    load_ms: float
    booked_rps: float
    """The capacity that plans count for the pair while the shadow loads."""


def shadow_candidates(costs: BlockCosts, order: Sequence[int]) -> list[ShadowCandidate]:
    """A candidate for each number of first blocks of `order`; none if no batch keeps the SLO with at least `GAIN_MIN` ×
    the capacity of the body alone."""
    alone_rps = capacity_rps(costs.alone_ms, costs.slo_ms)
    body_ms, shadow_ms = _first_blocks_ms(costs, order)
    loads_ms = [SharedBlocks(costs, tuple(order[:count])).load_ms for count in range(1, len(order) + 1)]
    chosen: dict[int, ShadowCandidate] = {}
    for batch in range(costs.batch_max, 0, -1):
        apart_ms = np.abs(body_ms[:, : batch + 1] - shadow_ms[:, batch::-1])
        all_rows = batch - np.argmin(apart_ms[:, ::-1], axis=1)
        for place, load_ms in enumerate(loads_ms):
            rows = int(all_rows[place])
            if place in chosen or rows == batch or load_ms > costs.slo_ms:
                continue
            own_ms, other_ms = float(body_ms[place, rows]), float(shadow_ms[place, batch - rows])
            rest_ms = float(costs.alone_ms[batch] - body_ms[place, batch])
            split = PairSplit(rows, batch - rows, own_ms, other_ms, rest_ms)
            rate_rps = 1e3 * batch / split.latency_ms
            if at_least(costs.slo_ms, load_ms + split.latency_ms) and rate_rps > GAIN_MIN * alone_rps:
                shared = SharedBlocks(costs, tuple(order[: place + 1]))
                chosen[place] = ShadowCandidate(shared, batch, split, load_ms, rate_rps)
    return [chosen[place] for place in sorted(chosen)]


def _first_blocks_ms(costs: BlockCosts, order: Sequence[int]) -> tuple[Floats, Floats]:
    """For each number of first blocks of `order`, the durations of these blocks on the body and on the shadow, by rows.
    Those on the shadow include moving the rows at the boundaries of its runs of blocks."""
    moved_bytes, runs = np.zeros(len(order)), np.zeros(len(order))
    crossed: set[int] = set()
    for place, block in enumerate(order):
        crossed ^= {block, block + 1}
        moved_bytes[place] = sum(costs.crossing_bytes[boundary] for boundary in sorted(crossed))
        runs[place] = len(crossed) / 2
    rows, moves = np.arange(costs.batch_max + 1), costs.moves
    body_ms = costs.body_ms[list(order)].cumsum(axis=0)
    shadow_ms = costs.shadow_ms[list(order)].cumsum(axis=0)
    shadow_ms += moved_bytes[:, None] * rows * moves.move_ms_per_byte + (2 * runs * moves.notify_ms)[:, None]
    shadow_ms[:, 0] = 0.0
    return body_ms, shadow_ms


def shadow_efficiency(found: ShadowCandidate, memory_cores: float, *, printed: bool = False) -> float:
    """η, the efficiency of a shadow: its rows per second per core, plus its rows per second per core that its memory is
    worth.

    `memory_cores` is K = ρ·m, the cores that one copy of the model is worth. The shadow counts with the share of its
    blocks; with `printed`, as in the publication's Algorithm 2, with the whole model.
    """
    costs = found.shared.costs
    share = 1.0 if printed else found.shared.size_bytes / costs.size_whole_bytes
    rate = 1e3 * found.split.shadow_rows / found.split.latency_ms
    return rate / costs.shadow_cores + rate / (memory_cores * share)


def choose_shadow(
    found: Sequence[ShadowCandidate], memory_cores: float, objective: Objective = "demand", need_rps: float = 0.0
) -> ShadowCandidate | None:
    """The shadow to start; None without candidates. Of equal candidates the first one.

    All candidates have equally many cores. "literal" and "printed" maximise `shadow_efficiency`. "demand" takes the
    candidate with the fewest bytes that adds `need_rps` to the capacity of the body; if none adds as much, the one that
    adds most.
    """
    if not found:
        return None
    if objective != "demand":
        return max(found, key=lambda each: shadow_efficiency(each, memory_cores, printed=objective == "printed"))
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


def choose_body(latency_ms: Floats, rate_rps: float, slo_ms: float, memory_cores: float) -> BodyChoice | None:
    """Algorithm 1: the cores and batch that serve the most requests per second per core, memory counted as cores. None
    if even a single request on all cores misses the SLO.

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
            efficiency = 1e3 * batch / (cores * took_ms) + 1e3 * batch / (memory_cores * took_ms)
            if best is None or efficiency > best.efficiency:
                best = BodyChoice(cores, batch, efficiency)
                break
    return best


# How compute and weight relate


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, from -1 (one falls where the other rises) to 1; ties get their mean rank. nan if one
    of the two is constant."""
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
