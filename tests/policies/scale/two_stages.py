"""Two stages, the second much dearer than the first, as FA2's baselines are shown them."""

from collections.abc import Callable
from typing import Any

from sloop.core.views import ClusterView, StageView
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
