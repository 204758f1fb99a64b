"""The simulation loop in virtual time: passes each event to the core, and the core's orders to the cluster.

It merges three sources of events, the earliest first: the core's requested wake-up, the cluster's heap, and the
ingress. The ingress is read one event at a time, so that the memory of a run does not grow with its length. At equal
instants the core's wake-up comes first, then the cluster, then the ingress; the heap breaks ties by order of creation.
The cost is linear in events, and only sinks store records.

Must not import policies or truths. It interprets events and actions only to start batches and to count ends.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop
from typing import Final, Protocol

from msgspec import Struct

from sloop.actions import Action, End, StartBatch
from sloop.events import WOKE, Event, Finished
from sloop.runlog import Record
from sloop.sim.cluster import Cluster
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import Request

PATIENCE_NS: Final = s(3600)
"""How long a run continues after the last arrival to answer open requests."""

WAKES_MAX: Final = 1_000
"""Limit of wake-ups at one instant; a core that requests more is in an endless loop."""

SILENCE: Final[tuple[int, Event]] = (FOREVER_NS, WOKE)

Append = Callable[[int, Record], None]
"""`Sink.append`: adds the next record of the log."""


class CoreLike(Protocol):
    """The interface to the core, or to an intentionally broken core that tests the checkers."""

    @property
    def wake_ns(self) -> int: ...

    def handle(self, now_ns: int, event: Event) -> Sequence[Action]: ...


class RunTotals(Struct, frozen=True):
    """Counters of a run."""

    requests: int
    open: int
    """Requests that had not ended after `patience_ns`; 0 in a correct run."""
    events: int
    ended_ns: int


def play(  # noqa: C901, PLR0912  # not split: this is the inner loop, and one call per event would cost a tenth of it
    core: CoreLike,
    cluster: Cluster,
    ingress: Iterator[tuple[int, Event]],
    *,
    until_ns: int,
    appends: list[Append] | None = None,
    patience_ns: int = PATIENCE_NS,
) -> RunTotals:
    """Run at least until `until_ns`, then until every request has ended, for at most `patience_ns` more.

    Faults stop after the last arrival (`Cluster.stop_faults`), so that the open requests must end. Every record goes to
    each of `appends`; the list is read again for each record, so that a sink may remove itself.
    """
    handle, pending, void, start_batch = core.handle, cluster.pending, cluster.void, cluster.start_batch
    sinks = appends if appends is not None else []
    requests = ended = events = wakes = now_ns = 0
    limit_ns = FOREVER_NS
    arrival_ns, arrival = next(ingress, SILENCE)
    if arrival_ns == FOREVER_NS:
        cluster.stop_faults()
        limit_ns = until_ns
    while True:
        head_ns, wake_ns = pending[0][0], core.wake_ns
        event: Event | None
        if wake_ns <= head_ns and wake_ns <= arrival_ns:
            if wake_ns > limit_ns:
                break
            wakes = wakes + 1 if wake_ns <= now_ns else 0
            assert wakes < WAKES_MAX, f"the core asks for ever to be woken at {wake_ns} ns; it is {now_ns} ns"
            now_ns, event = max(now_ns, wake_ns), WOKE
        elif head_ns <= arrival_ns:
            if head_ns > limit_ns:
                break
            now_ns, sequence, happening = heappop(pending)
            if type(happening) is Finished and not void:
                event = happening
            elif (event := cluster.happen(now_ns, sequence, happening)) is None:
                continue
        else:
            now_ns, event = arrival_ns, arrival
            arrival_ns, arrival = next(ingress, SILENCE)
            if type(event) is Request:
                requests += 1
            if arrival_ns == FOREVER_NS:
                cluster.stop_faults()
                limit_ns = max(until_ns, now_ns + patience_ns)
        events += 1
        for append in sinks:
            append(now_ns, event)
        for action in handle(now_ns, event):
            for append in sinks:
                append(now_ns, action)
            if type(action) is End:
                ended += 1
            elif type(action) is StartBatch:
                start_batch(now_ns, action)
            else:
                cluster.obey(now_ns, action)
        if ended == requests and limit_ns != FOREVER_NS:
            limit_ns = until_ns
    return RunTotals(requests, requests - ended, events, now_ns)
