"""A request's whole way through the server's own process, without sockets: edge, driver, core, log and back.

The wire hands over a body and takes an answer; the backend echoes at the next turn of the loop. All between is real.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from sloop.actions import Order, StartWorker
from sloop.app.limits import ServerLimits
from sloop.app.load import load_application
from sloop.events import Event, Finished, WorkerReady
from sloop.runlog import Recorder
from sloop.serve.blocks import write_block
from sloop.serve.control.versions import offer_of
from sloop.serve.dataflow import StageWiring, wire
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.http import HttpConnection, HttpServer
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.large import LargeJson
from sloop.serve.edge.rest import Rest
from sloop.serve.edges import EdgePort
from sloop.serve.insight import Insight
from sloop.serve.journal import Journal
from sloop.serve.messages import BatchFinished, FromEdge, RequestEnded, Run, RunBatch, Submit, ToEdge
from sloop.serve.metrics import Metrics
from sloop.serve.planner import PlannerProcess
from sloop.serve.protocols import BackendListener, OnDifference, Servable, SpareProcesses
from sloop.serve.transport import FrameKind, pack_head
from sloop.shared_memory import Arenas
from sloop.systems.replay import header_of
from sloop.systems.setup import build, set_up
from sloop.tensor import Port, Signature, Tensor
from sloop.units import s
from sloop.vocabulary import BatchId, Life, Outcome, ReplicaId
from tests.serve.graphs import graph_of
from tests.serve.rig import edge_within

WIDTH, ANSWER = 16, 8
CONNECTIONS = 64
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,16],"data":[%s]}]}' % b",".join([b"0.5"] * WIDTH)
MODEL = Signature((Port("x", "FP32", (-1, WIDTH)),), (Port("y", "FP32", (-1, ANSWER)),))
OUTPUT = write_block([Tensor("FP32", (1, ANSWER), bytes(4 * ANSWER))], None)
APPLICATION = {
    "name": "path",
    "slo_ms": 1000,
    "stages": [
        {
            "name": "only",
            "variants": [
                {
                    "name": "v",
                    "profile": {
                        "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 0.01, "gamma": 0.1},
                        "max_batch": 64,
                        "max_cores": 1,
                    },
                }
            ],
        }
    ],
    "system": "static",
    "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 4, "memory_bytes": 1 << 30}]},
}


SLO_NS = s(86_400)
"""Of recorded requests, which are sent again and again."""

HEAD = (
    "POST /v2/models/path/infer HTTP/1.1\r\nhost: localhost\r\nuser-agent: test\r\naccept: */*\r\n"
    "content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
REQUEST = (HEAD % len(BODY)).encode() + BODY


def many(replicas: int, batch_max: int) -> dict[str, Any]:
    """The application with so many replicas."""
    node = {"hardware": "custom", "count": 1, "cores": replicas, "memory_bytes": 1 << 40}
    system = {"name": "static", "replicas": replicas, "batch_max": batch_max}
    return APPLICATION | {"system": system, "cluster": {"nodes": [node]}}


class Wire(asyncio.Transport):
    """Takes answers at once, and keeps their status codes."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[int] = []

    def write(self, data: Any) -> None:
        self.statuses.append(int(bytes(data[9:12])))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_reading(self) -> bool:
        return True


class Echo:
    """A backend whose replicas are ready, and whose batches are done, at the next turn of the loop. With `framed`, what
    workers are told is encoded, and what they report is decoded, as if they were processes."""

    def __init__(self, *, framed: bool = False) -> None:
        self._reporter: BackendListener | None = None
        self.on_difference: OnDifference = lambda replica, stage, variant, why: None
        self._framed = framed
        self._done = msgspec.msgpack.Decoder(BatchFinished).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._reports: dict[int, bytes] = {}
        """What a worker reports of so many visits."""

    def run_alone(self, stage: str, variant: str, why: str) -> None:
        """Nothing here joins requests."""

    def attach(self, listener: BackendListener) -> None:
        self._reporter = listener

    def order(self, order: Order) -> None:
        if isinstance(order, StartWorker):
            self._soon(WorkerReady(order.worker))

    def spare_processes(self) -> dict[str, SpareProcesses]:
        return {}

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        if self._framed:
            assert pack_head(FrameKind.RECORDS, 0, 0, len(self._encode([RunBatch(batch, replica, order)])))
        asyncio.get_running_loop().call_soon(self._finish, batch, replica, order)

    def forget(self, stages: Iterable[str]) -> None: ...

    async def open(self) -> None: ...

    def learn(
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None: ...

    async def close(self) -> None: ...

    def _soon(self, event: Event) -> None:
        assert self._reporter is not None
        asyncio.get_running_loop().call_soon(self._reporter.on_event, event)

    def _finish(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        assert self._reporter is not None
        if not self._framed:
            self._reporter.on_finished(Finished(batch, replica, 1), [OUTPUT] * order.visits, {})
            return
        report = self._reports.get(order.visits)
        if report is None:
            self._reports[order.visits] = report = self._encode(
                BatchFinished(Finished(batch, replica, 1), [OUTPUT] * order.visits)
            )
        done = self._done(report)
        event = structs.replace(done.event, batch=batch, replica=replica)
        self._reporter.on_finished(event, done.blocks, done.faults)


class Deciding:
    """The deciding process alone: what edges send comes as recorded frames, what they are told is encoded and counted.
    With `replicas`, a worker takes one request at a time, or `batch_max`, and its frames are recorded as well. Make it
    inside a running event loop."""

    def __init__(self, folder: Path, *, edges: int = 1, replicas: int = 0, batch_max: int = 1) -> None:
        application = load_application(many(replicas, batch_max) if replicas else APPLICATION)
        setup = set_up(application)
        wiring = wire(graph_of({"only": ()}), {("only", "v"): MODEL}, rows_max=64)
        served = ServedVersion("path", "path", "1", application.slo_ns, wiring)
        self.core, self.validator = setup.core(), InputValidator(wiring.signature)
        self._journal = journal = Journal(folder, header_of(setup, origin="live", date=""))
        metrics = Metrics(setup.parts(), nodes=application.cluster, build=build)
        self.recorders: Sequence[Recorder] = (metrics.state, journal)
        planner = PlannerProcess(asyncio.get_running_loop())
        backend = Echo(framed=replicas > 0)
        self._replicas = replicas
        self.driver = Driver(self.core, backend, [served], planner=planner, recorders=self.recorders)
        insight = Insight(
            self.core,
            metrics,
            deployment="path",
            system=setup.system,
            clock=lambda: self.driver.now_ns,
            answered_rows=self.driver.answered_rows,
        )
        self.insight, self.offer = insight, offer_of(application, [served], ["1"])
        self._told: list[list[Struct]] = [[] for _ in range(edges)]
        self._ports = [EdgePort(self.driver, insight.ask, Arenas(), partial(self._tell, told)) for told in self._told]
        self._ends = 0
        self._decode = msgspec.msgpack.Decoder(list[FromEdge]).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def _tell(self, told: list[Struct], record: ToEdge) -> None:
        if not told:
            asyncio.get_running_loop().call_soon(self._flush, told)
        told.append(record)

    def _flush(self, told: list[Struct]) -> None:
        assert self._encode(told)
        last = told[-1]
        assert isinstance(last, RequestEnded)
        assert last.outcome is Outcome.SERVED, last.why
        self._ends += len(told)
        told.clear()

    def recorded(self, count: int, first: int = 0) -> bytes:
        """The frame of so many small requests, which may be sent for a day."""
        block = write_block([Tensor("FP32", (1, WIDTH), bytes(4 * WIDTH))], None)
        began_ns = time.monotonic_ns()
        submits = [Submit(first + number, "path", block, began_ns, slo_ns=SLO_NS) for number in range(count)]
        return self._encode(submits)

    async def decide(self, frames: Sequence[bytes], count: int) -> None:
        """Do what `count` requests want, to their ends; each frame is of another edge."""
        wanted = self._ends + count
        for port, frame in zip(self._ports, frames, strict=True):
            for record in self._decode(frame):
                port.acts[type(record)](record)
        while self._ends < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def warm_up(self) -> None:
        """The first plan is made and its replicas are ready."""
        self.driver.start()
        for _ in range(5):
            await asyncio.sleep(0)
        states = [each.life for each in self.core.state.replicas.values()]
        assert states == [Life.READY] * max(1, self._replicas), f"{len(states)} replicas"

    async def close(self) -> None:
        """Stop, and close the log."""
        await self.driver.close()
        self._journal.close()


class Way(Deciding):
    """The whole path, ready to be walked: an edge in the deciding process before it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        port, edge = edge_within(self.driver, self.insight.ask, Arenas())
        port.tell(self.offer)
        service = edge.service
        self.wire = Wire()
        self._connections = self._connected(Rest(service, LargeJson()).answer, service.bodies)
        self._at_once = self._connected(lambda exchange: exchange.reply(200, b"{}"), service.bodies)

    def _connected(self, answer: Any, bodies: BodyMemory) -> list[HttpConnection]:
        """Connections of a server without a socket."""
        server = HttpServer(answer, bodies=bodies, limits=ServerLimits(requests=1 << 10))
        server.intake.start(asyncio.get_running_loop())
        server.intake.turn_ns = 10**12  # a slow machine takes the same way
        connections = [HttpConnection(server) for _ in range(CONNECTIONS)]
        for each in connections:
            each.connection_made(self.wire)
        return connections

    async def walk(self, count: int, *, at_once: bool = False) -> None:
        """So many requests at one time, to their answers; `at_once` without a look at what they want."""
        wanted = len(self.wire.statuses) + count
        for connection in (self._at_once if at_once else self._connections)[:count]:
            connection.data_received(REQUEST)
        while len(self.wire.statuses) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0)
