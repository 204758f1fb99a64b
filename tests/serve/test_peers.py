"""Model files from other machines: real sockets, real caches, and a store that counts what it sends."""

import asyncio
import contextlib
import hashlib
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from sloop.errors import MachineError
from sloop.serve import peers as module
from sloop.serve import weights
from sloop.serve.messages import encode
from sloop.serve.network import Endpoint, NodeListener, NodeTls, Purpose, connect
from sloop.serve.peers import FileRange, FileServer, PeerStore
from sloop.serve.stores import ModelSource, Patience, Store
from sloop.serve.transport import HEADER, Frame, FrameKind, pack_head, unpack_head
from sloop.serve.weights import WeightsCache
from tests.serve.bad_store import BadStore, Served
from tests.serve.test_network import certificates, tls_of
from tests.serve.test_weights import put, split_model

__all__ = ["certificates"]  # a fixture

pytestmark = pytest.mark.live
CONTENT = random.Random(5).randbytes(3 * module.RANGE_BYTES * module.AHEAD + 12_345)
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
        source, loop = ModelSource.of(text), asyncio.get_running_loop()
        endpoints = [each.endpoint if isinstance(each, Machine) else each for each in peers]

        def nearer(store: Store) -> Store:
            context = None if self.tls is None else self.tls.client_context()
            return PeerStore(source, store, endpoints, token=TOKEN, context=context, loop=loop)

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
def store() -> Iterator[BadStore]:
    with BadStore() as made:
        made.files["/big.bin"] = Served(CONTENT)
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[FileRange]:
    """All requests that any machine has got."""
    found: list[FileRange] = []
    before = module.FileRequests._found

    def noted(self: module.FileRequests, part: FileRange) -> bytes | None:
        if not found or found[-1] != part:
            found.append(part)
        return before(self, part)

    monkeypatch.setattr(module.FileRequests, "_found", noted)
    return found


def play(tmp_path: Path, scene: Callable[[Make], Awaitable[None]]) -> None:
    async def main() -> None:
        machines: list[Machine] = []

        async def make() -> Machine:
            machines.append(await Machine(tmp_path / f"machine-{len(machines)}").open())
            return machines[-1]

        try:
            await asyncio.wait_for(scene(make), 60)
        finally:
            for each in machines:
                await each.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what is waited for has no event of its own
        await asyncio.sleep(0.002)


def part_bytes(machine: Machine) -> int:
    """Of what is being fetched, the bytes that are here."""
    return sum(file.stat().st_size for file in machine.cache.models.folder.glob("*.part/files/*"))


@pytest.mark.parametrize("is_secure", [False, True], ids=["plain", "tls"])
def test_a_chain_reads_the_store_once_and_passes_on_what_has_not_come_whole(
    store: BadStore, tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    monkeypatch.setattr(Machine, "tls", tls_of(certificates) if is_secure else None)

    async def scene(make: Make) -> None:
        first, second, third = [await make() for _ in range(3)]
        store.files["/big.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        url = f"{store.url}/big.bin"
        fetching = [asyncio.create_task(first.fetch(url))]
        await until(lambda: part_bytes(first) > 0)
        fetching.append(asyncio.create_task(second.fetch(url, [first])))
        await until(lambda: part_bytes(second) > 0)
        fetching.append(asyncio.create_task(third.fetch(url, [second, first])))
        await until(lambda: part_bytes(third) > HALF - 2 * module.RANGE_BYTES)
        hold.set()
        for path in await asyncio.gather(*fetching):
            assert path.read_bytes() == CONTENT

    play(tmp_path, scene)
    assert store.sent_bytes["/big.bin"] < len(CONTENT) + 100, "besides, it was asked for the version"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (pack_head(FrameKind.BLOCK, 2, 7, 100) + bytes(100), "100 B from 7 on instead of those from 0 on"),
        (pack_head(FrameKind.BLOCK, 2, 0, 1 << 30) + bytes(100), "from 0 on instead of"),
        (pack_head(FrameKind.BLOCK, 3, 0, 100) + bytes(100), "a BLOCK frame that nobody has asked for"),
        (pack_head(FrameKind.DONE, 2, 0, 0), "a DONE frame that nobody has asked for"),
        (b"nonsense" * 9, "a frame begins with"),
        (pack_head(FrameKind.ALIVE, 0, 0, 0) + pack_head(FrameKind.BLOCK, 2, -1, 3) + b"no!", "a peer says: no!"),
        (pack_head(FrameKind.BLOCK, 2, 0, 100) + bytes(50), "a peer has gone"),
        (None, "a peer has been silent"),
    ],
)
def test_a_peer_that_sends_nonsense_or_nothing_is_left(
    store: BadStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: bytes | None,
    told: str,
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.2)
    is_over = threading.Event()

    def send(sock: socket.socket, *_: object) -> None:
        if answer is None:
            is_over.wait(20)
        else:
            sock.sendall(answer)

    monkeypatch.setattr(module, "send_chunks", send)
    caplog.set_level("INFO", "sloop")

    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        await first.fetch(f"{store.url}/big.bin")
        assert (await second.fetch(f"{store.url}/big.bin", [first])).read_bytes() == CONTENT
        is_over.set()

    play(tmp_path, scene)
    assert told in caplog.text


def test_a_file_that_grows_no_more_is_said_to_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.1)
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    (tmp_path / "half").write_bytes(bytes(10))
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "half").open("rb") as file:
        module.send_chunks(ours, 5, file.fileno(), FileRange("key", "half", "v", 4, 100, in_chunks=True))
        ours.close()
        sent = b"".join(iter(lambda: theirs.recv(1000), b""))
    first, beat = unpack_head(sent), unpack_head(sent[HEADER.size + 6 :])
    assert (first.kind, first.subject, first.value, first.payload_bytes) == (FrameKind.BLOCK, 5, 4, 6)
    assert beat.kind is FrameKind.ALIVE
    assert sent.endswith(b"it has not grown beyond 10 B for 0.1 s")


def test_a_model_that_is_there_is_copied_with_all_its_files(store: BadStore, tmp_path: Path) -> None:
    path = split_model(tmp_path, "w.bin")
    put(store, path)
    served = f"/models/{path.name}"

    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        one = await first.fetch(f"{store.url}{served}")
        sent = dict(store.sent_bytes)
        two = await second.fetch(f"{store.url}{served}", [first])
        assert {each.name: each.read_bytes() for each in one.parent.iterdir()} == {
            each.name: each.read_bytes() for each in two.parent.iterdir()
        }
        for name in (served, "/models/w.bin"):
            assert store.sent_bytes[name] - sent[name] <= 2, "asked for its version only"

    play(tmp_path, scene)


@pytest.mark.parametrize("is_middle_asked", [True, False])
def test_when_a_machine_dies_its_follower_goes_on_where_it_was(
    store: BadStore, tmp_path: Path, is_middle_asked: bool, asked: list[FileRange]
) -> None:
    async def scene(make: Make) -> None:
        first, middle, last = [await make() for _ in range(3)]
        store.files["/big.bin"] = Served(CONTENT, hold=(hold := threading.Event()))
        url = f"{store.url}/big.bin"
        fetching = [asyncio.create_task(first.fetch(url))]
        await until(lambda: part_bytes(first) > 0)
        fetching.append(asyncio.create_task(middle.fetch(url, [first])))
        await until(lambda: part_bytes(middle) > 0)
        ended = asyncio.create_task(last.fetch(url, [middle, first] if is_middle_asked else [middle]))
        await until(lambda: part_bytes(last) > HALF - 2 * module.RANGE_BYTES)
        here = part_bytes(last)
        asked.clear()
        await middle.die()
        hold.set()
        assert (await ended).read_bytes() == CONTENT
        assert [path.read_bytes() == CONTENT for path in await asyncio.gather(*fetching)] == [True, True]
        again = [each for each in asked if each.size and each.start < here - module.RANGE_BYTES]
        assert not again, "what had come was asked for again"
        if not is_middle_asked:
            ranges = [int(each["range"][6:-1]) for each in store.asked("/big.bin") if each.get("range", "")[-1:] == "-"]
            assert ranges, "the store went on"
            assert min(ranges) >= here - module.RANGE_BYTES

    play(tmp_path, scene)


def test_a_peer_with_another_version_is_not_read(store: BadStore, tmp_path: Path, asked: list[FileRange]) -> None:
    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        await first.fetch(f"{store.url}/big.bin")
        store.files["/big.bin"] = Served(CONTENT[::-1])
        assert (await second.fetch(f"{store.url}/big.bin", [first])).read_bytes() == CONTENT[::-1]
        assert not [each for each in asked if each.size]

    play(tmp_path, scene)


def test_a_damaged_copy_is_noticed_and_the_store_is_read(
    store: BadStore, tmp_path: Path, asked: list[FileRange]
) -> None:
    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        text = f"{store.url}/big.bin#sha256={hashlib.sha256(CONTENT).hexdigest()}"
        path = await first.fetch(text)
        with path.open("r+b") as file:
            file.seek(HALF)
            file.write(b"damaged!")
        assert (await second.fetch(text, [first])).read_bytes() == CONTENT
        assert [each for each in asked if each.size], "the copy was read first"

    play(tmp_path, scene)


def test_a_file_is_found_at_every_instant_while_it_becomes_a_model(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that asks just then would be told that the file is not here, and would give up this source."""
    found: list[bool] = []
    key = ModelSource.of(f"{store.url}/big.bin").key

    async def scene(make: Make) -> None:
        here = await make()
        folder = here.cache.models

        def look(*_: object) -> None:
            found.append(module.known_file(folder, key, "big.bin") is not None)

        for name in ("_sync", "_write", "locked_file"):
            monkeypatch.setattr(weights, name, looking_before(getattr(weights, name), look))
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

    committed: list[bool] = []
    play(tmp_path, scene)
    assert len(committed) > 6
    assert all(committed), committed


def looking_before(do: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def both(*given: Any, **named: Any) -> Any:  # those of `do`
        look()
        return do(*given, **named)

    return both


def test_a_file_that_is_completed_while_it_is_looked_for_is_found(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(make: Make) -> None:
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

    play(tmp_path, scene)


def test_a_peer_that_says_a_wrong_length_is_left(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the cache would not have room for so much."""
    known = module.known_file

    def lie(*given: Any) -> Any:  # arguments and result of `known_file`
        found = known(*given)
        return found and (found[0], msgspec.structs.replace(found[1], size_bytes=10**12))

    monkeypatch.setattr(module, "known_file", lie)

    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        await first.fetch(f"{store.url}/big.bin")
        assert (await second.fetch(f"{store.url}/big.bin", [first])).read_bytes() == CONTENT

    play(tmp_path, scene)


def test_a_store_that_is_away_is_not_needed(store: BadStore, tmp_path: Path) -> None:
    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        url = f"{store.url}/big.bin"
        await first.fetch(url)
        store.files["/big.bin"] = replace(store.files["/big.bin"], status=503)
        store.files["/big.bin.sha256"] = Served(status=404)
        assert (await second.fetch(url, [first])).read_bytes() == CONTENT

    play(tmp_path, scene)


def test_peers_that_are_not_there_or_have_nothing_are_passed_over(store: BadStore, tmp_path: Path) -> None:
    async def scene(make: Make) -> None:
        empty, gone, last = [await make() for _ in range(3)]
        await gone.die()
        path = await last.fetch(f"{store.url}/big.bin", [(HERE, 1), gone, empty])
        assert path.read_bytes() == CONTENT

    play(tmp_path, scene)


def test_a_peer_whose_own_transfer_stands_still_is_left(
    store: BadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.1)

    async def scene(make: Make) -> None:
        first, second = await make(), await make()
        url = f"{store.url}/big.bin"
        store.files["/big.bin"] = Served(CONTENT, hold=threading.Event())
        stuck = asyncio.create_task(first.fetch(url))
        await until(lambda: part_bytes(first) >= HALF)
        store.files["/big.bin"] = Served(CONTENT)
        assert (await second.fetch(url, [first])).read_bytes() == CONTENT
        assert not stuck.done()
        stuck.cancel()

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "request_",
    [
        FileRange("0" * 16, "big.bin", "v", 0, 100),
        FileRange("0" * 16, "../../etc/passwd"),
        FileRange("../" * 5, "passwd", "v", 0, 10),
    ],
)
def test_what_is_not_in_the_cache_is_not_sent(tmp_path: Path, request_: FileRange) -> None:
    async def scene(make: Make) -> None:
        machine = await make()
        link = await connect(machine.endpoint, TOKEN, Purpose.WEIGHTS)
        came: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        link.attach(came.set_result, lambda _: None)
        link.send(FrameKind.FETCH, 7, payload=[encode(request_)])
        frame = await came
        assert (frame.kind, frame.subject, frame.value) == (FrameKind.BLOCK, 7, -1)
        assert b"not here" in bytes(frame.payload)
        link.close()

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "payload",
    [b"nonsense", encode(FileRange("a", "b", "v", 0, module.RANGE_BYTES + 1)), encode(FileRange("a", "b", "v", -1, 5))],
)
def test_what_is_no_request_ends_the_connection(tmp_path: Path, payload: bytes) -> None:
    async def scene(make: Make) -> None:
        machine = await make()
        link = await connect(machine.endpoint, TOKEN, Purpose.WEIGHTS)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link.attach(lambda _: None, ended.set_result)
        link.send(FrameKind.FETCH, 1, payload=[payload])
        await ended

    play(tmp_path, scene)


def test_strangers_are_sent_nothing(store: BadStore, tmp_path: Path) -> None:
    async def scene(make: Make) -> None:
        machine = await make()
        with pytest.raises(MachineError, match="token"):
            await connect(machine.endpoint, b"another token, as long", Purpose.WEIGHTS)

    play(tmp_path, scene)


def opened(name: str) -> list[str]:
    """The files of this name that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in found if each.endswith(name)]


def test_files_that_were_sent_are_closed_with_the_connection(store: BadStore, tmp_path: Path) -> None:
    async def scene(make: Make) -> None:
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

    play(tmp_path, scene)
