"""Label setting: the same solution as enumeration, ties included; its bounds and limits; the best effort."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers.budget import IndexedPath
from sloop_systems.ipa import label_setting
from sloop_systems.ipa.label_setting import WORK_MAX, _Arrays, _Prices, best_effort, solve
from sloop_systems.ipa.solver import Candidate, IpaGoal, IpaStage, Measure, is_feasible, objective, options_of
from tests.sloop_systems.ipa.scene import SENTIMENT, VIDEO_GOAL, audio, drawn, enumerated, fan, large, video

BLOCK = 50


@pytest.mark.parametrize("block", range(5))
def test_it_finds_what_enumeration_finds(block: int) -> None:
    """250 pipelines; of values from a small grid in every other, so that ties occur."""
    feasible = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        stages, goal = drawn(seed, coarse=seed % 2 == 0)
        expected = enumerated(stages, goal)
        found = solve(stages, goal).solution
        assert (found and found.options) == (expected and expected.options), seed
        feasible += expected is not None
    assert feasible >= BLOCK // 4


@pytest.mark.parametrize("block", range(4))
def test_it_finds_what_enumeration_finds_in_graphs(block: int) -> None:
    for seed in range(1000 + block * BLOCK, 1000 + (block + 1) * BLOCK):
        stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=True)
        expected = enumerated(stages, goal)
        found = solve(stages, goal).solution
        assert (found and found.options) == (expected and expected.options), seed


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_finds_what_enumeration_finds_in_any(seed: int, coarse: bool, paths: bool) -> None:
    stages, goal = drawn(seed, coarse=coarse, paths=paths)
    expected = enumerated(stages, goal)
    found = solve(stages, goal).solution
    assert (found and found.options) == (expected and expected.options)


@pytest.mark.parametrize("rate_rps", [0, 3, 5, 7, 10, 20, 30, 400])
def test_it_finds_the_published_answers(rate_rps: float) -> None:
    goal = IpaGoal(slo_ms=9420, alpha=30, beta=0.5)
    for stages, weights in ((video(rate_rps), VIDEO_GOAL), (audio(SENTIMENT, rate_rps), goal)):
        assert solve(stages, weights).solution == enumerated(stages, weights)


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.booleans(), st.floats(0, 9))
def test_it_finds_what_enumeration_finds_whatever_accuracy_weighs(seed: int, paths: bool, power: float) -> None:
    """Sums of a billion differ by more than sums of one when their order does."""
    stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=paths)
    goal = replace(goal, alpha=10**power)
    expected, solved = enumerated(stages, goal), solve(stages, goal)
    assert (solved.solution and solved.solution.options) == (expected and expected.options)
    assert not solved.gave_up


@pytest.mark.parametrize("alpha", [1.0, 1e5, 1e8, 1e9])
def test_what_is_feasible_stays_so_whatever_accuracy_weighs(alpha: float) -> None:
    scores = ((0.47, 0.23), (0.23, 0.72), (0.68, 0.96))
    stages = [IpaStage(1.0, (1,), tuple(Candidate(score, 1.0, (1.0,)) for score in own)) for own in scores]
    answer = solve(stages, IpaGoal(1e5, alpha, 1.0)).solution
    assert answer is not None
    assert [option.candidate for option in answer.options] == [0, 1, 1]


@pytest.mark.parametrize("block", range(4))
def test_it_finds_what_enumeration_finds_where_stages_are_beside_each_other(block: int) -> None:
    for seed in range(block * 10, (block + 1) * 10):
        stages, goal = fan(seed, stages=5, variants=3)
        goal = replace(goal, cores_max=(30.0, 60.0, float("inf"))[seed % 3])
        expected, found = enumerated(stages, goal), solve(stages, goal).solution
        assert (found and found.options) == (expected and expected.options), seed


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("wider", [1, 4])
def test_wider_sweeps_find_what_narrow_ones_leave_out(paths: bool, wider: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sweeps so narrow that most of these pipelines need several, and prices."""
    monkeypatch.setattr(label_setting, "WIDTHS", (1, 2, 8, 1024))
    monkeypatch.setattr(label_setting, "WIDER", wider)
    for seed in range(2000, 2070):
        stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=paths)
        goal = replace(goal, alpha=goal.alpha * 10.0 ** (seed % 8))
        expected, found = enumerated(stages, goal), solve(stages, goal).solution
        assert (found and found.options) == (expected and expected.options), seed
        assert found is None or found.gap == 0.0


def test_what_is_almost_in_time_is_no_better_than_what_is() -> None:
    """Behind a path's last stage its latency no longer counts."""
    late, right, quick = (Candidate(score, 1.0, (ms,)) for score, ms in ((0.9, 100.0000005), (0.5, 100.0), (0.1, 50.0)))
    answer = solve([IpaStage(1.0, (1,), (late, right, quick))], IpaGoal(100.0, 10.0, 1.0)).solution
    assert answer is not None
    assert answer.options[0].candidate == 1


def test_accuracy_alone_counts_where_it_weighs_without_bound() -> None:
    """7.5, property 2, of the solver that runs."""
    for seed in range(60):
        stages, goal = drawn(seed, coarse=False, paths=seed % 2 == 0)
        every = itertools.product(*(options_of(stage, goal.replicas_max) for stage in stages))
        weigh = sum if goal.summed else math.prod
        most = [weigh(o.score for o in options) for options in every if is_feasible(options, goal)]
        answer = solve(stages, replace(goal, alpha=1e9)).solution
        assert (answer is None) == (not most), seed
        if answer is not None:
            assert weigh(o.score for o in answer.options) == pytest.approx(max(most), rel=1e-6), seed


@pytest.mark.parametrize("seed", range(40))
def test_what_is_fixed_is_never_better(seed: int) -> None:
    """7.5, property 3: FA2-low, FA2-high and RIM are restrictions."""
    stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=seed % 3 == 0)
    stages = [replace(stage, replicas=0) for stage in stages]
    best = solve(stages, goal).solution
    fixed = [[replace(stage, candidates=(stage.candidates[end],)) for stage in stages] for end in (0, -1)]
    for restricted in (*fixed, [replace(stage, replicas=3) for stage in stages]):
        answer = solve(restricted, goal).solution
        if answer is not None:
            assert best is not None
            assert best.objective >= answer.objective - 1e-9


@pytest.mark.parametrize("measure", ["pas", "pas_rank", "norm_prod"])
@pytest.mark.parametrize("alpha", [2.0, 30.0, 1e5])
def test_ten_stages_of_ten_variants_are_little_work(measure: Measure, alpha: float) -> None:
    solved = solve(*large(3, alpha, measure))
    assert solved.solution is not None
    assert solved.solution.gap == 0.0
    assert solved.work < WORK_MAX // 10


@pytest.mark.parametrize("seed", range(4))
def test_ten_stages_beside_each_other_are_little_work(seed: int) -> None:
    solved = solve(*fan(seed))
    assert solved.solution is not None
    assert solved.solution.gap == 0.0
    assert solved.work < WORK_MAX // 10


def test_the_published_pipelines_are_hardly_any() -> None:
    goal = IpaGoal(slo_ms=9420, alpha=30, beta=0.5)
    for rate_rps in (1, 5, 20, 40):
        assert solve(video(rate_rps), VIDEO_GOAL).work < WORK_MAX // 1000
        assert solve(audio(SENTIMENT, rate_rps), goal).work < WORK_MAX // 1000


@pytest.mark.parametrize("part", [10_000, 300, 30, 3])
def test_beyond_its_work_it_says_what_may_have_been_missed(part: int) -> None:
    stages, goal = large(3, 1e5)
    exact = solve(stages, goal)
    hasty = solve(stages, goal, work_max=exact.work // part)
    assert exact.solution is not None
    assert exact.solution.gap == 0.0
    assert hasty.solution is not None
    assert hasty.solution.gap > 0
    assert is_feasible(hasty.solution.options, goal)
    assert exact.solution.objective <= hasty.solution.objective + hasty.solution.gap + 1e-6
    assert hasty.solution.objective <= exact.solution.objective + 1e-9


def test_beyond_its_work_it_does_not_say_that_there_is_nothing() -> None:
    """Neither the quickest nor the cheapest will do, and no more is tried."""
    mixed = IpaStage(1.0, (1,), (Candidate(0.9, 1.0, (100.0,)), Candidate(0.9, 3.0, (10.0,))))
    goal = IpaGoal(slo_ms=120.0, alpha=1, beta=1, cores_max=4.0)
    found, without = solve([mixed] * 2, goal), solve([mixed] * 2, goal, work_max=1)
    assert found.solution is not None
    assert (without.solution, without.gave_up) == (None, True)
    nothing = solve([mixed] * 2, replace(goal, cores_max=3.0))
    assert (nothing.solution, nothing.gave_up) == (None, False)


def test_the_same_question_is_the_same_work() -> None:
    stages, goal = fan(7, stages=6)
    assert solve(stages, goal) == solve(stages, goal)


def test_where_nothing_is_feasible_there_is_no_answer() -> None:
    slow = IpaStage(1.0, (1,), (Candidate(0.5, 1.0, (50.0,)),))
    assert solve([slow, slow], IpaGoal(slo_ms=99.0, alpha=1, beta=1)).solution is None
    assert solve([slow, slow], IpaGoal(slo_ms=100.0, alpha=1, beta=1)).solution is not None
    overrun = IpaStage(1e6, (1,), (Candidate(0.5, 1.0, (50.0,)),))
    assert solve([slow, overrun], IpaGoal(slo_ms=100.0, alpha=1, beta=1)).solution is None


@pytest.mark.parametrize("seed", range(40))
def test_no_feasible_choice_is_better_than_the_bound(seed: int) -> None:
    stages, goal = drawn(seed, coarse=seed % 2 == 0, paths=seed % 3 == 0)
    options = [options_of(stage, goal.replicas_max) for stage in stages]
    if not all(options):
        return
    arrays, rng = _Arrays.of(options, goal), Random(seed)
    feasible = [chosen for chosen in itertools.product(*options) if is_feasible(chosen, goal)]
    best = max((objective(chosen, goal) for chosen in feasible), default=-np.inf)
    for scale in (0.0, 0.001, 0.1):
        per_ms = np.array([scale * rng.random() for _ in arrays.limits_ms])
        per_core = scale * rng.random() if goal.cores_max < np.inf else 0.0
        assert _Prices.of(arrays, per_ms, per_core).bound >= best - 1e-9


def test_without_prices_the_best_is_chosen_as_if_nothing_were_limited() -> None:
    stage = IpaStage(1.0, (1,), (Candidate(0.9, 1.0, (90.0,)), Candidate(0.5, 1.0, (10.0,))))
    goal = IpaGoal(slo_ms=100.0, alpha=10.0, beta=1.0, delta=0.0)
    arrays = _Arrays.of([options_of(stage)] * 2, goal)
    free, dear = (_Prices.of(arrays, np.array([per_ms]), 0.0) for per_ms in (0.0, 1.0))
    assert [option.candidate for option in free.best_options(arrays)] == [0, 0]
    assert free.bound == pytest.approx(8.1 - 2)
    assert [option.candidate for option in dear.best_options(arrays)] == [1, 1]
    assert dear.bound == pytest.approx(2.5 - 2 - 20 + 100, rel=1e-3)


def test_paths_with_the_same_beginning_or_rest_count_once() -> None:
    stage = IpaStage(1.0, (1,), (Candidate(0.9, 1.0, (90.0,)), Candidate(0.5, 1.0, (10.0,))))
    paths = tuple(IndexedPath((0, middle, 4), 150.0) for middle in (1, 2, 3))
    arrays = _Arrays.of([options_of(stage)] * 5, IpaGoal(0.0, 1.0, 1.0, paths=paths))
    assert [len(own) for own in arrays.open_paths] == [0, 1, 2, 2, 1, 0]
    (all_of_them,) = arrays.open_paths[4]
    assert all_of_them.excess_ms(np.array([[20.0, 100.0, 20.0]])) == pytest.approx([-50.0])
    assert all_of_them.excess_ms(np.array([[20.0, 20.0, 20.0]])) == pytest.approx([-90.0])


QUICK, SLOW = Candidate(0.5, 1.0, (100.0,)), Candidate(0.9, 2.0, (150.0,))


def stages(rate_rps: float, replicas: int = 0) -> list[IpaStage]:
    return [IpaStage(rate_rps, (1,), (QUICK, SLOW), replicas), IpaStage(rate_rps, (1,), (SLOW,), replicas)]


def goal(slo_ms: float = 400.0, cores_max: float = float("inf"), replicas_max: int = 100) -> IpaGoal:
    return IpaGoal(0.0, 1.0, 1.0, cores_max=cores_max, replicas_max=replicas_max, paths=(IndexedPath((0, 1), slo_ms),))


def test_without_a_deadline_the_quickest_are_taken() -> None:
    effort = best_effort(stages(20), goal(slo_ms=10))
    assert effort.share == 1.0
    assert [(o.candidate, o.replicas) for o in effort.options] == [(0, 2), (0, 3)]


def test_with_too_few_cores_a_part_of_the_rate_is_served() -> None:
    effort = best_effort(stages(100), goal(cores_max=8))
    assert effort.share == pytest.approx(0.2, abs=1e-4)
    assert sum(option.cores for option in effort.options) <= 8
    alone = best_effort(stages(100), goal(cores_max=1))
    assert alone.share < 1e-3
    assert [option.replicas for option in alone.options] == [1, 1]
