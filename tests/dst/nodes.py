"""What lies under the agents of a simulated cluster: event loops in virtual time, worker processes, caches of models.

The agents themselves, their nodes and the backend of the deciding process are those that serve
(`sloop.serve.cluster`, `sloop.serve.node`). What they do to the world is simulated here, and in `tests.dst.agents` the
network. A simulated process is one object for each operating system's process: what it answers, and when, comes from
the truth of the simulator (`sloop.sim.truth`) and from the faults that act on its machine.
"""

import asyncio
from asyncio import AbstractEventLoop, Handle, Task, TimerHandle
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Protocol, cast

import msgspec
from msgspec import Struct

from sloop.actions import StartBatch
from sloop.cuda import CudaDevice
from sloop.errors import MachineError
from sloop.events import Finished, WorkerLost, WorkerReady
from sloop.serve.blocks import Block
from sloop.serve.cpu_quota import Grant
from sloop.serve.messages import (
    BatchFinished,
    BatchPassed,
    BatchRaised,
    CompleteWorker,
    ConnectParts,
    Free,
    PairSetup,
    PassedBatch,
    Reached,
    Report,
    Run,
    RunBatch,
    ShadowSetup,
    Threads,
    WorkerDiffers,
    encode,
)
from sloop.serve.node.node import LiveNode, NodeShadow, NodeWorker
from sloop.serve.protocols import StageSetup
from sloop.serve.transport import CLOSED, Frame, FrameKind
from sloop.serve.weights.sources import ModelSource
from sloop.serve.worker import STEPS
from sloop.sim.checkers import Violation
from sloop.sim.happenings import Pending
from sloop.sim.replicas import Truths
from sloop.units import NS_PER_S, ms
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, ReplicaId, RequestId, Worker, bounds_of

REAP_NS: Final = ms(2)
"""After a process was killed until it is reaped."""
EXIT_NS: Final = ms(1)
"""A worker takes so long to exit."""
Visits = list[tuple[int, int]]
"""The requests of a batch, each with its part, which travel in place of their tensors."""


def hashed(number: int) -> int:
    """A number from 0 to 255 that looks random."""
    return (number * 2654435761 + 0x9E3779B9) >> 13 & 0xFF


class Clock:
    """The virtual time."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns


class VirtualLoop(AbstractEventLoop):
    """The event loop of a simulated process. Its timers are entries of `pending`; when one is due, `run` it."""

    def __init__(self, pending: Pending, clock: Clock) -> None:
        self._pending, self._clock = pending, clock
        self._ready: deque[Handle] = deque()
        self.is_over = False
        """Whether the process has died: nothing of it runs any more."""
        self._failure: BaseException | None = None
        self._is_due = False
        """Whether its turn is to end."""

    def run(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function in this process, and then all that is due at once. Raises what fails in it."""
        self._within(call, *arguments)
        while self._ready and not self.is_over:
            handle = self._ready.popleft()
            if not handle._cancelled:
                self._within(handle._run)

    def do(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a function in this process, which is called more before its turn is over."""
        self._within(call, *arguments)
        if self._ready and not self._is_due:
            self._is_due = True
            self.call_at_ns(self._clock.now_ns, self._end_turn)

    def _end_turn(self) -> None:
        self._is_due = False

    def _within(self, call: Callable[..., object], *arguments: Any) -> None:
        if self.is_over:
            return
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            call(*arguments)
        finally:
            asyncio._set_running_loop(before)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        """The process dies."""
        self.is_over = True
        self._ready.clear()

    def call_at_ns(
        self, at_ns: int, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        """As `call_at`, exactly."""
        at_ns = max(at_ns, self._clock.now_ns)
        handle = TimerHandle(at_ns / NS_PER_S, callback, args, self, context)
        self._pending.add(at_ns, handle)  # type: ignore[arg-type]  # a happening of the cluster
        return handle

    # What asyncio calls

    def time(self) -> float:
        return self._clock.now_ns / NS_PER_S

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at_ns(self._clock.now_ns + round(delay * NS_PER_S), callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        return self.call_at_ns(round(when * NS_PER_S), callback, *args, context=context)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **given: Any) -> Task[Any]:
        return Task(coro, loop=self, **given)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Threads take no time here."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_over and self._failure is None and context.get("exception") is not None:
            self._failure = context["exception"]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None: ...


class Circumstances(Protocol):
    """What acts on a machine now."""

    clock: Clock
    stages: Mapping[str, Truths]
    fetches_bytes_per_s: float
    """How fast models come to a machine; 0: at once."""

    def acts(self, kind: str, node: str) -> int:
        """How many faults of a kind act on a node now."""
        ...

    def faults_of(self, requests: Sequence[RequestId]) -> Sequence[str | None]:
        """The faults that these requests carry."""
        ...


class SimulatedGpus:
    """The GPUs of a machine (`sloop.serve.gpus.AssignedGpus`)."""

    def device_of(self, spec: Any, memory_bytes: int) -> CudaDevice:
        return CudaDevice(f"{spec.node}/{spec.device}", spec.slot.share, memory_bytes)

    def lose(self, node: str, device: str) -> None:
        return None


class SimulatedQuotas:
    """Limits the processes of a machine (`sloop.serve.cpu_quota.CpuActuator`)."""

    def __init__(self, around: Circumstances, node: str, cores: float) -> None:
        self._around, self._node, self.capacity_cores = around, node, cores

    def prepare(self, pid: int) -> None: ...

    def confine(self, pid: int, cores: float) -> Grant:
        return Grant(cores)

    def resize(self, pid: int, cores: float) -> Grant:
        if self._around.acts("refused resizes", self._node):
            raise MachineError("the machine refuses")
        return Grant(cores)

    def join(self, pid: int, pool: str, cores: float) -> Grant:
        return Grant(cores)

    def read(self, pid: int) -> float:
        return 0.0

    def release(self, pid: int) -> None: ...

    def close(self) -> None: ...


class SimulatedProcesses:
    """Starts the processes of an agent (`sloop.serve.node.process.WorkerProcesses`)."""

    def __init__(self, around: Circumstances, node: str, loop: VirtualLoop, workers: Callable[[], LiveNode]) -> None:
        self.around, self.node, self.loop, self.workers = around, node, loop, workers
        self.alive: dict[int, SimulatedProcess] = {}
        """By process id, those that have not been reaped."""
        self._last = 0

    def start(self, device: CudaDevice | None = None) -> "SimulatedProcess":
        self._last += 1
        made = self.alive[self._last] = SimulatedProcess(self, self._last)
        return made

    def connect_parts(
        self, record: ConnectParts, before: "SimulatedProcess | None", after: "SimulatedProcess | None"
    ) -> None:
        out, into = self._pipe()
        for end, process in ((out, before), (into, after)):
            if process is None:
                end.close()
            else:
                process.use_pipe(end, is_output=end is out)

    def pipe(self, record: ConnectParts, part: "SimulatedProcess") -> "PipeEnd":
        ours, theirs = self._pipe()
        part.use_pipe(theirs, is_output=part._served.number == record.before)
        return ours

    def _pipe(self) -> "tuple[PipeEnd, PipeEnd]":
        one, other = PipeEnd(self.loop), PipeEnd(self.loop)
        one.other, other.other = other, one
        return one, other

    async def until_gone(self, within_s: float) -> None:
        while self.alive:  # noqa: ASYNC110  # virtual time costs nothing
            await asyncio.sleep(REAP_NS / NS_PER_S)


class _Next(Struct):
    """A batch that a worker with a part of a model is to compute."""

    batch: BatchId
    visits: Visits
    failure: bytes = b""
    """If a part before has failed on it."""
    is_part: bool = True
    """Whether it computes only its layers."""


class PipeEnd:
    """One end of a pipe between a part of a model and another one, or its agent (`sloop.serve.transport.PacedLink`)."""

    other: "PipeEnd"
    is_congested = False

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._came: deque[Frame | None] = deque()
        """What nobody has taken yet; None for the end."""
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_end: Callable[[str], None] = lambda why: None
        self.is_closed = False

    def attach(self, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]) -> None:
        self._on_frame, self._on_end = on_frame, on_end
        self._loop.call_at_ns(0, self._take)

    def send(self, kind: FrameKind, subject: int = 0, value: int = 0, payload: Sequence[Any] = ()) -> None:
        if not self.is_closed:
            self.other._put(Frame(kind, subject, value, memoryview(b"".join(payload))))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.other._put(None)

    finish = close

    def _put(self, frame: Frame | None) -> None:
        self._came.append(frame)
        self._loop.call_at_ns(0, self._take)

    def _take(self) -> None:
        while self._came and self._on_frame is not None and not self.is_closed:
            frame = self._came.popleft()
            if frame is None:
                self.close()
                self._on_end(CLOSED)
            else:
                self._on_frame(frame)


class SimulatedProcess:
    """The process of a worker, and its end of the link to its node (`sloop.serve.node.process.WorkerProcess`,
    `sloop.serve.transport.RecordLink`)."""

    popen = None
    state = None
    """The kernel says nothing of it, so all time counts in which it is silent."""

    def __init__(self, processes: SimulatedProcesses, pid: int) -> None:
        self._processes, self._loop, self._around = processes, processes.loop, processes.around
        self.pid = pid
        self.link = self.records = self
        self.acts: Mapping[type, Callable[[Any], None]] = {}
        self.on_end: Callable[[str], None] = lambda why: None
        self.is_over = False
        """Whether its node has closed its socket."""
        self.is_dead = self.is_hung = False
        self.worker: NodeWorker | None = None
        """What it serves as, once it was told."""
        self.batch: BatchId | None = None
        self.pair: tuple[SimulatedProcess, Worker] | None = None
        """Its shadow, and what that holds."""
        self._is_stopping = False
        self._after_it: PipeEnd | None = None
        self._before_it: PipeEnd | None = None
        self._waiting: deque[_Next | None] = deque()
        """The batches that it computes next, if it has a part of a model; None if no more come from the part before."""
        self._rest_ns = 0
        """How long loading the other layers of the model takes as a replica that starts."""
        self._does: dict[type, Callable[[Any], None]] = {
            StageSetup: self._set_up,
            ShadowSetup: self._set_up_shadow,
            RunBatch: self._run,
            CompleteWorker: self._complete,
            Threads: self._resize,
            PairSetup: self._pair,
            WorkerDiffers: lambda record: None,
            Free: lambda record: None,
        }

    # What the node does with it

    @property
    def is_alive(self) -> bool:
        return not self.is_dead

    def attach(self, acts: Mapping[type, Callable[[Any], None]], on_end: Callable[[str], None]) -> None:
        self.acts, self.on_end = acts, on_end

    def tell(self, record: Struct) -> None:
        self._soon(self._take, record)

    def end_output(self) -> None:
        self._soon(self._stop)

    def hold(self, block: object) -> None:
        raise AssertionError(f"{block} is in an arena, of which simulated workers have none")

    def close(self) -> None:
        self.is_over = True

    def use_pipe(self, pipe: PipeEnd, *, is_output: bool) -> None:
        """It gets its end of a pipe to or from another part."""
        if self.is_dead:
            pipe.close()
        elif is_output:
            self._after_it = pipe
        else:
            self._before_it = pipe
            pipe.attach(self._on_passed, lambda why: self._expect(None))

    def end(self, why: str, then: Callable[[], None]) -> None:
        self.is_over = self.is_dead = True
        self._close_pipes()
        self._loop.call_later(REAP_NS / NS_PER_S, self._reap, then)

    def _reap(self, then: Callable[[], None]) -> None:
        del self._processes.alive[self.pid]
        then()

    def explain(self, error: str) -> str:
        return "its process exited" if error == CLOSED else error

    # What it does

    def die(self) -> None:
        """It dies, which its node hears by its socket."""
        if not self.is_dead:
            self.is_dead = True
            self._close_pipes()
            self._soon(self._tell_end)

    def _close_pipes(self) -> None:
        for pipe in (self._before_it, self._after_it):
            if pipe is not None:
                pipe.close()

    def _tell_end(self) -> None:
        if not self.is_over:
            self.close()
            self.on_end(CLOSED)

    def _soon(self, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_at_ns(self._now_ns, call, *arguments)

    def _after(self, delay_ns: int, call: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_at_ns(self._now_ns + delay_ns, self._if_alive, call, *arguments)

    def _if_alive(self, call: Callable[..., object], *arguments: Any) -> None:
        if not (self.is_dead or self.is_hung):
            call(*arguments)

    @property
    def _now_ns(self) -> int:
        return self._around.clock.now_ns

    def _say(self, record: Struct) -> None:
        if not self.is_over:
            self.acts[type(record)](record)

    def _take(self, record: Struct) -> None:
        if not (self.is_dead or self.is_hung):
            self._does[type(record)](record)

    @property
    def _served(self) -> NodeWorker:
        assert self.worker is not None, "a process is told to serve before it is told what"
        return self.worker

    @property
    def _truths(self) -> Truths:
        return self._around.stages[self._served.spec.stage]

    def _become(self) -> NodeWorker:
        own = [each for each in self._processes.workers().workers.values() if each.process is cast(Any, self)]
        self.worker = own[0]
        return own[0]

    def _set_up(self, setup: StageSetup) -> None:
        worker = self._become()
        assert worker.number == setup.worker
        order, spec, starts = worker.order, worker.spec, self._truths.cold_start
        slow = 5 if self._around.acts("slow starts", self._processes.node) else 1
        whole_ns = starts.draw_ns(self._now_ns, spec, is_local=True) * slow
        own_ns = round(whole_ns * starts.share(spec, order.part.span)) if order.part is not None else whole_ns
        self._rest_ns, at_ns = whole_ns - own_ns, 0
        for step, length_ns in starts.steps(spec, own_ns):
            if length_ns and step in STEPS:
                self._after(at_ns, self._say, Reached(step))  # type: ignore[arg-type]  # one of these steps
            at_ns += length_ns
        if self._around.acts("failed starts", self._processes.node):
            self._after(ms(hashed(order.worker)), self.die)
        self._after(own_ns, self._say, Reached("ready"))

    def _set_up_shadow(self, setup: ShadowSetup) -> None:
        shadow = self._become()
        assert isinstance(shadow, NodeShadow)
        assert tuple(setup.blocks) == shadow.wanted.layers
        self._say(Reached("loading"))
        length_ns = self._truths.cold_start.shadow_ns(shadow.body.spec, shadow.wanted)
        self._after(length_ns, self._say, Reached("ready", b"its socket"))

    def _resize(self, order: Threads) -> None:
        if self.worker is not None and not isinstance(self.worker, NodeShadow):
            self._after(self._truths.resize.draw_ns(), self._say, Reached("resized"))

    def _pair(self, setup: PairSetup) -> None:
        self.pair = None
        if not setup.address:
            return
        found = self._processes.alive.get(setup.process)
        if found is None or found.is_dead:
            self._say(Report(WorkerLost(setup.shadow, "its shadow does not answer")))
            return
        self.pair = found, Worker(found._served.cores, setup.blocks)
        self._say(Report(WorkerReady(setup.shadow)))

    def _stop(self) -> None:
        self._is_stopping = True
        if self.batch is None and not (self.is_dead or self.is_hung):
            self._after(EXIT_NS, self.die)

    # Batches

    def _run(self, ordered: RunBatch) -> None:
        visits = _visits_of(ordered.order)
        if self._served.order.part is None:
            self._compute(ordered.batch, visits, is_part=False)
        else:  # it may compute one that passes
            self._expect(_Next(ordered.batch, visits, is_part=ordered.is_part))

    def _on_passed(self, frame: Frame) -> None:
        """The part before passes on a batch."""
        passed = msgspec.msgpack.decode(frame.payload[: frame.value], type=PassedBatch)
        visits = msgspec.msgpack.decode(frame.payload[frame.value :], type=Visits)
        self._expect(_Next(BatchId(frame.subject), visits, passed.failure))

    def _expect(self, batch: "_Next | None") -> None:
        self._waiting.append(batch)
        self._compute_next()

    def _compute_next(self) -> None:
        """Compute the next batch, unless one is being computed."""
        if self.batch is not None or not self._waiting or self.is_dead or self.is_hung:
            return
        found = self._waiting.popleft()
        if found is not None and found.failure:
            self._fail(found.batch, found.visits, found.failure, is_part=True)
        elif found is not None:
            self._compute(found.batch, found.visits, is_part=found.is_part)
        else:
            self._close_pipes()
            if self._is_last:
                self._say(Reached("drained"))
        self._compute_next()

    @property
    def _is_last(self) -> bool:
        order = self._served.order
        return order.place == len(order.spec.shape) - 1

    def _compute(self, batch: BatchId, visits: Visits, *, is_part: bool) -> None:
        if self.batch is not None:
            raise Violation(f"batch {batch} reaches worker {self._served.number}, which still runs {self.batch}")
        self.batch = batch
        requests = [RequestId(request) for request, _ in visits]
        size, node = len(visits), self._processes.node
        # Taken from the requests, so that a batch takes as long when other operations are removed.
        factor = 0.5 + hashed(requests[0] * 31 + size) / 512
        took_ns = round(self._mean_ns(size, is_part=is_part) * factor) << min(self._around.acts("slow node", node), 5)
        faults = self._around.faults_of(requests)
        self._after(took_ns, self._end_batch, batch, visits, took_ns, faults, is_part)

    def _mean_ns(self, size: int, *, is_part: bool) -> float:
        spec, service, order = self._served.spec, self._truths.service, self._served.order
        slot = spec.slot
        if is_part:
            bounds = bounds_of(order.spec.shape)
            return service.line_ns(spec.stage, spec.variant, slot, bounds, 0.0)[size][2 * order.place]
        if self.pair is not None and not self.pair[0].is_dead:
            return service.pair_speed(spec.stage, spec.variant, slot, self.pair[1]).means_ns[size]
        return service.speed(spec.stage, spec.variant, slot).means_ns[size]

    def _end_batch(
        self, batch: BatchId, visits: Visits, took_ns: int, faults: Sequence[str | None], is_part: bool
    ) -> None:
        node = self._processes.node
        if self._around.acts("lost reports", node):
            self.is_hung = True
            return
        if "deadly request" in faults:
            self.die()
            return
        self.batch = None
        if self._is_stopping:
            self._after(EXIT_NS, self.die)
        misfits = {at: "it does not fit" for at, each in enumerate(faults) if each == "misfit"}
        if "bad request" in faults or self._around.acts("failed batches", node) or (misfits and len(visits) == 1):
            self._fail(batch, visits, ModelFailure("the model raised").encode(), is_part=is_part)
        elif is_part and not self._is_last:
            self._pass_on(batch, visits, b"")
        else:
            blocks: list[Block | None] = [None if at in misfits else b"" for at in range(len(visits))]
            event = Finished(batch, self._served.number, took_ns, self._taken(visits))
            self._say(BatchFinished(event, blocks, misfits))
        self._compute_next()

    def _fail(self, batch: BatchId, visits: Visits, failure: bytes, *, is_part: bool) -> None:
        if is_part and not self._is_last:
            self._pass_on(batch, visits, failure)
        else:
            self._say(BatchRaised(batch, self._served.number, failure))

    def _pass_on(self, batch: BatchId, visits: Visits, failure: bytes) -> None:
        record = encode(PassedBatch(len(visits), [], [], [], {}, (), (), failure=failure))
        if self._after_it is not None:
            self._after_it.send(FrameKind.BYTES, batch, len(record), [record, encode(visits)])
        self._say(BatchPassed(batch))

    def _taken(self, visits: Visits) -> tuple[tuple[int, ...], ...]:
        """The edges that the requests of a batch take."""
        branches = self._truths.branches
        if not branches:
            return ()
        requests, parts = zip(*visits, strict=True)
        order = StartBatch(BatchId(0), ReplicaId(0), self._served.spec.stage, requests, parts)
        return branches.taken(order)

    def _complete(self, order: CompleteWorker) -> None:
        spec = self._served.spec
        length_ns = self._truths.cold_start.rest_ns(spec, spec.slot, self._rest_ns)
        self._after(length_ns, self._say, Reached("complete"))


def _visits_of(order: Run) -> Visits:
    return [msgspec.msgpack.decode(block, type=tuple[int, int]) for block in order.blocks if isinstance(block, bytes)]


class _Coming:
    """A file on its way to a cache."""

    def __init__(self, task: "Task[None]") -> None:
        self.task, self.callers = task, 0


class SimulatedCache:
    """The models on a machine (`sloop.serve.weights.cache.WeightsCache`). `sizes_bytes` has those of all files."""

    def __init__(self, around: Circumstances, node: str, sizes_bytes: Mapping[str, int]) -> None:
        self._around, self._node, self._sizes_bytes = around, node, sizes_bytes
        self._there: dict[Path, ModelSource] = {}
        self._coming: dict[str, _Coming] = {}
        self._pins: Counter[Path] = Counter()
        self._unwanted: set[Path] = set()
        self.models = SimpleNamespace(models=self._listed)

    def _listed(self) -> list[Any]:
        file = SimpleNamespace
        return [
            SimpleNamespace(key=each.key, record=SimpleNamespace(files=[file(sha256=each.sha256)]))
            for each in self._there.values()
        ]

    def _path(self, source: ModelSource) -> Path:
        return Path("/cache") / source.key

    async def fetch(
        self, source: ModelSource, progress: object = None, *, pin: bool = False, nearer: object = None
    ) -> Path:
        path = self._path(source)
        if path not in self._there:
            coming = self._coming.get(source.key)
            if coming is None:
                task = asyncio.get_running_loop().create_task(self._bring(source))
                coming = self._coming[source.key] = _Coming(task)
                task.add_done_callback(partial(self._forget, source.key, coming))
            coming.callers += 1
            try:
                await asyncio.shield(coming.task)
            except asyncio.CancelledError:
                if coming.callers == 1 and not coming.task.done():
                    coming.task.cancel()
                    self._forget(source.key, coming)
                raise
            finally:
                coming.callers -= 1
        self._pins[path] += pin
        return path

    async def _bring(self, source: ModelSource) -> None:
        rate = self._around.fetches_bytes_per_s
        if rate:
            slow = self._around.acts("slow fetch", self._node)
            await asyncio.sleep(self._sizes_bytes[source.location] / rate * (1 + 9 * slow))
        if self._around.acts("failed fetch", self._node):
            raise MachineError("the store cannot be reached")
        self._there[self._path(source)] = source

    def _forget(self, key: str, coming: _Coming, _: object = None) -> None:
        if self._coming.get(key) is coming:
            del self._coming[key]

    def left(self) -> "SimulatedCache":
        """What another process finds when the one that has used it has died."""
        found = SimulatedCache(self._around, self._node, self._sizes_bytes)
        found._there = self._there
        return found

    def release(self, path: Path) -> None:
        self._pins[path] -= 1
        if not self._pins[path] and path in self._unwanted:
            self._unwanted.discard(path)
            self._there.pop(path, None)

    def apart(self) -> "SimulatedCache":
        return SimulatedCache(self._around, self._node, self._sizes_bytes)

    async def evict(self, source: ModelSource) -> None:
        path = self._path(source)
        if self._pins[path] > 0:
            self._unwanted.add(path)
        else:
            self._there.pop(path, None)

    async def discard(self, source: ModelSource) -> None: ...

    async def remove(self) -> None:
        await self.close()

    async def close(self) -> None:
        for coming in self._coming.values():
            coming.task.cancel()
        self._pins.clear()
