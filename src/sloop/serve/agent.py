"""The agent of a node: it runs the worker processes of one machine for a deciding process on another.

Ray starts it (`sloop.serve.backends.ray`). It connects to the deciding process, which then orders it to start, resize
and stop workers and to run batches.
The agent executes these orders with a `LocalBackend` and sends the reports back. It takes no decisions.

Tensors of small requests travel within the orders. Large blocks stay where they were written: before a batch runs, the
agent fetches those that it reads from the agents of other machines into shared memory of its own, and it sends blocks
of its machine to whoever asks with the deployment's token (`sloop.serve.network`).

The agent fetches models from stores and from other agents (`sloop.serve.weights.peers`) into a cache of this machine.
It does so when a replica starts that needs one, or when the deciding process orders a transfer, for which replicas then
wait.
If the deciding process has cut a model, so that replicas can start as parts of it or have shadows, the agent fetches
its blocks one by one, from agents that have them or else from the deciding process.

In a pipeline, the deciding process tells the next worker where the tensors of a batch are. The agent of that worker
fetches them from the agent of the worker before, so tensors are sent once for each cut.

When the connection ends or is silent, there are two cases: the deciding process still runs, counts the node as lost and
may start its replicas elsewhere; or it has died, and another one takes its place. In both cases the agent keeps its
workers and connects again. If the same process answers, the agent stops all workers. If another process answers, it
says which workers it adopts, and the agent stops the others. Only then does the node count as joined. The running
batches of adopted workers are abandoned: nobody waits for their results. An agent never answers a client, so a node
that was cut off cannot answer a request twice.

A worker keeps its number for life, whichever deciding process it serves. The agent's memory has another number in
blocks for each of them; workers know it by the first.
"""

import asyncio
import gc
import logging
import os
import ssl
import sys
from asyncio import Task, TimerHandle
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop
from msgspec import Struct, structs

from sloop import __version__
from sloop.actions import AdoptWorker, CancelTransfer, Evict, ResizeWorker, StartWorker, StopWorker, Transfer
from sloop.errors import InputError, MachineError, SloopError
from sloop.events import (
    BatchSilent,
    Event,
    Finished,
    KeptWorker,
    TransferFailed,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.machine import capacity
from sloop.memory import return_large_memory
from sloop.serve.backends import KnownStages, sources_of
from sloop.serve.backends.local import LocalBackend, usual_spares_max
from sloop.serve.blocks import ARENA_BYTES, Block
from sloop.serve.copies import IN_CACHE, ModelCopy, collect, take
from sloop.serve.cpu_quota import detect
from sloop.serve.dataflow import GivenBlocks, StageWiring, addresses_in
from sloop.serve.messages import PassedBatch, Run
from sloop.serve.network import (
    FETCH_S_MAX,
    SILENT_S,
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
from sloop.serve.processes import begin
from sloop.serve.protocols import CutModel, Servable, SpareProcesses
from sloop.serve.stderr import log_directly
from sloop.serve.transport import ProtocolError, RecordLink
from sloop.serve.weights.cache import WeightsCache, usual_cache
from sloop.serve.weights.peers import FileServer, PeerStore, ServedStore
from sloop.serve.weights.sources import ModelSource, Store
from sloop.shared_memory import Address, Arena, ArenaFull, ArenaReader, Arenas, RelayedArenas
from sloop.user_code import ModelFailure
from sloop.vocabulary import ALONE, BatchId, ReplicaId, TransferId, Worker, WorkerId

RETRY_S: Final = 0.5
"""The time between two attempts to connect."""
GIVE_UP_S: Final = 60.0
"""An agent that has found no deciding process for this long ends, with its workers. A supervisor starts a process again
within seconds; Kubernetes waits 10 and 20 s after the first two failures."""
LINGER_S: Final = SILENT_S + FETCH_S_MAX
"""How long the blocks of a deciding process are kept after the connection to it has ended. Until edges of this machine
notice the end too and have copied the blocks, they may still be sending them."""
ABANDON_S_MAX: Final = 30.0
"""A worker that has not finished its batch this long after the connection has ended is stopped, because it may hang."""

RECEPTIONS_MAX: Final = 1_000
"""How many ordered transfers an agent remembers, because replicas may be ordered to wait for one that has just
ended."""
MODELS_MAX: Final = 1_000
"""How many models of its cache an agent names when it joins."""

T = TypeVar("T")
WorkerReport = (
    BatchSilent | WorkerProgressed | WorkerReady | WorkerCompleted | WorkerLost | WorkerStopped | WorkerResized
)
"""The events about a worker that an agent reports."""
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
    server: str = ""
    """The deciding process that it served before (`AgentSetup.server`), if any."""
    kept: dict[WorkerId, bytes] = {}  # msgspec creates a new dict for each instance
    """Its workers, by their numbers, each with what it does (`KnownStages.fingerprint`)."""
    models: tuple[tuple[str, str], ...] = ()
    """The models in its cache: the key of the location (`ModelSource.key`), and the SHA-256 of the model's file."""


class AgentReport(Struct, frozen=True, array_like=True, tag=2):
    """An event, as it is."""

    event: WorkerReport | Transferred | TransferFailed


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


class WorkerDiffers(Struct, frozen=True, array_like=True, tag=11):
    """A request that shared a forward pass of a worker got other outputs than alone."""

    replica: ReplicaId
    why: str


class BatchPassed(Struct, frozen=True, array_like=True, tag=9, gc=False):
    """A part of a model has run its layers on a batch, which the next part takes."""

    batch: BatchId
    replica: ReplicaId
    """The part; the batch may be another replica's."""
    passed: PassedBatch


class PartUnreached(Struct, frozen=True, array_like=True, tag=10):
    """The tensors that a part is to take cannot be fetched from the machine of the part before."""

    batch: BatchId
    replica: ReplicaId
    why: str


class WorkersKept(Struct, frozen=True, array_like=True, tag=5):
    """The workers that run on, of those that the deciding process wants to keep. All others have stopped."""

    kept: tuple[KeptWorker, ...]


class SparesReport(Struct, frozen=True, array_like=True, tag=8):
    """The workers of the agent that wait for a model have become more or fewer."""

    spares: SpareProcesses


FromAgent = (
    AgentHello
    | AgentReport
    | BatchFinished
    | BatchRaised
    | WorkerDiffers
    | BatchPassed
    | PartUnreached
    | WorkersKept
    | SparesReport
)


# From the deciding process to an agent


class AgentSetup(Struct, frozen=True, array_like=True, tag=1):
    """The agent's number among the processes that hold arenas, and those of its machine, by number with process id."""

    holder: int
    holders: dict[int, int]
    server: str = ""
    """The name of the deciding process, which differs from that of every other one."""
    keep: tuple[WorkerId, ...] = ()
    """The kept workers that the agent must not stop. An agent that has served a deciding process before answers with
    `WorkersKept`."""
    may_be_followed: bool = True
    """Whether another deciding process can take the place of this one. If not, no worker is kept for it."""


class LearnStages(Struct, frozen=True, array_like=True, tag=2):
    """Models and stages whose replicas may be started."""

    servables: list[tuple[str, str, Servable]]
    """Stage, variant and model."""
    wirings: dict[str, StageWiring]
    threads_prepared: int


class ForgetStages(Struct, frozen=True, array_like=True, tag=3):
    """Stages of which nothing will be started again."""

    stages: list[str]


class NodeOrder(Struct, frozen=True, array_like=True, tag=4):
    """An order of the core, as it is."""

    order: StartWorker | StopWorker | ResizeWorker | AdoptWorker | Transfer | CancelTransfer | Evict
    peers: dict[str, list[Endpoint]] = {}  # msgspec creates a new dict for each instance
    """For a start or a transfer: by source (a model's `Servable.source`, or `CutBlock.source` of blocks), the agents
    that have it or are fetching it, in the order in which to ask them. None of them waits for this agent. If one fails,
    the next one continues at the same byte; last comes the store or, for blocks, the deciding process. A transfer
    brings these sources."""


class RunBatch(Struct, frozen=True, array_like=True, tag=7, gc=False):
    """Run a batch."""

    batch: BatchId
    replica: ReplicaId
    order: Run
    is_part: bool = False
    """Whether the replica runs only the layers of its part. It answers with `BatchPassed`, unless it has the last
    layers."""


class PassBatch(Struct, frozen=True, array_like=True, tag=15, gc=False):
    """Run the replica's layers on a batch that the part before has passed on."""

    batch: BatchId
    replica: ReplicaId
    passed: PassedBatch


class CompleteWorker(Struct, frozen=True, array_like=True, tag=16):
    """Load the other layers of a part of a model, which are there, while it serves."""

    replica: ReplicaId


class FreeBlock(Struct, frozen=True, array_like=True, tag=8, gc=False):
    """A block of a worker of this agent is no longer needed."""

    block: Address


class Endpoints(Struct, frozen=True, array_like=True, tag=9):
    """Where blocks can be fetched, by their holders. An empty host stands for that of the deciding process."""

    by_holder: dict[int, Endpoint]


class CloseAgent(Struct, frozen=True, array_like=True, tag=10):
    """Stop all workers and end."""

    why: str = ""
    """Why the agent cannot serve; empty if the server stops."""


ToAgent = (
    AgentSetup
    | LearnStages
    | ForgetStages
    | NodeOrder
    | RunBatch
    | PassBatch
    | CompleteWorker
    | FreeBlock
    | Endpoints
    | CloseAgent
)


def replaced(blocks: Sequence[GivenBlocks], copies: Mapping[Address, Address]) -> list[GivenBlocks]:
    """The blocks, with addresses replaced by those of their copies."""
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


class _Worker:
    """A worker of an agent."""

    def __init__(self, order: StartWorker, known: KnownStages) -> None:
        self.number, self.order = order.worker, order
        self.fingerprint = known.fingerprint(order.spec.stage, order.spec.variant)
        self.spec = order.spec
        """With the cores in effect."""
        self.is_ours = True
        """Whether the present deciding process has started or adopted it."""
        self.reports: list[WorkerReport] = []
        """Its events between the offer to a deciding process and the adoption by it."""
        self.is_ready = self.is_stopping = False
        self.part = order.part
        """Its part of the model, until it has all layers."""
        self.batch: BatchId | None = None
        """The batch that it runs, also an abandoned one, until it has ended."""
        self.waiting: deque[RunBatch | PassBatch] = deque()
        """The batches that it runs next: a part may get a batch of its own while it runs one of another part."""
        self.is_abandoned = False
        """Whether nobody waits for its batch."""
        self.shadow: _Worker | None = None
        self.is_shadow = False
        """Whether it is the shadow of another one. Nobody keeps these."""
        self.servable: Servable | None = None
        """Its model as it was brought to this machine."""
        self.models: list[tuple[WeightsCache, Path]] = []
        """The fetched model that it uses, or the blocks of it, each with the cache that has it."""
        self.receptions: list[_Reception] = []
        """The transfers that have brought them."""
        self.copy: ModelCopy | None = None
        """The private copy of its model; None if the model was fetched."""
        self.bringing: Task[None] | None = None
        """Fetches its model."""
        self.completing: Task[None] | None = None
        """Fetches the other blocks of a part."""
        self.fetching: Task[None] | None = None
        """Fetches blocks of other machines that its batch reads."""
        self.copies: list[Address] = []
        """Those blocks."""

    def start(self) -> StartWorker:
        """The order to start it, now that its model is here."""
        return structs.replace(self.order, spec=self.spec, transfer=None)

    def release_models(self) -> None:
        """Let its model be deleted from the caches: nothing uses it any more."""
        for cache, model in self.models:
            cache.release(model)
        if self.copy is not None:
            self.copy.close()


class _Reception:
    """Weights that the deciding process has ordered to this machine."""

    def __init__(self, order: Transfer, ended: "asyncio.Future[str]") -> None:
        self.order = order
        self.sources: list[ModelSource] = []
        """What to fetch."""
        self.ended = ended
        """Ends with the reason why they were not received; empty if they were."""
        self.cache: WeightsCache | None = None
        """The cache that has them; a separate one if they are not kept."""
        self.task: Task[None] | None = None
        self.users = 0
        """Workers that wait for them, or use them."""


class AgentSession:
    """The workers of an agent, from its first `AgentSetup` on (`BackendListener` of its backend). It serves one
    connection after another: `detach` ends the use of one, `resume` begins the use of the next.

    `joined` is where the deciding process is, `name` the node's.
    """

    def __init__(
        self,
        setup: AgentSetup,
        send: Callable[[FromAgent], None],
        blocks: BlockClient,
        joined: Endpoint,
        make_cache: Callable[[], WeightsCache],
        *,
        spares_max: int = 0,
        name: str = "",
    ) -> None:
        self._name = name
        self._send, self._blocks, self._joined = send, blocks, joined
        self._make_cache = make_cache
        self._cache: WeightsCache | None = None
        """The cache of fetched models; made when the first one is fetched."""
        self._receptions: dict[TransferId, _Reception] = {}
        """Weights that the present deciding process has ordered."""
        self._apart: list[WeightsCache] = []
        """The caches of weights that are not kept."""
        self._tasks: set[Task[None]] = set()
        """The tasks that receive and remove weights."""
        self._copying, self._making = asyncio.Lock(), asyncio.Lock()
        self._own = setup.holder
        """The number by which workers know this process as a holder of arenas; `_holder` is its present one."""
        self._arenas = Arenas(self._own)
        held = self._arenas.make(ARENA_BYTES, lambda _: None)
        self._arena = Arena(held.number, held.fd) if held is not None else None
        """For copies of blocks of other machines."""
        self._beside = RelayedArenas(self._own)
        """The arenas of the deciding process, if it is on this machine."""
        self._used: set[Address] = set()
        """Blocks of its workers that the deciding process has."""
        self._workers: dict[WorkerId, _Worker] = {}
        """Those that have not ended."""
        self._offered: dict[WorkerId, _Worker] = {}
        """Kept workers that are not adopted yet; also those that have ended meanwhile."""
        self._stopping: set[WorkerId] | None = None
        """The workers that must stop before `WorkersKept` is sent; None if it has been sent."""
        self._loop = asyncio.get_running_loop()
        self._timers: set[TimerHandle] = set()
        limits = detect()
        _log.info("cores of replicas are limited by %s", limits.why)
        holders = {self._own: os.getpid()}
        self._backend = LocalBackend(
            {}, {}, limits.actuator, arenas=self._arenas, holders=holders, spares_max=spares_max
        )
        self._backend.on_spares = self._tell_spares
        self._backend.on_passed = self._on_passed
        self._backend.attach(self)
        self._backend.on_difference = self._on_difference
        self._connect(setup)
        self._acts: dict[type, Callable[[Any], None]] = {
            LearnStages: self._learn,
            ForgetStages: lambda record: self._backend.forget(record.stages),
            NodeOrder: self._obey,
            RunBatch: self._run,
            PassBatch: self._run,
            CompleteWorker: lambda record: self._complete(record.replica, None),
            FreeBlock: self._free,
            Endpoints: self._set_endpoints,
        }
        self._orders: dict[type, Callable[[Any], None]] = {
            StopWorker: self._stop,
            ResizeWorker: self._resize,
            AdoptWorker: self._adopt,
            CancelTransfer: self._give_up_weights,
            Evict: self._evict,
        }

    def _connect(self, setup: AgentSetup) -> None:
        """Use a new connection."""
        self.server, self._may_be_followed = setup.server, setup.may_be_followed
        self._holder = setup.holder
        self._is_beside = 0 in setup.holders
        """Whether the deciding process is on this machine, with its files."""
        self._reader = ArenaReader({**setup.holders, setup.holder: os.getpid()})
        self._beside.set_holders(setup.holders)

    def kept(self) -> dict[WorkerId, bytes]:
        """The workers that another deciding process may adopt, with their fingerprints, which contain the
        digests of their models. Excluded are parts of models."""
        return {
            number: worker.fingerprint
            for number, worker in self._workers.items()
            if worker.fingerprint and not (worker.is_stopping or worker.part or worker.is_shadow)
        }

    def detach(self) -> None:
        """The connection has ended. Abandon the running batches and transfers, and stop shadows. Keep the workers if
        another process may adopt them."""
        self._send = _drop
        self._blocks.close()
        self._beside.set_holders({})
        self._offered.clear()
        self._stopping = None
        self._receptions.clear()  # they end without being told
        for worker in self._workers.values():
            worker.is_ours = False
            worker.reports.clear()
            worker.waiting.clear()
            if worker.is_shadow:
                self._stop_worker(worker)
            if worker.fetching is not None:
                self._end_batch(worker)
            elif worker.batch is not None and not worker.is_abandoned:
                worker.is_abandoned = True
                self._after(ABANDON_S_MAX, partial(self._give_up, worker, worker.batch))
        if not self._may_be_followed:
            for worker in list(self._workers.values()):
                self._stop_worker(worker)
        used, self._used = self._used, set()
        if used:
            self._after(LINGER_S, lambda: self._free_all(used))

    def resume(self, setup: AgentSetup, send: Callable[[FromAgent], None], blocks: BlockClient) -> None:
        """Use another connection: stop all workers that the deciding process does not keep, then report the kept
        ones."""
        self._send, self._blocks = send, blocks
        self._connect(setup)
        self._tell_spares()
        self._offered = {number: worker for number, worker in self._workers.items() if number in setup.keep}
        self._stopping = self._workers.keys() - self._offered.keys()
        for number in list(self._stopping):
            self._stop_worker(self._workers[number])
        self._tell_kept()

    @property
    def caches(self) -> list[WeightsCache]:
        """All caches of fetched models."""
        return [*([] if self._cache is None else [self._cache]), *self._apart]

    def read(self, block: Address) -> memoryview:
        """The memory of a block of this machine. Raises `ValueError` if there is none."""
        return self._reader.read(block)

    def on_record(self, record: ToAgent) -> None:
        """Execute an order of the deciding process."""
        act = self._acts.get(type(record))
        if act is None:
            raise ProtocolError(f"an agent that was set up was sent a {type(record).__name__}")
        act(record)

    async def close(self) -> None:
        """Stop all workers without reports."""
        self._send = _drop
        for timer in self._timers:
            timer.cancel()
        for worker in self._workers.values():
            for fetch in (worker.fetching, worker.bringing):  # the others are in `_tasks`
                if fetch is not None:
                    fetch.cancel()
        for running in self._tasks:
            running.cancel()
        self._blocks.close()
        await self._backend.close()
        if self._cache is not None:
            await self._cache.close()
        for apart in list(self._apart):
            await apart.remove()
        self._beside.close()
        self._arenas.close()

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        def act() -> None:
            self._timers.discard(timer)
            call()

        timer = self._loop.call_later(delay_s, act)
        self._timers.add(timer)

    def _tell_spares(self) -> None:
        for spares in self._backend.spare_processes().values():
            self._send(SparesReport(spares))

    def _learn(self, record: LearnStages) -> None:
        servables = {(stage, variant): servable for stage, variant, servable in record.servables}
        self._backend.learn(servables, record.wirings, threads_prepared=record.threads_prepared)

    def _set_endpoints(self, record: Endpoints) -> None:
        others = {
            holder: (host or self._joined[0], port)
            for holder, (host, port) in record.by_holder.items()
            if holder != self._holder
        }
        self._blocks.set_endpoints(others)

    # Replicas

    def _ours(self, number: WorkerId) -> _Worker | None:
        """A worker of the present deciding process; None if it has ended."""
        worker = self._workers.get(number)
        return worker if worker is not None and worker.is_ours else None

    def _obey(self, record: NodeOrder) -> None:
        order = record.order
        if isinstance(order, StartWorker):
            self._start(order, record.peers)
        elif isinstance(order, Transfer):
            self._receive(order, record.peers)
        else:
            self._orders[type(order)](order)

    def _start(self, order: StartWorker, peers: Mapping[str, Sequence[Endpoint]]) -> None:
        number, spec = order.worker, order.spec
        body = self._ours(order.replica) if order.replica is not None else None
        if order.replica is not None and body is None:
            return  # its end, which has been reported, is that of its shadow
        if number in self._workers or number in self._offered:
            raise ProtocolError(f"worker {number} is started, which is there")
        worker = self._workers[number] = _Worker(order, self._backend)
        if body is not None:
            self._start_shadow(worker, body, order)
            return
        servable = self._backend.servable(spec.stage, spec.variant)
        comes = servable is not None and (servable.source or servable.cut is not None)
        if servable is not None and comes and (order.transfer is not None or not self._is_beside):
            reception = self._used_reception(worker, order.transfer)
            bringing = self._bring_and_start(worker, servable, order, peers, reception)
            worker.bringing = asyncio.create_task(bringing)
        elif servable is not None and servable.digest and (not self._is_beside or _is_missing(servable.model)):
            worker.bringing = asyncio.create_task(self._copy_and_start(worker, servable))
        elif servable is not None and servable.cut is None and _is_missing(servable.model):
            self.on_event(WorkerLost(number, _not_here(servable.model)))
        else:
            self._backend.order(worker.start())

    def _used_reception(self, worker: _Worker, transfer: TransferId | None) -> _Reception | None:
        """A transfer whose weights a worker uses from now on; None if there is no such transfer."""
        found = self._receptions.get(transfer) if transfer is not None else None
        if found is not None:
            found.users += 1
            worker.receptions.append(found)
        return found

    async def _bring_and_start(
        self,
        worker: _Worker,
        servable: Servable,
        order: StartWorker,
        peers: Mapping[str, Sequence[Endpoint]],
        reception: _Reception | None,
    ) -> None:
        """Fetch the model of a worker, or its part of the model, then start the worker."""
        self.on_event(WorkerProgressed(worker.number, "fetching"))
        try:
            cache = await self._cache_with(order.transfer, reception)
            if servable.cut is not None:
                count = len(servable.cut.blocks)
                layers = order.part.layers if order.part is not None else range(count)
                files = await self._bring_blocks(worker, cache, servable.cut, layers, peers)
                own = structs.replace(servable, cut=_placed(servable.cut, files))
            else:
                source = ModelSource.of(servable.source)
                model = await cache.fetch(source, pin=True, nearer=self._nearer(source, peers.get(servable.source, ())))
                worker.models.append((cache, model))
                own = structs.replace(servable, model=str(await self._prepared(model, servable.changes, model.parent)))
        except Exception as error:
            worker.bringing = None
            self.on_event(WorkerLost(worker.number, _why(error, f"the model of replica {worker.number}")))
            return
        worker.bringing, worker.servable = None, own
        spec = worker.spec  # as it is now: it may have been resized meanwhile
        self._backend.learn({(spec.stage, spec.variant): own}, {}, threads_prepared=0)
        self._backend.order(worker.start())

    async def _copy_and_start(self, worker: _Worker, servable: Servable) -> None:
        """Copy a model from the path that all machines share, then start the worker. The copy must have the content
        that the deciding process has examined."""
        try:
            copy = worker.copy = await self._taken(Path(servable.original), servable.digest)
            copy.compare(servable.digest)
            model = str(await self._prepared(copy.path, servable.changes, copy.folder))
        except Exception as error:
            worker.bringing = None
            self.on_event(WorkerLost(worker.number, _why(error, f"the model of replica {worker.number}")))
            return
        worker.bringing, worker.servable = None, structs.replace(servable, model=model)
        self._backend.learn({(worker.spec.stage, worker.spec.variant): worker.servable}, {}, threads_prepared=0)
        self._backend.order(worker.start())

    async def _taken(self, original: Path, expected: str) -> ModelCopy:
        """A private copy of a model, in the cache. Copies of which no worker is left are deleted."""
        folder = (await self._shared_cache()).models.folder / IN_CACHE
        async with self._copying:  # the second replica finds the copy of the first one
            taking = self._loop.run_in_executor(None, _take, original, folder, expected)
            try:
                copy = await asyncio.shield(taking)
            except asyncio.CancelledError:
                taking.add_done_callback(_close_copy)
                raise
            await self._loop.run_in_executor(None, collect, folder)
        return copy

    async def _cache_with(self, transfer: TransferId | None, reception: _Reception | None) -> WeightsCache:
        """Wait for a transfer, and return the cache with its weights; without a transfer, the shared cache.
        MachineError if the transfer has failed."""
        if transfer is None:
            return await self._shared_cache()
        # Fetching from this cache then takes no time.
        why = "nothing was ordered" if reception is None else await asyncio.shield(reception.ended)
        if why:
            raise MachineError(f"its weights do not come: {why}")
        if reception is None or reception.cache is None:
            raise MachineError("its weights were deleted with the replicas that they were for")
        return reception.cache

    async def _bring_blocks(
        self,
        worker: _Worker,
        cache: WeightsCache,
        cut: CutModel,
        places: Iterable[int],
        peers: Mapping[str, Sequence[Endpoint]],
    ) -> dict[int, str]:
        """Fetch these blocks; returns their files by position. The files stay until the worker has ended."""

        async def bring(place: int) -> tuple[int, str]:
            text = cut.blocks[place].source
            source = ModelSource.of(text)
            nearer = self._nearer(source, peers.get(text, ()), is_block=True)
            file = await cache.fetch(source, pin=True, nearer=nearer)
            worker.models.append((cache, file))
            return place, str(file)

        return dict(await _all(map(bring, places)))

    def _complete(self, replica: ReplicaId, transfer: TransferId | None) -> None:
        worker = self._ours(replica)
        if worker is not None and worker.part is not None and worker.completing is None:
            reception = self._used_reception(worker, transfer)
            worker.completing = self._do(self._bring_others(worker, worker.part, transfer, reception))

    async def _bring_others(
        self, worker: _Worker, part: Worker, transfer: TransferId | None, reception: _Reception | None
    ) -> None:
        """Fetch the other layers of a part, then order its worker to load them."""
        try:
            cut, files = self._backend.blocks_of(worker.spec), dict[int, str]()
            if transfer is not None or not self._is_beside:
                cache = await self._cache_with(transfer, reception)
                others = part.span.others.positions(len(cut.blocks))
                files = await self._bring_blocks(worker, cache, cut, others, {})
        except Exception as error:
            self._backend.give_up(worker.number, _why(error, f"the other layers of replica {worker.number}"))
            return
        self._backend.complete_part(worker.number, files)

    async def _prepared(self, model: Path, changes: Sequence[str], folder: Path) -> Path:
        """The file to open for a model: its own, or a copy with these changes in `folder`."""
        if not changes:
            return model
        from sloop.profile.examine import changed_copy  # noqa: PLC0415  # few models need it

        async with self._copying:  # the second replica finds the copy of the first one
            return await self._loop.run_in_executor(None, changed_copy, model, changes, folder)

    async def _shared_cache(self) -> WeightsCache:
        """The cache of this machine, which is made in a thread: what is left there of another process is deleted."""
        async with self._making:
            if self._cache is None:
                self._cache = await self._loop.run_in_executor(None, self._make_cache)
        return self._cache

    def _start_shadow(self, worker: _Worker, body: _Worker, order: StartWorker) -> None:
        if body.servable is not None:  # another version of the application may have been learnt meanwhile
            self._backend.learn({(body.spec.stage, body.spec.variant): body.servable}, {}, threads_prepared=0)
        body.shadow, worker.is_shadow = worker, True
        self._backend.order(order)

    def _nearer(
        self, source: ModelSource, peers: Sequence[Endpoint], *, is_block: bool = False
    ) -> Callable[[Store], Store]:
        """A function that puts other agents before the store of a model; the store of a block is the deciding
        process."""
        token, context = self._blocks.token, self._blocks.context

        def nearer(store: Store) -> Store:
            if is_block:
                store = ServedStore(source, self._joined, token=token, context=context)
            return PeerStore(source, store, peers, token=token, context=context) if peers else store

        return nearer

    def _receive(self, order: Transfer, peers: Mapping[str, Sequence[Endpoint]]) -> None:
        """Bring weights to this machine, and to the parts of models that they complete."""
        if order.transfer in self._receptions:
            raise ProtocolError(f"transfer {order.transfer} is ordered twice")
        for transfer in list(self._receptions)[:-RECEPTIONS_MAX]:
            if self._receptions[transfer].ended.done():
                del self._receptions[transfer]
        made = self._receptions[order.transfer] = _Reception(order, self._loop.create_future())
        made.task = self._do(self._receive_weights(made, peers))
        for replica in order.completes:
            self._complete(replica, order.transfer)

    def _do(self, work: Coroutine[Any, Any, None]) -> Task[None]:
        running = asyncio.create_task(work)
        self._tasks.add(running)
        running.add_done_callback(self._tasks.discard)
        return running

    async def _receive_weights(self, made: _Reception, peers: Mapping[str, Sequence[Endpoint]]) -> None:
        """Fetch ordered weights and report the result. Replicas that wait for them then start."""
        order, why = made.order, ""
        try:
            made.sources = [ModelSource.of(text) for text in peers]
            of_blocks = any(each.cut is not None for each in self._backend.with_weights(order.weights)[:1])
            nearer = [self._nearer(ModelSource.of(text), of, is_block=of_blocks) for text, of in peers.items()]
            cache = made.cache = await self._shared_cache()
            if not order.is_kept:
                cache = made.cache = await self._loop.run_in_executor(None, cache.apart)
                self._apart.append(cache)
            await _all(map(partial(_fetch, cache), made.sources, nearer))
        except Exception as error:
            why = _why(error, "a model")
            if made.cache is not None and not isinstance(error, InputError):  # else nothing is left
                for source in made.sources:
                    await made.cache.discard(source)
        if self._receptions.get(order.transfer) is made:
            name, transfer = self._name, order.transfer
            self._send(AgentReport(TransferFailed(transfer, name, why) if why else Transferred(transfer, name)))
        made.ended.set_result(why)
        if not made.users:
            self._leave(made)

    def _leave(self, made: _Reception) -> None:
        """Nobody uses the weights of a transfer any more: delete them unless they are kept."""
        if not made.order.is_kept and made.cache is not None:
            self._do(self._remove(made.cache))
            made.cache = None

    async def _remove(self, cache: WeightsCache) -> None:
        await cache.remove()
        self._apart.remove(cache)

    def _give_up_weights(self, order: CancelTransfer) -> None:
        made = self._receptions.get(order.transfer)
        if made is None or made.task is None or made.ended.done():
            return  # its report is under way
        made.task.cancel()
        made.ended.set_result("it was given up")
        if made.order.is_kept and made.cache is not None:
            self._do(self._discard_all(made, made.task))
        self._leave(made)

    async def _discard_all(self, made: _Reception, ended: Task[None]) -> None:
        """Delete the files of a cancelled transfer."""
        await asyncio.wait([ended])
        for source in made.sources:
            if made.cache is not None:
                await made.cache.discard(source)

    def _evict(self, order: Evict) -> None:
        models = self._backend.with_weights(order.weights)
        for source in dict.fromkeys(source for servable in models for source in sources_of(servable)):
            self._do(self._evict_files(ModelSource.of(source)))

    async def _evict_files(self, source: ModelSource) -> None:
        try:
            await (await self._shared_cache()).evict(source)
        except (MachineError, OSError) as error:
            _log.warning("%s cannot be deleted: %s", source, error)

    def _stop(self, order: StopWorker) -> None:
        worker = self._ours(order.worker)
        if worker is None:
            self._send(AgentReport(WorkerStopped(order.worker)))
        else:
            self._stop_worker(worker)

    def _stop_worker(self, worker: _Worker) -> None:
        worker.is_stopping = True
        bringing, worker.bringing = worker.bringing, None
        if bringing is None:
            self._backend.order(StopWorker(worker.number, ""))
        else:
            bringing.cancel()
            self.on_event(WorkerStopped(worker.number))

    def _resize(self, order: ResizeWorker) -> None:
        worker = self._ours(order.worker)
        if worker is None:
            return  # its end has been reported
        if worker.bringing is not None:  # it starts with these cores, when its model is there
            self.on_event(WorkerResized(worker.number, order.cores))
        else:
            self._backend.order(order)

    def _adopt(self, order: AdoptWorker) -> None:
        """A deciding process has adopted a kept worker. Its events since the offer are reported now."""
        worker = self._offered.pop(order.worker, None)
        if worker is None:
            raise ProtocolError(f"worker {order.worker} was adopted, but it was not kept")
        worker.is_ours = True
        reports, worker.reports = worker.reports, []
        for event in reports:
            self._report(worker, event)

    def _tell_kept(self) -> None:
        """Say which workers are kept, if all others have stopped."""
        if self._stopping is None or self._stopping:
            return
        self._stopping = None
        self._offered = {number: worker for number, worker in self._offered.items() if number in self._workers}
        kept = []
        for number, worker in self._offered.items():
            worker.reports.clear()
            kept.append(KeptWorker(number, worker.spec, worker.is_ready and worker.batch is None))
        self._send(WorkersKept(tuple(kept)))

    # Batches

    def _run(self, record: RunBatch | PassBatch) -> None:
        worker = self._ours(record.replica)
        if worker is None:
            return  # its end has been reported, which covers its batch
        if worker.batch is not None:
            worker.waiting.append(record)
            return
        worker.batch = record.batch
        here: dict[Address, Address] = {}
        foreign: list[Address] = []
        blocks = record.passed.tensors if isinstance(record, PassBatch) else record.order.blocks
        for block in set(addresses_in(blocks)):
            own = block.held_by(self._own) if block.holder == self._holder else self._beside.relay(block)
            if own is None:
                foreign.append(block)
            else:
                here[block] = own
        if foreign:
            worker.fetching = asyncio.create_task(self._fetch_and_run(worker, record, foreign, here))
        else:
            self._run_on(worker, record, here)

    def _run_on(self, worker: _Worker, record: RunBatch | PassBatch, places: Mapping[Address, Address]) -> None:
        """Run a batch, with the addresses at which the worker finds its blocks."""
        if isinstance(record, PassBatch):
            tensors = [places.get(each, each) if isinstance(each, Address) else each for each in record.passed.tensors]
            passed = structs.replace(record.passed, tensors=tensors)
            self._backend.run_part(worker.number, record.batch, passed)
            return
        order = record.order
        if places:
            order = structs.replace(order, blocks=replaced(order.blocks, places))
        if record.is_part:
            self._backend.run_part(worker.number, record.batch, order)
        else:
            self._backend.run(record.batch, worker.number, order)

    def _run_next(self, worker: _Worker) -> None:
        """Run the next batch of a worker whose batch has ended and was reported."""
        if worker.waiting and worker.batch is None:
            self._run(worker.waiting.popleft())

    async def _fetch_and_run(
        self, worker: _Worker, record: RunBatch | PassBatch, foreign: Iterable[Address], here: Mapping[Address, Address]
    ) -> None:
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
            worker.fetching = worker.batch = None
            if isinstance(record, PassBatch) and isinstance(error, BlockLost):
                self._send(PartUnreached(record.batch, record.replica, str(error)))
            else:
                failure = ModelFailure("its tensors could not be brought to the node that runs it", str(error))
                self._send(BatchRaised(record.batch, record.replica, failure.encode()))
            self._run_next(worker)
            return
        worker.fetching = None
        worker.copies = list(copies.values())
        self._run_on(worker, record, {**here, **copies})

    def _allocated(self, size: int) -> tuple[Address, memoryview]:
        if self._arena is None:
            raise ArenaFull("this process has no arena: the operating system has refused it")
        return self._arena.allocate(size)

    def _end_batch(self, worker: _Worker) -> bool:
        """The batch of a worker has ended. Returns whether somebody waits for it."""
        fetching, worker.fetching = worker.fetching, None
        if fetching is not None:
            fetching.cancel()  # which frees its copies when nothing is written into them any more
        copies, worker.copies = worker.copies, []
        self._free_copies(copies)
        is_awaited, worker.batch, worker.is_abandoned = not worker.is_abandoned, None, False
        return is_awaited

    def _free_copies(self, copies: Iterable[Address]) -> None:
        for copy in copies:
            assert self._arena is not None
            self._arena.free(copy)

    def _give_up(self, worker: _Worker, batch: BatchId | None) -> None:
        """Stop a worker whose abandoned batch has not ended in time."""
        if worker.is_abandoned and worker.batch == batch and worker.number in self._workers:
            what = "worker %d is stopped: its batch, for which nobody waits any more, has not ended after %g s"
            _log.warning(what, worker.number, ABANDON_S_MAX)
            self._stop_worker(worker)

    # Blocks of workers

    def _free(self, record: FreeBlock) -> None:
        block = record.block.held_by(self._own)
        if block not in self._used:
            raise ProtocolError(f"{record.block} is free already")
        self._used.discard(block)
        self._arenas.free(block)

    def _free_all(self, blocks: Iterable[Address]) -> None:
        """Free the blocks of a former deciding process when no batch that it has ordered can still read them."""
        if any(worker.is_abandoned for worker in self._workers.values()):
            self._after(1.0, lambda: self._free_all(blocks))
            return
        for block in blocks:
            self._arenas.free(block)

    # Reports of the backend

    def on_event(self, event: Event) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        assert isinstance(event, WorkerReport)
        number = event.replica if isinstance(event, BatchSilent) else event.worker
        worker = self._workers[number]
        if isinstance(event, WorkerReady):
            worker.is_ready = True
        elif isinstance(event, WorkerCompleted):
            worker.part, worker.spec = None, structs.replace(worker.spec, shape=ALONE)
        elif isinstance(event, WorkerResized):
            worker.spec = worker.spec.with_cores(event.cores)
        elif isinstance(event, WorkerLost | WorkerStopped):
            self._end_batch(worker)
            if worker.completing is not None:
                worker.completing.cancel()
            worker.release_models()
            for reception in worker.receptions:
                reception.users -= 1
                if not reception.users and reception.ended.done():
                    self._leave(reception)
            for ended in [worker] if worker.shadow is None else [worker, worker.shadow]:
                self._forget(ended)
        self._report(worker, event)

    def _forget(self, worker: _Worker) -> None:
        """A worker has ended."""
        if self._workers.pop(worker.number, None) is None:
            return  # a shadow, before its replica
        if self._stopping is not None:
            self._stopping.discard(worker.number)
            self._tell_kept()

    def _report(self, worker: _Worker, event: WorkerReport) -> None:
        """Report an event, or keep it until a deciding process has adopted the worker. Events about batches are not
        kept, because an adopted worker has none."""
        if worker.is_ours:
            self._send(AgentReport(event))
        elif not isinstance(event, BatchSilent):
            worker.reports.append(event)

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        worker = self._workers[event.replica]
        own = [block for block in blocks if isinstance(block, Address)]
        if not self._end_batch(worker) or not worker.is_ours:
            for block in own:
                self._arenas.free(block)
            self._report(worker, WorkerReady(worker.number))
            return
        found = self._noted(blocks)
        self._send(BatchFinished(event.batch, event.replica, event.service_ns, found, event.edge_counts, dict(faults)))
        self._run_next(worker)

    def _noted(self, blocks: Iterable[Block | None]) -> list[Any]:
        """Note that the deciding process holds these blocks. Returns them with the addresses that it uses."""
        self._used.update(each for each in blocks if isinstance(each, Address))
        return [each.held_by(self._holder) if isinstance(each, Address) else each for each in blocks]

    def _on_passed(self, batch: BatchId, replica: ReplicaId, took_ns: int, passed: PassedBatch) -> None:
        """A part has run its layers on a batch. The duration is not reported: the deciding process measures it, because
        that includes the transfer of the tensors to this machine."""
        worker = self._workers[replica]
        if not self._end_batch(worker) or not worker.is_ours:
            for block in passed.tensors:
                if isinstance(block, Address):
                    self._arenas.free(block)
            return
        passed = structs.replace(passed, tensors=self._noted(passed.tensors))
        self._send(BatchPassed(batch, replica, passed))
        self._run_next(worker)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        worker = self._workers[replica]
        if not self._end_batch(worker) or not worker.is_ours:
            self._report(worker, WorkerReady(worker.number))
        else:
            self._send(BatchRaised(batch, replica, failure.encode()))
            self._run_next(worker)

    def _on_difference(self, replica: ReplicaId, _stage: str, _variant: str, why: str) -> None:
        worker = self._workers[replica]
        if worker.is_ours:
            self._send(WorkerDiffers(replica, why))


def _placed(cut: CutModel, files: Mapping[int, str]) -> CutModel:
    """A model in blocks, with these files for some of them."""
    blocks = [structs.replace(each, file=files.get(at, each.file)) for at, each in enumerate(cut.blocks)]
    return structs.replace(cut, blocks=tuple(blocks))


async def _fetch(cache: WeightsCache, source: ModelSource, nearer: Callable[[Store], Store]) -> Path:
    return await cache.fetch(source, nearer=nearer)


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, once all have ended. Raises the error of the first that has failed."""
    results = await asyncio.gather(*works, return_exceptions=True)
    failed = next((each for each in results if isinstance(each, BaseException)), None)
    if failed is not None:
        raise failed
    return [each for each in results if not isinstance(each, BaseException)]


def _why(error: Exception, of: str) -> str:
    """Why something cannot be fetched, in one line."""
    if isinstance(error, SloopError):
        return error.what
    _log.error("%s cannot be fetched", of, exc_info=error)
    return f"{of} cannot be fetched: {error}"


def _drop(record: FromAgent) -> None:
    """There is nobody to tell."""


def _take(original: Path, folder: Path, expected: str) -> ModelCopy:
    """`take`, with an error that says what to do on this machine."""
    try:
        return take(original, folder, expected)
    except InputError as error:
        if _is_missing(str(original)):
            raise InputError(_not_here(str(original))) from error
        raise


def _not_here(model: str) -> str:
    return f"{model} is not on this node: put it where all nodes can read it under this path, or name it by URL"


def _close_copy(taken: "asyncio.Future[ModelCopy]") -> None:
    """Close a copy that nobody waits for any more."""
    if not taken.cancelled() and taken.exception() is None:
        taken.result().close()


def _is_missing(model: str) -> bool:
    """Whether a model is a file that is not there."""
    return not model.startswith("fake:") and not os.path.exists(model)  # also where it may not be read


class Agent:
    """Serves a deciding process at `join` as the node `name`, until that process stops."""

    def __init__(
        self,
        join: Endpoint,
        name: str,
        token: bytes,
        *,
        host: str = "",
        tls: NodeTls | None = None,
        make_cache: Callable[[], WeightsCache] = usual_cache,
        spares_max: int = 0,
    ) -> None:
        self._make_cache, self._spares_max = make_cache, spares_max
        self._join, self._name, self._token, self._host, self._tls = join, name, token, host, tls
        self._is_over, self._refused = False, ""
        self._workers: AgentSession | None = None
        """Its workers, from the first connection on."""

    async def serve(self) -> None:
        """Connect, serve, and connect again when the connection was lost. Raises `MachineError` if there is no deciding
        process for `GIVE_UP_S`, or if it sends this agent away."""
        try:
            await self._serve()
        finally:
            if self._workers is not None:
                await self._workers.close()
                self._workers = None
        if self._refused:
            raise MachineError(f"the deciding process sends this agent away: {self._refused}")

    async def _serve(self) -> None:
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
            began_s = loop.time()
            why = await self._session(link, context)
            gc.collect()  # what was mapped of shared memory keeps its files open
            lost_s, is_trying = loop.time(), False
            if not self._is_over:
                _log.warning("the connection to the deciding process has ended: %s", why)
                if lost_s - began_s < RETRY_S:  # its first message may be what ends the connection, each time
                    await asyncio.sleep(RETRY_S)

    async def _session(self, link: NetworkLink, context: ssl.SSLContext | None) -> str:
        """Serve over one connection; returns why it has ended. `context` is for connections to others."""
        ended = asyncio.get_running_loop().create_future()
        is_set_up = False

        def on_end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        def on_record(record: ToAgent) -> None:
            nonlocal is_set_up
            if isinstance(record, CloseAgent):
                self._is_over, self._refused = True, record.why
                on_end(record.why)
            elif isinstance(record, AgentSetup) and not is_set_up:
                is_set_up = True
                blocks = BlockClient(self._token, context)
                if self._workers is None:
                    self._workers = AgentSession(
                        *(record, records.send, blocks, self._join, self._make_cache),
                        spares_max=self._spares_max,
                        name=self._name,
                    )
                else:
                    self._workers.resume(record, records.send, blocks)
            elif is_set_up and not ended.done():
                assert self._workers is not None
                self._workers.on_record(record)
            else:
                raise ProtocolError(f"an agent was sent a {type(record).__name__} before its setup")

        def read(block: Address) -> memoryview:
            if self._workers is None:
                raise ValueError("this agent has no blocks yet")
            return self._workers.read(block)

        records = RecordLink(asyncio.get_running_loop(), link, ToAgent, on_record, on_end)
        server = BlockServer(read)
        files = FileServer(lambda: [] if self._workers is None else self._workers.caches)

        def accept(other: NetworkLink) -> None:
            (files if other.purpose is Purpose.WEIGHTS else server).accept(other)

        host = self._host or link.local_host
        own = self._tls.server_context() if self._tls is not None else None
        listener = await NodeListener.listen((host, 0), self._token, accept, own)
        try:
            link.keep_alive()
            where = (host, listener.port)
            before, kept = ("", {}) if self._workers is None else (self._workers.server, self._workers.kept())
            who = self._name, __version__, os.getpid(), machine(), where, capacity().cores
            models = await asyncio.get_running_loop().run_in_executor(None, self._models)
            records.send(AgentHello(*who, before, kept, models))
            return str(await ended)
        finally:
            records.close()
            if self._workers is not None:
                self._workers.detach()
            await listener.close()
            server.close()
            files.close()

    def _models(self) -> tuple[tuple[str, str], ...]:
        """The models that are here already, those that were used last first."""
        try:
            known = self._workers.caches if self._workers is not None else []
            cache = known[0] if known else self._make_cache()
        except MachineError:  # there can be no cache, which whoever needs one will be told
            return ()
        files = [(model.key, model.record.files[0].sha256) for model in cache.models.models()]
        return tuple(files[:MODELS_MAX])


def main(arguments: Sequence[str]) -> None:
    """Entry point of an agent that another process keeps: the process id of that, where to connect to, the node's name
    and the address of this machine, then the paths of `NodeTls`, if there are; the token is read from stdin."""
    parent, host, port, name, own_host, *files = arguments
    tls = NodeTls(*map(Path, files)) if files else None
    begin(int(parent), ())
    log_directly()
    token = sys.stdin.buffer.read()
    return_large_memory()
    agent = Agent((host, int(port)), name, token, host=own_host, tls=tls, spares_max=usual_spares_max())
    uvloop.run(agent.serve())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SloopError as error:
        sys.exit(str(error))
