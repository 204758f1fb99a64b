"""First in, first out: visits are taken in the order in which they entered the stage's queue.

Fails where budgets differ: a request that came late but has little time left waits behind patient ones.
"""

from dataclasses import dataclass

from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Fifo:
    """Key: arrival at the stage, in ns."""

    def key(self, visit: Visit) -> int:
        return visit.arrived_ns
