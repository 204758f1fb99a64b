"""Admit: which requests may enter the application. Each class is one policy; none uses another."""

from dataclasses import dataclass

from sloop.options import PositiveFloat, PositiveInt
from sloop.units import NS_PER_MS
from sloop.vocabulary import Request


@dataclass(frozen=True, slots=True)
class Open:
    """Admit every request.

    Right if a drop policy sheds load later. Fails under overload without a drop policy (see `drop.Never`).
    """

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Bounded:
    """Refuse requests while `queue_max` visits wait at the first stage; Retry-After is the believed drain time.

    A queue without a bound only stores requests that will fail. Fails if the bound does not suit the deadline: too
    small, it refuses requests that could be served; too large, it admits requests that will be dropped.
    """

    queue_max: PositiveInt = 1000
    """As many visits may wait."""

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        # 0 would admit, so an unknown drain time becomes 1 ms.
        return max(drain_ns, NS_PER_MS) if queued >= self.queue_max else 0


@dataclass(frozen=True, slots=True)
class PredictiveAdmit:
    """Refuse a request that would be late because of the queue.

    Refuses if now + `trust` × drain time > deadline. A client that is refused at once can go elsewhere; one whose
    request is dropped in the queue has lost its whole budget. `trust` below 1 admits more requests, because the
    believed drain time is a sum of P99s, which a queue rarely takes. Fails if the drain time is wrong, and is too
    strict for urgent requests under EDF, which overtake the queue.
    """

    trust: PositiveFloat = 1.0
    """Factor of the believed drain time; below 1 more requests are admitted."""

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        """The expected lateness in ns: after this time the queue is short enough for a request with the same budget."""
        if queued == 0:
            return 0
        return max(0, now_ns + round(self.trust * drain_ns) - request.deadline_ns)
