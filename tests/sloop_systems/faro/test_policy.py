"""Faro's policies: what they see, when they decide, who gets the workers, and that they are pure functions."""

import pickle
from dataclasses import replace

import pytest
from msgspec import structs

from sloop.core.views import Bucket, Claimant, ClusterView
from sloop.policies import targets
from sloop.profile.profile import LatencyTable, Profile
from sloop.testing.views import make_belief, make_replica, make_stage, make_view
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import Life, Plan
from sloop_systems.faro.policy import Aiad, Faro, FirstCome, JointUtility, MarkWorkers, Oneshot, WatchedWorkers, seen_in
from sloop_systems.faro.published import IN_TICKS, OUT_TICKS

BELIEF = make_belief(Profile(latency_ms=LatencyTable({1: {1: 180.0}}), max_batch=1, max_cores=1))


def view_of(
    rate: int, workers: int, *, seconds: int = 600, latency_ms: float = 200.0, starting: int = 0, cores: float = 32
) -> ClusterView:
    """An application with so many requests each second, each of which was inside for so long."""
    buckets = [
        Bucket(s(at), arrivals=rate, waiting_ns=0, running_ns=round(rate * ms(latency_ms))) for at in range(seconds)
    ]
    lives = [Life.READY] * (workers - starting) + [Life.STARTING] * starting
    replicas = [make_replica(number, life) for number, life in enumerate(lives)]
    stage = make_stage(*buckets, belief=BELIEF, replicas=replicas, slo_ms=720)
    plan = targets.equal_replicas(stage, BELIEF, count=workers, cores=1.0, batch_max=1)
    return make_view(stage, cores=cores, plan=Plan((plan,), "before"))


def claim(view: ClusterView, wants: float, key: str = "a") -> Claimant:
    assert view.plan is not None
    return Claimant(key, "local", wants, view=view, alone=view.plan, plan=lambda cores: None)


def count(plan: Plan) -> int:
    return sum(group.count for target in plan.stages for group in target.groups)


def test_the_mean_latency_is_what_was_inside_over_what_was_admitted() -> None:
    assert seen_in(view_of(10, 3, latency_ms=500.0)).latency_ms == pytest.approx(500.0)
    assert seen_in(view_of(0, 3)).latency_ms == 0.0
    stuck = make_view(make_stage(Bucket(0, waiting_ns=NS_PER_S), belief=BELIEF))
    assert seen_in(stuck).latency_ms == float("inf")


def test_the_forecast_is_made_of_whole_minutes() -> None:
    assert seen_in(view_of(10, 3, seconds=599)).rates_rps(0.6) == pytest.approx([10.0] * 7)
    young = replace(view_of(10, 3, seconds=100), forecast_rps=4.0)
    assert seen_in(young).rates_rps(0.6) == pytest.approx([4.0] * 7), "one minute says nothing of the next"


@pytest.mark.parametrize(
    ("policy", "up", "down"), [(Aiad(), 5, 3), (Oneshot(), 6, 2)], ids=["additive", "as many times"]
)
def test_it_scales_after_enough_ticks_in_a_row(policy: Aiad, up: int, down: int) -> None:
    late, calm = view_of(10, 4, latency_ms=1000.0), view_of(10, 4, latency_ms=300.0)
    memory = WatchedWorkers(4, 4, 0)
    for _ in range(OUT_TICKS - 1):
        plan, memory = policy.plan(s(10), late, memory)
        assert count(plan) == 4
    _, interrupted = policy.plan(s(10), calm, memory)
    assert interrupted.streak == -1
    plan, memory = policy.plan(s(10), late, memory)
    assert (count(plan), memory.streak) == (up, 0)
    memory = WatchedWorkers(4, 4, 1 - IN_TICKS)
    assert count(policy.plan(s(10), calm, memory)[0]) == down


def test_ticks_do_not_count_while_workers_start() -> None:
    late = view_of(10, 4, latency_ms=1000.0, starting=1)
    memory = WatchedWorkers(4, 4, OUT_TICKS - 1)
    assert Aiad().plan(s(10), late, memory) == (*Aiad().plan(s(10), late, memory)[:1], memory)


def test_a_forecast_decides_every_five_minutes_and_once_at_the_beginning() -> None:
    """In between, one worker more after 30 s with a late mean."""
    busy = view_of(12, 9)  # three suffice: 720 ms at the 99th percentile
    for now_s, decides in ((0, True), (60, True), (70, False), (290, False), (300, True), (310, False), (600, True)):
        plan, _ = Faro().plan(s(now_s), busy, WatchedWorkers(9, 9, 0))
        assert count(plan) == (3 if decides else 9), now_s
    late = view_of(12, 4, latency_ms=1000.0)
    plan, memory = Faro().plan(s(310), late, WatchedWorkers(4, 4, OUT_TICKS - 1))
    assert (count(plan), memory.streak) == (5, 0)


def test_what_had_no_room_is_asked_for_again() -> None:
    """By MArk; what Faro's division has decided stays."""
    small = view_of(12, 2, cores=2)
    plan, memory = MarkWorkers().plan(s(300), small, WatchedWorkers(2, 2, 0))
    assert (count(plan), plan.feasible, memory.wanted) == (2, False, 3)
    assert count(MarkWorkers().plan(s(310), view_of(12, 2), memory)[0]) == 3
    _, memory = Faro().plan(s(300), small, WatchedWorkers(2, 2, 0))
    assert count(Faro().plan(s(310), view_of(12, 2), memory)[0]) == 2


def test_mark_plans_for_a_second_that_comes_at_once() -> None:
    assert (
        count(MarkWorkers().plan(s(300), view_of(12, 9), WatchedWorkers(9, 9, 0))[0]) == 3
    )  # 12 × 180 ms within 720 ms


def test_first_come_first_served() -> None:
    """Each keeps what it has and wants, and the first gets what is left."""
    has = [view_of(10, 4), view_of(10, 2), view_of(10, 1)]
    wants = [claim(view, cores) for view, cores in zip(has, (3.0, 4.0, 4.0), strict=True)]
    assert [share.cores for share in FirstCome().cores(s(10), 8.0, wants)] == [3.0, 4.0, 1.0]
    assert [share.cores for share in JointUtility().cores(s(10), 8.0, wants)] == [3.0, 4.0, 1.0], "between forecasts"
    assert [share.cores for share in FirstCome().cores(s(10), 3.0, wants)] == [1.5, 1.0, 0.5], "half of the cores"


def test_utility_divides_at_a_forecast() -> None:
    """Both want five, and six are there: three and three have more utility than five and one."""
    wants = [claim(view_of(16, 5), 5.0), claim(view_of(16, 1), 5.0, "b")]
    for objective in ("sum", "fair", "fair_sum"):
        shares = JointUtility(objective).cores(s(300), 6.0, wants)
        assert sum(share.cores for share in shares) <= 6.0, objective
        assert min(share.cores for share in shares) >= 2.0, objective
        assert all(share.shed == 0.0 and "utility" in share.why for share in shares)


def test_only_the_penalised_refuse_requests_and_keep_to_it() -> None:
    wants = [claim(view_of(17, 3), 5.0), claim(view_of(17, 3), 5.0, "b")]
    shares = JointUtility(penalised=True).cores(s(300), 6.0, wants)
    assert 0 < max(share.shed for share in shares) < 0.5
    assert not any(share.shed for share in JointUtility().cores(s(300), 6.0, wants))
    seen = view_of(17, 3)
    assert seen.plan is not None
    refusing = replace(seen, plan=structs.replace(seen.plan, shed=0.05))
    memory = WatchedWorkers(3, 3, 0)
    assert Faro().plan(s(310), refusing, memory)[0].shed == 0.05
    assert Faro().plan(s(600), refusing, memory)[0].shed == 0.0, "the division decides anew"


def test_the_same_arguments_have_the_same_answer() -> None:
    """Also in another process; and nothing that was shown has changed."""
    view, memory = view_of(13, 3, latency_ms=900.0), WatchedWorkers(3, 3, 2)
    for policy in (Aiad(), Oneshot(), Faro(), MarkWorkers()):
        for now_s in (300, 310):
            before = pickle.dumps(view)
            first = policy.plan(s(now_s), view, memory)
            assert pickle.loads(pickle.dumps(policy)).plan(s(now_s), pickle.loads(before), memory) == first
            assert pickle.dumps(view) == before
    wants = [claim(view, 5.0), claim(view, 6.0, "b")]
    for divide in (FirstCome(), JointUtility(), JointUtility("sum", penalised=True)):
        assert divide.cores(s(300), 7.0, wants) == divide.cores(s(300), 7.0, wants)
