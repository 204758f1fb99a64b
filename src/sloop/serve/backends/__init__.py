"""The seam between the driver and what keeps worker processes: five verbs down, two kinds of news up.

Everything happens in the event loop's thread. A backend never decides anything: it does what it is told, and reports
what became of it, each thing once. It may report from inside a call; the driver is made for that.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from sloop.events import Event, Finished
from sloop.tensor import Signature, Tensor
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec


class Servable(Struct, frozen=True):
    """A variant that can be run: where its model is, and what it takes and gives in the model's own order."""

    model: str
    """Path of a model file, ONNX or Python, or `fake:…` (see `sloop.serve.runtimes.fake`)."""
    signature: Signature
    obstacle: str = ""
    """Why requests cannot share a forward pass, where that was tried and they cannot (`sloop.profile.rows`)."""


class Listener(Protocol):
    """Whoever is told what became of orders."""

    def happened(self, event: Event) -> None:
        """Something happened that carries no tensors."""
        ...

    def finished(self, event: Finished, outputs: Sequence[Sequence[Tensor]]) -> None:
        """A batch is done: for each of its requests, in order, the outputs in the model's order."""
        ...


class Backend(Protocol):
    """Starts, feeds, resizes and stops replicas."""

    def attach(self, listener: Listener) -> None:
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
