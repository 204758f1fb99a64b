"""Answers of Biscale's programs: a table of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

import numpy as np

from sloop.solvers import sizes
from sloop_systems.biscale import solver as biscale
from tests.sloop_systems.tables import Answers, grid_ms


def biscale_answers() -> Answers:
    """All programs, by both rules of throughput."""
    found: Answers = []
    for seed in range(24):
        random = Random(seed)
        stages = [sizes.SizedStage(np.maximum(1.0, grid_ms(random, 8, 8))) for _ in range(random.randint(1, 4))]
        slo_ms = int(random.uniform(1.2, 4) * sum(float(own.latency_ms[0, 0]) for own in stages))
        for throughput in ("pure", "with_queue"):
            problem = sizes.chain_problem(stages, slo_ms, throughput=throughput, cores_total=60)
            for rate_rps in (0.0, 3.0, 17.5, 60.0):
                horizontal = biscale.horizontal(problem, rate_rps)
                found.append(horizontal)
                if horizontal is not None:
                    counts = [own.replicas for own in horizontal]
                    found += [problem.vertical(2 * rate_rps, counts), problem.split(3 * rate_rps, counts)]
                    found += [
                        biscale.enlarged(problem, horizontal),
                        biscale.carries(problem, rate_rps, [(2, 2)] * len(stages)),
                    ]
                    present = [sizes.StageReplicas((1, 2), (4,)) for _ in stages]
                    found += [biscale.replicas_carry(problem, rate_rps, present)]
                    found.append(biscale.small_first(problem, rate_rps, present, horizontal))
            if biscale.horizontal(problem, 0) is not None:
                found.append(biscale.horizontal_within_cores(problem, 900.0))
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"biscale": biscale_answers}
