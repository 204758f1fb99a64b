"""An edge on another machine whose connection to the deciding process breaks and is made again: each request is
answered once, and no memory is used again that somebody may still read."""

import asyncio
import heapq
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sloop import __version__
from sloop.errors import InputError, MachineError, SloopError
from sloop.serve.blocks import tensors_in, write_block
from sloop.serve.edge import joining as module
from sloop.serve.edge.http import HttpSettings
from sloop.serve.edge.joining import AWAY, DOUBT_S, FarSink, JoiningEdge, JoinSettings
from sloop.serve.edge.listener import listen
from sloop.serve.edge.process import EdgeSettings
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.sink import Fetched
from sloop.serve.edge.steps import at_once
from sloop.serve.messages import (
    Ask,
    AskMetrics,
    AskModels,
    AskReady,
    Cancel,
    ChangeModel,
    CloseEdge,
    DrainEdge,
    Free,
    FromEdge,
    Holders,
    Page,
    Release,
    RequestEnded,
    Submit,
)
from sloop.serve.network import FETCH_S_MAX, BlockClient, BlockLost, NodeListener
from sloop.serve.protocols import RequestResult, ServerReadiness
from sloop.serve.transport import RecordLink
from sloop.shared_memory import Address, Arena, ArenaReader, Arenas
from sloop.tensor import Port, Signature, Tensor
from sloop.units import NS_PER_S
from sloop.vocabulary import Outcome, RequestId
from tests.serve.edge.test_sink import OFFER, SIGNATURE, bytes_tensor
from tests.serve.test_agents import play
from tests.serve.test_far_edges import SETTINGS, Center, center
from tests.serve.test_network import HOST, TOKEN, certificates, tls_of, until

__all__ = ["certificates"]  # a fixture
pytestmark = pytest.mark.live
SLO_NS = 1 * NS_PER_S
MODEL = msgspec.structs.replace(OFFER, slo_ns=SLO_NS)


class Timers:
    """An event loop that has only timers, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._due: list[tuple[float, int, list[Any]]] = []
        self._numbers = count()

    def time(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * NS_PER_S)

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> Any:  # a handle
        entry = [call, arguments]
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), entry))
        return SimpleNamespace(cancel=entry.clear)

    def go_on(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, entry = heapq.heappop(self._due)
            if entry:
                entry[0](*entry[1])
        self.now_s = until_s


class Deciding:
    """One deciding process: it believes what the sink says, and checks it."""

    def __init__(self, scene: "Scene", holder: int) -> None:
        self._scene, self.holder = scene, holder
        self.came: list[FromEdge] = []
        self.requests: dict[int, Submit] = {}
        self.held: dict[int, tuple[Address, bytes]] = {}
        """Blocks that are not freed, by request, and what is in them."""
        self.given: list[Address] = []
        """Blocks of answers that are not released."""
        self._reader = ArenaReader({holder: os.getpid()})

    def send(self, record: FromEdge) -> None:
        self.came.append(record)
        if isinstance(record, Submit):
            assert record.number not in self.requests
            assert record.number > max(self.requests, default=0) or record.number in self._scene.contents
            self.requests[record.number] = record
            expected = self._scene.contents[record.number]
            if isinstance(record.block, Address):
                assert record.block.holder == self.holder
                assert record.block.offset not in [block.offset for block, _ in self.held.values()]
                self.held[record.number] = record.block, expected
            assert self.content(record) == expected
        elif isinstance(record, Cancel):
            self.requests.pop(record.number, None)  # it may have ended here
        elif isinstance(record, Release):
            self.given.remove(record.block)
            self._scene.worker.free(record.block)

    def content(self, record: Submit) -> bytes:
        block = record.block
        memory = self._reader.read(block) if isinstance(block, Address) else block
        return bytes(tensors_in(memory)[0].data)

    def end(self, number: int, *, is_large: bool) -> None:
        record = self.requests.pop(number)
        answer = write_block([bytes_tensor(self.content(record) if is_large else b"small")], self._scene.worker)
        if isinstance(answer, Address):
            self.given.append(answer)
        self._scene.sink.on_end(RequestEnded(number, Outcome.SERVED, "1", [answer]))

    def end_elsewhere(self, number: int) -> None:
        """The answer is in an agent that does not send it."""
        del self.requests[number]
        fetched = Fetched({Address(9 << 48, 0, 20_000): None})
        fetched.lost = "it has been silent"
        self._scene.sink.on_end(RequestEnded(number, Outcome.SERVED, "1", list(fetched.blocks)), fetched)

    def free(self, number: int) -> None:
        """No batch reads the block of a request that has ended any more."""
        assert number not in self.requests
        self._scene.sink.on_free(Free(self.held.pop(number)[0]))


class Scene:
    """A sink, its arena, one deciding process after another, and the worker that both call by `AGENT`."""

    AGENT = 5

    def __init__(self) -> None:
        self.timers = Timers()
        self._arenas, agents = Arenas(), Arenas(holder=self.AGENT)
        own, worker = self._arenas.make(64 << 20, lambda _: None), agents.make(64 << 20, lambda _: None)
        if own is None or worker is None:
            pytest.skip("this system has no memory to share")
        self.arena, self.worker = Arena(own.number, own.fd), Arena(worker.number, worker.fd)
        self.sink = FarSink(self.arena, b"", None, cast(Any, self.timers))
        self.sink.offer(MODEL)
        self.holders = count(1)
        self.contents: dict[int, bytes] = {}
        self.ends: dict[int, list[RequestResult]] = {}
        self.now: Deciding | None = None

    @property
    def deciding(self) -> Deciding:
        assert self.now is not None
        return self.now

    def join(self) -> Deciding:
        self.now = Deciding(self, next(self.holders) + 10)
        self.sink.join(cast(RecordLink, self.now), self.now.holder)
        self.sink.set_holders(Holders({self.AGENT: os.getpid()}, {}))
        return self.now

    def lose(self) -> None:
        self.now = None
        self.sink.lose()

    def submit(self, content: bytes = b"abc", *, is_stored: bool = False, **others: Any) -> int:
        number = self.sink._last + 1
        tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(content)}
        given = at_once(self.sink.store(tensors, "demo")) if is_stored else tensors
        self.contents[number], self.ends[number] = content, []
        began_ns = self.timers.monotonic_ns()
        self.sink.submit(given, application="demo", began_ns=began_ns, on_end=self.ends[number].append, **others)
        return number

    def cancel(self, number: int) -> None:
        self.sink.cancel(RequestId(number))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    made = Scene()
    monkeypatch.setattr(module, "time", made.timers)
    return made


def test_a_request_is_submitted_again_with_its_age_and_answered_once(scene: Scene) -> None:
    first = scene.join()
    answered, waiting = scene.submit(b"one"), scene.submit(b"x" * 20_000)
    first.end(answered, is_large=True)
    before = first.requests[waiting]
    scene.timers.go_on(0.3)
    scene.lose()
    scene.timers.go_on(0.3)
    late = scene.submit(b"late")
    second = scene.join()
    assert [each.number for each in second.came if isinstance(each, Submit)] == [waiting, late]
    assert second.requests[waiting].began_ns == before.began_ns
    assert cast(Address, second.requests[waiting].block).holder == second.holder != first.holder
    for number in (waiting, late):
        second.end(number, is_large=True)
    assert {number: [each.outcome for each in ends] for number, ends in scene.ends.items()} == {
        number: [Outcome.SERVED] for number in (answered, waiting, late)
    }
    assert bytes(scene.ends[waiting][0].outputs["y"].data) == b"x" * 20_000
    assert not second.given


def test_the_answer_of_an_agent_on_this_machine_is_the_edges_own_copy(scene: Scene) -> None:
    """The agent may use its memory again when the deciding process has gone, and a client be slow to read."""
    deciding = scene.join()
    number = scene.submit(b"x" * 20_000)
    deciding.end(number, is_large=True)
    assert not deciding.given, "released at once"
    _, memory = scene.worker.allocate(20_480)
    memory[:] = bytes(len(memory))
    assert bytes(scene.ends[number][0].outputs["y"].data) == b"x" * 20_000


def test_an_answer_that_cannot_be_read_fails_and_is_released_once(scene: Scene) -> None:
    deciding = scene.join()
    number = scene.submit()
    block, memory = scene.worker.allocate(20_000)
    memory[:] = bytes(20_000)
    deciding.given.append(block)
    del deciding.requests[number]
    scene.sink.on_end(RequestEnded(number, Outcome.SERVED, "1", [block]))
    assert [each.outcome for each in scene.ends[number]] == [Outcome.FAILED]
    assert not deciding.given


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_an_answer_that_cannot_be_fetched_is_waited_for_if_this_machine_is_cut_off(
    scene: Scene, is_cut_off: bool
) -> None:
    """Then the deciding process is away too, some time later."""
    scene.join()
    number, gone = scene.submit(), scene.submit()
    for each in (number, gone):
        scene.deciding.end_elsewhere(each)
    scene.cancel(gone)
    scene.timers.go_on(DOUBT_S / 2)
    assert not scene.ends[number]
    if is_cut_off:
        scene.lose()
        second = scene.join()
        assert list(second.requests) == [number]
        second.end(number, is_large=False)
    scene.timers.go_on(DOUBT_S)
    (end,) = scene.ends[number]
    assert end.outcome is (Outcome.SERVED if is_cut_off else Outcome.FAILED)
    assert not scene.ends[gone]
    assert not scene.sink._doubtful


def test_the_tensors_of_a_request_whose_answer_is_being_fetched_are_kept(scene: Scene) -> None:
    """The deciding process has freed them; if the connection ends now, the request is submitted again."""
    first = scene.join()
    number, other = scene.submit(b"x" * 20_000), scene.submit(b"y" * 20_000)
    for each in (number, other):
        first.end_elsewhere(each)
        first.free(each)
    later = scene.submit(b"z" * 20_000)
    scene.cancel(other)
    scene.lose()
    second = scene.join()
    assert list(second.requests) == [number, later], "their content is checked"
    for each in (number, later):
        second.end(each, is_large=True)
        second.free(each)
    assert bytes(scene.ends[number][0].outputs["y"].data) == b"x" * 20_000
    scene.timers.go_on(FETCH_S_MAX)
    assert scene.arena.held_bytes == 0


def test_what_a_former_connection_may_read_is_not_used_again_at_once(scene: Scene) -> None:
    first = scene.join()
    ended, cancelled, waiting = (scene.submit(bytes([each]) * 20_000) for each in range(3))
    first.end(ended, is_large=False)
    scene.cancel(cancelled)
    former = dict(first.held)
    scene.lose()
    held = scene.arena.held_bytes
    scene.timers.go_on(0.1)
    second = scene.join()
    second.end(waiting, is_large=False)
    second.free(waiting)
    for _ in range(3):
        scene.submit(b"z" * 20_000)
    assert scene.arena.held_bytes == 2 * held
    for block, content in former.values():
        reader = ArenaReader({second.holder: os.getpid()})
        there = Address(scene.arena.number, block.offset, block.size)
        assert bytes(tensors_in(reader.read(there))[0].data) == content
    scene.timers.go_on(FETCH_S_MAX)
    assert scene.arena.held_bytes == held, "of the three new ones"


def test_a_request_whose_deadline_passes_is_answered_without_the_deciding_process(scene: Scene) -> None:
    scene.join()
    old = scene.submit(b"x" * 20_000)
    scene.timers.go_on(0.6)
    scene.lose()
    new, short, spent = scene.submit(), scene.submit(slo_ns=NS_PER_S // 10), scene.submit(elapsed_ns=SLO_NS // 2)
    gone = scene.submit(b"y" * 20_000)
    scene.cancel(gone)
    scene.timers.go_on(0.3)
    assert [len(scene.ends[each]) for each in (old, new, short, spent)] == [0, 0, 1, 0]
    scene.timers.go_on(0.25)
    assert [len(scene.ends[each]) for each in (old, new, short, spent)] == [1, 0, 1, 1]
    second = scene.join()
    assert list(second.requests) == [new]
    scene.timers.go_on(5)
    assert not scene.ends[new], "now the deciding process decides"
    second.end(new, is_large=False)
    (end,) = scene.ends[short]
    assert (end.outcome, end.why, end.retry_after_ns) == (Outcome.REJECTED, AWAY, NS_PER_S)
    (end,) = scene.ends[old]
    assert (end.outcome, end.why) == (Outcome.DROPPED, AWAY), "its model may have run"
    assert not scene.ends[gone]
    scene.timers.go_on(FETCH_S_MAX)
    assert scene.arena.held_bytes == 0
    assert scene.sink.ended_alone == 3


def test_a_request_that_may_have_run_is_not_called_rejected(scene: Scene) -> None:
    """A balancer sends again what was answered with 503; the deciding process before may have run the request."""
    first = scene.join()
    before = scene.submit()
    scene.lose()
    meanwhile = scene.submit()
    second = scene.join()
    for number in (before, meanwhile):
        del second.requests[number]
        scene.sink.on_end(RequestEnded(number, Outcome.REJECTED, "1", [], "the queue is full", NS_PER_S))
    ends = [(each.outcome, each.why) for number in (before, meanwhile) for each in scene.ends[number]]
    assert ends == [(Outcome.DROPPED, "the queue is full"), (Outcome.REJECTED, "the queue is full")]
    assert first.requests.keys() == {before}
    assert not scene.sink._again


def test_a_request_that_a_model_has_refused_is_told_so_after_a_restart_too(scene: Scene) -> None:
    scene.join()
    number = scene.submit()
    scene.lose()
    del scene.join().requests[number]
    scene.sink.on_end(RequestEnded(number, Outcome.REJECTED, "1", [], "no cat", is_refused=True))
    [end] = scene.ends[number]
    assert (end.outcome, end.is_refused) == (Outcome.REJECTED, True)


def test_questions_without_a_deciding_process(scene: Scene) -> None:
    """What a balancer asks is answered at once; pages are refused, and those under way are asked again."""
    first = scene.join()
    pages: dict[str, list[bytes]] = {"metrics": [], "ready": [], "load": []}
    scene.sink.ask(AskMetrics(), pages["metrics"].append)
    scene.sink.ask(AskReady(), pages["ready"].append)
    scene.sink.ask(ChangeModel("demo", is_loaded=True), pages["load"].append)
    scene.sink.on_page(Page(next(each.number for each in first.came if isinstance(each, Ask)), b"all"))
    scene.lose()
    assert pages == {"metrics": [b"all"], "ready": [msgspec.json.encode(ServerReadiness(AWAY))], "load": []}
    states: list[bytes] = []
    scene.sink.ask(AskModels(), states.append)
    scene.sink.ask(AskModels("demo"), states.append)
    assert [json.loads(each)["demo"]["why"] for each in states] == [AWAY, AWAY]
    with pytest.raises(Refusal, match=AWAY) as refused:
        scene.sink.ask(AskMetrics(), pages["metrics"].append)
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
    second = scene.join()
    (question,) = [each for each in second.came if isinstance(each, Ask)]
    assert isinstance(question.question, ChangeModel)
    scene.sink.on_page(Page(question.number, b"loaded"))
    assert pages["load"] == [b"loaded"]
    assert not scene.sink._asking


def test_a_request_to_a_model_that_was_replaced(scene: Scene) -> None:
    """The next server offers another version of it, or one with other inputs."""
    scene.join()
    same = scene.submit()
    scene.lose()
    answers = {"2": MODEL.answers["1"]}
    scene.sink.offer(msgspec.structs.replace(MODEL, versions=("2",), answers=answers))
    second = scene.join()
    block = write_block([bytes_tensor(b"new")], None)
    scene.sink.on_end(RequestEnded(same, Outcome.SERVED, "2", [block]))
    assert bytes(scene.ends[same][0].outputs["y"].data) == b"new"
    del second.requests[same]
    other = scene.submit(b"x" * 20_000)
    scene.lose()
    ports = (Port("x", "FP32", (-1,)), *SIGNATURE.inputs[1:])
    scene.sink.offer(msgspec.structs.replace(MODEL, signature=Signature(ports, SIGNATURE.outputs)))
    third = scene.join()
    assert not third.requests
    (end,) = scene.ends[other]
    assert end.outcome is Outcome.FAILED
    assert "replaced" in end.why


@pytest.mark.parametrize("seed", range(30))
def test_connections_that_break_at_any_time(  # noqa: C901, PLR0912  # one step after the other
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, scene = Random(seed), Scene()
    monkeypatch.setattr(module, "time", scene.timers)
    scene.join()
    cancelled: set[int] = set()
    former: list[tuple[float, int, bytes]] = []
    """Until when the block at an offset may be read for a former connection, and what is in it."""
    for _ in range(300):
        match chance.choice(("submit", "submit", "end", "end", "lost", "free", "cancel", "break", "wait")):
            case "submit":
                size = chance.choice((10, 20_000, 200_000))
                scene.submit(chance.randbytes(size), is_stored=chance.random() < 0.3)
            case "end" if scene.now and scene.now.requests:
                scene.now.end(chance.choice(list(scene.now.requests)), is_large=chance.random() < 0.5)
            case "lost" if scene.now and scene.now.requests:
                scene.now.end_elsewhere(chance.choice(list(scene.now.requests)))
            case "free" if scene.now:
                for number in [each for each in scene.now.held if each not in scene.now.requests]:
                    scene.now.free(number)
            case "cancel":
                waiting = [number for number, ends in scene.ends.items() if not ends and number not in cancelled]
                if waiting:
                    gone = chance.choice(waiting)
                    cancelled.add(gone)
                    scene.cancel(gone)
            case "break" if scene.now is None:
                scene.join()
            case "break" if chance.random() < 0.4:
                until_s = scene.timers.now_s + FETCH_S_MAX
                former += [(until_s, block.offset, content) for block, content in scene.deciding.held.values()]
                scene.lose()
            case "wait":
                scene.timers.go_on(chance.choice((0.01, 0.5, 3)))
        former = [each for each in former if each[0] > scene.timers.now_s]
        reader = ArenaReader({scene.arena.number >> 48: os.getpid()})
        for _, offset, content in former:
            memory = reader.read(Address(scene.arena.number, offset, len(content) + 4096))
            assert bytes(tensors_in(memory)[0].data) == content
    last = scene.now or scene.join()
    for number in list(last.requests):
        last.end(number, is_large=True)
    for number in list(last.held):
        last.free(number)
    scene.timers.go_on(FETCH_S_MAX)
    assert {number for number, ends in scene.ends.items() if len(ends) != 1} == cancelled
    assert not any(scene.ends[number] for number in cancelled)
    for number, ends in scene.ends.items():
        if ends and ends[0].outcome is Outcome.SERVED:
            assert bytes(ends[0].outputs["y"].data) in (b"small", scene.contents[number])
    assert scene.arena.held_bytes == 0
    assert not any((last.given, scene.sink._submitted, scene.sink._lent, scene.sink._former, scene.sink._sent))


# Over loopback, before a driver that remembers requests


class Running:
    """An edge with ports of its own, which joins a deciding process."""

    def __init__(self, port: int, settings: EdgeSettings, **given: Any) -> None:
        self.ports = listen(HOST, 0), listen(HOST, 0)
        self.address = HOST, int(self.ports[0].getsockname()[1])
        self.started, self.stop = asyncio.Event(), asyncio.Event()
        join = JoinSettings((HOST, port), given.pop("token", TOKEN), **given)
        self.edge = JoiningEdge(join, settings, self.ports, self.started.set)
        self.serving = asyncio.create_task(self.edge.serve(self.stop))

    async def ask(self, body: bytes = b"", path: str = "/v2/models/demo/infer", *, key: str = "") -> tuple[int, bytes]:
        """The status and the body of an answer."""
        reader, writer = await asyncio.open_connection(*self.address)
        method, own = ("POST" if body else "GET"), f"x-api-key: {key}\r\n" if key else ""
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{own}content-length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split()[0])
        found = await reader.readexactly(length)
        writer.close()
        return int(head.split()[1]), found


def body_of(text: str) -> bytes:
    given = {"name": "x", "shape": [1, len(text)], "datatype": "UINT8", "data": list(text.encode())}
    return json.dumps({"inputs": [given]}).encode()


@asynccontextmanager
async def joined(here: Center, settings: EdgeSettings = SETTINGS, **given: Any) -> AsyncIterator[Running]:
    """An edge that serves, and is told to stop at the end."""
    assert here.listener is not None
    made = Running(here.listener.port, settings, **given)
    await asyncio.wait((asyncio.create_task(made.started.wait()), made.serving), return_when="FIRST_COMPLETED")
    try:
        yield made
    finally:
        made.stop.set()
        await asyncio.wait((made.serving,))
        for sock in made.ports:
            sock.close()


ANSWER = write_block([Tensor("UINT8", (1, 5), b"hello")], None)
WIDE = Signature((Port("x", "UINT8", (-1, -1)),), (Port("y", "UINT8", (-1, -1)),))
LONG = msgspec.structs.replace(OFFER, slo_ns=60 * NS_PER_S, signature=WIDE)


def test_a_request_outlives_the_connection_and_the_deciding_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, large, is in memory that is freed at the end; its client waits and gets one answer."""
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "FETCH_S_MAX", 0.05)

    async def scene() -> None:
        async with center() as here:
            here.edges.offer(LONG)
            async with joined(here) as edge:
                asked = asyncio.create_task(edge.ask(body_of("x" * 20_000)))
                await until(lambda: len(here.decider.submitted) == 1 or asked.done())
                assert not asked.done(), asked.result()
                here.edges.far[0].records.close()
                here.edges.lose(here.edges.far[0], "a test broke it")
                await until(lambda: len(here.decider.submitted) == 2)
                assert here.decider.cancelled == [1]
                # Now it ends with all that it knows, and another one takes its place.
                port = here.listener.port if here.listener is not None else 0
                assert here.listener is not None
                await here.listener.close()
                here.edges.far[0].records.close()
                here.edges.lose(here.edges.far[0], "a test broke it")
                await until(lambda: edge.edge._sink.is_away)
                assert (await edge.ask(path="/v2/health/live"))[0] == 200
                assert (await edge.ask(path="/v2/health/ready"))[0] == 503
                status, text = await edge.ask(path="/metrics")
                assert (status, AWAY.encode() in text) == (503, True)
                new = asyncio.create_task(edge.ask(body_of("new")))
                other = Center(SETTINGS)
                other.edges.offer(LONG)
                other.listener = await NodeListener.listen((HOST, port), TOKEN, other.edges.accept)
                await until(lambda: len(other.decider.submitted) == 2)
                ages = [options["began_ns"] - options["elapsed_ns"] for *_, options in other.decider.submitted]
                assert ages[0] < ages[1] < time.monotonic_ns()
                for number in (1, 2):
                    assert isinstance(ANSWER, bytes)
                    other.decider.end(RequestId(number), [ANSWER])
                for status, text in (await asked, await new):
                    assert status == 200
                    assert bytes(json.loads(text)["outputs"][0]["data"]) == b"hello"
                arena = edge.edge._arena
                assert arena is not None
                await until(lambda: arena.held_bytes == 0)
            await until(lambda: not other.edges.far)
            assert other.edges.deaths == 0, "it has told that it ends"
            await other.listener.close()

    play(scene)


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "TLS"])
def test_agents_fetch_the_tensors_of_a_request_from_its_edge(certificates: Path, is_secure: bool) -> None:
    server, own, agent = [tls_of(certificates, name) if is_secure else None for name in ("node", "other", "node")]

    async def scene() -> None:
        async with center(tls=server) as here:
            here.edges.offer(LONG)
            async with joined(here, tls=own) as edge:
                asked = asyncio.create_task(edge.ask(body_of("x" * 20_000)))
                await until(lambda: len(here.decider.submitted) == 1)
                block = here.decider.submitted[0][1]
                assert isinstance(block, Address)
                client = BlockClient(TOKEN, agent.client_context() if agent is not None else None)
                client.set_endpoints(here.table.endpoints())
                memory = memoryview(bytearray(block.size))
                await client.fetch(block, memory)
                assert bytes(tensors_in(memory)[0].data) == b"x" * 20_000
                former = Address((block.holder + 1) << 48 | block.arena & (1 << 48) - 1, block.offset, block.size)
                client.set_endpoints({former.holder: here.table.endpoints()[block.holder]})
                with pytest.raises(BlockLost, match="not on this machine"):
                    await client.fetch(former, memory)
                client.close()
                assert isinstance(ANSWER, bytes)
                here.decider.end(RequestId(1), [ANSWER])
                assert (await asked)[0] == 200

    play(scene)


def test_an_edge_that_is_told_to_stop_finishes_what_it_has() -> None:
    async def scene() -> None:
        async with center() as here:
            here.edges.offer(LONG)
            async with joined(here) as edge:
                asked = asyncio.create_task(edge.ask(body_of("x")))
                await until(lambda: len(here.decider.submitted) == 1)
                edge.stop.set()
                await asyncio.sleep(0.05)
                with pytest.raises(OSError, match="refused"):
                    await edge.ask(path="/v2/health/live")
                assert isinstance(ANSWER, bytes)
                here.decider.end(RequestId(1), [ANSWER])
                assert (await asked)[0] == 200
                await edge.serving
            await until(lambda: not here.edges.far)
            assert here.edges.deaths == 0

    play(scene)


def test_an_edge_that_is_to_stop_soon_serves_on_as_not_ready() -> None:
    async def scene() -> None:
        async with center() as here:
            here.edges.offer(LONG)
            async with joined(here) as edge:
                edge.edge.withdraw()
                for path in ("/v2/health/ready", "/v2/models/demo/ready"):
                    status, text = await edge.ask(path=path)
                    assert (status, b"this edge stops" in text) == (503, True)
                assert (await edge.ask(path="/v2/health/live"))[0] == 200
                asked = asyncio.create_task(edge.ask(body_of("x")))
                await until(lambda: len(here.decider.submitted) == 1)
                assert isinstance(ANSWER, bytes)
                here.decider.end(RequestId(1), [ANSWER])
                assert (await asked)[0] == 200

    play(scene)


def test_an_edge_that_does_not_finish_in_time_refuses_what_is_left() -> None:
    async def scene() -> None:
        async with center() as here:
            here.edges.offer(LONG)
            async with joined(here, drain_s=0.1) as edge:
                asked = asyncio.create_task(edge.ask(body_of("x")))
                await until(lambda: len(here.decider.submitted) == 1)
                edge.stop.set()
                await edge.serving
                status, text = await asked
                assert (status, b"this edge stops" in text) == (504, True)

    play(scene)


def test_an_edge_ends_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with center() as here:
            async with joined(here) as edge:
                here.edges.drain()
                here.edges._tell(CloseEdge())
                await asyncio.wait_for(edge.serving, 5)
            await until(lambda: not here.edges.far)
            assert here.edges.deaths == 0

    play(scene)


def test_an_edge_whose_server_never_comes_back_answers_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.2)

    async def scene() -> None:
        async with center() as here:
            here.edges.offer(LONG)
            async with joined(here) as edge:
                asked = asyncio.create_task(edge.ask(body_of("x")))
                await until(lambda: len(here.decider.submitted) == 1)
                assert here.listener is not None
                await here.listener.close()
                here.edges.far[0].records.close()
                here.edges.lose(here.edges.far[0], "a test broke it")
                status, text = await asked
                assert (status, AWAY.encode() in text) == (504, True)
                with pytest.raises(MachineError, match="cannot be reached"):
                    await edge.serving

    play(scene)


@pytest.mark.parametrize(
    ("own", "given", "error", "told"),
    [
        ({"api_key": "secret"}, {}, InputError, "this edge demands a key of clients, the server's own edges do not"),
        ({}, {"token": b"another token, another token"}, MachineError, "does not know the token"),
        ({}, {"version": "0.0.0"}, MachineError, "sends this edge away: it runs sloop 0.0.0"),
    ],
)
def test_an_edge_that_does_not_belong_here_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
    own: dict[str, Any],
    given: dict[str, Any],
    error: type[SloopError],
    told: str,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(module, "__version__", given.pop("version", __version__))

    async def scene() -> None:
        async with center() as here, joined(here, msgspec.structs.replace(SETTINGS, **own), **given) as edge:
            assert not edge.started.is_set()
            with pytest.raises(error, match=told):
                await edge.serving

    play(scene)


def test_keys_are_files_of_the_edges_own_machine(tmp_path: Path) -> None:
    """If the server demands keys, each edge must; which, is its own matter."""
    (tmp_path / "keys").write_text("robot secret\n")
    (tmp_path / "keys").chmod(0o600)
    server = msgspec.structs.replace(SETTINGS, api_key="the server's")

    async def scene() -> None:
        async with center(server) as here:
            here.edges.offer(LONG)
            async with joined(here) as edge:
                with pytest.raises(InputError, match="the server demands a key of clients"):
                    await edge.serving
            own = EdgeSettings(HttpSettings(), 1, 1, 1, 1, api_key_file=tmp_path / "keys")
            async with joined(here, own) as edge:
                assert (await edge.ask(body_of("x"), key="the server's"))[0] == 401
                asked = asyncio.create_task(edge.ask(body_of("x"), key="secret"))
                await until(lambda: len(here.decider.submitted) == 1)
                assert isinstance(ANSWER, bytes)
                here.decider.end(RequestId(1), [ANSWER])
                assert (await asked)[0] == 200
                (tmp_path / "keys").write_text("robot other\n")
                edge.edge.reload()
                assert (await edge.ask(body_of("x"), key="secret"))[0] == 401

    play(scene)


def test_an_edge_takes_the_bounds_of_its_next_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.02)

    async def scene() -> None:
        async with center() as here, joined(here) as edge:
            server = edge.edge._server
            assert server is not None
            assert (server.web.requests_max, server.service.bodies.all_bytes_max) == (4, 1 << 22)
            here.edges._settings = msgspec.structs.replace(SETTINGS, requests_max=7, bodies_bytes_max=1 << 21)
            here.edges.far[0].records.close()
            here.edges.lose(here.edges.far[0], "a test broke it")
            await until(lambda: server.web.requests_max == 7)
            assert (server.rpc.server.calls_max, server.service.bodies.all_bytes_max) == (7, 1 << 21)

    play(scene)


def test_a_server_that_began_to_stop_does_not_keep_the_edge_from_serving_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.02)

    async def scene() -> None:
        async with center() as here, joined(here) as edge:
            here.edges._tell(DrainEdge())
            server = edge.edge._server
            assert server is not None
            await until(lambda: server.web.is_draining)
            here.edges.far[0].records.close()
            here.edges.lose(here.edges.far[0], "a test broke it")
            await until(lambda: not server.web.is_draining)

    play(scene)
