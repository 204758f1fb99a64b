"""The idle replica that has been sent the fewest batches per core.

All candidates are idle, so load can only mean work done so far; this evens wear and warms new replicas first. O(n) in
idle replicas. Fails, harmlessly, after a scale-out: the newcomer is preferred until it has caught up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import ReadyReplica
from sloop.vocabulary import ReplicaId


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """Smallest batches ÷ cores; ties go to the lowest id."""

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        return min(range(len(idle)), key=lambda index: idle[index].batches / idle[index].cores)
