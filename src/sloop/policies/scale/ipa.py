"""The scaling policy `Ipa`: variants, batches and replicas of all stages, for the accuracy that is worth its cores.

Razavi, dissertation (TU Darmstadt 2024), chapter P3 (Ghafouri et al., IPA, 2023): every ten seconds the choice that
maximises α · accuracy - β · cores - δ · Σ batches, within every deadline and in step with the forecast at every stage.
Cores per replica are fixed for each variant beforehand: given in `stages`, or the fewest of 1, 2, 4, … units that carry
`threshold_rps` and keep the stage's share of the deadline. With variants fixed (`only`, or in `stages`) it is FA2-low
and FA2-high of the publication's comparison, with `replicas` fixed RIM.

On a graph with branches, accuracy is that of all stages together, which is at most that of any path. The policy fails
where accuracy is not worth a switch: every change of variant starts replicas, and a forecast around a step of the
objective makes it alternate (`hysteresis`). After a backlog, replicas for just the rate never work it off: leave
`headroom`, or drop requests older than their SLO. Before any request it plans for `initial_rps`, or the cheapest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Literal

from msgspec import Struct, structs

from sloop.core.views import Belief, ClusterView, StageView
from sloop.errors import InputError
from sloop.options import check_range
from sloop.policies import targets
from sloop.quantities import ROUNDING
from sloop.solvers import highs, ipa_milp, label_setting
from sloop.solvers.ipa import (
    Candidate,
    IpaGoal,
    IpaOption,
    IpaSolution,
    IpaStage,
    Measure,
    VariantSizes,
    base_allocation,
    fraction,
    options_of,
    quickest_cores,
    scores,
)
from sloop.solvers.label_setting import LabelSettingResult
from sloop.solvers.queueing import fill_ms, patience_ns, replicas_needed
from sloop.text import chain, counted
from sloop.units import s, to_ms
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan

UNITS: Final = (1, 2, 4, 8, 16, 32)
"""Cores per replica that base allocation chooses from, in units."""

Only = Literal["any", "lightest", "heaviest"]
"""Which variants of a stage may run, by the core-milliseconds of one request."""


class IpaStageTerms(Struct, frozen=True, forbid_unknown_fields=True):
    """What is given for one stage where it differs from the others."""

    variant: str = ""
    """The only variant that may run."""
    cores: Mapping[str, float] = {}
    """Cores per replica by variant; the others follow from base allocation."""
    threshold_rps: float | None = None
    slo_ms: float | None = None
    """What the largest batch may take, for base allocation only."""
    replicas: int | None = None

    def __post_init__(self) -> None:
        for key, value in (("threshold_rps", self.threshold_rps), ("slo_ms", self.slo_ms)):
            if value is not None:
                check_range(key, value, above=0)
        for variant, cores in self.cores.items():
            check_range(f"cores.{variant}", cores, above=0)
        if self.replicas is not None:
            check_range("replicas", self.replicas, least=1)


@dataclass(frozen=True, slots=True)
class VariantOnCores:
    """A variant that may run, its cores per replica, and its contribution to accuracy."""

    variant: str
    cores: float
    score: float


VariantsByStage = Mapping[str, tuple[VariantOnCores, ...]]
"""The variants that may run at each stage, in the order in which they are declared."""


@dataclass(slots=True)
class IpaMemory:
    """State between decisions. The variants and their cores are settled once, at the first."""

    variants: VariantsByStage = field(default_factory=dict)
    next_ns: int = 0
    """When to decide next."""
    wanted: int = 0
    """Decisions in a row that prefer other variants than those in force."""


@dataclass(frozen=True, slots=True)
class Ipa:
    """The best choice at `headroom` above the forecast, every `interval_ns` from the first requests on."""

    alpha: float = 10.0
    beta: float = 0.5
    delta: float = 1e-6
    accuracy: Measure = "pas"
    only: Only = "any"
    unit: float = 1.0
    """Cores of a unit, for base allocation."""
    threshold_rps: float = 5.0
    """What a replica must serve one request at a time, for base allocation."""
    batch_max: int = 8
    replicas: int = 0
    """Of every stage; 0: as many as needed."""
    replicas_max: int = 100
    load_max: float = 1.0
    """Fraction of its believed throughput that a replica is planned for."""
    margin: float = 1.0
    """Fraction of every deadline to plan with."""
    headroom: float = 0.0
    capped: bool = True
    """Whether all stages together must fit into the cluster's cores."""
    infeasible: Literal["degrade", "hold"] = "degrade"
    """Where nothing is feasible: the least latency, then a part of the rate; or the plan in force."""
    hysteresis: int = 1
    """Decisions in a row that must prefer other variants before they are started."""
    solver: Literal["labels", "milp"] = "labels"
    """Label setting, or an integer program by HiGHS."""
    initial_rps: float = 0.0
    stages: Mapping[str, IpaStageTerms] = field(default_factory=dict)
    interval_ns: int = s(10)
    period_ns: int = s(1)
    _memory: IpaMemory = field(init=False, default_factory=IpaMemory, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("alpha", "beta", "delta", "replicas", "initial_rps"):
            check_range(key, getattr(self, key), least=0)
        for key in ("unit", "threshold_rps", "interval_ns", "period_ns"):
            check_range(key, getattr(self, key), above=0)
        for key in ("batch_max", "replicas_max", "hysteresis"):
            check_range(key, getattr(self, key), least=1)
        for key in ("load_max", "margin"):
            check_range(key, getattr(self, key), above=0, most=1)
        check_range("headroom", self.headroom, above=-1)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The best plan, or what `infeasible` says; None between decisions. InputError as in `variants_by_stage`."""
        if self.solver == "milp":
            highs.load()  # before the first request, because the import takes half a second
        if now_ns < self._memory.next_ns:
            return None
        if view.ingress.buckets or self.initial_rps:
            self._memory.next_ns = now_ns + self.interval_ns
        self._memory.variants = self._memory.variants or variants_by_stage(view, self)
        problem = self._problem(view)
        found = self._settled(problem)
        if found.solution is None:
            return self._gave_up(problem) if found.gave_up else self._infeasible(problem)
        why = f"{problem.rate} → {problem.describe(found.solution)}"
        return Plan(problem.stage_plans(found.solution.options), why)

    def _problem(self, view: ClusterView) -> "IpaProblem":
        has_seen = bool(view.ingress.buckets)
        demand_rps, forecast_rps, alpha = view.demand_rps, view.forecast_rps, self.alpha
        if not has_seen:
            forecast_rps = self.initial_rps
            demand_rps = {stage.name: forecast_rps * stage.visits for stage in view.stages}
        rate = f"{forecast_rps * (1 + self.headroom):.4g} requests/s"
        if not has_seen and not self.initial_rps:
            rate, alpha = "nothing seen yet", 0.0
        variants = self._memory.variants
        stages = tuple(
            ipa_stage(stage, variants[stage.name], self, demand_rps[stage.name] * (1 + self.headroom))
            for stage in view.stages
        )
        goal = IpaGoal(
            slo_ms=0.0,
            alpha=alpha,
            beta=self.beta,
            delta=self.delta,
            summed=self.accuracy == "pas_rank",
            replicas_max=self.replicas_max,
            cores_max=sum(node.node.cores for node in view.nodes) if self.capped and view.nodes else inf,
            paths=targets.indexed_paths(view, self.margin),
        )
        return IpaProblem(view, variants, stages, goal, rate)

    def _solved(self, stages: Sequence[IpaStage], goal: IpaGoal) -> LabelSettingResult:
        found = ipa_milp.solve(stages, goal) if self.solver == "milp" else None
        # No solution from HiGHS may mean that it reached its node limit; label setting tells that from infeasible.
        return LabelSettingResult(found) if found else label_setting.solve(stages, goal)

    def _settled(self, problem: "IpaProblem") -> LabelSettingResult:
        """The best solution, with the variants in force until others were better `hysteresis` times in a row."""
        memory, found = self._memory, self._solved(problem.stages, problem.goal)
        best, running = found.solution, problem.variants_in_force()
        if best is None or running is None or tuple(option.candidate for option in best.options) == running:
            memory.wanted = 0
            return found
        memory.wanted += 1
        if memory.wanted >= self.hysteresis:
            memory.wanted = 0
            return found
        restricted = [
            replace(own, candidates=(own.candidates[index],))
            for own, index in zip(problem.stages, running, strict=True)
        ]
        kept = self._solved(restricted, problem.goal).solution
        if kept is None:
            return found
        options = tuple(replace(o, candidate=index) for o, index in zip(kept.options, running, strict=True))
        return LabelSettingResult(replace(kept, options=options))

    def _gave_up(self, problem: "IpaProblem") -> Plan:
        """A solution may exist but was not found: the plan in force, if there is one."""
        why = f"{problem.rate}: the solver gave up with nothing found"
        if problem.view.plan is not None:
            return structs.replace(problem.view.plan, why=f"{why}; kept as it was", feasible=False, gave_up=True)
        return structs.replace(problem.best_effort(why), gave_up=True)

    def _infeasible(self, problem: "IpaProblem") -> Plan:
        why = f"{problem.rate}: {problem.infeasibility()}"
        if self.infeasible == "hold" and problem.view.plan is not None:
            return structs.replace(problem.view.plan, why=f"{why}; kept as it was", feasible=False, gave_up=False)
        return problem.best_effort(why)


@dataclass(frozen=True, slots=True)
class IpaProblem:
    """A view as IPA's problem, plans made from its solutions, and reasons. `rate` is the rate planned for, as text."""

    view: ClusterView
    variants: VariantsByStage
    stages: tuple[IpaStage, ...]
    goal: IpaGoal
    rate: str

    def stage_plans(self, options: Sequence[IpaOption]) -> tuple[StagePlan, ...]:
        """Equal replicas for each stage."""
        made = []
        for stage, own, option in zip(self.view.stages, self.stages, options, strict=True):
            chosen = self.variants[stage.name][option.candidate]
            group = Group(ReplicaSpec(stage.name, chosen.variant, chosen.cores), option.replicas)
            wait_ns = patience_ns(fill_ms(option.batch, own.rate_rps), stage.slo_ns)
            made.append(StagePlan(stage.name, (group,), option.batch, in_place=False, wait_ns=wait_ns))
        return tuple(made)

    def variants_in_force(self) -> tuple[int, ...] | None:
        """The candidate that the plan in force runs at each stage; None if it has not exactly one everywhere."""
        plan = self.view.plan
        if plan is None or [target.stage for target in plan.stages] != [stage.name for stage in self.view.stages]:
            return None
        running = []
        for target in plan.stages:
            names = [known.variant for known in self.variants[target.stage]]
            if len(target.groups) != 1 or target.groups[0].spec.variant not in names:
                return None
            running.append(names.index(target.groups[0].spec.variant))
        return tuple(running)

    def describe(self, solution: IpaSolution) -> str:
        """`a 2 × small, batch 4; …: 3 cores, 80 of 100 ms`, the latency that of the path with the least time left."""
        parts = []
        for stage, option in zip(self.view.stages, solution.options, strict=True):
            variant = self.variants[stage.name][option.candidate].variant
            parts.append(f"{stage.name} {option.replicas} × {variant}, batch {option.batch}")
        paths = self.goal.paths
        needed = [(path.slo_ms, sum(solution.options[stage].latency_ms for stage in path.stages)) for path in paths]
        slo_ms, latency_ms = min(needed, key=lambda pair: pair[0] - pair[1])
        text = f"{'; '.join(parts)}: {counted(solution.cores, 'core')}, {latency_ms:.4g} of {slo_ms:.4g} ms"
        return f"{text}; at most {solution.gap:.3g} from the best" if solution.gap else text

    def infeasibility(self) -> str:
        """Which stage cannot keep up, which path is too slow, or how many cores are missing."""
        names, goal = [stage.name for stage in self.view.stages], self.goal
        every = [options_of(stage, goal.replicas_max) for stage in self.stages]
        for stage, name, options in zip(self.stages, names, every, strict=True):
            if not options:
                return _cannot_keep_up(stage, name, goal)
        least_ms = [min(option.latency_ms for option in options) for options in every]
        for path in goal.paths:
            needed_ms = sum(least_ms[stage] for stage in path.stages)
            if needed_ms > path.slo_ms:
                slowest = max(path.stages, key=least_ms.__getitem__)
                excess = f"{needed_ms:.4g} ms, {needed_ms - path.slo_ms:.3g} ms more than there are"
                on_path = chain([names[stage] for stage in path.stages])
                return f"{on_path} takes at least {excess}; {names[slowest]} alone {least_ms[slowest]:.4g} ms"
        fewest_cores = replace(goal, alpha=0.0, beta=1.0, delta=0.0, cores_max=inf)
        cheapest = label_setting.solve(self.stages, fewest_cores).solution
        if cheapest is None:
            return "no choice keeps all paths in time at once"
        cores = counted(cheapest.cores - cheapest.gap, "core")
        most = max(range(len(names)), key=lambda stage: cheapest.options[stage].cores)
        share = counted(cheapest.options[most].cores, "core")
        return f"at least {cores} are needed where there are {goal.cores_max:g}; {share} of them for {names[most]}"

    def best_effort(self, why: str) -> Plan:
        """The plan of `label_setting.best_effort`."""
        effort = label_setting.best_effort(self.stages, self.goal)
        fate = "the least latency there is" if effort.share == 1.0 else f"enough for {effort.share:.0%} of it"
        return Plan(self.stage_plans(effort.options), f"{why} → {fate}", feasible=False)


def _cannot_keep_up(stage: IpaStage, name: str, goal: IpaGoal) -> str:
    most = stage.replicas or goal.replicas_max
    needed = min(
        replicas_needed(stage.rate_rps, batch, (own.busy_ms or own.latency_ms)[place])
        for own in stage.candidates
        for place, batch in enumerate(stage.batches)
        if own.latency_ms[place] < inf
    )
    rate = f"{stage.rate_rps:.4g} requests/s"
    return f"{name} cannot keep up with {rate}: it needs {needed} replicas where {most} are the most"


def ipa_stage(stage: StageView, variants: Sequence[VariantOnCores], policy: Ipa, rate_rps: float) -> IpaStage:
    """A stage with its variants as candidates, and batches in powers of two that at least one profile knows."""
    most = min(policy.batch_max, max(stage.variants[own.variant].batch_max for own in variants))
    batches = tuple(1 << power for power in range(most.bit_length()))
    candidates = []
    for own in variants:
        costs_ns = stage.variants[own.variant].costs_ns(own.cores)
        latency_ms = tuple(to_ms(costs_ns[batch]) if batch < len(costs_ns) else inf for batch in batches)
        busy_ms = () if policy.load_max == 1.0 else tuple(taken_ms / policy.load_max for taken_ms in latency_ms)
        candidates.append(Candidate(own.score, own.cores, latency_ms, busy_ms))
    return IpaStage(rate_rps, batches, tuple(candidates), _terms(policy, stage).replicas or policy.replicas)


def variants_by_stage(view: ClusterView, policy: Ipa) -> VariantsByStage:
    """Which variants may run at each stage, on how many cores.

    InputError for a stage or variant that does not exist, and for a variant without an accuracy where it would have to
    be weighed against another's.
    """
    names = [stage.name for stage in view.stages]
    unknown = policy.stages.keys() - set(names)
    if unknown:
        message = f"system ipa: no stage {min(unknown)!r}"
        raise InputError(message, help=f"the application's stages are {', '.join(names)}")
    limits_ms = _stage_limits_ms(view, policy)
    return {stage.name: _variants(view, stage, policy, limits_ms[stage.name]) for stage in view.stages}


def _terms(policy: Ipa, stage: StageView) -> IpaStageTerms:
    return policy.stages.get(stage.name, IpaStageTerms())


def _variants(view: ClusterView, stage: StageView, policy: Ipa, slo_ms: float) -> tuple[VariantOnCores, ...]:
    own = _terms(policy, stage)
    if not own.variant and policy.only == "any" and len(stage.variants) > 1:
        for variant in stage.variants:  # also those that base allocation leaves out: the file is wrong either way
            _accuracy(stage, variant)
    cores = _cores(view, stage, policy, slo_ms)
    weight = {v: count * stage.variants[v].latency_ms(1, count) for v, count in cores.items()}
    if own.variant:
        allowed = [targets.variant_of(stage, own.variant)]
    elif policy.only == "any":
        allowed = list(cores)
    else:
        allowed = [(min if policy.only == "lightest" else max)(cores, key=weight.__getitem__)]
    if len(allowed) == 1:
        known = stage.variants[allowed[0]].accuracy
        return (VariantOnCores(allowed[0], cores[allowed[0]], 1.0 if known is None else fraction(known)),)
    accuracies = [_accuracy(stage, variant) for variant in allowed]
    found = scores(policy.accuracy, accuracies, [cores[variant] for variant in allowed], allowed)
    return tuple(VariantOnCores(v, cores[v], score) for v, score in zip(allowed, found, strict=True))


def _accuracy(stage: StageView, variant: str) -> float:
    accuracy = stage.variants[variant].accuracy
    if accuracy is None:
        raise InputError(
            f"stage {stage.name}: variant {variant!r} has no accuracy, which system ipa weighs against cores",
            help=f"write `accuracy:` beside {variant!r}, or allow one variant only: "
            f"`stages: {{{stage.name}: {{variant: {variant}}}}}`",
        )
    return fraction(accuracy)


def _cores(view: ClusterView, stage: StageView, policy: Ipa, slo_ms: float) -> dict[str, float]:
    """Cores per replica of each variant, in the order declared, without those that base allocation leaves out.

    Where no variant keeps the stage's limit with its largest batch, those that keep it one request at a time; where
    none does, which need not make the path infeasible, the lightest on its quickest cores.
    """
    own = _terms(policy, stage)
    sizes = {variant: _sizes(view, belief, policy.unit) for variant, belief in stage.variants.items()}
    threshold_rps = own.threshold_rps or policy.threshold_rps
    wanted = targets.variant_of(stage, own.variant) if own.variant else ""
    # Least accurate first, as `base_allocation` expects; quickest first where accuracy is not known.
    order = sorted(sizes, key=lambda variant: (stage.variants[variant].accuracy or 0.0, _one_ms(sizes[variant])))
    known: dict[str, float] = {}
    for batch_max in (policy.batch_max, 1):
        variants = [sizes[variant] for variant in order]
        found = base_allocation(variants, threshold_rps=threshold_rps, batch_max=batch_max, slo_ms=slo_ms)
        for variant, count in zip(order, found.cores, strict=True):
            if count is not None:
                known.setdefault(variant, count)
        known |= own.cores
        if wanted in known or (known and not wanted):
            break
    else:
        lightest = wanted or min(order, key=lambda variant: _one_ms(sizes[variant]))
        known[lightest] = quickest_cores(sizes[lightest])
    for variant in known:
        targets.variant_of(stage, variant)
    return {variant: known[variant] for variant in stage.variants if variant in known}


def _one_ms(sizes: VariantSizes) -> float:
    """Latency of one request on the fewest cores."""
    return sizes.latency_ms(1, sizes.choices[0])


def _sizes(view: ClusterView, belief: Belief, unit: float) -> VariantSizes:
    """Cores to choose from: 1, 2, 4, … units up to what the variant gains from and the largest node has.

    A node with less than a unit gives all it has. Batches above the profile's largest are taken to last as long as it.
    """

    def latency_ms(batch: int, cores: float) -> float:
        return belief.latency_ms(min(batch, belief.batch_max), cores)

    most = targets.node_cores_max(view)
    choices = [unit * count for count in UNITS if unit * count <= most + ROUNDING] or [most]
    return VariantSizes(latency_ms, [cores for cores in choices if cores <= belief.cores_max + ROUNDING] or choices[:1])


def _stage_limits_ms(view: ClusterView, policy: Ipa) -> dict[str, float]:
    """What a batch of each stage may take: as given, or the smallest of its shares of its paths' deadlines.

    Shares are in proportion to the deadlines that base allocation derives for the stages by themselves.
    """
    derived = {}
    for stage in view.stages:
        own = _terms(policy, stage)
        derived[stage.name] = (
            own.slo_ms
            or base_allocation(
                [_sizes(view, belief, policy.unit) for belief in stage.variants.values()],
                threshold_rps=own.threshold_rps or policy.threshold_rps,
                batch_max=policy.batch_max,
            ).slo_ms
        )
    factor = dict.fromkeys(derived, inf)
    for path in view.paths:
        own_factor = to_ms(path.slo_ns) / sum(derived[name] for name in path.stages)
        for name in path.stages:
            factor[name] = min(factor[name], own_factor)
    return {s.name: _terms(policy, s).slo_ms or derived[s.name] * factor[s.name] for s in view.stages}
