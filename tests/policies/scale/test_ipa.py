"""IPA's decisions: accuracy while cores are cheap, throughput first when they are not, reasons that name the stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sloop.core.views import Belief, Bucket, ClusterView, StageView
from sloop.errors import InputError
from sloop.policies.scale.ipa import Ipa
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Quadratic
from sloop.profile.profile import Profile
from sloop.solvers import labels, variants_milp
from sloop.solvers.adapting import StageTerms
from sloop.solvers.variants import Choices, Goal
from sloop.units import ms, s
from sloop.vocabulary import Path, Plan
from tests.policies.conftest import make_node, make_stage, make_view

DETECTION = {"n": (45.7, 57.3, 22.7), "s": (56.8, 160.0, 40.0), "m": (64.1, 186.7, 160.3)}
CLASSIFICATION = {"R18": (69.75, 44.3, 28.7), "R34": (73.31, 78.0, 32.0), "R50": (76.13, 99.6, 36.4)}
CORES = {
    "detect": StageTerms(cores={"n": 1.0, "s": 1.0, "m": 2.0}),
    "classify": StageTerms(cores={"R18": 1.0, "R34": 1.0, "R50": 1.0}),
}


def beliefs(family: Mapping[str, tuple[float | None, float, float]]) -> dict[str, Belief]:
    """Accuracy, milliseconds per request and per batch."""
    return {
        name: Estimate(
            Profile(latency_ms=Quadratic(alpha=0, beta=each, gamma=fixed), max_batch=8, max_cores=16),
            accuracy=accuracy,
            correct=False,
        )
        for name, (accuracy, each, fixed) in family.items()
    }


def video(rate_rps: float, *, slo_ms: float = 6890, cores: float = 1000, plan: Plan | None = None) -> ClusterView:
    buckets = [Bucket(s(second), arrivals=round(rate_rps)) for second in range(30)]
    stages = [
        make_stage(*buckets, name=name, variants=beliefs(family), slo_ms=slo_ms)
        for name, family in (("detect", DETECTION), ("classify", CLASSIFICATION))
    ]
    rates = {"detect": rate_rps, "classify": rate_rps}
    return make_view(*stages, rates=rates, plan=plan, nodes=(make_node(cores=cores),))


def ipa(**changes: Any) -> Ipa:
    return Ipa(**{"alpha": 2.0, "beta": 1.0, "stages": CORES, **changes})


def chosen(plan: Plan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(t.groups[0].spec.variant, t.batch_max, t.groups[0].count) for t in plan.stages]


@pytest.mark.parametrize(
    ("rate_rps", "expected"),
    [
        (7, [("n", 1, 1), ("R50", 1, 1)]),
        (10, [("n", 1, 1), ("R34", 2, 1)]),
        (20, [("n", 1, 2), ("R18", 8, 1)]),
        (30, [("n", 4, 2), ("R18", 2, 2)]),
    ],
)
def test_the_published_choices(rate_rps: float, expected: list[tuple[str, int, int]]) -> None:
    plan = ipa().plan(0, video(rate_rps))
    assert chosen(plan) == expected
    assert plan is not None
    assert plan.feasible
    assert plan.why.startswith(f"{rate_rps:g} requests/s → detect {expected[0][2]} × n")
    assert chosen(ipa(solver="milp").plan(0, video(rate_rps))) == expected


def test_batches_wait_twice_as_long_as_they_should_take_to_fill() -> None:
    plan = ipa().plan(0, video(20))
    assert plan is not None
    assert [target.wait_ns for target in plan.stages] == [0, ms(700)]


def test_the_same_replicas_always_choose_by_what_keeps_up() -> None:
    assert chosen(ipa(replicas=3).plan(0, video(30))) == [("n", 1, 3), ("R34", 2, 3)]
    held = ipa(replicas=3, infeasible="hold")
    plan = held.plan(0, video(10))
    after = held.plan(s(10), video(1000, plan=plan))
    assert after is not None
    assert plan is not None
    assert (after.stages, after.feasible) == (plan.stages, False)
    assert "detect cannot keep up with 1000 requests/s" in after.why


def test_lightest_and_heaviest_never_change_their_variants() -> None:
    for rate_rps in (1, 10, 40):
        assert [v for v, _, _ in chosen(ipa(only="lightest").plan(0, video(rate_rps)))] == ["n", "R18"]
        assert [v for v, _, _ in chosen(ipa(only="heaviest").plan(0, video(rate_rps)))] == ["m", "R50"]


def test_before_anything_was_seen_the_lightest_start() -> None:
    nothing = [replace(stage, buckets=[]) for stage in video(0).stages]
    view = make_view(*nothing, rates={"detect": 0.0, "classify": 0.0})
    plan = ipa().plan(0, view)
    assert plan is not None
    assert chosen(plan) == [("n", 1, 1), ("R18", 1, 1)]
    assert plan.why.startswith("nothing seen yet")
    assert chosen(ipa(initial_rps=20.0).plan(0, view)) == [("n", 1, 2), ("R18", 8, 1)]


def test_without_requests_one_replica_of_what_is_best() -> None:
    plan = ipa(alpha=100.0).plan(0, video(0))
    assert chosen(plan) == [("m", 1, 1), ("R50", 1, 1)]


def test_it_decides_every_ten_seconds_from_the_first_request_on() -> None:
    policy = ipa()
    nothing = make_view(*[replace(stage, buckets=[]) for stage in video(0).stages])
    for second in range(3):
        plan = policy.plan(s(second), nothing)
        assert plan is not None
        assert plan.why.startswith("nothing seen yet")
    assert chosen(policy.plan(s(3), video(20))) == [("n", 1, 2), ("R18", 8, 1)]
    assert all(policy.plan(s(second), video(30)) is None for second in range(4, 13))
    assert chosen(policy.plan(s(13), video(30))) == [("n", 4, 2), ("R18", 2, 2)]


def test_headroom_and_load_leave_room() -> None:
    assert chosen(ipa(headroom=1.0).plan(0, video(10))) == chosen(ipa().plan(0, video(20)))
    few, many = (ipa(load_max=load, batch_max=1, only="lightest").plan(0, video(20)) for load in (1.0, 0.5))
    assert sum(count for _, _, count in chosen(many)) > sum(count for _, _, count in chosen(few))


def test_no_more_than_the_cluster_has() -> None:
    plan = ipa().plan(0, video(30, cores=3))
    assert plan is not None
    assert not plan.feasible
    assert "at least 4 cores are needed where there are 3" in plan.why
    assert sum(t.groups[0].count * t.groups[0].spec.cores for t in plan.stages) <= 3
    assert ipa(capped=False).plan(0, video(30, cores=3)) is not None


def test_a_deadline_below_what_it_takes_names_the_stage() -> None:
    plan = ipa().plan(0, video(5, slo_ms=100))
    assert plan is not None
    assert not plan.feasible
    assert "detect → classify takes at least 153 ms, 53 ms more than there are; detect alone 80 ms" in plan.why
    assert chosen(plan) == [("n", 1, 1), ("R18", 1, 1)]


def test_a_switch_may_have_to_be_wanted_more_than_once() -> None:
    calm = ipa(hysteresis=2)
    plan = calm.plan(0, video(10))
    same = calm.plan(s(10), video(7, plan=plan))
    assert [v for v, _, _ in chosen(same)] == ["n", "R34"]
    assert [v for v, _, _ in chosen(calm.plan(s(20), video(7, plan=same)))] == ["n", "R50"]


def test_each_way_through_a_graph_is_in_time() -> None:
    """Two stages beside each other do not add up, and each has its own rate."""
    source, left, right = (
        replace(video(5).stages[0], name=name, slo_ns=ms(500)) for name in ("source", "left", "right")
    )
    paths = (Path(("source", "left"), ms(500)), Path(("source", "right"), ms(200)))
    rates = {"source": 5.0, "left": 5.0, "right": 5.0}
    view = make_view(source, replace(left, slo_ns=ms(500)), right, paths=paths, rates=rates)
    own = StageTerms(cores={"n": 1.0, "s": 1.0, "m": 2.0})
    plan = ipa(alpha=1000.0, batch_max=1, stages={"source": own, "left": own, "right": own}).plan(0, view)
    assert chosen(plan) == [("n", 1, 1), ("m", 1, 2), ("n", 1, 1)]


def test_accuracy_is_needed_where_there_is_a_choice() -> None:
    stage = make_stage(name="s", variants=beliefs({"a": (0.5, 10, 1), "b": (None, 10, 1)}))
    with pytest.raises(InputError, match="stage s: variant 'b' has no accuracy"):
        Ipa().plan(0, make_view(stage))


@pytest.mark.parametrize("measure", ["pas", "pas_rank", "norm_prod"])
def test_every_measure_falls_with_the_rate(measure: Any) -> None:
    plans = [ipa(accuracy=measure).plan(0, video(rate_rps)) for rate_rps in (5, 40)]
    cores = [sum(target.groups[0].count for target in plan.stages) for plan in plans if plan]
    assert cores[0] < cores[1]


def test_a_stage_that_is_not_there_is_named(stage: Callable[..., StageView], view: Callable[..., ClusterView]) -> None:
    with pytest.raises(InputError, match="no stage 'third'"):
        Ipa(stages={"third": StageTerms()}).plan(0, view(stage()))


def test_a_solver_that_gives_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ipa().plan(0, video(10))
    monkeypatch.setattr(labels, "solve", lambda *_, **__: labels.Solved(None, gave_up=True))
    after = ipa().plan(0, video(30, plan=before))
    assert before is not None
    assert after is not None
    assert (after.stages, after.feasible) == (before.stages, False)
    assert after.gave_up
    assert after.why == "30 requests/s: the solver gave up with nothing found; kept as it was"
    first = ipa().plan(0, video(30))
    assert first is not None
    assert not first.feasible
    assert first.why.endswith("the solver gave up with nothing found → the least latency there is")


def test_where_the_linear_program_gives_up_labels_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants_milp, "solve", lambda *_, **__: None)
    assert chosen(ipa(solver="milp").plan(0, video(10))) == [("n", 1, 1), ("R34", 2, 1)]


def test_an_answer_that_is_not_proved_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = labels.solve

    def hasty(stages: Sequence[Choices], goal: Goal) -> labels.Solved:
        return exact(stages, goal, work_max=1)

    monkeypatch.setattr(labels, "solve", hasty)
    plan = ipa().plan(0, video(10))
    assert plan is not None
    assert plan.feasible
    assert "from the best" in plan.why


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1},
        {"unit": 0},
        {"threshold_rps": 0},
        {"batch_max": 0},
        {"replicas": -1},
        {"load_max": 1.5},
        {"margin": 0},
        {"headroom": -1},
        {"hysteresis": 0},
        {"interval_ns": 0},
        {"period_ns": 0},
    ],
)
def test_refuses_what_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Ipa(**wrong)
