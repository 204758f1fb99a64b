"""Checkers: invariants that must hold in every run under any policy. They read only the event log.

The checkers keep their own state (requests, queues, replicas, nodes, versions) and compare every order of the core with
it. Safety is checked at every record: a request ends once, in a version of its own application; a replica runs one
batch, on a node that was ready for it; no core and no share of a device is given out twice; a queue is served in its
policy's order, and a replica begins batches in the order in which they were bound to it; the rows of a batch are of one
class of sizes, and of one request if they are more than a forward pass takes; a request that shared a failed batch
fails only alone, after few tries; a node is charged once; a version that has retired has neither requests nor
replicas. Liveness is checked at the end (`finish`): every request that arrived has ended. Where the core orders
transfers of weights: who sends them has them, no replica starts before its own are there, nothing in use is evicted,
and no memory is given out twice. They work on live logs as well as on simulated ones.

Must not import the core, beliefs or truth. State, node capacities and the walks of requests (`sim.walk`) are
deliberately computed a second time: a checker that shared the core's code would share its mistakes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain, repeat
from typing import Any, Final, NoReturn, Protocol

from msgspec import structs

from sloop import actions, events
from sloop.actions import End, Piece, StartBatch, VersionState
from sloop.app.application import Application, Stage
from sloop.events import Finished
from sloop.profile.profile import Profile
from sloop.runlog import EVENTS, Record
from sloop.sim.walk import DeclaredStages, Place, Walk
from sloop.units import NS_PER_S, ROUNDING, s, to_ms
from sloop.vocabulary import (
    ALONE,
    STORE,
    BatchId,
    LayerSet,
    ModelWeights,
    Node,
    NodeState,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Shape,
    Slot,
    TransferId,
    Visit,
    Worker,
    WorkerId,
    bounds_of,
    version_key,
)

SERVED: Final = Outcome.SERVED
LATE: Final = Outcome.LATE
REJECTED: Final = Outcome.REJECTED
FAILED: Final = Outcome.FAILED
EVENT_TYPES: Final = frozenset(EVENTS)

OVERDUE: Final = 0.75
"""At the end of a run a request may still wait, unless the drop policy would already have dropped it at this fraction
of its present age. Younger ones are accepted because the core does not search its queues at every instant."""

HALF_UNIT: Final = 0.0005
"""Nodes give out cores in thousandths, so each replica may have up to half a thousandth more than is counted."""

FIRST_KEY: Final = -(1 << 63)
"""The key of a visit that is tried again: before all others."""

FETCHING: Final = "fetching"
"""The step of a start that waits for its weights."""

NO_SIZES: Final[Mapping[tuple[str, str], tuple[int, int]]] = {}

STALL_NS_MIN: Final = NS_PER_S
"""A request is dropped from a running batch only if the batch has run for this long."""

IsHopeless = Callable[[int, Visit, int, int], bool]
"""The verb of a drop policy; see `sloop.core.protocols.Drop`."""

NEXT_STATES: Final = {
    VersionState.STARTING: (VersionState.CANARY, VersionState.SERVING, VersionState.RETIRING),
    VersionState.CANARY: (VersionState.SERVING, VersionState.RETIRING),
    VersionState.SERVING: (VersionState.RETIRING,),
    VersionState.RETIRING: (VersionState.RETIRED,),
    VersionState.RETIRED: (),
}
"""The states that may follow each state of an application version."""
TAKES_REQUESTS: Final = (VersionState.CANARY, VersionState.SERVING)


class QueueKey(Protocol):
    """An order policy: the waiting visit with the smallest key is served first; see `sloop.core.protocols.Order`."""

    def key(self, visit: Visit) -> int: ...


class Violation(AssertionError):
    """An invariant is broken. The message ends with the command that reproduces it, if there is one."""


def _never(now_ns: int, visit: Visit, cost_ns: int, full_ns: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Rules:
    """What the records of one application version are checked against.

    `order` is the order policy: batches must take the visits with the smallest keys. `is_hopeless` is the drop policy's
    method: requests for which it returned True must have ended. `provides` says that the core knows where weights are:
    a start without a transfer needs them on its node.
    """

    application: Application
    order: QueueKey | None = None
    is_hopeless: IsHopeless = _never
    provides: bool = False
    choices: Mapping[str, "Rules"] = field(default_factory=dict)
    """By name, the rules under each system among which an overseer chooses."""


class CheckedVersion:
    """An application version while it is deployed."""

    __slots__ = (
        "choices",
        "declared",
        "is_hopeless",
        "is_waking",
        "key",
        "name",
        "only",
        "order_key",
        "plan",
        "provides",
        "slo_ns",
        "stages",
        "state",
        "version",
        "wake_ns",
    )

    def __init__(self, rules: Rules, state: VersionState) -> None:
        application = rules.application
        self.key, self.name, self.version = application.key, application.name, application.version
        self.slo_ns = application.slo_ns
        self.declared = DeclaredStages(application.graph)
        self.only: Place | None = (application.stages[0].name, 0) if len(application.stages) == 1 else None
        self.stages = tuple(stage.name for stage in application.stages)
        self.choices = rules.choices
        self.follow(rules)
        self.state = state
        self.plan: Plan | None = None
        """The last plan."""
        self.wake_ns = s(application.wake_s)
        self.is_waking = self.wake_ns > 0
        """Whether requests that arrive may wait so long for the first replicas."""

    def follow(self, rules: Rules) -> None:
        """Check against the policies of these rules."""
        self.order_key = rules.order.key if rules.order is not None else None
        self.is_hopeless = rules.is_hopeless
        self.provides = rules.provides

    def patient_ns(self, request: Request) -> int:
        """Until when a request that arrives now may wait for a start; 0: its deadline counts."""
        return max(request.deadline_ns, request.arrived_ns + self.wake_ns) if self.is_waking else 0


class Retry:
    """A batch that failed or was lost: its requests may run again only with each other, in batches of at most
    `requests` different ones."""

    __slots__ = ("requests",)

    def __init__(self, requests: int) -> None:
        self.requests = requests


class FailedTries:
    """What follows for a request from its failed batches."""

    __slots__ = ("may_fail", "retries")

    def __init__(self) -> None:
        self.may_fail = False
        """Whether a batch with no other request has failed, or has lost a second replica."""
        self.retries: dict[Place, Retry] = {}
        """Per place where it is tried again, with whom."""


class CheckedRequest:
    """An open request and its position in the graph of its application version."""

    __slots__ = ("deadline_ns", "is_done", "patient_ns", "request", "sizes", "tries", "version", "waiting", "walk")

    def __init__(self, request: Request, version: CheckedVersion, walk: Walk | None) -> None:
        self.request = request
        self.version = version
        self.walk = walk
        """None in an application of one stage."""
        self.is_done = False
        """Whether it has finished all stages of its route."""
        self.sizes: Mapping[tuple[str, str], tuple[int, int]] = NO_SIZES
        """By stage and later stage, the rows and the size that the one has told of what it passes on to the other."""
        self.tries: FailedTries | None = None
        """None as long as none of its batches failed or was lost."""
        self.patient_ns = version.patient_ns(request) if version.is_waking else 0
        self.deadline_ns = request.deadline_ns
        """The deadline of its path, if paths have deadlines; known once it is done."""
        self.waiting: dict[Place, tuple[int, Visit, int]] = {}
        """Per place where it is queued: the step in which it was queued, the visit, and the visit's key."""

    def blame(self) -> None:
        """It has been found to be the cause of a failure, and may fail."""
        self.failed_tries().may_fail = True

    def failed_tries(self) -> FailedTries:
        """Its failed tries, of which there is one from now on."""
        if self.tries is None:
            self.tries = FailedTries()
        return self.tries


class CheckedReplica:
    """A replica from the order to start it until it has stopped or is lost."""

    __slots__ = (
        "batch",
        "batch_max",
        "cores",
        "draining",
        "has_rest",
        "limit",
        "part",
        "pipeline",
        "ready",
        "resizing",
        "rest",
        "shadow",
        "shadow_bytes",
        "shadow_parts",
        "shape",
        "spec",
        "started_ns",
        "stopping",
        "transfer",
        "visits",
        "wanted_cores",
        "weights",
    )

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.weights: ModelWeights | None = None
        """What it starts from; None if drivers see to it."""
        self.transfer: TransferId | None = None
        """The transfer that it waits for."""
        self.cores = spec.cores
        """In effect."""
        self.wanted_cores = spec.cores
        """The largest core count among its pending resizes."""
        self.resizing = 0
        """The number of pending resizes."""
        self.shape = ALONE
        """In effect."""
        self.shadow: actions.StartWorker | None = None
        """The order of the shadow that has room on the node."""
        self.shadow_bytes = 0
        self.shadow_parts = False
        """Whether it was told to stop."""
        self.limit = 0
        """The largest batch that the plan allows it."""
        self.batch_max = 0
        """The largest batch that its variant takes; 0 if that is unknown."""
        self.part: Worker | None = None
        """The layers that it has, if it has not all."""
        self.pipeline: CheckedPipeline | None = None
        self.rest: TransferId | None = None
        """The transfer that brings the other layers."""
        self.has_rest = False
        """Whether these have come, and the files stay."""
        self.ready = False
        self.draining = False
        self.stopping = False
        self.batch: BatchId | None = None
        self.started_ns = 0
        """When its batch began."""
        self.visits: list[tuple[CheckedRequest, Visit]] = []
        """The visits in its batch."""

    @property
    def assembles(self) -> bool:
        """Whether its node gets the files for it layer by layer."""
        return self.part is not None and self.transfer is not None and not self.has_rest

    def runs(self, entry: CheckedRequest) -> bool:
        """Whether its batch contains a visit of this request."""
        return any(running is entry for running, _ in self.visits)


class CheckedPipeline:
    """The parts of a pipeline, and those that have started."""

    __slots__ = ("members", "shape", "started")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.members: dict[ReplicaId, CheckedReplica] = {}
        self.started: set[ReplicaId] = set()


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


class CheckedNode:
    """A node: its state, what it holds, and for how long it was charged."""

    __slots__ = ("arriving", "charged_ns", "failed", "files", "node", "replicas", "said", "since_ns", "state")

    def __init__(self, node: Node, now_ns: int = 0) -> None:
        self.node = node
        self.files: set[ModelWeights] = set()
        """What it keeps of the weights of models."""
        self.said: set[ModelWeights] = set()
        """What it has, as it says when it joins; the core counts on them as far as the node has memory."""
        self.arriving: dict[TransferId, actions.Transfer] = {}
        """The transfers to it."""
        self.failed: set[TransferId] = set()
        """Those that have failed; the replicas that wait for them will be reported lost."""
        self.state = NodeState.RELEASED if node.on_demand else NodeState.READY
        self.replicas: dict[ReplicaId, CheckedReplica] = {}
        self.since_ns: int | None = None if node.on_demand else now_ns
        """Since when it is charged; None if it is not."""
        self.charged_ns = 0
        """How long it was charged before that."""

    def charge(self, now_ns: int) -> None:
        """It is held from now on; once, however often that is said."""
        if self.since_ns is None:
            self.since_ns = now_ns

    def discharge(self, now_ns: int) -> None:
        """It is not held any more."""
        if self.since_ns is not None:
            self.charged_ns += now_ns - self.since_ns
            self.since_ns = None

    def excess(self, profiles: Mapping[tuple[str, str, str], Profile], *further: CheckedReplica) -> str:
        """Why its replicas, and further ones, do not fit on it together; empty if they do."""
        node, replicas = self.node, (*self.replicas.values(), *further)
        shadows = [replica.shadow for replica in replicas if replica.shadow is not None]
        cores = sum(max(replica.cores, replica.wanted_cores) for replica in replicas)
        cores += sum(worker.cores for order in shadows for worker in order.spec.shape)
        if cores > node.cores + HALF_UNIT * (len(replicas) + len(shadows)) + ROUNDING:
            return f"{node.name} has {node.cores:g} cores and gives out {cores:g}"
        used = [(replica.spec, profiles.get(profile_key(replica.spec))) for replica in replicas]
        memory_bytes = sum(profile.memory_bytes for _, profile in used if profile is not None) + self.weights_bytes
        memory_bytes += sum(replica.shadow_bytes for replica in replicas)
        if memory_bytes > node.memory_bytes:
            return f"{node.name} has {node.memory_bytes} bytes and gives out {memory_bytes}"
        for device in node.devices:
            own = [(spec, profile) for spec, profile in used if spec.device == device.name]
            share = sum(spec.slot.share for spec, _ in own)
            if share > 1.0 + ROUNDING:
                return f"{node.name} gives out {share:g} of device {device.name}"
            memory_bytes = sum(profile.device_memory_bytes for _, profile in own if profile is not None)
            if memory_bytes > device.memory_bytes:
                return f"{device.name} of {node.name} has {device.memory_bytes} bytes and gives out {memory_bytes}"
            if len(own) > device.clients_max:
                return f"{device.name} of {node.name} takes {device.clients_max} clients and has {len(own)}"
        return ""

    @property
    def weights_bytes(self) -> int:
        """Memory for the files of models that are there or arrive."""
        if not (self.files or self.arriving or self.replicas):
            return 0
        own = [each for each in self.replicas.values() if each.weights is not None]
        copies = [each.weights for each in own if each.assembles]
        arrived = [each for each in own if each.transfer not in (None, *self.arriving, *self.failed)]
        files = {each.weights for each in arrived if self._loads(each)}
        arriving = [each.weights for each in self.arriving.values() if each.weights.layers is None]
        found = [*(self.files | files), *arriving, *copies]
        return sum(each.size_bytes for each in found if each is not None)

    def has_cores(self, cores: float) -> bool:
        """Whether this many cores are free, counted in thousandths, as the core reserves them."""
        held = [max(replica.cores, replica.wanted_cores) for replica in self.replicas.values()]
        orders = [each.shadow for each in self.replicas.values() if each.shadow is not None]
        held += [worker.cores for order in orders for worker in order.spec.shape]
        return sum(round(1000 * each) for each in (*held, cores)) <= round(1000 * self.node.cores)

    def uses(self, weights: ModelWeights) -> bool:
        """Whether a replica here needs these files to start."""
        return any(each.weights == weights and self._loads(each) for each in self.replicas.values())

    def _loads(self, replica: CheckedReplica) -> bool:
        """Whether a replica has yet to load its weights from files."""
        return not replica.assembles and not (replica.ready and replica.part is None)

    def empty(self) -> None:
        """It is lost or released, with all that it kept."""
        self.files.clear()
        self.said.clear()
        self.arriving.clear()

    def misfit(self, spec: ReplicaSpec) -> str:
        """Why a replica must not start here, whatever is free; empty if it may."""
        node, slot = self.node, spec.slot
        if self.state is not NodeState.READY:
            return f"{node.name} is {self.state}, not ready"
        if slot.hardware not in ("", node.hardware):
            return f"{node.name} is of kind {node.hardware}, not {slot.hardware}"
        kinds = {device.name: device.kind for device in node.devices}
        if spec.device is not None and spec.device not in kinds:
            return f"{node.name} has no device {spec.device}"
        kind = "" if spec.device is None else kinds[spec.device]
        if kind != slot.accelerator:
            return f"it needs accelerator {slot.accelerator or 'none'!r} and gets {kind or 'none'!r}"
        return ""


def profile_key(spec: ReplicaSpec) -> tuple[str, str, str]:
    """Stage, variant and kind of hardware."""
    return spec.stage, spec.variant, spec.slot.hardware


class CheckerState:
    """The checker's requests, queues, replicas and nodes, updated by events. Where there is an order policy it also
    keeps waiting visits' keys."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.versions: dict[str, CheckedVersion] = {}
        """By key; all that are or were deployed."""
        self._present: dict[str, list[CheckedVersion]] = {}
        """By name, the versions that have not ended."""
        self.requests: dict[RequestId, CheckedRequest] = {}
        self.replicas: dict[ReplicaId, CheckedReplica] = {}
        self.shadows: dict[WorkerId, CheckedReplica] = {}
        """By the number of each shadow, its replica."""
        self.nodes = {node.name: CheckedNode(node) for node in nodes}
        self.waiting: dict[str, WaitingKeys] = {}
        """By lane: per stage those of visits whose rows have no size, and those of each class of sizes."""
        self.stages: dict[str, CheckedVersion] = {}
        """Per stage, the version that it belongs to."""
        self._declared: dict[str, Stage] = {}
        self.is_mixed = False
        """Whether a request of several rows, or of rows of a size, has arrived."""
        self.rows_begun: dict[tuple[RequestId, str], set[int]] = {}
        self.rows_done: dict[tuple[RequestId, str], int] = {}
        """Of requests that run in pieces at a stage: which of their rows have begun, and how many have finished."""
        self.step = 0
        """The number of events so far: an event and the actions that answer it are one step."""

    def deploy(self, rules: Rules, state: VersionState = VersionState.SERVING) -> CheckedVersion:
        """An application version is there from now on."""
        self.versions.pop(rules.application.key, None)
        self.versions[rules.application.key] = made = CheckedVersion(rules, state)
        self._present.setdefault(made.name, []).append(made)
        for stage in rules.application.stages:
            self.waiting[stage.name] = WaitingKeys()
            self.stages[stage.name] = made
            self._declared[stage.name] = stage
        return made

    def is_divided(self, stage: str) -> bool:
        """Whether the rows of a request may run in several forward passes."""
        return self._declared[stage].keeps_rows_apart

    def class_of(self, visit: Visit) -> int:
        """The class of its rows' size at its stage; 0 if they have none."""
        return self._declared[visit.stage].size_classes.class_of(visit.size)

    def lane(self, visit: Visit) -> str:
        """Visits of one lane can run in one batch: their sizes are of one class and, where rows are not padded, size
        and shape are equal."""
        stage, size, request = self._declared[visit.stage], visit.size, visit.request
        if not size:
            return visit.stage
        lane = f"{visit.stage} up to {self.class_of(visit)}"
        if not stage.pads:
            lane += f", {size} {request.shape if request.size == size else ()}"
        self.waiting.setdefault(lane, WaitingKeys())
        return lane

    def change_system(self, version: CheckedVersion, rules: Rules) -> None:
        """Other policies decide for a version; what waits keeps the step in which it was queued."""
        version.follow(rules)
        order_key = version.order_key
        waiting = [(id, entry) for id, entry in self.requests.items() if entry.version is version]
        for lane in {self.lane(visit) for _, entry in waiting for _, visit, _ in entry.waiting.values()}:
            self.waiting[lane] = WaitingKeys()
        for id, entry in waiting:
            for place, (step, visit, key) in entry.waiting.items():
                new_key = order_key(visit) if order_key is not None and key != FIRST_KEY else key
                entry.waiting[place] = step, visit, new_key
                heappush(self.waiting[self.lane(visit)].heap, (new_key, id, place, step))

    def end(self, version: CheckedVersion) -> None:
        """An application version has ended."""
        left = self._present[version.name]
        left.remove(version)
        if not left:
            del self._present[version.name]

    def versions_of(self, name: str) -> Sequence[CheckedVersion]:
        """The versions of an application that have not ended; of the only application if the name is empty."""
        if not name and len(self._present) == 1:
            (only,) = self._present.values()
            return only
        return self._present.get(name, ())

    def counted_at(self, name: str) -> str:
        """The key of the version for which requests are counted that no version of an application accepts: the only one
        that has not ended, otherwise the one that was deployed last; "" if there is none."""
        present = self.versions_of(name)
        if len(present) == 1:
            return present[0].key
        return next((each.key for each in reversed(self.versions.values()) if each.name == name), "")

    def arrive(self, now_ns: int, request: Request, version: CheckedVersion) -> None:
        """A request is queued at the first stages of a version."""
        only = version.only
        if only is not None:
            self.requests[request.id] = entry = CheckedRequest(request, version, None)
            visit = Visit(request, only[0], now_ns, max(request.deadline_ns, entry.patient_ns))
            if request.size or request.rows != 1:
                self.is_mixed, visit.rows, visit.size = True, request.rows, request.size
            self._queue(entry, only, visit)
            return
        walk = Walk(version.declared, request)
        self.requests[request.id] = entry = CheckedRequest(request, version, walk)
        self._enter(now_ns, walk, entry, walk.begin(), request.rows, request.size)

    def change_patience(self, entry: CheckedRequest) -> None:
        """A request has arrived in this step, at a version that has just begun or ceased to let requests wait."""
        entry.patient_ns = entry.version.patient_ns(entry.request)
        walk = entry.walk
        deadline_ns = max(walk.deadline_ns() if walk is not None else entry.request.deadline_ns, entry.patient_ns)
        for place, (_, visit, _) in list(entry.waiting.items()):
            visit.deadline_ns = deadline_ns
            self._queue(entry, place, visit)

    def pass_on(self, now_ns: int, replica: CheckedReplica, event: Finished) -> list[CheckedRequest]:
        """A batch has finished: queue its requests along their edges. Returns the requests that have finished."""
        requests, done = self.requests, []
        visits = replica.visits
        replica.batch, replica.visits = None, []
        if event.sizes:
            _note_sizes(visits, event)
        for (entry, visit), counts in event.continuing(visits):
            if entry.request.id not in requests:
                continue
            if visit.of and not self._completes(visit):
                continue
            walk = entry.walk
            if walk is not None:
                entered = walk.finish(visit.stage, visit.part, counts)
                self._enter(now_ns, walk, entry, entered, visit.of or visit.rows)
                if walk.open_visits:
                    continue
                entry.deadline_ns = walk.deadline_ns(ended=True)
            entry.is_done = True
            done.append(entry)
        return done

    def _completes(self, visit: Visit) -> bool:
        """Whether a piece that has finished is the last one of its request."""
        key = visit.request.id, visit.stage
        self.rows_done[key] = done = self.rows_done.get(key, 0) + visit.rows
        return done >= visit.of

    def fail(self, replica: CheckedReplica) -> None:
        """A batch failed: half of its requests wait for a batch of their own, as does the other half."""
        entries = list(dict.fromkeys(entry for entry, _ in replica.visits))
        if len(entries) == 1:
            entries[0].blame()
        retry = Retry((len(entries) + 1) // 2)
        self._put_back(replica, lambda entry: retry)

    def lose(self, replica: CheckedReplica, *, is_blamed: bool) -> None:
        """A replica is gone. If its batch is to blame, each of its requests waits for a batch of its own; otherwise
        they wait as before they began."""
        if not is_blamed:
            self._put_back(replica, None)
            return
        alone: dict[CheckedRequest, Retry] = {}
        for entry, visit in replica.visits:
            visit.attempts += 1
            if visit.attempts > 1:
                entry.blame()
            alone.setdefault(entry, Retry(1))
        self._put_back(replica, alone.__getitem__)

    def dissolve(self, pipeline: CheckedPipeline) -> None:
        """It is over: those of its parts that have all layers are ready."""
        for member in pipeline.members.values():
            member.pipeline = None
            member.ready = member.part is None

    def _put_back(self, replica: CheckedReplica, retry_of: Callable[[CheckedRequest], Retry] | None) -> None:
        """The requests of a batch wait at the same stage again."""
        visits = replica.visits
        replica.batch, replica.visits = None, []
        for entry, visit in visits:
            place = (visit.stage, 1 + visit.first) if visit.of else (visit.stage, visit.part)
            if entry.request.id not in self.requests:
                continue
            if retry_of is not None:
                entry.failed_tries().retries[place] = retry_of(entry)
            self._queue(entry, place, visit)

    def start(self, id: ReplicaId, spec: ReplicaSpec) -> CheckedReplica:
        """A replica is ordered; its cores and memory are in use from now on."""
        self.replicas[id] = replica = CheckedReplica(spec)
        node = self.nodes.get(spec.node or "")
        if node is not None:
            node.replicas[id] = replica
        return replica

    def forget(self, id: ReplicaId, *, has_died: bool) -> None:
        """A replica is gone; its resources are free. If it has died, its batch is to blame, unless its node is lost."""
        replica = self.replicas.pop(id, None)
        if replica is not None:
            node = self.nodes.get(replica.spec.node or "")
            self.lose(replica, is_blamed=has_died and (node is None or node.state is not NodeState.LOST))
            if node is not None:
                del node.replicas[id]
            if replica.shadow is not None:
                del self.shadows[replica.shadow.worker]
            if replica.pipeline is not None:
                del replica.pipeline.members[id]
                self.dissolve(replica.pipeline)

    def _enter(
        self, now_ns: int, walk: Walk, entry: CheckedRequest, entered: Iterable[Place], rows: int, size: int = 0
    ) -> None:
        """It enters stages with so many rows of this size, unless others are known; a part has one row."""
        deadline_ns, scopes = max(walk.deadline_ns(), entry.patient_ns), entry.version.declared.scopes
        for stage, part in entered:
            reported = [works for (_, target), works in entry.sizes.items() if target == stage]
            own_size = max((each for _, each in reported), default=0 if entry.sizes else size)
            own_rows = max((each for each, _ in reported), default=0) or (1 if scopes[stage] else rows)
            visit = Visit(entry.request, stage, now_ns, deadline_ns, 0, part, 0, own_rows, own_size)
            self.is_mixed = self.is_mixed or own_size > 0 or own_rows != 1
            self._queue(entry, (stage, part), visit)

    def _queue(self, entry: CheckedRequest, place: Place, visit: Visit) -> None:
        order_key = entry.version.order_key
        if entry.tries is not None and place in entry.tries.retries:
            key = FIRST_KEY
        elif order_key is None:
            entry.waiting[place] = self.step, visit, 0
            return
        else:
            key = order_key(visit)
        entry.waiting[place] = self.step, visit, key
        lane = self.lane(visit) if visit.size else place[0]
        heappush(self.waiting[lane].heap, (key, entry.request.id, place, self.step))


def _note_sizes(visits: Sequence[tuple[CheckedRequest, Visit]], event: Finished) -> None:
    """A batch says how many rows it passes on, and how large they are. Of pieces, there are as many as before."""
    for (entry, visit), works, counts in zip(visits, event.sizes, event.edge_counts or repeat(()), strict=False):
        declared = entry.version.declared
        joins = declared.joins.get(declared.scopes[visit.stage], ())
        for stage, (rows, size), count in zip(declared.targets[visit.stage], works, counts or repeat(1), strict=False):
            edge = visit.stage, stage
            if count and stage in joins:
                known_rows, known_size = entry.sizes.get(edge, (0, 0))
                made = known_rows + rows, max(known_size, size) if rows else known_size + size
                entry.sizes = {**entry.sizes, edge: made}
            elif count:
                entry.sizes = {**entry.sizes, edge: (0 if visit.of else rows, size)}


def _unchecked(record: Record) -> None:
    """There is nothing to check."""


class Checkers:
    """Checks a log record by record; raises Violation at the first record that breaks an invariant.

    `versions` are the application versions that are there from the start, `later` those that are deployed in the run,
    `rules_under` gives the rules under which an order of another system puts a version. `origin` is the command that
    repeats the run.
    """

    def __init__(
        self,
        versions: Sequence[Rules],
        nodes: Iterable[Node],
        *,
        later: Sequence[Rules] = (),
        rules_under: Callable[[events.SystemChanged], Rules] | None = None,
        origin: str = "",
    ) -> None:
        self._profiles = {key: profile for each in (*versions, *later) for key, profile in _profiles(each.application)}
        self._weights = {key: each for rules in (*versions, *later) for key, each in _weights(rules.application)}
        self._state = state = CheckerState(nodes)
        for rules in versions:
            state.deploy(rules)
        self._later = {each.application.key: each for each in later}
        self._rules_under = rules_under
        self._is_ordered = rules_under is not None or any(
            each.order is not None or each.choices for each in (*versions, *later)
        )
        self._only = state.versions[versions[0].application.key] if len(versions) == 1 and not later else None
        """The only application version of the run, if there is only one."""
        self._unassigned: Request | None = None
        """A request that has arrived in this step and is not yet known to be given to a version."""
        self._origin = origin
        self._now_ns = -(2**63)
        self._record: Record | None = None
        self._event: Record | None = None
        self._limits: dict[tuple[str, str, Slot, Shape, str, str], int] = {}
        """Per stage, variant, slot, shape, node and device of the last plans: the largest batch allowed. Without a name
        where the plan names none, and for replicas that are somewhere else."""
        self._kind_limits: dict[tuple[str, str, str], int] = {}
        """Per stage, variant and kind of hardware: the largest batch that the last plan with this variant allows."""
        self._default_limits: dict[str, int] = {}
        self._short: set[str] = set()
        """Stages for which the core has reported that no node has capacity for the replicas of the plan."""
        self._unplanned: set[str] = set()
        """Keys of versions whose policy could not plan, until it can."""
        self._last_batch = BatchId(-1)
        self._last_worker = WorkerId(-1)
        self._last_transfer = TransferId(-1)
        self._pipelines: dict[WorkerId, CheckedPipeline] = {}
        self._kept: dict[WorkerId, events.KeptWorker] = {}
        """What a node has kept that became ready in this step, and is not adopted yet."""
        self._adopted: list[ReplicaId] = []
        """In this step."""
        self._is_adopting = False
        """Whether there is any of both."""
        self._done: list[CheckedRequest] = []
        """Requests that finished their last stage in this step, and must be answered in it."""
        self._started: list[tuple[str, int]] = []
        """Lane and largest key of the batches started in this step."""
        self.ended, self.ended_ns = Counter[tuple[str, Outcome]](), Counter[tuple[str, Outcome]]()
        """By key of the version and outcome, how many requests have ended, and the sum of their times from sending to
        the end; see `CheckerState.counted_at`."""
        self._checks = self._checks_by_type()

    def _checks_by_type(self) -> dict[type, Callable[[Any], None]]:
        """What to do for each type of record; nothing for the others."""
        return {
            Request: self._arrived,
            Finished: self._finished,
            events.BatchFailed: self._batch_failed,
            events.WorkerProgressed: self._progressed,
            events.WorkerReady: self._ready,
            events.WorkerCompleted: self._completed,
            events.BatchLost: self._batch_lost,
            events.WorkerLost: self._lost,
            events.WorkerStopped: self._stopped,
            events.WorkerResized: self._resized,
            events.NodeReady: self._node_ready,
            events.NodeLost: self._node_lost,
            events.NodeReleased: self._node_released,
            events.Transferred: self._transferred,
            events.TransferFailed: self._transfer_failed,
            events.Deployed: self._deployed,
            actions.Assigned: self._assigned,
            actions.Rollout: self._rolled_out,
            StartBatch: self._start_batch,
            End: self._end,
            actions.StartWorker: self._start_replica,
            actions.AdoptWorker: self._adopt_replica,
            actions.StopWorker: self._stop_replica,
            actions.ResizeWorker: self._resize_replica,
            actions.AcquireNode: self._acquire_node,
            actions.ReleaseNode: self._release_node,
            actions.Transfer: self._transfer,
            actions.CancelTransfer: self._cancel_transfer,
            actions.Evict: self._evict,
            actions.Decided: self._decided,
        }

    @property
    def charged_ns(self) -> dict[str, int]:
        """Per node, how long it was charged until the last record."""
        return {
            name: each.charged_ns + (0 if each.since_ns is None else max(0, self._now_ns - each.since_ns))
            for name, each in self._state.nodes.items()
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
        self._checks.get(kind, _unchecked)(record)

    def finish(self) -> None:
        """End of the run: check that every request has ended. Faults are no excuse, because they stopped before.

        A request may still wait at a stage without replicas if the core has reported that no node has capacity for
        one, or that there can be no plan with one, and that still holds, unless the drop policy had found the request
        hopeless.
        """
        self._end_step()
        requests, replicas = self._state.requests, self._state.replicas.values()
        empty = {stage for stage in self._state.stages if self._is_excused(stage)}
        empty -= {replica.spec.stage for replica in replicas}
        for id, entry in requests.items():
            if self._is_given_up(entry):
                self._fail(f"request {id} waits at {list(entry.waiting)}, and the drop policy has given it up")
            if empty.isdisjoint(stage for stage, _ in entry.waiting):
                running = [replica.batch for replica in replicas if replica.runs(entry)]
                where = f"still runs in batch {running[0]}" if running else "runs in no batch"
                where = f"waits at {list(entry.waiting)}" if entry.waiting else where
                self._fail(f"{len(requests)} requests never ended; request {id} {where}")

    def _is_excused(self, stage: str) -> bool:
        """Whether the core has said why this stage may have no replicas, and no ready node has room for one by now."""
        version = self._state.stages[stage]
        planned = [target for target in (version.plan.stages if version.plan else ()) if target.stage == stage]
        specs = [group.spec for target in planned for group in target.groups if group.count]
        if specs:
            return stage in self._short and not any(map(self._has_room, specs))
        return version.key in self._unplanned or (version.plan is not None and not version.plan.feasible)

    def _has_room(self, spec: ReplicaSpec) -> bool:
        """Whether a ready node could take such a replica beside all that it has and keeps."""
        weights = self._weights[profile_key(spec)] if self._state.stages[spec.stage].provides else None
        for name, node in self._state.nodes.items():
            devices = [device.name for device in node.node.devices] if spec.slot.accelerator else [None]
            for device in devices:
                wanted = structs.replace(spec, node=name, device=device)
                if wanted.node != (spec.node or name) or wanted.device != (spec.device or device):
                    continue
                replica = CheckedReplica(wanted)
                replica.shadow_bytes = weights.size_bytes if weights is not None else 0
                fits = node.has_cores(spec.slot.cores) and not node.excess(self._profiles, replica)
                if fits and not node.misfit(wanted):
                    return True
        return False

    def _is_given_up(self, entry: CheckedRequest) -> bool:
        """Whether the drop policy found a waiting visit hopeless long ago, even with no remaining time after it."""
        request, is_hopeless = entry.request, entry.version.is_hopeless
        then_ns = request.sent_ns + round(OVERDUE * (self._now_ns - request.sent_ns))
        return any(
            is_hopeless(then_ns, Visit(request, stage, then_ns, visit.deadline_ns, 0, part), 0, 0)
            for (stage, part), (_, visit, _) in entry.waiting.items()
        )

    def _end_step(self) -> None:
        """Check the invariants between steps, when an event and all its actions have been recorded."""
        state = self._state
        if self._unassigned is not None:
            self._settle()
        if self._is_adopting:
            self._check_adopted()
        state.step += 1
        if not self._done and not self._started:
            return
        for entry in self._done:
            if entry.request.id in state.requests:
                self._fail(f"request {entry.request.id} has finished every stage and is not answered")
        for lane, largest in self._started:
            smallest = state.waiting[lane].smallest(state.requests, state.step - 1)
            if smallest is not None and smallest < largest:
                self._fail(
                    f"a batch at {lane} overtook a visit that the order policy puts first: {smallest} < {largest}"
                )
        self._done = []
        self._started = []

    def _fail(self, what: str) -> NoReturn:
        again = f"\nreproduce with: {self._origin}" if self._origin else ""
        raise Violation(f"at {to_ms(self._now_ns):.6f} ms: {what}\nrecord: {self._record}\nevent: {self._event}{again}")

    # Requests

    def _arrived(self, request: Request) -> None:
        if request.id in self._state.requests:
            self._fail("a request arrived twice")
        if not request.sent_ns <= request.arrived_ns <= self._now_ns:
            self._fail("a request arrived before it was sent")
        if self._only is not None:
            self._state.arrive(self._now_ns, request, self._only)
            return
        present = self._state.versions_of(request.application)
        if len(present) == 1 and present[0].state in TAKES_REQUESTS and request.version in ("", present[0].version):
            self._state.arrive(self._now_ns, request, present[0])
        else:
            self._unassigned = request

    def _assigned(self, choice: actions.Assigned) -> None:
        request, version = self._unassigned, self._state.versions.get(choice.application)
        if request is None or request.id != choice.request:
            self._fail("a request is assigned that has not just arrived")
        if version is None or version not in self._state.versions_of(request.application):
            self._fail(f"a request for {request.application!r} is given to {choice.application!r}")
        if version.state not in TAKES_REQUESTS or request.version not in ("", version.version):
            self._fail(f"{choice.application!r} is {version.state} and gets a request")
        self._unassigned = None
        others_ns = {each.slo_ns for each in self._state.versions_of(request.application)} - {version.slo_ns}
        if request.deadline_ns - request.sent_ns in others_ns:  # the client named none; that of its version counts
            request = structs.replace(request, deadline_ns=request.sent_ns + version.slo_ns)
        self._state.arrive(self._now_ns, request, version)

    def _settle(self) -> None:
        """A request that was neither given to a version nor rejected: it must be for the only one that takes it."""
        request, self._unassigned = self._unassigned, None
        assert request is not None
        present = self._state.versions_of(request.application)
        if len(present) != 1 or present[0].state not in TAKES_REQUESTS:
            self._fail(f"request {request.id} for {request.application!r} is given to no version")
        self._state.arrive(self._now_ns, request, present[0])

    def _finished(self, event: Finished) -> None:
        replica = self._state.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            self._done = self._state.pass_on(self._now_ns, replica, event)

    def _batch_failed(self, event: events.BatchFailed) -> None:
        replica = self._state.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            self._state.fail(replica)

    def _start_batch(self, order: StartBatch) -> None:
        replica = self._state.replicas.get(order.replica) or self._unknown(order.replica)
        size, limit = len(order.requests), replica.limit
        if self._unassigned is not None:
            self._settle()
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
        if size > (replica.batch_max or size):
            self._fail(f"a batch of {size} where {replica.spec.variant} takes up to {replica.batch_max}")
        if self._state.is_mixed:
            self._take(order, self._split(order), replica)
            self._check_rows(order, replica)
        else:
            self._take(order, order.visits, replica)
        replica.batch = self._last_batch = order.batch
        replica.started_ns = self._now_ns

    def _take(self, order: StartBatch, taken: Iterable[tuple[RequestId, int]], replica: CheckedReplica) -> None:
        """Move the visits of a batch from the queue to the replica."""
        requests, stage, visits = self._state.requests, order.stage, replica.visits
        if order.parts and len(order.parts) != len(order.requests):
            self._fail(f"{len(order.parts)} parts of {len(order.requests)} requests")
        largest = FIRST_KEY
        for id, part in taken:
            entry = requests.get(id)
            waiting = entry.waiting.pop((stage, part), None) if entry is not None else None
            if entry is None or waiting is None:
                self._fail(f"request {id}, part {part}, does not wait at {stage}")
            _, visit, key = waiting
            visits.append((entry, visit))
            if key > largest:
                largest = key
            elif key == FIRST_KEY:
                self._check_retry(order)
        if self._is_ordered:
            self._started.append((stage, largest))

    def _split(self, order: StartBatch) -> Iterable[tuple[RequestId, int]]:
        """The visits of a batch with pieces of requests; that of a piece counts as that of a part, from 1 on by its
        first row. Of a request whose pieces begin, the other rows go on waiting as a whole."""
        if len(order.pieces) not in (0, len(order.requests)):
            self._fail(f"{len(order.pieces)} pieces of {len(order.requests)} requests")
        for (id, part), piece in zip(order.visits, order.pieces or repeat(None), strict=False):
            entry, place = self._state.requests.get(id), (order.stage, part if piece is None else 1 + piece.first)
            if entry is not None and piece is not None:
                if place not in entry.waiting:
                    self._take_rows(order.stage, entry, piece)
                _, visit, _ = entry.waiting[place]
                if (visit.first, visit.rows, visit.of) != (piece.first, piece.rows, piece.of):
                    self._fail(f"{piece} of request {id}, of which the {visit.rows} rows from {visit.first} on wait")
            yield id, place[1]

    def _take_rows(self, stage: str, entry: CheckedRequest, piece: Piece) -> None:
        """A piece of a request begins that has not begun before: none of its rows may have."""
        id, (step, whole, key) = entry.request.id, entry.waiting.get((stage, 0), (0, None, 0))
        taken = self._state.rows_begun.setdefault((id, stage), set())
        rows = set(range(piece.first, piece.first + piece.rows))
        if whole is None or piece.of != whole.rows or not rows or taken & rows or max(rows) >= piece.of:
            self._fail(f"{piece} of request {id}, of which {len(taken)} rows have begun, and which waits as {whole}")
        if not self._state.is_divided(stage):
            self._fail(f"{piece} of request {id} at {stage}, where its rows may meet")
        taken |= rows
        visit = structs.replace(whole, first=piece.first, rows=piece.rows, of=piece.of)
        entry.waiting[stage, 1 + piece.first] = step, visit, key
        if len(taken) == piece.of:
            del entry.waiting[stage, 0]

    def _check_rows(self, order: StartBatch, replica: CheckedReplica) -> None:
        """The order says how many rows its visits have, and of which sizes. They can run in one forward pass, if they
        are not those of one request, and are as near to the plan's limit as whole requests allow."""
        visits, state = [visit for _, visit in replica.visits], self._state
        rows, sizes = tuple(visit.rows for visit in visits), tuple(visit.size for visit in visits)
        classes = {state.class_of(visit) for visit in visits}
        if order.rows != sum(rows) or (len(classes) == 1 and {order.size} != classes):
            self._fail(f"a batch of {rows} rows of the sizes {sizes} is one of {order.rows} rows up to {order.size}")
        lanes = {state.lane(visit) for visit in visits}
        if len(lanes) > 1:
            self._fail(f"a batch of rows that cannot run together: {sorted(lanes)}")
        total, most = sum(rows), replica.batch_max or replica.limit
        limit = min(replica.limit, most)
        if len(visits) > 1 and (total > most or total - limit > limit - (total - rows[-1])):
            self._fail(f"a batch of {rows} rows of several requests, where {limit} are planned and {most} allowed")
        is_split = state.is_divided(order.stage) and state.stages[order.stage].only is not None
        if is_split and max(rows) > (replica.batch_max or max(rows)):
            self._fail(f"a batch of {max(rows)} rows of one request, which a pass does not take")
        if self._is_ordered:
            (lane,) = lanes
            self._started[-1] = lane, self._started[-1][1]

    def _check_retry(self, order: StartBatch) -> None:
        """Visits of a batch that are tried again must be few enough, and all of one failed or lost batch."""
        requests = self._state.requests
        pairs = zip(order.visits, order.pieces or repeat(None), strict=False)
        visits = [(id, part if piece is None else 1 + piece.first) for (id, part), piece in pairs]
        all_tries = [(requests[id].tries, (order.stage, part)) for id, part in visits if id in requests]
        retry, *others = {tries.retries.get(place) if tries is not None else None for tries, place in all_tries}
        if others:
            self._fail("requests of a failed or lost batch are tried again together with others")
        count = len(set(order.requests))
        if retry is not None and count > retry.requests:
            self._fail(f"{count} requests are tried again together, of which at most {retry.requests} may be")

    def _end(self, end: End) -> None:
        outcome = end.outcome
        if self._unassigned is not None and end.request == self._unassigned.id:
            if outcome is REJECTED:
                about = self._state.counted_at(self._unassigned.application), outcome
                self.ended[about] += 1
                self.ended_ns[about] += self._now_ns - self._unassigned.sent_ns
                self._unassigned = None
                return
            self._settle()
        entry = self._state.requests.pop(end.request, None)
        if entry is None:
            self._fail("the end of a request that is not open: it never arrived, or ended before")
        if entry.is_done is not (outcome is SERVED or outcome is LATE):
            self._fail(f"{outcome} {'after' if entry.is_done else 'before'} it finished every stage")
        if outcome is SERVED:
            if self._now_ns > entry.deadline_ns:
                self._fail("served, after its deadline")
        elif outcome is LATE:
            if self._now_ns <= entry.deadline_ns:
                self._fail("late, before its deadline")
        elif outcome is REJECTED:
            is_refused = isinstance(self._event, events.BatchFailed) and self._event.is_refusal
            is_new = isinstance(self._event, Request) and self._event.id == entry.request.id
            if not is_new and not is_refused:
                if not (entry.patient_ns and entry.version.is_waking):
                    self._fail("rejected, but not on arrival, not by its model, and not for lack of a start")
                self._check_unanswered(entry, outcome)
        else:
            self._check_unanswered(entry, outcome)
        self.ended[entry.version.key, outcome] += 1
        self.ended_ns[entry.version.key, outcome] += self._now_ns - entry.request.sent_ns

    def _check_unanswered(self, entry: CheckedRequest, outcome: Outcome) -> None:
        """A request fails only for a reason of its own, and is dropped from a running batch only if that is stalled."""
        if outcome is FAILED:
            if not self._may_fail(entry):
                self._fail("failed, but never in a batch with no other request")
        elif entry.version.only is not None and not entry.waiting and not isinstance(self._event, events.Cancelled):
            running = next((replica for replica in self._state.replicas.values() if replica.runs(entry)), None)
            if running is None:
                self._fail("dropped while it neither waited nor ran")
            if self._now_ns - running.started_ns < STALL_NS_MIN:
                self._fail("dropped while it ran, from a batch that is not stalled")

    def _may_fail(self, entry: CheckedRequest) -> bool:
        """Whether a request has failed alone, or its own tensors are the reason."""
        if entry.tries is not None and entry.tries.may_fail:
            return True
        has_fault = isinstance(self._event, Finished) and bool(self._event.faults)
        return has_fault or (entry.walk is not None and entry.walk.fault)

    # Versions and plans

    def _deployed(self, event: events.Deployed) -> None:
        key = version_key(event.application, event.version)
        rules = self._later.get(key)
        if rules is None:
            self._fail(f"nobody has declared {key}")
        self._state.deploy(rules, VersionState.STARTING)

    def _rolled_out(self, note: actions.Rollout) -> None:
        version = next(
            (each for each in self._state.versions_of(note.application) if each.version == note.version), None
        )
        if version is None:
            self._fail("no such version is deployed")
        before, version.state = version.state, note.state
        if note.state is not before and note.state not in NEXT_STATES[before]:
            self._fail(f"version {note.version} of {note.application!r} was {before}")
        if note.state is VersionState.RETIRED:
            state = self._state
            left = [id for id, each in state.replicas.items() if state.stages[each.spec.stage] is version]
            if left:
                self._fail(f"a version retires that has replicas {left}")
            opened = [id for id, entry in state.requests.items() if entry.version is version]
            if opened:
                self._fail(f"a version retires that has open requests {opened}")
            state.end(version)

    def _decided(self, note: actions.Decided) -> None:
        if note.plan is not None and note.plan.stages:
            self._follow(note.plan)
        if note.kind == "shortage":
            self._short.add(note.stage)
        elif note.kind == "planner":
            self._unplanned.add(note.application)
        elif note.kind == "system":
            if self._rules_under is None or not isinstance(self._event, events.SystemChanged):
                self._fail("nobody has ordered another system")
            version = self._only or self._state.versions[note.application]
            rules = self._rules_under(self._event)
            version.choices = rules.choices
            self._state.change_system(version, rules)
        elif note.choice:
            version = self._only or self._state.versions[note.application]
            if note.choice not in version.choices:
                self._fail("the overseer has no such system")
            self._state.change_system(version, version.choices[note.choice])
        elif note.kind in ("waking", "awake"):
            self._change_patience(note)
        elif note.kind == "drain" and note.replica is not None:
            replica = self._state.replicas.get(note.replica) or self._unknown(note.replica)
            replica.draining = True

    def _change_patience(self, note: actions.Decided) -> None:
        """From now on requests may wait for a start, or may not. A request of this step has come after that: the core
        changes it at a request only if none is open that it would concern."""
        version = self._only or self._state.versions[note.application]
        planned = version.plan.stages if version.plan is not None else ()
        version.is_waking = note.kind == "waking"
        if version.is_waking and any(group.count for target in planned for group in target.groups):
            self._fail("requests are to wait for a start, and replicas are planned")
        entry = self._state.requests.get(self._event.id) if isinstance(self._event, Request) else None
        if entry is not None and entry.version is version:
            self._state.change_patience(entry)

    def _follow(self, plan: Plan) -> None:
        """A plan is in force: keep its batch limits."""
        planned = {target.stage for target in plan.stages}
        self._limits = {key: limit for key, limit in self._limits.items() if key[0] not in planned}
        for target in plan.stages:
            version = self._state.stages[target.stage]
            version.plan = plan
            self._unplanned.discard(version.key)
            self._default_limits[target.stage] = target.batch_max
            of_kind: dict[tuple[str, str, str], int] = {}
            anywhere = set[tuple[str, str, Slot, Shape]]()
            for group in (group for group in target.groups if group.count):
                spec, limit = group.spec, target.batch_max_of(group)
                key = target.stage, spec.variant, spec.slot, spec.shape
                self._limits[*key, spec.node or "", spec.device or ""] = limit
                if spec.node is None:
                    anywhere.add(key)
                elif key not in anywhere:
                    self._limits[*key, "", ""] = limit
                of_kind[profile_key(spec)] = max(limit, of_kind.get(profile_key(spec), 0))
            self._kind_limits |= of_kind
        for replica in self._state.replicas.values():
            if replica.spec.stage in planned:
                self._limit(replica)

    def _limit(self, replica: CheckedReplica) -> None:
        """Set the largest batch of a replica: that of its slot and shape in the plan, and of its device if the plan
        names it; of its kind if the plan has no such slot or shape."""
        spec = replica.spec
        slot = structs.replace(spec.slot, cores=replica.cores)
        default = self._default_limits.get(spec.stage)
        if default is None:  # it was adopted, and there is no plan yet
            replica.limit = replica.batch_max or 1
            return
        key, node = (spec.stage, spec.variant, slot, replica.shape), spec.node or ""
        places = ((node, spec.device or ""), (node, ""), ("", ""))
        limits = [self._limits[*key, *place] for place in places if (*key, *place) in self._limits]
        replica.limit = limits[0] if limits else self._kind_limits.get(profile_key(spec), default)

    # Weights

    def _transfer(self, order: actions.Transfer) -> None:
        """Who sends weights has them; who receives them is there and has the memory."""
        nodes = self._state.nodes
        if order.transfer <= self._last_transfer:
            self._fail(f"transfer {order.transfer} after transfer {self._last_transfer}")
        self._last_transfer = order.transfer
        if not order.receivers or len({order.source, *order.receivers}) != 1 + len(order.receivers):
            self._fail("a transfer without receivers, or one that comes to a node twice")
        source = nodes.get(order.source)
        models = {each.model for each in source.files | source.said} if source is not None else ()
        if order.source != STORE and order.weights.model not in models:
            self._fail(f"{order.source} does not have {order.weights.name}")
        for name in order.receivers:
            node = nodes.get(name)
            if node is None or node.state is not NodeState.READY:
                self._fail(f"{name} receives weights and is not ready")
            node.arriving[order.transfer] = order
            self._check_rest(order, node)
            excess = node.excess(self._profiles)
            if excess:
                self._fail(excess)

    def _check_rest(self, order: actions.Transfer, node: CheckedNode) -> None:
        """Layers come to the parts of a pipeline once, or again after a transfer that has failed."""
        for id in order.completes:
            replica = node.replicas.get(id)
            if replica is None:
                if id not in self._state.replicas:
                    self._unknown(id)
                continue  # on another receiver
            own, whole = replica.part, len(order.completes) > 1
            if own is None:
                self._fail(f"replica {id} does not need these layers")
            needed = LayerSet(0, bounds_of(replica.spec.shape)[-1]) if whole else own.span.others
            if order.weights.layers != needed or replica.rest in node.arriving:
                self._fail(f"replica {id} does not need these layers")
            replica.rest = order.transfer

    def _transferred(self, event: events.Transferred) -> None:
        node = self._state.nodes.get(event.node)
        order = node.arriving.pop(event.transfer, None) if node is not None else None
        if node is None or order is None or not order.is_kept:
            return
        if order.weights.layers is None:
            node.files.add(order.weights)
        for id, replica in node.replicas.items() if order.completes else ():
            is_completed = id in order.completes and replica.rest == order.transfer
            replica.has_rest = replica.has_rest or is_completed
            if replica.weights is not None and (is_completed or replica.transfer == order.transfer):
                node.files.add(replica.weights)

    def _transfer_failed(self, event: events.TransferFailed) -> None:
        node = self._state.nodes.get(event.node)
        if node is not None:
            node.arriving.pop(event.transfer, None)
            node.failed.add(event.transfer)

    def _cancel_transfer(self, order: actions.CancelTransfer) -> None:
        """Only a transfer that is under way is cancelled, and for which no replica of the node waits."""
        node = self._state.nodes.get(order.node)
        if node is None or node.arriving.pop(order.transfer, None) is None:
            self._fail(f"transfer {order.transfer} to {order.node} is cancelled and not under way")
        if any(order.transfer in (each.transfer, each.rest) for each in node.replicas.values()):
            self._fail(f"transfer {order.transfer} to {order.node} is cancelled while a replica needs it")

    def _evict(self, order: actions.Evict) -> None:
        """Only what is there and not in use is evicted."""
        node = self._state.nodes.get(order.node)
        if node is None or order.weights not in node.files | node.said:
            self._fail(f"{order.weights.name} is not on {order.node}")
        if node.uses(order.weights):
            self._fail("a replica needs what is evicted")
        node.files.discard(order.weights)
        node.said.discard(order.weights)
        for other in self._state.nodes.values():
            read = [(each.source, each.weights.model) for each in other.arriving.values()]
            if (order.node, order.weights.model) in read:
                self._fail("a transfer reads what is evicted")

    # Replicas and nodes

    def _ready(self, event: events.WorkerReady) -> None:
        pair = self._state.shadows.get(event.worker)
        if pair is not None and not pair.shadow_parts:
            self._set_shape(pair, pair.shadow.spec.shape if pair.shadow is not None else ALONE)
        replica = self._state.replicas.get(event.worker)
        if replica is None or replica.draining:
            return
        if replica.weights is not None:
            self._check_arrived(replica)
        pipeline = replica.pipeline
        if replica.part is None and pipeline is None:
            replica.ready = True
        elif replica.part is not None and pipeline is not None:
            pipeline.started.add(event.worker)
            if len(pipeline.started) == len(pipeline.shape):
                for member in pipeline.members.values():
                    member.ready = True

    def _completed(self, event: events.WorkerCompleted) -> None:
        """A part has all layers. When all parts of its pipeline have, it is over; without one the part is ready."""
        replica = self._state.replicas.get(event.worker)
        if replica is None or replica.part is None:
            return
        node, pipeline = self._state.nodes[replica.spec.node or ""], replica.pipeline
        if replica.rest in node.arriving and not replica.stopping:
            self._fail(f"the replica has all layers before transfer {replica.rest} has brought them")
        replica.part = None
        if pipeline is None:
            replica.ready = True
        elif all(member.part is None for member in pipeline.members.values()):
            self._state.dissolve(pipeline)

    def _batch_lost(self, event: events.BatchLost) -> None:
        """The batch is not to blame: its requests wait as before they began."""
        replica = self._state.replicas.get(event.replica)
        if replica is not None and replica.batch == event.batch:
            if replica.pipeline is not None:
                self._state.dissolve(replica.pipeline)
            self._state.lose(replica, is_blamed=False)

    def _progressed(self, event: events.WorkerProgressed) -> None:
        replica = self._state.replicas.get(event.worker)
        if replica is not None and replica.weights is not None and event.step != FETCHING:
            self._check_arrived(replica)

    def _check_arrived(self, replica: CheckedReplica) -> None:
        """A replica that starts must not go on before its weights have come."""
        node = self._state.nodes.get(replica.spec.node or "")
        if node is not None and replica.transfer in node.arriving and not replica.stopping:
            self._fail(f"the replica goes on before transfer {replica.transfer} has brought its weights")

    def _lost(self, event: events.WorkerLost) -> None:
        self._shadow_gone(event.worker)
        self._state.forget(event.worker, has_died=True)

    def _stopped(self, event: events.WorkerStopped) -> None:
        self._shadow_gone(event.worker)
        self._state.forget(event.worker, has_died=False)

    def _shadow_gone(self, id: WorkerId) -> None:
        replica = self._state.shadows.pop(id, None)
        if replica is not None:
            replica.shadow, replica.shadow_bytes, replica.shadow_parts = None, 0, False
            self._set_shape(replica, ALONE)

    def _resized(self, event: events.WorkerResized) -> None:
        replica = self._state.replicas.get(event.worker)
        if replica is not None:
            replica.cores = event.cores
            replica.resizing -= 1
            if not replica.resizing:
                replica.wanted_cores = event.cores
            self._limit(replica)
            self._check_node(replica.spec)

    def _set_shape(self, replica: CheckedReplica, shape: Shape) -> None:
        replica.shape = shape
        self._limit(replica)

    def _start_shadow(self, order: actions.StartWorker, id: ReplicaId) -> None:
        """A shadow is for a ready replica that has none, on a node with room for both."""
        replica, wanted = self._state.replicas.get(id) or self._unknown(id), order.spec.shadow
        if not replica.ready or replica.draining:
            self._fail("a shadow for a replica that is not ready or drains")
        if replica.shadow is not None:
            self._fail(f"the replica has shadow {replica.shadow.worker}, which has not stopped")
        profile = self._profiles.get(profile_key(replica.spec))
        layers = profile.layers if profile is not None else None
        blocks = wanted.layers if wanted is not None else ()
        if layers is None or not blocks or not 0 <= blocks[0] <= blocks[-1] < len(layers.blocks):
            self._fail("a shadow with blocks that the profile does not have")
        replica.shadow, replica.shadow_bytes = order, sum(layers.blocks[place].param_bytes for place in blocks)
        self._state.shadows[order.worker] = replica
        self._check_node(replica.spec)

    def _stop_shadow(self, replica: CheckedReplica) -> None:
        if replica.shadow_parts:
            self._fail("a shadow is ordered to stop twice")
        replica.shadow_parts = True
        self._set_shape(replica, ALONE)

    def _start_replica(self, order: actions.StartWorker) -> None:
        self._number(order.worker)
        if order.replica is not None:
            self._start_shadow(order, order.replica)
            return
        if order.spec.shadow is not None:
            self._fail("a replica starts without its shadow, which is attached when it is ready")
        version, node = self._state.stages.get(order.spec.stage), self._state.nodes.get(order.spec.node or "")
        if version is None or version.state is VersionState.RETIRED:
            self._fail("a replica for a stage of no application version")
        if node is None:
            self._fail(f"there is no node {order.spec.node!r}")
        misfit = node.misfit(order.spec)
        if misfit:
            self._fail(misfit)
        self._begin_replica(order)
        if order.pipeline is not None:
            self._join(order, order.pipeline)
        if version.provides:
            self._check_provided(order, node)

    def _join(self, order: actions.StartWorker, first: WorkerId) -> None:
        """A replica starts as the next part of its pipeline."""
        shape = order.spec.shape
        pipeline, held = self._pipelines.setdefault(first, CheckedPipeline(shape)), [each.layers for each in shape]
        profile, replica = self._profiles.get(profile_key(order.spec)), self._state.replicas[order.worker]
        layers = profile.layers if profile is not None else None
        if layers is None or not all(held) or [*chain(*held)] != list(range(len(layers.blocks))):
            self._fail("a pipeline whose parts are not the layers of the profile")
        if order.place != len(pipeline.members) or shape != pipeline.shape:
            self._fail("a replica is not the next part of its pipeline")
        pipeline.members[order.worker] = replica
        replica.part, replica.pipeline = shape[order.place], pipeline

    def _check_provided(self, order: actions.StartWorker, node: CheckedNode) -> None:
        """The weights of a start are on its node, or it waits for a transfer that brings them there."""
        replica, weights = self._state.replicas[order.worker], self._weights[profile_key(order.spec)]
        replica.weights, replica.transfer = weights, order.transfer
        if order.transfer is not None:
            arriving = node.arriving.get(order.transfer)
            layers = replica.part.span if replica.part is not None else None
            if arriving is not None and arriving.completes and arriving.is_kept and layers is None:
                layers = arriving.weights.layers  # the others are on their node, with a part of the model
            if arriving is None or (arriving.weights.model, arriving.weights.layers) != (weights.model, layers):
                self._fail(f"transfer {order.transfer} does not bring {weights.name} to {node.node.name}")
        elif weights not in node.files | node.said:
            self._fail(f"{weights.name} is not on {node.node.name}, and the start waits for no transfer")
        self._check_node(order.spec)

    def _number(self, id: WorkerId) -> None:
        if id <= self._last_worker:
            self._fail(f"worker {id} after worker {self._last_worker}")
        self._last_worker = id

    def _adopt_replica(self, order: actions.AdoptWorker) -> None:
        """A replica that a node has kept is taken over once, and told to stop in the same step if it is of no use."""
        if order.worker in self._state.replicas:
            self._fail("a replica is adopted under the number of another one")
        kept = self._kept.pop(order.worker, None)
        if kept is None or (kept.spec, kept.is_ready) != (order.spec, order.is_ready):
            self._fail("a replica is adopted that was not kept, or is another one")
        self._begin_replica(order)
        self._state.replicas[order.worker].ready = order.is_ready
        self._adopted.append(order.worker)
        self._is_adopting = True

    def _begin_replica(self, order: actions.StartWorker | actions.AdoptWorker) -> None:
        replica = self._state.start(order.worker, order.spec)
        profile = self._profiles.get(profile_key(order.spec))
        replica.batch_max = profile.max_batch if profile is not None else 0
        self._limit(replica)
        if isinstance(order, actions.StartWorker):
            self._check_node(order.spec)

    def _check_adopted(self) -> None:
        """At the end of a step: all that was kept is adopted, and what cannot stay was told to stop."""
        adopted, self._adopted, self._is_adopting = self._adopted, [], False
        if self._kept:
            self._fail(f"kept replicas {list(self._kept)} are neither adopted nor stopped")
        for id in adopted:
            replica = self._state.replicas.get(id)
            if replica is None or replica.stopping:
                continue
            version, node = self._state.stages.get(replica.spec.stage), self._state.nodes.get(replica.spec.node or "")
            if version is None or version.state is VersionState.RETIRED or node is None:
                self._fail(f"replica {id} is adopted, for a stage of no application version or on no node")
            misfit = node.misfit(replica.spec) or node.excess(self._profiles)
            if misfit:
                self._fail(f"replica {id} is adopted: {misfit}")

    def _stop_replica(self, order: actions.StopWorker) -> None:
        pair = self._state.shadows.get(order.worker)
        if pair is not None:
            self._stop_shadow(pair)
            return
        replica = self._state.replicas.get(order.worker) or self._unknown(order.worker)
        if replica.stopping:
            self._fail("the replica is ordered to stop twice")
        replica.stopping = replica.draining = True
        if replica.batch is not None:  # a replica whose batch is stuck: the core reuses its cores at once
            self._state.forget(order.worker, has_died=True)

    def _resize_replica(self, order: actions.ResizeWorker) -> None:
        replica = self._state.replicas.get(order.worker) or self._unknown(order.worker)
        if order.cores <= 0:
            self._fail("a replica without cores")
        replica.wanted_cores = max(order.cores, replica.wanted_cores) if replica.resizing else order.cores
        replica.resizing += 1
        self._check_node(replica.spec)

    def _unknown(self, id: ReplicaId) -> NoReturn:
        self._fail(f"replica {id} does not exist (any more)")

    def _check_node(self, spec: ReplicaSpec) -> None:
        """Check that a replica's node still has room for all that it holds."""
        node = self._state.nodes.get(spec.node or "")
        excess = node.excess(self._profiles) if node is not None else ""
        if excess:
            self._fail(excess)

    def _node_ready(self, event: events.NodeReady) -> None:
        node = self._state.nodes.get(event.node.name)
        if node is None:
            node = self._state.nodes[event.node.name] = CheckedNode(event.node)
        node.node, node.state = event.node, NodeState.READY
        node.said.update(event.weights)
        node.charge(self._now_ns)
        self._kept = {kept.worker: kept for kept in event.kept}
        self._is_adopting = bool(self._kept)

    def _node_lost(self, event: events.NodeLost) -> None:
        node = self._state.nodes.get(event.node)
        if node is not None:
            node.state = NodeState.LOST
            node.empty()
            node.discharge(self._now_ns)

    def _node_released(self, event: events.NodeReleased) -> None:
        node = self._state.nodes.get(event.node)
        if node is not None and node.state is NodeState.RELEASING:
            node.state = NodeState.RELEASED
            node.empty()
            node.discharge(self._now_ns)

    def _acquire_node(self, order: actions.AcquireNode) -> None:
        node = self._state.nodes.get(order.node)
        if node is None or not node.node.on_demand:
            self._fail("an order for a node that cannot be acquired")
        if node.state not in (NodeState.RELEASED, NodeState.LOST):
            self._fail(f"the node is {node.state}")
        node.state = NodeState.ACQUIRING
        node.charge(self._now_ns)

    def _release_node(self, order: actions.ReleaseNode) -> None:
        node = self._state.nodes.get(order.node)
        if node is None or not node.node.on_demand or node.state is not NodeState.READY:
            self._fail("an order to release a node that is not there, or not on demand")
        if node.replicas:
            self._fail(f"the node still holds replicas {list(node.replicas)}")
        if node.arriving:
            self._fail(f"the node still receives weights, by transfers {list(node.arriving)}")
        node.state = NodeState.RELEASING


def _profiles(application: Application) -> Iterable[tuple[tuple[str, str, str], Profile]]:
    """The profile of every variant on every kind of hardware, by stage, variant and kind."""
    for stage in application.stages:
        for variant in stage.variants:
            for hardware, profile in application.profiles_of(variant).items():
                yield (stage.name, variant.name, hardware), profile


def _weights(application: Application) -> Iterable[tuple[tuple[str, str, str], ModelWeights]]:
    """The weights of every variant on every kind of hardware, in the same way."""
    for stage in application.stages:
        for variant in stage.variants:
            for hardware, profile in application.profiles_of(variant).items():
                name = variant.model or profile.model_digest or f"{stage.name}/{variant.name}"
                weights = ModelWeights(name, variant.weights_bytes(hardware), digest=profile.model_digest)
                yield (stage.name, variant.name, hardware), weights
