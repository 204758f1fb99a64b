"""Cuts: into how many pieces, and where, to cut a model whose pieces start at the same time.

Several devices each load one piece of consecutive layers and serve as a pipeline, so that the first answer need not
wait until the whole model has started, but only until the slowest piece has. Functions of numbers, after San Juan,
"Flashpoint" (thesis, Waterloo 2023), chapter 4, with the corrections of our specification, sections 2.3 to 2.5 and 5.1.
Seconds and bytes.

For a plan with p pieces: C is the longest cold start of a piece, E the longest execution, N the longest and IN the sum
of all transfers between pieces, I = execution of the whole + IN, and B = max(E, N) the slowest station of the pipeline.
Of x requests that wait, P devices make g = ⌊P/p⌋ pipelines, and the x-th is answered after C + B (⌈x/g⌉ - 1) + I.

`sloop profile --layers` uses this module to propose cuts (`sloop.systems.layers`). Provision policies take their plans
from `coarse_fronts`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

WAITING_MAX: Final = 3000
"""X, the longest queue that the thesis saw with its baselines."""
LAYERS_MAX: Final = 64
"""Between how many groups of layers `coarse_fronts` cuts at most: the time of the solver grows with about the third
power of the layers, and the thesis's models have up to 55."""


@dataclass(frozen=True)
class PieceCosts:
    """What each layer costs, in order, and each boundary between two layers."""

    cold_s: tuple[float, ...]
    exec_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    """One fewer than layers."""
    memory_bytes: tuple[float, ...] = ()
    """By layer; empty if memory does not matter."""
    memory_bytes_max: float = inf
    """The most memory that one piece may take."""

    def __post_init__(self) -> None:
        count = len(self.cold_s)
        assert len(self.exec_s) == count == len(self.transfer_s) + 1, "a cost for each layer and boundary"
        assert len(self.memory_bytes) in (0, count)

    @property
    def layers(self) -> int:
        """L: the number of layers."""
        return len(self.cold_s)

    @cached_property
    def exec_whole_s(self) -> float:
        """I(1): the time to run the whole model on one device."""
        return sum(self.exec_s)

    @cached_property
    def _sums(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        memory = self.memory_bytes or (0.0,) * self.layers
        cold, execution, bytes_ = (tuple(accumulate(each, initial=0.0)) for each in (self.cold_s, self.exec_s, memory))
        return cold, execution, bytes_

    def cold(self, first: int, end: int) -> float:
        """Seconds to start the layers from `first` up to before `end`."""
        return self._sums[0][end] - self._sums[0][first]

    def exec(self, first: int, end: int) -> float:
        """Seconds to run these layers."""
        return self._sums[1][end] - self._sums[1][first]

    def memory(self, first: int, end: int) -> float:
        """Bytes of these layers."""
        return self._sums[2][end] - self._sums[2][first]

    def fits(self, first: int, end: int) -> bool:
        """Whether one device can hold these layers."""
        return self.memory(first, end) <= self.memory_bytes_max

    def plan(self, cuts: Sequence[int]) -> "PiecePlan":
        """The plan that cuts before these layers, ascending."""
        pieces = list(pairwise((0, *cuts, self.layers)))
        transfers = [self.transfer_s[cut - 1] for cut in cuts]
        return PiecePlan(
            tuple(cuts),
            max(self.cold(*piece) for piece in pieces),
            max(*(self.exec(*piece) for piece in pieces), *transfers, 0.0),
            sum(transfers),
            self.exec_whole_s,
        )


class PiecePlan(NamedTuple):
    """A model in pieces. Equal plans have equal cuts."""

    cuts: tuple[int, ...]
    """Numbers of layers before each cut, ascending; none for the whole model."""
    cold_s: float
    """C: the time until all pieces, which start at the same time, have started. If the costs are shares of the model
    (`PieceDownloads`), this is the share of the largest piece, 0 to 1."""
    slowest_s: float
    """B: the longest execution of a piece or transfer between pieces."""
    transfers_s: float
    """IN: the sum of all transfers between pieces."""
    exec_whole_s: float
    """I(1): the time to run the whole model on one device."""

    @property
    def pieces(self) -> int:
        """p: the number of pieces."""
        return len(self.cuts) + 1

    @property
    def request_s(self) -> float:
        """I(p): the time of one request through the idle pipeline."""
        return self.exec_whole_s + self.transfers_s

    def last_s(self, requests: int, devices: int) -> float:
        """T(p, x, P): the time until the last of x waiting requests is answered, by as many pipelines as the devices
        can hold."""
        return self.cold_s + self.slowest_s * (-(-requests // (devices // self.pieces)) - 1) + self.request_s

    def mean_s(
        self,
        requests: int,
        devices: int,
        *,
        is_pipeline: bool = True,
        shared_download_s: float = 0.0,
        starts: "PieceDownloads | None" = None,
    ) -> float:
        """The mean of `last_s` over the 1st to the x-th request.

        Without `is_pipeline`, a request enters when the one before has left. `shared_download_s` is the time of one
        copy of the model over a link that all pieces of all pipelines share; `cold_s` then excludes the download. With
        `starts`, `cold_s` is the share of the largest piece in the model, from which `starts` computes the time, and
        each piece has one request in the pipeline.
        """
        groups = devices // self.pieces
        cold_s, station_s = self.cold_s, self.slowest_s if is_pipeline else self.request_s
        if starts is not None:
            cold_s = starts.cold_s(self.cold_s, self.pieces, devices)
            station_s = max(station_s, self.request_s / self.pieces)
        waiting = rounds_before(requests, groups) / requests
        return cold_s + groups * shared_download_s + self.request_s + station_s * waiting


@dataclass(frozen=True, slots=True)
class PieceDownloads:
    """How long pieces of a model take to start if each sender and each receiver has one link.

    Section 2.3 has two cases: each piece comes over a link of its own, or all pieces of all pipelines come over one
    link. Here there may be any number of senders, and chains, in which a sender sends each piece once. Cutting a model
    then divides the time to load it, but shortens its download only if there are several senders.
    """

    process_s: float
    """The time until the process of a worker can load weights."""
    local_s: float
    """The time to load the whole model and send it to the device."""
    download_s: float
    """The time of the whole model over the link of a receiving node; 0 if the node has it."""
    send_s: float
    """The time of the whole model over the link of one sender; 0 if the nodes have it."""
    senders: int
    nodes: int
    """The receiving nodes, each with as many of the added devices."""
    is_chain: bool
    """Whether a sender sends each piece once, and the nodes pass it on."""
    is_shared: bool
    """Whether a node gets the whole model once for all its devices."""

    def cold_s(self, share: float, pieces: int, devices: int) -> float:
        """The time until all pieces have started, if the largest one has the fraction `share` of the model."""
        if not self.download_s:
            return self.process_s + share * self.local_s
        copies = self.nodes if self.is_shared and pieces == 1 else devices
        received = copies // pieces * pieces
        sent = pieces if self.is_chain else received
        sent_s = self.send_s * -(-sent // self.senders) / pieces
        received_s = self.download_s * max(share, -(-received // self.nodes) / pieces)
        return self.process_s + share * self.local_s + max(sent_s, received_s)

    def cold_each_s(self, share: NDArray[np.float64], pieces: NDArray[np.int64], pipelines: int) -> NDArray[np.float64]:
        """`cold_s` of several plans of at least two pieces, each with this many pipelines."""
        local_s = self.process_s + share * self.local_s
        if not self.download_s:
            return local_s
        received = pipelines * pieces
        sent = pieces if self.is_chain else received
        sent_s = self.send_s * -(-sent // self.senders) / pieces
        received_s = self.download_s * np.maximum(share, -(-received // self.nodes) / pieces)
        return local_s + np.maximum(sent_s, received_s)


def rounds_before(requests: int, groups: int) -> int:
    """S: the sum over x requests of ⌈y/g⌉ - 1, the number of requests before the y-th one in one of g equal
    pipelines."""
    whole, rest = divmod(requests, groups)
    return groups * whole * (whole - 1) // 2 + rest * whole


def expected_requests(
    queued: int, arrival_rps: float, service_rps: float, cold_s: float, requests_max: int = WAITING_MAX
) -> int:
    """x: the number of requests to plan for, 1 to `requests_max`.

    E(x), equation 4.14: the waiting requests, and those that arrive beyond what the present replicas serve during
    `cold_s`, in which a whole model starts: by then the excess has ended. A replica serves 1/I(1) per second, a
    pipeline 1/B.
    """
    waiting = queued + max(0.0, arrival_rps - service_rps) * cold_s
    return max(1, min(round(waiting), requests_max))


# The exact solver


class _Row(NamedTuple):
    """The ways to cut the first layers into some pieces that no other way beats, as a column for each figure."""

    cold_s: NDArray[np.float64]
    slowest_s: NDArray[np.float64]
    transfers_s: NDArray[np.float64]
    cuts: list[tuple[int, ...]]


def plan_fronts(costs: PieceCosts, pieces_max: int | None = None) -> list[list[PiecePlan]]:
    """For each number of pieces from 1, the plans that no other plan beats in C, B and IN together; empty if none fits
    the memory. Of equal plans, the one with the earliest cuts is kept. The plans depend neither on the length of the
    queue nor on the number of devices."""
    count = costs.layers
    rows = {
        end: _Row(np.array([costs.cold(0, end)]), np.array([costs.exec(0, end)]), np.zeros(1), [()])
        for end in range(1, count + 1)
        if costs.fits(0, end)
    }
    fronts = [_plans(costs, rows.get(count))]
    for pieces in range(2, min(pieces_max or count, count) + 1):
        extended = {end: _extended(costs, rows, end) for end in range(pieces, count + 1)}
        rows = {end: row for end, row in extended.items() if row is not None}
        fronts.append(_plans(costs, rows.get(count)))
    return fronts


def coarse_fronts(costs: PieceCosts, pieces_max: int) -> list[list[PiecePlan]]:
    """The same as `plan_fronts` for models of up to `LAYERS_MAX` layers. A model with more is cut only between as many
    groups of layers, so that a process that decides need not wait for seconds. The groups take about equally long to
    start and run together; they end where the least is transferred."""
    if costs.layers <= LAYERS_MAX:
        return plan_fronts(costs, pieces_max)
    cold_s, exec_s = costs.cold(0, costs.layers) or 1.0, costs.exec_whole_s or 1.0
    chosen: dict[int, int] = {}
    for cut in range(1, costs.layers):
        place = (costs.cold(0, cut) / cold_s + costs.exec(0, cut) / exec_s) / 2
        group = min(LAYERS_MAX - 2, int(place * (LAYERS_MAX - 1)))
        if group not in chosen or costs.transfer_s[cut - 1] < costs.transfer_s[chosen[group] - 1]:
            chosen[group] = cut
    ends = list(chosen.values())
    groups = list(pairwise((0, *ends, costs.layers)))
    coarse = PieceCosts(
        tuple(costs.cold(*group) for group in groups),
        tuple(costs.exec(*group) for group in groups),
        tuple(costs.transfer_s[end - 1] for end in ends),
        tuple(costs.memory(*group) for group in groups),
        costs.memory_bytes_max,
    )
    return [
        [plan._replace(cuts=tuple(ends[cut - 1] for cut in plan.cuts)) for plan in front]
        for front in plan_fronts(coarse, pieces_max)
    ]


def _plans(costs: PieceCosts, row: _Row | None) -> list[PiecePlan]:
    if row is None:
        return []
    columns = zip(row.cuts, row.cold_s.tolist(), row.slowest_s.tolist(), row.transfers_s.tolist(), strict=True)
    return [PiecePlan(*figures, costs.exec_whole_s) for figures in columns]


def _extended(costs: PieceCosts, rows: dict[int, _Row], end: int) -> _Row | None:
    """The ways to cut the first `end` layers into one piece more than `rows` have."""
    starts = [start for start in rows if start < end and costs.fits(start, end)]
    if not starts:
        return None
    cold_s = np.concatenate([np.maximum(rows[start].cold_s, costs.cold(start, end)) for start in starts])
    slowest_s = np.concatenate(
        [
            np.maximum(rows[start].slowest_s, max(costs.exec(start, end), costs.transfer_s[start - 1]))
            for start in starts
        ]
    )
    transfers_s = np.concatenate([rows[start].transfers_s + costs.transfer_s[start - 1] for start in starts])
    origins = [(start, place) for start in starts for place in range(len(rows[start].cuts))]
    order = np.lexsort((transfers_s, slowest_s, cold_s)).tolist()
    figures = list(zip(cold_s.tolist(), slowest_s.tolist(), transfers_s.tolist(), strict=True))
    kept: list[int] = []
    cuts: list[tuple[int, ...]] = []
    # Of what was kept, the pairs (B, IN) that no other beats: B ascending, IN descending.
    slowest: list[float] = []
    transfers: list[float] = []
    for place in order:
        start, label = origins[place]
        _, slow_s, moved_s = figures[place]
        beside = bisect_right(slowest, slow_s)
        if beside and transfers[beside - 1] <= moved_s:
            if kept and figures[kept[-1]] == figures[place]:
                cuts[-1] = min(cuts[-1], (*rows[start].cuts[label], start))
            continue
        first = last = bisect_left(slowest, slow_s)
        while last < len(slowest) and transfers[last] >= moved_s:
            last += 1
        slowest[first:last], transfers[first:last] = [slow_s], [moved_s]
        kept.append(place)
        cuts.append((*rows[start].cuts[label], start))
    return _Row(cold_s[kept], slowest_s[kept], transfers_s[kept], cuts)


def best_plan(
    fronts: Sequence[Sequence[PiecePlan]],
    requests: int,
    devices: int,
    *,
    pieces_max: int | None = None,
    shared_download_s: float = 0.0,
    starts: PieceDownloads | None = None,
) -> PiecePlan | None:
    """The plan with the least mean time of `requests` that wait while `devices` are added; fewer pieces, then earlier
    cuts, if two are equal. None if no plan with so few pieces fits the memory. `starts`: see `PiecePlan.mean_s`."""
    chosen, least_s = None, inf
    for front in fronts[: min(devices, pieces_max or devices)]:
        for plan in sorted(front):
            mean_s = plan.mean_s(requests, devices, shared_download_s=shared_download_s, starts=starts)
            if mean_s < least_s:
                chosen, least_s = plan, mean_s
    return chosen


def even_plan(costs: PieceCosts, pieces: int) -> PiecePlan | None:
    """The plan of this many pieces in which the largest cold start + execution of a piece is least; then the one with
    the least transfer, then the earliest cuts. None if no plan fits the memory."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for _ in range(pieces):
        extended: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(1, costs.layers + 1):
            found = [
                (
                    max(most_s, costs.cold(start, end) + costs.exec(start, end)),
                    moved_s + (costs.transfer_s[start - 1] if start else 0.0),
                    (*cuts, start) if start else cuts,
                )
                for start, (most_s, moved_s, cuts) in best.items()
                if start < end and costs.fits(start, end)
            ]
            if found:
                extended[end] = min(found)
        best = extended
    return costs.plan(best[costs.layers][2]) if costs.layers in best else None
