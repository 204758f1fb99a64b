"""The range within which nine of ten real runs of the same requests should end, beside what was simulated.

Three things make a real run differ, and they are kept apart because they average out differently:

- *Between runs* the machine is faster or slower than in the minutes in which it was measured. All variants are fast or
  slow together, and no length of a run averages this out. Who knows the machine's speed has measured it, and of this
  only the error of that measurement is left (`at_speed`).
- *Within a run* the durations of batches vary: the longer the run, the less its attainment depends on their draws.
- The simulator itself is not exact: `MODEL_ERROR`.

They are independent of each other, so their squares add. The world is simulated again with the same requests, at
speeds from the fast end to the slow one, each time with other draws of the durations. A straight line through these
attainments tells both apart: its slope is what the speed does, and what is left beside it are the draws.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, sqrt
from statistics import linear_regression
from typing import Final

from sloop.app.scenario import Scenario
from sloop.profile.passes import MachineSpeed, speed_range
from sloop.runlog.durations import VariantKey
from sloop.sim.world import World

PLACES: Final = (-1.0, -2 / 3, -1 / 3, 1 / 3, 2 / 3, 1.0)
"""Where the further worlds are between the fast end and the slow one; their sum is 0."""
STUDENT_T_OF_DRAWS: Final = 2.02
"""95 % quantile of Student's t for the residuals of as many worlds and the one in the middle: nine of ten further draws
lie within ± this many standard deviations, times the square root of 1 + 1/n."""
MODEL_ERROR: Final = 0.01
"""By how much attainment differs where the durations of a live run are simulated (`python -m benchmarks.agreement`
measures it): what requests meet beside batches, such as a clock that is late, or a client that is."""

Factors = dict[VariantKey, float]
"""By variant, by how much its durations are multiplied."""


def speed_factors(world: World) -> tuple[Factors, Factors] | None:
    """The factors for the durations of each variant on each kind of hardware, at the fast and at the slow end; None if
    they are unknown."""
    if world.recorded.durations_ns:
        return None
    spread = world.truth.service.spread
    fast: Factors = {}
    slow: Factors = {}
    for key, profile in world.profiles.items():
        if spread is not None:
            fast[key], slow[key] = 1 / (1 + spread), 1 + spread
        elif (found := speed_range(profile)) is not None:
            fast[key], slow[key] = found.fast, found.slow
    return (fast, slow) if any(factor != 1.0 for factor in slow.values()) else None


def at_speed(scenario: Scenario, speed: MachineSpeed) -> Scenario:
    """The scenario on a machine whose speed was measured."""
    truth = scenario.truth
    service = replace(truth.service, spread=speed.range.slow - 1)
    return replace(scenario, truth=replace(truth, service=service, profile_error=truth.profile_error / speed.factor))


def worlds_around(world: World) -> list[World]:
    """The world at the speeds of `PLACES`, with other draws of durations; none if it has no range."""
    factors = speed_factors(world)
    if factors is None:
        return []
    fast, slow = factors
    worlds = []
    for draw, place in enumerate(PLACES, 1):
        end = slow if place > 0 else fast
        errors = {key: error * end.get(key, 1.0) ** abs(place) for key, error in world.all_errors.items()}
        worlds.append(replace(world, errors=errors, draw=draw))
    return worlds


def attainment_range(attainments: Sequence[float]) -> tuple[float, float]:
    """The range of the attainment of further runs, of those of a run and of the worlds around it, in their order."""
    own, places = attainments[0], (0.0, *PLACES)
    slope, middle = linear_regression(places, attainments)
    beside = [each - middle - slope * place for place, each in zip(places, attainments, strict=True)]
    deviation = sqrt(sum(each * each for each in beside) / (len(beside) - 2))
    within = STUDENT_T_OF_DRAWS * deviation * sqrt(1 + 1 / len(beside))
    width = hypot(slope, within, MODEL_ERROR)
    return max(0.0, min(own, middle - width)), min(1.0, max(own, middle + width))
