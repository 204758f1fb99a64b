"""A node: the workers of one machine, from the order to start one to its end.

The server's own machine is a node in its process, and an agent is one behind a link (`sloop.serve.cluster.agent`). A
worker is a process with one socket and one CPU limit, and always in one of the states of `WorkerPhase`. Every order
gets exactly one answer in each of them (`REACTIONS`); the end of a worker answers what is open. The end of its socket
reveals the death of a process; the node reports it after the process is reaped and its cores are free. No worker
outlives the node, and every wait is bounded (`START_S_MAX`, `STOP_S_MAX`, `SHRINK_S_MAX`). The node handles no
requests, deadlines or policies.

To grow a worker, the node first raises the CPU quota and then the worker's thread count; to shrink it, the other way
round. Otherwise threads would wait for each other inside too small a quota. A worker that runs a batch cannot change
its threads; the quota then follows after `SHRINK_S_MAX` regardless. A worker whose cores are only reserved
(`Slot.is_capped`) gets as many threads as its node has cores, and shares one quota, that of the node, with all such
workers there; to resize it changes the reservation alone. While it starts, a worker has at least `START_CORES_MIN`:
with a quarter of a core, loading would take four times as long as its profile says.

A worker takes a spare process if one waits (`sloop.serve.node.spares`); if that one is of no use, it gets another. One
with a GPU gets a new process, because CUDA reads the environment with which a process began (`sloop.cuda`). If its GPU
has failed, the loss of the GPU is reported before that of the worker, so that the core does not start the next one
there.

A shadow is one more worker, which connects with the process of its replica (`sloop.serve.shadows`). It ends with its
replica, and a replica has ended only when its shadow has.

Workers may start as the parts of one model, and serve together (`sloop.serve.node.pipelines`). The node knows which
batches are under way between them, unless another process does (`on_passed`).

Where models are read where they are, transfers end as soon as they are ordered. An agent brings them to its machine
(`sloop.serve.node.models`); a worker is then `FETCHING` until its model is there.
"""

import asyncio
import logging
import os
import time
from asyncio import AbstractEventLoop, Future, Task, TimerHandle
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial, singledispatchmethod
from math import inf
from typing import Any, Final

from msgspec import structs

from sloop import actions, events
from sloop.cuda import CudaDevice, is_present
from sloop.errors import MachineError
from sloop.machine import capacity
from sloop.profile.model import is_modelled
from sloop.profile.profile import START_CORES_MIN
from sloop.serve.cpu_quota import CpuActuator, Grant
from sloop.serve.dataflow import StageWiring
from sloop.serve.gpus import AssignedGpus
from sloop.serve.heartbeat import LOOK_S, Silence
from sloop.serve.machine_watch import watch
from sloop.serve.messages import (
    ITSELF,
    BatchFinished,
    BatchPassed,
    BatchRaised,
    CompleteWorker,
    ConnectParts,
    PairSetup,
    Reached,
    Report,
    Run,
    RunBatch,
    ShadowSetup,
    Threads,
    WorkerDiffers,
)
from sloop.serve.node.known import KnownStages, blocks_of, sources_of
from sloop.serve.node.models import NO_PEERS, HeldModel, NodeModels, Peers, why_not
from sloop.serve.node.pipelines import ProcessPipeline, check_part, joined
from sloop.serve.node.process import WorkerProcess, WorkerProcesses
from sloop.serve.node.spares import SparePool
from sloop.serve.protocols import BackendListener, CutModel, Servable, SpareProcesses, StageSetup
from sloop.serve.transport import ProcessLink, ProtocolError
from sloop.serve.worker import STEPS
from sloop.shared_memory import Address, Arenas
from sloop.units import s
from sloop.user_code import ModelFailure
from sloop.vocabulary import ALONE, BatchId, Node, ReplicaId, TransferId, Worker, WorkerId

START_S_MAX: Final = 300.0
"""Seconds after which a worker that is not ready is killed. Generous, because a large model on a fraction of a core
loads slowly."""
STOP_S_MAX: Final = 2.0
"""Seconds after the order to stop at which a worker that has not exited is killed."""
SHRINK_S_MAX: Final = 0.010
"""How long a smaller quota waits for the worker to reduce its threads: one scheduling period."""
TAKEN_S_MAX: Final = 5.0
"""Seconds after which a spare process that was taken and has not begun to load is replaced. It usually takes some
ms."""
PATIENCE: Final = 2.0
PATIENCE_MS_MIN: Final = 100.0
"""A shadow counts as hanging after this multiple of the predicted time (AsyFunc's specification, section 2.10) plus
this long, which allows for delays on a busy machine."""

_log: Final = logging.getLogger("sloop.backend")


class WorkerPhase(StrEnum):
    """What a worker of a node does."""

    FETCHING = "fetching"
    """Its model is being brought to the machine; it has no process yet."""
    STARTING = "starting"
    """Its process starts, or a spare one was told what to serve and has not begun to load."""
    LOADING = "loading"
    """It loads its model; a shadow also connects with its body."""
    READY = "ready"
    BUSY = "busy"
    """It runs a batch of the core's, or passes it through its pipeline."""
    STOPPING = "stopping"
    """It was ordered to stop; its end is `WorkerStopped`."""
    LOST = "lost"
    """It has failed; its end is `WorkerLost`."""


BEGINNING: Final = (WorkerPhase.STARTING, WorkerPhase.LOADING)
SERVING: Final = (WorkerPhase.READY, WorkerPhase.BUSY)
ENDING: Final = (WorkerPhase.STOPPING, WorkerPhase.LOST)


class Reaction(StrEnum):
    """What a node does with an order about one of its workers, and what answers the order."""

    NOTE = "noted"
    """It counts when the worker is ready, and is answered at once."""
    OBEY = "obeyed"
    """It is carried out, and answered when that is done."""
    EXIT = "told to exit"
    """The worker exits by itself, or is killed after `STOP_S_MAX`; its end answers."""
    KILL = "killed"
    """The worker's process is killed; its end answers."""
    AWAIT = "awaited"
    """The worker's end, which is under way, answers."""
    REFUSE = "refused"
    """It cannot be carried out, which is said at once."""


NOTE, OBEY, EXIT, KILL, AWAIT, REFUSE = Reaction
REACTIONS: Final = {
    order: dict(zip(WorkerPhase, reactions, strict=True))
    for order, *reactions in (
        # phase of the worker:  fetching starting loading ready busy stopping lost
        (actions.StopWorker, KILL, KILL, KILL, EXIT, KILL, AWAIT, AWAIT),
        (actions.ResizeWorker, NOTE, NOTE, NOTE, OBEY, OBEY, AWAIT, AWAIT),
        (actions.StartWorker, REFUSE, REFUSE, REFUSE, OBEY, OBEY, AWAIT, AWAIT),  # of its shadow
    )
}
"""By order about a worker that is there, and phase of that worker, what becomes of the order. The end of a worker has
answered all later orders but `StopWorker`, which is answered again. The other orders are about no worker:
`LiveNode.order` says how they are answered."""


class _Section:
    """What a worker that starts as a part of a model has of it."""

    def __init__(self, parts: Sequence[Worker], place: int, pipeline: ProcessPipeline | None) -> None:
        self.part, self.place, self.places = parts[place], place, len(parts)
        self.pipeline = pipeline
        """In which it serves; None if another process knows of it."""
        self.batches: dict[BatchId, bool] = {}
        """Those that have reached the part and have not left it, the oldest first; False for one of which it is not
        known yet that it has reached it."""
        self.following: WorkerId | None = None
        """The next part, if that is on this machine."""
        self.is_completing = self.is_complete = False
        """Whether it was ordered to load the other layers and has not done so yet, and whether it has all."""
        self.task: Task[dict[int, str]] | None = None
        """Brings the other layers."""

    @property
    def is_last(self) -> bool:
        """Whether its part ends with the outputs of the model."""
        return self.place == self.places - 1

    def note(self, batch: BatchId, *, is_reached: bool) -> None:
        """A batch has reached the part, or has left it, which two workers say: the later may be heard first."""
        if self.batches.pop(batch, is_reached) is is_reached:
            self.batches[batch] = is_reached

    def leave(self) -> None:
        """The worker ends."""
        if self.task is not None:
            self.task.cancel()
        if self.pipeline is not None:
            self.pipeline.lose(self.place)


class NodeWorker:
    """A worker of a node."""

    def __init__(self, order: actions.StartWorker, servable: Servable) -> None:
        self.number, self.order = order.worker, order
        self.servable = servable
        """Its model, as it is on this machine."""
        self.spec = order.spec
        """With the cores in effect; until it is ready, with those that it is to have."""
        self.phase = WorkerPhase.STARTING
        self.is_over = False
        """Whether it has no process any more, or one that is being killed: its end follows."""
        self.process: WorkerProcess | None = None
        """None before it has one, and after it was reaped."""
        self.is_spare = False
        """Whether its process was a spare one, which has not begun to load."""
        self.held = HeldModel()
        self.task: Task[Servable] | None = None
        """Brings its model."""
        self.timer: TimerHandle | None = None
        self.batch: BatchId | None = None
        self.visits = 0
        """Of the batch that runs."""
        self.looked_at: BatchId | None = None
        """The batch that ran at the last look."""
        self.silence = Silence()
        """Since then."""
        self.pool_cores = 0.0
        """If its cores are not a cap: the cores of its node, which it shares with all such workers there; else 0."""
        self.shrink_to: float | None = None
        self.shrink_timer: TimerHandle | None = None
        self.device: CudaDevice | None = None
        self.section: _Section | None = None
        """If it starts as a part of a model."""
        self.shadow: NodeShadow | None = None
        self.error = ""

    @property
    def cores(self) -> float:
        """Of its slot."""
        return self.spec.cores

    @property
    def works_on(self) -> BatchId | None:
        """The batch that it runs, or is to run next. That of a part may have been started for another one."""
        if self.section is None:
            return self.batch
        return next((batch for batch, is_reached in self.section.batches.items() if is_reached), None)

    @property
    def is_part(self) -> bool:
        """Whether it has only a part of its model."""
        return self.section is not None and not self.section.is_complete


class NodeShadow(NodeWorker):
    """A shadow of another worker, its body."""

    def __init__(self, order: actions.StartWorker, body: NodeWorker, wanted: Worker, cut: CutModel) -> None:
        super().__init__(order, body.servable)
        self.body, self.wanted, self.cut = body, wanted, cut
        self.address = b""
        """Of its socket, once it has loaded its blocks."""

    @property
    def cores(self) -> float:
        """Its own, which do not change."""
        return self.wanted.cores


class LiveNode(KnownStages):
    """Runs workers on this machine (`sloop.serve.protocols.Backend`). Create it inside the running event loop.

    `servables` maps (stage, variant) to its model, `wirings` each stage to how its inputs are assembled; workers write
    their outputs into `arenas`, and read those of `holders`, by default of this process. `nodes` are those that the
    core may acquire, which are this machine and therefore always there, and `gpus` their GPUs. Each worker prepares
    sessions for 1 to `threads_prepared` threads in the background, so that its first resize is as fast as later ones.
    Each session costs memory; if there are more counts than a runtime keeps, sessions are created when they are first
    needed. At most `spares_max` workers are started ahead. `models` brings models here; None: they are read where they
    are. A simulation gives `processes` of its own.
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
        models: NodeModels | None = None,
        threads_prepared: int = 0,
        spares_max: int = 0,
        start_s_max: float = START_S_MAX,
        loop: AbstractEventLoop | None = None,
        processes: Callable[..., WorkerProcesses] = WorkerProcesses,
    ) -> None:
        super().__init__(servables, wirings, threads_prepared)
        self._actuator = actuator
        self._arenas = Arenas() if arenas is None else arenas
        self._holders = dict(holders or {0: os.getpid()})
        self._nodes = {node.name: node for node in nodes}
        self._gpus, self._models = gpus, models
        self._start_s_max = start_s_max
        self._loop = loop or asyncio.get_running_loop()
        self.workers: dict[WorkerId, NodeWorker] = {}
        """Those that have not ended, shadows too."""
        self._processes = processes(self._loop, self._arenas, actuator, gpus)
        self.spares = SparePool(self._processes, spares_max, self._are_starting)
        self._pipelines: dict[WorkerId, ProcessPipeline] = {}
        """Those of which not all parts have been ordered."""
        self.on_passed: Callable[[ReplicaId, BatchId], object] | None = None
        """If another process knows of pipelines: called when a part has run its layers on a batch. That process orders
        with `connect_parts`, `run_part` and `complete_part`."""
        self.on_drained: Callable[[ReplicaId], None] = lambda part: None
        """Then also: called when nothing comes to a last part any more."""
        self._watching: asyncio.Task[None] | None = None
        self._look_timer: TimerHandle | None = None
        self._acts: dict[type, Callable[[Any, Any], None]] = {
            BatchFinished: self._on_done,
            BatchRaised: self._on_failed,
            BatchPassed: self._on_passed,
            WorkerDiffers: self._on_differs,
            Report: self._on_reported,
        }
        """What is done with each record of a worker but `Reached`."""

    def learn(
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None:
        super().learn(servables, wirings, threads_prepared=threads_prepared)
        for worker in self.workers.values():
            lone = servables.get((worker.spec.stage, worker.spec.variant))
            if lone is None or not lone.obstacle or worker.servable.obstacle:
                continue
            worker.servable = structs.replace(worker.servable, obstacle=lone.obstacle)
            if worker.process is not None and not isinstance(worker, NodeShadow):
                worker.process.records.tell(WorkerDiffers(worker.number, lone.obstacle))

    def attach(self, listener: BackendListener) -> None:
        super().attach(listener)
        self.spares.start_later()
        self._look_later()

    async def open(self) -> None:
        """This machine is there; from now on its limits are watched."""
        self._watching = self._loop.create_task(watch(tuple(self._nodes.values()), self.refit, capacity()))

    def pid(self, worker: WorkerId) -> int | None:
        """The process id of a worker, for monitoring and fault tests."""
        found = self.workers.get(worker)
        return found.process.popen.pid if found and found.process and found.process.popen else None

    def spare_processes(self) -> dict[str, SpareProcesses]:
        """See `Backend`. All nodes are this machine, which is therefore named `local`."""
        return {"local": self.spares.counted()}

    def refit(self, nodes: Sequence[Node], cores: float) -> None:
        """This machine, and so its nodes, have other capacities from now on; `cores` are all that it has."""
        self._actuator.capacity_cores = cores
        for node in nodes:
            known = self._nodes[node.name]
            made = structs.replace(known, cores=node.cores, memory_bytes=node.memory_bytes)
            if made != known:
                self._nodes[node.name] = made
                if not node.on_demand:
                    self._report(events.NodeReady(made))
        for worker in [each for each in self.workers.values() if each.phase in SERVING]:
            if worker.pool_cores:
                worker.pool_cores = self._pool_cores(worker)
                self._join_pool(worker)
            elif worker.cores >= cores:
                # All cores may be written in another way than a part of them.
                self._actuate(worker, worker.cores, threads_of=worker.cores)

    @singledispatchmethod
    def order(self, order: actions.Order) -> None:
        """See `Backend`. The method for each type of order is registered for it."""
        raise TypeError(f"no order to a node: {order}")

    # Every node is this machine, and so is ready at once.

    @order.register
    def _acquire(self, order: actions.AcquireNode) -> None:
        self._report(events.NodeReady(self._nodes[order.node]))

    @order.register
    def _release(self, order: actions.ReleaseNode) -> None:
        self._report(events.NodeReleased(order.node))

    @order.register
    def _adopt(self, order: actions.AdoptWorker) -> None:
        why = "workers of this machine have ended with the server that started them"
        self._report(events.WorkerLost(order.worker, why))

    # Models

    @order.register
    def _cancel_transfer(self, order: actions.CancelTransfer) -> None:
        if self._models is not None:
            self._models.cancel(order)

    @order.register
    def _evict(self, order: actions.Evict) -> None:
        if self._models is not None:
            models = self.with_weights(order.weights)
            self._models.evict(dict.fromkeys(source for each in models for source in sources_of(each)))

    @order.register
    def _transfer(self, order: actions.Transfer, peers: Peers = NO_PEERS) -> None:
        """Bring weights here, unless they are read where they are, and then to the parts that they complete. `peers`
        are for `NodeModels`."""
        if self._models is None:
            for node in order.receivers:
                self._report(events.Transferred(order.transfer, node))
            return
        are_blocks = any(each.cut is not None for each in self.with_weights(order.weights)[:1])
        self._models.receive(order, peers, self._report, are_blocks=are_blocks)
        for replica in order.completes:
            self.complete_part(replica, order.transfer)

    # From the order to start to the process

    @order.register
    def _start(self, order: actions.StartWorker, peers: Peers = NO_PEERS) -> None:
        """Start a worker. All workers start here, also those that a server on another machine has ordered. `peers` are
        for `NodeModels`."""
        if order.replica is not None:
            self._start_shadow(order, order.replica)
            return
        worker = NodeWorker(order, self._servables[order.spec.stage, order.spec.variant])
        self.workers[order.worker] = worker
        if self._models is None:
            self._launch(worker)
            return
        fetching = partial(self._progress, worker, "fetching")
        try:
            bringing = self._models.bring(order, worker.servable, peers, worker.held, fetching)
        except MachineError as error:
            self._give_up(worker, str(error))
            return
        if bringing is None:
            self._launch(worker)
        else:
            worker.phase = WorkerPhase.FETCHING
            worker.task = asyncio.create_task(bringing)
            worker.task.add_done_callback(partial(self._on_brought, worker))

    def _on_brought(self, worker: NodeWorker, brought: Task[Servable]) -> None:
        """The model of a worker is here, or cannot be had."""
        if self._has_come(worker, brought, "the model"):
            worker.servable = structs.replace(brought.result(), obstacle=worker.servable.obstacle)
            self._launch(worker)

    def _has_come(self, worker: NodeWorker, brought: Task[Any], what: str) -> bool:
        """Whether a worker can use what was brought for it. It is given up if that cannot be had."""
        error = None if brought.cancelled() else brought.exception()
        if error is not None and not worker.is_over:
            self._give_up(worker, why_not(error, f"{what} of replica {worker.number}"))
        return not worker.is_over

    def _launch(self, worker: NodeWorker) -> None:
        """The model of a worker is here: give it a process."""
        worker.phase = WorkerPhase.STARTING
        self.spares.note_start()
        self._progress(worker, "spawning")
        try:
            worker.device = self._device_of(worker)
            if worker.order.pipeline is not None:
                self._join(worker)
        except MachineError as error:
            self._give_up(worker, str(error))
            return
        self._give_process(worker, self.spares.take() if worker.device is None else None)

    def _give_process(self, worker: NodeWorker, spare: WorkerProcess | None) -> None:
        """Let a worker run in a process, a new one if there is no spare one."""
        worker.is_spare = spare is not None
        try:
            process = worker.process = spare or self._processes.start(worker.device)
            acts = dict.fromkeys((Reached, *self._acts), partial(self._on_report, worker))
            process.records.attach(acts, partial(self._give_up, worker))
            setup = _shadow_setup(worker) if isinstance(worker, NodeShadow) else self._setup(worker)
            # Limited first: a spare process begins at once, and threads that it has already started might not be
            # limited.
            self._actuator.confine(process.pid, max(worker.pool_cores or worker.cores, START_CORES_MIN))
            process.records.tell(setup)
        except (OSError, MachineError) as error:
            worker.is_spare = False
            self._give_up(worker, str(error))
            return
        if worker.is_spare:
            self._set_timer(worker, TAKEN_S_MAX, f"it did not begin to load within {TAKEN_S_MAX:g} s")
        else:
            self._set_start_timer(worker)

    def _start_again(self, worker: NodeWorker, process: WorkerProcess) -> None:
        """A worker has taken a spare process that does not work: it gets a new one."""
        _log.warning("replica %d starts again, with another process: %s", worker.number, worker.error)
        process.end(worker.error, lambda: None)
        worker.process, worker.error = None, ""
        self._give_process(worker, None)

    def _device_of(self, worker: NodeWorker) -> CudaDevice | None:
        """The GPU of a worker; None if its slot has none. MachineError if there is no such GPU here."""
        spec = worker.spec
        if spec.device is None or is_modelled(spec.slot.accelerator):
            return None
        if self._gpus is None:
            what = f"it needs {spec.slot.accelerator or 'an accelerator'} (device {spec.device!r} of {spec.node})"
            raise MachineError(f"{what}, but replicas get GPUs only on the machine of the server, without agents")
        return self._gpus.device_of(spec, worker.servable.device_bytes.get(spec.slot.hardware, 0))

    def _setup(self, worker: NodeWorker) -> StageSetup:
        """What a process is told to serve."""
        spec, servable, section = worker.spec, worker.servable, worker.section
        if not spec.slot.is_capped and not spec.slot.accelerator:
            worker.pool_cores = self._pool_cores(worker)
        cores = worker.pool_cores or worker.cores
        cut = servable.cut
        # What another process starts here has the model's blocks only, from which all workers load it.
        if cut is not None and section is None and (worker.device or not (cut.for_shadows or self.on_passed)):
            cut = None
        if cut is not None:
            cut = structs.replace(cut, layers={})
        return StageSetup(
            worker.number,
            self._wirings[spec.stage],
            structs.replace(servable, cut=cut, digest=servable.checked, source=""),
            spec.slot.hardware,
            threads=Grant(cores).threads,
            prepared=self._threads_prepared,
            holders=self._holders,
            layers=section.part.span if section is not None else None,
            device=worker.device,
        )

    def _are_starting(self) -> bool:
        """Whether workers start, which need the cores."""
        return any(worker.phase in BEGINNING for worker in self.workers.values())

    def _set_start_timer(self, worker: NodeWorker) -> None:
        self._set_timer(worker, self._start_s_max, f"it was not ready within {self._start_s_max:g} s")

    def _set_timer(self, worker: NodeWorker, after_s: float, why: str) -> None:
        self._clear_timer(worker)
        worker.timer = self._loop.call_later(after_s, self._give_up, worker, why)

    def _clear_timer(self, worker: NodeWorker) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None

    # The end

    @order.register
    def _stop(self, order: actions.StopWorker) -> None:
        worker = self.workers.get(order.worker)
        if worker is None:
            self._report(events.WorkerStopped(order.worker))
            return
        reaction, worker.phase = REACTIONS[actions.StopWorker][worker.phase], WorkerPhase.STOPPING
        # The core counts the cores of a part as free that it stops because a batch hangs, wherever in the pipeline.
        if reaction is EXIT and worker.process is not None and worker.section is None:
            if isinstance(worker, NodeShadow):
                self._tell_pair(worker, is_over=True)
            worker.process.link.end_output()
            self._set_timer(worker, STOP_S_MAX, "it did not stop")
        elif reaction is not AWAIT:
            self._give_up(worker, "it was stopped")

    def _give_up(self, worker: NodeWorker, why: str) -> None:
        """End a worker, if it is not ending, because of what `why` says or by an order: its process is killed, and its
        end reported once that is reaped. One that has taken a spare process only gets another one."""
        process, was_stopped = worker.process, worker.phase is WorkerPhase.STOPPING
        if worker.is_over:
            return
        worker.error = worker.error or why
        self._clear_timer(worker)
        if worker.is_spare and process is not None and not was_stopped:
            self._start_again(worker, process)
            return
        worker.is_over = True
        if not was_stopped:
            worker.phase = WorkerPhase.LOST
        if worker.task is not None:
            worker.task.cancel()
        if worker.shrink_timer is not None:
            worker.shrink_timer.cancel()
        if worker.shadow is not None:
            self._give_up(worker.shadow, "its replica has ended")
        if process is not None:
            process.close()
        if worker.section is not None:
            worker.section.leave()
        if process is not None:
            process.end(worker.error, partial(self._on_reaped, worker))
        else:
            self._on_reaped(worker)

    def _on_reaped(self, worker: NodeWorker) -> None:
        """The process of a worker has been reaped, if it had one."""
        if worker.process is not None:
            worker.error, worker.process = worker.process.explain(worker.error), None
        if worker.shadow is not None:  # whose cores and memory are those of the replica
            return
        if worker.phase is WorkerPhase.LOST and worker.device is not None:
            checking = self._loop.run_in_executor(None, is_present, worker.device.uuid)
            checking.add_done_callback(partial(self._on_gpu_checked, worker))
        else:
            self._end(worker)

    def _on_gpu_checked(self, worker: NodeWorker, checking: Future[bool]) -> None:
        """A worker that had a GPU has failed. If the GPU is gone, its node has other devices from now on; else another
        process may use it."""
        spec = worker.spec
        if self._gpus is not None and spec.node is not None and spec.device is not None and not checking.result():
            node = self._gpus.lose(spec.node, spec.device)
            if node is not None:
                _log.error("device %s of %s is gone: %s", spec.device, spec.node, worker.error)
                self._nodes[node.name] = left = structs.replace(self._nodes[node.name], devices=node.devices)
                self._report(events.NodeReady(left))
        self._end(worker)

    def _end(self, worker: NodeWorker) -> None:
        """A worker has gone, with all that it had."""
        del self.workers[worker.number]
        if self._models is not None:
            self._models.release(worker.held)
        if isinstance(worker, NodeShadow):
            worker.body.shadow = None
            if worker.body.is_over:  # whose end is told instead
                if worker.body.process is None:
                    self._on_reaped(worker.body)
                return
            self._tell_pair(worker, is_over=True)
        if worker.phase is WorkerPhase.STOPPING:
            self._report(events.WorkerStopped(worker.number))
        else:
            self._report(events.WorkerLost(worker.number, worker.error.replace("\n", "; ")))  # a fix follows in a line

    async def close(self) -> None:
        self._detach()
        if self._look_timer is not None:
            self._look_timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        for worker in list(self.workers):
            self._stop(actions.StopWorker(worker, "the server stops"))
        self.spares.close()
        await self._processes.until_gone(2 * STOP_S_MAX)
        self.spares.shutdown()
        self._actuator.close()
        if self._models is not None:
            await self._models.close()

    # Batches

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        worker = self.workers.get(replica)
        if worker is None or worker.phase in ENDING:
            return  # its end has been or will be reported, which answers this too
        assert worker.phase is WorkerPhase.READY, f"batch {batch} for replica {replica}, which is {worker.phase}"
        assert worker.process is not None
        worker.batch, worker.visits, section = batch, order.visits, worker.section
        worker.phase = WorkerPhase.BUSY
        if section is None or section.pipeline is None or not section.pipeline.takes(section.place, batch, order):
            if section is not None:  # what was on its way from other parts when its pipeline ended does not come
                section.batches = {batch: True}
            worker.process.records.tell(RunBatch(batch, replica, order, sent_ns=time.monotonic_ns()))

    def _look_later(self) -> None:
        self._look_timer = self._loop.call_later(LOOK_S, self._look, self._loop.time())

    def _look(self, last_s: float) -> None:
        """Report the batches whose workers are silent, once for each second: the core knows if that is too long. A part
        that waits because the next one does not read is silent too, but not with the oldest batch of its pipeline."""
        self._look_later()
        since_s = self._loop.time() - last_s
        for number, worker in list(self.workers.items()):
            batch, silence, process = worker.works_on, worker.silence, worker.process
            if batch is None or batch != worker.looked_at:
                worker.looked_at = batch
                silence.end()
            elif process is not None and not worker.is_over:
                before_s = int(silence.counted_s)
                silence.grow(since_s, process.state)
                if int(silence.counted_s) > before_s:
                    self._report(events.BatchSilent(batch, number, s(silence.counted_s)))

    # What workers report

    def _on_report(self, worker: NodeWorker, record: Any) -> None:  # noqa: ANN401  # of `FromWorker`
        section = worker.section
        try:
            match record:
                case Reached("complete") if section is not None:
                    self._on_completed(worker, section)
                case Reached("drained") if section is not None and section.pipeline is not None:
                    section.pipeline.on_drained(section.place)
                case Reached("drained") if section is not None:
                    self.on_drained(worker.number)
                case Reached("resized"):
                    self._finish_shrink(worker)
                case Reached() if isinstance(worker, NodeShadow):
                    self._on_shadow_step(worker, record)
                case Reached("ready") if worker.phase in BEGINNING:
                    self._on_ready(worker)
                case Reached(step) if step in STEPS:
                    self._on_step(worker)
                    self._progress(worker, step)
                case Reached():
                    raise ProtocolError(f"a worker that is {worker.phase} sent {record}")
                case _:
                    self._acts[type(record)](worker, record)
        except Exception as error:
            self._give_up(worker, _fault_in_report(worker.number, error))

    def _on_differs(self, worker: NodeWorker, record: WorkerDiffers) -> None:
        self.on_difference(worker.number, worker.spec.stage, worker.spec.variant, record.why)

    def _on_step(self, worker: NodeWorker) -> None:
        """A worker loads, so its process works."""
        if worker.phase is WorkerPhase.STARTING:
            worker.phase = WorkerPhase.LOADING
        if worker.is_spare:
            worker.is_spare = False
            self._set_start_timer(worker)

    def _on_ready(self, worker: NodeWorker) -> None:
        """The cold start is over: give the worker the cores that were ordered, or as many as the machine allows."""
        worker.phase, worker.is_spare = WorkerPhase.READY, False
        self._clear_timer(worker)
        if worker.pool_cores:
            self._join_pool(worker)
        else:
            wanted = worker.cores
            self._actuate(worker, wanted, threads_of=wanted)
            if worker.cores != wanted:
                self._report(events.WorkerResized(worker.number, worker.cores))
        if worker.is_over:
            return
        self._report(events.WorkerReady(worker.number))
        section = worker.section
        if section is not None and section.pipeline is not None:
            section.pipeline.on_part_ready(section.place)

    def _answered(self, worker: NodeWorker, batch: BatchId, *, is_done: bool) -> NodeWorker | None:
        """Whose batch a worker has answered. In a pipeline, the last worker answers the batches of all; None if nobody
        waits for it any more."""
        section = worker.section
        if section is not None:
            section.note(batch, is_reached=False)
            if section.is_completing:
                self._watch_completion(worker)
        if section is not None and section.pipeline is not None and section.pipeline.has(batch):
            replica = section.pipeline.answered(section.place, batch, is_done=is_done)
            owner = self.workers.get(replica) if replica is not None else None
            return None if owner is None else self._expect(owner, batch)
        if section is not None and section.is_last and section.pipeline is None and batch != worker.batch:
            return worker  # another process knows whether it is under way
        return self._expect(worker, batch)

    def _expect(self, worker: NodeWorker, batch: BatchId) -> NodeWorker:
        """The worker, which runs the batch that was answered, and then none."""
        if worker.batch != batch:
            raise ProtocolError(f"a reply to batch {batch} while batch {worker.batch} runs")
        worker.batch = None
        if worker.phase is WorkerPhase.BUSY:
            worker.phase = WorkerPhase.READY
        return worker

    def _on_done(self, worker: NodeWorker, record: BatchFinished) -> None:
        event, blocks = record.event, record.blocks
        is_known = worker.section is None or worker.section.pipeline is not None or worker.batch == event.batch
        owner = self._answered(worker, event.batch, is_done=True)
        if owner is not None and is_known and len(blocks) != owner.visits:
            raise ProtocolError(f"a reply has {len(blocks)} blocks for {owner.visits} visits")
        assert worker.process is not None
        written = [block for block in blocks if isinstance(block, Address)]
        for block in written:
            worker.process.hold(block)
        if owner is None:
            for block in written:
                self._arenas.free(block)
            return
        if self._listener is not None:
            own = structs.replace(event, replica=owner.number, faults=tuple(sorted(record.faults)))
            self._listener.on_finished(own, blocks, record.faults)

    def _on_failed(self, worker: NodeWorker, record: BatchRaised) -> None:
        owner = self._answered(worker, record.batch, is_done=False)
        if owner is not None and self._listener is not None:
            self._listener.on_failed(record.batch, owner.number, ModelFailure.decode(record.failure))

    # Pipelines

    def _join(self, worker: NodeWorker) -> None:
        """Start a worker as a part of a model. MachineError if the model has no such parts."""
        order, spec = worker.order, worker.spec
        check_part(order, len(blocks_of(worker.servable, worker.spec).blocks))
        if worker.device is not None:
            what = f"a part of {spec.variant!r} cannot start on device {spec.device!r}: parts run on CPU cores only"
            raise MachineError(what, help="write `partition: false` in `provision`")
        pipeline = joined(self._pipelines, order, self) if self.on_passed is None else None
        worker.section = _Section(spec.shape, order.place, pipeline)

    def _on_completed(self, worker: NodeWorker, section: _Section) -> None:
        """A worker has loaded the other layers."""
        if section.pipeline is not None:
            section.pipeline.on_completed(section.place)
        elif not section.is_completing:
            raise ProtocolError("a worker has completed a model that it was not told to complete")
        section.is_completing, section.is_complete = False, True
        worker.spec = structs.replace(worker.spec, shape=ALONE)
        if worker.phase is not WorkerPhase.STOPPING:
            self._clear_timer(worker)
        self._report(events.WorkerCompleted(worker.number))

    def _on_passed(self, worker: NodeWorker, record: BatchPassed) -> None:
        """A part has passed on a batch."""
        section, batch = worker.section, record.batch
        if section is None:
            raise ProtocolError("a worker with a whole model has passed on a batch")
        if section.is_completing:
            self._watch_completion(worker)
        section.note(batch, is_reached=False)
        if section.following is not None:
            self.reach_part(section.following, batch)
        if self.on_passed is not None:
            self.on_passed(worker.number, batch)

    def connect_parts(self, before: ReplicaId, after: ReplicaId) -> None:
        """See `PipelineOrders`. Also if one of them has ended: the other then finds its pipe closed."""
        worker = self.workers.get(before)
        if worker is not None and worker.section is not None:
            worker.section.following = after
        record = ConnectParts(before, after)
        self._processes.connect_parts(record, self._process_of(before), self._process_of(after))

    def pipe(self, replica: ReplicaId, record: ConnectParts) -> ProcessLink | None:
        """A pipe between a part and this process, which carries batches from or to another machine. None if the part
        has ended."""
        process = self._process_of(replica)
        return None if process is None else self._processes.pipe(record, process)

    def _process_of(self, part: ReplicaId) -> WorkerProcess | None:
        """The process of a part of a model; None if it has ended."""
        worker = self.workers.get(part)
        return None if worker is None or worker.section is None or worker.is_over else worker.process

    def run_part(self, replica: ReplicaId, batch: BatchId, order: Run) -> None:
        """See `PipelineOrders`."""
        process = self._process_of(replica)
        if process is not None:  # else its loss has been or will be noticed
            self.reach_part(replica, batch)
            process.records.tell(RunBatch(batch, replica, order, is_part=True, sent_ns=time.monotonic_ns()))

    def reach_part(self, replica: ReplicaId, batch: BatchId) -> None:
        """A batch is in a part, or in the pipe to it: from now on the part is to do something."""
        worker = self.workers.get(replica)
        if worker is not None and worker.section is not None:
            worker.section.note(batch, is_reached=True)

    def complete_part(self, replica: ReplicaId, transfer: TransferId | None = None) -> None:
        """See `PipelineOrders`. The other layers come with the transfer, if one was ordered."""
        worker = self.workers.get(replica)
        section = worker.section if worker is not None and not worker.is_over else None
        if worker is None or section is None or section.is_complete or section.task is not None:
            return
        if self._models is None:
            self._load_others(worker, section, {})
            return
        others = self._models.bring_others(blocks_of(worker.servable, worker.spec), section.part, transfer, worker.held)
        section.task = asyncio.create_task(others)
        section.task.add_done_callback(partial(self._on_others_brought, worker, section))

    def _on_others_brought(self, worker: NodeWorker, section: _Section, brought: Task[dict[int, str]]) -> None:
        if self._has_come(worker, brought, "the other layers"):
            self._load_others(worker, section, brought.result())

    def _load_others(self, worker: NodeWorker, section: _Section, files: dict[int, str]) -> None:
        """`files` has those of the other layers that were not here when the part started."""
        if worker.process is not None:
            section.is_completing = True
            worker.process.records.tell(CompleteWorker(worker.number, files))
            self._watch_completion(worker)

    def _watch_completion(self, worker: NodeWorker) -> None:
        """Limit how long a part that loads the other layers may be silent. When its pipeline is broken it runs no
        batches, so nothing else would show that it hangs. Batches restart the limit, because loading waits for them."""
        if worker.phase is not WorkerPhase.STOPPING:
            why = f"it did not load the other layers within {self._start_s_max:g} s"
            self._set_timer(worker, self._start_s_max, why)

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        """See `PipelineOrders`."""
        worker = self.workers.get(replica)
        if worker is not None and worker.batch == batch:
            worker.batch = None
            if worker.phase is WorkerPhase.BUSY:
                worker.phase = WorkerPhase.READY
            self._report(events.BatchLost(batch, replica, why))

    # Shadows

    def _start_shadow(self, order: actions.StartWorker, replica: ReplicaId) -> None:
        body, wanted = self.workers.get(replica), order.spec.shadow
        if body is None or REACTIONS[actions.StartWorker][body.phase] is AWAIT:
            return  # its end, which has been or will be reported, is that of its shadow
        assert wanted is not None, f"worker {order.worker} is no shadow"
        try:
            if REACTIONS[actions.StartWorker][body.phase] is REFUSE:
                raise MachineError("its replica is not ready")
            if body.shadow is not None:
                raise MachineError("the one before has not ended")
            made = NodeShadow(order, body, wanted, _cut_for(body, wanted))
        except MachineError as error:
            self._report(events.WorkerLost(order.worker, str(error)))
            return
        body.shadow = self.workers[order.worker] = made
        self.spares.note_start()
        self._give_process(made, self.spares.take())

    def _on_shadow_step(self, shadow: NodeShadow, record: Reached) -> None:
        """A shadow loads its blocks, or has loaded them: then limit its cores, and let the body connect."""
        self._on_step(shadow)
        if record.step != "ready":
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
        shadow.address = record.address
        self._tell_pair(shadow)

    def _tell_pair(self, shadow: NodeShadow, *, is_over: bool = False) -> None:
        """Tell a body which batches it shares with its shadow, or that it no longer shares any."""
        body = shadow.body
        if body.process is None or not shadow.address:
            return
        pair = PairSetup(shadow.number)
        if not is_over:
            from sloop.profile.blocks import shared_rows  # noqa: PLC0415  # it needs NumPy

            assert shadow.process is not None
            layers, wanted = shadow.cut.layers[body.spec.slot.hardware], shadow.wanted
            rows, shadow_ms = shared_rows(layers, body.cores, wanted, shadow.cut.batch_max)
            patience_ms = tuple(max(PATIENCE * each_ms, each_ms + PATIENCE_MS_MIN) for each_ms in shadow_ms)
            pair = PairSetup(shadow.number, shadow.address, shadow.process.pid, wanted.layers, rows, patience_ms)
        body.process.records.tell(pair)

    def _on_reported(self, worker: NodeWorker, record: Report[events.WorkerReady | events.WorkerLost]) -> None:
        """A worker says why it exits; or a body has connected with its shadow, or has given it up."""
        shadow, event = worker.shadow, record.event
        if event.worker == ITSELF and isinstance(event, events.WorkerLost):
            worker.error = event.error
            return
        if shadow is None or shadow.number != event.worker or shadow.is_over:
            return
        if isinstance(event, events.WorkerLost):
            self._give_up(shadow, event.error)
        elif shadow.phase in BEGINNING:
            shadow.phase = WorkerPhase.READY
            self._clear_timer(shadow)
            self._report(event)

    # Cores

    def _pool_cores(self, worker: NodeWorker) -> float:
        """The cores that a worker without a cap shares with all others of its node."""
        node = self._nodes.get(worker.spec.node or "")
        return min(self._actuator.capacity_cores, node.cores if node is not None else inf)

    @order.register
    def _resize(self, order: actions.ResizeWorker) -> None:
        worker, cores = self.workers.get(order.worker), order.cores
        if worker is None or REACTIONS[actions.ResizeWorker][worker.phase] is AWAIT:
            return  # its end has been or will be reported, which answers this too
        if REACTIONS[actions.ResizeWorker][worker.phase] is NOTE or worker.pool_cores:
            worker.spec = worker.spec.with_cores(cores)  # applied in `_on_ready`, or only reserved
            if worker.process is not None and not worker.pool_cores:
                self._send_threads(worker, Grant(cores))
            self._report(events.WorkerResized(worker.number, cores))
            return
        self._finish_shrink(worker)
        if cores < worker.cores:
            self._send_threads(worker, Grant(cores))
            worker.shrink_to = cores
            worker.shrink_timer = self._loop.call_later(SHRINK_S_MAX, self._finish_shrink, worker)
            return
        self._actuate(worker, cores, threads_of=worker.cores)
        self._report(events.WorkerResized(worker.number, worker.cores))

    def _finish_shrink(self, worker: NodeWorker) -> None:
        """Write the smaller quota: the worker has reduced its threads, or `SHRINK_S_MAX` has passed."""
        cores = worker.shrink_to
        if cores is None:
            return
        worker.shrink_to = None
        if worker.shrink_timer is not None:
            worker.shrink_timer.cancel()
            worker.shrink_timer = None
        self._actuate(worker, cores, threads_of=cores)
        self._report(events.WorkerResized(worker.number, worker.cores))

    def _actuate(self, worker: NodeWorker, cores: float, *, threads_of: float) -> None:
        """Change the CPU limit, and then the threads, which are those of `threads_of` cores. If the machine refuses,
        the worker keeps the cores that it has."""
        assert worker.process is not None
        try:
            grant = self._actuator.resize(worker.process.pid, cores)
            worker.spec = worker.spec.with_cores(grant.cores)
            shadow = worker.shadow
            if shadow is not None and shadow.phase is WorkerPhase.READY:
                self._tell_pair(shadow)  # rows are divided by the cores of both
        except MachineError as error:
            _log.warning("replica %d keeps %g cores: %s", worker.number, worker.cores, error)
            grant = Grant(worker.cores)
        if grant != Grant(threads_of):
            self._send_threads(worker, grant)

    def _join_pool(self, worker: NodeWorker) -> None:
        """Move a worker without a cap into the control group that all such workers of its node share. If the machine
        refuses, the worker ends, because an unplanned cap would make it slower than its profile."""
        assert worker.process is not None
        try:
            grant = self._actuator.join(worker.process.pid, worker.spec.node or "", worker.pool_cores)
        except MachineError as error:
            self._give_up(worker, str(error))
            return
        if grant != Grant(worker.pool_cores):
            self._send_threads(worker, grant)

    def _send_threads(self, worker: NodeWorker, grant: Grant) -> None:
        assert worker.process is not None
        worker.process.records.tell(Threads(grant.threads, grant.duty))

    # Reports

    def _progress(self, worker: NodeWorker, step: str) -> None:
        self._report(events.WorkerProgressed(worker.number, step))


def _shadow_setup(shadow: NodeShadow) -> ShadowSetup:
    """What the process of a shadow is told to serve."""
    assert shadow.body.process is not None
    blocks = {place: shadow.cut.blocks[place] for place in shadow.wanted.layers}
    return ShadowSetup(shadow.spec.stage, blocks, shadow.body.process.pid, Grant(shadow.cores).threads)


def _cut_for(body: NodeWorker, shadow: Worker) -> CutModel:
    """The model in blocks, some of which a shadow holds. MachineError if it has no such blocks."""
    cut, spec = blocks_of(body.servable, body.spec), body.spec
    if spec.slot.hardware not in cut.layers:
        what = f"the blocks of {spec.variant!r} were not measured on {spec.slot.hardware!r}"
        raise MachineError(what, help="measure them there: `sloop profile MODEL --layers`")
    if not shadow.layers or not 0 <= min(shadow.layers) <= max(shadow.layers) < len(cut.blocks):
        raise MachineError(f"{spec.variant!r} has {len(cut.blocks)} blocks, not those of {shadow.layers}")
    return cut


def _fault_in_report(worker: WorkerId, error: Exception) -> str:
    """Why a worker whose report could not be taken up is given up. If not the report is wrong but the server, which is
    a bug, the log has the traceback; without this, nobody would hear of the batch."""
    if isinstance(error, ProtocolError):
        return str(error)
    _log.error("a report of replica %d could not be taken up", worker, exc_info=error)
    return f"its report could not be taken up: {error!r}"
