"""Inferline as a policy."""

from collections.abc import Callable
from typing import Any

import pytest

from sloop.core.views import ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.scale.inferline import Inferline
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Quadratic
from sloop.profile.profile import Profile
from sloop.vocabulary import Plan

Stage = Callable[..., StageView]
View = Callable[..., ClusterView]


def flat(alone_ms: float, each_ms: float) -> Estimate:
    """d(b) = alone + (b - 1) each."""
    form = Quadratic(alpha=0.0, beta=each_ms, gamma=alone_ms - each_ms)
    profile = Profile(latency_ms=form, max_batch=8, max_cores=4, hardware="h", origin="assumed", source="test")
    return Estimate(profile, correct=False)


def shown(stage: Stage, view: View, rate_rps: float, *, slo_ms: float = 1000, **more: Any) -> ClusterView:
    """Two stages, the second much dearer than the first."""
    first = stage(name="first", belief=flat(50, 10), slo_ms=slo_ms)
    second = stage(name="second", belief=flat(200, 40), slo_ms=slo_ms)
    return view(first, second, rates={"first": rate_rps, "second": rate_rps}, **more)


def sizes(plan: Plan | None) -> list[tuple[int, int]]:
    """(replicas, batch) of each stage."""
    assert plan is not None
    return [(target.groups[0].count, target.batch_max) for target in plan.stages]


def test_the_first_takes_the_time_and_the_second_pays(stage: Stage, view: View) -> None:
    assert sizes(Inferline().plan(0, shown(stage, view, 0.0))) == [(1, 1), (1, 1)]
    plan = Inferline().plan(0, shown(stage, view, 30.0, slo_ms=600))
    assert sizes(plan) == [(1, 8), (6, 1)]
    fuller = Inferline(full=True).plan(0, shown(stage, view, 30.0, slo_ms=600))
    assert sum(count for count, _ in sizes(fuller)) < 7
    assert plan is not None
    assert plan.feasible
    assert [target.wait_ns > 0 for target in plan.stages] == [True, False]


@pytest.mark.parametrize(
    "parameters", [{"cores": 0}, {"batch_max": 0}, {"margin": 0}, {"headroom": -1}, {"initial_rps": -1}]
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Inferline(**parameters)
