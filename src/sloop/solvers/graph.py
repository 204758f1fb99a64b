"""Paths through a graph as indices, and cuts that turn a graph whose paths meet into a forest with budgets.

`forests` gives segments that form a forest (no stage directly after two others); along each path their budgets add up
to the deadline. So a solution that keeps every segment keeps every path. The reverse does not hold, because a cut gives
each side a fixed share of a deadline; so callers solve several cuts and check the result against the paths. Stages are
indices in topological order. Must not depend on options, rates or costs.

Source: Razavi et al., FA2 (RTAS 2022), section on the graph transformation. It has no rule for equally shared edges;
`Ties` names the possible rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Ties = Literal["first", "loosest", "best"]
"""Which edge to cut if equally many segments share several: the one from the first stage, the one on the segment with
the most time, or each in turn."""

CUTS_MAX: Final = 24
"""The most forests that `forests` returns. The first one is the forest of `loosest`."""
SHARE_ROUNDING: Final = 1e-6
"""Tolerance for shares of a deadline, which are products of floats: 389.99999… slots are 390. Wider than
`sloop.quantities.ROUNDING`, because deadlines reach 1e5 ms."""


@dataclass(frozen=True, slots=True)
class IndexedPath:
    """A path (or a segment of one) as stage indices in order, and its deadline in milliseconds."""

    stages: tuple[int, ...]
    slo_ms: float

    def slots(self, slot_ms: float = 1.0) -> int:
        """The deadline in whole slots, rounded down."""
        return int(self.slo_ms / slot_ms + SHARE_ROUNDING)


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
