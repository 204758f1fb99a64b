"""The checkers' own books: where each open request is, what each replica does, what each node has given out.

Kept from the event log alone. Promises plain answers; what is wrong with them `sim.checkers` says.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from sloop.app.application import Application
from sloop.app.journey import Journey
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Request, RequestId

SLACK_CORES = 1e-6
"""Sums of fractional cores and shares may be off by this."""


Place = tuple[str, int]
"""A stage, and the part of the request it is visited for."""


class OpenRequest:
    """A request that has not ended, and where it is in the application's graph."""

    __slots__ = ("is_through", "journey", "request", "waiting")

    def __init__(self, request: Request, journey: Journey | None) -> None:
        self.request = request
        self.journey = journey
        """None where there is but one stage."""
        self.is_through = False
        """Whether nothing of it is left to do."""
        self.waiting: dict[Place, tuple[int, int]] = {}
        """Where it is queued: the step in which it came there, and the deadline it has there."""

    def deadline_ns(self) -> int:
        """By when it is to be answered, as far as is known which path it is on."""
        if self.journey is None:
            return self.request.deadline_ns
        return self.journey.deadline_ns(self.request, ended=self.is_through)


Visit = tuple[OpenRequest, Place, int]
"""A request in a batch, from where in its graph, with the deadline it had in the queue there."""


class TrackedReplica:
    """A replica between the order to start it and its end."""

    __slots__ = (
        "batch",
        "cores",
        "draining",
        "ready",
        "resizing",
        "spec",
        "stopping",
        "visits",
        "wanted_cores",
    )

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
        self.visits: list[Visit] = []
        """What its batch is made of."""

    def runs(self, entry: OpenRequest) -> bool:
        """Whether its batch has something of a request."""
        return any(visit[0] is entry for visit in self.visits)


class Waiting:
    """The deadlines waiting at one stage: the earliest at hand, entries that left are passed over."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[int, RequestId, Place, int]] = []

    def add(self, deadline_ns: int, request: RequestId, place: Place, step: int) -> None:
        heappush(self._heap, (deadline_ns, request, place, step))

    def earliest_ns(self, requests: Mapping[RequestId, OpenRequest], before_step: int) -> int | None:
        """The earliest deadline among requests that wait here since before a step; None where there is none."""
        heap, passed = self._heap, []
        found = None
        while heap:
            deadline_ns, id, place, step = heap[0]
            entry = requests.get(id)
            if entry is None or (waits := entry.waiting.get(place)) is None or waits[0] != step:
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
        self._graph = application.graph
        self._only: Place | None = (application.stages[0].name, 0) if len(application.stages) == 1 else None

    def arrive(self, request: Request) -> None:
        """A request knocks, and queues at the first stages."""
        if self._only is not None:
            self.requests[request.id] = entry = OpenRequest(request, None)
            self._queue(entry, self._only, request.deadline_ns)
            return
        journey = Journey(self._graph)
        self.requests[request.id] = entry = OpenRequest(request, journey)
        self._enter(entry, journey.begin(request.enters))

    def pass_on(self, replica: TrackedReplica, edge_counts: Sequence[Sequence[int]]) -> list[OpenRequest]:
        """A batch is done: its requests queue where their edge_counts lead. Returns those that have come to an end."""
        requests, through = self.requests, []
        visits = self._release(replica)
        for (entry, place, _), way in zip(visits, edge_counts or ((),) * len(visits), strict=True):
            if entry.request.id not in requests:
                continue
            journey = entry.journey
            if journey is not None:
                self._enter(entry, journey.finish(*place, way))
            if journey is None or not journey.open:
                entry.is_through = True
                through.append(entry)
        return through

    def put_back(self, replica: TrackedReplica) -> None:
        """A batch came to nothing: its requests are where they were, to be tried again or ended."""
        for entry, place, deadline_ns in self._release(replica):
            if entry.request.id in self.requests:
                self._queue(entry, place, deadline_ns)

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

    def _release(self, replica: TrackedReplica) -> list[Visit]:
        """A replica's batch, taken off it; some of its requests may have ended meanwhile."""
        visits = replica.visits
        replica.batch, replica.visits = None, []
        return visits

    def _enter(self, entry: OpenRequest, entered: Iterable[Place]) -> None:
        deadline_ns = entry.deadline_ns()
        for place in entered:
            self._queue(entry, place, deadline_ns)

    def _queue(self, entry: OpenRequest, place: Place, deadline_ns: int) -> None:
        entry.waiting[place] = self.step, deadline_ns
        if self._ordered:
            self.waiting[place[0]].add(deadline_ns, entry.request.id, place, self.step)
