"""Between what a policy is shown and the solvers of equal replicas: a graph in their terms, and a plan out of choices.

Shared by FA2 and those it is compared with, so that they differ in what they choose and in nothing else. A stage is
what its one variant is believed to take on `cores` each; its rate is the demand there; its parts are the visits of a
request, rounded up. Paths are the view's, with deadlines of their own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from sloop.core.views import ClusterView
from sloop.errors import InputError
from sloop.quantities import ROUNDING, round_down, round_up
from sloop.solvers import highs, targets
from sloop.solvers.choice import NODES_MAX
from sloop.solvers.fa2 import Answer, Choice, GaveUp, Mode, Shortfall, Stage, keeps, solve, squeezed, way_ms
from sloop.solvers.fa2_baselines import ds2
from sloop.solvers.graph import Ties, Way
from sloop.units import NS_PER_MS, to_ms
from sloop.vocabulary import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may be made of; `variants` by stage, `variant` for the others, "" for the first declared."""

    cores: float = 1.0
    batch_max: int = 16
    margin: float = 1.0
    """Part of every deadline to plan with."""
    headroom: float = 0.0
    """How far above the demand to plan: 0.1 for a tenth."""
    initial_rps: float = 0.0
    """To expect at the ingress before anything was seen."""
    variant: str = ""
    variants: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A cluster view as solvers see it: stages in topological order, every stage on a path."""

    view: ClusterView
    stages: tuple[Stage, ...]
    ways: tuple[Way, ...]
    variants: tuple[str, ...]
    cores: float
    ingress_rps: float

    @property
    def replicas_max(self) -> float:
        """How many replicas the nodes hold; infinite where none is known."""
        nodes = self.view.nodes
        return sum(round_down(node.node.cores / self.cores) for node in nodes) if nodes else math.inf

    def plan(self, choices: Sequence[Choice], why: str, *, feasible: bool) -> Plan:
        """The target these choices are."""
        return Plan(tuple(map(self._target, range(len(choices)), choices)), why, feasible)

    def chosen(self, choices: Sequence[Choice]) -> Plan:
        """The same with its numbers as the reason, feasible where every path holds and the nodes have room."""
        count = sum(choice.replicas for choice in choices)
        why = self.described(choices)
        if count > self.replicas_max:
            why += f"; the nodes hold {targets.amount(self.replicas_max, 'replica')}"
        return self.plan(choices, why, feasible=keeps(choices, self.ways) and count <= self.replicas_max)

    def described(self, choices: Sequence[Choice]) -> str:
        """`30 requests/s → 7 replicas: detect 3 × batch 2, …; tightest: detect → read, 80 of 300 ms left`."""
        each = ", ".join(
            f"{stage.name} {choice.replicas} × batch {choice.batch}"
            for stage, choice in zip(self.stages, choices, strict=True)
        )
        count = sum(choice.replicas for choice in choices)
        way = min(self.ways, key=lambda way: way.slo_ms - way_ms(choices, way))
        left_ms = way.slo_ms - way_ms(choices, way)
        over = f"{-left_ms:.4g} ms over its {way.slo_ms:.4g} ms"
        room = f"{left_ms:.4g} of {way.slo_ms:.4g} ms left" if left_ms > -ROUNDING else over
        return (
            f"{self.ingress_rps:.4g} requests/s → {targets.amount(count, 'replica')} of "
            f"{targets.amount(self.cores, 'core')}: {each}; tightest: {self.named(way)}, {room}"
        )

    def named(self, way: Way) -> str:
        """`detect → read`."""
        return " → ".join(self.stages[stage].name for stage in way.stages)

    def short(self, shortfall: Shortfall) -> str:
        """Why there is no plan: which path, by how much, and which stage takes most of it."""
        way, slowest = shortfall.way, self.stages[shortfall.slowest]
        return (
            f"{self.named(way)} takes {shortfall.least_ms:.4g} ms even one at a time, "
            f"{shortfall.least_ms - way.slo_ms:.4g} ms more than its {way.slo_ms:.4g} ms; "
            f"most of it {slowest.name}, {slowest.latency_ms[0]:.4g} ms"
        )

    def failed(self, failure: Shortfall | GaveUp, otherwise: Sequence[Choice]) -> Plan:
        """Where a solver has no answer: what is in force stays if it merely gave up; else `otherwise`, which is too
        slow, and follows the demand at least."""
        if isinstance(failure, Shortfall):
            return self.plan(otherwise, f"{self.short(failure)}; {self.described(otherwise)}", feasible=False)
        why = f"the solver gave up after {failure.nodes} nodes"
        if self.view.plan is not None:
            return structs.replace(self.view.plan, why=f"{why}: kept as it was", feasible=False, gave_up=True)
        found = self.plan(otherwise, f"{why}: {self.described(otherwise)}", feasible=False)
        return structs.replace(found, gave_up=True)

    def squeezed(self, squeezed: tuple[Answer, float] | None) -> Plan:
        """What is left where the nodes have no room for all: the share that fits, or one replica of each stage."""
        most = targets.amount(self.replicas_max, "replica")
        if squeezed is None:
            ones = tuple(Choice(1, 1, stage.latency_ms[0], 0.0) for stage in self.stages)
            return self.plan(ones, f"{len(ones)} stages, and the nodes hold {most}: one each", feasible=False)
        answer, share = squeezed
        why = f"the nodes hold {most}, enough for {share:.0%} of what comes; {self.described(answer.choices)}"
        return self.plan(answer.choices, why, feasible=False)

    def _target(self, place: int, choice: Choice) -> StagePlan:
        target = targets.equal_replicas(
            self.view.stages[place],
            self.variants[place],
            count=choice.replicas,
            cores=self.cores,
            batch_max=choice.batch,
        )
        return structs.replace(target, wait_ns=math.ceil(choice.wait_ms * NS_PER_MS))


def fewest(
    problem: Problem, *, mode: Mode = "tree", ties: Ties = "best", polish: bool = True, nodes_max: int = NODES_MAX
) -> Plan:
    """FA2's plan: the fewest replicas that hold, or those for as large a share of all rates as the nodes hold; else why
    there is none."""
    highs.load()  # with the first plan, before anything is served
    answer = solve(problem.stages, problem.ways, mode=mode, ties=ties, polish=polish, nodes_max=nodes_max)
    if not isinstance(answer, Answer):
        return problem.failed(answer, ds2(problem.stages))
    if answer.replicas > problem.replicas_max:
        # More of a stage than the nodes hold is one number; a share of all rates is a plan.
        dynamic: Mode = "paper" if mode == "paper" else "tree"
        return problem.squeezed(squeezed(problem.stages, problem.ways, int(problem.replicas_max), mode=dynamic))
    return problem.chosen(answer.choices)


def problem_of(view: ClusterView, limits: Limits) -> Problem:
    """The view in the solvers' terms. `InputError` for a stage or variant the application does not have."""
    own = dict(limits.variants or {})
    unknown = own.keys() - {stage.name for stage in view.stages}
    if unknown:
        known = ", ".join(stage.name for stage in view.stages)
        raise InputError(f"variants: no stage {min(unknown)!r}", help=f"the application's stages are {known}")
    cores = min(limits.cores, targets.node_cores_max(view))
    stages, variants = [], []
    # Nothing was ever seen: what the user expects, else what the forecast makes of nothing.
    untold = 0.0 if any(bucket.arrivals for bucket in view.ingress.buckets) else limits.initial_rps
    load = 1 + limits.headroom
    for stage in view.stages:
        name = targets.variant_of(stage, own.get(stage.name, limits.variant))
        belief = stage.variants[name]
        costs_ns = belief.costs_ns(cores)[1 : min(limits.batch_max, belief.batch_max) + 1]
        rate_rps = untold * stage.visits if untold else view.demand_rps[stage.name]
        parts = max(1, round_up(stage.visits))
        stages.append(Stage(stage.name, load * rate_rps, tuple(map(to_ms, costs_ns)), parts))
        variants.append(name)
    ways = targets.ways(view, limits.margin)
    lost = sorted(set(range(len(stages))) - {stage for way in ways for stage in way.stages})
    ways += tuple(Way((stage,), limits.margin * to_ms(view.stages[stage].slo_ns)) for stage in lost)
    ingress_rps = untold or view.forecast_rps
    return Problem(view, tuple(stages), ways, tuple(variants), cores, load * ingress_rps)
