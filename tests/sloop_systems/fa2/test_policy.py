"""Planners of equal replicas as policies: views as problems, plans for any graph, reasons, and what fails."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Bucket, ClusterView, Traffic
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile, Quadratic
from sloop.solvers import budget
from sloop.solvers.budget import IndexedPath
from sloop.systems.registry import POLICIES, build
from sloop.testing.views import make_belief, make_stage, make_view
from sloop.units import ms, s
from sloop.vocabulary import Group, Path, Plan, ReplicaSpec, Slot, StagePlan
from sloop_systems.fa2 import policy, solver
from sloop_systems.fa2.experiments.application import CPU, Hardware, problem, profile_of
from sloop_systems.fa2.policy import (
    Ds2,
    EqualReplicasProblem,
    Fa2,
    Fa2Single,
    Grandslam,
    Inferline,
    equal_replicas_problem,
)
from sloop_systems.fa2.solver import Fa2Choice, Fa2Solution
from tests.asked import next_plan


def published(
    rate_rps: float,
    *,
    hardware: Hardware = CPU,
    paths: int = 3,
    cores: float = 64,
    **more: Any,
) -> ClusterView:
    """The published application at a rate."""
    given = problem(hardware, paths, rate_rps)
    bucket = Bucket(0, arrivals=round(rate_rps))
    stages = [
        make_stage(bucket, name=own, belief=Estimate(profile_of(hardware, own), correct=False)) for own in given.names
    ]
    named = [Path(tuple(given.names[index] for index in path.stages), ms(path.slo_ms)) for path in given.paths]
    rates = {own.name: own.rate_rps for own in given.stages}
    return make_view(*stages, cores=cores, rates=rates, paths=named, **more)


def counts(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [group.count for target in plan.stages for group in target.groups]


def chain(beliefs: Sequence[Estimate], rate_rps: float, slo_ms: float, **more: Any) -> ClusterView:
    stages = [make_stage(name=f"s{at}", belief=belief, slo_ms=slo_ms) for at, belief in enumerate(beliefs)]
    return make_view(*stages, rates={own.name: rate_rps for own in stages}, **more)


def test_the_published_application() -> None:
    plan = next_plan(Fa2(), 0, published(30))
    assert plan is not None
    assert sum(counts(plan)) == 17
    assert plan.feasible
    assert plan.why.startswith("30 requests/s → 17 replicas of 1 core: OBJD ")
    assert "; tightest: OBJD → " in plan.why
    batched = [target for target in plan.stages if target.batch_max > 1]
    assert batched
    assert all(target.wait_ns > 0 for target in batched)
    assert all(target.wait_ns == 0 for target in plan.stages if target.batch_max == 1)


def test_six_paths_that_meet() -> None:
    assert sum(counts(next_plan(Fa2(), 0, published(24, paths=6)))) == 42


def test_at_rest_one_of_each() -> None:
    plan = next_plan(Fa2(), 0, published(0))
    assert plan is not None
    assert set(counts(plan)) == {1}
    assert {target.batch_max for target in plan.stages} == {1}
    assert plan.feasible


def test_before_anything_was_seen_it_believes_what_it_is_told() -> None:
    shown = chain([make_belief()], 0.0, 1000)
    assert counts(next_plan(Fa2(), 0, shown)) == [1]
    assert counts(next_plan(Fa2(initial_rps=20), 0, shown)) == counts(
        next_plan(Fa2(), 0, chain([make_belief()], 20.0, 1000))
    )


def test_fractions_of_a_core_are_smaller_replicas() -> None:
    plan = next_plan(Fa2(cores=0.5), 0, chain([make_belief()], 3.0, 2000))
    assert plan is not None
    assert plan.stages[0].groups[0].spec.cores == 0.5
    assert "replica of 0.5 cores" in plan.why or "replicas of 0.5 cores" in plan.why


def test_replicas_are_no_larger_than_the_largest_node() -> None:
    plan = next_plan(Fa2(), 0, chain([make_belief()], 1.0, 5000, cores=0.5))
    assert plan is not None
    assert plan.stages[0].groups[0].spec.cores == 0.5


def test_a_deadline_below_the_time_alone_is_said_and_demand_followed() -> None:
    own = make_belief()
    alone_ms = own.costs_ns(own.slot(1.0))[1] / 1e6
    plan = next_plan(Fa2(), 0, chain([own, own], 20.0, 100))
    assert plan is not None
    assert not plan.feasible
    assert {target.batch_max for target in plan.stages} == {1}
    assert counts(plan) == [-int(-20 * alone_ms // 1000)] * 2
    alone, over = f"{2 * alone_ms:.4g} ms", f"{2 * alone_ms - 100:.4g} ms"
    assert plan.why.startswith(f"s0 → s1 takes {alone} even one at a time, {over} more than its 100 ms; most of it s0")


def test_what_the_nodes_do_not_hold_is_cut_down_evenly() -> None:
    plan = next_plan(Fa2(), 0, published(60, cores=20))
    assert plan is not None
    assert not plan.feasible
    assert 15 <= sum(counts(plan)) <= 20
    assert plan.why.startswith("the nodes hold 20 replicas, enough for ")
    plan = next_plan(Fa2(), 0, published(60, cores=3))
    assert set(counts(plan)) == {1}


def test_a_solver_that_gives_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = next_plan(Fa2(), 0, published(12, paths=6))
    assert before is not None
    monkeypatch.setattr(solver, "_by_forests", lambda *_: None)
    monkeypatch.setattr(solver, "cheapest_by_milp", lambda *_, **__: budget.GAVE_UP)
    monkeypatch.setattr(policy, "_solution", policy._solution.__wrapped__)  # other tests have solved it
    plan = next_plan(Fa2(), 0, published(24, paths=6, plan=before))
    assert plan is not None
    assert plan.stages == before.stages
    assert not plan.feasible
    assert plan.gave_up
    assert plan.why == "the solver gave up after 2000 nodes: kept as it was"
    first = next_plan(Fa2(), 0, published(24, paths=6))
    assert first is not None
    assert not first.feasible
    assert sum(counts(first)) == 54, "one at a time, at least"


def test_headroom_and_margin_cost_replicas() -> None:
    plain = sum(counts(next_plan(Fa2(), 0, published(30))))
    assert sum(counts(next_plan(Fa2(headroom=0.2), 0, published(30)))) > plain
    assert sum(counts(next_plan(Fa2(margin=0.6), 0, published(30)))) > plain


def test_variants_are_the_first_unless_named() -> None:
    stages = [
        make_stage(name=name, beliefs=(make_belief(variant="small"), make_belief(variant="large")))
        for name in ("a", "b")
    ]
    shown = make_view(*stages, rates={"a": 1.0, "b": 1.0})

    def named(policy: Fa2) -> list[str]:
        plan = next_plan(policy, 0, shown)
        assert plan is not None
        return [target.groups[0].spec.variant for target in plan.stages]

    assert named(Fa2()) == ["small", "small"]
    assert named(Fa2(variant="large")) == ["large", "large"]
    assert named(Fa2(variants={"b": "large"})) == ["small", "large"]
    with pytest.raises(InputError, match="no stage 'c'"):
        named(Fa2(variants={"c": "large"}))
    with pytest.raises(InputError, match="no variant 'huge'"):
        named(Fa2(variant="huge"))


def flat(alone_ms: float, each_ms: float) -> Estimate:
    """d(b) = alone + (b - 1) each."""
    form = Quadratic(alpha=0.0, beta=each_ms, gamma=alone_ms - each_ms)
    profile = Profile(latency_ms=form, max_batch=8, max_cores=4, hardware="h", origin="assumed", source="test")
    return Estimate(profile, correct=False)


def two_stages(rate_rps: float, *, slo_ms: float = 1000, **more: Any) -> ClusterView:
    """Two stages, the second much dearer than the first."""
    first = make_stage(name="first", belief=flat(50, 10), slo_ms=slo_ms)
    second = make_stage(name="second", belief=flat(200, 40), slo_ms=slo_ms)
    return make_view(first, second, rates={"first": rate_rps, "second": rate_rps}, **more)


def sizes(plan: Plan | None) -> list[tuple[int, int]]:
    """(replicas, batch) of each stage."""
    assert plan is not None
    return [(target.groups[0].count, target.batch_max) for target in plan.stages]


HORIZONTAL = ("fa2", "ds2", "inferline", "grandslam")


def problem_of(view: ClusterView, policy: Fa2) -> EqualReplicasProblem:
    return equal_replicas_problem(view, policy, policy.batch_max, policy.margin, policy.variants)


def linear_view(
    *stages: tuple[str, float, float], slo_ms: float = 1000, paths: Sequence[Path] = (), cores: float = 64
) -> ClusterView:
    """Stages of (name, rate, visits), each 50 ms alone and 10 ms more for each further."""
    views = [
        replace(make_stage(Bucket(0, arrivals=4), name=name, belief=flat(50, 10), slo_ms=slo_ms), visits=visits)
        for name, _, visits in stages
    ]
    return make_view(*views, rates={name: rate for name, rate, _ in stages}, paths=paths, cores=cores)


def test_a_view_in_the_solvers_terms() -> None:
    paths = [Path(("a", "b"), ms(300)), Path(("a", "c"), ms(200))]
    problem = problem_of(linear_view(("a", 4.0, 1.0), ("b", 10.0, 2.5), ("c", 2.0, 0.5), paths=paths), Fa2())
    assert [(own.name, own.rate_rps, own.parts) for own in problem.stages] == [("a", 4, 1), ("b", 10, 3), ("c", 2, 1)]
    assert problem.stages[0].latency_ms == pytest.approx((50, 60, 70, 80, 90, 100, 110, 120))
    assert problem.paths == (IndexedPath((0, 1), 300.0), IndexedPath((0, 2), 200.0))
    assert problem.ingress_rps == 4.0


def test_limits_are_planned_with() -> None:
    problem = problem_of(linear_view(("a", 4.0, 1.0)), Fa2(cores=0.5, batch_max=3, margin=0.5, headroom=0.25))
    assert problem.stages[0].rate_rps == 5.0
    assert len(problem.stages[0].latency_ms) == 3
    assert problem.paths == (IndexedPath((0,), 500.0),)
    assert problem.replicas_max == 128


def test_what_is_expected_counts_until_something_was_seen() -> None:
    view = linear_view(("a", 0.0, 1.0), ("b", 0.0, 2.0))
    silent = replace(view, ingress=Traffic(buckets=[Bucket(0)], bucket_ns=s(1)))
    assert [own.rate_rps for own in problem_of(silent, Fa2(initial_rps=7)).stages] == [7, 14]
    assert [own.rate_rps for own in problem_of(view, Fa2(initial_rps=7)).stages] == [0, 0]


def test_a_stage_on_no_path_has_the_applications_deadline() -> None:
    problem = problem_of(linear_view(("a", 1.0, 1.0), ("b", 1.0, 1.0), paths=[Path(("a",), ms(100))]), Fa2())
    assert problem.paths == (IndexedPath((0,), 100.0), IndexedPath((1,), 1000.0))


def test_unknown_stages_are_refused() -> None:
    with pytest.raises(InputError, match="no stage 'x'"):
        problem_of(linear_view(("a", 1.0, 1.0)), Fa2(variants={"x": "v"}))


def test_a_plan_says_how_long_a_batch_is_worth_waiting_for() -> None:
    problem = problem_of(linear_view(("a", 4.0, 1.0)), Fa2())
    plan = problem.checked_plan([Fa2Choice(3, 2, 70.0, 500.0)])
    (target,) = plan.stages
    assert (target.groups[0].count, target.batch_max, target.wait_ns) == (2, 3, ms(500))
    assert plan.feasible
    assert plan.why == "4 requests/s → 2 replicas of 1 core: a 2 × batch 3; tightest: a, 430 of 1000 ms left"


def test_what_does_not_fit_is_said() -> None:
    problem = problem_of(linear_view(("a", 4.0, 1.0), ("b", 4.0, 1.0), cores=3), Fa2())
    assert not problem.checked_plan([Fa2Choice(1, 2, 50.0, 0.0), Fa2Choice(1, 2, 50.0, 0.0)]).feasible
    plan = problem.plan_for_share((Fa2Solution((Fa2Choice(1, 1, 50.0, 0.0), Fa2Choice(1, 2, 50.0, 0.0)), "tree"), 0.5))
    assert plan.why.startswith("the nodes hold 3 replicas, enough for 50% of what comes; ")
    none = problem.plan_for_share(None)
    assert [target.groups[0].count for target in none.stages] == [1, 1]
    assert not none.feasible


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Up to six stages, paths over any of them, branches and fan-out, from rest to far too much."""
    count = draw(st.integers(1, 6))
    chain = st.sets(st.integers(0, count - 1), min_size=1, max_size=4).map(sorted)
    chains = draw(st.lists(chain, min_size=1, max_size=4))
    rate = draw(st.sampled_from([0.0, 0.01, 3.0, 40.0, 2000.0]))
    visits = [draw(st.sampled_from([0.0, 0.3, 1.0, 4.2, 30.0])) for _ in range(count)]
    slos_ms = [draw(st.sampled_from([5.0, 120.0, 900.0, 60_000.0])) for _ in chains]
    paths = [Path(tuple(f"s{at}" for at in own), ms(slo)) for own, slo in zip(chains, slos_ms, strict=True)]
    stages = [(f"s{at}", rate * own, own) for at, own in enumerate(visits)]
    return linear_view(*stages, paths=paths, cores=draw(st.sampled_from([0.5, 8.0, 256.0])))


@pytest.mark.parametrize("name", HORIZONTAL)
@settings(max_examples=25)
@given(view=views())
def test_any_graph_has_a_plan(name: str, view: ClusterView) -> None:
    assert name in POLICIES["scale"]
    policy: Any = build("scale", name, {})
    plan = next_plan(policy, 0, view)
    assert plan == next_plan(build("scale", name, {}), 0, view)
    assert plan.why
    assert [target.stage for target in plan.stages] == [stage.name for stage in view.stages]
    problem: EqualReplicasProblem = problem_of(view, Fa2())
    for target, own in zip(plan.stages, problem.stages, strict=True):
        (group,) = target.groups
        assert group.count >= 1
        assert group.spec.cores <= view.nodes[0].node.cores
        assert 1 <= target.batch_max <= 8
        assert own.rate_rps > 0 or target.batch_max == 1
        if plan.feasible and name != "grandslam":
            can_rps = group.count * target.batch_max * 1000 / own.latency_ms[target.batch_max - 1]
            assert own.rate_rps <= can_rps * (1 + 1e-6), "it keeps up"
    total = sum(group.count for target in plan.stages for group in target.groups)
    if name == "fa2" and problem.replicas_max >= len(view.stages) and "more than its" not in plan.why:
        assert total <= problem.replicas_max, "what the nodes do not hold is cut down"


def test_ds2_has_replicas_by_rate_alone() -> None:
    assert sizes(next_plan(Ds2(), 0, two_stages(0.0))) == [(1, 1), (1, 1)]
    plan = next_plan(Ds2(), 0, two_stages(30.0))
    assert sizes(plan) == [(2, 1), (6, 1)]
    assert plan is not None
    assert plan.feasible
    assert plan.why == (
        "30 requests/s → 8 replicas of 1 core: first 2 × batch 1, second 6 × batch 1; "
        "tightest: first → second, 750 of 1000 ms left"
    )


def test_deadlines_of_ds2_change_nothing_but_the_verdict() -> None:
    plan = next_plan(Ds2(), 0, two_stages(30.0, slo_ms=100))
    assert sizes(plan) == [(2, 1), (6, 1)]
    assert plan is not None
    assert not plan.feasible
    assert plan.why.endswith("tightest: first → second, 150 ms over its 100 ms")


def test_more_than_the_nodes_hold_is_said() -> None:
    plan = next_plan(Ds2(), 0, two_stages(30.0, cores=4))
    assert plan is not None
    assert not plan.feasible
    assert plan.why.endswith("; the nodes hold 4 replicas")


def test_inferline_the_first_takes_the_time_and_the_second_pays() -> None:
    assert sizes(next_plan(Inferline(), 0, two_stages(0.0))) == [(1, 1), (1, 1)]
    plan = next_plan(Inferline(), 0, two_stages(30.0, slo_ms=600))
    assert sizes(plan) == [(1, 8), (6, 1)]
    assert plan is not None
    assert plan.feasible
    assert [target.wait_ns > 0 for target in plan.stages] == [True, False]


def test_fa2s_replicas_and_batches_by_share() -> None:
    """Shares of 1000 ms are 200 and 800: batches of more than 8 would fit."""
    assert sizes(next_plan(Grandslam(), 0, two_stages(0.0))) == [(1, 1), (1, 1)]
    own, others = (
        sizes(next_plan(Grandslam(), 0, two_stages(30.0))),
        sizes(next_plan(Fa2(), 0, two_stages(30.0))),
    )
    assert [count for count, _ in own] == [count for count, _ in others]
    assert [batch for _, batch in own] == [8, 8]
    assert [batch for _, batch in sizes(next_plan(Grandslam(), 0, two_stages(30.0, slo_ms=350)))] == [3, 3]


def test_where_fa2_has_no_answer_it_takes_what_the_rate_needs() -> None:
    plan = next_plan(Grandslam(), 0, two_stages(30.0, slo_ms=100))
    assert sizes(plan) == [(2, 1), (6, 1)]
    assert plan is not None
    assert not plan.feasible


def test_it_has_fa2s_replicas_also_where_the_nodes_hold_fewer_than_it_takes() -> None:
    seen = two_stages(30.0, cores=5)
    own, others = sizes(next_plan(Grandslam(), 0, seen)), sizes(next_plan(Fa2(), 0, seen))
    assert [count for count, _ in own] == [count for count, _ in others]
    assert sum(count for count, _ in own) <= 5


def second(slack_ms: float, arrivals: int = 20) -> Bucket:
    return Bucket(0, arrivals=arrivals, slack_ns=[ms(slack_ms)] * arrivals)


def replica_count(plan: Plan | None) -> int:
    assert plan is not None
    return plan.stages[0].groups[0].count


def test_starts_from_what_it_is_told() -> None:
    plan = next_plan(Fa2Single(), 0, make_view(make_stage()))
    assert plan is not None
    assert plan.stages == (StagePlan("stage", (Group(ReplicaSpec("stage", "v", Slot(1.0, "local")), 1),), 1),)
    assert replica_count(next_plan(Fa2Single(initial=4), 0, make_view(make_stage()))) == 4


def test_more_replicas_for_less_time() -> None:
    counts = [
        replica_count(next_plan(Fa2Single(), s(1), make_view(make_stage(second(slack_ms)))))
        for slack_ms in (990, 900, 800, 700)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    plan = next_plan(Fa2Single(), s(1), make_view(make_stage(second(990))))
    assert plan is not None
    assert plan.why == (
        "20 requests/s, tightest budget 990 ms → 5 replicas, batch 1: 166 ms + 4 × 166 ms + 10 ms of network < 900 ms"
    )


def test_keeps_the_plan_where_no_count_holds() -> None:
    before = next_plan(Fa2Single(initial=3), 0, make_view(make_stage()))
    assert before is not None
    plan = next_plan(Fa2Single(), s(1), make_view(make_stage(second(100)), plan=before))
    assert plan is not None
    assert plan.stages == before.stages
    assert not plan.feasible
    assert "no count up to 16 holds; kept as it was" in plan.why


def test_hysteresis_keeps_the_largest_of_the_last_decisions() -> None:
    policy, easy, hard = Fa2Single(hysteresis=2), make_view(make_stage(second(990))), make_view(make_stage(second(700)))
    small, large = replica_count(next_plan(Fa2Single(), 0, easy)), replica_count(next_plan(Fa2Single(), 0, hard))
    assert [replica_count(next_plan(policy, s(at), seen)) for at, seen in enumerate([easy, hard, easy, easy])] == [
        small,
        large,
        large,
        small,
    ]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Fa2, [{"cores": 0}, {"batch_max": 0}, {"margin": 2}, {"headroom": -1}, {"initial_rps": -1}]),
        (Ds2, [{"cores": 0}, {"headroom": -1}, {"initial_rps": -1}]),
        (Inferline, [{"cores": 0}, {"batch_max": 0}, {"headroom": -1}, {"initial_rps": -1}]),
        (Grandslam, [{"cores": 0}, {"batch_max": 0}, {"headroom": -1}, {"initial_rps": -1}]),
        (
            Fa2Single,
            [{"cores": 0}, {"replicas_max": 0}, {"initial": -1}, {"batch_max": 0}, {"margin": 2}, {"hysteresis": 0}],
        ),
    ],
)
def test_values_out_of_range_are_refused(kind: Any, wrong: Sequence[dict[str, Any]]) -> None:
    for parameters in wrong:
        with pytest.raises(InputError, match=f"^{next(iter(parameters))} must be"):
            check_ranges(kind(**parameters))
