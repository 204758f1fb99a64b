"""Order: which waiting visit of a stage comes first. Each class is one policy; none uses another."""

from dataclasses import dataclass

from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out: visits leave in the order in which they arrived at the stage.

    Key: arrival at the stage, in ns. Fails where budgets differ: a request that arrived late but has little time left
    waits behind patient ones.
    """

    def key(self, visit: Visit) -> int:
        return visit.arrived_ns


@dataclass(frozen=True, slots=True)
class Edf:
    """Earliest deadline first.

    Key: the deadline, in ns. Absolute deadlines order a queue as remaining budgets do, at every instant, without
    re-sorting (Sponge, EuroMLSys 2024). Fails under overload: it spends the replica on the visits that are most likely
    to be late, unless a drop policy removes them.
    """

    def key(self, visit: Visit) -> int:
        return visit.deadline_ns
