"""The control path: a heartbeat closes the books, asks the scaling policy for a plan, and works towards it (law 3).

Between heartbeats it reacts to what happens to replicas. It never stops or shrinks what serves before others carry its
load, with one exception: where these have no room because the old replica holds it. A stop then says so aloud.
"""

from sloop.actions import Action, Decided, ResizeReplica, StartReplica, StopReplica
from sloop.core.diff import Difference, diff
from sloop.core.dispatch import DataPath
from sloop.core.ledger import Reservation
from sloop.core.protocols import Policies
from sloop.core.state import STUCK_NS_MIN, Replica, Stage, State
from sloop.core.views import ClusterView, Traffic
from sloop.events import ReplicaLost, ReplicaReady, ReplicaStopped, Resized
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import Life, Plan, ReplicaId, ReplicaSpec, StagePlan

BUCKET_NS_MAX = NS_PER_S
"""Monitoring is per second, or per planning period where that is shorter."""

RESTART_NS_MAX = s(30)
"""Lost replicas are replaced at once, then after 1, 2, 4, … seconds, at most this."""

WAKE_NS_MIN = ms(100)
"""A stage without replicas asks for a plan when a request arrives, at most this often."""


class ControlPath:
    """Owns the plan in force. `wake_ns` is the next heartbeat."""

    __slots__ = (
        "_data",
        "_dirty",
        "_holds",
        "_look_ns",
        "_met",
        "_next_plan_ns",
        "_paths",
        "_policies",
        "_state",
        "_woken_ns",
        "plan",
        "wake_ns",
    )

    def __init__(self, state: State, policies: Policies, data: DataPath) -> None:
        self._state = state
        self._policies = policies
        self._data = data
        self._paths = state.graph.paths
        self._dirty = False
        """Something the plan wants could not be done yet: try again at the next heartbeat."""
        self._met = False
        """The cluster is what the plan wants, replicas that start counted: nothing to compare until that changes."""
        self._holds = False
        """Some replicas only wait for others before they go or shrink."""
        self._look_ns = 0
        """Before then no batch can have become stuck."""
        self._next_plan_ns = 0
        self._woken_ns = -WAKE_NS_MIN
        self.plan: Plan | None = None
        self.wake_ns = 0

    def view(self, now_ns: int) -> ClusterView:
        """The cluster as a scaling policy is shown it."""
        state = self._state
        visits = state.visits()
        ingress = Traffic(buckets=tuple(state.ingress.buckets), bucket_ns=state.ingress.bucket_ns)
        forecast_rps = self._policies.forecast.demand_rps(now_ns, ingress)
        return ClusterView(
            stages=tuple(stage.view(state.slo_ns, visits[stage.name]) for stage in state.stages.values()),
            nodes=state.ledger.views(),
            plan=self.plan,
            demand_rps={name: forecast_rps * often for name, often in visits.items()},
            ingress=ingress,
            forecast_rps=forecast_rps,
            paths=self._paths,
        )

    def tick(self, now_ns: int, out: list[Action]) -> None:
        """The heartbeat: close buckets, give up stuck batches, plan if it is time, work towards the plan."""
        state = self._state
        for stage in state.stages.values():
            stage.monitor.roll(now_ns)
            stage.refresh()
        if state.flights is not None:
            state.ingress.roll(now_ns)
            state.look_ahead()
        if state.flows is not None:
            state.flows.age(now_ns)
        self._give_up_stuck(now_ns, out)
        if now_ns >= self._next_plan_ns:
            period_ns = self._policies.scale.period_ns
            self._next_plan_ns = (now_ns // period_ns + 1) * period_ns
            self._ask(now_ns, out)
        if self._dirty:
            self._reconcile(now_ns, out)
        bucket_ns = state.ingress.bucket_ns
        self.wake_ns = min((now_ns // bucket_ns + 1) * bucket_ns, self._next_plan_ns)

    def wake(self, now_ns: int, out: list[Action]) -> None:
        """A request waits at a stage that has no replica: do not let it wait for the next planning period."""
        if now_ns - self._woken_ns < WAKE_NS_MIN:
            return
        self._woken_ns = now_ns
        self._ask(now_ns, out)
        if self._dirty:
            self._reconcile(now_ns, out)

    def ready(self, now_ns: int, event: ReplicaReady, out: list[Action]) -> None:
        """A started replica can serve."""
        replica = self._state.replicas.get(event.replica)
        if replica is None or replica.life is not Life.STARTING:
            return
        self._state.set_life(now_ns, replica, Life.READY)
        replica.stage.add_idle(replica)
        self._reconcile(now_ns, out)

    def lost(self, now_ns: int, event: ReplicaLost, out: list[Action]) -> None:
        """A replica died: queue its batch again, replace it. One that was leaving anyway is not missed."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        if replica.life is Life.DRAINING:
            self.stopped(now_ns, ReplicaStopped(replica.id), out)
            return
        stage = replica.stage
        backoff_ns = 0 if not stage.losses else min(RESTART_NS_MAX, s(1) << min(stage.losses - 1, 5))
        self._met = False
        stage.losses += 1
        stage.restart_ns = now_ns + backoff_ns
        why = f"{event.error}; a replacement starts {'at once' if not backoff_ns else f'in {backoff_ns // NS_PER_S} s'}"
        out.append(Decided("lost", why, stage=stage.name, replica=replica.id))
        self._state.forget(now_ns, replica)
        self._data.give_up(now_ns, replica, event.error, out)
        self._reconcile(now_ns, out)

    def stopped(self, now_ns: int, event: ReplicaStopped, out: list[Action]) -> None:
        """A replica has given its resources back, as it was told to."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        if replica.life is not Life.DRAINING:
            self._met = False
        self._state.forget(now_ns, replica)
        self._data.give_up(now_ns, replica, "it was stopped", out)
        self._reconcile(now_ns, out)

    def resized(self, now_ns: int, event: Resized, out: list[Action]) -> None:
        """A resize took effect, perhaps with other cores than asked for."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        self._state.set_cores(now_ns, replica, event.cores)
        replica.resizing = max(0, replica.resizing - 1)
        if not replica.resizing:
            self._state.ledger.resize(replica.id, max(event.cores, replica.target_cores))
        self._reconcile(now_ns, out)

    def _ask(self, now_ns: int, out: list[Action]) -> None:
        """Show the scaling policy the cluster and adopt what it answers."""
        plan = self._policies.scale.plan(now_ns, self.view(now_ns))
        if plan is None:
            return
        before, self.plan = self.plan, plan
        if before is not None and plan.same_target(before):
            if (before.feasible, before.gave_up) != (plan.feasible, plan.gave_up):
                out.append(Decided("kept", plan.why, plan=plan))
            return
        out.append(Decided("plan", plan.why, plan=plan))
        for target in plan.stages:
            self._state.stages[target.stage].follow(target)
        self._dirty = True
        self._met = False

    def _reconcile(self, now_ns: int, out: list[Action]) -> None:
        """Order whatever separates the cluster from the plan; stay dirty where something could not be done yet."""
        self._dirty = False
        if self._met or self.plan is None:
            return
        self._met = True
        differences = [(self._state.stages[target.stage], self._difference(target)) for target in self.plan.stages]
        for stage, difference in differences:
            self._stop(now_ns, stage, difference.stop, "the plan has no use for it", out)
        for stage, difference in differences:
            self._resize(stage, difference.shrink, out)
        self._holds = any(difference.hold or difference.hold_shrink for _, difference in differences)
        for stage, difference in differences:
            lacking = self._resize(stage, difference.grow, out)
            lacking = self._start(now_ns, stage, difference, out) or lacking
            if lacking:
                self._make_room(now_ns, stage, difference, lacking, out)

    def _difference(self, target: StagePlan) -> Difference:
        stage = self._state.stages[target.stage]
        staying = [replica.view() for replica in stage.replicas.values() if replica.life is not Life.DRAINING]
        return diff(staying, target, stage.now_rps, lambda spec: stage.rate_rps(spec.variant, spec.cores))

    def _resize(self, stage: Stage, resizes: tuple[tuple[ReplicaId, float], ...], out: list[Action]) -> str:
        """Order resizes; says which has no room, the last if there are several."""
        lacking = ""
        for id, cores in resizes:
            replica = self._state.replicas[id]
            if replica.target_cores == cores:
                continue
            if not self._state.ledger.grow(replica.id, cores):
                node = replica.spec.node
                lacking = f"replica {id} has {replica.target_cores:g} cores, not {cores:g}: {node} has no more free"
                continue
            replica.target_cores = cores
            replica.resizing += 1
            out.append(ResizeReplica(id, cores))
        return lacking

    def _start(self, now_ns: int, stage: Stage, difference: Difference, out: list[Action]) -> str:
        """Start what is missing, as far as there is room; says what has none."""
        if difference.hold or difference.hold_shrink:
            self._met = False
        if difference.start and now_ns < stage.restart_ns:
            self._dirty = True
            self._met = False
            return ""
        for spec in difference.start:
            if not self._place(now_ns, stage, spec, out):
                return f"no node has room for a replica of {spec.variant} with {spec.cores:g} cores"
        return ""

    def _make_room(self, now_ns: int, stage: Stage, difference: Difference, lacking: str, out: list[Action]) -> None:
        """Something has no room: let go of what only waits for it, one after the other, or say so."""
        self._met = False
        if not (difference.hold or difference.hold_shrink):
            self._be_short(stage, lacking, out)
            return
        self._dirty = True
        if stage.expects:  # which will let go of what is held
            return
        if difference.hold_shrink:
            self._resize(stage, difference.hold_shrink[:1], out)
        else:
            self._stop(now_ns, stage, difference.hold[:1], "its replacement has no room beside it", out)

    def _place(self, now_ns: int, stage: Stage, spec: ReplicaSpec, out: list[Action]) -> bool:
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
        stage.short = ""
        placed = ReplicaSpec(spec.stage, spec.variant, spec.cores, name, spec.device, spec.share)
        state.replicas[id] = replica = Replica(id, placed, stage, now_ns)
        stage.add(replica)
        out.append(StartReplica(id, placed))
        return True

    def _stop(self, now_ns: int, stage: Stage, ids: tuple[ReplicaId, ...], why: str, out: list[Action]) -> None:
        """Stop replicas, letting those that run a batch finish it."""
        for id in ids:
            replica = stage.replicas[id]
            if replica.life is Life.READY and replica.batch is None:
                stage.remove_idle(replica)
            self._state.set_life(now_ns, replica, Life.DRAINING)
            if replica.batch is None:
                out.append(StopReplica(id, why))
            else:
                out.append(Decided("drain", why, stage=stage.name, replica=id))

    def _give_up_stuck(self, now_ns: int, out: list[Action]) -> None:
        """Every replica is looked at, but only when a batch can have become stuck since the last time."""
        if now_ns < self._look_ns:
            return
        self._look_ns = now_ns + STUCK_NS_MIN
        stuck: list[Replica] = []
        for replica in self._state.replicas.values():
            if replica.batch is not None:
                self._look_ns = min(self._look_ns, replica.batch.stuck_ns)
                if now_ns >= replica.batch.stuck_ns:
                    stuck.append(replica)
        for replica in stuck:
            assert replica.batch is not None
            seconds = (now_ns - replica.batch.started_ns) / NS_PER_S
            out.append(StopReplica(replica.id, f"its batch has run for {seconds:.1f} s"))
            self.lost(now_ns, ReplicaLost(replica.id, f"a batch ran for {seconds:.1f} s"), out)

    def _be_short(self, stage: Stage, why: str, out: list[Action]) -> None:
        """Something the plan wants cannot be had now: try again at the next heartbeat. Said once, and not at all while
        room is on its way."""
        self._dirty = True
        self._met = False
        room_comes = self._holds or any(replica.is_giving_back for replica in self._state.replicas.values())
        if stage.short != why and not room_comes:
            stage.short = why
            out.append(Decided("short", why, stage=stage.name))
