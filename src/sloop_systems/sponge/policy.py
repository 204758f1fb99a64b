"""The scaling policy `Sponge`: one replica, resized in place to the time budgets that remain after the network.

Razavi et al., Sponge (EuroMLSys 2024; dissertation, chapter P2), Algorithm 2 with the safety margin of the authors'
artefact, every second. Choices that the publication leaves open are parameters: which requests to plan for
(`planning_set`, `lookback`), the model of budgets and arrivals (`budget`, `criterion`), the plan if no setting is
feasible (`infeasible`), and how fast to shrink (`hysteresis`). The policy fails when one replica with all cores is too
slow, which it reports in `Plan.saturated`; and it sees a slow network one second late.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from sloop.api import NS_PER_S, Fraction, NonNegativeFloat, Plan, PositiveFloat, PositiveInt, counted, s, to_ms, to_s
from sloop.api.policies import Belief, ClusterView, Scale, StageView, targets
from sloop.api.solvers import fill_ms
from sloop_systems.sponge import solver as sponge
from sloop_systems.sponge.solver import SpongeGrid, SpongeSetting

CORES_MAX = 16
"""The largest default core count: more cores gain nothing in the publication's figures."""

CRUDE_BATCH = 10
"""The batch of the `crude` fallback."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests that one decision plans for.

    `budgets_ms` has an entry per request, tightest first. It ends after as many as any setting can start in time.
    """

    count: int
    rate_rps: float
    network_ms_max: float
    """cl_max: the longest network time of any of them before it arrived."""
    budgets_ms: NDArray[np.float64]
    slo_ms: float


@dataclass(frozen=True, slots=True)
class Sponge(Scale):
    """One replica with the fewest cores, then the smallest batch, that serve requests in the time they have left."""

    is_quick: ClassVar[bool] = True

    planning_set: Literal["rate", "queue"] = "rate"
    """Which requests to serve in time. `rate`: a period's arrivals or the queue, whichever is more; `queue`: the
    queue."""
    criterion: Literal["burst", "steady"] = "burst"
    """The assumed arrivals. `burst`: all at once (Algorithm 2, for clients that send once a second); `steady`: evenly
    spaced, which needs far fewer cores."""
    budget: Literal["clmax", "per_batch"] = "clmax"
    """The budgets of a burst. `clmax`: the tightest for all its requests; `per_batch`: each batch's tightest, better if
    clients differ."""
    margin: Fraction = 0.9
    """Fraction of the SLO to plan with."""
    cores: tuple[PositiveFloat, ...] = ()
    """Core counts to choose from; empty: 1 to 16, up to the largest node and to the cores that the profile can use."""
    batch_max: PositiveInt = 16
    infeasible: Literal["dry_run", "crude", "keep"] = "dry_run"
    """The plan if no setting is feasible. `dry_run`: all cores with the batch that serves most requests in time;
    `crude`: all cores with batches of 10; `keep`: no change."""
    hysteresis: PositiveInt = 1
    """k: the largest of the last k decisions is used, so that cores never fall below any of them."""
    lookback: PositiveInt = 1
    """How many past seconds of measured network times count."""
    rate_rps: NonNegativeFloat = 0.0
    """The rate to plan for, which the authors' artefact gets beforehand; 0 means the forecast."""
    variant: str = ""
    hardware: str = ""
    """The kind of node to use; empty: the first kind on which every stage has a profile."""
    period_ns: PositiveInt = s(1)

    @property
    def arrivals(self) -> Literal["even", "burst"]:
        """The arrivals that the criterion assumes; `sloop plan` reports them."""
        return "burst" if self.criterion == "burst" else "even"

    def plan(
        self, now_ns: int, view: ClusterView, memory: tuple[SpongeSetting, ...] | None
    ) -> tuple[Plan, tuple[SpongeSetting, ...]]:
        """One replica with the cheapest feasible setting; it remembers the last decisions. `InputError` for an
        application of several stages."""
        view = targets.on_one_kind(view, self.hardware)
        stage = targets.one_stage(view, "sponge")
        belief = targets.belief_of(stage, self.variant)
        grid = self._grid(view, belief)
        demand = self._demand(now_ns, stage, view.demand_rps[stage.name], grid)
        found = sponge.cheapest(grid, self._holds(grid, demand))
        if found is not None:
            setting, why = found, self._reason(demand, found)
        else:
            setting, why = self._fallback(grid, demand, _current(view.plan, grid))
        kept, recent = targets.largest(memory or (), setting, self.hysteresis, lambda one: one.cores)
        if kept != setting:
            why += f"; kept at {_describe(kept)}, the most of the last {self.hysteresis} decisions"
        limit_rps = sponge.max_rate_rps(grid)
        saturated = demand.rate_rps > limit_rps
        if saturated:
            most = counted(grid.cores[-1], "core")
            why += f"; saturated: {demand.rate_rps:.4g} requests/s, and all {most} serve {limit_rps:.4g}"
        target = targets.equal_replicas(stage, belief, count=1, cores=kept.cores, batch_max=kept.batch)
        return Plan((target,), why, feasible=found is not None, saturated=(stage.name,) if saturated else ()), recent

    def _grid(self, view: ClusterView, belief: Belief) -> SpongeGrid:
        cores = targets.core_choices(view, self.cores, min(math.ceil(belief.cores_max), CORES_MAX), "sponge")
        return sponge.grid_of(
            [belief.costs_ns(belief.slot(c)) for c in cores], cores, min(self.batch_max, belief.batch_max)
        )

    def _demand(self, now_ns: int, stage: StageView, rate_rps: float, grid: SpongeGrid) -> Demand:
        """The publication's R, with λ and cl_max."""
        observed_ns: list[int] = []
        count = len(stage.queue)
        rate_rps = self.rate_rps or rate_rps
        if self.planning_set != "queue":
            count = max(count, sponge.requests_in(rate_rps, to_s(self.period_ns)))
            for bucket in stage.window(self.lookback * NS_PER_S):
                observed_ns += bucket.slack_ns
        left_ns = observed_ns + [visit.deadline_ns - now_ns for visit in stage.queue]
        on_arrival_ns = observed_ns + [visit.deadline_ns - visit.arrived_ns for visit in stage.queue]
        network_ns_max = max(0, stage.slo_ns - min(on_arrival_ns, default=stage.slo_ns))
        budgets_ms = _budgets_ms(left_ns, count, stage.slo_ns, grid)
        return Demand(count, rate_rps, to_ms(network_ns_max), budgets_ms, to_ms(stage.slo_ns))

    def _holds(self, grid: SpongeGrid, demand: Demand) -> sponge.Mask:
        keeps_up = sponge.keeps_up(grid, demand.rate_rps)
        if self.criterion == "steady":
            slo_ms = self.margin * demand.slo_ms
            return keeps_up & sponge.holds_steady(grid, demand.rate_rps, demand.network_ms_max, slo_ms)
        if self.budget == "per_batch":
            reserve_ms = (1.0 - self.margin) * demand.slo_ms
            return keeps_up & sponge.holds_per_batch(grid, demand.budgets_ms - reserve_ms)
        return keeps_up & sponge.holds_burst(grid, demand.count, demand.network_ms_max, self.margin * demand.slo_ms)

    def _fallback(self, grid: SpongeGrid, demand: Demand, current: SpongeSetting | None) -> tuple[SpongeSetting, str]:
        """The setting if none is feasible. The publication does not define it; its artefact does `keep`."""
        seen = f"{_seen(demand, self.period_ns)}: no setting holds"
        if self.infeasible == "keep":
            setting = current or sponge.setting(grid, 0, 1)
            return setting, f"{seen}; kept {_describe(setting)}"
        # A setting that only keeps up with the arrivals would never serve the backlog.
        work_off_rps = max(demand.rate_rps, demand.count / to_s(self.period_ns))
        setting, served = sponge.best_effort(grid, demand.budgets_ms, work_off_rps)
        if self.infeasible == "crude":
            setting = sponge.setting(grid, -1, min(CRUDE_BATCH, grid.latency_ms.shape[1]))
            return setting, f"{seen}; all {_describe(setting)}"
        fate = f"{served} of {demand.count} in time"
        return setting, f"{seen} → all {_describe(setting)}: {fate}"

    def _reason(self, demand: Demand, setting: SpongeSetting) -> str:
        seen, chosen = _seen(demand, self.period_ns), _describe(setting)
        if demand.count == 0:
            return f"{seen} → {chosen}"
        limit = f"{self.margin:g} × {demand.slo_ms:.0f} ms"
        network = f"{demand.network_ms_max:.0f} ms of network"
        if self.criterion == "steady":
            fill = f"{fill_ms(setting.batch, demand.rate_rps):.0f} ms to fill"
            return f"{seen} → {chosen}: {setting.latency_ms:.4g} ms + {fill} + {network} ≤ {limit}"
        rounds = -(-demand.count // setting.batch)
        if self.budget == "per_batch":
            return f"{seen} → {chosen}: {rounds} × {setting.latency_ms:.4g} ms, each batch within its own budget"
        return f"{seen} → {chosen}: {rounds} × {setting.latency_ms:.4g} ms + {network} < {limit}"


def _budgets_ms(left_ns: Sequence[int], count: int, slo_ns: int, grid: SpongeGrid) -> NDArray[np.float64]:
    """The `count` tightest of the known budgets, sorted; requests that have not arrived yet get the tightest.

    The list ends after as many as any setting can start in time, so that a decision at 10 million requests/s takes no
    longer than at a thousand.
    """
    known = np.sort(np.array(left_ns, dtype=np.float64))[:count] / 1e6
    tightest_ms, loosest_ms = (known[0], known[-1]) if len(known) else (to_ms(slo_ns), to_ms(slo_ns))
    most = sponge.startable(grid, float(loosest_ms))
    return np.concatenate([np.full(min(count - len(known), most), tightest_ms), known])[:most]


def _current(plan: Plan | None, grid: SpongeGrid) -> SpongeSetting | None:
    """The setting in force, if the grid has it; the plan of an application at rest has no replicas."""
    if plan is None or not plan.stages or not plan.stages[0].groups:
        return None
    target = plan.stages[0]
    cores = target.groups[0].spec.cores
    if cores not in grid.cores or target.batch_max > grid.latency_ms.shape[1]:
        return None
    return sponge.setting(grid, grid.cores.index(cores), target.batch_max)


def _seen(demand: Demand, period_ns: int) -> str:
    if demand.count == 0:
        return "no requests"
    tightest_ms = demand.slo_ms - demand.network_ms_max
    seen = f"{counted(demand.count, 'request')} in {to_s(period_ns):g} s"
    return f"{seen}, tightest budget {tightest_ms:.0f} ms"


def _describe(setting: SpongeSetting) -> str:
    return f"{counted(setting.cores, 'core')}, batch {setting.batch}"
