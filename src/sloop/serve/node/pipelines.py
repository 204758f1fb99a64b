"""Pipelines of worker processes, on one machine or several: which worker holds which layers, and what is lost if one
ends.

A batch enters the first worker, whichever replica it was started for, and passes through all others. Workers pass its
tensors to each other, and the last one answers; this process knows only which batches are under way. When all have
their layers, each gets a *pipe* from the one before and one to the next: the two ends of a socket on one machine; on
two, their agents carry what comes from one socket to the other over a connection of their own
(`sloop.serve.cluster.agent`). Batches stay in order. A model that fails on one fails it for all workers behind, so that
the answer comes from the last one too.

If a worker dies, its pipeline is broken. The pipes to and from it close. A worker whose pipe ends first computes what
has come, and then closes its own, so the last one knows when nothing comes any more, and says so (`CONNECT`). What was
passed on by the dead worker has been answered by then; the other batches are lost, and the backend reports those of
other replicas. If the last worker dies, all are lost at once. If two machines cannot reach each other, the pipe between
them closes too, which breaks the pipeline without a death. The workers that are left load all layers, and serve alone
afterwards.
"""

from typing import Protocol

from sloop.actions import StartWorker
from sloop.errors import MachineError
from sloop.serve.messages import Run
from sloop.serve.transport import ProtocolError
from sloop.text import listed
from sloop.vocabulary import BatchId, ReplicaId, WorkerId

UNREACHED = "two parts of its pipeline cannot reach each other"
"""Why a batch is lost though no part is."""


class PipelineOrders(Protocol):
    """What a pipeline orders its backend to do, and reports to it."""

    def connect_parts(self, before: ReplicaId, after: ReplicaId) -> None:
        """Let a worker pass batches to another one."""
        ...

    def run_part(self, replica: ReplicaId, batch: BatchId, order: Run) -> None:
        """Order the first worker to run its layers on a batch."""
        ...

    def complete_part(self, replica: ReplicaId) -> None:
        """Order a worker to load the other layers, once they are on its machine."""
        ...

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        """Report that the batch of a replica is lost, because another part of its pipeline is."""
        ...


class ProcessPipeline:
    """Workers that hold the parts of one model, and the batches that pass through them."""

    def __init__(self, places: int, orders: PipelineOrders) -> None:
        self.places = places
        """How many parts it has."""
        self._orders = orders
        self.members: dict[int, ReplicaId] = {}
        """By place."""
        self.is_broken = False
        """Whether a part has died or was stopped."""
        self._has_part: set[int] = set()
        self._completes: set[int] = set()
        """The places that were told to get the other layers."""
        self._complete: set[int] = set()
        self._gone: set[int] = set()
        self._batches: dict[BatchId, ReplicaId | None] = {}
        """The batches in it, each with the replica for which the core has started it; None if nobody waits for it."""
        self._why = UNREACHED
        """Why it is broken."""

    @property
    def takes_batches(self) -> bool:
        """Whether a batch that begins now passes through all parts. Otherwise it runs on one worker, which has all
        layers."""
        return not self.is_broken and len(self._complete) < self.places

    # Workers

    def on_part_ready(self, place: int) -> None:
        """A worker has its layers. When all workers have, they are connected; then, or when the pipeline is broken,
        each is ordered to load the rest."""
        self._has_part.add(place)
        if len(self._has_part) == self.places and not self.is_broken:
            for before in range(self.places - 1):
                self._orders.connect_parts(self.members[before], self.members[before + 1])
        self._begin_completion()

    def on_completed(self, place: int) -> None:
        """A worker has loaded the other layers. ProtocolError if it was not ordered to."""
        if place not in self._completes or place in self._complete:
            raise ProtocolError("a worker has completed a model that it was not told to complete")
        self._complete.add(place)

    def lose(self, place: int) -> None:
        """A worker is gone, and its own batch with it."""
        dead = self.members[place]
        if not self.is_broken:
            self._why = f"replica {dead}, another part of its pipeline, is lost"
        self._gone.add(place)
        self._batches = {batch: None if owner == dead else owner for batch, owner in self._batches.items()}
        self._break(is_drained=self.places - 1 in self._gone)

    def on_drained(self, place: int) -> None:
        """The last worker has answered all that comes. ProtocolError if another one says so."""
        if place != self.places - 1:
            raise ProtocolError(f"part {place} of a model says that nothing comes any more, but is not the last one")
        self._break(is_drained=True)

    def _break(self, *, is_drained: bool) -> None:
        """No more batches enter. Those that are in it are lost if no more are answered."""
        self.is_broken = True
        self._begin_completion()
        if is_drained:
            lost, self._batches = self._batches, {}
            for batch, replica in sorted(lost.items()):
                if replica is not None:  # else it was lost with its replica
                    self._orders.lose_batch(batch, replica, self._why)

    def _begin_completion(self) -> None:
        if not (self.is_broken or len(self._has_part) == self.places):
            return
        for place in sorted(self._has_part - self._gone - self._completes):
            self._completes.add(place)
            self._orders.complete_part(self.members[place])

    # Batches

    def takes(self, place: int, batch: BatchId, order: Run) -> bool:
        """A batch of the replica at this place begins. Returns False if the worker is to run it alone. Otherwise the
        pipeline takes it: it passes through all parts or, if a part has died and the core does not know yet, is
        reported as lost."""
        replica = self.members[place]
        if self.takes_batches:
            self._batches[batch] = replica
            self._orders.run_part(self.members[0], batch, order)
        elif place in self._complete:
            return False
        else:
            self._orders.lose_batch(batch, replica, "another part of its pipeline is lost")
        return True

    def has(self, batch: int) -> bool:
        """Whether a batch is in it."""
        return batch in self._batches

    def answered(self, place: int, batch: BatchId, *, is_done: bool) -> ReplicaId | None:
        """A worker has finished a batch, or the model has failed on it. Returns the replica for which it was started;
        None if nobody waits for it. ProtocolError if the worker cannot answer it: the last one can and, if the batch
        has not entered, the first one."""
        if place == self.places - 1:
            return self._batches.pop(batch)
        if is_done or place:
            raise ProtocolError(f"batch {batch} is answered, but part {place} of its model is not the last one")
        owner, self._batches[batch] = self._batches[batch], None
        return owner


def joined(pipelines: dict[WorkerId, ProcessPipeline], order: StartWorker, orders: PipelineOrders) -> ProcessPipeline:
    """The pipeline in which a replica starts as a part. `pipelines` holds the pipelines for which orders of further
    parts are expected."""
    assert order.pipeline is not None, f"worker {order.worker} is no part of a pipeline"
    pipeline = pipelines.setdefault(order.pipeline, ProcessPipeline(len(order.spec.shape), orders))
    pipeline.members[order.place] = order.worker
    if len(pipeline.members) == pipeline.places:
        del pipelines[order.pipeline]
    return pipeline


def check_part(order: StartWorker, blocks: int) -> None:
    """MachineError if the parts of a pipeline do not have all blocks of the model: they could serve neither together
    nor alone."""
    shape = order.spec.shape
    held = [layer for part in shape for layer in part.layers]
    is_whole = held == list(range(blocks)) and all(part.layers for part in shape)
    if not is_whole or len(shape) < 2 or not 0 <= order.place < len(shape):
        counts = listed([str(len(part.layers)) for part in shape])
        what = f"part {order.place} of {order.spec.variant!r} cannot serve in a pipeline of parts with {counts} blocks"
        raise MachineError(what, help=f"at least two parts must have all {blocks} blocks together, in order")
