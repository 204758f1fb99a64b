"""The idle replica with the lowest id.

Work concentrates on the oldest replicas, so the newest ones are idle when it is time to scale in. O(1). Fails where
replicas differ in speed: the oldest need not be the quickest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import ReadyReplica
from sloop.vocabulary import ReplicaId


@dataclass(frozen=True, slots=True)
class FirstIdle:
    """Always index 0."""

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return 0
