"""Why goals cannot be met: which stage, and by how much."""

import pytest

from sloop.systems.planning import need
from sloop.systems.planning.answer import Lack
from sloop.systems.planning.lacking import fastest, lacks_of, thriftiest
from sloop.systems.planning.predict import Outlook
from sloop.systems.planning.steady import steady_plan
from tests.systems.planning.scene import READING, nodes, profile, setup, stage

TWO = (stage("detect"), stage("read", "detect", profile=profile(40, 20)))


def test_a_deadline_below_the_unloaded_latency() -> None:
    """Whatever the system: 10/4 + 40/4 + 20 ms on four cores each, of 25."""
    answer = need(setup(*TWO, slo_ms=25), 1)
    (lack,) = answer.lacks
    assert (lack.kind, lack.stage, lack.path, lack.unit) == ("deadline", "read", ("detect", "read"), "ms")
    assert (lack.needs, lack.has, lack.by) == pytest.approx((32.5, 25, 7.5))
    assert lack.why == (
        "read alone takes 30 ms on its fastest setting (read, 4 cores); the path detect → read needs at least "
        "32.5 ms of 25 ms: 7.5 ms too many, even unloaded"
    )
    assert not answer.feasible
    assert lack.why in answer.why


def test_the_only_stage_is_no_path() -> None:
    (lack,) = need(setup(stage("a"), slo_ms=2), 1).lacks
    assert lack.why == (
        "a alone takes 2.5 ms on its fastest setting (a, 4 cores) of 2 ms: 0.5 ms too many, even unloaded"
    )


def test_a_plan_too_slow_for_a_deadline_that_could_be_kept() -> None:
    (lack,) = need(setup(*TWO, slo_ms=65, system={"name": "static", "cores": 1}), 1).lacks
    assert lack.why == (
        "the predicted 70 ms of detect → read exceed the deadline of 65 ms by 5 ms, most of it at read "
        "(60 ms service, 0 ms wait); unloaded, on these variants and cores, a request takes 70 ms"
    )


def test_every_path_has_its_own_deadline() -> None:
    paths = [{"stages": ["detect", "read"], "slo_ms": 20}, {"stages": ["detect", "digits"], "slo_ms": 500}]
    stages = (*TWO, stage("digits", "detect"))
    answer = need(setup(*stages, paths=paths, slo_ms=500), 1)
    assert [lack.path for lack in answer.lacks] == [("detect", "read")]
    assert [(path.stages[1], path.slo_ms) for path in answer.paths] == [("read", 20), ("digits", 500)]


def test_many_paths_are_counted() -> None:
    stages = [stage("a"), *(stage(f"b{place}", "a") for place in range(5))]
    assert [lack.why for lack in need(setup(*stages, slo_ms=4), 1).lacks][
        -1
    ] == "2 more paths need more time than they have"
    late = need(setup(*stages, slo_ms=15), 1).lacks
    assert late[-1] == Lack("deadline", "2 more paths exceed their deadlines")


def test_a_stage_that_cannot_keep_up() -> None:
    answer = need(setup(*READING, slo_ms=1000, cluster=nodes(8, 1), system={"name": "static", "batch_max": 1}), 30)
    lacks = [lack for lack in answer.lacks if lack.kind == "throughput"]
    assert [(lack.stage, lack.needs, round(lack.has)) for lack in lacks] == [("read", 150, 100)]
    assert (
        lacks[0].why == "the plan cannot keep up with 30 requests/s: read keeps up with 100 of 150 a second: 50 too few"
    )


def test_a_cluster_too_small_for_the_rate() -> None:
    """10 ms of a core each, whatever the batch: 5.2 cores for 520 requests per second."""
    answer = need(setup(stage("a"), slo_ms=1000, cluster=nodes(4, 1), system="fa2"), 520)
    lack = next(lack for lack in answer.lacks if lack.kind == "cores")
    assert (lack.needs, lack.has, lack.by) == pytest.approx((5.2, 4, 1.2))
    assert lack.why.startswith(
        "520 requests/s take 5.2 cores even on the thriftiest settings, the cluster has 4: 1.2 too few; a alone"
    )


@pytest.mark.parametrize("system", ["static", "fa2", "ipa", "biscale", "inferline", "grandslam", "ds2"])
def test_no_system_promises_what_cannot_be(system: str) -> None:
    impossible = need(setup(*TWO, slo_ms=25, system=system), 5)
    assert not impossible.feasible
    assert any(lack.kind == "deadline" and lack.by == pytest.approx(7.5) for lack in impossible.lacks)
    assert impossible.one_more is not None
    assert impossible.one_more.says.startswith("cannot: ")


def test_no_replicas_for_what_comes() -> None:
    answer = need(setup(stage("a"), system={"name": "static", "replicas": 0}), 5)
    assert "a has no replicas" in answer.why
    assert need(setup(stage("a"), system={"name": "static", "replicas": 0}), 0).feasible


def test_waiting_for_what_never_comes() -> None:
    forever = {"name": "static", "batch": {"name": "full", "forever": True}}
    assert "a waits for batches that never fill" in need(setup(stage("a"), system=forever), 0).why


def test_fastest_and_thriftiest_settings() -> None:
    variants = [{"name": "small", "profile": profile(10, 2)}, {"name": "large", "profile": profile(30)}]
    made = setup({"name": "a", "variants": variants}, slo_ms=1000)
    outlook = Outlook(made, steady_plan(made, 1).plan, 1)
    quick, thrifty = fastest(outlook.stages["a"], 3), thriftiest(outlook.stages["a"], 3)
    assert (quick.variant, quick.cores, round(quick.value, 3)) == ("small", 3, 5.333)
    assert (thrifty.variant, thrifty.cores, thrifty.batch) == ("small", 0.1, 4)
    assert lacks_of(made, outlook) == []
