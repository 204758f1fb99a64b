"""The scaling policy `Ipa`: chooses variants, batches and replicas of all stages, trading accuracy for cores.

Razavi, dissertation (TU Darmstadt 2024), chapter P3 (Ghafouri et al., IPA, 2023): every ten seconds it maximises
α · accuracy - β · cores - δ · Σ batches, subject to every deadline and to the forecast rate of every stage. The cores
per replica of each variant are fixed: given in `stages`, or the fewest of 1, 2, 4, … units that carry `threshold_rps`
and keep the stage's share of the deadline. With fixed variants (`only`, or in `stages`) it is FA2-low and FA2-high of
the publication's comparison, with fixed `replicas` RIM.

On a graph with branches, accuracy is that of all stages together, which is at most that of any path. The policy fails
if accuracy is not worth a switch: every change of variant starts replicas, and a forecast near a step of the objective
makes it alternate (`hysteresis`). Replicas sized for the rate alone never reduce a backlog: set `headroom`, or drop
requests older than their SLO. Before the first request it plans for `initial_rps`, or if that is 0, the cheapest plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, ClassVar, Final, Literal

from msgspec import Struct, structs

from sloop.api import (
    ROUNDING,
    Fraction,
    Group,
    InputError,
    NonNegativeFloat,
    NonNegativeInt,
    Plan,
    PositiveFloat,
    PositiveInt,
    Range,
    ReplicaSpec,
    StagePlan,
    arrows,
    counted,
    s,
    to_ms,
)
from sloop.api.policies import Belief, ClusterView, Scale, StageView, targets
from sloop.api.solvers import fill_ms, patience_ns, replicas_needed
from sloop_systems.ipa import label_setting
from sloop_systems.ipa.label_setting import LabelSettingResult
from sloop_systems.ipa.solver import (
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

UNITS: Final = (1, 2, 4, 8, 16, 32)
"""Cores per replica that base allocation chooses from, in units."""

Only = Literal["any", "lightest", "heaviest"]
"""Which variants of a stage may run, by the core-milliseconds of one request."""


class IpaStageTerms(Struct, frozen=True, forbid_unknown_fields=True):
    """Values for one stage that override those for all stages."""

    variant: str = ""
    """The only variant that may run."""
    cores: Mapping[str, PositiveFloat] = {}
    """Cores per replica by variant; base allocation computes the missing ones."""
    threshold_rps: PositiveFloat | None = None
    slo_ms: PositiveFloat | None = None
    """The longest time of the largest batch, for base allocation only."""
    replicas: PositiveInt | None = None


@dataclass(frozen=True, slots=True)
class VariantOnCores:
    """A variant that may run, its cores per replica, and its contribution to accuracy."""

    variant: str
    cores: float
    score: float


VariantsByStage = Mapping[str, tuple[VariantOnCores, ...]]
"""The variants that may run at each stage, in order of declaration."""


@dataclass(frozen=True, slots=True)
class IpaMemory:
    """State between decisions. The first decision fixes the variants and their cores."""

    variants: tuple[tuple[str, tuple[VariantOnCores, ...]], ...] = ()
    """By stage."""
    next_ns: int = 0
    """When to decide next."""
    wanted: int = 0
    """Decisions in a row that prefer other variants than the current ones."""


@dataclass(frozen=True, slots=True)
class Ipa(Scale):
    """The best choice at `headroom` above the forecast, every `interval_ns` from the first requests on."""

    resizes: ClassVar[bool] = False
    alpha: NonNegativeFloat = 10.0
    """Weight of accuracy in the objective."""
    beta: NonNegativeFloat = 0.5
    """Weight of a core in the objective."""
    delta: NonNegativeFloat = 1e-6
    """Weight of a batch in the objective; breaks ties."""
    accuracy: Measure = "pas"
    """`pas`: the product of the accuracies of all stages. `pas_rank`: the sum of their ranks. `norm_prod`: the product
    of ranks lifted off zero."""
    only: Only = "any"
    """Which variants may run, by the core time of a request: `any`, or the `lightest` or `heaviest` of each stage."""
    unit: PositiveFloat = 1.0
    """Cores of a unit, for base allocation."""
    threshold_rps: PositiveFloat = 5.0
    """The rate that a replica must serve with batches of one, for base allocation."""
    batch_max: PositiveInt = 8
    replicas: NonNegativeInt = 0
    """A fixed number of replicas for every stage; 0: as many as needed."""
    replicas_max: PositiveInt = 100
    load_max: Fraction = 1.0
    """Fraction of its believed throughput that a replica is planned for."""
    margin: Fraction = 1.0
    """Fraction of every deadline to plan with."""
    headroom: Annotated[float, Range(above=-1)] = 0.0
    capped: bool = True
    """Whether all stages together must fit into the cluster's cores."""
    infeasible: Literal["degrade", "hold"] = "degrade"
    """The plan if nothing is feasible. `degrade`: the least latency, else a part of the rate; `hold`: the current
    one."""
    hysteresis: PositiveInt = 1
    """How many decisions in a row must prefer other variants before they start."""
    initial_rps: NonNegativeFloat = 0.0
    stages: Mapping[str, IpaStageTerms] = field(default_factory=dict)
    """Overrides for single stages: `variant`, `cores` by variant, `threshold_rps`, `slo_ms` and `replicas`."""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    interval_ns: PositiveInt = s(10)
    """How often it chooses anew."""
    period_ns: PositiveInt = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: IpaMemory | None) -> tuple[Plan | None, IpaMemory]:
        """The best plan, or the one that `infeasible` selects; None between decisions. InputError as in
        `variants_by_stage`."""
        view, memory = targets.on_one_kind(view, self.hardware), memory or IpaMemory()
        if now_ns < memory.next_ns:
            return None, memory
        next_ns = now_ns + self.interval_ns if view.ingress.buckets or self.initial_rps else memory.next_ns
        variants = memory.variants or tuple(variants_by_stage(view, self).items())
        problem = self._problem(view, dict(variants))
        found, wanted = self._settled(problem, memory.wanted)
        memory = IpaMemory(variants, next_ns, wanted)
        if found.solution is None:
            return self._gave_up(problem) if found.gave_up else self._infeasible(problem), memory
        why = f"{problem.rate} → {problem.describe(found.solution)}"
        return Plan(problem.stage_plans(found.solution.options), why), memory

    def _problem(self, view: ClusterView, variants: VariantsByStage) -> "IpaProblem":
        has_seen = bool(view.ingress.buckets)
        demand_rps, forecast_rps, alpha = view.demand_rps, view.forecast_rps, self.alpha
        if not has_seen:
            forecast_rps = self.initial_rps
            demand_rps = {stage.name: forecast_rps * stage.visits for stage in view.stages}
        rate = f"{forecast_rps * (1 + self.headroom):.4g} requests/s"
        if not has_seen and not self.initial_rps:
            rate, alpha = "nothing seen yet", 0.0
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

    def _settled(self, problem: "IpaProblem", wanted: int) -> tuple[LabelSettingResult, int]:
        """The best solution, but with the current variants until others were better `hysteresis` times in a row; and
        how many times in a row they were, which is given as `wanted` the next time."""
        found = label_setting.solve(problem.stages, problem.goal)
        best, running = found.solution, problem.variants_in_force()
        if best is None or running is None or tuple(option.candidate for option in best.options) == running:
            return found, 0
        wanted += 1
        if wanted >= self.hysteresis:
            return found, 0
        restricted = [
            replace(own, candidates=(own.candidates[index],))
            for own, index in zip(problem.stages, running, strict=True)
        ]
        kept = label_setting.solve(restricted, problem.goal).solution
        if kept is None:
            return found, wanted
        options = tuple(replace(o, candidate=index) for o, index in zip(kept.options, running, strict=True))
        return LabelSettingResult(replace(kept, options=options)), wanted

    def _gave_up(self, problem: "IpaProblem") -> Plan:
        """The plan if the solver found no solution although one may exist: the current plan, if there is one."""
        why = f"{problem.rate}: the solver gave up with nothing found"
        if problem.view.plan is not None:
            return structs.replace(
                problem.view.plan, why=f"{why}; kept as it was", feasible=False, gave_up=True, shed=0.0
            )
        return structs.replace(problem.best_effort(why), gave_up=True)

    def _infeasible(self, problem: "IpaProblem") -> Plan:
        why = f"{problem.rate}: {problem.infeasibility()}"
        if self.infeasible == "hold" and problem.view.plan is not None:
            return structs.replace(
                problem.view.plan, why=f"{why}; kept as it was", feasible=False, gave_up=False, shed=0.0
            )
        return problem.best_effort(why)


@dataclass(frozen=True, slots=True)
class IpaProblem:
    """A view as IPA's problem; turns solutions into plans and reasons. `rate` is the planned rate as text."""

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
            slot = targets.belief_of(stage, chosen.variant).slot(chosen.cores)
            group = Group(ReplicaSpec(stage.name, chosen.variant, slot), option.replicas)
            wait_ns = patience_ns(fill_ms(option.batch, own.rate_rps), stage.slo_ns)
            made.append(StagePlan(stage.name, (group,), option.batch, in_place=False, wait_ns=wait_ns))
        return tuple(made)

    def variants_in_force(self) -> tuple[int, ...] | None:
        """The candidate that the current plan runs at each stage; None if a stage has none or several."""
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
        """Text: `a 2 × small, batch 4; …: 3 cores, 80 of 100 ms`, with the latency of the path with the least slack."""
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
        """Text: which stage cannot keep up, which path is too slow, or how many cores are missing."""
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
                on_path = arrows([names[stage] for stage in path.stages])
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
    """A stage with its variants as candidates. Its batches are the powers of two that at least one profile covers."""
    known = targets.by_variant(stage)
    most = min(policy.batch_max, max(known[own.variant].batch_max for own in variants))
    batches = tuple(1 << power for power in range(most.bit_length()))
    candidates = []
    for own in variants:
        belief = known[own.variant]
        costs_ns = belief.costs_ns(belief.slot(own.cores))
        latency_ms = tuple(to_ms(costs_ns[batch]) if batch < len(costs_ns) else inf for batch in batches)
        busy_ms = () if policy.load_max == 1.0 else tuple(taken_ms / policy.load_max for taken_ms in latency_ms)
        candidates.append(Candidate(own.score, own.cores, latency_ms, busy_ms))
    return IpaStage(rate_rps, batches, tuple(candidates), _terms(policy, stage).replicas or policy.replicas)


def variants_by_stage(view: ClusterView, policy: Ipa) -> VariantsByStage:
    """Which variants may run at each stage, with how many cores.

    InputError for a stage or variant that does not exist, and for a variant without accuracy at a stage where several
    variants may run.
    """
    targets.check_stages(view, policy.stages, "system ipa")
    limits_ms = _stage_limits_ms(view, policy)
    return {stage.name: _variants(view, stage, policy, limits_ms[stage.name]) for stage in view.stages}


def _terms(policy: Ipa, stage: StageView) -> IpaStageTerms:
    return targets.declared_for(stage, policy.stages) or IpaStageTerms()


def _variants(view: ClusterView, stage: StageView, policy: Ipa, slo_ms: float) -> tuple[VariantOnCores, ...]:
    own, known = _terms(policy, stage), targets.by_variant(stage)
    if not own.variant and policy.only == "any" and len(known) > 1:
        for variant in known:  # check also variants that base allocation excludes: the file is wrong anyway
            _accuracy(stage, variant)
    cores = _cores(view, stage, policy, slo_ms)
    weight = {v: count * known[v].latency_ms(1, known[v].slot(count)) for v, count in cores.items()}
    if own.variant:
        allowed = [targets.belief_of(stage, own.variant).variant]
    elif policy.only == "any":
        allowed = list(cores)
    else:
        allowed = [(min if policy.only == "lightest" else max)(cores, key=weight.__getitem__)]
    if len(allowed) == 1:
        accuracy = known[allowed[0]].accuracy
        return (VariantOnCores(allowed[0], cores[allowed[0]], 1.0 if accuracy is None else fraction(accuracy)),)
    accuracies = [_accuracy(stage, variant) for variant in allowed]
    found = scores(policy.accuracy, accuracies, [cores[variant] for variant in allowed], allowed)
    return tuple(VariantOnCores(v, cores[v], score) for v, score in zip(allowed, found, strict=True))


def _accuracy(stage: StageView, variant: str) -> float:
    accuracy = targets.by_variant(stage)[variant].accuracy
    if accuracy is None:
        raise InputError(
            f"stage {stage.name}: variant {variant!r} has no accuracy, which system ipa weighs against cores",
            help=f"write `accuracy:` beside {variant!r}, or allow one variant only: "
            f"`stages: {{{stage.name}: {{variant: {variant}}}}}`",
        )
    return fraction(accuracy)


def _cores(view: ClusterView, stage: StageView, policy: Ipa, slo_ms: float) -> dict[str, float]:
    """Cores per replica of each variant that base allocation allows, in order of declaration.

    If no variant keeps the stage's limit with its largest batch: the variants that keep it with batches of one. If none
    does, although the path may still be feasible: the lightest variant with its quickest core count.
    """
    own, beliefs = _terms(policy, stage), targets.by_variant(stage)
    sizes = {variant: _sizes(view, belief, policy.unit) for variant, belief in beliefs.items()}
    threshold_rps = own.threshold_rps or policy.threshold_rps
    wanted = targets.belief_of(stage, own.variant).variant if own.variant else ""
    # Least accurate first, as `base_allocation` expects; quickest first where accuracy is not known.
    order = sorted(sizes, key=lambda variant: (beliefs[variant].accuracy or 0.0, _one_ms(sizes[variant])))
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
        targets.belief_of(stage, variant)
    return {variant: known[variant] for variant in beliefs if variant in known}


def _one_ms(sizes: VariantSizes) -> float:
    """Latency of one request on the fewest cores."""
    return sizes.latency_ms(1, sizes.choices[0])


def _sizes(view: ClusterView, belief: Belief, unit: float) -> VariantSizes:
    """The core counts to choose from: 1, 2, 4, … units, up to the limits of the profile and of the largest node.

    If the largest node has less than a unit, its cores are the only choice. Batches above the profile's largest get the
    latency of the largest.
    """

    def latency_ms(batch: int, cores: float) -> float:
        return belief.latency_ms(min(batch, belief.batch_max), belief.slot(cores))

    most = targets.node_cores_max(view)
    choices = [unit * count for count in UNITS if unit * count <= most + ROUNDING] or [most]
    return VariantSizes(latency_ms, [cores for cores in choices if cores <= belief.cores_max + ROUNDING] or choices[:1])


def _stage_limits_ms(view: ClusterView, policy: Ipa) -> dict[str, float]:
    """The longest time of a batch at each stage: as declared, or the smallest of its shares of its paths' deadlines.

    Shares are proportional to the deadlines that base allocation derives for each stage alone.
    """
    derived = {}
    for stage in view.stages:
        own = _terms(policy, stage)
        derived[stage.name] = (
            own.slo_ms
            or base_allocation(
                [_sizes(view, belief, policy.unit) for belief in targets.by_variant(stage).values()],
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
