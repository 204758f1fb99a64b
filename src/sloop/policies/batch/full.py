"""Wait for a full batch: as long as the plan counts on, some patience more, and not past the head's own deadline.

What FA2, InferLine and GrandSLAm do, whose plans count on full batches; they are published without any end to the
waiting (`forever`), so that a stream which stops strands what is left. Fails at low rates, where the time a batch takes
to fill is most of the deadline. The deadline is that of the whole way, of which stages may still be to come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.seams import Take
from sloop.policies.bounds import at_least
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Full:
    """Batches as large as the plan allows, at the latest `patience` times the plan's wait after the head came."""

    patience: float = 2.0
    forever: bool = False

    def __post_init__(self) -> None:
        at_least("patience", self.patience, 0)

    def decide(
        self, now_ns: int, queue: Sequence[Visit], limit: int, costs_ns: Sequence[int], wait_ns: int = 0
    ) -> Take:
        if len(queue) >= limit:
            return Take(count=limit)
        if self.forever:
            return Take(count=0)
        head = queue[0]
        start_by_ns = min(head.arrived_ns + round(self.patience * wait_ns), head.deadline_ns - costs_ns[limit])
        return Take(count=len(queue)) if now_ns >= start_by_ns else Take(count=0, wait_until_ns=start_by_ns)
