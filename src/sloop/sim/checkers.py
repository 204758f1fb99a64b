"""Checkers: invariants that must hold in every run under any policy. They read only the event log.

The checkers keep their own state (requests, queues, replicas, nodes) and compare every order of the core with it.
Safety is checked at every record: a request ends once, a replica runs one batch, no core is given out twice, a queue is
served in its policy's order. Liveness is checked at the end (`finish`): every request that arrived has ended. They work
on live logs as well as on simulated ones.

Must not import the core, beliefs or truth. State and node capacities are deliberately computed a second time here: a
checker that shared the core's code would share its mistakes.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any, Final, NoReturn, Protocol

from sloop.actions import Decided, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.app.application import Application
from sloop.app.progress import RequestProgress
from sloop.errors import InputError
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import EVENTS, Record
from sloop.units import ROUNDING, to_ms
from sloop.vocabulary import BatchId, Node, Outcome, ReplicaId, ReplicaSpec, Request, RequestId, Visit

SERVED: Final = Outcome.SERVED
LATE: Final = Outcome.LATE
REJECTED: Final = Outcome.REJECTED
EVENT_TYPES: Final = frozenset(EVENTS)

OVERDUE: Final = 0.75
"""At the end of a run a request may still wait, unless the drop policy would already have dropped it at this fraction
of its present age. Younger ones are accepted because the core does not search its queues at every instant."""

Place = tuple[str, int]
"""A stage, and the part of the request that visits it."""

IsHopeless = Callable[[int, Visit, int, int], bool]
"""The verb of a drop policy; see `sloop.core.protocols.Drop`."""


class QueueKey(Protocol):
    """An order policy: the waiting visit with the smallest key is served first; see `sloop.core.protocols.Order`."""

    def key(self, visit: Visit) -> int: ...


class Violation(AssertionError):
    """An invariant is broken. The message ends with the command that reproduces it, if there is one."""


class CheckedRequest:
    """An open request and its position in the application's graph."""

    __slots__ = ("deadline_ns", "is_done", "progress", "request", "waiting")

    def __init__(self, request: Request, progress: RequestProgress | None) -> None:
        self.request = request
        self.progress = progress
        """None in an application of one stage."""
        self.is_done = False
        """Whether it has finished all stages of its route."""
        self.deadline_ns = request.deadline_ns
        """The deadline of its path, if paths have deadlines; known once it is done."""
        self.waiting: dict[Place, tuple[int, Visit, int]] = {}
        """Per place where it is queued: the step in which it was queued, the visit, and the visit's key."""


class CheckedReplica:
    """A replica from the order to start it until it has stopped or is lost."""

    __slots__ = ("batch", "cores", "draining", "ready", "resizing", "spec", "stopping", "visits", "wanted_cores")

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.cores = spec.cores
        """In effect."""
        self.wanted_cores = spec.cores
        """The largest core count among its pending resizes."""
        self.resizing = 0
        """The number of pending resizes."""
        self.ready = False
        self.draining = False
        self.stopping = False
        self.batch: BatchId | None = None
        self.visits: list[tuple[CheckedRequest, Visit]] = []
        """The visits in its batch."""

    def runs(self, entry: CheckedRequest) -> bool:
        """Whether its batch contains a visit of this request."""
        return any(running is entry for running, _ in self.visits)


class WaitingKeys:
    """A heap of the keys of the visits waiting at one stage; visits that have left are removed lazily."""

    __slots__ = ("heap",)

    def __init__(self) -> None:
        self.heap: list[tuple[int, RequestId, Place, int]] = []
        """Key, request, place, and the step in which the visit was queued."""

    def smallest(self, requests: Mapping[RequestId, CheckedRequest], before_step: int) -> int | None:
        """The smallest key of the visits that were queued before a step; None if there are none."""
        heap, newer, found = self.heap, [], None
        while heap:
            key, id, place, step = heap[0]
            entry = requests.get(id)
            if entry is None or (waiting := entry.waiting.get(place)) is None or waiting[0] != step:
                heappop(heap)
            elif step >= before_step:
                newer.append(heappop(heap))
            else:
                found = key
                break
        for newcomer in newer:
            heappush(heap, newcomer)
        return found


class NodeCapacities:
    """The capacities of nodes: cores, memory, shares of devices."""

    def __init__(self, nodes: Iterable[Node], memory_bytes: Mapping[tuple[str, str], int]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._memory_bytes = memory_bytes

    def excess(self, name: str | None, replicas: Iterable[CheckedReplica]) -> str:
        """Why these replicas do not fit on a node together; empty if they do."""
        node = self._nodes.get(name or "")
        if node is None:
            return f"there is no node {name!r}"
        specs = [replica.spec for replica in replicas]
        cores = sum(max(replica.cores, replica.wanted_cores) for replica in replicas)
        if cores > node.cores + ROUNDING:
            return f"{name} has {node.cores:g} cores and gives out {cores:g}"
        memory_bytes = sum(self._memory_bytes.get((spec.stage, spec.variant), 0) for spec in specs)
        if memory_bytes > node.memory_bytes:
            return f"{name} has {node.memory_bytes} bytes and gives out {memory_bytes}"
        for device in {spec.device for spec in specs if spec.device}:
            share = sum(spec.share for spec in specs if spec.device == device)
            if device not in node.devices or share > 1.0 + ROUNDING:
                return f"{name} gives out {share:g} of device {device}"
        return ""


class CheckerState:
    """The checker's requests, queues and replicas, updated by events. With `order` it also keeps waiting visits'
    keys."""

    def __init__(self, application: Application, order: QueueKey | None = None) -> None:
        self.requests: dict[RequestId, CheckedRequest] = {}
        self.replicas: dict[ReplicaId, CheckedReplica] = {}
        self.by_node: dict[str | None, dict[ReplicaId, CheckedReplica]] = {}
        self.waiting = {stage.name: WaitingKeys() for stage in application.stages}
        self.step = 0
        """The number of events so far: an event and the actions that answer it are one step."""
        self._key = order.key if order is not None else None
        self._graph = application.graph
        self._only: Place | None = (application.stages[0].name, 0) if len(application.stages) == 1 else None

    def arrive(self, now_ns: int, request: Request) -> None:
        """A request is queued at the first stages."""
        if self._only is not None:
            self.requests[request.id] = entry = CheckedRequest(request, None)
            self._queue(entry, self._only, Visit(request, self._only[0], now_ns, request.deadline_ns))
            return
        progress = RequestProgress(self._graph, request)
        self.requests[request.id] = entry = CheckedRequest(request, progress)
        self._enter(now_ns, progress, entry, progress.begin())

    def pass_on(self, now_ns: int, replica: CheckedReplica, event: Finished) -> list[CheckedRequest]:
        """A batch has finished: queue its requests along their edges. Returns the requests that have finished."""
        requests, done = self.requests, []
        visits = replica.visits
        replica.batch, replica.visits = None, []
        for (entry, visit), counts in event.continuing(visits):
            if entry.request.id not in requests:
                continue
            progress = entry.progress
            if progress is not None:
                self._enter(now_ns, progress, entry, progress.finish(visit.stage, visit.part, counts))
                if progress.open_visits:
                    continue
                entry.deadline_ns = progress.deadline_ns(ended=True)
            entry.is_done = True
            done.append(entry)
        return done

    def put_back(self, replica: CheckedReplica) -> None:
        """A batch failed or its replica is gone: its requests wait at the same stage again."""
        visits = replica.visits
        replica.batch, replica.visits = None, []
        for entry, visit in visits:
            visit.attempts += 1
            if entry.request.id in self.requests:
                self._queue(entry, (visit.stage, visit.part), visit)

    def start(self, id: ReplicaId, spec: ReplicaSpec) -> None:
        """A replica is ordered; its cores and memory are in use from now on."""
        self.replicas[id] = replica = CheckedReplica(spec)
        self.by_node.setdefault(spec.node, {})[id] = replica

    def forget(self, id: ReplicaId) -> None:
        """A replica is gone; its resources are free."""
        replica = self.replicas.pop(id, None)
        if replica is not None:
            self.put_back(replica)
            del self.by_node[replica.spec.node][id]

    def _enter(self, now_ns: int, progress: RequestProgress, entry: CheckedRequest, entered: Iterable[Place]) -> None:
        deadline_ns = progress.deadline_ns()
        for stage, part in entered:
            self._queue(entry, (stage, part), Visit(entry.request, stage, now_ns, deadline_ns, 0, part))

    def _queue(self, entry: CheckedRequest, place: Place, visit: Visit) -> None:
        if self._key is None:
            entry.waiting[place] = self.step, visit, 0
            return
        key = self._key(visit)
        entry.waiting[place] = self.step, visit, key
        heappush(self.waiting[place[0]].heap, (key, entry.request.id, place, self.step))


def _never(now_ns: int, visit: Visit, cost_ns: int, full_ns: int) -> bool:
    return False


class Checkers:
    """Checks a log record by record; raises Violation at the first record that breaks an invariant.

    `order` is the order policy: batches must take the visits with the smallest keys. `is_hopeless` is the drop policy's
    method: requests for which it returned True must have ended. `origin` is the command that repeats the run.
    """

    def __init__(
        self,
        application: Application,
        nodes: Iterable[Node],
        *,
        order: QueueKey | None = None,
        is_hopeless: IsHopeless = _never,
        origin: str = "",
    ) -> None:
        variants = {(stage.name, variant.name): variant for stage in application.stages for variant in stage.variants}
        profiles = {key: variant.profile for key, variant in variants.items() if variant.profile is not None}
        self._batch_max = {key: profile.max_batch for key, profile in profiles.items()}
        self._capacities = NodeCapacities(nodes, {key: profile.memory_bytes for key, profile in profiles.items()})
        self._state = CheckerState(application, order)
        self._is_ordered = order is not None
        self._is_hopeless = is_hopeless
        self._origin = origin
        self._now_ns = -(2**63)
        self._record: Record | None = None
        self._event: Record | None = None
        self._limits: dict[tuple[str, str], int] = {}
        """Per stage and variant: the largest batch that the last plan with this variant allows."""
        self._short: set[str] = set()
        """Stages for which the core has reported that no node has capacity for the replicas of the plan."""
        self._last_batch = BatchId(-1)
        self._last_replica = ReplicaId(-1)
        self._done: list[CheckedRequest] = []
        """Requests that finished their last stage in this step, and must be answered in it."""
        self._started: list[tuple[str, int]] = []
        """Stage and largest key of the batches started in this step."""
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
        """End of the run: check that every request has ended. Faults are no excuse, because they stopped before.

        A request may still wait at a stage without replicas if the core has reported that no node has capacity for
        one, unless the drop policy had found the request hopeless.
        """
        self._end_step()
        requests, replicas = self._state.requests, self._state.replicas.values()
        empty = self._short - {replica.spec.stage for replica in replicas}
        for id, entry in requests.items():
            if self._is_given_up(entry):
                self._fail(f"request {id} waits at {list(entry.waiting)}, and the drop policy has given it up")
            if empty.isdisjoint(stage for stage, _ in entry.waiting):
                running = [replica.batch for replica in replicas if replica.runs(entry)]
                if running and not entry.waiting:
                    raise InputError(
                        f"request {id} still runs in batch {running[0]} long after the last arrival",
                        help="correct the latency of the profile, or `truth.profile_error`: batches take hours",
                    )
                where = f"waits at {list(entry.waiting)}" if entry.waiting else "runs in no batch"
                self._fail(f"{len(requests)} requests never ended; request {id} {where}")

    def _is_given_up(self, entry: CheckedRequest) -> bool:
        """Whether the drop policy found a waiting visit hopeless long ago, even with no remaining time after it."""
        request = entry.request
        then_ns = request.sent_ns + round(OVERDUE * (self._now_ns - request.sent_ns))
        return any(
            self._is_hopeless(then_ns, Visit(request, stage, then_ns, visit.deadline_ns, 0, part), 0, 0)
            for (stage, part), (_, visit, _) in entry.waiting.items()
        )

    def _end_step(self) -> None:
        """Check the invariants between steps, when an event and all its actions have been recorded."""
        state = self._state
        state.step += 1
        if not self._done and not self._started:
            return
        for entry in self._done:
            if entry.request.id in state.requests:
                self._fail(f"request {entry.request.id} has finished every stage and is not answered")
        for stage, largest in self._started:
            smallest = state.waiting[stage].smallest(state.requests, state.step - 1)
            if smallest is not None and smallest < largest:
                self._fail(
                    f"a batch at {stage} overtook a visit that the order policy puts first: {smallest} < {largest}"
                )
        self._done, self._started = [], []

    def _fail(self, what: str) -> NoReturn:
        again = f"\nreproduce with: {self._origin}" if self._origin else ""
        raise Violation(f"at {to_ms(self._now_ns):.6f} ms: {what}\nrecord: {self._record}\nevent: {self._event}{again}")

    def _arrived(self, request: Request) -> None:
        if request.id in self._state.requests:
            self._fail("a request arrived twice")
        if not request.sent_ns <= request.arrived_ns <= self._now_ns:
            self._fail("a request arrived before it was sent")
        self._state.arrive(self._now_ns, request)

    def _finished(self, event: Finished) -> None:
        replica = self._state.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            self._done = self._state.pass_on(self._now_ns, replica, event)

    def _batch_failed(self, event: BatchFailed) -> None:
        replica = self._state.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            self._state.put_back(replica)

    def _ready(self, event: ReplicaReady) -> None:
        replica = self._state.replicas.get(event.replica)
        if replica is not None:
            replica.ready = True

    def _gone(self, event: ReplicaLost | ReplicaStopped) -> None:
        self._state.forget(event.replica)

    def _resized(self, event: Resized) -> None:
        replica = self._state.replicas.get(event.replica)
        if replica is not None:
            replica.cores = event.cores
            replica.resizing -= 1
            if not replica.resizing:
                replica.wanted_cores = event.cores
            self._check_node(replica.spec.node)

    def _start_batch(self, order: StartBatch) -> None:
        replica = self._state.replicas.get(order.replica) or self._unknown(order.replica)
        variant = order.stage, replica.spec.variant
        size, limit = len(order.requests), self._limits.get(variant, 0)
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
        if size > (largest := self._batch_max.get(variant, size)):
            self._fail(f"a batch of {size} where {replica.spec.variant} takes up to {largest}")
        self._take(order, replica)
        replica.batch = self._last_batch = order.batch

    def _take(self, order: StartBatch, replica: CheckedReplica) -> None:
        """Move the visits of a batch from the queue to the replica."""
        requests, stage, visits = self._state.requests, order.stage, replica.visits
        if order.parts and len(order.parts) != len(order.requests):
            self._fail(f"{len(order.parts)} parts of {len(order.requests)} requests")
        largest = None
        for id, part in order.visits:
            entry = requests.get(id)
            waiting = entry.waiting.pop((stage, part), None) if entry is not None else None
            if entry is None or waiting is None:
                self._fail(f"request {id}, part {part}, does not wait at {stage}")
            _, visit, key = waiting
            visits.append((entry, visit))
            if largest is None or key > largest:
                largest = key
        if self._is_ordered and largest is not None:
            self._started.append((stage, largest))

    def _end(self, end: End) -> None:
        entry = self._state.requests.pop(end.request, None)
        if entry is None:
            self._fail("the end of a request that is not open: it never arrived, or ended before")
        outcome = end.outcome
        if entry.is_done is not (outcome is SERVED or outcome is LATE):
            self._fail(f"{outcome} {'after' if entry.is_done else 'before'} it finished every stage")
        if outcome is SERVED:
            if self._now_ns > entry.deadline_ns:
                self._fail("served, after its deadline")
        elif outcome is LATE:
            if self._now_ns <= entry.deadline_ns:
                self._fail("late, before its deadline")
        elif outcome is REJECTED and self._event is not entry.request:
            self._fail("rejected, but not on arrival")

    def _start_replica(self, order: StartReplica) -> None:
        if order.replica <= self._last_replica:
            self._fail(f"replica {order.replica} after replica {self._last_replica}")
        self._last_replica = order.replica
        self._state.start(order.replica, order.spec)
        self._check_node(order.spec.node)

    def _stop_replica(self, order: StopReplica) -> None:
        replica = self._state.replicas.get(order.replica) or self._unknown(order.replica)
        if replica.stopping:
            self._fail("the replica is ordered to stop twice")
        replica.stopping = replica.draining = True
        if replica.batch is not None:  # a stuck replica: the core reuses its cores at once
            self._state.forget(order.replica)

    def _resize_replica(self, order: ResizeReplica) -> None:
        replica = self._state.replicas.get(order.replica) or self._unknown(order.replica)
        if order.cores <= 0:
            self._fail("a replica without cores")
        replica.wanted_cores = max(order.cores, replica.wanted_cores) if replica.resizing else order.cores
        replica.resizing += 1
        self._check_node(replica.spec.node)

    def _decided(self, note: Decided) -> None:
        if note.plan is not None:
            for target in note.plan.stages:
                specs = [group.spec for group in target.groups if group.count]
                self._limits.update({(target.stage, spec.variant): target.batch_max for spec in specs})
        if note.kind == "shortage":
            self._short.add(note.stage)
        if note.kind == "drain" and note.replica is not None:
            replica = self._state.replicas.get(note.replica) or self._unknown(note.replica)
            replica.draining = True

    def _unknown(self, id: ReplicaId) -> NoReturn:
        self._fail(f"replica {id} does not exist (any more)")

    def _check_node(self, node: str | None) -> None:
        excess = self._capacities.excess(node, self._state.by_node.get(node, {}).values())
        if excess:
            self._fail(excess)
