"""From the paths of a graph to a forest: which edges are cut where stages meet, and how deadlines are shared out.

Promises segments that together are a forest (no stage directly after two others) and add up, path by path, to the
paths' deadlines: whatever keeps every segment keeps every path. The reverse does not hold, a cut is a caution; so there
is more than one way to cut, and whoever solves tries them and rechecks the paths. Stages are indices in topological
order. Knows no options, rates or costs: a stage's weight stands for how much of a deadline it deserves.

Source: Razavi et al., FA2 (RTAS 2022), section on the graph transformation; the ways to break ties are the
specification's (§2.5.1), none is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Ties = Literal["first", "loosest", "best"]
"""Which of equally shared edges is cut: the one from the first stage, the one on the loosest path, or each in turn."""

CUTS_MAX: Final = 24
"""So many ways to cut are tried at most; the loosest is the first of them."""
ROUNDING: Final = 1e-6
"""Shares of a deadline are products of floats: 389.99999… slots are 390."""


@dataclass(frozen=True, slots=True)
class Way:
    """A chain of stages, by index, that a request may take, and the milliseconds it may take for it."""

    stages: tuple[int, ...]
    slo_ms: float

    def slots(self, slot_ms: float = 1.0) -> int:
        """Its deadline in whole slots, rounded down."""
        return int(self.slo_ms / slot_ms + ROUNDING)


class Chains:
    """Chains of stages as one matrix, each with a limit to what its stages take together, in whatever unit."""

    __slots__ = ("_limits", "_on")

    def __init__(self, chains: Sequence[Sequence[int]], limits: Sequence[float], stages: int) -> None:
        self._limits = np.array(limits, dtype=np.float64)
        self._on = np.zeros((len(chains), stages))
        for chain, stages_on in enumerate(chains):
            self._on[chain, list(stages_on)] = 1.0

    def left(self, taken: Sequence[float]) -> NDArray[np.float64]:
        """Of each chain, where the stages take so much; below 0 where it is exceeded."""
        left: NDArray[np.float64] = self._limits - self._on @ np.asarray(taken, dtype=np.float64)
        return left

    def room(self, taken: Sequence[float]) -> NDArray[np.float64]:
        """How much more each stage alone may take; infinite for one on no chain."""
        left = np.where(self._on > 0, self.left(taken)[:, None], np.inf)
        room: NDArray[np.float64] = left.min(axis=0, initial=np.inf)
        return room


Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Forest:
    """What is left of the ways once every edge of `cut` is cut."""

    ways: tuple[Way, ...]
    cut: tuple[Edge, ...] = ()


def forests(ways: Sequence[Way], weights: Sequence[float], ties: Ties = "best", most: int = CUTS_MAX) -> list[Forest]:
    """The forests that cutting makes, the loosest cut's first, at most so many; one of `first` or `loosest`.

    As long as some stage comes directly after several, the first such stage loses all edges but one, of those that the
    most segments share: as if each time the edge went that the fewest share. Each segment over an edge that goes
    becomes two, whose deadlines are shares of its own in proportion to `weights` ≥ 0. Ways in cycles are the caller's
    mistake.
    """
    found: list[Forest] = []
    open: list[tuple[dict[tuple[int, ...], _Segment], tuple[Edge, ...]]] = [(_merged(ways), ())]
    while open and len(found) < most:
        segments, cut = open.pop()
        meeting = _meeting(segments)
        if not meeting:
            done = tuple(Way(stages, segment.slo_ms) for stages, segment in segments.items())
            found.append(Forest(done, cut))
            continue
        # The last in is the first out: so the loosest cut is followed to its end before any other.
        for kept in reversed(_kept(segments, meeting, ties)):
            gone = (edge for edge in meeting if edge != kept)
            open.append((_split(segments, kept, weights), (*cut, *gone)))
    return found


@dataclass(frozen=True, slots=True)
class _Segment:
    """The tightest of those along the same stages, and how many they are."""

    slo_ms: float
    count: int = 1


def _merged(ways: Sequence[Way]) -> dict[tuple[int, ...], _Segment]:
    merged: dict[tuple[int, ...], _Segment] = {}
    for way in ways:
        _add(merged, way.stages, _Segment(way.slo_ms))
    return merged


def _add(segments: dict[tuple[int, ...], _Segment], stages: tuple[int, ...], segment: _Segment) -> None:
    there = segments.get(stages)
    if there is not None:
        segment = _Segment(min(there.slo_ms, segment.slo_ms), there.count + segment.count)
    segments[stages] = segment


def _meeting(segments: dict[tuple[int, ...], _Segment]) -> list[Edge]:
    """The edges into the first stage that comes directly after several; empty where there is none."""
    before: dict[int, set[int]] = {}
    for stages in segments:
        for source, target in pairwise(stages):
            before.setdefault(target, set()).add(source)
    meeting = [target for target, sources in before.items() if len(sources) > 1]
    return [(source, min(meeting)) for source in sorted(before[min(meeting)])] if meeting else []


def _kept(segments: dict[tuple[int, ...], _Segment], edges: Sequence[Edge], ties: Ties) -> list[Edge]:
    """Which of these edges may stay: of those that the most segments share the one on the tightest segments first."""
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
    segments: dict[tuple[int, ...], _Segment], kept: Edge, weights: Sequence[float]
) -> dict[tuple[int, ...], _Segment]:
    """The segments with those that enter the target of `kept` over another edge cut in two there."""
    split: dict[tuple[int, ...], _Segment] = {}
    source, target = kept
    for stages, segment in segments.items():
        at = stages.index(target) if target in stages else 0
        if not at or stages[at - 1] == source:
            _add(split, stages, segment)
            continue
        whole = sum(weights[stage] for stage in stages)
        share = sum(weights[stage] for stage in stages[:at]) / whole if whole > 0 else at / len(stages)
        _add(split, stages[:at], _Segment(share * segment.slo_ms, segment.count))
        _add(split, stages[at:], _Segment(segment.slo_ms - share * segment.slo_ms, segment.count))
    return split
