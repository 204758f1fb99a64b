"""The engine: virtual time. It hands the next event to the core and the core's orders to the cluster, until the end.

Three sources of events are merged, the earliest first: the core's own wish to be woken, the cluster's heap, and the
ingress. The ingress is read one event at a time, so that the memory of a run does not grow with its length. At equal
instants the core's wake comes first, then the cluster, then the ingress; within the heap the order of creation decides.
The cost is linear in events, and nothing is kept unless a sink keeps it.

Must not know policies, truths or what events mean, beyond starting batches and counting ends.
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
"""How long a run goes on after the last arrival to answer the requests that are still open."""

WAKES_MAX: Final = 1_000
"""A core that wants to be woken more often than this at one instant will never let time go on."""

SILENCE: Final[tuple[int, Event]] = (FOREVER_NS, WOKE)

Append = Callable[[int, Record], None]
"""`Sink.append`: takes the next record of the log."""


class CoreLike(Protocol):
    """What the engine drives: the core, or one broken on purpose to test the checkers."""

    @property
    def wake_ns(self) -> int: ...

    def handle(self, now_ns: int, event: Event) -> Sequence[Action]: ...


class RunTotals(Struct, frozen=True):
    """How a run went, in numbers."""

    requests: int
    open: int
    """Requests that had not ended when patience ran out; 0 in a sound run."""
    events: int
    ended_ns: int


def play(  # noqa: C901, PLR0912  # kept whole: this is the inner loop, and a call for each event costs a tenth of it
    core: CoreLike,
    cluster: Cluster,
    ingress: Iterator[tuple[int, Event]],
    *,
    until_ns: int,
    appends: list[Append] | None = None,
    patience_ns: int = PATIENCE_NS,
) -> RunTotals:
    """Run at least until `until_ns`, and on until every request has ended or patience runs out.

    After the last arrival faults stop, too (`Cluster.stop_faults`): requests that are open then must come to an end.
    Every record goes to each of `appends`; the list is read anew for each record, so that a sink may leave it.
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
