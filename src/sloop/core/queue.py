"""The waiting visits of a stage."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from sloop.core.protocols import Order
from sloop.units import FOREVER_NS
from sloop.vocabulary import RequestId, Visit

FIRST_KEY = -(1 << 63)
"""The key of visits that are tried again: before all others, as they were when their first batch began."""


LOOKED_AT = 1_000
"""When a batch is formed from a mixed queue, only so many visits at its head are looked at: this bounds the time of a
decision. The others move up as these leave."""

LaneKey = tuple[int, ...]
"""The class of sizes of a lane and, where rows are not padded, what else its visits have in common: size and shape."""


class Queue:
    """Waiting visits, sorted by the order policy's key. Visits with equal keys stay in order of arrival.

    Two parallel lists with bisection, not a heap: deadlines and arrivals come nearly sorted, so an insertion lands near
    the end and moves few pointers, and policies can read `visits` as a sorted list. `visits` is never replaced by
    another list object, because the data path keeps a reference to it. Batch policies see it as a `QueueView`.
    """

    def __init__(self, stage: str, order: Order) -> None:
        self.stage = stage
        self._key = order.key
        self._keys: list[int] = []
        self.visits: list[Visit] = []
        self.sweep_ns = FOREVER_NS
        """When to search for passed deadlines next; `FOREVER_NS` if the queue is empty."""
        self.wait_ns = 0
        """How long the current plan allows to wait for a full batch."""
        self.remaining_ns = 0
        """Least believed time from the end of the stage to the answer, in batches of one."""
        self.remaining_full_ns = 0
        """The same in full batches."""
        self.others_due_ns = FOREVER_NS
        """As in `QueueView`. Without lanes, all visits can run together, so a batch delays no visit of another kind."""
        self.is_mixed = False
        """Whether a visit with several rows, or with a size other than 0, has ever come. From then on visits wait in
        lanes."""
        self._groups = 0

    def push(self, now_ns: int, visit: Visit) -> None:
        """Insert a visit at its place."""
        deadline_ns = visit.deadline_ns
        if deadline_ns < self.sweep_ns:
            self.sweep_ns = (deadline_ns if deadline_ns > now_ns else now_ns) + 1
        key = self._key(visit)
        keys = self._keys
        if not keys or key >= keys[-1]:
            keys.append(key)
            self.visits.append(visit)
            return
        at = bisect_right(keys, key)
        keys.insert(at, key)
        self.visits.insert(at, visit)

    def lanes(self, key_of: Callable[[Visit], LaneKey]) -> "list[Lane]":
        """The first `LOOKED_AT` visits, divided into lanes by `key_of`. The lanes are in the order of their first
        visits."""
        lanes: dict[LaneKey, Lane] = {}
        for visit in self.visits[:LOOKED_AT]:
            key = key_of(visit)
            lane = lanes.get(key)
            if lane is None:
                lanes[key] = lane = Lane(self, key)
            lane.visits.append(visit)
        return list(lanes.values())

    def push_again(self, now_ns: int, visits: Sequence[Visit]) -> None:
        """Insert visits that are tried again, in a batch of their own: before all that have not been tried, and behind
        those that wait for another try already."""
        self._groups += 1
        for visit in visits:
            visit.group = self._groups
            if visit.deadline_ns < self.sweep_ns:
                self.sweep_ns = max(visit.deadline_ns, now_ns) + 1
        at = bisect_right(self._keys, FIRST_KEY)
        self._keys[at:at] = [FIRST_KEY] * len(visits)
        self.visits[at:at] = visits

    def reorder(self, now_ns: int, order: Order) -> None:
        """Follow another order policy from now on. Visits that are tried again stay first."""
        self._key = order.key
        again = bisect_right(self._keys, FIRST_KEY)
        later = sorted(self.visits[again:], key=lambda visit: (order.key(visit), visit.arrived_ns))
        self.visits[again:], self._keys[again:] = later, map(order.key, later)
        if self.visits:
            self.sweep_ns = now_ns  # another drop policy may find some of them hopeless

    def set_apart(self, visit: Visit) -> None:
        """A visit is to run in a batch of its own."""
        self._groups += 1
        visit.group = self._groups

    def take(self, count: int) -> list[Visit]:
        """Remove and return the first `count` ≥ 1 visits, or all if there are fewer. The queue must not be empty."""
        if count == 1:
            del self._keys[0]
            taken = [self.visits.pop(0)]
        else:
            taken = self.visits[:count]
            del self.visits[:count]
            del self._keys[:count]
        if not self.visits:
            self.sweep_ns = FOREVER_NS
        return taken

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices, in one pass: one request may have a thousand parts."""
        if not indices:
            return
        first, end, removed = indices[0], indices[-1] + 1, set(indices)
        stay = [index for index in range(first, end) if index not in removed]
        self.visits[first:end] = [self.visits[index] for index in stay]
        self._keys[first:end] = [self._keys[index] for index in stay]
        if not self.visits:
            self.sweep_ns = FOREVER_NS

    def remove_request(self, request: RequestId) -> int:
        """Remove every visit of a request; returns how many rows they had."""
        found = [index for index, visit in enumerate(self.visits) if visit.request.id == request]
        rows = sum(self.visits[index].rows for index in found)
        self.remove(found)
        return rows


class Lane:
    """The visits of a mixed queue that can share a forward pass, in queue order. A lane is a `QueueView`, and is valid
    until a visit enters the queue."""

    __slots__ = ("_queue", "key", "others_due_ns", "visits")

    def __init__(self, queue: Queue, key: LaneKey) -> None:
        self._queue = queue
        self.key = key
        self.others_due_ns = FOREVER_NS
        self.visits: list[Visit] = []

    @property
    def size(self) -> int:
        """The class of sizes of its rows; 0 if the model leaves no dimension of a row open."""
        return self.key[0]

    @property
    def stage(self) -> str:
        return self._queue.stage

    @property
    def wait_ns(self) -> int:
        return self._queue.wait_ns

    @property
    def remaining_ns(self) -> int:
        return self._queue.remaining_ns

    @property
    def remaining_full_ns(self) -> int:
        return self._queue.remaining_full_ns

    def take(self, count: int) -> list[Visit]:
        """Remove and return the first `count` ≥ 1 visits."""
        taken = self.visits[:count]
        self.remove(range(count))
        return taken

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices from the queue."""
        places, removed = list[int](), set(indices)
        left = [self.visits[index] for index in reversed(indices)]  # the next one is the last
        for place, visit in enumerate(self._queue.visits[:LOOKED_AT]):
            if left and visit is left[-1]:
                places.append(place)
                left.pop()
        self._queue.remove(places)
        self.visits = [visit for index, visit in enumerate(self.visits) if index not in removed]


def rows_of(visits: Sequence[Visit]) -> int:
    """How many rows these visits have together."""
    return sum([visit.rows for visit in visits])


def group_size(visits: Sequence[Visit], most: int) -> int:
    """How many visits at the head belong to the group of the first one, at most `most`."""
    group = visits[0].group
    return next((at for at, visit in enumerate(visits[:most]) if visit.group != group), min(most, len(visits)))
