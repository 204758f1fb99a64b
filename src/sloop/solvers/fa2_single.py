"""FA2's rule for a single model: the fewest one-core replicas, with a batch, that serve a second's requests in time.

The horizontal baseline that Sponge is compared with (EuroMLSys 2024, evaluation; the rule is that of its public
artefact). Pure arithmetic in its units, milliseconds and requests per second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """`replicas` with batches of `batch`, each taking `latency_ms`, `rounds` of them after the first."""

    replicas: int
    batch: int
    latency_ms: float
    rounds: int


def solve(
    latency_ms: Sequence[float],
    rate_rps: float,
    *,
    way_max_ms: float,
    limit_ms: float,
    slo_ms: float,
    replicas_max: int,
) -> Answer | None:
    """Fewest replicas, then the smallest batch; None where even `replicas_max` do not suffice.

    `latency_ms[b - 1]` is L = l(b, 1); `limit_ms` is margin × SLO. With q = SLO - cl, n replicas need the throughput
    n · ⌊q/L⌋ · b ≥ λ and the latency L + ⌈λ/(n b)⌉ · L + cl < limit. The artefact cuts L to whole ms; we do not.
    """
    left_ms = slo_ms - way_max_ms
    for replicas in range(1, replicas_max + 1):
        for batch, own_ms in enumerate(latency_ms, start=1):
            if replicas * math.floor(left_ms / own_ms) * batch < rate_rps:
                continue
            rounds = math.ceil(rate_rps / (replicas * batch))
            if own_ms + rounds * own_ms + way_max_ms < limit_ms:
                return Answer(replicas, batch, own_ms, rounds)
    return None
