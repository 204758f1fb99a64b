"""How long the batches of a run took, by variant, batch size and cores, for profiles and simulations to learn from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from sloop.app.graph import Graph, GraphStage
from sloop.runlog import Record
from sloop.runlog.fold import RunState

VariantKey = tuple[str, str]
"""Stage and variant."""
Durations = Mapping[VariantKey, Mapping[tuple[int, float], Sequence[int]]]
"""Per variant and cell (batch size, cores): the durations in ns of its batches, in the order in which they ended."""

BATCHES_MIN: Final = 20
"""Cells with fewer batches are left out: their mean says little, and a profile has measured more."""
ANY_GRAPH: Final = Graph([GraphStage("any")])
"""For a fold that is only asked about batches: these do not depend on what follows from them."""


def durations_of(state: RunState, batches_min: int = BATCHES_MIN) -> Durations:
    """Of every batch from its order to its answer, as the core sees it, transport included; for cells with at least
    `batches_min` batches. A batch that was resized meanwhile belongs to no number of cores and is left out."""
    found: dict[VariantKey, dict[tuple[int, float], Sequence[int]]] = {}
    for group in state.groups.values():
        for size, runs_ns in group.durations_ns.items():
            cells = found.setdefault(group.key, {})
            if len(runs_ns) >= batches_min:
                cells[size, group.cores] = list(runs_ns)
    return found


def batch_durations(records: Iterable[tuple[int, Record]]) -> Durations:
    """The durations of all batches of a log, for cells with at least `BATCHES_MIN` of them."""
    state = RunState(ANY_GRAPH)
    for now_ns, record in records:
        state.append(now_ns, record)
    return durations_of(state)
