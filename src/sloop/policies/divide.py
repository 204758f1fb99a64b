"""Divide: how many cores each application gets when they want more than there are, and who may use those that no plan
needs.

Each class is one policy; none uses another. All give nobody more than it wants, and leave no core unused. With
`idle: use`, plans only reserve cores on a machine that is there anyway, and each replica may use what the others leave
idle: a burst at an idle model need not wait for the next plan (`sloop.core.planner.sharing_idle_cores`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from sloop.core.protocols import Divide
from sloop.core.views import CoreDemand, CoreShare


@dataclass(frozen=True, slots=True)
class MaxMin(Divide):
    """Weighted max-min fairness: the smallest share is as large as possible, then the second smallest, and so on.

    A share is the cores divided by the weight (Bertsekas and Gallager, Data Networks, section 6.5.2). An application
    that wants less than its share gets all it wants, so that the overload of one does not harm the others. Fails if
    what an application gets is too little for any replica: nobody else can use it.
    """

    idle: Literal["leave", "use"] = "leave"
    """Whether replicas on a machine of its own may use cores that others have reserved or nobody has, while they are
    idle."""

    def cores(self, now_ns: int, total: float, demands: Sequence[CoreDemand]) -> list[CoreShare]:
        return _shares(_filled(total, [demand.cores for demand in demands], [demand.weight for demand in demands]))


@dataclass(frozen=True, slots=True)
class Proportional(Divide):
    """Cores in proportion to demand × weight, as far as each demand allows.

    With equal weights all applications get the same part of what they want. Fails for fairness: who wants more gets
    more, so the overload of one takes cores from all others.
    """

    idle: Literal["leave", "use"] = "leave"
    """As in `MaxMin`."""

    def cores(self, now_ns: int, total: float, demands: Sequence[CoreDemand]) -> list[CoreShare]:
        wanted = [demand.cores for demand in demands]
        return _shares(_filled(total, wanted, [demand.cores * demand.weight for demand in demands]))


@dataclass(frozen=True, slots=True)
class Priority(Divide):
    """The highest weight first, all it wants; applications of equal weight share what is left max-min fairly.

    Fails for those of low weight, which may get nothing for as long as the others are busy.
    """

    idle: Literal["leave", "use"] = "leave"
    """As in `MaxMin`."""

    def cores(self, now_ns: int, total: float, demands: Sequence[CoreDemand]) -> list[CoreShare]:
        found = [0.0] * len(demands)
        order = sorted(range(len(demands)), key=lambda index: -demands[index].weight)
        for _, group in groupby(order, key=lambda index: demands[index].weight):
            equal = list(group)
            filled = _filled(total, [demands[index].cores for index in equal], [1.0] * len(equal))
            for index, cores in zip(equal, filled, strict=True):
                found[index] = cores
            total = max(0.0, total - sum(filled))
        return _shares(found)


def _shares(cores: Sequence[float]) -> list[CoreShare]:
    return [CoreShare(each) for each in cores]


def _filled(total: float, wanted: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Progressive filling: each gets min(wanted, level × weight), with the level at which all `total` is used.

    Those that need the lowest level to be satisfied come first; when one cannot be satisfied, it and all after it get
    the remaining level.
    """
    found = [0.0] * len(wanted)
    open = sorted((index for index in range(len(wanted)) if wanted[index] > 0), key=lambda i: wanted[i] / weights[i])
    left = sum(weights[index] for index in open)
    for index in open:
        share = total * weights[index] / left if left > 0 else 0.0
        found[index] = min(wanted[index], share)
        total -= found[index]
        left -= weights[index]
    return found
