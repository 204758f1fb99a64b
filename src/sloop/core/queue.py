"""The queue of one stage: visits in the order a policy gives, kept sorted so that any of them can be looked at.

Two parallel lists, bisected on insertion: deadlines and arrivals come nearly in order, so an insertion lands near the
end and moves few pointers; policies read `visits` as the plain list it is.
"""

from bisect import bisect_right
from collections.abc import Sequence

from sloop.core.protocols import Order
from sloop.vocabulary import RequestId, Visit


class Queue:
    """Waiting visits, first to serve first. Equal keys keep the order in which they came."""

    __slots__ = ("_key", "_keys", "visits")

    def __init__(self, order: Order) -> None:
        self._key = order.key
        self._keys: list[int] = []
        self.visits: list[Visit] = []

    def push(self, visit: Visit) -> None:
        key = self._key(visit)
        keys = self._keys
        if not keys or key >= keys[-1]:
            keys.append(key)
            self.visits.append(visit)
            return
        at = bisect_right(keys, key)
        keys.insert(at, key)
        self.visits.insert(at, visit)

    def take(self, count: int) -> list[Visit]:
        """Remove and return the first `count` visits, or all there are."""
        if count == 1 and self.visits:
            del self._keys[0]
            return [self.visits.pop(0)]
        taken = self.visits[:count]
        del self.visits[:count]
        del self._keys[:count]
        return taken

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these places, which ascend, in one pass however many they are."""
        if not indices:
            return
        first, end, gone = indices[0], indices[-1] + 1, set(indices)
        stay = [index for index in range(first, end) if index not in gone]
        self.visits[first:end] = [self.visits[index] for index in stay]
        self._keys[first:end] = [self._keys[index] for index in stay]

    def remove_request(self, request: RequestId) -> int:
        """Remove every visit of a request; returns how many there were."""
        found = [index for index, visit in enumerate(self.visits) if visit.request.id == request]
        self.remove(found)
        return len(found)
