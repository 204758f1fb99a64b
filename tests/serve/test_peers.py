"""Model files from other machines: real sockets, real caches, and a store that counts what it sends."""

import asyncio
import contextlib
import hashlib
import os
import random
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sloop.errors import MachineError
from sloop.serve.network import Endpoint, NodeListener, NodeTls, Purpose, joined
from sloop.serve.weights import folder as kept
from sloop.serve.weights import peers as module
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.peers import FileServer, PeerStore
from sloop.serve.weights.sources import ModelSource, Patience, Store
from tests.serve.bad_store import BadStore, Served
from tests.serve.rig import until
from tests.serve.test_network import certificates, tls_of
from tests.serve.test_weights import put, split_model

__all__ = ["certificates"]  # a fixture

pytestmark = pytest.mark.live
CONTENT = random.Random(5).randbytes(24 * module.CHUNK_BYTES + 12_345)
HALF = len(CONTENT) // 2
TOKEN = b"0123456789abcdef0123"
HERE = "127.0.0.1"
QUICK = Patience(connect_s=2, stall_s=1.0, least_bytes_s=1000, tries=3, pause_s=0.001, hang_s=20)


class Machine:
    """A cache, and who sends its files to others."""

    tls: ClassVar[NodeTls | None] = None

    def __init__(self, folder: Path) -> None:
        self.cache = WeightsCache(folder, 10**9, patience=QUICK)
        self.server = FileServer(lambda: [self.cache])

    async def open(self) -> "Machine":
        context = None if self.tls is None else self.tls.server_context()
        self._listener = await NodeListener.listen((HERE, 0), TOKEN, self.server.accept, context)
        self.endpoint: Endpoint = HERE, self._listener.port
        return self

    async def fetch(self, text: str, peers: Sequence["Machine | Endpoint"] = ()) -> Path:
        source = ModelSource.of(text)
        endpoints = [each.endpoint if isinstance(each, Machine) else each for each in peers]

        def nearer(store: Store) -> Store:
            context = None if self.tls is None else self.tls.client_context()
            return PeerStore(source, store, endpoints, token=TOKEN, context=context)

        return await self.cache.fetch(source, nearer=nearer)

    async def die(self) -> None:
        """Its connections break, and no new one is accepted."""
        await self._listener.close()
        self.server.close()

    async def close(self) -> None:
        await self.die()
        await self.cache.close()


Make = Callable[[], Awaitable[Machine]]


@pytest.fixture
def store(store: BadStore) -> BadStore:
    store.files["/big.bin"] = Served(CONTENT)
    return store


@asynccontextmanager
async def machines(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes machines, which end with it."""
    made: list[Machine] = []

    async def make() -> Machine:
        made.append(await Machine(tmp_path / f"machine-{len(made)}").open())
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            await each.close()


def part_bytes(machine: Machine) -> int:
    """Of what is being fetched, the bytes that are here."""
    return sum(file.stat().st_size for file in machine.cache.models.folder.glob("*.part/files/*"))


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
async def test_a_chain_reads_the_store_once_and_passes_on_what_has_not_come_whole(
    store: BadStore, tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    monkeypatch.setattr(Machine, "tls", tls_of(certificates) if is_secure else None)
    async with machines(tmp_path) as make:
        first, second, third = [await make() for _ in range(3)]
        store.files["/big.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        url = f"{store.url}/big.bin"
        fetching = [asyncio.create_task(first.fetch(url))]
        await until(lambda: part_bytes(first) > 0)
        fetching.append(asyncio.create_task(second.fetch(url, [first])))
        await until(lambda: part_bytes(second) > 0)
        fetching.append(asyncio.create_task(third.fetch(url, [second, first])))
        await until(lambda: part_bytes(third) > HALF - 2 * module.CHUNK_BYTES)
        hold.set()
        for path in await asyncio.gather(*fetching):
            assert path.read_bytes() == CONTENT
    assert store.sent_bytes["/big.bin"] < len(CONTENT) + 100, "besides, it was asked for the version"


HEAD = b"HTTP/1.1 200 OK\r\nETag: %s\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"nonsense" * 9 + b"\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: ", "a peer has another version"),
        (b"", "closed the connection before the end"),
        (b"HTTP/1.1 302 No\r\nLocation: http://127.0.0.1:1/\r\n\r\n", "is not on this peer"),
        (HEAD % (b'"another"', 10) + bytes(10), "a peer has another version"),
        (HEAD % (b"VERSION", 10**12) + bytes(50), "by the length that a peer says"),
        (HEAD % (b"VERSION", len(CONTENT)) + CONTENT[:50], "the connection ended after 50 of"),
        (HEAD % (b"VERSION", 100) + bytes(200), "more than the 100 bytes that it announces"),
        (None, "no byte has come for 0.2 s"),
    ],
)
async def test_a_peer_that_sends_nonsense_or_nothing_is_left(
    store: BadStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: bytes | None,
    told: str,
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.2)
    caplog.set_level("INFO", "sloop")
    version = module._tag(store.files["/big.bin"].version).encode()

    async def lie(self: FileServer, writer: asyncio.StreamWriter, head: str) -> bool:
        if answer is None:
            await asyncio.sleep(20)
        else:
            writer.write(answer.replace(b"VERSION", version))
        return True

    monkeypatch.setattr(FileServer, "_answer", lie)
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        assert (await second.fetch(f"{store.url}/big.bin", [first])).read_bytes() == CONTENT
    assert re.search(told, caplog.text), caplog.text


async def test_a_model_that_is_there_is_copied_with_all_its_files(store: BadStore, tmp_path: Path) -> None:
    path = split_model(tmp_path, "w.bin")
    put(store, path)
    served = f"/models/{path.name}"
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        one = await first.fetch(f"{store.url}{served}")
        sent = dict(store.sent_bytes)
        two = await second.fetch(f"{store.url}{served}", [first])
        assert {each.name: each.read_bytes() for each in one.parent.iterdir()} == {
            each.name: each.read_bytes() for each in two.parent.iterdir()
        }
        for name in (served, "/models/w.bin"):
            assert store.sent_bytes[name] - sent[name] <= 2, "asked for its version only"


async def test_a_peer_with_another_version_is_not_read(store: BadStore, tmp_path: Path) -> None:
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        await first.fetch(f"{store.url}/big.bin")
        store.files["/big.bin"] = Served(CONTENT[::-1])
        path = await second.fetch(f"{store.url}/big.bin", [first])
        assert path.read_bytes() == CONTENT[::-1]


async def test_a_file_is_found_at_every_instant_while_it_becomes_a_model(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that asks just then would be told that the file is not here, and would give up this source."""
    found: list[bool] = []
    key = ModelSource.of(f"{store.url}/big.bin").key
    committed: list[bool] = []
    async with machines(tmp_path) as make:
        here = await make()
        folder = here.cache.models

        def look(*_: object) -> None:
            found.append(module.known_file(folder, key, "big.bin") is not None)

        for name in ("sync", "_write", "locked_file"):
            monkeypatch.setattr(kept, name, looking_before(getattr(kept, name), look))
        monkeypatch.setattr(Path, "unlink", looking_before(Path.unlink, look))
        commit = type(folder).commit

        def watched(*given: Any) -> Any:  # arguments and result of `commit`
            found.clear()
            made = commit(*given)
            look()
            committed.extend(found)
            return made

        monkeypatch.setattr(type(folder), "commit", watched)
        await here.fetch(f"{store.url}/big.bin")
    assert len(committed) > 6
    assert all(committed), committed


def looking_before(do: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def both(*given: Any, **named: Any) -> Any:  # those of `do`
        look()
        return do(*given, **named)

    return both


async def test_a_file_that_is_completed_while_it_is_looked_for_is_found(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machines(tmp_path) as make:
        here = await make()
        path = await here.fetch(f"{store.url}/big.bin")
        key, folder = ModelSource.of(f"{store.url}/big.bin").key, here.cache.models
        models, asked = type(folder).models, list[str]()

        def late(self: Any, key: str = "") -> Any:  # the first look was too early
            asked.append(key)
            return [] if len(asked) == 1 else models(self, key)

        monkeypatch.setattr(type(folder), "models", late)
        known = module.known_file(folder, key, "big.bin")
        assert known is not None
        assert known[0].samefile(path)


async def test_a_store_that_is_away_is_not_needed(store: BadStore, tmp_path: Path) -> None:
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        url = f"{store.url}/big.bin"
        await first.fetch(url)
        store.files["/big.bin"] = replace(store.files["/big.bin"], status=503)
        store.files["/big.bin.sha256"] = Served(status=404)
        assert (await second.fetch(url, [first])).read_bytes() == CONTENT


@pytest.mark.parametrize("begins", ["later", "slowly"])
async def test_a_peer_that_is_about_to_receive_the_file_is_waited_for(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """Two that are ordered to fetch it at the same time ask before the other's transfer has a file."""
    monkeypatch.setattr(module, "BEGIN_S", 60.0 if begins == "later" else 0.0)
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        url, content = f"{store.url}/big.bin#sha256={hashlib.sha256(CONTENT).hexdigest()}", store.files["/big.bin"]
        store.files["/big.bin"] = replace(content, raw=b"")  # the store breaks off until the second has asked
        asked = asyncio.Event()
        opened = FileServer._opened

        async def noted(self: FileServer, key: str, name: str) -> Any:  # as the original
            asked.set()
            return await opened(self, key, name)

        monkeypatch.setattr(FileServer, "_opened", noted)
        monkeypatch.setattr(first.cache, "_patience", replace(QUICK, tries=10**6, pause_s=0))
        fetching = [asyncio.create_task(first.fetch(url))] if begins == "slowly" else []
        fetching.append(asyncio.create_task(second.fetch(url, [first])))
        await asked.wait()
        if begins == "later":
            fetching.append(asyncio.create_task(first.fetch(url)))
        store.files["/big.bin"] = content
        for path in await asyncio.gather(*fetching):
            assert path.read_bytes() == CONTENT
    assert store.sent_bytes["/big.bin"] == len(CONTENT)


async def test_peers_that_are_not_there_or_have_nothing_are_passed_over(store: BadStore, tmp_path: Path) -> None:
    async with machines(tmp_path) as make:
        empty, gone, last = [await make() for _ in range(3)]
        await gone.die()
        path = await last.fetch(f"{store.url}/big.bin", [(HERE, 1), gone, empty])
        assert path.read_bytes() == CONTENT


async def test_a_peer_whose_own_transfer_stands_still_is_left(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.1)
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        url = f"{store.url}/big.bin"
        store.files["/big.bin"] = Served(CONTENT, hold=threading.Event())
        stuck = asyncio.create_task(first.fetch(url))
        await until(lambda: part_bytes(first) >= HALF)
        store.files["/big.bin"] = Served(CONTENT)
        assert (await second.fetch(url, [first])).read_bytes() == CONTENT
        assert not stuck.done()
        stuck.cancel()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /%s/big.bin HTTP/1.1\r\n\r\n" % (b"0" * 16),
        b"GET /%s/..%%2F..%%2Fetc%%2Fpasswd HTTP/1.1\r\n\r\n" % (b"0" * 16),
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"PUT /%s/big.bin HTTP/1.1\r\n\r\n" % (b"0" * 16),
        b"nonsense\r\n\r\n",
        b"x" * 100_000,
    ],
)
async def test_what_is_not_in_the_cache_is_not_sent(tmp_path: Path, request_: bytes) -> None:
    def ask(peer: Endpoint) -> bytes:
        with joined(peer, TOKEN, Purpose.WEIGHTS, None) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(request_)
            return b"".join(iter(lambda: sock.recv(1000), b""))
        return b""

    async with machines(tmp_path) as make:
        machine = await make()
        answer = await asyncio.to_thread(ask, machine.endpoint)
        assert answer.startswith(b"HTTP/1.1 404 ") or (not answer and len(request_) > module.HEAD_BYTES_MAX)


async def test_strangers_are_sent_nothing(store: BadStore, tmp_path: Path) -> None:
    async with machines(tmp_path) as make:
        machine = await make()
        with pytest.raises(MachineError, match="closed"):
            await asyncio.to_thread(joined, machine.endpoint, b"another token, as long", Purpose.WEIGHTS, None)


def opened(name: str) -> list[str]:
    """The files of this name that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in found if each.endswith(name)]


async def test_files_that_were_sent_are_closed_with_the_connection(store: BadStore, tmp_path: Path) -> None:
    async with machines(tmp_path) as make:
        first, second = await make(), await make()
        store.files["/big.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        fetching = [asyncio.create_task(first.fetch(f"{store.url}/big.bin"))]
        await until(lambda: part_bytes(first) > 0)
        fetching.append(asyncio.create_task(second.fetch(f"{store.url}/big.bin", [first])))
        await until(lambda: part_bytes(second) > 0)
        assert len(opened("/big.bin")) == 3, "two are written, one is sent"
        hold.set()
        await asyncio.gather(*fetching)
        await until(lambda: not opened("/big.bin"))
