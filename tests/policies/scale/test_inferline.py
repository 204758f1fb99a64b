"""Inferline as a policy."""

from typing import Any

import pytest

from sloop.errors import InputError
from sloop.policies.scale.inferline import Inferline
from tests.policies.scale.two_stages import Stage, View, shown, sizes


def test_the_first_takes_the_time_and_the_second_pays(stage: Stage, view: View) -> None:
    assert sizes(Inferline().plan(0, shown(stage, view, 0.0))) == [(1, 1), (1, 1)]
    plan = Inferline().plan(0, shown(stage, view, 30.0, slo_ms=600))
    assert sizes(plan) == [(1, 8), (6, 1)]
    fuller = Inferline(full=True).plan(0, shown(stage, view, 30.0, slo_ms=600))
    assert sum(count for count, _ in sizes(fuller)) < 7
    assert plan is not None
    assert plan.feasible
    assert [target.wait_ns > 0 for target in plan.stages] == [True, False]


@pytest.mark.parametrize(
    "parameters", [{"cores": 0}, {"batch_max": 0}, {"margin": 0}, {"headroom": -1}, {"initial_rps": -1}]
)
def test_refuses_what_cannot_be(parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="out of range"):
        Inferline(**parameters)
