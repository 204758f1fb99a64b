"""Route: which idle replica takes the next batch. Each class is one policy; none uses another."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from sloop.core.protocols import ReadyReplica
from sloop.vocabulary import ReplicaId


@dataclass(frozen=True, slots=True)
class FirstIdle:
    """The idle replica with the lowest id, index 0.

    Work concentrates on the oldest replicas, so the newest ones are idle when it is time to scale in. Fails where
    replicas differ in speed: the oldest need not be the fastest.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The idle replicas in turn: the next higher id after the previous choice, then from the lowest again.

    FA2 (RTAS 2022) hands batches to its equal replicas round-robin. The turn is found from the previous choice by
    binary search, so there is no memory that could disagree with replicas that start and stop. Fails where replicas
    differ in speed.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        index = bisect_right(idle, last, key=_id)
        return index if index < len(idle) else 0


def _id(replica: ReadyReplica) -> ReplicaId:
    return replica.id


FORGOTTEN_MAX = 64
"""Credits kept for replicas that are busy or gone; beyond that, those with the lowest ids are forgotten."""


@dataclass(frozen=True, slots=True)
class SmoothWeighted:
    """The idle replicas in turn, in proportion to their cores, interleaved as evenly as whole batches allow.

    nginx's smooth weighted round robin: each choice credits every candidate with its weight and charges the chosen one
    the sum, so a replica with twice the cores gets every other turn rather than two in a row. O(n) in idle replicas.
    Fails where speed does not grow with cores.
    """

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


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The idle replica that has been sent the fewest batches per core; ties go to the lowest id.

    All candidates are idle, so load can only mean the work done so far: this balances it and gives new replicas work
    first. O(n) in idle replicas. After a scale-out a new replica is preferred until it has caught up, which is
    harmless.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return min(range(len(idle)), key=lambda index: idle[index].batches / idle[index].cores)
