"""The same cluster always."""

from collections.abc import Callable

import pytest

from sloop.core.views import ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.scale.static import Static, StaticStage
from sloop.vocabulary import Group, ReplicaSpec, StagePlan


def test_the_same_for_every_stage_but_where_it_says_otherwise(
    stage: Callable[..., StageView], view: Callable[..., ClusterView]
) -> None:
    policy = Static(replicas=2, cores=8, stages={"second": StaticStage(cores=0.5, batch_max=1)})
    plan = policy.plan(0, view(stage(name="first"), stage(name="second")))
    assert plan is not None
    assert plan.feasible
    assert plan.stages == (
        StagePlan("first", (Group(ReplicaSpec("first", "v", 8), 2),), 11),
        StagePlan("second", (Group(ReplicaSpec("second", "v", 0.5), 2),), 1),
    )


def test_a_stage_that_is_not_there_is_named(stage: Callable[..., StageView], view: Callable[..., ClusterView]) -> None:
    with pytest.raises(InputError, match="no stage 'third'\nhelp: the application's stages are stage"):
        Static(stages={"third": StaticStage()}).plan(0, view(stage()))


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Static(replicas=-1),
        lambda: Static(replicas=100_001),
        lambda: Static(cores=0),
        lambda: Static(cores=1e300),
        lambda: Static(batch_max=-1),
        lambda: Static(period_ns=0),
        lambda: Static(stages={"stage": StaticStage(cores=-1)}),
    ],
)
def test_refuses_what_cannot_be(policy: Callable[[], Static]) -> None:
    with pytest.raises(InputError, match="must be"):
        policy()
