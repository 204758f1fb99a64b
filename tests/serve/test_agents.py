"""The deciding process and the agents of nodes: what a broken or lying agent can do, which is to lose its own node."""

import asyncio
import gc
import io
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import uvloop

from sloop import __version__
from sloop.actions import AcquireNode, AdoptWorker, ReleaseNode, ResizeWorker, StartWorker, StopWorker
from sloop.events import (
    BatchFailed,
    Finished,
    NodeLost,
    NodeReady,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.serve import network
from sloop.serve.blocks import Block, tensors_in, write_block
from sloop.serve.cluster import agent as module
from sloop.serve.cluster import agents
from sloop.serve.cluster.agent import (
    Agent,
    AgentHello,
    AgentSetup,
    FromAgent,
    LearnStages,
    NodeOrder,
    ToAgent,
    WorkersKept,
)
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.cluster.ray import RayNodes, Want
from sloop.serve.messages import BatchFinished, BatchRaised, Close, Free, Holders, Reached, Report, Run, RunBatch
from sloop.serve.network import (
    BlockClient,
    Endpoint,
    HolderTable,
    NetworkLink,
    NodeListener,
    NodeTls,
    Purpose,
    connect,
)
from sloop.serve.node import spares as spare_workers
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable, SpareProcesses
from sloop.serve.transport import FrameKind, ProtocolError, RecordLink, pack_head
from sloop.serve.weights.cache import usual_cache
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import Tensor
from sloop.user_code import ModelFailure
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, Slot, TransferId
from tests.joining import JoiningNodes, Memory
from tests.serve.rig import until, wirings_of
from tests.serve.test_local_backend import BYTES, Ear
from tests.serve.test_network import HOST, TOKEN, certificates, is_closed, proved, tls_of

__all__ = ["certificates"]  # a fixture
pytestmark = pytest.mark.live
A, B = ReplicaId(1), ReplicaId(2)
BATCH = BatchId(5)
NODES = [Node(name, "local", 2, 1 << 30, on_demand=True) for name in ("one", "two")]
SERVABLES = {("stage", "echo"): Servable("fake:sleep:0:0", BYTES)}


def spec(node: str, cores: float = 1) -> ReplicaSpec:
    return ReplicaSpec("stage", "echo", Slot(cores), node)


class FakeAgent:
    """The other end of an agent's connection, which says what a test wants."""

    def __init__(self, link: NetworkLink) -> None:
        self.came: list[Any] = []
        self.peers: list[list[Endpoint]] = []
        """Of each order to start a worker."""
        self.ends: list[str] = []
        self.link = link
        acts = dict.fromkeys(get_args(ToAgent), self._on_record)
        self.records = RecordLink(asyncio.get_running_loop(), link, ToAgent, acts, self.ends.append)
        link.keep_alive()

    def _on_record(self, record: ToAgent) -> None:
        self.came.append(record.order if isinstance(record, NodeOrder) else record)
        if isinstance(record, NodeOrder) and isinstance(record.order, StartWorker):
            self.peers.append(next(iter(record.peers.values()), []))

    @property
    def holder(self) -> int:
        return next(each.holder for each in self.came if isinstance(each, AgentSetup))

    def send(self, *records: FromAgent) -> None:
        for record in records:
            self.records.send(record)

    async def hear(self, kind: type, count: int = 1) -> Any:  # a record of that kind
        """The `count`th record of a kind."""
        await until(lambda: len([each for each in self.came if isinstance(each, kind)]) >= count)
        return [each for each in self.came if isinstance(each, kind)][count - 1]


class BlockEar(Ear):
    """Hears of blocks without reading them."""

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: Mapping[int, str]) -> None:
        self.blocks = [each for each in blocks if each is not None]
        self.on_event(event)


class Fleet:
    """A backend, what it reports, and fake agents."""

    def __init__(self, backend: AgentBackend, arenas: Arenas, holders: HolderTable) -> None:
        self.backend, self.arenas, self.holders = backend, arenas, holders
        self.ear = BlockEar()
        backend.attach(self.ear)
        self.agents: list[FakeAgent] = []

    async def connect(self) -> FakeAgent:
        made = FakeAgent(await connect((HOST, self.backend.port), TOKEN, Purpose.AGENT))
        self.agents.append(made)
        return made

    async def join(self, name: str = "one", **others: Any) -> FakeAgent:  # fields of the greeting
        made = await self.connect()
        made.send(hello(name, **others))
        return made

    async def busy(self, name: str = "one", replica: ReplicaId = A, batch: BatchId = BATCH) -> FakeAgent:
        """An agent with a replica that runs a batch of two visits."""
        made = await self.join(name)
        await made.hear(AgentSetup)
        self.backend.order(StartWorker(replica, spec(name)))
        await made.hear(StartWorker)
        made.send(Report(WorkerReady(replica)))
        self.backend.run(batch, replica, Run(2, [b"x", b"y"]))
        await made.hear(RunBatch)
        return made

    def lost(self) -> list[tuple[str, str]]:
        return [(each.node, each.error) for each in self.ear.events if isinstance(each, NodeLost)]


def hello(name: str = "one", **others: Any) -> AgentHello:  # fields of the greeting
    own = AgentHello(name, __version__, os.getpid(), "another machine", (HOST, 1), 8.0)
    return msgspec.structs.replace(own, **others)


def finished(
    blocks: Sequence[Block | None] = (b"x", b"y"), faults: Mapping[int, str] | None = None, **others: Any
) -> BatchFinished:  # fields of the event
    event = msgspec.structs.replace(Finished(BATCH, A, 1000), **others)
    return BatchFinished(event, list(blocks), dict(faults or {}))


@asynccontextmanager
async def fleet(tls: NodeTls | None = None) -> AsyncIterator[Fleet]:
    arenas, holders, memory = Arenas(), HolderTable(), Memory()
    memory.first_worker = 100
    backend = AgentBackend(
        *(SERVABLES, wirings_of(SERVABLES), JoiningNodes()),
        arenas=arenas,
        nodes=NODES,
        pid=os.getpid(),
        memory=memory,
        tls=tls,
        holders=holders,
    )
    made = Fleet(backend, arenas, holders)
    await backend.open()
    try:
        yield made
    finally:
        for each in made.agents:
            each.records.close()
        await backend.close()
        arenas.close()
        await asyncio.sleep(0.01)


async def test_agents_that_are_told_to_fetch_a_model_form_a_chain() -> None:
    async with fleet() as here:
        source = "http://store/model.onnx"
        fetched, local = (Servable("model.onnx", BYTES, source=each) for each in (source, ""))
        both = {("stage", "echo"): fetched, ("stage", "local"): local}
        here.backend.learn(both, {}, threads_prepared=0)
        first = await here.join("one", endpoint=(HOST, 11))
        second = await here.join("two", endpoint=(HOST, 22))
        for agent in (first, second):
            await agent.hear(AgentSetup)

        async def peers(agent: FakeAgent, number: int, of: ReplicaSpec, count: int) -> list[Endpoint]:
            here.backend.order(StartWorker(ReplicaId(number), of))
            await agent.hear(StartWorker, count)
            return agent.peers[count - 1]

        assert await peers(first, 1, spec("one"), 1) == []
        assert await peers(second, 2, spec("two"), 1) == [(HOST, 11)]
        assert await peers(first, 3, spec("one"), 2) == [], "none that waits for this one"
        assert await peers(second, 4, msgspec.structs.replace(spec("two"), variant="local"), 2) == []
        first.link.close()
        await until(lambda: bool(here.lost()))
        assert await peers(second, 5, spec("two"), 3) == []


# Who joins


async def test_an_agent_introduces_itself_once() -> None:
    async with fleet() as here:
        first = await here.join()
        await first.hear(AgentSetup)
        first.send(hello())
        await until(lambda: bool(first.ends))
        assert here.lost() == [("one", "AgentHello is not expected now")]
        early = await here.connect()
        early.send(finished())
        await until(lambda: bool(early.ends))
        again = await here.join()
        await again.hear(AgentSetup)
        assert len(here.lost()) == 1


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"version": "0.0.0"}, "it runs sloop 0.0.0"),
        ({"name": "three"}, "no node of the cluster has this name; there are one, two"),
        ({"cores": 1.0}, "the node has 2 cores by the cluster's description, the machine 1"),
        ({"cores": math.nan}, "the machine nan"),
        ({"endpoint": (HOST, 1 << 16)}, "which is no address"),
        ({"endpoint": ("", 80)}, "which is no address"),
        ({"name": "n" * 100_000, "version": "v" * 100_000}, "it runs sloop vvv"),
    ],
)
async def test_an_agent_that_cannot_serve_is_sent_away(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(agents, "LEAVE_S_MAX", 0.05)
    async with fleet() as here:
        found = await here.join(**others)
        close = await found.hear(Close)
        assert told in close.why
        assert len(close.why) < 1000
        found.send(Report(WorkerReady(A)))  # it does not go
        await until(lambda: bool(found.ends))
        assert not here.ear.events


async def test_an_agent_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "HELLO_S_MAX", 0.05)
    async with fleet() as here:
        silent, other = await here.connect(), await here.join()
        await until(lambda: bool(silent.ends))
        await asyncio.sleep(0.1)
        assert not other.ends


async def test_two_agents_of_one_name() -> None:
    """The same process that connects again has the place; another one is sent away, so that two do not take it from
    each other for ever."""
    async with fleet() as here:
        first = await here.busy()
        second = await here.join(pid=1)
        assert "another agent has this name" in (await second.hear(Close)).why
        third = await here.join(machine="a third machine")
        assert "another agent has this name" in (await third.hear(Close)).why
        assert not first.ends
        first.send(finished())
        await here.ear.hear(Finished)
        again = await here.join()
        await again.hear(AgentSetup)
        await until(lambda: bool(first.ends))
        assert here.lost() == [("one", "its agent has connected again")]
        await here.ear.hear(WorkerLost)
        assert again.holder != first.holder
        await here.ear.hear(NodeReady, count=2)


async def test_a_node_whose_agent_was_there_before_it_was_wanted_is_ready_at_once() -> None:
    async with fleet() as here:
        await (await here.join()).hear(AgentSetup)
        here.backend.order(AcquireNode("one"))
        await here.ear.hear(NodeReady, count=2)


# What an agent may not report


def block(holder: int, offset: int = 0, size: int = 100) -> Address:
    return Address((holder << 48) + 7, offset, size)


LIES: dict[str, Callable[[int, int], Sequence[FromAgent]]] = {
    "another batch": lambda own, _: [finished(batch=BatchId(6))],
    "a replica of another node": lambda own, _: [finished(replica=B, batch=BatchId(6))],
    "an unknown replica": lambda own, _: [finished(replica=ReplicaId(77))],
    "finished twice": lambda own, _: [finished(), finished()],
    "finished and raised": lambda own, _: [finished(), BatchRaised(BATCH, A, b"")],
    "too few blocks": lambda own, _: [finished([b"x"])],
    "too many blocks": lambda own, _: [finished([b"x", b"y", b"z"])],
    "a missing block": lambda own, _: [finished([b"x", None])],
    "a fault with a block": lambda own, _: [finished(faults={1: "it does not fit"})],
    "a fault of nobody": lambda own, _: [finished(faults={7: "it does not fit"})],
    "negative time": lambda own, _: [finished(service_ns=-1)],
    "counts for no edge": lambda own, _: [finished(edge_counts=((1,), (1,)))],
    "negative passes": lambda own, _: [finished(passes=-1)],
    "sizes for no edge": lambda own, _: [finished(sizes=(((1, 8),), ((1, 8),)))],
    "too few sizes": lambda own, _: [finished(sizes=((),))],
    "too few counts": lambda own, _: [finished(edge_counts=((),))],
    "a block of another agent": lambda own, other: [finished([block(other), b"y"])],
    "a block of the server": lambda own, _: [finished([block(0), b"y"])],
    "a block twice": lambda own, _: [finished([block(own), block(own)])],
    "a block at another size": lambda own, _: [finished([block(own), block(own, 0, 50)])],
    "a block before the arena": lambda own, _: [finished([block(own, -4096), b"y"])],
    "a block behind the arena": lambda own, _: [finished([block(own, 1 << 40), b"y"])],
    "a block of no size": lambda own, _: [finished([block(own, 0, 0), b"y"])],
    "a huge block": lambda own, _: [finished([block(own, 0, 1 << 60), b"y"])],
    "raised by a batch that does not run": lambda own, _: [BatchRaised(BatchId(6), A, b"")],
    "ready elsewhere": lambda own, _: [Report(WorkerReady(B))],
    "lost elsewhere": lambda own, _: [Report(WorkerLost(B, "it says"))],
    "an unknown step": lambda own, _: [Report(WorkerProgressed(A, "x" * 1000))],
    "no cores": lambda own, _: [Report(WorkerResized(A, 0))],
    "no number of cores": lambda own, _: [Report(WorkerResized(A, math.nan))],
    "cores of others": lambda own, _: [Report(WorkerResized(A, 1000))],
    "introduced again": lambda own, _: [hello()],
    "fewer spare workers than none": lambda own, _: [SpareProcesses(-1)],
    "weights that nobody has ordered": lambda own, _: [Report(Transferred(TransferId(0), "one"))],
    "a step that is not reported so": lambda own, _: [Reached("ready", worker=A)],
    "no part is drained": lambda own, _: [Reached("drained", worker=A)],
    "weights that came to another node": lambda own, _: [Report(Transferred(TransferId(0), "two"))],
    "completed though no part": lambda own, _: [Report(WorkerCompleted(A))],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_costs_an_agent_its_node_and_nobody_else(lie: Callable[[int, int], Sequence[FromAgent]]) -> None:
    async with fleet() as here:
        liar, other = await here.busy(), await here.busy("two", B, BatchId(6))
        liar.send(*lie(liar.holder, other.holder))
        await until(lambda: bool(liar.ends))
        (lost,) = here.lost()
        assert lost[0] == "one"
        assert [each.worker for each in here.ear.events if isinstance(each, WorkerLost)] == [A]
        other.send(finished([block(other.holder), b"y"], replica=B, batch=BatchId(6)))
        await until(lambda: any(isinstance(each, Finished) and each.replica == B for each in here.ear.events))
        assert not other.ends


async def test_each_lie_has_a_message_of_its_own() -> None:
    for lie, says in (("no part is drained", "and is no part"), ("a step that is not reported so", "to be ready")):
        async with fleet() as here:
            liar = await here.busy()
            liar.send(*LIES[lie](0, 0))
            await until(partial(bool, liar.ends))
            ((node, why),) = here.lost()
            assert node == "one"
            assert f"replica {A} is said" in why
            assert says in why
            assert "report this" in why


async def test_reports_that_cross_an_order_are_no_lies() -> None:
    async with fleet() as here:
        found = await here.busy()
        found.send(Report(WorkerLost(A, "e" * 1_000_000)))
        lost = await here.ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert len(lost.error) <= agents.TEXT_CHARS_MAX
        found.send(Report(WorkerStopped(A)), Report(WorkerReady(A)), Report(WorkerReady(B)))
        here.backend.order(StartWorker(B, spec("one")))
        await found.hear(StartWorker, 2)
        found.send(Report(WorkerReady(B)))
        await here.ear.hear(WorkerReady, count=2)
        assert not found.ends


async def test_blocks_may_be_used_again_when_they_were_freed() -> None:
    async with fleet() as here:
        found = await here.busy()
        own = block(found.holder)
        for time in (1, 2):
            found.send(finished([own, b"y"]))
            await here.ear.hear(Finished, count=time)
            here.arenas.free(own)
            assert await found.hear(Free, time) == Free(own)
            here.backend.run(BATCH, A, Run(2, [b"x", b"y"]))
        found.records.close()
        await until(lambda: bool(here.lost()))
        here.arenas.free(own)  # it has gone with its node


async def test_a_node_whose_clock_is_wrong() -> None:
    """No report says when something was; how long a batch took cannot be longer than since it was ordered."""
    async with fleet() as here:
        found = await here.busy()
        found.send(finished(service_ns=1 << 62))
        event = await here.ear.hear(Finished)
        assert isinstance(event, Finished)
        assert 0 < event.service_ns < 30 * 10**9


async def test_frames_and_records_of_chance_end_their_link_only() -> None:
    chance = random.Random(7)
    good = msgspec.msgpack.encode([finished(), Report(WorkerReady(A)), hello()])
    payloads = [chance.randbytes(chance.randrange(200)) for _ in range(40)]
    for _ in range(80):
        changed = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        payloads.append(bytes(changed))
    payloads += [
        b"\x91" * 100_000,
        b"\x91\x9a\x01" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x91\x97\x01\xa2\xff\xfe",
        msgspec.msgpack.encode([{"a": 1}]),
    ]
    async with fleet() as here:
        witness = await here.busy("two", B, BatchId(6))
        for payload in payloads:
            found = await here.join()
            await until(lambda: bool(found.came))  # noqa: B023  # awaited here
            found.link.send(FrameKind.RECORDS, payload=[payload])
            found.link.send(FrameKind.BYTES)  # if that was no mistake, this is one
            await until(lambda: bool(found.ends))  # noqa: B023  # likewise
        streams = await asyncio.open_connection(HOST, here.backend.port)
        await proved(streams, more=pack_head(FrameKind.RECORDS, 0, 0, network.RECORDS_BYTES_MAX + 1))
        assert await is_closed(streams)
        assert not witness.ends
        witness.send(finished(replica=B, batch=BatchId(6)))
        await until(lambda: any(isinstance(each, Finished) and each.replica == B for each in here.ear.events))
        assert {node for node, _ in here.lost()} == {"one"}


async def test_an_agent_that_reads_nothing_loses_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "UNSENT_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(network, "SILENT_S", 100.0)
    async with fleet() as here:
        streams = await asyncio.open_connection(HOST, here.backend.port, limit=1024)
        payload = msgspec.msgpack.encode([hello()])
        await proved(streams, more=pack_head(FrameKind.RECORDS, 0, 0, len(payload)) + payload)
        await here.ear.hear(NodeReady)
        here.backend.order(StartWorker(A, spec("one")))
        for number in range(200):
            here.backend.run(BatchId(number), A, Run(1, [bytes(1 << 20)]))
            await asyncio.sleep(0)
            if here.lost():
                break
        ((node, why),) = here.lost()
        assert (node, "does not read" in why) == ("one", True)
        streams[1].close()


# A real agent


def memory_files() -> int:
    """The arenas that this process has open."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("/memfd:sloop")
        except OSError:
            continue
    return count


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
def test_blocks_travel_to_an_agent_and_back(
    monkeypatch: pytest.MonkeyPatch, certificates: Path, is_secure: bool
) -> None:
    monkeypatch.setattr(module.AgentHost, "machine", staticmethod(lambda: "another machine"))
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    tls, other = (tls_of(certificates), tls_of(certificates, "other")) if is_secure else (None, None)
    size = 3 << 20

    async def scene() -> None:
        async with fleet(tls) as here:
            held = here.arenas.make(16 << 20, lambda _: None)
            arena = Arena(held.number, held.fd)
            serving = asyncio.create_task(Agent((HOST, here.backend.port), "one", TOKEN, tls=other).serve())
            for time in (1, 2):
                await here.ear.hear(NodeReady, count=time)
                here.backend.order(StartWorker(ReplicaId(time), spec("one")))
                await here.ear.hear(WorkerReady, count=time)
                content = os.urandom(size)
                given = write_block([Tensor("UINT8", (1, size), content)], arena)
                assert isinstance(given, Address)
                here.arenas.hold(given)
                here.backend.run(BatchId(time), ReplicaId(time), Run(1, [given]))
                await here.ear.hear(Finished, count=time)
                (result,) = here.ear.blocks
                assert isinstance(result, Address)
                client = BlockClient(TOKEN, tls.client_context() if tls is not None else None)
                client.set_endpoints(here.holders.endpoints())
                memory = memoryview(bytearray(result.size))
                await client.fetch(result, memory)
                assert bytes(tensors_in(memory)[0].data) == content
                client.close()
                here.backend.run(BatchId(10), ReplicaId(time), Run(1, [Address(9 << 48, 0, 100)]))
                failed = await here.ear.hear(BatchFailed, Finished, count=2 * time)
                assert isinstance(failed, BatchFailed)
                assert "could not be brought" in failed.error
                # The connection breaks: the agent stops its worker, frees its memory and comes back.
                here.backend._agents["one"].records.close()
                here.backend._on_end(here.backend._agents["one"], "a test broke it")
                await here.ear.hear(WorkerLost, count=time)
            await here.ear.hear(NodeReady, count=3)
            here.backend.order(ReleaseNode("one"))
            await asyncio.wait_for(serving, 10)

    gc.collect()
    before = memory_files()
    uvloop.run(scene())
    gc.collect()  # maps have a descriptor too
    assert memory_files() == before, "an agent keeps nothing of a connection that has ended"


async def test_a_failure_of_a_model_is_passed_on() -> None:
    async with fleet() as here:
        found = await here.busy()
        found.send(BatchRaised(BATCH, A, ModelFailure("the model raised KeyError", "KeyError: 7", "trace").encode()))
        failed = await here.ear.hear(BatchFailed)
        assert failed == BatchFailed(BATCH, A, "the model raised KeyError", "KeyError: 7")


async def test_an_agent_whose_connections_end_at_once_waits_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says may be what ends them."""
    monkeypatch.setattr(module, "RETRY_S", 0.5)
    came_s: list[float] = []

    def refuse(link: NetworkLink) -> None:
        came_s.append(time.monotonic())
        link.attach(lambda _: link.close(), lambda _: None)  # when it has introduced itself

    listener = await NodeListener.listen((HOST, 0), TOKEN, refuse)
    serving = asyncio.create_task(Agent((HOST, listener.port), "one", TOKEN).serve())
    await until(lambda: len(came_s) == 2)
    serving.cancel()
    await asyncio.wait((serving,))
    await listener.close()
    assert came_s[1] - came_s[0] > 0.49


async def test_an_agent_says_which_workers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to the deciding process that it meets later."""
    monkeypatch.setattr(spare_workers, "SPARES_AFTER_S", 0.05)
    monkeypatch.setattr(spare_workers, "HUMBLE_S_MAX", 1.0)
    async with fleet() as here:

        def waiting() -> int:
            return sum(spares.count for spares in here.backend.spare_processes().values())

        agent = Agent((HOST, here.backend.port), "one", TOKEN, spares_max=1)
        serving = asyncio.create_task(agent.serve())
        try:
            await until(lambda: waiting() == 1)
            assert here.backend.spare_processes()["one"].memory_bytes > 0
            first = here.backend._agents["one"]
            first.records.close()
            await until(lambda: here.backend._agents.get("one", first) is not first)
            await until(lambda: waiting() == 1)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def test_an_agent_fetches_nothing_for_a_replica_that_has_ended() -> None:
    sent: list[FromAgent] = []
    session = module.AgentSession(AgentSetup(4), sent.append, BlockClient(TOKEN), (HOST, 1), usual_cache)
    session.acts[Holders](Holders({}, {9: (HOST, 1)}))
    session.acts[NodeOrder](NodeOrder(StopWorker(A, "")))
    session.acts[RunBatch](RunBatch(BATCH, A, Run(1, [Address(9 << 48, 0, 100)])))
    await asyncio.sleep(0.05)
    assert sent == [Report(WorkerStopped(A))], "no batch of it can be lost any more"
    await session.close()


async def test_a_worker_that_ends_while_it_is_offered_is_lost_when_it_is_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LiveNode, "_launch", lambda self, worker: self._report(WorkerReady(worker.number)))
    sent: list[FromAgent] = []
    blocks = BlockClient(TOKEN)
    session = module.AgentSession(AgentSetup(4), sent.append, blocks, (HOST, 1), usual_cache)
    teach = LearnStages([("stage", "echo", SERVABLES["stage", "echo"])], wirings_of(SERVABLES), 0)
    session.acts[LearnStages](teach)
    session.acts[NodeOrder](NodeOrder(StartWorker(A, spec("one"))))
    session.detach()
    session.resume(AgentSetup(5, "another", (A,)), sent.append, blocks)
    (kept,) = [each.kept for each in sent if isinstance(each, WorkersKept)]
    assert [each.worker for each in kept] == [A]
    session.node._give_up(session.node.workers[A], "it died")
    with pytest.raises(ProtocolError, match="is to be started, but exists already"):
        session.acts[NodeOrder](NodeOrder(StartWorker(A, spec("one"))))
    session.acts[NodeOrder](NodeOrder(AdoptWorker(A, spec("one"), is_ready=True)))
    assert sent[-1] == Report(WorkerLost(A, "it died"))
    session.acts[NodeOrder](NodeOrder(ResizeWorker(A, 2)))
    assert not session.node.workers
    await session.close()


@pytest.mark.parametrize("files", [[], ["/n/cert.pem", "/n/key.pem", "/n/ca.pem"]])
def test_an_agent_that_ray_starts_gets_its_files_and_any_token(
    monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    made: list[Any] = []

    class Made:
        def __init__(self, *arguments: object, **others: object) -> None:
            made.append((arguments, others))

        async def serve(self) -> None: ...

    token = bytes(range(200, 232))
    for name in ("begin", "log_directly", "return_large_memory"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "Agent", Made)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(token)))
    module.main(["7", "10.0.0.1", "9000", "one", "10.0.0.2", *files])
    ((arguments, others),) = made
    assert arguments == (("10.0.0.1", 9000), "one", token)
    assert (others["host"], others["tls"]) == ("10.0.0.2", NodeTls(*map(Path, files)) if files else None)


async def test_ray_passes_files_and_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = RayNodes("", NodeTls(Path("/n/cert.pem"), Path("/n/key.pem"), Path("/n/ca.pem")))
    sent: list[object] = []
    monkeypatch.setattr(nodes, "_send", sent.append)
    nodes.want(NODES[:1], (HOST, 9), b"\xff" * 32)
    assert sent == [Want(NODES[:1], (HOST, 9), b"\xff" * 32, ["/n/cert.pem", "/n/key.pem", "/n/ca.pem"])]
