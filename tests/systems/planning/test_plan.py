"""The plan that policies keep at a steady rate, and the answer of `sloop plan`."""

from fractions import Fraction
from math import inf

import pytest

from sloop.app.load import load_application
from sloop.core.monitor import BUCKETS_KEPT, Monitor
from sloop.systems.planning import PlanReport, explain_plan
from sloop.systems.planning.steady import BEYOND, REPLICAS_MAX, Occupation, SteadyBuckets, steady_plans
from sloop.systems.setup import set_up
from sloop.units import ms, s
from tests.systems.planning.scene import ENOUGH, READING, nodes, setup, stage, steady_plan


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(2, 5), Fraction(1, 3), Fraction(3), Fraction(21, 2)])
def test_arrivals_are_whole_and_their_mean_is_the_rate(rate: Fraction) -> None:
    found = [bucket.arrivals for bucket in SteadyBuckets(s(BUCKETS_KEPT), float(rate), ms(100))]
    assert len(found) == BUCKETS_KEPT
    assert sum(found) == pytest.approx(float(rate) * BUCKETS_KEPT, abs=1)
    assert set(found) <= {int(rate), -int(-rate // 1)}
    assert found[-1] == max(found)


def test_the_setup_stays_fresh() -> None:
    """Policies remember; planning twice gives the same answer, and a run after it begins with nothing."""
    made = setup(stage("a"), system={"name": "hpa"})
    assert steady_plan(made, 300) == steady_plan(made, 300)
    assert steady_plan(made, 1).stages[0].groups[0].count == 1


def test_decisions_are_timed_by_the_clock_that_is_given() -> None:
    ticks = iter(range(0, 10**12, 3_000_000))
    steady = steady_plans(setup(*READING).applications, {"x": 10}, clock=lambda: next(ticks))
    assert steady.solve_ms == 3
    assert steady_plans(setup(*READING).applications, {"x": 10}).solve_ms == 0
    assert [target.stage for target in steady.plans["x"].stages] == ["detect", "read", "digits"]


def test_without_a_plan_there_is_nothing() -> None:
    made = setup(stage("a"), system={"name": "static", "replicas": 0})
    assert steady_plan(made, 10).stages[0].groups[0].count == 0


def test_buckets_are_those_of_a_monitor() -> None:
    """Of arrivals, and of slacks, which only its newest buckets keep."""
    live = Monitor(s(1))
    for second in range(BUCKETS_KEPT):
        for _ in range(3):
            live.arrive(s(second), ms(100))
        live.roll(s(second + 1))
    found = SteadyBuckets(s(BUCKETS_KEPT), 3, ms(100))
    assert (found[-1], found[:2], len(found)) == (list(found)[-1], list(found)[:2], BUCKETS_KEPT)
    assert [(each.start_ns, each.arrivals, each.slack_ns) for each in found] == [
        (each.start_ns, each.arrivals, each.slack_ns) for each in live.buckets
    ]


def test_a_large_rate_takes_no_more_room_than_a_small_one() -> None:
    buckets = list(SteadyBuckets(s(BUCKETS_KEPT), 1e7 + 0.5, ms(100)))
    slacks = {id(each.slack_ns): len(each.slack_ns) for each in buckets}
    assert sum(slacks.values()) <= 20_000


def test_a_plan_far_beyond_the_cluster_is_not_shown_to_its_policy_again() -> None:
    steady = steady_plans(setup(stage("a"), system=ENOUGH).applications, {"x": 1e7})
    assert steady.plans["x"].stages[0].groups[0].count == 100_000
    assert steady.cut_short["x"] == (
        "the rate needs 12,500 times the cores of the cluster, so enough was not asked again after it chose 100,000 "
        "replicas, which may change"
    )


def test_what_is_cut_short_says_so_and_what_would_be_needed() -> None:
    answer = explain_plan(setup(*READING, system={"name": "hpa", "replicas_max": 10**9}), 1e6)
    assert not answer.feasible
    assert sum(row.replicas for row in answer.stages) < 10 * REPLICAS_MAX
    assert any("hpa was not asked again" in note for note in answer.notes)
    large = next(shortfall for shortfall in answer.shortfalls if "cheapest" in shortfall.why)
    assert large.needs == pytest.approx(1e6 * (0.02025 + 5 * 0.01 + 0.25 * 0.01))
    assert large.has == 8


@pytest.mark.parametrize(("cores", "is_cut"), [(10_001, False), (10_000, True)])
def test_many_replicas_are_shown_where_the_cluster_is_large(cores: float, is_cut: bool) -> None:
    """2,000,100 requests of 10 ms take 20,001 cores, and as many replicas."""
    assert BEYOND == 2
    made = setup(stage("a"), system=ENOUGH, cluster=nodes(cores, 1))
    assert bool(steady_plans(made.applications, {"x": 2_000_100}).cut_short) == is_cut


AMDAHL = {"form": "amdahl", "gamma": 10, "epsilon": 0, "delta": 0, "eta": 0}  # 10 ms per request and core
PROFILE = {"latency_ms": AMDAHL, "max_batch": 4, "max_cores": 4, "memory_bytes": 1000}
NODES = {"nodes": [{"hardware": "custom", "cores": 4, "memory_bytes": 10_000, "usd_per_h": 0.5, "count": 2}]}


def planned(rate_rps: float, slo_ms: float = 100, **system: object) -> PlanReport:
    application = load_application(
        {
            "name": "two",
            "slo_ms": slo_ms,
            "stages": [{"name": "a", "profile": PROFILE}, {"name": "b", "profile": PROFILE, "after": ["a"]}],
            "system": {"name": "static", **system},
            "cluster": NODES,
        }
    )
    return explain_plan(set_up(application), rate_rps)


def test_counts_cores_money_and_the_longest_path() -> None:
    found = planned(50, cores=2)
    assert found.feasible
    assert found.cores == 4
    assert found.usd_per_h == 0.5  # both replicas fit on the first node
    assert found.predicted_ms == pytest.approx(2 * 5.0)


def test_a_plan_that_cannot_keep_up_is_not_feasible() -> None:
    found = planned(150, cores=1)
    assert not found.feasible
    assert found.predicted_ms == inf
    assert "cannot keep up with 150 requests/s" in found.why


def test_a_plan_beyond_the_deadline_is_not_feasible() -> None:
    assert "and the deadline is 15 ms: 5 ms too long" in planned(50, slo_ms=15, cores=1).why


def test_a_plan_without_room_says_what_does_not_fit() -> None:
    found = planned(50, cores=3, replicas=2)
    assert not found.feasible
    assert "no node has room for 2 of 2 replicas of b/b with 3 cores" in found.why


def test_batches_grow_to_what_the_rate_needs() -> None:
    steps = {"form": "amdahl", "gamma": 1, "epsilon": 9, "delta": 0, "eta": 0}  # 10 ms for one, 13 ms for four
    application = load_application(
        {
            "name": "one",
            "slo_ms": 100,
            "stages": [{"name": "a", "profile": PROFILE | {"latency_ms": steps}}],
            "system": {"name": "static"},
            "cluster": NODES,
        }
    )
    found = explain_plan(set_up(application), 200.0)
    assert found.stages[0].predicted_ms == pytest.approx(12 + 10)  # three per batch; two more arrive in 10 ms


def test_requests_that_nobody_drops_wait_for_ever() -> None:
    """Three a second too many: in the tenth minute's last second 1798.5 wait in the mean, or 3 where others are
    dropped."""
    busy = Occupation(waiting=3.0)
    growing = SteadyBuckets(s(BUCKETS_KEPT), 10, ms(100), busy, keeps_all=True)
    assert [growing[place].waiting_ns for place in (0, 1, -1)] == [s(3) // 2, 9 * s(1) // 2, 3597 * s(1) // 2]
    assert {bucket.waiting_ns for bucket in SteadyBuckets(s(BUCKETS_KEPT), 10, ms(100), busy)} == {s(3)}
