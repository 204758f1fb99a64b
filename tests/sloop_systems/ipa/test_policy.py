"""IPA's decisions and their reasons; views as problems, base allocation, and plans from solutions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from sloop.core.views import Bucket, ClusterView, StageView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies import targets
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Amdahl, Profile, Quadratic
from sloop.solvers.budget import IndexedPath
from sloop.testing.views import make_belief, make_node, make_stage, make_view, named
from sloop.units import ms, s
from sloop.vocabulary import Path, Plan
from sloop_systems.ipa import label_setting
from sloop_systems.ipa.policy import Ipa, IpaProblem, IpaStageTerms, VariantsByStage, ipa_stage, variants_by_stage
from sloop_systems.ipa.solver import Candidate, IpaGoal, IpaStage
from tests.asked import next_plan

DETECTION = {"n": (45.7, 57.3, 22.7), "s": (56.8, 160.0, 40.0), "m": (64.1, 186.7, 160.3)}
CLASSIFICATION = {"R18": (69.75, 44.3, 28.7), "R34": (73.31, 78.0, 32.0), "R50": (76.13, 99.6, 36.4)}
CORES = {
    "detect": IpaStageTerms(cores={"n": 1.0, "s": 1.0, "m": 2.0}),
    "classify": IpaStageTerms(cores={"R18": 1.0, "R34": 1.0, "R50": 1.0}),
}


def beliefs(family: Mapping[str, tuple[float | None, float, float]]) -> tuple[Estimate, ...]:
    """Accuracy, milliseconds per request and per batch."""
    profiles = {
        name: Profile(latency_ms=Quadratic(alpha=0, beta=each, gamma=fixed), max_batch=8, max_cores=16)
        for name, (_, each, fixed) in family.items()
    }
    return tuple(make_belief(profile, name, accuracy=family[name][0]) for name, profile in profiles.items())


def video(rate_rps: float, *, slo_ms: float = 6890, cores: float = 1000, plan: Plan | None = None) -> ClusterView:
    buckets = [Bucket(s(second), arrivals=round(rate_rps)) for second in range(30)]
    stages = [
        make_stage(*buckets, name=name, beliefs=beliefs(family), slo_ms=slo_ms)
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
    plan = next_plan(ipa(), 0, video(rate_rps))
    assert chosen(plan) == expected
    assert plan is not None
    assert plan.feasible
    assert plan.why.startswith(f"{rate_rps:g} requests/s → detect {expected[0][2]} × n")


def test_batches_wait_twice_as_long_as_they_should_take_to_fill() -> None:
    plan = next_plan(ipa(), 0, video(20))
    assert plan is not None
    assert [target.wait_ns for target in plan.stages] == [0, ms(700)]


def test_the_same_replicas_always_choose_by_what_keeps_up() -> None:
    assert chosen(next_plan(ipa(replicas=3), 0, video(30))) == [("n", 1, 3), ("R34", 2, 3)]
    held = ipa(replicas=3, infeasible="hold")
    plan = next_plan(held, 0, video(10))
    after = next_plan(held, s(10), video(1000, plan=plan))
    assert after is not None
    assert plan is not None
    assert (after.stages, after.feasible) == (plan.stages, False)
    assert "detect cannot keep up with 1000 requests/s" in after.why


def test_lightest_and_heaviest_never_change_their_variants() -> None:
    for rate_rps in (1, 10, 40):
        assert [v for v, _, _ in chosen(next_plan(ipa(only="lightest"), 0, video(rate_rps)))] == ["n", "R18"]
        assert [v for v, _, _ in chosen(next_plan(ipa(only="heaviest"), 0, video(rate_rps)))] == ["m", "R50"]


def test_before_anything_was_seen_the_lightest_start() -> None:
    nothing = [replace(stage, buckets=[]) for stage in video(0).stages]
    view = make_view(*nothing, rates={"detect": 0.0, "classify": 0.0})
    plan = next_plan(ipa(), 0, view)
    assert plan is not None
    assert chosen(plan) == [("n", 1, 1), ("R18", 1, 1)]
    assert plan.why.startswith("nothing seen yet")
    assert chosen(next_plan(ipa(initial_rps=20.0), 0, view)) == [("n", 1, 2), ("R18", 8, 1)]


def test_without_requests_one_replica_of_what_is_best() -> None:
    plan = next_plan(ipa(alpha=100.0), 0, video(0))
    assert chosen(plan) == [("m", 1, 1), ("R50", 1, 1)]


def test_it_decides_every_ten_seconds_from_the_first_request_on() -> None:
    policy = ipa()
    nothing = make_view(*[replace(stage, buckets=[]) for stage in video(0).stages])
    for second in range(3):
        plan = next_plan(policy, s(second), nothing)
        assert plan is not None
        assert plan.why.startswith("nothing seen yet")
    assert chosen(next_plan(policy, s(3), video(20))) == [("n", 1, 2), ("R18", 8, 1)]
    assert all(next_plan(policy, s(second), video(30)) is None for second in range(4, 13))
    assert chosen(next_plan(policy, s(13), video(30))) == [("n", 4, 2), ("R18", 2, 2)]


def test_headroom_and_load_leave_room() -> None:
    assert chosen(next_plan(ipa(headroom=1.0), 0, video(10))) == chosen(next_plan(ipa(), 0, video(20)))
    few, many = (next_plan(ipa(load_max=load, batch_max=1, only="lightest"), 0, video(20)) for load in (1.0, 0.5))
    assert sum(count for _, _, count in chosen(many)) > sum(count for _, _, count in chosen(few))


def test_no_more_than_the_cluster_has() -> None:
    plan = next_plan(ipa(), 0, video(30, cores=3))
    assert plan is not None
    assert not plan.feasible
    assert "at least 4 cores are needed where there are 3" in plan.why
    assert sum(t.groups[0].count * t.groups[0].spec.cores for t in plan.stages) <= 3
    assert next_plan(ipa(capped=False), 0, video(30, cores=3)) is not None


def test_a_deadline_below_what_it_takes_names_the_stage() -> None:
    plan = next_plan(ipa(), 0, video(5, slo_ms=100))
    assert plan is not None
    assert not plan.feasible
    assert "detect → classify takes at least 153 ms, 53 ms more than there are; detect alone 80 ms" in plan.why
    assert chosen(plan) == [("n", 1, 1), ("R18", 1, 1)]


def test_a_switch_may_have_to_be_wanted_more_than_once() -> None:
    calm = ipa(hysteresis=2)
    plan = next_plan(calm, 0, video(10))
    same = next_plan(calm, s(10), video(7, plan=plan))
    assert [v for v, _, _ in chosen(same)] == ["n", "R34"]
    assert [v for v, _, _ in chosen(next_plan(calm, s(20), video(7, plan=same)))] == ["n", "R50"]


def test_each_way_through_a_graph_is_in_time() -> None:
    """Two stages beside each other do not add up, and each has its own rate."""
    source, left, right = (
        replace(video(5).stages[0], name=name, slo_ns=ms(500)) for name in ("source", "left", "right")
    )
    paths = (Path(("source", "left"), ms(500)), Path(("source", "right"), ms(200)))
    rates = {"source": 5.0, "left": 5.0, "right": 5.0}
    view = make_view(source, replace(left, slo_ns=ms(500)), right, paths=paths, rates=rates)
    own = IpaStageTerms(cores={"n": 1.0, "s": 1.0, "m": 2.0})
    plan = next_plan(ipa(alpha=1000.0, batch_max=1, stages={"source": own, "left": own, "right": own}), 0, view)
    assert chosen(plan) == [("n", 1, 1), ("m", 1, 2), ("n", 1, 1)]


def test_accuracy_is_needed_where_there_is_a_choice() -> None:
    stage = make_stage(name="s", beliefs=beliefs({"a": (0.5, 10, 1), "b": (None, 10, 1)}))
    with pytest.raises(InputError, match="stage s: variant 'b' has no accuracy"):
        next_plan(Ipa(), 0, make_view(stage))


@pytest.mark.parametrize("measure", ["pas", "pas_rank", "norm_prod"])
def test_every_measure_falls_with_the_rate(measure: Any) -> None:
    plans = [next_plan(ipa(accuracy=measure), 0, video(rate_rps)) for rate_rps in (5, 40)]
    cores = [sum(target.groups[0].count for target in plan.stages) for plan in plans if plan]
    assert cores[0] < cores[1]


def test_a_stage_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="no stage 'third'"):
        next_plan(Ipa(stages={"third": IpaStageTerms()}), 0, make_view(make_stage()))


def test_a_solver_that_gives_up_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = next_plan(ipa(), 0, video(10))
    monkeypatch.setattr(label_setting, "solve", lambda *_, **__: label_setting.LabelSettingResult(None, gave_up=True))
    after = next_plan(ipa(), 0, video(30, plan=before))
    assert before is not None
    assert after is not None
    assert (after.stages, after.feasible) == (before.stages, False)
    assert after.gave_up
    assert after.why == "30 requests/s: the solver gave up with nothing found; kept as it was"
    first = next_plan(ipa(), 0, video(30))
    assert first is not None
    assert not first.feasible
    assert first.why.endswith("the solver gave up with nothing found → the least latency there is")


def test_an_answer_that_is_not_proved_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = label_setting.solve

    def hasty(stages: Sequence[IpaStage], goal: IpaGoal) -> label_setting.LabelSettingResult:
        return exact(stages, goal, work_max=1)

    monkeypatch.setattr(label_setting, "solve", hasty)
    plan = next_plan(ipa(), 0, video(10))
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
    with pytest.raises(InputError, match="must be"):
        check_ranges(Ipa(**wrong))


def ipa_stages(
    view: ClusterView, variants: VariantsByStage, policy: Ipa, headroom: float = 0.0
) -> tuple[IpaStage, ...]:
    rates = view.demand_rps
    return tuple(ipa_stage(own, variants[own.name], policy, rates[own.name] * (1 + headroom)) for own in view.stages)


def belief(one_ms: float, accuracy: float | None = None, *, batch_max: int = 8, cores_max: float = 32) -> Estimate:
    """Each request of a batch takes `one_ms` of one core."""
    latency = Amdahl(gamma=one_ms, epsilon=0, delta=0, eta=0.001)
    profile = Profile(latency_ms=latency, max_batch=batch_max, max_cores=cores_max)
    return Estimate(profile, accuracy=accuracy, correct=False)


def stage_of(name: str, variants: Mapping[str, Estimate], slo_ms: float = 4000) -> StageView:
    return make_stage(name=name, beliefs=named(variants), slo_ms=slo_ms)


def small_batches(**changes: Any) -> Ipa:
    return Ipa(**{"batch_max": 4, **changes})


@pytest.fixture(name="seen")
def seen_fixture() -> ClusterView:
    detect = stage_of("detect", {"n": belief(100, 45.7), "m": belief(300, 64.1)})
    classify = stage_of("classify", {"r": belief(50, 0.7), "x": belief(150, 0.9)})
    return make_view(detect, classify, rates={"detect": 10.0, "classify": 20.0})


def test_cores_follow_from_threshold_and_deadline(seen: ClusterView) -> None:
    found = variants_by_stage(seen, small_batches())
    assert [(m.variant, m.cores) for m in found["detect"]] == [("n", 1.0), ("m", 2.0)]
    assert [m.score for m in found["detect"]] == pytest.approx([0.457, 0.641])
    assert [(m.variant, m.cores) for m in found["classify"]] == [("r", 1.0), ("x", 1.0)]
    small = variants_by_stage(seen, small_batches(unit=0.5, threshold_rps=1.0))
    assert [m.cores for m in small["classify"]] == [0.5, 0.5]


def test_what_is_given_of_a_stage_goes_first(seen: ClusterView) -> None:
    own = {"detect": IpaStageTerms(cores={"n": 3.0, "m": 6.0}), "classify": IpaStageTerms(variant="x", replicas=2)}
    found = variants_by_stage(seen, small_batches(stages=own))
    assert [m.cores for m in found["detect"]] == [3.0, 6.0]
    assert [m.variant for m in found["classify"]] == ["x"]
    assert [c.replicas for c in ipa_stages(seen, found, small_batches(stages=own))] == [0, 2]


def test_lightest_and_heaviest(seen: ClusterView) -> None:
    light, heavy = (variants_by_stage(seen, small_batches(only=only)) for only in ("lightest", "heaviest"))
    assert [members[0].variant for members in light.values()] == ["n", "r"]
    assert [members[0].variant for members in heavy.values()] == ["m", "x"]


def test_a_small_node_gives_all_it_has() -> None:
    heavy = make_view(stage_of("s", {"v": belief(9000)}), nodes=(make_node(cores=2),))
    (member,) = variants_by_stage(heavy, small_batches())["s"]
    assert (member.cores, member.score) == (2.0, 1.0)
    tiny = make_view(stage_of("s", {"v": belief(10)}), nodes=(make_node(cores=0.5),))
    assert variants_by_stage(tiny, small_batches())["s"][0].cores == 0.5


def test_nobody_gets_cores_that_it_has_no_use_for() -> None:
    view = make_view(stage_of("s", {"v": belief(700, cores_max=2)}), nodes=(make_node(cores=16),))
    assert variants_by_stage(view, small_batches())["s"][0].cores == 2.0
    alone = make_view(stage_of("s", {"v": belief(9000, cores_max=1)}), nodes=(make_node(cores=16),))
    assert variants_by_stage(alone, small_batches())["s"][0].cores == 1.0
    assert variants_by_stage(alone, small_batches(unit=4.0))["s"][0].cores == 4.0, "no less than a unit"


def test_where_no_largest_batch_keeps_its_share_smaller_batches_do_before_more_cores() -> None:
    """Batches of eight take 27 ms of a share of 20 however many cores there are, single requests 8."""
    profile = Profile(latency_ms=Quadratic(alpha=0.1, beta=3, gamma=5), max_batch=6, max_cores=16)
    names = ("a", "b", "c")
    stages = [stage_of(name, {name: Estimate(profile, correct=False)}, slo_ms=60) for name in names]
    view = make_view(*stages, rates=dict.fromkeys(names, 5.0), nodes=(make_node(cores=16), make_node(cores=16)))
    found = variants_by_stage(view, small_batches(batch_max=8))
    assert [members[0].cores for members in found.values()] == [1.0] * 3
    named = small_batches(batch_max=8, stages={name: IpaStageTerms(variant=name) for name in names})
    assert variants_by_stage(view, named) == found
    alone = make_view(stage_of("s", {"v": belief(150)}, slo_ms=100), nodes=(make_node(cores=4),))
    assert variants_by_stage(alone, small_batches())["s"][0].cores == 2.0, (
        "one request within its share, not only the rate"
    )


def test_where_nothing_keeps_its_share_it_is_as_quick_as_can_be() -> None:
    """What another stage leaves may do: the shares go by the time alone on the fewest cores."""
    quick = {"v": belief(700, cores_max=8)}
    view = make_view(stage_of("s", quick, slo_ms=60), nodes=(make_node(cores=16),))
    assert variants_by_stage(view, small_batches())["s"][0].cores == 8.0
    both = (stage_of("s", quick), stage_of("t", {"v": belief(100)}))
    path = (Path(("s", "t"), ms(99)),)
    found = variants_by_stage(make_view(*both, paths=path, nodes=(make_node(cores=16),)), small_batches())
    assert found["s"][0].cores == 8.0, "87.5 of a share of 86.6 ms"
    assert found["t"][0].cores == 16.0, "6.25 ms, and 99 in all are kept"


def test_accuracy_is_asked_of_those_too_that_get_no_cores() -> None:
    view = make_view(stage_of("s", {"a": belief(100, 0.5), "b": belief(90000)}))
    with pytest.raises(InputError, match="stage s: variant 'b' has no accuracy"):
        variants_by_stage(view, small_batches())
    assert [m.variant for m in variants_by_stage(view, small_batches(only="heaviest"))["s"]] == ["a"]
    assert variants_by_stage(view, small_batches(stages={"s": IpaStageTerms(variant="a")}))["s"][0].variant == "a"


def test_accuracy_must_be_known_where_there_is_a_choice() -> None:
    view = make_view(stage_of("s", {"a": belief(100, 0.5), "b": belief(100)}))
    with pytest.raises(InputError, match="stage s: variant 'b' has no accuracy"):
        variants_by_stage(view, small_batches())
    assert variants_by_stage(view, small_batches(only="lightest"))["s"][0].variant == "a"
    assert variants_by_stage(view, small_batches(stages={"s": IpaStageTerms(variant="b")}))["s"][0].score == 1.0


def test_what_is_not_there_is_named(seen: ClusterView) -> None:
    with pytest.raises(InputError, match="system ipa: no stage 'detekt'"):
        variants_by_stage(seen, small_batches(stages={"detekt": IpaStageTerms()}))
    with pytest.raises(InputError, match="stage detect has no variant 'z'"):
        variants_by_stage(seen, small_batches(stages={"detect": IpaStageTerms(variant="z")}))
    with pytest.raises(InputError, match="stage detect has no variant 'z'"):
        variants_by_stage(seen, small_batches(stages={"detect": IpaStageTerms(cores={"z": 1.0})}))


def test_a_figure_that_cannot_be_is_refused() -> None:
    for wrong in ({"threshold_rps": 0.0}, {"slo_ms": -1.0}, {"replicas": 0}, {"cores": {"n": 0.0}}):
        with pytest.raises(InputError, match="must be"):
            check_ranges(IpaStageTerms(**wrong))


def test_rates_batches_and_latencies(seen: ClusterView) -> None:
    detect, classify = ipa_stages(seen, variants_by_stage(seen, small_batches()), small_batches(load_max=0.5), 0.2)
    assert (detect.rate_rps, classify.rate_rps) == pytest.approx((12.0, 24.0))
    assert detect.batches == (1, 2, 4)
    assert detect.candidates[0].latency_ms == pytest.approx((100.0, 200.0, 400.0), rel=1e-3)
    assert detect.candidates[0].busy_ms == pytest.approx((200.0, 400.0, 800.0), rel=1e-3)


def test_a_batch_that_a_variant_does_not_take_is_never_chosen() -> None:
    view = make_view(stage_of("s", {"a": belief(10, 0.5, batch_max=1), "b": belief(10, 0.6, batch_max=4)}))
    (own,) = ipa_stages(view, variants_by_stage(view, small_batches()), small_batches(), 0.0)
    assert own.batches == (1, 2, 4)
    assert own.candidates[0].latency_ms[1:] == (float("inf"), float("inf"))


def test_a_solution_becomes_a_plan_and_is_found_again_in_it(seen: ClusterView) -> None:
    policy = small_batches()
    variants = variants_by_stage(seen, policy)
    goal = IpaGoal(0.0, 10.0, 0.5, paths=targets.indexed_paths(seen, 1.0))
    problem = IpaProblem(seen, variants, ipa_stages(seen, variants, policy), goal, "")
    solution = label_setting.solve(problem.stages, goal).solution
    assert solution is not None
    made = problem.stage_plans(solution.options)
    assert [target.groups[0].count for target in made] == [option.replicas for option in solution.options]
    assert all(target.wait_ns <= s(1) for target in made)
    assert problem.variants_in_force() is None
    running = replace(problem, view=replace(seen, plan=Plan(made, "")))
    assert running.variants_in_force() == tuple(option.candidate for option in solution.options)
    text = problem.describe(solution)
    assert "detect" in text
    assert "of 4000 ms" in text


QUICK, SLOW = Candidate(0.5, 1.0, (100.0,)), Candidate(0.9, 2.0, (150.0,))


def why_infeasible(
    rate_rps: float, *, slo_ms: float = 400, cores_max: float = inf, replicas_max: int = 100, replicas: int = 0
) -> str:
    """Two stages, `a` with a quick and a slow candidate, `b` with the slow one."""
    stages = (IpaStage(rate_rps, (1,), (QUICK, SLOW), replicas), IpaStage(rate_rps, (1,), (SLOW,), replicas))
    paths = (IndexedPath((0, 1), slo_ms),)
    goal = IpaGoal(0.0, 1.0, 1.0, cores_max=cores_max, replicas_max=replicas_max, paths=paths)
    return IpaProblem(make_view(make_stage(name="a"), make_stage(name="b")), {}, stages, goal, "").infeasibility()


def test_a_path_that_is_too_long_is_named_with_its_slowest_stage() -> None:
    assert why_infeasible(5, slo_ms=200) == "a → b takes at least 250 ms, 50 ms more than there are; b alone 150 ms"


def test_a_stage_that_cannot_keep_up_is_named_with_what_it_would_need() -> None:
    why = why_infeasible(100, replicas_max=12)
    assert why == "b cannot keep up with 100 requests/s: it needs 15 replicas where 12 are the most"
    assert "where 3 are the most" in why_infeasible(100, replicas=3)


def test_missing_cores_are_counted() -> None:
    why = why_infeasible(20, cores_max=4)
    assert why == "at least 8 cores are needed where there are 4; 6 cores of them for b"
