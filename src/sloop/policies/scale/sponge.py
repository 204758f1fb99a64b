"""Sponge: one replica whose cores follow the budgets that the network leaves, resized in place every second.

Razavi et al., Sponge (EuroMLSys 2024; dissertation P2), Algorithm 2 with the safety margin of the public artefact. What
the paper leaves open is a parameter: what to plan for (`planning_set`, `lookback`), how budgets and arrivals are
thought of (`budget`, `criterion`), what to do where nothing holds (`infeasible`), how fast to shrink (`hysteresis`).
Fails when one replica with all cores is too slow, and says so in `Plan.saturated`; it knows the network a second late.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sloop.core.views import Belief, ClusterView, StageView
from sloop.policies.bounds import above, at_least, within
from sloop.solvers import sponge, targets
from sloop.solvers.queueing import fill_ms
from sloop.solvers.sponge import Grid, Setting
from sloop.units import NS_PER_S, s, to_ms, to_s
from sloop.vocabulary import Plan

CORES_MAX = 16
"""More cores gain nothing in the paper's figures."""

CRUDE_BATCH = 10
"""The batch of the `crude` fallback."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one decision plans for. `budgets_ms` has an entry for each of `count` requests, tightest first."""

    count: int
    rate_rps: float
    way_max_ms: float
    """cl_max: the most any of them used up before it arrived."""
    budgets_ms: NDArray[np.float64]
    slo_ms: float


@dataclass(frozen=True, slots=True)
class Sponge:
    """One replica, `margin` of the SLO to plan with, cores from `cores` and batches up to `batch_max`."""

    planning_set: Literal["rate", "queue"] = "rate"
    """What to serve in time: a period's arrivals or the queue, whichever is more, or the queue alone."""
    criterion: Literal["burst", "steady"] = "burst"
    """How they arrive: at once (Algorithm 2; clients that send once a second) or evenly spread (far cheaper)."""
    budget: Literal["clmax", "per_batch"] = "clmax"
    """Within a burst everybody has the tightest budget, or each batch its own, which is better where clients differ."""
    margin: float = 0.9
    cores: tuple[float, ...] = ()
    """Empty: whole cores up to 16, up to those of a node, and up to what the profile gains from."""
    batch_max: int = 16
    infeasible: Literal["dry_run", "crude", "keep"] = "dry_run"
    """Where nothing holds: as many in time as all cores can, all cores and batches of 10, or no change."""
    hysteresis: int = 1
    """k: the largest of the last k decisions holds, so that cores fall only after k of them."""
    lookback: int = 1
    """Seconds whose communication latencies count."""
    rate_rps: float = 0.0
    """The rate to plan for, which the artefact knows beforehand; 0 takes the forecast, which begins with none."""
    variant: str = ""
    period_ns: int = s(1)
    _recent: deque[Setting] = field(init=False, default_factory=deque, repr=False, compare=False)

    def __post_init__(self) -> None:
        within("margin", self.margin, 0, 1)
        for cores in self.cores:
            above("cores", cores, 0)
        at_least("batch_max", self.batch_max, 1)
        at_least("hysteresis", self.hysteresis, 1)
        at_least("lookback", self.lookback, 1)
        at_least("rate_rps", self.rate_rps, 0)
        above("period_ns", self.period_ns, 0)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """One replica with the cheapest setting that holds. `InputError` for an application of several stages."""
        stage = targets.one_stage(view, "sponge")
        variant = targets.variant_of(stage, self.variant)
        grid = self._grid(view, stage.variants[variant])
        demand = self._demand(now_ns, stage, view.demand_rps[stage.name])
        found = sponge.cheapest(grid, self._holds(grid, demand))
        if found is not None:
            setting, why = found, self._reason(demand, found)
        else:
            setting, why = self._fallback(grid, demand, _current(view.plan, grid))
        kept = targets.largest(self._recent, setting, self.hysteresis, lambda recent: recent.cores)
        if kept != setting:
            why += f"; kept at {_words(kept)}, until {self.hysteresis} decisions agree"
        limit_rps = sponge.max_rate_rps(grid)
        saturated = demand.rate_rps > limit_rps
        if saturated:
            most = targets.amount(grid.cores[-1], "core")
            why += f"; saturated: {demand.rate_rps:.4g} requests/s, and all {most} serve {limit_rps:.4g}"
        target = targets.equal_replicas(stage, variant, count=1, cores=kept.cores, batch_max=kept.batch)
        return Plan((target,), why, feasible=found is not None, saturated=(stage.name,) if saturated else ())

    def _grid(self, view: ClusterView, belief: Belief) -> Grid:
        cores = targets.core_choices(view, self.cores, min(math.ceil(belief.cores_max), CORES_MAX), "sponge")
        return sponge.grid_of([belief.costs_ns(c) for c in cores], cores, min(self.batch_max, belief.batch_max))

    def _demand(self, now_ns: int, stage: StageView, rate_rps: float) -> Demand:
        """R of the paper, with λ and cl_max."""
        observed_ns: list[int] = []
        count = len(stage.queue)
        rate_rps = self.rate_rps or rate_rps
        if self.planning_set != "queue":
            count = max(count, sponge.requests_in(rate_rps, to_s(self.period_ns)))
            for bucket in stage.window(self.lookback * NS_PER_S):
                observed_ns += bucket.slack_ns
        left_ns = observed_ns + [visit.deadline_ns - now_ns for visit in stage.queue]
        on_arrival_ns = observed_ns + [visit.deadline_ns - visit.arrived_ns for visit in stage.queue]
        way_max_ns = max(0, stage.slo_ns - min(on_arrival_ns, default=stage.slo_ns))
        return Demand(
            count, rate_rps, to_ms(way_max_ns), _budgets_ms(left_ns, count, stage.slo_ns), to_ms(stage.slo_ns)
        )

    def _holds(self, grid: Grid, demand: Demand) -> sponge.Mask:
        keeps_up = sponge.keeps_up(grid, demand.rate_rps)
        if self.criterion == "steady":
            slo_ms = self.margin * demand.slo_ms
            return keeps_up & sponge.holds_steady(grid, demand.rate_rps, demand.way_max_ms, slo_ms)
        if self.budget == "per_batch":
            reserve_ms = (1.0 - self.margin) * demand.slo_ms
            return keeps_up & sponge.holds_per_batch(grid, demand.budgets_ms - reserve_ms)
        return keeps_up & sponge.holds_burst(grid, demand.count, demand.way_max_ms, self.margin * demand.slo_ms)

    def _fallback(self, grid: Grid, demand: Demand, current: Setting | None) -> tuple[Setting, str]:
        """Where no setting holds. The paper is silent; `keep` is what its artefact does."""
        seen = f"{_seen(demand, self.period_ns)}: no setting holds"
        if self.infeasible == "keep":
            setting = current or sponge.setting(grid, 0, 1)
            return setting, f"{seen}; kept {_words(setting)}"
        # With a backlog, keeping up with the arrivals would keep the backlog: the next requests would be late, too.
        work_off_rps = max(demand.rate_rps, demand.count / to_s(self.period_ns))
        setting, served = sponge.best_effort(grid, demand.budgets_ms, work_off_rps)
        if self.infeasible == "crude":
            setting = sponge.setting(grid, -1, min(CRUDE_BATCH, grid.latency_ms.shape[1]))
            return setting, f"{seen}; all {_words(setting)}"
        fate = f"{served} of {demand.count} in time"
        return setting, f"{seen} → all {_words(setting)}: {fate}"

    def _reason(self, demand: Demand, setting: Setting) -> str:
        seen, chosen = _seen(demand, self.period_ns), _words(setting)
        if demand.count == 0:
            return f"{seen} → {chosen}"
        limit = f"{self.margin:g} × {demand.slo_ms:.0f} ms"
        way = f"{demand.way_max_ms:.0f} ms on the way"
        if self.criterion == "steady":
            fill = f"{fill_ms(setting.batch, demand.rate_rps):.0f} ms to fill"
            return f"{seen} → {chosen}: {setting.latency_ms:.4g} ms + {fill} + {way} ≤ {limit}"
        rounds = -(-demand.count // setting.batch)
        if self.budget == "per_batch":
            return f"{seen} → {chosen}: {rounds} × {setting.latency_ms:.4g} ms, each batch within its own budget"
        return f"{seen} → {chosen}: {rounds} × {setting.latency_ms:.4g} ms + {way} < {limit}"


def _budgets_ms(left_ns: Sequence[int], count: int, slo_ns: int) -> NDArray[np.float64]:
    """The `count` tightest of the known budgets, sorted; the tightest stands in for those not known."""
    known = np.sort(np.array(left_ns, dtype=np.float64))[:count] / 1e6
    tightest_ms = known[0] if len(known) else to_ms(slo_ns)
    return np.concatenate([np.full(count - len(known), tightest_ms), known])


def _current(plan: Plan | None, grid: Grid) -> Setting | None:
    """The setting in force, if it is one of the grid's."""
    if plan is None or not plan.stages:
        return None
    target = plan.stages[0]
    cores = target.groups[0].spec.cores
    if cores not in grid.cores or target.batch_max > grid.latency_ms.shape[1]:
        return None
    return sponge.setting(grid, grid.cores.index(cores), target.batch_max)


def _seen(demand: Demand, period_ns: int) -> str:
    if demand.count == 0:
        return "no requests"
    tightest_ms = demand.slo_ms - demand.way_max_ms
    seen = f"{targets.amount(demand.count, 'request')} in {to_s(period_ns):g} s"
    return f"{seen}, tightest budget {tightest_ms:.0f} ms"


def _words(setting: Setting) -> str:
    return f"{targets.amount(setting.cores, 'core')}, batch {setting.batch}"
