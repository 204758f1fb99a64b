"""Kubernetes' and Knative's autoscalers: ratios and tolerances, windows, limits, scale to zero, cold starts."""

from collections.abc import Callable
from typing import Any

import pytest

from sloop.core.views import Bucket, ClusterView, ReplicaView, StageView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.scale.kubernetes import Hpa, Kpa, Vpa
from sloop.policies.targets import CountHistory
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile, Quadratic
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Life, Plan, Visit
from tests.asked import memory_of, next_plan, remember

Seen = Callable[..., ClusterView]


@pytest.fixture(name="hpa_view")
def hpa_view_fixture(
    stage: Callable[..., StageView], view: Callable[..., ClusterView], replica: Callable[..., ReplicaView]
) -> Seen:
    """A cluster whose `ready` replicas were busy for this part of the last 15 s, while `starting` are on their way."""

    def make(utilisation: float, ready: int, starting: int = 0) -> ClusterView:
        replicas = [replica(number) for number in range(ready)]
        replicas += [replica(ready + number, Life.STARTING) for number in range(starting)]
        core_ns = ready * NS_PER_S
        buckets = [Bucket(s(t), busy_core_ns=round(utilisation * core_ns), ready_core_ns=core_ns) for t in range(15)]
        return view(stage(*buckets, replicas=replicas))

    return make


def count(plan: Plan | None) -> int:
    assert plan is not None
    assert not plan.stages[0].in_place
    return plan.stages[0].groups[0].count


def run(policy: Hpa, *steps: tuple[float, ClusterView]) -> list[int]:
    return [count(next_plan(policy, s(at_s), seen)) for at_s, seen in steps]


def test_begins_with_the_least_and_keeps_it_while_nothing_is_ready(hpa_view: Seen) -> None:
    assert run(Hpa(replicas_min=2), (0, hpa_view(0.0, 0)), (15, hpa_view(0.0, 0, 2))) == [2, 2]


@pytest.mark.parametrize(
    ("utilisation", "expected"),
    [(0.80, 4), (0.88, 4), (0.72, 4), (0.89, 5), (1.00, 5), (0.60, 3), (0.10, 1), (0.0, 1)],
)
def test_the_ratio_with_its_tolerance(hpa_view: Seen, utilisation: float, expected: int) -> None:
    policy = Hpa(stabilisation_ns=0)
    run(policy, (0, hpa_view(1.0, 4)), (300, hpa_view(0.8, 4)))
    remember(policy, (("stage", CountHistory(4)),))
    assert run(policy, (600, hpa_view(utilisation, 4))) == [expected]


def test_replicas_that_start_count_as_idle_when_it_would_scale_out(hpa_view: Seen) -> None:
    policy = Hpa()
    assert run(policy, (0, hpa_view(1.0, 1)), (15, hpa_view(1.0, 1, 1)), (30, hpa_view(1.0, 2))) == [2, 2, 3]


def test_scales_in_only_to_the_largest_recommendation_of_the_window(hpa_view: Seen) -> None:
    policy = Hpa()
    run(policy, (0, hpa_view(1.0, 4)), (15, hpa_view(1.0, 5)))
    before = dict(memory_of(policy))["stage"].count
    busy, idle = hpa_view(0.8, before), hpa_view(0.2, before)
    after = run(policy, (30, busy), (45, idle), (300, idle), (329, idle), (331, idle))
    assert after[:4] == [before] * 4
    assert after[4] < before


def test_a_single_dip_is_forgotten(hpa_view: Seen) -> None:
    policy = Hpa(stabilisation_ns=s(60))
    run(policy, (0, hpa_view(1.0, 4)))
    before = dict(memory_of(policy))["stage"].count
    steps = [(t, hpa_view(0.1 if t == 90 else 0.8, before)) for t in range(15, 300, 15)]
    assert set(run(policy, *steps)) == {before}


def test_scale_out_is_limited_to_four_more_or_twice_as_many_in_a_period(hpa_view: Seen) -> None:
    policy = Hpa(target=0.1)
    assert run(policy, (0, hpa_view(1.0, 1))) == [5]  # 10 are wanted, 4 more allowed
    assert run(policy, (5, hpa_view(1.0, 5)), (14, hpa_view(1.0, 5))) == [5, 5]  # the same period
    assert run(policy, (15, hpa_view(1.0, 5))) == [10]  # 50 are wanted, twice as many allowed
    assert run(policy, (30, hpa_view(1.0, 10)), (45, hpa_view(1.0, 20))) == [20, 40]


def test_never_beyond_its_bounds(hpa_view: Seen) -> None:
    assert max(run(Hpa(replicas_max=3), *((15 * t, hpa_view(1.0, 3)) for t in range(10)))) == 3
    assert min(run(Hpa(replicas_min=2, stabilisation_ns=0), *((15 * t, hpa_view(0.0, 2)) for t in range(10)))) == 2


def test_every_stage_by_itself_and_in_words(
    stage: Callable[..., StageView], view: Callable[..., ClusterView], replica: Callable[..., ReplicaView]
) -> None:
    busy = [Bucket(0, busy_core_ns=NS_PER_S, ready_core_ns=NS_PER_S)]
    idle = [Bucket(0, busy_core_ns=0, ready_core_ns=NS_PER_S)]
    stages = (stage(*busy, name="a", replicas=[replica(1)]), stage(*idle, name="b", replicas=[replica(2)]))
    plan = next_plan(Hpa(), s(15), view(*stages))
    assert plan is not None
    assert [target.groups[0].count for target in plan.stages] == [2, 1]
    assert plan.why == "a: utilisation 1.00 of 0.8 → 2 replicas (were 1); b: utilisation 0.00 of 0.8 → 1 replica"


@pytest.mark.parametrize(
    "parameters",
    [
        {"target": 0},
        {"replicas_min": 0},
        {"replicas_min": 5, "replicas_max": 4},
        {"cores": 0},
        {"batch_max": -1},
        {"stabilisation_ns": -1},
    ],
)
def test_hpa_refuses_values_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(Hpa(**parameters))


@pytest.fixture(name="vpa_view")
def vpa_view_fixture(
    stage: Callable[..., StageView], view: Callable[..., ClusterView], replica: Callable[..., ReplicaView]
) -> Seen:
    """A cluster that used so many cores over the last minute, with one ready replica, and perhaps one that starts."""

    def make(used_cores: float, *, starting: bool = False, cores: float = 64, lives: bool = True) -> ClusterView:
        buckets = [Bucket(s(t), busy_core_ns=round(used_cores * NS_PER_S)) for t in range(60)]
        replicas = [replica(1)] if lives else []
        replicas += [replica(2, Life.STARTING)] if starting else []
        return view(stage(*buckets, replicas=replicas), cores=cores)

    return make


def vpa_cores(plan: Plan | None) -> float:
    assert plan is not None
    (target,) = plan.stages
    assert not target.in_place, "a restart, not a resize"
    (group,) = target.groups
    assert group.count == 1
    return group.spec.cores


def test_used_cores_over_the_target_rounded_up_to_what_is_on_offer(vpa_view: Seen) -> None:
    policy = Vpa(cores=(1, 2, 4, 8))
    steps = [(0, 0.0), (60, 1.0), (120, 2.0), (180, 4.0), (240, 8.0), (300, 8.0), (360, 2.0), (420, 0.1)]
    assert [vpa_cores(next_plan(policy, s(at_s), vpa_view(used))) for at_s, used in steps] == [1, 2, 4, 8, 8, 8, 4, 1]


def test_a_change_at_most_every_minute_and_none_while_one_is_under_way(vpa_view: Seen) -> None:
    policy = Vpa()
    assert [vpa_cores(next_plan(policy, s(at_s), vpa_view(1.0))) for at_s in (0, 30, 60)] == [1, 1, 2]
    assert vpa_cores(next_plan(policy, s(130), vpa_view(2.0, starting=True))) == 2
    assert vpa_cores(next_plan(policy, s(140), vpa_view(2.0, lives=False))) == 2
    plan = next_plan(policy, s(150), vpa_view(2.0))
    assert plan is not None
    assert vpa_cores(plan) == 3
    assert plan.why == "stage: 2.00 of 2 cores used, target 0.7 → 3 cores (were 2)"


def test_within_the_tolerance_nothing_changes(vpa_view: Seen) -> None:
    policy = Vpa(cores=(1, 1.05, 2))
    assert [
        vpa_cores(next_plan(policy, s(at_s), vpa_view(used))) for at_s, used in [(0, 0.0), (60, 0.76), (120, 0.78)]
    ] == [
        1,
        1,
        2,
    ]


def test_the_node_bounds_it(vpa_view: Seen) -> None:
    policy = Vpa()
    for at_s in range(0, 1200, 60):
        assert vpa_cores(next_plan(policy, s(at_s), vpa_view(4.0, cores=4))) <= 4
    assert vpa_cores(next_plan(Vpa(), 0, vpa_view(0.0, cores=0.5))) == 0.5
    with pytest.raises(InputError, match="no core count of"):
        next_plan(Vpa(cores=(8,)), 0, vpa_view(0.0, cores=4))


@pytest.mark.parametrize(
    "parameters",
    [{"target": 0}, {"target": 1.5}, {"replicas": 0}, {"cores": (0,)}, {"settle_ns": 0}],
)
def test_vpa_refuses_values_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(Vpa(**parameters))


Stage = Callable[..., StageView]
View = Callable[..., ClusterView]
Replica = Callable[..., ReplicaView]


def fresh(**parameters: Any) -> Kpa:
    """Seven requests at once for each replica."""
    return Kpa(**{"concurrency": 10.0, "utilisation": 0.7, **parameters})


def kpa_count(plan: Plan | None) -> int:
    assert plan is not None
    return plan.stages[0].groups[0].count


def at_once(*levels: float, end_s: int) -> list[Bucket]:
    """Seconds with so many requests in the stage, the last ending at `end_s`."""
    first = end_s - len(levels)
    return [Bucket(s(first + index), running_ns=round(level * NS_PER_S)) for index, level in enumerate(levels)]


@pytest.fixture(name="kpa_view")
def kpa_view_fixture(stage: Stage, view: View, replica: Replica) -> Callable[..., ClusterView]:
    def make(*levels: float, end_s: int, ready: int) -> ClusterView:
        replicas = [replica(number) for number in range(ready)]
        return view(stage(*at_once(*levels, end_s=end_s), replicas=replicas))

    return make


def test_begins_with_one(stage: Stage, view: View) -> None:
    assert kpa_count(next_plan(fresh(), 0, view(stage()))) == 1
    assert kpa_count(next_plan(fresh(initial=0), 0, view(stage()))) == 0


def test_the_stable_window_decides(kpa_view: Seen) -> None:
    assert kpa_count(next_plan(fresh(), s(60), kpa_view(*[14.0] * 60, end_s=60, ready=2))) == 2
    assert kpa_count(next_plan(fresh(), s(60), kpa_view(*[14.1] * 60, end_s=60, ready=2))) == 3
    assert kpa_count(next_plan(fresh(), s(60), kpa_view(*[0.0] * 30, *[28.0] * 30, end_s=60, ready=3))) == 2


def test_a_panic_answers_a_burst_and_does_not_scale_in(kpa_view: Seen) -> None:
    policy = fresh()
    calm = [7.0] * 54
    assert kpa_count(next_plan(policy, s(60), kpa_view(*calm, *[70.0] * 6, end_s=60, ready=1))) == 10
    assert kpa_count(next_plan(policy, s(62), kpa_view(*calm, *[7.0] * 6, end_s=62, ready=10))) == 10
    assert kpa_count(next_plan(policy, s(119), kpa_view(*[7.0] * 60, end_s=119, ready=10))) == 10
    later = kpa_count(next_plan(policy, s(122), kpa_view(*[7.0] * 60, end_s=122, ready=10)))
    assert later == 5, "the panic is a stable window past; one step at most halves"
    assert kpa_count(next_plan(policy, s(124), kpa_view(*[7.0] * 60, end_s=124, ready=5))) == 2
    assert kpa_count(next_plan(policy, s(126), kpa_view(*[7.0] * 60, end_s=126, ready=2))) == 1


def test_less_than_twice_what_is_ready_is_no_panic(kpa_view: Seen) -> None:
    plan = next_plan(fresh(), s(60), kpa_view(*[14.0] * 54, *[20.0] * 6, end_s=60, ready=2))
    assert plan is not None
    assert kpa_count(plan) == 3
    assert "panic" not in plan.why


def test_one_step_is_bounded(kpa_view: Seen) -> None:
    assert kpa_count(next_plan(fresh(), s(60), kpa_view(*[0.0] * 59, 7.0, end_s=60, ready=8))) == 4, "halved at most"
    assert kpa_count(next_plan(fresh(replicas_max=8), s(60), kpa_view(*[700.0] * 60, end_s=60, ready=2))) == 8


def test_the_last_replica_goes_after_its_own_delay(kpa_view: Seen) -> None:
    policy = fresh()
    none = [0.0] * 60
    assert kpa_count(next_plan(policy, s(60), kpa_view(*none, end_s=60, ready=1))) == 1
    plan = next_plan(policy, s(80), kpa_view(*none, end_s=80, ready=1))
    assert plan is not None
    assert kpa_count(plan) == 1
    assert "→ 1 replica, none in 10 s" in plan.why
    assert kpa_count(next_plan(policy, s(90), kpa_view(*none, end_s=90, ready=1))) == 0
    assert kpa_count(next_plan(fresh(replicas_min=1), s(60), kpa_view(*none, end_s=60, ready=1))) == 1


def test_a_request_in_between_starts_the_delay_anew(kpa_view: Seen) -> None:
    policy = fresh()
    none = [0.0] * 60
    next_plan(policy, s(60), kpa_view(*none, end_s=60, ready=1))
    next_plan(policy, s(80), kpa_view(*none[:-1], 1.0, end_s=80, ready=1))
    assert kpa_count(next_plan(policy, s(140), kpa_view(*none, end_s=140, ready=1))) == 1
    assert kpa_count(next_plan(policy, s(170), kpa_view(*none, end_s=170, ready=1))) == 0


def test_whoever_waits_gets_a_replica_at_once(stage: Stage, view: View, visit: Callable[..., Visit]) -> None:
    waiting = stage(*at_once(*[0.0] * 60, end_s=60), queue=[visit(1, arrived_ms=60_000)])
    assert kpa_count(next_plan(fresh(), s(60), view(waiting))) == 1


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
            counts.append(kpa_count(next_plan(policy, s(now_s), view(shown))))
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
    assert kpa_count(next_plan(policy, s(10), view(starting))) == 1
    for now_s in (12, 72):
        shown = stage(*at_once(*[300.0] * min(60, now_s), end_s=now_s), queue=queue, replicas=[replica(1)])
        assert kpa_count(next_plan(policy, s(now_s), view(shown))) == 1
    for now_s in (74, 82):
        shown = stage(*at_once(*[300.0] * 60, end_s=now_s), queue=queue, replicas=[replica(1)])
        last = kpa_count(next_plan(policy, s(now_s), view(shown)))
    assert last > 1


def test_without_a_cold_start_the_same_backlog_is_demand(kpa_view: Seen) -> None:
    assert kpa_count(next_plan(fresh(), s(60), kpa_view(*[300.0] * 60, end_s=60, ready=1))) == 43


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
        {"stable_ns": s(1)},
    ],
)
def test_kpa_refuses_values_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(Kpa(**parameters))
