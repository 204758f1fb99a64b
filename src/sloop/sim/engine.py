"""The engine: virtual time. It hands the core what happens next and the cluster what the core orders, to the end.

Three sources of events are merged, the earliest first: the core's own wish to be woken, the cluster's heap, and the
stream from outside, which is drawn from one by one so that a run's memory does not grow with its length. At equal
instants the core's wish comes first, then the cluster, then the outside; within the heap the order of creation
decides. Costs are linear in events, and nothing is kept unless a sink keeps it.
Must not know policies, truths or what the events mean, beyond starting batches and counting ends.
"""

from collections.abc import Iterator, Sequence
from heapq import heappop
from typing import Protocol

from msgspec import Struct

from sloop.actions import Action, End, StartBatch
from sloop.events import WOKE, Event, Finished
from sloop.runlog import Sink
from sloop.sim.cluster import Cluster
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import Request

PATIENCE_NS = s(3600)
"""How long after the outside has fallen silent a run may take to answer what is still open."""

WAKES_MAX = 1_000
"""A core that wants to be woken more often than this at one instant will never let time go on."""

SILENCE: tuple[int, Event] = (FOREVER_NS, WOKE)


class CoreLike(Protocol):
    """What the engine drives: the core, or one broken on purpose to prove the checkers."""

    @property
    def wake_ns(self) -> int: ...

    def handle(self, now_ns: int, event: Event) -> Sequence[Action]: ...


class Played(Struct, frozen=True):
    """How a run went, in numbers. `open` requests had not ended when patience ran out; 0 in a sound run."""

    requests: int
    open: int
    events: int
    ended_ns: int


def play(  # noqa: C901, PLR0912  # kept whole: this is the inner loop, and a call for each event costs a tenth of it
    core: CoreLike,
    cluster: Cluster,
    outside: Iterator[tuple[int, Event]],
    *,
    until_ns: int,
    sink: Sink | None = None,
    patience_ns: int = PATIENCE_NS,
) -> Played:
    """Run at least until `until_ns`, and on until every request has ended or patience runs out.

    When the outside falls silent, faults stop too (`Cluster.heal`): what is open then must come to its end.
    """
    handle, pending, void, start_batch = core.handle, cluster.pending, cluster.void, cluster.start_batch
    append = sink.append if sink is not None else None
    requests = ended = events = wakes = now_ns = 0
    limit_ns = FOREVER_NS
    arrival_ns, arrival = next(outside, SILENCE)
    if arrival_ns == FOREVER_NS:
        cluster.heal()
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
            arrival_ns, arrival = next(outside, SILENCE)
            if type(event) is Request:
                requests += 1
            if arrival_ns == FOREVER_NS:
                cluster.heal()
                limit_ns = max(until_ns, now_ns + patience_ns)
        events += 1
        if append is not None:
            append(now_ns, event)
        for action in handle(now_ns, event):
            if append is not None:
                append(now_ns, action)
            if type(action) is End:
                ended += 1
            elif type(action) is StartBatch:
                start_batch(now_ns, action)
            else:
                cluster.obey(now_ns, action)
        if ended == requests and limit_ns != FOREVER_NS:
            limit_ns = until_ns
    return Played(requests, requests - ended, events, now_ns)
