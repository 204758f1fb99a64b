"""The simulation loop in virtual time: passes each event to the core, and the core's orders to the cluster.

It merges three sources of events, the earliest first: the core's requested wake-up, the cluster's heap, and the
ingress. The ingress is read one event at a time, so that the memory of a run does not grow with its length.

As in a live server, the core is told all events of an instant together, and instants increase: whatever the orders of
an instant cause at once comes a nanosecond later. So a log shows which events were told together, and a replay can do
the same. At one instant the core's wake-up comes first, then the cluster, then the ingress; the heap breaks ties by
order of creation. Faults stop after the last arrival, so that the open requests must end.

Every record goes at once to each of the `appends`, which are read again for each record, so that a sink may remove
itself from a list. `extends` get the records in blocks, which costs less. The cost is linear in events, and only sinks
store records for longer.

Must not import policies or truths. It interprets events and actions only to start batches, to count ends, and to have
plans computed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop
from typing import Any, Final, NamedTuple

from msgspec import Struct

from sloop.actions import Action, End, RequestPlan, StartBatch
from sloop.core.protocols import CoreInterface
from sloop.events import WOKE, Event, Finished
from sloop.runlog import Record
from sloop.sim.cluster import Cluster
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import Request

PATIENCE_NS: Final = s(3600)
"""How long a run continues after the last arrival to answer open requests."""

WAKES_MAX: Final = 1_000
"""Limit of wake-ups in a row that were due already; a core that requests more is in an endless loop."""

ENDED: Final[tuple[int, Event]] = (-1, WOKE)
"""What follows the last event of the ingress. It seems due at once, so that the loop looks at it without a comparison
of its own for every arrival."""

Ingress = Iterator[tuple[int, Event]]
"""All events from outside the server, in order of time."""
Append = Callable[[int, Record], None]
"""`Sink.append`: adds the next record of the log."""
Extend = Callable[[Sequence[tuple[int, Record]]], None]
"""`Recorder.extend`: adds the next records of the log."""

BLOCK: Final = 256
"""So many records at least are in a block, but for the last one: few enough to stay in the processor's cache."""


class RunTotals(Struct, frozen=True):
    """Counters of a run."""

    requests: int
    open: int
    """Requests that had not ended after `patience_ns`; 0 in a correct run."""
    events: int
    ended_ns: int


def play(
    core: CoreInterface,
    cluster: Cluster,
    ingress: Ingress,
    *,
    until_ns: int,
    appends: Sequence[Append] = (),
    extends: Sequence[Extend] = (),
    patience_ns: int = PATIENCE_NS,
) -> RunTotals:
    """Run at least until `until_ns`, then until every request has ended, for at most `patience_ns` more."""
    sinks = _Sinks(appends, extends, [])
    try:
        return _play(core, cluster, ingress, sinks, until_ns, patience_ns)
    finally:
        sinks.flush()


class _Sinks(NamedTuple):
    """Who gets the records."""

    appends: Sequence[Append]
    extends: Sequence[Extend]
    block: list[tuple[int, Record]]
    """What the `extends` have not got yet."""

    def flush(self) -> None:
        """Pass the block on."""
        records = self.block.copy()
        self.block.clear()
        for extend in self.extends:
            extend(records)


def _play(  # noqa: C901, PLR0912, PLR0915  # not split: a call per event would cost a tenth of this inner loop
    core: CoreInterface, cluster: Cluster, ingress: Ingress, sinks: _Sinks, until_ns: int, patience_ns: int
) -> RunTotals:
    """`play`, but for the last block."""
    handle, start_batch = core.handle, cluster.start_batch
    pending, void = cluster.pending.heap, cluster.pending.void
    appends, extends, block = sinks
    others: deque[Event] = deque()  # of this instant
    requests = ended = events = wakes = 0
    now_ns, limit_ns = -1, FOREVER_NS
    arrival_ns, arrival = next(ingress, ENDED)
    if arrival_ns < 0:
        cluster.stop_faults(0)
        arrival_ns, limit_ns = FOREVER_NS, until_ns
    event: Any  # an Event; None if a pending entry came to nothing
    while True:
        head_ns, wake_ns = pending[0][0], core.wake_ns
        if arrival_ns < head_ns and arrival_ns < wake_ns:
            now_ns, event = arrival_ns, arrival
            arrival_ns, arrival = next(ingress, ENDED)
            if type(event) is Request:
                requests += 1
            more = arrival_ns <= now_ns
        elif head_ns < wake_ns:
            if head_ns > limit_ns:
                break
            now_ns = head_ns if head_ns > now_ns else now_ns + 1
            _, sequence, event = heappop(pending)
            if type(event) is not Finished or void:
                event = cluster.happen(now_ns, sequence, event)
            more = event is None or pending[0][0] <= now_ns or arrival_ns <= now_ns
        elif wake_ns > limit_ns:
            break
        else:
            wakes = wakes + 1 if wake_ns <= now_ns else 0
            assert wakes < WAKES_MAX, f"the core asks for ever to be woken at {wake_ns} ns; it is {now_ns} ns"
            now_ns, event = wake_ns if wake_ns > now_ns else now_ns + 1, WOKE
            more = head_ns <= now_ns or arrival_ns <= now_ns
        if more:
            event, arrival_ns, arrival, arrived = _gather(now_ns, event, cluster, ingress, arrival_ns, arrival, others)
            requests += arrived
            if arrival_ns < 0:
                cluster.stop_faults(now_ns)
                arrival_ns, limit_ns = FOREVER_NS, max(until_ns, now_ns + patience_ns)
            more = len(others) > 0
        while event is not None:
            events += 1
            if extends:
                block.append((now_ns, event))
            for append in appends:
                append(now_ns, event)
            for action in handle(now_ns, event, more):
                if extends:
                    block.append((now_ns, action))
                for append in appends:
                    append(now_ns, action)
                if type(action) is End:
                    ended += 1
                elif type(action) is StartBatch:
                    start_batch(now_ns, action)
                else:
                    _obey(now_ns, action, core, cluster)
            if not more:
                break
            event, more = others.popleft(), len(others) > 0
        if extends and len(block) >= BLOCK:
            sinks.flush()
        if ended == requests and limit_ns != FOREVER_NS:
            limit_ns = until_ns
    return RunTotals(requests, requests - ended, events, now_ns)


def _gather(  # takes and returns the variables of `play`
    now_ns: int,
    event: Any,  # noqa: ANN401  # an Event or None
    cluster: Cluster,
    ingress: Ingress,
    arrival_ns: int,
    arrival: Event,
    others: deque[Event],
) -> tuple[Any, int, Event, int]:
    """Add all further events of this instant to `others`.

    Returns the first event of the instant, None if there is none; the next arrival, or `ENDED`; and how many requests
    arrived.
    """
    pending, requests = cluster.pending.heap, 0
    while pending[0][0] <= now_ns:
        _, sequence, happening = heappop(pending)
        found = cluster.happen(now_ns, sequence, happening)
        if found is not None:
            others.append(found)
    while 0 <= arrival_ns <= now_ns:
        others.append(arrival)
        requests += type(arrival) is Request
        arrival_ns, arrival = next(ingress, ENDED)
    if event is None and others:
        event = others.popleft()
    return event, arrival_ns, arrival, requests


def _obey(now_ns: int, action: Action, core: CoreInterface, cluster: Cluster) -> None:
    """Carry out an action that is rarer than batches and ends."""
    if type(action) is RequestPlan:
        assert core.plan_input is not None, "the core requests a plan of nothing"
        cluster.deliver_plan(now_ns, core.planner.plan(core.plan_input))
    else:
        cluster.obey(now_ns, action)
