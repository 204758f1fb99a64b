"""Workers of one model that share all cores and run as in a server: one process runs them through the server's backend,
with its frames and its shared memory. There are no edges, clients or deciding process.

`sloop profile --sharing` measures S(k) with them. So S(k) includes the time in sockets, in the workers' loops and in
the process that hands out batches, which overlaps with the batches of other workers. With small batches this matters:
three or four workers on two cores serve more than two workers do.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter_ns
from typing import Final

import uvloop

from sloop.actions import StartWorker
from sloop.errors import InputError, MachineError
from sloop.events import Event, Finished, WorkerLost, WorkerReady
from sloop.machine import capacity
from sloop.profile.examine import ExaminedModel
from sloop.profile.model import input_shapes, is_python, onnx_runtime, synthesise
from sloop.profile.sharing import RUNS_MIN
from sloop.serve.blocks import ARENA_BYTES, Block, write_block
from sloop.serve.cpu_quota import CpuActuator, detect
from sloop.serve.dataflow import APPLICATION, Assembly, Need, Source, StageWiring
from sloop.serve.messages import Run
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import Tensor, elements_of
from sloop.units import NS_PER_S
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Slot

SILENCE_S: Final = 300.0
"""If no worker reports for this long, they count as hanging."""


class SharedWorkers:
    """Workers whose cores are only reserved, and what they report (`BackendListener`). Create them inside the running
    event loop; `start` before the first batch, and `close` at the end."""

    def __init__(
        self,
        known: ExaminedModel,
        rows: Mapping[str, tuple[int, ...]],
        batch: int,
        workers: int,
        actuator: CpuActuator | None = None,
    ) -> None:
        """`rows` gives one row's shape of inputs with open dimensions. Each request has one row; if the model cannot
        join rows, one request has all rows of the batch. InputError for a batch that the model does not take,
        MachineError if the system has no shared memory."""
        servables = {("stage", "model"): Servable(known.file, known.signature, known.obstacle)}
        sources = tuple((Source(APPLICATION, place),) for place in range(len(known.signature.inputs)))
        wiring = StageWiring("stage", Assembly(sources, (Need(APPLICATION, "whole"),)))
        cores = capacity().cores
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._failure: ModelFailure | None = None
        self._arenas = Arenas()
        held = self._arenas.make(ARENA_BYTES, self._free)
        self._arena = Arena(held.number, held.fd)
        each, requests = (batch, 1) if known.obstacle else (1, batch)
        try:
            self._blocks = [self._block(known, rows, each, seed) for seed in range(requests)]
        except BaseException:
            self._arenas.close()
            raise
        self._backend = LiveNode(
            servables,
            {"stage": wiring},
            actuator or detect().actuator,
            arenas=self._arenas,
            nodes=[Node("here", "local", cores, 1 << 40)],
        )
        self._backend.attach(self)
        self.count = workers
        self._spec = ReplicaSpec("stage", "model", Slot(cores / workers, "local", is_capped=False), "here")
        self._number = 0

    def _block(self, known: ExaminedModel, rows: Mapping[str, tuple[int, ...]], length: int, seed: int) -> Block:
        """The inputs of a request with `length` rows."""
        shapes = input_shapes(known.signature, length, rows, where=known.file)
        made = synthesise(known.signature, shapes, seed=seed)
        tensors = [
            Tensor(port.datatype, shapes[port.name], elements_of(made[port.name])) for port in known.signature.inputs
        ]
        block = write_block(tensors, self._arena)
        if isinstance(block, Address):
            self._arenas.hold(block)
        return block

    def _free(self, block: Address) -> None:
        self._arena.free(block)

    def on_event(self, event: Event) -> None:
        """See `BackendListener`."""
        self._events.append(event)
        self._arrived.set()

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        """See `BackendListener`. Outputs are not read."""
        for block in blocks:
            if isinstance(block, Address):
                self._arenas.free(block)
        self.on_event(event)

    def on_failed(self, batch: BatchId, replica: ReplicaId, failure: ModelFailure) -> None:
        """See `BackendListener`."""
        self._failure = failure
        self._arrived.set()

    async def start(self) -> None:
        """Start all workers, one after the other. InputError if the model fails, MachineError if a worker does not
        start."""
        for number in range(self.count):
            self._backend.order(StartWorker(ReplicaId(number), self._spec))
            while not isinstance(event := await self._next(), WorkerReady):
                if isinstance(event, WorkerLost):
                    what = f"worker {number + 1} of {self.count} did not start: {event.error}"
                    raise MachineError(what, help="measure fewer workers together (--together)")

    def pid(self, worker: ReplicaId) -> int | None:
        """The process id of a worker."""
        return self._backend.pid(worker)

    def run(self, worker: ReplicaId, size: int) -> None:
        """Start a batch of `size` requests on a worker that runs none."""
        self._number += 1
        self._backend.run(BatchId(self._number), worker, Run(size, list(self._blocks[:size])))

    async def ended(self) -> ReplicaId:
        """Wait until a batch ends; returns its worker. InputError if the model fails, MachineError if a worker dies."""
        while True:
            event = await self._next()
            if isinstance(event, Finished):
                return event.replica
            if isinstance(event, WorkerLost):
                what = f"worker {event.worker + 1} of {self.count} has died: {event.error}"
                raise MachineError(what, help="measure smaller batches, or fewer workers together")

    async def _next(self) -> Event:
        while not self._events:
            self._arrived.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._arrived.wait()
            except TimeoutError as error:
                what = f"no worker has reported for {SILENCE_S:g} s"
                raise MachineError(what, help="measure smaller batches, or fewer workers together") from error
            if self._failure is not None:
                what = f"a batch fails: {self._failure.detail or self._failure.summary}"
                raise InputError(what, help="measure smaller batches")
        return self._events.popleft()

    async def stream_ns(self, workers: int, seconds: float, size: int | None = None) -> float:
        """The mean time from the end of a batch to the end of the next one on the same worker, while the first
        `workers` run batches back to back. Each worker gets its next batch as soon as this process can send it. The
        first batch of each worker warms up. Batches that end after another worker has stopped do not count."""
        size = len(self._blocks) if size is None else size
        running = [ReplicaId(number) for number in range(workers)]
        ends_ns: dict[ReplicaId, list[int]] = {worker: [] for worker in running}
        deadline_ns = perf_counter_ns() + round(seconds * NS_PER_S)
        for worker in running:
            self.run(worker, size)
        while len(min(ends_ns.values(), key=len)) <= RUNS_MIN or perf_counter_ns() < deadline_ns:
            worker = await self.ended()
            ends_ns[worker].append(perf_counter_ns())
            self.run(worker, size)
        for _ in running:
            await self.ended()
        return fmean(after - before for ends in ends_ns.values() for before, after in pairwise(ends))

    async def close(self) -> None:
        """Stop the workers, and free their memory."""
        await self._backend.close()
        self._arenas.close()


class SharedStream:
    """Streams of batches through `SharedWorkers`, for callers without an event loop (`BatchStream`)."""

    def __init__(self, runner: asyncio.Runner, workers: SharedWorkers, file: Path) -> None:
        self.runner, self.workers, self._file = runner, workers, file

    def mean_ns(self, workers: int, seconds: float) -> float:
        """See `SharedWorkers.stream_ns`; batches are full."""
        return self.runner.run(self.workers.stream_ns(workers, seconds))

    def software(self) -> str:
        """See `BatchStream`."""
        return "" if is_python(self._file) else f"ONNX Runtime {onnx_runtime().__version__}"


@contextlib.contextmanager
def shared_stream(
    known: ExaminedModel, rows: Mapping[str, tuple[int, ...]], batch: int, workers: int
) -> Iterator[SharedStream]:
    """Workers of a model that have loaded it. They end with the context. Errors are those of `SharedWorkers`."""

    async def started() -> SharedWorkers:
        made = SharedWorkers(known, rows, batch, workers)
        try:
            await made.start()
        except BaseException:
            await made.close()
            raise
        return made

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(started())
        try:
            yield SharedStream(runner, made, Path(known.file))
        finally:
            runner.run(made.close())
