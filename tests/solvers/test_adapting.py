"""From a view to IPA's program and back."""

from collections.abc import Mapping
from typing import Any

import pytest

from sloop.core.views import Belief, ClusterView, StageView
from sloop.errors import InputError
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Amdahl, Quadratic
from sloop.profile.profile import Profile
from sloop.solvers import adapting, labels, targets
from sloop.solvers.adapting import StageTerms, Terms
from sloop.solvers.variants import Goal
from sloop.units import ms, s
from sloop.vocabulary import Path, Plan
from tests.policies.conftest import make_node, make_stage, make_view


def belief(one_ms: float, accuracy: float | None = None, *, batch_max: int = 8, cores_max: float = 32) -> Belief:
    """Each request of a batch takes `one_ms` of one core."""
    latency = Amdahl(gamma=one_ms, epsilon=0, delta=0, eta=0.001)
    profile = Profile(latency_ms=latency, max_batch=batch_max, max_cores=cores_max)
    return Estimate(profile, accuracy=accuracy, correct=False)


def stage(name: str, variants: Mapping[str, Belief], slo_ms: float = 4000) -> StageView:
    return make_stage(name=name, variants=variants, slo_ms=slo_ms)


def terms(**changes: Any) -> Terms:
    values: dict[str, Any] = {
        "system": "ipa",
        "measure": "pas",
        "only": "any",
        "unit": 1.0,
        "threshold_rps": 5.0,
        "batch_max": 4,
        "load_max": 1.0,
        "replicas": 0,
        "stages": {},
    }
    return Terms(**values | changes)


@pytest.fixture(name="seen")
def seen_fixture() -> ClusterView:
    detect = stage("detect", {"n": belief(100, 45.7), "m": belief(300, 64.1)})
    classify = stage("classify", {"r": belief(50, 0.7), "x": belief(150, 0.9)})
    return make_view(detect, classify, rates={"detect": 10.0, "classify": 20.0})


def test_cores_follow_from_threshold_and_deadline(seen: ClusterView) -> None:
    found = adapting.families(seen, terms())
    assert [(m.variant, m.cores) for m in found["detect"]] == [("n", 1.0), ("m", 2.0)]
    assert [m.score for m in found["detect"]] == pytest.approx([0.457, 0.641])
    assert [(m.variant, m.cores) for m in found["classify"]] == [("r", 1.0), ("x", 1.0)]
    small = adapting.families(seen, terms(unit=0.5, threshold_rps=1.0))
    assert [m.cores for m in small["classify"]] == [0.5, 0.5]


def test_what_is_given_of_a_stage_goes_first(seen: ClusterView) -> None:
    own = {"detect": StageTerms(cores={"n": 3.0, "m": 6.0}), "classify": StageTerms(variant="x", replicas=2)}
    found = adapting.families(seen, terms(stages=own))
    assert [m.cores for m in found["detect"]] == [3.0, 6.0]
    assert [m.variant for m in found["classify"]] == ["x"]
    assert [c.replicas for c in adapting.program(seen, found, terms(stages=own), 0.0)] == [0, 2]


def test_lightest_and_heaviest(seen: ClusterView) -> None:
    light, heavy = (adapting.families(seen, terms(only=only)) for only in ("lightest", "heaviest"))
    assert [members[0].variant for members in light.values()] == ["n", "r"]
    assert [members[0].variant for members in heavy.values()] == ["m", "x"]


def test_a_small_node_gives_all_it_has() -> None:
    heavy = make_view(stage("s", {"v": belief(9000)}), nodes=(make_node(cores=2),))
    (member,) = adapting.families(heavy, terms())["s"]
    assert (member.cores, member.score) == (2.0, 1.0)
    tiny = make_view(stage("s", {"v": belief(10)}), nodes=(make_node(cores=0.5),))
    assert adapting.families(tiny, terms())["s"][0].cores == 0.5


def test_nobody_gets_cores_that_it_has_no_use_for() -> None:
    view = make_view(stage("s", {"v": belief(700, cores_max=2)}), nodes=(make_node(cores=16),))
    assert adapting.families(view, terms())["s"][0].cores == 2.0
    alone = make_view(stage("s", {"v": belief(9000, cores_max=1)}), nodes=(make_node(cores=16),))
    assert adapting.families(alone, terms())["s"][0].cores == 1.0
    assert adapting.families(alone, terms(unit=4.0))["s"][0].cores == 4.0, "no less than a unit"


def test_where_no_largest_batch_keeps_its_share_smaller_batches_do_before_more_cores() -> None:
    """Batches of eight take 27 ms of a share of 20 however many cores there are, single requests 8."""
    profile = Profile(latency_ms=Quadratic(alpha=0.1, beta=3, gamma=5), max_batch=6, max_cores=16)
    names = ("a", "b", "c")
    stages = [stage(name, {name: Estimate(profile, correct=False)}, slo_ms=60) for name in names]
    view = make_view(*stages, rates=dict.fromkeys(names, 5.0), nodes=(make_node(cores=16), make_node(cores=16)))
    found = adapting.families(view, terms(batch_max=8))
    assert [members[0].cores for members in found.values()] == [1.0] * 3
    named = terms(batch_max=8, stages={name: StageTerms(variant=name) for name in names})
    assert adapting.families(view, named) == found
    alone = make_view(stage("s", {"v": belief(150)}, slo_ms=100), nodes=(make_node(cores=4),))
    assert adapting.families(alone, terms())["s"][0].cores == 2.0, "one request within its share, not only the rate"


def test_where_nothing_keeps_its_share_it_is_as_quick_as_can_be() -> None:
    """What another stage leaves may do: the shares go by the time alone on the fewest cores."""
    quick = {"v": belief(700, cores_max=8)}
    view = make_view(stage("s", quick, slo_ms=60), nodes=(make_node(cores=16),))
    assert adapting.families(view, terms())["s"][0].cores == 8.0
    both = (stage("s", quick), stage("t", {"v": belief(100)}))
    way = (Path(("s", "t"), ms(99)),)
    found = adapting.families(make_view(*both, paths=way, nodes=(make_node(cores=16),)), terms())
    assert found["s"][0].cores == 8.0, "87.5 of a share of 86.6 ms"
    assert found["t"][0].cores == 16.0, "6.25 ms, and 99 in all are kept"


def test_accuracy_is_asked_of_those_too_that_get_no_cores() -> None:
    view = make_view(stage("s", {"a": belief(100, 0.5), "b": belief(90000)}))
    with pytest.raises(InputError, match="stage s: variant 'b' has no accuracy"):
        adapting.families(view, terms())
    assert [m.variant for m in adapting.families(view, terms(only="heaviest"))["s"]] == ["a"]
    assert adapting.families(view, terms(stages={"s": StageTerms(variant="a")}))["s"][0].variant == "a"


def test_accuracy_must_be_known_where_there_is_a_choice() -> None:
    view = make_view(stage("s", {"a": belief(100, 0.5), "b": belief(100)}))
    with pytest.raises(InputError, match="stage s: variant 'b' has no accuracy"):
        adapting.families(view, terms())
    assert adapting.families(view, terms(only="lightest"))["s"][0].variant == "a"
    assert adapting.families(view, terms(stages={"s": StageTerms(variant="b")}))["s"][0].score == 1.0


def test_what_is_not_there_is_named(seen: ClusterView) -> None:
    with pytest.raises(InputError, match="system ipa: no stage 'detekt'"):
        adapting.families(seen, terms(stages={"detekt": StageTerms()}))
    with pytest.raises(InputError, match="stage detect has no variant 'z'"):
        adapting.families(seen, terms(stages={"detect": StageTerms(variant="z")}))
    with pytest.raises(InputError, match="stage detect has no variant 'z'"):
        adapting.families(seen, terms(stages={"detect": StageTerms(cores={"z": 1.0})}))


def test_a_figure_that_cannot_be_is_refused() -> None:
    for wrong in ({"threshold_rps": 0.0}, {"slo_ms": -1.0}, {"replicas": 0}, {"cores": {"n": 0.0}}):
        with pytest.raises(ValueError, match="out of range"):
            StageTerms(**wrong)


def test_rates_batches_and_latencies(seen: ClusterView) -> None:
    detect, classify = adapting.program(seen, adapting.families(seen, terms()), terms(load_max=0.5), 0.2)
    assert (detect.rate_rps, classify.rate_rps) == pytest.approx((12.0, 24.0))
    assert detect.batches == (1, 2, 4)
    assert detect.candidates[0].latency_ms == pytest.approx((100.0, 200.0, 400.0), rel=1e-3)
    assert detect.candidates[0].busy_ms == pytest.approx((200.0, 400.0, 800.0), rel=1e-3)


def test_a_batch_that_a_variant_does_not_take_is_never_chosen() -> None:
    view = make_view(stage("s", {"a": belief(10, 0.5, batch_max=1), "b": belief(10, 0.6, batch_max=4)}))
    (own,) = adapting.program(view, adapting.families(view, terms()), terms(), 0.0)
    assert own.batches == (1, 2, 4)
    assert own.candidates[0].latency_ms[1:] == (float("inf"), float("inf"))


def test_an_answer_becomes_a_plan_and_is_found_again_in_it(seen: ClusterView) -> None:
    found = adapting.families(seen, terms())
    stages = adapting.program(seen, found, terms(), 0.0)
    goal = Goal(0.0, 10.0, 0.5, ways=targets.ways(seen, 1.0))
    answer = labels.solve(stages, goal).answer
    assert answer is not None
    made = adapting.stage_plans(seen, found, stages, answer.options)
    assert [target.groups[0].count for target in made] == [option.replicas for option in answer.options]
    assert all(target.wait_ns <= s(1) for target in made)
    plan = Plan(made, "")
    assert adapting.variants_in(plan, seen, found) == tuple(option.candidate for option in answer.options)
    assert adapting.variants_in(None, seen, found) is None
    said = adapting.words(seen, found, goal, answer)
    assert "detect" in said
    assert "of 4000 ms" in said
