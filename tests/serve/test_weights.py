"""The cache of models against a store over real sockets, against other processes, and against a model of itself."""

import asyncio
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Evict, StartWorker, StopWorker
from sloop.app.load import load_application
from sloop.errors import InputError, MachineError, SloopError
from sloop.events import WorkerLost, WorkerProgressed, WorkerReady, WorkerStopped
from sloop.serve.cluster.agent import AgentSession, AgentSetup, LearnStages, NodeOrder
from sloop.serve.control.servables import servables_of
from sloop.serve.copies import IN_CACHE, collect
from sloop.serve.messages import Report
from sloop.serve.network import BlockClient
from sloop.serve.protocols import Servable
from sloop.serve.weights import folder as kept
from sloop.serve.weights import transfer
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.folder import (
    ENTRY,
    FILES,
    GONE,
    CachedModel,
    EntryRecord,
    FileRecord,
    ModelFolder,
    TransferState,
    source_of,
)
from sloop.serve.weights.sources import FolderStore, ModelSource, Patience, StoredFile, StoreError, Watch
from sloop.tensor import Port, Signature
from sloop.vocabulary import ModelWeights, ReplicaId, ReplicaSpec, Slot
from tests.onnx_graphs import onnx_model
from tests.serve.bad_store import BadStore, Served
from tests.serve.rig import until, wirings_of

pytestmark = pytest.mark.live
CONTENT = bytes(range(256)) * 1000
OTHER = CONTENT[::-1]
QUICK = Patience(connect_s=2, stall_s=0.3, least_bytes_s=1000, tries=3, pause_s=0.001, hang_s=20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@asynccontextmanager
async def caching(folder: Path, budget_bytes: int = 10**9, **options: Any) -> AsyncIterator[WeightsCache]:
    cache = WeightsCache(folder, budget_bytes, **({"patience": QUICK} | options))
    try:
        yield cache
    finally:
        await cache.close()


def fetched(folder: Path, text: str, budget_bytes: int = 10**9, **options: Any) -> Path:
    """What a new cache fetches."""

    async def fetch() -> Path:
        async with caching(folder, budget_bytes, **options) as cache:
            return await cache.fetch(ModelSource.of(text))

    return asyncio.run(fetch())


def refused(folder: Path, text: str, budget_bytes: int = 10**9, **options: Any) -> SloopError:
    """The error when a new cache fetches; it says what to do, and leaves nothing that looks like a model."""
    with pytest.raises(SloopError) as raised:
        fetched(folder, text, budget_bytes, **options)
    assert raised.value.help
    assert not list(folder.glob(f"*/{ENTRY}"))
    return raised.value


def sum_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left_in(folder: Path) -> list[str]:
    """The names of models and transfers in a cache."""
    return sorted(path.name for path in folder.iterdir() if path.name != "locks")


# What is fetched, and when it is fetched again


def test_a_file_is_fetched_once_and_again_when_it_changes(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    first = fetched(folder, f"{store.url}/m.bin")
    assert (first.name, first.read_bytes()) == ("m.bin", CONTENT)
    assert fetched(folder, f"{store.url}/m.bin") == first
    assert store.sent_bytes["/m.bin"] == len(CONTENT)
    store.files["/m.bin"] = Served(OTHER)
    second = fetched(folder, f"{store.url}/m.bin")
    assert second.read_bytes() == OTHER
    assert first.read_bytes() == CONTENT  # somebody may still load it
    store.files["/m.bin"] = Served(CONTENT)
    assert fetched(folder, f"{store.url}/m.bin") == first
    assert store.sent_bytes["/m.bin"] <= 2 * len(CONTENT) + 2  # the first byte of a new version tells which it is


def test_a_checksum_in_the_url_needs_no_store(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    url = f"{store.url}/m.bin#sha256={sum_of(CONTENT)}"
    path = fetched(folder, url)
    assert [where for where, _ in store.requests] == ["/m.bin"]
    store.requests.clear()
    assert fetched(folder, url) == path
    assert not store.requests
    error = str(refused(folder.with_name("new"), f"{store.url}/m.bin#sha256={sum_of(OTHER)}"))
    assert f"its SHA-256 is {sum_of(CONTENT)}, expected is {sum_of(OTHER)}; it was removed" in error
    assert left_in(folder.with_name("new")) == []


@pytest.mark.parametrize(
    "manifest",
    [
        f"{sum_of(CONTENT)}\n",
        f"{sum_of(CONTENT)}  m.bin\n",
        f"{sum_of(CONTENT).upper()} *build/m.bin\n",
        f"{sum_of(OTHER)}  n.bin\n{sum_of(CONTENT)}  ./m.bin\n\n",
    ],
)
def test_manifests(store: BadStore, folder: Path, manifest: str) -> None:
    store.files |= {"/m.bin": Served(CONTENT, etag=""), "/m.bin.sha256": Served(manifest.encode())}
    path = fetched(folder, f"{store.url}/m.bin")
    assert fetched(folder, f"{store.url}/m.bin") == path
    assert store.sent_bytes["/m.bin"] == len(CONTENT)
    store.files["/m.bin"] = Served(OTHER)
    assert fetched(folder, f"{store.url}/m.bin") == path  # the manifest says which version is meant
    store.files["/m.bin.sha256"] = Served(sum_of(b"third").encode())
    with pytest.raises(InputError, match=f"expected is {sum_of(b'third')}"):
        fetched(folder, f"{store.url}/m.bin")


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        (b"nonsense", "not a list of SHA-256 checksums: 'nonsense'"),
        (b"\xff\xfe", "not a list of SHA-256 checksums"),
        (f"{sum_of(OTHER)}  n.bin".encode(), "no checksum of 'm.bin'"),
        (f"{sum_of(OTHER)}  a\n{sum_of(OTHER)}  b".encode(), "no checksum of 'm.bin'"),
        (b"", "no checksum of 'm.bin'"),
        (f"{sum_of(OTHER)}  n.bin\n".encode() * 20_000, "not a list of SHA-256 checksums"),
    ],
)
def test_manifests_that_are_wrong(store: BadStore, folder: Path, manifest: bytes, says: str) -> None:
    store.files |= {"/m.bin": Served(CONTENT), "/m.bin.sha256": Served(manifest)}
    error = str(refused(folder, f"{store.url}/m.bin"))
    assert says in error
    assert "m.bin.sha256" in error


@pytest.mark.parametrize("served", [Served(status=403), Served(b"<html>", headers={"Content-Type": "text/html"})])
def test_stores_that_say_otherwise_that_there_is_no_manifest(store: BadStore, folder: Path, served: Served) -> None:
    store.files |= {"/m.bin": Served(CONTENT), "/m.bin.sha256": served}
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT


def test_versions_without_validator_are_read_again(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, etag="")
    path = fetched(folder, f"{store.url}/m.bin")
    assert fetched(folder, f"{store.url}/m.bin") == path
    assert store.sent_bytes["/m.bin"] >= 2 * len(CONTENT)
    assert len(left_in(folder)) == 1


def test_a_shared_folder(folder: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared" / "m.bin"
    shared.parent.mkdir()
    shared.write_bytes(CONTENT)
    path = fetched(folder, str(shared))
    assert path.read_bytes() == CONTENT
    assert fetched(folder, shared.as_uri()) == path
    shared.write_bytes(OTHER + b"!")
    assert fetched(folder, str(shared)).read_bytes() == OTHER + b"!"
    (tmp_path / "shared" / "m.bin.sha256").write_text(sum_of(CONTENT))
    assert fetched(folder, str(shared)) == path
    shared.unlink()
    with pytest.raises(StoreError, match="no such file"):
        fetched(folder, f"{shared}#sha256={sum_of(b'')}")


def test_a_store_that_is_away_leaves_the_copy(store: BadStore, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    path = fetched(folder, f"{store.url}/m.bin")
    store.files["/m.bin"] = store.files["/m.bin.sha256"] = Served(status=503)
    with caplog.at_level(logging.WARNING, "sloop.weights"):
        assert fetched(folder, f"{store.url}/m.bin") == path
    assert "answers 503" in caplog.text
    assert "its copy in the cache is used" in caplog.text
    store.files["/m.bin"] = store.files["/m.bin.sha256"] = Served(status=404)
    with pytest.raises(StoreError, match="no such file"):
        fetched(folder, f"{store.url}/m.bin")


# Files of weights


def split_model(folder: Path, location: str = "w.bin", value: float = 1.0) -> Path:
    """A model whose weights lie in `location`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {"w": np.full(600, value, np.float32)}
    model = onnx_model("(float[600] x) => (float[600] y) { y = Add(x, w) }", weights)
    path = folder / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin")
    if location != "w.bin":
        content = onnx.load(str(path), load_external_data=False)
        for entry in content.graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = location
        path.write_bytes(content.SerializeToString())
    return path


def put(store: BadStore, path: Path, at: str = "w.bin") -> None:
    store.files["/models/m.onnx"] = Served(path.read_bytes())
    store.files[f"/models/{at}"] = Served((path.parent / "w.bin").read_bytes())


@pytest.mark.parametrize("name", ["w.bin", "sub/w 1.bin", "./w.bin"])
def test_weights_in_other_files_are_fetched_too(store: BadStore, folder: Path, tmp_path: Path, name: str) -> None:
    made = split_model(tmp_path / "made", name)
    put(store, made, name.removeprefix("./").replace(" ", "%20"))
    path = fetched(folder, f"{store.url}/models/m.onnx")
    assert path.read_bytes() == made.read_bytes()
    assert (path.parent / name).read_bytes() == (made.parent / "w.bin").read_bytes()
    sent = dict(store.sent_bytes)
    assert fetched(folder, f"{store.url}/models/m.onnx") == path
    assert store.sent_bytes["/models/m.onnx"] == sent["/models/m.onnx"]


def test_new_weights_for_the_same_graph_are_noticed(store: BadStore, folder: Path, tmp_path: Path) -> None:
    put(store, split_model(tmp_path / "a", value=1.0))
    own = sum_of(store.files["/models/m.onnx"].content)
    first = fetched(folder, f"{store.url}/models/m.onnx#sha256={own}")
    put(store, split_model(tmp_path / "b", value=2.0))
    assert sum_of(store.files["/models/m.onnx"].content) == own
    second = fetched(folder, f"{store.url}/models/m.onnx#sha256={own}")
    assert (first.parent / "w.bin").read_bytes() != (second.parent / "w.bin").read_bytes()


def test_a_manifest_covers_the_weights(store: BadStore, folder: Path, tmp_path: Path) -> None:
    made = split_model(tmp_path / "made")
    put(store, made)
    sums = [f"{sum_of(path.read_bytes())}  {path.name}" for path in (made, made.parent / "w.bin")]
    store.files["/models/m.onnx.sha256"] = Served("\n".join(sums).encode())
    store.files["/models/w.bin"] = Served(b"x" + store.files["/models/w.bin"].content[1:])
    error = str(refused(folder, f"{store.url}/models/m.onnx"))
    assert "/models/w.bin: its SHA-256 is" in error
    put(store, made)
    fetched(folder, f"{store.url}/models/m.onnx")


@pytest.mark.parametrize("name", ["../w.bin", "/etc/passwd", "a/../../w.bin", "a\\w.bin", "x\n", ".", "a" * 300])
def test_weights_outside_the_folder_are_refused(store: BadStore, folder: Path, tmp_path: Path, name: str) -> None:
    store.files["/models/m.onnx"] = Served(split_model(tmp_path / "made", name).read_bytes())
    error = refused(folder, f"{store.url}/models/m.onnx")
    assert "is not in the folder of the model" in str(error)
    assert left_in(folder) == []


@pytest.mark.parametrize(
    "content", [b"location of nothing", b"", b"<html>log in</html>", b"\x08\x08", b"\x08\x08:\x05a"]
)
def test_what_is_no_onnx_model(store: BadStore, folder: Path, content: bytes) -> None:
    """A page of the store, a model without a graph, one whose graph is truncated."""
    store.files["/m.onnx"] = Served(content)
    assert "it is not an ONNX model" in str(refused(folder, f"{store.url}/m.onnx"))


def test_weights_that_are_missing(store: BadStore, folder: Path, tmp_path: Path) -> None:
    store.files["/models/m.onnx"] = Served(split_model(tmp_path / "made").read_bytes())
    assert "/models/w.bin: the store has no such file" in str(refused(folder, f"{store.url}/models/m.onnx"))


def test_files_that_change_while_others_are_fetched(
    store: BadStore, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gets a new model after the graph and before the weights were fetched: the graph is fetched again."""
    made = split_model(tmp_path / "made")
    put(store, made)
    new = onnx.load(str(made), load_external_data=False)
    new.doc_string = "new"
    before, changes = store._answer, [1]

    def answer(connection: Any, path: str, *rest: Any) -> None:
        if path == "/models/w.bin" and changes:
            changes.pop()
            store.files["/models/m.onnx"] = Served(new.SerializeToString())
        before(connection, path, *rest)

    monkeypatch.setattr(store, "_answer", answer)
    path = fetched(folder, f"{store.url}/models/m.onnx")
    assert onnx.load(str(path)).doc_string == "new"
    assert left_in(folder) == [path.parent.parent.name]


# Transfers that break off


def test_what_broke_off_is_resumed(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, drops=[100_000, 100_000])
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT
    assert [headers.get("range") for headers in store.asked("/m.bin")] == [None, "bytes=100000-", "bytes=200000-"]
    assert store.sent_bytes["/m.bin"] == len(CONTENT)


def test_without_ranges_it_begins_again(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, drops=[100_000, 50_000], ranges=False)
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT
    assert store.sent_bytes["/m.bin"] == len(CONTENT) + 150_000


def test_a_new_version_in_between_begins_again(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, drops=[100_000] * 9, ranges=False)
    assert "the connection ended after 100,000 of 256,000 bytes" in str(refused(folder, f"{store.url}/m.bin"))
    store.files["/m.bin"] = Served(OTHER)
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == OTHER
    assert store.asked("/m.bin")[-1]["range"] == "bytes=100000-"


def test_weak_versions_are_not_resumed(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, etag='W/"a"', drops=[100_000])
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT
    assert all("range" not in headers for headers in store.asked("/m.bin"))


def test_resumed_parts_that_do_not_fit_together(store: BadStore, folder: Path) -> None:
    """The store gives two contents the same version: the checksum tells, and the file is fetched from its start."""
    store.files["/m.bin"] = Served(CONTENT, etag='"same"', drops=[100_000] * 3, ranges=False)
    url = f"{store.url}/m.bin#sha256={sum_of(OTHER)}"
    refused(folder, url)
    store.files["/m.bin"] = Served(OTHER, etag='"same"')
    assert fetched(folder, url).read_bytes() == OTHER


def test_a_length_that_changes_within_a_version(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, etag='"same"', drops=[100_000] * 3, ranges=False)
    refused(folder, f"{store.url}/m.bin")
    store.files["/m.bin"] = Served(OTHER[:-1], etag='"same"')
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == OTHER[:-1]


def test_files_of_another_boot_are_not_resumed(store: BadStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.files["/m.bin"] = Served(CONTENT, drops=[100_000] * 3, ranges=False)
    refused(folder, f"{store.url}/m.bin")
    monkeypatch.setattr(kept, "_boot", lambda: "another")
    store.files["/m.bin"] = Served(CONTENT)
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT
    assert "range" not in store.asked("/m.bin")[-1]


def test_a_whole_file_that_was_not_yet_a_model(store: BadStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ended after the last byte."""
    store.files["/m.bin"] = Served(CONTENT)
    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder, "commit", lambda *_: (_ for _ in ()).throw(RuntimeError))
        with pytest.raises(RuntimeError):
            fetched(folder, f"{store.url}/m.bin")
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT
    assert store.sent_bytes["/m.bin"] == len(CONTENT)


def test_a_process_that_ends_before_a_new_version_comes(
    store: BadStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older version has left must not pass for the beginning of the new one."""
    store.files["/m.bin"] = Served(CONTENT, drops=[100_000] * 3, ranges=False)
    refused(folder, f"{store.url}/m.bin")
    store.files["/m.bin"] = Served(OTHER)
    reserve = ModelFolder.reserve

    def ends(*arguments: Any) -> None:
        reserve(*arguments)
        raise RuntimeError

    with monkeypatch.context() as broken:
        broken.setattr(ModelFolder, "reserve", ends)
        with pytest.raises(RuntimeError):
            fetched(folder, f"{store.url}/m.bin")
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == OTHER


@pytest.mark.parametrize(
    ("served", "says"),
    [
        (Served(CONTENT, announced=len(CONTENT) + 5), "the connection ended after 256,000 of 256,005 bytes"),
        (Served(CONTENT, announced=len(CONTENT) + 5, ranges=False), "ended after 256,000 of 256,005 bytes"),
        (Served(CONTENT, announced=len(CONTENT) - 5), "sends more than the 255,995 bytes that it announces"),
        (Served(CONTENT, beyond=b"!"), "sends more than the 256,000 bytes that it announces"),
        (Served(CONTENT, announced=-1), "does not announce its length"),
        (Served(CONTENT, stalls=1000, ranges=False), "no byte has come for 0.3 s"),
        (Served(CONTENT, status=503), "answers 503"),
        (Served(CONTENT, status=404), "no such file"),
    ],
)
def test_stores_that_lie_or_fail(store: BadStore, folder: Path, served: Served, says: str) -> None:
    store.files["/m.bin"] = served
    error = str(refused(folder, f"{store.url}/m.bin"))
    assert says in error
    assert f"{store.url}/m.bin" in error


def test_a_checksum_makes_up_for_a_missing_length(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, announced=-1)
    assert fetched(folder, f"{store.url}/m.bin#sha256={sum_of(CONTENT)}").read_bytes() == CONTENT


def test_tries_are_bounded_and_progress_renews_them(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(b"x" * 1_000_000, drops=[100_000] * 8)
    fetched(folder, f"{store.url}/m.bin")
    store.files["/n.bin"] = Served(b"x" * 1_000_000, drops=[10] * 100)
    refused(folder.with_name("other"), f"{store.url}/n.bin")
    assert len(store.asked("/n.bin")) == QUICK.tries


# Many callers


async def test_callers_of_the_same_file_share_a_transfer(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = served = Served(CONTENT, hold=threading.Event())
    source = ModelSource.of(f"{store.url}/m.bin")
    reports: list[tuple[int, int | None]] = []
    async with caching(folder) as cache:
        callers = [asyncio.create_task(cache.fetch(source, lambda *now: reports.append(now))) for _ in range(20)]
        await until(lambda: store.sent_bytes.get("/m.bin", 0) > 0)
        for caller in callers[:19]:
            caller.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError)
            for each in await asyncio.gather(*callers[:19], return_exceptions=True)
        )
        assert served.hold is not None
        served.hold.set()
        assert (await callers[19]).read_bytes() == CONTENT
    assert len(store.asked("/m.bin")) == 1
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


async def test_the_last_caller_that_is_cancelled_ends_the_transfer(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = served = Served(CONTENT, hold=threading.Event())
    source = ModelSource.of(f"{store.url}/m.bin")
    async with caching(folder) as cache:
        callers = [asyncio.create_task(cache.fetch(source)) for _ in range(3)]
        await until(lambda: any(size > 100_000 for size in map(transfer._size, folder.glob("*.part/files/m.bin"))))
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await until(lambda: not cache._running)
        assert [name for name in left_in(folder) if name.endswith(".part")]
        store.files["/m.bin"] = replace(served, hold=None)
        assert (await cache.fetch(source)).read_bytes() == CONTENT
    assert "range" in store.asked("/m.bin")[-1]
    assert len(left_in(folder)) == 1


async def test_an_error_reaches_every_caller(store: BadStore, folder: Path) -> None:
    async with caching(folder) as cache:
        source = ModelSource.of(f"{store.url}/m.bin")
        results = await asyncio.gather(*(cache.fetch(source, pin=True) for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in results] == [StoreError] * 3
        store.files["/m.bin"] = Served(CONTENT)
        assert (await cache.fetch(source)).read_bytes() == CONTENT
    assert len(store.asked("/m.bin")) == 2


async def test_transfers_at_the_same_time_are_bounded(store: BadStore, folder: Path) -> None:
    hold = threading.Event()
    for number in range(5):
        store.files[f"/{number}.bin"] = Served(CONTENT + bytes([number]), hold=hold)

    def begun() -> list[str]:
        return [path for path in store.sent_bytes if path.endswith(".bin")]

    async with caching(folder, transfers_max=2) as cache:
        sources = [ModelSource.of(f"{store.url}/{number}.bin") for number in range(5)]
        callers = [asyncio.create_task(cache.fetch(source)) for source in sources]
        await until(lambda: len(begun()) == 2)
        callers[4].cancel()
        await asyncio.sleep(0.05)
        assert len(begun()) == 2
        hold.set()
        paths = await asyncio.gather(*callers[:4])
        assert [path.read_bytes()[-1] for path in paths] == [0, 1, 2, 3]
    assert "/4.bin" not in store.sent_bytes


class SilentStore(FolderStore):
    """A shared folder whose server is away: the operating system never answers."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def open(self, file: StoredFile, watch: Watch, *, start: int = 0, version: str = "") -> Any:
        with watch.asking():
            self.answers.wait(20)
        return super().open(file, watch, start=start, version=version)


async def test_an_operating_system_that_does_not_answer(folder: Path, tmp_path: Path) -> None:
    silent = SilentStore()
    async with caching(folder, stores={"file": silent}, patience=replace(QUICK, hang_s=0.2)) as cache:
        source = ModelSource.of(str(tmp_path / "m.bin"))
        with pytest.raises(MachineError, match=r"has not answered for 0\.2 s"):
            await cache.fetch(source)
        caller = asyncio.create_task(cache.fetch(source))
        await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    silent.answers.set()


async def test_close_ends_what_is_under_way(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, stalls=1000)
    async with caching(folder, patience=replace(QUICK, stall_s=50)) as cache:
        caller = asyncio.create_task(cache.fetch(ModelSource.of(f"{store.url}/m.bin")))
        await until(lambda: bool(store.sent_bytes))
        await cache.close()
        with pytest.raises(asyncio.CancelledError):
            await caller


# Room


def test_what_can_have_no_room_is_not_fetched(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, hold=threading.Event())
    error = str(refused(folder, f"{store.url}/m.bin", budget_bytes=255_999))
    assert "/m.bin has at least 256,000 bytes; the cache of models in" in error
    assert "may have 255,999" in error
    assert left_in(folder) == []
    store.files["/m.bin"] = Served(CONTENT, chunked=True)
    assert "has at least" in str(refused(folder, f"{store.url}/m.bin", budget_bytes=255_999))
    assert left_in(folder) == []
    assert fetched(folder, f"{store.url}/m.bin", budget_bytes=256_000).read_bytes() == CONTENT


async def test_models_in_use_stay(store: BadStore, folder: Path) -> None:
    for name in "abc":
        store.files[f"/{name}.bin"] = Served(CONTENT + name.encode())
    async with caching(folder, budget_bytes=600_000) as cache:
        a = await cache.fetch(ModelSource.of(f"{store.url}/a.bin"), pin=True)
        b = await cache.fetch(ModelSource.of(f"{store.url}/b.bin"))
        cache.acquire(b)
        with pytest.raises(MachineError, match="of which 512,002 are in use"):
            await cache.fetch(ModelSource.of(f"{store.url}/c.bin"))
        cache.release(b)
        assert a.exists()
        assert b.exists()
        c = await cache.fetch(ModelSource.of(f"{store.url}/c.bin"))
        assert a.exists()
        assert not b.exists()
        with pytest.raises(InputError, match="no longer in the cache"):
            cache.acquire(b)
        cache.release(a)
        await cache.fetch(ModelSource.of(f"{store.url}/b.bin"))
        assert c.exists() is False or a.exists() is False
        with pytest.raises(InputError, match="not in the cache of models"):
            cache.acquire(folder)


async def test_a_model_is_pinned_as_often_as_it_was_asked_for(store: BadStore, folder: Path) -> None:
    store.files["/a.bin"], store.files["/b.bin"] = Served(CONTENT), Served(OTHER)
    async with caching(folder, budget_bytes=300_000) as cache:
        source = ModelSource.of(f"{store.url}/a.bin")
        cancelled = asyncio.create_task(cache.fetch(source, pin=True))
        paths = asyncio.gather(*(cache.fetch(source, pin=True) for _ in range(2)))
        await asyncio.sleep(0)
        cancelled.cancel()
        path, again = await paths
        assert path == again
        for _ in range(2):
            with pytest.raises(MachineError, match="in use"):
                await cache.fetch(ModelSource.of(f"{store.url}/b.bin"))
            cache.release(path)
        await cache.fetch(ModelSource.of(f"{store.url}/b.bin"))
        assert not path.exists()


def test_a_full_disk(store: BadStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the disk says so before or while a file is written."""
    store.files["/m.bin"] = Served(CONTENT)
    with monkeypatch.context() as full:
        disk = os.statvfs_result((4096, 4096, 10, 10, 10, 10, 10, 10, 0, 255))
        full.setattr(os, "statvfs", lambda _: disk)
        error = refused(folder, f"{store.url}/m.bin")
    assert isinstance(error, MachineError)
    assert "no space left on the disk of" in str(error)
    assert "needs 256,000 bytes more" in str(error)
    assert left_in(folder) == []

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        error = refused(folder, f"{store.url}/m.bin")
    assert "no space left on the disk of" in str(error)
    assert left_in(folder) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB, in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_really_is_full(store: BadStore, small_disk: Path) -> None:
    store.files["/m.bin"] = Served(bytes(2 << 20))
    assert "no space left on the disk" in str(refused(small_disk / "cache", f"{store.url}/m.bin"))
    store.files["/m.bin"] = Served(bytes(2 << 20), chunked=True)
    assert "no space left on the disk" in str(refused(small_disk / "cache", f"{store.url}/m.bin"))
    assert left_in(small_disk / "cache") == []
    store.files["/m.bin"] = Served(CONTENT)
    assert fetched(small_disk / "cache", f"{store.url}/m.bin").read_bytes() == CONTENT


async def test_a_cache_apart_is_deleted_by_its_owner_or_after_its_death(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    source = ModelSource.of(f"{store.url}/m.bin")
    async with caching(folder) as cache:
        one, other = cache.apart(), cache.apart()
        shared = await cache.fetch(source)
        copies = [await each.fetch(source) for each in (one, other)]
        assert len({shared, *copies}) == 3
        cache.models.prepare()  # as another process does
        assert all(copy.exists() for copy in copies)
        await one.remove()
        assert [copy.exists() for copy in copies] == [False, True]
        assert other._owner is not None
        os.close(other._owner)  # as the end of its process does
        cache.models.prepare()
        assert [path.exists() for path in (copies[1], shared)] == [False, True]
        await other.close()
    assert store.sent_bytes["/m.bin"] == 3 * len(CONTENT)


async def test_evicted_models_go_when_nobody_uses_them(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    source = ModelSource.of(f"{store.url}/m.bin")
    async with caching(folder) as cache:
        path = await cache.fetch(source, pin=True)
        await cache.evict(source)
        assert path.exists()
        cache.acquire(path)  # somebody wants it again
        cache.release(path)
        cache.release(path)
        assert path.exists()
        await cache.evict(replace(source, sha256=sum_of(OTHER)))
        assert path.exists(), "another version was meant"
        cache.acquire(path)
        await cache.evict(source)
        cache.release(path)
        await until(lambda: not left_in(folder))
        await cache.evict(source)


async def test_what_is_apart_is_of_the_same_budget(store: BadStore, folder: Path) -> None:
    for name in ("/a.bin", "/b.bin", "/c.bin"):
        store.files[name] = Served(CONTENT)
    a, b, c = (ModelSource.of(f"{store.url}/{name}.bin") for name in "abc")
    budget = 2 * len(CONTENT) + 10
    async with caching(folder, budget) as cache:
        one, other = cache.apart(), cache.apart()
        unused = await cache.fetch(a)
        for each in (one, other):
            await each.fetch(b)
            assert cache.models.used_bytes() <= budget
        assert not unused.exists(), "it made room"
        for each in (cache, other, cache.apart()):
            with pytest.raises(MachineError, match=f"of which {2 * len(CONTENT):,} are in use"):
                await each.fetch(c)
        await one.remove()
        await cache.fetch(c)
        assert cache.models.used_bytes() == 2 * len(CONTENT)
        await other.remove()


async def test_what_an_interrupted_transfer_has_left_is_discarded(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT, stalls=1000, ranges=False)
    source = ModelSource.of(f"{store.url}/m.bin")
    async with caching(folder) as cache:
        with pytest.raises(MachineError):
            await cache.fetch(source)
        assert left_in(folder), "another try may go on there"
        await cache.discard(source)
        assert not left_in(folder)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match="cannot be kept in"):
        ModelFolder(tmp_path / "file" / "cache", 1).prepare()


async def test_a_folder_that_goes(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)

    def replace_by_file() -> None:
        shutil.rmtree(folder)
        folder.touch()

    async with caching(folder) as cache:
        replace_by_file()
        with pytest.raises(MachineError, match="cannot be kept in"):
            await cache.fetch(ModelSource.of(f"{store.url}/m.bin"))


def test_a_model_that_goes_while_it_is_pinned(store: BadStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process deletes it after its file was opened, and before it was locked."""
    store.files["/m.bin"] = Served(CONTENT)
    model = fetched(folder, f"{store.url}/m.bin").parents[1]
    shelf = ModelFolder(folder, 10**9)
    with monkeypatch.context() as racing:
        racing.setattr(fcntl, "flock", lambda *_: model.rename(folder / "gone"))
        assert shelf.pin(model) is None
    assert not shelf.models()


def test_damaged_models_are_fetched_again(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    path = fetched(folder, f"{store.url}/m.bin")
    for damage in (
        lambda: os.truncate(path, 5),
        path.unlink,
        lambda: (path.parents[1] / ENTRY).write_text("{"),
    ):
        damage()
        assert fetched(folder, f"{store.url}/m.bin") == path
        assert path.read_bytes() == CONTENT
    assert len(left_in(folder)) == 1


def test_what_a_crash_left_goes(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    path = fetched(folder, f"{store.url}/m.bin")
    (path.parents[1]).rename(folder / f"half{GONE}")
    ModelFolder(folder, 10).prepare()
    assert left_in(folder) == []


def test_what_broke_off_goes_first(store: BadStore, folder: Path) -> None:
    store.files["/a.bin"] = Served(CONTENT)
    fetched(folder, f"{store.url}/a.bin")
    store.files["/b.bin"] = Served(CONTENT, drops=[100_000] * 3, ranges=False)
    with pytest.raises(MachineError):
        fetched(folder, f"{store.url}/b.bin")
    assert len(left_in(folder)) == 2
    store.files["/c.bin"] = Served(OTHER)
    fetched(folder, f"{store.url}/c.bin", budget_bytes=600_000)
    assert sorted(name[0] for name in left_in(folder)) == ["a", "c"]


# Several processes

CHILD = """
import asyncio, sys, time
from pathlib import Path
from sloop.serve.weights.sources import ModelSource
from sloop.serve.weights.cache import WeightsCache

async def main():
    cache = WeightsCache(Path(sys.argv[1]), 600_000)
    print("begins", flush=True)
    path = await cache.fetch(ModelSource.of(sys.argv[2]), pin=True)
    print(path, flush=True)
    sys.stdin.readline()
    await cache.close()

asyncio.run(main())
"""


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a process that fetches a model, prints its path, and uses it until a line comes."""
    started: list[subprocess.Popen[str]] = []

    def begin(url: str) -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", CHILD, str(folder), url]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


def path_of(child: "subprocess.Popen[str]") -> Path:
    assert child.stdout is not None
    return Path(child.stdout.readline().strip())


def test_two_processes_fetch_a_file_once(
    store: BadStore, folder: Path, start: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    hold = threading.Event()
    store.files["/m.bin"] = Served(CONTENT, hold=hold)
    first = start(f"{store.url}/m.bin")
    while not store.sent_bytes:
        os.sched_yield()
    second = start(f"{store.url}/m.bin")
    hold.set()
    path = path_of(first)
    assert path == path_of(second)
    assert path.read_bytes() == CONTENT
    assert store.sent_bytes["/m.bin"] == len(CONTENT)


def test_a_killed_process_leaves_what_has_come(
    store: BadStore, folder: Path, start: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    store.files["/m.bin"] = Served(CONTENT, hold=threading.Event())
    child = start(f"{store.url}/m.bin")
    while not any(transfer._size(path) >= 64_000 for path in folder.glob("*.part/files/m.bin")):
        os.sched_yield()
    child.send_signal(signal.SIGKILL)
    child.wait()
    store.files["/m.bin"] = Served(CONTENT)
    assert fetched(folder, f"{store.url}/m.bin").read_bytes() == CONTENT
    assert int(store.asked("/m.bin")[-1]["range"].removeprefix("bytes=").rstrip("-")) >= 64_000
    assert len(left_in(folder)) == 1


def test_models_that_another_process_uses_stay(
    store: BadStore, folder: Path, start: Callable[[str], "subprocess.Popen[str]"]
) -> None:
    store.files |= {f"/{name}.bin": Served(CONTENT + name.encode()) for name in "abc"}
    child = start(f"{store.url}/a.bin")
    a = path_of(child)
    b = fetched(folder, f"{store.url}/b.bin", budget_bytes=600_000)
    c = fetched(folder, f"{store.url}/c.bin", budget_bytes=600_000)
    assert (a.exists(), b.exists(), c.exists()) == (True, False, True)
    child.kill()
    child.wait()
    fetched(folder, f"{store.url}/b.bin", budget_bytes=600_000)
    assert not a.exists()


def test_a_process_that_stands_still_is_not_waited_for_without_end(store: BadStore, folder: Path) -> None:
    store.files["/m.bin"] = Served(CONTENT)
    shelf = ModelFolder(folder, 10**9)
    shelf.prepare()
    lock = shelf.lock_of(ModelSource.of(f"{store.url}/m.bin").key)
    assert lock is not None
    patience = replace(QUICK, hang_s=0.1, stall_s=0.05)
    assert "another process has been fetching it" in str(refused(folder, f"{store.url}/m.bin", patience=patience))
    os.close(lock)


# Budget, order of use and pins, against a model


class Shelf:
    """The folder of a cache, filled without a store."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.now_ns = 10**18
        self.folder = ModelFolder(folder, budget_bytes, self.clock)
        self.folder.prepare()
        self.pins: dict[str, list[int]] = {}

    def clock(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def found(self, name: str) -> CachedModel | None:
        return next((row for row in self.folder.models() if row.path.name == name), None)

    def add(self, name: str, size: int) -> bool:
        key = sum_of(name.encode())[:16]
        part, state = self.folder.part(name, key), TransferState()
        try:
            self.folder.reserve(part, state, size, name)
        except MachineError:
            self.folder.discard(part)
            return False
        (part / FILES / name).write_bytes(bytes(size))
        record = EntryRecord(name, (FileRecord(name, "1", size, ""),))
        os.close(self.folder.commit(part, record, key, name)[1])
        return True


NAMES = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(0, 12)),
        st.tuples(st.just("pin"), NAMES, st.just(0)),
        st.tuples(st.just("unpin"), NAMES, st.just(0)),
        st.tuples(st.just("use"), NAMES, st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=50)
@given(budget=st.integers(0, 20), steps=STEPS)
def test_least_recently_used_models_go_first(budget: int, steps: list[tuple[str, str, int]]) -> None:
    place = Path(tempfile.mkdtemp())
    try:
        shelf = Shelf(place / "cache", budget)
        sizes: dict[str, int] = {}  # by name, those used last at the end
        pins: dict[str, int] = {}
        for step, name, size in steps:
            if step == "add" and name not in sizes:
                fixed = sum(sizes[each] for each in pins)
                fits = fixed + size <= budget
                while fits and sum(sizes.values()) + size > budget:
                    del sizes[next(each for each in sizes if each not in pins)]
                assert shelf.add(name, size) == fits
                if fits:
                    sizes[name] = size
            elif step == "use" and name in sizes:
                model = shelf.found(name)
                assert model is not None
                shelf.folder.note_use(model.folder)
                sizes[name] = sizes.pop(name)
            elif step == "pin" and name in sizes:
                model = shelf.found(name)
                assert model is not None
                lock = shelf.folder.pin(model.folder)
                assert lock is not None
                shelf.pins.setdefault(name, []).append(lock)
                pins[name] = pins.get(name, 0) + 1
                sizes[name] = sizes.pop(name)
            elif step == "unpin" and name in pins:
                os.close(shelf.pins[name].pop())
                pins[name] -= 1
                if not pins[name]:
                    del pins[name]
            assert [row.path.name for row in reversed(shelf.folder.models())] == list(sizes)
            assert shelf.folder.used_bytes() == sum(sizes.values()) <= budget
            again = ModelFolder(place / "cache", budget)  # another process
            assert [row.path.name for row in reversed(again.models())] == list(sizes)
    finally:
        for locks in shelf.pins.values():
            for each in locks:
                os.close(each)
        shutil.rmtree(place)


# Agents


WEIGHTS = ModelWeights("m", 7)


class HeardSession(AgentSession):
    """An agent on another machine than the deciding process, and what it reports."""

    def __init__(self, folder: Path, servables: Mapping[tuple[str, str], Servable]) -> None:
        self.made: list[WeightsCache] = []
        self.said: list[Any] = []
        super().__init__(AgentSetup(1), self.said.append, BlockClient(b"token"), ("127.0.0.1", 1), self._made)
        self._folder = folder
        taught = [(*key, servable) for key, servable in servables.items()]
        self.acts[LearnStages](LearnStages(taught, wirings_of(servables), 1))

    def _made(self) -> WeightsCache:
        self.made.append(WeightsCache(self._folder, 10**9, patience=QUICK))
        return self.made[-1]

    def start(self, number: int, variant: str) -> None:
        self.acts[NodeOrder](NodeOrder(StartWorker(ReplicaId(number), ReplicaSpec("stage", variant, Slot(1)))))

    def events(self, kind: type) -> list[Any]:
        return [each.event for each in self.said if isinstance(each.event, kind)]


async def test_an_agent_fetches_a_model_once_for_all_its_replicas(store: BadStore, folder: Path, mlp: Path) -> None:
    content = mlp.read_bytes()
    store.files["/mlp.onnx"] = Served(content)
    url = f"{store.url}/mlp.onnx#sha256={hashlib.sha256(content).hexdigest()}"
    signature = Signature((Port("x", "FP32", (-1, 4)),), (Port("y", "FP32", (-1, 3)),))
    servables = {
        ("stage", "away"): Servable("/not/here.onnx", signature, source=url),
        ("stage", "missing"): Servable("/not/here.onnx", signature),
    }
    session = HeardSession(folder, servables)
    for number, variant in enumerate(("away", "away", "missing", "away")):
        session.start(number, variant)
    session.acts[NodeOrder](NodeOrder(StopWorker(ReplicaId(3), "")))
    assert session.said[-1] == Report(WorkerStopped(ReplicaId(3))), "while its model is being fetched"
    await until(lambda: len(session.events(WorkerReady)) == 2)
    steps = [event.step for event in session.events(WorkerProgressed) if event.worker == 0]
    assert steps == ["fetching", "spawning", "loading", "warming"]
    (lost,) = session.events(WorkerLost)
    assert lost.error.startswith("/not/here.onnx is not on this node: put it where all nodes can read it")
    (cache,) = session.made
    (model,) = cache.models.models()
    assert source_of(model.path) == url
    assert source_of(mlp) == ""
    part = cache.models.part("other.onnx", "0" * 16)
    with pytest.raises(MachineError, match="are in use"):
        cache.models.reserve(part, TransferState(), 10**9, "a model")  # it is in use
    for number in range(2):
        session.acts[NodeOrder](NodeOrder(StopWorker(ReplicaId(number), "")))
    await until(lambda: len(session.events(WorkerStopped)) == 3)
    cache.models.reserve(part, TransferState(), 10**9, "a model")
    assert not cache.models.models(), "nobody used it any more"
    await session.close()
    assert len(store.asked("/mlp.onnx")) == 1


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Another process deletes files of a cache meanwhile; at most for 10 s, so that what waits for it fails."""
    lock = os.open(folder / "locks" / "all", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(10, fcntl.flock, (lock, fcntl.LOCK_UN))
    timer.start()
    try:
        yield
        assert timer.is_alive(), "the event loop has waited for the other process"
    finally:
        timer.cancel()
        os.close(lock)


async def test_an_agent_goes_on_while_files_are_deleted(store: BadStore, folder: Path) -> None:
    content = b"a model"
    store.files["/m.bin"] = Served(content)
    url = f"{store.url}/m.bin#sha256={hashlib.sha256(content).hexdigest()}"
    servables = {("stage", "away"): Servable("/not/here", Signature((), ()), source=url, weights=(WEIGHTS,))}
    session = HeardSession(folder, servables)
    model = (await (await session.models._shared_cache()).fetch(ModelSource.of(url))).parent.parent

    def answers() -> None:
        session.acts[NodeOrder](NodeOrder(StopWorker(ReplicaId(99), "")))
        assert session.said[-1] == Report(WorkerStopped(ReplicaId(99)))

    with held(folder):
        session.acts[NodeOrder](NodeOrder(Evict("one", WEIGHTS)))
        await asyncio.sleep(0.2)
        answers()
        assert model.exists()
        session.start(0, "away")  # it must not find what is about to go
        await asyncio.sleep(0.2)
    await until(lambda: len(store.asked("/m.bin")) == 2)
    await until(lambda: len(session.events(WorkerLost)) == 1)  # it is no model that a worker could load
    session.acts[NodeOrder](NodeOrder(Evict("one", WEIGHTS)))
    await until(lambda: not model.exists())
    path = await session.made[0].fetch(ModelSource.of(url), pin=True)
    session.acts[NodeOrder](NodeOrder(Evict("one", WEIGHTS)))
    await asyncio.sleep(0.2)
    with held(folder):
        session.made[0].release(path)  # as a worker that ends does
        await asyncio.sleep(0.2)
        answers()
        assert path.exists()
        HeardSession(folder, {})._made()  # another agent can begin
    await until(lambda: not path.exists())
    await session.close()


async def test_agents_make_the_copy_that_the_server_has_tested(store: BadStore, folder: Path, tmp_path: Path) -> None:
    """Of a model whose batch was fixed when it was exported, or that has mappings as outputs."""
    made = onnx_model("(float[2, 4] x) => (float[2, 4] y) { y = Neg(x) }")
    store.files["/two.onnx"] = Served(made.SerializeToString())
    async with caching(tmp_path / "of the server") as cache:
        path = await cache.fetch(ModelSource.of(f"{store.url}/two.onnx"))
    variant = {
        "name": "v",
        "model": str(path),
        "profile": {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.1, "gamma": 1}, "max_batch": 4},
    }
    document = {"name": "two", "slo_ms": 1000, "stages": [{"name": "stage", "variants": [variant]}], "system": "static"}
    [servable] = servables_of(load_application(document), tmp_path).values()
    assert servable.changes == ("open 2",)
    assert servable.source == source_of(path)
    assert Path(servable.model).parent == path.parent
    session = HeardSession(folder, {("stage", "v"): structs.replace(servable, model="/not/here.onnx")})
    for number in range(2):
        session.start(number, "v")
    await until(lambda: len(session.events(WorkerReady)) == 2)
    for number in range(2):
        session.acts[NodeOrder](NodeOrder(StopWorker(ReplicaId(number), "")))
    await until(lambda: len(session.events(WorkerStopped)) == 2)
    await session.close()
    [copy] = folder.glob("**/two.onnx.open-*")
    assert copy.read_bytes() == Path(servable.model).read_bytes()


async def test_agents_elsewhere_copy_a_model_from_the_path_that_all_share(folder: Path, tmp_path: Path) -> None:
    """They serve what the server has examined, or nothing."""
    made = onnx_model("(float[1, 4] x) => (float[1, 4] y) { y = Mul(x, w) }", {"w": np.ones(4, np.float32)})
    path = tmp_path / "shared" / "m.onnx"
    path.parent.mkdir()
    onnx.save(made, path, save_as_external_data=True, location="m.data", size_threshold=0)
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.1, "gamma": 1}, "max_batch": 4}
    variant = {"name": "v", "model": str(path), "profile": profile}
    document = {"name": "one", "slo_ms": 1000, "stages": [{"name": "stage", "variants": [variant]}], "system": "static"}
    [servable] = servables_of(load_application(document), tmp_path / "state").values()
    assert servable.changes == ("open 1",)
    away = structs.replace(servable, model="/not/here.onnx")
    weights = path.with_name("m.data").read_bytes()
    session = HeardSession(folder, {("stage", "v"): away})
    for number in range(2):
        session.start(number, "v")
    await until(lambda: len(session.events(WorkerReady)) == 2)
    [entry] = (folder / IN_CACHE).iterdir()
    path.with_name("m.data").write_bytes(bytes(len(weights)))
    session.start(2, "v")
    await until(lambda: len(session.events(WorkerReady)) == 3)
    assert (entry / "files" / "m.data").read_bytes() == weights
    collect(folder / IN_CACHE)
    assert entry.exists()
    for number in range(3):
        session.acts[NodeOrder](NodeOrder(StopWorker(ReplicaId(number), "")))
    await until(lambda: len(session.events(WorkerStopped)) == 3)
    collect(folder / IN_CACHE)
    assert not entry.exists()
    session.start(3, "v")
    await until(lambda: len(session.events(WorkerLost)) == 1)
    path.unlink()
    session.start(4, "v")
    await until(lambda: len(session.events(WorkerLost)) == 2)
    changed, gone = session.events(WorkerLost)
    assert changed.error.startswith(f"{path}: it has the digest ")
    assert gone.error.startswith(f"{path} is not on this node: put it where all nodes can read it")
    await session.close()


async def test_a_model_that_an_agent_cannot_fetch_costs_the_replica_only(store: BadStore, folder: Path) -> None:
    servable = Servable("/not/here.onnx", Signature((), ()), source=f"{store.url}/none.onnx")
    session = HeardSession(folder, {("stage", "away"): servable})
    session.start(0, "away")
    await until(lambda: bool(session.events(WorkerLost)))
    assert "none.onnx" in session.said[-1].event.error
    assert "404" in session.said[-1].event.error
    await session.close()
