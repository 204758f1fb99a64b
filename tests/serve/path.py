"""A request's whole way through the server's own process, without sockets: gateway, driver, core, log and back.

The wire hands over a body and takes an answer; the backend echoes at the next turn of the loop. All between is real.
"""

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sloop.app.load import load_application
from sloop.events import Event, Finished, ReplicaReady
from sloop.runlog import Recorder
from sloop.serve.dataflow import wire
from sloop.serve.driver import Driver, ServedVersion
from sloop.serve.gateway.http import BodyMemory, HttpServer
from sloop.serve.gateway.inputs import InputValidator
from sloop.serve.gateway.insight import Insight
from sloop.serve.gateway.metrics import Metrics
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.service import InferenceService, Model
from sloop.serve.planner import PlannerProcess
from sloop.serve.protocols import BackendListener
from sloop.serve.server import Journal
from sloop.serve.transport import pack_batch, pack_table, unpack_outputs
from sloop.systems.replay import header_of
from sloop.systems.setup import build, set_up
from sloop.tensor import Port, Signature, Tensor
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec
from tests.serve.graphs import graph_of

WIDTH, ANSWER = 16, 8
BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,16],"data":[%s]}]}' % b",".join([b"0.5"] * WIDTH)
MODEL = Signature((Port("x", "FP32", (-1, WIDTH)),), (Port("y", "FP32", (-1, ANSWER)),))
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


class Scope:
    """A request's head, as the HTTP server shows it."""

    method, path, query_string, http_version = "POST", "/v2/models/path/infer", "", "1.1"
    headers = {"content-length": str(len(BODY)), "content-type": "application/json"}  # noqa: RUF012  # never changed


class Wire:
    """Hands over the body and keeps the answers' status codes."""

    def __init__(self) -> None:
        self.statuses: list[int] = []

    async def __call__(self) -> bytes:
        return BODY

    async def client_disconnect(self) -> None: ...

    def response_bytes(self, status: int, headers: object, body: bytes) -> None:
        self.statuses.append(status)


class Echo:
    """A backend whose replicas are ready, and whose batches are done, at the next turn of the loop."""

    def __init__(self) -> None:
        self._reporter: BackendListener | None = None

    def attach(self, listener: BackendListener) -> None:
        self._reporter = listener

    def start(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        self._soon(ReplicaReady(replica))

    def stop(self, replica: ReplicaId) -> None: ...

    def resize(self, replica: ReplicaId, cores: float) -> None: ...

    def run(self, batch: BatchId, replica: ReplicaId, requests: Sequence[Sequence[Tensor]]) -> None:
        asyncio.get_running_loop().call_soon(self._finish, batch, replica, requests)

    def acquire(self, node: str) -> None: ...

    def release(self, node: str) -> None: ...

    def forget(self, stages: Iterable[str]) -> None: ...

    async def close(self) -> None: ...

    def _soon(self, event: Event) -> None:
        assert self._reporter is not None
        asyncio.get_running_loop().call_soon(self._reporter.on_event, event)

    def _finish(self, batch: BatchId, replica: ReplicaId, requests: Sequence[Sequence[Tensor]]) -> None:
        assert self._reporter is not None
        packed, count = pack_batch(requests, batchable=True), len(requests)
        outputs = unpack_outputs(
            packed, pack_table([[("FP32", (count, ANSWER))]]), memoryview(bytes(4 * ANSWER * count))
        )
        self._reporter.on_finished(Finished(batch, replica, 1), outputs)


class Way:
    """The path, ready to be walked. Make it inside a running event loop."""

    def __init__(self, folder: Path) -> None:
        application = load_application(APPLICATION)
        setup = set_up(application)
        wiring = wire(graph_of({"only": ()}), {("only", "v"): MODEL}, rows_max=64)
        served = ServedVersion("path", "path", "1", application.slo_ns, wiring)
        self.core, self.validator = setup.core(), InputValidator(wiring.signature)
        bodies = BodyMemory(1 << 20)
        self._journal = journal = Journal(folder, header_of(setup, origin="live", date=""), bytes_max=1 << 30)
        metrics = Metrics(setup.parts(), bodies, nodes=application.cluster, build=build)
        self.recorders: Sequence[Recorder] = (metrics.state, journal)
        planner = PlannerProcess(asyncio.get_running_loop())
        self.driver = Driver(self.core, Echo(), [served], planner=planner, recorders=self.recorders)
        insight = Insight(self.core, metrics, deployment="path", system=setup.system, clock=lambda: self.driver.now_ns)
        service = InferenceService(self.driver, insight, bodies)
        service.add(Model("path", application.slo_ns, self.validator, application.limits))
        self.wire = Wire()
        self._listener = self._listening(Rest(service).answer, bodies)
        self._at_once = self._listening(lambda exchange: exchange.reply(200, b"{}"), bodies)

    def _listening(self, answer: Any, bodies: BodyMemory) -> HttpServer:
        listener = HttpServer(answer, bodies=bodies, requests_max=1 << 10)
        listener._loop = asyncio.get_running_loop()
        return listener

    async def warm_up(self) -> None:
        """The first plan is made and its replica ready."""
        self.driver.start()
        for _ in range(5):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop, and close the log."""
        await self.driver.close()
        self._journal.close()

    async def walk(self, count: int, *, at_once: bool = False) -> None:
        """So many requests at one time, to their answers; `at_once` from the door, without a look at what they want."""
        listener, wire = self._at_once if at_once else self._listener, self.wire
        loop = asyncio.get_running_loop()
        walks = [loop.create_task(listener.__rsgi__(Scope(), wire)) for _ in range(count)]  # type: ignore[arg-type]
        for each in walks:
            await each
