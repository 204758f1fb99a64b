"""Biscale: larger replicas at once when a surge comes, more and smaller ones when it has settled.

Razavi, dissertation (TU Darmstadt 2024), chapter P4 (Themis on arXiv, 2407.14843): resizing in place takes a tenth of a
second, starting a replica takes several; replicas of one core give the most throughput per core. So a rate that the
replicas cannot carry makes all of them larger (with further replicas for what even that cannot carry), and once the
rate has been steady for `settle` decisions, small replicas are started, and when they are ready the large ones shrink:
two plans, so that what serves is not made smaller before its replacement is there. Readings as in the specification,
sections 2.9 and 6; on a cluster without room for both, what must shrink first does so as far as the rate allows.

Fails where a model gains nothing from more cores, and in surges that end before they were worth new replicas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from msgspec import structs

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers import surge
from sloop.solvers.biscale import Choice, Program, Throughput
from sloop.solvers.seconds import seconds_rps
from sloop.solvers.sizing import Limits, Sizing, sizing_of
from sloop.solvers.surge import Groups, Have
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Plan, StagePlan

REFERENCE_S = 10
"""The busiest of so many seconds is what to be ready for: a mean of two seconds beside a maximum is never steady."""


@dataclass(slots=True)
class Memory:
    """What a decision remembers of those before: the state machine's state, with the replicas that there are."""

    steady: int = 0
    """Decisions in a row without a surge or a rise."""
    goal: tuple[Choice, ...] = ()
    """The small replicas that are on their way; empty where none are."""


@dataclass(frozen=True, slots=True)
class Biscale:
    """Replicas of 1 to `cores_max` units of `unit` cores each, batches up to `batch_max`."""

    unit: float = 1.0
    cores_max: int = 16
    batch_max: int = 16
    settle: int = 5
    """K: decisions without a surge or a rise before replicas are made small."""
    throughput: Throughput = "with_queue"
    """Whether waiting for a batch to fill counts as work; `pure` does not, and leaves no head-room."""
    reference: Literal["max10", "now"] = "max10"
    """What is steady: the busiest of the last ten seconds, or the rate now, which seldom looks steady beside a maximum
    that is foreseen."""
    stable: Literal["ge", "equal"] = "ge"
    """Steady are replicas enough for what is foreseen, or exactly as many."""
    split_cores: Literal["same", "one"] = "same"
    """What further replicas get in a surge: as much as those they help, or a unit."""
    shrink: bool = True
    """Whether replicas may become smaller while the rate is not steady."""
    blocking: bool = False
    """Whether nothing is decided while replicas start, as in the public artefact."""
    whole: bool = False
    """Whether rates are cut off to whole requests per second, at least 1, as in the public artefact."""
    sigma: float = 0.0
    """Rates are taken for λ + `sigma` √λ, the spread of a Poisson process."""
    margin: float = 1.0
    """Part of the SLO to plan with."""
    initial_batch: int = 1
    """Of the first plan."""
    variant: str = ""
    window_ns: int = s(2)
    """What the rate now is taken over."""
    period_ns: int = s(1)
    _memory: Memory = field(init=False, default_factory=Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        above("unit", self.unit, 0)
        at_least("cores_max", self.cores_max, 1)
        at_least("batch_max", self.batch_max, 1)
        at_least("settle", self.settle, 0)
        at_least("sigma", self.sigma, 0)
        within("margin", self.margin, 0, 1)
        at_least("initial_batch", self.initial_batch, 1)
        above("window_ns", self.window_ns, 0)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The next plan, or None where nothing is to change. Where no plan holds, the one in force, and why."""
        limits = Limits(self.unit, self.cores_max, self.batch_max, self.throughput, self.margin, self.variant)
        sizing, rates = sizing_of(view, limits), self._rates(view)
        if sizing.program.horizontal(0) is None:
            if view.plan is not None:
                return structs.replace(view.plan, why=f"kept as it was: {sizing.excess()}", feasible=False)
            return Plan(sizing.chosen(sizing.shortest()), sizing.excess(), feasible=False)
        if view.plan is None:
            return self._first(sizing, rates.foreseen if view.ingress.buckets else 0.0)
        now = _Now(sizing, rates, tuple(surge.have_of(stage, sizing.unit) for stage in view.stages), view)
        return None if self.blocking and any(one.starting for one in now.have) else self._next(now, view.plan)

    def _next(self, now: "_Now", plan: Plan) -> Plan | None:
        """The state machine: a surge, replicas on their way, a rise, and if none of them, steadiness."""
        memory, rates = self._memory, now.rates
        if not surge.carry(now.program, rates.now, now.have):
            memory.goal, memory.steady = (), 0
            return self._vertical(now, "more than the replicas carry")
        if memory.goal:
            return self._arrive(now)
        wanted = surge.most(now.sizing.program, rates.reference)
        foreseen = surge.most(now.sizing.program, rates.foreseen)
        if self._differ(wanted, foreseen):
            memory.steady = 0
            return self._vertical(now, f"{rates.foreseen:.4g} foreseen")
        if memory.steady < self.settle:
            memory.steady += 1
            return None
        memory.steady = 0
        return self._horizontal(now, wanted, plan)

    def _rates(self, view: ClusterView) -> "_Rates":
        ingress = view.ingress
        counts = [bucket.arrivals for bucket in ingress.window(REFERENCE_S * NS_PER_S)]
        busiest_rps = max(seconds_rps(counts, ingress.bucket_ns), default=0.0)
        now, busiest, forecast = map(self._cut, (ingress.rate_rps(self.window_ns), busiest_rps, view.forecast_rps))
        if self.reference == "now":
            return _Rates(now, now, forecast)
        return _Rates(now, max(now, busiest), max(now, busiest, forecast))

    def _cut(self, rate_rps: float) -> float:
        rate_rps += self.sigma * math.sqrt(rate_rps)
        return max(1.0, math.floor(rate_rps)) if self.whole else rate_rps

    def _differ(self, wanted: Sequence[Choice], foreseen: Sequence[Choice]) -> bool:
        pairs = [(one.replicas, other.replicas) for one, other in zip(wanted, foreseen, strict=True)]
        return any(a != b for a, b in pairs) if self.stable == "equal" else any(a < b for a, b in pairs)

    def _first(self, sizing: Sizing, rate_rps: float) -> Plan:
        """Small replicas for what is foreseen, once anything has come."""
        plans = sizing.chosen(surge.most(sizing.program, rate_rps))
        batches = (min(self.initial_batch, model.latency_ms.shape[1]) for model in sizing.program.models)
        plans = tuple(
            structs.replace(one, batch_max=max(one.batch_max, batch)) for one, batch in zip(plans, batches, strict=True)
        )
        return _answer(sizing, plans, f"{rate_rps:.4g} requests/s → {sizing.words(plans)}", rate_rps)

    def _vertical(self, now: "_Now", because: str) -> Plan:
        """All replicas larger, and further ones for what that does not carry."""
        sizing, rates, seen = now.sizing, now.rates, f"{now.rates.now:.4g} requests/s, {because}"
        split = now.program.split(rates.now, [one.count for one in now.have])
        groups: list[Groups] = []
        if split is not None:
            for one, choice, extra in zip(now.have, split.choices, split.extra, strict=True):
                units = choice.cores if self.shrink else max(one.most, choice.cores)
                further = (max(0, extra - len(one.starting)), units if self.split_cores == "same" else 1)
                # Those that start stay as they are until they are ready and, perhaps, asked for more.
                groups.append([(one.count, units), *((1, own) for own in one.starting), further])
        if split is None or surge.units_of(groups) > now.program.cores_total:
            return self._squeezed(now, seen)
        plans = _planned(sizing, groups, split.choices)
        carried = f", of which these carry {split.carried_rps:.4g} at once" if any(split.extra) else ""
        return Plan(plans, f"{seen}{carried} → {sizing.words(plans)}")

    def _squeezed(self, now: "_Now", seen: str) -> Plan:
        """Not everything has room: small replicas for the rate, the others as large as what these leave allows."""
        sizing, rates = now.sizing, now.rates
        goal = surge.most(sizing.program, rates.reference)
        plans = _planned(sizing, *surge.beside(now.program, rates.now, now.have, goal))
        why = f"{seen}; {sizing.cores_total:.4g} cores in all → {sizing.words(plans)}"
        return _answer(sizing, plans, why, rates.now)

    def _horizontal(self, now: "_Now", wanted: tuple[Choice, ...], plan: Plan) -> Plan:
        """Small replicas: at once where there are enough to shrink, else beside the large ones until they are ready."""
        sizing, seen = now.sizing, f"steady at {now.rates.reference:.4g} requests/s"
        final = sizing.chosen(wanted)
        enough = [one.count >= choice.replicas for one, choice in zip(now.have, wanted, strict=True)]
        if all(enough):
            return Plan(final, f"{seen} → {sizing.words(final)}")
        self._memory.goal = wanted
        groups = [
            [(choice.replicas, choice.cores)] if there else surge.kept(one, choice)
            for one, choice, there in zip(now.have, wanted, enough, strict=True)
        ]
        if surge.units_of(groups) > now.program.cores_total:
            plans = _planned(sizing, *surge.beside(now.program, now.rates.now, now.have, wanted))
        else:
            in_force = {target.stage: target for target in plan.stages}
            plans = tuple(
                done if there else sizing.grown(place, group, in_force[done.stage])
                for place, (done, there, group) in enumerate(zip(final, enough, groups, strict=True))
            )
        return Plan(plans, f"{seen}: small replicas start → {sizing.words(plans)}")

    def _arrive(self, now: "_Now") -> Plan | None:
        """On the way to small replicas: shrink what is large once they are ready, and carry the rate by themselves."""
        memory = self._memory
        if any(len(one.ready) < choice.replicas for one, choice in zip(now.have, memory.goal, strict=True)):
            return None
        goal, memory.goal, memory.steady = memory.goal, (), 0
        alone = now.program.vertical(now.rates.now, [choice.replicas for choice in goal])
        if alone is None or any(one.cores > choice.cores for one, choice in zip(alone, goal, strict=True)):
            return self._vertical(now, "more than the small replicas would carry")
        plans = now.sizing.chosen(goal)
        return Plan(plans, f"the small replicas are ready → {now.sizing.words(plans)}")


@dataclass(frozen=True, slots=True)
class _Rates:
    """Requests per second at the ingress: what comes, what to be ready for, and what the next seconds may bring."""

    now: float
    reference: float
    foreseen: float


@dataclass(frozen=True)
class _Now:
    """All that one decision looks at."""

    sizing: Sizing
    rates: _Rates
    have: tuple[Have, ...]
    view: ClusterView

    @cached_property
    def program(self) -> Program:
        """For the replicas that there are, where they are."""
        return surge.on_their_nodes(self.sizing.program, self.view, self.sizing.unit)


def _planned(sizing: Sizing, groups: Sequence[Groups], choices: Sequence[Choice]) -> tuple[StagePlan, ...]:
    """Batches as chosen."""
    return tuple(
        sizing.plan(place, group, choice.batch, choice.wait_ms)
        for place, (group, choice) in enumerate(zip(groups, choices, strict=True))
    )


def _answer(sizing: Sizing, plans: tuple[StagePlan, ...], why: str, rate_rps: float) -> Plan:
    """Feasible where the cluster has the cores for small replicas that carry the rate."""
    if sizing.program.horizontal(rate_rps) is not None:
        return Plan(plans, why)
    why += f"; {rate_rps:.4g} requests/s need more than the {sizing.cores_total:.4g} cores there are"
    return Plan(plans, why, feasible=False, saturated=tuple(plan.stage for plan in plans))
