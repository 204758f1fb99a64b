"""The core: all decisions of a run. Everything in sloop revolves around `handle`: an event goes in, actions come out.

It has no clock, thread, socket, file or random number (law 1). A driver, live or simulated, calls `handle(now_ns,
event)` with non-decreasing times and carries out the actions; `wake_ns` says when to call it with `WOKE` if nothing
happens before. The same events give the same actions, always: that is what replay checks.

It serves one application or several, each in one version or more (`sloop.core.rollout`). As long as there is only one,
events go straight to its data path.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, cast

from sloop import events
from sloop.actions import Action, Assigned, Decided, End, RequestSimulation, Rollout, VersionState
from sloop.app.graph import declared_name
from sloop.core.application import ApplicationParts, ApplicationState, Beliefs, why_not_in_place
from sloop.core.control import ControlPath
from sloop.core.dispatch import RETRY_NS_MIN, DataPath
from sloop.core.ledger import Ledger
from sloop.core.oversight import Oversight
from sloop.core.planner import FAILURES, Planner
from sloop.core.protocols import ServiceGap
from sloop.core.replica import Replica
from sloop.core.rollout import Rollouts, Version
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.core.views import PlanInput, StageView
from sloop.events import Event
from sloop.vocabulary import BatchId, Canary, Node, Outcome, Plan, Request, version_key

__all__ = ["ApplicationParts", "Beliefs", "Core"]

Build = Callable[[str, str, Mapping[str, Any]], ApplicationParts]
"""Makes the parts of an application version from its name, its version and its definition (`Deployed`)."""

Step = Callable[[int, Any, list[Action]], None]


class Core:
    """All decisions for the applications on one cluster. `build` is needed only if applications are deployed later.

    Workers are numbered from `first_worker` on. A worker keeps its number for life, also under the next core that
    adopts it, so a core that may adopt begins above all numbers of the cores before it.
    """

    def __init__(
        self,
        applications: Sequence[ApplicationParts],
        nodes: Sequence[Node],
        build: Build | None = None,
        *,
        first_worker: int = 0,
    ) -> None:
        self.state = State(Ledger(nodes), first_worker)
        self.build = build
        """Makes the parts of applications that are deployed later."""
        self._batch_ids = cast(Iterator[BatchId], count())
        self._paths: dict[str, DataPath] = {}
        """The data path of each application version, by key."""
        self._control = ControlPath(self.state, self._lose, self._expire)
        self._rollouts = Rollouts(self._control)
        self._counted = self._rollouts.counted
        self._steps: dict[type, Step] = {}
        self._active: tuple[StageState, ...] = ()
        """The stages that may have waiting visits. Others are skipped when batches are formed."""
        self._active_keys: set[str] = set()
        self._is_plain = False
        """Whether there is only one application, in one version."""
        self._draining_why = ""
        self._simulations = 0
        """How many simulations were ordered; each is known by its number."""
        self._arrived_ns = -1
        """The last instant at which a request arrived that was followed by other events."""
        self.wake_ns = 0
        for parts in applications:
            self._add(0, parts)
        self._bind()

    def _add(self, now_ns: int, parts: ApplicationParts, canary: Canary | None = None) -> Version:
        application = ApplicationState(parts, self.state.replicas, now_ns)
        assert application.key not in self.state.applications, application.key
        self.state.applications[application.key] = application
        control = self._control.add(application, now_ns)
        self._connect(application)
        self.wake_ns = now_ns
        application.refuse(self._draining_why)
        return self._rollouts.add(now_ns, application, control, canary)

    def _connect(self, application: ApplicationState) -> None:
        """Give an application version a data path with its policies."""
        path = DataPath(application, application.policies, self._batch_ids, self.state.devices)
        self._paths[application.key] = path
        for stage in application.all_stages:
            path.bind(stage)

    @property
    def _overseen(self) -> list[ApplicationState]:
        return [each for each in self.state.applications.values() if each.oversight is not None]

    def _bind(self) -> None:
        """Connect events to their methods: directly to the data path of the only application, if there is only one."""
        control = self._control
        self._is_plain = self._rollouts.is_plain and not self._overseen
        self._steps = {
            events.WorkerReady: control.ready,
            events.WorkerCompleted: control.completed,
            events.BatchLost: self._lose_batch,
            events.BatchSilent: control.silent,
            events.WorkerLost: control.lost,
            events.WorkerStopped: control.stopped,
            events.WorkerResized: control.resized,
            events.NodeReady: control.node_ready,
            events.NodeLost: control.node_lost,
            events.NodeReleased: control.node_released,
            events.Transferred: control.transferred,
            events.TransferFailed: control.transfer_failed,
            events.Planned: control.planned,
            events.Deployed: self._deploy,
            events.Promoted: self._promote,
            events.Removed: self._remove,
            events.SystemChanged: self._change_system,
            events.Simulated: self._simulated,
            events.Draining: self._drain,
            events.WorkerProgressed: _ignore,
            events.Woke: _ignore,
        }
        if self._is_plain:
            (path,) = self._paths.values()
            self._steps |= {
                Request: path.arrive,
                events.Finished: path.finish,
                events.BatchFailed: path.fail,
                events.Cancelled: path.cancel,
            }
        else:
            self._steps |= {
                Request: self._arrive,
                events.Finished: self._finish,
                events.BatchFailed: self._fail,
                events.Cancelled: self._cancel,
            }
        self._activate(self.state.applications.values())

    # What drivers and observers read

    def plan_of(self, key: str) -> Plan | None:
        """The plan in force of an application version."""
        return self._control.of(key).plan

    @property
    def planner(self) -> Planner:
        """Answers `RequestPlan`: `planner.plan(plan_input)`."""
        return self._control.planner

    @property
    def plan_input(self) -> PlanInput | None:
        """The input of the plan that was last requested; None if it has been answered."""
        return self._control.plan_input

    @property
    def plan_number(self) -> int:
        """The number of the last `RequestPlan`; 0 if there was none."""
        return self._control.plan_number

    def stage_views(self, key: str) -> tuple[StageView, ...]:
        """The stages of an application version as scaling policies see them. Calls no policy, so it can be read at any
        time."""
        return self.state.applications[key].stage_views()

    def versions(self, name: str) -> Sequence[Version]:
        """The versions of an application."""
        return self._rollouts.versions(name)

    def service_gap(self, now_ns: int, key: str, stage: str) -> ServiceGap | None:
        """See `sloop.core.protocols.Explains`."""
        application = self.state.applications.get(key)
        if application is None:
            return None
        found, shortage = application.stages[stage].service_gap(now_ns), self._control.of(key).shortage_of(stage)
        if found is not None and shortage and not application.stages[stage].pool.replicas:
            why = f"no replica of stage {declared_name(stage)!r} can start: {shortage}"
            return ServiceGap(why, is_known=True, wait_ns=found.wait_ns)
        return found

    def plan_error(self, key: str) -> str:
        """See `sloop.core.protocols.Explains`."""
        return self._control.of(key).plan_error if key in self.state.applications else ""

    # Events

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> list[Action]:
        """Process one event at `now_ns`; returns the resulting actions, to be carried out in this order.

        `more_at_this_instant` says that the next call has another event of the same instant. Batches are then formed
        only after the last of these events, so that requests that arrive together can run together.
        """
        out: list[Action] = []
        if now_ns >= self.wake_ns:
            self._wake(now_ns, event, out)
        kind = type(event)
        self._steps[kind](now_ns, event, out)
        if more_at_this_instant:
            if kind is Request:
                self._arrived_ns = now_ns
            if self._counted:
                self._rollouts.count(out)
            return out
        # All events of this instant are processed: dispatch, and set the next wake-up. This runs for every event, so it
        # is inlined, and comparisons replace the slower calls of min.
        wake_ns = self._control.wake_ns
        for stage in self._active:
            queue = stage.queue
            if not queue.visits:
                continue
            if stage.pool.idle:
                wait_until_ns = stage.dispatch(now_ns, stage, out)
                if wait_until_ns < wake_ns:  # noqa: PLR1730
                    wake_ns = wait_until_ns
            elif not stage.pool.replicas and (
                kind is Request
                or self._arrived_ns == now_ns
                or (stage.after and any(visit.arrived_ns == now_ns for visit in queue.visits))
            ):
                self._control.wake(now_ns, stage.application, out)
            if queue.sweep_ns < wake_ns:  # noqa: PLR1730
                wake_ns = queue.sweep_ns
        self.wake_ns = wake_ns
        if self._counted:
            self._rollouts.count(out)
        return out

    def _wake(self, now_ns: int, event: Event, out: list[Action]) -> None:
        """Run the control tick and the queue sweeps that are due. The first tick, which plans, follows what is said of
        nodes: they may have replicas already, or be lost."""
        if not self._control.has_begun and isinstance(event, events.NodeReady | events.NodeLost):
            return
        if now_ns >= self._control.wake_ns:
            self._control.tick(now_ns, out)
            if not self._is_plain:
                self._advance_rollouts(now_ns, out)
                for application in self._overseen:
                    assert application.oversight is not None
                    if now_ns >= application.oversight.next_ns:
                        self._oversee(now_ns, application, application.oversight, None, out)
        for stage in self._active:
            if now_ns >= stage.queue.sweep_ns:
                self._paths[stage.application.key].sweep(now_ns, stage, out)

    def _lose(self, now_ns: int, replica: Replica, error: str, is_blamed: bool, out: list[Action]) -> None:
        application = replica.stage.application
        self._touch(application)
        self._paths[application.key].lose(now_ns, replica, error, out, is_blamed=is_blamed)

    def _lose_batch(self, now_ns: int, event: events.BatchLost, out: list[Action]) -> None:
        replica = self.state.replicas.get(event.replica)
        if replica is not None and replica.batch is not None and replica.batch.id == event.batch:
            self._touch(replica.stage.application)
            self._control.batch_lost(now_ns, event, out)
            self._paths[replica.stage.application.key].lose_batch(now_ns, event, out)

    def _expire(self, now_ns: int, replica: Replica, out: list[Action]) -> int:
        return self._paths[replica.stage.application.key].expire(now_ns, replica, out)

    def _drain(self, now_ns: int, event: events.Draining, out: list[Action]) -> None:
        """The server shuts down: reject requests from now on."""
        self._draining_why = "the server is shutting down"
        for application in self.state.applications.values():
            application.refuse(self._draining_why)

    # Several applications or versions

    def _touch(self, application: ApplicationState) -> None:
        """Look at the stages of an application when batches are formed."""
        if application.key not in self._active_keys:
            self._active_keys.add(application.key)
            self._active += application.all_stages

    def _activate(self, applications: Iterable[ApplicationState]) -> None:
        """Look at the stages of these applications only."""
        self._active, self._active_keys = (), set()
        for application in applications:
            self._touch(application)

    def _arrive(self, now_ns: int, request: Request, out: list[Action]) -> None:
        application = self._rollouts.choose(request)
        if application is None:
            version = f", version {request.version}," if request.version else ""
            why = f"application {request.application!r}{version} is not served"
            out.append(End(request.id, Outcome.REJECTED, why, RETRY_NS_MIN))
            return
        if len(self._rollouts.versions(application.parts.name)) > 1:
            out.append(Assigned(request.id, application.key))
            request = self._rollouts.with_own_deadline(request, application)
        if application.oversight is not None:
            self._rollouts.count_end(request.id, application.oversight.requests)
        self._touch(application)
        self._paths[application.key].arrive(now_ns, request, out)

    def _finish(self, now_ns: int, event: events.Finished, out: list[Action]) -> None:
        replica = self.state.replicas.get(event.replica)
        if replica is not None:
            self._touch(replica.stage.application)
            self._paths[replica.stage.application.key].finish(now_ns, event, out)

    def _fail(self, now_ns: int, event: events.BatchFailed, out: list[Action]) -> None:
        replica = self.state.replicas.get(event.replica)
        if replica is not None:
            self._touch(replica.stage.application)
            self._paths[replica.stage.application.key].fail(now_ns, event, out)

    def _cancel(self, now_ns: int, event: events.Cancelled, out: list[Action]) -> None:
        for path in self._paths.values():
            path.cancel(now_ns, event, out)

    def _deploy(self, now_ns: int, event: events.Deployed, out: list[Action]) -> None:
        """Start a version of an application. Drivers check definitions beforehand; one that cannot be built changes
        nothing."""
        assert self.build is not None, "this core cannot build applications"
        try:
            parts = self.build(event.application, event.version, event.definition)
        except Exception as error:  # what serves must go on serving
            why = f"its definition is not valid: {error}"
            out.append(Rollout(event.application, event.version, VersionState.RETIRED, 0.0, why))
            return
        self._rollouts.announce(now_ns, self._add(now_ns, parts, event.canary), out)
        self._bind()

    def _promote(self, now_ns: int, event: events.Promoted, out: list[Action]) -> None:
        self._rollouts.promote(now_ns, event.application, event.version, out)

    def _remove(self, now_ns: int, event: events.Removed, out: list[Action]) -> None:
        self._rollouts.remove(now_ns, event.application, event.version, out)
        self._bind()

    def cannot_change(self, parts: ApplicationParts) -> str:
        """Why the system of these parts cannot take over the version that they are of; empty if it can."""
        present = self.state.applications[parts.key].parts
        why = why_not_in_place(present.policies, parts.policies)
        return why or self._control.without_memory(parts)

    def _change_system(self, now_ns: int, event: events.SystemChanged, out: list[Action]) -> None:
        """Let another system decide for a version that starts or serves. Drivers check beforehand whether it can; one
        that cannot changes nothing."""
        assert self.build is not None, "this core cannot build applications"
        key = version_key(event.application, event.version)
        application = self.state.applications.get(key)
        if application is None or self._control.of(key).is_frozen:
            return  # it has ended, or gets no more requests
        try:
            parts = self.build(event.application, event.version, event.definition)
            why = self.cannot_change(parts)
        except Exception as error:  # what serves must go on serving
            why = f"its definition is not valid: {error}"
        if why:
            out.append(Decided("unchanged", f"another system cannot decide: {why}", application=key))
            return
        why = f"{parts.system} decides from now on, where {application.parts.system} did"
        out.append(Decided("system", why, application=key))
        self._control.reserve_memory(parts, out)
        self._hand_over(now_ns, application, knows_traffic=application.follow(now_ns, parts))

    def _hand_over(self, now_ns: int, application: ApplicationState, *, knows_traffic: bool) -> None:
        """The policies of a version are other ones."""
        self._connect(application)
        self._control.change_system(now_ns, application, knows_traffic=knows_traffic)
        self._bind()

    def _simulated(self, now_ns: int, event: events.Simulated, out: list[Action]) -> None:
        """A simulation is done, or has failed: tell the overseer that has asked for it, if it still waits."""
        for application in self._overseen:
            oversight = application.oversight
            if oversight is not None and oversight.number == event.number:
                oversight.number = -1
                self._oversee(now_ns, application, oversight, event, out)

    def _oversee(
        self,
        now_ns: int,
        application: ApplicationState,
        oversight: Oversight,
        simulated: events.Simulated | None,
        out: list[Action],
    ) -> None:
        """Ask an overseer, and do what it says."""
        key, present = application.key, oversight.choice
        if self._control.of(key).is_frozen:
            return
        try:
            guidance = oversight.decide(now_ns, simulated)
        except FAILURES as error:  # what serves must go on serving
            why = f"its overseer fails: {type(error).__name__}: {error}"
            out.append(Decided("overseer", why, application=key))
            return
        choice = guidance.choice if guidance.choice != present else ""
        if guidance.why or choice:
            out.append(Decided("overseer", guidance.why, application=key, choice=choice))
        if guidance.asks is not None:
            self._simulations += 1
            oversight.number = self._simulations
            out.append(RequestSimulation(self._simulations, key, guidance.asks))
        if choice:
            oversight.choice = choice
            knows_traffic = application.decide_by(now_ns, application.parts.choices[choice])
            self._hand_over(now_ns, application, knows_traffic=knows_traffic)

    def _advance_rollouts(self, now_ns: int, out: list[Action]) -> None:
        """Advance all rollouts and forget versions that have ended; let idle stages be skipped again."""
        ended = self._rollouts.tick(now_ns, out)
        for application in ended:
            self._control.discard(application.key)
            del self._paths[application.key], self.state.applications[application.key]
        if ended:
            self._bind()
        if not self._is_plain:
            self._activate([each for each in self.state.applications.values() if not each.is_idle])


def _ignore(now_ns: int, event: Event, out: list[Action]) -> None:
    """The event itself has no effect; `handle` has already run what was due."""
