"""A fake driver that answers as it is told, the service before it, and a loop in a thread for blocking clients."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from sloop.serve.gateway.inputs import InputValidator
from sloop.serve.gateway.service import InferenceService
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
    ages_ns: list[int] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    at_once: bool = False
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        slo_ns: int | None,
        elapsed_ns: int,
        began_ns: int | None = None,
        on_end: Callable[[RequestResult], None],
    ) -> RequestId:
        self.ages_ns.append(0 if began_ns is None else time.monotonic_ns() - began_ns)
        self.seen.append((tensors, slo_ns, elapsed_ns))
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
    """A running gateway and the knobs of what stands behind it."""

    driver: FakeDriver
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int = 0
    why_unready: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def make_service(gateway: Gateway, *, api_key: str = "") -> InferenceService:
    """The fake application."""
    return InferenceService(
        model="demo",
        slo_ns=200_000_000,
        validator=InputValidator(SIGNATURE),
        submitter=gateway.driver,
        unready=lambda: gateway.why_unready,
        metrics=lambda: b"# no metrics\n",
        state=lambda: b'{"stages":[]}',
        decisions=lambda limit: b'{"decisions":[],"limit":%d}' % limit,
        api_key=api_key,
    )


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
