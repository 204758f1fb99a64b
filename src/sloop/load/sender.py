"""The sending loops: open, which follows a schedule whatever the server does, and closed, which follows the answers.

Promises that in an open loop no request waits for an answer, and that every request of the schedule is recorded exactly
once. `sent_ns - due_ns` of a record is the generator's own lag, for which the server is not to blame.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sloop.load.alarm import alarm
from sloop.load.connections import Connections, Outgoing, Server
from sloop.load.record import Ending, RecordWriter
from sloop.load.wire import Answer, RequestHead
from sloop.units import NS_PER_MS, NS_PER_S

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
    """Told of every answer with status 200: the request's number, and the body."""


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    at_ns: int = 0
    sent: int = 0
    ended: int = 0
    connections: int = 0
    """Opened so far."""


Tell = Callable[[Progress], None]


class _Run:
    """What both loops share: connections, records, timeouts, progress."""

    def __init__(self, target: Target, records: RecordWriter, tell: Tell) -> None:
        self.progress = Progress()
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

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Answer | None) -> None:
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


class _Open(_Run):
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

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Answer | None) -> None:
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

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Answer | None) -> None:
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
        await _Open(target, records, tell, times).run()


async def send_closed(
    target: Target, records: RecordWriter, tell: Tell, *, connections: int, warmup_ns: int, end_ns: int
) -> None:
    """Keep `connections` requests in flight from 0 to `end_ns`; what ends from `warmup_ns` on is recorded."""
    await _Closed(target, records, tell, connections=connections, warmup_ns=warmup_ns, end_ns=end_ns).run()
