"""Sponge's decisions: what it plans for, how it chooses, what it says, what it does where nothing holds."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Bucket
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.batch import WorkConserving
from sloop.policies.drop import Age
from sloop.policies.order import Edf
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.systems import build_system
from sloop.testing.views import make_stage, make_view, make_visit
from sloop.units import ms, s
from sloop.vocabulary import Plan, Slot, StagePlan
from sloop_systems.sponge.policy import Sponge
from tests.asked import next_plan


def second(*slacks_ms: float, start_s: float = 0) -> Bucket:
    """A bucket of a second in which a request with each of these budgets arrived."""
    return Bucket(s(start_s), arrivals=len(slacks_ms), slack_ns=[ms(slack) for slack in slacks_ms])


def chosen(plan: Plan | None) -> tuple[float, int]:
    assert plan is not None
    (target,) = plan.stages
    (group,) = target.groups
    assert group.count == 1
    return group.spec.cores, target.batch_max


def test_published_parameters() -> None:
    system = build_system("sponge")
    assert (system.kind, system.policies.scale) == (
        "system",
        Sponge(planning_set="rate", criterion="burst", budget="clmax", margin=0.9, batch_max=16, period_ns=s(1)),
    )
    assert (system.policies.order, system.policies.batch, system.policies.drop) == (Edf(), WorkConserving(), Age(1.0))


def test_starts_from_one_core_and_batches_of_one() -> None:
    plan = next_plan(Sponge(), 0, make_view(make_stage()))
    assert chosen(plan) == (1, 1)
    assert plan is not None
    assert (plan.why, plan.feasible, plan.saturated) == ("no requests → 1 core, batch 1", True, ())


def test_a_second_of_the_published_run() -> None:
    plan = next_plan(Sponge(margin=1.0), s(1), make_view(make_stage(second(*[900.0] * 20))))
    assert plan is not None
    assert chosen(plan) == (8, 4)
    assert plan.why == (
        "20 requests in 1 s, tightest budget 900 ms → 8 cores, batch 4: 5 × 178 ms + 100 ms of network < 1 × 1000 ms"
    )


@settings(max_examples=50)
@given(st.lists(st.integers(650, 1000), min_size=20, max_size=20))
def test_what_it_chooses_holds_for_the_tightest(slacks_ms: list[int]) -> None:
    buckets = (second(*slacks_ms),)
    plan = next_plan(Sponge(margin=0.9), s(1), make_view(make_stage(*buckets), rates={"stage": 20.0}))
    assert plan is not None
    cores, batch = chosen(plan)
    latency_ms = YOLOV5S_S.latency_ms.latency_ms(batch, cores)
    holds = -(-20 // batch) * latency_ms + 1000 - min(slacks_ms) < 900 and 1000 * batch / latency_ms >= 20
    assert holds == plan.feasible
    if not plan.feasible:
        assert cores == 16


def test_a_longer_queue_than_a_second_brings_is_planned_for() -> None:
    queue = [make_visit(number, deadline_ms=2000, arrived_ms=1000, sent_ms=1000) for number in range(40)]
    rate_only = next_plan(Sponge(margin=1.0), s(1), make_view(make_stage(second(*[1000.0] * 20))))
    with_queue = next_plan(Sponge(margin=1.0), s(1), make_view(make_stage(second(*[1000.0] * 20), queue=queue)))
    assert chosen(with_queue)[0] > chosen(rate_only)[0]


def test_planning_for_the_queue_alone_sits_on_the_throughput_floor() -> None:
    plan = next_plan(Sponge(planning_set="queue"), s(1), make_view(make_stage(second(*[900.0] * 20))))
    cores, batch = chosen(plan)
    assert (cores, batch) == (6, 4)
    assert 1000 * batch / YOLOV5S_S.latency_ms.latency_ms(batch, cores) >= 20


def test_steady_arrivals_need_less_than_a_burst() -> None:
    seen = make_stage(second(*[900.0] * 20))
    steady = next_plan(Sponge(criterion="steady", margin=1.0), s(1), make_view(seen))
    assert chosen(steady) == (6, 4)
    assert steady is not None
    assert "150 ms to fill + 100 ms of network ≤ 1 × 1000 ms" in steady.why


def test_one_slow_client_costs_less_when_each_batch_has_its_own_budget() -> None:
    seen = make_view(make_stage(second(600.0, *[950.0] * 19)))
    clmax = next_plan(Sponge(margin=1.0), s(1), seen)
    per_batch = next_plan(Sponge(margin=1.0, budget="per_batch"), s(1), seen)
    assert clmax is not None
    assert not clmax.feasible
    assert per_batch is not None
    assert per_batch.feasible
    assert chosen(per_batch)[0] < 16


def test_unknown_budgets_are_taken_for_the_tightest() -> None:
    few = next_plan(
        Sponge(margin=1.0, budget="per_batch"), s(1), make_view(make_stage(second(800.0)), rates={"stage": 20.0})
    )
    all_same = next_plan(Sponge(margin=1.0, budget="per_batch"), s(1), make_view(make_stage(second(*[800.0] * 20))))
    assert chosen(few) == chosen(all_same)


def test_a_rate_known_beforehand_is_planned_for_from_the_start() -> None:
    plan = next_plan(Sponge(rate_rps=20.0), 0, make_view(make_stage()))
    assert plan is not None
    assert chosen(plan) == (8, 4)
    assert plan.why.startswith("20 requests in 1 s, tightest budget 1000 ms → 8 cores, batch 4")


def test_looks_back_as_far_as_it_is_told() -> None:
    seen = make_view(make_stage(second(*[700.0] * 20), second(*[990.0] * 20, start_s=1)))
    assert chosen(next_plan(Sponge(lookback=2), s(2), seen))[0] > chosen(next_plan(Sponge(), s(2), seen))[0]


FADE = second(*[500.0] * 20)


@pytest.mark.parametrize(
    ("infeasible", "expected", "why"),
    [
        ("dry_run", (16, 7), "no setting holds → all 16 cores, batch 7: 14 of 20 in time"),
        ("crude", (16, 10), "no setting holds; all 16 cores, batch 10"),
        ("keep", (3, 5), "no setting holds; kept 3 cores, batch 5"),
    ],
)
def test_where_nothing_holds(infeasible: Any, expected: tuple[float, int], why: str) -> None:
    before = next_plan(Sponge(cores=(3,), batch_max=5, infeasible="crude"), 0, make_view(make_stage(FADE)))
    plan = next_plan(Sponge(infeasible=infeasible), s(1), make_view(make_stage(FADE), plan=before))
    assert plan is not None
    assert chosen(plan) == expected
    assert not plan.feasible
    assert plan.why == f"20 requests in 1 s, tightest budget 500 ms: {why}"


@pytest.mark.parametrize("rate_rps", [0.0, 20.0])
def test_a_backlog_that_is_late_already_is_worked_off_as_fast_as_can_be(
    rate_rps: float,
) -> None:
    """Whatever the batch nobody is in time; the smallest that keeps up with the arrivals would keep the backlog."""
    late = [make_visit(number, deadline_ms=10) for number in range(40)]
    plan = next_plan(
        Sponge(), s(1), make_view(make_stage(second(*[900.0] * 20), queue=late), rates={"stage": rate_rps})
    )
    assert chosen(plan) == (16, 16)


def test_keeping_starts_from_the_smallest() -> None:
    assert chosen(next_plan(Sponge(infeasible="keep"), s(1), make_view(make_stage(FADE)))) == (1, 1)


def test_keeping_what_is_no_longer_on_offer_starts_from_the_smallest() -> None:
    before = next_plan(Sponge(cores=(12,)), 0, make_view(make_stage(FADE)))
    plan = next_plan(Sponge(cores=(1, 2), infeasible="keep"), s(1), make_view(make_stage(FADE), plan=before))
    assert chosen(plan) == (1, 1)


def test_keeping_after_a_rest_starts_from_the_smallest() -> None:
    """An application at rest has a plan without replicas."""
    resting = Plan((StagePlan("stage", (), 1),), "at rest")
    impossible = second(*[1.0] * 20)
    assert chosen(next_plan(Sponge(infeasible="keep"), s(1), make_view(make_stage(impossible), plan=resting))) == (1, 1)


def test_says_when_one_replica_is_not_enough() -> None:
    plan = next_plan(Sponge(), s(1), make_view(make_stage(second(*[990.0] * 200))))
    assert plan is not None
    assert plan.saturated == ("stage",)
    assert not plan.feasible
    assert "saturated: 200 requests/s, and all 16 cores serve 28.78" in plan.why


def test_grows_at_once_and_shrinks_after_k_decisions() -> None:
    policy = Sponge(hysteresis=3)
    easy, hard = make_view(make_stage(second(*[990.0] * 20))), make_view(make_stage(second(*[850.0] * 20)))
    small, large = chosen(next_plan(Sponge(), 0, easy)), chosen(next_plan(Sponge(), 0, hard))
    assert small[0] < large[0]
    answers = [chosen(next_plan(policy, s(at), seen)) for at, seen in enumerate([easy, hard, easy, easy, easy])]
    assert answers == [small, large, large, large, small]


@pytest.mark.parametrize(
    ("policy", "node_cores", "choices"),
    [
        (Sponge(), 64, range(1, 17)),
        (Sponge(), 4, range(1, 5)),
        (Sponge(), 0.5, [0.5]),
        (Sponge(cores=(0.25, 0.5, 2, 1, 0.75)), 2, [0.25, 0.5, 0.75, 1, 2]),
        (Sponge(cores=(1, 2, 4, 8)), 4, [1, 2, 4]),
    ],
)
def test_cores_to_choose_from_and_one_look_at_the_belief_for_each(
    policy: Sponge, node_cores: float, choices: Sequence[float]
) -> None:
    asked: list[float] = []

    class Watched(Estimate):
        def costs_ns(self, slot: Slot) -> tuple[int, ...]:
            asked.append(slot.cores)
            return super().costs_ns(slot)

    watched = Watched(YOLOV5S_S, variant="v", hardware="local")
    next_plan(policy, s(1), make_view(make_stage(second(*[900.0] * 200), beliefs=(watched,)), cores=node_cores))
    assert asked == list(choices)


def test_core_counts_that_no_node_has_are_refused() -> None:
    with pytest.raises(InputError, match=r"no core count of .* fits\nhelp: a node has 2 cores"):
        next_plan(Sponge(cores=(4, 8)), 0, make_view(make_stage(), cores=2))


@pytest.mark.parametrize(
    "parameters",
    [{"margin": 0}, {"margin": 1.1}, {"batch_max": 0}, {"hysteresis": 0}, {"lookback": 0}, {"cores": (1, 0)}],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(Sponge(**parameters))
