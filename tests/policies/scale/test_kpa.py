"""Knative's scaling: two windows, panic, down to none, and a cold start's backlog that counts once."""

from collections.abc import Callable
from typing import Any

import pytest

from sloop.core.views import Bucket, ClusterView, ReplicaView, StageView
from sloop.errors import InputError
from sloop.policies.scale.kpa import Kpa
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Quadratic
from sloop.profile.profile import Profile
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Life, Plan, Visit

Stage = Callable[..., StageView]
View = Callable[..., ClusterView]
Replica = Callable[..., ReplicaView]


def fresh(**parameters: Any) -> Kpa:
    """Seven requests at once for each replica."""
    return Kpa(**{"concurrency": 10.0, "utilisation": 0.7, **parameters})


def count(plan: Plan | None) -> int:
    assert plan is not None
    return plan.stages[0].groups[0].count


def at_once(*levels: float, end_s: int) -> list[Bucket]:
    """Seconds with so many requests in the stage, the last ending at `end_s`."""
    first = end_s - len(levels)
    return [Bucket(s(first + index), running_ns=round(level * NS_PER_S)) for index, level in enumerate(levels)]


@pytest.fixture(name="seen")
def seen_fixture(stage: Stage, view: View, replica: Replica) -> Callable[..., ClusterView]:
    def make(*levels: float, end_s: int, ready: int) -> ClusterView:
        replicas = [replica(number) for number in range(ready)]
        return view(stage(*at_once(*levels, end_s=end_s), replicas=replicas))

    return make


def test_begins_with_one(stage: Stage, view: View) -> None:
    assert count(fresh().plan(0, view(stage()))) == 1
    assert count(fresh(initial=0).plan(0, view(stage()))) == 0


def test_the_stable_window_decides(seen: Callable[..., ClusterView]) -> None:
    assert count(fresh().plan(s(60), seen(*[14.0] * 60, end_s=60, ready=2))) == 2
    assert count(fresh().plan(s(60), seen(*[14.1] * 60, end_s=60, ready=2))) == 3
    assert count(fresh().plan(s(60), seen(*[0.0] * 30, *[28.0] * 30, end_s=60, ready=3))) == 2


def test_a_panic_answers_a_burst_and_does_not_scale_in(seen: Callable[..., ClusterView]) -> None:
    policy = fresh()
    calm = [7.0] * 54
    assert count(policy.plan(s(60), seen(*calm, *[70.0] * 6, end_s=60, ready=1))) == 10
    assert count(policy.plan(s(62), seen(*calm, *[7.0] * 6, end_s=62, ready=10))) == 10
    assert count(policy.plan(s(119), seen(*[7.0] * 60, end_s=119, ready=10))) == 10
    later = count(policy.plan(s(122), seen(*[7.0] * 60, end_s=122, ready=10)))
    assert later == 5, "the panic is a stable window past; one step at most halves"
    assert count(policy.plan(s(124), seen(*[7.0] * 60, end_s=124, ready=5))) == 2
    assert count(policy.plan(s(126), seen(*[7.0] * 60, end_s=126, ready=2))) == 1


def test_less_than_twice_what_is_ready_is_no_panic(seen: Callable[..., ClusterView]) -> None:
    plan = fresh().plan(s(60), seen(*[14.0] * 54, *[20.0] * 6, end_s=60, ready=2))
    assert plan is not None
    assert count(plan) == 3
    assert "panic" not in plan.why


def test_one_step_is_bounded(seen: Callable[..., ClusterView]) -> None:
    assert count(fresh(up_rate=3).plan(s(60), seen(*[700.0] * 60, end_s=60, ready=2))) == 6
    assert count(fresh(replicas_max=8).plan(s(60), seen(*[700.0] * 60, end_s=60, ready=2))) == 8


def test_the_last_replica_goes_after_its_own_delay(seen: Callable[..., ClusterView]) -> None:
    policy = fresh(zero_delay_ns=s(30))
    none = [0.0] * 60
    assert count(policy.plan(s(60), seen(*none, end_s=60, ready=1))) == 1
    plan = policy.plan(s(80), seen(*none, end_s=80, ready=1))
    assert plan is not None
    assert count(plan) == 1
    assert "→ 1 replica, none in 10 s" in plan.why
    assert count(policy.plan(s(90), seen(*none, end_s=90, ready=1))) == 0
    assert count(fresh(replicas_min=1, zero_delay_ns=0).plan(s(60), seen(*none, end_s=60, ready=1))) == 1


def test_a_request_in_between_starts_the_delay_anew(seen: Callable[..., ClusterView]) -> None:
    policy = fresh(zero_delay_ns=s(30))
    none = [0.0] * 60
    policy.plan(s(60), seen(*none, end_s=60, ready=1))
    policy.plan(s(80), seen(*none[:-1], 1.0, end_s=80, ready=1))
    assert count(policy.plan(s(140), seen(*none, end_s=140, ready=1))) == 1
    assert count(policy.plan(s(170), seen(*none, end_s=170, ready=1))) == 0


def test_whoever_waits_gets_a_replica_at_once(stage: Stage, view: View, visit: Callable[..., Visit]) -> None:
    waiting = stage(*at_once(*[0.0] * 60, end_s=60), queue=[visit(1, arrived_ms=60_000)])
    assert count(fresh().plan(s(60), view(waiting))) == 1


def cold_start(stage: Stage, view: View, replica: Replica, visit: Callable[..., Visit], policy: Kpa) -> list[int]:
    """30 requests/s from nothing; one replica is ready after 10 s and works the 300 that wait by then off in 20 s.

    A batch of ten takes 22 ms, so 0.66 requests would be at once in a replica: the work of one.
    """
    counts: list[int] = []
    buckets: list[Bucket] = []
    profile = Profile(latency_ms=Quadratic(0, 2, 2), max_batch=10, max_cores=4)
    for now_s in range(120):
        waiting = max(0, 30 * min(now_s, 10) - 15 * max(0, now_s - 10))
        life = Life.READY if now_s >= 10 else Life.STARTING
        queue = [visit(number, arrived_ms=1000 * now_s - 1000 * number / 30) for number in range(waiting)]
        if now_s:
            buckets.append(Bucket(s(now_s - 1), 30, round((waiting + 0.66) * NS_PER_S)))
        shown = stage(
            *buckets[-60:],
            belief=Estimate(profile, correct=False),
            queue=queue,
            replicas=[replica(1, life, since_ns=s(10) if now_s >= 10 else 0)] if now_s else [],
        )
        if now_s % 2 == 0:
            counts.append(count(policy.plan(s(now_s), view(shown))))
    return counts


def test_a_cold_start_s_backlog_counts_once(
    stage: Stage, view: View, replica: Replica, visit: Callable[..., Visit]
) -> None:
    assert set(cold_start(stage, view, replica, visit, fresh())) == {1}


def test_a_backlog_that_stays_a_stable_window_is_demand(
    stage: Stage, view: View, replica: Replica, visit: Callable[..., Visit]
) -> None:
    policy, queue = fresh(), [visit(number) for number in range(300)]
    starting = stage(*at_once(*[300.0] * 10, end_s=10), queue=queue, replicas=[replica(1, Life.STARTING)])
    assert count(policy.plan(s(10), view(starting))) == 1
    for now_s in (12, 72):
        shown = stage(*at_once(*[300.0] * min(60, now_s), end_s=now_s), queue=queue, replicas=[replica(1)])
        assert count(policy.plan(s(now_s), view(shown))) == 1
    for now_s in (74, 82):
        shown = stage(*at_once(*[300.0] * 60, end_s=now_s), queue=queue, replicas=[replica(1)])
        last = count(policy.plan(s(now_s), view(shown)))
    assert last > 1


def test_without_a_cold_start_the_same_backlog_is_demand(seen: Callable[..., ClusterView]) -> None:
    assert count(fresh().plan(s(60), seen(*[300.0] * 60, end_s=60, ready=1))) == 43


@pytest.mark.parametrize(
    "parameters",
    [
        {"concurrency": -1},
        {"utilisation": 0},
        {"utilisation": 1.1},
        {"replicas_min": -1},
        {"replicas_max": 0},
        {"replicas_min": 2, "initial": 1},
        {"cores": 0},
        {"panic_ns": 0},
        {"stable_ns": s(1)},
        {"panic_threshold": 1},
        {"up_rate": 1},
        {"down_rate": 1},
        {"zero_delay_ns": -1},
    ],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Kpa(**parameters)
