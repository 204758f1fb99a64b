"""A gateway on free ports of loopback, before a fake driver that answers as it is told."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from sloop.serve.gateway.intake import Intake
from sloop.serve.gateway.listener import Listener
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.rpc import Rpc
from sloop.serve.gateway.service import Service
from sloop.serve.submission import Ended
from sloop.serve.tensor import Port, Signature, Tensor
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

    respond: Callable[[Mapping[str, Tensor]], Ended | None] | None = None
    seen: list[tuple[Mapping[str, Tensor], int | None, int]] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    at_once: bool = False

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        slo_ns: int | None,
        elapsed_ns: int,
        on_end: Callable[[Ended], None],
    ) -> RequestId:
        self.seen.append((tensors, slo_ns, elapsed_ns))
        ended = (self.respond or scaled)(tensors)
        if ended is not None and self.at_once:
            on_end(ended)
        elif ended is not None:
            asyncio.get_running_loop().call_soon(on_end, ended)
        return RequestId(len(self.seen))

    def cancel(self, request: RequestId) -> None:
        self.cancelled.append(request)


def scaled(tensors: Mapping[str, Tensor]) -> Ended:
    """What the fake model computes."""
    x, k = tensors["x"], tensors["k"]
    rows = x.shape[0]
    y = np.frombuffer(x.data, "<f4").reshape(x.shape) * np.frombuffer(k.data, "<i8").reshape(k.shape).astype("<f4")
    outputs = {
        "y": Tensor("FP32", x.shape, y.astype("<f4").tobytes()),
        "n": Tensor("INT64", (rows, 1), np.full((rows, 1), rows, "<i8").tobytes()),
    }
    return Ended(Outcome.SERVED, outputs)


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


def make_service(gateway: Gateway, *, api_key: str = "") -> Service:
    """The fake application."""
    return Service(
        model="demo",
        slo_ns=200_000_000,
        intake=Intake(SIGNATURE),
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


@pytest.fixture(scope="module")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def shared_gateway(loop_thread: LoopThread) -> Iterator[Gateway]:
    """One gateway per test module; `gateway` hands it out with a clean driver."""
    gateway = Gateway(FakeDriver())
    service = make_service(gateway)
    listener = Listener(Rest(service).answer, body_bytes_max=100_000, connections_max=64)
    gateway.port = loop_thread.call(listener.start(gateway.host, 0))
    rpc = Rpc(service, body_bytes_max=100_000)
    gateway.grpc_port = loop_thread.call(rpc.start(gateway.host, 0))
    yield gateway
    loop_thread.call(rpc.close(1.0))
    loop_thread.call(listener.close(1.0))


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    shared_gateway.driver.respond = None
    shared_gateway.driver.at_once = False
    shared_gateway.driver.seen.clear()
    shared_gateway.driver.cancelled.clear()
    shared_gateway.why_unready = ""
    return shared_gateway
