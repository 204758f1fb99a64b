"""Edges as processes: what they send and are told, what their death costs, and that nothing that clients send is parsed
in the deciding process."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from sloop.actions import End
from sloop.app.limits import Limits, ServerLimits
from sloop.app.load import load_application, load_deployment
from sloop.errors import InputError, MachineError
from sloop.runlog import read_log
from sloop.serve import edges as module
from sloop.serve.blocks import Block
from sloop.serve.edge.http import HttpConnection, HttpServer
from sloop.serve.edge.listener import Tls
from sloop.serve.edge.process import EdgeServer, EdgeSettings
from sloop.serve.edges import EdgePort, Edges, open_sockets
from sloop.serve.messages import (
    Ask,
    Cancel,
    EdgeCounts,
    Free,
    FromEdge,
    OfferModel,
    RequestEnded,
    Submit,
    ToEdge,
    Topic,
    decoder,
    encode,
)
from sloop.serve.protocols import Servable
from sloop.serve.server import Serving, Settings, serving
from sloop.serve.transport import FrameKind, ProcessChannel, ProtocolError, RecordLink, socket_pair
from sloop.shared_memory import Address, Arena, Arenas
from sloop.systems.replay import rebuild, replay_log
from sloop.systems.setup import set_up
from sloop.tensor import Port, Signature
from sloop.vocabulary import Outcome, Request, RequestId
from tests.serve.edge.test_attacks import make_certificate
from tests.serve.edge.test_sink import OFFER
from tests.serve.path import Wire
from tests.serve.rig import limited, no_page
from tests.serve.test_live import ECHO, setup_of

pytestmark = pytest.mark.live


def test_settings_of_an_edge_read_back() -> None:
    tls = Tls(Path("/a"), Path("/b"))
    settings = EdgeSettings(ServerLimits(requests=4), "*", tls, "secret", Path("/keys"), access_log="-")
    assert EdgeSettings.decode(settings.encode()) == settings


def test_a_taken_port_is_refused_also_if_edges_would_share_it() -> None:
    with contextlib.closing(open_sockets("127.0.0.1", 0, 0, 3)) as sockets:
        numbers = {sock.getsockname()[1] for sock in sockets.http}
        assert (len(sockets.http), len(numbers)) == (3, 1)
        with pytest.raises(MachineError, match="is in use"):
            open_sockets("127.0.0.1", numbers.pop(), 0, 2)
        assert sockets.grpc is not None
        with pytest.raises(MachineError, match="is in use"):
            open_sockets("127.0.0.1", 0, sockets.grpc.getsockname()[1], 1)
    with contextlib.closing(open_sockets("127.0.0.1", 0, None, 1)) as sockets:
        assert len(sockets.all) == 1


async def test_records_of_one_turn_are_one_frame() -> None:
    ours, theirs = socket_pair()
    link = RecordLink(asyncio.get_running_loop(), ours, FromEdge, {}, lambda _: None)
    for number in range(3):
        link.send(Submit(number, "demo", b"x", 7))
    await asyncio.sleep(0)
    link.send(EdgeCounts(held_bytes=5))
    await asyncio.sleep(0)
    with theirs:
        frames = [ProcessChannel(theirs).receive() for _ in range(2)]
    link.close()
    decode = msgspec.msgpack.Decoder(list[FromEdge]).decode
    assert [frame.kind for frame in frames if frame is not None] == [FrameKind.RECORDS] * 2
    assert [decode(frame.payload) for frame in frames if frame is not None] == [
        [Submit(number, "demo", b"x", 7) for number in range(3)],
        [EdgeCounts(held_bytes=5)],
    ]


@pytest.mark.parametrize("payload", [b"", b"\x91\xc0", msgspec.msgpack.encode([[99, 1]])])
async def test_an_edge_that_sends_something_else_is_given_up(payload: bytes) -> None:
    ours, theirs = socket_pair()
    ends: list[str] = []
    link = RecordLink(asyncio.get_running_loop(), ours, FromEdge, {}, ends.append)
    with theirs:
        ProcessChannel(theirs).send(FrameKind.RECORDS, payload=[payload])
        async with asyncio.timeout(5):
            while not ends:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    link.close()
    assert len(ends) == 1


async def test_of_8_mib_of_json_the_deciding_process_gets_a_line() -> None:
    """What an edge makes of a large body, and what it sends."""
    arenas, sent = Arenas(), list[FromEdge]()
    held = arenas.make(64 << 20, lambda _: None)
    settings = EdgeSettings(ServerLimits(body_bytes=16 << 20, bytes=64 << 20, json_body_bytes=9 << 20, requests=8))
    edge = EdgeServer(settings, sent.append, Arena(held.number, held.fd), os.getpid())
    wide = Signature((Port("x", "UINT8", (-1, -1)),), OFFER.signature.outputs)
    edge.acts[OfferModel](msgspec.structs.replace(OFFER, signature=wide, slo_ns=10**11))
    assert isinstance(edge.port, HttpServer)
    edge.port.intake.start(asyncio.get_running_loop())
    numbers = b",".join([b"123"] * (2 << 20))
    body = b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"UINT8","data":[%b]}]}' % (2 << 20, numbers)
    connection, wire = HttpConnection(edge.port), Wire()
    connection.connection_made(wire)
    head = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.data_received(head)
    for at in range(0, len(body), 1 << 18):
        connection.data_received(body[at : at + (1 << 18)])
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        while not sent and not wire.statuses:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not wire.statuses
    (submit,) = sent
    assert isinstance(submit, Submit)
    assert isinstance(submit.block, Address)
    assert submit.block.size > 2 << 20
    assert len(msgspec.msgpack.encode(submit)) < 200
    assert edge._large is not None
    edge._large.close()  # the edge was not started, so it cannot be closed as a whole
    arenas.abandon(held)


class Scene:
    """A deciding process with the ports of two edges: requests stay open until a test ends them."""

    def __init__(self) -> None:
        self.arenas = Arenas()
        self.told: list[ToEdge] = []
        self.cancelled: list[RequestId] = []
        self.requests: dict[RequestId, Block] = {}
        driver: Any = self
        self.port, self.other = (EdgePort(driver, no_page, self.arenas, self.told.append) for _ in range(2))

    def submit(self, block: Block, edge: EdgePort, number: int, **_: Any) -> None:
        request = RequestId(len(self.requests) + 1)
        self.requests[request] = block
        edge.requests[number] = request

    def cancel(self, request: RequestId) -> None:
        self.cancelled.append(request)

    def block_of(self, port: EdgePort) -> Address:
        return Arena(port.arena.number, port.arena.fd).allocate(9000)[0]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.arenas.close()


def test_an_edge_names_its_own_blocks_and_releases_what_it_was_given(scene: Scene) -> None:
    with pytest.raises(ProtocolError, match="not in the arena of this edge"):
        scene.port.acts[Submit](Submit(1, "demo", scene.block_of(scene.other), 7))
    answer = Address(5 << 48, 0, 100)
    with pytest.raises(ProtocolError, match="was not handed to this edge"):
        scene.port.acts[Free](Free(answer))
    assert not scene.requests
    own = scene.block_of(scene.port)
    scene.port.acts[Submit](Submit(1, "demo", own, 7))
    assert scene.requests == {1: own}
    scene.port.on_end(RequestEnded(1, Outcome.SERVED, "1", [answer]))
    scene.port.acts[Cancel](Cancel(1))  # it has crossed the end
    scene.port.acts[Free](Free(answer))
    assert not scene.cancelled
    with pytest.raises(ProtocolError, match="was not handed to this edge"):
        scene.port.acts[Free](Free(answer))


def test_a_lost_edge_costs_its_requests_and_keeps_no_answer(scene: Scene) -> None:
    freed: list[Address] = []
    scene.arenas.add_holder(5, freed.append)
    early, late = Address(5 << 48, 0, 100), Address(5 << 48, 4096, 100)
    for number in (1, 2):
        scene.port.acts[Submit](Submit(number, "demo", b"x", 7))
    scene.port.on_end(RequestEnded(1, Outcome.SERVED, "1", [early]))
    told = len(scene.told)
    scene.port.lose()
    assert (scene.cancelled, freed) == ([2], [early])
    scene.port.on_end(RequestEnded(2, Outcome.SERVED, "1", [late]))
    assert (freed, len(scene.told)) == ([early, late], told)


async def test_answers_are_delivered_when_no_agent_is_asked_for_them_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, here, there = EdgeSettings(ServerLimits()), Scene(), Address(5 << 48, 0, 100)
    nobody: Any = None
    with contextlib.closing(open_sockets("127.0.0.1", 0, None, 1)) as sockets:
        edges = Edges(nobody, no_page, here.arenas, settings, sockets, Path())
    edges.slots[0].port = port = here.port
    for number in (1, 2, 3):
        port.acts[Submit](Submit(number, "demo", b"x", 7))
    port.on_end(RequestEnded(1, Outcome.SERVED, "1", [there]))
    port.on_end(RequestEnded(2, Outcome.SERVED, "1", [b"small"]))
    delivering = asyncio.create_task(edges.delivered())
    await asyncio.sleep(0.05)
    assert not delivering.done()
    port.acts[Free](Free(there))
    await asyncio.wait_for(delivering, 5)
    port.on_end(RequestEnded(3, Outcome.SERVED, "1", [there]))
    monkeypatch.setattr(module, "FETCH_S_MAX", 0.05)
    await asyncio.wait_for(edges.delivered(), 5)  # it does not come: no longer than a fetch takes
    here.arenas.close()


def test_an_edge_cannot_ask_what_only_the_planner_can_answer() -> None:
    decode = decoder(list[FromEdge]).decode
    assert decode(encode([Ask(Topic.READY)])) == [Ask(Topic.READY)]
    with pytest.raises(msgspec.ValidationError, match="memories"):
        decode(encode([Ask("memories")]))


class Running:
    """A server in this process, on a loop in a thread, with edges of its own."""

    def __init__(self, folder: Path, edges: int = 1, **settings: Any) -> None:
        self.folder = folder
        self.server: Serving | None = None
        self._settings = Settings(http_port=0, grpc_port=0, state_folder=folder, edges=edges, **settings)
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._ready.wait(30)
        if self.errors:
            self._thread.join(10)
            raise self.errors[0]

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        setup = limited(setup_of({"name": "static", "replicas": 1, "cores": 0.5}), drain_s=5)
        models = {("only", "v"): Servable("fake:sleep:5:0", ECHO)}
        try:
            async with serving(setup, models, self._settings) as self.server:
                self._ready.set()
                await self._stop.wait()
        except BaseException as error:
            self.errors.append(error)
            self._ready.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def running(self) -> Serving:
        assert self.server is not None
        return self.server

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def ask(self, body: bytes = b"", timeout_s: float = 20) -> int:
        """The status of an inference, or of a question if there is no body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.running.http_port, timeout=timeout_s)
        with contextlib.closing(connection):
            if body:
                connection.request("POST", "/v2/models/live/infer", body)
            else:
                connection.request("GET", "/v2/health/ready")
            response = connection.getresponse()
            response.read()
            return response.status

    def try_ask(self, body: bytes) -> str:
        """The same as text; `closed` if the connection breaks."""
        try:
            return str(self.ask(body))
        except (OSError, http.client.HTTPException):
            return "closed"

    def until_ready(self) -> None:
        until_s = time.monotonic() + 20
        while self.ask() != 200:
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Of the edges for HTTP."""
        return [slot.pid for slot in self.running.edges.slots if slot.pid is not None and not slot.is_grpc]


def body_of(text: bytes) -> bytes:
    data = [list(text)]
    tensor = {"name": "x", "datatype": "UINT8", "shape": [1, len(text)], "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path / "state") as running:
        running.until_ready()
        yield running


def test_an_edge_that_dies_under_load_loses_its_connections_and_nothing_else(server: Running) -> None:
    outcomes: Counter[str] = Counter()
    stop = threading.Event()

    def load(large: bool) -> None:
        body = body_of(b"x" * (20_000 if large else 4))
        while not stop.is_set():
            outcomes[server.try_ask(body)] += 1

    clients = [threading.Thread(target=load, args=(number % 2 == 0,)) for number in range(6)]
    for client in clients:
        client.start()
    for death in range(3):
        time.sleep(0.3)
        (pid,) = server.pids()
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + 20
        while server.running.edges.deaths <= death or server.pids() in ([], [pid]):
            assert time.monotonic() < until_s
            time.sleep(0.01)
    answered = outcomes["200"]
    until_s = time.monotonic() + 20
    while outcomes["200"] < answered + 20:
        assert time.monotonic() < until_s, outcomes
        time.sleep(0.02)
    stop.set()
    for client in clients:
        client.join(30)
    assert outcomes.keys() <= {"200", "closed"}, outcomes
    assert outcomes["closed"] <= 3 * len(clients), "only what the dead edges had"
    assert "\nsloop_edges_lost_total 3.0\n" in server.running.metrics.exposition().decode()
    arenas = server.running.edges._arenas
    until_s = time.monotonic() + 10
    while any(arena.blocks for arena in arenas._held.values()) or len(arenas) > 3:
        assert time.monotonic() < until_s, [arena.blocks for arena in arenas._held.values()]
        time.sleep(0.02)


@pytest.mark.parametrize("edges", [1, 2])
def test_an_edge_that_hangs_is_replaced_and_what_waits_is_served(
    tmp_path: Path, edges: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it were stopped for ever: the kernel lets connections wait at its sockets, and its successor takes them."""
    with Running(tmp_path / "state", edges=edges) as running:
        running.until_ready()
        hung = running.pids()[0]
        os.kill(hung, signal.SIGSTOP)
        outcomes = [running.ask(body_of(b"abcd")) for _ in range(6)]  # with 20 s of time for each
        assert outcomes == [200] * 6
        if edges > 1:  # the kernel may have given all connections to the other one
            until_s = time.monotonic() + 20
            while hung in running.pids():
                assert time.monotonic() < until_s
                time.sleep(0.02)
        assert running.running.edges.deaths == 1
        assert hung not in running.pids()
        os.kill(hung, signal.SIGCONT)  # as a debugger might: its number has not gone to another process
        (said,) = [line for line in caplog.messages if "has died" in line]
        assert said.startswith("edge 0 has died (it has hung: no sign of life for ")
        assert "; it is stopped by a signal); " in said


def test_the_log_of_a_server_whose_edge_died_replays_with_one_end_for_each_request(tmp_path: Path) -> None:
    with Running(tmp_path / "state") as running:
        running.until_ready()
        assert running.ask(body_of(b"abcd")) == 200
        late = threading.Thread(target=lambda: running.try_ask(body_of(b"x" * 9)))
        late.start()
        time.sleep(0.002)
        os.kill(running.pids()[0], signal.SIGKILL)
        late.join(20)
        running.until_ready()
        assert running.ask(body_of(b"abcd")) == 200
    log = read_log(tmp_path / "state")
    requests = [record.id for _, record in log if isinstance(record, Request)]
    ends = [record.request for _, record in log if isinstance(record, End)]
    assert sorted(ends) == requests
    played = replay_log(log, rebuild(log.header).core(), definitions=log.header.definitions)
    assert played.difference is None


def test_several_edges_share_the_ports(tmp_path: Path) -> None:
    with Running(tmp_path / "state", edges=3) as running:
        running.until_ready()
        assert len(set(running.pids())) == 3
        assert {running.ask(body_of(b"ab")) for _ in range(20)} == {200}
        os.kill(running.pids()[0], signal.SIGKILL)
        assert {running.ask(body_of(b"ab")) for _ in range(20)} == {200}, "connections wait for the one that follows"


def test_an_edge_knows_the_key_but_neither_its_arguments_nor_its_environment_say_it(tmp_path: Path) -> None:
    with Running(tmp_path / "state", api_key="very-secret") as running:
        (pid,) = running.pids()
        for name in ("cmdline", "environ"):
            assert b"very-secret" not in Path(f"/proc/{pid}/{name}").read_bytes()
        connection = http.client.HTTPConnection("127.0.0.1", running.running.http_port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/v2", headers={"x-api-key": "very-secret"})
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())["name"]) == (200, "sloop")
        assert running.ask(body_of(b"x")) == 401
        until_s = time.monotonic() + 10
        while running.running.edges.counts().keys_refused.get("missing") != 1:
            assert time.monotonic() < until_s, "it reports what it has counted"
            time.sleep(0.05)


def test_certificates_are_read_again_on_order(tmp_path: Path) -> None:
    for name, issuer in (("authority", ""), ("server", "authority")):
        make_certificate(tmp_path, name, issuer=issuer)
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    running = Running(tmp_path / "state", edges=2, tls=Tls(cert, key))
    context = ssl.create_default_context(cafile=str(tmp_path / "authority.pem"))

    def serials() -> list[str]:
        found = []
        for port in (running.running.http_port, running.running.grpc_port):
            plain = socket.create_connection(("localhost", port), timeout=10)
            with plain, context.wrap_socket(plain, server_hostname="localhost") as wire:
                shown: Any = wire.getpeercert()
                found.append(shown["serialNumber"])
        return found

    try:
        first = serials()
        written = [path.stat().st_mtime_ns for path in (cert, key)]
        make_certificate(tmp_path, "server", issuer="authority")
        for path, ns in zip((cert, key), written, strict=True):
            os.utime(path, ns=(ns, ns))  # so that nothing but the order lets them be read
        running._loop.call_soon_threadsafe(running.running.edges.reload)
        until_s = time.monotonic() + 20
        while set(serials() + serials()) & set(first):  # either edge may answer
            assert time.monotonic() < until_s
            time.sleep(0.02)
    finally:
        running.stop()


def test_an_edge_that_cannot_start_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EdgeSettings, "encode", lambda _: b"nonsense")
    with pytest.raises(MachineError, match="an edge has ended at its start"):
        Running(tmp_path / "state")


def test_no_edge_outlives_the_server_and_ports_are_free_again(tmp_path: Path) -> None:
    with Running(tmp_path / "state") as running:
        pids, port = running.pids(), running.running.http_port
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_what_edges_share_and_what_each_has() -> None:
    """As docs/serving.md says."""
    told: list[ToEdge] = []
    limits = ServerLimits(requests=10, bytes=1 << 21, connections=10, answers_bytes=1 << 20)
    settings = EdgeSettings(limits)
    with contextlib.closing(open_sockets("127.0.0.1", 0, 0, 4)) as sockets:
        edges = Edges(None, no_page, Arenas(), settings, sockets, Path("/state"))  # type: ignore[arg-type]
        for slot in (edges.slots[0], edges.slots[-1]):
            slot.port = EdgePort(None, no_page, Arenas(), told.append)  # type: ignore[arg-type]  # nobody submits
        edges.offer(msgspec.structs.replace(OFFER, limits=Limits(requests=10, bytes=100)))
    own, rpc = edges.slots[0].settings, edges.slots[-1].settings
    assert own.limits == replace(limits, requests=3, bytes=1 << 19), "all others are of each edge"
    assert rpc == msgspec.structs.replace(settings, socket_folder=Path("/state")), "gRPC has one edge"
    assert [model.limits for model in told if isinstance(model, OfferModel)] == [
        Limits(requests=3, bytes=25),
        Limits(requests=10, bytes=100),
    ]


def test_edges_are_declared_by_a_deployment(tmp_path: Path) -> None:
    application = load_application({"name": "a", "slo_ms": 10, "stages": [{"name": "s", "variants": [VARIANT]}]})
    assert application.name == "a"
    document = {"name": "d", "applications": [{"name": "a", "slo_ms": 10, "stages": [STAGE]}], "edges": 2}
    deployment = load_deployment(document)
    assert (deployment.edges, Settings().edges_of(deployment)) == (2, 2)
    assert Settings(edges=3).edges_of(deployment) == 3
    assert Settings().edges_of(replace(deployment, edges=None)) == 1
    with pytest.raises(InputError, match="edges"):
        load_deployment({**document, "edges": 0})
    assert set_up(deployment).deployment.edges == 2


LATENCY = {"form": "quadratic", "alpha": 0.0, "beta": 0.01, "gamma": 0.1}
VARIANT = {"name": "v", "profile": {"latency_ms": LATENCY, "max_batch": 4, "max_cores": 1}}
STAGE = {"name": "s", "variants": [VARIANT]}
