"""FA2's rule for one model as a policy: what it plans from, when it keeps, what it says."""

from collections.abc import Callable
from typing import Any

import pytest

from sloop.core.views import Bucket, ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.scale.fa2_single import Fa2Single
from sloop.units import ms, s
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan

Stage = Callable[..., StageView]
View = Callable[..., ClusterView]


def second(slack_ms: float, arrivals: int = 20) -> Bucket:
    return Bucket(0, arrivals=arrivals, slack_ns=[ms(slack_ms)] * arrivals)


def count(plan: Plan | None) -> int:
    assert plan is not None
    return plan.stages[0].groups[0].count


def test_starts_from_what_it_is_told(stage: Stage, view: View) -> None:
    plan = Fa2Single().plan(0, view(stage()))
    assert plan is not None
    assert plan.stages == (StagePlan("stage", (Group(ReplicaSpec("stage", "v", 1.0), 1),), 1),)
    assert count(Fa2Single(initial=4).plan(0, view(stage()))) == 4


def test_more_replicas_for_less_time(stage: Stage, view: View) -> None:
    counts = [count(Fa2Single().plan(s(1), view(stage(second(slack_ms))))) for slack_ms in (990, 900, 800, 700)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    plan = Fa2Single().plan(s(1), view(stage(second(990))))
    assert plan is not None
    assert plan.why == (
        "20 requests/s, tightest budget 990 ms → 5 replicas, batch 1: 166 ms + 4 × 166 ms + 10 ms on the way < 900 ms"
    )


def test_keeps_the_plan_where_no_count_holds(stage: Stage, view: View) -> None:
    before = Fa2Single(initial=3).plan(0, view(stage()))
    assert before is not None
    plan = Fa2Single().plan(s(1), view(stage(second(100)), plan=before))
    assert plan is not None
    assert plan.stages == before.stages
    assert not plan.feasible
    assert "no count up to 16 holds; kept as it was" in plan.why


def test_hysteresis_keeps_the_largest_of_the_last_decisions(stage: Stage, view: View) -> None:
    policy, easy, hard = Fa2Single(hysteresis=2), view(stage(second(990))), view(stage(second(700)))
    small, large = count(Fa2Single().plan(0, easy)), count(Fa2Single().plan(0, hard))
    assert [count(policy.plan(s(at), seen)) for at, seen in enumerate([easy, hard, easy, easy])] == [
        small,
        large,
        large,
        small,
    ]


@pytest.mark.parametrize(
    "parameters",
    [{"cores": 0}, {"replicas_max": 0}, {"initial": -1}, {"batch_max": 0}, {"margin": 2}, {"hysteresis": 0}],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Fa2Single(**parameters)
