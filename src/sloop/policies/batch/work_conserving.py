"""Send what is there, up to the limit, as soon as a replica is idle.

Batches grow by themselves while the replica is busy, so an idle replica never waits.
Fails where a tiny batch now makes a large one late: it never looks ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.protocols import Take
from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class WorkConserving:
    """The first `limit` visits, or all of them."""

    def decide(
        self,
        now_ns: int,
        queue: Sequence[Visit],
        limit: int,
        costs_ns: Sequence[int],
        wait_ns: int = 0,
        remaining_ns: int = 0,
    ) -> Take:
        count = len(queue)
        return Take(count if count < limit else limit)
