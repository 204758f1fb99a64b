"""When replicas of one model that start now will serve, and whether some of them should start as parts of one model.

Functions of numbers. Seconds and requests. Ours; the pieces are those of `sloop.solvers.flashpoint`, after sections 2.3
to 2.7 of our specification of Flashpoint (San Juan, thesis, Waterloo 2023).

x requests wait, and each server (a replica, or a pipeline of parts) answers its first one some time after it has
started, and then one after each step. They take whichever server is free first. So the mean time until their answers is
the mean of the x earliest answers that the servers together can give, which is what all decisions here minimise.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import floor
from typing import Final, NamedTuple

from sloop.solvers.flashpoint import PieceDownloads, PiecePlan, best_plan

EXACT_PLANS: Final = 24
"""Up to so many ways to start in parts, each of them is compared; beyond, the best plan for each number of devices."""
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


def mean_answer_s(servers: Sequence[ServerGroup], requests: int) -> float:
    """The mean of the so many earliest answers. There is at least one server, with steps above 0."""
    low = min(each.first_s for each in servers)
    high = min(each.first_s + each.step_s * -(-requests // each.servers) for each in servers)
    if _answers(servers, low)[0] >= requests:
        return low
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _answers(servers, middle)[0] >= requests:
            high = middle
        else:
            low = middle
    given, sum_s = _answers(servers, low)
    return (sum_s + (requests - given) * high) / requests


def _answers(servers: Sequence[ServerGroup], until_s: float) -> tuple[int, float]:
    """How many answers are given until then, and the sum of their times."""
    given, sum_s = 0, 0.0
    for count, first_s, step_s in servers:
        if until_s >= first_s:
            each = floor((until_s - first_s) / step_s) + 1
            given += count * each
            sum_s += count * (each * first_s + step_s * each * (each - 1) / 2)
    return given, sum_s


def choose_parts(
    whole_s: Sequence[float],
    fronts: Sequence[Sequence[PiecePlan]],
    downloads: PieceDownloads,
    exec_s: float,
    requests: int,
    pieces_max: int,
) -> PartsChoice:
    """How many of the starts are made as parts, and with which cuts, so that the waiting requests are answered soonest.

    `whole_s`: until each start serves as a whole replica; all get their weights in the same way.
    `fronts` has the plans by pieces from 1, whose `cold_s` is the share of their largest piece in the model;
    `downloads` says how long pieces take to start. All pipelines of one choice have the same cuts, and take
    the last starts. Of equally good choices the one with the fewest parts stays.
    """
    best = PartsChoice(0, (), mean_answer_s(_whole(whole_s, exec_s), requests))
    for plan, pipelines in _candidates(fronts, len(whole_s), downloads, requests, pieces_max):
        ready_s = downloads.cold_s(plan.cold_s, plan.pieces, pipelines * plan.pieces)
        step_s = max(plan.slowest_s, plan.request_s / plan.pieces)
        started = ServerGroup(pipelines, ready_s + plan.request_s, step_s)
        others = _whole(whole_s[: len(whole_s) - pipelines * plan.pieces], exec_s)
        mean_s = mean_answer_s([*others, started], requests)
        if mean_s < best.mean_s * (1 - GAIN_MIN):
            best = PartsChoice(pipelines, plan.cuts, mean_s)
    return best


def _whole(ready_s: Sequence[float], exec_s: float) -> list[ServerGroup]:
    return [ServerGroup(count, at_s + exec_s, exec_s) for at_s, count in Counter(ready_s).items()]


def _candidates(
    fronts: Sequence[Sequence[PiecePlan]], devices: int, downloads: PieceDownloads, requests: int, pieces_max: int
) -> Iterator[tuple[PiecePlan, int]]:
    """Plans of at least two pieces, each with a number of pipelines that fit; fewer pieces first."""
    found = [
        (plan, pipelines)
        for front in fronts[1 : min(devices, pieces_max)]
        for plan in sorted(front)
        for pipelines in range(devices // plan.pieces, 0, -1)
    ]
    if len(found) <= EXACT_PLANS:
        yield from found
        return
    for used in range(devices, 1, -1):
        plan = best_plan(fronts, requests, used, pieces_max=pieces_max, starts=downloads)
        if plan is not None and plan.pieces > 1:
            yield plan, used // plan.pieces
