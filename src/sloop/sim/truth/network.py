"""Network: what a request spends on its way here, and in which order requests arrive.

A payload sent at `t` takes `link.transfer_ns(t, payload)`. Two semantics (sponge specification, §1.4):

* `delay`: sent at t, arrives at t + transfer(t), deadline t + SLO. Later requests may overtake earlier ones.
* `attach`: arrives at t with that much of its budget already used: sent at t − transfer(t), deadline sent + SLO.

Draws payloads and SLOs from streams `payload` and `slo`. Must not know what serves the requests.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, count, islice, repeat
from operator import add
from random import Random
from typing import Literal, cast

from sloop.sim.truth.noise import chosen
from sloop.streams import stream
from sloop.vocabulary import Request, RequestId
from sloop.workload.link import Link

Semantics = Literal["delay", "attach"]
Arrival = tuple[int, Request]
"""An instant and the request that arrives at it."""

PART = 256
"""Requests that are made ahead of their arrival."""


class Network:
    """Turns instants of sending into arrivals in order of arrival; request ids count in order of sending."""

    def __init__(  # the way of a request, in order
        self,
        seed: int,
        *,
        slos_ns: Sequence[int],
        payloads_bytes: Sequence[int] = (0,),
        link: Link | None = None,
        semantics: Semantics = "delay",
    ) -> None:
        self._slos_ns = _draws(slos_ns, stream(seed, "slo"))
        self._payloads_bytes = _draws(payloads_bytes, stream(seed, "payload"))
        self._link = link
        self._semantics = semantics

    def deliver(self, sent_ns: Iterable[int]) -> Iterator[Arrival]:
        """Arrivals for instants of sending, which must not decrease. Lazy: a run of any length needs little memory."""
        if self._link is None:
            return self._at_once(sent_ns)
        semantics = self._attached if self._semantics == "attach" else self._delayed
        return semantics(sent_ns, self._link)

    def _at_once(self, sent_ns: Iterable[int]) -> Iterator[Arrival]:
        """The usual case, and most of what comes from outside: a part at a time, none of it in Python's own loop."""
        ids, times_ns = _ids(), iter(sent_ns)

        def arrivals(part_ns: list[int]) -> Iterator[Arrival]:
            return zip(part_ns, map(Request, ids, part_ns, part_ns, map(add, part_ns, self._slos_ns)), strict=False)

        return chain.from_iterable(map(arrivals, iter(lambda: list(islice(times_ns, PART)), [])))

    def _attached(self, sent_ns: Iterable[int], link: Link) -> Iterator[Arrival]:
        draws = zip(sent_ns, _ids(), self._slos_ns, self._payloads_bytes, strict=False)
        for at_ns, id, slo_ns, payload_bytes in draws:
            begun_ns = at_ns - link.transfer_ns(at_ns, payload_bytes)
            yield at_ns, Request(id, begun_ns, at_ns, begun_ns + slo_ns)

    def _delayed(self, sent_ns: Iterable[int], link: Link) -> Iterator[Arrival]:
        """Transfers take no negative time, so whatever arrives before the next sending can be handed over."""
        under_way: list[tuple[int, RequestId, Request]] = []
        draws = zip(sent_ns, _ids(), self._slos_ns, self._payloads_bytes, strict=False)
        for at_ns, id, slo_ns, payload_bytes in draws:
            while under_way and under_way[0][0] <= at_ns:
                arrived_ns, _, request = heappop(under_way)
                yield arrived_ns, request
            arrived_ns = at_ns + link.transfer_ns(at_ns, payload_bytes)
            heappush(under_way, (arrived_ns, id, Request(id, at_ns, arrived_ns, at_ns + slo_ns)))
        while under_way:
            arrived_ns, _, request = heappop(under_way)
            yield arrived_ns, request


def _ids() -> Iterator[RequestId]:
    return cast(Iterator[RequestId], count())


def _draws(values: Sequence[int], random: Random) -> Iterator[int]:
    """An endless series of equally likely `values`; a single one costs no draw."""
    return repeat(values[0]) if len(values) == 1 else chosen(values, random)
