"""Earliest deadline first: the visit with the least remaining budget comes first.

Sponge (EuroMLSys 2024): absolute deadlines order a queue as remaining budgets do, at every instant, without
re-sorting. Fails under overload, where it spends the replica on the most hopeless visits unless a drop policy removes
them.
"""

from dataclasses import dataclass

from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Edf:
    """Key: the end-to-end deadline, in ns."""

    def key(self, visit: Visit) -> int:
        return visit.deadline_ns
