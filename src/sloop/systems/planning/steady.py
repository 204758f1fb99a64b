"""The plans that policies keep at steady rates: a fixed point of the core's planner.

The planner gets the views of a run in which every replica of its plans is ready and the rates have been steady for ten
minutes, and is asked again until it keeps its plans. The setups' own policies stay fresh.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, overload

from sloop.core.ledger import Ledger
from sloop.core.monitor import BUCKETS_KEPT, SLACK_BUCKETS_KEPT
from sloop.core.planner import Planner
from sloop.core.views import (
    ApplicationView,
    Bucket,
    CoreDemand,
    PlanInput,
    ReplicaView,
    StageView,
    Traffic,
)
from sloop.errors import InputError
from sloop.policies.drop import Never
from sloop.systems.planning.infeasibility import BestConfigurations, beyond_cluster
from sloop.systems.planning.timing import PlanPrediction, StagePrediction
from sloop.systems.setup import ApplicationSetup, raise_of_policy
from sloop.text import counted, number
from sloop.units import NS_PER_S, WIDE_ROUNDING
from sloop.vocabulary import Life, Plan, ReplicaId, StagePlan

ROUNDS_MAX: Final = 40
"""The most rounds of `steady_plans`. Policies that react to utilisation settle within a few rounds, or never."""
SLACKS_MAX: Final = 10_000
"""Slacks listed per second; at a steady rate they are all equal, so more of them say nothing new."""
LATE_ROUNDS: Final = 12
"""Of the last so many rounds the largest plan is taken where a policy keeps none."""
REPLICAS_MAX: Final = 10_000
"""A plan with at most this many replicas always goes through another round."""
BEYOND: Final = 2.0
"""A rate that needs more than this many times the cluster's cores ends the rounds."""


@dataclass(frozen=True, slots=True)
class SteadyPlans:
    """Plans that their policies keep, by application."""

    plans: Mapping[str, Plan]
    solve_ms: float
    """The longest single decision on the way to them: forecasts and plans of all applications."""
    limits: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By application and hardware, the cores of those that cannot have what they want."""
    cut_short: Mapping[str, str] = field(default_factory=dict)
    """By application, why its policy kept none of its plans."""


def steady_plans(
    setups: Sequence[ApplicationSetup],
    rates_rps: Mapping[str, float],
    *,
    others: Iterable[CoreDemand] = (),
    clock: Callable[[], int] | None = None,
) -> SteadyPlans:
    """The plans that applications on one cluster keep once their rates have been steady for ten minutes.

    `rates_rps` are by application; `others` are the cores of applications whose plans stay as they are; `clock` returns
    nanoseconds and times the decisions. An application whose system makes no plan has an infeasible, empty one; an
    application without requests that may rest has no replicas. If a plan has more than `REPLICAS_MAX` replicas and the
    rate is far beyond the cluster, the first such plan is the result. Of a policy that keeps none within `ROUNDS_MAX`
    the result is its largest plan of the last rounds. Raises what a policy raises, except for an
    application that has fewer cores than it wants: its plan is then infeasible and empty.
    """
    planner, now_ns, longest_ns = Planner(), BUCKETS_KEPT * NS_PER_S, 0
    plans: dict[str, Plan] = {}
    active: list[ApplicationSetup] = []
    for setup in setups:
        application = setup.application
        if application.rest_after_s and not rates_rps[application.key]:
            empty = tuple(StagePlan(stage.name, (), batch_max=1) for stage in application.order)
            plans[application.key] = Plan(empty, "no requests: it rests without replicas")
            continue
        active.append(setup)
        planner.add(application.key, setup.system.fresh().policies)
        plans[application.key] = Plan((), f"{setup.system.name} has no plan", feasible=False)
    nodes = Ledger(setups[0].application.cluster).views()
    cut_short: dict[str, str] = {}
    late: dict[str, list[Plan]] = {}
    for round_number in range(ROUNDS_MAX if active else 0):
        due = tuple(_view(now_ns, setup, plans, rates_rps) for setup in active)
        given = PlanInput(round_number, now_ns, nodes, due, tuple(others))
        started_ns = clock() if clock else 0
        answer = planner.plan(given).plans
        longest_ns = max(longest_ns, clock() - started_ns if clock else 0)
        answer |= _failed(planner, active)
        changed = {key for key, plan in answer.items() if not plan.same_target(plans[key])}
        plans |= answer
        if not changed:
            break
        cut_short = _cut_short(active, plans, changed, rates_rps)
        if cut_short:
            break
        now_ns += BUCKETS_KEPT * NS_PER_S  # so that no window or delay of a policy reaches back to the last round
        if round_number >= ROUNDS_MAX - LATE_ROUNDS:
            for key in changed:
                late.setdefault(key, []).append(plans[key])
    else:
        for setup in active:
            key = setup.application.key
            if key in changed:
                plans[key], cut_short[key] = _largest(setup, late[key])
    return SteadyPlans(plans, longest_ns / 1e6, planner.limits, cut_short)


def _largest(setup: ApplicationSetup, plans: Sequence[Plan]) -> tuple[Plan, str]:
    """Of plans between which a policy goes to and fro the one with most cores, and that this is so."""

    def size(plan: Plan) -> tuple[float, int]:
        groups = [group for target in plan.stages for group in target.groups]
        return math.fsum(group.count * group.spec.cores for group in groups), sum(group.count for group in groups)

    largest, smallest = max(plans, key=size), min(plans, key=size)
    return largest, (
        f"{setup.system.name} keeps no plan at this rate: after {ROUNDS_MAX} decisions it goes to and fro between "
        f"{counted(size(smallest)[1], 'replica')} with {counted(size(smallest)[0], 'core')} and "
        f"{counted(size(largest)[1], 'replica')} with {counted(size(largest)[0], 'core')}, which is the plan shown"
    )


def _failed(planner: Planner, setups: Iterable[ApplicationSetup]) -> dict[str, Plan]:
    """Empty plans of applications whose policy failed because of the cores that it was left. Raises other failures."""
    by_key = {setup.application.key: setup for setup in setups}
    limited = {key for key, _ in planner.limits}
    empty: dict[str, Plan] = {}
    for key, error in planner.failures.items():
        if key not in limited:
            raise_of_policy(error, by_key[key], several=len(by_key) > 1)
        what = error.what if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        why = f"{by_key[key].system.name} has no plan for the cores that the other applications leave it: {what}"
        empty[key] = Plan((), why, feasible=False)
    return empty


def _cut_short(
    setups: Iterable[ApplicationSetup], plans: Mapping[str, Plan], changed: set[str], rates_rps: Mapping[str, float]
) -> dict[str, str]:
    """Why policies need not be asked again about plans of very many replicas; empty where they are to be."""
    reasons: dict[str, str] = {}
    for setup in setups:
        key = setup.application.key
        count = sum(group.count for target in plans[key].stages for group in target.groups)
        if key not in changed or count <= REPLICAS_MAX:
            continue
        prediction = PlanPrediction(setup, plans[key], rates_rps[key])
        best = BestConfigurations(setup)
        for shortfall in beyond_cluster([(prediction, best)], setup.application.cluster):
            if shortfall.needs > BEYOND * shortfall.has:
                times = number(round(shortfall.needs / shortfall.has))
                reasons[key] = (
                    f"the rate needs {times} times the cores of the cluster, so {setup.system.name} was not asked "
                    f"again after it chose {number(count)} replicas, which may change"
                )
    return reasons


def _view(
    now_ns: int, setup: ApplicationSetup, plans: Mapping[str, Plan], rates_rps: Mapping[str, float]
) -> ApplicationView:
    """The application as it looks after ten minutes with its plan in force."""
    application = setup.application
    plan, rate_rps = plans[application.key], rates_rps[application.key]
    targets = {target.stage: target for target in plan.stages}
    rows = max((setup.mixes[stage.name].rows for stage in application.stages if stage.name in setup.mixes), default=1.0)
    return ApplicationView(
        key=application.key,
        stages=tuple(
            _stage_view(now_ns, setup, StagePrediction(setup, stage, targets.get(stage.name), rate_rps, "even"), rows)
            for stage in application.order
        ),
        ingress=Traffic(buckets=SteadyBuckets(now_ns, rows * rate_rps, application.slo_ns), bucket_ns=NS_PER_S),
        share=1.0,
        weight=application.weight,
        paths=application.paths,
        plan=plan if plan.stages else None,
    )


def _stage_view(now_ns: int, setup: ApplicationSetup, stage: StagePrediction, rows: float) -> StageView:
    """The stage as it looks when every replica of the plan has been ready, and the rate steady, for ten minutes. The
    ingress counts `rows` for each request."""
    application = setup.application
    specs = [spec for group in stage.groups for spec in repeat(group.spec, group.count)]
    ready_cores = math.fsum(group.count * group.spec.cores for group in stage.groups)
    keeps_all = isinstance(setup.system.policies.drop, Never)
    busy = _occupation(stage)
    return StageView(
        name=stage.name,
        slo_ns=application.slo_ns,
        after=application.by_name[stage.name].after,
        beliefs=stage.beliefs,
        replicas=tuple([ReplicaView(ReplicaId(id), spec, Life.READY, 0, 0) for id, spec in enumerate(specs)]),
        queue=(),
        running=0,
        buckets=SteadyBuckets(now_ns, stage.rate_rps, application.slo_ns, busy, ready_cores, keeps_all=keeps_all),
        bucket_ns=NS_PER_S,
        visits=stage.visits * stage.mix.rows / rows,
    )


@dataclass(frozen=True, slots=True)
class Occupation:
    """The mean load of a stage over time."""

    busy_cores: float = 0.0
    running: float = 0.0
    """Requests being executed."""
    waiting: float = 0.0
    """Requests per second beyond what the replicas serve: by how much the queue grows in a second if none is dropped,
    and else a lower bound of its length."""


def _occupation(stage: StagePrediction) -> Occupation:
    """Each replica gets its part of the rate, with the smallest batch that keeps up (Little's law)."""
    if not stage.groups:
        return Occupation(waiting=stage.rate_rps)
    busy_cores = running = waiting = 0.0
    for group in stage.groups:
        slot, share_rps = group.spec.slot, stage.share_rps(group)
        batch = stage.batch(group) or stage.batch_max(group)
        latency_s = stage.belief(group).latency_ms(batch, slot) / 1e3
        served_rps = min(share_rps, batch / latency_s)
        busy_cores += group.count * slot.cores * served_rps * latency_s / batch
        running += group.count * served_rps * latency_s
        waiting += group.count * (share_rps - served_rps)
    return Occupation(busy_cores, running, waiting)


class SteadyBuckets(Sequence[Bucket]):
    """The buckets of the ten minutes before `now_ns`, at a steady rate. As in a monitor only the newest keep slacks.

    With `keeps_all` no request is dropped: what the replicas do not serve waits, more in each second.
    Each is made when it is read: of the 120,000 buckets of 200 applications, policies read only a few thousand.
    """

    def __init__(
        self,
        now_ns: int,
        rate_rps: float,
        slo_ns: int,
        busy: Occupation | None = None,
        ready_cores: float = 0.0,
        *,
        keeps_all: bool = False,
    ) -> None:
        busy = busy or Occupation()
        self._start_ns = now_ns - BUCKETS_KEPT * NS_PER_S
        self._rate_rps = rate_rps
        self._slo_ns = slo_ns
        self._keeps_all = keeps_all
        self._waiting_ns, self._running_ns = round(busy.waiting * NS_PER_S), round(busy.running * NS_PER_S)
        self._busy_core_ns, self._ready_core_ns = round(busy.busy_cores * NS_PER_S), round(ready_cores * NS_PER_S)
        self._slack_ns: dict[int, list[int]] = {}
        """By arrivals: the slacks of all buckets with as many."""

    def __len__(self) -> int:
        return BUCKETS_KEPT

    @overload
    def __getitem__(self, index: int) -> Bucket: ...
    @overload
    def __getitem__(self, index: slice) -> list[Bucket]: ...
    def __getitem__(self, index: int | slice) -> Bucket | list[Bucket]:
        places = range(BUCKETS_KEPT)[index]
        return self._at(places) if isinstance(places, int) else [self._at(place) for place in places]

    def _at(self, place: int) -> Bucket:
        arrivals = self._left(BUCKETS_KEPT - place) - self._left(BUCKETS_KEPT - place - 1)
        return Bucket(
            self._start_ns + place * NS_PER_S,
            arrivals,
            self._waiting_ns * (2 * place + 1) // 2 if self._keeps_all else self._waiting_ns,
            self._running_ns,
            self._busy_core_ns,
            self._ready_core_ns,
            self._slacks(arrivals if place >= BUCKETS_KEPT - SLACK_BUCKETS_KEPT else 0),
        )

    def _left(self, seconds: int) -> int:
        """Arrivals in the last `seconds`: whole numbers with the rate as mean, evenly spread, the last rounded up. The
        tolerance hides the float error of ten minutes' arrivals at 1e7/s."""
        return math.ceil(self._rate_rps * seconds - WIDE_ROUNDING)

    def _slacks(self, arrivals: int) -> list[int]:
        slacks_ns = self._slack_ns.get(arrivals)
        if slacks_ns is None:
            slacks_ns = self._slack_ns[arrivals] = [self._slo_ns] * min(arrivals, SLACKS_MAX)
        return slacks_ns
