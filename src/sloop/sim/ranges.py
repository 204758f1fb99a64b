"""The range within which a real run should be, beside what was simulated: see `sloop.sim.scenarios`."""

from collections.abc import Sequence
from math import sqrt
from typing import Final

from sloop.profile.passes import speed_range
from sloop.runlog.durations import VariantKey
from sloop.sim.world import World

Z: Final = 1.28
"""Normal quantile of an 80 % interval. Together with the range of speeds it should cover nine of ten runs
(`python -m benchmarks.ranges` measures the coverage)."""
CLUSTER: Final = 4
"""Requests that miss their deadlines together. Attainment of one world under twelve seeds varied as if requests missed
in groups of one to six, with larger groups closer to saturation."""


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
    return _wilson(min(attainments), requests)[0], _wilson(max(attainments), requests)[1]


def _wilson(share: float, requests: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `requests`; every `CLUSTER` requests count as one."""
    count = max(1.0, requests / CLUSTER)
    middle = share + Z * Z / (2 * count)
    width = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, min(share, (middle - width) / scale)), min(1.0, max(share, (middle + width) / scale))
