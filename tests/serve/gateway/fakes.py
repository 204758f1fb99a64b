"""A fake driver that answers as it is told, the service before it, and a loop in a thread for blocking clients."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from sloop.app.application import Limits
from sloop.serve.gateway.http import BodyMemory
from sloop.serve.gateway.inputs import InputValidator
from sloop.serve.gateway.service import InferenceService, Model, ModelState, Readiness
from sloop.serve.protocols import RequestResult
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
        on_end: Callable[[RequestResult], None],
    ) -> RequestId:
        self.ages_ns.append(0 if began_ns is None else time.monotonic_ns() - began_ns)
        self.seen.append((tensors, slo_ns, elapsed_ns))
        self.asked.append((application, version))
        self.heard.set()
        ended = (self.respond or scaled)(tensors)
        if ended is not None and self.at_once:
            on_end(ended)
        elif ended is not None:
            asyncio.get_running_loop().call_soon(on_end, ended)
        return RequestId(len(self.seen))

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


@dataclass
class Gateway:
    """A running gateway and the knobs of what stands behind it; the run whose pages it shows."""

    driver: FakeDriver
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int = 0
    why_unready: str = ""
    served: dict[str, list[str]] = field(default_factory=lambda: {"demo": ["1"]})
    """By model, the versions that serve."""
    service: InferenceService | None = None
    states: dict[str, Readiness] = field(default_factory=dict)
    """By model, its readiness if it is not ready."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def versions(self, model: str) -> Sequence[str]:
        return self.served.get(model, [])

    def readiness(self, model: str, version: str = "") -> Readiness | None:
        if version and version not in self.versions(model):
            return None
        if self.why_unready:
            return Readiness(ModelState.STARTING, self.why_unready)
        return self.states.get(model, Readiness(ModelState.READY))

    def unready(self) -> str:
        return self.why_unready

    def metrics(self) -> bytes:
        return b"# no metrics\n"

    def state(self, model: str = "") -> bytes:
        return msgspec.json.encode({"applications": [], "model": model})

    def decisions(self, limit: int, model: str = "") -> bytes:
        return msgspec.json.encode({"decisions": [], "limit": limit, "model": model})


def make_service(
    gateway: Gateway,
    *,
    bodies: BodyMemory | None = None,
    api_key: str = "",
    limits: Limits = Limits(),  # noqa: B008  # frozen
) -> InferenceService:
    """The service of one fake application."""
    service = InferenceService(gateway.driver, gateway, bodies or BodyMemory(100_000), api_key)
    service.add(Model("demo", 200_000_000, InputValidator(SIGNATURE), limits))
    return service


class LoopThread:
    """An event loop in a thread, so that tests may use blocking clients."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and wait for it here."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()
