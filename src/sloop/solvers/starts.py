"""Whether some of the replicas of a model that start now should start as parts of one model.

Functions of numbers, in seconds and requests. The decision is ours; the pieces are those of `sloop.solvers.cuts`,
after sections 2.3 to 2.7 of our specification of Flashpoint (San Juan, thesis, Waterloo 2023).

x requests wait. Each server (a replica, or a pipeline of parts) gives its first answer `first_s` from now, and then one
answer every `step_s`. A request goes to the server that is free first. So the mean time until the x requests are
answered is the mean of the x earliest answers that the servers together can give. All decisions here minimise it.
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

from sloop.solvers.cuts import PieceDownloads, PiecePlan, rounds_before

EXACT_PLANS: Final = 24
"""Up to this many ways to start in parts, all of them are compared; if there are more, only the best one for each
number of used devices."""
GAIN_MIN: Final = 1e-6
"""Parts are chosen only if they are better by this fraction, because completing them moves more bytes."""


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
    """The share of the largest piece in the model (`PiecePlan.cold_s`)."""
    request_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    """From each answer of one pipeline to the next."""
    ranges: "tuple[PlanRows, ...]"
    """By the number of pieces."""

    @classmethod
    def of(cls, fronts: Sequence[Sequence[PiecePlan]]) -> "PlanColumns":
        """The columns of these plans, which are given by the number of pieces from 1 (`plan_fronts`)."""
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
    """The rows of the columns, from `first` up to before `end`, that are plans of `pieces` pieces."""

    pieces: int
    first: int
    end: int


def _step_s(plan: PiecePlan) -> float:
    """The time from each answer of a pipeline to the next, if each of its workers has one request in the pipeline."""
    return max(plan.slowest_s, plan.request_s / plan.pieces)


def mean_answer_s(servers: Sequence[ServerGroup], requests: int) -> float:
    """The mean time of the earliest answers to this many requests. Needs at least one server, and steps above 0."""
    ordered = sorted(servers, key=attrgetter("first_s"))
    # `until_s` is when servers that answer at a constant rate from their first instant on would have answered all
    # requests. Real servers give an answer at their first instant, so that by then they have given at least as many
    # answers as there are requests, and each server at most one too many.
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

    `whole_s` is the time until each start would serve as a whole replica, and `exec_s` the time of one request on it;
    all starts get their weights in the same way.
    `columns` has the plans to choose from, whose `cold_s` is the share of their largest piece in the model; `downloads`
    gives the time that pieces take to start. All pipelines of a choice have the same cuts. They consist of the last of
    the starts. Of equally good choices, the one with the fewest parts is taken.
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
    """Plans of at least two pieces, each with a number of pipelines that the devices can hold; fewer pieces first."""
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
