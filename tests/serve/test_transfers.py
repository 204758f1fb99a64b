"""Ordered transfers of weights: the deciding process's side and real agents over loopback, each with a cache of its
own, and a store that is as bad as a test wants. Workers are ready as soon as their model is there."""

import contextlib
import hashlib
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sloop.actions import CancelTransfer, Evict, StartWorker, StopWorker, Transfer
from sloop.events import (
    NodeReady,
    TransferFailed,
    Transferred,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.serve.node.node import LiveNode, NodeWorker
from sloop.serve.protocols import Servable
from sloop.serve.weights import peers
from sloop.vocabulary import STORE, ModelWeights, ReplicaId, ReplicaSpec, Slot, TransferId
from tests.serve.agent_rig import ONE, QUICK, THREE, TWO, AgentRig, elsewhere
from tests.serve.bad_store import BadStore, Served
from tests.serve.rig import until
from tests.serve.test_local_backend import BYTES, Ear

__all__ = ["elsewhere"]  # a fixture
pytestmark = [pytest.mark.live, pytest.mark.usefixtures("elsewhere")]
CONTENT = random.Random(9).randbytes(3 << 20)
HALF = len(CONTENT) // 2
WEIGHTS = ModelWeights("the model", len(CONTENT))


@pytest.fixture
def store(store: BadStore) -> BadStore:
    store.files["/model.bin"] = Served(CONTENT)
    return store


@pytest.fixture(autouse=True)
def ready_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: LiveNode, worker: NodeWorker) -> None:
        assert Path(worker.servable.model).read_bytes() == CONTENT
        self._report(WorkerReady(worker.number))

    monkeypatch.setattr(LiveNode, "_launch", launch)


class Rig(AgentRig):
    """A rig of one model, which nothing runs: workers are ready as soon as it is there."""

    def __init__(self, folder: Path, url: str) -> None:
        echo = Servable("/not/here.bin", BYTES, source=url, weights=(WEIGHTS,))
        super().__init__(folder, {("stage", "echo"): echo}, Ear(), cores=0.1)

    def send(self, source: str, *receivers: str, is_kept: bool = True) -> TransferId:
        return self.transfer(WEIGHTS, source, receivers, is_kept=is_kept)

    def start(self, number: int, node: str, transfer: TransferId | None = None) -> None:
        self.backend.order(
            StartWorker(ReplicaId(number), ReplicaSpec("stage", "echo", Slot(0.1), node), transfer=transfer)
        )

    async def over(self, *nodes: str, transfer: int = 0) -> None:
        """These nodes have the weights."""
        wanted = {Transferred(TransferId(transfer), node) for node in nodes}
        await until(lambda: wanted <= set(self.said(Transferred)) or bool(self.said(TransferFailed)))
        assert wanted <= set(self.said(Transferred)), self.said(TransferFailed)

    def files(self, name: str) -> list[Path]:
        """All files of the model on a node, whole or not."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # a folder was deleted meanwhile, beside the agent's loop
                return [path for path in (self.folder / name).glob("**/files/*") if path.is_file()]

    def part_bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name).glob("*.part/files/*"))

    def is_whole(self, *names: str) -> bool:
        return all([file.read_bytes() for file in self.files(name)] == [CONTENT] for name in names)


def with_checksum(url: str, content: bytes = CONTENT) -> str:
    return f"{url}/model.bin#sha256={hashlib.sha256(content).hexdigest()}"


# Chains


async def test_a_chain_passes_on_what_it_receives_and_its_nodes_say_so(store: BadStore, tmp_path: Path) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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
        place = [type(event) for event in rig.said(object) if getattr(event, "node", TWO) in (TWO, "")]
        assert place.index(Transferred) < place.index(WorkerReady)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


async def test_weights_come_from_a_node_that_has_them(store: BadStore, tmp_path: Path) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
        await rig.join(ONE, TWO, THREE)
        rig.send(STORE, ONE)
        await rig.over(ONE)
        store.files["/model.bin"] = Served(status=500)
        rig.send(ONE, TWO, THREE)
        await rig.over(TWO, THREE, transfer=1)
        assert rig.is_whole(TWO, THREE)
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


async def test_when_a_receiver_dies_those_behind_it_go_on_at_the_byte_where_they_stand(
    store: BadStore, tmp_path: Path, asked: list[int]
) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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
    assert store.sent_bytes["/model.bin"] == len(CONTENT)


async def test_when_the_source_dies_the_store_goes_on(store: BadStore, tmp_path: Path) -> None:
    """Flashpoint specification, acceptance check 23."""
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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


async def test_a_copy_that_differs_is_not_taken(store: BadStore, tmp_path: Path, asked: list[int]) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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


async def test_eight_starts_on_a_node_wait_for_one_transfer(store: BadStore, tmp_path: Path) -> None:
    """Flashpoint specification, acceptance check 9."""
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
        await rig.join(ONE)
        transfer = rig.send(STORE, ONE)
        for number in range(7):
            rig.start(number, ONE, transfer)
        await until(lambda: len(rig.said(WorkerReady)) == 7)
        rig.start(7, ONE, transfer)  # the core did not know yet that it is over
        await until(lambda: len(rig.said(WorkerReady)) == 8)
    assert len(store.asked("/model.bin")) == 1


# What stays


async def test_a_node_says_what_it_has_and_forgets_what_is_evicted(store: BadStore, tmp_path: Path) -> None:
    async def evicted(folder: Path) -> None:
        async with Rig(folder, with_checksum(store.url)) as rig:
            await rig.join(ONE, TWO)
            assert [event.weights for event in rig.said(NodeReady)] == [(), ()]
            rig.send(STORE, ONE, TWO)
            await rig.over(ONE, TWO)
            rig.backend.order(Evict(TWO, WEIGHTS))
            await until(lambda: not rig.files(TWO))

    await evicted(tmp_path)
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
        await rig.join(ONE, TWO)
        found = {event.node.name: event.weights for event in rig.said(NodeReady)}
        assert found == {ONE: (WEIGHTS,), TWO: ()}
        rig.start(1, ONE)
        await until(lambda: bool(rig.said(WorkerReady)))
    await evicted(tmp_path / "elsewhere")
    assert store.sent_bytes["/model.bin"] == 2 * len(CONTENT), "nothing for the second server"


async def test_what_a_worker_uses_is_evicted_when_it_has_gone(store: BadStore, tmp_path: Path) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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


async def test_what_is_not_kept_comes_for_each_start_and_goes_with_it(store: BadStore, tmp_path: Path) -> None:
    """The baseline of Flashpoint, section 2.12: a download for each replica, also on one node."""
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
        await rig.join(ONE, TWO)
        for number in range(2):
            rig.start(number, ONE, rig.send(STORE, ONE, is_kept=False))
        rig.start(2, TWO, rig.send(STORE, TWO, is_kept=False))
        await until(lambda: len(rig.said(WorkerReady)) == 3)
        assert [len(rig.files(name)) for name in (ONE, TWO)] == [2, 1]
        for number in range(3):
            rig.backend.order(StopWorker(ReplicaId(number), ""))
        await until(lambda: not rig.files(ONE) + rig.files(TWO))
    assert len(store.asked("/model.bin")) == 3


async def test_receivers_of_what_is_not_kept_pass_it_on(store: BadStore, tmp_path: Path) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
        await rig.join(ONE, TWO)
        transfer = rig.send(STORE, ONE, TWO, is_kept=False)
        for number, name in enumerate((ONE, TWO)):
            rig.start(number, name, transfer)
        await until(lambda: len(rig.said(WorkerReady)) == 2)
    assert len(store.asked("/model.bin")) == 1
    assert not list(tmp_path.glob("*/apart-*")), "an agent that ends leaves nothing of it"


async def test_what_nobody_needs_any_more_is_deleted_and_the_chain_goes_on(store: BadStore, tmp_path: Path) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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
async def test_weights_that_do_not_come_cost_the_starts_that_wait_and_leave_nothing(
    store: BadStore, tmp_path: Path, served: Served, content: bytes, budget_bytes: int, told: str
) -> None:
    async with Rig(tmp_path, with_checksum(store.url, content)) as rig:
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


async def test_a_full_disk_is_named(store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    def full(path: Any) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 0  # f_bavail
        return os.statvfs_result(found)

    async with Rig(tmp_path, with_checksum(store.url)) as rig:
        await rig.join(ONE)
        monkeypatch.setattr(os, "statvfs", full)
        rig.start(1, ONE, rig.send(STORE, ONE))
        await until(lambda: bool(rig.said(WorkerLost)))
        (failed,) = rig.said(TransferFailed)
        assert "no space left on the disk" in failed.error
        assert not rig.files(ONE)
    assert not list(tmp_path.glob("*/*.part"))


async def test_orders_for_nodes_that_have_gone_and_models_of_no_store(store: BadStore, tmp_path: Path) -> None:
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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


async def test_a_server_that_has_died_orders_nothing_for_the_next(store: BadStore, tmp_path: Path) -> None:
    """What it has ordered ends without being told, and the next one finds it."""
    async with Rig(tmp_path, with_checksum(store.url)) as rig:
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
    assert store.sent_bytes["/model.bin"] == len(CONTENT)
