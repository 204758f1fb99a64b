"""Why nothing is feasible, and what comes nearest."""

import pytest

from sloop.solvers.graph import Way
from sloop.solvers.shortfall import best_effort, reason
from sloop.solvers.variants import Candidate, Choices, Goal

QUICK, SLOW = Candidate(0.5, 1.0, (100.0,)), Candidate(0.9, 2.0, (150.0,))


def stages(rate_rps: float, replicas: int = 0) -> list[Choices]:
    return [Choices(rate_rps, (1,), (QUICK, SLOW), replicas), Choices(rate_rps, (1,), (SLOW,), replicas)]


def goal(slo_ms: float = 400.0, cores_max: float = float("inf"), replicas_max: int = 100) -> Goal:
    return Goal(0.0, 1.0, 1.0, cores_max=cores_max, replicas_max=replicas_max, ways=(Way((0, 1), slo_ms),))


def test_a_way_that_is_too_long_is_named_with_its_slowest_stage() -> None:
    why = reason(stages(5), ("a", "b"), goal(slo_ms=200))
    assert why == "a → b takes at least 250 ms, 50 ms more than there are; b alone 150 ms"


def test_a_stage_that_cannot_keep_up_is_named_with_what_it_would_need() -> None:
    why = reason(stages(100), ("a", "b"), goal(replicas_max=12))
    assert why == "b cannot keep up with 100 requests/s: it needs 15 replicas where 12 are the most"
    assert "where 3 are the most" in reason(stages(100, replicas=3), ("a", "b"), goal())


def test_missing_cores_are_counted() -> None:
    why = reason(stages(20), ("a", "b"), goal(cores_max=4))
    assert why == "at least 8 cores are needed where there are 4; 6 cores of them for b"


def test_without_a_deadline_the_quickest_are_taken() -> None:
    effort = best_effort(stages(20), goal(slo_ms=10))
    assert effort.share == 1.0
    assert [(o.candidate, o.replicas) for o in effort.options] == [(0, 2), (0, 3)]


def test_with_too_few_cores_a_part_of_the_rate_is_served() -> None:
    effort = best_effort(stages(100), goal(cores_max=8))
    assert effort.share == pytest.approx(0.2, abs=1e-4)
    assert sum(option.cores for option in effort.options) <= 8
    alone = best_effort(stages(100), goal(cores_max=1))
    assert alone.share < 1e-3
    assert [option.replicas for option in alone.options] == [1, 1]
