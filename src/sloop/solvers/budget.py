"""One option for every stage, together as cheap as can be, within budgets of time: an exact dynamic program over slots.

Razavi et al., FA2 (RTAS 2022), Algorithm 1, read so that it is right: a leaf keeps its cheapest option and not its
last, every successor counts once and not once per path, a slow option does not end the search. Biscale (dissertation
P4) runs it on chains. Time comes in whole slots, a millisecond each unless the caller says otherwise. A cost is one
integer: an objective of several parts is packed into it, the most important first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

NEVER: Final = 1 << 58
"""The cost of what cannot be; costs that can be must stay below it in sum."""

Budgets = Literal["tree", "paper"]
"""How a stage shares its time among those after it: each by its own loosest chain, or all by the tightest."""


@dataclass(frozen=True, slots=True)
class Options:
    """What may be chosen for one stage. `keys[i]` ≥ 0 is the cost of option i and `slots[i]` ≥ 0 its time in slots."""

    keys: NDArray[np.int64]
    slots: NDArray[np.int64]

    def frontier(self, slots: int) -> list[tuple[int, int]]:
        """(time, cost) of those within `slots` that no other beats in both, quickest first."""
        order = np.lexsort((self.keys, self.slots))
        front: list[tuple[int, int]] = []
        for index in order.tolist():
            slot, key = int(self.slots[index]), int(self.keys[index])
            if slot <= slots and (not front or key < front[-1][1]):
                front.append((slot, key))
        return front


@dataclass(frozen=True, slots=True)
class Segment:
    """A chain of stages, by index, and the slots they may take together."""

    stages: tuple[int, ...]
    slots: int


def cheapest_chain(options: Sequence[Options], slots: int) -> list[int] | None:
    """The option of each stage with the least Σ keys among those with Σ slots ≤ `slots`; None where none fits.

    Of equally cheap choices the first stage takes its lowest index, then the second, and so on.
    """
    return cheapest_tree(options, [Segment(tuple(range(len(options))), slots)])


def cheapest_tree(
    options: Sequence[Options], segments: Sequence[Segment], budgets: Budgets = "tree"
) -> list[int] | None:
    """The option of each stage, cheap in sum, so that every segment holds; None where the program finds none.

    The segments together must form a forest: no stage directly after two others, each stage in at least one segment.
    With `tree` the answer is the cheapest there is where all segments start at roots, one ending at each leaf; segments
    that start further down cap everything below them, so that it may then be dearer, or missing. `paper` is the
    published rule, the tightest budget for everything below a stage: never too optimistic, often too cautious. Ties
    go to the lowest index, from the roots down.
    """
    if any(segment.slots < 0 for segment in segments):
        return None
    assert sum(int(option.keys.max()) for option in options) < NEVER, "costs too large to add"
    forest = _Forest(options, segments, budgets)
    best: dict[int, NDArray[np.int64]] = {}
    rest: dict[int, NDArray[np.int64]] = {}
    for stage in reversed(forest.order):
        rest[stage] = forest.rest_of(stage, best)
        best[stage] = _best_of(options[stage].frontier(forest.limit[stage]), rest[stage])
    chosen = [-1] * len(options)
    left = {root: forest.start[root] for root in forest.roots}
    for stage in forest.order:
        slots, keys = options[stage].slots, options[stage].keys
        after = left[stage] - slots
        allowed = (after >= 0) & (slots <= forest.limit[stage])
        costs = np.where(allowed, keys + rest[stage][np.maximum(after, 0)], NEVER)
        chosen[stage] = int(costs.argmin())
        if costs[chosen[stage]] >= NEVER:
            return None
        for child in forest.children[stage]:
            left[child] = min(int(after[chosen[stage]]) - forest.shift[child], forest.start[child])
    return chosen


def _best_of(front: Sequence[tuple[int, int]], rest: NDArray[np.int64]) -> NDArray[np.int64]:
    """By slots left on entry: the least cost of a stage and all below it, given the least cost of all below it."""
    best = np.full_like(rest, NEVER)
    sums = np.empty_like(rest)  # once: fresh pages for every option would take longer than the additions
    for slot, key in front:
        own = np.add(rest[: len(rest) - slot], key, out=sums[slot:])
        np.minimum(best[slot:], own, out=best[slot:])
    return best


class _Forest:
    """Who comes after whom, and what time each stage may have, out of the segments."""

    def __init__(self, options: Sequence[Options], segments: Sequence[Segment], budgets: Budgets) -> None:
        stages = range(len(options))
        parents: dict[int, int] = {}
        for segment in segments:
            for before, after in zip(segment.stages, segment.stages[1:], strict=False):
                assert parents.setdefault(after, before) == before, f"stage {after} is directly after two others"
        self.children = {stage: [child for child, parent in parents.items() if parent == stage] for stage in stages}
        self.roots = [stage for stage in stages if stage not in parents]
        self.order = list(self.roots)
        for stage in self.order:
            self.order += self.children[stage]
        assert len(self.order) == len(options), "stages in a circle"
        self.horizon = self._horizons(segments)
        """The most slots any segment of a stage's tree has: what its clock can show."""
        self.limit = {s: min(segment.slots for segment in segments if s in segment.stages) for s in stages}
        """No stage may take longer than the tightest segment it is in (r of the paper)."""
        self.start = dict(self.horizon)
        """The most slots a stage may be given on entry, by the segments that start there."""
        self.shift = dict.fromkeys(stages, 0)
        """How much less time a child has than its parent has left, because its loosest segment is tighter."""
        self.reserve = dict.fromkeys(stages, 0)
        """Slots that must be left after a stage, because a segment that ends there is tighter than its loosest."""
        for segment in segments:
            if budgets == "paper" or len(segment.stages) > 1:
                first = segment.stages[0]
                self.start[first] = min(self.start[first], segment.slots)
        if budgets == "tree":
            self._give_each_branch_its_own([segment for segment in segments if segment.stages[0] in self.roots])

    def _horizons(self, segments: Sequence[Segment]) -> dict[int, int]:
        """By stage; each tree has its own, so that a long deadline makes no work for the stages of short ones."""
        root_of = {root: root for root in self.roots}
        for stage in self.order:
            root_of |= dict.fromkeys(self.children[stage], root_of[stage])
        longest = dict.fromkeys(self.roots, 0)
        for segment in segments:
            root = root_of[segment.stages[0]]
            longest[root] = max(longest[root], segment.slots)
        return {stage: longest[root] for stage, root in root_of.items()}

    def _give_each_branch_its_own(self, anchored: Sequence[Segment]) -> None:
        """`anchored` segments start at a root; the loosest through a stage is the clock that its slots are told on."""
        loosest: dict[int, int] = {}
        for stage in self.order:
            through = [segment.slots for segment in anchored if stage in segment.stages]
            if stage in self.roots:
                loosest[stage] = self.start[stage] = max(through)
            for child in self.children[stage]:
                below = [segment.slots for segment in anchored if child in segment.stages]
                loosest[child] = max(below, default=loosest[stage])
                self.shift[child] = loosest[stage] - loosest[child]
            ending = [segment.slots for segment in anchored if segment.stages[-1] == stage]
            self.reserve[stage] = max((loosest[stage] - slots for slots in ending), default=0)

    def rest_of(self, stage: int, best: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
        """By slots left after `stage`: the least cost of all below it."""
        horizon = self.horizon[stage]
        rest = np.zeros(horizon + 1, dtype=np.int64)
        for child in self.children[stage]:
            shift, start = self.shift[child], self.start[child]
            rest[:shift] = NEVER
            end = min(shift + start, horizon)
            rest[shift : end + 1] += best[child][: end + 1 - shift]
            rest[end + 1 :] += best[child][start]
            np.minimum(rest, NEVER, out=rest)
        rest[: self.reserve[stage]] = NEVER
        return rest
