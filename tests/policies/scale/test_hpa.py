"""Kubernetes' horizontal scaling: ratio, tolerance, replicas that start, stabilisation window, limits."""

from collections.abc import Callable
from typing import Any

import pytest

from sloop.core.views import Bucket, ClusterView, ReplicaView, StageView
from sloop.errors import InputError
from sloop.policies.scale.hpa import Hpa
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Life, Plan

Seen = Callable[..., ClusterView]


@pytest.fixture(name="seen")
def seen_fixture(
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
    return [count(policy.plan(s(at_s), seen)) for at_s, seen in steps]


def test_begins_with_the_least_and_keeps_it_while_nothing_is_ready(seen: Seen) -> None:
    assert run(Hpa(replicas_min=2), (0, seen(0.0, 0)), (15, seen(0.0, 0, 2))) == [2, 2]


@pytest.mark.parametrize(
    ("utilisation", "expected"),
    [(0.80, 4), (0.88, 4), (0.72, 4), (0.89, 5), (1.00, 5), (0.60, 3), (0.10, 1), (0.0, 1)],
)
def test_the_ratio_with_its_tolerance(seen: Seen, utilisation: float, expected: int) -> None:
    policy = Hpa(stabilisation_ns=0)
    run(policy, (0, seen(1.0, 4)), (300, seen(0.8, 4)))
    policy._past["stage"].count = 4
    assert run(policy, (600, seen(utilisation, 4))) == [expected]


def test_replicas_that_start_count_as_idle_when_it_would_scale_out(seen: Seen) -> None:
    policy = Hpa()
    assert run(policy, (0, seen(1.0, 1)), (15, seen(1.0, 1, 1)), (30, seen(1.0, 2))) == [2, 2, 3]


def test_scales_in_only_to_the_largest_recommendation_of_the_window(seen: Seen) -> None:
    policy = Hpa()
    run(policy, (0, seen(1.0, 4)), (15, seen(1.0, 5)))
    before = policy._past["stage"].count
    busy, idle = seen(0.8, before), seen(0.2, before)
    after = run(policy, (30, busy), (45, idle), (300, idle), (329, idle), (331, idle))
    assert after[:4] == [before] * 4
    assert after[4] < before


def test_a_single_dip_is_forgotten(seen: Seen) -> None:
    policy = Hpa(stabilisation_ns=s(60))
    run(policy, (0, seen(1.0, 4)))
    before = policy._past["stage"].count
    steps = [(t, seen(0.1 if t == 90 else 0.8, before)) for t in range(15, 300, 15)]
    assert set(run(policy, *steps)) == {before}


def test_scale_out_is_limited_to_four_more_or_twice_as_many_in_a_period(seen: Seen) -> None:
    policy = Hpa(target=0.1)
    assert run(policy, (0, seen(1.0, 1))) == [5]  # 10 are wanted, 4 more allowed
    assert run(policy, (5, seen(1.0, 5)), (14, seen(1.0, 5))) == [5, 5]  # the same period
    assert run(policy, (15, seen(1.0, 5))) == [10]  # 50 are wanted, twice as many allowed
    assert run(policy, (30, seen(1.0, 10)), (45, seen(1.0, 20))) == [20, 40]


def test_never_beyond_its_bounds(seen: Seen) -> None:
    assert max(run(Hpa(replicas_max=3), *((15 * t, seen(1.0, 3)) for t in range(10)))) == 3
    assert min(run(Hpa(replicas_min=2, stabilisation_ns=0), *((15 * t, seen(0.0, 2)) for t in range(10)))) == 2


def test_every_stage_by_itself_and_in_words(
    stage: Callable[..., StageView], view: Callable[..., ClusterView], replica: Callable[..., ReplicaView]
) -> None:
    busy = [Bucket(0, busy_core_ns=NS_PER_S, ready_core_ns=NS_PER_S)]
    idle = [Bucket(0, busy_core_ns=0, ready_core_ns=NS_PER_S)]
    stages = (stage(*busy, name="a", replicas=[replica(1)]), stage(*idle, name="b", replicas=[replica(2)]))
    plan = Hpa().plan(s(15), view(*stages))
    assert plan is not None
    assert [target.groups[0].count for target in plan.stages] == [2, 1]
    assert plan.why == "a: utilisation 1.00 of 0.8 → 2 replicas (were 1); b: utilisation 0.00 of 0.8 → 1 replica"


@pytest.mark.parametrize(
    "parameters",
    [
        {"target": 0},
        {"tolerance": -1},
        {"replicas_min": 0},
        {"replicas_min": 5, "replicas_max": 4},
        {"cores": 0},
        {"batch_max": -1},
        {"window_ns": 0},
        {"stabilisation_ns": -1},
    ],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Hpa(**parameters)
