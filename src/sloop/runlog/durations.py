"""Batch durations of a run by variant, hardware, batch size and cores. Profiles and simulations learn from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sloop.actions import StartBatch
from sloop.app.graph import Graph, GraphStage
from sloop.events import Finished
from sloop.runlog import Record
from sloop.runlog.fold import RunState
from sloop.vocabulary import ALONE, ReplicaId

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


def durations_of(state: RunState, batches_min: int = BATCHES_MIN) -> Durations:
    """Batch durations from order to answer, transport included, for cells with at least `batches_min` batches.

    A batch during which the replica was resized is left out, because it ran on two core counts; so is one on a share of
    an accelerator, because a profile is of a whole one, one whose cores were not a cap, because others may have used
    them too, and one that a shadow had a part in.
    """
    found: dict[VariantKey, dict[tuple[int, float], Sequence[int]]] = {}
    for group in state.groups.values():
        is_part = group.slot.accelerator and group.slot.share < 1.0
        if is_part or not group.slot.is_capped or group.form != ALONE:
            continue
        for size, runs_ns in group.durations_ns.items():
            cells = found.setdefault(group.variant_key, {})
            if len(runs_ns) >= batches_min:
                cells[size, group.cores] = list(runs_ns)
    return found


def batch_durations(records: Iterable[tuple[int, Record]]) -> Durations:
    """The durations of the batches of a log as a profile has them, for cells with at least `BATCHES_MIN` of them.

    On a fraction of a core, only the batches of a busy replica count: those that were ordered when the one before
    ended. In a pause, a replica saves CPU time, and its next batch takes less. How often that happens depends on the
    load, and is no property of the model.
    """
    state = RunState(ANY_GRAPH)
    ended_ns: dict[ReplicaId, int] = {}
    for now_ns, record in records:
        state.append(now_ns, record)
        if isinstance(record, Finished):
            ended_ns[record.replica] = now_ns
        elif isinstance(record, StartBatch) and ended_ns.get(record.replica) != now_ns:
            replica = state.replicas.get(record.replica)
            if replica is not None and not replica.cores.is_integer():
                state.set_apart(record.batch)
    return durations_of(state)
