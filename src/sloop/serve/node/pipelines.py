"""Pipelines of worker processes, on one machine or several: which worker holds which layers, and where batches are.

A batch enters the first worker, whichever replica it was started for, and passes through all others. Each worker
computes one batch at a time; further batches for it wait here, in order. The tensors between two workers are blocks in
the arena of the worker that wrote them. The next worker reads them there, and they are freed when it has answered.

If a worker dies, its pipeline is broken. The batch of its own replica is lost, and so is each batch that it had yet to
compute; the backend reports those of other replicas. Batches that it has passed on finish. Answers to lost batches are
ignored. The other workers load all layers, and serve alone afterwards.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from sloop.actions import StartWorker
from sloop.errors import MachineError
from sloop.serve.messages import PartBatch, PassedBatch, Run
from sloop.serve.transport import ProtocolError
from sloop.shared_memory import Address
from sloop.text import listed
from sloop.vocabulary import BatchId, ReplicaId, WorkerId


class PassingBatch(Struct):
    """A batch that is in a pipeline."""

    id: BatchId
    replica: ReplicaId
    """The replica for which the core has started it."""
    order: PartBatch
    """The order to the worker at `place`: a `Run` to the first one, otherwise a `PassedBatch`."""
    place: int = 0
    """The worker that computes it, or for which it waits."""
    blocks: Sequence[Address] = ()
    """The tensors that the worker before has written."""
    took_ns: int = 0
    """The time that it has taken in the workers before."""
    is_lost: bool = False
    """Whether nobody waits for it any more."""


class PipelineOrders(Protocol):
    """The orders that a pipeline gives to its backend."""

    def run_part(self, replica: ReplicaId, batch: BatchId, order: PartBatch) -> None:
        """Order a worker to run its layers on a batch."""
        ...

    def complete_part(self, replica: ReplicaId) -> None:
        """Order a worker to load the other layers, once they are on its machine."""
        ...

    def free_block(self, block: Address) -> None:
        """Free a block that a worker has written."""
        ...

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        """Report that the batch of a replica is lost, because another part of its pipeline is."""
        ...


class ProcessPipeline:
    """Workers that hold the parts of one model, and the batches that pass them."""

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
        self._at: dict[int, PassingBatch] = {}
        """By place, the batch that its worker computes."""
        self._waiting: dict[int, deque[PassingBatch]] = {place: deque() for place in range(self.places)}

    @property
    def takes_batches(self) -> bool:
        """Whether a batch that begins now passes through all parts. Otherwise it runs on one worker, which has all
        layers."""
        return not self.is_broken and len(self._complete) < self.places

    # Workers

    def on_part_ready(self, place: int) -> None:
        """A worker has its layers. When all workers have, or when the pipeline is broken, each is ordered to load the
        rest."""
        self._has_part.add(place)
        self._begin_completion()

    def on_completed(self, place: int) -> None:
        """A worker has loaded the other layers. ProtocolError if it was not ordered to."""
        if place not in self._completes or place in self._complete:
            raise ProtocolError("a worker has completed a model that it was not told to complete")
        self._complete.add(place)

    def lose(self, place: int, *, has_memory: bool = True) -> None:
        """A worker is gone. Its batch and those that wait for it are lost. So is the batch that it has passed on and
        the next worker has not answered, unless its machine still holds its memory (`has_memory`)."""
        self._gone.add(place)
        self.is_broken = True
        dead = self.members[place]
        computed = self._at.pop(place, None)
        batches = [*self._at.values(), *(each for line in self._waiting.values() for each in line)]
        if computed is not None:
            self._free(computed)
            batches.append(computed)
        lost = [
            batch
            for batch in batches
            if not batch.is_lost
            and (
                batch.replica == dead
                or batch.place <= place
                or (batch.place == place + 1 and batch.blocks and not has_memory)
            )
        ]
        for batch in lost:
            batch.is_lost = True
        for line in self._waiting.values():
            for batch in [batch for batch in line if batch.is_lost]:
                line.remove(batch)
                self._free(batch)
        self._begin_completion()
        why = f"replica {dead}, another part of its pipeline, is lost"
        for batch in sorted(lost, key=lambda each: each.id):
            if batch.replica != dead:  # whose loss is that of its batch
                self._orders.lose_batch(batch.id, batch.replica, why)

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
            self._queue(PassingBatch(batch, replica, order))
        elif place in self._complete:
            return False
        else:
            self._orders.lose_batch(batch, replica, "another part of its pipeline is lost")
        return True

    def computes(self, place: int, batch: int) -> bool:
        """Whether the worker at this place computes this batch as part of the pipeline."""
        found = self._at.get(place)
        return found is not None and found.id == batch

    def awaits(self, place: int, batch: int) -> bool:
        """Whether the worker computes this batch, and the batch is not lost."""
        found = self._at.get(place)
        return found is not None and found.id == batch and not found.is_lost

    def answered(self, place: int, batch: int, took_ns: int, *, is_done: bool) -> PassingBatch | None:
        """The worker has finished its batch, or the model has failed on it. Returns the batch, or None if it is lost.
        ProtocolError if the worker cannot have finished it."""
        if is_done and place != self.places - 1:
            raise ProtocolError(f"batch {batch} is done, but part {place} of its model is not the last one")
        found = self._taken(place, took_ns)
        return None if found.is_lost else found

    def passed_on(
        self, place: int, batch: int, took_ns: int, passed: PassedBatch, hold: Callable[[Address], None]
    ) -> None:
        """A worker has run its layers on a batch. `hold` is called for each block that it has written. ProtocolError if
        the report cannot be true."""
        if not self.computes(place, batch) or place == self.places - 1:
            raise ProtocolError(f"a worker passes on batch {batch}, which it does not compute or which ends with it")
        visits = self._at[place].order.visits
        if passed.visits != visits:
            raise ProtocolError(f"a batch of {visits} visits is passed on with {passed.visits}")
        if len(passed.places) != len(passed.rows) or len(passed.passes) != len(passed.tensors):
            raise ProtocolError(f"batch {batch} is passed on without some of its tensors")
        blocks = [block for block in passed.tensors if isinstance(block, Address)]
        for block in blocks:
            hold(block)
        found = self._taken(place, took_ns)
        found.place, found.blocks, found.order = place + 1, blocks, passed
        if found.is_lost:
            self._free(found)
        else:
            self._queue(found)

    def _queue(self, batch: PassingBatch) -> None:
        """A batch has reached a worker: it is computed at once, or waits for those before it."""
        if batch.place in self._at:
            self._waiting[batch.place].append(batch)
        else:
            self._send(batch)

    def _send(self, batch: PassingBatch) -> None:
        self._at[batch.place] = batch
        self._orders.run_part(self.members[batch.place], batch.id, batch.order)

    def _taken(self, place: int, took_ns: int) -> PassingBatch:
        """Take the batch that a worker has answered, and start the next one there."""
        batch = self._at.pop(place)
        batch.took_ns += took_ns
        self._free(batch)
        if self._waiting[place]:
            self._send(self._waiting[place].popleft())
        return batch

    def _free(self, batch: PassingBatch) -> None:
        for block in batch.blocks:
            self._orders.free_block(block)
        batch.blocks = ()


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
