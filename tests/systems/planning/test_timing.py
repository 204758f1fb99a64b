"""What a plan is predicted to give, against figures worked out by hand, and paths against brute force."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.load import load_scenario
from sloop.profile.estimate import Estimate
from sloop.sim.scenarios import run_scenario
from sloop.systems.planning import explain_plan
from sloop.systems.planning.timing import (
    StageLoad,
    VisitTiming,
    smallest_batch,
    throughput_rps,
    timing,
)
from sloop.systems.setup import Setup, set_up
from sloop.vocabulary import Slot
from tests.systems.planning.scene import READING, nodes, predicted, profile, setup, stage


def belief(each: float, more: float, batch: int = 8) -> Estimate:
    return setup(stage("a", profile=profile(each, more, batch=batch))).beliefs["a", "a", "custom"]


ONE_CORE = Slot(1, "custom")


def test_one_replica_keeps_up_with_the_smallest_batch_that_does() -> None:
    slow = belief(1, 9)  # 10 ms for one, 13 ms for four
    assert smallest_batch(slow, ONE_CORE, 8, 100) == 1
    assert smallest_batch(slow, ONE_CORE, 8, 200) == 3
    assert smallest_batch(slow, ONE_CORE, 2, 200) is None
    assert throughput_rps(slow, ONE_CORE, 8) == pytest.approx(8e3 / 17)


@pytest.mark.parametrize(
    ("load", "replicas", "expected"),
    [
        (StageLoad(0.0), 1, VisitTiming(1, 10, 0)),
        (StageLoad(200.0), 1, VisitTiming(3, 12, 10)),  # two more arrive in 10 ms
        (StageLoad(400.0), 2, VisitTiming(3, 12, 10)),
        (StageLoad(900.0), 1, VisitTiming(8, 17, math.inf)),
        (StageLoad(10.0, together=5), 1, VisitTiming(5, 14, 0)),  # they fill a batch at once
        (StageLoad(10.0, together=20), 1, VisitTiming(8, 17, 2 * 17)),  # three batches in a row
        (StageLoad(10.0, together=20), 3, VisitTiming(8, 17, 0)),
        (StageLoad(100.0, patience_ms=50), 1, VisitTiming(6, 15, 50)),  # five more come
        (StageLoad(100.0, patience_ms=1000), 1, VisitTiming(8, 17, 70)),  # full before patience ends
        (StageLoad(100.0, together=3, patience_ms=1000), 1, VisitTiming(8, 17, 50)),
        (StageLoad(0.0, patience_ms=1000), 1, VisitTiming(1, 10, 1000)),
        (StageLoad(0.0, patience_ms=math.inf), 1, VisitTiming(1, 10, math.inf)),
    ],
)
def test_waiting_and_service(load: StageLoad, replicas: int, expected: VisitTiming) -> None:
    found = timing(belief(1, 9), ONE_CORE, 8, replicas, load)
    assert found.batch == expected.batch
    assert (found.service_ms, found.wait_ms) == pytest.approx((expected.service_ms, expected.wait_ms))
    assert found.total_ms == pytest.approx(expected.total_ms)


def test_visits_parts_and_shares_of_a_graph() -> None:
    made = setup(*READING)
    prediction = predicted(made, 20)
    assert {name: found.rate_rps for name, found in prediction.stages.items()} == {
        "detect": 20,
        "read": 100,
        "digits": 5,
    }
    assert {name: found.parts for name, found in prediction.stages.items()} == {"detect": 1, "read": 5, "digits": 1}
    read = prediction.stages["read"]
    assert read.slowest.slowest == VisitTiming(4, 40, 40, 40)  # four at once, then the fifth, as if it were four
    assert prediction.tightest("digits") is not None
    assert prediction.paths[0].path.stages == ("detect", "read")


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
    prediction = predicted(made, 0.1)
    assert [found.slowest.total_ms for found in prediction.stages.values()] == pytest.approx([1, 50, 60, 5, 3])
    assert prediction.predicted_ms == pytest.approx(1 + 10 + 5 * 20 + 5 + 3)


def test_parts_behind_a_branch_are_fewer() -> None:
    parts = [
        stage("cut"),
        stage("turn", "cut", each={"mean": 8, "output": "boxes"}),
        stage("read", "turn", when={"output": "is_text", "share": 0.25}),
        stage("rare", "turn", when={"output": "is_odd", "share": 0.01}),
    ]
    made = setup(*parts)
    prediction = predicted(made, 1)
    assert [prediction.stages[name].parts for name in ("cut", "turn", "read", "rare")] == [1, 8, 2, 1]


def test_a_batch_policy_that_waits_is_asked_how_long() -> None:
    waiting: dict[str, Any] = {"name": "static", "batch": {"name": "timeout", "wait_ms": 20}}
    made = setup(stage("a"), system=waiting | {"batch_max": 4})
    found = explain_plan(made, 100.0).stages[0]
    assert (found.batch_expected, found.wait_ms, found.service_ms) == (3, 20, 30)  # two more arrive meanwhile


def test_a_batch_that_waits_leaves_time_for_the_stages_that_follow() -> None:
    """Full batches take 40 ms, 20 ms are kept back: the first stage waits for 100 - 10 - 40 - 20 ms, then takes 10; at
    40 ms, just when the second has to start."""
    made = setup(stage("a"), stage("b", "a"), system={"name": "static", "batch": "slack", "batch_max": 4})
    prediction = predicted(made, 0)
    timings = [found.slowest.slowest for found in prediction.stages.values()]
    assert timings == [VisitTiming(1, 10, 30), VisitTiming(1, 10, 0)]


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


@settings(max_examples=40)
@given(graphs(), st.floats(0, 60), st.integers(20, 300))
def test_the_longest_path_equals_brute_force(stages: list[dict[str, Any]], rate_rps: float, slo_ms: int) -> None:
    answer = explain_plan(setup(*stages, slo_ms=slo_ms, cluster=nodes(16, 1)), rate_rps)
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
    assert answer.feasible == (not answer.shortfalls)
    assert answer.feasible == (min(slacks) >= -1e-6)
    if any(math.isinf(value) for value in took_ms.values()):
        assert {shortfall.stage for shortfall in answer.shortfalls if shortfall.kind == "throughput"} == {
            name for name, value in took_ms.items() if math.isinf(value)
        }


CASCADE = (
    {"name": "first", "profile": profile(100, batch=1)},
    {"name": "second", "after": "first", "entry": True, "profile": profile(40, 60)},
)


def test_a_path_that_begins_at_a_later_stage_is_predicted_by_itself() -> None:
    """Requests that enter at `second` wait for a batch only as long as their own deadline of 300 ms allows, those that
    come from `first` up to 900 ms: the wait of the ones must not be counted for the others."""
    long, short = {"stages": ["first", "second"], "share": 0.5}, {"stages": ["second"], "slo_ms": 300, "share": 0.5}
    made = setup(*CASCADE, slo_ms=900, paths=[long, short], system={"name": "static", "batch": "slack", "batch_max": 4})
    answer = explain_plan(made, 2)
    # A full batch takes 200 ms and 20 ms are kept back, so batches wait until 900 - 220 and 300 - 220 ms after sending.
    assert {path.stages: path.predicted_ms for path in answer.paths} == pytest.approx(
        {("first", "second"): 680 + 40 * 2 + 60 - 20, ("second",): 80 - 20 + 100}, abs=1
    )
    assert answer.feasible, answer.why


ONE = stage("a", profile=profile(16, 10, batch=8, cores=2))
"""Batches of 4 take 42 ms on two cores and 74 ms on one."""


def test_a_burst_takes_as_many_batches_in_a_row_as_it_fills() -> None:
    made = setup(ONE, slo_ms=200, system={"name": "static", "cores": 2, "batch_max": 4})
    even, burst = explain_plan(made, 18), explain_plan(made, 18, "burst")
    assert (even.arrivals, even.stages[0].service_ms, even.stages[0].wait_ms) == ("even", 18, 0)
    assert (burst.arrivals, burst.stages[0].service_ms, burst.stages[0].wait_ms) == ("burst", 42, 4 * 42)
    assert (even.feasible, burst.feasible) == (True, False)
    assert even.feasible_arrivals == burst.feasible_arrivals == ("even",)
    assert "if all 18 requests of a second arrived at once, the plan would not be feasible" in even.notes[0]
    assert "if requests were evenly spaced, the plan would be feasible" in burst.notes[0]


def test_stages_work_on_a_burst_at_the_same_time() -> None:
    """Ten requests, 10 ms each at `a` and 20 ms at `b`: the last leaves after 10 + 10 * 20 ms, as in a flow shop."""
    stages = [stage("a"), stage("b", "a", profile=profile(20))]
    made = setup(*stages, slo_ms=1000, system={"name": "static", "batch_max": 1})
    assert explain_plan(made, 10, "burst").predicted_ms == pytest.approx(10 + 10 * 20)
    assert explain_plan(made, 10, "even").predicted_ms == pytest.approx(10 + 20)


def on_shared_cores(count: int, cores: float, *, is_capped: bool = False) -> Setup:
    """Replicas on a node with two cores, where a batch of 4 takes 20 ms alone and 1.5 times as long beside another."""
    sharing = {"full_batch": 4, "law": {"form": "count", "factors": [1, 1.5, 2.5]}, "cores": 2}
    group = {"replicas": count, "cores": cores, "is_capped": is_capped, "batch_max": 4}
    own = profile(10, cores=2) | {"sharing": sharing}
    system = {"name": "static", "stages": {"a": {"groups": [group]}}}
    return setup(stage("a", profile=own), slo_ms=1000, system=system, cluster=nodes(2, 2))


def test_replicas_that_share_cores_are_predicted_with_busy_neighbours() -> None:
    """Of four replicas two fit on each node: each takes 30 ms for a batch of 4."""
    shared = explain_plan(on_shared_cores(4, 1), 10).stages[0]
    assert shared.rate_max_rps == pytest.approx(4 * 4 / 0.030)
    assert (shared.is_capped, shared.cores) == (False, 1)
    capped = explain_plan(on_shared_cores(4, 1, is_capped=True), 10).stages[0]
    assert capped.rate_max_rps == pytest.approx(4 * 4 / 0.040), "a core each, and no neighbour"
    alone = explain_plan(on_shared_cores(1, 1), 10).stages[0]
    assert alone.rate_max_rps == pytest.approx(4 / 0.020)
    halves = explain_plan(on_shared_cores(3, 0.5), 10)
    assert halves.stages[0].rate_max_rps == pytest.approx(3 * 4 / 0.050)
    assert [(each.replicas, each.is_capped) for each in halves.placements] == [(3, False)]


@pytest.mark.parametrize(("share", "is_capped", "slowed"), [(0.25, True, 2.0), (0.25, False, 1.0), (1.0, True, 1.0)])
def test_a_capped_share_of_an_accelerator_slows_replicas_down(share: float, is_capped: bool, slowed: float) -> None:
    """The law of shares with exponent 1: kernels that need half of the SMs, on a quarter of them."""
    on_gpu = {
        "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0, "gamma": 10},
        "max_batch": 1,
        "accelerator": "T4",
        "sharing": {"full_batch": 1, "law": {"form": "share", "exponent": 1}, "sm_use": {1: 0.5}, "is_capped": True},
    }
    where = {"stage": "a", "variant": "a", "node": "g4dn.xlarge-0", "device": "T4"}
    system = {"name": "static", "placements": [where | {"share": share, "is_capped": is_capped}]}
    cluster = {"nodes": [{"hardware": "g4dn.xlarge"}]}
    found = explain_plan(setup(stage("a", profile=on_gpu), cluster=cluster, system=system), 10)
    assert found.stages[0].service_ms == pytest.approx(10 * slowed)
    assert explain_plan(setup(stage("a", profile=on_gpu), cluster=cluster, system=system), 80).feasible == (slowed == 1)


@pytest.mark.parametrize(("replicas", "slowed"), [(1, 1.0), (2, 1.5), (3, 2.5)])
def test_replicas_that_reserve_nothing_of_an_accelerator_are_predicted_with_busy_neighbours(
    replicas: int, slowed: float
) -> None:
    """As many as the plan has on a T4 of 16 GiB, where three of 5 GiB fit."""
    on_gpu = {
        "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0, "gamma": 10},
        **{"max_batch": 1, "accelerator": "T4", "device_share": 1.0, "device_memory_bytes": 5 << 30},
        "sharing": {"full_batch": 1, "law": {"form": "count", "factors": [1, 1.5, 2.5]}},
    }
    where = {"stage": "a", "variant": "a", "node": "g4dn.xlarge-0", "device": "T4", "share": 0, "replicas": replicas}
    system = {"name": "static", "placements": [where]}
    cluster = {"nodes": [{"hardware": "g4dn.xlarge"}]}
    row = explain_plan(setup(stage("a", profile=on_gpu), cluster=cluster, system=system), 10).stages[0]
    assert row.service_ms == pytest.approx(10 * slowed)


@pytest.mark.parametrize("rate_rps", [20, 60, 120])
def test_a_policy_that_waits_longer_for_more_requests_is_predicted_as_it_is_simulated(rate_rps: int) -> None:
    """Adaptive: q requests wait until q/(q + 1) of the deadline: 20 requests/s wait 200 ms of 300, not 100."""
    scenario = load_scenario(
        {
            "name": "tiny",
            "slo_ms": 300,
            "stages": [
                {
                    "name": "only",
                    "profile": {
                        "latency_ms": {"form": "amdahl", "gamma": 1, "epsilon": 10, "delta": 0.5, "eta": 2},
                        "max_batch": 32,
                        "max_cores": 4,
                        "load_s": 1,
                    },
                }
            ],
            "systems": ["headstart"],
            "cluster": {"nodes": [{"hardware": "custom", "cores": 16}]},
            "trace": {"kind": "equal", "rate": rate_rps},
            "duration_s": 10,
            "truth": {"service": {"cv": 0, "ratio": 1}},
        }
    )
    run = run_scenario(scenario, scenario.systems[0])
    report = explain_plan(set_up(scenario.deployment.under(scenario.systems[0])), {"": rate_rps})
    assert report.predicted_ms == pytest.approx(run.row.p99_ms, rel=0.01)
