"""Idle replicas in turn, in proportion to their cores, spread as evenly as whole batches allow.

The smooth weighted round robin of nginx: each choice credits every candidate with its weight and charges the chosen
one the sum, so a replica with twice the cores gets every other turn rather than two in a row. O(n) in idle replicas.
Fails where speed does not grow with cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sloop.core.protocols import ReadyReplica
from sloop.vocabulary import ReplicaId

FORGOTTEN_MAX = 64
"""Credits kept for replicas that are not idle now; beyond that, those of the oldest ids are forgotten."""


@dataclass(frozen=True, slots=True)
class SmoothWeighted:
    """Weights are cores. Credits of replicas that vanish are forgotten in bounded number."""

    _credit: dict[ReplicaId, float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        credit = self._credit
        best, total = 0, 0.0
        for index, replica in enumerate(idle):
            credit[replica.id] = credit.get(replica.id, 0.0) + replica.cores
            total += replica.cores
            if credit[replica.id] > credit[idle[best].id]:
                best = index
        credit[idle[best].id] -= total
        if len(credit) > len(idle) + FORGOTTEN_MAX:
            self._forget(idle)
        return best

    def _forget(self, idle: Sequence[ReadyReplica]) -> None:
        present = {replica.id for replica in idle}
        for replica_id in sorted(self._credit.keys() - present)[: -FORGOTTEN_MAX // 2]:
            del self._credit[replica_id]
