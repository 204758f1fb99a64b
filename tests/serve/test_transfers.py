"""Ordered transfers of weights: the deciding process's side and real agents over loopback, each with a cache of its
own, and a store that is as bad as a test wants. Workers are ready as soon as their model is there."""

import asyncio
import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sloop.actions import CancelTransfer, Evict, StartWorker, StopWorker, Transfer
from sloop.events import (
    Event,
    NodeLost,
    NodeReady,
    TransferFailed,
    Transferred,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.serve.cluster import agent as module
from sloop.serve.cluster.agent import Agent
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.node.node import LiveNode, NodeWorker
from sloop.serve.protocols import Servable
from sloop.serve.weights import peers
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.peers import FileServer
from sloop.serve.weights.sources import Patience
from sloop.shared_memory import Arenas
from sloop.vocabulary import STORE, ModelWeights, Node, ReplicaId, ReplicaSpec, Slot, TransferId
from tests.joining import JoiningNodes, Memory
from tests.serve.bad_store import BadStore, Served
from tests.serve.rig import wirings_of
from tests.serve.test_local_backend import BYTES
from tests.serve.test_network import HOST, TOKEN, until

pytestmark = pytest.mark.live
CONTENT = random.Random(9).randbytes(3 << 20)
HALF = len(CONTENT) // 2
WEIGHTS = ModelWeights("the model", len(CONTENT))
QUICK = Patience(connect_s=2, stall_s=10, least_bytes_s=1000, tries=2, pause_s=0.001, hang_s=20)
NODES = [Node(name, "local", 0.1, 1 << 40, on_demand=True) for name in ("one", "two", "three")]
ONE, TWO, THREE = (node.name for node in NODES)


@pytest.fixture
def store() -> Iterator[BadStore]:
    with BadStore() as made:
        made.files["/model.bin"] = Served(CONTENT)
        yield made


@pytest.fixture(autouse=True)
def ready_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: LiveNode, worker: NodeWorker) -> None:
        assert Path(worker.servable.model).read_bytes() == CONTENT
        self._report(WorkerReady(worker.number))

    monkeypatch.setattr(LiveNode, "_launch", launch)
    monkeypatch.setattr(module.AgentHost, "machine", staticmethod(lambda: "another machine"))
    monkeypatch.setattr(module, "RETRY_S", 0.05)


class Rig:
    """A backend and what it reports, and agents with their caches below `folder`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.events = folder, list[Event]()
        self.servables = {("stage", "echo"): Servable("/not/here.bin", BYTES, source=url, weights=(WEIGHTS,))}
        self.arenas = Arenas()
        self.backend = AgentBackend(
            *(self.servables, wirings_of(self.servables), JoiningNodes()),
            arenas=self.arenas,
            nodes=NODES,
            pid=os.getpid(),
            memory=Memory(),
        )
        self.backend.attach(self)
        self.agents: dict[str, asyncio.Task[None]] = {}
        self.budget_bytes, self.patience = 10**9, QUICK
        self._last = -1

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_finished(self, *_: object) -> None:
        raise AssertionError("nothing runs")

    on_failed = on_finished

    def said(self, *kinds: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    async def join(self, *names: str) -> None:
        for name in names:
            count = len(self.said(NodeReady))
            own = Agent((HOST, self.backend.port), name, TOKEN, make_cache=lambda name=name: self.cache(name))  # type: ignore[misc]
            self.agents[name] = asyncio.create_task(own.serve())
            await until(lambda count=count: len(self.said(NodeReady)) > count)  # type: ignore[misc]

    def cache(self, name: str) -> WeightsCache:
        return WeightsCache(self.folder / name, self.budget_bytes, patience=self.patience)

    def send(self, source: str, *receivers: str, is_kept: bool = True) -> TransferId:
        self._last += 1
        self.backend.order(Transfer(TransferId(self._last), WEIGHTS, source, receivers, is_kept))
        return TransferId(self._last)

    def start(self, number: int, node: str, transfer: TransferId | None = None) -> None:
        self.backend.order(
            StartWorker(ReplicaId(number), ReplicaSpec("stage", "echo", Slot(0.1), node), transfer=transfer)
        )

    async def over(self, *nodes: str, transfer: int = 0) -> None:
        """These nodes have the weights."""
        wanted = {Transferred(TransferId(transfer), node) for node in nodes}
        await until(lambda: wanted <= set(self.said(Transferred)) or bool(self.said(TransferFailed)))
        assert wanted <= set(self.said(Transferred)), self.said(TransferFailed)

    async def die(self, name: str) -> None:
        """The agent ends, and its node is lost."""
        self.agents.pop(name).cancel()
        await until(lambda: any(event.node == name for event in self.said(NodeLost)))

    def files(self, name: str) -> list[Path]:
        """All files of the model on a node, whole or not."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # a folder was deleted meanwhile, beside the agent's loop
                return [path for path in (self.folder / name).glob("**/files/*") if path.is_file()]

    def part_bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name).glob("*.part/files/*"))

    def is_whole(self, *names: str) -> bool:
        return all([file.read_bytes() for file in self.files(name)] == [CONTENT] for name in names)

    async def close(self) -> None:
        for task in self.agents.values():
            task.cancel()
        for task in self.agents.values():
            with suppress(asyncio.CancelledError):
                await task
        await self.backend.close()
        self.arenas.close()


Scene = Callable[[Rig], Awaitable[None]]


def with_checksum(url: str, content: bytes = CONTENT) -> str:
    return f"{url}/model.bin#sha256={hashlib.sha256(content).hexdigest()}"


def play(folder: Path, url: str, scene: Scene) -> None:
    async def main() -> None:
        rig = Rig(folder, url)
        await rig.backend.open()
        try:
            await asyncio.wait_for(scene(rig), 30)
        finally:
            await rig.close()

    uvloop.run(main())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From where on any agent was asked for a file that it has."""
    found: list[int] = []
    before = FileServer._send

    async def noted(self: FileServer, writer: asyncio.StreamWriter, fd: int, at: int, end: int) -> bool:
        found.append(at)
        return await before(self, writer, fd, at, end)

    monkeypatch.setattr(FileServer, "_send", noted)
    return found


# Chains


def test_a_chain_passes_on_what_it_receives_and_its_nodes_say_so(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO, THREE)
        store.files["/model.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        transfer = rig.send(STORE, ONE, TWO, THREE)
        rig.start(7, TWO, transfer)
        await until(lambda: rig.part_bytes(THREE) > HALF - 2 * peers.CHUNK_BYTES)
        assert not rig.said(Transferred, WorkerReady), "half of it has come"
        hold.set()
        await rig.over(ONE, TWO, THREE)
        assert rig.is_whole(ONE, TWO, THREE)
        await until(lambda: bool(rig.said(WorkerReady)))
        place = [type(event) for event in rig.events if getattr(event, "node", TWO) in (TWO, "")]
        assert place.index(Transferred) < place.index(WorkerReady)

    play(tmp_path, with_checksum(store.url), scene)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


def test_weights_come_from_a_node_that_has_them(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO, THREE)
        rig.send(STORE, ONE)
        await rig.over(ONE)
        store.files["/model.bin"] = Served(status=500)
        rig.send(ONE, TWO, THREE)
        await rig.over(TWO, THREE, transfer=1)
        assert rig.is_whole(TWO, THREE)

    play(tmp_path, with_checksum(store.url), scene)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


def test_when_a_receiver_dies_those_behind_it_go_on_at_the_byte_where_they_stand(
    store: BadStore, tmp_path: Path, asked: list[int]
) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO, THREE)
        store.files["/model.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        rig.send(STORE, ONE, TWO, THREE)
        await until(lambda: rig.part_bytes(THREE) > HALF - 2 * peers.CHUNK_BYTES)
        here = rig.part_bytes(THREE)
        asked.clear()
        await rig.die(TWO)
        await until(lambda: bool(asked))
        hold.set()
        await rig.over(ONE, THREE)
        assert rig.is_whole(ONE, THREE)
        assert min(asked) >= here, "nothing comes twice"
        assert not rig.said(TransferFailed), "the core hears of the loss of the node"

    play(tmp_path, with_checksum(store.url), scene)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


def test_when_the_source_dies_the_store_goes_on(store: BadStore, tmp_path: Path) -> None:
    """Flashpoint specification, acceptance check 23."""

    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO)
        store.files["/model.bin"] = Served(CONTENT, hold=threading.Event())
        rig.send(STORE, ONE)
        rig.send(ONE, TWO)
        await until(lambda: rig.part_bytes(TWO) > HALF - 2 * peers.CHUNK_BYTES)
        here = rig.part_bytes(TWO)
        store.files["/model.bin"] = Served(CONTENT)
        await rig.die(ONE)
        await rig.over(TWO, transfer=1)
        assert rig.is_whole(TWO)
        assert int(store.asked("/model.bin")[-1]["range"].removeprefix("bytes=").rstrip("-")) >= here

    play(tmp_path, with_checksum(store.url), scene)


def test_a_copy_that_differs_is_not_taken(store: BadStore, tmp_path: Path, asked: list[int]) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO)
        rig.send(STORE, ONE)
        await rig.over(ONE)
        (file,) = rig.files(ONE)
        with file.open("r+b") as opened:
            opened.seek(HALF)
            opened.write(b"another model")
        rig.send(ONE, TWO)
        await rig.over(TWO, transfer=1)
        assert rig.is_whole(TWO)
        assert asked, "the copy was read first"

    play(tmp_path, with_checksum(store.url), scene)


def test_eight_starts_on_a_node_wait_for_one_transfer(store: BadStore, tmp_path: Path) -> None:
    """Flashpoint specification, acceptance check 9."""

    async def scene(rig: Rig) -> None:
        await rig.join(ONE)
        transfer = rig.send(STORE, ONE)
        for number in range(7):
            rig.start(number, ONE, transfer)
        await until(lambda: len(rig.said(WorkerReady)) == 7)
        rig.start(7, ONE, transfer)  # the core did not know yet that it is over
        await until(lambda: len(rig.said(WorkerReady)) == 8)

    play(tmp_path, with_checksum(store.url), scene)
    assert len(store.asked("/model.bin")) == 1


# What stays


def test_a_node_says_what_it_has_and_forgets_what_is_evicted(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO)
        assert [event.weights for event in rig.said(NodeReady)] == [(), ()]
        rig.send(STORE, ONE, TWO)
        await rig.over(ONE, TWO)
        rig.backend.order(Evict(TWO, WEIGHTS))
        await until(lambda: not rig.files(TWO))

    async def again(rig: Rig) -> None:
        await rig.join(ONE, TWO)
        found = {event.node.name: event.weights for event in rig.said(NodeReady)}
        assert found == {ONE: (WEIGHTS,), TWO: ()}
        rig.start(1, ONE)
        await until(lambda: bool(rig.said(WorkerReady)))

    play(tmp_path, with_checksum(store.url), scene)
    play(tmp_path, with_checksum(store.url), again)
    play(tmp_path / "elsewhere", with_checksum(store.url), scene)
    assert store.sent_bytes["/model.bin"] == 2 * len(CONTENT), "nothing for the second server"


def test_what_a_worker_uses_is_evicted_when_it_has_gone(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE)
        rig.start(1, ONE, rig.send(STORE, ONE))
        await until(lambda: bool(rig.said(WorkerReady)))
        rig.backend.order(Evict(ONE, WEIGHTS))
        rig.send(ONE, ONE)  # is answered after it
        await rig.over(ONE, transfer=1)
        assert rig.is_whole(ONE)
        rig.backend.order(Evict(ONE, WEIGHTS))
        rig.backend.order(StopWorker(ReplicaId(1), ""))
        await until(lambda: bool(rig.said(WorkerStopped)))
        await until(lambda: not rig.files(ONE))

    play(tmp_path, with_checksum(store.url), scene)


def test_what_is_not_kept_comes_for_each_start_and_goes_with_it(store: BadStore, tmp_path: Path) -> None:
    """The baseline of Flashpoint, section 2.12: a download for each replica, also on one node."""

    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO)
        for number in range(2):
            rig.start(number, ONE, rig.send(STORE, ONE, is_kept=False))
        rig.start(2, TWO, rig.send(STORE, TWO, is_kept=False))
        await until(lambda: len(rig.said(WorkerReady)) == 3)
        assert [len(rig.files(name)) for name in (ONE, TWO)] == [2, 1]
        for number in range(3):
            rig.backend.order(StopWorker(ReplicaId(number), ""))
        await until(lambda: not rig.files(ONE) + rig.files(TWO))

    play(tmp_path, with_checksum(store.url), scene)
    assert len(store.asked("/model.bin")) == 3


def test_receivers_of_what_is_not_kept_pass_it_on(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO)
        transfer = rig.send(STORE, ONE, TWO, is_kept=False)
        for number, name in enumerate((ONE, TWO)):
            rig.start(number, name, transfer)
        await until(lambda: len(rig.said(WorkerReady)) == 2)

    play(tmp_path, with_checksum(store.url), scene)
    assert len(store.asked("/model.bin")) == 1
    assert not list(tmp_path.glob("*/apart-*")), "an agent that ends leaves nothing of it"


def test_what_nobody_needs_any_more_is_deleted_and_the_chain_goes_on(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE, TWO, THREE)
        store.files["/model.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        transfer = rig.send(STORE, ONE, TWO, THREE, is_kept=False)
        rig.start(1, ONE, transfer)
        rig.start(3, THREE, transfer)
        await until(lambda: sum(file.stat().st_size for file in rig.files(THREE)) > HALF - 2 * peers.CHUNK_BYTES)
        rig.backend.order(CancelTransfer(transfer, TWO))
        await until(lambda: not rig.files(TWO))
        hold.set()
        await until(lambda: len(rig.said(WorkerReady)) == 2)
        assert {event.node for event in rig.said(Transferred)} == {ONE, THREE}
        assert not rig.said(TransferFailed, WorkerLost)
        rig.backend.order(CancelTransfer(transfer, ONE))  # it has come already

    play(tmp_path, with_checksum(store.url), scene)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


# What goes wrong

BROKEN: dict[str, tuple[Served, bytes, int, str]] = {
    "away": (Served(status=503), CONTENT, 10**9, "the store answers 503"),
    "no such file": (Served(status=404), CONTENT, 10**9, "the store has no such file"),
    "slow": (Served(CONTENT, stalls=HALF, ranges=False), CONTENT, 10**9, "no byte has come for 0.2 s"),
    "too short": (
        Served(CONTENT, announced=len(CONTENT) + 7),
        CONTENT,
        10**9,
        "the connection ended after 3,145,728 of",
    ),
    "too long": (Served(CONTENT, announced=HALF), CONTENT, 10**9, "the store sends more than"),
    "another model": (Served(CONTENT[::-1]), CONTENT, 10**9, "its SHA-256 is"),
    "too large for the cache": (Served(CONTENT), CONTENT, HALF, "may have"),
}


@pytest.mark.parametrize(("served", "content", "budget_bytes", "told"), BROKEN.values(), ids=BROKEN.keys())
def test_weights_that_do_not_come_cost_the_starts_that_wait_and_leave_nothing(
    store: BadStore, tmp_path: Path, served: Served, content: bytes, budget_bytes: int, told: str
) -> None:
    async def scene(rig: Rig) -> None:
        rig.budget_bytes = budget_bytes
        if served.stalls is not None:
            rig.patience = replace(QUICK, stall_s=0.2)
        await rig.join(ONE, TWO)
        store.files["/model.bin"] = served
        transfer = rig.send(STORE, ONE, TWO)
        rig.start(1, TWO, transfer)
        await until(lambda: len(rig.said(TransferFailed)) == 2 and bool(rig.said(WorkerLost)))
        assert all(told in event.error for event in rig.said(TransferFailed)), rig.said(TransferFailed)
        (lost,) = rig.said(WorkerLost)
        assert lost.error.startswith("its weights do not come: ")
        assert told in lost.error
        assert not rig.files(ONE) + rig.files(TWO), "nothing half-started is left"
        rig.start(2, TWO, transfer)
        await until(lambda: len(rig.said(WorkerLost)) == 2)
        store.files["/model.bin"] = replace(Served(CONTENT))
        if budget_bytes >= len(CONTENT):
            rig.send(STORE, ONE, TWO)
            await until(lambda: len(rig.said(Transferred)) == 2)

    play(tmp_path, with_checksum(store.url, content), scene)


def test_a_full_disk_is_named(store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    async def scene(rig: Rig) -> None:
        await rig.join(ONE)
        monkeypatch.setattr(os, "statvfs", full)
        rig.start(1, ONE, rig.send(STORE, ONE))
        await until(lambda: bool(rig.said(WorkerLost)))
        (failed,) = rig.said(TransferFailed)
        assert "no space left on the disk" in failed.error
        assert not rig.files(ONE)

    play(tmp_path, with_checksum(store.url), scene)
    assert not list(tmp_path.glob("*/*.part"))


def test_orders_for_nodes_that_have_gone_and_models_of_no_store(store: BadStore, tmp_path: Path) -> None:
    async def scene(rig: Rig) -> None:
        await rig.join(ONE)
        rig.send(STORE, TWO, ONE)
        await rig.over(ONE)
        unknown = ModelWeights("a file of the server", 1)
        rig.backend.order(Transfer(TransferId(5), unknown, STORE, (ONE,)))
        (failed,) = rig.said(TransferFailed)
        assert failed == TransferFailed(TransferId(5), ONE, "a file of the server comes from no store")
        rig.start(1, ONE, TransferId(5))
        await until(lambda: bool(rig.said(WorkerLost)))
        assert rig.said(WorkerLost)[0].error == "its weights do not come: nothing was ordered"

    play(tmp_path, with_checksum(store.url), scene)


def test_a_server_that_has_died_orders_nothing_for_the_next(store: BadStore, tmp_path: Path) -> None:
    """What it has ordered ends without being told, and the next one finds it."""

    async def scene(rig: Rig) -> None:
        await rig.join(ONE)
        store.files["/model.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        rig.send(STORE, ONE)
        await until(lambda: rig.part_bytes(ONE) > 0)
        rig.backend._agents[ONE].records.close()
        rig.backend._on_end(rig.backend._agents[ONE], "a test broke it")
        await until(lambda: len(rig.said(NodeReady)) == 2)
        hold.set()
        await until(lambda: rig.is_whole(ONE))
        transfer = rig.send(STORE, ONE)
        await rig.over(ONE, transfer=transfer)
        assert rig.said(Transferred) == [Transferred(transfer, ONE)]

    play(tmp_path, with_checksum(store.url), scene)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)
