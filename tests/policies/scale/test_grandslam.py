"""Grandslam as a policy."""

from typing import Any

import pytest

from sloop.errors import InputError
from sloop.policies.scale.fa2 import Fa2
from sloop.policies.scale.grandslam import Grandslam
from tests.policies.scale.two_stages import Stage, View, shown, sizes


def test_fa2s_replicas_and_batches_by_share(stage: Stage, view: View) -> None:
    """Shares of 1000 ms are 200 and 800: batches of more than 8 would fit."""
    assert sizes(Grandslam().plan(0, shown(stage, view, 0.0))) == [(1, 1), (1, 1)]
    own, others = sizes(Grandslam().plan(0, shown(stage, view, 30.0))), sizes(Fa2().plan(0, shown(stage, view, 30.0)))
    assert [count for count, _ in own] == [count for count, _ in others]
    assert [batch for _, batch in own] == [8, 8]
    assert [batch for _, batch in sizes(Grandslam().plan(0, shown(stage, view, 30.0, slo_ms=350)))] == [3, 3]


def test_where_fa2_has_no_answer_it_takes_what_the_rate_needs(stage: Stage, view: View) -> None:
    plan = Grandslam().plan(0, shown(stage, view, 30.0, slo_ms=100))
    assert sizes(plan) == [(2, 1), (6, 1)]
    assert plan is not None
    assert not plan.feasible


@pytest.mark.parametrize(
    "parameters", [{"cores": 0}, {"batch_max": 0}, {"margin": 0}, {"headroom": -1}, {"initial_rps": -1}]
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Grandslam(**parameters)


def test_it_has_fa2s_replicas_also_where_the_nodes_hold_fewer_than_it_takes(stage: Stage, view: View) -> None:
    seen = shown(stage, view, 30.0, cores=5)
    own, others = sizes(Grandslam().plan(0, seen)), sizes(Fa2().plan(0, seen))
    assert [count for count, _ in own] == [count for count, _ in others]
    assert sum(count for count, _ in own) <= 5
