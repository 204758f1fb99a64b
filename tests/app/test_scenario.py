"""Scenarios: the defaults of a world nobody described."""

from sloop.app.load import load_scenario
from sloop.app.scenario import ColdStart, ServiceTruth, Truth


def test_defaults() -> None:
    stages = [{"name": "s", "profile": "ResNet-T"}]
    scenario = load_scenario({"name": "a", "slo_ms": 1, "stages": stages, "trace": {"kind": "poisson", "rate": 1}})
    assert scenario.truth == Truth()
    assert scenario.truth.service == ServiceTruth(ratio=None, cv=None)
    assert scenario.truth.cold_start == ColdStart(start_s=10, jitter=0, warm=True)
    assert (scenario.truth.profile_error, scenario.truth.resize_ms, scenario.truth.resize) == (1, 50, "next_batch")
    assert scenario.truth.network is None
    assert scenario.truth.failures is None
    assert (scenario.duration_ns, scenario.seed) == (60 * 10**9, 0)
    assert [system.name for system in scenario.systems] == ["sponge"]
