"""Answers of FA2's solvers: tables of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from sloop.solvers.budget import IndexedPath
from sloop_systems.fa2 import solver as fa2
from tests.sloop_systems.tables import (
    Answers,
    latencies_ms,
    paths_of,
)


def fa2_problem(seed: int) -> tuple[list[fa2.Fa2Stage], list[IndexedPath]]:
    """Two to six stages."""
    random = Random(seed)
    costs = [latencies_ms(random, 8) for _ in range(random.randint(2, 6))]
    stages = [fa2.Fa2Stage(f"s{at}", random.uniform(1, 40), own) for at, own in enumerate(costs)]
    return stages, paths_of(random, len(stages), [own[0] for own in costs])


def fa2_answers() -> Answers:
    """Every mode and every baseline."""
    found: Answers = []
    for seed in range(30):
        stages, paths = fa2_problem(seed)
        found += [fa2.solve(stages, paths, mode=mode, polish=seed % 2 == 0) for mode in ("tree", "paper")]
        found += [fa2.largest_share(stages, paths, replicas_max=6), fa2.ds2(stages), fa2.inferline(stages, paths)]
        found += [fa2.inferline_full(stages, paths), fa2.grandslam(stages, paths, [2] * len(stages))]
        if seed < 10:
            found.append(fa2.solve(stages, paths, mode="milp"))
        own_ms, rate_rps = stages[0].latency_ms, stages[0].rate_rps
        limits = {"network_ms_max": 40.0, "limit_ms": 900.0, "slo_ms": 1000.0}
        found.append(fa2.fa2_single(own_ms, rate_rps, **limits, replicas_max=16))
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"fa2": fa2_answers}
