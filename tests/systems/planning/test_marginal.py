"""Which constraint binds, where it is plain to see, and what one more request per second costs."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.systems.planning import Arrivals, StageReport, explain_plan
from sloop.systems.planning.marginal import (
    BindingConstraint,
    binding_constraints,
    cannot,
    changes_at,
    marginal_cost,
    marginal_cost_at,
)
from sloop.systems.planning.placement import PlanShortfall
from sloop.systems.planning.timing import PlanPrediction
from sloop.vocabulary import Group, Plan, ReplicaSpec, Slot, StagePlan
from tests.systems.planning import scene
from tests.systems.planning.scene import ENOUGH, READING, nodes, placed, profile, setup, stage, steady_plan


def only(rate_rps: float, slo_ms: float = 1000, cluster: dict[str, Any] | None = None, **system: Any) -> StageReport:
    """One stage that does 100 requests per second on a core, whatever the batch."""
    made = setup(stage("a"), slo_ms=slo_ms, cluster=cluster, system={"name": "static", "batch_max": 1} | system)
    (row,) = explain_plan(made, rate_rps).stages
    return row


def kinds(row: StageReport) -> list[str]:
    return [bound.kind for bound in row.binds]


def test_nothing_binds_one_idle_replica() -> None:
    """`minimum`: there is no less; `spare`: with less the stage would still do."""
    assert [only(rate_rps).binds for rate_rps in (20, 0)] == [
        (BindingConstraint("minimum", "a plan has at least 1 replica, and this one has 1 core"),)
    ] * 2
    assert only(20, cores=2).binds == (BindingConstraint("spare", "1 replica of 1 core would do"),)


def test_replicas_that_just_suffice() -> None:
    row = only(150, replicas=2)
    assert kinds(row) == ["throughput"]
    assert row.binds[0].why == "1 replica would serve 100 of 150 requests/s in batches of 1"
    assert only(90, replicas=2).binds == (BindingConstraint("spare", "1 replica would do"),)


def test_cores_that_just_suffice() -> None:
    row = only(250, cores=3)
    assert (kinds(row), row.binds[0].why) == (
        ["throughput"],
        "1 replica of 2 cores would serve 200 of 250 requests/s in batches of 1",
    )


def test_one_more_request_would_be_too_many() -> None:
    row = only(100)
    assert (kinds(row), row.binds[0].why) == (
        ["throughput"],
        "it serves at most 100 requests/s; one more at the ingress makes 101 here",
    )


def test_the_deadline_of_the_tightest_path() -> None:
    stages = [stage("a"), stage("b", "a"), stage("c", "a", profile=profile(1))]
    made = setup(*stages, slo_ms=12, system={"name": "static", "cores": 2})
    rows = {row.stage: row for row in explain_plan(made, 5).stages}
    why = "with 1 replica of 1 core, a → b would take 15 ms, and the deadline is 12 ms"
    assert {name: [(b.kind, b.why) for b in row.binds] for name, row in rows.items()} == {
        "a": [("deadline", why)],
        "b": [("deadline", why)],
        "c": [("spare", "1 replica of 1 core would do")],
    }


def test_a_deadline_that_is_missed_already() -> None:
    assert [bound.why for bound in only(5, slo_ms=8).binds] == [
        "a request takes 10 ms already, and the deadline is 8 ms"
    ]


def test_larger_batches_that_a_deadline_forbids_or_the_plan_does_not_allow() -> None:
    made = stage("a", profile=profile(1, 9, batch=4))  # 100 a second alone, 4/13 ms = 307 in fours
    system = {"name": "static", "replicas": 2, "batch_max": 1}

    def of(slo_ms: float) -> list[tuple[str, str]]:
        (row,) = explain_plan(setup(made, slo_ms=slo_ms, system=system), 190).stages
        return [(bound.kind, bound.why) for bound in row.binds]

    throughput = ("throughput", "1 replica would serve 100 of 190 requests/s in batches of 1")
    assert of(1000) == [throughput, ("batch", "1 replica would keep up in batches of 3, and the plan allows 1 at most")]
    assert of(20) == [
        throughput,
        ("deadline", "with 1 replica in batches of 3, a request would take 24 ms, and the deadline is 20 ms"),
    ]


@pytest.mark.parametrize(("replicas", "rate_rps"), [(2, 600), (1, 307)])
def test_the_variant_has_no_larger_batches(replicas: int, rate_rps: float) -> None:
    """With one replica less, or with one request more."""
    made = stage("a", profile=profile(1, 9, batch=4))
    (row,) = explain_plan(setup(made, system={"name": "static", "replicas": replicas}), rate_rps).stages
    assert (kinds(row), row.binds[1].why) == (
        ["throughput", "batch"],
        "variant a takes batches of 4 at most, and larger ones would serve more",
    )


def test_a_full_cluster() -> None:
    """It binds if one more request per second needs more than the stage has, and not before."""
    full = nodes(cores=1.5, count=2)
    assert kinds(only(150, cluster=full, replicas=2)) == ["throughput"]
    assert only(150, cluster=full, replicas=2).one_more == "nothing"
    row = only(200, cluster=full, replicas=2)
    assert kinds(row) == ["throughput", "cores"]
    assert row.binds[1].why == "no node has room for one more replica of 1 core: at most 0.5 cores of a node are free"


def test_no_replicas_are_bound_by_nothing() -> None:
    assert only(10, replicas=0).binds == ()


@pytest.mark.parametrize("rate_rps", [0, 1, 40, 99, 100, 101, 350])
@pytest.mark.parametrize("system", ["static", "hpa", "vertical-only", "mixed"])
def test_a_stage_bound_by_throughput_cannot_do_with_less_or_take_more(system: str, rate_rps: float) -> None:
    made = setup(stage("a"), stage("b", "a"), slo_ms=300, system=system)
    plan = steady_plan(made, rate_rps)
    prediction = PlanPrediction(scene.only(made), plan, rate_rps)
    for found in prediction.stages.values():
        bounds = {bound.kind for bound in binding_constraints(prediction, found, placed(made, plan), needs_more=True)}
        spare = found.rate_max_rps * (found.replicas - 1) / max(1, found.replicas) >= found.rate_rps
        cores = found.groups[0].spec.cores
        if "throughput" in bounds and found.replicas > 1:
            assert not spare or found.rate_max_rps < found.rate_rps + 1
        if found.replicas == 1 and cores <= 1:
            assert ("throughput" in bounds) == (found.rate_max_rps < found.rate_rps + 1)


def plan(count: int = 1, cores: float = 1, batch: int = 4, variant: str = "v", more: int = 0) -> Plan:
    groups = [Group(ReplicaSpec("a", variant, Slot(cores)), count)]
    groups += [Group(ReplicaSpec("a", "other", Slot(2)), more)] if more else []
    return Plan((StagePlan("a", tuple(groups), batch),), "")


@pytest.mark.parametrize(
    ("now", "then", "changes"),
    [
        (plan(), plan(), []),
        (plan(), plan(2), ["+1 replica of a (1 core)"]),
        (plan(5, 0.5), plan(3, 0.5), ["-2 replicas of a (0.5 cores)"]),
        (plan(batch=4), plan(batch=8), ["batch 4 -> 8 at a"]),
        (plan(cores=1), plan(cores=2), ["cores 1 -> 2 at a"]),
        (
            plan(2),
            plan(1, 3, 2, "w"),
            ["variant v -> w at a", "cores 1 -> 3 at a", "-1 replica of a (3 cores)", "batch 4 -> 2 at a"],
        ),
        (plan(2), plan(1, more=1), ["+1 replica of a/other (2 cores)", "-1 replica of a/v (1 core)"]),
        (Plan((), ""), plan(), ["+1 replica of a (1 core)"]),
    ],
)
def test_changes_in_words(now: Plan, then: Plan, changes: list[str]) -> None:
    assert changes_at("a", now, then) == changes
    assert marginal_cost(now, [], then, []).changes == tuple(changes)
    assert marginal_cost(now, [], then, []).summary == (", ".join(changes) or "nothing")


def test_what_cannot_be() -> None:
    shortfalls = [PlanShortfall("cores", "too few", "a"), PlanShortfall("deadline", "too late", "b")]
    found = marginal_cost(plan(), [], plan(2), shortfalls)
    assert (found.feasible, found.summary, found.cores) == (False, "cannot: too few; and 1 more", 1)
    assert marginal_cost_at("b", plan(), [], plan(), shortfalls) == "cannot: too late"
    assert marginal_cost_at("c", plan(), [], plan(), shortfalls) == "nothing at this stage"
    assert marginal_cost_at("c", plan(), [], plan(), []) == "nothing"
    assert cannot([], shortfalls[:1]) == "cannot: too few"
    assert cannot(shortfalls, shortfalls) == "the plan is not feasible as it is"


def test_one_more_replica_of_a_stage_in_a_graph() -> None:
    answer = explain_plan(setup(stage("a"), stage("b", "a", profile=profile(5)), slo_ms=500, system=ENOUGH), 100)
    assert answer.one_more is not None
    assert answer.one_more.summary == "+1 replica of a (1 core)"
    assert {row.stage: row.one_more for row in answer.stages} == {"a": "+1 replica of a (1 core)", "b": "nothing"}


@settings(max_examples=20)
@given(
    st.integers(0, 150),
    st.sampled_from(["static", "hpa", "vertical-only", "mixed"]),
    st.sampled_from(["even", "burst"]),
)
def test_one_more_is_what_a_second_call_says(rate_rps: int, system: str, arrivals: Arrivals) -> None:
    made = setup(*READING, slo_ms=600, cluster=nodes(8, 2), system=system)
    now, then = explain_plan(made, rate_rps, arrivals), explain_plan(made, rate_rps + 1, arrivals)
    assert now.one_more is not None
    assert now.one_more.feasible == then.feasible
    assert now.one_more.cores == pytest.approx(then.cores - now.cores)
    assert now.one_more.shortfalls == then.shortfalls
    same = [(r.stage, r.variant, r.replicas, r.cores, r.batch) for r in now.stages] == [
        (r.stage, r.variant, r.replicas, r.cores, r.batch) for r in then.stages
    ]
    assert same == (not now.one_more.changes)
    for row in now.stages:
        if row.one_more == "nothing" and then.feasible:
            others = [r for r in then.stages if r.stage == row.stage]
            assert (row.variant, row.replicas, row.cores, row.batch) in [
                (r.variant, r.replicas, r.cores, r.batch) for r in others
            ]


def test_one_more_may_make_a_plan_feasible() -> None:
    """Full batches of two: with one request a second the first of them waits a second for the other."""
    full = {"name": "static", "batch_max": 2, "batch": {"name": "timeout", "wait_s": 5}}
    answer = explain_plan(setup(stage("a"), slo_ms=600, system=full), 1)
    assert answer.one_more is not None
    assert (answer.feasible, answer.one_more.feasible) == (False, True)
    assert answer.one_more.summary == "nothing; that plan is feasible"


def test_a_full_cluster_may_lack_memory() -> None:
    row = only(200, cluster=nodes(cores=8, count=1, memory_bytes=2000), replicas=2)
    assert kinds(row)[-1] == "memory"
    assert row.binds[-1].why.startswith("no node has room for one more replica of 1 core: nodes with enough free cores")
