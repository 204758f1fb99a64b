"""Larger and smaller replicas by restart."""

from collections.abc import Callable
from typing import Any

import pytest

from sloop.core.views import Bucket, ClusterView, ReplicaView, StageView
from sloop.errors import InputError
from sloop.policies.scale.vpa import Vpa
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Life, Plan

Seen = Callable[..., ClusterView]


@pytest.fixture(name="seen")
def seen_fixture(
    stage: Callable[..., StageView], view: Callable[..., ClusterView], replica: Callable[..., ReplicaView]
) -> Seen:
    """A cluster that used so many cores over the last minute, with one ready replica, and perhaps one that starts."""

    def make(used_cores: float, *, starting: bool = False, cores: float = 64, lives: bool = True) -> ClusterView:
        buckets = [Bucket(s(t), busy_core_ns=round(used_cores * NS_PER_S)) for t in range(60)]
        replicas = [replica(1)] if lives else []
        replicas += [replica(2, Life.STARTING)] if starting else []
        return view(stage(*buckets, replicas=replicas), cores=cores)

    return make


def size(plan: Plan | None) -> float:
    assert plan is not None
    (target,) = plan.stages
    assert not target.in_place, "a restart, not a resize"
    (group,) = target.groups
    assert group.count == 1
    return group.spec.cores


def test_used_cores_over_the_target_rounded_up_to_what_is_on_offer(seen: Seen) -> None:
    policy = Vpa(cores=(1, 2, 4, 8))
    steps = [(0, 0.0), (60, 1.0), (120, 2.0), (180, 4.0), (240, 8.0), (300, 8.0), (360, 2.0), (420, 0.1)]
    assert [size(policy.plan(s(at_s), seen(used))) for at_s, used in steps] == [1, 2, 4, 8, 8, 8, 4, 1]


def test_a_change_at_most_every_minute_and_none_while_one_is_under_way(seen: Seen) -> None:
    policy = Vpa()
    assert [size(policy.plan(s(at_s), seen(1.0))) for at_s in (0, 30, 60)] == [1, 1, 2]
    assert size(policy.plan(s(130), seen(2.0, starting=True))) == 2
    assert size(policy.plan(s(140), seen(2.0, lives=False))) == 2
    plan = policy.plan(s(150), seen(2.0))
    assert plan is not None
    assert size(plan) == 3
    assert plan.why == "stage: 2.00 of 2 cores used, target 0.7 → 3 cores (were 2)"


def test_within_the_tolerance_nothing_changes(seen: Seen) -> None:
    policy = Vpa(cores=(1, 1.05, 2))
    assert [size(policy.plan(s(at_s), seen(used))) for at_s, used in [(0, 0.0), (60, 0.76), (120, 0.78)]] == [1, 1, 2]


def test_the_node_bounds_it(seen: Seen) -> None:
    policy = Vpa()
    for at_s in range(0, 1200, 60):
        assert size(policy.plan(s(at_s), seen(4.0, cores=4))) <= 4
    assert size(Vpa().plan(0, seen(0.0, cores=0.5))) == 0.5
    with pytest.raises(InputError, match="no core count of"):
        Vpa(cores=(8,)).plan(0, seen(0.0, cores=4))


@pytest.mark.parametrize(
    "parameters",
    [{"target": 0}, {"target": 1.5}, {"tolerance": -1}, {"replicas": 0}, {"cores": (0,)}, {"settle_ns": 0}],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Vpa(**parameters)
