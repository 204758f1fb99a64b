"""The control path: a tick closes monitoring buckets, asks the scaling policy for a plan, and works towards it (law 3).

Between ticks it reacts to what happens to replicas. Working towards the plan is a comparison, `diff`, of each stage's
replicas with its target, followed by orders; `PlanProgress` says what is still to be done, and thereby when to compare
again. Nothing that serves is stopped or shrunk before others carry its load, with one exception: where these have no
room because the old replica takes it. The reason of that stop then says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from sloop.actions import Action, Decided, ResizeReplica, StartReplica, StopReplica
from sloop.core.dispatch import DataPath
from sloop.core.ledger import Reservation, millicores
from sloop.core.protocols import Policies
from sloop.core.state import STUCK_NS_MIN, Replica, StageState, State
from sloop.core.views import ClusterView, ReplicaView, StageView, Traffic
from sloop.events import ReplicaLost, ReplicaReady, ReplicaStopped, Resized
from sloop.quantities import ROUNDING
from sloop.units import NS_PER_S, ms
from sloop.vocabulary import Life, Plan, ReplicaId, ReplicaSpec, StagePlan

BUCKET_NS_MAX = NS_PER_S
"""Monitoring is per second, or per planning period where that is shorter."""

WAKE_NS_MIN = ms(100)
"""A stage without replicas asks for a plan when a request arrives, at most this often."""

Resizes = tuple[tuple[ReplicaId, float], ...]
"""Replicas with the cores they are to have."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What to do about one stage, each list in the order to do it in."""

    grow: Resizes
    """Get more cores."""
    shrink: Resizes
    """May get fewer cores now."""
    hold_shrink: Resizes
    """Keep more cores than planned until enough others are ready."""
    start: tuple[ReplicaSpec, ...]
    stop: tuple[ReplicaId, ...]
    """May be stopped now."""
    hold: tuple[ReplicaId, ...]
    """Not in the plan, but kept until enough others are ready."""

    @property
    def holds(self) -> bool:
        """Whether replicas only wait for others before they go or shrink."""
        return bool(self.hold or self.hold_shrink)


def diff(
    replicas: Sequence[ReplicaView],
    plan: StagePlan,
    present_rps: Callable[[ReplicaId], float],
    rate_rps: Callable[[ReplicaSpec], float],
) -> Difference:
    """Which replicas of a stage to keep, resize, start and stop. A pure function of them and the stage's plan.

    `replicas` are those that start or are ready, without draining ones. `present_rps` says how many visits per second
    one of them can serve on the cores it has, `rate_rps` how many a replica of the plan could. What may be stopped or
    shrunk *now* is limited so that the ready replicas together never serve less than the plan's would, or than they
    did: replacements come first.

    Exact matches are kept first, then replicas that differ only in cores are resized in place where the plan allows it.
    Ready replicas are kept before starting ones and older before newer, so that the last one started goes first.
    """
    wanted = [group.spec for group in plan.groups for _ in range(group.count)]
    spare = sorted(replicas, key=lambda r: (r.life is Life.STARTING, r.id))

    _, missing = _match(wanted, spare, same_cores=True)
    resized: list[tuple[ReplicaView, float]] = []
    if plan.in_place:
        resized, missing = _match(missing, spare, same_cores=False)

    if not resized and not spare:
        return Difference((), (), (), tuple(missing), (), ())
    left_rps = sum(present_rps(replica.id) for replica in replicas if replica.life is Life.READY)
    # Relative: the same rates, summed in another order, differ by some units in the last place.
    needed_rps = min(left_rps, sum(map(rate_rps, wanted))) * (1 - ROUNDING)

    def may_lose(rps: float) -> bool:
        nonlocal left_rps
        if left_rps - rps < needed_rps:
            return False
        left_rps -= rps
        return True

    grow: list[tuple[ReplicaId, float]] = []
    shrink: list[tuple[ReplicaId, float]] = []
    hold_shrink: list[tuple[ReplicaId, float]] = []
    for replica, cores in resized:
        if cores >= replica.spec.cores:
            grow.append((replica.id, cores))
            continue
        spec = ReplicaSpec(plan.stage, replica.spec.variant, cores)
        loses_rps = present_rps(replica.id) - rate_rps(spec) if replica.life is Life.READY else 0.0
        (shrink if may_lose(loses_rps) else hold_shrink).append((replica.id, cores))
    stop = [replica.id for replica in reversed(spare) if replica.life is Life.STARTING]
    hold: list[ReplicaId] = []
    for replica in reversed(spare):
        if replica.life is Life.READY:
            (stop if may_lose(present_rps(replica.id)) else hold).append(replica.id)
    return Difference(tuple(grow), tuple(shrink), tuple(hold_shrink), tuple(missing), tuple(stop), tuple(hold))


def _match(
    wanted: list[ReplicaSpec], spare: list[ReplicaView], *, same_cores: bool
) -> tuple[list[tuple[ReplicaView, float]], list[ReplicaSpec]]:
    """Take from `spare` a replica for each wanted spec that has one; returns these with the cores they are to have, and
    the specs that are left without."""
    by_kind: dict[tuple[object, ...], list[ReplicaView]] = {}
    for replica in reversed(spare):
        by_kind.setdefault(_kind(replica.spec, same_cores), []).append(replica)
    matched: list[tuple[ReplicaView, float]] = []
    missing: list[ReplicaSpec] = []
    for spec in wanted:
        found = _pop(by_kind.get(_kind(spec, same_cores), []), spec.node)
        if found is None:
            missing.append(spec)
        else:
            matched.append((found, spec.cores))
    taken = {replica.id for replica, _ in matched}
    spare[:] = [replica for replica in spare if replica.id not in taken]
    return matched, missing


def _kind(spec: ReplicaSpec, same_cores: bool) -> tuple[object, ...]:
    """What two replicas must have in common for one to stand in for the other."""
    return (spec.variant, spec.device, spec.share, millicores(spec.cores) if same_cores else None)


def _pop(candidates: list[ReplicaView], node: str | None) -> ReplicaView | None:
    """The last candidate, or the last on `node` where the spec names one."""
    if node is None:
        return candidates.pop() if candidates else None
    for index in range(len(candidates) - 1, -1, -1):
        if candidates[index].spec.node == node:
            return candidates.pop(index)
    return None


class PlanProgress(IntEnum):
    """How far the cluster is from the plan in force, and when to compare them again. The largest of all stages
    counts."""

    MET = 0
    """All that the plan wants is there or ordered: compare when a replica is lost, or the plan changes."""
    WAITING = 1
    """Replicas only wait for others before they go or shrink: compare as well at each event of a replica."""
    RETRY = 2
    """Something could not be ordered, for want of room or so soon after a loss: compare as well at each tick."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Something the plan wants and no node has room for: a new replica, or more cores for one that runs."""

    variant: str
    cores: float
    replica: ReplicaId | None = None
    present_cores: float = 0.0
    node: str | None = None

    @property
    def why(self) -> str:
        """In words, for the log."""
        if self.replica is None:
            return f"no node has room for a replica of {self.variant} with {self.cores:g} cores"
        has = f"replica {self.replica} has {self.present_cores:g} cores, not {self.cores:g}"
        return f"{has}: {self.node} has no more free"


class ControlPath:
    """Owns the plan in force. `wake_ns` is the next tick."""

    def __init__(self, state: State, policies: Policies, data: DataPath) -> None:
        self._state = state
        self._policies = policies
        self._data = data
        self._progress = PlanProgress.WAITING
        """Assigned in `_compare` only."""
        self._reported: dict[str, Shortage] = {}
        """By stage, the shortage that was last written to the log."""
        self._stuck_check_ns = 0
        """Before then no batch can have become stuck."""
        self._next_plan_ns = 0
        self._woken_ns = -WAKE_NS_MIN
        self.plan: Plan | None = None
        self.wake_ns = 0

    def stage_views(self) -> tuple[StageView, ...]:
        """The stages as a scaling policy is shown them."""
        state, visits = self._state, self._state.visits()
        return tuple(stage.view(state.slo_ns, visits[stage.name]) for stage in state.stages.values())

    def _view(self, now_ns: int) -> ClusterView:
        """The cluster as a scaling policy is shown it. It asks the forecast policy, which may remember being asked."""
        state, stages = self._state, self.stage_views()
        ingress = Traffic(buckets=tuple(state.ingress.buckets), bucket_ns=state.ingress.bucket_ns)
        forecast_rps = self._policies.forecast.demand_rps(now_ns, ingress)
        return ClusterView(
            stages=stages,
            nodes=state.ledger.views(),
            plan=self.plan,
            demand_rps={stage.name: forecast_rps * stage.visits for stage in stages},
            ingress=ingress,
            forecast_rps=forecast_rps,
            paths=state.graph.paths,
        )

    def tick(self, now_ns: int, out: list[Action]) -> None:
        """Close buckets, give up stuck batches, ask for a plan if it is time, work towards the plan."""
        state = self._state
        for stage in state.stages.values():
            stage.monitor.roll(now_ns)
            stage.refresh()
        if state.open_requests is not None:
            state.ingress.roll(now_ns)
            state.update_remaining_times()
        if state.visit_rates is not None:
            state.visit_rates.age(now_ns)
        self._give_up_stuck(now_ns, out)
        is_new = False
        if now_ns >= self._next_plan_ns:
            period_ns = self._policies.scale.period_ns
            self._next_plan_ns = (now_ns // period_ns + 1) * period_ns
            is_new = self._ask(now_ns, out)
        if is_new or self._progress is PlanProgress.RETRY:
            self._compare(now_ns, out)
        bucket_ns = state.ingress.bucket_ns
        self.wake_ns = min((now_ns // bucket_ns + 1) * bucket_ns, self._next_plan_ns)

    def wake(self, now_ns: int, out: list[Action]) -> None:
        """A request waits at a stage that has no replica: do not let it wait for the next planning period."""
        if now_ns - self._woken_ns < WAKE_NS_MIN:
            return
        self._woken_ns = now_ns
        if self._ask(now_ns, out) or self._progress is PlanProgress.RETRY:
            self._compare(now_ns, out)

    def ready(self, now_ns: int, event: ReplicaReady, out: list[Action]) -> None:
        """A started replica can serve."""
        replica = self._state.replicas.get(event.replica)
        if replica is None or replica.life is not Life.STARTING:
            return
        self._state.set_life(now_ns, replica, Life.READY)
        replica.stage.pool.add_idle(replica)
        if self._progress is not PlanProgress.MET:
            self._compare(now_ns, out)

    def lost(self, now_ns: int, event: ReplicaLost, out: list[Action]) -> None:
        """A replica died: queue its batch again, replace it. One that was draining is not replaced."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        if replica.life is Life.DRAINING:
            self.stopped(now_ns, ReplicaStopped(replica.id), out)
            return
        wait_ns = replica.stage.backoff.lose(now_ns)
        why = f"{event.error}; a replacement starts {'at once' if not wait_ns else f'in {wait_ns // NS_PER_S} s'}"
        out.append(Decided("lost", why, stage=replica.stage.name, replica=replica.id))
        self._state.forget(now_ns, replica)
        self._data.lose(now_ns, replica, event.error, out)
        self._compare(now_ns, out)

    def stopped(self, now_ns: int, event: ReplicaStopped, out: list[Action]) -> None:
        """A replica has freed its resources, as it was ordered to."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        self._state.forget(now_ns, replica)
        self._data.lose(now_ns, replica, "it was stopped", out)
        if replica.life is not Life.DRAINING or self._progress is not PlanProgress.MET:  # or nobody ordered it
            self._compare(now_ns, out)

    def resized(self, now_ns: int, event: Resized, out: list[Action]) -> None:
        """A resize took effect, perhaps with other cores than asked for."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        self._state.set_cores(now_ns, replica, event.cores)
        replica.resizing = max(0, replica.resizing - 1)
        if not replica.resizing:
            self._state.ledger.resize(replica.id, max(event.cores, replica.target_cores))
        if self._progress is not PlanProgress.MET:
            self._compare(now_ns, out)

    def _ask(self, now_ns: int, out: list[Action]) -> bool:
        """Show the scaling policy the cluster and adopt its answer; returns whether that is a new target."""
        plan = self._policies.scale.plan(now_ns, self._view(now_ns))
        if plan is None:
            return False
        before, self.plan = self.plan, plan
        if before is not None and plan.same_target(before):
            if (before.feasible, before.gave_up) != (plan.feasible, plan.gave_up):
                out.append(Decided("kept", plan.why, plan=plan))
            return False
        out.append(Decided("plan", plan.why, plan=plan))
        for target in plan.stages:
            self._state.stages[target.stage].follow(target)
        return True

    def _compare(self, now_ns: int, out: list[Action]) -> None:
        """Compare the cluster with the plan and order the difference, as far as that is possible now.

        Stops and shrinks of all stages come first. Their room is free only once a driver has carried them out; until
        then what finds no room is not reported as a shortage.
        """
        if self.plan is None:
            return
        differences = [(self._state.stages[target.stage], self._difference(target)) for target in self.plan.stages]
        for stage, difference in differences:
            self._stop(now_ns, stage, difference.stop, "the plan has no use for it", out)
        for _, difference in differences:
            self._resize(difference.shrink, out)
        holds = any(difference.holds for _, difference in differences)
        progress = PlanProgress.MET
        for stage, difference in differences:
            progress = max(progress, self._advance(now_ns, stage, difference, holds, out))
        self._progress = progress

    def _difference(self, target: StagePlan) -> Difference:
        pool = self._state.stages[target.stage].pool
        staying = [replica.view() for replica in pool.replicas.values() if replica.life is not Life.DRAINING]
        return diff(staying, target, pool.present_rps, lambda spec: pool.rate_rps(spec.variant, spec.cores))

    def _advance(
        self, now_ns: int, stage: StageState, difference: Difference, holds: bool, out: list[Action]
    ) -> PlanProgress:
        """Grow and start what one stage needs; where there is no room, make some or report it. `holds` says whether
        replicas of any stage will go or shrink once others are ready."""
        shortage = self._resize(difference.grow, out)
        is_too_soon = bool(difference.start) and now_ns < stage.backoff.not_before_ns
        if not is_too_soon:
            shortage = self._start(now_ns, stage, difference.start, out) or shortage
        if shortage is not None:
            if difference.holds:
                self._make_room(now_ns, stage, difference, out)
            else:
                self._report(stage, shortage, holds, out)
            return PlanProgress.RETRY
        if is_too_soon:
            return PlanProgress.RETRY
        return PlanProgress.WAITING if difference.holds else PlanProgress.MET

    def _resize(self, resizes: Resizes, out: list[Action]) -> Shortage | None:
        """Order resizes; returns which has no room, the last if there are several."""
        shortage = None
        for id, cores in resizes:
            replica = self._state.replicas[id]
            if replica.target_cores == cores:
                continue
            if not self._state.ledger.grow(replica.id, cores):
                shortage = Shortage(replica.spec.variant, cores, id, replica.target_cores, replica.spec.node)
                continue
            replica.target_cores = cores
            replica.resizing += 1
            out.append(ResizeReplica(id, cores))
        return shortage

    def _start(
        self, now_ns: int, stage: StageState, specs: Sequence[ReplicaSpec], out: list[Action]
    ) -> Shortage | None:
        """Start what is missing, as far as there is room; returns the first that has none."""
        for spec in specs:
            if not self._place(now_ns, stage, spec, out):
                return Shortage(spec.variant, spec.cores)
        return None

    def _make_room(self, now_ns: int, stage: StageState, difference: Difference, out: list[Action]) -> None:
        """Something has no room, and replicas wait for it before they go or shrink: let one of them go first."""
        if stage.pool.is_changing:  # that may make room without a loss
            return
        if difference.hold_shrink:
            self._resize(difference.hold_shrink[:1], out)
        else:
            self._stop(now_ns, stage, difference.hold[:1], "its replacement has no room while it runs", out)

    def _report(self, stage: StageState, shortage: Shortage, holds: bool, out: list[Action]) -> None:
        """Write a shortage to the log: once, and not at all while room is about to be freed."""
        will_have_room = holds or any(replica.will_free_cores for replica in self._state.replicas.values())
        if self._reported.get(stage.name) != shortage and not will_have_room:
            self._reported[stage.name] = shortage
            out.append(Decided("shortage", shortage.why, stage=stage.name))

    def _place(self, now_ns: int, stage: StageState, spec: ReplicaSpec, out: list[Action]) -> bool:
        """Start one replica if a node has room."""
        state = self._state
        memory_bytes = stage.beliefs[spec.variant].memory_bytes
        nodes = [view for view in state.ledger.views() if spec.node in (None, view.node.name)]
        name = self._policies.place.choose(now_ns, spec, memory_bytes, nodes)
        if name is None:
            return False
        id = ReplicaId(state.next_replica)
        if not state.ledger.reserve(id, Reservation.of(spec, memory_bytes, name)):
            return False
        state.next_replica += 1
        self._reported.pop(stage.name, None)
        placed = ReplicaSpec(spec.stage, spec.variant, spec.cores, name, spec.device, spec.share)
        state.replicas[id] = replica = Replica(id, placed, stage, now_ns)
        stage.pool.add(replica)
        out.append(StartReplica(id, placed))
        return True

    def _stop(self, now_ns: int, stage: StageState, ids: Sequence[ReplicaId], why: str, out: list[Action]) -> None:
        """Stop replicas, letting those that run a batch finish it."""
        for id in ids:
            replica = stage.pool.replicas[id]
            if replica.life is Life.READY and replica.batch is None:
                stage.pool.remove_idle(replica)
            self._state.set_life(now_ns, replica, Life.DRAINING)
            if replica.batch is None:
                out.append(StopReplica(id, why))
            else:
                out.append(Decided("drain", why, stage=stage.name, replica=id))

    def _give_up_stuck(self, now_ns: int, out: list[Action]) -> None:
        """Stop replicas whose batch takes impossibly long. All are looked at, but only when one can have become so."""
        if now_ns < self._stuck_check_ns:
            return
        self._stuck_check_ns = now_ns + STUCK_NS_MIN
        stuck: list[tuple[Replica, float]] = []
        for replica in self._state.replicas.values():
            if replica.batch is not None:
                self._stuck_check_ns = min(self._stuck_check_ns, replica.batch.stuck_ns)
                if now_ns >= replica.batch.stuck_ns:
                    stuck.append((replica, (now_ns - replica.batch.started_ns) / NS_PER_S))
        for replica, seconds in stuck:
            out.append(StopReplica(replica.id, f"its batch has run for {seconds:.1f} s"))
            self.lost(now_ns, ReplicaLost(replica.id, f"a batch ran for {seconds:.1f} s"), out)
