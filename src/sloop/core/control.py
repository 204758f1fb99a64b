"""The control path: a tick closes monitoring buckets, asks the scaling policy for a plan, and works towards it (law 3).

Between ticks it reacts to events of replicas. To work towards the plan, `diff` compares each stage's replicas with its
target, and orders follow; `PlanProgress` says when to compare again. A ready replica is stopped or shrunk only when
others carry its load, with one exception: if its replacement has no room while it runs. The reason of that stop says
so.
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
from sloop.units import NS_PER_S, ROUNDING, ms
from sloop.vocabulary import Life, Plan, ReplicaId, ReplicaSpec, StagePlan

BUCKET_NS_MAX = NS_PER_S
"""The longest monitoring bucket: one second; a shorter planning period makes it shorter."""

WAKE_NS_MIN = ms(100)
"""The shortest time between two plans that are made because a request waits at a stage without replicas."""

Resizes = tuple[tuple[ReplicaId, float], ...]
"""Replicas with the cores to resize them to."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The orders that lead one stage to its plan, each list in order of execution."""

    grow: Resizes
    """Replicas that get more cores."""
    shrink: Resizes
    """Replicas that may get fewer cores now."""
    hold_shrink: Resizes
    """Replicas that keep more cores than planned until enough others are ready."""
    start: tuple[ReplicaSpec, ...]
    stop: tuple[ReplicaId, ...]
    """Replicas that may be stopped now."""
    hold: tuple[ReplicaId, ...]
    """Replicas outside the plan that are kept until enough others are ready."""

    @property
    def holds(self) -> bool:
        """Whether any replica is kept, or kept large, until others are ready."""
        return bool(self.hold or self.hold_shrink)


def diff(
    replicas: Sequence[ReplicaView],
    plan: StagePlan,
    present_rps: Callable[[ReplicaId], float],
    rate_rps: Callable[[ReplicaSpec], float],
) -> Difference:
    """Which replicas of a stage to keep, resize, start and stop. A pure function of the replicas and the stage's plan.

    `replicas` are starting or ready, not draining. `present_rps` gives the visits per second that a replica can serve
    on its present cores, `rate_rps` those of a replica of the plan. Stops and shrinks are held back while they would
    leave less ready capacity than both the plan and the present replicas have: replacements come first.

    It keeps exact matches first, then resizes replicas that differ only in cores, if the plan allows it. It prefers
    ready to starting replicas and older to newer ones, so the newest are stopped first.
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
    """Move a matching replica out of `spare` for each wanted spec. Returns the replicas with their target cores, and
    the specs without a match."""
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
    """A key that is equal for replicas that can replace each other."""
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
    """How far the cluster is from the current plan, and when to compare them again. The largest value of all stages
    counts."""

    MET = 0
    """Everything in the plan exists or is ordered: compare when a replica is lost or the plan changes."""
    WAITING = 1
    """Replicas are kept until others are ready: compare also at each event of a replica."""
    RETRY = 2
    """An order was impossible, for lack of room or too soon after a loss: compare also at each tick."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A part of the plan that no node has room for: a new replica, or more cores for an existing replica."""

    variant: str
    cores: float
    replica: ReplicaId | None = None
    present_cores: float = 0.0
    node: str | None = None

    @property
    def why(self) -> str:
        """The shortage as text, for the log."""
        if self.replica is None:
            return f"no node has room for a replica of {self.variant} with {self.cores:g} cores"
        has = f"replica {self.replica} has {self.present_cores:g} cores, not {self.cores:g}"
        return f"{has}: {self.node} has no more free"


class ControlPath:
    """Owns the current plan and works towards it. `wake_ns` is the time of the next tick."""

    def __init__(self, state: State, policies: Policies, data: DataPath) -> None:
        self._state = state
        self._policies = policies
        self._data = data
        self._progress = PlanProgress.WAITING
        """Assigned in `_compare` only."""
        self._reported: dict[str, Shortage] = {}
        """By stage, the shortage that was last written to the log."""
        self._stuck_check_ns = 0
        """No batch can be stuck before this time."""
        self._next_plan_ns = 0
        self._woken_ns = -WAKE_NS_MIN
        self.plan: Plan | None = None
        self.wake_ns = 0

    def stage_views(self) -> tuple[StageView, ...]:
        """The stages as scaling policies see them."""
        state, visits = self._state, self._state.visits()
        return tuple(stage.view(state.slo_ns, visits[stage.name]) for stage in state.stages.values())

    def _view(self, now_ns: int) -> ClusterView:
        """The cluster as scaling policies see it. Calls the forecast policy, which may keep state between calls."""
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
        """Close buckets, stop replicas with stuck batches, make a plan if it is time, work towards the plan."""
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
            is_new = self._update_plan(now_ns, out)
        if is_new or self._progress is PlanProgress.RETRY:
            self._compare(now_ns, out)
        bucket_ns = state.ingress.bucket_ns
        self.wake_ns = min((now_ns // bucket_ns + 1) * bucket_ns, self._next_plan_ns)

    def wake(self, now_ns: int, out: list[Action]) -> None:
        """A request waits at a stage without replicas: make a plan now, not at the next planning period."""
        if now_ns - self._woken_ns < WAKE_NS_MIN:
            return
        self._woken_ns = now_ns
        if self._update_plan(now_ns, out) or self._progress is PlanProgress.RETRY:
            self._compare(now_ns, out)

    def ready(self, now_ns: int, event: ReplicaReady, out: list[Action]) -> None:
        """A started replica is ready: make it idle."""
        replica = self._state.replicas.get(event.replica)
        if replica is None or replica.life is not Life.STARTING:
            return
        self._state.set_life(now_ns, replica, Life.READY)
        replica.stage.pool.add_idle(replica)
        if self._progress is not PlanProgress.MET:
            self._compare(now_ns, out)

    def lost(self, now_ns: int, event: ReplicaLost, out: list[Action]) -> None:
        """A replica died: queue its batch again, and replace the replica unless it was draining."""
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
        """A replica has stopped and freed its resources."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        self._state.forget(now_ns, replica)
        self._data.lose(now_ns, replica, "it was stopped", out)
        if replica.life is not Life.DRAINING or self._progress is not PlanProgress.MET:  # or it stopped without order
            self._compare(now_ns, out)

    def resized(self, now_ns: int, event: Resized, out: list[Action]) -> None:
        """A resize took effect, perhaps with other cores than ordered."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        self._state.set_cores(now_ns, replica, event.cores)
        replica.resizing = max(0, replica.resizing - 1)
        if not replica.resizing:
            self._state.ledger.resize(replica.id, max(event.cores, replica.target_cores))
        if self._progress is not PlanProgress.MET:
            self._compare(now_ns, out)

    def _update_plan(self, now_ns: int, out: list[Action]) -> bool:
        """Call the scaling policy and adopt its plan; returns whether the plan is a new target."""
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
        """Compare the cluster with the plan and order the difference, as far as possible now.

        Stops and shrinks of all stages come first. Their room is free only when the driver has carried them out; until
        then, a lack of room is not reported as a shortage.
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
        """Grow and start the replicas that one stage needs; if there is no room, make room or report the shortage.
        `holds` says whether any stage keeps replicas until others are ready."""
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
        """Order resizes; returns the last one without room, if any."""
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
        """Start missing replicas until one has no room; returns that one, if any."""
        for spec in specs:
            if not self._place(now_ns, stage, spec, out):
                return Shortage(spec.variant, spec.cores)
        return None

    def _make_room(self, now_ns: int, stage: StageState, difference: Difference, out: list[Action]) -> None:
        """A replacement has no room: shrink or stop one of the replicas that are kept until it is ready."""
        if stage.pool.is_changing:  # this may make room without a loss of capacity
            return
        if difference.hold_shrink:
            self._resize(difference.hold_shrink[:1], out)
        else:
            self._stop(now_ns, stage, difference.hold[:1], "its replacement has no room while it runs", out)

    def _report(self, stage: StageState, shortage: Shortage, holds: bool, out: list[Action]) -> None:
        """Log a shortage once; not while room is about to become free."""
        will_have_room = holds or any(replica.will_free_cores for replica in self._state.replicas.values())
        if self._reported.get(stage.name) != shortage and not will_have_room:
            self._reported[stage.name] = shortage
            out.append(Decided("shortage", shortage.why, stage=stage.name))

    def _place(self, now_ns: int, stage: StageState, spec: ReplicaSpec, out: list[Action]) -> bool:
        """Start one replica if a node has room; returns whether it did."""
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
        """Stop replicas; a replica with a batch finishes it first."""
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
        """Stop replicas whose batch is stuck. Does nothing before the time when a batch can first be stuck."""
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
