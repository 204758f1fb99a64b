"""Scaling policies that plan equal replicas: `Fa2`, the planners of its evaluation, and `Fa2Single` for one model.

`Fa2`, `Ds2`, `Inferline` and `Grandslam` share `EqualReplicasProblem` and differ only in their solver
(`solver.py`). Each stage runs one variant with `cores` per replica; its rate is the stage's demand, its parts
are the visits of a request, rounded up. The paths and their deadlines are those of the view.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Final, Protocol

from msgspec import structs

from sloop.api import (
    NS_PER_MS,
    NS_PER_S,
    WIDE_ROUNDING,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Plan,
    PositiveFloat,
    PositiveInt,
    StagePlan,
    arrows,
    counted,
    round_up,
    s,
    to_ms,
)
from sloop.api.policies import Belief, ClusterView, Scale, equal_nodes, replicas_max, targets
from sloop.api.solvers import BudgetRule, IndexedPath
from sloop_systems.fa2 import solver
from sloop_systems.fa2.solver import (
    Fa2Choice,
    Fa2GaveUp,
    Fa2Infeasible,
    Fa2Mode,
    Fa2SingleChoice,
    Fa2Solution,
    Fa2Stage,
)


@dataclass(frozen=True, slots=True)
class EqualReplicasProblem:
    """A cluster view as input of `solver.py`: stages in topological order, every stage on a path."""

    view: ClusterView
    stages: tuple[Fa2Stage, ...]
    paths: tuple[IndexedPath, ...]
    beliefs: tuple[Belief, ...]
    cores: float
    ingress_rps: float
    replicas_max: float
    """How many replicas fit on the empty nodes; infinite if no node is known. If stages differ in what they need
    besides cores, those of the stage that needs least."""

    def plan(self, choices: Sequence[Fa2Choice], why: str, *, feasible: bool) -> Plan:
        """The choices as a plan."""
        return Plan(tuple(map(self._stage_plan, range(len(choices)), choices)), why, feasible)

    def checked_plan(self, choices: Sequence[Fa2Choice]) -> Plan:
        """The choices as a plan, feasible if every path keeps its deadline and the replicas fit on the nodes."""
        count = sum(choice.replicas for choice in choices)
        why = self.describe(choices)
        if count > self.replicas_max:
            why += f"; the nodes hold {counted(self.replicas_max, 'replica')}"
        feasible = solver.keeps_deadlines(choices, self.paths) and count <= self.replicas_max
        return self.plan(choices, why, feasible=feasible)

    def describe(self, choices: Sequence[Fa2Choice]) -> str:
        """`30 requests/s → 7 replicas of 1 core: detect 3 × batch 2, …; tightest: detect → read, 80 of 300 ms left`."""
        each = ", ".join(
            f"{stage.name} {choice.replicas} × batch {choice.batch}"
            for stage, choice in zip(self.stages, choices, strict=True)
        )
        count = sum(choice.replicas for choice in choices)
        path = solver.tightest(choices, self.paths)
        left_ms = path.slo_ms - solver.path_ms(choices, path)
        if left_ms > -WIDE_ROUNDING:
            fate = f"{left_ms:.4g} of {path.slo_ms:.4g} ms left"
        else:
            fate = f"{-left_ms:.4g} ms over its {path.slo_ms:.4g} ms"
        return (
            f"{self.ingress_rps:.4g} requests/s → {counted(count, 'replica')} of {counted(self.cores, 'core')}: "
            f"{each}; "
            f"tightest: {self._names(path)}, {fate}"
        )

    def plan_without_solution(self, failure: Fa2Infeasible | Fa2GaveUp) -> Plan:
        """The plan if the solver has no solution: DS2's replicas, without batches, if no plan can keep the deadlines.

        If the solver only gave up, the current plan stays.
        """
        otherwise = solver.ds2(self.stages)
        if isinstance(failure, Fa2Infeasible):
            why = f"{self._infeasibility(failure)}; {self.describe(otherwise)}"
            return self.plan(otherwise, why, feasible=False)
        why = f"the solver gave up after {failure.nodes} nodes"
        if self.view.plan is not None:
            return structs.replace(self.view.plan, why=f"{why}: kept as it was", feasible=False, gave_up=True, shed=0.0)
        found = self.plan(otherwise, f"{why}: {self.describe(otherwise)}", feasible=False)
        return structs.replace(found, gave_up=True)

    def plan_for_share(self, share: tuple[Fa2Solution, float] | None) -> Plan:
        """The plan for the share of the rate that fits on the nodes; one replica per stage if nothing fits."""
        most = counted(self.replicas_max, "replica")
        if share is None:
            ones = tuple(Fa2Choice(1, 1, stage.latency_ms[0], 0.0) for stage in self.stages)
            return self.plan(ones, f"{len(ones)} stages, and the nodes hold {most}: one each", feasible=False)
        solution, part = share
        why = f"the nodes hold {most}, enough for {part:.0%} of what comes; {self.describe(solution.choices)}"
        return self.plan(solution.choices, why, feasible=False)

    def _infeasibility(self, failure: Fa2Infeasible) -> str:
        """Text: which path is too slow, by how much, and which stage takes most of the time."""
        path, slowest = failure.path, self.stages[failure.slowest]
        return (
            f"{self._names(path)} takes {failure.least_ms:.4g} ms even one at a time, "
            f"{failure.least_ms - path.slo_ms:.4g} ms more than its {path.slo_ms:.4g} ms; "
            f"most of it {slowest.name}, {slowest.latency_ms[0]:.4g} ms"
        )

    def _names(self, path: IndexedPath) -> str:
        return arrows([self.stages[stage].name for stage in path.stages])

    def _stage_plan(self, index: int, choice: Fa2Choice) -> StagePlan:
        target = targets.equal_replicas(
            self.view.stages[index],
            self.beliefs[index],
            count=choice.replicas,
            cores=self.cores,
            batch_max=choice.batch,
        )
        return structs.replace(target, wait_ns=math.ceil(choice.wait_ms * NS_PER_MS))


class _Parameters(Protocol):
    """The parameters that the policies below share."""

    @property
    def cores(self) -> float: ...
    @property
    def headroom(self) -> float: ...
    @property
    def initial_rps(self) -> float: ...
    @property
    def variant(self) -> str: ...
    @property
    def hardware(self) -> str: ...


SOLUTIONS_KEPT: Final = 1_024
"""More than there are applications in one deployment."""


def equal_replicas_problem(
    view: ClusterView,
    own: _Parameters,
    batch_max: int,
    margin: float = 1.0,
    variants: Mapping[str, str] | None = None,
) -> EqualReplicasProblem:
    """The view as a problem, with deadlines multiplied by `margin`; `variants` overrides the policy's variant by stage.

    InputError for a stage, variant or kind of hardware that the application does not have.
    """
    view = targets.on_one_kind(view, own.hardware)
    by_stage = variants or {}
    targets.check_stages(view, by_stage, "variants")
    cores = min(own.cores, targets.node_cores_max(view))
    load = 1 + own.headroom
    expected_rps = 0.0 if any(bucket.arrivals for bucket in view.ingress.buckets) else own.initial_rps
    stages, chosen = [], []
    for stage in view.stages:
        belief = targets.belief_of(stage, targets.declared_for(stage, by_stage) or own.variant)
        costs_ns = belief.costs_ns(belief.slot(cores))[1 : min(batch_max, belief.batch_max) + 1]
        rate_rps = expected_rps * stage.visits if expected_rps else view.demand_rps[stage.name]
        stages.append(
            Fa2Stage(stage.name, load * rate_rps, tuple(map(to_ms, costs_ns)), max(1, round_up(stage.visits)))
        )
        chosen.append(belief)
    paths = targets.indexed_paths(view, margin)
    on_no_path = sorted(set(range(len(stages))) - {stage for path in paths for stage in path.stages})
    paths += tuple(IndexedPath((stage,), margin * to_ms(view.stages[stage].slo_ns)) for stage in on_no_path)
    groups = [(len(own), own[0].node) for own in equal_nodes(view.nodes).values()]
    most = [sum(count * replicas_max(node, each.slot(cores), each) for count, node in groups) for each in chosen]
    return EqualReplicasProblem(
        view=view,
        stages=tuple(stages),
        paths=paths,
        beliefs=tuple(chosen),
        cores=cores,
        ingress_rps=load * (expected_rps or view.forecast_rps),
        replicas_max=max(most) if groups else math.inf,
    )


@lru_cache(maxsize=SOLUTIONS_KEPT)
def _solution(
    stages: tuple[Fa2Stage, ...],
    paths: tuple[IndexedPath, ...],
    mode: Fa2Mode,
) -> Fa2Solution | Fa2Infeasible | Fa2GaveUp:
    """The solver's answer. Most rates are the same in the next decision, or in another application."""
    return solver.solve(stages, paths, mode=mode, polish=True)


def _fewest(problem: EqualReplicasProblem, mode: Fa2Mode = "tree") -> Plan:
    """FA2's plan: the fewest replicas that keep the deadlines; if they do not fit, those for the largest share of the
    rate that fits."""
    unnamed = tuple([replace(stage, name="") for stage in problem.stages])
    solution = _solution(unnamed, problem.paths, mode)
    if not isinstance(solution, Fa2Solution):
        return problem.plan_without_solution(solution)
    if solution.replicas > problem.replicas_max:
        rule: BudgetRule = "paper" if mode == "paper" else "tree"
        share = solver.largest_share(problem.stages, problem.paths, int(problem.replicas_max), mode=rule)
        return problem.plan_for_share(share)
    return problem.checked_plan(solution.choices)


@dataclass(frozen=True, slots=True)
class Fa2(Scale):
    """The fewest equal replicas of all stages such that every path keeps its deadline, planned every ten seconds.

    Razavi et al., FA2 (RTAS 2022; dissertation, TU Darmstadt 2024, chapter P1). If the replicas do not fit on the
    nodes, it plans for the largest share of the rate that fits; if a path is too slow even with batches of one, it
    plans without batches. Fails if the rate changes faster than a replica starts, and if slow stages run on one or two
    replicas: the model assumes evenly spaced arrivals, and its only reserve is the P99 in the profile and `headroom`.
    """

    cores: PositiveFloat = 1.0
    """Of each replica."""
    batch_max: PositiveInt = 16
    mode: Fa2Mode = "tree"
    """How deadlines are divided: by `tree`, exact on trees, by the rule of the `paper`, or with an integer program
    (`milp`)."""
    margin: Fraction = 1.0
    """Fraction of every deadline to plan with."""
    headroom: NonNegativeFloat = 0.0
    """Plan for the demand times 1 + `headroom`."""
    initial_rps: NonNegativeFloat = 0.0
    """The rate to expect at the ingress before any request has come."""
    variant: str = ""
    """Empty: the first variant of each stage."""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Overrides `variant` for single stages."""
    period_ns: PositiveInt = s(10)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        """The plan with the fewest replicas. InputError for an unknown stage or variant."""
        problem = equal_replicas_problem(view, self, self.batch_max, self.margin, self.variants)
        return _fewest(problem, self.mode), None


@dataclass(frozen=True, slots=True)
class Ds2(Scale):
    """As many replicas of every stage as its rate needs, n = ⌈λ d(1)⌉, without batches; ignores deadlines.

    Kalavri et al., Three steps is all you need (OSDI 2018), in the form of FA2's evaluation: the true processing rate
    of a replica is 1/d(1), and all stages are set at once. Fails in cost: without batches it needs more replicas, each
    of which must start first. Parameters as in `Fa2`.
    """

    is_quick: ClassVar[bool] = True
    cores: PositiveFloat = 1.0
    headroom: NonNegativeFloat = 0.0
    initial_rps: NonNegativeFloat = 0.0
    variant: str = ""
    hardware: str = ""
    period_ns: PositiveInt = s(10)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        """InputError for a variant that some stage does not have."""
        problem = equal_replicas_problem(view, self, 1)
        return problem.checked_plan(solver.ds2(problem.stages)), None


@dataclass(frozen=True, slots=True)
class Inferline(Scale):
    """Greedy: starts with batches of 1; then each stage in turn grows its batch as far as the deadlines allow.

    Crankshaw et al., InferLine (SoCC 2020), with one kind of hardware, in the form of FA2's evaluation. Fails if early
    stages use the time with which later, more expensive stages would save more. Parameters as in `Fa2`.
    """

    cores: PositiveFloat = 1.0
    batch_max: PositiveInt = 16
    headroom: NonNegativeFloat = 0.0
    initial_rps: NonNegativeFloat = 0.0
    variant: str = ""
    hardware: str = ""
    period_ns: PositiveInt = s(10)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        """InputError for a variant that some stage does not have."""
        problem = equal_replicas_problem(view, self, self.batch_max)
        return problem.checked_plan(solver.inferline(problem.stages, problem.paths)), None


@dataclass(frozen=True, slots=True)
class Grandslam(Scale):
    """Every stage has a fixed share of the deadline, and the largest batch that fits into it.

    Kannan et al., GrandSLAm (EuroSys 2019), in the form of FA2's evaluation: it does not choose numbers of replicas, so
    it gets FA2's. Fails at low rates, where its batches take long to fill; and other stages cannot use the part of a
    share that one stage does not need. Parameters as in `Fa2`.
    """

    cores: PositiveFloat = 1.0
    batch_max: PositiveInt = 16
    headroom: NonNegativeFloat = 0.0
    initial_rps: NonNegativeFloat = 0.0
    variant: str = ""
    hardware: str = ""
    period_ns: PositiveInt = s(10)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        """InputError for a variant that some stage does not have."""
        problem = equal_replicas_problem(view, self, self.batch_max)
        pools = _fewest(problem)
        counts = {target.stage: sum(group.count for group in target.groups) for target in pools.stages}
        replicas = [counts[stage.name] for stage in problem.stages]
        return problem.checked_plan(solver.grandslam(problem.stages, problem.paths, replicas)), None


@dataclass(frozen=True, slots=True)
class Fa2Single(Scale):
    """FA2's rule for one model: as many small equal replicas as the tightest budget of the last second needs.

    The horizontal baseline of Sponge (EuroMLSys 2024, evaluation, with the rule of its artefact). Scale-in takes effect
    at once, scale-out after the cold start; if no number suffices, nothing changes. Fails when the network slows down
    for some seconds: new replicas are ready when it is over, and each change costs a cold start; `hysteresis` shows how
    much of its poor result comes from that.
    """

    is_quick: ClassVar[bool] = True
    cores: PositiveFloat = 1.0
    """Of each replica."""
    replicas_max: PositiveInt = 16
    initial: NonNegativeInt = 1
    """Replicas before any request has come."""
    batch_max: PositiveInt = 8
    margin: Fraction = 0.9
    """Fraction of the SLO to plan with."""
    hysteresis: PositiveInt = 1
    """k: the largest of the last k decisions is used."""
    variant: str = ""
    hardware: str = ""
    period_ns: PositiveInt = s(1)

    def plan(
        self, now_ns: int, view: ClusterView, memory: tuple[Fa2SingleChoice, ...] | None
    ) -> tuple[Plan, tuple[Fa2SingleChoice, ...] | None]:
        """The rule's plan, or the current one if no number suffices. InputError for an application of several
        stages."""
        view = targets.on_one_kind(view, self.hardware)
        stage = targets.one_stage(view, "fa2-single")
        belief = targets.belief_of(stage, self.variant)

        def planned(count: int, batch_max: int, why: str) -> Plan:
            target = targets.equal_replicas(stage, belief, count=count, cores=self.cores, batch_max=batch_max)
            return Plan((target,), why)

        if not stage.buckets:
            return planned(self.initial, 1, f"nothing seen yet → {counted(self.initial, 'replica')}"), memory
        slack_ns = [slack for bucket in stage.window(NS_PER_S) for slack in bucket.slack_ns]
        rate_rps, slo_ms = view.demand_rps[stage.name], to_ms(stage.slo_ns)
        network_ms = max(0.0, to_ms(stage.slo_ns - min(slack_ns, default=stage.slo_ns)))
        costs_ns = belief.costs_ns(belief.slot(self.cores))[1 : min(self.batch_max, belief.batch_max) + 1]
        limit_ms = self.margin * slo_ms
        choice = solver.fa2_single(
            [to_ms(cost_ns) for cost_ns in costs_ns],
            rate_rps,
            network_ms_max=network_ms,
            limit_ms=limit_ms,
            slo_ms=slo_ms,
            replicas_max=self.replicas_max,
        )
        seen = f"{rate_rps:.4g} requests/s, tightest budget {slo_ms - network_ms:.0f} ms"
        if choice is None:
            why = f"{seen}: no count up to {self.replicas_max} holds; kept as it was"
            plan = Plan(view.plan.stages, why, feasible=False) if view.plan else planned(self.initial, 1, why)
            return plan, memory
        kept, recent = targets.largest(memory or (), choice, self.hysteresis, lambda one: one.replicas)
        own, rounds = f"{kept.latency_ms:.4g} ms", f"{kept.rounds} × {kept.latency_ms:.4g} ms"
        why = f"{seen} → {counted(kept.replicas, 'replica')}, batch {kept.batch}: {own} + {rounds}"
        why += f" + {network_ms:.0f} ms of network < {limit_ms:.0f} ms"
        return planned(kept.replicas, kept.batch, why), recent
