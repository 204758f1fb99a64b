"""Runs each replica as a worker process on this machine, with one socket and one CPU limit per process.

Every order gets exactly one report. The end of a worker's socket reveals its death; the backend reports it after the
process is reaped and its cores are free. No worker outlives the server, and every wait is bounded (`START_S_MAX`,
`STOP_S_MAX`, `SHRINK_S_MAX`). The backend handles no requests, deadlines or policies.

To grow a replica, the backend first raises the CPU quota and then the worker's thread count; to shrink it, the other
way round. Otherwise threads would wait for each other inside too small a quota. A worker that runs a batch cannot
change its threads; the quota then follows after `SHRINK_S_MAX` regardless. A replica whose cores are only reserved
(`Slot.is_capped`) gets as many threads as its node has cores, and shares one quota, that of the node, with all such
replicas there; to resize it changes the reservation alone. While it starts, a replica has at least
`START_CORES_MIN`: with a quarter of a core, loading would take four times as long as its profile says.

Starting Python and loading its libraries takes longer than loading most models. So *spare* workers are started in
advance, as many as replicas were lately started together, and wait for a model. A thread starts them one after the
other, at the lowest priority, while no replica starts. A start never depends on a spare worker: a replica takes one
only if it waits, and if that worker dies or does not answer, the replica gets another process.

A replica with a GPU gets a new process, because CUDA reads the environment with which a process began (`sloop.cuda`).
If its GPU has failed, the loss of the GPU is reported before that of the replica, so that the core does not start the
next one there.

A shadow is one more worker process, which connects with the process of its replica (`sloop.serve.shadows`). It ends
with its replica, and a replica has ended only when its shadow has.

Replicas may start as the parts of one model, and serve together (`sloop.serve.backends.pipelines`). Models are read
where they are, so transfers end as soon as they are ordered, and a part needs no transfer to load the other layers.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from asyncio import AbstractEventLoop, Future, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import structs

from sloop.actions import (
    AcquireNode,
    AdoptWorker,
    CancelTransfer,
    Evict,
    Order,
    ReleaseNode,
    ResizeWorker,
    StartWorker,
    StopWorker,
    Transfer,
)
from sloop.cuda import CudaDevice, is_present
from sloop.errors import MachineError
from sloop.events import (
    BatchLost,
    BatchSilent,
    Finished,
    NodeReady,
    NodeReleased,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.machine import capacity
from sloop.memory import own_bytes
from sloop.profile.model import is_modelled
from sloop.profile.profile import START_CORES_MIN
from sloop.serve.backends import KnownStages
from sloop.serve.backends.pipelines import ProcessPipeline, check_part, joined
from sloop.serve.blocks import ARENA_BYTES
from sloop.serve.cpu_quota import CpuActuator, Grant
from sloop.serve.dataflow import StageWiring
from sloop.serve.gpus import AssignedGpus
from sloop.serve.heartbeat import LOOK_S, Silence, process_state
from sloop.serve.machine_watch import watch
from sloop.serve.messages import BatchDone, PairSetup, PassedBatch, Run, ShadowSetup, StageSetup, decoder, encode
from sloop.serve.processes import kill, spawn
from sloop.serve.protocols import BackendListener, CutModel, Servable, SpareProcesses
from sloop.serve.transport import (
    CLOSED,
    Frame,
    FrameKind,
    ProcessLink,
    ProtocolError,
    socket_pair,
)
from sloop.serve.worker import MILLIONTHS, STEPS
from sloop.shared_memory import Address, Arenas, HeldArena
from sloop.units import s
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Worker, WorkerId

START_S_MAX: Final = 300.0
"""Seconds after which a worker that is not ready is killed. Generous, because a large model on a fraction of a core
loads slowly."""
STOP_S_MAX: Final = 2.0
"""Seconds after the order to stop at which a worker that has not exited is killed."""
SHRINK_S_MAX: Final = 0.010
"""How long a smaller quota waits for the worker to reduce its threads: one scheduling period."""
SPARES_AFTER_S: Final = 1.0
"""Spare workers are started this long after the last replica was, because that replica needs the cores first."""
SPARES_FOR_S: Final = 600.0
"""How long the number of replicas that were started together is remembered."""
STARTS_MAX: Final = 256
"""Of which it is remembered."""
HUMBLE_S_MAX: Final = 10.0
"""Seconds after which a spare worker that is started at the lowest priority and does not wait yet is killed: all cores
are busy. The next one is started at the usual priority, and takes 0.3 s of a core."""
SPARE_S_MAX: Final = 60.0
"""The same for one of the usual priority, which may have to read libraries from a slow disk."""
TAKEN_S_MAX: Final = 5.0
"""Seconds after which a spare worker that was taken and has not begun to load is replaced. It usually takes some ms."""
PATIENCE: Final = 2.0
PATIENCE_MS_MIN: Final = 100.0
"""A shadow counts as hanging after this multiple of the predicted time (AsyFunc's specification, section 2.10) plus
this long, which allows for delays on a busy machine."""
REAP_S: Final = 0.002
"""How often to check whether a process has exited after its socket closed; one or two checks are usually enough."""

NONE: Final = ReplicaId(-1)
NOT_NEEDED: Final = "it is not needed"
_log: Final = logging.getLogger("sloop.backend")


class _Replica:
    """The state of one worker process. A spare one has no replica yet."""

    def __init__(self, replica: ReplicaId = NONE) -> None:
        self.id = replica
        self.process: subprocess.Popen[bytes] | None = None
        self.link: ProcessLink | None = None
        self.arena: HeldArena | None = None
        self.freed: list[Address] = []
        """Blocks in its arena of which it is told at the end of this turn of the event loop."""
        self.timer: TimerHandle | None = None
        self.is_ready = self.is_stopping = self.is_dying = False
        self.is_joining = False
        """Whether requests may share its forward passes."""
        self.is_busy = self.is_humble = self.is_waiting = False
        """Of a spare one: whether a thread starts or prepares its process, whether that begins with the lowest
        priority, and whether it can be taken."""
        self.told: ReplicaSpec | None = None
        """The order to serve that it got as a spare worker, until it has begun to load."""
        self.batch: BatchId | None = None
        self.visits = 0
        """Of the batch that runs."""
        self.looked_at: BatchId | None = None
        """The batch that ran at the last look."""
        self.silence = Silence()
        """Since then."""
        self.cores = 0.0
        """Of its slot."""
        self.pool_cores = 0.0
        """If they are not a cap: the cores of its node, which it shares with all such replicas there; otherwise 0."""
        self.device: CudaDevice | None = None
        self.has_gpu_failed = False
        self.spec: ReplicaSpec | None = None
        self.shadow: _Replica | None = None
        """The process of its shadow, ready or starting."""
        self.beside: _Beside | None = None
        """Of a shadow: whose it is."""
        self.part: Worker | None = None
        self.place = 0
        self.pipeline: ProcessPipeline | None = None
        """If it starts as a part of a model: which one, and the pipeline in which it serves; None if another process
        passes its batches on."""
        self.completes = False
        """Whether it was ordered to load the other layers and has not done so yet."""
        self.shrink_to: float | None = None
        self.shrink_timer: TimerHandle | None = None
        self.error = ""


class _Beside(NamedTuple):
    """The state of a process that is a shadow."""

    body: _Replica
    wanted: Worker
    cut: CutModel
    address: list[bytes]
    """Of its socket, once it has loaded its blocks."""


class LocalBackend(KnownStages):
    """Runs worker processes on this machine. Create it inside the running event loop.

    `servables` maps (stage, variant) to its model, `wirings` each stage to how its inputs are assembled; workers write
    their outputs into `arenas`, and read those of `holders`, by default of this process. `nodes` are those that the
    core may acquire, which are this machine and therefore always there, and `gpus` their GPUs. Each worker prepares
    sessions for 1 to `threads_prepared` threads in the background, so that its first resize is as fast as later ones.
    Each session costs memory; if there are more counts than a runtime keeps, sessions are created when they are first
    needed. At most `spares_max` workers are started ahead.
    """

    def __init__(  # noqa: PLR0913  # what stands around worker processes
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        actuator: CpuActuator,
        *,
        arenas: Arenas | None = None,
        holders: Mapping[int, int] | None = None,
        nodes: Iterable[Node] = (),
        gpus: AssignedGpus | None = None,
        threads_prepared: int = 0,
        spares_max: int = 0,
        start_s_max: float = START_S_MAX,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(servables, wirings, threads_prepared)
        self._actuator = actuator
        self._arenas = Arenas() if arenas is None else arenas
        self._holders = dict(holders or {0: os.getpid()})
        self._nodes = {node.name: node for node in nodes}
        self._gpus = gpus
        self._start_s_max = start_s_max
        self._loop = loop or asyncio.get_running_loop()
        self._replicas: dict[WorkerId, _Replica] = {}
        """Shadows too."""
        self._spares: list[_Replica] = []
        self._spares_max = spares_max
        self._spares_timer: TimerHandle | None = None
        self._spare_failures = 0
        """How many have ended, one after the other, before they waited."""
        self._spawner = ThreadPoolExecutor(1, "sloop-spawn")
        """Starts their processes, which end with its *thread* (`sloop.serve.processes.die_with`). The thread lives as
        long as this backend, because a pool of one never ends its thread before `shutdown`."""
        self._starts: deque[float] = deque(maxlen=STARTS_MAX)
        """When replicas were started, the latest last."""
        self._processes: set[_Replica] = set()
        """All that have not been reaped."""
        self._pipelines: dict[WorkerId, ProcessPipeline] = {}
        """Those of which not all parts have been ordered."""
        self.on_passed: Callable[[BatchId, ReplicaId, int, PassedBatch], None] | None = None
        """If another process passes batches on between parts: called when a part has run its layers on one, with how
        long that took in ns. That process orders with `run_part` and `complete_part`."""
        self._listener: BackendListener | None = None
        self._watching: asyncio.Task[None] | None = None
        self.on_spares: Callable[[], None] = lambda: None
        """Called when the workers that wait have become more or fewer."""
        self._emptied = asyncio.Event()
        self._look_timer: TimerHandle | None = None
        self._done, self._passed = decoder(BatchDone), decoder(PassedBatch)

    def learn(
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None:
        super().learn(servables, wirings, threads_prepared=threads_prepared)
        for replica in self._replicas.values():
            spec = replica.spec
            lone = spec is not None and servables.get((spec.stage, spec.variant))
            if lone and lone.obstacle and replica.is_joining and replica.link is not None:
                replica.is_joining = False
                replica.link.send(FrameKind.ALONE)

    def attach(self, listener: BackendListener) -> None:
        self._listener = listener
        self._start_spares_later()
        self._look_later()

    async def open(self) -> None:
        """This machine is there; from now on its limits are watched."""
        self._watching = self._loop.create_task(watch(tuple(self._nodes.values()), self.refit, capacity()))

    def pid(self, worker: WorkerId) -> int | None:
        """The process id of a worker, for monitoring and fault tests."""
        found = self._replicas.get(worker)
        return found.process.pid if found and found.process else None

    def spares(self) -> list[int]:
        """The process ids of workers that wait for a model."""
        return [spare.process.pid for spare in self._spares if spare.process is not None and spare.is_waiting]

    def spare_processes(self) -> dict[str, SpareProcesses]:
        """See `sloop.serve.protocols.Backend`. All nodes are this machine, which is therefore named `local`."""
        pids = self.spares()
        return {"local": SpareProcesses(len(pids), sum(map(own_bytes, pids)))}

    def refit(self, nodes: Sequence[Node], cores: float) -> None:
        """This machine, and so its nodes, have other capacities from now on; `cores` are all that it has."""
        self._actuator.capacity_cores = cores
        for node in nodes:
            known = self._nodes[node.name]
            made = structs.replace(known, cores=node.cores, memory_bytes=node.memory_bytes)
            if made != known:
                self._nodes[node.name] = made
                if not node.on_demand:
                    self._report(NodeReady(made))
        for replica in [each for each in self._replicas.values() if each.is_ready and not each.is_dying]:
            if replica.pool_cores:
                replica.pool_cores = self._pool_cores(replica)
                self._join_pool(replica)
            elif replica.cores >= cores:
                self._actuate(replica, replica.cores)  # all cores may be written in another way than a part of them

    def order(self, order: Order) -> None:
        """See `Backend`. All nodes are this machine, and models are read where they are, so nodes and transfers are
        there at once, and nothing was brought here that could be deleted."""
        match order:
            case StartWorker():
                self._start(order)
            case StopWorker():
                self._stop(order.worker)
            case ResizeWorker():
                self._resize(order.worker, order.cores)
            case AdoptWorker():
                why = "workers of this machine have ended with the server that started them"
                self._report(WorkerLost(order.worker, why))
            case Transfer():
                for node in order.receivers:
                    self._report(Transferred(order.transfer, node))
            case AcquireNode():
                self._report(NodeReady(self._nodes[order.node]))
            case ReleaseNode():
                self._report(NodeReleased(order.node))
            case CancelTransfer() | Evict():
                pass

    def _start(self, order: StartWorker) -> None:
        if order.replica is not None:
            self._start_shadow(order, order.replica)
            return
        replica, spec = order.worker, order.spec
        self._replicas[replica] = made = _Replica(replica)
        self._starts.append(self._loop.time())
        self._start_spares_later()
        self._report(WorkerProgressed(replica, "spawning"))
        try:
            made.device = self._device_of(spec)
            if order.pipeline is not None:
                self._join(made, order)
            if made.device is None and (spare := self._taken_spare()) is not None:
                spare.id, spare.told = replica, spec
                spare.part, spare.place, spare.pipeline = made.part, made.place, made.pipeline
                self._replicas[replica] = made = spare
            else:
                self._spawn(made)
            made.spec = spec
            self._set_up(made, spec)
        except (OSError, MachineError) as error:
            made.told = None
            self._give_up(made, str(error))

    def _stop(self, worker: WorkerId) -> None:
        found = self._replicas.get(worker)
        if found is None:
            self._report(WorkerStopped(worker))
            return
        found.is_stopping = True
        if found.is_dying:
            return
        if found.beside is not None and found.is_ready:
            self._tell_pair(found, found.beside, is_over=True)
        if found.link is not None and found.is_ready and found.batch is None:
            found.link.send(FrameKind.STOP)
            self._set_timer(found, STOP_S_MAX, "it did not stop")
        else:
            self._give_up(found, "it was stopped")

    def give_up(self, replica: ReplicaId, why: str) -> None:
        """Kill a replica that cannot serve; reported as `WorkerLost`."""
        found = self._replicas.get(replica)
        if found is not None:
            self._give_up(found, why)

    def _resize(self, replica: ReplicaId, cores: float) -> None:
        found = self._replicas.get(replica)
        if found is None or found.process is None or found.link is None or found.is_dying:
            return  # the loss of the replica has been or will be reported
        if not found.is_ready or found.pool_cores:
            found.cores = cores  # applied in `_on_ready`, or only reserved
            if not found.pool_cores:
                self._send_threads(found, Grant(cores))
            self._report(WorkerResized(replica, cores))
            return
        self._finish_shrink(found)
        if cores < found.cores:
            self._send_threads(found, Grant(cores))
            found.shrink_to = cores
            found.shrink_timer = self._loop.call_later(SHRINK_S_MAX, self._finish_shrink, found)
            return
        grant = self._actuate(found, cores)
        if grant is not None:
            self._send_threads(found, grant)
            self._report(WorkerResized(replica, grant.cores))

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        found = self._replicas.get(replica)
        if found is None or found.link is None or found.is_dying:
            return  # the loss of the replica will be reported, which covers its batch
        assert found.batch is None, f"batch {batch} for replica {replica}, which still runs batch {found.batch}"
        found.batch, found.visits = batch, order.visits
        pipeline = found.pipeline
        if pipeline is None or found.part is None or not pipeline.takes(found.place, batch, order):
            found.link.send(FrameKind.RUN, batch, time.monotonic_ns(), [encode(order)])

    def _look_later(self) -> None:
        self._look_timer = self._loop.call_later(LOOK_S, self._look, self._loop.time())

    def _look(self, last_s: float) -> None:
        """Report the batches whose workers are silent, once for each second: the core knows if that is too long."""
        self._look_later()
        since_s = self._loop.time() - last_s
        for id, replica in list(self._replicas.items()):
            batch, silence, process = replica.batch, replica.silence, replica.process
            if batch is None or batch != replica.looked_at:
                replica.looked_at = batch
                silence.end()
            elif process is not None and not replica.is_dying:
                before_s = int(silence.counted_s)
                silence.grow(since_s, process_state(process.pid))
                if int(silence.counted_s) > before_s:
                    self._report(BatchSilent(batch, id, s(silence.counted_s)))

    async def close(self) -> None:
        self._listener = None
        if self._look_timer is not None:
            self._look_timer.cancel()
        self._spares_max = 0
        if self._watching is not None:
            self._watching.cancel()
        for replica in list(self._replicas):
            self._stop(replica)
        for spare in list(self._spares):
            self._give_up(spare, NOT_NEEDED)
        if self._processes:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), 2 * STOP_S_MAX)
        self._spawner.shutdown(wait=False)
        self._actuator.close()

    # Starting and stopping processes

    def _spawn(self, replica: _Replica) -> None:
        """Start a process, which does not know yet what it serves."""
        with self._connect(replica) as theirs:
            arguments, fds = self._inherited(replica, theirs)
            replica.process = spawn("sloop.serve.worker", arguments, fds, environment=self._environment(replica.device))

    def _device_of(self, spec: ReplicaSpec) -> CudaDevice | None:
        """The GPU of a replica; None if its slot has none. MachineError if there is no such GPU here."""
        if spec.device is None or is_modelled(spec.slot.accelerator):
            return None
        if self._gpus is None:
            what = f"it needs {spec.slot.accelerator or 'an accelerator'} (device {spec.device!r} of {spec.node})"
            raise MachineError(f"{what}, but replicas get GPUs only on the machine of the server, without agents")
        bytes_max = self._servables[spec.stage, spec.variant].device_bytes.get(spec.slot.hardware, 0)
        return self._gpus.device_of(spec, bytes_max)

    def _environment(self, device: CudaDevice | None = None) -> dict[str, str]:
        """The variables of a worker: where GPUs are declared, it sees its own and no other."""
        return {} if self._gpus is None else self._gpus.environment(device)

    def _connect(self, replica: _Replica) -> socket.socket:
        """Make the socket and the arena of a process. Returns its end of the socket."""
        ours, theirs = socket_pair()
        replica.link = ProcessLink(
            self._loop,
            ours,
            lambda frame: self._on_frame(replica, frame),
            lambda why: self._give_up(replica, why),
        )
        self._processes.add(replica)
        try:
            replica.arena = self._arenas.make(ARENA_BYTES, lambda block: self._free(replica, block))
        except BaseException:
            theirs.close()
            raise
        return theirs

    def _inherited(self, replica: _Replica, theirs: socket.socket) -> tuple[tuple[int, ...], list[int]]:
        """The arguments of a worker process, and the file descriptors that it inherits."""
        fd, arena = theirs.fileno(), replica.arena
        if arena is None:
            return (fd, os.getpid(), 0, -1), [fd]
        return (fd, os.getpid(), arena.number, arena.fd), [fd, arena.fd]

    def _taken_spare(self) -> _Replica | None:
        """The spare worker that has waited longest, if there is one that has not just died."""
        for spare in [spare for spare in self._spares if spare.is_waiting]:
            if spare.process is not None and spare.process.poll() is None:
                self._spares.remove(spare)
                self.on_spares()
                return spare
            self._give_up(spare, CLOSED)
        return None

    def _pool_cores(self, replica: _Replica) -> float:
        """The cores that a replica without a cap shares with all others of its node."""
        node = self._nodes.get(replica.spec.node or "") if replica.spec is not None else None
        return min(self._actuator.capacity_cores, node.cores if node is not None else inf)

    def _start_again(self, failed: _Replica, spec: ReplicaSpec) -> None:
        """A replica has taken a spare worker that does not work: it gets a new process."""
        _log.warning("replica %d starts again, with another process: %s", failed.id, failed.error)
        self._replicas[failed.id] = made = _Replica(failed.id)
        made.spec, made.part, made.place, made.pipeline = spec, failed.part, failed.place, failed.pipeline
        failed.part = failed.pipeline = None
        try:
            self._spawn(made)
            self._set_up(made, spec.with_cores(failed.cores))
        except (OSError, MachineError) as error:
            self._give_up(made, str(error))

    def _set_up(self, replica: _Replica, spec: ReplicaSpec) -> None:
        """Limit the cores of a process, and tell it what it serves: a spare one begins at once, and threads that it
        starts before it is limited might not be."""
        assert replica.process is not None
        assert replica.link is not None
        servable, cores = self._servables[spec.stage, spec.variant], spec.cores
        if not spec.slot.is_capped and not spec.slot.accelerator:
            replica.pool_cores = self._pool_cores(replica)
        batchable = not servable.obstacle and servable.signature.has_rows
        # What another process starts here has the model's blocks only, from which all replicas load it.
        is_cut = replica.part is not None or (
            servable.cut is not None
            and (servable.cut.for_shadows or self.on_passed is not None)
            and replica.device is None
        )
        setup = StageSetup(
            *(self._wirings[spec.stage], servable.signature, batchable, servable.model),
            threads=Grant(replica.pool_cores or cores).threads,
            prepared=self._threads_prepared,
            holders=self._holders,
            blocks=servable.cut.blocks if servable.cut is not None and is_cut else (),
            layers=replica.part.span if replica.part is not None else None,
            device=replica.device,
            batch_max=servable.batch_max.get(spec.slot.hardware, 0),
            operators=servable.operators,
            digest=servable.checked,
            batches=servable.batches_on(spec.slot.hardware),
            shapes=dict(servable.shapes),
            verify_first=servable.verify_first,
            verify_share=servable.verify_share,
            memory_bytes=servable.memory_bytes.get(spec.slot.hardware, 0),
            worker_bytes=servable.worker_bytes,
        )
        replica.is_joining = batchable
        replica.cores = cores
        self._actuator.confine(replica.process.pid, max(replica.pool_cores or cores, START_CORES_MIN))
        replica.link.send(FrameKind.SETUP, payload=[encode(setup)])
        if replica.told is not None:
            self._set_timer(replica, TAKEN_S_MAX, f"it did not begin to load within {TAKEN_S_MAX:g} s")
        else:
            self._set_start_timer(replica)

    def _set_start_timer(self, replica: _Replica) -> None:
        self._set_timer(replica, self._start_s_max, f"it was not ready within {self._start_s_max:g} s")

    def _start_spares_later(self, after_s: float | None = None) -> None:
        if self._spares_timer is not None:
            self._spares_timer.cancel()
        if self._spares_max:
            after_s = SPARES_AFTER_S if after_s is None else after_s
            self._spares_timer = self._loop.call_later(after_s, self._start_spares)

    def _start_spares(self) -> None:
        """Have as many spare workers as replicas were lately started together. They are started one after the other,
        because each takes a core for a moment; while replicas start, none is."""
        if any(not replica.is_ready for replica in self._replicas.values()):
            self._start_spares_later()
            return
        wanted = min(self._spares_max, most_together(self._starts, self._loop.time()))
        while len(self._spares) > wanted:
            self._give_up(self._spares[-1], NOT_NEEDED)
        if all(spare.is_waiting for spare in self._spares):
            if len(self._spares) < wanted:
                self._start_spare()
            elif wanted > 1:
                self._start_spares_later(SPARES_FOR_S / 2)

    def _start_spare(self) -> None:
        spare = _Replica()
        self._spares.append(spare)
        try:
            theirs = self._connect(spare)
        except (OSError, MachineError) as error:
            self._give_up(spare, str(error))
            return
        arguments, fds = self._inherited(spare, theirs)
        spare.is_humble = not self._spare_failures
        command = ("sloop.serve.worker", int(spare.is_humble), os.getpid(), *arguments)
        spare.is_busy = True
        start = partial(spawn, "sloop.serve.processes", command, fds, environment=self._environment())
        spawning = self._loop.run_in_executor(self._spawner, start)
        spawning.add_done_callback(partial(self._on_spawned, spare, theirs))

    def _on_spawned(self, spare: _Replica, theirs: socket.socket, spawning: Future[subprocess.Popen[bytes]]) -> None:
        """A spare worker's process has started, or could not be."""
        theirs.close()
        spare.is_busy = False
        error = spawning.exception()
        if error is None:
            spare.process = spawning.result()
        if spare.is_dying:  # it was given up meanwhile
            self._reap(spare, checks=0)
        elif error is not None:
            self._give_up(spare, str(error))
        else:
            limit_s = HUMBLE_S_MAX if spare.is_humble else SPARE_S_MAX
            self._set_timer(spare, limit_s, f"it was not prepared within {limit_s:g} s")

    def _on_waiting(self, spare: _Replica) -> None:
        """A spare worker has loaded its libraries. It had to do so in the control group of the server, because its
        priority counts only there."""
        if spare.is_dying:
            return
        if spare.process is None:  # the thread that has started it is about to say so
            self._loop.call_later(REAP_S, self._on_waiting, spare)
            return
        self._clear_timer(spare)
        spare.is_busy = True
        preparing = self._loop.run_in_executor(self._spawner, self._actuator.prepare, spare.process.pid)
        preparing.add_done_callback(partial(self._on_prepared, spare))

    def _on_prepared(self, spare: _Replica, preparing: Future[None]) -> None:
        """A spare worker can be taken, unless it has ended."""
        spare.is_busy = False
        error = preparing.exception()
        if spare.is_dying:
            self._reap(spare, checks=0)
        elif error is not None:
            self._give_up(spare, str(error))
        else:
            spare.is_waiting, self._spare_failures = True, 0
            self.on_spares()
            self._start_spares_later(0.0)

    def _lose_spare(self, spare: _Replica) -> None:
        """A spare worker has ended. If it was needed, another one is started; after 1 s at first, then later and later,
        at most after half of `SPARES_FOR_S`."""
        self._spares.remove(spare)
        if spare.is_waiting:
            self.on_spares()
        elif spare.error != NOT_NEEDED:
            self._spare_failures += 1
            if not spare.is_humble:  # the lowest priority gets no time on a busy machine; nobody can act on that
                _log.warning("a spare worker could not be started: %s", spare.error)
        self._start_spares_later(min(SPARES_FOR_S / 2, SPARES_AFTER_S * 2 ** min(self._spare_failures, 20)))

    def _set_timer(self, replica: _Replica, after_s: float, why: str) -> None:
        self._clear_timer(replica)
        replica.timer = self._loop.call_later(after_s, self._give_up, replica, why)

    def _clear_timer(self, replica: _Replica) -> None:
        if replica.timer is not None:
            replica.timer.cancel()
            replica.timer = None

    def _give_up(self, replica: _Replica, why: str) -> None:
        """Close the replica's socket and kill its process; the end is reported once the process is reaped."""
        if replica.is_dying:
            return
        replica.is_dying = True
        replica.error = replica.error or why
        if replica in self._spares:
            self._lose_spare(replica)
        self._clear_timer(replica)
        if replica.shrink_timer is not None:
            replica.shrink_timer.cancel()
        if replica.link is not None:
            replica.link.close()
        if replica.shadow is not None:
            self._give_up(replica.shadow, "its replica has ended")
        if replica.told is not None and not replica.is_stopping:
            self._start_again(replica, replica.told)
        elif replica.pipeline is not None and replica.part is not None:
            replica.pipeline.lose(replica.place)
        if not replica.is_busy:
            self._reap(replica, checks=0)

    def _reap(self, replica: _Replica, checks: int) -> None:
        """Kill and reap the process. If its socket has just closed, first let it exit: its status may say why."""
        process = replica.process
        if process is not None and process.poll() is None:
            may_exit_by_itself = replica.error == CLOSED and checks < 5
            if not may_exit_by_itself:
                kill(process.pid)
            self._loop.call_later(REAP_S, self._reap, replica, checks + 1)
            return
        if replica.shadow is not None:  # its cores and memory are those of the replica
            self._loop.call_later(REAP_S, self._reap, replica, checks)
            return
        if process is not None:
            self._actuator.release(process.pid)
        if replica.arena is not None:
            self._arenas.abandon(replica.arena)
        self._processes.discard(replica)
        if replica.has_gpu_failed and replica.device is not None:
            checking = self._loop.run_in_executor(None, is_present, replica.device.uuid)
            checking.add_done_callback(partial(self._on_gpu_checked, replica))
        elif self._replicas.get(replica.id) is replica:
            self._tell_end(replica)
        if not self._processes:
            self._emptied.set()

    def _on_gpu_checked(self, replica: _Replica, checking: Future[bool]) -> None:
        """A replica has ended because its GPU failed. If the GPU is gone, its node has other devices from now on; else
        another process may use it."""
        spec = replica.spec
        assert spec is not None
        if self._gpus is not None and spec.node is not None and spec.device is not None and not checking.result():
            node = self._gpus.lose(spec.node, spec.device)
            if node is not None:
                _log.error("device %s of %s is gone: %s", spec.device, spec.node, replica.error)
                self._nodes[node.name] = left = structs.replace(self._nodes[node.name], devices=node.devices)
                self._report(NodeReady(left))
        self._tell_end(replica)

    def _tell_end(self, replica: _Replica) -> None:
        """The process of a worker has been reaped. That of a shadow is not told if its replica ends too."""
        del self._replicas[replica.id]
        if replica.beside is not None:
            replica.beside.body.shadow = None
            if replica.beside.body.is_dying:
                return
            self._tell_pair(replica, replica.beside, is_over=True)
        if replica.is_stopping:
            self._report(WorkerStopped(replica.id))
        else:
            self._report(WorkerLost(replica.id, _explain(replica.error, replica.process)))

    # Frames from workers

    def _on_frame(self, replica: _Replica, frame: Frame) -> None:
        try:
            match frame.kind:
                case FrameKind.DONE:
                    self._on_done(replica, frame)
                case FrameKind.FAILED:
                    self._on_failed(replica, frame)
                case FrameKind.PASS | FrameKind.COMPLETED if replica.part is not None:
                    self._on_part(replica, frame)
                case FrameKind.RESIZED:
                    self._finish_shrink(replica)
                case FrameKind.READY | FrameKind.STEP if replica.beside is not None:
                    self._on_shadow_step(replica, replica.beside, frame)
                case FrameKind.PAIRED | FrameKind.UNPAIRED:
                    self._on_pair(replica, frame)
                case FrameKind.READY:
                    self._on_ready(replica)
                case FrameKind.WAITING if replica in self._spares and not replica.is_waiting:
                    self._on_waiting(replica)
                case FrameKind.STEP if 0 <= frame.subject < len(STEPS):
                    self._on_step(replica, STEPS[frame.subject])
                case FrameKind.REFUSED | FrameKind.DIFFERS:
                    self._on_reason(replica, frame)
                case _:
                    raise ProtocolError(f"a worker sent {frame.kind.name} {frame.subject}")
        except Exception as error:
            self._give_up(replica, _fault_in_report(replica, error))

    def _on_reason(self, replica: _Replica, frame: Frame) -> None:
        """A worker says why it ends, or what differs for requests that share its forward passes."""
        if frame.kind is FrameKind.REFUSED:
            replica.error, replica.has_gpu_failed = _text(frame), frame.subject == 1
        elif replica.spec is not None:
            self.on_difference(replica.id, replica.spec.stage, replica.spec.variant, _text(frame))

    def _on_step(self, replica: _Replica, step: str) -> None:
        if replica in self._spares:
            raise ProtocolError("a spare worker loads a model before it was ordered to")
        if replica.told is not None:
            replica.told = None
            self._set_start_timer(replica)
        self._report(WorkerProgressed(replica.id, step))

    def _on_ready(self, replica: _Replica) -> None:
        """The cold start is over: give the replica the cores that were ordered, or as many as the machine allows."""
        replica.is_ready = True
        self._clear_timer(replica)
        if replica.pool_cores:
            self._join_pool(replica)
        else:
            wanted = replica.cores
            grant = self._actuate(replica, wanted)
            if grant is not None:
                if grant != Grant(wanted):
                    self._send_threads(replica, grant)
                if grant.cores != wanted:
                    self._report(WorkerResized(replica.id, grant.cores))
        if replica.is_dying:
            return
        self._report(WorkerReady(replica.id))
        if replica.pipeline is not None and replica.part is not None:
            replica.pipeline.on_part_ready(replica.place)

    def _answered(self, replica: _Replica, frame: Frame) -> tuple[_Replica | None, BatchId, int]:
        """Whose batch this frame answers, the batch, and how long it took in ns. In a pipeline, one worker answers the
        batches of all; None if nobody waits for it any more."""
        pipeline, place = replica.pipeline, replica.place
        if pipeline is None or replica.part is None or not pipeline.computes(place, frame.subject):
            return replica, self._expect(replica, frame), frame.value
        is_done = frame.kind is FrameKind.DONE
        passed = pipeline.answered(place, frame.subject, frame.value, is_done=is_done)
        owner = self._replicas.get(passed.replica) if passed is not None else None
        if passed is None or owner is None:
            return None, BatchId(frame.subject), frame.value
        return owner, self._expect(owner, frame), passed.took_ns

    def _expect(self, replica: _Replica, frame: Frame) -> BatchId:
        """The batch that this frame answers; it must be the running one."""
        if replica.batch is None or frame.subject != replica.batch:
            raise ProtocolError(f"a reply to batch {frame.subject} while batch {replica.batch} runs")
        batch, replica.batch = replica.batch, None
        return batch

    def _on_done(self, replica: _Replica, frame: Frame) -> None:
        owner, batch, took_ns = self._answered(replica, frame)
        done: BatchDone = _decoded(self._done, frame)
        if owner is not None and len(done.blocks) != owner.visits:
            raise ProtocolError(f"a reply has {len(done.blocks)} blocks for {owner.visits} visits")
        written = [block for block in done.blocks if isinstance(block, Address)]
        for block in written:
            self._hold(replica, block)
        if owner is None:
            for block in written:
                self._arenas.free(block)
            return
        event = Finished(batch, owner.id, took_ns, done.edge_counts, tuple(sorted(done.faults)))
        if self._listener is not None:
            self._listener.on_finished(event, done.blocks, done.faults)

    def _on_failed(self, replica: _Replica, frame: Frame) -> None:
        owner, batch, _ = self._answered(replica, frame)
        if owner is not None:
            self._fail(batch, owner, ModelFailure.decode(frame.payload))

    def _hold(self, replica: _Replica, block: Address) -> None:
        """A worker has written a block. ProtocolError if it is not in its arena."""
        if replica.arena is None or block.arena != replica.arena.number:
            raise ProtocolError(f"{block} is not in the arena of this worker")
        self._arenas.hold(block)

    def _free(self, replica: _Replica, block: Address) -> None:
        """A block in a worker's arena is free."""
        if not replica.freed:
            self._loop.call_soon(self._tell_freed, replica)
        replica.freed.append(block)

    def _tell_freed(self, replica: _Replica) -> None:
        freed, replica.freed = replica.freed, []
        if replica.link is not None:
            replica.link.send(FrameKind.FREE, payload=[encode(freed)])

    def _fail(self, batch: BatchId, replica: _Replica, failure: ModelFailure) -> None:
        if self._listener is not None:
            self._listener.on_failed(batch, replica.id, failure)

    # Pipelines

    def _join(self, replica: _Replica, order: StartWorker) -> None:
        """Start a replica as a part of a model. MachineError if the model has no such parts."""
        spec = order.spec
        check_part(order, len(self.blocks_of(spec).blocks))
        if replica.device is not None:
            what = f"a part of {spec.variant!r} cannot start on device {spec.device!r}: parts run on CPU cores only"
            raise MachineError(what, help="write `partition: false` in `provision`")
        replica.part, replica.place = spec.shape[order.place], order.place
        if self.on_passed is None:
            replica.pipeline = joined(self._pipelines, order, self)

    def _on_part(self, replica: _Replica, frame: Frame) -> None:
        """A worker passes on a batch, or has loaded the other layers."""
        pipeline, hold = replica.pipeline, partial(self._hold, replica)
        if frame.kind is FrameKind.COMPLETED:
            if pipeline is not None:
                pipeline.on_completed(replica.place)
            elif not replica.completes:
                raise ProtocolError("a worker has completed a model that it was not told to complete")
            replica.completes = False
            if not replica.is_stopping:
                self._clear_timer(replica)
            self._report(WorkerCompleted(replica.id))
            return
        passed: PassedBatch = _decoded(self._passed, frame)
        if pipeline is not None:
            pipeline.passed_on(replica.place, frame.subject, frame.value, passed, hold)
            return
        batch = self._expect(replica, frame)
        for block in passed.tensors:
            if isinstance(block, Address):
                hold(block)
        if self.on_passed is not None:
            self.on_passed(batch, replica.id, frame.value, passed)

    def run_part(self, replica: ReplicaId, batch: BatchId, order: Run | PassedBatch) -> None:
        """See `PipelineOrders`. Also an order of the process that passes batches on, which gets one answer: `on_passed`
        or `on_finished`, or `on_failed`."""
        found = self._replicas.get(replica)
        if found is None or found.link is None or found.is_dying:
            return  # its loss has been or will be noticed
        if found.pipeline is None:
            assert found.batch is None, f"batch {batch} for replica {replica}, which still runs batch {found.batch}"
            found.batch, found.visits = batch, order.visits
        kind = FrameKind.ENTER if isinstance(order, Run) else FrameKind.PASS
        found.link.send(kind, batch, time.monotonic_ns(), [encode(order)])
        if found.completes:
            self._watch_completion(found)

    def complete_part(self, replica: ReplicaId, files: Mapping[int, str] = MappingProxyType({})) -> None:
        """See `PipelineOrders`; `files` has those of the other layers that were not there when the part started."""
        found = self._replicas.get(replica)
        if found is not None and found.link is not None and not found.is_dying:
            found.completes = True
            found.link.send(FrameKind.COMPLETE, payload=[encode(dict(files))])
            self._watch_completion(found)

    def _watch_completion(self, replica: _Replica) -> None:
        """Limit how long a part that loads the other layers may be silent. When its pipeline is broken it runs no
        batches, so nothing else would show that it hangs. Batches restart the limit, because loading waits for them."""
        if not replica.is_stopping:
            why = f"it did not load the other layers within {self._start_s_max:g} s"
            self._set_timer(replica, self._start_s_max, why)

    def free_block(self, block: Address) -> None:
        """See `PipelineOrders`."""
        self._arenas.free(block)

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        """See `PipelineOrders`."""
        found = self._replicas.get(replica)
        if found is not None and found.batch == batch:
            found.batch = None
            self._report(BatchLost(batch, replica, why))

    # Shadows

    def _start_shadow(self, order: StartWorker, replica: ReplicaId) -> None:
        body, wanted = self._replicas.get(replica), order.spec.shadow
        if body is None or body.process is None or body.spec is None or body.is_dying:
            return  # its loss, which has been or will be reported, is that of its shadow
        made: _Replica | None = None
        try:
            assert wanted is not None, f"worker {order.worker} is no shadow"
            if body.shadow is not None:
                raise MachineError("the one before has not ended")
            cut = self._cut_of(body.spec, wanted)
            self._starts.append(self._loop.time())
            self._start_spares_later()
            spare = self._taken_spare()
            body.shadow = self._replicas[order.worker] = made = spare or _Replica()
            made.id, made.beside = order.worker, _Beside(body, wanted, cut, [])
            if spare is None:
                self._spawn(made)
            self._set_up_shadow(made, made.beside, body.process.pid)
            if spare is not None:
                self._set_timer(made, TAKEN_S_MAX, f"it did not begin to load within {TAKEN_S_MAX:g} s")
        except (OSError, MachineError) as error:
            if made is not None:
                self._give_up(made, str(error))
            else:
                self._report(WorkerLost(order.worker, str(error)))

    def _cut_of(self, spec: ReplicaSpec, shadow: Worker) -> CutModel:
        """The model in blocks, some of which the shadow holds. MachineError if it has no such blocks."""
        cut = self.blocks_of(spec)
        if spec.slot.hardware not in cut.layers:
            what = f"the blocks of {spec.variant!r} were not measured on {spec.slot.hardware!r}"
            raise MachineError(what, help="measure them there: `sloop profile MODEL --layers`")
        if not shadow.layers or not 0 <= min(shadow.layers) <= max(shadow.layers) < len(cut.blocks):
            raise MachineError(f"{spec.variant!r} has {len(cut.blocks)} blocks, not those of {shadow.layers}")
        return cut

    def _set_up_shadow(self, shadow: _Replica, beside: _Beside, body: int) -> None:
        assert shadow.process is not None
        assert shadow.link is not None
        assert beside.body.spec is not None
        shadow.cores = beside.wanted.cores
        blocks = {place: beside.cut.blocks[place] for place in beside.wanted.layers}
        setup = ShadowSetup(beside.body.spec.stage, blocks, body, Grant(shadow.cores).threads)
        self._actuator.confine(shadow.process.pid, max(shadow.cores, START_CORES_MIN))
        shadow.link.send(FrameKind.SHADOW, payload=[encode(setup)])
        self._set_start_timer(shadow)

    def _on_shadow_step(self, shadow: _Replica, beside: _Beside, frame: Frame) -> None:
        """A shadow loads its blocks, or has loaded them: then limit its cores, and let the body connect."""
        if frame.kind is FrameKind.STEP:
            self._set_start_timer(shadow)
            return
        assert shadow.process is not None
        try:
            grant = self._actuator.resize(shadow.process.pid, shadow.cores)
        except MachineError as error:
            self._give_up(shadow, str(error))
            return
        if grant.duty < 1:
            self._send_threads(shadow, grant)
        beside.address.append(bytes(frame.payload))
        self._tell_pair(shadow, beside)

    def _tell_pair(self, shadow: _Replica, beside: _Beside, *, is_over: bool = False) -> None:
        """Tell a body which batches it shares with its shadow, or that it no longer shares any."""
        body = beside.body
        if body.link is None or body.spec is None or shadow.process is None or not beside.address:
            return
        payload = []
        if not is_over:
            from sloop.profile.blocks import shared_rows  # noqa: PLC0415  # it needs NumPy

            layers, wanted = beside.cut.layers[body.spec.slot.hardware], beside.wanted
            rows, shadow_ms = shared_rows(layers, body.cores, wanted, beside.cut.batch_max)
            patience_ms = tuple(max(PATIENCE * each_ms, each_ms + PATIENCE_MS_MIN) for each_ms in shadow_ms)
            payload = [encode(PairSetup(beside.address[0], shadow.process.pid, wanted.layers, rows, patience_ms))]
        body.link.send(FrameKind.PAIR, shadow.id, payload=payload)

    def _on_pair(self, body: _Replica, frame: Frame) -> None:
        """A body has connected with its shadow, or has given it up."""
        shadow = body.shadow
        if shadow is None or shadow.id != frame.subject or shadow.is_dying:
            return
        if frame.kind is FrameKind.UNPAIRED:
            self._give_up(shadow, _text(frame))
        elif not shadow.is_ready:
            shadow.is_ready = True
            self._clear_timer(shadow)
            self._report(WorkerReady(shadow.id))

    # Cores

    def _finish_shrink(self, replica: _Replica) -> None:
        """Write the smaller quota: the worker has reduced its threads, or `SHRINK_S_MAX` has passed."""
        cores = replica.shrink_to
        if cores is None:
            return
        replica.shrink_to = None
        if replica.shrink_timer is not None:
            replica.shrink_timer.cancel()
            replica.shrink_timer = None
        grant = self._actuate(replica, cores)
        if grant is None:
            return
        if grant != Grant(cores):
            self._send_threads(replica, grant)
        self._report(WorkerResized(replica.id, grant.cores))

    def _actuate(self, replica: _Replica, cores: float) -> Grant | None:
        """Change the CPU limit. If the machine refuses, report the cores that the replica keeps and return None."""
        assert replica.process is not None
        try:
            grant = self._actuator.resize(replica.process.pid, cores)
        except MachineError as error:
            _log.warning("replica %d keeps %g cores: %s", replica.id, replica.cores, error)
            self._report(WorkerResized(replica.id, replica.cores))
            return None
        replica.cores = grant.cores
        shadow = replica.shadow
        if shadow is not None and shadow.beside is not None and shadow.is_ready and not shadow.is_stopping:
            self._tell_pair(shadow, shadow.beside)  # rows are divided by the cores of both
        return grant

    def _join_pool(self, replica: _Replica) -> None:
        """Move a replica without a cap into the control group that all such replicas of its node share. If the machine
        refuses, the replica ends, because an unplanned cap would make it slower than its profile."""
        assert replica.process is not None
        assert replica.spec is not None
        try:
            grant = self._actuator.join(replica.process.pid, replica.spec.node or "", replica.pool_cores)
        except MachineError as error:
            self._give_up(replica, str(error))
            return
        if grant != Grant(replica.pool_cores):
            self._send_threads(replica, grant)

    def _send_threads(self, replica: _Replica, grant: Grant) -> None:
        assert replica.link is not None
        replica.link.send(FrameKind.RESIZE, grant.threads, round(grant.duty * MILLIONTHS))

    def _report(
        self,
        event: BatchLost
        | BatchSilent
        | NodeReady
        | NodeReleased
        | WorkerCompleted
        | WorkerLost
        | WorkerProgressed
        | WorkerReady
        | WorkerStopped
        | WorkerResized
        | Transferred,
    ) -> None:
        if self._listener is not None:
            self._listener.on_event(event)


def usual_spares_max() -> int:
    """The default for the most spare workers: one for each core."""
    return max(1, int(capacity().cores))


def most_together(starts: Iterable[float], now_s: float) -> int:
    """Of starts at these times, in their order, the most within `SPARES_AFTER_S`, among those of the last
    `SPARES_FOR_S`; at least 1."""
    most, together = 1, deque[float]()
    for at_s in starts:
        if at_s < now_s - SPARES_FOR_S:
            continue
        together.append(at_s)
        while together[0] < at_s - SPARES_AFTER_S:
            together.popleft()
        most = max(most, len(together))
    return most


def _decoded(decoder: "msgspec.msgpack.Decoder[Any]", frame: Frame) -> Any:  # noqa: ANN401  # what the decoder makes
    try:
        return decoder.decode(frame.payload)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a reply cannot be read: {error}") from error


def _text(frame: Frame) -> str:
    return str(frame.payload, "utf-8", "replace")


def _fault_in_report(replica: _Replica, error: Exception) -> str:
    """Why a replica whose report could not be taken up is given up. If not the report is wrong but the server, which is
    a bug, the log has the traceback; without this, nobody would hear of the batch."""
    if isinstance(error, ProtocolError):
        return str(error)
    _log.error("a report of replica %d could not be taken up", replica.id, exc_info=error)
    return f"its report could not be taken up: {error!r}"


def _explain(error: str, process: subprocess.Popen[bytes] | None) -> str:
    """Why a replica is gone; the exit status of its process if `error` says nothing more specific."""
    if process is None or error != CLOSED:
        return error.replace("\n", "; ")  # a fix follows in a line of its own
    code = process.returncode
    return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"
