"""A simulated cluster behind a network: links that are slow, cut or lose reports, machines that die, and edges.

The backend of the deciding process (`sloop.serve.cluster.agents.AgentBackend`), the agents and their nodes are those
that serve. This module simulates what is between and around them: the network, the provider of machines, edges, and the
planner; and `tests.dst.nodes` what is under an agent: processes and models.

**Links.** A connection delivers frames in the order in which they were sent, however long each takes. Those of
different nodes overtake each other.

**Partitions.** While a node is cut off, nothing passes in either direction. If the cut is shorter than `SILENT_NS`,
what was sent meanwhile arrives afterwards, as TCP sends it again. Otherwise both ends close the connection, as if each
had noticed by the missing heartbeats. Some late reports of a closed connection reach the core nevertheless (`GHOSTS`),
because it must ignore them; so do reports of finished batches that are late, or come twice.

**Machines.** One that dies takes its agent and all workers with it. It is noticed at once if its host closes the
connections, otherwise like a partition. The provider starts another agent when the machine is back, and when an agent
has ended that was sent away. A machine on demand comes empty.

**Edges.** They are processes beside the core's. A request that comes to one that hangs arrives when it goes on. After
`EDGE_HUNG_NS` the driver kills it: its open requests are cancelled, and clients whose requests had not arrived send
them again, to the edge that follows. An edge that dies is noticed at once.

**Planner and provider.** A plan may take seconds, never come, or be an error of a planner that was restarted. The
provider may have no machine.

**The deciding process** may die, and another one takes its place (`CoreDied`, `CoreBegun`) once its backend has opened.
Edges hold the requests that have not ended, and those that arrive meanwhile, and submit them to the next process,
unless their deadline has passed: those they answer themselves. What was deployed is not known any more.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from hashlib import sha256
from heapq import heappop
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from sloop.actions import Action, AdoptWorker, Order, ResizeWorker, StartBatch, StartWorker, StopWorker, Transfer
from sloop.app.application import Application
from sloop.errors import MachineError
from sloop.events import WOKE, BatchFailed, BatchLost, Cancelled, Event, Finished, Planned
from sloop.machine import Capacity
from sloop.profile.profile import Profile
from sloop.serve.blocks import Block
from sloop.serve.cluster.agent import Agent, AgentHost, FromAgent, NodeOrder, ToAgent
from sloop.serve.cluster.agents import WORKERS_MAX, AgentBackend, Legacy, NodeMemory
from sloop.serve.cpu_quota import Detected
from sloop.serve.dataflow import Assembly, Decision, StageWiring
from sloop.serve.heartbeat import HUNG_S
from sloop.serve.messages import BatchFinished, CutBlock, Report, Run, encode
from sloop.serve.network import SILENT_S, Endpoint, Purpose
from sloop.serve.node.node import NodeWorker
from sloop.serve.protocols import CutModel, Servable
from sloop.serve.transport import CLOSED, Frame, FrameKind
from sloop.serve.weights.sources import ModelSource
from sloop.shared_memory import Arenas
from sloop.sim.checkers import HALF_UNIT, Violation
from sloop.sim.cluster import ClusterTruths
from sloop.sim.happenings import Pending
from sloop.systems.setup import weights_of
from sloop.tensor import Signature
from sloop.units import FOREVER_NS, ms, s
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ModelWeights, Node, ReplicaId, Request, RequestId, WorkerId
from tests.dst.nodes import (
    Clock,
    SimulatedCache,
    SimulatedGpus,
    SimulatedProcess,
    SimulatedProcesses,
    SimulatedQuotas,
    VirtualLoop,
    hashed,
)

SILENT_NS: Final = s(SILENT_S)
"""How long a link may be silent before its ends close it."""
EDGE_HUNG_NS: Final = s(HUNG_S)
"""How long an edge may hang before the driver kills it."""
BEAT_NS: Final = ms(500)
"""In which an end of a connection is told by the other machine that nobody there knows it any more."""
PROVIDER_NS: Final = ms(300)
"""How long the provider takes to start an agent again, or to look again for a machine."""
SLOW_PLAN_NS: Final = s(3)
FETCH_BYTES_PER_S: Final = 4e9
"""How fast models come to a machine, where the world has a network."""
ERA: Final = WORKERS_MAX
"""Replicas of each deciding process are numbered from another multiple of this on."""
PORT: Final = 1
TOKEN: Final = b"of the schedules"


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
    EDGE_HANG = "edge hangs"
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
    SLOW_FETCH = "slow fetch"
    """Models come to the node at a tenth of the rate."""
    FAILED_FETCH = "failed fetch"
    """The store cannot be reached from the node."""
    CORE_DOWN = "core down"
    """The deciding process dies, and another one takes its place after a while."""


OF_REQUESTS: Final = (FaultKind.BAD_REQUEST, FaultKind.DEADLY_REQUEST, FaultKind.MISFIT)
"""Faults that are in a request, and arrive with it."""
OF_FETCHES: Final = (FaultKind.SLOW_FETCH, FaultKind.FAILED_FETCH)
"""Faults of the way by which models come to a node."""


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
    """The driver tells the core an event."""

    event: Event
    era: int | None
    """Number of the deciding process; None for what does not come from its backend. While there is none, whoever holds
    the requests hears that."""


class CoreDied(Struct, frozen=True):
    """The deciding process has died."""


class CoreBegun(Struct, frozen=True):
    """Another deciding process begins. What it is told of nodes and requests follows at the same instant."""


class Passing(Struct, frozen=True):
    """A frame arrives at an end of its connection; without one, the end of the connection."""

    end: "LinkEnd"
    frame: Frame | None


class Accepted(Struct, frozen=True):
    """An agent's connection reaches the deciding process."""

    end: "LinkEnd"


class LinkSilent(Struct, frozen=True):
    """A connection has been silent for `SILENT_NS`, unless its node has been mended since."""

    connection: "Connection"
    machine: "Machine"
    cut: int


class AgentStarts(Struct, frozen=True):
    """The provider starts an agent, unless the node has one, or none is wanted any more."""

    node: str


class MachineGoes(Struct, frozen=True):
    """A machine that was given back is terminated, with what may still run there."""

    node: str


class EdgeClosed(Struct, frozen=True):
    """An edge has died, with all that it had."""

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


# Connections


class Connection:
    """Between an agent and a deciding process, or of an agent to another one on the second of two machines."""

    def __init__(self, machines: "Sequence[Machine]", agent: VirtualLoop, core: VirtualLoop) -> None:
        self.machines = machines
        self.purpose = Purpose.AGENT if len(machines) == 1 else Purpose.PARTS
        self.to_core, self.to_agent = LinkEnd(self, agent), LinkEnd(self, core)
        """What the agent sends with, and what the deciding process does, or the other agent."""
        self.to_core.other, self.to_agent.other = self.to_agent, self.to_core
        self.held: list[Passing] = []
        """What arrives when the node is reachable again."""

    @property
    def ends(self) -> "tuple[LinkEnd, LinkEnd]":
        return self.to_core, self.to_agent

    @property
    def is_reachable(self) -> bool:
        """Whether messages pass."""
        return all(machine.is_reachable for machine in self.machines)

    def post(self, sender: "LinkEnd", frame: Frame | None) -> None:
        """Send a frame, behind what was sent before."""
        if sender.other.is_closed or sender.loop.is_over:
            return
        cluster, delay_ns = self.machines[0].cluster, sum(machine.delay_ns for machine in self.machines)
        sender.last_ns = max(sender.last_ns, cluster.clock.now_ns + delay_ns)
        cluster.push(sender.last_ns, Passing(sender.other, frame))


class LinkEnd:
    """One end of a connection, in the process that has this loop (`sloop.serve.network.NetworkLink`)."""

    other: "LinkEnd"
    is_congested = False

    def __init__(self, connection: Connection, loop: VirtualLoop) -> None:
        self.connection, self.loop = connection, loop
        self.purpose, self.local_host = connection.purpose, connection.machines[0].node.name
        self.on_frame: Callable[[Frame], None] = lambda frame: None
        self.on_end: Callable[[str], None] = lambda why: None
        self.is_closed = False
        self.last_ns = 0
        """When the last frame that it has sent arrives."""

    def attach(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        self.on_frame, self.on_end = on_frame, on_end

    def send(self, kind: FrameKind, subject: int = 0, value: int = 0, payload: Sequence[Any] = ()) -> None:
        if not self.is_closed:
            self.connection.post(self, Frame(kind, subject, value, memoryview(b"".join(payload))))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.connection.post(self, None)

    def end(self, why: str) -> None:
        """The other end is gone."""
        if not self.is_closed:
            self.is_closed = True
            self.on_end(why)

    def allow(self, payload_bytes_max: int) -> None: ...

    def keep_alive(self) -> None: ...


class Listener:
    """Accepts connections until it is closed."""

    port = PORT

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    async def close(self) -> None:
        self._then()


class AgentProcess:
    """The process of an agent."""

    def __init__(self, machine: "Machine") -> None:
        self._machine = machine
        self.loop = VirtualLoop(machine.cluster.pending, machine.cluster.clock)  # type: ignore[abstract]  # the rest of it is not called
        self.agent: Agent
        self.processes: SimulatedProcesses | None = None
        self.serving: asyncio.Task[None]

    @property
    def workers(self) -> Mapping[Any, Any]:
        """By number, those of its node."""
        return self.agent._session.node.workers if self.agent._session is not None else {}

    def start(self, join: Endpoint) -> None:
        machine = self._machine
        self.agent = Agent(join, machine.node.name, TOKEN, make_cache=lambda: cast(Any, machine.cache), around=machine)
        self.serving = self.loop.create_task(self._serve())
        self.serving.add_done_callback(lambda _: self._machine.on_agent_ended(self))

    async def _serve(self) -> None:
        with suppress(MachineError):  # it is sent away, or finds nobody
            await self.agent.serve()

    def kill(self) -> None:
        """It dies, and its workers with it."""
        session, self.agent._session = self.agent._session, None  # its coroutines have nothing to tidy up
        self.loop.end()
        if session is not None:  # what the operating system does
            session._arenas.close()
            session._arena._memory.release()
            session._arena._map.close()


class Machine(AgentHost):
    """A machine of the cluster, and the network between it and the deciding process."""

    def __init__(self, cluster: "RemoteCluster", node: Node, delay_ns: int) -> None:
        self.cluster, self.node = cluster, node
        self.usual_ns = self.delay_ns = delay_ns
        """How long a message takes, without faults and now."""
        self.cuts = self.downs = 0
        """How many faults cut it off, and how many keep it down."""
        self.cut = 0
        """Number of the last time at which it became unreachable or reachable."""
        self.lives = 0
        """How many agents it has had."""
        self.agent: AgentProcess | None = None
        self.accept: Callable[[Any], None] | None = None
        """Takes a connection of another agent; None if nobody listens."""
        self.connections: list[Connection] = []
        """Of which an end is open."""
        self.gpus = cast(Any, SimulatedGpus())
        self.is_going = False
        """Whether it was given back, and is to be terminated."""
        self.clear()

    def clear(self) -> None:
        """It is a new machine."""
        self.cache = SimulatedCache(self.cluster, self.node.name, self.cluster.sizes_bytes)

    @property
    def is_reachable(self) -> bool:
        """Whether messages pass."""
        return not self.cuts and not self.downs

    # As the agent sees it

    def machine(self) -> str:
        return f"{self.node.name}, life {self.lives}"

    def capacity(self, _: object = None) -> Capacity:
        return Capacity(self.node.cores, self.node.memory_bytes)

    def quotas(self, _: object = None) -> Detected:
        return Detected(SimulatedQuotas(self.cluster, self.node.name, self.node.cores), "the simulation")

    def processes(self, loop: VirtualLoop, *_: object) -> Any:
        agent = self.agent
        assert agent is not None
        agent.processes = SimulatedProcesses(
            self.cluster, self.node.name, loop, lambda: cast(Any, agent.agent._session).node
        )
        return agent.processes

    async def connect(self, endpoint: Endpoint, token: bytes, purpose: Purpose, **_: object) -> Any:
        cluster, agent = self.cluster, self.agent
        other = cluster._machines[endpoint[0]] if purpose is Purpose.PARTS else None
        accept = cluster.accept if other is None else other.accept
        if not self.is_reachable or accept is None or (other is not None and not other.is_reachable):
            raise MachineError(f"{endpoint[0]} cannot be reached")
        assert agent is not None
        if other is None:
            made = Connection([self], agent.loop, cluster.core_loop)
        else:
            assert other.agent is not None
            made = Connection([self, other], agent.loop, other.agent.loop)
        for machine in made.machines:
            machine.connections = [each for each in machine.connections if not all(end.is_closed for end in each.ends)]
            machine.connections.append(made)
        made.to_core.last_ns = cluster.clock.now_ns + sum(machine.delay_ns for machine in made.machines)
        cluster.push(made.to_core.last_ns, Accepted(made.to_agent))
        return made.to_core

    async def listen(  # type: ignore[override]  # it calls back with an end of a simulated connection
        self, endpoint: Endpoint, token: bytes, accept: Callable[[Any], None], _: object
    ) -> Any:
        self.accept = accept

        def stop() -> None:
            self.accept = None

        return Listener(stop)

    def close_mapped(self, _: object = None) -> int:
        return 0

    # The network

    def become_unreachable(self) -> None:
        """It has just been cut off, or is down."""
        self.cut += 1
        for connection in self.connections:
            self.cluster.push(self.cluster.clock.now_ns + SILENT_NS, LinkSilent(connection, self, self.cut))

    def become_reachable(self) -> None:
        """What was held arrives; an end whose other process has died hears that."""
        self.cut += 1
        for connection in [each for each in self.connections if each.is_reachable]:
            held, connection.held = connection.held, []
            for passing in held:
                self.cluster.push(self.cluster.clock.now_ns, passing)
            for end in connection.ends:
                if end.loop.is_over:
                    self.cluster.push(self.cluster.clock.now_ns + BEAT_NS, Passing(end.other, None))

    # Agents

    def start_agent(self, join: Endpoint) -> None:
        """The provider starts an agent."""
        self.lives += 1
        self.agent = made = AgentProcess(self)
        made.loop.run(made.start, join)

    def kill_agent(self) -> None:
        """The machine dies, or is gone."""
        if self.agent is not None:
            self.agent.kill()
            self.agent, self.cache, self.accept = None, self.cache.left(), None
            for end in [end for each in self.connections if len(each.machines) > 1 for end in each.ends]:
                if end.loop.is_over:
                    self.cluster.push(self.cluster.clock.now_ns + BEAT_NS, Passing(end.other, None))

    def on_agent_ended(self, agent: AgentProcess) -> None:
        """An agent has ended by itself; the provider starts another one if it is to have one."""
        if self.agent is agent:
            self.kill_agent()
            self.cluster.push(self.cluster.clock.now_ns + PROVIDER_NS, AgentStarts(self.node.name))

    def check_cores(self) -> None:
        """Violation if the workers that live here have more cores than it has. Those that are being killed do not
        count, or that the core has given up with their batches: it waits for nothing of them."""
        if self.agent is None:
            return
        workers = [
            each
            for each in self.agent.workers.values()
            if not each.is_over and each.number not in self.cluster.given_up
        ]
        used, capacity = sum(each.cores for each in workers), self.node.cores
        if used > capacity + HALF_UNIT * len(workers):
            raise Violation(f"the workers on {self.node.name} have {used:g} cores, the node {capacity:g}")


class Provider:
    """Provides machines to one deciding process (`sloop.serve.cluster.agents.NodeProvider`), and dies with it. What an
    earlier one has started goes on, but nobody starts it again."""

    def __init__(self, cluster: "RemoteCluster") -> None:
        self._cluster = cluster
        self.wanted: set[str] = set()

    async def host(self) -> str:
        return "home"

    def want(self, nodes: Iterable[Node], join: Endpoint, token: bytes) -> None:
        before, self.wanted = self.wanted, {node.name for node in nodes}
        for name in sorted(self.wanted - before):
            self._cluster.provide(name)
        for name in sorted(before - self.wanted):
            self._cluster.take_back(name)

    async def close(self) -> None: ...


class Remembered(NodeMemory):
    """What a deciding process leaves to the next one."""

    def __init__(self, former: "Remembered | None") -> None:
        self._former = former
        self.left: list[str] = []
        super().__init__(None)
        self.token = TOKEN

    @property
    def is_kept(self) -> bool:
        return True

    def _read(self) -> Legacy | None:
        former = self._former
        return None if former is None else Legacy(TOKEN.decode(), former.first_worker, former.left)

    def write(self, nodes: list[str]) -> None:
        self.left = nodes


class Ear:
    """Hears what a backend reports (`sloop.serve.protocols.BackendListener`), and tells it to the core."""

    def __init__(self, cluster: "RemoteCluster") -> None:
        self._cluster = cluster

    def on_event(self, event: Event) -> None:
        self._cluster.report(event)

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        self._cluster.report_end(event)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        self._cluster.report_end(BatchFailed(batch, replica, failure.summary))


# The cluster


class RemoteCluster:
    """Agents on nodes, behind links. `versions` are all application versions, of which the first `known` are known to
    each deciding process from its start; `opened` is what the driver knows of requests."""

    def __init__(
        self,
        versions: Sequence[Application],
        truths: ClusterTruths,
        nodes: Iterable[Node],
        opened: OpenRequests,
        *,
        known: int | None = None,
        delay_ns: int = 0,
    ) -> None:
        self._truths, self._opened = truths, opened
        self.pending = Pending()
        self.push: Callable[[int, Any], int] = self.pending.add
        self.push(FOREVER_NS, WOKE)
        self.pending.void.add(-1)  # never empty, so that finished batches, too, pass through `happen`
        self.clock = Clock(-s(1))
        self.stages = truths.stages
        places = truths.weights
        self.fetches_bytes_per_s = FETCH_BYTES_PER_S if places is not None and places.has_network else 0.0
        self.sizes_bytes: dict[str, int] = {}
        self._versions = [self._served(version) for version in versions]
        self._known = len(versions) if known is None else known
        self._nodes = tuple(nodes)
        self._active: Counter[tuple[str, str]] = Counter()
        """How many faults of a kind act on a node now."""
        self.met: Counter[str] = Counter()
        """How often a fault has changed something, and what else has come about that schedules are to reach."""
        self._healed = False
        self._busy: set[WorkerId] = set()
        """The replicas whose batch has not ended, as the core knows."""
        self.given_up: set[WorkerId] = set()
        """Those that it has stopped nevertheless."""
        self._join: Endpoint = ("home", PORT)
        self.accept: Callable[[Any], None] | None = None
        """Takes a connection; None if nobody listens."""
        self._is_down = True
        """Whether there is no deciding process that decides."""
        self._early: list[Event] = []
        """What was reported before it does."""
        self._era = -1
        """Number of the deciding process."""
        self._memory: Remembered | None = None
        self._machines = {node.name: Machine(self, node, 0) for node in self._nodes}
        self._begin_core()
        self._settle()
        for machine in self._machines.values():
            machine.usual_ns = machine.delay_ns = delay_ns

    def _served(self, version: Application) -> tuple[dict[tuple[str, str], Servable], dict[str, StageWiring]]:
        """The models and stages of a version."""
        servables, wirings = dict[tuple[str, str], Servable](), dict[str, StageWiring]()
        weights = weights_of(version)
        for stage in version.stages:
            edges = self.stages[stage.name].branches
            deciding = edges._deciding.get(stage.name, ()) if edges is not None else ()
            decisions = tuple(Decision(edge.target) for edge in deciding)
            wirings[stage.name] = StageWiring(stage.name, Assembly((), ()), decisions)
            for variant in stage.variants:
                profiles = version.profiles_of(variant)
                own = [weights[stage.name, variant.name, hardware] for hardware in profiles]
                servables[stage.name, variant.name] = self._model(own, profiles)
        return servables, wirings

    def _model(self, weights: Sequence[ModelWeights], profiles: Mapping[str, Profile]) -> Servable:
        """A model with these weights, in blocks if its layers were measured."""
        name, size_bytes = f"{weights[0].name}/{weights[0].digest}", weights[0].size_bytes
        layers = {hardware: each.layers for hardware, each in profiles.items() if each.layers is not None}
        known, signature = tuple(dict.fromkeys(weights)), Signature((), ())
        if not layers:
            return Servable("the model", signature, source=self._source(name, size_bytes), weights=known)
        measured = next(iter(layers.values())).blocks
        total_bytes = max(1, sum(block.param_bytes for block in measured))
        blocks = [
            CutBlock("", (), (), (), self._source(f"{name}/{at}", size_bytes * block.param_bytes // total_bytes))
            for at, block in enumerate(measured)
        ]
        cut = CutModel(tuple(blocks), layers, min(each.max_batch for each in profiles.values()))
        return Servable("the model", signature, weights=known, cut=cut)

    def _source(self, name: str, size_bytes: int) -> str:
        """A file in the store."""
        digest = sha256(name.encode()).hexdigest()
        text = f"http://store/{digest}.onnx#sha256={digest}"
        self.sizes_bytes[ModelSource.of(text).location] = size_bytes
        return text

    def schedule(self, at_ns: int, fault: FaultBegins | AllHealed) -> None:
        """Let a fault begin, or all end, at this time."""
        self.push(at_ns, fault)

    def stop_faults(self, now_ns: int) -> None:
        """Does nothing: the schedule says when faults stop (`AllHealed`)."""

    # What acts on machines (`tests.dst.nodes.Circumstances`)

    def acts(self, kind: str, node: str) -> int:
        """How many faults of a kind act on a node now."""
        found = self._active[kind, node]
        if found:
            self.met[kind] += 1
        return found

    def faults_of(self, requests: Sequence[RequestId]) -> Sequence[str | None]:
        """The faults that these requests carry."""
        return [self._opened.faulty.get(request) for request in requests]

    # From the core to the backend

    def start_batch(self, now_ns: int, order: StartBatch) -> None:
        """Run a batch. Violation if its replica runs one already."""
        self.clock.now_ns = now_ns
        placed = self.backend._workers.get(order.replica)
        if placed is not None and placed.batch is not None:
            raise Violation(f"batch {order.batch} reaches replica {order.replica}, which still runs {placed.batch}")
        self._busy.add(order.replica)
        visits = list(order.visits)
        run = Run(len(visits), [encode(visit) for visit in visits])
        self.core_loop.do(self.backend.run, order.batch, order.replica, run)

    def obey(self, now_ns: int, order: Action) -> None:
        """Pass an order to the backend; other actions, such as decisions, have no effect."""
        self.clock.now_ns = now_ns
        if isinstance(order, StopWorker) and order.worker in self._busy:
            self.given_up.add(order.worker)
        if isinstance(order, AdoptWorker):
            self.met["adoption"] += 1
        if isinstance(order, Order):
            self.core_loop.do(self._order, order)

    def _order(self, order: Order) -> None:
        for servables, wirings in self._versions:  # whoever deploys a version says what it consists of before
            if self._is_about(order, servables) and self.backend.servable(*next(iter(servables))) is None:
                self.backend.learn(servables, wirings, threads_prepared=1)
        self.backend.order(order)

    @staticmethod
    def _is_about(order: Order, servables: Mapping[tuple[str, str], Servable]) -> bool:
        if isinstance(order, StartWorker):
            return (order.spec.stage, order.spec.variant) in servables
        if not isinstance(order, Transfer):
            return False
        return order.weights.model in {weights.model for each in servables.values() for weights in each.weights}

    def deliver_plan(self, now_ns: int, planned: Planned) -> None:
        """The answer of the planner, as its process is now."""
        self.clock.now_ns = now_ns
        if self._active[FaultKind.LOST_PLANS, ""]:
            return
        if self._active[FaultKind.FAILED_PLANS, ""]:
            keys = [*planned.plans, *planned.errors]
            planned = Planned(planned.number, {}, dict.fromkeys(keys, "the planner process died"), restarted=True)
        slow_ns = SLOW_PLAN_NS if self._active[FaultKind.SLOW_PLANS, ""] else 0
        self.report(planned, self._truths.plan_ns + slow_ns)

    # From the backend to the core

    def report(self, event: Event, after_ns: int = 0) -> None:
        """The driver tells the core an event after this time."""
        if self._is_down:
            self._early.append(event)
        else:
            self.push(self.clock.now_ns + after_ns, Reported(event, self._era))

    def report_end(self, event: Finished | BatchFailed) -> None:
        """A batch has ended, of which the core may hear late, or twice."""
        machine = self._machine_of(event.replica)
        node = machine.node.name if machine is not None else ""
        late_ns = hashed(event.batch) * ms(1) if self._active[FaultKind.LATE_REPORTS, node] else 0
        if self._active[FaultKind.REPEATED_REPORTS, node]:
            self.report(event, late_ns + hashed(event.batch + 1) * ms(1))
        self.report(event, late_ns)

    def _machine_of(self, replica: ReplicaId) -> Machine | None:
        placed = self.backend._workers.get(replica)
        return self._machines[placed.agent.hello.name] if placed is not None else None

    # What happens

    def happen(self, now_ns: int, sequence: int, event: Any) -> Event | None:
        """Apply a pending entry. Returns the event for the core, or None."""
        self.clock.now_ns = now_ns
        kind = type(event)
        if kind is asyncio.TimerHandle:
            if not event._cancelled:
                event._loop.run(event._run)
        elif kind is Passing:
            self._pass(event)
        elif kind is Reported:
            if event.era is not None and (event.era != self._era or self._is_down):
                return None
            if isinstance(event.event, Finished | BatchFailed | BatchLost):
                self._busy.discard(event.event.replica)
            told: Event = event.event
            return told
        elif kind in STEPS:
            found: Event | None = STEPS[kind](self, event)
            return found
        return None

    def _pass(self, passing: Passing) -> None:
        """A frame arrives at the other end of its connection, unless the node is unreachable or the end closed."""
        end = passing.end
        if not end.connection.is_reachable:
            end.connection.held.append(passing)
        elif end.is_closed:
            if passing.frame is not None and end is end.connection.to_agent and self._active[FaultKind.GHOSTS, ""]:
                self._haunt(end, passing.frame)
        elif passing.frame is None:
            end.loop.run(end.end, CLOSED)
        else:
            if end is end.connection.to_core and b"resize_worker" in bytes(passing.frame.payload):
                self._note_resizes(end.connection.machines[0], passing.frame)
            end.loop.run(end.on_frame, passing.frame)
            if end is end.connection.to_core:
                end.connection.machines[0].check_cores()

    def _note_resizes(self, machine: Machine, frame: Frame) -> None:
        """In which phase resizes meet their workers."""
        for record in msgspec.msgpack.decode(frame.payload, type=list[ToAgent]):
            if isinstance(record, NodeOrder) and isinstance(record.order, ResizeWorker) and machine.agent is not None:
                worker = machine.agent.workers.get(record.order.worker)
                self.met[f"resize, {worker.phase if worker is not None else 'gone'}"] += 1

    def _haunt(self, end: LinkEnd, frame: Frame) -> None:
        """A late report of a closed connection reaches the core."""
        if end.loop is not self.core_loop:
            return
        for record in msgspec.msgpack.decode(frame.payload, type=list[FromAgent]):
            if isinstance(record, Report | BatchFinished):
                self.report(record.event)

    def _accepted(self, event: Accepted) -> None:
        """A connection reaches the deciding process, or another agent."""
        end = event.end
        accept = self.accept if end.purpose is Purpose.AGENT else end.connection.machines[1].accept
        is_stale = end.loop is not self.core_loop if end.purpose is Purpose.AGENT else end.loop.is_over
        if accept is None or is_stale or not end.connection.is_reachable:
            self.push(self.clock.now_ns + BEAT_NS, Passing(end.other, None))
        else:
            end.loop.run(accept, end)

    def _silent(self, event: LinkSilent) -> None:
        machine = event.machine
        if machine.cut == event.cut and not machine.is_reachable:
            for end in event.connection.ends:
                end.loop.run(end.end, f"it has been silent for {SILENT_S:g} s")

    # The deciding process

    def _begin_core(self) -> None:
        """A deciding process starts. It decides once its backend has opened."""
        self._era += 1
        self._memory, self._provider = Remembered(self._memory), Provider(self)
        self._early = []
        self.core_loop = VirtualLoop(self.pending, self.clock)  # type: ignore[abstract]  # as above
        self.core_loop.run(self._open_backend)

    def _open_backend(self) -> None:
        assert self._memory is not None
        servables, wirings = dict[tuple[str, str], Servable](), dict[str, StageWiring]()
        for models, stages in self._versions[: self._known]:
            servables |= models
            wirings |= stages
        self.backend = AgentBackend(
            *(servables, wirings, self._provider),
            arenas=Arenas(),
            nodes=self._nodes,
            pid=1,
            memory=self._memory,
            listen=cast(Callable[..., Awaitable[Any]], self._listen),
            clock_ns=lambda: self.clock.now_ns,
        )
        self.backend.attach(Ear(self))
        opening = self.core_loop.create_task(self.backend.open())
        opening.add_done_callback(self._on_open)

    async def _listen(
        self, endpoint: Endpoint, token: bytes, accept: Callable[[Any], None], context: object
    ) -> Listener:
        self.accept = accept

        def stop() -> None:
            self.accept = None

        return Listener(stop)

    def _on_open(self, opening: "asyncio.Task[None]") -> None:
        opening.result()
        self.push(self.clock.now_ns, CoreBegun())

    def _core_begins(self, event: CoreBegun) -> CoreBegun | None:
        """It decides from now on. It hears of the nodes that are not as it expects, then of the requests that edges
        hold."""
        self._is_down = False
        early, self._early = self._early, []
        for each in early:
            self.report(each)
        if not self._era:
            return None
        self.report(WOKE)
        for request in self._opened.by_id.values():
            if request.deadline_ns >= self.clock.now_ns:  # its edge answers it otherwise
                self.report(request)
        return event

    def _core_dies(self, fault: FaultBegins) -> CoreDied | None:
        """The deciding process dies. Its connections end, and with them all that was under way."""
        if self._is_down:
            return None
        self._is_down, self.accept = True, None
        self.push(self.clock.now_ns + max(fault.span_ns, 1), FaultEnds(fault))
        for machine in self._machines.values():
            for connection in machine.connections:
                if machine.is_reachable and connection.purpose is Purpose.AGENT:
                    connection.to_agent.close()
        self.core_loop.end()
        return CoreDied()

    def _settle(self) -> None:
        """Let all that happens before the first instant happen."""
        heap = self.pending.heap
        while heap[0][0] < 0:
            at_ns, sequence, event = heappop(heap)
            self.happen(max(at_ns, self.clock.now_ns), sequence, event)
        assert not self._is_down, "the first deciding process has not begun"

    # Nodes

    def provide(self, name: str) -> None:
        """A deciding process wants a node."""
        machine = self._machines[name]
        if machine.node.on_demand and (machine.agent is None or machine.is_going):
            if not machine.is_reachable:  # of the machine that was there before, nobody hears any more
                for end in [end for connection in machine.connections for end in connection.ends]:
                    self.push(self.clock.now_ns + SILENT_NS, Passing(end, None))
            machine.cut, machine.cuts, machine.downs, machine.is_going = machine.cut + 1, 0, 0, False
            machine.kill_agent()  # of the machine that was there before
            machine.clear()
            after_ns = self._truths.acquisition.draw_ns(self.clock.now_ns, machine.node.hardware)
            self.push(self.clock.now_ns + after_ns, AgentStarts(name))
        elif machine.agent is None:
            self.push(self.clock.now_ns, AgentStarts(name))

    def take_back(self, name: str) -> None:
        """A deciding process does not want a node any more."""
        self._machines[name].is_going = True
        self.push(self.clock.now_ns + PROVIDER_NS, MachineGoes(name))

    def _machine_goes(self, event: MachineGoes) -> None:
        if self._machines[event.node].is_going:
            self._machines[event.node].kill_agent()

    def _agent_starts(self, event: AgentStarts) -> None:
        machine = self._machines[event.node]
        if machine.agent is not None or machine.downs or event.node not in self._provider.wanted:
            return
        if machine.node.on_demand and self._active[FaultKind.FAILED_ACQUIRES, ""]:
            self.push(self.clock.now_ns + PROVIDER_NS, event)
        else:
            machine.start_agent(self._join)

    # Faults

    def _fault_begins(self, fault: FaultBegins) -> CoreDied | None:
        if self._healed:
            return None
        if fault.kind is FaultKind.CORE_DOWN:
            return self._core_dies(fault)
        if fault.span_ns:
            self.push(self.clock.now_ns + fault.span_ns, FaultEnds(fault))
        begin = BEGINNINGS.get(fault.kind)
        if begin is None:
            self._active[fault.kind, fault.node] += 1 + fault.detail % 5
        else:
            begin(self, fault)
        return None

    def _cut_off(self, fault: FaultBegins) -> None:
        """A node is cut off or goes down."""
        machine = self._machines[fault.node]
        if machine.agent is None and not machine.downs:
            return
        was_reachable = machine.is_reachable
        if fault.kind is FaultKind.CUT:
            machine.cuts += 1
        else:
            machine.downs += 1
            machine.kill_agent()
            if fault.detail % 2 == 0 and was_reachable:
                for end in [end for connection in machine.connections for end in connection.ends]:
                    end.loop.run(end.end, CLOSED)
        if was_reachable:
            machine.become_unreachable()

    def _slow_down(self, fault: FaultBegins) -> None:
        """The messages of a node take longer."""
        self._machines[fault.node].delay_ns += ms(5 * (1 + hashed(fault.detail)))

    def _hurt_worker(self, fault: FaultBegins) -> None:
        """One worker of a node dies or hangs, if there are any."""
        agent = self._machines[fault.node].agent
        wants_shadow = fault.kind is FaultKind.SHADOW_CRASH
        own: list[NodeWorker] = [
            each
            for each in (agent.workers.values() if agent is not None else ())
            if each.process is not None and (each.order.replica is not None) is wants_shadow
        ]
        if not own:
            return
        worker = own[fault.detail % len(own)]
        hurt = cast(SimulatedProcess, worker.process)
        if fault.kind is FaultKind.HANG:
            hurt.is_hung = True
            self.met[f"hang, {worker.phase}"] += 1
        else:
            hurt.die()

    def _leave_clients(self, fault: FaultBegins) -> None:
        """Some clients leave; the requests of some have just ended."""
        ids = list(self._opened.by_id)
        latest = range(max(0, self._opened.last - 2), self._opened.last + 1)
        for id in sorted({*ids[fault.detail % 7 :: 3][:5], *latest}):
            self._tell(Cancelled(RequestId(id)))

    def _tell(self, event: Event, after_ns: int = 0) -> None:
        """Tell the core what does not come from its backend."""
        self.push(self.clock.now_ns + after_ns, Reported(event, None))

    def _lose_edge(self, fault: FaultBegins) -> None:
        """An edge dies, or hangs for so long that the driver kills it."""
        if fault.kind is FaultKind.EDGE_DOWN:
            self.push(self.clock.now_ns, EdgeClosed(fault.detail))
        elif fault.span_ns > EDGE_HUNG_NS:
            self.push(self.clock.now_ns + EDGE_HUNG_NS, EdgeClosed(fault.detail))

    def _wake_core(self, fault: FaultBegins) -> None:
        for index in range(5):
            self._tell(WOKE, ms(index * (fault.detail % 50)))

    def _fault_ends(self, event: FaultEnds) -> None:
        fault = event.begun
        if fault.kind is FaultKind.CORE_DOWN:
            self._begin_core()
            return
        if self._healed:
            return
        kind, name = fault.kind, fault.node
        if kind in (FaultKind.NODE_DOWN, FaultKind.CUT):
            machine = self._machines[name]
            cuts = max(0, machine.cuts - (kind is FaultKind.CUT))
            self._mend(machine, cuts, max(0, machine.downs - (kind is FaultKind.NODE_DOWN)))
        elif kind is FaultKind.SLOW_LINK:
            self._machines[name].delay_ns -= ms(5 * (1 + hashed(fault.detail)))
        elif (kind, name) in self._active:
            self._active[kind, name] -= 1 + fault.detail % 5

    def _mend(self, machine: Machine, cuts: int, downs: int) -> None:
        """Fewer faults act on a node: perhaps it is there again."""
        was_reachable, was_down = machine.is_reachable, machine.downs
        machine.cuts, machine.downs = cuts, downs
        if machine.is_reachable and not was_reachable:
            machine.become_reachable()
        if was_down and not downs:
            self.push(self.clock.now_ns + PROVIDER_NS, AgentStarts(machine.node.name))

    def _heal(self, event: AllHealed) -> None:
        """No more faults. Hung workers stay as they are: the core has to find them."""
        self._healed = True
        self._active.clear()
        for machine in self._machines.values():
            machine.delay_ns = machine.usual_ns
            self._mend(machine, 0, 0)

    def _edge_closed(self, event: EdgeClosed) -> None:
        """Its open requests are cancelled."""
        edge_of = self._opened.edge_of
        for id in self._opened.by_id:
            if edge_of[id] == event.edge:
                self._tell(Cancelled(id))

    def close(self) -> None:
        """What the operating system does when all ends: give back the memory of processes."""
        for machine in self._machines.values():
            machine.kill_agent()


BEGINNINGS: Final[dict[FaultKind, Any]] = {
    FaultKind.NODE_DOWN: RemoteCluster._cut_off,
    FaultKind.CUT: RemoteCluster._cut_off,
    FaultKind.SLOW_LINK: RemoteCluster._slow_down,
    FaultKind.CRASH: RemoteCluster._hurt_worker,
    FaultKind.HANG: RemoteCluster._hurt_worker,
    FaultKind.SHADOW_CRASH: RemoteCluster._hurt_worker,
    FaultKind.CANCEL: RemoteCluster._leave_clients,
    FaultKind.EDGE_DOWN: RemoteCluster._lose_edge,
    FaultKind.EDGE_HANG: RemoteCluster._lose_edge,
    FaultKind.STRAY_WAKES: RemoteCluster._wake_core,
}
"""How faults begin that are more than a state for a while."""

STEPS: Final[dict[type, Any]] = {
    FaultBegins: RemoteCluster._fault_begins,
    FaultEnds: RemoteCluster._fault_ends,
    AllHealed: RemoteCluster._heal,
    LinkSilent: RemoteCluster._silent,
    Accepted: RemoteCluster._accepted,
    AgentStarts: RemoteCluster._agent_starts,
    MachineGoes: RemoteCluster._machine_goes,
    CoreBegun: RemoteCluster._core_begins,
    EdgeClosed: RemoteCluster._edge_closed,
}
"""What happens at each entry of the heap but the most frequent ones."""
