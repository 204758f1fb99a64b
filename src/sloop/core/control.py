"""The control path: a tick closes monitoring buckets, asks the scaling policy for a plan, and works towards it (law 3).

Between ticks it reacts to events of replicas. To work towards the plan, `diff` compares each stage's replicas with its
target, and orders follow; `PlanProgress` says when to compare again. A ready replica is stopped or shrunk only when
others carry its load, with one exception: if its replacement has no room while it runs. The reason of that stop says
so.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby

from msgspec import structs

from sloop import actions, events
from sloop.actions import Action
from sloop.core.application import BUCKET_NS_MAX, ApplicationParts, ApplicationState
from sloop.core.controlled import BLOCKED, WAKE_NS_MIN, ControlledApplication, PlanProgress, Shortage
from sloop.core.difference import Attachments, Difference, Resizes, diff, fullest_nodes_first, oldest_first
from sloop.core.dispatch import stops_of
from sloop.core.idle import demands_of, planned_of, without_spare
from sloop.core.ledger import MILLI, Reservation, millicores, what_is_scarce, why_impossible, why_unfit
from sloop.core.life import WorkerState
from sloop.core.nodes import UNUSED_NS, NodePool
from sloop.core.pipeline import (
    break_up,
    dissolve,
    on_completed,
    on_part_ready,
    order_other_layers,
    stops_whole_pipelines,
)
from sloop.core.planner import Planner, plans_beside
from sloop.core.provision import expected_starts_ns, first_weights_bytes, note_files, start
from sloop.core.replica import STALL_NS_MIN, Replica, ReplicaWorker
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.core.views import ApplicationView, Belief, PlanInput, StageView, Traffic
from sloop.text import counted, in_ms, in_s, listed
from sloop.units import FOREVER_NS, GIB, ms, s
from sloop.vocabulary import (
    ALONE,
    Life,
    Node,
    NodeState,
    Plan,
    ReplicaId,
    ReplicaSpec,
    StagePlan,
    WorkerId,
)

WATCHED_NS_MIN = ms(100)
"""Younger batches are not looked at for being stalled: they are by far the most, and are at least a second old when
they stall."""

QUIET_NS = s(360)
"""An application that has had no request for this long, and was planned since, is not planned again until the next one:
its plan would stay as it is. The longest memory of a policy is HPA's: five minutes, after a window of up to one."""

MEASURE_NS = s(60)
"""A core that has adopted replicas stops and shrinks none for so long: its policies have seen no traffic yet, and would
plan for none. Kubernetes' HPA, too, begins with the replicas that it finds, and keeps them for its window."""

PLANNER_NS_MAX = s(30)
"""If a plan takes longer than this, the next one is requested anyway: the planner may have died."""


class ControlPath:
    """Owns the plans and works towards them. `wake_ns` is when to call `tick` next.

    `lose` tells the data path that a replica and its batch are gone, and whether the batch is to blame; `expire` that
    its batch is stalled, and returns when to tell it again.
    """

    def __init__(
        self,
        state: State,
        lose: Callable[[int, Replica, str, bool, list[Action]], None],
        expire: Callable[[int, Replica, list[Action]], int],
    ) -> None:
        self._state = state
        self._lose, self._expire = lose, expire
        self._applications: dict[str, ControlledApplication] = {}
        self._nodes = NodePool(state.ledger)
        self._watch_ns = 0
        """When to look for stalled batches again."""
        self._plans_beside = False
        """See `plans_beside`. It stays true, as the state of all policies is then in the planner beside the loop."""
        self.plan_number = 0
        """Number of the last request for plans."""
        self.planner = Planner()
        self.plan_input: PlanInput | None = None
        """The view of the plan request that is not yet answered."""
        self.traffic: Callable[[ApplicationState], Traffic] = own_traffic
        """The requests that an application version is to be planned for, before its share is taken."""
        self.wake_ns = 0
        self.has_begun = False
        """Whether there has been a tick."""

    def add(self, application: ApplicationState, now_ns: int) -> ControlledApplication:
        """Plan for one more application version from now on. The others are planned again with it, so that it gets its
        part of the cores, also of those that quiet applications hold."""
        self._plan_anew(now_ns)
        self.planner.add(application.key, application.policies, application.parts.choices)
        self._applications[application.key] = made = ControlledApplication(
            application, next_plan_ns=now_ns, active_ns=now_ns
        )
        self._look_who_plans()
        return made

    def change_system(self, now_ns: int, application: ApplicationState, *, knows_traffic: bool) -> None:
        """Let the policies that an application version has now make its plans, the first one at once. Plans that are
        being made under those before do not count. Without the history of its traffic, they stop and shrink no replica
        before they have seen it again."""
        key = application.key
        self.planner.discard(key)
        self.planner.add(key, application.policies, application.parts.choices)
        if application.oversight is not None:
            self.planner.choose(key, application.oversight.choice)
        self._look_who_plans()
        if self.plan_input is not None:
            due = tuple(view for view in self.plan_input.due if view.key != key)
            self.plan_input = replace(self.plan_input, due=due)
        self._applications[key].hand_over(now_ns, keeps_until_ns=0 if knows_traffic else now_ns + MEASURE_NS)
        self.wake_ns = now_ns

    def without_memory(self, parts: ApplicationParts) -> str:
        """Why a node has too little memory for the replicas of a version as these parts have it; empty if none has."""
        more_bytes = Counter[str]()
        for replica, missing_bytes in self._short_of_memory(parts):
            more_bytes[replica.node] += missing_bytes
        for node, missing_bytes in more_bytes.items():
            free_bytes = self._state.ledger.free_memory_bytes(node)
            if missing_bytes > free_bytes:
                more = f"{missing_bytes / GIB:.3g} GiB more on {node}, which has {free_bytes / GIB:.3g} GiB free"
                return f"it resizes replicas, for which they need {more}"
        return ""

    def reserve_memory(self, parts: ApplicationParts, out: list[Action]) -> None:
        """Reserve what the replicas of a version need as these parts have it. Those that need less keep what they have
        until they stop."""
        ledger, grown = self._state.ledger, list(self._short_of_memory(parts))
        for replica, missing_bytes in grown:
            reservation = ledger.reservations[replica.id]
            ledger.release(replica.id)
            wanted = structs.replace(reservation, memory_bytes=reservation.memory_bytes + missing_bytes)
            ledger.force(replica.id, wanted)
        out += self._state.weights.make_room([replica.node for replica, _ in grown])

    def _short_of_memory(self, parts: ApplicationParts) -> Iterator[tuple[Replica, int]]:
        """The replicas of a version that reserve less memory than these parts say they need, and how much less."""
        application = self._applications[parts.key].state
        for replica in self._state.replicas.values():
            if replica.stage.application is application:
                spec = replica.spec
                needed_bytes = parts.beliefs[spec.stage, spec.variant, spec.slot.hardware].memory_bytes
                missing_bytes = needed_bytes - self._state.ledger.reservations[replica.id].memory_bytes
                if missing_bytes > 0:
                    yield replica, missing_bytes

    def _look_who_plans(self) -> None:
        policies = [application.state.parts.slowest for application in self._applications.values()]
        self._plans_beside = self._plans_beside or plans_beside(policies)

    def _plan_anew(self, now_ns: int) -> None:
        """Plan for all applications now, also for quiet ones."""
        for application in self._applications.values():
            if not application.is_frozen and not application.is_resting:
                application.next_plan_ns = application.active_ns = now_ns
        self.wake_ns = now_ns

    def discard(self, key: str) -> None:
        """Forget an application version that has no replicas."""
        self.planner.discard(key)
        del self._applications[key]

    def of(self, key: str) -> ControlledApplication:
        """The control state of an application version."""
        return self._applications[key]

    def tick(self, now_ns: int, out: list[Action]) -> None:
        """Close buckets, look after stalled batches, make plans if it is time, work towards the plans."""
        self.has_begun = True
        for application in self._applications.values():
            application.state.roll(now_ns)
            application.note_activity(now_ns)
            if not application.state.woken:
                application.look_whether_awake(now_ns, out)
        self._nodes.retry_lost(now_ns)
        self._watch_batches(now_ns, out)
        is_asked = self._is_asked(now_ns)
        due = []
        for application in self._applications.values():
            if now_ns >= application.next_plan_ns and not is_asked:
                period_ns = application.state.policies.scale.period_ns
                application.next_plan_ns = (now_ns // period_ns + 1) * period_ns
                if self._needs_plan(now_ns, application, out):
                    due.append(application)
        if due:
            self._update_plans(now_ns, due, out)
        again: list[ControlledApplication] = []
        bucket_ns, next_plan_ns = BUCKET_NS_MAX, FOREVER_NS
        for application in self._applications.values():
            if 0 < application.keeps_until_ns <= now_ns:
                application.keeps_until_ns = 0
                again.append(application)
            elif application.progress in BLOCKED and application.compared_ns != now_ns:
                again.append(application)
            bucket_ns = min(bucket_ns, application.state.ingress.bucket_ns)
            if application.next_plan_ns > now_ns:  # others wait for the answer of the planner
                next_plan_ns = min(next_plan_ns, application.next_plan_ns)
        if again:
            self._compare(now_ns, again, out)
        self._release_unused(now_ns, out)
        self.wake_ns = min((now_ns // bucket_ns + 1) * bucket_ns, next_plan_ns, self._watch_ns)

    def _release_unused(self, now_ns: int, out: list[Action]) -> None:
        """Release the nodes on demand that have been empty for long enough."""
        unplaced: dict[ReplicaSpec, Belief] = {}
        for application in self._applications.values():
            unplaced.update(application.unplaced)
        self._nodes.release_unused(now_ns, unplaced, out, self._release_after_ns)

    def _release_after_ns(self, hardware: str) -> int:
        """How long nodes of a kind stay empty: as long as any application wants that can use them."""
        wanted = [
            application.state.policies.scale.release_after_ns
            for application in self._applications.values()
            if any(kind in ("", hardware) for stage in application.state.all_stages for _, kind in stage.beliefs)
        ]
        return max(wanted, default=UNUSED_NS)

    def _is_asked(self, now_ns: int) -> bool:
        """Whether the planner is still at work on a request."""
        return self.plan_input is not None and now_ns - self.plan_input.now_ns < PLANNER_NS_MAX

    def wake(self, now_ns: int, application: ApplicationState, out: list[Action]) -> None:
        """A request waits at a stage without replicas: make a plan now, not at the next planning period."""
        control = self._applications[application.key]
        if now_ns - control.woken_ns < WAKE_NS_MIN or (control.is_frozen and not control.is_stranded):
            return
        control.woken_ns = control.active_ns = now_ns
        control.is_resting = False
        if self._is_asked(now_ns):
            control.next_plan_ns = min(control.next_plan_ns, now_ns)  # at the first tick after the answer
        else:
            self._update_plans(now_ns, [control], out)
        if control.progress in BLOCKED and control.compared_ns != now_ns:
            self._compare(now_ns, [control], out)

    def _needs_plan(self, now_ns: int, application: ControlledApplication, out: list[Action]) -> bool:
        """Whether an application must be planned now: not if it had no requests for so long that its plan cannot
        change, unless others lack room. Lets it rest if it declares that."""
        state = application.state
        quiet_ns = now_ns - application.active_ns
        rest_after_ns = state.parts.rest_after_ns
        if application.is_frozen:
            return application.is_stranded
        if application.is_resting:
            return False
        if rest_after_ns and quiet_ns >= rest_after_ns and not application.starts_from_rest:
            application.is_resting = True
            why = f"no request for {in_s(quiet_ns)}: it rests without replicas until the next one"
            out.append(actions.Decided("rest", why, application=state.key))
            if state.parts.wake_ns:
                plan = application.plan
                application.rested_from = plan and structs.replace(without_spare(plan), shed=0.0)
            self._enforce(now_ns, {state.key: no_replicas(state, why)}, out)
            return False
        if quiet_ns <= QUIET_NS + state.policies.scale.period_ns or len(self._applications) == 1:
            return True
        return any(
            application.progress is PlanProgress.NO_ROOM for application in self._applications.values()
        )  # they may need its room

    def freeze(self, key: str) -> None:
        """Make no more plans for a version that gets no more requests: it keeps the replicas that serve its queue."""
        self._applications[key].is_frozen = True

    def retire(self, now_ns: int, key: str, out: list[Action]) -> None:
        """Stop all replicas of a frozen version that has no requests left."""
        self._enforce(now_ns, {key: no_replicas(self._applications[key].state, "it retires")}, out)

    # Events of workers

    def ready(self, now_ns: int, event: events.WorkerReady, out: list[Action]) -> None:
        """A worker has started: its replica serves, or serves in another shape, unless it waits for other workers."""
        worker = self._state.workers.get(event.worker)
        if worker is None or worker.state is not WorkerState.STARTING:
            return
        replica = worker.replica
        if replica.part is not None:
            if not on_part_ready(now_ns, self._state, replica, out):
                return
        else:
            self._state.enter(now_ns, worker, WorkerState.SERVING)
            if replica.is_provided:
                self._state.weights.ready(now_ns, replica.id)
        self._advance_all(now_ns, replica, out)

    def completed(self, now_ns: int, event: events.WorkerCompleted, out: list[Action]) -> None:
        """A part of a pipeline has all layers of its model."""
        replica = self._state.replicas.get(event.worker)
        if replica is not None and on_completed(now_ns, self._state, replica, out):
            self._advance_all(now_ns, replica, out)

    def batch_lost(self, now_ns: int, event: events.BatchLost, out: list[Action]) -> None:
        """A batch is lost with a part of its pipeline, which is reported lost as well, perhaps later."""
        replica = self._state.replicas.get(event.replica)
        if replica is not None and replica.pipeline is not None and replica.pipeline.is_ready:
            break_up(now_ns, self._state, replica.pipeline, None, out)

    def lost(self, now_ns: int, event: events.WorkerLost, out: list[Action]) -> None:
        """A worker died: replace it, unless it was told to stop. If it was the first of its replica, its batch is tried
        again, and is to blame unless the node is lost."""
        worker = self._state.workers.get(event.worker)
        if worker is None:
            return
        replica, is_blamed = worker.replica, self._state.ledger.states[worker.replica.node] is not NodeState.LOST
        if worker.drains:
            self._remove(now_ns, worker, event.error, is_blamed, out)
            return
        out.append(worker.loss(event.error, replica.stage.lose(now_ns, worker, event.error, is_blamed=is_blamed)))
        self._forget(now_ns, worker, event.error, is_blamed, out)
        application = self._applications[replica.stage.application.key]
        self._compare(now_ns, [application], out)
        if not is_blamed and application.progress is PlanProgress.NO_ROOM:
            # Its node is gone, perhaps the only one of its kind: plan for the others now, not when it is time.
            application.next_plan_ns = self.wake_ns = now_ns

    def stopped(self, now_ns: int, event: events.WorkerStopped, out: list[Action]) -> None:
        """A worker has stopped and freed its resources."""
        worker = self._state.workers.get(event.worker)
        if worker is None:
            return
        self._remove(now_ns, worker, "it was stopped", False, out)
        node = self._state.ledger.nodes[worker.replica.node]
        if node.on_demand and not self._release_after_ns(node.hardware):
            self._release_unused(now_ns, out)

    def _remove(self, now_ns: int, worker: ReplicaWorker, error: str, is_blamed: bool, out: list[Action]) -> None:
        """A worker is gone that was to stop, or stopped by itself."""
        drains, replica = worker.drains, worker.replica
        self._forget(now_ns, worker, error, is_blamed, out)
        if drains:
            self._advance_all(now_ns, replica, out)
        else:  # it stopped without an order
            self._compare(now_ns, [self._applications[replica.stage.application.key]], out)

    def _forget(self, now_ns: int, worker: ReplicaWorker, error: str, is_blamed: bool, out: list[Action]) -> None:
        """A worker is gone; with the first one its replica, and with that the pipeline that it was a part of."""
        replica = worker.replica
        pipeline = replica.pipeline
        is_stopping = pipeline is not None and pipeline.is_stopping
        self._state.forget(now_ns, worker, out)
        if replica.workers:
            return
        self._lose(now_ns, replica, error, is_blamed, out)
        if pipeline is not None and not is_stopping:
            break_up(now_ns, self._state, pipeline, replica, out)

    def resized(self, now_ns: int, event: events.WorkerResized, out: list[Action]) -> None:
        """A resize took effect, perhaps with other cores than ordered."""
        replica = self._state.replicas.get(event.worker)
        if replica is None:
            return
        self._state.change(now_ns, replica, structs.replace(replica.slot, cores=event.cores), replica.shape)
        replica.resizing = max(0, replica.resizing - 1)
        if not replica.resizing:
            self._state.ledger.resize(replica.id, max(event.cores, replica.target_cores))
        self._advance_all(now_ns, replica, out)

    def _advance_all(self, now_ns: int, replica: Replica, out: list[Action]) -> None:
        """After a replica has changed: work on its application's plan, and on all that lack room."""
        changed = self._applications[replica.stage.application.key]
        changed.look_whether_awake(now_ns, out)
        unmet = [
            application
            for application in self._applications.values()
            if application.progress is PlanProgress.NO_ROOM
            or (application is changed and application.progress is not PlanProgress.MET)
        ]
        if unmet:
            self._compare(now_ns, unmet, out)

    # Events of nodes

    def node_ready(self, now_ns: int, event: events.NodeReady, out: list[Action]) -> None:
        """A node can take replicas, and has those that were kept; or a node that has replicas has other capacities than
        before, and all are planned anew."""
        before = self._nodes.ready(event.node, now_ns)
        if before is not None:
            out.append(actions.Decided("node", f"{changed(before, event.node)}: all applications are planned anew"))
            self._refit(now_ns, event.node, out)
            self._plan_anew(now_ns)
        for application in self._applications.values():
            for stage in application.state.all_stages:
                stage.avoided_ns.pop(event.node.name, None)  # what it lacked may be there now
        for kept in event.kept:
            self._adopt(now_ns, event.node, kept, out)
        note_files(now_ns, self._state, event.node.name, event.weights)
        self._compare(now_ns, list(self._applications.values()), out)

    def _refit(self, now_ns: int, node: Node, out: list[Action]) -> None:
        """A node may have less than its replicas have reserved: some stop, the others get fewer cores. Those that stop
        are started elsewhere, if there is room; the last one of a stage stays, whatever it needs."""
        ledger = self._state.ledger
        out += self._state.weights.make_room([node.name])
        on = [replica for replica in self._state.replicas.values() if replica.node == node.name]
        staying = [replica for replica in on if replica.life is not Life.DRAINING]
        for replica in [replica for replica in staying if replica.shadows]:
            if min(ledger.free_millicores(node.name), ledger.free_memory_bytes(node.name)) < 0:
                self._detach(now_ns, replica.stage, [replica.id], f"{node.name} has become too small for it", out)
        leaving = [worker.id for replica in on for worker in replica.workers if worker.state is WorkerState.DRAINING]
        free_bytes = ledger.free_memory_bytes(node.name) + sum(ledger.reservations[id].memory_bytes for id in leaving)
        while free_bytes < 0 and (victim := expendable(staying)) is not None:
            free_bytes += ledger.reservations[victim.id].memory_bytes
            self._stop(now_ns, victim.stage, [victim.id], f"{node.name} has too little memory for it now", out)
            staying = [replica for replica in staying if replica.life is not Life.DRAINING]
        there = millicores(node.cores)
        while (wanted := sum(millicores(replica.target_cores) for replica in staying)) > there:
            victim = expendable([replica for replica in staying if not self._resizes(replica.stage)])
            if victim is None:
                break
            self._stop(now_ns, victim.stage, [victim.id], f"{node.name} has too few cores for it now", out)
            staying = [replica for replica in staying if replica.life is not Life.DRAINING]
        for replica in staying if wanted > there else ():
            cores = max(1, millicores(replica.target_cores) * there // wanted) / MILLI
            ledger.resize(replica.id, cores)
            replica.order_cores(cores)
            out.append(actions.ResizeWorker(replica.id, cores))

    def _resizes(self, stage: StageState) -> bool:
        """Whether replicas of a stage are resized in place, by the plan in force."""
        plan = self._applications[stage.application.key].plan
        return plan is None or any(target.in_place for target in plan.stages if target.stage == stage.name)

    def _adopt(self, now_ns: int, node: Node, kept: events.KeptWorker, out: list[Action]) -> None:
        """Take over a replica that an earlier core has started. One that is of no use is told to stop; it has what it
        reserves until it has stopped."""
        state, spec = self._state, kept.spec
        id = kept.worker
        assert id < state.first_worker, f"worker {id} is kept, which may be one of this core"
        out.append(actions.AdoptWorker(id, spec, kept.is_ready))
        stages = [stage for application in state.applications.values() for stage in application.all_stages]
        stage = next((stage for stage in stages if stage.name == spec.stage), None)
        belief = stage.beliefs.get((spec.variant, spec.slot.hardware)) if stage is not None else None
        if stage is None or belief is None:
            out.append(actions.StopWorker(id, "no application has such a replica"))
            return
        why = why_unfit(spec, node)
        reservation = Reservation.of(spec, belief, node.name, spec.device)
        if not state.ledger.reserve(id, reservation):
            why = why or f"{node.name} has no room for it"
            state.ledger.force(id, reservation)
        wanted = structs.replace(spec, node=None, device=None, shape=ALONE)
        state.replicas[id] = replica = Replica(id, wanted, stage, now_ns, node.name, spec.device)
        state.workers[id] = replica.workers[0]
        stage.pool.add(replica)
        if why:
            self._stop(now_ns, stage, [id], why, out)
            return
        if kept.is_ready:
            state.enter(now_ns, replica.workers[0], WorkerState.SERVING)
        application = self._applications[stage.application.key]
        application.look_whether_awake(now_ns, out)
        application.keeps_until_ns = now_ns + MEASURE_NS

    def node_lost(self, now_ns: int, event: events.NodeLost, out: list[Action]) -> None:
        """A node has failed; its replicas are reported separately."""
        self._nodes.lose(now_ns, event.node)
        self._state.weights.lose(event.node)
        out.append(actions.Decided("node", f"node {event.node} is lost: {event.error}"))

    def node_released(self, now_ns: int, event: events.NodeReleased, out: list[Action]) -> None:
        """A node has been given back."""
        self._nodes.released(event.node)
        self._state.weights.lose(event.node)

    # Events of transfers

    def transferred(self, now_ns: int, event: events.Transferred, out: list[Action]) -> None:
        """A node has the weights that it was to receive; the driver goes on with the starts that wait for them."""
        self._state.weights.arrived(now_ns, event.transfer, event.node)

    def transfer_failed(self, now_ns: int, event: events.TransferFailed, out: list[Action]) -> None:
        """A node will not get the weights. The replicas that wait for them are reported lost separately; the provision
        policy decides anew on places and sources. A part that was to get the other layers gets them from elsewhere."""
        if not self._state.weights.failed(now_ns, event.transfer, event.node):
            return
        failed = [
            replica
            for replica in self._state.replicas.values()
            if replica.transfer == event.transfer and replica.completes and replica.node == event.node
        ]
        if failed:
            order_other_layers(now_ns, self._state, failed, out)

    # Plans

    def planned(self, now_ns: int, event: events.Planned, out: list[Action]) -> None:
        """The planner has answered. Only the answer to the last request counts."""
        if self.plan_input is None or event.number != self.plan_number:
            return
        given, self.plan_input = self.plan_input, None
        self._accept(now_ns, given, event, out)
        if any(application.waits_for_plan(now_ns) for application in self._applications.values()):
            self.wake_ns = now_ns

    def _update_plans(self, now_ns: int, due: Sequence[ControlledApplication], out: list[Action]) -> None:
        """Call the policies of the applications, or order their call beside the event loop."""
        self.plan_number += 1
        given = self._plan_input(now_ns, due)
        if self._plans_beside:
            self.plan_input = given
            out.append(actions.RequestPlan(self.plan_number))
        else:
            self._accept(now_ns, given, self.planner.plan(given), out)

    def _plan_input(self, now_ns: int, due: Sequence[ControlledApplication]) -> PlanInput:
        keys = {application.state.key for application in due}
        others = tuple(
            demand
            for key, application in self._applications.items()
            if key not in keys
            for demand in demands_of(key, application.plan, application.weight)
        )
        views = [
            ApplicationView(
                key=application.state.key,
                stages=self._stage_views(now_ns, application.state),
                ingress=self.traffic(application.state),
                share=application.share,
                weight=application.weight,
                paths=application.state.graph.paths,
                plan=None if application.is_inherited else application.plan,
                choice=application.state.oversight.choice if application.state.oversight is not None else "",
            )
            for application in due
        ]
        return PlanInput(self.plan_number, now_ns, self._state.ledger.views(), tuple(views), others)

    def _stage_views(self, now_ns: int, application: ApplicationState) -> tuple[StageView, ...]:
        """The stages as the application's scaling policy sees them."""
        views = application.stage_views()
        if not self.planner.policies[application.key].scale.asks_for_starts:
            return views
        return tuple(
            replace(view, starts_ns=expected_starts_ns(now_ns, self._state, application.stages[view.name]))
            for view in views
        )

    def _accept(self, now_ns: int, given: PlanInput, planned: events.Planned, out: list[Action]) -> None:
        plans: dict[str, Plan] = {}
        for view in given.due:
            application = self._applications.get(view.key)
            if application is None or (application.is_frozen and not application.is_stranded):
                continue  # it has ended, or was frozen, while it was planned
            application.plan_error = planned.errors.get(view.key, "")
            if application.plan_error:
                out.append(actions.Decided("planner", f"no new plan: {application.plan_error}", application=view.key))
            else:
                application.planned_share = view.share
            if view.key in planned.plans:
                application.is_inherited = False
                plans[view.key] = planned.plans[view.key]
            elif application.wakes_without_plan:
                assert application.rested_from is not None
                plans[view.key] = application.rested_from
        self._enforce(now_ns, plans, out)

    def _enforce(self, now_ns: int, plans: Mapping[str, Plan], out: list[Action]) -> None:
        """Put the plans in force, and work towards those that are new targets."""
        changed: list[ControlledApplication] = []
        for key, plan in plans.items():
            application = self._applications[key]
            before, application.plan = application.plan, plan
            if plan.shed != application.state.shed:
                application.state.shed_requests(plan.shed)
            if before is not None and plan.same_target(before):
                if (before.feasible, before.gave_up, before.shed) != (plan.feasible, plan.gave_up, plan.shed):
                    out.append(actions.Decided("kept", plan.why, plan=plan, application=key))
                continue
            out.append(actions.Decided("plan", plan.why, plan=plan, application=key))
            for target in plan.stages:
                application.state.stages[target.stage].follow(target)
            self._note_rest(application, out)
            changed.append(application)
        if changed:
            self._compare(now_ns, changed, out)

    def _note_rest(self, application: ControlledApplication, out: list[Action]) -> None:
        """A plan is in force. If it has no replicas, and no request waits for any, the next ones will."""
        state, wake_ns = application.state, application.state.parts.wake_ns
        if wake_ns and not state.is_waking and state.is_idle and application.plan and not application.plan.has_replicas:
            state.set_waking(True)
            why = f"it has no replicas: requests wait up to {in_s(wake_ns)} for the next ones"
            out.append(actions.Decided("waking", why, application=state.key))

    def _compare(self, now_ns: int, applications: Sequence[ControlledApplication], out: list[Action]) -> None:
        """Compare the cluster with the plans of these applications and order the differences, as far as possible now.

        Stops and shrinks of all stages come first. Their room is free only when the driver has carried them out; until
        then, a lack of room is not reported as a shortage.
        """
        differences = [
            (application, target, self._difference(application, target))
            for application in applications
            if application.plan is not None
            for target in application.plan.stages
        ]
        for application, target, difference in differences:
            stage = application.state.stages[target.stage]
            self._stop(now_ns, stage, difference.stop, "the plan has no use for it", out)
        for application, target, difference in differences:
            stage = application.state.stages[target.stage]
            self._resize(difference.shrink, out)
            self._detach(now_ns, stage, difference.detach, "the plan has no such shadow", out)
        for application in applications:
            application.progress, application.compared_ns = PlanProgress.MET, now_ns
            application.unplaced.clear()
        keys_on_hold = {application.state.key for application, _, difference in differences if difference.holds}
        without_room: list[tuple[ReplicaSpec, Belief]] = []
        for application, target, difference in differences:
            holds = application.state.key in keys_on_hold
            progress = self._advance(now_ns, application, target, difference, holds, without_room, out)
            application.progress = max(application.progress, progress)
        if without_room:
            self._nodes.acquire_for(now_ns, without_room, out)

    def _difference(self, application: ControlledApplication, target: StagePlan) -> Difference:
        pool = application.state.stages[target.stage].pool
        staying = [replica for replica in pool.replicas.values() if replica.life is not Life.DRAINING]
        refused = {
            replica.id for replica in staying if not replica.resizing and replica.slot.cores != replica.target_cores
        }
        views = pool.views()
        brings_weights = application.state.policies.provision.brings_weights
        prefers = fullest_nodes_first(views) if brings_weights else oldest_first
        difference = diff(views, target, pool.present_rps, pool.rate_rps, refused, prefers)
        if difference.stop and any(replica.pipeline is not None for replica in staying):
            latest = [view.id for view in sorted(views, key=prefers, reverse=True)]
            difference = stops_whole_pipelines(difference, pool.replicas, latest)
        if not application.keeps_all:
            return difference
        return difference.keeping({replica.id for replica in staying if replica.life is Life.READY})

    def _advance(
        self,
        now_ns: int,
        application: ControlledApplication,
        target: StagePlan,
        difference: Difference,
        holds: bool,
        without_room: list[tuple[ReplicaSpec, Belief]],
        out: list[Action],
    ) -> PlanProgress:
        """Grow and start the replicas that one stage is to have; if there is no room, make room or report the shortage.
        `holds` says whether any stage of the application keeps replicas until others are ready. `without_room` collects
        replicas."""
        stage = application.state.stages[target.stage]
        shortage = self._resize(difference.grow, out)
        attaching = self._attach(now_ns, application, stage, difference.attach, holds, out)
        is_too_soon = bool(difference.start) and now_ns < stage.not_before_ns
        moves = False
        if shortage is not None:
            left = self._move(now_ns, stage, difference, out)
            application.unplaced += left
            moves = not left
            if moves:
                shortage = None
            elif not any(replica.will_free_cores for replica in self._state.replicas.values()):
                without_room += left
        started = self._start(now_ns, stage, difference.start, out)
        needed = planned_of(difference.start[started:], target)
        missing = [(spec, stage.beliefs[spec.variant, spec.slot.hardware]) for spec in needed]
        application.unplaced += missing
        if missing and not is_too_soon:
            spec, provision = missing[0][0], stage.application.policies.provision
            weights_bytes = first_weights_bytes(provision, stage.start_costs(spec))
            scarce = self._scarce(*missing[0])
            shortage = Shortage(spec.variant, spec.slot, node=spec.node, weights_bytes=weights_bytes, scarce=scarce)
            without_room += missing
        if shortage is not None:
            if not difference.holds or self._can_acquire(shortage):
                self._report(application, stage, shortage, holds, out)
            elif shortage.replica is not None or self._can_make_room(stage, difference.start):
                self._make_room(now_ns, stage, difference, out)
            else:
                self._report(application, stage, shortage, False, out)
            return PlanProgress.NO_ROOM
        if is_too_soon:
            return max(PlanProgress.TOO_SOON, attaching)
        application.forget_shortages(stage.name, of_shadows=attaching is not PlanProgress.NO_ROOM)
        waits = difference.holds or moves or difference.detach or [spec for spec in difference.start if spec.shape]
        return max(PlanProgress.WAITING if waits else PlanProgress.MET, attaching)

    def _can_acquire(self, shortage: Shortage) -> bool:
        """Whether a node could be acquired for what lacks room. No other one helps a replica that the plan wants on a
        certain node."""
        node = shortage.node if shortage.replica is None else self._state.replicas[shortage.replica].spec.node
        return self._nodes.can_acquire(shortage.slot.hardware, node)

    def _scarce(self, spec: ReplicaSpec, belief: Belief) -> str:
        """Of what the ready nodes have too little for a new replica, as text; empty if one has room for it."""
        ledger = self._state.ledger
        if ledger.sites(spec, belief, one_of_equal=True):
            return ""
        ready = [
            view for view in ledger.views() if view.state is NodeState.READY and spec.node in (None, view.node.name)
        ]
        return why_impossible(spec, [view.node for view in ready]) or what_is_scarce(spec, belief, ready)[1]

    def _move(
        self, now_ns: int, stage: StageState, difference: Difference, out: list[Action]
    ) -> list[tuple[ReplicaSpec, Belief]]:
        """Start a larger replica on another node for each one that cannot grow on its own, until one has no room;
        returns those without room. The smaller one serves until the larger one is ready."""
        left: list[tuple[ReplicaSpec, Belief]] = []
        for (id, cores), spec in zip(difference.grow, difference.grown, strict=True):
            replica = self._state.replicas[id]
            if replica.target_cores == cores:
                continue
            if left or not self._start(now_ns, stage, [spec], out):
                left.append((spec, replica.service_rate.belief))
        return left

    def _resize(self, resizes: Resizes, out: list[Action]) -> Shortage | None:
        """Order resizes; returns the last one without room, if any."""
        shortage = None
        for id, cores in resizes:
            replica = self._state.replicas[id]
            if replica.target_cores == cores:
                continue
            if not self._state.ledger.grow(replica.id, cores):
                slot = replica.spec.with_cores(cores).slot
                shortage = Shortage(replica.spec.variant, slot, id, replica.target_cores, replica.node)
                continue
            replica.order_cores(cores)
            out.append(actions.ResizeWorker(id, cores))
        return shortage

    def _detach(self, now_ns: int, stage: StageState, ids: Sequence[ReplicaId], why: str, out: list[Action]) -> None:
        """Stop the shadows of replicas, which serve alone from now on."""
        for id in ids:
            for worker in stage.pool.replicas[id].shadows:
                self._state.enter(now_ns, worker, WorkerState.DRAINING)
                out.append(actions.StopWorker(worker.id, why))

    def _attach(
        self,
        now_ns: int,
        application: ControlledApplication,
        stage: StageState,
        attachments: Attachments,
        holds: bool,
        out: list[Action],
    ) -> PlanProgress:
        """Start the shadows of replicas that are ready; says when to try those again that could not start."""
        progress, ledger = PlanProgress.MET, self._state.ledger
        for id, shadow in attachments:
            replica = stage.pool.replicas[id]
            belief, number = replica.service_rate.belief, WorkerId(self._state.next_worker)
            memory_bytes = belief.of((shadow,)).memory_bytes - belief.of(ALONE).memory_bytes
            if replica.life is not Life.READY or len(replica.workers) > 1 or replica.pipeline is not None:
                progress = max(progress, PlanProgress.WAITING)
            elif now_ns < stage.shadow_backoff.not_before_ns:
                progress = max(progress, PlanProgress.TOO_SOON)
            elif not ledger.reserve(number, Reservation(replica.node, millicores(shadow.cores), memory_bytes)):
                progress = PlanProgress.NO_ROOM
                slot = replica.spec.slot
                shortage = Shortage(replica.spec.variant, slot, id, slot.cores, replica.node, shadow)
                self._report(application, stage, shortage, holds, out)
            else:
                self._state.next_worker += 1
                self._state.workers[number] = worker = ReplicaWorker(number, replica, shadow)
                replica.workers.append(worker)
                stage.pool.note_change(replica)
                out += self._state.weights.make_room([replica.node])
                placed = structs.replace(replica.spec, node=replica.node, device=replica.device, shape=(shadow,))
                out.append(actions.StartWorker(number, placed.with_cores(replica.target_cores), id))
        return progress

    def _start(self, now_ns: int, stage: StageState, specs: Sequence[ReplicaSpec], out: list[Action]) -> int:
        """Start missing replicas, equal ones together, until one has no room; returns how many were started: none while
        those that were lost make it wait."""
        if now_ns < stage.not_before_ns:
            return 0
        started = 0
        for spec, equal in groupby(specs):
            count = len(list(equal))
            begun = start(now_ns, self._state, stage, spec, count, out)
            started += begun
            if begun < count:
                break
        return started

    def _make_room(self, now_ns: int, stage: StageState, difference: Difference, out: list[Action]) -> None:
        """A replacement has no room: shrink or stop one of the replicas that are kept until it is ready."""
        if stage.pool.is_changing:  # this may make room without a loss of capacity
            return
        if difference.hold_detach:
            why = "the replacement of its replica has no room while it serves"
            self._detach(now_ns, stage, difference.hold_detach[:1], why, out)
        elif difference.hold_shrink:
            self._resize(difference.hold_shrink[:1], out)
        else:
            self._stop(now_ns, stage, difference.hold[:1], "its replacement has no room while it runs", out)

    def _can_make_room(self, stage: StageState, specs: Sequence[ReplicaSpec]) -> bool:
        """Whether a missing replica would fit if it were the only one of its application."""
        leaving = {
            id
            for id, worker in self._state.workers.items()
            if worker.replica.stage.application is stage.application or worker.replica.life is Life.DRAINING
        }
        left = self._state.ledger.without(leaving)
        return any(
            left.sites(spec, stage.beliefs[spec.variant, spec.slot.hardware], one_of_equal=True) for spec in set(specs)
        )

    def _report(
        self,
        application: ControlledApplication,
        stage: StageState,
        shortage: Shortage,
        holds: bool,
        out: list[Action],
    ) -> None:
        """Log a shortage once; not while room is about to become free."""
        will_have_room = (
            holds
            or self._nodes.is_acquiring
            or self._can_acquire(shortage)
            or any(replica.will_free_cores for replica in self._state.replicas.values())
        )
        if not will_have_room and application.is_new(stage.name, shortage):
            key = application.state.key
            out.append(actions.Decided(shortage.kind, shortage.why, stage.name, shortage.replica, application=key))

    def _stop(self, now_ns: int, stage: StageState, ids: Sequence[ReplicaId], why: str, out: list[Action]) -> None:
        """Stop replicas; a replica with a batch finishes it first. The parts of a pipeline stop together."""
        stopping: dict[ReplicaId, Replica] = {}
        for id in self._with_pipelines(stage, ids):
            replica = stage.pool.replicas[id]
            if replica.pipeline is not None:
                stopping[replica.pipeline.id] = replica
            self._state.enter(now_ns, replica.workers[0], WorkerState.DRAINING)
            if replica.batch is None and (replica.pipeline is None or not replica.pipeline.has_batch):
                if replica.pipeline is None:
                    out.append(actions.StopWorker(id, why))
            else:
                out.append(actions.Decided("drain", why, stage.name, id, application=stage.application.key))

        for replica in stopping.values():
            out += stops_of(replica, why)

    def _with_pipelines(self, stage: StageState, ids: Sequence[ReplicaId]) -> list[ReplicaId]:
        """The same replicas, with the rest of their pipelines."""
        replicas = [stage.pool.replicas[id] for id in ids]
        parts = [[replica] if replica.pipeline is None else replica.pipeline.members for replica in replicas]
        return list(dict.fromkeys(replica.id for replica in chain.from_iterable(parts)))

    def _watch_batches(self, now_ns: int, out: list[Action]) -> None:
        """Let the data path drop hopeless requests of stalled batches, and give up replicas whose batch has run for the
        response timeout. Pipelines that are complete and run no batch any more dissolve."""
        if self._state.dissolving:
            for replica in dissolve(now_ns, self._state):
                self._advance_all(now_ns, replica, out)
        self._watch_ns = next_ns = now_ns + STALL_NS_MIN
        stalled, given_up = list[ReplicaId](), list[ReplicaId]()
        until_ns = now_ns - WATCHED_NS_MIN
        for stage in [stage for application in self._applications.values() for stage in application.state.all_stages]:
            since_ns, stage.watched_ns = stage.watched_ns, until_ns
            if stage.look_ns < next_ns:
                since_ns, stage.look_ns = -1, FOREVER_NS
            for id, batch in reversed(stage.pool.running.items()):
                if batch.started_ns > until_ns:
                    continue
                if batch.started_ns <= since_ns:
                    break
                give_up_ns, stalled_ns = stage.give_up_ns(batch), batch.stalled_ns
                look_ns = min(give_up_ns, stalled_ns)
                if now_ns >= give_up_ns:
                    given_up.append(id)
                    continue
                if now_ns >= stalled_ns:
                    stalled.append(id)
                    look_ns = give_up_ns
                self._watch_ns = min(self._watch_ns, look_ns)
                stage.look_ns = min(stage.look_ns, stalled_ns, look_ns)
        for id in sorted(stalled):
            self._watch_ns = min(self._watch_ns, self._expire(now_ns, self._state.replicas[id], out))
        if given_up:
            self._give_up_late(now_ns, sorted(given_up), out)

    def _give_up_late(self, now_ns: int, ids: Sequence[ReplicaId], out: list[Action]) -> None:
        """Give up replicas whose batch has run for the response timeout, but of each pipeline only one part: what
        becomes of the batches of the others follows."""
        replicas = [self._state.replicas[id] for id in ids]
        for replica, pipeline in [(each, each.pipeline) for each in replicas]:
            if pipeline is replica.pipeline and replica.batch is not None:
                ran = in_s(now_ns - replica.batch.started_ns)
                why = f"its batch has run for {ran}, longer than its response timeout"
                self._give_up(now_ns, replica, why, out)

    def _give_up(self, now_ns: int, owner: Replica, why: str, out: list[Action]) -> None:
        """Stop a replica whose batch does not finish, and go on as if it were lost. In a pipeline, that is the part
        that the oldest batch has reached, as far as it is known."""
        id, pipeline = owner.id, owner.pipeline
        if pipeline is not None and (oldest := pipeline.oldest) is not None and oldest.batch is not None:
            silent, id = pipeline.silent, oldest.id
            if silent is not None and silent[0] == oldest.batch.id:
                id = silent[1]
        out.append(actions.StopWorker(id, why))
        self.lost(now_ns, events.WorkerLost(id, why), out)

    def silent(self, now_ns: int, event: events.BatchSilent, out: list[Action]) -> None:
        """A worker says nothing while it runs a batch: give its replica up if it hangs. Of the parts of a pipeline,
        which wait for each other, only the one with the oldest batch can be found to hang."""
        replica = self._state.replicas.get(event.replica)
        if replica is None:
            return
        pipeline = replica.pipeline
        owner = replica if pipeline is None else pipeline.oldest
        batch = owner.batch if owner is not None else None
        if owner is None or batch is None or batch.id != event.batch:
            return
        if pipeline is not None:
            pipeline.silent = batch.id, replica.id
        workers = [owner] if pipeline is None else pipeline.members
        # A first batch may take far longer than others.
        has_run = any(each.batches > int(each.batch is not None) for each in workers)
        if has_run and owner.stage.hangs(batch, event.silent_ns):
            ran, cost = in_s(now_ns - batch.started_ns), in_ms(batch.cost_ns)
            why = f"it hangs: its batch has run for {ran}, where {cost} are expected, and nothing holds it up"
            self._give_up(now_ns, owner, why, out)


def expendable(replicas: Sequence[Replica]) -> Replica | None:
    """The replica to stop first: the newest one of the stage that has the most; None if each is the last one of its
    stage."""
    counts = {
        replica.id: sum(other.life is not Life.DRAINING for other in replica.stage.pool.replicas.values())
        for replica in replicas
    }
    spare = [replica for replica in replicas if counts[replica.id] > 1]
    return max(spare, key=lambda replica: (counts[replica.id], replica.id), default=None)


def changed(before: Node, after: Node) -> str:
    """How the capacities of a node have changed, as text."""
    parts = []
    if before.cores != after.cores:
        parts.append(f"{counted(after.cores, 'core')} now, not {before.cores:g}")
    if before.memory_bytes != after.memory_bytes:
        parts.append(f"{after.memory_bytes / GIB:.3g} GiB of memory now, not {before.memory_bytes / GIB:.3g}")
    return f"{after.name} has {listed(parts)}"


def own_traffic(application: ApplicationState) -> Traffic:
    """The requests that arrived at this version of the application."""
    return Traffic(buckets=tuple(application.ingress.buckets), bucket_ns=application.ingress.bucket_ns)


def no_replicas(application: ApplicationState, why: str) -> Plan:
    """A plan without replicas."""
    return Plan(tuple(StagePlan(stage.name, (), batch_max=1) for stage in application.all_stages), why)
