"""Queues whose visits cannot all share a forward pass, because they have rows of different sizes.

The visits wait in *lanes*: those of one lane can share a pass. A queue becomes mixed when a visit with several rows, or
with rows of a size, first comes; it keeps its order, and knows the lane of each visit. So the start of a batch does not
look at all visits that wait.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from sloop.core.protocols import Order
from sloop.core.queue import Queue, remove_at
from sloop.transient import Cache, Transient
from sloop.units import FOREVER_NS
from sloop.vocabulary import Visit

LOOKED_AT = 1_000
"""When a batch is formed, or the work that waits is estimated, only so many visits at the head of a mixed queue are
looked at: this bounds the time of a decision. The others move up as these leave."""

LaneKey = tuple[int, ...]
"""The class of sizes of a lane and, where rows are not padded, what else its visits have in common: size and shape.
Unrelated to the keys by which the order policy sorts visits (`Queue.key`)."""


class Lane:
    """The visits of a mixed queue that can share a forward pass, in queue order: a `QueueView`."""

    __slots__ = ("_queue", "key", "visits")

    def __init__(self, queue: "MixedQueue", key: LaneKey) -> None:
        self._queue = queue
        self.key = key
        self.visits: list[Visit] = []

    @property
    def size(self) -> int:
        """The class of sizes of its rows; 0 if the model leaves no dimension of a row open."""
        return self.key[0]

    @property
    def stage(self) -> str:
        return self._queue.stage

    @property
    def waiting(self) -> int:
        return len(self._queue.visits)

    @property
    def others_due_ns(self) -> int:
        due = self._queue.lanes.due
        return due.next_ns if due.first is self else due.first_ns

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
        self.remove(range(len(taken)))
        return taken

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices, also from the queue."""
        if indices:
            self._queue.remove_of(self, indices)


class DueLanes(NamedTuple):
    """Until when the only idle replica can wait with the first visits of the lanes, so that these are in time;
    `FOREVER_NS` without such a visit."""

    first: Lane | None = None
    """The lane that is due first."""
    first_ns: int = FOREVER_NS
    """When this lane is due."""
    next_ns: int = FOREVER_NS
    """When the next one is."""


class KnownLanes(Transient):
    """The lanes of a queue, and which visit is in which. None at first: snapshots leave them out, and so they are found
    anew from the visits."""

    __slots__ = ("by_key", "due", "of")

    def __init__(self) -> None:
        self.by_key: dict[LaneKey, Lane] = {}
        self.due = DueLanes()
        """For the present call of a batch policy."""
        self.of: list[Lane] = []
        """The lane of each visit, in queue order. If these are not as many as the visits, the lanes are not known."""

    def fill(self, visits: Sequence[Visit]) -> None:
        """The queue has these visits now, each in the lane that `of` has for it."""
        self.by_key = {}
        for lane in self.of:
            lane.visits = []
        for lane, visit in zip(self.of, visits, strict=True):
            if not lane.visits:
                self.by_key[lane.key] = lane
            lane.visits.append(visit)


class MixedQueue(Queue):
    """A queue that knows the lane of each visit: `lane_key` says which one."""

    is_mixed = True

    def __init__(self, plain: Queue, lane_key: Callable[[Visit], LaneKey]) -> None:
        """Takes over the visits and all else of a plain queue."""
        vars(self).update(vars(plain))
        self._lane_key = lane_key
        self._lanes = KnownLanes()

    @property
    def lanes(self) -> KnownLanes:
        """The lanes. They are found anew if they are not known."""
        lanes = self._lanes
        if len(lanes.of) != len(self.visits):
            found: dict[LaneKey, Lane] = {}
            lanes.of = [found.setdefault(key, Lane(self, key)) for key in map(self._lane_key, self.visits)]
            lanes.fill(self.visits)
        return lanes

    def fills(self, limit: int) -> bool:
        """Whether a lane has so many visits, or may yet, because not as many wait in all lanes."""
        return len(self.visits) < limit or any(len(lane.visits) >= limit for lane in self.lanes.by_key.values())

    def in_order(self, without: Collection[LaneKey] = ()) -> Iterator[Lane]:
        """The lanes in the order of their first visits, but for some; those of the first `LOOKED_AT` visits. Valid
        until the queue changes."""
        lanes, seen = self.lanes, set(without)
        for lane in islice(lanes.of, LOOKED_AT):
            if lane.key not in seen:
                seen.add(lane.key)
                yield lane
                if len(seen) == len(lanes.by_key):
                    return

    def push(self, now_ns: int, visit: Visit) -> None:
        """Insert a visit at its place, and in its lane."""
        lanes = self.lanes
        super().push(now_ns, visit)
        lane_key, at = self._lane_key(visit), bisect_right(self.keys, self.key(visit)) - 1
        lane = lanes.by_key.get(lane_key)
        if lane is None:
            lanes.by_key[lane_key] = lane = Lane(self, lane_key)
        lane.visits.insert(len(lane.visits) if at == len(lanes.of) else lanes.of[:at].count(lane), visit)
        lanes.of.insert(at, lane)

    def push_again(self, now_ns: int, visits: Sequence[Visit]) -> None:
        """Insert visits that are tried again, as in a plain queue."""
        super().push_again(now_ns, visits)
        self._lanes = KnownLanes()

    def reorder(self, now_ns: int, order: Order) -> None:
        """Follow another order policy from now on."""
        super().reorder(now_ns, order)
        self._lanes = KnownLanes()

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices, also from their lanes."""
        if indices:
            lanes = self.lanes
            super().remove(indices)
            removed = set(indices)
            lanes.of = [lane for index, lane in enumerate(lanes.of) if index not in removed]
            lanes.fill(self.visits)

    def remove_of(self, lane: Lane, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices of a lane. The other lanes stay as they are, so this costs less
        than `remove`."""
        lanes, positions, position, last = self.lanes, list[int](), -1, -1
        for index in indices:
            for _ in range(index - last):
                position = lanes.of.index(lane, position + 1)
            last = index
            positions.append(position)
        super().remove(positions)
        remove_at(lanes.of, positions)
        remove_at(lane.visits, indices)
        if not lane.visits:
            del lanes.by_key[lane.key]


FEW_VISITS = 32
"""While at most so many visits wait, `DrainTimes` are estimated anew for each visit that arrives."""
CHANGED_PARTS = 16
"""While more wait, only when their number has changed by 1/16: so a visit costs the same however many wait."""


class DrainTimes:
    """When the visits of a mixed queue will have been served, as believed when this was last estimated, without those
    that will be dropped."""

    def __init__(self) -> None:
        self._counted = -1
        """How many visits waited then; -1 to estimate anew."""
        self.costs_ns: Cache[tuple[int, int], tuple[int, int, int]] = Cache()
        """By class of sizes and rows: what a visit costs, as is believed now."""
        self.keys: list[int] = []
        """The key in the queue of each visit that will be served."""
        self.done_ns: list[int] = []
        """How long it takes until each of these has been served."""

    def forget(self) -> None:
        """Estimate anew at the next visit: beliefs or replicas have changed."""
        self._counted = -1
        self.costs_ns.clear()

    def is_due(self, count: int) -> bool:
        """Whether to estimate anew while `count` visits wait; if so, nothing is kept."""
        if count > FEW_VISITS and self._counted >= 0 and abs(count - self._counted) * CHANGED_PARTS < count:
            return False
        self._counted, self.keys, self.done_ns = count, [], []
        return True

    def before(self, key: int, place: int) -> int:
        """How long it takes until all is served that comes before a visit with this key, which enters the queue at
        `place`. Beyond the first `LOOKED_AT` visits, others are like these."""
        at = bisect_right(self.keys, key)
        return self.done_ns[at - 1] * max(place, LOOKED_AT) // LOOKED_AT if at else 0
