"""A fake driver that answers as it is told, the service before it, and a loop in a thread for blocking clients."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from sloop.app.limits import Limits, ServerLimits
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.grpc.server import Rpc
from sloop.serve.edge.http import HttpServer
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.large import LargeJson
from sloop.serve.edge.listener import Tls, listen
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.rest import Rest
from sloop.serve.edge.service import InferenceService, Keys, Model
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.messages import Ask, Topic
from sloop.serve.protocols import ModelState, PageSource, Readiness, RequestResult, ServerReadiness
from sloop.tensor import Port, Signature, Tensor
from sloop.vocabulary import Outcome, RequestId

T = TypeVar("T")

SIGNATURE = Signature(
    inputs=(Port("x", "FP32", (-1, 4)), Port("k", "INT64", (-1, 1))),
    outputs=(Port("y", "FP32", (-1, 4)), Port("n", "INT64", (-1, 1))),
    rows_max=8,
)


@dataclass
class FakeDriver:
    """Answers y = x · k and n = rows at the next turn of the loop, or however `respond` says; remembers all it saw."""

    respond: Callable[[Mapping[str, Tensor]], RequestResult | None] | None = None
    seen: list[tuple[Mapping[str, Tensor], int | None, int]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """The application and version of each request."""
    wanted: list[list[str]] = field(default_factory=list)
    """The outputs that each request wants."""
    stored: list[str] = field(default_factory=list)
    """The application of each request that was large."""
    names: list[tuple[str, str]] = field(default_factory=list)
    """What the client calls each request, and its trace."""
    ages_ns: list[int] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    at_once: bool = False
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        application: str,
        version: str = "",
        slo_ns: int | None = None,
        elapsed_ns: int = 0,
        began_ns: int | None = None,
        request_id: str = "",
        trace: str = "",
        outputs: Collection[str] = (),
        on_end: Callable[[RequestResult], None],
    ) -> RequestId:
        self.names.append((request_id, trace))
        self.ages_ns.append(0 if began_ns is None else time.monotonic_ns() - began_ns)
        self.seen.append((tensors, slo_ns, elapsed_ns))
        self.asked.append((application, version))
        self.wanted.append(list(outputs))
        self.heard.set()
        ended = (self.respond or scaled)(tensors)
        if ended is not None and self.at_once:
            on_end(ended)
        elif ended is not None:
            asyncio.get_running_loop().call_soon(on_end, ended)
        return RequestId(len(self.seen))

    async def store(self, tensors: Mapping[str, Tensor], application: str) -> Mapping[str, Tensor]:
        self.stored.append(application)
        await asyncio.sleep(0)
        return tensors

    def cancel(self, request: RequestId) -> None:
        self.cancelled.append(request)
        self.gone.set()


def scaled(tensors: Mapping[str, Tensor]) -> RequestResult:
    """What the fake model computes."""
    x, k = tensors["x"], tensors["k"]
    rows = x.shape[0]
    y = np.frombuffer(x.data, "<f4").reshape(x.shape) * np.frombuffer(k.data, "<i8").reshape(k.shape).astype("<f4")
    outputs = {
        "y": Tensor("FP32", x.shape, y.astype("<f4").tobytes()),
        "n": Tensor("INT64", (rows, 1), np.full((rows, 1), rows, "<i8").tobytes()),
    }
    return RequestResult(Outcome.SERVED, outputs)


INDEX = [
    {"name": "demo", "version": "1", "state": "READY", "reason": "since the server began"},
    {"name": "other", "version": "", "state": "UNAVAILABLE", "reason": "not loaded"},
]


def statistics_of(name: str, version: str) -> dict[str, object]:
    """The statistics of three requests in two batches."""
    totals = {
        "success": {"count": 2, "ns": 50},
        "fail": {"count": 1, "ns": 60},
        "queue": {"count": 3, "ns": 10},
        "compute_input": {"count": 3, "ns": 0},
        "compute_infer": {"count": 3, "ns": 40},
        "compute_output": {"count": 3, "ns": 0},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    batches = [
        {
            "batch_size": size,
            "compute_input": {"count": 1, "ns": 0},
            "compute_infer": {"count": 1, "ns": 10 * size},
            "compute_output": {"count": 1, "ns": 0},
        }
        for size in (1, 2)
    ]
    counts = {"last_inference": 1_700_000_000_000, "inference_count": 2, "execution_count": 2}
    return {"name": name, "version": version, **counts, "inference_stats": totals, "batch_stats": batches}


@dataclass
class Gateway:
    """A running edge and the knobs of what stands behind it; the run whose pages it shows."""

    driver: FakeDriver
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int = 0
    why_unready: str = ""
    service: InferenceService | None = None
    changes: list[tuple[str, bool]] = field(default_factory=list)
    """The models that were to be loaded (True) or ended."""
    states: dict[str, Readiness] = field(default_factory=dict)
    """By model, its readiness if it is not ready."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, question: Ask[Topic], then: Callable[[bytes], None]) -> None:
        match question:
            case Ask(Topic.READY):
                then(msgspec.json.encode(ServerReadiness(self.why_unready, self.states)))
            case Ask(Topic.MODELS, model, version):
                then(msgspec.json.encode(self._readiness(model, version)))
            case Ask(Topic.METRICS):
                then(b"# no metrics\n")
            case Ask(Topic.STATE, model):
                then(msgspec.json.encode({"applications": [], "model": model}))
            case Ask(Topic.DECISIONS, model, limit=limit):
                then(msgspec.json.encode({"decisions": [], "limit": limit, "model": model}))
            case Ask(Topic.INDEX):
                then(msgspec.json.encode(INDEX))
            case Ask(Topic.LOAD | Topic.UNLOAD as about, name):
                self.changes.append((name, about is Topic.LOAD))
                refusal = Refusal(404, f"the repository has no model {name!r}", "it has 'other'")
                then(b"" if name == "other" else msgspec.json.encode(refusal.fields))
            case Ask(Topic.STATISTICS, model, version):
                then(msgspec.json.encode({"model_stats": [statistics_of(model or "demo", version or "1")]}))

    def _readiness(self, model: str, version: str) -> dict[str, Readiness]:
        assert self.service is not None
        found = [each for each in self.service.models.values() if model in ("", each.name)]
        state = Readiness(ModelState.STARTING, self.why_unready) if self.why_unready else Readiness(ModelState.READY)
        if version:
            found = [each for each in found if version in each.versions]
        return {each.name: state if self.why_unready else self.states.get(each.name, state) for each in found}


def sink_of(driver: FakeDriver, page_of: PageSource) -> EdgeSink:
    """A sink that passes requests to a driver, and asks `page_of`."""

    class FakeSink:
        def __getattr__(self, name: str) -> Any:
            return page_of if name == "ask" else getattr(driver, name)

    return cast(EdgeSink, FakeSink())


def make_service(
    gateway: Gateway,
    *,
    bodies: BodyMemory | None = None,
    api_key: str = "",
    api_key_file: Path | None = None,
    limits: Limits = Limits(),  # frozen
) -> InferenceService:
    """The service of one fake application."""
    service = InferenceService(
        sink_of(gateway.driver, gateway.ask), bodies or BodyMemory(100_000), Keys(api_key, api_key_file)
    )
    service.add(Model("demo", 200_000_000, InputValidator(SIGNATURE), limits))
    return service


class WebServer(HttpServer):
    """Ends what answers its requests too."""

    def __init__(self, large: LargeJson, answer: Callable[[Exchange], None], **others: Any) -> None:
        super().__init__(answer, **others)
        self._large = large

    async def close(self, within_s: float) -> None:
        await super().close(within_s)
        self._large.close()


def web_server(
    service: InferenceService,
    *,
    limits: ServerLimits = ServerLimits(),
    cors_origin: str = "",
    tls: Tls | None = None,
) -> HttpServer:
    """The HTTP server of a service, not started; by default for 64 requests."""
    large = LargeJson()
    rest = Rest(service, large)
    return WebServer(
        large,
        rest.answer,
        bodies=service.bodies,
        limits=replace(limits, requests=limits.requests or 64),
        cors_origin=cors_origin,
        tls=tls,
        authorise=rest.authorise,
        deadline_ns=rest.deadline_ns,
    )


FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""Of the Unix sockets of gRPC servers; they go with the process."""


def rpc_server(
    service: InferenceService, limits: ServerLimits = ServerLimits(requests=64), tls: Tls | None = None
) -> Rpc:
    """The gRPC server of a service, not started."""
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="sloop"))
    return Rpc(service, Path(FOLDERS[-1].name), limits=limits, tls=tls)


class LoopThread:
    """An event loop in a thread, so that tests may use blocking clients."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.served: list[HttpServer | Rpc] = []

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it here."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(10)

    def look(self, what: Callable[[], T]) -> T:
        """A value as the loop sees it between two of its turns."""

        async def main() -> T:
            return what()

        return self.call(main())

    def until(self, holds: Callable[[], bool], within_s: float = 10) -> None:
        """Wait until something holds between two turns of the loop. Raises `TimeoutError` if it does not."""

        async def main() -> None:
            async with asyncio.timeout(within_s):
                while not holds():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(main(), self.loop).result(within_s + 10)

    def serve(self, server: HttpServer | Rpc) -> int:
        """Start a server there, on a free port of loopback; returns the port."""

        async def start() -> int:
            sock = listen("127.0.0.1", 0)
            started = server.start(sock)
            if started is not None:
                await started
            return int(sock.getsockname()[1])

        self.served.append(server)
        return self.call(start())

    def close(self) -> None:
        """Close what is served here, also after a test that failed and did not: an open socket fails a later test."""
        for server in self.served:
            self.call(server.close(0.2))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
