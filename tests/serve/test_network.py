"""Links between machines over loopback: who may speak, when a link ends, and blocks that travel over it."""

import asyncio
import os
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

from sloop.errors import InputError, MachineError
from sloop.serve import network, transport
from sloop.serve.edge.tcp import bind
from sloop.serve.messages import encode
from sloop.serve.network import (
    DIGEST_BYTES,
    MAGIC,
    NONCE_BYTES,
    PART_BYTES,
    ArenaHolder,
    BlockClient,
    BlockLost,
    BlockServer,
    HolderTable,
    NetworkLink,
    NodeListener,
    NodeTls,
    Purpose,
    connect,
)
from sloop.serve.transport import CLOSED, HEADER, PAYLOAD_BYTES_MAX, Frame, FrameKind, pack_head
from sloop.shared_memory import Address
from tests.serve.edge.test_attacks import make_certificate
from tests.serve.rig import until

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("event_loop")]
TOKEN = b"0123456789abcdef0123456789abcdef"
HOST = "127.0.0.1"
HOLDER = 3
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
ALIVE = pack_head(FrameKind.RECORDS, 0, 0, 0)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    for name, issuer in (("authority", ""), ("node", "authority"), ("other", "authority"), ("stranger", "")):
        make_certificate(folder, name, issuer=issuer)
    return folder


def tls_of(folder: Path, name: str = "node", authority: str = "authority") -> NodeTls:
    return NodeTls(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{authority}.pem")


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certificates: Path) -> NodeTls | None:
    return tls_of(certificates) if request.param else None


class Place:
    """A listener, the links that it has accepted, and what came of them."""

    def __init__(self) -> None:
        self.links: list[NetworkLink] = []
        self.frames: list[Frame] = []
        self.ends: list[str] = []
        self.listener: NodeListener

    @property
    def endpoint(self) -> tuple[str, int]:
        return HOST, self.listener.port

    def accept(self, link: NetworkLink) -> None:
        self.links.append(link)
        link.attach(self.frames.append, self.ends.append)

    async def visit(self) -> Streams:
        return await asyncio.open_connection(*self.endpoint)


@asynccontextmanager
async def place(
    accept: Callable[[NetworkLink], None] | None = None, tls: NodeTls | None = None
) -> AsyncIterator[Place]:
    found = Place()
    context = tls.server_context() if tls is not None else None
    found.listener = await NodeListener.listen((HOST, 0), TOKEN, accept or found.accept, context)
    try:
        yield found
    finally:
        await found.listener.close()
        for link in found.links:
            link.close()
        await asyncio.sleep(0.01)


def answer_to(greeting: bytes, purpose: Purpose, token: bytes = TOKEN, nonce: bytes = bytes(NONCE_BYTES)) -> bytes:
    """What a client sends to a server that has greeted it."""
    text = bytes([purpose]) + greeting[len(MAGIC) :] + nonce
    return bytes([purpose]) + nonce + network._digest(token, b"client", text)


async def proved(streams: Streams, purpose: Purpose = Purpose.AGENT, more: bytes = b"") -> None:
    """Prove oneself over a bare socket, with `more` bytes behind the proof."""
    reader, writer = streams
    greeting = await reader.readexactly(GREETING_BYTES)
    writer.write(answer_to(greeting, purpose) + more)
    await reader.readexactly(DIGEST_BYTES)


async def is_closed(streams: Streams) -> bool:
    """Whether the other end closes the connection; what still comes is dropped."""
    try:
        while await streams[0].read(1 << 16):
            pass
    except ConnectionError:
        pass
    streams[1].close()
    return True


# Who may speak


async def test_both_ends_open_when_they_know_the_token(tls: NodeTls | None) -> None:
    async with place(tls=tls) as here:
        context = tls.client_context() if tls is not None else None
        link = await connect(here.endpoint, TOKEN, Purpose.AGENT, context=context)
        came: list[Frame] = []
        link.attach(came.append, lambda _: None)
        await until(lambda: bool(here.links))
        other = here.links[0]
        assert (other.purpose, other.peer, link.local_host) == (Purpose.AGENT, HOST, HOST)
        link.send(FrameKind.RECORDS, 1, 2, [b"small"])
        other.send(FrameKind.RECORDS, 3, 4, [b"large", bytes(1 << 20)])
        await until(lambda: bool(here.frames and came))
        assert bytes(here.frames[0].payload) == b"small"
        assert bytes(came[0].payload) == b"large" + bytes(1 << 20)
        link.close()
        await until(lambda: here.ends == [CLOSED])
        assert here.listener.refused == 0


async def test_a_wrong_token_is_refused_by_either_end() -> None:
    async with place() as here:
        with pytest.raises(MachineError, match="does not know the token"):
            await connect(here.endpoint, b"another token of this length", Purpose.AGENT)
        assert (here.links, here.listener.refused) == ([], 1)

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting + bytes(DIGEST_BYTES))
        await is_closed((reader, writer))
        lies.append(greeting)

    lies: list[bytes] = []
    greeting = MAGIC + bytes(NONCE_BYTES)
    async with await asyncio.start_server(lie, HOST, 0) as server:
        with pytest.raises(MachineError, match="what listens there does not know the token"):
            await connect(server.sockets[0].getsockname(), TOKEN, Purpose.AGENT)
        greeting = b"HTTP/1.1 400 Bad Request\r\nServer: another\r\n"
        with pytest.raises(MachineError, match="no process of sloop"):
            await connect(server.sockets[0].getsockname(), TOKEN, Purpose.AGENT)
        await until(lambda: len(lies) == 2)


async def test_where_nothing_listens_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S_MAX", 0.1)
    with socket.socket() as free:
        free.bind((HOST, 0))
        with pytest.raises(MachineError, match="cannot be reached"):
            await connect(free.getsockname(), TOKEN, Purpose.BLOCKS)
        free.listen()  # accepts, and says nothing
        with pytest.raises(MachineError, match=r"no answer|no greeting"):
            await connect(free.getsockname(), TOKEN, Purpose.BLOCKS)
        with pytest.raises(MachineError, match=r"cannot listen[\s\S]*an address of this host"):
            await NodeListener.listen(("192.0.2.1", 0), TOKEN, lambda _: None)
        with pytest.raises(MachineError, match=r"in use\nhelp: stop the program that listens there"):
            await NodeListener.listen(free.getsockname(), TOKEN, lambda _: None)
    with pytest.raises(MachineError, match="cannot be reached"):
        await connect((HOST, 1 << 20), TOKEN, Purpose.BLOCKS)


def test_an_address_may_have_a_scope() -> None:
    """As those of a single link have: `fe80::1%eth0`."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().split("\n")
    except OSError:
        lines = []
    found = [(words[0], words[5]) for line in lines if (words := line.split())[3:4] == ["20"]]
    if not found:
        pytest.skip("this machine has no address of a single link")
    digits, name = found[0]
    host = f"{IPv6Address(bytes.fromhex(digits))}%{name}"
    with socket.socket(socket.AF_INET6) as listening, socket.socket(socket.AF_INET6) as other:
        bind(listening, host, 0)
        listening.listen()
        other.settimeout(10)
        other.connect(listening.getsockname())
        assert listening.getsockname()[3] == socket.if_nametoindex(name)


async def test_garbage_and_a_proof_of_another_connection_are_refused() -> None:
    async with place() as here:
        first = await here.visit()
        greeting = await first[0].readexactly(GREETING_BYTES)
        proof = answer_to(greeting, Purpose.AGENT)
        first[1].write(proof)
        await first[0].readexactly(DIGEST_BYTES)
        for bad in (
            proof,  # another connection has another nonce
            os.urandom(len(proof)),
            b"GET / HTTP/1.1\r\nHost: somebody\r\nUser-Agent: a scanner\r\nAccept: *\r\n\r\n",
            bytes(1 << 16),
        ):
            visit = await here.visit()
            await visit[0].readexactly(GREETING_BYTES)
            visit[1].write(bad)
            assert await is_closed(visit)
        visit = await here.visit()
        greeting = await visit[0].readexactly(GREETING_BYTES)
        text = bytes([9]) + greeting[len(MAGIC) :] + bytes(NONCE_BYTES)
        visit[1].write(bytes([9]) + bytes(NONCE_BYTES) + network._digest(TOKEN, b"client", text))
        assert await is_closed(visit), "a purpose that nobody has"
        assert (len(here.links), here.listener.refused) == (1, 5)
        first[1].close()


async def test_nothing_is_parsed_before_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    unpack = transport.unpack_head

    def unpack_head(data: memoryview) -> Any:
        parsed.append(bytes(data))
        return unpack(data)

    monkeypatch.setattr(transport, "unpack_head", unpack_head)
    async with place() as here:
        stranger = await here.visit()
        stranger[1].write(ALIVE * 50)
        assert await is_closed(stranger)
        assert not parsed
        member = await here.visit()
        await proved(member, more=pack_head(FrameKind.BYTES, 1, 0, 0) * 2)
        await until(lambda: len(here.frames) == 2)
        assert parsed, "what came with the proof is parsed after it"
        member[1].close()


async def test_a_slow_stranger_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S_MAX", 0.05)
    async with place() as here:
        visit = await here.visit()
        visit[1].write(b"\x01")
        assert await is_closed(visit)
        assert here.listener.refused == 1


async def test_strangers_make_room_for_others(monkeypatch: pytest.MonkeyPatch, tls: NodeTls | None) -> None:
    monkeypatch.setattr(network, "STRANGERS_MAX", 4)
    async with place(tls=tls) as here:
        visits = [await here.visit() for _ in range(12)]
        await until(lambda: here.listener.refused == 8)
        for visit in visits[:8]:
            assert await is_closed(visit)
        context = tls.client_context() if tls is not None else None
        link = await connect(here.endpoint, TOKEN, Purpose.AGENT, context=context)
        await until(lambda: len(here.links) == 1)
        assert here.listener.refused == 9
        link.close()
        for visit in visits:
            visit[1].close()


async def test_strangers_take_a_small_share_of_the_time_and_members_none(
    monkeypatch: pytest.MonkeyPatch, tls: NodeTls | None
) -> None:
    """Without it, garbage at the port of agents takes as much of the deciding process as somebody sends."""
    monkeypatch.setattr(network, "STRANGERS_MAX", 4)
    monkeypatch.setattr(network, "PAUSE_S", 0.01)
    async with place(tls=tls) as here:
        assert here.listener._time.is_left()
        here.listener._time._share = 0.0
        context = tls.client_context() if tls is not None else None
        for number in range(1, 11):
            link = await connect(here.endpoint, TOKEN, Purpose.AGENT, context=context)
            await until(lambda number=number: len(here.links) == number)  # type: ignore[misc]
            link.close()
        assert here.listener.refused == 0
        visits = [await here.visit() for _ in range(12)]  # by the kernel, where they wait
        for visit in visits:
            visit[1].write(bytes(200))
        await until(lambda: here.listener.refused == 4)
        await asyncio.sleep(0.05)
        assert here.listener.refused == 4
        here.listener._time._share = 1.0
        await until(lambda: here.listener.refused == 12)
        for visit in visits:
            assert await is_closed(visit)


async def test_the_listener_ends_with_its_strangers(tls: NodeTls | None) -> None:
    async with place(tls=tls) as here:
        visit = await here.visit()
        await asyncio.sleep(0.02)
        await here.listener.close()
        await here.listener.close()
        assert await is_closed(visit)


# When a link ends


async def test_frames_that_announce_too_much_end_the_link() -> None:
    async with place() as here:
        for payload_bytes, allowed, told in (
            (PAYLOAD_BYTES_MAX + 1, PAYLOAD_BYTES_MAX, "announces"),
            (1 << 20, 1 << 19, "more than 524288"),
        ):
            visit = await here.visit()
            await proved(visit)
            await until(lambda: bool(here.links))
            here.links.pop().allow(allowed)
            visit[1].write(pack_head(FrameKind.RECORDS, 0, 0, payload_bytes))
            assert await is_closed(visit)
            assert told in here.ends.pop()
        visit = await here.visit()
        await proved(visit, more=os.urandom(HEADER.size))
        assert await is_closed(visit)


async def test_silence_ends_a_link_and_beats_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "BEAT_S", 0.02)
    monkeypatch.setattr(network, "SILENT_S", 0.2)
    async with place() as here:
        silent, lively = await here.visit(), await connect(here.endpoint, TOKEN, Purpose.AGENT)
        await proved(silent)
        await until(lambda: len(here.links) == 2)
        lively.attach(lambda _: None, here.ends.append)
        for link in (*here.links, lively):
            link.keep_alive()
        assert await is_closed(silent)
        await until(lambda: len(here.ends) == 1)
        assert "silent" in here.ends[0]
        await asyncio.sleep(0.5)
        assert len(here.ends) == 1, "the other one still lives"
        assert not here.frames, "beats are no frames for others"
        lively.close()


async def test_a_process_that_stood_still_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other end has sent meanwhile waits in the kernel; timers may come before it is read."""
    monkeypatch.setattr(network, "BEAT_S", 0.02)
    monkeypatch.setattr(network, "SILENT_S", 0.2)
    async with place() as here:
        visit = await here.visit()
        await proved(visit)
        await until(lambda: bool(here.links))
        here.links[0].keep_alive()
        sock, over = visit[1].get_extra_info("socket").dup(), threading.Event()

        def beat() -> None:
            while not over.wait(0.01):
                sock.send(ALIVE)

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            for _ in range(3):
                time.sleep(0.5)  # noqa: ASYNC251  # the event loop stands still
                await asyncio.sleep(0.05)
            assert not here.ends
        finally:
            over.set()
            beating.join()
            sock.close()
        assert await asyncio.wait_for(is_closed(visit), 5), "and now it is silent"


async def test_an_end_that_reads_nothing_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "UNSENT_BYTES_MAX", 1 << 20)
    async with place() as here:
        visit = await here.visit()
        await proved(visit)
        await until(lambda: bool(here.links))
        for _ in range(200):
            here.links[0].send(FrameKind.RECORDS, payload=[bytes(1 << 20)])
            await asyncio.sleep(0)
            if here.ends:
                break
        assert "does not read" in here.ends[0]
        visit[1].close()
        # One that beats, and takes nothing of a little that waits
        monkeypatch.setattr(network, "UNSENT_BYTES_MAX", 1 << 30)
        monkeypatch.setattr(network, "BEAT_S", 0.01)
        monkeypatch.setattr(network, "STALLED_S_MAX", 0.1)
        visit = await here.visit()
        await proved(visit)
        await until(lambda: len(here.links) == 2)
        here.links[1].keep_alive()
        here.links[1].send(FrameKind.RECORDS, payload=[bytes(64 << 20)])
        while len(here.ends) == 1:
            visit[1].write(ALIVE)
            await asyncio.sleep(0.01)
        assert "has taken nothing" in here.ends[1]
        visit[1].close()


# TLS


async def test_only_certificates_of_the_authority_are_accepted(certificates: Path) -> None:
    node, stranger = tls_of(certificates), tls_of(certificates, "stranger")
    distrustful = tls_of(certificates, "other", "stranger")
    async with place(tls=node) as here:
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
        for context in (stranger.client_context(), distrustful.client_context(), nobody, None):
            if context is None:
                visit = await here.visit()
                visit[1].write(bytes(1000))
                assert await is_closed(visit)
                continue
            with pytest.raises(MachineError):
                await connect(here.endpoint, TOKEN, Purpose.AGENT, context=context)
        await until(lambda: here.listener.refused == 4)
        assert not here.links
        link = await connect(
            here.endpoint, TOKEN, Purpose.AGENT, context=tls_of(certificates, "other").client_context()
        )
        link.close()
    async with place() as here:
        with pytest.raises(MachineError):  # a server without TLS
            await connect(here.endpoint, TOKEN, Purpose.AGENT, context=node.client_context())


def test_files_of_tls_that_cannot_be_used_are_named(certificates: Path) -> None:
    for cert, key, authority, told in (
        ("absent.pem", "node.key", "authority.pem", "No such file"),
        ("node.pem", "other.key", "authority.pem", "not a certificate and its key"),
        ("node.pem", "node.key", "node.key", "not the certificate of an authority"),
    ):
        found = NodeTls(certificates / cert, certificates / key, certificates / authority)
        for make in (found.client_context, found.server_context):
            with pytest.raises(InputError, match=told):
                make()


# Blocks


def test_numbers_of_those_who_hold_arenas_are_used_again_late_and_never_twice_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "HOLDERS_MAX", 4)
    table = HolderTable()
    for number in (1, 2, 3):
        assert table.number() == number
        table.add(ArenaHolder(number, f"machine {number}", 10 * number, (HOST, number)))
    assert table.on("machine 2") == {2: 20}
    assert table.endpoints() == {number: (HOST, number) for number in (1, 2, 3)}
    table.remove(1)
    assert [table.number(), table.number(), table.number()] == [4, 1, 4], "2 and 3 are known"


def block_of(size: int, number: int = 0) -> Address:
    return Address(HOLDER << 48, number << 32, size)


class Blocks:
    """Blocks that are there, by their offsets."""

    def __init__(self, *sizes: int) -> None:
        self.memory = {number << 32: memoryview(os.urandom(size)) for number, size in enumerate(sizes)}
        self.all = [block_of(size, number) for number, size in enumerate(sizes)]
        self.server = BlockServer(self.read)

    def read(self, block: Address) -> memoryview:
        if block.offset not in self.memory:
            raise ValueError("no such block")
        return self.memory[block.offset]


def client_of(here: Place, tls: NodeTls | None = None) -> BlockClient:
    client = BlockClient(TOKEN, tls.client_context() if tls is not None else None)
    client.set_endpoints({HOLDER: here.endpoint})
    return client


async def fetched(client: BlockClient, block: Address) -> memoryview:
    memory = memoryview(bytearray(block.size))
    await client.fetch(block, memory)
    return memory


async def test_blocks_of_all_sizes_come_whole(tls: NodeTls | None) -> None:
    sizes = (1, 100, (1 << 16) - HEADER.size, (1 << 16) - HEADER.size + 1, PART_BYTES, PART_BYTES + 1, 20 << 20, 5)
    blocks = Blocks(*sizes)
    async with place(blocks.server.accept, tls) as here:
        client = client_of(here, tls)
        found = await asyncio.gather(*(fetched(client, block) for block in [*blocks.all, *blocks.all]))
        for block, memory in zip([*blocks.all, *blocks.all], found, strict=True):
            assert memory == blocks.read(block)
        with pytest.raises(BlockLost, match="no such block"):
            await fetched(client, block_of(10, 99))
        with pytest.raises(BlockLost, match="came as"):
            await fetched(client, block_of(99, 1))
        assert await fetched(client, blocks.all[1]) == blocks.read(blocks.all[1]), "the link goes on"
        client.close()
        blocks.server.close()


async def test_a_large_block_is_received_where_it_belongs() -> None:
    blocks = Blocks(64 << 20)
    async with place(blocks.server.accept) as here:
        client, memory = client_of(here), memoryview(bytearray(64 << 20))
        tracemalloc.start()
        try:
            await client.fetch(blocks.all[0], memory)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20, "it is copied nowhere"
        finally:
            tracemalloc.stop()
        assert memory == blocks.read(blocks.all[0])
        client.close()
        blocks.server.close()


async def test_a_block_is_lost_with_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "FETCH_S_MAX", 0.2)
    async with place() as here:  # accepts, and sends no block
        client = client_of(here)
        with pytest.raises(BlockLost, match="its machine has gone"):
            await fetched(client, Address(9 << 48, 0, 10))
        with pytest.raises(BlockLost, match="more than"):
            await client.fetch(block_of(PAYLOAD_BYTES_MAX + 1), memoryview(b""))
        with pytest.raises(BlockLost, match="did not come within"):
            await fetched(client, block_of(10))
        waiting = asyncio.create_task(fetched(client, block_of(10)))
        await asyncio.sleep(0.02)
        client.set_endpoints({})
        with pytest.raises(BlockLost, match=CLOSED):
            await waiting
        client.set_endpoints({HOLDER: here.endpoint})
        waiting = asyncio.create_task(fetched(client, block_of(10)))
        await until(lambda: len(here.links) == 2)
        here.links[1].close()
        with pytest.raises(BlockLost, match=CLOSED):
            await waiting
        client.close()
    with socket.socket() as free:
        free.bind((HOST, 0))
        client.set_endpoints({HOLDER: free.getsockname()})
    with pytest.raises(BlockLost, match="cannot be reached"):
        await fetched(client, block_of(10))


async def test_the_end_of_a_link_in_the_middle_of_a_block() -> None:
    async with place() as here:
        client = client_of(here)
        for times in (1, 2):
            waiting = asyncio.create_task(fetched(client, block_of(10 << 20)))
            await until(partial(lambda count: len(here.frames) == count, times))
            link = here.links[-1]
            link.begin(FrameKind.BYTES, here.frames[-1].subject, 10 << 20)
            link.send_part(memoryview(bytes(1 << 20)))
            await asyncio.sleep(0.02)
            link.close()
            with pytest.raises(BlockLost, match=CLOSED):
                await waiting
        assert len(here.links) == 2, "each opened a link of its own"
        client.close()


async def test_memory_is_not_written_after_its_fetch_was_given_up(tls: NodeTls | None) -> None:
    size = 8 << 20
    async with place(tls=tls) as here:
        client, memory = client_of(here, tls), memoryview(bytearray(size))
        waiting = asyncio.create_task(client.fetch(block_of(size), memory))
        await until(lambda: bool(here.frames))
        link = here.links[0]
        link.begin(FrameKind.BYTES, here.frames[0].subject, size)
        link.send_part(memoryview(b"\x01" * (1 << 20)))
        await until(lambda: memory[(1 << 20) - 1] == 1)
        link.send_part(memoryview(b"\x02" * (size - (1 << 20))))  # under way when it is given up
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        memory[:] = bytes(size)  # somebody else's now
        await asyncio.sleep(0.1)
        assert memory == bytes(size)
        again = asyncio.create_task(fetched(client, block_of(5)))
        await until(lambda: len(here.frames) == 2)
        here.links[1].send(FrameKind.BYTES, here.frames[1].subject, 0, [b"12345"])
        assert bytes(await again) == b"12345"
        client.close()


async def test_a_block_that_was_given_up_before_it_came_is_dropped() -> None:
    async with place() as here:
        client, memory = client_of(here), memoryview(bytearray(1 << 20))
        waiting = asyncio.create_task(client.fetch(block_of(1 << 20), memory))
        await until(lambda: len(here.frames) == 1)
        waiting.cancel()
        next_one = asyncio.create_task(fetched(client, block_of(1 << 20)))
        await until(lambda: len(here.frames) == 2)
        link = here.links[0]
        for frame, byte in zip(here.frames, (b"\x01", b"\x02"), strict=True):
            link.send(FrameKind.BYTES, frame.subject, 0, [byte * (1 << 20)])
        assert bytes(await next_one) == b"\x02" * (1 << 20)
        assert (memory == bytes(1 << 20), len(here.links)) == (True, 1)
        client.close()


async def test_a_machine_that_sends_what_nobody_asked_for_is_dropped() -> None:
    async with place() as here:
        client = client_of(here)
        lies: list[Callable[[NetworkLink, int], None]] = [
            lambda link, number: link.send(FrameKind.BYTES, number + 7, 0, [b"12345"]),
            lambda link, number: link.begin(FrameKind.BYTES, number, 1 << 30),
            lambda link, number: link.begin(FrameKind.BYTES, number + 7, 1 << 30),
            lambda link, number: link.send(FrameKind.RECORDS, number, 0, [b"12345"]),
            lambda link, number: link.send(FrameKind.BYTES, number, -1, [b"x" * (1 << 20)]),
        ]
        for count, lie in enumerate(lies, 1):
            waiting = asyncio.create_task(fetched(client, block_of(5)))
            await until(partial(lambda least: len(here.frames) == least, count))
            lie(here.links[-1], here.frames[-1].subject)
            with pytest.raises(BlockLost, match="asked for"):
                await waiting
        client.close()


async def test_blocks_that_nobody_reads_take_no_memory(monkeypatch: pytest.MonkeyPatch, tls: NodeTls | None) -> None:
    monkeypatch.setattr(network, "SILENT_S", 100.0)
    size, times = 4 << 20, 16
    blocks = Blocks(size)
    links: list[NetworkLink] = []

    def accept(link: NetworkLink) -> None:
        links.append(link)
        blocks.server.accept(link)

    async with place(accept, tls) as here:
        context = tls.client_context() if tls is not None else None
        reader, writer = await asyncio.open_connection(*here.endpoint, ssl=context, limit=1 << 16)
        request = encode(blocks.all[0])
        requests = b"".join(pack_head(FrameKind.BYTES, each, 0, len(request)) + request for each in range(1, times + 1))
        await proved((reader, writer), Purpose.BLOCKS, requests)
        await asyncio.sleep(0.2)
        held = links[0]._transport
        assert held is not None
        assert held.get_write_buffer_size() <= 4 * PART_BYTES
        for number in range(1, times + 1):  # and all of them come to one who reads
            while True:
                _, _, kind, length, subject, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
                if kind != FrameKind.RECORDS:
                    break
            assert (subject, length) == (number, size)
            assert await reader.readexactly(size) == blocks.memory[0]
        writer.close()
        blocks.server.close()


async def test_who_asks_for_too_much_or_nonsense_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "REQUESTS_MAX", 10)
    monkeypatch.setattr(network, "SILENT_S", 100.0)
    blocks = Blocks(4 << 20)
    request = encode(blocks.all[0])
    async with place(blocks.server.accept) as here:
        for purpose, sent in (
            (Purpose.BLOCKS, (pack_head(FrameKind.BYTES, 1, 0, len(request)) + request) * 100),
            (Purpose.BLOCKS, pack_head(FrameKind.BYTES, 1, 0, 3) + b"abc"),
            (Purpose.BLOCKS, pack_head(FrameKind.BYTES, 1, 0, 1 << 20)),
            (Purpose.BLOCKS, pack_head(FrameKind.BYTES, 1, 0, 0)),
            (Purpose.BLOCKS, os.urandom(HEADER.size)),
            (Purpose.AGENT, b""),
        ):
            visit = await here.visit()
            await proved(visit, purpose, sent)
            assert await is_closed(visit)
        client = client_of(here)
        assert await fetched(client, blocks.all[0]) == blocks.memory[0]
        for wrong in (Address(-1, 0, 5), Address(1 << 62, 1 << 62, 5), Address(HOLDER << 48, 1 << 40, -5)):
            with pytest.raises(BlockLost):
                await client.fetch(Address(HOLDER << 48, wrong.offset or 7, wrong.size), memoryview(bytearray(5)))
        client.close()
        blocks.server.close()
