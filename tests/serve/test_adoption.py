"""A deciding process dies, and another one takes its place: agents keep their workers, and what is kept is checked."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sloop.actions import AdoptWorker, ReleaseNode, ResizeWorker, StartWorker, StopWorker
from sloop.errors import MachineError
from sloop.events import (
    Finished,
    KeptWorker,
    NodeReady,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.serve.blocks import tensors_in, write_block
from sloop.serve.cluster import agent as module
from sloop.serve.cluster import agents
from sloop.serve.cluster.agent import (
    Agent,
    AgentSetup,
    NodeOrder,
    WorkersKept,
)
from sloop.serve.cluster.agents import WORKERS_MAX, AgentBackend, NodeMemory
from sloop.serve.messages import Close, Free, Report, Run, RunBatch
from sloop.serve.network import BlockClient, HolderTable
from sloop.serve.node.known import KnownStages
from sloop.serve.protocols import ExaminedFile, Servable
from sloop.serve.transport import ProtocolError
from sloop.serve.weights.cache import usual_cache
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, WorkerId
from tests.hosts import is_running
from tests.joining import JoiningNodes, Memory
from tests.serve.rig import until, wirings_of
from tests.serve.test_agents import A, B, FakeAgent, Fleet, finished, fleet, memory_files, spec
from tests.serve.test_local_backend import BYTES
from tests.serve.test_network import HOST, TOKEN

pytestmark = pytest.mark.live
SLEEPY = {("stage", "echo"): Servable("fake:sleep:0.2:0", BYTES)}
SMALL = write_block([Tensor("UINT8", (1, 1), b"x")], None)
QUICK = {("stage", "echo"): Servable("fake:sleep:0:0", BYTES)}


def does(servables: dict[tuple[str, str], Servable] = QUICK) -> bytes:
    return KnownStages(servables, wirings_of(servables), 0).fingerprint("stage", "echo")


async def returned(here: Fleet, *numbers: int, server: str = "the last one", **others: Any) -> FakeAgent:
    """An agent that has kept workers of another server, with its setup."""
    kept = dict.fromkeys(map(WorkerId, numbers), does())
    made = await here.join(server=server, kept=kept, **others)
    await made.hear(AgentSetup)
    return made


def kept(number: int, node: str = "one", cores: float = 1, *, is_ready: bool = True) -> KeptWorker:
    return KeptWorker(WorkerId(number), spec(node, cores), is_ready)


def nodes(here: Fleet) -> list[NodeReady]:
    return [each for each in here.ear.events if isinstance(each, NodeReady)]


async def test_workers_of_another_server_are_offered_with_their_node_and_adopted() -> None:
    async with fleet() as here:
        found = await returned(here, 4, 5)
        assert (await found.hear(AgentSetup)).keep == (4, 5)
        await asyncio.sleep(0.05)
        assert not nodes(here), "the others run still"
        found.send(WorkersKept((kept(4), kept(5, is_ready=False))))
        await here.ear.hear(NodeReady)
        assert nodes(here)[0].kept == (kept(4), kept(5, is_ready=False))
        here.backend.order(AdoptWorker(WorkerId(4), spec("one"), True))
        here.backend.order(AdoptWorker(WorkerId(5), spec("one"), False))
        assert await found.hear(AdoptWorker, 2) == AdoptWorker(WorkerId(5), spec("one"), False)
        found.send(Report(WorkerReady(WorkerId(5))))
        assert await here.ear.hear(WorkerReady) == WorkerReady(WorkerId(5))
        here.backend.run(BatchId(5), WorkerId(4), Run(2, [b"x", b"y"]))
        await found.hear(RunBatch)
        found.send(finished(replica=WorkerId(4)))
        await here.ear.hear(Finished)
        here.backend.order(StopWorker(WorkerId(4), ""))
        assert await found.hear(StopWorker) == StopWorker(WorkerId(4), "")


async def test_a_server_does_not_take_back_what_it_has_counted_as_lost() -> None:
    async with fleet() as here:
        first = await here.join()
        server = (await first.hear(AgentSetup)).server
        first.records.close()
        again = await returned(here, 0, server=server)
        assert (await again.hear(AgentSetup)).keep == ()
        assert len(nodes(here)) == 1
        again.send(WorkersKept(()))
        await here.ear.hear(NodeReady, count=2)


async def test_what_does_something_else_or_may_have_the_number_of_another_one_is_not_kept() -> None:
    async with fleet() as here:
        of_another_model = does({("stage", "echo"): Servable("fake:sleep:1:0", BYTES)})
        others = {0: does(), 1: of_another_model, 2: b"", 100: does()}  # this server's numbers begin at 100
        found = await here.join(server="another", kept=others)
        assert (await found.hear(AgentSetup)).keep == (0,)


def test_a_fetched_model_is_the_same_wherever_it_is_kept() -> None:
    def fetched(model: str, source: str) -> bytes:
        return does({("stage", "echo"): Servable(model, BYTES, source=source)})

    assert fetched("/a/m.onnx", "https://x#1") == fetched("/b/m.onnx", "https://x#1") != fetched("/a/m.onnx", "y#2")
    assert KnownStages({}, {}, 0).fingerprint("stage", "echo") == b""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((kept(7),), "is to be stopped"),
        ((kept(4), kept(4)), "twice"),
        ((kept(4, "two"),), "is not what it was"),
        ((kept(4, cores=3),), "is not what it was"),
        ((kept(4, cores=0),), "is not what it was"),
        ((KeptWorker(WorkerId(4), spec("one").with_cores(float("nan")), True),), "is not what it was"),
        (
            (KeptWorker(WorkerId(4), ReplicaSpec("stage", "other", spec("one").slot, "one"), True),),
            "is not what it was",
        ),
    ],
)
async def test_an_agent_cannot_lie_about_what_it_has_kept(
    said: tuple[KeptWorker, ...], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet() as here:
        liar = await returned(here, 4)
        liar.send(WorkersKept(said))
        await until(lambda: bool(liar.ends))
        assert not nodes(here)
        assert not here.lost(), "it had not joined"
        (await here.join()).send(WorkersKept(()))
        await until(lambda: bool(here.agents[-1].ends))
        assert here.lost() == [("one", "the agent says again which workers it has kept")]


async def test_a_node_whose_workers_do_not_stop_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "STOP_S_MAX", 0.05)
    async with fleet() as here:
        slow = await returned(here, 4)
        here.backend.order(StartWorker(B, spec("one")))
        assert await here.ear.hear(WorkerLost) == WorkerLost(B, "node one is not connected")
        await until(lambda: bool(slow.ends))
        assert not nodes(here)


async def test_what_is_adopted_when_its_agent_has_gone_is_lost() -> None:
    async with fleet() as here:
        found = await returned(here, 4)
        found.send(WorkersKept((kept(4),)))
        await here.ear.hear(NodeReady)
        here.backend.order(AdoptWorker(WorkerId(5), spec("one"), True))
        assert (await here.ear.hear(WorkerLost)) == WorkerLost(WorkerId(5), "node one is not connected any more")
        found.records.close()
        await until(lambda: bool(here.lost()))
        here.backend.order(AdoptWorker(WorkerId(4), spec("one"), True))
        await here.ear.hear(WorkerLost, count=2)


# The start of a server whose predecessor has died

ALWAYS = [Node(name, "local", 2, 1 << 30) for name in ("one", "two")]


def fleet_at(
    nodes: Sequence[Node],
    servables: dict[tuple[str, str], Servable] = QUICK,
    *,
    port: int = 0,
    join_s_max: float = 5.0,
    memory: Path | None = None,
) -> Fleet:
    """A server that has not begun."""
    arenas, holders = Arenas(), HolderTable()
    backend = AgentBackend(
        *(servables, wirings_of(servables), JoiningNodes()),
        arenas=arenas,
        nodes=nodes,
        port=port,
        pid=os.getpid(),
        join_s_max=join_s_max,
        holders=holders,
        memory=Memory(memory),
    )
    return Fleet(backend, arenas, holders)


async def port_of(backend: AgentBackend) -> int:
    await until(lambda: backend._server is not None)
    return backend.port


async def test_a_server_remembers_the_nodes_that_it_had_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    here = fleet_at(ALWAYS, memory=path)
    backend = here.backend
    opening = asyncio.create_task(backend.open())
    await port_of(backend)
    one, _ = await here.join("one"), await here.join("two")
    await opening
    assert NodeMemory(path).nodes == ["one", "two"]
    one.records.close()
    await until(lambda: NodeMemory(path).nodes == ["two"])
    for each in here.agents:
        each.records.close()
    await backend.close()
    assert NodeMemory(path).nodes == []


async def test_the_successor_of_a_server_that_died_begins_without_the_nodes_that_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "REJOIN_S_MAX", 0.3)
    path = tmp_path / "nodes"
    NodeMemory(path).write(["one", "two", "of another cluster"])
    here = fleet_at(ALWAYS, join_s_max=60.0, memory=path)
    backend = here.backend
    opening = asyncio.create_task(backend.open())
    await port_of(backend)
    found = await returned(here, 4)
    found.send(WorkersKept((kept(4),)))
    await asyncio.sleep(0.05)
    assert not here.ear.events, "the core hears of it when it begins"
    await opening
    assert nodes(here)[0].kept == (kept(4),)
    assert here.lost() == [("two", "its agent has not connected")]
    await here.join("two")
    await here.ear.hear(NodeReady, count=2)
    found.records.close()
    await until(lambda: len(here.lost()) == 2)
    for each in here.agents:
        each.records.close()
    await backend.close()


async def test_a_server_without_a_predecessor_needs_all_its_nodes(tmp_path: Path) -> None:
    backend = fleet_at(ALWAYS, join_s_max=0.1, memory=tmp_path / "nodes").backend
    with pytest.raises(MachineError, match="no agent of one, two has connected"):
        await backend.open()
    await backend.close()
    assert not (tmp_path / "nodes").exists()


def test_a_memory_that_cannot_be_written_is_told_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = NodeMemory(tmp_path / "none" / "nodes")
    memory.write(["one"])
    assert "cannot be written" in caplog.text
    assert memory.nodes == []
    assert NodeMemory(None).nodes == []
    (tmp_path / "nodes").write_bytes(b"\xff\xfe")
    assert NodeMemory(tmp_path / "nodes").nodes == []


# A real agent, and two servers one after the other


class Servers:
    """Servers at one port, one after the other, and an agent of node `one`."""

    agent: Agent
    """Of the node, once it has started."""

    def __init__(self, memory: Path | None) -> None:
        self.port, self.fleets, self.memory = 0, list[Fleet](), memory

    async def next(self, servables: dict[tuple[str, str], Servable] = SLEEPY) -> Fleet:
        """The one before dies, and another one takes its place."""
        if self.fleets:
            await self.die()
        made = fleet_at(
            [Node("one", "local", 2, 1 << 30, on_demand=True)], servables, port=self.port, memory=self.memory
        )
        await made.backend.open()
        self.port = made.backend.port
        self.fleets.append(made)
        return made

    async def die(self) -> None:
        """As a process that is killed: no word to the agents."""
        backend = self.fleets[-1].backend
        backend._listener = None
        for agent in list(backend._agents.values()):
            agent.records.close()
            backend._forget_agent(agent)
        await backend.close()


@asynccontextmanager
async def servers(
    folder: Path, servables: dict[tuple[str, str], Servable] = SLEEPY, *, is_followed: bool = True
) -> AsyncIterator[tuple[Servers, Fleet]]:
    made = Servers(folder / "nodes" if is_followed else None)
    first = await made.next(servables)
    made.agent = Agent((HOST, made.port), "one", TOKEN)
    serving = asyncio.create_task(made.agent.serve())
    try:
        await first.ear.hear(NodeReady)
        yield made, first
    finally:
        made.fleets[-1].backend.order(ReleaseNode("one"))
        await asyncio.wait_for(serving, 20)
        await made.fleets[-1].backend.close()
        for each in made.fleets:
            each.arenas.close()


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module.AgentHost, "machine", staticmethod(lambda: "another machine"))


async def started(here: Fleet, *replicas: ReplicaId) -> None:
    for replica in replicas:
        here.backend.order(StartWorker(replica, spec("one")))
    await here.ear.hear(WorkerReady, count=len(replicas))


def adoption(kept: KeptWorker) -> AdoptWorker:
    return AdoptWorker(kept.worker, kept.spec, kept.is_ready)


def offered(here: Fleet) -> Sequence[KeptWorker]:
    return nodes(here)[0].kept


@pytest.mark.usefixtures("_quick")
async def test_a_worker_serves_one_server_after_the_other_with_its_number(tmp_path: Path) -> None:
    async with servers(tmp_path) as (made, first):
        await started(first, A, B)
        first.backend.order(ResizeWorker(B, 2.0))
        await first.ear.hear(WorkerResized)
        second = await made.next()
        await second.ear.hear(NodeReady)
        one, other = offered(second)
        assert (one, other) == (kept(1), kept(2, cores=2))
        second.backend.order(adoption(one))
        second.backend.order(adoption(other))
        second.backend.run(BatchId(1), B, Run(1, [SMALL]))
        result = await second.ear.hear(Finished, WorkerLost)
        assert isinstance(result, Finished)
        assert result.replica == B
        second.backend.order(StartWorker(WorkerId(WORKERS_MAX), spec("one")))
        await second.ear.hear(WorkerReady)
        second.backend.order(StopWorker(A, ""))
        assert await second.ear.hear(WorkerStopped) == WorkerStopped(A)
        third = await made.next()
        await third.ear.hear(NodeReady)
        assert [each.worker for each in offered(third)] == [B, WORKERS_MAX]


@pytest.mark.usefixtures("_quick")
async def test_a_server_whose_core_has_failed_leaves_its_replicas_to_the_next(tmp_path: Path) -> None:
    async with servers(tmp_path) as (made, first):
        await started(first, A)
        await first.backend.leave()
        await first.backend.close()
        assert NodeMemory(tmp_path / "nodes").nodes == ["one"]
        second = await made.next()
        await second.ear.hear(NodeReady)
        assert offered(second) == (kept(1),)


async def test_a_server_that_nobody_can_follow_leaves_nothing() -> None:
    async with fleet() as here:
        found = await here.join()
        await found.hear(AgentSetup)
        await here.backend.leave()
        closing = asyncio.create_task(here.backend.close())
        await found.hear(Close)
        found.records.close()
        await closing


@pytest.mark.usefixtures("_quick")
async def test_a_batch_of_a_server_that_has_died_is_abandoned_and_its_worker_ready_when_it_is_over(
    tmp_path: Path,
) -> None:
    async with servers(tmp_path) as (made, first):
        await started(first, A)
        first.backend.run(BatchId(1), A, Run(1, [SMALL]))
        second = await made.next()
        await second.ear.hear(NodeReady)
        (only,) = offered(second)
        second.backend.order(adoption(only))
        if not only.is_ready:  # unless the batch was over before the agent came
            assert await second.ear.hear(WorkerReady) == WorkerReady(A)
        second.backend.run(BatchId(1), A, Run(1, [SMALL]))
        await second.ear.hear(Finished)
        assert sum(isinstance(event, Finished) for event in second.ear.events) == 1


@pytest.mark.usefixtures("_quick")
async def test_a_worker_whose_abandoned_batch_does_not_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABANDON_S_MAX", 3.0)
    endless = {("stage", "echo"): Servable("fake:sleep:60000:0", BYTES)}
    async with servers(tmp_path, endless) as (made, first):
        await started(first, A)
        first.backend.run(BatchId(1), A, Run(1, [SMALL]))
        await asyncio.sleep(0.1)
        second = await made.next(endless)
        await second.ear.hear(NodeReady)
        (only,) = offered(second)
        assert not only.is_ready
        second.backend.order(adoption(only))
        assert await second.ear.hear(WorkerStopped) == WorkerStopped(A)


@pytest.mark.usefixtures("_quick")
async def test_no_worker_waits_for_a_server_that_cannot_come(tmp_path: Path) -> None:
    """One with a port or a token that nobody can know, as Ray's agents may have."""
    async with servers(tmp_path, is_followed=False) as (made, first):
        await started(first, A)
        second = await made.next()
        await second.ear.hear(NodeReady)
        assert not offered(second)


@pytest.mark.usefixtures("_quick")
async def test_a_server_with_other_models_gets_an_empty_node(tmp_path: Path) -> None:
    async with servers(tmp_path) as (made, first):
        await started(first, A)
        second = await made.next(QUICK)
        await second.ear.hear(NodeReady)
        assert not offered(second)
        await started(second, A)


async def answered(here: Fleet, batch: int, replica: ReplicaId) -> Address:
    """The large block with which a worker answers a large block; it is compared with that."""
    size = 3 << 20
    held = here.arenas.make(16 << 20, lambda _: None)
    arena, content = Arena(held.number, held.fd), os.urandom(size)
    given = write_block([Tensor("UINT8", (1, size), content)], arena)
    assert isinstance(given, Address)
    here.arenas.hold(given)
    here.backend.run(BatchId(batch), replica, Run(1, [given]))
    await here.ear.hear(Finished)
    (result,) = here.ear.blocks
    assert isinstance(result, Address)
    client = BlockClient(TOKEN)
    client.set_endpoints(here.holders.endpoints())
    memory = memoryview(bytearray(result.size))
    await client.fetch(result, memory)
    assert bytes(tensors_in(memory)[0].data) == content
    client.close()
    return result


@pytest.mark.usefixtures("_quick")
def test_large_blocks_of_a_worker_that_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has another number for the second server than for the worker; what the first one had is freed later,
    when nobody can read it any more."""
    monkeypatch.setattr(module, "LINGER_S", 0.3)

    async def scene() -> None:
        async with servers(tmp_path) as (made, first):
            await started(first, A)
            before = await answered(first, 1, A)
            second = await made.next()
            second.holders.number()  # so that the numbers differ
            await second.ear.hear(NodeReady)
            assert made.agent._session is not None
            arenas = made.agent._session._arenas
            (only,) = offered(second)
            second.backend.order(adoption(only))
            result = await answered(second, 1, A)
            assert result.holder != before.holder
            await until(lambda: sum(each.blocks for each in arenas._held.values()) == 1)
            second.arenas.free(result)
            await until(lambda: not any(each.blocks for each in arenas._held.values()))

    gc.collect()
    before = memory_files()
    uvloop.run(scene())
    gc.collect()
    assert memory_files() == before


async def test_an_agent_that_gives_up_ends_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    monkeypatch.setattr(module, "GIVE_UP_S", 0.3)
    made = Servers(tmp_path / "nodes")
    first = await made.next()
    agent = Agent((HOST, made.port), "one", TOKEN)
    serving = asyncio.create_task(agent.serve())
    await first.ear.hear(NodeReady)
    await started(first, A)
    assert agent._session is not None
    pid = agent._session.node.pid(A)
    await made.die()
    assert pid is not None
    assert is_running(pid)
    with pytest.raises(MachineError, match="cannot be reached"):
        await asyncio.wait_for(serving, 20)
    assert not is_running(pid)


def test_a_worker_is_known_by_the_digest_of_its_model() -> None:
    """Where the copy lies and when the user's file was written does not matter."""

    def fingerprint(model: str, digest: str, state: str = "") -> bytes:
        files = (ExaminedFile("/models/m.onnx", state, digest),)
        servable = Servable(model, BYTES, original="/models/m.onnx", digest=digest, files=files)
        return KnownStages({("stage", "echo"): servable}, wirings_of(QUICK), 0).fingerprint("stage", "echo")

    first = fingerprint("/state/models/m.onnx-1/files/m.onnx", "1", "written at noon")
    assert first
    assert fingerprint("/other/models/m.onnx-1/files/m.onnx", "1", "touched since") == first
    assert fingerprint("/state/models/m.onnx-2/files/m.onnx", "2", "written at noon") != first


async def test_a_block_is_freed_once() -> None:
    session = module.AgentSession(AgentSetup(4), lambda _: None, BlockClient(TOKEN), (HOST, 1), usual_cache)
    with pytest.raises(ProtocolError, match="is free already"):
        session.acts[Free](Free(Address(4 << 48, 0, 1)))
    with pytest.raises(ProtocolError, match="was not kept"):
        session.acts[NodeOrder](NodeOrder(AdoptWorker(WorkerId(3), spec("one"), is_ready=True)))
    await session.close()
