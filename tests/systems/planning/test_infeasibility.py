"""Why goals cannot be reached: which stage, path or node, and by how much."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.core.ledger import Ledger, Reservation, millicores
from sloop.core.views import NodeView
from sloop.policies import build
from sloop.systems.planning import explain_plan, steady_plan
from sloop.systems.planning.infeasibility import (
    NodeClasses,
    PlanShortfall,
    cheapest,
    cores_of,
    fastest,
    place,
    shortfalls_of,
)
from sloop.systems.planning.prediction import PlanPrediction
from sloop.vocabulary import Node, ReplicaId, ReplicaSpec
from tests.systems.planning.scene import READING, nodes, profile, setup, stage

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
    assert (found.needs, found.has, found.missing) == pytest.approx((32.5, 25, 7.5))
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
    assert impossible[-1] == PlanShortfall("deadline", "2 more paths have impossible deadlines")
    late = explain_plan(setup(*stages, slo_ms=15), 1).shortfalls
    assert late[-1] == PlanShortfall("deadline", "2 more paths are too slow")


def test_a_stage_that_cannot_keep_up() -> None:
    system = {"name": "static", "batch_max": 1}
    answer = explain_plan(setup(*READING, slo_ms=1000, cluster=nodes(8, 1), system=system), 30)
    (found,) = [found for found in answer.shortfalls if found.kind == "throughput"]
    assert (found.stage, found.needs, round(found.has)) == ("read", 150, 100)
    assert found.why == "the plan cannot keep up with 30 requests/s: read serves 100 of 150 requests/s, 50 too few"


def test_a_cluster_too_small_for_the_rate() -> None:
    """10 ms of a core each, whatever the batch: 5.2 cores for 520 requests per second."""
    answer = explain_plan(setup(stage("a"), slo_ms=1000, cluster=nodes(4, 1), system="fa2"), 520)
    found = next(found for found in answer.shortfalls if found.kind == "cores")
    assert (found.needs, found.has, found.missing) == pytest.approx((5.2, 4, 1.2))
    assert found.why.startswith(
        "520 requests/s need 5.2 cores even on the cheapest configurations, and the cluster has 4: 1.2 too few; a alone"
    )


@pytest.mark.parametrize("system", ["static", "fa2", "ipa", "biscale", "inferline", "grandslam", "ds2"])
def test_no_system_promises_what_cannot_be(system: str) -> None:
    impossible = explain_plan(setup(*TWO, slo_ms=25, system=system), 5)
    assert not impossible.feasible
    assert any(found.kind == "deadline" and found.missing == pytest.approx(7.5) for found in impossible.shortfalls)
    assert impossible.one_more is not None
    assert impossible.one_more.summary.startswith("cannot: ")


def test_no_replicas_for_what_comes() -> None:
    answer = explain_plan(setup(stage("a"), system={"name": "static", "replicas": 0}), 5)
    assert "a has no replicas" in answer.why
    assert explain_plan(setup(stage("a"), system={"name": "static", "replicas": 0}), 0).feasible


def test_waiting_for_what_never_comes() -> None:
    forever = {"name": "static", "batch": {"name": "full", "forever": True}}
    assert "a waits for batches that never fill" in explain_plan(setup(stage("a"), system=forever), 0).why


def test_fastest_and_cheapest_configurations() -> None:
    variants = [{"name": "small", "profile": profile(10, 2)}, {"name": "large", "profile": profile(30)}]
    made = setup({"name": "a", "variants": variants}, slo_ms=1000)
    prediction = PlanPrediction(made, steady_plan(made, 1).plan, 1)
    quick, thrifty = fastest(prediction.stages["a"], 3), cheapest(prediction.stages["a"], 3)
    assert (quick.variant, quick.cores, round(quick.value, 3)) == ("small", 3, 5.333)
    assert (thrifty.variant, thrifty.cores, thrifty.batch) == ("small", 0.1, 4)
    assert shortfalls_of(made, prediction, place(prediction.plan, made)) == []


def first_shortfall(cluster: dict[str, Any], **system: Any) -> PlanShortfall | None:
    made = setup(stage("a"), cluster=cluster, system={"name": "static", **system})
    return next(iter(place(steady_plan(made, 1).plan, made).shortfalls), None)


def test_everything_has_room() -> None:
    made = setup(stage("a"), stage("b", "a"), system={"name": "static", "replicas": 2})
    plan = steady_plan(made, 1).plan
    assert cores_of(plan) == 4
    found = place(plan, made)
    assert (found.shortfalls, found.nodes) == ([], {"custom-0"})
    assert not found.full


@pytest.mark.parametrize(
    ("cluster", "system", "said", "by"),
    [
        (nodes(4, 1), {"cores": 8}, "1 of 1 replica of a/a with 8 cores: the largest node has 4 cores, 4 too few", 4),
        (nodes(4, 1, 10), {}, "each needs 9.31e-07 GiB of memory, and the largest node has 9.31e-09", 990),
        (
            nodes(4, 2),
            {"replicas": 11},
            "3 of 11 replicas of a/a with 1 core: the plan needs 11 cores, and the cluster has 8: 3",
            3,
        ),
        (nodes(4, 2), {"replicas": 3, "cores": 2.5}, "at most 1.5 cores of a node are free", 0),
    ],
)
def test_what_has_no_room_says_why(cluster: dict[str, Any], system: dict[str, Any], said: str, by: float) -> None:
    found = first_shortfall(cluster, **system)
    assert found is not None
    assert said in found.why
    assert found.missing == pytest.approx(by)
    assert found.stage == "a"


class Third:
    """Goes by a name."""

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        return next((node.node.name for node in nodes if node.node.name == "custom-2"), None)


def test_a_place_policy_that_goes_by_names_gets_to_see_them() -> None:
    made = setup(stage("a"), cluster=nodes(4, 4), system="static")
    system = replace(made.system, policies=replace(made.system.policies, place=Third()))
    found = place(steady_plan(made, 1).plan, replace(made, system=system))
    assert (found.shortfalls, found.nodes) == ([], {"custom-2"})


def test_a_large_cluster_is_shown_once_for_each_state() -> None:
    """Of 500 nodes alike a place policy sees at most the whole, the part-filled and the full."""
    seen: list[int] = []

    class Counting(Third):
        def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
            seen.append(len(nodes))
            return next((node.node.name for node in nodes if node.free_cores >= spec.cores), None)

    made = setup(stage("a"), cluster=nodes(2, 500), system={"name": "static", "replicas": 900})
    system = replace(made.system, policies=replace(made.system.policies, place=Counting()))
    found = place(steady_plan(made, 1).plan, replace(made, system=system))
    assert (found.shortfalls, len(found.nodes)) == ([], 450)
    assert max(seen) == 3


KINDS = st.sampled_from([(4.0, 100, ()), (4.0, 100, ("gpu",)), (2.0, 100, ()), (4.0, 50, ())])


@st.composite
def clusters(draw: st.DrawFn) -> list[Node]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=9))
    return [Node(f"n{place}", "kind", *kind) for place, kind in enumerate(kinds)]


@pytest.mark.parametrize("name", ["best_fit", "spread"])
@settings(max_examples=100, deadline=None)
@given(cluster=clusters(), data=st.data())
def test_replicas_go_where_they_would_if_all_nodes_were_shown(name: str, cluster: list[Node], data: Any) -> None:
    place: Any = build("place", name, {})
    few, every = NodeClasses(cluster), Ledger(cluster)
    for number in range(data.draw(st.integers(1, 20))):
        device = data.draw(st.sampled_from(["", "", "gpu"]))
        spec = ReplicaSpec("a", "a", data.draw(st.sampled_from([0.5, 1.0, 3.0])), device=device, share=0.4)
        memory_bytes = data.draw(st.sampled_from([0, 30]))
        wanted = place.choose(0, spec, memory_bytes, every.views())
        assert place.choose(0, spec, memory_bytes, few.representatives()) == wanted
        name = data.draw(st.sampled_from([wanted or "n0", "n0"]))  # or where the plan says
        reservation = Reservation(name, millicores(spec.cores), memory_bytes, device, round(spec.share * 1e6))
        assert few.reserve(ReplicaId(number), reservation) == every.reserve(ReplicaId(number), reservation)
        assert tuple(few.every()) == every.views()


def test_one_of_each_state_is_shown() -> None:
    room = NodeClasses([Node(f"n{place}", "kind", 4.0, 100) for place in range(1000)])
    assert [view.node.name for view in room.representatives()] == ["n0"]
    assert room.reserve(ReplicaId(0), Reservation("n7", 1000, 0, "", 0))
    assert [view.node.name for view in room.representatives()] == ["n0", "n7"]
    assert room.reserve(ReplicaId(1), Reservation("n0", 1000, 0, "", 0))
    assert [view.node.name for view in room.representatives()] == ["n0", "n1"]
    assert not room.reserve(ReplicaId(2), Reservation("n2000", 1000, 0, "", 0))
