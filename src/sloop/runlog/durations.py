"""Batch durations of a run by variant, hardware, batch size and cores. Profiles and simulations learn from them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sloop.app.graph import Graph, GraphStage
from sloop.runlog import Record
from sloop.runlog.fold import RunState

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
    an accelerator, because a profile is of a whole one.
    """
    found: dict[VariantKey, dict[tuple[int, float], Sequence[int]]] = {}
    for group in state.groups.values():
        if group.slot.accelerator and group.slot.share < 1.0:
            continue
        for size, runs_ns in group.durations_ns.items():
            cells = found.setdefault(group.variant_key, {})
            if len(runs_ns) >= batches_min:
                cells[size, group.cores] = list(runs_ns)
    return found


def batch_durations(records: Iterable[tuple[int, Record]]) -> Durations:
    """The durations of all batches of a log, for cells with at least `BATCHES_MIN` of them."""
    state = RunState(ANY_GRAPH)
    for now_ns, record in records:
        state.append(now_ns, record)
    return durations_of(state)
