"""Estimate against outcome, batch by batch: what was believed when a batch started, and what it took (law 2).

Beliefs are asked and never taught. Knows no queue and no second.
"""

import math
from collections.abc import Mapping

from msgspec import Struct

from sloop.actions import StartBatch
from sloop.core.views import Belief
from sloop.report.holdings import Held
from sloop.report.rows import ServiceError
from sloop.solvers.accuracy import product
from sloop.units import NS_PER_MS
from sloop.vocabulary import BatchId


class _Tally(Struct):
    """Sums behind a `ServiceError`, and the accuracy they came with."""

    batches: int = 0
    requests: int = 0
    believed_ns: int = 0
    actual_ns: int = 0
    error: float = 0.0


class Tallies:
    """Sums per (stage, variant)."""

    def __init__(self, beliefs: Mapping[tuple[str, str], Belief]) -> None:
        self.beliefs = dict(beliefs)
        self._believed_ns: dict[BatchId, tuple[int, int]] = {}
        """When a batch started and how long it is believed to take."""
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def believe(self, now_ns: int, batch: StartBatch, held: Held | None) -> None:
        """A batch starts."""
        belief = self.beliefs.get((batch.stage, held.spec.variant)) if held else None
        if held and belief is not None and len(batch.requests) <= belief.batch_max:
            costs_ns = belief.costs_ns(held.cores)
            self._believed_ns[batch.batch] = now_ns, costs_ns[len(batch.requests)]

    def forget(self, batch: BatchId) -> None:
        """It came to nothing."""
        self._believed_ns.pop(batch, None)

    def compare(self, now_ns: int, batch: StartBatch, held: Held | None) -> None:
        """It is done."""
        if held is None:
            return
        tally = self._tallies.setdefault((batch.stage, held.spec.variant), _Tally())
        tally.requests += len(batch.requests)
        started_ns, believed_ns = self._believed_ns.pop(batch.batch, (0, 0))
        if believed_ns:
            tally.batches += 1
            tally.believed_ns += believed_ns
            tally.actual_ns += now_ns - started_ns
            tally.error += abs(now_ns - started_ns - believed_ns) / believed_ns

    @property
    def accuracy(self) -> float | None:
        """Mean accuracy of the variants that computed, multiplied over the stages; None where one is unknown."""
        by_stage: dict[str, list[tuple[float, int]]] = {}
        for (stage, variant), tally in self._tallies.items():
            accuracy = self.beliefs[stage, variant].accuracy if (stage, variant) in self.beliefs else None
            if accuracy is None:
                return None
            by_stage.setdefault(stage, []).append((accuracy, tally.requests))
        means = [math.fsum(a * n for a, n in seen) / sum(n for _, n in seen) for seen in by_stage.values()]
        return product(means) if means else None

    def service_errors(self) -> list[ServiceError]:
        """Per variant that finished a batch which something was believed of."""
        return [
            ServiceError(
                stage=stage,
                variant=variant,
                batches=tally.batches,
                believed_ms=tally.believed_ns / tally.batches / NS_PER_MS,
                actual_ms=tally.actual_ns / tally.batches / NS_PER_MS,
                mape=tally.error / tally.batches,
            )
            for (stage, variant), tally in sorted(self._tallies.items())
            if tally.batches
        ]
