"""How long the batches of a logged run took, by variant, batch size and cores: a fold over the event log."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sloop.actions import StartBatch, StartReplica
from sloop.events import Finished, Resized
from sloop.runlog import Record
from sloop.vocabulary import BatchId, ReplicaId

VariantKey = tuple[str, str]
"""Stage and variant."""
Durations = Mapping[VariantKey, Mapping[tuple[int, float], Sequence[int]]]
"""Per variant and cell (batch size, cores): the durations in ns of its batches, in the order in which they ended."""

BATCHES_MIN: Final = 20
"""Cells with fewer batches are left out: their mean says little, and a profile has measured more."""


class BatchDurations:
    """A `Sink` that times every batch from its order to its answer, as the core sees it: transport included.

    A batch that was resized meanwhile belongs to no core count and is left out.
    """

    def __init__(self) -> None:
        self._found: dict[VariantKey, dict[tuple[int, float], list[int]]] = defaultdict(lambda: defaultdict(list))
        self._replicas: dict[ReplicaId, tuple[VariantKey, float]] = {}
        self._started: dict[BatchId, tuple[int, StartBatch, float]] = {}

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        if isinstance(record, StartReplica):
            self._replicas[record.replica] = (record.spec.stage, record.spec.variant), record.spec.cores
        elif isinstance(record, Resized) and record.replica in self._replicas:
            self._replicas[record.replica] = self._replicas[record.replica][0], record.cores
        elif isinstance(record, StartBatch):
            self._started[record.batch] = now_ns, record, self._replicas[record.replica][1]
        elif isinstance(record, Finished) and record.batch in self._started:
            begun_ns, batch, cores = self._started.pop(record.batch)
            variant, cores_now = self._replicas[batch.replica]
            if cores == cores_now:
                self._found[variant][len(batch.requests), cores].append(now_ns - begun_ns)

    def durations(self, batches_min: int = BATCHES_MIN) -> Durations:
        """What was found, for cells with at least `batches_min` batches."""
        return {
            variant: {cell: runs_ns for cell, runs_ns in cells.items() if len(runs_ns) >= batches_min}
            for variant, cells in self._found.items()
        }


def batch_durations(records: Iterable[tuple[int, Record]]) -> Durations:
    """The durations of all batches of a log, for cells with at least `BATCHES_MIN` of them."""
    fold = BatchDurations()
    for now_ns, record in records:
        fold.append(now_ns, record)
    return fold.durations()
