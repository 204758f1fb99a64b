"""One option for every stage, together as cheap as can be, within budgets of time: an exact dynamic program over slots.

Razavi et al., FA2 (RTAS 2022), Algorithm 1, read so that it is right: a leaf keeps its cheapest option and not its
last, every successor counts once and not once per path, a slow option does not end the search. Biscale (dissertation
P4) runs it on chains. Time comes in whole slots, a millisecond each unless the caller says otherwise. A cost is one
integer: an objective of several parts is packed into it, the most important first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        keys, times = self.keys[order], self.slots[order]
        kept = times <= slots
        kept[1:] &= keys[1:] < np.minimum.accumulate(keys)[:-1]
        return list(zip(times[kept].tolist(), keys[kept].tolist(), strict=True))


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
    With `tree` the answer is the cheapest there is where `is_exact` says so; other segments that start below a root cap
    all that follows their second stage, so that it may then be dearer, or missing. `paper` is the published rule, the
    tightest budget for everything below a stage: never too optimistic, often too cautious. Ties go to the lowest index,
    from the roots down.
    """
    if any(segment.slots < 0 for segment in segments):
        return None
    assert sum(int(option.keys.max()) for option in options) < NEVER, "costs too large to add"
    forest = _Forest(options, segments, budgets)
    best: dict[int, NDArray[np.int64]] = {}
    rest: dict[int, NDArray[np.int64]] = {}
    capped: dict[int, list[Capped]] = {}
    for stage in reversed(forest.order):
        rest[stage] = forest.rest_of(stage, best)
        capped[stage] = forest.capped_of(stage, best)
        best[stage] = _best_of(options[stage].frontier(forest.limit[stage]), rest[stage], capped[stage])
    chosen = [-1] * len(options)
    left = {root: forest.start[root] for root in forest.roots}
    for stage in forest.order:
        slots, keys = options[stage].slots, options[stage].keys
        after = left[stage] - slots
        allowed = (after >= 0) & (slots <= forest.limit[stage])
        costs = np.where(allowed, keys + rest[stage][np.maximum(after, 0)], NEVER)
        for cap, below in capped[stage]:
            within = min(left[stage], cap) - slots
            costs = np.where(within >= 0, np.minimum(costs + below[np.maximum(within, 0)], NEVER), NEVER)
        chosen[stage] = int(costs.argmin())
        if costs[chosen[stage]] >= NEVER:
            return None
        for child in forest.children[stage]:
            entered = min(left[stage], forest.cap.get(child, left[stage])) - int(slots[chosen[stage]])
            left[child] = min(entered - forest.shift[child], forest.start[child])
    return chosen


def is_exact(segments: Sequence[Segment]) -> bool:
    """Whether the least cost for these segments is sure to be found: they form a forest, and all of several stages
    start at its roots."""
    edges = {edge for segment in segments for edge in pairwise(segment.stages)}
    below = {stage for _, stage in edges}
    return len(below) == len(edges) and all(
        len(segment.stages) == 1 or segment.stages[0] not in below for segment in segments
    )


Capped = tuple[int, NDArray[np.int64]]
"""The most a stage may have on entry for what follows at one child, and that child's cost by slots left after."""


def _best_of(front: Sequence[tuple[int, int]], rest: NDArray[np.int64], capped: Sequence[Capped]) -> NDArray[np.int64]:
    """By slots left on entry: the least cost of a stage and all below it, given the least cost of all below it."""
    best = np.full_like(rest, NEVER)
    sums = np.empty_like(rest)  # once: fresh pages for every option would take longer than the additions
    for slot, key in front:
        own = np.add(rest[: len(rest) - slot], key, out=sums[slot:])
        for cap, below in capped:
            if cap < slot:
                own[:] = NEVER
                break
            own[: cap + 1 - slot] += below[: cap + 1 - slot]
            own[cap + 1 - slot :] += below[cap - slot]
            np.minimum(own, NEVER, out=own)
        np.minimum(best[slot:], own, out=best[slot:])
    return best


class _Forest:
    """Who comes after whom, and what time each stage may have, out of the segments."""

    def __init__(self, options: Sequence[Options], segments: Sequence[Segment], budgets: Budgets) -> None:
        stages = range(len(options))
        parents: dict[int, int] = {}
        for segment in segments:
            for before, after in pairwise(segment.stages):
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
        """The most slots a stage may be given on entry, as published: by the tightest segment that starts there."""
        self.cap: dict[int, int] = {}
        """By child: the most slots its parent may have had on entry, for what follows at the child. By the segments
        that start at the parent."""
        self.shift = dict.fromkeys(stages, 0)
        """How much less time a child has than its parent has left, because its loosest segment is tighter."""
        self.reserve = dict.fromkeys(stages, 0)
        """Slots that must be left after a stage, because a segment that ends there is tighter than its loosest."""
        if budgets == "paper":
            for segment in segments:
                first = segment.stages[0]
                self.start[first] = min(self.start[first], segment.slots)
        else:
            self._give_each_branch_its_own([segment for segment in segments if segment.stages[0] in self.roots])
            self._cap_by([segment for segment in segments if segment.stages[0] not in self.roots])

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

    def _cap_by(self, inner: Sequence[Segment]) -> None:
        """Each is told on the clock of where it starts, which runs ahead of its own by all that is shifted on its way
        and left when it ends."""
        for segment in inner:
            if len(segment.stages) > 1:  # else its stage's limit says it all
                ahead = sum(self.shift[stage] for stage in segment.stages[1:]) + self.reserve[segment.stages[-1]]
                child, most = segment.stages[1], segment.slots + ahead
                self.cap[child] = min(self.cap.get(child, most), most)

    def capped_of(self, stage: int, best: dict[int, NDArray[np.int64]]) -> list[Capped]:
        """What follows at the children that a segment starting here leads to."""
        capped = []
        for child in self.children[stage]:
            if child in self.cap:
                below = np.full(self.horizon[stage] + 1, NEVER, dtype=np.int64)
                shift = self.shift[child]
                below[shift:] = best[child][: len(below) - shift]
                capped.append((min(self.cap[child], self.horizon[stage]), below))
        return capped

    def rest_of(self, stage: int, best: dict[int, NDArray[np.int64]]) -> NDArray[np.int64]:
        """By slots left after `stage`: the least cost of all below it, those with a cap excepted."""
        horizon = self.horizon[stage]
        rest = np.zeros(horizon + 1, dtype=np.int64)
        for child in (child for child in self.children[stage] if child not in self.cap):
            shift, start = self.shift[child], self.start[child]
            rest[:shift] = NEVER
            end = min(shift + start, horizon)
            rest[shift : end + 1] += best[child][: end + 1 - shift]
            rest[end + 1 :] += best[child][start]
            np.minimum(rest, NEVER, out=rest)
        rest[: self.reserve[stage]] = NEVER
        return rest
