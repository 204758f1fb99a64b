"""Where no choice of variants keeps up, in time, with the cores there are: why not, and what comes nearest.

Degrading gives throughput up last: first the deadline goes, for the least latency there is; where cores or replicas do
not suffice, what is best for as much of the rate as they carry. Source: IPA specification, section 2.7.6; the
publication keeps what it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from sloop.solvers import labels
from sloop.solvers.queueing import replicas_needed
from sloop.solvers.targets import amount
from sloop.solvers.variants import CORES_SLACK, Choices, Goal, Option, options_of

STEPS: Final = 20
"""Halvings in search of the part of the rate that can be served."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What comes nearest, and which part of the rate it keeps up with."""

    options: tuple[Option, ...]
    share: float


def best_effort(stages: Sequence[Choices], goal: Goal) -> Effort:
    """As much of the rate as there are cores and replicas for; of that the best choice, or the least latency."""
    options = _within(stages, goal)
    if options is not None:
        return Effort(options, 1.0)
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(_part(stages, middle), goal) else (low, middle)
    carried = _part(stages, low)
    best = labels.solve(carried, goal).answer
    return Effort(best.options if best else _within(carried, goal) or _fewest(stages), low)


def _part(stages: Sequence[Choices], share: float) -> list[Choices]:
    return [replace(stage, rate_rps=share * stage.rate_rps) for stage in stages]


def _within(stages: Sequence[Choices], goal: Goal) -> tuple[Option, ...] | None:
    """The quickest options, or those of the fewest cores, that keep up; None where there are none."""
    every = [options_of(stage, goal.replicas_max) for stage in stages]
    if not all(every):
        return None
    quickest = tuple(min(own, key=lambda o: (o.latency_ms, o.cores, -o.score)) for own in every)
    thriftiest = tuple(min(own, key=lambda o: (o.cores, o.latency_ms, -o.score)) for own in every)
    fitting = (chosen for chosen in (quickest, thriftiest) if _cores(chosen) <= goal.cores_max + CORES_SLACK)
    return next(fitting, None)


def _fewest(stages: Sequence[Choices]) -> tuple[Option, ...]:
    """One replica of the smallest candidate each, or as many as are given."""
    found = []
    for stage in stages:
        index = min(range(len(stage.candidates)), key=lambda i: (stage.candidates[i].cores, i))
        own, count = stage.candidates[index], stage.replicas or 1
        found.append(Option(index, stage.batches[0], count, own.score, count * own.cores, own.latency_ms[0]))
    return tuple(found)


def reason(stages: Sequence[Choices], names: Sequence[str], goal: Goal) -> str:
    """Why nothing is feasible: which stage cannot keep up, which way is too long, or which cores are missing."""
    for stage, name in zip(stages, names, strict=True):
        if not options_of(stage, goal.replicas_max):
            return _overrun(stage, name, goal)
    least_ms = [min(option.latency_ms for option in options_of(stage, goal.replicas_max)) for stage in stages]
    for way in goal.ways:
        needed_ms = sum(least_ms[stage] for stage in way.stages)
        if needed_ms > way.slo_ms:
            slowest = max(way.stages, key=least_ms.__getitem__)
            stages_of_way = " → ".join(names[stage] for stage in way.stages)
            excess = f"{needed_ms:.4g} ms, {needed_ms - way.slo_ms:.3g} ms more than there are"
            return f"{stages_of_way} takes at least {excess}; {names[slowest]} alone {least_ms[slowest]:.4g} ms"
    cheapest = labels.solve(stages, replace(goal, alpha=0.0, beta=1.0, delta=0.0, cores_max=float("inf"))).answer
    if cheapest is None:
        return "no choice keeps all ways in time at once"
    cores = amount(cheapest.cores - cheapest.gap, "core")
    most = max(range(len(names)), key=lambda stage: cheapest.options[stage].cores)
    share = amount(cheapest.options[most].cores, "core")
    return f"at least {cores} are needed where there are {goal.cores_max:g}; {share} of them for {names[most]}"


def _overrun(stage: Choices, name: str, goal: Goal) -> str:
    most = stage.replicas or goal.replicas_max
    needed = min(
        replicas_needed(stage.rate_rps, batch, (own.busy_ms or own.latency_ms)[place])
        for own in stage.candidates
        for place, batch in enumerate(stage.batches)
        if own.latency_ms[place] < float("inf")
    )
    rate = f"{stage.rate_rps:.4g} requests/s"
    return f"{name} cannot keep up with {rate}: it needs {needed} replicas where {most} are the most"


def _cores(options: Sequence[Option]) -> float:
    return sum(option.cores for option in options)
