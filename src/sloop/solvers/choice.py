"""One option for every stage, together as cheap as can be, with every path in its budget, wherever paths meet.

An integer program by HiGHS: the reference for the dynamic program of `sloop.solvers.budget`, with the same values in
and out, and its substitute where paths are no forest: a multiple-choice knapsack with one row per path (the
specification's §2.4; the publication solves it with Gurobi). It stops after a number of nodes, never after a time, so
that its answer does not depend on the machine; one that it has not proved says so. And a search from an answer to a
cheaper one, which proves nothing and takes next to no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sloop.solvers import highs
from sloop.solvers.budget import Options, Segment
from sloop.solvers.graph import Chains

NODES_MAX: Final = 2_000
"""Of the branch and bound; the applications of FA2 need one to a few dozen."""


@dataclass(frozen=True, slots=True)
class Found:
    """An option for each stage, or None. `proven`: there is none cheaper; with None, there is none at all.

    None without proof is a solver that gave up.
    """

    indices: tuple[int, ...] | None
    proven: bool


NOTHING: Final = Found(None, proven=True)
GAVE_UP: Final = Found(None, proven=False)


def cheapest(options: Sequence[Options], segments: Sequence[Segment], *, nodes_max: int = NODES_MAX) -> Found:
    """The option of each stage with the least Σ keys with every segment kept. Segments may meet anywhere."""
    useful = [_useful(option, stage, segments) for stage, option in enumerate(options)]
    if not all(useful):
        return NOTHING
    starts = np.cumsum([0, *map(len, useful)])
    unit = max(1, *(int(options[stage].keys[index]) for stage, own in enumerate(useful) for index in own))
    costs = np.concatenate([options[stage].keys[own] / unit for stage, own in enumerate(useful)])
    slots = np.concatenate([options[stage].slots[own].astype(float) for stage, own in enumerate(useful)])
    columns = [range(starts[stage], starts[stage + 1]) for stage in range(len(useful))]
    rows: list[highs.Row] = [(dict.fromkeys(own, 1.0), 1.0, 1.0) for own in columns]
    for segment in segments:
        taken = {column: slots[column] for stage in segment.stages for column in columns[stage]}
        rows.append((taken, 0.0, float(segment.slots)))
    answer = highs.minimise(costs.tolist(), rows, integers=len(costs), nodes_max=nodes_max)
    values = answer.values
    if values is None:
        return NOTHING if answer.proven else GAVE_UP
    indices = tuple(own[int(np.argmax(values[starts[stage] : starts[stage + 1]]))] for stage, own in enumerate(useful))
    if not holds(options, chains_of(segments, len(options)), indices):  # an incumbent that rounding broke is no answer
        return GAVE_UP
    return Found(indices, proven=answer.proven)


def chains_of(segments: Sequence[Segment], stages: int) -> Chains:
    """The segments as one matrix, in slots."""
    return Chains([segment.stages for segment in segments], [segment.slots for segment in segments], stages)


def holds(options: Sequence[Options], chains: Chains, indices: Sequence[int]) -> bool:
    """Whether these options keep every segment."""
    return bool((chains.left(_taken(options, indices)) >= 0).all())


def improved(options: Sequence[Options], chains: Chains, indices: Sequence[int]) -> list[int]:
    """The same with single stages changed, the largest saving first, until no change of one alone saves anything.

    `indices` must keep every segment; so does the answer. Of equal savings the first stage's counts, and its lowest
    index. What programs over forests leave to be had where a cut was too cautious.
    """
    chosen = list(indices)
    while True:
        saved, changed, to = 0, -1, -1
        room = chains.room(_taken(options, chosen))
        for stage, (option, own) in enumerate(zip(options, chosen, strict=True)):
            keys = np.where(option.slots <= option.slots[own] + room[stage], option.keys, option.keys[own])
            index = int(keys.argmin())
            saving = int(option.keys[own] - keys[index])
            if saving > saved:
                saved, changed, to = saving, stage, index
        if not saved:
            return chosen
        chosen[changed] = to


def _taken(options: Sequence[Options], indices: Sequence[int]) -> list[int]:
    return [int(option.slots[index]) for option, index in zip(options, indices, strict=True)]


def _useful(option: Options, stage: int, segments: Sequence[Segment]) -> list[int]:
    """Options of a stage that fit into its segments by themselves and that no other beats in both time and cost."""
    most = min((segment.slots for segment in segments if stage in segment.stages), default=int(option.slots.max()))
    kept: list[int] = []
    for index in np.lexsort((option.keys, option.slots)).tolist():
        if option.slots[index] <= most and (not kept or option.keys[index] < option.keys[kept[-1]]):
            kept.append(index)
    return kept
