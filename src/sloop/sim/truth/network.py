"""Network: what a request spends on its way here, and in which order requests arrive.

A payload sent at `t` takes `link.transfer_ns(t, payload)`. Two semantics (sponge specification, §1.4):

* `delay`: sent at t, arrives at t + transfer(t), deadline t + SLO. Later requests may overtake earlier ones.
* `attach`: arrives at t with that much of its budget already used: sent at t − transfer(t), deadline sent + SLO.

Draws payloads and SLOs from streams `payload` and `slo`. Must not know what serves the requests.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Literal, TypeVar

from sloop.arrivals.link import Link
from sloop.streams import stream
from sloop.vocabulary import Request, RequestId

Semantics = Literal["delay", "attach"]
Arrival = tuple[int, Request]
"""An instant and the request that arrives at it."""


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
        self._draw_slo = _draws(slos_ns, stream(seed, "slo"))
        self._draw_payload = _draws(payloads_bytes, stream(seed, "payload"))
        self._link = link
        self._semantics = semantics

    def deliver(self, sent_ns: Iterable[int]) -> Iterator[Arrival]:
        """Arrivals for instants of sending, which must not decrease. Lazy: a run of any length needs little memory."""
        if self._link is None:
            return self._at_once(sent_ns)
        return (
            self._attached(sent_ns, self._link) if self._semantics == "attach" else self._delayed(sent_ns, self._link)
        )

    def _at_once(self, sent_ns: Iterable[int]) -> Iterator[Arrival]:
        draw_slo = self._draw_slo
        for number, at_ns in enumerate(sent_ns):
            yield at_ns, Request(RequestId(number), at_ns, at_ns, at_ns + draw_slo())

    def _attached(self, sent_ns: Iterable[int], link: Link) -> Iterator[Arrival]:
        for number, at_ns in enumerate(sent_ns):
            begun_ns = at_ns - link.transfer_ns(at_ns, self._draw_payload())
            yield at_ns, Request(RequestId(number), begun_ns, at_ns, begun_ns + self._draw_slo())

    def _delayed(self, sent_ns: Iterable[int], link: Link) -> Iterator[Arrival]:
        """Transfers take no negative time, so whatever arrives before the next sending can be handed over."""
        under_way: list[tuple[int, int, Request]] = []
        for number, at_ns in enumerate(sent_ns):
            while under_way and under_way[0][0] <= at_ns:
                arrived_ns, _, request = heappop(under_way)
                yield arrived_ns, request
            arrived_ns = at_ns + link.transfer_ns(at_ns, self._draw_payload())
            request = Request(RequestId(number), at_ns, arrived_ns, at_ns + self._draw_slo())
            heappush(under_way, (arrived_ns, number, request))
        while under_way:
            arrived_ns, _, request = heappop(under_way)
            yield arrived_ns, request


Value = TypeVar("Value")


def _draws(values: Sequence[Value], random: Random) -> Callable[[], Value]:
    """A source of equally likely `values`; a single one costs no draw."""
    if len(values) == 1:
        only = values[0]
        return lambda: only
    return lambda: random.choice(values)
