"""The sending process of the load generator: its orders, its timers, and the open loop.

The process does nothing else, so neither Python's lock nor evaluation delays a request. It reads its orders from a
folder (`orders.json`, `schedule.bin` with pairs of int64 (due, elapsed) in ns, `body-K.bin`, and `places.bin` with the
K of each request in int32, unless bodies are sent in turn), writes `records.bin` there, and prints one `ProgressReport`
per line. No request waits for an answer, and each request of the schedule is recorded exactly once.
`sent_ns - due_ns` of a record is the generator's own lag, not the server's.
"""

import asyncio
import ctypes
import gc
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray

from sloop.load.connections import Connections, Outgoing, RequestHead, Response, Server
from sloop.load.plan import Body
from sloop.load.results import Ending, RecordWriter
from sloop.units import NS_PER_MS, NS_PER_S, to_s

SCHEDULE: Final = "schedule.bin"
PLACES: Final = "places.bin"
RECORDS: Final = "records.bin"
ORDERS: Final = "orders.json"


class Orders(msgspec.Struct, frozen=True):
    """The sending process's orders for one run."""

    host: str
    port: int
    tls: bool
    path: str
    authority: str
    """The value of the `host` header."""
    slo_ms: float
    json_bytes: tuple[int, ...]
    """For each body, the length of its JSON part."""
    connections_max: int
    warm_connections: int
    timeout_ns: int
    cpus: tuple[int, ...]
    start_ns: int = 0
    """When the schedule starts, on the clock of `time.monotonic_ns`; 0: as soon as everything is prepared."""
    api_key: str = ""


class ProgressReport(msgspec.Struct, frozen=True):
    """The progress of the sending process; `finished` at the end, and `error` if it had to stop."""

    at_s: float = 0.0
    sent: int = 0
    ended: int = 0
    connections: int = 0
    finished: bool = False
    error: str = ""
    cpu_s: float = 0.0
    """At the end, the processor time that sending took."""


def write_orders(
    folder: Path,
    orders: Orders,
    bodies: list[Body],
    schedule: NDArray[np.int64],
    places: NDArray[np.int32] | None = None,
) -> None:
    """Write the orders to `folder`; the first two columns of `schedule` are due and elapsed in ns, sorted by due.
    `places` are those of the requests' bodies; None: in turn."""
    (folder / ORDERS).write_bytes(msgspec.json.encode(orders))
    for place, body in enumerate(bodies):
        (folder / f"body-{place}.bin").write_bytes(body.content)
    schedule[:, :2].tofile(folder / SCHEDULE)
    if places is not None:
        places.tofile(folder / PLACES)


def read_orders(folder: Path) -> tuple[Orders, list[bytes]]:
    """Read the orders and the bodies."""
    orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
    return orders, [(folder / f"body-{place}.bin").read_bytes() for place in range(len(orders.json_bytes))]


def open_schedule(folder: Path) -> "memoryview[int]":
    """Map the schedule file, so that ten million requests need no heap memory."""
    path = folder / SCHEDULE
    if path.stat().st_size == 0:
        return memoryview(b"").cast("q")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")


def read_places(folder: Path) -> Sequence[int] | None:
    """Which body each request has; None: in turn."""
    path = folder / PLACES
    return np.fromfile(path, dtype=np.int32).tolist() if path.exists() else None


_CLOCK_MONOTONIC: Final = 1
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE: Final = 1


class _Spec(ctypes.Structure):
    """struct itimerspec: an interval (unused) and the first expiry."""

    _fields_ = [  # the format that ctypes requires
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


class Alarm:
    """A precise timer that can be set repeatedly: Linux's timerfd.

    asyncio and libuv round timers to milliseconds, which is a thousand times the gap between requests at a high rate.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._settime = libc.timerfd_settime
        self._fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._call = call
        self._spec = _Spec()
        loop.add_reader(self._fd, self._ring)

    def set(self, at_ns: int) -> None:
        """Call back once at or after `at_ns` of `time.monotonic_ns`; replaces an earlier setting."""
        # An expiry of 0 would disarm the timer; a time in the past expires at once.
        self._spec.value_s, self._spec.value_ns = divmod(max(1, at_ns), NS_PER_S)
        if self._settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._call()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


LEAD_NS = 20 * NS_PER_MS
"""The time between the end of the preparation and the start of the schedule."""

SENDS_MAX = 64
"""The most requests that are sent before sockets are read again, even if the sender is behind its schedule."""

ANSWERED_STATUS = 200

TICK_NS = 50 * NS_PER_MS
"""How often timeouts are checked."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server and the contents of the requests."""

    server: Server
    heads: Sequence[RequestHead]
    bodies: Sequence[bytes]
    """One body for each of `heads`."""
    connections_max: int
    warm_connections: int
    timeout_ns: int
    keep: Callable[[int, bytes], None] | None = None
    """Called with the number and the body of every answer with status 200."""
    start_ns: int = 0
    """The earliest start, on the clock of `time.monotonic_ns`."""
    places: Sequence[int] | None = None
    """Of the body of each request; None: they are sent in turn."""


@dataclass(slots=True)
class SendProgress:
    """Counters of a run."""

    at_ns: int = 0
    sent: int = 0
    ended: int = 0
    connections: int = 0
    """Connections opened so far."""


OnProgress = Callable[[SendProgress], None]


class SendingRun:
    """What senders have in common: connections, records, timeouts, progress."""

    def __init__(self, target: Target, records: RecordWriter, on_progress: OnProgress) -> None:
        self.progress = SendProgress()
        self.finished = asyncio.Event()
        self._target = target
        self._records = records
        self._on_progress = on_progress
        self.connections = Connections(
            target.server, self.report, connections_max=target.connections_max, timeout_ns=target.timeout_ns
        )
        self.start_ns = 0

    def outgoing(self, number: int, elapsed_ns: int) -> Outgoing:
        places = self._target.places
        place = number % len(self._target.bodies) if places is None else places[number]
        head = self._target.heads[place].render(elapsed_ns)
        return Outgoing(number, head, self._target.bodies[place], time.monotonic_ns())

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Response | None) -> None:
        slo_met = -1 if answer is None or answer.slo_met is None else int(answer.slo_met)
        sent_ns = outgoing.handed_ns - self.start_ns  # until a connection is open, the client waits for the server
        status = 0 if answer is None else answer.status
        self._records.write(outgoing.number, sent_ns, done_ns - self.start_ns, status, ending, slo_met)
        if self._target.keep is not None and answer is not None and status == ANSWERED_STATUS:
            self._target.keep(outgoing.number, answer.body)
        self.progress.ended += 1

    async def warm(self, count: int) -> None:
        await self.connections.warm(count)
        self.start_ns = max(self._target.start_ns, time.monotonic_ns() + LEAD_NS)

    async def watch(self) -> None:
        """Check timeouts at every tick and report progress every second, until the run is finished."""
        reported_ns = self.start_ns
        while not self.finished.is_set():
            now_ns = time.monotonic_ns()
            self.connections.expire(now_ns)
            if now_ns - reported_ns >= NS_PER_S:
                reported_ns = now_ns
                self.report_progress(now_ns)
            try:
                await asyncio.wait_for(self.finished.wait(), TICK_NS / NS_PER_S)
            except TimeoutError:
                continue
        self.report_progress(time.monotonic_ns())

    def report_progress(self, now_ns: int) -> None:
        self.progress.at_ns = now_ns - self.start_ns
        self.progress.connections = self.connections.opened
        self._on_progress(self.progress)


class _OpenLoop(SendingRun):
    """Follows a schedule in ns: request k is due at `times[2 k]`, and `times[2 k + 1]` of its deadline has elapsed."""

    def __init__(self, target: Target, records: RecordWriter, on_progress: OnProgress, times: Sequence[int]) -> None:
        super().__init__(target, records, on_progress)
        self._times = times
        self._count = len(times) // 2
        self._next = 0
        self._alarm = Alarm(asyncio.get_running_loop(), self._fire)

    async def run(self) -> None:
        await self.warm(self._target.warm_connections)
        self._alarm.set(self.start_ns + self._times[0])
        try:
            await self.watch()
        finally:
            self._alarm.close()
            self.connections.close()

    def _fire(self) -> None:
        """Send all requests that are due and set the alarm for the next one."""
        times, number = self._times, self._next
        now_ns = time.monotonic_ns() - self.start_ns
        last = min(self._count, number + SENDS_MAX)
        while number < last and times[2 * number] <= now_ns:
            outgoing = self.outgoing(number, times[2 * number + 1])
            number += 1
            self._next = self.progress.sent = number
            self.connections.send(outgoing)
        if number < self._count:
            self._alarm.set(self.start_ns + times[2 * number])

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Response | None) -> None:
        super().report(outgoing, done_ns, ending, answer)
        if self.progress.ended == self._count:
            self.finished.set()


async def send_open(target: Target, times: Sequence[int], records: RecordWriter, on_progress: OnProgress) -> None:
    """Replay a schedule of pairs (due, elapsed) in ns; returns when every request has ended."""
    if len(times):
        await _OpenLoop(target, records, on_progress, times).run()


DESCRIPTORS_SPARE = 64
"""File descriptors for other purposes than connections."""

NICENESS = -10
"""Raising the priority needs rights such as root's; without them the sender has normal priority."""


def main(folder: Path) -> None:
    """Entry point of the sending process: set CPUs and priority, then execute the orders in `folder`."""
    orders, _ = read_orders(folder)
    if orders.cpus:
        try:
            os.sched_setaffinity(0, orders.cpus)
        except OSError as error:
            print_report(
                ProgressReport(finished=True, error=f"cannot run on the CPUs {list(orders.cpus)}: {error.strerror}")
            )
            return
    # A measuring process should not wait for the processes that it measures.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    gc.freeze()
    gc.disable()
    carry_out(folder)


def carry_out(folder: Path) -> None:
    """Send the requests, record them, and report progress."""
    orders, bodies = read_orders(folder)
    allowed = allowed_connections(orders.connections_max)
    target = _target(orders, bodies, connections_max=allowed, places=read_places(folder))
    with (folder / RECORDS).open("wb", buffering=0) as file:
        records = RecordWriter(file)
        progress = SendProgress()

        def note(latest: SendProgress) -> None:
            nonlocal progress
            progress = latest
            print_report(_report_of(latest, finished=False))

        begun_s = time.process_time()
        uvloop.run(send_open(target, open_schedule(folder), records, note))
        records.flush()
    cpu_s = time.process_time() - begun_s
    print_report(msgspec.structs.replace(_report_of(progress, finished=True), cpu_s=cpu_s))


def _target(orders: Orders, bodies: list[bytes], *, connections_max: int, places: Sequence[int] | None) -> Target:
    heads = [
        RequestHead(
            path=orders.path,
            host=orders.authority,
            slo_ms=orders.slo_ms,
            content_bytes=len(body),
            json_bytes=json_bytes,
            api_key=orders.api_key,
        )
        for body, json_bytes in zip(bodies, orders.json_bytes, strict=True)
    ]
    return Target(
        server=Server(orders.host, orders.port, orders.tls),
        heads=heads,
        bodies=bodies,
        connections_max=connections_max,
        warm_connections=min(orders.warm_connections, connections_max),
        timeout_ns=orders.timeout_ns,
        start_ns=orders.start_ns,
        places=places,
    )


def allowed_connections(connections_max: int) -> int:
    """The number of connections that the system allows, after raising the soft limit of open files as far as
    possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + DESCRIPTORS_SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(connections_max, soft - DESCRIPTORS_SPARE))
    return connections_max


def _report_of(progress: SendProgress, *, finished: bool) -> ProgressReport:
    return ProgressReport(to_s(progress.at_ns), progress.sent, progress.ended, progress.connections, finished)


def print_report(report: ProgressReport) -> None:
    """Print one line for the parent process."""
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()
