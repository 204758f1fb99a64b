"""The intake under more load than the edge can take: simulated, with costs in place of clocks."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.edge import intake as module
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.intake import ARRIVING_NS, READING_MAX, Intake, LargeIntake, announced_bytes, is_whole, target_of

MS = 1_000_000
DEADLINE_NS = 50 * MS
SERVE_NS, READ_NS, REFUSE_NS, OPEN_NS, POLL_NS = 60_000, 4_000, 8_000, 40_000, 5_000
TURN_NS = 300_000
"""What a turn costs beside, if it takes up a request: the core's instant, frames to workers, the log."""
CAPACITY_RPS = 10**9 / (SERVE_NS + READ_NS + TURN_NS / 64)
"""With 64 requests in a turn."""


@dataclass
class Loop:
    """An event loop in virtual time; every act adds its cost."""

    now_ns: int = 1
    soon: deque[Callable[[], object]] = field(default_factory=deque)
    timers: list[tuple[int, int, Callable[[], object]]] = field(default_factory=list)

    def monotonic_ns(self) -> int:
        return self.now_ns

    def call_soon(self, call: Callable[[], object]) -> None:
        self.soon.append(call)

    def call_later(self, delay_s: float, call: Callable[[], object]) -> None:
        heapq.heappush(self.timers, (self.now_ns + round(delay_s * 1e9), id(call), call))

    def turn(self) -> None:
        """What was ready when the turn began."""
        while self.timers and self.timers[0][0] <= self.now_ns:
            self.soon.append(heapq.heappop(self.timers)[2])
        for _ in range(len(self.soon)):
            self.soon.popleft()()


def run_on(loop: Loop, patch: pytest.MonkeyPatch) -> None:
    """Let the intake read the clocks of this loop."""
    patch.setattr(module.time, "monotonic_ns", loop.monotonic_ns)  # type: ignore[attr-defined]
    patch.setattr(module.time, "thread_time_ns", loop.monotonic_ns)  # type: ignore[attr-defined]


class Edge:
    """Clients in an open loop, each with one connection at a time from a pool of 4,096, and a server with an intake."""

    def __init__(self, *, is_first_come: bool = False) -> None:
        self.loop = Loop()
        self.intake = Intake(lambda: True)
        self.intake.start(self.loop)  # type: ignore[arg-type]
        self.is_first_come = is_first_come
        self.arrived: deque[int] = deque()
        """Requests in the kernel, by when they came."""
        self.idle, self.opened, self.overflows = 0, 0, 0
        self.has_served = False
        self.some_patience_ns = DEADLINE_NS // 2
        """How long one request in twenty may wait."""
        self.outcomes: list[tuple[int, str]] = []
        """When each request came, and how it ended."""

    def run(self, arrivals: list[int], until_ns: int) -> None:
        """Play arrivals, sorted by time, until then."""
        place = 0
        while self.loop.now_ns < until_ns:
            self.loop.now_ns += POLL_NS
            while place < len(arrivals) and arrivals[place] <= self.loop.now_ns:
                self._come(arrivals[place])
                place += 1
            for _ in range(len(self.arrived)):
                self._read(self.arrived.popleft())
            self.loop.turn()
            if self.has_served:
                self.loop.now_ns += TURN_NS
                self.has_served = False

    def _come(self, at_ns: int) -> None:
        if self.idle:
            self.idle -= 1
        elif self.opened < 4096:
            self.opened += 1
            self.loop.now_ns += OPEN_NS
        else:
            self.overflows += 1
            return
        self.arrived.append(at_ns)

    def _read(self, at_ns: int) -> None:
        self.loop.now_ns += READ_NS
        patience_ns = DEADLINE_NS // 2 if at_ns % 20 else self.some_patience_ns
        request = Request(self, at_ns, self.loop.now_ns, patience_ns)
        if self.is_first_come or not self.intake.is_behind(self.loop.now_ns):
            request.start()
        else:
            self.intake.defer(request, is_page=False)

    def end(self, at_ns: int, outcome: str) -> None:
        self.idle += 1
        self.outcomes.append((at_ns, outcome))

    def goodput(self, begin_ns: int, end_ns: int) -> int:
        """Requests of this time that were answered in time."""
        return sum(outcome == "served" and begin_ns <= at_ns < end_ns for at_ns, outcome in self.outcomes)


@dataclass
class Request:
    """A request that was read; what it waits in the kernel is not known to the server."""

    edge: Edge
    came_ns: int
    deferred_ns: int
    patience_ns: int = DEADLINE_NS // 2

    def age_ns(self) -> int:
        return self.edge.loop.now_ns - self.deferred_ns

    def start(self) -> None:
        self.edge.loop.now_ns += SERVE_NS
        self.edge.has_served = True
        self.edge.end(self.came_ns, "served" if self.edge.loop.now_ns - self.came_ns <= DEADLINE_NS else "late")

    def refuse_deferred(self) -> None:
        self.edge.loop.now_ns += REFUSE_NS
        self.edge.end(self.came_ns, "refused")


@dataclass(eq=False)
class Waiter:
    """A deferred request that costs nothing."""

    loop: Loop
    deferred_ns: int
    patience_ns: int
    started: list["Waiter"]
    in_kernel_ns: int = 0
    is_refused: bool = False

    def age_ns(self) -> int:
        return self.loop.now_ns - self.deferred_ns + self.in_kernel_ns

    def start(self) -> None:
        self.started.append(self)

    def refuse_deferred(self) -> None:
        self.is_refused = True


def poisson(rate_rps: float, begin_ns: int, end_ns: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    found, at_ns = [], float(begin_ns)
    while (at_ns := at_ns + chance.expovariate(rate_rps / 1e9)) < end_ns:
        found.append(round(at_ns))
    return found


@pytest.fixture
def overloaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Edge]:
    """Plays a second at a multiple of the capacity, then a second at half of it."""

    def play(factor: float, **options: Any) -> Edge:
        edge = Edge(**options)
        run_on(edge.loop, monkeypatch)
        arrivals = poisson(factor * CAPACITY_RPS, 0, 1000 * MS, 1)
        arrivals += poisson(0.5 * CAPACITY_RPS, 1000 * MS, 2000 * MS, 2)
        edge.run(arrivals, 2100 * MS)
        return edge

    return play


def test_goodput_holds_at_five_times_the_load_and_recovers(overloaded: Callable[..., Edge]) -> None:
    goodput = {}
    for factor in (0.7, 1, 1.5, 2, 3, 5):
        edge = overloaded(factor)
        goodput[factor] = edge.goodput(200 * MS, 1000 * MS) / 0.8 / CAPACITY_RPS
        calm = edge.goodput(1100 * MS, 2000 * MS) / 0.9 / CAPACITY_RPS
        assert calm > 0.45, f"recovered within 0.1 s after {factor} ×"
        ends = len(edge.outcomes) + edge.overflows
        assert ends == len(poisson(factor * CAPACITY_RPS, 0, 1000 * MS, 1)) + len(
            poisson(0.5 * CAPACITY_RPS, 1000 * MS, 2000 * MS, 2)
        ), "each request ends exactly once"
    assert goodput[0.7] > 0.68
    assert min(goodput.values()) >= 0.7 * max(goodput.values()) - 0.01 or goodput[0.7] == min(goodput.values())
    assert goodput[5] >= 0.7 * max(goodput.values()), goodput


def test_first_come_first_served_would_not_hold(overloaded: Callable[..., Edge]) -> None:
    """The same load without an intake, as it was: nearly nothing is in time."""
    assert overloaded(2, is_first_come=True).goodput(200 * MS, 1000 * MS) < 0.1 * CAPACITY_RPS


@pytest.mark.parametrize("length_ms", [5, 20])
def test_a_short_burst_waits_and_is_served_whole(monkeypatch: pytest.MonkeyPatch, length_ms: int) -> None:
    edge = Edge()
    edge.idle = 4096  # connections are open
    run_on(edge.loop, monkeypatch)
    arrivals = poisson(1.5 * CAPACITY_RPS, 0, length_ms * MS, 1)
    arrivals += poisson(0.5 * CAPACITY_RPS, length_ms * MS, 200 * MS, 2)
    edge.run(arrivals, 300 * MS)
    assert [outcome for _, outcome in edge.outcomes] == ["served"] * len(arrivals)


@pytest.mark.parametrize("long_ns", [DEADLINE_NS * 4, 3_600_000 * MS])
def test_long_deadlines_do_not_hide_that_short_ones_wait(monkeypatch: pytest.MonkeyPatch, long_ns: int) -> None:
    """One request in twenty has a long deadline; the others are as in any overload, and so is their goodput."""
    goodput = {}
    for patience_ns in (DEADLINE_NS // 2, long_ns // 2):
        edge = Edge()
        edge.some_patience_ns = patience_ns
        run_on(edge.loop, monkeypatch)
        arrivals = poisson(2 * CAPACITY_RPS, 0, 500 * MS, 1)
        edge.run(arrivals, 500 * MS)
        goodput[patience_ns] = edge.goodput(100 * MS, 450 * MS)
    alone, beside = goodput.values()
    assert alone > 0.5 * CAPACITY_RPS * 0.35
    assert beside > 0.9 * alone


def deferred(
    intake: Intake,
    loop: Loop,
    patience_ns: int,
    started: list[Waiter],
    count: int = 1,
    *,
    is_patient: bool = False,
) -> list[Waiter]:
    made = [Waiter(loop, loop.now_ns, patience_ns, started) for _ in range(count)]
    for each in made:
        intake.defer(each, is_page=False, is_patient=is_patient)
    return made


def test_even_in_a_calm_queue_nothing_is_taken_up_that_has_waited_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third had waited elsewhere before it came. What the fourth has waited in the kernel does not count: it came
    while another edge was dying."""
    loop, started = Loop(200 * MS), list[Waiter]()
    run_on(loop, monkeypatch)
    intake = Intake(lambda: True)
    intake.start(loop)  # type: ignore[arg-type]
    made = [Waiter(loop, loop.now_ns, 100 * MS, started) for _ in range(4)]
    made[2].deferred_ns -= 101 * MS
    made[3].in_kernel_ns = 101 * MS
    for each in made:
        intake.defer(each, is_page=False)
    loop.turn()
    assert started == [made[0], made[1], made[3]]
    assert made[2].is_refused


@pytest.mark.parametrize("is_calm", [True, False])
def test_those_that_can_wait_longer_do_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, is_calm: bool) -> None:
    """An hour's deadline is no way to the front, however many have one and whatever is calm."""
    loop, started = Loop(), list[Waiter]()
    run_on(loop, monkeypatch)
    intake = Intake(lambda: True)
    intake.start(loop)  # type: ignore[arg-type]
    patient = deferred(intake, loop, 100 * MS, started, 100, is_patient=True)
    loop.now_ns += MS if is_calm else 60 * MS
    usual = deferred(intake, loop, 100 * MS, started, 21)
    loop.turn()
    loop.turn()
    kinds = ["patient" if each in patient else "usual" for each in started]
    assert kinds[:24] == (["usual"] * 7 + ["patient"]) * 3
    assert [each for each in started if each not in patient] == usual, "the others are as if they were alone"
    while intake.has_waiting:
        loop.turn()
    assert len(started) == 121


def test_the_shortest_patience_decides_whether_the_newest_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, started, has_room = Loop(), list[Waiter](), [False]
    run_on(loop, monkeypatch)
    intake = Intake(lambda: has_room[0])
    intake.start(loop)  # type: ignore[arg-type]
    (hour,) = deferred(intake, loop, 3_600_000 * MS, started)
    loop.now_ns += MS
    (short,) = deferred(intake, loop, 100 * MS, started)
    loop.now_ns += 60 * MS
    (newest,) = deferred(intake, loop, 100 * MS, started)
    has_room[0] = True
    loop.turn()
    loop.turn()
    assert started == [newest, short, hour], "short has waited for more than half of its patience"
    (hour,) = deferred(intake, loop, 3_600_000 * MS, started)
    loop.now_ns += 60 * MS
    (newest,) = deferred(intake, loop, 100 * MS, started)
    loop.turn()
    loop.turn()
    assert started[3:] == [hour, newest], "nobody has waited long, measured by what he can wait"


@given(
    waits=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from((1, 50, 60, 500, 60_000)), st.booleans()), max_size=80
    ),
    turns_ms=st.integers(1, 50),
)
def test_each_that_waits_is_taken_up_or_refused_once(waits: list[tuple[int, int, bool]], turns_ms: int) -> None:
    loop, started = Loop(), list[Waiter]()
    intake = Intake(lambda: True)
    intake.start(loop)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        run_on(loop, patch)
        made = []
        for at_ms, patience_ms, leaves in sorted(waits):
            loop.now_ns = max(loop.now_ns, at_ms * MS)
            made += deferred(intake, loop, patience_ms * MS, started)
            if leaves:
                made.pop().deferred_ns = 0
        while intake.has_waiting:
            loop.now_ns += turns_ms * MS
            loop.turn()
    assert Counter(map(id, started)) + Counter(id(each) for each in made if each.is_refused) == Counter(map(id, made))
    assert not any(loop.now_ns - each.deferred_ns > each.patience_ns for each in started if each.is_refused)


@given(clients=st.integers(2, 20), pieces=st.lists(st.integers(1, 30), min_size=2, max_size=20))
def test_each_that_goes_on_later_gets_its_turn(clients: int, pieces: list[int]) -> None:
    """Round robin, and no more than `PIECES_NS` and one piece in a turn."""
    loop, done, turns = Loop(), [], []
    intake = Intake(lambda: True)
    intake.start(loop)  # type: ignore[arg-type]
    left = {client: pieces[client % len(pieces)] for client in range(clients)}

    def piece(client: int) -> None:
        loop.now_ns += MS // 5
        done.append(client)
        left[client] -= 1
        if left[client]:
            intake.go_on_later(lambda: piece(client))

    with pytest.MonkeyPatch.context() as patch:
        run_on(loop, patch)
        for client in range(clients):
            intake.go_on_later(lambda client=client: piece(client))  # type: ignore[misc]
        while loop.soon:
            begun_ns = loop.now_ns
            loop.turn()
            turns.append(loop.now_ns - begun_ns)
    assert max(turns) <= module.PIECES_NS + MS // 5
    assert not any(left.values())
    for client in range(clients):
        # Before its last piece, another one got at most one piece more than it.
        last = len(done) - 1 - done[::-1].index(client)
        counts = Counter(done[: last + 1])
        assert max(counts.values()) <= counts[client] + 1


def test_a_piece_that_fails_does_not_stop_the_others() -> None:
    loop, done = Loop(), []
    intake = Intake(lambda: True)
    intake.start(loop)  # type: ignore[arg-type]

    def fail() -> None:
        raise ZeroDivisionError

    intake.go_on_later(fail)
    intake.go_on_later(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        loop.turn()
    loop.turn()
    assert done == [1]


def test_pages_are_answered_while_inference_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    run_on(edge.loop, monkeypatch)
    waits: list[int] = []

    class Page(Request):
        def start(self) -> None:
            waits.append(edge.loop.now_ns - self.came_ns)

    def probe() -> None:
        edge.intake.defer(Page(edge, edge.loop.now_ns, edge.loop.now_ns, 1000 * MS), is_page=True)
        edge.loop.call_later(0.01, probe)

    probe()
    edge.run(poisson(3 * CAPACITY_RPS, 0, 500 * MS, 1), 500 * MS)
    assert len(waits) >= 20
    assert max(waits[1:]) < 10 * MS, "only while thousands of connections are opened does one wait"


@settings(max_examples=200)
@given(
    body=st.binary(max_size=30),
    extra=st.binary(max_size=3),
    missing=st.integers(0, 3),
    fields=st.lists(st.sampled_from([b"x: y\r\n", b"host: a\r\n", b"x-content-length: 9\r\n"]), max_size=3),
)
def test_only_a_whole_request_is_taken_for_one(body: bytes, extra: bytes, missing: int, fields: list[bytes]) -> None:
    head = b"POST /a HTTP/1.1\r\n" + b"".join(fields) + b"Content-Length: %d\r\n\r\n" % len(body)
    whole = head + body
    assert is_whole(whole)
    assert is_whole(whole + extra) == (not extra)
    assert is_whole(whole[: len(whole) - missing]) == (missing == 0)
    assert not is_whole(head.replace(b"\r\n\r\n", b"\r\ncontent-length: 1\r\n\r\n") + body)
    assert not is_whole(whole.replace(b"Content-Length:", b"Transfer-Encoding: chunked\r\nContent-Length:"))


@pytest.mark.parametrize(
    ("line", "fields", "body"),
    [
        (b"POST /a HTTP/1.1", b"content-length: 10000000", b""),
        (b"POST /a HTTP/1.1", b"content-length: 00000020", b""),
        (b"POST /a HTTP/1.1", b"content-length: 99999999999999999999", b""),
        (b"POST /a HTTP/1.1", b"content-length:", b""),
        (b"POST /a HTTP/1.1", b"content-length: 0x5", b""),
        (b"POST /a HTTP/1.1", b"content-length : 5", b""),
        (b"POST /a HTTP/1.1", b"content-length: 5, 5", b"12345"),
        (b"POST /a HTTP/1.1", b"content-length: 5\r\nexpect: 100-continue", b"12345"),
        (b"POST /a HTTP/1.1", b"content-length: 5\r\nupgrade: h2c\r\nconnection: upgrade", b"12345"),
        (b"POST /a HTTP/1.1", b"content-length: 5\r\nConnection: close", b"12345"),
        (b"POST /a HTTP/1.1", b"a: b\ncontent-length: 5", b""),
        (b"POST /a HTTP/1.1", b"a: b\rcontent-length: 5", b""),
        (b"POST /a HTTP/1.1", b"a: b\r\n content-length: 5", b""),
        (b"POST /a HTTP/1.1", b"a: b\r\ncontent-length\0: 5", b""),
        (b"POST /a HTTP/1.0", b"content-length: 5", b"12345"),
        (b"HEAD /a HTTP/1.1", b"host: a", b""),
        (b"GET /a HTTP/1.1", b"a:\r\n" * 3000 + b"host: a", b""),
        (b"CONNECT a:80 HTTP/1.1", b"host: a", b""),
        (b"\r\nPOST /a HTTP/1.1", b"content-length: 0", b""),
    ],
)
def test_what_may_end_elsewhere_or_wants_another_answer_is_not_taken_for_whole(
    line: bytes, fields: bytes, body: bytes
) -> None:
    assert not is_whole(line + b"\r\n" + fields + b"\r\n\r\n" + body)


def test_a_whole_request_is_known_whatever_its_length_and_spelling() -> None:
    assert is_whole(b"GET /v2/health/live?a=b HTTP/1.1\r\nHost: a:80\r\nAccept:\r\nConnection:keep-alive\r\n\r\n")
    assert is_whole(b"POST / HTTP/1.1\r\nCONTENT-LENGTH:\t10000000 \r\n\r\n" + bytes(10**7))
    assert is_whole(b"POST / HTTP/1.1\r\nx-name: \xe9\r\ncontent-length: 0000000000000000003\r\n\r\nabc")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"POST /v2/models/a/infer?x=y HTTP/1.1\r\nX-SLO-ms:  70\r\n\r\n{}", ("/v2/models/a/infer", "70")),
        (b"POST /v2/models/a/infer HTTP/1.1\r\nx-slo-ms: 70.5 \r\nhost: a", ("/v2/models/a/infer", "70")),
        (b"POST /v2/models/a/infer HTTP/1.1\r\nx-slo-ms: 1e3\r\n\r\n", ("/v2/models/a/infer", "")),
        (b"POST /v2/models/a/infer HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nx-slo-ms: 1\r\n\r\n", ("/v2/models/a/infer", "")),
        (b"POST /v2/models/a/infer HTTP/1.1\r\nhost: a\r\n\r\n", ("/v2/models/a/infer", "")),
        (b"nothing", ("", "")),
        (b"", ("", "")),
    ],
)
def test_path_and_deadline_are_found_without_a_parser(data: bytes, found: tuple[str, str]) -> None:
    assert target_of(data) == found


def test_while_there_is_no_room_it_looks_again_at_one_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    run_on(edge.loop, monkeypatch)
    has_room = [False]
    intake = Intake(lambda: has_room[0])
    intake.start(edge.loop)  # type: ignore[arg-type]
    for _ in range(100):
        assert intake.is_behind(edge.loop.now_ns)
        intake.defer(Request(edge, edge.loop.now_ns, edge.loop.now_ns), is_page=False)
        edge.loop.turn()
        edge.loop.now_ns += MS // 100
    assert len(edge.loop.timers) == 1
    has_room[0] = True
    while intake.has_waiting:
        edge.loop.now_ns += MS
        edge.loop.turn()
    assert [outcome for _, outcome in edge.outcomes] == ["served"] * 100
    assert not edge.loop.timers


class Respondent:
    address = ""

    def later(self, piece: Callable[[], None]) -> None:
        raise AssertionError

    def answer(self, *_: object) -> None:
        raise AssertionError


def large(edge: Edge) -> Exchange:
    return Exchange(Respondent(), "POST", {}, edge.loop.now_ns, held_bytes=2**20)


def test_few_large_requests_come_and_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    run_on(edge.loop, monkeypatch)
    intake = LargeIntake(lambda: True)
    intake.start(edge.loop)  # type: ignore[arg-type]
    slow = [large(edge) for _ in range(100)]
    for each in slow:
        assert not intake.is_behind(edge.loop.now_ns), "who sends nothing is not waited for"
        intake.expect(each)
        each.held_bytes = 100
    first, *others = [large(edge) for _ in range(READING_MAX)]
    intake.begin(first)
    for each in others:
        assert not intake.is_behind(edge.loop.now_ns)
        intake.expect(each)
    assert intake.is_behind(edge.loop.now_ns)
    assert [intake.is_expected(each) for each in (slow[0], first, *others)] == [True, False, *[True] * len(others)]
    intake.defer(Request(edge, edge.loop.now_ns, edge.loop.now_ns), is_page=False)
    edge.loop.turn()
    assert not edge.outcomes
    edge.loop.turn()
    assert not edge.outcomes
    first.note_read()
    first.drop()
    edge.loop.turn()
    assert [outcome for _, outcome in edge.outcomes] == ["served"], "at once, and not when a timer fires"
    for each in (*others, *slow[1:]):
        intake.begin(each)
        each.drop()
    assert intake.is_busy
    slow[0].held_bytes = 2**20
    late = large(edge)
    intake.begin(late)
    intake.expect(slow[0])
    assert intake.is_behind(edge.loop.now_ns)
    edge.loop.now_ns += ARRIVING_NS + 1
    edge.loop.turn()
    assert not intake.is_behind(edge.loop.now_ns), "slow clients are not waited for"
    assert not intake.is_expected(slow[0])


def test_the_length_of_a_body_is_read_from_an_unparsed_head() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\nContent-Length: 123456789\r\n\r\n"
    assert announced_bytes(head + b"x" * 100) == 123_456_789
    assert announced_bytes(memoryview(head)) == 123_456_789
    assert announced_bytes(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") == 0
    assert announced_bytes(b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n") == 0


def test_while_large_requests_are_read_refusing_has_its_share_only(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = Edge()
    run_on(edge.loop, monkeypatch)
    intake = LargeIntake(lambda: True)
    intake.start(edge.loop)  # type: ignore[arg-type]
    for _ in range(READING_MAX):
        intake.begin(large(edge))
    old_ns = edge.loop.now_ns
    edge.loop.now_ns += DEADLINE_NS
    for _ in range(5_000):
        intake.defer(Request(edge, old_ns, old_ns), is_page=False)
    begun_ns = edge.loop.now_ns
    while edge.loop.now_ns < begun_ns + 100 * MS:
        edge.loop.now_ns += MS // 10
        edge.loop.turn()
    refused_ns = REFUSE_NS * sum(outcome == "refused" for _, outcome in edge.outcomes)
    assert 5 * MS <= refused_ns <= 12 * MS, "a tenth of the time"
