"""The agent of a node: it runs the worker processes of one machine for a deciding process on another.

Ray starts it (`sloop.serve.cluster.ray`). It connects to the deciding process, which then orders it to start, resize
and stop workers and to run batches.
The agent has a node (`sloop.serve.node`) as the server has for its own machine, passes these orders on to it, and sends
its reports back. It takes no decisions.

Tensors of small requests travel within the orders. Large blocks stay where they were written: before a batch runs, the
agent fetches those that it reads from the agents of other machines into shared memory of its own, and it sends blocks
of its machine to whoever asks with the deployment's token (`sloop.serve.network`).

The parts of a pipeline have pipes between them (`sloop.serve.node.pipelines`). If the next part is on another machine,
its agent connects to the agent of the part before, which sends what its part passes on, as it comes.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop
from msgspec import Struct, structs

from sloop import __version__
from sloop.actions import AdoptWorker, CancelTransfer, Evict, ResizeWorker, StartWorker, StopWorker, Transfer
from sloop.errors import MachineError, SloopError
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
from sloop.serve.blocks import ARENA_BYTES, Block
from sloop.serve.cpu_quota import detect
from sloop.serve.dataflow import GivenBlocks, StageWiring, addresses_in
from sloop.serve.gpus import AssignedGpus
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
    RunBatch,
    WorkerDiffers,
    encode,
)
from sloop.serve.network import (
    FETCH_S_MAX,
    HANDSHAKE_S_MAX,
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
from sloop.serve.node.models import NodeModels
from sloop.serve.node.node import ENDING, LiveNode, NodeShadow, WorkerPhase
from sloop.serve.node.process import WorkerProcesses
from sloop.serve.node.spares import usual_spares_max
from sloop.serve.processes import begin
from sloop.serve.protocols import Servable, SpareProcesses
from sloop.serve.stderr import log_directly
from sloop.serve.transport import FrameKind, FrameLink, ProcessLink, ProtocolError, RecordLink, relay
from sloop.serve.weights.cache import WeightsCache, usual_cache
from sloop.serve.weights.peers import FileServer
from sloop.shared_memory import Address, Arena, ArenaFull, ArenaReader, Arenas, RelayedArenas
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, WorkerId

RETRY_S: Final = 0.5
"""The time between two attempts to connect."""
GIVE_UP_S: Final = 60.0
"""An agent that has found no deciding process for this long ends, with its workers. A supervisor starts a process again
within seconds; Kubernetes waits 10 and 20 s after the first two failures."""
LINGER_S: Final = SILENT_S + FETCH_S_MAX
"""How long the blocks of a deciding process are kept after the connection to it has ended. Until edges of this machine
notice the end too and have copied the blocks, they may still be sending them."""
MEET_S_MAX: Final = HANDSHAKE_S_MAX
"""How long one end of the way between two parts of a model waits for the other."""
ABANDON_S_MAX: Final = 30.0
"""A worker that has not finished its batch this long after the connection has ended is stopped, because it may hang."""

MODELS_MAX: Final = 1_000
"""How many models of its cache an agent names when it joins."""

WorkerReport = (
    BatchSilent | WorkerProgressed | WorkerReady | WorkerCompleted | WorkerLost | WorkerStopped | WorkerResized
)
"""The events about a worker that an agent reports."""
NodeEvent = WorkerReport | Transferred | TransferFailed
"""All events that it reports."""
_log: Final = logging.getLogger("sloop.agent")


# From an agent to the deciding process


class AgentHello(Struct, frozen=True, array_like=True, tag=True):
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


class WorkersKept(Struct, frozen=True, array_like=True, tag=True):
    """The workers that run on, of those that the deciding process wants to keep. All others have stopped."""

    kept: tuple[KeptWorker, ...]


FromAgent = (
    AgentHello
    | Report[NodeEvent]
    | BatchFinished
    | BatchRaised
    | WorkerDiffers
    | Reached
    | WorkersKept
    | SpareProcesses
)
"""`Reached` says that the last part of a pipeline has answered all batches that came, and no more come.
`SpareProcesses` comes when they have become more or fewer."""


# From the deciding process to an agent


class AgentSetup(Struct, frozen=True, array_like=True, tag=True):
    """The agent's number among the processes that hold arenas."""

    holder: int
    server: str = ""
    """The name of the deciding process, which differs from that of every other one."""
    keep: tuple[WorkerId, ...] = ()
    """The kept workers that the agent must not stop. An agent that has served a deciding process before answers with
    `WorkersKept`."""
    may_be_followed: bool = True
    """Whether another deciding process can take the place of this one. If not, no worker is kept for it."""


class LearnStages(Struct, frozen=True, array_like=True, tag=True):
    """All models and stages whose replicas may be started from now on. The agent forgets all others."""

    servables: list[tuple[str, str, Servable]]
    """Stage, variant and model."""
    wirings: dict[str, StageWiring]
    threads_prepared: int


class NodeOrder(Struct, frozen=True, array_like=True, tag=True):
    """An order of the core, as it is."""

    order: StartWorker | StopWorker | ResizeWorker | AdoptWorker | Transfer | CancelTransfer | Evict
    peers: dict[str, list[Endpoint]] = {}  # msgspec creates a new dict for each instance
    """For a start or a transfer: by source (a model's `Servable.source`, or `CutBlock.source` of blocks), the agents
    that have it or are fetching it, in the order in which to ask them. None of them waits for this agent. If one fails,
    the next one continues at the same byte; last comes the store or, for blocks, the deciding process. A transfer
    brings these sources."""


ToAgent = AgentSetup | LearnStages | NodeOrder | RunBatch | ConnectParts | CompleteWorker | Free | Holders | Close


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


class _AgentBatch:
    """A batch that was ordered and that its worker has not ended, or passed on to the next part of its model."""

    def __init__(self) -> None:
        self.is_abandoned = False
        """Whether nobody waits for it."""
        self.fetching: Task[None] | None = None
        """Fetches blocks of other machines that it reads."""
        self.copies: list[Address] = []
        """Those blocks."""


class AgentSession:
    """The node of an agent, from the first `AgentSetup` on, and its link to the deciding process (`BackendListener` of
    the node): who owns the workers, and how the tensors of batches come from other machines. It serves one connection
    after another: `detach` ends the use of one, `resume` begins the use of the next.

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
        around: "AgentHost | None" = None,
    ) -> None:
        around = self._around = around or AgentHost()
        self._joined = joined
        self._own = setup.holder
        """The number by which workers know this process as a holder of arenas; `_holder` is its present one."""
        self._arenas = Arenas(self._own)
        held = self._arenas.make(ARENA_BYTES, lambda _: None)
        self._arena = Arena(held.number, held.fd)
        """For copies of blocks of other machines."""
        self._beside = RelayedArenas(self._own)
        """The arenas of the deciding process, if it is on this machine."""
        self._used: set[Address] = set()
        """Blocks of its workers that the deciding process has."""
        self._batches: dict[tuple[WorkerId, BatchId], _AgentBatch] = {}
        self._unadopted: dict[WorkerId, list[WorkerReport]] = {}
        """The workers that the present deciding process has neither started nor adopted, also those that have ended
        since they were offered to it, with their events since then."""
        self._pipes: dict[WorkerId, ProcessLink] = {}
        """By part, its pipe to a part on another machine, whose agent has not connected yet."""
        self._callers: dict[WorkerId, NetworkLink] = {}
        """By part, the connection of the agent of the next one, which came before this agent was told of their pipe."""
        self._last_parts: set[WorkerId] = set()
        """Those that batches come to from other parts, for the present deciding process."""
        self._joined_pipes: set[tuple[ProcessLink, NetworkLink]] = set()
        """Pipes to and from other machines, with the connections that carry what passes."""
        self._carriers: dict[Task[None], ProcessLink] = {}
        """What connects to the agents of parts before, with the pipes to those after."""
        self._stopping: set[WorkerId] | None = None
        """The workers that must stop before `WorkersKept` is sent; None if it has been sent."""
        self._loop = asyncio.get_running_loop()
        self._timers: set[TimerHandle] = set()
        limits = around.quotas()
        _log.info("cores of replicas are limited by %s", limits.why)
        self.models = NodeModels(name, make_cache)
        self.node = LiveNode(
            *({}, {}, limits.actuator),
            arenas=self._arenas,
            holders={self._own: os.getpid()},
            gpus=around.gpus,
            models=self.models,
            spares_max=spares_max,
            processes=around.processes,
        )
        self._connect(setup, send, blocks)
        self.node.spares.on_change = self._tell_spares
        self.node.on_passed = self._end_batch
        self.node.on_drained = self._on_drained
        self.node.on_difference = self._on_difference
        self.node.attach(self)
        self.acts: dict[type, Callable[[Any], None]] = {
            LearnStages: self._learn,
            NodeOrder: self._obey,
            RunBatch: self._run,
            ConnectParts: self._connect_parts,
            CompleteWorker: lambda record: self.node.complete_part(record.replica),
            Free: self._free,
            Holders: self._set_holders,
        }
        """What is done with each record of the deciding process."""

    def _connect(self, setup: AgentSetup, send: Callable[[FromAgent], None], blocks: BlockClient) -> None:
        """Use a new connection."""
        self._send, self._blocks = send, blocks
        self.server, self._may_be_followed = setup.server, setup.may_be_followed
        self._holder = setup.holder
        self.models.connect(blocks, self._joined)
        self._reader = ArenaReader({self._holder: os.getpid()})

    def kept(self) -> dict[WorkerId, bytes]:
        """The workers that another deciding process may adopt, with their fingerprints, which contain the digests of
        their models. Excluded are parts of models, and shadows."""
        return {
            number: self.node.fingerprint(worker.spec.stage, worker.spec.variant)
            for number, worker in self.node.workers.items()
            if not (worker.phase in ENDING or worker.is_part or isinstance(worker, NodeShadow))
        }

    def detach(self) -> None:
        """The connection has ended. Abandon the running batches and transfers, and stop shadows and parts of models.
        Keep the workers if another process may adopt them."""
        self._send = _drop
        self._blocks.close()
        self._beside.set_holders({})
        self._stopping = None
        self._last_parts.clear()
        self._close_pipes()
        self._unadopted = {number: [] for number in self.node.workers}
        for (number, batch), own in list(self._batches.items()):
            if own.fetching is not None:
                self._end_batch(number, batch)
            elif not own.is_abandoned:
                own.is_abandoned = True
                self._after(ABANDON_S_MAX, partial(self._give_up, number, batch, own))
        for number, worker in list(self.node.workers.items()):
            if isinstance(worker, NodeShadow) or worker.is_part or not self._may_be_followed:
                self.node.order(StopWorker(number, "the connection to the server has ended"))
        used, self._used = self._used, set()
        if used:
            self._after(LINGER_S, lambda: self._free_all(used))

    def resume(self, setup: AgentSetup, send: Callable[[FromAgent], None], blocks: BlockClient) -> None:
        """Use another connection: stop all workers that the deciding process does not keep, then report the kept
        ones."""
        self._connect(setup, send, blocks)
        self._tell_spares()
        self._unadopted = {number: [] for number in self.node.workers}
        self._stopping = self._unadopted.keys() - setup.keep
        for number in list(self._stopping):
            self.node.order(StopWorker(number, "the server does not keep it"))
        self._tell_kept()

    def read(self, block: Address) -> memoryview:
        """The memory of a block of this machine. Raises `ValueError` if there is none."""
        return self._reader.read(block)

    async def close(self) -> None:
        """Stop all workers without reports."""
        self._send = _drop
        for timer in self._timers:
            timer.cancel()
        self._close_pipes()
        for own in self._batches.values():
            if own.fetching is not None:
                own.fetching.cancel()
        self._blocks.close()
        await self.node.close()
        self._beside.close()
        self._arenas.close()

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        def act() -> None:
            self._timers.discard(timer)
            call()

        timer = self._loop.call_later(delay_s, act)
        self._timers.add(timer)

    def _tell_spares(self) -> None:
        self._send(self.node.spares.counted())

    def _learn(self, record: LearnStages) -> None:
        servables = {(stage, variant): servable for stage, variant, servable in record.servables}
        self.node.forget(self.node.stages)
        self.node.learn(servables, record.wirings, threads_prepared=record.threads_prepared)

    def _set_holders(self, record: Holders) -> None:
        """Note which processes hold arenas with blocks. The deciding process is on this machine if it is in `here`."""
        self.models.is_beside = 0 in record.here
        self._reader.set_holders({**record.here, self._holder: os.getpid()})
        self._beside.set_holders(record.here)
        others = {
            holder: (host or self._joined[0], port)
            for holder, (host, port) in record.endpoints.items()
            if holder != self._holder
        }
        self._blocks.set_endpoints(others)

    # Workers

    def _obey(self, record: NodeOrder) -> None:
        match record.order:
            case AdoptWorker() as order:
                self._adopt(order)
            case StartWorker(worker) if worker in self.node.workers or worker in self._unadopted:
                raise ProtocolError(f"worker {worker} is to be started, but exists already")
            case StartWorker() | Transfer() as order:
                self.node.order(order, record.peers)
            case order:
                self.node.order(order)

    def _adopt(self, order: AdoptWorker) -> None:
        """A deciding process has adopted a kept worker. Its events since the offer are reported now."""
        events = self._unadopted.pop(order.worker, None)
        if events is None:
            raise ProtocolError(f"worker {order.worker} was adopted, but it was not kept")
        for event in events:
            self._send(Report(event))

    def _tell_kept(self) -> None:
        """Say which workers are kept, if all others have stopped."""
        workers = self.node.workers
        if self._stopping is None or not self._stopping.isdisjoint(workers):
            return
        self._stopping = None
        self._unadopted = {number: [] for number in self._unadopted if number in workers}
        kept = [(number, workers[number]) for number in self._unadopted]
        ready = WorkerPhase.READY
        self._send(WorkersKept(tuple(KeptWorker(number, each.spec, each.phase is ready) for number, each in kept)))

    # Batches

    def _run(self, record: RunBatch) -> None:
        number = record.replica
        if number not in self.node.workers or number in self._unadopted:
            return  # its end has been reported, which covers its batch
        made = self._batches[number, record.batch] = _AgentBatch()
        here: dict[Address, Address] = {}
        foreign: list[Address] = []
        for block in set(addresses_in(record.order.blocks)):
            own = block.held_by(self._own) if block.holder == self._holder else self._beside.relay(block)
            if own is None:
                foreign.append(block)
            else:
                here[block] = own
        if foreign:
            made.fetching = asyncio.create_task(self._fetch_and_run(made, record, foreign, here))
        else:
            self._run_on(record, here)

    def _run_on(self, record: RunBatch, places: Mapping[Address, Address]) -> None:
        """Run a batch, with the addresses at which the worker finds its blocks."""
        order = record.order
        if places:
            order = structs.replace(order, blocks=replaced(order.blocks, places))
        if record.is_part:
            self.node.run_part(record.replica, record.batch, order)
        else:
            self.node.run(record.batch, record.replica, order)

    async def _fetch_and_run(
        self, own: _AgentBatch, record: RunBatch, foreign: Iterable[Address], here: Mapping[Address, Address]
    ) -> None:
        """Copy blocks of other machines, then run the batch that reads them."""
        copies: dict[Address, Address] = {}
        try:
            fetches = []
            for block in foreign:
                copies[block], memory = self._arena.allocate(block.size)
                fetches.append(self._blocks.fetch(block, memory))
            results = await asyncio.gather(*fetches, return_exceptions=True)
            lost = next((each for each in results if isinstance(each, BaseException)), None)
            if lost is not None:
                raise lost
        except BaseException as error:
            self._free_copies(copies.values())
            if not isinstance(error, ArenaFull | BlockLost):
                raise
            del self._batches[record.replica, record.batch]
            failure = ModelFailure("its tensors could not be brought to the node that runs it", str(error))
            self._send(BatchRaised(record.batch, record.replica, failure.encode()))
            return
        own.fetching, own.copies = None, list(copies.values())
        self._run_on(record, {**here, **copies})

    def _end_batch(self, number: WorkerId, batch: BatchId) -> _AgentBatch | None:
        """A worker has ended a batch, or passed it on. Returns that; None if it was not ordered here."""
        own = self._batches.pop((number, batch), None)
        if own is not None:
            if own.fetching is not None:
                own.fetching.cancel()  # which frees its copies when nothing is written into them any more
            self._free_copies(own.copies)
        return own

    def _free_copies(self, copies: Iterable[Address]) -> None:
        for copy in copies:
            self._arena.free(copy)

    def _give_up(self, number: WorkerId, batch: BatchId, own: _AgentBatch) -> None:
        """Stop a worker whose abandoned batch has not ended in time."""
        if self._batches.get((number, batch)) is own:
            what = "worker %d is stopped: its batch, for which nobody waits any more, has not ended after %g s"
            _log.warning(what, number, ABANDON_S_MAX)
            self.node.order(StopWorker(number, "its abandoned batch does not end"))

    # Blocks of workers

    def _free(self, record: Free) -> None:
        block = record.block.held_by(self._own)
        if block not in self._used:
            raise ProtocolError(f"{record.block} is free already")
        self._used.discard(block)
        self._arenas.free(block)

    def _free_all(self, blocks: Iterable[Address]) -> None:
        """Free the blocks of a former deciding process when no batch that it has ordered can still read them."""
        if any(own.is_abandoned for own in self._batches.values()):
            self._after(1.0, lambda: self._free_all(blocks))
            return
        for block in blocks:
            self._arenas.free(block)

    # Reports of the node

    def on_event(self, event: Event) -> None:
        """See `sloop.serve.protocols.BackendListener`. Events about batches are not kept until an adoption, because an
        adopted worker has none."""
        if isinstance(event, Transferred | TransferFailed):
            self._send(Report(event))
            return
        assert isinstance(event, WorkerReport)
        number = event.replica if isinstance(event, BatchSilent) else event.worker
        kept = self._unadopted.get(number)
        if isinstance(event, WorkerLost | WorkerStopped):
            for key in [key for key in self._batches if key[0] == number]:
                self._end_batch(*key)
        if kept is None:
            self._send(Report(event))
        elif not isinstance(event, BatchSilent):
            kept.append(event)
        self._tell_kept()

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        if self._is_awaited(event.replica, event.batch, blocks):
            self._send(BatchFinished(event, self._noted(blocks), dict(faults)))

    def _is_awaited(self, number: WorkerId, batch: BatchId, blocks: Iterable[Block | None] = ()) -> bool:
        """A worker has run a batch. Returns whether somebody waits for it. If it was abandoned, nobody reads what it
        has written, and its worker is ready again."""
        own = self._end_batch(number, batch)
        if number in self._last_parts if own is None else not own.is_abandoned:
            return True
        for block in blocks:
            if isinstance(block, Address):
                self._arenas.free(block)
        if own is not None:
            self.on_event(WorkerReady(number))
        return False

    def _noted(self, blocks: Iterable[Block | None]) -> list[Block | None]:
        """Note that the deciding process holds these blocks. Returns them with the addresses that it uses."""
        self._used.update(each for each in blocks if isinstance(each, Address))
        return [each.held_by(self._holder) if isinstance(each, Address) else each for each in blocks]

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        """See `sloop.serve.protocols.BackendListener`."""
        if self._is_awaited(replica, batch):
            self._send(BatchRaised(batch, replica, failure.encode()))

    # Pipelines

    def _connect_parts(self, record: ConnectParts) -> None:
        self._last_parts.add(record.after)
        if record.endpoint is None:
            self.node.connect_parts(record.before, record.after)
        elif record.before in self.node.workers:
            pipe = self.node.pipe(record.before, record)
            caller = self._callers.pop(record.before, None)
            if pipe is not None and caller is not None:
                self._join(record.before, pipe, caller)
            elif pipe is not None:
                self._keep(self._pipes, record.before, pipe)
            elif caller is not None:
                caller.close()
        else:
            pipe = self.node.pipe(record.after, record)
            if pipe is not None:
                carrier = asyncio.create_task(self._carry(record, record.endpoint, pipe))
                self._carriers[carrier] = pipe
                carrier.add_done_callback(self._carriers.pop)

    async def _carry(self, record: ConnectParts, endpoint: Endpoint, pipe: ProcessLink) -> None:
        """Bring what the part before passes on from the agent there."""
        try:
            token, context = self._blocks.token, self._blocks.context
            link = await self._around.connect(endpoint, token, Purpose.PARTS, context=context)
        except MachineError as error:
            _log.warning("replica %d gets no batches of replica %d: %s", record.after, record.before, error.what)
            pipe.close()
            return
        self._join(record.after, pipe, link)
        link.keep_alive()
        link.send(FrameKind.RECORDS, payload=[encode([record])])

    def accept(self, link: NetworkLink) -> None:
        """An agent connects, for what a part of a model passes on."""

        def connect_part(record: ConnectParts) -> None:
            acts.clear()  # one record for each connection
            part = record.before
            if part in self._callers:
                raise ProtocolError(f"the way from replica {part} is there")
            if part in self._pipes:
                self._join(part, self._pipes.pop(part), link)
            else:
                self._keep(self._callers, part, link)

        acts: dict[type, Callable[[ConnectParts], None]] = {ConnectParts: connect_part}
        RecordLink(self._loop, link, ConnectParts, acts, lambda why: None)
        link.keep_alive()

    def _join(self, part: WorkerId, pipe: ProcessLink, link: NetworkLink) -> None:
        """What comes from a part of a model, or for it, passes on, and each ends with the other."""
        pair = pipe, link
        self._joined_pipes.add(pair)

        def end_link(why: str) -> None:
            self._joined_pipes.discard(pair)
            link.close()

        def end_pipe(why: str) -> None:
            if not pipe.is_congested:
                self._joined_pipes.discard(pair)
            pipe.finish()

        relay(pipe, link, end_link, lambda frame: None)
        relay(link, pipe, end_pipe, lambda frame: self.node.reach_part(part, BatchId(frame.subject)))

    def _close_pipes(self) -> None:
        """Close all pipes to and from other machines."""
        for carrier in self._carriers:
            carrier.cancel()
        for pipe, link in self._joined_pipes:
            pipe.close()
            link.close()
        waiting: list[FrameLink] = [*self._carriers.values(), *self._pipes.values(), *self._callers.values()]
        for end in waiting:
            end.close()
        self._joined_pipes.clear()
        self._pipes.clear()
        self._callers.clear()

    def _keep(self, waiting: dict[WorkerId, Any], part: WorkerId, end: FrameLink) -> None:
        """Keep one end of the way from a part to the next until the other end is there, for `MEET_S_MAX`: a part that
        writes to a pipe from which nobody reads does nothing else."""
        waiting[part] = end

        def give_up() -> None:
            if waiting.get(part) is end:
                waiting.pop(part).close()

        self._after(MEET_S_MAX, give_up)

    def _on_drained(self, part: ReplicaId) -> None:
        if part in self._last_parts:
            self._send(Reached("drained", worker=part))

    def _on_difference(self, replica: ReplicaId, _stage: str, _variant: str, why: str) -> None:
        if replica not in self._unadopted:
            self._send(WorkerDiffers(replica, why))


def _drop(record: FromAgent) -> None:
    """There is nobody to tell."""


class AgentHost:
    """What an agent finds around it: its machine and the network. A simulation has its own."""

    gpus: AssignedGpus | None = None
    """None: replicas get no GPUs."""
    processes: Callable[..., WorkerProcesses] = WorkerProcesses
    machine = staticmethod(machine)
    capacity = staticmethod(capacity)
    quotas = staticmethod(detect)
    connect = staticmethod(connect)
    listen = staticmethod(NodeListener.listen)
    close_mapped = staticmethod(gc.collect)
    """What was mapped of shared memory, and is not used any more, keeps its files open."""


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
        around: AgentHost | None = None,
    ) -> None:
        self._make_cache, self._spares_max, self._around = make_cache, spares_max, around or AgentHost()
        self._join, self._name, self._token, self._host, self._tls = join, name, token, host, tls
        self._is_over, self._refused = False, ""
        self._session: AgentSession | None = None
        """Its node, from the first connection on."""

    async def serve(self) -> None:
        """Connect, serve, and connect again when the connection was lost. Raises `MachineError` if there is no deciding
        process for `GIVE_UP_S`, or if it sends this agent away."""
        try:
            await self._serve()
        finally:
            if self._session is not None:
                await self._session.close()
                self._session = None
        if self._refused:
            raise MachineError(f"the deciding process sends this agent away: {self._refused}")

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        lost_s, is_trying = loop.time(), False
        while not self._is_over:
            try:
                context = self._tls.client_context() if self._tls is not None else None
                link = await self._around.connect(self._join, self._token, Purpose.AGENT, context=context)
            except MachineError as error:
                if loop.time() - lost_s > GIVE_UP_S:
                    raise
                if not is_trying:
                    _log.warning("%s; trying again for %g s", error.what, GIVE_UP_S)
                is_trying = True
                await asyncio.sleep(RETRY_S)
                continue
            began_s = loop.time()
            why = await self._serve_over(link, context)
            self._around.close_mapped()
            lost_s, is_trying = loop.time(), False
            if not self._is_over:
                _log.warning("the connection to the deciding process has ended: %s", why)
                if lost_s - began_s < RETRY_S:  # its first message may be what ends the connection, each time
                    await asyncio.sleep(RETRY_S)

    async def _serve_over(self, link: NetworkLink, context: ssl.SSLContext | None) -> str:
        """Serve over one connection; returns why it has ended. `context` is for connections to others."""
        ended = asyncio.get_running_loop().create_future()

        def on_end(why: str) -> None:
            if not ended.done():
                ended.set_result(why)

        def close(record: Close) -> None:
            self._is_over, self._refused, records.acts = True, record.why, {}
            on_end(record.why)

        def set_up(record: AgentSetup) -> None:
            blocks = BlockClient(self._token, context)
            if self._session is None:
                self._session = AgentSession(
                    *(record, records.send, blocks, self._join, self._make_cache),
                    spares_max=self._spares_max,
                    name=self._name,
                    around=self._around,
                )
            else:
                self._session.resume(record, records.send, blocks)
            records.acts = {**self._session.acts, Close: close}

        def read(block: Address) -> memoryview:
            if self._session is None:
                raise ValueError("this agent has no blocks yet")
            return self._session.read(block)

        acts: dict[type, Callable[[Any], None]] = {AgentSetup: set_up, Close: close}
        records = RecordLink(asyncio.get_running_loop(), link, ToAgent, acts, on_end)
        server = BlockServer(read)
        files = FileServer(lambda: [] if self._session is None else self._session.models.caches)
        host = self._host or link.local_host
        own = self._tls.server_context() if self._tls is not None else None
        listener = await self._around.listen((host, 0), self._token, partial(self._accept, server, files), own)
        try:
            link.keep_alive()
            where = (host, listener.port)
            before, kept = ("", {}) if self._session is None else (self._session.server, self._session.kept())
            around = self._around
            who = self._name, __version__, os.getpid(), around.machine(), where, around.capacity().cores
            models = await asyncio.get_running_loop().run_in_executor(None, self._models)
            records.send(AgentHello(*who, before, kept, models))
            return str(await ended)
        finally:
            records.close()
            if self._session is not None:
                self._session.detach()
            await listener.close()
            server.close()
            files.close()

    def _accept(self, blocks: BlockServer, files: FileServer, link: NetworkLink) -> None:
        if link.purpose is Purpose.PARTS and self._session is not None:
            self._session.accept(link)
        else:
            (files if link.purpose is Purpose.WEIGHTS else blocks).accept(link)

    def _models(self) -> tuple[tuple[str, str], ...]:
        """The models that are here already, those that were used last first."""
        try:
            known = self._session.models.caches if self._session is not None else []
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
