"""Parts of a model behind agents over loopback, each agent with a cache of its own: blocks come from the deciding
process and from each other, tensors pass from agent to agent, and what dies costs only what it had to compute."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec import structs
from onnx import numpy_helper

from sloop.actions import Evict, StartWorker, StopWorker
from sloop.errors import MachineError
from sloop.events import (
    BatchFailed,
    BatchLost,
    BatchSilent,
    Event,
    Finished,
    NodeReady,
    TransferFailed,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.serve import network
from sloop.serve.blocks import Block, tensors_in
from sloop.serve.cluster import agent as module
from sloop.serve.cluster.agent import (
    AgentSession,
    AgentSetup,
    FromAgent,
)
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.messages import CompleteWorker, ConnectParts, CutBlock, Reached, Report, Run, RunBatch, encode
from sloop.serve.network import BlockClient, Endpoint, NetworkLink, Purpose, connect
from sloop.serve.node.known import sources_of
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import CutModel, Servable
from sloop.serve.transport import FrameKind
from sloop.serve.weights.peers import KnownFile
from sloop.shared_memory import Address
from sloop.tensor import Tensor
from sloop.vocabulary import (
    STORE,
    BatchId,
    LayerSet,
    ModelWeights,
    ReplicaId,
    ReplicaSpec,
    Slot,
    TransferId,
    Worker,
    WorkerId,
    parts_at,
)
from tests.hosts import is_running
from tests.serve.agent_rig import ONE, THREE, TWO, AgentRig, elsewhere
from tests.serve.rig import run_of, until
from tests.serve.test_agents import BATCH, finished, fleet
from tests.serve.test_local_backend import BYTES, Ear
from tests.serve.test_network import HOST, TOKEN
from tests.serve.test_pipelines import A, B, C, check_equal, inputs, model, note_passed, servable

__all__ = ["elsewhere", "model"]  # fixtures
pytestmark = [pytest.mark.live, pytest.mark.usefixtures("elsewhere")]
WHOLE = ModelWeights("skips", 1000)


class NetworkEar(Ear):
    """Reads the answers through the agents that have them."""

    async def answer(self, rig: "Rig", batch: int) -> np.ndarray[Any, Any]:
        """The outputs of a batch, whose blocks are free then."""
        found = []
        for each in self.of[BatchId(batch)]:
            content = each
            if isinstance(each, Address):
                memory = bytearray(each.size)
                await rig.client.fetch(each, memoryview(memory))
                rig.arenas.free(each)
                content = bytes(memory)
            assert isinstance(content, bytes)
            [y] = tensors_in(content)
            found.append(np.frombuffer(y.data, np.float32).reshape(y.shape))
        return np.concatenate(found)

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[BatchId, list[Block]] = {}

    def on_finished(self, event: Finished, blocks: Sequence[Block | None], faults: object) -> None:
        assert event.batch not in self.of, "answered twice"
        self.of[event.batch] = [block for block in blocks if block is not None]
        self.on_event(event)


class Rig(AgentRig):
    """A rig of a model that is cut into blocks, whose answers come through its agents."""

    def __init__(self, folder: Path, made: Servable) -> None:
        self.ear = NetworkEar()
        self.servable = structs.replace(made, weights=(WHOLE,))
        super().__init__(folder, {("stage", "skips"): self.servable}, self.ear, cores=1)
        self.client = BlockClient(TOKEN)

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        await super().__aexit__()

    @property
    def lost(self) -> list[Event]:
        return self.said(WorkerLost, BatchLost, BatchFailed, TransferFailed)

    async def join(self, *names: str) -> None:
        await super().join(*names)
        self.client.set_endpoints(self.backend._holders.endpoints())

    def send(self, layers: LayerSet | None, *nodes: str, completes: Sequence[ReplicaId] = ()) -> TransferId:
        weights = WHOLE if layers is None else structs.replace(WHOLE, layers=layers, size_bytes=1)
        return self.transfer(weights, STORE, nodes, completes=completes)

    def start(self, bounds: tuple[int, ...], members: dict[ReplicaId, str], pipeline: int = 0) -> None:
        """Parts on nodes, each with a transfer of its layers."""
        for place, (replica, node) in enumerate(members.items()):
            spec = ReplicaSpec("stage", "skips", Slot(0.5), node, shape=parts_at(bounds))
            transfer = self.send(spec.shape[place].span, node)
            self.backend.order(StartWorker(replica, spec, transfer=transfer, pipeline=WorkerId(pipeline), place=place))

    async def started(self, bounds: tuple[int, ...], members: dict[ReplicaId, str]) -> None:
        await self.join(*dict.fromkeys(members.values()))
        self.start(bounds, members)
        await until(lambda: len(self.said(WorkerReady)) == len(members) or bool(self.lost))
        assert self.lost == []

    def complete(self, *replicas: ReplicaId) -> None:
        """What the core orders when all parts are ready, or one is lost."""
        for replica in replicas:
            placed = self.backend._workers[replica]
            assert placed.order.part is not None
            self.send(placed.order.part.span.others, placed.agent.hello.name, completes=(replica,))

    async def completed(self, *replicas: ReplicaId) -> None:
        self.complete(*replicas)
        await until(lambda: {event.worker for event in self.said(WorkerCompleted)} >= set(replicas))

    def run(self, batch: int, replica: ReplicaId, rows: int) -> None:
        tensors = [[Tensor("FP32", (1, len(row)), row.tobytes())] for row in inputs(rows, batch)]
        self.backend.run(BatchId(batch), replica, run_of(tensors))

    async def finished(self, count: int) -> None:
        await self.ear.hear(Finished, count=count)

    def blocks(self, node: str) -> list[int]:
        """The blocks in the cache of a node."""
        assert self.servable.cut is not None
        names = [Path(block.file).name for block in self.servable.cut.blocks]
        found = glob(f"{self.folder / node}/*/files/*.onnx")  # that of a path fails if a folder goes meanwhile
        return sorted(names.index(Path(file).name) for file in found)

    def local(self, node: str) -> LiveNode:
        session = self.agents[node]._session
        assert session is not None
        return session.node

    def pid(self, replica: ReplicaId) -> int:
        placed = self.backend._workers[replica]
        found = self.local(placed.agent.hello.name).pid(replica)
        assert found is not None
        return found

    def pipeline(self, replica: ReplicaId) -> Any:
        return self.backend._workers[replica].pipeline

    def passed(self) -> list[tuple[ReplicaId, int]]:
        """Fills with what parts say that they have passed on."""
        return note_passed(*map(self.local, self.agents))

    async def check_nothing_left(self) -> None:
        """All blocks of agents are free, in the deciding process and in the agents."""
        await until(lambda: not any(agent.blocks._places for agent in self.backend._agents.values()))
        for name in self.backend._agents:
            session = self.agents[name]._session
            assert session is not None
            await until(lambda session=session: not session._used and not session._batches)  # type: ignore[misc]


Rigs = Callable[[], Rig]


@pytest.fixture
def rigs(model: Path, tmp_path: Path) -> Rigs:
    return lambda: Rig(tmp_path, servable(model, tmp_path / "cut"))


def last_block(rig: Rig) -> Path:
    """Where the deciding process has it."""
    assert rig.servable.cut is not None
    return Path(rig.servable.cut.blocks[3].file)


def without_last_block(rig: Rig) -> bytes:
    """Delete it; returns what it was."""
    content = last_block(rig).read_bytes()
    last_block(rig).unlink()
    return content


def check(model: Path, batch: int, rows: int, got: Any) -> None:
    check_equal(got, model, inputs(rows, batch))


@pytest.mark.parametrize(
    ("bounds", "nodes"), [((0, 2, 4), (ONE, TWO)), ((0, 1, 2, 4), (ONE, TWO, THREE)), ((0, 1, 3, 4), (ONE, TWO, ONE))]
)
async def test_a_life_of_a_pipeline_on_several_nodes(
    rigs: Rigs, model: Path, bounds: tuple[int, ...], nodes: tuple[str, ...]
) -> None:
    members = dict(zip((A, B, C), nodes, strict=False))
    async with rigs() as rig:
        await rig.started(bounds, members)
        for node in nodes:
            own = [range(*each) for each, name in zip(pairwise(bounds), nodes, strict=True) if name == node]
            assert rig.blocks(node) == sorted(at for each in own for at in each), "no others were fetched"
        count = 0
        for rows in (1, 16, 3):
            for member in members:
                count += 1
                rig.run(count, member, rows)
            await rig.finished(count)
            for batch in range(count - len(members) + 1, count + 1):
                check(model, batch, rows, await rig.ear.answer(rig, batch))
        await rig.check_nothing_left()
        for member in members:
            count += 1
            rig.run(count, member, 16)
        await rig.completed(*members)
        assert {tuple(rig.blocks(node)) for node in nodes} == {(0, 1, 2, 3)}
        await rig.finished(count)
        for member in members:
            count += 1
            rig.run(count, member, 7)
        await rig.finished(count)
        for batch, member in enumerate(members, count - len(members) + 1):
            check(model, batch - len(members), 16, await rig.ear.answer(rig, batch - len(members)))
            check(model, batch, 7, await rig.ear.answer(rig, batch))
            assert next(e for e in rig.said(Finished) if e.batch == batch).replica == member
        await rig.check_nothing_left()
        for member in members:
            rig.backend.order(StopWorker(member, ""))
        await rig.ear.hear(WorkerStopped, count=len(members))
        assert rig.lost == []


async def test_parts_complete_from_each_other_and_then_start_whole_replicas(
    rigs: Rigs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deciding process sends each block once."""
    asked: list[str] = []
    before = AgentBackend._file_of_block

    def noted(self: AgentBackend, key: str, name: str) -> KnownFile | None:
        asked.append(name)
        return before(self, key, name)

    monkeypatch.setattr(AgentBackend, "_file_of_block", noted)
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        assert len(set(asked)) == 4
        asked.clear()
        await rig.completed(A, B)
        rig.backend.order(StartWorker(C, ReplicaSpec("stage", "skips", Slot(0.5), TWO)))
        await rig.ear.hear(WorkerReady, count=3)
        assert asked == [], "all came from the other part, or were there"
        rig.run(1, C, 16)
        await rig.finished(1)
        check(model, 1, 16, await rig.ear.answer(rig, 1))
        transfer = rig.send(None, THREE)
        assert not rig.said(TransferFailed)
        assert transfer


async def test_blocks_bring_the_files_with_their_weights(model: Path, tmp_path: Path) -> None:
    """As those of models have that are too large for one file."""
    large, data = tmp_path / "large.onnx", "large.onnx.data"
    onnx.save_model(onnx.load(model), large, save_as_external_data=True, location=data, size_threshold=1024)
    async with Rig(tmp_path, servable(large, tmp_path / "cut")) as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        assert {len(list((tmp_path / node).glob("*/files/*.onnx.data"))) for node in (ONE, TWO)} == {2}
        rig.run(1, A, 16)
        await rig.finished(1)
        check(model, 1, 16, await rig.ear.answer(rig, 1))
        await rig.completed(A, B)
        rig.run(2, B, 16)
        await rig.finished(2)
        check(model, 2, 16, await rig.ear.answer(rig, 2))
        damaged = last_block(rig).with_name(f"{last_block(rig).name}.data")
        damaged.write_bytes(bytes(damaged.stat().st_size))
        rig.send(LayerSet(3, 4), THREE)
        await rig.join(THREE)
        rig.send(LayerSet(3, 4), THREE)
        await rig.ear.hear(TransferFailed, Transferred, count=5)
        assert len(rig.said(TransferFailed)) == 1, "the file is not what it was when the model was cut"


async def test_a_new_version_is_sent_its_own_blocks_though_its_model_has_the_same_name(
    rigs: Rigs, model: Path, tmp_path: Path
) -> None:
    """The file was overwritten, as with weights that were trained again. Parts of the old version still complete
    themselves with the old blocks."""
    trained = onnx.load(model)
    for tensor in trained.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + 1, tensor.name))
    (tmp_path / "again").mkdir()
    onnx.save(trained, tmp_path / "again" / "skips.onnx")
    newer = structs.replace(servable(tmp_path / "again" / "skips.onnx", tmp_path / "again"), weights=(WHOLE,))

    def fetched(rig: Rig, node: str) -> set[str]:
        return {json.loads(entry.read_text())["files"][0]["sha256"] for entry in (tmp_path / node).glob("*/entry.json")}

    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        rig.backend.learn({("stage@2", "skips"): newer}, {}, threads_prepared=1)
        await rig.completed(A, B)
        assert newer.cut is not None
        assert rig.servable.cut is not None
        olds, news = (
            {block.source.partition("sha256=")[2] for block in cut.blocks} for cut in (rig.servable.cut, newer.cut)
        )
        assert fetched(rig, ONE) == fetched(rig, TWO) == olds
        count = len(rig.said(Transferred))
        rig.send(None, ONE)
        await rig.ear.hear(Transferred, count=count + 1)
        assert fetched(rig, ONE) == olds | news
        rig.backend.order(Evict(TWO, WHOLE))
        rig.run(1, B, 16)
        await rig.finished(1)
        check(model, 1, 16, await rig.ear.answer(rig, 1))


async def test_a_node_with_all_blocks_says_so_when_it_joins(rigs: Rigs) -> None:
    async with rigs() as rig:
        await rig.join(ONE)
        rig.send(LayerSet(0, 2), ONE)
        await rig.ear.hear(Transferred)
        await rig.die(ONE)
        await rig.join(ONE)
        assert rig.said(NodeReady)[-1].weights == ()
        rig.send(None, ONE)
        await rig.ear.hear(Transferred, count=2)
        await rig.die(ONE)
        await rig.join(ONE)
        assert rig.said(NodeReady)[-1].weights == (WHOLE,)
        rig.backend.order(Evict(ONE, WHOLE))
        await until(lambda: rig.blocks(ONE) == [])


async def test_a_part_that_dies_takes_what_has_yet_to_pass_it(rigs: Rigs, model: Path) -> None:
    async with rigs() as rig:
        await rig.started((0, 1, 2, 4), {A: ONE, B: TWO, C: THREE})
        stopped, passed = rig.pid(C), rig.passed()
        os.kill(stopped, signal.SIGSTOP)
        rig.run(1, A, 16)
        await until(lambda: passed == [(A, 1), (B, 1)])
        os.kill(rig.pid(B), signal.SIGSTOP)
        rig.run(2, C, 16)
        rig.run(3, B, 16)
        await until(lambda: passed[2:] == [(A, 2), (A, 3)])
        os.kill(rig.pid(B), signal.SIGKILL)
        assert await rig.ear.hear(WorkerLost) == WorkerLost(B, "its process was killed by SIGKILL")
        assert not rig.said(BatchLost), "nobody knows yet where it is"
        os.kill(stopped, signal.SIGCONT)
        lost = BatchLost(BatchId(2), C, "replica 2, another part of its pipeline, is lost")
        assert await rig.ear.hear(BatchLost) == lost
        assert [event.batch for event in rig.said(Finished)] == [1]
        check(model, 1, 16, await rig.ear.answer(rig, 1))
        await rig.completed(A, C)
        rig.run(4, A, 5)
        rig.run(5, C, 16)
        await rig.finished(3)
        check(model, 4, 5, await rig.ear.answer(rig, 4))
        check(model, 5, 16, await rig.ear.answer(rig, 5))
        assert len(rig.lost) == 2
        await rig.check_nothing_left()


async def test_the_part_that_hangs_is_named_wherever_it_is(rigs: Rigs, model: Path) -> None:
    """Not the first one, nor that of the replica for which the batch was started."""
    async with rigs() as rig:
        await rig.started((0, 1, 2, 4), {A: ONE, B: ONE, C: TWO})
        for batch, hanging in ((1, B), (2, C)):
            stopped, count = rig.pid(hanging), len(rig.said(BatchSilent))
            os.kill(stopped, signal.SIGSTOP)
            rig.run(batch, A, 16)
            await until(lambda count=count: len(rig.said(BatchSilent)) > count)  # type: ignore[misc]
            told = rig.said(BatchSilent)[-1]
            assert (told.batch, told.replica) == (batch, hanging)
            os.kill(stopped, signal.SIGCONT)
            await rig.finished(batch)
            check(model, batch, 16, await rig.ear.answer(rig, batch))


async def test_a_network_that_is_slower_than_the_parts_holds_them_up_and_breaks_nothing(
    rigs: Rigs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much lies between them, and however long."""
    monkeypatch.setattr(network, "UNSENT_BYTES_MAX", 20 << 20)
    for name in ("SILENT_S", "STALLED_S_MAX"):
        monkeypatch.setattr(network, name, 0.3)
    monkeypatch.setattr(network, "BEAT_S", 0.05)
    links: list[NetworkLink] = []

    async def noted(endpoint: Endpoint, token: bytes, purpose: Purpose, **named: Any) -> NetworkLink:
        links.append(await connect(endpoint, token, purpose, **named))
        return links[-1]

    monkeypatch.setattr(module.AgentHost, "connect", staticmethod(noted))
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        rig.run(1, A, 16)
        await rig.finished(1)
        [link] = [link for link in links if link.purpose is Purpose.PARTS]
        link.hold(is_held=True)
        rows, passed = 12_000, rig.passed()
        for batch, replica in ((2, A), (3, B)):  # 12 MB each, of which 25 MB pass on
            x = inputs(rows, batch)
            rig.backend.run(BatchId(batch), replica, run_of([[Tensor("FP32", x.shape, x.tobytes())]]))
            await until(lambda count=batch - 1: len(passed) == count)  # type: ignore[misc]
        await asyncio.sleep(1)  # three times as long as a link may be silent, or stalled
        link.hold(is_held=False)
        await rig.finished(3)
        for batch in (2, 3):
            check(model, batch, rows, await rig.ear.answer(rig, batch))
        assert rig.lost == []


async def test_an_agent_that_dies_takes_what_its_node_has(rigs: Rigs, model: Path) -> None:
    """What has come from it finishes."""
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        passed = rig.passed()
        stopped = rig.pid(B)
        os.kill(stopped, signal.SIGSTOP)
        rig.run(1, B, 16)
        await until(lambda: passed == [(A, 1)])
        os.kill(rig.pid(A), signal.SIGSTOP)
        rig.run(2, A, 16)
        await rig.die(ONE)
        assert [event.worker for event in rig.said(WorkerLost)] == [A]
        os.kill(stopped, signal.SIGCONT)
        await rig.finished(1)
        check(model, 1, 16, await rig.ear.answer(rig, 1))
        await rig.completed(B)
        rig.run(3, B, 16)
        await rig.finished(2)
        check(model, 3, 16, await rig.ear.answer(rig, 3))
        assert rig.lost == rig.said(WorkerLost)
        assert len(rig.lost) == 1
        await rig.check_nothing_left()


def cut_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent reaches another one, for what parts pass on."""

    async def cut(endpoint: Any, token: bytes, purpose: Purpose, **named: Any) -> Any:
        if purpose is Purpose.PARTS:
            raise MachineError("no route to host")
        return await connect(endpoint, token, purpose, **named)

    monkeypatch.setattr(module.AgentHost, "connect", staticmethod(cut))


async def test_parts_whose_nodes_cannot_reach_each_other_serve_alone(
    rigs: Rigs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes reach the deciding process, and no part is lost."""
    cut_parts(monkeypatch)
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        rig.run(1, A, 16)
        await rig.ear.hear(BatchLost)
        rig.run(2, B, 16)
        await rig.ear.hear(BatchLost, count=2)
        own = {each.batch: each for each in rig.said(BatchLost)}
        assert {each.replica for each in own.values()} == {A, B}
        await rig.completed(A, B)
        for batch, replica in ((3, A), (4, B)):
            rig.run(batch, replica, 16)
        await rig.finished(2)
        for batch in (3, 4):
            check(model, batch, 16, await rig.ear.answer(rig, batch))
        assert len(rig.lost) == 2
        await rig.check_nothing_left()


async def test_a_part_does_not_wait_for_ever_until_somebody_reads_what_it_passes_on(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the kernel keeps; the node of the next part cannot reach its own."""
    cut_parts(monkeypatch)
    monkeypatch.setattr(module, "MEET_S_MAX", 1.0)
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        x = inputs(20_000)
        rig.backend.run(BatchId(1), A, run_of([[Tensor("FP32", x.shape, x.tobytes())]]))
        await rig.ear.hear(BatchLost)
        await rig.completed(A, B)
        assert len(rig.lost) == 1


async def test_an_agent_may_connect_before_the_other_one_is_told(
    rigs: Rigs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s, tell = 0.3, AgentSession._connect_parts

    def late(session: AgentSession, record: Any) -> None:
        delay_s = late_s if record.before in session.node.workers else 0.0
        asyncio.get_running_loop().call_later(delay_s, tell, session, record)

    monkeypatch.setattr(AgentSession, "_connect_parts", late)
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        await asyncio.sleep(2 * late_s)  # what an agent is told comes in order: the pipe before the batch
        rig.run(1, A, 16)
        await rig.finished(1)
        check(model, 1, 16, await rig.ear.answer(rig, 1))
        assert rig.lost == []


async def test_a_connection_between_agents_that_breaks_loses_what_is_under_way_and_no_part(
    rigs: Rigs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links: list[NetworkLink] = []

    async def noted(endpoint: Any, token: bytes, purpose: Purpose, **named: Any) -> NetworkLink:
        links.append(await connect(endpoint, token, purpose, **named))
        return links[-1]

    monkeypatch.setattr(module.AgentHost, "connect", staticmethod(noted))
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        rig.run(1, A, 16)
        await rig.finished(1)
        check(model, 1, 16, await rig.ear.answer(rig, 1))
        stopped = rig.pid(A)
        os.kill(stopped, signal.SIGSTOP)
        rig.run(2, B, 16)
        [link] = [link for link in links if link.purpose is Purpose.PARTS]
        assert link._transport is not None
        link._transport.abort()
        why = "two parts of its pipeline cannot reach each other"
        assert await rig.ear.hear(BatchLost) == BatchLost(BatchId(2), B, why)
        os.kill(stopped, signal.SIGCONT)
        await rig.completed(A, B)
        rig.run(3, A, 16)
        await rig.finished(2)
        check(model, 3, 16, await rig.ear.answer(rig, 3))
        assert rig.lost == rig.said(BatchLost)
        await rig.check_nothing_left()


@pytest.mark.parametrize("part", [7, 1])
async def test_who_asks_for_what_no_part_passes_on_gets_nothing(rigs: Rigs, part: int) -> None:
    """Also who asks for what another one has: that costs nobody anything."""
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        rig.run(1, A, 2)
        await rig.finished(1)
        placed = rig.backend._workers[A]
        stranger = await connect(placed.agent.hello.endpoint, TOKEN, Purpose.PARTS)
        ends: list[str] = []
        stranger.attach(lambda frame: None, ends.append)
        stranger.send(FrameKind.RECORDS, payload=[encode([ConnectParts(WorkerId(part), WorkerId(8))])])
        await until(lambda: bool(ends))
        rig.run(2, A, 2)
        await rig.finished(2)
        assert rig.lost == []


async def test_a_part_that_hangs_while_it_completes_itself_is_lost(rigs: Rigs, model: Path) -> None:
    """Outside its pipeline it runs no batches, by which the core would notice: its place would be empty for ever."""
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        pid = rig.pid(B)
        os.kill(pid, signal.SIGSTOP)
        rig.complete(A, B)
        await rig.ear.hear(WorkerCompleted)
        [hanging] = rig.local(TWO).workers.values()
        await until(lambda: hanging.section is not None and hanging.section.is_completing)
        passed = rig.passed()
        rig.run(1, A, 16)
        await until(lambda: passed == [(A, 1)])
        rig.local(TWO)._start_s_max = 0.1
        rig.local(TWO)._watch_completion(hanging)
        gone = await rig.ear.hear(WorkerLost)
        assert gone == WorkerLost(B, "it did not load the other layers within 0.1 s")
        assert rig.said(BatchLost) == [BatchLost(BatchId(1), A, "replica 2, another part of its pipeline, is lost")]
        rig.run(2, A, 16)
        await rig.finished(1)
        check(model, 2, 16, await rig.ear.answer(rig, 2))


async def test_a_part_that_has_completed_itself_may_be_silent(rigs: Rigs) -> None:
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        await rig.completed(A, B)
        for node in (ONE, TWO):
            [whole] = rig.local(node).workers.values()
            assert whole.timer is None


async def test_a_part_may_be_told_of_its_own_batch_while_it_runs_one_that_passes(rigs: Rigs, model: Path) -> None:
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        pid, passed = rig.pid(B), rig.passed()
        await rig.completed(B)
        os.kill(pid, signal.SIGSTOP)
        rig.run(1, A, 16)
        await until(lambda: passed == [(A, 1)])
        os.kill(rig.pid(A), signal.SIGKILL)
        await rig.ear.hear(WorkerLost)
        rig.run(2, B, 16)
        os.kill(pid, signal.SIGCONT)
        await rig.finished(1)
        check(model, 2, 16, await rig.ear.answer(rig, 2))
        assert [event.batch for event in rig.said(Finished)] == [2]
        await rig.check_nothing_left()


async def test_a_batch_for_a_part_of_a_broken_pipeline_is_lost_and_does_not_fail(rigs: Rigs) -> None:
    """The core has begun it before it hears of the loss."""
    async with rigs() as rig:
        await rig.started((0, 2, 4), {A: ONE, B: TWO})
        rig.pipeline(B).is_broken = True
        rig.run(1, B, 2)
        assert rig.lost == [BatchLost(BatchId(1), B, "another part of its pipeline is lost")]
        rig.backend.order(StopWorker(A, ""))
        rig.backend.order(StopWorker(B, ""))
        await rig.ear.hear(WorkerStopped, count=2)


async def test_layers_that_do_not_come_end_their_part_and_leave_nothing(rigs: Rigs, model: Path) -> None:
    async with rigs() as rig:
        await rig.join(ONE, TWO)
        content = without_last_block(rig)
        rig.start((0, 2, 4), {A: ONE, B: TWO})
        gone = await rig.ear.hear(WorkerLost)
        assert isinstance(gone, WorkerLost)
        assert gone.worker == B
        assert "its weights do not come" in gone.error
        await rig.ear.hear(TransferFailed)
        await rig.ear.hear(WorkerReady)
        rig.complete(A)
        await rig.ear.hear(WorkerLost, count=2)
        last_block(rig).write_bytes(content[:-1] + b"?")
        rig.start((0, 2, 4), {C: TWO}, pipeline=1)
        await rig.ear.hear(WorkerReady, count=2)
        rig.complete(C)
        await rig.ear.hear(WorkerLost, count=3)
        assert 3 not in rig.blocks(TWO), "it is not what was cut"
        assert not rig.backend._workers
        assert not rig.local(ONE).workers


async def test_stopping_before_all_parts_are_there_stops_all(rigs: Rigs) -> None:
    async with rigs() as rig:
        await rig.join(ONE, TWO)
        rig.start((0, 2, 4), {A: ONE, B: TWO})
        rig.backend.order(StopWorker(A, ""))
        rig.backend.order(StopWorker(B, ""))
        await rig.ear.hear(WorkerStopped, count=2)
        assert rig.lost == []


def test_agents_get_a_model_by_its_url_or_its_blocks(model: Path, tmp_path: Path) -> None:
    made = servable(model, tmp_path)
    assert made.cut is not None
    every = [block.source for block in made.cut.blocks]
    assert sources_of(made) == every
    assert [
        sources_of(made, layers)
        for layers in (LayerSet(1, 3), LayerSet(1, 3).others, LayerSet(0, 4), LayerSet(0, 2).others)
    ] == [
        every[1:3],
        [every[0], every[3]],
        every,
        every[2:],
    ]
    assert sources_of(structs.replace(made, cut=None, source="https://host/x.onnx")) == ["https://host/x.onnx"]
    assert sources_of(structs.replace(made, cut=None)) == []


# Shadows

PAIR = Worker(0.5, (0, 1))


SHADOW, SECOND, THIRD = (WorkerId(number) for number in (107, 108, 109))


async def paired(rig: Rig) -> None:
    """A body on the first node, with a shadow."""
    await rig.join(ONE)
    rig.backend.order(StartWorker(A, ReplicaSpec("stage", "skips", Slot(0.5), ONE)))
    await rig.ear.hear(WorkerReady)
    start_shadow(rig)
    assert await rig.ear.hear(WorkerReady, count=2) == WorkerReady(SHADOW)


def start_shadow(rig: Rig, worker: WorkerId = SHADOW) -> None:
    spec = ReplicaSpec("stage", "skips", Slot(0.5), ONE, shape=(PAIR,))
    rig.backend.order(StartWorker(worker, spec, A))


def shadow_pid(rig: Rig, worker: WorkerId = SHADOW) -> int:
    found = rig.local(ONE).pid(worker)
    assert found is not None
    return found


async def test_a_life_of_a_shadow_behind_an_agent(rigs: Rigs, model: Path) -> None:
    async with rigs() as rig:
        await paired(rig)
        for batch, rows in enumerate((4, 1, 16, 3), 1):
            rig.run(batch, A, rows)
            await rig.finished(batch)
            check(model, batch, rows, await rig.ear.answer(rig, batch))
        start_shadow(rig, SECOND)
        refused = WorkerLost(SECOND, "the one before has not ended")
        assert await rig.ear.hear(WorkerLost) == refused
        rig.backend.order(StopWorker(SECOND, ""))
        assert await rig.ear.hear(WorkerStopped) == WorkerStopped(SECOND)
        pid = shadow_pid(rig)
        rig.backend.order(StopWorker(SHADOW, ""))
        assert await rig.ear.hear(WorkerStopped, count=2) == WorkerStopped(SHADOW)
        assert not is_running(pid)
        start_shadow(rig, THIRD)
        await rig.ear.hear(WorkerReady, count=3)
        pid = shadow_pid(rig, THIRD)
        rig.backend.order(StopWorker(A, ""))
        assert await rig.ear.hear(WorkerStopped, count=3) == WorkerStopped(A)
        assert not is_running(pid)
        assert rig.lost == [refused]


async def test_a_shadow_ends_when_its_agent_loses_the_deciding_process(rigs: Rigs) -> None:
    """The next deciding process would know nothing of it."""
    async with rigs() as rig:
        await paired(rig)
        pid = shadow_pid(rig)
        rig.backend._agents[ONE].records.close()
        rig.backend._on_end(rig.backend._agents[ONE], "a test broke it")
        assert rig.lost == rig.said(WorkerLost)
        await until(lambda: not is_running(pid))
        await rig.ear.hear(NodeReady, count=2)
        start_shadow(rig, SECOND)
        assert [lost.worker for lost in rig.said(WorkerLost)] == [A], "a lost replica's shadow is lost with it"


# What an agent with a part may not report

CUT = Servable("/not/here.onnx", BYTES, cut=CutModel((CutBlock("a", (), (), ()), CutBlock("b", (), (), ())), {}, 4))


LIES: dict[str, FromAgent] = {
    "a part of another node": finished(replica=B),
    "finished with the first layers": finished(),
    "finished with another batch": finished(batch=BatchId(6)),
    "drained as the first part": Reached("drained", worker=A),
    "another step": Reached("complete", worker=A),
    "drained as nobody": Reached("drained"),
    "drained as a part of another node": Reached("drained", worker=B),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_a_lie_about_a_part_costs_an_agent_its_node_and_nobody_else(lie: FromAgent) -> None:
    async with fleet() as here:
        here.backend.learn({("stage", "cut"): CUT}, {}, threads_prepared=1)
        liar, other = await here.join(), await here.join("two")
        for place, (replica, fake, node) in enumerate(((A, liar, ONE), (B, other, TWO))):
            await fake.hear(AgentSetup)
            spec = ReplicaSpec("stage", "cut", Slot(1), node, shape=parts_at((0, 1, 2)))
            here.backend.order(StartWorker(replica, spec, pipeline=A, place=place))
            await fake.hear(StartWorker)
            fake.send(Report(WorkerReady(replica)))
        await here.ear.hear(WorkerReady, count=2)
        assert await liar.hear(ConnectParts) == ConnectParts(A, B, (HOST, 1))
        await liar.hear(CompleteWorker)
        here.backend.run(BATCH, A, Run(2, [b"x", b"y"]))
        assert (await liar.hear(RunBatch)).is_part
        liar.send(lie)
        await until(lambda: bool(liar.ends))
        assert [name for name, _ in here.lost()] == [ONE]
        assert [each.worker for each in here.ear.events if isinstance(each, WorkerLost)] == [A]
        other.send(Report(WorkerCompleted(B)))
        await here.ear.hear(WorkerCompleted)
        here.backend.run(BatchId(6), B, Run(2, [b"x", b"y"]))
        other.send(finished(replica=B, batch=BatchId(6)))
        await here.ear.hear(Finished)
        assert not other.ends
