"""Vertical scaling alone."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from sloop.core.views import Bucket, ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.scale.vertical import Vertical
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Amdahl
from sloop.profile.profile import Profile
from sloop.units import s
from sloop.vocabulary import Plan

OD = Amdahl(148.81709977526535, 5.432908755854746, 37.49369666805188, -15.475937098807677)
OC = Amdahl(34.69333807478468, 19.478793326347812, 2.058115261491216, 14.259440042600422)

Seen = Callable[..., ClusterView]


@pytest.fixture(name="seen")
def seen_fixture(stage: Callable[..., StageView], view: Callable[..., ClusterView]) -> Seen:
    """The video pipeline at a steady rate."""

    def make(
        rate_rps: int, *, slo_ms: float = 780, cores: float = 64, plan: Plan | None = None, quiet: bool = False
    ) -> ClusterView:
        buckets = [] if quiet else [Bucket(s(t), arrivals=rate_rps) for t in range(10)]
        stages = [
            stage(
                *buckets,
                name=name,
                slo_ms=slo_ms,
                belief=Estimate(Profile(latency_ms=form, max_batch=8, max_cores=8)),
            )
            for name, form in (("detect", OD), ("classify", OC))
        ]
        return view(*stages, cores=cores, plan=plan)

    return make


def sizes(plan: Plan | None) -> list[tuple[float, int]]:
    assert plan is not None
    assert all(target.in_place and len(target.groups) == 1 for target in plan.stages)
    assert all(target.groups[0].count == 1 for target in plan.stages)
    return [(target.groups[0].spec.cores, target.batch_max) for target in plan.stages]


def test_cores_up_and_down_with_the_rate(seen: Seen) -> None:
    policy = Vertical(throughput="pure")
    found = [sizes(policy.plan(0, seen(rate))) for rate in (5, 10, 20, 5, 0)]
    assert found == [[(1, 1), (1, 1)], [(2, 1), (1, 1)], [(6, 1), (1, 3)], [(1, 1), (1, 1)], [(1, 1), (1, 1)]]


def test_beyond_what_they_carry_all_that_they_can(seen: Seen) -> None:
    plan = Vertical().plan(0, seen(40))
    assert sizes(plan) == [(8, 1), (3, 1)]
    assert plan is not None
    assert not plan.feasible
    assert plan.saturated == ("detect", "classify")
    assert plan.why.endswith("saturated: these carry 24")


def test_the_node_bounds_it(seen: Seen) -> None:
    plan = Vertical().plan(0, seen(40, cores=4))
    assert plan is not None
    assert sum(cores for cores, _ in sizes(plan)) <= 4


def test_before_anything_has_come(seen: Seen) -> None:
    assert sizes(Vertical(initial_batch=4).plan(0, seen(0, quiet=True))) == [(1, 4), (1, 4)]


def test_a_deadline_that_nothing_keeps(seen: Seen) -> None:
    first = Vertical().plan(0, seen(10, slo_ms=60))
    assert first is not None
    assert not first.feasible
    assert "6 ms more than the 60 ms" in first.why
    kept = structs.replace(first, why="kept", feasible=True)
    again = Vertical().plan(0, seen(10, slo_ms=60, plan=kept))
    assert again is not None
    assert again.stages == kept.stages
    assert not again.feasible


@pytest.mark.parametrize(
    "parameters",
    [
        {"replicas": 0},
        {"unit": 0},
        {"cores_max": 0},
        {"batch_max": 0},
        {"margin": 0},
        {"initial_batch": 0},
        {"period_ns": 0},
    ],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Vertical(**parameters)
