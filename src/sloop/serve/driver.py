"""The live driver: it connects the core, which also runs in the simulator, to real time and real worker processes.

Every submitted request is answered exactly once. The driver passes events to the core one at a time and in order,
executes the core's actions, and writes both to the event log. It keeps references to the tensors of open requests and
takes no decisions. Everything runs in the event loop's thread, without a coroutine, future or lock per request.

All events of one turn of the event loop belong to one instant: the driver passes them to the core together at the end
of the turn (at most `TOGETHER_MAX` at a time), and the core then forms batches from all of them. A busy server
therefore forms larger batches, and in an idle server nothing waits.

The applications of a deployment share core and backend. The names of their stages are unique, so a batch's stage tells
which version of which application it belongs to.
"""

import asyncio
import logging
import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from math import ceil
from typing import Any, Final

from msgspec import Struct, structs

from sloop.actions import (
    AcquireNode,
    Action,
    Assigned,
    Decided,
    End,
    ReleaseNode,
    RequestPlan,
    ResizeReplica,
    Rollout,
    StartBatch,
    StartReplica,
    StopReplica,
    VersionState,
)
from sloop.core.protocols import CoreInterface
from sloop.errors import SloopError
from sloop.events import (
    WOKE,
    BatchFailed,
    Cancelled,
    Draining,
    Event,
    Finished,
    ReplicaLost,
    ReplicaStopped,
)
from sloop.runlog import Record, Recorder
from sloop.serve.dataflow import APPLICATION, Decision, RequestTensors, Sources, Wiring
from sloop.serve.protocols import Backend, PlannerInterface, RequestResult
from sloop.tensor import Tensor
from sloop.units import FOREVER_NS, NS_PER_MS, NS_PER_S
from sloop.vocabulary import Outcome, ReplicaId, Request, RequestId

_log: Final = logging.getLogger("sloop.driver")
ANSWERED: Final = (Outcome.SERVED, Outcome.LATE)
TOGETHER_MAX: Final = 32
"""The most events of one instant. In a long turn of the event loop, an idle worker does not wait for the turn's end."""
FREEING_EVENTS: Final = frozenset((Finished, BatchFailed, ReplicaLost, ReplicaStopped))
"""Events after which a replica no longer runs its batch."""


class ServedVersion:
    """A version of an application: how its tensors flow, and the deadline of its requests. `key` is that of the
    core."""

    __slots__ = ("answers", "application", "inputs", "key", "slo_ns", "version", "wiring")

    def __init__(self, key: str, application: str, version: str, slo_ns: int, wiring: Wiring) -> None:
        self.key, self.application, self.version = key, application, version
        self.slo_ns, self.wiring = slo_ns, wiring
        self.inputs = [port.name for port in wiring.signature.inputs]
        outputs = zip(wiring.signature.outputs, wiring.outputs, strict=True)
        self.answers = [(port.name, sources) for port, sources in outputs]


class OpenRequest(Struct):
    """A request that has not ended: the callback for its result, and its tensors."""

    on_end: Callable[[RequestResult], None] | None
    tensors: RequestTensors
    served: ServedVersion
    """The version that serves it; until a batch of it runs, the version that serves most requests."""
    fault: str = ""
    """Why its tensors fit no edge of the graph; empty if they do. The core receives only the failure."""


class Driver:
    """Connects gateway, core, planner and backend. Create it inside the running event loop, then call `start`.

    The clock of the core and of the log starts at 0 when the driver is created.
    """

    def __init__(
        self,
        core: CoreInterface,
        backend: Backend,
        versions: Iterable[ServedVersion],
        *,
        planner: PlannerInterface,
        recorders: Sequence[Recorder] = (),
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._core, self._backend, self._planner = core, backend, planner
        self._recorders = list(recorders)
        self._zero_ns, self._instant_ns = time.monotonic_ns(), -1
        self._loop = loop or asyncio.get_running_loop()
        self._served: dict[tuple[str, str], ServedVersion] = {}
        """By application and version."""
        self._main: dict[str, ServedVersion] = {}
        """By application, the version that serves most of its requests."""
        self._by_stage: dict[str, ServedVersion] = {}
        self._decisions: dict[str, tuple[Decision, ...]] = {}
        """For stages with a branch or a fan-out, of all applications."""
        self._has_several_applications = self._has_several_versions = False
        self._orders: Mapping[type, Callable[[Any], None]] = {
            StartBatch: self._run,
            StartReplica: lambda order: backend.start(order.replica, order.spec),
            StopReplica: lambda order: backend.stop(order.replica),
            ResizeReplica: lambda order: backend.resize(order.replica, order.cores),
            AcquireNode: lambda order: backend.acquire(order.node),
            ReleaseNode: lambda order: backend.release(order.node),
            RequestPlan: self._note_plan,
            Rollout: self._follow,
            Assigned: _note,
            Decided: _note,
        }
        self._inbox: list[Event] = []
        self._is_due = self._is_delivering = self._plan_is_due = False
        self._open: dict[RequestId, OpenRequest] = {}
        self._running: dict[ReplicaId, StartBatch] = {}
        self._skipped: dict[ReplicaId, frozenset[int]] = {}
        """Per replica, the positions of visits in its batch that did not run because their inputs were missing."""
        self._last_id = 0
        self._timer: TimerHandle | None = None
        self._timer_ns = FOREVER_NS
        self._emptied = asyncio.Event()
        self._stopped_why = ""
        self.crash: Exception | None = None
        """The exception of a core that failed, which is a bug. Every request is then answered as failed."""
        self.on_rollout: Callable[[Rollout], None] = lambda _: None
        """Called for every `Rollout`, after the driver has followed it."""
        backend.attach(self)
        planner.attach(self.on_event)
        for served in versions:
            self.add(served)

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the driver was created."""
        return time.monotonic_ns() - self._zero_ns

    @property
    def open_requests(self) -> int:
        """The number of requests that have been submitted and not answered."""
        return len(self._open)

    @property
    def is_stopped(self) -> bool:
        """Whether it takes no more requests or events."""
        return bool(self._stopped_why)

    def start(self) -> None:
        """Make the core compute its first plan and start replicas."""
        self.on_event(WOKE)

    def add(self, served: ServedVersion) -> None:
        """Serve one more version. It must be known here before the core hears of it (`Deployed`)."""
        self._served[served.application, served.version] = served
        self._main.setdefault(served.application, served)
        self._by_stage |= dict.fromkeys(served.wiring.inputs, served)
        self._decisions |= served.wiring.decisions
        # The log of a server that has only ever had one application does not name it in every request.
        self._has_several_applications = self._has_several_applications or len(self._main) > 1
        self._has_several_versions = len(self._served) > len(self._main)

    def served(self, application: str) -> ServedVersion | None:
        """The version of an application that serves most of its requests; None for an unknown application."""
        return self._main.get(application)

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        application: str,
        version: str = "",
        slo_ns: int | None = None,
        elapsed_ns: int = 0,
        began_ns: int | None = None,
        on_end: Callable[[RequestResult], None],
    ) -> RequestId:
        """See `sloop.serve.protocols.RequestSink`."""
        self._last_id += 1
        request = RequestId(self._last_id)
        served = self._main.get(application) if not version else self._served.get((application, version))
        if self._stopped_why or served is None:
            refused = Outcome.REJECTED if self.crash is None else Outcome.FAILED
            why = self._stopped_why or f"application {application!r} has ended"
            on_end(RequestResult(refused, why=why, retry_after_ns=NS_PER_S))
            return request
        arrived_ns = (time.monotonic_ns() if began_ns is None else began_ns) - self._zero_ns
        sent_ns = arrived_ns - elapsed_ns
        deadline_ns = sent_ns + (slo_ns or served.slo_ns)
        given = RequestTensors({APPLICATION: [tensors[name] for name in served.inputs]})
        self._open[request] = OpenRequest(on_end, given, served)
        if self._has_several_applications or version:
            self.on_event(Request(request, sent_ns, arrived_ns, deadline_ns, (), application, version))
        else:
            self.on_event(Request(request, sent_ns, arrived_ns, deadline_ns))
        return request

    def cancel(self, request: RequestId) -> None:
        """See `sloop.serve.protocols.RequestSink`."""
        found = self._open.get(request)
        if found is not None and found.on_end is not None:
            found.on_end = None
            self.on_event(Cancelled(request))

    async def drain(self, timeout_s: float) -> None:
        """Reject new requests, wait at most `timeout_s` for open ones, then stop all replicas; the rest fails."""
        self.on_event(Draining())
        if self._open:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except TimeoutError:
                self._end_all(f"the server stopped before the request was finished (it waited {timeout_s:g} s)")
        await self.close()

    async def close(self) -> None:
        """Stop planner and replicas at once; open requests fail."""
        self._end_all("the server has stopped")
        if self._timer is not None:
            self._timer.cancel()
        await self._planner.close()
        await self._backend.close()

    # Reports of the backend

    def on_finished(self, event: Finished, outputs: Sequence[Sequence[Tensor]]) -> None:
        """Keep a batch's outputs for the next stages or for the answer, then pass the event on."""
        running = self._running.get(event.replica)
        if running is None or running.batch != event.batch:
            self.on_event(event)
            return
        stage, parts = running.stage, running.parts or repeat(None)
        skipped = self._skipped.pop(event.replica, None)
        if skipped is not None or stage in self._decisions:
            self._add_edge_counts(event, running, outputs, skipped or frozenset())
            return
        for request, part, tensors in zip(running.requests, parts, outputs, strict=False):
            found = self._open.get(request)
            if found is not None:
                found.tensors.store(stage, part, tensors)
        self.on_event(event)

    def _add_edge_counts(
        self, event: Finished, running: StartBatch, outputs: Sequence[Sequence[Tensor]], skipped: frozenset[int]
    ) -> None:
        """Add each request's edge counts to the event of a finished batch; needed if its stage has branches or if some
        requests were skipped. A request whose tensors fit no edge fails alone."""
        stage, given = running.stage, iter(outputs)
        decisions = self._decisions.get(stage, ())
        edge_counts: list[tuple[int, ...]] = []
        faults: list[int] = []
        for place, (request, part) in enumerate(zip(running.requests, running.parts or repeat(None), strict=False)):
            if place in skipped:
                edge_counts.append(())
                faults.append(place)
                continue
            found, tensors = self._open.get(request), next(given)
            if found is None:
                edge_counts.append((0,) * len(decisions))
                continue
            found.tensors.store(stage, part, tensors)
            try:
                edge_counts.append(found.tensors.edge_counts(stage, decisions, tensors))
            except ValueError as error:
                found.fault = str(error)
                edge_counts.append(())
                faults.append(place)
        if faults and len(edge_counts) == 1 and (found := self._open.get(running.requests[0])) is not None:
            self.on_event(BatchFailed(event.batch, event.replica, found.fault))
        else:
            self.on_event(structs.replace(event, edge_counts=tuple(edge_counts), faults=tuple(faults)))

    def on_event(self, event: Event) -> None:
        """Queue an event for the core until this turn of the event loop ends or `TOGETHER_MAX` events are queued."""
        if self._stopped_why:
            return
        self._inbox.append(event)
        if self._is_delivering:
            return
        if len(self._inbox) >= TOGETHER_MAX:
            self._deliver()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_due = False
        if self._inbox:
            self._deliver()

    def _deliver(self) -> None:
        """Pass all queued events to the core and execute its actions; these may queue further events."""
        self._is_delivering = True
        try:
            while self._inbox and not self._stopped_why:
                events, self._inbox = self._inbox, []
                self._instant(events)
        except Exception as error:  # a bug in the core; every request must still be answered
            _log.exception("the core failed; no further request is served")
            self.crash = error
            self._end_all(f"the server's core has failed: {error!r}")
        finally:
            self._is_delivering = False
        self._arm()

    def _instant(self, events: Sequence[Event]) -> None:
        """Process the events of one instant. Each instant is later than the one before, so the log shows which events
        belong together.

        Clients are answered last, so that workers receive their next batches first.
        """
        self._instant_ns = now_ns = max(self.now_ns, self._instant_ns + 1)
        records: list[Record] = []
        ends: list[End] = []
        left = len(events)
        try:
            for event in events:
                left -= 1
                if type(event) in FREEING_EVENTS:
                    self._running.pop(event.replica, None)  # type: ignore[union-attr]  # all of them have one
                records.append(event)
                actions = self._core.handle(now_ns, event, left > 0)
                records += actions
                for action in actions:
                    if type(action) is End:
                        ends.append(action)
                    else:
                        self._execute(action)
                if self._plan_is_due:
                    self._request_plan()
            for end in ends:
                self._end(end)
        finally:
            self._record(now_ns, records)

    # Actions of the core

    def _execute(self, action: Action) -> None:
        execute = self._orders.get(type(action))
        if execute is None:
            raise TypeError(f"the driver does not know the action {action!r}")
        execute(action)

    def _run(self, action: StartBatch) -> None:
        served = self._by_stage[action.stage]
        wires = served.wiring.inputs[action.stage]
        self._running[action.replica] = action
        if self._has_several_versions:
            for request in action.requests:
                self._open[request].served = served
        if served.wiring.is_plain:
            wholes = [self._open[request].tensors.whole for request in action.requests]
            requests = [[whole[wire.stage][wire.position] for (wire,) in wires] for whole in wholes]
        else:
            requests = self._inputs_of(action, wires)
            if not requests:
                fault = self._open[action.requests[0]].fault
                self.on_event(BatchFailed(action.batch, action.replica, fault))
                return
        self._backend.run(action.batch, action.replica, requests)

    def _inputs_of(self, action: StartBatch, wires: Sequence[Sources]) -> list[list[Tensor]]:
        """The inputs of a batch's visits. Visits whose inputs are missing do not run and fail when the batch is
        done."""
        self._skipped.pop(action.replica, None)
        requests: list[list[Tensor]] = []
        skipped: list[int] = []
        for place, (request, part) in enumerate(action.visits):
            found = self._open[request]
            try:
                requests.append(found.tensors.inputs(action.stage, part, wires))
            except ValueError as error:
                found.fault = str(error)
                skipped.append(place)
        if skipped:
            self._skipped[action.replica] = frozenset(skipped)
        return requests

    def _note_plan(self, action: RequestPlan) -> None:
        self._plan_is_due = True

    def _request_plan(self) -> None:
        """Pass the core's request on when all actions of its event are carried out: what the planner must know of a
        rollout comes before the view that it has changed."""
        self._plan_is_due = False
        given = self._core.plan_input
        assert given is not None, "a plan is requested without input"
        self._planner.request(given)

    def _follow(self, action: Rollout) -> None:
        """A version has entered a state: keep what requests and planner need to know of it."""
        name, version = action.application, action.version
        served = self._served[name, version]
        if action.state is VersionState.SERVING:
            self._main[name] = served
        elif action.state is VersionState.RETIRED:
            self._forget(served)
        for (other, _), each in self._served.items():
            if other == name:
                self._planner.traffic_changed(each.key)
        self.on_rollout(action)

    def _forget(self, served: ServedVersion) -> None:
        """A version has ended: it has neither requests nor replicas."""
        stages = served.wiring.inputs
        del self._served[served.application, served.version]
        for stage in stages:
            del self._by_stage[stage]
            self._decisions.pop(stage, None)
        if self._main.get(served.application) is served:
            left = [each for (name, _), each in self._served.items() if name == served.application]
            del self._main[served.application]
            if left:
                self._main[served.application] = left[-1]
        self._has_several_versions = len(self._served) > len(self._main)
        self._backend.forget(stages)
        self._planner.discard(served.key)

    def _end(self, end: End) -> None:
        found = self._open.pop(end.request)
        on_end = found.on_end
        if on_end is not None:
            served = found.served
            outputs: Mapping[str, Tensor] = {}
            if end.outcome in ANSWERED:
                if served.wiring.is_plain:
                    whole = found.tensors.whole
                    outputs = {name: whole[source.stage][source.position] for name, (source,) in served.answers}
                else:
                    outputs = found.tensors.outputs(served.answers)
            why = found.fault if found.fault and end.outcome is Outcome.FAILED else end.why
            self._answer(on_end, RequestResult(end.outcome, outputs, why, end.retry_after_ns, served.version))
        if not self._open:
            self._emptied.set()

    def _answer(self, on_end: Callable[[RequestResult], None], ended: RequestResult) -> None:
        try:
            on_end(ended)
        except Exception:  # a bug in the gateway must not stop the core
            _log.exception("a request could not be answered")

    def _end_all(self, why: str) -> None:
        """Fail all open and all future requests; the core receives no further events."""
        self._stopped_why = self._stopped_why or why
        self._inbox.clear()
        left, self._open = self._open, {}
        for found in left.values():
            if found.on_end is not None:
                self._answer(found.on_end, RequestResult(Outcome.FAILED, why=why, version=found.served.version))
        self._emptied.set()

    def _record(self, now_ns: int, records: Sequence[Record]) -> None:
        for recorder in list(self._recorders):
            try:
                recorder.extend(now_ns, records)
            except SloopError as error:
                self._recorders.remove(recorder)
                _log.error("the server continues without an event log: %s", error)

    # Waking the core

    def _arm(self) -> None:
        """Keep one timer that fires at or before `core.wake_ns`. An earlier timer is kept; it re-arms when it fires."""
        wake_ns = self._core.wake_ns
        if wake_ns >= self._timer_ns or self._stopped_why:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = wake_ns
        # Event loops keep timers in milliseconds. Rounding up is late by less than 1 ms; rounding down would spin.
        delay_ms = max(0, ceil((wake_ns - self.now_ns) / NS_PER_MS))
        self._timer = self._loop.call_later(delay_ms / 1e3, self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_ns = None, FOREVER_NS
        if self.now_ns >= self._core.wake_ns:
            self.on_event(WOKE)
        else:
            self._arm()


def _note(action: Action) -> None:
    """An action for the log only."""
