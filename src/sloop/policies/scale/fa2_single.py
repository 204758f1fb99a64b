"""FA2 for one model: small equal replicas, as many as the tightest budget of the last second needs.

The horizontal baseline of Sponge (EuroMLSys 2024, evaluation; the rule is that of its public artefact): scale-in takes
effect at once, scale-out after the cold start, and where no count suffices nothing changes. Fails in a fade of the
network: what it starts is ready when the fade is over, and flapping between counts pays a cold start each time;
`hysteresis` shows how much of its reputation that is.
"""

from collections import deque
from dataclasses import dataclass, field

from sloop.core.views import ClusterView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers import fa2_single, targets
from sloop.solvers.fa2_single import Answer
from sloop.units import NS_PER_S, s, to_ms
from sloop.vocabulary import Plan


@dataclass(frozen=True, slots=True)
class Fa2Single:
    """Replicas of `cores` each, up to `replicas_max`; before anything was seen there are `initial`.

    `margin`: part of the SLO to plan with. `hysteresis` k: the largest of the last k decisions holds.
    """

    cores: float = 1.0
    replicas_max: int = 16
    initial: int = 1
    batch_max: int = 8
    margin: float = 0.9
    hysteresis: int = 1
    variant: str = ""
    period_ns: int = s(1)
    _recent: deque[Answer] = field(init=False, default_factory=deque, repr=False, compare=False)

    def __post_init__(self) -> None:
        above("cores", self.cores, 0)
        at_least("replicas_max", self.replicas_max, 1)
        at_least("initial", self.initial, 0)
        at_least("batch_max", self.batch_max, 1)
        within("margin", self.margin, 0, 1)
        at_least("hysteresis", self.hysteresis, 1)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The rule's answer, or the plan in force. `InputError` for an application of several stages."""
        stage = targets.one_stage(view, "fa2-single")
        variant = targets.variant_of(stage, self.variant)

        def planned(count: int, batch_max: int, why: str) -> Plan:
            target = targets.equal_replicas(stage, variant, count=count, cores=self.cores, batch_max=batch_max)
            return Plan((target,), why)

        if not stage.buckets:
            return planned(self.initial, 1, f"nothing seen yet → {targets.amount(self.initial, 'replica')}")
        slack_ns = [slack for bucket in stage.window(NS_PER_S) for slack in bucket.slack_ns]
        rate_rps, slo_ms = view.demand_rps[stage.name], to_ms(stage.slo_ns)
        way_max_ms = max(0.0, to_ms(stage.slo_ns - min(slack_ns, default=stage.slo_ns)))
        belief = stage.variants[variant]
        costs_ns = belief.costs_ns(self.cores)[1 : min(self.batch_max, belief.batch_max) + 1]
        limit_ms = self.margin * slo_ms
        answer = fa2_single.solve(
            [to_ms(cost_ns) for cost_ns in costs_ns],
            rate_rps,
            way_max_ms=way_max_ms,
            limit_ms=limit_ms,
            slo_ms=slo_ms,
            replicas_max=self.replicas_max,
        )
        seen = f"{rate_rps:.4g} requests/s, tightest budget {slo_ms - way_max_ms:.0f} ms"
        if answer is None:
            why = f"{seen}: no count up to {self.replicas_max} holds; kept as it was"
            return Plan(view.plan.stages, why, feasible=False) if view.plan else planned(self.initial, 1, why)
        kept = targets.largest(self._recent, answer, self.hysteresis, lambda recent: recent.replicas)
        own, rounds = f"{kept.latency_ms:.4g} ms", f"{kept.rounds} × {kept.latency_ms:.4g} ms"
        why = f"{seen} → {targets.amount(kept.replicas, 'replica')}, batch {kept.batch}: {own} + {rounds}"
        return planned(kept.replicas, kept.batch, f"{why} + {way_max_ms:.0f} ms on the way < {limit_ms:.0f} ms")
