"""Faro's estimates and its joint choice, as functions of numbers.

The forecast of a window of rates, the tail latency of an M/D/c queue, its utility without plateaus, and the division of
workers among applications by the utilities of all. Source: Jeon et al., Faro, EuroSys 2025, and its repository, whose
constants are in `published`. There a local search on real numbers (COBYLA) is rounded up and then made feasible; here
the sum is exact, and the objectives with fairness climb from it and from the workers that are there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np

from sloop_systems.faro.published import (
    BUSY_MAX,
    CONTEXT_STEPS,
    DECAY,
    GROUPS,
    HORIZON_STEPS,
    PENALTIES,
    PERCENTILE,
    SHRINK,
    START_STEPS,
)

Floats = np.ndarray[Any, np.dtype[np.float64]]
Objective = Literal["sum", "fair", "fair_sum"]

REFUSALS: Final = np.arange(101) / 100
"""The parts of the requests that may be refused: whole percents."""
MS_LEAST: Final = 1e-3
"""Durations are at least this, so that nothing is divided by 0."""


def forecast_rps(counts: Sequence[int], step_s: float, quantile: float, otherwise_rps: float) -> Floats:
    """The rates of the next `HORIZON_STEPS` steps, at this quantile of a normal distribution, in requests per second.

    `counts` are requests by step, the newest last. Their mean is where the forecast returns to, from the newest count,
    and its spread is that of the steps before (a process of first order). With less than three steps the rate is
    `otherwise_rps` in all.
    """
    if len(counts) < 3:
        return np.full(HORIZON_STEPS, otherwise_rps)
    own = np.array(counts[-CONTEXT_STEPS:], dtype=np.float64)
    off = own - own.mean()
    powers = DECAY ** np.arange(1, HORIZON_STEPS + 1)
    spread = np.std(off[1:] - DECAY * off[:-1]) * np.sqrt((1 - powers**2) / (1 - DECAY**2))
    expected = own.mean() + off[-1] * powers + NormalDist().inv_cdf(quantile) * spread
    found: Floats = np.maximum(expected, 0.0) / step_s
    return found


def wait_probabilities(loads: Floats, workers_max: int) -> Floats:
    """The probability to wait in an M/M/c queue with these offered loads in erlangs (Erlang's C formula), by number of
    workers from 1: shape (workers_max, len(loads)). 1 where the load is not below the workers."""
    found, blocked = np.ones((workers_max, len(loads))), np.ones(len(loads))
    for count in range(1, workers_max + 1):
        blocked = loads * blocked / (count + loads * blocked)
        idle = 1.0 - loads / count
        np.divide(blocked, 1.0 - (1.0 - idle) * (1.0 - blocked), out=found[count - 1], where=idle > 0)
    return found


def tail_ms(rates_rps: Floats, service_ms: float, workers_max: int, percentile: float = PERCENTILE) -> Floats:
    """The latency at this percentile at these rates with 1 … `workers_max` workers: shape (workers_max, rates).

    An M/D/c queue is taken to wait half as long as an M/M/c queue. Above a utilisation of `BUSY_MAX` the latency is
    that at it, times the excess, so that it always falls with more workers and never is infinite.
    """
    workers = np.arange(1, workers_max + 1)
    loads = rates_rps * service_ms / 1000
    waits = wait_probabilities(np.concatenate([loads, BUSY_MAX * workers]), workers_max)
    capped = np.diagonal(waits[:, len(loads) :])[:, None]
    excess = np.maximum(1.0, loads / (BUSY_MAX * workers[:, None]))
    probability = np.where(excess > 1.0, capped, waits[:, : len(loads)])
    spare = workers[:, None] - loads / excess
    longer = np.maximum(0.0, np.log(np.maximum(probability, 1e-300) / (1 - percentile)))
    found: Floats = (service_ms + longer * service_ms / spare / 2) * excess
    return found


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """What one application, or a group of them, may gain from workers."""

    rates_rps: tuple[float, ...]
    """In the steps of the horizon."""
    service_ms: float
    slo_ms: float
    present: int
    """The workers that it has."""
    most: int
    """The workers that it wants at most."""
    least: int = 1
    weight: float = 1.0


def utilities(need: WorkerNeed, refused: Floats) -> Floats:
    """The mean over the steps of min(1, deadline / tail latency), with 0 … `most` workers if these parts of the
    requests are refused: shape (most + 1, len(refused)). Workers beyond those present do not serve in the first
    steps."""
    rates = np.outer(1 - refused, need.rates_rps)
    tails = tail_ms(rates.ravel(), max(MS_LEAST, need.service_ms), need.most).reshape(need.most, *rates.shape)
    own = np.concatenate([np.zeros((1, *rates.shape)), np.minimum(1.0, need.slo_ms / tails)])
    present = min(need.present, need.most)
    own[present + 1 :, :, :START_STEPS] = own[present, :, :START_STEPS]
    found: Floats = own.mean(axis=2)
    return found


def utility_by_workers(need: WorkerNeed, *, penalised: bool) -> Floats:
    """The utility with 0 … `most` workers. With `penalised`, it is that of the best part of the requests to refuse,
    less the penalty for it."""
    found: Floats = effective_utilities(need, penalised=penalised).max(axis=1)
    return found


def utility_of(need: WorkerNeed, count: int, *, penalised: bool) -> tuple[float, float]:
    """The utility with so many workers, and the part of the requests to refuse for it."""
    own = effective_utilities(need, penalised=penalised)[count]
    best = int(np.argmax(own))
    return float(own[best]), float(REFUSALS[best])


def effective_utilities(need: WorkerNeed, *, penalised: bool) -> Floats:
    """The utility less the penalty, by number of workers and by what is refused; only of refusing nothing, if not
    `penalised`."""
    refused = REFUSALS if penalised else REFUSALS[:1]
    thresholds, penalties = zip(*PENALTIES, strict=True)
    found: Floats = utilities(need, refused) * (1 - np.interp(refused, thresholds, penalties))
    return found


def workers_wanted(utility: Floats) -> int:
    """The fewest workers with as much utility as any number of them, up to `SHRINK`; at least 1."""
    return max(1, int(np.argmax(utility >= utility.max() - SHRINK)))


def divided(needs: Sequence[WorkerNeed], total: int, objective: Objective, *, penalised: bool) -> list[int]:
    """The workers of each, at most `total` together: those of the best objective, and none without a gain.

    More than `GROUPS` are first put into as many groups, in their order, each of which counts as one: rates and workers
    are sums, durations and deadlines means. What a group gets, with its part of what is left, it divides likewise.
    """
    if total < sum(need.least for need in needs):
        return _spread(total, [need.least for need in needs])
    if len(needs) <= GROUPS:
        tables = [utility_by_workers(need, penalised=penalised) for need in needs]
        return best_counts(tables, needs, total, objective)
    groups = [list(each) for each in np.array_split(np.arange(len(needs)), GROUPS)]
    members = [[needs[index] for index in group] for group in groups]
    own = divided([merged(each) for each in members], total, objective, penalised=penalised)
    rest = _spread(total - sum(own), own)
    found: list[int] = []
    for each, count, more in zip(members, own, rest, strict=True):
        found += divided(each, count + more, objective, penalised=penalised)
    return found


def merged(needs: Sequence[WorkerNeed]) -> WorkerNeed:
    """A group as one."""
    return WorkerNeed(
        tuple(map(math.fsum, zip(*(need.rates_rps for need in needs), strict=True))),
        math.fsum(need.service_ms for need in needs) / len(needs),
        math.fsum(need.slo_ms for need in needs) / len(needs),
        sum(need.present for need in needs),
        sum(need.most for need in needs),
        sum(need.least for need in needs),
        math.fsum(need.weight for need in needs) / len(needs),
    )


def _spread(total: int, shares: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to the shares, together `total`: rounded down, the largest remainders one more."""
    parts = [total * share / max(1, sum(shares)) for share in shares]
    found = [math.floor(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda index: found[index] - parts[index])
    for index in order[: total - sum(found)]:
        found[index] += 1
    return found


def best_counts(tables: Sequence[Floats], needs: Sequence[WorkerNeed], total: int, objective: Objective) -> list[int]:
    """The numbers of workers with the best objective of these utilities, and of equally good ones fewer."""
    weights = np.array([need.weight for need in needs])

    def value(counts: Sequence[int]) -> float:
        own = np.array([table[count] for table, count in zip(tables, counts, strict=True)])
        fairness = float(own.min() - own.max())
        return {"sum": 0.0, "fair": 1.0, "fair_sum": float(len(own))}[objective] * fairness + (
            0.0 if objective == "fair" else float(weights @ own)
        )

    exact = best_sum([table * weight for table, weight in zip(tables, weights, strict=True)], needs, total)
    if objective == "sum":
        return exact
    present = [min(max(need.present, need.least), need.most) for need in needs]
    starts = [exact, present] if sum(present) <= total else [exact]
    return max((climbed(start, needs, total, value) for start in starts), key=value)


def best_sum(tables: Sequence[Floats], needs: Sequence[WorkerNeed], total: int) -> list[int]:
    """The numbers of workers with the largest sum: exact, one application after the other for every number of
    workers that are left (dynamic programming). A worker that adds less than `SHRINK` is not taken."""
    best, taken = np.zeros(total + 1), list[Any]()
    for table, need in zip(tables, needs, strict=True):
        after, own = np.full(total + 1, -math.inf), np.zeros(total + 1, dtype=int)
        for count in range(need.least, min(need.most, total) + 1):
            tried = np.full(total + 1, -math.inf)
            tried[count:] = best[: total + 1 - count] + table[count] - SHRINK * count / need.most
            own, after = np.where(tried > after, count, own), np.maximum(tried, after)
        best = after
        taken.append(own)
    left, found = int(np.argmax(best)), list[int]()
    for own in reversed(taken):
        found.insert(0, int(own[left]))
        left -= found[0]
    return found


def climbed(
    start: Sequence[int], needs: Sequence[WorkerNeed], total: int, value: Callable[[Sequence[int]], float]
) -> list[int]:
    """From `start` by the best step until none is better: a worker more or less for one, or from one to another."""
    counts, best = list(start), value(start)
    while True:
        found = max(_steps(counts, needs, total), key=value, default=counts)
        if value(found) <= best + SHRINK:
            return counts
        counts, best = found, value(found)


def _steps(counts: Sequence[int], needs: Sequence[WorkerNeed], total: int) -> list[list[int]]:
    """The neighbours of these numbers of workers that are possible."""
    more = [place for place, need in enumerate(needs) if counts[place] < need.most]
    fewer = [place for place, need in enumerate(needs) if counts[place] > need.least]
    changes: list[tuple[int | None, int | None]] = [(None, place) for place in fewer] + [
        (add, take) for add in more for take in fewer if add != take
    ]
    if sum(counts) < total:
        changes += [(place, None) for place in more]
    return [[count + (at == add) - (at == take) for at, count in enumerate(counts)] for add, take in changes]
