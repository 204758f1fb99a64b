"""The agent of a node: it runs the worker processes of one machine for a deciding process on another.

    sloop agent --join HOST:PORT --name NODE --token-file FILE

The agent connects to the deciding process, which then orders it to start, resize and stop workers and to run batches;
it does so with a `LocalBackend`, and passes the reports on. It takes no decisions.

Tensors of small requests travel within the orders. Large blocks stay where they were written: before a batch runs, the
agent fetches those that it reads from the agents of other machines into shared memory of its own, and it sends blocks
of its machine to whoever asks with the deployment's token (`sloop.serve.network`).

When the connection ends, or is silent, the deciding process counts the node as lost and may start its replicas
elsewhere. The agent therefore stops all its workers before it connects again. It never answers a client, so a node that
was cut off cannot answer a request twice.
"""

import asyncio
import contextlib
import gc
import logging
import os
import ssl
import sys
from asyncio import Task
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import Struct, structs

from sloop import __version__
from sloop.errors import MachineError, SloopError
from sloop.events import Event, Finished, ReplicaLost, ReplicaProgressed, ReplicaReady, ReplicaStopped, Resized
from sloop.serve.backends.local import LocalBackend
from sloop.serve.blocks import ARENA_BYTES, Block
from sloop.serve.cpu_quota import capacity_cores, detect
from sloop.serve.dataflow import GivenBlocks, StageWiring, addresses_in
from sloop.serve.messages import Run
from sloop.serve.network import (
    BlockClient,
    BlockLost,
    BlockServer,
    Endpoint,
    NetworkLink,
    NodeListener,
    NodeTls,
    Purpose,
    connect,
    machine,
)
from sloop.serve.processes import begin, return_large_memory
from sloop.serve.protocols import Servable
from sloop.serve.stderr import log_directly
from sloop.serve.stores import ModelSource
from sloop.serve.transport import ProtocolError, RecordLink
from sloop.serve.weights import MODELS_BYTES, WeightsCache, usual_folder
from sloop.shared_memory import Address, Arena, ArenaFull, ArenaReader, Arenas, RelayedArenas
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec

RETRY_S: Final = 0.5
"""Between two attempts to connect."""
GIVE_UP_S: Final = 60.0
"""An agent ends that has found no deciding process for so long."""

_log: Final = logging.getLogger("sloop.agent")


# From an agent to the deciding process


class AgentHello(Struct, frozen=True, array_like=True, tag=1):
    """An agent introduces its node."""

    name: str
    version: str
    """Of sloop; all machines run the same."""
    pid: int
    machine: str
    """See `sloop.serve.network.machine`."""
    endpoint: Endpoint
    """Where it sends blocks."""
    cores: float


class AgentReport(Struct, frozen=True, array_like=True, tag=2):
    """What has become of a replica."""

    event: ReplicaProgressed | ReplicaReady | ReplicaLost | ReplicaStopped | Resized


class BatchFinished(Struct, frozen=True, array_like=True, tag=3, gc=False):
    """A batch has finished; see `sloop.serve.protocols.BackendListener`."""

    batch: BatchId
    replica: ReplicaId
    service_ns: int
    blocks: list[Block | None]
    edge_counts: tuple[tuple[int, ...], ...] = ()
    faults: dict[int, str] = {}  # msgspec creates a new dict for each instance


class BatchRaised(Struct, frozen=True, array_like=True, tag=4, gc=False):
    """The model has failed on a batch."""

    batch: BatchId
    replica: ReplicaId
    failure: bytes
    """A `ModelFailure`, encoded."""


FromAgent = AgentHello | AgentReport | BatchFinished | BatchRaised


# From the deciding process to an agent


class AgentSetup(Struct, frozen=True, array_like=True, tag=1):
    """The agent's number among the processes that hold arenas, and those of its machine, by number with process id."""

    holder: int
    holders: dict[int, int]


class LearnStages(Struct, frozen=True, array_like=True, tag=2):
    """Models and stages whose replicas may be started."""

    servables: list[tuple[str, str, Servable]]
    """Stage, variant and model."""
    wirings: dict[str, StageWiring]
    threads_prepared: int


class ForgetStages(Struct, frozen=True, array_like=True, tag=3):
    """Stages of which nothing will be started again."""

    stages: list[str]


class StartWorker(Struct, frozen=True, array_like=True, tag=4):
    """Start a replica."""

    replica: ReplicaId
    spec: ReplicaSpec


class StopWorker(Struct, frozen=True, array_like=True, tag=5):
    """Stop a replica."""

    replica: ReplicaId


class ResizeWorker(Struct, frozen=True, array_like=True, tag=6):
    """Change the cores of a replica."""

    replica: ReplicaId
    cores: float


class RunBatch(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Run a batch."""

    batch: BatchId
    replica: ReplicaId
    order: Run


class FreeBlock(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """A block of a worker of this agent is no longer needed."""

    block: Address


class Endpoints(Struct, frozen=True, array_like=True, tag=9):
    """Who sends blocks, by their holders. An empty host is that of the deciding process."""

    by_holder: dict[int, Endpoint]
    edges: dict[int, int] = {}  # msgspec creates a new dict for each instance
    """Edges of the agent's machine that hold arenas, with their process ids."""


class CloseAgent(Struct, frozen=True, array_like=True, tag=10):
    """Stop all workers and end."""

    why: str = ""
    """Why the agent cannot serve; empty if it is over."""


ToAgent = (
    AgentSetup
    | LearnStages
    | ForgetStages
    | StartWorker
    | StopWorker
    | ResizeWorker
    | RunBatch
    | FreeBlock
    | Endpoints
    | CloseAgent
)


def replaced(blocks: Sequence[GivenBlocks], copies: Mapping[Address, Address]) -> list[GivenBlocks]:
    """The blocks, with copies in place of those that have one."""
    found: list[GivenBlocks] = []
    for each in blocks:
        if isinstance(each, Address):
            found.append(copies.get(each, each))
        elif isinstance(each, dict):
            found.append(
                {
                    part: copies.get(block, block) if isinstance(block, Address) else block
                    for part, block in each.items()
                }
            )
        else:
            found.append(each)
    return found


class AgentSession:
    """An agent from the `AgentSetup` that it gets to the end of its connection (`BackendListener` of its backend).
    `joined` is the host of the deciding process."""

    def __init__(
        self,
        setup: AgentSetup,
        send: Callable[[FromAgent], None],
        blocks: BlockClient,
        joined: str,
        make_cache: Callable[[], WeightsCache],
    ) -> None:
        self._send, self._blocks, self._joined = send, blocks, joined
        self._is_beside = 0 in setup.holders
        """Whether the deciding process is on this machine, with its files."""
        self._make_cache = make_cache
        self._cache: WeightsCache | None = None
        """Of the models that come from elsewhere; made when the first one does."""
        self._bringing: dict[ReplicaId, Task[None]] = {}
        """Replicas whose model is being fetched."""
        self._models: dict[ReplicaId, Path] = {}
        """The fetched models that replicas use."""
        self._holders = {**setup.holders, setup.holder: os.getpid()}
        self._arenas = Arenas(setup.holder)
        held = self._arenas.make(ARENA_BYTES, lambda _: None)
        self._arena = Arena(held.number, held.fd) if held is not None else None
        """For copies of blocks of other machines."""
        self._beside = RelayedArenas(setup.holder)
        """Of edges on this machine."""
        self._copies: dict[ReplicaId, list[Address]] = {}
        """That the batch of a replica reads."""
        self._fetching: dict[ReplicaId, Task[None]] = {}
        self._replicas: set[ReplicaId] = set()
        """That have not ended."""
        self._reader = ArenaReader(self._holders)
        limits = detect()
        _log.info("cores of replicas are limited by %s", limits.why)
        self._backend = LocalBackend({}, {}, limits.actuator, arenas=self._arenas, holders=self._holders)
        self._backend.attach(self)
        self._acts: dict[type, Callable[[Any], None]] = {
            LearnStages: self._learn,
            ForgetStages: lambda record: self._backend.forget(record.stages),
            StartWorker: self._start,
            StopWorker: self._stop,
            ResizeWorker: lambda record: self._backend.resize(record.replica, record.cores),
            RunBatch: self._run,
            FreeBlock: lambda record: self._arenas.free(record.block),
            Endpoints: self._set_endpoints,
        }

    def read(self, block: Address) -> memoryview:
        """The memory of a block of this machine. Raises `ValueError` if there is none."""
        return self._reader.read(block)

    def on_record(self, record: ToAgent) -> None:
        """Do what the deciding process says."""
        act = self._acts.get(type(record))
        if act is None:
            raise ProtocolError(f"an agent that was set up was sent a {type(record).__name__}")
        act(record)

    async def close(self) -> None:
        """Stop all workers without reports."""
        for fetching in (*self._fetching.values(), *self._bringing.values()):
            fetching.cancel()
        self._blocks.close()
        await self._backend.close()
        if self._cache is not None:
            await self._cache.close()
        self._beside.close()
        self._arenas.close()

    def _learn(self, record: LearnStages) -> None:
        servables = {(stage, variant): servable for stage, variant, servable in record.servables}
        self._backend.learn(servables, record.wirings, threads_prepared=record.threads_prepared)

    def _set_endpoints(self, record: Endpoints) -> None:
        others = {
            holder: (host or self._joined, port)
            for holder, (host, port) in record.by_holder.items()
            if holder not in self._holders
        }
        self._blocks.set_endpoints(others)
        self._beside.set_holders(record.edges)

    # Replicas

    def _start(self, record: StartWorker) -> None:
        self._replicas.add(record.replica)
        servable = self._backend.servable(record.spec.stage, record.spec.variant)
        if servable is not None and not self._is_beside and servable.source:
            self._bringing[record.replica] = asyncio.create_task(self._bring_and_start(record, servable))
        elif servable is not None and _is_missing(servable.model):
            fix = "put it where all nodes can read it under this path, or name it by URL"
            self.on_event(ReplicaLost(record.replica, f"{servable.model} is not on this node: {fix}"))
        else:
            self._backend.start(record.replica, record.spec)

    async def _bring_and_start(self, record: StartWorker, servable: Servable) -> None:
        """Have the model of a replica on this machine, then start it."""
        replica, spec = record.replica, record.spec
        self._send(AgentReport(ReplicaProgressed(replica, "fetching")))
        try:
            self._cache = self._cache or self._make_cache()
            model = await self._cache.fetch(ModelSource.of(servable.source), pin=True)
        except Exception as error:
            if not isinstance(error, SloopError):
                _log.exception("the model of replica %d cannot be fetched", replica)
            del self._bringing[replica]
            why = error.what if isinstance(error, SloopError) else f"its model cannot be fetched: {error}"
            self.on_event(ReplicaLost(replica, why))
            return
        del self._bringing[replica]
        self._models[replica] = model
        own = structs.replace(servable, model=str(model))
        self._backend.learn({(spec.stage, spec.variant): own}, {}, threads_prepared=0)
        self._backend.start(replica, spec)

    def _stop(self, record: StopWorker) -> None:
        bringing = self._bringing.pop(record.replica, None)
        if bringing is None:
            self._backend.stop(record.replica)
        else:
            bringing.cancel()
            self.on_event(ReplicaStopped(record.replica))

    def _release_model(self, replica: ReplicaId) -> None:
        model = self._models.pop(replica, None)
        if model is not None and self._cache is not None:
            self._cache.release(model)

    # Batches

    def _run(self, record: RunBatch) -> None:
        order = record.order
        if record.replica not in self._replicas:
            return  # its end has been reported, which covers its batch
        foreign = {block for block in addresses_in(order.blocks) if block.holder not in self._holders}
        if foreign:
            relayed = {block: own for block in foreign if (own := self._beside.relay(block)) is not None}
            order = Run(order.visits, replaced(order.blocks, relayed), order.parts)
            foreign.difference_update(relayed)
        if foreign:
            record = RunBatch(record.batch, record.replica, order)
            self._fetching[record.replica] = asyncio.create_task(self._fetch_and_run(record, foreign))
        else:
            self._backend.run(record.batch, record.replica, order)

    async def _fetch_and_run(self, record: RunBatch, foreign: Iterable[Address]) -> None:
        """Copy blocks of other machines, then run the batch that reads them."""
        copies: dict[Address, Address] = {}
        try:
            fetches = []
            for block in foreign:
                copies[block], memory = self._allocated(block.size)
                fetches.append(self._blocks.fetch(block, memory))
            results = await asyncio.gather(*fetches, return_exceptions=True)
            lost = next((each for each in results if isinstance(each, BaseException)), None)
            if lost is not None:
                raise lost
        except BaseException as error:
            self._free_copies(copies.values())
            if not isinstance(error, ArenaFull | BlockLost):
                raise
            self._fetching.pop(record.replica, None)
            failure = ModelFailure("its tensors could not be brought to the node that runs it", str(error))
            self._send(BatchRaised(record.batch, record.replica, failure.encode()))
            return
        del self._fetching[record.replica]
        self._copies[record.replica] = list(copies.values())
        order = Run(record.order.visits, replaced(record.order.blocks, copies), record.order.parts)
        self._backend.run(record.batch, record.replica, order)

    def _allocated(self, size: int) -> tuple[Address, memoryview]:
        if self._arena is None:
            raise ArenaFull("this machine has no memfd")
        return self._arena.allocate(size)

    def _drop_copies(self, replica: ReplicaId) -> None:
        """The batch of a replica is over."""
        fetching = self._fetching.pop(replica, None)
        if fetching is not None:
            fetching.cancel()  # which frees its copies when nothing is written into them any more
        self._free_copies(self._copies.pop(replica, ()))

    def _free_copies(self, copies: Iterable[Address]) -> None:
        for copy in copies:
            assert self._arena is not None
            self._arena.free(copy)

    # Reports of the backend

    def on_event(self, event: Event) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        assert isinstance(event, ReplicaProgressed | ReplicaReady | ReplicaLost | ReplicaStopped | Resized)
        if isinstance(event, ReplicaLost | ReplicaStopped):
            self._drop_copies(event.replica)
            self._release_model(event.replica)
            self._replicas.discard(event.replica)
        self._send(AgentReport(event))

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        self._drop_copies(event.replica)
        found = BatchFinished(
            event.batch, event.replica, event.service_ns, list(blocks), event.edge_counts, dict(faults)
        )
        self._send(found)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        self._drop_copies(replica)
        self._send(BatchRaised(batch, replica, failure.encode()))


def _is_missing(model: str) -> bool:
    """Whether a model is a file that is not there."""
    return not model.startswith("fake:") and not Path(model).exists()


def usual_cache() -> WeightsCache:
    """The cache of models of this machine."""
    return WeightsCache(usual_folder(), MODELS_BYTES)


class Agent:
    """Serves a deciding process at `join`, as the node `name`, until that says it is over."""

    def __init__(
        self,
        join: Endpoint,
        name: str,
        token: bytes,
        *,
        host: str = "",
        tls: NodeTls | None = None,
        make_cache: Callable[[], WeightsCache] = usual_cache,
    ) -> None:
        self._make_cache = make_cache
        self._join, self._name, self._token, self._host, self._tls = join, name, token, host, tls
        self._is_over, self._refused = False, ""

    async def serve(self) -> None:
        """Connect, serve, and connect again when the connection was lost. Raises `MachineError` if there is no deciding
        process for `GIVE_UP_S`, or if it sends this agent away."""
        loop = asyncio.get_running_loop()
        lost_s, is_trying = loop.time(), False
        while not self._is_over:
            try:
                context = self._tls.client_context() if self._tls is not None else None
                link = await connect(self._join, self._token, Purpose.AGENT, context=context)
            except MachineError as error:
                if loop.time() - lost_s > GIVE_UP_S:
                    raise
                if not is_trying:
                    _log.warning("%s; trying again for %g s", error.what, GIVE_UP_S)
                is_trying = True
                await asyncio.sleep(RETRY_S)
                continue
            why = await self._session(link, context)
            gc.collect()  # what was mapped of shared memory keeps its files open
            lost_s, is_trying = loop.time(), False
            if not self._is_over:
                _log.warning("the connection to the deciding process has ended: %s", why)
        if self._refused:
            raise MachineError(f"the deciding process sends this agent away: {self._refused}")

    async def _session(self, link: NetworkLink, context: ssl.SSLContext | None) -> str:
        """Serve over one connection; returns why it has ended. `context` is for connections to others."""
        ended = asyncio.get_running_loop().create_future()
        session: AgentSession | None = None

        def on_end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        def on_record(record: ToAgent) -> None:
            nonlocal session
            if isinstance(record, CloseAgent):
                self._is_over, self._refused = True, record.why
                on_end(record.why)
            elif isinstance(record, AgentSetup) and session is None:
                blocks = BlockClient(self._token, context)
                session = AgentSession(record, records.send, blocks, self._join[0], self._make_cache)
            elif session is not None and not ended.done():
                session.on_record(record)
            else:
                raise ProtocolError(f"an agent was sent a {type(record).__name__} before its setup")

        def read(block: Address) -> memoryview:
            if session is None:
                raise ValueError("this agent has no blocks yet")
            return session.read(block)

        records = RecordLink(asyncio.get_running_loop(), link, ToAgent, on_record, on_end)
        server = BlockServer(read)
        host = self._host or link.local_host
        own = self._tls.server_context() if self._tls is not None else None
        listener = await NodeListener.listen((host, 0), self._token, server.accept, own)
        try:
            link.keep_alive()
            where = (host, listener.port)
            records.send(AgentHello(self._name, __version__, os.getpid(), machine(), where, capacity_cores()))
            return str(await ended)
        finally:
            records.close()
            await listener.close()
            server.close()
            if session is not None:
                await session.close()
                session = None  # which the link refers to


async def serve_until_signal(agent: Agent, stop: asyncio.Event) -> None:
    """Serve until `stop` is set or the deciding process says that it is over."""
    serving, stopping = asyncio.create_task(agent.serve()), asyncio.create_task(stop.wait())
    done, pending = await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    for other in pending:
        other.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await other
    if serving in done:
        serving.result()


def main(arguments: Sequence[str]) -> None:
    """Entry point of an agent that another process keeps: the process id of that, where to connect to, the node's name
    and the address of this machine, then the paths of `NodeTls`, if there are; the token is read from stdin."""
    parent, host, port, name, own_host, *files = arguments
    tls = NodeTls(*map(Path, files)) if files else None
    begin(int(parent), ())
    log_directly()
    token = sys.stdin.buffer.read()
    return_large_memory()
    uvloop.run(Agent((host, int(port)), name, token, host=own_host, tls=tls).serve())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SloopError as error:
        sys.exit(str(error))
