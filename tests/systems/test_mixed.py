"""The system `mixed` in the simulator: deadlines on slow and fast hardware side by side, and what a mix saves."""

from functools import cache
from typing import Any

import pytest

from sloop.app.load import load_scenario
from sloop.runlog.summary import RunRow
from sloop.sim.scenarios import run_scenario

PROFILES = {
    "c5.2xlarge": {
        "latency_ms": {"form": "table", "table": {1: {8: 40}, 2: {8: 60}, 4: {8: 100}, 8: {8: 180}}},
        "max_batch": 8,
        "max_cores": 8,
        "load_s": 2,
    },
    "g4dn.xlarge": {
        "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 2, "gamma": 10},
        "max_batch": 64,
        "max_cores": 4,
        "load_s": 2,
        "accelerator": "T4",
    },
    "r5.large": {
        "latency_ms": {"form": "table", "table": {1: {2: 150}, 2: {2: 250}}},
        "max_batch": 2,
        "max_cores": 2,
        "load_s": 2,
    },
}
"""At most 44, 464 and 8 requests per second within 300 ms, for 0.34, 0.526 and 0.126 USD per hour."""


def run(
    system: dict[str, Any], rate_rps: float, *, count: int = 4, most: int = 0, seconds: float = 40, slo_ms: float = 600
) -> RunRow:
    """Poisson arrivals at a cluster with `count` nodes of each kind, and as many on demand as make `most`."""
    nodes = [{"hardware": kind, "count": count} | ({"most": most} if most else {}) for kind in PROFILES]
    scenario = load_scenario(
        {
            "name": "photos",
            "slo_ms": slo_ms,
            "stages": [{"name": "classify", "variants": [{"name": "v", "profiles": PROFILES}]}],
            "cluster": {"nodes": nodes},
            "systems": [system],
            "trace": {"kind": "poisson", "rate": rate_rps},
            "duration_s": seconds,
            "truth": {"nodes": {"acquire_s": 5}},
        }
    )
    return run_scenario(scenario, scenario.systems[0]).row


@cache
def planned(rate_rps: float, *kinds: str) -> RunRow:
    """`mixed` on some kinds, or on all."""
    return run({"name": "mixed", "initial_rps": rate_rps, "hardware": list(kinds)}, rate_rps)


@pytest.mark.parametrize("rate_rps", [3, 10, 45, 380])
def test_deadlines_are_kept_on_slow_and_fast_hardware_side_by_side(rate_rps: float) -> None:
    assert planned(rate_rps).attainment >= 0.99


def test_a_mix_costs_less_than_any_kind_alone() -> None:
    """A rate a little above what one node with an accelerator carries."""
    single = [planned(380, kind) for kind in ("g4dn.xlarge", "c5.2xlarge")]
    kept = [row.usd for row in single if row.attainment >= 0.99]
    assert kept
    assert planned(380).usd <= 0.9 * min(kept)


def test_nodes_on_demand_follow_the_plan() -> None:
    row = run({"name": "mixed"}, 45, count=0, most=3, seconds=60)
    assert row.served > 0.6 * row.requests, "from an empty cluster: nodes, then replicas"
    assert row.node_usd >= row.usd > 0


GROUPS = [
    {"hardware": "g4dn.xlarge", "cores": 4},
    {"hardware": "c5.2xlarge", "replicas": 2, "cores": 8},
    {"hardware": "r5.large", "replicas": 3, "cores": 2},
]


def fixed(rate_rps: float, **policies: str) -> RunRow:
    """A fixed mix that carries 576 requests per second."""
    system = {"name": "static", "stages": {"classify": {"groups": GROUPS}}, **policies}
    return run(system, rate_rps, seconds=20)


def test_an_overload_of_a_mix_costs_no_goodput() -> None:
    """Batches as large as each replica can serve in time, on the fastest idle replica."""
    own = {"order": "edf", "batch": "deadline", "route": "fastest", "drop": "predictive"}
    assert fixed(400, **own).attainment >= 0.99
    overload = fixed(800, **own)
    assert overload.attainment >= 0.65
    usual = fixed(800, order="fifo", batch="work_conserving", route="round_robin", drop="age")
    assert overload.attainment > 3 * usual.attainment
