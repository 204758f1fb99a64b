"""Ds2 as a policy."""

from typing import Any

import pytest

from sloop.errors import InputError
from sloop.policies.scale.ds2 import Ds2
from tests.policies.scale.two_stages import Stage, View, shown, sizes


def test_replicas_by_rate_alone(stage: Stage, view: View) -> None:
    assert sizes(Ds2().plan(0, shown(stage, view, 0.0))) == [(1, 1), (1, 1)]
    plan = Ds2().plan(0, shown(stage, view, 30.0))
    assert sizes(plan) == [(2, 1), (6, 1)]
    assert plan is not None
    assert plan.feasible
    assert plan.why == (
        "30 requests/s → 8 replicas of 1 core: first 2 × batch 1, second 6 × batch 1; "
        "tightest: first → second, 750 of 1000 ms left"
    )


def test_deadlines_change_nothing_but_the_verdict(stage: Stage, view: View) -> None:
    plan = Ds2().plan(0, shown(stage, view, 30.0, slo_ms=100))
    assert sizes(plan) == [(2, 1), (6, 1)]
    assert plan is not None
    assert not plan.feasible
    assert plan.why.endswith("tightest: first → second, 150 ms over its 100 ms")


def test_more_than_the_nodes_hold_is_said(stage: Stage, view: View) -> None:
    plan = Ds2().plan(0, shown(stage, view, 30.0, cores=4))
    assert plan is not None
    assert not plan.feasible
    assert plan.why.endswith("; the nodes hold 4 replicas")


@pytest.mark.parametrize("parameters", [{"cores": 0}, {"headroom": -1}, {"initial_rps": -1}])
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Ds2(**parameters)
