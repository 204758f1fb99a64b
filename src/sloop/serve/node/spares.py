"""Spare workers: processes that have loaded Python and its libraries, and wait for a model.

Starting Python takes longer than loading most models. So as many are started in advance as workers were lately started
together. A thread starts them one after the other, at the lowest priority, while no worker starts. A start never
depends on a spare worker: a worker takes one only if it waits, and if that one dies or does not answer, it gets another
process.
"""

import asyncio
import logging
import os
from asyncio import Future, Task, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from sloop.errors import MachineError
from sloop.machine import capacity
from sloop.memory import own_bytes
from sloop.serve.messages import Reached, Report
from sloop.serve.node.process import WorkerProcess, WorkerProcesses
from sloop.serve.processes import spawn
from sloop.serve.protocols import SpareProcesses
from sloop.serve.transport import CLOSED

SPARES_AFTER_S: Final = 1.0
"""Spare workers are started this long after the last worker was, because that worker needs the cores first."""
SPARES_FOR_S: Final = 600.0
"""How long the number of workers that were started together is remembered."""
STARTS_MAX: Final = 256
"""How many starts are remembered."""
HUMBLE_S_MAX: Final = 10.0
"""Seconds after which a spare worker that is started at the lowest priority and does not wait yet is killed: all cores
are busy. The next one is started at the usual priority, and takes 0.3 s of a core."""
SPARE_S_MAX: Final = 60.0
"""The same for one of the usual priority, which may have to read libraries from a slow disk."""

_log: Final = logging.getLogger("sloop.backend")


class SparePool:
    """The spare workers of a machine, at most `most`. None is started while `are_starting()`: workers are."""

    def __init__(self, processes: WorkerProcesses, most: int, are_starting: Callable[[], bool]) -> None:
        self._processes, self._loop, self._most, self._are_starting = processes, processes.loop, most, are_starting
        self._waiting: list[WorkerProcess] = []
        """Those that can be taken, the first first."""
        self._starting: Task[None] | None = None
        """Starts the next one."""
        self._ready: Future[str] = self._loop.create_future()
        """Ends when that one waits; or else with the reason why it never will."""
        self._timer: TimerHandle | None = None
        self._failures = 0
        """How many have ended, one after the other, before they waited."""
        self._thread = ThreadPoolExecutor(1, "sloop-spawn")
        """Starts their processes, which end with its *thread* (`sloop.serve.processes.die_with`). The thread lives as
        long as this object, because a pool of one never ends its thread before `shutdown`."""
        self._starts: deque[float] = deque(maxlen=STARTS_MAX)
        """When workers were started, the latest last."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when those that wait have become more or fewer."""

    def note_start(self) -> None:
        """A worker starts."""
        self._starts.append(self._loop.time())
        self.start_later()

    def take(self) -> WorkerProcess | None:
        """The process of the spare worker that has waited longest, if there is one that has not just died."""
        while self._waiting:
            process = self._waiting[0]
            if process.is_alive:
                self._waiting.remove(process)
                self.on_change()
                return process
            self._end(process, CLOSED)
        return None

    def pids(self) -> list[int]:
        """The process ids of those that wait."""
        return [process.pid for process in self._waiting]

    def counted(self) -> SpareProcesses:
        """Those that wait."""
        pids = self.pids()
        return SpareProcesses(len(pids), sum(map(own_bytes, pids)))

    def close(self) -> None:
        """End all, and start no more."""
        self._most = 0
        self._answer("it is not needed")
        for process in list(self._waiting):
            self._end(process, "")

    def shutdown(self) -> None:
        """Let the thread end, and with it what it has started."""
        self._thread.shutdown(wait=False)

    def start_later(self, after_s: float | None = None) -> None:
        """Start what is missing after a while."""
        if self._timer is not None:
            self._timer.cancel()
        if self._most:
            self._timer = self._loop.call_later(SPARES_AFTER_S if after_s is None else after_s, self._start_missing)

    def _start_missing(self) -> None:
        """Have as many as workers were lately started together. They are started one after the other, because each
        takes a core for a moment."""
        if self._are_starting():
            self.start_later()
            return
        wanted = min(self._most, most_together(self._starts, self._loop.time()))
        for process in self._waiting[wanted:]:
            self._end(process, "")
        if self._starting is None:
            if len(self._waiting) < wanted:
                self._starting = self._loop.create_task(self._start(is_humble=not self._failures))
            elif wanted > 1:
                self.start_later(SPARES_FOR_S / 2)

    async def _start(self, *, is_humble: bool) -> None:
        """Start one, at the lowest priority if it `is_humble`. If that fails, the next one is started after 1 s at
        first, then later and later, at most after half of `SPARES_FOR_S`."""
        pause_s, process = 0.0, None
        try:
            process = await self._started(is_humble=is_humble)
            limit_s = HUMBLE_S_MAX if is_humble else SPARE_S_MAX
            why = await self._said(limit_s) or await self._prepared(process)
        except (OSError, MachineError) as error:
            why = str(error)
        self._starting = None
        if process is not None and not why:
            self._waiting.append(process)
            process.records.attach({}, partial(self._end, process))
            self._failures = 0
            self.on_change()
        else:
            if process is not None:
                process.end("", lambda: None)
            self._failures += 1
            if self._most and not is_humble:  # the lowest priority gets no time on a busy machine; nobody can help that
                _log.warning("a spare worker could not be started: %s", why)
            pause_s = min(SPARES_FOR_S / 2, SPARES_AFTER_S * 2 ** min(self._failures, 20))
        self.start_later(pause_s)

    async def _started(self, *, is_humble: bool) -> WorkerProcess:
        """A process that is loading its libraries."""
        process, theirs = self._processes.connect()
        self._ready = self._loop.create_future()
        process.records.attach(
            {Reached: lambda _: self._answer(""), Report: lambda record: self._answer(record.event.error)}, self._answer
        )
        with theirs:
            arguments, fds = self._processes.inherited(process, theirs)
            command = ("sloop.serve.worker", int(is_humble), os.getpid(), *arguments)
            start = partial(spawn, "sloop.serve.processes", command, fds, environment=self._processes.environment())
            try:
                process.popen = await self._loop.run_in_executor(self._thread, start)
            except OSError:
                process.end("", lambda: None)
                raise
        return process

    async def _said(self, within_s: float) -> str:
        """Wait until it waits. Returns why it never will; empty if it does."""
        if not self._most:
            return "it is not needed"
        try:
            return await asyncio.wait_for(self._ready, within_s)
        except TimeoutError:
            return f"it was not prepared within {within_s:g} s"

    async def _prepared(self, process: WorkerProcess) -> str:
        """Prepare what limits it. It had to load its libraries in the control group of the server, because its priority
        counts only there. Returns why it is of no use; empty if it can be taken."""
        await self._loop.run_in_executor(self._thread, self._processes.actuator.prepare, process.pid)
        return "" if self._most and process.is_alive else CLOSED

    def _answer(self, why: str) -> None:
        if not self._ready.done():
            self._ready.set_result(why)

    def _end(self, process: WorkerProcess, why: str) -> None:
        """One that waited has ended, or is not needed: it is replaced if it is."""
        self._waiting.remove(process)
        process.end(why, lambda: None)
        self.on_change()
        self.start_later()


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
