"""Several kinds of hardware: predictions of each group, nodes and prices, the same rates on one kind alone."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from sloop.systems.planning import explain_plan
from sloop.systems.planning.infeasibility import BestConfigurations, beyond_cluster, largest_nodes
from sloop.systems.planning.timing import PlanPrediction
from sloop.systems.setup import Setup
from sloop.vocabulary import Group, Plan, ReplicaSpec, Slot, StagePlan
from tests.systems.planning.scene import ENOUGH, only, profile, setup, stage

SLOW = {"hardware": "custom", "name": "slow", "cores": 4, "memory_bytes": 100_000, "usd_per_h": 0.2, "count": 2}
FAST = {
    "hardware": "custom",
    "name": "fast",
    "cores": 2,
    "memory_bytes": 100_000,
    "usd_per_h": 0.3,
    "count": 1,
    "most": 3,
}
BOTH = {"nodes": [SLOW, FAST]}
"""20 ms a request on a core of `slow`, 5 ms on one of `fast`."""
PROFILES = {"slow": profile(20), "fast": profile(5)}


def on_both(*stages: dict[str, Any], groups: list[dict[str, Any]] | None = None, **how: Any) -> Setup:
    """One stage `a` with a profile on each kind, under a static plan with these groups."""
    stages = stages or ({"name": "a", "profiles": PROFILES},)
    static: dict[str, Any] = {"name": "static", "batch_max": 1}
    if groups:
        static["stages"] = {"a": {"groups": groups}}
    keys: dict[str, Any] = {"cluster": BOTH, "system": static, "slo_ms": 500} | how
    return setup(*stages, **keys)


MIX = [{"hardware": "slow", "replicas": 2}, {"hardware": "fast", "replicas": 1}]
"""Replicas of one core each: two serve 50 requests/s, one 200."""


def test_groups_without_rates_share_in_proportion_to_what_they_serve() -> None:
    found = explain_plan(on_both(groups=MIX), 240)
    assert [(row.hardware, row.replicas, row.service_ms) for row in found.stages] == [("slow", 2, 20), ("fast", 1, 5)]
    assert [row.group_rps for row in found.stages] == pytest.approx([80, 160])
    assert [row.rate_rps for row in found.stages] == [240, 240]
    assert [row.rate_max_rps for row in found.stages] == pytest.approx([300, 300])
    assert found.predicted_ms == 20
    assert explain_plan(on_both(groups=MIX), 299).feasible
    assert not explain_plan(on_both(groups=MIX), 301).feasible


def plan(*groups: Group, batch_max: int = 1) -> Plan:
    return Plan((StagePlan("a", groups, batch_max),), "")


def group(kind: str, count: int, rate_rps: float = 0.0, batch_max: int = 0, cores: float = 1) -> Group:
    return Group(ReplicaSpec("a", "a", Slot(cores, kind)), count, batch_max, rate_rps)


def test_groups_have_the_rates_and_batches_that_the_plan_says() -> None:
    made = only(on_both())
    stages = PlanPrediction(made, plan(group("slow", 2, 30, 2), group("fast", 1, 90)), 60).stages
    slow, fast = stages["a"].groups
    assert (stages["a"].group_rps(slow), stages["a"].group_rps(fast)) == pytest.approx((15, 45))
    assert (stages["a"].batch_max(slow), stages["a"].batch_max(fast)) == (2, 1)
    assert stages["a"].rate_max_rps == pytest.approx(200 / 90 * 120)  # `fast` is full first


def test_equal_kinds_share_evenly_whatever_their_cores() -> None:
    found = PlanPrediction(only(on_both()), plan(group("slow", 1), group("slow", 1, cores=2)), 40).stages["a"]
    assert [found.group_rps(each) for each in found.groups] == [20, 20]
    assert found.rate_max_rps == 100


@given(
    st.lists(st.tuples(st.sampled_from(["slow", "fast"]), st.integers(1, 9), st.floats(1, 200)), min_size=1, max_size=4)
)
@settings(max_examples=100)
def test_the_parts_of_the_groups_add_up(parts: list[tuple[str, int, float]]) -> None:
    made = only(on_both())
    groups = [group(kind, count, rate_rps, cores=1 + place) for place, (kind, count, rate_rps) in enumerate(parts)]
    for says in (True, False):
        of = [each if says else without_rate(each) for each in groups]
        found = PlanPrediction(made, plan(*of), 70).stages["a"]
        assert sum(found.group_rps(each) for each in found.groups) == pytest.approx(70)
        if says:
            total = sum(each.rate_rps for each in groups)
            assert [found.group_rps(each) for each in found.groups] == pytest.approx(
                [70 * each.rate_rps / total for each in groups]
            )


def without_rate(found: Group) -> Group:
    return Group(found.spec, found.count, found.batch_max)


def test_constraints_of_a_mix_name_the_kind() -> None:
    (first, _) = explain_plan(on_both(groups=MIX), 299).stages
    assert [(bound.kind, bound.why) for bound in first.binds] == [
        ("throughput", "one replica of slow fewer would serve 250 of 299 requests/s in batches of 1")
    ]
    (first, _) = explain_plan(on_both(groups=MIX), 10).stages
    assert [(bound.kind, bound.why) for bound in first.binds] == [("spare", "one replica of slow fewer would do")]


def test_nodes_by_kind_with_those_that_are_rented() -> None:
    groups = [{"hardware": "slow", "replicas": 5}, {"hardware": "fast", "replicas": 5}]
    found = explain_plan(on_both(groups=groups), 10)
    assert [(each.hardware, each.nodes, each.held, each.rented, each.usd_per_h) for each in found.nodes] == [
        ("slow", 2, 2, 0, 0.4),
        ("fast", 3, 1, 2, pytest.approx(0.9)),
    ]
    assert found.usd_per_h == pytest.approx(1.3)
    assert [(row.node, row.replicas, row.cores, row.batch) for row in found.placements] == [
        ("slow-0", 4, 1, 1),
        ("slow-1", 1, 1, 1),
        ("fast-0", 2, 1, 1),
        ("fast-1", 2, 1, 1),
        ("fast-2", 1, 1, 1),
    ]
    assert sum(row.rate_rps for row in found.placements) == pytest.approx(10)


def test_a_plan_on_several_kinds_says_what_its_system_does_with_them() -> None:
    found = explain_plan(on_both(system=ENOUGH), 150)
    assert [each.hardware for each in found.nodes] == ["slow"]
    assert "on this mixed cluster, enough keeps to one kind" in " ".join(found.notes)
    assert not any("mixed cluster" in note for note in explain_plan(setup(stage("a")), 10).notes)


def test_kinds_that_no_stage_can_use_are_named() -> None:
    stages = ({"name": "a", "profiles": {"slow": profile(20)}},)
    enough, too_few = (explain_plan(on_both(*stages, system=ENOUGH), rate_rps) for rate_rps in (10, 900))
    why = "a cannot use the 3 nodes of fast: it has no profile for fast"
    assert why in enough.notes
    assert [(each.kind, each.why) for each in too_few.shortfalls if each.kind == "hardware"] == [("hardware", why)]


def test_a_rate_beyond_all_kinds_says_what_each_would_need() -> None:
    found = explain_plan(on_both(groups=MIX), 2000)
    shortfall = next(each for each in found.shortfalls if each.kind == "cores")
    assert shortfall.why == (
        "2,000 requests/s need 40 of slow or 10 of fast cores even on the cheapest configurations, and the cluster has "
        "8 of slow and 6 of fast: enough for 80 %"
    )
    assert (shortfall.needs, shortfall.unit) == (2000, "requests/s")
    assert shortfall.has == pytest.approx(1600)


@st.composite
def mixed_graphs(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    kinds = [f"k{place}" for place in range(draw(st.integers(1, 3)))]
    stages = []
    for place in range(draw(st.integers(1, 3))):
        own = draw(st.sets(st.sampled_from(kinds), min_size=1))
        profiles = {kind: profile(draw(st.integers(1, 40)), batch=1, cores=1) for kind in sorted(own)}
        after = {"after": f"s{place - 1}"} if place else {}
        stages.append({"name": f"s{place}", "profiles": profiles} | after)
    nodes = [{"hardware": "custom", "name": kind, "cores": draw(st.integers(1, 8))} for kind in kinds]
    return stages, {"nodes": nodes}, draw(st.floats(1, 2000))


@settings(max_examples=60)
@given(mixed_graphs())
def test_a_rate_is_called_impossible_only_if_it_is(made: tuple[list[dict[str, Any]], dict[str, Any], float]) -> None:
    """Against a linear program: which part of each stage's rate goes to which kind. With one stage, or one kind, what
    is not called impossible is possible."""
    stages, cluster, rate_rps = made
    found = only(setup(*stages, cluster=cluster, slo_ms=10_000, system="mixed"))
    prediction, configurations = PlanPrediction(found, Plan((), ""), rate_rps), BestConfigurations(found)
    nodes = found.application.cluster
    most = largest_nodes(nodes)
    kinds = list(most)
    costs = {
        (name, kind): best.value * rate_rps
        for name in prediction.stages
        for kind, best in configurations.cheapest[name].items()
    }
    pairs = list(costs)
    rows = [[costs[pair] if pair[1] == kind else 0.0 for pair in pairs] for kind in kinds]
    whole = [[1.0 if pair[0] == name else 0.0 for pair in pairs] for name in prediction.stages]
    # The smallest factor by which the cluster would have to grow.
    rows = [[*row, -most[kind]] for row, kind in zip(rows, kinds, strict=True)]
    whole = [[*row, 0.0] for row in whole]
    solved = linprog([0.0] * len(pairs) + [1.0], rows, [0.0] * len(kinds), whole, [1.0] * len(whole))
    grown = float(solved.fun or 0.0)
    assume(abs(grown - 1) > 1e-6)
    impossible = bool(list(beyond_cluster([(prediction, configurations)], nodes)))
    if impossible:
        assert grown > 1
    if len(prediction.stages) == 1 or len(kinds) == 1:
        assert impossible == (grown > 1)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Setup, float]:
    """A static mix on a cluster with nodes on demand, which may lack room."""
    groups = [
        {"hardware": kind, "replicas": draw(st.integers(1, 12)), "cores": draw(st.sampled_from([0.5, 1, 1.5, 2]))}
        for kind in draw(st.permutations(["slow", "fast"]))
    ]
    count, more = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    cluster = {"nodes": [SLOW | {"count": count, "most": count + more}, FAST]}
    place = draw(st.sampled_from(["best_fit", "spread"]))
    system = {"name": "static", "stages": {"a": {"groups": groups}}, "place": place}
    return on_both(cluster=cluster, system=system), draw(st.floats(0, 2000))


@settings(max_examples=60)
@given(scenes())
def test_placements_respect_the_nodes_and_add_up(scene: tuple[Setup, float]) -> None:
    made, rate_rps = scene
    found = explain_plan(made, rate_rps)
    nodes = {node.name: node for node in made.deployment.cluster}
    used: dict[str, float] = {}
    for row in found.placements:
        assert row.hardware == nodes[row.node].hardware
        used[row.node] = used.get(row.node, 0.0) + row.replicas * row.cores
    assert all(cores <= nodes[name].cores + 1e-9 for name, cores in used.items())
    placed = sum(row.replicas for row in found.placements)
    planned = sum(row.replicas for row in found.stages)
    lacks_room = any("has room" in each.why for each in found.shortfalls)
    assert placed <= planned
    assert (placed < planned) == lacks_room
    if not lacks_room:
        assert sum(row.rate_rps for row in found.placements) == pytest.approx(rate_rps)
    assert found.usd_per_h == pytest.approx(sum(nodes[name].usd_per_h for name in used))
    assert sum(each.usd_per_h for each in found.nodes) == pytest.approx(found.usd_per_h)
    assert sum(each.nodes for each in found.nodes) == len(used)
    assert sum(each.rented for each in found.nodes) == sum(nodes[name].on_demand for name in used)
    assert found.cores == pytest.approx(sum(row.replicas * row.cores for row in found.stages))
    # A node is rented only where no other of its kind had room.
    for kind in ("slow", "fast"):
        own = [node for node in nodes.values() if node.hardware == kind]
        if any(node.on_demand and node.name in used for node in own):
            assert all(node.name in used for node in own if not node.on_demand)
