"""The linear program: the same objective as label setting, as far as HiGHS' tolerance goes."""

import pytest

from sloop.errors import InputError
from sloop_systems.ipa import label_setting
from sloop_systems.ipa.milp import solve
from sloop_systems.ipa.solver import IpaGoal
from tests.sloop_systems.ipa.scene import SENTIMENT, VIDEO_GOAL, audio, drawn, large, video


@pytest.mark.parametrize("block", range(4))
def test_it_reaches_the_same_objective(block: int) -> None:
    for seed in range(block * 15, (block + 1) * 15):
        stages, goal = drawn(seed, coarse=False, paths=seed % 3 == 0)
        expected, found = label_setting.solve(stages, goal).solution, solve(stages, goal)
        assert (found is None) == (expected is None), seed
        if found is not None and expected is not None:
            assert found.objective == pytest.approx(expected.objective, abs=1e-5), seed
            assert found.gap == 0.0


@pytest.mark.parametrize("rate_rps", [5, 7, 10, 20, 30])
def test_it_finds_the_published_answers(rate_rps: float) -> None:
    for stages, goal in (
        (video(rate_rps), VIDEO_GOAL),
        (audio(SENTIMENT, rate_rps), IpaGoal(slo_ms=9420, alpha=30, beta=0.5)),
    ):
        expected, found = label_setting.solve(stages, goal).solution, solve(stages, goal)
        assert expected is not None
        assert found is not None
        assert found.objective == pytest.approx(expected.objective, abs=1e-5)
        assert found.cores == expected.cores


def test_sums_may_be_as_large_as_they_like() -> None:
    stages, goal = large(5, 30.0, "pas_rank")
    expected, found = label_setting.solve(stages, goal).solution, solve(stages, goal)
    assert expected is not None
    assert found is not None
    assert found.objective == pytest.approx(expected.objective, abs=1e-4)


def test_products_may_not() -> None:
    stages, goal = large(5, 30.0)
    with pytest.raises(InputError, match="combinations"):
        solve(stages, goal)
