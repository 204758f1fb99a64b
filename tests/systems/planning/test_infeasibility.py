"""Why goals cannot be reached: which stage, path or node, and by how much."""

from dataclasses import dataclass, replace

import pytest

from sloop.core.protocols import BatchDecision
from sloop.core.views import BatchDevice, QueueView
from sloop.systems.planning import explain_plan
from sloop.systems.planning.infeasibility import BestConfigurations, shortfalls_of
from sloop.systems.planning.placement import PlanShortfall
from tests.systems.planning.scene import ENOUGH, READING, nodes, only, placed, predicted, profile, setup, stage

TWO = (stage("detect"), stage("read", "detect", profile=profile(40, 20)))


def test_a_deadline_below_the_unloaded_latency() -> None:
    """Whatever the system: 10/4 + 40/4 + 20 ms on four cores each, of 25."""
    answer = explain_plan(setup(*TWO, slo_ms=25), 1)
    (found,) = answer.shortfalls
    assert (found.kind, found.stage, found.path, found.unit) == (
        "deadline",
        "read",
        ("detect", "read"),
        "ms",
    )
    assert (found.needs, found.has) == pytest.approx((32.5, 25))
    assert found.why == (
        "detect → read takes at least 32.5 ms even without load, and the deadline is 25 ms: 7.5 ms too long; "
        "read alone takes 30 ms at best, with variant read on 4 cores"
    )
    assert not answer.feasible
    assert found.why in answer.why


def test_the_only_stage_is_no_path() -> None:
    (found,) = explain_plan(setup(stage("a"), slo_ms=2), 1).shortfalls
    assert found.why == (
        "a takes at least 2.5 ms even without load, and the deadline is 2 ms: 0.5 ms too long; variant a on 4 cores is "
        "the fastest there is"
    )


def test_a_plan_too_slow_for_a_deadline_that_could_be_kept() -> None:
    (found,) = explain_plan(setup(*TWO, slo_ms=65, system={"name": "static", "cores": 1}), 1).shortfalls
    assert found.why == (
        "detect → read is predicted to take 70 ms, and the deadline is 65 ms: 5 ms too long; at read, "
        "the slowest stage, 60 ms service and 0 ms wait; even without load it takes 70 ms on these variants and cores"
    )


def test_every_path_has_its_own_deadline() -> None:
    paths = [{"stages": ["detect", "read"], "slo_ms": 20}, {"stages": ["detect", "digits"], "slo_ms": 500}]
    stages = (*TWO, stage("digits", "detect"))
    answer = explain_plan(setup(*stages, paths=paths, slo_ms=500), 1)
    assert [found.path for found in answer.shortfalls] == [("detect", "read")]
    assert [(path.stages[1], path.slo_ms) for path in answer.paths] == [("read", 20), ("digits", 500)]


def test_many_paths_are_counted() -> None:
    stages = [stage("a"), *(stage(f"b{place}", "a") for place in range(5))]
    impossible = explain_plan(setup(*stages, slo_ms=4), 1).shortfalls
    assert impossible[-1] == PlanShortfall("deadline", "2 more paths have impossible deadlines", application="x")
    late = explain_plan(setup(*stages, slo_ms=15), 1).shortfalls
    assert late[-1] == PlanShortfall("deadline", "2 more paths are too slow", application="x")


def test_a_stage_that_cannot_keep_up() -> None:
    system = {"name": "static", "batch_max": 1}
    answer = explain_plan(setup(*READING, slo_ms=1000, cluster=nodes(8, 1), system=system), 30)
    (found,) = [found for found in answer.shortfalls if found.kind == "throughput"]
    assert (found.stage, found.needs, round(found.has)) == ("read", 150, 100)
    assert found.why == "the plan cannot keep up with 30 requests/s: read serves 100 of 150 requests/s, 50 too few"


def test_a_cluster_too_small_for_the_rate() -> None:
    """10 ms of a core each, whatever the batch: 5.2 cores for 520 requests per second."""
    answer = explain_plan(setup(stage("a"), slo_ms=1000, cluster=nodes(4, 1), system=ENOUGH), 520)
    found = next(found for found in answer.shortfalls if found.kind == "cores")
    assert (found.needs, found.has) == pytest.approx((5.2, 4))
    assert found.why.startswith(
        "520 requests/s need 5.2 cores even on the cheapest configurations, and the cluster has 4: 1.2 too few; a alone"
    )


@pytest.mark.parametrize("system", ["static", "hpa", "kpa", "vertical-only", "mixed"])
def test_no_system_promises_what_cannot_be(system: str) -> None:
    impossible = explain_plan(setup(*TWO, slo_ms=25, system=system), 5)
    assert not impossible.feasible
    assert any(
        found.kind == "deadline" and found.needs - found.has == pytest.approx(7.5) for found in impossible.shortfalls
    )
    assert impossible.one_more is not None
    assert impossible.one_more.summary == "the plan is not feasible as it is"


def test_no_replicas_for_what_comes() -> None:
    answer = explain_plan(setup(stage("a"), system={"name": "static", "replicas": 0}), 5)
    assert "a has no replicas" in answer.why
    assert explain_plan(setup(stage("a"), system={"name": "static", "replicas": 0}), 0).feasible


@dataclass(frozen=True)
class Patient:
    """Waits for a full batch, however long that takes."""

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        return BatchDecision(device.batch_max if len(queue.visits) >= device.batch_max else 0)


def test_waiting_for_what_never_comes() -> None:
    made = setup(stage("a"), system="static")
    (own,) = made.applications
    system = replace(own.system, policies=replace(own.system.policies, batch=Patient()))
    answer = explain_plan(replace(made, applications=(replace(own, system=system),)), 0)
    assert "a waits for batches that never fill" in answer.why


def test_fastest_and_cheapest_configurations() -> None:
    variants = [{"name": "small", "profile": profile(10, 2)}, {"name": "large", "profile": profile(30)}]
    made = setup({"name": "a", "variants": variants}, slo_ms=1000, cluster=nodes(3))
    prediction, best = predicted(made, 1), BestConfigurations(only(made))
    quick, thrifty = best.fastest["a"], best.cheapest["a"]["custom"]
    assert (quick.variant, quick.slot.cores, round(quick.value, 3)) == ("small", 3, 5.333)
    assert (thrifty.variant, thrifty.slot.cores, thrifty.batch) == ("small", 0.1, 4)
    assert shortfalls_of(only(made), prediction, placed(made, prediction.plan).rooms["x"], best) == []
