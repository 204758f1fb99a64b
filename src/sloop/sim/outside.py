"""The outside: what comes to the server by itself, in order of time: requests, clients that go away, stray wake-ups.

Promises one stream of (instant, event) whose instants never decrease, made as it is read. Must not know the cluster.
"""

from collections.abc import Iterator
from heapq import heappop, heappush, merge
from operator import itemgetter

from sloop.events import WOKE, Cancelled, Event
from sloop.sim.truth.failure import Failure
from sloop.sim.truth.network import Arrival
from sloop.vocabulary import Request

Stream = Iterator[tuple[int, Event]]


def later(arrivals: Iterator[Arrival], lead_ns: int) -> Iterator[Arrival]:
    """The same arrivals, sent and due `lead_ns` later."""
    for at_ns, request in arrivals:
        sent_ns, arrived_ns, deadline_ns = request.sent_ns, request.arrived_ns, request.deadline_ns
        later_ns = sent_ns + lead_ns, arrived_ns + lead_ns, deadline_ns + lead_ns
        yield at_ns + lead_ns, Request(request.id, *later_ns, request.enters)


def outside(arrivals: Iterator[Arrival], failure: Failure, until_ns: int) -> Stream:
    """Everything from outside up to the last arrival; stray wake-ups end at `until_ns`."""
    faults = failure.faults
    events: Stream = _with_cancellations(arrivals, failure) if faults.cancelled else arrivals
    if faults.stray_wake_rps:
        return merge(events, _stray_wakes(failure, until_ns), key=itemgetter(0))
    return events


def _stray_wakes(failure: Failure, until_ns: int) -> Stream:
    mean_s = 1.0 / failure.faults.stray_wake_rps
    at_ns = failure.after_ns("stray_wake", mean_s)
    while at_ns < until_ns:
        yield at_ns, WOKE
        at_ns += failure.after_ns("stray_wake", mean_s)


def _with_cancellations(arrivals: Iterator[Arrival], failure: Failure) -> Stream:
    """Each arrival may be followed by its client's going away, while its request waits, runs or has ended."""
    faults = failure.faults
    leaving: list[tuple[int, int, Cancelled]] = []
    for at_ns, request in arrivals:
        while leaving and leaving[0][0] <= at_ns:
            left_ns, _, cancelled = heappop(leaving)
            yield left_ns, cancelled
        yield at_ns, request
        if failure.strikes("cancelled", faults.cancelled):
            left_ns = at_ns + failure.within_ns("cancelled", faults.cancelled_within_ns)
            heappush(leaving, (left_ns, request.id, Cancelled(request.id)))
    while leaving:
        left_ns, _, cancelled = heappop(leaving)
        yield left_ns, cancelled
