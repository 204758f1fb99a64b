"""What is on offer, which deadlines are possible, and what systems need of fleets."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.app.application import Deployment, SystemChoice
from sloop.app.hardware import HardwareKind
from sloop.app.load import load_deployment
from sloop.errors import InputError
from sloop.systems.planning.advice import (
    Fleet,
    FleetChoice,
    FleetQuestion,
    check_deadlines,
    offered_kinds,
    together,
    usual_systems,
)

SLOW = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 10, "gamma": 20}, "max_batch": 8, "max_cores": 8}
FAST = {
    "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 9},
    "max_batch": 16,
    "max_cores": 4,
    "accelerator": "T4",
}
BOTH = {"nodes": [{"hardware": "c5.2xlarge"}, {"hardware": "g4dn.xlarge"}]}
PROFILES = {"c5.2xlarge": SLOW, "g4dn.xlarge": FAST}


def deployment(*names: str, slo_ms: float = 200, **more: Any) -> Deployment:
    """Applications of one stage each, on one node of each kind."""
    found: list[dict[str, Any]] = [
        {"name": name, "slo_ms": slo_ms, "stages": [{"name": "only", "profiles": PROFILES}]} for name in names
    ]
    return load_deployment([{**found[0], "cluster": BOTH, **more}, *found[1:]])


def question(
    made: Deployment, rate_rps: float = 10.0, *systems: str, prices: dict[str, float] | None = None
) -> FleetQuestion:
    kinds, _ = offered_kinds(made, (), {}, prices or {})
    rates = {each.name: rate_rps for each in made.applications}
    return FleetQuestion(made, kinds, tuple(map(SystemChoice, systems or ("mixed",))), rates, rates)


def shared_model(name: str) -> dict[str, Any]:
    """A model on a V100 whose profile says what it takes of the GPU."""
    profile = {
        "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 5},
        "max_batch": 16,
        "max_cores": 1,
        "accelerator": "V100",
        "sharing": {"full_batch": 16, "sm_use": {1: 0.1, 16: 0.5}},
    }
    return {"name": name, "slo_ms": 300, "stages": [{"name": "only", "profile": profile}]}


# Kinds


def test_the_kinds_of_the_cluster_are_on_offer_with_their_prices() -> None:
    kinds, left_out = offered_kinds(deployment("a"), (), {}, {"c5.2xlarge": 0.1})
    assert {node.hardware: node.usd_per_h for node in kinds} == {"c5.2xlarge": 0.1, "g4dn.xlarge": 0.526}
    assert left_out == ()


def test_the_kinds_that_profiles_name_and_those_with_the_accelerator_are_on_offer() -> None:
    document = {**shared_model("a"), "cluster": {"nodes": [{"hardware": "p3.2xlarge"}]}}
    kinds, _ = offered_kinds(load_deployment(document), (), {}, {})
    assert [node.hardware for node in kinds] == ["p3.2xlarge"]
    box = HardwareKind("box", 8, 1 << 36, kinds[0].devices, 2.0)
    kinds, _ = offered_kinds(load_deployment(document), (), {"box": box, "cpu": HardwareKind("cpu", 8, 1 << 36)}, {})
    assert [node.hardware for node in kinds] == ["p3.2xlarge", "box"], "nothing runs on cpu"


def test_kinds_can_be_named() -> None:
    kinds, _ = offered_kinds(deployment("a"), ("g4dn.2xlarge", "g4dn.xlarge"), {}, {})
    assert [node.hardware for node in kinds] == ["g4dn.xlarge"], "nothing has a profile for the other"


@pytest.mark.parametrize("option", ["named", "prices"])
def test_an_unknown_kind_is_refused(option: str) -> None:
    named, prices = (("g4dn.xlrge",), {}) if option == "named" else ((), {"g4dn.xlrge": 1.0})
    with pytest.raises(InputError, match=r"no kind of hardware is called 'g4dn\.xlrge'") as found:
        offered_kinds(deployment("a"), named, {}, prices)
    assert "g4dn.xlarge" in found.value.help


def test_a_kind_without_a_price_is_left_out_or_refused() -> None:
    cluster = {"nodes": [{"hardware": "c5.2xlarge", "usd_per_h": 0}, {"hardware": "g4dn.xlarge"}]}
    made = deployment("a", cluster=cluster)
    kinds, left_out = offered_kinds(made, (), {}, {})
    assert [node.hardware for node in kinds] == ["g4dn.xlarge"]
    assert [(each.name, "no price" in each.why) for each in left_out] == [("c5.2xlarge", True)]
    with pytest.raises(InputError, match=r"c5\.2xlarge has no price"):
        offered_kinds(made, ("c5.2xlarge",), {}, {})
    with pytest.raises(InputError, match=r"c5\.2xlarge and g4dn\.xlarge have no price") as found:
        offered_kinds(made, (), {}, {"g4dn.xlarge": 0.0})
    assert "--price c5.2xlarge=" in found.value.help


def test_a_stage_without_a_profile_for_what_is_on_offer_is_refused() -> None:
    with pytest.raises(InputError, match=r"a: only has no profile for any kind on offer") as found:
        offered_kinds(deployment("a"), ("m5.xlarge",), {}, {})
    assert "it has profiles for c5.2xlarge and g4dn.xlarge" in found.value.help


# Deadlines


def test_an_impossible_deadline_names_the_kind_that_comes_closest() -> None:
    made = deployment("a", "b", slo_ms=8)
    with pytest.raises(InputError, match=r"a: no kind .* within 8 ms: g4dn\.xlarge comes closest with 10 ms, 2 ms too"):
        check_deadlines(made, question(made).kinds)
    possible = deployment("a", slo_ms=10)
    check_deadlines(possible, question(possible).kinds)


@settings(deadline=None)
@given(st.floats(1, 100))
def test_a_deadline_is_possible_if_some_kind_can_answer_one_request(slo_ms: float) -> None:
    made = deployment("a", slo_ms=slo_ms)
    kinds = question(made).kinds
    if slo_ms >= 10:
        check_deadlines(made, kinds)
    else:
        with pytest.raises(InputError):
            check_deadlines(made, kinds)


# Applications together


def test_applications_of_one_path_are_joined_with_their_deadlines() -> None:
    stages = [{"name": "x", "profiles": PROFILES}, {"name": "y", "after": ["x"], "profiles": PROFILES}]
    made = load_deployment(
        [
            {"name": "a", "slo_ms": 100, "stages": [{"name": "only", "profiles": PROFILES}], "cluster": BOTH},
            {"name": "b", "slo_ms": 300, "stages": stages},
        ]
    )
    whole = together(made)
    assert whole is not None
    application = whole.application
    assert [stage.name for stage in application.stages] == ["a", "b.x", "b.y"]
    assert [(path.stages, path.slo_ns) for path in application.paths] == [
        (("a",), 100_000_000),
        (("b.x", "b.y"), 300_000_000),
    ]
    asked = replace_rates(question(made), {"a": 30.0, "b": 10.0})
    assert asked.joined is not None
    assert [path.share for path in asked.joined.application.paths] == [0.75, 0.25]
    assert asked.rates(2.0) == {application.key: 80.0}


def replace_rates(asked: FleetQuestion, rates: dict[str, float]) -> FleetQuestion:
    return FleetQuestion(asked.deployment, asked.kinds, asked.systems, rates, rates)


def test_a_single_application_and_one_with_branches_are_not_joined() -> None:
    assert together(deployment("a")) is None
    stages = [
        {"name": "x", "profiles": PROFILES},
        {"name": "y", "after": ["x"], "when": {"output": "o", "share": 0.5}, "profiles": PROFILES},
    ]
    one = {"name": "a", "slo_ms": 100, "stages": stages, "cluster": BOTH}
    made = load_deployment([one, {"name": "b", "slo_ms": 100, "stages": [{"name": "z", "profiles": PROFILES}]}])
    assert together(made) is None
    assert set(replace_rates(question(made), {"a": 1.0, "b": 2.0}).rates()) == {"a", "b"}


# Fleets


def test_a_system_needs_nodes_of_the_kinds_that_it_may_use() -> None:
    asked = question(deployment("a"), 100.0)
    assert asked.needed(0, (1,), 1.0).counts == (0, 1)
    alone = asked.needed(0, (0,), 1.0)
    assert alone.feasible
    assert alone.counts[0] > 1
    assert alone.counts[1] == 0
    more = asked.needed(0, (0,), 10.0)
    assert more.counts[0] > 4, "more than the first size that is tried"


@settings(max_examples=20, deadline=None)
@given(st.floats(1, 300), st.integers(1, 3), st.integers(0, 2))
def test_what_a_fleet_serves_at_most_grows_with_it(rate_rps: float, slow: int, fast: int) -> None:
    asked = question(deployment("a"), rate_rps)
    less = asked.plan(FleetChoice(0, Fleet((slow, fast))))
    more = asked.plan(FleetChoice(0, Fleet((slow + 1, fast))))
    assert 0 <= less.served_max <= 1
    assert more.served_max >= less.served_max - 1e-9


def test_a_fleet_is_deployed_under_the_system_from_its_rate_on() -> None:
    asked = question(deployment("a", "b"), 12.0, "mixed", "elastic")
    made = asked.deployed(FleetChoice(0, Fleet((2, 1), as_needed=True)))
    assert [(node.name, node.on_demand) for node in made.cluster] == [
        ("c5.2xlarge-0", True),
        ("c5.2xlarge-1", True),
        ("g4dn.xlarge-0", True),
    ]
    assert made.application.system.parameters == {"initial_rps": 24.0}
    assert asked.name(FleetChoice(0, Fleet((2, 0)))) == "mixed on 2 c5.2xlarge"
    assert asked.name(FleetChoice(0, Fleet((2, 1), as_needed=True))).endswith(
        "up to 2 c5.2xlarge + 1 g4dn.xlarge, rented as needed"
    )
    assert asked.price_usd_per_h(Fleet((2, 1))) == pytest.approx(2 * 0.34 + 0.526)


def test_what_the_user_declares_for_the_beginning_stays() -> None:
    made = deployment("a", system={"name": "mixed", "initial_rps": 3.0})
    kinds, _ = offered_kinds(made, (), {}, {})
    asked = FleetQuestion(made, kinds, usual_systems(made, kinds), {"a": 10.0}, {"a": 10.0})
    assert asked.deployed(FleetChoice(0, Fleet((1, 0)))).application.system.parameters["initial_rps"] == 3.0


def test_the_usual_systems() -> None:
    made = deployment("a")
    kinds, _ = offered_kinds(made, (), {}, {})
    assert [choice.name for choice in usual_systems(made, kinds)] == ["mixed"]
    own = deployment("a", system="hpa")
    assert [choice.name for choice in usual_systems(own, kinds)] == ["hpa", "mixed"]
    shared = load_deployment([{**shared_model("a"), "cluster": {"nodes": [{"hardware": "p3.2xlarge"}]}}])
    kinds, _ = offered_kinds(shared, (), {}, {})
    assert [choice.name for choice in usual_systems(shared, kinds)] == ["mixed", "harbor"]


def test_single_requests_decide_on_the_variant_and_its_cores() -> None:
    (node, _) = question(deployment("a")).kinds
    assert math.isclose(node.cores, 8)
    slower = structs.replace(node, cores=1)
    check_deadlines(deployment("a", slo_ms=30), [slower])
