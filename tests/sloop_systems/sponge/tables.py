"""Answers of Sponge's solver: a table of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import numpy as np

from sloop_systems.sponge import solver as sponge
from tests.sloop_systems.tables import Answers, grid_ms


def sponge_answers() -> Answers:
    """The setting by each criterion."""
    found: Answers = []
    for seed in range(60):
        random = Random(seed)
        grid = sponge.SpongeGrid(tuple(map(float, range(1, 17))), grid_ms(random, 16, 16))
        count, rate_rps, way_ms = random.randint(0, 60), random.uniform(1, 80), random.uniform(0, 400)
        budgets_ms = np.sort(np.array([random.uniform(100, 1200) for _ in range(count)]))
        for holds in (
            sponge.holds_burst(grid, count, way_ms, 1000.0),
            sponge.holds_per_batch(grid, budgets_ms),
            sponge.holds_steady(grid, rate_rps, way_ms, 1000.0) & sponge.keeps_up(grid, rate_rps),
        ):
            found.append(sponge.cheapest(grid, holds))
        found += [sponge.best_effort(grid, budgets_ms, rate_rps), sponge.startable(grid, 500.0)]
        found.append(sponge.max_rate_rps(grid))
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"sponge": sponge_answers}
