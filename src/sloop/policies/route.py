"""Route: which idle replica takes the next batch. Each class is one policy; none uses another."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from sloop.core.protocols import ReadyReplica, RememberingRoute
from sloop.vocabulary import ReplicaId


@dataclass(frozen=True, slots=True)
class FirstIdle:
    """The idle replica with the lowest id, index 0.

    Work concentrates on the oldest replicas, so the newest are idle when the policy scales in. Fails if replicas differ
    in speed: the oldest may not be the fastest.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return 0


_ID_OF = attrgetter("id")
"""A key for bisection that costs no call of a Python function."""


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Round robin: the idle replica with the next higher id after the previous choice, then the lowest id again.

    FA2 (RTAS 2022) gives batches to its equal replicas in this way. A binary search from the previous choice finds the
    next replica, so no state goes stale when replicas start and stop. Fails if replicas differ in speed.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        index = bisect_right(idle, last, key=_ID_OF)
        return index if index < len(idle) else 0


FORGOTTEN_MAX = 64
"""The most credits to keep for replicas that are not idle; above this, those with the lowest ids are deleted."""


Credits = tuple[tuple[ReplicaId, float], ...]


@dataclass(frozen=True, slots=True)
class SmoothWeighted(RememberingRoute):
    """Smooth weighted round robin, as in nginx: batches in proportion to planned rates, spread evenly.

    The weight of a replica is the rate that the plan expects it to serve; its cores if the plan does not say. Each
    choice credits every candidate with its weight and charges the chosen one the sum, so a replica with twice the
    weight gets its turns spread out, not two in a row. O(n) in idle replicas. Fails if the plan gives no rates and
    speed does not grow with cores.
    """

    def choose(
        self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId, memory: Credits | None
    ) -> tuple[int, Credits]:
        credit, best, most, total = dict(memory or ()), 0, -inf, 0.0
        for index, replica in enumerate(idle):
            weight = replica.weight
            credit[replica.id] = own = credit.get(replica.id, 0.0) + weight
            total += weight
            if own > most:
                best, most = index, own
        credit[idle[best].id] = most - total
        if len(credit) > len(idle) + FORGOTTEN_MAX:
            present = {replica.id for replica in idle}
            for replica_id in sorted(credit.keys() - present)[: -FORGOTTEN_MAX // 2]:
                del credit[replica_id]
        return best, tuple(credit.items())


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The idle replica with the fewest batches so far, relative to its weight; ties go to the lowest id.

    The weight is the rate that the plan expects it to serve; its cores if the plan does not say. All candidates are
    idle, so load can only mean past work. A new replica is preferred until it has caught up, which is harmless. O(n) in
    idle replicas.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return min(range(len(idle)), key=lambda index: idle[index].batches / idle[index].weight)


@dataclass(frozen=True, slots=True)
class Fastest:
    """The idle replica with the shortest believed batch of one; ties go to the lowest id.

    For replicas of different hardware: each batch takes as little time as possible, and slow replicas work only while
    all faster ones are busy. O(n) in idle replicas. Fails if deadlines differ: a request that could afford a slow
    replica takes a fast one, which a later, more urgent request would need.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return min(range(len(idle)), key=lambda index: idle[index].alone_ns)


@dataclass(frozen=True, slots=True)
class Smallest:
    """The idle replica with the smallest batch limit; ties go to the lowest id.

    AsyFunc (submission to SoCC'23, Algorithm 3) keeps large replicas for bursts: small ones serve more requests per
    core. O(n) in idle replicas. Fails if the plan gives all replicas the same limit: then it is `first_idle`.
    """

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return min(range(len(idle)), key=lambda index: idle[index].batch_max)
