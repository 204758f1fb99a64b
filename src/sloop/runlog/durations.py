"""Batch durations of a run by variant, hardware, batch size and cores. Profiles and simulations learn from them."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sloop.actions import StartBatch
from sloop.app.graph import Graph, GraphStage
from sloop.events import Finished, NodeReady
from sloop.runlog import Record
from sloop.runlog.replicas import ReplicaRecord
from sloop.runlog.run import RunState
from sloop.vocabulary import ALONE, Node, ReplicaId

VariantKey = tuple[str, str, str]
"""Stage, variant and kind of hardware."""
Durations = Mapping[VariantKey, Mapping[tuple[int, float], Sequence[int]]]
"""Per variant on a kind of hardware, and per cell (batch size, cores): the durations in ns of its batches, in the order
in which they ended."""

BATCHES_MIN: Final = 20
"""Cells with fewer batches are left out: their mean is unreliable, and a profile has more runs."""
ANY_GRAPH: Final = Graph([GraphStage("any")])
"""A placeholder for folds that only count batches: batch records do not depend on the graph's edges, and stage names
are unique among all applications."""


def durations_of(
    state: RunState, batches_min: int = BATCHES_MIN, node_cores: Mapping[str, Collection[float]] = MappingProxyType({})
) -> Durations:
    """Batch durations from order to answer, transport included, for cells with at least `batches_min` batches.

    A batch during which the replica was resized is left out, because it ran on two core counts; so is one on a share of
    an accelerator, because a profile is of a whole one, and one that a shadow had a part in. Replicas whose cores are
    only reserved use all of their node. Their batches count for those if `node_cores`, the core counts that nodes have
    by kind of hardware, has exactly one for this kind; otherwise they are left out.
    """
    found: dict[VariantKey, dict[tuple[int, float], list[int]]] = {}
    for group in state.workers.groups.values():
        slot, cores = group.slot, group.cores
        if (slot.accelerator and slot.share < 1.0) or group.shape != ALONE:
            continue
        if not slot.is_capped:
            known = node_cores.get(slot.hardware, ())
            if slot.accelerator or len(known) != 1:
                continue
            (cores,) = known
        cells = found.setdefault(group.variant_key, {})
        for size, runs_ns in group.durations_ns.items():
            cells.setdefault((size, cores), []).extend(runs_ns)
    return {
        key: {cell: runs_ns for cell, runs_ns in cells.items() if len(runs_ns) >= batches_min}
        for key, cells in found.items()
    }


class BatchFold:
    """The batches of a log, of which those are set apart that say nothing of one core count: of the replicas whose
    cores are only reserved (`Slot.is_capped`), those that ran while another replica of their node ran a batch, which
    took some of its cores.

    With `size`, so are the batches whose rows are of another class of sizes; 0 is that of rows of one size.

    With `only_busy`, so are on a fraction of a core the batches that were not ordered when the one before ended. In a
    pause, a replica saves CPU time, and its next batch takes less. How often that happens depends on the load, and is
    no property of the model.
    """

    def __init__(self, nodes: Iterable[Node] = (), *, only_busy: bool = False, size: int | None = None) -> None:
        """`nodes` are those of the log's header."""
        self._state = RunState(ANY_GRAPH)
        self._only_busy, self._size = only_busy, size
        self._ended_ns: dict[ReplicaId, int] = {}
        self._node_cores: defaultdict[str, set[float]] = defaultdict(set)
        self.shared: Counter[VariantKey] = Counter()
        """How many batches were set apart because others ran on the same cores."""
        for node in nodes:
            self._node_cores[node.hardware].add(node.cores)

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record; instants never decrease."""
        state = self._state
        state.append(now_ns, record)
        if isinstance(record, Finished):
            self._ended_ns[record.replica] = now_ns
        elif isinstance(record, StartBatch):
            replica = state.replicas.get(record.replica)
            if replica is None:
                return
            if state.workers.uses:
                self._set_shared_apart(replica)
            cores = (
                replica.cores if replica.spec.slot.is_capped else max(self._node_cores[replica.group.hardware] or {0.0})
            )
            is_late = self._ended_ns.get(record.replica) != now_ns
            if (self._only_busy and not cores.is_integer() and is_late) or self._size not in (None, record.size):
                state.set_apart(record.batch)
        elif isinstance(record, NodeReady):
            self._node_cores[record.node.hardware].add(record.node.cores)

    def durations(self) -> Durations:
        """The durations as a profile has them, for cells with at least `BATCHES_MIN` of them."""
        return durations_of(self._state, node_cores=self._node_cores)

    def _set_shared_apart(self, begun: ReplicaRecord) -> None:
        """A replica has begun a batch: those that run on the cores of its node now share them."""
        place = begun.spec.slot.hardware, begun.spec.node
        running = [each for each in self._state.batches() if (each.spec.slot.hardware, each.spec.node) == place]
        if len(running) > 1:
            for replica in running:
                if not replica.spec.slot.is_capped and replica.running is not None:
                    self._state.set_apart(replica.running.batch)
                    self.shared[replica.group.variant_key] += 1


def batch_durations(records: Iterable[tuple[int, Record]], nodes: Iterable[Node] = ()) -> Durations:
    """The durations of the batches of a log as a profile has them, for cells with at least `BATCHES_MIN` of them; on a
    fraction of a core those of a busy replica. `nodes` are those of the log's header."""
    fold = BatchFold(nodes, only_busy=True)
    for now_ns, record in records:
        fold.append(now_ns, record)
    return fold.durations()
