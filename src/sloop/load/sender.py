"""The sending loops: open, which follows a schedule whatever the server does, and closed, which follows the answers.

Promises that in an open loop no request waits for an answer, and that every request of the schedule is recorded exactly
once. `sent_ns - due_ns` of a record is the generator's own lag, for which the server is not to blame.
"""

import asyncio
import ctypes
import gc
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.load.connections import Connections, Outgoing, RequestHead, Response, Server
from sloop.load.plan import Body
from sloop.load.results import Ending, RecordWriter
from sloop.units import NS_PER_MS, NS_PER_S, to_s

# == orders: What the sending process is told, and what it tells: files in one folder and lines of JSON.
#
# Promises that the sender needs nothing but this folder: no trace, no metadata, no numpy. `orders.json` holds `Orders`,
# `schedule.bin` pairs of int64 (due, elapsed) in ns, `body-K.bin` the bodies; `records.bin` comes back. On its standard
# output the sender writes one `ProgressReport` a line.


SCHEDULE: Final = "schedule.bin"
RECORDS: Final = "records.bin"
ORDERS: Final = "orders.json"


class Closed(msgspec.Struct, frozen=True):
    """A closed loop instead of a schedule."""

    connections: int
    warmup_ns: int
    end_ns: int


class Orders(msgspec.Struct, frozen=True):
    """One run, as the sender sees it."""

    host: str
    port: int
    tls: bool
    path: str
    authority: str
    """The `host` field of requests."""
    slo_ms: float
    json_bytes: tuple[int, ...]
    """Length of the JSON part of each body."""
    connections_max: int
    warm_connections: int
    timeout_ns: int
    cpus: tuple[int, ...]
    closed: Closed | None = None


class ProgressReport(msgspec.Struct, frozen=True):
    """The sender's progress, or at last its end; `error` if it could not go on."""

    at_s: float = 0.0
    sent: int = 0
    ended: int = 0
    connections: int = 0
    finished: bool = False
    error: str = ""


def write_orders(folder: Path, orders: Orders, bodies: list[Body], schedule: NDArray[np.int64] | None) -> None:
    """Leave everything for the sender in `folder`; `schedule` has two columns, due and elapsed, sorted by due."""
    (folder / ORDERS).write_bytes(msgspec.json.encode(orders))
    for place, body in enumerate(bodies):
        (folder / f"body-{place}.bin").write_bytes(body.content)
    if schedule is not None:
        schedule.tofile(folder / SCHEDULE)


def read_orders(folder: Path) -> tuple[Orders, list[bytes]]:
    """The orders and the bodies."""
    orders = msgspec.json.decode((folder / ORDERS).read_bytes(), type=Orders)
    return orders, [(folder / f"body-{place}.bin").read_bytes() for place in range(len(orders.json_bytes))]


def open_schedule(folder: Path) -> "memoryview[int]":
    """The schedule, mapped rather than read, so that ten million requests cost no memory of their own."""
    path = folder / SCHEDULE
    if path.stat().st_size == 0:
        return memoryview(b"").cast("q")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("q")


# == alarm: Wakes an event loop at an instant, to some tens of microseconds where the machine can.
#
# Promises one call at or after the instant it was last set to. asyncio and libuv round their timers to milliseconds, a
# thousand times the gap between requests at a high rate; Linux's timerfd does not. Elsewhere the loop's own timer
# serves.


_CLOCK_MONOTONIC: Final = 1
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_ABSOLUTE: Final = 1


class Alarm(Protocol):
    """A timer that can be set again and again."""

    def set(self, at_ns: int) -> None:
        """Call back at `at_ns` of `time.monotonic_ns`, once; an earlier setting is forgotten."""
        ...

    def close(self) -> None: ...


class _Spec(ctypes.Structure):
    """struct itimerspec: an interval (unused) and the first expiry."""

    _fields_ = [  # the form ctypes asks for
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    ]


class TimerFd:
    """Linux's timer as a file descriptor; `OSError` where there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._settime = libc.timerfd_settime
            self._fd = int(libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC))
        except (AttributeError, TypeError) as error:
            raise OSError(f"no timerfd here: {error}") from None
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = loop
        self._call = call
        self._spec = _Spec()
        loop.add_reader(self._fd, self._ring)

    def set(self, at_ns: int) -> None:
        # An expiry of 0 would disarm the timer; instants in the past expire at once.
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


class LoopTimer:
    """The event loop's own timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        self.close()
        self._handle = self._loop.call_later(max(0, at_ns - time.monotonic_ns()) / NS_PER_S, self._call)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def alarm(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> Alarm:
    """The finest alarm this machine has."""
    if sys.platform == "linux":
        try:
            return TimerFd(loop, call)
        except OSError:
            pass
    return LoopTimer(loop, call)


LEAD_NS = 20 * NS_PER_MS
"""Between the last preparation and the first instant of the schedule."""

SENDS_MAX = 64
"""In one go before sockets are looked at again, however far behind the schedule."""

ANSWERED_STATUS = 200

TICK_NS = 50 * NS_PER_MS
"""How often timeouts are looked for."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what they carry."""

    server: Server
    heads: Sequence[RequestHead]
    bodies: Sequence[bytes]
    """As many as `heads`, sent in turn."""
    connections_max: int
    warm_connections: int
    timeout_ns: int
    keep: Callable[[int, bytes], None] | None = None
    """ProgressReport of every answer with status 200: the request's number, and the body."""


@dataclass(slots=True)
class SendProgress:
    """How far a run has come."""

    at_ns: int = 0
    sent: int = 0
    ended: int = 0
    connections: int = 0
    """Opened so far."""


Tell = Callable[[SendProgress], None]


class _Run:
    """What both loops share: connections, records, timeouts, progress."""

    def __init__(self, target: Target, records: RecordWriter, tell: Tell) -> None:
        self.progress = SendProgress()
        self.finished = asyncio.Event()
        self._target = target
        self._records = records
        self._tell = tell
        self.connections = Connections(
            target.server, self.report, connections_max=target.connections_max, timeout_ns=target.timeout_ns
        )
        self.start_ns = 0

    def outgoing(self, number: int, elapsed_ns: int) -> Outgoing:
        place = number % len(self._target.bodies)
        head = self._target.heads[place].render(elapsed_ns)
        return Outgoing(number, head, self._target.bodies[place], time.monotonic_ns())

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Response | None) -> None:
        slo_met = -1 if answer is None or answer.slo_met is None else int(answer.slo_met)
        # What never went out has no instant of sending; the one it was handed over at keeps lags meaningful.
        sent_ns = (outgoing.sent_ns or outgoing.handed_ns) - self.start_ns
        status = 0 if answer is None else answer.status
        self._records.write(outgoing.number, sent_ns, done_ns - self.start_ns, status, ending, slo_met)
        if self._target.keep is not None and answer is not None and status == ANSWERED_STATUS:
            self._target.keep(outgoing.number, answer.body)
        self.progress.ended += 1

    async def warm(self, count: int) -> None:
        await self.connections.warm(count)
        self.start_ns = time.monotonic_ns() + LEAD_NS

    async def watch(self) -> None:
        """Until the run is finished: timeouts at every tick, progress every second and at the end."""
        told_ns = self.start_ns
        while not self.finished.is_set():
            now_ns = time.monotonic_ns()
            self.connections.expire(now_ns)
            if now_ns - told_ns >= NS_PER_S:
                told_ns = now_ns
                self.tell(now_ns)
            try:
                await asyncio.wait_for(self.finished.wait(), TICK_NS / NS_PER_S)
            except TimeoutError:
                continue
        self.tell(time.monotonic_ns())

    def tell(self, now_ns: int) -> None:
        self.progress.at_ns = now_ns - self.start_ns
        self.progress.connections = self.connections.opened
        self._tell(self.progress)


class _Outstanding(_Run):
    """Follows a schedule in ns: request k is due at `times[2 k]`, and `times[2 k + 1]` of its budget has elapsed."""

    def __init__(self, target: Target, records: RecordWriter, tell: Tell, times: Sequence[int]) -> None:
        super().__init__(target, records, tell)
        self._times = times
        self._count = len(times) // 2
        self._next = 0
        self._alarm = alarm(asyncio.get_running_loop(), self._fire)

    async def run(self) -> None:
        await self.warm(self._target.warm_connections)
        self._alarm.set(self.start_ns + self._times[0])
        try:
            await self.watch()
        finally:
            self._alarm.close()
            self.connections.close()

    def _fire(self) -> None:
        """Send all that is due, and be woken for what is next."""
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


class _Closed(_Run):
    """Each connection sends its next request when it has its answer; answers count once the warm-up is over."""

    def __init__(
        self, target: Target, records: RecordWriter, tell: Tell, *, connections: int, warmup_ns: int, end_ns: int
    ) -> None:
        super().__init__(target, records, tell)
        self._width = connections
        self._warmup_ns = warmup_ns
        self._end_ns = end_ns
        self._timer = alarm(asyncio.get_running_loop(), self.finished.set)

    async def run(self) -> None:
        await self.warm(self._width)
        self._timer.set(self.start_ns + self._end_ns)
        for _ in range(self._width):
            self._send_next()
        try:
            await self.watch()
        finally:
            self._timer.close()
            self.connections.close()

    def _send_next(self) -> None:
        outgoing = self.outgoing(self.progress.sent, 0)
        self.progress.sent += 1
        self.connections.send(outgoing)

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Response | None) -> None:
        if self.finished.is_set():
            return  # Cut off by the end of the run, for no fault of the server's.
        if self._warmup_ns <= done_ns - self.start_ns <= self._end_ns:
            super().report(outgoing, done_ns, ending, answer)
        if ending == Ending.UNREACHABLE:
            # A server that is gone is tried again at leisure rather than as fast as it refuses.
            asyncio.get_running_loop().call_later(TICK_NS / NS_PER_S, self._send_next)
        else:
            asyncio.get_running_loop().call_soon(self._send_next)


async def send_open(target: Target, times: Sequence[int], records: RecordWriter, tell: Tell) -> None:
    """Replay a schedule of pairs (due, elapsed) in ns; returns when every request has ended."""
    if len(times):
        await _Outstanding(target, records, tell, times).run()


async def send_closed(
    target: Target, records: RecordWriter, tell: Tell, *, connections: int, warmup_ns: int, end_ns: int
) -> None:
    """Keep `connections` requests in flight from 0 to `end_ns`; what ends from `warmup_ns` on is recorded."""
    await _Closed(target, records, tell, connections=connections, warmup_ns=warmup_ns, end_ns=end_ns).run()


# == child: The sending process: reads its orders from a folder, sends, writes records, says how far it is.
#
# Promises a process that does nothing else: its own interpreter, no garbage collection while it sends, the CPUs it was
# given. Its standard output belongs to the protocol of `orders`.


DESCRIPTORS_SPARE = 64
"""Beside the connections: files, the loop's own, the standard streams."""

NICENESS = -10
"""Takes the right to raise one's priority, such as root's; without it the sender runs as any other process."""


def main(folder: Path) -> None:
    """Make this process a sender, then carry out the orders in `folder`."""
    orders, _ = read_orders(folder)
    if orders.cpus and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, orders.cpus)
        except OSError as error:
            tell(ProgressReport(finished=True, error=f"cannot run on the CPUs {list(orders.cpus)}: {error.strerror}"))
            return
    # Ahead of other processes where the system lets us: a measuring device should be the last to be kept waiting.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    gc.freeze()
    gc.disable()
    carry_out(folder)


def carry_out(folder: Path) -> None:
    """Send what is ordered, record it, and say how far it is."""
    orders, bodies = read_orders(folder)
    target = _target(orders, bodies, connections_max=allowed_connections(orders.connections_max))
    with (folder / RECORDS).open("wb", buffering=0) as file:
        records = RecordWriter(file)
        progress = SendProgress()

        def note(latest: SendProgress) -> None:
            nonlocal progress
            progress = latest
            tell(_told(latest, finished=False))

        run_until_done(_sending(orders, target, folder, records, note))
        records.flush()
    tell(_told(progress, finished=True))


def _sending(
    orders: Orders, target: Target, folder: Path, records: RecordWriter, note: Tell
) -> Coroutine[Any, Any, None]:
    closed = orders.closed
    if closed is None:
        return send_open(target, open_schedule(folder), records, note)
    return send_closed(
        target,
        records,
        note,
        connections=closed.connections,
        warmup_ns=closed.warmup_ns,
        end_ns=closed.end_ns,
    )


def run_until_done(sending: Coroutine[Any, Any, None]) -> None:
    """On uvloop where there is one: half the cost of a request."""
    try:
        import uvloop  # noqa: PLC0415  # only where installed
    except ImportError:
        asyncio.run(sending)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(sending)


def _target(orders: Orders, bodies: list[bytes], *, connections_max: int) -> Target:
    heads = [
        RequestHead(
            path=orders.path,
            host=orders.authority,
            slo_ms=orders.slo_ms,
            content_bytes=len(body),
            json_bytes=json_bytes,
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
    )


def allowed_connections(connections_max: int) -> int:
    """As many connections as the system lets this process have, its soft limit raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + DESCRIPTORS_SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(1, min(connections_max, soft - DESCRIPTORS_SPARE))
    return connections_max


def _told(progress: SendProgress, *, finished: bool) -> ProgressReport:
    return ProgressReport(to_s(progress.at_ns), progress.sent, progress.ended, progress.connections, finished)


def tell(told: ProgressReport) -> None:
    """One line to the process that gave the orders."""
    sys.stdout.buffer.write(msgspec.json.encode(told) + b"\n")
    sys.stdout.buffer.flush()
