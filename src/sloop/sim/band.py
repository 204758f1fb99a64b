"""The range around a simulated run: the same run on a machine that is a little faster, and on one a little slower.

A run on real hardware differs from the last one, because the machine does. The passes of a profile, and what logs of
service added to it, say by how much (`sloop.profile.passes.speed_range`). So the same world, with the same arrivals and
the same seed, is played again with every duration multiplied by the fast and by the slow end of that range, and the
smallest and largest results become `RunRow.attainment_low`, `attainment_high` and so on. All variants are fast or slow
together, for they share the machine.

Which durations were drawn is chance, too. Attainment is widened by that: Wilson's score interval, in which every
`CLUSTER` requests count as one, because requests miss their deadlines in groups.

There is no range for a recorded run, whose durations are known, and none for profiles with a single pass, published or
declared ones, unless the scenario's `truth.service.spread` states how far their speed may be off.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Final

from msgspec import structs

from sloop.profile.passes import speed_range
from sloop.runlog.durations import VariantKey
from sloop.runlog.summary import RunRow, RunSummary
from sloop.sim.run import simulate
from sloop.sim.world import World

Z: Final = 1.28
"""Normal quantile of an interval that holds 80 % of what may be drawn. Together with the range of speeds it is meant to
hold nine of ten runs (`python -m benchmarks.bands` counts them)."""
CLUSTER: Final = 4
"""Requests that are late together. Attainment of one world under twelve seeds varied as much as if one to six requests
always shared their fate, the more of them the closer to saturation."""


def speed_factors(world: World) -> tuple[dict[VariantKey, float], dict[VariantKey, float]] | None:
    """What to multiply the durations of each variant by, at the fast and at the slow end; None if nothing says."""
    if world.recorded.durations_ns:
        return None
    spread = world.truth.service.spread
    fast: dict[VariantKey, float] = {}
    slow: dict[VariantKey, float] = {}
    for stage in world.application.stages:
        for variant in stage.variants:
            key = (stage.name, variant.name)
            if spread is not None:
                fast[key], slow[key] = 1 / (1 + spread), 1 + spread
            elif variant.profile is not None and (found := speed_range(variant.profile)) is not None:
                fast[key], slow[key] = found.fast, found.slow
    return (fast, slow) if any(factor != 1.0 for factor in slow.values()) else None


def with_range(world: World, row: RunRow) -> RunRow:
    """The row of a run of `world` with the range around it, if there is one; plays the world twice more."""
    factors = speed_factors(world)
    if factors is None:
        return row
    rows = [row, *(_played_at(world, ends) for ends in factors)]
    p99s_ms = [one.p99_ms for one in rows if one.p99_ms is not None]
    least, most = min(one.attainment for one in rows), max(one.attainment for one in rows)
    low, high = _wilson(least, row.requests)[0], _wilson(most, row.requests)[1]
    return structs.replace(
        row,
        attainment_low=low,
        attainment_high=high,
        goodput_rps_low=min(one.goodput_rps for one in rows) * (low / least if least else 1.0),
        goodput_rps_high=max(one.goodput_rps for one in rows) * (high / most if most else 1.0),
        p99_ms_low=min(p99s_ms, default=None),
        p99_ms_high=max(p99s_ms, default=None),
    )


def _played_at(world: World, factors: Mapping[VariantKey, float]) -> RunRow:
    setup = world.setup()
    known = {key: world.errors.get(key, world.truth.profile_error) for key in setup.beliefs}
    errors = {key: error * factors.get(key, 1.0) for key, error in known.items()}
    summary = RunSummary(setup.application, estimates=setup.beliefs, start_ns=0)
    simulate(replace(world, errors=errors), [summary], check_first=0)
    return summary.row(system=world.application.system.label, seed=world.seed)


def _wilson(share: float, requests: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `requests`, of which `CLUSTER` count as one."""
    count = max(1.0, requests / CLUSTER)
    middle = share + Z * Z / (2 * count)
    width = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, min(share, (middle - width) / scale)), min(1.0, max(share, (middle + width) / scale))
