"""What a stage is believed to give, against figures worked out by hand, and paths against brute force."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.profile.estimate import Estimate
from sloop.systems.planning import need
from sloop.systems.planning.predict import Load, Outlook, Predicted, keeping_up, predicted, rate_max_rps
from sloop.systems.planning.steady import steady_plan
from tests.systems.planning.scene import READING, nodes, profile, setup, stage


def belief(each: float, more: float, batch: int = 8) -> Estimate:
    return setup(stage("a", profile=profile(each, more, batch=batch))).beliefs["a", "a"]


def test_one_replica_keeps_up_with_the_smallest_batch_that_does() -> None:
    slow = belief(1, 9)  # 10 ms for one, 13 ms for four
    assert keeping_up(slow, 1, 8, 100) == 1
    assert keeping_up(slow, 1, 8, 200) == 3
    assert keeping_up(slow, 1, 2, 200) is None
    assert rate_max_rps(slow, 1, 8) == pytest.approx(8e3 / 17)


@pytest.mark.parametrize(
    ("load", "replicas", "expected"),
    [
        (Load(0.0), 1, Predicted(1, 10, 0)),
        (Load(200.0), 1, Predicted(3, 12, 10)),  # two more arrive in 10 ms
        (Load(400.0), 2, Predicted(3, 12, 10)),
        (Load(900.0), 1, Predicted(8, 17, math.inf)),
        (Load(10.0, parts=5), 1, Predicted(5, 14, 0)),  # they are their own company
        (Load(10.0, parts=20), 1, Predicted(8, 17, 2 * 17)),  # three turns
        (Load(10.0, parts=20), 3, Predicted(8, 17, 0)),
        (Load(100.0, patience_ms=50), 1, Predicted(6, 15, 50)),  # five more come
        (Load(100.0, patience_ms=1000), 1, Predicted(8, 17, 70)),  # full before patience ends
        (Load(100.0, parts=3, patience_ms=1000), 1, Predicted(8, 17, 50)),
        (Load(0.0, patience_ms=1000), 1, Predicted(1, 10, 1000)),
        (Load(0.0, patience_ms=math.inf), 1, Predicted(1, 10, math.inf)),
    ],
)
def test_waiting_and_service(load: Load, replicas: int, expected: Predicted) -> None:
    found = predicted(belief(1, 9), 1, 8, replicas, load)
    assert found.batch == expected.batch
    assert (found.service_ms, found.wait_ms) == pytest.approx((expected.service_ms, expected.wait_ms))
    assert found.ms == pytest.approx(expected.ms)


def test_visits_parts_and_shares_of_a_graph() -> None:
    made = setup(*READING)
    outlook = Outlook(made, steady_plan(made, 20).plan, 20)
    assert {name: found.rate_rps for name, found in outlook.stages.items()} == {"detect": 20, "read": 100, "digits": 5}
    assert {name: found.parts for name, found in outlook.stages.items()} == {"detect": 1, "read": 5, "digits": 1}
    read = outlook.stages["read"]
    assert read.slowest == Predicted(4, 40, 40, 40)  # four at once, then the fifth, as if it were four
    assert outlook.tightest("digits") is not None
    assert outlook.ways[0].path.stages == ("detect", "read")


def test_stages_for_the_same_parts_overlap() -> None:
    """Five parts, one after another: 10 ms each, then 20 ms, then 5 ms; the last is through after 10 + 5 * 20 + 5."""
    each = {"output": "boxes", "mean": 5}
    stages = [
        stage("cut", profile=profile(1)),
        stage("a", "cut", each=each),
        stage("b", "a", profile=profile(20)),
        stage("c", "b", profile=profile(5)),
        stage("d", "c", join=True, profile=profile(3)),
    ]
    made = setup(*stages, slo_ms=1000, system={"name": "static", "batch_max": 1})
    outlook = Outlook(made, steady_plan(made, 0.1).plan, 0.1)
    assert [found.predicted_ms for found in outlook.stages.values()] == pytest.approx([1, 50, 60, 5, 3])
    assert outlook.predicted_ms == pytest.approx(1 + 10 + 5 * 20 + 5 + 3)


def test_parts_behind_a_branch_are_fewer() -> None:
    parts = [
        stage("cut"),
        stage("turn", "cut", each={"mean": 8, "output": "boxes"}),
        stage("read", "turn", when={"output": "is_text", "share": 0.25}),
        stage("rare", "turn", when={"output": "is_odd", "share": 0.01}),
    ]
    made = setup(*parts)
    outlook = Outlook(made, steady_plan(made, 1).plan, 1)
    assert [outlook.stages[name].parts for name in ("cut", "turn", "read", "rare")] == [1, 8, 2, 1]


def test_a_batch_policy_that_waits_is_asked_how_long() -> None:
    waiting: dict[str, Any] = {"name": "static", "batch": {"name": "timeout", "wait_ms": 20}}
    made = setup(stage("a"), system=waiting | {"batch_max": 4})
    found = need(made, 100.0).stages[0]
    assert (found.batch_expected, found.wait_ms, found.service_ms) == (3, 20, 30)  # its two companions came


def test_what_waits_for_company_leaves_time_for_the_rest_of_the_way() -> None:
    """Full batches take 40 ms, 20 ms are kept back: the first stage waits for 100 - 10 - 40 - 20 ms, then takes 10; at
    40 ms, just when the second has to start."""
    made = setup(stage("a"), stage("b", "a"), system={"name": "static", "batch": "slack", "batch_max": 4})
    outlook = Outlook(made, steady_plan(made, 0).plan, 0)
    assert [found.slowest for found in outlook.stages.values()] == [Predicted(1, 10, 30), Predicted(1, 10, 0)]


@st.composite
def graphs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any acyclic graph, some of whose edges are taken by some requests only, and some of whose ends take apart."""
    count = draw(st.integers(1, 6))
    stages = []
    for place in range(count):
        after = draw(st.sets(st.sampled_from(range(place)), max_size=3)) if place else set()
        how: dict[str, Any] = {"profile": profile(draw(st.integers(1, 30)), draw(st.integers(0, 30)))}
        if after:
            how["after"] = [f"s{each}" for each in sorted(after)]
            if draw(st.booleans()):
                how["when"] = [{"of": f"s{min(after)}", "output": f"o{place}", "share": draw(st.floats(0, 1))}]
        stages.append({"name": f"s{place}"} | how)
    followed = {name for each in stages for name in each.get("after", ())}
    for each in stages:
        if each["name"] not in followed and len(each.get("after", ())) == 1 and draw(st.booleans()):
            each["each"] = {"output": "rows", "mean": draw(st.integers(1, 9)), "most": 9}
    return stages


@settings(max_examples=40, deadline=None)
@given(graphs(), st.floats(0, 60), st.integers(20, 300))
def test_the_longest_path_equals_brute_force(stages: list[dict[str, Any]], rate_rps: float, slo_ms: int) -> None:
    answer = need(setup(*stages, slo_ms=slo_ms, cluster=nodes(16, 1)), rate_rps)
    took_ms = {row.stage: row.predicted_ms for row in answer.stages}
    after = {each["name"]: each.get("after", []) for each in stages}

    def chains(name: str) -> list[tuple[str, ...]]:
        following = [other for other, before in after.items() if name in before]
        return [(name, *rest) for other in following for rest in chains(other)] or [(name,)]

    brute = {chain: sum(took_ms[name] for name in chain) for s in after if not after[s] for chain in chains(s)}
    assert answer.predicted_ms == pytest.approx(max(brute.values()))
    assert {path.stages: path.predicted_ms for path in answer.paths} == pytest.approx(brute)
    slacks = [path.slack_ms for path in answer.paths]
    assert slacks == sorted(slacks)
    assert answer.feasible == (not answer.lacks)
    assert answer.feasible == (min(slacks) >= -1e-6)
    if any(math.isinf(value) for value in took_ms.values()):
        assert {lack.stage for lack in answer.lacks if lack.kind == "throughput"} == {
            name for name, value in took_ms.items() if math.isinf(value)
        }
