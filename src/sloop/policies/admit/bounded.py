"""Refuse requests while the first queue is full; tell the client when it should have drained.

A queue without a bound only stores failures; the answer carries a computed Retry-After. Fails when the bound is far
from what the deadline allows: too small refuses what could be served, too large lets in what will be dropped.
"""

from dataclasses import dataclass

from sloop.policies.bounds import at_least
from sloop.units import NS_PER_MS
from sloop.vocabulary import Request


@dataclass(frozen=True, slots=True)
class Bounded:
    """At most `queue_max` visits wait; the next is told to come back after the believed drain time."""

    queue_max: int = 1000

    def __post_init__(self) -> None:
        at_least("queue_max", self.queue_max, 1)

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        # 0 would admit, so a drain time that is not known yet becomes the shortest wait we can name.
        return max(drain_ns, NS_PER_MS) if queued >= self.queue_max else 0
