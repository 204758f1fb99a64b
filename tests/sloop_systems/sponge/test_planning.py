"""What `sloop plan` says of Sponge, which plans for requests that all come at the start of a second."""

from typing import Any

import pytest

from sloop.systems.planning import explain_plan
from sloop_systems.sponge import solver
from tests.systems.planning.scene import nodes, profile, setup, stage

SMALL = stage("a", profile=profile(16, 12, batch=4, cores=2))


def test_sponge_plans_for_bursts_and_serves_even_requests() -> None:
    """Two cores take 20 ms for one request and 44 ms for four: plenty at 20 requests/s evenly spaced, too little for 20
    at once within 0.9 of 200 ms. The system's own verdict is reported as such; `feasible` and `one_more` agree."""
    made = setup(SMALL, slo_ms=200, cluster=nodes(2, 1), system="sponge")
    answer = explain_plan(made, 20)
    assert (answer.feasible, answer.arrivals, answer.feasible_arrivals) == (True, "even", ("even",))
    assert (answer.plan_feasible, answer.plan_arrivals) == (False, "burst")
    assert answer.one_more is not None
    assert (answer.one_more.feasible, answer.one_more.summary) == (True, "nothing")
    assert answer.shortfalls == ()
    own = "sponge plans for bursts, all requests of a second at once, within 180 ms (0.9 × 200 ms), and finds no plan"
    assert own in answer.why
    burst = explain_plan(made, 20, "burst")
    assert (burst.feasible, burst.plan_feasible) == (False, False)
    assert burst.one_more is not None
    assert not burst.one_more.feasible
    assert burst.predicted_ms == pytest.approx(5 * 44)


def test_two_verdicts_on_bursts_name_both_limits() -> None:
    """16 at once take 176 + 12 ms: more than sponge's 0.9 × 190 ms, less than the deadline."""
    made = setup(SMALL, slo_ms=190, cluster=nodes(2, 1), system="sponge")
    own, other = explain_plan(made, 16).notes[:2]
    assert "within 171 ms (0.9 × 190 ms), and finds no plan for that" in own
    assert "the plan would be feasible: the longest path would take 176 ms, and the deadline itself is 190 ms" in other


def test_sponge_may_plan_for_even_requests() -> None:
    steady = {"name": "sponge", "criterion": "steady"}
    answer = explain_plan(setup(SMALL, slo_ms=200, cluster=nodes(2, 1), system=steady), 20)
    assert (answer.feasible, answer.plan_feasible, answer.plan_arrivals) == (True, True, "even")
    assert "plans for" not in answer.why


@pytest.mark.parametrize("budget", ["clmax", "per_batch"])
def test_a_huge_rate_costs_sponge_no_more_than_a_large_one(budget: str) -> None:
    """It looks at as many requests as any setting can start in time, not at ten million."""
    made = setup(SMALL, slo_ms=200, cluster=nodes(2, 1), system={"name": "sponge", "budget": budget})
    seen: list[int] = []
    best_effort = solver.best_effort

    def counting(grid: Any, budgets_ms: Any, rate_rps: float) -> Any:
        seen.append(len(budgets_ms))
        return best_effort(grid, budgets_ms, rate_rps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "best_effort", counting)
        answer = explain_plan(made, 1e7)
    assert not answer.feasible
    assert 0 < max(seen) < 100
