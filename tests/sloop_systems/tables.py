"""Answers of every solver to problems drawn from seeds; those of a publication are in its folder, in `tables.py`.

Each function of `tables()` returns the answers to one table of problems, in order. They are no tests of what is right:
those stand beside each solver.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from sloop.solvers import (
    budget,
    cuts,
    frontier,
    highs,
    mixed,
    queueing,
    starts,
)
from sloop.solvers.budget import IndexedPath, Segment, StageOptions

Answers = list[Any]


def latencies_ms(random: Random, batch_max: int) -> tuple[float, ...]:
    """By batch from 1: a fixed part and a part in proportion, with a slight curve."""
    alone, fixed, curve = random.uniform(10, 200), random.uniform(0.1, 0.7), random.uniform(0, 0.01)
    return tuple(alone * (fixed + (1 - fixed) * batch + curve * batch * batch) for batch in range(1, batch_max + 1))


def grid_ms(random: Random, cores_max: int, batch_max: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Latencies by cores and batch, from 1 each."""
    parallel = random.uniform(0.6, 0.98)
    alone = latencies_ms(random, batch_max)
    return np.array([[each * (1 - parallel + parallel / cores) for each in alone] for cores in range(1, cores_max + 1)])


def paths_of(random: Random, stages: int, alone_ms: Sequence[float]) -> list[IndexedPath]:
    """A tree of stages, or one with stages that meet: a path to each leaf, with one to five times the time it needs."""
    before = [random.randrange(stage) for stage in range(1, stages)]
    chains = []
    for leaf in sorted(set(range(stages)) - set(before)):
        chain = [leaf]
        while chain[-1]:
            chain.append(before[chain[-1] - 1])
        chains.append(tuple(reversed(chain)))
    if random.random() < 0.5 and len(chains) > 1:
        chains = [(*chain, stages - 1) if chain[-1] != stages - 1 else chain for chain in chains]
    return [IndexedPath(chain, random.uniform(1, 5) * sum(alone_ms[at] for at in chain)) for chain in chains]


def budget_answers() -> Answers:
    """Options within budgets, on trees and on graphs."""
    found: Answers = []
    for seed in range(40):
        random = Random(seed)
        count = random.randint(1, 6)
        options = [
            StageOptions(
                np.array([random.randint(0, 9) for _ in range(4)]), np.array([random.randint(0, 12) for _ in range(4)])
            )
            for _ in range(count)
        ]
        paths = paths_of(random, count, [6.0] * count)
        segments = [Segment(path.stages, int(path.slo_ms)) for path in paths]
        found += [budget.forests(paths, [1.0] * count, ties) for ties in ("first", "loosest", "best")]
        found.append(budget.cheapest_by_forests(options, paths, [1.0] * count))
        if all(each.stages == path.stages for each, path in zip(segments, paths, strict=True)) and is_tree(segments):
            tree = budget.cheapest_tree(options, segments)
            found.append(tree)
            if tree is not None:
                found.append(budget.improved_choice(options, budget.segment_matrix(segments, count), tree))
        if seed < 15:
            found.append(budget.cheapest_by_milp(options, segments))
    return found


def is_tree(segments: Sequence[Segment]) -> bool:
    """Whether each stage has at most one before it."""
    before: dict[int, set[int]] = {}
    for segment in segments:
        for one, other in pairwise(segment.stages):
            before.setdefault(other, set()).add(one)
    return all(len(own) == 1 for own in before.values())


def mixed_answers() -> Answers:
    """The cheapest mixes, the largest share, and parts of deadlines."""
    found: Answers = []
    for seed in range(60):
        random = Random(seed)
        pools = [mixed.MixNodes(random.randint(0, 3), random.randint(0, 4), random.uniform(0.2, 3)) for _ in range(2)]
        stages = [
            mixed.MixStage(
                random.uniform(0, 120),
                tuple(
                    mixed.MixOption(
                        random.uniform(5, 60), random.uniform(0.1, 2), random.randint(1, 8), random.randint(0, 2), pool,
                        random.choice((0.25, 0.5, 1.0)),
                    )
                    for pool in (0, 1)
                ),
            )
            for _ in range(random.randint(1, 3))
        ]  # fmt: skip
        found += [mixed.cheapest(stages, pools, start=0.1), mixed.largest_share(stages, pools)]
        timed = [
            mixed.TimedCosts(np.array([random.uniform(5, 90) for _ in range(5)]), np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
            for _ in range(4)
        ]
        found.append(mixed.deadline_parts(timed, paths_of(random, 4, [60.0] * 4)))
    return found


def piece_costs(seed: int) -> cuts.PieceCosts:
    """A model of fourteen layers."""
    random = Random(seed)
    cold, execution = ([random.lognormvariate(0, 0.7) for _ in range(14)] for _ in range(2))
    whole = sum(cold)
    shares, moves = tuple(each / whole for each in cold), tuple(0.1 * random.random() for _ in range(13))
    return cuts.PieceCosts(shares, tuple(execution), moves)


DOWNLOADS: Final = cuts.PieceDownloads(0.4, 6.0, 4.0, 4.0, 2, 4, is_chain=True, is_shared=True)


def starts_answers() -> Answers:
    """Whether to start in parts."""
    found: Answers = []
    for seed in range(8):
        random, costs = Random(seed), piece_costs(seed)
        columns = starts.PlanColumns.of(cuts.plan_fronts(costs, 5))
        for requests in (1, 20, 300):
            whole_s = sorted(random.uniform(0.5, 12) for _ in range(6))
            found.append(starts.choose_parts(whole_s, columns, DOWNLOADS, costs.exec_whole_s, requests, 5))
            servers = [starts.ServerGroup(random.randint(1, 3), first_s, random.uniform(0.1, 2)) for first_s in whole_s]
            found.append(starts.mean_answer_s(servers, requests))
    return found


def small_answers() -> Answers:
    """Frontiers of prices, queues, and small integer programs."""
    found: Answers = []
    for seed in range(40):
        random = Random(seed)
        choices = [(random.randint(0, 9) / 4, random.randint(0, 9) / 4) for _ in range(12)]
        found += [frontier.frontier(choices), frontier.cheapest(choices, 1.5)]
        rate_rps, batch = random.uniform(0, 90), random.randint(1, 16)
        found += [queueing.fill_ms(batch, rate_rps), queueing.replicas_needed(rate_rps, batch, random.uniform(5, 400))]
        costs = [float(random.randint(-9, 9)) for _ in range(8)]
        rows: list[highs.Row] = [
            ({at: float(random.randint(-4, 9)) for at in range(8)}, -3.0, float(random.randint(4, 20)))
            for _ in range(3)
        ]
        solved = highs.minimise(costs, rows, integers=8, nodes_max=1000)
        found.append((solved.values, solved.proven))
    return found


OWN: Final[Mapping[str, Callable[[], Answers]]] = {
    "budget": budget_answers,
    "mixed": mixed_answers,
    "small": small_answers,
    "starts": starts_answers,
}


@cache
def tables() -> Mapping[str, Callable[[], Answers]]:
    """All tables: those of the platform's solvers, and those of each publication's folder that is there."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/tables.py"))
    modules = [import_module(f"tests.sloop_systems.{folder}.tables") for folder in folders]
    return {**OWN, **{name: answers for module in modules for name, answers in module.TABLES.items()}}
