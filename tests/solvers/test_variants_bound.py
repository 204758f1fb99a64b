"""The bound: whatever the prices, no feasible choice is better, and what still counts of a way is all that counts."""

import itertools
from random import Random

import numpy as np
import pytest

from sloop.solvers.graph import Way
from sloop.solvers.variants import Candidate, Choices, Goal, is_feasible, objective, options_of
from sloop.solvers.variants_bound import Prices, Program
from tests.solvers.variants_scene import drawn


@pytest.mark.parametrize("seed", range(40))
def test_no_feasible_choice_is_better_than_the_bound(seed: int) -> None:
    stages, goal = drawn(seed, coarse=seed % 2 == 0, ways=seed % 3 == 0)
    options = [options_of(stage, goal.replicas_max) for stage in stages]
    if not all(options):
        return
    program, rng = Program.of(options, goal), Random(seed)
    feasible = [chosen for chosen in itertools.product(*options) if is_feasible(chosen, goal)]
    best = max((objective(chosen, goal) for chosen in feasible), default=-np.inf)
    for scale in (0.0, 0.001, 0.1):
        per_ms = np.array([scale * rng.random() for _ in program.limits_ms])
        per_core = scale * rng.random() if goal.cores_max < np.inf else 0.0
        assert Prices.of(program, per_ms, per_core).bound >= best - 1e-9


def test_without_prices_the_best_is_chosen_as_if_nothing_were_limited() -> None:
    stage = Choices(1.0, (1,), (Candidate(0.9, 1.0, (90.0,)), Candidate(0.5, 1.0, (10.0,))))
    goal = Goal(slo_ms=100.0, alpha=10.0, beta=1.0, delta=0.0)
    program = Program.of([options_of(stage)] * 2, goal)
    free, dear = (Prices.of(program, np.array([per_ms]), 0.0) for per_ms in (0.0, 1.0))
    assert [option.candidate for option in free.chosen(program)] == [0, 0]
    assert free.bound == pytest.approx(8.1 - 2)
    assert [option.candidate for option in dear.chosen(program)] == [1, 1]
    assert dear.bound == pytest.approx(2.5 - 2 - 20 + 100, rel=1e-3)


def test_ways_that_have_begun_alike_or_go_on_alike_count_once() -> None:
    stage = Choices(1.0, (1,), (Candidate(0.9, 1.0, (90.0,)), Candidate(0.5, 1.0, (10.0,))))
    ways = tuple(Way((0, middle, 4), 150.0) for middle in (1, 2, 3))
    program = Program.of([options_of(stage)] * 5, Goal(0.0, 1.0, 1.0, ways=ways))
    assert [len(begun) for begun in program.begun] == [0, 1, 2, 2, 1, 0]
    (all_of_them,) = program.begun[4]
    assert all_of_them.taken_ms(np.array([[20.0, 100.0, 20.0]])) == pytest.approx([-50.0])
    assert all_of_them.taken_ms(np.array([[20.0, 20.0, 20.0]])) == pytest.approx([-90.0])
