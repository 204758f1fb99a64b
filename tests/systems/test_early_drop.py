"""The system that loses no goodput to overload."""

from typing import Any

import pytest

from sloop.actions import End
from sloop.app.load import load_scenario
from sloop.sim import World
from sloop.systems import build_system
from sloop.vocabulary import Outcome
from tests.sim.scene import records_of, world

CAPACITY_RPS = 8e3 / 26
"""What batches of 8 at 10 + 2n ms bear."""
SECONDS = 12.0
CHAIN: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["b"]}


def goodput_rps(load: float, system: dict[str, Any], trace: str = "poisson") -> float:
    rate = load * CAPACITY_RPS
    square = {"kind": "square", "rate": 0.4 * rate, "burst_rate": 1.6 * rate, "period_s": 3, "burst_s": 1.5}
    arrivals = square if trace == "square" else {"kind": "poisson", "rate": rate}
    log = records_of(world(system=system, trace=arrivals, slo_ms=100.0, duration_s=SECONDS))
    return sum(isinstance(record, End) and record.outcome is Outcome.SERVED for _, record in log) / SECONDS


@pytest.mark.parametrize("trace", ["poisson", "square"])
def test_goodput_does_not_fall_beyond_saturation(trace: str) -> None:
    goodputs = [goodput_rps(load, {"name": "early-drop"}, trace) for load in (0.5, 0.8, 0.9, 1.0, 1.3, 1.5, 3.0)]
    for place, goodput in enumerate(goodputs):
        assert goodput >= 0.97 * max(goodputs[: place + 1]), goodputs
    assert goodputs[-1] >= 0.95 * CAPACITY_RPS


def test_what_never_looks_ahead_collapses_where_it_does_not() -> None:
    assert goodput_rps(1.5, {"name": "static"}) < 0.5 * goodput_rps(1.5, {"name": "early-drop"})


def test_below_saturation_it_refuses_next_to_nothing() -> None:
    assert goodput_rps(0.6, {"name": "early-drop"}) >= 0.98 * 0.6 * CAPACITY_RPS * 0.95


def chain_goodput(**drop: bool) -> float:
    """At 1.5 times the capacity, as a share of it: three stages, each as the only one above."""
    profile = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 2, "gamma": 10}, "max_batch": 8, "max_cores": 1}
    scenario = load_scenario(
        {
            "name": "chain",
            "slo_ms": 120,
            "stages": [{"name": name, "profile": profile, "after": after} for name, after in CHAIN.items()],
            "cluster": {"nodes": [{"hardware": "custom", "count": 1, "cores": 3}]},
            "system": {"name": "early-drop", "batch_max": 8, "drop": drop},
            "trace": {"kind": "poisson", "rate": 1.5 * CAPACITY_RPS},
            "duration_s": 4,
        }
    )
    log = records_of(World.from_scenario(scenario))
    return sum(isinstance(record, End) and record.outcome is Outcome.SERVED for _, record in log) / 4 / CAPACITY_RPS


def test_in_a_chain_the_first_stage_drops_what_later_ones_would() -> None:
    goodput, bound = chain_goodput(), chain_goodput(proactive=False)
    assert goodput > 1.4 * bound, (goodput, bound)
    assert goodput > 0.85


def test_it_is_a_system_with_the_parameters_of_static() -> None:
    system = build_system("early-drop", {"replicas": 2, "cores": 4})
    assert system.kind == "system"
    assert system.parameters == build_system("static").parameters
