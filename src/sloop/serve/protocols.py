"""The three interfaces of the driver: towards the gateway (`RequestSink`), the worker processes (`Backend`) and the
planner process (`PlannerInterface`).

The gateway handles network protocols but no queues, the driver the core but no HTTP, a backend processes but no
requests. Tests replace each side by a fake. All calls happen in the event loop's thread.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from sloop.core.views import PlanInput
from sloop.events import Event, Finished, Planned
from sloop.tensor import Signature, Tensor
from sloop.vocabulary import BatchId, Outcome, ReplicaId, ReplicaSpec, RequestId


class RequestResult(Struct, frozen=True, gc=False):
    """How a request ended, with its outputs by name if it was served or late."""

    outcome: Outcome
    outputs: Mapping[str, Tensor] = {}  # msgspec creates a new dict for each instance
    why: str = ""
    retry_after_ns: int = 0
    """For a rejected request: how long the client should wait before it tries again."""
    version: str = "1"
    """The version of the application that served it, or would have."""


class RequestSink(Protocol):
    """Accepts requests and reports the result of each exactly once."""

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
        """Submit one request whose `tensors` match the application's signature and have the same number of rows.

        `version` asks for one version of the application; empty, the rollout decides. `slo_ns` overrides the
        application's end-to-end deadline; `elapsed_ns` of it has passed before the request arrived. `began_ns`
        (`time.monotonic_ns`, default: now) is when the request's first byte arrived, so that the time of a slow upload
        counts. `on_end` is called once, possibly before `submit` returns, and never after `cancel`.
        """
        ...

    def cancel(self, request: RequestId) -> None:
        """The client has disconnected. Has no effect on a request that has ended."""
        ...


class Servable(Struct, frozen=True):
    """The model of one variant, and its inputs and outputs in the model's own order."""

    model: str
    """Path of a model file, ONNX or Python, or `fake:…` (see `sloop.serve.runtimes`)."""
    signature: Signature
    obstacle: str = ""
    """Why requests cannot share a forward pass, if a trial showed that they cannot (`sloop.profile.examine`)."""


class BackendListener(Protocol):
    """Receives a backend's reports."""

    def on_event(self, event: Event) -> None:
        """An event that carries no tensors."""
        ...

    def on_finished(self, event: Finished, outputs: Sequence[Sequence[Tensor]]) -> None:
        """A batch has finished. `outputs` holds, for each of its requests, the outputs in the model's order."""
        ...


class Backend(Protocol):
    """Acquires nodes, and starts, runs, resizes and stops replicas on them. It takes no decisions and reports each
    order's result exactly once.

    A backend may report from inside a call.
    """

    def attach(self, listener: BackendListener) -> None:
        """Set the receiver of reports. Called once, before any other method."""
        ...

    def start(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        """Start a replica. Reports progress, then `ReplicaReady` or `ReplicaLost`."""
        ...

    def stop(self, replica: ReplicaId) -> None:
        """Stop a replica; one that starts or runs a batch is killed. Reports `ReplicaStopped`."""
        ...

    def resize(self, replica: ReplicaId, cores: float) -> None:
        """Change the cores of a running replica in place. Reports `Resized` with the cores in effect."""
        ...

    def run(self, batch: BatchId, replica: ReplicaId, requests: Sequence[Sequence[Tensor]]) -> None:
        """Run a batch; each request gives its tensors in the model's input order.

        Reports `Finished`, `BatchFailed` or `ReplicaLost`.
        """
        ...

    async def close(self) -> None:
        """Stop all replicas without reporting, and release everything."""
        ...

    def acquire(self, node: str) -> None:
        """Acquire a node. Reports `NodeReady` or `NodeLost`."""
        ...

    def release(self, node: str) -> None:
        """Give back a node without replicas. Reports `NodeReleased`."""
        ...

    def forget(self, stages: Iterable[str]) -> None:
        """The version of an application with these stages has ended; nothing of it will be started again."""
        ...


class PlannerInterface(Protocol):
    """Makes plans beside the event loop; `sloop.serve.planner.PlannerProcess`. Whoever creates it tells it which
    application versions there are."""

    def attach(self, report: Callable[[Planned], None]) -> None:
        """Set the receiver of reports. Called once, before any other method."""
        ...

    def request(self, given: PlanInput) -> None:
        """Make the plans of `given`. Reports one `Planned` with its number, possibly before this call returns."""
        ...

    def traffic_changed(self, key: str) -> None:
        """The past traffic of an application version has changed, because other versions have begun or ended."""
        ...

    def discard(self, key: str) -> None:
        """An application version has ended."""
        ...

    async def close(self) -> None:
        """End without a further report."""
        ...
