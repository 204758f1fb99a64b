"""The range within which nine of ten real runs of the same requests should end, beside what was simulated.

Three things make a real run differ, and they are kept apart because they average out differently:

- *Between runs* the machine is faster or slower than in the minutes in which it was measured. All variants are fast or
  slow together, and no length of a run averages this out. The world is simulated at both ends (`speed_factors`). Who
  knows the machine's speed has measured it, and of this only the error of one measurement is left (`at_speed`).
- *Within a run* the durations of batches vary. The world is simulated again with other draws of them, and the same
  requests: the longer the run, the less its attainment depends on the draws.
- The simulator itself is not exact: `MODEL_ERROR`.

They are independent of each other, so their squares add.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Final

from sloop.app.scenario import Scenario
from sloop.profile.passes import known_speed_range, speed_range
from sloop.runlog.durations import VariantKey
from sloop.sim.world import World

REDRAWS: Final = 4
"""How often a world is simulated again with other draws of durations."""
STUDENT_T_OF_DRAWS: Final = 2.13
"""95 % quantile of Student's t for the first run and its redraws: nine of ten further draws lie within ± this many
standard deviations, times the square root of 1 + 1/n."""
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


def at_speed(scenario: Scenario, speed: float) -> Scenario:
    """The scenario on a machine that is known to be `speed` times as fast as the profiles say. Its range is then that
    of a speed that was measured once, instead of that of any run."""
    truth = scenario.truth
    service = replace(truth.service, spread=known_speed_range().slow - 1)
    return replace(scenario, truth=replace(truth, service=service, profile_error=truth.profile_error / speed))


def worlds_around(world: World) -> list[World]:
    """The world on a fast and on a slow machine, and with other draws of durations; none if it has no range."""
    factors = speed_factors(world)
    if factors is None:
        return []
    errors = world.all_errors
    at_ends = [{key: error * own.get(key, 1.0) for key, error in errors.items()} for own in factors]
    redrawn = [replace(world, draw=draw) for draw in range(1, REDRAWS + 1)]
    return [*(replace(world, errors=own) for own in at_ends), *redrawn]


def attainment_range(attainments: Sequence[float]) -> tuple[float, float]:
    """The range of the attainment of further runs, of those of a run and of the worlds around it, in their order."""
    own, fast, slow, *redrawn = attainments
    draws = [own, *redrawn]
    within = STUDENT_T_OF_DRAWS * stdev(draws) * sqrt(1 + 1 / len(draws))
    low = fmean(draws) - hypot(own - min(own, fast, slow), within, MODEL_ERROR)
    high = fmean(draws) + hypot(max(own, fast, slow) - own, within, MODEL_ERROR)
    return max(0.0, min(own, low)), min(1.0, max(own, high))
