"""FA2 as a policy: plans for graphs, what it says, and what it does where nothing holds."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sloop.core.views import Belief, Bucket, ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.scale.fa2 import Fa2
from sloop.profile.estimate import Estimate
from sloop.reproduce.fa2.application import CPU, Hardware, problem, profile_of
from sloop.solvers import choice, fa2
from sloop.units import ms
from sloop.vocabulary import Path, Plan

Stage = Callable[..., StageView]
View = Callable[..., ClusterView]


def published(
    stage: Stage,
    view: View,
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
    stages = [stage(bucket, name=own, belief=Estimate(profile_of(hardware, own), correct=False)) for own in given.names]
    ways = [Path(tuple(given.names[index] for index in way.stages), ms(way.slo_ms)) for way in given.ways]
    rates = {own.name: own.rate_rps for own in given.stages}
    return view(*stages, cores=cores, rates=rates, paths=ways, **more)


def counts(plan: Plan | None) -> list[int]:
    assert plan is not None
    return [group.count for target in plan.stages for group in target.groups]


def chain(
    stage: Stage, view: View, beliefs: Sequence[Belief], rate_rps: float, slo_ms: float, **more: Any
) -> ClusterView:
    stages = [stage(name=f"s{at}", belief=belief, slo_ms=slo_ms) for at, belief in enumerate(beliefs)]
    return view(*stages, rates={own.name: rate_rps for own in stages}, **more)


def test_the_published_application(stage: Stage, view: View) -> None:
    plan = Fa2().plan(0, published(stage, view, 30))
    assert plan is not None
    assert sum(counts(plan)) == 17
    assert plan.feasible
    assert plan.why.startswith("30 requests/s → 17 replicas of 1 core: OBJD ")
    assert "; tightest: OBJD → " in plan.why
    batched = [target for target in plan.stages if target.batch_max > 1]
    assert batched
    assert all(target.wait_ns > 0 for target in batched)
    assert all(target.wait_ns == 0 for target in plan.stages if target.batch_max == 1)


def test_six_paths_that_meet(stage: Stage, view: View) -> None:
    assert sum(counts(Fa2().plan(0, published(stage, view, 24, paths=6)))) == 42
    assert sum(counts(Fa2(mode="paper", polish=False).plan(0, published(stage, view, 24, paths=6)))) == 45


def test_at_rest_one_of_each(stage: Stage, view: View) -> None:
    plan = Fa2().plan(0, published(stage, view, 0))
    assert plan is not None
    assert set(counts(plan)) == {1}
    assert {target.batch_max for target in plan.stages} == {1}
    assert plan.feasible


def test_before_anything_was_seen_it_believes_what_it_is_told(stage: Stage, view: View, belief: Any) -> None:
    shown = chain(stage, view, [belief()], 0.0, 1000)
    assert counts(Fa2().plan(0, shown)) == [1]
    assert counts(Fa2(initial_rps=20).plan(0, shown)) == counts(
        Fa2().plan(0, chain(stage, view, [belief()], 20.0, 1000))
    )


def test_fractions_of_a_core_are_smaller_replicas(stage: Stage, view: View, belief: Any) -> None:
    plan = Fa2(cores=0.5).plan(0, chain(stage, view, [belief()], 3.0, 2000))
    assert plan is not None
    assert plan.stages[0].groups[0].spec.cores == 0.5
    assert "replica of 0.5 cores" in plan.why or "replicas of 0.5 cores" in plan.why


def test_replicas_are_no_larger_than_the_largest_node(stage: Stage, view: View, belief: Any) -> None:
    plan = Fa2().plan(0, chain(stage, view, [belief()], 1.0, 5000, cores=0.5))
    assert plan is not None
    assert plan.stages[0].groups[0].spec.cores == 0.5


def test_a_deadline_below_the_time_alone_is_said_and_demand_followed(stage: Stage, view: View, belief: Any) -> None:
    own = belief()
    alone_ms = own.costs_ns(1.0)[1] / 1e6
    plan = Fa2().plan(0, chain(stage, view, [own, own], 20.0, 100))
    assert plan is not None
    assert not plan.feasible
    assert {target.batch_max for target in plan.stages} == {1}
    assert counts(plan) == [-int(-20 * alone_ms // 1000)] * 2
    alone, over = f"{2 * alone_ms:.4g} ms", f"{2 * alone_ms - 100:.4g} ms"
    assert plan.why.startswith(f"s0 → s1 takes {alone} even one at a time, {over} more than its 100 ms; most of it s0")


def test_what_the_nodes_do_not_hold_is_cut_down_evenly(stage: Stage, view: View) -> None:
    plan = Fa2().plan(0, published(stage, view, 60, cores=20))
    assert plan is not None
    assert not plan.feasible
    assert 15 <= sum(counts(plan)) <= 20
    assert plan.why.startswith("the nodes hold 20 replicas, enough for ")
    plan = Fa2().plan(0, published(stage, view, 60, cores=3))
    assert set(counts(plan)) == {1}


def test_a_solver_that_gives_up_changes_nothing(stage: Stage, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Fa2().plan(0, published(stage, view, 12, paths=6))
    assert before is not None
    monkeypatch.setattr(fa2, "_by_forest", lambda *_: None)
    monkeypatch.setattr(choice, "cheapest", lambda *_, **__: choice.GAVE_UP)
    plan = Fa2(nodes_max=9).plan(0, published(stage, view, 24, paths=6, plan=before))
    assert plan is not None
    assert plan.stages == before.stages
    assert not plan.feasible
    assert plan.gave_up
    assert plan.why == "the solver gave up after 9 nodes: kept as it was"
    first = Fa2().plan(0, published(stage, view, 24, paths=6))
    assert first is not None
    assert not first.feasible
    assert sum(counts(first)) == 54, "one at a time, at least"


def test_headroom_and_margin_cost_replicas(stage: Stage, view: View) -> None:
    plain = sum(counts(Fa2().plan(0, published(stage, view, 30))))
    assert sum(counts(Fa2(headroom=0.2).plan(0, published(stage, view, 30)))) > plain
    assert sum(counts(Fa2(margin=0.6).plan(0, published(stage, view, 30)))) > plain


def test_variants_are_the_first_unless_named(stage: Stage, view: View, belief: Any) -> None:
    stages = [stage(name=name, variants={"small": belief(), "large": belief()}) for name in ("a", "b")]
    shown = view(*stages, rates={"a": 1.0, "b": 1.0})

    def named(policy: Fa2) -> list[str]:
        plan = policy.plan(0, shown)
        assert plan is not None
        return [target.groups[0].spec.variant for target in plan.stages]

    assert named(Fa2()) == ["small", "small"]
    assert named(Fa2(variant="large")) == ["large", "large"]
    assert named(Fa2(variants={"b": "large"})) == ["small", "large"]
    with pytest.raises(InputError, match="no stage 'c'"):
        named(Fa2(variants={"c": "large"}))
    with pytest.raises(InputError, match="no variant 'huge'"):
        named(Fa2(variant="huge"))


@pytest.mark.parametrize(
    "parameters",
    [{"cores": 0}, {"batch_max": 0}, {"margin": 2}, {"headroom": -1}, {"initial_rps": -1}, {"nodes_max": 0}],
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Fa2(**parameters)
