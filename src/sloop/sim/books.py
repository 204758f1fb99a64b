"""The checkers' own books: where each open request is, what each replica does, what each node has given out.

Kept from the event log alone. Promises plain answers; what is wrong with them `sim.checkers` says.
"""

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush

from sloop.app.application import Application
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Request, RequestId

SLACK_CORES = 1e-6
"""Sums of fractional cores and shares may be off by this."""


class OpenRequest:
    """A request that has not ended, and where it is in the application's graph."""

    __slots__ = ("done", "request", "running", "waiting")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.waiting: dict[str, int] = {}
        """Stages it is queued at, with the step in which it came there."""
        self.running: dict[str, BatchId] = {}
        self.done: set[str] = set()


class TrackedReplica:
    """A replica between the order to start it and its end."""

    __slots__ = ("batch", "cores", "draining", "ready", "requests", "resizing", "spec", "stopping", "wanted_cores")

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.cores = spec.cores
        """In effect."""
        self.wanted_cores = spec.cores
        """The most it was asked to have among the resizes under way."""
        self.resizing = 0
        """Resizes ordered and not yet in force."""
        self.ready = False
        self.draining = False
        self.stopping = False
        self.batch: BatchId | None = None
        self.requests: tuple[RequestId, ...] = ()


class Waiting:
    """The deadlines waiting at one stage: the earliest at hand, entries that left are passed over."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestId, int]] = []

    def add(self, deadline_ns: int, request: RequestId, step: int) -> None:
        heappush(self._heap, (deadline_ns, request, step))

    def earliest_ns(self, stage: str, requests: Mapping[RequestId, OpenRequest], before_step: int) -> int | None:
        """The earliest deadline among requests that wait here since before a step; None where there is none."""
        heap, passed = self._heap, []
        found = None
        while heap:
            deadline_ns, id, step = heap[0]
            entry = requests.get(id)
            if entry is None or entry.waiting.get(stage) != step:
                heappop(heap)
            elif step >= before_step:
                passed.append(heappop(heap))
            else:
                found = deadline_ns
                break
        for entry_again in passed:
            heappush(heap, entry_again)
        return found


class Rooms:
    """What is given out on each node: cores, memory, shares of devices."""

    def __init__(self, nodes: Iterable[Node], memory_bytes: Mapping[tuple[str, str], int]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._memory_bytes = memory_bytes

    def complaint(self, name: str | None, replicas: Iterable[TrackedReplica]) -> str:
        """Why the replicas on a node do not fit it; empty where they do."""
        node = self._nodes.get(name or "")
        if node is None:
            return f"there is no node {name!r}"
        specs = [replica.spec for replica in replicas]
        cores = sum(max(replica.cores, replica.wanted_cores) for replica in replicas)
        if cores > node.cores + SLACK_CORES:
            return f"{name} has {node.cores:g} cores and gives out {cores:g}"
        memory_bytes = sum(self._memory_bytes.get((spec.stage, spec.variant), 0) for spec in specs)
        if memory_bytes > node.memory_bytes:
            return f"{name} has {node.memory_bytes} bytes and gives out {memory_bytes}"
        for device in {spec.device for spec in specs if spec.device}:
            share = sum(spec.share for spec in specs if spec.device == device)
            if device not in node.devices or share > 1.0 + SLACK_CORES:
                return f"{name} gives out {share:g} of device {device}"
        return ""


class Books:
    """All of it, with the moves that events make. Deadlines that wait are kept in order only if `ordered`."""

    def __init__(self, application: Application, *, ordered: bool = True) -> None:
        self._ordered = ordered
        self.requests: dict[RequestId, OpenRequest] = {}
        self.replicas: dict[ReplicaId, TrackedReplica] = {}
        self.by_node: dict[str | None, dict[ReplicaId, TrackedReplica]] = {}
        self.waiting = {stage.name: Waiting() for stage in application.stages}
        self.step = 0
        """Counts events: what an event and its actions do belongs to one step."""
        self._after = {stage.name: stage.after for stage in application.stages}
        self._successors = application.successors
        self._sources = tuple(stage.name for stage in application.sources)
        self.sinks = frozenset(stage.name for stage in application.sinks)

    def arrive(self, request: Request) -> None:
        """A request knocks, and queues at the first stages."""
        self.requests[request.id] = entry = OpenRequest(request)
        for stage in self._sources:
            self._queue(entry, stage)

    def pass_on(self, replica: TrackedReplica) -> list[OpenRequest]:
        """A batch is done: its requests queue at the stages that follow. Returns those that have passed them all."""
        stage, through = replica.spec.stage, []
        for entry in self._release(replica):
            entry.done.add(stage)
            for following in self._successors[stage]:
                if entry.done.issuperset(self._after[following]):
                    self._queue(entry, following)
            if entry.done >= self.sinks:
                through.append(entry)
        return through

    def put_back(self, replica: TrackedReplica) -> None:
        """A batch came to nothing: its requests are where they were, to be tried again or ended."""
        for entry in self._release(replica):
            self._queue(entry, replica.spec.stage)

    def start(self, id: ReplicaId, spec: ReplicaSpec) -> None:
        """A replica is ordered, and holds its room from now on."""
        self.replicas[id] = replica = TrackedReplica(spec)
        self.by_node.setdefault(spec.node, {})[id] = replica

    def forget(self, id: ReplicaId) -> None:
        """A replica is gone, its room is free."""
        replica = self.replicas.pop(id, None)
        if replica is not None:
            self.put_back(replica)
            del self.by_node[replica.spec.node][id]

    def _release(self, replica: TrackedReplica) -> list[OpenRequest]:
        """The requests of a replica's batch that have not ended meanwhile, taken off it."""
        batch, stage = replica.batch, replica.spec.stage
        found = map(self.requests.get, replica.requests)
        open = [entry for entry in found if entry is not None]
        replica.batch, replica.requests = None, ()
        for entry in open:
            assert entry.running.pop(stage) == batch, f"the books lost batch {batch}"
        return open

    def _queue(self, entry: OpenRequest, stage: str) -> None:
        entry.waiting[stage] = self.step
        if self._ordered:
            self.waiting[stage].add(entry.request.deadline_ns, entry.request.id, self.step)
