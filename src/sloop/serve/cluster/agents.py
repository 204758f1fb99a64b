"""Runs replicas on other machines, through the agent of each node (`sloop.serve.cluster.agent`).

Agents connect to this process. Orders and reports travel over that connection and arrive in the order in which they
were sent. A `NodeProvider` starts the agents: Ray (`sloop.serve.cluster.ray`).

When the connection of an agent ends or is silent, its node is lost: the node is reported first, then each of its
replicas. Later messages of that connection are ignored. The agent keeps its workers and connects again. This process
has counted them as lost, so the agent stops them before the node is ready, and no core is assigned twice. Workers that
the agent has kept from another deciding process, which has died, are offered to the core with the node (`KeptWorker`)
if they run the same stage, variant and model as a worker of this process would.

Replicas may start as the parts of one model, on several nodes (`sloop.serve.node.pipelines`). This process has cut
the model, and sends blocks to agents that can get them from no other agent. It tells the agents which parts follow
each other, gives batches to the first part, and hears of them from the last one.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from asyncio import TimerHandle
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, singledispatchmethod
from math import ceil
from pathlib import Path
from typing import Any, Final, Protocol, get_args, get_origin

import msgspec
from msgspec import Struct, structs

from sloop import __version__, actions, events
from sloop.errors import MachineError
from sloop.profile.onnx_cut import data_file
from sloop.serve.blocks import FarBlocks
from sloop.serve.cluster.agent import (
    AgentHello,
    AgentSetup,
    FromAgent,
    LearnStages,
    NodeEvent,
    NodeOrder,
    WorkerReport,
    WorkersKept,
)
from sloop.serve.dataflow import StageWiring
from sloop.serve.messages import (
    BatchFinished,
    BatchRaised,
    Close,
    CompleteWorker,
    ConnectParts,
    Free,
    Holders,
    Reached,
    Report,
    Run,
    RunBatch,
    WorkerDiffers,
)
from sloop.serve.network import (
    RECORDS_BYTES_MAX,
    ArenaHolder,
    BlockServer,
    Endpoint,
    HolderTable,
    NetworkLink,
    NodeListener,
    NodeTls,
    Purpose,
    machine,
)
from sloop.serve.node.known import KnownStages, blocks_of, sources_of
from sloop.serve.node.pipelines import ProcessPipeline, check_part, joined
from sloop.serve.protocols import Servable, SpareProcesses
from sloop.serve.transport import ProtocolError, RecordLink
from sloop.serve.weights.peers import FileServer, KnownFile
from sloop.serve.weights.sources import CONTENT, ModelSource
from sloop.serve.worker import STEPS
from sloop.shared_memory import Address, ArenaReader, Arenas
from sloop.text import counted
from sloop.user_code import ModelFailure
from sloop.vocabulary import (
    STORE,
    BatchId,
    ModelWeights,
    Node,
    ReplicaId,
    ReplicaSpec,
    TransferId,
    WorkerId,
)

JOIN_S_MAX: Final = 120.0
"""Seconds within which the agents of all nodes must connect when the server starts."""
REJOIN_S_MAX: Final = 3.0
"""Seconds for which a new server waits for the agents of one that has died. They notice the death within `SILENT_S`,
and try to connect twice a second. Replicas that are started before all have connected may be superfluous. A node whose
agent has not connected by then is lost."""
STOP_S_MAX: Final = 30.0
"""Seconds within which an agent must have stopped the workers that are not kept."""
WORKERS_MAX: Final = 10**9
"""A server numbers its workers from a multiple of this on; it never starts so many."""
KEPT_MAX: Final = 10_000
"""If an agent reports more kept workers than this, none is adopted."""
ACQUIRE_S_MAX: Final = 600.0
"""Seconds within which the agent of a node on demand must connect."""
CLOSE_S_MAX: Final = 5.0
"""Seconds within which agents must stop their workers at the end."""
HELLO_S_MAX: Final = 5.0
"""Seconds within which an agent must introduce itself."""
LEAVE_S_MAX: Final = 5.0
"""Seconds within which an agent that was ordered to end, or rejected, must close its connection."""
PEERS_MAX: Final = 3
"""How many agents are named to an agent, to be asked for a model before the store."""
CHAIN_PEERS_MAX: Final = 8
"""The same in an ordered chain. There are more, so that an agent stays in the chain if several agents before it die."""
TEXT_CHARS_MAX: Final = 100_000
"""Of what an agent says about a failure."""
A_BUG: Final = "report this with the log of the agent, which connects again"
"""What to do about an agent that says what none should."""

IGNORING: Final = {get_origin(kind) or kind: lambda record: None for kind in get_args(FromAgent)}
"""The acts for an agent whose connection is to end: what it still sends is ignored."""

_log: Final = logging.getLogger("sloop.backend")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How the server reaches the machines of its cluster, which Ray provides."""

    ray_address: str
    """The address of Ray's cluster, `auto` for the one that runs here, empty to start one."""
    port: int = 0
    """Where agents connect; with 0, a free one, at which no other server can take the place of this one."""
    tls: NodeTls | None = None
    """How machines check each other; None: connections between them are not encrypted."""


class NodeProvider(Protocol):
    """Provides machines for nodes, and an agent on each."""

    async def host(self) -> str:
        """The address of this machine for the others. Called first. Raises `MachineError` if there is no cluster."""
        ...

    def want(self, nodes: Iterable[Node], join: Endpoint, token: bytes) -> None:
        """Have agents on these nodes, which connect to `join`, and on no others: the agents of those that are not named
        any more were told to end."""
        ...

    async def close(self) -> None:
        """Give back everything."""
        ...


class _ConnectedAgent:
    """An agent, from its greeting to the end of its connection."""

    def __init__(self, hello: AgentHello, holder: int, records: RecordLink) -> None:
        self.hello, self.holder, self.records = hello, holder, records
        self.blocks = FarBlocks(holder, lambda block: records.send(Free(block)))
        """Its blocks that are in use."""
        self.keep: tuple[WorkerId, ...] = ()
        """The workers that it was told to keep."""
        self.kept: dict[WorkerId, events.KeptWorker] = {}
        """Those that it has kept, until they are adopted."""
        self.spares = SpareProcesses()
        """Its workers that wait for a model."""
        self.has_joined = False
        """Whether its node may be used: all workers have stopped that are not kept."""
        self.timer: TimerHandle | None = None
        """Until then."""
        self.receiving: set[TransferId] = set()
        """The transfers that it was ordered to receive and has not reported on."""
        self.given_up: set[TransferId] = set()
        """Those that were cancelled meanwhile."""


class _PlacedWorker(Struct):
    """A worker, and where it is."""

    order: actions.StartWorker
    agent: _ConnectedAgent
    batch: BatchId | None = None
    """The batch that it runs, with its visits and its begin (`time.monotonic_ns`)."""
    visits: int = 0
    began_ns: int = 0
    pipeline: ProcessPipeline | None = None
    """If it starts as a part of a model, the pipeline in which it serves."""
    shadows: list[WorkerId] = []  # msgspec creates a new list for each instance
    """Those that were started beside it."""

    @property
    def replica(self) -> ReplicaId:
        """Its number."""
        return self.order.worker

    @property
    def spec(self) -> ReplicaSpec:
        """As it was started."""
        return self.order.spec


class Legacy(Struct):
    """What a server leaves to the one that takes its place."""

    token: str
    """Of the deployment, which agents must know."""
    first_worker: int = 0
    """The number of its first worker."""
    nodes: list[str] = []  # msgspec creates a new list for each instance
    """Those that have an agent. While there are any, a server is running, or has died without an end."""


class NodeMemory:
    """A file of the `Legacy`. Without a path, nothing is kept, and the token is a new one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        former = self._read() or Legacy(secrets.token_hex(32), -WORKERS_MAX)
        self.first_worker = former.first_worker + WORKERS_MAX
        """The number of this server's first worker: no other server of the deployment has given it, or a higher one."""
        self.token = former.token.encode()
        """What agents must know."""
        self.nodes = former.nodes
        """The nodes of the earlier server, if it has died."""
        self._written: list[str] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether another server will find it."""
        return self._path is not None

    def _read(self) -> Legacy | None:
        try:
            return None if self._path is None else msgspec.json.decode(self._path.read_bytes(), type=Legacy)
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, nodes: list[str]) -> None:
        """These have an agent now. A file that cannot be written is no reason to serve less."""
        if self._path is None or nodes == self._written:
            return
        self._written = nodes
        temporary = self._path.with_suffix(".new")
        try:
            temporary.touch(0o600)
            temporary.write_bytes(msgspec.json.encode(Legacy(self.token.decode(), self.first_worker, nodes)))
            temporary.replace(self._path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error.strerror)


class AgentBackend(KnownStages):
    """Runs replicas on `nodes` (`sloop.serve.protocols.Backend`). Create it inside the running event loop.

    `arenas` are those of this process, which also frees blocks of agents through them. Agents connect to `port`, and
    `holders` then has them. `memory` is for the server that takes the place of this one if it dies. A simulation has a
    network and a clock of its own (`listen`, `clock_ns`).
    """

    def __init__(  # noqa: PLR0913  # what stands between a core and machines
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        provider: NodeProvider,
        *,
        arenas: Arenas,
        nodes: Iterable[Node],
        port: int = 0,
        pid: int,
        memory: NodeMemory,
        tls: NodeTls | None = None,
        threads_prepared: int = 0,
        join_s_max: float = JOIN_S_MAX,
        holders: HolderTable | None = None,
        listen: Callable[..., Awaitable[NodeListener]] = NodeListener.listen,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(servables, wirings, threads_prepared)
        self._name = secrets.token_hex(8)
        """Of this deciding process: no other one has it, not even with the same files."""
        self._memory = memory
        self._provider, self._arenas, self._pid = provider, arenas, pid
        self._listen, self._clock_ns = listen, clock_ns
        self._nodes = {node.name: node for node in nodes}
        self._wanted = {name for name, node in self._nodes.items() if not node.on_demand}
        self._join_at: Endpoint = ("", port)
        self._tls, self._join_s_max = tls, join_s_max
        self._loop = asyncio.get_running_loop()
        self._server: NodeListener | None = None
        self._agents: dict[str, _ConnectedAgent] = {}
        """By node."""
        self._joined = asyncio.Event()
        self._left = asyncio.Event()
        self._acquiring: dict[str, asyncio.TimerHandle] = {}
        self._workers: dict[ReplicaId, _PlacedWorker] = {}
        self._pipelines: dict[WorkerId, ProcessPipeline] = {}
        """Those of which not all parts have been ordered."""
        self._receivers: dict[str, list[_ConnectedAgent]] = {}
        """By source, the agents that were told to fetch a model, in this order."""
        self._holders = holders or HolderTable()
        self._holders.on_change.append(self._tell_holders)
        self._blocks = BlockServer(ArenaReader({0: pid}).read)
        self._files = FileServer(lambda: (), self._file_of_block)
        self._cut_files: dict[str, tuple[str, str]] = {}
        """By key of a block's source, its file and the checksum of its weights."""
        self._note_cuts()
        self._has_begun = self._is_left = False
        self._acts: dict[type, Callable[[_ConnectedAgent, Any], None]] = {
            WorkersKept: self._on_kept,
            Report: self._on_reported,
            BatchFinished: self._on_finished,
            Reached: self._on_drained,
            BatchRaised: self._on_raised,
            WorkerDiffers: self._on_differs,
            SpareProcesses: self._on_spares,
        }

    @property
    def port(self) -> int:
        """Where agents connect."""
        assert self._server is not None
        return self._server.port

    async def open(self) -> None:
        host, context = await self._provider.host(), self._tls.server_context() if self._tls is not None else None
        where = host, self._join_at[1]
        self._server = await self._listen(where, self._memory.token, self._on_connection, context)
        self._join_at = host, self.port
        expected = [self._nodes[name] for name in self._nodes if name in self._wanted]
        self._want()
        former = [self._nodes[name] for name in self._memory.nodes if name in self._nodes]
        if former:
            _log.warning("an earlier server has died; waiting for its agents for %g s", REJOIN_S_MAX)
            await self._until_joined({node.name for node in (*expected, *former)}, REJOIN_S_MAX)
        elif missing := await self._until_joined({node.name for node in expected}, self._join_s_max):
            raise MachineError(
                f"no agent of {', '.join(missing)} has connected within {self._join_s_max:g} s",
                help="does Ray have these nodes (`ray status`), and can they reach this server's port?",
            )
        self._begin()

    async def _until_joined(self, names: Container[str], within_s: float) -> list[str]:
        """Wait until all these nodes have joined; returns those that have not."""

        def missing() -> list[str]:
            return [name for name in self._nodes if name in names and not self._has_joined(name)]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while missing():
                    self._joined.clear()
                    await self._joined.wait()
        return missing()

    def _begin(self) -> None:
        """The core is about to make its first plan: say what is not as it expects. It expects that all nodes are there
        that are not on demand, and that nothing runs on them."""
        self._has_begun = True
        for name, node in self._nodes.items():
            agent = self._agents.get(name)
            if agent is not None and agent.has_joined:
                if agent.kept or self._weights_on(agent):
                    self._report(events.NodeReady(node, tuple(agent.kept.values()), self._weights_on(agent)))
            elif not node.on_demand:
                self._report(events.NodeLost(name, "its agent has not connected"))
        self._remember()

    def _has_joined(self, name: str) -> bool:
        agent = self._agents.get(name)
        return agent is not None and agent.has_joined

    def _remember(self) -> None:
        """Note which nodes have joined."""
        if self._has_begun and self._listener is not None:
            self._memory.write([name for name in self._nodes if self._has_joined(name)])

    def learn(
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None:
        super().learn(servables, wirings, threads_prepared=threads_prepared)
        self._note_cuts()
        for agent in self._agents.values():
            self._teach(agent)

    def forget(self, stages: Iterable[str]) -> None:
        ended = sorted(stages)
        super().forget(ended)
        for agent in self._agents.values():
            self._teach(agent)

    def spare_processes(self) -> dict[str, SpareProcesses]:
        return {name: agent.spares for name, agent in self._agents.items() if agent.has_joined}

    def _note_cuts(self) -> None:
        """Blocks of models that agents may ask for."""
        for servable in self._servables.values():
            for block in servable.cut.blocks if servable.cut is not None else ():
                if block.source:
                    self._cut_files[ModelSource.of(block.source).key] = block.source, block.weights_sha256

    def _file_of_block(self, key: str, name: str) -> KnownFile | None:
        """The file of a block that was cut here, or the one with its weights."""
        text, weights_sha256 = self._cut_files.get(key, ("", ""))
        if not text:
            return None
        source = ModelSource.of(text)
        file = Path(source.location)
        checksums = {file.name: source.sha256, data_file(file).name: weights_sha256}
        path = file.with_name(name)
        if not checksums.get(name) or not path.is_file():
            return None
        return KnownFile(path, f"{CONTENT}{checksums[name]}", path.stat().st_size)

    # Nodes

    def _want(self) -> None:
        """Tell the provider which nodes are to have an agent."""
        wanted = [self._nodes[name] for name in self._nodes if name in self._wanted]
        self._provider.want(wanted, self._join_at, self._memory.token)

    @singledispatchmethod
    def order(self, order: actions.Order) -> None:
        """See `Backend`. The method for each type of order is registered for it."""
        raise TypeError(f"no order to a node: {order}")

    @order.register
    def _acquire(self, order: actions.AcquireNode) -> None:
        node = order.node
        self._wanted.add(node)
        self._want()
        if self._has_joined(node):  # an earlier server has acquired it
            self._report(events.NodeReady(self._nodes[node], (), self._weights_on(self._agents[node])))
        else:
            self._acquiring[node] = self._loop.call_later(ACQUIRE_S_MAX, self._fail_acquiring, node)

    @order.register
    def _release(self, order: actions.ReleaseNode) -> None:
        node = order.node
        self._cancel_acquiring(node)
        agent = self._agents.get(node)
        if agent is not None:
            agent.records.send(Close())
            self._forget_agent(agent)
        self._wanted.discard(node)
        self._want()
        self._report(events.NodeReleased(node))

    def _fail_acquiring(self, node: str) -> None:
        del self._acquiring[node]
        self._report(events.NodeLost(node, "it did not come"))

    def _cancel_acquiring(self, node: str) -> None:
        timer = self._acquiring.pop(node, None)
        if timer is not None:
            timer.cancel()

    # Replicas

    @order.register
    def _transfer(self, order: actions.Transfer) -> None:
        servable = self._sent_by(order)
        sources = [] if servable is None else sources_of(servable, order.weights.layers)
        if servable is None or not sources:
            for name in order.receivers:
                self._report(events.TransferFailed(order.transfer, name, f"{order.weights.name} comes from no store"))
            return
        source = self._agents.get(order.source) if order.source != STORE else None
        before = [] if source is None else [source.hello.endpoint]
        chain = self._receivers.setdefault(sources_of(servable)[0], [])
        parts = self._parts_with(servable, order.completes)
        for name in order.receivers:
            agent = self._agents.get(name)
            if agent is None or not agent.has_joined:
                continue  # the core hears, or has heard, of its loss
            agent.receiving.add(order.transfer)
            own, nearest = agent.hello.endpoint, before[::-1][:CHAIN_PEERS_MAX]
            peers = {each: [part for part in parts.get(each, ()) if part != own] + nearest for each in sources}
            agent.records.send(NodeOrder(order, peers))
            before.append(own)
            if agent not in chain:
                chain.append(agent)

    def _sent_by(self, order: actions.Transfer) -> Servable | None:
        """The model whose weights a transfer brings; None if it is not known. A new version of an application may have
        another model of the same name: the parts to be completed say which one it is, otherwise it is the newest."""
        completed = [self._workers[replica] for replica in order.completes if replica in self._workers]
        found = [self.servable(each.spec.stage, each.spec.variant) for each in completed[:1]]
        return found[0] if found else next(iter(self.with_weights(order.weights)), None)

    def _parts_with(self, servable: Servable, completes: Iterable[ReplicaId]) -> dict[str, list[Endpoint]]:
        """By source of a block, the agents of those parts of these replicas' pipeline that have started with it, and so
        have all of it."""
        found: dict[str, list[Endpoint]] = {}
        own = [each.pipeline for id in completes if (each := self._workers.get(id)) is not None]
        if not own or own[0] is None:
            return found
        for member in own[0].members.values():
            placed = self._workers.get(member)
            if placed is not None and placed.order.part is not None:
                for source in sources_of(servable, placed.order.part.span):
                    found.setdefault(source, []).append(placed.agent.hello.endpoint)
        return found

    @order.register
    def _cancel_transfer(self, order: actions.CancelTransfer) -> None:
        agent = self._agents.get(order.node)
        if agent is not None and order.transfer in agent.receiving:
            agent.receiving.discard(order.transfer)
            agent.given_up.add(order.transfer)
            agent.records.send(NodeOrder(order))

    @order.register
    def _evict(self, order: actions.Evict) -> None:
        agent = self._agents.get(order.node)
        if agent is not None:
            agent.records.send(NodeOrder(order))

    def _weights_on(self, agent: _ConnectedAgent) -> tuple[ModelWeights, ...]:
        """What the core calls the models that an agent had when it connected."""
        there = set(agent.hello.models)
        found = dict[ModelWeights, None]()
        for servable in self._servables.values():
            sources = [ModelSource.of(source) for source in sources_of(servable)]
            if sources and all((source.key, source.sha256) in there for source in sources):
                found |= dict.fromkeys(servable.weights)
        return tuple(found)

    @order.register
    def _start(self, order: actions.StartWorker) -> None:
        if order.replica is not None:
            body = self._workers.get(order.replica)
            if body is not None:  # else its loss, which has been reported, is that of its shadow
                body.shadows.append(order.worker)
                self._workers[order.worker] = _PlacedWorker(order, body.agent)
                body.agent.records.send(NodeOrder(order))
            return
        replica, spec, pipeline = order.worker, order.spec, None
        if order.pipeline is not None:
            try:
                check_part(order, len(blocks_of(self.servable(spec.stage, spec.variant), spec).blocks))
            except MachineError as error:
                self._report(events.WorkerLost(replica, str(error)))
                return
            pipeline = joined(self._pipelines, order, self)
        agent = self._agents.get(spec.node or "")
        if agent is None or not agent.has_joined:
            if pipeline is not None:
                pipeline.lose(order.place)
            self._report(events.WorkerLost(replica, f"node {spec.node} is not connected"))
            return
        self._workers[replica] = placed = _PlacedWorker(order, agent, pipeline=pipeline)
        agent.records.send(NodeOrder(order, self._peers_of(placed)))

    @order.register
    def _adopt(self, order: actions.AdoptWorker) -> None:
        agent = self._agents.get(order.spec.node or "")
        if agent is None or agent.kept.pop(order.worker, None) is None:
            self._report(events.WorkerLost(order.worker, f"node {order.spec.node} is not connected any more"))
            return
        self._workers[order.worker] = _PlacedWorker(actions.StartWorker(order.worker, order.spec), agent)
        agent.records.send(NodeOrder(order))

    @order.register
    def _stop(self, order: actions.StopWorker) -> None:
        placed = self._workers.get(order.worker)
        if placed is not None:
            placed.agent.records.send(NodeOrder(order))
        else:
            self._report(events.WorkerStopped(order.worker))

    @order.register
    def _resize(self, order: actions.ResizeWorker) -> None:
        placed = self._workers.get(order.worker)
        if placed is not None:  # else its loss has been reported
            placed.agent.records.send(NodeOrder(order))

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        placed = self._workers.get(replica)
        if placed is not None:  # else its loss has been reported, which covers its batch
            placed.batch, placed.visits, placed.began_ns = batch, order.visits, self._clock_ns()
            if placed.pipeline is None or not placed.pipeline.takes(placed.order.place, batch, order):
                placed.agent.records.send(RunBatch(batch, replica, order))

    async def leave(self) -> None:
        """Another server is to take the place of this one: let its agents keep their replicas, if such a server can
        reach them."""
        if not self._memory.is_kept or self._server is None:
            return
        await self._server.close()
        self._detach()
        self._is_left = True
        for agent in list(self._agents.values()):
            agent.records.close()
            self._forget_agent(agent)

    async def close(self) -> None:
        if self._has_begun and not self._is_left:
            self._memory.write([])
        self._detach()
        for timer in self._acquiring.values():
            timer.cancel()
        for agent in self._agents.values():
            agent.records.send(Close())
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                while self._agents:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            _log.warning("agents have not ended: %s", ", ".join(self._agents))
        if self._server is not None:
            await self._server.close()
        self._blocks.close()
        self._files.close()
        for agent in list(self._agents.values()):
            agent.records.close()
        if not self._is_left:
            await self._provider.close()

    def _peers_of(self, placed: _PlacedWorker) -> dict[str, list[Endpoint]]:
        """By source, the agents from which a replica's agent may get its model: those that were ordered to fetch it
        before, the latest first. So agents that are ordered at the same time form a chain."""
        servable, agent = self.servable(placed.spec.stage, placed.spec.variant), placed.agent
        sources = [] if servable is None else sources_of(servable)
        if not sources or agent.hello.machine == machine():
            return {}
        chain = self._receivers.setdefault(sources[0], [])
        if agent not in chain:
            chain.append(agent)
        before = chain[: chain.index(agent)]
        return {source: [each.hello.endpoint for each in reversed(before[-PEERS_MAX:])] for source in sources}

    def _remove(self, replica: ReplicaId) -> None:
        """A replica has ended."""
        placed = self._workers.pop(replica, None)
        if placed is not None:
            for shadow in placed.shadows:
                self._workers.pop(shadow, None)
            if placed.pipeline is not None:
                placed.pipeline.lose(placed.order.place)

    # Pipelines

    def connect_parts(self, before: ReplicaId, after: ReplicaId) -> None:
        """See `PipelineOrders`."""
        agent, other = self._workers[before].agent, self._workers[after].agent
        endpoint = agent.hello.endpoint if agent is not other else None
        for each in dict.fromkeys((agent, other)):
            each.records.send(ConnectParts(before, after, endpoint))

    def run_part(self, replica: ReplicaId, batch: BatchId, order: Run) -> None:
        """See `PipelineOrders`."""
        placed = self._workers.get(replica)
        if placed is not None:  # else its loss has been or will be noticed
            placed.agent.records.send(RunBatch(batch, replica, order, is_part=True))

    def complete_part(self, replica: ReplicaId) -> None:
        """See `PipelineOrders`. If the other layers must be fetched, the core orders the transfer."""
        placed = self._workers.get(replica)
        if placed is not None and placed.order.transfer is None:
            placed.agent.records.send(CompleteWorker(replica))

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        """See `PipelineOrders`."""
        placed = self._workers.get(replica)
        if placed is not None and placed.batch == batch:
            placed.batch = None
            self._report(events.BatchLost(batch, replica, why))

    # Agents

    def _on_connection(self, link: NetworkLink) -> None:
        """A process that knows the token has connected."""
        if link.purpose is Purpose.BLOCKS:
            self._blocks.accept(link)
            return
        if link.purpose is Purpose.WEIGHTS:
            self._files.accept(link)
            return
        agent: _ConnectedAgent | None = None

        def welcome(hello: AgentHello) -> None:
            nonlocal agent
            timer.cancel()
            agent = self._welcome(hello, records)

        def on_end(why: str) -> None:
            timer.cancel()
            if agent is not None:
                self._on_end(agent, why)

        link.allow(RECORDS_BYTES_MAX)
        records = RecordLink(self._loop, link, FromAgent, {AgentHello: welcome}, on_end)
        timer = self._loop.call_later(HELLO_S_MAX, records.close)
        link.keep_alive()

    def _welcome(self, hello: AgentHello, records: RecordLink) -> _ConnectedAgent | None:
        """An agent introduces its node."""
        node = self._nodes.get(hello.name)
        records.acts = IGNORING
        why = self._objection(hello, node)
        if why:
            _log.error("the agent of %r (process %d) is sent away: %s", hello.name[:100], hello.pid, why)
            records.send(Close(why))
            self._loop.call_later(LEAVE_S_MAX, records.close)
            return None
        assert node is not None
        old = self._agents.get(hello.name)
        if old is not None:
            old.records.close()
            self._on_end(old, "its agent has connected again")
        agent = _ConnectedAgent(hello, self._holders.number(), records)
        self._agents[hello.name] = agent
        records.acts = {kind: partial(act, agent) for kind, act in self._acts.items()}
        self._arenas.add_holder(agent.holder, agent.blocks.free)
        if hello.server != self._name and len(hello.kept) <= KEPT_MAX:
            known, first = {self.fingerprint(*key) for key in self._servables} - {b""}, self._memory.first_worker
            agent.keep = tuple(worker for worker, does in hello.kept.items() if does in known and worker < first)
        records.send(AgentSetup(agent.holder, self._name, agent.keep, self._memory.is_kept))
        self._teach(agent)
        self._holders.add(ArenaHolder(agent.holder, hello.machine, hello.pid, hello.endpoint))
        if hello.server:
            agent.timer = self._loop.call_later(STOP_S_MAX, self._give_up, agent)
        else:
            self._join(agent)
        return agent

    def _give_up(self, agent: _ConnectedAgent) -> None:
        agent.records.close()
        self._on_end(agent, f"it has not stopped its former workers within {STOP_S_MAX:g} s")

    def _join(self, agent: _ConnectedAgent) -> None:
        """Nothing runs on an agent's node that is not kept."""
        name = agent.hello.name
        agent.has_joined = True
        self._joined.set()
        self._cancel_acquiring(name)
        kept = f", {counted(len(agent.kept), 'replica')} of an earlier server" if agent.kept else ""
        _log.info("the agent of %s has connected: %g cores%s", name, agent.hello.cores, kept)
        self._remember()
        if self._has_begun:
            self._report(events.NodeReady(self._nodes[name], tuple(agent.kept.values()), self._weights_on(agent)))

    def _objection(self, hello: AgentHello, node: Node | None) -> str:
        """Why an agent cannot serve; empty if it can."""
        if hello.version != __version__:
            return f"it runs sloop {hello.version[:100]}, this server {__version__}"
        if node is None:
            return f"no node of the cluster has this name; there are {', '.join(self._nodes)}"
        old = self._agents.get(hello.name)
        if old is not None and (old.hello.machine, old.hello.pid) != (hello.machine, hello.pid):
            return f"another agent has this name, at {old.hello.endpoint[0]} (process {old.hello.pid})"
        host, port = hello.endpoint
        if not (0 < len(host) <= 255 and 0 < port < 65536):
            return f"it sends blocks at {host[:255]!r}:{port}, which is no address"
        if not node.cores <= hello.cores:
            return f"the node has {node.cores:g} cores by the cluster's description, the machine {hello.cores:g}"
        return ""

    def _on_end(self, agent: _ConnectedAgent, why: str) -> None:
        """The connection of an agent has ended."""
        if self._agents.get(agent.hello.name) is not agent:
            return
        name = agent.hello.name
        # Of a node that has not joined, or before the core has begun, nothing is known that could be lost.
        is_known = agent.has_joined and self._has_begun and self._listener is not None
        self._forget_agent(agent)
        if is_known:
            _log.warning("node %s is lost: %s", name, why)
            self._report(events.NodeLost(name, why))
        for replica, placed in list(self._workers.items()):
            if placed.agent is agent and placed.order.replica is None:  # the end of a shadow is that of its replica
                self._remove(replica)
                self._report(events.WorkerLost(replica, f"node {name} is lost: {why}"))

    def _forget_agent(self, agent: _ConnectedAgent) -> None:
        if agent.timer is not None:
            agent.timer.cancel()
        del self._agents[agent.hello.name]
        agent.records.acts = IGNORING  # it is to end
        for chain in self._receivers.values():
            if agent in chain:
                chain.remove(agent)
        self._remember()
        self._arenas.remove_holder(agent.holder)
        self._loop.call_later(LEAVE_S_MAX, agent.records.close)
        self._holders.remove(agent.holder)
        self._left.set()

    def _teach(self, agent: _ConnectedAgent) -> None:
        servables = [(stage, variant, each) for (stage, variant), each in self._servables.items()]
        agent.records.send(LearnStages(servables, self._wirings, self._threads_prepared))

    def _tell_holders(self) -> None:
        """Tell agents who holds which arenas."""
        endpoints = self._holders.endpoints()
        beside = next(iter(self._holders.on(machine())), None)
        # Blocks of this machine's edges are sent by an agent beside them, else by this process.
        own = ("", self.port) if beside is None else endpoints[beside]
        for agent in self._agents.values():
            here = {0: self._pid} if agent.hello.machine == machine() else {}
            agent.records.send(Holders(here, {**endpoints, 0: own}))

    # What agents report. What no agent can have to say raises a `ProtocolError`, which ends its connection.

    def _on_kept(self, agent: _ConnectedAgent, record: WorkersKept) -> None:
        if agent.has_joined:
            raise ProtocolError("the agent says again which workers it has kept")
        name, taken = agent.hello.name, self._taken_over()
        for each in record.kept:
            spec = each.spec
            does, cores = agent.hello.kept.get(each.worker), max(1, ceil(self._nodes[name].cores))
            if each.worker not in agent.keep:
                raise ProtocolError(f"worker {each.worker} is kept, which is to be stopped")
            if each.worker in taken:
                raise ProtocolError(f"worker {each.worker} is kept twice")
            if does != self.fingerprint(spec.stage, spec.variant) or spec.node != name or not 0 < spec.cores <= cores:
                raise ProtocolError(f"worker {each.worker} of {name} is not what it was: {spec}")
            agent.kept[each.worker] = each
            taken.add(each.worker)
        if agent.timer is not None:
            agent.timer.cancel()
        self._join(agent)

    def _taken_over(self) -> set[WorkerId]:
        """The workers that are not to be kept once more."""
        return {*self._workers, *(worker for agent in self._agents.values() for worker in agent.kept)}

    def _on_reported(self, agent: _ConnectedAgent, record: Report[NodeEvent]) -> None:
        event = record.event
        if isinstance(event, events.Transferred | events.TransferFailed):
            self._on_transfer(agent, event)
            return
        id = event.replica if isinstance(event, events.BatchSilent) else event.worker
        placed = self._workers.get(id)
        if placed is None:
            return  # it was ordered to stop when it had ended already
        if placed.agent is not agent:
            raise ProtocolError(f"worker {id} is not on this node")
        if isinstance(event, events.WorkerLost):
            self._remove(event.worker)
            event = events.WorkerLost(event.worker, event.error[:TEXT_CHARS_MAX])
        elif isinstance(event, events.WorkerStopped):
            self._remove(event.worker)
        else:
            self._on_changed(agent, placed, event)
        self._report(event)
        if isinstance(event, events.WorkerReady) and placed.pipeline is not None:
            placed.pipeline.on_part_ready(placed.order.place)

    def _on_changed(self, agent: _ConnectedAgent, placed: _PlacedWorker, event: WorkerReport) -> None:
        """A worker that has not ended is another than before."""
        if placed.order.replica is not None and not isinstance(event, events.WorkerReady):
            raise ProtocolError(f"a shadow reports {type(event).__name__}")
        if isinstance(event, events.WorkerProgressed) and event.step not in STEPS:
            raise ProtocolError(f"{event.step[:100]!r} is no step of a start")
        if isinstance(event, events.WorkerCompleted):
            if placed.pipeline is None:
                raise ProtocolError(f"replica {event.worker} is no part of a model, and completes it")
            placed.pipeline.on_completed(placed.order.place)
        elif isinstance(event, events.WorkerResized):
            most = max(1, ceil(self._nodes[agent.hello.name].cores))
            if not 0 < event.cores <= most:
                raise ProtocolError(f"replica {event.worker} has {event.cores:g} cores on a node of {most}")

    def _on_transfer(self, agent: _ConnectedAgent, event: events.Transferred | events.TransferFailed) -> None:
        """What has become of a transfer."""
        if event.transfer in agent.given_up:
            agent.given_up.discard(event.transfer)  # its report crossed the order
            return
        if event.node != agent.hello.name:
            raise ProtocolError(f"transfer {event.transfer} is said to have come to {event.node[:100]!r}")
        if event.transfer not in agent.receiving:
            raise ProtocolError(f"transfer {event.transfer} does not run to this node")
        agent.receiving.discard(event.transfer)
        if isinstance(event, events.TransferFailed):
            _log.warning("the weights of transfer %d do not come to %s: %s", event.transfer, event.node, event.error)
            event = events.TransferFailed(event.transfer, event.node, event.error[:TEXT_CHARS_MAX])
        self._report(event)

    def _on_finished(self, agent: _ConnectedAgent, record: BatchFinished) -> None:
        event, blocks, faults = record.event, record.blocks, record.faults
        placed = self._ended(agent, event.batch, event.replica, is_done=True)
        if placed is None:
            for block in blocks:
                if isinstance(block, Address):
                    agent.blocks.hold(block)
                    self._arenas.free(block)
            return
        if len(blocks) != placed.visits or {at for at, block in enumerate(blocks) if block is None} != faults.keys():
            raise ProtocolError(f"{len(blocks)} blocks and {len(faults)} faults for {placed.visits} visits")
        _check_counts(event, placed.visits, self._wirings.get(placed.spec.stage))
        for block in blocks:
            if isinstance(block, Address):
                agent.blocks.hold(block)
        # A clock of the node that runs fast, or stands wrong, makes no batch longer than it can have been.
        service_ns = min(event.service_ns, self._clock_ns() - placed.began_ns)
        own = structs.replace(event, replica=placed.replica, service_ns=service_ns, faults=tuple(sorted(faults)))
        if self._listener is not None:
            texts = {at: why[:TEXT_CHARS_MAX] for at, why in faults.items()}
            self._listener.on_finished(own, blocks, texts)

    def _on_spares(self, agent: _ConnectedAgent, record: SpareProcesses) -> None:
        if min(record.count, record.memory_bytes) < 0:
            raise ProtocolError(f"an agent has {record}")
        agent.spares = record

    def _on_raised(self, agent: _ConnectedAgent, record: BatchRaised) -> None:
        placed = self._ended(agent, record.batch, record.replica)
        if placed is not None and self._listener is not None:
            failure = ModelFailure.decode(record.failure[:TEXT_CHARS_MAX])
            self._listener.on_failed(record.batch, placed.replica, failure)

    def _on_differs(self, agent: _ConnectedAgent, record: WorkerDiffers) -> None:
        placed = self._on_node(agent, record.replica)
        self.on_difference(placed.replica, placed.spec.stage, placed.spec.variant, record.why[:TEXT_CHARS_MAX])

    def _ended(
        self, agent: _ConnectedAgent, batch: BatchId, replica: ReplicaId, *, is_done: bool = False
    ) -> _PlacedWorker | None:
        """A batch is over, which must be the one that this replica runs, or be in its pipeline. Returns whose it is;
        None if nobody waits for it any more."""
        placed = self._on_node(agent, replica)
        if placed.pipeline is not None and placed.pipeline.has(batch):
            owner = placed.pipeline.answered(placed.order.place, batch, is_done=is_done)
            found = self._workers.get(owner) if owner is not None else None
            if found is None:
                return None
            placed = found
        if placed.batch != batch:
            raise ProtocolError(f"batch {batch} does not run on replica {replica} of this node")
        placed.batch = None
        return placed

    def _on_node(self, agent: _ConnectedAgent, replica: ReplicaId | None) -> _PlacedWorker:
        """A replica that an agent names. ProtocolError if it is not on its node."""
        placed = self._workers.get(replica) if replica is not None else None
        if placed is None or placed.agent is not agent:
            raise ProtocolError(f"replica {replica} is not on this node")
        return placed

    def _on_drained(self, agent: _ConnectedAgent, record: Reached) -> None:
        placed = self._on_node(agent, record.worker)
        if record.step != "drained":
            raise ProtocolError(f"replica {record.worker} is said to be {record.step}, and no event says so; {A_BUG}")
        if placed.pipeline is None:
            raise ProtocolError(f"replica {record.worker} is said to be drained, and is no part of a model; {A_BUG}")
        placed.pipeline.on_drained(placed.order.place)


def _check_counts(event: events.Finished, visits: int, wiring: StageWiring | None) -> None:
    """ProtocolError if the numbers that an agent reports for a batch of `visits` visits are impossible."""
    numbers = event.service_ns, event.passes, event.elements, event.padded
    if min(numbers) < 0:
        raise ProtocolError(f"a negative one among {numbers} ns, passes and elements")
    decisions, edges = (len(wiring.decisions), len(wiring.passed)) if wiring is not None else (0, 0)
    if len(event.edge_counts) not in (0, visits) or len(event.sizes) not in (0, visits):
        raise ProtocolError(f"{len(event.edge_counts)} counts and {len(event.sizes)} sizes for {visits} visits")
    for counts in event.edge_counts:
        if counts and (len(counts) != decisions or min(counts) < 0):
            raise ProtocolError(f"counts {counts} for {decisions} edges")
    for sizes in event.sizes:
        if sizes and (len(sizes) != edges or min(map(min, sizes)) < 0):
            raise ProtocolError(f"sizes {sizes} for {edges} edges")
