"""What policies are shown of a steady rate."""

from fractions import Fraction

import pytest

from sloop.core.monitor import BUCKETS_KEPT, Monitor
from sloop.systems.planning import need
from sloop.systems.planning.steady import BEYOND, REPLICAS_SHOWN, _arrivals, _buckets, steady_plan
from sloop.units import ms, s
from tests.systems.planning.scene import READING, nodes, setup, stage


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


def test_buckets_are_those_of_a_monitor() -> None:
    """Of arrivals, and of slacks, which only its newest buckets keep."""
    live = Monitor(s(1))
    for second in range(BUCKETS_KEPT):
        for _ in range(3):
            live.arrive(s(second), ms(100))
        live.roll(s(second + 1))
    found = _buckets(s(BUCKETS_KEPT), 3, ms(100))
    assert [(each.start_ns, each.arrivals, each.slack_ns) for each in found] == [
        (each.start_ns, each.arrivals, each.slack_ns) for each in live.buckets
    ]


def test_a_large_rate_takes_no_more_room_than_a_small_one() -> None:
    slacks = {id(each.slack_ns): len(each.slack_ns) for each in _buckets(s(BUCKETS_KEPT), 1e7 + 0.5, ms(100))}
    assert sum(slacks.values()) <= 20_000


def test_a_plan_far_beyond_the_cluster_is_not_shown_to_its_policy_again() -> None:
    steady = steady_plan(setup(stage("a"), system="ds2"), 1e7)
    assert steady.plan.stages[0].groups[0].count == 100_000
    assert steady.cut_short == (
        "ds2 was asked no further once it wanted 100,000 replicas, and might want others: "
        "the rate takes 12,500 times the cores there are"
    )


def test_what_is_cut_short_says_so_and_what_would_be_needed() -> None:
    answer = need(setup(*READING, system={"name": "hpa", "replicas_max": 10**9}), 1e6)
    assert not answer.feasible
    assert sum(row.replicas for row in answer.stages) < 10 * REPLICAS_SHOWN
    assert "hpa was asked no further" in answer.notes[0]
    large = next(lack for lack in answer.lacks if "thriftiest" in lack.why)
    assert large.needs == pytest.approx(1e6 * (0.02025 + 5 * 0.01 + 0.25 * 0.01))
    assert large.has == 8


@pytest.mark.parametrize(("cores", "is_cut"), [(10_001, False), (10_000, True)])
def test_many_replicas_are_shown_where_the_cluster_is_large(cores: float, is_cut: bool) -> None:
    """2,000,100 requests of 10 ms take 20,001 cores, and as many replicas."""
    assert BEYOND == 2
    made = setup(stage("a"), system="ds2", cluster=nodes(cores, 1))
    assert bool(steady_plan(made, 2_000_100).cut_short) == is_cut
