"""Order: which waiting visit of a stage comes first. Each class is one policy; none uses another."""

from dataclasses import dataclass

from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Fifo:
    """First in, first out: visits leave in the order in which they arrived at the stage.

    Key: arrival at the stage, in ns. Fails if budgets differ: a request with little time left waits behind earlier ones
    with much time.
    """

    def key(self, visit: Visit) -> int:
        return visit.arrived_ns


@dataclass(frozen=True, slots=True)
class Edf:
    """Earliest deadline first.

    Key: the deadline, in ns. The order by absolute deadline equals the order by remaining budget at every instant, so
    the queue needs no re-sorting (Sponge, EuroMLSys 2024). Fails under overload: it serves the visits first that are
    most likely to be late, unless a drop policy removes them.
    """

    def key(self, visit: Visit) -> int:
        return visit.deadline_ns
