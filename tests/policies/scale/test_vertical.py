"""The vertical policy: sizes that follow the rate in place, and a second replica where one is not enough."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from sloop.app.load import load_scenario
from sloop.core.views import Bucket, ClusterView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.scale.vertical import Vertical
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Amdahl, Profile
from sloop.runlog.summary import RunRow
from sloop.sim.scenarios import run_scenario
from sloop.testing.views import make_stage, make_view
from sloop.units import ms, s
from sloop.vocabulary import Plan
from tests.asked import next_plan

FORMS = {"detect": Amdahl(148.8, 5.4, 37.5, -15.5), "classify": Amdahl(34.7, 19.5, 2.1, 14.3)}
FIXED = Vertical(replicas_max=1, throughput="with_queue", margin=1.0)
"""As the system `vertical-only` has it."""


def seen(
    rate_rps: int, *, slo_ms: float = 780, cores: float = 64, plan: Plan | None = None, slack_ms: Sequence[float] = ()
) -> ClusterView:
    """Two stages at a steady rate, -1 before any request; with `slack_ms`, requests of the last second that had so much
    time left when they arrived."""
    buckets = [Bucket(s(t), arrivals=rate_rps) for t in range(10)] if rate_rps >= 0 else []
    if slack_ms:
        buckets[-1].slack_ns = [ms(each) for each in slack_ms]
    stages = [
        make_stage(
            *buckets, name=name, slo_ms=slo_ms, belief=Estimate(Profile(latency_ms=form, max_batch=8, max_cores=8))
        )
        for name, form in FORMS.items()
    ]
    return make_view(*stages, cores=cores, plan=plan)


def sizes(plan: Plan | None) -> list[tuple[float, int]]:
    """Cores and batch of the only replica of each stage."""
    assert plan is not None
    assert all(target.in_place and [group.count for group in target.groups] == [1] for target in plan.stages)
    return [(target.groups[0].spec.cores, target.batch_max) for target in plan.stages]


def test_cores_up_and_down_with_the_rate() -> None:
    policy = Vertical(replicas_max=1, margin=1.0)
    found = [sizes(next_plan(policy, 0, seen(rate))) for rate in (5, 10, 20, 5, 0)]
    assert found == [[(1, 1), (1, 1)], [(2, 1), (1, 1)], [(6, 1), (1, 3)], [(1, 1), (1, 1)], [(1, 1), (1, 1)]]


def test_beyond_what_they_carry_all_that_they_can() -> None:
    plan = next_plan(FIXED, 0, seen(40))
    assert sizes(plan) == [(8, 1), (3, 1)]
    assert plan is not None
    assert not plan.feasible
    assert plan.saturated == ("detect", "classify")
    assert plan.why.endswith("saturated: these carry 24")
    few = sizes(next_plan(FIXED, 0, seen(40, cores=4)))
    assert sum(cores for cores, _ in few) <= 4, "the node bounds them"


def test_before_anything_has_come() -> None:
    assert sizes(next_plan(Vertical(initial_batch=4), 0, seen(-1))) == [(1, 4), (1, 4)]


def test_a_deadline_that_nothing_keeps() -> None:
    first = next_plan(FIXED, 0, seen(10, slo_ms=60))
    assert first is not None
    assert not first.feasible
    assert "6 ms more than the 60 ms" in first.why
    again = next_plan(FIXED, 0, seen(10, slo_ms=60, plan=structs.replace(first, why="kept", feasible=True)))
    assert again is not None
    assert again.stages == first.stages
    assert not again.feasible


def test_what_requests_lose_on_the_network_is_made_up_with_cores() -> None:
    policy = Vertical(replicas_max=1)
    near, far = (sizes(next_plan(policy, 0, seen(4, slack_ms=slack))) for slack in ((780.0, 780.0), (780.0, 300.0)))
    assert sum(cores for cores, _ in near) < sum(cores for cores, _ in far)
    assert sizes(next_plan(policy, 0, seen(4, slack_ms=(780.0, 20.0)))) == near, "nothing could answer that one in time"


@pytest.mark.parametrize(
    "parameters",
    [
        {"replicas": 0},
        {"replicas_max": -1},
        {"calm_ns": -1},
        {"unit": 0},
        {"cores_max": 0},
        {"batch_max": 0},
        {"margin": 0},
        {"initial_batch": 0},
        {"period_ns": 0},
    ],
)
def test_refuses_values_out_of_range(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must be"):
        check_ranges(Vertical(**parameters))


# More replicas


def played(gain: float, nodes: int, cores: int, *, most_rps: float = 80, **system: Any) -> RunRow:
    """A request takes 20 ms, on two cores 20 / `gain`; `most_rps` requests/s come, 20 requests/s before and after."""
    table = {"form": "table", "table": {1: {1: 20.0, 2: 20.0 / gain}}}
    profile: dict[str, Any] = {"latency_ms": table, "max_batch": 1, "load_s": 1}
    scenario = load_scenario(
        {
            "name": "x",
            "slo_ms": 300,
            "stages": [{"name": "a", "profile": profile}],
            "cluster": {"nodes": [{"hardware": "custom", "cores": cores, "count": nodes}]},
            "trace": {"kind": "step", "rates": [20, most_rps, 20, 20], "each_s": 30},
            "duration_s": 120,
            "system": {"name": "elastic"} | system,
        }
    )
    return run_scenario(scenario, scenario.systems[0]).row


@pytest.mark.parametrize(
    ("gain", "nodes", "cores", "system", "least", "starts"),
    [
        pytest.param(2.0, 1, 2, {}, 0.99, 1, id="a larger replica is enough"),
        pytest.param(1.0, 1, 4, {}, 0.95, 2, id="more cores are of no use to one replica"),
        pytest.param(1.0, 2, 1, {}, 0.95, 2, id="a second node"),
        pytest.param(1.0, 2, 1, {"replicas_max": 1}, 0.4, 1, id="never more than allowed"),
    ],
)
def test_more_replicas_only_where_no_size_carries_the_load(
    gain: float, nodes: int, cores: int, system: dict[str, Any], least: float, starts: int
) -> None:
    row = played(gain, nodes, cores, **system)
    assert row.cold_starts == starts
    assert least <= row.attainment


@pytest.mark.parametrize(
    ("gain", "most_rps", "least", "starts"),
    [
        pytest.param(1.3, 80, 0.95, 3, id="two halves; one that may use all cores is replaced"),
        pytest.param(1.02, 80, 0.95, 2, id="two halves carry more than one whole"),
        pytest.param(1.3, 40, 0.99, 1, id="one is enough"),
        pytest.param(1.98, 120, 0.4, 1, id="two carry hardly more"),
    ],
)
def test_replicas_divide_the_only_node_where_they_carry_more_so(
    gain: float, most_rps: float, least: float, starts: int
) -> None:
    row = played(gain, 1, 2, most_rps=most_rps)
    assert row.cold_starts == starts
    assert least <= row.attainment


def test_overloaded_replicas_that_divide_a_node_are_not_late() -> None:
    row = played(1.3, 1, 2, most_rps=160)
    assert row.dropped > 0
    assert row.late <= 0.01 * row.requests
