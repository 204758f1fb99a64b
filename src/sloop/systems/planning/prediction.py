"""What applications on one cluster get at steady rates: the one prediction that `sloop plan` and `sloop advise` read.

A `ClusterPrediction` holds the plans that the systems keep (`steady`), where their replicas are (`placement`), how long
requests take (`timing`) and what the plans lack (`infeasibility`). Only the plans are made at once; everything else is
computed when it is read first, and once.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final

from sloop.core.idle import demands_of
from sloop.core.ledger import cores_by_hardware
from sloop.core.views import CoreDemand
from sloop.systems.planning.infeasibility import BestConfigurations, beyond_cluster, shortfalls_of
from sloop.systems.planning.placement import Placement, PlanShortfall, Room
from sloop.systems.planning.report import CoreLimit
from sloop.systems.planning.steady import steady_plans
from sloop.systems.planning.timing import Arrivals, PlanPrediction
from sloop.systems.setup import ApplicationSetup
from sloop.text import counted, listed, number
from sloop.units import at_least
from sloop.vocabulary import Node

NAMED_MAX: Final = 3
"""Applications that a limit names; the others are counted."""
TOGETHER_MAX: Final = 16
"""Of more applications than this, one more request of each is planned for while the others keep their plans: all plans
again for each application would take minutes."""


class ClusterPrediction:
    """Applications at steady rates, in requests per second by application.

    `beside` is an application of another prediction: this one has that application alone, at another rate, while all
    others keep the plans that they have there. `best`: those of another prediction of the same applications. `clock`
    returns nanoseconds and times the decisions.
    """

    def __init__(
        self,
        setups: Sequence[ApplicationSetup],
        rates_rps: Mapping[str, float],
        arrivals: Arrivals = "even",
        *,
        beside: "ApplicationPrediction | None" = None,
        best: Mapping[str, BestConfigurations] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.setups, self.rates_rps, self.arrivals, self.beside = setups, rates_rps, arrivals, beside
        self.cluster: Sequence[Node] = setups[0].application.cluster
        self.best = best or {setup.application.key: BestConfigurations(setup) for setup in setups}
        self.steady = steady_plans(setups, rates_rps, others=beside.kept_from_it if beside else (), clock=clock)
        self.applications = {setup.application.key: ApplicationPrediction(self, setup, arrivals) for setup in setups}

    @cached_property
    def placement(self) -> Placement:
        """Where all replicas are on the empty cluster."""
        return Placement(self.setups, self.steady.plans, self.cluster)

    @cached_property
    def shortfalls(self) -> list[PlanShortfall]:
        """What the plans lack; first what all applications together lack, if each alone could have it."""
        applications = self.applications.values()
        shortfalls = [shortfall for application in applications for shortfall in application.shortfalls]
        if len(self.setups) == 1 or not shortfalls:
            return shortfalls
        best = [(application.timing, self.best[application.key]) for application in applications]
        return [*beyond_cluster(best, self.cluster), *shortfalls]

    def demands_beside(self, key: str) -> list[CoreDemand]:
        """The cores of all applications but one."""
        if self.beside is not None:
            return self.beside.whole.demands_beside(key)
        return [
            demand
            for other in self.applications.values()
            if other.key != key
            for demand in demands_of(other.key, other.plan, other.setup.application.weight)
        ]

    def cores_of(self, hardware: str) -> float:
        """The cores of the cluster on a kind of hardware; "" is any kind."""
        return sum(node.cores for node in self.cluster if hardware in ("", node.hardware))


class ApplicationPrediction:
    """One application of a `ClusterPrediction`, its `whole`, whose requests arrive as the whole's or otherwise."""

    def __init__(self, whole: ClusterPrediction, setup: ApplicationSetup, arrivals: Arrivals) -> None:
        self.whole, self.setup, self.arrivals = whole, setup, arrivals
        self.key = setup.application.key
        self.plan, self.rate_rps = whole.steady.plans[self.key], whole.rates_rps[self.key]

    @cached_property
    def timing(self) -> PlanPrediction:
        """How long requests take."""
        return PlanPrediction(self.setup, self.plan, self.rate_rps, self.arrivals)

    @cached_property
    def otherwise(self) -> "ApplicationPrediction":
        """The same plan under the other assumption about arrivals."""
        return ApplicationPrediction(self.whole, self.setup, "burst" if self.arrivals == "even" else "even")

    def is_feasible(self, arrivals: Arrivals) -> bool:
        """Whether the plan lacks nothing under this assumption about arrivals."""
        return not (self if arrivals == self.arrivals else self.otherwise).plan_shortfalls

    @cached_property
    def room(self) -> Room:
        """The room that its replicas find."""
        beside = self.whole.beside
        if beside is not None:
            return beside.whole.placement.room_for(self.key, self.plan)
        return self.whole.placement.rooms[self.key]

    @cached_property
    def plan_shortfalls(self) -> list[PlanShortfall]:
        """What its plan lacks, whoever has it."""
        return shortfalls_of(self.setup, self.timing, self.room, self.whole.best[self.key])

    @cached_property
    def limits(self) -> list[CoreLimit]:
        """Where the other applications leave it fewer cores than it wants."""
        limits = self.whole.steady.limits
        left = {hardware: cores for (key, hardware), cores in limits.items() if key == self.key}
        if not left:
            return []
        alone = steady_plans([self.setup], {self.key: self.rate_rps}).plans[self.key]
        wants = cores_by_hardware(alone)
        needs = {hardware: min(wants.get(hardware, 0.0), self.whole.cores_of(hardware)) for hardware in left}
        return [self._limit(kind, needs[kind], has) for kind, has in left.items() if not at_least(has, needs[kind])]

    def _limit(self, hardware: str, needs: float, has: float) -> CoreLimit:
        demands = self.whole.demands_beside(self.key)
        others = [(demand.key, demand.cores) for demand in demands if demand.hardware == hardware and demand.cores]
        others.sort(key=lambda other: -other[1])
        several = len({node.hardware for node in self.whole.cluster}) > 1
        named = [f"{name} has {number(cores)}" for name, cores in others[:NAMED_MAX]]
        if len(others) > NAMED_MAX:
            rest = sum(cores for _, cores in others[NAMED_MAX:])
            named.append(f"{counted(len(others) - NAMED_MAX, 'other')} {number(rest)}")
        why = (
            f"the other applications leave it {number(has)} of the {number(needs)} {'core' if needs == 1 else 'cores'}"
            f"{f' of {hardware}' if several else ''} that it would have alone: {listed(named)}"
        )
        return CoreLimit(hardware, needs, has, tuple(others), why)

    @cached_property
    def shortfalls(self) -> list[PlanShortfall]:
        """What its plan lacks, and which others have it; empty if the plan is feasible."""
        if not self.plan_shortfalls:
            return []
        return [*self.plan_shortfalls, *(self._limited_by(limit) for limit in self.limits)]

    def _limited_by(self, limit: CoreLimit) -> PlanShortfall:
        """A limit as a reason why the plan is not feasible."""
        return PlanShortfall(
            "cores",
            limit.why,
            needs=limit.needs,
            has=limit.has,
            unit="cores",
            application=self.key,
            hardware=limit.hardware,
        )

    @property
    def kept_from_it(self) -> list[CoreDemand]:
        """The cores that it cannot have: those of the others and, where it is limited, all that the divide policy gives
        to others."""
        limited = {limit.hardware: limit.has for limit in self.limits}
        demands = [demand for demand in self.whole.demands_beside(self.key) if demand.hardware not in limited]
        for hardware, cores in limited.items():
            demands.append(CoreDemand("", hardware, self.whole.cores_of(hardware) - cores))
        return demands

    @cached_property
    def with_one_more(self) -> "ApplicationPrediction":
        """The application with one more request per second. The other applications keep their plans; if all together
        want more cores than there are, the cores are divided anew."""
        whole, rate_rps = self.whole, self.rate_rps + 1
        if whole.steady.limits and len(whole.setups) <= TOGETHER_MAX:
            rates_rps = {**whole.rates_rps, self.key: rate_rps}
            then = ClusterPrediction(whole.setups, rates_rps, whole.arrivals, best=whole.best)
        else:
            then = ClusterPrediction([self.setup], {self.key: rate_rps}, whole.arrivals, beside=self, best=whole.best)
        return then.applications[self.key]
