"""Processes for workers on this machine: how they start, what they share with this one, and how they end."""

import asyncio
import os
import signal
import socket
import subprocess
from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from typing import Final

from sloop.cuda import CudaDevice
from sloop.errors import MachineError
from sloop.serve.blocks import ARENA_BYTES
from sloop.serve.cpu_quota import CpuActuator
from sloop.serve.gpus import AssignedGpus
from sloop.serve.heartbeat import ProcessState, process_state
from sloop.serve.messages import ConnectParts, Free, FromWorker
from sloop.serve.processes import kill, spawn
from sloop.serve.transport import CLOSED, ProcessLink, ProtocolError, RecordLink, socket_pair
from sloop.shared_memory import Address, Arenas

REAP_S: Final = 0.002
"""How often to check whether a process has exited after its socket closed; one or two checks are usually enough."""


class WorkerProcess:
    """A process of which a worker is made, or a spare one: its socket, its arena, and its end. Its user attaches to
    `records`."""

    def __init__(self, processes: "WorkerProcesses", sock: socket.socket) -> None:
        self._processes = processes
        self.popen: subprocess.Popen[bytes] | None = None
        self.arena: Final = processes.arenas.make(ARENA_BYTES, self.free)
        self.is_over = False
        """Whether it is ending."""
        self.link = ProcessLink(processes.loop, sock)
        self.records = RecordLink(processes.loop, self.link, FromWorker, {}, lambda why: None)

    @property
    def pid(self) -> int:
        """The number of the process, which has started."""
        assert self.popen is not None
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has started and has not exited."""
        return self.popen is not None and self.popen.poll() is None

    @property
    def state(self) -> ProcessState | None:
        """What it does now; None if the kernel does not say it."""
        return process_state(self.pid)

    def hold(self, block: Address) -> None:
        """It has written a block. ProtocolError if that is not in its arena."""
        if block.arena != self.arena.number:
            raise ProtocolError(f"{block} is not in the arena of this worker")
        self._processes.arenas.hold(block)

    def free(self, block: Address) -> None:
        """A block in its arena is free."""
        self.records.send(Free(block))

    def give_pipe(self, record: ConnectParts, pipe: socket.socket) -> None:
        """It is a part of a model, and gets its end of a pipe to or from another part."""
        self.records.tell(record)
        try:
            self.link.send_socket(pipe)
        except OSError:  # it has ended, or does not read
            self.link.fail(CLOSED)

    def close(self) -> None:
        """Close its socket: nothing that it sends is heard from now on. `end` follows."""
        self.is_over = True
        self.records.close()

    def end(self, why: str, then: Callable[[], None]) -> None:
        """Kill and reap the process, then call `then`. If its socket has just closed, first let it exit: its status may
        say why."""
        self.close()
        self._reap(5 if why == CLOSED else 0, then)

    def _reap(self, checks: int, then: Callable[[], None]) -> None:
        if self.is_alive:
            if not checks:
                kill(self.pid)
            self._processes.loop.call_later(REAP_S, self._reap, max(0, checks - 1), then)
            return
        if self.popen is not None:
            self._processes.actuator.release(self.pid)
        self._processes.arenas.abandon(self.arena)
        self._processes.forget(self)
        then()

    def explain(self, error: str) -> str:
        """Why it has ended: its exit status if `error` says nothing more specific."""
        if self.popen is None or error != CLOSED:
            return error.replace("\n", "; ")  # a fix follows in a line of its own
        code = self.popen.returncode
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with {code}"


class WorkerProcesses:
    """Starts processes for workers, and knows those that have not been reaped."""

    def __init__(
        self, loop: AbstractEventLoop, arenas: Arenas, actuator: CpuActuator, gpus: AssignedGpus | None = None
    ) -> None:
        self.loop, self.arenas, self.actuator, self._gpus = loop, arenas, actuator, gpus
        self._alive: set[WorkerProcess] = set()
        self._emptied = asyncio.Event()

    def connect(self) -> tuple[WorkerProcess, socket.socket]:
        """What a process that is to start shares with this one, and its end of the socket."""
        ours, theirs = socket_pair()
        try:
            made = WorkerProcess(self, ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._alive.add(made)
        return made, theirs

    def inherited(self, process: WorkerProcess, theirs: socket.socket) -> tuple[tuple[int, ...], list[int]]:
        """The arguments of a worker process, and the file descriptors that it inherits."""
        fd, arena = theirs.fileno(), process.arena
        return (fd, os.getpid(), arena.number, arena.fd), [fd, arena.fd]

    def connect_parts(self, record: ConnectParts, before: WorkerProcess | None, after: WorkerProcess | None) -> None:
        """Let one part of a model pass batches to the next. If one of them is gone, the other finds the pipe closed."""
        ends = socket.socketpair()
        for end, process in zip(ends, (before, after), strict=True):
            with end:
                if process is not None:
                    process.give_pipe(record, end)

    def pipe(self, record: ConnectParts, part: WorkerProcess) -> ProcessLink:
        """A pipe between a part of a model and this process, which passes on what comes."""
        ours, theirs = socket_pair()
        with theirs:
            part.give_pipe(record, theirs)
        return ProcessLink(self.loop, ours)

    def environment(self, device: CudaDevice | None = None) -> Mapping[str, str]:
        """The variables of a process: where GPUs are declared, it sees its own and no other."""
        return {} if self._gpus is None else self._gpus.environment(device)

    def start(self, device: CudaDevice | None = None) -> WorkerProcess:
        """Start a process, which does not know yet what it serves. OSError or MachineError if that is not possible."""
        made, theirs = self.connect()
        with theirs:
            arguments, fds = self.inherited(made, theirs)
            try:
                made.popen = spawn("sloop.serve.worker", arguments, fds, environment=self.environment(device))
            except (OSError, MachineError):
                made.end("", lambda: None)
                raise
        return made

    def forget(self, process: WorkerProcess) -> None:
        """A process has been reaped."""
        self._alive.discard(process)
        if not self._alive:
            self._emptied.set()

    async def until_gone(self, within_s: float) -> None:
        """Wait until all have been reaped."""
        if self._alive:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), within_s)
            except TimeoutError:
                return
