"""Answers of AsyFunc's solvers: tables of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import numpy as np

from sloop.profile.pairs import BlockCosts
from sloop.solvers import (
    bodies,
)
from sloop_systems.asyfunc import solver as asyfunc
from tests.sloop_systems.tables import Answers, grid_ms, latencies_ms


def block_costs(seed: int) -> BlockCosts:
    """A model of twelve blocks, with a body of four cores and a shadow of eight."""
    random = Random(seed)
    alone = [latencies_ms(random, 8) for _ in range(12)]
    body = np.array([(0.0, *(each / 4 for each in own)) for own in alone])
    shadow = np.array([(0.0, *(each / 7 for each in own)) for own in alone])
    sizes = tuple(random.uniform(1e5, 4e7) for _ in alone)
    compute = tuple(random.uniform(1, 100) for _ in alone)
    crossing = tuple(random.uniform(1e3, 3e5) for _ in range(13))
    return BlockCosts(body, shadow, sizes, compute, crossing, 8.0, float(body.sum(axis=0)[-1]))


def asyfunc_answers() -> Answers:
    """Shadows by each objective, bodies, and batches chosen beforehand."""
    found: Answers = []
    for seed in range(20):
        costs = block_costs(seed)
        random = Random(seed)
        order = sorted(range(12), key=lambda at: costs.size_bytes[at] / costs.compute[at])
        candidates = bodies.shadow_candidates(costs, order)
        found.append(
            [(each.shared.blocks, each.batch, each.split, each.load_ms, each.booked_rps) for each in candidates]
        )
        for objective in ("literal", "printed", "demand"):
            chosen = bodies.choose_shadow(candidates, 50.0, objective, need_rps=random.uniform(0, 9))
            found.append(chosen and (chosen.shared.blocks, chosen.batch))
        table = np.zeros((17, 9))
        table[1:, 1:] = grid_ms(random, 16, 8)
        for rate_rps in (2.0, 30.0):
            slo_ms = 2.5 * float(table[8, 4])
            found.append(bodies.choose_body(table, rate_rps, slo_ms, random.uniform(1, 200)))
            found.append(asyfunc.choose_batching(table, rate_rps, slo_ms, step_ms=50.0))
        found.append(bodies.rank_correlation(costs.size_bytes, costs.compute))
        found.append(bodies.size_share(costs.compute, costs.size_bytes, order, 0.8))
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"asyfunc": asyfunc_answers}
