import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sloop.load import connections
from sloop.load.connections import Connections, Outgoing, Server
from sloop.load.record import Ending
from sloop.load.wire import Answer
from sloop.units import NS_PER_S

pytestmark = pytest.mark.live


class Ends:
    """Collects reports."""

    def __init__(self, wanted: int) -> None:
        self.endings: dict[int, Ending] = {}
        self.answers: dict[int, Answer | None] = {}
        self._wanted = wanted
        self._done = asyncio.Event()

    def report(self, outgoing: Outgoing, done_ns: int, ending: Ending, answer: Answer | None) -> None:
        assert outgoing.number not in self.endings, "reported twice"
        self.endings[outgoing.number] = ending
        self.answers[outgoing.number] = answer
        if len(self.endings) == self._wanted:
            self._done.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self._done.wait(), 10)


def outgoing(number: int) -> Outgoing:
    body = b"{}"
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
    return Outgoing(number, head, body, time.monotonic_ns())


def sent(port: int, count: int, then: Callable[[Connections], Awaitable[None]] | None = None, **options: int) -> Ends:
    """Send `count` requests at once; `then` runs before waiting for them all to end."""

    async def run() -> Ends:
        ends = Ends(count)
        settings = {"connections_max": 100, "timeout_ns": 10 * NS_PER_S, **options}
        made = Connections(Server("127.0.0.1", port), ends.report, **settings)
        for number in range(count):
            made.send(outgoing(number))
        if then is not None:
            await then(made)
        await ends.wait()
        made.close()
        return ends

    return asyncio.run(run())


def test_grows_with_what_is_in_flight(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=0.05)
    ends = sent(stub.port, 90)
    assert set(ends.endings.values()) == {Ending.ANSWERED}
    assert len(ends.endings) == 90
    assert 1 < stub.connections <= 90


def test_beyond_its_bound_a_request_overflows_at_once(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=0.05)
    ends = sent(stub.port, 10, connections_max=3)
    assert Counter(ends.endings.values()) == {Ending.ANSWERED: 3, Ending.OVERFLOW: 7}


def test_connections_are_used_again(stub: Any) -> None:
    async def one_by_one() -> None:
        ends = Ends(20)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=5, timeout_ns=NS_PER_S)
        await made.warm(2)
        for number in range(20):
            made.send(outgoing(number))
            await asyncio.sleep(0.01)
        await ends.wait()
        assert set(ends.endings.values()) == {Ending.ANSWERED}
        assert made.opened == 2
        made.close()

    asyncio.run(one_by_one())


def test_connections_idle_for_long_are_not_trusted(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_NS_MAX", -1)

    async def again(made: Connections) -> None:
        await asyncio.sleep(0.05)
        made.send(outgoing(1))

    async def run() -> int:
        ends = Ends(2)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=5, timeout_ns=NS_PER_S)
        made.send(outgoing(0))
        await again(made)
        await ends.wait()
        made.close()
        return made.opened

    assert asyncio.run(run()) == 2


def test_connections_of_a_passing_burst_are_closed_again(stub: Any) -> None:
    """Else a server that takes 1,024 connections at a time would never look at those that came after."""

    async def run() -> int:
        ends = Ends(20)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=50, timeout_ns=NS_PER_S)
        await made.warm(2)
        for number in range(20):
            made.send(outgoing(number))
        await ends.wait()
        made.expire(time.monotonic_ns() + 2 * connections.SPARE_NS_MAX)
        left = made.open_count
        made.close()
        return left

    stub.script = lambda number: stub.Step(delay_s=0.05)
    assert asyncio.run(run()) == 2
    assert stub.connections > 2


def test_closed_while_connecting_leaves_nothing_open(stub: Any) -> None:
    """At whatever moment: a connection may be made in the very turn in which all is closed."""

    async def closed_after(turns: int) -> int:
        ends = Ends(8)
        made = Connections(Server("127.0.0.1", stub.port), ends.report, connections_max=50, timeout_ns=NS_PER_S)
        for number in range(8):
            made.send(outgoing(number))
        for _ in range(turns):
            await asyncio.sleep(0)
            time.sleep(0.001)  # noqa: ASYNC251  # what the system has to do is done by the next turn
        made.close()
        await asyncio.sleep(0.01)
        assert len(ends.endings) == 8
        return made.open_count

    for turns in range(12):
        assert asyncio.run(closed_after(turns)) == 0, turns


@pytest.mark.parametrize(
    ("content", "closes", "ending"),
    [
        (b"", True, Ending.DISCONNECTED),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", True, Ending.DISCONNECTED),
        (b"nonsense\r\n\r\n", False, Ending.BROKEN),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", False, Ending.BROKEN),
        (b'HTTP/1.1 200 OK\r\n\r\n{"outputs": []}', True, Ending.ANSWERED),
        (b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 13\r\n\r\n{"outputs":1}', True, Ending.ANSWERED),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", False, Ending.ANSWERED),
    ],
)
def test_what_servers_do_wrong(stub: Any, content: bytes, closes: bool, ending: Ending) -> None:
    stub.script = lambda number: stub.Step(content, closes=closes)
    assert set(sent(stub.port, 5).endings.values()) == {ending}


def test_a_silent_server_times_out(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=60) if number % 2 else stub.Step()

    async def expire(made: Connections) -> None:
        await asyncio.sleep(0.2)
        made.expire(time.monotonic_ns())
        await asyncio.sleep(0.2)
        made.expire(time.monotonic_ns() + NS_PER_S)

    ends = sent(stub.port, 6, expire, timeout_ns=NS_PER_S)
    assert Counter(ends.endings.values()) == {Ending.ANSWERED: 3, Ending.TIMEOUT: 3}


def test_nobody_there() -> None:
    assert set(sent(1, 5).endings.values()) == {Ending.UNREACHABLE}


def test_closing_ends_everything(stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=60)

    async def close(made: Connections) -> None:
        await asyncio.sleep(0.1)
        made.close()

    assert set(sent(stub.port, 4, close).endings.values()) == {Ending.TIMEOUT}
