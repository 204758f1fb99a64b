"""When replicas of one model that start now will serve, and whether some of them should start as parts of one model.

Functions of numbers. Seconds and requests. Ours; the pieces are those of `sloop.solvers.flashpoint`, after sections 2.3
to 2.7 of our specification of Flashpoint (San Juan, thesis, Waterloo 2023).

x requests wait, and each server (a replica, or a pipeline of parts) answers its first one some time after it has
started, and then one after each step. They take whichever server is free first. So the mean time until their answers is
the mean of the x earliest answers that the servers together can give, which is what all decisions here minimise.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sloop.solvers.flashpoint import PieceDownloads, PiecePlan, rounds_before

EXACT_PLANS: Final = 24
"""Up to so many ways to start in parts, each of them is compared; beyond, for each number of devices the best that uses
as many."""
GAIN_MIN: Final = 1e-6
"""Parts must be better by this fraction: their completion moves more bytes."""


class ServerGroup(NamedTuple):
    """Equal servers that start at one time."""

    servers: int
    first_s: float
    """From now until each gives its first answer."""
    step_s: float
    """From each answer to the next."""


class PartsChoice(NamedTuple):
    """How the starts are made."""

    pipelines: int
    """0: all as whole replicas."""
    cuts: tuple[int, ...]
    mean_s: float
    """Until the requests that wait are answered, in the mean."""


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """The plans of at least two pieces, fewer pieces first, and their figures side by side."""

    plans: tuple[PiecePlan, ...]
    pieces: NDArray[np.int64]
    share: NDArray[np.float64]
    """Of the model, that of the largest piece (`PiecePlan.cold_s`)."""
    request_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    """From each answer of one pipeline to the next."""
    ranges: "tuple[PlanRows, ...]"
    """By the number of pieces."""

    @classmethod
    def of(cls, fronts: Sequence[Sequence[PiecePlan]]) -> "PlanColumns":
        """Of the plans by pieces from 1 (`plan_fronts`)."""
        plans = [plan for front in fronts[1:] for plan in sorted(front)]
        pieces = np.array([plan.pieces for plan in plans], dtype=np.int64)
        share, request_s, step_s = (
            np.array(column, dtype=np.float64)
            for column in (
                [plan.cold_s for plan in plans],
                [plan.request_s for plan in plans],
                [_step_s(plan) for plan in plans],
            )
        )
        edges = [*np.flatnonzero(np.diff(pieces, prepend=0)).tolist(), len(plans)]
        ranges = tuple(PlanRows(plans[first].pieces, first, end) for first, end in pairwise(edges))
        return cls(tuple(plans), pieces, share, request_s, step_s, ranges)


class PlanRows(NamedTuple):
    """Which rows of the columns are plans of so many pieces."""

    pieces: int
    first: int
    end: int


def _step_s(plan: PiecePlan) -> float:
    """From each answer of a pipeline to the next: each worker has one request in it."""
    return max(plan.slowest_s, plan.request_s / plan.pieces)


def mean_answer_s(servers: Sequence[ServerGroup], requests: int) -> float:
    """The mean of the so many earliest answers. There is at least one server, with steps above 0."""
    ordered = sorted(servers, key=attrgetter("first_s"))
    # Until `until_s`, servers that work without a break, but give no answer at their first instant, would give as many
    # answers as there are requests. So these give at least as many, and each at most one more.
    rate = offset = until_s = 0.0
    for place, group in enumerate(ordered):
        rate += group.servers / group.step_s
        offset += group.servers * group.first_s / group.step_s
        until_s = (requests + offset) / rate
        if place + 1 == len(ordered) or until_s <= ordered[place + 1].first_s:
            break
    turns = [floor(max(0.0, until_s - first_s) / step_s) + 1 for _, first_s, step_s in ordered[: place + 1]]
    sum_s, given = 0.0, 0
    for (count, first_s, step_s), each in zip(ordered, turns, strict=False):
        given += count * each
        sum_s += count * (each * first_s + step_s * each * (each - 1) / 2)
    while given > requests:
        last_s, place = max(
            (first_s + step_s * (each - 1), at)
            for at, ((_, first_s, step_s), each) in enumerate(zip(ordered, turns, strict=False))
            if each
        )
        fewer = min(ordered[place].servers, given - requests)
        sum_s -= fewer * last_s
        given -= fewer
        turns[place] -= 1
    return sum_s / requests


def choose_parts(
    whole_s: Sequence[float],
    columns: PlanColumns,
    downloads: PieceDownloads,
    exec_s: float,
    requests: int,
    pieces_max: int,
) -> PartsChoice:
    """How many of the starts are made as parts, and with which cuts, so that the waiting requests are answered soonest.

    `whole_s`: until each start serves as a whole replica; all get their weights in the same way.
    `columns` has the plans, whose `cold_s` is the share of their largest piece in the model; `downloads` says how long
    pieces take to start. All pipelines of one choice have the same cuts, and take the last starts. Of equally good
    choices the one with the fewest parts stays.
    """
    best = PartsChoice(0, (), mean_answer_s(_whole(whole_s, exec_s), requests))
    for plan, pipelines in _candidates(columns, len(whole_s), downloads, requests, pieces_max):
        ready_s = downloads.cold_s(plan.cold_s, plan.pieces, pipelines * plan.pieces)
        started = ServerGroup(pipelines, ready_s + plan.request_s, _step_s(plan))
        others = _whole(whole_s[: len(whole_s) - pipelines * plan.pieces], exec_s)
        mean_s = mean_answer_s([*others, started], requests)
        if mean_s < best.mean_s * (1 - GAIN_MIN):
            best = PartsChoice(pipelines, plan.cuts, mean_s)
    return best


def _whole(ready_s: Sequence[float], exec_s: float) -> list[ServerGroup]:
    return [ServerGroup(count, at_s + exec_s, exec_s) for at_s, count in Counter(ready_s).items()]


def _candidates(
    columns: PlanColumns, devices: int, downloads: PieceDownloads, requests: int, pieces_max: int
) -> Iterator[tuple[PiecePlan, int]]:
    """Plans of at least two pieces, each with a number of pipelines that fit; fewer pieces first."""
    fitting = columns.plans[: int(np.searchsorted(columns.pieces, min(devices, pieces_max), side="right"))]
    if sum(devices // plan.pieces for plan in fitting[: EXACT_PLANS + 1]) <= EXACT_PLANS:
        for plan in fitting:
            for pipelines in range(devices // plan.pieces, 0, -1):
                yield plan, pipelines
        return
    found: dict[int, tuple[float, int, int]] = {}
    for pipelines in range(1, devices // 2 + 1):
        ranges = [each for each in columns.ranges if each.pieces <= min(devices // pipelines, pieces_max)]
        end = ranges[-1].end
        cold_s = downloads.cold_each_s(columns.share[:end], columns.pieces[:end], pipelines)
        waiting = rounds_before(requests, pipelines) / requests
        means_s = cold_s + columns.request_s[:end] + columns.step_s[:end] * waiting
        for pieces, first, until in ranges:
            place = first + int(means_s[first:until].argmin())
            used, mean_s = pipelines * pieces, float(means_s[place])
            if used not in found or mean_s < found[used][0]:
                found[used] = mean_s, place, pipelines
    for _, place, pipelines in sorted(found.values(), key=itemgetter(1)):
        yield columns.plans[place], pipelines
