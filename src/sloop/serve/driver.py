"""The live driver: real time and real workers under the core that also runs in the simulator (law 1).

Promises that every request handed in is answered once, that events reach the core one at a time and in order even
where an order causes the next event at once, that time begins at 0 and goes on from one instant to the next, and that
everything the core is told and answers is recorded. Holds tensors from arrival to answer, by reference. Takes no
decision. Everything happens in one event loop's thread; no coroutine, future or lock is made per request.

What one turn of the event loop brings happens at one instant: the core is told of it together, at the turn's end (or
`TOGETHER_MAX` events at a time), and makes its batches of all of it. So the busier the server, the larger its batches,
and in an idle one nothing waits.
"""

import asyncio
import logging
import time
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from math import ceil
from typing import Final, Protocol

from msgspec import Struct, structs

from sloop.actions import Action, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.app.journey import UNFIT
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
from sloop.serve.dataflow import APPLICATION, RequestTensors, Sources, Wiring, answer, edge_counts_of, gather, keep
from sloop.serve.protocols import Backend, Ended
from sloop.tensor import Tensor
from sloop.units import FOREVER_NS, NS_PER_MS, NS_PER_S
from sloop.vocabulary import Outcome, ReplicaId, Request, RequestId

_log: Final = logging.getLogger("sloop.driver")
ANSWERED: Final = (Outcome.SERVED, Outcome.LATE)
TOGETHER_MAX: Final = 32
"""Events told together at most: in a long turn an idle worker is not left waiting for its end."""
FREES: Final = frozenset((Finished, BatchFailed, ReplicaLost, ReplicaStopped))
"""Events after which a replica no longer runs the batch it was given."""


class Brain(Protocol):
    """What the driver needs of `sloop.core.Core`."""

    @property
    def wake_ns(self) -> int: ...

    def handle(self, now_ns: int, event: Event, more: bool = False) -> Sequence[Action]: ...


class _Open(Struct):
    """A request that has not ended: where its answer goes, and its tensors."""

    on_end: Callable[[Ended], None] | None
    held: RequestTensors
    fault: str = ""
    """What its tensors lack, if they have been found to lack something: the core is only told that they do."""


class Driver:
    """Between gateway, core and backend. Make it inside the running event loop, then `start` it.

    The instant of making the driver is 0 for the core and the log.
    """

    def __init__(
        self,
        core: Brain,
        backend: Backend,
        wiring: Wiring,
        *,
        slo_ns: int,
        recorders: Sequence[Recorder] = (),
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._core, self._backend, self._wiring, self._slo_ns = core, backend, wiring, slo_ns
        self._recorders = list(recorders)
        self._zero_ns, self._instant_ns = time.monotonic_ns(), -1
        self._loop = loop or asyncio.get_running_loop()
        self._names = [port.name for port in wiring.signature.inputs]
        outputs = zip(wiring.signature.outputs, wiring.outputs, strict=True)
        self._answers = [(port.name, sources) for port, sources in outputs]
        self._inbox: list[Event] = []
        self._is_due = self._is_telling = False
        self._open: dict[RequestId, _Open] = {}
        self._running: dict[ReplicaId, StartBatch] = {}
        self._left_out: dict[ReplicaId, frozenset[int]] = {}
        """Visits of a batch, by their places, that were not run with the others because of their tensors."""
        self._last_id = 0
        self._timer: TimerHandle | None = None
        self._timer_ns = FOREVER_NS
        self._emptied = asyncio.Event()
        self._over = ""
        self.crash: Exception | None = None
        """Set when the core failed: a bug. Every request is then answered as failed."""
        backend.attach(self)

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the driver was made."""
        return time.monotonic_ns() - self._zero_ns

    @property
    def open_requests(self) -> int:
        """Requests handed in and not yet answered."""
        return len(self._open)

    def start(self) -> None:
        """Let the core make its first plan and start replicas."""
        self.happened(WOKE)

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        slo_ns: int | None = None,
        elapsed_ns: int = 0,
        began_ns: int | None = None,
        on_end: Callable[[Ended], None],
    ) -> RequestId:
        """See `sloop.serve.protocols.Submitter`."""
        self._last_id += 1
        request = RequestId(self._last_id)
        if self._over:
            refused = Outcome.REJECTED if self.crash is None else Outcome.FAILED
            on_end(Ended(refused, why=self._over, retry_after_ns=NS_PER_S))
            return request
        arrived_ns = (time.monotonic_ns() if began_ns is None else began_ns) - self._zero_ns
        sent_ns = arrived_ns - elapsed_ns
        self._open[request] = _Open(on_end, RequestTensors({APPLICATION: [tensors[name] for name in self._names]}))
        self.happened(Request(request, sent_ns, arrived_ns, sent_ns + (slo_ns or self._slo_ns)))
        return request

    def cancel(self, request: RequestId) -> None:
        """See `sloop.serve.protocols.Submitter`."""
        found = self._open.get(request)
        if found is not None and found.on_end is not None:
            found.on_end = None
            self.happened(Cancelled(request))

    async def drain(self, timeout_s: float) -> None:
        """Refuse what comes, finish what is here, then stop all replicas; what is not done in time fails."""
        self.happened(Draining())
        if self._open:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except TimeoutError:
                self._end_all(f"the server stopped and gave it {timeout_s:g} s more")
        await self.close()

    async def close(self) -> None:
        """Stop all replicas now; requests still open fail."""
        self._end_all("the server has stopped")
        if self._timer is not None:
            self._timer.cancel()
        await self._backend.close()

    # What the backend reports (it knows us as its listener)

    def finished(self, event: Finished, outputs: Sequence[Sequence[Tensor]]) -> None:
        """A batch is done: keep its outputs for the next stages or the answer."""
        running = self._running.get(event.replica)
        if running is None or running.batch != event.batch:
            self.happened(event)
            return
        stage, parts = running.stage, running.parts or repeat(None)
        left_out = self._left_out.pop(event.replica, None)
        if left_out is not None or stage in self._wiring.decisions:
            self._decide(event, running, outputs, left_out or frozenset())
            return
        for request, part, tensors in zip(running.requests, parts, outputs, strict=False):
            found = self._open.get(request)
            if found is not None:
                keep(found.held, stage, part, tensors)
        self.happened(event)

    def _decide(
        self, event: Finished, running: StartBatch, outputs: Sequence[Sequence[Tensor]], left_out: frozenset[int]
    ) -> None:
        """A batch is done after which requests part, or which left some out: tell where each of them goes. One whose
        outputs fit no edge fails alone."""
        stage, given = running.stage, iter(outputs)
        decisions = self._wiring.decisions.get(stage, ())
        edge_counts: list[tuple[int, ...]] = []
        for place, (request, part) in enumerate(zip(running.requests, running.parts or repeat(None), strict=False)):
            if place in left_out:
                edge_counts.append(UNFIT)
                continue
            found, tensors = self._open.get(request), next(given)
            if found is None:
                edge_counts.append((0,) * len(decisions))
                continue
            keep(found.held, stage, part, tensors)
            try:
                edge_counts.append(edge_counts_of(found.held, stage, decisions, tensors))
            except ValueError as error:
                found.fault = str(error)
                edge_counts.append(UNFIT)
        if (
            len(edge_counts) == 1
            and edge_counts[0] is UNFIT
            and (found := self._open.get(running.requests[0])) is not None
        ):
            self.happened(BatchFailed(event.batch, event.replica, found.fault))
        else:
            self.happened(structs.replace(event, edge_counts=tuple(edge_counts)))

    def happened(self, event: Event) -> None:
        """Take note, to tell the core when this turn of the event loop ends, or before it if there is much to tell."""
        if self._over:
            return
        self._inbox.append(event)
        if self._is_telling:
            return
        if len(self._inbox) >= TOGETHER_MAX:
            self._tell()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_due = False
        if self._inbox:
            self._tell()

    def _tell(self) -> None:
        """Tell the core what has happened, and carry out what it answers, which may make more happen at once."""
        self._is_telling = True
        try:
            while self._inbox and not self._over:
                events, self._inbox = self._inbox, []
                self._instant(events)
        except Exception as error:  # a bug in the core: no request may be left without an answer
            _log.exception("the core failed; no further request is served")
            self.crash = error
            self._end_all(f"the server's core has failed: {error!r}")
        finally:
            self._is_telling = False
        self._arm()

    def _instant(self, events: Sequence[Event]) -> None:
        """One instant, later than the one before: a log's reader tells from that which events were told together.

        Clients are answered last: meanwhile the workers are busy again.
        """
        self._instant_ns = now_ns = max(self.now_ns, self._instant_ns + 1)
        records: list[Record] = []
        ends: list[End] = []
        left = len(events)
        try:
            for event in events:
                left -= 1
                if type(event) in FREES:
                    self._running.pop(event.replica, None)  # type: ignore[union-attr]  # all of them have one
                records.append(event)
                actions = self._core.handle(now_ns, event, left > 0)
                records += actions
                for action in actions:
                    if type(action) is End:
                        ends.append(action)
                    else:
                        self._obey(action)
            for end in ends:
                self._end(end)
        finally:
            self._record(now_ns, records)

    def _obey(self, action: Action) -> None:
        if isinstance(action, StartBatch):
            self._run(action)
        elif isinstance(action, StartReplica):
            self._backend.start(action.replica, action.spec)
        elif isinstance(action, StopReplica):
            self._backend.stop(action.replica)
        elif isinstance(action, ResizeReplica):
            self._backend.resize(action.replica, action.cores)

    def _run(self, action: StartBatch) -> None:
        wires = self._wiring.inputs[action.stage]
        self._running[action.replica] = action
        if self._wiring.is_plain:
            wholes = [self._open[request].held.whole for request in action.requests]
            requests = [[whole[wire.stage][wire.position] for (wire,) in wires] for whole in wholes]
        else:
            requests = self._gather(action, wires)
            if not requests:
                fault = self._open[action.requests[0]].fault
                self.happened(BatchFailed(action.batch, action.replica, fault))
                return
        self._backend.run(action.batch, action.replica, requests)

    def _gather(self, action: StartBatch, wires: Sequence[Sources]) -> list[list[Tensor]]:
        """The inputs of a batch's visits; those whose request lacks some are left out, and fail when it is done."""
        self._left_out.pop(action.replica, None)
        requests: list[list[Tensor]] = []
        left_out: list[int] = []
        for place, (request, part) in enumerate(action.visits):
            found = self._open[request]
            try:
                requests.append(gather(found.held, action.stage, part, wires))
            except ValueError as error:
                found.fault = str(error)
                left_out.append(place)
        if left_out:
            self._left_out[action.replica] = frozenset(left_out)
        return requests

    def _end(self, end: End) -> None:
        found = self._open.pop(end.request)
        on_end = found.on_end
        if on_end is not None:
            outputs: Mapping[str, Tensor] = {}
            if end.outcome in ANSWERED:
                if self._wiring.is_plain:
                    whole = found.held.whole
                    outputs = {name: whole[source.stage][source.position] for name, (source,) in self._answers}
                else:
                    outputs = answer(found.held, self._answers)
            why = found.fault if found.fault and end.outcome is Outcome.FAILED else end.why
            self._answer(on_end, Ended(end.outcome, outputs, why, end.retry_after_ns))
        if not self._open:
            self._emptied.set()

    def _answer(self, on_end: Callable[[Ended], None], ended: Ended) -> None:
        try:
            on_end(ended)
        except Exception:  # the gateway's bug must not become the core's
            _log.exception("an answer could not be given")

    def _end_all(self, why: str) -> None:
        """Answer whatever is open and whatever comes; the core is told nothing more."""
        self._over = self._over or why
        self._inbox.clear()
        left, self._open = self._open, {}
        for found in left.values():
            if found.on_end is not None:
                self._answer(found.on_end, Ended(Outcome.FAILED, why=why))
        self._emptied.set()

    def _record(self, now_ns: int, records: Sequence[Record]) -> None:
        for recorder in list(self._recorders):
            try:
                recorder.extend(now_ns, records)
            except SloopError as error:
                self._recorders.remove(recorder)
                _log.error("serving goes on without a log: %s", error)

    # Waking the core

    def _arm(self) -> None:
        """Have one timer at or before `core.wake_ns`. A later wish is left to the earlier timer, which then asks."""
        wake_ns = self._core.wake_ns
        if wake_ns >= self._timer_ns or self._over:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = wake_ns
        # Event loops keep timers in milliseconds: rounding up is late by less than one, rounding down would spin.
        delay_ms = max(0, ceil((wake_ns - self.now_ns) / NS_PER_MS))
        self._timer = self._loop.call_later(delay_ms / 1e3, self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_ns = None, FOREVER_NS
        if self.now_ns >= self._core.wake_ns:
            self.happened(WOKE)
        else:
            self._arm()
