"""What policies are shown of a steady rate."""

from fractions import Fraction

import pytest

from sloop.core.monitor import BUCKETS_KEPT
from sloop.systems.planning.steady import _arrivals, steady_plan
from tests.systems.planning.scene import READING, setup, stage


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(2, 5), Fraction(1, 3), Fraction(3), Fraction(21, 2)])
def test_arrivals_are_whole_and_their_mean_is_the_rate(rate: Fraction) -> None:
    found = _arrivals(float(rate))
    assert len(found) == BUCKETS_KEPT
    assert sum(found) == pytest.approx(float(rate) * BUCKETS_KEPT, abs=1)
    assert set(found) <= {int(rate), -int(-rate // 1)}
    assert found[-1] == max(found)


def test_the_setup_stays_fresh() -> None:
    """Policies remember; planning twice gives the same answer, and a run after it begins with nothing."""
    made = setup(stage("a"), system={"name": "hpa"})
    assert steady_plan(made, 300).plan == steady_plan(made, 300).plan
    assert steady_plan(made, 1).plan.stages[0].groups[0].count == 1


def test_only_decisions_are_timed() -> None:
    steady = steady_plan(setup(*READING), 10)
    assert 0 < steady.solve_ms < 1000
    assert [target.stage for target in steady.plan.stages] == ["detect", "read", "digits"]


def test_without_a_plan_there_is_nothing() -> None:
    made = setup(stage("a"), system={"name": "static", "replicas": 0})
    assert steady_plan(made, 10).plan.stages[0].groups[0].count == 0
