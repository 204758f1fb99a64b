"""One more request per second: what changes, in words; and against a second plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.systems.planning import need
from sloop.systems.planning.answer import Lack
from sloop.systems.planning.more import cannot, changes_of, one_more, stage_says
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan
from tests.systems.planning.scene import READING, nodes, profile, setup, stage


def plan(count: int = 1, cores: float = 1, batch: int = 4, variant: str = "v", more: int = 0) -> Plan:
    groups = [Group(ReplicaSpec("a", variant, cores), count)]
    groups += [Group(ReplicaSpec("a", "other", 2), more)] if more else []
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
    assert changes_of("a", now, then) == changes
    assert one_more(now, then, []).changes == tuple(changes)
    assert one_more(now, then, []).says == (", ".join(changes) or "nothing")


def test_what_cannot_be() -> None:
    lacks = [Lack("plan", "so it is"), Lack("cores", "too few", "a"), Lack("deadline", "too late", "b")]
    found = one_more(plan(), plan(2), lacks)
    assert (found.feasible, found.says, found.cores) == (False, "cannot: too few; and 1 more", 1)
    assert stage_says("b", plan(), plan(), lacks) == "cannot: too late"
    assert stage_says("c", plan(), plan(), lacks) == "nothing"
    assert cannot(lacks[:1]) == "cannot: so it is"


def test_one_more_replica_of_a_stage_in_a_graph() -> None:
    answer = need(setup(stage("a"), stage("b", "a", profile=profile(5)), slo_ms=500, system="fa2"), 100)
    assert answer.one_more is not None
    assert answer.one_more.says == "+1 replica of a (1 core)"
    assert {row.stage: row.one_more for row in answer.stages} == {"a": "+1 replica of a (1 core)", "b": "nothing"}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 150), st.sampled_from(["static", "fa2", "hpa", "ipa", "biscale"]))
def test_one_more_is_what_a_second_call_says(rate_rps: int, system: str) -> None:
    made = setup(*READING, slo_ms=600, cluster=nodes(8, 2), system=system)
    now, then = need(made, rate_rps), need(made, rate_rps + 1)
    assert now.one_more is not None
    assert now.one_more.feasible == then.feasible
    assert now.one_more.cores == pytest.approx(then.cores - now.cores)
    assert now.one_more.lacks == then.lacks
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
