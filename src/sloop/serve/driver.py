"""The live driver: it connects the core, which also runs in the simulator, to real time and real worker processes.

Every submitted request is answered exactly once. The driver passes events to the core one at a time and in order,
executes the core's actions, and writes both to the event log. It takes no decisions. Everything runs in the event
loop's thread, without a coroutine, future or lock per request.

Of the tensors of open requests it knows only blocks (`sloop.serve.blocks`): it passes them to the batches that read
them and to the edge that answers, and frees those in shared memory when the request has ended and no batch reads them.

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
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any, Final, get_args

from msgspec import Struct, structs

from sloop.actions import (
    AcquireNode,
    Action,
    Assigned,
    CancelTransfer,
    Decided,
    End,
    Evict,
    Order,
    Piece,
    ReleaseNode,
    RequestPlan,
    RequestSimulation,
    Rollout,
    StartBatch,
    StopWorker,
    Transfer,
    VersionState,
)
from sloop.core.protocols import CoreInterface, Explains, ServiceGap
from sloop.errors import SloopError
from sloop.events import (
    WOKE,
    BatchFailed,
    BatchLost,
    Cancelled,
    Draining,
    Event,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    Planned,
    Simulated,
    TransferFailed,
    Woke,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.runlog import Record, Recorder
from sloop.serve.blocks import Block
from sloop.serve.dataflow import APPLICATION, GivenBlocks, Need, Wiring, addresses_in
from sloop.serve.messages import RequestEnded, Run
from sloop.serve.protocols import Backend, EdgeClient, PlannerInterface, SimulationPort, VariantJoining
from sloop.shared_memory import Address
from sloop.text import counted, numbered
from sloop.units import FOREVER_NS, NS_PER_MS, NS_PER_S
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId

_log: Final = logging.getLogger("sloop.driver")
ANSWERED: Final = (Outcome.SERVED, Outcome.LATE)
TOGETHER_MAX: Final = 32
"""The most events of one instant. In a long turn of the event loop, an idle worker does not wait for the turn's end."""
TURN_BOUNDS_NS: Final = (100_000, 250_000, 500_000, *(each * NS_PER_MS for each in (1, 2, 5, 10, 25, 100)))
"""Of the histogram of turns: the goal is a millisecond."""
TRACE_S: Final = 10.0
LOST_S: Final = 600.0
FAILURE_LINES_MAX: Final = 20
FAILURES_MAX: Final = 1_000
"""How many kinds of failures are remembered."""
LOOK_S: Final = 0.05
"""How often a driver that waits checks for requests whose deadline has passed."""
NEEDED_MAX: Final = 1_024
"""For how many sets of outputs the driver remembers which outputs of stages they need."""
ORDERS: Final = (StartBatch, *get_args(Order))
"""The actions that a backend carries out."""
LOOK_EVENTS: Final = frozenset((Woke, WorkerReady, Planned))
"""Events after which what went wrong may be over."""
BATCH_ENDS: Final = frozenset((Finished, BatchFailed, BatchLost))
WORKER_ENDS: Final = frozenset((WorkerLost, WorkerStopped))
"""Events after which a replica no longer runs its batch."""


class ServedVersion:
    """A version of an application: how its tensors flow, and the deadline of its requests. `key` is that of the
    core."""

    __slots__ = (
        "_needed",
        "answer_needs",
        "answered_rows",
        "application",
        "is_sized",
        "is_whole",
        "joining",
        "key",
        "labels",
        "needs",
        "slo_ns",
        "version",
        "wiring",
    )

    def __init__(
        self,
        key: str,
        application: str,
        version: str,
        slo_ns: int,
        wiring: Wiring,
        labels: Mapping[str, tuple[str, ...]] = {},
        joining: Mapping[tuple[str, str], VariantJoining] = {},
    ) -> None:
        self.key, self.application, self.version = key, application, version
        self.slo_ns, self.wiring = slo_ns, wiring
        self.labels = labels
        """By output, the names of its classes."""
        self.joining = dict(joining)
        """By stage and variant, whether requests may share a forward pass."""
        self.needs = {stage: wiring.of(stage).inputs.needs for stage in wiring.inputs}
        """By stage, the blocks that its batches read."""
        self._needed: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        self.answer_needs = wiring.answer.needs
        self.answered_rows = 0
        """Of the requests that it has served, in time or late."""
        self.is_whole = False
        """Whether a model of a first stage may mix the rows of a request. Then the core sees each request as one row,
        whose size is multiplied by the number of its rows."""
        self.is_sized = False
        """Whether such a request has had several rows, or rows of a size. Before, they are all alike."""
        self.look_at_joining()

    def look_at_joining(self) -> None:
        """Set `is_whole`. Called at first, and when it has changed whether requests may share a forward pass."""
        has_rows = any(port.counts_rows for port in self.wiring.signature.inputs)
        alone = {stage for (stage, _), known in self.joining.items() if known.obstacle}
        self.is_whole = has_rows and any(
            source.stage == APPLICATION
            for stage in alone
            for sources in self.wiring.inputs[stage]
            for source in sources
        )

    def needed(self, stage: str, outputs: tuple[int, ...]) -> tuple[int, ...]:
        """The places of a stage's outputs that a request needs if it wants these outputs of the application; () for
        all."""
        if not outputs:
            return ()
        found = self._needed.get((stage, outputs))
        if found is None:
            if len(self._needed) >= NEEDED_MAX:
                self._needed.clear()
            found = self._needed[stage, outputs] = self.wiring.needed(stage, outputs)
        return found


class OpenRequest(Struct):
    """A request that has not ended, or whose blocks a batch still reads."""

    edge: EdgeClient | None
    """Who waits for its end; None if its client has disconnected."""
    number: int
    """What the edge calls it."""
    blocks: dict[str, Block | dict[int, Block]]
    """By stage, the block of its visit, for stages that run once per request; the client's tensors are under
    `APPLICATION`. At a stage that splits the request: the block of each piece, by its first row."""
    served: ServedVersion
    """The version that serves it; until a batch of it runs, the version that serves most requests."""
    rows: int = 1
    size: int = 0
    """The size of one row of its client's tensors."""
    outputs: tuple[int, ...] = ()
    """The places of the outputs that its client wants; () for all."""
    fault: str = ""
    """Why its tensors fit no edge of the graph; empty if they do. The core receives only the failure."""
    is_refused: bool = False
    """Whether a model has refused it."""
    parts: dict[str, dict[int, Block]] | None = None
    """By stage and part, of its visits to stages that run once per part."""
    shared: list[Address] | None = None
    """Its blocks in shared memory, which must be freed."""
    readers: int = 0
    """Visits in running batches."""
    has_ended: bool = False

    def keep(self, stage: str, part: int | None, block: Block, piece: Piece | None = None) -> None:
        """Keep the block of a visit, or of a piece of one."""
        if piece is not None:
            pieces = self.blocks.setdefault(stage, {})
            pieces[piece.first] = block  # type: ignore[index]  # a visit is split from the start
        elif part is None:
            self.blocks[stage] = block
        else:
            if self.parts is None:
                self.parts = {}
            self.parts.setdefault(stage, {})[part] = block
        if type(block) is not bytes:
            self.share(block)  # type: ignore[arg-type]  # an address

    def share(self, block: Address) -> None:
        """Keep in mind that a block must be freed."""
        if self.shared is None:
            self.shared = []
        self.shared.append(block)

    def given(self, need: Need, part: int) -> GivenBlocks:
        """The blocks of a need, for a visit of this part."""
        if need.kind == "whole":
            return self.blocks.get(need.stage)
        own = self.parts.get(need.stage) if self.parts is not None else None
        if own is None:
            return None
        return own.get(part) if need.kind == "part" else own


class ReadingBatch(Struct, frozen=True, gc=False):
    """A batch that runs, and the request of each of its visits."""

    action: StartBatch
    requests: list[OpenRequest]


class Recurrence(Struct):
    """Something that goes wrong again and again: a line at its first two times, then 1, 2, 4, … s after the last line,
    at most `LOST_S`. It is new again after `LOST_S` without."""

    last_s: float
    next_s: float = 0.0
    """When it may be written again."""
    gap_s: float = 0.0
    left_out: int = 0
    """How often it happened since the last line."""


class FailureLog:
    """What goes wrong with models, replicas and plans, in the server's log. It is bounded, because a client can make a
    model raise thousands of times a second. A traceback is written once in `TRACE_S` for each stage and kind of
    failure, a line for every request that fails, and at most `FAILURE_LINES_MAX` lines in a second. For lost replicas
    and failed plans see `Recurrence`."""

    def __init__(self) -> None:
        self._traced_s: dict[tuple[str, str, str], float] = {}
        self._recurrences: dict[tuple[str, ...], Recurrence] = {}
        self.losses: dict[str, int] = {}
        """By stage that has lost replicas, and has had no ready one since: how many."""
        self.without_room: set[str] = set()
        """Stages without a ready replica for which no node had room."""
        self.unplanned: dict[str, int] = {}
        """By application version whose policy makes no plan, how many attempts have failed."""
        self._second, self._lines, self._left_out = 0, 0, 0

    def note(self, now_s: float, batch: StartBatch, failure: ModelFailure) -> None:
        """The model has failed on a batch. If several requests share it, they are tried again, so only the first such
        failure is written."""
        place = failure.detail.rpartition("(")[2]
        key = batch.stage, failure.summary, place
        is_new = now_s - self._traced_s.get(key, -TRACE_S) >= TRACE_S
        is_alone = len(set(batch.requests)) == 1
        if not (is_alone or is_new) or not self._has_room(now_s):
            return
        if is_new:
            if len(self._traced_s) >= FAILURES_MAX:
                self._traced_s.clear()
            self._traced_s[key] = now_s
        who = numbered("request", sorted(set(batch.requests)))
        then = "" if is_alone else "; each half of them is tried again"
        trace = f"\n{failure.trace}" if is_new and failure.trace else ""
        why = f": {failure.detail}" if failure.detail else ""
        _log.error("%s failed at stage %r: %s%s%s%s", who, batch.stage, failure.summary, why, then, trace)

    def note_lost(self, now_s: float, decided: Decided) -> None:
        """A replica is lost: write why, and when another one starts."""
        self.losses[decided.stage] = self.losses.get(decided.stage, 0) + 1
        more = self._more(now_s, ("lost", decided.stage, decided.why.rpartition("; ")[0]), "loss", "losses")
        if more is not None:
            _log.error("a replica of stage %r is lost: %s%s", decided.stage, decided.why, more)

    def note_shortage(self, now_s: float, decided: Decided) -> None:
        """A stage has no ready replica, and no node has room for one: write why."""
        self.without_room.add(decided.stage)
        more = self._more(now_s, ("room", decided.stage, decided.why), "time")
        if more is not None:
            _log.error("no replica of stage %r can start: %s%s", decided.stage, decided.why, more)

    def note_unplanned(self, now_s: float, decided: Decided) -> None:
        """A policy has made no plan: write why."""
        key = decided.application
        self.unplanned[key] = self.unplanned.get(key, 0) + 1
        more = self._more(now_s, ("plan", key, decided.why), "attempt")
        if more is not None:
            _log.error("%s%s%s; the plan in force stays", f"{key}: " if key else "", decided.why, more)

    @property
    def has_open(self) -> bool:
        """Whether anything is written that may be over."""
        return bool(self.losses or self.without_room or self.unplanned)

    def look_again(self, has_ready: Callable[[str], bool], plan_error: Callable[[str], str]) -> None:
        """Write what is over: stages that have a ready replica again, and policies that plan again."""
        for stage in list(self.losses):
            if has_ready(stage):
                lost = counted(self.losses.pop(stage), "loss", "losses")
                _log.warning("stage %r has a ready replica again, after %s", stage, lost)
        for stage in list(self.without_room):
            if has_ready(stage):
                self.without_room.discard(stage)
                _log.warning("stage %r has a ready replica now", stage)
        for key in list(self.unplanned):
            if not plan_error(key):
                failed = counted(self.unplanned.pop(key), "failed attempt")
                _log.warning("%sit is planned again, after %s", f"{key}: " if key else "", failed)

    def forget(self, key: str, stages: Iterable[str]) -> None:
        """An application version has ended: nothing of it is ready or planned again."""
        self.unplanned.pop(key, None)
        for stage in stages:
            self.losses.pop(stage, None)
            self.without_room.discard(stage)

    def note_order(self, now_s: float, order: str, error: Exception) -> None:
        """The backend has raised on an order, which is a bug: write it with its traceback."""
        more = self._more(now_s, ("order", order, repr(error)), "time")
        if more is not None:
            what = "the backend failed on the order %s, a bug of sloop%s: report it with this traceback"
            _log.error(what, order, more, exc_info=error)

    def _more(self, now_s: float, key: tuple[str, ...], noun: str, plural: str = "") -> str | None:
        """What to say of those that were left out, if it is time for a line; otherwise None."""
        found = self._recurrences.get(key)
        if found is None or now_s - found.last_s >= LOST_S:
            if len(self._recurrences) >= FAILURES_MAX:
                self._recurrences.clear()
            self._recurrences[key] = found = Recurrence(now_s)
        found.last_s = now_s
        if now_s < found.next_s or not self._has_room(now_s):
            found.left_out += 1
            return None
        found.next_s, found.gap_s = now_s + found.gap_s, min(LOST_S, 2 * found.gap_s or 1.0)
        left_out, found.left_out = found.left_out, 0
        return (
            f" ({counted(left_out, f'more {noun}', plural and f'more {plural}')} like this before)" if left_out else ""
        )

    def _has_room(self, now_s: float) -> bool:
        """Whether one more line may be written now."""
        if int(now_s) != self._second:
            if self._left_out:
                _log.error("%d more failures of models were not written here", self._left_out)
            self._second, self._lines, self._left_out = int(now_s), 0, 0
        self._lines += 1
        self._left_out += self._lines > FAILURE_LINES_MAX
        return self._lines <= FAILURE_LINES_MAX


class Turns:
    """For how long the event loop was held each time: by the events of one instant, or by the records of one frame of
    an edge."""

    def __init__(self) -> None:
        self.counts = [0] * (len(TURN_BOUNDS_NS) + 1)
        """By upper bound, of `TURN_BOUNDS_NS`; the last has none."""
        self.total_ns = self.longest_ns = 0

    def note(self, began_ns: int) -> None:
        """A piece of work began then (`time.monotonic_ns`), and has ended."""
        spent_ns = time.monotonic_ns() - began_ns
        self.counts[bisect_left(TURN_BOUNDS_NS, spent_ns)] += 1
        self.total_ns += spent_ns
        self.longest_ns = max(self.longest_ns, spent_ns)


class Driver:
    """Connects edges, core, planner and backend. Create it inside the running event loop, then call `start`.

    `free` is called with each block in shared memory that is no longer needed. `explains` tells why requests are
    dropped while nothing can serve, and when that is over.

    The clock of the core and of the log starts at 0 when the driver is created.
    """

    def __init__(
        self,
        core: CoreInterface,
        backend: Backend,
        versions: Iterable[ServedVersion],
        *,
        planner: PlannerInterface,
        explains: Explains | None = None,
        recorders: Sequence[Recorder] = (),
        free: Callable[[Address], None] = lambda _: None,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._core, self._backend, self._planner, self._explains = core, backend, planner, explains
        self._recorders, self._free = list(recorders), free
        self._zero_ns, self._instant_ns = time.monotonic_ns(), -1
        self._loop = loop or asyncio.get_running_loop()
        self._served: dict[tuple[str, str], ServedVersion] = {}
        """By application and version."""
        self._main: dict[str, ServedVersion] = {}
        """By application, the version that serves most of its requests."""
        self._by_stage: dict[str, ServedVersion] = {}
        self._has_several_applications = self._has_several_versions = False
        self._orders: Mapping[type, Callable[[Any], None]] = {
            **dict.fromkeys(get_args(Order), backend.order),
            StartBatch: self._run,
            RequestPlan: self._note_plan,
            RequestSimulation: self._ask_simulation,
            Rollout: self._follow,
            Assigned: _note,
            Decided: self._note_decision,
        }
        self._inbox: list[Event] = []
        self._is_due = self._is_delivering = self._plan_is_due = self._is_waiting = False
        self._open: dict[RequestId, OpenRequest] = {}
        self._running: dict[ReplicaId, ReadingBatch] = {}
        self._failures = FailureLog()
        self.turns = Turns()
        self._last_id = 0
        self._timer: TimerHandle | None = None
        self._timer_ns = FOREVER_NS
        self._emptied = asyncio.Event()
        self._stopped_why = ""
        self.crash: Exception | None = None
        """The exception of a core that failed, which is a bug. Every request is then answered as failed."""
        self.crashed = asyncio.Event()
        """Set when the core has failed."""
        self.on_rollout: Callable[[Rollout], None] = lambda _: None
        """Called for every `Rollout`, after the driver has followed it."""
        self.on_choice: Callable[[Decided], None] = lambda _: None
        """Called when an overseer has chosen another system."""
        self.simulations: SimulationPort | None = None
        """Who simulates for systems that ask; None for nobody."""
        self.on_joining_ended: Callable[[str], None] = lambda _: None
        """Called with the name of an application when requests stop sharing passes of one of its variants."""
        backend.attach(self)
        backend.on_difference = self._on_difference
        planner.attach(self.on_event)
        for served in versions:
            self.add(served)

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the driver was created."""
        return time.monotonic_ns() - self._zero_ns

    @property
    def zero_ns(self) -> int:
        """When the driver was created (`time.monotonic_ns`)."""
        return self._zero_ns

    @property
    def open_requests(self) -> int:
        """The number of requests that have been submitted and not answered."""
        return len(self._open)

    @property
    def is_stopped(self) -> bool:
        """Whether it takes no more requests or events."""
        return bool(self._stopped_why)

    def wait(self) -> None:
        """Tell the core nothing until `start`: it would plan for nodes of which it is not yet known what they have.
        Requests whose deadline passes meanwhile are rejected."""
        self._is_waiting = True
        self._loop.call_later(LOOK_S, self._reject_late)

    def start(self) -> None:
        """Make the core compute its first plan and start replicas. What is known of nodes comes first."""
        self._is_waiting = False
        self._inbox.sort(key=lambda event: not isinstance(event, NodeReady | NodeLost))
        self.on_event(WOKE)

    def add(self, served: ServedVersion) -> None:
        """Serve one more version. It must be known here before the core hears of it (`Deployed`)."""
        self._served[served.application, served.version] = served
        self._main.setdefault(served.application, served)
        self._by_stage |= dict.fromkeys(served.wiring.inputs, served)
        # The log of a server that has only ever had one application does not name it in every request.
        self._has_several_applications = self._has_several_applications or len(self._main) > 1
        self._has_several_versions = len(self._served) > len(self._main)

    def served(self, application: str) -> ServedVersion | None:
        """The version of an application that serves most of its requests; None for an unknown application."""
        return self._main.get(application)

    def answered_rows(self, application: str, version: str) -> int:
        """The rows of the requests that a version has served, in time or late; 0 for one that has ended."""
        served = self._served.get((application, version))
        return 0 if served is None else served.answered_rows

    def joining(self, application: str, version: str) -> Iterable[VariantJoining]:
        """Whether requests for a version may share a forward pass, for each variant of each stage."""
        served = self._served.get((application, version))
        return () if served is None else served.joining.values()

    def versions(self, application: str) -> list[ServedVersion]:
        """All versions of an application that have not ended."""
        return [served for (name, _), served in self._served.items() if name == application]

    def submit(  # noqa: PLR0913  # what a client may say about a request
        self,
        block: Block,
        edge: EdgeClient,
        number: int,
        *,
        application: str,
        version: str = "",
        slo_ns: int | None = None,
        elapsed_ns: int = 0,
        began_ns: int | None = None,
        request_id: str = "",
        trace: str = "",
        rows: int = 1,
        outputs: tuple[int, ...] = (),
        size: int = 0,
        shape: tuple[int, ...] = (),
        is_whole: bool = False,
    ) -> RequestId:
        """Submit a request of `rows`, whose tensors are in `block`. `edge`, which calls it `number`, is told once how
        it ended, possibly before `submit` returns, but not after `cancel`. `outputs` are the places of the outputs that
        its client wants; () for all. `size` and `shape` are those of a row (`sloop.vocabulary.Request`). With
        `is_whole`, the core sees the request as one row, because its rows may not be independent of each other.

        For the other options see `sloop.serve.edge.sink.EdgeSink`.
        """
        self._last_id += 1
        request = RequestId(self._last_id)
        served = self._main.get(application) if not version else self._served.get((application, version))
        if self._stopped_why or served is None:
            if type(block) is not bytes:
                self._free(block)  # type: ignore[arg-type]  # an address
            refused = Outcome.REJECTED if self.crash is None else Outcome.FAILED
            why = self._stopped_why or f"application {application!r} has ended"
            edge.on_end(RequestEnded(number, refused, version, [], why, NS_PER_S))
            return request
        arrived_ns = (time.monotonic_ns() if began_ns is None else began_ns) - self._zero_ns
        sent_ns = arrived_ns - elapsed_ns
        deadline_ns = sent_ns + (slo_ns or served.slo_ns)
        edge.requests[number] = request
        self._open[request] = opened = OpenRequest(edge, number, {APPLICATION: block}, served, rows, size, outputs)
        if type(block) is not bytes:
            opened.share(block)  # type: ignore[arg-type]  # an address
        if (served.is_whole or is_whole) and (served.is_sized or rows > 1 or size):
            served.is_sized = served.is_sized or served.is_whole
            rows, size, shape = 1, rows * (size or 1), ()
        if self._has_several_applications or version or request_id or trace:
            name = application if self._has_several_applications or version else ""
            named = (name, version, request_id, trace)
            event = Request(request, sent_ns, arrived_ns, deadline_ns, (), *named, rows, size, shape)
        elif rows > 1 or size:
            event = Request(request, sent_ns, arrived_ns, deadline_ns, rows=rows, size=size, shape=shape)
        else:
            event = Request(request, sent_ns, arrived_ns, deadline_ns)
        self.on_event(event)
        return request

    def cancel(self, request: RequestId) -> None:
        """The client has disconnected. Has no effect on a request that has ended."""
        found = self._open.get(request)
        if found is not None and found.edge is not None:
            found.edge = None
            self.on_event(Cancelled(request))

    async def drain(self, timeout_s: float, delivered: Callable[[], Awaitable[None]] | None = None) -> None:
        """Reject new requests, wait at most `timeout_s` for open ones, then stop all replicas; the rest fails.
        `delivered` waits until edges have the answers that are on the nodes of replicas."""
        self.on_event(Draining())
        if self._open:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except TimeoutError:
                self._deliver()  # the core rejects what came in this turn
                self._end_all(f"the server stopped before the request was finished (it waited {timeout_s:g} s)")
        if delivered is not None:
            await delivered()
        self._deliver()  # again, while edges were asked
        await self.close()

    async def close(self) -> None:
        """Stop planner and replicas at once; open requests fail."""
        self._end_all("the server has stopped")
        if self._timer is not None:
            self._timer.cancel()
        await self._planner.close()
        await self._backend.close()

    # Reports of the backend

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        """Keep a batch's blocks for the next stages or for the answer, then pass the event on."""
        running = self._running.get(event.replica)
        if running is None or running.action.batch != event.batch:
            for block in blocks:
                if isinstance(block, Address):
                    self._free(block)
            self.on_event(event)
            return
        stage, parts, pieces = running.action.stage, running.action.parts, running.action.pieces
        for place, (found, block) in enumerate(zip(running.requests, blocks, strict=True)):
            if block is None:
                found.fault = faults.get(place, "")
            elif not found.has_ended:
                found.keep(stage, parts[place] if parts else None, block, pieces[place] if pieces else None)
            elif isinstance(block, Address):
                self._free(block)
        if event.sizes:
            event = self._sized(event, running)
        if event.faults and len(blocks) == 1:
            self.on_event(BatchFailed(event.batch, event.replica, running.requests[0].fault))
        else:
            self.on_event(event)

    def _sized(self, event: Finished, running: ReadingBatch) -> Finished:
        """The event with larger sizes where the next stage also reads tensors of the client: at least the size of
        these."""
        stage = running.action.stage
        edges = self._by_stage[stage].wiring.passed.get(stage, ())
        if not any(edge.from_client for edge in edges):
            return event
        sizes = [
            tuple(
                [
                    (rows, max(size, found.size) if edge.from_client else size)
                    for edge, (rows, size) in zip(edges, each, strict=bool(each))
                ]
            )
            for each, found in zip(event.sizes, running.requests, strict=True)
        ]
        return structs.replace(event, sizes=tuple(sizes))

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        """Write down why the model failed on a batch, for the server's log, and pass the failure on."""
        running = self._running.get(replica)
        if running is not None and running.action.batch == batch:
            if failure.is_refusal:
                for found in running.requests:  # the core rejects one that is alone, and tries several again
                    found.is_refused = True
                _log.debug("a batch at stage %r: %s", running.action.stage, failure.detail)
            else:
                self._failures.note(time.monotonic(), running.action, failure)
        self.on_event(BatchFailed(batch, replica, failure.summary, failure.detail, failure.is_refusal))

    def _on_difference(self, replica: ReplicaId, stage: str, variant: str, why: str) -> None:
        """A request differed from itself alone: log it, and let requests for this variant run alone from now on."""
        served = self._by_stage.get(stage)
        known = served.joining.get((stage, variant)) if served is not None else None
        if served is None or known is None or known.obstacle:
            return
        served.joining[stage, variant] = structs.replace(known, obstacle=why, evidence="")
        served.look_at_joining()
        what = "version %s of %r: replica %d of stage %r: %s; from now on each request runs alone"
        _log.error(what, served.version, served.application, replica, known.stage, why)
        self._backend.run_alone(stage, variant, why)
        self.on_joining_ended(served.application)

    def on_event(self, event: Event) -> None:
        """Queue an event for the core until this turn of the event loop ends or `TOGETHER_MAX` events are queued."""
        if self._stopped_why:
            return
        self._inbox.append(event)
        if self._is_delivering or self._is_waiting:
            return
        if len(self._inbox) >= TOGETHER_MAX:
            self._deliver()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        began_ns = time.monotonic_ns()
        self._is_due = False
        if self._inbox:
            self._deliver()
        self.turns.note(began_ns)

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
            self.crashed.set()
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
                kind = type(event)
                if kind in BATCH_ENDS:
                    self._stop_reading(event.replica)  # type: ignore[union-attr]  # all of them have one
                elif kind in WORKER_ENDS:
                    self._stop_reading(event.worker)  # type: ignore[union-attr]
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
            if self._failures.has_open and not LOOK_EVENTS.isdisjoint(map(type, events)):
                self._failures.look_again(self._has_ready, self._plan_error)
        finally:
            self._record(now_ns, records)

    # Actions of the core

    def _execute(self, action: Action) -> None:
        execute = self._orders.get(type(action))
        if execute is None:
            raise TypeError(f"the driver does not know the action {action!r}")
        try:
            execute(action)
        except Exception as error:  # a bug in the backend must not end all service
            if not isinstance(action, ORDERS):
                raise
            self._failures.note_order(time.monotonic(), type(action).__name__, error)
            for event in self._failed_order(action, f"the backend failed on an order: {error!r}"):
                self.on_event(event)

    def _failed_order(self, order: StartBatch | Order, why: str) -> Iterable[Event]:
        """What the core is told of an order on which the backend has failed: the worker or node that it was for
        is gone. What may be left of it is told to stop."""
        match order:
            case Transfer():
                return [TransferFailed(order.transfer, node, why) for node in order.receivers]
            case AcquireNode():
                return [NodeLost(order.node, why)]
            case ReleaseNode():
                return [NodeReleased(order.node)]
            case CancelTransfer() | Evict():
                return []
        worker = order.replica if isinstance(order, StartBatch) else order.worker
        try:
            self._backend.order(StopWorker(worker, why))
        except Exception as error:
            self._failures.note_order(time.monotonic(), "to stop what that was for", error)
        return [WorkerLost(worker, why)]

    def _run(self, action: StartBatch) -> None:
        served, opened = self._by_stage[action.stage], self._open
        needs, parts = served.needs[action.stage], action.parts
        requests = [opened[request] for request in action.requests]
        wants_some = False
        for found in requests:
            found.readers += 1
            if found.outputs:
                wants_some = True
        self._running[action.replica] = ReadingBatch(action, requests)
        if self._has_several_versions:
            for found in requests:
                found.served = served
        blocks: list[GivenBlocks]
        if len(needs) == 1 and needs[0].kind == "whole":
            stage = needs[0].stage
            blocks = [found.blocks.get(stage) for found in requests]
        else:
            visits = zip(requests, parts or [0] * len(requests), strict=True)
            blocks = [found.given(need, part) for found, part in visits for need in needs]
        run = Run(len(requests), blocks, parts, (), action.pieces)
        if wants_some:
            outputs = tuple([served.needed(action.stage, found.outputs) for found in requests])
            if any(outputs):
                run = structs.replace(run, outputs=outputs)
        self._backend.run(action.batch, action.replica, run)

    def _stop_reading(self, replica: ReplicaId) -> None:
        """The batch of a replica is over, if it had one: what only it has read is free."""
        running = self._running.pop(replica, None)
        if running is None:
            return
        for found in running.requests:
            found.readers -= 1
            if found.has_ended and not found.readers and found.shared:
                self._free_all(found.shared)

    def _free_all(self, blocks: list[Address]) -> None:
        for block in blocks:
            self._free(block)
        blocks.clear()

    def _note_plan(self, action: RequestPlan) -> None:
        self._plan_is_due = True

    def _ask_simulation(self, action: RequestSimulation) -> None:
        if self.simulations is not None:
            self.simulations.request(action, self.on_event)
        else:
            self.on_event(Simulated(action.number, error="this server has no log to be simulated"))

    def _note_decision(self, action: Decided) -> None:
        if action.kind == "lost":
            self._failures.note_lost(time.monotonic(), action)
        elif action.kind == "planner":
            self._failures.note_unplanned(time.monotonic(), action)
        elif action.kind == "system":
            self._planner.change_system(action.application)
        elif action.choice:
            self.on_choice(action)
        elif action.kind == "shortage" and not self._has_ready(action.stage):
            self._failures.note_shortage(time.monotonic(), action)

    def _gap(self, stage: str) -> ServiceGap | None:
        """Why no replica of a stage serves now; None if one does, or that is not known."""
        served = self._by_stage.get(stage)
        if served is None or self._explains is None:
            return None
        return self._explains.service_gap(self._instant_ns, served.key, stage)

    def _has_ready(self, stage: str) -> bool:
        return self._gap(stage) is None

    def _plan_error(self, key: str) -> str:
        return self._explains.plan_error(key) if self._explains is not None else ""

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
        if self._main.get(served.application) is served:
            left = [each for (name, _), each in self._served.items() if name == served.application]
            del self._main[served.application]
            if left:
                self._main[served.application] = left[-1]
        self._has_several_versions = len(self._served) > len(self._main)
        self._backend.forget(stages)
        self._planner.discard(served.key)
        self._failures.forget(served.key, stages)

    def _end(self, end: End) -> None:
        found = self._open.pop(end.request)
        found.has_ended = True
        edge, served = found.edge, found.served
        if end.outcome in ANSWERED:
            served.answered_rows += found.rows
        if edge is not None:
            blocks: list[GivenBlocks] = []
            if end.outcome in ANSWERED:
                blocks = [found.given(need, 0) for need in served.answer_needs]
                if found.shared:
                    answered = set(addresses_in(blocks))
                    found.shared = [block for block in found.shared if block not in answered]
            why, retry_after_ns = end.why, end.retry_after_ns
            if end.outcome is Outcome.FAILED:
                why = f"{found.fault or why}; request id {end.request}"
            elif end.outcome is Outcome.DROPPED and (gap := self._gap(end.stage)) is not None:
                why, retry_after_ns = f"{gap.why} ({why})", gap.wait_ns
            is_refused = found.is_refused and end.outcome is Outcome.REJECTED
            ended = RequestEnded(found.number, end.outcome, served.version, blocks, why, retry_after_ns, is_refused)
            self._answer(edge, ended)
        if found.shared and not found.readers:
            self._free_all(found.shared)
        if not self._open:
            self._emptied.set()

    def _reject_late(self) -> None:
        """End the requests whose deadline has passed while the core is told nothing. No model has run them."""
        if not self._is_waiting or self._stopped_why:
            return
        self._loop.call_later(LOOK_S, self._reject_late)
        now_ns = self.now_ns
        late = {event.id for event in self._inbox if type(event) is Request and event.deadline_ns <= now_ns}
        if not late:
            return
        self._inbox = [event for event in self._inbox if _request_of(event) not in late]
        for request in late:
            found = self._open.pop(request)
            if found.edge is not None:
                version, why = found.served.version, "the server starts, and waits for the agents of its nodes"
                self._answer(found.edge, RequestEnded(found.number, Outcome.REJECTED, version, [], why, NS_PER_S))
            if found.shared:
                self._free_all(found.shared)

    def _answer(self, edge: EdgeClient, ended: RequestEnded) -> None:
        try:
            edge.on_end(ended)
        except Exception:  # a bug in an edge must not stop the core
            _log.exception("a request could not be answered")

    def _end_all(self, why: str) -> None:
        """Fail all open and all future requests; the core receives no further events."""
        self._stopped_why = self._stopped_why or why
        self._inbox.clear()
        left, self._open = self._open, {}
        for found in left.values():
            if found.edge is not None:
                self._answer(found.edge, RequestEnded(found.number, Outcome.FAILED, found.served.version, [], why))
        self._emptied.set()

    def _record(self, now_ns: int, records: Sequence[Record]) -> None:
        recorded = [(now_ns, record) for record in records]
        for recorder in list(self._recorders):
            try:
                recorder.extend(recorded)
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


def _request_of(event: Event) -> RequestId | None:
    """The request of which clients tell by this event."""
    if isinstance(event, Request):
        return event.id
    return event.request if isinstance(event, Cancelled) else None


def _note(action: Action) -> None:
    """An action for the log only."""
