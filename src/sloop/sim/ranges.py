"""The range within which a real run should be, beside what was simulated: see `sloop.sim.scenarios`."""

from collections.abc import Sequence
from typing import Final

from sloop.profile.passes import speed_range
from sloop.runlog.durations import VariantKey
from sloop.sim.world import World
from sloop.units import score_interval

Z: Final = 1.28
"""Normal quantile of an 80 % interval. Together with the range of speeds it should cover nine of ten runs
(`python -m benchmarks.ranges` measures the coverage)."""


def speed_factors(world: World) -> tuple[dict[VariantKey, float], dict[VariantKey, float]] | None:
    """The factors for the durations of each variant on each kind of hardware, at the fast and at the slow end; None if
    they are unknown."""
    if world.recorded.durations_ns:
        return None
    spread = world.truth.service.spread
    fast: dict[VariantKey, float] = {}
    slow: dict[VariantKey, float] = {}
    for key, profile in world.profiles.items():
        if spread is not None:
            fast[key], slow[key] = 1 / (1 + spread), 1 + spread
        elif (found := speed_range(profile)) is not None:
            fast[key], slow[key] = found.fast, found.slow
    return (fast, slow) if any(factor != 1.0 for factor in slow.values()) else None


def attainment_range(attainments: Sequence[float], requests: int) -> tuple[float, float]:
    """Between the smallest and the largest of these, widened for the randomness of so many requests."""
    return score_interval(min(attainments), requests, Z)[0], score_interval(max(attainments), requests, Z)[1]
