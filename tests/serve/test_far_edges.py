"""Edges of other machines and the deciding process: what a broken or lying edge can do, which is to lose its own
requests, and what becomes of its clock, its blocks and its share of the limits."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop import __version__
from sloop.app.application import Limits
from sloop.serve import edges as module
from sloop.serve import network
from sloop.serve.backends.agents import AgentBackend, JoiningNodes
from sloop.serve.blocks import Block
from sloop.serve.driver import Driver, Turns
from sloop.serve.edge.http import HttpSettings
from sloop.serve.edge.process import EdgeSettings
from sloop.serve.edges import CLOCK_WINDOW_NS, TIME_NS_MAX, Edges, FarClock
from sloop.serve.messages import (
    Ask,
    AskReady,
    Cancel,
    CloseEdge,
    EdgeClock,
    EdgeCounts,
    EdgeEnds,
    EdgeHello,
    EdgeReady,
    EdgeSetup,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    Question,
    Release,
    RequestEnded,
    Submit,
    ToEdge,
)
from sloop.serve.network import ArenaHolder, HolderTable, NetworkLink, NodeListener, NodeTls, Purpose, connect
from sloop.serve.protocols import EdgeClient
from sloop.serve.transport import RecordLink
from sloop.shared_memory import Address, Arenas
from sloop.units import NS_PER_MS, NS_PER_S
from sloop.vocabulary import Outcome, RequestId
from tests.serve.edge.test_sink import OFFER
from tests.serve.test_agents import play
from tests.serve.test_network import HOST, TOKEN, until

pytestmark = pytest.mark.live
SETTINGS = EdgeSettings(HttpSettings(), 1 << 20, 1 << 22, 1 << 20, 4)


class Decider:
    """A driver that remembers requests until a test ends them, and frees their blocks then."""

    def __init__(self, arenas: Arenas) -> None:
        self.turns, self.zero_ns = Turns(), time.monotonic_ns()
        self.arenas = arenas
        self.submitted: list[tuple[RequestId, Block, EdgeClient, int, dict[str, Any]]] = []
        self.open: dict[RequestId, Block] = {}
        self.cancelled: list[RequestId] = []

    def submit(self, block: Block, edge: EdgeClient, number: int, **options: Any) -> RequestId:
        request = RequestId(len(self.submitted) + 1)
        self.submitted.append((request, block, edge, number, options))
        self.open[request] = block
        edge.requests[number] = request
        return request

    def cancel(self, request: RequestId) -> None:
        self.cancelled.append(request)
        self._free(request)

    def end(self, request: RequestId, blocks: Sequence[Block] = (b"answer",)) -> None:
        _, _, edge, number, _ = self.submitted[request - 1]
        self._free(request)
        edge.on_end(RequestEnded(number, Outcome.SERVED, "1", list(blocks)))

    def _free(self, request: RequestId) -> None:
        block = self.open.pop(request)
        if isinstance(block, Address):
            self.arenas.free(block)


class Answers:
    """Answers every question with its name."""

    def ask(self, question: Question, then: Callable[[bytes], None]) -> None:
        then(type(question).__name__.encode())


class NotListening:
    """A socket of an edge that is not started."""

    def getsockname(self) -> tuple[str, int]:
        return HOST, 80

    def close(self) -> None: ...


class FakeEdge:
    """The other end of an edge's connection, which says what a test wants."""

    def __init__(self, link: NetworkLink) -> None:
        self.came: list[Any] = []
        self.ends: list[str] = []
        self.records = RecordLink(asyncio.get_running_loop(), link, ToEdge, self.came.append, self.ends.append)
        link.keep_alive()

    def send(self, *records: FromEdge) -> None:
        for record in records:
            self.records.send(record)

    async def hear(self, kind: type, count: int = 1) -> Any:  # a record of that kind
        """The `count`th record of a kind."""
        await until(lambda: len([each for each in self.came if isinstance(each, kind)]) >= count)
        return [each for each in self.came if isinstance(each, kind)][count - 1]


class Center:
    """What a deciding process has for edges, and fake ones that are connected to it."""

    def __init__(self, settings: EdgeSettings) -> None:
        self.arenas, self.table = Arenas(), HolderTable()
        self.decider = Decider(self.arenas)
        ports = [cast(Any, (NotListening(), NotListening()))]  # an edge of its own, which is not started
        driver = cast(Driver, self.decider)
        self.edges = Edges(driver, Answers(), self.arenas, settings, ports, holders=self.table)
        self.listener: NodeListener | None = None
        self.fakes: list[FakeEdge] = []

    async def listen(self, tls: NodeTls | None = None) -> None:
        context = tls.server_context() if tls is not None else None
        self.listener = await NodeListener.listen((HOST, 0), TOKEN, self.edges.accept, context)

    async def connect(self) -> FakeEdge:
        assert self.listener is not None
        made = FakeEdge(await connect((HOST, self.listener.port), TOKEN, Purpose.EDGE))
        self.fakes.append(made)
        return made

    async def join(self, **others: Any) -> tuple[FakeEdge, int]:  # fields of the greeting
        """An edge that was admitted, and its number."""
        made = await self.connect()
        made.send(hello(**others))
        return made, (await made.hear(EdgeSetup)).holder


@asynccontextmanager
async def center(settings: EdgeSettings = SETTINGS, tls: NodeTls | None = None) -> AsyncIterator[Center]:
    made = Center(settings)
    await made.listen(tls)
    try:
        yield made
    finally:
        for each in made.fakes:
            each.records.close()
        assert made.listener is not None
        await made.listener.close()
        await until(lambda: not made.edges.far)
        assert not made.table.endpoints()
        await asyncio.sleep(0.01)


def hello(pid: int = 7, **others: Any) -> EdgeHello:  # fields of the greeting
    own = EdgeHello(__version__, pid, "another machine", (HOST, 1), time.monotonic_ns())
    return msgspec.structs.replace(own, **others)


def submit(number: int = 1, block: Block = b"x", **others: Any) -> Submit:
    return msgspec.structs.replace(Submit(number, "demo", block, time.monotonic_ns()), **others)


def block_of(holder: int, offset: int = 0, size: int = 100) -> Address:
    return Address((holder << 48) + 7, offset, size)


# Who joins


def test_numbers_of_those_who_hold_arenas_are_used_again_late_and_never_twice_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "HOLDERS_MAX", 4)
    table = HolderTable()
    for number in (1, 2, 3):
        assert table.number() == number
        table.add(ArenaHolder(number, "a machine", number, (HOST, 1)))
    table.remove(1)
    assert [table.number(), table.number(), table.number()] == [4, 1, 4], "2 and 3 are known"


def test_an_edge_gets_its_bounds_the_models_and_a_share_of_their_limits() -> None:
    async def scene() -> None:
        async with center() as here:
            here.edges.offer(msgspec.structs.replace(OFFER, limits=Limits(requests=10, bytes=100)))
            here.table.add(ArenaHolder(here.table.number(), "another machine", 99, (HOST, 5)))
            first, number = await here.join()
            setup = await first.hear(EdgeSetup)
            assert (setup.requests_max, setup.bodies_bytes_max, setup.needs_key) == (4, 1 << 22, False)
            assert setup.models[0].limits == Limits(requests=5, bytes=50), "the server has an edge of its own"
            assert await first.hear(Holders) == Holders({1: 99}, {1: (HOST, 5), number: (HOST, 1)})
            second, other = await here.join(pid=8, machine="a third machine", endpoint=(HOST, 2))
            assert other != number
            assert (await first.hear(OfferModel, 2)).limits == Limits(requests=4, bytes=34)
            assert here.table.on("another machine", edges=True) == {number: 7}
            assert (await second.hear(Holders)).here == {}
            first.send(EdgeCounts(held_bytes=5, keys={"robot": 3}))
            second.send(EdgeCounts(held_bytes=6))
            await until(lambda: here.edges.counts().held_bytes == 11)
            first.records.close()
            assert (await second.hear(OfferModel, 2)).limits == Limits(requests=5, bytes=50)
            assert (await second.hear(Holders, 2)).endpoints == {1: (HOST, 5), other: (HOST, 2)}
            total = here.edges.counts()
            assert (total.held_bytes, total.keys) == (6, {"robot": 3}), "what it has counted stays"
            here.table.remove(1)

    play(scene)


def test_edges_are_shown_with_their_requests_while_they_are_connected() -> None:
    async def scene() -> None:
        async with center() as here:
            here.decider.zero_ns = time.monotonic_ns() - NS_PER_S
            first, _ = await here.join(host="front-1", ports=(8000, 8001))
            first.send(EdgeReady(), submit(1), submit(2))
            await until(lambda: len(here.decider.submitted) == 2)
            await here.join(pid=8)
            own, one, other = here.edges.serving_edges()
            assert (own.name, own.where, own.ready) == ("edge 0", "server", False)
            assert (one.name, one.where, one.ready, one.open) == ("front-1/7", "elsewhere", True, 2)
            assert (one.address, one.grpc_address, one.pid) == (f"{HOST}:8000", f"{HOST}:8001", 7)
            assert (other.name, other.ready, other.open) == (f"{HOST}/8", False, 0)
            assert 1 <= one.since_s <= other.since_s
            here.decider.end(RequestId(1))
            assert here.edges.serving_edges()[1].open == 1
            first.records.close()
            await until(lambda: len(here.edges.far) == 1)
            assert [each.name for each in here.edges.serving_edges()] == ["edge 0", f"{HOST}/8"]

    play(scene)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"version": "0.0.0"}, "it runs sloop 0.0.0"),
        ({"ports": (1 << 16, 80)}, "it serves at the ports"),
        ({"host": "h" * 100_000}, "it serves at the ports"),
        ({"endpoint": (HOST, 1 << 16)}, "which is no address"),
        ({"endpoint": ("", 80)}, "which is no address"),
        ({"version": "v" * 100_000}, "it runs sloop vvv"),
    ],
)
def test_an_edge_that_cannot_serve_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(module, "LEAVE_S_MAX", 0.05)

    async def scene() -> None:
        async with center() as here:
            found = await here.connect()
            found.send(hello(**others))
            close = await found.hear(CloseEdge)
            assert told in close.why
            assert len(close.why) < 1000
            found.send(submit())  # it does not go
            await until(lambda: bool(found.ends))
            assert not here.decider.submitted
            assert not here.edges.deaths

    play(scene)


def test_an_edge_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_S_MAX", 0.05)

    async def scene() -> None:
        async with center() as here:
            silent, (other, _) = await here.connect(), await here.join()
            await until(lambda: bool(silent.ends))
            await asyncio.sleep(0.1)
            assert not other.ends

    play(scene)


def test_an_edge_that_connects_again_has_lost_what_it_had() -> None:
    async def scene() -> None:
        async with center() as here:
            first, number = await here.join()
            first.send(submit(5))
            await until(lambda: len(here.decider.submitted) == 1)
            again, other = await here.join()
            await until(lambda: bool(first.ends))
            assert here.decider.cancelled == [1]
            assert here.table.on("another machine", edges=True) == {other: 7}
            assert (other != number, len(here.edges.far), here.edges.deaths) == (True, 1, 1)
            again.send(submit(5))  # it still waits for it
            await until(lambda: len(here.decider.submitted) == 2)
            here.decider.end(RequestId(2))
            assert (await again.hear(RequestEnded)).number == 5

    play(scene)


def test_an_edge_that_was_told_to_end_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S_MAX", 0.2)

    async def scene() -> None:
        async with center() as here:
            first, _ = await here.join()
            first.send(EdgeCounts(keys={"": 4}), EdgeEnds())
            await until(lambda: any(far.is_leaving for far in here.edges.far))
            first.records.close()
            await until(lambda: not here.edges.far)
            second, _ = await here.join()
            deaf, _ = await here.join(pid=8)
            closing = asyncio.create_task(here.edges.close())
            await second.hear(CloseEdge)
            second.records.close()
            await closing
            await until(lambda: bool(deaf.ends))
            assert here.edges.deaths == 0
            assert here.edges.counts().keys == {"": 4}
            late = await here.connect()
            late.send(hello())
            assert (await late.hear(CloseEdge)).why == "the server stops"

    play(scene)


def test_answers_are_delivered_when_no_agent_is_asked_for_them_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with center() as here:
            found, own = await here.join()
            found.send(submit(1), submit(2), submit(3, block_of(own)))
            await until(lambda: len(here.decider.submitted) == 3)
            here.decider.end(RequestId(1), [block_of(40)])
            here.decider.end(RequestId(2), [b"small"])
            delivering = asyncio.create_task(here.edges.delivered())
            await found.hear(RequestEnded)
            await asyncio.sleep(0.05)
            assert not delivering.done()
            found.send(Release(block_of(40)))
            await asyncio.wait_for(delivering, 5)
            here.decider.end(RequestId(3), [block_of(40)])
            monkeypatch.setattr(module, "FETCH_S_MAX", 0.05)
            await asyncio.wait_for(here.edges.delivered(), 5)  # it does not come: no longer than a fetch takes

    play(scene)


def test_a_server_whose_core_has_failed_leaves_its_edges_to_the_next() -> None:
    async def scene() -> None:
        async with center() as here:
            found, _ = await here.join()
            found.send(submit(1), submit(2))
            await until(lambda: len(here.decider.submitted) == 2)
            here.decider.submitted[0][2].on_end(RequestEnded(1, Outcome.FAILED, "1", [], "the core has failed"))
            here.edges.leave()
            assert not here.edges.far
            await until(lambda: bool(found.ends))
            assert [each.number for each in found.came if isinstance(each, RequestEnded)] == [1], "it is told before"
            assert not [each for each in found.came if isinstance(each, CloseEdge)]

    play(scene)


def test_edges_that_leave_after_the_agents() -> None:
    """As when the server ends: by then nobody listens for agents any more."""

    async def scene() -> None:
        async with center() as here:
            nobody: Any = None
            backend = AgentBackend(
                *({}, {}, JoiningNodes()),
                arenas=here.arenas,
                nodes=[],
                endpoint=(HOST, 0),
                pid=os.getpid(),
                token=TOKEN,
                holders=here.table,
            )
            backend.attach(nobody)
            backend.on_edge = here.edges.accept
            await backend.open()
            made = FakeEdge(await connect((HOST, backend.port), TOKEN, Purpose.EDGE))
            here.fakes.append(made)
            made.send(hello())
            await made.hear(EdgeSetup)
            await backend.close()
            closing = asyncio.create_task(here.edges.close())
            await made.hear(CloseEdge)
            made.send(EdgeEnds())
            await asyncio.sleep(0.01)
            made.records.close()
            await asyncio.wait_for(closing, 1)

    play(scene)


# What an edge may not say


LIES: dict[str, Callable[[int, int], Sequence[FromEdge]]] = {
    "a number twice": lambda own, _: [submit(1), submit(1)],
    "a number of before": lambda own, _: [submit(2), submit(1)],
    "a block of another edge": lambda own, other: [submit(block=block_of(other))],
    "a block of the server": lambda own, _: [submit(block=block_of(0))],
    "a block twice": lambda own, _: [submit(1, block_of(own)), submit(2, block_of(own))],
    "a block at another size": lambda own, _: [submit(1, block_of(own)), submit(2, block_of(own, 0, 50))],
    "a block before the arena": lambda own, _: [submit(block=block_of(own, -4096))],
    "a block behind the arena": lambda own, _: [submit(block=block_of(own, 1 << 40))],
    "a block of no size": lambda own, _: [submit(block=block_of(own, 0, 0))],
    "a huge block": lambda own, _: [submit(block=block_of(own, 0, 1 << 60))],
    "no rows": lambda own, _: [submit(rows=0)],
    "too many rows": lambda own, _: [submit(rows=1 << 40)],
    "a deadline in the past": lambda own, _: [submit(slo_ns=-1)],
    "no deadline": lambda own, _: [submit(slo_ns=0)],
    "a deadline of years": lambda own, _: [submit(slo_ns=1 << 62)],
    "time that comes": lambda own, _: [submit(elapsed_ns=-1)],
    "years that have passed": lambda own, _: [submit(elapsed_ns=1 << 62)],
    "a long request id": lambda own, _: [submit(request_id="x" * 100_000)],
    "a long trace": lambda own, _: [submit(trace="x" * 100_000)],
    "a block that it was not given": lambda own, _: [Release(block_of(own))],
    "introduced again": lambda own, _: [hello()],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lie_costs_an_edge_its_requests_and_nobody_else(lie: Callable[[int, int], Sequence[FromEdge]]) -> None:
    async def scene() -> None:
        async with center() as here:
            liar, own = await here.join()
            other, number = await here.join(pid=8)
            other.send(submit(3, block_of(number)))
            await until(lambda: len(here.decider.submitted) == 1)
            liar.send(*lie(own, number))
            await until(lambda: bool(liar.ends))
            await until(lambda: len(here.edges.far) == 1)
            assert set(here.decider.cancelled) == set(range(2, len(here.decider.submitted) + 1))
            assert here.edges.deaths == 1
            assert not other.ends
            here.decider.end(RequestId(1))
            assert await other.hear(RequestEnded) == RequestEnded(3, Outcome.SERVED, "1", [b"answer"])
            assert await other.hear(Free) == Free(block_of(number))
            other.send(Ask(9, AskReady()))
            assert await other.hear(Page) == Page(9, b"AskReady")

    play(scene)


def test_an_edge_must_introduce_itself_first() -> None:
    async def scene() -> None:
        async with center() as here:
            early = await here.connect()
            early.send(submit())
            await until(lambda: bool(early.ends))
            assert not here.decider.submitted

    play(scene)


def test_more_requests_than_an_edge_may_have_are_refused() -> None:
    """It may have them from a server that had other bounds."""

    async def scene() -> None:
        async with center() as here:
            found, own = await here.join()
            most = 2 * SETTINGS.requests_max
            found.send(*(submit(number, block_of(own, 4096 * number)) for number in range(1, most + 3)))
            refused = [await found.hear(RequestEnded, count) for count in (1, 2)]
            assert [(each.number, each.outcome) for each in refused] == [
                (number, Outcome.REJECTED) for number in (most + 1, most + 2)
            ]
            assert [(await found.hear(Free, count)).block for count in (1, 2)] == [
                block_of(own, 4096 * number) for number in (most + 1, most + 2)
            ]
            assert len(here.decider.submitted) == most
            here.decider.end(RequestId(1))
            found.send(submit(most + 3))
            await until(lambda: len(here.decider.submitted) == most + 1)
            assert not found.ends

    play(scene)


def test_what_crosses_an_end_is_no_lie() -> None:
    async def scene() -> None:
        async with center() as here:
            found, own = await here.join()
            found.send(submit(1, block_of(own)))
            await until(lambda: bool(here.decider.submitted))
            here.decider.end(RequestId(1), [block_of(5)])
            found.send(Cancel(1))
            await found.hear(RequestEnded)
            found.send(Release(block_of(5)), submit(2, block_of(own)))  # the block is free and used again
            await until(lambda: len(here.decider.submitted) == 2)
            assert not found.ends

    play(scene)


def test_blocks_of_a_lost_edge_are_freed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that it was given, when it cannot be fetching it any more; one that comes later, and its own."""
    monkeypatch.setattr(module, "SILENT_S", 0.4)

    async def scene() -> None:
        async with center() as here:
            freed: list[Address] = []
            here.arenas.add_holder(40, freed.append)
            found, own = await here.join()
            found.send(submit(1), submit(2, block_of(own)))
            await until(lambda: len(here.decider.submitted) == 2)
            here.decider.end(RequestId(1), [block_of(40)])
            await found.hear(RequestEnded)
            found.records.close()
            await until(lambda: not here.edges.far)
            assert not freed, "the edge may not know yet that it is lost"
            assert here.decider.cancelled == [2]
            _, _, edge, _, _ = here.decider.submitted[1]
            edge.on_end(RequestEnded(2, Outcome.SERVED, "1", [block_of(40, 4096)]))
            assert freed == [block_of(40, 4096)], "the edge has never heard of it"
            await until(lambda: len(freed) == 2)
            assert freed[1] == block_of(40)

    play(scene)


# Clocks

DELAYS = st.lists(st.tuples(st.integers(0, 5 * NS_PER_S), st.integers(0, NS_PER_S)), min_size=1, max_size=30)


@given(st.integers(-(10**18), 10**18), DELAYS, st.integers(0, 10 * NS_PER_S))
def test_a_time_of_another_clock_is_never_earlier_than_in_truth_and_late_by_the_quickest_record(
    offset_ns: int, records: list[tuple[int, int]], age_ns: int
) -> None:
    """`records`: the time between two of them, and how long each takes. `offset_ns`: their clock less ours."""
    clock, sent_ns, came_ns, seen = FarClock(), 0, 0, list[tuple[int, int]]()
    for pause_ns, delay_ns in records:
        sent_ns += pause_ns
        came_ns = max(came_ns, sent_ns + delay_ns)  # in their order
        clock.note(sent_ns + offset_ns, came_ns)
        seen.append((came_ns, came_ns - sent_ns))
    began_ns = came_ns - age_ns
    found_ns = clock.here_ns(began_ns + offset_ns, came_ns)
    least_ns = min(gap for at_ns, gap in seen if at_ns >= came_ns - CLOCK_WINDOW_NS)
    assert found_ns == min(began_ns + least_ns, came_ns)
    assert began_ns <= found_ns <= came_ns


def test_a_clock_that_lies_moves_requests_by_no_more_than_an_hour() -> None:
    clock = FarClock()
    clock.note(0, 100)
    assert clock.here_ns(-(1 << 63), 10**15) == 10**15 - TIME_NS_MAX
    assert clock.here_ns(1 << 63, 10**15) == 10**15


def test_a_request_has_the_age_that_it_has_at_its_edge() -> None:
    """Also if it began before the deciding process did, or if the clock of its machine shows another time."""

    async def scene() -> None:
        async with center() as here:
            shift_ns = 10**15
            found, _ = await here.join(sent_ns=time.monotonic_ns() + shift_ns)
            now_ns = time.monotonic_ns()
            here.decider.zero_ns = now_ns - 100 * NS_PER_MS
            for number, age_ms in enumerate((0, 50, 3000), 1):
                found.send(submit(number, began_ns=now_ns + shift_ns - age_ms * NS_PER_MS, elapsed_ns=5))
            await until(lambda: len(here.decider.submitted) == 3)
            options = [options for _, _, _, _, options in here.decider.submitted]
            sent = [each["began_ns"] - each["elapsed_ns"] + 5 for each in options]
            for age_ms, sent_ns in zip((0, 50, 3000), sent, strict=True):
                assert 0 <= sent_ns - (now_ns - age_ms * NS_PER_MS) < NS_PER_S
            assert options[1]["elapsed_ns"] == 5
            assert options[2]["began_ns"] == here.decider.zero_ns, "no request begins before the log does"
            found.send(EdgeClock(now_ns + shift_ns - NS_PER_S), submit(4, began_ns=now_ns + shift_ns))
            await until(lambda: len(here.decider.submitted) == 4)
            assert here.decider.submitted[3][4]["began_ns"] <= time.monotonic_ns(), "a slow record changes nothing"

    play(scene)
