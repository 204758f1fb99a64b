"""IPA: variants, batches and replicas of all stages at once, for the most accuracy that its cores are worth.

Razavi, dissertation (TU Darmstadt 2024), chapter P3 (Ghafouri et al., IPA, 2023): every ten seconds the choice that
maximises α · accuracy - β · cores - δ · Σ batches, in time end to end and in step with the forecast at every stage.
Cores per replica are fixed for each variant before the start (`threshold_rps`, or given in `stages`). With variants
fixed (`only`, or in `stages`) it is FA2-low and FA2-high of the publication's comparison, with `replicas` fixed RIM.

Fails where accuracy is not worth a switch: every change of variant starts replicas, and a forecast about a step of the
objective makes it flap (`hysteresis`); and after a backlog, which replicas for just the rate never work off: leave
`headroom`, or drop what is older than its SLO. Before anything was seen it plans for `initial_rps`, or the lightest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import structs

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers import adapting, highs, labels, shortfall, targets, variants_milp
from sloop.solvers.accuracy import Measure
from sloop.solvers.adapting import Families, Only, StageTerms, Terms
from sloop.solvers.labels import Solved
from sloop.solvers.variants import Choices, Goal
from sloop.units import s
from sloop.vocabulary import Plan


@dataclass(slots=True)
class Memory:
    """What is settled at the first decision, when to decide next, and how many decisions in a row have wanted other
    variants than those in force."""

    families: Families = field(default_factory=dict)
    next_ns: int = 0
    wanted: int = 0


@dataclass(frozen=True, slots=True)
class Ipa:
    """The best choice at `headroom` above the forecast, on at most the cluster's cores where `capped`.

    `replicas` 0 are as many as needed, others as many as said. `infeasible`: `degrade` to the least latency and then to
    a part of the rate, or `hold` the plan in force. It decides every `interval_ns`, beginning when something was seen.
    """

    alpha: float = 10.0
    beta: float = 0.5
    delta: float = 1e-6
    accuracy: Measure = "pas"
    only: Only = "any"
    unit: float = 1.0
    threshold_rps: float = 5.0
    batch_max: int = 8
    replicas: int = 0
    replicas_max: int = 100
    load_max: float = 1.0
    margin: float = 1.0
    headroom: float = 0.0
    capped: bool = True
    infeasible: Literal["degrade", "hold"] = "degrade"
    hysteresis: int = 1
    solver: Literal["labels", "milp"] = "labels"
    initial_rps: float = 0.0
    stages: Mapping[str, StageTerms] = field(default_factory=dict)
    interval_ns: int = s(10)
    period_ns: int = s(1)
    _memory: Memory = field(init=False, default_factory=Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key in ("alpha", "beta", "delta", "replicas", "initial_rps"):
            at_least(key, getattr(self, key), 0)
        for key in ("unit", "threshold_rps", "interval_ns", "period_ns"):
            above(key, getattr(self, key), 0)
        for key in ("batch_max", "replicas_max", "hysteresis"):
            at_least(key, getattr(self, key), 1)
        within("load_max", self.load_max, 0, 1)
        within("margin", self.margin, 0, 1)
        above("headroom", self.headroom, -1)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The best plan, or what `infeasible` says; None between decisions. `InputError` as `adapting.families`."""
        if self.solver == "milp":
            highs.load()  # with the first plan, before anything is served
        if now_ns < self._memory.next_ns:
            return None
        if view.ingress.buckets or self.initial_rps:
            self._memory.next_ns = now_ns + self.interval_ns
        families = self._memory.families = self._memory.families or adapting.families(view, self._terms)
        seen = view if view.ingress.buckets else _expecting(view, self.initial_rps)
        stages = adapting.program(seen, families, self._terms, self.headroom)
        goal = self._goal(view)
        rate_rps = seen.forecast_rps * (1 + self.headroom)
        said = f"{rate_rps:.4g} requests/s"
        if not view.ingress.buckets and not self.initial_rps:
            goal, said = replace(goal, alpha=0.0), "nothing seen yet"
        solved = self._settled(view, families, stages, goal)
        answer = solved.answer
        if answer is None:
            short = self._gave_up if solved.gave_up else self._short
            return short(view, families, stages, goal, said)
        why = f"{said} → {adapting.words(view, families, goal, answer)}"
        return Plan(adapting.stage_plans(view, families, stages, answer.options), why)

    @property
    def _terms(self) -> Terms:
        return Terms(
            system="ipa",
            measure=self.accuracy,
            only=self.only,
            unit=self.unit,
            threshold_rps=self.threshold_rps,
            batch_max=self.batch_max,
            load_max=self.load_max,
            replicas=self.replicas,
            stages=self.stages,
        )

    def _goal(self, view: ClusterView) -> Goal:
        return Goal(
            slo_ms=0.0,
            alpha=self.alpha,
            beta=self.beta,
            delta=self.delta,
            summed=self.accuracy == "pas_rank",
            replicas_max=self.replicas_max,
            cores_max=sum(node.node.cores for node in view.nodes) if self.capped and view.nodes else float("inf"),
            ways=targets.ways(view, self.margin),
        )

    def _solved(self, stages: Sequence[Choices], goal: Goal) -> Solved:
        found = variants_milp.solve(stages, goal) if self.solver == "milp" else None
        # HiGHS may have given up, which is not to say that there is nothing; label setting has a bound of its own.
        return Solved(found) if found else labels.solve(stages, goal)

    def _settled(self, view: ClusterView, families: Families, stages: list[Choices], goal: Goal) -> Solved:
        """The best answer, with the variants in force until others have been better `hysteresis` times in a row."""
        memory, solved = self._memory, self._solved(stages, goal)
        best, running = solved.answer, adapting.variants_in(view.plan, view, families)
        if best is None or running is None or tuple(option.candidate for option in best.options) == running:
            memory.wanted = 0
            return solved
        memory.wanted += 1
        if memory.wanted >= self.hysteresis:
            memory.wanted = 0
            return solved
        kept = self._solved(adapting.restricted(stages, running), goal).answer
        if kept is None:
            return solved
        options = tuple(replace(o, candidate=index) for o, index in zip(kept.options, running, strict=True))
        return Solved(replace(kept, options=options))

    def _gave_up(self, view: ClusterView, families: Families, stages: list[Choices], goal: Goal, said: str) -> Plan:
        """There may be an answer, and none was found: what is in force stays, where anything is."""
        why = f"{said}: the solver gave up with nothing found"
        if view.plan is not None:
            return structs.replace(view.plan, why=f"{why}; kept as it was", feasible=False, gave_up=True)
        return structs.replace(self._nearest(view, families, stages, goal, why), gave_up=True)

    def _short(self, view: ClusterView, families: Families, stages: list[Choices], goal: Goal, said: str) -> Plan:
        """No answer is feasible."""
        why = f"{said}: {shortfall.reason(stages, [stage.name for stage in view.stages], goal)}"
        if self.infeasible == "hold" and view.plan is not None:
            return structs.replace(view.plan, why=f"{why}; kept as it was", feasible=False, gave_up=False)
        return self._nearest(view, families, stages, goal, why)

    def _nearest(self, view: ClusterView, families: Families, stages: list[Choices], goal: Goal, why: str) -> Plan:
        """What `degrade` is."""
        effort = shortfall.best_effort(stages, goal)
        fate = "the least latency there is" if effort.share == 1.0 else f"enough for {effort.share:.0%} of it"
        return Plan(adapting.stage_plans(view, families, stages, effort.options), f"{why} → {fate}", feasible=False)


def _expecting(view: ClusterView, rate_rps: float) -> ClusterView:
    """The view with another forecast."""
    demand = {stage.name: rate_rps * stage.visits for stage in view.stages}
    return replace(view, demand_rps=demand, forecast_rps=rate_rps)
