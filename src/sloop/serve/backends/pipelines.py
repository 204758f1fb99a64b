"""Pipelines of worker processes of this machine: which worker holds which layers, and where their batches are.

A batch enters the first worker, whichever replica it is for, and passes all others. Each worker computes one batch at a
time; those that it cannot take yet wait here, in their order. The tensors between two workers are blocks in the arena
of the one that wrote them, and are freed when the next one has answered.

If a worker dies, its pipeline is broken. Batches that were on their way to it are lost: the backend reports those of
other replicas, which may still finish if they have left that worker behind. What workers answer to lost batches is
ignored. The others get all layers, and serve alone afterwards.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from sloop.errors import MachineError
from sloop.serve.messages import PassedBatch, decoder
from sloop.serve.transport import Frame, FrameKind, ProtocolError
from sloop.shared_memory import Address
from sloop.text import listed
from sloop.vocabulary import BatchId, Part, ReplicaId


class PassingBatch(Struct):
    """A batch that is in a pipeline."""

    id: BatchId
    replica: ReplicaId
    """For which the core has started it."""
    payload: bytes
    """What the worker where it is, or waits, is told."""
    place: int = 0
    blocks: Sequence[Address] = ()
    """The tensors that the worker before that one has written."""
    took_ns: int = 0
    """In the workers before that one."""
    is_lost: bool = False
    """Whether nobody waits for it any more."""


class PipelineOrders(Protocol):
    """What a pipeline asks of its backend."""

    def tell_part(
        self, replica: ReplicaId, kind: FrameKind, batch: BatchId | None = None, payload: bytes = b""
    ) -> None:
        """Send a frame to a worker."""
        ...

    def free_block(self, block: Address) -> None:
        """A block that a worker has written is not needed any more."""
        ...

    def lose_batch(self, batch: BatchId, replica: ReplicaId, why: str) -> None:
        """The batch of a replica is lost with another part of its pipeline."""
        ...


class ProcessPipeline:
    """Workers that hold the parts of one model, and the batches that pass them."""

    def __init__(self, part: Part, orders: PipelineOrders) -> None:
        self.bounds = part.bounds
        self._orders = orders
        self.members: dict[int, ReplicaId] = {}
        """By place."""
        self.is_broken = False
        """Whether a part is gone."""
        self._has_part: set[int] = set()
        self._completes: set[int] = set()
        """The places that were told to get the other layers."""
        self._complete: set[int] = set()
        self._gone: set[int] = set()
        self._at: dict[int, PassingBatch] = {}
        """By place, what its worker computes."""
        self._waiting: dict[int, deque[PassingBatch]] = {place: deque() for place in range(self.places)}
        self._passed = decoder(PassedBatch)

    @property
    def places(self) -> int:
        """How many parts it has."""
        return len(self.bounds) - 1

    @property
    def takes_batches(self) -> bool:
        """Whether batches that begin now pass all parts; otherwise each runs on one worker, which has all layers."""
        return not self.is_broken and len(self._complete) < self.places

    # Workers

    def has_part(self, place: int) -> None:
        """A worker has its layers. When all have, or a part is gone, each gets the others."""
        self._has_part.add(place)
        self._complete_later()

    def has_all_layers(self, place: int) -> None:
        """A worker has got the other layers. ProtocolError if it was not told to."""
        if place not in self._completes or place in self._complete:
            raise ProtocolError("a worker has completed a model that it was not told to complete")
        self._complete.add(place)

    def lose(self, place: int) -> None:
        """A worker is gone, and with it what it computes and what is for it."""
        self._gone.add(place)
        self.is_broken = True
        dead = self.members[place]
        computed = self._at.pop(place, None)
        batches = [*self._at.values(), *(each for line in self._waiting.values() for each in line)]
        if computed is not None:
            self._free(computed)
            batches.append(computed)
        lost = [batch for batch in batches if not batch.is_lost and (batch.replica == dead or batch.place <= place)]
        for batch in lost:
            batch.is_lost = True
        for line in self._waiting.values():
            for batch in [batch for batch in line if batch.is_lost]:
                line.remove(batch)
                self._free(batch)
        self._complete_later()
        why = f"replica {dead}, another part of its pipeline, is lost"
        for batch in sorted(lost, key=lambda each: each.id):
            if batch.replica != dead:  # whose loss is that of its batch
                self._orders.lose_batch(batch.id, batch.replica, why)

    def _complete_later(self) -> None:
        if not (self.is_broken or len(self._has_part) == self.places):
            return
        for place in sorted(self._has_part - self._gone - self._completes):
            self._completes.add(place)
            self._orders.tell_part(self.members[place], FrameKind.COMPLETE)

    # Batches

    def enter(self, batch: BatchId, replica: ReplicaId, payload: bytes) -> None:
        """A batch of a replica begins."""
        self._queue(PassingBatch(batch, replica, payload))

    def computes(self, place: int, batch: int) -> bool:
        """Whether the worker at this place computes this batch as one that passes."""
        found = self._at.get(place)
        return found is not None and found.id == batch

    def answered(self, place: int, frame: Frame) -> PassingBatch | None:
        """A worker has answered DONE or FAILED. Returns the batch, or None if nobody waits for it. ProtocolError if the
        worker cannot have finished it."""
        if frame.kind is FrameKind.DONE and place != self.places - 1:
            raise ProtocolError(f"batch {frame.subject} is done, but part {place} of its model is not the last one")
        batch = self._taken(place, frame)
        return None if batch.is_lost else batch

    def passed_on(self, place: int, frame: Frame, hold: Callable[[Address], None]) -> None:
        """A worker has run its layers on a batch; `hold` is called for each block that it has written. ProtocolError if
        it is not for this worker to pass on."""
        if not self.computes(place, frame.subject) or place == self.places - 1:
            raise ProtocolError(f"a worker passes batch {frame.subject} on, which is not its own")
        try:
            passed: PassedBatch = self._passed.decode(frame.payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a batch that is passed on cannot be read: {error}") from error
        blocks = [block for block in passed.tensors if isinstance(block, Address)]
        for block in blocks:
            hold(block)
        batch = self._taken(place, frame)
        batch.place, batch.blocks, batch.payload = place + 1, blocks, bytes(frame.payload)
        if batch.is_lost:
            self._free(batch)
        else:
            self._queue(batch)

    def _queue(self, batch: PassingBatch) -> None:
        """A batch has come to a worker: it is computed at once, or waits for those before it."""
        if batch.place in self._at:
            self._waiting[batch.place].append(batch)
        else:
            self._send(batch)

    def _send(self, batch: PassingBatch) -> None:
        self._at[batch.place] = batch
        kind = FrameKind.PASS if batch.place else FrameKind.ENTER
        self._orders.tell_part(self.members[batch.place], kind, batch.id, batch.payload)

    def _taken(self, place: int, frame: Frame) -> PassingBatch:
        """The batch that a worker has answered; the next one begins."""
        batch = self._at.pop(place)
        batch.took_ns += frame.value
        self._free(batch)
        if self._waiting[place]:
            self._send(self._waiting[place].popleft())
        return batch

    def _free(self, batch: PassingBatch) -> None:
        for block in batch.blocks:
            self._orders.free_block(block)
        batch.blocks = ()


def check_part(part: Part, blocks: int, variant: str) -> None:
    """MachineError if a pipeline does not have all blocks of its model: its parts could not serve, together or
    alone."""
    bounds = part.bounds
    ascends = list(bounds) == sorted(set(bounds)) and len(bounds) > 2
    if not ascends or (bounds[0], bounds[-1]) != (0, blocks) or not 0 <= part.place < len(bounds) - 1:
        what = f"part {part.place} of a pipeline that is cut at {listed(list(map(str, bounds)))} cannot serve"
        raise MachineError(what, help=f"two parts or more must have all {blocks} blocks of {variant!r}")
