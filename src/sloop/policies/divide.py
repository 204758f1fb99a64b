"""Divide: how many cores each application gets when they want more than there are, and who may use those that no plan
needs.

Each class is one policy; none uses another. All give nobody more than it wants, and leave no core unused. `Worth` looks
at what each application would do with its cores, the others only at how many it wants. All say what becomes of cores on
machines that are there anyway, if no plan needs them: `sloop.core.idle`.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Annotated, ClassVar, Final, NamedTuple

from sloop.core.ledger import cores_by_hardware
from sloop.core.protocols import Divide, Idle
from sloop.core.views import Claimant, CoreDemand, CoreShare
from sloop.options import Range
from sloop.policies.attainment import attained, services_of
from sloop.text import counted, number
from sloop.units import ROUNDING
from sloop.vocabulary import Plan

SIZES: Final = 8
"""For about how many numbers of cores `Worth` computes what an application gains."""
ASKS: Final = 64
"""The most plans that `Worth` asks for in one decision, of all applications together."""
PART: Final = 4
"""`Worth` gives cores in multiples of the smallest replica's, divided by this; of equal shares if these are less."""
LEAST: Final = 0.01
"""Added to the fraction of requests in time, so that the gain is finite where none is in time."""
RATE_RPS_MIN: Final = 0.1
"""An application counts as if at least so many requests were expected."""


@dataclass(frozen=True, slots=True)
class MaxMin(Divide):
    """Weighted max-min fairness: the smallest share is as large as possible, then the second smallest, and so on.

    A share is the cores divided by the weight (Bertsekas and Gallager, Data Networks, section 6.5.2). An application
    that wants less than its share gets all it wants, so that the overload of one does not harm the others. Fails if
    what an application gets is too little for any replica: nobody else can use it.
    """

    idle: Idle = "leave"
    """What becomes of cores that no plan needs, on nodes that are there anyway: `leave`, `use` (on a machine of its
    own, the only replica of a stage uses those that others have reserved or nobody has, while they are idle) or
    `replicas` (there are more replicas than planned, in proportion to the plans and to the weights)."""

    def cores(self, now_ns: int, total: float, demands: Sequence[CoreDemand]) -> list[CoreShare]:
        return _shares(_filled(total, [demand.cores for demand in demands], [demand.weight for demand in demands]))


@dataclass(frozen=True, slots=True)
class Proportional(Divide):
    """Cores in proportion to demand × weight, as far as each demand allows.

    With equal weights all applications get the same part of what they want. Fails for fairness: who wants more gets
    more, so the overload of one takes cores from all others.
    """

    idle: Idle = "leave"
    """As in `MaxMin`."""

    def cores(self, now_ns: int, total: float, demands: Sequence[CoreDemand]) -> list[CoreShare]:
        wanted = [demand.cores for demand in demands]
        return _shares(_filled(total, wanted, [demand.cores * demand.weight for demand in demands]))


@dataclass(frozen=True, slots=True)
class Priority(Divide):
    """The highest weight first, all it wants; applications of equal weight share what is left max-min fairly.

    Fails for those of low weight, which may get nothing for as long as the others are busy.
    """

    idle: Idle = "leave"
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


class _MoreCores(NamedTuple):
    """A step from `begin` to `end` cores for the application at `place`. Steps are taken in ascending `order`."""

    order: tuple[bool, float, float, str]
    place: int
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Worth(Divide):
    """Cores to the applications for which they are worth most: the most requests in time, and fairly.

    What an application gains is the expected rate × u(x), where x is the fraction of its requests that its own plan for
    so many cores is predicted to answer in time (`sloop.policies.attainment`). u rises as (weight/x)^fairness, so that
    of equal gains the smallest x/weight is first: α-fairness (Mo and Walrand, "Fair end-to-end window-based congestion
    control", 2000). Cores go to the largest gain per core, along the concave hull of each application's gains (Fox,
    "Discrete optimization via marginal analysis", 1966). Each application of the highest weight gets cores, as long
    as there are enough for its first step. Cores that an application has already count for somewhat more than others,
    so that none move where gains are equal.

    It asks for plans with about `SIZES` numbers of cores for each application, and for `ASKS` plans in all. For other
    numbers of cores, and if there are many applications, it takes the plan with the next larger number, and reduces the
    replicas in proportion. Fails where predictions are wrong: for bursts that the forecast misses, and with a data path
    that drops nothing.
    """

    is_quick: ClassVar[bool] = False
    fairness: Annotated[float, Range(least=0, most=64)] = 16.0
    """0: as many requests in time as possible, whoever sends them, and weights multiply rates. The larger it is, the
    less the fractions in time differ. Where all are short, one whose requests take k times as long has a fraction that
    is smaller by the factor k^(1/fairness): 1.15 for k = 10."""
    steady: Annotated[float, Range(least=0, most=1)] = 0.1
    """By which fraction rates may change, where all are short, before cores move: the cores that an application already
    has count for so much more."""
    idle: Idle = "leave"
    """As in `MaxMin`."""

    def cores(self, now_ns: int, total: float, claimants: Sequence[Claimant]) -> list[CoreShare]:
        count = len(claimants)
        highest = max(each.weight for each in claimants)
        gains = [_Gains(each, each.weight / highest, ASKS // count, self.fairness, total / count) for each in claimants]
        found, left = [0.0] * len(gains), total
        for step in sorted(step for place, own in enumerate(gains) for step in own.steps(place, self.steady)):
            if found[step.place] != step.begin:
                continue  # what comes before it had no room
            own, end = gains[step.place], step.end
            if end - step.begin > left * (1 + ROUNDING):
                end = own.usable(step.begin + left)
                if end <= step.begin or own.of(end) <= own.of(step.begin):
                    continue
            found[step.place] = end
            left = max(0.0, left - (end - step.begin))
        weights = [each.weight for each in claimants]
        rest = _filled(left, [each.cores - cores for each, cores in zip(claimants, found, strict=True)], weights)
        given = [cores + more for cores, more in zip(found, rest, strict=True)]
        return [CoreShare(cores, own.why(cores)) for cores, own in zip(given, gains, strict=True)]


class _Gains:
    """What one application gains with each number of cores. `weight` is its part of the highest weight. At most `asks`
    plans are asked for; `equal` is how many cores each application would have if all had the same."""

    def __init__(self, claimant: Claimant, weight: float, asks: int, fairness: float, equal: float) -> None:
        self._claimant, self._weight, self._fairness = claimant, weight, fairness
        self._rate_rps = max(RATE_RPS_MIN, claimant.view.forecast_rps)
        self._present = cores_by_hardware(claimant.view.plan).get(claimant.hardware, 0.0)
        slots = [group.spec.slot for target in claimant.alone.stages for group in target.groups if group.count]
        unit = min((slot.cores for slot in slots if slot.hardware == claimant.hardware), default=1.0)
        self._unit = unit = min(1.0, unit, claimant.cores) or 1.0
        self._part = min(unit / PART, equal or unit)
        wanted, sizes = claimant.cores, {min(self._present, claimant.cores)}
        units = math.ceil(wanted / unit - ROUNDING)
        sizes |= {min(wanted, unit * round(units * n / SIZES)) for n in range(1, SIZES + 1)}
        if units < SIZES:
            sizes |= {self._part * n for n in range(1, PART)}
        self._sizes = sorted(sizes - {0.0})
        self._attained: dict[float, float] = {}
        self._plans = [(wanted, wanted, services_of(claimant.alone, claimant.view))]
        smaller = self._sizes[:-1]
        chosen = smaller[:: max(1, -(-len(smaller) // asks))] if asks else []
        for cores in chosen:
            plan = claimant.plan(cores)
            if plan is not None:
                self._plans.append((cores, self._used(plan), services_of(plan, claimant.view)))
        self._plans.sort(key=lambda each: each[0])

    def usable(self, cores: float) -> float:
        """The largest part of `cores` that replicas can use: below one replica's size in parts of it, above it in whole
        replicas."""
        grain = self._part if cores < self._unit * (1 - ROUNDING) else self._unit
        return math.floor(cores / grain + ROUNDING) * grain

    def _used(self, plan: Plan) -> float:
        return cores_by_hardware(plan).get(self._claimant.hardware, 0.0)

    def attained(self, cores: float) -> float:
        """The fraction of its requests that it is predicted to answer in time with so many cores."""
        found = self._attained.get(cores)
        if found is None:
            place = bisect_left(self._plans, cores * (1 - ROUNDING), key=lambda each: each[0])
            _, used, services = self._plans[min(place, len(self._plans) - 1)]
            if cores < used * (1 - ROUNDING):
                served = self.usable(cores) if cores > self._unit else cores
                services = {name: each.times(served / used) for name, each in services.items()}
            found = self._attained[cores] = attained(services, self._claimant.view) if cores else 0.0
        return found

    def of(self, cores: float) -> float:
        """What so many cores are worth. Only differences count; the worth of none is not subtracted, because it is so
        much less that the differences would be lost in rounding."""
        x, power = self.attained(cores) + LEAST, 1 - self._fairness
        u = math.pow(x, power) / power if power else math.log(x)
        return math.pow(self._weight, max(1.0, self._fairness)) * self._rate_rps * u

    def steps(self, place: int, steady: float) -> Iterator[_MoreCores]:
        """The edges of the concave hull of its gains."""
        hull = [(0.0, self.of(0.0))]
        for cores in self._sizes:
            new = (cores, self.of(cores))
            if new[1] - hull[-1][1] <= ROUNDING * abs(hull[-1][1]):
                continue
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) < _slope(hull[-1], new) * (1 - ROUNDING):
                hull.pop()
            hull.append(new)
        for begin, end in pairwise(hull):
            is_first = begin[0] == 0.0 and self._weight == 1.0
            is_present = end[0] <= self._present * (1 + ROUNDING)
            worth = _slope(begin, end) * ((1 + steady) ** (1 + self._fairness) if is_present else 1.0)
            order = (not is_first, -worth, self.attained(begin[0]) / self._weight, self._claimant.key)
            yield _MoreCores(order, place, begin[0], end[0])

    def why(self, cores: float) -> str:
        """What it attains, and what a core more or less would change."""
        now = self.attained(cores)
        text = f"worth: {now:.1%} of {number(self._rate_rps)} requests/s expected in time"
        if self._claimant.view.forecast_rps < RATE_RPS_MIN:
            text += " (fewer come; this rate is assumed)"
        fewer, more = (round(min(1.0, each), 3) for each in (cores, self._claimant.cores - cores))
        if fewer:
            loss = max(0.0, now - self.attained(max(0.0, cores - fewer)))
            text += f", {100 * loss:.1f} points less with {counted(fewer, 'core')} less"
        if more:
            gain = max(0.0, self.attained(cores + more) - now)
            served = number(round(gain * self._rate_rps, 3))
            text += f", {100 * gain:.1f} points ({served} requests/s) more with {counted(more, 'core')} more"
        return text


def _slope(begin: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


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
