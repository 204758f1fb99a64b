"""AsyFunc's problems: which layers a shadow should hold, and with how many cores and which batch a body should run.

A body is a replica of the whole model. A shadow holds some blocks of it, attached to one body: the body sends it rows
of a batch for these blocks, both compute, and the body goes on with all rows; `sloop.profile.pairs` says how long that
takes. Functions of numbers, after AsyFunc (submission to SoCC'23), Algorithms 1 and 2 with the corrections of our
specification, sections 2.2 to 2.8 and 2.12. Milliseconds, bytes, requests per second (rps).

`sloop profile --layers` proposes a shadow with it (`sloop.systems.layers`). The scaling policy `asyfunc` attaches
shadows by `shadow_candidates` and starts bodies by `choose_body`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np

from sloop.profile.pairs import BlockCosts, Floats, PairSplit, SharedBlocks, capacity_rps
from sloop.units import at_least

Objective = Literal["literal", "printed", "demand"]

GAIN_MIN: Final = 1.02
"""A pair must have at least this factor more capacity than its body alone."""


# Shadows


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
