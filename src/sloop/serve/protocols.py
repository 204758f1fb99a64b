"""The line between the gateway and the driver: what is handed in, and the one answer that comes back.

The gateway knows protocols and nothing of queues; the driver knows the core and nothing of HTTP. Between them stands
`Submitter`, so that either can be tested against a fake of the other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from sloop.events import Event, Finished
from sloop.tensor import Signature, Tensor
from sloop.vocabulary import BatchId, Outcome, ReplicaId, ReplicaSpec, RequestId


class Ended(Struct, frozen=True, gc=False):
    """How a request ended, with its outputs by name where it was served or late."""

    outcome: Outcome
    outputs: Mapping[str, Tensor] = {}  # msgspec makes a new one for each instance
    why: str = ""
    retry_after_ns: int = 0
    """For a rejected request: when to try again."""


class Submitter(Protocol):
    """Takes requests and answers each exactly once. Everything happens in the event loop's thread."""

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        slo_ns: int | None,
        elapsed_ns: int,
        began_ns: int | None = None,
        on_end: Callable[[Ended], None],
    ) -> RequestId:
        """Hand in one request. `tensors` match the application's signature and agree on their number of rows.

        `slo_ns` overrides the application's end-to-end budget, of which `elapsed_ns` was spent on the way here.
        `began_ns` says when it began to arrive, in `time.monotonic_ns`, now if left out: its deadline does not wait
        for a body that is slow to come.
        `on_end` is called once, possibly before `submit` returns (a rejection), and never after `cancel`.
        """
        ...

    def cancel(self, request: RequestId) -> None:
        """The client went away. Does nothing for a request that has ended."""
        ...


# == __init__: The seam between the driver and what keeps worker processes: five verbs down, two kinds of news up.
#
# Everything happens in the event loop's thread. A backend never decides anything: it does what it is told, and reports
# what became of it, each thing once. It may report from inside a call; the driver is made for that.


class Servable(Struct, frozen=True):
    """A variant that can be run: where its model is, and what it takes and gives in the model's own order."""

    model: str
    """Path of a model file, ONNX or Python, or `fake:…` (see `sloop.serve.runtimes`)."""
    signature: Signature
    obstacle: str = ""
    """Why requests cannot share a forward pass, where that was tried and they cannot (`sloop.profile.examine`)."""


class BackendListener(Protocol):
    """Whoever is told what became of orders."""

    def happened(self, event: Event) -> None:
        """Something happened that carries no tensors."""
        ...

    def finished(self, event: Finished, outputs: Sequence[Sequence[Tensor]]) -> None:
        """A batch is done: for each of its requests, in order, the outputs in the model's order."""
        ...


class Backend(Protocol):
    """Starts, feeds, resizes and stops replicas."""

    def attach(self, listener: BackendListener) -> None:
        """Who is told; called once, before anything else."""
        ...

    def start(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        """Start a replica; reported: progress, then ready or lost."""
        ...

    def stop(self, replica: ReplicaId) -> None:
        """Stop a replica, at once if it holds a batch or is starting; reported: stopped."""
        ...

    def resize(self, replica: ReplicaId, cores: float) -> None:
        """Change a running replica's cores in place; reported: resized, with the cores in effect."""
        ...

    def run(self, batch: BatchId, replica: ReplicaId, requests: Sequence[Sequence[Tensor]]) -> None:
        """Run requests, each its tensors in the model's input order; reported: finished, failed, or replica lost."""
        ...

    async def close(self) -> None:
        """Stop whatever runs, reporting nothing more, and remove all traces."""
        ...
