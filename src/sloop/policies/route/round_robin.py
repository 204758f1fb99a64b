"""The idle replicas in turn, by id.

FA2 (RTAS 2022) hands batches to its equal replicas round-robin. O(log n): the turn is found from the previous choice,
so there is no memory to keep in step with replicas that come and go. Fails where replicas differ in speed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import ReadyReplica
from sloop.vocabulary import ReplicaId


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The next higher id after the previous choice; from the start again after the highest."""

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        index = bisect_right(idle, last, key=_id)
        return index if index < len(idle) else 0


def _id(replica: ReadyReplica) -> ReplicaId:
    return replica.id
