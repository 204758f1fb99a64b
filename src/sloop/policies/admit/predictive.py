"""Refuse at the ingress what the queue ahead of it would make late.

A client that hears "no" at once can go elsewhere; one whose request is dropped in the queue has lost its whole budget.
Fails when the believed drain time is wrong, and is too strict for urgent requests under EDF, which overtake the queue.
"""

from dataclasses import dataclass

from sloop.policies.bounds import above, at_least
from sloop.vocabulary import Request


@dataclass(frozen=True, slots=True)
class Predictive:
    """Refuses when `now + trust × drain + reserve > deadline`; `reserve_ns` is for its own service and transport.

    `trust` below 1 lets in more than the believed drain time allows, which sums what nearly every batch keeps to.
    """

    reserve_ns: int = 0
    trust: float = 1.0

    def __post_init__(self) -> None:
        at_least("reserve_ns", self.reserve_ns, 0)
        above("trust", self.trust, 0)

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        """The excess: after it, the queue would have shrunk enough for a request with the same budget."""
        if queued == 0:
            return 0
        return max(0, now_ns + round(self.trust * drain_ns) + self.reserve_ns - request.deadline_ns)
