"""Checkers: what must hold in every run whatever the policies, told from the event log alone.

A fold over the log that keeps its own books of requests, queues and replicas and compares every order of the core with
them. Safety at every record (a request ends once; a replica runs one batch; no room is given out twice …), liveness at
the end (`finish`: whatever came has ended). Works on live logs too, for it knows no simulator.
Must not know the core, beliefs or truth: an invariant that needs them is none of the outside.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from sloop.actions import Decided, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.app.application import Application
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import EVENTS, Record
from sloop.sim.books import Books, OpenRequest, Rooms, TrackedReplica
from sloop.units import to_ms
from sloop.vocabulary import BatchId, Node, Outcome, ReplicaId, Request, Visit

SERVED: Final = Outcome.SERVED
LATE: Final = Outcome.LATE
REJECTED: Final = Outcome.REJECTED
ANSWERED: Final = (SERVED, LATE)
EVENT_TYPES: Final = frozenset(EVENTS)
OVERDUE: Final = 0.75
"""A drop rule is kept if what it gave up at so much of its age, 0 to 1, has ended: queues are not searched at once."""

IsHopeless = Callable[[int, Visit, int, int], bool]
"""A drop policy's verb, which see in `sloop.core.protocols`."""


def _never(now_ns: int, visit: Visit, cost_ns: int, full_ns: int) -> bool:
    return False


class Violation(AssertionError):
    """An invariant is broken. The message ends with how to see it again."""


class Checkers:
    """Takes the log record by record; raises Violation at the first that breaks an invariant.

    `edf` asks for deadline order as well, for systems whose queues are ordered by deadlines. `is_hopeless` is the drop
    rule, if what it gives up must have ended. `origin` is the command that plays the run again.
    """

    def __init__(
        self,
        application: Application,
        nodes: Iterable[Node],
        *,
        edf: bool = False,
        is_hopeless: IsHopeless = _never,
        origin: str = "",
    ) -> None:
        variants = {(stage.name, variant.name): variant for stage in application.stages for variant in stage.variants}
        profiles = {key: variant.profile for key, variant in variants.items() if variant.profile is not None}
        self._batch_max = {key: profile.max_batch for key, profile in profiles.items()}
        self._rooms = Rooms(nodes, {key: profile.memory_bytes for key, profile in profiles.items()})
        self._books = Books(application, ordered=edf)
        self._edf = edf
        self._is_hopeless = is_hopeless
        self._origin = origin
        self._now_ns = -(2**63)
        self._record: Record | None = None
        self._event: Record | None = None
        self._limits: dict[tuple[str, str], int] = {}
        """Per stage and variant the largest batch allowed by the last plan that wanted it."""
        self._short: set[str] = set()
        """Stages of which the core has said that there is no room for what the plan wants."""
        self._last_batch = BatchId(-1)
        self._last_replica = ReplicaId(-1)
        self._through: list[OpenRequest] = []
        """Requests that passed their last stage in this step, and must be answered in it."""
        self._latest: list[tuple[str, int]] = []
        """Stage and latest deadline of the batches started in this step."""
        self._checks: dict[type, Callable[[Any], None]] = {
            Request: self._arrived,
            Finished: self._finished,
            BatchFailed: self._batch_failed,
            ReplicaReady: self._ready,
            ReplicaLost: self._gone,
            ReplicaStopped: self._gone,
            Resized: self._resized,
            StartBatch: self._start_batch,
            End: self._end,
            StartReplica: self._start_replica,
            StopReplica: self._stop_replica,
            ResizeReplica: self._resize_replica,
            Decided: self._decided,
        }

    def append(self, now_ns: int, record: Record) -> None:
        """Check one record."""
        self._record = record
        if now_ns < self._now_ns:
            self._fail(f"time goes back from {self._now_ns} ns")
        kind = type(record)
        if kind in EVENT_TYPES:
            self._end_step()
            self._event = record
        elif now_ns != self._now_ns:
            self._fail(f"an action at another instant than its event's, {self._now_ns} ns")
        self._now_ns = now_ns
        check = self._checks.get(kind)
        if check is not None:
            check(record)

    def finish(self) -> None:
        """The run is over: every request that came must have ended. Faults had stopped, so nothing was in the way.

        Excused is who waits at a stage without a replica, of which the core has said that no node has room for one,
        unless the drop rule would long since have given it up.
        """
        self._end_step()
        staffed = {replica.spec.stage for replica in self._books.replicas.values()}
        empty = self._short - staffed
        for id, entry in self._books.requests.items():
            if self._is_given_up(entry):
                self._fail(f"request {id} waits at {list(entry.waiting)}, and the drop rule has given it up")
            if empty.isdisjoint(stage for stage, _ in entry.waiting):
                running = [replica.batch for replica in self._books.replicas.values() if replica.runs(entry)]
                where = f"waits at {list(entry.waiting)}" if entry.waiting else f"runs in {running}"
                self._fail(f"{len(self._books.requests)} requests never ended; request {id} {where}")

    def _is_given_up(self, entry: OpenRequest) -> bool:
        """Whether the drop rule has long held a waiting visit hopeless, however little the way on may take."""
        request = entry.request
        then_ns = request.sent_ns + round(OVERDUE * (self._now_ns - request.sent_ns))
        return any(
            self._is_hopeless(then_ns, Visit(request, stage, then_ns, deadline_ns, 0, part), 0, 0)
            for (stage, part), (_, deadline_ns) in entry.waiting.items()
        )

    def _end_step(self) -> None:
        """An event and all its actions are known: what holds between steps is checked here."""
        books = self._books
        for entry in self._through:
            if entry.request.id in books.requests:
                self._fail(f"request {entry.request.id} has passed every stage and is not answered")
        for stage, latest_ns in self._latest:
            earliest_ns = books.waiting[stage].earliest_ns(books.requests, books.step)
            if earliest_ns is not None and earliest_ns < latest_ns:
                gap_ms = to_ms(latest_ns - earliest_ns)
                self._fail(f"a batch at {stage} overtook a request whose deadline is {gap_ms:g} ms earlier")
        if self._through or self._latest:
            self._through, self._latest = [], []
        books.step += 1

    def _fail(self, what: str) -> NoReturn:
        again = f"\nreproduce with: {self._origin}" if self._origin else ""
        raise Violation(f"at {to_ms(self._now_ns):.6f} ms: {what}\nrecord: {self._record}\nevent: {self._event}{again}")

    def _arrived(self, request: Request) -> None:
        if request.id in self._books.requests:
            self._fail("a request arrived twice")
        if not request.sent_ns <= request.arrived_ns <= self._now_ns:
            self._fail("a request arrived before it was sent")
        self._books.arrive(request)

    def _finished(self, event: Finished) -> None:
        replica = self._books.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            self._through = self._books.pass_on(replica, event.edge_counts)

    def _batch_failed(self, event: BatchFailed) -> None:
        replica = self._books.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            self._books.put_back(replica)

    def _ready(self, event: ReplicaReady) -> None:
        replica = self._books.replicas.get(event.replica)
        if replica is not None:
            replica.ready = True

    def _gone(self, event: ReplicaLost | ReplicaStopped) -> None:
        self._books.forget(event.replica)

    def _resized(self, event: Resized) -> None:
        replica = self._books.replicas.get(event.replica)
        if replica is not None:
            replica.cores = event.cores
            replica.resizing -= 1
            if not replica.resizing:
                replica.wanted_cores = event.cores
            self._check_room(replica.spec.node)

    def _start_batch(self, order: StartBatch) -> None:
        replica = self._known(order.replica)
        size, limit = len(order.requests), self._limits.get((order.stage, replica.spec.variant), 0)
        if order.batch <= self._last_batch:
            self._fail(f"batch {order.batch} after batch {self._last_batch}")
        if not replica.ready or replica.draining:
            self._fail("a batch for a replica that is not ready or drains")
        if replica.batch is not None:
            self._fail(f"the replica still runs batch {replica.batch}")
        if replica.spec.stage != order.stage:
            self._fail(f"the replica serves stage {replica.spec.stage}")
        if not 0 < size <= limit:
            self._fail(f"a batch of {size} where the plan allows up to {limit}")
        if size > (most := self._batch_max.get((order.stage, replica.spec.variant), size)):
            self._fail(f"a batch of {size} where {replica.spec.variant} takes up to {most}")
        self._move(order, replica)
        replica.batch = self._last_batch = order.batch

    def _move(self, order: StartBatch, replica: TrackedReplica) -> None:
        """Requests go from the queue into a batch."""
        requests, stage = self._books.requests, order.stage
        latest_ns = -(2**63)
        if order.parts and len(order.parts) != len(order.requests):
            self._fail(f"{len(order.parts)} parts of {len(order.requests)} requests")
        for id, part in order.visits:
            entry, place = requests.get(id), (stage, part)
            waited = entry.waiting.pop(place, None) if entry is not None else None
            if entry is None or waited is None:
                self._fail(f"request {id}, part {part}, does not wait at {stage}")
            deadline_ns = waited[1]
            replica.visits.append((entry, place, deadline_ns))
            if deadline_ns > latest_ns:  # noqa: PLR1730  # a call of max for each request costs more
                latest_ns = deadline_ns
        if self._edf:
            self._latest.append((stage, latest_ns))

    def _end(self, end: End) -> None:
        entry = self._books.requests.pop(end.request, None)
        outcome = end.outcome
        if entry is None:
            self._fail("the end of a request that is not open: it never came, or ended before")
        if entry.is_through is not (outcome in ANSWERED):
            self._fail(f"{outcome} {'after' if entry.is_through else 'before'} it was through")
        in_time = self._now_ns <= entry.deadline_ns()
        if outcome is SERVED and not in_time:
            self._fail("served, after its deadline")
        if outcome is LATE and in_time:
            self._fail("late, before its deadline")
        if outcome is REJECTED and self._event is not entry.request:
            self._fail("rejected, but not at the door")

    def _start_replica(self, order: StartReplica) -> None:
        if order.replica <= self._last_replica:
            self._fail(f"replica {order.replica} after replica {self._last_replica}")
        self._last_replica = order.replica
        self._books.start(order.replica, order.spec)
        self._check_room(order.spec.node)

    def _stop_replica(self, order: StopReplica) -> None:
        replica = self._known(order.replica)
        if replica.stopping:
            self._fail("the replica is told to stop twice")
        replica.stopping = replica.draining = True
        if replica.batch is not None:  # given up as stuck: nobody waits for it to give its room back
            self._books.forget(order.replica)

    def _resize_replica(self, order: ResizeReplica) -> None:
        replica = self._known(order.replica)
        if order.cores <= 0:
            self._fail("a replica without cores")
        replica.wanted_cores = max(order.cores, replica.wanted_cores) if replica.resizing else order.cores
        replica.resizing += 1
        self._check_room(replica.spec.node)

    def _decided(self, note: Decided) -> None:
        if note.plan is not None:
            wanted = [(target, group.spec) for target in note.plan.stages for group in target.groups if group.count]
            self._limits.update({(target.stage, spec.variant): target.batch_max for target, spec in wanted})
        if note.kind == "short":
            self._short.add(note.stage)
        if note.kind == "drain" and note.replica is not None:
            self._known(note.replica).draining = True

    def _known(self, id: ReplicaId) -> TrackedReplica:
        replica = self._books.replicas.get(id)
        if replica is None:
            self._fail(f"replica {id} does not exist (any more)")
        return replica

    def _check_room(self, node: str | None) -> None:
        complaint = self._rooms.complaint(node, self._books.by_node.get(node, {}).values())
        if complaint:
            self._fail(complaint)
