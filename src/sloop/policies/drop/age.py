"""Give up a visit whose request is older than n times its own SLO, or that of the path it is on.

Biscale found 1× better than 3× and than never; Sponge's artefact uses 1× and 3×. Age counts from when the client
began to send. Fails under overload at n = 1: a visit just young enough is executed although it can only be late (see
`predictive`).
"""

from dataclasses import dataclass

from sloop.policies.bounds import above
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Age:
    """Hopeless when `now - sent > limit × SLO`."""

    limit: float = 1.0

    def __post_init__(self) -> None:
        above("limit", self.limit, 0)

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        sent_ns = visit.request.sent_ns
        return now_ns - sent_ns > self.limit * (visit.deadline_ns - sent_ns)
