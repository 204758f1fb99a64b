"""Time budgets on a graph of stages: cuts into a forest, and the cheapest option per stage within every budget.

`forests` cuts a graph whose paths meet into segments that form a forest (no stage directly after two others); along
each path their budgets add up to its deadline. So a solution that keeps every segment keeps every path. The reverse
does not hold, because a cut gives each side a fixed share of a deadline; so callers solve several cuts and check the
result against the paths.

Choosing one option per stage is a multiple-choice knapsack with a time constraint per segment. Three solvers:

- `cheapest_tree`: a dynamic program over slots of time for segments that form a forest. After Razavi et al., FA2 (RTAS
  2022), Algorithm 1, with its printed slips corrected: a leaf keeps its cheapest option, not its last; every successor
  counts once, not once per path; a slow option does not end the search. Biscale (dissertation chapter P4) uses it on
  chains.
- `cheapest_by_milp`: an integer program for segments that meet anywhere (FA2 solves it with Gurobi, this with HiGHS).
- `improved_choice`: local search from a solution to a cheaper one, without proof.

Stages are indices in topological order. Times are whole slots, usually of a millisecond. A cost is one integer: several
objectives are packed into it, the most important one first. Source of the cuts: FA2, section on the graph
transformation. It has no rule for equally shared edges; `Ties` names the possible rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from sloop.solvers import highs
from sloop.units import WIDE_ROUNDING

Ties = Literal["first", "loosest", "best"]
"""Which edge to cut if equally many segments share several: the one from the first stage, the one on the segment with
the most time, or each in turn."""

CUTS_MAX: Final = 24
"""The most forests that `forests` returns. The first one is the forest of `loosest`."""


SLOTS_TIGHTEST: Final = 1_000
"""Deadlines below a second are divided into this many slots, so that rounding latencies up costs at most 0.1 %."""
SLOTS_MAX: Final = 32_768
"""The most slots of the loosest deadline; they bound memory and time of the dynamic program."""
SLOTS_COARSE: Final = 2_048
"""The most slots where one decision solves a dozen programs, or where parts of deadlines need be no finer."""


@dataclass(frozen=True, slots=True)
class IndexedPath:
    """A path (or a segment of one) as stage indices in order, and its deadline in milliseconds."""

    stages: tuple[int, ...]
    slo_ms: float

    def slots(self, slot_ms: float = 1.0) -> int:
        """The deadline in whole slots, rounded down."""
        return int(self.slo_ms / slot_ms + WIDE_ROUNDING)  # 389.99999… slots are 390


def slot_ms_of(paths: Sequence[IndexedPath], *, coarse: bool = False) -> float:
    """Length of a slot: 1 ms as published; shorter for tight deadlines, longer if the loosest would exceed `SLOTS_MAX`
    slots, or, if they may be `coarse`, `SLOTS_COARSE`."""
    shortest = min(path.slo_ms for path in paths)
    longest = max(path.slo_ms for path in paths)
    return max(min(1.0, shortest / SLOTS_TIGHTEST), longest / (SLOTS_COARSE if coarse else SLOTS_MAX))


class PathMatrix:
    """Paths as an incidence matrix, each with a limit for the sum over its stages, in any unit."""

    __slots__ = ("_limits", "_on")

    def __init__(self, paths: Sequence[Sequence[int]], limits: Sequence[float], stages: int) -> None:
        self._limits = np.array(limits, dtype=np.float64)
        self._on = np.zeros((len(paths), stages))
        for path, stages_on in enumerate(paths):
            self._on[path, list(stages_on)] = 1.0

    def slack(self, taken: Sequence[float]) -> NDArray[np.float64]:
        """By path: the limit minus the sum over its stages; negative if the limit is exceeded."""
        slack: NDArray[np.float64] = self._limits - self._on @ np.asarray(taken, dtype=np.float64)
        return slack

    def stage_slack(self, taken: Sequence[float]) -> NDArray[np.float64]:
        """By stage: how much more the stage alone may take; infinite for a stage on no path."""
        slack = np.where(self._on > 0, self.slack(taken)[:, None], np.inf)
        least: NDArray[np.float64] = slack.min(axis=0, initial=np.inf)
        return least


Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments that form a forest, with their shares of the deadlines, and the edges that were cut."""

    paths: tuple[IndexedPath, ...]
    cut: tuple[Edge, ...] = ()


def forests(
    paths: Sequence[IndexedPath], weights: Sequence[float], ties: Ties = "best", most: int = CUTS_MAX
) -> list[Forest]:
    """At most `most` forests; the first one cuts the loosest edges. Exactly one for ties `first` and `loosest`.

    While a stage comes directly after several others, the first such stage keeps one incoming edge, among those that
    the most segments share. A segment over a cut edge becomes two, which divide its deadline in proportion to the
    `weights` ≥ 0 of their stages. The paths must not contain a cycle.
    """
    found: list[Forest] = []
    merged: dict[tuple[int, ...], _Merged] = {}
    for path in paths:
        _merge(merged, path.stages, _Merged(path.slo_ms))
    open: list[tuple[dict[tuple[int, ...], _Merged], tuple[Edge, ...]]] = [(merged, ())]
    while open and len(found) < most:
        segments, cut = open.pop()
        meeting = _meeting_edges(segments)
        if not meeting:
            done = tuple(IndexedPath(stages, segment.slo_ms) for stages, segment in segments.items())
            found.append(Forest(done, cut))
            continue
        # Depth first, so that the loosest cuts are followed to a forest before any other.
        for kept in reversed(_edges_to_keep(segments, meeting, ties)):
            removed = (edge for edge in meeting if edge != kept)
            open.append((_split(segments, kept, weights), (*cut, *removed)))
    return found


@dataclass(frozen=True, slots=True)
class _Merged:
    """Segments along the same stages: the tightest deadline, and the number of segments."""

    slo_ms: float
    count: int = 1


def _merge(segments: dict[tuple[int, ...], _Merged], stages: tuple[int, ...], segment: _Merged) -> None:
    known = segments.get(stages)
    if known is not None:
        segment = _Merged(min(known.slo_ms, segment.slo_ms), known.count + segment.count)
    segments[stages] = segment


def _meeting_edges(segments: dict[tuple[int, ...], _Merged]) -> list[Edge]:
    """The edges into the first stage that comes directly after several others; empty if there is none."""
    before: dict[int, set[int]] = {}
    for stages in segments:
        for source, target in pairwise(stages):
            before.setdefault(target, set()).add(source)
    meeting = [target for target, sources in before.items() if len(sources) > 1]
    return [(source, min(meeting)) for source in sorted(before[min(meeting)])] if meeting else []


def _edges_to_keep(segments: dict[tuple[int, ...], _Merged], edges: Sequence[Edge], ties: Ties) -> list[Edge]:
    """The edges to try to keep: among the most shared ones, the edge on the tightest segments first."""
    shared = dict.fromkeys(edges, 0)
    loosest = dict.fromkeys(edges, 0.0)
    for stages, segment in segments.items():
        for edge in pairwise(stages):
            if edge in shared:
                shared[edge] += segment.count
                loosest[edge] = max(loosest[edge], segment.slo_ms)
    most = max(shared.values())
    kept = sorted((edge for edge in edges if shared[edge] == most), key=lambda edge: (loosest[edge], -edge[0]))
    if ties == "best":
        return kept
    return kept[:1] if ties == "loosest" else [max(kept)]


def _split(
    segments: dict[tuple[int, ...], _Merged], kept: Edge, weights: Sequence[float]
) -> dict[tuple[int, ...], _Merged]:
    """The segments; a segment that enters the target of `kept` over another edge is cut in two at that edge."""
    split: dict[tuple[int, ...], _Merged] = {}
    source, target = kept
    for stages, segment in segments.items():
        at = stages.index(target) if target in stages else 0
        if not at or stages[at - 1] == source:
            _merge(split, stages, segment)
            continue
        whole = sum(weights[stage] for stage in stages)
        share = sum(weights[stage] for stage in stages[:at]) / whole if whole > 0 else at / len(stages)
        _merge(split, stages[:at], _Merged(share * segment.slo_ms, segment.count))
        _merge(split, stages[at:], _Merged(segment.slo_ms - share * segment.slo_ms, segment.count))
    return split


IMPOSSIBLE: Final = 1 << 58
"""The cost of an infeasible choice. Sums of feasible costs must stay below it."""
NODES_MAX: Final = 2_000
"""The most branch-and-bound nodes. FA2's applications need between one and a few dozen."""

Costs = NDArray[np.int64]
BudgetRule = Literal["tree", "paper"]
"""The remaining time that a stage passes to its successors. `tree`: each gets the time of its loosest segment. `paper`:
all get the tightest budget, as published; never too optimistic, often too cautious."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """The options of one stage: option i costs `costs[i]` ≥ 0 and takes `slots[i]` ≥ 0 slots."""

    costs: Costs
    slots: NDArray[np.int64]

    def pareto(self, slots: int) -> list[tuple[int, int]]:
        """(slots, cost) of the options within `slots` that are cheaper than all quicker ones, quickest first."""
        order = np.lexsort((self.costs, self.slots))
        costs, times = self.costs[order], self.slots[order]
        kept = times <= slots
        kept[1:] &= costs[1:] < np.minimum.accumulate(costs)[:-1]
        return list(zip(times[kept].tolist(), costs[kept].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Segment:
    """A chain of stages, by index, and the slots that they may take together."""

    stages: tuple[int, ...]
    slots: int


def segments_of(paths: Sequence[IndexedPath], slot_ms: float = 1.0) -> list[Segment]:
    """The paths with their deadlines in whole slots."""
    return [Segment(path.stages, path.slots(slot_ms)) for path in paths]


def segment_matrix(segments: Sequence[Segment], stages: int) -> PathMatrix:
    """The segments as a matrix with limits in slots."""
    return PathMatrix([segment.stages for segment in segments], [segment.slots for segment in segments], stages)


def within_budgets(options: Sequence[StageOptions], matrix: PathMatrix, indices: Sequence[int]) -> bool:
    """Whether the options at `indices` keep every segment."""
    return bool((matrix.slack(_slots_of(options, indices)) >= 0).all())


def total_cost(options: Sequence[StageOptions], indices: Sequence[int]) -> int:
    """The cost of the options at `indices`."""
    return sum(int(option.costs[index]) for option, index in zip(options, indices, strict=True))


def _slots_of(options: Sequence[StageOptions], indices: Sequence[int]) -> list[int]:
    return [int(option.slots[index]) for option, index in zip(options, indices, strict=True)]


def is_exact(segments: Sequence[Segment]) -> bool:
    """Whether `cheapest_tree` with rule `tree` is optimal: the segments form a forest, and segments of several stages
    start at a root."""
    edges = {edge for segment in segments for edge in pairwise(segment.stages)}
    below = {stage for _, stage in edges}
    return len(below) == len(edges) and all(
        len(segment.stages) == 1 or segment.stages[0] not in below for segment in segments
    )


def cheapest_tree(
    options: Sequence[StageOptions], segments: Sequence[Segment], rule: BudgetRule = "tree"
) -> list[int] | None:
    """The index of an option for each stage such that every segment is kept; None if the program finds none.

    Every stage must be in a segment, and no stage directly after two others. With the rule `tree` the solution is the
    cheapest if `is_exact`; otherwise segments that start below a root limit all stages after their second, so the
    solution may cost more than necessary, or be missing. Among equal costs the lowest index wins, from the roots down.
    """
    if any(segment.slots < 0 for segment in segments):
        return None
    assert sum(int(option.costs.max()) for option in options) < IMPOSSIBLE, "costs too large to add"
    forest = _Forest(options, segments, rule)
    best: dict[int, Costs] = {}
    rest: dict[int, Costs] = {}
    capped: dict[int, list[Capped]] = {}
    for stage in reversed(forest.order):
        rest[stage] = forest.rest_of(stage, best)
        capped[stage] = forest.capped_of(stage, best)
        best[stage] = _best_of(options[stage].pareto(forest.limit[stage]), rest[stage], capped[stage])
    chosen = [-1] * len(options)
    left = {root: forest.start[root] for root in forest.roots}
    for stage in forest.order:
        slots, own_costs = options[stage].slots, options[stage].costs
        after = left[stage] - slots
        allowed = (after >= 0) & (slots <= forest.limit[stage])
        costs = np.where(allowed, own_costs + rest[stage][np.maximum(after, 0)], IMPOSSIBLE)
        for cap, below in capped[stage]:
            within = min(left[stage], cap) - slots
            costs = np.where(within >= 0, np.minimum(costs + below[np.maximum(within, 0)], IMPOSSIBLE), IMPOSSIBLE)
        chosen[stage] = int(costs.argmin())
        if costs[chosen[stage]] >= IMPOSSIBLE:
            return None
        for child in forest.children[stage]:
            entered = min(left[stage], forest.cap.get(child, left[stage])) - int(slots[chosen[stage]])
            left[child] = min(entered - forest.shift[child], forest.start[child])
    return chosen


def cheapest_by_forests(
    options: Sequence[StageOptions],
    paths: Sequence[IndexedPath],
    weights: Sequence[float],
    *,
    slot_ms: float = 1.0,
    rule: BudgetRule = "tree",
    ties: Ties = "best",
    most: int = CUTS_MAX,
) -> list[int] | None:
    """The cheapest of the solutions of `cheapest_tree` over the `forests` of the paths, of those that also keep the
    uncut paths; None if there is none. Paths may meet; `weights` and `ties` are those of `forests`."""
    matrix = segment_matrix(segments_of(paths, slot_ms), len(options))
    best: list[int] | None = None
    for forest in forests(paths, weights, ties, most):
        found = cheapest_tree(options, segments_of(forest.paths, slot_ms), rule)
        if found is None or not within_budgets(options, matrix, found):
            continue
        if best is None or total_cost(options, found) < total_cost(options, best):
            best = found
    return best


Capped = tuple[int, Costs]
"""A child with a cap: the most slots that may be left when its parent is entered, and the cost of the child's subtree
by slots left after the parent."""


def _best_of(front: Sequence[tuple[int, int]], rest: Costs, capped: Sequence[Capped]) -> Costs:
    """By slots left on entry: the least cost of a stage and its subtree. `rest` is the cost of the subtree alone, by
    slots left after the stage."""
    best = np.full_like(rest, IMPOSSIBLE)
    sums = np.empty_like(rest)  # allocated once: new memory pages for every option cost more than the additions
    for slot, cost in front:
        own = np.add(rest[: len(rest) - slot], cost, out=sums[slot:])
        for cap, below in capped:
            if cap < slot:
                own[:] = IMPOSSIBLE
                break
            own[: cap + 1 - slot] += below[: cap + 1 - slot]
            own[cap + 1 - slot :] += below[cap - slot]
            np.minimum(own, IMPOSSIBLE, out=own)
        np.minimum(best[slot:], own, out=best[slot:])
    return best


class _Forest:
    """The successors of each stage and the time limits that follow from the segments.

    A stage's remaining slots are counted against the loosest segment from its root through it. Where a child's loosest
    segment is tighter than its parent's, the difference (`shift`) is subtracted on the way down.
    """

    def __init__(self, options: Sequence[StageOptions], segments: Sequence[Segment], rule: BudgetRule) -> None:
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
        assert len(self.order) == len(options), "the stages form a cycle"
        self.horizon = self._horizons(segments)
        """By stage: the most slots of any segment in its tree; its tables have this length."""
        self.limit = {s: min(segment.slots for segment in segments if s in segment.stages) for s in stages}
        """By stage: the most slots that it alone may take, from its tightest segment (r in the publication)."""
        self.start = dict(self.horizon)
        """By stage: the most slots left on entry; with the rule `paper`, those of its tightest segment."""
        self.cap: dict[int, int] = {}
        """By child: the most slots for its parent and its subtree together, from segments that start at the parent."""
        self.shift = dict.fromkeys(stages, 0)
        """By stage: its parent's loosest segment minus its own loosest segment, in slots."""
        self.reserve = dict.fromkeys(stages, 0)
        """By stage: slots that must be left after it, because a segment that ends there is tighter than the loosest."""
        if rule == "paper":
            for segment in segments:
                first = segment.stages[0]
                self.start[first] = min(self.start[first], segment.slots)
        else:
            self._set_shifts([segment for segment in segments if segment.stages[0] in self.roots])
            self._set_caps([segment for segment in segments if segment.stages[0] not in self.roots])

    def _horizons(self, segments: Sequence[Segment]) -> dict[int, int]:
        """Each tree has its own horizon, so that a long deadline adds no work to stages with short ones."""
        root_of = {root: root for root in self.roots}
        for stage in self.order:
            root_of |= dict.fromkeys(self.children[stage], root_of[stage])
        longest = dict.fromkeys(self.roots, 0)
        for segment in segments:
            root = root_of[segment.stages[0]]
            longest[root] = max(longest[root], segment.slots)
        return {stage: longest[root] for stage, root in root_of.items()}

    def _set_shifts(self, anchored: Sequence[Segment]) -> None:
        """`anchored` segments start at a root."""
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

    def _set_caps(self, inner: Sequence[Segment]) -> None:
        """`inner` segments start below a root. A cap counts slots at the stage where its segment starts, so the shifts
        along the segment and the reserve at its end are added."""
        for segment in inner:
            if len(segment.stages) > 1:  # one stage alone is covered by its limit
                added = sum(self.shift[stage] for stage in segment.stages[1:]) + self.reserve[segment.stages[-1]]
                child, most = segment.stages[1], segment.slots + added
                self.cap[child] = min(self.cap.get(child, most), most)

    def capped_of(self, stage: int, best: dict[int, Costs]) -> list[Capped]:
        """The subtrees of the stage's children that have a cap."""
        capped = []
        for child in self.children[stage]:
            if child in self.cap:
                below = np.full(self.horizon[stage] + 1, IMPOSSIBLE, dtype=np.int64)
                shift = self.shift[child]
                below[shift:] = best[child][: len(below) - shift]
                capped.append((min(self.cap[child], self.horizon[stage]), below))
        return capped

    def rest_of(self, stage: int, best: dict[int, Costs]) -> Costs:
        """By slots left after `stage`: the least cost of the subtrees below it that have no cap."""
        horizon = self.horizon[stage]
        rest = np.zeros(horizon + 1, dtype=np.int64)
        for child in (child for child in self.children[stage] if child not in self.cap):
            shift, start = self.shift[child], self.start[child]
            rest[:shift] = IMPOSSIBLE
            end = min(shift + start, horizon)
            rest[shift : end + 1] += best[child][: end + 1 - shift]
            rest[end + 1 :] += best[child][start]
            np.minimum(rest, IMPOSSIBLE, out=rest)
        rest[: self.reserve[stage]] = IMPOSSIBLE
        return rest


@dataclass(frozen=True, slots=True)
class KnapsackSolution:
    """An option index for each stage, or None. `proven`: the solution is optimal; with None, nothing is feasible.

    None without proof means that the solver gave up.
    """

    indices: tuple[int, ...] | None
    proven: bool


INFEASIBLE: Final = KnapsackSolution(None, proven=True)
GAVE_UP: Final = KnapsackSolution(None, proven=False)


def cheapest_by_milp(
    options: Sequence[StageOptions], segments: Sequence[Segment], *, nodes_max: int = NODES_MAX
) -> KnapsackSolution:
    """The cheapest options that keep every segment; segments may meet anywhere. Stops after `nodes_max` nodes."""
    useful = [_useful(option, stage, segments) for stage, option in enumerate(options)]
    if not all(useful):
        return INFEASIBLE
    starts = np.cumsum([0, *map(len, useful)])
    unit = max(1, *(int(options[stage].costs[index]) for stage, own in enumerate(useful) for index in own))
    costs = np.concatenate([options[stage].costs[own] / unit for stage, own in enumerate(useful)])
    slots = np.concatenate([options[stage].slots[own].astype(float) for stage, own in enumerate(useful)])
    columns = [range(starts[stage], starts[stage + 1]) for stage in range(len(useful))]
    rows: list[highs.Row] = [(dict.fromkeys(own, 1.0), 1.0, 1.0) for own in columns]
    for segment in segments:
        taken = {column: slots[column] for stage in segment.stages for column in columns[stage]}
        rows.append((taken, 0.0, float(segment.slots)))
    found = highs.minimise(costs.tolist(), rows, integers=len(costs), nodes_max=nodes_max)
    values = found.values
    if values is None:
        return INFEASIBLE if found.proven else GAVE_UP
    indices = tuple(own[int(np.argmax(values[starts[stage] : starts[stage + 1]]))] for stage, own in enumerate(useful))
    if not within_budgets(options, segment_matrix(segments, len(options)), indices):
        return GAVE_UP  # feasible within HiGHS' tolerance, but not as integers
    return KnapsackSolution(indices, proven=found.proven)


def _useful(option: StageOptions, stage: int, segments: Sequence[Segment]) -> list[int]:
    """Indices of the options that alone fit the stage's segments and are cheaper than all quicker ones."""
    most = min((segment.slots for segment in segments if stage in segment.stages), default=int(option.slots.max()))
    kept: list[int] = []
    for index in np.lexsort((option.costs, option.slots)).tolist():
        if option.slots[index] <= most and (not kept or option.costs[index] < option.costs[kept[-1]]):
            kept.append(index)
    return kept


def improved_choice(options: Sequence[StageOptions], matrix: PathMatrix, indices: Sequence[int]) -> list[int]:
    """Change the option of one stage at a time, the largest saving first, until no single change saves anything.

    `indices` must keep every segment, and so does the result. Among equal savings the first stage and its lowest index
    win. Recovers much of the cost of a cautious cut into a forest.
    """
    chosen = list(indices)
    while True:
        saved, changed, to = 0, -1, -1
        slack = matrix.stage_slack(_slots_of(options, chosen))
        for stage, (option, own) in enumerate(zip(options, chosen, strict=True)):
            costs = np.where(option.slots <= option.slots[own] + slack[stage], option.costs, option.costs[own])
            index = int(costs.argmin())
            saving = int(option.costs[own] - costs[index])
            if saving > saved:
                saved, changed, to = saving, stage, index
        if not saved:
            return chosen
        chosen[changed] = to
