"""Replicas as worker processes on this machine: one process, one socket, one CPU confinement each.

Promises that every order is answered once; that a worker's death is noticed when its socket ends, and reported once the
process is reaped and its cores are free again; that no worker outlives the server; that nothing waits without bound
(`START_S_MAX`, `STOP_S_MAX`, `SHRINK_S_MAX`). Must not know requests, deadlines or policies.

Growing writes the quota first and then tells the worker its threads; shrinking the other way round, so that threads
never wait for each other inside too small a quota (Sponge specification, section 7.1). A worker in the middle of a
batch cannot change its threads: then the quota follows after `SHRINK_S_MAX` regardless. A start has `START_CORES_MIN`
even where the replica will have less, or a quarter of a core would take four times as long to load as profiles tell.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from sloop.errors import MachineError
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaProgressed, ReplicaReady, ReplicaStopped, Resized
from sloop.serve.cpu_quota import CpuActuator, Grant
from sloop.serve.protocols import BackendListener, Servable
from sloop.serve.transport import (
    CLOSED,
    Frame,
    FrameKind,
    Joined,
    ProtocolError,
    WorkerLink,
    cut,
    is_batchable,
    join,
    socket_pair,
)
from sloop.serve.worker import MILLIONTHS, STEPS
from sloop.shared_memory import SHARED_BYTES_MIN, SharedMemory, lay_out
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec

START_S_MAX: Final = 300.0
"""A worker that is not ready by then is given up: a large model on a fraction of a core takes its time."""
STOP_S_MAX: Final = 2.0
"""A worker told to stop and still there is killed."""
START_CORES_MIN: Final = 1.0
"""Cores a replica has at least while it starts; loading is the work of one thread."""
SHRINK_S_MAX: Final = 0.010
"""How long a smaller quota waits for the worker to drop threads: one scheduling period."""
REAP_S: Final = 0.002
"""Between looks at whether a process whose socket has ended is gone; it takes one or two."""
ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""NumPy's own thread pools stay out of the way of the model's."""


class _Replica:
    """A worker process and what is under way with it."""

    def __init__(self, replica: ReplicaId, servable: Servable) -> None:
        self.id, self.servable = replica, servable
        self.batchable = not servable.obstacle and is_batchable(servable.signature)
        self.process: subprocess.Popen[bytes] | None = None
        self.link: WorkerLink | None = None
        self.shared: SharedMemory | None = None
        self.timer: TimerHandle | None = None
        self.is_ready = self.is_stopping = self.is_dying = False
        self.batch: BatchId | None = None
        self.joined: Joined | None = None
        self.cores = 0.0
        self.shrink_to: float | None = None
        self.shrink_timer: TimerHandle | None = None
        self.error = ""


class LocalBackend:
    """Keeps worker processes on this machine. Make it inside the running event loop.

    `servables` by (stage, variant). `threads_prepared`: thread counts from 1 to this one are made ready in the
    background of every start, so that the first resize to them is as quick as the later ones. Each costs memory; where
    they are more than a runtime keeps, they are made when they are first wanted.
    """

    def __init__(
        self,
        servables: Mapping[tuple[str, str], Servable],
        actuator: CpuActuator,
        *,
        threads_prepared: int = 0,
        start_s_max: float = START_S_MAX,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        self._servables, self._actuator = servables, actuator
        self._threads_prepared, self._start_s_max = threads_prepared, start_s_max
        self._loop = loop or asyncio.get_running_loop()
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._listener: BackendListener | None = None
        self._emptied = asyncio.Event()

    def attach(self, listener: BackendListener) -> None:
        self._listener = listener

    def pid(self, replica: ReplicaId) -> int | None:
        """The process of a replica, for those who watch or disturb it from outside."""
        found = self._replicas.get(replica)
        return found.process.pid if found and found.process else None

    def start(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        made = _Replica(replica, self._servables[spec.stage, spec.variant])
        self._replicas[replica] = made
        self._tell(ReplicaProgressed(replica, "spawning"))
        try:
            if spec.device:
                raise MachineError(f"device {spec.device!r} is asked for", help="local replicas run on CPU cores only")
            self._spawn(made, spec.cores)
        except (OSError, MachineError) as error:
            self._give_up(made, str(error))

    def stop(self, replica: ReplicaId) -> None:
        found = self._replicas.get(replica)
        if found is None:
            self._tell(ReplicaStopped(replica))
            return
        found.is_stopping = True
        if found.is_dying:
            return
        if found.link is not None and found.is_ready and found.batch is None:
            found.link.send(FrameKind.STOP)
            self._set_timer(found, STOP_S_MAX, "it did not stop")
        else:
            self._give_up(found, "it was stopped")

    def resize(self, replica: ReplicaId, cores: float) -> None:
        found = self._replicas.get(replica)
        if found is None or found.process is None or found.link is None or found.is_dying:
            return  # its loss is about to be reported, or has been
        if not found.is_ready:
            found.cores = cores  # given when the start is over
            self._send_threads(found, Grant(cores))
            self._tell(Resized(replica, cores))
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
            self._tell(Resized(replica, grant.cores))

    def run(self, batch: BatchId, replica: ReplicaId, requests: Sequence[Sequence[Tensor]]) -> None:
        found = self._replicas.get(replica)
        if found is None or found.link is None or found.is_dying:
            return  # its loss is about to be reported, and the batch with it
        assert found.batch is None, f"batch {batch} for replica {replica}, which runs {found.batch}"
        try:
            joined = join(requests, batchable=found.batchable)
        except ProtocolError as error:
            self._tell(BatchFailed(batch, replica, str(error)))
            return
        found.batch, found.joined = batch, joined
        if found.shared is not None and joined.size_bytes >= SHARED_BYTES_MIN:
            found.link.send(FrameKind.RUN, batch, lay_out(found.shared, joined.payload), joined.table)
        else:
            found.link.send(FrameKind.RUN, batch, 0, joined.table, list(chain.from_iterable(joined.payload)))

    async def close(self) -> None:
        self._listener = None
        for replica in list(self._replicas):
            self.stop(replica)
        if self._replicas:
            self._emptied.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), 2 * STOP_S_MAX)
        self._actuator.close()

    # Starting and ending processes

    def _spawn(self, replica: _Replica, cores: float) -> None:
        ours, theirs = socket_pair()
        with theirs:
            replica.link = WorkerLink(
                self._loop,
                ours,
                lambda frame: self._on_frame(replica, frame),
                lambda why: self._on_end(replica, why),
            )
            expected = Grant(cores)
            replica.shared = SharedMemory.make()
            fds = [theirs.fileno(), *([replica.shared.fd] if replica.shared else [])]
            own = (theirs.fileno(), os.getpid(), replica.servable.model, expected.threads, self._threads_prepared)
            arguments = (*own, replica.shared.fd if replica.shared else -1)
            replica.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sloop.serve.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print must not end up in our own output
                env=os.environ | ONE_THREAD,
                pass_fds=fds,
                start_new_session=True,
            )
        replica.cores = cores
        self._actuator.confine(replica.process.pid, max(cores, START_CORES_MIN))
        self._set_timer(replica, self._start_s_max, f"it was not ready within {self._start_s_max:g} s")

    def _set_timer(self, replica: _Replica, after_s: float, why: str) -> None:
        self._clear_timer(replica)
        replica.timer = self._loop.call_later(after_s, self._give_up, replica, why)

    def _clear_timer(self, replica: _Replica) -> None:
        if replica.timer is not None:
            replica.timer.cancel()
            replica.timer = None

    def _on_end(self, replica: _Replica, why: str) -> None:
        self._give_up(replica, why)

    def _give_up(self, replica: _Replica, why: str) -> None:
        """Whatever the reason, from here on the replica only dies; it is reported when it is dead."""
        if replica.is_dying:
            return
        replica.is_dying = True
        replica.error = replica.error or why
        self._clear_timer(replica)
        if replica.shrink_timer is not None:
            replica.shrink_timer.cancel()
        if replica.link is not None:
            replica.link.close()
        self._bury(replica, looks=0)

    def _bury(self, replica: _Replica, looks: int) -> None:
        """Reap the process. One whose socket has just ended may be about to exit by itself, with a telling status."""
        process = replica.process
        if process is not None and process.poll() is None:
            exits_by_itself = replica.error == CLOSED and looks < 5
            if not exits_by_itself:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            self._loop.call_later(REAP_S, self._bury, replica, looks + 1)
            return
        if process is not None:
            self._actuator.release(process.pid)
        if replica.shared is not None:
            replica.shared.close()
        del self._replicas[replica.id]
        if replica.is_stopping:
            self._tell(ReplicaStopped(replica.id))
        else:
            self._tell(ReplicaLost(replica.id, _explain(replica.error, process)))
        if not self._replicas:
            self._emptied.set()

    # News from workers

    def _on_frame(self, replica: _Replica, frame: Frame) -> None:
        try:
            match frame.kind:
                case FrameKind.DONE:
                    self._on_done(replica, frame)
                case FrameKind.FAILED:
                    self._expect(replica, frame)
                    self._tell(BatchFailed(BatchId(frame.subject), replica.id, _text(frame)))
                case FrameKind.RESIZED:
                    self._finish_shrink(replica)
                case FrameKind.READY:
                    self._on_ready(replica)
                case FrameKind.STEP if 0 <= frame.subject < len(STEPS):
                    self._tell(ReplicaProgressed(replica.id, STEPS[frame.subject]))
                case FrameKind.REFUSED:
                    replica.error = _text(frame)
                case _:
                    raise ProtocolError(f"a worker sent {frame.kind.name} {frame.subject}")
        except ProtocolError as error:
            self._give_up(replica, str(error))

    def _on_ready(self, replica: _Replica) -> None:
        """The cold start is over: from here on it has the cores that were asked for, or those that can be had."""
        replica.is_ready = True
        self._clear_timer(replica)
        wanted = replica.cores
        grant = self._actuate(replica, wanted)
        if grant is not None:
            if grant != Grant(wanted):
                self._send_threads(replica, grant)
            if grant.cores != wanted:
                self._tell(Resized(replica.id, grant.cores))
        self._tell(ReplicaReady(replica.id))

    def _expect(self, replica: _Replica, frame: Frame) -> Joined:
        """The batch that this frame answers, which is the one under way."""
        joined = replica.joined
        if joined is None or frame.subject != replica.batch:
            raise ProtocolError(f"an answer to batch {frame.subject}, while {replica.batch} is under way")
        replica.batch = replica.joined = None
        return joined

    def _on_done(self, replica: _Replica, frame: Frame) -> None:
        joined = self._expect(replica, frame)
        batch = BatchId(frame.subject)
        try:
            outputs = cut(joined, frame.table, frame.payload)
            wanted = len(replica.servable.signature.outputs)
            if any(len(tensors) != wanted for tensors in outputs):
                raise ProtocolError(f"an answer has not {wanted} outputs per pass")
        except ValueError as error:
            self._tell(BatchFailed(batch, replica.id, str(error)))
            return
        if self._listener is not None:
            self._listener.finished(Finished(batch, replica.id, frame.value), outputs)

    # Cores

    def _finish_shrink(self, replica: _Replica) -> None:
        """The worker has dropped its threads, or has had its time: write the smaller quota."""
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
        self._tell(Resized(replica.id, grant.cores))

    def _actuate(self, replica: _Replica, cores: float) -> Grant | None:
        """Change what the machine gives. Where it refuses, say so by reporting the cores it leaves us with."""
        assert replica.process is not None
        try:
            grant = self._actuator.resize(replica.process.pid, cores)
        except MachineError as error:
            sys.stderr.write(f"sloop: replica {replica.id} keeps {replica.cores:g} cores: {error}\n")
            self._tell(Resized(replica.id, replica.cores))
            return None
        replica.cores = grant.cores
        return grant

    def _send_threads(self, replica: _Replica, grant: Grant) -> None:
        assert replica.link is not None
        replica.link.send(FrameKind.RESIZE, grant.threads, round(grant.duty * MILLIONTHS))

    def _tell(
        self,
        event: BatchFailed | ReplicaLost | ReplicaProgressed | ReplicaReady | ReplicaStopped | Resized,
    ) -> None:
        if self._listener is not None:
            self._listener.happened(event)


def _text(frame: Frame) -> str:
    return str(frame.payload, "utf-8", "replace")


def _explain(error: str, process: subprocess.Popen[bytes] | None) -> str:
    """Why a replica is gone, with how its process ended where nothing better is known."""
    if process is None or error != CLOSED:
        return error
    code = process.returncode
    return f"its process was killed by {signal.Signals(-code).name}" if code < 0 else f"its process exited with {code}"
