"""A simulated cluster behind a network: an agent on each node, links that are slow, cut or lose reports, and edges.

It adds to `Cluster` what lies between the core and the workers. This is the model of the network, and what a driver for
several machines must guarantee, as `sloop.serve.cluster.agents` does.

**Links.** The deciding process has one connection to the agent of each node, and one to each edge. A connection
delivers messages in the order in which they were sent, however long each takes. Messages on different links overtake
each other. What a worker says of its batches travels beside the agent's link, so a `Finished` can arrive after a
later report of the agent; it can also be lost (the worker hangs), be late, or arrive twice. The life of replicas
(`StartWorker`, `WorkerReady`, …) is lost only with the link.

**Partitions.** While a node is cut off, nothing passes in either direction. If the cut is shorter than `SILENT_NS`,
what was sent meanwhile arrives afterwards, as TCP sends it again. Otherwise the driver closes the connection: it
reports `NodeLost`, then `WorkerLost` for every replica of the node that was not reported gone, and messages of the old
connection count no more. The workers on the other side live on until the agent connects again. The agent then stops
them all, and only after that the node is `NodeReady`: no core of it is given out twice. Some late reports of the old
connection reach the core nevertheless (`GHOSTS`), because it must ignore them.

**Nodes.** A node that dies is noticed at once if its host closes the connections, otherwise like a partition. It comes
back with no workers. A node on demand that is lost is terminated at the provider, or comes back if it was only cut off.
A node that was ordered to be released is expected to vanish; its loss is not reported.

**Weights.** The driver begins and cancels a transfer as soon as it is ordered, and each receiver reports over its link
that it has the files. When the driver gives up a node, chains go on without it. Files and loaded processes stay on a
node that was only cut off, or whose deciding process has died; the next core does not know of them, and is not told
what became of the transfers that an earlier one has ordered.

**Edges.** A request of an edge that is cut off arrives when the cut ends. After `SILENT_NS` the driver closes the
connection: the edge's open requests are cancelled, their clients see a connection error, and requests that were under
way never arrive. An edge that dies is noticed at once.

**Planner and provider.** A plan may take seconds, never come, or be an error of a planner that was restarted. A node
may not be available.

**The deciding process** may die, and another one takes its place (`CoreDied`, `CoreBegun`). Nothing that the first one
was told or has said counts any more. Agents keep their workers, and what those run is abandoned. They connect to the
next process, which is told of them with their nodes (`NodeReady.kept`); one that cannot be reached comes later. Workers
of a stage that the next process does not know are stopped before. Edges hold the requests that have not ended, and
those that arrive meanwhile, and submit them to the next process, unless their deadline has passed: those they answer
themselves. What was deployed is not known any more.

Workers keep their numbers for life: a core begins above all numbers of those before it (`ERA`). Transfers, of which no
core takes over any, have numbers inside that no other one of the run has.
"""

from collections import Counter
from collections.abc import Container, Iterable
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct, structs

from sloop.actions import (
    AcquireNode,
    Action,
    AdoptWorker,
    CancelTransfer,
    Evict,
    ReleaseNode,
    ResizeWorker,
    StartBatch,
    StartWorker,
    StopWorker,
    Transfer,
)
from sloop.events import (
    WOKE,
    BatchFailed,
    BatchLost,
    Cancelled,
    Event,
    Finished,
    KeptWorker,
    NodeLost,
    NodeReady,
    NodeReleased,
    Planned,
    TransferFailed,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.sim.checkers import HALF_UNIT, Violation
from sloop.sim.cluster import Cluster, ClusterTruths
from sloop.sim.happenings import Crashed
from sloop.sim.replicas import Truths
from sloop.units import ms, s
from sloop.vocabulary import ALONE, Node, NodeState, ReplicaId, Request, RequestId, TransferId, WorkerId

SILENT_NS: Final = s(2)
"""How long a link may be silent before the driver closes it."""
RECONNECT_NS: Final = ms(200)
"""How long an agent takes to connect again and to stop old workers."""
PROVIDER_NS: Final = ms(300)
"""How long the provider takes to release a node."""
SLOW_START: Final = 5
"""A slow start takes so many times as long."""
SLOW_PLAN_NS: Final = s(3)
ABANDON_NS: Final = s(30)
"""A worker that has not finished its batch so long after the deciding process has died is stopped."""
WorkerEvent = WorkerProgressed | WorkerReady | WorkerCompleted | WorkerResized | WorkerLost | WorkerStopped
ERA: Final = 1_000_000
"""Replicas of each deciding process are numbered from another multiple of this on."""


class FaultKind(StrEnum):
    """What can go wrong. Most kinds last for a while."""

    NODE_DOWN = "node down"
    CUT = "cut off"
    SLOW_NODE = "slow node"
    """Batches take 2 to 32 times as long."""
    SLOW_LINK = "slow link"
    """Each message takes 5 ms to 1.3 s longer."""
    GHOSTS = "ghosts"
    """Late reports of closed connections reach the core."""
    CRASH = "crash"
    """A worker dies."""
    SHADOW_CRASH = "shadow crash"
    """A shadow dies, of a worker that has one."""
    HANG = "hang"
    """A worker answers no batch any more."""
    FAILED_STARTS = "failed starts"
    """Workers die while they start."""
    SLOW_STARTS = "slow starts"
    FAILED_BATCHES = "failed batches"
    """The model raises on every batch."""
    LOST_REPORTS = "lost reports"
    """What workers say of finished batches is lost."""
    REPEATED_REPORTS = "repeated reports"
    LATE_REPORTS = "late reports"
    """Reports of finished batches overtake each other, and those of the agent overtake them."""
    REFUSED_RESIZES = "refused resizes"
    EDGE_DOWN = "edge down"
    EDGE_CUT = "edge cut off"
    CANCEL = "cancel"
    """Clients leave, also some whose requests have ended."""
    SLOW_PLANS = "slow plans"
    LOST_PLANS = "lost plans"
    FAILED_PLANS = "failed plans"
    """The planner process dies at every plan."""
    FAILED_ACQUIRES = "failed acquires"
    """The provider has no nodes left."""
    STRAY_WAKES = "stray wakes"
    BAD_REQUEST = "bad request"
    """A request on which the model raises."""
    DEADLY_REQUEST = "deadly request"
    """A request of which workers die."""
    MISFIT = "misfit"
    """A request whose tensors do not fit the model."""
    CORE_DOWN = "core down"
    """The deciding process dies, and another one takes its place after a while."""


OF_REQUESTS: Final = (FaultKind.BAD_REQUEST, FaultKind.DEADLY_REQUEST, FaultKind.MISFIT)
"""Faults that are in a request, and arrive with it."""


class FaultBegins(Struct, frozen=True):
    """A fault of a node begins or, without a span, happens; `node` is empty for one of the whole deployment."""

    kind: FaultKind
    node: str
    detail: int
    """A number from which its extent is taken."""
    span_ns: int


class FaultEnds(Struct, frozen=True):
    """A fault ends."""

    begun: FaultBegins


class AllHealed(Struct, frozen=True):
    """From now on there are no more faults, and what was cut off or down comes back."""


class Reported(Struct, frozen=True):
    """The driver tells the core an event, which does not come over a link any more."""

    event: Event
    era: int
    """Number of the deciding process."""


class CoreDied(Struct, frozen=True):
    """The deciding process has died."""


class CoreBegun(Struct, frozen=True):
    """Another deciding process begins. What it is told of nodes and requests follows at the same instant."""


class Overdue(Struct, frozen=True):
    """A worker that was kept must have finished its abandoned batch by now."""

    replica: ReplicaId


class Passing(Struct, frozen=True):
    """A message on the link of a node arrives at its other end."""

    node: str
    session: int
    message: Any
    """An order on its way to the agent, or an event on its way to the core."""
    is_report: bool
    era: int
    """Number of the deciding process."""


class LinkSilent(Struct, frozen=True):
    """The link of a node has been silent for `SILENT_NS`, unless it has been mended since."""

    node: str
    cut: int


class AgentConnects(Struct, frozen=True):
    """The agent of a node connects again."""

    node: str
    cut: int


class EdgeClosed(Struct, frozen=True):
    """The driver closes the connection to an edge, with all that it had."""

    edge: int


class OpenRequests:
    """The requests that have arrived and not ended, with their edges, as the driver knows them."""

    __slots__ = ("by_id", "edge_of", "faulty", "last")

    def __init__(self) -> None:
        self.by_id: dict[RequestId, Request] = {}
        self.edge_of: dict[RequestId, int] = {}
        """Also of requests that have ended."""
        self.faulty: dict[RequestId, FaultKind] = {}
        """Requests with a fault of their own."""
        self.last = RequestId(-1)


class AgentLink:
    """The connection to the agent of a node, as the driver sees it."""

    __slots__ = (
        "cut",
        "cuts",
        "delay_ns",
        "downs",
        "held",
        "is_open",
        "last_ns",
        "replicas",
        "served",
        "session",
        "usual_ns",
        "was_down",
    )

    def __init__(self, delay_ns: int, *, is_open: bool) -> None:
        self.usual_ns = self.delay_ns = delay_ns
        """How long a message takes, without faults and now."""
        self.session = 0
        """Number of the connection."""
        self.is_open = is_open
        """Whether the driver believes in the connection."""
        self.served = 0
        """Number of the deciding process that the agent has served last."""
        self.cuts = self.downs = 0
        """How many faults cut the node off, and how many keep it down."""
        self.cut = 0
        """Number of the last time at which it became unreachable or reachable."""
        self.was_down = False
        """Whether the agent has died since it connected."""
        self.held: list[Passing] = []
        """Messages that arrive when the node is reachable again."""
        self.last_ns = [0, 0]
        """When the last order and the last report arrive."""
        self.replicas: dict[WorkerId, ReplicaId | None] = {}
        """What was ordered to start on the node and is not reported gone."""

    @property
    def is_reachable(self) -> bool:
        """Whether messages pass."""
        return not self.cuts and not self.downs


class RemoteCluster(Cluster):
    """Agents on nodes, behind links. `opened` is what the driver knows of requests."""

    def __init__(
        self,
        truths: ClusterTruths,
        nodes: Iterable[Node],
        opened: OpenRequests,
        *,
        delay_ns: int = 0,
    ) -> None:
        super().__init__(truths, nodes)
        self.pending.void.add(-1)  # never empty, so that finished batches, too, pass through `happen`
        self._opened = opened
        self._links = {
            name: AgentLink(delay_ns, is_open=node.state is NodeState.READY) for name, node in self._nodes.items()
        }
        self._active: Counter[tuple[FaultKind, str]] = Counter()
        """How many faults of a kind act on a node now."""
        self._node_of: dict[ReplicaId, str] = {}
        """Of every replica that was ever ordered to start."""
        self._hung: set[ReplicaId] = set()
        self._ready: set[ReplicaId] = set()
        """Workers that have loaded their model."""
        self._busy: set[ReplicaId] = set()
        """Workers whose batch is not over, as their agent knows it."""
        self._abandoned: set[ReplicaId] = set()
        """Those of them for whose batch nobody waits."""
        self.stages: frozenset[str] | None = None
        """The stages that a deciding process knows which takes the place of another; None for all."""
        self._is_down = False
        """Whether there is no deciding process."""
        self._era = 0
        """Number of the deciding process."""
        self._known: set[ReplicaId] = set()
        """The workers that the present deciding process has started or adopted."""

    def schedule(self, at_ns: int, fault: FaultBegins | AllHealed) -> None:
        """Let a fault begin, or all end, at this time."""
        self._push(at_ns, fault)  # type: ignore[arg-type]  # a happening of this class

    def stop_faults(self, now_ns: int) -> None:
        """Does nothing: the schedule says when faults stop (`AllHealed`)."""

    # From the core to the agents

    def start_batch(self, now_ns: int, order: StartBatch) -> None:
        """Send a batch to its worker."""
        node = self._node_of[order.replica]
        if self._links[node].is_open:
            self._send(now_ns, node, order)

    def obey(self, now_ns: int, order: Action) -> None:
        """Send an order to the agent, or to the provider of nodes."""
        order = self._noted(order)
        if isinstance(order, StartWorker):
            node = order.spec.node or ""
            self._node_of[order.worker] = node
            link = self._links[node]
            if link.is_open:
                link.replicas[order.worker] = order.replica
                self._send(now_ns, node, order)
            else:
                self._report(now_ns, WorkerLost(order.worker, f"node {node} is not connected"))
        elif isinstance(order, StopWorker):
            link = self._links[self._node_of[order.worker]]
            if link.is_open and order.worker in link.replicas:
                self._send(now_ns, self._node_of[order.worker], order)
            elif order.worker not in link.replicas:
                self._report(now_ns, WorkerStopped(order.worker))
        elif isinstance(order, ResizeWorker | Evict):
            node = order.node if isinstance(order, Evict) else self._node_of[order.worker]
            if self._links[node].is_open:
                self._send(now_ns, node, order)
        elif isinstance(order, AcquireNode):
            self._acquire(now_ns, order.node)
        elif isinstance(order, ReleaseNode):
            self._release(now_ns, order.node)
        elif isinstance(order, Transfer | CancelTransfer):
            self._move_weights(now_ns, order)

    def _noted(self, order: Action) -> Action:
        """An order with the number that its transfer has here. Its worker is known from now on."""
        if isinstance(order, StartWorker | AdoptWorker):
            self._known.add(order.worker)
        if isinstance(order, StartWorker | Transfer | CancelTransfer) and order.transfer is not None:
            return structs.replace(order, transfer=TransferId(self._era * ERA + order.transfer))
        return order

    def deliver_plan(self, now_ns: int, planned: Planned) -> None:
        """The answer of the planner, as its process is now."""
        if self._active[FaultKind.LOST_PLANS, ""]:
            return
        if self._active[FaultKind.FAILED_PLANS, ""]:
            keys = [*planned.plans, *planned.errors]
            planned = Planned(planned.number, {}, dict.fromkeys(keys, "the planner process died"), restarted=True)
        slow_ns = SLOW_PLAN_NS if self._active[FaultKind.SLOW_PLANS, ""] else 0
        self._report(now_ns + self._truths.plan_ns + slow_ns, planned)

    def _send(self, now_ns: int, node: str, message: Any, *, is_report: bool = False) -> None:
        """Send a message over the link of a node, behind what was sent before."""
        link = self._links[node]
        at_ns = link.last_ns[is_report] = max(link.last_ns[is_report], now_ns + link.delay_ns)
        self._push(at_ns, Passing(node, link.session, message, is_report, self._era))  # type: ignore[arg-type]

    def _report(self, at_ns: int, event: Event) -> None:
        """The driver tells the core an event at this time."""
        self._push(at_ns, Reported(event, self._era))  # type: ignore[arg-type]

    # What happens

    def happen(self, now_ns: int, sequence: int, event: Any) -> Event | None:  # also those of this class
        """Apply a pending entry. Returns the event for the core, or None."""
        found: Any = self._happen(now_ns, sequence, event)
        if isinstance(found, Transferred | TransferFailed):
            era, transfer = divmod(found.transfer, ERA)
            return structs.replace(found, transfer=TransferId(transfer)) if era == self._era else None
        about = getattr(found, "worker", getattr(found, "replica", None))
        return found if about is None or about in self._known else None

    def _happen(self, now_ns: int, sequence: int, event: Any) -> Any:  # noqa: PLR0911  # one for each kind
        """The same, with the numbers that transfers have here, and also of workers that this core does not know."""
        kind = type(event)
        if kind is Passing:
            return self._pass(now_ns, event)
        if kind is Reported:
            return event.event if event.era == self._era else None
        if kind in FAULT_STEPS:
            return FAULT_STEPS[kind](self, now_ns, event)
        if kind is NodeReady:
            return self._acquired(now_ns, event)
        if kind is WorkerResized and event.worker in self._replicas:
            node = self._node_of[event.worker]
            if self._active[FaultKind.REFUSED_RESIZES, node]:
                event = WorkerResized(event.worker, self._replicas[event.worker].slot.cores)
        found = super().happen(now_ns, sequence, event)
        if found is None:
            return None
        if kind is WorkerReady:
            self._ready.add(event.worker)
        elif kind is BatchLost:
            self._busy.discard(event.replica)
        if kind is Transferred or kind is TransferFailed:
            return self._leave(now_ns, event.node, found)
        about = event.worker if isinstance(event, WorkerEvent) else event.replica
        return self._leave(now_ns, self._node_of[about], found)

    def _leave(self, now_ns: int, node: str, event: Any) -> Event | None:  # an event of a node
        """An agent or a worker reports something: it reaches the core at once if the link is as quick as that."""
        link = self._links[node]
        if type(event) is not Finished and type(event) is not BatchFailed:
            if link.is_reachable and link.is_open and not link.delay_ns and link.last_ns[1] <= now_ns:
                return self._arrived(link, event)
            self._send(now_ns, node, event, is_report=True)
            return None
        replica = self._replicas.get(event.replica)
        if replica is not None:
            replica.batch_end = None
        if self._active[FaultKind.LOST_REPORTS, node]:
            return None
        self._busy.discard(event.replica)
        if event.replica in self._abandoned:
            self._abandoned.discard(event.replica)
            self._send(now_ns, node, WorkerReady(event.replica), is_report=True)
            return None
        late_ns = link.delay_ns
        if self._active[FaultKind.LATE_REPORTS, node]:
            late_ns += hashed(event.batch) * ms(1)
        if self._active[FaultKind.REPEATED_REPORTS, node]:
            again_ns = now_ns + late_ns + hashed(event.batch + 1) * ms(1)
            self._push(again_ns, Passing(node, link.session, event, True, self._era))  # type: ignore[arg-type]
        if not late_ns and link.is_reachable and link.is_open:
            finished: Event = event
            return finished
        self._push(now_ns + late_ns, Passing(node, link.session, event, True, self._era))  # type: ignore[arg-type]
        return None

    def _pass(self, now_ns: int, passing: Passing) -> Event | None:
        """A message arrives at the other end of its link, unless the link is cut or closed."""
        link, message = self._links[passing.node], passing.message
        if passing.session != link.session or not link.is_open:
            is_heard = passing.is_report and passing.era == self._era and not self._is_down
            is_ghost = is_heard and self._active[FaultKind.GHOSTS, ""]
            return self._arrived(link, message) if is_ghost else None
        if not link.is_reachable:
            link.held.append(passing)
            return None
        if passing.is_report:
            return self._arrived(link, message)
        if type(message) is StartBatch:
            self._run(now_ns, message)
        elif type(message) is StartWorker:
            self._begin(now_ns, message)
        else:
            super().obey(now_ns, message)
            if type(message) is ResizeWorker:
                self._check_cores(self._node_of[message.worker])
        return None

    def _arrived(self, link: AgentLink, event: Event) -> Event:
        if type(event) is WorkerLost or type(event) is WorkerStopped:
            link.replicas.pop(event.worker, None)
            for id in [id for id, body in link.replicas.items() if body == event.worker]:
                del link.replicas[id]
        return event

    # Agents and workers

    def _begin(self, now_ns: int, order: StartWorker) -> None:
        """Start a worker."""
        node = order.spec.node or ""
        super().obey(now_ns, order)
        self._check_cores(node)
        if order.replica is None and self._active[FaultKind.FAILED_STARTS, node]:
            self._push(now_ns + ms(hashed(order.worker)), Crashed(order.worker))

    def _start_ns(self, now_ns: int, order: StartWorker, truths: Truths) -> int:
        is_slow = self._active[FaultKind.SLOW_STARTS, self._node_of[order.worker]]
        return super()._start_ns(now_ns, order, truths) * (SLOW_START if is_slow else 1)

    def _run(self, now_ns: int, order: StartBatch) -> None:
        """A worker runs a batch. Violation if it runs one already."""
        replica = self._replicas.get(order.replica)
        if replica is None:
            return
        if replica.batch_end is not None:
            what = f"batch {order.batch} reaches replica {order.replica}, which still runs {replica.batch_end[2]}"
            raise Violation(f"at {now_ns} ns: {what}")
        if replica.part is not None and replica.pipeline is None:  # it was broken while the order was under way
            self._push(now_ns, BatchLost(order.batch, order.replica, "another part of its pipeline is lost"))
            return
        self._busy.add(order.replica)
        if order.replica in self._hung:
            self._fall_silent(now_ns, order.batch, order.replica)
            return
        node, size = self._node_of[order.replica], len(order.requests)
        replica.size = size
        # Taken from the requests, so that a batch takes as long when other operations are removed.
        factor = 0.5 + hashed(order.requests[0] * 31 + size) / 512
        service_ns = round(replica.speed.means_ns[size] * factor) << min(self._active[FaultKind.SLOW_NODE, node], 5)
        faults = {self._opened.faulty.get(request) for request in order.requests}
        end_ns = now_ns + service_ns
        if FaultKind.DEADLY_REQUEST in faults:
            self._push(end_ns, Crashed(order.replica))
            return
        if FaultKind.BAD_REQUEST in faults or self._active[FaultKind.FAILED_BATCHES, node]:
            failed = BatchFailed(order.batch, order.replica, "the model raised")
            replica.batch_end = (end_ns, self._push(end_ns, failed), failed)
            return
        counts = replica.branches.taken(order) if replica.branches is not None else ()
        misfits: tuple[int, ...] = ()
        if FaultKind.MISFIT in faults:
            ill = FaultKind.MISFIT
            misfits = tuple(at for at, id in enumerate(order.requests) if self._opened.faulty.get(id) is ill)
        if misfits and size == 1:  # as the driver says it
            failed = BatchFailed(order.batch, order.replica, "its tensors do not fit")
            replica.batch_end = (end_ns, self._push(end_ns, failed), failed)
            return
        finished = Finished(order.batch, order.replica, service_ns, counts, misfits)
        replica.batch_end = (end_ns, self._push(end_ns, finished), finished)

    def _check_cores(self, node: str) -> None:
        """Violation if the workers that live on a node have more cores than it has."""
        used, capacity = 0.0, self._nodes[node].node.cores
        for replica in self._replicas.values():
            if replica.spec.node == node:
                used += replica.slot.cores
                if replica.shadow is not None:
                    used += replica.shadow.shadow.cores
        if used > capacity + HALF_UNIT * len(self._replicas):
            raise Violation(f"the workers on {node} have {used:g} cores, the node {capacity:g}")

    def _kill_all(self, now_ns: int, node: str, numbers: Container[ReplicaId] | None = None) -> None:
        """The workers of a node are gone, and nobody says so: all, or those of `numbers`."""
        for id in [id for id, replica in self._replicas.items() if replica.spec.node == node]:
            if numbers is None or id in numbers:
                replica = self._replicas.pop(id)
                if replica.shadow is not None:
                    self._forget_shadow(replica.shadow)
                self._abandon_batch(now_ns, replica)
                self._break_pipeline(now_ns, id, replica, is_lost=True)

    # The deciding process

    def _core_dies(self, now_ns: int, fault: FaultBegins) -> CoreDied | None:
        """The deciding process dies. Its connections end, and with them all that was under way."""
        if self._is_down:
            return None
        self._is_down = True
        self._push(now_ns + max(fault.span_ns, 1), FaultEnds(fault))  # type: ignore[arg-type]
        for link in self._links.values():
            if link.is_open:
                self._close(link)
            link.held.clear()
        # Agents finish what they do at once, such as a resize, before they connect again.
        self.pending.void.update(entry[1] for entry in self.pending.heap if type(entry[2]) is WorkerResized)
        for shadow in list(self._shadows.values()):  # nor do they keep shadows
            self._forget_shadow(shadow)
            shadow.body.update_speed()
        for id in self._busy & self._replicas.keys():
            self._abandoned.add(id)
            self._push(now_ns + ABANDON_NS, Overdue(id))  # type: ignore[arg-type]
        return CoreDied()

    def _core_begins(self, now_ns: int) -> CoreBegun | None:
        """Another one begins. It hears of the nodes, of which it expects that all are there that are not on demand;
        then of the requests that edges hold."""
        if not self._is_down:
            return None
        self._is_down = False
        self._era += 1
        self._known.clear()
        for name, link in self._links.items():
            node = self._nodes[name]
            if node.state is NodeState.READY and link.is_reachable:
                self._report(now_ns, self._joined(now_ns, name))
            elif not node.node.on_demand:
                self._report(now_ns, NodeLost(name, "its agent has not connected"))
        self._report(now_ns, WOKE)
        for request in self._opened.by_id.values():
            if request.deadline_ns >= now_ns:  # its edge answers it otherwise
                self._report(now_ns, request)
        return CoreBegun()

    def _joined(self, now_ns: int, name: str) -> NodeReady:
        """The agent of a node has connected: what it has kept."""
        link, kept = self._links[name], list[KeptWorker]()
        own = {id: replica for id, replica in self._replicas.items() if replica.spec.node == name}
        unknown = set(own)
        if link.served != self._era:
            unknown = {id for id, each in own.items() if self.stages is not None and each.spec.stage not in self.stages}
        unknown |= {id for id, each in own.items() if each.part is not None}  # a new core knows nothing of pipelines
        self._kill_all(now_ns, name, unknown)
        link.served = self._era
        self._connect(link)
        for id in own.keys() - unknown:
            spec = structs.replace(own[id].spec.with_cores(own[id].slot.cores), shape=ALONE)
            kept.append(KeptWorker(id, spec, id in self._ready and id not in self._busy))
            link.replicas[id] = None
        return NodeReady(self._nodes[name].node, tuple(sorted(kept, key=lambda each: each.worker)))

    def _overdue(self, now_ns: int, event: Overdue) -> None:
        """An agent stops a worker that does not finish its abandoned batch."""
        if event.replica in self._abandoned and event.replica in self._replicas:
            self._abandoned.discard(event.replica)
            self._stop(now_ns, event.replica)

    # Nodes

    def _acquire(self, now_ns: int, node: str) -> None:
        there = self._nodes[node]
        if self._active[FaultKind.FAILED_ACQUIRES, ""]:
            there.state = NodeState.LOST
            self._report(now_ns + PROVIDER_NS, NodeLost(node, f"no {there.node.hardware} is available"))
        else:
            super()._acquire(now_ns, node)

    def _acquired(self, now_ns: int, event: NodeReady) -> Event | None:
        """The provider has a node: a new machine without workers."""
        node, link = self._nodes[event.node.name], self._links[event.node.name]
        if node.state is not NodeState.ACQUIRING:
            return None
        self._kill_all(now_ns, event.node.name)
        link.cuts = link.downs = 0
        found = super().happen(now_ns, -2, event)
        if self._is_down:
            return None  # its agent connects when there is a deciding process
        link.served = self._era
        self._connect(link)
        return found

    def _release(self, now_ns: int, node: str) -> None:
        self._nodes[node].state = NodeState.RELEASED
        self._kill_all(now_ns, node)
        self._lose_weights(now_ns, node)
        self._close(self._links[node])
        self._report(now_ns + PROVIDER_NS, NodeReleased(node))

    def _connect(self, link: AgentLink) -> None:
        self._close(link)
        link.is_open = True
        link.cut += 1

    def _close(self, link: AgentLink) -> None:
        """The driver closes a connection: nothing of it counts any more."""
        link.is_open = link.was_down = False
        link.session += 1
        link.replicas.clear()

    def _declare_lost(self, now_ns: int, name: str, why: str) -> int:
        """The driver gives up a node and tells the core. Returns when it has told all."""
        link, node = self._links[name], self._nodes[name]
        self._report(now_ns, NodeLost(name, why))
        reported_ns, gap_ns = now_ns, ms(link.session % 3)
        for id in [id for id, body in link.replicas.items() if body is None]:
            reported_ns += gap_ns
            self._report(reported_ns, WorkerLost(id, f"node {name} is lost: {why}"))
        self._lose_weights(now_ns, name)
        # Its transfers have ended. Starts that wait for them end too; otherwise another core would adopt them.
        awaiting = self._transfers._awaiting if self._transfers is not None else {}
        waiting = [awaiting.pop(key) for key in [*awaiting] if key[1] == name]
        starting = {
            id for ids in waiting for id in ids if id in self._replicas and self._replicas[id].start is not None
        }
        self._kill_all(now_ns, name, starting)
        self._close(link)
        if node.node.on_demand and (link.downs or link.session % 2):
            node.state = NodeState.LOST
            self._kill_all(now_ns, name)
        return reported_ns

    def _unreachable(self, now_ns: int, name: str, *, at_once: bool) -> None:
        """A node has just been cut off, or is down."""
        link = self._links[name]
        link.cut += 1
        if at_once and link.is_open:
            self._declare_lost(now_ns, name, "its connection was closed")
        else:
            self._push(now_ns + SILENT_NS, LinkSilent(name, link.cut))  # type: ignore[arg-type]

    def _silent(self, now_ns: int, event: LinkSilent) -> None:
        link = self._links[event.node]
        if link.cut == event.cut and link.is_open and not link.is_reachable:
            self._declare_lost(now_ns, event.node, f"it has been silent for {SILENT_NS / 1e9:g} s")

    def _restored(self, now_ns: int, name: str) -> None:
        """A node is reachable again: what was held arrives, or its agent connects."""
        link = self._links[name]
        link.cut += 1
        if link.was_down or not link.is_open:
            self._push(now_ns + RECONNECT_NS, AgentConnects(name, link.cut))  # type: ignore[arg-type]
            return
        self._let_pass(now_ns, link)

    def _let_pass(self, now_ns: int, link: AgentLink) -> None:
        """What the network has held arrives."""
        held, link.held = link.held, []
        for passing in held:
            self._push(now_ns, passing)  # type: ignore[arg-type]

    def _agent_connects(self, now_ns: int, event: AgentConnects) -> NodeReady | None:
        link, node = self._links[event.node], self._nodes[event.node]
        is_gone = link.cut != event.cut or not link.is_reachable or node.state is not NodeState.READY
        if is_gone or self._is_down:
            return None
        if link.served != self._era and not link.is_open:
            return self._joined(now_ns, event.node)
        reported_ns = self._declare_lost(now_ns, event.node, "its agent began anew") if link.is_open else now_ns
        if node.state is NodeState.READY:
            self._kill_all(now_ns, event.node)
            self._connect(link)
            self._let_pass(now_ns, link)
            self._report(reported_ns, NodeReady(node.node))
        return None

    # Faults

    def _fault_begins(self, now_ns: int, fault: FaultBegins) -> CoreDied | None:
        if self._healed:
            return None
        if fault.kind is FaultKind.CORE_DOWN:
            return self._core_dies(now_ns, fault)
        if fault.span_ns:
            self._push(now_ns + fault.span_ns, FaultEnds(fault))  # type: ignore[arg-type]
        begin = BEGINNINGS.get(fault.kind)
        if begin is None:
            self._active[fault.kind, fault.node] += 1 + fault.detail % 5
        else:
            begin(self, now_ns, fault)
        return None

    def _cut_off(self, now_ns: int, fault: FaultBegins) -> None:
        """A node is cut off or goes down."""
        link = self._links[fault.node]
        if self._nodes[fault.node].state is not NodeState.READY:
            return
        was_reachable = link.is_reachable
        if fault.kind is FaultKind.CUT:
            link.cuts += 1
        else:
            link.downs += 1
            link.was_down = True
            self._kill_all(now_ns, fault.node)
        if was_reachable:
            at_once = fault.kind is FaultKind.NODE_DOWN and fault.detail % 2 == 0
            self._unreachable(now_ns, fault.node, at_once=at_once)

    def _slow_down(self, now_ns: int, fault: FaultBegins) -> None:
        """The messages of a node take longer."""
        self._links[fault.node].delay_ns += ms(5 * (1 + hashed(fault.detail)))

    def _hurt_worker(self, now_ns: int, fault: FaultBegins) -> None:
        """One worker of a node dies or hangs, if there are any."""
        own = [id for id, replica in self._replicas.items() if replica.spec.node == fault.node]
        if fault.kind is FaultKind.SHADOW_CRASH:
            own = [id for id in own if self._replicas[id].shadow is not None]
        if not own:
            return
        id = own[fault.detail % len(own)]
        shadow = self._replicas[id].shadow
        if fault.kind is FaultKind.SHADOW_CRASH and shadow is not None:
            self._lose_shadow(now_ns, shadow)
        elif fault.kind is FaultKind.CRASH:
            self._lose(now_ns, id, "the worker process died")
        else:
            self._hung.add(id)
            if (end := self._replicas[id].batch_end) is not None:
                self._fall_silent(now_ns, end[2].batch, id)
            self._abandon_batch(now_ns, self._replicas[id])

    def _leave_clients(self, now_ns: int, fault: FaultBegins) -> None:
        """Some clients leave; the requests of some have just ended."""
        ids = list(self._opened.by_id)
        latest = range(max(0, self._opened.last - 2), self._opened.last + 1)
        for id in sorted({*ids[fault.detail % 7 :: 3][:5], *latest}):
            self._report(now_ns, Cancelled(RequestId(id)))

    def _cut_edge(self, now_ns: int, fault: FaultBegins) -> None:
        """An edge dies, or is cut off for so long that the driver closes its connection."""
        if fault.kind is FaultKind.EDGE_DOWN:
            self._push(now_ns, EdgeClosed(fault.detail))  # type: ignore[arg-type]
        elif fault.span_ns > SILENT_NS:
            self._push(now_ns + SILENT_NS, EdgeClosed(fault.detail))  # type: ignore[arg-type]

    def _wake_core(self, now_ns: int, fault: FaultBegins) -> None:
        for index in range(5):
            self._report(now_ns + ms(index * (fault.detail % 50)), WOKE)

    def _fault_ends(self, now_ns: int, event: FaultEnds) -> CoreBegun | None:
        fault = event.begun
        if fault.kind is FaultKind.CORE_DOWN:
            return self._core_begins(now_ns)
        if self._healed:
            return None
        kind, name = fault.kind, fault.node
        if kind in (FaultKind.NODE_DOWN, FaultKind.CUT):
            link = self._links[name]
            was_reachable = link.is_reachable
            if kind is FaultKind.CUT:
                link.cuts = max(0, link.cuts - 1)
            else:
                link.downs = max(0, link.downs - 1)
            if link.is_reachable and not was_reachable:
                self._restored(now_ns, name)
        elif kind is FaultKind.SLOW_LINK:
            self._links[name].delay_ns -= ms(5 * (1 + hashed(fault.detail)))
        elif (kind, name) in self._active:
            self._active[kind, name] -= 1 + fault.detail % 5
        return None

    def _heal(self, now_ns: int, event: AllHealed) -> None:
        """No more faults. Hung workers stay as they are: the core has to find them."""
        self._healed = True
        self._active.clear()
        for name, link in self._links.items():
            link.delay_ns = link.usual_ns
            was_reachable = link.is_reachable
            link.cuts = link.downs = 0
            if not was_reachable:
                self._restored(now_ns, name)

    def _edge_closed(self, now_ns: int, event: EdgeClosed) -> None:
        """The driver cancels the open requests of an edge that is gone."""
        edge_of = self._opened.edge_of
        for id in self._opened.by_id:
            if edge_of[id] == event.edge:
                self._report(now_ns, Cancelled(id))


def hashed(number: int) -> int:
    """A number from 0 to 255 that looks random."""
    return (number * 2654435761 + 0x9E3779B9) >> 13 & 0xFF


BEGINNINGS: Final[dict[FaultKind, Any]] = {
    FaultKind.NODE_DOWN: RemoteCluster._cut_off,
    FaultKind.CUT: RemoteCluster._cut_off,
    FaultKind.SLOW_LINK: RemoteCluster._slow_down,
    FaultKind.CRASH: RemoteCluster._hurt_worker,
    FaultKind.HANG: RemoteCluster._hurt_worker,
    FaultKind.SHADOW_CRASH: RemoteCluster._hurt_worker,
    FaultKind.CANCEL: RemoteCluster._leave_clients,
    FaultKind.EDGE_DOWN: RemoteCluster._cut_edge,
    FaultKind.EDGE_CUT: RemoteCluster._cut_edge,
    FaultKind.STRAY_WAKES: RemoteCluster._wake_core,
}
"""How faults begin that are more than a state for a while."""

FAULT_STEPS: Final[dict[type, Any]] = {
    FaultBegins: RemoteCluster._fault_begins,
    FaultEnds: RemoteCluster._fault_ends,
    AllHealed: RemoteCluster._heal,
    LinkSilent: RemoteCluster._silent,
    AgentConnects: RemoteCluster._agent_connects,
    Overdue: RemoteCluster._overdue,
    EdgeClosed: RemoteCluster._edge_closed,
}
"""What happens at each internal entry of the heap."""
