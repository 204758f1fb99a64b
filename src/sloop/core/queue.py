"""The waiting visits of a stage."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeVar

from sloop.core.protocols import Order
from sloop.units import FOREVER_NS
from sloop.vocabulary import RequestId, Visit

Entry = TypeVar("Entry")

FIRST_KEY = -(1 << 63)
"""The key of visits that are tried again: before all others, as they were when their first batch began."""


class Queue:
    """Waiting visits, sorted by the order policy's key. Visits with equal keys stay in order of arrival.

    Two parallel lists with bisection, not a heap: deadlines and arrivals come nearly sorted, so an insertion lands near
    the end and moves few pointers, and policies can read `visits` as a sorted list. `visits` is never replaced by
    another list object, because the data path keeps a reference to it. Batch policies see it as a `QueueView`.
    """

    is_mixed = False
    """Whether visits wait in lanes: see `sloop.core.lanes`."""

    def __init__(self, stage: str, order: Order) -> None:
        self.stage = stage
        self.key = order.key
        self.keys: list[int] = []
        self.visits: list[Visit] = []
        self.sweep_ns = FOREVER_NS
        """When to search for passed deadlines next; `FOREVER_NS` if the queue is empty."""
        self.wait_ns = 0
        """How long the current plan allows to wait for a full batch."""
        self.remaining_ns = 0
        """Believed time from the end of the stage to the answer: at least, in batches of one or, if the drop policy is
        proactive, as expected now (`core.graph_estimates.expected_times`)."""
        self.remaining_full_ns = 0
        """The same in full batches."""
        self.others_due_ns = FOREVER_NS
        """As in `QueueView`. Without lanes, all visits can run together, so a batch delays no visit of another lane."""
        self._groups = 0

    @property
    def waiting(self) -> int:
        """As in `QueueView`. Without lanes, all visits can run together."""
        return len(self.visits)

    def push(self, now_ns: int, visit: Visit) -> None:
        """Insert a visit at its place."""
        deadline_ns = visit.deadline_ns
        if deadline_ns < self.sweep_ns:
            self.sweep_ns = (deadline_ns if deadline_ns > now_ns else now_ns) + 1
        key = self.key(visit)
        keys = self.keys
        if not keys or key >= keys[-1]:
            keys.append(key)
            self.visits.append(visit)
            return
        at = bisect_right(keys, key)
        keys.insert(at, key)
        self.visits.insert(at, visit)

    def push_again(self, now_ns: int, visits: Sequence[Visit]) -> None:
        """Insert visits that are tried again, in a batch of their own: before all that have not been tried, and behind
        those that wait for another try already."""
        self._groups += 1
        for visit in visits:
            visit.group = self._groups
            if visit.deadline_ns < self.sweep_ns:
                self.sweep_ns = max(visit.deadline_ns, now_ns) + 1
        at = bisect_right(self.keys, FIRST_KEY)
        self.keys[at:at] = [FIRST_KEY] * len(visits)
        self.visits[at:at] = visits

    def reorder(self, now_ns: int, order: Order) -> None:
        """Follow another order policy from now on. Visits that are tried again stay first."""
        self.key = order.key
        again = bisect_right(self.keys, FIRST_KEY)
        later = sorted(self.visits[again:], key=lambda visit: (order.key(visit), visit.arrived_ns))
        self.visits[again:], self.keys[again:] = later, map(order.key, later)
        if self.visits:
            self.sweep_ns = now_ns  # another drop policy may find some of them hopeless

    def set_apart(self, visit: Visit) -> None:
        """A visit is to run in a batch of its own."""
        self._groups += 1
        visit.group = self._groups

    def take(self, count: int) -> list[Visit]:
        """Remove and return the first `count` ≥ 1 visits, or all if there are fewer. The queue must not be empty."""
        if count == 1:
            del self.keys[0]
            taken = [self.visits.pop(0)]
        else:
            taken = self.visits[:count]
            del self.visits[:count]
            del self.keys[:count]
        if not self.visits:
            self.sweep_ns = FOREVER_NS
        return taken

    def remove(self, indices: Sequence[int]) -> None:
        """Remove the visits at these ascending indices."""
        remove_at(self.visits, indices)
        remove_at(self.keys, indices)
        if not self.visits:
            self.sweep_ns = FOREVER_NS

    def remove_request(self, request: RequestId) -> int:
        """Remove every visit of a request; returns how many rows they had."""
        found = [index for index, visit in enumerate(self.visits) if visit.request.id == request]
        rows = sum(self.visits[index].rows for index in found)
        self.remove(found)
        return rows


def remove_at(entries: list[Entry], indices: Sequence[int]) -> None:
    """Remove the entries at these ascending indices, in one pass: one request may have a thousand parts."""
    if indices:
        first, end, removed = indices[0], indices[-1] + 1, set(indices)
        entries[first:end] = [entries[index] for index in range(first, end) if index not in removed]


def rows_of(visits: Sequence[Visit]) -> int:
    """How many rows these visits have together."""
    return sum([visit.rows for visit in visits])


def group_size(visits: Sequence[Visit], most: int) -> int:
    """How many visits at the head belong to the group of the first one, at most `most`."""
    group = visits[0].group
    return next((at for at, visit in enumerate(visits[:most]) if visit.group != group), min(most, len(visits)))
