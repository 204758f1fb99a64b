"""From a view to a problem and from choices to a plan: rates, parts, paths, and plans for any graph."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.views import Belief, Bucket, ClusterView, Traffic
from sloop.errors import InputError
from sloop.policies import POLICIES
from sloop.policies.build import build
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Quadratic
from sloop.profile.profile import Profile
from sloop.solvers.fa2 import Answer, Choice
from sloop.solvers.graph import Way
from sloop.solvers.horizontal import Limits, Problem, problem_of
from sloop.units import ms, s
from sloop.vocabulary import Path
from tests.policies.conftest import make_stage, make_view

HORIZONTAL = ("fa2", "ds2", "inferline", "grandslam")


def flat(alone_ms: float, each_ms: float) -> Belief:
    """d(b) = alone + (b - 1) each."""
    form = Quadratic(alpha=0.0, beta=each_ms, gamma=alone_ms - each_ms)
    profile = Profile(latency_ms=form, max_batch=8, max_cores=4, hardware="h", origin="assumed", source="test")
    return Estimate(profile, correct=False)


def shown(
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
    problem = problem_of(shown(("a", 4.0, 1.0), ("b", 10.0, 2.5), ("c", 2.0, 0.5), paths=paths), Limits())
    assert [(own.name, own.rate_rps, own.parts) for own in problem.stages] == [("a", 4, 1), ("b", 10, 3), ("c", 2, 1)]
    assert problem.stages[0].latency_ms == pytest.approx((50, 60, 70, 80, 90, 100, 110, 120))
    assert problem.ways == (Way((0, 1), 300.0), Way((0, 2), 200.0))
    assert problem.ingress_rps == 4.0


def test_limits_are_planned_with() -> None:
    problem = problem_of(shown(("a", 4.0, 1.0)), Limits(cores=0.5, batch_max=3, margin=0.5, headroom=0.25))
    assert problem.stages[0].rate_rps == 5.0
    assert len(problem.stages[0].latency_ms) == 3
    assert problem.ways == (Way((0,), 500.0),)
    assert problem.replicas_max == 128


def test_what_is_expected_counts_until_something_was_seen() -> None:
    view = shown(("a", 0.0, 1.0), ("b", 0.0, 2.0))
    silent = replace(view, ingress=Traffic(buckets=[Bucket(0)], bucket_ns=s(1)))
    assert [own.rate_rps for own in problem_of(silent, Limits(initial_rps=7)).stages] == [7, 14]
    assert [own.rate_rps for own in problem_of(view, Limits(initial_rps=7)).stages] == [0, 0]


def test_a_stage_on_no_path_has_the_applications_deadline() -> None:
    problem = problem_of(shown(("a", 1.0, 1.0), ("b", 1.0, 1.0), paths=[Path(("a",), ms(100))]), Limits())
    assert problem.ways == (Way((0,), 100.0), Way((1,), 1000.0))


def test_unknown_stages_are_refused() -> None:
    with pytest.raises(InputError, match="no stage 'x'"):
        problem_of(shown(("a", 1.0, 1.0)), Limits(variants={"x": "v"}))


def test_a_plan_says_how_long_a_batch_is_worth_waiting_for() -> None:
    problem = problem_of(shown(("a", 4.0, 1.0)), Limits())
    plan = problem.chosen([Choice(3, 2, 70.0, 500.0)])
    (target,) = plan.stages
    assert (target.groups[0].count, target.batch_max, target.wait_ns) == (2, 3, ms(500))
    assert plan.feasible
    assert plan.why == "4 requests/s → 2 replicas of 1 core: a 2 × batch 3; tightest: a, 430 of 1000 ms left"


def test_what_does_not_fit_is_said() -> None:
    problem = problem_of(shown(("a", 4.0, 1.0), ("b", 4.0, 1.0), cores=3), Limits())
    assert not problem.chosen([Choice(1, 2, 50.0, 0.0), Choice(1, 2, 50.0, 0.0)]).feasible
    plan = problem.squeezed((Answer((Choice(1, 1, 50.0, 0.0), Choice(1, 2, 50.0, 0.0)), "tree"), 0.5))
    assert plan.why.startswith("the nodes hold 3 replicas, enough for 50% of what comes; ")
    none = problem.squeezed(None)
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
    return shown(*stages, paths=paths, cores=draw(st.sampled_from([0.5, 8.0, 256.0])))


@pytest.mark.parametrize("name", HORIZONTAL)
@settings(max_examples=40, deadline=None)
@given(view=views())
def test_any_graph_has_a_plan(name: str, view: ClusterView) -> None:
    assert name in POLICIES["scale"]
    policy: Any = build("scale", name, {})
    plan = policy.plan(0, view)
    assert plan == build("scale", name, {}).plan(0, view)  # type: ignore[attr-defined]
    assert plan.why
    assert [target.stage for target in plan.stages] == [stage.name for stage in view.stages]
    problem: Problem = problem_of(view, Limits())
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
