"""Label setting: the same answer as enumeration, ties included, with few labels."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.solvers.accuracy import Measure
from sloop.solvers.labels import solve
from sloop.solvers.variants import Candidate, Choices, Goal, enumerated
from tests.solvers.variants_scene import SENTIMENT, VIDEO_GOAL, audio, drawn, large, video

BLOCK = 50


@pytest.mark.parametrize("block", range(10))
def test_it_finds_what_enumeration_finds(block: int) -> None:
    """500 pipelines; of values from a small grid in every other, so that ties occur."""
    feasible = 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        stages, goal = drawn(seed, coarse=seed % 2 == 0)
        expected = enumerated(stages, goal)
        found = solve(stages, goal).answer
        assert (found and found.options) == (expected and expected.options), seed
        feasible += expected is not None
    assert feasible >= BLOCK // 4


@pytest.mark.parametrize("block", range(4))
def test_it_finds_what_enumeration_finds_in_graphs(block: int) -> None:
    for seed in range(1000 + block * BLOCK, 1000 + (block + 1) * BLOCK):
        stages, goal = drawn(seed, coarse=seed % 2 == 0, ways=True)
        expected = enumerated(stages, goal)
        found = solve(stages, goal).answer
        assert (found and found.options) == (expected and expected.options), seed


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_it_finds_what_enumeration_finds_in_any(seed: int, coarse: bool, ways: bool) -> None:
    stages, goal = drawn(seed, coarse=coarse, ways=ways)
    expected = enumerated(stages, goal)
    found = solve(stages, goal).answer
    assert (found and found.options) == (expected and expected.options)


@pytest.mark.parametrize("rate_rps", [0, 3, 5, 7, 10, 20, 30, 400])
def test_it_finds_the_published_answers(rate_rps: float) -> None:
    goal = Goal(slo_ms=9420, alpha=30, beta=0.5)
    for stages, weights in ((video(rate_rps), VIDEO_GOAL), (audio(SENTIMENT, rate_rps), goal)):
        assert solve(stages, weights).answer == enumerated(stages, weights)


@pytest.mark.parametrize("measure", ["pas", "pas_rank", "norm_prod"])
@pytest.mark.parametrize("alpha", [2.0, 30.0, 1e5])
def test_ten_stages_of_ten_variants_need_few_labels(measure: Measure, alpha: float) -> None:
    stages, goal = large(3, alpha, measure)
    solved = solve(stages, goal)
    assert solved.answer is not None
    assert solved.answer.gap == 0.0
    assert solved.labels < 5_000  # about 2 KiB and half a millisecond each


def test_with_too_many_labels_it_says_what_may_have_been_missed() -> None:
    stages, goal = large(3, 1e5)
    exact, hasty = solve(stages, goal).answer, solve(stages, goal, labels_max=5).answer
    assert exact is not None
    assert hasty is not None
    assert exact.objective <= hasty.objective + hasty.gap + 1e-6
    assert hasty.objective <= exact.objective + 1e-9


def test_where_nothing_is_feasible_there_is_no_answer() -> None:
    slow = Choices(1.0, (1,), (Candidate(0.5, 1.0, (50.0,)),))
    assert solve([slow, slow], Goal(slo_ms=99.0, alpha=1, beta=1)).answer is None
    assert solve([slow, slow], Goal(slo_ms=100.0, alpha=1, beta=1)).answer is not None
    overrun = Choices(1e6, (1,), (Candidate(0.5, 1.0, (50.0,)),))
    assert solve([slow, overrun], Goal(slo_ms=100.0, alpha=1, beta=1)).answer is None
