"""Which requests are taken up while there is more to do than can be done.

To take a request up is to parse it and pass it on. A turn is one iteration of the event loop. Patience is how long a
request may wait to be taken up: a quarter to half of its deadline.

In each turn, requests are taken up for `TURN_NS`, which is enough for a hundred. If more have arrived, they wait
unparsed. The oldest is taken up first, so that a short burst only waits, unless any has waited for
more than `CALM_SHARE` of its patience: then there is more than can be done, and the newest is the one that can still be
answered in time (adaptive LIFO: Maurer, "Fail at scale", ACM Queue 13(8), 2015). Those that wait are in lines (queues),
one for each patience, rounded to a power of two, so that the oldest of each is known: one with a long patience hides
none with a short one. What a request says of its patience only shortens that of its model, because nobody has seen its
key yet. One that says that it can wait for longer does: it is in a line of those, from which every `PATIENT_EACH`-th is
taken while others wait too.

While requests wait, a turn takes up requests for only `SLICE_NS`, so that these are soon passed on and answered, but at
least 32 (`TAKEN_MIN`): a turn has a cost of its own, and with fewer requests in each the server could do less than
without overload, and would stay overloaded. On a slow machine, or with a quota, 32 may take too long. While requests
stay for more than half their deadline after they were taken up, the least number falls by one a turn, to 8
(`TAKEN_MIN_SLOW`); otherwise it rises again.

Work that comes in pieces (frames that follow each other on a connection, requests sent before the answer to the one
before) gets `PIECES_NS` of each turn in all, one piece of each connection after the other: however much one client
sends at once, and from however many connections, requests of others wait for a fraction of a millisecond.

What has waited for half its deadline is refused, or sooner if requests that were taken up lately needed more than the
other half (mean and twice the mean deviation, as TCP estimates round trips: RFC 6298). Refusing may take
`REFUSING_SHARE` of the time: sending an answer costs the kernel alone a tenth of what a served request costs in all, so
refusing everything at once would leave too little at five times the load. A request that is neither served nor refused
keeps its connection busy, so that its client cannot send the next one.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from sloop.serve.edge.exchange import LINE_BYTES_MAX, Buffer, Exchange
from sloop.units import FOREVER_NS, NS_PER_MS, NS_PER_S

TURN_NS: Final = 4 * NS_PER_MS
SLICE_NS: Final = NS_PER_MS // 2
TAKEN_MIN: Final = 32
TAKEN_MIN_SLOW: Final = 8
PIECES_NS: Final = NS_PER_MS // 2
CALM_SHARE: Final = 0.5
REFUSING_SHARE: Final = 0.1
PATIENT_EACH: Final = 8
PATIENT_LINES: Final = 64
"""What is added to the number of a line of those that can wait for longer."""
ASIDE_MAX: Final = 64
"""Of those that have waited too long, how many are set aside in a turn."""
REFUSED_PER_LOOK: Final = 4
"""The clock of CPU time, which costs a system call, is read once for so many refusals."""
PAGES_SHARE: Final = 0.25
"""The share of a slice for requests that are not inference, such as those for health and metrics."""
PAGE_DEADLINE_NS: Final = 2 * NS_PER_S
"""Of requests that are not inference."""
PATIENCE_SHARES: Final = 0.25, 0.5
"""The shares of its deadline that a request may wait to be taken up: at least, and at most."""
STAY_GAIN: Final = 1 / 16
LARGE_BYTES: Final = 32 * 1024
"""A smaller body is read in less than a millisecond in nearly any form."""
STEP_NS: Final = 3 * NS_PER_MS // 10
"""How long a connection goes on with what has come at once before others get their turn."""
READING_MAX: Final = 2
"""Large requests that are read at a time."""
ARRIVING_NS: Final = 30 * NS_PER_MS
ARRIVED_BYTES_MIN: Final = 48 * 1024
"""A body of which so much has come so soon comes as fast as this process receives it, and not as fast as a network."""
TOO_OLD: Final = "rejected: the server is overloaded; this request has waited too long to be answered in time"
BLOCKED_S: Final = 0.002
"""How long to wait for room, at most, before looking which requests have waited too long."""
SLO_FIELD: Final = re.compile(rb"\r\nx-slo-ms:[ \t]*([0-9]{1,7})(?:\.[0-9]*)?[ \t]*\r\n", re.IGNORECASE)
LENGTH_FIELD: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,19})[ \t]*(?=\r\n)", re.IGNORECASE)
LENGTH_NAME: Final = re.compile(rb"\r\ncontent-length", re.IGNORECASE)
PLAIN_HEAD: Final = re.compile(rb"(?:GET|POST) [!-~]+ HTTP/1\.1(?:\r\n[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*)*")
"""The head of a request as nearly all clients send it: with a method whose answer has a body, and nothing that parsers
read differently."""
DECIDES_MORE: Final = re.compile(
    rb"\r\n(?:transfer-encoding|upgrade|expect|connection:(?![ \t]*keep-alive[ \t]*\r\n))", re.IGNORECASE
)
"""A header that decides, beside the length, where a request ends or whether the connection stays."""


class Waiting(Protocol):
    """A connection with a request that was deferred."""

    @property
    def deferred_ns(self) -> int:
        """When its request began, in `time.monotonic_ns`; 0 if it does not wait any more."""
        ...

    @property
    def patience_ns(self) -> int:
        """How long the request may wait."""
        ...

    def age_ns(self) -> int:
        """How long the request has waited, in the kernel too if that can be found out."""
        ...

    def start(self) -> None:
        """Take the request up."""
        ...

    def refuse_deferred(self) -> None:
        """Refuse the request, which has waited too long."""
        ...


class Intake:
    """Decides when deferred requests are taken up or refused. `has_room` says whether one more may be open."""

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self.turn_ns = TURN_NS
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fresh: dict[int, deque[Waiting]] = {}
        """The lines, by the number of bits of the patience, and then those of the patient; each in the order of
        arrival; none is empty."""
        self._stale: deque[Waiting] = deque()
        self._pages: deque[Waiting] = deque()
        self._pieces: deque[Callable[[], None]] = deque()
        self._is_turn = self._is_blocked = self._has_pieces = False
        self._is_calm = self._are_patient_calm = True
        """Whether those that wait are taken up in their order, and what arrives waits behind them."""
        self._turn_ns = self._refused_ns = self._taken = 0
        self._allowed_ns = 0.0
        """How long refusing may take before the share of the time from `_refused_ns` on is added."""
        self._taken_min = TAKEN_MIN
        self._is_slow = False
        """Whether requests that were taken up lately stay too long."""
        self._stay_ns = self._spread_ns = 0.0
        """How long requests stay after they were taken up, and its mean deviation."""
        self.refused = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the turns of this event loop."""
        self._loop = loop

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait."""
        return bool(self._fresh or self._stale or self._pages)

    @property
    def is_overloaded(self) -> bool:
        """Whether requests wait for this process, not only for open ones to end: what else comes in delays them."""
        return bool(self._fresh or self._pages) and self._has_room()

    def is_behind(self, now_ns: int) -> bool:
        """Whether a request that has arrived must wait."""
        if not self._is_turn:
            self._begin_turn(now_ns)
        if (self._is_calm and self._fresh) or self._has_taken_enough(now_ns - self._turn_ns) or not self._has_room():
            return True
        self._taken += 1
        return False

    def _has_taken_enough(self, spent_ns: int) -> bool:
        """Whether the turn, which has taken so long, should take up no more requests."""
        if self._fresh and self._taken >= self._taken_min:
            return spent_ns > SLICE_NS
        return spent_ns > self.turn_ns

    def note_stay(self, stay_ns: int) -> None:
        """A request was answered so long after it was taken up. To be called while some wait."""
        error_ns = stay_ns - self._stay_ns
        self._stay_ns += STAY_GAIN * error_ns
        self._spread_ns += STAY_GAIN * (abs(error_ns) - self._spread_ns)

    def patience_ns(self, deadline_ns: int) -> int:
        """How long a request with this deadline may wait to be taken up. To be called for requests that are about to
        wait only: it also notes whether answers take too long for this deadline, by which the end of the turn changes
        how many are taken up in the next one at least."""
        least, most = PATIENCE_SHARES
        left_ns = deadline_ns - self._stay_ns - 2.0 * self._spread_ns
        self._is_slow = left_ns < most * deadline_ns
        return round(min(most * deadline_ns, max(least * deadline_ns, left_ns)))

    def defer(self, waiting: Waiting, *, is_page: bool, is_patient: bool = False) -> None:
        """Take up a request later. Pages are taken up in their order, so that a probe of health is not overtaken. One
        that `is_patient` has a longer deadline than others."""
        if not self._is_turn:
            self._begin_turn(time.monotonic_ns())
        if is_page:
            self._pages.append(waiting)
        else:
            key = waiting.patience_ns.bit_length() + is_patient * PATIENT_LINES
            self._fresh.setdefault(key, deque()).append(waiting)

    def go_on_later(self, piece: Callable[[], None]) -> None:
        """Call `piece` in a later turn, when it is its turn among all that wait. It should take a fraction of a
        millisecond; if more is to be done, it calls this again."""
        self._pieces.append(piece)
        if not self._has_pieces:
            self._has_pieces = True
            self._go_on_soon()

    def _go_on(self) -> None:
        until_ns = time.monotonic_ns() + PIECES_NS
        try:
            for _ in range(len(self._pieces)):
                self._pieces.popleft()()
                if time.monotonic_ns() > until_ns:
                    break
        finally:
            self._has_pieces = bool(self._pieces)
            if self._has_pieces:
                self._go_on_soon()

    def _go_on_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_soon(self._go_on)

    def _begin_turn(self, now_ns: int) -> None:
        assert self._loop is not None
        self._is_turn = True
        self._turn_ns = now_ns
        self._taken = 0
        self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        """Everything that had arrived when the turn began has been read."""
        self._is_turn = False
        if not self.has_waiting:
            return
        self._taken_min += -1 if self._is_slow else 1
        self._taken_min = min(max(self._taken_min, TAKEN_MIN_SLOW), TAKEN_MIN)
        now_ns = time.monotonic_ns()
        self._take_up_pages(now_ns + round(PAGES_SHARE * SLICE_NS))
        self._take_up_waiting(now_ns)
        self._refuse_stale()
        if self.has_waiting and not self._is_turn:
            assert self._loop is not None
            if self._has_room() and (self._fresh or self._pages or not self._is_working()):
                self._begin_turn(time.monotonic_ns())
            elif not self._is_blocked:
                self._is_blocked = True
                self._loop.call_later(BLOCKED_S, self._look_again)

    def note_room(self) -> None:
        """There is room again: those that wait are looked at now, and not when the timer fires."""
        if self._is_blocked and not self._is_turn:
            self._begin_turn(time.monotonic_ns())

    def _look_again(self) -> None:
        self._is_blocked = False
        if not self._is_turn:
            self._end_turn()

    def _is_working(self) -> bool:
        """Whether requests that were taken up need the time that refusing would take."""
        return False

    def _take_up_pages(self, until_ns: int) -> None:
        while self._pages and self._has_room() and time.monotonic_ns() < until_ns:
            self._start(self._pages.popleft())

    def _take_up_waiting(self, begun_ns: int) -> None:
        """Go on with what had arrived earlier, for as long as the turn may take up requests."""
        spent_ns = begun_ns - self._turn_ns
        calm = {key: self._has_waited_briefly(begun_ns, key) for key in list(self._fresh)}
        self._is_calm = all(is_calm for key, is_calm in calm.items() if key < PATIENT_LINES)
        self._are_patient_calm = all(is_calm for key, is_calm in calm.items() if key >= PATIENT_LINES)
        while self._fresh and self._has_room() and not self._has_taken_enough(spent_ns):
            self._start(self._next())
            spent_ns = time.monotonic_ns() - self._turn_ns

    def _next(self) -> Waiting:
        """Take the oldest out of its line, or the newest if there is more than can be done."""
        lines = self._fresh
        usual = [key for key in lines if key < PATIENT_LINES]
        is_patient = not usual or (len(usual) < len(lines) and self._taken % PATIENT_EACH == PATIENT_EACH - 1)
        keys = [key for key in lines if key >= PATIENT_LINES] if is_patient else usual
        is_calm = self._are_patient_calm if is_patient else self._is_calm
        if is_calm:
            key = min(keys, key=lambda key: lines[key][0].deferred_ns)
        else:  # one whose client has gone is taken first, because it costs nothing
            key = max(keys, key=lambda key: lines[key][-1].deferred_ns or FOREVER_NS)
        found = lines[key].popleft() if is_calm else lines[key].pop()
        if not lines[key]:
            del lines[key]
        return found

    def _has_waited_briefly(self, now_ns: int, key: int) -> bool:
        """Whether even the oldest of a line has waited for a short time only. Those that have waited too long are set
        aside."""
        line = self._fresh[key]
        for _ in range(ASIDE_MAX):
            oldest = line[0]
            if oldest.deferred_ns:
                waited_ns, patience_ns = now_ns - oldest.deferred_ns, oldest.patience_ns
                if waited_ns <= patience_ns:
                    return waited_ns <= CALM_SHARE * patience_ns
                self._stale.append(oldest)
            line.popleft()
            if not line:
                del self._fresh[key]
                return True
        return False

    def _start(self, found: Waiting) -> None:
        """Take up a request, unless its client has gone or it has waited too long. Without overload, only the time
        counts since this process knows of it: what waited in the kernel while another edge died is served."""
        if not found.deferred_ns:
            return
        age_ns = time.monotonic_ns() - found.deferred_ns if self._is_calm else found.age_ns()
        if age_ns > found.patience_ns:
            self._stale.append(found)
        else:
            self._taken += 1
            found.start()

    def _refuse_stale(self) -> None:
        """Refuse what has waited too long: within the share of the CPU time, or as long as nothing else waits."""
        begun_ns = now_ns = time.thread_time_ns()  # where a quota holds this process, most time is not its own
        allowed_ns = self._allowed_ns + REFUSING_SHARE * (now_ns - self._refused_ns)
        allowed_ns = min(allowed_ns, float(SLICE_NS)) if self._fresh or self._is_working() else float(SLICE_NS)
        self._refused_ns = now_ns
        while self._stale and now_ns - begun_ns < allowed_ns:
            for _ in range(min(REFUSED_PER_LOOK, len(self._stale))):
                found = self._stale.popleft()
                if found.deferred_ns:
                    self.refused += 1
                    found.refuse_deferred()
            now_ns = time.thread_time_ns()
        self._allowed_ns = allowed_ns - (now_ns - begun_ns)


class LargeIntake(Intake):
    """The same for requests of more than `LARGE_BYTES`. Few come and are read at a time: all together, each with an
    equal part of the time, would all be late. The others wait with their body at the client."""

    def __init__(self, has_room: Callable[[], bool]) -> None:
        super().__init__(lambda: self._open() < READING_MAX and has_room())
        self._reading: set[int] = set()
        """The requests that are being read, by identity."""
        self._arriving: dict[int, tuple[int, Exchange]] = {}
        """Those whose body may come now, and since when. Only those that come fast are waited for, and not for long."""

    def _open(self) -> int:
        least_ns = time.monotonic_ns() - ARRIVING_NS
        while self._arriving and next(iter(self._arriving.values()))[0] < least_ns:
            del self._arriving[next(iter(self._arriving))]
        arriving = sum(exchange.held_bytes > ARRIVED_BYTES_MIN for _, exchange in self._arriving.values())
        return len(self._reading) + arriving

    def _is_working(self) -> bool:
        return bool(self._reading or self._arriving)

    @property
    def is_busy(self) -> bool:
        """Whether there are such requests."""
        return bool(self._reading or self._arriving or self.has_waiting)

    def expect(self, exchange: Exchange) -> None:
        """The head of a large request has been accepted."""
        self._arriving[id(exchange)] = time.monotonic_ns(), exchange
        exchange.on_read = partial(self._end, id(exchange))

    def is_expected(self, exchange: Exchange) -> bool:
        """Whether the body of a request has come so soon that it need not wait again."""
        return id(exchange) in self._arriving

    def begin(self, exchange: Exchange) -> None:
        """A request is read from now on."""
        self._arriving.pop(id(exchange), None)
        self._reading.add(id(exchange))
        exchange.on_read = partial(self._end, id(exchange))

    def _end(self, number: int) -> None:
        self._arriving.pop(number, None)
        self._reading.discard(number)
        self.note_room()


def is_whole(data: Buffer) -> bool:
    """Whether unparsed bytes are exactly one request after whose refusal, with a body, the connection may stay. Without
    a parser, this is said only of plain ones."""
    head, end, body = bytes(data).partition(b"\r\n\r\n")
    if not end or len(head) > LINE_BYTES_MAX or PLAIN_HEAD.fullmatch(head) is None:
        return False
    head += b"\r\n"
    if DECIDES_MORE.search(head):
        return False
    lengths = LENGTH_FIELD.findall(head)
    if len(lengths) != len(LENGTH_NAME.findall(head)) or len(lengths) > 1:
        return False
    return len(body) == (int(lengths[0]) if lengths else 0)


def announced_bytes(data: Buffer) -> int:
    """The length of the body of an unparsed request, if it has one; otherwise 0."""
    found = LENGTH_FIELD.search(data, 0, 16 * 1024)
    return 0 if found is None else int(found[1])


def target_of(data: Buffer) -> tuple[str, str]:
    """The path of an unparsed request, and its own deadline in whole ms, if it has one; empty if not found."""
    found = bytes(data[: 16 * 1024]).partition(b"\r\n\r\n")[0] + b"\r\n"
    words = found[: max(0, found.find(b"\r\n"))].split(b" ")
    own = SLO_FIELD.search(found)
    path = words[1].partition(b"?")[0].decode("latin-1") if len(words) > 1 else ""
    return path, "" if own is None else own[1].decode("ascii")
