"""Who is accepted, and when, if far more connect than a server can open: simulated, with costs in place of clocks."""

import socket
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import cast

import pytest

from sloop.app.limits import ServerLimits
from sloop.serve.edge import listener as module
from sloop.serve.edge.listener import ACCEPTING_NS, ACCEPTS_MAX, Listener, ServerConnection
from sloop.serve.edge.tcp import BACKLOG, BACKLOG_MIN, Backlog

S = 1_000_000_000
MS = 1_000_000
PATIENCE_NS = 50 * MS
"""For how long a server may let a request wait."""
GIVE_UP_NS = 400 * MS
"""After this, clients give up."""
OPEN_NS, SKIP_NS = 3_000_000, 380_000
"""What a server on a fifth of a core needs to open a connection, for which it has a tenth of its time, and to close
one, for which it has a quarter."""


@dataclass
class Kernel:
    """A listening socket, with clients who connect 4,500 times a second."""

    limit: int = BACKLOG
    now_ns: int = 0
    lines: deque[int] = field(default_factory=deque)
    """When each that waits has connected."""
    next_ns: int = 0
    told: list[int] = field(default_factory=list)

    def listen(self, size: int) -> None:
        self.limit = size
        self.told.append(size)

    def pass_to(self, now_ns: int) -> None:
        """Clients connect until then; those who find no room try again later than they wait."""
        self.now_ns = now_ns
        while self.next_ns <= now_ns:
            if len(self.lines) <= self.limit:
                self.lines.append(self.next_ns)
            self.next_ns += S // 4500


def in_time(backlog: Backlog, kernel: Kernel, until_ns: int) -> Counter[int]:
    """By tenths of a second, how many are opened whose clients still wait."""
    found: Counter[int] = Counter()
    sock = cast(socket.socket, kernel)
    while kernel.now_ns < until_ns:
        kernel.pass_to(kernel.now_ns + 10_000)
        if not kernel.lines:
            backlog.is_empty(sock)
            continue
        waited_ns = kernel.now_ns - kernel.lines.popleft()
        if waited_ns > PATIENCE_NS:
            backlog.was_late(sock)
            kernel.pass_to(kernel.now_ns + SKIP_NS)
        else:
            found[kernel.now_ns // (S // 10)] += 1
            backlog.was_early(sock)
            kernel.pass_to(kernel.now_ns + OPEN_NS)
    return found


def test_after_each_of_twenty_pauses_those_are_accepted_again_who_still_wait() -> None:
    backlog, kernel = Backlog(), Kernel()
    for pause in range(20):
        begun_ns = kernel.now_ns + 800 * MS  # nobody accepts for so long
        kernel.pass_to(begun_ns)
        found = in_time(backlog, kernel, begun_ns + 3 * S)
        tenths = [found[tenth] for tenth in range(begun_ns // (S // 10), (begun_ns + 3 * S) // (S // 10))]
        assert sum(tenths[:10]) > 0, f"within a second of pause {pause}"
        assert sum(tenths[10:]) > 0.7 * 2 * S / OPEN_NS, "of those that there is time for"


def test_with_a_fixed_line_nobody_would_be_accepted_in_time() -> None:
    class Fixed(Backlog):
        def _set(self, sock: socket.socket, size: int) -> None:
            pass

    kernel = Kernel(limit=4096)
    kernel.pass_to(800 * MS)
    found = in_time(Fixed(), kernel, 10 * S)
    assert not any(found[tenth] for tenth in range(8, 100))


def test_the_line_has_its_length_again_when_all_have_been_accepted() -> None:
    backlog, kernel = Backlog(), Kernel()
    sock = cast(socket.socket, kernel)
    for _ in range(20):
        backlog.was_late(sock)
    assert (kernel.limit, backlog.size) == (BACKLOG_MIN, BACKLOG_MIN)
    for _ in range(10):
        backlog.is_empty(sock)
    assert (kernel.limit, backlog.size) == (BACKLOG, BACKLOG)
    calls = len(kernel.told)
    for _ in range(100):
        backlog.was_early(sock)
        backlog.is_empty(sock)
    assert len(kernel.told) == calls, "without overload it costs nothing"


# One turn of the event loop


class Wire:
    """A connection that was accepted; `is_late`: its client has given up."""

    def __init__(self, is_late: bool) -> None:
        self.is_late, self.is_closed = is_late, False

    def setblocking(self, _flag: bool) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Turn:
    """A listener before a line of connections, and what it did with them."""

    line: deque[Wire]
    opened: list[Wire] = field(default_factory=list)
    now_ns: int = S

    def accept(self) -> tuple[Wire, tuple[str, int]]:
        if not self.line:
            raise BlockingIOError
        self.now_ns += 20_000
        return self.line.popleft(), ("127.0.0.1", 1)

    def listen(self, _size: int) -> None: ...


def one_turn(patch: pytest.MonkeyPatch, line: list[bool], *, turns: int = 1, is_overloaded: bool = False) -> Turn:
    turn = Turn(deque(map(Wire, line)))
    listener = Listener(lambda: ServerConnection(listener), limits=ServerLimits(connections=1000))
    patch.setattr(time, "thread_time_ns", lambda: turn.now_ns)
    patch.setattr(module, "waited_in_kernel_ns", lambda wire: MS * (1 + 999 * wire.is_late))
    patch.setattr(listener, "_admit", lambda wire, _address, _waited_ns: turn.opened.append(wire))
    patch.setattr(listener, "_socket", turn)
    listener.refuses = lambda _wire, waited_ns: waited_ns > PATIENCE_NS
    listener.is_overloaded = lambda: is_overloaded
    for _ in range(turns):
        listener._accept()
    return turn


def test_a_turn_opens_few_connections_and_skips_those_whose_clients_have_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = [True] * 10 + [False] * 10
    turn = one_turn(monkeypatch, line)
    assert len(turn.opened) == ACCEPTS_MAX
    assert len(turn.line) == 10 - ACCEPTS_MAX


def test_a_turn_is_bounded_however_many_have_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = one_turn(monkeypatch, [True] * 1000)
    assert 1000 - len(turn.line) == ACCEPTING_NS // 20_000


def test_under_overload_skipping_has_its_share_and_does_not_use_that_for_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn = one_turn(monkeypatch, [True] * 5000, turns=1000, is_overloaded=True)
    skipped = 5000 - len(turn.line)
    assert 0 < skipped < 5000, "no other work is done here, so that no time passes for a share of it"
    monkeypatch.undo()
    turn = one_turn(monkeypatch, [True] * 20 + [False] * 4, is_overloaded=True)
    assert len(turn.opened) == 4
