"""The network between clients and the server: send and arrival times of requests, and disconnecting clients.

A payload sent at `t` takes `link.transfer_ns(t, payload)`. Two semantics (Sponge specification, §1.4):

* `delay`: sent at t, arrives at t + transfer(t), deadline t + SLO. Later requests may overtake earlier ones.
* `attach`: arrives at t with the transfer time already elapsed: sent at t − transfer(t), deadline sent + SLO.

Without a link, requests arrive when they are sent. A recorded run's delays include the time that the edge takes
before the core handles a request. Request ids follow the order of the trace (`Numbering`). Payloads and SLOs are drawn
from the random streams `payload` and `slo`. Transfers between nodes are in `sloop.sim.truth.flows`.

Streams are in order of time and generated lazily, so that a run of any length needs little memory. Must not import the
cluster or anything that serves requests.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush, merge
from itertools import chain, count, islice, repeat, tee
from operator import add, itemgetter
from random import Random
from typing import Any, Final, cast

from msgspec import Struct, structs

from sloop.app.scenario import Delivery
from sloop.events import WOKE, Cancelled, Event
from sloop.sim.truth.failure import FaultSampler
from sloop.sim.truth.service import choices
from sloop.streams import stream
from sloop.vocabulary import Request, RequestId
from sloop.workload import Link, Work

Arrival = tuple[int, Request]
"""An instant and the request that arrives at it."""
Ingress = Iterator[tuple[int, Event]]
"""All events from outside the server, in order of time."""
Delay = tuple[int, int]
"""Delays of a request in ns: from sending to the edge, and from there until the core handles it."""

UNNAMED: Final = ("", "", "")
"""The version that a simulated client asks for, and its own names for the request: none."""

AHEAD: Final = 256
"""Requests that are generated per block if there is no link."""


class Numbering(Struct, frozen=True):
    """The ids of the requests of one of `applications` in a run: number × `applications` + `index`.

    Ids are unique in the run, and an application's own numbers, from 0, do not depend on the other applications.
    """

    applications: int = 1
    index: int = 0

    def ids(self) -> Iterator[RequestId]:
        """The ids of requests 0, 1, 2, …"""
        return cast(Iterator[RequestId], count(self.index, self.applications))

    def number(self, id: RequestId) -> int:
        """Which request of its application has this id."""
        return id // self.applications


class ClientNetwork:
    """Turns the instants of a trace into arrivals at one application.

    `delays` are the delays of a recorded run, in order of sending; they override `link`. `application` is the name that
    requests carry, empty where there is only one.
    """

    def __init__(
        self,
        seed: int,
        *,
        slos_ns: Sequence[int],
        payloads_bytes: Sequence[int] = (0,),
        link: Link | None = None,
        semantics: Delivery = "delay",
        delays: Sequence[Delay] = (),
        application: str = "",
        numbering: Numbering | None = None,
    ) -> None:
        self._slos_ns = _draws(slos_ns, stream(seed, "slo"))
        self._payloads_bytes = _draws(payloads_bytes, stream(seed, "payload"))
        self._link = link
        self._semantics = semantics
        self._delays = delays
        self._random = stream(seed, "delay")
        self._application = application
        self._ids = (numbering or Numbering()).ids()

    def deliver(self, times_ns: Iterable[int], works: Iterator[Work] | None = None) -> Iterator[Arrival]:
        """Arrivals, in order, for the instants of a trace, which must not decrease, and for what they bring."""
        if self._delays:
            return self._delayed(times_ns, works, self._recorded_delays())
        if self._link is not None:
            return self._delayed(times_ns, works, self._transfer_delays(self._link))
        return self._at_once(times_ns, works)

    def _at_once(self, times_ns: Iterable[int], works: Iterator[Work] | None) -> Iterator[Arrival]:
        """The usual case without delays: generates `AHEAD` requests at a time without a Python loop."""
        ids, remaining_ns = self._ids, iter(times_ns)
        others: tuple[Iterator[Any], ...] = (repeat(()), repeat(self._application)) if self._application else ()
        if works is not None:
            brought = (map(itemgetter(place), each) for place, each in enumerate(tee(works, 3)))
            others = repeat(()), repeat(self._application), *map(repeat, UNNAMED), *brought

        def arrivals(block_ns: list[int]) -> Iterator[Arrival]:
            deadlines_ns = map(add, block_ns, self._slos_ns)
            return zip(block_ns, map(Request, ids, block_ns, block_ns, deadlines_ns, *others), strict=False)

        return chain.from_iterable(map(arrivals, iter(lambda: list(islice(remaining_ns, AHEAD)), [])))

    def _delayed(
        self, times_ns: Iterable[int], works: Iterator[Work] | None, delays: Callable[[int], Delay]
    ) -> Iterator[Arrival]:
        """Requests that arrive after they were sent. No delay is negative, so all arrivals before the next instant of
        the trace are final and can be yielded."""
        attaches = self._semantics == "attach"
        in_transit: list[tuple[int, RequestId, Request]] = []
        brought = repeat(Work()) if works is None else works
        for at_ns, id, slo_ns, work in zip(times_ns, self._ids, self._slos_ns, brought, strict=False):
            while in_transit and in_transit[0][0] <= at_ns:
                event_ns, _, request = heappop(in_transit)
                yield event_ns, request
            arrival_ns, event_delay_ns = delays(at_ns)
            sent_ns = at_ns - arrival_ns if attaches else at_ns
            times = sent_ns, sent_ns + arrival_ns, sent_ns + slo_ns
            request = Request(id, *times, (), self._application, *UNNAMED, *work)
            heappush(in_transit, (sent_ns + event_delay_ns, id, request))
        while in_transit:
            event_ns, _, request = heappop(in_transit)
            yield event_ns, request

    def _transfer_delays(self, link: Link) -> Callable[[int], Delay]:
        def delay(at_ns: int) -> Delay:
            transfer_ns = link.transfer_ns(at_ns, next(self._payloads_bytes))
            return transfer_ns, transfer_ns

        return delay

    def _recorded_delays(self) -> Callable[[int], Delay]:
        """The recorded delays in order, then random choices from them."""
        delays = chain(self._delays, choices(self._delays, self._random))
        return lambda _: next(delays)


def shifted(arrivals: Iterator[Arrival], lead_ns: int) -> Iterator[Arrival]:
    """The same arrivals, with all times `lead_ns` later."""
    for at_ns, request in arrivals:
        sent_ns, arrived_ns, deadline_ns = request.sent_ns, request.arrived_ns, request.deadline_ns
        later_ns = {
            "sent_ns": sent_ns + lead_ns,
            "arrived_ns": arrived_ns + lead_ns,
            "deadline_ns": deadline_ns + lead_ns,
        }
        yield at_ns + lead_ns, structs.replace(request, **later_ns)


def merged(streams: Sequence[Ingress]) -> Ingress:
    """All events in order of time; at equal instants in the order of the streams."""
    if len(streams) == 1:
        return streams[0]
    return merge(*streams, key=itemgetter(0))


def stray_wakes(faults: FaultSampler, until_ns: int) -> Ingress:
    """Spurious wake-ups until `until_ns`."""
    mean_s = 1.0 / faults.rates.stray_wake_rps
    at_ns = faults.after_ns("stray_wake", mean_s)
    while at_ns < until_ns:
        yield at_ns, WOKE
        at_ns += faults.after_ns("stray_wake", mean_s)


def with_cancellations(arrivals: Iterator[Arrival], faults: FaultSampler) -> Ingress:
    """After each arrival its client may disconnect, while the request waits, runs or has ended."""
    return _with_cancellations(arrivals, faults) if faults.rates.cancelled else arrivals


def _with_cancellations(arrivals: Iterator[Arrival], faults: FaultSampler) -> Ingress:
    rates = faults.rates
    leaving: list[tuple[int, int, Cancelled]] = []
    for at_ns, request in arrivals:
        while leaving and leaving[0][0] <= at_ns:
            left_ns, _, cancelled = heappop(leaving)
            yield left_ns, cancelled
        yield at_ns, request
        if faults.strikes("cancelled", rates.cancelled):
            left_ns = at_ns + faults.within_ns("cancelled", rates.cancelled_within_ns)
            heappush(leaving, (left_ns, request.id, Cancelled(request.id)))
    while leaving:
        left_ns, _, cancelled = heappop(leaving)
        yield left_ns, cancelled


def _draws(values: Sequence[int], random: Random) -> Iterator[int]:
    """Endless draws of equally likely `values`; a single value needs no random numbers."""
    return repeat(values[0]) if len(values) == 1 else choices(values, random)
