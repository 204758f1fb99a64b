from math import inf

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_application
from sloop.systems import SYSTEMS
from sloop.systems.planning import Need, need
from sloop.systems.setup import set_up

AMDAHL = {"form": "amdahl", "gamma": 10, "epsilon": 0, "delta": 0, "eta": 0}  # 10 ms per request and core
PROFILE = {"latency_ms": AMDAHL, "max_batch": 4, "max_cores": 4, "memory_bytes": 1000}
NODES = {"nodes": [{"hardware": "custom", "cores": 4, "memory_bytes": 10_000, "usd_per_h": 0.5, "count": 2}]}


def planned(rate_rps: float, slo_ms: float = 100, **system: object) -> Need:
    application = load_application(
        {
            "name": "two",
            "slo_ms": slo_ms,
            "stages": [{"name": "a", "profile": PROFILE}, {"name": "b", "profile": PROFILE, "after": ["a"]}],
            "system": {"name": "static", **system},
            "cluster": NODES,
        }
    )
    return need(set_up(application), rate_rps)


def test_counts_cores_money_and_the_longest_path() -> None:
    found = planned(50, cores=2)
    assert found.feasible
    assert found.cores == 4
    assert found.usd_per_h == 0.5  # both replicas fit on the first node
    assert found.predicted_ms == pytest.approx(2 * 5.0)


def test_a_plan_that_cannot_keep_up_is_not_feasible() -> None:
    found = planned(150, cores=1)
    assert not found.feasible
    assert found.predicted_ms == inf
    assert "cannot keep up with 150 requests/s" in found.why


def test_a_plan_beyond_the_deadline_is_not_feasible() -> None:
    assert "exceed the deadline of 15 ms" in planned(50, slo_ms=15, cores=1).why


def test_a_plan_without_room_says_what_does_not_fit() -> None:
    found = planned(50, cores=3, replicas=2)
    assert not found.feasible
    assert "no node has room for 2 of 2 replicas of b/b with 3 cores" in found.why


def test_batches_grow_to_what_the_rate_needs() -> None:
    steps = {"form": "amdahl", "gamma": 1, "epsilon": 9, "delta": 0, "eta": 0}  # 10 ms for one, 13 ms for four
    application = load_application(
        {
            "name": "one",
            "slo_ms": 100,
            "stages": [{"name": "a", "profile": PROFILE | {"latency_ms": steps}}],
            "system": {"name": "static"},
            "cluster": NODES,
        }
    )
    found = need(set_up(application), 200.0)
    assert found.stages[0].predicted_ms == pytest.approx(12 + 10)  # three per batch; two more arrive in 10 ms


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_settles_on_a_plan(name: str) -> None:
    application = load_application(
        {
            "name": "one",
            "slo_ms": 1000,
            "stages": [{"name": "a", "profile": "ResNet-T"}],
            "cluster": {"nodes": [{"hardware": "c5.4xlarge", "count": 4}]},
        }
    )
    told = {each: {"cores": 8} for each in ("static", "early-drop")} | {"vertical-only": {"replicas": 2}}
    choice = SystemChoice(name, told.get(name, {}))
    busy, idle = need(set_up(application, choice), 60.0), need(set_up(application, choice), 0.0)
    assert busy.feasible, busy.why
    assert busy.cores >= idle.cores
    assert busy.predicted_ms < 1000
